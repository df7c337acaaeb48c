"""Spec sheets of GPU models: what an unknown card starts from.

Where to look them up: NVIDIA's data sheets "H100 Tensor Core GPU" (SXM and PCIe), "H200 Tensor Core GPU", "GH200 Grace
Hopper Superchip" (with 96 GB), and the "H20" product brief; the L2 of the GH100 chip in "NVIDIA H100 Tensor Core GPU
Architecture". The figures have not been compared with these yet; those of the H20, and the clocks and the power of the
GH200, are least sure. Tensor rates are those of eight-bit operands without sparsity.
"""

from __future__ import annotations

import math

from deep_gemm.records import record


@record(frozen=True)
class Sheet:
    """One GPU model."""

    name: str
    device: str
    """The name that the driver gives it."""
    sms: int
    clock_ghz: float
    """Boost clock."""
    tensor_tflops: float
    hbm_gb_per_s: float
    power_w: int

    def distance(self, other: Sheet) -> float:
        """How different two cards are in what limits a GEMM."""
        rates = ("sms", "tensor_tflops", "hbm_gb_per_s")
        return math.hypot(*(math.log(getattr(self, rate) / getattr(other, rate)) for rate in rates))


SHEETS = (
    Sheet("H100 SXM", "NVIDIA H100 80GB HBM3", 132, 1.98, 1979, 3350, 700),
    Sheet("H100 PCIe", "NVIDIA H100 PCIe", 114, 1.755, 1513, 2039, 350),
    Sheet("H200", "NVIDIA H200", 132, 1.98, 1979, 4800, 700),
    Sheet("H20", "NVIDIA H20", 78, 1.98, 296, 4000, 400),
    Sheet("GH200", "NVIDIA GH200 480GB", 132, 1.98, 1979, 4000, 1000),
)


def for_device(device: str, num_sms: int = 0, hbm_gb_per_s: float = 0.0) -> Sheet:
    """The sheet of the GPU model with the driver's name ``device``, else the nearest one by SMs and bandwidth (0 if
    unknown). Among variants of a model, such as the H100 PCIe, the number of SMs decides."""
    model = [sheet for sheet in SHEETS if sheet.name.split()[0] in device.split() and num_sms in (0, sheet.sms)]

    def distance(sheet: Sheet) -> tuple[bool, float]:
        sms = math.log(num_sms / sheet.sms) if num_sms else 0.0
        hbm = math.log(hbm_gb_per_s / sheet.hbm_gb_per_s) if hbm_gb_per_s else 0.0
        return sheet.device != device, math.hypot(sms, hbm)

    return min(model or SHEETS, key=distance)
