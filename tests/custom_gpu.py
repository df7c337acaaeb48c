"""Users' kernels without a GPU: their launches reach a driver that is not there, which notes the arguments."""

import ctypes
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from driver_fakes import OK, FakeDriver
from gpu_fakes import CPU, FakeGpu
from jit_fakes import FakeCompiler
from launches import encoder

import deep_gemm
from deep_gemm import LaunchConfig, arch
from deep_gemm.custom import operation
from deep_gemm.jit.builder import Builder
from deep_gemm.kernels.base import Argument
from deep_gemm.runtime import calls, engine

REAL_LAUNCH = engine.launch_record
C_TYPES: dict[str, Any] = {"u32": ctypes.c_uint32, "i32": ctypes.c_int32, "i64": ctypes.c_int64, "f32": ctypes.c_float}


class Ran(NamedTuple):
    """One launch: grid, threads, shared memory, attributes (clusters and so on), and the arguments by name. A tensor
    map is the number of the map that was encoded for it."""

    grid: tuple[int, int, int]
    block: int
    shared: int
    attributes: int
    values: dict[str, Any]


class CustomGpu:
    """A GPU for users' kernels, played by tensors on the CPU, a compiler that copies, and a driver that notes."""

    def __init__(self, gpu: FakeGpu, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.driver, self.ran, self.compiler = driver, list[Ran](), FakeCompiler()
        self.capturing, self.capability = False, (9, 0)
        self.arguments: list[Argument] = []
        self.moved: list[int] = []
        """Addresses that were written into tensor maps."""
        builder = Builder(root, self.compiler)
        check, plan = operation.CustomOperation.check, operation.CustomOperation.plan

        def checked(kernel: Any, *arguments: Any) -> Any:
            x = check(kernel, *arguments)
            self.arguments = [parameter.argument for parameter in kernel.declared.parameters]
            return None if x is None else replace(x, device=torch.device("cuda", 0))

        monkeypatch.setattr(operation.CustomOperation, "check", checked)
        # Tensors on the CPU stand for the GPU's: replays compare their device with the plan's.
        monkeypatch.setattr(
            operation.CustomOperation, "plan", lambda kernel, step, device: replace(plan(kernel, step, 0), device=CPU)
        )
        monkeypatch.setattr(operation, "default_builder", lambda: builder)
        driver.answers["cuTensorMapReplaceAddress"] = self.replace_address
        monkeypatch.setattr(engine, "launch_record", REAL_LAUNCH)
        monkeypatch.setattr(engine, "_functions", {})
        monkeypatch.setattr(engine, "primary_context", lambda device: nullcontext())
        monkeypatch.setattr(arch, "target", lambda device: "sm_90a")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: self.capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
        driver.answers["cuLaunchKernelEx"] = self.launch

    def replace_address(self, place: Any, address: int) -> tuple[Any, ...]:
        self.moved.append(address)
        return (OK,)

    def launch(self, config: Any, handle: int, pointers: int, extra: int) -> tuple[Any, ...]:
        places = (ctypes.c_void_p * len(self.arguments)).from_address(pointers)
        values = {}
        for argument, place in zip(self.arguments, places, strict=True):
            kind = ctypes.c_ubyte if argument.ctype == "TensorMap" else C_TYPES.get(argument.ctype, ctypes.c_uint64)
            values[argument.name] = kind.from_address(place or 0).value
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        shape = (grid, config.blockDimX, config.sharedMemBytes, config.numAttrs)
        self.ran.append(Ran(*shape, values))
        return (OK,)


@pytest.fixture
def own(gpu: FakeGpu, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[CustomGpu]:
    with encoder():
        yield CustomGpu(gpu, driver, monkeypatch, tmp_path / "root")
    calls.forget_all()


PARAMETERS = {"out": "f32*", "x": "const f32*", "y": "const f32*", "scale": "f32", "n": "u32"}
BODY = "const u32 i = blockIdx.x * blockDim.x + threadIdx.x;\nif (i < n) out[i] = scale * x[i] + y[i];"


def scale_add(out: Any, x: Any, y: Any, scale: float) -> LaunchConfig | None:
    """out = scale * x + y."""
    n = out.numel()
    return LaunchConfig(grid=-(-n // 256), block=256, values={"n": n}, flops=2 * n) if n else None


def made(**options: Any) -> deep_gemm.CustomKernel[Any]:
    return deep_gemm.kernel(PARAMETERS, **{"body": BODY, **options})(scale_add)


def vectors(n: int = 1000) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.zeros(n), torch.arange(n).float(), torch.ones(n)
