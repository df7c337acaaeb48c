"""One place that calls the driver and turns a CUresult into an exception with a name, a text and a hint.

Through ctypes: this package calls some fifteen functions, whose bindings in cuda-python take 50 ms and more to import,
within the first call of a process. Numbers of enumerations are written out where they are used.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from deep_gemm.errors import DriverError
from deep_gemm.jit.driver import version as _version
from deep_gemm.jit.driver.version import driver_release, driver_version
from deep_gemm.jit.forking import ForkLock

__all__ = ["call", "check", "driver_release", "driver_version", "function", "initialise"]

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


def function(name: str) -> Any:
    """The function `name` of libcuda; it returns a CUresult as an int. Its arguments are objects of ctypes, bytes, None
    for a null pointer, and an int only where C has an int. Raises DriverError, saying what is missing."""
    if driver_version() is None:
        raise DriverError(
            "This needs an NVIDIA GPU, and no NVIDIA driver was found (libcuda.so.1 cannot be loaded). In a container, "
            "start it with GPU access (--gpus all).",
            name="CUDA_ERROR_NO_DEVICE",
        )
    found = getattr(_version.driver_library(), name, None)
    if found is None:
        raise DriverError(f"The installed NVIDIA driver has no {name}: it is too old. Update it.")
    return found


def call(name: str, *arguments: Any, about: str = "") -> None:
    """Call a function of the driver by name, with arguments as `function` takes them; results come through pointers
    (`ctypes.byref`). Raises DriverError; `about` names the object in its message."""
    check(function(name)(*arguments), name, about)


def check(status: int, function: str, about: str = "") -> None:
    """Raise DriverError unless `status` is CUDA_SUCCESS."""
    if status == 0:
        return
    name, text = _described("cuGetErrorName", status), _described("cuGetErrorString", status)
    hint = _HINTS.get(name, "")
    subject = f" for {about}" if about else ""
    told = f"{name or f'CUresult {status}'} ({text or 'unknown to the installed driver'})"
    raise DriverError(f"{function}{subject} failed with {told}. {hint}".rstrip(), status=status, name=name)


def _described(by: str, status: int) -> str:
    """What the function `by` of the driver says of a status, or nothing for one that it does not know."""
    text = ctypes.c_char_p()
    function(by)(status, ctypes.byref(text))
    return (text.value or b"").decode()


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
            status=3,
            name="CUDA_ERROR_NOT_INITIALIZED",
        )
    with _lock.lock:
        call("cuInit", 0)
        _initialised_in = os.getpid()
