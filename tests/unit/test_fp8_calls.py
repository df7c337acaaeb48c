"""What calls of fp8_gemm launch: with c, with scales of each kind, and with operands that must be transposed first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_fakes import FakeGpu

import deep_gemm
from deep_gemm import InvalidInputError

E4M3 = torch.float8_e4m3fn
M, N, K = 24, 136, 272
WGRAD = (1, 1, 128)


def values(rows: int, k_major: bool = True) -> torch.Tensor:
    return torch.zeros(rows, K).to(E4M3) if k_major else torch.zeros(K, rows).to(E4M3).t()


def row_scales(rows: int, ready: bool = True) -> torch.Tensor:
    return torch.ones(3, rows).t() if ready else torch.ones(rows, 3)


def matrix(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(M, N, dtype=dtype)


@pytest.mark.parametrize("a_ready", [True, False])
@pytest.mark.parametrize("b_ready", [True, False])
@pytest.mark.parametrize("a_k_major", [True, False])
@pytest.mark.parametrize("b_k_major", [True, False])
def test_what_lies_otherwise_is_transposed_first(
    gpu: FakeGpu, a_ready: bool, b_ready: bool, a_k_major: bool, b_k_major: bool
) -> None:
    """First, warm and replayed; each transpose is launched before the product, which reads what it wrote."""
    cases = [
        ((values(M, a_k_major), row_scales(M, a_ready)), (values(N, b_k_major), row_scales(N, b_ready)), matrix())
        for _ in range(3)
    ]
    wanted = [
        *([] if a_k_major else ["transpose bytes"]),
        *([] if a_ready else ["transpose"]),
        *([] if b_k_major else ["transpose bytes"]),
        *([] if b_ready else ["transpose"]),
        "gemm",
    ]
    for a, b, d in (*cases, cases[0], cases[0]):
        gpu.launched.clear()
        deep_gemm.fp8_gemm_nt(a, b, d, recipe=WGRAD)
        assert [launched.kernel for launched in gpu.launched] == wanted
        *before, product = gpu.launched
        written = {launched.at["source"]: launched.at["target"] for launched in before}
        for name, tensor in (("a", a[0]), ("sfa", a[1]), ("b", b[0]), ("sfb", b[1]), ("d", d)):
            assert product.at[name] == written.get(tensor.data_ptr(), tensor.data_ptr()), name
        assert product.strides["a"] == product.strides["b"] == (K, 1)
        assert (product.strides["sfa"], product.strides["sfb"]) == ((1, M), (1, N))
        assert product.spec.d.dtype == "f32"
        assert product.spec.a.scaling == product.spec.b.scaling == "1x128"


@pytest.mark.parametrize("output", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_added_is_in_the_spec_and_an_operand(gpu: FakeGpu, output: torch.dtype) -> None:
    a, b = (values(M), row_scales(M)), (values(N), torch.ones(2, 3))
    c, d = matrix(output), matrix(output)
    for added, accumulate in ((None, "none"), (d, "in place"), (c, "from c"), (d[:], "in place")):
        deep_gemm.fp8_gemm_nt(a, b, d, added)
        launched = gpu.launched[-1]
        assert launched.spec.accumulate == accumulate
        assert launched.at.get("c") == (None if added is None else added.data_ptr())
        assert launched.strides.get("c") == (None if added is None else (N, 1))
    with pytest.raises(InvalidInputError, match="c must have d's dtype"):
        deep_gemm.fp8_gemm_nt(a, b, d, matrix(torch.float64))


SCALES: list[tuple[Any, Any, int, int]] = [
    (torch.ones(()), torch.ones(1), 0, 0),
    (torch.ones(M, 1), torch.ones(1, N), 1, 1),
    (torch.ones(M, 4)[:, 1:2], torch.ones(N, 1), 4, 1),
    (torch.ones(1, 1).expand(M, 1), torch.ones(3, N)[1:2], 0, 1),
    (torch.ones(M), torch.ones(2 * N)[::2], 1, 2),
]


@pytest.mark.parametrize(("sfa", "sfb", "of_a", "of_b"), SCALES)
def test_scales_of_rows_are_read_by_one_stride(
    gpu: FakeGpu, sfa: torch.Tensor, sfb: torch.Tensor, of_a: int, of_b: int
) -> None:
    deep_gemm.fp8_gemm_nt((values(M), sfa), (values(N), sfb), matrix(torch.bfloat16))
    (launched,) = gpu.launched
    assert (launched.spec.a.scaling, launched.spec.b.scaling) == ("row", "row")
    assert (launched.strides["sfa"], launched.strides["sfb"]) == ((of_a,), (of_b,))


def test_a_transposed_copy_of_promised_weights_is_not_constant(gpu: FakeGpu) -> None:
    """It is written by the launch before."""
    for k_major in (True, False):
        b = values(N, k_major), torch.ones(2, 3)
        deep_gemm.declare_constant(*b)
        deep_gemm.fp8_gemm_nt((values(M), row_scales(M)), b, matrix(torch.bfloat16))
        assert gpu.launched[-1].constant is k_major


@pytest.mark.parametrize("accumulate", ["none", "in place", "from c"])
def test_k_of_zero_is_c_or_zeros(accumulate: str) -> None:
    a, b = (torch.zeros(M, 0).to(E4M3), torch.ones(M, 0)), (torch.zeros(N, 0).to(E4M3), torch.ones(2, 0))
    d, c = torch.full((M, N), 3.0), torch.full((M, N), 2.0)
    deep_gemm.fp8_gemm_nt(a, b, d, {"none": None, "in place": d, "from c": c}[accumulate])
    assert torch.equal(d, torch.full((M, N), {"none": 0.0, "in place": 3.0, "from c": 2.0}[accumulate]))
