"""Runs kernels of every kind on small operands, under a checker of memory accesses. `make sanitize` does so through
`sanitizer.py`, with a compute-sanitizer that it installs. By hand:

    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 python tests/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/sanitize.py --racecheck

Needs a GPU. API errors are not reported: the package raises those of its own calls. The kernels cover each tile,
cluster, way to split K and so on of each family's serving set (see `cover.py`). `--every 1` takes every config of these
sets, `--every N` one in N. Each kernel runs twice: alone, and then right behind itself as a programmatic dependent
launch with a weight promise.

`--racecheck` compiles headers that racecheck can follow; `--race NAME` adds a mistake that it must report, in a kernel
that shows it: see `racecheck_headers.py`. `--name` selects kernels.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import click
import torch

sys.path.insert(0, str(Path(__file__).parent))

import b16_mutations
import batched_cases
import batched_mutations
import epilogue_mutations
import epilogue_runs
import fp4_runs
import gated_mutations
import gated_runs
import grouped_mutations
import head_cases
import logit_runs
import rows_runs
import scaled_mutations
import step_cases
from chosen import case, kernel_name
from cover import cover, everything, features
from forced import DTYPES, compiled, force, force_gemm, load, nvrtc, operands, scaling_of
from grouped_runs import is_right
from racecheck_headers import RACES, racecheck_headers

import deep_gemm
from deep_gemm import quantize
from deep_gemm.jit import Builder
from deep_gemm.jit.driver.module import Function
from deep_gemm.jit.generator import include_dir
from deep_gemm.kernels.families import B16_GEMM, B16_SWAP_AB, FP8_SCALED, FP8_SCALED_SWAPPED
from deep_gemm.nn import casts
from deep_gemm.ops import moe_rows
from deep_gemm.ops.reference import exact_product
from deep_gemm.params import GemmConfig, KernelParams
from deep_gemm.spec import ceil_div
from deep_gemm.testing import calc_diff, random_operands

OTHERS: list[KernelParams] = [
    *b16_mutations.KERNELS.values(), case(B16_GEMM, 128, 256, (2, 1, 1), form="nn"),
    case(B16_GEMM, 256, 128, (1, 2, 1), form="tn", output="f32", adds_c="tma"),
    case(B16_SWAP_AB, 112, 128, (2, 2, 1)), case(B16_SWAP_AB, 96, 64, (1, 4, 1), form="nn"),
    case(B16_SWAP_AB, 152, 192, (2, 1, 1)), case(B16_SWAP_AB, 80, 64, (4, 1, 1)),
    case(B16_SWAP_AB, 144, 128, (1, 2, 1), form="nn"), *scaled_mutations.KERNELS.values(),
    case(FP8_SCALED, 128, 160, (2, 1)), case(FP8_SCALED, 128, 128, (1, 2), scaling="1d2d"),
    case(FP8_SCALED_SWAPPED, 24, 2, 2, store="direct"),
]  # fmt: skip
"""16-bit kernels, and FP8 kernels with any scaling, of every kind."""

EPILOGUES = [params for params in epilogue_mutations.KERNELS.values() if params.grouping == "none"]

GROUPED: list[KernelParams] = [
    *grouped_mutations.KERNELS.values(),
    *gated_mutations.KERNELS.values(),
    *(params for params in epilogue_mutations.KERNELS.values() if params.grouping != "none"),
]
"""Kernels with groups, and those with a gate."""


def chosen(every: int) -> list[KernelParams]:
    """The cover, or with ``every`` one config in so many."""
    known = everything()
    return known[::every] if every else cover(known, features)


def everyone(every: int) -> list[KernelParams]:
    """All but grouped and batched GEMMs and casts: dense GEMMs, logits, the prenorm product, functions of rows."""
    return [*chosen(every), *OTHERS, *EPILOGUES, *logit_runs.RUNS, *rows_runs.RUNS, *fp4_runs.BY_PARAMS]


def named(found: list[KernelParams], part: str) -> list[KernelParams]:
    """Those of kernels with this name, or else those with ``part`` in it."""
    of_name = [params for params in found if part == kernel_name(params)]
    return of_name or [params for params in found if part in kernel_name(params)]


def sizes(config: GemmConfig) -> tuple[int, int, int, int]:
    """M, N, K, and the number of SMs: so few that a persistent CTA computes several tiles."""
    m, n, k = config.block_m + 70, 2 * config.block_n + 40, 896
    return m, n, k, ceil_div(2 * config.cluster_size, config.ctas_per_sm)


def run_other(params: KernelParams, function: Function, stream: int) -> bool:
    """Run one of `OTHERS` twice, like the others. Returns whether the result is right."""
    config, fp8 = params.gemm, params.scaling != "none"
    m, n, k = config.block_m + 72, 2 * config.block_n + 40, 896 if fp8 else 448
    sms = ceil_div(2 * config.cluster_size, config.ctas_per_sm)
    given = operands(params, *(torch.randn(rows, k, device="cuda") for rows in (m, n)))
    c = torch.randn(m, n, device="cuda").to(DTYPES[params.output])
    found = []
    for early in (False, True):
        tensors = {**given, "d": c.clone()} | ({"c": c} if params.adds_c == "threads" else {})
        force_gemm(params, function, tensors, sms, stream, early, early)()
        found.append(tensors["d"])
    torch.cuda.synchronize()
    if fp8:
        exact = exact_product(*given.values(), scaling=scaling_of(params))
    else:
        exact = given["a"].double() @ given["b"].double().t()
    exact = exact + (0 if params.adds_c == "none" else c.double())
    return float(calc_diff(found[0], exact)) < 1e-5 and torch.equal(*found)


def is_right_alone(params: KernelParams, function: Function, stream: int) -> bool | None:
    """Whether a kernel that has a check of its own is right; None for one of `chosen`."""
    if params in logit_runs.RUNS:
        return logit_runs.Run(params, logit_runs.RUNS[params], function, launches=2).is_right()
    if params in rows_runs.RUNS:
        return rows_runs.RUNS[params].is_right(function, launches=2)
    if params in fp4_runs.BY_PARAMS:
        return fp4_runs.BY_PARAMS[params].is_right(function, launches=2)
    if params in EPILOGUES:
        return epilogue_runs.is_right(params, function)
    return run_other(params, function, stream) if params in OTHERS else None


def oracle(params: KernelParams) -> Callable[[KernelParams, Builder], bool]:
    """Says whether a kernel of groups, of a batch, of heads or with a gate is right."""
    if params in gated_mutations.KERNELS.values():
        return gated_runs.is_right
    if params.kernel not in {each.kernel for each in batched_mutations.KERNELS.values()}:
        return is_right
    return head_cases.is_right if params.grouping == "heads" else batched_cases.is_right


def run_casts() -> bool:
    """Casts, and products of operands that are transposed first, by the public functions: each kernel once or more."""
    x, y = (torch.randn(rows, 656, device="cuda").bfloat16() for rows in (200, 330))
    pairs = quantize.rows_and_columns, quantize.blocks_and_transpose, quantize.rows_and_blocks_transposed
    for function in (*pairs, quantize.rows, quantize.columns):
        function(x)
    many = torch.randn(8192, 656, device="cuda").bfloat16()  # other tiles than few rows
    for source in (x, many):
        index = torch.arange(-1, 8000, dtype=torch.int32, device="cuda")
        quantize.rows(source, rows=index)
        quantize.rows(source, rows=index, factors=torch.rand(len(index), device="cuda"))
        quantize.rows(source, gated=True, factors=torch.rand(len(source), device="cuda"))
        for blocks in casts.BLOCKS.values():
            casts.tokens(source, blocks, rows=index)
        casts.gradients(source, rows=index, factors=torch.rand(len(index), device="cuda"))
        casts.gradients(source, gated=True, gradient=source[:, :328])
    step_cases.compute_dots(step_cases.dots(37, 9, 128, "cuda"))
    moe_rows.route(*step_cases.routed(40, 40, 4, "cuda").values())
    quantize.rows(many)
    (a, sfa), (b, sfb) = quantize.rows(x), quantize.rows(y, row_major=True)
    d, same = (torch.empty(200, 330, device="cuda") for _ in range(2))
    deep_gemm.fp8_gemm_nt((a, sfa), (b, sfb), d, recipe=(1, 1, 128))
    deep_gemm.fp8_gemm_nn((a, sfa), (b.t().contiguous(), sfb.t()), same, recipe=(1, 1, 128))
    torch.cuda.synchronize()
    return torch.equal(d, same)


@click.command()
@click.option("--every", default=0, help="Run one in so many of all kernels, instead of the cover.")
@click.option("--racecheck", is_flag=True, help="Compile headers that racecheck can follow.")
@click.option("--race", type=click.Choice(list(RACES)), help="Add a mistake that racecheck must find.")
@click.option("--name", default="", help="Only kernels with this in their names.")
def main(every: int, racecheck: bool, race: str | None, name: str) -> None:
    """Run the kernels and check their results."""
    place = Path(tempfile.mkdtemp())
    include = racecheck_headers(place / "include") if racecheck or race else include_dir()
    if race:
        include, every, name = RACES[race].put_into(include), 1, RACES[race].kernel
    builder = Builder(place / "cache", nvrtc(), include)
    with compiled((params, builder, params) for params in named(everyone(every), name)) as binaries:
        functions = {params: load(params, binary.result()) for params, binary in binaries.items()}
    stream, wrong, count = torch.cuda.current_stream().cuda_stream, 0, len(functions)
    for params, function in functions.items():
        if (right := is_right_alone(params, function, stream)) is not None:
            if not right:
                wrong += 1
                print(f"wrong: {params}")
            continue
        m, n, k, num_sms = sizes(params.gemm)
        a, b, _, _ = random_operands(m, n, k, "cuda")
        d, early = (torch.empty(m, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        launches = [
            force(params, function, a, b, d, num_sms, stream),
            force(params, function, a, b, early, num_sms, stream, pdl=True, constant_b=True),
        ]
        for launch in launches:
            launch()
        torch.cuda.synchronize()
        if not float(calc_diff(d, exact_product(*a, *b))) < 1e-5 or not torch.equal(d, early):
            wrong += 1
            print(f"wrong: {params}")
    for params in named([*GROUPED, *batched_mutations.KERNELS.values()], name):
        count += 1
        if not oracle(params)(params, builder):
            wrong += 1
            print(f"wrong: {params}")
    if not name and not run_casts():
        wrong += 1
        print("wrong: casts")
    print(f"{count} kernels, {wrong} wrong")
    sys.exit(wrong > 0 and not race)


if __name__ == "__main__":
    main()
