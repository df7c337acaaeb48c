"""One call of each kind of operation that remembers calls: its tensors by name, and how it is called."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from custom_gpu import PARAMETERS

import deep_gemm
from deep_gemm import LaunchConfig, fused, quantize
from deep_gemm.ops import batched

M, N, K, G = 24, 136, 256, 2
E4M3, BF16, FP16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32
Tensors = dict[str, torch.Tensor]
Call = Callable[..., object]


@dataclass(frozen=True)
class Kind:
    """One way to call: its tensors by name, and the call of them. ``options`` are those that it is warmed with."""

    tensors: Callable[[], Tensors]
    call: Call
    written: tuple[str, ...] = ("d",)
    options: dict[str, Any] | None = None

    def __call__(self, tensors: Tensors, **changed: Any) -> None:
        self.call(**tensors, **{**(self.options or {}), **changed})


def scales(*shape: int) -> torch.Tensor:
    return torch.ones(*shape[:-2], shape[-1], shape[-2]).mT


def dense_fp8(**more: Any) -> Tensors:
    return {
        "a": torch.zeros(M, K).to(E4M3),
        "sfa": scales(M, K // 128),
        "b": torch.zeros(N, K).to(E4M3),
        "sfb": torch.ones(2, K // 128),
        "d": torch.zeros(M, N, dtype=BF16),
        **more,
    }


def dense_half(dtype: torch.dtype) -> Tensors:
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in (("a", (M, K)), ("b", (N, K)), ("d", (M, N)))}


def fp8(a: Any, sfa: Any, b: Any, sfb: Any, d: Any, c: Any = None, pair: Any = tuple, **options: Any) -> None:
    deep_gemm.fp8_gemm_nt(pair((a, sfa)), (b, sfb), d, c, **options)


PARTS = ("bias", "residual", "row_factor", "alpha", "activation")
FINISH = {"activation": "gelu", "alpha": 0.5}


def finished(function: Callable[..., None], **more: Any) -> Call:
    """A call with an epilogue, which is made anew each time."""

    def call(a: Any, b: Any, d: Any, sfa: Any = None, sfb: Any = None, **options: Any) -> None:
        parts = {name: options.pop(name) for name in PARTS if name in options}
        pairs = (a, b) if sfa is None else ((a, sfa), (b, sfb))
        function(*pairs, d, **options, **more, epilogue=deep_gemm.Epilogue(**parts))

    return call


def vectors(dtype: torch.dtype) -> Tensors:
    residual = {"residual": torch.zeros(M, N, dtype=BF16)}
    return {"row_factor": torch.ones(M), "bias": torch.zeros(N, dtype=dtype), **residual}


def grouped(form: str, dtype: torch.dtype) -> Kind:
    lead, layout = ((G,), "masked_m") if form == "masked" else ((), "grouped_layout")
    kind = "fp8" if dtype == E4M3 else "bf16"
    function = getattr(deep_gemm, f"m_grouped_{kind}_gemm_nt_{'masked' if form == 'masked' else 'contiguous'}")

    def tensors() -> Tensors:
        found = {"a": torch.zeros(*lead, M, K).to(dtype), "b": torch.zeros(G, N, K).to(dtype)}
        if dtype == E4M3:
            found |= {"sfa": scales(*lead, M, 2), "sfb": torch.ones(G, 2, 2)}
        found["layout"] = torch.zeros(M if form == "index" else G, dtype=torch.int32)
        return found | {"d": torch.zeros(*lead, M, N, dtype=BF16)}

    def call(a: Any, b: Any, d: Any, sfa: Any = None, sfb: Any = None, pair: Any = tuple, **options: Any) -> None:
        options[layout] = options.pop("layout")
        if form == "masked":
            options.setdefault("expected_m", 8)
        else:
            options.setdefault("use_psum_layout", form == "psum")
        function(pair((a, sfa)) if kind == "fp8" else a, (b, sfb) if kind == "fp8" else b, d, **options)

    return Kind(tensors, call)


def k_tensors(kind: str) -> Tensors:
    found = {"layout": torch.tensor([K // 2, K // 2], dtype=torch.int32), "d": torch.zeros(G, M, N)}
    if kind == "bf16":
        return found | {"a": torch.zeros(K, M, dtype=BF16), "b": torch.zeros(K, N, dtype=BF16)}
    shapes = ((M, K), (N, K)) if kind == "padded" else ((M * K,), (N * K,))
    values = {name: torch.zeros(shape).to(E4M3) for name, shape in zip("ab", shapes, strict=True)}
    return found | values | {"sfa": scales(M, 2), "sfb": scales(N, 2)}


def k_bf16(a: Any, b: Any, layout: Any, d: Any, c: Any = None, **options: Any) -> None:
    deep_gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, d, None, layout, c, **options)


def k_fp8(a: Any, sfa: Any, b: Any, sfb: Any, layout: Any, d: Any, pair: Any = tuple, **options: Any) -> None:
    deep_gemm.k_grouped_fp8_gemm_nt_contiguous(pair((a, sfa)), (b, sfb), d, None, layout, **options)


def k_padded(a: Any, sfa: Any, b: Any, sfb: Any, layout: Any, d: Any, pair: Any = tuple, **options: Any) -> None:
    deep_gemm.k_grouped_fp8_gemm_nt_padded(pair((a, sfa)), (b, sfb), d, layout, **options)


def batch() -> Tensors:
    return {
        name: torch.zeros(shape, dtype=BF16)
        for name, shape in zip("abd", ((G, M, K), (G, N, K), (G, M, N)), strict=True)
    }


def batch_fp8() -> Tensors:
    found = {"a": torch.zeros(G, M, K).to(E4M3), "sfa": scales(G, M, 2), "b": torch.zeros(G, N, K).to(E4M3)}
    return found | {"sfb": torch.ones(G, 2, 2), "d": torch.zeros(G, M, N, dtype=BF16)}


def bmm_fp8(a: Any, sfa: Any, b: Any, sfb: Any, d: Any, pair: Any = tuple, **options: Any) -> None:
    deep_gemm.fp8_bmm(pair((a, sfa)), (b, sfb), d, **options)


def skips_middle(a: Any, sfa: Any, b: Any, sfb: Any, d: Any, pair: Any = tuple, **options: Any) -> None:
    deep_gemm.fp8_gemm_nt_skip_head_mid(pair((a, sfa)), (b, sfb), d, **options)


def each_h(a: Any, b: Any, d: Any, compiled_dims: Any = None) -> None:
    batched.bf16(a, b, d, compiled_dims, batched.BHR)


def summed(a: Any, b: Any, d: Any, c: Any = None, compiled_dims: Any = None) -> None:
    batched.bf16_sum(a, b, d, c, compiled_dims)


def cast_tensors(names: tuple[str, ...], columns: bool = False) -> Tensors:
    found = {
        "x": torch.zeros(M, K, dtype=BF16),
        "rows": torch.zeros(M, dtype=torch.int32),
        "factors": torch.ones(M),
        "values": torch.zeros(M, K).to(E4M3),
        "scales": torch.ones(M, 2),
    }
    if columns:
        found |= {"values": torch.zeros(K, M).to(E4M3), "scales": torch.ones(K, 1)}
    return {name: found[name] for name in names}


def rows(values: Any, scales: Any, pair: Any = tuple, **others: Any) -> None:
    quantize.rows(out=pair((values, scales)), **others)


def columns(values: Any, scales: Any, pair: Any = tuple, **others: Any) -> None:
    quantize.columns(out=pair((values, scales)), **others)


def rows_tensors(fp8: bool, *names: str) -> Tensors:
    found = {name: torch.zeros(M, K, dtype=BF16) for name in ("x", "y", "residual")}
    found |= {"weight": torch.ones(K, dtype=BF16), "bias": torch.zeros(K, dtype=BF16)}
    found |= {"gate_up": torch.zeros(M, 2 * K, dtype=BF16), "factors": torch.ones(M)}
    written = {"values": torch.zeros(M, K).to(E4M3), "scales": torch.ones(M, 2)}
    return {name: found[name] for name in names} | (written if fp8 else {"out": torch.zeros(M, K, dtype=BF16)})


def rms_norm(**x: Any) -> None:
    fused.rms_norm(**x)


def layer_norm(values: Any, scales: Any, bias: Any = None, pair: Any = tuple, **x: Any) -> None:
    fused.layer_norm(bias=bias, out=pair((values, scales)), **x)


def silu_and_mul(gate_up: Any, values: Any, scales: Any, pair: Any = tuple, **x: Any) -> None:
    fused.silu_and_mul(gate_up, pair((values, scales)), **x)


def biased_tensors() -> Tensors:
    found = rows_tensors(True, "gate_up")
    return found | {"bias": torch.zeros(G, 2 * K, dtype=BF16), "groups": torch.zeros(M, dtype=torch.int32)}


def expert_tensors(fp8: bool) -> Tensors:
    found = {"x": torch.zeros(M, K, dtype=BF16), "topk_idx": torch.zeros(M, 1, dtype=torch.int64)}
    found |= {"sfx": torch.ones(M, 2), "x": torch.zeros(M, K).to(E4M3)} if fp8 else {}
    found |= {"topk_weights": torch.ones(M, 1), "gate_up": torch.zeros(G, 256, K).to(E4M3)}
    found |= {"sfgate_up": torch.ones(G, 2, 2), "down": torch.zeros(G, K, 128).to(E4M3), "sfdown": torch.ones(G, 2, 1)}
    return found | {"y": torch.zeros(M, K, dtype=BF16)}


def experts(x: Any, gate_up: Any, sfgate_up: Any, down: Any, sfdown: Any, sfx: Any = None, **more: Any) -> None:
    deep_gemm.fp8_moe(x if sfx is None else (x, sfx), gate_up=(gate_up, sfgate_up), down=(down, sfdown), **more)


def fp4_expert_tensors(kind: str) -> Tensors:
    found = {name: x for name, x in expert_tensors(False).items() if "gate_up" not in name and "down" not in name}
    for name, n, k in (("gate_up", 256, K), ("down", K, 128)):
        pair = deep_gemm.transform_fp4_weights(*quantize.mxfp4(torch.zeros(G, n, k)), kind)
        found |= {name: pair.packed, f"sf{name}": pair.factors, f"bias_{name}": torch.zeros(G, n, dtype=BF16)}
    return found


def fp4_experts(kind: str) -> Call:
    function = deep_gemm.fp8_fp4_moe if kind == "fp8" else deep_gemm.bf16_fp4_moe

    def call(
        gate_up: Any, sfgate_up: Any, bias_gate_up: Any, down: Any, sfdown: Any, bias_down: Any, **more: Any
    ) -> None:
        weights = {"gate_up": (gate_up, sfgate_up), "down": (down, sfdown)}
        function(**weights, bias=(bias_gate_up, bias_down), **more)

    return call


def scaled(out: Any, x: Any, y: Any, scale: Any) -> LaunchConfig:
    return LaunchConfig(grid=1, block=32, values={"n": 1}, constants={"SCALE": f"{scale!r}"})


CUSTOM = deep_gemm.kernel(PARAMETERS, body="out[0] = /*{ SCALE }*/;")(scaled)
WRITTEN = ("values", "scales")
CAST = ("x", *WRITTEN)

KINDS = {
    "fp8": Kind(dense_fp8, fp8, options={"recipe": (1, 128, 128), "disable_ue8m0_cast": False}),
    "fp8 and c": Kind(lambda: dense_fp8(c=torch.zeros(M, N, dtype=BF16)), fp8),
    "bf16": Kind(lambda: dense_half(BF16), deep_gemm.bf16_gemm_nt),
    "bf16 and c": Kind(lambda: dense_half(BF16) | {"c": torch.zeros(M, N, dtype=BF16)}, deep_gemm.bf16_gemm_nt),
    "fp8 epilogue": Kind(lambda: dense_fp8(**vectors(F32)), finished(deep_gemm.fp8_gemm_nt), options=FINISH),
    "bf16 epilogue": Kind(lambda: dense_half(BF16) | vectors(BF16), finished(deep_gemm.bf16_gemm_nt), options=FINISH),
    "fp16": Kind(lambda: dense_half(FP16), deep_gemm.fp16_gemm_nt),
    **{f"{form} fp8": grouped(form, E4M3) for form in ("index", "psum", "masked")},
    **{f"{form} bf16": grouped(form, BF16) for form in ("index", "psum", "masked")},
    "k bf16": Kind(lambda: k_tensors("bf16"), k_bf16),
    "k bf16 and c": Kind(lambda: k_tensors("bf16") | {"c": torch.zeros(G, M, N)}, k_bf16),
    "k fp8": Kind(lambda: k_tensors("fp8"), k_fp8), "k padded": Kind(lambda: k_tensors("padded"), k_padded),
    "heads": Kind(lambda: dense_fp8(d=torch.zeros(M, N // 8 * 12, dtype=BF16)), skips_middle,
        options={"head_splits": (2, 4, 6)}),
    "batch": Kind(batch, deep_gemm.bf16_bmm), "batch of fp8": Kind(batch_fp8, bmm_fp8),
    "einsum": Kind(lambda: {name: x.transpose(0, 1) if name != "b" else x for name, x in batch().items()}, each_h),
    "sum": Kind(lambda: batch() | {"d": torch.zeros(M, N)}, summed),
    "sum and c": Kind(lambda: batch() | {name: torch.zeros(M, N) for name in "cd"}, summed),
    "rows": Kind(lambda: cast_tensors(CAST), rows, WRITTEN, {"use_ue8m0": True, "epsilon": 1.0, "gated": False}),
    "columns": Kind(lambda: cast_tensors(CAST, columns=True), columns, WRITTEN),
    "gathered": Kind(lambda: cast_tensors(("x", "rows", *WRITTEN)), rows, WRITTEN),
    "factored": Kind(lambda: cast_tensors(("x", "factors", *WRITTEN)), rows, WRITTEN),
    "rms norm": Kind(lambda: rows_tensors(False, "x", "weight"), rms_norm, ("out",), {"eps": 1e-5}),
    "rms norm and sum": Kind(lambda: rows_tensors(False, "x", "weight", "residual"), rms_norm, ("out", "residual"),
        {"eps": 1e-5}),
    "layer norm": Kind(lambda: rows_tensors(True, "x", "weight"), layer_norm, WRITTEN, {"use_ue8m0": True}),
    "layer norm and bias": Kind(lambda: rows_tensors(True, "x", "weight", "bias"), layer_norm, WRITTEN),
    "layer norm and sum": Kind(lambda: rows_tensors(True, "x", "weight", "residual"), layer_norm,
        (*WRITTEN, "residual")),
    "layer norm, bias and sum": Kind(lambda: rows_tensors(True, "x", "weight", "bias", "residual"), layer_norm,
        (*WRITTEN, "residual")),
    "add and gelu": Kind(lambda: rows_tensors(False, "x", "y"), fused.add_gelu, ("out",), {"approximate": "tanh"}),
    "silu and mul": Kind(lambda: rows_tensors(True, "gate_up", "factors"), silu_and_mul, WRITTEN, {"limit": 2.0}),
    "silu and mul and biases": Kind(biased_tensors, silu_and_mul, WRITTEN),
    "experts": Kind(lambda: expert_tensors(False), experts, ("y",), {"clamp": 2.0}),
    "experts of fp8": Kind(lambda: expert_tensors(True), experts, ("y",)),
    "experts of mxfp4": Kind(lambda: fp4_expert_tensors("fp8"), fp4_experts("fp8"), ("y",),
        {"activation": "swigluoai"}),
    "experts of mxfp4 and bf16": Kind(lambda: fp4_expert_tensors("bf16"), fp4_experts("bf16"), ("y",), {"clamp": 2.0}),
    "own": Kind(lambda: {name: torch.zeros(64) for name in ("out", "x", "y")}, CUSTOM, ("out",), {"scale": 1.0}),
}  # fmt: skip
OPERANDS = [(kind, name) for kind, made in KINDS.items() for name in made.tensors()]
