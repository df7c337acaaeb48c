"""What a linear layer of a model is for, by its name and by what it feeds: some stay in 16 bits when others are FP8."""

from __future__ import annotations

import collections
import re
from typing import Any

from torch import nn

from deep_gemm.aot.checkpoint import OTHER_LAYERS

WRAPPERS = re.compile(
    r"(\.(base_layer|original_module|modules_to_save\.\w+|_orig_mod|_checkpoint_wrapped_module|module))+$"
)
"""What PEFT, torch.compile and checkpointing add to the name of a layer that they wrap."""

ADAPTER = re.compile(r"(^|\.)lora(_\w+)?(\.|$)")
"""LoRA's own layers."""

ANYWHERE = re.compile(r"(^|\.)(\w+_)?(head|(router|embed(s|ding|dings|der)?)(\.\w+)?)$")
"""Heads, routers and embeddings, or a layer of these, wherever they are in a model."""

AT_THE_END = re.compile(
    r"(^|\.)((\w+_)?head|output(_layer|_projection)?|score|classifier|(to_)?logits|embed_out|proj_out|qa_outputs)(\.\w+)?$"
)
"""Heads, or a layer of one, outside of the blocks, which are numbered. Inside, they are layers like others."""

GATE = re.compile(r"(^|\.)(\w+_)?gate$")

OTHERS = "heads, embeddings, routers and gates keep their dtype unless a filter takes them"
LORA = "adapters (LoRA) keep their dtype, in which they are trained, unless a filter takes them"


class Roles:
    """The linear layers of ``model``, by name, and what they feed."""

    def __init__(self, model: nn.Module, layers: dict[str, Any]) -> None:
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._layers = {WRAPPERS.sub("", name): layer for name, layer in layers.items()}
        self._beside: dict[str, list[tuple[str, Any]]] = collections.defaultdict(list)
        for name, layer in self._layers.items():
            self._beside[name.rpartition(".")[0]].append((name, layer))
        self._tables = {tuple(x.weight.shape) for x in self._modules.values() if isinstance(x, nn.Embedding)}

    def why_kept(self, name: str) -> str:
        """Why this layer stays in its dtype, as the end of a sentence; "" if it does not."""
        if ADAPTER.search(name):
            return LORA
        name = WRAPPERS.sub("", name)
        if GATE.search(name):
            return "" if self._is_of_glu(name) else OTHERS
        is_in_block = re.search(r"(^|\.)[0-9]+\.", name) is not None
        is_named = OTHER_LAYERS.search(name) or ANYWHERE.search(name) or (not is_in_block and AT_THE_END.search(name))
        if is_named or self._chooses_experts(name) or (not is_in_block and self._makes_logits(name)):
            return OTHERS
        return ""

    def _makes_logits(self, name: str) -> bool:
        """Whether it has a row for each row of an embedding."""
        layer = self._layers[name]
        return (layer.out_features, layer.in_features) in self._tables

    def _chooses_experts(self, name: str) -> bool:
        """Whether it has a row for each module of a list of experts beside it."""
        parent = self._modules.get(name.rpartition(".")[0])
        experts = getattr(parent, "experts", None)
        return isinstance(experts, nn.ModuleList) and len(experts) == self._layers[name].out_features

    def _is_of_glu(self, name: str) -> bool:
        """Whether a layer of the same sizes is beside it, and one that multiplies what both make: gate, up and down."""
        gate = self._layers[name]
        beside = [layer for other, layer in self._beside[name.rpartition(".")[0]] if other != name]
        twins = [x for x in beside if (x.in_features, x.out_features) == (gate.in_features, gate.out_features)]
        return bool(twins) and any(x.in_features == gate.out_features for x in beside if x not in twins)
