"""The machine code of 16-bit GEMMs and of MXFP4 weights: the expected instructions, and short main loops."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from chosen import case
from house import unlike_the_record
from kernel_builds import Builds, Built, builds_of, each_of, for_nvcc, main_loop, moves_to_uniform

from deep_gemm import kernels
from deep_gemm.kernels.families import B16_BATCHED, B16_GEMM, B16_SWAP_AB, B16_SWAPPED, GEMMS
from deep_gemm.kernels.groups import ALONG_M
from deep_gemm.kernels.sm90_fp4_gemm import FP4, large, stream, wide
from deep_gemm.params import KernelParams

CASES = [params for family in GEMMS if family.mma_instruction == "HGMMA" for params in family.cases()]
KERNELS_OF = {"nvrtc": CASES, "nvcc": for_nvcc(CASES)}
"""The cases for each compiler. NVCC gets few, because NVRTC has the same optimiser and assembler."""


@pytest.fixture(scope="module")
def builds(request: pytest.FixtureRequest, kernels_root: Path) -> Iterator[Builds]:
    with builds_of(kernels_root, request) as found:
        yield found


@pytest.fixture
def built(builds: Builds, kind: str, params: KernelParams) -> Built:
    return builds(kind, params)


def each(cases: list[KernelParams]) -> pytest.MarkDecorator:
    return each_of(cases, KERNELS_OF)


@each(CASES)
def test_nothing_is_spilled_or_serialised(built: Built, params: KernelParams) -> None:
    resources, fields = built.binary.resources, kernels.get(params.kernel).fields(params)
    assert (resources.stack, resources.spill_stores, resources.spill_loads, resources.warnings) == (0, 0, 0, ())
    assert (resources.problems(), resources.shared_static) == ([], 0)
    assert resources.registers * int(fields["num_threads"]) * int(fields["min_ctas"]) <= 65536


@each(CASES)
def test_cubins_are_as_recorded(built: Built, kind: str, params: KernelParams) -> None:
    assert not unlike_the_record(built.binary)


@each(CASES)
def test_the_kernel_is_made_of_the_instructions_it_asks_for(built: Built, kind: str, params: KernelParams) -> None:
    text, fields, config = built.sass, kernels.get(params.kernel).fields(params), params.gemm
    assert re.findall(r"\b(?:LDL|STL|LDLM|STLM)\b.*", text) == []
    # The instruction transposes operands that are not K-major.
    products = set(re.findall(r"\bHGMMA\.\S+", text))
    assert products == {f"HGMMA.64x{fields['mma_n']}x16.F32{'.BF16' if params.dtype == 'bf16' else ''}"}
    transposed = {name for line in re.findall(r"\bHGMMA\..*", text) for name in re.findall(r"\b(tnsp[AB])\b", line)}
    left, right = reversed(params.majors) if config.swap_ab else params.majors
    assert transposed == {name for name, major in (("tnspA", left), ("tnspB", right)) if major == "mn"}
    # Stores: boxes by TMA, with or without addition in L2; pieces of 16 bytes, also where a group ends in a box; or
    # single elements.
    few, rows = params.kernel == B16_SWAPPED.name, params.grouping in ALONG_M
    tma, dimensions = params.store == "tma", "3D" if params.grouping in ("k", "batched", "parts") else "2D"
    loads = "3D" if params.grouping in ("batched", "parts", "summed") else "2D"
    assert (f"UTMASTG.{dimensions}" in text) == (not few and tma and params.adds_c != "tma")
    assert (f"UTMAREDG.{dimensions}.ADD" in text) == (params.adds_c == "tma")
    assert ("STG.E.128" in text) == (tma and (rows or (few and params.output != "f32")))
    assert ("STG.E.64" in text and "LDG.E.64.STRONG.GPU" in text) == config.parts
    assert set(re.findall(r"UTMALDG\.(\dD)", text)) == {loads}
    assert (f"UTMALDG.{loads}.MULTICAST" in text) == (config.cluster_m * config.cluster_n > 1)
    assert len(re.findall(r"MEMBAR\.\S*GPU", text)) <= int(config.cluster_k > 1 or config.parts)


LOOPS = [
    B16_GEMM.cases()[0], case(B16_GEMM, 128, 256), case(B16_GEMM, 256, 128, (1, 2, 1)),
    case(B16_BATCHED, 128, 256, (2, 1, 1)), case(B16_SWAPPED, 8), case(B16_SWAPPED, 64, 4),
    case(B16_SWAP_AB, 136, 256, (2, 1, 1)), case(B16_SWAP_AB, 176, 192),
]  # fmt: skip


@each([params for params in LOOPS if params in CASES])
def test_the_main_loop_is_products_and_a_barrier(built: Built, params: KernelParams) -> None:
    """Descriptors stay in uniform registers. Moving them there before every product cost FP8 kernels 5 to 20%."""
    loop = main_loop(built.sass)
    assert len(moves_to_uniform(loop)) <= 2
    assert len(loop) < 70


PRODUCTS = {"e4m3": "QGMMA.64x24x32.F32.E5M2.E4M3", "bf16": "HGMMA.64x24x16.F32.BF16"}
LONGEST = {"e4m3": 256, "bf16": 308}
"""Instructions for two blocks of 24 tokens. Each instruction takes time: see docs/measurements/mxfp4.md."""


STREAMS = [params for params in FP4.cases() if params.config == stream(24)]


@each_of(STREAMS, {"nvrtc": STREAMS, "nvcc": []})
def test_weights_are_multiplied_as_they_are_decoded(builds: Builds, kind: str, params: KernelParams) -> None:
    text = builds(kind, params).sass
    assert set(re.findall(r"\b[QH]GMMA\.\S+", text)) == {PRODUCTS[params.dtype]}
    assert len(main_loop(text)) <= LONGEST[params.dtype]


LARGE = [params for params in FP4.cases() if params.config == large()]
LONGEST_LARGE = {"e4m3": 200, "bf16": 64}


@each_of(LARGE, {"nvrtc": LARGE, "nvcc": []})
def test_large_tiles_multiply_as_whole_weights(builds: Builds, kind: str, params: KernelParams) -> None:
    """Moves of descriptors to uniform registers before each product cost FP8 14%."""
    loop = main_loop(builds(kind, params).sass)
    assert len(moves_to_uniform(loop)) <= 1
    assert len(loop) <= LONGEST_LARGE[params.dtype]


WIDE = [params for params in FP4.cases() if params.config == wide()]


@each_of(WIDE, {"nvrtc": WIDE, "nvcc": []})
def test_wide_tiles_decode_while_products_run(builds: Builds, kind: str, params: KernelParams) -> None:
    """Four groups of four products for a block of K, after the first one, each awaited when the next one runs. None
    moves descriptors to uniform registers."""
    text = builds(kind, params).sass
    *groups, _ = re.split(r"GMMA.*gsb0", text)
    assert [group.count("GMMA") for group in groups] == [3] * 5
    assert [group for group in groups if "R2UR" in group[group.index("GMMA") :]] == []
    assert len(re.findall(r"DEPBAR\.LE gsb0, 0x1", text)) == 4
