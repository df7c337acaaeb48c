"""Dense BF16 and FP16 GEMM for Hopper with operands swapped and large tiles: rows of B are the rows (M) of wgmma.

A tile's height is a multiple of eight rows of A, and its width 64, 128, 192 or 256 rows of B. Without swapped operands
it is the other way round. With both kinds of tiles more products fill the SMs evenly.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from ..arch import SM90, ArchSpec
from ..jit.driver.launch import LaunchShape, Map
from ..params import HalfConfig, HalfParams, HalfTurnedConfig, KernelParams
from ..spec import GemmSpec, Spec
from .base import Argument, Strides, Value
from .gemm_features import Counts
from .half_choice import drifts, padded, turns
from .sm90_half_gemm import CLUSTERS, CONSUMERS, Sm90HalfGemm, make
from .tiles import left

Cluster = tuple[int, int, int]

_SIXTEENS_64 = (64, 80, 96, 112, 128)
_HEIGHTS_128 = (72, 80, 88, 96, *range(112, 177, 8), *range(192, 225, 8), 240, 256)
_HEIGHTS_192 = (96, 112, 128, *range(144, 193, 8))
_HEIGHTS_256 = (96, *range(112, 193, 8))
_SIXTEENS = (96, 112, 128, 144, 160, 176, 192)

TILES: dict[int, dict[Cluster, Sequence[int]]] = {
    64: {(1, 1, 1): _SIXTEENS_64, (1, 4, 1): (64, 96, 128), (2, 2, 1): _SIXTEENS_64, (4, 1, 1): _SIXTEENS_64},
    128: {
        (1, 1, 1): _HEIGHTS_128,
        (1, 2, 1): range(80, 257, 16),
        (2, 1, 1): _HEIGHTS_128,
        (1, 4, 1): (64, 96, 128, 160, 192),
        (2, 2, 1): (*_SIXTEENS_64, 160, 192),
        (4, 1, 1): (*_SIXTEENS_64, 160, 192),
    },
    192: {
        (1, 1, 1): _HEIGHTS_192,
        (1, 2, 1): _SIXTEENS,
        (2, 1, 1): _HEIGHTS_192,
        (1, 4, 1): (160, 192),
        (2, 2, 1): (160, 192),
        (4, 1, 1): (160, 192),
    },
    256: {(1, 1, 1): _HEIGHTS_256, (1, 2, 1): _SIXTEENS, (2, 1, 1): _HEIGHTS_256},
}
"""The serving set: heights (block_m) by width (block_n) and cluster. All were measured on 313 shapes (H100). The more
there are, the better are the choices for shapes that were not looked at: docs/measurements/bf16.md."""

COMMON: set[tuple[int, int, Cluster]] = {
    (80, 64, (1, 1, 1)),
    (80, 128, (1, 1, 1)),
    (88, 128, (1, 1, 1)),
    (96, 64, (1, 4, 1)),
    (96, 128, (1, 2, 1)),
    (112, 128, (2, 2, 1)),
    (120, 128, (1, 1, 1)),
    (128, 64, (1, 4, 1)),
    (128, 128, (1, 1, 1)),
    (128, 128, (2, 2, 1)),
    (136, 128, (1, 1, 1)),
    (136, 256, (2, 1, 1)),
    (144, 128, (1, 2, 1)),
    (144, 192, (1, 1, 1)),
    (144, 256, (2, 1, 1)),
    (152, 192, (2, 1, 1)),
    (160, 128, (1, 1, 1)),
    (160, 256, (1, 1, 1)),
    (176, 256, (2, 1, 1)),
    (192, 128, (1, 1, 1)),
    (192, 128, (1, 2, 1)),
    (192, 192, (2, 1, 1)),
    (200, 128, (1, 1, 1)),
    (208, 128, (1, 1, 1)),
    (224, 128, (1, 2, 1)),
    (240, 128, (1, 2, 1)),
    (256, 128, (1, 1, 1)),
    (256, 128, (1, 2, 1)),
}
"""(block_m, block_n, cluster) of tiles that are chosen without a handicap, as ``benchmarks/crossed.py`` finds
them."""

HANDICAP = 1.03
"""By how much the times of all other tiles count longer. With it Llama 3 needs 64 to 71 kernels for every M up to
16384, and with 1.05 55 to 59. But for shapes that were left out, choices with 1.05 are 0.2% worse."""

TURNED_ELEMENT = 1.5
"""The cost of an element of D that is transposed, in elements that are not. With it the choices over those shapes lose
0.2% less."""


class Sm90HalfTurned(Sm90HalfGemm):
    """The kernel without swapped operands, whose consumers take the operands in the other order and transpose D."""

    name = "sm90_half_turned"
    config_class = HalfTurnedConfig
    label = "turned "
    swapped = True
    columns = 8
    most_consumers = 3

    @property
    def template(self) -> str:
        """The template of the kernel without swapped operands."""
        return "sm90_half_gemm.cu.jinja"

    def worthwhile(self, spec: Spec, config: HalfConfig) -> bool:
        """Whether less than half of the tile is padding. Few rows of A have a kernel of their own."""
        if not isinstance(spec, GemmSpec) or not turns(spec):
            return False
        return not padded(spec.m, config) and not drifts(spec, config)

    def refuses(self, spec: Spec) -> str | None:
        """It only writes 16-bit products by TMA."""
        if (reason := super().refuses(spec)) or not isinstance(spec, GemmSpec):
            return reason
        if spec.d.dtype != spec.a.dtype or spec.accumulate != "none":
            return "it writes the operands' dtype and adds no C"
        return None if spec.d.aligned else "rows of D must begin on 16-byte boundaries"

    def configs(self, arch: ArchSpec) -> Iterator[HalfConfig]:
        """`TILES`, with as many stages as fit."""
        chosen = (
            (height, width, cluster)
            for width, clusters in TILES.items()
            for cluster, heights in clusters.items()
            for height in heights
        )
        return self.legal_of((make_config(*tile, arch=arch) for tile in chosen), arch)

    def handicap(self, config: HalfConfig) -> float:
        """`HANDICAP`, except for tiles of `COMMON`."""
        c = config
        tile = (c.block_m, c.block_n, (c.cluster_m, c.cluster_n, c.cluster_k))
        return 1.0 if tile in COMMON else HANDICAP

    def legal(self, arch: ArchSpec) -> Iterator[HalfConfig]:
        """Tiles of 64 to 256 rows of A and of B, alone or in clusters of two or four."""
        choices = itertools.product(range(64, 257, 8), CONSUMERS, CLUSTERS)
        return self.legal_of((make_config(*chosen, arch=arch) for chosen in choices), arch)

    def illegal(self, config: HalfConfig, arch: ArchSpec) -> str | None:
        """Also refuses to split K."""
        if config.cluster_k > 1:
            return f"K cannot be split over {config.cluster_k} CTAs"
        return super().illegal(config, arch)

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        """Also the map of D for the last rows of a tile."""
        return (*super().arguments(params), Argument("map_d_last", "TensorMap"))

    def values(
        self, params: KernelParams, spec: Spec, strides: Strides, pdl: bool, constant: bool
    ) -> tuple[LaunchShape, Mapping[str, Value]]:
        """See `HalfKernel.values`. The boxes of D have 64 rows of a tile, and the last one those that are left."""
        shape, values = super().values(params, spec, strides, pdl, constant)
        p, config = self.of(params)
        assert isinstance(spec, GemmSpec)  # checked above
        last = self.output_map(p, spec, strides["d"][0], left(config.block_m, 64))
        return shape, {**values, "map_d_last": Map(last, "d") if last else None}

    def counts(self, config: HalfConfig, output: str, aligned: bool) -> Counts:
        """Each element of D costs more."""
        return super().counts(config, output, aligned)._replace(element=TURNED_ELEMENT)

    def cases(self) -> list[KernelParams]:
        """The serving set; each layout and dtype, with short and whole parts of a tile, and clusters."""
        varied = [
            make_params(make_config(128, 128), majors="mm"),
            make_params(make_config(200, 128), majors="km"),
            make_params(make_config(128, 256, (1, 2, 1)), majors="km"),
            make_params(make_config(192, 128), majors="mk"),
            make_params(make_config(72, 64), dtype="f16", output="f16"),
            make_params(make_config(136, 192), majors="km"),
            make_params(make_config(128, 128, (2, 2, 1)), majors="mm"),
            make_params(make_config(256, 128, (1, 2, 1)), majors="mk"),
            make_params(make_config(128, 256, (2, 1, 1)), majors="km"),
            make_params(make_config(176, 192, (2, 1, 1)), shape=(0, 2112, 7168)),
        ]
        return [*(make_params(config) for config in self.configs(SM90)), *varied]


def make_config(
    block_m: int, block_n: int, cluster: tuple[int, int, int] = (1, 1, 1), arch: ArchSpec = SM90
) -> HalfTurnedConfig:
    """A config with as many stages as fit into shared memory beside the staging buffers."""
    return make(HalfTurnedConfig, block_m, block_n, cluster, 1, arch)


def make_params(config: HalfConfig, **options: object) -> HalfParams:
    """The identity of this kernel with ``config``. Defaults of ``options``: bf16, K-major operands."""
    return HalfParams(kernel=KERNEL.name, arch=SM90.name, config=config, **{"store": "tma", **options})  # type: ignore[arg-type]


KERNEL = Sm90HalfTurned()
