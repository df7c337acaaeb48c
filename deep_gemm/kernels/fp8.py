"""The base of the FP8 families with 1x128 and 128x128 scales: the specs they accept, their constants, their launch."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TypeVar

from ..errors import InvalidInputError
from ..jit.binary import PostPass
from ..jit.driver.launch import LaunchShape, Map
from ..jit.driver.tensor_map import TensorMapSpec
from ..params import FP8Config, KernelParams
from ..settings import settings
from ..spec import SCALE_BLOCK, GemmSpec, Operand, Spec, align, ceil_div
from . import ffma_bursts, gemm_features
from .base import Argument, GemmKernel, Strides, Value
from .features import Features
from .gemm_features import Counts
from .loads import early_stages, evict_first, l2_promotion, operand_maps
from .raster import raster
from .tiles import first_column, last_rows, left, segments

FP8ConfigT = TypeVar("FP8ConfigT", bound=FP8Config)


class FP8Kernel(GemmKernel[FP8ConfigT]):
    """A dense E4M3 GEMM with block scales, promotion after every 128 of K, and bf16 output."""

    mma_instruction = "QGMMA"

    scalings: tuple[str, str] = ("1x128", "128x128")
    """Those of A and of B."""

    scale_arguments: tuple[Argument, ...] = (
        Argument("scale_b", "const float*", operand="sfb"),
        Argument("scale_b_stride_n", "i64"),
        Argument("scale_b_stride_k", "i64"),
    )
    """The parameters of scales that threads read."""

    scale_maps: tuple[Argument, ...] = (
        Argument("map_scale_a", "TensorMap"),
        Argument("map_scale_a_last", "TensorMap"),
    )
    """Those of scales that TMA loads: the map, and that of the edge box."""

    def refuses(self, spec: Spec) -> str | None:
        """Refuses every spec except a single product of E4M3 with `scalings` and bf16 output."""
        if not isinstance(spec, GemmSpec):
            return "it multiplies matrices"
        for name, operand, scaling in zip("AB", (spec.a, spec.b), self.scalings, strict=True):
            if (operand.dtype, operand.major, operand.scaling) != ("e4m3", "k", scaling):
                return f"{name} must be K-major e4m3 with {scaling} scales, not {_words(operand)}"
            if not operand.aligned:
                return f"the address and the row stride of {name} must be multiples of 16 bytes for TMA"
        if (spec.d.dtype, spec.d.major, spec.d.scaling) != ("bf16", "mn", "none"):
            return f"D must be row-major (MN-major) bf16 without scales, not {_words(spec.d)}"
        if spec.batch != 1 or spec.grouping != "none":
            return "it computes one product, without batch or groups"
        if spec.accumulate != "none" or spec.epilogue != "none":
            return "it writes the product as it is, without C or an epilogue"
        return None

    def post_pass(self, params: KernelParams | None = None) -> PostPass | None:
        """FFMA bursts in promotion, unless DG_FFMA_BURSTS is off."""
        return ffma_bursts.POST_PASS if settings.ffma_bursts else None

    @property
    def has_output_map(self) -> bool:
        """Whether the kernel has a parameter for a tensor map of D."""
        return True

    @abstractmethod
    def registers(self, config: FP8ConfigT) -> tuple[int, int]:
        """(producer, consumer) registers a thread, for setmaxnreg."""

    @abstractmethod
    def mma_n(self, config: FP8ConfigT) -> int:
        """Columns of one wgmma."""

    @abstractmethod
    def counts(self, config: FP8ConfigT, aligned: bool) -> Counts:
        """The performance model's counts for ``config``. ``aligned``: TMA can store D."""

    def features(self, spec: Spec, config: FP8ConfigT) -> Features:
        """See ``gemm_features.py``."""
        if not isinstance(spec, GemmSpec):
            raise TypeError(f"{self.name} multiplies matrices, but it was asked for {spec}")
        return gemm_features.features(self._counts(config, spec.d.aligned), spec, config)

    @functools.cache  # noqa: B019 - one instance for the life of the process
    def _counts(self, config: FP8ConfigT, aligned: bool) -> Counts:
        return self.counts(config, aligned)

    @abstractmethod
    def num_ctas(self, config: FP8ConfigT, m: int, n: int, num_sms: int) -> int:
        """Grid size."""

    @abstractmethod
    def stores_by_tma(self, params: KernelParams) -> bool:
        """Whether TMA stores tiles to D, instead of the warps that staged or multiplied them."""

    def constants(self, params: KernelParams) -> dict[str, str | int | bool]:
        """Constants that both templates have: the tile, the registers, and the wgmma."""
        config = self.config(params)
        producer, consumer = self.registers(config)
        return {
            "block_m": config.block_m,
            "num_stages": config.num_stages,
            "num_consumers": config.num_consumers,
            "num_threads": config.num_threads,
            "cluster_k": config.cluster_k,
            "producer_registers": producer,
            "consumer_registers": consumer,
            **{f"shape_{letter}": size for letter, size in zip("mnk", params.shape, strict=True)},
            "tma_store": params.store == "tma",
            "mma_n": self.mma_n(config),
            "mma_types": "k32.f32.e4m3.e4m3",
            "mma_majors": "",
            "step_a": "kStepKMajor",
            "step_b": "kStepKMajor",
            "shared_bytes": self.shared_bytes(params),
            "arguments": self.struct(params),
            "argument_fields": self.struct_fields(params),
        }

    def config(self, params: KernelParams) -> FP8ConfigT:
        """The config of ``params``; TypeError if it is another family's."""
        if not isinstance(params.config, self.config_class):
            raise TypeError(f"{self.name} takes a {self.config_class.__name__}, not {type(params.config).__name__}")
        return params.config

    def entry_name(self, params: KernelParams, *parts: str) -> str:
        """The kernel's name, composed of ``parts``. Compiled dimensions come last, such as ``n2112``."""
        sizes = [f"{letter}{size}" for letter, size in zip("mnk", params.shape, strict=True) if size]
        return "_".join([*filter(None, parts), params.store, *sizes])

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        """Parameters in the order of first use: those of the prologue share a line of the constant cache, and each line
        takes 110 cycles. B has a tensor map for each segment of a tile's columns (see ``columns.cuh``). Each operand
        also has a map of edge boxes (see ``edge_boxes.cuh``), which have ``last_rows`` and ``last_columns`` rows.
        ``early_stages`` stages of B are loaded before the previous kernel has ended; 0 means that it may still write B
        and its scales. ``evict_first`` is a set of bits (see ``tma.cuh``)."""
        map_d = [Argument("map_d", "TensorMap")] if self.has_output_map else []
        more = [
            Argument(f"map_b_{index}", "TensorMap", field=f"map_b[{index}]")
            for index in range(1, len(segments(self.config(params).block_n)))
        ]
        return (
            *(Argument(name, "u32") for name in ("m", "n", "k", "last_rows", "last_columns", "early_stages")),
            Argument("raster", "Raster"),
            Argument("evict_first", "u32"),
            *self.scale_arguments,
            Argument("d", "u16*"),
            Argument("d_stride", "i64"),
            Argument("map_a", "TensorMap"),
            Argument("map_b", "TensorMap", field="map_b[0]"),
            *self.scale_maps[:1],
            *map_d,
            *(Argument(name, "TensorMap") for name in ("map_a_last", "map_b_last")),
            *self.scale_maps[1:],
            *more,
        )

    def values(
        self, params: KernelParams, spec: Spec, strides: Strides, pdl: bool, constant: bool
    ) -> tuple[LaunchShape, Mapping[str, Value]]:
        """Grid, order of tiles, and tensor maps. Operands: a, sfa (contiguous along rows), b, sfb and d."""
        if not isinstance(spec, GemmSpec):
            raise TypeError(f"{self.name} multiplies matrices, but it was asked for {spec}")
        config = self.config(params)
        m, n, k = spec.m, spec.n, spec.k
        (stride_a, _), (stride_b, _), (stride_d, _) = strides["a"], strides["b"], strides["d"]
        rows = last_rows(config, m)
        order = raster(config, m, n, k, spec.num_sms)

        def tokens(box: int) -> TensorMapSpec:
            promotion = l2_promotion(spec, stride_a)
            return TensorMapSpec("u8", (k, m), (stride_a,), (SCALE_BLOCK, box), 128, promotion)

        def weights(box: int) -> TensorMapSpec:
            promotion = l2_promotion(spec, stride_b)
            return TensorMapSpec("u8", (k, n), (stride_b,), (SCALE_BLOCK, box), 128, promotion)

        map_a, map_a_last = operand_maps(tokens, "a", m, config.block_m // config.cluster_n, rows)
        maps_b, map_b_last, columns = _weights_maps(weights, n, config)
        shape = LaunchShape(
            grid=(self.num_ctas(config, m, n, spec.num_sms), 1, 1),
            block=config.num_threads,
            dynamic_shared=self.shared_bytes(params),
            cluster=(config.cluster_size, 1, 1),
            pdl=pdl,
        )
        return shape, {
            "m": m,
            "n": n,
            "k": k,
            "last_rows": rows,
            "last_columns": columns,
            "early_stages": early_stages(config, m, k) if constant and pdl else 0,
            "raster": list(order.arguments),
            "evict_first": evict_first(spec, order, k, large_d=self.stores_by_tma(params)),
            "d_stride": stride_d,
            "map_a": map_a,
            "map_b": maps_b[0],
            "map_d": self.output_map(params, spec, stride_d),
            "map_a_last": map_a_last,
            "map_b_last": map_b_last,
            **self.scale_values(config, spec, strides),
            **{f"map_b_{index}": each for index, each in enumerate(maps_b[1:], 1)},
        }

    def scale_values(self, config: FP8ConfigT, spec: GemmSpec, strides: Strides) -> dict[str, Value]:
        """The values of `scale_arguments` and `scale_maps`, without pointers."""

        def scales(box: int) -> TensorMapSpec:
            return TensorMapSpec("f32", (spec.m, ceil_div(spec.k, SCALE_BLOCK)), (strides["sfa"][1] * 4,), (box, 1))

        map_a, map_a_last = operand_maps(scales, "sfa", spec.m, config.block_m, last_rows(config, spec.m))
        stride_n, stride_k = strides["sfb"]
        return {
            "scale_b_stride_n": stride_n,
            "scale_b_stride_k": stride_k,
            "map_scale_a": map_a,
            "map_scale_a_last": map_a_last,
        }

    def output_map(self, params: KernelParams, spec: GemmSpec, stride_d: int) -> Value:
        """The tensor map of D, or an unused value for kernels without a parameter for it."""
        return None


def _words(operand: Operand) -> str:
    major = "K-major" if operand.major == "k" else "MN-major"
    scales = "without scales" if operand.scaling == "none" else f"with {operand.scaling} scales"
    return f"{major} {operand.dtype} {scales}"


def turns(config: FP8Config) -> int:
    """The number of consumers that start products in turn, or 1 if they do not. Without turns all consumers promote at
    the same time, and the tensor cores idle: with turns, M = N = 4096, K = 7168 took 190 instead of 215 us with 128x192
    tiles and 170.8 instead of 172.4 us with 256x128 (H200). Configs that issue products ahead became slower with
    turns."""
    return config.num_consumers if config.num_partials == config.k_splits == 1 else 1


def _weights_maps(spec: Callable[[int], TensorMapSpec], n: int, config: FP8Config) -> tuple[list[Map], Map, int]:
    """The maps of B: one for each segment of a tile's columns, and one for the edge box; and the rows of the edge box,
    or ``block_n`` if no box crosses the edge."""
    widths = segments(config.block_n)
    tiles = align(ceil_div(n, config.block_n), config.cluster_n)
    boxes = [width // config.cluster_m for width in widths]
    begins = [first_column(config.block_n, segment, 0, tiles) for segment in range(len(widths))]
    edge = max(segment for segment, begin in enumerate(begins) if begin < n)
    rest = left(n - begins[edge], boxes[edge])
    ending = Map(spec(rest), "b")
    maps = [
        ending if rest == box or begin + box > n else Map(spec(box), "b")
        for begin, box in zip(begins, boxes, strict=True)
    ]
    return maps, ending, rest if rest < boxes[edge] else config.block_n


def check_whole_pieces(params: KernelParams, n: int) -> None:
    """Refuse copies of eight columns at a time where N is not a multiple of eight. Raises InvalidInputError."""
    if params.store == "tma" and n % 8:
        raise InvalidInputError(
            "A config whose CTAs have one tile each copies eight columns of D at a time, so that N must be a "
            f"multiple of 8, but N is {n}. Use the same config with persistent=True."
        )
