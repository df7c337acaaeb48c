"""Python calls of an operation's first call in a process, and of its next M, on a fake H100. Prints JSON.

    python tests/cold_calls.py bf16_gemm_nt

Building, loading and launching are left out, and so is what runs while a module is imported.
"""

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_fakes import FakeGpu

import deep_gemm
from deep_gemm.runtime import engine
from deep_gemm.select import calibration

ROWS = (64, 200)
N, K = 7168, 2048


def calls_of(work: Callable[[], object]) -> int:
    """Python functions that ``work`` enters outside of imports."""
    count = importing = 0

    def seen(frame: Any, event: str, _: Any) -> None:
        nonlocal count, importing
        if frame.f_code.co_name == "_find_and_load" and "importlib" in frame.f_code.co_filename:
            importing += {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and not importing:
            count += 1

    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def fp8(m: int) -> Callable[[], None]:
    a, b = (torch.zeros(rows, K).to(torch.float8_e4m3fn) for rows in (m, N))
    sfa, sfb = torch.ones(K // 128, -(-m // 4) * 4).t()[:m], torch.ones(N // 128, K // 128)
    d = torch.empty(m, N, dtype=torch.bfloat16)
    return lambda: deep_gemm.fp8_gemm_nt((a, sfa), (b, sfb), d)


def bf16(m: int) -> Callable[[], None]:
    a, b, d = (torch.zeros(size, dtype=torch.bfloat16) for size in ((m, K), (N, K), (m, N)))
    return lambda: deep_gemm.bf16_gemm_nt(a, b, d)


def main(operation: str) -> None:
    patch = pytest.MonkeyPatch()
    plan = engine.plan
    FakeGpu(patch)
    binary = SimpleNamespace(name="", key="", layer="", compiler="", source_path="", resources=None, seconds={})
    h100 = "NVIDIA H100 80GB HBM3"
    patch.setattr(engine, "plan", plan)
    patch.setattr(engine, "load", lambda *_: (SimpleNamespace(symbol="", device=0), binary))
    patch.setattr(engine, "calibration_of", lambda device: calibration.for_device(h100, 132, 3350.0))

    def launch(plan: Any, strides: Any, addresses: Any, stream: int, constant: bool, numbers: Any) -> Any:
        plan.launch_plan(strides, True, constant, numbers)
        return lambda: None

    patch.setattr(engine, "launch_record", launch)
    make = {"fp8_gemm_nt": fp8, "bf16_gemm_nt": bf16}[operation]
    print(json.dumps([calls_of(make(m)) for m in ROWS]))


if __name__ == "__main__":
    main(sys.argv[1])
