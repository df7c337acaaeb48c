"""Source, key and cubin of a stored kernel are checked together, and no stored number fails a build."""

import contextlib
import hashlib
import json
import os
import re
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
from deep_gemm.jit.cache import pack as packs
from deep_gemm.jit.cache.entry import META
from deep_gemm.jit.cache.packs import Packs
from deep_gemm.jit.compilers import choose, find_all
from deep_gemm.jit.resources import Resources, seconds_from_json
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
