"""Signals while NVRTC compiles: they do what they would do anywhere else in the process.

In the first compilation of a process, NVRTC up to 13.0 replaces the handlers of SIGINT and SIGTERM while its front end
runs (0.06 s and more). Its handler ends the process with exit status 4, hangs or crashes; the program's own is not run.
Afterwards SIGINT is left with SA_RESTART. 13.1 and later touch no handler.

Blocking the signals in the compiling thread does not help: handlers belong to the process, and other threads run them.
Restoring the handlers from another thread leaves a moment in which NVRTC's are in place. So NVRTC is kept from setting
them: its pointer to C's `signal` is replaced. Numbers are in the message of the commit that added this file.
"""

from __future__ import annotations

import _thread
import ctypes
import mmap
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_WAIT = 0.05  # seconds

# From <dlfcn.h> and <elf.h>: the same on all 64-bit Linux.
_RTLD_DI_LINKMAP = 2
_DT_NULL, _DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_JMPREL = 0, 2, 5, 6, 23
_RELOCATION_SIZE = _SYMBOL_SIZE = 24


class _LinkMap(ctypes.Structure):
    _fields_ = (("base", ctypes.c_size_t), ("name", ctypes.c_char_p), ("dynamic", ctypes.c_size_t))


def keep_handlers(library: ctypes.CDLL) -> None:
    """From now on, calls of `signal` inside `library` do nothing. Raises OSError or ValueError if that is
    impossible."""
    libc = ctypes.CDLL(None, use_errno=True)
    slot = _import_slot(libc, library, b"signal")
    # With lazy binding the table is writable already.
    page = slot & -mmap.PAGESIZE
    if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_WRITE):
        raise OSError(ctypes.get_errno(), "mprotect failed")
    # Called in place of signal(number, handler): it returns the number, which NVRTC takes for the old handler.
    harmless = ctypes.cast(libc.abs, ctypes.c_void_p).value
    ctypes.c_void_p.from_address(slot).value = harmless


def _import_slot(libc: ctypes.CDLL, library: ctypes.CDLL, name: bytes) -> int:
    """The address at which `library` keeps its pointer to the function `name` of another library."""
    found = ctypes.POINTER(_LinkMap)()
    if libc.dlinfo(ctypes.c_void_p(library._handle), _RTLD_DI_LINKMAP, ctypes.byref(found)):
        raise ValueError("dlinfo does not know the library")
    loaded = found.contents
    tables = {}
    at = loaded.dynamic
    while (tag := ctypes.c_size_t.from_address(at).value) != _DT_NULL:
        tables[tag] = ctypes.c_size_t.from_address(at + 8).value
        at += 16
    if not tables.keys() >= {_DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_JMPREL}:
        raise ValueError("the library has no table of imported functions")
    first = tables[_DT_JMPREL]
    for relocation in range(first, first + tables[_DT_PLTRELSZ], _RELOCATION_SIZE):
        symbol = tables[_DT_SYMTAB] + _SYMBOL_SIZE * ctypes.c_uint32.from_address(relocation + 12).value
        if ctypes.string_at(tables[_DT_STRTAB] + ctypes.c_uint32.from_address(symbol).value) == name:
            return loaded.base + ctypes.c_size_t.from_address(relocation).value
    raise ValueError(f"the library imports no function {name.decode()}")


class LimitReachedError(TimeoutError):
    """The work took longer than its limit."""


def interruptible(work: Callable[[], T], cancel: Callable[[], None], limit: float) -> T:
    """Run `work()`, which spends seconds in C. Another thread runs it: Python runs signal handlers in the main thread
    only, and only between Python instructions; and C code cannot be stopped from outside.

    If a handler raises, such as KeyboardInterrupt, the exception comes at once. After `limit` seconds
    LimitReachedError is raised. In both cases `cancel` asks the work to end.
    """
    done, results, errors = threading.Lock(), list[T](), list[BaseException]()
    done.acquire()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        finally:
            done.release()

    end = time.monotonic() + limit
    try:
        # Not `threading.Thread` or a `Future`: these are waited for in Python code with locks, and where an exception
        # left one taken, the thread hung.
        try:
            _thread.start_new_thread(run, ())
        except RuntimeError:  # no thread can be started: a limit is reached, or the interpreter is shutting down
            return work()
        # In short waits: a signal that arrives just before a wait begins does not end it.
        while not done.acquire(timeout=_WAIT):
            if time.monotonic() >= end:
                raise LimitReachedError
    finally:
        cancel()
    if errors:
        raise errors[0]
    return results[0]
