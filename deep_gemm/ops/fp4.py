"""Products of MXFP4 weights with activations in FP8 or BF16, alone and grouped by M: checks, launches and reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from deep_gemm.ops.cast_reference import dequantise
from deep_gemm.ops.reference import b16_gemm_reference, group_rows, plain_arithmetic
from deep_gemm.runtime.calls import KernelOperation, LaunchSequence, Parameter, Step, make_entry

from .. import options
from ..errors import InvalidInputError, UnsupportedError
from ..kernels.sm90_fp4_gemm import FP4, TOKENS, many
from ..records import record
from ..runtime.operation import Fault
from ..spec import SCALE_BLOCK, Fp4Spec, ceil_div
from . import checks, device_values, fp4_weights, layouts, m_grouped, mxfp4, scales
from .checks import shape_of

RECIPES = (1, SCALE_BLOCK), (1, mxfp4.BLOCK)
FACTORS = "the factors of b"


@record(frozen=True, eq=False)
class Fp4Operands:
    """Checked operands. ``size`` is the alignment of groups, or in the masked form the expected rows of a group."""

    tensors: Mapping[str, Tensor]
    device: torch.device
    m: int
    n: int
    k: int
    groups: int
    grouping: str
    size: int


class Fp4Gemm(KernelOperation):
    """See `deep_gemm.fp8_fp4_gemm_nt`, and the products in groups. b is a pair of `transform_fp4_weights`."""

    output = "d"
    weights = ("b", "sfb")

    def __init__(self, activations: str, grouping: str) -> None:
        self.activations, self.grouping = activations, grouping
        end = "" if grouping == "none" else f"_{grouping}"
        self.name = f"{'' if grouping == 'none' else 'm_grouped_'}{activations}_fp4_gemm_nt{end}"
        self.is_scaled = activations == "fp8"
        self.layout = {"none": "", "masked": "masked_m"}.get(grouping, "grouped_layout")
        pair = "tuple[Tensor, Tensor]"
        found = [Parameter("a", pair if self.is_scaled else "Tensor"), Parameter("b", pair), Parameter("d", "Tensor")]
        if self.layout:
            found.append(Parameter(self.layout, "Tensor"))
        if grouping == "masked":
            found.append(Parameter("expected_m", "int"))
        if grouping == "contiguous":
            found.append(Parameter("use_psum_layout", "bool", False))
            found.append(Parameter("alignment", "int", checks.DEFAULT_ALIGNMENT, "internal"))
        self.parameters = tuple(found)
        self.operands = {"a": "a[0]", "sfa": "a[1]"} if self.is_scaled else {"a": "a"}
        self.operands |= {"b": "b[0]", "sfb": "b[1]"} | ({"layout": self.layout} if self.layout else {}) | {"d": "d"}
        self.unsigned = (*(("a",) if self.is_scaled else ()), "b", *(("layout",) if self.layout else ()))
        self.settings = ("check",) if self.layout else ()
        self.kept = ("d",) if self.layout else ()  # rows past a group's last

    def axes(self, form: str | None) -> Mapping[str, str]:
        """See `KernelOperation.axes`. Rows may be divided, or whole groups; not pieces of b, nor rows with labels."""
        forms = {
            "none": {"a": "mK", "b": "NKB", "d": "mN"},
            "masked": {"a": "gMK", "b": "gNKB", "d": "gMN", self.layout: "g"},
        }
        return forms.get(self.grouping, {})

    def check(self, *arguments: Any, **named_arguments: Any) -> Fp4Operands | None:
        """None for fake tensors, and where there is nothing to compute."""
        given = self.given(arguments, named_arguments)
        named: dict[str, Any] = {}
        if self.is_scaled:
            named["a"], named["the scales of a"] = checks.pair("a", given["a"])
        else:
            named["a"] = given["a"]
        named["b"], named[FACTORS] = checks.pair("b", given["b"], "transform_fp4_weights returns such pairs.")
        if self.layout:
            named[self.layout] = given[self.layout]
        named["d"] = given["d"]
        grouping, size = self._form(given)
        masked, grouped = grouping == "masked", grouping != "none"
        rank = 2 + masked
        ranks = {"b": (3 + grouped,), FACTORS: (1 + grouped,), self.layout: (1,)}
        device = checks.check_tensors(self.name, named, ranks, (rank,), ("d",))
        a, b, d = named["a"], named["b"], named["d"]
        groups = self._check_shapes(named, grouping)
        m, n, k = d.shape[-2], d.shape[-1], a.shape[-1]
        if checks.is_fake(named.values()):
            return None
        if 0 in (m, n, groups):
            return None
        fp4_weights.check_contiguous({name: named[name] for name in ("b", FACTORS)})
        layouts.check_start("b", b)
        layouts.check_k_major("a", a)
        if layouts.flat_stride(d) is None:
            raise InvalidInputError(
                f"d must be row-major, with rows of its own and each group right after the one before, but it is "
                f"{shape_of(d)} with strides {d.stride()}. Pass .contiguous()."
            )
        checks.check_no_overlap("d", layouts.flat(d), {name: x for name, x in named.items() if name != "d"})
        tensors = dict(zip(self.operands, named.values(), strict=True))
        return Fp4Operands(tensors, device, m, n, k, groups, grouping, size)

    def _form(self, given: Mapping[str, Any]) -> tuple[str, int]:
        """The form of groups, and their alignment or expected rows."""
        if self.grouping == "masked":
            return "masked", expected_m(given["expected_m"])
        if self.grouping == "none":
            return "none", 1
        checks.check_bool("use_psum_layout", given["use_psum_layout"])
        return "psum" if given["use_psum_layout"] else "contiguous", checks.check_alignment(given["alignment"])

    def _check_shapes(self, named: Mapping[str, Tensor], grouping: str) -> int:
        """Check dtypes and shapes, also of fake tensors. Returns the number of groups."""
        a, b, d = named["a"], named["b"], named["d"]
        k, n = a.shape[-1], d.shape[-1]
        if self.is_scaled:
            scales.check_e4m3("a", a)
            scales.check_scales_dtype("a", named["the scales of a"])
        elif a.dtype != torch.bfloat16:
            raise InvalidInputError(f"a must be torch.bfloat16, but it is {a.dtype}. Pass a.to(torch.bfloat16).")
        if d.dtype != torch.bfloat16:
            raise InvalidInputError(f"d must be torch.bfloat16, but it is {d.dtype}. Pass a bfloat16 d.")
        if k % mxfp4.BLOCK or k == 0:
            raise InvalidInputError(
                f"K must be a positive multiple of {mxfp4.BLOCK}, the values of MXFP4 that share a scale, but a is "
                f"{shape_of(a)}."
            )
        if tuple(d.shape[:-1]) != tuple(a.shape[:-1]):
            raise InvalidInputError(f"a and d must agree in M, but a is {shape_of(a)} and d is {shape_of(d)}.")
        groups = 1 if grouping == "none" else b.shape[0]
        if grouping == "masked" and a.shape[0] != groups:
            raise InvalidInputError(
                f"a and b must agree in the number of groups, but a is {shape_of(a)} and b has {groups}."
            )
        fp4_weights.check(b, named[FACTORS], self.activations, n, k, None if grouping == "none" else groups)
        if self.layout:
            layout = named[self.layout]
            checks.check_int32(self.layout, layout)
            length, what = (a.shape[0], "row of a") if grouping == "contiguous" else (groups, "group of b")
            if tuple(layout.shape) != (length,):
                raise InvalidInputError(
                    f"{self.layout} must have the shape {(length,)}, one number for each {what}, but it has "
                    f"{shape_of(layout)}."
                )
        if self.is_scaled:
            blocks = ceil_div(k, SCALE_BLOCK)
            of_a = f"one per row per {SCALE_BLOCK} of K of a"
            scales.check_scales_shape("a", named["the scales of a"], (*a.shape[:-1], blocks), of_a)
        for name in ("a", "d"):
            checks.check_sizes(name, named[name])
        return groups

    def launches(self, x: Fp4Operands, device: int) -> LaunchSequence:
        """One launch, after one that transposes scales if TMA cannot read them."""
        prepared = layouts.Preparation({name: name for name in x.tensors})
        d = x.tensors["d"]
        rows = layouts.flat(d)
        prepared.strides["a"] = (layouts.check_k_major("a", x.tensors["a"]), 1)
        prepared.strides["d"] = (layouts.flat_stride(d) or 0, 1)
        if self.is_scaled:
            prepared.add_row_scales("sfa", x.tensors["sfa"])
        for name in ("b", "sfb", *(("layout",) if self.layout else ())):
            prepared.strides[name] = x.tensors[name].stride()
        spec = Fp4Spec(
            *(x.m, x.n, x.k, "e4m3" if self.is_scaled else "bf16"),
            absolute=fp4_weights.is_absolute(x.tensors["b"]),
            groups=x.groups,
            grouping=x.grouping,
            alignment=x.size if x.grouping in ("contiguous", "psum") else 1,
            expected_m=min(x.size, x.m) if x.grouping == "masked" else 0,
            aligned=layouts.tma_writable(rows),
            num_sms=options.num_sms_for(device),
            whole_gpu=options.whole_gpu(device),
            batch_invariant=options.get_batch_invariant(),
        )
        operands = dict(prepared.operands)
        if size := FP4.workspace_bytes(spec):
            prepared.scratch["workspace"] = (size,), torch.uint8
            operands["workspace"] = "workspace"
        return LaunchSequence((*prepared.steps, Step(spec, prepared.strides, operands)), prepared.scratch)

    def faults(self, x: Fp4Operands) -> Sequence[Fault]:
        """Labels, ends or counts."""
        layout = x.tensors["layout"]
        if x.grouping == "masked":
            return device_values.counts(self.layout, layout, x.m, "rows of a group")
        if x.grouping == "psum":
            return device_values.ends(layout, x.m, x.size)
        return device_values.labels(layout, x.groups, x.size)

    def reference(self, x: Fp4Operands) -> None:
        """Products of the decoded weights, with float64 sums. In the index form, rows without a group become zeros."""
        with plain_arithmetic(x.device):
            a, b, factors, d = x.tensors["a"], x.tensors["b"], x.tensors["sfb"], x.tensors["d"]
            if self.is_scaled:
                flat, of_a = a.flatten(0, -2), x.tensors["sfa"].flatten(0, -2)
                values = dequantise(flat, of_a, (1, SCALE_BLOCK), torch.float64)
            else:
                values = a.flatten(0, -2)
            rows = layouts.flat(d)
            if x.grouping == "none":
                b16_gemm_reference(values, fp4_weights.restored(b, factors, x.n, x.k), rows)
                return
            for group, where in group_rows(x.tensors["layout"], x.grouping, x.m, x.size):  # type: ignore[arg-type]
                if group < 0:
                    rows[where] = 0
                elif where.stop > where.start:
                    b16_gemm_reference(
                        values[where], fp4_weights.restored(b[group], factors[group], x.n, x.k), rows[where]
                    )

    def special(self, x: Fp4Operands) -> str:
        """No other library of the registry reads these weights."""
        return "MXFP4 weights"

    def shape(self, x: Fp4Operands) -> str:
        """The sizes of a call, for reports."""
        return f"{x.m}x{x.n}x{x.k}{f' in {x.groups} groups' if self.layout else ''}"

    def flops(self, x: Fp4Operands) -> int:
        """Of all rows, or in the masked form of those that are expected."""
        rows = x.groups * min(x.size, x.m) if x.grouping == "masked" else x.m
        return 2 * rows * x.n * x.k


def expected_m(value: Any) -> int:
    """An estimate of the rows of a group, rounded up to a tile's height, or above all of them to a power of two."""
    known = m_grouped.check_expected_m("expected_m", value)
    tiles = [height for height in TOKENS if value <= height]
    return tiles[0] if tiles else known


def specs(
    op: str, m: int, n: int, k: int, groups: int, alignment: int, num_sms: int, whole_gpu: bool
) -> Iterator[Fp4Spec]:
    """Specs of all calls of ``op`` with up to so many rows, in each form of weights: whatever rows are expected, and
    whether batch invariance is on. ``op`` ends in the form of groups."""
    form = op.removeprefix("m_grouped_").partition("_gemm_nt")[2].lstrip("_")
    grouping = {"": "none", "contiguous": "contiguous", "contiguous_psum": "psum", "masked": "masked"}[form]
    base = Fp4Spec(
        *(m, n, k, "e4m3" if "fp8_fp4" in op else "bf16"),
        groups=groups,
        grouping=grouping,
        alignment=alignment if grouping in ("contiguous", "psum") else 1,
        num_sms=num_sms,
        whole_gpu=whole_gpu,
    )
    rows = {height for height in TOKENS if height < m} | {m}
    if grouping == "masked":  # see `expected_m`
        rows |= {1 << bits for bits in range(TOKENS[-1].bit_length(), m.bit_length())}
    else:
        counts = range(TOKENS[-1] + 64, m, 64)
        first: dict[Any, int] = {}  # the fewest rows of each form for many
        for x in counts:
            first.setdefault(many(replace(base, m=x)), x)
        rows |= set(first.values())
    for absolute, invariant, count in product((False, True), (False, True), sorted(rows)):
        asked = replace(base, absolute=absolute, batch_invariant=invariant)
        if grouping == "masked":
            yield replace(asked, expected_m=count)
        else:
            yield replace(asked, m=count)


def helpers(op: str) -> tuple[str, ...]:
    """The kernels that may run before the product of ``op``, and around products of experts."""
    experts = ("moe_activate", "moe_combine", "moe_dispatch") if op.startswith("m_grouped") else ()
    return (*(("transpose_scales",) if "fp8_fp4" in op else ()), *experts)


def is_fp4(b: Any) -> bool:
    """Whether b is a pair of packed weights and their scales or factors. Others are FP8's, or refused as those."""
    return isinstance(b, (tuple, list)) and len(b) == 2 and getattr(b[0], "dtype", None) in _PACKED


_PACKED = (*mxfp4.PACKED, torch.int16)


def prepared(b: Any, activations: str, grouped: bool, name: str = "b") -> Any:
    """The operand ``name`` as `transform_fp4_weights` returns it. Weights of a checkpoint are transformed, with
    absolute exponents, which hold all weights: nothing of them is looked at on the host."""
    packed, scales = checks.pair(name, b, "Packed MXFP4 weights come with their scales.")
    if fp4_weights.is_transformed(packed, grouped):
        return b
    found = fp4_weights.transform(packed, scales, activations, absolute=True)
    if found.packed.dim() != 3 + grouped:
        form = "(G, N, K / 2)" if grouped else "(N, K / 2)"
        raise InvalidInputError(
            f"{name} must be {form} of MXFP4, or of transform_fp4_weights, but it is {shape_of(packed)}."
        )
    return found


def _sizes(recipe: Any) -> tuple[int, ...] | None:
    """A recipe, or () for what is none."""
    is_recipe = isinstance(recipe, (tuple, list)) and all(isinstance(x, int) for x in recipe)
    return tuple(recipe) if is_recipe else None if recipe is None else ()


def check_options(recipe: Any, recipe_a: Any, recipe_b: Any, **others: Any) -> None:
    """Refuse recipes of other scales, and everything else that these products do not have."""
    given = tuple([_sizes(x) for x in (recipe_a, recipe_b)])
    if recipe is not None or given not in ((None, None), RECIPES):
        raise UnsupportedError(
            f"products of MXFP4 weights have recipe_a={RECIPES[0]} and recipe_b={RECIPES[1]}, but recipe is "
            f"{checks.shown(recipe)}, recipe_a {checks.shown(recipe_a)} and recipe_b {checks.shown(recipe_b)}. Leave "
            "them out, or cast the weights by quantize.mxfp4_to_fp8."
        )
    for name, value in others.items():
        if value is not None:
            raise UnsupportedError(
                f"{name} must be left out with MXFP4 weights: these products have none. Apply it to d after the call, "
                "or cast the weights by quantize.mxfp4_to_fp8."
            )


fp8, bf16 = (make_entry(Fp4Gemm(kind, "none")) for kind in ("fp8", "bf16"))
"""Arguments: a, b, d."""
fp8_masked, bf16_masked = (make_entry(Fp4Gemm(kind, "masked")) for kind in ("fp8", "bf16"))
"""Arguments: a, b, d, masked_m, expected_m."""
fp8_contiguous, bf16_contiguous = (make_entry(Fp4Gemm(kind, "contiguous")) for kind in ("fp8", "bf16"))
"""Arguments: a, b, d, grouped_layout, use_psum_layout, alignment."""
