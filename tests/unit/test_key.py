"""Cache keys and render keys: what decides the bytes of a cubin changes the key, and nothing else does."""

import errno
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from jit_fakes import FakeCompiler, builder, request
from pack_kernels import make

from deep_gemm import kernels
from deep_gemm.errors import InvalidInputError
from deep_gemm.jit import Builder, BuildRequest, render
from deep_gemm.jit import key as key_module
from deep_gemm.jit import render_key as module
from deep_gemm.jit.cache import maintenance, notes
from deep_gemm.jit.cache import pack as packs
from deep_gemm.jit.cache.disk import DiskCache
from deep_gemm.jit.cache.packs import Packs
from deep_gemm.jit.key import build_key, headers, source_key
from deep_gemm.jit.render_key import render_key
from deep_gemm.params import KernelParams
from deep_gemm.runtime import engine

SOURCE = '#include "a.cuh"\n#include <sub/b.cuh>\nextern "C" __global__ void k() {}\n'


@pytest.fixture
def include(tmp_path: Path) -> Path:
    folder = tmp_path / "include"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.cuh").write_text('#pragma once\n  #  include "common.cuh"\nint a;\n')
    (folder / "common.cuh").write_text('#include "a.cuh"\nint common;\n')
    (folder / "sub" / "b.cuh").write_text('#include "near.cuh"\n')
    (folder / "sub" / "near.cuh").write_text("int near;\n")
    (folder / "unused.cuh").write_text("int unused;\n")
    return folder


def key(include: Path | None, **changes: Any) -> str:
    fields: dict[str, Any] = {"name": "k", "source": SOURCE, "arch": "sm_90a", "compiler": "fake 1", "flags": ["-O3"]}
    fields |= changes
    compiler, flags = fields.pop("compiler"), fields.pop("flags")
    return build_key(source_key(**fields, flags=["-std=c++17"], include_dir=include), compiler, flags)


def test_headers_are_found_transitively(include: Path) -> None:
    assert [name for name, _ in headers(SOURCE, include)] == ["a.cuh", "common.cuh", "sub/b.cuh", "sub/near.cuh"]
    assert headers("int x;", include) == []
    assert headers(SOURCE, None) == []


@pytest.mark.parametrize(
    "change",
    [
        {"name": "k2"}, {"source": SOURCE + " "}, {"arch": "sm_90"}, {"compiler": "fake 2"}, {"flags": ["-O3", "-DX"]},
        {"flags": []},
    ],
)  # fmt: skip
def test_each_part_changes_the_key(include: Path, change: dict[str, Any]) -> None:
    assert key(include, **change) != key(include)


def test_parts_do_not_run_into_each_other() -> None:
    assert key(None, flags=["-a", "-b"]) != key(None, flags=["-a-b"])
    assert key(None, name="ab", source="c") != key(None, name="a", source="bc")


@pytest.mark.parametrize("name", ["a.cuh", "common.cuh", "sub/b.cuh", "sub/near.cuh"])
def test_every_header_that_is_reached_counts(include: Path, name: str) -> None:
    before = key(include)
    path = include / name
    original = path.read_text()
    # The same length, immediately afterwards: size and time may be the same.
    path.write_text(original.replace("int", "inT").replace("near.cuh", "nEar.cuh"))
    assert key(include) != before
    path.write_text(original)
    assert key(include) == before


def test_what_is_not_reached_does_not_count(include: Path) -> None:
    before = key(include)
    (include / "unused.cuh").write_text("int changed;\n")
    assert key(include) == before


def test_two_install_prefixes_agree(include: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / "lib" / "include"
    shutil.copytree(include, other)
    assert key(other) == key(include)


def test_a_header_of_the_toolkit_is_covered_by_the_compiler(include: Path) -> None:
    source = "#include <cuda_fp8.h>\n"
    assert headers(source, include) == []
    assert key(include, source=source) != key(include, source="\n")


def test_the_key_of_a_fixed_request_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    # A change here invalidates every cache: raise key.SCHEMA with it, and have a reason.
    assert key(None) == "16933db6cc24a5ffca8d280de884fb9b6d8a9950"
    monkeypatch.setattr(key_module, "SCHEMA", key_module.SCHEMA + 1)
    assert key(None) != "16933db6cc24a5ffca8d280de884fb9b6d8a9950"


def later(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ten seconds later, when the files of the test are old. Gives the list of files that are read from then on."""
    real, read = time.time_ns, key_module.content_of
    reads: list[str] = []
    monkeypatch.setattr(time, "time_ns", lambda: real() + 10_000_000_000)
    monkeypatch.setattr(key_module, "content_of", lambda path, size: reads.append(path) or read(path, size))
    return reads


def test_old_headers_are_read_once_until_one_changes(include: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = later(monkeypatch)
    before = key(include)
    assert len(reads) == 4
    assert key(include) == key(include, name="k") == before
    assert key(include, name="other") != before
    assert len(reads) == 4
    for path in ("sub/near.cuh", "a.cuh"):
        seen = key(include)
        (include / path).write_text((include / path).read_text() + "// more\n")
        assert key(include) != seen
    # A new header beside the including file takes precedence over the one that was found before.
    seen = key(include)
    (include / "near.cuh").write_text("int not_this;\n")
    assert key(include) == seen
    (include / "sub" / "near.cuh").unlink()
    assert key(include) != seen


def test_a_header_that_several_sources_reach_is_read_once(include: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = later(monkeypatch)
    other = '#include "common.cuh"\n#include "unused.cuh"\n'
    key(include)
    before = key(include, source=other)
    assert sorted(Path(path).name for path in reads) == ["a.cuh", "b.cuh", "common.cuh", "near.cuh", "unused.cuh"]
    (include / "a.cuh").write_text("int changed;\n")
    assert key(include, source=other) != before


def test_a_header_that_comes_to_lie_nearer_is_seen(include: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (include / "sub" / "near.cuh").rename(include / "near.cuh")
    later(monkeypatch)
    before = key(include)
    (include / "sub" / "near.cuh").write_text("int near;\n")
    assert key(include) != before


def test_a_coarse_clock_hides_no_change(include: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a filesystem with times of two seconds, a changed file can keep its size, inode and time."""
    fine = key_module.signature

    def coarse(path: str) -> Any:
        found = fine(path)
        return found and (*found[:3], *(at // 2_000_000_000 * 2_000_000_000 for at in found[3:]))

    monkeypatch.setattr(key_module, "signature", coarse)
    keys = set()
    for text in ("int a;\n", "int b;\n", "int c;\n", "int d;\n"):
        (include / "a.cuh").write_text(text)
        keys.add(key(include))
    assert len(keys) == 4


def test_a_source_key_knows_no_compiler(include: Path) -> None:
    fields: dict[str, Any] = {"name": "k", "source": SOURCE, "arch": "sm_90a", "flags": ["-std=c++17"]}
    before = source_key(**fields, include_dir=include)
    changes: list[dict[str, Any]] = [{"name": "k2"}, {"source": SOURCE + " "}, {"arch": "sm_90"}, {"post_pass": "a-1"}]
    for change in [*changes, {"flags": ["-std=c++17", "-lineinfo"]}]:
        assert source_key(**{**fields, **change}, include_dir=include) != before
    (include / "a.cuh").write_text("int other;\n")
    assert source_key(**fields, include_dir=include) != before
    # It never equals a key with a compiler.
    assert before not in (build_key(before, "", []), build_key(before, "", fields["flags"]), build_key("", "", []))


def test_the_source_key_of_a_fixed_request_is_fixed() -> None:
    # A change here invalidates every pack: raise key.SCHEMA with it, and have a reason.
    fields: dict[str, Any] = {"name": "k", "source": SOURCE, "arch": "sm_90a", "flags": ["-O3"]}
    assert source_key(**fields, include_dir=None) == "fc859b93f05b40860d87c9d8cf3ae796b934948a"


def test_what_only_looks_like_an_include_does_not_count(include: Path) -> None:
    source = '// #include "a.cuh"\nint x; #include "a.cuh"\n#includes "a.cuh"\n#\tinclude\t"common.cuh"\n'
    assert [name for name, _ in headers(source, include)] == ["a.cuh", "common.cuh"]
    assert headers('// #include "a.cuh"', include) == headers('x #include "a.cuh"', include) == []
    assert len(headers('\t # include "a.cuh"', include)) == 2


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize("times", [1, 2])
def test_a_header_that_cannot_be_read_is_not_left_out_of_the_key(
    include: Path, monkeypatch: pytest.MonkeyPatch, number: int, times: int
) -> None:
    """The compiler may be able to read it a moment later: the binary would be found under a key without the header."""
    known, absent = key(include), SOURCE.replace("<sub/b.cuh>", "<absent.cuh>")
    without = key(include, source=absent)
    real, failed = key_module.content_of, []

    def read(path: str, size: int) -> bytes:
        if Path(path).name == "near.cuh" and len(failed) < times:
            failed.append(path)
            raise OSError(number, os.strerror(number))
        return real(path, size)

    monkeypatch.setattr(key_module, "content_of", read)
    monkeypatch.setattr(key_module, "_memo", {})
    # Read at the second try, or a key that nothing else has.
    assert (key(include) == known) == (times == 1)
    assert key(include) == known
    assert key(include, source=absent) == without


@pytest.mark.parametrize("what", ["/dev/zero", "fifo", "large.cuh", "inner.cuh"])
def test_what_might_have_no_end_is_no_header(include: Path, what: str) -> None:
    """Reading /dev/zero filled the memory, and a FIFO blocked for ever."""
    os.mkfifo(include / "fifo")
    with open(include / "large.cuh", "wb") as file:
        file.truncate(1 << 40)
    (include / "inner.cuh").write_text("#include </dev/zero>\n")
    with pytest.raises(InvalidInputError, match=r"The source includes /.*, which .*\. Include a file of text\."):
        headers(f'#include "{what}"\n', include)


KEY = "0123456789abcdef" * 2 + "01234567"


def asked() -> BuildRequest:
    plain = request()
    return BuildRequest(plain.name, plain.source, plain.arch, plain.meta, render_key=KEY)


@pytest.fixture
def disk(tmp_path: Path) -> DiskCache:
    """A cache with one kernel."""
    made = builder(tmp_path / "root")
    made.build(asked())
    found = made.disk()
    assert found is not None
    return found


def kept(disk: DiskCache) -> Path:
    return disk.root / "rendered" / KEY


def test_a_source_is_found_by_what_it_was_rendered_from(disk: DiskCache) -> None:
    assert notes.source(disk, KEY) == asked().source
    assert Builder(disk.root, FakeCompiler(), packs=[]).source(KEY) == asked().source
    assert kept(disk).stat().st_mode & 0o777 == 0o600
    assert notes.source(disk, KEY[::-1]) is None


@pytest.mark.parametrize("key", ["", "..", "../../etc/passwd", "A" * 40, "0" * 39])
def test_what_is_no_key_finds_nothing(disk: DiskCache, key: str) -> None:
    assert notes.source(disk, key) is None


def test_every_damaged_source_is_passed_by(disk: DiskCache) -> None:
    whole = kept(disk).read_bytes()
    for at in range(len(whole)):
        kept(disk).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert notes.source(disk, KEY) is None, at
        kept(disk).write_bytes(whole[:at])
        assert notes.source(disk, KEY) is None, at


def test_a_link_in_its_place_is_not_followed(disk: DiskCache, tmp_path: Path) -> None:
    elsewhere = tmp_path / "source"
    kept(disk).rename(elsewhere)
    kept(disk).symlink_to(elsewhere)
    assert notes.source(disk, KEY) is None


def test_a_kernel_from_disk_keeps_the_source_that_is_missing(disk: DiskCache) -> None:
    kept(disk).unlink()
    assert builder(disk.root).build(asked()).layer == "disk"
    assert notes.source(disk, KEY) == asked().source


def test_pruning_and_clearing_take_sources_along(disk: DiskCache) -> None:
    assert [item.done for item in maintenance.prune(disk, max_bytes=0)] == [True]
    assert not kept(disk).exists()
    builder(disk.root).build(asked())
    assert kept(disk).exists()
    disk.clear()
    assert not kept(disk).parent.exists()


FIELDS: dict[str, Any] = {"wide": True, "width": 128}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "templates"
    folder.mkdir()
    (folder / "a.cu.jinja").write_text("/*{ width }*/\n")
    (folder / "part.jinja").write_text("int part;\n")
    return folder


def age(folder: Path) -> None:
    """Set old times, as an installed package has; the change time cannot be set."""
    for path in [*folder.iterdir(), folder]:
        os.utime(path, (1e9, 1e9))


@pytest.mark.parametrize(
    "fields", [{}, {"wide": 1, "width": 128}, {"wide": True, "width": "128"}, {"wide": True, "width": 64}]
)
def test_fields_change_it(folder: Path, fields: dict[str, Any]) -> None:
    assert render_key("a.cu.jinja", fields, folder) != render_key("a.cu.jinja", FIELDS, folder)


def test_the_order_of_fields_does_not(folder: Path) -> None:
    assert render_key("a.cu.jinja", dict(reversed(FIELDS.items())), folder) == render_key("a.cu.jinja", FIELDS, folder)


def test_the_template_and_what_it_may_include_change_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {render_key("a.cu.jinja", FIELDS, folder), render_key("part.jinja", FIELDS, folder)}
    # The same length, immediately afterwards: size and time of a young file do not count.
    for name, text in (("a.cu.jinja", "/*{ wibth }*/\n"), ("part.jinja", "int pact;\n"), ("new.jinja", "")):
        (folder / name).write_text(text)
        seen.add(render_key("a.cu.jinja", FIELDS, folder))
    (folder / "new.jinja").rename(folder / "other.jinja")
    seen.add(render_key("a.cu.jinja", FIELDS, folder))
    monkeypatch.setattr(module, "_renderer", lambda: "another Jinja")
    seen.add(render_key("a.cu.jinja", FIELDS, folder))
    assert len(seen) == 7


def test_old_files_are_read_once_until_they_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + 10_000_000_000)
    first = render_key("a.cu.jinja", FIELDS, folder)
    reads: list[str] = []
    read = module.content_of
    monkeypatch.setattr(module, "content_of", lambda path, size: reads.append(path) or read(path, size))
    assert render_key("a.cu.jinja", FIELDS, folder) == first
    assert reads == []
    (folder / "part.jinja").write_text("int another;\n")
    assert render_key("a.cu.jinja", FIELDS, folder) != first
    assert reads
    age(folder)
    assert render_key("a.cu.jinja", FIELDS, folder) != first


def case() -> KernelParams:
    return kernels.get("transpose_scales").cases()[0]


def test_a_request_is_the_same_with_a_pack_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = engine.build_request(case())
    assert plain.render_key == render_key("transpose_scales.cu.jinja", kernels.get("transpose_scales").fields(case()))
    build = Builder(tmp_path / "root", packs=Packs([make(tmp_path / "a.dgpack", [plain])]))
    monkeypatch.setattr(engine, "default_builder", lambda: build)

    def no_render(*_: Any) -> str:
        raise AssertionError("it is in the pack")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "render", no_render)
        assert engine.build_request(case()) == plain
        other = kernels.get("sm90_fp8_gemm").cases()[0]
        with pytest.raises(AssertionError, match="in the pack"):
            engine.build_request(other)
    assert engine.build_request(other).source == render(
        "sm90_fp8_gemm.cu.jinja", kernels.get("sm90_fp8_gemm").fields(other)
    )


def test_a_damaged_source_is_rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = engine.build_request(case())
    pack = make(tmp_path / "a.dgpack", [plain])
    pack.write_bytes(pack.read_bytes().replace(b"__global__", b"__globul__"))
    build = Builder(tmp_path / "root", packs=Packs([pack]))
    monkeypatch.setattr(engine, "default_builder", lambda: build)
    assert engine.build_request(case()) == plain
    assert build.packs.source(plain.render_key) is None


def test_a_kernel_of_no_template_has_no_render_key(tmp_path: Path) -> None:
    plain = BuildRequest(name="k", source="int x;\n", arch="sm_90a")
    pack = make(tmp_path / "a.dgpack", [plain])
    (kernel,) = packs.read(pack).kernels.values()
    assert kernel.render_key == ""
    assert Packs([pack]).source("") is None
