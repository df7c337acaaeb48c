"""A mixture of experts without its router, as one call: tokens go to their experts, two grouped products with SwiGLU
between them, and each token's results are added."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from deep_gemm.runtime.calls import Parameter, make_entry
from deep_gemm.runtime.operation import Fault

from .. import arch
from ..errors import InvalidInputError, UnsupportedError
from ..kernels.moe_kernels import DISPATCH, MOST_EXPERTS
from ..parts import EIGHT, SWIGLU, Parts
from ..spec import SCALE_BLOCK, align, ceil_div
from . import checks, layouts
from .chain import Chain, Layout, Link, Links, Named, pair
from .checks import MAX_SIZE, shape_of
from .epilogue import is_float32
from .layouts import TMA_BYTES
from .m_grouped import MGrouped
from .moe_rows import OPTIONAL, TENSOR, Combine, Dispatch, most_rows
from .row_functions import RowFunction
from .table import M_FP8, M_FP8_MASKED

MOST_MASKED = 64
"""Tokens up to which each expert has a part of as many rows, so that the form for decoding can be used. Tiles of 64 and
128 rows hold any expert then. With more tokens parts would need more memory than padding does."""

ALIGNMENT = 128
"""Of an expert's first row otherwise: the height of the tiles that cast their result to FP8."""

E4M3, BF16, F32, I32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int32
GATE_UP, DOWN = ("gate_up", "the scales of gate_up"), ("down", "the scales of down")

_TITLES = {f"{name}_scales": f"the scales of {name}" for name in ("x", "gate_up", "down")}
"""What messages call scales."""


@functools.cache
def _dispatch(given: tuple[str, ...]) -> Dispatch:
    return Dispatch(given)


@functools.cache
def _product(masked: bool, *fused: str) -> MGrouped:
    return MGrouped(M_FP8_MASKED if masked else M_FP8, epilogue_tensors=fused or None)


@functools.cache
def _combine(weighted: bool) -> Combine:
    return Combine(weighted)


@functools.cache
def _silu_and_mul() -> RowFunction:
    return RowFunction("silu_and_mul", True, ())


class MoeChain(Chain):
    """What mixtures share, whatever their weights are: topk_idx and topk_weights, from x to y."""

    output = "y"
    floats = ("clamp",)
    settings = ("check", "forbid_transpose")

    def faults(self, x: Any) -> Sequence[Fault]:
        """Choices that are no experts, and those that repeat one."""
        chosen, experts = x.tensors["topk_idx"], x.tensors["gate_up"].shape[0]
        ordered = chosen.sort(1).values
        again = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0) & (ordered[:, 1:] < experts)

        def unknown(token: int, choice: int) -> str:
            return (
                f"topk_idx[{token}, {choice}] is {int(chosen[token, choice])}, but experts are from 0 to "
                f"{experts - 1}, and -1 or {experts} is none."
            )

        def repeated(token: int, place: int) -> str:
            return (
                f"topk_idx[{token}] has the expert {int(ordered[token, place])} more than once, but experts of a token "
                "must differ. Pass -1 in place of the others, and the sum of their weights."
            )

        return [Fault((chosen < -1) | (chosen > experts), unknown), Fault(again, repeated)]


class Experts(MoeChain):
    """See `deep_gemm.fp8_moe`. ``given``: those of x_scales and stats that are there. The number of rows of each expert
    is added to stats.

    ``as_deepgemm``: of gate_up eight rows are gate's and eight up's in turn, its scales as they are, and a router's
    weight multiplies the result of SwiGLU before it is cast; otherwise the expert's row, which was rounded to bfloat16,
    in float32.
    """

    name = "fp8_moe"
    parameters = (
        *(Parameter(name, TENSOR) for name in ("x", "topk_idx", "topk_weights")),
        *(Parameter(name, TENSOR) for name in ("gate_up", "gate_up_scales", "down", "down_scales", "y")),
        *(Parameter(name, OPTIONAL, None) for name in ("x_scales", "stats")),
        Parameter("clamp", "float"),
        Parameter("as_deepgemm", "bool"),
    )
    ranks = MappingProxyType({**dict.fromkeys((*GATE_UP, *DOWN), (3,)), "stats": (1,)})
    kept = ("stats",)

    def __init__(self, given: tuple[str, ...]) -> None:
        self.absent = tuple(name for name in ("x_scales", "stats") if name not in given)
        names = "x", "topk_idx", "topk_weights", "gate_up", "gate_up_scales", "down", "down_scales", "y", *given
        self.operands = {_TITLES.get(name, name): name for name in names}
        self.outputs = ("y", "stats") if "stats" in given else ("y",)
        self.unsigned = ("topk_idx", "gate_up", "down", *(["x"] if "x_scales" in given else []))

    def links(self, given: Mapping[str, Any]) -> Links:
        """Dispatch, the product with gate and up, SwiGLU if it is a launch of its own, the product with down, and the
        sums."""
        _check(given)
        # The number of fake tokens may be unknown. Without tokens nothing writes the counts that products read.
        if checks.is_fake([given["x"]]) or given["x"].shape[0] == 0:
            return Links((), Layout(), Layout(), False)
        (tokens, top_k), (experts, double, width) = given["topk_idx"].shape, given["gate_up"].shape
        inner, choices, before = double // 2, tokens * top_k, bool(given["as_deepgemm"])
        fused = inner % SCALE_BLOCK == 0
        masked = tokens <= MOST_MASKED and fused
        rows = rows_of(given["x"], choices, experts, masked)
        scratch = memory_of_rows(Layout(), rows, tokens, top_k, experts, width, inner, before, fused)

        sent: Named = {"x": "x", "chosen": "topk_idx", "layout": "layout", "places": "places", "out": pair("a")}
        sent |= {"sfx": _TITLES["x_scales"]} if given["x_scales"] is not None else {}
        sent |= {"weights": "topk_weights", "factors": "factors"} if before else {}
        sent |= {"stats": "stats"} if given["stats"] is not None else {}
        links = send_and_multiply(sent, masked, fused, before, float(given["clamp"]), ceil_div(choices, experts))
        added: Named = {"x": "results", "places": "places", "y": "y"}
        links.append(Link(_combine(not before), added | ({} if before else {"weights": "topk_weights"}), {}))
        return Links(links, scratch, Layout(), False)


def runs_on(device: torch.device) -> bool:
    """Whether a GPU has the kernels of these calls. A CPU computes references."""
    if device.type != "cuda":
        return True
    try:
        return arch.for_device(device.index).name in DISPATCH.archs
    except UnsupportedError:
        return False


runs_on._dynamo_marked_constant = True  # type: ignore[attr-defined]
"""As `register` in runtime/operators.py."""


def rows_of(x: Tensor, choices: int, experts: int, masked: bool) -> tuple[int, ...]:
    """How many rows there are for the choices of tokens x, of each expert if they are masked."""
    rows = (experts, align(max(x.shape[0], 1), 4)) if masked else (most_rows(choices, experts, ALIGNMENT),)
    if math.prod(rows) > MAX_SIZE or x.numel() > MAX_SIZE:
        raise UnsupportedError(f"x is {shape_of(x)}, with {choices} choices: too many. Split the call.")
    return rows


def send_and_multiply(sent: Named, masked: bool, fused: bool, before: bool, limit: float, expected: int) -> list[Link]:
    """Dispatch, the product with gate and up, SwiGLU if it is a launch of its own, and the product with down, whose
    result is ``results``. ``sent``: the tensors of dispatch; ``expected``: rows of an expert."""
    of_dispatch = tuple(name for name in ("sfx", "weights", "stats") if name in sent)
    links = [Link(_dispatch(of_dispatch), sent, {"alignment": ALIGNMENT})]
    form: Named = {"masked_m" if masked else "grouped_layout": "layout"}
    how: dict[str, Any] = {"use_psum_layout": True, "alignment": ALIGNMENT}
    if masked:
        how = {"expected_m": max(1, expected)}
    first: Named = {"a": pair("a"), "b": GATE_UP, **form}
    if fused:
        parts = Parts(
            row_factor=before,
            activation=SWIGLU,
            clamp=None if limit == math.inf else limit,
            cast="1x128",
            interleaved=EIGHT if before else 0,
        )
        first |= {"d": "h", "sfd": "sf h"} | ({"row_factor": "factors"} if before else {})
        links.append(Link(_product(masked, *parts.tensors), first, {**how, "epilogue": str(parts)}))
    else:
        gated: Named = {"x": "hidden", "out": pair("h")}
        activation = {"interleaved": False, "limit": limit, "use_ue8m0": False}
        links.append(Link(_product(masked), {**first, "d": "hidden"}, how))
        links.append(Link(_silu_and_mul(), gated, activation))
    links.append(Link(_product(masked), {"a": pair("h"), "b": DOWN, **form, "d": "results"}, how))
    return links


def memory_of_rows(
    found: Layout,
    rows: tuple[int, ...],
    tokens: int,
    top_k: int,
    experts: int,
    width: int,
    inner: int,
    has_factors: bool,
    fused: bool,
) -> Layout:
    """Add the scratch memory of rows to ``found``. Results of experts lie where their tokens were."""
    found.add_tensor("layout", (experts,), I32).add_tensor("places", (tokens, top_k), I32)
    if has_factors:
        found.add_tensor("factors", rows, F32)
    add_cast(found, "h", rows, inner)
    if not fused:
        found.add_tensor("hidden", (*rows, 2 * inner), BF16)
    add_cast(found, "a", rows, width)
    return found.add_tensor("results", (*rows, width), BF16, over="a")


def add_cast(found: Layout, name: str, rows: tuple[int, ...], columns: int) -> None:
    """Add rows in E4M3, and their scales as products read them, to a layout."""
    found.add_tensor(name, (*rows, columns), E4M3)
    *groups, height = rows
    blocks, step = ceil_div(columns, SCALE_BLOCK), align(height, 4)
    strides = (*(blocks * step for _ in groups), 1, step)
    found.add_tensor(f"sf {name}", (*rows, blocks), F32, strides)


def _check(given: Mapping[str, Any]) -> None:
    """Check dtypes, shapes and places of what users give."""
    x, sfx, y, stats = (given[name] for name in ("x", "x_scales", "y", "stats"))
    check_kind(x, sfx)
    gate_up, sf_gate_up, down, sf_down = (given[name] for name in ("gate_up", "gate_up_scales", "down", "down_scales"))
    (experts, double, width), tokens = gate_up.shape, x.shape[0]
    inner = double // 2
    for name, size in (("the last dimension of gate_up", width), ("half of the rows of gate_up", double / 2)):
        if size % TMA_BYTES or size < TMA_BYTES:
            raise InvalidInputError(f"{name} must be a multiple of {TMA_BYTES}, but it is {size:g}.")
    if given["as_deepgemm"] and inner % SCALE_BLOCK:
        raise UnsupportedError(
            f"half of the rows of gate_up must be a multiple of {SCALE_BLOCK} if gate and up alternate by {EIGHT}, but "
            f"it is {inner}."
        )
    check_count(experts)
    blocks, of_inner = ceil_div(width, SCALE_BLOCK), ceil_div(inner, SCALE_BLOCK)
    wanted: dict[str, tuple[Any, torch.dtype, tuple[int, ...]]] = {
        "x": (x, x.dtype, (tokens, width)),
        "the scales of x": (sfx, F32, (tokens, blocks)),
        "gate_up": (gate_up, E4M3, (experts, double, width)),
        "the scales of gate_up": (sf_gate_up, F32, (experts, ceil_div(double, SCALE_BLOCK), blocks)),
        "down": (down, E4M3, (experts, width, inner)),
        "the scales of down": (sf_down, F32, (experts, blocks, of_inner)),
        "y": (y, BF16, (tokens, width)),
        "stats": (stats, I32, (experts,)),
    }
    check_wanted(given, wanted)


def check_kind(x: Tensor, sfx: Tensor | None) -> None:
    """Check the dtype of tokens that are cast, or have scales."""
    if x.dtype != (BF16 if sfx is None else E4M3):
        raise InvalidInputError(
            f"x must be {BF16}, or a pair of {E4M3} and its scales, but it is {x.dtype}. Pass x.bfloat16()."
        )


def check_count(experts: int) -> None:
    """Check the number of experts."""
    if not 1 <= experts <= MOST_EXPERTS:
        raise UnsupportedError(f"gate_up has {experts} experts, but from 1 to {MOST_EXPERTS} are supported.")


def check_wanted(given: Mapping[str, Any], wanted: dict[str, tuple[Any, torch.dtype, tuple[int, ...]]]) -> None:
    """Check what is ``given`` to a mixture. ``wanted`` are tensors, their dtypes and shapes, but those of the choices,
    which are the same for all mixtures."""
    x, y, chosen, weights = (given[name] for name in ("x", "y", "topk_idx", "topk_weights"))
    sfx, stats, tokens, top_k = given.get("x_scales"), given.get("stats"), x.shape[0], chosen.shape[1]
    wanted = {
        "x": wanted["x"],
        "topk_idx": (chosen, torch.int64, (tokens, top_k)),
        "topk_weights": (weights, F32, (tokens, top_k)),
        **wanted,
    }
    check_each(wanted)
    if top_k == 0:
        raise InvalidInputError("topk_idx must have a choice for each token, but it has no columns.")
    check_clamp(given["clamp"])
    if checks.is_fake([each for each, *_ in wanted.values() if each is not None]):
        return
    for name, tensor in (("topk_idx", chosen), ("topk_weights", weights), ("stats", stats)):
        if tensor is not None and not tensor.is_contiguous():
            raise InvalidInputError(
                f"{name} must be contiguous, but its strides are {tensor.stride()}. Pass .contiguous()."
            )
    if tokens and x.stride(1) != 1:
        raise InvalidInputError(f"rows of x must be contiguous, but its strides are {x.stride()}. Pass .contiguous().")
    if tokens:
        checks.check_row_major("y", y)
    for name, tensor in (("y", y), *([("x", x)] if sfx is not None else [])):
        if tokens:
            layouts.check_stride(name, tensor, tensor.stride(0) if tokens > 1 else 0)
    if stats is not None and stats.numel():
        others = {name: tensor for name, (tensor, *_) in wanted.items() if tensor is not None and name != "stats"}
        checks.check_no_overlap("stats", stats[None], others)


def check_each(wanted: Mapping[str, tuple[Any, torch.dtype, tuple[int, ...]]]) -> None:
    """Check the dtype and the shape of each tensor, or None."""
    for name, (tensor, dtype, shape) in wanted.items():
        if tensor is not None and (tensor.dtype != dtype or tuple(tensor.shape) != shape):
            verb = "they are" if "scales" in name or name == "topk_weights" else "it is"
            raise InvalidInputError(f"{name} must be {dtype} {shape}, but {verb} {tensor.dtype} {shape_of(tensor)}.")


def check_clamp(clamp: Any) -> None:
    """Check a limit of SwiGLU, infinite for none."""
    is_number = isinstance(clamp, (int, float)) and (clamp == math.inf or is_float32(clamp))
    if not (is_number and clamp >= 0):
        raise InvalidInputError(f"clamp must be None or a number from 0 on, but it is {checks.shown(clamp)}.")


_GIVEN: tuple[tuple[str, ...], ...] = ((), ("x_scales",), ("stats",), ("x_scales", "stats"))
experts = make_entry(*(Experts(given) for given in _GIVEN))
"""Arguments: x, topk_idx, topk_weights, gate_up and its scales, down and its scales, y, the scales of x or None, stats
or None, clamp (infinite for none), as_deepgemm."""
