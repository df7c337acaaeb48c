"""Where the time of a first build goes: rendering, the compiler's phases by its own clock, loading the module."""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deep_gemm.jit.builder import BuildRequest
from deep_gemm.jit.compilers.base import Compiler
from deep_gemm.params import KernelParams

Row = dict[str, Any]

# A line of NVRTC's table is "file, phase, number, ms"; of NVCC's "file, phase, in, out, arch, tool, number, ms".
_LINE = re.compile(r"^[^,\n]*,\s*([^,\n]+?)\s*,(?:[^\n]*,)?\s*([\d.]+)\s*,\s*ms\s*$", re.MULTILINE)

_PHASES = {
    "CUDA C++ Frontend": "frontend_ms",
    "NVVM Optimizer": "optimiser_ms",
    "PTX Translation": "ptxas_ms",
    "gcc (preprocessing 1)": "preprocess_ms",
    "cicc": "optimiser_ms",  # NVCC's cicc is front end and optimiser in one
    "ptxas": "ptxas_ms",
}

COLUMNS = ("render_ms", "preprocess_ms", "frontend_ms", "optimiser_ms", "ptxas_ms", "other_ms", "load_ms")
"""Every part that a row may have, in the order in which they happen."""


def kernels() -> list[KernelParams]:
    """Four kernels from small to large: the smallest tile of swapped operands, a tile for decoding, 128 x 128 and the
    largest, each the plainest of its size."""
    from deep_gemm import arch
    from deep_gemm.aot import build
    from deep_gemm.aot.workload import GemmShape
    from deep_gemm.kernels import gemm_family
    from deep_gemm.runtime import engine

    asked = build.spec_of(GemmShape(4096, 7168, 2048), arch.SM90)
    found = []
    for family, block_m, block_n in (
        ("sm90_fp8_swapped", 1, 1),
        ("sm90_fp8_swapped", 64, 64),
        ("sm90_fp8_gemm", 128, 128),
        ("sm90_fp8_gemm", 256, 128),
    ):
        every = gemm_family(family).legal(arch.SM90)
        config = min(
            every,
            key=lambda c: (abs(c.block_m - block_m) + abs(c.block_n - block_n), c.cluster_size, c.ctas_per_sm),
        )
        found.append(engine.kernel_params(asked, config, arch.SM90))
    return found


def parse(table: str) -> dict[str, float]:
    """Milliseconds by phase from the output of a compiler's -time option; unknown phases are dropped."""
    phases: dict[str, float] = {}
    for name, number in _LINE.findall(table):
        if name in _PHASES:
            phases[_PHASES[name]] = phases.get(_PHASES[name], 0.0) + float(number)
    return phases


def compile_once(compiler: Compiler, request: BuildRequest) -> tuple[dict[str, float], bytes]:
    """(milliseconds by phase, with "compile_ms" for all of it; the cubin). No cache is read or written.

    An NVRTC that is too old for -time reports only the time of ptxas: the rest is then "optimiser_ms", front end
    included.
    """
    from deep_gemm.errors import CompileError
    from deep_gemm.jit.generator import include_dir

    with tempfile.TemporaryDirectory(prefix="deep_gemm-") as folder:
        source, table = Path(folder, f"{request.name}.cu"), Path(folder, "time.csv")
        source.write_text(request.source)
        flags = list(compiler.flags(request.arch))
        extra = f"--time={table}"

        def run(options: list[str]) -> Any:
            return compiler.compile(request.name, request.source, str(source), options, include_dir().absolute())

        try:
            compiled = run([*flags, extra])
        except CompileError:
            compiled = run(flags)
        phases = parse(table.read_text()) if table.exists() else {}
    whole = compiled.seconds["compile"] * 1e3
    if not phases and "ptxas" in compiled.seconds:
        ptxas = compiled.seconds["ptxas"] * 1e3
        phases = {"optimiser_ms": whole - ptxas, "ptxas_ms": ptxas}
    return phases | {"compile_ms": whole}, request.finished(compiled.cubin)


def load_ms(cubin: bytes, request: BuildRequest, shared: int, device: int = 0) -> float:
    """Loading the module into a device's context, which exists already."""
    from deep_gemm.jit.driver.module import load_function

    start = time.perf_counter()
    load_function(cubin, request.name, device, shared)
    return (time.perf_counter() - start) * 1e3


def breakdown(
    params: KernelParams,
    compiler: Compiler,
    load: Callable[[bytes, BuildRequest, int], float] | None = None,
    repeats: int = 5,
) -> Row:
    """The median of `repeats` builds of one kernel, part by part, in ms; `us` is the sum of all of them in us.

    "other_ms" is the compiler's time outside of its phases. `load` times loading a cubin; None leaves it out.
    """
    from deep_gemm.kernels import get
    from deep_gemm.runtime import engine

    samples: list[dict[str, float]] = []
    for _ in range(repeats):
        start = time.perf_counter()
        request = engine.build_request(params)
        rendered = (time.perf_counter() - start) * 1e3
        phases, cubin = compile_once(compiler, request)
        whole = phases.pop("compile_ms")
        sample = {"render_ms": rendered, **phases, "other_ms": max(0.0, whole - sum(phases.values()))}
        if load is not None:
            sample["load_ms"] = load(cubin, request, get(params.kernel).shared_bytes(params))
        samples.append(sample)
    medians = {name: round(statistics.median(sample[name] for sample in samples), 3) for name in samples[0]}
    ordered = {name: medians[name] for name in COLUMNS if name in medians}
    row: Row = {"mode": "compile", "what": f"{request.name}, {compiler.kind}", "compiler": compiler.identity}
    return row | {"us": round(sum(medians.values()) * 1e3, 1)} | ordered


def compilers() -> Iterator[Compiler]:
    """The usable compiler of each kind that would be chosen, NVRTC first."""
    from deep_gemm.jit.compilers.find import choose, find_all
    from deep_gemm.settings import settings

    kinds = {found.kind for found in find_all() if found.usable}
    for kind in sorted(kinds, reverse=True):
        with settings.override(use_nvrtc=kind == "nvrtc"):
            yield choose()
