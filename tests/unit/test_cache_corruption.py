"""10,000 corrupted variants of one entry: none is loaded, and none raises."""

import json
import os
import random
import resource
import shutil
from pathlib import Path

import pytest
from jit_fakes import DESCRIBED

from deep_gemm.jit.cache import entry as entries
from deep_gemm.jit.cache.disk import DiskCache
from deep_gemm.jit.cache.entry import CUBIN, META, SOURCE, Address
from deep_gemm.jit.cache.files import Folder
from deep_gemm.log import reset_warnings

VARIANTS = 10_000
NAMES = (SOURCE, CUBIN, META)
CHUNKS = 10
ADDRESS = Address("sm_90a", "12.9", "any", "k", "0" * 40)
OTHER = Address("sm_90a", "12.9", "any", "k", "1" * 40)
CONTENT = b"\x7fELF" + bytes(range(256)) * 2
NOTES = {**DESCRIBED, "log": "a log, \u00e4"}
SOURCE_TEXT = "int body1;  // which is as long as a line\n"


def flip(draw: random.Random, data: bytes, other: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 8))):
        out[draw.randrange(len(out))] ^= 1 << draw.randrange(8)
    return bytes(out)


def truncate(draw: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: draw.randrange(len(data))]


def insert(draw: random.Random, data: bytes, other: bytes) -> bytes:
    at = draw.randrange(len(data) + 1)
    what = draw.choice((b"\0", b" ", b"\n", b"[", b'"', b"\xff", b"9", draw.randbytes(9), b"[" * 5000))
    return data[:at] + what + data[at:]


def zero(draw: random.Random, data: bytes, other: bytes) -> bytes:
    start = draw.randrange(len(data))
    length = draw.randrange(1, len(data) - start + 1)
    return data[:start] + bytes(length) + data[start + length :]


def cut_out(draw: random.Random, data: bytes, other: bytes) -> bytes:
    start = draw.randrange(len(data))
    return data[:start] + data[start + draw.randrange(1, 64) :]


def duplicate(draw: random.Random, data: bytes, other: bytes) -> bytes:
    start = draw.randrange(len(data))
    part = data[start : start + draw.randrange(1, 64)]
    return data[:start] + part + data[start:]


def digits(draw: random.Random, data: bytes, other: bytes) -> bytes:
    """Wrong digits: lengths, versions and numbers in the description; in the cubin, bytes that happen to be digits."""
    places = [i for i, byte in enumerate(data) if chr(byte).isdigit() and byte < 128]
    out = bytearray(data)
    out[draw.choice(places)] = ord(draw.choice("0123456789-.e"))
    return bytes(out)


def foreign(draw: random.Random, data: bytes, other: bytes) -> bytes:
    """The head of one file and the tail of another entry's file."""
    at = draw.randrange(len(data))
    return data[:at] + other[at:]


def empty(draw: random.Random, data: bytes, other: bytes) -> bytes:
    return b""


def noise(draw: random.Random, data: bytes, other: bytes) -> bytes:
    return draw.randbytes(draw.randrange(1, 600))


CHANGES = (flip, flip, truncate, insert, zero, cut_out, duplicate, digits, foreign, empty, noise)


@pytest.fixture
def stored(tmp_path: Path) -> tuple[DiskCache, dict[str, bytes], dict[str, bytes]]:
    """A cache with one entry, the files of this entry, and the files of another entry."""
    disk = DiskCache(tmp_path / "root")
    found = []
    for address, content in ((ADDRESS, CONTENT), (OTHER, CONTENT[::-1])):
        disk.put(address, SOURCE_TEXT.encode() + content[-1:], content, NOTES)
        found.append({name: (disk.directory(address) / name).read_bytes() for name in NAMES})
    shutil.rmtree(disk.directory(OTHER))
    reset_warnings()
    return disk, found[0], found[1]


def variant(draw: random.Random, good: dict[str, bytes], other: dict[str, bytes]) -> dict[str, bytes]:
    """The files of a corrupted entry; a name that is left out is a missing file."""
    if draw.random() < 0.03:
        return draw.choice(
            (
                {**good, CUBIN: good[META], META: good[CUBIN]},
                {**good, CUBIN: other[CUBIN]},
                {**good, META: other[META]},
                {**good, SOURCE: other[SOURCE]},
                other,
                {name: good[name] for name in (SOURCE, CUBIN)},
                {name: good[name] for name in (SOURCE, META)},
                {name: good[name] for name in (CUBIN, META)},
            )
        )
    files = dict(good)
    for name in draw.choice(((CUBIN,), (SOURCE,), (META,), (META,), (CUBIN, META))):
        files[name] = draw.choice(CHANGES)(draw, good[name], other[name])
    return files


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, CHUNKS))])
def test_no_corrupted_variant_is_loaded_or_raises(
    stored: tuple[DiskCache, dict[str, bytes], dict[str, bytes]], seed: int
) -> None:
    disk, good, other = stored
    whole = disk.get(ADDRESS)
    assert whole is not None
    assert whole.cubin == CONTENT
    folder, draw = disk.directory(ADDRESS), random.Random(seed)
    corrupted = 0
    while corrupted < VARIANTS // CHUNKS:
        files = variant(draw, good, other)
        if files == good:
            continue
        corrupted += 1
        for name in NAMES:
            # A new file: some filesystems write through to the disk when a file is truncated and written again.
            (folder / name).unlink(missing_ok=True)
            if name in files:
                (folder / name).write_bytes(files[name])
        loaded = disk.get(ADDRESS)
        if loaded is not None:
            # White space between tokens of the description, or another spelling of a number, means the same. Nothing
            # else may be accepted, and in the cubin not one bit.
            assert (loaded.cubin, loaded.meta) == (CONTENT, whole.meta), files
            assert (files[CUBIN], files[SOURCE]) == (good[CUBIN], good[SOURCE]), files


class Died(BaseException):
    """As from a signal that ends the process."""


@pytest.mark.parametrize("files_written", [0, 1])
def test_a_writer_that_dies_while_it_replaces_an_entry_leaves_none(
    stored: tuple[DiskCache, dict[str, bytes], dict[str, bytes]],
    files_written: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An old description beside a new cubin would be an entry that is damaged, of which each process warns."""
    disk, good, _ = stored
    real, written = Folder.publish, []

    def publish(self: Folder, name: str, content: bytes, temporary: Folder) -> None:
        if len(written) == files_written:
            raise Died
        real(self, name, content, temporary)
        written.append(name)

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "publish", publish)
        with pytest.raises(Died):
            disk.put(ADDRESS, good[SOURCE], CONTENT[::-1], NOTES)
    assert written == [CUBIN][:files_written], "the source was there already"
    later = DiskCache(disk.root)
    assert (later.get(ADDRESS), later.info()["entries"], caplog.records) == (None, 0, [])
    assert later.put(ADDRESS, good[SOURCE], CONTENT[::-1], NOTES) is not None
    found = later.get(ADDRESS)
    assert found is not None
    assert (found.cubin, caplog.records) == (CONTENT[::-1], [])


def test_no_depth_of_nesting_raises(stored: tuple[DiskCache, dict[str, bytes], dict[str, bytes]]) -> None:
    """Depths around the interpreter's limit: reading may succeed where writing for the checksum fails."""
    disk, good, _ = stored
    path = disk.directory(ADDRESS) / META
    for depth in range(900, 1020):
        deep = b"[" * depth + b"]" * depth
        path.unlink()
        path.write_bytes(good[META].replace(b'"log": ', b'"more": ' + deep + b', "log": '))
        assert disk.get(ADDRESS) is None, depth
        path.unlink()
        path.write_bytes(good[META].replace(f'"format": {entries.FORMAT}'.encode(), b'"format": ' + deep))
        assert disk.get(ADDRESS) is None, depth


@pytest.mark.parametrize("name", NAMES)
def test_a_huge_sparse_file_costs_no_memory(tmp_path: Path, name: str) -> None:
    """The size of a file was believed, and a build raised MemoryError under a memory limit."""
    reset_warnings()
    disk = DiskCache(tmp_path / "root")
    entry = disk.put(ADDRESS, SOURCE_TEXT.encode(), CONTENT, NOTES)
    assert entry is not None
    os.truncate(entry / name, 1 << 30)
    before = resource.getrlimit(resource.RLIMIT_AS)
    with Path("/proc/self/statm").open() as usage:
        used = int(usage.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 24), before[1]))
    try:
        assert disk.get(ADDRESS) is None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert disk.put(ADDRESS, SOURCE_TEXT.encode(), CONTENT, NOTES) is not None
    assert disk.get(ADDRESS) is not None


@pytest.mark.parametrize("size", [True, 0, -1, "512", None, 1 << 40])
def test_a_size_that_no_cubin_has_is_refused(tmp_path: Path, size: object, caplog: pytest.LogCaptureFixture) -> None:
    reset_warnings()
    disk = DiskCache(tmp_path / "root")
    entry = disk.put(ADDRESS, SOURCE_TEXT.encode(), CONTENT, NOTES)
    assert entry is not None
    text = (entry / META).read_text()
    (entry / META).write_text(text.replace(f'"cubin_bytes": {len(CONTENT)}', f'"cubin_bytes": {json.dumps(size)}'))
    assert disk.get(ADDRESS) is None
    assert "its cubin_bytes are" in caplog.text
