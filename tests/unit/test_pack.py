"""The file of a pack: reproducible, readable by tar, and refused if one bit of it is wrong."""

import hashlib
import importlib.metadata
import io
import json
import os
import random
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jit_fakes import FakeCompiler, builder, cubin_of, request
from pack_kernels import make, packed, sources, user

from deep_gemm.errors import CompileError
from deep_gemm.jit.cache import archive
from deep_gemm.jit.cache import pack as packs
from deep_gemm.jit.cache.pack import MANIFEST


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    return make(tmp_path / "a.dgpack")


def test_it_holds_what_was_written(pack: Path) -> None:
    found = packs.read(pack)
    assert (found.version, len(found.kernels)) == (importlib.metadata.version("deep-gemm-jit"), 3)
    for key, kernel in found.kernels.items():
        i = kernel.name[1:]
        assert found.cubin(key) == cubin_of(f"int body{i};\n")
        assert found.source(key) == f"int body{i};\n".encode()
        assert (kernel.source_key, kernel.arch, kernel.cuda, kernel.compiler) == (
            key,
            "sm_90a",
            "12.9",
            "fake 1.0 build 7",
        )
        assert (kernel.meta, kernel.resources.registers) == ({"params": {"i": int(i)}}, 168)
    assert packs.problems(pack) == []
    assert stat.S_IMODE(pack.stat().st_mode) == 0o644
    assert [path.name for path in pack.parent.iterdir() if path.is_file()] == ["a.dgpack"]


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=100), st.integers(0, 8**11 - 1))
def test_a_header_is_the_one_that_tarfile_makes(name: str, size: int) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    assert archive.header(name, size) == info.tobuf(tarfile.USTAR_FORMAT)


@pytest.mark.parametrize(("name", "size"), [("a" * 101, 0), ("a", 8**11), ("a", -1), ("\u00e4", 0)])
def test_there_is_no_header_for_what_has_no_place_in_one(name: str, size: int) -> None:
    with pytest.raises(ValueError, match=r"no member|ascii"):
        archive.header(name, size)


def test_tar_reads_it(pack: Path) -> None:
    with tarfile.open(pack, "r:") as archive:
        members = archive.getmembers()
        manifest = json.loads(archive.extractfile(MANIFEST).read())  # type: ignore[union-attr]
        digest = archive.extractfile(members[1]).read().decode()  # type: ignore[union-attr]
        text = archive.extractfile(MANIFEST).read()  # type: ignore[union-attr]
    assert members[0].name == MANIFEST
    assert digest == f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n"
    assert all(member.isreg() and (member.mtime, member.uid, member.gid) == (0, 0, 0) for member in members)
    assert [kernel["name"] for kernel in manifest["kernels"]] == ["k0", "k1", "k2"]
    assert (manifest["arches"], manifest["toolkits"]) == (["sm_90a"], ["12.9"])
    assert manifest["compilers"] == ["fake 1.0 build 7"]


def test_the_same_kernels_give_the_same_bytes(pack: Path, tmp_path: Path) -> None:
    os.umask(os.umask(0o077))
    again = make(tmp_path / "other" / "b.dgpack", list(reversed(sources())))
    assert again.read_bytes() == pack.read_bytes()


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "a.dgpack")
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    build = builder(tmp_path / "root")
    items = [packed(build.build(one), one) for one in sources(1)]
    with pytest.raises(OSError, match="No space"):
        packs.write(path, items)
    assert path.read_bytes() == before
    assert not list(tmp_path.glob(".*"))


def flip(draw: random.Random, data: bytes, at: int) -> bytes:
    out = bytearray(data)
    out[at] ^= 1 << draw.randrange(8)
    return bytes(out)


def test_every_flipped_region_is_found_and_never_served(pack: Path, tmp_path: Path, caplog: Any) -> None:
    """Each block of 64 bytes once: manifest, header, cubin, source, padding, end."""
    good, draw = pack.read_bytes(), random.Random(0)
    used = dict.fromkeys(("pack", "compiled"), 0)
    for start in range(0, len(good), 64):
        bad = tmp_path / f"{start}.dgpack"
        bad.write_bytes(flip(draw, good, start + draw.randrange(64)))
        assert packs.problems(bad), start
        build, _ = user(tmp_path / "none" / "root", bad)
        for one in sources() if start % 512 == 0 else sources(1):
            binary = build.packs.get(build.source_key(one), one.name, one.arch)
            used["compiled" if binary is None else "pack"] += 1
            if binary is not None:
                assert binary[1] == cubin_of(one.source)
                assert binary[0].key == build.key(one)
                assert binary[0].resources.registers == 168
        bad.unlink()
    assert min(used.values()) > 10, used
    assert caplog.records


def test_no_truncation_is_believed(pack: Path, tmp_path: Path) -> None:
    good = pack.read_bytes()
    lengths = {*range(0, len(good), 512), *range(0, 2048, 37), len(good) - 1}
    for length in sorted(lengths):
        bad = tmp_path / "bad.dgpack"
        bad.write_bytes(good[:length])
        assert packs.problems(bad), length
        with pytest.raises(ValueError):
            packs.read(bad)
    (tmp_path / "long.dgpack").write_bytes(good + bytes(10240))
    assert packs.problems(tmp_path / "long.dgpack")


def rewritten(path: Path, change: Callable[[dict[str, Any]], Any], text: bytes | None = None) -> Path:
    """A pack with another manifest and a right digest: such a file is made on purpose."""
    with tarfile.open(path, "r:") as archive:
        contents = {member.name: archive.extractfile(member).read() for member in archive.getmembers()}  # type: ignore[union-attr]
    if text is None:
        body = json.loads(contents[MANIFEST])
        text = json.dumps(change(body) or body).encode()
    contents[MANIFEST] = text
    contents[f"{MANIFEST}.sha256"] = f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n".encode()
    out = path.with_name("changed.dgpack")
    with tarfile.open(out, "w:", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out


def set_field(name: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda body: body["kernels"][1].__setitem__(name, value)


MANIFESTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another format": lambda body: body.update(format=2), "another schema": lambda body: body.update(schema=99),
    "a list": lambda body: [body], "no kernels": lambda body: body.pop("kernels") and None,
    "kernels of no shape": lambda body: body.update(kernels=[7]),
    "a kernel twice": lambda body: body["kernels"].append(body["kernels"][0]),
    "a huge size": set_field("cubin_bytes", 1 << 62), "a negative size": set_field("cubin_bytes", -512),
    "a size that is none": set_field("cubin_bytes", True), "an infinite time": set_field("seconds", {"compile": "x"}),
    "a path for a key": set_field("source_key", "../../../../etc/passwd"),
    "a name that is none": set_field("name", "a/b"), "no resources": set_field("resources", {}),
    "a wrong SHA-256": set_field("cubin_sha256", "0"), "a version that is none": set_field("cuda", "new"),
}  # fmt: skip


@pytest.mark.parametrize("what", MANIFESTS)
def test_a_manifest_that_lies_is_refused(pack: Path, what: str) -> None:
    changed = rewritten(pack, MANIFESTS[what])
    with pytest.raises(ValueError):
        packs.read(changed)


def test_no_manifest_is_too_deep_or_too_long(pack: Path) -> None:
    deep = {"list": b"[" * 100_000, "number": b'{"format": ' + b"9" * 10_000 + b"}", "text": b"\xff\xfe"}
    deep |= {f"{depth}": b"[" * depth + b"]" * depth for depth in (900, 995, 1000, 1005, 5000)}
    for what, text in deep.items():
        with pytest.raises(ValueError):
            packs.read(rewritten(pack, lambda body: None, text))
        assert packs.problems(pack.with_name("changed.dgpack")), what


def test_an_absurd_size_allocates_nothing(pack: Path) -> None:
    data = bytearray(pack.read_bytes())
    info = tarfile.TarInfo(MANIFEST)
    for size in (1 << 60, 1 << 32, (1 << 25) + 1):
        info.size = size
        data[:512] = info.tobuf(tarfile.GNU_FORMAT)
        pack.write_bytes(data)
        with pytest.raises(ValueError, match=r"begin with|claims"):
            packs.read(pack)


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.parametrize(
    "extra",
    [
        member("link", tarfile.SYMTYPE, "/etc/passwd"), member("link", tarfile.LNKTYPE, MANIFEST),
        member("/tmp/absolute.cubin"), member("../../up.cubin"), member("device", tarfile.CHRTYPE), member(MANIFEST),
    ],
    ids=["symlink", "hardlink", "absolute", "dots", "device", "twice"],
)  # fmt: skip
@pytest.mark.parametrize("place", ["instead", "more"])
def test_a_member_that_does_not_belong_is_never_served(pack: Path, extra: tarfile.TarInfo, place: str) -> None:
    names = {}
    with tarfile.open(pack, "r:") as archive:
        contents = [(info, archive.extractfile(info).read()) for info in archive.getmembers()]  # type: ignore[union-attr]
    out = pack.with_name("bad.dgpack")
    with tarfile.open(out, "w:", format=tarfile.USTAR_FORMAT) as archive:
        for index, (info, content) in enumerate(contents):
            if index == 2:
                # The bytes of the first kernel's cubin stay where they are.
                names[info.name] = content
                if place == "instead":
                    extra.size = info.size
                    archive.fileobj.write(extra.tobuf(tarfile.USTAR_FORMAT))  # type: ignore[union-attr]
                    archive.fileobj.write(content + bytes(-len(content) % 512))  # type: ignore[union-attr]
                    archive.offset += 512 + len(content) + -len(content) % 512
                    continue
                extra.size = 0
                archive.addfile(extra)
            archive.addfile(info, io.BytesIO(content))
    assert packs.problems(out)
    build, compiler = user(pack.parent / "none" / "root", out)
    (name,) = names
    one = next(one for one in sources() if build.source_key(one) == name.removesuffix(".cubin"))
    assert build.build(one).layer == "compiled"
    assert len(compiler.calls) == 1
    assert not os.path.lexists("/tmp/absolute.cubin")


def test_what_cannot_be_packed_is_said(tmp_path: Path) -> None:
    build = builder(tmp_path / "root")
    binary = build.build(request())
    with pytest.raises(ValueError, match="JSON"):
        packed(binary, request(meta={"a": object()}))
    with pytest.raises(ValueError, match="compiler"):
        packed(builder(tmp_path / "b", FakeCompiler(identity="new\nline")).build(request()), request())


def test_two_kernels_of_one_source_are_one(tmp_path: Path) -> None:
    build = builder(tmp_path / "root")
    item = packed(build.build(request()), request())
    assert len(packs.write(tmp_path / "a.dgpack", [item, item])) == 1


def test_an_unreadable_place_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match="regular"):
        packs.read(tmp_path / "fifo")
    with pytest.raises(OSError):
        packs.read(tmp_path / "absent")
    with pytest.raises(ValueError, match="regular"):
        packs.read(tmp_path)
    with pytest.raises(CompileError, match="#error"):
        make(tmp_path / "b.dgpack", [request(source="#error\n")])
