"""A mixture of experts with MXFP4 weights as one call."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from deep_gemm.runtime.calls import Parameter, make_entry

from ..errors import InvalidInputError
from ..kernels.moe_kernels import GATED
from ..spec import SCALE_BLOCK, ceil_div
from . import checks, fp4_weights, layouts, moe_chain, mxfp4
from .chain import Layout, Link, Links, Named, pair
from .fp4 import Fp4Gemm
from .moe_chain import ALIGNMENT, BF16, F32, I32, MOST_MASKED, MoeChain
from .moe_rows import OPTIONAL, TENSOR, Activate, Combine, Dispatch

OAI_LIMIT = 7.0
"""Of gpt-oss's activation."""

GATE_UP, DOWN = ("gate_up", "the factors of gate_up"), ("down", "the factors of down")
_BIASES = ("gate_up_bias", "down_bias")
_TITLES = {
    "x_scales": "the scales of x",
    **{f"{name}_factors": f"the factors of {name}" for name in ("gate_up", "down")},
    **{f"{name}_bias": f"the bias of {name}" for name in ("gate_up", "down")},
}
"""What messages call them."""


@functools.cache
def _dispatch(given: tuple[str, ...], cast: bool) -> Dispatch:
    return Dispatch(given, cast)


@functools.cache
def _product(kind: str, masked: bool) -> Fp4Gemm:
    return Fp4Gemm(kind, "masked" if masked else "contiguous")


@functools.cache
def _activate(function: str, fp8: bool, biased: bool) -> Activate:
    return Activate(function, fp8, biased)


@functools.cache
def _combine(biased: bool) -> Combine:
    return Combine(True, biased)


def expected_rows(choices: int, experts: int) -> int:
    """Of an expert in the masked form, so that most have no more if choices are random: where tiles have fewer rows, an
    expert's weights are decoded twice."""
    mean = choices / experts
    return max(1, math.ceil(mean + 2 * math.sqrt(mean)))


class Fp4Experts(MoeChain):
    """See `deep_gemm.fp8_fp4_moe` and `deep_gemm.bf16_fp4_moe`. Weights are those of `transform_fp4_weights`.
    ``given``: those of x_scales and the biases that are there."""

    def __init__(self, kind: str, given: tuple[str, ...]) -> None:
        self.kind, self.name, fp8 = kind, f"{kind}_fp4_moe", kind == "fp8"
        weights = "gate_up", "gate_up_factors", "down", "down_factors"
        optional = (*(["x_scales"] if fp8 else []), *_BIASES)
        names = "x", "topk_idx", "topk_weights", *weights, "y"
        self.parameters = (
            *(Parameter(name, TENSOR) for name in names),
            *(Parameter(name, OPTIONAL, None) for name in optional),
            Parameter("activation", "str", choices=tuple(GATED)),
            Parameter("clamp", "float"),
        )
        self.absent = tuple(name for name in optional if name not in given)
        self.operands = {_TITLES.get(name, name): name for name in (*names, *given)}
        self.ranks = MappingProxyType({"gate_up": (4,), "down": (4,)})
        self.outputs = ("y",)
        self.unsigned = ("topk_idx", "gate_up", "down", *(["x"] if "x_scales" in given else []))

    def links(self, given: Mapping[str, Any]) -> Links:
        """Dispatch, the product with gate and up, the activation, the product with down, and the sums."""
        inner = self._check(given)
        # The number of fake tokens may be unknown. Without tokens nothing writes the counts that products read.
        if checks.is_fake([given["x"]]) or given["x"].shape[0] == 0:
            return Links((), Layout(), Layout(), False)
        (tokens, top_k), experts, width = given["topk_idx"].shape, given["gate_up"].shape[0], given["x"].shape[1]
        choices, masked, fp8 = tokens * top_k, tokens <= MOST_MASKED, self.kind == "fp8"
        biased, function = given["gate_up_bias"] is not None, given["activation"]
        rows = moe_chain.rows_of(given["x"], choices, experts, masked)
        scratch = self._memory(rows, tokens, top_k, experts, width, inner)

        def operand(name: str) -> str | tuple[str, str]:
            return pair(name) if fp8 else name

        sent: Named = {"x": "x", "chosen": "topk_idx", "layout": "layout", "places": "places", "out": operand("a")}
        has_scales = given.get("x_scales") is not None
        sent |= {"sfx": _TITLES["x_scales"]} if has_scales else {}
        links = [Link(_dispatch(("sfx",) if has_scales else (), fp8), sent, {"alignment": ALIGNMENT})]
        form: Named = {"masked_m" if masked else "grouped_layout": "layout"}
        how: dict[str, Any] = {"use_psum_layout": True, "alignment": ALIGNMENT}
        if masked:
            how = {"expected_m": min(tokens, expected_rows(choices, experts))}
        product = _product(self.kind, masked)
        links.append(Link(product, {"a": operand("a"), "b": GATE_UP, **form, "d": "hidden"}, how))
        of_rows: Named = {"x": "hidden", "places": "places", "out": operand("h")}
        added: Named = {"x": "results", "places": "places", "weights": "topk_weights", "y": "y"}
        if biased:
            of_rows |= {"chosen": "topk_idx", "bias": _TITLES["gate_up_bias"]}
            added |= {"chosen": "topk_idx", "bias": _TITLES["down_bias"]}
        links.append(Link(_activate(function, fp8, biased), of_rows, {"limit": float(given["clamp"])}))
        links.append(Link(product, {"a": operand("h"), "b": DOWN, **form, "d": "results"}, how))
        links.append(Link(_combine(biased), added, {}))
        return Links(links, scratch, Layout(), False)

    def _memory(self, rows: tuple[int, ...], tokens: int, top_k: int, experts: int, width: int, inner: int) -> Layout:
        """The scratch memory. Results of experts lie where their tokens were."""
        found = Layout().add_tensor("layout", (experts,), I32).add_tensor("places", (tokens, top_k), I32)
        found.add_tensor("hidden", (*rows, 2 * inner), BF16)
        for name, columns in (("h", inner), ("a", width)):
            if self.kind == "fp8":
                moe_chain.add_cast(found, name, rows, columns)
            else:
                found.add_tensor(name, (*rows, columns), BF16)
        return found.add_tensor("results", (*rows, width), BF16, over="a")

    def _check(self, given: Mapping[str, Any]) -> int:
        """Check dtypes, shapes and places of what users give. Returns the size inside an expert."""
        x, sfx, y = given["x"], given.get("x_scales"), given["y"]
        if self.kind == "fp8":
            moe_chain.check_kind(x, sfx)
        elif x.dtype != BF16:
            raise InvalidInputError(f"x must be {BF16}, but it is {x.dtype}. Pass x.bfloat16().")
        (tokens, width), (experts, pieces, *_) = x.shape, given["gate_up"].shape
        if width % mxfp4.BLOCK or width == 0:
            raise InvalidInputError(
                f"the width of x must be a positive multiple of {mxfp4.BLOCK}, the values of MXFP4 that share a scale, "
                f"but x is {checks.shape_of(x)}."
            )
        moe_chain.check_count(experts)
        inner = pieces * fp4_weights.ROWS // 2
        packed: dict[str, Any] = {"gate_up": (2 * inner, width), "down": (width, inner)}
        for name, (n, k) in packed.items():
            weights = given[name], given[f"{name}_factors"]
            fp4_weights.check(*weights, self.kind, n, k, experts, name)
            if not checks.is_fake(weights):
                fp4_weights.check_contiguous({name: weights[0], f"the factors of {name}": weights[1]})
                layouts.check_start(name, weights[0])
        biases = {name: (given[f"{name}_bias"], BF16, (experts, n)) for name, (n, _) in packed.items()}
        wanted: dict[str, tuple[Any, torch.dtype, tuple[int, ...]]] = {
            "x": (x, x.dtype, (tokens, width)),
            "the scales of x": (sfx, F32, (tokens, ceil_div(width, SCALE_BLOCK))),
            **{f"the bias of {name}": each for name, each in biases.items()},
            "y": (y, BF16, (tokens, width)),
        }
        moe_chain.check_wanted(given, wanted)
        for name, (tensor, *_) in biases.items():
            if tensor is not None and not checks.is_fake([tensor]):
                fp4_weights.check_contiguous({f"the bias of {name}": tensor})
                layouts.check_start(f"the bias of {name}", tensor)
        return inner


def _entry(kind: str, optional: tuple[str, ...]) -> Any:
    given = [(*scales, *biases) for scales in dict.fromkeys(((), optional)) for biases in ((), _BIASES)]
    return make_entry(*(Fp4Experts(kind, each) for each in given))


fp8, bf16 = _entry("fp8", ("x_scales",)), _entry("bf16", ())
"""Arguments: x, topk_idx, topk_weights, gate_up and its factors, down and its factors, y, for FP8 the scales of x or
None, the biases of gate_up and of down or None, activation, clamp (infinite for none)."""
