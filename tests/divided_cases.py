"""Products whose operands are DTensors, each divided in every way that it may be; for tests with gloo and with NCCL."""

from collections.abc import Callable
from typing import Any

import torch
from nn_cases import relative
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import deep_gemm
from deep_gemm import fused, quantize

M, N, K, GROUPS = 256, 512, 512, 4
Operands = dict[str, tuple[Tensor, str]]
Made = tuple[Operands, str, Callable[[dict[str, Any]], None]]
"""Tensors and their dimensions by letters, the dimensions that may be divided, and the call."""


def half(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def pair(name: str, found: tuple[Tensor, Tensor], letters: str) -> Operands:
    return {name: (found[0], letters), f"{name}_scales": (found[1], letters)}


def stacked(cast: Callable[[Tensor], tuple[Tensor, Tensor]], x: Tensor) -> tuple[Tensor, Tensor]:
    values, scales = zip(*map(cast, x), strict=True)
    return torch.stack(values), torch.stack(scales)


def fp8(x: dict[str, Any], *names: str) -> list[tuple[Tensor, Tensor]]:
    return [(x[name], x[f"{name}_scales"]) for name in names]


def dense_fp8() -> Made:
    operands = pair("a", quantize.rows(half(M, K)), "mk") | pair("b", quantize.blocks(half(N, K)), "nk")
    operands["d"] = torch.zeros(M, N), "mn"
    return operands, "mnk", lambda x: deep_gemm.fp8_gemm_nt(*fp8(x, "a", "b"), x["d"])


def gradient_fp8() -> Made:
    """Scales of single rows on both sides, added to what is there."""
    operands = pair("a", quantize.rows(half(M, K)), "mk") | pair("b", quantize.rows(half(N, K)), "nk")
    operands["d"] = torch.ones(M, N), "mn"
    return operands, "mnk", lambda x: deep_gemm.fp8_gemm_nt(*fp8(x, "a", "b"), x["d"], x["d"], recipe=(1, 1, 128))


def dense_bf16() -> Made:
    operands = {"a": (half(M, K), "mk"), "b": (half(K, N), "kn"), "d": (torch.zeros(M, N), "mn")}
    return operands, "mnk", lambda x: deep_gemm.bf16_gemm_nn(x["a"], x["b"], x["d"])


def epilogue() -> Made:
    operands = {
        "a": (half(M, K), "mk"),
        "b": (half(N, K), "nk"),
        "d": (half(M, N), "mn"),
        "bias": (torch.randn(N), "n"),
    }

    def run(x: dict[str, Any]) -> None:
        deep_gemm.bf16_gemm_nt(x["a"], x["b"], x["d"], epilogue=deep_gemm.Epilogue(bias=x["bias"], activation="relu"))

    return operands, "mn", run


def masked_swiglu() -> Made:
    operands = pair("a", stacked(quantize.rows, half(GROUPS, M, K)), "gMk")
    operands |= pair("b", stacked(quantize.blocks, half(GROUPS, 2 * N, K)), "gNk")
    operands |= {"d": (half(GROUPS, M, N), "gMN"), "counts": (torch.full((GROUPS,), M, dtype=torch.int32), "g")}
    operands |= {"bias": (torch.randn(GROUPS, 2 * N), "gN"), "factors": (torch.rand(GROUPS, M), "gM")}

    def run(x: dict[str, Any]) -> None:
        epilogue = deep_gemm.Epilogue(x["bias"], "swiglu", row_factor=x["factors"])
        deep_gemm.m_grouped_fp8_gemm_nt_masked(*fp8(x, "a", "b"), x["d"], x["counts"], M, epilogue=epilogue)

    return operands, "g", run


def gated() -> Made:
    """gate's columns and up's, on one rank, become a column of d, which is FP8."""
    operands = pair("a", quantize.rows(half(M, K)), "mk") | pair("b", quantize.blocks(half(N, K)), "nk")
    operands |= pair("d", quantize.rows(half(M, N // 2)), "mn")

    def run(x: dict[str, Any]) -> None:
        a, b, d = fp8(x, "a", "b", "d")
        deep_gemm.fp8_gemm_nt(a, b, d, epilogue=deep_gemm.Epilogue(activation="swiglu"))

    return operands, "m", run


def functional() -> Made:
    """The operator that returns d."""
    operands = {"a": (half(M, K), "mk"), "b": (half(N, K), "nk"), "d": (half(M, N), "mn")}

    def run(x: dict[str, Any]) -> None:
        deep_gemm.register_operators()
        x["d"] = torch.ops.deep_gemm_jit.bf16_gemm_functional(x["a"], x["b"], x["d"])

    return operands, "mnk", run


def batch() -> Made:
    operands = pair("a", stacked(quantize.rows, half(GROUPS, M, K)), "gmk")
    operands |= pair("b", stacked(quantize.blocks, half(GROUPS, N, K)), "gnk")
    operands["d"] = half(GROUPS, M, N), "gmn"
    return operands, "gmnk", lambda x: deep_gemm.fp8_bmm(*fp8(x, "a", "b"), x["d"])


def summed() -> Made:
    operands = {"a": (half(GROUPS, M, K), "gmk"), "b": (half(GROUPS, N, K), "gnk"), "d": (torch.zeros(M, N), "mn")}
    return operands, "mng", lambda x: deep_gemm.einsum("bmk,bnk->mn", x["a"], x["b"], x["d"])


def masked() -> Made:
    operands = pair("a", stacked(quantize.rows, half(GROUPS, M, K)), "gMk")
    operands |= pair("b", stacked(quantize.blocks, half(GROUPS, N, K)), "gnk")
    operands |= {"d": (torch.zeros(GROUPS, M, N).bfloat16(), "gMn")}
    operands["counts"] = torch.full((GROUPS,), M, dtype=torch.int32), "g"
    return operands, "gnk", lambda x: deep_gemm.m_grouped_fp8_gemm_nt_masked(*fp8(x, "a", "b"), x["d"], x["counts"], M)


def contiguous() -> Made:
    operands = {"a": (half(M, K), "Mk"), "b": (half(2, N, K), "Gnk"), "d": (half(M, N), "Mn")}
    operands["labels"] = torch.arange(2, dtype=torch.int32).repeat_interleave(M // 2), "M"
    return operands, "nk", lambda x: deep_gemm.m_grouped_bf16_gemm_nt_contiguous(x["a"], x["b"], x["d"], x["labels"])


def by_k() -> Made:
    operands = pair("a", quantize.columns(half(K, M)), "mK") | pair("b", quantize.columns(half(K, N)), "nK")
    operands["d"] = torch.zeros(2, M, N), "Gmn"
    operands["sizes"] = torch.full((2,), K // 2, dtype=torch.int32), "G"
    return operands, "mn", lambda x: deep_gemm.k_grouped_fp8_gemm_nt_padded(*fp8(x, "a", "b"), x["d"], x["sizes"])


def half_form(form: str, a: str, b: str) -> Callable[[], Made]:
    def made() -> Made:
        sizes = {"m": M, "n": N, "k": K}
        operands = {
            name: (half(*(sizes[x] for x in own)).half(), own) for name, own in (("a", a), ("b", b), ("d", "mn"))
        }
        call = getattr(deep_gemm, f"fp16_gemm_{form}")
        return operands, "mnk", lambda x: call(x["a"], x["b"], x["d"])

    made.__name__ = f"fp16_{form}"
    return made


def half_batch() -> Made:
    operands = {"a": (half(GROUPS, M, K), "gmk"), "b": (half(GROUPS, N, K), "gnk"), "d": (half(GROUPS, M, N), "gmn")}
    return operands, "gmn", lambda x: deep_gemm.bf16_bmm(x["a"], x["b"], x["d"])


def masked_bf16() -> Made:
    operands = {"a": (half(GROUPS, M, K), "gMk"), "b": (half(GROUPS, N, K), "gnk"), "d": (half(GROUPS, M, N), "gMn")}
    operands["counts"] = torch.full((GROUPS,), M, dtype=torch.int32), "g"
    return operands, "gn", lambda x: deep_gemm.m_grouped_bf16_gemm_nt_masked(x["a"], x["b"], x["d"], x["counts"], M)


def contiguous_fp8() -> Made:
    operands = pair("a", quantize.rows(half(M, K)), "Mk") | pair("b", stacked(quantize.blocks, half(2, N, K)), "Gnk")
    operands |= {"d": (half(M, N), "Mn"), "labels": (torch.zeros(M, dtype=torch.int32), "M")}
    return operands, "nk", lambda x: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(*fp8(x, "a", "b"), x["d"], x["labels"])


def by_k_bf16() -> Made:
    operands = {"a": (half(K, M), "Km"), "b": (half(K, N), "Kn"), "d": (torch.zeros(2, M, N), "Gmn")}
    operands["sizes"] = torch.full((2,), K // 2, dtype=torch.int32), "G"

    def run(x: dict[str, Any]) -> None:
        deep_gemm.k_grouped_bf16_gemm_tn_contiguous(x["a"], x["b"], x["d"], [K // 2] * 2, x["sizes"], x["d"])

    return operands, "mn", run


def cast() -> Made:
    """Both at once: each rank casts blocks of its own."""
    operands = {"x": (half(M, K), "mk")} | pair("d", quantize.rows(half(M, K)), "mk")
    operands |= pair("t", quantize.columns(half(M, K)), "km")
    return operands, "mk", lambda x: quantize.rows_and_columns(x["x"], out=fp8(x, "d", "t"))  # type: ignore[arg-type]


def norm() -> Made:
    operands = {"x": (half(M, K), "mK"), "w": (half(K), "K"), "r": (half(M, K), "mK")}
    operands |= pair("d", quantize.rows(half(M, K)), "mK")
    return operands, "m", lambda x: fused.rms_norm(x["x"], x["w"], residual=x["r"], out=fp8(x, "d")[0])


def dense_fp4() -> Made:
    weights = deep_gemm.transform_fp4_weights(*quantize.mxfp4(half(N, K)))
    operands = pair("a", quantize.rows(half(M, K)), "mK") | {"b": (weights[0], "NKB"), "b_scales": (weights[1], "N")}
    operands["d"] = half(M, N), "mN"
    return operands, "m", lambda x: deep_gemm.fp8_fp4_gemm_nt(*fp8(x, "a", "b"), x["d"])


def masked_fp4() -> Made:
    weights = deep_gemm.transform_fp4_weights(*quantize.mxfp4(half(GROUPS, N, K)), "bf16")
    operands = {"a": (half(GROUPS, 8, K), "gMK"), "b": (weights[0], "gNKB"), "b_scales": (weights[1], "gN")}
    operands |= {"d": (half(GROUPS, 8, N), "gMN"), "counts": (torch.full((GROUPS,), 8, dtype=torch.int32), "g")}
    call = deep_gemm.m_grouped_bf16_fp4_gemm_nt_masked
    return operands, "g", lambda x: call(x["a"], fp8(x, "b")[0], x["d"], x["counts"], 8)


CASES = [
    *(half_form(*each) for each in (("nt", "mk", "nk"), ("tn", "km", "kn"))),
    half_batch, masked_bf16, contiguous_fp8, by_k_bf16, cast, norm, dense_fp8, gradient_fp8, dense_bf16, epilogue,
    gated, dense_fp4, masked_fp4, masked_swiglu, functional, batch, summed, masked, contiguous, by_k,
]  # fmt: skip


def spread(mesh: DeviceMesh, x: Tensor, own: str, letter: str, result: str) -> Any:
    """The DTensor in which the dimension ``letter`` is divided; of a sum over it, which is ``d``, the first part."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    rank, size = mesh.get_rank(), mesh.size()
    if letter in own:
        dim = own.index(letter)
        part, place = x.chunk(size, dim)[rank].clone(), Shard(dim)
    elif own == result and letter not in result:
        part, place = x.clone() if rank == 0 else torch.zeros_like(x), Partial()
    else:
        part, place = x.clone(), Replicate()
    return DTensor.from_local(part, mesh, [place], run_check=False)


def products(mesh: DeviceMesh) -> dict[str, float]:
    """Relative differences from whole products, by product and the dimension that is divided."""
    found = {}
    for make in CASES:
        torch.manual_seed(0)
        operands, letters, run = make()
        operands = {name: (x.to(mesh.device_type), own) for name, (x, own) in operands.items()}
        whole = {name: x.clone() for name, (x, _) in operands.items()}
        run(whole)
        for letter in letters:
            result = operands["d"][1]
            divided = {name: spread(mesh, x, own, letter, result) for name, (x, own) in operands.items()}
            run(divided)
            wanted, d = whole["d"], divided["d"]
            if letter in result:  # no backend sends FP8
                part = wanted.chunk(mesh.size(), result.index(letter))[mesh.get_rank()]
                error = relative(d.to_local(), part)
            else:
                error = relative(d.full_tensor(), wanted)
            found[f"{make.__name__} {letter}"] = error
    return found


def refusals(mesh: DeviceMesh) -> list[str]:
    """What is said of operands that are divided in other ways."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def sharded(x: Tensor, place: Any) -> Any:
        return DTensor.from_local(x, mesh, [place], run_check=False)

    def said(run: Callable[[], Any]) -> str:
        try:
            run()
        except deep_gemm.InvalidInputError as error:
            return str(error)
        return "nothing"

    def blocks(rows: int) -> Any:
        return tuple(sharded(part, Shard(0)) for part in quantize.blocks(half(rows, K)))

    a, b = (sharded(half(64, 64), place) for place in (Replicate(), Shard(0)))
    d = sharded(half(64, 64 * mesh.size()), Replicate())
    casts = tuple(sharded(part, Replicate()) for part in quantize.rows(half(64, K)))
    of_rows = sharded(half(64, 192), Shard(1))
    gate = deep_gemm.Epilogue(activation="swiglu")
    return [
        said(lambda: deep_gemm.bf16_gemm_nt(a, b, d)),
        said(lambda: deep_gemm.bf16_gemm_nt(a, b.to_local(), d)),
        said(lambda: deep_gemm.fp8_gemm_nt(casts, blocks(192), of_rows)),
        said(lambda: deep_gemm.bf16_gemm_nt(a, b, sharded(half(64, 32), Shard(1)), epilogue=gate)),
        said(lambda: deep_gemm.tf32_hc_prenorm_gemm(a, b, d, d)),
    ]


def every_operator(mesh: DeviceMesh) -> dict[str, str]:
    """What each operator says of whole DTensors; "" if it takes them, with the bits of plain ones."""
    from operator_cases import arguments
    from torch.distributed.tensor import DTensor, Replicate

    def whole(x: Any) -> Any:
        return DTensor.from_local(x.clone(), mesh, [Replicate()], run_check=False) if isinstance(x, Tensor) else x

    def bits(x: Any) -> Any:
        return x.contiguous().view(torch.uint8) if isinstance(x, Tensor) else x

    found = {}
    for name in deep_gemm.register_operators():
        if name.endswith("_functional"):
            continue
        given = arguments()[name]
        operator = getattr(torch.ops.deep_gemm_jit, name)
        divided, plain = [whole(x) for x in given], [x.clone() if isinstance(x, Tensor) else x for x in given]
        try:
            operator(*divided)
        except deep_gemm.InvalidInputError as error:
            found[name] = str(error)
            continue
        operator(*plain)
        local = [x.to_local() if isinstance(x, DTensor) else x for x in divided]
        same = all(torch.equal(bits(x), bits(y)) for x, y in zip(local, plain, strict=True) if isinstance(x, Tensor))
        found[name] = "" if same else "other bits"
    return found
