"""First calls of a process that finds its kernels in a pack: fresh processes, an empty cache, and no compiler.

    python benchmarks/first_calls.py [--pack FILE] [--repeats 7] [--output FILE]

Needs a GPU, and a wheel with kernels or the pack FILE. Compiling is forbidden, so a kernel that is missing is an error.
Operands are made, CUDA is initialised, and this package and cuda-python are imported before the clock starts; each time
ends when the GPU is done. For each operation it prints the milliseconds of the first call of a process, of its first
calls with other sizes that need another kernel, and the median of the processes. Python's bytecode is there, as in an
installed package: one process that does not count writes it, whatever the environment says of bytecode. A row for each
operation is appended to the file of --output: the milliseconds of each call, and of the parts of the first.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

OPERATIONS = ("fp8_gemm_nt", "bf16_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous", "quantize.rows")
ROWS = (64, 8, 200, 1000, 4096, 16384)
"""M of the first call and of further ones."""
N, K, GROUPS = 7168, 2048, 8
PARTS = {"select": "choice", "build_and_load": "kernel found and loaded"}
"""Of a first call, as debug_info() has them. The rest is checks, tensor maps, the launch and the kernel itself."""
LIMITS = {"first": 10.0, "further": 5.0}
"""Milliseconds."""


def calls(operation: str) -> list[Callable[[], Any]]:
    """The calls of a process, whose operands are on the GPU."""
    import torch

    import deep_gemm

    def fp8(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").to(torch.float8_e4m3fn)

    def scales(rows: int) -> torch.Tensor:
        return torch.rand(K // 128, -(-rows // 4) * 4, device="cuda").t()[:rows]

    def made(m: int) -> Callable[[], Any]:
        d = torch.empty(m, N, dtype=torch.bfloat16, device="cuda")
        if operation == "fp8_gemm_nt":
            a, b = (fp8(m, K), scales(m)), (fp8(N, K), torch.rand(N // 128, K // 128, device="cuda"))
            return lambda: deep_gemm.fp8_gemm_nt(a, b, d)
        if operation == "bf16_gemm_nt":
            x, w = (torch.randn(size, K, device="cuda").bfloat16() for size in (m, N))
            return lambda: deep_gemm.bf16_gemm_nt(x, w, d)
        if operation == "quantize.rows":
            x = torch.randn(m, N, device="cuda").bfloat16()
            return lambda: deep_gemm.quantize.rows(x)
        rows = -(-m // 128) * 128
        a, d = (fp8(rows, K), scales(rows)), torch.empty(rows, N, dtype=torch.bfloat16, device="cuda")
        b = fp8(GROUPS, N, K), torch.rand(GROUPS, N // 128, K // 128, device="cuda")
        layout = torch.arange(rows, device="cuda", dtype=torch.int32) // 128 * GROUPS * 128 // rows
        return lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout)

    return [made(m) for m in ROWS]


def child(operation: str) -> None:
    """One process: prints the seconds of imports on top of torch, of each call, and what the calls found."""
    import torch

    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    import deep_gemm

    getattr(deep_gemm, operation.partition(".")[0])
    importlib.import_module("cuda.bindings.driver")
    imported = time.perf_counter() - start
    times = []
    every = calls(operation)
    known = set(sys.modules)
    new: Counter[str] = Counter()
    for call in every:
        before = deep_gemm.cache_info()["statistics"]["hits"]["pack"] if times else 0
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        took = time.perf_counter() - start
        if not times:
            new = Counter(name.partition(".")[0] for name in set(sys.modules) - known)
        times.append([took, deep_gemm.cache_info()["statistics"]["hits"]["pack"] - before])
    statistics_ = deep_gemm.cache_info()["statistics"]
    strange = sorted(name for name in ("jinja2", "deep_gemm.jit.source") if name in sys.modules)
    found = {
        "compiled": statistics_["compilations"],
        "strange": strange,
        "imports": new,
        "parts": deep_gemm.debug_info()["plans"][0]["seconds"],
    }
    from deep_gemm.bench import provenance

    print(json.dumps({"import": imported, "calls": times, "origin": provenance.environment(), **found}))


def row_of(
    operation: str,
    calls_ms: Sequence[float],
    kernels: Sequence[int],
    parts: Mapping[str, float],
    imported: float,
    runs: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """A row: medians of the processes, in milliseconds, and how many kernels each call found in the pack."""
    row: dict[str, Any] = {"mode": "first calls", "op": operation, "m": ROWS, "kernels": kernels}
    row |= {"ms": [round(took, 3) for took in calls_ms], "import_ms": round(imported, 3)}
    row |= {f"{what}_ms": round(took, 3) for what, took in parts.items()}
    return row | {"processes": len(runs)} | runs[0]["origin"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operation", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--pack", type=lambda text: Path(text).absolute(), help="a pack, where the wheel has none")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, help="append rows to this file")
    options = parser.parse_args()
    if options.operation:
        child(options.operation)
        return 0
    from deep_gemm.bench.run import append
    from deep_gemm.settings import child_environment

    late = 0
    bytecode = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, bytecode)
    for operation in OPERATIONS:
        runs = []
        for _ in range(1 + options.repeats):
            with tempfile.TemporaryDirectory() as empty:
                environment = child_environment("DG_JIT_PRECOMPILED", "DG_JIT_SHIPPED")
                environment |= {"DG_JIT_FORBID_COMPILE": "1", "DG_JIT_CACHE_DIR": str(Path(empty, "cache"))}
                environment |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": bytecode}
                environment |= {"DG_JIT_PRECOMPILED": str(options.pack)} if options.pack else {}
                command = [sys.executable, __file__, operation]
                done = subprocess.run(command, capture_output=True, text=True, cwd=empty, env=environment, timeout=120)
                if done.returncode:
                    print(f"{operation}: {done.stderr[-2000:]}")
                    return 2
                runs.append(json.loads(done.stdout.splitlines()[-1]))
        del runs[0]
        median = [statistics.median(run["calls"][at][0] for run in runs) * 1e3 for at in range(len(ROWS))]
        found = [run[1] for run in runs[0]["calls"]]
        new = [took for took, count in zip(median[1:], found[1:], strict=True) if count]
        imported = statistics.median(run["import"] for run in runs) * 1e3
        strange = sorted({name for run in runs for name in run["strange"]})
        took = {what: statistics.median(run["parts"][what] for run in runs) * 1e3 for what in PARTS}
        parts = [f"{told} {took[what]:.2f}" for what, told in PARTS.items()]
        if options.output:
            append(options.output, row_of(operation, median, found, took, imported, runs))
        print(
            f"{operation}: import {imported:.1f} ms; first call {median[0]:.2f} ms ({', '.join(parts)}); further "
            f"kernels {', '.join(f'{took:.2f}' for took in new) or 'none'} ms; compiled {runs[0]['compiled']}"
            f"; modules imported in the first call: {runs[0]['imports'] or 'none'}"
            + (f"; imported {', '.join(strange)}" if strange else ""),
            flush=True,
        )
        late += (median[0] > LIMITS["first"]) + sum(took > LIMITS["further"] for took in new) + bool(strange)
    print(
        f"{'all within' if not late else f'{late} over'} the limits: {LIMITS['first']:g} ms, {LIMITS['further']:g} ms"
    )
    return bool(late)


if __name__ == "__main__":
    sys.exit(main())
