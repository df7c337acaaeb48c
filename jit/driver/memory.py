"""Device memory straight from the driver, for what no pool of torch's allocator may hold."""

from __future__ import annotations

from deep_gemm.jit.driver import api
from deep_gemm.jit.driver.module import beside_captures, primary_context

_NON_BLOCKING = 1


def allocate_zeros(device: int, size: int) -> int:
    """The address of `size` bytes of zeros on `device`, for the life of the process. Waits for nothing but itself, and
    may be called while a CUDA graph is captured. Raises DriverError."""
    with primary_context(device), beside_captures():
        stream = api.call("cuStreamCreate", _NON_BLOCKING)
        try:
            address = int(api.call("cuMemAlloc", size, about=f"{size} bytes on device {device}"))
            api.call("cuMemsetD8Async", address, 0, size, stream)
            api.call("cuStreamSynchronize", stream)
        finally:
            api.call("cuStreamDestroy", stream)
    return address
