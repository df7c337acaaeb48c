"""Loading a cubin, and what the driver reports about its kernel."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any

from deep_gemm.errors import DriverError, InvalidInputError, NotWarmError
from deep_gemm.jit.driver import api
from deep_gemm.log import say
from deep_gemm.records import record
from deep_gemm.settings import settings


@record(frozen=True, eq=False)
class Function:
    """A loaded kernel. `handle` is its CUfunction, `module` its CUmodule; registers and local memory (bytes) are of a
    thread, shared memory (bytes) of a block. Keeps its module loaded, for the life of the process if a launch record
    holds it."""

    symbol: str
    handle: Any
    device: int
    registers: int
    local_bytes: int
    shared_static: int
    dynamic_shared: int
    module: Any

    def max_active_blocks(self, threads: int, shared: int) -> int:
        """How many blocks of `threads` threads and `shared` bytes of dynamic shared memory fit on one SM."""
        with primary_context(self.device):
            name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
            return int(api.call(name, self.handle, threads, shared, about=self.symbol))


def load_function(cubin: bytes, symbol: str, device: int, dynamic_shared: int) -> Function:
    """Load `cubin` into the primary context of `device` and allow its kernel `symbol` `dynamic_shared` bytes.

    The thread's current context is the same afterwards. Raises NotWarmError inside CUDA-graph capture, and DriverError.
    """
    if not cubin:
        raise InvalidInputError(f"The cubin of {symbol} is empty.")
    start = time.perf_counter()
    with primary_context(device), beside_captures():
        try:
            module = api.call("cuModuleLoadData", cubin, about=symbol)
            handle = api.call("cuModuleGetFunction", module, symbol.encode(), about=symbol)
            # These three also make the driver load the code now, not lazily at the first launch.
            registers, local_bytes, shared_static = (
                _attribute(handle, name, symbol) for name in ("NUM_REGS", "LOCAL_SIZE_BYTES", "SHARED_SIZE_BYTES")
            )
            if dynamic_shared > 0:
                _allow_shared(handle, symbol, device, dynamic_shared, shared_static)
        except DriverError as error:
            if "STREAM_CAPTURE" in error.name:
                raise NotWarmError(
                    f"{symbol} would have to be loaded inside CUDA-graph capture. Call this shape once before it."
                ) from error
            raise
    if settings.print_load_time:
        say(f"loaded {symbol} ({len(cubin)} bytes) in {(time.perf_counter() - start) * 1e3:.2f} ms")
    return Function(symbol, handle, device, registers, local_bytes, shared_static, dynamic_shared, module)


def bind_primary_context(device: int) -> None:
    """Make the primary context of `device`, which torch uses too, current on this thread."""
    api.initialise()
    api.call("cuCtxSetCurrent", _primary(device), about=f"device {device}")


@contextlib.contextmanager
def primary_context(device: int) -> Iterator[None]:
    """Run a block in the primary context of `device`; a thread that had another one gets it back."""
    api.initialise()
    context = _primary(device)
    before = api.call("cuCtxGetCurrent")
    if int(before) == int(context):
        yield
        return
    api.call("cuCtxSetCurrent", context, about=f"device {device}")
    try:
        yield
    finally:
        if int(before):
            api.call("cuCtxSetCurrent", before)


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """Allow calls in this thread that another thread's CUDA-graph capture, in torch's global mode, would forbid."""
    relaxed = api.cuda().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = api.call("cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        api.call("cuThreadExchangeStreamCaptureMode", before)


@functools.lru_cache(maxsize=64)
def _primary(device: int) -> Any:
    # Retained once and kept: it is the context of the whole process, and releasing it would unload our modules.
    handle = api.call("cuDeviceGet", device, about=f"device {device}")
    return api.call("cuDevicePrimaryCtxRetain", handle, about=f"device {device}")


def _attribute(handle: Any, name: str, symbol: str) -> int:
    attribute = getattr(api.cuda().CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
    return int(api.call("cuFuncGetAttribute", attribute, handle, about=symbol))


def _allow_shared(handle: Any, symbol: str, device: int, dynamic_shared: int, shared_static: int) -> None:
    driver = api.cuda()
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    try:
        api.call("cuFuncSetAttribute", handle, attribute, dynamic_shared, about=symbol)
    except DriverError as error:
        if error.name != "CUDA_ERROR_INVALID_VALUE":
            raise
        limit = api.call(
            "cuDeviceGetAttribute",
            driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            api.call("cuDeviceGet", device),
        )
        raise DriverError(
            f"{symbol} asks for {dynamic_shared} bytes of dynamic shared memory beside {shared_static} static ones, "
            f"but device {device} allows {limit} in all.",
            status=error.status,
            name=error.name,
        ) from error
