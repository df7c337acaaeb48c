"""Binaries from another process: damage is detected, and only binaries that fit are adopted."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jit_fakes import FakeCompiler, builder, cubin_of, request

from deep_gemm.errors import CompileError, InvalidInputError
from deep_gemm.jit import Binary, Resources
from deep_gemm.jit.binary import decode
from deep_gemm.jit.cache.disk import DiskCache
from deep_gemm.log import reset_warnings
from deep_gemm.settings import settings

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
