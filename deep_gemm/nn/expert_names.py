"""The experts of a mixture as checkpoints name them: in one tensor, or expert by expert.

Names are those under a mixture's own, which is ``mlp``, ``ffn`` or ``block_sparse_moe`` in a layer of a model:
``experts.gate_up_proj_blocks`` (gpt-oss), ``experts.3.w1.weight`` (DeepSeek-V4, Mixtral), ``experts.3.up_proj.weight``
(DeepSeek-V3, Qwen3), ``experts.down_proj`` (Transformers).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deep_gemm.aot import scales as scale_names
from deep_gemm.aot.headers import Stored
from deep_gemm.errors import InvalidInputError
from deep_gemm.nn import stored
from deep_gemm.nn.fp4_linear import CODES, EXPONENTS, FP4GroupedLinear

if TYPE_CHECKING:
    from deep_gemm.nn.moe import MoE

SPELLINGS: dict[str, tuple[tuple[str, ...], ...]] = {
    "gate_up": (("gate_up_proj",), ("gate_proj", "up_proj"), ("w1", "w3")),
    "down": (("down_proj",), ("w2",)),
}
"""Of each layer of a mixture: its weight, or the parts of it, one below the other."""

ROUTERS = ("gate.weight", "gate.e_score_correction_bias", "gate.bias")
"""The router's tensors in checkpoints of DeepSeek, Mixtral and Qwen. gpt-oss's and ours are ``router.weight``."""
_TO_CORRECTION = {"bias": "e_score_correction_bias"}
"""DeepSeek-V4's ``gate.bias`` is what DeepSeek-V3 calls so."""

_VALUES = ("weight", "weight_packed", "blocks")
_SCALES = (*scale_names.NAMES, "scales")
_LEAVES = (*_VALUES, *_SCALES, "bias", scale_names.OF_INPUTS)


@dataclass(frozen=True)
class Source:
    """Where a checkpoint has a layer's weight: names without their last part, for each expert those of its parts. If
    ``is_stacked``, one name for all experts."""

    bases: tuple[tuple[str, ...], ...]
    is_stacked: bool

    def names(self, found: Container[str]) -> Iterator[str]:
        """The tensors that are read."""
        for parts in self.bases:
            for base in parts:
                ends = ("", *(f"_{leaf}" for leaf in _LEAVES)) if self.is_stacked else ()
                yield from (base + end for end in (*ends, *(f".{leaf}" for leaf in _LEAVES)) if base + end in found)


def sources(found: Container[str], prefix: str, experts: int) -> dict[str, Source]:
    """The layers of a mixture that ``found`` has under other names than the layer's own."""
    made = {}
    for layer, spellings in SPELLINGS.items():
        for parts in spellings:
            if len(parts) == 1:
                stack = Source(((f"{prefix}experts.{parts[0]}",),), is_stacked=True)
                if any(True for _ in stack.names(found)):
                    made[layer] = stack
            each = tuple(tuple(f"{prefix}experts.{e}.{part}" for part in parts) for e in range(experts))
            source = Source(each, is_stacked=False)
            if any(f"{base}.{leaf}" in found for bases in each for base in bases for leaf in _VALUES):
                made[layer] = source
    return made


def reads(found: Mapping[str, Stored], prefix: str, mixture: MoE) -> dict[str, list[str]]:
    """Which tensors of a checkpoint a mixture reads under other names than its own, for each of its own. Raises
    InvalidInputError for a weight that it cannot load."""
    made: dict[str, list[str]] = {}
    for layer, source in sources(found, prefix, mixture.gate_up.num_groups).items():
        module = getattr(mixture, layer)
        names, is_fp4 = list(source.names(found)), isinstance(module, FP4GroupedLinear)
        for base in (base for parts in source.bases for base in parts):
            _check_complete(found, base, source.is_stacked)
            if not (source.is_stacked or is_fp4) and (wrong := stored.why_not(f"{base}.", found)):
                raise InvalidInputError(f"The checkpoint does not fit the model: {wrong}")
        if not is_fp4 and any(name.endswith("_blocks") for name in names):
            raise InvalidInputError(
                f"{names[0]} are MXFP4 weights, but {prefix}{layer} has others. Build the MoE with weights='mxfp4'."
            )
        biases = [name for name in names if name.endswith("bias")]
        for own, _ in module.named_parameters():
            if own != "bias" or biases:
                made[f"{prefix}{layer}.{own}"] = names
        if biases and getattr(module, "bias", None) is None:
            raise InvalidInputError(
                f"{biases[0]} is a bias, but {prefix}{layer} has none. Build the MoE with bias=True."
            )
    for name in ROUTERS:
        if prefix + name in found:
            made[f"{prefix}router.{_router_name(name, mixture)}"] = [prefix + name]
    return made


def _check_complete(found: Container[str], base: str, is_stacked: bool) -> None:
    if not is_stacked and not any(f"{base}.{leaf}" in found for leaf in _VALUES):
        raise InvalidInputError(
            f"{base}.weight is not in the checkpoint, but weights of other experts are: a layer of experts is loaded "
            "whole."
        )


def _router_name(name: str, mixture: MoE) -> str:
    own = name.partition(".")[2]
    return own if mixture.router.bias is not None else _TO_CORRECTION.get(own, own)


def adapt(state: dict[str, Any], prefix: str, mixture: MoE) -> None:
    """Give the tensors in a state dict the names of the mixture's own, and join those of its experts. Raises
    InvalidInputError for tensors that do not fit together."""
    for name in ROUTERS:
        if prefix + name in state:
            state[f"{prefix}router.{_router_name(name, mixture)}"] = state.pop(prefix + name)
    for layer, source in sources(state, prefix, mixture.gate_up.num_groups).items():
        module, own = getattr(mixture, layer), f"{prefix}{layer}."
        if source.is_stacked:
            _rename_stack(state, source.bases[0][0], own, module)
            continue
        for base in (base for parts in source.bases for base in parts):
            _check_complete(state, base, is_stacked=False)
        join = _join_mxfp4 if isinstance(module, FP4GroupedLinear) else _join
        join(state, source.bases, own, module)


def _rename_stack(state: dict[str, Any], base: str, own: str, module: Any) -> None:
    for name in list(Source(((base,),), is_stacked=True).names(state)):
        leaf, tensor = name.removeprefix(base).lstrip("._") or "weight", state.pop(name)
        if leaf == "weight" and isinstance(tensor, Tensor) and tensor.dim() == 3:
            tensor = _as_rows(tensor, name, module)
        if leaf != scale_names.OF_INPUTS:
            state[own + leaf] = tensor


def _as_rows(tensor: Tensor, name: str, module: Any) -> Tensor:
    """Weights of all experts as (experts, N, K). Transformers has some as (experts, K, N)."""
    n, k = module.out_features, module.in_features
    if tensor.shape[1:] == (k, n) != (n, k) and not isinstance(module, FP4GroupedLinear):
        if tensor.element_size() == 1:
            raise InvalidInputError(f"{name} is (experts, K, N), and an FP8 weight must be (experts, N, K).")
        return tensor.mT.contiguous()
    return tensor


def _join_mxfp4(state: dict[str, Any], bases: tuple[tuple[str, ...], ...], own: str, module: Any) -> None:
    """Packed values, scales and bias of experts as those of all. Nothing is decoded."""
    for leaves, leaf in ((CODES, "blocks"), (EXPONENTS, "scales"), (("bias",), "bias")):
        matrices = []
        for parts in bases:
            each = [state.pop(name) for base in parts for name in (f"{base}.{x}" for x in leaves) if name in state]
            if leaf != "bias" and len(each) != len(parts):
                raise InvalidInputError(
                    f"{parts[0]} must have MXFP4 weights and scales, one of each of {', '.join(leaves)} in each of "
                    f"{len(parts)} parts, but it has {len(each)}."
                )
            if each:
                matrices.append(torch.cat([_bytes(x) for x in each]) if leaf != "bias" else torch.cat(each))
        if matrices:
            state[own + leaf] = torch.stack(matrices)
    for parts in bases:
        for base in parts:
            state.pop(f"{base}.{scale_names.OF_INPUTS}", None)


def _bytes(x: Tensor) -> Tensor:
    """torch does not join numbers of eight bits that are none of its own."""
    return x.view(torch.uint8) if x.dtype in (torch.int8, torch.float8_e8m0fnu) else x


def _join(state: dict[str, Any], bases: tuple[tuple[str, ...], ...], own: str, module: Any) -> None:
    """FP8 weights with their scales, or weights of 16 or 32 bits, as those of all experts. Parts that end inside of a
    block of 128 are cast again, since they share scales."""
    shape = tuple(module.weight.shape)
    parts = len(bases[0])
    rows = shape[1] // parts
    is_stored = module.mode == "inference" and (parts == 1 or rows % 128 == 0)
    dtype = module.weight.dtype if module.mode == "training" else torch.float32
    values = scales = None
    for e, names in enumerate(bases):
        for part, base in enumerate(names):
            before = f"{base}."
            given = state.get(f"{before}weight")
            if not isinstance(given, Tensor) or tuple(given.shape) != (rows, shape[2]):
                came = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
                raise InvalidInputError(f"{before}weight must have the shape {(rows, shape[2])}, but it is {came}.")
            stored.adapt(state, before, "inference" if is_stored else "training", dtype)
            weight, scale = state.pop(f"{before}weight"), state.pop(f"{before}weight_scale_inv", None)
            state.pop(f"{before}{scale_names.OF_INPUTS}", None)
            if values is None:
                values = torch.empty(shape, dtype=weight.dtype, device=weight.device)
            values[e, part * rows : (part + 1) * rows].copy_(weight)
            if scale is not None:
                if scales is None:
                    blocks = -(-shape[1] // 128), -(-shape[2] // 128)
                    scales = torch.empty(shape[0], *blocks, dtype=torch.float32, device=scale.device)
                scales[e, part * scale.shape[0] : (part + 1) * scale.shape[0]].copy_(scale)
    state[f"{own}weight"] = values
    if scales is not None:
        state[f"{own}weight_scale_inv"] = scales
