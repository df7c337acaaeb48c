"""What wrong calls on the CPU raise: a part of the record of ``house.py``."""

import hashlib
import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

import deep_gemm
from deep_gemm.errors import DeepGemmError


def digest(what: object, length: int = 12) -> str:
    return hashlib.sha256(what if isinstance(what, bytes) else str(what).encode()).hexdigest()[:length]


def refusals() -> dict[str, dict[str, str]]:
    """What wrong calls on the CPU raise: by function and change, the error's class, the beginning of its message, and
    a digest of all of it."""
    return {name: dict(wrong_calls(name, make)) for name, make in CALLS.items()}


def wrong_calls(name: str, make: Callable[[], dict[str, Any]]) -> Iterator[tuple[str, str]]:
    function: Any = deep_gemm
    for part in name.split(" ")[0].split("."):
        function = (
            importlib.import_module(f"deep_gemm.{part}") if part in ("fused", "quantize") else getattr(function, part)
        )
    function(**make())  # the call that is changed is right
    for argument, value in make().items():
        for change, wrong in changed(argument, value):
            said = outcome(lambda wrong=wrong, argument=argument: function(**(make() | {argument: wrong})))
            if said:
                yield f"{argument}: {change}", said


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except DeepGemmError as error:
        text = re.sub(r"0x[0-9a-f]+|address is \d+", "@", str(error))
        return f"{type(error).__name__} {digest(text, 8)} {text[:30]}"
    except Exception as error:
        return type(error).__name__
    return ""


def changed(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Wrong values for an argument, by what is wrong."""
    if isinstance(value, tuple) and value and isinstance(value[0], torch.Tensor):
        yield from {"a tensor": value[0], "one of two": value[:1], "None": None}.items()
        for index, each in enumerate(value):
            for change, wrong in changed(name, each):
                yield f"[{index}] {change}", (*value[:index], wrong, *value[index + 1 :])
        return
    if isinstance(value, torch.Tensor):
        yield from {"None": None, "a number": 3, "as float64": value.double(), "as int8": value.to(torch.int8)}.items()
        yield from {"as float32": value.float(), "as bfloat16": value.bfloat16(), "meta": value.to("meta")}.items()
        yield from {"one more dimension": value[None], "one dimension less": value[0]}.items()
        yield from {"one row less": value[:-1], "one column less": value[..., :-1], "empty": value[:0]}.items()
        yield from {"two rows": value[:2], "the first columns": value[..., :16]}.items()
        if value.dim() > 1:
            yield "transposed", value.transpose(-1, -2)
            yield "transposed memory", value.transpose(-1, -2).contiguous().transpose(-1, -2)
            yield "each second column", torch.cat([value, value], -1)[..., ::2]
            yield "one row for all", value[:1].expand(value.shape)
            wide = torch.zeros((*value.shape[:-1], value.shape[-1] + 1), dtype=value.dtype)
            yield "odd rows", wide[..., 1:]
        return
    yield from {"None": None, "-1": -1, "a text": "q", "3.5": 3.5, "a list": [1, 2], "0": 0}.items()
    yield from {"(1, 1, 128)": (1, 1, 128), "(1, 2, 3)": (1, 2, 3), "True": True, "mnk": "mnk"}.items()


M, N, K, G = 136, 144, 256, 2


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(shape).to(dtype)


def fp8(*shape: int, scales: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    return numbers(*shape, dtype=torch.float8_e4m3fn), torch.ones(scales)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def dense_fp8() -> dict[str, Any]:
    a, b = fp8(M, K, scales=(M, 2)), fp8(N, K, scales=(2, 2))
    options = {"recipe": None, "recipe_a": None, "recipe_b": None, "compiled_dims": "nk", "disable_ue8m0_cast": True}
    return {"a": a, "b": b, "d": numbers(M, N), "c": numbers(M, N), **options}


def dense(dtype: torch.dtype) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        a, b, d, c = (numbers(*shape, dtype=dtype) for shape in ((M, K), (N, K), (M, N), (M, N)))
        return {"a": a, "b": b, "d": d, "c": c, "compiled_dims": "nk"}

    return make


def contiguous(pair: bool, psum: bool) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        a = fp8(256, K, scales=(256, 2)) if pair else numbers(256, K)
        b = fp8(G, N, K, scales=(G, 2, 2)) if pair else numbers(G, N, K)
        layout = ints(100, 200) if psum else ints(*[0] * 128, *[1] * 128)
        found = {"a": a, "b": b, "d": numbers(256, N), "grouped_layout": layout, "compiled_dims": "nk"}
        return found | ({"recipe": None} if pair else {}) | {"use_psum_layout": psum}

    return make


def masked(pair: bool) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        a = fp8(G, 64, K, scales=(G, 64, 2)) if pair else numbers(G, 64, K)
        b = fp8(G, N, K, scales=(G, 2, 2)) if pair else numbers(G, N, K)
        found = {"a": a, "b": b, "d": numbers(G, 64, N), "masked_m": ints(10, 20), "expected_m": 16}
        return found | ({"recipe": None} if pair else {}) | {"compiled_dims": "nk"}

    return make


def k_grouped(pair: bool, padded: bool = False) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        shapes = ((M, K), (N, K)) if pair else ((K, M), (K, N))
        a, b = (fp8(*shape, scales=(shape[0], 2)) if pair else numbers(*shape) for shape in shapes)
        if pair and not padded:
            a, b = (a[0].flatten(), a[1]), (b[0].flatten(), b[1])  # type: ignore[union-attr]
        d, c = (numbers(G, M, N, dtype=torch.float32) for _ in range(2))
        sizes = {"ks": ints(128, 128)} if padded else {"ks_cpu": [128, 128], "grouped_layout": ints(128, 128)}
        return {"a": a, "b": b, "d": d, **sizes, "c": c, "compiled_dims": "mn"}

    return make


def cast(**options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"x": numbers(M, K), **options}


def of_rows(*tensors: str, **options: Any) -> Callable[[], dict[str, Any]]:
    """Tensors by name: "gate_up" is an x of twice as many columns, "pair" an out of FP8."""

    def make() -> dict[str, Any]:
        found: dict[str, Any] = {name: numbers(M, K) for name in ("x", "y", "residual", "out")}
        found |= {name: numbers(K) for name in ("weight", "bias", "z")}
        found |= {"gate_up": numbers(M, 2 * K), "factors": torch.ones(M), "pair": fp8(M, K, scales=(M, 2))}
        names = {"gate_up": "x", "pair": "out"}
        return {names.get(name, name): found[name] for name in tensors} | options

    return make


def batch() -> dict[str, Any]:
    return {"a": numbers(G, M, K), "b": numbers(G, N, K), "d": numbers(G, M, N), "compiled_dims": "nk"}


def heads() -> dict[str, Any]:
    a, b = fp8(M, K, scales=(M, 2)), fp8(N, K, scales=(2, 2))
    return {"a": a, "b": b, "d": numbers(M, N + 8 * N // 16), "head_splits": (4, 8, 12), "recipe": None}


def scaled_batch() -> dict[str, Any]:
    a, b = fp8(G, M, K, scales=(G, M, 2)), fp8(G, N, K, scales=(G, 2, 2))
    return {"a": a, "b": b, "d": numbers(G, M, N), "recipe": None, "recipe_a": None, "recipe_b": None}


def scaled_einsum() -> dict[str, Any]:
    a, b = fp8(M, G, K, scales=(M, G, 2)), fp8(G, N, K, scales=(G, 2, 2))
    return {"expr": "bhr,hdr->bhd", "a": a, "b": b, "d": numbers(M, G, N), "c": None, "recipe": (1, 128, 128)}


def einsum(expr: str, *shapes: tuple[int, ...]) -> Callable[[], dict[str, Any]]:
    return lambda: {
        "expr": expr,
        **{name: numbers(*shape) for name, shape in zip("abd", shapes, strict=True)},
        "c": None,
    }


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"fp8_gemm_{form}": dense_fp8 for form in ("nt",)}, "bf16_gemm_nt": dense(torch.bfloat16),
    "fp16_gemm_nt": dense(torch.float16),
    "cublaslt_gemm_nt": lambda: {k: v for k, v in dense(torch.bfloat16)().items() if k != "compiled_dims"},
    "m_grouped_fp8_gemm_nt_contiguous": contiguous(True, False),
    "m_grouped_fp8_gemm_nt_contiguous psum": contiguous(True, True),
    "m_grouped_bf16_gemm_nt_contiguous": contiguous(False, False),
    "m_grouped_bf16_gemm_nt_contiguous psum": contiguous(False, True),
    "m_grouped_fp8_gemm_nt_masked": masked(True), "m_grouped_bf16_gemm_nt_masked": masked(False),
    "k_grouped_fp8_gemm_nt_contiguous": k_grouped(True), "k_grouped_bf16_gemm_tn_contiguous": k_grouped(False),
    "bf16_bmm": batch, "fp8_gemm_nt_skip_head_mid": heads, "fp8_bmm": scaled_batch, "fp8_einsum": scaled_einsum,
    "einsum": einsum("bhr,hdr->bhd", (M, G, K), (G, N, K), (M, G, N)),
    "einsum sum": einsum("bmk,bnk->mn", (G, M, K), (G, N, K), (M, N)),
    "quantize.rows": cast(use_ue8m0=False, epsilon=1e-4, out=None, gated=False),
    "quantize.rows_and_columns": cast(use_ue8m0=False, epsilon=1e-4, gated=False),
    "quantize.blocks": cast(use_ue8m0=False, epsilon=1e-4),
    "fused.rms_norm": of_rows("x", "weight", "residual", "out", eps=1e-6, use_ue8m0=False),
    "fused.layer_norm": of_rows("x", "weight", "bias", "residual", "pair", eps=1e-5, use_ue8m0=True),
    "fused.add_gelu": of_rows("x", "y", "out", approximate="none"),
    "fused.mul_add": of_rows("x", "y", "z", "out"),
    "fused.silu_and_mul": of_rows("gate_up", "factors", "pair", interleaved=False, limit=1.0),
    "fused.swigluoai_and_mul": of_rows("gate_up", "factors", "pair", limit=7.0),
}  # fmt: skip
