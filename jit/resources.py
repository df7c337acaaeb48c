"""What a compiled kernel uses, read from what `ptxas -v` says."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from deep_gemm.records import record

# NVRTC 12.9 prefixes continuation lines with "ptxas         .", NVCC does not, so nothing here anchors at line start.
# Compiled when a log is read: most processes read none.
_ENTRY = r"Compiling entry function '([^']+)'"
_FRAME = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
_REGISTERS = r"Used (\d+) registers"
_BARRIERS = r"used (\d+) barriers"
_SHARED = r"(\d+) bytes smem"
_STACK = r"(\d+) bytes cumulative stack size"
_TIME = r"Compile time = ([\d.]+) ms"
_WARNING = r"(?i)\bwarning\b|Potential Performance Loss|serializ"


@record(frozen=True)
class Resources:
    """Registers a thread and barriers a block; the rest in bytes: static shared memory a block, stack (local memory)
    and spills a thread. `warnings` are the compiler's lines about lost performance."""

    registers: int
    shared_static: int
    stack: int
    spill_stores: int
    spill_loads: int
    barriers: int
    warnings: tuple[str, ...] = ()

    def problems(self) -> list[str]:
        """Why `DG_JIT_PTXAS_CHECK` would refuse this kernel; empty if it would not."""
        found = []
        if self.spill_stores or self.spill_loads:
            found.append(f"it spills registers ({self.spill_stores} bytes stored, {self.spill_loads} bytes loaded)")
        if self.stack:
            found.append(f"it uses {self.stack} bytes of local memory a thread")
        serialised = [line for line in self.warnings if "serializ" in line.lower() or "wgmma" in line.lower()]
        if serialised:
            found.append(f"its wgmma instructions were serialised ({serialised[0]})")
        return found

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "warnings": list(self.warnings)}

    @classmethod
    def from_json(cls, data: object) -> Resources:
        """Raises ValueError for anything that `to_json` did not write."""
        if not isinstance(data, dict):
            raise ValueError(f"resources must be an object, but it is {shown(data)}")
        numbers: list[Any] = [data.get(name) for name in _NUMBERS]
        for name, number in zip(_NUMBERS, numbers, strict=True):
            if type(number) is not int or not 0 <= number <= _MOST:
                raise ValueError(f"{name} must be a whole number from 0 to {_MOST}, but it is {shown(number)}")
        lines = data.get("warnings")
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise ValueError(f"warnings must be a list of text, but it is {shown(lines)}")
        return cls(*numbers, warnings=tuple(lines))  # type: ignore[misc]


_NUMBERS = ("registers", "shared_static", "stack", "spill_stores", "spill_loads", "barriers")
_MOST = (1 << 31) - 1
# The longest duration that is accepted, a century. Durations are only shown and added up.
_LONGEST = 100 * 365 * 86400.0


def seconds_from_json(data: object) -> dict[str, float]:
    """The durations of a kernel's steps, as they were stored. Raises ValueError for anything else."""
    if not isinstance(data, dict):
        raise ValueError(f"seconds must be an object, but it is {shown(data)}")
    for name, value in data.items():
        # No OverflowError: Python compares an int of any size with a float.
        if type(value) not in (int, float) or not 0 <= value <= _LONGEST:
            raise ValueError(f"seconds[{shown(name)}] must be a number from 0 on, but it is {shown(value)}")
    return {str(name): float(value) for name, value in data.items()}


def shown(value: object) -> str:
    """A value from outside for a message: at most 80 characters, whatever it is."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, or deep nesting
        text = f"too large a {type(value).__name__} to show"
    return text if len(text) <= 80 else text[:77] + "..."


def parse_ptxas(log: str, name: str) -> Resources | None:
    """Resources of the entry function `name`, or None if `log` does not mention it.

    Stack and spills are the worst over the entry and the functions that it calls: ptxas lists them separately.
    """
    registers = barriers = shared = stack = stores = loads = 0
    current = ""
    found = False
    warnings: list[str] = []
    for line in log.splitlines():
        if re.search(_WARNING, line):
            warnings.append(line.strip())
        if match := re.search(_ENTRY, line):
            current = match.group(1)
        elif match := re.search(_FRAME, line):
            frame = [int(text) for text in match.groups()]
            stack, stores, loads = max(stack, frame[0]), max(stores, frame[1]), max(loads, frame[2])
        elif (match := re.search(_REGISTERS, line)) and current == name:
            found = True
            registers = int(match.group(1))
            barriers = _number(_BARRIERS, line)
            shared = _number(_SHARED, line)
            stack = max(stack, _number(_STACK, line))
    if not found:
        return None
    return Resources(registers, shared, stack, stores, loads, barriers, tuple(dict.fromkeys(warnings)))


def ptxas_seconds(log: str) -> float | None:
    """How long ptxas worked, if `log` says so."""
    times = re.findall(_TIME, log)
    return sum(float(text) for text in times) / 1000 if times else None


def _number(pattern: str, line: str) -> int:
    match = re.search(pattern, line)
    return int(match.group(1)) if match else 0
