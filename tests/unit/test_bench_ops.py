"""Benchmarks of the 16-bit operations, on the CPU: operands in their forms, peers, rows, surveys."""

import contextlib
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from gpu_fakes import FakeGpu
from hypothesis import given
from hypothesis import strategies as st

import deep_gemm
from deep_gemm import arch, select
from deep_gemm.aot.workload import GemmShape
from deep_gemm.arch import SM90
from deep_gemm.backends import deepgemm
from deep_gemm.bench import backends, result_rows, run, shapes, survey
from deep_gemm.cli.app import app
from deep_gemm.errors import InvalidInputError
from deep_gemm.testing import calc_diff, timing

FP8 = [op for op in shapes.TIMED_OPS if op.startswith("fp8")]
HALF = [op for op in shapes.TIMED_OPS if not op.startswith("fp8")]
WAYS = [("", False), ("", True), ("f32", False), ("f32", True)]
M, N, K = 24, 40, 72


def problem(op: str, output: str = "", accumulate: bool = False, m: int = M) -> GemmShape:
    (found,) = shapes.posed([GemmShape(m, N, K)], op, output, accumulate)
    return found


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.parametrize("op", HALF)
@pytest.mark.parametrize(("output", "accumulate"), WAYS)
def test_sets_share_activations_and_lie_as_the_form_says(op: str, output: str, accumulate: bool) -> None:
    one, other = backends.make_operands(problem(op, output, accumulate), 2, "cpu")
    dtype = torch.bfloat16 if op.startswith("bf16") else torch.float16
    assert one.a.shape == ((K, M) if op[-2] == "t" else (M, K))
    assert one.b.shape == ((K, N) if op[-1] == "n" else (N, K))
    assert one.a.is_contiguous()
    assert one.b.is_contiguous()
    assert (one.a.dtype, one.b.dtype, one.d.dtype) == (dtype, dtype, torch.float32 if output else dtype)
    assert one.a is other.a
    assert not torch.equal(one.b, other.b)
    assert len({x.data_ptr() for x in (one.b, other.b, one.d, other.d)}) == 4
    assert 0.8 < one.b.float().std() < 1.2
    mine = backends.own_weights(one)
    assert torch.equal(mine.b, one.b)
    assert len({x.data_ptr() for x in (one.b, mine.b, one.d, mine.d)}) == 4
    assert (mine.shape.op, mine.accumulate) == (op, accumulate)


@pytest.mark.parametrize("op", HALF)
@pytest.mark.parametrize(("output", "accumulate"), WAYS)
def test_ours_is_the_product_and_a_launch_is_what_it_asks_for(
    op: str, output: str, accumulate: bool, gpu: FakeGpu
) -> None:
    """A survey ranks the spec of the call, and launches with its strides, numbers and addresses."""
    shape = problem(op, output, accumulate)
    (x,) = backends.make_operands(shape, 1, "cpu")
    backends.ours(x)()
    (launched,) = gpu.launched
    assert survey.spec_of(shape, 132) == launched.spec
    step, at = backends.placed(x, 0, {})
    assert (step.strides, step.numbers, at) == (launched.strides, launched.numbers, launched.at)


@pytest.mark.parametrize("op", FP8)
def test_a_launch_of_fp8_is_what_a_call_asks_for(gpu: FakeGpu, op: str) -> None:
    for k in (128, 256):
        shape = GemmShape(M, N, k, op=op)
        (x,) = backends.make_operands(shape, 1, "cpu")
        backends.ours(x)()
        assert gpu.launched[-1].spec == survey.spec_of(shape, 132)
        step, at = backends.placed(x, 0, {})
        assert (step.strides, at) == (gpu.launched[-1].strides, gpu.launched[-1].at)


def test_launches_share_scratch_memory(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of K of few rows meet there, on other GPUs than Hopper."""
    monkeypatch.setattr(arch, "for_device", lambda device: arch.SM80)
    memory: dict[str, torch.Tensor] = {}
    for x in backends.make_operands(GemmShape(16, N, 512, op="bf16_gemm_nt"), 2, "cpu"):
        _, at = backends.placed(x, 0, memory)
        assert at.keys() == {"a", "b", "d", "memory"}
        assert at["memory"] == memory["memory"].data_ptr()
    assert memory["memory"].numel() > 16 * N * 4


@pytest.mark.parametrize("op", HALF)
@pytest.mark.parametrize("accumulate", [False, True])
def test_peers_compute_the_same(op: str, accumulate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    (x,) = backends.make_operands(problem(op, "", accumulate), 1, "cpu")
    a, b = (x.a.t() if op[-2] == "t" else x.a).float(), (x.b.t() if op[-1] == "t" else x.b).float()
    for name in ("ours", "cublaslt"):
        assert backends.usable(name, x) is None
        assert calc_diff(x.d, a @ b) < 1e-3
        backends.BACKENDS[name](x)()
        assert calc_diff(x.d, 2 * (a @ b) if accumulate else a @ b) < 1e-3
    monkeypatch.setattr(backends, "BACKENDS", dict(backends.BACKENDS))
    monkeypatch.setattr(deepgemm, "_loaded", [])
    assert backends.names_for(problem(op)) == ("ours", "cublaslt")
    asked: list[Any] = []
    backends.add_deepgemm(SimpleNamespace(**{op: lambda *given: asked.append(given)}))
    assert backends.names_for(problem(op)) == ("ours", "cublaslt", "deepgemm")
    assert (backends.usable("deepgemm", x) or "").startswith("its result differs from ours by")
    (given,) = asked
    assert [id(tensor) for tensor in given] == [id(t) for t in (x.a, x.b, x.d, *([x.d] if accumulate else []))]
    backends.add_deepgemm(SimpleNamespace())
    assert op in (backends.usable("deepgemm", x) or "")


@pytest.mark.parametrize("op", ["fp8_gemm_nt_1d1d", "fp8_gemm_nt_rowwise"])
def test_scales_of_other_kinds_are_timed_as_calls_have_them(op: str) -> None:
    (shape,) = shapes.posed([GemmShape(32, 48, 256)], op)
    x, y = backends.make_operands(shape, 2, "cpu")
    assert x.a is y.a
    assert x.b is not y.b
    backends.ours(x)()
    once = x.d.clone()
    backends.ours(x)()
    assert torch.equal(x.d, 2 * once if op == "fp8_gemm_nt_1d1d" else once), "weight gradients add up"
    assert once.dtype == (torch.float32 if op == "fp8_gemm_nt_1d1d" else torch.bfloat16)


@given(st.sampled_from(shapes.TIMED_OPS), st.sampled_from(WAYS), st.tuples(*[st.integers(1, 9999)] * 3), st.text("ab"))
def test_rows_tell_their_shape(op: str, way: tuple[str, bool], mnk: tuple[int, int, int], source: str) -> None:
    output, accumulate = ("", False) if op.startswith("fp8") else way
    (shape,) = shapes.posed([GemmShape(*mnk, source)], op, output, accumulate)
    row = json.loads(json.dumps(result_rows.said(shape)))
    assert result_rows.shape_of(row) == shape
    assert set(row) - set("mnk") - {"source"} == {
        *(["op"] if op != "fp8_gemm_nt" else []),
        *(["output"] if output else []),
        *(["accumulate"] if accumulate else []),
    }
    bits = 2 if op.startswith("fp8") else (4 if output else 2) * (2 if accumulate else 1)
    assert shape.bytes_moved() - GemmShape(*mnk, source, op).bytes_moved() == (bits - 2) * mnk[0] * mnk[1]


@pytest.mark.parametrize(
    "more", [{"op": "gemm"}, {"op": "bf16_gemm_nt", "output": "f64"}, {"output": "f32"}, {"accumulate": "yes"}]
)
def test_rows_of_nothing_that_is_timed_are_refused(more: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"mode": "flush", "m": 1, "n": 8, "k": 8, "times": {"a": 1.0}, "selected": "a"} | more))
    with pytest.raises(InvalidInputError, match=r"in line 1 of .*rows.jsonl"):
        run.load(path)
    with pytest.raises(InvalidInputError, match=r"in line 1 of .*rows.jsonl"):
        survey.load([path])


@pytest.mark.parametrize("fails", [False, True])
def test_the_promise_is_of_the_weights_alone_and_taken_back(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given before the first call, and taken back after an error too."""
    done: list[tuple[str, int]] = []
    make, call = backends.make_operands, deep_gemm.bf16_gemm_nn

    def graph(calls: Any) -> dict[str, float]:
        for each in itertools.chain(*calls.values()):
            each()
        if fails:
            raise RuntimeError("out of memory")
        return {name: float(len(name)) for name in calls}

    def noted(what: str, b: torch.Tensor) -> None:
        done.append((what, b.data_ptr()))

    monkeypatch.setattr(deep_gemm, "declare_constant", lambda b: noted("declare", b), raising=False)
    monkeypatch.setattr(deep_gemm, "retract_constant", lambda b: noted("retract", b), raising=False)
    monkeypatch.setattr(deep_gemm, "bf16_gemm_nn", lambda a, b, *rest: (noted("call", b), call(a, b, *rest)))
    monkeypatch.setattr(backends, "make_operands", lambda shape, sets: make(shape, min(sets, 2), "cpu"))
    monkeypatch.setattr(timing, "graph", graph)
    with contextlib.suppress(RuntimeError):
        row = run.measure(problem("bf16_gemm_nn", accumulate=True), "graph")
    declared = [at for what, at in done if what == "declare"]
    assert len(declared) == 2
    for at in declared:
        assert done.index(("declare", at)) < done.index(("call", at))
    assert len({at for what, at in done if what == "call"}) == 4, "the unpromised sets are others"
    assert done[-2:] == [("retract", at) for at in declared]
    if not fails:
        assert (row["op"], row["accumulate"], row["us"], row["us_cublaslt"]) == ("bf16_gemm_nn", True, 4.0, 8.0)
        assert (row["ratio_cublaslt"], row["ratio_cublaslt_unpromised"]) == (2.0, 0.5333)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--accumulate",), "is part of its name"),
        (("--op", "bf16_gemm_nt", "--against", "blockwise"), "bf16_gemm_nt is not timed against blockwise"),
        (("--op", "gemm"), "'gemm' is not one of"),
        (("--op", "bf16_gemm_nt", "--deepgemm", "nowhere"), "There is no package deep_gemm in"),
    ],
)
def test_what_cannot_be_timed_is_said(options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from deep_gemm.cli import bench

    monkeypatch.setattr(bench, "_need_gpu", lambda modes: None)
    result = CliRunner().invoke(app, ["bench", "--shape", "64x512x256", *options])
    assert result.exit_code != 0
    assert message in result.output


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_survey_launches_what_a_call_would(accumulate: bool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, made, empty = problem("bf16_gemm_nn", "f32", accumulate), [], torch.empty
    make = backends.make_operands

    def operands(shape: GemmShape, sets: int) -> list[Any]:
        made.extend(make(shape, min(sets, 2), "cpu"))
        return list(made)

    monkeypatch.setattr(backends, "make_operands", operands)
    monkeypatch.setattr(torch, "empty", lambda *size, device, **how: empty(*size, **how))
    monkeypatch.setattr(survey, "FLUSH_BYTES", 1)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(survey.engine, "forced_plan", lambda asked, *_: SimpleNamespace(spec=asked))
    asked = survey.spec_of(shape, SM90.num_sms)
    config = select.legal(asked, SM90)[0]
    ((name, timer),) = survey.timers_of(shape, asked, [config], "promised", SM90, 0)
    for call in timer.calls:
        call()
    launched = list(gpu.launched)
    for x in made:
        backends.ours(x)()
    called = gpu.launched[len(launched) :]
    assert [each._replace(constant=False) for each in launched] == called
    assert all(each.constant for each in launched)
    assert name == survey.name_of(config, asked, SM90)
