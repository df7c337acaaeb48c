"""A fake driver: C functions that note their arguments and are answered here."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from ctypes import c_char_p, c_int, c_size_t, c_uint32, c_void_p
from typing import Any

import pytest
from cuda.bindings import driver as bindings

from deep_gemm.jit.driver import api, launch, module, tensor_map
from deep_gemm.jit.driver.module import Function

OK = bindings.CUresult.CUDA_SUCCESS

POINTERS = ctypes.POINTER(c_void_p)
NUMBERS = ctypes.POINTER(c_int)
TEXTS = ctypes.POINTER(c_char_p)
WRITTEN = (POINTERS, NUMBERS, TEXTS)
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint32,),
    "cuGetErrorName": (c_int, TEXTS),
    "cuGetErrorString": (c_int, TEXTS),
    "cuDeviceGet": (NUMBERS, c_int),
    "cuDeviceGetAttribute": (NUMBERS, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTERS, c_int),
    "cuCtxGetCurrent": (POINTERS,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuThreadExchangeStreamCaptureMode": (NUMBERS,),
    "cuModuleLoadData": (POINTERS, c_char_p),
    "cuModuleGetFunction": (POINTERS, c_void_p, c_char_p),
    "cuFuncGetAttribute": (NUMBERS, c_int, c_void_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": (NUMBERS, c_void_p, c_int, c_size_t),
    "cuLaunchKernelEx": (c_void_p, c_void_p, c_void_p, c_void_p),
    "cuTensorMapReplaceAddress": (c_void_p, c_void_p),
    "cuTensorMapEncodeTiled": (c_void_p, c_int, c_uint32, *[c_void_p] * 5, *[c_int] * 4),
}
"""Of the functions that this package calls, as the driver's header declares them. Results are written to pointers of
the types in `WRITTEN`."""


class FakeDriver:
    """libcuda with the functions of `SIGNATURES`. `answers` take what a function reads, with handles as ints, and
    return its status and what it writes. They are called as C functions, so that what they get is what C would get."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.answers: dict[str, Callable[..., tuple[Any, ...]]] = {
            "cuGetErrorName": lambda status: (OK, _name(status)),
            "cuGetErrorString": lambda status: (OK, _name(status) and b"the driver's text"),
            "cuCtxGetCurrent": lambda: (OK, self.current),
            "cuCtxSetCurrent": self._set_current,
            "cuDevicePrimaryCtxRetain": lambda device: (OK, 1000 + device),
            "cuDeviceGet": lambda ordinal: (OK, ordinal),
            "cuModuleLoadData": lambda image: (OK, 77),
            "cuModuleGetFunction": lambda module, name: (OK, HANDLE),
            "cuFuncGetAttribute": lambda attribute, function: (OK, 100 + attribute),
            "cuDeviceGetAttribute": lambda attribute, device: (OK, 232448),
            "cuThreadExchangeStreamCaptureMode": self._exchange_mode,
            "cuOccupancyMaxActiveBlocksPerMultiprocessor": lambda *_: (OK, 2),
        }
        self.current = 0
        self.capture_mode = int(bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
        self._failed: list[BaseException] = []

    def _exchange_mode(self, mode: int) -> tuple[Any, ...]:
        before, self.capture_mode = self.capture_mode, mode
        return (OK, before)

    def _set_current(self, context: int) -> tuple[Any, ...]:
        self.current = context
        return (OK,)

    def fail(self, function: str, name: str) -> None:
        self.answers[function] = lambda *_: (getattr(bindings.CUresult, name), None)

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def function(self, name: str) -> Callable[..., int]:
        """What `api.function` returns: the arguments are not converted to the types of a signature."""
        declared = ctypes.CFUNCTYPE(c_int, *SIGNATURES[name])(lambda *given: self._answer(name, given))
        undeclared = ctypes.cast(declared, ctypes.CFUNCTYPE(c_int))

        def called(*arguments: Any) -> int:
            assert len(arguments) == len(SIGNATURES[name]), f"{name} takes {len(SIGNATURES[name])} arguments"
            assert declared  # must live as long as this
            status = int(undeclared(*arguments))
            if self._failed:
                raise self._failed.pop()
            return status

        return called

    def _answer(self, name: str, given: tuple[Any, ...]) -> int:
        try:
            places = [at for at in given if isinstance(at, WRITTEN)]
            read = [0 if value is None else value for value in given if not isinstance(value, WRITTEN)]
            if name == "cuThreadExchangeStreamCaptureMode":
                read = [places[0].contents.value]
            arguments = tuple(read)
            self.calls.append((name, arguments))
            status, *written = self.answers.get(name, lambda *_: (OK,))(*arguments)
            for place, value in zip(places, written, strict=int(status) == 0):
                place.contents.value = value
            return int(status)
        except BaseException as error:
            self._failed.append(error)
            return -1


HANDLE = 0x7000_0000_0088
"""Of a kernel: an address that 32 bits cannot hold."""


def _name(status: int) -> bytes | None:
    try:
        return bindings.CUresult(status).name.encode()
    except ValueError:
        return None


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    monkeypatch.setattr(api, "function", fake.function)
    monkeypatch.setattr(api, "_initialised_in", None)
    for cached in (module._primary, tensor_map._encode, launch._config):
        cached.cache_clear()
    yield fake
    for cached in (module._primary, tensor_map._encode, launch._config):
        cached.cache_clear()


@pytest.fixture
def function() -> Function:
    return Function("k", c_void_p(HANDLE), 0, 168, 0, 1024, 200_000, c_void_p(77))
