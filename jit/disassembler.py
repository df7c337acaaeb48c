"""SASS of a cubin, through NVIDIA's disassemblers, and the files that the settings ask for beside a cubin."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

from deep_gemm.errors import CompilerNotFoundError, DeepGemmError
from deep_gemm.jit.compilers.base import Compiled
from deep_gemm.jit.process import private_directory, run
from deep_gemm.log import warn_once
from deep_gemm.settings import settings

_LIMIT = 120.0  # seconds


def find_disassembler() -> tuple[str, list[str]] | None:
    """(path, options) of nvdisasm or cuobjdump: in CUDA_HOME, on PATH, in /usr/local/cuda, or from NVIDIA's wheels."""
    # Without its analysis of data flow, which changes nothing for these GPUs, it takes two thirds of the time.
    tools = {"nvdisasm": ["--print-code", "--no-dataflow"], "cuobjdump": ["--dump-sass"]}
    for tool, options in tools.items():
        for path in _places(tool):
            if path.is_file():
                return str(path), options
    return None


def sass(cubin: bytes) -> str:
    """The disassembly of `cubin`.

    Raises CompilerNotFoundError where no disassembler is installed and DeepGemmError where it refuses the cubin.
    """
    found = find_disassembler()
    if found is None:
        raise CompilerNotFoundError(
            "SASS needs nvdisasm or cuobjdump, and neither was found on PATH, in CUDA_HOME or in the Python "
            "environment. Install one with `pip install nvidia-cuda-nvdisasm`."
        )
    path, options = found
    try:
        with private_directory() as folder:
            (folder / "kernel.cubin").write_bytes(cubin)  # a real file: nvdisasm seeks in its input
            result = run([path, *options, "kernel.cubin"], _LIMIT, folder)
    except (OSError, subprocess.SubprocessError) as error:
        raise DeepGemmError(f"{path} could not be run: {error}.") from error
    if result.returncode:
        said = (result.stderr or result.stdout).strip()
        raise DeepGemmError(f"{path} could not disassemble the cubin (exit status {result.returncode}): {said[-800:]}")
    return result.stdout


def _places(tool: str) -> list[Path]:
    places = [settings.cuda_home / "bin" / tool] if settings.cuda_home is not None else []
    on_path = shutil.which(tool)
    if on_path:
        places.append(Path(on_path))
    places.append(Path("/usr/local/cuda/bin") / tool)
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        spec = None
    for root in (spec.submodule_search_locations or []) if spec else []:
        places += sorted(Path(root).glob(f"*/bin/{tool}"), reverse=True)
    return places


def dumps(compiled: Compiled) -> dict[str, bytes]:
    """The files that the settings ask for beside a cubin."""
    files = {}
    if compiled.ptx is not None:
        files["kernel.ptx"] = compiled.ptx.encode()
    if settings.dump_sass or settings.dump_asm:
        try:
            files["kernel.sass"] = sass(compiled.cubin).encode()
        except DeepGemmError as error:
            warn_once("dump-sass", f"DG_JIT_DUMP_SASS wrote nothing: {error}")
    return files
