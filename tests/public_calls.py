"""A right call of each public function that takes tensors, small and on the CPU, and the names of all others."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from call_kinds import expert_tensors, experts, fp4_expert_tensors, fp4_experts

import deep_gemm
from deep_gemm import LaunchConfig, fused, quantize, testing, utils

M, N, K, G = 16, 32, 256, 2
E4M3, BF16, FP16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32
I32, U8 = torch.int32, torch.uint8
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class PublicCall:
    """A call, and its tensors by name. ``by_torch``: torch computes it, so that it also takes what torch can read."""

    tensors: Callable[[], Tensors]
    call: Callable[[Tensors], object]
    by_torch: bool = False


def made(shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Callable[[], Tensors]:
    return lambda: {name: torch.ones(shape).to(dtype) for name, (shape, dtype) in shapes.items()}


def paired(x: Tensors, name: str) -> Any:
    return (x[name], x[f"sf{name}"]) if f"sf{name}" in x else x[name]


def dense(function: Callable[..., Any], form: str, dtype: torch.dtype, scaled: bool) -> PublicCall:
    """Operands of other forms are transposed views, as FP8 must be."""

    def tensors() -> Tensors:
        found = {"a": torch.ones(M, K).to(dtype), "b": torch.ones(N, K).to(dtype)}
        found |= {"sfa": torch.ones(M, 2), "sfb": torch.ones(1, 2)} if scaled else {}
        turned = ("a", "sfa") * (form[0] == "t") + ("b", "sfb") * (form[1] == "n")
        found |= {name: found[name].t() for name in turned if name in found}
        output = BF16 if dtype == E4M3 else dtype
        return found | {name: torch.zeros(M, N, dtype=output) for name in ("c", "d")}

    return PublicCall(tensors, lambda x: function(paired(x, "a"), paired(x, "b"), x["d"], x["c"]))


def grouped(function: Callable[..., Any], scaled: bool, form: str = "nt", masked: bool = False) -> PublicCall:
    def tensors() -> Tensors:
        lead, dtype = (G,) * masked, E4M3 if scaled else BF16
        found = {"a": torch.ones(*lead, M, K).to(dtype), "b": torch.ones(G, N, K).to(dtype)}
        found |= {"sfa": torch.ones(*lead, M, 2), "sfb": torch.ones(G, 1, 2)} if scaled else {}
        found |= {name: found[name].mT for name in ("b", "sfb") if name in found and form == "nn"}
        layout = torch.zeros(G if masked else M, dtype=I32)
        return found | {"layout": layout, "d": torch.zeros(*lead, M, N, dtype=BF16)}

    more = (8,) * masked
    return PublicCall(tensors, lambda x: function(paired(x, "a"), paired(x, "b"), x["d"], x["layout"], *more))


def k_grouped(kind: str) -> PublicCall:
    shapes = {"d": ((G, M, N), F32), "c": ((G, M, N), F32)}
    if kind == "bf16":
        shapes |= {"a": ((K, M), BF16), "b": ((K, N), BF16)}
    else:
        shapes |= {"a": ((M, K), E4M3), "b": ((N, K), E4M3), "sfa": ((M, 2), F32), "sfb": ((N, 2), F32)}

    def tensors() -> Tensors:
        return made(shapes)() | {"layout": torch.full((G,), K // G, dtype=I32)}

    def call(x: Tensors) -> None:
        a, b = paired(x, "a"), paired(x, "b")
        if kind == "padded":
            deep_gemm.k_grouped_fp8_gemm_nt_padded(a, b, x["d"], x["layout"], x["c"])
        elif kind == "fp8":
            deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, x["d"], [K // G] * G, x["layout"], x["c"])
        else:
            deep_gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, x["d"], [K // G] * G, x["layout"], x["c"])

    return PublicCall(tensors, call)


def logits(function: Callable[..., Any], paged: bool) -> PublicCall:
    if paged:
        shapes = {"q": ((2, 1, 32, 64), E4M3), "kv": ((4, 32, 1, 68), torch.uint8), "weights": ((2, 32), F32)}
        shapes |= {"lens": ((2, 1), I32), "table": ((2, 2), I32)}

        def tensors() -> Tensors:
            found = made(shapes)()
            return found | {"schedule": deep_gemm.get_paged_mqa_logits_metadata(found["lens"], 32, 2)}

        return PublicCall(tensors, lambda x: function(*x.values(), 64)[:, :1])  # the others stay as they are
    shapes = {"q": ((M, 32, 64), E4M3), "kv": ((N, 64), E4M3), "scales": ((N,), F32), "weights": ((M, 32), F32)}
    shapes |= {"starts": ((M,), I32), "ends": ((M,), I32)}
    return PublicCall(
        made(shapes), lambda x: function(x["q"], (x["kv"], x["scales"]), x["weights"], x["starts"], x["ends"])
    )


def cast(function: Callable[..., Any], *outputs: str, read: tuple[str, ...] = (), transposed: bool = False) -> Any:
    """A cast of x. ``outputs`` are the kinds of blocks that are given as out; none if the function takes no out."""

    def tensors() -> Tensors:
        found = made({"x": ((M, K), F32), "rows": ((M,), I32), "factors": ((M,), F32)})()
        found = {name: found[name] for name in ("x", *read)}
        for place, blocks in enumerate(outputs):
            flip = transposed or place > 0
            values = torch.zeros((K, M) if flip else (M, K)).to(E4M3)
            shapes = {"row": (M, 2), "column": (K, 1), "tile": (2, 1) if flip else (1, 2)}
            found |= {f"values{place}": values, f"scales{place}": torch.zeros(shapes[blocks])}
        return found

    def call(x: Tensors) -> object:
        pairs = tuple((x[f"values{place}"], x[f"scales{place}"]) for place in range(len(outputs)))
        named = {name: x[name] for name in read}
        return function(x["x"], out=pairs[0] if len(pairs) == 1 else pairs or None, **named)

    return PublicCall(tensors, call)


def packed(kind: str, grouping: str) -> PublicCall:
    """A product of transformed MXFP4 weights."""
    function = getattr(deep_gemm, f"{'m_grouped_' if grouping else ''}{kind}_fp4_gemm_nt{grouping}")
    plain = dense(lambda a, b, d, c: function(a, b, d), "nt", E4M3 if kind == "fp8" else BF16, kind == "fp8")
    plain = grouped(function, kind == "fp8", masked=grouping == "_masked") if grouping else plain

    def tensors() -> Tensors:
        b, sfb = deep_gemm.transform_fp4_weights(*quantize.mxfp4(torch.ones(*(G,) * bool(grouping), N, K)), kind)
        return {name: x for name, x in plain.tensors().items() if name != "c"} | {"b": b, "sfb": sfb}

    return PublicCall(tensors, lambda x: plain.call({"c": x["d"], **x}))


def torch_does(function: Callable[..., Any], *more: Any, **shapes: tuple[tuple[int, ...], torch.dtype]) -> PublicCall:
    return PublicCall(made(shapes), lambda x: function(*x.values(), *more), by_torch=True)


def height(x: Any) -> int:
    """The rows of a plain tensor; M of any other."""
    return x.shape[0] if type(x) is torch.Tensor and not x.is_nested and x.dim() else M


def batch(expression: str, **shapes: tuple[tuple[int, ...], torch.dtype]) -> PublicCall:
    return PublicCall(made(shapes), lambda x: deep_gemm.einsum(expression, *x.values()))


def scaled_batch(function: Callable[..., Any], *rows: int) -> PublicCall:
    shapes = {"a": ((*rows, K), E4M3), "sfa": ((*rows, 2), F32), "b": ((G, N, K), E4M3), "sfb": ((G, 1, 2), F32)}
    tensors = made({**shapes, "d": ((*rows, N), BF16)})
    return PublicCall(tensors, lambda x: function(paired(x, "a"), paired(x, "b"), x["d"]))


def strict(function: Callable[..., Any], *more: Any, **shapes: tuple[tuple[int, ...], torch.dtype]) -> PublicCall:
    return PublicCall(made(shapes), lambda x: function(*x.values(), *more))


def exact(function: Callable[..., Any], shapes: Mapping[str, Any]) -> PublicCall:
    """All elements of the product of ones are K."""
    return PublicCall(lambda: made(shapes)() | {"d": torch.full((M, N), K).to(BF16)}, lambda x: function(*x.values()))


def launched(out: Any, x: Any) -> LaunchConfig:
    return LaunchConfig(grid=1, block=32)


OWN = deep_gemm.kernel({"out": "f32*", "x": "const f32*"}, body="out[0] = x[0];")(launched)


@OWN.reference
def _(out: torch.Tensor, x: torch.Tensor) -> None:
    out.copy_(x)


HALVES: dict[str, torch.dtype] = {"bf16": BF16, "fp16": FP16, "cublaslt": BF16}
SCALES, PRODUCT = {"sf": ((M, 4), F32)}, {"d": ((M, N), BF16), "a": ((M, K), E4M3), "sfa": ((M, 2), F32)}
PRODUCT |= {"b": ((N, K), E4M3), "sfb": ((1, 2), F32)}
HALF_PRODUCT = {"d": ((M, N), BF16), "a": ((M, K), BF16), "b": ((N, K), BF16)}
FACTORS = {name: PRODUCT[name] for name in ("a", "sfa", "b", "sfb")}

GATED = {"x": (M, 2 * K), "factors": (M,), "bias": (G, 2 * K), "groups": (M,)}
ROWS: dict[str, dict[str, tuple[int, ...]]] = {
    "rms_norm": {"x": (M, K), "weight": (K,), "residual": (M, K)},
    "layer_norm": {"x": (M, K), "weight": (K,), "bias": (K,), "residual": (M, K)},
    "add_gelu": {"x": (M, K), "y": (M, K)},
    "mul_add": {"x": (M, K), "y": (M, K), "z": (K,)},
    "silu_and_mul": GATED,
    "swigluoai_and_mul": GATED,
}
"""Functions of rows, and the shapes of their inputs."""


def of_rows(name: str, pair: bool, **shapes: tuple[int, ...]) -> PublicCall:
    dtypes = {"factors": F32, "groups": I32}
    read = {each: (shape, dtypes.get(each, BF16)) for each, shape in shapes.items()}
    written = {"values": ((M, K), E4M3), "scales": ((M, 2), F32)} if pair else {"out": ((M, K), BF16)}

    def call(x: Tensors) -> object:
        named = {each: x[each] for each in read}
        return getattr(fused, name)(**named, out=(x["values"], x["scales"]) if pair else x["out"])

    return PublicCall(made({**read, **written}), call)


CALLS: dict[str, PublicCall] = {
    **{f"{kind}_gemm_{form}": dense(getattr(deep_gemm, f"{kind}_gemm_{form}"), form, HALVES.get(kind, E4M3),
        scaled) for kind, scaled in (*((kind, False) for kind in HALVES), ("fp8", True),
        ("fp8_fp4", True)) for form in ("nt", "nn", "tn", "tt")},
    **{f"m_grouped_{kind}_gemm_{form}_contiguous": grouped(
        getattr(deep_gemm, f"m_grouped_{kind}_gemm_{form}_contiguous"), kind != "bf16", form) for kind in ("fp8",
        "fp8_fp4", "bf16") for form in ("nt", "nn")},
    **{name: grouped(getattr(deep_gemm, name), "fp8" in name, masked=True) for name in (
        *("m_grouped_fp8_gemm_nt_masked", "m_grouped_fp8_fp4_gemm_nt_masked", "m_grouped_bf16_gemm_nt_masked"),
        *("fp8_m_grouped_gemm_nt_masked", "bf16_m_grouped_gemm_nt_masked"))},
    **{f"{'m_grouped_' if grouping else ''}{kind}_fp4_gemm_nt{grouping}{' of MXFP4' * (kind == 'fp8')}": packed(kind,
        grouping) for kind in ("fp8", "bf16") for grouping in ("", "_masked", "_contiguous")},
    "transform_fp4_weights": torch_does(deep_gemm.transform_fp4_weights, packed=((N, K // 2), U8),
        scales=((N, K // 32), U8)),
    "fp8_moe": PublicCall(lambda: expert_tensors(fp8=False), lambda x: experts(**x)),
    "fp8_fp4_moe": PublicCall(lambda: fp4_expert_tensors("fp8"), lambda x: fp4_experts("fp8")(**x)),
    "bf16_fp4_moe": PublicCall(lambda: fp4_expert_tensors("bf16"), lambda x: fp4_experts("bf16")(**x)),
    "k_grouped_fp8_gemm_nt_contiguous": k_grouped("fp8"), "k_grouped_fp8_gemm_nt_padded": k_grouped("padded"),
    "k_grouped_bf16_gemm_tn_contiguous": k_grouped("bf16"),
    **{name: strict(getattr(deep_gemm, name), a=((G, M, K), dtype), b=((G, N, K), dtype),
        d=((G, M, N), dtype)) for name, dtype in (("bf16_bmm", BF16), ("fp16_bmm", FP16))},
    "fp8_gemm_nt_skip_head_mid": PublicCall(
        made({"a": ((M, K), E4M3), "sfa": ((M, 2), F32), "b": ((N, K), E4M3), "sfb": ((1, 2), F32),
        "d": ((M, 48), BF16)}), lambda x: deep_gemm.fp8_gemm_nt_skip_head_mid(paired(x, "a"), paired(x, "b"), x["d"],
        (8, 8, 8))),
    "fp8_bmm": scaled_batch(deep_gemm.fp8_bmm, G, M),
    "fp8_einsum": scaled_batch(functools.partial(deep_gemm.fp8_einsum, "bhr,hdr->bhd"), M, G),
    "einsum": batch("bhr,hdr->bhd", a=((M, G, K), BF16), b=((G, N, K), BF16), d=((M, G, N), BF16)),
    "einsum of a sum": batch("bmk,bnk->mn", a=((G, M, K), BF16), b=((G, N, K), BF16), d=((M, N), F32)),
    "fp8_mqa_logits": logits(deep_gemm.fp8_mqa_logits, paged=False),
    "fp8_fp4_mqa_logits": logits(deep_gemm.fp8_fp4_mqa_logits, paged=False),
    "fp8_paged_mqa_logits": logits(deep_gemm.fp8_paged_mqa_logits, paged=True),
    "fp8_fp4_paged_mqa_logits": logits(deep_gemm.fp8_fp4_paged_mqa_logits, paged=True),
    "get_paged_mqa_logits_metadata": strict(deep_gemm.get_paged_mqa_logits_metadata, 64, 2, lens=((M,), I32)),
    "tf32_hc_prenorm_gemm": strict(deep_gemm.tf32_hc_prenorm_gemm, a=((M, K), BF16), b=((8, K), F32), d=((M, 8), F32),
        sqr_sum=((M,), F32)),
    "quantize.rows": cast(quantize.rows, "row", read=("rows", "factors")),
    "quantize.columns": cast(quantize.columns, "column", transposed=True),
    "quantize.rows_and_columns": cast(quantize.rows_and_columns, "row", "column"),
    "quantize.blocks": cast(quantize.blocks, "tile"),
    "quantize.blocks_transposed": cast(quantize.blocks_transposed, "tile", transposed=True),
    "quantize.blocks_and_transpose": cast(quantize.blocks_and_transpose, "tile", "tile"),
    "quantize.rows_and_blocks_transposed": cast(quantize.rows_and_blocks_transposed, "row", "tile"),
    "quantize.spread": torch_does(quantize.spread, x=((M, K), F32)),
    "quantize.mxfp4": torch_does(quantize.mxfp4, x=((N, K), F32)),
    "quantize.mxfp4_to_fp8": torch_does(quantize.mxfp4_to_fp8, packed=((N, K // 2), U8), scales=((N, K // 32), U8)),
    "quantize.mxfp4_rounded": torch_does(quantize.mxfp4_rounded, packed=((N, K // 2), U8), scales=((N, K // 32), U8)),
    "quantize.rows fresh": cast(quantize.rows, read=("rows",)),
    "quantize.rows_and_columns fresh": cast(quantize.rows_and_columns),
    **{f"fused.{name}{' to FP8' if pair else ''}": of_rows(name, pair, **shapes) for name,
        shapes in ROWS.items() for pair in (False, True)},
    **{name: torch_does(getattr(deep_gemm, name), False, x=((M, K), F32)) for name in ("per_token_cast_to_fp8",
        "per_channel_cast_to_fp8", "per_block_cast_to_fp8")},
    "per_custom_dims_cast_to_fp8": torch_does(deep_gemm.per_custom_dims_cast_to_fp8, (0,), False, x=((M, K), F32)),
    "per_token_cast_to_fp4": torch_does(deep_gemm.per_token_cast_to_fp4, True, 32, x=((M, K), F32)),
    "cast_back_from_fp4": torch_does(deep_gemm.cast_back_from_fp4, 32, packed=((N, K // 2), U8),
        sf=((N, K // 32), F32)),
    "transpose_packed_fp4": torch_does(deep_gemm.transpose_packed_fp4, a=((N, K // 2), U8)),
    "dequantise": torch_does(deep_gemm.dequantise, x=((M, K), E4M3), sf=((M, 2), F32)),
    "dequantise MXFP4": torch_does(deep_gemm.dequantise, x=((N, K // 2), U8), sf=((N, K // 32), U8)),
    "ceil_to_ue8m0": torch_does(deep_gemm.ceil_to_ue8m0, x=((M, K), F32)),
    "pack_ue8m0_to_int": torch_does(deep_gemm.pack_ue8m0_to_int, x=((M, K), F32)),
    "get_mn_major_tma_aligned_tensor": torch_does(deep_gemm.get_mn_major_tma_aligned_tensor, **SCALES),
    "get_mn_major_tma_aligned_packed_ue8m0_tensor":
        torch_does(deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor, **SCALES),
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor":
        torch_does(lambda sf: deep_gemm.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(sf, None, [1024, 1024],
        256), sf=((8, 4), F32)),
    "transform_sf_into_required_layout": torch_does(
        lambda sf: deep_gemm.transform_sf_into_required_layout(sf, height(sf), 512, (1, 128, 128), None, True),
        **SCALES),
    "transform_sf_into_required_layout blocks":
        torch_does(lambda sf: deep_gemm.transform_sf_into_required_layout(sf, height(sf) * 128, 512, (128, 128)),
        **SCALES),
    "declare_constant": torch_does(deep_gemm.declare_constant, x=((M, K), F32)),
    "retract_constant": torch_does(deep_gemm.retract_constant, x=((M, K), F32)),
    "tensor_map": strict(deep_gemm.tensor_map, (8, 8), x=((M, K), F32)),
    "CustomKernel": strict(OWN, out=((64,), F32), x=((64,), F32)),
    "kernel": strict(OWN.source, out=((64,), F32), x=((64,), F32)),
    "testing.calc_diff": torch_does(testing.calc_diff, x=((M, K), F32), y=((M, K), F32)),
    "testing.assert_bitwise_equal": strict(testing.assert_bitwise_equal, x=((M, K), F32), y=((M, K), F32)),
    "testing.count_bytes": torch_does(testing.count_bytes, x=((M, K), F32)),
    "testing.guarded_copy": strict(testing.guarded_copy, values=((M, K), F32)),
    "testing.Guarded": PublicCall(lambda: dict(vars(testing.guarded((M, K), F32, "cpu"))),
        lambda x: testing.Guarded(**x).check()),
    "testing.accumulation_bound": strict(testing.accumulation_bound, **FACTORS),
    "testing.assert_close_to_exact": exact(testing.assert_close_to_exact, PRODUCT),
    "testing.assert_half_close_to_exact": exact(testing.assert_half_close_to_exact, HALF_PRODUCT),
    "utils.unpack_ue8m0_from_int": torch_does(utils.math.unpack_ue8m0_from_int, packed=((M, K), I32)),
}  # fmt: skip


def buffer_of_mega_moe() -> Any:
    return deep_gemm.get_symm_buffer_for_mega_moe(None, G, 128, 1, K, 128)


MEGA_MOE: dict[str, PublicCall] = {
    "fp8_mega_moe": PublicCall(
        made(
            {
                "y": ((M, K), BF16),
                "l1": ((G, 256, K), E4M3),
                "sfl1": ((G, 2, 2), F32),
                "l2": ((G, K, 128), E4M3),
                "sfl2": ((G, 2, 1), F32),
                "stats": ((G,), I32),
            }
        ),
        lambda x: deep_gemm.fp8_mega_moe(x["y"], paired(x, "l1"), paired(x, "l2"), buffer_of_mega_moe(), x["stats"]),
    ),
    "mega_moe_pre_dispatch_sm90": PublicCall(
        made(
            {
                "x": ((M, K), BF16),
                "topk_idx": ((M, 1), I32),
                "topk_weights": ((M, 1), F32),
                "buf_x": ((128, K), E4M3),
                "buf_x_sf": ((128, 2), F32),
                "buf_topk_idx": ((128, 1), torch.int64),
                "buf_topk_weights": ((128, 1), F32),
            }
        ),
        lambda x: deep_gemm.mega_moe_pre_dispatch_sm90(**x, num_tokens=M),
    ),
}
"""Not with the others, since they read and write a buffer, which no test makes inside of a graph."""
