"""The driver layer without a driver: its calls, their arguments, and every message."""

import ctypes
import os
import sys

import pytest
from cuda.bindings import driver as bindings
from driver_fakes import HANDLE, FakeDriver

from deep_gemm.errors import DriverError, InvalidInputError, NotWarmError
from deep_gemm.jit.driver import api, version
from deep_gemm.jit.driver.launch import Launch, LaunchShape
from deep_gemm.jit.driver.module import Function, bind_primary_context, load_function
from deep_gemm.jit.driver.tensor_map import TensorMapSpec


def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    api.cuda.cache_clear()
    monkeypatch.setattr(api, "driver_version", lambda: None)
    monkeypatch.setattr(api, "_initialised_in", None)  # on a machine with a GPU another test may have used it


def test_without_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    no_driver(monkeypatch)
    with pytest.raises(DriverError, match=r"no NVIDIA driver was found \(libcuda\.so\.1"):
        load_function(b"cubin", "k", 0, 0)
    with pytest.raises(DriverError, match="no NVIDIA driver was found"):
        TensorMapSpec("u8", (128,), (), (128,)).encode(16)


def test_an_old_driver_is_named(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*arguments: object) -> None:
        raise RuntimeError('Function "cuDeviceGet" not found')

    driver.answers["cuDeviceGet"] = lacks  # type: ignore[assignment]
    with pytest.raises(DriverError, match=r"driver has no cuDeviceGet: it is too old"):
        bind_primary_context(0)
    monkeypatch.undo()
    monkeypatch.setattr(version, "driver_library", lambda: ctypes.CDLL(None))
    with pytest.raises(DriverError, match=r"driver has no cuTensorMapEncodeTiled: it is too old"):
        api.library_function("cuTensorMapEncodeTiled")


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    no_driver(monkeypatch)
    monkeypatch.setattr(api, "driver_version", lambda: 13000)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(DriverError, match=r"cuda-python cannot be imported .* `pip install 'cuda-python>=12.9,<14'`"):
        load_function(b"cubin", "k", 0, 0)


def test_no_library_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "driver_library", lambda: None)
    version.driver_version.cache_clear()
    assert version.driver_version() is None
    assert version.driver_release() is None
    version.driver_version.cache_clear()
    monkeypatch.setattr(version, "driver_version", lambda: 12080)
    assert version.driver_release() == (12, 8)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("CUDA_ERROR_NO_BINARY_FOR_GPU", "deep-gemm doctor"),
        ("CUDA_ERROR_NOT_INITIALIZED", "spawn"),
        ("CUDA_ERROR_ILLEGAL_ADDRESS", "compute-sanitizer"),
        ("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "outside CUDA-graph capture"),
    ],
)
def test_a_failed_call_has_name_text_and_hint(driver: FakeDriver, name: str, hint: str) -> None:
    driver.fail("cuCtxSetCurrent", name)
    with pytest.raises(DriverError) as caught:
        api.call("cuCtxSetCurrent", 1, about="k")
    assert str(caught.value).startswith(f"cuCtxSetCurrent for k failed with {name} (the driver's text). ")
    assert hint in str(caught.value)
    assert (caught.value.name, caught.value.status) == (name, int(getattr(bindings.CUresult, name)))


def test_every_hint_is_for_an_error_that_exists() -> None:
    for name in api._HINTS:
        assert hasattr(bindings.CUresult, name), name


@pytest.mark.parametrize("error", [KeyError(54321), ValueError("54321 is not a valid CUresult")])
def test_a_status_that_the_bindings_do_not_know_is_reported(
    driver: FakeDriver, function: Function, error: Exception
) -> None:
    """They raise KeyError before 13.4, and then ValueError."""

    def answer(*_: object) -> tuple[object, ...]:
        raise error

    driver.answers |= {"cuInit": answer, "cuLaunchKernelEx": answer}
    says = r" failed with a status that the installed cuda-python does not know: .*54321"
    for name, call in {
        "cuX": lambda: api.check(54321, "cuX"),
        "cuInit": api.initialise,
        "cuLaunchKernelEx for k": Launch(function, LaunchShape((1, 1, 1), 128, 0), 0, []),
    }.items():
        with pytest.raises(DriverError, match=name + says):
            call()


def test_a_forked_child_is_told_to_use_spawn(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    api.initialise()
    api.initialise()
    assert driver.names() == ["cuInit"]
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(DriverError, match=r'initialised before this process was forked.*"spawn"'):
        load_function(b"cubin", "k", 0, 0)


def test_loading_a_function(driver: FakeDriver) -> None:
    loaded = load_function(b"cubin", "kernel_name", 3, 200_000)
    enum = bindings.CUfunction_attribute
    assert (loaded.symbol, loaded.device, int(loaded.handle), int(loaded.module)) == ("kernel_name", 3, HANDLE, 77)
    assert loaded.registers == 100 + int(enum.CU_FUNC_ATTRIBUTE_NUM_REGS)
    assert loaded.local_bytes == 100 + int(enum.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)
    assert loaded.shared_static == 100 + int(enum.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
    arguments = dict(driver.calls)
    assert arguments["cuModuleLoadData"] == (b"cubin",)
    assert arguments["cuModuleGetFunction"] == (77, b"kernel_name")
    assert arguments["cuFuncSetAttribute"] == (HANDLE, enum.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 200_000)
    assert driver.current == 1003
    assert loaded.max_active_blocks(384, 200_000) == 2
    assert driver.calls[-1][1] == (HANDLE, 384, 200_000)


def test_loading_gives_the_thread_its_context_back(driver: FakeDriver) -> None:
    driver.current = 5
    load_function(b"cubin", "k", 0, 0)
    assert driver.current == 5
    assert "cuFuncSetAttribute" not in driver.names()
    driver.fail("cuModuleLoadData", "CUDA_ERROR_INVALID_IMAGE")
    with pytest.raises(DriverError, match="cuModuleLoadData for k failed with CUDA_ERROR_INVALID_IMAGE"):
        load_function(b"cubin", "k", 0, 0)
    assert driver.current == 5
    bind_primary_context(1)
    assert driver.current == 1001
    assert driver.names().count("cuDevicePrimaryCtxRetain") == 2


def test_loading_inside_capture_says_warm_up_first(driver: FakeDriver) -> None:
    driver.fail("cuModuleLoadData", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")
    with pytest.raises(NotWarmError, match="k would have to be loaded inside CUDA-graph capture"):
        load_function(b"cubin", "k", 0, 0)


def test_too_much_shared_memory_is_said_in_numbers(driver: FakeDriver) -> None:
    driver.fail("cuFuncSetAttribute", "CUDA_ERROR_INVALID_VALUE")
    with pytest.raises(DriverError, match=r"k asks for 300000 bytes .* device 0 allows 232448 in all"):
        load_function(b"cubin", "k", 0, 300_000)


def test_an_empty_cubin_is_refused(driver: FakeDriver) -> None:
    with pytest.raises(InvalidInputError, match="cubin of k is empty"):
        load_function(b"", "k", 0, 0)


def test_loading_stands_beside_a_capture_of_another_thread(driver: FakeDriver) -> None:
    modes = bindings.CUstreamCaptureMode
    seen = []
    answer = driver.answers["cuModuleLoadData"]
    driver.answers["cuModuleLoadData"] = lambda image: (seen.append(driver.capture_mode), answer(image))[1]
    load_function(b"cubin", "k", 0, 0)
    assert seen == [modes.CU_STREAM_CAPTURE_MODE_RELAXED]
    assert driver.capture_mode == modes.CU_STREAM_CAPTURE_MODE_GLOBAL
    driver.fail("cuModuleLoadData", "CUDA_ERROR_INVALID_IMAGE")
    with pytest.raises(DriverError):
        load_function(b"cubin", "k", 0, 0)
    assert driver.capture_mode == modes.CU_STREAM_CAPTURE_MODE_GLOBAL
