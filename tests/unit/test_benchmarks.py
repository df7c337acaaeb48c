"""The benchmarks' own arithmetic: shapes, rows, budgets, summaries. Timing itself needs a GPU."""

from __future__ import annotations

import importlib.resources
import math
import re
import types
from collections.abc import Callable
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import casts
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deep_gemm.aot.workload import GemmShape
from deep_gemm.bench import backends, floor, provenance, run, shapes, summary
from deep_gemm.testing import timing


def test_random_shapes_are_the_same_for_a_seed_and_spread_evenly_in_the_logarithm() -> None:
    first = shapes.log_uniform(400, seed=3)
    assert first == shapes.log_uniform(400, seed=3)
    assert first != shapes.log_uniform(400, seed=4)
    assert all(1 <= s.m <= 8192 and 64 <= s.n <= 32768 and 128 <= s.k <= 16384 for s in first)
    assert all(s.n % 16 == 0 and s.k % 16 == 0 for s in first)
    # Half of the logarithm's range lies below sqrt(8192).
    assert 0.4 < sum(s.m < 90 for s in first) / len(first) < 0.6
    # By choice a third each are multiples of 16, 64 and 128, N and K independently; some are multiples of more by
    # chance.
    for sizes in ([s.n for s in first], [s.k for s in first]):
        assert 0.2 < sum(size % 64 != 0 for size in sizes) / len(first) < 1 / 3
        assert 0.3 < sum(size % 128 == 0 for size in sizes) / len(first) < 0.7
        assert any(size % 128 == 64 for size in sizes)
    assert any(s.n % 64 and s.k % 128 == 0 for s in first)
    assert any(s.n % 128 == 0 and s.k % 64 for s in first)


def test_named_sets_hold_legal_shapes() -> None:
    for name, make in shapes.SETS.items():
        found = make()
        assert found, name
        assert all(s.m >= 1 and s.n >= 1 and s.k % 16 == 0 for s in found), name
    assert len(shapes.reference()) == 28
    assert len(shapes.public()) == 7 * 12
    assert set(shapes.READ_FLOOR_US) == set(shapes.REFERENCE_NK)
    # A read cannot be faster than the data sheet's bandwidth.
    assert all(us > n * k / 4.8e6 for (n, k), us in shapes.READ_FLOOR_US.items())


def test_a_row_says_how_fast_and_against_what() -> None:
    row = run.make_row(GemmShape(4096, 4096, 7168), "flush", {"ours": 200.0, "tensorwise": 180.0}, {"blockwise": "no"})
    assert row["ratio_tensorwise"] == 0.9
    assert row["tflops"] == pytest.approx(2 * 4096 * 4096 * 7168 / 200e-6 / 1e12, rel=1e-3)
    assert "ratio_blockwise" not in row
    assert row["refused_blockwise"] == "no"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[GemmShape, str]]:
    done: list[tuple[GemmShape, str]] = []

    def measure(shape: GemmShape, mode: str, names: Any) -> run.Row:
        done.append((shape, mode))
        return run.make_row(shape, mode, {"ours": 10.0, "tensorwise": 5.0 * len(done)}, {})

    monkeypatch.setattr(run, "measure", measure)
    return done


def test_rows_are_on_disk_before_the_next_is_measured(measured: list[Any], tmp_path: Path) -> None:
    path, seen = tmp_path / "results" / "rows.jsonl", []
    work = [GemmShape(1, 128, 128), GemmShape(4096, 128, 128)]
    plan = run.Run(
        work, ("flush", "graph"), output=path, progress=lambda text: seen.append(path.exists() and len(run.load(path)))
    )
    rows = plan.execute()
    # Graph mode is for small M.
    assert [(row["m"], row["mode"]) for row in rows] == [(1, "flush"), (4096, "flush"), (1, "graph")]
    assert seen == [0, 1, 2, 3]  # the first text is about shapes that are left out
    assert run.load(path) == rows
    assert {"device", "driver", "torch", "date", "source_digest"} <= set(rows[0])


def test_the_time_limit_leaves_out_the_rest_and_says_what(measured: list[Any]) -> None:
    plan = run.Run([GemmShape(1, 128, 128)], seconds=-1.0, progress=lambda text: None)
    assert plan.execute() == []
    assert plan.left_out == ["1 x 128 x 128 flush"]
    assert not measured


def test_back_to_back_are_prefill_and_whatever_meets_the_limit_of_power(measured: list[Any]) -> None:
    told: list[str] = []
    work = [GemmShape(64, 128, 128), GemmShape(1000, 128, 128), GemmShape(263, 30272, 15104), GemmShape(999, 128, 128)]
    run.Run(work, ("steady",), progress=told.append).execute()
    assert [shape.m for shape, _ in measured] == [1000, 263]
    assert re.match(r"steady: 2 of 4 shapes .*1000 tokens.*100 GFLOP", told[0])
    assert len(told) == 3


def test_a_graph_row_says_what_the_promise_and_the_floor_come_to() -> None:
    us = {"ours": 5.0, "ours_unpromised": 6.0, "tensorwise": 9.0}
    row = run.make_row(GemmShape(1, 2112, 7168), "graph", us, {})
    assert (row["us"], row["us_unpromised"]) == (5.0, 6.0)
    assert (row["ratio_tensorwise"], row["ratio_tensorwise_unpromised"]) == (1.8, 1.5)
    assert row["floor_fraction"] == pytest.approx(3.8 / 5.0)
    # No floor is known for other weights, and it does not apply to other modes.
    assert "floor_fraction" not in run.make_row(GemmShape(1, 2112, 7184), "graph", us, {})
    assert "floor_fraction" not in run.make_row(GemmShape(1, 2112, 7168), "flush", us, {})


def flush_rows(*pairs: tuple[int, float]) -> list[run.Row]:
    return [
        run.make_row(GemmShape(m, 128, 128), "flush", {"ours": 10.0, "tensorwise": 10.0 * ratio}, {})
        for m, ratio in pairs
    ]


def test_summary() -> None:
    assert summary.geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert math.isnan(summary.geometric_mean([]))
    small, middle = summary.summary(flush_rows((1, 0.5), (64, 2.0), (128, 3.0)))
    assert small == {
        "mode": "flush",
        "range": "M <= 64",
        "against": "tensorwise",
        "shapes": 2,
        "geomean": 1.0,
        "worst": 0.5,
        "worst_shape": "1 x 128 x 128",
    }
    assert middle["geomean"] == 3.0


def test_what_meets_the_limit_of_power_has_a_line_of_its_own() -> None:
    taken = {(4096, 7168, 2048): 4.0, (1000, 128, 128): 1.0, (263, 30272, 15104): 2.0}
    rows = [run.make_row(GemmShape(*mnk), "steady", {"ours": us, "tensorwise": 4.0}, {}) for mnk, us in taken.items()]
    found = {entry["range"]: (entry["shapes"], entry["geomean"]) for entry in summary.summary(rows)}
    assert found == {"M 65-512": (1, 2.0), "M >= 1000": (2, 2.0), summary.LONG: (2, pytest.approx(1.414))}
    assert summary.LONG not in {entry["range"] for entry in summary.summary([row | {"mode": "flush"} for row in rows])}


class Clock:
    """A fake GPU with events: each call takes a given time, in us."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        self.now, self.rests = 0.0, []  # type: tuple[float, list[float]]
        clock = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = clock.now

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) / 1e3

            def synchronize(self) -> None:
                pass

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch, "empty", lambda *_, **__: types.SimpleNamespace(zero_=lambda: self.run(50.0)))
        monkeypatch.setattr(timing.time, "sleep", self.rests.append)
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now * 1e-6)

    def run(self, us: float) -> None:
        self.now += us


def test_only_long_single_calls_rest_and_short_ones_take_more_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, made = Clock(monkeypatch), {"one": 0, "other": 0}

    def call(name: str, us: float) -> Callable[[], None]:
        def run() -> None:
            made[name] += 1
            clock.run(us)

        return run

    us = timing.flush({"one": call("one", 5.0), "other": call("other", 99.0)})
    assert us == pytest.approx({"one": 5.0, "other": 99.0})
    assert made == {"one": 3 + 1 + 90, "other": 3 + 1 + 90}
    assert clock.rests == []
    made.update(one=0, other=0)
    us = timing.flush({"one": call("one", 5.0), "other": call("other", 101.0)})
    assert us == pytest.approx({"one": 5.0, "other": 101.0})
    assert made == {"one": 3 + 1 + 30, "other": 3 + 1 + 30}, "all rest, or those that do would run on a cooler GPU"
    assert clock.rests == [timing.REST_SECONDS] * 3 * 2


def test_the_source_digest_changes_with_the_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def digest(text: str) -> str:
        (tmp_path / "x.cuh").write_text(text)
        return provenance.source_digest()

    assert provenance.source_digest() == provenance.source_digest()
    package = types.SimpleNamespace(__path__=[str(tmp_path)])
    monkeypatch.setattr(provenance.importlib, "import_module", lambda name: package)
    assert digest("a") != digest("b")


def test_what_is_installed_is_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a wheel this checks that no file is missing, and that the digest is the same as for the source tree."""
    installed = provenance.source_digest()
    root = Path(__file__).parents[2]
    tree = {"deep_gemm": "deep_gemm", "deep_gemm.jit": "jit", "deep_gemm.templates": "templates"}

    def from_tree(name: str) -> Any:
        return types.SimpleNamespace(__path__=[str(root / tree[name])])

    monkeypatch.setattr(provenance.importlib, "import_module", from_tree)
    assert provenance.source_digest() == installed


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("rows", 256 * 384 + 4 * 256 * 3), ("columns", 256 * 384 + 4 * 384 * 2), ("blocks", 256 * 384 + 4 * 2 * 3),
        ("blocks transposed", 256 * 384 + 4 * 2 * 3), ("rows and columns", 2 * 256 * 384 + 4 * (256 * 3 + 384 * 2)),
        ("blocks and transpose", 2 * (256 * 384 + 4 * 2 * 3)),
    ],
)  # fmt: skip
def test_the_bytes_of_a_cast_are_its_input_and_its_outputs(name: str, written: int) -> None:
    x = torch.randn(256, 384).bfloat16()
    assert casts.moved(x, casts.CASTS[name](x)) == 2 * 256 * 384 + written


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
