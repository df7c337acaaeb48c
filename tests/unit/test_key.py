"""Identity: everything that decides the bytes changes the key, and nothing else does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from deep_gemm.jit import key as key_module
from deep_gemm.jit.key import build_key, headers

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
    return build_key(**{**fields, **changes}, include_dir=include)


def test_headers_are_found_transitively(include: Path) -> None:
    assert [name for name, _ in headers(SOURCE, include)] == ["a.cuh", "common.cuh", "sub/b.cuh", "sub/near.cuh"]
    assert headers("int x;", include) == []
    assert headers(SOURCE, None) == []


@pytest.mark.parametrize(
    "change",
    [
        {"name": "k2"},
        {"source": SOURCE + " "},
        {"arch": "sm_90"},
        {"compiler": "fake 2"},
        {"flags": ["-O3", "-DX"]},
        {"flags": []},
    ],
)
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
    # The same length, at once: nothing may rely on size or time.
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
    # A change here makes every cache in the world cold: raise key.SCHEMA with it and know why.
    assert key(None) == "0e965990378f2edbb6c62a281a096e0dfdc24949"
    monkeypatch.setattr(key_module, "SCHEMA", key_module.SCHEMA + 1)
    assert key(None) != "0e965990378f2edbb6c62a281a096e0dfdc24949"
