"""Choices by measured times.

The model prunes (`worth_measuring`), and `deep_gemm.runtime.measuring` measures. Times are kept in the cache directory,
by GPU model and spec, until device code changes. Specs with the same `ranked_as` share them. Where a spec has no times,
those of other shapes correct the model (`learned`), if that helps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..arch import ArchSpec
from ..errors import UnsupportedError
from ..jit.builder import default_builder
from ..jit.cache import notes
from ..jit.cache.disk import TUNED, DiskCache
from ..jit.key import digest
from ..jit.render_key import device_code
from ..params import GemmConfig
from ..spec import GemmSpec, Operand
from .calibration import Calibration
from .heuristic import Choice, candidates, legal, order, ranked_as
from .learned import Corrections, Timed
from .model import features, parts, speed

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
        self._records: dict[str, Record] | None = None
        self._own: dict[str, Record] = {}
        self._learned: dict[tuple[Any, ...], Corrections[GemmConfig] | None] = {}

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
        self._learned = {}
        if self._disk is not None:
            body = {"format": FORMAT, "spec": asdict(record.spec), "times": dict(record.times)}
            notes.put(self._disk, self._folders, key, json.dumps(body), replace=True)

    def records(self) -> list[Record]:
        """All records. The disk is read once: what other processes measure later counts for its own spec only."""
        if self._records is None:
            found = notes.every(self._disk, self._folders) if self._disk is not None else ()
            decoded = {key: self._decoded(key, text) for key, text in found}
            self._records = {key: record for key, record in decoded.items() if record is not None}
        return list({**self._records, **self._own}.values())

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

    def corrections(self, spec: GemmSpec, arch: ArchSpec, calibration: Calibration) -> Corrections[GemmConfig] | None:
        """What was learned from specs that differ in sizes only; None if it does not help."""
        key = (kind := _kind(spec), arch, calibration)
        if key not in self._learned:
            seen = [timed(each, arch, calibration) for each in self.records() if _kind(each.spec) == kind]
            found = Corrections([each for each in seen if each is not None])
            self._learned[key] = found if found.help() else None
        return self._learned[key]

    def _key(self, spec: GemmSpec) -> str:
        return digest(["deep_gemm tuned", FORMAT, self.device, asdict(spec)])

    def _decoded(self, key: str, text: str) -> Record | None:
        """The record in a text; None if it is not one of this version."""
        try:
            body = json.loads(text)
            spec, times = dict(body["spec"]), body["times"]
            spec |= {name: Operand(**spec[name]) for name in ("a", "b", "d")}
            spec["block_multiple"] = tuple(spec["block_multiple"])
            record = Record(GemmSpec(**spec), {str(name): float(us) for name, us in times.items()})
            sound = record.times and all(0 < us < math.inf for us in record.times.values()) and _has_sizes(record.spec)
            return record if sound and body["format"] == FORMAT and self._key(record.spec) == key else None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            return None


def rank(spec: GemmSpec, arch: ArchSpec, calibration: Calibration, device: str) -> list[Choice]:
    """As `select.rank`, on the GPU model ``device``: first the configs that were measured, then the others."""
    asked, store = ranked_as(spec), store_of(device)
    configs = candidates(asked, arch)
    times = store.times(asked, lambda: configs, lambda: legal(asked, arch))
    measured = order(asked, list(times), calibration, lambda config, us: times[config])
    learned = None if times else store.corrections(asked, arch, calibration)
    corrected = None if learned is None else learned.at(_point(asked))
    rest = order(asked, [config for config in configs if config not in times], calibration, corrected)
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
    return device.replace("/", "_")


def _has_sizes(spec: GemmSpec) -> bool:
    """Whether the sizes of a spec, by which records are compared, are numbers that calls can have."""
    sizes = (spec.m, spec.n, spec.k, spec.expected_m)
    return all(type(size) is int and 0 <= size < 1 << 31 for size in sizes) and 0 not in sizes[:2]


def _kind(spec: GemmSpec) -> GemmSpec:
    """What a spec has in common with those that its config can be learned from: all but its sizes."""
    return replace(spec, m=1, n=1, k=1, expected_m=min(spec.expected_m, 1))


def _point(spec: GemmSpec) -> tuple[float, ...]:
    return math.log2(spec.m), math.log2(spec.n), math.log2(max(spec.k, 1))


def timed(record: Record, arch: ArchSpec, calibration: Calibration) -> Timed[GemmConfig] | None:
    """What can be learned from a record: times of configs that calls choose among now; None if there are none."""
    try:
        known = {label(config): config for config in candidates(record.spec, arch)}
    except UnsupportedError:
        return None
    configs = {known[name]: us for name, us in record.times.items() if name in known}
    if not configs:
        return None

    def modelled(config: GemmConfig) -> float:
        return float(parts(features(record.spec, config), speed(record.spec, calibration))["total"])

    return Timed(_point(record.spec), {config: (us, modelled(config)) for config, us in configs.items()})
