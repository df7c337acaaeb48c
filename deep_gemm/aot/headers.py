"""The headers of safetensors files: which tensors there are, by name, dtype and shape. No data is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deep_gemm.aot import inputs
from deep_gemm.aot.inputs import shown
from deep_gemm.errors import InvalidInputError

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""

INDEX = ".safetensors.index.json"
BESIDE = ("consolidated", "adapter_", "optimizer", "pytorch_lora_weights")
"""How files begin that are no part of the model whose `model*.safetensors` they lie beside: the same weights by other
names, adapters, and the state of an optimizer."""
WIDE = frozenset(("F16", "BF16", "F32", "F64"))
"""The dtypes of weights that are not quantised."""


@dataclass(frozen=True)
class Stored:
    dtype: str
    shape: tuple[int, ...]


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a safetensors file, an index of some, or a directory that holds either."""
    if path.is_dir():
        return any(path.glob("*.safetensors")) or any(path.glob("*" + INDEX))
    return path.name.endswith((".safetensors", INDEX))


def header(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file. Raises InvalidInputError if its header is damaged."""
    try:
        with inputs.open_file(path) as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if 2 <= length <= MAX_HEADER_BYTES else b""
    except (OSError, ValueError) as error:  # a path with a zero byte raises ValueError
        raise InvalidInputError(f"{path} cannot be read: {error}.") from error
    if len(text) < 2 or len(text) != length:
        raise InvalidInputError(f"{path} is no safetensors file, or is cut: its header should have {length} bytes.")
    entries = inputs.parse_json(text, f"The header of {path}")
    if not isinstance(entries, Mapping):
        raise InvalidInputError(f"The header of {path} must be an object, but it is {shown(entries)}.")
    return {
        inputs.printable(name): _stored(entry, f"{shown(name)} of {path}")
        for name, entry in entries.items()
        if name != "__metadata__"
    }


def _stored(entry: Any, where: str) -> Stored:
    dtype = entry.get("dtype") if isinstance(entry, Mapping) else None
    shape = entry.get("shape") if isinstance(entry, Mapping) else None
    if not isinstance(dtype, str) or not isinstance(shape, list):
        raise InvalidInputError(f"{where} must have a dtype and a shape, but it is {shown(entry)}.")
    return Stored(
        inputs.printable(dtype), tuple(inputs.whole(size, f"the shape of {where}", 0, 2**62) for size in shape)
    )


def _of_model(folder: Path, pattern: str) -> list[Path]:
    main = any(folder.glob("model*.safetensors")) or any(folder.glob(f"model*{INDEX}"))
    return sorted(file for file in folder.glob(pattern) if not (main and file.name.startswith(BESIDE)))


def listed(path: Path) -> tuple[list[str], list[str]]:
    """The names of the tensors, if there is an index, and of the files, without those that are no part of the model."""
    indices = _of_model(path, "*" + INDEX) if path.is_dir() else [path] if path.name.endswith(INDEX) else []
    if not indices:
        return [], [x.name for x in _of_model(path, "*.safetensors")] if path.is_dir() else [path.name]
    if len(indices) > 1:
        raise InvalidInputError(f"{path} holds {len(indices)} indices: give the path of one.")
    data = inputs.read_file(indices[0])
    places = data.get("weight_map") if isinstance(data, Mapping) else None
    if not isinstance(places, Mapping) or not places:
        raise InvalidInputError(f"{indices[0]} must have a weight_map of names and files, but it has {shown(places)}.")
    for file in places.values():
        if not isinstance(file, str) or file != Path(file).name or not file.endswith(".safetensors"):
            raise InvalidInputError(f"weight_map of {indices[0]} must name *.safetensors, but it has {shown(file)}.")
    return list(map(inputs.printable, places)), sorted(set(places.values()))
