"""The backends that come with this package: their requirements, and the modules with their kernels."""

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
    modules = ("deep_gemm.backends.ours",)

    def why_not(self, device: torch.device) -> str:
        """Our kernels need a GPU. On other devices our functions run the reference, which is the backend torch."""
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
    """DeepGEMM, loaded from another directory, because its package has the same name as ours."""

    name = "deepgemm"
    modules = ("deep_gemm.backends.deepgemm",)

    def why_absent(self) -> str:
        from . import deepgemm

        return deepgemm.why_absent()


@backend
class Triton(Backend):
    """Kernels in Triton. Without a GPU they run in Triton's interpreter."""

    name = "triton"
    requires = "triton"
    install = "pip install triton"
    modules = ("deep_gemm.backends.triton_gemm",)

    def why_not(self, device: torch.device) -> str:
        """Triton decides at its import whether it interprets kernels."""
        from . import triton_mode

        return triton_mode.why_not(device)

    def slowness(self, device: torch.device) -> float:
        """The interpreter runs one tile after another in numpy."""
        return 1.0 if device.type == "cuda" else 100.0


@backend
class Torch(Backend):
    """The reference: plain torch, on any device. GEMMs accumulate in float64."""

    name = "torch"
    modules = ("deep_gemm.backends.torch_reference",)

    def why_not(self, device: torch.device) -> str:
        return ""
