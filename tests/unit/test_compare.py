"""`compare` and `deep-gemm compare`: what is checked, what becomes a row, how rows are ranked, and what is printed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from comparisons import H100, comparison, registry_is_left_alone, timing
from hypothesis import given
from hypothesis import strategies as st

from deep_gemm import backends
from deep_gemm.backends import accuracy, runner
from deep_gemm.backends.results import Comparison, Result
from deep_gemm.cli.app import app
from deep_gemm.errors import InvalidInputError
from deep_gemm.testing import timing as clock

__all__ = ["registry_is_left_alone"]

Add = Callable[[Callable[..., Any]], Any]


@pytest.fixture
def add() -> Add:
    """Registers one more implementation of mul_add, and compares it with the reference."""

    def compare(function: Callable[..., Any]) -> dict[str, Result]:
        backends.kernel("mine", "mul_add")(function)
        found = backends.compare("mul_add", [(4, 16)], ["mine", "torch"])
        return {row.backend: row for row in found.results}

    return compare


def test_what_changes_its_operands_is_wrong_and_harms_no_other(add: Add) -> None:
    def greedy(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x * y + z)
        y.zero_()

    def careless(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, out: torch.Tensor) -> None:
        x.fill_(float("nan"))
        raise RuntimeError("too late")

    for function, status, why in ((greedy, "wrong", "it changes its operands"), (careless, "failed", "too late")):
        rows = add(function)
        assert rows["mine"].status == status
        assert why in rows["mine"].why
        assert rows["mine"].timing is None
        assert rows["torch"].status == "ok", rows["torch"]


def put(x: Any, y: Any, z: Any, out: torch.Tensor) -> None:
    out.copy_(x * y + z)


def half_written(x: Any, y: Any, z: Any, out: torch.Tensor) -> None:
    out[:3].copy_((x * y + z)[:3])


def off(x: Any, y: Any, z: Any, out: torch.Tensor) -> None:
    out.copy_(x * y + z)
    out[2, 5] += 4.0


def broken(x: Any, y: Any, z: Any, out: torch.Tensor) -> None:
    raise RuntimeError("no kernel image\nfor this device")


@pytest.mark.parametrize(
    ("function", "status", "why"),
    [
        (put, "ok", ""),
        (lambda x, y, z, out: x * y + z, "ok", ""),
        (half_written, "wrong", "16 of 64 elements are NaN or infinite, or were not written"),
        (off, "wrong", "1 of 64 elements are off by up to"),
        (broken, "failed", "RuntimeError: no kernel image for this device"),
    ],
)
def test_what_is_wrong_is_a_row_and_the_others_go_on(add: Add, function: Any, status: str, why: str) -> None:
    found = add(function)
    assert found["mine"].status == status
    assert why in found["mine"].why
    assert bool(found["mine"].timing) == (status == "ok")
    assert found["torch"].status == "ok"
    assert found["torch"].timing


def test_a_call_that_fails_only_when_it_is_timed_is_a_row(add: Add) -> None:
    calls = []

    def twice(*operands: Any) -> None:
        calls.append(None)
        if len(calls) > 2:
            raise RuntimeError("gone")
        put(*operands)

    found = add(twice)
    assert (found["mine"].status, found["mine"].why) == ("failed", "while timed: RuntimeError: gone")
    assert found["torch"].timing


def test_an_easier_problem_is_timed_and_not_judged() -> None:
    backends.kernel("mine", "mul_add", easier=True)(lambda x, y, z, out: out.copy_(x * y))
    (row, _) = backends.compare("mul_add", [(4, 16)], ["mine", "torch"]).results
    assert (row.status, row.accuracy, bool(row.timing)) == ("easier", None, True)
    backends.kernel("mine", "mul_add", easier=True)(lambda x, y, z, out: None)
    (row,) = backends.compare("mul_add", [(4, 16)], ["mine"]).results
    assert row.status == "wrong"


def test_a_backend_stands_for_its_variants_and_an_absent_one_for_a_row() -> None:
    assert runner.candidates("fp8_gemm_nt", ["cublaslt"]) == ["cublaslt", "cublaslt:tensorwise"]
    assert runner.candidates("fp8_gemm_nt", ["cublaslt:tensorwise"]) == ["cublaslt:tensorwise"]
    backends.backend(type("Far", (backends.Backend,), {"name": "far", "requires": "nobody_has_it"}))
    for names in (["far"], []):
        rows = {row.backend: row for row in backends.compare("mul_add", [(2, 8)], names).results}
        assert rows["far"].status == "absent"
        assert "nobody_has_it is not installed" in rows["far"].why
    (row,) = backends.compare("mul_add", [(2, 8)], ["cublaslt"]).results
    assert (row.status, "has no mul_add" in row.why) == ("skipped", True)


def test_shapes_that_cannot_be_are_rows_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = backends.compare("fp8_gemm_nt", [(8, 16, 40)], ["torch"]).results
    assert (row.status, row.why) == ("skipped", "K must be a multiple of 16, but it is 40")
    (row,) = backends.compare("fp8_gemm_nt", [(1 << 17, 1 << 17, 1 << 14)], ["torch"]).results
    assert row.status == "skipped"
    assert "GiB with its check, and" in row.why
    monkeypatch.setattr(runner, "HOST_LIMIT", 1e6)
    (row,) = backends.compare("bf16_gemm_nt", [(64, 256, 512)], ["torch"]).results
    assert row.why == "0.0168 GFLOP on 0.36 MB take a host too long: name a smaller shape"

    def no_memory(*_: Any) -> Any:
        raise MemoryError("none left")

    monkeypatch.setattr(backends.get_operation("mul_add"), "exact", no_memory, raising=False)
    (row,) = backends.compare("mul_add", [(2, 8)], ["torch"]).results
    assert (row.status, "MemoryError: none left" in row.why) == ("failed", True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"op": "gemm"}, "op must be one of"),
        ({"backends": ["cudnn"]}, "backend must be one of"),
        ({"backends": ["all", "cudnn"]}, "backend must be one of"),
        ({"mode": "fast"}, "mode must be one of flush, graph, steady, but it is 'fast'"),
        ({"device": "tpu"}, "device must be cpu or cuda, but it is 'tpu'"),
        ({"shapes": [(1, 2, 3)]}, r"A shape of mul_add is rows x columns, sizes from 1, but \(1, 2, 3\) was given"),
        ({"shapes": [(0, 2)]}, "sizes from 1"),
    ],
)
def test_arguments_that_are_wrong_are_said_in_words(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        backends.compare(**({"op": "mul_add"} | arguments))


def test_accuracy_in_numbers() -> None:
    exact = torch.tensor([1.0, -2.0, 4.0, 0.0, 8.0], dtype=torch.float64)
    allowed = torch.full_like(exact, 0.25)
    eps = 2.0**-7
    # Off by 0, by half a unit, which is a rounding, by two, by some, and by ten of them.
    given = torch.tensor([1.0, -2.0 * (1 + eps / 2), 4.0 * (1 + 2 * eps), 0.1, 8.0 * (1 + 10 * eps)])
    found = accuracy.examine(given.bfloat16(), exact, allowed)
    assert found.max_abs == 8.0 * 10 * eps
    assert found.max_rel == pytest.approx(10 * eps)
    assert found.ulps == pytest.approx((0.4, 0.0, 0.2, 0.0, 0.2, 0.2))
    assert (found.outside, found.not_finite, found.right) == (1, 0, False)
    assert found.of_allowed == pytest.approx(8.0 * 10 * eps / 0.25)
    error = given.bfloat16().double() - exact
    assert found.l2_rel == pytest.approx(float(error.norm() / exact.norm()))
    assert found.cosine == pytest.approx(float(torch.cosine_similarity(given.bfloat16().double(), exact, dim=0)))
    given[0], given[3] = float("nan"), float("inf")
    found = accuracy.examine(given.bfloat16(), exact, allowed)
    assert (found.not_finite, found.max_abs) == (2, 8.0 * 10 * eps)
    assert found.fault.startswith("2 of 5 elements are NaN or infinite")
    zero = torch.zeros(3, dtype=torch.float64)
    found = accuracy.examine(zero.float(), zero, zero + 1)
    assert (found.right, found.cosine, found.l2_rel) == (True, 1.0, 0.0)


@given(
    st.lists(st.floats(-3e4, 3e4, allow_nan=False), min_size=1, max_size=40), st.sampled_from(["bfloat16", "float16"])
)
def test_rounding_alone_is_half_a_unit_at_most(values: list[float], dtype: str) -> None:
    exact = torch.tensor(values, dtype=torch.float64)
    found = accuracy.examine(exact.to(getattr(torch, dtype)), exact, torch.ones_like(exact))
    assert found.ulps[0] == 1.0


def test_times_have_a_median_a_spread_and_a_roof() -> None:
    found = timing("fp8_gemm_nt", (4096, 4096, 7168), 200.0)
    assert (found.us, found.samples) == (200.0, 4)
    assert found.low_us < found.us < found.high_us
    assert found.tflops == pytest.approx(2 * 4096 * 4096 * 7168 / 200e-6 / 1e12)
    assert found.of_roof == pytest.approx(found.tflops / H100.tflops["fp8"])
    narrow = timing("mul_add", (4096, 7168), 90.0)
    assert narrow.of_roof == pytest.approx(narrow.gb_per_s / H100.gb_per_s)


def test_host_times_are_taken_in_turns_and_end() -> None:
    ran: list[str] = []
    samples = clock.host_samples({"one": lambda: ran.append("one"), "other": lambda: ran.append("other")}, repeats=3)
    assert ran == ["one", "other"] * 3
    assert [len(times) for times in samples.values()] == [3, 3]
    assert len(clock.host_samples({"one": lambda: None}, seconds=0.0)["one"]) == 1


def test_the_ranking_is_of_those_that_are_right() -> None:
    found = comparison().ranking("fp8_gemm_nt")
    assert [rank.backend for rank in found] == [
        "cublaslt:tensorwise",
        "cuda",
        "deepgemm",
        "cublaslt",
        "tilelang",
        "triton",
    ]
    first, cuda, _, cublaslt, *_ = found
    assert (first.easier, first.first, cuda.first, cuda.of_best, cuda.shapes) == (True, 0, 2, 1.0, 2)
    assert cublaslt.of_best == pytest.approx((17 / 26 * 180 / 205) ** 0.5)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["compare", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_says_what_ran_and_what_could_not() -> None:
    text = run("mul_add", "--shape", "8x32", "--backends", "torch,deepgemm,cublaslt", "--device", "cpu")
    assert "times are those of the host's CPU, and say nothing about a GPU" in text
    assert "mul_add 8 x 32" in text
    assert "against float64" in text
    assert "1  torch    1.000        1 of 1" in text
    assert "not compared: cublaslt: The backend cublaslt has no mul_add." in text
    assert "not compared: deepgemm" in text


def test_the_commands_json_and_traces(tmp_path: Path) -> None:
    told = ("--device", "cpu", "--backends", "torch", "--json", "--trace", str(tmp_path / "t" / "run.json"))
    report = json.loads(run("mul_add,bf16_gemm_nt", "--shape", "8x32", "--shape", "8x32x64", *told))
    assert [(row["op"], row["dims"], row["status"]) for row in report["results"]] == [
        ("mul_add", [8, 32], "ok"),
        ("bf16_gemm_nt", [8, 32, 64], "ok"),
    ]
    assert report["results"][0]["timing"]["mode"] == "host"
    assert report["ranking"]["bf16_gemm_nt"][0]["backend"] == "torch"
    assert {"torch", "source_digest"} <= set(report["environment"])
    names = {
        event.get("name") for event in json.loads((tmp_path / "t" / "run-mul_add-8x32.json").read_text())["traceEvents"]
    }
    assert {"torch", "aten::addcmul"} <= names


def test_the_command_lists_what_there_is_and_refuses_what_there_is_not() -> None:
    text = run()
    assert ["fp8_gemm_nt", "M", "x", "N", "x", "K", "cuda,", "cublaslt,", "cublaslt:tensorwise,", "torch"] in [
        line.split() for line in text.splitlines()
    ]
    result = CliRunner().invoke(app, ["compare", "mul_add", "--deepgemm", "nowhere"])
    assert result.exit_code != 0
    assert "There is no package deep_gemm in" in result.output


def test_the_command_ends_with_status_1_if_a_result_is_wrong() -> None:
    backends.kernel("mine", "mul_add")(off)
    result = CliRunner().invoke(app, ["compare", "mul_add", "--shape", "4x16", "--backends", "mine", "--device", "cpu"])
    assert result.exit_code == 1
    assert "not compared: mine on mul_add 4 x 16: 1 of 64 elements are off by up to" in result.output


def test_after_a_lost_context_nothing_is_blamed_that_did_not_run(add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a fault of memory on a GPU, which every later call reports as its own."""

    def wait(self: runner.Runner) -> None:
        if broken_calls:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    broken_calls: list[None] = []
    monkeypatch.setattr(runner.Runner, "_wait", wait)
    found = add(lambda *operands: broken_calls.append(None))
    assert found["mine"].why == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert found["torch"].status == "skipped"
    assert found["torch"].why == "the GPU takes no more work in this process since mine failed"


def test_a_comparison_can_be_read_again() -> None:
    found = comparison()
    assert Comparison.from_json(json.loads(json.dumps(found.to_json()))) == found
