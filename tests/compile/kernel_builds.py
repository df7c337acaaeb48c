"""Builds of our kernels with the real compilers, and readers of their machine code."""

import contextlib
import ctypes
import functools
import itertools
import math
import os
import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from chosen import argument_names, kernel_name
from cover import cover
from house import is_compiled_always
from listings import Listings

from deep_gemm.jit import Binary, Builder
from deep_gemm.jit.binary import BuildRequest
from deep_gemm.jit.compilers import Compiler, Nvcc, choose, find_all
from deep_gemm.jit.compilers.base import common_flags
from deep_gemm.jit.compilers.nvrtc import Nvrtc
from deep_gemm.kernels.quantize_kernels import Variant
from deep_gemm.params import GemmConfig, KernelParams, TileConfig
from deep_gemm.runtime import engine
from deep_gemm.settings import settings
from deep_gemm.spec import align

KINDS = ("nvrtc", "nvcc")


def open_compiler(kind: str) -> Compiler:
    """NVRTC, which is one of our dependencies; or NVCC, whose absence skips the test."""
    if kind == "nvrtc":
        with settings.override(use_nvrtc=True):
            return choose()
    found = [found for found in find_all() if found.kind == "nvcc"]
    usable = next((f for f in found if f.usable), None)
    if usable is None:
        pytest.skip("; ".join(f"{f.path}: {f.why}" for f in found) or "nvcc is not installed")
    return Nvcc(usable.path)


_FAST = (12, 9)
"""The first NVRTC with `--Ofast-compile`."""


def ptx(nvrtc: Compiler, request: BuildRequest, headers: Path, fast: bool = False) -> str:
    """PTX of a kernel, without the time that ptxas takes. `fast`: hardly optimised, in a fraction of a second, which
    shows whether code compiles and whether two versions differ. NVRTC keeps a part of that for all later programs of
    the process, which then spill: only for a process that builds nothing else. Raises ValueError with the compiler's
    log."""
    assert isinstance(nvrtc, Nvrtc)
    library, program = nvrtc._open(), ctypes.c_void_p()
    options = ["--gpu-architecture=compute_90a", "-default-device", *common_flags(), f"--include-path={headers}"]
    options += ["--Ofast-compile=max"] if fast and nvrtc.version >= _FAST else []
    array = (ctypes.c_char_p * len(options))(*map(os.fsencode, options))
    library.nvrtcCreateProgram(ctypes.byref(program), request.source.encode(), b"kernel.cu", 0, None, None)
    try:
        if library.nvrtcCompileProgram(program, len(options), array):
            raise ValueError(nvrtc._get(program, "ProgramLog", "kernel.cu", options).decode())
        return nvrtc._get(program, "PTX", "kernel.cu", options).decode()
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


@dataclass(frozen=True)
class Built:
    """A kernel and its disassembly."""

    binary: Binary
    listings: Listings

    @property
    def sass(self) -> str:
        return self.listings.of(self.binary)

    @functools.cached_property
    def loop(self) -> list[str]:
        """See `main_loop`."""
        return main_loop(self.sass)


@contextlib.contextmanager
def build_all(compiler: Compiler, root: Path, cases: list[KernelParams]) -> Iterator[dict[KernelParams, Future[Built]]]:
    """Futures of all cases compiled by ``compiler``, as many at a time as there are cores. A case that fails to compile
    fails only the tests that use it."""
    builder, listings = Builder(root, compiler), Listings()

    def build(params: KernelParams) -> Built:
        binary = builder.build(engine.build_request(params))
        listings.expect(binary)
        return Built(binary, listings)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {params: pool.submit(build, params) for params in cases}
        pool.shutdown(cancel_futures=True)


def for_nvcc(cases: list[KernelParams]) -> list[KernelParams]:
    """The cases that NVCC compiles too: of tiles that leave few registers, one of each kernel and each kind of scales,
    C and groups, the largest tiles first. NVCC and NVRTC have the same optimiser and assembler, but maybe of different
    versions."""

    def area(params: KernelParams) -> int:
        return math.prod(params.config.tile)

    def kinds(params: KernelParams) -> frozenset[Hashable]:
        fields = ("kernel", "scaling", "adds_c", "grouping")
        return frozenset((name, getattr(params, name)) for name in fields)

    wide = sorted((params for params in cases if area(params) >= 128 * 128), key=area, reverse=True)
    return cover(wide, kinds)


Builds = Callable[[str, KernelParams], Built]


@contextlib.contextmanager
def builds_of(root: Path, request: pytest.FixtureRequest) -> Iterator[Builds]:
    """Kernels built by a compiler: those of the tests of a file that run, all of them when the first one is needed."""
    asked: list[Any] = [each for each in request.session.items if each.path == request.path]
    cases: dict[str, list[KernelParams]] = {kind: [] for kind in KINDS}
    for kind, params in dict.fromkeys((each.callspec.params["kind"], each.callspec.params["params"]) for each in asked):
        cases[kind].append(params)
    with contextlib.ExitStack() as stack:
        started: dict[str, dict[KernelParams, Future[Built]]] = {}

        def built(kind: str, params: KernelParams) -> Built:
            if kind not in started:
                started[kind] = stack.enter_context(build_all(open_compiler(kind), root, cases[kind]))
            return started[kind][params].result()

        yield built


def each_of(cases: Iterable[KernelParams], known: dict[str, list[KernelParams]]) -> pytest.MarkDecorator:
    """Parametrises a test with these cases compiled by NVRTC, and some of them also by NVCC. Those of NVCC are long,
    and so are those of NVRTC whose source key and compiler are the recorded ones: they compile to the recorded
    cubin."""
    listed = list(cases)
    pairs = [(kind, params) for kind in KINDS for params in listed if params in known[kind]]
    return pytest.mark.parametrize(
        ("kind", "params"),
        [
            pytest.param(kind, params, id=f"{kind}-{kernel_name(params)}", marks=() if is_short else pytest.mark.long)
            for kind, params in pairs
            for is_short in [kind == "nvrtc" and is_compiled_always(params)]
        ],
    )


def upright(params: KernelParams) -> GemmConfig | None:
    """The config of a GEMM whose operands are not swapped, or None."""
    return None if params.gemm.swap_ab else params.gemm


def stores_by_tma(params: KernelParams) -> bool:
    """Whether the store warp stores tiles by TMA. Then the kernel reads a tensor map of D."""
    config = upright(params)
    return config is not None and config.persistent and params.store == "tma"


def starts_before_it_stores(params: KernelParams) -> bool:
    """Whether consumers start the next tile's first product before they store this tile. They do not with split K."""
    return stores_by_tma(params) and params.gemm.k_splits == 1


def loaded_maps(params: KernelParams) -> list[str]:
    """The kernel's parameters that are tensor maps for loads: all tensor maps except D's."""
    return [name for name in argument_names(params) if name.startswith("map_") and name != "map_d"]


def main_loop(text: str) -> list[str]:
    """The instructions of the innermost loop over blocks of K in a disassembly: the shortest loop with products."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    loops: list[list[str]] = []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label.group(1)] = len(instructions)
        if instruction := re.search(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);", line):
            instructions.append(instruction.group(1))
            target = re.search(r"\bBRA\b.*?(\.L_x_\d+)", instructions[-1])
            if target and target.group(1) in labels:
                loops.append(instructions[labels[target.group(1)] :])
    multiplying = [loop for loop in loops if any("GMMA" in instruction for instruction in loop)]
    if not multiplying:
        raise LookupError("no loop of this kernel multiplies: the disassembly is not as it was")
    return min(multiplying, key=len)


def moves_to_uniform(loop: list[str]) -> list[str]:
    """The moves into uniform registers that a product may have to wait for. Two kinds are left out: moves of a load's
    address space, which B's scales need once in 32 blocks, and moves of scale factors, which only promotion uses after
    the products."""
    moves = []
    for index, instruction in enumerate(loop):
        if move := re.search(r"\bR2UR UR(\d+)", instruction):
            number = int(move.group(1))
            # A load names the first register of its pair.
            pair = re.compile(rf"\bLD.*desc\[UR({number}|{number - 1})\]")
            uses = (later for later in loop[index + 1 :] if pair.search(later) or re.search(rf"\bUR{number}\b", later))
            if not pair.search(next(uses, "")) and not _multiplies(loop, index, number):
                moves.append(instruction)
    return moves


def _multiplies(loop: list[str], index: int, number: int) -> bool:
    """Whether the next use of a uniform register after an instruction is a multiplication by it or by a copy."""
    for place in range(index + 1, index + len(loop)):
        instruction = loop[place % len(loop)]
        if re.search(rf"\bUR{number}\b", instruction):
            copy = re.fullmatch(rf"UMOV UR(\d+), UR{number}\s*", instruction)
            if copy:
                return _multiplies(loop, place % len(loop), int(copy.group(1)))
            return re.match(rf"FMUL R\d+, R\d+, UR{number}\b", instruction) is not None
    return False


def in_one_bank(loop: list[str]) -> list[str]:
    """The FFMAs whose sum and product are in the same register bank (even or odd numbers), so that both are read from
    one bank. In a trial of 256x144 tiles on an H200, where all FFMAs were like this, it cost 2% of the time."""
    sums = {}
    for instruction in loop:
        parts = re.search(r"\bFFMA R(\d+), R(\d+)(\.reuse)?, R(\d+)(?:\.reuse)?, R(\d+)", instruction)
        if parts and parts[1] == parts[5]:
            # The operand that is kept for the next FFMA is the factor.
            sums[instruction] = int(parts[4] if parts[3] else parts[2]), int(parts[5])
    if not sums:
        raise LookupError("no loop of this kernel adds to sums: the disassembly is not as it was")
    return [instruction for instruction, (product, total) in sums.items() if product % 2 == total % 2]


def kept_operands(code: str) -> Iterator[tuple[str, str]]:
    """(instruction, next line) for each FFMA that keeps its second operand for reuse by a later one."""
    lines = [line.strip() for line in code.splitlines() if line.strip()]
    lines = [line for line in lines if re.match(r"/\*[0-9a-f]{4,}\*/|\.L_", line)]
    jumped_to = set(re.findall(r"`\((\.L_\w+)\)", code))
    lines = [line for line in lines if not line.startswith(".L_") or line.rstrip(":") in jumped_to]
    for line, after in itertools.pairwise(lines):
        if re.search(r"\bFFMA R\d+, R\d+(?:\.reuse)?, R\d+\.reuse", line):
            yield line, after


STATIC_SHARED = {
    "transpose_scales": 32 * 65 * 4, "copy_rows": 64 * 66 * 2, "transpose_bytes": 128 * 128, "k_group_maps": 128,
    "paged_mqa_logits_metadata": 32, **dict.fromkeys(("moe_dispatch", "moe_route"), 2 * 2048 * 4 + 32 * 4),
    "moe_dots": 8 * 8 * 4,
}  # fmt: skip


def static_shared(params: KernelParams) -> int:
    """Bytes of static shared memory, which are not part of the launch."""
    if params.kernel == "rows":  # a sum for each warp, if several share a row; and one of squares
        warps = params.config.num_threads // 32 if params.config.tile[0] == 1 else 0
        return 4 * warps * {"rms_norm": 1, "layer_norm": 2}.get(str(params.options[0]), 0)
    if params.kernel != "quantize":
        return STATIC_SHARED.get(params.kernel, 0)
    cast = Variant(*params.options)  # type: ignore[arg-type]
    blocks = {cast.plain, cast.transposed}
    if blocks == {"row", "none"}:
        return 0
    assert isinstance(params.config, TileConfig)
    warps = params.config.num_threads // 32
    # The transposed tile, the maxima of each warp for each column, factors of columns, and a maximum for each warp; one
    # element where one is unused.
    maximum = 4 if cast.gated or params.dtype == "f32" else 2
    found = 128 * 128 if cast.transposed != "none" else 16
    found += warps * 128 * maximum + 128 * 4 if "column" in blocks else 16 + 4
    return align(found + (warps * 4 if "tile" in blocks else 4), 16)
