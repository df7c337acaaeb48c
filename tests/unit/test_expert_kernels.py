"""Grouped shapes and the kernels that are compiled ahead for them: all that any routing can need."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import DEEPSEEK_V3, of_experts

import deep_gemm
from deep_gemm import kernels, ops, select
from deep_gemm.aot import build, cards, model, workload
from deep_gemm.aot.layers import FORMS, GROUPED, GROUPED_OPS, Layer, is_masked
from deep_gemm.aot.workload import GemmShape
from deep_gemm.arch import SM90
from deep_gemm.cli.app import app
from deep_gemm.errors import InvalidInputError, UnsupportedError
from deep_gemm.ops.m_grouped import check_expected_m
from deep_gemm.params import KernelParams
from deep_gemm.runtime import engine
from deep_gemm.spec import GemmSpec

FP8, BF16 = GROUPED["fp8_gemm_nt"], GROUPED["bf16_gemm_nt"]


def test_operations_are_those_that_exist() -> None:
    assert set(GROUPED_OPS) == set(ops.M_GROUPED)
    for op in ops.M_GROUPED:
        assert hasattr(deep_gemm, op.removesuffix("_psum"))
        assert is_masked(op) == (ops.PRODUCTS[op].grouping == "masked")
        assert ops.helpers(op) == (("transpose_scales",) if op in FP8 else ())
    assert [is_masked(op) for op in ("fp8_gemm_nt", "masked")] == [False, False]


def test_what_is_asked_of_the_selector() -> None:
    for op in ops.M_GROUPED:
        asked = build.spec_of(GemmShape(640, 512, 256, op=op, groups=4, expected_m=33), SM90)
        wanted = ops.spec(640, 512, 256, 132, op, groups=4, alignment=128, expected_m=64)
        assert asked == wanted
        assert asked.expected_m == (64 if is_masked(op) else 0)


def test_the_alignment_of_this_process_counts() -> None:
    shape = GemmShape(4096, 512, 256, op=FP8[0], groups=4)
    deep_gemm.set_mk_alignment_for_contiguous_layout(64)
    try:
        assert build.spec_of(shape, SM90).alignment == 64
        assert {params.config.tile[0] for params in build.kernels_of(shape, SM90)} == {64}
    finally:
        deep_gemm.set_mk_alignment_for_contiguous_layout(128)
    assert build.spec_of(shape, SM90).alignment == 128


def test_masked_choices_go_by_the_rows_that_are_expected() -> None:
    for op in (FP8[2], BF16[2]):
        for expected, room in ((1, 4096), (64, 64), (64, 5000), (1000, 1000), (2048, 100000)):
            asked, least = (
                build.spec_of(GemmShape(m, 4096, 7168, op=op, groups=32, expected_m=expected), SM90)
                for m in (room, select.representative(min(room, 1 << (expected - 1).bit_length())))
            )
            assert select.rank(asked, SM90) == select.rank(least, SM90)


@pytest.mark.parametrize(
    ("groups", "expected", "tile"),
    [(32, 4, (64, 128)), (32, 32, (64, 128)), (8, 33, 128), (8, 64, 128), (2, 20, (64, 32)), (1, 8, (64, 32))],
)
def test_tiles_of_masked_groups_hold_twice_the_expected_rows(groups: int, expected: int, tile: object) -> None:
    """And they are narrow where wider ones would leave SMs without work."""
    asked = build.spec_of(GemmShape(4096, 4096, 7168, op=FP8[2], groups=groups, expected_m=expected), SM90)
    for known in cards.default():
        config = select.rank(asked, SM90, known.calibration)[0].config
        assert tile in (config.tile, config.block_m)


def test_groups_of_few_rows_have_low_tiles_small_boxes_and_early_weights() -> None:
    found = {}
    for op, rows, expected in ((FP8[2], 4096, 20), (FP8[2], 4096, 1000), (BF16[2], 4096, 20), (FP8[0], 640, 1)):
        asked = build.spec_of(GemmShape(rows, 4096, 7168, op=op, groups=6, expected_m=expected), SM90)
        config = select.rank(asked, SM90)[0].config
        kernel = kernels.gemm_family(config.family)
        strides = {"a": (7168, 1), "b": (7168, 1), "d": (4096, 1), "sfa": (1, rows), "sfb": (1792, 56, 1)}
        _, values = kernel.values(kernel.params(asked, config, SM90), asked, strides, {}, pdl=False, constant=False)
        found[op, expected] = (config.tile[1], values["map_a"].spec.box[1], values["raster"][2], values["evict_first"])
    assert found[FP8[2], 20] == (128, 32, 2, 1)
    assert found[BF16[2], 20][1:3] == (32, 4)
    assert found[FP8[2], 1000][1:] == (64, 0, 0)
    assert found[FP8[0], 1][1:] == (64, 2, 4)


@pytest.mark.parametrize("op", [FP8[0], BF16[0]])
def test_few_kernels_ship_for_rare_layouts(op: str) -> None:
    """Tiles of 192 columns are for the usual layout of groups without counts, and it has no narrow ones."""
    usual = ops.spec(4096, 4096, 4096, 132, op, groups=8)

    def widths(asked: GemmSpec) -> set[int]:
        return {config.block_n for config in select.candidates(asked, SM90)}

    assert 192 in widths(usual)
    assert 32 not in widths(usual)
    for rare in (
        replace(usual, grouping="masked", alignment=1, expected_m=1000),
        replace(usual, d=replace(usual.d, aligned=False)),
    ):
        assert 128 in widths(rare) <= {32, 64, 128, 256}


@pytest.fixture(scope="module")
def prepared() -> dict[str, tuple[Layer, set[KernelParams]]]:
    """What is compiled ahead for one layer, by operation: for up to 300 tokens on each of 4 GPUs."""
    found = {}
    for config in (DEEPSEEK_V3, DEEPSEEK_V3 | {"quantization_config": None, "torch_dtype": "bfloat16"}):
        layers = of_experts(model.plan(config, 4, 4))[: len(FORMS)]
        for layer in layers:
            work = build.choose(workload.shapes(workload.for_every_m([layer], 300), ()))
            assert not work.impossible
            found[layer.op] = (layer, set(work.kernels))
    assert set(found) == {*FP8, *BF16}
    return found


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_every_routing_finds_its_kernel(
    prepared: dict[str, tuple[Layer, set[KernelParams]]], data: st.DataObject
) -> None:
    op = data.draw(st.sampled_from(GROUPED_OPS))
    layer, kernels = prepared[op]
    m = data.draw(st.integers(1, layer.most_rows(300)))
    expected = check_expected_m("expected_m", data.draw(st.integers(1, 5000)))
    known = data.draw(st.sampled_from([card.calibration for card in cards.default()]))
    deep_gemm.set_batch_invariant(data.draw(st.booleans()))
    try:
        asked = ops.spec(m, layer.n, layer.k, 132, op, groups=layer.groups, expected_m=expected)
    finally:
        deep_gemm.set_batch_invariant(False)
    config = select.rank(asked, SM90, known)[0].config
    assert engine.kernel_params(asked, config, SM90) in kernels


def test_helpers_come_along(prepared: dict[str, tuple[Layer, set[KernelParams]]]) -> None:
    for op, (_, needed) in prepared.items():
        names = {params.kernel for params in needed}
        assert names == ({"sm90_fp8_grouped", "transpose_scales"} if op in FP8 else {"sm90_b16_grouped"})


def test_shapes_with_groups() -> None:
    for what in (
        {"n": 512, "k": 256, "groups": 8},
        {"shapes": [{"n": 512, "k": 256, "groups": 8}]},
        Layer("", 512, 256, groups=8),
    ):
        layers = workload.plan(what).layers
        assert [(x.op, x.groups, x.n, x.k) for x in layers] == [(op, 8, 512, 256) for op in FP8]
    assert [x.op for x in workload.plan({"n": 512, "k": 256, "groups": 8}, op="bf16_gemm_nt").layers] == list(BF16)
    (one,) = workload.plan({"shapes": [{"n": 512, "k": 256, "op": FP8[2], "groups": 8, "m": [3, 5]}]}).layers
    assert workload.shapes([one], [1]) == [GemmShape(m, 512, 256, op=FP8[2], groups=8) for m in (3, 5)]
    # Of masked groups the rows that are expected count.
    shape = GemmShape(4096, 512, 256, "x", FP8[2], 8, 33)
    assert workload.shapes(workload.plan(shape).layers, [1]) == [GemmShape(64, 512, 256, "x", FP8[2], 8)]
    shape = GemmShape(4096, 512, 256, "x", FP8[0], 8)
    assert workload.shapes(workload.plan(shape).layers, [1]) == [shape]
    assert workload.plan(one).layers == (one,)


def test_shapes_count_what_they_multiply_and_move() -> None:
    rows = GemmShape(640, 512, 256, op=FP8[0], groups=4)
    assert rows.flops == 2 * 640 * 512 * 256
    assert rows.bytes_moved() == 640 * 256 + 4 * 512 * 256 + 2 * 640 * 512 + 4 * 2 * (640 + 4 * 4)
    masked = GemmShape(640, 512, 256, op=BF16[2], groups=4, expected_m=10)
    assert masked.flops == 2 * 40 * 512 * 256
    assert masked.bytes_moved() == 2 * (40 * 256 + 4 * 512 * 256 + 40 * 512)
    assert GemmShape(640, 512, 256, op=BF16[2], groups=4).flops == 2 * 2560 * 512 * 256
    assert str(rows) == "640 x 512 x 256 in 4 groups of m_grouped_fp8_gemm_nt_contiguous"


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ({"shapes": [{"n": 512, "k": 256, "groups": 0}]}, InvalidInputError, "groups of shape 0 of the description"),
        ({"shapes": [{"n": 512, "k": 256, "groups": "8"}]}, InvalidInputError, "groups of shape 0 of the description"),
        ({"shapes": [{"n": 512, "k": 256, "groups": 8, "op": "fp16_gemm_nt"}]}, UnsupportedError,
            "fp16_gemm_nt has no form with groups, but a shape has 8 groups. Give one group, or another op: fp8_"),
    ],
)  # fmt: skip
def test_wrong_groups_are_refused_in_words(what: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as refused:
        workload.plan(what)
    assert str(refused.value).startswith(words)


def test_groups_that_no_call_can_have() -> None:
    assert (
        build.plan({"n": 2048, "k": 2048, "groups": 1 << 20})
        .problems[0]
        .endswith("more than 2147483647 rows or columns of all groups is not supported.")
    )
    assert "K must be a multiple of 16" in build.plan({"n": 512, "k": 250, "groups": 8}).problems[0]
    assert build.plan({"n": 512, "k": 250, "groups": 8}, op="bf16_gemm_nt").problems == ()
    work = build.choose([GemmShape(64, 512, 256, op=FP8[0], groups=1025)])
    assert "1025 groups are more than 1024" in str(work.impossible[0].error)


def run(*arguments: str) -> Any:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_the_command_lists_experts(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DEEPSEEK_V3))
    report = run("precompile", "--model", str(path), "--tp", "8", "--ep", "8", "--m", "64", "--dry-run", "--json")
    found = [layer for layer in report["layers"] if layer["name"] == "experts.down_proj"]
    assert [(layer["op"], layer["groups"], layer["n"], layer["k"], layer["served"]) for layer in found] == [
        (op, 32, 7168, 2048, True) for op in FP8
    ]
    assert all(layer["kernels"] >= 1 for layer in found)
    report = run("precompile", "--model", str(path), "--ep", "64", "--max-m", "2", "--dry-run", "--json")
    assert {layer["op"]: layer["m"] for layer in report["layers"]} == {
        "fp8_gemm_nt": "every M to 2",
        "bf16_bhd_hdr_bhr": "every M to 2",
        "bf16_bmm": "every M to 2",
        FP8[0]: f"every M to {2 * 64 * 8 + 5 * 127}",
        FP8[1]: f"every M to {2 * 64 * 8 + 5 * 127}",
        FP8[2]: "every M to 128",
    }
    done = CliRunner().invoke(app, ["precompile", "--model", str(path), "--ep", "64", "--m", "2", "--dry-run"])
    assert "4 of 7168 x 2048" in done.output


def test_the_command_takes_shapes_with_groups() -> None:
    report = run("precompile", "--shape", "512x256", "--groups", "8", "--m", "64", "--dry-run", "--json")
    assert [(layer["op"], layer["groups"]) for layer in report["layers"]] == [(op, 8) for op in FP8]
    arguments = ["--shape", "64x512x256", "--groups", "8", "--op", BF16[2], "--dry-run", "--json"]
    (layer,) = run("precompile", *arguments)["layers"]
    assert (layer["op"], layer["groups"], layer["m"], layer["kernels"]) == (BF16[2], 8, "M = 64", 1)


@pytest.mark.compile
def test_inspect_takes_groups(cache_dir: Path) -> None:
    arguments = ["--op", FP8[2], "--groups", "32", "--expected-m", "50", "--json", "--top", "2"]
    report = run("inspect", "4096x512x256", *arguments)
    asked = report["spec"]
    assert (asked["m"], asked["groups"], asked["grouping"], asked["expected_m"]) == (4096, 32, "masked", 64)
    assert "_masked_g32_" in report["kernel"]
    assert len(report["configs"]) == 2


@pytest.mark.compile
@pytest.mark.long
def test_after_compiling_ahead_no_routing_compiles(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deep_gemm.jit import builder

    monkeypatch.setenv("DG_JIT_USE_NVRTC", "1")
    summary = deep_gemm.precompile({"n": 512, "k": 256, "groups": 4}, max_m=300, jobs=2)
    assert summary.failed == []
    # As in another process: a builder without this one's memory.
    monkeypatch.setattr(engine, "default_builder", builder.Builder)
    monkeypatch.setenv("DG_JIT_FORBID_COMPILE", "1")
    needed = set()
    for m in (1, 64, 129, 300):
        for expected in (1, 33, 300):
            for op in FP8:
                asked = build.spec_of(GemmShape(m, 512, 256, op=op, groups=4, expected_m=expected), SM90)
                needed.add(engine.kernel_params(asked, select.rank(asked, SM90)[0].config, SM90))
    assert {params.grouping for params in needed} == {"contiguous", "psum", "masked"}  # type: ignore[attr-defined]
    assert {engine.build(params).layer for params in needed} == {"disk"}
