"""The cache in real processes with faults: no home, no space, another user, another version, a kill."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from jit_fakes import builder, compilations, request
from processes import Start, end_those_in, kill, reachable_path, result, said, wait_for

from deep_gemm.jit import Builder
from deep_gemm.jit.cache.disk import DiskCache
from deep_gemm.jit.compilers.find import choose, find_all
from deep_gemm.jit.compilers.nvcc import Nvcc
from deep_gemm.settings import settings

tmp_path = reachable_path
BODY = "int body0;\n"
# A compiler takes half a second or more, because of the many registers.
SLOW = (
    'extern "C" __global__ void k(float* out, const float* in) {\n  float a[64] = {};\n'
    + "".join(
        f"  for (int i = 0; i < 64; ++i) a[i] = in[i * {j}] * a[(i * {j} + 7) % 64] + {j}.f; __syncthreads();\n"
        for j in range(1, 70)
    )
    + "  out[threadIdx.x] = a[in[0] > 0];\n}\n"
)
SMALL = 'extern "C" __global__ void k(float* out) { out[threadIdx.x] = 1; }\n'


def entries(root: Path) -> int:
    return int(DiskCache(root).info()["entries"])


# ---- no home


def test_an_empty_environment_and_no_home_means_memory_only(tmp_path: Path, start: Start) -> None:
    """As in a container with an arbitrary user: no variables, and a user that the system does not know."""
    job: dict[str, Any] = {"uid": 54321} if os.geteuid() == 0 else {"homeless": True}
    (tmp_path / "journal").touch()
    (tmp_path / "journal").chmod(0o666)
    answer = result(start(env={}, root=None, keys=2, **job))
    assert (answer["layers"], answer["wrong"], answer["root"]) == (["compiled"] * 2, 0, None)
    (warning,) = said(tmp_path)
    assert "there is no home directory. Set DG_JIT_CACHE_DIR" in warning


def test_an_empty_environment_with_a_known_user_uses_the_home(tmp_path: Path, start: Start) -> None:
    """HOME is the only variable, so that nothing is written to the home of the user who runs the tests."""
    (tmp_path / "home").mkdir()
    answer = result(start(env={"HOME": str(tmp_path / "home")}, root=None))
    assert answer["root"] == str(tmp_path / "home" / ".deep_gemm")
    assert entries(tmp_path / "home" / ".deep_gemm") == 1


def test_a_home_that_does_not_exist_means_memory_only(tmp_path: Path, start: Start) -> None:
    (tmp_path / "file").touch()
    answer = result(start(env={"HOME": str(tmp_path / "file" / "home")}, root=None, keys=2))
    assert (answer["layers"], answer["wrong"]) == (["compiled"] * 2, 0)
    (warning,) = said(tmp_path)
    assert "memory only" in warning


# ---- no space


def test_a_file_that_cannot_be_written_whole_is_no_entry(tmp_path: Path, start: Start) -> None:
    """The kernel refuses each write past 1500 bytes of a file: the source fits, the cubin does not."""
    answer = result(start(file_limit=1500, keys=3))
    assert (answer["layers"], answer["wrong"], answer["stats"]["unstored"]) == (["compiled"] * 3, 0, 3)
    (warning,) = said(tmp_path)
    assert "cannot be stored" in warning
    root = tmp_path / "root"
    assert entries(root) == 0
    assert list((root / "tmp").iterdir()) == []
    assert result(start(keys=3))["layers"] == ["compiled"] * 3
    assert entries(root) == 3


def small_filesystem(at: Path, kilobytes: int) -> list[str]:
    """A command prefix that mounts a small empty filesystem at `at` for one process. Skips the test if it cannot."""
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        pytest.skip("there are no unshare and mount here to make a small filesystem with")
    at.mkdir()
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    mount = f'mount -t tmpfs -o size={kilobytes}k,mode=700 small "{at}" && exec "$@"'
    prefix = ["unshare", *user, "--mount", "sh", "-c", mount, "sh"]
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"a small filesystem cannot be mounted here: {tried.stderr.strip()}")
    return prefix


def test_a_full_filesystem_means_memory_only_for_what_does_not_fit(tmp_path: Path, start: Start) -> None:
    prefix = small_filesystem(tmp_path / "small", 128)
    # Two rounds in one process, because the filesystem ends with it. Stored kernels are found, others compiled again.
    answer = result(start(prefix, root=str(tmp_path / "small" / "root"), keys=20, rounds=2))
    first, second = answer["layers"][:20], answer["layers"][20:]
    assert answer["left"] == 0
    assert answer["wrong"] == 0
    assert first == ["compiled"] * 20
    assert {"disk", "compiled"} == set(second)
    assert second.count("compiled") == answer["stats"]["unstored"]
    (warning,) = said(tmp_path)
    assert "No space left on device" in warning
    assert "memory only" in warning


def test_a_limit_keeps_a_small_filesystem_from_filling(tmp_path: Path, start: Start) -> None:
    prefix = small_filesystem(tmp_path / "small", 256)
    job = {"root": str(tmp_path / "small" / "root"), "keys": 60}
    answer = result(start(prefix, env={**os.environ, "DG_JIT_CACHE_LIMIT": "30kB"}, **job))
    assert (answer["wrong"], answer["stats"]["unstored"]) == (0, 0)
    assert answer["evictions"] > 40
    assert said(tmp_path) == []


# ---- another user, another version


def test_a_root_that_belongs_to_another_user_is_not_used(tmp_path: Path, start: Start) -> None:
    """As root the test makes such a directory. Other users take /usr, which belongs to root."""
    theirs, workers = Path("/usr"), 0
    if os.geteuid() == 0:
        theirs, workers = tmp_path / "theirs", 1
        result(start(root=str(theirs)))
        for path in [theirs, *theirs.rglob("*")]:
            os.chown(path, 54321, 54321)
    before = sorted(theirs.iterdir())
    answer = result(start(root=str(theirs), keys=2))
    assert (answer["layers"], answer["wrong"]) == (["compiled"] * 2, 0)
    (warning,) = said(tmp_path, workers)
    assert f"belongs to user {theirs.stat().st_uid}, not to you" in warning
    assert sorted(theirs.iterdir()) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make an image's cache and be another user after it")
@pytest.mark.parametrize("readable", [True, False])
def test_a_root_that_root_made_is_read_by_others(tmp_path: Path, start: Start, readable: bool) -> None:
    """As in an image: root compiles when the image is built, and another user runs a service in it."""
    root = tmp_path / "root"
    builder(root).build(request(source=BODY))
    (tmp_path / "journal").touch()
    (tmp_path / "journal").chmod(0o666)
    if readable:
        subprocess.run(["chmod", "-R", "go+rX", root], check=True)
    before = sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*"))
    answer = result(start(uid=54321, keys=2))
    assert (sorted(answer["layers"]), answer["wrong"]) == (["compiled", "disk" if readable else "compiled"], 0)
    assert answer["stats"]["unstored"] == (1 if readable else 2)
    (warning,) = said(tmp_path)
    assert ("cannot be stored" if readable else "`chmod -R go+rX`") in warning
    assert sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*")) == before


def test_a_linked_root_is_not_used(tmp_path: Path, start: Start) -> None:
    (tmp_path / "aim").mkdir(mode=0o700)
    (tmp_path / "root").symlink_to(tmp_path / "aim")
    assert result(start(keys=2))["layers"] == ["compiled"] * 2
    (warning,) = said(tmp_path)
    assert "is a symbolic link" in warning
    assert list((tmp_path / "aim").iterdir()) == []
    trusting = {**os.environ, "DG_JIT_TRUST_CACHE_DIR": "1"}
    assert result(start(env=trusting, keys=2))["layers"] == ["compiled"] * 2
    assert result(start(env=trusting, keys=2))["layers"] == ["disk"] * 2


@pytest.mark.parametrize("differ", ["schema", pytest.param("headers", marks=pytest.mark.long)])
def test_two_versions_share_a_root(tmp_path: Path, start: Start, differ: str) -> None:
    """Two versions of the package run at once and compile the same source to different bytes. Each gets its own."""
    gate, jobs = tmp_path / "gate", []
    for version in ("old", "new"):
        include = tmp_path / version
        include.mkdir()
        (include / "version.cuh").write_text(version if differ == "headers" else "the same")
        job = {"tag": version, "include": str(include)}
        if differ == "schema":
            job["schema"] = {"old": 1, "new": 2}[version]
        jobs.append(job)
    sources = [f'#include "version.cuh"\nint body{i};\n' for i in range(10)]
    workers = [start(gate=str(gate), sources=sources, seconds=0.01, **job) for job in jobs for _ in range(2)]
    gate.touch()
    answers = [result(worker) for worker in workers]
    assert sum(answer["wrong"] for answer in answers) == 0
    assert len(compilations(tmp_path / "journal")) == 20
    assert entries(tmp_path / "root") == 20
    for job in jobs:
        again = result(start(sources=sources, **job))
        assert (again["layers"], again["wrong"]) == (["disk"] * 10, 0)
    assert [said(tmp_path, worker) for worker in range(6)] == [[]] * 6


# ---- a limit that several processes keep


@pytest.mark.long
def test_eight_processes_evict_at_once(tmp_path: Path, start: Start) -> None:
    root, gate = tmp_path / "root", tmp_path / "gate"
    limited = {**os.environ, "DG_JIT_CACHE_LIMIT": "20kB"}
    workers = [
        start(env=limited, gate=str(gate), keys=30, seed=i, seconds=0.001, repeat_for=1.0, lock_limit=10.0)
        for i in range(8)
    ]
    gate.touch()
    answers = [result(worker) for worker in workers]
    assert sum(answer["wrong"] for answer in answers) == 0
    assert [said(tmp_path, worker) for worker in range(8)] == [[]] * 8
    evicted, made = sum(answer["evictions"] for answer in answers), len(compilations(tmp_path / "journal"))
    # Only one process counts each removal.
    assert 30 < evicted <= made - entries(root)
    assert {"disk", "compiled"} <= {layer for answer in answers for layer in answer["layers"]}
    # No process had to evict entries that several processes wrote last.
    with settings.override(cache_limit="20kB"):
        builder(root).build(request(source="int last;\n"))
    assert DiskCache(root).info()["bytes"] <= 20_000
    assert list((root / "tmp").iterdir()) == []


# ---- killed


def test_killed_while_compiling_leaves_nothing_for_ever(tmp_path: Path, start: Start) -> None:
    root = tmp_path / "root"
    victim = start(seconds=600)
    wait_for(lambda: len(compilations(tmp_path / "journal")) == 1)
    kill(victim)
    assert [path.name for path in (root / "locks").iterdir()] == ["keys"]
    (folder,) = [path for path, _ in DiskCache(root).walk()]
    assert [path.name for path in folder.iterdir()] == ["kernel.cu"]
    answer = result(start())
    assert (answer["layers"], answer["stats"]["lock_timeout"]) == (["compiled"], 0)
    assert sorted(path.name for path in folder.iterdir()) == ["kernel.cu", "kernel.cubin", "kernel.json"]
    assert list((root / "tmp").iterdir()) == []
    assert [path.name for path in (root / "locks").iterdir()] == ["keys"]
    assert result(start())["layers"] == ["disk"]


def test_a_key_that_nobody_wants_again_is_evicted_with_the_rest(tmp_path: Path, start: Start) -> None:
    root = tmp_path / "root"
    victim = start(seconds=600)
    wait_for(lambda: len(compilations(tmp_path / "journal")) == 1)
    kill(victim)
    (folder,) = [path for path, _ in DiskCache(root).walk()]
    for path in (folder / "kernel.cu", folder):
        os.utime(path, (time.time() - 7200,) * 2)
    with settings.override(cache_limit=10):
        builder(root).build(request(source="int other;\n"))
    assert not folder.exists()
    assert [path.name for path in (root / "locks").iterdir()] == ["keys"]


def usable(kind: str) -> None:
    if not any(found.usable for found in find_all() if found.kind == kind):
        assert kind != "nvrtc", "NVRTC is one of our dependencies"
        pytest.skip(f"there is no usable {kind} here")


@pytest.mark.parametrize("kind", ["nvrtc", pytest.param("nvcc", marks=pytest.mark.long)])
def test_killed_inside_a_real_compiler(
    tmp_path: Path, start: Start, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usable(kind)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    victim = start(env={**os.environ, "TMPDIR": str(scratch)}, real=kind, sources=[SLOW])
    assert victim.stdout is not None
    assert victim.stdout.readline() == "compiling\n"
    if kind == "nvcc":
        wait_for(lambda: any(scratch.glob("deep_gemm-tool-*")))
    time.sleep(0.1)
    kill(victim)
    end_those_in(scratch)
    root = tmp_path / "root"
    assert entries(root) == 0, "it was to be killed before it had compiled"

    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    for left in scratch.glob("deep_gemm-tool-*"):
        os.utime(left, (0, 0))
    with settings.override(use_nvrtc=kind == "nvrtc"):
        compiler = choose()
    build = Builder(root, compiler, Path("/no-headers"), lock_limit=5.0)
    assert build.build(request(source=SLOW)).layer == "compiled"
    assert build.stats["lock_timeout"] == 0
    assert Builder(root, compiler, Path("/no-headers")).build(request(source=SLOW)).layer == "disk"
    assert list((root / "tmp").iterdir()) == []

    # The next NVCC sweeps the folders of those that have ended.
    for folder in scratch.glob("deep_gemm-*"):
        os.utime(folder, (0, 0))
    if kind == "nvcc":
        Builder(root, Nvcc(compiler.path), Path("/no-headers")).build(request(source=SMALL))
    assert not list(scratch.glob("deep_gemm-*"))


def test_killed_with_a_forked_child_that_lives_on(tmp_path: Path, start: Start) -> None:
    """The child inherits the descriptor of a lock that a thread of its parent held. It must not keep the lock."""
    victim = start(seconds=600, abandon=True)
    assert victim.stdout is not None
    child = int(victim.stdout.readline())
    try:
        kill(victim)
        os.kill(child, 0)
        build = builder(tmp_path / "root", lock_limit=5.0)
        assert build.build(request(source=BODY)).layer == "compiled"
        assert build.stats["lock_timeout"] == 0
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_forked_while_nvrtc_compiles_can_compile(start: Start) -> None:
    assert result(start(fork=True, real="nvrtc", sources=[SLOW, SMALL])) == {"child": 0}
