"""The findings of `deep-gemm doctor`: each in a sentence, with what to do about it."""

from __future__ import annotations

from typing import Any, NamedTuple

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


def _of_compilers(report: dict[str, Any]) -> list[Finding]:
    compilers = report["compilers"]
    chosen = [compiler for compiler in compilers if compiler["chosen"]]
    packed = sum(pack["kernels"] for pack in report["packs"])
    found = []
    if packed:
        text = f"No compiler is needed, and none is looked for, for the {counted(packed, 'kernel')} that packs hold."
        found.append(Finding(text))
    if chosen and report["package"]["versions"][NVRTC] == "not installed":
        text = f"{NVRTC} is not installed, nor needed: {chosen[0]['kind']} {chosen[0]['version']} compiles."
        found.append(Finding(text))
    if not chosen:
        action = _compiler_action(report)
        text = f"No compiler can be used: {'see the reasons above' if compilers else 'none was found'}."
        if packed:
            text = f"{text} Kernels that no pack holds cannot be built."
            action = action and f"If you need kernels that no pack holds: {action}"
        found.append(Finding(text, action, problem=not packed))
    return found + _unneeded(compilers)


def _compiler_action(report: dict[str, Any]) -> str:
    named = {entry["variable"]: entry["value"] for entry in report["settings"] if "invalid" not in entry["source"]}
    if NVCC in named:
        return f"Set {NVCC} to an nvcc that works, or unset it: {named[NVCC]} is used or none."
    if any("invalid" in entry["source"] for entry in report["settings"]):
        return ""  # no compiler is looked for before that is corrected
    return f"Install a compiler: `pip install {NVRTC}`, or set CUDA_HOME to a toolkit of CUDA 12.3 or newer."


def _unneeded(compilers: list[dict[str, Any]]) -> list[Finding]:
    """Whether another NVRTC, such as the one of a torch for CUDA 13, makes the wheel that we depend on superfluous."""
    used = next((one for one in compilers if one["chosen"] and one["kind"] == "nvrtc"), None)
    wheels = [one for one in compilers if one["kind"] == "nvrtc" and NVRTC_WHEEL in one["path"]]
    if used is None or not wheels or used in wheels:
        return []
    wheel = f"{NVRTC} ({wheels[0]['version']}, 217 MB)"
    return [Finding(f"NVRTC {used['version']} is used: the wheel {wheel} is not needed here, and may be uninstalled.")]


def _of_packs(report: dict[str, Any]) -> list[Finding]:
    return [
        Finding(
            f"The pack {pack['path']} is not used: {pack['problem']}.",
            f"Repair or replace the pack {pack['path']}, or stop naming it in {pack['by']}.",
        )
        for pack in report["packs"]
        if pack["problem"]
    ]


def _of_install(report: dict[str, Any]) -> list[Finding]:
    found = []
    if not report["headers"]["files"]:
        text = f"The device headers are missing from {report['headers']['path']}."
        action = "Install the package again: `pip install --force-reinstall --no-deps deep-gemm-jit`."
        found.append(Finding(text, action, problem=True))
    if others := "; ".join(report["other_packages"]):
        action = f"Keep one deep_gemm: uninstall the other, or take it off PYTHONPATH ({others})."
        found.append(Finding(f"Another deep_gemm is on the path: {others}.", action, problem=True))
    for text in report.get("misspelt", ()):
        name = text.partition(" ")[0]
        found.append(Finding(text, f"Correct the name of {name}, or unset it."))
    for entry in report["settings"]:
        if "invalid" in entry["source"]:
            action = f"Correct {entry['variable']}, or unset it."
            found.append(Finding(str(entry["value"]), action, problem=True))
    return found


def _of_gpus(report: dict[str, Any]) -> list[Finding]:
    found = []
    if not report["gpus"]:
        text = "There is no GPU: kernels can be compiled ahead, and CPU tensors run the reference."
        if report["driver_cuda"] is None:
            found.append(Finding(text))
        elif report["package"]["torch_cuda"] is None:
            text = f"A driver of CUDA {report['driver_cuda']} is here, but torch is a build for CPUs and sees no GPU."
            found.append(Finding(text, "Install a CUDA build of torch that this driver can run."))
        else:
            text = f"A driver of CUDA {report['driver_cuda']} is here, but torch sees no GPU."
            action = "Look at CUDA_VISIBLE_DEVICES, at `nvidia-smi`, and at the devices that the container is given."
            found.append(Finding(text, action))
    for gpu in report["gpus"]:
        if gpu["why"]:
            action = (
                f"Use another GPU than GPU {gpu['index']}, or set DG_FALLBACK=cublaslt,triton,torch to run calls on it "
                "by cuBLAS, else by Triton, else by the slow reference."
            )
            found.append(Finding(f"GPU {gpu['index']}: {gpu['why']}", action))
    return found


def _of_cache(report: dict[str, Any]) -> list[Finding]:
    cache = report["cache"]
    if cache["writable"] and not cache["problem"]:
        return []
    why = cache["problem"] or f"{cache['root']} cannot be written to"
    action = "Set DG_JIT_CACHE_DIR to a directory that only you can write to, so that kernels are compiled once."
    return [Finding(f"Kernels are kept in memory only, and compiled anew by each process: {why}.", action)]
