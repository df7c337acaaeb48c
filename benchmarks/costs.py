"""The cost of a call beside the kernel: host time when warm; import, compile and load times when cold; the number of
kernels.

    python benchmarks/costs.py FILE [host|cold|compile|dims|kernels]...   append rows to FILE; all modes by default

host and dims (N and K at run time against compiled in) need a GPU.
"""

from __future__ import annotations

import functools
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import census
import phases

from deep_gemm.aot.workload import GemmShape
from deep_gemm.bench import backends
from deep_gemm.bench.provenance import environment
from deep_gemm.bench.run import append
from deep_gemm.bench.shapes import REFERENCE_NK, demo
from deep_gemm.errors import DeepGemmError
from deep_gemm.testing import timing

if TYPE_CHECKING:
    from deep_gemm.params import KernelParams

Row = dict[str, Any]

HOST_SHAPE = GemmShape(16, 576, 7168)
"""Small enough that the GPU keeps up, so that the queue never makes the host wait."""


def host() -> Iterator[Row]:
    """Host time of warm calls, in us: ours with scales that are ready or not, and some of torch's own calls."""
    import torch

    import deep_gemm

    common = environment()
    x = backends.make_operands(HOST_SHAPE, 1)[0]
    row_major = (x.a, x.sfa.contiguous())
    left = torch.randn(HOST_SHAPE.m, HOST_SHAPE.k, dtype=torch.bfloat16, device="cuda")
    right = torch.randn(HOST_SHAPE.k, HOST_SHAPE.n, dtype=torch.bfloat16, device="cuda")
    pair = (x.b, x.sfb)
    deep_gemm.register_operators()
    operator = torch.ops.deep_gemm_jit.fp8_gemm
    calls: dict[str, Callable[[], Any]] = {
        "fp8_gemm_nt, warm, scales ready": backends.ours(x),
        "operator fp8_gemm, warm, scales ready": lambda: operator(x.a, x.sfa, x.b, x.sfb, x.d),
        "fp8_gemm_nt, warm, scales to transpose": lambda: deep_gemm.fp8_gemm_nt(row_major, pair, x.d),
        "fp8_gemm_nt, activations and output where none were before": at_new_addresses(x),
        "get_mn_major_tma_aligned_tensor, warm": lambda: deep_gemm.get_mn_major_tma_aligned_tensor(row_major[1]),
        "torch._scaled_mm tensorwise, out=": backends.tensorwise(x),
        "torch.matmul bf16, out=": lambda: torch.matmul(left, right, out=x.d),
        "torch add_": lambda: x.d.add_(1),
        "an empty Python call": lambda: None,
    }
    for what, us in timing.host_in_turns(calls).items():
        yield {"mode": "host", "what": what, "us": round(us, 3)} | common


PLACES = 30_000
"""More than the calls that are timed: an address that came twice would make a warm call."""


def at_new_addresses(x: backends.Operands, places: int = PLACES) -> Callable[[], None]:
    """`ours` with new addresses at each call: A, its scales and D each lie 16 bytes further in a large buffer of zeros.
    (Their values do not matter for the host's time.) Addresses repeat after `places` calls."""
    import torch

    import deep_gemm

    def spread(tensor: torch.Tensor) -> list[torch.Tensor]:
        step = 16 // tensor.element_size()
        span = sum(size * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        room = torch.zeros((span + step * places) * tensor.element_size(), dtype=torch.uint8, device=tensor.device)
        whole = room.view(tensor.dtype)
        return [whole.as_strided(tensor.shape, tensor.stride(), step * place) for place in range(places)]

    a, sfa, d = spread(x.a), spread(x.sfa), spread(x.d)
    b, place = (x.b, x.sfb), itertools.cycle(range(places))

    def call() -> None:
        at = next(place)
        deep_gemm.fp8_gemm_nt((a[at], sfa[at]), b, d[at])

    return call


def compile_phases() -> Iterator[Row]:
    """Four kernels from small to large, built by each usable compiler with nothing cached: each phase in ms. Loading
    is timed where there is a GPU."""
    import torch

    common = environment()
    load = None
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")  # the context's cost is not a module's
        load = phases.load_ms
    for compiler in phases.compilers():
        for params in phases.kernels():
            yield phases.breakdown(params, compiler, load) | common


def compiled_in_sizes() -> Iterator[Row]:
    """Single calls, in turns: N and K given at run time, which is the default, and compiled into the kernel."""
    import deep_gemm

    common = environment()
    for shape in (GemmShape(m, n, k) for n, k in REFERENCE_NK for m in BAKED_M):
        x = backends.make_operands(shape, 1)[0]
        a, b, d = (x.a, x.sfa), (x.b, x.sfb), x.d
        calls = {dims: functools.partial(deep_gemm.fp8_gemm_nt, a, b, d, compiled_dims=dims) for dims in ("", "nk")}
        us = timing.flush(calls)
        row: Row = {"mode": "dims", "what": f"{shape.m} x {shape.n} x {shape.k}"}
        yield (
            row
            | {"us": round(us[""], 3), "us_nk": round(us["nk"], 3), "ratio_nk": round(us["nk"] / us[""], 4)}
            | common
        )


BAKED_M = (16, 128, 1000, 4096)


def kernel_counts() -> Iterator[Row]:
    """How many kernels serve every M; see `census`."""
    common = environment()
    for row in census.kernels():
        yield row | common


def cold() -> Iterator[Row]:
    """The import on top of torch; the demo's kernels, compiled by each usable compiler and read from disk; first calls
    on a GPU."""
    import torch

    common = environment()

    def row(what: str, seconds: float) -> Row:
        return {"mode": "cold", "what": what, "us": round(seconds * 1e6, 1)} | common

    yield row("import deep_gemm, on top of torch", import_seconds())
    from deep_gemm.aot.build import choose
    from deep_gemm.jit.compilers.find import find_all

    kinds = dict.fromkeys(found.kind for found in find_all() if found.usable)
    for params in choose(demo()).kernels:
        for kind in kinds:
            name, compiled, stored = build_seconds(params, kind)
            yield row(f"{name}: first build, {kind}", compiled)
            yield row(f"{name}: from disk, {kind}", stored)
    if torch.cuda.is_available():
        for kind in kinds:
            with tempfile.TemporaryDirectory() as root:
                for state in ("nothing compiled", "kernels on disk"):
                    first, next_ = first_call_seconds(kind, root)
                    yield row(f"first call of a process, {state}, {kind}", first)
                    yield row(f"first call of another shape and kernel, {state}, {kind}", next_)
        for layer, seconds in warm_start_seconds():
            yield row(f"{WARM_STARTED} kernels found, verified and loaded in a fresh process, from {layer}", seconds)


WARM_STARTED = 50
"""Kernels of a warm start."""

WARM_START = f"""
import json, sys, time, torch, deep_gemm
sys.path.insert(0, {str(Path(__file__).resolve().parent)!r})
import costs
from deep_gemm.runtime import engine
torch.zeros(1, device="cuda")
torch.cuda.synchronize()
params = costs.warm_start_kernels()
start = time.perf_counter()
for one in params:
    engine.load(one, 0, "a warm start")
print(time.perf_counter() - start)
print(json.dumps(deep_gemm.cache_info()["statistics"]["hits"]))
"""


def warm_start_kernels() -> list[KernelParams]:
    """Fifty kernels of DeepSeek-V3's dense layers."""
    from deep_gemm.aot.build import choose
    from deep_gemm.aot.workload import DEFAULT_M, shapes
    from deep_gemm.bench.shapes import DEEPSEEK_V3

    return list(choose(shapes(census.dense_layers(DEEPSEEK_V3), DEFAULT_M)).kernels)[:WARM_STARTED]


def warm_start_seconds(repeats: int = 5) -> Iterator[tuple[str, float]]:
    """The median time in which fresh processes with a CUDA context find, verify and load fifty kernels: from disk
    (including the search for a compiler), and from a pack."""
    from deep_gemm.aot import build
    from deep_gemm.aot.outcomes import Outcome, Summary
    from deep_gemm.settings import child_environment, settings

    with tempfile.TemporaryDirectory() as root, tempfile.TemporaryDirectory() as nowhere:
        pack = Path(root, "kernels.dgpack")
        with settings.override(cache_dir=Path(root, "cache"), use_nvrtc=True):
            outcomes: list[Outcome] = []
            build.build_all(warm_start_kernels(), outcomes.append)
            build.pack(Summary(tuple(outcomes), 0.0), pack)
        common = {**child_environment("DG_JIT_PRECOMPILED"), "DG_JIT_USE_NVRTC": "1", "DG_JIT_FORBID_COMPILE": "1"}
        layers = {
            "disk": {"DG_JIT_CACHE_DIR": str(Path(root, "cache"))},
            "pack": {"DG_JIT_CACHE_DIR": nowhere, "DG_JIT_PRECOMPILED": str(pack)},
        }
        for layer, names in layers.items():
            times = []
            for _ in range(repeats):
                command = [sys.executable, "-c", WARM_START]
                result = subprocess.run(
                    command, capture_output=True, text=True, check=True, cwd=nowhere, env={**common, **names}
                )
                seconds, hits = result.stdout.splitlines()[-2:]
                if json.loads(hits)[layer] != WARM_STARTED:
                    raise DeepGemmError(f"a warm start from {layer} found only {hits}")
                times.append(float(seconds))
            yield layer, statistics.median(times)


def import_seconds(repeats: int = 5) -> float:
    """The time of importing deep_gemm and its GEMMs in a process that has torch: the median of fresh processes."""
    code = "import time, torch; t = time.perf_counter(); from deep_gemm import fp8_gemm_nt; "
    code += "print(time.perf_counter() - t)"
    times = []
    for _ in range(repeats):
        # From another directory, so that the installed package is measured.
        with tempfile.TemporaryDirectory() as away:
            result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=away)
        times.append(float(result.stdout))
    return statistics.median(times)


FIRST_CALL = """
import sys, time, torch, deep_gemm
from deep_gemm.bench import backends, shapes
kind, root = sys.argv[1:]
with deep_gemm.settings.override(cache_dir=root, use_nvrtc=kind == "nvrtc"):
    prefill, decode, _ = [backends.make_operands(shape, 1)[0] for shape in shapes.demo()]
    for x in (decode, prefill):
        call = backends.ours(x)
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        print(time.perf_counter() - start)
"""


def first_call_seconds(kind: str, root: str) -> tuple[float, float]:
    """In a fresh process with a CUDA context: the times of the first call, and of the first call of another shape."""
    command = [sys.executable, "-c", FIRST_CALL, kind, root]
    with tempfile.TemporaryDirectory() as away:
        result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=away)
    first, following = result.stdout.split()[-2:]
    return float(first), float(following)


def build_seconds(params: KernelParams, kind: str) -> tuple[str, float, float]:
    """(name, seconds to build into an empty cache, seconds to look the kernel up on disk as a new process would)."""
    from deep_gemm.jit.builder import Builder
    from deep_gemm.jit.cache.packs import Packs
    from deep_gemm.runtime import engine
    from deep_gemm.settings import settings

    with tempfile.TemporaryDirectory() as root, settings.override(use_nvrtc=kind == "nvrtc"):
        request = engine.build_request(params)
        Builder(Path(root, "warm"), packs=Packs(())).lookup(request)  # finds the compiler, which a process does once
        times = []
        for _ in range(2):
            builder = Builder(Path(root, "cache"), packs=Packs(()))
            start = time.perf_counter()
            builder.build(request)
            times.append(time.perf_counter() - start)
    return request.name, times[0], times[1]


MODES: dict[str, Callable[[], Iterator[Row]]] = {
    "host": host,
    "cold": cold,
    "compile": compile_phases,
    "dims": compiled_in_sizes,
    "kernels": kernel_counts,
}


def main(arguments: Sequence[str]) -> int:
    """Measure each mode, and print and append each row as soon as it is measured."""
    if not arguments or set(arguments[1:]) - set(MODES):
        print(f"usage: costs.py FILE [{'|'.join(MODES)}]...", file=sys.stderr)
        return 2
    for mode in arguments[1:] or MODES:
        for row in MODES[mode]():
            append(Path(arguments[0]), row)
            numbers = ", ".join(f"{name} {value:g}" for name, value in row.items() if isinstance(value, int | float))
            print(f"{mode}: {row['what']}: {numbers}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
