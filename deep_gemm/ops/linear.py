"""What a linear layer calls: its forward pass, and its backward pass, each with all casts as one call."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deep_gemm.runtime.calls import Parameter, make_entry

from ..errors import InvalidInputError
from ..parts import PARTS
from ..spec import Blocks
from .chain import Chain, Layout, Link, Links, Named, pair
from .dense import Dense
from .layouts import TMA_BYTES
from .quantize import INPUTS, Quantize
from .table import DTYPES, FP8, TORCH

RECIPES: dict[Blocks, tuple[int, int, int]] = {"column": (1, 1, 128), "tile": (1, 128, 128)}
"""The recipe of a weight gradient by the blocks of the layer's input that share a scale in it."""

_WRITTEN: tuple[tuple[str, ...], ...] = ("plain",), ("transposed",), ("plain", "transposed")
_CASTS = {names: Quantize(names) for names in _WRITTEN}
_PRODUCT, _ADDED, _BIASED = Dense(FP8), Dense(FP8, accumulates=True), Dense(FP8, epilogue_tensors=("bias",))

_BIASES = [TORCH[dtype] for part in PARTS if part.name == "bias" for dtype in part.dtypes]
"""The dtypes of a bias."""

_BLOCKS = Parameter("blocks", "Blocks", "column", choices=tuple(RECIPES))


def saved_layout(tokens: int, width: int, out: int, blocks: Blocks) -> Layout:
    """What a forward pass keeps for the backward pass: "turned", the transpose of the weight (out, width), unless
    ``out`` is 0, and "columns", the transpose of x (tokens, width), with scales of ``blocks``."""
    found = Layout()
    if out:
        found.add("turned", out, width, "tile", transposed=True)
    return found.add("columns", tokens, width, blocks, transposed=True)


@functools.lru_cache(4096)
def _known_bytes(tokens: int, width: int, out: int, blocks: Blocks) -> int:
    return saved_layout(tokens, width, out, blocks).bytes


def new_saved(x: Tensor, out: int, blocks: Blocks) -> Tensor:
    """Memory for `saved_layout`. Numbers of tokens are padded to a multiple of 16, by zeros."""
    width = x.shape[-1]
    tokens = x.numel() // width
    if torch.compiler.is_compiling():  # the number of tokens may be unknown
        size = saved_layout(tokens, width, out, blocks).bytes
    else:
        size = _known_bytes(tokens, width, out, blocks)
    new = torch.zeros if tokens % TMA_BYTES else torch.empty
    return new(size, dtype=torch.uint8, device=x.device)


def _cast(x: str, options: Mapping[str, Any], **outputs: tuple[str, Blocks]) -> Link:
    """The cast of x to casts with these names and blocks."""
    tensors: Named = {"x": x, **{output: pair(name) for output, (name, _) in outputs.items()}}
    blocks = {f"{output}_blocks": blocks for output, (_, blocks) in outputs.items()}
    return Link(_CASTS[tuple(outputs)], tensors, {**blocks, **options})


class Forward(Chain):
    """``y = x @ weight^T (+ bias)``: x (..., in) of 16 or 32 bits is cast to FP8 with scales of 1 x 128, y is
    (..., out).

    ``weight`` (out, in) is E4M3 with ``weight_scales`` of 128 x 128. Without these it has 16 or 32 bits, and is cast.
    ``saved`` are bytes, of `new_saved`: the transpose of x, and of the weight if it is cast, for `Backward`. ``blocks``
    are those of the transpose of x that share a scale. ``given``: those of weight_scales, bias and saved that are not
    None.
    """

    name = "fp8_linear"
    parameters = (
        Parameter("x", "Tensor"),
        Parameter("weight", "Tensor"),
        Parameter("y", "Tensor"),
        *(Parameter(name, "Tensor | None", None) for name in ("weight_scales", "bias", "saved")),
        _BLOCKS,
    )
    output = "y"
    rows = ("x", "y")
    kept = ("saved",)

    def __init__(self, given: tuple[str, ...]) -> None:
        self.absent = tuple(name for name in ("weight_scales", "bias", "saved") if name not in given)
        # Kernels call weights b: those that callers promise to be constant are named so.
        weights = {"b": "weight", "sfb": "weight_scales"} if "weight_scales" in given else {"weight": "weight"}
        more = [name for name in ("bias", "saved") if name in given]
        self.operands = {"x": "x", **weights, "y": "y", **{name: name for name in more}}
        self.outputs = ("y", "saved") if "saved" in given else ("y",)
        self.weights = ("b", "sfb") if "weight_scales" in given else ()
        self.unsigned = (*(("b",) if self.weights else ()), *(("saved",) if "saved" in given else ()))

    def links(self, given: Mapping[str, Any]) -> Links:
        """The casts, and the product."""
        (tokens, width), (out, columns), blocks = given["x"].shape, given["weight"].shape, given["blocks"]
        if columns != width:
            raise InvalidInputError(f"weight must have {width} columns, as x does, but it is {(out, columns)}.")
        if given["weight_scales"] is None and given["weight"].dtype not in INPUTS:
            known = ", ".join(map(str, INPUTS))
            raise InvalidInputError(f"weight must be one of {known}, but it is {given['weight'].dtype}.")
        keeps, is_cast, bias = given["saved"] is not None, given["weight_scales"] is None, given["bias"]
        scratch, links = Layout().add("rows", tokens, width, "row"), list[Link]()
        saved = saved_layout(tokens, width, out if is_cast else 0, blocks) if keeps else Layout()
        if is_cast:
            scratch.add("w", out, width, "tile")
            turned: dict[str, tuple[str, Blocks]] = {"transposed": ("turned", "tile")} if keeps else {}
            links.append(_cast("weight", {}, plain=("w", "tile"), **turned))
        of_x: dict[str, tuple[str, Blocks]] = {"transposed": ("columns", blocks)} if keeps else {}
        links.append(_cast("x", {}, plain=("rows", "row"), **of_x))
        tensors: Named = {"a": pair("rows"), "b": pair("w") if is_cast else ("b", "sfb"), "d": "y"}
        if bias is None:
            links.append(Link(_PRODUCT, tensors, {}))
        else:
            links.append(Link(_BIASED, {**tensors, "bias": "bias"}, {"epilogue": f"bias:{_dtype_of(bias)}"}))
        return Links(links, scratch, saved, bool(keeps and tokens % TMA_BYTES))


class Backward(Chain):
    """``dx = dy @ weight`` and ``dw (+)= dy^T @ x``, for dy (..., out) of 16 or 32 bits, which is cast to FP8 with
    scales of 1 x 128. dx (..., in) or dw (out, in) may be None.

    ``saved`` and ``blocks`` are those of `Forward`. If that did not cast the weight, ``turned`` is its transpose (in,
    out) in E4M3, with ``turned_scales`` of 128 x 128. ``accumulate``: the weight gradient is added to dw. ``given``:
    those of turned, turned_scales, dx and dw that are not None.
    """

    name = "fp8_linear_backward"
    parameters = (
        Parameter("dy", "Tensor"),
        Parameter("saved", "Tensor"),
        *(Parameter(name, "Tensor | None", None) for name in ("turned", "turned_scales", "dx", "dw")),
        Parameter("accumulate", "bool", False),
        _BLOCKS,
    )
    rows = ("dy", "dx")
    kept = ("dw",)

    def __init__(self, given: tuple[str, ...]) -> None:
        self.absent = tuple(name for name in ("turned", "turned_scales", "dx", "dw") if name not in given)
        names = {"turned": "w", "turned_scales": "sfw"}
        self.operands = {"dy": "dy", "saved": "saved", **{names.get(name, name): name for name in given}}
        self.outputs = tuple(name for name in ("dx", "dw") if name in given)
        self.output = self.outputs[0]
        self.unsigned = ("saved", *(("w",) if "turned" in given else ()))

    def links(self, given: Mapping[str, Any]) -> Links:
        """The cast of dy, and the products."""
        (tokens, out), blocks, dx, dw = given["dy"].shape, given["blocks"], given["dx"], given["dw"]
        width = (dw if dx is None else dx).shape[1]
        scratch, links, outputs = Layout(), list[Link](), dict[str, tuple[str, Blocks]]()
        if dx is not None:
            scratch.add("rows", tokens, out, "row")
            outputs["plain"] = "rows", "row"
            turned = pair("turned") if given["turned"] is None else ("w", "sfw")
            links.append(Link(_PRODUCT, {"a": pair("rows"), "b": turned, "d": "dx"}, {}))
        if dw is not None:
            scratch.add("columns of dy", tokens, out, "column", transposed=True)
            outputs["transposed"] = "columns of dy", "column"
            pairs: Named = {"a": pair("columns of dy", padded=True), "b": pair("columns", padded=True)}
            added: Named = {"c": "dw"} if given["accumulate"] else {}
            product, recipe = _ADDED if added else _PRODUCT, {"recipe": RECIPES[blocks]}
            links.append(Link(product, {**pairs, **added, "d": "dw"}, recipe))
        saved = saved_layout(tokens, width, out if given["turned"] is None else 0, blocks)
        # The mean over many tokens makes gradients small: none is too small.
        links.insert(0, _cast("dy", {"epsilon": 0.0}, **outputs))
        return Links(links, scratch, saved, bool(dw is not None and tokens % TMA_BYTES))


def _dtype_of(bias: Tensor) -> str:
    if bias.dtype not in _BIASES:
        known = ", ".join(map(str, _BIASES))
        raise InvalidInputError(f"bias must be one of {known}, but it is {bias.dtype}. Pass bias.float().")
    return DTYPES[bias.dtype]


def _subsets(*names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """All sets of these optional arguments, of which those in one tuple come together; the smallest first."""
    chosen = [sum(each, ()) for count in range(len(names) + 1) for each in itertools.combinations(names, count)]
    return sorted(chosen, key=len)


forward = make_entry(*(Forward(given) for given in _subsets(("weight_scales",), ("bias",), ("saved",))))
"""Arguments: x, weight, y, weight_scales, bias and saved or None, blocks. See `Forward`."""
backward = make_entry(
    *(Backward(given) for given in _subsets(("turned", "turned_scales"), ("dx",), ("dw",)) if {*given} & {"dx", "dw"})
)
"""Arguments: dy, saved, turned, turned_scales, dx and dw or None, accumulate, blocks. See `Backward`."""
