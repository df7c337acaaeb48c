"""The helpers of tests/gpu, without a GPU: forced configs, kernels built before a file's tests, the record of a run."""

import ctypes
import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from built import built, kernels_of
from chosen import SWAPPED, argument_names, find_config, kernel_name, make_params
from driver_fakes import FakeDriver
from forced import force, load
from gpu_fakes import FakeGpu
from gpu_record import OUTCOMES, GpuRecord
from jit_fakes import FakeCompiler

from deep_gemm import fused, kernels
from deep_gemm.jit import Builder
from deep_gemm.params import KernelParams
from deep_gemm.runtime import engine
from deep_gemm.testing import random_operands

PARAMS = [
    make_params(find_config(block_m=128, block_n=64)),
    make_params(find_config(block_m=64, block_n=16), "direct"),
    make_params(find_config(SWAPPED, block_m=16, cluster_k=2)),
]


@pytest.mark.parametrize("params", PARAMS, ids=kernel_name)
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
        kernels.gemm_family(params.kernel).template.num_threads(params.gemm),
    )
    names = argument_names(params)
    at = dict(zip(names, struct.unpack(f"={len(names)}Q", ctypes.string_at(parameters, len(names) * 8)), strict=True))
    assert ctypes.c_uint64.from_address(at["scale_b"]).value == sfb.data_ptr()
    assert ctypes.c_uint64.from_address(at["d"]).value == d.data_ptr()
    assert [ctypes.c_uint32.from_address(at[name]).value for name in ("m", "n", "k")] == [37, 200, 272]
    one_row = int(params.gemm.block_m >= 37)  # columns of tiles, so that B is loaded with evict-first
    assert [ctypes.c_uint32.from_address(at[name]).value for name in ("early_stages", "evict_first")] == [0, one_row]


def test_kernels_that_a_file_needs_are_known_before(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(4, 200, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = kernels_of([lambda: fused.rms_norm(fused.mul_add(x, x[0], x[0]), x[0])])
    assert sorted(map(kernel_name, found)) == ["mul_add_bf16_bf16_4x256", "rms_norm_bf16_bf16_4x256"]
    assert gpu.launched == []
    compiled_before: list[KernelParams] = []
    monkeypatch.setattr(engine, "build", compiled_before.append)
    monkeypatch.setattr(engine, "load", lambda *of_kernel: None)
    with built(found):
        for params in found:
            engine.load(params, 0, "a call")
    assert set(compiled_before) == found
    with pytest.raises(AssertionError, match=r"not compiled before: \['rms_norm_bf16_bf16_4x256'\]"), built([]):
        engine.load(max(found, key=kernel_name), 0, "a call")


Tests = list[tuple[str, str]]  # file and outcome of each


def play(
    directory: Path, tests: Tests, stop: int | None = None, processes: int = 0, **options: Any
) -> dict[str, Any] | None:
    """The record after a run of ``tests``, of which only the first ``stop`` finish. Several processes run them side by
    side, or this one does."""
    record = GpuRecord(directory)
    option = SimpleNamespace(**({"keyword": "", "markexpr": "", "lf": False} | options))
    config = SimpleNamespace(args=["gpu"], option=option)
    items = [SimpleNamespace(path=directory / name) for name, _ in tests]
    session: Any = SimpleNamespace(items=items, config=config)
    for _ in range(processes):
        node: Any = SimpleNamespace(config=config)
        record.pytest_xdist_node_collection_finished(node, [f"tests/gpu/{name}::test" for name, _ in tests])
    if not processes:
        record.pytest_collection_finish(session)
    for name, outcome in tests[:stop]:
        nodeid = f"tests/gpu/{name}::test"
        phases = [("setup", outcome)] if outcome == "skipped" else [("setup", "passed"), ("call", outcome)]
        for when, result in (*phases, ("teardown", "passed")):
            report: Any = SimpleNamespace(nodeid=nodeid, when=when, outcome=result, passed=result == "passed")
            record.pytest_runtest_logreport(report)
        record.pytest_runtest_logfinish(nodeid)
    elsewhere: Any = SimpleNamespace(nodeid="tests/unit/test_a.py::test", when="call", outcome="passed", passed=True)
    record.pytest_runtest_logreport(elsewhere)
    record.pytest_runtest_logfinish(elsewhere.nodeid)
    return json.loads(record.path.read_text()) if record.path.exists() else None


A: Tests = [("test_a.py", "passed"), ("test_a.py", "failed")]
B: Tests = [("test_b.py", "passed"), ("test_b.py", "skipped")]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    folder = tmp_path / "gpu"
    folder.mkdir()
    for name in ("test_a.py", "test_b.py"):
        (folder / name).touch()
    return folder


@pytest.mark.parametrize("processes", [0, 2])
def test_a_whole_run_is_recorded(directory: Path, processes: int) -> None:
    written = play(directory, A + B, processes=processes)
    assert written is not None
    assert written["files"] == {"test_a.py": [1, 1, 0], "test_b.py": [1, 0, 1]}
    assert [written[name] for name in OUTCOMES] == [2, 1, 1]
    assert written["missing"] == []
    place = {"device", "driver", "cuda", "torch", "date", "source_digest", "tests_digest"}
    assert set(written) == {*OUTCOMES, *place, "missing", "files"}
    assert all(isinstance(written[name], str) for name in place)


def test_files_add_up_over_runs(directory: Path) -> None:
    first = play(directory, A)
    assert first is not None
    assert first["missing"] == ["test_b.py"]
    both = play(directory, B)
    assert both is not None
    assert set(both["files"]) == {"test_a.py", "test_b.py"}
    assert both["missing"] == []
    again = play(directory, A[:1])  # after the failure was fixed: the file has one test now
    assert again is not None
    assert again["files"]["test_a.py"] == [1, 0, 0]
    assert again["failed"] == 0
