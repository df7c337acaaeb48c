"""fp8_gemm_nt_skip_head_mid on a GPU: every kernel, and the bits of a dense product."""

from pathlib import Path

import head_cases
import pytest
import torch
from chosen import kernel_name
from forced import compiled, nvrtc
from gpu_cases import DEVICE
from head_cases import ODD, WHOLE, Splits, check, operands, output

import deep_gemm
from deep_gemm.jit import Builder
from deep_gemm.kernels.families import FP8_HEADS
from deep_gemm.ops.skip_head_mid import kept
from deep_gemm.testing import random_operands

cuda_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


@cuda_only
def test_every_kernel_is_exact_and_leaves_the_middle(kernels_root: Path) -> None:
    builder, cases = Builder(kernels_root, nvrtc()), FP8_HEADS.cases()
    with compiled((params, builder, params) for params in cases) as binaries:
        wrong = [kernel_name(x) for x in cases if binaries[x].result() and not head_cases.is_right(x, builder)]
    assert not wrong


@pytest.mark.parametrize("splits", WHOLE + ODD)
@pytest.mark.parametrize("m", [1, 64, 300, 4096])
def test_it_is_exact(m: int, splits: Splits) -> None:
    x, (d, before) = operands(m, 7, splits, 400), output(m, 7, splits)
    deep_gemm.fp8_gemm_nt_skip_head_mid((x["a"], x["sfa"]), (x["b"], x["sfb"]), d.tensor, splits)
    check(d, x, splits, before)


@cuda_only
def test_columns_have_the_bits_of_a_dense_product() -> None:
    splits = WHOLE[0]
    for m in (3, 200, 4096):
        a, b, *_ = random_operands(m, 16 * 256, 1536, DEVICE)
        d = torch.full((m, 16 * 320), 7.0, dtype=torch.bfloat16, device=DEVICE)
        dense = torch.empty(m, 16 * 256, dtype=torch.bfloat16, device=DEVICE)
        deep_gemm.set_batch_invariant(True)
        try:
            deep_gemm.fp8_gemm_nt_skip_head_mid(a, b, d, splits)
            deep_gemm.fp8_gemm_nt(a, b, dense)
        finally:
            deep_gemm.set_batch_invariant(False)
        assert torch.equal(torch.cat(kept(d, splits), 2).flatten(1), dense)
        assert bool((d.view(m, 16, 320)[..., 128:192] == 7).all())
