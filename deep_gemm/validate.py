"""Tensors in, a checked set of operands out: the only place that looks at shape, stride, dtype and device.

It runs when a combination of tensors is first seen, never on the warm path, so it spends its time on saying exactly
what is wrong: `InvalidInputError` for what the caller can put right, `UnsupportedError` for what this version cannot
do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deep_gemm.errors import InvalidInputError, UnsupportedError
from deep_gemm.params import SCALE_BLOCK, align, ceil_div

TMA_BYTES = 16
"""The Tensor Memory Accelerator wants base addresses and row strides that are multiples of this many bytes."""

MAX_SIZE = 2**31 - 1
"""Kernels count rows and columns in 32-bit signed integers (offsets are 64 bits wide)."""

_FP4_CARRIERS = frozenset(
    dtype for name in ("int8", "uint8", "float4_e2m1fn_x2") if (dtype := getattr(torch, name, None)) is not None
)
_PACKED_SCALES = frozenset(
    dtype for name in ("int32", "uint8", "float8_e8m0fnu") if (dtype := getattr(torch, name, None)) is not None
)


@dataclass(frozen=True, eq=False)
class FP8GemmOperands:
    """Checked operands of ``d[m, n] = (a * sfa)[m, k] @ (b * sfb)[n, k]^T``.

    a (m, k) and b (n, k) are E4M3 and K-major; sfa is (m, ceil(k / 128)) and sfb (ceil(n / 128), ceil(k / 128)), both
    float32 of any strides; d is bfloat16, row-major. ``d_tma`` says that TMA can write d; ``sfa_ready`` that TMA can
    read sfa as it is (M-major, aligned), so that nothing has to be transposed.
    """

    a: Tensor
    sfa: Tensor
    b: Tensor
    sfb: Tensor
    d: Tensor
    m: int
    n: int
    k: int
    device: torch.device
    compiled_dims: str
    d_tma: bool
    sfa_ready: bool


def fp8_gemm(
    a: Any,
    b: Any,
    d: Any,
    c: Any = None,
    recipe: Any = None,
    recipe_a: Any = None,
    recipe_b: Any = None,
    compiled_dims: Any = "nk",
    disable_ue8m0_cast: Any = False,
) -> FP8GemmOperands:
    """Check the arguments of ``fp8_gemm_nt`` and return its operands.

    ``disable_ue8m0_cast`` makes no difference on Hopper: float32 scales multiply as they are, powers of two or not.

    Raises:
        InvalidInputError: an argument is wrong; the message names it and says what to do.
        UnsupportedError: the request makes sense, and this version cannot do it.
    """
    check_recipe(recipe, recipe_a, recipe_b)
    dims = check_compiled_dims(compiled_dims)
    if not isinstance(disable_ue8m0_cast, bool):
        raise InvalidInputError(f"disable_ue8m0_cast must be True or False, but it is {disable_ue8m0_cast!r}.")
    a, sfa = _pair("a", a)
    b, sfb = _pair("b", b)
    named = {"a": a, "the scales of a": sfa, "b": b, "the scales of b": sfb, "d": d}
    for name, tensor in named.items():
        _check_plain(name, tensor)
    if c is not None:
        raise UnsupportedError(
            "c must be None: adding to an accumulator is not supported by this version. Add c to d after the call."
        )
    device = _check_devices(named)
    _check_gradients(named)

    m, k = _check_operand("a", a)
    n, k_of_b = _check_operand("b", b)
    if k != k_of_b:
        raise InvalidInputError(
            f"a and b must agree in K, their last dimension, but a is {_shape(a)} and b is {_shape(b)}. "
            "b is N x K, the transpose of the usual weight-times-input order."
        )
    if n == 0:
        raise InvalidInputError(f"b must have at least one row (N >= 1), but it is {_shape(b)}.")
    _check_scales("a", sfa, (m, ceil_div(k, SCALE_BLOCK)), f"one per row per {SCALE_BLOCK} of K")
    _check_scales(
        "b",
        sfb,
        (ceil_div(n, SCALE_BLOCK), ceil_div(k, SCALE_BLOCK)),
        f"one per {SCALE_BLOCK} x {SCALE_BLOCK} block of b",
    )
    _check_output(d, m, n)
    _check_no_overlap(d, {name: tensor for name, tensor in named.items() if name != "d"})
    return FP8GemmOperands(
        a=a,
        sfa=sfa,
        b=b,
        sfb=sfb,
        d=d,
        m=m,
        n=n,
        k=k,
        device=device,
        compiled_dims=dims,
        d_tma=_tma_writable(d),
        sfa_ready=tma_ready_scales(sfa),
    )


def check_recipe(recipe: Any, recipe_a: Any = None, recipe_b: Any = None) -> None:
    """Accept the 1x128 / 128x128 recipe in each of its spellings, and say what is wrong with any other."""
    if (recipe_a is None) != (recipe_b is None):
        given, missing = ("recipe_a", "recipe_b") if recipe_b is None else ("recipe_b", "recipe_a")
        raise InvalidInputError(f"{given} is given and {missing} is not: give both or neither.")
    if recipe is not None and recipe_a is not None:
        raise InvalidInputError("recipe is given together with recipe_a and recipe_b: give one or the other.")
    supported: tuple[tuple[str, Any, tuple[int, ...]], ...] = (
        ("recipe", recipe, (1, SCALE_BLOCK, SCALE_BLOCK)),
        ("recipe_a", recipe_a, (1, SCALE_BLOCK)),
        ("recipe_b", recipe_b, (SCALE_BLOCK, SCALE_BLOCK)),
    )
    for name, given_recipe, expected in supported:
        if given_recipe is None:
            continue
        values = check_granularities(name, given_recipe, len(expected))
        if values != expected:
            raise UnsupportedError(
                f"{name} {values} is not supported by this version: only {expected} is, which means scales per 1 x 128 "
                "of a and per 128 x 128 of b."
            )


def check_granularities(name: str, recipe: Any, length: int) -> tuple[int, ...]:
    """A recipe as a tuple of ``length`` positive integers, or an error that names the argument."""
    if (
        not isinstance(recipe, Sequence)
        or len(recipe) != length
        or any(not isinstance(x, int) or isinstance(x, bool) or x < 1 for x in recipe)
    ):
        meaning = "(gran_m, gran_n, gran_k)" if length == 3 else "(gran_mn, gran_k)"
        raise InvalidInputError(f"{name} must be {length} positive integers {meaning}, but it is {recipe!r}.")
    return tuple(recipe)


def check_compiled_dims(compiled_dims: Any) -> str:
    """The dimensions to bake into the kernel, in the order m, n, k."""
    if not isinstance(compiled_dims, str) or set(compiled_dims) - set("mnk"):
        raise InvalidInputError(
            f"compiled_dims must be a string of the letters m, n and k, such as 'nk' or '', but it is "
            f"{compiled_dims!r}."
        )
    return "".join(letter for letter in "mnk" if letter in compiled_dims)


def tma_ready_scales(sf: Tensor) -> bool:
    """Whether TMA can read scales (mn, columns) as they lie: mn contiguous, aligned base, aligned column stride."""
    rows, columns = sf.shape
    if sf.numel() == 0:
        return True
    if sf.data_ptr() % TMA_BYTES or (rows > 1 and sf.stride(0) != 1):
        return False
    return columns <= 1 or (sf.stride(1) >= rows and sf.stride(1) * sf.element_size() % TMA_BYTES == 0)


def _tma_writable(d: Tensor) -> bool:
    """Whether TMA can write d and nothing else: aligned base and rows, and rows of whole 16-byte units, since it writes
    units whole (seen on an H200: with N = 2436, eight bytes past the end of each row were lost)."""
    rows, columns = d.shape
    size = d.element_size()
    aligned = d.data_ptr() % TMA_BYTES == 0 and (rows <= 1 or d.stride(0) * size % TMA_BYTES == 0)
    return aligned and columns * size % TMA_BYTES == 0


def _pair(name: str, operand: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(operand, (tuple, list)):
        raise InvalidInputError(
            f"{name} must be a pair (tensor, scales), but it is {_kind(operand)}. An FP8 operand comes with its "
            "scales; per_token_cast_to_fp8 and per_block_cast_to_fp8 return such pairs."
        )
    if len(operand) != 2:
        raise InvalidInputError(f"{name} must be a pair (tensor, scales), but it has {len(operand)} elements.")
    return operand[0], operand[1]


def _check_plain(name: str, tensor: Any) -> None:
    """Refuse what has no ordinary memory behind it."""
    if not isinstance(tensor, Tensor):
        raise InvalidInputError(f"{name} must be a torch.Tensor, but it is {_kind(tensor)}.")
    if tensor.is_quantized:
        raise InvalidInputError(
            f"{name} is a quantised tensor ({tensor.dtype}). Pass a plain tensor, and scales beside it."
        )
    if tensor.layout != torch.strided:
        raise InvalidInputError(f"{name} has the layout {tensor.layout}. Pass a dense tensor (.to_dense()).")
    if tensor.device.type == "meta":
        raise InvalidInputError(f"{name} is a meta tensor, which has a shape and no data. Materialise it first.")
    if tensor.dim() != 2:
        raise InvalidInputError(f"{name} must have 2 dimensions, but it has {tensor.dim()}: {_shape(tensor)}.")


def _check_devices(named: dict[str, Tensor]) -> torch.device:
    devices = {tensor.device for tensor in named.values()}
    if len(devices) > 1:
        places = ", ".join(f"{name} on {tensor.device}" for name, tensor in named.items())
        raise InvalidInputError(f"all tensors must be on one device, but they are: {places}.")
    device = devices.pop()
    if device.type not in ("cuda", "cpu"):
        raise UnsupportedError(f"tensors on '{device.type}' devices are not supported: use CUDA, or the CPU reference.")
    return device


def _check_gradients(named: dict[str, Tensor]) -> None:
    if not torch.is_grad_enabled():
        return
    for name, tensor in named.items():
        if tensor.requires_grad:
            raise InvalidInputError(
                f"{name} requires grad, but this function writes into d and records nothing for autograd. "
                "Call it under torch.no_grad(), or pass detached tensors."
            )


def _check_operand(name: str, x: Tensor) -> tuple[int, int]:
    """A or B: E4M3, K-major, addressable by TMA. Returns its sizes."""
    rows, k = x.shape
    if x.dtype in _FP4_CARRIERS:
        raise UnsupportedError(
            f"{name} is {x.dtype}, as packed FP4 operands are: FP4 is not supported by this version or on Hopper. "
            "Pass torch.float8_e4m3fn."
        )
    if x.dtype != torch.float8_e4m3fn:
        raise InvalidInputError(f"{name} must be torch.float8_e4m3fn (E4M3), but it is {x.dtype}.")
    _check_sizes(name, x)
    if k % TMA_BYTES:
        raise InvalidInputError(
            f"K must be a multiple of {TMA_BYTES}, because rows of FP8 are read in pieces of {TMA_BYTES} bytes, but "
            f"{name} is {_shape(x)}. Pad a and b with zero columns up to K = {align(k, TMA_BYTES)}."
        )
    if rows == 0 or k == 0:
        return rows, k
    if k > 1 and x.stride(1) != 1:
        raise InvalidInputError(
            f"{name} must be K-major (stride 1 along its last dimension), but it is {_shape(x)} with strides "
            f"{x.stride()}. Call .contiguous() on it, or use the nn, tn or tt form that fits how it is stored."
        )
    if past := x.data_ptr() % TMA_BYTES:
        raise InvalidInputError(
            f"{name} must start at a multiple of {TMA_BYTES} bytes, but its address is {past} past one. "
            "It is probably a view into a larger tensor: pass a copy (.clone())."
        )
    if rows > 1 and x.stride(0) < k:
        raise InvalidInputError(
            f"the rows of {name} overlap: it is {_shape(x)} with strides {x.stride()}. Pass .contiguous()."
        )
    if rows > 1 and x.stride(0) % TMA_BYTES:
        raise InvalidInputError(
            f"the row stride of {name} must be a multiple of {TMA_BYTES} bytes, but it is {x.stride(0)}. "
            "Pass .contiguous(), or allocate its rows with padding."
        )
    return rows, k


def _check_scales(name: str, sf: Tensor, shape: tuple[int, int], meaning: str) -> None:
    if sf.dtype in _PACKED_SCALES:
        raise UnsupportedError(
            f"the scales of {name} are {sf.dtype}, as packed UE8M0 scales are, which Hopper cannot use. "
            "Pass them as torch.float32; their values may be powers of two."
        )
    if sf.dtype != torch.float32:
        raise InvalidInputError(
            f"the scales of {name} must be torch.float32, but they are {sf.dtype}. Call .float() on them."
        )
    if tuple(sf.shape) != shape:
        raise InvalidInputError(
            f"the scales of {name} must have the shape {shape}, {meaning}, but they have {_shape(sf)}."
        )


def _check_output(d: Tensor, m: int, n: int) -> None:
    if d.dtype == torch.float32:
        raise UnsupportedError("d is torch.float32, which this version cannot write. Pass torch.bfloat16.")
    if d.dtype != torch.bfloat16:
        raise InvalidInputError(f"d must be torch.bfloat16, but it is {d.dtype}.")
    if tuple(d.shape) != (m, n):
        raise InvalidInputError(f"d must have the shape {(m, n)}, rows of a by rows of b, but it has {_shape(d)}.")
    _check_sizes("d", d)
    if m == 0:
        return
    if n > 1 and d.stride(1) != 1:
        raise InvalidInputError(
            f"d must be row-major (stride 1 along its last dimension), but it is {_shape(d)} with strides "
            f"{d.stride()}. Pass a row-major tensor and copy afterwards, or swap the operands to get the transpose."
        )
    if m > 1 and d.stride(0) < n:
        raise InvalidInputError(
            f"the rows of d overlap in memory: it is {_shape(d)} with strides {d.stride()}, so rows would overwrite "
            "each other. Pass a tensor with rows of its own."
        )


def _check_sizes(name: str, x: Tensor) -> None:
    if max(x.shape) > MAX_SIZE:
        raise UnsupportedError(f"{name} is {_shape(x)}: a dimension above {MAX_SIZE} is not supported. Split the call.")


def _check_no_overlap(d: Tensor, inputs: dict[str, Tensor]) -> None:
    start, end = byte_range(d)
    for name, tensor in inputs.items():
        other_start, other_end = byte_range(tensor)
        if start < other_end and other_start < end:
            raise InvalidInputError(
                f"d and {name} share memory: d spans the addresses {start:#x} to {end:#x} and {name} {other_start:#x} "
                f"to {other_end:#x}. Results would be written over data still to be read; pass a d of its own."
            )


def byte_range(x: Tensor) -> tuple[int, int]:
    """The first address of ``x`` and the one past its last element; equal when it is empty."""
    start = x.data_ptr()
    if x.numel() == 0:
        return start, start
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    return start, start + span * x.element_size()


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _kind(value: Any) -> str:
    return f"a {value.dtype} tensor" if isinstance(value, Tensor) else f"of type {type(value).__name__}"
