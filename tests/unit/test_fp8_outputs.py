"""Products that write FP8 with 1x128 scales, without a gate: what they mean, what is refused, and their kernels."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import built
import pytest
import torch
from gpu_fakes import FakeGpu

import deep_gemm
from deep_gemm import Epilogue, InvalidInputError, UnsupportedError, kernels, ops, options, quantize, select
from deep_gemm.aot import build
from deep_gemm.aot.workload import GemmShape
from deep_gemm.arch import SM90
from deep_gemm.kernels.epilogues import apart
from deep_gemm.kernels.families import B16_GEMM, FP8_GROUPED, FP8_SCALED
from deep_gemm.kernels.quantize_kernels import FEW_ROWS, SOME_ROWS
from deep_gemm.ops.reference import ACTIVATIONS
from deep_gemm.parts import parse
from deep_gemm.runtime import engine
from deep_gemm.select import calibration, casts, representative, representatives
from deep_gemm.select.heuristic import least
from deep_gemm.spec import GemmSpec

M, N, K = 9, 256, 384
Pair = tuple[torch.Tensor, torch.Tensor]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def operands() -> tuple[Pair, Pair]:
    return quantize.rows(random(M, K, seed=1)), quantize.blocks(random(N, K, seed=2) / 8)


def pair(rows: int = M, columns: int = N) -> Pair:
    return quantize.rows(torch.zeros(rows, columns))


PARTS: dict[str, dict[str, Any]] = {
    "none": {},
    "all": {"alpha": 0.5, "bias": random(N, seed=3), "row_factor": random(M, seed=4)},
    **{name: {"activation": name} for name in ACTIVATIONS},
}


def epilogues(name: str, **more: Any) -> Epilogue:
    if name == "custom":
        body, scale = "return fminf(x * scale, 1.0f) + row + column;", random(N, seed=5)

        def reference(x: torch.Tensor, scale: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
            return (x * scale).clamp(max=1.0) + row + column

        return Epilogue.custom("own", body, columns={"scale": scale}, reference=reference, **more)
    return Epilogue(**PARTS[name], **more)


@pytest.mark.parametrize("use_ue8m0", [False, True])
@pytest.mark.parametrize("name", [*PARTS, "custom"])
def test_it_is_the_cast_of_the_float32_result(name: str, use_ue8m0: bool) -> None:
    (a, b), exact, d = operands(), torch.empty(M, N), pair()
    deep_gemm.fp8_gemm_nt(a, b, exact, epilogue=epilogues(name))
    deep_gemm.fp8_gemm_nt(a, b, d, epilogue=epilogues(name, use_ue8m0=use_ue8m0))
    wanted = quantize.rows(exact, use_ue8m0=use_ue8m0)
    assert torch.equal(d[0].view(torch.uint8), wanted[0].view(torch.uint8))
    assert torch.equal(d[1], wanted[1])


def given(c: Any = None, d: Any = None, **parts: Any) -> Callable[[], object]:
    a, b = operands()
    out = pair() if d is None else d
    return lambda: deep_gemm.fp8_gemm_nt(a, b, out, c, epilogue=Epilogue(**parts))


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "c": (
        given(c=pair()[0]),
        "c and a d of FP8 cannot be combined. Pass a d of c's dtype, and cast it with deep_gemm.q",
    ),
    "residual": (given(residual=pair()[0], activation="silu"), "residual and a d of FP8 cannot be combined"),
    "shape": (given(d=pair(M, 2 * N)), r"d must have the shape \(9, 256\)"),
    "without an epilogue": (
        lambda: deep_gemm.fp8_gemm_nt(*operands(), pair()),  # type: ignore[arg-type]
        r"d must be a torch.Tensor without an epilogue, but it is of type tuple. For FP8 values and their scales pass",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_in_a_sentence(name: str) -> None:
    call, sentence = REFUSED[name]
    with pytest.raises((InvalidInputError, UnsupportedError), match=sentence):
        call()


def spec(m: int = 256, n: int = 4096, text: str = "gelu+fp8", **more: Any) -> GemmSpec:
    return ops.spec(m, n, 7168, 132, epilogue=text, **{"output": "e4m3", "aligned": True, **more})


NO_KERNEL = {
    "columns": (spec(n=320), "columns of a D of FP8 must be a multiple of 128, not 320"),
    "rows of d": (spec(aligned=False), "rows of a D of FP8 must begin on 16-byte boundaries"),
    "c": (spec(accumulate="from c"), "it adds nothing to a D of FP8 but a bias"),
    "residual": (spec(text="residual+fp8"), "it adds nothing to a D of FP8 but a bias"),
    "no scales": (
        spec(text="gelu"),
        "D of FP8 has scales, which an epilogue asks for, but D is e4m3 and the epilogue g",
    ),
    "no FP8": (spec(output="f32"), r"D of FP8 has scales, .* but D is f32 and the epilogue gelu\+fp8"),
}


@pytest.mark.parametrize("name", NO_KERNEL)
def test_what_has_no_kernel_says_why(name: str) -> None:
    asked, sentence = NO_KERNEL[name]
    with pytest.raises(UnsupportedError, match=sentence):
        kernels.for_spec(asked, SM90)


SCALINGS = (("1x128", "128x128"), ("1x128", "1x128"), ("row", "row"))


@pytest.mark.parametrize("majors", ["kk", "km", "mm", "mk"])
@pytest.mark.parametrize("op", ["bf16_gemm_nt", "fp16_gemm_nt"])
def test_sixteen_bits_have_it_in_all_layouts(op: str, majors: str) -> None:
    of_a, of_b = ("k" if each == "k" else "mn" for each in majors)
    asked = ops.spec(256, 4096, 7168, 132, op, majors=(of_a, of_b), epilogue="gelu+fp8", output="e4m3", aligned=True)  # type: ignore[arg-type]
    ranked = select.rank(asked, SM90)
    assert {each.config.family for each in ranked} == {B16_GEMM.name}
    assert {each.config.block_n // each.config.cluster_k for each in ranked} == {128, 256}


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("grouping", ["none", "contiguous", "psum", "masked"])
def test_a_consumer_has_all_columns_of_a_scale(grouping: str, scaling: Any) -> None:
    if grouping != "none" and scaling != SCALINGS[0]:
        return
    more = {"none": {}, "masked": {"groups": 4, "expected_m": 20}}.get(grouping, {"groups": 4, "alignment": 128})
    ranked = select.rank(replace(spec(scaling=scaling), grouping=grouping, **more), SM90)
    assert {each.config.family for each in ranked} == {(FP8_SCALED if grouping == "none" else FP8_GROUPED).name}
    widths = {each.config.block_n for each in ranked}
    assert {128} <= widths <= {128, 256}
    assert all(kernels.gemm_family(each.config.family).template.mma_n(each.config) == 128 for each in ranked)


@pytest.mark.long
@pytest.mark.compile
@pytest.mark.parametrize("text", ["fp8", "alpha+rows+bias:f32+gelu_erf+fp8:ue8m0", "bias:bf16+silu+fp8"])
@pytest.mark.parametrize(("scaling", "tile"), [("1d2d", (128, 256, (2, 1), 1, 1)), ("rowwise", (128, 128))])
def test_the_widest_tile_spills_nothing(text: str, scaling: str, tile: Any) -> None:
    params = FP8_SCALED.case(FP8_SCALED.config(*tile), scaling=scaling, epilogue=text, output="e4m3")
    assert engine.build(params).resources.problems() == []


def test_kernels_get_the_scales_as_an_operand(gpu: FakeGpu) -> None:
    a, b = operands()
    scales = torch.zeros(2, M + 7)[:, :M].t()
    for epilogue, text in ((Epilogue(), "fp8"), (Epilogue(activation="silu", use_ue8m0=True), "silu+fp8:ue8m0")):
        for _ in range(2):
            values = torch.zeros(M, N + 16).to(torch.float8_e4m3fn)[:, :N]
            deep_gemm.fp8_gemm_nt(a, b, (values, scales), epilogue=epilogue)
            launched = gpu.launched[-1]
            assert (launched.spec.n, launched.spec.d.dtype, launched.spec.d.scaling) == (N, "e4m3", "1x128")
            assert str(launched.spec.epilogue) == text
            assert (launched.strides["d"], launched.strides["sfd"]) == ((N + 16, 1), (1, M + 7))
            assert (launched.at["d"], launched.at["sfd"]) == (values.data_ptr(), scales.data_ptr())


FP8, BF16 = "fp8_gemm_nt", "bf16_gemm_nt"
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
FEW, MANY = (1, 1536, 2048), (300, 1536, 256)
"""M, N and K of SwiGLU to FP8 in two launches and in one, FP8 and BF16, on both cards."""


def launches(m: int, n: int, k: int, op: str = FP8, text: str = "swiglu+fp8", card: str = H200, **more: Any) -> int:
    asked = replace(ops.spec(m, n, k, 132, op, epilogue=text, output="e4m3", aligned=True), **more)
    return casts.casting(asked, SM90, calibration.for_device(card)).launches


SIZES = {
    "few tokens": (1, 64, 4096, 7168, 2),
    "some tokens": (65, 256, 4096, 7168, 2),
    "many tokens": (700, 8192, 4096, 7168, 1),
    "short K": (1, 8192, 4096, 256, 1),
    "many columns": (1, 8192, 28672, 4096, 1),
}
"""The least M and the most, N, K, and the launches of SwiGLU."""


@pytest.mark.parametrize("card", [H100, H200])
@pytest.mark.parametrize("op", [FP8, BF16])
@pytest.mark.parametrize("sizes", SIZES)
def test_few_rows_take_two_launches(sizes: str, op: str, card: str) -> None:
    least, most, n, k, wanted = SIZES[sizes]
    found = {m: launches(m, n, k, op, card=card) for m in representatives(most) if m >= least}
    assert set(found.values()) == {wanted}, found


@pytest.mark.parametrize("card", [H100, H200])
@pytest.mark.parametrize("op", [FP8, BF16])
@pytest.mark.parametrize(("n", "k"), [(3584, 5120), (1536, 2048), (6400, 5120), (14336, 4096)])
def test_the_launches_change_once_with_m(n: int, k: int, op: str, card: str) -> None:
    found = [launches(m, n, k, op, card=card) for m in representatives(2048)]
    assert found == sorted(found, reverse=True)
    assert found[-1] == 1


def test_without_a_gate_too() -> None:
    for op, m in itertools.product((FP8, BF16), (1, 64)):
        assert launches(m, 4096, 7168, op, "bias:f32+silu+fp8") == 2
        assert launches(m, 32768, 2048, op, "bias:f32+silu+fp8") == 1


@pytest.mark.parametrize("grouping", ["contiguous", "psum", "masked", "batched"])
def test_groups_and_other_outputs_have_one_launch(grouping: Any) -> None:
    assert apart(replace(spec(), grouping=grouping)) is None
    assert apart(spec(text="gelu", output="bf16")) is None
    assert apart(spec()) is not None


@pytest.mark.parametrize(
    ("text", "plain", "columns"),
    [
        ("fp8", "none", 4096),
        ("alpha+bias:f32+gelu+fp8:ue8m0", "alpha+bias:f32+gelu", 4096),
        ("swiglu+fp8", "swiglu", 2048),
    ],
)
def test_the_second_launch_is_that_of_quantize_rows(gpu: FakeGpu, text: str, plain: str, columns: int) -> None:
    both = apart(spec(64, 4096, text))
    assert both is not None
    assert (str(both[0].epilogue), both[0].d.dtype, both[0].d.scaling) == (plain, "f32", "none")
    quantize.rows(torch.zeros(64, columns), use_ue8m0="ue8m0" in text)
    assert both[1] == gpu.launched[-1].spec


def gated_operands(op: str, m: int, n: int, k: int) -> tuple[Any, Any]:
    x, w = random(m, k, seed=1), random(n, k, seed=2) / 8
    return (quantize.rows(x), quantize.blocks(w)) if op == FP8 else (x.bfloat16(), w.bfloat16())


@pytest.mark.parametrize("op", [FP8, BF16])
def test_a_call_of_few_rows_is_a_product_and_a_cast(gpu: FakeGpu, op: str) -> None:
    """Of float32 sums in scratch memory, into the caller's values and scales: cold, with other addresses, and warm."""
    m, n, _ = FEW
    a, b = gated_operands(op, *FEW)
    gpu.launched.clear()
    scales = torch.zeros(n // 256, m + 7)[:, :m].t()
    outputs = [torch.zeros(m, n // 2 + 16).to(torch.float8_e4m3fn)[:, : n // 2] for _ in range(2)]
    row_factor = torch.ones(m)
    for index, values in enumerate([*outputs, *outputs]):
        epilogue = Epilogue(activation="swiglu", use_ue8m0=True, row_factor=row_factor)
        getattr(deep_gemm, op)(a, b, (values, scales), epilogue=epilogue)
        assert len(gpu.launched) == 2 * index + 2
        product, cast = gpu.launched[-2:]
        assert (product.kernel, product.spec.d.dtype, str(product.spec.epilogue)) == ("gemm", "f32", "rows+swiglu")
        assert (product.strides["d"], cast.strides["x"]) == ((n // 2, 1), (n // 2, 1))
        assert (cast.kernel, cast.spec.power_of_two, cast.spec.rows) == ("quantize", True, m)
        assert product.at["row_factor"] == row_factor.data_ptr()
        assert "sfd" not in product.at
        assert cast.at == {"x": product.at["d"], "values": values.data_ptr(), "scales": scales.data_ptr()}
        assert product.at["d"] not in (values.data_ptr(), scales.data_ptr())
        assert cast.strides["scales"] == scales.stride()
        assert cast.strides["values"][1] == 1
    getattr(deep_gemm, op)(*gated_operands(op, *MANY), pair(MANY[0], n // 2), epilogue=Epilogue(activation="swiglu"))
    assert gpu.launched[-1].kernel == "gemm"
    assert gpu.launched[-1].spec.d.dtype == "e4m3"


def test_reports_say_which_way_was_taken(gpu: FakeGpu) -> None:
    for sizes, kernels_of_call, wanted in ((FEW, "gemm + quantize", 2), (MANY, "gemm", 1)):
        (a, b), d = gated_operands(BF16, *sizes), pair(sizes[0], sizes[1] // 2)
        with deep_gemm.monitor() as found:
            deep_gemm.bf16_gemm_nt(a, b, d, epilogue=Epilogue(activation="swiglu"))
        (entry,) = found.report()["calls"]
        assert (entry["kernel"], entry["calls"]) == (kernels_of_call, 1)
        assert entry["flops"] == 2 * sizes[0] * sizes[1] * sizes[2]
        said = [each for each in deep_gemm.debug_info()["castings"] if each["spec"]["m"] == sizes[0]][-1]
        assert said["launches"] == wanted
        assert (said["one_us"] > 1.2 * said["two_us"]) == (wanted == 2)


@pytest.mark.parametrize("op", [FP8, BF16])
def test_kernels_of_both_launches_are_compiled_ahead(gpu: FakeGpu, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every M, in both positions of the switch for batch invariance; and so are those of one launch above."""
    monkeypatch.setattr(options.current(), "measured_times", False)  # of the tests before, if these tuned
    n, k, parts = 3584, 5120, parse("bias:f32+swiglu+fp8")
    kinds = set()
    try:
        for value, m in itertools.product((False, True), (1, 17, 64, 145, 147, 1100)):
            deep_gemm.set_batch_invariant(value)
            listed = build.kernels_of(GemmShape(representative(m), n, k, op=op, epilogue=parts), SM90)
            product, cast = engine.launches(build.spec_of(GemmShape(m, n, k, op=op, epilogue=parts), SM90), 0)
            called = {built.params_of(each, 0) for each in (product, cast) if each is not None}
            assert called <= set(listed)
            kinds |= {(cast is not None, value)} | {each.config for each in called if each.kernel == "quantize"}
    finally:
        deep_gemm.set_batch_invariant(False)
    assert {(True, True), (True, False), (False, True), (False, False)} <= kinds
    assert {FEW_ROWS, SOME_ROWS} <= kinds


@pytest.mark.parametrize(("op", "parts"), [(FP8, 1), (BF16, 4)])
def test_both_ways_have_one_order_of_sums_under_batch_invariance(op: str, parts: int) -> None:
    """Whatever M is, K has as many parts; without the switch it has not."""
    split: dict[bool, set[int]] = {True: set(), False: set()}
    for value, m in itertools.product(split, representatives(256)):
        asked = replace(spec(m, 512, "fp8", op=op), batch_invariant=value)
        for each in casts.all_launches(asked, SM90, calibration.default()):
            if isinstance(each, GemmSpec):
                assert each.batch_invariant is value
                config = select.select(each, SM90).config
                split[value].add(config.k_splits * config.in_turn)
    assert split[True] == {parts}
    assert len(split[False]) > 1


def test_the_least_m_of_a_choice() -> None:
    for m in representatives(5000):
        assert representative(least(m)) == m
        assert least(m) == 1 or representative(least(m) - 1) < m
