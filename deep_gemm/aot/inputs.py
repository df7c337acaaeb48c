"""Checks of numbers, sizes and files from outside. All raise InvalidInputError, in one line however large the value
is."""

from __future__ import annotations

import contextlib
import json
import re
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from deep_gemm.errors import InvalidInputError
from deep_gemm.jit.cache import files

MAX_SIZE = 2**31 - 1
"""Kernels count rows and columns in 32-bit signed integers."""

MAX_SIZES = 1 << 16
"""How many sizes of M a list may name: more would rank for minutes, and neighbouring M share a kernel."""

MAX_FILE_BYTES = 256 << 20

_RANGE = re.compile(r"([0-9]{1,20})(?:-([0-9]{1,20}))?(?::([0-9]{1,20}))?")

_short = reprlib.Repr()
_short.maxlevel = 2
_short.maxdict = _short.maxlist = _short.maxtuple = 4
_short.maxstring = _short.maxother = 60
_short.maxlong = 40


def shown(value: Any) -> str:
    """The value for a message: one line, cut in the middle if it is long."""
    try:
        text = _short.repr(value)
    except ValueError:  # Python refuses to print integers of more than 4300 digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 160 else f"{text[:100]} ... {text[-40:]}"


def printable(text: str) -> str:
    """The text with escapes for what would move a terminal's cursor, change its colours or end the line."""
    return text if text.isprintable() else "".join(x if x.isprintable() else repr(x)[1:-1] for x in text)


def whole(value: Any, where: str, least: int = 1, most: int = MAX_SIZE) -> int:
    """A whole number from `least` to `most`: an int, not a bool, a float or text."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidInputError(f"{where} must be a whole number from {least} to {most}, but it is {shown(value)}.")
    return value


def number(text: str, where: str) -> int:
    """The same from text, in decimal digits."""
    digits = text.strip()
    # No limit has twenty digits, and for thousands of them Python takes quadratic time.
    if not re.fullmatch(r"[0-9]{1,20}", digits):
        raise InvalidInputError(f"{where} must be a whole number from 1 to {MAX_SIZE}, but it is {shown(text)}.")
    return whole(int(digits), where)


def sizes(value: Any, where: str) -> list[int]:
    """Sizes from a number, a list of numbers, or text as `parse_sizes` takes it."""
    if isinstance(value, str):
        return parse_sizes(value, where)
    values = list(value) if isinstance(value, list | tuple) else [value]
    if not values or len(values) > MAX_SIZES:
        raise InvalidInputError(f"{where} must be 1 to {MAX_SIZES} sizes, but it is {shown(value)}.")
    return list(dict.fromkeys(whole(size, where) for size in values))


def parse_sizes(text: str, where: str = "Sizes") -> list[int]:
    """Sizes such as "1,2,64-512:64": numbers, and ranges with an optional step, both ends included."""
    found: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last, step = (int(bound or 0) for bound in match.groups()) if match else (0, 0, 0)
        last = last if match and match.group(2) else first
        step = step if match and match.group(3) else 1
        if not 1 <= first <= last <= MAX_SIZE or step < 1:
            raise InvalidInputError(
                f"{where} must look like 1,2,64-512:64 with numbers from 1 to {MAX_SIZE}, but it is {shown(text)}."
            )
        if len(found) + (last - first) // step >= MAX_SIZES:
            raise InvalidInputError(
                f"{where} must name at most {MAX_SIZES} sizes, but it is {shown(text)}: give a step, such as 1-8192:8."
            )
        found += range(first, last + 1, step)
    return list(dict.fromkeys(found))


def parse_dimensions(text: str) -> list[int]:
    """ "64x7168x2048" is [64, 7168, 2048], and "7168x2048" is [7168, 2048]; a comma does for the x."""
    parts = text.lower().replace(",", "x").split("x")
    if len(parts) not in (2, 3) or not all(re.fullmatch(r"[0-9]{1,20}", part.strip()) for part in parts):
        raise InvalidInputError(f"A shape must look like MxNxK or NxK, such as 64x7168x2048, but it is {shown(text)}.")
    names = ("N", "K") if len(parts) == 2 else ("M", "N", "K")
    return [number(part, f"{name} of the shape {shown(text)}") for name, part in zip(names, parts, strict=True)]


def is_shape(text: str) -> bool:
    """Whether text is meant as a shape rather than as the name of a file."""
    return re.fullmatch(r"\s*[0-9]+\s*([xX,]\s*[0-9]+\s*)+", text) is not None


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """A regular file, to read. Others are refused: to open a FIFO would wait for who writes it. Raises OSError and
    ValueError."""
    with files.open_file(path) as held, open(held.fileno(), "rb", closefd=False) as file:
        yield file


def read_text(path: Path) -> str:
    """The text of a regular file of at most `MAX_FILE_BYTES`."""
    try:
        with open_file(path) as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise InvalidInputError(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB: it is not a description.")
        return data.decode()
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise InvalidInputError(f"{path} cannot be read: {error}.") from error


def parse_json(text: str | bytes, where: object) -> Any:
    """The value of JSON text. NaN and Infinity, which JSON does not have, are refused."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{where} is not JSON: {_first_line(error)}.") from error


def read_file(path: Path) -> Any:
    """The value of a JSON file, or of a YAML file, which is recognised by its name."""
    text = read_text(path)
    if path.suffix.lower() not in (".yaml", ".yml"):
        return parse_json(text, path)
    try:
        import yaml
    except ImportError as error:
        raise InvalidInputError(f"{path} is YAML, and pyyaml is not installed: pip install pyyaml.") from error
    try:
        return yaml.safe_load(text)
    except Exception as error:  # its constructors of dates, numbers and flags do not always raise a YAMLError
        raise InvalidInputError(f"{path} is not YAML: {_first_line(error)}.") from error


def read_object(path: Path) -> Mapping[str, Any]:
    """The object that a JSON file holds."""
    found = read_file(path)
    if not isinstance(found, Mapping):
        raise InvalidInputError(f"{path} must hold an object, but it holds {type(found).__name__}.")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number in JSON")


def _first_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:200].rstrip(".") or type(error).__name__
