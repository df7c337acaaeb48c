"""Packs as a layer: searched after memory and before disk, without a compiler; a bad pack never fails a build."""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from jit_fakes import FakeCompiler, builder, cubin_of, request
from pack_kernels import make, sources, user

from deep_gemm import cache_info
from deep_gemm.errors import CompileError, CompilerNotFoundError, SettingError
from deep_gemm.jit import Builder, Resources
from deep_gemm.jit.cache import packs as layer
from deep_gemm.jit.cache.packs import Packs
from deep_gemm.log import reset_warnings
from deep_gemm.settings import settings

ENTRY_POINTS = layer.importlib.metadata.entry_points


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    reset_warnings()
    # Independent of the packs that this environment has installed.
    monkeypatch.setattr(layer.importlib.metadata, "entry_points", lambda group: [])


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose() -> None:
        raise CompilerNotFoundError("There is no usable CUDA compiler.")

    monkeypatch.setattr("deep_gemm.jit.compilers.choose", choose)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records]


def test_a_pack_is_asked_before_the_disk_and_after_memory(tmp_path: Path) -> None:
    one = sources()[0]
    # The disk holds the kernel of another compiler.
    other = FakeCompiler(identity="fake 2.0 build 1")
    assert builder(tmp_path / "root", other).build(one).layer == "compiled"
    build, compiler = user(tmp_path / "root", make(tmp_path / "a.dgpack"), compiler=other)
    first, second = build.build(one), build.build(one)
    assert (first.layer, second.layer) == ("pack", "memory")
    assert first.compiler == "fake 1.0 build 7"
    assert (first.cubin, first.source_path, first.cuda) == (cubin_of(one.source), None, "12.9")
    assert first.seconds.keys() == {"compile", "lookup"}
    assert build.lookup(one) is not None
    assert [build.stats[name] for name in ("memory", "pack", "disk", "misses")] == [2, 1, 0, 0]
    # A kernel that the pack lacks comes from disk.
    absent = request(name="absent", source="int absent;\n")
    builder(tmp_path / "root", other).build(absent)
    assert build.build(absent).layer == "disk"
    assert len(compiler.calls) == 2


def test_no_compiler_is_looked_for(tmp_path: Path, no_compiler: None) -> None:
    pack = make(tmp_path / "a.dgpack")
    build = Builder(tmp_path / "root", include_dir=tmp_path / "no-headers")
    with settings.override(precompiled=pack):
        assert [build.build(one).layer for one in sources()] == ["pack"] * 3
        assert build.lookup(sources()[0]) is not None
        with pytest.raises(CompilerNotFoundError):
            build.build(request(name="absent"))
        with settings.override(forbid_compile=True), pytest.raises(CompileError) as caught:
            build.build(request(name="absent"))
        assert not isinstance(caught.value, CompilerNotFoundError)
        for part in (build.source_key(request(name="absent")), "no usable CUDA compiler", str(pack), "--pack"):
            assert part in str(caught.value)
        assert (build.stats["pack"], build.stats["forbidden"], build.stats["misses"]) == (3, 1, 1)
    assert not (tmp_path / "root").exists()


def test_the_setting_is_followed(tmp_path: Path, no_compiler: None) -> None:
    a, b = make(tmp_path / "a.dgpack", sources()[:1]), make(tmp_path / "folder" / "b.dgpack", sources()[1:2])
    build = Builder(tmp_path / "root", include_dir=tmp_path / "no-headers")
    for value in (a, str(a), [a, tmp_path / "folder"], f"{b.parent}{os.pathsep}{a}", (str(b), str(a))):
        with settings.override(precompiled=value):
            assert build.build(sources()[0]).cubin == cubin_of(sources()[0].source)
    # The kernels of b were compiled with the headers beside it: none, in either folder.
    with settings.override(precompiled=b):
        assert build.build(sources()[1]).layer == "pack"
        with pytest.raises(CompilerNotFoundError):
            build.build(sources()[0])
    with pytest.raises(CompilerNotFoundError):
        build.build(sources()[1])
    with pytest.raises(SettingError, match="precompiled"), settings.override(precompiled=7):
        pass


def test_the_environment_variable_is_a_list_of_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_JIT_PRECOMPILED", f"{tmp_path / 'a'}{os.pathsep}{os.pathsep}relative{os.pathsep}")
    assert settings.precompiled == (tmp_path / "a", Path("relative"))
    monkeypatch.setenv("DG_JIT_PRECOMPILED", "")
    assert settings.precompiled == ()


@pytest.mark.parametrize("changed", [{"debug": True}, {"lineinfo": True}])
def test_settings_that_change_the_kernel_pass_by_the_pack(tmp_path: Path, changed: dict[str, bool]) -> None:
    build, _ = user(tmp_path / "root", make(tmp_path / "a.dgpack"))
    with settings.override(**changed):
        assert build.build(sources()[0]).layer == "compiled"
    assert build.build(sources()[0]).layer == "pack"


def test_a_changed_header_passes_by_the_pack(tmp_path: Path) -> None:
    include = tmp_path / "no-headers"
    include.mkdir()
    (include / "a.cuh").write_text("int a;\n")
    asked = request(source='#include "a.cuh"\n')
    build, _ = user(tmp_path / "root", make(tmp_path / "a.dgpack", [asked]))
    assert build.lookup(asked) is not None
    (include / "a.cuh").write_text("int b;\n")
    assert build.lookup(asked) is None


def test_a_driver_too_old_for_the_cubin_passes_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build, _ = user(tmp_path / "root", make(tmp_path / "a.dgpack"))
    for release, layer_name in (((11, 8), "compiled"), ((12, 0), "pack"), ((13, 1), "pack"), (None, "pack")):
        monkeypatch.setattr(layer, "driver_release", lambda release=release: release)
        fresh_build, _ = user(
            tmp_path / str(release) / "root", tmp_path / "a.dgpack", include_dir=tmp_path / "no-headers"
        )
        assert fresh_build.build(sources()[0]).layer == layer_name
    assert [text for text in messages(caplog) if "of CUDA 12.9" in text and "CUDA 11.8" in text]
    assert build.packs.found()[0].problem is None


def test_the_first_pack_that_can_serve_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    second = make(tmp_path / "b.dgpack", compiler=FakeCompiler(identity="fake 2.0 build 1"))
    first = make(tmp_path / "a.dgpack")
    one = sources()[0]
    for order, identity in (((first, second), "fake 1.0 build 7"), ((second, first), "fake 2.0 build 1")):
        assert user(tmp_path / "root", *order)[0].build(one).compiler == identity
    # If the first pack's cubin is bad, the second's is used.
    data = first.read_bytes()
    first.write_bytes(data.replace(cubin_of(one.source), bytes(len(cubin_of(one.source)))))
    build, compiler = user(tmp_path / "root", first, second)
    assert build.build(one).compiler == "fake 2.0 build 1"
    assert build.build(sources()[1]).compiler == "fake 1.0 build 7"
    assert compiler.calls == []
    (text,) = messages(caplog)
    assert text.startswith(f"The kernel k0 in the pack {first} is not used: the SHA-256 of ")


def test_a_file_replaced_meanwhile_is_never_half_believed(tmp_path: Path) -> None:
    pack = make(tmp_path / "a.dgpack")
    build, _ = user(tmp_path / "root", pack)
    assert len(build.packs.found()) == 1
    other = make(tmp_path / "b.dgpack", [*sources(), request(name="a", source="int first;\n")])
    other.replace(pack)
    for one in sources():
        assert build.build(one).cubin == cubin_of(one.source)
    pack.unlink()
    assert build.build(request(name="a", source="int first;\n")).layer == "compiled"


def test_bad_packs_are_warned_of_once_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = make(tmp_path / "good.dgpack")
    (tmp_path / "cut.dgpack").write_bytes(good.read_bytes()[:5000])
    (tmp_path / "foreign.dgpack").write_bytes(b"PK\x03\x04" * 1000)
    (tmp_path / "empty.dgpack").touch()
    (tmp_path / "dangling.dgpack").symlink_to("nowhere")
    os.mkfifo(tmp_path / "fifo.dgpack")
    (tmp_path / "none").mkdir()
    build, compiler = user(tmp_path / "root", tmp_path, tmp_path / "none", tmp_path / "absent")
    for one in sources() * 2:
        build.build(one)
    assert compiler.calls == []
    said = messages(caplog)
    for name in ("cut", "foreign", "empty", "dangling", "fifo", "none", "absent"):
        assert sum(f"{name}.dgpack" in text or f"/{name} " in text for text in said) == 1, (name, said)
    assert len(said) == 7
    found = {Path(one["path"]).stem: one for one in cache_info(build)["packs"]}
    assert (found["good"]["kernels"], found["good"]["problem"]) == (3, None)
    assert all(one["problem"] for name, one in found.items() if name != "good")
    assert cache_info(build)["statistics"]["hits"] == {"memory": 3, "pack": 3, "disk": 0}
    assert json.loads(json.dumps(found)) == found


def test_ptxas_check_holds_for_packs(tmp_path: Path) -> None:
    spilling = FakeCompiler(resources=Resources(255, 0, 8, 4, 4, 1))
    build, _ = user(tmp_path / "root", make(tmp_path / "a.dgpack", compiler=spilling))
    assert build.build(sources()[0]).layer == "pack"
    with settings.override(ptxas_check=True), pytest.raises(CompileError, match="refuses k0: it spills"):
        build.build(sources()[0])


def test_threads_get_right_cubins_and_lose_no_count(tmp_path: Path) -> None:
    asked = sources(20)
    build, compiler = user(tmp_path / "root", make(tmp_path / "a.dgpack", asked))
    with ThreadPoolExecutor(8) as pool:
        built = list(pool.map(build.build, asked * 20))
    assert all(binary.cubin == cubin_of(one.source) for binary, one in zip(built, asked * 20, strict=True))
    assert compiler.calls == []
    assert build.stats["pack"] + build.stats["memory"] == 400
    assert build.stats["pack"] >= 20


def test_a_forked_child_reads_its_packs(tmp_path: Path) -> None:
    build, _ = user(tmp_path / "root", make(tmp_path / "a.dgpack"))
    build.build(sources()[0])
    child = os.fork()
    if child == 0:
        # As a daemon does: a descriptor's number can belong to another file now.
        os.closerange(3, 256)
        os._exit(0 if build.build(sources()[1]).layer == "pack" else 1)
    assert os.waitpid(child, 0)[1] == 0


def install(site: Path, name: str, entry_points: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a distribution in its own directory on the path, beside this environment's packages."""
    (site / f"{name}-1.0.dist-info").mkdir(parents=True)
    (site / f"{name}-1.0.dist-info" / "entry_points.txt").write_bytes(entry_points)
    monkeypatch.setattr(layer.importlib.metadata, "entry_points", ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(site))


ANNOUNCED = b"""\
[console_scripts]
some-tool = some_kernels:main

[deep_gemm.packs]
here = some_kernels
absent = no_such_package_at_all
odd = json:loads.x
"""


def test_installed_packages_announce_packs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, no_compiler: None
) -> None:
    package = tmp_path / "some_kernels"
    make(package / "sm_90a.dgpack", sources()[:1])
    (package / "__init__.py").write_text("raise AssertionError('it is found, not run')\n")
    named = make(tmp_path / "named.dgpack", sources()[1:2])
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path / "site", "some_kernels", ANNOUNCED, monkeypatch)
    build = Builder(tmp_path / "root", include_dir=tmp_path)
    with settings.override(precompiled=named):
        assert [build.build(one).layer for one in sources()[:2]] == ["pack", "pack"]
        by = [found.by for found in build.packs.found()]
    assert by == ["DG_JIT_PRECOMPILED", "package some_kernels", "package json"]
    assert "some_kernels" not in sys.modules
    assert any("no_such_package_at_all" in text for text in messages(caplog))


@pytest.mark.parametrize("text", [b"\xff", b"[deep_gemm.packs]\nno value\n"], ids=["no text", "no entry point"])
def test_metadata_that_cannot_be_read_is_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: bytes
) -> None:
    install(tmp_path / "site", "broken", text, monkeypatch)
    assert Packs().found() == ()
    (message,) = messages(caplog)
    assert "their metadata cannot be read" in message


def test_distributions_are_asked_once_and_only_for_what_no_named_pack_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking two hundred distributions takes 20 ms and more; a start may take 50."""
    asked = []
    real = layer.importlib.metadata.distributions
    monkeypatch.setattr(layer.importlib.metadata, "distributions", lambda: asked.append(1) or real())
    build = Builder(tmp_path / "root", include_dir=tmp_path)
    one, two = sources()[:2]
    for pack in (make(tmp_path / "a.dgpack", [one]), make(tmp_path / "b.dgpack", [one])):
        with settings.override(precompiled=pack):
            assert build.lookup(one) is not None
            assert asked == []
    with settings.override(precompiled=tmp_path / "a.dgpack"):
        for _ in range(3):
            assert build.packs.get(build.source_key(two), two.name, two.arch) is None
    assert build.packs.source("0" * 40) is None
    assert asked == [1]
