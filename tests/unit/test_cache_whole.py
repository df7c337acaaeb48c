"""Source, key and cubin of a stored kernel are checked together; of 10,000 corrupted variants of an entry none is
loaded, and none raises."""

import contextlib
import hashlib
import json
import os
import random
import re
import resource
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from jit_fakes import DESCRIBED, FakeCompiler, builder, cubin_of, request
from pack_kernels import make, sources, user

from deep_gemm.cli.app import app
from deep_gemm.errors import CompilerNotFoundError, InvalidInputError
from deep_gemm.jit.binary import Binary, decode
from deep_gemm.jit.builder import Builder
from deep_gemm.jit.cache import entry as entries
from deep_gemm.jit.cache import pack as packs
from deep_gemm.jit.cache.disk import DiskCache
from deep_gemm.jit.cache.entry import CUBIN, META, SOURCE, Address
from deep_gemm.jit.cache.files import Folder
from deep_gemm.jit.cache.packs import Packs
from deep_gemm.jit.compilers import choose, find_all
from deep_gemm.jit.resources import Resources, seconds_from_json
from deep_gemm.log import reset_warnings
from deep_gemm.settings import settings

RENDER_KEY = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture
def entry(cache_dir: Path) -> Path:
    """The directory of a good entry in the settings' cache."""
    return Path(builder(cache_dir).build(request(render_key=RENDER_KEY)).source_path or "").parent


def cache(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["cache", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def resign(path: Path, body: str) -> None:
    """Write a description with a right checksum, so that only its fields are wrong."""
    rest = body.encode().removeprefix(b"{\n")
    source, cubin = (path.parent / "kernel.cu").read_bytes(), (path.parent / "kernel.cubin").read_bytes()
    digest = hashlib.sha256(b"%d %d\0" % (len(rest), len(source)) + rest + source + cubin).hexdigest()
    path.write_bytes(b'{\n "checksum": "%b",\n%b' % (digest.encode(), rest))


def unsigned(path: Path) -> str:
    return re.sub(r' "checksum": "\w+",\n', "", path.read_text())


# ---- the source


def test_a_damaged_source_is_no_part_of_anything(entry: Path, cache_dir: Path, tmp_path: Path) -> None:
    """With one flipped bit in kernel.cu, an entry is not verified, packed, merged or loaded; the next build repairs
    it."""
    good = (entry / "kernel.cu").read_bytes()
    (entry / "kernel.cu").write_bytes(bytes([good[0] ^ 1]) + good[1:])
    status, said = cache("verify")
    assert (status, "1 corrupted" in said) == (1, True), said
    status, said = cache("pack", tmp_path / "a.dgpack")
    assert (status, "1 unsound" in said) == (1, True), said
    assert not (tmp_path / "a.dgpack").exists()
    with settings.override(cache_dir=tmp_path / "other"):
        status, said = cache("merge", cache_dir)
    assert (status, "1 unsound" in said) == (1, True), said
    assert builder(cache_dir).lookup(request()) is None
    assert builder(cache_dir).build(request()).layer == "compiled"
    assert (entry / "kernel.cu").read_bytes() == good
    assert builder(cache_dir).build(request()).layer == "disk"
    assert cache("verify")[0] == 0


def test_what_is_published_holds_the_source_it_was_compiled_from(root: Path) -> None:
    """Another process removes or changes the stored source during the compilation."""

    def meddle(_: str) -> None:
        for path in root.rglob("kernel.cu"):
            path.write_text("int meddled;\n")

    builder(root, FakeCompiler(on_compile=meddle)).build(request())
    (stored,) = root.rglob("kernel.cu")
    assert stored.read_text() == "int body;\n"
    assert builder(root).build(request()).layer == "disk"


def test_a_merge_keeps_the_source_of_what_cannot_be_packed(cache_dir: Path, entry: Path, tmp_path: Path) -> None:
    body = json.loads(unsigned(entry / META))
    del body["source_key"]
    resign(entry / META, json.dumps(body, indent=1, sort_keys=True) + "\n")
    with settings.override(cache_dir=tmp_path / "other"):
        status, said = cache("merge", cache_dir)
        assert (status, "1 taken" in said) == (0, True), said
        assert cache("verify")[0] == 0
    (merged,) = (tmp_path / "other").rglob("kernel.cu")
    assert merged.read_bytes() == (entry / "kernel.cu").read_bytes()


def test_a_rendered_source_copied_over_another_is_rendered_again_and_healed(cache_dir: Path, entry: Path) -> None:
    wrong = cache_dir / "rendered" / RENDER_KEY[::-1]
    wrong.write_bytes((cache_dir / "rendered" / RENDER_KEY).read_bytes())
    asked = request(name="other", source="int other;\n", render_key=RENDER_KEY[::-1])
    fresh = Builder(cache_dir, FakeCompiler(), packs=Packs([]))
    assert fresh.source(asked.render_key) is None
    fresh.build(asked)
    assert builder(cache_dir).source(asked.render_key) == asked.source


@pytest.mark.parametrize("kind", ["empty", "directory", "link", "fifo"])
def test_whatever_is_in_place_of_a_rendered_source_is_replaced(cache_dir: Path, entry: Path, kind: str) -> None:
    path = cache_dir / "rendered" / RENDER_KEY
    path.unlink()
    if kind == "empty":
        path.touch()
    elif kind == "directory":
        (path / "inner").mkdir(parents=True)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(path)
    assert builder(cache_dir).source(RENDER_KEY) is None
    assert builder(cache_dir).build(request(render_key=RENDER_KEY)).layer == "disk"
    assert builder(cache_dir).source(RENDER_KEY) == "int body;\n"


# ---- numbers

WRONG_NUMBERS = ["1e999", "-1", str(10**400), "1.5", "true", "null", '"7"', "[]", "{}", "NaN", "-Infinity", "1" * 5000]


def with_field(text: str, field: str, value: str) -> str:
    changed = re.sub(rf'"{field}": ([^,\n]*)', lambda _: f'"{field}": {value}', text, count=1)
    assert changed != text
    return changed


@pytest.mark.parametrize("value", WRONG_NUMBERS)
@pytest.mark.parametrize("field", ["registers", "spill_loads", "compile"])
def test_no_stored_number_fails_a_build(cache_dir: Path, entry: Path, tmp_path: Path, field: str, value: str) -> None:
    if field == "compile" and value == "1.5":
        value = "1e17"  # a duration may be a fraction, but not absurdly long
    resign(entry / META, with_field(unsigned(entry / META), field, value))
    assert cache("verify")[0] == 1
    assert cache("pack", tmp_path / "a.dgpack")[0] == 1
    with settings.override(cache_dir=tmp_path / "other"):
        assert cache("merge", cache_dir)[0] == 1
    assert builder(cache_dir).build(request()).layer == "compiled"
    assert builder(cache_dir).build(request()).layer == "disk"


@pytest.mark.parametrize("field", ["resources", "seconds", "compiler"])
@pytest.mark.parametrize("value", ["null", "7", "[]", "{}", '"\\ud800"'])
def test_no_stored_field_of_another_kind_fails_a_build(cache_dir: Path, entry: Path, field: str, value: str) -> None:
    body = json.loads(unsigned(entry / META))
    body[field] = json.loads(value)
    resign(entry / META, json.dumps(body, indent=1, sort_keys=True) + "\n")
    assert builder(cache_dir).build(request()).cubin == cubin_of("int body;\n")
    assert cache("merge", entry.parents[3])[0] == 0


def test_meta_that_cannot_be_written_as_json_is_not_merged(cache_dir: Path, entry: Path, tmp_path: Path) -> None:
    resign(entry / META, with_field(unsigned(entry / META), "meta", '{"x": 1e999}'))
    assert builder(cache_dir).build(request()).layer == "disk"
    with settings.override(cache_dir=tmp_path / "other"):
        status, said = cache("merge", cache_dir)
    assert (status, "1 unsound" in said) == (1, True), said
    assert "1 left" in cache("pack", tmp_path / "a.dgpack")[1]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NUMBERS = DESCRIBED["resources"]


@given(st.fixed_dictionaries(dict.fromkeys(NUMBERS, anything)) | anything, anything)
def test_resources_and_seconds_are_of_their_kind_or_refused(resources: Any, seconds: Any) -> None:
    try:
        found = Resources.from_json(resources)
    except ValueError:
        pass
    else:
        assert all(type(value) is int and 0 <= value < 2**31 for name, value in vars(found).items() if name in NUMBERS)
    with contextlib.suppress(ValueError):
        assert all(type(value) is float and 0 <= value < 1e10 for value in seconds_from_json(seconds).values())


@pytest.mark.parametrize("value", WRONG_NUMBERS)
def test_a_packs_manifest_is_checked_too(tmp_path: Path, value: str) -> None:
    """The manifest's SHA-256 is right: only a number in it is wrong."""
    one = sources(1)[0]
    pack = make(tmp_path / "a.dgpack", [one])
    (kernel,) = packs.read(pack).kernels.values()
    text = json.dumps({**json.loads(packs._encode([kernel])), "kernels": ["?"]}, indent=1)
    listed = with_field(json.dumps(kernel.to_json()), "registers", value)
    path = repacked(pack, text.replace('"?"', listed).encode())
    with pytest.raises(ValueError, match=r"registers|is not JSON|Exceeds|JSON"):
        packs.read(path)
    build, compiler = user(tmp_path / "root", path)
    assert build.build(one).layer == "compiled"
    assert len(compiler.calls) == 1


def repacked(pack: Path, manifest: bytes) -> Path:
    """A pack with another manifest, whose layout and SHA-256 are right."""
    path = pack.with_name("b.dgpack")
    out = b""
    for name, data in ((packs.MANIFEST, manifest), (packs._SUMS, packs._sums(hashlib.sha256(manifest).hexdigest()))):
        out += packs.header(name, len(data)) + data + bytes(packs.padded(len(data)) - len(data))
    path.write_bytes(out + bytes(packs.archive_size(len(out)) - len(out)))
    return path


# ---- from a peer


@pytest.fixture
def peer(tmp_path: Path) -> Binary:
    return builder(tmp_path / "theirs").build(request())


def sent(binary: Binary, **fields: str) -> bytes:
    """The bytes that a peer would send, with a right checksum and some fields of raw JSON."""
    head, _, cubin = binary.encode().partition(b"\n")[2].partition(b"\n")
    body = {name: json.dumps(value) for name, value in json.loads(head).items()}
    text = "{" + ", ".join(f'"{name}": {value}' for name, value in {**body, **fields}.items()) + "}"
    content = text.encode("utf-8", "surrogatepass") + b"\n" + cubin
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content


@pytest.mark.parametrize("value", WRONG_NUMBERS)
def test_a_peers_numbers_are_refused_in_words(peer: Binary, value: str) -> None:
    assert decode(sent(peer)) == replace(peer, source_path=None)
    with pytest.raises(ValueError, match="description"):
        decode(sent(peer, resources=with_field(json.dumps(peer.resources.to_json()), "registers", value)))
    if value != "1.5":
        with pytest.raises(ValueError, match="description"):
            decode(sent(peer, seconds=f'{{"compile": {value}}}'))


@pytest.mark.parametrize("field", ["name", "key", "arch", "compiler", "source_key", "cuda", "layer"])
@pytest.mark.parametrize("value", ["7", "null", '""', '"\\ud800"', '"\ud800"', '"\\u00e4"', '"a\\nb"'])
def test_a_peers_texts_are_refused_in_words(peer: Binary, field: str, value: str) -> None:
    with pytest.raises(ValueError, match="description"):
        decode(sent(peer, **{field: value}))


def test_a_peers_description_that_is_no_text_is_refused(peer: Binary) -> None:
    content = b'{"name": "\xff"}\n' + peer.cubin
    with pytest.raises(ValueError, match="description"):
        decode(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)


@pytest.mark.parametrize(
    "wrong",
    [
        {"source_key": "0" * 40}, {"cuda": "11.0"}, {"compiler": "another"}, {"seconds": {"compile": float("inf")}},
        {"resources": Resources(-1, 0, 0, 0, 0, 0)},
    ],
    ids=str,
)  # fmt: skip
def test_what_a_worker_sends_must_fit_in_every_field(tmp_path: Path, peer: Binary, wrong: dict[str, Any]) -> None:
    ours = builder(tmp_path / "ours")
    with pytest.raises(InvalidInputError, match=next(iter(wrong)) + "|registers"):
        ours.adopt(request(), replace(peer, **wrong))
    assert not (tmp_path / "ours").exists()


# ---- a working directory that is gone


@pytest.fixture
def nowhere(tmp_path: Path) -> Iterator[None]:
    before = Path.cwd()
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    yield
    os.chdir(before)


def test_a_relative_root_in_a_deleted_directory_means_memory_only(
    nowhere: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "relative")
    monkeypatch.setenv("DG_JIT_PRECOMPILED", "relative.dgpack")
    for build in (Builder(None, FakeCompiler()), Builder(Path("relative"), FakeCompiler(), Path("headers"))):
        assert build.build(request()).layer == "compiled"
        assert build.build(request()).layer == "memory"
    # The packs of the settings, too.
    assert Packs().get("0" * 40, "k", "sm_90a") is None
    assert sorted(record.message[:20] for record in caplog.records) == ["Kernels cannot be st", "The pack relative.dg"]
    assert cache("info")[0] == 0
    assert cache("pack", "/nonexistent/a.dgpack", "--from", "relative")[0] == 2  # the folder of the pack is not there


def test_a_relative_compiler_in_a_deleted_directory_is_one_that_is_not_there(
    nowhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DG_JIT_NVCC_COMPILER", "bin/nvcc")
    with pytest.raises(CompilerNotFoundError, match="DG_JIT_NVCC_COMPILER names bin/nvcc, which cannot be used"):
        choose()
    assert all(found.usable is False for found in find_all() if found.kind == "nvcc")


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
