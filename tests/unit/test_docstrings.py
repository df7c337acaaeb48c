"""Each public function has an example in its docstring, and all of them run on the CPU."""

from __future__ import annotations

import doctest
import inspect
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import deep_gemm

MODULES = ("backends", "compat", "epilogue", "fused", "nn", "quantize", "testing", "utils")
"""Public modules whose functions are counted too."""
ELSEWHERE = {
    "CustomKernel": "deep_gemm.kernel makes it",
    "backends.backend": "it changes what all see; docs/compare.md says how to use it",
    "backends.kernel": "as the one before; docs/compare.md has an example",
    "backends.operation": "as the one before; examples/own_operation.py has an example",
    "kernel": "its example has ten lines, and a test of its own",
    "monitor": "its example calls a model; docs/debugging.md has more",
}

ON_A_GPU = ("testing.bench", "testing.bench_flushed", "testing.bench_kineto", "testing.get_arch_major")
"""Functions that need one, which examples have not."""


def public() -> Iterator[tuple[str, Any]]:
    """Functions, classes and their class methods by name, but for errors. Names of one function are one."""
    seen = set()
    for name in deep_gemm.__all__:
        value = getattr(deep_gemm, name)
        names = getattr(value, "__all__", ()) if name in MODULES else ()
        if name == "settings":  # an object, whose methods are public
            names = [each for each, x in vars(type(value)).items() if inspect.isfunction(x) and each[0] != "_"]
        if name == "nn":
            names = [*names, *(f"parallel.{each}" for each in value.parallel.__all__)]
        if name == "quantize":
            names = [each for each, x in vars(value).items() if inspect.isfunction(x) and not each.startswith("_")]
        found = [(f"{name}.{each}", operator.attrgetter(each)(value)) for each in names] or [(name, value)]
        for each, x in found:
            error = inspect.isclass(x) and issubclass(x, Exception)
            if callable(x) and not error and id(x) not in seen and getattr(x, "__module__", "").startswith("deep_gemm"):
                seen.add(id(x))
                yield each, x
                makers = [name for name, made in vars(x).items() if isinstance(made, classmethod) and name[0] != "_"]
                yield from ((f"{each}.{name}", getattr(x, name)) for name in makers)


FUNCTIONS = {
    name: value
    for name, value in public()
    if not {name, name.partition(".")[0]} & {*ELSEWHERE}
    and name not in ("quantize.Quantized", "testing.Operand", *ON_A_GPU)
}


@pytest.fixture(autouse=True)
def _choices_stay() -> Iterator[None]:
    sms = deep_gemm.get_num_sms()
    yield
    deep_gemm.set_num_sms(sms)
    deep_gemm.set_batch_invariant(False)


@pytest.mark.compile
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_example_of_a_function_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    text = inspect.getdoc(inspect.unwrap(FUNCTIONS[name])) or ""
    test = doctest.DocTestParser().get_doctest(text, {"torch": torch, "deep_gemm": deep_gemm}, name, name, 0)
    assert test.examples, "a docstring needs an example: lines that begin with >>>"
    said: list[str] = []
    failed = doctest.DocTestRunner(verbose=False).run(test, out=said.append).failed
    assert not failed, "".join(said)


def test_exceptions_to_the_rule_exist() -> None:
    assert all(operator.attrgetter(name)(deep_gemm) for name in ELSEWHERE)
    assert len(FUNCTIONS) > 80


def test_an_example_that_is_wrong_is_found() -> None:
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", "wrong", 0)
    assert doctest.DocTestRunner(verbose=False).run(test, out=lambda text: None).failed == 1
