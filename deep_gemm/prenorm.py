"""The product before a hyper-connection's norm."""

from __future__ import annotations

from torch import Tensor

from deep_gemm.ops import prenorm


def tf32_hc_prenorm_gemm(a: Tensor, b: Tensor, d: Tensor, sqr_sum: Tensor, num_splits: int | None = None) -> None:
    """d = a @ b^T by TF32 products, and sqr_sum = the sum of squares of each row of a.

    b is rounded to TF32 (to nearest, ties to even, as torch does); a is exact. Sums are float32, and repeats give the
    same bits. With few rows many SMs take part too, each with a part of K. Under `set_batch_invariant` the parts do not
    depend on M, and a row has the same bits whatever rows are beside it.

    Args:
        a: bf16 (M, K), contiguous along K. K is a multiple of 64.
        b: float32 (N, K), contiguous along K. N is 8, 16, 24 or 32.
        d: float32 (M, N); with ``num_splits`` (num_splits, M, N).
        sqr_sum: float32 (M); with ``num_splits`` (num_splits, M).
        num_splits: how many partial sums to write, each of a part of K. The caller adds them up.

    Raises:
        InvalidInputError: an argument is wrong.
        UnsupportedError: other N or K, or no kernel for this GPU.

    >>> a, b = torch.ones(8, 256).bfloat16(), torch.ones(24, 256)
    >>> deep_gemm.tf32_hc_prenorm_gemm(a, b, torch.empty(8, 24), torch.empty(8))
    """
    prenorm.hc_prenorm_gemm(a, b, d, sqr_sum, num_splits)
