"""The constants of one GPU model, and the file that holds them."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..arch import DEFAULT
from ..errors import InvalidInputError
from ..records import record
from .power import Power

if TYPE_CHECKING:
    from .sheets import Sheet

FOLDER = Path(__file__).parent / "calibrations"

PREFIX = "speed "
"""What the names of speeds for some products begin with in a calibration file."""

NAMED = ("of 16-bit tiles",)
"""The names of all speeds for some products; see `Template.speeds`."""


@record(frozen=True)
class Speed:
    """The speed of one GPU model, fitted by `deep-gemm calibrate`. Times in us; cycles are those of the SM clock."""

    clock_ghz: float
    """The boost clock, from the spec sheet. Cycles are counted at this clock."""
    launch_us: float
    """An empty launch as it is timed, plus the time to the first load."""
    consumer_us: float
    """Extra launch time for each consumer warpgroup."""
    store_warp_us: float
    """Extra microseconds when the store warp writes the last tile."""
    cluster_us: float
    """Extra launch time of a cluster, whose CTAs start and end together."""
    exchange_us: float
    """Fixed time of a split-K exchange between CTAs, for each tile."""
    exchanged_per_us: float
    """Partial sums that a CTA sends to others in a split-K exchange, in elements a microsecond."""
    epilogue_us: float
    """Fixed time of a tile's epilogue: drain, staging, barriers."""
    elements_per_us: float
    """Output elements that a CTA converts and stores a microsecond."""
    epilogue_hidden: float
    """Fraction of the epilogue that overlaps with the next tile."""
    tensor: float
    """Tensor-core cycles for each nominal cycle: above 1, since their power lowers the clock."""
    chain_cycles: float
    """Latency of one block of K in a consumer: wait, issue, drain."""
    load_cycles: float
    """Latency of loading a stage."""
    fill_bytes_per_cycle: float
    """Bandwidth from L2 into one SM."""
    crowded_cycles: float
    """Extra cycles of one SM for a crowded row of 128 bytes."""
    unaligned: float
    """Extra L2 traffic of a row of 128 bytes that begins inside a cache line, as a fraction of the row."""
    start_gb_per_s: float
    """Bandwidth from HBM for the first stages of all CTAs."""
    hbm_gb_per_s: float
    l2_gb_per_s: float
    """Bandwidth from L2 into all SMs together."""
    overlap: float
    """The exponent of the p-norm that joins the times of the resources: the larger, the better they overlap."""


@record(frozen=True)
class Calibration:
    """The constants of a GPU model: its speed, its power, and ``origin``, which says where they come from."""

    speed: Speed
    power: Power
    origin: str = ""
    others: tuple[tuple[str, Speed], ...] = ()
    """Speeds by which only some products are estimated, by name: see `Template.speeds`."""
    arch: str = DEFAULT.name
    """The compiler target, whose kernels have costs of their own."""

    @classmethod
    def from_json(cls, data: dict[str, Any], origin: str = "", arch: str = DEFAULT.name) -> Calibration:
        """From a file's "constants". Raises InvalidInputError."""
        others = sorted(name for name in data if name.startswith(PREFIX))
        if sorted(data) != sorted(["power", "speed", *others]):
            raise InvalidInputError(
                f"A calibration file holds constants of speed and power, but this one of {', '.join(data)}. "
                "Make a new one with `deep-gemm calibrate fit`."
            )
        named = tuple((name.removeprefix(PREFIX), _read(Speed, data[name])) for name in others)
        return cls(_read(Speed, data["speed"]), _read(Power, data["power"]), origin, named, arch)

    def to_json(self) -> dict[str, dict[str, float]]:
        others = {PREFIX + name: asdict(speed) for name, speed in self.others}
        return {"speed": asdict(self.speed), **others, "power": asdict(self.power)}

    def named(self, name: str) -> Speed:
        """The speeds with this name; the common ones if it is empty or has none."""
        return dict(self.others).get(name, self.speed)

    def scaled(self, known: Sheet, to: Sheet) -> Calibration:
        """These constants of the card ``known``, scaled to the card ``to`` by the two spec sheets. The common speeds
        are those of FP8 there, and 16-bit products have speeds of their own."""
        hbm, tensor = to.hbm_gb_per_s / known.hbm_gb_per_s, to.reached(element_bytes=1) / known.reached(element_bytes=1)
        half = to.reached(element_bytes=2) / known.reached(element_bytes=2)
        cycles = to.sms * to.clock_ghz / (known.sms * known.clock_ghz)

        def scale(speed: Speed, rate: float) -> Speed:
            return replace(
                speed,
                clock_ghz=to.clock_ghz,
                tensor=speed.tensor * cycles / rate,
                start_gb_per_s=speed.start_gb_per_s * hbm,
                hbm_gb_per_s=speed.hbm_gb_per_s * hbm,
                l2_gb_per_s=speed.l2_gb_per_s * cycles,
            )

        power = replace(
            self.power,
            products_per_us=self.power.products_per_us * min(tensor, to.power_w / known.power_w),
            stored_per_us=self.power.stored_per_us * hbm,
        )
        others = tuple((name, scale(speed, half)) for name, speed in self.others)
        origin = f"the spec sheet of {to.name}, scaled from {self.origin}"
        return Calibration(scale(self.speed, tensor), power, origin, others, to.arch)


Kind = TypeVar("Kind", Speed, Power)


def _read(kind: type[Kind], data: dict[str, Any]) -> Kind:
    """The constants in ``data``, which must name each of them and nothing else. Raises InvalidInputError."""
    names = [field.name for field in fields(kind)]
    strange = [x for x in data.values() if not isinstance(x, (int, float)) or x <= 0]
    if sorted(data) != sorted(names) or strange:
        raise InvalidInputError(
            f"A calibration's part about {kind.__name__.lower()} holds positive numbers named {', '.join(names)}, but "
            f"this one holds {data}. Make a new one with `deep-gemm calibrate fit`."
        )
    return kind(**{name: float(data[name]) for name in names})


def file_of(device_name: str) -> Path:
    """The path of the file for a GPU model, such as "NVIDIA H200"; it need not exist."""
    stem = "".join(letter if letter.isalnum() else "_" for letter in device_name.lower())
    return FOLDER / f"{stem.strip('_')}.json"


@functools.cache
def load(path: Path, arch: str = DEFAULT.name) -> Calibration:
    """The calibration in a file, of a GPU model of ``arch``. Raises InvalidInputError if it holds none."""
    data = json.loads(path.read_text())
    return Calibration.from_json(data["constants"], f"the calibration {path.stem}", arch)


@functools.cache
def for_device(device_name: str, num_sms: int = 0, hbm_gb_per_s: float = 0.0, arch: str = DEFAULT.name) -> Calibration:
    """The calibration of a GPU model. If it has none, or lacks speeds of some products, the nearest card's, scaled by
    the spec sheets. The sheet of an unknown card is found by SMs and bandwidth among those of ``arch``; 0 means
    unknown."""
    path = file_of(device_name)
    own = load(path, arch) if path.is_file() else None
    if own is not None and tuple(name for name, _ in own.others) == NAMED:
        return own
    from . import sheets  # here: a card whose file has all speeds needs none

    sheet = sheets.for_device(device_name, num_sms, hbm_gb_per_s, arch)
    known = [each for each in sheets.SHEETS if file_of(each.device).is_file()]
    near = [(each, load(file_of(each.device), each.arch)) for each in sorted(known, key=sheet.distance)]
    scaled = [found if each == sheet else found.scaled(each, sheet) for each, found in near]
    found = own or scaled[0]
    others = {name: speed for each in [*reversed(scaled), found] for name, speed in each.others}
    return replace(found, others=tuple(sorted(others.items())), arch=arch)


def default() -> Calibration:
    """The calibration that is used if no GPU is named: an H200's."""
    return for_device("NVIDIA H200")
