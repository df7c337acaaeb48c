"""Cost rows without a GPU: calls elsewhere, phases of a build, how many kernels there are."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import census
import costs
import first_calls
import phases
import pytest
import torch

from deep_gemm.aot import build
from deep_gemm.aot.workload import GemmShape
from deep_gemm.bench import backends
from deep_gemm.errors import CompileError
from deep_gemm.jit.builder import BuildRequest
from deep_gemm.jit.compilers.base import Compiled
from deep_gemm.jit.resources import Resources
from deep_gemm.kernels import registry
from deep_gemm.params import KernelParams


@pytest.fixture
def operands() -> backends.Operands:
    a, b = (torch.zeros(rows, 128).to(torch.float8_e4m3fn) for rows in (4, 8))
    d = torch.empty(4, 8, dtype=torch.bfloat16)
    return backends.Operands(GemmShape(4, 8, 128), a, b, d, torch.ones(4, 1), torch.ones(1, 1))


def test_each_call_elsewhere_has_new_places(operands: backends.Operands, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def note(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...], d: torch.Tensor) -> None:
        assert [x.shape for x in (*a, d)] == [(4, 128), (4, 1), (4, 8)]
        assert b == (operands.b, operands.sfb)
        seen.append((a[0].data_ptr(), a[1].data_ptr(), d.data_ptr()))

    monkeypatch.setattr("deep_gemm.fp8_gemm_nt", note)
    call = costs.at_new_addresses(operands, places=5)
    for _ in range(6):
        call()
    for places in zip(*seen, strict=True):
        assert [place - places[0] for place in places] == [0, 16, 32, 48, 64, 0]
    # More than the calls that are timed: warm-up, and the rounds of every pass.
    assert costs.PLACES > 6 * (20 + 200 * 20)


NVRTC_TABLE = """File name, phase name, metric, unit
x.cu, CUDA C++ Frontend, 37, ms
x.cu, NVVM Optimizer, 173.5, ms
x.cu, PTX Translation, 101, ms
"""
NVCC_TABLE = """source file name , phase name , phase input files , phase output file , arch , tool, metric , unit
/t/x.cu , gcc (preprocessing 1) , /t/x.cu  , /t/x.ii , compute_90a , nvcc , 99.5370 , ms
/t/x.cu , cicc , /t/x.ii  , /t/x.ptx , compute_90a , nvcc , 443.9980 , ms
/t/x.cu , ptxas , /t/x.ptx  , /t/kernel.cubin , sm_90a , nvcc , 89.2160 , ms
 , nvcc (driver) ,  , /t/kernel.cubin ,  , nvcc , 0.3510 , ms
"""


def test_the_tables_of_both_compilers_are_read() -> None:
    assert phases.parse(NVRTC_TABLE) == {"frontend_ms": 37.0, "optimiser_ms": 173.5, "ptxas_ms": 101.0}
    assert phases.parse(NVCC_TABLE) == {"preprocess_ms": 99.537, "optimiser_ms": 443.998, "ptxas_ms": 89.216}
    assert phases.parse("ptxas info : Compile time = 1 ms") == {}


class FakeCompiler:
    """Writes `table` to the file that -time names, or does not know the option."""

    kind, identity = "nvrtc", "fake 1"

    def __init__(self, table: str | None) -> None:
        self.table = table

    def flags(self, arch: str) -> tuple[str, ...]:
        return ("-O3",)

    def compile(self, name: str, source: str, source_path: str, flags: list[str], include_dir: Any) -> Compiled:
        timed = [flag.split("=", 1)[1] for flag in flags if flag.startswith("--time=")]
        if timed and self.table is None:
            raise CompileError("unknown option")
        for path in timed:
            with open(path, "w") as file:
                file.write(self.table or "")
        return Compiled(b"cubin", None, "", Resources(1, 0, 0, 0, 0, 0), {"compile": 0.4, "ptxas": 0.1})


def smallest() -> KernelParams:
    return registry()["transpose_scales"].cases()[0]


def test_a_build_is_broken_down() -> None:
    loaded: list[bytes] = []

    def load(cubin: bytes, request: BuildRequest, shared: int) -> float:
        loaded.append(cubin)
        return 2.0

    row = phases.breakdown(smallest(), FakeCompiler(NVRTC_TABLE), load, repeats=3)  # type: ignore[arg-type]
    assert loaded == [b"cubin"] * 3
    assert (row["frontend_ms"], row["optimiser_ms"], row["ptxas_ms"], row["load_ms"]) == (37.0, 173.5, 101.0, 2.0)
    assert row["other_ms"] == pytest.approx(400 - 311.5)
    assert row["us"] == pytest.approx(1e3 * sum(row[name] for name in phases.COLUMNS if name in row), abs=1.0)


def test_a_compiler_that_tells_only_of_ptxas() -> None:
    row = phases.breakdown(smallest(), FakeCompiler(None), repeats=1)  # type: ignore[arg-type]
    assert row["ptxas_ms"] == pytest.approx(100.0)
    assert row["optimiser_ms"] == pytest.approx(300.0)
    assert "load_ms" not in row
    assert "frontend_ms" not in row


def test_four_kernels_from_small_to_large() -> None:
    found = [params.config for params in phases.kernels()]
    sizes = [config.block_m * config.block_n for config in found]
    assert len(set(found)) == 4
    assert sizes == sorted(sizes)
    assert (found[2].block_m, found[2].block_n) == (128, 128)
    assert all(config.cluster_size == 1 for config in found)


def fake_kernels(n: int, k: int) -> Callable[[int], list[KernelParams]]:
    small, *_, large = registry()["sm90_fp8_gemm"].cases()
    return lambda m: [small] if m <= 64 else [small, large]


def test_counting_kernels_with_sizes_at_run_time_and_compiled_in() -> None:
    row = census.count([(512, 1024), (576, 7168), (512, 1024)], fake_kernels)
    assert row["kernels"] == 2
    assert row["kernels_nk"] == 4
    rows = list(census.kernels(fake_kernels))
    assert len(rows) == 7 + 2
    assert [row["kernels_nk"] for row in rows[:7]] == [2] * 7
    assert rows[7]["kernels"] == 2
    assert rows[7]["kernels_nk"] == 2 * 9


def test_kernel_counts_of_the_selector() -> None:
    """The census asks the selector as a call does."""
    wanted = [p for p in build.choose([GemmShape(48, 576, 7168)]).kernels if registry()[p.kernel].mma_instruction]
    assert census.kernel_at(576, 7168)(48) == wanted
    assert census.specialised(wanted[0], 576, 7168).shape == (0, 576, 7168)


def test_sizes_compiled_in_are_timed_beside_those_at_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def operands(shape: GemmShape, sets: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(a=shape, sfa=1, b=2, sfb=3, d=4)]

    def note(a: Any, b: Any, d: Any, compiled_dims: str) -> None:
        asked.append(((a[0].m, a[0].n, a[0].k), compiled_dims))

    def flush(calls: dict[str, Callable[[], None]]) -> dict[str, float]:
        for call in calls.values():
            call()
        return {name: 4.0 if name else 5.0 for name in calls}

    monkeypatch.setattr(backends, "make_operands", operands)
    monkeypatch.setattr("deep_gemm.fp8_gemm_nt", note)
    monkeypatch.setattr(costs.timing, "flush", flush)
    rows = list(costs.compiled_in_sizes())
    assert len(rows) == 28
    assert (
        rows[0].items()
        >= {"mode": "dims", "what": "16 x 2112 x 7168", "us": 5.0, "us_nk": 4.0, "ratio_nk": 0.8}.items()
    )
    assert asked[:2] == [((16, 2112, 7168), ""), ((16, 2112, 7168), "nk")]


def test_first_calls_leave_a_row_for_each_operation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Medians of the processes but the first, with the kernels of each call and where they were measured."""
    path, runs = tmp_path / "rows.jsonl", iter(range(100))

    def process(command: list[str], **_: Any) -> SimpleNamespace:
        seconds = {0: 1.0, 1: 0.001, 2: 0.002, 3: 0.006}[next(runs) % 4]
        found = {
            "import": 0.05,
            "calls": [[seconds, 2], *[[0.001, 1]] * 5],
            "compiled": 0,
            "strange": [],
            "imports": {},
        }
        found |= {"parts": {"select": 0.003, "build_and_load": 0.004}, "origin": {"device": "a card", "date": "today"}}
        return SimpleNamespace(returncode=0, stdout=f"a warning\n{json.dumps(found)}\n", stderr="")

    monkeypatch.setattr(first_calls.subprocess, "run", process)
    monkeypatch.setattr(sys, "argv", ["first_calls.py", "--repeats", "3", "--output", str(path)])
    assert first_calls.main() == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["op"] for row in rows] == list(first_calls.OPERATIONS)
    assert rows[0] == {
        "mode": "first calls",
        "op": "fp8_gemm_nt",
        "m": list(first_calls.ROWS),
        "kernels": [2, 1, 1, 1, 1, 1],
        "ms": [2.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        "import_ms": 50.0,
        "select_ms": 3.0,
        "build_and_load_ms": 4.0,
        "processes": 3,
        "device": "a card",
        "date": "today",
    }
