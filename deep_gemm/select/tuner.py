"""Choices by measured times.

The model prunes (`worth_measuring`), and `deep_gemm.runtime.measuring` measures. Times are kept in the cache directory,
by GPU model and spec, until device code changes. Specs with the same `ranked_as` share them. Where a spec has no times,
the model decides.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..arch import ArchSpec
from ..jit.builder import default_builder
from ..jit.cache import notes
from ..jit.cache.disk import TUNED, DiskCache
from ..jit.key import digest
from ..jit.render_key import device_code
from ..params import GemmConfig
from ..spec import GemmSpec, to_json
from .calibration import Calibration
from .heuristic import Choice, candidates, legal, order, ranked_as

TOP = 8
"""How many configs of the serving set are measured; docs/tuning.md has the quality of 1, 3, 5 and 8."""
BEYOND = 8
"""How many other legal configs are measured as well. The serving set has few kernels: on an H100 its best one had 0.985
of the speed of the best legal one (BF16, 30 random shapes), and these eight made it 0.998."""
FORMAT = 2


@dataclass(frozen=True)
class Record:
    """The times, in us, of the configs that were measured for a spec, by `label`."""

    spec: GemmSpec
    times: Mapping[str, float]


class Store:
    """The records of one GPU model: those on disk, and those of this process."""

    def __init__(self, device: str, disk: DiskCache | None) -> None:
        self.device, self._disk = device, disk
        self._folders = (TUNED, _folder(device), device_code())
        self._own: dict[str, Record] = {}

    def get(self, spec: GemmSpec) -> Record | None:
        """The record of a spec that `ranked_as` returned."""
        key = self._key(spec)
        if key in self._own:
            return self._own[key]
        text = notes.get(self._disk, self._folders, key) if self._disk is not None else None
        return self._decoded(key, text) if text is not None else None

    def put(self, record: Record) -> None:
        """Keep a record in this process, and on disk if possible."""
        key = self._key(record.spec)
        self._own = {**self._own, key: record}
        if self._disk is not None:
            body = {"format": FORMAT, "spec": to_json(record.spec), "times": dict(record.times)}
            notes.put(self._disk, self._folders, key, json.dumps(body), replace=True)

    def times(self, spec: GemmSpec, *offered: Callable[[], list[GemmConfig]]) -> dict[GemmConfig, float]:
        """The measured times of configs, of the first list in ``offered`` that has the fastest of all. None counts if
        no list has it: then it is not legal any more, and the record is stale."""
        record = self.get(spec)
        if record is not None:
            fastest = min(record.times, key=lambda name: record.times[name])
            for configs in offered:
                known = {label(config): config for config in configs()}
                if fastest in known:
                    return {known[name]: us for name, us in record.times.items() if name in known}
        return {}

    def _key(self, spec: GemmSpec) -> str:
        return digest(["deep_gemm tuned", FORMAT, self.device, to_json(spec)])

    def _decoded(self, key: str, text: str) -> Record | None:
        """The record in a text; None if it is not one of this version."""
        try:
            body = json.loads(text)
            times = {str(name): float(us) for name, us in body["times"].items()}
            record = Record(GemmSpec.from_json(body["spec"]), times)
            sound = record.times and all(0 < us < math.inf for us in record.times.values())
            return record if sound and body["format"] == FORMAT and self._key(record.spec) == key else None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            return None


def rank(spec: GemmSpec, arch: ArchSpec, calibration: Calibration, device: str) -> list[Choice]:
    """As `select.rank`, on the GPU model ``device``: first the configs that were measured, then the others."""
    asked = ranked_as(spec)
    configs = candidates(asked, arch)
    times = store_of(device).times(asked, lambda: configs, lambda: legal(asked, arch))
    measured = order(asked, list(times), calibration, times)
    rest = order(asked, [config for config in configs if config not in times], calibration)
    return [replace(choice, measured_us=times[choice.config]) for choice in measured] + rest


def worth_measuring(spec: GemmSpec, arch: ArchSpec, calibration: Calibration, device: str) -> list[Choice]:
    """The `TOP` first configs of `rank`, and the `BEYOND` first of all other legal ones by the model. Only the former
    if they were measured before."""
    asked, first = ranked_as(spec), rank(spec, arch, calibration, device)[:TOP]
    if first[0].measured_us:
        return first
    taken = {choice.config for choice in first}
    others = [config for config in legal(asked, arch) if config not in taken]
    return first + order(asked, others, calibration)[:BEYOND]


def remember(spec: GemmSpec, times: Mapping[GemmConfig, float], device: str) -> Record:
    """Keep the times of configs, in us, that were measured for ``spec`` on the GPU model ``device``."""
    record = Record(ranked_as(spec), {label(config): us for config, us in times.items()})
    store_of(device).put(record)
    return record


def devices() -> list[str]:
    """The GPU models that times are kept of in the cache directory."""
    disk = default_builder().disk()
    return notes.names(disk, (TUNED,)) if disk is not None else []


_stores: dict[tuple[str, DiskCache | None], Store] = {}


def store_of(device: str) -> Store:
    """The store of a GPU model under the current settings."""
    key = (device, default_builder().disk())
    return _stores.get(key) or _stores.setdefault(key, Store(*key))


def label(config: GemmConfig) -> str:
    """A config as a text that identifies it."""
    return json.dumps(vars(config), sort_keys=True)


def _folder(device: str) -> str:
    """A name of one directory, which is never one above."""
    name = "".join(letter if letter.isprintable() and letter != "/" else "_" for letter in device[:80])
    return name if name.strip(".") else f"_{name}"
