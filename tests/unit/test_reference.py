"""The reference against products computed element by element."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_gemm import reference, validate
from deep_gemm.spec import ceil_div
from deep_gemm.testing import assert_close_to_exact, calc_diff, integer_operands, one_hot_operand, random_operands


def run(a: torch.Tensor, sfa: torch.Tensor, b: torch.Tensor, sfb: torch.Tensor) -> torch.Tensor:
    d = torch.full((a.shape[0], b.shape[0]), float("nan"), dtype=torch.bfloat16)
    reference.fp8_gemm_reference(validate.fp8_gemm((a, sfa), (b, sfb), d))
    return d


def by_hand(a: torch.Tensor, sfa: torch.Tensor, b: torch.Tensor, sfb: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64)
    x, y = a.double().tolist(), b.double().tolist()
    sx, sy = sfa.double().tolist(), sfb.double().tolist()
    for i, j in itertools.product(range(a.shape[0]), range(b.shape[0])):
        out[i, j] = sum(x[i][k] * sx[i][k // 128] * y[j][k] * sy[j // 128][k // 128] for k in range(a.shape[1]))
    return out


@pytest.mark.parametrize(("m", "n", "k"), [(3, 5, 16), (2, 131, 144), (4, 2, 400), (1, 1, 0), (0, 4, 128)])
def test_the_exact_product(m: int, n: int, k: int) -> None:
    (a, sfa), (b, sfb), _, _ = random_operands(m, n, k, "cpu")
    exact = reference.exact_product(a, sfa, b, sfb)
    assert exact.dtype == torch.float64
    assert torch.allclose(exact, by_hand(a, sfa, b, sfb), rtol=1e-13, atol=1e-13)


@settings(deadline=None)
@given(m=st.integers(0, 70), n=st.integers(1, 300), k=st.integers(0, 30).map(lambda x: 16 * x), seed=st.integers(0, 99))
def test_within_the_oracle(m: int, n: int, k: int, seed: int) -> None:
    (a, sfa), (b, sfb), x, y = random_operands(m, n, k, "cpu", seed)
    d = run(a, sfa, b, sfb)
    assert_close_to_exact(d, a, sfa, b, sfb)
    if k >= 128 and m * n >= 1000:
        assert calc_diff(d, x.double() @ y.double().t()) < 1e-3


@settings(deadline=None)
@given(m=st.integers(0, 70), n=st.integers(1, 300), k=st.integers(0, 30).map(lambda x: 16 * x), seed=st.integers(0, 99))
def test_integers_are_exact(m: int, n: int, k: int, seed: int) -> None:
    (a, sfa), (b, sfb) = integer_operands(m, n, k, "cpu", seed)
    assert torch.equal(run(a, sfa, b, sfb), reference.exact_product(a, sfa, b, sfb).bfloat16())


def test_one_hot_rows_pick_columns() -> None:
    (a, sfa), index = one_hot_operand(50, 400, "cpu")
    _, (b, sfb) = integer_operands(1, 260, 400, "cpu")
    scales = sfb.repeat_interleave(128, 0)[:260].repeat_interleave(128, 1)[:, :400]
    assert torch.equal(run(a, sfa, b, sfb).float(), (b.float() * scales).t()[index])


def test_chunks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    (a, sfa), (b, sfb) = integer_operands(77, 555, 272, "cpu")
    whole = reference.exact_product(a, sfa, b, sfb)
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 5000)
    assert torch.equal(reference.exact_product(a, sfa, b, sfb), whole)
    assert torch.equal(run(a, sfa, b, sfb), whole.bfloat16())


def test_memory_is_bounded() -> None:
    sizes = []

    def watch(x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.numel())
        return x

    (a, sfa), (b, sfb) = integer_operands(1, 8000, 4096, "cpu")
    reference.exact_product(a, sfa, b, sfb, watch)
    assert max(sizes) <= reference.CHUNK_ELEMENTS
    assert sum(sizes) >= b.numel() > reference.CHUNK_ELEMENTS


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_stays_in_its_row(value: float) -> None:
    (a, sfa), (b, sfb), _, _ = random_operands(6, 200, 256, "cpu")
    sfa[2, 1] = value
    d = run(a, sfa, b, sfb)
    assert not bool(d[2].isfinite().any())
    assert bool(d[[0, 1, 3, 4, 5]].isfinite().all())
    clean = reference.exact_product(a, torch.nan_to_num(sfa, 1.0, 1.0), b, sfb)
    assert torch.allclose(d[3].double(), clean[3], rtol=2**-7, atol=1e-2)


def test_strided_everything() -> None:
    (a, sfa), (b, sfb) = integer_operands(20, 140, 272, "cpu")
    wide = torch.zeros(20, 320).to(torch.float8_e4m3fn)
    wide[:, :272] = a
    d = torch.full((20, 200), 7.0, dtype=torch.bfloat16)
    scales = sfa.t().contiguous().t()
    reference.fp8_gemm_reference(validate.fp8_gemm((wide[:, :272], scales), (b, sfb), d[:, 13:153]))
    assert torch.equal(d[:, 13:153], reference.exact_product(a, sfa, b, sfb).bfloat16())
    assert bool((d[:, :13] == 7).all())
    assert bool((d[:, 153:] == 7).all())


def test_k_zero_gives_zeros() -> None:
    d = run(
        torch.zeros(3, 0).to(torch.float8_e4m3fn),
        torch.zeros(3, 0),
        torch.zeros(5, 0).to(torch.float8_e4m3fn),
        torch.zeros(ceil_div(5, 128), 0),
    )
    assert torch.equal(d, torch.zeros(3, 5, dtype=torch.bfloat16))
