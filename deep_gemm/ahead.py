"""Compiling ahead: choose the kernels for a list of shapes, and build each once, in parallel, with or without a GPU.

from deep_gemm import ahead, workload
summary = ahead.precompile(workload.load(Path("config.json"), tp=8))
assert not summary.failed, summary.failed[0].error
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from deep_gemm import arch as archs
from deep_gemm import engine, kernels, options, select
from deep_gemm.errors import DeepGemmError, InvalidInputError
from deep_gemm.jit.builder import Binary
from deep_gemm.jit.cache.pack import Kernel, packable
from deep_gemm.jit.cache.pack import write as write_pack
from deep_gemm.params import GemmProblem, KernelParams
from deep_gemm.workload import GemmShape


@dataclass(frozen=True)
class Outcome:
    """What became of one kernel: a binary, or the error that stopped it. `shapes` are those that asked for it."""

    name: str
    shapes: tuple[GemmShape, ...]
    params: KernelParams | None = None
    binary: Binary | None = None
    error: DeepGemmError | None = None


@dataclass(frozen=True)
class Summary:
    """All outcomes and how long it took, in seconds."""

    outcomes: tuple[Outcome, ...]
    seconds: float

    @property
    def failed(self) -> list[Outcome]:
        """Those without a binary."""
        return [outcome for outcome in self.outcomes if outcome.binary is None]

    def count(self, layer: str) -> int:
        """How many binaries came from "compiled", "disk", "pack" or "memory"."""
        return sum(outcome.binary is not None and outcome.binary.layer == layer for outcome in self.outcomes)


@dataclass(frozen=True)
class Work:
    """Kernels to build with the shapes that want each, and the shapes for which none could be chosen."""

    kernels: dict[KernelParams, tuple[GemmShape, ...]]
    impossible: tuple[Outcome, ...] = ()


def problem(shape: GemmShape, spec: archs.ArchSpec, num_sms: int | None = None) -> GemmProblem:
    """The problem that a call with freshly allocated tensors of this shape is, under the options of this process."""
    return GemmProblem(
        m=shape.m,
        n=shape.n,
        k=shape.k,
        num_sms=num_sms or spec.num_sms,
        d_tma=shape.n % 8 == 0,  # rows of bf16 that start at multiples of 16 bytes
        block_multiple=options.get_block_size_multiple_of(),
    )


def choose(shapes: Iterable[GemmShape], arch: str = "sm_90a", num_sms: int | None = None) -> Work:
    """The kernels that calls of these shapes would use on an `arch` with `num_sms` SMs (default: the whole GPU).

    It takes the same path as a call: problem, ranking, parameters. Kernels without
    tensor-core work, such as the transpose of scales, are helpers that any call may need: they come along.
    """
    spec = archs.get(arch)
    wanted: dict[KernelParams, list[GemmShape]] = {}
    impossible = []
    for shape in dict.fromkeys(shapes):
        try:
            asked = problem(shape, spec, num_sms)
            params = engine.kernel_params(asked, select.rank(asked, spec)[0].config, spec)
        except DeepGemmError as error:
            impossible.append(Outcome(f"no kernel for {shape}", (shape,), error=error))
        else:
            wanted.setdefault(params, []).append(shape)
    if wanted:
        helpers = [kernel for kernel in kernels.registry().values() if not kernel.mma_instruction]
        wanted |= {params: [] for kernel in helpers for params in kernel.cases() if params.arch == arch}
    return Work({params: tuple(found) for params, found in wanted.items()}, tuple(impossible))


def precompile(
    shapes: Iterable[GemmShape],
    *,
    arch: str = "sm_90a",
    num_sms: int | None = None,
    jobs: int | None = None,
    progress: Callable[[Outcome, int, int], None] | None = None,
) -> Summary:
    """Build every kernel that `shapes` need into the cache. A failure is an outcome; the others go on.

    Args:
        shapes: the products to prepare for; see `deep_gemm.workload`.
        arch: the target, such as "sm_90a". No GPU need be present.
        num_sms: how many SMs the calls may use, which guides the choice; the architecture's usual count if None.
        jobs: threads that compile at once; the CPUs that this process may use if None.
        progress: called as `progress(outcome, done, total)` after each kernel, from this thread.
    """
    start = time.perf_counter()
    work = choose(shapes, arch, num_sms)
    outcomes = list(work.impossible)
    total = len(outcomes) + len(work.kernels)
    if progress is not None:
        for index, outcome in enumerate(outcomes):
            progress(outcome, index + 1, total)
    with ThreadPoolExecutor(max_workers=jobs or len(os.sched_getaffinity(0))) as pool:
        futures = [pool.submit(_build, params, found) for params, found in work.kernels.items()]
        for future in as_completed(futures):
            outcomes.append(future.result())
            if progress is not None:
                progress(outcomes[-1], len(outcomes), total)
    return Summary(tuple(outcomes), time.perf_counter() - start)


def pack(summary: Summary, path: Path) -> list[Kernel]:
    """Write all kernels of `summary` to the pack `path`, whole or not at all, and return what it holds.

    Raises InvalidInputError, and writes nothing, if one failed, there is none, or the file cannot be written.
    """
    if summary.failed:
        raise InvalidInputError(
            f"summary has {len(summary.failed)} kernels that failed, so {path} was not written: a pack that lacks some "
            f"would look like a whole one. The first is {summary.failed[0].name}: {summary.failed[0].error}"
        )
    contents = []
    for outcome in summary.outcomes:
        assert outcome.params is not None
        assert outcome.binary is not None
        request, binary = engine.build_request(outcome.params), outcome.binary
        contents.append(
            packable(
                name=binary.name,
                arch=binary.arch,
                source_key=binary.source_key,
                key=binary.key,
                cuda=binary.cuda,
                compiler=binary.compiler,
                cubin=binary.cubin,
                source=request.source.encode(),
                resources=binary.resources,
                seconds={what: took for what, took in binary.seconds.items() if what != "lookup"},
                meta=request.meta,
                render_key=request.render_key,
            )
        )
    if not contents:
        raise InvalidInputError(f"summary has no kernels, so {path} was not written.")
    try:
        return write_pack(path, contents)
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"path: the pack {path} cannot be written: {error}.") from error


def _build(params: KernelParams, shapes: tuple[GemmShape, ...]) -> Outcome:
    try:
        binary = engine.build(params)
    except DeepGemmError as error:
        return Outcome(params.kernel, shapes, params, error=error)
    return Outcome(binary.name, shapes, params, binary)
