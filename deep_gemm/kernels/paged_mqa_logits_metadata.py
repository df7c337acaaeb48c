"""The schedule of paged logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..arch import SM90, ArchSpec
from ..jit.driver.launch import LaunchShape
from ..params import KernelConfig, KernelParams
from ..spec import LogitsScheduleSpec, Spec
from .base import Argument, Kernel, Strides, Value


@dataclass(frozen=True)
class LogitsScheduleConfig(KernelConfig):
    """The config of this family: one CTA."""

    num_threads: int = 256

    @property
    def tile(self) -> tuple[int, int]:
        """It writes no matrix."""
        return 1, 1


class PagedMqaLogitsMetadata(Kernel[LogitsScheduleConfig]):
    """See ``templates/include/logits_schedule.cuh``."""

    name = "paged_mqa_logits_metadata"
    archs = (SM90.name,)
    config_class = LogitsScheduleConfig

    def refuses(self, spec: Spec) -> str | None:
        """Refuses every spec except schedules."""
        return None if isinstance(spec, LogitsScheduleSpec) else "it makes schedules of paged logits"

    def configs(self, arch: ArchSpec) -> Iterator[LogitsScheduleConfig]:
        """One config."""
        yield LogitsScheduleConfig()

    def illegal(self, config: LogitsScheduleConfig, arch: ArchSpec) -> str | None:
        """None for the only config."""
        return None if config == LogitsScheduleConfig() else f"there is one config only: {LogitsScheduleConfig()}"

    def constants(self, params: KernelParams) -> Mapping[str, str | int | bool]:
        """Constants of ``paged_mqa_logits_metadata.cu.jinja``."""
        if not isinstance(params.config, LogitsScheduleConfig):
            raise TypeError(f"{self.name} takes a LogitsScheduleConfig, not {type(params.config).__name__}")
        return {"num_threads": params.config.num_threads}

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        """``stride`` is that of ``lengths`` from one request's last token to the next one's."""
        return (
            Argument("lengths", "const int*"),
            Argument("stride", "i64"),
            Argument("offset", "u32"),
            Argument("batch", "u32"),
            Argument("slots", "u32"),
            Argument("schedule", "u32*"),
        )

    def values(
        self, params: KernelParams, spec: Spec, strides: Strides, pdl: bool, constant: bool
    ) -> tuple[LaunchShape, Mapping[str, Value]]:
        """Operands: lengths (batch) or (batch, tokens), schedule."""
        if not isinstance(spec, LogitsScheduleSpec):
            raise TypeError(f"{self.name} makes schedules, but it was asked for {spec}")
        threads = LogitsScheduleConfig().num_threads
        shape = LaunchShape(grid=(1, 1, 1), block=threads, dynamic_shared=0, pdl=pdl)
        return shape, {
            "stride": strides["lengths"][0],
            "offset": spec.offset,
            "batch": spec.batch,
            "slots": spec.slots,
        }

    def shared_bytes(self, params: KernelParams) -> int:
        """None: shared memory is static."""
        return 0

    def entry(self, params: KernelParams) -> str:
        """``paged_mqa_logits_metadata``."""
        return self.name

    def cases(self) -> list[KernelParams]:
        """The one instance."""
        return [KernelParams(kernel=self.name, arch=SM90.name, config=LogitsScheduleConfig())]

    def ahead(self) -> list[KernelParams]:
        """None: no GEMM calls it."""
        return []


KERNEL = PagedMqaLogitsMetadata()
