"""Spec sheets of GPU models: what an unknown card starts from.

Where to look them up: NVIDIA's data sheets "H100 Tensor Core GPU" (SXM and PCIe), "H200 Tensor Core GPU", "GH200 Grace
Hopper Superchip" (with 96 GB), "A100 Tensor Core GPU", "A10 Tensor Core GPU", "L4 Tensor Core GPU", "L40S GPU" and "RTX
PRO 6000 Blackwell Workstation Edition"; the "H20" product brief; the tables of "NVIDIA Ampere GA102 GPU Architecture"
(3090), "NVIDIA Ada GPU Architecture" (4090) and "NVIDIA RTX Blackwell GPU Architecture" (5090); "NVIDIA DGX B200" and
"DGX B300", divided by eight GPUs. The figures have not been compared with these yet; those of the H20 and the B300, the
clocks and the power of the GH200, and the tensor rate of the RTX PRO 6000 are least sure.

Tensor rates are those of eight-bit operands without sparsity, with float32 sums where the sheet tells these apart: FP8,
or INT8 before compute capability 8.9, which has twice the rate of BF16 everywhere. Of B200 and B300 they are those of
instructions that no kernel here uses; mma.sync does not reach them.
"""

from __future__ import annotations

import math

from deep_gemm.arch import SM80, SM86, SM89, SM90, SM100, SM103, SM120
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
    arch: str = SM90.name

    def distance(self, other: Sheet) -> float:
        """How different two cards are in what limits a GEMM."""
        rates = ("sms", "tensor_tflops", "hbm_gb_per_s")
        return math.hypot(*(math.log(getattr(self, rate) / getattr(other, rate)) for rate in rates))


_PRO_6000 = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"

SHEETS = (
    Sheet("H100 SXM", "NVIDIA H100 80GB HBM3", 132, 1.98, 1979, 3350, 700),
    Sheet("H100 PCIe", "NVIDIA H100 PCIe", 114, 1.755, 1513, 2039, 350),
    Sheet("H200", "NVIDIA H200", 132, 1.98, 1979, 4800, 700),
    Sheet("H20", "NVIDIA H20", 78, 1.98, 296, 4000, 400),
    Sheet("GH200", "NVIDIA GH200 480GB", 132, 1.98, 1979, 4000, 1000),
    Sheet("A100 80GB", "NVIDIA A100-SXM4-80GB", 108, 1.41, 624, 2039, 400, SM80.name),
    Sheet("A100 40GB", "NVIDIA A100-SXM4-40GB", 108, 1.41, 624, 1555, 400, SM80.name),
    Sheet("A10", "NVIDIA A10", 72, 1.695, 250, 600, 150, SM86.name),
    Sheet("3090", "NVIDIA GeForce RTX 3090", 82, 1.695, 142, 936, 350, SM86.name),
    Sheet("L40S", "NVIDIA L40S", 142, 2.52, 733, 864, 350, SM89.name),
    Sheet("L4", "NVIDIA L4", 58, 2.04, 242, 300, 72, SM89.name),
    Sheet("4090", "NVIDIA GeForce RTX 4090", 128, 2.52, 330, 1008, 450, SM89.name),
    Sheet("B200", "NVIDIA B200", 148, 1.965, 4500, 8000, 1000, SM100.name),
    Sheet("B300", "NVIDIA B300", 148, 1.92, 4500, 8000, 1100, SM103.name),
    Sheet("5090", "NVIDIA GeForce RTX 5090", 170, 2.407, 419, 1792, 575, SM120.name),
    Sheet("RTX PRO 6000", _PRO_6000, 188, 2.6, 1000, 1792, 600, SM120.name),
)


def of_arch(arch: str) -> tuple[Sheet, ...]:
    """Those of GPUs with this compiler target."""
    return tuple(sheet for sheet in SHEETS if sheet.arch == arch)


def for_device(device: str, num_sms: int = 0, hbm_gb_per_s: float = 0.0, arch: str = SM90.name) -> Sheet:
    """The sheet of the GPU model with the driver's name ``device``, else the nearest one of ``arch`` by SMs and
    bandwidth (0 if unknown), of all if ``arch`` has none. Among variants of a model, such as the H100 PCIe, the number
    of SMs decides."""
    own = [sheet for sheet in SHEETS if sheet.device == device and num_sms in (0, sheet.sms)]
    near = of_arch(arch) or SHEETS
    model = own or [sheet for sheet in near if sheet.name.split()[0] in device.split() and num_sms in (0, sheet.sms)]

    def distance(sheet: Sheet) -> float:
        sms = math.log(num_sms / sheet.sms) if num_sms else 0.0
        hbm = math.log(hbm_gb_per_s / sheet.hbm_gb_per_s) if hbm_gb_per_s else 0.0
        return math.hypot(sms, hbm)

    return min(model or near, key=distance)
