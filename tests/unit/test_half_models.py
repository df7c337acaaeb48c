"""Models and shapes of bfloat16 and float16: which operation their layers run, and what is compiled ahead for them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from model_cases import runs

import deep_gemm
from deep_gemm import ops, select
from deep_gemm.aot import build, workload
from deep_gemm.aot.layers import ABSORBED, BATCHED, BATCHED_OPS, FP8, FP8_OPS, GROUPED_OPS, OPS, Layer
from deep_gemm.aot.workload import GemmShape
from deep_gemm.arch import SM90
from deep_gemm.errors import InvalidInputError

BF16, FP16 = "bf16_gemm_nt", "fp16_gemm_nt"


def test_operations_are_those_that_exist() -> None:
    assert {*FP8_OPS, *OPS.values(), *GROUPED_OPS, *BATCHED_OPS} == set(ops.NAMES)
    assert ops.PRODUCTS[ABSORBED].majors == ("k", "mn")
    for alone, each in BATCHED.items():
        assert (ops.PRODUCTS[each].grouping, ops.PRODUCTS[each].dtype) == ("batched", ops.PRODUCTS[alone].dtype)
    assert FP8 == ops.DEFAULT


@pytest.mark.parametrize(
    "what",
    [
        GemmShape(64, 512, 250, op=BF16),
        Layer("", 512, 250, ms=(64,), op=BF16),
        {"shapes": [{"n": 512, "k": 250, "m": 64, "op": BF16}]},
        [[{"shapes": [{"n": 512, "k": 250, "m": 64, "op": BF16}]}]],
    ],
    ids=lambda what: type(what).__name__,
)
def test_shapes_carry_their_operation(what: Any) -> None:
    """K = 250 is no shape for FP8."""
    assert workload.shapes(build.plan(what).layers, [1]) == [GemmShape(64, 512, 250, op=BF16)]
    assert build.plan(what).problems == ()


def test_shapes_take_the_operation_that_is_named_beside_them() -> None:
    for what in ("64x512x250", [(512, 250)], {"shapes": [{"n": 512, "k": 250}]}):
        assert runs(build.plan(what, op=FP16)) == {FP16}
        assert "K must be a multiple of 16" in build.plan(what).problems[0]


def test_an_operation_is_text() -> None:
    with pytest.raises(InvalidInputError, match="op of shape 0 of the description must be text, but it is 7"):
        workload.plan({"shapes": [{"n": 1, "k": 16, "op": 7}]})


def test_what_is_asked_of_the_selector() -> None:
    asked = build.spec_of(GemmShape(64, 512, 250, op=BF16), SM90)
    assert (asked.a.dtype, asked.b.dtype, asked.d.dtype) == ("bf16", "bf16", "bf16")
    assert asked == ops.spec(64, 512, 250, SM90.num_sms, op=BF16)
    assert GemmShape(64, 512, 256, op=BF16).bytes_moved() == 2 * (64 * 256 + 512 * 256 + 64 * 512)
    assert str(GemmShape(64, 512, 256, op=BF16)) == "64 x 512 x 256 of bf16_gemm_nt"


@pytest.fixture
def off() -> Iterator[None]:
    yield
    deep_gemm.set_batch_invariant(False)


@pytest.mark.usefixtures("off")
def test_kernels_of_both_positions_of_the_switch_are_compiled_ahead() -> None:
    """So calls compile nothing in either position."""
    shapes = [GemmShape(m, n, k) for m in (1, 16, 64, 300) for n, k in ((576, 7168), (7168, 2048))]
    found = {}
    for value in (False, True):
        deep_gemm.set_batch_invariant(value)
        found[value] = [build.kernels_of(shape, SM90) for shape in shapes]
        for shape, kernels in zip(shapes, found[value], strict=True):
            asked = build.spec_of(shape, SM90)
            assert asked.batch_invariant is value
            first = select.rank(asked, SM90)[0].config
            assert first in [params.config for params in kernels]
    assert found[True] == found[False]
    assert any(len(kernels) > 1 for kernels in found[True])
    assert replace(asked, batch_invariant=False) != asked
