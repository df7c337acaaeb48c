"""Kernels with mma.sync for each target: no spills, and as many products in SASS as a block of K has. All cases are in
test_targets_compile.py."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kernel_builds import open_compiler

from deep_gemm import arch, kernels
from deep_gemm.jit import Builder, sass
from deep_gemm.jit.binary import Binary
from deep_gemm.kernels.portable import PORTABLE
from deep_gemm.kernels.portable.template import DECODE_WIDENING, WIDENING, warp_tile
from deep_gemm.params import KernelParams
from deep_gemm.runtime import engine

TARGETS = (*PORTABLE[0].archs, arch.SM90.name)
"""Also Hopper's, where they are not chosen, but can be tested on a GPU; a few kernels spill some bytes there."""


def sums_of_a_warp(params: KernelParams) -> tuple[int, int]:
    """Rows and columns. Warps that have blocks of K of their own have all of the tile."""
    c = params.gemm
    return (c.block_n, c.block_m) if "decode" in params.kernel else warp_tile(c)


def products(params: KernelParams) -> tuple[str, int]:
    """Instructions of a block of K in a warp: QMMA of FP8 where the target has it, and HMMA otherwise. A step is 32
    bytes of K, which are 16 or 32 elements. FP8 that is widened takes two."""
    rows, columns = sums_of_a_warp(params)
    count = rows // 16 * columns // 8 * (params.gemm.block_k * (1 if params.dtype == "e4m3" else 2) // 32)
    if params.dtype != "e4m3":
        return "HMMA", count
    return ("QMMA", count) if params.arch in ("sm_89", "sm_120a") else ("HMMA", 2 * count)


def built(folder: Path, cases: list[KernelParams]) -> list[Binary]:
    builder = Builder(folder, open_compiler("nvrtc"))
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda params: builder.build(engine.build_request(params)), cases))


def check(folder: Path, cases: list[KernelParams]) -> None:
    for params, binary in zip(cases, built(folder, cases), strict=True):
        if params.arch != arch.SM90.name:
            assert binary.resources.problems() == [], binary.name
        assert binary.resources.warnings == (), binary.name
        name, count = products(params)
        found = re.findall(r"\b([HQ]MMA)\.", sass(binary.cubin))
        assert set(found) == {name}, binary.name
        assert len(found) in (count, 2 * count), binary.name  # twice if the first block has code of its own


@pytest.mark.parametrize(
    "target", [pytest.param(name, marks=pytest.mark.long if name not in ("sm_80", "sm_89") else ()) for name in TARGETS]
)
def test_the_largest_tile_of_each_family(target: str, tmp_path: Path) -> None:
    found = arch.get(target)
    check(
        tmp_path,
        [
            family.case(family.configs(found)[-1], found, scaling=scaling)
            for family in PORTABLE
            for scaling in family.scalings
        ],
    )


def test_exponents_are_scales_of_products(tmp_path: Path) -> None:
    """On 12.0 sums are promoted by additions alone. Elsewhere the scales of a row and a column are multiplied first."""
    for target in ("sm_120a", "sm_89"):
        found, family = arch.get(target), kernels.gemm_family("mma_fp8")
        (binary,) = built(tmp_path, [family.case(family.configs(found)[-1], found, scaling="ue8m0")])
        text = sass(binary.cubin)
        count = {name: len(re.findall(rf"\b{name}\b", text)) for name in ("QMMA", "FADD", "FMUL", "FFMA")}
        products = count.pop("QMMA")  # four for four sums of a thread
        found_here = {"FADD": products, "FMUL": 0, "FFMA": 0}
        assert count == (found_here if target == "sm_120a" else {"FADD": 0, "FMUL": products, "FFMA": products}), target
        assert text.count("QMMA.SF") == (products if target == "sm_120a" else 0)


@pytest.mark.parametrize(("name", "of_integers", "of_halves"), [("mma_fp8", 7, 6), ("mma_fp8_decode", 6, 4)])
def test_widening_takes_the_instructions_that_the_model_counts(
    name: str, of_integers: int, of_halves: int, tmp_path: Path
) -> None:
    """Also those by which NaN stays NaN: 0 times a number that may be infinite is not left out."""
    family = kernels.gemm_family(name)
    params = family.case(family.configs(arch.SM80)[-1], arch.SM80)
    (binary,) = built(tmp_path, [params])
    text = sass(binary.cubin)
    words = sum(sums_of_a_warp(params)) * text.count("HMMA.") // products(params)[1]
    halves = len(re.findall(r"\bH(?:FMA2|MUL2)\b", text))
    integers = len(re.findall(r"LOP3\.LUT|SHF\.R|IMAD\.SHL|PRMT|SHF\.L", text))
    assert of_integers + of_halves == (WIDENING if name == "mma_fp8" else DECODE_WIDENING)
    assert halves == of_halves * words
    assert 0.95 * of_integers * words < integers < 1.25 * of_integers * words


def test_the_loop_over_k_has_no_branches_beside_its_own(tmp_path: Path) -> None:
    """Copies and products are in one block of code, in which ptxas mixes them: 12 copies before the first tile's
    products, or in them, and one barrier a block."""
    family = kernels.gemm_family("mma_gemm")
    (binary,) = built(tmp_path, [family.case(family.config(128, 256, 32, 8, 1))])
    lines = sass(binary.cubin).splitlines()
    places = [index for index, line in enumerate(lines) if "HMMA" in line]
    loop = "\n".join(lines[places[0] : places[-1]])
    assert " BRA " not in loop
    assert loop.count("LDGSTS") == 6
    assert loop.count("LDSM") >= 14
    assert len(re.findall(r"\bBAR\.SYNC", loop)) == 1
