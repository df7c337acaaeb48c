"""Every command, through click's runner; one subprocess, for `python -m`."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from jit_fakes import DESCRIBED

from deep_gemm import cli
from deep_gemm.cli import app as app_module
from deep_gemm.cli.app import COMMANDS, app
from deep_gemm.errors import DeepGemmError
from deep_gemm.runtime import engine
from deep_gemm.settings import settings


def run(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(app, list(arguments), **options)


def test_help_lists_every_command_and_each_has_its_own() -> None:
    text = run("--help").output
    for name in COMMANDS:
        assert name in text
        result = run(name, "--help")
        assert result.exit_code == 0, result.output
        assert "Usage:" in result.output


def test_without_arguments_an_overview_is_shown() -> None:
    result = run()
    assert result.exit_code == 0
    lines = result.output.splitlines()
    for name, text in COMMANDS.items():
        assert sum(line.split() == [name, *text.split()] for line in lines) == 1, name
    assert len(lines) <= 30
    assert all(len(line) <= 80 for line in lines)


def test_what_the_overview_says_to_type_is_a_command_with_these_options() -> None:
    for arguments, _ in app_module.FIRST:
        name, *rest = arguments.split()
        command = app.get_command(click.Context(app), name)
        assert command is not None
        command.make_context(name, [word.replace("DIR", "/") for word in rest])


def test_without_the_cli_extra_a_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)  # it ends the process, and handlers with it
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "pip install click rich pyyaml" in capsys.readouterr().err


def test_an_error_of_ours_is_one_line_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command("doctor")
    def command() -> None:
        raise DeepGemmError("the reason")

    import deep_gemm.cli.doctor as module

    monkeypatch.setattr(module, "command", command)
    result = run("doctor")
    assert result.exit_code == 1
    assert result.output == "Error: the reason\n"


def test_doctor() -> None:
    result = run("doctor", "--json")
    assert result.exit_code in (0, 1), result.output
    report = json.loads(result.output)
    assert {"package", "gpus", "compilers", "headers", "cache", "settings", "problems", "notes"} <= set(report)
    assert (result.exit_code == 1) == bool(report["problems"])
    assert report["headers"]["files"] > 0
    assert sum(compiler["chosen"] for compiler in report["compilers"]) <= 1
    text = run("doctor").output
    assert report["headers"]["path"] in text
    edited = {name for name, post_pass in report["post_passes"].items() if post_pass == "ffma-bursts-8"}
    assert {"sm90_fp8_gemm", "sm90_fp8_swapped", "sm90_fp8_grouped"} <= edited
    assert not any("half" in name or "fp4" in name for name in edited)
    (line,) = [line for line in text.splitlines() if "ffma-bursts-8" in line]
    assert line.split()[1:4] == ["of", str(len(edited)), "of"]
    with settings.override(ffma_bursts=False):
        assert set(json.loads(run("doctor", "--json").output)["post_passes"].values()) == {None}
    assert report["cache"]["root"] in text


def test_doctor_names_what_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "deep_gemm").mkdir()
    (tmp_path / "deep_gemm" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "perhaps")
    result = run("doctor")
    assert result.exit_code == 1
    assert str((tmp_path / "deep_gemm").resolve()) in result.output
    assert "DG_JIT_USE_NVRTC" in result.output


def test_cache_info_and_clear(cache_dir: Path) -> None:
    report = json.loads(run("cache", "info", "--json").output)
    assert report["root"] == str(cache_dir)
    assert report["entries"] == 0
    assert "holds no kernels" in run("cache", "clear", "--yes").output

    from deep_gemm.jit.cache.disk import DiskCache
    from deep_gemm.jit.cache.entry import Address

    address, disk = Address("sm_90a", "13.0", "any", "some_kernel", "0" * 64), DiskCache(cache_dir)
    disk.reserve(address, "source")
    disk.put(address, b"source", b"cubin", DESCRIBED)
    assert "1 kernel," in run("cache", "info").output
    assert run("cache", "clear", input="n\n").exit_code == 1
    assert disk.get(address) is not None
    assert "1 kernel deleted" in run("cache", "clear", "--yes").output
    assert disk.get(address) is None


@pytest.mark.parametrize("mode", ["flush", "graph", "steady"])
def test_bench_without_a_gpu_says_so(mode: str) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    result = run("bench", "--mode", mode)
    assert result.exit_code == 1
    assert mode in result.output
    assert "GPU" in result.output


def rows(path: Path) -> Path:
    from deep_gemm.bench.run import append

    for m, ratio in ((64, 0.5), (128, 0.9), (4096, 2.0)):
        row = {"mode": "flush", "m": m, "n": 576, "k": 7168, "us": 10.0, "tflops": 1.0, "gbps": 1.0}
        append(path, row | {"ratio_tensorwise": ratio, "device": "GPU X", "date": "2026-01-02"})
    return path


def test_bench_sums_up_recorded_rows(tmp_path: Path) -> None:
    result = run("bench", "--from", str(rows(tmp_path / "rows.jsonl")))
    assert result.exit_code == 0, result.output
    assert "M <= 64" in result.output
    assert "64 x 576 x 7168" in result.output


@pytest.mark.compile
def test_inspect(cache_dir: Path) -> None:
    result = run("inspect", "64x576x7168", "--json", "--top", "3")
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report["spec"]["m"] == 64
    assert len(report["configs"]) == 3
    totals = [entry["estimate"]["total_us"] for entry in report["configs"]]
    assert totals == sorted(totals)
    assert all(0 < entry["estimate"]["sustained_us"] < entry["estimate"]["total_us"] for entry in report["configs"])
    assert Path(report["source"]).read_text()
    text = run("inspect", "64x576x7168").output
    edit = report["post_pass"]
    assert re.fullmatch(r"[1-9]\d* FFMAs in [1-9]\d* runs", edit["did"])
    assert f"edited     {edit['identity']}: {edit['did']}" in text
    assert " sustained" in text
    assert report["kernel"] in text
    assert "from: memory" in text or "from: disk" in text
    assert run("inspect", "576x7168").exit_code == 2


@pytest.mark.compile
@pytest.mark.parametrize(("m", "launches"), [(16, 2), pytest.param(1024, 1, marks=pytest.mark.long)])
def test_inspect_says_in_how_many_launches_fp8_is_written(m: int, launches: int, cache_dir: Path) -> None:
    arguments = ("inspect", f"{m}x4096x7168", "--epilogue", "silu+fp8", "--top", "1")
    report = json.loads(run(*arguments, "--json").output)
    assert report["casting"]["launches"] == launches
    assert report["spec"]["epilogue"] == ("silu" if launches == 2 else "silu+fp8")
    times = f"{report['casting']['one_us']:.2f} us in one, {report['casting']['two_us']:.2f} us in two"
    assert re.search(rf"^launches +{launches}, .*{times}", run(*arguments).output, re.MULTILINE)
    assert json.loads(run("inspect", "16x512x256", "--json").output)["casting"] is None
    assert "an epilogue must be" in run("inspect", "16x512x256", "--epilogue", "tanh").output


@pytest.mark.compile
def test_precompile_then_ready(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deep_gemm.jit import builder

    monkeypatch.setenv("DG_JIT_USE_NVRTC", "1")
    first = run("precompile", "--shape", "64x576x7168")
    assert first.exit_code == 0, first.output
    assert "0 failed" in first.output
    assert " 0 kernels compiled" not in first.output
    # Another process finds them on disk: a builder without this one's memory.
    monkeypatch.setattr(builder, "default_builder", builder.Builder)
    monkeypatch.setattr(engine, "default_builder", builder.Builder, raising=False)
    second = run("precompile", "--shape", "64x576x7168")
    assert " 0 kernels compiled" in second.output
    assert "disk" in second.output


@pytest.mark.long
@pytest.mark.compile
def test_the_shards_of_an_array_compile_everything_once(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "1")
    parts = []
    for index in range(2):
        result = run("precompile", "--shape", "64x576x7168", "--shard", f"{index}/2")
        assert result.exit_code == 0, result.output
        said = " ".join(result.output.split())
        found = re.search(rf"shard {index}/2: (\d+) kernels? compiled, 0 ready before", said)
        assert found is not None, said
        parts.append(int(found[1]))
    assert all(parts)
    said = " ".join(run("precompile", "--shape", "64x576x7168").output.split())
    assert f"0 kernels compiled, {sum(parts)} ready before" in said


@pytest.mark.long
@pytest.mark.compile
def test_demo_runs_and_says_what_it_did(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from deep_gemm.cli import demo

    monkeypatch.setattr(demo, "CPU_M", (4,))
    result = run("demo")
    assert result.exit_code == 0, result.output
    assert str(cache_dir) in result.output
    assert ("TFLOP/s" in result.output) == torch.cuda.is_available(), "without a GPU nothing is timed"
    assert "calc_diff" in result.output


@pytest.mark.compile
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["16384x24576x7168", "--top", "5"], marks=pytest.mark.long),
        pytest.param(["16384x24576x7168", "--op", "bf16_gemm_nt"], marks=pytest.mark.long),
        ["64x7168x2048", "--op", "m_grouped_fp8_gemm_nt_masked", "--groups", "32", "--expected-m", "8"],
        pytest.param(["64x129x64", "--op", "fp16_gemm_nt", "--num-sms", "78"], marks=pytest.mark.long),
    ],
    ids=["large", "bf16", "masked", "odd"],
)
def test_inspect_fits_a_terminal_of_80_columns(
    arguments: list[str], cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    from deep_gemm.cli import inspect

    monkeypatch.setattr(inspect, "console", lambda: Console(highlight=False, width=80))
    text = run("inspect", *arguments).output
    assert not re.search(r"True|False|\bnone\b|_us\b", text), text
    lines = text.splitlines()
    top = min(int(re.findall(r"best of (\d+) configs", text)[0]), 5 if "--top" in arguments else 8)
    for title in ("best of", "their times"):
        start = next(index for index, line in enumerate(lines) if line.startswith(title))
        # A row that is wrapped leaves the first column of the next line empty.
        rows = lines[start + 2 : start + 2 + top]
        assert [row.split(" ")[0] for row in rows] == [str(number + 1) for number in range(top)], text
        assert max(map(len, rows)) <= 80
        assert lines[start + 2 + top].strip() == ""
