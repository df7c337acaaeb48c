"""DeepGEMM is imported under the name of this package, which must be whole afterwards; packages stand in for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import deep_gemm
from deep_gemm.benchmarks import deepgemm
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
    from deep_gemm.aot.workload import GemmShape
    from deep_gemm.benchmarks import backends

    monkeypatch.setattr(backends, "BACKENDS", dict(backends.BACKENDS))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    (x,) = backends.make_operands(GemmShape(4, 128, 256), 1, device="cpu")
    backends.ours(x)()
    right = x.d.clone()
    for gemm, reason in (
        (lambda a, b, d: d.copy_(right), None),
        (lambda a, b, d: d.copy_(1.1 * right), "its result differs from ours by"),
        (lambda a, b, d: None, "its result differs from ours by nan"),
    ):
        backends.add_deepgemm(gemm)
        found = backends.usable(backends.DEEPGEMM, x)
        assert found is None if reason is None else found is not None and found.startswith(reason)


def test_both_lists_are_timed_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from deep_gemm.benchmarks import backends, run

    monkeypatch.setattr(backends, "BACKENDS", dict(backends.BACKENDS))
    asked: list[tuple[str, tuple[str, ...]]] = []

    def measure(shape: object, mode: str, names: tuple[str, ...]) -> run.Row:
        asked.append((mode, names))
        return {"mode": mode, "m": 1, "n": 128, "k": 128, "us": 5.0, "tflops": 1.0, "gbps": 1.0}

    monkeypatch.setattr(run, "measure", measure)
    package(tmp_path / "theirs", "__version__ = '9.8'\ndef fp8_gemm_nt(a, b, d): pass\n")
    assert deepgemm.main([str(tmp_path / "theirs"), str(tmp_path / "rows.jsonl")]) == 0
    rows = run.load(tmp_path / "rows.jsonl")
    assert {row["deepgemm"] for row in rows} == {"9.8"}
    assert {mode for mode, _ in asked} == {"flush", "graph", "steady"}
    assert {names for _, names in asked} == {("ours", "tensorwise", "blockwise", "deepgemm")}
    assert len(rows) == 84 + 42 + 29
    assert deepgemm.main([]) == 2
    capsys.readouterr()
    assert deepgemm.main([str(tmp_path / "theirs"), str(tmp_path / "other.jsonl"), "-1"]) == 0
    assert not (tmp_path / "other.jsonl").exists()
    assert "The time ran out before 126 measurements: 1 x 2112 x 7168 flush" in capsys.readouterr().out
