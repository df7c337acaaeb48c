"""The constants of one GPU model, and where they are kept."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..errors import InvalidInputError
from .constants import Constants
from .power import Power

FOLDER = Path(__file__).parent / "calibrations"

KINDS = ("few_tokens", "batch_tokens", "some_tokens", "many_tokens")
FEW_TOKENS, BATCH_TOKENS, SOME_TOKENS = 64, 128, 512
"""Up to so many tokens there are constants for few and for a large batch that is decoded, both fitted to graphs of many
launches as well, and for some."""


@dataclass(frozen=True)
class Calibration(Constants):
    """Constants of one GPU model, made by `deep-gemm calibrate`. Times in us, cycles of the SM clock."""

    WHAT: ClassVar[str] = "A calibration"

    clock_ghz: float
    """SM clock in short runs."""
    tensor_ghz: float
    """The same where tensor cores are the limit."""
    launch_us: float
    """An empty launch as timed, and the way to the first load."""
    epilogue_us: float
    """A tile's fixed cost: drain, staging, barriers."""
    epilogue_elements_per_us: float
    """Output elements that a CTA converts and stores by TMA in a microsecond."""
    narrow_store: float
    """Stores of rows of 64 / n columns take n to the power of this as long."""
    epilogue_hidden: float
    """Part of it that the work on the next tile hides."""
    direct_elements_per_us: float
    """The same, element by element."""
    transposed_elements_per_us: float
    """The same by TMA where operands are swapped, in addition: they are turned on the way."""
    upright_us: float
    """What a launch takes more where tokens are rows: a tile of few has rows without any."""
    stage_us: float
    """What a launch takes more for each stage of the ring, whose barriers are made first."""
    consumer_us: float
    """The same for each consumer warpgroup."""
    store_warp_us: float
    """Extra microseconds when the store warp writes the last tile."""
    cluster_2_us: float
    cluster_4_us: float
    cluster_8_us: float
    """What launching and ending CTAs of a cluster together costs."""
    local_us: float
    """Handing over shares of K inside a CTA."""
    exchange_us: float
    """Handing over shares of K between CTAs."""
    skew: float
    """What these then wait for each other, as a part of the time that they multiply."""
    handed_per_us: float
    """Elements that consumers of a CTA hand over in a microsecond."""
    exchanged_per_us: float
    """Elements that a CTA hands to others of its cluster in a microsecond."""
    instruction_cycles: float
    """Least time of a wgmma, however narrow."""
    chain_cycles: float
    """Latency of one block of K in a consumer: wait, issue, drain."""
    promote_cycles: float
    """Promotion of one column of an m64 slice."""
    token_cycles: float
    """Reading and multiplying one token's scale."""
    exposed: float
    """Part of promotion during which the tensor cores idle, however it is scheduled."""
    in_step: float
    """The same in addition, where several consumers promote without order."""
    parts_cycles: float
    """Multiplying an m64 slice in two parts, in one block of K."""
    ahead_cycles: float
    """Latency of one block where products are issued ahead."""
    issue_cycles: float
    """A producer thread's time for one box of B."""
    shared_bytes_per_cycle: float
    """Shared memory of an SM: operands that wgmma reads, and what TMA writes."""
    fill_bytes_per_cycle: float
    """From L2 into one SM."""
    line_cycles: float
    """Asking the L2 for a line, for one SM."""
    load_cycles: float
    """From asking for a stage to having it."""
    start_gb_per_s: float
    """From HBM, of the first stages of all CTAs."""
    hbm_gb_per_s: float
    again: float
    """Part of B that costs HBM's time twice, where several tiles ask for it before it has come."""
    l2_gb_per_s: float
    """From L2 into all SMs together, of bytes that one SM asks for."""
    l2_sharing: float
    """Bytes that n tiles ask for count n to the power of minus this each."""
    unaligned: float
    """What a row of 128 bytes costs that begins inside a line, in lines: it takes two, and fits say more."""
    torn: float
    """What it costs in addition, in lines, if it begins inside a sector of 32 bytes: it takes five of them then."""
    crowded_cycles: float
    """What a crowded row of 128 bytes costs in addition, for one SM."""
    hanging_cycles: float
    """What a row of 128 bytes costs in addition that ends past K, for one SM: TMA fills it up with zeros."""


@dataclass(frozen=True)
class Calibrations:
    """Those of one GPU model: for few tokens, where launches overlap and HBM is the limit, for a batch, where in
    addition power is, for many, where tensor cores and the L2 matter, and for some, where all do; and what draws
    power."""

    few_tokens: Calibration
    batch_tokens: Calibration
    some_tokens: Calibration
    many_tokens: Calibration
    power: Power

    def of(self, m: int) -> Calibration:
        """The constants for ``m`` tokens."""
        found: Calibration = getattr(self, kind_of(m))
        return found

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Calibrations:
        """All of them, from a file's "constants". Raises InvalidInputError."""
        names = [*KINDS, "power"]
        if sorted(data) != sorted(names):
            raise InvalidInputError(
                f"A calibration file holds constants for {', '.join(names)}, but this one for {', '.join(data)}. "
                "Make it anew with `deep-gemm calibrate fit`."
            )
        return cls(**{kind: Calibration.from_json(data[kind]) for kind in KINDS}, power=Power.from_json(data["power"]))

    def to_json(self) -> dict[str, dict[str, float]]:
        """For a calibration file."""
        return asdict(self)


def kind_of(m: int) -> str:
    """Which of ``Calibrations`` is for ``m`` tokens."""
    limits = (FEW_TOKENS, BATCH_TOKENS, SOME_TOKENS)
    return next((kind for kind, limit in zip(KINDS, limits, strict=False) if m <= limit), KINDS[-1])


def file_of(device_name: str) -> Path:
    """The file for a GPU model, such as "NVIDIA H200", which need not exist."""
    stem = "".join(c if c.isalnum() else "_" for c in device_name.lower()).strip("_")
    return FOLDER / f"{stem}.json"


@functools.cache
def load(path: Path) -> Calibrations:
    """The calibrations in a file. Raises InvalidInputError if it holds none."""
    return Calibrations.from_json(json.loads(path.read_text())["constants"])


def of(device_name: str) -> Calibrations:
    """The calibrations of a GPU model; an H200's where there are none."""
    path = file_of(device_name)
    return load(path) if path.is_file() else default()


def every() -> list[Calibrations]:
    """Those of all GPU models that have one, the default first."""
    return [default(), *(load(path) for path in sorted(FOLDER.glob("*.json")) if load(path) != default())]


def default() -> Calibrations:
    """Those used where there are none of the GPU itself: an H200's."""
    return load(file_of("NVIDIA H200"))
