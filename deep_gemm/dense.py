"""Dense GEMMs."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import arch, constant, engine, options
from .errors import InvalidInputError, UnsupportedError
from .kernels.sm90_fp8_launch import Addresses, Geometry
from .log import warn_once
from .moved import Gemm, MovedCall
from .params import GemmProblem, align
from .reference import fp8_gemm_reference
from .settings import settings
from .validate import FP8GemmOperands
from .validate import fp8_gemm as validate_fp8_gemm

_MAX_WARM = 8192
"""Launch records kept, about a kilobyte each, and nine where scales are transposed: past it all are dropped, since what
repeats is soon back."""

# What a warm call does, by everything that a launch depends on: addresses, shapes, strides, dtypes, stream. None where
# it came once, and was made as another that differs in addresses.
_warm: dict[Any, Callable[[], object] | None] = {}

# The same by all but addresses, and by whether weights were promised to be constant.
_moved: dict[Any, MovedCall] = {}

_PLACES, _DEVICE = 5, -3
"""How many addresses a key begins with, and where in it the device is."""


def _forget_warm() -> None:
    """Put new dictionaries in the old ones' place, so that what a call in progress will remember is lost with the old
    ones. No lock: a storage may be freed, and a promise end, at any moment."""
    global _warm, _moved
    _warm, _moved = {}, {}


options.on_change(_forget_warm)
os.register_at_fork(after_in_child=_forget_warm)  # a thread of the parent may have held a record's lock
constant.on_change(_forget_warm)

_raw_stream = engine.raw_stream
_is_grad_enabled = torch.is_grad_enabled
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def fp8_gemm_nt(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    d: Tensor,
    c: Tensor | None = None,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str | None = None,
    disable_ue8m0_cast: bool = False,
) -> None:
    """``d = (a * scales of a) @ (b * scales of b)^T``, on the current stream of the tensors' device.

    Args:
        a: (M, K) E4M3 and its float32 scales (M, ceil(K / 128)): one per row per 128 of K. K a multiple of 16, K-major,
            rows 16-byte aligned and any distance apart. Scales of any strides: those from
            `get_mn_major_tma_aligned_tensor`, and slices of them, are read as they are, others cost a launch.
        b: (N, K) E4M3 and its float32 scales (ceil(N / 128), ceil(K / 128)): one per 128 x 128 block, of any strides.
        d: (M, N) bfloat16, row-major, rows any distance apart; written in place.
        c: must be None in this version.
        recipe: None or (1, 128, 128).
        recipe_a, recipe_b: None, or (1, 128) and (128, 128).
        compiled_dims: sizes to bake into the kernel, letters of "mnk". None leaves it to the library, which bakes in
            none, so that one kernel serves all shapes.
        disable_ue8m0_cast: of no effect on Hopper, where scales stay float32 whatever their values.

    The tensor cores' sums are promoted to float32 every 128 of K, where the scales are applied. Results are bitwise
    repeatable. M = 0 does nothing and K = 0 writes zeros. Tensors on the CPU are multiplied by the reference
    implementation. Inside CUDA-graph capture the shape must have been called before.

    Every operand may be written by the kernel or copy just before, of any library: nothing is assumed of who wrote it
    or when. Only where both tensors of ``b`` were given to `declare_constant` are those two read earlier.

    Raises:
        InvalidInputError: an argument is wrong; the message names it.
        UnsupportedError: this version or this GPU cannot do it.
        NotWarmError: first call of a shape inside CUDA-graph capture.
        CompileError, DriverError: the kernel could not be compiled, loaded or launched.
    """
    key: Any
    warm: Callable[[], object] | None
    try:
        x, x_scales = a
        y, y_scales = b
        device = d.get_device()
        key = (
            x.data_ptr(),
            x_scales.data_ptr(),
            y.data_ptr(),
            y_scales.data_ptr(),
            d.data_ptr(),
            x.shape,
            x_scales.shape,
            y.shape,
            y_scales.shape,
            d.shape,
            x.stride(),
            x_scales.stride(),
            y.stride(),
            y_scales.stride(),
            d.stride(),
            x.dtype,
            x_scales.dtype,
            y.dtype,
            y_scales.dtype,
            d.dtype,
            x.requires_grad,
            y.requires_grad,
            d.requires_grad,
            _is_grad_enabled(),
            c is None,
            recipe,
            recipe_a,
            recipe_b,
            compiled_dims,
            disable_ue8m0_cast,
            device,
            _raw_stream(device) if device >= 0 else None,
            _current_device() if device >= 0 else None,
        )
        warm = _warm.get(key)
    except (TypeError, ValueError, AttributeError, RuntimeError):
        # Something is wrong with the arguments, or a list stands for a tuple: validation says which.
        key = warm = None
    if warm is not None:
        warm()
    else:
        _first_call(key, a, b, d, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast)


def _first_call(key: Any, a: Any, b: Any, d: Any, c: Any, *rest: Any) -> None:
    """Validate, run, and remember what to do the next time: under ``key``, and where operands have moved.

    Addresses that come once are as good as many that never come again: a launch of their own is made when they come
    again.
    """
    remembered, moved = _warm, _moved  # before anything is decided: see _forget_warm
    if key is not None and key not in remembered and _run_moved(moved, key, a, b):
        _remember(remembered, key, None)
        return
    recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast = rest
    x = validate_fp8_gemm(a, b, d, c, recipe, recipe_a, recipe_b, compiled_dims or "", disable_ue8m0_cast)
    if x.m == 0:
        return
    if x.k == 0:
        x.d.zero_()
        return
    if x.device.type == "cpu":
        fp8_gemm_reference(x)
        return
    device, current = x.device.index, _current_device()
    with torch.cuda.device(device):
        gemm = _prepare(x, device)
        if gemm is None:
            fp8_gemm_reference(x)
            return
        call = _record(gemm, x)
        call()
    if key is None:
        return
    # The common case, the tensors' device being the current one, needs no guard.
    _remember(remembered, key, call if current == device else _OnDevice(device, call))
    kind = (gemm.constant_b, key[_PLACES:])
    # Where one is there already, addresses came again, or are aligned in another way, as others may be from now on.
    if current == device and not (kind in moved and moved[kind].fits(key[:_PLACES])):
        _remember(moved, kind, MovedCall(gemm, x))


def _run_moved(moved: dict[Any, MovedCall], key: Any, a: Any, b: Any) -> bool:
    """Make the call of ``key`` as one that differs in addresses was made; False if there was none that fits."""
    if not (isinstance(a, (tuple, list)) and isinstance(b, (tuple, list))):
        return False  # an iterator, which the key has used up: validation says so
    (x, x_scales), (y, y_scales) = a, b
    call = moved.get((constant.is_constant(y) and constant.is_constant(y_scales), key[_PLACES:]))
    if call is None or (_is_grad_enabled() and (x_scales.requires_grad or y_scales.requires_grad)):
        return False
    device, at = key[_DEVICE], key[:_PLACES]
    if not x.get_device() == x_scales.get_device() == y.get_device() == y_scales.get_device() == device:
        return False
    if not call.fits(at):
        return False
    call(at)
    return True


def _remember(known: dict[Any, Any], key: Any, what: Any) -> None:
    if len(known) >= _MAX_WARM:
        known.clear()
    known[key] = what


def _prepare(x: FP8GemmOperands, device: int) -> Gemm | None:
    """What multiplies these operands, on the current stream of ``device``; None for the reference."""
    problem = GemmProblem(
        m=x.m,
        n=x.n,
        k=x.k,
        num_sms=options.num_sms_for(device),
        d_tma=x.d_tma,
        compiled_dims="" if options.ignore_compile_dims() else x.compiled_dims,
        block_multiple=options.get_block_size_multiple_of(),
        whole_gpu=options.whole_gpu(device),
    )
    try:
        arch.for_device(device)
    except UnsupportedError as error:
        if settings.fallback != "torch":
            raise
        warn_once("fallback", f"DG_FALLBACK=torch: running the reference implementation, which is slow. {error}")
        return None
    engine.plan(problem, device)  # before scales are transposed, so that an error names the shape
    geometry, addresses = _layout(x)
    constant_b = constant.is_constant(x.b) and constant.is_constant(x.sfb)
    return Gemm(problem, geometry, addresses, device, _raw_stream(device), constant_b)


def _record(gemm: Gemm, x: FP8GemmOperands) -> Callable[[], None]:
    """The launch of ``gemm`` at its addresses, and that which transposes scales of A before it, if need be."""
    if not x.sfa_ready:
        at = gemm.addresses
        return functools.partial(MovedCall(gemm, x), (at.a, at.sfa, at.b, at.sfb, at.d))
    return engine.fp8_gemm_launch(
        gemm.problem, gemm.geometry, gemm.addresses, gemm.device, gemm.stream, constant_b=gemm.constant_b
    )


def _layout(x: FP8GemmOperands) -> tuple[Geometry, Addresses]:
    """Strides and addresses of the operands, scales of A as they will be when TMA reads them."""
    ready = x.sfa_ready and x.sfa.shape[1] > 1
    geometry = Geometry(
        m=x.m,
        n=x.n,
        k=x.k,
        stride_a=_row_stride(x.a),
        stride_b=_row_stride(x.b),
        stride_d=_row_stride(x.d),
        stride_sfa=x.sfa.stride(1) if ready else align(x.m, 4),
        stride_sfb=(x.sfb.stride(0), x.sfb.stride(1)),
    )
    addresses = Addresses(
        a=x.a.data_ptr(), sfa=x.sfa.data_ptr(), b=x.b.data_ptr(), sfb=x.sfb.data_ptr(), d=x.d.data_ptr()
    )
    return geometry, addresses


def _row_stride(x: Tensor) -> int:
    """Elements from row to row. The stride of a single row may be anything, and TMA wants a multiple of 16 bytes."""
    return x.stride(0) if x.shape[0] > 1 else align(x.shape[1], 16)


class _OnDevice:
    """A call made with its device current, whatever the caller's is."""

    def __init__(self, device: int, inner: Callable[[], object]) -> None:
        self._device = device
        self._inner = inner

    def __call__(self) -> None:
        with torch.cuda.device(self._device):
            self._inner()


def _as_nt(x: tuple[Tensor, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """An operand given transposed, with its scales, as views the other way round."""
    if not isinstance(x, (tuple, list)) or len(x) != 2 or not all(isinstance(t, Tensor) and t.dim() == 2 for t in x):
        raise InvalidInputError(f"{name} must be a pair (tensor, scales) of tensors with 2 dimensions.")
    values, scales = x
    if values.shape[0] > 1 and values.stride(0) != 1 and values.dtype == torch.float8_e4m3fn:
        raise UnsupportedError(
            f"{name} is stored with K along its rows' outer dimension ({tuple(values.shape)}, strides "
            f"{values.stride()}), and Hopper multiplies FP8 only where K is contiguous. Store it K-major: pass "
            f"{name}.t().contiguous().t()."
        )
    return values.t(), scales.t()


def fp8_gemm_nn(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], d: Tensor, *args: Any, **kwargs: Any) -> None:
    """`fp8_gemm_nt` with b given as (K, N) and its scales as (ceil(K / 128), ceil(N / 128)).

    Hopper's FP8 needs K contiguous in memory: b must be a transposed view of K-major storage, else UnsupportedError.
    """
    fp8_gemm_nt(a, _as_nt(b, "b"), d, *args, **kwargs)


def fp8_gemm_tn(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], d: Tensor, *args: Any, **kwargs: Any) -> None:
    """`fp8_gemm_nt` with a given as (K, M) and b as (K, N), with scales likewise; both views of K-major storage."""
    fp8_gemm_nt(_as_nt(a, "a"), _as_nt(b, "b"), d, *args, **kwargs)


def fp8_gemm_tt(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], d: Tensor, *args: Any, **kwargs: Any) -> None:
    """`fp8_gemm_nt` with a given as (K, M) and its scales likewise; a view of K-major storage."""
    fp8_gemm_nt(_as_nt(a, "a"), b, d, *args, **kwargs)


fp8_fp4_gemm_nt = fp8_gemm_nt
fp8_fp4_gemm_nn = fp8_gemm_nn
fp8_fp4_gemm_tn = fp8_gemm_tn
fp8_fp4_gemm_tt = fp8_gemm_tt
