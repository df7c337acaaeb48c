"""Exchanging kernels between the ranks of a job, through a `torch.distributed.Store` and nothing else: each rank draws
places of a common list, builds these kernels, and publishes the bytes, for which the others wait."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from deep_gemm.jit.binary import Binary, decode

CHUNK = 4 << 20
"""Bytes of one value. A TCPStore drops the connection of a client that sends more than 8 MiB at once."""

_MAX_CHUNKS = 256
_SHORTEST_WAIT, _LONGEST_WAIT = 0.05, 10.0


class StoreError(Exception):
    """The store failed: the process that holds it has ended, or cannot be reached."""


@contextmanager
def _store_errors() -> Iterator[None]:
    # In all versions of torch, the exceptions of stores derive from RuntimeError.
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise StoreError(f"{type(error).__name__}: {error}") from error


@contextmanager
def _parsing() -> Iterator[None]:
    """Around parsing what another rank wrote: a value of another form counts as a failure of the store."""
    try:
        yield
    except ValueError as error:
        raise StoreError(f"it holds a value that no rank of this version writes ({error})") from error


class BuildExchange:
    """The kernels of one call on every rank, by their place in `keys`, which identify them.

    Each rank counts its calls in the store: the keys of one call are never those of another. Not safe from several
    threads. Every method raises StoreError.
    """

    def __init__(self, store: Any, rank: int, size: int, keys: Sequence[str]) -> None:
        self._size = size
        self._length = len(keys)
        digest = hashlib.sha256("\n".join(keys).encode()).hexdigest()
        with _store_errors():
            call = store.add(f"deep_gemm/ahead/calls/{rank}", 1)
            self._call = dist.PrefixStore(f"deep_gemm/ahead/{call}", store)
            self._set: Any = dist.PrefixStore(digest, self._call)
            came = self._call.compare_set("first", "", f"{rank} {digest}")
        self._digest = digest
        with _parsing():
            first, _, theirs = came.decode().partition(" ")
            self.first_rank = int(first)
        self.agreed = theirs == digest
        """Whether the rank that came first lists the same kernels."""

    def draw(self) -> int | None:
        """The place of a kernel that this rank is to build, or None if all are taken."""
        with _store_errors():
            place: int = self._set.add("next", 1) - 1
            if place == 0:
                number = self._call.add("sets", 1)
                self._call.set(f"sets/{number}", f"{self._digest} {self._length}")
        return place if place < self._length else None

    def publish(self, place: int, binary: Binary | None) -> None:
        """Send the kernel to the others; None tells them not to wait."""
        data = binary.encode() if binary is not None else b""
        parts = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
        with _store_errors():
            for number, part in enumerate(parts):
                self._set.set(f"{place}/{number}", part)
            # Written last: a rank that sees it finds all parts.
            self._set.set(str(place), str(len(parts)))

    def wait(self, place: int, deadline: float) -> bool:
        """Wait until the kernel is published, or until `deadline` by `time.monotonic`. Returns whether it is."""
        with _store_errors():
            # Some stores take a wait of 0 ms as one without end.
            while (now := time.monotonic()) < deadline - _SHORTEST_WAIT:
                # In short steps: a wait blocks the store for this process, and interrupts as well.
                until = min(deadline, now + _LONGEST_WAIT)
                try:
                    self._set.wait([str(place)], timedelta(seconds=until - now))
                    return True
                except RuntimeError:
                    # The clock tells a timeout from a failure of the store: neither the class nor the text of the error
                    # is the same for all stores.
                    if until - time.monotonic() > _SHORTEST_WAIT:
                        raise
            return bool(self._set.check([str(place)]))

    def fetch(self, place: int) -> Binary | None:
        """The kernel, or None if that rank could not build it. Raises ValueError, saying why, if it is damaged."""
        with _store_errors():
            count = _number(self._set.get(str(place)))
            names = [f"{place}/{number}" for number in range(count)]
            # get() would wait for a key that does not exist.
            if not self._set.check(names):
                raise ValueError("parts of it are missing")
            data = b"".join(self._set.get(name) for name in names)
        return decode(data) if count else None

    def close(self) -> None:
        """This rank needs nothing more. The last rank that says so deletes all keys; if one has died, they stay until
        the store ends. A FileStore keeps everything."""
        with _store_errors():
            if self._call.add("done", 1) < self._size:
                return
            for number in range(1, self._call.add("sets", 0) + 1):
                value = self._call.get(f"sets/{number}")
                with _parsing():
                    digest, length = value.decode().split()
                    places = int(length)
                self._clear(dist.PrefixStore(digest, self._call), places)
                self._call.delete_key(f"sets/{number}")
            for key in ("sets", "first", "done"):
                self._call.delete_key(key)

    @staticmethod
    def _clear(kept: Any, length: int) -> None:
        for place in range(length):
            kept.delete_key(str(place))
            number = 0
            while number < _MAX_CHUNKS and kept.delete_key(f"{place}/{number}"):
                number += 1
        kept.delete_key("next")


def _number(text: bytes) -> int:
    count = int(text)
    if not 0 <= count <= _MAX_CHUNKS:
        raise ValueError(f"it claims to have {count} parts")
    return count
