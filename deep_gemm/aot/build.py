"""Compiling ahead: the kernels that a workload can need, each built once, in parallel, with or without a GPU."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from deep_gemm import arch as archs
from deep_gemm import kernels, ops, options, select
from deep_gemm.aot import attention_layers, cards, workload
from deep_gemm.aot import shard as shards
from deep_gemm.aot.cards import Card
from deep_gemm.aot.inputs import MAX_SIZE, whole
from deep_gemm.aot.layers import (
    BF16_FP4,
    DENSE_OPS,
    FP4_BLOCK,
    FP4_GROUPED,
    FP4_OPS,
    FP8,
    FP8_FP4,
    OPS,
    SCALED_OPS,
    Layer,
    LayerPlan,
)
from deep_gemm.aot.outcomes import KernelsToBuild, Outcome, OutcomeLog, Progress, Summary
from deep_gemm.aot.workload import K_MULTIPLE, MAX_M, GemmShape
from deep_gemm.errors import DeepGemmError, InvalidInputError, SettingError, UnsupportedError
from deep_gemm.jit.binary import Binary, packed
from deep_gemm.jit.cache.entry import META
from deep_gemm.jit.cache.pack import write as write_pack
from deep_gemm.jit.cache.packable import PackedKernel
from deep_gemm.kernels.row_kernels import ROWS
from deep_gemm.layout import get_mk_alignment_for_contiguous_layout
from deep_gemm.log import counted, log
from deep_gemm.ops import fp4
from deep_gemm.ops.epilogue import Epilogues, epilogues_of
from deep_gemm.params import KernelParams
from deep_gemm.runtime import engine
from deep_gemm.select import casts, tuner
from deep_gemm.spec import Dtype, GemmSpec, Spec, align


def spec_of(shape: GemmShape, arch: archs.ArchSpec, num_sms: int | None = None, whole_gpu: bool = True) -> GemmSpec:
    """The spec of a call with freshly allocated tensors of this shape, under the options of this process."""
    sizes, sms = (shape.m, shape.n, shape.k), num_sms or arch.num_sms
    alignment, parts = get_mk_alignment_for_contiguous_layout(), shape.epilogue
    finished: dict[str, Any] = {"output": "e4m3"} if parts.cast else {}
    if parts.is_gated or parts.cast:  # d may have half of the columns, of one byte or two
        columns = shape.n // 2 if parts.is_gated else shape.n
        finished["aligned"] = columns * (1 if parts.cast else 2) % 16 == 0
    return ops.spec(
        *(*sizes, sms, shape.op, whole_gpu),
        groups=shape.groups,
        alignment=alignment,
        expected_m=shape.expected,
        epilogue=parts,
        **finished,
    )


def refusal(n: int, k: int, op: str = FP8, groups: int = 1) -> str:
    """Why a call with these weights is refused for every M; "" if it is not."""
    if k % K_MULTIPLE and op in SCALED_OPS:
        return (
            f"K must be a multiple of {K_MULTIPLE}, because rows of FP8 are read in pieces of {K_MULTIPLE} bytes. Pad "
            f"the weights with zero columns up to K = {align(k, K_MULTIPLE)}."
        )
    if k % FP4_BLOCK and op in FP4_OPS:
        return f"K must be a multiple of {FP4_BLOCK}, the values of MXFP4 that share a scale, but it is {k}."
    largest = f"a dimension above {MAX_SIZE}" if groups == 1 else f"more than {MAX_SIZE} rows or columns of all groups"
    return f"{largest} is not supported." if groups * max(n, k) > MAX_SIZE else ""


def kernels_of(
    shape: GemmShape, spec: archs.ArchSpec, num_sms: int | None = None, on: Iterable[Card] | None = None
) -> list[KernelParams]:
    """The kernels that such a call can run on the GPU models `on` (`cards.default` if None), chosen as a call does:
    spec, ranking, parameters. The switch for batch invariance is not known here, so the choices of both positions are
    included; with DG_TUNE, also those of each GPU model that times are kept of. Raises UnsupportedError, and
    InvalidInputError for a shape that every call refuses."""
    if why := refusal(shape.n, shape.k, shape.op, shape.groups):
        raise InvalidInputError(f"{shape} cannot be served: {why}")
    found: dict[KernelParams, None] = {}
    for card in cards.default(num_sms, spec.name) if on is None else on:
        rank = functools.partial(select.rank, arch=spec, calibration=card.calibration)
        known: dict[Spec, KernelParams] = {}
        for each in _launches(shape, spec, card, num_sms):
            if isinstance(each, GemmSpec):
                first = known.get(replace(each, batch_invariant=False))
                if first is not None and _serves(first, each):
                    continue
            known[each] = _chosen(each, spec, rank)
        found |= dict.fromkeys(known.values())
    for device in tuner.devices() if options.measured_times() else ():
        card = cards.named(device, spec.name)
        rank = functools.partial(tuner.rank, arch=spec, calibration=card.calibration, device=device)
        found |= dict.fromkeys(_chosen(each, spec, rank) for each in _launches(shape, spec, card, num_sms))
    return list(found)


def _serves(params: KernelParams, spec: GemmSpec) -> bool:
    """Whether the best kernel of all is also the best of those that are batch invariant: it is one of them, which are
    others if K is summed in parts."""
    family = kernels.gemm_family(params.kernel)
    return family.template.parts_of_k(spec) == 1 and family.fits(spec, params.gemm)


def _launches(shape: GemmShape, arch: archs.ArchSpec, card: Card, num_sms: int | None) -> Iterator[Spec]:
    """The launches of such a call on a card, in both positions of the switch for batch invariance, off first."""
    sms = num_sms or card.sms
    if shape.op in FP4_OPS:
        sizes, alignment = (shape.m, shape.n, shape.k), get_mk_alignment_for_contiguous_layout()
        yield from fp4.specs(shape.op, *sizes, shape.groups, alignment, sms, sms >= card.sms)
        return
    asked = spec_of(shape, arch, sms, sms >= card.sms)
    for invariant in (False, True):
        yield from casts.all_launches(replace(asked, batch_invariant=invariant), arch, card.calibration)


def _chosen(spec: Spec, arch: archs.ArchSpec, rank: Callable[[GemmSpec], list[select.Choice]]) -> KernelParams:
    """The kernel of a launch, where ``rank`` ranks configs."""
    config = (
        rank(spec)[0].config if isinstance(spec, GemmSpec) else kernels.for_helper(spec, arch).config_of(spec, arch)
    )
    return engine.kernel_params(spec, config, arch)


def choose(
    shapes: Iterable[GemmShape],
    arch: str = archs.DEFAULT.name,
    num_sms: int | None = None,
    on: Iterable[Card] | None = None,
    layers: Iterable[Layer] = (),
    fused: bool = False,
) -> KernelsToBuild:
    """The kernels that calls of these shapes would use on the GPU models `on` (`cards.default` if None), with `num_sms`
    SMs (all of the GPU if None); helpers that any call may need; and the kernels of the `layers`' indexers. `fused`:
    also those of `deep_gemm.fused` for the inputs of dense layers."""
    spec, models = archs.get(arch), tuple(cards.default(num_sms, arch) if on is None else on)
    wanted: dict[KernelParams, list[GemmShape]] = {}
    impossible = []
    for shape in dict.fromkeys(shapes):
        try:
            found = kernels_of(shape, spec, num_sms, models)
        except DeepGemmError as error:
            impossible.append(Outcome(f"no kernel for {shape}", (shape,), error=error))
        else:
            for params in found:
                wanted.setdefault(params, []).append(shape)
    asked = {shape.op for asking in wanted.values() for shape in asking}
    helpers = {name for op in asked for name in (fp4.helpers(op) if op in FP4_OPS else ops.helpers(op))}
    able = [kernel for kernel in map(kernels.get, sorted(helpers)) if arch in kernel.archs]
    wanted |= {params: [] for kernel in able for params in kernel.precompile_cases(spec)}
    try:
        wanted |= {params: [] for params in attention_layers.kernels_of(layers, spec)}
    except UnsupportedError as error:
        impossible.append(Outcome("no kernel of the layers' indexers", (), error=error))
    for dtype in ("bf16", "f16") if fused else ():
        widths = {x.k for x in layers if x.op in DENSE_OPS and (x.op == OPS["float16"]) == (dtype == "f16")}
        wanted |= {params: [] for params in ROWS.cases_of(sorted(widths), spec, dtype)}
    between: dict[str, Dtype] = {FP8_FP4: "e4m3", BF16_FP4: "bf16"}
    for op, output in between.items() if fused else ():
        widths = {x.k for x in layers if x.op in FP4_GROUPED[op]}
        wanted |= {params: [] for params in ROWS.cases_of_experts(sorted(widths), spec, output)}
    return KernelsToBuild({params: tuple(asking) for params, asking in wanted.items()}, tuple(impossible))


def precompile(
    what: Any,
    *,
    tp: int = 1,
    ep: int = 1,
    max_m: int = MAX_M,
    op: str = "",
    arch: str = archs.DEFAULT.name,
    num_sms: int | None = None,
    shard: tuple[int, int] | None = None,
    executor: Executor | None = None,
    jobs: int | None = None,
    progress: Progress | bool | None = None,
    allow_partial: bool = False,
    training: bool = False,
    epilogue: Epilogues = None,
    fused: bool = False,
) -> Summary:
    """Build every kernel that `what` can need into the cache: calls of these products compile nothing afterwards.

    That holds on an H100 or H200 and on the GPUs that are here, for calls with the options of this process
    (`set_num_sms` and the like) whose D has rows that start at multiples of 16 bytes wherever N allows it. A kernel
    that fails is reported as an outcome and in a warning, and the others are built.

    Args:
        what: a model's checkpoint or Hugging Face configuration, a file of it, or shapes in any form that
            `deep_gemm.aot.workload.plan` takes: (n, k), "7168x2048", "64x7168x2048" (M x N x K), a list of these.
        tp: tensor-parallel GPUs of a model.
        ep: expert-parallel GPUs of a model, among which its routed experts are shared.
        max_m: where `what` does not say M, every M from 1 to this. For a model it is the number of tokens of each GPU,
            and its experts are served whatever the routing: also if all tokens of `ep` GPUs go to one GPU's experts.
        op: the operation of shapes, and of the layers of models that are not quantised: "fp8_gemm_nt" (a model is cast
            when it is loaded), "bf16_gemm_nt" or "fp16_gemm_nt". If it is "", shapes run in FP8 and a model's dtype
            decides, which must be bfloat16 or float16.
        arch: the target, such as "sm_90a". No GPU need be present.
        num_sms: how many SMs the calls may use, which guides the choice; all of each GPU model if None. Models that
            have just so many are prepared for too: 78 adds the H20.
        shard: (i, n) builds part i, counted from 0, of n parts that are the same in every process; everything if None.
        executor: runs the builds: a pool of processes, or one on other machines. What its workers built is adopted into
            this process's cache. Workers need the same version of deep_gemm, compiler and DG_* settings; kernels that
            cannot be adopted, and those of workers that died, are built here. If None, threads of this process build,
            which suits both compilers: NVRTC lets other threads run, and NVCC is a process of its own for each kernel.
        jobs: threads that build at once in this process; the CPUs that it may use if None.
        progress: called as `progress(outcome, done, total)` after each kernel, from this thread; True prints a line
            now and then.
        allow_partial: build the layers that have kernels even if others are not understood or have none. Otherwise that
            is an UnsupportedError and nothing is built, since a call would then compile while serving.
        training: also what training of the layers in FP8 needs: the gradients of input and weight, and the casts of
            `deep_gemm.quantize`. A warning says which layers are left out; if all are, that is a part not understood.
        epilogue: also the layers with this epilogue, or with each of several: an `Epilogue`, or its parts as text, such
            as "bias:bf16+silu", "alpha+rows+residual" or "swiglu+fp8" (see `deep_gemm.Epilogue.text`). Dense layers
            take all, experts those without residual and expression.
        fused: also all of `deep_gemm.fused`, in the dtype of the layers and with FP8 results, for rows as wide as the
            K of each dense layer: norms before a layer are that wide, and activations too. Of experts with MXFP4
            weights the activations between their products, with a bias of each expert and without.

    Raises InvalidInputError for a `shard` that is not 0 <= i < n, for an unknown `arch`, and for an invalid workload;
    UnsupportedError for a workload with a part that is not understood; SettingError for a DG_* variable that is wrong.

    >>> summary = deep_gemm.precompile([(384, 512)], op="bf16_gemm_nt", max_m=1)
    >>> len(summary.outcomes) > 0
    True
    """
    work = work_of(what, tp, ep, max_m, op, arch, num_sms, allow_partial, training, epilogue, fused)
    summary = run(work, shard=shard, executor=executor, jobs=jobs, progress=progress)
    if summary.failed:
        log.warning(summary.failures)
    return summary


def run(
    work: KernelsToBuild,
    *,
    shard: tuple[int, int] | None = None,
    executor: Executor | None = None,
    jobs: int | None = None,
    progress: Progress | bool | None = None,
) -> Summary:
    """Build the kernels of `work`; arguments and errors are those of `precompile`."""
    start = time.perf_counter()
    jobs = None if jobs is None else whole(jobs, "jobs")
    if shard is not None:
        index, count = shards.pair(shard)
        dealt = {params: work.kernels[params] for params in shards.deal(work.kernels, index, count)}
        work = KernelsToBuild(dealt, work.impossible[index::count])
    report = OutcomeLog(work, progress)
    build_all(work.kernels, report.add, executor, jobs)
    return report.summary(start)


def plan(what: Any, tp: int = 1, ep: int = 1, op: str = "", training: bool = False) -> LayerPlan:
    """The layers of a workload as `workload.plan` finds them, with the reasons why every call with some is refused. It
    is a problem if `training` is asked for and no layer has gradients that can be compiled ahead."""
    found = workload.plan(what, tp, ep, op)
    whys = (layer.why_not or refusal(layer.n, layer.k, layer.op, layer.groups) for layer in found.layers)
    found = replace(
        found, layers=tuple(replace(layer, why_not=why) for layer, why in zip(found.layers, whys, strict=True))
    )
    if training and found.served and not any(layer.op == FP8 for layer in found.served):
        why = f"training adds no kernel: {' '.join(workload.untrained(found.layers))}"
        return replace(found, unknown=(*found.unknown, why))
    return found


def work_of(
    what: Any,
    tp: int = 1,
    ep: int = 1,
    max_m: int = MAX_M,
    op: str = "",
    arch: str = archs.DEFAULT.name,
    num_sms: int | None = None,
    allow_partial: bool = False,
    training: bool = False,
    epilogue: Epilogues = None,
    fused: bool = False,
) -> KernelsToBuild:
    """The kernels of a workload; arguments and errors are those of `precompile`."""
    for name, flag in (("allow_partial", allow_partial), ("training", training), ("fused", fused)):
        if not isinstance(flag, bool):
            raise InvalidInputError(f"{name} must be True or False, but it is {flag!r}.")
    num_sms = None if num_sms is None else whole(num_sms, "num_sms")
    asked = epilogues_of(epilogue)
    found = plan(what, tp, ep, op, training)
    if (problems := found.problems) and not allow_partial:
        told = " ".join(problems[:8]) + (f" So it is with {len(problems) - 8} others." if len(problems) > 8 else "")
        raise UnsupportedError(f"Not all of this can be compiled ahead: {told} Pass allow_partial=True for the rest.")
    if training and (left_out := workload.untrained(found.layers)):
        log.warning(f"training: {' '.join(left_out)}")
    shapes = workload.shapes(workload.for_every_m(found.layers, whole(max_m, "max_m")), (), training, asked)
    return choose(shapes, arch, num_sms, layers=found.layers, fused=fused)


def pack(summary: Summary, path: Path) -> list[PackedKernel]:
    """Write all kernels of `summary` to the pack `path`, whole or not at all, and return what it holds. Raises
    InvalidInputError if one failed, there is none, or the file cannot be written."""
    if summary.failed:
        raise InvalidInputError(
            f"summary has {counted(len(summary.failed), 'kernel')} that failed, so {path} was not written: a pack that "
            f"lacks some would look like a whole one. The first is {summary.failed[0].name}: {summary.failed[0].error}"
        )
    contents = [
        packed(outcome.binary, engine.build_request(outcome.params))
        for outcome in summary.outcomes
        if outcome.binary is not None and outcome.params is not None
    ]
    if not contents:
        raise InvalidInputError(f"summary has no kernels, so {path} was not written.")
    try:
        return write_pack(path, contents)
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"path: the pack {path} cannot be written: {error}.") from error


def unstored(summary: Summary) -> list[Outcome]:
    """The outcomes that no later process will find: they are neither in a pack nor in the cache directory."""
    built = [outcome for outcome in summary.outcomes if outcome.binary is not None and outcome.binary.layer != "pack"]
    return [outcome for outcome in built if outcome.binary is not None and not _is_stored(outcome.binary)]


def _is_stored(binary: Binary) -> bool:
    return binary.source_path is not None and Path(binary.source_path).with_name(META).is_file()


def build(params: KernelParams) -> Outcome:
    """Build one kernel, in a worker or here; needs no GPU. The outcome can be pickled; its `shapes` are empty. Raises
    SettingError, which no kernel survives."""
    try:
        binary = engine.build(params)
    except SettingError:
        raise
    except DeepGemmError as error:
        return Outcome(kernels.get(params.kernel).kernel_name(params), (), params, error=error)
    return Outcome(binary.name, (), params, binary)


def build_all(
    work: Iterable[KernelParams],
    report: Callable[[Outcome], None],
    executor: Executor | None = None,
    jobs: int | None = None,
) -> None:
    """`build` each kernel, by `executor` or in `jobs` threads; call `report` for each, from this thread."""
    if executor is None:
        with ThreadPoolExecutor(max_workers=jobs or cpus()) as pool:
            futures = [pool.submit(build, params) for params in work]
            try:
                for future in as_completed(futures):
                    report(future.result())
            finally:
                pool.shutdown(cancel_futures=True)
        return
    lost = _build_elsewhere(list(work), report, executor)
    if lost:
        reason = next(iter(lost.values()))
        verb = "is" if len(lost) == 1 else "are"
        log.warning(
            f"{counted(len(lost), 'kernel')} {verb} built here, not by workers: {type(reason).__name__}: {reason}"
        )
        build_all(lost, report, jobs=jobs)


def _build_elsewhere(
    work: list[KernelParams], report: Callable[[Outcome], None], executor: Executor
) -> dict[KernelParams, Exception]:
    futures: dict[Future[Outcome], KernelParams] = {}
    lost: dict[KernelParams, Exception] = {}
    for params in work:
        try:
            futures[executor.submit(build, params)] = params
        except Exception as error:  # a broken pool: each library has its own exception for it
            lost[params] = error
    try:
        for future in as_completed(futures):
            try:
                outcome = _adopted(future.result())
            except Exception as error:  # a worker that died, or one of another version
                lost[futures[future]] = error
            else:
                report(outcome)
    finally:
        for future in futures:
            future.cancel()
    return lost


def _adopted(outcome: Outcome) -> Outcome:
    """The outcome with the binary as it is kept here; its layer and seconds are those that the worker reported."""
    if outcome.binary is None or outcome.params is None:
        return outcome
    kept = engine.adopt(outcome.params, outcome.binary)
    return replace(outcome, binary=replace(kept, layer=outcome.binary.layer, seconds=outcome.binary.seconds))


def cpus() -> int:
    return len(os.sched_getaffinity(0))
