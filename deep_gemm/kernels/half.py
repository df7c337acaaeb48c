"""The base of the kernels for 16-bit operands: BF16 or FP16 in, the same or float32 out, C added."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from ..arch import ArchSpec
from ..jit.driver.launch import LaunchShape, Map
from ..jit.driver.tensor_map import TensorMapSpec
from ..params import GemmConfig, HalfParams, KernelParams
from ..spec import GemmSpec, Operand, Spec, ceil_div
from .base import Argument, GemmKernel, Strides, Value
from .features import Features
from .gemm_features import Counts
from .gemm_features import features as count
from .half_choice import turns
from .loads import BARRIER_BYTES, early_stages, evict_first, l2_promotion, operand_maps
from .raster import raster
from .tiles import left

HalfConfigT = TypeVar("HalfConfigT", bound=GemmConfig)

BLOCK_K = 64
"""Elements of K in a stage: rows of 128 bytes, the widest swizzle of shared memory."""

BYTES = {"bf16": 2, "f16": 2, "f32": 4}

_ELEMENTS = {"bf16": "kBf16", "f16": "kF16", "f32": "kF32"}
_ACCUMULATE = {"none": "kNothing", "reads": "kReads", "reduces": "kReduces"}
_MMA_TYPES = {"bf16": "k16.f32.bf16.bf16", "f16": "k16.f32.f16.f16"}

_LAYOUTS = {"kk": "nt", "km": "nn", "mm": "tn", "mk": "tt"}
"""The BLAS names of the operands' majors."""


class HalfKernel(GemmKernel[HalfConfigT]):
    """A dense GEMM of BF16 or FP16 operands, K-major or MN-major."""

    mma_instruction = "HGMMA"

    def refuses(self, spec: Spec) -> str | None:
        """Refuses every spec except a single product of 16-bit operands."""
        if not isinstance(spec, GemmSpec):
            return "it multiplies matrices"
        if spec.a.dtype not in _MMA_TYPES or spec.b.dtype != spec.a.dtype:
            return f"A and B must both be bf16 or both f16, not {spec.a.dtype} and {spec.b.dtype}"
        for name, operand in (("A", spec.a), ("B", spec.b)):
            if operand.scaling != "none":
                return f"{name} has {operand.scaling} scales, and it applies none"
            if not operand.aligned:
                return f"the address and the row stride of {name} must be multiples of 16 bytes for TMA"
        if spec.d.dtype not in (spec.a.dtype, "f32") or (spec.d.major, spec.d.scaling) != ("mn", "none"):
            return f"D must be row-major {spec.a.dtype} or f32, not {spec.d.major}-major {spec.d.dtype}"
        if spec.batch != 1:
            return "it computes no batch of products"
        if why := self.refuses_groups(spec):
            return why
        if spec.epilogue != "none":
            return "it writes the product as it is, or with C added"
        return self.refuses_majors(spec.a, spec.b)

    def refuses_groups(self, spec: GemmSpec) -> str | None:
        """Why it cannot compute these groups, as a sentence, or None if it can."""
        return None if spec.grouping == "none" else "it computes one product, without groups"

    def refuses_majors(self, a: Operand, b: Operand) -> str | None:
        """Why it cannot read operands with these majors, as a sentence, or None if it can."""
        return None

    def runs(self, spec: Spec, config: HalfConfigT) -> bool:
        """Each part of split K needs at least one block."""
        if not super().runs(spec, config) or not isinstance(spec, GemmSpec):
            return False
        return config.k_splits <= ceil_div(spec.k, BLOCK_K)

    @abstractmethod
    def registers(self, config: HalfConfigT) -> tuple[int, int]:
        """(producer, consumer) registers a thread, for setmaxnreg."""

    @abstractmethod
    def mma_n(self, config: HalfConfigT) -> int:
        """Columns of one wgmma."""

    @abstractmethod
    def num_ctas(self, config: HalfConfigT, m: int, n: int, num_sms: int) -> int:
        """Grid size."""

    @abstractmethod
    def counts(self, config: HalfConfigT, output: str, aligned: bool) -> Counts:
        """The performance model's counts for ``config`` and the dtype of D. ``aligned``: TMA can store D."""

    def output_map(self, params: HalfParams, spec: GemmSpec, stride_d: int) -> TensorMapSpec | None:
        """The tensor map of D; None for kernels without a parameter for it."""
        return None

    def accumulates(self, spec: GemmSpec) -> str:
        """How C is added: see `HalfParams`."""
        return "none" if spec.accumulate == "none" else "reads"

    def params(self, spec: Spec, config: HalfConfigT, arch: ArchSpec) -> HalfParams:
        """See `Kernel.params`. Adds the operands' types and majors."""
        known = super().params(spec, config, arch)
        assert isinstance(spec, GemmSpec)  # checked above
        return HalfParams(
            **{field.name: getattr(known, field.name) for field in fields(KernelParams)},
            dtype=spec.a.dtype,
            majors=letter(spec.a) + letter(spec.b),
            output=spec.d.dtype,
            accumulate=self.accumulates(spec),
        )

    def of(self, params: KernelParams) -> tuple[HalfParams, HalfConfigT]:
        """``params`` and their config with this family's types. Raises TypeError if they belong to another family."""
        if not isinstance(params, HalfParams) or not isinstance(params.config, self.config_class):
            got = f"{type(params).__name__} with a {type(params.config).__name__}"
            raise TypeError(f"{self.name} takes HalfParams with a {self.config_class.__name__}, not {got}")
        return params, params.config

    def speeds(self, spec: Spec) -> str:
        """Products that can be computed with operands swapped and large tiles have speeds of their own: with those
        of FP8 the choices there are 1.5% worse."""
        return "of 16-bit tiles" if isinstance(spec, GemmSpec) and turns(spec) else ""

    def features(self, spec: Spec, config: HalfConfigT) -> Features:
        """As for the FP8 kernels with K twice as long: the bytes and the blocks are the same. There is no promotion."""
        if not isinstance(spec, GemmSpec):
            raise TypeError(f"{self.name} multiplies matrices, but it was asked for {spec}")
        return count(self._counts(config, spec.d.dtype, spec.d.aligned), spec, config, element_bytes=2)

    @functools.cache  # noqa: B019 - one instance for the life of the process
    def _counts(self, config: HalfConfigT, output: str, aligned: bool) -> Counts:
        return self.counts(config, output, aligned)

    def constants(self, params: KernelParams) -> dict[str, str | int | bool]:
        """Constants that both templates have."""
        p, config = self.of(params)
        producer, consumer = self.registers(config)
        return {
            "block_m": config.block_m,
            "num_stages": config.num_stages,
            "num_consumers": config.num_consumers,
            "num_threads": config.num_threads,
            "cluster_k": config.cluster_k,
            "producer_registers": producer,
            "consumer_registers": consumer,
            **{f"shape_{name}": size for name, size in zip("mnk", p.shape, strict=True)},
            "tma_store": p.store == "tma",
            "mn_major_b": p.majors[1] == "m",
            "element": _ELEMENTS[p.output],
            "accumulate": _ACCUMULATE[p.accumulate],
            "mma_n": self.mma_n(config),
            "mma_types": _MMA_TYPES[p.dtype],
            "shared_bytes": self.shared_bytes(params),
            "arguments": self.struct(params),
            "argument_fields": self.struct_fields(params),
        }

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        """Parameters in the order of first use: those of the prologue share a line of the constant cache, and each line
        takes 110 cycles. They are those of the FP8 kernels (see ``fp8.py``) without scales. MN-major operands have no
        edge boxes, so both of their maps are the same."""
        p, _ = self.of(params)
        reads = [Argument("c", "const u8*"), Argument("c_stride", "i64")] if p.accumulate == "reads" else []
        return (
            *(Argument(name, "u32") for name in ("m", "n", "k", "last_rows", "last_columns", "early_stages")),
            Argument("raster", "Raster"),
            Argument("evict_first", "u32"),
            Argument("d", "u8*"),
            Argument("d_stride", "i64"),
            *reads,
            Argument("map_a", "TensorMap"),
            Argument("map_b", "TensorMap"),
            *([Argument("map_d", "TensorMap")] if self.has_output_map(p) else []),
            Argument("map_a_last", "TensorMap"),
            Argument("map_b_last", "TensorMap"),
        )

    def has_output_map(self, params: HalfParams) -> bool:
        """Whether the kernel has a parameter for a tensor map of D."""
        return False

    def values(
        self, params: KernelParams, spec: Spec, strides: Strides, pdl: bool, constant: bool
    ) -> tuple[LaunchShape, Mapping[str, Value]]:
        """Grid, order of tiles, and tensor maps. Operands: a, b, d, and c if consumers read it."""
        if not isinstance(spec, GemmSpec):
            raise TypeError(f"{self.name} multiplies matrices, but it was asked for {spec}")
        p, config = self.of(params)
        m, n, k = spec.m, spec.n, spec.k
        rows, columns = left(m, config.block_m), left(n, config.block_n)
        order = raster(config, m, n, 2 * k, spec.num_sms)
        map_a, map_a_last = _maps(spec, spec.a, "a", m, config.block_m // config.cluster_n, rows, strides)
        map_b, map_b_last = _maps(spec, spec.b, "b", n, config.block_n // config.cluster_m, columns, strides)
        stride_d = strides["d"][0]
        values: dict[str, Any] = {
            "m": m,
            "n": n,
            "k": k,
            "last_rows": rows,
            "last_columns": columns,
            "early_stages": early_stages(config, m, 2 * k) if constant and pdl else 0,
            "raster": list(order.arguments),
            "evict_first": evict_first(spec, order, 2 * k, large_d=self.has_output_map(p)),
            "d_stride": stride_d,
            "map_a": map_a,
            "map_b": map_b,
            "map_a_last": map_a_last,
            "map_b_last": map_b_last,
        }
        if p.accumulate == "reads":
            values["c_stride"] = strides["c"][0]
        if self.has_output_map(p):
            values["map_d"] = Map(output, "d") if (output := self.output_map(p, spec, stride_d)) else None
        shape = LaunchShape(
            grid=(self.num_ctas(config, m, n, spec.num_sms), 1, 1),
            block=config.num_threads,
            dynamic_shared=self.shared_bytes(params),
            cluster=(config.cluster_size, 1, 1),
            pdl=pdl,
        )
        return shape, values

    def entry_name(self, params: HalfParams, *parts: str) -> str:
        """The kernel's name, composed of operands and output, ``parts``, the store, and compiled dimensions."""
        output = params.output if params.output != params.dtype else ""
        adds = {"none": "", "reads": "add", "reduces": "reduce"}[params.accumulate]
        sizes = [f"{name}{size}" for name, size in zip("mnk", params.shape, strict=True) if size]
        dtype = {"bf16": "bf16", "f16": "fp16"}[params.dtype]
        head = [f"{dtype}_gemm", _LAYOUTS[params.majors], output, adds]
        return "_".join([*filter(None, [*head, *parts]), params.store, *sizes])


def letter(operand: Operand) -> str:
    """The operand's letter in `HalfParams.majors`."""
    return "k" if operand.major == "k" else "m"


def _maps(
    spec: GemmSpec, operand: Operand, name: str, size: int, box: int, last: int, strides: Strides
) -> tuple[Value, Value]:
    """The tensor maps of an operand of ``size`` rows: one of whole boxes and, if the operand is K-major, one of the
    edge box."""

    def k_major(rows: int) -> TensorMapSpec:
        stride = strides[name][0] * 2
        return TensorMapSpec(
            operand.dtype, (spec.k, size), (stride,), (BLOCK_K, rows), 128, l2_promotion(spec, stride, 2)
        )

    if operand.major == "k":
        return operand_maps(k_major, name, size, box, last)
    stride = strides[name][1] * 2
    spread = TensorMapSpec(operand.dtype, (size, spec.k), (stride,), (64, BLOCK_K), 128, l2_promotion(spec, stride, 2))
    return operand_maps(lambda _: spread, name, size, box, last)


def box_columns(finished: int, output: str) -> int:
    """Columns of one staged part of a tile: rows of 128 bytes if the width of the tile allows that."""
    widths = (32, 16) if output == "f32" else (64, 32, 16)
    return next((columns for columns in widths if finished % columns == 0), widths[-1])


def operand_bytes(rows: int) -> int:
    """Bytes of an operand's tile in one stage."""
    return rows * BLOCK_K * 2


def stages_that_fit(arch: ArchSpec, config: GemmConfig, rest: int, at_most: int) -> int:
    """The number of stages that fit beside ``rest`` bytes of shared memory, at most ``at_most``."""
    budget = min(arch.shared_per_cta, arch.shared_per_sm // config.ctas_per_sm - arch.shared_reserved_per_cta)
    stage = operand_bytes(config.block_m) + operand_bytes(config.block_n) + BARRIER_BYTES
    return max(0, min(at_most, (budget - rest) // stage))
