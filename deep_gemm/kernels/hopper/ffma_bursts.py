"""FFMA bursts: fewer warp switches within the FFMA of promotion.

Promotion consists of runs of FFMA that multiply by one scale factor. Each instruction carries a yield hint, which lets
the warp scheduler switch to another warp. ptxas sets it on most second FFMA of a run. The first FFMA after a switch
reads three registers. The others read two, because the factor stays in the operand cache. While products run, the
tensor cores use most of the register bandwidth, so the additional reads cost time. Switching after every eighth FFMA
made blocks of K 2 to 7% shorter (H200: 128x128 tiles 603 to 561 cycles, 256x128 1131 to 1088, 128x96 542 to 519).
Without any switch the other consumers wait. DeepGEMM's first releases edited the same hints, for more switches. ptxas
has no option for either.

Only hints are edited: the yield bit, and the reuse bit of the second operand. They are edited only within a run that no
instruction jumps into and that does not change the factor. Their positions are those of all 128-bit instructions since
Volta; see Jia et al., Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking, 2018, section 2.1.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ...jit.binary import PostPass
from ...log import counted, warn_once

BURST = 8
"""FFMA between two switches. Of 2 to 16, 6 to 8 were best for two and three consumers. With one consumer 16 would be
better (2% in 64x64 tiles)."""

_FFMA = 0x223  # with register operands only
_ALWAYS = 7  # the predicate field of an instruction without a predicate
_NO_YIELD = 1 << 45
_REUSE = 15 << 58
_REUSE_SECOND = 1 << 59
_BRANCHES = {0x947, 0x348, 0x948}  # BRA, and WARPSYNC in two forms, of which COLLECTIVE names a target
_SYNC_POINT = 0x945  # BSSY
_UNKNOWN_TARGETS = {0x943, 0x944, 0x949, 0x94A, 0x94B, 0x94C, 0x94F, 0x950}  # calls, indirect branches, returns


class _Unreadable(ValueError):
    """This module cannot parse the cubin."""


def in_bursts(cubin: bytes, name: str) -> bytes:
    """``cubin`` with its runs of FFMA in bursts of up to `BURST`. A cubin with an unknown layout stays as it is: it
    computes the same, more slowly, and a warning names the kernel, ``name``."""
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
    """The number of FFMAs in runs and the number of runs, or why ``cubin`` was left as it is."""
    try:
        found = [run for _, words in code_sections(cubin) for run in runs(words)]
    except (ValueError, OverflowError, struct.error) as error:
        return f"not edited: {error}"
    return f"{counted(sum(last - first for first, last in found), 'FFMA')} in {counted(len(found), 'run')}"


POST_PASS = PostPass(f"ffma-bursts-{BURST}", in_bursts, described)
"""The version of the edit, a part of a kernel's key. A different edit needs a different version."""


def _edit(code: bytearray, begin: int, words: list[tuple[int, int]], first: int, last: int) -> None:
    for index in range(first, last):
        low, high = words[index]
        if high & _REUSE & ~_REUSE_SECOND:
            continue  # ptxas also reuses another operand in the next one
        held = index + 1 < last and (index - first) % BURST != BURST - 1
        high = high & ~_REUSE_SECOND | _NO_YIELD
        high = high | _REUSE_SECOND if held else high & ~_NO_YIELD
        struct.pack_into("<QQ", code, begin + 16 * index, low, high)


def runs(words: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs of two FFMAs or more, as (first, past the last). The FFMAs of a run follow each other and have the same
    second operand, which only the last may write; nothing jumps into the run. ``words`` has the two words of each
    instruction of a kernel. Raises ValueError where the targets of jumps cannot be determined."""
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
    """Indices of instructions that are targets of jumps."""
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
    """For each kernel, the offset of its code in the file and the two words of each instruction. Raises ValueError if
    this is no cubin."""
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
