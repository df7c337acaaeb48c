"""The builder: layers in order, each key compiled once, its statistics, and binaries from other processes."""

import json
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jit_fakes import FakeCompiler, builder, cubin_of, request

from deep_gemm import cache_info
from deep_gemm.errors import CompileError, InvalidInputError
from deep_gemm.jit import Binary, Builder, BuildRequest, PostPass, Resources, disassembler
from deep_gemm.jit.binary import decode, packed
from deep_gemm.jit.cache.disk import DiskCache
from deep_gemm.jit.driver import version
from deep_gemm.log import reset_warnings
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


def test_hits_by_layer_misses_and_seconds(tmp_path: Path) -> None:
    first = builder(tmp_path / "root", FakeCompiler(seconds=0.01))
    first.build(request())
    first.build(request())
    found = cache_info(first)["statistics"]
    assert found["hits"] == {"memory": 1, "pack": 0, "disk": 0}
    assert (found["misses"], found["compilations"], found["compile_seconds"]) == (1, 1, 0.01)
    assert not any(found["errors"].values())

    second = builder(tmp_path / "root")
    second.build(request())
    found = cache_info(second)["statistics"]
    assert (found["hits"], found["misses"]) == ({"memory": 0, "pack": 0, "disk": 1}, 0)


def test_errors_by_kind(tmp_path: Path) -> None:
    built = builder(tmp_path / "root").build(request())
    (Path(built.source_path or "").parent / "kernel.cubin").write_bytes(b"")
    build = builder(tmp_path / "root")
    build.build(request())
    with pytest.raises(CompileError):
        build.build(request(source="#error\n"))
    assert (build.stats["corrupted"], build.stats["failed"], build.stats["misses"]) == (1, 1, 2)

    (tmp_path / "file").write_text("")
    build = builder(tmp_path / "file")
    build.build(request())
    assert (build.stats["unusable"], build.stats["unstored"], build.stats["corrupted"]) == (1, 1, 0)


def test_a_lock_that_never_comes_is_counted(tmp_path: Path) -> None:
    build = builder(tmp_path / "root", lock_limit=0.05)
    asked = build._resolved(request())
    with DiskCache(tmp_path / "root").lock(asked.addresses[0], 1.0) as held:
        assert held
        build.build(request())
    assert (build.stats["lock_timeout"], build.stats["compiled"]) == (1, 1)


def test_threads_lose_no_count(tmp_path: Path) -> None:
    build = builder(tmp_path / "root")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: build.build(request()), range(200)))
    assert (build.stats["misses"], build.stats["memory"]) == (1, 199)


def test_a_forked_child_starts_from_zero(tmp_path: Path) -> None:
    build = builder(tmp_path / "root")
    build.build(request())
    child = os.fork()
    if child == 0:
        fresh = not any(build.stats.values())
        build.build(request())
        os._exit(0 if fresh and build.stats["memory"] == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert build.stats["compiled"] == 1


def test_it_is_json_and_creates_nothing(tmp_path: Path) -> None:
    with settings.override(cache_dir=tmp_path / "absent"):
        found = cache_info()
    assert json.loads(json.dumps(found)) == found
    assert (found["root"], found["exists"], found["writable"]) == (str(tmp_path / "absent"), False, True)
    assert (found["entries"], found["bytes"], found["problem"]) == (0, 0, None)
    assert found["limits"]["bytes"] is None
    assert list(tmp_path.iterdir()) == []


def test_it_says_why_the_cache_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with settings.override(cache_dir=tmp_path / "file"):
        assert "is not a directory" in cache_info()["problem"]
    # Faked, since root, which may run the tests, can write anywhere.
    monkeypatch.setattr("deep_gemm.jit.cache.disk._writable", lambda root: False)
    with settings.override(cache_dir=tmp_path):
        assert "cannot write to" in cache_info()["problem"]
    monkeypatch.setattr("deep_gemm.jit.builder.default_root", lambda: None)
    found = cache_info()
    assert (found["root"], found["writable"]) == (None, False)
    assert "DG_JIT_CACHE_DIR" in found["problem"]


def test_entries_are_counted(tmp_path: Path) -> None:
    build = builder(tmp_path / "root")
    build.build(request())
    build.build(request(name="other"))
    found = cache_info(build)
    assert found["entries"] == 2
    assert found["bytes"] > 4096


def test_a_missing_kernel_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = FakeCompiler()
    build = builder(tmp_path / "root", compiler)
    # Set after the builder was made: it is read when it is needed.
    monkeypatch.setenv("DG_JIT_FORBID_COMPILE", "1")
    with pytest.raises(CompileError) as caught:
        build.build(request())
    message = str(caught.value)
    for part in (
        "forbids compiling k for sm_90a",
        build.key(request()),
        str(tmp_path / "root"),
        "deep-gemm precompile",
    ):
        assert part in message
    assert compiler.calls == []
    assert list(tmp_path.iterdir()) == []
    assert (build.stats["forbidden"], build.stats["misses"], build.stats["failed"]) == (1, 1, 0)

    monkeypatch.setenv("DG_JIT_FORBID_COMPILE", "0")
    assert build.build(request()).layer == "compiled"


def test_memory_and_disk_still_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = builder(tmp_path / "root")
    first.build(request())
    monkeypatch.setenv("DG_JIT_FORBID_COMPILE", "1")
    assert first.build(request()).layer == "memory"
    assert builder(tmp_path / "root").build(request()).layer == "disk"


def test_a_corrupted_entry_is_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = builder(tmp_path / "root").build(request())
    (Path(built.source_path or "").parent / "kernel.cubin").write_bytes(b"")
    monkeypatch.setenv("DG_JIT_FORBID_COMPILE", "1")
    build = builder(tmp_path / "root")
    with pytest.raises(CompileError, match="DG_JIT_FORBID_COMPILE"):
        build.build(request())
    assert (build.stats["forbidden"], build.stats["corrupted"]) == (1, 1)


BODY = "int body;\n"
BINARY = Binary(
    name="k",
    key="0123abcd",
    arch="sm_90a",
    cubin=b"\x7fELF\n\x00\xff\n",
    resources=Resources(168, 1024, 8, 16, 24, 3, ("a warning",)),
    source_path="/somewhere/kernel.cu",
    layer="compiled",
    compiler="fake 1.0",
    seconds={"compile": 0.25, "ptxas": 0.125},
    source_key="4567cdef",
    cuda="12.9",
)


@pytest.fixture
def made(tmp_path: Path) -> Binary:
    """A binary that a process with its own cache compiled."""
    reset_warnings()
    return builder(tmp_path / "theirs").build(request())


def test_a_binary_arrives_as_it_left() -> None:
    assert decode(BINARY.encode()) == replace(BINARY, source_path=None)
    assert pickle.loads(pickle.dumps(BINARY)) == BINARY


@given(st.integers(0, len(BINARY.encode()) - 1), st.integers(1, 255))
def test_a_changed_byte_is_seen(at: int, change: int) -> None:
    data = bytearray(BINARY.encode())
    data[at] ^= change
    with pytest.raises(ValueError, match="checksum"):
        decode(bytes(data))


@given(st.integers(0, len(BINARY.encode()) - 1))
def test_a_cut_is_seen(length: int) -> None:
    with pytest.raises(ValueError, match="checksum"):
        decode(BINARY.encode()[:length])


def test_another_description_is_refused() -> None:
    strange = replace(BINARY, resources=replace(BINARY.resources, registers="many"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="description"):
        decode(strange.encode())


def test_an_adopted_binary_is_in_memory_and_on_disk_and_not_counted_as_compiled(tmp_path: Path, made: Binary) -> None:
    compiler = FakeCompiler()
    ours = builder(tmp_path / "ours", compiler)
    taken = ours.adopt(request(meta={"params": 1}), made)
    assert (taken.layer, taken.cubin, taken.resources) == ("adopted", made.cubin, made.resources)
    assert Path(taken.source_path or "").is_relative_to(tmp_path / "ours")
    assert Path(taken.source_path or "").read_text() == BODY
    assert ours.build(request()).layer == "memory"
    assert compiler.calls == []
    counts = {name: count for name, count in ours.stats.items() if count}
    assert counts == {"adopted": 1, "memory": 1}

    later = builder(tmp_path / "ours", compiler).build(request())
    assert (later.layer, later.cubin, later.compiler, later.key) == ("disk", made.cubin, made.compiler, made.key)
    assert later.seconds["compile"] == made.seconds["compile"]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"name": "other"}, "its name is other, but k is"),
        ({"arch": "sm_100a"}, "its arch is sm_100a, but sm_90a is"),
        ({"key": "0" * 40}, f"its key is {'0' * 40}, but"),
        ({"cubin": b""}, "its cubin is empty"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(tmp_path: Path, made: Binary, wrong: dict[str, str], words: str) -> None:
    ours = builder(tmp_path / "ours")
    with pytest.raises(InvalidInputError, match=words):
        ours.adopt(request(), replace(made, **wrong))  # type: ignore[arg-type]
    assert ours.lookup(request()) is None
    assert not (tmp_path / "ours").exists()
    assert ours.stats["adopted"] == 0


def test_a_binary_of_another_compiler_is_refused(tmp_path: Path, made: Binary) -> None:
    with pytest.raises(InvalidInputError, match="same compiler"):
        builder(tmp_path / "ours", FakeCompiler(identity="fake 2.0")).adopt(request(), made)


def test_what_is_on_disk_already_stays(tmp_path: Path, made: Binary) -> None:
    ours = builder(tmp_path / "theirs")
    entry = Path(made.source_path or "").parent / "kernel.json"
    before = entry.stat().st_mtime_ns
    assert ours.adopt(request(), made).layer == "disk"
    assert entry.stat().st_mtime_ns == before
    assert ours.stats["adopted"] == 0


def test_a_corrupted_entry_is_replaced(tmp_path: Path, made: Binary) -> None:
    (Path(made.source_path or "").parent / "kernel.cubin").write_bytes(b"rubbish")
    assert builder(tmp_path / "theirs").adopt(request(), made).layer == "adopted"
    later = builder(tmp_path / "theirs").build(request())
    assert (later.layer, later.cubin) == ("disk", cubin_of(BODY))


def test_without_a_place_on_disk_it_is_kept_in_memory(tmp_path: Path, made: Binary) -> None:
    (tmp_path / "file").write_text("")
    ours = builder(tmp_path / "file")
    taken = ours.adopt(request(), made)
    assert (taken.layer, taken.source_path) == ("adopted", None)
    assert ours.build(request()).layer == "memory"
    assert (ours.stats["adopted"], ours.stats["unstored"], ours.stats["compiled"]) == (1, 1, 0)


def test_the_ptxas_check_holds_for_adopted_binaries(tmp_path: Path) -> None:
    spilling = FakeCompiler(resources=Resources(255, 0, 0, 8, 8, 0))
    made = builder(tmp_path / "theirs", spilling).build(request())
    with settings.override(ptxas_check=True), pytest.raises(CompileError, match="spills"):
        builder(tmp_path / "ours", spilling).adopt(request(), made)


def test_compiling_may_be_forbidden_where_binaries_are_adopted(tmp_path: Path, made: Binary) -> None:
    ours = builder(tmp_path / "ours")
    with settings.override(forbid_compile=True):
        assert ours.adopt(request(), made).layer == "adopted"
    assert DiskCache(tmp_path / "ours").info()["entries"] == 1
