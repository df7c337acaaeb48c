"""The builder: layers in order, each key compiled once, and no failure but the compiler's."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from jit_fakes import FakeCompiler, builder, cubin_of, request

from deep_gemm.errors import CompileError, InvalidInputError
from deep_gemm.jit import Builder, BuildRequest, PostPass, Resources, disassembler
from deep_gemm.jit.binary import packed
from deep_gemm.jit.driver import version
from deep_gemm.settings import settings


def test_layers_are_asked_in_order(tmp_path: Path) -> None:
    compiler = FakeCompiler()
    first = builder(tmp_path / "root", compiler)
    assert first.lookup(request()) is None
    built = first.build(request())
    assert (built.layer, built.cubin, built.name, built.arch) == ("compiled", cubin_of("int body;\n"), "k", "sm_90a")
    assert built.source_path is not None
    assert Path(built.source_path).read_text() == "int body;\n"
    assert built.seconds.keys() == {"compile", "ptxas", "lookup"}
    assert first.build(request()).layer == "memory"

    second = builder(tmp_path / "root", compiler)
    found = second.lookup(request())
    assert found is not None
    assert (found.layer, found.cubin, found.resources, found.key) == ("disk", built.cubin, built.resources, built.key)
    assert (found.source_path, found.compiler) == (built.source_path, "fake 1.0 build 7")
    assert second.build(request()).layer == "memory"
    assert len(compiler.calls) == 1
    assert [first.stats[name] for name in ("memory", "disk", "compiled")] == [1, 0, 1]
    assert [second.stats[name] for name in ("memory", "disk", "compiled")] == [1, 1, 0]


def test_the_compiler_gets_the_stored_path_and_the_flags_of_the_key(tmp_path: Path) -> None:
    compiler = FakeCompiler()
    built = builder(tmp_path / "root", compiler).build(request())
    (call,) = compiler.calls
    assert call["source_path"] == built.source_path
    assert call["flags"] == ("--arch=sm_90a", "-std=c++17")
    assert call["include_dir"] == tmp_path / "no-headers"


def editing(identity: str) -> PostPass:
    """A pass that appends the kernel's name and its own."""
    return PostPass(identity, lambda cubin, name: cubin + f"{name} {identity}".encode(), lambda cubin: "some words")


def test_a_post_pass_makes_another_kernel(tmp_path: Path) -> None:
    """Each has its own key, under which it is compiled, stored and found; without a pass the cubin is the
    compiler's."""
    asked = [request(), request(post_pass=editing("a-1")), request(post_pass=editing("a-2"))]
    plain = cubin_of(request().source)
    for layer in ("compiled", "disk"):
        build = builder(tmp_path / "root")
        built = [build.build(one) for one in asked]
        assert [binary.cubin for binary in built] == [plain, plain + b"k a-1", plain + b"k a-2"]
        assert [binary.layer for binary in built] == [layer] * 3
        assert len({binary.key for binary in built}) == len({binary.source_key for binary in built}) == 3
    entries = [json.loads(Path(one.source_path or "").with_name("kernel.json").read_text()) for one in built]
    assert [entry["meta"].get("post_pass") for entry in entries] == [None, "a-1", "a-2"]
    assert [packed(*pair).kernel.meta for pair in zip(built, asked, strict=True)] == [e["meta"] for e in entries]


@pytest.mark.parametrize("identity", ["", "Bursts", "two words", "x" * 61, "a\n"])
def test_the_identity_of_a_post_pass_is_a_short_name(identity: str) -> None:
    with pytest.raises(InvalidInputError, match="identity of a post-pass must be 1 to 60 lower-case letters"):
        editing(identity)


def test_an_entry_tells_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deep_gemm.jit.builder.driver_release", lambda: None)
    built = builder(tmp_path / "root").build(request(meta={"params": {"block_m": 128}}))
    folder = Path(built.source_path or "").parent
    assert folder.relative_to(tmp_path / "root").parts == ("sm_90a", "cuda-12.9", "driver-any", f"k-{built.key}")
    meta = json.loads((folder / "kernel.json").read_text())
    assert meta["meta"] == {"params": {"block_m": 128}}
    assert meta["resources"]["registers"] == 168
    assert (meta["compiler"], meta["flags"], meta["name"]) == ("fake 1.0 build 7", ["--arch=sm_90a", "-std=c++17"], "k")
    assert meta["log"] == "the log"
    assert {path.name for path in folder.iterdir()} == {"kernel.cu", "kernel.cubin", "kernel.json"}


def test_meta_is_no_part_of_the_identity_but_must_be_json(tmp_path: Path) -> None:
    build = builder(tmp_path / "root")
    assert build.key(request(meta={"a": 1})) == build.key(request())
    with pytest.raises(InvalidInputError, match="meta of k must be plain JSON"):
        build.build(request(meta={"a": object()}))


@pytest.mark.parametrize("changed", [{"debug": True}, {"lineinfo": True}])
def test_settings_that_change_the_binary_change_the_key(tmp_path: Path, changed: dict[str, bool]) -> None:
    compiler = FakeCompiler()
    build = builder(tmp_path / "root", compiler)
    build.build(request())
    with settings.override(**changed):
        assert build.build(request()).layer == "compiled"
    assert build.build(request()).layer == "memory"
    assert compiler.calls[1]["flags"] != compiler.calls[0]["flags"]


def test_another_compiler_is_another_kernel(tmp_path: Path) -> None:
    builder(tmp_path / "root").build(request())
    other = builder(tmp_path / "root", FakeCompiler(identity="fake 1.0 build 8"))
    assert other.build(request()).layer == "compiled"


def test_the_root_follows_the_settings(tmp_path: Path) -> None:
    build = Builder(compiler=FakeCompiler(), include_dir=tmp_path)
    with settings.override(cache_dir=tmp_path / "a"):
        assert build.build(request()).layer == "compiled"
    with settings.override(cache_dir=tmp_path / "b"):
        assert build.build(request()).layer == "compiled"
    with settings.override(cache_dir=tmp_path / "a"):
        assert build.build(request()).layer == "memory"


def test_a_kernel_built_without_a_driver_serves_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "driver_version", lambda: None)
    built = builder(tmp_path / "root").build(request())
    assert "driver-any" in str(built.source_path)
    monkeypatch.setattr(version, "driver_version", lambda: 13000)
    assert builder(tmp_path / "root").build(request()).layer == "disk"
    other = builder(tmp_path / "root").build(request(source="int other;\n"))
    assert "driver-13.0" in str(other.source_path)
    monkeypatch.setattr(version, "driver_version", lambda: 13010)
    assert builder(tmp_path / "root").build(request(source="int other;\n")).layer == "compiled"


def test_a_compile_error_keeps_the_source_and_leaves_no_entry(tmp_path: Path) -> None:
    build = builder(tmp_path / "root")
    bad = request(source="#error\n")
    for _ in range(2):
        with pytest.raises(CompileError, match="it does not compile") as caught:
            build.build(bad)
        assert caught.value.source_path is not None
        assert Path(caught.value.source_path).read_text() == "#error\n"
    assert build.lookup(bad) is None
    assert build.stats["failed"] == 2
    assert build.build(request()).layer == "compiled"


def test_ptxas_check_refuses_compiled_and_cached_kernels(tmp_path: Path) -> None:
    spilling = FakeCompiler(resources=Resources(255, 0, 8, 4, 4, 1, ("C7508: wgmma instructions are serialized",)))
    build = builder(tmp_path / "root", spilling)
    with settings.override(ptxas_check=True):
        for _ in range(2):
            with pytest.raises(CompileError, match=r"refuses k: it spills .*; it uses 8 bytes of local.*serialised"):
                build.build(request())
    assert build.build(request()).resources.spill_stores == 4
    with settings.override(ptxas_check=True):
        assert builder(tmp_path / "clean").build(request()).layer == "compiled"


def test_dumps_are_kept_beside_the_cubin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disassembler, "sass", lambda cubin: "MOV R1")
    with settings.override(dump_asm=True):
        built = builder(tmp_path / "root").build(request())
    folder = Path(built.source_path or "").parent
    assert (folder / "kernel.ptx").read_text() == "// ptx\n"
    assert (folder / "kernel.sass").read_text() == "MOV R1"


def test_threads_compile_one_key_once(tmp_path: Path) -> None:
    compiler = FakeCompiler(seconds=0.05)
    build = builder(tmp_path / "root", compiler)
    start = threading.Barrier(16)

    def work(_: int) -> bytes:
        start.wait()
        return build.build(request()).cubin

    with ThreadPoolExecutor(16) as pool:
        cubins = list(pool.map(work, range(16)))
    assert set(cubins) == {cubin_of("int body;\n")}
    assert len(compiler.calls) == 1


def test_threads_compile_different_keys_at_once(tmp_path: Path) -> None:
    # Passes only if all four are inside the compiler together.
    together = threading.Barrier(4)
    build = builder(tmp_path / "root", FakeCompiler(on_compile=lambda source: together.wait(timeout=10) and None))
    with ThreadPoolExecutor(4) as pool:
        built = list(pool.map(lambda i: build.build(request(source=f"int a{i};\n")), range(4)))
    assert [binary.layer for binary in built] == ["compiled"] * 4


@pytest.mark.parametrize(
    "fields", [{"name": "a b"}, {"name": "../k"}, {"name": ""}, {"arch": "90a"}, {"arch": "sm_90a/.."}]
)
def test_a_request_is_checked(fields: dict[str, str]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(fields))):
        BuildRequest(**{"name": "k", "source": "", "arch": "sm_90a", **fields})
