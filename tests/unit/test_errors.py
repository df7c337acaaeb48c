"""The exceptions: what clients may catch, what the messages hold, and that they cross process borders."""

import pickle
from typing import Any

import pytest

from deep_gemm import errors


@pytest.mark.parametrize(
    ("kind", "also"),
    [
        (errors.InvalidInputError, (ValueError, RuntimeError)),
        (errors.UnsupportedError, (NotImplementedError, RuntimeError)),
        (errors.CompileError, (RuntimeError,)),
        (errors.CompilerNotFoundError, (errors.CompileError,)),
        (errors.DriverError, (RuntimeError,)),
        (errors.NotWarmError, (RuntimeError,)),
        (errors.SettingError, (ValueError,)),
    ],
)
def test_clients_can_catch_the_built_in_classes(kind: type[Exception], also: tuple[type[Exception], ...]) -> None:
    assert issubclass(kind, errors.DeepGemmError)
    assert issubclass(kind, also[0])
    assert all(issubclass(kind, base) for base in also)


def test_a_compile_error_tells_source_options_and_log() -> None:
    error = errors.CompileError("it broke", log="line 3: oops\n", source_path="/x/kernel.cu", options=["-O3", "-v"])
    assert str(error).splitlines() == ["it broke", "source: /x/kernel.cu", "options: -O3 -v", "log:", "line 3: oops"]
    assert str(errors.CompileError("it broke")) == "it broke"


def kinds(base: type[errors.DeepGemmError]) -> list[type[errors.DeepGemmError]]:
    return [base, *(kind for sub in base.__subclasses__() for kind in kinds(sub))]


FIELDS: dict[type[errors.DeepGemmError], dict[str, Any]] = {
    errors.CompileError: {"log": "a log", "source_path": "/x", "options": ("-a", "-b")},
    errors.CompilerNotFoundError: {"log": "a log", "source_path": "/x", "options": ("-a",)},
    errors.DriverError: {"status": 201, "name": "CUDA_ERROR_INVALID_CONTEXT"},
}


@pytest.mark.parametrize("kind", kinds(errors.DeepGemmError))
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_every_error_survives_pickling(kind: type[errors.DeepGemmError], protocol: int) -> None:
    """Workers of a pool send them to their parent. A class with arguments of its own needs a line in FIELDS."""
    assert set(vars(kind("x"))) - {"summary"} == set(FIELDS.get(kind, {}))
    error = kind("what went wrong", **FIELDS.get(kind, {}))
    copy = pickle.loads(pickle.dumps(error, protocol))
    assert type(copy) is kind
    assert (str(copy), copy.args, vars(copy)) == (str(error), error.args, vars(error))
    assert all(getattr(copy, name) == value for name, value in FIELDS.get(kind, {}).items())
