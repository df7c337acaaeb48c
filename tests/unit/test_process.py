"""Tools as child processes: the time limit, what they leave behind, and invalid outputs."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from compilers import fake_nvcc
from jit_fakes import FakeCompiler, builder, request
from processes import wait_for

from deep_gemm.errors import CompileError
from deep_gemm.jit import process
from deep_gemm.jit.compilers import Nvcc, nvcc
from deep_gemm.jit.process import private_directory, run


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary files."""
    path = tmp_path / "scratch"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    monkeypatch.setattr(process, "_swept", set())
    return path


def gone(pid: int) -> bool:
    """Whether the process has ended; a zombie counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


# Like nvcc, it starts another process, which holds the pipes open, and waits for it.
SLOW = 'sleep 600 & echo $! > "{pid}.new"; mv "{pid}.new" "{pid}"; wait'


def test_a_limit_ends_all_that_was_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    with pytest.raises(subprocess.TimeoutExpired):
        run(["/bin/sh", "-c", SLOW.format(pid=pid)], 1.5)
    wait_for(lambda: gone(int(pid.read_text())))


def test_nvcc_has_a_limit(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Nvcc(fake_nvcc(tmp_path / "nvcc", body="sleep 600"))
    monkeypatch.setattr(nvcc, "_COMPILE_LIMIT", 0.2)
    with pytest.raises(CompileError, match=r"timed out after 0\.2 seconds"):
        compiler.compile("k", "", "k.cu", (), None)
    assert list(scratch.iterdir()) == []


def test_an_interrupt_ends_all_that_was_started(tmp_path: Path, scratch: Path) -> None:
    pid = tmp_path / "pid"
    compiler = Nvcc(fake_nvcc(tmp_path / "nvcc", body=SLOW.format(pid=pid)))

    def interrupt() -> None:
        wait_for(pid.exists)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        compiler.compile("k", "", "k.cu", (), None)
    thread.join()
    wait_for(lambda: gone(int(pid.read_text())))
    assert list(scratch.iterdir()) == []


def test_an_interrupt_right_after_the_fork_ends_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes before the caller has the process."""
    pid = tmp_path / "pid"
    execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def interrupted(self: object, *args: object) -> None:
        execute(self, *args)
        wait_for(pid.exists)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)

    monkeypatch.setattr(subprocess.Popen, "_execute_child", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(["/bin/sh", "-c", SLOW.format(pid=pid)], 60)
    wait_for(lambda: gone(int(pid.read_text())))


# Ends and leaves a process that holds its output open.
LEFT = 'echo said; echo told >&2; {session} sleep 600 & echo $! > "{pid}"; exit 3'


@pytest.mark.parametrize("session", ["", "setsid"])
def test_a_child_that_holds_the_output_open_is_not_waited_for(tmp_path: Path, session: str) -> None:
    """A build waited 25 s for one, after its compiler had ended."""
    pid, start = tmp_path / "pid", time.monotonic()
    result = run(["/bin/sh", "-c", LEFT.format(pid=pid, session=session)], 60)
    assert time.monotonic() - start < 20
    assert (result.returncode, result.stdout, result.stderr) == (3, "said\n", "told\n")
    if session:  # it is no longer one that the command started
        os.kill(int(pid.read_text()), signal.SIGKILL)
    wait_for(lambda: gone(int(pid.read_text())))


def test_a_command_may_write_much_and_take_long() -> None:
    result = run(["/bin/sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x; sleep 0.2; echo end >&2"], 60)
    assert (len(result.stdout), result.stderr, result.returncode) == (3_000_000, "end\n", 0)


ENDED = """
import os, sys, tempfile
from pathlib import Path
from deep_gemm.jit.compilers import Nvcc
tempfile.tempdir = {scratch!r}
compiler = Nvcc({nvcc!r})
if {forks}:
    if (child := os.fork()) == 0:
        import time
        time.sleep(600)
    Path({child!r}).write_text(str(child))
compiler.compile("k", "", "k.cu", (), None)
"""


@pytest.mark.parametrize("forks", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL], ids=lambda number: number.name)
def test_the_end_of_a_process_ends_its_compilers(
    tmp_path: Path, scratch: Path, number: signal.Signals, forks: bool
) -> None:
    """However it ends: compilers ran on for 9 s, and their files stayed. `setsid`: whatever works there is ended."""
    pid, child = tmp_path / "pid", tmp_path / "child"
    slow = SLOW.format(pid=pid).replace("sleep", "setsid sleep") if forks else SLOW.format(pid=pid)
    nvcc = fake_nvcc(tmp_path / "nvcc", body=slow)
    script = ENDED.format(scratch=str(scratch), nvcc=nvcc, forks=forks, child=str(child))
    with subprocess.Popen([sys.executable, "-c", script]) as owner:
        wait_for(pid.exists)
        assert len(list(scratch.iterdir())) == 1
        owner.send_signal(number)
        assert owner.wait(60) == -number
    wait_for(lambda: gone(int(pid.read_text())))
    wait_for(lambda: not list(scratch.iterdir()))
    if forks:
        os.kill(int(child.read_text()), signal.SIGKILL)


def test_a_guard_ends_with_the_directory(scratch: Path) -> None:
    def shells() -> list[str]:
        return [path for path in map(str, Path("/proc").glob("[0-9]*")) if str(scratch) in _command(path)]

    with private_directory():
        wait_for(lambda: len(shells()) == 1)
    assert shells() == []


def _command(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path, "cmdline").read_text()
    return ""


@pytest.mark.parametrize(
    "output",
    [
        ": > kernel.cubin", "printf cubin > kernel.cubin", "printf '\\177ELF' > other; ln -s other kernel.cubin",
        "mkdir kernel.cubin", "mkfifo kernel.cubin", "true",
    ],
)  # fmt: skip
def test_what_is_no_cubin_is_not_published(tmp_path: Path, scratch: Path, output: str) -> None:
    said = "ptxas info : Compiling entry function 'k' for 'sm_90a'\\nptxas info : Used 8 registers\\n"
    compiler = Nvcc(fake_nvcc(tmp_path / "nvcc", body=f'printf "{said}"; {output}'))
    build = builder(tmp_path / "root", compiler)
    with pytest.raises(CompileError, match="output is no cubin"):
        build.build(request())
    assert build.stats["failed"] == 1
    assert not list((tmp_path / "root").rglob("kernel.cubin"))


def test_a_directory_of_a_killed_process_goes(scratch: Path) -> None:
    for name, age in (("deep_gemm-tool-old", 7200), ("deep_gemm-tool-new", 60), ("another", 7200)):
        (scratch / name).mkdir()
        os.utime(scratch / name, (time.time() - age,) * 2)
    with private_directory() as folder:
        assert folder.parent == scratch
        assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in scratch.iterdir()) == ["another", "deep_gemm-tool-new"]


def test_a_build_without_a_place_leaves_nothing(tmp_path: Path, scratch: Path) -> None:
    """A build can be killed at any moment, so it must not create files that it would have to remove."""
    seen: list[list[Path]] = []

    def look(source: str) -> None:
        seen.append(list(scratch.iterdir()))
        if "interrupt" in source:
            raise KeyboardInterrupt

    (tmp_path / "file").touch()
    build = builder(tmp_path / "file", FakeCompiler(on_compile=look))
    assert build.build(request()).source_path is None
    with pytest.raises(KeyboardInterrupt):
        build.build(request(source="interrupt"))
    assert (seen, list(scratch.iterdir())) == ([[], []], [])


def test_a_source_that_does_not_compile_is_kept_for_a_day(tmp_path: Path, scratch: Path) -> None:
    (tmp_path / "file").touch()
    source = "#error ü\n"
    kept = []
    for _ in range(2):
        with pytest.raises(CompileError) as caught:
            builder(tmp_path / "file").build(request(source=source))
        kept.append(Path(caught.value.source_path or ""))
        assert kept[-1].read_bytes() == source.encode()
        assert kept[-1].parent.stat().st_mode & 0o777 == 0o700
    assert kept[0].exists()
    os.utime(kept[0].parent, (time.time() - 90_000,) * 2)
    with pytest.raises(CompileError):
        builder(tmp_path / "file").build(request(source=source))
    assert [path.exists() for path in kept] == [False, True]
