"""The reference: plain torch on any device, slow, and simple enough to be trusted.

It serves tensors on the CPU, GPUs without kernels (`DG_FALLBACK=torch`), and tests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from deep_gemm.quantisation import dequantise
from deep_gemm.spec import SCALE_BLOCK, align

CHUNK_ELEMENTS = 1 << 24
"""At most this many dequantised elements of A, of B and of the product exist at a time (128 MiB each in float64)."""

A_GRANULARITY = (1, SCALE_BLOCK)
B_GRANULARITY = (SCALE_BLOCK, SCALE_BLOCK)


def fp8_gemm_reference(a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, d: Tensor) -> None:
    """Write ``(a * sfa) @ (b * sfb)^T`` into ``d``, rounded once to d's dtype. Shapes are those of `fp8_gemm_nt`."""
    with plain_arithmetic(a.device):
        for rows, columns, block in _product_blocks(a, sfa, b, sfb, torch.float64):
            d[rows, columns].copy_(block)


def half_gemm_reference(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None) -> None:
    """Write ``(c +) a @ b^T`` into ``d``, rounded once to d's dtype. a (M, K) and b (N, K) are of any floating-point
    dtype and strides; c (M, N) may be d. Sums are float64: products of two elements of 16 bits are exact in it, and no
    mode of a process (TF32, bfloat16 in float32's place) changes them."""
    (m, k), n = a.shape, b.shape[0]
    with plain_arithmetic(a.device):
        step_n = max(1, CHUNK_ELEMENTS // max(k, 1))
        step_m = max(1, CHUNK_ELEMENTS // max(k, min(step_n, n), 1))
        for n0 in range(0, n, step_n):
            b_t = b[n0 : n0 + step_n].double().t()
            for m0 in range(0, m, step_m):
                block = a[m0 : m0 + step_m].double() @ b_t
                where = slice(m0, m0 + step_m), slice(n0, n0 + step_n)
                d[where].copy_(block if c is None else block + c[where])


@contextlib.contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """Switch off process-wide modes: autocast, which multiplies in bfloat16 or float16; gradients; and
    ``torch.set_default_device``. It uses inference mode, not no_grad, since tensors that were made in inference mode
    cannot be written outside of it. TF32, and bfloat16 in place of float32, do not matter: the reference is float64."""
    with torch.inference_mode(), torch.autocast(device.type, enabled=False), torch.device(device):
        yield


def exact_product(
    a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, elementwise: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """The product of the dequantised operands in float64, shape (M, N).

    a (M, K) and b (N, K) are E4M3, sfa (M, ceil(K / 128)) and sfb (ceil(N / 128), ceil(K / 128)) float32. Called exact
    because a product of two E4M3 values and two float32 scales has at most 56 significant bits: its error is some 2^-53
    times the sum of the magnitudes, far below the rounding of a GPU kernel. ``elementwise`` is applied to the
    dequantised operands first: torch.abs and torch.square give bounds on errors.
    """
    out = torch.empty(a.shape[0], b.shape[0], dtype=torch.float64, device=a.device)
    with plain_arithmetic(a.device):
        for rows, columns, block in _product_blocks(a, sfa, b, sfb, torch.float64, elementwise):
            out[rows, columns] = block
    return out


def _product_blocks(
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    dtype: torch.dtype,
    elementwise: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[tuple[slice, slice, Tensor]]:
    """The product block by block, (rows, columns, values), so that memory is bounded for any size."""

    def factor(x: Tensor, sf: Tensor, granularity: tuple[int, int]) -> Tensor:
        values = dequantise(x, sf, granularity, dtype)
        return values if elementwise is None else elementwise(values)

    (m, k), n = a.shape, b.shape[0]
    # A chunk of B has whole scale blocks, so its scales are a slice.
    step_n = align(max(1, CHUNK_ELEMENTS // max(k, 1)), SCALE_BLOCK)
    step_m = max(1, CHUNK_ELEMENTS // max(k, min(step_n, n), 1))
    for n0 in range(0, n, step_n):
        columns = slice(n0, min(n0 + step_n, n))
        blocks = slice(n0 // SCALE_BLOCK, align(columns.stop, SCALE_BLOCK) // SCALE_BLOCK)
        b_t = factor(b[columns], sfb[blocks], B_GRANULARITY).t()
        for m0 in range(0, m, step_m):
            rows = slice(m0, min(m0 + step_m, m))
            yield rows, columns, factor(a[rows], sfa[rows], A_GRANULARITY) @ b_t
