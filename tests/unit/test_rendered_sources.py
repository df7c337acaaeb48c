"""Rendered sources: what the render key depends on, and that disk and packs find sources by it."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from jit_fakes import FakeCompiler, builder, request
from pack_kernels import make

from deep_gemm import kernels
from deep_gemm.jit import Builder, BuildRequest, render
from deep_gemm.jit import render_key as module
from deep_gemm.jit.cache import maintenance, notes
from deep_gemm.jit.cache import pack as packs
from deep_gemm.jit.cache.disk import DiskCache
from deep_gemm.jit.cache.packs import Packs
from deep_gemm.jit.render_key import render_key
from deep_gemm.params import KernelParams
from deep_gemm.runtime import engine

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
