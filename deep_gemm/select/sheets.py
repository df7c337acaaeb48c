"""Spec sheets of GPU models: what an unknown card starts from.

The source of each sheet is beside it. "Driver" is what drivers report, in published logs of cards; "databases" are
tables of other people, where no document of NVIDIA was found. Rates agree with SMs x clock x products of an SM in a
cycle, which are the same for all cards of a kind: of 16-bit operands 1024 on compute capability 8.0, 2048 on 9.0, 4096
on 10.0, 512 on other data centre and workstation cards, and 256 on GeForce cards.

No sheet has the bandwidth of L2: it is taken to grow with SMs x clock. Third parties measured copies to shared memory
of 1,946 bytes in a cycle on a 4090, and 3,840 on an A100 (smallscientist1/cuda_microbenchmark): 0.43 of as many an SM.
With that for GeForce and workstation cards one of 616 choices was another one.
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
    half_tflops: float
    """Products of 16-bit operands with float32 sums, without sparsity."""
    eight_bit_tflops: float
    """The same of FP8 operands; 0 where the GPU has no such instruction."""
    hbm_gb_per_s: float
    power_w: int
    arch: str = SM90.name
    mma_tflops: tuple[float, float] | None = None
    """Products of 16-bit and of FP8 operands with the instructions that kernels here use, where these have other rates
    than the above."""

    def reached(self, element_bytes: int) -> float:
        """TFLOP/s of the instructions that kernels here use for operands of so many bytes. FP8 without an instruction
        of its own is multiplied as FP16."""
        half, eight = self.mma_tflops or (self.half_tflops, self.eight_bit_tflops or self.half_tflops)
        return eight if element_bytes == 1 else half

    def distance(self, other: Sheet) -> float:
        """How different two cards are in what limits a GEMM."""
        rates = ("sms", "half_tflops", "hbm_gb_per_s")
        return math.hypot(*(math.log(getattr(self, rate) / getattr(other, rate)) for rate in rates))


_PRO_6000 = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"

SHEETS = (
    # The data sheets of H100 and H200, in copies; the clock by the driver.
    Sheet("H100 SXM", "NVIDIA H100 80GB HBM3", 132, 1.98, 989.5, 1979, 3350, 700),
    # The H100's data sheet, in a copy (with 2,000 GB/s), and product brief PB-11133-001. No source for the clock.
    Sheet("H100 PCIe", "NVIDIA H100 PCIe", 114, 1.755, 756.5, 1513, 2039, 350),
    Sheet("H200", "NVIDIA H200", 132, 1.98, 989.5, 1979, 4800, 700),
    # Databases. No source for the clock.
    Sheet("H20", "NVIDIA H20", 78, 1.98, 148, 296, 4000, 400),
    # Databases: SMs, the clock, and the power, which is that of CPU, GPU and memory. No source for the bandwidth.
    Sheet("GH200", "NVIDIA GH200 480GB", 132, 1.98, 989.5, 1979, 4000, 1000),
    # Data sheet 1758950 "A100 Tensor Core GPU", as quoted; SMs and the clock also by the driver; the rate also in
    # NVIDIA/cudnn-frontend#715.
    Sheet("A100 80GB", "NVIDIA A100-SXM4-80GB", 108, 1.41, 312, 0, 2039, 400, SM80.name),
    Sheet("A100 40GB", "NVIDIA A100-SXM4-40GB", 108, 1.41, 312, 0, 1555, 400, SM80.name),
    # Databases.
    Sheet("A10", "NVIDIA A10", 72, 1.695, 125, 0, 600, 150, SM86.name),
    # "NVIDIA Ampere GA102 GPU Architecture" V2, appendix A: the rate, as quoted. The rest: databases.
    Sheet("3090", "NVIDIA GeForce RTX 3090", 82, 1.695, 71, 0, 936, 350, SM86.name),
    # Data sheet "L40S", in copies: all but the clock, which is from databases.
    Sheet("L40S", "NVIDIA L40S", 142, 2.52, 366.5, 733, 864, 350, SM89.name),
    # Data sheet "L4", in a copy: all but the SMs, which follow from its 7,424 CUDA cores; databases also say 60.
    Sheet("L4", "NVIDIA L4", 58, 2.04, 121, 242, 300, 72, SM89.name),
    # "NVIDIA Ada GPU Architecture" V2: float32 sums have half of the rate, as quoted. The rest: databases.
    Sheet("4090", "NVIDIA GeForce RTX 4090", 128, 2.52, 165.2, 330.3, 1008, 450, SM89.name),
    # NVIDIA's page of the DGX B200, as quoted: rates. Driver: SMs, the clock, and the bandwidth, by width and clock of
    # the memory; NVIDIA says 8,000. Power: a system in MLPerf's results. No document has the rate of mma.sync: it is
    # taken to do 1024 products of an SM in a cycle, since an owner of a B300 measured 1001 of them.
    Sheet("B200", "NVIDIA B200", 148, 1.965, 2250, 4500, 7672, 1000, SM100.name, (596, 596)),
    # Data sheet of the HGX B300, as quoted in NVIDIA/cosmos-framework#114: rates, and the driver's name. The rest:
    # driver. NVIDIA's "Inside NVIDIA Blackwell Ultra" has 160 SMs of the whole chip, and 8,000 GB/s.
    Sheet("B300", "NVIDIA B300 SXM6 AC", 148, 2.032, 2250, 4500, 7672, 1100, SM103.name, (616, 616)),
    # Databases; no document was found with the rates, which are those of 256 and 512 products of an SM in a cycle. With
    # scales in the instruction FP8 has twice the rate, as owners of other GeForce cards measured
    # (flashinfer-ai/flashinfer#3628).
    Sheet("5090", "NVIDIA GeForce RTX 5090", 170, 2.407, 209.5, 419, 1792, 575, SM120.name, (209.5, 838)),
    # "NVIDIA RTX Blackwell PRO GPU Architecture", as quoted in NVIDIA/cudnn-frontend#597: the rate of 16-bit operands,
    # from which the clock follows. SMs and power: driver. FP8 has twice that rate by no source. Bandwidth: databases.
    Sheet("RTX PRO 6000", _PRO_6000, 188, 2.617, 503.8, 1007.6, 1792, 600, SM120.name),
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
