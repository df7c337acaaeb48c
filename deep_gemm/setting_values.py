"""Values of settings from the text of environment variables, or from what an override gives. Each function raises
ValueError or TypeError for what is none."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable
from pathlib import Path

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def parse_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text not in _TRUE | _FALSE:
        raise ValueError
    return text in _TRUE


def parse_path(value: object) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike):
        raise TypeError
    text = os.fspath(value)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError
    # The meaning of "~" can change. Other paths are cached, which also saves hashing and formatting them again.
    return _home_path(text) if text.startswith("~") else _plain_path(text)


_plain_path = functools.lru_cache(maxsize=64)(Path)


def _home_path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # "~" where there is no home directory
        raise ValueError from error


_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGT])(I?))?B?")


def parse_size(value: object) -> int | None:
    """Bytes. K, M, G and T are powers of 1000, Ki, Mi, Gi and Ti of 1024; a B may follow."""
    if value is None:
        return None
    match = _SIZE.fullmatch(str(value).strip().upper())
    if match is None:
        raise ValueError
    number, prefix, binary = match.groups()
    whole, _, part = number.partition(".")
    size = int(whole + part) * (1024 if binary else 1000) ** (" KMGT".index(prefix) if prefix else 0) // 10 ** len(part)
    if size == 0:
        raise ValueError
    return size


def parse_paths(value: object) -> tuple[Path, ...]:
    if isinstance(value, str):
        return _home_paths(value) if "~" in value else _plain_paths(value)
    return _each_path(value if isinstance(value, list | tuple) else [value])


def _home_paths(text: str) -> tuple[Path, ...]:
    return _each_path(text.split(os.pathsep))


_plain_paths = functools.lru_cache(maxsize=64)(_home_paths)


def _each_path(parts: Iterable[object]) -> tuple[Path, ...]:
    paths = [parse_path(part) for part in parts if part != ""]
    return tuple(path for path in paths if path is not None)


FALLBACKS = ("cublaslt", "triton", "torch")


def parse_fallback(value: object) -> tuple[str, ...]:
    parts = value if isinstance(value, list | tuple) else str(value).split(",")
    ways = tuple(str(part).strip().lower() for part in parts)
    if ways in (("",), ("error",)):
        return ()
    if any(way not in FALLBACKS for way in ways):
        raise ValueError
    return ways


TRACE = ".trace.json"
"""The ending of a chrome trace's name, which is no report."""


def parse_monitor(value: object) -> Path | None:
    path = None if str(value).strip().lower() == "off" else parse_path(value)
    if path is not None and (path.suffix not in (".json", ".prom") or path.name.endswith(TRACE)):
        raise ValueError
    return path


TUNE = ("off", "read", "on")


def parse_tune(value: object) -> str:
    text = str(value).strip().lower()
    if text not in TUNE:
        raise ValueError
    return text


def parse_count(value: object) -> int:
    number = int(str(value))
    if number < 1:
        raise ValueError
    return number
