"""Products grouped along K, of FP8 with scales and of BF16: the weight gradients of experts. Each group multiplies its
own part of K, and has its own matrix D."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deep_gemm.ops.reference import BLOCKS, Scalings, k_grouped_reference
from deep_gemm.runtime.calls import Parameter, Step, make_entry

from ..errors import InvalidInputError, UnsupportedError
from ..runtime.operation import Fault
from ..spec import SCALE_BLOCK, KGroupMapsSpec, Major, align, ceil_div
from . import checks, device_values, layouts, scales
from .checks import shape_of
from .gemm import COMPILED_DIMS, NO_EPILOGUE, TENSOR, C, Gemm, GemmOperands
from .layouts import TMA_BYTES, Preparation
from .table import DTYPES, K_BF16, K_FP8, K_PADDED, PLAIN, ROWS_ON_BOTH_SIDES

LAYOUT = "grouped_layout"
"""The argument with K of each group, on the device."""

RECIPE = (1, 1, SCALE_BLOCK)
_SCALINGS = {repr(RECIPE): ROWS_ON_BOTH_SIDES, repr((1, SCALE_BLOCK, SCALE_BLOCK)): BLOCKS}
"""By the recipe as it is shown: True and 1.0 equal 1, and are shown as something else."""
_SIZES = "Sequence[int] | None"
_PADDED_SCALES = Parameter("use_padded_sf_layout", "bool", False)


class KGrouped(Gemm):
    """See `deep_gemm.k_grouped_fp8_gemm_nt_contiguous`. Its values are flat: a group's matrix lies after the one
    before. Padded operands are one matrix each, in which groups begin at multiples of 128. Casts write them so from
    rows that are padded for products grouped by M."""

    layout = LAYOUT
    has_weights = False

    def __init__(self, name: str, accumulates: bool = False) -> None:
        super().__init__(name, accumulates)
        self.is_padded = name == K_PADDED
        recipe = Parameter("recipe", "tuple[int, int, int]", RECIPE)
        if self.is_padded:
            self.parameters = (*self.first, Parameter(LAYOUT, TENSOR), C, COMPILED_DIMS, recipe)
        else:
            self.parameters = (
                *(
                    *self.first,
                    Parameter("ks_cpu", _SIZES, None, "public_only"),
                    Parameter(LAYOUT, "Tensor | None", None),
                    C,
                ),
                *(*((recipe,) if self.is_scaled else ()), COMPILED_DIMS),
                Parameter("use_psum_layout", "bool", False, "public_only"),
                *((_PADDED_SCALES,) if self.is_scaled else ()),
                NO_EPILOGUE,
                Parameter("ks", "Sequence[int] | Tensor | None", None, "public_only", keyword=True),
                Parameter("ks_tensor", "Tensor | None", None, "public_only", keyword=True),
            )
        self.absent = () if accumulates else ("c",)
        self.settings = ("check",)

    def axes(self, form: str | None) -> Mapping[str, str]:
        """See `KernelOperation.axes`. Flat values have no rows or columns that could be divided."""
        if self.is_scaled and not self.is_padded:
            return {}
        a, b = ("mK", "nK") if self.is_padded else ("Km", "Kn")
        return {"a": a, "b": b, "c": "Gmn", "d": "Gmn", LAYOUT: "G"}

    def check(self, *arguments: Any, **named_arguments: Any) -> GemmOperands | None:
        """None for fake tensors, of which only types and shapes are checked, and where there is nothing to compute."""
        given = self.given(arguments, named_arguments)
        named = self.named(given)
        dims = checks.check_compiled_dims(given["compiled_dims"])
        checks.refuse_epilogue(given.get("epilogue"))
        if given.get("use_padded_sf_layout"):
            raise UnsupportedError(
                "use_padded_sf_layout must be False: scales are read as (rows, blocks) of any strides. For groups that "
                "begin at multiples of 128, call k_grouped_fp8_gemm_nt_padded."
            )
        scaling = check_recipe(given["recipe"]) if self.is_scaled else PLAIN
        inputs = (1, 2) if self.is_scaled and not self.is_padded else (2,)
        checks.check_flat(self.axes(None), named)
        device = checks.check_tensors(self.name, named, {LAYOUT: (1,), "c": (3,), "d": (3,)}, inputs)
        checks.check_int32(LAYOUT, named[LAYOUT])
        self._check_outputs(named)
        groups, m, n = named["d"].shape
        if tuple(named[LAYOUT].shape) != (groups,):
            raise InvalidInputError(
                f"{LAYOUT} must have the shape {(groups,)}, K of each group of d, but it has {shape_of(named[LAYOUT])}."
            )
        if self.is_scaled:
            k = (_check_padded if self.is_padded else _check_flat)(named, groups, m, n, scaling)
        else:
            k = self._check_plain(named, m, n)
        if checks.is_fake(named.values()):
            return None
        outputs = {name: layouts.flat(named[name]) for name in ("c", "d") if name in named}
        accumulate = checks.check_places(named | outputs)
        if 0 in (m, n, groups):
            return None
        if k == 0:
            checks.write_empty_sum(outputs["d"], outputs.get("c"), accumulate)
            return None
        for name in ("a", "b"):
            self._row_stride(name, named[name])
        tensors = dict(zip(self.operands, named.values(), strict=True))
        return GemmOperands(self.name, tensors, device, m, n, k, dims, scaling, accumulate=accumulate, groups=groups)

    def _check_outputs(self, named: Mapping[str, Tensor]) -> None:
        d, c = named["d"], named.get("c")
        if DTYPES.get(d.dtype) not in self.product.outputs:
            raise InvalidInputError(
                f"d of {self.name} must be torch.float32 or torch.bfloat16, but it is {d.dtype}. Cast d after the call."
            )
        if c is not None and (c.dtype != d.dtype or c.shape != d.shape):
            raise InvalidInputError(
                f"c must have d's dtype and shape, {d.dtype} {shape_of(d)}, but it has {c.dtype} {shape_of(c)}."
            )
        for name in ("c", "d"):
            if name in named and named[name].numel() and layouts.flat_stride(named[name]) is None:
                raise InvalidInputError(
                    f"{name} must be row-major, with each group right after the one before, but it is "
                    f"{shape_of(named[name])} with strides {named[name].stride()}. Pass .contiguous()."
                )

    def _check_plain(self, named: Mapping[str, Tensor], m: int, n: int) -> int:
        """a is (K, M), b is (K, N). Returns K."""
        k = named["a"].shape[0]
        for name, columns in (("a", m), ("b", n)):
            x = named[name]
            self.check_dtype(name, x, self.name, f" Pass {name}.to({self.dtype}).")
            if tuple(x.shape) != (k, columns):
                raise InvalidInputError(
                    f"{name} must have the shape {(k, columns)}, the sum of K by {'M' if name == 'a' else 'N'} of d, "
                    f"but it has {shape_of(x)}."
                )
        return k

    def _row_stride(self, name: str, x: Tensor) -> int:
        """The row stride of an operand; 0 if its groups have matrices of their own, which begin at multiples of 16
        bytes if the operand does. Refuses what TMA cannot read."""
        if self.is_padded or not self.is_scaled:
            return layouts.check_k_major(name, x, "K" if self.is_scaled else {"a": "M", "b": "N"}[name])
        if past := x.data_ptr() % TMA_BYTES:
            raise InvalidInputError(
                f"{name} must start at a multiple of {TMA_BYTES} bytes, but its address is {past} past one. "
                "Pass a copy (.clone())."
            )
        return 0

    def place(self, prepared: Preparation, x: GemmOperands) -> tuple[Major, Major]:
        """BF16 is read as it is. For FP8, tensor maps of all groups are made first, and scales transposed if TMA cannot
        read them."""
        rows = {name: self._row_stride(name, x.tensors[name]) for name in ("a", "b")}
        if not self.is_scaled:
            prepared.strides |= {name: (1, stride) for name, stride in rows.items()}
            return self.product.majors
        prepared.add_row_scales("sfa", x.tensors["sfa"])
        if x.scaling == BLOCKS:
            prepared.strides["sfb"] = x.tensors["sfb"].stride()
        else:
            prepared.add_row_scales("sfb", x.tensors["sfb"])
        prepared.numbers["blocks"] = x.tensors["sfa"].shape[1], x.tensors["sfb"].shape[1]
        maps = KGroupMapsSpec(x.groups, x.m, x.n, x.k if self.is_padded else 0)
        prepared.scratch["maps"] = ((maps.bytes,), torch.uint8)
        prepared.operands["maps"] = "maps"
        strides = {name: (stride, 1) for name, stride in rows.items() if stride}
        prepared.steps.append(
            Step(maps, strides, {name: prepared.operands[name] for name in ("a", "b", "layout", "maps")})
        )
        return self.product.majors

    def faults(self, x: GemmOperands) -> Sequence[Fault]:
        """Sizes of groups."""
        if self.is_padded:
            return device_values.padded_sizes(x.tensors["layout"], x.k)
        columns = {name: x.tensors[f"sf{name}"].shape[1] for name in ("a", "b") if self.is_scaled}
        return device_values.sizes(x.tensors["layout"], x.k, TMA_BYTES if self.is_scaled else 1, columns)

    def reference(self, x: GemmOperands) -> None:
        """See `k_grouped_reference`."""
        k_grouped_reference(**(_each_matrix(x) if self.is_padded else x.tensors), scaling=x.scaling)

    def shape(self, x: GemmOperands) -> str:
        """The sizes of a call, for reports."""
        return f"{x.m}x{x.n}x{x.k} in {x.groups} groups along K"


def _scale_rows(scaling: Scalings, m: int, n: int) -> tuple[tuple[str, int, int, str], ...]:
    """For a and b: the name, the rows, the rows of scales, and what has one scale."""
    of_b = (ceil_div(n, SCALE_BLOCK), f"one per {SCALE_BLOCK} rows") if scaling == BLOCKS else (n, "one per row")
    return ("a", m, m, "one per row"), ("b", n, *of_b)


def _check_flat(named: Mapping[str, Tensor], groups: int, m: int, n: int, scaling: Scalings) -> int:
    """K follows from the number of values. Returns the sum of K."""
    sums = {}
    for name, rows in (("a", m), ("b", n)):
        x = named[name]
        scales.check_e4m3(name, x)
        scales.check_scales_dtype(name, named[f"the scales of {name}"])
        if not x.is_contiguous():
            raise InvalidInputError(f"{name} must be contiguous, each group's matrix after the one before it.")
        if rows and x.numel() % rows:
            raise InvalidInputError(
                f"{name} has {x.numel()} values, not {rows} whole rows, as d {shape_of(named['d'])} needs."
            )
        sums[name] = x.numel() // max(1, rows)
    k = sums["a"]
    if m and n and sums["b"] != k:
        raise InvalidInputError(f"a and b must agree in the sum of K, but it is {k} in a and {sums['b']} in b.")
    if k % TMA_BYTES:
        raise InvalidInputError(f"K of each group must be a multiple of {TMA_BYTES}, but their sum is {k}.")
    for name, _, rows, one in _scale_rows(scaling, m, n):
        sf, least = named[f"the scales of {name}"], ceil_div(k, SCALE_BLOCK)
        if sf.dim() != 2 or sf.shape[0] != rows or not least <= sf.shape[1] <= least + groups:
            raise InvalidInputError(
                f"the scales of {name} must have the shape ({rows}, {least}), {one} per {SCALE_BLOCK} of K "
                f"of each group, or more columns where groups end inside a block, but they have {shape_of(sf)}."
                f"{_other_recipe(name, sf, n, scaling)}"
            )
    return k


def _other_recipe(name: str, sf: Tensor, n: int, scaling: Scalings) -> str:
    """The recipe that the scales of b would suit, as a sentence; "" if there is none."""
    rows = n if scaling == BLOCKS else ceil_div(n, SCALE_BLOCK)
    if name != "b" or sf.dim() != 2 or sf.shape[0] != rows:
        return ""
    return f" They suit recipe={next(text for text, other in _SCALINGS.items() if other != scaling)}."


def _check_padded(named: Mapping[str, Tensor], groups: int, m: int, n: int, scaling: Scalings) -> int:
    """a is (M, K), b is (N, K), and their scales have a column for each 128 of K. Returns K."""
    k = named["a"].shape[1]
    for name, rows, scale_rows, _ in _scale_rows(scaling, m, n):
        sf = f"the scales of {name}"
        scales.check_e4m3(name, named[name])
        scales.check_scales_dtype(name, named[sf])
        for of, shape in ((name, (rows, k)), (sf, (scale_rows, ceil_div(k, SCALE_BLOCK)))):
            if tuple(named[of].shape) != shape:
                raise InvalidInputError(
                    f"{of} must have the shape {shape}, as d {shape_of(named['d'])} and a {shape_of(named['a'])} need, "
                    f"but it has {shape_of(named[of])}.{_other_recipe(name, named[of], n, scaling) if of == sf else ''}"
                )
    return k


def _each_matrix(x: GemmOperands) -> dict[str, Any]:
    """The tensors of a padded product as those of a flat one."""
    tensors, parts, begin = dict(x.tensors), [], 0
    for size in tensors["layout"].tolist():
        parts.append(slice(begin, begin + size))
        begin = align(parts[-1].stop, SCALE_BLOCK)
    for name in ("a", "b"):
        flat = [tensors[name][:, part].reshape(-1).view(torch.uint8) for part in parts]
        tensors[name] = torch.cat(flat).view(torch.float8_e4m3fn)
    return tensors


def check_recipe(recipe: Any) -> Scalings:
    """The scalings of a and b. Refuses recipes that no kernel has."""
    found = _SCALINGS.get(repr(recipe)) or _SCALINGS.get(repr(scales.check_granularities("recipe", recipe, 3)))
    if found is None:
        raise UnsupportedError(
            f"recipe {tuple(recipe)} is not supported by GEMMs grouped along K: only (1, 1, 128) and (1, 128, 128) are."
        )
    return found


def sizes(a: Any, d: Any, ks_cpu: Any, layout: Any, ks: Any, ks_tensor: Any, psum: Any, multiple: int = 1) -> Any:
    """K of each group, a multiple of ``multiple``, as a tensor beside d. Sizes on the host are checked, and copied if
    there is no tensor."""
    ks = ks_cpu if ks is None else checks.one_of_two("ks_cpu", ks_cpu, "ks", ks)
    layout = layout if ks_tensor is None else checks.one_of_two(LAYOUT, layout, "ks_tensor", ks_tensor)
    if psum:
        raise UnsupportedError("use_psum_layout is not supported by GEMMs grouped along K. Pass K of each group.")
    if isinstance(ks, (list, tuple)):  # checked in loops, by each call: `all` would call a generator for each group
        total, odd = 0, 0
        for size in ks:
            if not isinstance(size, int) or size < 0:
                return sizes(a, d, checks.check_group_sizes(ks), layout, None, None, psum, multiple)
            total += size
            odd = odd or (size if size % multiple else 0)
        values = a[0] if isinstance(a, (tuple, list)) and a else a
        try:
            shape = d.shape if isinstance(d, Tensor) and d.dim() == 3 and not d.is_nested else None
            plain = isinstance(values, Tensor) and values.dim() > 0 and not values.is_nested
            held = values.numel() if plain else -1
        except (RuntimeError, ValueError):  # a tensor without a shape: the check says which
            shape, held = None, -1
        why = ""
        if shape is not None and len(ks) != shape[0]:
            why = f"ks_cpu has {len(ks)} groups, but d has {shape[0]}."
        elif odd:
            why = f"K of each group must be a multiple of {multiple}, but ks_cpu has {odd}."
        elif shape is not None and held >= 0 and total != (k := held // max(1, shape[1])):
            why = f"ks_cpu must add up to the K of a, {k}, but adds up to {total}."
        if why:
            for name, x in (("a", values), ("d", d)):  # what is no plain tensor is worse
                checks.check_tensor(name, x)
            raise InvalidInputError(why)
    elif ks is not None and not isinstance(ks, Tensor):
        raise InvalidInputError(f"ks_cpu must be a list of K of each group, but it is {checks.shown(ks)}.")
    if layout is not None or isinstance(ks, Tensor):
        return ks if layout is None else layout
    if ks is None:
        raise InvalidInputError(f"ks_cpu or {LAYOUT} must be given: K of each group.")
    checks.check_tensor("d", d)
    return torch.tensor(ks, dtype=torch.int32, device=d.device)


fp8, padded, bf16 = (make_entry(KGrouped(x), KGrouped(x, accumulates=True)) for x in (K_FP8, K_PADDED, K_BF16))
"""The functions behind the public ones: a, b, d, grouped_layout, c, compiled_dims."""
