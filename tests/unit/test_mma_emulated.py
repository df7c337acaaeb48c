"""Kernels with mma.sync on the CPU, compared with float64: every layout, output and edge, and that faults are found."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulation import Emulated
from mma_cases import ALL, OWN, case, check_dense, check_groups, dense_spec, memory

from deep_gemm import kernels
from deep_gemm.params import KernelParams
from deep_gemm.parts import Parts, parse

Make = Callable[..., Emulated]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Compiled kernels. Those without faults are kept."""
    kept: dict[KernelParams, Emulated] = {}

    def made(params: KernelParams, *edits: tuple[str, str, str]) -> Emulated:
        if edits:
            return Emulated(tmp_path_factory.mktemp("broken") / "kernel", params, *edits)
        if params not in kept:
            kept[params] = Emulated(tmp_path_factory.mktemp("kernel") / "kernel", params)
        return kept[params]

    return made


TILES = kernels.gemm_family("mma_gemm").serving


@pytest.mark.parametrize(
    "tile", [pytest.param(tile, marks=[pytest.mark.long] * (i % 3 > 0), id=str(tile)) for i, tile in enumerate(TILES)]
)
def test_each_tile(make: Make, tile: tuple[Any, ...]) -> None:
    emulated = make(case("mma_gemm", tile, "sm_90a"))  # where all are legal
    check_dense(emulated, tile[0] + 36, tile[1] + 8, 5 * tile[2] + 20)


@pytest.mark.parametrize("sizes", [(1, 8, 1), (64, 64, 64), (65, 72, 129), (200, 200, 40), (17, 136, 700)], ids=str)
@pytest.mark.parametrize("form", ["nt", "nn", "tn", "tt"])
def test_layouts_and_edges(make: Make, form: str, sizes: tuple[int, int, int]) -> None:
    check_dense(make(case("mma_gemm", (64, 64, 64, 4, 2), form=form)), *sizes)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "f16", "output": "f16", "form": "tt"},
        {"output": "f32"},
        {"output": "f32", "adds_c": "threads", "store": "direct"},
        {"adds_c": "threads", "epilogue": ALL},
        {"dtype": "f16", "output": "f16", "store": "direct", "epilogue": ALL.replace("f32", "bf16")},
        {"output": "f32", "epilogue": str(Parts(alpha=True, expression=OWN))},
    ],
    ids=lambda options: "-".join(options.values()).split(" ")[0],
)
def test_outputs(make: Make, options: dict[str, Any]) -> None:
    text = options.get("epilogue")
    params = case("mma_gemm", (64, 128, 32, 4, 2), **options | ({"epilogue": parse(text)} if text else {}))
    for m, n, k in ((100, 136, 72), (3, 264, 100)):
        check_dense(make(params), m, n if params.store == "tma" else n + 3, k)


@pytest.mark.parametrize(
    ("tile", "options"),
    [
        ((8, 32, 8, 1), {}),
        ((16, 64, 4, 1), {"form": "nn"}),
        ((16, 16, 8, 1), {"output": "f32", "adds_c": "threads", "epilogue": ALL}),
        ((8, 32, 4, 2), {"dtype": "f16", "output": "f16", "adds_c": "threads"}),
    ],
    ids=str,
)
def test_decode(make: Make, tile: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Each warp has blocks of K, or none. K is split where tiles are few, and sums are added in order."""
    emulated = make(case("mma_decode", tile, **options))
    for m, n, k in ((1, 64, 4096), (tile[0], 200, 72), (tile[0] - 3, 75, 520), (5, 48, 1640)):
        check_dense(emulated, m, n, k)
        check_dense(emulated, m, n, k, backwards=True)


@pytest.mark.parametrize(
    ("tile", "options"),
    [
        ((32, 2), {"output": "f32", "adds_c": "threads", "epilogue": ALL}),
        ((32, 1), {"form": "nn", "dtype": "f16", "output": "f16", "adds_c": "threads"}),
        ((64, 1), {"epilogue": ALL}),
    ],
    ids=str,
)
def test_few_rows(make: Make, tile: tuple[Any, ...], options: dict[str, Any]) -> None:
    """K is split where there are fewer tiles than places, and the sums of the parts are added in order."""
    emulated = make(case("mma_swapped", tile, **options))
    for m, n, k in ((1, 64, 1000), (tile[0], 200, 72), (tile[0] - 3, 75, 520), (tile[0] + 1, 128, 64)):
        check_dense(emulated, min(m, 64), n, k)
        check_dense(emulated, min(m, 64), n, k, backwards=True)


def each_once(cases: list[tuple[Any, ...]], others: list[str]) -> list[Any]:
    """Every case with every other argument. In `make test` a case has one of them."""
    return [
        pytest.param(
            *case, other, marks=[pytest.mark.long] * (i % len(others) != j), id="-".join(map(str, (*case, other)))
        )
        for i, case in enumerate(cases)
        for j, other in enumerate(others)
    ]


FP8 = [
    ("mma_fp8", (64, 64, 128, 4, 1), {}),
    ("mma_fp8", (128, 128, 128, 8, 1), {"output": "f32", "adds_c": "threads", "store": "direct"}),
    ("mma_fp8_decode", (8, 32, 8, 1), {}),
    ("mma_fp8_decode", (16, 64, 4, 1), {"output": "f32", "adds_c": "threads", "epilogue": ALL}),
    ("mma_fp8_swapped", (32, 1), {}),
    ("mma_fp8_swapped", (64, 1), {"output": "f32", "adds_c": "threads", "epilogue": ALL}),
]


@pytest.mark.parametrize(("family", "tile", "options", "target"), each_once(FP8, ["sm_80", "sm_89", "sm_120a"]))
def test_fp8(make: Make, family: str, tile: tuple[Any, ...], options: dict[str, Any], target: str) -> None:
    emulated = make(case(family, tile, target, **options))
    for m, n, k in ((1, 64, 1024), (50, 200, 128), (61, 264, 432)):
        check_dense(emulated, min(m, tile[0]) if "decode" in family else m, n, k)


PACKED = [
    *(case for case in FP8 if case[0] != "mma_fp8"),
    ("mma_fp8", (64, 128, 128, 4, 1), {}),
    ("mma_fp8", (128, 128, 128, 8, 1), {"output": "f32", "adds_c": "threads", "store": "direct"}),
]


@pytest.mark.parametrize(("family", "tile", "options", "target"), each_once(PACKED, ["sm_120a", "sm_80", "sm_89"]))
def test_exponents(make: Make, family: str, tile: tuple[Any, ...], options: dict[str, Any], target: str) -> None:
    """Scales of UE8M0, four to a word, scale the products of 12.0; elsewhere they become floats."""
    emulated = make(case(family, tile, target, scaling="ue8m0", **options))
    for m, n, k in ((1, 64, 1024), (50, 200, 128), (61, 264, 688)):
        check_dense(emulated, min(m, tile[0]) if "decode" in family else m, n, k)


@pytest.mark.parametrize(("family", "tile"), [("mma_fp8_swapped", (32, 1)), ("mma_fp8_decode", (8, 32, 8, 1))], ids=str)
def test_each_byte_is_widened_to_its_value(make: Make, family: str, tile: tuple[Any, ...]) -> None:
    """By FP16, where there are no products of FP8; NaN stays NaN."""
    emulated = make(case(family, tile, output="f32"))
    a = torch.zeros(16, 16, dtype=torch.uint8)
    a[0, 0] = 0x38  # 1.0
    b, d = torch.arange(256).to(torch.uint8)[:, None].repeat(1, 16), torch.empty(1, 256)
    spec = dense_spec(emulated.params, 1, 256, 16)
    one = a[:1].view(torch.float8_e4m3fn)
    operands = {"a": one, "b": b.view(torch.float8_e4m3fn), "d": d, "memory": memory()}
    emulated(spec, operands | {"sfa": torch.ones(1, 1), "sfb": torch.ones(2, 1)})
    exact = b.view(torch.float8_e4m3fn)[:, 0].float()
    exact[b[:, 1] & 0x7F == 0x7F] = float("nan")
    torch.testing.assert_close(d[0], exact, rtol=0, atol=0, equal_nan=True)


GROUPED = [
    ("mma_grouped", (64, 64, 64, 4, 1), {"epilogue": "bias:f32+relu"}),
    ("mma_grouped", (64, 128, 32, 4, 1), {"form": "nn", "store": "direct"}),
    ("mma_fp8_grouped", (64, 128, 128, 4, 1), {}),
    ("mma_grouped_swapped", (16, 1), {"epilogue": "bias:f32+relu"}),
    ("mma_grouped_swapped", (64, 1), {"form": "nn", "store": "direct"}),
    ("mma_fp8_grouped_swapped", (16, 2), {}),
    ("mma_fp8_grouped_swapped", (32, 1), {}),
]


@pytest.mark.parametrize(("family", "tile", "options", "form"), each_once(GROUPED, ["contiguous", "psum", "masked"]))
def test_groups(make: Make, family: str, tile: tuple[Any, ...], options: dict[str, Any], form: str) -> None:
    check_groups(make(case(family, tile, "sm_89", grouping=form, **options)), [130, 0, 64, 5], 136, 272)


PACKED_GROUPS = [(*case, target) for case in GROUPED if "fp8" in case[0] for target in ("sm_120a", "sm_89")]


@pytest.mark.parametrize(
    ("family", "tile", "options", "target", "form"), each_once(PACKED_GROUPS, ["contiguous", "psum", "masked"])
)
def test_exponents_of_groups(
    make: Make, family: str, tile: tuple[Any, ...], options: dict[str, Any], target: str, form: str
) -> None:
    emulated = make(case(family, tile, target, grouping=form, scaling="ue8m0", **options))
    check_groups(emulated, [130, 0, 64, 5], 136, 656)


def test_nothing_depends_on_the_order_of_warps(make: Make) -> None:
    check_dense(make(case("mma_gemm", (128, 128, 64, 8, 1))), 130, 200, 300, backwards=True)


OPERAND, GEMM, OUTPUT, PTX = "mma_operand.cuh", "mma_gemm.cuh", "mma_output.cuh", "mma_ptx.cuh"
WAIT = "          wait_for_copies<kStages - 2>();\n          __syncthreads();\n"
FAULTS = {
    "a swizzle of readers alone": (OPERAND, "kAtomBytes + permuted(at, depth) * 16;", "kAtomBytes + depth * 16;"),
    "a step in the wrong bits": (OPERAND, "(place ^ (step * 32)) + (k", "(place ^ (step * 64)) + (k"),
    "halves of fragments in the other order": (OPERAND, "row = kLeft ? middle : outer, depth", "row = outer, depth"),
    "rows past the edge are read": (OPERAND, "const u32 count = exists ? ", "const u32 count = true ? "),
    "bytes past the edge are read": (OPERAND, "left < 0 ? 0 : left > 16 ? 16 : left", "left < 0 ? 0 : 16"),
    "a wait for one group less": (GEMM, WAIT, WAIT.replace("2", "1")),
    "no barrier": (GEMM, WAIT, WAIT.splitlines()[0]),
    "no wait before the first read": (
        GEMM,
        "    wait_for_copies<kAhead - 1>();\n    __syncthreads();\n    F",
        "    F",
    ),
    "copies before all have read": (GEMM, "kStages - (kEarly ? 0 : 1) };", "kStages + (kEarly ? 1 : 0) };"),
    "rows past the edge are stored": (OUTPUT, "if (y < end && x < n) store_words", "if (x < n) store_words"),
    "columns past the edge are stored": (OUTPUT, "if (y < end && x < n) store_words", "if (y < end) store_words"),
    "a wrong transpose in four lanes": (OUTPUT, "x[i + 2], upper, 2);", "x[i + 2], odd, 2);"),
    "columns of other lanes are stored": (GEMM, "Tile::kAligned, kSpread>>;", "Tile::kAligned, false>>;"),
    "an instruction for the other layout": (
        PTX,
        '("ldmatrix.sync.aligned.m8n8.x4.shared',
        '("ldmatrix.sync.aligned.m8n8.x4.trans.shared',
    ),
    "operands in another order": (
        PTX,
        "bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5,",
        "bf16.bf16.f32 {%0, %1, %2, %3}, {%5, %4,",
    ),
}
OF_EXCHANGES = ("a wrong transpose in four lanes",)
"""Faults of kernels whose lanes exchange columns before they store them."""


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(make: Make, fault: str) -> None:
    """The harness must be able to fail: each of these would be a wrong number or a race on a GPU."""
    options = {"adds_c": "threads"} if fault in OF_EXCHANGES else {}
    emulated = make(case("mma_gemm", (64, 64, 64, 4, 2), **options), FAULTS[fault])
    with pytest.raises((RuntimeError, AssertionError)):
        check_dense(emulated, 100, 136, 500)


SCALES, PRODUCTS, OWN_BLOCKS = "mma_scales.cuh", "mma_products.cuh", "mma_decode.cuh"
FP8, FEW, GROUPED = ("mma_fp8", (64, 64, 128, 4, 1)), ("mma_fp8_swapped", (32, 1)), ("mma_grouped", (64, 64, 64, 4, 1))
DECODE, DECODE_FP8 = ("mma_decode", (16, 32, 8, 1)), ("mma_fp8_decode", (8, 32, 8, 1))
FEW_OF_GROUPS, FEW_OF_GROUPS_FP8 = ("mma_grouped_swapped", (16, 1)), ("mma_fp8_grouped_swapped", (16, 1))
OTHER_FAULTS = {
    "a scale of another row": (*FP8, "sm_89", (SCALES, ": i * 2 + j % 4 / 2", ": i * 2 + j % 2")),
    "a scale of the block before": (*FP8, "sm_89", (SCALES, "    b += blocks * kernel.arg.scale_b_stride_k;\n", "")),
    "a scale of the token before": (*FEW, "sm_89", (SCALES, "kSwapped ? j / 4 * 2 + j % 2", "kSwapped ? j / 4 * 2")),
    "sums without promotion": (
        *FP8,
        "sm_89",
        (SCALES, "__fmaf_rn(partial[i][j], row[", "__fmaf_rn(partial[i][j], 0 * row["),
    ),
    "half of K twice": (*FEW, "sm_80", (PRODUCTS, "widen(x.right[j][half]", "widen(x.right[j][0]")),
    "rows of halves in another order": (*FEW, "sm_80", (PRODUCTS, "left[0], left[2]);", "left[2], left[0]);")),
    "one part of K alone": (*FEW, "sm_89", (GEMM, "          parts.add(own, 0);\n", "")),
    "a part's scales from the first block": (
        *FEW,
        "sm_89",
        (GEMM, "group_of(tile), begin, all,", "group_of(tile), 0, all,"),
    ),
    "a wait for one block less": (*DECODE, "sm_80", (OWN_BLOCKS, "copies<kStages - 2>();", "copies<kStages - 1>();")),
    "copies before all lanes have read": (
        *DECODE,
        "sm_80",
        (OWN_BLOCKS, "      __syncwarp();  // the block has come", "      // "),
    ),
    "sums before all warps have multiplied": (
        *DECODE,
        "sm_80",
        (OWN_BLOCKS, "    __syncthreads();\n#pragma", "#pragma"),
    ),
    "sums of warps that are not there": (*DECODE, "sm_80", (OWN_BLOCKS, "    __syncthreads();\n    if", "    if")),
    "one part of K of warps": (*DECODE, "sm_80", (OWN_BLOCKS, "      parts.add(own, 0);\n", "")),
    "scales of the next warp's block": (*DECODE_FP8, "sm_89", (SCALES, "    a += blocks *", "    a += 1 *")),
    "tokens in another order": (
        *DECODE_FP8,
        "sm_89",
        (OWN_BLOCKS, "outer * 8 + inner) * 128 + (unit ^", "outer * 8 + inner) * 128 + (7 - unit ^"),
    ),
    "a sign that is lost": (*DECODE_FP8, "sm_80", (OWN_BLOCKS, "0xbf80bf80", "0x3f803f80")),
    "scales without what widening divides by": (*DECODE_FP8, "sm_80", (OWN_BLOCKS, "1.0f : 65536.0f", "1.0f : 1.0f")),
    "the first group's matrix": (
        *GROUPED,
        "sm_80",
        (GEMM, "static_cast<i64>(tile.group) * (", "static_cast<i64>(0) * ("),
    ),
    "rows after a group's end": (*GROUPED, "sm_80", (GEMM, "return tile.end;", "return tile.row + 64;")),
    "the first group's bias": (*FEW_OF_GROUPS, "sm_80", (OUTPUT, "return group * static", "return 0 * static")),
    "few rows after a group's end": (
        *FEW_OF_GROUPS,
        "sm_80",
        (OUTPUT, "if (y < end && x < kernel.n()) u", "if (x < kernel.n()) u"),
    ),
    "a token's scale of the group before": (
        *FEW_OF_GROUPS_FP8,
        "sm_89",
        (SCALES, "block += static_cast<i64>(group) * blocks", "block += static_cast<i64>(0) * blocks"),
    ),
}
OF_EXPONENTS = {
    "an exponent of another lane's row": (*FP8, "sm_120a", (SCALES, "lane % 2 * 8 : 0)", "lane / 2 % 2 * 8 : 0)")),
    "an exponent of another lane's column": (*FP8, "sm_120a", (SCALES, "kInside ? lane / 4 : lane % 4", "lane % 4")),
    "exponents of columns in the usual order": (
        *("mma_fp8", (64, 128, 128, 4, 1), "sm_120a"),
        (SCALES, "kSpread ? column / 2 * 8 + column % 2 : column", "column"),
    ),
    "exponents of the first word": (*FEW, "sm_120a", (SCALES, "block / 4 * side.stride +", "0 * side.stride +")),
    "exponents of the first byte": (*FEW, "sm_89", (SCALES, "+ block % 4 +", "+")),
    "exponents of the next warp's block": (*DECODE_FP8, "sm_120a", (SCALES, "block += blocks;", "block += 1;")),
    "exponents without what widening divides by": (
        *(*DECODE_FP8, "sm_80"),
        (OWN_BLOCKS, "factors.multiply(widened());", "factors.multiply(1.0f);"),
    ),
    "exponents of the first group's matrix": (
        *(*FEW_OF_GROUPS_FP8, "sm_120a"),
        (SCALES, "words_b = static_cast<i64>(group)", "words_b = static_cast<i64>(0)"),
    ),
    "exponents of the first group's rows": (
        *(*FEW_OF_GROUPS_FP8, "sm_89"),
        (SCALES, "words_a = words_b, before", "words_a = 0, before"),
    ),
}
"""Those of kernels whose scales are of UE8M0."""


@pytest.mark.long
@pytest.mark.parametrize("fault", [*OTHER_FAULTS, *OF_EXPONENTS])
def test_faults_of_scales_parts_and_groups_are_found(make: Make, fault: str) -> None:
    family, tile, target, edit = (OTHER_FAULTS | OF_EXPONENTS)[fault]
    scaling = "ue8m0" if fault in OF_EXPONENTS else "1d2d" if "fp8" in family else "none"
    if "grouped" in family:
        epilogue = parse("none" if "fp8" in family else "bias:f32+relu")
        run = make(case(family, tile, target, grouping="masked", scaling=scaling, epilogue=epilogue), edit)
        with pytest.raises((RuntimeError, AssertionError)):
            check_groups(run, [130, 0, 64, 5], 136, 272)
    else:
        run = make(case(family, tile, target, scaling=scaling), edit)
        with pytest.raises((RuntimeError, AssertionError)):
            check_dense(run, *(5, 32, 4096) if "decode" in family else (13, 64, 1072))
