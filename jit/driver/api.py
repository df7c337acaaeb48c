"""One place that calls the driver and turns a CUresult into an exception with a name, a text and a hint.

The driver's functions, types and enumerations are those of cuda.bindings. Its import takes some 55 ms, once in a
process, unless torch has imported it.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from deep_gemm.errors import DriverError
from deep_gemm.jit.driver import version as _version
from deep_gemm.jit.driver.version import driver_release, driver_version
from deep_gemm.jit.forking import ForkLock, late

__all__ = ["call", "check", "cuda", "driver_release", "driver_version", "initialise", "library_function", "unknown"]

_CRASHED = (
    "A kernel that ran before has crashed, and the driver reports it late. Run with CUDA_LAUNCH_BLOCKING=1, "
    "DG_JIT_DEBUG=1 or under compute-sanitizer to find it. The process has to be restarted."
)
_CAPTURE = "Call this shape once outside CUDA-graph capture first: modules cannot be loaded inside it."
_WRONG_CUBIN = (
    "The cubin is for another GPU, or was made by a CUDA version that this driver does not support. "
    "`deep-gemm doctor` shows which compiler was chosen and why."
)
_HINTS = {
    "CUDA_ERROR_INVALID_VALUE": "An argument is outside of what this GPU allows.",
    "CUDA_ERROR_OUT_OF_MEMORY": "The GPU's memory is used up, by other processes perhaps.",
    "CUDA_ERROR_NOT_INITIALIZED": "A process forked from one that has used CUDA cannot use it: start workers with the "
    '"spawn" method.',
    "CUDA_ERROR_NO_DEVICE": "No GPU is visible: look at nvidia-smi and at CUDA_VISIBLE_DEVICES.",
    "CUDA_ERROR_INVALID_DEVICE": "There is no GPU of that index: look at CUDA_VISIBLE_DEVICES.",
    "CUDA_ERROR_INVALID_IMAGE": _WRONG_CUBIN,
    "CUDA_ERROR_NO_BINARY_FOR_GPU": _WRONG_CUBIN,
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": _WRONG_CUBIN,
    "CUDA_ERROR_INVALID_SOURCE": _WRONG_CUBIN,
    "CUDA_ERROR_INVALID_CONTEXT": "This thread has no CUDA context, or that of another device.",
    "CUDA_ERROR_NOT_FOUND": "The cubin has no kernel of that name.",
    "CUDA_ERROR_ILLEGAL_ADDRESS": _CRASHED,
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": _CRASHED,
    "CUDA_ERROR_MISALIGNED_ADDRESS": _CRASHED,
    "CUDA_ERROR_LAUNCH_FAILED": _CRASHED,
    "CUDA_ERROR_LAUNCH_TIMEOUT": _CRASHED,
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "The kernel asks for more registers or shared memory than a block may have.",
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": _CAPTURE,
    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": _CAPTURE,
    "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT": _CAPTURE,
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "The kernel module and the driver's libraries differ: reboot or reinstall.",
    "CUDA_ERROR_SYSTEM_NOT_READY": "On machines with NVSwitch the fabric manager has to run.",
}


@functools.lru_cache(maxsize=1)
def cuda() -> Any:
    """The module cuda.bindings.driver. Raises DriverError, saying what is missing, without a driver or the package."""
    if driver_version() is None:
        raise DriverError(
            "This needs an NVIDIA GPU, and no NVIDIA driver was found (libcuda.so.1 cannot be loaded). In a container, "
            "start it with GPU access (--gpus all).",
            name="CUDA_ERROR_NO_DEVICE",
        )
    try:
        driver = late("cuda.bindings.driver")
    except ImportError as error:
        raise DriverError(
            f"The package cuda-python cannot be imported ({error}). Run `pip install 'cuda-python>=12.9,<14'`."
        ) from error
    return driver


def call(function: str, *arguments: Any, about: str = "") -> Any:
    """Call a driver function by name. Returns what it returns after the status: nothing or one value.

    Raises DriverError; `about` names the object in its message.
    """
    try:
        status, *values = getattr(cuda(), function)(*arguments)
    except DriverError:
        raise
    except RuntimeError as error:  # cuda.bindings says so of a function that the driver lacks
        raise DriverError(f"The installed NVIDIA driver has no {function}: it is too old. Update it.") from error
    except UNKNOWN as error:
        raise unknown(error, function, about) from error
    check(status, function, about)
    return values[0] if values else None


UNKNOWN = (KeyError, ValueError)
"""What cuda.bindings raises for a status that it does not know, of a newer driver."""


def unknown(error: Exception, function: str, about: str = "") -> DriverError:
    """The error to raise for one of `UNKNOWN`."""
    subject = f" for {about}" if about else ""
    return DriverError(
        f"{function}{subject} failed with a status that the installed cuda-python does not know: {error}."
    )


def check(status: int, function: str, about: str = "") -> None:
    """Raise DriverError unless `status`, a CUresult or an int, is CUDA_SUCCESS."""
    if status == 0:
        return
    try:
        result = cuda().CUresult(status)
    except UNKNOWN as error:
        raise unknown(error, function, about) from error
    answer, text = cuda().cuGetErrorString(result)
    told = text.decode() if answer == 0 and text else "no description"
    subject = f" for {about}" if about else ""
    message = f"{function}{subject} failed with {result.name} ({told}). {_HINTS.get(result.name, '')}"
    raise DriverError(message.rstrip(), status=int(result), name=result.name)


def library_function(name: str) -> Any:
    """A function of libcuda itself, through ctypes: it returns a CUresult as an int. Raises DriverError."""
    found = getattr(_version.driver_library(), name, None)
    if found is None:
        raise DriverError(f"The installed NVIDIA driver has no {name}: it is too old, or there is none. Update it.")
    return found


_initialised_in: int | None = None
_lock = ForkLock()


def initialise() -> None:
    """cuInit, once. Raises DriverError in a child forked after it: the driver cannot be used there."""
    global _initialised_in
    if _initialised_in == os.getpid():
        return
    if _initialised_in is not None:
        raise DriverError(
            "CUDA was initialised before this process was forked, and cannot be used in the child. Start workers with "
            'the "spawn" method (multiprocessing.get_context("spawn")).',
            status=int(cuda().CUresult.CUDA_ERROR_NOT_INITIALIZED),
            name="CUDA_ERROR_NOT_INITIALIZED",
        )
    with _lock.lock:
        call("cuInit", 0)
        _initialised_in = os.getpid()
