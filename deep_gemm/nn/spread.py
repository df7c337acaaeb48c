"""Which layers have inputs whose channels are too far apart for one scale for 128 x 128 values."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from deep_gemm import quantize
from deep_gemm.errors import InvalidInputError
from deep_gemm.log import counted
from deep_gemm.nn.convert import listed
from deep_gemm.nn.moe import MoE
from deep_gemm.nn.routing import Routing
from deep_gemm.nn.weights import FP8Weights
from deep_gemm.tensors import kind_of

LIMIT = 2.0**13
"""The spread from which a channel loses accuracy: see `deep_gemm.quantize.spread`."""


class SpreadReport:
    """What `check_spread` has seen. ``print(report)`` says which layers may have the mixed recipe, and what to do with
    each of the others.

    >>> layer = deep_gemm.nn.FP8Linear(256, 128)
    >>> with deep_gemm.nn.check_spread(layer) as report:
    ...     y = layer(torch.ones(30, 256).bfloat16())
    >>> report.spreads, report.wide
    ({'': 1.0}, ())
    """

    def __init__(self, layers: Iterable[str]) -> None:
        self._seen: dict[str, Tensor | None] = dict.fromkeys(layers)

    def add(self, name: str, x: Tensor) -> None:
        """Note an input x (rows, channels) of a layer. It does not wait for the GPU."""
        if x.numel():
            largest, before = quantize.spread(x).amax(), self._seen[name]
            self._seen[name] = largest if before is None else torch.maximum(before, largest)

    @property
    def spreads(self) -> dict[str, float]:
        """The largest spread of the inputs of each layer that was called: see `deep_gemm.quantize.spread`. It waits for
        the GPU."""
        return {name: found.item() for name, found in self._seen.items() if found is not None}

    @property
    def wide(self) -> tuple[str, ...]:
        """The layers that lose accuracy by the mixed recipe: those whose spread is 2^13 or more, or NaN."""
        return tuple(name for name, spread in self.spreads.items() if not spread < LIMIT)

    @property
    def unseen(self) -> tuple[str, ...]:
        """The layers that were not called with any rows."""
        return tuple(name for name, found in self._seen.items() if found is None)

    def __str__(self) -> str:
        spreads, wide = self.spreads, self.wide
        narrow = [name for name in spreads if name not in wide]
        lines = [f"{counted(len(narrow), 'layer')} may have weight_gradient='mixed': {listed(narrow)}"]
        for name in wide:
            if math.isfinite(spreads[name]):
                why = f"has a channel 2^{math.log2(spreads[name]):.1f} below another of its 128"
                what = "set its weight_gradient to '1x128', or keep it in BF16"
            else:
                why, what = "has an input that is not finite", "look for the layer before it that overflows"
            lines.append(f"{name or 'the model'} {why}: {what}")
        if self.unseen:
            lines.append(f"not seen, because not called or inside of torch.compile: {listed(self.unseen)}")
        return "\n".join(lines)


@contextlib.contextmanager
def check_spread(model: nn.Module) -> Iterator[SpreadReport]:
    """Say which FP8 layers of ``model`` lose accuracy by ``weight_gradient="mixed"``, from your own forward passes.

    Inside of the ``with`` block each call of a layer in training mode notes how far apart the channels of its input
    are (`deep_gemm.quantize.spread`), in each block of 128 tokens by 128 channels; of a `MoE` for both of its layers.
    The mixed recipe gives such a block one scale. A layer is named if a channel lies 2^13 or more below another one.

    Args:
        model: any module with `FP8Linear`, `FP8GroupedLinear` or `MoE` in training mode. Nothing of it changes, and
            results stay the same. Call it without `torch.compile`.

    It yields a report, which may be read inside of the block and after it. Calls take longer: torch reads each input
    several times, and an MoE computes its first product twice. Raises InvalidInputError if there is no such layer.

    >>> model = torch.nn.ModuleDict({"up": deep_gemm.nn.FP8Linear(256, 128), "down": deep_gemm.nn.FP8Linear(128, 256)})
    >>> x = torch.ones(64, 256).bfloat16()
    >>> x[:, 7] = 2**-15
    >>> with deep_gemm.nn.check_spread(model) as report:
    ...     y = model["up"](x)
    >>> print(report)
    0 layers may have weight_gradient='mixed': none
    up has a channel 2^15.0 below another of its 128: set its weight_gradient to '1x128', or keep it in BF16
    not seen, because not called or inside of torch.compile: down
    """
    if not isinstance(model, nn.Module):
        raise InvalidInputError(f"model must be a torch.nn.Module, but it is {kind_of(model)}.")
    modules = list(model.named_modules())
    layers = {layer: name for name, layer in modules if isinstance(layer, FP8Weights) and layer.mode == "training"}
    if not layers:
        raise InvalidInputError(
            "model must have an FP8 layer in training mode, but it has none. Call deep_gemm.nn.convert(model) first."
        )
    report = SpreadReport(layers.values())

    def before(layer: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        x = args[0] if args else named.get("x")
        if (
            isinstance(x, Tensor)
            and x.dim()
            and x.numel()
            and x.is_floating_point()
            and not torch.compiler.is_compiling()
        ):
            report.add(layers[layer], x.detach().reshape(-1, x.shape[-1]))

    def of_experts(mixture: MoE, x: Tensor, routing: Routing) -> None:
        gate_up: Any = mixture.gate_up
        down: Any = mixture.down
        if torch.compiler.is_compiling():
            return
        with torch.no_grad():
            gate, up = mixture.hidden(x, routing).float().chunk(2, dim=1)
            report.add(layers[gate_up], routing.spread(x))
            report.add(layers[down], nn.functional.silu(gate) * up)

    with contextlib.ExitStack() as undone:
        for layer in layers:
            undone.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
        for _, mixture in modules:
            if isinstance(mixture, MoE) and isinstance(mixture.gate_up, FP8Weights) and mixture.gate_up in layers:
                watch = functools.partial(of_experts, mixture)
                mixture.watchers.append(watch)
                undone.callback(mixture.watchers.remove, watch)
        yield report
