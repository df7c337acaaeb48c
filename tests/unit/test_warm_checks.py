"""A warm call and a replay do what the same call does when it comes first: each change of a property or setting that
checks, work or plans look at is refused in the same words, or launches the same."""

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from call_kinds import BF16, CUSTOM, E4M3, F32, FP16, KINDS, K, Kind, M, Tensors, dense_fp8
from custom_gpu import CustomGpu, own
from gpu_fakes import FakeGpu

import deep_gemm
from deep_gemm import DeepGemmError, LaunchConfig, options, settings
from deep_gemm.runtime import calls

__all__ = ["own"]


@pytest.fixture
def gpu(own: CustomGpu, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """All operations on the fake GPU; `options` reach the specs."""
    real, fake = calls.engine.launch_record, gpu.launch
    monkeypatch.setattr(
        calls.engine,
        "launch_record",
        lambda plan, *others, **named: (real if hasattr(plan, "params") else fake)(plan, *others, **named),
    )
    monkeypatch.setattr(options, "num_sms_for", lambda device: options.current().num_sms or 132)
    monkeypatch.setattr(options, "_device_limit", lambda: 132)
    yield gpu
    for name, value in vars(options._Options()).items():
        setattr(options.current(), name, value)
    deep_gemm.set_mk_alignment_for_contiguous_layout(128)


@dataclass(frozen=True)
class Told:
    """The end of a call: what was launched, or the error."""

    launched: tuple[Any, ...] = ()
    error: str = ""


def told(gpu: FakeGpu, own: CustomGpu, kind: Kind, tensors: Tensors, **changed: Any) -> Told:
    gpu.launched.clear()
    own.ran.clear()
    sources = len(own.compiler.calls)
    try:
        kind(tensors, **changed)
    except DeepGemmError as error:
        assert not gpu.launched
        assert not own.ran
        assert len(own.compiler.calls) == sources
        text = re.sub("0x[0-9a-f]+", "ADDRESS", f"{type(error).__name__}: {error}")
        return Told(error=text)
    seen = [(x.kernel, x.spec, x.strides, dict(x.numbers), tuple(x.at)) for x in gpu.launched]
    return Told((*seen, *((ran.grid, ran.block) for ran in own.ran)))


def warmed(kind: Kind, way: str) -> Tensors:
    """Tensors whose call is remembered: as a warm call, or as a replay only."""
    tensors = kind.tensors()
    if way == "warm":
        for _ in range(3):
            kind(tensors)
    else:
        kept = [kind.tensors() for _ in range(2)]  # alive together: none has another's addresses
        for each in kept:
            kind(each)
        KEPT.extend(kept)
    return tensors


KEPT: list[Tensors] = []


class Elsewhere(torch.Tensor):
    """A subclass that says something else than the tensor in it."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 3)

    def get_device(self) -> int:
        return 3


class Quiet(torch.Tensor):
    """A subclass that is an ordinary tensor in every other respect."""


def freed(x: torch.Tensor) -> torch.Tensor:
    x.untyped_storage().resize_(0)
    return x


OTHER = {E4M3: torch.float8_e5m2, BF16: FP16, FP16: BF16, F32: torch.int32, torch.int32: F32}
OTHER |= {torch.int64: torch.float64, torch.uint8: torch.int8, torch.int16: FP16}

CHANGES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str | None, tuple[str, ...]]] = {
    "negative": (torch._neg_view, "a view whose sign is applied when it is read", ("warm", "replay")),
    # Some dtypes are taken, and launch something else.
    "dtype": (lambda x: x.view(OTHER[x.dtype]), None, ("warm", "replay")),
    "meta": (lambda x: x.to("meta"), "is a meta tensor", ("warm", "replay")),
    "elsewhere": (lambda x: x.as_subclass(Elsewhere), "all tensors must be on one device", ("replay",)),
    "freed": (freed, "has no memory", ("warm", "replay")),
    "subclass": (lambda x: x.as_subclass(Quiet), "", ("warm", "replay")),
    "parameter": (lambda x: torch.nn.Parameter(x, requires_grad=False), "", ("warm", "replay")),
}


UNSEEN = {("negative", dtype) for dtype in (E4M3, torch.uint8, torch.int16, torch.int32, torch.int64)}
"""What a warm call does not look for: see `KernelOperation.unsigned`."""


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", KINDS)
def test_a_changed_operand_is_seen(gpu: FakeGpu, own: CustomGpu, name: str, change: str) -> None:
    kind, (make, refusal, ways) = KINDS[name], CHANGES[change]
    for operand, way in itertools.product(kind.tensors(), ways):
        first = kind.tensors()
        if (change, first[operand].dtype) in UNSEEN:
            continue
        calls.forget_all()
        wanted = told(gpu, own, kind, first | {operand: make(first[operand])})
        if refusal is not None:
            assert re.search(refusal, wanted.error) if refusal else wanted.launched
        calls.forget_all()
        tensors = warmed(kind, way)
        assert told(gpu, own, kind, tensors | {operand: make(tensors[operand])}) == wanted, (operand, way)
        KEPT.clear()
        assert told(gpu, own, kind, kind.tensors()).launched


@pytest.mark.parametrize("name", KINDS)
def test_an_output_that_begins_to_require_grad_is_seen(gpu: FakeGpu, own: CustomGpu, name: str) -> None:
    kind = KINDS[name]
    for operand, way in itertools.product(kind.written, ("warm", "replay")):
        calls.forget_all()
        first = kind.tensors()
        first[operand].requires_grad_()
        wanted = told(gpu, own, kind, first)
        calls.forget_all()
        tensors = warmed(kind, way)
        tensors[operand].requires_grad_()
        for _ in range(2):
            assert told(gpu, own, kind, tensors) == wanted
            with torch.no_grad():
                assert told(gpu, own, kind, tensors).launched
    assert name in ("rows", "columns", "gathered", "factored") or "requires grad" in wanted.error


@pytest.mark.parametrize("name", KINDS)
def test_every_call_goes_to_its_own_operands(gpu: FakeGpu, own: CustomGpu, name: str) -> None:
    """First, warm and replayed, in one launch; groups of FP8 along K make their maps before it, and a mixture has four
    or five launches."""
    most = {"k fp8": 2, "k padded": 2, "experts": 4, "experts of fp8": 4}
    most |= dict.fromkeys(("experts of mxfp4", "experts of mxfp4 and bf16"), 5)
    kept = [KINDS[name].tensors() for _ in range(4)]
    for tensors in kept:
        for _ in range(3):
            assert len(told(gpu, own, KINDS[name], tensors).launched) == most.get(name, 1)
            seen = {place for launched in gpu.launched for place in launched.at.values()}
            seen |= {value for ran in own.ran for value in ran.values.values()}
            assert {x.data_ptr() for x in tensors.values()} <= seen


OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("fp8", {"disable_ue8m0_cast": 0}, "disable_ue8m0_cast must be True or False"),
    ("fp8", {"recipe": None}, ""), ("fp8", {"recipe": (1, 1, 128)}, "scales of b must have the shape"),
    ("fp8", {"compiled_dims": "n"}, ""), ("fp8", {"pair": iter}, "a must be a pair"), ("fp8", {"pair": list}, ""),
    ("fp8", {"pair": dict.fromkeys}, "a must be a pair"), ("bf16 epilogue", {"activation": None}, ""),
    ("bf16 epilogue", {"activation": "mish"}, "the activation of an epilogue must be None or one of 'silu'"),
    ("bf16 epilogue", {"alpha": -0.0}, ""), ("bf16 epilogue", {"alpha": True}, "alpha must be a finite number"),
    ("index fp8", {"disable_ue8m0_cast": 0}, "disable_ue8m0_cast must be True or False"),
    ("index fp8", {"pair": iter}, "a must be a pair"),
    ("index fp8", {"use_psum_layout": True}, "grouped_layout must have the shape"),
    ("psum bf16", {"use_psum_layout": False}, "grouped_layout must have the shape"),
    ("masked fp8", {"expected_m": 24}, ""),
    ("masked fp8", {"expected_m": True}, "expected_m must be a positive integer"),
    ("k fp8", {"pair": iter}, "a must be a pair"),
    ("k fp8", {"recipe": (1.0, 1, 128)}, "recipe must be 3 positive integers"),
    ("k padded", {"compiled_dims": "q"}, "compiled_dims must be"),
    ("rows", {"use_ue8m0": 1}, "use_ue8m0 must be True or False"),
    ("rows", {"gated": 0}, "gated must be True or False"), ("rows", {"epsilon": True}, "epsilon must be a number"),
    ("rows", {"epsilon": 1}, ""), ("rows", {"pair": iter}, "out must be a pair"), ("own", {"scale": 1}, ""),
    ("own", {"scale": True}, ""),
]  # fmt: skip


@pytest.mark.parametrize("way", ["warm", "replay"])
@pytest.mark.parametrize(("name", "changed", "refusal"), OPTIONS)
def test_a_changed_option_is_seen(
    gpu: FakeGpu, own: CustomGpu, name: str, changed: dict[str, Any], refusal: str, way: str
) -> None:
    kind = KINDS[name]
    wanted = told(gpu, own, kind, kind.tensors(), **changed)
    assert re.search(refusal, wanted.error) if refusal else wanted.launched
    calls.forget_all()
    assert told(gpu, own, kind, warmed(kind, way), **changed) == wanted
    KEPT.clear()


def test_a_number_that_equals_another_is_another_constant_of_an_own_kernel(gpu: FakeGpu, own: CustomGpu) -> None:
    """A source in which the number is written is another binary."""
    tensors = KINDS["own"].tensors()
    for count, scale in ((1, 1.0), (1, 1.0), (2, 1), (3, True), (3, 1.0), (3, 1)):
        CUSTOM(**tensors, scale=scale)
        assert len(own.compiler.calls) == count


def test_arguments_of_an_own_kernel_may_have_any_names(gpu: FakeGpu, own: CustomGpu) -> None:
    """Also those of the variables in the function that looks calls up."""

    def named(out: Any, key: int, device: int, call: int, type: int, calls: int) -> LaunchConfig:
        return LaunchConfig(grid=1, block=32)

    numbers = dict(zip(("key", "device", "call", "type", "calls"), range(5), strict=True))
    kernel = deep_gemm.kernel({"out": "f32*", **dict.fromkeys(numbers, "u32")}, body="out[0] = key;")(named)
    out = torch.zeros(1)
    for _ in range(3):
        kernel(out, **numbers)
    assert [ran.values for ran in own.ran] == [{"out": out.data_ptr(), **numbers}] * 3


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        yield


def turned() -> Tensors:
    """MN-major values, which are transposed first."""
    return dense_fp8(a=torch.zeros(K, M).to(E4M3).t())


SETTINGS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    "override": (lambda: settings.override(forbid_transpose=True), "DG_FORBID_TRANSPOSE=1 forbids"),
    "environment": (lambda: environment("DG_FORBID_TRANSPOSE", "1"), "DG_FORBID_TRANSPOSE=1 forbids"),
    "no number": (lambda: environment("DG_FORBID_TRANSPOSE", "maybe"), "DG_FORBID_TRANSPOSE must be"),
    "other override": (lambda: settings.override(debug=True), ""),
    "nothing": (nullcontext, ""),
}


@pytest.mark.parametrize("way", ["warm", "replay"])
@pytest.mark.parametrize("change", SETTINGS)
def test_a_setting_that_refuses_is_seen(gpu: FakeGpu, own: CustomGpu, change: str, way: str) -> None:
    kind, (context, refusal) = replace(KINDS["fp8"], tensors=turned), SETTINGS[change]
    before = told(gpu, own, kind, tensors := warmed(kind, way))
    assert [x[0] for x in before.launched] == ["transpose bytes", "gemm"]
    for _ in range(2):
        with context():
            found = told(gpu, own, kind, tensors)
            assert re.search(refusal, found.error) if refusal else found == before
        assert told(gpu, own, kind, tensors) == before
    KEPT.clear()


def test_other_settings_drop_nothing(gpu: FakeGpu, own: CustomGpu) -> None:
    """DG_TUNE among them: a plan is made once, and only options and `tuning` drop it."""
    kind = KINDS["bf16"]
    tensors = warmed(kind, "warm")
    before = gpu.prepared
    for context in (
        settings.override(fallback="torch"),
        settings.override(tune="read"),
        settings.override(forbid_transpose=True),
        environment("DG_TUNE", "read"),
        environment("DG_FALLBACK", "torch"),
    ):
        with context:
            kind(tensors)
        kind(tensors)
    assert gpu.prepared == before


@pytest.mark.parametrize(
    "change",
    [
        lambda: deep_gemm.set_num_sms(100), lambda: deep_gemm.set_pdl(False),
        lambda: deep_gemm.set_block_size_multiple_of(64), lambda: deep_gemm.set_batch_invariant(True),
        lambda: deep_gemm.set_ignore_compile_dims(True), lambda: deep_gemm.set_mk_alignment_for_contiguous_layout(64),
    ],
    ids=["num_sms", "pdl", "block_size_multiple_of", "batch_invariant", "ignore_compile_dims", "mk_alignment"],
)  # fmt: skip
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if "d" in kind.written or name == "own"])
def test_a_changed_option_of_the_process_is_seen(
    gpu: FakeGpu, own: CustomGpu, name: str, change: Callable[[], None]
) -> None:
    kind = KINDS[name]
    changed = {"compiled_dims": "n"} if name != "own" else {}
    tensors = kind.tensors()
    for _ in range(3):
        kind(tensors, **changed)
    change()
    warm = told(gpu, own, kind, tensors, **changed)
    calls.forget_all()
    assert told(gpu, own, kind, tensors, **changed) == warm
