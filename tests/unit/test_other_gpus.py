"""GPUs other than Hopper: what their kernels compute in place of Hopper's instructions, and what is refused."""

import ctypes
import re
from pathlib import Path

import pytest
import torch
from host_code import compiled

from deep_gemm import arch, kernels, ops, select
from deep_gemm.arch import SM80, SM86, SM90
from deep_gemm.errors import UnsupportedError
from deep_gemm.kernels import groups
from deep_gemm.kernels.portable.template import WIDENING, warp_tile
from deep_gemm.ops.table import EXPONENTS, M_FP8, M_FP8_MASKED, PSUM
from deep_gemm.select import calibration, sheets
from deep_gemm.spec import QuantizeSpec

_CODE = """
extern "C" void bytes(const float* x, unsigned char* y, long count) {
  for (long i = 0; i < count; ++i) y[i] = e4m3_of(x[i]);
}
extern "C" void words(const float* x, unsigned* y, long count) {
  for (long i = 0; i < count; ++i) y[i] = to_e4m3(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
}
extern "C" void values(const unsigned char* x, float* y, long count) {
  for (long i = 0; i < count; ++i) y[i] = of_e4m3(x[i]);
}
extern "C" void larger(const unsigned* x, const unsigned* y, unsigned* z, long count) {
  for (long i = 0; i < count; ++i) z[i] = max_of_halves(x[i], y[i]);
}
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled(tmp_path_factory.mktemp("host"), "e4m3.cuh", _CODE)


def run(host: ctypes.CDLL, name: str, *tensors: torch.Tensor) -> torch.Tensor:
    """The last one of the tensors, which the function of this name fills; its length is the count."""
    getattr(host, name)(*(ctypes.c_void_p(x.data_ptr()) for x in tensors), ctypes.c_long(tensors[-1].numel()))
    return tensors[-1]


def every_kind_of_float() -> torch.Tensor:
    """Float32 numbers with each sign, exponent and first seven bits of the mantissa: on the borders between bytes, in
    the middle, and next to both. NaNs and infinities are among them."""
    upper = torch.arange(1 << 16, dtype=torch.int64).repeat_interleave(6) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]).repeat(1 << 16)
    mixed = torch.randperm(upper.numel(), generator=torch.Generator().manual_seed(0))
    return (upper + lower)[mixed].to(torch.uint32).view(torch.float32)


def test_fp8_by_software_is_what_the_instruction_gives(host: ctypes.CDLL) -> None:
    """torch rounds as it does. It does not saturate, and keeps the sign of NaN."""
    x = every_kind_of_float()
    found = run(host, "bytes", x, torch.empty(x.numel(), dtype=torch.uint8))
    exact = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    exact[x.isnan()] = 0x7F
    assert torch.equal(found, exact)
    assert set(exact.tolist()) == set(range(256)) - {0xFF}
    packed = run(host, "words", x, torch.empty(x.numel() // 4, dtype=torch.int32))
    assert torch.equal(packed.view(torch.uint8), exact)


def test_fp8_is_widened_to_its_value(host: ctypes.CDLL) -> None:
    x = torch.arange(256).to(torch.uint8)
    found, exact = run(host, "values", x, torch.empty(256)), x.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(found, exact, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.signbit()[:127], exact.signbit()[:127])
    assert torch.equal(found.signbit()[128:255], exact.signbit()[128:255])


def test_the_larger_of_packed_magnitudes(host: ctypes.CDLL) -> None:
    some = torch.tensor([0, 1, 2, 0x7F, 0x80, 0x3FFF, 0x4000, 0x7F7F, 0x7F80, 0x7F81, 0x7FFE, 0x7FFF])
    each = torch.cartesian_prod(some, some, some, some).to(torch.int32)
    x, y = each[:, 0] << 16 | each[:, 1], each[:, 2] << 16 | each[:, 3]
    found = run(host, "larger", x, y, torch.empty_like(x))
    assert torch.equal(found, each[:, 0].max(each[:, 2]) << 16 | each[:, 1].max(each[:, 3]))


@pytest.mark.parametrize("target", arch.names())
def test_casts_and_functions_of_rows_are_for_every_gpu(target: str) -> None:
    spec = arch.get(target)
    assert kernels.for_helper(QuantizeSpec(4, 256, "bf16", "row", "none"), spec).arch is SM90
    for name in ("quantize", "rows", "copy_rows", "transpose_bytes", "transpose_scales"):
        cases = kernels.get(name).cases(spec)
        assert {case.arch for case in cases} == {target}
        assert len(cases) == len(kernels.get(name).cases())
        assert {case.config for case in cases} <= set(kernels.get(name).configs(spec))


def test_the_page_names_every_target() -> None:
    text = (Path(__file__).parents[2] / "docs" / "other_gpus.md").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("| target")]
    assert set(re.findall(r"sm_\w+", line)) == set(arch.names())


def test_gpus_are_known_by_their_capability() -> None:
    assert arch.for_capability((8, 6)) is SM86
    with pytest.raises(UnsupportedError, match=r"A T4 has .* 7\.5, and deep_gemm supports 8\.0, 8\.6.*DG_FALLBACK"):
        arch.for_capability((7, 5), "A T4")
    early = [name for name in arch.names() if arch.has_dependent_launch(name)]
    assert early == ["sm_90a", "sm_100a", "sm_103a", "sm_120a"]
    assert SM80.ctas_fit(163 * 1024, 1)
    assert not SM80.ctas_fit(82 * 1024, 2)


OTHERS = [sheet for sheet in sheets.SHEETS if sheet.arch != SM90.name]


def ranked(sheet: sheets.Sheet, op: str, m: int, n: int) -> list[select.Choice]:
    spec, known = ops.spec(m, n, 8192, sheet.sms, op), calibration.for_device(sheet.device, sheet.sms, arch=sheet.arch)
    return select.rank(spec, arch.get(sheet.arch), known)


@pytest.mark.parametrize("sheet", OTHERS, ids=lambda sheet: sheet.name)
def test_choices_follow_what_kernels_do_on_a_card(sheet: sheets.Sheet) -> None:
    """Few tokens take swapped operands, unless reading weights takes so long that all tiles are alike. Many take the
    largest tile, if tiles of all sizes divide evenly among the SMs. FP8 is faster than BF16 where bytes count; where
    products count, it is so only by an instruction of its own."""
    few, many = {}, {}
    for op in ("fp8_gemm_nt", "bf16_gemm_nt"):
        found = ranked(sheet, op, 8, 8192)
        few[op], swapped = found[0].estimate, next(choice for choice in found if choice.config.swap_ab)
        assert swapped is found[0] or (op == "bf16_gemm_nt" and swapped.estimate.total_us < 1.005 * few[op].total_us)
        best = ranked(sheet, op, 4096, 256 * sheet.sms)[0]
        tiles = kernels.gemm_family(best.config.family).configs(arch.get(sheet.arch))
        assert best.config.block_m * best.config.block_n == max(config.block_m * config.block_n for config in tiles)
        many[op] = best.estimate
    assert few["fp8_gemm_nt"].total_us < few["bf16_gemm_nt"].total_us
    fp8, half = many["fp8_gemm_nt"], many["bf16_gemm_nt"]
    low, high = {"sm_89": (0.4, 0.6), "sm_120a": (0.2, 0.6)}.get(sheet.arch, (0.9, 1.1))
    assert low < fp8.tensor_us / half.tensor_us < high
    assert (fp8.total_us < 0.6 * half.total_us) == (sheet.arch in ("sm_89", "sm_120a"))


@pytest.mark.parametrize("op", ["fp8_gemm_nt", M_FP8, M_FP8 + PSUM, M_FP8_MASKED])
@pytest.mark.parametrize("m", [8, 4096])
def test_exponents_are_scales_on_other_gpus(op: str, m: int) -> None:
    """On Hopper no kernel takes them. Promotion takes twice the instructions where products have no scales."""
    spec = ops.spec(m, 4096, 8192, 108, op, groups=4, expected_m=m, scaling=EXPONENTS)
    for sheet in OTHERS:
        chosen = select.rank(spec, arch.get(sheet.arch), calibration.for_device(sheet.device, arch=sheet.arch))[0]
        assert chosen.config.family.startswith("mma_fp8")
    with pytest.raises(UnsupportedError, match=r"another GPU than sm_90a: mma_fp8.* Pass float32 scales"):
        select.rank(spec, SM90)
    blocks, family = ops.spec(m, 4096, 8192, 108, op), kernels.gemm_family("mma_fp8")
    for target, factor in (("sm_120a", 1), ("sm_89", 2)) if op == "fp8_gemm_nt" else ():
        costs = [family.features(each, family.configs(SM80)[0], target).promotion for each in (blocks, spec)]
        assert costs[1] == factor * costs[0]


def test_widening_is_a_cost_of_the_target_and_a_rate_one_of_the_card() -> None:
    """A100s widen FP8, which L40S do not; the instruction that 5090s have for FP8 has four times the rate of BF16."""
    family, spec = kernels.gemm_family("mma_fp8"), ops.spec(8192, 8192, 8192, 108)
    for config in family.configs(SM80):
        widened, native = (family.features(spec, config, target) for target in ("sm_80", "sm_89"))
        assert widened.issue == WIDENING * config.num_consumers * sum(warp_tile(config)) > native.issue
        assert widened.tensor == native.tensor
        assert widened.promotion == 2 * native.promotion
    rates = {sheet.name: round(sheet.reached(element_bytes=1) / sheet.reached(element_bytes=2), 2) for sheet in OTHERS}
    widens = {sheet.name for sheet in OTHERS if sheet.arch not in ("sm_89", "sm_120a")}
    assert {name for name, rate in rates.items() if rate == 1} == widens
    assert {name for name, rate in rates.items() if rate == 4} == {"5090"}


@pytest.mark.parametrize("num_sms", [16, 82, 108, 188])
def test_memory_holds_the_sums_of_all_parts_of_decode_kernels(num_sms: int) -> None:
    """A word counts the parts of each warp's sums, which are at least eight in a lane."""
    seen = 0
    for op, family in (("bf16_gemm_nt", "mma_decode"), ("fp8_gemm_nt", "mma_fp8_decode")):
        for m, n, k in ((1, 64, 16384), (16, 512, 7168), (9, 1040, 32768), (8, 2048, 65536)):
            spec = ops.spec(m, n, k, num_sms, op)
            known = kernels.gemm_family(family)
            for config in known.fitting(spec, known.legal(SM80)):
                parts, warps = groups.parts(config, spec), 4 * config.num_consumers
                tiles = config.block_m * config.block_n // 128
                owned = -(-tiles // warps)
                places = -(-n // config.block_n) * (tiles // owned)
                counts, sums = -(-places // 16) * 128, parts * places * max(8, 4 * owned) * 128
                assert parts == 1 or counts + sums <= kernels.memory_bytes(spec, SM80)
                seen += parts > 1
    assert seen > 10
