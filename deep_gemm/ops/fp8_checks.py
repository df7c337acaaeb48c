"""Checks of the arguments of FP8 GEMMs: recipes, values and scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidInputError, UnsupportedError
from ..reference import BLOCKS as BLOCKS
from ..reference import Scalings as Scalings
from ..settings import settings
from ..spec import SCALE_BLOCK, align, ceil_div
from . import checks
from .checks import TMA_BYTES, shape_of

ROWS_ON_BOTH_SIDES: Scalings = ("1x128", "1x128")
"""1D1D."""
WHOLE_ROWS: Scalings = ("row", "row")
"""One scale for each row of A and of B; one scale may also apply to all rows of an operand."""

_RECIPES: dict[tuple[int, int, int], Scalings] = {
    (1, SCALE_BLOCK, SCALE_BLOCK): BLOCKS,
    (1, 1, SCALE_BLOCK): ROWS_ON_BOTH_SIDES,
}
FP4_CARRIERS = frozenset(
    dtype for name in ("int8", "uint8", "float4_e2m1fn_x2") if (dtype := getattr(torch, name, None)) is not None
)
_PACKED_SCALES = frozenset(
    dtype for name in ("int32", "uint8", "float8_e8m0fnu") if (dtype := getattr(torch, name, None)) is not None
)
_OUTPUTS = (torch.bfloat16, torch.float32, torch.float16)


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
        name, values = "recipe", checks.check_granularities("recipe", recipe, 3)
        known.update((granularity, x) for granularity, x in _RECIPES.items())
    else:
        name = "recipe_a and recipe_b"
        of_a, of_b = (checks.check_granularities(f"recipe_{x}", y, 2) for x, y in (("a", recipe_a), ("b", recipe_b)))
        values = of_a + of_b
        known.update({(gran_m, gran_k, gran_n, gran_k): x for (gran_m, gran_n, gran_k), x in _RECIPES.items()})
    if values not in known:
        listed = " or ".join(map(str, known))
        raise UnsupportedError(
            f"{name} {values} is not supported on Hopper: only {listed} is. These are the rows and the K of blocks "
            "that share a scale."
        )
    return known[values]


def check_shapes(named: Mapping[str, Any], asked: Scalings | None) -> tuple[int, int, int, Scalings]:
    """Check types and shapes of all operands, values and scales separately. Returns M, N, K and the scaling."""
    a, sfa, b, sfb, d = (named[name] for name in ("a", "the scales of a", "b", "the scales of b", "d"))
    (m, k), (n, k_of_b) = _check_values("a", a), _check_values("b", b)
    if k != k_of_b:
        raise InvalidInputError(
            f"a and b must agree in K, their last dimension, but a is {shape_of(a)} and b is {shape_of(b)}. "
            "b is N x K, the transpose of the usual weight-times-input order."
        )
    for name, sf in (("a", sfa), ("b", sfb)):
        check_scales_dtype(name, sf)
    scaling = _check_scales(sfa, sfb, m, n, ceil_div(k, SCALE_BLOCK), asked)
    if d.dtype not in _OUTPUTS:
        raise InvalidInputError(f"d must be torch.bfloat16, torch.float32 or torch.float16, but it is {d.dtype}.")
    for name in ("c", "d"):
        if name in named and tuple(named[name].shape) != (m, n):
            raise InvalidInputError(
                f"{name} must have the shape {(m, n)}, rows of a by rows of b, but it has {shape_of(named[name])}."
            )
    checks.check_sizes("d", d)
    if "c" in named and named["c"].dtype != d.dtype:
        raise InvalidInputError(f"c must have d's dtype, {d.dtype}, but it is {named['c'].dtype}.")
    return m, n, k, scaling


def is_k_major(x: Tensor) -> bool:
    """Whether K is contiguous in x (rows, K), as the tensor cores need it."""
    rows, k = x.shape
    return x.numel() == 0 or ((k == 1 or x.stride(1) == 1) and (rows == 1 or x.stride(0) >= k))


def check_alignment(name: str, x: Tensor) -> None:
    """Refuse K-major values whose address is not a multiple of 16 bytes."""
    if x.numel() == 0 or not is_k_major(x):
        return
    if past := x.data_ptr() % TMA_BYTES:
        raise InvalidInputError(
            f"{name} must start at a multiple of {TMA_BYTES} bytes, but its address is {past} past one. "
            "It is probably a view into a larger tensor: pass a copy (.clone())."
        )


def _check_values(name: str, x: Tensor) -> tuple[int, int]:
    """Check A or B: E4M3, and K-major with strides that TMA allows, or MN-major and transposed later. Returns its
    sizes."""
    rows, k = x.shape
    if x.dtype in FP4_CARRIERS:
        raise UnsupportedError(
            f"{name} is {x.dtype}, as packed FP4 operands are: FP4 is not supported by this version or on Hopper. "
            "Pass torch.float8_e4m3fn."
        )
    if x.dtype != torch.float8_e4m3fn:
        raise InvalidInputError(f"{name} must be torch.float8_e4m3fn (E4M3), but it is {x.dtype}.")
    checks.check_sizes(name, x)
    if k % TMA_BYTES:
        raise InvalidInputError(
            f"K must be a multiple of {TMA_BYTES}, because rows of FP8 are read in pieces of {TMA_BYTES} bytes, but "
            f"{name} is {shape_of(x)}. Pad a and b with zero columns up to K = {align(k, TMA_BYTES)}."
        )
    if rows == 0 or k == 0 or is_k_major(x):
        if x.numel() and rows > 1 and x.stride(0) % TMA_BYTES:
            raise InvalidInputError(
                f"the row stride of {name} must be a multiple of {TMA_BYTES} bytes, but it is {x.stride(0)}. "
                "Pass .contiguous(), or allocate its rows with padding."
            )
        return rows, k
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
    return rows, k


def check_scales_dtype(name: str, sf: Tensor) -> None:
    if sf.dtype in _PACKED_SCALES:
        raise UnsupportedError(
            f"the scales of {name} are {sf.dtype}, as packed UE8M0 scales are, which Hopper cannot use. "
            "Pass them as torch.float32; their values may be powers of two."
        )
    if sf.dtype != torch.float32:
        raise InvalidInputError(
            f"the scales of {name} must be torch.float32, but they are {sf.dtype}. Call .float() on them."
        )


def _check_scales(sfa: Tensor, sfb: Tensor, m: int, n: int, blocks: int, asked: Scalings | None) -> Scalings:
    """The scaling that fits the scales' shapes. Without a recipe the shapes also tell scales of whole rows, and scales
    of each row of B per 128 of K."""
    if asked is None and whole_rows(sfa, m) and whole_rows(sfb, n) and not _are_blocks(sfa, sfb, m, n, blocks):
        return WHOLE_ROWS
    scaling = asked or BLOCKS
    if asked is None and tuple(sfb.shape) == (n, blocks) and not _are_blocks(sfa, sfb, m, n, blocks):
        scaling = ROWS_ON_BOTH_SIDES  # as Transformers gives weights whose scales were E8M0
    wanted = {
        "1x128": (lambda rows: (rows, blocks), f"one per row per {SCALE_BLOCK} of K"),
        "128x128": (lambda rows: (ceil_div(rows, SCALE_BLOCK), blocks), f"one per {SCALE_BLOCK} x {SCALE_BLOCK} block"),
    }
    for name, sf, rows, kind in (("a", sfa, m, scaling[0]), ("b", sfb, n, scaling[1])):
        shape, meaning = wanted[kind][0](rows), wanted[kind][1]
        if tuple(sf.shape) != shape:
            others = (
                ""
                if asked
                else (" Or give one scale, or one for each row, for a and for b; or the recipe that they belong to.")
            )
            raise InvalidInputError(
                f"the scales of {name} must have the shape {shape}, {meaning} of {name}, but they have {shape_of(sf)}."
                f"{others}"
            )
    return scaling


def whole_rows(sf: Tensor, rows: int) -> bool:
    """Whether ``sf`` is one scale, or one scale for each of ``rows`` rows, as `torch._scaled_mm` takes them."""
    return sf.numel() == 1 or tuple(sf.shape) in ((rows, 1), (1, rows), (rows,))


def _are_blocks(sfa: Tensor, sfb: Tensor, m: int, n: int, blocks: int) -> bool:
    return tuple(sfa.shape) == (m, blocks) and tuple(sfb.shape) == (ceil_div(n, SCALE_BLOCK), blocks)
