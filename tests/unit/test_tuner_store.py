"""Choices by measured times: what is kept, how it is found again, and what of it is not believed."""

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deep_gemm import ops, options, select, settings
from deep_gemm.aot import build
from deep_gemm.aot.workload import GemmShape
from deep_gemm.arch import SM90
from deep_gemm.jit.builder import default_builder
from deep_gemm.jit.cache.disk import DiskCache
from deep_gemm.params import GemmConfig
from deep_gemm.select import tuner
from deep_gemm.select.calibration import default
from deep_gemm.spec import GemmSpec, to_json

DEVICE = "NVIDIA H200"
SPEC = ops.spec(24, 7168, 2048, 132)


@pytest.fixture(autouse=True)
def _own_cache(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache directory of each test's own, in a process that has not tuned."""
    monkeypatch.setattr(options.current(), "measured_times", False)


def forget() -> None:
    """What a new process knows."""
    tuner._stores.clear()


def ranked(spec: GemmSpec = SPEC, device: str = DEVICE) -> list[GemmConfig]:
    return [choice.config for choice in tuner.rank(spec, SM90, default(), device)]


def modelled(spec: GemmSpec = SPEC) -> list[GemmConfig]:
    return [choice.config for choice in select.rank(spec, SM90)]


def measure(spec: GemmSpec = SPEC, chosen: int = 5, device: str = DEVICE) -> GemmConfig:
    """Keep times of the first configs, of which one is the fastest. Returns that one."""
    configs = modelled(spec)[: tuner.TOP]
    tuner.remember(spec, {config: 9.0 + (index != chosen) for index, config in enumerate(configs)}, device)
    return configs[chosen]


def kept(cache_dir: Path) -> list[Path]:
    return sorted(path for path in (cache_dir / "tuned").rglob("*") if path.is_file())


SPECS = {name: ops.spec(64, 1024, 1024, 132, name, groups=4 if "grouped" in name else 1) for name in ops.NAMES}


@pytest.mark.parametrize("name", SPECS)
def test_the_fastest_of_every_family_is_found_by_another_process(name: str) -> None:
    spec = SPECS[name]
    assert ranked(spec) == modelled(spec)  # nothing is known yet
    chosen = measure(spec, min(5, len(modelled(spec)) - 1))
    forget()
    assert ranked(spec)[0] == chosen
    assert sorted(map(str, ranked(spec))) == sorted(map(str, modelled(spec)))
    first = tuner.rank(spec, SM90, default(), DEVICE)[0]
    assert (first.measured_us, first.spec) == (9.0, select.rank(spec, SM90)[0].spec)


def test_neighbouring_m_share_a_choice_and_nothing_else_does() -> None:
    chosen = measure()
    assert ranked(replace(SPEC, m=17))[0] == ranked(replace(SPEC, m=23))[0] == chosen
    others = [
        *(replace(SPEC, m=25), replace(SPEC, n=7040), replace(SPEC, num_sms=120, whole_gpu=False)),
        replace(SPEC, d=replace(SPEC.d, aligned=False)),
    ]
    assert [ranked(other) for other in others] == [modelled(other) for other in others]
    assert ranked(device="NVIDIA H100 80GB HBM3") == modelled()


def test_a_new_measurement_replaces_the_one_before(cache_dir: Path) -> None:
    measure(chosen=5)
    chosen = measure(chosen=2)
    assert ranked()[0] == chosen
    forget()
    assert ranked()[0] == chosen
    assert len(kept(cache_dir)) == 1
    assert kept(cache_dir)[0].stat().st_mode & 0o777 == 0o600


def test_power_counts_for_measured_times_too() -> None:
    """Of two configs that take as long alone, the one that draws less is first, where power can be the limit."""
    spec = ops.spec(4096, 7168, 16384, 132)
    configs = modelled(spec)[: tuner.TOP]
    tuner.remember(spec, dict.fromkeys(configs, 700.0), DEVICE)
    found = tuner.rank(spec, SM90, default(), DEVICE)[: len(configs)]
    assert [choice.sustained_us for choice in found] == sorted(choice.sustained_us for choice in found)


def test_device_code_that_changed_makes_times_stale(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure()
    forget()
    monkeypatch.setattr(tuner, "device_code", lambda: "f" * 40)
    assert ranked() == modelled()


def test_a_config_that_calls_do_not_choose_among_any_more_makes_times_stale() -> None:
    configs = modelled()
    gone = replace(configs[0], num_stages=99)
    tuner.remember(SPEC, {gone: 1.0, configs[3]: 2.0}, DEVICE)
    assert ranked() == configs
    tuner.remember(SPEC, {gone: 3.0, configs[3]: 2.0}, DEVICE)  # it was slower: nothing is lost
    assert ranked()[0] == configs[3]


def test_batch_invariance_keeps_its_one_order_of_k() -> None:
    """Times of one position of the switch do not count for the other, and a config that splits K never passes."""
    invariant = replace(SPEC, batch_invariant=True)
    splitting = next(config for config in modelled() if config.k_splits > 1)
    tuner.remember(SPEC, {splitting: 1.0, modelled()[0]: 2.0}, DEVICE)
    assert ranked(SPEC)[0] == splitting
    assert ranked(invariant) == modelled(invariant)
    tuner.remember(invariant, {splitting: 1.0, modelled(invariant)[1]: 2.0}, DEVICE)
    assert ranked(invariant) == modelled(invariant)
    assert all(config.k_splits == 1 for config in ranked(invariant))


def test_every_damaged_file_is_passed_by_and_replaced(cache_dir: Path) -> None:
    chosen = measure()
    (path,) = kept(cache_dir)
    whole, draw = path.read_bytes(), random.Random(1)
    for at in (*range(70), *draw.sample(range(70, len(whole)), 60), len(whole) - 1):
        for damaged in (whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], whole[:at]):
            path.write_bytes(damaged)
            forget()
            assert ranked() == modelled(), at
    measure()
    forget()
    assert ranked()[0] == chosen


def body_of(**changes: Any) -> dict[str, Any]:
    times = {tuner.label(config): 9.0 - index for index, config in enumerate(modelled()[:3])}
    return {"format": tuner.FORMAT, "spec": to_json(SPEC), "times": times} | changes


@pytest.mark.parametrize(
    "body",
    [
        *([], "text", None, {}, body_of(format=tuner.FORMAT + 1), body_of(times={}), body_of(times=[1.0]),
            body_of(spec=[])),
        *(body_of(times={tuner.label(modelled()[1]): us}) for us in (0.0, -1.0, float("nan"), float("inf"), "x", None)),
        body_of(spec=to_json(SPEC) | {"colour": "blue"}),
        body_of(spec={name: value for name, value in to_json(SPEC).items() if name != "m"}),
        body_of(spec=to_json(SPEC) | {"a": "e4m3"}), body_of(spec=to_json(replace(SPEC, n=64))),
        body_of(spec=to_json(SPEC) | {"block_multiple": 1}), body_of(times={tuner.label(modelled()[1]): 10**400}),
        *(body_of(spec=to_json(SPEC) | {size: x}) for size in ("m", "expected_m") for x in ("x", 10**400, 1.5, -1,
            None)),
    ],
)  # fmt: skip
def test_a_text_that_is_no_record_is_passed_by_though_its_checksum_holds(cache_dir: Path, body: Any) -> None:
    from deep_gemm.jit.cache import notes

    disk = default_builder().disk()
    assert disk is not None
    store = tuner.store_of(DEVICE)
    key = store._key(tuner.ranked_as(SPEC))
    assert notes.put(disk, store._folders, key, json.dumps(body_of()))
    assert ranked()[0] == modelled()[2]
    assert notes.put(disk, store._folders, key, json.dumps(body), replace=True)
    forget()
    assert ranked() == modelled()


def test_a_file_under_another_name_is_passed_by(cache_dir: Path) -> None:
    measure()
    (path,) = kept(cache_dir)
    path.rename(path.with_name("0" * 40))
    forget()
    assert ranked() == modelled()


@pytest.mark.parametrize("name", ["..", ".", "", "a/../../b", "\x1b[2J", "x" * 400, "/", "..."])
def test_a_gpu_may_have_any_name(cache_dir: Path, name: str) -> None:
    """Times of one named .. went into the root of the cache."""
    tuner.remember(SPEC, {modelled()[1]: 1.0}, name)
    (folder,) = (cache_dir / "tuned").iterdir()
    assert folder.name.isprintable()
    assert len(list(folder.rglob("*"))) == 2, "of the device code, and the record"
    assert {path.name for path in cache_dir.iterdir()} <= {"tuned", "tmp"}
    forget()
    found = tuner.store_of(name).get(tuner.ranked_as(SPEC))
    assert found is not None


@pytest.mark.parametrize("level", ["file", "folder", "root"])
def test_what_others_can_write_to_is_not_believed(cache_dir: Path, level: str, caplog: Any) -> None:
    measure()
    (path,) = kept(cache_dir)
    unsafe = {"file": path, "folder": path.parent, "root": cache_dir}[level]
    os.chmod(unsafe, unsafe.stat().st_mode | 0o022)
    forget()
    assert ranked() == modelled()
    with settings.override(trust_cache_dir=True):
        assert ranked() != modelled()


def test_a_link_in_its_place_is_not_followed(cache_dir: Path, tmp_path: Path) -> None:
    chosen = measure()
    (path,) = kept(cache_dir)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    forget()
    assert ranked() == modelled()
    measure()
    forget()
    assert ranked()[0] == chosen
    assert not path.is_symlink()


def test_without_a_directory_choices_last_as_long_as_the_process(tmp_path: Path) -> None:
    """A file is where the directory should be."""
    taken = tmp_path / "taken"
    taken.write_text("")
    with settings.override(cache_dir=taken):
        chosen = measure()
        assert ranked()[0] == chosen
        assert taken.read_text() == ""


def test_clearing_the_cache_clears_the_times(cache_dir: Path) -> None:
    measure()
    DiskCache(cache_dir).clear()
    assert not (cache_dir / "tuned").exists()
    forget()
    assert ranked() == modelled()


def test_shapes_without_times_are_ranked_by_the_model(cache_dir: Path) -> None:
    """However many of the same kind were measured near them."""
    for m in range(32, 200, 8):
        measure(ops.spec(m, 4096, 3072, 132))
    near = ops.spec(64, 4096, 3200, 132)
    assert ranked(near) == modelled(near)


def test_kernels_of_remembered_choices_are_compiled_ahead_if_they_will_be_used() -> None:
    shape = GemmShape(SPEC.m, SPEC.n, SPEC.k)
    asked = build.spec_of(shape, SM90)
    unlikely = modelled(asked)[-1]
    tuner.remember(asked, {unlikely: 1.0, modelled(asked)[0]: 2.0}, DEVICE)

    def configs() -> list[Any]:
        return [params.config for params in build.kernels_of(shape, SM90)]

    before = configs()
    assert unlikely not in before
    with settings.override(tune="read"):
        assert configs() == [*before, unlikely]
        assert tuner.devices() == [DEVICE]
