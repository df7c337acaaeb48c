"""Loading the safetensors files of a checkpoint into a model, file by file."""

from __future__ import annotations

import collections
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from deep_gemm.aot import headers
from deep_gemm.errors import InvalidInputError, UnsupportedError
from deep_gemm.log import counted
from deep_gemm.nn.weights import FP8Weights

SCALE = "weight_scale_inv"


def load_checkpoint(
    model: nn.Module, path: str | Path, *, strict: bool = True, progress: bool = True
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Load a checkpoint into ``model``: a safetensors file, an index of several, or a directory that holds either.

    Files are read one after the other, so that host memory holds one at a time. An `FP8Linear` takes FP8 weights with
    ``weight_scale_inv`` and weights of 16 or 32 bits; see there. Parameters on the meta device become what the files
    hold, on the CPU; others are written in place.

    Args:
        strict: names that the model lacks, or that the files lack, are an error. Tied parameters need one name only,
            and stay tied.
        progress: show a bar while files are read, if stderr is a terminal and tqdm or rich is installed.

    Returns the names that are missing in the files, and those that the model does not have.

    Raises InvalidInputError, which names the tensors; UnsupportedError if the package safetensors is not installed.

    >>> from safetensors.torch import save_file
    >>> save_file({"weight": torch.ones(32, 64), "bias": torch.ones(32)}, "layer.safetensors")
    >>> deep_gemm.nn.load_checkpoint(torch.nn.Linear(64, 32), "layer.safetensors")
    ((), ())
    """
    if importlib.util.find_spec("safetensors") is None:
        raise UnsupportedError(
            "load_checkpoint reads files with safetensors, which is not installed: pip install safetensors"
        )
    path = Path(path)
    if not path.exists():
        raise InvalidInputError(
            f"path must be that of a safetensors file, an index or a directory, but {path} is none."
        )
    _, files = headers.listed(path)
    directory = path if path.is_dir() else path.parent
    if not files or not all((directory / file).is_file() for file in files):
        absent = [file for file in files if not (directory / file).is_file()]
        raise InvalidInputError(f"{path} has no {absent[0] if absent else 'safetensors file'}: give the path of one.")
    places, modules, scaled = dict[str, str](), dict(model.named_modules()), set[str]()
    for file in files:
        for name, found in headers.header(directory / file).items():
            places[name] = file
            if found.dtype == "F8_E4M3":
                scaled.add(f"{name}_scale_inv")
            _check_dtype(path, name, found.dtype, modules)
    wanted = model.state_dict(keep_vars=True)
    unknown = tuple(sorted(name for name in places if name not in wanted and not _is_read(name, modules)))
    held = {id(wanted[name]) for name in places if name in wanted}
    missing = tuple(
        name
        for name, tensor in wanted.items()
        if id(tensor) not in held
        and (name in scaled or not (name.endswith(SCALE) and name.removesuffix("_scale_inv") in places))
    )
    if strict and (unknown or missing):
        sides = (missing, "not in the checkpoint"), (unknown, "not in the model")
        told = [f"{counted(len(names), 'tensor')} {where}, such as {names[0]}" for names, where in sides if names]
        raise InvalidInputError(f"{path} does not fit the model: {'; '.join(told)}. strict=False loads the rest.")
    for names in _in_steps(places, files, progress):
        groups: dict[str, dict[str, Tensor]] = collections.defaultdict(dict)
        for name, tensor in _read(directory, {name: places[name] for name in names}):
            module, _, own = name.rpartition(".")
            groups[module][own] = tensor
        for module, tensors in groups.items():
            if module in modules:
                _load(modules[module], module, tensors)
    _tie(modules, wanted, places)
    return missing, unknown


def _check_dtype(path: Path, name: str, dtype: str, modules: dict[str, nn.Module]) -> None:
    """Refuse FP8 values for a module that would take them without their scales."""
    module = modules.get(name.rpartition(".")[0])
    if dtype == "F8_E4M3" and module is not None and not isinstance(module, FP8Weights):
        raise InvalidInputError(
            f"{name} of {path} is FP8, but the model has a {type(module).__name__} there, which has no scales. Call "
            "deep_gemm.nn.convert(model) first, with a filter that takes this layer."
        )


def _is_read(name: str, modules: dict[str, nn.Module]) -> bool:
    """Whether a layer reads scales that it does not keep: one in training mode."""
    module, _, own = name.rpartition(".")
    return own == SCALE and isinstance(modules.get(module), FP8Weights)


def _in_steps(places: dict[str, str], files: list[str], progress: bool) -> Iterator[list[str]]:
    """The names to load with each file: its own, and the scales of its weights, whichever file these are in."""
    steps: dict[str, list[str]] = {file: [] for file in files}
    for name, file in places.items():
        weight = name.removesuffix("_scale_inv")
        steps[places.get(weight, file) if name.endswith(f".{SCALE}") else file].append(name)
    for file in _shown(files, progress):
        yield steps[file]


def _shown(files: list[str], progress: bool) -> Iterable[str]:
    if not progress or not sys.stderr.isatty():
        return files
    if importlib.util.find_spec("tqdm") is not None:
        from tqdm.auto import tqdm

        return tqdm(files, desc="loading", unit="file")
    if importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.progress import track

        return track(files, description="loading", console=Console(stderr=True))
    return files


def _read(directory: Path, places: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for file in sorted(set(places.values())):
        with safe_open(directory / file, framework="pt") as opened:
            for name in (name for name, place in places.items() if place == file):
                yield name, opened.get_tensor(name)


def _load(module: nn.Module, name: str, tensors: dict[str, Tensor]) -> None:
    """Load the own parameters and buffers of a module, not those of its children."""
    on_meta = any(x.device.type == "meta" for x in (*module.parameters(False), *module.buffers(False)))
    try:
        module.load_state_dict(tensors, strict=False, assign=on_meta)
    except RuntimeError as error:  # of another shape
        raise InvalidInputError(f"The checkpoint does not fit {name}: {error}") from error


def _tie(modules: dict[str, nn.Module], before: dict[str, Any], places: dict[str, str]) -> None:
    """Parameters that were one object are one again: those on the meta device were replaced where a file names them."""
    now = {id(before[name]): name for name in places if name in before}
    for name, parameter in before.items():
        other = now.get(id(parameter))
        if other not in (None, name):
            (module, _, own), (source, _, of_source) = name.rpartition("."), str(other).rpartition(".")
            setattr(modules[module], own, getattr(modules[source], of_source))
