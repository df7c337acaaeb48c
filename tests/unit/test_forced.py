"""The helpers with which GPU tests force configs and build kernels, tested without a GPU."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import pytest
import torch
from built import built, kernels_of
from chosen import SWAPPED, argument_names, entry, find_config, make_params
from driver_fakes import FakeDriver
from forced import compiled, force, load, nvrtc
from gpu_fakes import FakeGpu
from jit_fakes import FakeCompiler, cubin_of

from deep_gemm import fused, kernels
from deep_gemm.errors import CompileError
from deep_gemm.jit import Builder
from deep_gemm.params import KernelParams
from deep_gemm.runtime import engine
from deep_gemm.testing import random_operands

PARAMS = [
    make_params(find_config(block_m=128, block_n=64)),
    make_params(find_config(block_m=64, block_n=16), "direct"),
    make_params(find_config(SWAPPED, block_m=16, cluster_k=2)),
]


def test_kernels_are_compiled_and_loaded(driver: FakeDriver, tmp_path: Path) -> None:
    builder = Builder(tmp_path, FakeCompiler())
    with compiled((params, builder, params) for params in PARAMS) as binaries:
        for params in PARAMS:
            binary = binaries[params].result()
            assert binary.cubin == cubin_of(engine.build_request(params).source)
            function = load(params, binary)
            assert function.symbol == entry(params)
            assert function.dynamic_shared == kernels.get(params.kernel).shared_bytes(params)


def test_one_that_does_not_compile_raises_when_it_is_asked_for(tmp_path: Path) -> None:
    def refuse(source: str) -> None:
        if "kTmaStore = false" in source:
            raise CompileError("no")

    builder = Builder(tmp_path, FakeCompiler(on_compile=refuse))
    with compiled((params, builder, params) for params in PARAMS) as binaries:
        assert binaries[PARAMS[0]].result().layer == "compiled"
        with pytest.raises(CompileError, match="no"):
            binaries[PARAMS[1]].result()


@pytest.mark.parametrize("params", PARAMS, ids=entry)
def test_a_launch_has_the_operands(driver: FakeDriver, params: KernelParams, tmp_path: Path) -> None:
    function = load(params, Builder(tmp_path, FakeCompiler()).build(engine.build_request(params)))
    (a, sfa), (b, sfb), _, _ = random_operands(37, 200, 272, "cpu")
    d = torch.empty(37, 200, dtype=torch.bfloat16)
    forced = force(params, function, (a, sfa), (b, sfb), d, num_sms=132, stream=7)
    assert torch.equal(forced.scales, sfa)
    assert forced.scales.stride() == (1, 40)
    assert bool(forced.scales.as_strided((3, 40), (40, 1))[:, 37:].isnan().all())
    forced()
    name, (config, _, parameters, _) = driver.calls[-1]
    assert name == "cuLaunchKernelEx"
    assert (config.gridDimX, config.blockDimX) == (
        forced.launch.shape.grid[0],
        kernels.gemm_family(params.kernel).rules.num_threads(params.gemm),
    )
    names = argument_names(params)
    at = dict(zip(names, struct.unpack(f"={len(names)}Q", ctypes.string_at(parameters, len(names) * 8)), strict=True))
    assert ctypes.c_uint64.from_address(at["scale_b"]).value == sfb.data_ptr()
    assert ctypes.c_uint64.from_address(at["d"]).value == d.data_ptr()
    assert [ctypes.c_uint32.from_address(at[name]).value for name in ("m", "n", "k")] == [37, 200, 272]
    one_row = int(params.gemm.block_m >= 37)  # columns of tiles, so that B is loaded with evict-first
    assert [ctypes.c_uint32.from_address(at[name]).value for name in ("early_stages", "evict_first")] == [0, one_row]


def test_an_output_that_cannot_be_stored_by_tma_is_refused(driver: FakeDriver, tmp_path: Path) -> None:
    function = load(PARAMS[0], Builder(tmp_path, FakeCompiler()).build(engine.build_request(PARAMS[0])))
    a, b, _, _ = random_operands(37, 201, 272, "cpu")
    with pytest.raises(ValueError, match="no output for tma"):
        force(PARAMS[0], function, a, b, torch.empty(37, 201, dtype=torch.bfloat16), 132, 0)


def test_nvrtc_whatever_is_the_default() -> None:
    assert nvrtc().kind == "nvrtc"


def test_kernels_that_a_file_needs_are_known_before(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(4, 200, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = kernels_of([lambda: fused.rms_norm(fused.mul_add(x, x[0], x[0]), x[0])])
    assert sorted(map(entry, found)) == ["mul_add_bf16_bf16_4x256", "rms_norm_bf16_bf16_4x256"]
    assert gpu.launched == []
    compiled_before: list[KernelParams] = []
    monkeypatch.setattr(engine, "build", compiled_before.append)
    monkeypatch.setattr(engine, "load", lambda *of_kernel: None)
    with built(found):
        for params in found:
            engine.load(params, 0, "a call")
    assert set(compiled_before) == found
    with pytest.raises(AssertionError, match=r"not compiled before: \['rms_norm_bf16_bf16_4x256'\]"), built([]):
        engine.load(max(found, key=entry), 0, "a call")
