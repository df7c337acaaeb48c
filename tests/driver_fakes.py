"""A fake driver: the types of cuda.bindings, and calls that are recorded and answered here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cuda.bindings import driver as bindings

from deep_gemm.jit.driver import api, launch, module, tensor_map
from deep_gemm.jit.driver.module import Function

OK = bindings.CUresult.CUDA_SUCCESS


class FakeDriver:
    """cuda.bindings.driver with its types and enumerations, and calls that are recorded and answered here."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.answers: dict[str, Callable[..., tuple[Any, ...]]] = {
            "cuGetErrorString": lambda result: (OK, b"the driver's text"),
            "cuCtxGetCurrent": lambda: (OK, bindings.CUcontext(self.current)),
            "cuCtxSetCurrent": self._set_current,
            "cuDevicePrimaryCtxRetain": lambda device: (OK, bindings.CUcontext(1000 + int(device))),
            "cuDeviceGet": lambda ordinal: (OK, bindings.CUdevice(ordinal)),
            "cuModuleLoadData": lambda image: (OK, bindings.CUmodule(77)),
            "cuModuleGetFunction": lambda module, name: (OK, bindings.CUfunction(88)),
            "cuFuncGetAttribute": lambda attribute, function: (OK, 100 + int(attribute)),
            "cuDeviceGetAttribute": lambda attribute, device: (OK, 232448),
            "cuThreadExchangeStreamCaptureMode": self._exchange_mode,
            "cuOccupancyMaxActiveBlocksPerMultiprocessor": lambda *_: (OK, 2),
        }
        self.current = 0
        self.capture_mode = bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL

    def _exchange_mode(self, mode: Any) -> tuple[Any, ...]:
        before, self.capture_mode = self.capture_mode, mode
        return (OK, before)

    def _set_current(self, context: Any) -> tuple[Any, ...]:
        self.current = int(context)
        return (OK,)

    def fail(self, function: str, name: str) -> None:
        self.answers[function] = lambda *_: (getattr(bindings.CUresult, name), None)

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def __getattr__(self, name: str) -> Any:
        if not (name.startswith("cu") and name[2:3].isupper()):
            return getattr(bindings, name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, arguments))
            return self.answers.get(name, lambda *_: (OK,))(*arguments)

        return call


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    monkeypatch.setattr(api, "cuda", lambda: fake)
    monkeypatch.setattr(api, "_initialised_in", None)
    for cached in (module._primary, tensor_map._encode, launch._config):
        cached.cache_clear()
    yield fake
    for cached in (module._primary, tensor_map._encode, launch._config):
        cached.cache_clear()


@pytest.fixture
def function() -> Function:
    return Function("k", bindings.CUfunction(88), 0, 168, 0, 1024, 200_000, bindings.CUmodule(77))
