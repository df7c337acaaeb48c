"""What doctor makes of a machine: each finding, what to do about it, and how the last lines read."""

import io
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from deep_gemm.cli import clients, doctor
from deep_gemm.cli.app import app
from deep_gemm.cli.console import fact
from deep_gemm.cli.findings import NVRTC, judge
from deep_gemm.settings import settings

NVCC_13 = {"kind": "nvcc", "path": "/cuda/bin/nvcc", "version": "13.0", "usable": True, "chosen": True, "why": "best"}
WHEEL = {"kind": "nvrtc", "path": "/x/nvidia/cuda_nvrtc/lib/libnvrtc.so.12", "version": "12.9", "usable": True}
PACK = {"path": "/p.dgpack", "by": "DG_JIT_PRECOMPILED", "kernels": 3, "bytes": 5, "problem": None}
GPU = {"index": 1, "name": "GPU X", "capability": "7.5", "memory": 1 << 30, "sms": 40, "calibration": ""}


def report(**changes: Any) -> dict[str, Any]:
    """A machine where nothing is to be done, but for `changes`."""
    found: dict[str, Any] = {
        "package": {"path": "/x/deep_gemm", "versions": {NVRTC: "12.9"}, "torch_cuda": "13.0"},
        "gpus": [GPU | {"capability": "9.0", "arch": "sm_90a", "why": ""}],
        "driver_cuda": "13.0",
        "compilers": [NVCC_13],
        "headers": {"path": "/x/include", "files": 30},
        "post_passes": {},
        "cache": {"root": "/c", "problem": None, "writable": True, "entries": 0, "bytes": 0},
        "packs": [],
        "other_packages": [],
        "clients": [],
        "settings": [],
    }
    return found | changes


def setting(variable: str, value: str, source: str = "environment (invalid)") -> dict[str, str]:
    return {"variable": variable, "value": value, "source": source}


def actions(**changes: Any) -> list[str]:
    return [found.action for found in judge(report(**changes)) if found.action]


@pytest.mark.parametrize(
    ("changes", "needles", "stops"),
    [
        ({"compilers": []}, [f"pip install {NVRTC}"], True),
        ({"compilers": [NVCC_13 | {"chosen": False, "usable": False}]}, [f"pip install {NVRTC}"], True),
        ({"compilers": [], "packs": [PACK]}, ["If you need kernels that no pack holds"], False),
        ({"compilers": [], "settings": [setting("DG_JIT_NVCC_COMPILER", "/none", "DG_JIT_NVCC_COMPILER")]},
            ["DG_JIT_NVCC_COMPILER"], True),
        ({"compilers": [], "settings": [setting("DG_JIT_USE_NVRTC", "it is 'x'")]}, ["Correct DG_JIT_USE_NVRTC"], True),
        ({"packs": [PACK | {"kernels": 0, "problem": "it is damaged"}]}, ["/p.dgpack"], False),
        ({"headers": {"path": "/x", "files": 0}}, ["pip install --force-reinstall"], True),
        ({"other_packages": ["/y/deep_gemm"]}, ["/y/deep_gemm"], True),
        ({"gpus": [], "package": report()["package"] | {"torch_cuda": None}}, ["CUDA build of torch"], False),
        ({"gpus": []}, ["CUDA_VISIBLE_DEVICES"], False),
        ({"gpus": [GPU | {"arch": None, "why": "it has no kernels"}]}, ["DG_FALLBACK=cublaslt,triton,torch"], False),
        ({"cache": report()["cache"] | {"writable": False}}, ["DG_JIT_CACHE_DIR"], False),
        ({"cache": report()["cache"] | {"problem": "others can write to it"}}, ["DG_JIT_CACHE_DIR"], False),
        ({"misspelt": ["DG_JIT_CACHE is no setting"]}, ["Correct the name of DG_JIT_CACHE"], False),
        ({"gpus": [], "driver_cuda": None}, [], False), ({}, [], False),
    ],
)  # fmt: skip
def test_each_finding_says_what_to_do(changes: dict[str, Any], needles: list[str], stops: bool) -> None:
    told = actions(**changes)
    assert len(told) == len(needles), told
    assert all(needle in text for needle, text in zip(needles, told, strict=True)), told
    assert any(found.problem for found in judge(report(**changes))) == stops


@pytest.mark.parametrize("used", ["/lib/python3/site-packages/nvidia/cu13/lib/libnvrtc.so.13", None])
def test_the_nvrtc_that_we_depend_on_may_not_be_needed(used: str | None) -> None:
    found = [WHEEL | {"chosen": used is None}]
    found += [{"kind": "nvrtc", "path": used, "version": "13.0", "chosen": True}] if used else []
    texts = " ".join(one.text for one in judge(report(compilers=found)))
    assert ("NVRTC 13.0 is used" in texts and "217 MB on disk" in texts) == bool(used)
    assert not actions(compilers=found)


def shown(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[str]:
    found = report(**changes)
    for part in ("_package", "_gpus", "_compilers", "_post_passes", "_cache", "_packs", "_others", "_settings"):
        key = {"_others": "other_packages"}.get(part, part[1:])
        monkeypatch.setattr(doctor, part, lambda key=key: found[key])
    monkeypatch.setattr(doctor, "driver_release", lambda: (13, 0))
    monkeypatch.setattr(clients, "examine", lambda: found["clients"])
    return CliRunner().invoke(app, ["doctor"]).output.splitlines()


def test_doctor_ends_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch)[-1].endswith("Nothing to do.")
    unwritable = report()["cache"] | {"writable": False}
    lines = shown(monkeypatch, cache=unwritable, packs=[PACK | {"problem": "it is damaged"}])
    (at,) = [index for index, line in enumerate(lines) if line.endswith("To do:")]
    assert [line.split(".")[0].strip() for line in lines[at + 1 :]] == ["1", "2"]
    lines = shown(monkeypatch, compilers=[])
    assert lines[-2] == "To do:"


def test_doctor_says_that_compiling_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    with settings.override(forbid_compile=True):
        lines = shown(monkeypatch, settings=doctor._settings())
    assert lines[-1] == (
        "Kernels can be taken from packs and the cache and run here. "
        "DG_JIT_FORBID_COMPILE forbids compiling. Nothing to do."
    )


def test_the_edit_of_cubins_takes_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = {f"kernel {index}": "FFMA edit 3" if index < 2 else None for index in range(17)}
    found = [line for line in shown(monkeypatch, post_passes=passes) if "cubins" in line]
    assert found == [
        "cubins     of 2 of 17 kinds of kernels are edited after compiling by FFMA edit 3 (--json names them)"
    ]


def test_gpus_of_a_kind_take_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = report()["gpus"][0]
    gpus = [kind | {"index": index, "name": "GPU Y" if index == 2 else "GPU X"} for index in range(10)]
    found = [line.partition(", ")[0].split() for line in shown(monkeypatch, gpus=gpus) if line.startswith("GPU")]
    assert [" ".join(words) for words in found] == ["GPU 0 to 1 GPU X", "GPU 2 GPU Y", "GPU 3 to 9 GPU X"]


def test_a_misspelt_setting_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_JIT_CACHEDIR", "/x")
    monkeypatch.setenv("DG_OTHER", "1")
    assert settings.misspelt() == [
        "DG_JIT_CACHEDIR is no setting of deep_gemm, and has no effect. Did you mean DG_JIT_CACHE_DIR?",
        "DG_OTHER is no setting of deep_gemm, and has no effect. `deep-gemm doctor` and the docs list the settings.",
    ]
    for command in (["doctor"], ["cache", "info"], []):
        output = CliRunner().invoke(app, command).output
        assert "Did you mean DG_JIT_CACHE_DIR?" in " ".join(output.split())
    monkeypatch.delenv("DG_JIT_CACHEDIR")
    monkeypatch.delenv("DG_OTHER")
    assert not settings.misspelt()


def test_settings_are_shown_as_they_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_JIT_PRECOMPILED", "/a.dgpack:/b.dgpack")
    monkeypatch.setenv("CUDA_PATH", "/cuda")
    lines = CliRunner().invoke(app, ["doctor"]).output.splitlines()
    shown = [" ".join(line.split()[1:]) for line in lines if line.startswith("setting")]
    assert "DG_JIT_PRECOMPILED = /a.dgpack:/b.dgpack" in shown
    assert any("/cuda (from CUDA_PATH)" in line for line in shown)


def test_a_long_fact_is_wrapped_on_a_terminal_and_one_line_in_a_pipe() -> None:
    text = " ".join(["word"] * 30)
    for terminal in (True, False):
        file = io.StringIO()
        out = Console(file=file, force_terminal=terminal, width=60, soft_wrap=True, markup=False, color_system=None)
        fact(out, "note", text)
        lines = file.getvalue().splitlines()
        assert " ".join(" ".join(lines).split()) == f"note {text}"
        assert lines[0].startswith("note       word")
        assert (len(lines) > 1) == terminal
        assert all(line.startswith(" " * 11 + "word") for line in lines[1:])
