"""SwiGLU over two halves of B: what it means, what is refused, and the arithmetic of its cast."""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emulation import built
from host_code import compiled, pairs

import deep_gemm
from deep_gemm import Epilogue, InvalidInputError, UnsupportedError, kernels, ops, quantize, select
from deep_gemm.arch import SM90
from deep_gemm.jit.driver.launch import Map
from deep_gemm.kernels.gemm import GemmFamily
from deep_gemm.kernels.hopper.gated import B16_GATED, FP8_GATED
from deep_gemm.ops.cast_reference import cast_blocks
from deep_gemm.parts import Parts, parse
from deep_gemm.runtime import engine

M, INNER, K = 9, 256, 384
BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
Pair = tuple[torch.Tensor, torch.Tensor]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fp8() -> tuple[Pair, Pair, torch.Tensor]:
    """a, b and the product in float32."""
    a, b = quantize.rows(random(M, K, seed=1)), quantize.blocks(random(2 * INNER, K, seed=2) / 8)
    product = torch.empty(M, 2 * INNER)
    deep_gemm.fp8_gemm_nt(a, b, product)
    return a, b, product


def silu(x: torch.Tensor) -> torch.Tensor:
    """In float64, rounded once: float32 functions of torch differ from CPU to CPU."""
    return (x.double() / (1 + torch.exp(-x.double()))).float()


def steps(product: torch.Tensor, **parts: Any) -> torch.Tensor:
    """The steps one by one."""
    x = product * parts.get("alpha", 1.0)
    x = x + parts["bias"] if "bias" in parts else x
    gate, up = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
    if parts.get("interleaved"):
        gate, up = x.unflatten(1, (-1, 2)).unbind(2)
    if "clamp" in parts:
        gate, up = gate.clamp(max=parts["clamp"]), up.clamp(-parts["clamp"], parts["clamp"])
    h = silu(gate) * up
    return h * parts["row_factor"][:, None] if "row_factor" in parts else h


PARTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clamp": {"clamp": 0.5},
    "all": {"alpha": 0.5, "bias": random(2 * INNER, seed=3), "clamp": 2, "row_factor": random(M, seed=4)},
    "interleaved": {"interleaved": True, "bias": random(2 * INNER, seed=3)},
}


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16])
@pytest.mark.parametrize("name", PARTS)
def test_d_is_silu_of_gate_times_up_rounded_once(name: str, dtype: torch.dtype) -> None:
    a, b, product = fp8()
    d = torch.empty(M, INNER, dtype=dtype)
    deep_gemm.fp8_gemm_nt(a, b, d, epilogue=Epilogue(activation="swiglu", **PARTS[name]))
    assert torch.equal(d, steps(product, **PARTS[name]).to(dtype))


@pytest.mark.parametrize("use_ue8m0", [False, True])
@pytest.mark.parametrize("name", PARTS)
def test_fp8_is_the_cast_of_the_float32_result(name: str, use_ue8m0: bool) -> None:
    a, b, product = fp8()
    d = quantize.rows(torch.zeros(M, INNER))
    deep_gemm.fp8_gemm_nt(a, b, d, epilogue=Epilogue(activation="swiglu", use_ue8m0=use_ue8m0, **PARTS[name]))
    wanted = quantize.rows(steps(product, **PARTS[name]), use_ue8m0=use_ue8m0)
    assert torch.equal(d[0].view(torch.uint8), wanted[0].view(torch.uint8))
    assert torch.equal(d[1], wanted[1])


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_sixteen_bits_have_a_reference(kind: str) -> None:
    dtype, call = {"bf16": (BF16, deep_gemm.bf16_gemm_nt), "fp16": (torch.float16, deep_gemm.fp16_gemm_nt)}[kind]
    a, b = random(M, K).to(dtype), (random(2 * 30, K, seed=1) / 8).to(dtype)
    d = torch.empty(M, 30, dtype=F32)
    call(a, b, d, epilogue=Epilogue(activation="swiglu", clamp=1.0))
    product = (a.double() @ b.double().t()).float()
    assert torch.equal(d, steps(product, clamp=1.0))


def test_k_may_be_0_and_a_row_of_zeros_has_the_least_scale() -> None:
    a, b, _ = fp8()
    d = quantize.rows(torch.ones(M, INNER))
    nothing = [(x[:, :0], sf[:, :0]) for x, sf in (a, b)]
    deep_gemm.fp8_gemm_nt(*nothing, d, epilogue=Epilogue(activation="swiglu"))
    assert (d[0].float() == 0).all()
    assert torch.equal(d[1], torch.full((M, 2), 1e-4) / 448)


def test_what_is_not_finite_stays_in_its_place() -> None:
    a, b, _ = fp8()
    for value in (float("nan"), float("inf"), -float("inf"), 88.0, -88.0, 0.0, -0.0):
        bias = torch.full((2 * INNER,), -60.0)  # silu is tiny there
        bias[7] = value
        d = torch.empty(M, INNER)
        deep_gemm.fp8_gemm_nt(a, b, d, epilogue=Epilogue(bias, "swiglu", alpha=0.0))
        wanted = silu(torch.tensor(value)) * -60.0
        torch.testing.assert_close(d[:, 7], wanted.expand(M), equal_nan=True, rtol=1e-6, atol=0)
        assert d[:, [at for at in range(INNER) if at != 7]].isfinite().all()


def given(d: Any = None, c: Any = None, **parts: Any) -> Callable[[], object]:
    """A call with an epilogue of these parts."""
    a, b, _ = fp8()
    out = torch.empty(M, INNER) if d is None else d
    return lambda: deep_gemm.fp8_gemm_nt(a, b, out, c, epilogue=Epilogue(**{"activation": "swiglu", **parts}))


def pair(rows: int = M, columns: int = INNER) -> Pair:
    return quantize.rows(torch.zeros(rows, columns))


OVERLAPPING = torch.zeros(M * INNER + 4 * M * 2, dtype=torch.uint8)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "d of the product's shape": (given(torch.empty(M, 2 * INNER)),
        r"d must have the shape \(9, 256\), .* gate has half"),
    "c": (given(c=torch.empty(M, INNER)), "c and swiglu cannot be combined: c would have gate's and up's columns"),
    "residual": (given(residual=torch.empty(M, INNER)),
        "swiglu and a residual cannot be combined. Add the residual after"),
    "alpha, a tensor": (given(alpha=torch.ones(1)), "alpha must be a number with swiglu, not a tensor"),
    "bias of half": (given(bias=torch.ones(INNER)),
        r"bias of the epilogue must have the shape \(512,\), but it has \(256,\)"),
    "clamp, negative": (given(clamp=-1.0), "clamp must be a number from 0 that float32 can hold, but it is -1.0"),
    "clamp, too large": (given(clamp=1e39), "clamp must be a number from 0 that float32 can hold"),
    "clamp, a text": (given(clamp="7"), "clamp must be a number from 0 .*, but it is '7'"),
    "clamp of another": (given(activation="silu", clamp=1.0), "clamp is swiglu's limit, but the activation is 'silu'"),
    "interleaved of another": (given(activation="silu", interleaved=True),
        "interleaved says how swiglu's rows of b lie, but the activation is 'silu'. Leave it out"),
    "interleaved": (given(interleaved=1), "interleaved must be True or False, but it is 1"),
    "use_ue8m0": (given(use_ue8m0=1), "use_ue8m0 must be True or False, but it is 1"),
    "use_ue8m0 of no FP8": (given(torch.empty(M, INNER, dtype=BF16), use_ue8m0=True),
        "use_ue8m0 is for the scales of a d of FP8, but d is a torch.bfloat16 tensor. Leave it out, or pass d as"),
    "use_ue8m0 alone": (given(torch.empty(M, 2 * INNER), activation=None, use_ue8m0=True),
        "use_ue8m0 is for the scales of"),
    "alpha, too large": (given(alpha=-1e39), "alpha must be a finite number .*, but it is -1e.39. A number is float32"),
    "values": (given((torch.empty(M, INNER), pair()[1])), "the values of d must be torch.float8_e4m3fn, but they are"),
    "values, shape": (given(pair(M, 2 * INNER)), r"d must have the shape \(9, 256\)"),
    "scales, shape": (given((pair()[0], torch.empty(M, 1))),
        r"the scales of d must be torch.float32 \(9, 2\), one for"),
    "scales, dtype": (given((pair()[0], torch.empty(M, 2).half())), r"the scales of d must be torch.float32 \(9, 2\)"),
    "one of two": (given(pair()[:1]), r"d must be a pair \(tensor, scales\), but it has 1 elements. Pass FP8 values"),
    "overlap": (given((OVERLAPPING[: M * INNER].view(E4M3).view(M, INNER), OVERLAPPING[: M * 8].view(F32).view(M, 2))),
        "d and the scales of d share memory"),
    "odd": (
        lambda: deep_gemm.bf16_gemm_nt(random(M, 8).bfloat16(), random(3, 8).bfloat16(), torch.empty(M, 1),
        epilogue=Epilogue(activation="swiglu")),
        "b must have an even number of rows for swiglu, gate's and then as many of up, but N is 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_in_a_sentence(name: str) -> None:
    call, sentence = REFUSED[name]
    with pytest.raises((InvalidInputError, UnsupportedError), match=sentence):
        call()


NO_KERNEL = {
    "columns": (ops.spec(64, 2 * 320, 512, 132, epilogue="swiglu"),
        "columns of gate, half of N, must be a multiple of 128"),
    "16 bits, N contiguous": (ops.spec(64, 512, 512, 132, "bf16_gemm_nt", majors=("k", "mn"), epilogue="swiglu"),
        "sm90_b16_gated: the layouts of A and B must be NT, not NN"),
    "16 bits, odd": (ops.spec(64, 511, 512, 132, "bf16_gemm_nt", epilogue="swiglu", aligned=True),
        "gate has half of B's rows, so that N must be even, not 511"),
    "16 bits, columns": (
        ops.spec(64, 400, 512, 132, "bf16_gemm_nt", epilogue="swiglu+fp8", output="e4m3", aligned=True),
        "columns of a D of FP8 must be a multiple of 128, not 200"),
    "1D1D": (ops.spec(64, 512, 512, 132, scaling=("1x128", "1x128"), epilogue="swiglu"),
        "scales of A and B must be 1x128 and 128x128"),
    "rows of d": (ops.spec(64, 512, 512, 132, epilogue="swiglu", aligned=False), "rows of D must begin on 16-byte"),
    "by eight": (ops.spec(64, 512, 512, 132, epilogue="swiglu+interleaved:8", aligned=True),
        "sm90_fp8_gated: rows of gate and up that alternate by eight are of products with groups"),
    "16 bits, by eight": (
        ops.spec(64, 512, 512, 132, "bf16_gemm_nt", epilogue="swiglu+interleaved:8", aligned=True),
        "sm90_b16_gated: rows of gate and up that alternate by eight are FP8"),
    "by eight, bias": (ops.spec(64, 512, 512, 132, "m_grouped_fp8_gemm_nt_masked", groups=2, expected_m=64,
        epilogue="bias:f32+swiglu+interleaved:8", aligned=True), "bias and eight rows of gate and up in turn"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_KERNEL)
def test_what_has_no_kernel_says_why(name: str) -> None:
    spec, sentence = NO_KERNEL[name]
    with pytest.raises(UnsupportedError, match=sentence):
        kernels.for_spec(spec, SM90)


@pytest.mark.parametrize("grouping", ["none", "contiguous", "psum", "masked"])
@pytest.mark.parametrize("output", ["bf16", "f16", "f32", "e4m3"])
@pytest.mark.parametrize("op", ["fp8_gemm_nt", "bf16_gemm_nt", "fp16_gemm_nt"])
def test_all_that_a_scale_is_for_is_in_one_tile(op: str, output: str, grouping: str) -> None:
    """FP8 is written by tiles of 128 columns of D; groups have no clusters."""
    if output in ("bf16", "f16") and output != ops.PRODUCTS[op].outputs[0] and op != "fp8_gemm_nt":
        return
    family, text = FP8_GATED if op == "fp8_gemm_nt" else B16_GATED, "swiglu" + "+fp8" * (output == "e4m3")
    spec = ops.spec(256, 4096, 7168, 132, op, epilogue=text, output=output, aligned=True)  # type: ignore[arg-type]
    more = {"none": {}, "masked": {"groups": 4, "expected_m": 20}}.get(grouping, {"groups": 4, "alignment": 128})
    spec = replace(spec, grouping=grouping, **more)
    assert {each.config.family for each in select.rank(spec, SM90)} == {family.name}
    fitting = family.fitting(spec, family.configs(SM90))
    assert {config.block_n for config in fitting} == ({256} if output == "e4m3" else {64, 128, 256})
    assert all(config.cluster_size * config.ctas_per_sm == 1 for config in fitting) or grouping == "none"


@pytest.mark.parametrize(
    ("m", "text", "tile"), [(1, "", 64), (64, "rows+bias:f32+", 64), (64, "alpha+", 128), (4096, "", 128)]
)
def test_few_rows_have_a_tile_of_their_own(m: int, text: str, tile: int) -> None:
    """FP8 output takes all 128 columns of a scale; a lone consumer of these has no registers for alpha."""
    spec = ops.spec(m, 4096, 7168, 132, epilogue=f"{text}swiglu+fp8", output="e4m3", aligned=True)
    config = select.rank(spec, SM90)[0].config
    assert (config.block_m, config.block_n) == (tile, 256)


ALL = "alpha+rows+bias:bf16+swiglu+clamp:7.0+fp8:ue8m0"


@pytest.mark.compile
@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "tile", "texts"),
    [
        (FP8_GATED, (64, 256, (1, 1), 2, 1), ("swiglu+fp8", "bias:f32+swiglu+fp8", ALL.removeprefix("alpha+"))),
        (FP8_GATED, (128, 256, (2, 1), 1, 1), ("alpha+swiglu+fp8", "alpha+rows+swiglu+clamp:7.0+fp8", ALL)),
        (B16_GATED, (128, 256, (2, 1, 1)), ("alpha+swiglu+fp8", ALL)),
    ],
)
def test_the_widest_tiles_spill_nothing(family: GemmFamily, tile: Any, texts: tuple[str, ...]) -> None:
    """Alpha and SwiGLU without a bias spilled 48 bytes: ptxas mixed all columns."""
    for text in texts:
        assert engine.build(family.case(family.config(*tile), epilogue=text, output="e4m3")).resources.problems() == []


@pytest.mark.parametrize("n", [16, 112, 400, 4096])
def test_boxes_of_a_gate_and_of_up_are_whole(n: int) -> None:
    """Kernels wait for all rows of both, also of those past the last one."""
    spec = ops.spec(70, n, 512, 132, "bf16_gemm_nt", epilogue="swiglu", aligned=True)
    for config in B16_GATED.configs(SM90):
        params = B16_GATED.params(spec, config, SM90)
        strides = {"a": (512, 1), "b": (512, 1), "d": (n // 2, 1)}
        maps = [
            each
            for each in B16_GATED.launch_plan(params, spec, strides, False, False).parameters
            if isinstance(each, Map)
        ]  # type: ignore[arg-type]
        of_b = {each.spec for each in maps if each.operand == "b"}
        assert [(each.box, each.dims) for each in of_b] == [((64, config.block_n // 2 // config.cluster_m), (512, n))]
        (of_d,) = (each.spec for each in maps if each.operand == "d")
        assert of_d.dims == (n // 2, 70)


@pytest.mark.parametrize("op", ["bf16_gemm_nt", "fp8_gemm_nt", "m_grouped_fp8_gemm_nt_masked"])
def test_interleaved_rows_are_two_matrices(op: str) -> None:
    """One of each second row, and one of the rows between; groups lie one after the other."""
    family, size = (B16_GATED, 2) if op == "bf16_gemm_nt" else (FP8_GATED, 1)
    groups = 3 if "grouped" in op else 1
    spec = ops.spec(70, 512, 384, 132, op, groups=groups, expected_m=64, epilogue="swiglu+interleaved", aligned=True)
    strides = {
        "a": (384, 1),
        "b": (400, 1),
        "d": (256, 1),
        "sfa": (1, 72),
        "sfb": (6, 3, 1)[-2 if groups == 1 else 0 :],
    }
    params = family.params(spec, family.configs(SM90)[0], SM90)
    made = family.launch_plan(params, spec, strides, False, False)  # type: ignore[arg-type]
    gate, up = (each for each in made.parameters if isinstance(each, Map) and each.operand == "b")
    assert gate.spec == up.spec
    assert (gate.spec.dims, gate.spec.strides) == ((384, groups * 256), (2 * 400 * size,))
    assert (gate.offset, up.offset) == (0, 400 * size)


_BOXES = """
void call() {}
extern "C" void boxes(u32 row, u32 k, unsigned long* found) {
  using B = GatedTile<%d, 1, 1, 8>;
  const TensorMap* maps = nullptr;
  B::with_boxes({maps, maps + 1, 0, 0}, row, 0, [&](const auto& each_box) {
    each_box(k, [&](const TensorMap* map, u32 place, u32 x, u32 y, u32 z) {
      for (u64 each : {u64(map - maps), u64(place), u64(x), u64(y), u64(z)}) *found++ = each;
    });
  });
}
"""


@pytest.mark.parametrize("width", [64, 256])
def test_eight_rows_in_turn_land_where_those_of_halves_do(width: int, tmp_path: Path) -> None:
    """Boxes of device code, of maps of a launch: each row of the tile is gate's or up's, in order."""
    groups, n, k, row_bytes = 3, 512, 384, 400
    op, text = "m_grouped_fp8_gemm_nt_masked", "swiglu+interleaved:8"
    spec = ops.spec(70, n, k, 132, op, groups=groups, expected_m=64, epilogue=text, aligned=True)
    (config, *_) = (each for each in FP8_GATED.configs(SM90) if (each.block_n, each.cluster_size) == (width, 1))
    strides = {"a": (k, 1), "b": (row_bytes, 1), "d": (n // 2, 1), "sfa": (1, 72), "sfb": (12, 3, 1)}
    made = FP8_GATED.launch_plan(FP8_GATED.params(spec, config, SM90), spec, strides, False, False)  # type: ignore[arg-type]
    maps = [each for each in made.parameters if isinstance(each, Map) and each.operand == "b"]
    library, boxes = built(tmp_path / "boxes", '#include "operand.cuh"', _BOXES % width), (ctypes.c_ulong * 10)()
    for group, column in ((0, 0), (2, width)):
        first = group * n // 2 + column // 2
        library.boxes(first, 128, boxes)
        tile = {}
        for index, place, x, y, z in zip(*[iter(boxes)] * 5, strict=True):
            box, (of_row, of_eight) = maps[index].spec.box, maps[index].spec.strides
            assert (x, box[0]) == (128, 128)
            for i in range(box[1] * box[2]):
                byte = maps[index].offset + (y + i % box[1]) * of_row + (z + i // box[1]) * of_eight
                tile[place // 128 + i] = byte / row_bytes
        columns = range(column // 2, column // 2 + width // 2)
        wanted = [group * n + c // 8 * 16 + c % 8 + 8 * up for up in range(2) for c in columns]
        assert [tile[i] for i in range(width)] == wanted
        assert max(wanted) < maps[0].spec.dims[2] * 16


TEXTS = {
    Parts(activation="swiglu"): "swiglu",
    Parts(activation="swiglu", clamp=7.0, cast="1x128"): "swiglu+clamp:7.0+fp8",
    Parts(activation="swiglu", clamp=7.0, interleaved=True): "swiglu+interleaved+clamp:7.0",
    Parts(activation="swiglu", clamp=7.0, interleaved=8): "swiglu+interleaved:8+clamp:7.0",
    Parts(True, True, "bf16", "swiglu", False, 0.1, "ue8m0"): "alpha+rows+bias:bf16+swiglu+clamp:0.1+fp8:ue8m0",
}


@pytest.mark.parametrize("parts", TEXTS, ids=str)
def test_a_text_names_all_parts(parts: Parts) -> None:
    assert str(parts) == TEXTS[parts]
    assert parse(str(parts)) == parts


# ------------------------------------------------------------------------------------------------ arithmetic


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    code = "".join(
        f'extern "C" void {name}(float* x, long count) {{ for (long i = 0; i < count; ++i) x[i] = {of}; }}\n'
        for name, of in (
            ("scale", "ScaleRule{0x38D1B717, false}.scale_of_normal(__float_as_uint(x[i]))"),
            ("power", "ScaleRule{0x38D1B717, true}.scale_of_normal(__float_as_uint(x[i]))"),
            ("inverse", "ScaleRule::inverse_of_normal(x[i])"),
        )
    )
    return compiled(tmp_path_factory.mktemp("host"), "scale_rule.cuh", code)


@pytest.mark.parametrize("name", ["scale", "power", "inverse"])
def test_the_scale_without_branches_is_that_of_a_division(library: ctypes.CDLL, name: str) -> None:
    """For each mantissa, and each exponent that a scale may have."""
    mantissas = torch.arange(1 << 23, dtype=torch.int32) | 127 << 23
    exponents = torch.arange(114, 255, dtype=torch.int32)[:, None] << 23 | random(997).mul(2**22).int().abs()
    special = torch.tensor([0.0, 1e-5, 1e-4, 448.0, float("inf"), float("nan")])
    x = torch.cat([mantissas.view(F32), exponents.flatten().view(F32), special])
    found = pairs(library, name, x)
    if name == "inverse":
        wanted = (1 / x.double()).float()  # a double's quotient rounds as a float's: it has more than twice the bits
        wanted, found = (each[(x > 2**-24) & (x < 2.0**120)] for each in (wanted, found))  # as scales may be
    else:
        wanted = cast_blocks(x[:, None], 1, 128, name == "power")[1][:, 0]
    assert torch.equal(found.nan_to_num(-1), wanted.nan_to_num(-1))
