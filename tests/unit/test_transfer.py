"""`cache pack`, `cache merge` and `cache verify` of packs: which kernels are taken, kept and refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from jit_fakes import FakeCompiler, builder, cubin_of
from pack_kernels import make, packed, sources, user

from deep_gemm.aot import build
from deep_gemm.aot.workload import GemmShape
from deep_gemm.cli.app import app
from deep_gemm.errors import CompileError, InvalidInputError
from deep_gemm.jit.cache import pack as packs
from deep_gemm.jit.cache.disk import DiskCache
from deep_gemm.params import KernelParams
from deep_gemm.runtime import engine

NEWER = FakeCompiler(identity="fake 2.0 build 1")
NEWER.version = (13, 0)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def fill(root: Path, compiler: FakeCompiler | None = None, count: int = 3) -> Path:
    build = builder(root, compiler)
    for one in sources(count):
        build.build(one)
    return root


def entry(root: Path, name: str = "k0") -> Path:
    (found,) = [path for path, _ in DiskCache(root).walk() if path.name.startswith(f"{name}-")]
    return found


def report(*arguments: object, status: int = 0) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == status, result.output
    found = json.loads(result.output)
    return {state: count for state, count in found["counts"].items() if count} | {
        f"{item['state']}:": item["reason"] for item in found["items"] if item["reason"]
    }


def test_a_packed_cache_serves_another_machine(cache_dir: Path, tmp_path: Path) -> None:
    fill(cache_dir)
    out = tmp_path / "new.dgpack"
    result = run("cache", "pack", out)
    assert result.exit_code == 0, result.output
    assert "3 taken" in result.output
    assert [kernel.name for kernel in packs.read(out).kernels.values()] == ["k0", "k1", "k2"]
    build, compiler = user(tmp_path / "other" / "root", out, include_dir=tmp_path / "no-headers")
    assert [build.build(one).cubin for one in sources()] == [cubin_of(one.source) for one in sources()]
    assert compiler.calls == []
    # The same cache gives the same bytes.
    before = out.read_bytes()
    assert run("cache", "pack", out, "--from", cache_dir).exit_code == 0
    assert out.read_bytes() == before


def test_pack_takes_what_it_is_asked_for(cache_dir: Path, tmp_path: Path) -> None:
    fill(cache_dir)
    out = tmp_path / "a.dgpack"
    assert report("cache", "pack", out, "--name", "k[01]") == {"taken": 2}
    assert report("cache", "pack", out, "--arch", "sm_90a", "--name", "*2") == {"taken": 1}
    assert len(packs.read(out).kernels) == 1
    (tmp_path / "a.dgpack").unlink()
    assert run("cache", "pack", out, "--arch", "sm_100a").exit_code == 1
    assert not out.exists()


@pytest.mark.parametrize("newer_first", [True, False])
def test_the_newest_compiler_wins_and_is_named(cache_dir: Path, tmp_path: Path, newer_first: bool) -> None:
    for compiler in (NEWER, None) if newer_first else (None, NEWER):
        fill(cache_dir, compiler, 1)
    out = tmp_path / "a.dgpack"
    found = report("cache", "pack", out)
    assert (found["taken"], found["older"]) == (1, 1)
    assert re.search(r"fake 1\.0 build 7.*fake 2\.0 build 1", found["older:"])
    (kernel,) = packs.read(out).kernels.values()
    assert (kernel.cuda, kernel.compiler) == ("13.0", "fake 2.0 build 1")


def test_unsound_and_old_entries_are_not_packed(cache_dir: Path, tmp_path: Path) -> None:
    fill(cache_dir)
    (entry(cache_dir) / "kernel.cubin").write_bytes(b"other")
    # An entry of a version without source keys is still valid on disk.
    disk = DiskCache(cache_dir)
    path, where = next((path, where) for path, where in disk.walk() if path.name.startswith("k1-"))
    from deep_gemm.jit.cache.entry import Address

    address = Address(*where, "k1", path.name.partition("-")[2])
    old = disk.get(address)
    assert old is not None
    disk.put(address, old.source, old.cubin, {name: value for name, value in old.meta.items() if name != "source_key"})
    found = report("cache", "pack", tmp_path / "a.dgpack", status=1)
    assert (found["taken"], found["unsound"], found["left"]) == (1, 1, 1)
    assert "without a source key" in found["left:"]
    assert builder(cache_dir).build(sources()[1]).layer == "disk"


def test_merge_from_directories_and_packs(cache_dir: Path, tmp_path: Path) -> None:
    other = fill(tmp_path / "other" / "root", count=2)
    pack = make(tmp_path / "a.dgpack")
    assert report("cache", "merge", other, pack) == {"taken": 3, "same": 2}
    build = builder(cache_dir)
    assert [build.build(one).layer for one in sources()] == ["disk"] * 3
    assert [build.build(one).cubin for one in sources()] == [cubin_of(one.source) for one in sources()]
    assert Path(build.build(sources()[2]).source_path or "").read_text() == sources()[2].source
    again = report("cache", "merge", other, pack, cache_dir)
    assert again["same"] == 6
    assert "target" in again["same:"]
    # Merged entries can be packed and merged again.
    assert report("cache", "pack", tmp_path / "b.dgpack") == {"taken": 3}
    assert packs.read(tmp_path / "b.dgpack").kernels.keys() == packs.read(pack).kernels.keys()
    assert run("cache", "verify").exit_code == 0


def test_merge_keeps_what_is_sound_and_replaces_what_is_not(cache_dir: Path, tmp_path: Path) -> None:
    fill(cache_dir, count=2)
    pack = make(tmp_path / "a.dgpack", sources(2))
    # One sound entry with other bytes under the same key, and one damaged entry.
    disk = DiskCache(cache_dir)
    path, where = next((path, where) for path, where in disk.walk() if path.name.startswith("k0-"))
    from deep_gemm.jit.cache.entry import Address

    address = Address(*where, "k0", path.name.partition("-")[2])
    old = disk.get(address)
    assert old is not None
    disk.put(address, old.source, b"other bytes", old.meta)
    (entry(cache_dir, "k1") / "kernel.cubin").write_bytes(b"")
    found = report("cache", "merge", pack)
    assert (found["conflict"], found["taken"]) == (1, 1)
    assert "is kept" in found["conflict:"]
    kept = disk.get(address)
    assert kept is not None
    assert kept.cubin == b"other bytes"
    assert builder(cache_dir).build(sources()[1]).layer == "disk"


def test_merge_into_a_pack(cache_dir: Path, tmp_path: Path) -> None:
    root, out = fill(tmp_path / "other" / "root", NEWER, 2), tmp_path / "out.dgpack"
    found = report("cache", "merge", make(tmp_path / "a.dgpack"), root, "--pack", out)
    assert (found["taken"], found["older"]) == (3, 2)
    assert sorted(kernel.cuda for kernel in packs.read(out).kernels.values()) == ["12.9", "13.0", "13.0"]
    # A pack may be joined with others into itself.
    assert report("cache", "merge", out, "--pack", out) == {"taken": 3}
    assert not cache_dir.exists()


def test_packs_may_be_named_from_where_they_lie(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "a.dgpack")
    monkeypatch.chdir(tmp_path)
    assert report("cache", "merge", "a.dgpack", "--pack", "b.dgpack") == {"taken": 3}
    assert run("cache", "verify", "b.dgpack").exit_code == 0
    assert report("cache", "merge", "b.dgpack") == {"taken": 3}


def test_unsound_sources_are_named_and_the_rest_is_taken(cache_dir: Path, tmp_path: Path) -> None:
    pack = make(tmp_path / "a.dgpack")
    cut = tmp_path / "cut.dgpack"
    cut.write_bytes(pack.read_bytes()[:-512])
    bad = tmp_path / "bad.dgpack"
    bad.write_bytes(pack.read_bytes().replace(cubin_of(sources()[0].source)[:64], bytes(64)))
    open_to_all = tmp_path / "open"
    fill(open_to_all).chmod(0o777)
    result = run("cache", "merge", cut, bad, open_to_all, tmp_path / "absent")
    assert result.exit_code == 1
    for words in (f"all of {cut}", f"k0 of {bad}", f"all of {open_to_all}", f"all of {tmp_path / 'absent'}", "2 taken"):
        assert words in result.output
    result = run("cache", "verify", pack, cut, bad)
    assert result.exit_code == 1
    assert f"{pack}: 3 kernels" in result.output
    assert f"corrupted: {bad}: k0: the SHA-256" in result.output
    listed = {
        Path(one["path"]).stem: one["problems"] for one in json.loads(run("cache", "verify", cut, "--json").output)
    }
    assert listed["cut"]
    assert run("cache", "verify", pack).exit_code == 0
    assert run("cache", "verify", pack, "--delete").exit_code == 2


def test_a_pack_that_cannot_be_written_is_one_line(cache_dir: Path, tmp_path: Path) -> None:
    fill(cache_dir, count=1)
    result = run("cache", "pack", "/proc/a.dgpack")
    assert result.exit_code == 1
    assert "cannot be written" in result.output


def test_info_and_doctor_list_packs(cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack, absent = make(tmp_path / "a.dgpack"), tmp_path / "absent.dgpack"
    monkeypatch.setenv("DG_JIT_PRECOMPILED", f"{pack}:{absent}")
    found = json.loads(run("cache", "info", "--json").output)["packs"]
    assert [(one["path"], one["kernels"]) for one in found[:2]] == [(str(pack), 3), (str(absent), 0)]
    for text in (run("cache", "info").output, run("doctor").output):
        assert f"{pack} (named by DG_JIT_PRECOMPILED): 3 kernels" in text
        assert "No such file" in text
    monkeypatch.setenv("DG_JIT_NVCC_COMPILER", "/nonexistent")
    result = run("doctor")
    assert result.exit_code == 0
    assert re.search(r"No compiler is needed.* 3 kernels", result.output)
    assert "taken from packs" in result.output
    monkeypatch.delenv("DG_JIT_PRECOMPILED")
    assert run("doctor").exit_code == 1


def test_precompile_writes_a_pack_of_all_or_none(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = builder(cache_dir)

    def built(params: KernelParams) -> Any:
        if fails and params == last:
            raise CompileError("that did not compile")
        return made.build(engine.build_request(params))

    chosen = list(build.choose([GemmShape(64, 576, 7168), GemmShape(4096, 7168, 2048)]).kernels)
    last, fails, out = chosen[-1], True, tmp_path / "a.dgpack"
    monkeypatch.setattr(engine, "build", built)
    arguments = ("precompile", "--shape", "64x576x7168", "--shape", "4096x7168x2048", "--pack", out)
    result = run(*arguments)
    assert result.exit_code == 1
    assert "was not written" in result.output
    assert not out.exists()
    with pytest.raises(InvalidInputError, match="1 kernel that failed"):
        build.pack(build.precompile([GemmShape(4096, 7168, 2048), GemmShape(64, 576, 7168)]), out)
    with pytest.raises(InvalidInputError, match="no kernels"):
        build.pack(build.precompile([]), out)
    fails = False
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert f"{out}: {len(chosen)} kernels" in result.output
    found = packs.read(out)
    assert packs.problems(out) == []
    for params in chosen:
        request = engine.build_request(params)
        key = made.source_key(request)
        assert found.source(key).decode() == request.source
        assert found.kernels[key].meta == json.loads(json.dumps(request.stored_meta))
    # Kernels from disk and from memory give the same pack.
    before = out.read_bytes()
    assert run(*arguments).exit_code == 0
    assert out.read_bytes() == before
    assert run("cache", "pack", tmp_path / "b.dgpack").exit_code == 0
    assert (tmp_path / "b.dgpack").read_bytes() == before
    assert packed(made.build(request), request).cubin == found.cubin(key)
