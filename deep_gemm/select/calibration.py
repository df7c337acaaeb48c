"""The constants of one GPU model, and where they are kept."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from ..errors import InvalidInputError
from . import sheets
from .constants import Constants
from .power import Power
from .sheets import Sheet

FOLDER = Path(__file__).parent / "calibrations"


@dataclass(frozen=True)
class Speed(Constants):
    """How fast one GPU model is, made by `deep-gemm calibrate`. Times in us, cycles of the SM clock."""

    WHAT: ClassVar[str] = "A calibration's part about speed"

    clock_ghz: float
    """Boost clock, from the spec sheet: cycles are counted in it."""
    launch_us: float
    """An empty launch as timed, and the way to the first load."""
    consumer_us: float
    """What a launch takes more for each consumer warpgroup."""
    store_warp_us: float
    """Extra microseconds when the store warp writes the last tile."""
    cluster_us: float
    """What launching and ending CTAs of a cluster together costs."""
    exchange_us: float
    """Exchanging shares of K between CTAs, for each tile."""
    handed_per_us: float
    """Elements that a CTA hands to others in a microsecond."""
    epilogue_us: float
    """A tile's fixed cost: drain, staging, barriers."""
    elements_per_us: float
    """Output elements that a CTA converts and stores in a microsecond."""
    epilogue_hidden: float
    """Part of the epilogue that the work on the next tile hides."""
    tensor: float
    """Cycles of the tensor cores for one of their nominal cycles: at work they draw the power that lowers the clock."""
    chain_cycles: float
    """Latency of one block of K in a consumer: wait, issue, drain."""
    load_cycles: float
    """From asking for a stage to having it."""
    fill_bytes_per_cycle: float
    """From L2 into one SM."""
    crowded_cycles: float
    """What a crowded row of 128 bytes costs in addition, for one SM."""
    unaligned: float
    """What a row of 128 bytes that begins inside a line costs the L2 in addition, as a part of a row."""
    start_gb_per_s: float
    """From HBM, of the first stages of all CTAs."""
    hbm_gb_per_s: float
    l2_gb_per_s: float
    """From L2 into all SMs together."""
    overlap: float
    """The power of the norm that joins the times of resources: the larger, the better they overlap."""


@dataclass(frozen=True)
class Calibration:
    """What is known of a GPU model: its speed, what draws power, and ``origin``, which says whose constants these
    are."""

    speed: Speed
    power: Power
    origin: str = ""

    @classmethod
    def from_json(cls, data: dict[str, Any], origin: str = "") -> Calibration:
        """From a file's "constants". Raises InvalidInputError."""
        if sorted(data) != ["power", "speed"]:
            raise InvalidInputError(
                f"A calibration file holds constants of speed and power, but this one of {', '.join(data)}. "
                "Make it anew with `deep-gemm calibrate fit`."
            )
        return cls(Speed.from_json(data["speed"]), Power.from_json(data["power"]), origin)

    def to_json(self) -> dict[str, dict[str, float]]:
        """For a calibration file."""
        return {"speed": asdict(self.speed), "power": asdict(self.power)}

    def scaled(self, known: Sheet, to: Sheet) -> Calibration:
        """What these constants, of the card ``known``, are on the card ``to`` by both spec sheets."""
        hbm, tensor = to.hbm_gb_per_s / known.hbm_gb_per_s, to.tensor_tflops / known.tensor_tflops
        cycles = to.sms * to.clock_ghz / (known.sms * known.clock_ghz)
        speed = replace(
            self.speed,
            clock_ghz=to.clock_ghz,
            tensor=self.speed.tensor * cycles / tensor,
            start_gb_per_s=self.speed.start_gb_per_s * hbm,
            hbm_gb_per_s=self.speed.hbm_gb_per_s * hbm,
            l2_gb_per_s=self.speed.l2_gb_per_s * cycles,
        )
        power = replace(
            self.power,
            products_per_us=self.power.products_per_us * min(tensor, to.power_w / known.power_w),
            stored_per_us=self.power.stored_per_us * hbm,
        )
        return Calibration(speed, power, f"the spec sheet of {to.name}, scaled from {self.origin}")


def file_of(device_name: str) -> Path:
    """The file for a GPU model, such as "NVIDIA H200", which need not exist."""
    stem = "".join(c if c.isalnum() else "_" for c in device_name.lower()).strip("_")
    return FOLDER / f"{stem}.json"


@functools.cache
def load(path: Path) -> Calibration:
    """The calibration in a file. Raises InvalidInputError if it holds none."""
    data = json.loads(path.read_text())
    return Calibration.from_json(data["constants"], f"the calibration {path.stem}")


@functools.cache
def of(device_name: str, num_sms: int = 0, hbm_gb_per_s: float = 0.0) -> Calibration:
    """The calibration of a GPU model; where it has none, what its spec sheet makes of that of the nearest card. SMs and
    bandwidth find the sheet of a card that has none; 0 says that they are not known."""
    path = file_of(device_name)
    if path.is_file():
        return load(path)
    sheet = sheets.of(device_name, num_sms, hbm_gb_per_s)
    known = [each for each in sheets.SHEETS if file_of(each.device).is_file()]
    nearest = min(known, key=sheet.distance)
    found = load(file_of(nearest.device))
    return found if nearest == sheet else found.scaled(nearest, sheet)


def every() -> list[Calibration]:
    """Those of all GPU models that have one, the default first."""
    return [default(), *(load(path) for path in sorted(FOLDER.glob("*.json")) if load(path) != default())]


def default() -> Calibration:
    """Those used where no GPU is named: an H200's."""
    return load(file_of("NVIDIA H200"))
