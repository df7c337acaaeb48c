"""GPUs other than Hopper: what their kernels compute in place of Hopper's instructions, and what is refused."""

import ctypes
import re
from pathlib import Path

import pytest
import torch
from host_code import compiled

from deep_gemm import arch, kernels
from deep_gemm.arch import SM80, SM86, SM90
from deep_gemm.errors import UnsupportedError
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
