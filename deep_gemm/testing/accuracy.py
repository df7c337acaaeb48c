"""Is each element of a GEMM's result as close to the exact product as the hardware allows?

The bound, element by element, for D = A @ B^T with A and B dequantised::

    |d - exact|  <=  u |exact| + (1 + u) E

u is the unit roundoff of d's dtype (2^-8 for bfloat16): d is rounded once, at the end. E bounds what the accumulation
loses before that rounding, and comes from how Hopper's tensor cores add FP8 products:

* One wgmma instruction takes 32 of K. It shifts the 32 products and the accumulator to the largest exponent among
  them and cuts each off 13 bits below it. (NVIDIA does not document this; it was measured by others, and DeepSeek-V3's
  report puts it as "around 14 bits".) So each of the 33 addends is off by at most 2^-13 of the largest.
* A block of 128 of K is four instructions: 132 cuts. After it, the sum is scaled and added to a float32 accumulator;
  that and the scales round to 2^-24, some (K / 128 + 3) times in all.

In the worst case every cut errs the same way, and the largest addend is the sum of all magnitudes S = |A| @ |B|^T::

    E = (132 * 2^-13 + (K / 128 + 3) * 2^-24) S

That holds for any data, and is too wide to notice one missing K block among many. If the products have random signs, so
have the errors: 132 of them add up like the square root of 132, and sums of products grow like R = sqrt(A^2 @ (B^2)^T)
(squares of elements). No product is larger than R. The default is four times that::

    E = 4 (sqrt(132) * 2^-13 + (K / 128 + 3) * 2^-24) R

A simulation of such a tensor core (tests/unit/test_testing.py) stays below a fifth of it on quantised normal data, and
below a half if every block holds a pair of outliers that pushes all other products to the last bits that are kept. A
missing block of K causes an error of about R / sqrt(K / 128): for K = 7168, twenty times E. Data whose products mostly
have one sign needs ``worst_case=True``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deep_gemm.ops.reference import BLOCKS, Scalings, exact_product
from deep_gemm.spec import SCALE_BLOCK, ceil_div
from deep_gemm.tensors import check_tensor

INSTRUCTION_K = 32
ACCUMULATOR_FRACTION_BITS = 13
CUTS_PER_BLOCK = SCALE_BLOCK // INSTRUCTION_K * (INSTRUCTION_K + 1)

CHUNK_ELEMENTS = 1 << 25
"""Results are compared in groups of rows of about this many elements, to bound memory."""


def accumulation_bound(
    a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, worst_case: bool = False, scaling: Scalings = BLOCKS
) -> Tensor:
    """E of this module's docstring for each element, (M, N) float64.

    a (M, K), b (N, K) FP8; sfa and sfb float32, of the shapes that `fp8_gemm_nt` takes with ``scaling``.

    >>> a, b, _, _ = deep_gemm.testing.random_operands(8, 128, 256, "cpu")
    >>> deep_gemm.testing.accumulation_bound(*a, *b).shape
    torch.Size([8, 128])
    """
    _check(a=a, sfa=sfa, b=b, sfb=sfb)
    cut, rounding = 2.0**-ACCUMULATOR_FRACTION_BITS, (ceil_div(a.shape[1], SCALE_BLOCK) + 3) * 2.0**-24
    if worst_case:
        return (CUTS_PER_BLOCK * cut + rounding) * exact_product(a, sfa, b, sfb, torch.abs, scaling)
    root_sum_square = exact_product(a, sfa, b, sfb, torch.square, scaling).sqrt()
    return 4 * (math.sqrt(CUTS_PER_BLOCK) * cut + rounding) * root_sum_square


def assert_close_to_exact(
    d: Tensor,
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    worst_case: bool = False,
    *,
    c: Tensor | None = None,
    scaling: Scalings = BLOCKS,
) -> float:
    """Raise AssertionError unless every element of d (M, N) is within the bound of the exact product, and of c added to
    it where there is one.

    Where the exact value is NaN or infinite, d must be the same.

    Returns:
        The largest error as a fraction of its bound, at most 1.

    >>> a, b, _, _ = deep_gemm.testing.random_operands(8, 128, 256, "cpu")
    >>> d = torch.empty(8, 128)
    >>> deep_gemm.fp8_gemm_nt(a, b, d)
    >>> deep_gemm.testing.assert_close_to_exact(d, *a, *b) < 1
    True
    """
    _check(d=d, a=a, sfa=sfa, b=b, sfb=sfb, c=c)
    expected_shape = (a.shape[0], b.shape[0])
    if tuple(d.shape) != expected_shape:
        raise AssertionError(f"d has the shape {tuple(d.shape)}, and the product {expected_shape}")
    step = max(1, CHUNK_ELEMENTS // max(1, b.shape[0]))
    worst = 0.0
    if scaling[0] == "row":
        sfa = sfa.reshape(-1, 1).expand(a.shape[0], 1)
    for start in range(0, a.shape[0], step):
        rows = slice(start, min(start + step, a.shape[0]))
        operands = a[rows], sfa[rows], b, sfb
        exact = exact_product(*operands, scaling=scaling)
        bound = accumulation_bound(*operands, worst_case, scaling)
        if c is not None:
            exact, bound = exact + c[rows].double(), bound + 2.0**-24 * c[rows].double().abs()
        worst = max(worst, _compare(d[rows], exact, bound, start))
    return worst


def assert_half_close_to_exact(d: Tensor, a: Tensor, b: Tensor, c: Tensor | None = None) -> float:
    """The same for ``d = (c +) a @ b^T``, a (M, K) and b (N, K) bfloat16 or float16 of random signs; c (M, N).

    An instruction adds 16 products, which are exact, and the accumulator, and cuts each 23 bits or more below the
    largest. No product is larger than R = sqrt(A^2 @ (B^2)^T), and the accumulator is rarely larger than a few R. So E
    is twice the sum of all cuts, each taken as one of R. A missing k16 step causes an error of about R / sqrt(K / 16).

    >>> a, b, d = torch.randn(8, 64).bfloat16(), torch.randn(32, 64).bfloat16(), torch.empty(8, 32)
    >>> deep_gemm.bf16_gemm_nt(a, b, d)
    >>> deep_gemm.testing.assert_half_close_to_exact(d, a, b) < 1
    True
    """
    _check(d=d, a=a, b=b, c=c)
    exact = a.double() @ b.double().t() + (0.0 if c is None else c.double())
    return _compare(d, exact, half_accumulation_bound(a, b, c), 0)


def _check(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if name != "c" or tensor is not None:
            check_tensor(name, tensor)


def half_accumulation_bound(a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    """E of `assert_half_close_to_exact` for each element, (M, N) float64."""
    root_sum_square = (a.double().square() @ b.double().square().t()).sqrt()
    added = 0.0 if c is None else c.double().abs()
    return 2.0**-23 * (2 * 17 * -(-a.shape[1] // 16) * root_sum_square + added)


def tolerance(exact: Tensor, accumulation: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest error that a result of ``dtype`` may have: E of the accumulation, and one rounding at the end."""
    info = torch.finfo(dtype)
    unit = info.eps / 2
    # The last term is for results below the dtype's normal range, whose spacing no longer shrinks.
    return unit * exact.abs() + (1 + unit) * accumulation + info.smallest_normal * info.eps


def _compare(d: Tensor, exact: Tensor, accumulation: Tensor, first_row: int) -> float:
    allowed = tolerance(exact, accumulation, d.dtype)
    error = (d.double() - exact).abs()
    same = (d.double() == exact) | (d.isnan() & exact.isnan())
    bad = ~(same | (error <= allowed))
    if bad.any():
        count = int(bad.sum())
        row, column = (int(i) for i in bad.nonzero()[0])
        raise AssertionError(
            f"{count} of {bad.numel()} elements are outside the bound, first d[{first_row + row}, {column}] = "
            f"{float(d[row, column])!r}: exact {float(exact[row, column])!r}, error {float(error[row, column]):.3e}, "
            f"allowed {float(allowed[row, column]):.3e}; bad rows {_summary(bad.any(1), first_row)}, bad columns "
            f"{_summary(bad.any(0))}"
        )
    ratio = torch.where(same, 0.0, error / allowed)
    return float(ratio.max()) if ratio.numel() else 0.0


def _summary(mask: Tensor, offset: int = 0) -> str:
    indices = [int(i) + offset for i in mask.nonzero().flatten()[:6]]
    count = int(mask.sum())
    return f"{indices} ({count} of {mask.numel()})" if count > len(indices) else str(indices)
