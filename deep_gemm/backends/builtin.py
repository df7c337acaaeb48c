"""The backends that come with this package: what each needs, and which modules hold its kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import arch
from ..errors import UnsupportedError
from .registry import Backend, backend

if TYPE_CHECKING:
    import torch


@backend
class Cuda(Backend):
    """Our own kernels."""

    name = "cuda"
    modules = ("deep_gemm.backends.ours", "deep_gemm.backends.ours_rows")

    def why_not(self, device: torch.device) -> str:
        """On other devices our functions run the reference, which is torch's row."""
        if device.type != "cuda":
            return super().why_not(device)
        try:
            arch.for_device(device.index or 0)
        except UnsupportedError as error:
            return str(error)
        return ""


@backend
class CuBLASLt(Backend):
    """The vendor's library, through torch."""

    name = "cublaslt"
    modules = ("deep_gemm.backends.cublaslt",)


@backend
class DeepGEMM(Backend):
    """DeepGEMM, a package with our import name, from another directory."""

    name = "deepgemm"
    modules = ("deep_gemm.backends.deepgemm",)

    def why_absent(self) -> str:
        """As `deepgemm.why_absent` says."""
        from . import deepgemm

        return deepgemm.why_absent()


@backend
class Triton(Backend):
    """Kernels in Triton. Without a GPU they run in Triton's interpreter, one program after the other in numpy."""

    name = "triton"
    requires = "triton"
    install = "pip install triton"
    modules = ("deep_gemm.backends.triton_gemm", "deep_gemm.backends.triton_rows")

    def why_not(self, device: torch.device) -> str:
        """The interpreter is chosen when Triton is imported, so that a process has one or the other."""
        from . import triton_mode

        return triton_mode.why_not(device)

    def slowness(self, device: torch.device) -> float:
        """The interpreter runs one tile after the other in numpy."""
        return 1.0 if device.type == "cuda" else 100.0


@backend
class TileLang(Backend):
    """Kernels in TileLang."""

    name = "tilelang"
    requires = "tilelang"
    install = "pip install tilelang"
    modules = ("deep_gemm.backends.tilelang_gemm", "deep_gemm.backends.tilelang_rows")


@backend
class Torch(Backend):
    """The reference: torch as one writes it, on any device. GEMMs add up in float64."""

    name = "torch"
    modules = ("deep_gemm.backends.torch_reference",)

    def why_not(self, device: torch.device) -> str:
        """It runs everywhere."""
        return ""
