"""The path of CUDA tensors without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from deep_gemm import UnsupportedError, arch, options
from deep_gemm.kernels.base import NO_NUMBERS
from deep_gemm.ops import dense
from deep_gemm.ops.batched import Batched, Summed
from deep_gemm.ops.chain import Chain
from deep_gemm.ops.dense import Dense
from deep_gemm.ops.fp4 import Fp4Gemm
from deep_gemm.ops.k_grouped import KGrouped
from deep_gemm.ops.logits import MqaLogits
from deep_gemm.ops.m_grouped import MGrouped
from deep_gemm.ops.paged_logits import PagedMqaLogits, PagedMqaLogitsMetadata
from deep_gemm.ops.quantize import Quantize
from deep_gemm.ops.row_functions import RowFunction
from deep_gemm.ops.skip_head_mid import SkipHeadMid
from deep_gemm.runtime import calls, engine, weight_promises
from deep_gemm.select import calibration
from deep_gemm.spec import (
    ActivateSpec,
    CombineSpec,
    CopySpec,
    DispatchSpec,
    DotsSpec,
    Fp4Spec,
    GemmSpec,
    KGroupMapsSpec,
    LogitsScheduleSpec,
    LogitsSpec,
    MeetSpec,
    PagedLogitsSpec,
    PullSpec,
    QuantizeSpec,
    ReturnSpec,
    RouteSpec,
    RowsSpec,
    TransposeBytesSpec,
    TransposeSpec,
)

CPU = -1
"""`Tensor.get_device` of the CPU, which stands for the GPU."""


KERNELS = {
    GemmSpec: "gemm", TransposeSpec: "transpose", TransposeBytesSpec: "transpose bytes", CopySpec: "copy",
    QuantizeSpec: "quantize", RowsSpec: "rows", KGroupMapsSpec: "maps", LogitsSpec: "logits",
    PagedLogitsSpec: "paged logits", LogitsScheduleSpec: "schedule", DotsSpec: "dots", RouteSpec: "route",
    DispatchSpec: "dispatch", CombineSpec: "combine", ActivateSpec: "activate", Fp4Spec: "fp4", MeetSpec: "meet",
    PullSpec: "pull", ReturnSpec: "return",
}  # fmt: skip


class Launched(NamedTuple):
    """One launch: "gemm", "copy" or "transpose", the addresses of its operands, whether its weights were promised
    constant, its spec, the operands' strides, and the step's numbers."""

    kernel: str
    at: dict[str, int]
    constant: bool
    spec: Any
    strides: Any
    numbers: Any


def calls_behind(entry: Any, variant: int = 0) -> calls.Calls:
    """The remembered calls behind a function that `calls.make_entry` returned, of one of its operations."""
    found: calls.Calls = entry.__globals__[f"calls{variant}"]
    return found


class FakeLaunch:
    """A launch record that lists its launches."""

    def __init__(
        self, gpu: FakeGpu, spec: Any, strides: Any, at: Mapping[str, int], constant: bool, numbers: Any
    ) -> None:
        kernel = KERNELS[type(spec)]
        self.gpu, self.made = gpu, Launched(kernel, dict(at), constant, spec, strides, numbers)

    def __call__(self) -> None:
        self.gpu.launched.append(self.made)

    def at(self, addresses: Sequence[int]) -> None:
        at = dict(zip(self.made.at, addresses, strict=True))
        self.gpu.launched.append(self.made._replace(at=at))


class FakeGpu:
    """The code path of CUDA tensors, run with tensors on the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched: list[Launched] = []
        self.prepared = 0
        """Launch records that were made."""
        self.unsupported = ""
        """Why no kernel can do anything, if it is set."""
        self.calls: calls.Calls = calls_behind(dense.fp8)
        calls.forget_all()
        self.checks: dict[type, Any] = {}
        """The original check of each operation."""
        of_logits = (MqaLogits, PagedMqaLogits, PagedMqaLogitsMetadata)
        grouped = (MGrouped, KGrouped, Batched, Summed, Fp4Gemm)
        for operation in (Dense, SkipHeadMid, *grouped, Quantize, RowFunction, Chain, *of_logits):
            self.checks[operation] = operation.check
            monkeypatch.setattr(operation, "check", self.checked(operation))
        monkeypatch.setattr(weight_promises, "_callbacks_work", lambda: True)
        monkeypatch.setattr(calls, "_current_device", lambda: 0)
        monkeypatch.setattr(calls, "_raw_stream", lambda device: 7)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(arch, "for_device", lambda device: arch.SM90)
        monkeypatch.setattr(options, "num_sms_for", lambda device: 132)
        monkeypatch.setattr(options, "whole_gpu", lambda device: True)
        monkeypatch.setattr(engine, "calibration_of", lambda device: calibration.default())
        monkeypatch.setattr(engine, "plan", self.plan)
        monkeypatch.setattr(engine, "launch_record", self.launch)

    def checked(self, operation: type) -> Any:
        """The operation's check, whose result claims to be on a GPU."""

        def checked(*args: Any, **named: Any) -> Any:
            x = self.checks[operation](*args, **named)
            return None if x is None else replace(x, device=torch.device("cuda", 0))

        return checked

    def plan(self, spec: Any, device: int) -> Any:
        if self.unsupported:
            raise UnsupportedError(self.unsupported)
        return SimpleNamespace(spec=spec, device=CPU, config="64x64", symbol=KERNELS[type(spec)])

    def launch(
        self,
        plan: Any,
        strides: Any,
        addresses: Mapping[str, int],
        stream: int,
        constant: bool = False,
        numbers: Any = NO_NUMBERS,
    ) -> FakeLaunch:
        self.prepared += 1
        return FakeLaunch(self, plan.spec, strides, addresses, constant, numbers)

    @property
    def constants(self) -> list[bool]:
        """Whether weights were constant, for each GEMM that was launched."""
        return [launched.constant for launched in self.launched if launched.kernel == "gemm"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    yield FakeGpu(monkeypatch)
    calls.forget_all()
