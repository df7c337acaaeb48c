"""Helpers that other DeepGEMMs' tests import, and scales as their clients give them."""

from __future__ import annotations

import os

import pytest
import torch

import deep_gemm
from deep_gemm import InvalidInputError, testing
from deep_gemm.ops.cast_reference import per_token_cast_to_fp8
from deep_gemm.testing import assert_bitwise_equal, calc_diff, ignore_env


def test_bits_are_compared() -> None:
    x = torch.tensor([[1.0, 0.0], [torch.nan, 3.0]])
    assert_bitwise_equal(x, x.clone())
    assert_bitwise_equal(x.t(), x.t().contiguous())
    assert_bitwise_equal(torch.zeros(0), torch.zeros(0))
    other = x.clone()
    other[0, 1] = -0.0
    with pytest.raises(AssertionError, match=r"1 of 4 elements of logits have .* the first at \(0, 1\): 0.0 and"):
        assert_bitwise_equal(x, other, "logits")
    with pytest.raises(AssertionError, match="shapes or dtypes differ"):
        assert_bitwise_equal(x, x.double())
    with pytest.raises(AssertionError, match="shapes or dtypes differ"):
        assert_bitwise_equal(x, x[0])


def test_a_filtered_test_is_not_called(capsys: pytest.CaptureFixture[str]) -> None:
    called: list[int] = []
    wanted = False

    @testing.test_filter(lambda: wanted)
    def check(x: int) -> None:
        called.append(x)

    assert check(1) is None
    assert "check is left out" in capsys.readouterr().out
    wanted = True
    check(2)
    assert called == [2]
    assert check.__name__ == "check"


def test_a_variable_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_SOME", "1")
    seen: list[str | None] = []
    wanted = True

    @ignore_env("DG_SOME", lambda: wanted)
    def check() -> None:
        seen.append(os.environ.get("DG_SOME"))
        if len(seen) == 3:
            raise ValueError

    check()
    wanted = False
    check()
    wanted = True
    with pytest.raises(ValueError):
        check()
    assert seen == [None, "1", None]
    assert os.environ["DG_SOME"] == "1"


def test_scales_of_each_row_of_b_without_a_recipe() -> None:
    """As Transformers gives weights whose scales were E8M0: repeated to (N, K / 128)."""
    m, n, k = 5, 576, 512
    a, b = torch.randn(m, k), torch.randn(n, k)
    (qa, sfa), (qb, sfb) = (per_token_cast_to_fp8(x, use_ue8m0=True) for x in (a, b))
    d, expected = (torch.empty(m, n, dtype=torch.bfloat16) for _ in range(2))
    deep_gemm.fp8_gemm_nt((qa, sfa), (qb, sfb), d)
    deep_gemm.fp8_gemm_nt((qa, sfa), (qb, sfb), expected, recipe=(1, 1, 128))
    assert torch.equal(d, expected)
    assert calc_diff(d, a @ b.t()) < 1e-3
    with pytest.raises(InvalidInputError, match=r"the scales of b must have the shape \(5, 4\)"):
        deep_gemm.fp8_gemm_nt((qa, sfa), (qb, sfb[:-1]), d)
