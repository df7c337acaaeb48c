"""The cost of compiling, in CPU seconds and relative to a trial kernel that never changes.

`python benchmarks/compile_cost.py` compiles every kernel of DeepSeek-V3's dense layers through NVRTC. Then it
compiles every kernel of its layers and experts on one of eight GPUs (`--serving`: only these). It writes the costs to
`benchmarks/budgets.json`, beside the limits that tests/unit/test_budgets.py checks.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deep_gemm.bench.shapes import DEEPSEEK_V3
from deep_gemm.jit.binary import BuildRequest

if TYPE_CHECKING:
    from deep_gemm.jit.compilers.base import Compiler
    from deep_gemm.params import KernelParams

MAX_M = 16384
BUDGETS = Path(__file__).with_name("budgets.json")


@functools.lru_cache(maxsize=1)
def trial() -> BuildRequest:
    """The trial kernel, which never changes."""
    return BuildRequest("trial", Path(__file__).with_name("trial_kernel.cu").read_text(), "sm_90a")


def kernels() -> list[KernelParams]:
    """All kernels that DeepSeek-V3's dense layers can need, on any GPU model."""
    from census import dense_layers

    from deep_gemm.aot.build import choose
    from deep_gemm.aot.workload import for_every_m, shapes

    return list(choose(shapes(for_every_m(dense_layers(DEEPSEEK_V3), MAX_M), ())).kernels)


def serving_kernels(step: int = 1) -> list[KernelParams]:
    """All kernels that one of eight GPUs (TP 8, EP 8) can need to serve DeepSeek-V3 with its experts, whatever the
    routing. With `step`, only every `step`-th bucket of M is looked at."""
    from deep_gemm.aot.build import choose
    from deep_gemm.aot.workload import for_every_m, plan, shapes

    layers = [replace(x, ms=x.ms[::step]) for x in for_every_m(plan(DEEPSEEK_V3, 8, 8).served, MAX_M)]
    return list(choose(shapes(layers, ())).kernels)


def size(params: KernelParams) -> int:
    """Bytes in the ring of stages: loops are unrolled over the stages, so kernels with large rings take longest to
    compile."""
    rows, columns = params.config.tile
    return rows * columns * getattr(params.config, "num_stages", 0)


def cpu_seconds(compiler: Compiler, requests: Sequence[BuildRequest], turns: int = 1) -> list[float]:
    """The least CPU time (all threads of this process) of compiling each request, over `turns` turns."""
    from deep_gemm.jit.generator import include_dir

    best = [float("inf")] * len(requests)
    for _ in range(turns):
        for place, one in enumerate(requests):
            start = time.process_time()
            compiler.compile(one.name, one.source, f"{one.name}.cu", compiler.flags(one.arch), include_dir())
            best[place] = min(best[place], time.process_time() - start)
    return best


def nvrtc() -> Compiler:
    """NVRTC, warm: the first compilation of a process opens the library."""
    from deep_gemm.jit.compilers.find import choose
    from deep_gemm.settings import settings

    with settings.override(use_nvrtc=True):
        compiler = choose()
    cpu_seconds(compiler, [trial()])
    return compiler


def sample(work: Sequence[KernelParams]) -> list[KernelParams]:
    """Three kernels that represent all: a small, a medium and a large one."""
    ordered = sorted(work, key=size)
    return [ordered[len(ordered) * part // 6] for part in (1, 3, 5)]


def record(work: Sequence[KernelParams]) -> dict[str, Any]:
    """The cost of kernels: CPU seconds, and relative to the trial kernel, which is compiled beside each of them."""
    from deep_gemm.runtime import engine

    compiler = nvrtc()
    seconds, trials = {}, []
    for params in work:
        request = engine.build_request(params)
        took, beside = cpu_seconds(compiler, [request, trial()], turns=2)
        seconds[request.name] = took
        trials.append(beside)
    unit, slowest = statistics.median(trials), max(seconds, key=seconds.__getitem__)
    sampled = [seconds[engine.build_request(params).name] for params in sample(work)]
    return {
        "compiler": compiler.identity,
        "kernels": len(seconds),
        "cpu_seconds": round(sum(seconds.values()), 1),
        "slowest": slowest,
        "slowest_cpu_seconds": round(seconds[slowest], 2),
        "trial_cpu_seconds": round(unit, 3),
        "mean_in_trials": round(statistics.mean(seconds.values()) / unit, 2),
        "sample_in_trials": round(statistics.mean(sampled) / unit, 2),
        "slowest_in_trials": round(seconds[slowest] / unit, 2),
    }


if __name__ == "__main__":
    budgets = json.loads(BUDGETS.read_text())
    sets = {"compile_recorded": kernels, "serving_recorded": serving_kernels}
    if "--serving" in sys.argv:
        del sets["compile_recorded"]
    for name, of_set in sets.items():
        budgets[name] = record(of_set())
        BUDGETS.write_text(json.dumps(budgets, indent=1) + "\n")
        print(json.dumps({name: budgets[name]}, indent=1))
