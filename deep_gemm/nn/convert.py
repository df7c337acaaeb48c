"""Converting the linear layers of a model."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn

from deep_gemm.errors import InvalidInputError
from deep_gemm.log import counted
from deep_gemm.nn.linear import BF16Linear, FP8Linear, why_not_options
from deep_gemm.nn.roles import Roles
from deep_gemm.nn.weights import why_not
from deep_gemm.tensors import kind_of

Filter: TypeAlias = Callable[[str, nn.Module], bool]
Decide: TypeAlias = Callable[[str, nn.Module], str]
"""Why a layer is kept, by its name, as the end of a sentence; "" if it is not."""
Place: TypeAlias = tuple[str, nn.Module | None, str, nn.Module]
Owners: TypeAlias = dict[int, list[tuple[str, nn.Module]]]


@dataclass(frozen=True)
class Report:
    """What `convert` did. ``print(report)`` shows layers that differ only in the numbers of their blocks as one.

    >>> deep_gemm.nn.convert(torch.nn.Sequential(torch.nn.Linear(64, 128))).converted
    ('0',)
    """

    converted: tuple[str, ...] = ()
    """The names of the layers that were converted."""
    kept: Mapping[str, str] = field(default_factory=dict)
    """The layers that stay as they were, by name, and why."""

    def __str__(self) -> str:
        lines = [f"{counted(len(self.converted), 'linear layer')} converted: {listed(self.converted)}"]
        for why in dict.fromkeys(self.kept.values()):
            lines.append(f"kept, because {why}: {listed([x for x in self.kept if self.kept[x] == why])}")
        return "\n".join(lines)


def convert(model: nn.Module, filter: Filter | None = None, **options: Any) -> Report:
    """Put an `FP8Linear` in the place of each linear layer of ``model`` that can be one, and say what was done.

    Args:
        model: any module; its layers are replaced in place. It may be on the meta device.
        filter: called with the name and the module of each linear layer; False keeps it. Without a filter, heads,
            embeddings, routers and their gates stay, and LoRA's adapters: by their names (``lm_head``, ``score``,
            ``router``, ``lora_A``), and by what they feed: a layer with a row for each row of an embedding makes
            logits, one with a row for each of the ``experts`` beside it chooses among these. A ``gate`` with a twin and
            a layer that takes both is one of a gated MLP, and is converted.
        options: keywords of `FP8Linear`: ``mode="inference"`` drops the weights of 16 or 32 bits.

    In training mode parameters stay the same objects, so that an optimizer made before goes on. Layers that cannot be
    converted are no error: the report names each, with the reason. An `FP8Linear` of the other mode is converted too.

    >>> model = torch.nn.ModuleDict({"up": torch.nn.Linear(64, 128), "odd": torch.nn.Linear(64, 20)})
    >>> print(deep_gemm.nn.convert(model))
    1 linear layer converted: up
    kept, because out_features must be a multiple of 16, but it is 20: odd
    """
    if not isinstance(model, nn.Module):
        raise InvalidInputError(f"model must be a torch.nn.Module, but it is {kind_of(model)}.")
    FP8Linear(16, 16, **{**options, "device": "meta"})  # refuses wrong options before a layer is replaced
    owners = owners_of(model)
    converted: list[str] = []
    kept: dict[str, str] = {}
    made: dict[nn.Module, nn.Module] = {}
    linears = list(_linears(model))
    decide = _by_role(model, linears) if filter is None else _by_filter(filter)
    for name, parent, own, layer in linears:
        why = _why_kept(name, layer, parent, decide, owners, options)
        if why:
            kept[name] = why
            continue
        if layer not in made:
            made[layer] = FP8Linear.from_linear(layer, **options)
        setattr(parent, own, made[layer])
        converted.append(name)
    _leave_fused_path(model)
    return Report(tuple(converted), kept)


def _leave_fused_path(model: nn.Module) -> None:
    """Have torch's encoder layers call the FP8 layers in them: without gradients they read their weights themselves."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and any(isinstance(x, FP8Linear) for x in module.children()):
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder) and any(isinstance(x, FP8Linear) for x in module.modules()):
            module.use_nested_tensor = False


def _by_role(model: nn.Module, linears: list[Place]) -> Decide:
    roles = Roles(model, {name: layer for name, _, _, layer in linears})
    return lambda name, _: roles.why_kept(name)


def _by_filter(filter: Filter) -> Decide:
    return lambda name, layer: "" if filter(name, layer) else "the filter keeps it"


def _linears(model: nn.Module) -> Iterator[Place]:
    """Each linear layer: its name, its parent and its name there. A layer that has two names comes twice."""
    if isinstance(model, nn.Linear):
        yield "", None, "", model
    for prefix, parent in model.named_modules():
        for own, layer in parent._modules.items():
            if isinstance(layer, nn.Linear):
                yield f"{prefix}.{own}".strip("."), parent, own, layer


def owners_of(model: nn.Module) -> Owners:
    """The modules that hold each parameter, and their names, by its id."""
    found: Owners = collections.defaultdict(list)
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            found[id(parameter)].append((name, module))
    return found


def _why_kept(
    name: str,
    layer: Any,
    parent: nn.Module | None,
    decide: Decide,
    owners: Owners,
    options: Mapping[str, Any],
) -> str:
    """Why a layer stays as it is, as the end of a sentence; "" if it is converted."""
    if parent is None:
        return "it is the model itself, which cannot be replaced in place: use FP8Linear.from_linear"
    if wrong := decide(name, layer):
        return wrong
    if type(layer) is BF16Linear:
        return "it is a BF16Linear: use FP8Linear.from_linear"
    if type(layer) not in (nn.Linear, FP8Linear):
        return f"it is a {type(layer).__name__}, a subclass of Linear that may do something else"
    mode = options.get("mode", "training")
    if isinstance(layer, FP8Linear) and layer.mode == mode:
        return f"it is an FP8Linear in {mode} mode already"
    others = [other for other, module in owners[id(layer.weight)] if module is not layer]
    if others:
        return f"it shares its weight with {others[0]}"
    if any((layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)):
        return "it has hooks, which a new layer would lose"
    if "forward" in vars(layer):
        return "its forward was replaced, which a new layer would lose"
    if type(layer.weight) not in (nn.Parameter, Tensor):
        return (
            f"its weight is a {type(layer.weight).__name__}: convert the model before its weights are sharded or packed"
        )
    if (wrong := why_not_options(layer, options)) or isinstance(layer, FP8Linear):
        return wrong
    return why_not(layer.in_features, layer.out_features, layer.weight.dtype)


def listed(names: Iterable[str]) -> str:
    """Names. Those that differ in the numbers of what they are in are one, with how often it comes."""
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for name in names:
        groups[re.sub(r"(?<![^.])[0-9]+(?=\.)", "*", name)].append(name or "the model")
    told = (f"{group} ({len(found)})" if len(found) > 1 else found[0] for group, found in groups.items())
    return ", ".join(told) or "none"
