"""Decoding of MXFP4 weights on a CPU: device code reads what `transform_fp4_weights` wrote, each weight exactly."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from emulation import translated

import deep_gemm
from deep_gemm.jit.generator import include_dir
from deep_gemm.ops import fp4_weights

HERE = Path(__file__).parents[1]
CODE = """
void call() {}
template <bool kFp8>
void decode(const u32* codes, u32 exponents, u32* out) {
  Fragment<kFp8, false> words{};
  for (u32 h = 0; h < 2; ++h)
    for (u32 s = 0; s < 4; ++s) words.codes[h][s] = codes[4 * h + s];
  words.exponents[0] = exponents;
  u32 a[4 * Fragment<kFp8, false>::kRegisters];
  words.template decode<0, 4>(a);
  memcpy(out, a, sizeof(a));
}
extern "C" void decode_fp8(const u32* codes, u32 exponents, u32* out) { decode<true>(codes, exponents, out); }
extern "C" void decode_bf16(const u32* codes, u32 exponents, u32* out) { decode<false>(codes, exponents, out); }
"""


def compiled(folder: Path, *edit: str) -> ctypes.CDLL:
    """The device code for the host, with one edit of it."""
    program = shutil.which("g++") or shutil.which("clang++")
    if program is None:
        pytest.skip("needs a C++ compiler for the host")
    for path in include_dir().glob("*.cuh"):
        text = path.read_text()
        if edit and path.name == "fp4_weights.cuh":
            assert text.count(edit[0]) == 1
            text = text.replace(*edit)
        (folder / path.name).write_text(translated(text))
    (folder / "decode.cpp").write_text(f'#include "emulator_ptx.h"\n#include "fp4_weights.cuh"\n{CODE}')
    flags = ("-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{folder}", f"-I{HERE}")
    subprocess.run([program, *flags, folder / "decode.cpp", "-o", folder / "decode.so"], check=True, timeout=300)
    return ctypes.CDLL(str(folder / "decode.so"))


def decoded(library: ctypes.CDLL, kind: str, packed: torch.Tensor) -> torch.Tensor:
    """What the threads of a warpgroup have of a piece (64, 128), without the factors of rows."""
    raw = packed.view(torch.uint8)
    words, found = raw[:4096].view(torch.int32), torch.full((64, 128), torch.nan)
    dtype, step = (torch.float8_e5m2, 4) if kind == "fp8" else (torch.bfloat16, 2)
    registers = 4 if kind == "fp8" else 8
    out = torch.zeros(4 * registers, dtype=torch.int32)
    for warp in range(4):
        for lane in range(32):
            mine = warp * 256 + lane * 4  # in words
            codes = torch.cat([words[mine : mine + 4], words[mine + 128 : mine + 132]])
            at = 4096 + warp * 32 + lane // 4 * 4
            exponents = int.from_bytes(bytes(raw[at : at + 4].tolist()), "little")
            given = ctypes.c_void_p(codes.data_ptr()), ctypes.c_uint32(exponents), ctypes.c_void_p(out.data_ptr())
            getattr(library, f"decode_{kind}")(*given)
            values = out.view(dtype).float().view(4, registers // 2, 2, step)  # of 32 of K: the rows of each register
            for h in range(2):
                # wgmma's A: a register has `step` columns, the next one of its row those 4 * step after.
                place = torch.arange(registers // 2)[:, None] * 4 * step + lane % 4 * step + torch.arange(step)
                for s in range(4):
                    found[warp * 16 + lane // 4 + 8 * h, 32 * s + place] = values[s, :, h]
    return found


def check(library: ctypes.CDLL, kind: str) -> None:
    torch.manual_seed(0)
    codes = torch.randint(256, (64, 64), dtype=torch.uint8)
    exponents = torch.randint(110, 126, (64, 4), dtype=torch.uint8)  # they span 15
    made = fp4_weights.transform(codes, exponents, kind, absolute=False)
    got = decoded(library, kind, made.packed[0, 0]).double() * made.factors[:, None].double()
    wanted = deep_gemm.dequantise(codes, exponents, dtype=torch.float64)
    assert torch.equal(got, wanted)
    assert torch.equal(got.signbit(), wanted.signbit()), "zeros have signs"


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_threads_have_the_weights(kind: str, tmp_path: Path) -> None:
    check(compiled(tmp_path), kind)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("fp8", "0x4440u + 2 * h + s / 2", "0x4440u + 2 * h"),
        ("fp8", "| ((w << 4) & 0x80808080u)", ""),
        ("bf16", "* 0x4108u", "* 0x4008u"),
        ("bf16", "(two & 0xF0u) * 0x00080008u", "(two & 0xF0u) * 0x00080000u"),
    ],
)
def test_wrong_code_is_seen(kind: str, old: str, new: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check(compiled(tmp_path, old, new), kind)
