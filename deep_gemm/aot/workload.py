"""Which GEMMs will run on one GPU: from a list, a file, a model's `config.json`, or its checkpoint. Pure functions."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deep_gemm.aot import checkpoint, headers, inputs, model
from deep_gemm.aot.experts import in_groups
from deep_gemm.aot.inputs import shown
from deep_gemm.aot.layers import (
    BATCHED_OPS,
    DENSE_OPS,
    FP4_BLOCK,
    FP4_GROUPED_OPS,
    FP4_OPS,
    FP8,
    GROUPED_OPS,
    SCALED_OPS,
    WGRAD,
    Layer,
    LayerPlan,
    check_op,
    is_masked,
)
from deep_gemm.errors import InvalidInputError
from deep_gemm.log import counted
from deep_gemm.parts import NO_PARTS, Parts
from deep_gemm.select import representatives

DEFAULT_M = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
"""Sizes of M from decode to prefill that reach the selector's choices; M itself is no part of a kernel's identity."""

K_MULTIPLE = 16
"""TMA reads rows of FP8 in units of 16 bytes."""

MAX_M = 16384
"""The default of the largest M for which kernels are prepared."""


@dataclass(frozen=True, order=True)
class GemmShape:
    """D (m x n) = A (m x k) @ B (n x k)^T by `op`; `source` says which layer it is.

    If `op` has groups, there is a B for each of `groups`, and m counts the rows of all. In the masked form m counts the
    room of one group, of which `expected_m` rows are expected to be used; 0 means all of them. In a batch m counts the
    rows of each product."""

    m: int
    n: int
    k: int
    source: str = ""
    op: str = FP8
    groups: int = 1
    expected_m: int = 0
    epilogue: Parts = NO_PARTS

    @property
    def expected(self) -> int:
        """Rows of a masked group that the choice of a kernel goes by: `expected_m` as calls round it."""
        return min(self.m, 1 << (self.expected_m - 1).bit_length()) if self.expected_m > 0 else self.m

    @property
    def rows(self) -> int:
        """Rows of A that are multiplied; of masked groups those that are expected."""
        if self.op in BATCHED_OPS:
            return self.groups * self.m
        return self.groups * min(self.m, self.expected_m or self.m) if is_masked(self.op) else self.m

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.n * self.k

    def bytes_moved(self) -> int:
        """Each operand, its scales and a 16-bit output once: the least that must be moved."""
        m, k, n, weights = self.rows, self.k, self.n, self.groups * self.n * self.k
        if self.op in FP4_OPS:
            of_a = m * k + 4 * m * -(-k // 128) if "fp8" in self.op else 2 * m * k
            return of_a + weights // 2 + weights // FP4_BLOCK + 2 * m * n
        if self.op not in SCALED_OPS:
            return 2 * (m * k + weights + m * n)
        blocks = -(-k // 128)
        if self.op == WGRAD:  # float32, read and written
            return m * k + weights + 8 * m * n + 4 * blocks * (m + n)
        return m * k + weights + 2 * m * n + 4 * blocks * (m + self.groups * -(-n // 128))

    def __str__(self) -> str:
        grouped = self.op in (*GROUPED_OPS, *FP4_GROUPED_OPS, *BATCHED_OPS)
        groups = f" in {counted(self.groups, 'group')}" if grouped else ""
        finished = f" with {self.epilogue}" if self.epilogue else ""
        return f"{self.m} x {self.n} x {self.k}{groups}" + ("" if self.op == FP8 else f" of {self.op}") + finished


def shapes(
    layers: Iterable[Layer], ms: Sequence[int], training: bool = False, epilogues: Sequence[Parts] = ()
) -> list[GemmShape]:
    """Every layer that has kernels, at its own sizes of M if it has some, else at every M of `ms`. `training`: also the
    gradients of layers in FP8, of the input and of the weight. The K of the latter are the M tokens. `untrained` says
    what is left out. Each layer also with those of `epilogues` that its operation takes."""
    found = []
    for x in layers:
        for m in () if x.why_not else (x.ms or ms):
            found.append(GemmShape(m, x.n, x.k, x.name, x.op, x.groups))
            plain = found[-1]
            found += [replace(plain, epilogue=parts) for parts in epilogues if _takes(x.op, parts)]
            if training and x.op == FP8:
                if x.n % K_MULTIPLE == 0:
                    found.append(GemmShape(m, x.k, x.n, f"input gradient of {x.name}", FP8))
                if m % K_MULTIPLE == 0:
                    found.append(GemmShape(x.n, x.k, m, f"weight gradient of {x.name}", WGRAD))
    return found


def _takes(op: str, parts: Parts) -> bool:
    """Whether calls of this operation may have such an epilogue."""
    return op in DENSE_OPS or (op in GROUPED_OPS and not (parts.refusal(groups=True) or parts.expression))


def untrained(layers: Iterable[Layer]) -> tuple[str, ...]:
    """Sentences about the gradients of these layers that `shapes` leaves out, for every M."""
    found = []
    others: dict[str, list[str]] = {}
    for x in layers:
        if x.why_not:
            continue
        if x.op != FP8:
            others.setdefault(x.op, []).append(x.name or f"{x.n} x {x.k}")
        elif x.n % K_MULTIPLE:
            found.append(
                f"the input gradient of {x.name or 'the layer'} ({x.n} x {x.k}) has no kernel: its K is {x.n}, no "
                f"multiple of {K_MULTIPLE}."
            )
    for op, names in others.items():
        told = ", ".join(names[:4]) + (f" and {len(names) - 4} others" if len(names) > 4 else "")
        found.append(f"gradients of {op} are not compiled ahead ({told}): call each shape once.")
    return tuple(found)


def for_every_m(layers: Iterable[Layer], tokens: int) -> list[Layer]:
    """The layers with every M that the selector tells apart, up to `tokens` on each GPU. Layers keep sizes of their
    own."""
    return [x if x.ms else replace(x, ms=tuple(representatives(x.most_rows(tokens)))) for x in layers]


def parse(text: str) -> Layer:
    """ "64x7168x2048" is M x N x K, "7168x2048" N x K. Raises InvalidInputError."""
    *m, n, k = inputs.parse_dimensions(text)
    return Layer("", n, k, ms=tuple(m))


def shapes_of(what: Any, ms: Sequence[int] = DEFAULT_M, tp: int = 1, ep: int = 1) -> list[GemmShape]:
    """The shapes of a workload in any form that `plan` takes; where M is not given, each of `ms`."""
    return shapes(plan(what, tp, ep).layers, ms)


def plan(what: Any, tp: int = 1, ep: int = 1, op: str = "") -> LayerPlan:
    """The layers of a workload, and what of it was not understood.

    `what` is one of these, or a list of them:
    - a shape: a `GemmShape`, a `Layer`, "64x7168x2048" (M x N x K), "7168x2048" (N x K), (n, k), or an entry as below.
      Three numbers without names are refused: they could be M, N, K or N, K, groups;
    - a model's Hugging Face configuration, or the path of its `config.json`;
    - the path of a checkpoint: its directory, its `*.safetensors` or its `*.safetensors.index.json`. Names, sizes,
      formats and scales are then those of its tensors; only headers are read;
    - a list of entries `{"n": ..., "k": ..., "m": number or list, "name": ..., "op": ..., "groups": ...}`, with n and k
      required, or `{"m": [...], "shapes": [entries]}`, or the path of a JSON or YAML file that holds one.

    `tp` GPUs share each layer, and `ep` GPUs the routed experts, as `deep_gemm.aot.model.plan` says. `op` is the
    operation where none is given: if it is "", shapes run "fp8_gemm_nt" and models the operation of their dtype. Shapes
    of more than one group are a layer in each form (`layers.FORMS`), unless their operation names one. Raises
    InvalidInputError for anything else, and UnsupportedError for groups of an operation that has none.
    """
    check_op(op, grouped=True)
    model.degrees(tp, ep)
    if isinstance(what, Mapping) and {"n", "k"} <= set(what):
        return LayerPlan(_entry(what, shown(what), (), op))
    if isinstance(what, Mapping):
        return _described(what, "the description", tp, ep, op)
    if isinstance(what, str) and inputs.is_shape(what):
        return LayerPlan((replace(parse(what), op=op or FP8),))
    if isinstance(what, str | os.PathLike):
        return _file(Path(what), tp, ep, op)
    if isinstance(what, GemmShape):
        m = inputs.whole(what.m, f"m of {shown(what)}")
        ms = (what.expected if is_masked(what.op) else m,)
        return LayerPlan(_layers(what.source, what.n, what.k, ms, shown(what), what.op, what.groups))
    if isinstance(what, Layer):
        return LayerPlan((what,) if what.why_not else _checked(what))
    if isinstance(what, Iterable) and not isinstance(what, bytes | bytearray):
        items = list(what)
        if isinstance(what, tuple) and len(items) >= 2 and all(isinstance(item, int) for item in items):
            if len(items) > 2:
                raise InvalidInputError(
                    f'{shown(what)} may be M, N, K or N, K, groups. Write "64x7168x2048" for M x N x K, (7168, 2048) '
                    'for N x K at every M, or {"n": 7168, "k": 2048, "groups": 8} for a weight of each group.'
                )
            return LayerPlan(_entry({"n": items[0], "k": items[1]}, shown(what), (), op))
        return LayerPlan.join([plan(item, tp, ep, op) for item in items])
    raise InvalidInputError(
        "what must be a file, a checkpoint's directory, a model's description, or shapes such as (n, k) or 7168x2048, "
        f"but it is {shown(what)}."
    )


def _file(path: Path, tp: int, ep: int, op: str) -> LayerPlan:
    if not path.exists():
        raise InvalidInputError(
            f"{path} cannot be read: there is no such file or directory here. Nothing is downloaded: give a model's "
            "local directory, in which its config.json is enough."
        )
    if headers.is_checkpoint(path):
        return checkpoint.plan(path, tp, ep, op)
    if path.is_dir():
        config = path / "config.json"
        if not config.is_file():
            raise InvalidInputError(f"{path} must hold *.safetensors or a config.json, but it holds neither.")
        path = config
    data = inputs.read_file(path)
    if isinstance(data, Mapping) and model.is_config(data):
        data = model.read(path)
    return _described(data, str(path), tp, ep, op)


def _described(data: Any, where: str, tp: int, ep: int, op: str) -> LayerPlan:
    if isinstance(data, Mapping) and model.is_config(data):
        return model.plan(data, tp, ep, op)
    ms: tuple[int, ...] = ()
    if isinstance(data, Mapping) and "shapes" in data:
        ms = tuple(inputs.sizes(data["m"], f"m in {where}")) if data.get("m") is not None else ()
        data = data["shapes"]
    if not isinstance(data, list):
        raise InvalidInputError(
            f"{where} must hold a list of shapes, an object with `shapes`, or a model's config with `hidden_size`, "
            f"but it holds {type(data).__name__}."
        )
    return LayerPlan(
        tuple(x for index, entry in enumerate(data) for x in _entry(entry, f"shape {index} of {where}", ms, op))
    )


def _entry(entry: Any, where: str, ms: tuple[int, ...], op: str) -> tuple[Layer, ...]:
    if not isinstance(entry, Mapping) or not {"n", "k"} <= set(entry):
        raise InvalidInputError(f"{where} must be an object with n and k (and m if wanted), but it is {shown(entry)}.")
    name = entry.get("name", "")
    if not isinstance(name, str):
        raise InvalidInputError(f"name of {where} must be text, but it is {shown(name)}.")
    own = tuple(inputs.sizes(entry["m"], f"m of {where}")) if entry.get("m") is not None else ms
    runs = entry.get("op", op) or FP8
    if not isinstance(runs, str):
        raise InvalidInputError(f"op of {where} must be text, but it is {shown(runs)}.")
    return _layers(name, entry["n"], entry["k"], own, where, runs, entry.get("groups", 1))


def _layers(name: str, n: Any, k: Any, ms: tuple[int, ...], where: str, op: str, groups: Any) -> tuple[Layer, ...]:
    check_op(op, grouped=True)
    inputs.whole(groups, f"groups of {where}")
    layer = Layer(
        inputs.printable(name), inputs.whole(n, f"n of {where}"), inputs.whole(k, f"k of {where}"), ms=ms, op=op
    )
    return tuple(in_groups(layer, groups)) if groups > 1 else (layer,)


def _checked(layer: Layer) -> tuple[Layer, ...]:
    found = _layers(layer.name, layer.n, layer.k, layer.ms, shown(layer), layer.op, layer.groups)
    return tuple(replace(x, copies=layer.copies, padding=layer.padding) for x in found)
