"""How commands end: with 0 only if something was done, with 2 for what cannot be used, in few words."""

import itertools
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from deep_gemm.cli import console
from deep_gemm.cli.app import app
from deep_gemm.errors import CompileError
from deep_gemm.jit.cache import pack as packs
from deep_gemm.runtime import engine


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "--from", "EMPTY"], "has no records"),
        (["tune", "--learn", "EMPTY"], "nothing to learn"),
        (["tune", "--learn", "EMPTY", "--json"], "nothing to learn"),
        (["calibrate", "check", "EMPTY"], "no records of surveys"),
        (["calibrate", "fit", "EMPTY", "--output", "OUT"], "hold no rows"),
        (["cache", "merge", "FOLDER"], "nothing was written"),
        (["compare", "fp8_gemm_nt", "--backends", "cublaslt", "--device", "cpu"], "nothing was compared"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_nothing_done_is_no_success(arguments: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "folder").mkdir(0o700)
    places = {"EMPTY": tmp_path / "empty.jsonl", "FOLDER": tmp_path / "folder", "OUT": tmp_path / "out.json"}
    result = run(*(places.get(word, word) for word in arguments))
    assert result.exit_code == 1, result.output
    assert words in result.output


ENDS = """
import atexit, contextlib, os, signal
import deep_gemm.cli as cli
from deep_gemm.cli.app import app

def interrupted():
    os.kill(os.getpid(), signal.SIGINT)

def unseen():
    with contextlib.suppress(KeyboardInterrupt):
        interrupted()

app.invoke = lambda ctx: {}
cli.main()
"""


@pytest.mark.parametrize(
    ("does", "status"),
    [("interrupted()", 130), ("unseen()", 130), ("atexit.register(interrupted)", -signal.SIGINT), ("None", 0)],
)
def test_an_interrupt_ends_with_130(does: str, status: int) -> None:
    """It was 1, and 0 where nothing saw the exception. A shell says 130 for one that the signal has ended, too."""
    done = subprocess.run([sys.executable, "-c", ENDS.replace("{}", does)], capture_output=True)
    assert (done.returncode, b"Traceback" in done.stderr) == (status, False), done.stderr


@pytest.mark.parametrize(
    "command",
    ["precompile --shape 8x128x128 --pack", "cache pack", "cache merge . --pack", "calibrate survey --output",
     "bench --shape 8x128x128 --output"],
)  # fmt: skip
def test_a_directory_that_does_not_exist_is_not_made(command: str, tmp_path: Path) -> None:
    """Launches of minutes went into a mistyped one."""
    result = run(*command.split(), tmp_path / "mistyped" / "file")
    assert (result.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert "there is no directory" in result.output


GROUPED = "m_grouped_fp8_gemm_nt_contiguous"
REFUSED = {
    "dance": "No such command", "precompile": "", "precompile --shape 7x": "MxNxK",
    "precompile --shape 0x2048": "N of the shape '0x2048' must be a whole number from 1",
    "precompile --shape 8x128x128 --arch sm_12": "",
    "precompile --shape 8x128x128 --op gemm": "op must be one of fp8_gemm_nt, ",
    "precompile --shape 8x128x128 --shard 8/8": "counted from 0",
    "precompile --shape 8x128x128 --card V100": "", "precompile --shape 8x128 --m 0": "", "precompile --tp 0": "",
    "precompile --model deepseek-ai/DeepSeek-V3": "give a model's local directory, in which its config.json is enough",
    "inspect 576x7168": "", "inspect 7": "", "inspect 8x512x7000": "K = 7008",
    "inspect 8x512x512 --op gemm": "op must be one of fp8_gemm_nt, ",
    "inspect 64x512x256 --groups 8": f"--groups is for {GROUPED}, ",
    f"inspect 64x512x256 --op {GROUPED} --groups 8 --expected-m 4": "--expected-m is for masked operations, not ",
    "bench --from /none": "", "compare fp8_gemm_nt --backends ,": "", "compare ,": "",
    "compare gemm": "op must be one of", "compare fp8_gemm_nt --backends nobody": "backend must be one of",
    "compare fp8_gemm_nt --shape 4xfour": "'4xfour' is no shape: 4096x7168x2048 is.",
    "compare fp8_gemm_nt,bf16_gemm_nt --shape 4x4x4x4": "has 4 sizes, so 4x4x4x4 is no shape of theirs.",
    "tune --model deepseek-ai/DeepSeek-V3": "give a model's local directory, in which its config.json is enough",
    "tune --shape x": "", "tune": "nothing to tune", "cache prune": "",
}  # fmt: skip


@pytest.mark.parametrize("command", REFUSED)
def test_what_cannot_be_used_ends_with_two(command: str) -> None:
    result = run(*command.split())
    assert result.exit_code == 2, result.output
    assert "Error: " in result.output
    assert REFUSED[command] in " ".join(result.output.split())


def test_a_setting_that_cannot_be_used_ends_with_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "maybe")
    result = run("precompile", "--shape", "8x128x256")
    assert result.exit_code == 2
    assert "DG_JIT_USE_NVRTC" in result.output
    assert len(result.output) < 1000


@pytest.mark.compile
def test_an_empty_operation_is_the_default(cache_dir: Path) -> None:
    result = run("inspect", "64x512x512", "--op=", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["kernel"].startswith("fp8_gemm")


def test_many_failures_take_few_words(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    """73 missing kernels took 53,000 characters under DG_JIT_FORBID_COMPILE."""
    monkeypatch.setenv("DG_JIT_FORBID_COMPILE", "1")
    arguments = ["precompile", "--shape", "2112x7168", "--shape", "4096x7168", "--m", "1-4096:64"]
    result = run(*arguments)
    assert result.exit_code == 1
    (count,) = re.findall(r"([0-9]+) failed", result.output)
    assert int(count) > 20
    assert len(result.output) < 6000, len(result.output)
    assert f"failed for the same reason: {int(count) - 1} kernels: " in result.output
    report = json.loads(run(*arguments, "--json").output)
    assert len(report["failed"]) == int(count)


def test_each_kind_of_failure_is_printed(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    causes = ["no room", "no time", "no luck", "no wit", "no will"]

    turn = itertools.count()

    def fail(params: Any) -> Any:
        raise CompileError(causes[next(turn) % 5], log="error: line 7")

    monkeypatch.setattr(engine, "build", fail)
    output = run("precompile", "--shape", "2112x7168", "--m", "1-4096:64", "--jobs", "1").output
    told = [cause for cause in causes if cause in output]
    assert len(told) == 3
    assert "failed for 2 other reasons" in output
    assert "error: line 7" in output
    assert "0 kernels compiled" in output


def test_kernels_that_layers_share_are_counted_once() -> None:
    arguments = ["precompile", "--shape", "2112x7168", "--shape", "576x7168", "--m", "1-4096:64", "--dry-run"]
    report = json.loads(run(*arguments, "--json").output)
    assert sum(layer["kernels"] for layer in report["layers"]) > report["kernels"]
    (line,) = [line for line in run(*arguments).output.splitlines() if line.startswith("all together")]
    assert line.split()[-1] == str(report["kernels"])


@pytest.mark.compile
def test_a_pack_can_be_looked_at(tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "1")
    path = tmp_path / "a.dgpack"
    written = run("precompile", "--shape", "8x128x256", "--pack", path).output
    kernels = packs.read(path).kernels.values()
    sizes = console.pack_size(path, len(kernels), sum(kernel.cubin_bytes for kernel in kernels))
    assert f"{len(kernels)} kernels, " in sizes
    monkeypatch.setenv("DG_JIT_PRECOMPILED", str(path))
    output = run("cache", "info", path).output
    for said in (written, output, run("cache", "verify", path).output, run("cache", "info").output):
        assert sizes in " ".join(said.split()), "one pack has one size"
    assert all(kernel.name in output for kernel in kernels)
    (report,) = json.loads(run("cache", "info", path, "--json").output)
    assert {kernel["name"] for kernel in report["kernels"]} == {kernel.name for kernel in kernels}
    path.write_bytes(b"no pack")
    result = run("cache", "info", path)
    assert result.exit_code == 1
    assert "is no pack that can be read" in result.output
