"""The file of a solid pack: the same kernels give the same bytes, and what is damaged is refused, never used."""

import hashlib
import importlib.metadata
import json
import random
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from jit_fakes import FakeCompiler, builder, cubin_of
from pack_kernels import packed, sources, user

from deep_gemm.cli.app import app
from deep_gemm.jit.cache import files, likeness, solid, solid_writer
from deep_gemm.jit.cache import pack as packs
from deep_gemm.jit.cache.packable import Packable

COUNT, IN_A_FAMILY = 10, 6


def contents(root: Path, compiler: FakeCompiler | None = None) -> list[Packable]:
    """Ten kernels, each with a render key."""
    build = builder(root / "cache" / "root", compiler, include_dir=root / "no-headers")
    found = []
    for index, one in enumerate(sources(COUNT)):
        object.__setattr__(one, "render_key", f"{index:02x}" * 20)
        found.append(packed(build.build(one), one))
    return found


def make(path: Path, compiler: FakeCompiler | None = None) -> Path:
    made = contents(path.parent, compiler)
    solid_writer.write(path, [made[:IN_A_FAMILY], made[IN_A_FAMILY:]])
    return path


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return make(tmp_path_factory.mktemp("good") / "a.dgpack").read_bytes()


@pytest.fixture
def pack(tmp_path: Path, good: bytes) -> Path:
    """Written again: its mode is that of a pack."""
    path = tmp_path / "a.dgpack"
    files.write_whole(path, [good])
    return path


def test_it_holds_what_was_written(pack: Path) -> None:
    found = packs.read(pack)
    assert isinstance(found, solid.SolidPack)
    assert (found.version, found.count) == (importlib.metadata.version("deep-gemm-jit"), COUNT)
    assert found.cubin_bytes == sum(kernel.cubin_bytes for kernel in found.kernels.values())
    assert [kernel.name for kernel in found.kernels.values()] == [f"k{index}" for index in range(COUNT)]
    for key, kernel in found.kernels.items():
        source = f"int body{kernel.name[1:]};\n"
        assert (found.find(key), found.rendered(kernel.render_key)) == (kernel, kernel)
        assert (found.cubin(key), found.source(key).decode()) == (cubin_of(source), source)
        assert kernel.seconds == {}
    assert found.find("0" * 40) is found.find("") is found.rendered("") is found.rendered("f" * 40) is None
    with pytest.raises(KeyError):
        found.cubin("0" * 40)
    assert packs.problems(pack) == []
    assert stat.S_IMODE(pack.stat().st_mode) == 0o644


def test_two_builds_give_the_same_bytes(pack: Path, tmp_path: Path) -> None:
    """How long kernels took to compile differs, and is left out."""
    assert make(tmp_path / "other" / "b.dgpack", FakeCompiler(seconds=0.01)).read_bytes() == pack.read_bytes()


def test_kernels_that_resemble_each_other_are_compressed_together(tmp_path: Path) -> None:
    """And what lies between kernels that do not costs nothing."""
    made, rng = contents(tmp_path), random.Random(0)
    cubin = rng.randbytes(20_000)

    def changed(places: int) -> bytes:
        data = bytearray(cubin)
        for place in range(places):
            data[place * 1000] ^= 1
        return bytes(data)

    def size(families: list[list[Packable]]) -> int:
        solid_writer.write(tmp_path / "x", families)
        assert packs.read(tmp_path / "x").packable(made[7].kernel.source_key).cubin == families[-1][-1].cubin
        return (tmp_path / "x").stat().st_size

    alike = [replace(one, cubin=changed(index)) for index, one in enumerate(made[:8])]
    apart = size([[one] for one in alike])
    assert 8 * len(cubin) < apart < 8 * (len(cubin) + 800)
    assert size([alike]) < apart - 6 * len(cubin)


def test_a_builder_uses_it(pack: Path, tmp_path: Path) -> None:
    build, compiler = user(tmp_path / "root", pack)
    one = sources(COUNT)[7]
    binary = build.build(one)
    assert (binary.layer, binary.cubin) == ("pack", cubin_of(one.source))
    assert build.source("07" * 20) == one.source
    assert compiler.calls == []


def test_one_kernel_is_unpacked_once(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = packs.read(pack)
    unpacked: list[int] = []
    decompressed = solid._decompressed
    monkeypatch.setattr(solid, "_decompressed", lambda *x: (unpacked.append(len(x[0])), decompressed(*x))[1])
    key = next(iter(found.kernels))
    assert len(unpacked) == COUNT
    unpacked.clear()
    assert found.rendered("00" * 20) is not None
    assert found.find(key) is not None
    assert found.cubin(key)
    assert len(unpacked) == 1


@pytest.mark.long
def test_every_flipped_bit_is_found_and_never_served(pack: Path, tmp_path: Path) -> None:
    """One bit of each 16 bytes: names, sizes, head, table, streams."""
    good, rng, bad = pack.read_bytes(), random.Random(0), tmp_path / "bad.dgpack"
    asked = sources(COUNT)[4]
    served = 0
    for start in range(0, len(good), 16):
        data = bytearray(good)
        data[min(start + rng.randrange(16), len(good) - 1)] ^= 1 << rng.randrange(8)
        bad.write_bytes(data)
        assert packs.problems(bad), start
        if start % 128 == 0:
            build, _ = user(tmp_path / "none" / "root", bad)
            binary = build.packs.get(build.source_key(asked), asked.name, asked.arch)
            served += binary is not None
            assert binary is None or binary[1] == cubin_of(asked.source)
    assert served, "a kernel that is damaged leaves those of other chains"


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda data: data[:-1], "bytes, which are not those"),
        (lambda data: data + b"\0", "bytes, which are not those"),
        (lambda data: data[:60], "but the file has 60"),
        (lambda data: data[: len(solid.MAGIC) + 3], "but the file has"),
        (lambda data: data[: len(solid.MAGIC)], "but the file has"),
        (lambda data: data[: len(solid.MAGIC) - 1], "does not begin with the manifest"),
        (lambda data: b"", "does not begin with the manifest"),
        (lambda data: data.replace(b'"schema": ', b'"scheme": ', 1), "SHA-256"),
    ],
)
def test_a_damaged_file_says_why_and_the_jit_serves(
    pack: Path, tmp_path: Path, caplog: Any, damage: Callable[[bytes], bytes], why: str
) -> None:
    pack.write_bytes(damage(pack.read_bytes()))
    with pytest.raises(ValueError, match=why):
        packs.read(pack)
    build, compiler = user(tmp_path / "root", pack)
    assert [build.build(one).layer for one in sources(2)] == ["compiled"] * 2
    assert len(compiler.calls) == 2
    assert len([record for record in caplog.records if str(pack) in record.message]) == 1


def signed(data: bytes, change: Callable[[dict[str, Any], list[list[Any]], list[list[Any]]], object]) -> bytes:
    """The pack with another head, other keys or other places, and the checksum of these."""
    head_size, table_size, _ = solid.SIZES.unpack_from(data, len(solid.MAGIC))
    head = json.loads(data[solid.START : solid.START + head_size])
    table = data[solid.START + head_size :][:table_size]
    split = head["keys"] * solid.KEY.size
    keys = [list(each) for each in solid.KEY.iter_unpack(table[:split])]
    places = [list(each) for each in solid.PLACE.iter_unpack(table[split:])]
    change(head, keys, places)
    text = json.dumps(head).encode().ljust(head_size)
    table = b"".join([*(solid.KEY.pack(*each) for each in keys), *(solid.PLACE.pack(*each) for each in places)])
    moved = len(text) + len(table) - head_size - table_size
    if moved and len(text) > head_size:  # the head became longer
        table = table[:split] + b"".join(solid.PLACE.pack(each[0] + moved, *each[1:]) for each in places)
    digest = hashlib.sha256(text + table).digest()
    rest = data[solid.START + head_size + table_size :]
    return solid.MAGIC + solid.SIZES.pack(len(text), len(table), digest) + text + table + rest


# fmt: off
IMPOSSIBLE: dict[str, tuple[Callable[..., Any], str]] = {
    "a key's kernel": (lambda head, keys, places: keys[3].__setitem__(1, COUNT), "a key of its table"),
    "a key's last kernel": (lambda head, keys, places: keys[-1].__setitem__(1, 65535), "a key of its table"),
    "a key of another": (lambda head, keys, places: keys[0].__setitem__(1, 9 - keys[0][1]), "keys in its table"),
    "keys without an order": (lambda head, keys, places: keys.reverse(), "keys in its table"),
    "a place before": (lambda head, keys, places: places[2].__setitem__(0, 0), "where the one before ends"),
    "a place far away": (lambda head, keys, places: places[2].__setitem__(0, 2**32 - 1), "where the one before ends"),
    "a size": (lambda head, keys, places: places[2].__setitem__(1, 2**32 - 1), "where the one before ends"),
    "no stream": (lambda head, keys, places: (places[0].__setitem__(1, 0), places[1].__setitem__(0, places[0][0]),
                                              places[1].__setitem__(1, places[2][0] - places[0][0])), "none can have"),
    "nothing unpacked": (lambda head, keys, places: places[4].__setitem__(2, 0), "none can have"),
    "a little unpacked": (lambda head, keys, places: places[4].__setitem__(2, 15), "none can have"),
    "much unpacked": (lambda head, keys, places: places[4].__setitem__(2, 2**32 - 1), "none can have"),
    "a kernel before": (lambda head, keys, places: places[5].__setitem__(3, COUNT), "none can have"),
    "a shared stream": (lambda head, keys, places: places[5].__setitem__(4, 2**32 - 1), "none can have"),
    "its own stream": (lambda head, keys, places: next(
        x for at, x in enumerate(places) if x[3] == at).__setitem__(4, 1), "none can have"),
    **{f"{name} {value!r:.9}": (lambda head, keys, places, name=name, value=value: head.__setitem__(name, value), why)
       for name in ("keys", "count", "cubin_bytes") for value in (-1, 2**63, True, "7", None)
       for why in ("of its head are",)},
    "other cubins": (lambda head, keys, places: head.__setitem__("cubin_bytes", 7), "that its head says"),
    "a version of colours": (lambda head, keys, places: head.__setitem__("version", "\x1b[2J"), "its version is"),
    "no version": (lambda head, keys, places: head.pop("version"), "lacks a field"),
}
# fmt: on


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_numbers_that_no_pack_has(pack: Path, tmp_path: Path, caplog: Any, name: str) -> None:
    """All checksums are right. A build ended with struct.error or MemoryError, and `cache verify` said "all sound"."""
    change, why = IMPOSSIBLE[name]
    pack.write_bytes(signed(pack.read_bytes(), change))
    assert [problem for problem in packs.problems(pack) if why in problem]
    result = CliRunner().invoke(app, ["cache", "verify", str(pack)])
    assert (result.exit_code, why in result.output) == (1, True)
    result = CliRunner().invoke(app, ["cache", "info", str(pack)])
    assert isinstance(result.exception, (SystemExit, type(None)))
    assert "\x1b" not in result.output
    build, _ = user(tmp_path / "root", pack)
    for one in sources(COUNT):
        found = build.packs.get(build.source_key(one), one.name, one.arch)
        assert found is None or found[1] == cubin_of(one.source)
    assert build.source("07" * 20) in (None, sources(COUNT)[7].source)
    assert build.build(sources(COUNT)[0]).cubin == cubin_of(sources(COUNT)[0].source)
    try:
        packs.read(pack)
    except ValueError:
        assert len([record for record in caplog.records if str(pack) in record.message]) == 1


@pytest.mark.parametrize("sizes", [(2**32 - 1, 5, 5, 0), (0, 2**31, 0, 0), (5, 5, 5, 1)])
def test_a_kernel_that_claims_more_than_was_stored(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"a kernel claims .* bytes, but 100 were stored"):
        solid._read_content(solid.CONTENT.pack(*sizes) + bytes(100))


def test_a_signed_pack_that_is_not_changed_is_sound(pack: Path) -> None:
    data = signed(pack.read_bytes(), lambda *parts: None)
    pack.write_bytes(data)
    assert packs.problems(pack) == []


def test_keys_of_another_schema_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = make(tmp_path / "a.dgpack")
    monkeypatch.setattr(solid, "SCHEMA", 4)
    with pytest.raises(ValueError, match="schema 5, and those here are of 4"):
        packs.read(pack)


def test_a_python_without_lzma_compiles(
    pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setitem(sys.modules, "lzma", None)
    build, _ = user(tmp_path / "root", pack)
    assert build.build(sources()[0]).layer == "compiled"
    (message,) = {record.message for record in caplog.records}
    assert "this Python was built without lzma" in message


def test_a_kernel_that_grows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not have the 10 bytes"):
        solid._decompressed(solid_writer._compressed(bytes(1 << 20)), 10)
    with pytest.raises(ValueError, match="claims"):
        solid._decompressed(b"", 1 << 30)


def test_two_kernels_with_one_key_are_refused(tmp_path: Path) -> None:
    one = contents(tmp_path)[0]
    with pytest.raises(ValueError, match="one source key"):
        solid_writer.write(tmp_path / "a.dgpack", [[one, one]])


# ------------------------------------------------------------------------------------------------ what resembles what


def pieces(*numbers: int) -> bytes:
    """An item of so many pieces."""
    return b"".join(number.to_bytes(8, "little") for number in numbers)


BASE = range(100)


@pytest.mark.parametrize(
    ("items", "longest", "expected"),
    [
        ([], 3, []), ([pieces(1)], 3, [None]), ([pieces(1), pieces(2)], 3, [None, None]),
        ([pieces(*BASE), pieces(*BASE)], 3, [None, 0]),
        # The one in the middle is nearest to both others.
        ([pieces(*range(20, 120)), pieces(*range(40, 140)), pieces(*BASE)], 2, [None, 0, 0]),
        ([pieces(*BASE), pieces(*range(200, 300)), pieces(*BASE, 7000), pieces(*range(200, 300), 8000)], 3,
            [None, None, 0, 1]),
        # The largest has all that the others need.
        ([pieces(*BASE), pieces(*BASE, *range(500, 540)), pieces(*BASE, *range(500, 540), 9)], 3, [1, None, 1]),
    ],
)  # fmt: skip
def test_an_item_comes_after_what_it_resembles(items: list[bytes], longest: int, expected: list[int | None]) -> None:
    assert likeness.parents(items, longest) == expected


@pytest.mark.parametrize("longest", [2, 3])
def test_chains_end(longest: int) -> None:
    """Each item resembles the one before it most."""
    items = [pieces(*range(10 * index, 10 * index + 100)) for index in range(30)]
    found = likeness.parents(items, longest)
    lengths = []
    for index in range(len(items)):
        chain = [index]
        while (parent := found[chain[-1]]) is not None:
            chain.append(parent)
            assert len(chain) <= longest
        lengths.append(len(chain))
    assert max(lengths) == longest
    assert lengths.count(1) < 12
