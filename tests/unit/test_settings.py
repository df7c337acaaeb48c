"""Settings: the environment is read at each access, errors are sentences, and overrides nest and reach threads."""

import logging
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from deep_gemm import errors
from deep_gemm.errors import SettingError
from deep_gemm.log import reset_warnings, warn_once
from deep_gemm.settings import Settings, child_environment, settings


def test_the_environment_is_read_at_each_access(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.use_nvrtc is False
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "1")
    assert settings.use_nvrtc is True
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "off")
    assert settings.use_nvrtc is False
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "")
    assert settings.use_nvrtc is False


@pytest.mark.parametrize(("text", "value"), [("1", True), ("TRUE", True), ("Yes", True), ("on", True), ("0", False)])
def test_booleans(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    monkeypatch.setenv("DG_JIT_DEBUG", text)
    assert settings.debug is value


def test_a_bad_value_names_variable_value_and_expectation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_JIT_DEBUG", "maybe")
    with pytest.raises(SettingError, match=r"DG_JIT_DEBUG must be 1/true/yes/on or 0/false/no/off, but it is 'maybe'"):
        _ = settings.debug
    monkeypatch.setenv("DG_FALLBACK", "numpy")
    with pytest.raises(SettingError, match=r'DG_FALLBACK must be "error", or of cublaslt, triton, torch .*numpy'):
        _ = settings.fallback


def test_paths_expand_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "~/kernels")
    assert settings.cache_dir == Path("/somewhere/kernels")


def test_cuda_home_comes_before_cuda_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("CUDA_PATH", "/b")
    assert settings.cuda_home == Path("/b")
    monkeypatch.setenv("CUDA_HOME", "/a")
    assert settings.cuda_home == Path("/a")


def test_overrides_nest_and_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_JIT_DEBUG", "0")
    with settings.override(debug=True, cache_dir="/x"):
        assert settings.debug is True
        assert settings.cache_dir == Path("/x")
        with settings.override(debug="no"):
            assert settings.debug is False
            assert settings.cache_dir == Path("/x")
        assert settings.debug is True
        with settings.override(cache_dir=None):
            assert settings.cache_dir is None
    assert settings.debug is False


def test_an_override_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), settings.override(debug=True):
        raise KeyError
    assert settings.debug is False


def test_overrides_may_end_in_another_order_than_they_began() -> None:
    first, second = settings.override(debug=True), settings.override(lineinfo=True)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert (settings.debug, settings.lineinfo) == (False, True)
    second.__exit__(None, None, None)
    assert (settings.debug, settings.lineinfo) == (False, False)


def test_worker_threads_see_an_override() -> None:
    seen = []
    with settings.override(debug=True):
        thread = threading.Thread(target=lambda: seen.append(settings.debug))
        thread.start()
        thread.join()
    assert seen == [True]


def test_an_override_refuses_what_it_does_not_know() -> None:
    with pytest.raises(SettingError, match="no setting 'speed'"), settings.override(speed=11):
        pass
    with pytest.raises(SettingError, match=r"override\(debug=\.\.\.\) must be"), settings.override(debug="perhaps"):
        pass
    with pytest.raises(SettingError, match="must be a path"), settings.override(cache_dir=3):
        pass
    assert settings.debug is False


def test_settings_are_not_assigned() -> None:
    with pytest.raises(AttributeError, match=r"settings\.override\(debug=\.\.\.\) or set DG_JIT_DEBUG|use `with"):
        settings.debug = True  # type: ignore[misc]


def test_describe_lists_every_setting_with_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_JIT_DEBUG", "1")
    monkeypatch.setenv("DG_JIT_WITH_LINEINFO", "sideways")
    with settings.override(use_nvrtc=True):
        lines = {line.attribute: line for line in settings.describe()}
    assert (lines["debug"].value, lines["debug"].source) == (True, "DG_JIT_DEBUG")
    assert (lines["use_nvrtc"].value, lines["use_nvrtc"].source) == (True, "override")
    assert (lines["dump_ptx"].value, lines["dump_ptx"].source) == (False, "default")
    assert "sideways" in lines["lineinfo"].value
    assert lines["lineinfo"].source.endswith("(invalid)")
    assert all(line.doc and line.type for line in lines.values())
    expected = """DG_JIT_CACHE_DIR DG_JIT_USE_NVRTC DG_JIT_NVCC_COMPILER DG_JIT_DEBUG DG_PRINT_CONFIGS
        DG_JIT_PRINT_COMPILER_COMMAND DG_JIT_PTXAS_VERBOSE DG_JIT_PTXAS_CHECK DG_JIT_WITH_LINEINFO DG_JIT_DUMP_PTX
        DG_JIT_DUMP_SASS DG_JIT_DUMP_ASM DG_JIT_PRINT_LOAD_TIME DG_JIT_DEBUG_DUMP DG_FALLBACK DG_JIT_CACHE_LIMIT
        DG_MONITOR DG_MONITOR_EVERY"""
    assert set(expected.split()) <= {line.variable for line in lines.values()}
    assert Settings.debug.default is False


def test_a_child_process_gets_the_environment_less_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-O0")
    monkeypatch.setenv("OTHER", "1")
    environment = child_environment("NVCC_APPEND_FLAGS")
    assert "NVCC_APPEND_FLAGS" not in environment
    assert environment["OTHER"] == "1"


def test_a_warning_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    reset_warnings()
    with caplog.at_level(logging.WARNING, logger="deep_gemm"):
        threads = [threading.Thread(target=warn_once, args=("key", "careful")) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        warn_once("other", "careful too")
    assert [record.message for record in caplog.records] == ["careful", "careful too"]


def test_a_home_that_moves_takes_its_paths_along(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Parsed paths are cached, but not those with "~", which depend on the home directory."""
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "~/kernels")
    monkeypatch.setenv("DG_JIT_PRECOMPILED", f"/a.dgpack{os.pathsep}~/b.dgpack")
    for name in ("one", "two"):
        monkeypatch.setenv("HOME", str(tmp_path / name))
        assert settings.cache_dir == tmp_path / name / "kernels"
        assert settings.precompiled == (Path("/a.dgpack"), tmp_path / name / "b.dgpack")


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
