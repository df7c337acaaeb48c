"""Operands for tests: random ones, ones with an exact product, and ones that reveal a wrong index."""

from __future__ import annotations

import torch
from torch import Tensor

from deep_gemm.ops.cast_reference import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.spec import SCALE_BLOCK, ceil_div

Operand = tuple[Tensor, Tensor]
"""An E4M3 tensor and its float32 scales."""


def random_operands(
    m: int, n: int, k: int, device: torch.device | str = "cuda", seed: int = 0
) -> tuple[Operand, Operand, Tensor, Tensor]:
    """Normal data through real 1 x 128 and 128 x 128 quantisation.

    Returns:
        (a, sfa), (b, sfb), and the bfloat16 matrices (m, k) and (n, k) that were quantised.

    >>> (a, sfa), b, x, y = deep_gemm.testing.random_operands(8, 128, 256, "cpu")
    >>> a.shape, sfa.shape
    (torch.Size([8, 256]), torch.Size([8, 2]))
    """
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(m, k, device=device, generator=generator).bfloat16()
    y = torch.randn(n, k, device=device, generator=generator).bfloat16()
    # Rows and blocks of different magnitude, so that a wrong scale shows.
    x *= torch.rand(m, 1, device=device, generator=generator).bfloat16() * 4 + 0.25
    return per_token_cast_to_fp8(x, use_ue8m0=False), per_block_cast_to_fp8(y, use_ue8m0=False), x, y


def integer_operands(
    m: int, n: int, k: int, device: torch.device | str = "cuda", seed: int = 0
) -> tuple[Operand, Operand]:
    """Integers from -3 to 3 with scales 1/2, 1 and 2: the product is exact in float32, in whatever order it is added.

    Inside a block of 128 sums stay below 2^11, which FP8 tensor cores hold exactly; scaled, everything is a multiple
    of 1/4 below 2^22 for K up to 100,000. So a kernel's result must equal the exact product rounded to d's dtype.

    >>> a, b = deep_gemm.testing.integer_operands(8, 128, 256, "cpu")
    >>> d = torch.empty(8, 128)
    >>> deep_gemm.fp8_gemm_nt(a, b, d)
    >>> torch.equal(d, (4 * d).round() / 4)
    True
    """
    generator = torch.Generator(device).manual_seed(seed)

    def integers(rows: int) -> Tensor:
        values = torch.randint(-3, 4, (rows, k), device=device, generator=generator)
        return values.float().to(torch.float8_e4m3fn)

    def scales(rows: int) -> Tensor:
        exponents = torch.randint(-1, 2, (rows, ceil_div(k, SCALE_BLOCK)), device=device, generator=generator)
        return torch.exp2(exponents.float())

    a, sfa = integers(m), scales(m)
    b, sfb = integers(n), scales(ceil_div(n, SCALE_BLOCK))
    return (a, sfa), (b, sfb)


def one_hot_operand(rows: int, k: int, device: torch.device | str = "cuda", seed: int = 0) -> tuple[Operand, Tensor]:
    """An A whose rows each hold a single 1, with scales of 1: row i of the product is column ``index[i]`` of B.

    Returns:
        (a, sfa) and the int64 index (rows,).

    >>> (a, sfa), index = deep_gemm.testing.one_hot_operand(8, 128, "cpu")
    >>> torch.equal(a.float().argmax(1), index)
    True
    """
    generator = torch.Generator(device).manual_seed(seed)
    index = torch.randint(0, k, (rows,), device=device, generator=generator)
    a = torch.zeros(rows, k, device=device)
    a[torch.arange(rows, device=device), index] = 1.0
    sfa = torch.ones(rows, ceil_div(k, SCALE_BLOCK), device=device)
    return (a.to(torch.float8_e4m3fn), sfa), index
