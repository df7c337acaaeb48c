"""Functions that are called after a change: of settings, options, weight promises, or monitors."""

from __future__ import annotations

from collections.abc import Callable


class Listeners:
    """Calling it calls each listener, in the order in which they were added, with the same arguments. None is ever
    removed. No lock is taken, so it may be called from a weakref callback."""

    def __init__(self) -> None:
        self.all: tuple[Callable[..., object], ...] = ()

    def add(self, listener: Callable[..., object]) -> None:
        self.all += (listener,)

    def __call__(self, *arguments: object) -> None:
        for listener in self.all:
            listener(*arguments)
