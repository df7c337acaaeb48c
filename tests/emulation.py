"""Kernels without wgmma and TMA on a CPU: their source, compiled for the host, where emulator.h stands for a GPU.

Device headers are compiled as they are, but for their asm statements: each instruction becomes a call of the function
of emulator_ptx.h that does the same."""

import copy
import ctypes
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from deep_gemm import kernels
from deep_gemm.jit.driver.launch import Pointer
from deep_gemm.jit.generator import include_dir
from deep_gemm.params import KernelParams
from deep_gemm.runtime import engine
from deep_gemm.spec import Spec

_HERE = Path(__file__).parent
_KNOWN = frozenset(re.findall(r"\b(ptx_\w+)\(", (_HERE / "emulator_ptx.h").read_text())) | {
    f"ptx_mma_sync_aligned_{shape}_row_col_f32_{kind}_{kind}_f32"
    for shape, kind in (("m16n8k16", "bf16"), ("m16n8k16", "f16"), ("m16n8k32", "e4m3"))
}
_FORMATS = {"u32": "=I", "i32": "=i", "i64": "=q", "f32": "=f"}


class Emulated:
    """The kernel of ``params``, in ``folder``. ``edits`` (file, old, new) change device headers, to break them."""

    def __init__(self, folder: Path, params: KernelParams, *edits: tuple[str, str, str]) -> None:
        self.params, self.kernel = params, kernels.get(params.kernel)
        arguments = self.kernel.arguments(params)
        call = ", ".join(f"*static_cast<{x.ctype}*>(cta::given[{i}])" for i, x in enumerate(arguments))
        body = f"void call() {{ {self.kernel.kernel_name(params)}({call}); }}"
        kernel = re.sub("(?<!extern) __shared__ ", " static ", translated(engine.build_request(params).source))
        self._load(built(folder, kernel, body, *edits))

    def _load(self, library: ctypes.CDLL) -> None:
        self._library, self._emulate = library, library.emulate
        self._emulate.restype = ctypes.c_char_p

    def another(self, file: Path) -> "Emulated":
        """The same kernel, loaded from a copy, so that it can run at the same time."""
        found = copy.copy(self)
        found._load(ctypes.CDLL(str(shutil.copy(self._library._name, file))))
        return found

    def __call__(
        self,
        spec: Spec,
        operands: Mapping[str, Tensor],
        numbers: Mapping[str, Any] | None = None,
        backwards: bool = False,
    ) -> None:
        """Runs a launch. Raises RuntimeError with what the emulator has to say."""
        strides = {name: tuple(x.stride()) for name, x in operands.items()}
        plan = self.kernel.launch_plan(self.params, spec, strides, numbers=numbers or {})
        kept: list[Any] = []
        for given in plan.parameters:
            if isinstance(given, Pointer):
                data = struct.pack("=Q", operands[given.operand].data_ptr())
            elif given[0] == "u32s":
                data = struct.pack(f"={len(given[1])}I", *given[1])
            else:
                data = struct.pack(_FORMATS[given[0]], given[1])
            kept.append(ctypes.create_string_buffer(data, max(len(data), 8)))
        arguments = (ctypes.c_void_p * len(kept))(*map(ctypes.addressof, kept))
        regions = [region for x in operands.values() for region in _region(x)]
        packed = (ctypes.c_uint64 * len(regions))(*regions)
        shape = (*plan.shape.grid, plan.shape.block, plan.shape.dynamic_shared)
        error = self._emulate(*shape, arguments, packed, len(regions) // 4, int(backwards))
        if error:
            raise RuntimeError(error.decode())


def built(folder: Path, kernel: str, code: str, *edits: tuple[str, str, str]) -> ctypes.CDLL:
    """A library, made in a new ``folder``, of translated code and of other code after it."""
    program = shutil.which("g++") or shutil.which("clang++")
    if program is None:
        pytest.skip("needs a C++ compiler for the host")
    include, source, library = folder / "include", folder / "kernel.cpp", folder / "kernel.so"
    include.mkdir(parents=True)
    for path in include_dir().glob("*.cuh"):
        (include / path.name).write_text(translated(_edited(path, edits)))
    source.write_text(f'#include "emulator_ptx.h"\n{kernel}\n{code}\n')
    flags = ("-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC", f"-I{include}", f"-I{_HERE}")
    if Path(program).name == "g++":  # copies of a library would share variables
        flags = (*flags, "-fno-gnu-unique")
    subprocess.run([program, *flags, str(source), "-o", str(library)], check=True, timeout=300)
    return ctypes.CDLL(str(library))


def _region(x: Tensor) -> tuple[int, int, int, int]:
    """Address, rows, bytes of a row, and bytes from one row to the next; a matrix of each group is one of all rows."""
    size = x.element_size()
    if x.dim() > 2:
        x = x if x.stride(-1) == 1 else x.mT
        assert all(x.stride(i) == x.shape[i + 1] * x.stride(i + 1) for i in range(x.dim() - 2)), "groups are packed"
        x = x.reshape(-1, x.shape[-1])
    if x.dim() == 1 or x.numel() == 0:
        return x.data_ptr(), 1, max(1, x.numel() * size), max(1, x.numel() * size)
    x = x if x.stride(1) == 1 else x.t()
    assert x.stride(1) == 1 or x.shape[1] == 1
    return x.data_ptr(), x.shape[0], x.shape[1] * size, max(x.stride(0), x.shape[1]) * size


def _edited(path: Path, edits: tuple[tuple[str, str, str], ...]) -> str:
    text = path.read_text()
    for file, old, new in edits:
        if file == path.name:
            assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {file}"
            text = text.replace(old, new)
    return text


# ------------------------------------------------------------------------------------------------ asm statements


def translated(text: str) -> str:
    """``text`` with calls in place of its asm statements."""
    text = text.replace("extern __shared__", "extern")
    text = re.sub(r"__shared__ (alignas\(\w+\))", r"\1 __shared__", text)  # `static` comes second in C++
    found, end = [], 0
    for match in re.finditer(r"\basm\s*(?:volatile)?\s*\(", text):
        if match.start() < end:
            continue
        found.append(text[end : match.start()])
        parts, end = _sections(text, match.end())
        ptx = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', parts[0])).replace("\\n", " ").replace("\\t", " ")
        operands = [expression for part in parts[1:3] for expression in _operands(part)]
        found.append(_calls(ptx, operands))
    return "".join(found) + text[end:]


def _sections(text: str, begin: int) -> tuple[list[str], int]:
    """The parts of an asm statement between colons, and where it ends."""
    parts, at, depth, start = [], begin, 0, begin
    while True:
        if text[at] == '"':
            at = text.index('"', at + 1)
        elif text[at] in "([{":
            depth += 1
        elif text[at] in ")]}":
            depth -= 1
            if depth < 0:
                return [*parts, text[start:at]], at + 1
        elif text[at] == ":" and depth == 0:
            parts.append(text[start:at])
            start = at + 1
        at += 1


def _operands(part: str) -> Iterator[str]:
    """The expressions of ``"=r"(x), "r"(y)``."""
    at = 0
    while match := re.compile(r'\s*,?\s*"[^"]*"\s*\(').match(part, at):
        depth, at = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(part[at], 0)
            at += 1
        yield part[match.end() : at - 1]


def _calls(ptx: str, operands: list[str]) -> str:
    """A C++ statement, without its semicolon, that does what the instructions do."""
    lines = []
    for line in ptx.strip().removeprefix("{").removesuffix("}").split(";"):
        line = " ".join(line.split())
        if not line or line == "{" or line == "}":
            continue
        if declared := re.fullmatch(r"\.reg \.(\w+) ([\w, ]+)", line):
            ctype = {"pred": "bool", "b16": "u16", "b32": "u32", "b64": "u64"}.get(declared[1])
            if ctype:
                lines.append(f"{ctype} {declared[2]}")
                continue
        guard = re.match(r"@(!?\w+) ", line)
        name, _, rest = line[guard.end() if guard else 0 :].partition(" ")
        call = "ptx_" + re.sub(r"\W+", "_", name.replace("::", "_"))
        tokens = re.findall(r"%%?\w+|0f[0-9a-fA-F]{8}|\w+|[^\s,{}\[\]]", rest)
        given = [_operand(token, operands) for token in tokens]
        if call not in _KNOWN or None in given:
            lines.append(f'ptx_unknown("{line}")')
            continue
        lines.append((f"if ({guard[1]}) " if guard else "") + f"{call}({', '.join(map(str, given))})")
    return "do { " + "; ".join(lines) + "; } while (0)"


def _operand(token: str, operands: list[str]) -> str | None:
    if re.fullmatch(r"%\d+", token):
        return f"({operands[int(token[1:])]})"
    if token.startswith("0f"):
        return f"__uint_as_float(0x{token[2:]})"
    return token if re.fullmatch(r"\w+", token) else None
