"""From a model's weights to the layers that one GPU multiplies: which weights are joined, and which part of each
remains under tensor parallelism.

A weight is what a checkpoint holds (q_proj); a layer is what an engine multiplies on one GPU (qkv_proj).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from deep_gemm.aot.inputs import MAX_SIZE
from deep_gemm.errors import InvalidInputError
from deep_gemm.spec import align

BLOCK = 128
"""Rows and columns of a weight that share one scale."""

FP8 = "fp8_gemm_nt"
WGRAD = "fp8_gemm_nt_1d1d"
ROWWISE = "fp8_gemm_nt_rowwise"
FP8_OPS = (FP8, WGRAD, ROWWISE)
"""With scales of blocks; with those of weight gradients, added to float32; with one scale for each row."""
E5M2_OPS = tuple(f"{ROWWISE}_{dtypes}" for dtypes in ("e5m2_e4m3", "e4m3_e5m2", "e5m2_e5m2"))
"""With one scale for each row, and a, b or both in E5M2."""
OPS = {"bfloat16": "bf16_gemm_nt", "float16": "fp16_gemm_nt", "BF16": "bf16_gemm_nt", "F16": "fp16_gemm_nt"}
"""The operation of a layer by the dtype of its weights, as a config or a checkpoint names it; FP8 for all others."""

DENSE_OPS = (FP8, ROWWISE, *E5M2_OPS, *dict.fromkeys(OPS.values()))
"""The operations of one product that take an epilogue."""

FORMS = ("contiguous", "contiguous_psum", "masked")
"""How rows are given to groups: by a label for each row, by the end of each group, by room for each group."""
GROUPED = {op: tuple(f"m_grouped_{op}_{form}" for form in FORMS) for op in (FP8, OPS["bfloat16"])}
"""The operations that multiply by one weight for each group, by the operation that multiplies by one weight."""
GROUPED_OPS = tuple(op for ops in GROUPED.values() for op in ops)

FP8_FP4, BF16_FP4 = "fp8_fp4_gemm_nt", "bf16_fp4_gemm_nt"
"""MXFP4 weights by activations in FP8, or in bfloat16."""
FP4_GROUPED = {op: tuple(f"m_grouped_{op}_{form}" for form in FORMS) for op in (FP8_FP4, BF16_FP4)}
FP4_GROUPED_OPS = tuple(op for ops in FP4_GROUPED.values() for op in ops)
FP4_OPS = (*FP4_GROUPED, *FP4_GROUPED_OPS)
FP4_BLOCK = 32
"""Values along K that share a scale."""


BATCHED = {FP8: "fp8_bmm", OPS["bfloat16"]: "bf16_bmm", OPS["float16"]: "fp16_bmm"}
"""The operations that multiply rows of each group of heads by a weight of its own, by the operation of one weight."""
ABSORBED = "bf16_bhd_hdr_bhr"
"""The same of weights whose N is contiguous: `einsum` of "bhd,hdr->bhr"."""
BATCHED_OPS = (*BATCHED.values(), ABSORBED)

SCALED_OPS = (*FP8_OPS, *E5M2_OPS, *GROUPED[FP8], BATCHED[FP8])
"""The operations of two FP8 operands."""


def is_masked(op: str) -> bool:
    """Whether M of `op` is the room of each group, of which the first rows are used. Otherwise M is all rows."""
    return op in (*GROUPED_OPS, *FP4_GROUPED_OPS) and op.endswith("masked")


def check_op(op: str, grouped: bool = False) -> None:
    """Raises InvalidInputError unless `op` is an operation of layers, or "". `grouped`: it may have groups."""
    known = dict.fromkeys((*FP8_OPS, *E5M2_OPS, *OPS.values(), *((*GROUPED_OPS, *BATCHED_OPS) if grouped else ())))
    if op and op not in known:
        raise InvalidInputError(f"op must be one of {', '.join(known)}, but it is {op!r}.")


class Degree(NamedTuple):
    """A number of GPUs that share a layer: its name in messages, and what to do if it is too large."""

    name: str
    advice: str


TP = Degree("tp", "Give a smaller tp.")


@dataclass(frozen=True)
class Layer:
    """A linear layer's weight, n x k, on one GPU, or as many as there are `groups`. `why_not` says why no kernel serves
    it, "" if one does; if it is `elsewhere`, none is needed, because engines multiply it by other libraries. `ms` are
    its sizes of M; if empty, those that the caller names. `op` is its operation.

    Where each GPU has t tokens, M is at most `copies` * t + `padding`: several GPUs may send their tokens to an expert,
    a token may go to several experts, and rows of padding may lie between groups."""

    name: str
    n: int
    k: int
    why_not: str = ""
    ms: tuple[int, ...] = ()
    op: str = FP8
    groups: int = 1
    copies: int = 1
    padding: int = 0
    elsewhere: bool = False

    def most_rows(self, tokens: int) -> int:
        """The largest M of a call where each GPU has `tokens` tokens."""
        return min(self.copies * tokens + self.padding, MAX_SIZE)


@dataclass(frozen=True)
class LayerPlan:
    """The layers of a workload, each once. `unknown` are sentences about what was not understood."""

    layers: tuple[Layer, ...]
    unknown: tuple[str, ...] = ()

    @classmethod
    def join(cls, plans: Iterable[LayerPlan]) -> LayerPlan:
        found = list(plans)
        layers = dict.fromkeys(layer for one in found for layer in one.layers)
        return cls(tuple(layers), tuple(dict.fromkeys(text for one in found for text in one.unknown)))

    @property
    def problems(self) -> tuple[str, ...]:
        """What was not understood, and each layer that needs a kernel and has none, in a sentence."""
        lacking = (
            f"{f'{x.name} ({x.n} x {x.k})' if x.name else f'{x.n} x {x.k}'} cannot be served: {x.why_not}"
            for x in self.layers
            if x.why_not and not x.elsewhere
        )
        return (*self.unknown, *dict.fromkeys(lacking))

    @property
    def served(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if not layer.why_not)


@dataclass(frozen=True)
class Weight:
    """One weight of a checkpoint, whole: `rows` are the parts of its n that are split one by one (three for q, k and v
    in one matrix). `heads` is the number by which a part is split, if it is not split by rows; a part that `repeats` is
    copied once there are more GPUs than heads. `why_not` says why its format has no kernel, and `elsewhere` that it
    needs none, as of a `Layer`; `op` is its operation. It multiplies `copies` rows for each token."""

    rows: tuple[int, ...]
    k: int
    why_not: str = ""
    heads: int = 0
    repeats: bool = False
    op: str = FP8
    elsewhere: bool = False
    copies: int = 1
    groups: int = 1
    """Weights of `rows` each, one for each group of heads."""
    broken: str = ""
    """Why its part on one GPU has no kernel."""

    @property
    def n(self) -> int:
        return sum(self.rows)


JOINED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "w13": ("w1", "w3"),
    "fused_wqa_wkv": ("wq_a", "wkv"),
    "fused_wkv_wgate": ("wkv", "wgate"),
}
"""Layers that serving engines multiply at once, and the weights that each is made of."""

ALSO_ALONE = {"kv_a_proj_with_mqa": "kv_a_proj"}
"""Weights that are prepared alone too: some engines multiply them in a call of their own when decoding."""

HEADS = ("lm_head", "head")
"""Layers with a row for each token of the vocabulary. Engines pad it to a multiple of `VOCABULARY` for several GPUs."""
VOCABULARY = 64

COLUMN = frozenset((
    "q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "q_b_proj", "wq_b", "kv_b_proj",
    "in_proj_qkvz", "in_proj_qkv", "in_proj_z", "in_proj_ba", "in_proj_b", "in_proj_a", "w1", "w3", *HEADS,
))  # fmt: skip
"""Column-parallel: tensor parallelism divides N."""

ROW = frozenset(["o_proj", "down_proj", "out_proj", "w2", "wo_b"])
"""Row-parallel: tensor parallelism divides K."""

WHOLE = frozenset((
    "q_a_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj", "wq_a", "wkv", "wgate", "wk", "weights_proj", "eh_proj",
    "e_proj", "h_proj", "fc", "shared_expert_gate", "gate",
))  # fmt: skip
"""Layers that every GPU holds whole, beside those of an indexer."""

HYPER = frozenset(["hc_attn_fn", "hc_ffn_fn"])
"""Float32 weights of hyper-connections, which `tf32_hc_prenorm_gemm` multiplies by."""

EINSUM = frozenset(["wo_a"])
"""Weights of which each group of heads has a part of its own."""

KNOWN = COLUMN | ROW | WHOLE | EINSUM

STAYS = frozenset(["eh_proj", "fc", "in_proj_ba", "in_proj_b", "in_proj_a"])
"""Layers that keep 16 bits when a model is cast to FP8: what joins the next token to the hidden state (eh_proj, fc),
and those with two rows for each head. In a model of 16 bits they are layers like others."""


def layers_of(
    modules: Iterable[tuple[str, Mapping[str, Weight]]], tp: int, blocks_fixed: bool, degree: Degree = TP
) -> LayerPlan:
    """The layers of modules (by name, each with its weights by name) on one of `tp` GPUs. `blocks_fixed`: weights come
    with their scales, so that a part can be joined with the next only if it ends where a block of 128 ends. Raises
    InvalidInputError where `tp`, called `degree`, does not divide heads or sizes."""
    layers: dict[Layer, None] = {}
    for module, weights in modules:
        inside = f"{module}." if module else ""
        parts = {name: _on_one_gpu(name, weight, tp, inside, degree) for name, weight in weights.items()}
        for name, x in _joined(parts, blocks_fixed):
            why_not = x.why_not or x.broken
            layer = Layer(
                inside + name, x.n, x.k, why_not, op=x.op, groups=x.groups, copies=x.copies, elsewhere=x.elsewhere
            )
            layers[layer] = None
    return LayerPlan(tuple(layers))


def _joined(pieces: Mapping[str, Weight], blocks_fixed: bool) -> list[tuple[str, Weight]]:
    left = dict(pieces)
    found: list[tuple[str, Weight]] = []
    for name, parts in JOINED.items():
        members = [left[part] for part in parts if part in left]
        if len(members) < len(parts):
            continue
        rows = tuple(row for member in members for row in member.rows)
        blocks = blocks_fixed and members[0].op == FP8
        fits = not blocks or all(row % BLOCK == 0 for row in rows[:-1]) or any(m.broken for m in members)
        # Weights of two formats, or with a block across two parts, cannot become one matrix.
        if len({(member.k, member.why_not, member.op) for member in members}) > 1 or not fits:
            continue
        broken = next((member.broken for member in members if member.broken), "")
        found.append((name, replace(members[0], rows=rows, broken=broken)))
        for part in parts:
            if part in ALSO_ALONE:
                found.append((ALSO_ALONE[part], left[part]))
            del left[part]
    return found + [(ALSO_ALONE.get(name, name), piece) for name, piece in left.items()]


def _on_one_gpu(name: str, weight: Weight, tp: int, inside: str, degree: Degree) -> Weight:
    if name in HYPER:
        why_not = "tf32_hc_prenorm_gemm multiplies by it, with kernels of its own."
        return replace(weight, why_not=why_not, elsewhere=True)
    if name in EINSUM and not weight.why_not:
        return _of_each_group(weight, tp, f"{inside}{name}", degree)
    if tp == 1 or name in WHOLE or "indexer." in inside or weight.why_not:
        return weight
    if name in ROW:
        k = divided(weight.k, tp, f"K of {inside}{name}", weight.heads, degree)
        return replace(weight, k=k, broken=_broken("K", (k,), tp, weight.op, degree))
    if name in COLUMN:
        count = weight.heads or 0
        copies = weight.repeats and 0 < count < tp
        parts = count if copies and tp % count == 0 else tp
        if name in HEADS and weight.n % tp:
            weight = replace(weight, rows=(align(weight.n, VOCABULARY),))
        rows = tuple(divided(row, parts, f"N of {inside}{name}", count, degree) for row in weight.rows)
        return replace(weight, rows=rows, broken=_broken("N", rows, tp, weight.op, degree))
    return replace(weight, broken=f"how {tp} GPUs share {name} is not known.")


def _of_each_group(weight: Weight, tp: int, name: str, degree: Degree) -> Weight:
    """A weight with one matrix below the other, one for each group of heads."""
    if not weight.heads:
        return replace(weight, why_not="it is a product for each group of heads, and a config.json would say how many.")
    if weight.op not in BATCHED:
        return replace(weight, why_not=f"it is a product for each group of heads, and {weight.op} has no such form.")
    rows = divided(weight.n, weight.heads, f"N of {name}", degree=Degree("o_groups", ""))
    groups = divided(weight.heads, tp, f"the number of groups of {name}", degree=degree)
    return replace(
        weight, rows=(rows,), groups=groups, op=BATCHED[weight.op], broken=_broken("N", (rows,), tp, weight.op, degree)
    )


def absorbed(heads: int, nope: int, rank: int, value: int, tp: int) -> tuple[Layer, ...]:
    """The products of latent attention's decoding on one of `tp` GPUs, with both parts of kv_b_proj in bfloat16:
    queries by that of keys (W_UK), and the attention's result by that of values (W_UV), for each of the `heads`."""
    groups = heads // tp
    if not (rank and nope and value and groups) or nope % 8 or value % 8:
        return ()
    return (
        Layer("w_uk", rank, nope, op=ABSORBED, groups=groups),
        Layer("w_uv", value, rank, op=BATCHED[OPS["bfloat16"]], groups=groups),
    )


def divided(size: int, parts: int, what: str, heads: int = 0, degree: Degree = TP) -> int:
    """`size` / `parts`, and `heads` / `parts` must be whole. `degree` names `parts` in messages."""
    for count, named in ((heads, f"the number of heads of {what}"), (size, what)):
        if count % parts:
            raise InvalidInputError(
                f"{named} must be a multiple of {degree.name}, but it is {count} and {degree.name} is {parts}."
                f"{degree.advice and ' '}{degree.advice}"
            )
    return size // parts


def _broken(dimension: str, sizes: Sequence[int], tp: int, op: str, degree: Degree) -> str:
    block = BLOCK if op == FP8 else FP4_BLOCK if op in FP4_OPS and dimension == "K" else 1
    bad = next((size for size in sizes if size % block), 0)
    if not bad:
        return ""
    return (
        f"{dimension} on each of {tp} GPUs is {bad}, no multiple of {block}, so that two GPUs would share the scale of "
        f"one block. {degree.advice}"
    )
