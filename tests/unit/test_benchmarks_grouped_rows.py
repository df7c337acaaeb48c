"""The benchmark of grouped GEMMs, on the CPU: measurements, rows, surveys, the command."""

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
from grouped_bench import K, Library, N, Timer, cpu, made, small, timed

from deep_gemm import engine, kernels, select
from deep_gemm.arch import SM90
from deep_gemm.backends import deepgemm
from deep_gemm.benchmarks import grouped, survey
from deep_gemm.benchmarks.grouped_shapes import FORMS, KINDS, SHAPES, Shape
from deep_gemm.errors import CompileError, DeepGemmError
from deep_gemm.jit.driver.launch import Map, Pointer
from deep_gemm.ops.m_grouped import MGroupedBF16, MGroupedFP8
from deep_gemm.select.calibration import default
from deep_gemm.timer import Single

__all__ = ["cpu", "gpu", "made", "timed"]

pytestmark = pytest.mark.usefixtures("cpu")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_absent_peers_are_named_with_their_reasons(kind: str, form: str, timed: list[list[str]]) -> None:
    row = grouped.measure(small(kind, form))
    peer = "torch" if kind == "bf16" else "torch_rowwise"
    assert row["refused_deepgemm"].startswith("There is no DeepGEMM here")
    if form == "masked":
        assert row[f"refused_{peer}"] == "torch has no masked form"
    assert ("torch" in timed[0]) == (kind == "bf16" and form == "contiguous")  # torch has it on the CPU, too
    assert timed[0][0] == "ours"
    assert row["us"] == 10.0
    for name in grouped.PEERS:
        assert (f"ratio_{name}" in row) == (name in timed[0])
    lines = grouped.refusals([row, row])
    assert len(lines) == len([key for key in row if key.startswith("refused_")])
    assert lines[0].startswith("deepgemm was not timed: There is no DeepGEMM here")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_deepgemm_is_called_by_its_names(kind: str, form: str, timed: list[list[str]]) -> None:
    for old in (False, True):
        library = Library(old)
        deepgemm.use(library)
        row = grouped.measure(small(kind, form))
        assert library.called == 1
        assert timed[-1][:2] == ["ours", "deepgemm"]
        assert row["ratio_deepgemm"] == 2.0
    deepgemm.use(SimpleNamespace(__version__="1"))
    assert "m_grouped" in grouped.measure(small(kind, form))["refused_deepgemm"]


@pytest.mark.parametrize("form", FORMS)
def test_a_peer_with_another_result_is_not_timed(form: str, timed: list[list[str]]) -> None:
    for off in (200.0, math.nan):
        deepgemm.use(Library(off=off))
        row = grouped.measure(small("bf16", form))
        assert "its result differs from ours by" in row["refused_deepgemm"]
        assert "deepgemm" not in timed[-1]


def test_our_wrong_result_is_an_error(timed: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "ours", lambda x: lambda: x.d.zero_())
    with pytest.raises(DeepGemmError, match="Our result differs from the exact one by"):
        grouped.measure(small("bf16"))


def test_a_row_says_how_fast_and_against_what() -> None:
    shape = small("fp8")
    row = grouped.make_row(shape, {"ours": 2.0, "deepgemm": 3.0}, {"torch_rowwise": "no GPU"})
    assert row["mode"] == "grouped"
    assert [row[name] for name in ("kind", "form", "groups", "mean", "m", "n", "k")] == [
        *("fp8", "contiguous", 3, 70, 231, N, K)
    ]
    assert row["tflops"] == round(2 * 231 * N * K / 2e-6 / 1e12, 1)
    assert row["gbps"] == round(shape.bytes_moved / 2e-6 / 1e9, 1)
    assert (row["us_deepgemm"], row["ratio_deepgemm"], row["refused_torch_rowwise"]) == (3.0, 1.5, "no GPU")
    assert "ratio_torch" not in row
    assert json.loads(json.dumps(row)) == row


def test_tables_from_made_up_times() -> None:
    shapes = [s for s in SHAPES if str(s).startswith("bf16 masked 32x20 ")]
    times = (100.0, 121.0, 110.0, 110.0)
    rows = [grouped.make_row(s, {"ours": 100.0, "deepgemm": us}, {}) for s, us in zip(shapes, times, strict=True)]
    assert grouped.means(rows) == ["bf16 masked 32x20: deepgemm / ours 1.100 over 4, least 1.000 at 6144x7168"]
    fp8 = grouped.make_row(small("fp8"), {"ours": 1.0, "torch_rowwise": 0.5}, {})
    assert grouped.means([fp8]) == [
        "fp8 contiguous 3x70: torch_rowwise / ours 0.500 over 1, least 0.500 at 256x384, an easier problem"
    ]
    lines = [grouped.heading(), *map(grouped.line, rows), grouped.line(fp8)]
    assert len({len(line) for line in lines}) == 1
    assert lines[2].split() == [
        *("bf16", "masked", "32x20", "7168x3072", "100.0", f"{rows[1]['tflops']}", f"{rows[1]['gbps']:.0f}"),
        *("1.210", "-", "-"),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_layouts_of_one_routing(kind: str, timed: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    row = grouped.measure_layouts(small(kind))
    assert timed == [["index", "psum", "masked"]]
    assert [row[f"us_{form}"] for form in timed[0]] == [10.0, 20.0, 30.0]
    assert (row["ratio_psum"], row["ratio_masked"], row["equal"]) == (2.0, 3.0, True)
    assert "the same bits" in grouped.layouts_line(row)
    monkeypatch.setattr(grouped, "ours", lambda x: lambda: x.d.fill_(float(x.form == "psum")))
    row = grouped.measure_layouts(small(kind))
    assert row["equal"] is False
    assert "THE BITS DIFFER" in grouped.layouts_line(row)


@pytest.fixture
def grouped_gpu(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Grouped operations on the fake GPU, too."""
    for operation in (MGroupedFP8, MGroupedBF16):
        gpu.checks[operation] = operation.check
        monkeypatch.setattr(operation, "check", gpu.checked(operation))
    return gpu


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_survey_launches_what_a_call_launches(kind: str, form: str, grouped_gpu: FakeGpu) -> None:
    x = grouped.make(small(kind, form), "cpu")
    grouped.ours(x)()
    (launched,) = grouped_gpu.launched
    assert grouped.launch_of(x, 0) == (launched.spec, launched.strides, launched.at, {})
    spec, strides, addresses, _ = grouped.launch_of(x, 0)
    assert spec.grouping == form
    configs = select.legal(spec, SM90)
    assert len(configs) > 10
    for config in configs:  # everything of a launch that needs no GPU
        params = engine.kernel_params(spec, config, SM90)
        launch = kernels.gemm_family(config.family).launch(params, spec, strides, True, False)
        named = {parameter.operand for parameter in launch.parameters if isinstance(parameter, (Map, Pointer))}
        assert named == set(addresses) == {"a", "b", "layout", "d"} | ({"sfa", "sfb"} if kind == "fp8" else set())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_survey(kind: str, form: str, made: None, grouped_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(grouped.engine, "calibration_of", lambda device: default())
    monkeypatch.setattr(grouped.engine, "build", compiled.append)

    def timers(operands: Any, places: Any, asked: Any, configs: Any, mode: str, spec: Any, device: int) -> Any:
        assert (len(operands), len(places), mode, device) == (1, 1, "flush", 0)
        names = [survey.name_of(config, asked, spec) for config in configs]
        assert len(names) == len(set(names)) == len(compiled)
        best = names[1:7]
        return ((name, Timer(10.0 + best.index(name) if name in best else 90.0)) for name in names)

    monkeypatch.setattr(grouped.survey, "timers_at", timers)
    row = grouped.measure_configs(small(kind, form))
    assert row["legal"] == len(compiled) > 10
    assert list(row["times"].values())[:3] == [10.0, 11.0, 12.0]
    assert row["times"][row["selected"]] == 90.0  # it is timed, however slow
    assert all(name.startswith(f"m_grouped_{kind}") for name in row["times"])
    shown = grouped.configs_lines(row).splitlines()
    assert len(shown) == 1 + grouped.BEST - (len(row["times"]) < 6) + 1
    assert "selected / best 0.111" in shown[0]
    assert shown[-1].endswith("(selected)")
    assert json.loads(json.dumps(row)) == row


def test_timers_launch_each_config_on_the_operands(
    made: None, grouped_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down to the launch; only events need a GPU."""
    operands, empty = grouped.make(small("fp8", "masked")), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **rest: empty(*size, device="meta", **rest))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(cuda_stream=5))
    monkeypatch.setattr(engine, "raw_stream", lambda device: 7)
    monkeypatch.setattr(engine, "forced_plan", lambda spec, config, *_: SimpleNamespace(spec=spec, config=config))
    spec, strides, addresses, _ = grouped.launch_of(operands, 0)
    configs = select.legal(spec, SM90)[:3]
    timers = dict(survey.timers_at([operands], [(strides, addresses)], spec, configs, "flush", SM90, 0))
    assert set(timers) == {survey.name_of(config, spec, SM90) for config in configs}
    for timer in timers.values():
        assert isinstance(timer, Single)
        timer.call()
    assert [(one.spec, one.strides, one.at) for one in grouped_gpu.launched] == [(spec, strides, addresses)] * 3


def test_a_config_that_does_not_compile_is_left_out_and_named(
    grouped_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, *_ = grouped.launch_of(grouped.make(small("bf16"), "cpu"), 0)
    configs = select.legal(spec, SM90)

    def build(params: Any) -> None:
        if params.config.block_n == 256:
            raise CompileError("it does not fit")

    monkeypatch.setattr(grouped.engine, "build", build)
    found = grouped.built(spec, configs, SM90)
    assert found == [config for config in configs if config.block_n != 256]
    assert len(found) < len(configs)
    assert "it does not fit" in capsys.readouterr().err


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command with a fake measurement, which fails for N = 4096, K = 4096."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(grouped.provenance, "environment", lambda: {"device": "a fake"})

    def measure(shape: Shape) -> grouped.Row:
        if (shape.n, shape.k) == (4096, 4096):
            raise RuntimeError("out of memory")
        return grouped.make_row(shape, {"ours": 100.0, "deepgemm": 110.0}, {"torch": "it is busy"})

    monkeypatch.setattr(grouped, "measure", measure)

    def invoke(*arguments: str) -> Any:
        return CliRunner().invoke(grouped.main, arguments)

    return invoke


def test_rows_are_on_disk_and_a_failure_does_not_stop_the_rest(command: Any, tmp_path: Path) -> None:
    path = tmp_path / "results" / "rows.jsonl"
    found = command("--output", str(path), "--only", "bf16", "--only", "6x20")
    assert found.exit_code == 1
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    assert [(row["n"], row["k"]) for row in rows] == [(6144, 7168), (7168, 3072), (4096, 2048)]
    assert all(row["device"] == "a fake" for row in rows)
    for said in (
        "bf16 masked 6x20 4096x4096 failed: RuntimeError: out of memory",
        "bf16 masked 6x20: deepgemm / ours 1.100 over 3, least 1.100",
        "torch was not timed: it is busy",
    ):
        assert said in found.output
    good = command("--only", "bf16", "--only", "6x20", "--only", "4096x2048")
    assert good.exit_code == 0
    assert good.output.splitlines()[0] == grouped.heading()


def test_the_version_of_deepgemm_is_in_each_row(command: Any, tmp_path: Path) -> None:
    deepgemm.use(Library())
    path = tmp_path / "rows.jsonl"
    assert command("--output", str(path), "--only", "4096x2048", "--only", "6x20", "--only", "fp8").exit_code == 0
    (row,) = [json.loads(text) for text in path.read_text().splitlines()]
    assert row["deepgemm"] == "2.6.1"


def test_the_time_limit_is_said(command: Any) -> None:
    found = command("--seconds", "-1", "--only", "fp8", "--only", "6x20")
    assert found.exit_code == 0
    assert "The time ran out before 4 measurements: fp8 masked 6x20 6144x7168" in found.output


def test_layouts_and_surveys_have_rows_of_their_own(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"us_index": 1.0, "us_psum": 1.0, "us_masked": 2.0, "ratio_psum": 1.0, "ratio_masked": 2.0, "equal": True}
    one = {"mode": "grouped layouts", **times}
    monkeypatch.setattr(grouped, "measure_layouts", lambda shape: one | grouped.said(shape))
    other = {"mode": "grouped survey", "selected": "a", "legal": 9, "times": {"a": 2.0, "b": 1.0}}
    monkeypatch.setattr(grouped, "measure_configs", lambda shape: other | grouped.said(shape))
    path = tmp_path / "rows.jsonl"
    found = command("--layouts", "--output", str(path), "--only", "fp8", "--only", "4096x2048")
    assert found.exit_code == 0
    assert found.output.count("the same bits") == 3  # the masked shapes are left out
    found = command("--survey", "--output", str(path), "--only", "fp8", "--only", "4096x2048")
    assert found.exit_code == 0
    assert found.output.count("a  (selected)") == 7
    modes = [json.loads(text)["mode"] for text in path.read_text().splitlines()]
    assert modes == ["grouped layouts"] * 3 + ["grouped survey"] * 7


def test_wrong_arguments_are_said_in_words(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "4x8192" in command("--only", "5x5").output
    assert "No shape is in all that --only names" in command("--only", "contiguous", "--only", "6x20").output
    assert "No shape is in all" in command("--only", "masked", "--layouts").output
    assert "There is no package deep_gemm in" in command("--deepgemm", str(tmp_path)).output
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = command()
    assert found.exit_code == 1
    assert "Timing needs a GPU" in found.output
