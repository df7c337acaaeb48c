"""Makes the tensor maps of an FP8 GEMM in groups along K, whose sizes are on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..arch import SM90, ArchSpec
from ..jit.driver.launch import LaunchShape, Map
from ..jit.driver.tensor_map import TensorMapSpec
from ..params import KernelConfig, KernelParams
from ..spec import SCALE_BLOCK, KGroupMapsSpec, Spec
from .base import Argument, Kernel, Strides, Value

BOX_ROWS = 64
"""Rows of the maps' boxes."""

_LEAST_K = 16
"""K of the maps that are copied before their K is replaced."""


@dataclass(frozen=True)
class KGroupMapsConfig(KernelConfig):
    """The config of this family: one warp makes one map."""

    num_threads: int = 32

    @property
    def tile(self) -> tuple[int, int]:
        """It writes no matrix."""
        return 1, 1


class KGroupMaps(Kernel[KGroupMapsConfig]):
    """See ``templates/include/k_group_maps.cuh``."""

    name = "k_group_maps"
    archs = (SM90.name,)
    config_class = KGroupMapsConfig

    def refuses(self, spec: Spec) -> str | None:
        """Refuses every spec except these maps."""
        return None if isinstance(spec, KGroupMapsSpec) else "it makes tensor maps of groups along K"

    def configs(self, arch: ArchSpec) -> Iterator[KGroupMapsConfig]:
        """One config."""
        yield KGroupMapsConfig()

    def illegal(self, config: KGroupMapsConfig, arch: ArchSpec) -> str | None:
        """None for the only config."""
        return None if config == KGroupMapsConfig() else f"there is one config only: {KGroupMapsConfig()}"

    def constants(self, params: KernelParams) -> Mapping[str, str | int | bool]:
        """None."""
        if not isinstance(params.config, KGroupMapsConfig):
            raise TypeError(f"{self.name} takes a KGroupMapsConfig, not {type(params.config).__name__}")
        return {}

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        """Maps of A and of B with another K; the operands; and the maps that are written: A's and B's of each group."""
        return (
            Argument("map_a", "TensorMap", operand="a"),
            Argument("map_b", "TensorMap", operand="b"),
            Argument("a", "const u8*"),
            Argument("b", "const u8*"),
            Argument("m", "u32"),
            Argument("n", "u32"),
            Argument("padded_k", "u32"),
            Argument("row_bytes_a", "u32"),
            Argument("row_bytes_b", "u32"),
            Argument("layout", "const int*"),
            Argument("maps", "TensorMap*"),
        )

    def values(
        self, params: KernelParams, spec: Spec, strides: Strides, pdl: bool, constant: bool
    ) -> tuple[LaunchShape, Mapping[str, Value]]:
        """Operands: a, b, layout (K of each group), maps. Rows of padded operands have strides."""
        if not isinstance(spec, KGroupMapsSpec):
            raise TypeError(f"{self.name} makes tensor maps, but it was asked for {spec}")

        def first(name: str, rows: int) -> Map:
            shape, box = (_LEAST_K, rows), (SCALE_BLOCK, BOX_ROWS)
            return Map(TensorMapSpec("u8", shape, (_LEAST_K,), box, 128, SCALE_BLOCK), name)

        shape = LaunchShape(grid=(2 * spec.groups, 1, 1), block=32, dynamic_shared=0, pdl=pdl)
        values: dict[str, Value] = {"map_a": first("a", spec.m), "map_b": first("b", spec.n), "m": spec.m, "n": spec.n}
        rows = {f"row_bytes_{name}": strides[name][0] if spec.padded_k else 0 for name in ("a", "b")}
        return shape, values | {"padded_k": spec.padded_k} | rows

    def shared_bytes(self, params: KernelParams) -> int:
        """None: shared memory is static."""
        return 0

    def entry(self, params: KernelParams) -> str:
        """``k_group_maps``."""
        return self.name

    def cases(self) -> list[KernelParams]:
        """The one instance."""
        return [KernelParams(kernel=self.name, arch=SM90.name, config=KGroupMapsConfig())]


KERNEL = KGroupMaps()
