"""Disassemblies of many kernels at a time: nvdisasm takes 0.4 s to start, and a twentieth of that for a kernel."""

import re
import subprocess
import tempfile
from pathlib import Path

from deep_gemm.jit import sass
from deep_gemm.jit.binary import Binary
from deep_gemm.jit.disassembler import find_disassembler
from deep_gemm.kernels.hopper.ffma_bursts import code_sections

_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/")
_JUMP = re.compile(r"\b(?:BRA|BSSY|CALL|WARPSYNC\.COLLECTIVE)\b.*?(0x[0-9a-f]+)\s*;")


class Listings:
    """Texts as `sass` makes them, except that only what is jumped to has a label, and functions have no names."""

    def __init__(self) -> None:
        self._texts: dict[bytes, str] = {}
        self._waiting: list[Binary] = []

    def expect(self, binary: Binary) -> None:
        """This one may be asked for: it is disassembled with the next one that is for the same target."""
        self._waiting.append(binary)

    def of(self, binary: Binary) -> str:
        if binary.cubin not in self._texts:
            same = [each.cubin for each in self._waiting if each.arch == binary.arch]
            self._waiting = [each for each in self._waiting if each.arch != binary.arch]
            batch = list(dict.fromkeys([binary.cubin, *same]))
            self._texts.update(zip(batch, _disassemble(batch, binary.arch), strict=True))
        return self._texts[binary.cubin]


def _disassemble(cubins: list[bytes], arch: str) -> list[str]:
    tool, _ = find_disassembler() or ("", [])
    codes = []
    for cubin in cubins:
        sections = [cubin[at : at + 16 * len(words)] for at, words in code_sections(cubin)]
        if len(sections) != 1 or not tool.endswith("nvdisasm"):
            return [sass(one) for one in cubins]
        codes += sections
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "code")
        path.write_bytes(b"".join(codes))
        target = arch.upper().replace("_", "").rstrip("A")
        done = subprocess.run([tool, "--binary", target, path], capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if _INSTRUCTION.match(line)]
    assert len(lines) * 16 == sum(map(len, codes)), "an instruction has 16 bytes"
    texts, first = [], 0
    for code in codes:
        count = len(code) // 16
        texts.append(_relocated(lines[first : first + count], first * 16))
        first += count
    return texts


def _relocated(lines: list[str], base: int) -> str:
    """The lines as they are of a kernel that begins at address 0, with labels."""
    targets = {int(jump[1], 16) - base for line in lines if (jump := _JUMP.search(line))}
    names = {target: f".L_x_{number}" for number, target in enumerate(sorted(targets))}
    found = []
    for place, line in enumerate(lines):
        if 16 * place in names:
            found.append(f"{names[16 * place]}:")
        if jump := _JUMP.search(line):
            line = f"{line[: jump.start(1)]}`({names[int(jump[1], 16) - base]}){line[jump.end(1) :]}"
        found.append(_INSTRUCTION.sub(f"        /*{16 * place:04x}*/", line, count=1))
    return "\n".join(found) + "\n"


def instructions(text: str) -> list[str]:
    """The instructions of a disassembly, with addresses for labels and without the names of functions."""
    places: dict[str, str] = {}
    new: list[str] = []
    found = []
    for line in (" ".join(line.split()) for line in text.splitlines()):
        if label := re.match(r"(\.L_\w+):", line):
            new.append(label[1])
        elif instruction := _INSTRUCTION.match(line):
            places.update(dict.fromkeys(new, instruction[1]))
            new = []
            found.append(re.sub(r"((?:CALL|RET)\.\S+).*", r"\1", line))
    return [re.sub(r"`\((\.L_\w+)\)", lambda label: places[label[1]], line) for line in found]
