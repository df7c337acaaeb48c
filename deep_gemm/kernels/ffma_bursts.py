"""Bursts of FFMA: how often ptxas lets the hardware change warps between them.

Promotion is runs of FFMA by one scale factor. ptxas gives each instruction a hint, whether the scheduler may go on with
another warp, and mostly gives it to every second FFMA of a run. One that follows a change of warps reads three
registers, others two, for the factor stays in the operand cache; and while products run, the tensor cores take most
of what registers can deliver. A change after every eighth made blocks of K 2 to 7% shorter (H200: 128x128 tiles 603
to 561 cycles, 256x128 1131 to 1088, 128x96 542 to 519); no change at all keeps other consumers waiting. DeepGEMM's
first releases edited the same hints, for more changes of warps. No option of ptxas asks for either.

Only hints are edited: the yield bit, and the reuse bit of the second operand, within a run that nothing jumps into and
that leaves the factor as it is. They lie where they do in all 128-bit instructions since Volta; see Jia et al.,
Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking, 2018, section 2.1.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ..jit.binary import PostPass
from ..log import counted, warn_once

BURST = 8
"""Of 2 to 16, 6 to 8 were best for two and three consumers; lone consumers would like 16 (64x64 tiles by 2%)."""

_FFMA = 0x223  # of registers only
_ALWAYS = 7  # the predicate of an instruction that has none
_NO_YIELD = 1 << 45
_REUSE = 15 << 58
_REUSE_SECOND = 1 << 59
_BRANCHES = {0x947, 0x348, 0x948}  # BRA, and WARPSYNC in two forms, of which COLLECTIVE names a target
_SYNC_POINT = 0x945  # BSSY
_UNKNOWN_TARGETS = {0x943, 0x944, 0x949, 0x94A, 0x94B, 0x94C, 0x94F, 0x950}  # calls, indirect branches, returns


class _Unreadable(ValueError):
    """This is no cubin that this module understands."""


def in_bursts(cubin: bytes, name: str) -> bytes:
    """``cubin`` with its runs of FFMA in bursts of up to `BURST`. A cubin whose layout is not known stays as it is, and
    a warning that names the kernel, ``name``, says so: it computes the same, slower."""
    try:
        edited = bytearray(cubin)
        for begin, words in code_sections(cubin):
            for first, last in runs(words):
                _edit(edited, begin, words, first, last)
        return bytes(edited)
    except (ValueError, OverflowError, struct.error) as error:
        warn_once(f"bursts:{error}", f"{name} is a few percent slower than it could be: in its cubin, {error}.")
        return cubin


def described(cubin: bytes) -> str:
    """How many FFMAs of ``cubin`` are in how many runs, or why it was left as it is."""
    try:
        found = [run for _, words in code_sections(cubin) for run in runs(words)]
    except (ValueError, OverflowError, struct.error) as error:
        return f"not edited: {error}"
    return f"{counted(sum(last - first for first, last in found), 'FFMA')} in {counted(len(found), 'run')}"


POST_PASS = PostPass(f"ffma-bursts-{BURST}", in_bursts, described)
"""Another way to edit needs another identity: it is part of a kernel's key."""


def _edit(code: bytearray, begin: int, words: list[tuple[int, int]], first: int, last: int) -> None:
    for index in range(first, last):
        low, high = words[index]
        if high & _REUSE & ~_REUSE_SECOND:
            continue  # ptxas counts on the next one for another operand too
        held = index + 1 < last and (index - first) % BURST != BURST - 1
        high = high & ~_REUSE_SECOND | _NO_YIELD
        high = high | _REUSE_SECOND if held else high & ~_NO_YIELD
        struct.pack_into("<QQ", code, begin + 16 * index, low, high)


def runs(words: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs of two FFMAs or more, as (first, past the last): they follow each other, have the same second operand, which
    none but the last writes, and are only reached one from the other. ``words`` are the two of each instruction of a
    kernel. ValueError where it cannot be known what is jumped to."""
    followers = {index for index in range(1, len(words)) if _continues(words[index - 1], words[index])}
    if followers:  # else there may be calls and indirect jumps
        followers -= _targets(words)
    found: list[tuple[int, int]] = []
    for index in sorted(followers):
        if found and found[-1][1] == index:
            found[-1] = (found[-1][0], index + 1)
        else:
            found.append((index - 1, index + 1))
    return found


def _continues(before: tuple[int, int], word: tuple[int, int]) -> bool:
    factor = second_operand(word[0])
    written = before[0] >> 16 & 0xFF
    return _is_ffma(before) and _is_ffma(word) and second_operand(before[0]) == factor != written


def _is_ffma(word: tuple[int, int]) -> bool:
    return word[0] & 0xFFF == _FFMA and word[0] >> 12 & 0xF == _ALWAYS


def second_operand(low: int) -> int:
    """Number of the register."""
    return low >> 32 & 0xFF


def _targets(words: list[tuple[int, int]]) -> set[int]:
    """Indices of instructions that others jump to."""
    found = set()
    for index, (low, _) in enumerate(words):
        opcode = low & 0xFFF
        if opcode in _UNKNOWN_TARGETS:
            raise _Unreadable(f"instruction {index} ({opcode:#x}) may jump anywhere")
        if opcode in _BRANCHES:
            found.add(index + 1 + _signed((low >> 34 << 8 | low >> 16 & 0xFF), 38) * 4 // 16)
        elif opcode == _SYNC_POINT:
            found.add(index + 1 + _signed(low >> 34, 30) * 4 // 16)
    return found


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def code_sections(cubin: bytes) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Where in the file the code of each kernel begins, and the two words of its instructions. ValueError if this is no
    cubin."""
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise _Unreadable("the first bytes are not those of a 64-bit ELF file")
    table = struct.unpack_from("<Q", cubin, 0x28)[0]
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    names_at = struct.unpack_from("<Q", cubin, table + names * size + 0x18)[0]
    found = False
    for index in range(count):
        section = table + index * size
        name, _, _, _, offset, length = struct.unpack_from("<IIQQQQ", cubin, section)
        if cubin.startswith(b".text.", names_at + name):
            if length % 16 or offset + length > len(cubin):
                raise _Unreadable(f"a section of code has {length} bytes at {offset}")
            found = True
            yield offset, [struct.unpack_from("<QQ", cubin, at) for at in range(offset, offset + length, 16)]
    if not found:
        raise _Unreadable("there is no section of code")
