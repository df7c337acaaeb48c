"""The path of CUDA tensors without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from deep_gemm import constant, dense


class FakeGpu:
    """The path of CUDA tensors, taken by tensors on the CPU: each launch notes whether B was constant in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched: list[bool] = []
        self.prepared = 0
        validate = dense.validate_fp8_gemm
        monkeypatch.setattr(dense, "_warm", {})
        monkeypatch.setattr(dense, "_moved", {})
        monkeypatch.setattr(constant, "_ends_are_told", lambda: True)
        monkeypatch.setattr(dense, "_current_device", lambda: 0)
        monkeypatch.setattr(dense, "_raw_stream", lambda device: 7)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(dense.arch, "for_device", lambda device: dense.arch.SM90)
        monkeypatch.setattr(dense.options, "num_sms_for", lambda device: 132)
        monkeypatch.setattr(dense.options, "whole_gpu", lambda device: True)
        monkeypatch.setattr(dense.engine, "plan", lambda problem, device: None)
        monkeypatch.setattr(dense.engine, "transpose_moving", lambda *args: lambda addresses: None)
        monkeypatch.setattr(dense.engine, "fp8_gemm_launch", self.launch)
        monkeypatch.setattr(dense.engine, "fp8_gemm_moving", self.moving)
        monkeypatch.setattr(
            dense, "validate_fp8_gemm", lambda *args: replace(validate(*args), device=torch.device("cuda", 0))
        )

    def launch(self, *args: Any, constant_b: bool = False) -> Callable[[], None]:
        self.prepared += 1
        return lambda: self.launched.append(constant_b)

    def moving(self, *args: Any, constant_b: bool = False) -> Callable[[Mapping[str, int]], None]:
        self.prepared += 1
        return lambda addresses: self.launched.append(constant_b)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)
