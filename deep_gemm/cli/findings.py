"""The findings of `deep-gemm doctor`: each in a sentence, with what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from deep_gemm.jit.cache.packs import SHIPPED
from deep_gemm.log import counted

NVRTC = "nvidia-cuda-nvrtc-cu12"
NVRTC_WHEEL = "/nvidia/cuda_nvrtc/lib/"
"""Where that wheel puts the library. The wheels of CUDA 13 use nvidia/cu13."""

NVCC = "DG_JIT_NVCC_COMPILER"


class Finding(NamedTuple):
    """`text` states the finding. `action` says what to do; it is empty if nothing has to be done. A `problem` stops
    compilation, or is dangerous."""

    text: str
    action: str = ""
    problem: bool = False


def judge(report: dict[str, Any]) -> list[Finding]:
    return [*_of_compilers(report), *_of_packs(report), *_of_install(report), *_of_gpus(report), *_of_cache(report)]


def _of_compilers(report: dict[str, Any]) -> Iterator[Finding]:
    compilers = report["compilers"]
    chosen = [compiler for compiler in compilers if compiler["chosen"]]
    packed = sum(pack["kernels"] for pack in report["packs"])
    if packed:
        kernels = counted(packed, "kernel")
        yield Finding(f"No compiler is needed, and none is looked for, for the {kernels} that packs hold.")
    if chosen and report["package"]["versions"][NVRTC] == "not installed":
        used = f"{chosen[0]['kind']} {chosen[0]['version']}"
        yield Finding(f"{NVRTC} is not installed, nor needed: {used} compiles.")
    if not chosen:
        action = _compiler_action(report)
        text = f"No compiler can be used: {'see the reasons above' if compilers else 'none was found'}."
        if packed:
            text = f"{text} Kernels that no pack holds cannot be built."
            action = action and f"If you need kernels that no pack holds: {action}"
        yield Finding(text, action, problem=not packed)
    yield from _unneeded(compilers)


def _compiler_action(report: dict[str, Any]) -> str:
    named = {entry["variable"]: entry["value"] for entry in report["settings"] if "invalid" not in entry["source"]}
    if NVCC in named:
        return f"Set {NVCC} to an nvcc that works, or unset it: {named[NVCC]} is used or none."
    if any("invalid" in entry["source"] for entry in report["settings"]):
        return ""  # no compiler is looked for before that is corrected
    return f"Install a compiler: `pip install {NVRTC}`, or set CUDA_HOME to a toolkit of CUDA 12.3 or newer."


def _unneeded(compilers: list[dict[str, Any]]) -> Iterator[Finding]:
    """Whether another NVRTC, such as the one of a torch for CUDA 13, makes the wheel that we depend on superfluous."""
    used = next((one for one in compilers if one["chosen"] and one["kind"] == "nvrtc"), None)
    wheels = [one for one in compilers if one["kind"] == "nvrtc" and NVRTC_WHEEL in one["path"]]
    if used is not None and wheels and used not in wheels:
        wheel = f"{NVRTC} ({wheels[0]['version']}, 217 MB on disk)"
        text = f"NVRTC {used['version']} is used: the wheel {wheel} is not needed here, and may be uninstalled."
        yield Finding(text)


def _of_packs(report: dict[str, Any]) -> Iterator[Finding]:
    for pack in report["packs"]:
        if pack["problem"]:
            action = f"Repair or replace the pack {pack['path']}, or stop naming it in {pack['by']}."
            if pack["by"] == SHIPPED:
                action = "Install the package again: `pip install --force-reinstall --no-deps` its wheel with kernels."
            yield Finding(f"The pack {pack['path']} is not used: {pack['problem']}.", action)


def _of_install(report: dict[str, Any]) -> Iterator[Finding]:
    if not report["headers"]["files"]:
        action = "Install the package again, in its checkout: `pip install --force-reinstall --no-deps .`."
        yield Finding(f"The device headers are missing from {report['headers']['path']}.", action, problem=True)
    if others := "; ".join(report["other_packages"]):
        action = (
            f"Keep one deep_gemm: uninstall the other, or take it off PYTHONPATH ({others}). Packages in one directory "
            "overwrite one another: then install this one again, `pip install --force-reinstall --no-deps`."
        )
        yield Finding(f"Another deep_gemm is on the path: {others}.", action, problem=True)
    for text in report.get("misspelt", ()):
        yield Finding(text, f"Correct the name of {text.partition(' ')[0]}, or unset it.")
    for entry in report["settings"]:
        if "invalid" in entry["source"]:
            yield Finding(str(entry["value"]), f"Correct {entry['variable']}, or unset it.", problem=True)


def _of_gpus(report: dict[str, Any]) -> Iterator[Finding]:
    here = f"A driver of CUDA {report['driver_cuda']} is here, but torch"
    if not report["gpus"] and report["driver_cuda"] is None:
        yield Finding("There is no GPU: kernels can be compiled ahead, and CPU tensors run the reference.")
    elif not report["gpus"] and report["package"]["torch_cuda"] is None:
        action = "Install a CUDA build of torch that this driver can run."
        yield Finding(f"{here} is a build for CPUs and sees no GPU.", action)
    elif not report["gpus"]:
        action = "Look at CUDA_VISIBLE_DEVICES, at `nvidia-smi`, and at the devices that the container is given."
        yield Finding(f"{here} sees no GPU.", action)
    for gpu in report["gpus"]:
        if gpu["why"]:
            action = (
                f"Use another GPU than GPU {gpu['index']}, or set DG_FALLBACK=cublaslt,triton,torch to run calls on it "
                "by cuBLAS, else by Triton, else by the slow reference."
            )
            yield Finding(f"GPU {gpu['index']}: {gpu['why']}", action)


def _of_cache(report: dict[str, Any]) -> Iterator[Finding]:
    cache = report["cache"]
    if not cache["writable"] or cache["problem"]:
        why = cache["problem"] or f"{cache['root']} cannot be written to"
        action = "Set DG_JIT_CACHE_DIR to a directory that only you can write to, so that kernels are compiled once."
        yield Finding(f"Kernels are kept in memory only, and compiled anew by each process: {why}.", action)
