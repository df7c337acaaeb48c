"""Decorators that tests of other DeepGEMMs use."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec

from deep_gemm.settings import variables

P = ParamSpec("P")


def test_filter(condition: Callable[[], bool]) -> Callable[[Callable[P, object]], Callable[P, None]]:
    """A decorator: the function is called only if ``condition()`` is true when it would be. Otherwise a line is
    printed. It returns None.

    >>> @deep_gemm.testing.test_filter(lambda: False)
    ... def check():
    ...     raise AssertionError
    >>> check()
    check is left out: its condition is false.
    """

    def decorate(function: Callable[P, object]) -> Callable[P, None]:
        @functools.wraps(function)
        def filtered(*args: P.args, **kwargs: P.kwargs) -> None:
            if condition():
                function(*args, **kwargs)
            else:
                print(f"{function.__name__} is left out: its condition is false.")

        return filtered

    return decorate


test_filter.__test__ = False  # type: ignore[attr-defined]  # pytest would take it for a test


def ignore_env(name: str, condition: Callable[[], bool]) -> Callable[[Callable[P, object]], Callable[P, None]]:
    """A decorator: the function is called without the environment variable ``name`` if ``condition()`` is true when it
    is called. It returns None.

    >>> @deep_gemm.testing.ignore_env("DG_NVTX", lambda: True)
    ... def check():
    ...     print(deep_gemm.settings.nvtx)
    >>> check()
    False
    """

    def decorate(function: Callable[P, object]) -> Callable[P, None]:
        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> None:
            with variables(**{name: None}) if condition() else contextlib.nullcontext():
                function(*args, **kwargs)

        return called

    return decorate
