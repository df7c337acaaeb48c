"""Tests of the tools that check kernels: they must accept right results and catch wrong ones."""

import os
from collections.abc import Callable

import pytest
import torch

from deep_gemm import InvalidInputError, testing
from deep_gemm.ops.cast_reference import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.ops.reference import exact_product
from deep_gemm.testing import (
    assert_close_to_exact,
    assert_half_close_to_exact,
    calc_diff,
    count_bytes,
    guarded,
    guarded_copy,
)
from deep_gemm.testing.accuracy import ACCUMULATOR_FRACTION_BITS, INSTRUCTION_K, accumulation_bound
from deep_gemm.testing.bench import _silence, _time_of

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def operands(m: int, n: int, k: int, seed: int = 0) -> Tensors:
    (a, sfa), (b, sfb), _, _ = testing.random_operands(m, n, k, "cpu", seed)
    return a, sfa, b, sfb


def outliers(m: int, n: int, k: int) -> Tensors:
    """One pair of large values in each block: all other products are cut to the last bits that are kept."""
    generator = torch.Generator().manual_seed(k)
    x, y = (torch.randn(rows, k, generator=generator).mul(0.02).clamp(-0.2, 0.2) for rows in (m, n))
    x[:, 5::128], y[:, 5::128] = 0.75, 1.9
    return (*per_token_cast_to_fp8(x, use_ue8m0=False), *per_block_cast_to_fp8(y, use_ue8m0=False))


def positive(m: int, n: int, k: int) -> Tensors:
    a, sfa, b, sfb = operands(m, n, k)
    return a.float().abs().to(a.dtype), sfa, b.float().abs().to(b.dtype), sfb


def tensor_core(a: torch.Tensor, sfa: torch.Tensor, b: torch.Tensor, sfb: torch.Tensor) -> torch.Tensor:
    """The product as Hopper forms it: addends cut at the largest exponent's 13th bit, promoted every 128 of K."""
    x, y, n = a.double(), b.double(), b.shape[0]
    out = torch.zeros(a.shape[0], n)
    for block in range(0, a.shape[1], 128):
        accumulator = torch.zeros(a.shape[0], n, dtype=torch.float64)
        for start in range(block, min(block + 128, a.shape[1]), INSTRUCTION_K):
            part = slice(start, start + INSTRUCTION_K)
            addends = torch.cat([x[:, None, part] * y[None, :, part], accumulator[..., None]], dim=-1)
            exponent = torch.frexp(addends.abs().amax(-1, keepdim=True))[1] - 1
            unit = torch.exp2((exponent - ACCUMULATOR_FRACTION_BITS).double())
            accumulator = (torch.trunc(addends / unit) * unit).sum(-1)
        scale = sfa[:, block // 128, None] * sfb[:, block // 128].repeat_interleave(128)[:n]
        out += accumulator.float() * scale
    return out


@pytest.mark.parametrize(("m", "n", "k"), [(32, 160, 128), (32, 130, 528), (16, 40, 7168)])
def test_the_bound_holds_for_a_simulated_tensor_core(m: int, n: int, k: int) -> None:
    case = operands(m, n, k)
    ratio = (tensor_core(*case).double() - exact_product(*case)).abs() / accumulation_bound(*case)
    assert 0.01 < float(ratio.max()) < 0.2
    assert assert_close_to_exact(tensor_core(*case).bfloat16(), *case) <= 1


def test_the_bound_holds_beside_outliers() -> None:
    case = outliers(32, 160, 512)
    ratio = (tensor_core(*case).double() - exact_product(*case)).abs() / accumulation_bound(*case)
    assert 0.1 < float(ratio.max()) < 0.5


def test_data_of_one_sign_needs_the_worst_case() -> None:
    case = positive(16, 40, 4096)
    d = tensor_core(*case)
    with pytest.raises(AssertionError, match="outside the bound"):
        assert_close_to_exact(d, *case)
    assert assert_close_to_exact(d, *case, worst_case=True) < 0.2


def skip_a_scale(a: torch.Tensor, sfa: torch.Tensor, b: torch.Tensor, sfb: torch.Tensor) -> Tensors:
    sfa = sfa.clone()
    sfa[-1, 1] = 1.0
    return a, sfa, b, sfb


def take_the_next_scale(a: torch.Tensor, sfa: torch.Tensor, b: torch.Tensor, sfb: torch.Tensor) -> Tensors:
    return a, sfa.roll(1, 1), b, sfb


def take_the_next_block_of_b(a: torch.Tensor, sfa: torch.Tensor, b: torch.Tensor, sfb: torch.Tensor) -> Tensors:
    return a, sfa, b, sfb.roll(1, 1)


def drop_the_last_block(a: torch.Tensor, sfa: torch.Tensor, b: torch.Tensor, sfb: torch.Tensor) -> Tensors:
    a = a.float()
    a[:, a.shape[1] - 1 & ~127 :] = 0
    return a.to(torch.float8_e4m3fn), sfa, b, sfb


def swap_two_rows(a: torch.Tensor, sfa: torch.Tensor, b: torch.Tensor, sfb: torch.Tensor) -> Tensors:
    order = [1, 0, *range(2, a.shape[0])]
    return a.view(torch.uint8)[order].view(a.dtype), sfa[order], b, sfb


def repeat_a_column(a: torch.Tensor, sfa: torch.Tensor, b: torch.Tensor, sfb: torch.Tensor) -> Tensors:
    order = [*range(b.shape[0] - 1), b.shape[0] - 2]
    return a, sfa, b.view(torch.uint8)[order].view(b.dtype), sfb


MUTATIONS = [
    skip_a_scale, take_the_next_scale, take_the_next_block_of_b, drop_the_last_block, swap_two_rows, repeat_a_column,
]  # fmt: skip


@pytest.mark.parametrize("shape", [(8, 24, 272), (40, 136, 7168), (3, 24, 16384)])
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_kernel_is_caught(mutation: Callable[..., Tensors], shape: tuple[int, int, int]) -> None:
    case = operands(*shape)
    right = tensor_core(*case) if shape[2] < 1000 else exact_product(*case)
    assert_close_to_exact(right.bfloat16(), *case)
    with pytest.raises(AssertionError, match="outside the bound"):
        assert_close_to_exact(exact_product(*mutation(*case)).bfloat16(), *case)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 1e9])
def test_one_bad_element_is_caught_and_named(value: float) -> None:
    case = operands(20, 140, 256)
    d = exact_product(*case).bfloat16()
    d[17, 133] = value
    with pytest.raises(AssertionError, match=r"1 of 2800 .*d\[17, 133\].*bad rows \[17\], bad columns \[133\]"):
        assert_close_to_exact(d, *case)


def test_an_error_of_one_unit_in_the_last_place_is_caught_where_rounding_is_all() -> None:
    (a, sfa), _ = testing.one_hot_operand(20, 256, "cpu")
    _, (b, sfb) = testing.integer_operands(1, 140, 256, "cpu")
    b = b.float().abs().clamp(min=1).to(b.dtype)
    d = exact_product(a, sfa, b, sfb).bfloat16()
    d[3, 7] = d[3, 7] * (1 + 2**-6)
    with pytest.raises(AssertionError, match=r"1 of 2800"):
        assert_close_to_exact(d, a, sfa, b, sfb)


def test_nan_that_belongs_there_passes() -> None:
    a, sfa, b, sfb = operands(5, 40, 256)
    sfa[2, 0] = float("nan")
    d = exact_product(a, sfa, b, sfb).bfloat16()
    assert_close_to_exact(d, a, sfa, b, sfb)
    d[2, 5] = 1.0
    with pytest.raises(AssertionError, match=r"d\[2, 5\]"):
        assert_close_to_exact(d, a, sfa, b, sfb)


def test_rows_are_compared_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    case = operands(50, 40, 128)
    d = exact_product(*case).bfloat16()
    monkeypatch.setattr("deep_gemm.testing.accuracy.CHUNK_ELEMENTS", 160)
    assert_close_to_exact(d, *case)
    d[49, 0] = -d[49, 0]
    with pytest.raises(AssertionError, match=r"d\[49, 0\].*bad rows \[49\]"):
        assert_close_to_exact(d, *case)


def test_a_wrong_shape_is_no_pass() -> None:
    with pytest.raises(AssertionError, match="shape"):
        assert_close_to_exact(torch.zeros(3, 5), *operands(3, 6, 128))


def test_empty_results_are_close() -> None:
    assert assert_close_to_exact(torch.zeros(0, 6), *operands(0, 6, 128)) == 0
    assert assert_close_to_exact(torch.zeros(3, 6), *operands(3, 6, 0)) == 0


def test_integer_operands_are_what_they_say() -> None:
    (a, sfa), (b, sfb) = testing.integer_operands(40, 300, 400, "cpu")
    assert set(a.float().unique().tolist()) == set(range(-3, 4)) == set(b.float().unique().tolist())
    assert set(sfa.unique().tolist()) == {0.5, 1.0, 2.0}
    assert sfb.shape == (3, 4)
    case = (a, sfa, b, sfb)
    assert torch.equal(tensor_core(*case).double(), exact_product(*case))


def test_calc_diff() -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert float(calc_diff(x, x)) == pytest.approx(0, abs=1e-15)
    assert float(calc_diff(x, -x)) == pytest.approx(2)
    assert float(calc_diff(x, x * 1.1)) == pytest.approx(1 - 2.2 / (1 + 1.21))
    assert float(calc_diff(torch.zeros(3), torch.zeros(3))) == 0
    assert float(calc_diff(torch.zeros(0), torch.zeros(0))) == 0
    assert not bool(calc_diff(x, torch.full_like(x, float("nan"))) < 1e-3)
    with pytest.raises(InvalidInputError, match="same shape"):
        calc_diff(x, x[:5])


def test_count_bytes() -> None:
    x = torch.zeros(3, 5, dtype=torch.bfloat16)
    assert count_bytes(x, (x.float(), [x, None]), None) == 30 + 60 + 30
    assert count_bytes() == 0
    with pytest.raises(InvalidInputError, match="int"):
        count_bytes(3)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("strides", "offset"), [(None, 0), ((9, 1), 8), ((1, 4), 4), ((5, 1), 64)])
def test_guards(dtype: torch.dtype, strides: tuple[int, int] | None, offset: int) -> None:
    buffer = guarded((4, 5), dtype, "cpu", strides, offset)
    assert bool(buffer.tensor.float().isnan().all())
    assert buffer.tensor.stride() == (strides or (5, 1))
    assert (buffer.tensor.data_ptr() - buffer.memory.data_ptr()) % 64 == offset % 64
    buffer.tensor.copy_(torch.ones(4, 5))
    buffer.check()
    start = buffer.tensor.data_ptr() - buffer.memory.data_ptr()
    for byte in (start - 1, 0, -1):
        before = int(buffer.memory[byte])
        buffer.memory[byte] = 0
        with pytest.raises(AssertionError, match="1 bytes around d were overwritten"):
            buffer.check("d")
        buffer.memory[byte] = before
    buffer.check()


def test_guards_see_the_gaps_between_rows() -> None:
    buffer = guarded_copy(torch.ones(4, 5), strides=(8, 1))
    assert torch.equal(buffer.tensor, torch.ones(4, 5))
    buffer.check()
    buffer.tensor.as_strided((1,), (1,), buffer.tensor.storage_offset() + 5).fill_(0)
    with pytest.raises(AssertionError, match="from byte 20 of it to byte 23"):
        buffer.check()


def test_guards_of_nothing() -> None:
    guarded((0, 5), torch.float32, "cpu").check()
    with pytest.raises(InvalidInputError, match="multiple of the 4 bytes"):
        guarded((2,), torch.float32, "cpu", offset=2)


SEEN = [("gemm<1>", 3e-6), ("fill", 9e-6), ("gemm<1>", 5e-6), ("reduce", 1e-6), ("reduce", 1e-6)]


def test_kernel_times_are_picked_by_name() -> None:
    assert _time_of("gemm", SEEN, 2, several=False) == pytest.approx(4e-6)
    assert _time_of("e", SEEN, 2, several=True) == pytest.approx(5e-6)
    with pytest.raises(InvalidInputError, match="several kernels"):
        _time_of("e", SEEN, 2, several=False)
    with pytest.raises(InvalidInputError, match=r"no kernel with 'softmax'.*fill"):
        _time_of("softmax", SEEN, 2, several=False)


def test_silence(capfd: pytest.CaptureFixture[str]) -> None:
    with _silence():
        os.write(1, b"hidden")
        os.write(2, b"hidden")
    os.write(1, b"shown")
    assert capfd.readouterr() == ("shown", "")


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_of_halves_is_within_its_bound_and_no_step_can_be_missing(dtype: torch.dtype, wide: bool) -> None:
    """A missing c is caught as well, and an extra rounding of a float32 output."""
    out = torch.float32 if wide else dtype
    generator = torch.Generator().manual_seed(1)
    a, b, c = (torch.randn(*shape, generator=generator) for shape in ((20, 4096), (30, 4096), (20, 30)))
    a, b, c = a.to(dtype), b.to(dtype), c.to(out)
    exact = a.double() @ b.double().t()
    d = (exact + c.double()).to(out)
    assert assert_half_close_to_exact(d, a, b, c) <= 1
    assert assert_half_close_to_exact(exact.to(out), a, b) <= 1
    missing = exact - a[:, 512:528].double() @ b[:, 512:528].double().t()
    for wrong, added in ((missing.to(out), None), (exact.to(out), c)):
        with pytest.raises(AssertionError, match="outside the bound"):
            assert_half_close_to_exact(wrong, a, b, added)
    if wide and dtype == torch.bfloat16:
        with pytest.raises(AssertionError, match="outside the bound"):
            assert_half_close_to_exact(d.to(dtype).float(), a, b, c)
