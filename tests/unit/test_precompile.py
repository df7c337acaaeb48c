"""Workloads from every kind of source, and compiling them ahead."""

import dataclasses
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from gpu_fakes import FakeGpu
from model_cases import BERT, DEEPSEEK_V3, DEEPSEEK_V32, GLM_45, LLAMA_8B, precompile, runs

import deep_gemm
from deep_gemm import Epilogue, kernels, ops, quantize, select
from deep_gemm.aot import build, inputs, workload
from deep_gemm.aot.layers import (
    ABSORBED,
    BATCHED,
    BATCHED_OPS,
    E5M2_OPS,
    FP4_GROUPED,
    FP8,
    FP8_OPS,
    GROUPED_OPS,
    OPS,
    Layer,
)
from deep_gemm.aot.workload import GemmShape
from deep_gemm.arch import SM90
from deep_gemm.cli.app import app
from deep_gemm.errors import CompileError, InvalidInputError, UnsupportedError
from deep_gemm.kernels.row_kernels import FUNCTIONS, ROWS
from deep_gemm.kernels.sm90_fp4_gemm import FP4
from deep_gemm.parts import Parts, parse
from deep_gemm.runtime import engine
from deep_gemm.spec import Fp4Spec, RowsSpec


def test_parse_sizes() -> None:
    assert inputs.parse_sizes("1, 2,64-256:64,2") == [1, 2, 64, 128, 192, 256]
    assert inputs.parse_sizes("3-5") == [3, 4, 5]


@pytest.mark.parametrize("text", ["", "0", "a", "5-3", "1-9:0", "-4", "1,,2"])
def test_parse_sizes_refuses(text: str) -> None:
    with pytest.raises(InvalidInputError, match="Sizes must look like"):
        inputs.parse_sizes(text)


def test_parse_shape() -> None:
    assert workload.shapes_of("64x7168x2048") == [GemmShape(64, 7168, 2048)]
    assert workload.shapes_of("7168x2048", [1, 2]) == [GemmShape(1, 7168, 2048), GemmShape(2, 7168, 2048)]
    for text in ("7168", "1x2x3x4", "ax2x3"):
        with pytest.raises(InvalidInputError, match="MxNxK"):
            workload.parse(text)


def test_files(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(
        json.dumps([{"n": 256, "k": 512, "m": [1, 64], "name": "x"}, {"n": 128, "k": 128}])
    )
    assert workload.shapes_of(tmp_path / "list.json", [7]) == [
        GemmShape(1, 256, 512, "x"),
        GemmShape(64, 256, 512, "x"),
        GemmShape(7, 128, 128),
    ]
    (tmp_path / "shapes.yaml").write_text("m: [1, 2]\nshapes:\n  - {n: 256, k: 512}\n")
    assert workload.shapes_of(tmp_path / "shapes.yaml") == [GemmShape(1, 256, 512), GemmShape(2, 256, 512)]
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert len(workload.shapes_of(tmp_path / "config.json", [1, 2])) == 8


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "{", "is not JSON"), ("a.yaml", "{", "is not YAML"), ("a.json", "7", "must hold a list"),
        ("a.json", '[{"n": 1}]', "with n and k"), ("a.json", '[{"n": 0, "k": 128}]', "n of shape 0"),
        ("a.json", '[{"n": true, "k": 128}]', "n of shape 0"),
        ("a.json", '{"shapes": [{"n": 8, "k": 128, "m": []}]}', "m of shape 0"),
        ("missing.json", None, "cannot be read"),
    ],
)  # fmt: skip
def test_bad_files_are_refused_in_words(tmp_path: Path, name: str, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(InvalidInputError, match=words):
        workload.shapes_of(tmp_path / name)


SHAPES = [GemmShape(1, 576, 7168), GemmShape(64, 576, 7168), GemmShape(4096, 7168, 2048)]


def test_choosing_joins_shapes_that_share_a_kernel() -> None:
    work = build.choose([*SHAPES, SHAPES[0]])
    # A shape has one kernel, or one for each GPU model with a calibration; each of them lists the shape once.
    for params, shapes in work.kernels.items():
        assert len(shapes) == len(set(shapes)), params
    assert {shape for shapes in work.kernels.values() for shape in shapes} == set(SHAPES)
    assert any(not shapes for shapes in work.kernels.values()), "the helper kernels come along"
    assert not work.impossible


TEXT = "alpha+bias:bf16+gelu+residual"


@pytest.mark.parametrize("epilogue", ["residual+gelu+alpha+bias:bf16", "custom", None])
@pytest.mark.parametrize("op", ["fp8_gemm_nt", "bf16_gemm_nt", "fp16_gemm_nt"])
def test_dense_layers_are_compiled_with_an_epilogue_too(gpu: FakeGpu, op: str, epilogue: str | None) -> None:
    """Those that calls ask for, beside those without; experts have none."""
    some = {"bias": torch.zeros(256).bfloat16(), "alpha": 2.0}
    own = Epilogue.custom("own", "return x + v;", columns={"v": torch.zeros(256)}, **some)
    given, parts = (own, own.parts) if epilogue == "custom" else (epilogue, parse(TEXT))
    work = build.work_of(
        [{"n": 256, "k": 512, "m": 24, "op": op}, {"n": 256, "k": 512, "m": 128, "groups": 2}], epilogue=given
    )
    found = {shape for shapes in work.kernels.values() for shape in shapes}
    assert not work.impossible
    assert {shape.epilogue for shape in found} == {Parts()} | ({parts} if epilogue else set())
    assert not any(shape.epilogue for shape in found if shape.groups > 1)  # a residual, or an expression
    if epilogue is None:
        return
    out = torch.float16 if op == "fp16_gemm_nt" else torch.bfloat16
    a, b, d = (torch.zeros(*size).to(out) for size in ((24, 512), (256, 512), (24, 256)))
    pairs = (deep_gemm.per_token_cast_to_fp8(a, False), deep_gemm.per_block_cast_to_fp8(b, False))
    called = Epilogue(activation="gelu", residual=d, **some) if epilogue != "custom" else own
    getattr(deep_gemm, op)(*(pairs if op == "fp8_gemm_nt" else (a, b)), d, epilogue=called)
    asked = gpu.launched[-1].spec
    (shape,) = (shape for shape in found if shape.epilogue == parts)
    assert asked == build.spec_of(shape, SM90, asked.num_sms)


@pytest.mark.parametrize(
    "text",
    ["swiglu", "clamp:7.0+swiglu+fp8", "rows+swiglu+fp8:ue8m0", "bias:bf16+silu", "silu+fp8", "swiglu+interleaved"],
)
def test_experts_are_compiled_with_an_epilogue_too(gpu: FakeGpu, text: str) -> None:
    """As calls ask for."""
    work = build.work_of([{"n": 512, "k": 256, "m": 256, "groups": 2}, "64x512x256"], epilogue=text)
    assert not work.impossible
    (a, b), factors, bias = (torch.zeros(256, 256), torch.zeros(2, 512, 256)), torch.zeros(256), torch.zeros(2, 512)
    x = deep_gemm.per_token_cast_to_fp8(a.bfloat16(), False)
    pairs = [deep_gemm.per_block_cast_to_fp8(each.bfloat16(), False) for each in b]
    y = tuple(torch.stack(parts) for parts in zip(*pairs, strict=True))
    parts = {"activation": "swiglu", "use_ue8m0": "ue8m0" in text}
    parts |= {"interleaved": True} if "interleaved" in text else {}
    parts |= {"clamp": 7.0} if "clamp" in text else {}
    parts |= {"row_factor": factors} if "rows" in text else {}
    if "silu" in text:
        parts = {"activation": "silu"} | ({"bias": bias.bfloat16()} if "bias" in text else {})
    columns = 512 if "silu" in text else 256
    d: Any = torch.zeros(256, columns).bfloat16()
    d = (d.to(torch.float8_e4m3fn), torch.zeros(256, columns // 128)) if "fp8" in text else d
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(x, y, d, torch.zeros(256, dtype=torch.int32), epilogue=Epilogue(**parts))
    asked = gpu.launched[-1].spec
    found = {shape for shapes in work.kernels.values() for shape in shapes if shape.epilogue}
    (shape,) = (shape for shape in found if shape.op == "m_grouped_fp8_gemm_nt_contiguous")
    assert asked == build.spec_of(shape, SM90, asked.num_sms)
    assert any(shape.op == "fp8_gemm_nt" for shape in found)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_calls_with_mxfp4_weights_compile_nothing(gpu: FakeGpu, kind: str, wide: bool, invariant: bool) -> None:
    """Whatever rows are expected in the room of a group."""
    n, k, groups = 192, 160, 3
    made = [Layer("x", n, k, op=op, groups=3) for op in FP4_GROUPED[f"{kind}_fp4_gemm_nt"]]
    made.append(Layer("dense", n, k, op=f"{kind}_fp4_gemm_nt"))
    made = [dataclasses.replace(each, ms=(512,)) if "masked" in each.op else each for each in made]
    work = build.choose(workload.shapes(workload.for_every_m(made, 512), ()), num_sms=132)
    assert not work.impossible
    packed, scales = torch.zeros(groups, n, k // 2, dtype=torch.uint8), torch.full((groups, n, k // 32), 120).byte()
    scales[0, 0, 0] = 255 if wide else 120
    b = deep_gemm.transform_fp4_weights(packed, scales, kind)
    prefix, of = f"m_grouped_{kind}_fp4_gemm_nt", torch.bfloat16
    deep_gemm.set_batch_invariant(invariant)
    try:
        for m in (1, 8, 9, 17, 25, 33, 65, 200, 512):
            x, d = torch.zeros(m, k).to(of), torch.zeros(m, n).to(of)
            one = type(b)(*(each[0] for each in b))
            getattr(deep_gemm, f"{kind}_fp4_gemm_nt")(x if kind == "bf16" else quantize.rows(x), one, d)
        room, d = torch.zeros(groups, 512, k).to(of), torch.zeros(groups, 512, n).to(of)
        values, sf = quantize.rows(room.view(-1, k))
        given: Any = room if kind == "bf16" else (values.view(room.shape), sf.contiguous().view(groups, 512, -1))
        counts = torch.zeros(groups, dtype=torch.int32)
        for expected in (1, 8, 9, 24, 30, 64, 65, 512):
            getattr(deep_gemm, f"{prefix}_masked")(given, b, d, counts, expected)
        x, d = torch.zeros(384, k).to(of), torch.zeros(384, n).to(of)
        for layout, psum in ((torch.zeros(384, dtype=torch.int32), False), (counts, True)):
            given = x if kind == "bf16" else quantize.rows(x)
            getattr(deep_gemm, f"{prefix}_contiguous")(given, b, d, layout, use_psum_layout=psum)
    finally:
        deep_gemm.set_batch_invariant(False)
    specs = [x.spec for x in gpu.launched if isinstance(x.spec, Fp4Spec)]
    asked = {FP4.params(spec, FP4.config_of(spec, SM90), SM90) for spec in specs}
    assert len(asked) > 7
    assert asked <= set(work.kernels)


def test_scales_of_powers_of_two_are_those_of_a_d_of_fp8() -> None:
    work = build.work_of(["64x512x256"], epilogue=Epilogue(activation="swiglu", use_ue8m0=True))
    found = {str(shape.epilogue) for shapes in work.kernels.values() for shape in shapes}
    assert found == {"none", "swiglu+fp8:ue8m0"}


def test_functions_of_rows_as_wide_as_inputs_are_compiled_too() -> None:
    def rows(**options: Any) -> set[Any]:
        work = build.work_of([(512, 7168), (512, 2048)], max_m=1, **options)
        return {params for params in work.kernels if params.kernel == "rows"}

    assert not rows()
    for dtype, op in (("bf16", "bf16_gemm_nt"), ("bf16", "fp8_gemm_nt"), ("f16", "fp16_gemm_nt")):
        found = rows(fused=True, op=op)
        for width, count in ((7168, 1), (2048, 1 << 16), (2048, 8)):
            for output in (dtype, "e4m3"):
                asked = RowsSpec("rms_norm", count, width, dtype, output, "", ("residual",))
                assert ROWS.params(asked, ROWS.config_of(asked, SM90), SM90) in found
                asked = RowsSpec("silu_and_mul", count, width, dtype, output, "halves")
                assert ROWS.params(asked, ROWS.config_of(asked, SM90), SM90) in found
        assert {params.dtype for params in found} == {dtype}


@pytest.mark.parametrize(("kind", "output"), [("bf16", "bf16"), ("fp8", "e4m3")])
def test_activations_between_experts_of_mxfp4_are_compiled_too(kind: str, output: Any) -> None:
    made = [Layer("x", 5760, 2880, op=op, groups=3, ms=(128,)) for op in FP4_GROUPED[f"{kind}_fp4_gemm_nt"]]
    found = build.choose((), layers=made, fused=True).kernels
    for name, given, count in itertools.product(
        ("swigluoai_and_mul", "silu_and_mul"), ((), ("bias", "groups")), (8, 1 << 16)
    ):
        asked = RowsSpec(name, count, 2880, "bf16", output, FUNCTIONS[name].forms[0], given)
        assert ROWS.params(asked, ROWS.config_of(asked, SM90), SM90) in found
    assert not build.choose((), layers=made).kernels


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_launches_around_experts_of_mxfp4_are_compiled_too(kind: str) -> None:
    """Those of a call of the model: of any number of tokens, and with biases or without."""
    shape = GemmShape(64, 5760, 2880, op=f"m_grouped_{kind}_fp4_gemm_nt_masked", groups=32)
    found = {kernels.get(params.kernel).kernel_name(params) for params in build.choose((shape,)).kernels}
    assert {f"moe_dispatch_{form}_{'copied_' * (kind == 'bf16')}bf16" for form in ("masked", "psum")} <= found
    output = "bf16" if kind == "bf16" else "e4m3"
    assert {f"moe_activate_swiglu_{output}", f"moe_activate_swigluoai_bias_{output}"} <= found
    assert {"moe_combine_weights", "moe_combine_weights_bias"} <= found


@pytest.mark.parametrize(
    "text",
    [
        "", "none", "mish", "bias:e4m3", "silu+silu", "gelu+silu", "alpha+custom:own", "silu+residual+fp8", "clamp:7.0",
        "silu+interleaved", "swiglu+residual", "silu+custom:own(;) return x;",
    ],
)  # fmt: skip
def test_a_text_that_is_no_epilogue_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="epilogue must be"):
        build.work_of([(512, 256)], epilogue=text)
    result = run("--shape", "128x2048", "--epilogue", text, "--dry-run")
    assert result.exit_code == 2
    assert "epilogue must be" in " ".join(result.output.split())


def test_the_command_compiles_epilogues_and_functions_of_rows() -> None:
    counts = [
        json.loads(run("--shape", "128x2048", "--m", "64", "--dry-run", "--json", *more).output)["kernels"]
        for more in ((), ("--epilogue", "relu"), ("--epilogue", "relu", "--epilogue", "bias:f32+silu"), ("--fused",))
    ]
    assert counts[0] < counts[1] < counts[2] < counts[0] + 8
    assert counts[3] > counts[0] + 30


def test_an_unknown_arch_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="sm_12"):
        build.choose(SHAPES, "sm_12")


@dataclasses.dataclass
class FakeBinary:
    name: str
    layer: str = "compiled"


def test_failures_are_collected_and_the_rest_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []

    def fake(params: Any) -> FakeBinary:
        if params == first:
            raise CompileError("no good", log="line 1")
        built.append(params)
        return FakeBinary(params.kernel)

    first = next(iter(build.choose(SHAPES).kernels))
    monkeypatch.setattr(engine, "build", fake)
    seen: list[tuple[int, int]] = []
    summary = build.precompile(SHAPES, jobs=2, progress=lambda outcome, done, total: seen.append((done, total)))
    total = len(build.choose(SHAPES).kernels)
    assert seen == [(index + 1, total) for index in range(total)]
    assert [outcome.params for outcome in summary.failed] == [first]
    assert isinstance(summary.failed[0].error, CompileError)
    assert summary.count("compiled") == len(built) == total - 1


def test_failures_are_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(params: Any) -> Any:
        raise CompileError("no good", log="line 1\nline 2")

    monkeypatch.setattr(engine, "build", fail)
    summary = build.precompile(SHAPES, jobs=2)
    count = len(summary.failed)
    assert count == len(summary.outcomes) > 3
    (told,) = (record.getMessage() for record in caplog.records)
    assert told == summary.failures
    assert told.startswith(f"{count} of {count} kernels failed")
    assert summary.failed[0].name in told
    assert "no good" in told
    assert "line" not in told
    assert not build.precompile([]).failures


def test_a_workload_in_any_form() -> None:
    ms = [1, 64]
    both = [GemmShape(1, 512, 256), GemmShape(64, 512, 256)]
    for what in (
        (512, 256),
        [(512, 256)],
        "512x256",
        ["512x256"],
        {"n": 512, "k": 256},
        [{"n": 512, "k": 256, "groups": 1}],
        [Layer("", 512, 256)],
        [[(512, 256)]],
    ):
        assert workload.shapes_of(what, ms) == both, what
    assert workload.shapes_of(GemmShape(7, 512, 256), ms) == [GemmShape(7, 512, 256)]
    assert workload.shapes_of({"shapes": [{"n": 512, "k": 256}]}, ms) == both
    assert workload.shapes_of({"shapes": [{"n": 512, "k": 256, "m": 3}]}, ms) == [GemmShape(3, 512, 256)]
    assert workload.shapes_of(DEEPSEEK_V3, ms, tp=8, ep=32) == workload.shapes(
        workload.plan(DEEPSEEK_V3, 8, 32).served, ms
    )


@pytest.mark.parametrize("what", [(64, 7168, 2048), [(64, 7168, 2048)], (512, 256, 1), (1, 2, 3, 4)])
def test_numbers_without_names_are_not_guessed(what: Any) -> None:
    """(n, k, groups) once, while "64x7168x2048" is M x N x K."""
    with pytest.raises(
        InvalidInputError, match=r"may be M, N, K or N, K, groups\. Write \"64x7168x2048\" for M x N x K"
    ):
        workload.shapes_of(what)
    assert workload.shapes_of("64x7168x2048") == [GemmShape(64, 7168, 2048)]
    assert {shape.groups for shape in workload.shapes_of({"n": 7168, "k": 2048, "groups": 8}, [1])} == {8}


@pytest.mark.parametrize("what", [None, 5, [3.5], [(0, 5)], {"n": 1}])
def test_what_is_no_workload_is_refused_in_words(what: Any) -> None:
    with pytest.raises(InvalidInputError, match="but it"):
        workload.shapes_of(what)


def test_the_command_lists_layers_and_compiles_nothing_of_what_is_not_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Any] = []
    monkeypatch.setattr(build, "build", lambda params: built.append(params) or build.Outcome("k", (), params))
    result = precompile(tmp_path, GLM_45, "--tp", "8")
    assert result.exit_code == 3
    assert "shared_expert.down_proj" in result.output
    assert "--allow-partial" in result.output
    assert precompile(tmp_path, GLM_45, "--tp", "8", "--dry-run").exit_code == 3
    result = precompile(tmp_path, GLM_45, "--tp", "8", "--dry-run", "--allow-partial")
    assert result.exit_code == 0, result.output
    assert "kernels would be compiled" in result.output
    assert not built
    assert precompile(tmp_path, GLM_45, "--tp", "8", "--allow-partial").exit_code == 1, "the fake builds nothing"
    assert built
    assert precompile(tmp_path, BERT, "--allow-partial").exit_code == 3


def test_a_plan_as_json(tmp_path: Path) -> None:
    result = precompile(tmp_path, DEEPSEEK_V32, "--tp", "8", "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert (report["problems"], report["compiled"]) == ([], None)
    layers = {layer["name"]: layer for layer in report["layers"]}
    wanted = {"name": "o_proj", "n": 7168, "k": 2048, "op": "fp8_gemm_nt", "groups": 1, "m": "M = 64", "kernels": 1}
    assert layers["o_proj"] == wanted | {"served": True, "why_not": "", "elsewhere": False}
    assert not layers["mtp.eh_proj"]["served"]
    assert json.loads(precompile(tmp_path, BERT, "--json").output)["problems"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["precompile", *arguments])


def test_shapes_that_no_call_can_use_are_refused() -> None:
    result = run("--shape", "128x2047", "--m", "64")
    assert result.exit_code == 3
    assert "K must be a multiple of 16" in result.output
    assert "K = 2048" in result.output
    with pytest.raises(UnsupportedError, match="multiple of 16"):
        deep_gemm.precompile([(128, 2047)])
    result = run("--shape", "0x2048")
    assert result.exit_code == 2
    assert "N of the shape '0x2048' must be a whole number from 1" in result.output
    result = run("--shape", "64x7168x2048", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "M = 64" in result.output
    assert "every M" not in result.output


@pytest.mark.compile
@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [("HOME", "/dev/null/x", "stored nowhere"), ("DG_JIT_CACHE_DIR", "/proc/nothing", "stored")],
)
def test_nothing_is_called_compiled_that_is_not_kept(
    variable: str, value: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "1")
    monkeypatch.delenv("DG_JIT_CACHE_DIR", raising=False)
    monkeypatch.setenv(variable, value)
    result = run("--shape", "8x128x256", "--jobs", "2")
    assert result.exit_code == 1
    assert words in result.output
    # A pack does not need the cache.
    assert run("--shape", "8x128x256", "--jobs", "2", "--pack", str(tmp_path / "a.dgpack")).exit_code == 0


BF16, FP16 = "bf16_gemm_nt", "fp16_gemm_nt"


def test_operations_are_those_that_exist() -> None:
    assert {*FP8_OPS, *E5M2_OPS, *OPS.values(), *GROUPED_OPS, *BATCHED_OPS} == set(ops.NAMES)
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
        for shape, each in zip(shapes, found[value], strict=True):
            asked = build.spec_of(shape, SM90)
            assert asked.batch_invariant is value
            first = select.rank(asked, SM90)[0].config
            assert first in [params.config for params in each]
    assert found[True] == found[False]
    assert any(len(each) > 1 for each in found[True])
    assert replace(asked, batch_invariant=False) != asked
