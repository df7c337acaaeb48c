"""Kernels on their way between the ranks of a job, through a `torch.distributed.Store` and nothing else.

Ranks that list the same kernels share a queue: each draws a place in the list, builds what stands there, and publishes
the bytes, which the others wait for. Nobody waits for a rank that has drawn nothing.
"""

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
def _told() -> Iterator[None]:
    # What stores raise derives from RuntimeError in all versions of torch.
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise StoreError(f"{type(error).__name__}: {error}") from error


class Exchange:
    """The kernels of one call on every rank, by their place in `keys`, which identify them.

    Each rank counts its calls in the store: the keys of one call are never those of another. Not safe from several
    threads. Every method raises StoreError.
    """

    def __init__(self, store: Any, rank: int, size: int, keys: Sequence[str]) -> None:
        self._size = size
        self._length = len(keys)
        digest = hashlib.sha256("\n".join(keys).encode()).hexdigest()
        with _told():
            call = store.add(f"deep_gemm/ahead/calls/{rank}", 1)
            self._call = dist.PrefixStore(f"deep_gemm/ahead/{call}", store)
            self._set: Any = dist.PrefixStore(digest, self._call)
            first, _, theirs = self._call.compare_set("first", "", f"{rank} {digest}").decode().partition(" ")
        self._digest = digest
        self.first_rank = int(first)
        self.agreed = theirs == digest
        """Whether the rank that came first lists the same kernels."""

    def draw(self) -> int | None:
        """The place of a kernel that is ours to build, or None if all are taken."""
        with _told():
            place: int = self._set.add("next", 1) - 1
            if place == 0:
                number = self._call.add("sets", 1)
                self._call.set(f"sets/{number}", f"{self._digest} {self._length}")
        return place if place < self._length else None

    def publish(self, place: int, binary: Binary | None) -> None:
        """Give the kernel to the others; None tells them not to wait."""
        data = binary.encode() if binary is not None else b""
        parts = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
        with _told():
            for number, part in enumerate(parts):
                self._set.set(f"{place}/{number}", part)
            # Last: whoever sees it finds all parts.
            self._set.set(str(place), str(len(parts)))

    def come(self, place: int, deadline: float) -> bool:
        """Wait until the kernel was published, or until `deadline` by `time.monotonic`. Whether it was."""
        with _told():
            # A wait of no milliseconds means one without end to some stores.
            while (now := time.monotonic()) < deadline - _SHORTEST_WAIT:
                # Nothing else in this process gets at the store meanwhile, not even an interrupt, so not all at once.
                until = min(deadline, now + _LONGEST_WAIT)
                try:
                    self._set.wait([str(place)], timedelta(seconds=until - now))
                    return True
                except RuntimeError:
                    # The end of the time and the end of the store are told apart by the clock: neither class nor words
                    # of the error are the same for all stores.
                    if until - time.monotonic() > _SHORTEST_WAIT:
                        raise
            return bool(self._set.check([str(place)]))

    def fetch(self, place: int) -> Binary | None:
        """What was published, or None if that rank could not build it. Raises ValueError, saying why, if it is not
        whole."""
        with _told():
            count = _number(self._set.get(str(place)))
            names = [f"{place}/{number}" for number in range(count)]
            # To get a key that is not there would wait for it.
            if not self._set.check(names):
                raise ValueError("parts of it are missing")
            data = b"".join(self._set.get(name) for name in names)
        return decode(data) if count else None

    def close(self) -> None:
        """This rank needs nothing more. The last to say so deletes what all have left; if one never does, because it
        died, it stays until the store ends. A FileStore keeps everything."""
        with _told():
            if self._call.add("done", 1) < self._size:
                return
            for number in range(1, self._call.add("sets", 0) + 1):
                digest, length = self._call.get(f"sets/{number}").decode().split()
                self._clear(dist.PrefixStore(digest, self._call), int(length))
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
        raise ValueError(f"it is said to have {count} parts")
    return count
