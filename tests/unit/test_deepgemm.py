"""DeepGEMM is imported under the name of this package, which must be intact afterwards. Fake packages stand in for
it."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

import deep_gemm
from deep_gemm.aot.workload import GemmShape
from deep_gemm.backends import deepgemm
from deep_gemm.cli.app import app
from deep_gemm.errors import DeepGemmError


def package(directory: Path, text: str) -> Path:
    (directory / "deep_gemm").mkdir(parents=True)
    (directory / "deep_gemm" / "__init__.py").write_text(text)
    (directory / "deep_gemm" / "inner.py").write_text("WHOSE = 'theirs'\n")
    return directory


def ours() -> dict[str, int]:
    return {name: id(module) for name, module in sys.modules.items() if name.split(".")[0] == "deep_gemm"}


def test_theirs_is_found_and_ours_stays(tmp_path: Path) -> None:
    before, path = ours(), list(sys.path)
    found = deepgemm.load(package(tmp_path, "from .inner import WHOSE\ndef fp8_gemm_nt(a, b, d): return WHOSE\n"))
    assert found.fp8_gemm_nt(1, 2, 3) == "theirs"
    assert ours() == before
    assert sys.path == path
    import deep_gemm as again

    assert again is deep_gemm
    assert again is not found
    assert deepgemm.load(tmp_path) is found, "an extension cannot be loaded twice"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise ImportError('undefined symbol')\n", "does not import: ImportError: undefined symbol"),
        ("def other(): pass\n", "is not DeepGEMM"),
        ("def fp8_gemm_nt(): pass\ndef declare_constant(): pass\n", "is not DeepGEMM"),
    ],
)
def test_what_is_not_deepgemm_is_said_in_words(tmp_path: Path, text: str, message: str) -> None:
    before, path = ours(), list(sys.path)
    with pytest.raises(DeepGemmError, match=message):
        deepgemm.load(package(tmp_path, text))
    assert ours() == before
    assert sys.path == path


def test_an_empty_directory_is_said_in_words(tmp_path: Path) -> None:
    with pytest.raises(DeepGemmError, match=r"There is no package deep_gemm in .*pip install --target"):
        deepgemm.load(tmp_path)


def test_a_result_that_is_not_ours_or_not_written_at_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from deep_gemm.bench import backends

    monkeypatch.setattr(backends, "BACKENDS", dict(backends.BACKENDS))
    monkeypatch.setattr(deepgemm, "_loaded", [])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    (x,) = backends.make_operands(GemmShape(4, 128, 256), 1, device="cpu")
    backends.ours(x)()
    right = x.d.clone()
    for gemm, reason in (
        (lambda a, b, d: d.copy_(right), None),
        (lambda a, b, d: d.copy_(1.1 * right), "its result differs from ours by"),
        (lambda a, b, d: None, "its result differs from ours by nan"),
    ):
        backends.add_deepgemm(SimpleNamespace(fp8_gemm_nt=gemm))
        found = backends.usable(backends.DEEPGEMM, x)
        assert found is None if reason is None else found is not None and found.startswith(reason)


@pytest.mark.parametrize(
    ("options", "op"),
    [
        ((), {}), (("--op", "bf16_gemm_nt"), {"op": "bf16_gemm_nt"}),
        (("--op", "fp16_gemm_tn", "--output-dtype", "f32", "--accumulate"),
            {"op": "fp16_gemm_tn", "output": "f32", "accumulate": True}),
    ],
)  # fmt: skip
def test_it_is_timed_beside_the_others(
    options: tuple[str, ...], op: dict[str, str | bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deep_gemm.bench import backends, run
    from deep_gemm.cli import bench

    monkeypatch.setattr(backends, "BACKENDS", dict(backends.BACKENDS))
    monkeypatch.setattr(deepgemm, "_loaded", [])
    monkeypatch.setattr(bench, "_need_gpu", lambda modes: None)
    asked: list[tuple[str, ...]] = []

    def measure(shape: GemmShape, mode: str, names: Sequence[str]) -> run.Row:
        asked.append(tuple(names))
        return run.make_row(shape, mode, {"ours": 5.0, "deepgemm": 6.0}, {})

    monkeypatch.setattr(run, "measure", measure)
    package(tmp_path / "theirs", "__version__ = '9.8'\ndef fp8_gemm_nt(a, b, d): pass\n")
    told = (*options, "--deepgemm", str(tmp_path / "theirs"), "--output", str(tmp_path / "rows.jsonl"))
    result = CliRunner().invoke(app, ["bench", "--shape", "64x512x256", *told])
    assert result.exit_code == 0, result.output
    (row,) = run.load(tmp_path / "rows.jsonl")
    assert row["deepgemm"] == "9.8"
    assert {name: row[name] for name in ("op", "output", "accumulate") if name in row} == op
    assert asked == [("ours", *(("cublaslt",) if op else ("tensorwise", "blockwise")), "deepgemm")]
