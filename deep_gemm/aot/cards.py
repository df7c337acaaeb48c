"""The GPU models that kernels are compiled ahead for: the choice among tiles depends on the model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from deep_gemm import arch as archs
from deep_gemm.aot.inputs import shown
from deep_gemm.errors import InvalidInputError
from deep_gemm.select import calibration, sheets
from deep_gemm.select.calibration import Calibration

DRIVER = Path("/proc/driver/nvidia/gpus")
"""Reading it does not initialise CUDA, after which no process could fork."""


@dataclass(frozen=True)
class Card:
    """A GPU model, by the driver's name for it, and its number of SMs."""

    device: str
    sms: int

    @property
    def calibration(self) -> Calibration:
        return calibration.for_device(self.device, self.sms)

    @property
    def name(self) -> str:
        """Its short name if it has a spec sheet, such as "H20", else the driver's."""
        return next((sheet.name for sheet in sheets.SHEETS if sheet.device == self.device), self.device)


def named(device: str) -> Card:
    """The card with the driver's name `device`; its SMs are those of the nearest spec sheet."""
    return Card(device, sheets.for_device(device).sms)


def every() -> tuple[Card, ...]:
    """All GPU models with a spec sheet or a calibration."""
    return _once([*_calibrated(), *(Card(sheet.device, sheet.sms) for sheet in sheets.SHEETS)])


def parse(names: Iterable[str]) -> tuple[Card, ...]:
    """The cards of these names: "H20" or "NVIDIA H20"; "all" are all of `every`. Raises InvalidInputError."""
    found: list[Card] = []
    for name in names:
        known = [card for card in every() if name.lower() in ("all", card.name.lower(), card.device.lower())]
        if not known:
            listed = ", ".join(card.name for card in every())
            raise InvalidInputError(f"A card must be one of {listed}, or all, but it is {shown(name)}.")
        found += known
    return _once(found)


def default(num_sms: int | None = None) -> tuple[Card, ...]:
    """All models with a calibration (H100, H200), the GPUs here, and models with just `num_sms` SMs."""
    alike = [Card(sheet.device, sheet.sms) for sheet in sheets.SHEETS if sheet.sms == num_sms]
    return _once([*_calibrated(), *here(), *alike])


def here() -> list[Card]:
    import torch

    if torch.cuda.is_initialized():
        found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        hopper = archs.SM90.capability  # all spec sheets are of such GPUs
        return [Card(x.name, x.multi_processor_count) for x in found if (x.major, x.minor) == hopper]
    names = {match[1].strip() for text in _descriptions() if (match := re.search(r"^Model:(.*)$", text, re.MULTILINE))}
    return [named(name) for name in sorted(names) if re.search(r"\bG?H[0-9]", name)]


def _descriptions() -> list[str]:
    try:
        return [path.read_text(errors="replace") for path in sorted(DRIVER.glob("*/information"))]
    except OSError:
        return []


def _calibrated() -> list[Card]:
    names = {calibration.file_of(sheet.device): sheet.device for sheet in sheets.SHEETS}
    return [named(names.get(path, path.stem)) for path in sorted(calibration.FOLDER.glob("*.json"))]


def _once(found: Iterable[Card]) -> tuple[Card, ...]:
    """Each card once; of cards whose calls choose alike only the first."""
    alike: dict[tuple[Calibration, int], Card] = {}
    for card in found:
        alike.setdefault((card.calibration, card.sms), card)
    return tuple(alike.values())
