"""Loading a cubin, and what the driver reports about its kernel."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import time
from collections.abc import Iterator

from deep_gemm.errors import DriverError, InvalidInputError, NotWarmError
from deep_gemm.jit.driver import api
from deep_gemm.log import say
from deep_gemm.records import record
from deep_gemm.settings import settings

# Values of the driver's enumerations CUfunction_attribute, CUdevice_attribute and CUstreamCaptureMode.
SHARED_SIZE_BYTES, LOCAL_SIZE_BYTES, NUM_REGS, MAX_DYNAMIC_SHARED_SIZE_BYTES = 1, 3, 4, 8
MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97
CAPTURE_MODE_RELAXED = 2


@record(frozen=True, eq=False)
class Function:
    """A loaded kernel. `handle` is its CUfunction; registers and local memory (bytes) are of a thread, shared memory
    (bytes) of a block. Keeps its module loaded, for the life of the process if a launch record holds it."""

    symbol: str
    handle: ctypes.c_void_p
    device: int
    registers: int
    local_bytes: int
    shared_static: int
    dynamic_shared: int
    module: ctypes.c_void_p

    def max_active_blocks(self, threads: int, shared: int) -> int:
        """How many blocks of `threads` threads and `shared` bytes of dynamic shared memory fit on one SM."""
        with primary_context(self.device):
            count, room = ctypes.c_int(), ctypes.c_size_t(shared)
            name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
            api.call(name, ctypes.byref(count), self.handle, threads, room, about=self.symbol)
            return count.value


def load_function(cubin: bytes, symbol: str, device: int, dynamic_shared: int) -> Function:
    """Load `cubin` into the primary context of `device` and allow its kernel `symbol` `dynamic_shared` bytes.

    The thread's current context is the same afterwards. Raises NotWarmError inside CUDA-graph capture, and DriverError.
    """
    if not cubin:
        raise InvalidInputError(f"The cubin of {symbol} is empty.")
    start = time.perf_counter()
    with primary_context(device), beside_captures():
        try:
            module, handle = ctypes.c_void_p(), ctypes.c_void_p()
            api.call("cuModuleLoadData", ctypes.byref(module), cubin, about=symbol)
            api.call("cuModuleGetFunction", ctypes.byref(handle), module, symbol.encode(), about=symbol)
            # These three also make the driver load the code now, not lazily at the first launch.
            registers, local_bytes, shared_static = (
                _attribute(handle, which, symbol) for which in (NUM_REGS, LOCAL_SIZE_BYTES, SHARED_SIZE_BYTES)
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
    before = ctypes.c_void_p()
    api.call("cuCtxGetCurrent", ctypes.byref(before))
    if before.value == context.value:
        yield
        return
    api.call("cuCtxSetCurrent", context, about=f"device {device}")
    try:
        yield
    finally:
        if before:
            api.call("cuCtxSetCurrent", before)


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """Allow calls in this thread that another thread's CUDA-graph capture, in torch's global mode, would forbid."""
    mode = ctypes.c_int(CAPTURE_MODE_RELAXED)
    api.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))  # writes the mode before it there
    try:
        yield
    finally:
        api.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


@functools.lru_cache(maxsize=64)
def _primary(device: int) -> ctypes.c_void_p:
    # Retained once and kept: it is the context of the whole process, and releasing it would unload our modules.
    context = ctypes.c_void_p()
    api.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), _handle(device), about=f"device {device}")
    return context


def _handle(device: int) -> int:
    handle = ctypes.c_int()
    api.call("cuDeviceGet", ctypes.byref(handle), device, about=f"device {device}")
    return handle.value


def _attribute(function: ctypes.c_void_p, which: int, symbol: str) -> int:
    value = ctypes.c_int()
    api.call("cuFuncGetAttribute", ctypes.byref(value), which, function, about=symbol)
    return value.value


def _allow_shared(function: ctypes.c_void_p, symbol: str, device: int, dynamic_shared: int, shared_static: int) -> None:
    try:
        api.call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED_SIZE_BYTES, dynamic_shared, about=symbol)
    except DriverError as error:
        if error.name != "CUDA_ERROR_INVALID_VALUE":
            raise
        limit = ctypes.c_int()
        api.call("cuDeviceGetAttribute", ctypes.byref(limit), MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, _handle(device))
        raise DriverError(
            f"{symbol} asks for {dynamic_shared} bytes of dynamic shared memory beside {shared_static} static ones, "
            f"but device {device} allows {limit.value} in all.",
            status=error.status,
            name=error.name,
        ) from error
