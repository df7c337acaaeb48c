"""The reference against products computed element by element."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import deep_gemm
from deep_gemm.ops import reference
from deep_gemm.testing import assert_close_to_exact, calc_diff, integer_operands, one_hot_operand, random_operands


def run(a: torch.Tensor, sfa: torch.Tensor, b: torch.Tensor, sfb: torch.Tensor) -> torch.Tensor:
    d = torch.full((a.shape[0], b.shape[0]), float("nan"), dtype=torch.bfloat16)
    deep_gemm.fp8_gemm_nt((a, sfa), (b, sfb), d)
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
    reference.fp8_gemm_reference(wide[:, :272], scales, b, sfb, d[:, 13:153])
    assert torch.equal(d[:, 13:153], reference.exact_product(a, sfa, b, sfb).bfloat16())
    assert bool((d[:, :13] == 7).all())
    assert bool((d[:, 153:] == 7).all())


@contextlib.contextmanager
def switched(switch: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    switch(value)
    try:
        yield
    finally:
        switch(before)


def matmul_precision(value: str) -> contextlib.AbstractContextManager[None]:
    return switched(torch.set_float32_matmul_precision, value, torch.get_float32_matmul_precision())


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "autocast to bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "default dtype float64": lambda: switched(torch.set_default_dtype, torch.float64, torch.float32),
    "default dtype bfloat16": lambda: switched(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "default device meta": lambda: switched(torch.set_default_device, "meta", None),
    "device context": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "medium precision": lambda: matmul_precision("medium"),
    "deterministic": lambda: switched(torch.use_deterministic_algorithms, True, False),
    "anomalies": torch.autograd.detect_anomaly,
    "one thread": lambda: switched(torch.set_num_threads, 1, torch.get_num_threads()),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("mode", MODES)
def test_what_a_process_has_switched_on_changes_nothing(mode: str) -> None:
    """Process-wide modes do not change the reference, the exact product that tests compare with, or casts. Values
    exceed float16's range and bfloat16's precision."""
    (a, sfa), (b, sfb), x, y = random_operands(40, 136, 272, "cpu")
    sfa = (sfa * 2.0**20).requires_grad_()

    def results() -> list[torch.Tensor]:
        d, wide = (torch.full((40, 136), float("nan"), dtype=each, device="cpu") for each in (x.dtype, torch.float32))
        deep_gemm.fp8_gemm_nt((a, sfa), (b, sfb), d)
        deep_gemm.bf16_gemm_nt(x, y, wide)
        casts = [
            deep_gemm.per_token_cast_to_fp8(x, True),
            deep_gemm.per_block_cast_to_fp8(x, False),
            deep_gemm.per_channel_cast_to_fp8(x, False),
            deep_gemm.per_custom_dims_cast_to_fp8(x, (0,), True),
        ]
        layouts = [deep_gemm.get_mn_major_tma_aligned_tensor(sfa), deep_gemm.dequantise(a, sfa)]
        return [d, wide, reference.exact_product(a, sfa, b, sfb), *itertools.chain(*casts), *layouts]

    plain = results()
    assert_close_to_exact(plain[0], a, sfa, b, sfb)
    assert float(plain[0].abs().max()) > 65504
    with MODES[mode]():
        found = results()
    for one, other in zip(found, plain, strict=True):
        assert one.dtype == other.dtype
        assert one.device == other.device
        assert torch.equal(one.float(), other.float())
    with MODES[mode]():
        assert_close_to_exact(plain[0], a, sfa, b, sfb)


@pytest.mark.parametrize("k", [272, 0])
def test_an_output_of_inference_mode_is_written_outside_of_it(k: int) -> None:
    """A kernel would write it, too."""
    (a, sfa), (b, sfb) = integer_operands(8, 136, k, "cpu")
    with torch.inference_mode():
        d = torch.full((8, 136), float("nan"), dtype=torch.bfloat16)
    deep_gemm.fp8_gemm_nt((a, sfa), (b, sfb), d)
    assert torch.equal(d, reference.exact_product(a, sfa, b, sfb).bfloat16())
