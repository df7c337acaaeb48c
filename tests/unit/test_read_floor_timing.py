"""Timing of the read floor, without a GPU: the launches, the rows that have it, and the bytes that the kernel reads, by
evaluating the expressions in its source."""

import importlib.resources
import re
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deep_gemm.aot.workload import GemmShape
from deep_gemm.bench import backends, floor, run
from deep_gemm.testing import timing

SOURCE = floor.request("sm_90a").source


def expression(name: str) -> CodeType:
    """The kernel's expression for `name`, as Python code over `cta`, `ctas`, `step` and `start`."""
    found = re.search(rf"const u\d+ {name} = ([^;]+);", SOURCE)
    assert found, f"the kernel has no constant called {name}"
    text = re.sub(r"static_cast<u\d+>", "", found[1]).replace("/", "//")
    for there, here in (("blockIdx.x", "cta"), ("gridDim.x", "ctas"), ("from", "start")):
        text = re.sub(rf"\b{re.escape(there)}\b", here, text)
    return compile(re.sub(r"^(.+?) \? (.+) : (.+)$", r"(\2) if (\1) else (\3)", text), name, "eval")


PIECES, COUNT, FROM, SIZE = map(expression, ("pieces", "count", "from", "size"))


def copies(size: int, ctas: int) -> list[list[tuple[int, int]]]:
    """(first byte, bytes) of each copy of each CTA."""
    known = {"bytes": size, "piece": floor.piece_bytes(size, ctas), "ctas": ctas}
    known["pieces"] = eval(PIECES, {}, known)
    found = []
    for cta in range(ctas):
        here = known | {"cta": cta}
        starts = [eval(FROM, {}, here | {"step": step}) for step in range(eval(COUNT, {}, here))]
        found.append([(start, eval(SIZE, {}, here | {"start": start})) for start in starts])
    return found


@given(st.integers(1, 1 << 17), st.integers(1, 160))
def test_copies_of_the_kernel_cover_every_byte_once_and_fit_a_stage(units: int, ctas: int) -> None:
    size = units * 16
    found = copies(size, ctas)
    end = 0
    for start, length in sorted(copy for mine in found for copy in mine):
        assert start == end
        assert 0 < length <= floor.STAGE_BYTES
        assert start % floor.UNIT == length % 16 == 0  # a bulk copy needs multiples of 16
        end = start + length
    assert end == size
    counts = [len(mine) for mine in found]
    assert max(counts) - min(counts) <= 1
    most, piece = max(counts), floor.piece_bytes(size, ctas)
    assert most * piece < size / ctas + (most + 1) * floor.UNIT  # the CTA that reads most has its share, rounded up
    assert most <= -(-size // (ctas * floor.STAGE_BYTES))


@given(st.integers(1, 1 << 24), st.integers(1, 160))
def test_shared_memory_holds_all_pieces_that_are_under_way(units: int, ctas: int) -> None:
    size = units * 16
    piece, pieces = floor.piece_bytes(size, ctas), -(-size // floor.piece_bytes(size, ctas))
    most = -(-pieces // ctas)
    stages, rest = divmod(floor.shared_bytes(size, ctas, overlapped=True) - floor.BARRIER_BYTES, piece)
    assert rest == 0
    assert min(most, floor.STAGES) <= stages <= floor.STAGES
    assert floor.shared_bytes(size, ctas, overlapped=True) <= floor.shared_bytes(size, ctas) <= 227 << 10
    assert floor.shared_bytes(size, ctas) == floor.BARRIER_BYTES + floor.STAGES * floor.STAGE_BYTES


@pytest.mark.parametrize(("overlapped", "shared"), [(False, 256 + 12 * 16384), (True, 256 + 256)])
def test_launches_are_a_decoders_and_go_through_all_weights(
    overlapped: bool, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    captured: list[tuple[Any, int, Any]] = []
    times = iter([9000.0] * 2 + [640.0] * 5 + [704.0] * 5)  # the first two replays do not count
    stream = SimpleNamespace(cuda_stream=7)

    def launch(function: Any, shape: Any, at: int, arguments: Any) -> Any:
        made.append((function, shape, at, arguments))
        return made[-1]

    def capture(calls: Any, count: int, on: Any) -> Any:
        captured.append((calls, count, on))
        return SimpleNamespace(replay="its replay")

    monkeypatch.setattr(floor, "_load", lambda device: "kernel")
    monkeypatch.setattr(floor, "Launch", launch)
    monkeypatch.setattr(floor.options, "num_sms_for", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(timing, "capture", capture)
    monkeypatch.setattr(timing, "elapsed_us", lambda work: next(times) if work == "its replay" else None)
    weights = [torch.zeros(208, 144, dtype=torch.float8_e4m3fn) for _ in range(3)]
    assert floor.read_floor_us(weights, overlapped) == 10.5  # the median, divided by 64 launches
    assert captured == [(made, 64, stream)]
    assert [arguments[0] for *_, arguments in made] == [("ptr", x.data_ptr()) for x in weights]
    for function, shape, at, arguments in made:
        assert (function, at) == ("kernel", 7)
        assert (shape.grid, shape.block, shape.dynamic_shared) == ((132, 1, 1), floor.THREADS, shared)
        assert shape.pdl  # otherwise each would begin after the one before has ended
        assert arguments[1:3] == [("i64", 208 * 144), ("u32", floor.piece_bytes(208 * 144, 132))]


@pytest.mark.parametrize(
    ("m", "mode", "runs", "has"),
    [
        *((1, "graph", True, True), (64, "graph", True, True), (65, "graph", True, False)),
        *((1, "flush", True, False), (1, "graph", False, False)),
    ],
)
def test_graphs_of_few_tokens_are_measured_beside_the_floor_of_their_weights(
    m: int, mode: str, runs: bool, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[Any, bool]] = []
    sets = [SimpleNamespace(b=SimpleNamespace(is_cuda=True, get_device=lambda: 0)) for _ in range(2)]

    def read_floor_us(weights: Any, overlapped: bool = False) -> float:
        read.append((weights, overlapped))
        return 3.0 if overlapped else 4.0

    monkeypatch.setattr(backends, "make_operands", lambda shape, count: sets)
    monkeypatch.setattr(backends, "usable", lambda name, x: None)
    monkeypatch.setattr(backends, "own_weights", lambda x: x)
    monkeypatch.setattr(backends, "ours_promised", lambda x: None)
    monkeypatch.setattr(backends, "retract", lambda x: None)
    monkeypatch.setitem(backends.BACKENDS, "ours", lambda x: lambda: None)
    monkeypatch.setattr(timing, "graph", lambda calls: dict.fromkeys(calls, 5.0))
    monkeypatch.setattr(timing, "flush", lambda calls: dict.fromkeys(calls, 5.0))
    monkeypatch.setattr(floor, "read_floor_us", read_floor_us)
    monkeypatch.setattr(floor, "runs_on", lambda device: runs)
    row = run.measure(GemmShape(m, 208, 144), mode, ("ours",))
    assert read == ([([x.b for x in sets], False), ([x.b for x in sets], True)] if has else [])
    found = [row.get(name) for name in ("us_floor", "us_floor_overlapped", "floor_fraction")]
    assert found == ([4.0, 3.0, 0.8] if has else [None] * 3)


def test_a_wheel_has_the_kernel() -> None:
    """CI runs this test on the built wheel."""
    assert (importlib.resources.files("deep_gemm.bench") / "read_floor.cu").is_file()
