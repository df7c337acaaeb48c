"""The exceptions: what clients may catch, what the messages hold, and that they cross process borders."""

from __future__ import annotations

import pickle

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


def test_errors_survive_pickling() -> None:
    compile_error = errors.CompilerNotFoundError("none", log="a log", source_path="/x", options=["-a"])
    copy = pickle.loads(pickle.dumps(compile_error))
    assert type(copy) is errors.CompilerNotFoundError
    assert (copy.log, copy.source_path, copy.options, str(copy)) == ("a log", "/x", ("-a",), str(compile_error))

    driver_error = pickle.loads(pickle.dumps(errors.DriverError("bad", status=201, name="CUDA_ERROR_INVALID_CONTEXT")))
    assert (str(driver_error), driver_error.status, driver_error.name) == ("bad", 201, "CUDA_ERROR_INVALID_CONTEXT")
