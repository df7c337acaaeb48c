"""The 16-bit GEMM kernels as machine code: the instructions that they ask for, and short main loops."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from half_mutations import KERNELS, MUTATIONS, Mutation
from kernel_builds import KINDS, Built, build_all, main_loop, moves_to_uniform, open_compiler

from deep_gemm import engine, kernels
from deep_gemm.jit import Builder
from deep_gemm.jit.compilers import Compiler
from deep_gemm.kernels import sm90_half_gemm, sm90_half_swapped
from deep_gemm.params import HalfParams, KernelParams

UPRIGHT, SWAPPED = sm90_half_gemm.KERNEL, sm90_half_swapped.KERNEL
CASES = [*UPRIGHT.cases(), *SWAPPED.cases()]


def entry(params: KernelParams) -> str:
    return kernels.get(params.kernel).entry(params)


@pytest.fixture(scope="module", params=KINDS)
def compiler(request: pytest.FixtureRequest) -> Compiler:
    return open_compiler(request.param)


@pytest.fixture(scope="module")
def builds(compiler: Compiler, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[KernelParams, Future[Built]]]:
    yield from build_all(compiler, tmp_path_factory.mktemp("half"), CASES)


@pytest.mark.parametrize("params", CASES, ids=entry)
def test_the_kernel_is_made_of_the_instructions_it_asks_for(
    builds: dict[KernelParams, Future[Built]], params: HalfParams
) -> None:
    built = builds[params].result()
    text, fields, resources = built.sass, kernels.get(params.kernel).fields(params), built.binary.resources
    assert (resources.stack, resources.spill_stores, resources.spill_loads, resources.warnings) == (0, 0, 0, ())
    # Operands that are not K-major are transposed by the instruction.
    kind = ".BF16" if params.dtype == "bf16" else ""
    products = set(re.findall(r"\bHGMMA\.\S+", text))
    assert products == {f"HGMMA.64x{fields['mma_n']}x16.F32{kind}"}
    transposed = {name for line in re.findall(r"\bHGMMA\..*", text) for name in re.findall(r"\b(tnsp[AB])\b", line)}
    left, right = params.majors if params.kernel == UPRIGHT.name else (params.majors[1], "k")
    assert transposed == {name for name, major in (("tnspA", left), ("tnspB", right)) if major == "m"}
    # What is stored: boxes by TMA, added in L2 or not; pieces of 16 bytes; or single elements.
    upright, tma = params.kernel == UPRIGHT.name, params.store == "tma"
    assert ("UTMASTG.2D" in text) == (upright and tma and params.accumulate != "reduces")
    assert ("UTMAREDG.2D.ADD" in text) == (params.accumulate == "reduces")
    assert ("STG.E.128" in text) == (not upright and tma and params.output != "f32")
    config = params.config
    multicast = upright and config.cluster_m * config.cluster_n > 1  # type: ignore[attr-defined]
    assert ("UTMALDG.2D.MULTICAST" in text) == multicast
    assert len(re.findall(r"MEMBAR\.\S*GPU", text)) <= int(config.cluster_k > 1)  # type: ignore[attr-defined]
    assert resources.registers * int(fields["num_threads"]) * int(fields["min_ctas"]) <= 65536


LOOPS = [
    UPRIGHT.cases()[0],
    sm90_half_gemm.make_params(sm90_half_gemm.make_config(128, 256)),
    sm90_half_gemm.make_params(sm90_half_gemm.make_config(256, 128, (1, 2, 1))),
    sm90_half_swapped.make_params(sm90_half_swapped.make_config(8)),
    sm90_half_swapped.make_params(sm90_half_swapped.make_config(64, 4)),
]


@pytest.mark.parametrize("params", [params for params in LOOPS if params in CASES], ids=entry)
def test_the_main_loop_is_products_and_a_barrier(
    builds: dict[KernelParams, Future[Built]], params: KernelParams
) -> None:
    """Descriptors stay in uniform registers: moving each over before every product cost FP8 kernels 5 to 20%."""
    loop = main_loop(builds[params].result().sass)
    assert len(moves_to_uniform(loop)) <= 2
    assert len(loop) < 70


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_mutation_applies_once_and_changes_the_code(
    mutation: Mutation, compiler: Compiler, tmp_path: Path
) -> None:
    """Those of tests/gpu/test_half_mutations.py."""
    if compiler.kind != "nvrtc":
        pytest.skip("one compiler does")
    params = KERNELS[mutation.kernels[0]]
    broken, sound = (
        Builder(tmp_path / name, compiler, headers).build(engine.build_request(params)).cubin
        for name, headers in (("broken", mutation.headers(tmp_path / "include")), ("sound", None))
    )
    assert broken != sound
