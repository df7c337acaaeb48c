"""The machine code of the 16-bit GEMM kernels: the expected instructions, and short main loops."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from house import as_recorded
from kernel_builds import KINDS, Built, build_all, for_nvcc, main_loop, moves_to_uniform, open_compiler

from deep_gemm import kernels
from deep_gemm.kernels import (
    sm90_half_gemm,
    sm90_half_grouped,
    sm90_half_k_grouped,
    sm90_half_swapped,
    sm90_half_turned,
)
from deep_gemm.params import HalfParams, KernelParams

UPRIGHT = sm90_half_gemm.KERNEL
CASES = [
    params for kernel in kernels.registry().values() if kernel.mma_instruction == "HGMMA" for params in kernel.cases()
]


def entry(params: KernelParams) -> str:
    return kernels.get(params.kernel).entry(params)


KERNELS_OF = {"nvrtc": CASES, "nvcc": for_nvcc(CASES)}
"""The cases for each compiler. NVCC gets few, because NVRTC has the same optimiser and assembler."""


@pytest.fixture(scope="module")
def builds(kernels_root: Path) -> Iterator[Callable[[str, KernelParams], Built]]:
    """Kernels built by a compiler."""
    with contextlib.ExitStack() as stack:
        started: dict[str, dict[KernelParams, Future[Built]]] = {}

        def built(kind: str, params: KernelParams) -> Built:
            if kind not in started:
                work = build_all(open_compiler(kind), kernels_root, KERNELS_OF[kind])
                started[kind] = stack.enter_context(work)
            return started[kind][params].result()

        yield built


def pairs(cases: list[HalfParams]) -> list[Any]:
    """Pairs of compilers and kernels."""
    found = [(kind, params) for kind in KINDS for params in cases if params in KERNELS_OF[kind]]
    return [pytest.param(*pair, id=f"{pair[0]}-{entry(pair[1])}") for pair in found]


@pytest.mark.parametrize(("kind", "params"), pairs(CASES))
def test_nothing_is_spilled_or_serialised(
    builds: Callable[[str, KernelParams], Built], kind: str, params: HalfParams
) -> None:
    resources, fields = builds(kind, params).binary.resources, kernels.get(params.kernel).fields(params)
    assert (resources.stack, resources.spill_stores, resources.spill_loads, resources.warnings) == (0, 0, 0, ())
    assert (resources.problems(), resources.shared_static) == ([], 0)
    assert resources.registers * int(fields["num_threads"]) * int(fields["min_ctas"]) <= 65536


@pytest.mark.parametrize(("kind", "params"), pairs(CASES))
def test_cubins_are_as_recorded(builds: Callable[[str, KernelParams], Built], kind: str, params: HalfParams) -> None:
    assert as_recorded(builds(kind, params).binary)


@pytest.mark.parametrize(("kind", "params"), pairs(CASES))
def test_the_kernel_is_made_of_the_instructions_it_asks_for(
    builds: Callable[[str, KernelParams], Built], kind: str, params: HalfParams
) -> None:
    text, fields = builds(kind, params).sass, kernels.get(params.kernel).fields(params)
    assert re.findall(r"\b(?:LDL|STL|LDLM|STLM)\b.*", text) == []
    # The instruction transposes operands that are not K-major.
    kind = ".BF16" if params.dtype == "bf16" else ""
    products = set(re.findall(r"\bHGMMA\.\S+", text))
    assert products == {f"HGMMA.64x{fields['mma_n']}x16.F32{kind}"}
    transposed = {name for line in re.findall(r"\bHGMMA\..*", text) for name in re.findall(r"\b(tnsp[AB])\b", line)}
    swapped, turned, rows, depth = (
        params.kernel == module.KERNEL.name
        for module in (sm90_half_swapped, sm90_half_turned, sm90_half_grouped, sm90_half_k_grouped)
    )
    left, right = reversed(params.majors) if swapped or turned else params.majors
    assert transposed == {name for name, major in (("tnspA", left), ("tnspB", right)) if major == "m"}
    # Stores: boxes by TMA, with or without addition in L2; pieces of 16 bytes, also where a group ends in a box; or
    # single elements.
    tma, dimensions = params.store == "tma", "3D" if depth else "2D"
    assert (f"UTMASTG.{dimensions}" in text) == (not swapped and tma and params.accumulate != "reduces")
    assert (f"UTMAREDG.{dimensions}.ADD" in text) == (params.accumulate == "reduces")
    assert ("STG.E.128" in text) == (tma and (rows or (swapped and params.output != "f32")))
    config = params.config
    multicast = not swapped and config.cluster_m * config.cluster_n > 1  # type: ignore[attr-defined]
    assert ("UTMALDG.2D.MULTICAST" in text) == multicast
    assert len(re.findall(r"MEMBAR\.\S*GPU", text)) <= int(config.cluster_k > 1)  # type: ignore[attr-defined]


LOOPS = [
    UPRIGHT.cases()[0],
    sm90_half_gemm.make_params(sm90_half_gemm.make_config(128, 256)),
    sm90_half_gemm.make_params(sm90_half_gemm.make_config(256, 128, (1, 2, 1))),
    sm90_half_swapped.make_params(sm90_half_swapped.make_config(8)),
    sm90_half_swapped.make_params(sm90_half_swapped.make_config(64, 4)),
    sm90_half_turned.make_params(sm90_half_turned.make_config(136, 256, (2, 1, 1))),
    sm90_half_turned.make_params(sm90_half_turned.make_config(176, 192)),
]


@pytest.mark.parametrize(("kind", "params"), pairs([params for params in LOOPS if params in CASES]))
def test_the_main_loop_is_products_and_a_barrier(
    builds: Callable[[str, KernelParams], Built], kind: str, params: KernelParams
) -> None:
    """Descriptors stay in uniform registers. Moving them there before every product cost FP8 kernels 5 to 20%."""
    loop = main_loop(builds(kind, params).sass)
    assert len(moves_to_uniform(loop)) <= 2
    assert len(loop) < 70
