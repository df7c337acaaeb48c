"""The benchmark of GEMMs grouped along K, on the CPU."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from gpu_fakes import FakeGpu, gpu
from grouped_bench import Timer, cpu, made, timed

import deep_gemm
from deep_gemm import engine, kernels, select
from deep_gemm.arch import SM90
from deep_gemm.backends import deepgemm
from deep_gemm.benchmarks import grouped, k_grouped, survey
from deep_gemm.benchmarks.grouped_shapes import K_SHAPES, KINDS, KShape
from deep_gemm.errors import DeepGemmError
from deep_gemm.jit.driver.launch import Map, Pointer
from deep_gemm.ops.k_grouped import BF16, FP8, KGroupedBF16, KGroupedFP8
from deep_gemm.select.calibration import default

__all__ = ["cpu", "gpu", "made", "timed"]

pytestmark = pytest.mark.usefixtures("cpu")

COUNTS = (128, 384, 256)
M, N = 128, 192


def small(kind: str) -> KShape:
    shape = KShape(kind, "k", len(COUNTS), 256, M, N)
    vars(shape)["counts"] = COUNTS  # the cache of the property
    return shape


class Library:
    """DeepGEMM's functions, by ours. ``off`` is added to one tile."""

    __version__ = "2.6.1"

    def __init__(self, off: float = 0.0) -> None:
        self.off, self.given = off, []  # type: tuple[float, list[Any]]
        for name in (FP8, BF16):
            setattr(self, name, self.function(getattr(deep_gemm, name)))

    def function(self, ours: Any) -> Any:
        def run(
            a: Any, b: Any, d: torch.Tensor, ks: list[int], grouped_layout: torch.Tensor, c: torch.Tensor | None = None
        ) -> None:
            ours(a, b, d, ks, grouped_layout, c)
            self.given.append((ks, grouped_layout.tolist(), c is d))
            d[0, :64, :64] += self.off

        return run


def test_the_shapes_are_those_of_the_targets() -> None:
    assert len(K_SHAPES) == len(set(map(str, K_SHAPES))) == 2 * 5
    assert str(K_SHAPES[0]) == "fp8 k 4x8192 4096x7168"
    about = (32768, 33792, 33152, 32768, 33280)
    for shape, k in zip(K_SHAPES, about * 2, strict=True):
        assert abs(shape.k / k - 1) < 0.04
        assert len(shape.counts) == shape.groups
        assert all(0.7 * shape.mean - 1 < size < 1.3 * shape.mean + 128 for size in shape.counts)
        assert all(size % 128 == 0 for size in shape.counts)
        assert len(set(shape.counts)) > shape.groups // 4
        assert KShape("bf16", "k", shape.groups, shape.mean, 8, 8).counts == shape.counts


def test_bytes_and_flops() -> None:
    """C is read and D is written."""
    fp8, bf16 = small("fp8"), small("bf16")
    assert fp8.flops == bf16.flops == 2 * M * N * 768
    assert bf16.bytes_moved == 2 * 768 * (M + N) + 8 * 3 * M * N
    assert fp8.bytes_moved == 768 * (M + N) + 4 * 6 * (M + N) + 8 * 3 * M * N


@pytest.mark.parametrize("kind", KINDS)
def test_operands_and_the_difference_from_the_exact_product(kind: str) -> None:
    x = k_grouped.make(small(kind), "cpu")
    assert (x.d.shape, x.d.dtype, x.layout.tolist()) == ((3, M, N), torch.float32, list(COUNTS))
    if kind == "fp8":
        assert x.sfa is not None
        assert x.sfb is not None
        assert (x.a.shape, x.b.shape) == ((768 * M,), (768 * N,))
        assert (x.sfa.shape, x.sfa.stride(), x.sfb.shape) == ((M, 6), (1, M), (N, 6))
    else:
        assert (x.a.shape, x.b.shape) == ((768, M), (768, N))
    exact = list(k_grouped._exact(x))
    assert [e.shape for e in exact] == [(64, N)] * 3
    assert [round(float(e.std() / math.sqrt(k)), 1) for e, k in zip(exact, COUNTS, strict=True)] == [1.0] * 3
    assert k_grouped.from_exact(x) > 0.5  # zeros
    k_grouped.ours(x)()
    assert k_grouped.from_exact(x) < 1e-5
    once = x.d.clone()
    k_grouped.ours(x, on_device=True)()  # adds
    assert k_grouped.apart(2 * once, x.d) < 1e-9
    for group in range(3):
        x.d.copy_(once)[group, -1] = 0
        assert k_grouped.from_exact(x) > grouped.TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_peers_and_sizes_on_the_device(kind: str, timed: list[list[str]]) -> None:
    library = Library()
    deepgemm.use(library)
    row = k_grouped.measure(small(kind))
    names = ["ours", "device_sizes", "deepgemm"] + ["torch_overwrite"] * (kind == "bf16")
    assert timed == [names]
    assert library.given == [(list(COUNTS), list(COUNTS), True)]
    assert [row[key] for key in ("mode", "kind", "form", "groups", "m", "n", "k")] == [
        *("grouped", kind, "k", 3, M, N, 768)
    ]
    assert (row["us"], row["ratio_device_sizes"], row["ratio_deepgemm"]) == (10.0, 2.0, 3.0)
    assert not [key for key in row if key.startswith("refused_")]
    assert json.loads(json.dumps(row)) == row
    lines = [grouped.heading(k_grouped.PEERS), grouped.line(row, k_grouped.PEERS)]
    assert len(lines[0]) == len(lines[1])
    assert lines[1].split()[:4] == [kind, "k", "3x256", f"{M}x{N}"]
    means = grouped.means([row])
    assert means[0] == f"{kind} k 3x256: device_sizes / ours 2.000 over 1, least 2.000 at {M}x{N}"
    assert [text.endswith(", an easier problem") for text in means] == [False, False, True][: len(means)]


def test_sizes_are_given_as_the_benchmark_says(timed: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(k_grouped.grouped, BF16, lambda a, b, d, ks, layout, c: given.append((ks, layout, c is d)))
    x = k_grouped.make(small("bf16"))
    k_grouped.ours(x)()
    k_grouped.PEERS["device_sizes"](x)()
    assert given == [(list(COUNTS), x.layout, True), (None, x.layout, True)]


def test_torchs_arguments() -> None:
    """torch's own checks, on tensors without data."""
    call: Any = k_grouped.torch_overwrite(k_grouped.make(small("bf16"), "cpu"))
    ends = call.keywords["offs"]
    assert (ends.tolist(), ends.dtype) == ([128, 512, 768], torch.int32)
    a, b = (x.to("meta") for x in call.args)
    assert torch._grouped_mm(a, b, offs=ends.to("meta")).shape == (3, M, N)


@pytest.mark.parametrize("off", [200.0, math.nan])
def test_a_peer_with_another_result_is_not_timed(off: float, timed: list[list[str]]) -> None:
    """One tile is enough."""
    deepgemm.use(Library(off))
    row = k_grouped.measure(small("bf16"))
    assert "its result differs from ours by" in row["refused_deepgemm"]
    assert timed[0] == ["ours", "device_sizes", "torch_overwrite"]
    assert row["us_torch_overwrite"] == 30.0


def test_a_tile_of_zeros_is_seen() -> None:
    """Even in the widest of the shapes."""
    one = torch.randn(2, 256, 7168)
    other = one.clone()
    other[1, 128:, 128:256] = 0
    assert k_grouped.apart(one, other) > grouped.TOLERANCE
    assert k_grouped.apart(one, one) == 0


def test_wrong_results_and_absent_libraries(timed: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert k_grouped.measure(small("fp8"))["refused_deepgemm"].startswith("There is no DeepGEMM here")
    deepgemm.use(SimpleNamespace(__version__="1"))
    assert FP8 in k_grouped.measure(small("fp8"))["refused_deepgemm"]
    monkeypatch.setattr(k_grouped, "ours", lambda x: lambda: x.d.fill_(1.0))
    with pytest.raises(DeepGemmError, match="Our result differs from the exact one by"):
        k_grouped.measure(small("fp8"))


@pytest.fixture
def k_gpu(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Operations grouped along K on the fake GPU, too."""
    for operation in (KGroupedFP8, KGroupedBF16):
        gpu.checks[operation] = operation.check
        monkeypatch.setattr(operation, "check", gpu.checked(operation))
    monkeypatch.setattr(engine, "raw_stream", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return gpu


@pytest.mark.parametrize("kind", KINDS)
def test_a_survey_launches_what_a_call_launches(kind: str, k_gpu: FakeGpu) -> None:
    """Tensor maps are made once, where all configs read them."""
    x = k_grouped.make(small(kind), "cpu")
    k_grouped.ours(x)()
    called, k_gpu.launched = k_gpu.launched, []
    spec, strides, addresses, scratch = k_grouped.launch_of(x, 0)
    before = ["maps"] if kind == "fp8" else []
    assert [one.kernel for one in called] == [*before, "gemm"]
    assert [one.kernel for one in k_gpu.launched] == list(scratch) == before
    gemm = called[-1]
    assert (spec, strides) == (gemm.spec, gemm.strides)
    places = {name: room.data_ptr() for name, room in scratch.items()}
    assert addresses == gemm.at | places
    assert [one.at["maps"] for one in k_gpu.launched] == list(places.values())
    assert (spec.grouping, spec.accumulate, spec.d.dtype, addresses["c"]) == ("k", "in place", "f32", x.d.data_ptr())
    configs = select.legal(spec, SM90)
    assert len(configs) > 4
    for config in configs:  # everything of a launch that needs no GPU
        launch = kernels.gemm_family(config.family).launch(
            engine.kernel_params(spec, config, SM90), spec, strides, True, False
        )
        named = {parameter.operand for parameter in launch.parameters if isinstance(parameter, (Map, Pointer))}
        assert {"d", "layout", *scratch} <= named <= set(addresses)


@pytest.mark.parametrize("kind", KINDS)
def test_a_survey(kind: str, made: None, k_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(grouped.engine, "calibration_of", lambda device: default())
    monkeypatch.setattr(grouped.engine, "build", compiled.append)

    def timers(kept: Any, places: Any, asked: Any, configs: Any, mode: str, spec: Any, device: int) -> Any:
        ((x, launch),) = kept
        assert (x.shape.kind, places, mode) == (kind, [(launch.strides, launch.addresses)], "flush")
        names = [survey.name_of(config, asked, spec) for config in configs]
        assert len(names) == len(set(names)) == len(compiled)
        return ((name, Timer(10.0 + index)) for index, name in enumerate(names))

    monkeypatch.setattr(grouped.survey, "timers_at", timers)
    row = k_grouped.measure_configs(small(kind))
    assert (row["mode"], row["form"], row["k"]) == ("grouped survey", "k", 768)
    assert row["legal"] == len(compiled) > 4
    assert all(name.startswith(f"k_grouped_{kind}") for name in row["times"])
    assert "selected / best 1.000" in grouped.configs_lines(row)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(k_grouped.main, arguments)

    assert "Timing needs a GPU" in run().output
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(grouped.provenance, "environment", lambda: {"device": "a fake"})
    times = {"ours": 100.0, "device_sizes": 101.0}
    monkeypatch.setattr(k_grouped, "measure", lambda shape: grouped.make_row(shape, times, {"deepgemm": "it is busy"}))
    path = tmp_path / "rows.jsonl"
    found = run("--output", str(path), "--only", "fp8", "--only", "4x8192")
    assert found.exit_code == 0
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    assert [(row["m"], row["n"], row["device"]) for row in rows] == [(4096, 7168, "a fake"), (7168, 2048, "a fake")]
    assert found.output.splitlines()[0].split()[-3:] == list(k_grouped.PEERS)
    assert "fp8 k 4x8192: device_sizes / ours 1.010 over 2, least 1.010 at 4096x7168" in found.output
    assert "deepgemm was not timed: it is busy" in found.output
    other = {"mode": "grouped survey", "selected": "a", "legal": 9, "times": {"a": 2.0, "b": 1.0}}
    monkeypatch.setattr(k_grouped, "measure_configs", lambda shape: other | grouped.said(shape))
    assert run("--survey", "--only", "16x2048").output.count("a  (selected)") == 4
    assert "No shape is in all that --only names." in run("--only", "8x4096", "--only", "7168x2048").output
    assert "The time ran out before 10 measurements: fp8 k 4x8192" in run("--seconds", "-1").output
