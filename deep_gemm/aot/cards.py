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
    """A GPU model, by the driver's name for it, its number of SMs, and its compiler target."""

    device: str
    sms: int
    arch: str = archs.DEFAULT.name

    @property
    def calibration(self) -> Calibration:
        return calibration.for_device(self.device, self.sms, arch=self.arch)

    @property
    def name(self) -> str:
        """Its short name if it has a spec sheet, such as "H20", else the driver's."""
        return next((sheet.name for sheet in sheets.SHEETS if sheet.device == self.device), self.device)


def named(device: str, arch: str = archs.DEFAULT.name) -> Card:
    """The card with the driver's name `device`; its SMs are those of the nearest spec sheet of GPUs of `arch`."""
    return Card(device, sheets.for_device(device, arch=arch).sms, arch)


def every(arch: str = archs.DEFAULT.name) -> tuple[Card, ...]:
    """All GPU models of `arch` with a spec sheet or a calibration."""
    return _once([*_calibrated(arch), *_of_sheets(arch)])


def parse(names: Iterable[str], arch: str = archs.DEFAULT.name) -> tuple[Card, ...]:
    """The cards of these names: "H20" or "NVIDIA H20"; "all" are all of `every`. Raises InvalidInputError."""
    found: list[Card] = []
    for name in names:
        known = [card for card in every(arch) if name.lower() in ("all", card.name.lower(), card.device.lower())]
        if not known:
            listed = ", ".join(card.name for card in every(arch))
            raise InvalidInputError(f"A card of {arch} must be one of {listed}, or all, but it is {shown(name)}.")
        found += known
    return _once(found)


def default(num_sms: int | None = None, arch: str = archs.DEFAULT.name) -> tuple[Card, ...]:
    """All models of `arch` with a calibration (H100, H200), the GPUs here, and models with just `num_sms` SMs. If none
    has a calibration, all with a spec sheet."""
    alike = [card for card in _of_sheets(arch) if card.sms == num_sms]
    return _once([*(_calibrated(arch) or _of_sheets(arch)), *here(arch), *alike])


def here(arch: str = archs.DEFAULT.name) -> list[Card]:
    """The GPUs of `arch` in this machine."""
    import torch

    if torch.cuda.is_initialized():
        found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        able = [each for each in found if archs.target_of(each.major, each.minor) == arch]
        return [Card(each.name, each.multi_processor_count, arch) for each in able]
    names = {match[1].strip() for text in _descriptions() if (match := re.search(r"^Model:(.*)$", text, re.MULTILINE))}
    return [named(name, arch) for name in sorted(names) if _arch_of(name) == arch]


def _arch_of(device: str) -> str:
    """The compiler target of a GPU model; "" if its name says nothing."""
    if re.search(r"\bG?H[0-9]", device):
        return archs.SM90.name
    return next((sheet.arch for sheet in sheets.SHEETS if sheet.device == device), "")


def _of_sheets(arch: str) -> list[Card]:
    return [Card(sheet.device, sheet.sms, arch) for sheet in sheets.of_arch(arch)]


def _descriptions() -> list[str]:
    try:
        return [path.read_text(errors="replace") for path in sorted(DRIVER.glob("*/information"))]
    except OSError:
        return []


def _calibrated(arch: str) -> list[Card]:
    """A file of a model without a spec sheet is taken for one of the default target."""
    known = {calibration.file_of(sheet.device): (sheet.device, sheet.arch) for sheet in sheets.SHEETS}
    found = [known.get(path, (path.stem, archs.DEFAULT.name)) for path in sorted(calibration.FOLDER.glob("*.json"))]
    return [named(device, arch) for device, of in found if of == arch]


def _once(found: Iterable[Card]) -> tuple[Card, ...]:
    """Each card once; of cards whose calls choose alike only the first."""
    alike: dict[tuple[Calibration, int], Card] = {}
    for card in found:
        alike.setdefault((card.calibration, card.sms), card)
    return tuple(alike.values())
