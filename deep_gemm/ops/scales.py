"""FP8 operands: recipes, values and scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deep_gemm.ops.reference import BLOCKS, Scalings

from ..errors import InvalidInputError, UnsupportedError
from ..settings import settings
from ..spec import SCALE_BLOCK, align, ceil_div
from . import checks
from .checks import shape_of
from .layouts import TMA_BYTES, is_k_major
from .table import EXPONENTS, ROWS_ON_BOTH_SIDES, WHOLE_ROWS

_RECIPES: dict[tuple[int, int, int], Scalings] = {
    (1, SCALE_BLOCK, SCALE_BLOCK): BLOCKS,
    (1, 1, SCALE_BLOCK): ROWS_ON_BOTH_SIDES,
}
FP4_CARRIERS = frozenset(
    dtype for name in ("int8", "uint8", "float4_e2m1fn_x2") if (dtype := getattr(torch, name, None)) is not None
)
_EXPONENTS = frozenset(
    dtype for name in ("int32", "uint8", "float8_e8m0fnu") if (dtype := getattr(torch, name, None)) is not None
)

E5M2 = torch.float8_e5m2
_TO_E4M3 = (
    "Cast it to E4M3 instead: deep_gemm.quantize.rows returns values and a scale for each 128 of a row, which keep the "
    "range of gradients."
)


def check_recipe(recipe: Any, recipe_a: Any = None, recipe_b: Any = None) -> Scalings | None:
    """The scalings that a recipe asks for, in any of its forms; None if no recipe is given."""
    if (recipe_a is None) != (recipe_b is None):
        given, missing = ("recipe_a", "recipe_b") if recipe_b is None else ("recipe_b", "recipe_a")
        raise InvalidInputError(f"{given} is given and {missing} is not: give both or neither.")
    if recipe is not None and recipe_a is not None:
        raise InvalidInputError("recipe is given together with recipe_a and recipe_b: give one or the other.")
    if recipe is None and recipe_a is None:
        return None
    known: dict[tuple[int, ...], Scalings] = {}
    if recipe is not None:
        name, values = "recipe", check_granularities("recipe", recipe, 3)
        known.update((granularity, x) for granularity, x in _RECIPES.items())
    else:
        name = "recipe_a and recipe_b"
        of_a, of_b = (check_granularities(f"recipe_{x}", y, 2) for x, y in (("a", recipe_a), ("b", recipe_b)))
        values = of_a + of_b
        known.update({(gran_m, gran_k, gran_n, gran_k): x for (gran_m, gran_n, gran_k), x in _RECIPES.items()})
    if values not in known:
        listed = " or ".join(map(str, known))
        raise UnsupportedError(
            f"{name} {values} is not supported on Hopper: only {listed} is. These are the rows and the K of blocks "
            "that share a scale."
        )
    return known[values]


def check_blocks(asked: Scalings | None, given: Mapping[str, Any], what: str) -> None:
    """Refuse a recipe of other scales than those of blocks, where ``what`` has no others."""
    if asked not in (None, BLOCKS):
        name = "recipe" if given["recipe"] is not None else "recipe_b"
        raise UnsupportedError(
            f"{name} {tuple(given[name])} is not supported by {what}: only (1, {SCALE_BLOCK}, {SCALE_BLOCK}) is, one "
            f"scale for each row and {SCALE_BLOCK} of K of a, and for each {SCALE_BLOCK} x {SCALE_BLOCK} block of b."
        )


def check_granularities(name: str, recipe: Any, length: int) -> tuple[int, ...]:
    """A recipe as a tuple of ``length`` positive integers, or an error that names the argument."""
    right = isinstance(recipe, (tuple, list, Sequence)) and len(recipe) == length
    for x in recipe if right else ():
        right = right and isinstance(x, int) and not isinstance(x, bool) and x > 0
    if not right:
        meaning = {3: "(gran_m, gran_n, gran_k), as (1, 128, 128)", 2: "(gran_mn, gran_k), as (1, 128)"}.get(length, "")
        raise InvalidInputError(
            f"{name} must be {length} positive integers {meaning}, but it is {checks.shown(recipe)}."
        )
    return tuple(recipe)


def check_e4m3(name: str, x: Tensor, or_e5m2: bool = False) -> None:
    """Refuse values that are not E4M3. ``or_e5m2``: E5M2 is right too."""
    if x.dtype in FP4_CARRIERS:
        takes = (
            "fp8_fp4_gemm_nt and its forms in groups multiply MXFP4 weights" if name == "b" else "b alone may be MXFP4"
        )
        raise UnsupportedError(
            f"{name} is {x.dtype}, as packed FP4 operands are: {takes}. "
            "Pass torch.float8_e4m3fn; bytes that are E4M3 with .view(torch.float8_e4m3fn)."
        )
    if x.dtype == E5M2:
        if or_e5m2:
            return
        raise UnsupportedError(
            f"{name} must be torch.float8_e4m3fn (E4M3), but it is {x.dtype}, which only fp8_gemm_nt and its forms "
            f"multiply, with scales of rows or of whole tensors. {_TO_E4M3}"
        )
    if x.dtype != torch.float8_e4m3fn:
        cast = "per_block_cast_to_fp8" if name == "b" else "per_token_cast_to_fp8"
        raise InvalidInputError(
            f"{name} must be torch.float8_e4m3fn (E4M3), but it is {x.dtype}. {cast} casts to it, and returns scales."
        )


def check_k(k: int, found: str) -> None:
    """Refuse a K that is not whole pieces of 16 bytes; ``found`` says so."""
    if k % TMA_BYTES:
        raise InvalidInputError(
            f"K must be a multiple of {TMA_BYTES}, because rows of FP8 are read in pieces of {TMA_BYTES} bytes, but "
            f"{found}. Pad a and b with zero columns up to K = {align(k, TMA_BYTES)}."
        )


def check_scales_dtype(name: str, sf: Tensor) -> None:
    if sf.dtype in _EXPONENTS:
        raise UnsupportedError(
            f"the scales of {name} are {sf.dtype}, as UE8M0 scales are, which this product does not take. "
            "Pass them as torch.float32; their values may be powers of two."
        )
    if sf.dtype != torch.float32:
        raise InvalidInputError(
            f"the scales of {name} must be torch.float32, but they are {sf.dtype}. Call .float() on them."
        )


def are_packed(named: Mapping[str, Any]) -> bool:
    """Whether scales are exponents, four to an int32. They may be no tensors yet."""
    return any(getattr(named[f"the scales of {name}"], "dtype", None) == torch.int32 for name in "ab")


def check_packed(named: Mapping[str, Tensor], asked: Scalings | None) -> Scalings:
    """Check int32 scales of a (.., M, K) and b (.., N, K). Returns the scalings."""
    of_a, of_b = (named[f"the scales of {name}"].dtype for name in "ab")
    if of_a != of_b:
        raise InvalidInputError(
            f"the scales of a and b must both be torch.int32 or both torch.float32, but they are {of_a} and {of_b}. "
            "On Hopper pass torch.float32; elsewhere get_mn_major_tma_aligned_packed_ue8m0_tensor packs those of rows."
        )
    if asked not in (None, ROWS_ON_BOTH_SIDES):
        raise UnsupportedError(
            f"scales of torch.int32 are those of 1 x {SCALE_BLOCK} for both a and b: leave the recipe out, or pass "
            f"recipe=(1, 1, {SCALE_BLOCK})."
        )
    for name in "ab":
        values, sf = named[name], named[f"the scales of {name}"]
        if values.dtype == E5M2:
            raise UnsupportedError(f"{name} is {E5M2}, which is multiplied with float32 scales only. {_TO_E4M3}")
        wanted = (*values.shape[:-1], ceil_div(values.shape[-1], 4 * SCALE_BLOCK))
        more = " get_mn_major_tma_aligned_packed_ue8m0_tensor returns such scales."
        check_scales_shape(name, sf, wanted, f"four exponents of a row of {name} per {4 * SCALE_BLOCK} of K", more)
    return EXPONENTS


def check_dense(named: Mapping[str, Tensor], asked: Scalings | None, or_packed: bool = False) -> Scalings:
    """Check the scales of a (M, K) and b (N, K). Returns the scalings. ``or_packed``: see `check_packed`."""
    a, sfa, b, sfb = (named[name] for name in ("a", "the scales of a", "b", "the scales of b"))
    if or_packed and are_packed(named):
        return check_packed(named, asked)
    check_scales_dtype("a", sfa)
    check_scales_dtype("b", sfb)
    if E5M2 in (a.dtype, b.dtype):
        return _check_e5m2(named, asked)
    return _check_scales(sfa, sfb, a.shape[0], b.shape[0], ceil_div(a.shape[1], SCALE_BLOCK), asked)


def _check_e5m2(named: Mapping[str, Tensor], asked: Scalings | None) -> Scalings:
    """Refuse a product of E5M2 whose scales are not those of rows. Scales that are also blocks' mean the same."""
    sizes = {name: named[name].shape[0] for name in ("a", "b")}
    scales = {name: named[f"the scales of {name}"] for name in sizes}
    if asked is None and all(whole_rows(scales[name], rows) for name, rows in sizes.items()):
        return WHOLE_ROWS
    name = next(name for name in sizes if named[name].dtype == E5M2)
    given = "a recipe asks for scales of blocks"
    if asked is None:
        given = f"the scales of a and b have the shapes {shape_of(scales['a'])} and {shape_of(scales['b'])}"
    raise UnsupportedError(
        f"{name} is {E5M2}. It is multiplied with one scale for all of a, or one for each row, ({sizes['a']}, 1), and "
        f"likewise for b, ({sizes['b']}, 1), without a recipe. But {given}. {_TO_E4M3}"
    )


def check_values(name: str, x: Tensor, or_e5m2: bool = False) -> None:
    """Check A or B: E4M3, or E5M2 if it is allowed, and K-major with strides that TMA allows, or MN-major and
    transposed later."""
    rows, k = x.shape
    check_e4m3(name, x, or_e5m2)
    checks.check_sizes(name, x)
    check_k(k, f"{name} is {shape_of(x)}")
    if rows == 0 or k == 0 or is_k_major(x):
        if x.numel() and rows > 1 and x.stride(0) % TMA_BYTES:
            raise InvalidInputError(
                f"the row stride of {name} must be a multiple of {TMA_BYTES} bytes, but it is {x.stride(0)}. "
                "Pass .contiguous(), or allocate its rows with padding."
            )
        return
    if x.stride(1) == 1 and x.stride(0) < k:
        raise InvalidInputError(
            f"the rows of {name} overlap: it is {shape_of(x)} with strides {x.stride()}. Pass .contiguous()."
        )
    if (rows > 1 and x.stride(0) != 1) or x.stride(1) < rows:
        raise InvalidInputError(
            f"{name} must have stride 1 along one dimension and rows of its own, but it is {shape_of(x)} with strides "
            f"{x.stride()}. Call .contiguous() on it."
        )
    if settings.forbid_transpose:
        raise UnsupportedError(
            f"{name} {shape_of(x)} has the strides {x.stride()}: K is not contiguous. Hopper multiplies FP8 only where "
            "it is, so that each call would transpose it first, which DG_FORBID_TRANSPOSE=1 forbids. Store it K-major: "
            f"pass {name}.contiguous()."
        )


def _check_scales(sfa: Tensor, sfb: Tensor, m: int, n: int, blocks: int, asked: Scalings | None) -> Scalings:
    """The scaling that fits the scales' shapes. Without a recipe the shapes also tell scales of whole rows, and scales
    of each row of B per 128 of K."""
    if asked is None and whole_rows(sfa, m) and whole_rows(sfb, n) and not _are_blocks(sfa, sfb, m, n, blocks):
        return WHOLE_ROWS
    scaling = asked or BLOCKS
    if asked is None and tuple(sfb.shape) == (n, blocks) and not _are_blocks(sfa, sfb, m, n, blocks):
        scaling = ROWS_ON_BOTH_SIDES  # as Transformers gives weights whose scales were E8M0
    for name, sf, rows, kind in (("a", sfa, m, scaling[0]), ("b", sfb, n, scaling[1])):
        wanted = _wanted(kind, rows, blocks)
        if tuple(sf.shape) != wanted:
            which = (
                f"one per row per {SCALE_BLOCK} of K"
                if kind == "1x128"
                else f"one per {SCALE_BLOCK} x {SCALE_BLOCK} block"
            )
            check_scales_shape(name, sf, wanted, f"{which} of {name}", _instead(sfa, sfb, m, n, blocks, asked))
    return scaling


def _instead(sfa: Tensor, sfb: Tensor, m: int, n: int, blocks: int, asked: Scalings | None) -> str:
    """What fits scales of these shapes, where those that were given or assumed do not."""
    if asked and whole_rows(sfa, m) and whole_rows(sfb, n):
        return " Scales of whole rows have no recipe: leave it out."
    if not asked and whole_rows(sfa, m) != whole_rows(sfb, n):
        return " Give one scale, or one for each row, for both a and b or for neither."
    shapes = [tuple(sf.shape) for sf in (sfa, sfb)]
    if shapes == [_wanted("128x128", m, blocks), _wanted("1x128", n, blocks)]:
        return " They fit b and a: swap the two."
    for kinds, recipe in ((ROWS_ON_BOTH_SIDES, "recipe=(1, 1, 128)"), (BLOCKS, "recipe=(1, 128, 128)")):
        if shapes == [_wanted(kind, rows, blocks) for kind, rows in zip(kinds, (m, n), strict=True)]:
            return f" These scales fit {recipe}."
    return ""


def _wanted(kind: str, rows: int, blocks: int) -> tuple[int, int]:
    return rows if kind == "1x128" else ceil_div(rows, SCALE_BLOCK), blocks


def check_scales_shape(name: str, sf: Tensor, wanted: tuple[int, ...], meaning: str, more: str = "") -> None:
    """Refuse scales of another shape. ``more`` says what to do, if it is not the usual."""
    if tuple(sf.shape) != wanted:
        is_transposed = len(wanted) > 1 and tuple(sf.mT.shape if sf.dim() > 1 else sf.shape) == wanted
        cast = "per_token_cast_to_fp8" if meaning.startswith("one per row") else "per_block_cast_to_fp8"
        more = " They are transposed: pass .mT of them." if is_transposed else more or f" {cast} returns such scales."
        raise InvalidInputError(
            f"the scales of {name} must have the shape {wanted}, {meaning}, but they have {shape_of(sf)}.{more}"
        )


def whole_rows(sf: Tensor, rows: int) -> bool:
    """Whether ``sf`` is one scale, or one scale for each of ``rows`` rows, as `torch._scaled_mm` takes them."""
    return sf.numel() == 1 or tuple(sf.shape) in ((rows, 1), (1, rows), (rows,))


def _are_blocks(sfa: Tensor, sfb: Tensor, m: int, n: int, blocks: int) -> bool:
    return tuple(sfa.shape) == (m, blocks) and tuple(sfb.shape) == (ceil_div(n, SCALE_BLOCK), blocks)
