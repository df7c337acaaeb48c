"""What the FP8 kernels with any scaling have in common: 1x128 scales on both sides (1D1D), 1x128 by 128x128 (1D2D), or
one for each row of A and of B (rowwise); 16-bit or float32 out, C added."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from ..arch import ArchSpec
from ..jit.binary import PostPass
from ..jit.driver.launch import LaunchShape, Map
from ..jit.driver.tensor_map import TensorMapSpec
from ..params import GemmConfig, KernelParams, ScaledParams
from ..settings import settings
from ..spec import SCALE_BLOCK, GemmSpec, Spec, ceil_div
from . import ffma_bursts
from .base import Argument, GemmKernel, Strides, Value
from .features import Features
from .gemm_features import PROMOTION_CYCLES, Counts
from .gemm_features import features as count
from .loads import early_stages, evict_first, l2_promotion, operand_maps
from .raster import raster
from .tiles import left

ScaledConfigT = TypeVar("ScaledConfigT", bound=GemmConfig)

SCALINGS = {("1x128", "1x128"): "1d1d", ("1x128", "128x128"): "1d2d", ("row", "row"): "rowwise"}
"""The name of each supported pair of scalings, those of A and of B."""

BYTES = {"bf16": 2, "f16": 2, "f32": 4}

_KINDS = {"1d1d": "k1D1D", "1d2d": "k1D2D", "rowwise": "kRowwise"}
_ELEMENTS = {"bf16": "kBf16", "f16": "kF16", "f32": "kF32"}
_ACCUMULATE = {"none": "kNothing", "reads": "kReads", "reduces": "kReduces"}

PROMOTION = {"1d1d": 2 * PROMOTION_CYCLES, "1d2d": PROMOTION_CYCLES, "rowwise": PROMOTION_CYCLES}
"""Cycles in which a consumer promotes one column of an m64 slice. With 1D1D each element is multiplied twice."""

BUSY = {1: 0.94, 2: 1.4}
"""With 1D1D: cycles for each column of an m64 slice in which shared memory delivers scales of B to registers, and not
operands to the tensor cores; by the sets of partial sums. On 32 SMs of an H200, where power does not limit, 128x128
blocks took 630 cycles when promotion read nothing, 870 with one set, and 912 with two. On all SMs two sets are slower
still; this number is about the least with which the model chooses what was fastest, on an H200 and on an H100."""


class ScaledKernel(GemmKernel[ScaledConfigT]):
    """A dense E4M3 GEMM with any scaling."""

    mma_instruction = "QGMMA"

    def post_pass(self, params: KernelParams | None = None) -> PostPass | None:
        """FFMA bursts in promotion with 1D2D, unless DG_FFMA_BURSTS is off. The others have no runs of one factor."""
        runs = params is None or self.of(params)[0].scaling == "1d2d"
        return ffma_bursts.POST_PASS if runs and settings.ffma_bursts else None

    def refuses(self, spec: Spec) -> str | None:
        """Refuses all but products of scaled E4M3, and 1D2D with bf16 output and no C, which other families compute."""
        if not isinstance(spec, GemmSpec):
            return "it multiplies matrices"
        for name, operand in (("A", spec.a), ("B", spec.b)):
            if (operand.dtype, operand.major) != ("e4m3", "k"):
                return f"{name} must be K-major e4m3, not {operand.major}-major {operand.dtype}"
            if not operand.aligned:
                return f"the address and the row stride of {name} must be multiples of 16 bytes for TMA"
        if (spec.a.scaling, spec.b.scaling) not in SCALINGS:
            known = ", ".join(" and ".join(pair) for pair in SCALINGS)
            return f"scales of A and B must be {known}, not {spec.a.scaling} and {spec.b.scaling}"
        if spec.d.dtype not in _ELEMENTS or (spec.d.major, spec.d.scaling) != ("mn", "none"):
            return f"D must be row-major bf16, f16 or f32, not {spec.d.major}-major {spec.d.dtype}"
        if spec.batch != 1:
            return "it computes no batch of products"
        if spec.epilogue != "none":
            return "it writes the product as it is, or with C added"
        return self.refuses_groups(spec)

    def refuses_groups(self, spec: GemmSpec) -> str | None:
        """Why it cannot compute these groups, as a sentence, or None if it can."""
        if spec.grouping != "none":
            return "it computes one product, without groups"
        if scaling_of(spec) == "1d2d" and spec.d.dtype == "bf16" and spec.accumulate == "none":
            return "1D2D with bf16 output and without C has kernels of its own"
        return None

    def params(self, spec: Spec, config: ScaledConfigT, arch: ArchSpec) -> ScaledParams:
        """See `Kernel.params`. Adds the scaling, the output, and how C is added."""
        known = super().params(spec, config, arch)
        assert isinstance(spec, GemmSpec)  # checked above
        return ScaledParams(
            **{field.name: getattr(known, field.name) for field in fields(KernelParams)},
            scaling=scaling_of(spec),
            output=spec.d.dtype,
            accumulate=self.adds(spec),
        )

    def adds(self, spec: GemmSpec) -> str:
        """How C is added."""
        return "none" if spec.accumulate == "none" else "reads"

    def of(self, params: KernelParams) -> tuple[ScaledParams, ScaledConfigT]:
        """``params`` and their config with this family's types. Raises TypeError if they belong to another family."""
        if not isinstance(params, ScaledParams) or not isinstance(params.config, self.config_class):
            got = f"{type(params).__name__} with a {type(params.config).__name__}"
            raise TypeError(f"{self.name} takes ScaledParams with a {self.config_class.__name__}, not {got}")
        return params, params.config

    @abstractmethod
    def registers(self, config: ScaledConfigT) -> tuple[int, int]:
        """(producer, consumer) registers a thread, for setmaxnreg."""

    @abstractmethod
    def mma_n(self, config: ScaledConfigT) -> int:
        """Columns of one wgmma."""

    @abstractmethod
    def num_ctas(self, config: ScaledConfigT, m: int, n: int, num_sms: int) -> int:
        """Grid size."""

    @abstractmethod
    def counts(self, config: ScaledConfigT, aligned: bool, scaling: str) -> Counts:
        """The performance model's counts for ``config``. ``aligned``: TMA can store D."""

    def has_output_map(self, params: ScaledParams) -> bool:
        """Whether TMA stores D."""
        return False

    def output_map(self, params: ScaledParams, spec: GemmSpec, stride_d: int) -> Map:
        """The tensor map of D, for kernels that store tiles by TMA."""
        raise NotImplementedError(f"{self.name} stores no tiles by TMA")

    def constants(self, params: KernelParams) -> dict[str, str | int | bool]:
        """Constants of both templates."""
        p, c = self.of(params)
        producer, consumer = self.registers(c)
        return {
            "block_m": c.block_m,
            "num_stages": c.num_stages,
            "num_consumers": c.num_consumers,
            "num_threads": c.num_threads,
            "producer_registers": producer,
            "consumer_registers": consumer,
            **{f"shape_{letter}": size for letter, size in zip("mnk", p.shape, strict=True)},
            "scaling": _KINDS[p.scaling],
            "element": _ELEMENTS[p.output],
            "accumulate": _ACCUMULATE[p.accumulate],
            "tma_store": p.store == "tma",
            "mma_n": self.mma_n(c),
            "mma_types": "k32.f32.e4m3.e4m3",
            "mma_majors": "",
            "step_a": "kStepKMajor",
            "step_b": "kStepKMajor",
            "shared_bytes": self.shared_bytes(params),
            "arguments": self.struct(params),
            "argument_fields": self.struct_fields(params),
        }

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        """The arguments of the other FP8 kernels (see ``fp8.py``), with other parameters for scales. TMA loads scales
        of 1 x 128. Threads read all others, with a stride of zero where all rows share one scale."""
        p, _ = self.of(params)
        reads = [Argument("c", "const u8*"), Argument("c_stride", "i64")] if p.accumulate == "reads" else []
        scales = {
            "1d1d": [Argument("map_scale_a", "TensorMap"), Argument("map_scale_b", "TensorMap")],
            "1d2d": [
                Argument("scale_b", "const float*", operand="sfb"),
                Argument("scale_b_stride_n", "i64"),
                Argument("scale_b_stride_k", "i64"),
                Argument("map_scale_a", "TensorMap"),
            ],
            "rowwise": [
                Argument("scale_a", "const float*", operand="sfa"),
                Argument("scale_a_stride", "i64"),
                Argument("scale_b", "const float*", operand="sfb"),
                Argument("scale_b_stride", "i64"),
            ],
        }[p.scaling]
        return (
            *(Argument(name, "u32") for name in ("m", "n", "k", "last_rows", "last_columns", "early_stages")),
            Argument("raster", "Raster"),
            Argument("evict_first", "u32"),
            Argument("d", "u8*"),
            Argument("d_stride", "i64"),
            *reads,
            *scales,
            Argument("map_a", "TensorMap"),
            Argument("map_b", "TensorMap"),
            *([Argument("map_d", "TensorMap")] if self.has_output_map(p) else []),
            Argument("map_a_last", "TensorMap"),
            Argument("map_b_last", "TensorMap"),
        )

    def values(
        self, params: KernelParams, spec: Spec, strides: Strides, pdl: bool, constant: bool
    ) -> tuple[LaunchShape, Mapping[str, Value]]:
        """Grid, order of tiles, and tensor maps. Operands: a, sfa, b, sfb, d, and c if consumers read it. Scales of 1 x
        128 are (rows, blocks of K) with contiguous rows; scales of rows have one stride."""
        if not isinstance(spec, GemmSpec):
            raise TypeError(f"{self.name} multiplies matrices, but it was asked for {spec}")
        p, config = self.of(params)
        m, n, k = spec.m, spec.n, spec.k
        rows, columns = left(m, config.block_m), left(n, config.block_n)
        order = raster(config, m, n, k, spec.num_sms)

        def operand(name: str, size: int, box: int) -> TensorMapSpec:
            stride = strides[name][0]
            return TensorMapSpec("u8", (k, size), (stride,), (SCALE_BLOCK, box), 128, l2_promotion(spec, stride))

        map_a, map_a_last = operand_maps(
            functools.partial(operand, "a", m), "a", m, config.block_m // config.cluster_n, rows
        )
        map_b, map_b_last = operand_maps(
            functools.partial(operand, "b", n), "b", n, config.block_n // config.cluster_m, columns
        )
        stride_d = strides["d"][0]
        values: dict[str, Any] = {
            "m": m,
            "n": n,
            "k": k,
            "last_rows": rows,
            "last_columns": columns,
            "early_stages": early_stages(config, m, k) if constant and pdl else 0,
            "raster": list(order.arguments),
            "evict_first": evict_first(spec, order, k, large_d=self.has_output_map(p)),
            "d_stride": stride_d,
            "map_a": map_a,
            "map_b": map_b,
            "map_a_last": map_a_last,
            "map_b_last": map_b_last,
        }
        if p.accumulate == "reads":
            values["c_stride"] = strides["c"][0]
        if p.scaling != "rowwise":
            values["map_scale_a"] = _scales_map("sfa", m, k, config.block_m, strides)
        if p.scaling == "1d1d":
            values["map_scale_b"] = _scales_map("sfb", n, k, config.block_n, strides)
        elif p.scaling == "1d2d":
            values["scale_b_stride_n"], values["scale_b_stride_k"] = strides["sfb"]
        else:
            values["scale_a_stride"], values["scale_b_stride"] = strides["sfa"][0], strides["sfb"][0]
        if self.has_output_map(p):
            values["map_d"] = self.output_map(p, spec, stride_d)
        shape = LaunchShape(
            grid=(self.num_ctas(config, m, n, spec.num_sms), 1, 1),
            block=config.num_threads,
            dynamic_shared=self.shared_bytes(params),
            cluster=(config.cluster_size, 1, 1),
            pdl=pdl,
        )
        return shape, values

    def features(self, spec: Spec, config: ScaledConfigT) -> Features:
        """See ``gemm_features.py``."""
        if not isinstance(spec, GemmSpec):
            raise TypeError(f"{self.name} multiplies matrices, but it was asked for {spec}")
        return count(self.counts(config, spec.d.aligned, scaling_of(spec)), spec, config)

    def entry_name(self, params: ScaledParams, *parts: str) -> str:
        """The kernel's name, composed of scaling and output, ``parts``, the store, and compiled dimensions."""
        adds = {"none": "", "reads": "add", "reduces": "reduce"}[params.accumulate]
        sizes = [f"{letter}{size}" for letter, size in zip("mnk", params.shape, strict=True) if size]
        head = f"fp8_gemm_{params.scaling}_{params.output}"
        return "_".join([*filter(None, [head, adds, *parts]), params.store, *sizes])


def scaling_of(spec: GemmSpec) -> str:
    """The name of the spec's scaling; see `ScaledParams`."""
    return SCALINGS[spec.a.scaling, spec.b.scaling]


def _scales_map(name: str, size: int, k: int, box: int, strides: Strides) -> Map:
    """The tensor map of scales (size, blocks of K) with contiguous rows. A box has a tile's rows in one block of K."""
    shape = (size, ceil_div(k, SCALE_BLOCK))
    return Map(TensorMapSpec("f32", shape, (strides[name][1] * 4,), (box, 1)), name)
