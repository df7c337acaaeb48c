"""Loading the safetensors files of a checkpoint into a model, file by file."""

from __future__ import annotations

import collections
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from deep_gemm.aot import headers, scales
from deep_gemm.aot.headers import Stored
from deep_gemm.errors import InvalidInputError, UnsupportedError
from deep_gemm.log import counted
from deep_gemm.nn import expert_names, stored
from deep_gemm.nn.moe import MoE
from deep_gemm.nn.weights import Divisible, FP8Weights
from deep_gemm.ops.layouts import TMA_BYTES

SCALE = "weight_scale_inv"


def load_checkpoint(
    model: nn.Module, path: str | Path, *, strict: bool = True, progress: bool = True
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Load a checkpoint into ``model``: a safetensors file, an index of several, or a directory that holds either.

    Files are read one after the other, so that host memory holds one at a time, and of a `MoE` all experts of a layer.
    A `MoE` takes the names of gpt-oss, DeepSeek, Mixtral and Qwen, with experts in one tensor or one by one. An
    `FP8Linear` takes FP8 weights with their scales and weights of 16 or 32 bits; see there. It scales its inputs
    itself, and does not read ``input_scale``. Parameters on the meta device become what the files hold, on the CPU;
    others are written in place.

    Args:
        strict: names that the model lacks, or that the files lack, are an error. Tied parameters need one name only,
            and stay tied.
        progress: show a bar while files are read, if stderr is a terminal and tqdm or rich is installed.

    Returns the names that are missing in the files, and those that the model does not have.

    Raises InvalidInputError, which names the tensors: also without ``strict`` for quantised values that the model would
    take for other numbers. UnsupportedError if the package safetensors is not installed.

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
    places, found = dict[str, str](), dict[str, Stored]()
    for file in files:
        inside = headers.header(directory / file)
        if twice := next((name for name in inside if name in places), None):
            raise InvalidInputError(f"{twice} is in {places[twice]} and in {file} of {path}: give the path of one.")
        places |= dict.fromkeys(inside, file)
        found |= inside
    modules = dict(model.named_modules(remove_duplicate=False))
    wanted = model.state_dict(keep_vars=True)
    beside = _beside(path, modules, found)
    _check_dtypes(path, modules, wanted, found)
    mixtures = _of_mixtures(modules, found)
    of_mixtures = {name: mixture for mixture, names in mixtures.items() for each in names.values() for name in each}
    beside |= {name: first for names in mixtures.values() for first, *rest in names.values() for name in rest}
    made = {name for names in mixtures.values() for name in names}
    loaded = [name for name in wanted if name in places or name in made or _is_made(name, modules, places)]
    held = {id(wanted[name]) for name in loaded}
    missing = tuple(name for name, tensor in wanted.items() if id(tensor) not in held)
    unknown = tuple(
        sorted(name for name in places if not {name} & (wanted.keys() | beside.keys() | of_mixtures.keys()))
    )
    if strict and (unknown or missing):
        sides = (missing, "not in the checkpoint"), (unknown, "not in the model")
        told = [f"{counted(len(names), 'tensor')} {where}, such as {names[0]}" for names, where in sides if names]
        raise InvalidInputError(f"{path} does not fit the model: {'; '.join(told)}. strict=False loads the rest.")
    for name in unknown:
        del places[name]
    for names in _in_steps(places, beside, files, progress):
        groups: dict[str, dict[str, Tensor]] = collections.defaultdict(dict)
        for name, tensor in read(directory, {name: places[name] for name in names}):
            module, _, own = name.rpartition(".")
            if name in of_mixtures:
                module = of_mixtures[name]
                own = name.removeprefix(f"{module}." if module else "")
            groups[module][own] = tensor
        for module, tensors in groups.items():
            if module in modules:
                _load(modules[module], module, tensors)
    _tie(modules, wanted, loaded)
    return missing, unknown


def _beside(path: Path, modules: dict[str, nn.Module], found: dict[str, Stored]) -> dict[str, str]:
    """The tensors that layers of this package read beside their weights, with the names of these. A layer scales its
    activations itself, so that it needs no scales of theirs."""
    read: dict[str, str] = {}
    for module, layer in modules.items():
        if isinstance(layer, Divisible):
            prefix = f"{module}." if module else ""
            if wrong := stored.why_not(prefix, found):
                raise InvalidInputError(f"{path} does not fit the model: {wrong}")
            names = scales.name_of(found, prefix), f"{prefix}{scales.OF_INPUTS}"
            read |= {name: f"{prefix}weight" for name in names if name in found}
    return read


def _of_mixtures(modules: dict[str, nn.Module], found: dict[str, Stored]) -> dict[str, dict[str, list[str]]]:
    """What each `MoE` reads under other names than its own: see `expert_names.reads`."""
    each = {
        module: expert_names.reads(found, f"{module}." if module else "", layer)
        for module, layer in modules.items()
        if isinstance(layer, MoE)
    }
    return {module: names for module, names in each.items() if names}


def _check_dtypes(path: Path, modules: dict[str, nn.Module], wanted: dict[str, Any], found: dict[str, Stored]) -> None:
    """Refuse quantised values where their numbers would be taken for those of 16 or 32 bits."""
    for name, tensor in wanted.items():
        module, _, own = name.rpartition(".")
        layer = modules.get(module)
        if name not in found or not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            continue
        dtype = found[name].dtype
        read = isinstance(layer, Divisible) and own in ("weight", SCALE)
        if read or dtype in headers.WIDE or dtype == stored.NAMES.get(tensor.dtype):
            continue
        kind = "FP8" if dtype.startswith("F8") else dtype
        advice = "Dequantise it first, and save it in 16 bits."
        if isinstance(layer, nn.Linear):
            advice = "Call deep_gemm.nn.convert(model) first, with a filter that takes this layer."
        raise InvalidInputError(
            f"{name} of {path} is {kind}, but the model has a {type(layer).__name__} there, which has no scales. "
            + advice
        )


def _is_made(name: str, modules: dict[str, nn.Module], places: dict[str, str]) -> bool:
    """Whether it is the scales that an FP8 layer makes or reads when it loads its weight."""
    module, _, own = name.rpartition(".")
    return own == SCALE and isinstance(modules.get(module), FP8Weights) and name.removesuffix("_scale_inv") in places


def _in_steps(places: dict[str, str], beside: dict[str, str], files: list[str], progress: bool) -> Iterator[list[str]]:
    """The names to load with each file: its own, and the scales of its weights, whichever file these are in."""
    steps: dict[str, list[str]] = {file: [] for file in files}
    for name, file in places.items():
        steps[places.get(beside.get(name, name), file)].append(name)
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


def read(directory: Path, places: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of files by name."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(set(places.values())):
        try:
            with safe_open(directory / file, framework="pt") as opened:
                for name in (name for name, place in places.items() if place == file):
                    tensor = opened.get_tensor(name)
                    # It lies in memory as in its file, where it may begin anywhere.
                    yield name, tensor if tensor.data_ptr() % TMA_BYTES == 0 else tensor.clone()
        except SafetensorError as error:
            raise InvalidInputError(f"{directory / file} cannot be read: {error}.") from error


def _load(module: nn.Module, name: str, tensors: dict[str, Tensor]) -> None:
    """Load the own parameters and buffers of a module, and of a `MoE` those of its children."""
    deep = isinstance(module, MoE)
    on_meta = any(x.device.type == "meta" for x in (*module.parameters(deep), *module.buffers(deep)))
    try:
        module.load_state_dict(tensors, strict=False, assign=on_meta)
    except RuntimeError as error:  # of another shape
        raise InvalidInputError(f"The checkpoint does not fit {name}: {error}") from error


def _tie(modules: dict[str, nn.Module], before: dict[str, Any], loaded: list[str]) -> None:
    """Parameters that were one object are one again: those on the meta device were replaced where they were loaded."""
    now = {id(before[name]): name for name in loaded}
    for name, parameter in before.items():
        other = now.get(id(parameter))
        if other not in (None, name):
            (module, _, own), (source, _, of_source) = name.rpartition("."), str(other).rpartition(".")
            setattr(modules[module], own, getattr(modules[source], of_source))
