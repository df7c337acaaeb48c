"""DeepGEMM's fused mixture of experts, for one rank: beside float64 on the CPU, by its rules of rounding."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_cases import ERROR, exact, problem, relative
from torch import Tensor

import deep_gemm
from deep_gemm import InvalidInputError, UnsupportedError, mega_moe

HIDDEN, INNER = 256, 128
SIZES = [(1, 8, 2), (2, 8, 2), (7, 16, 6), (64, 32, 8), (65, 12, 6), (150, 8, 3)]
"""Tokens, experts, top_k."""


def buffer_of(experts: int, top_k: int, tokens: int = 150, group: Any = None) -> Any:
    return deep_gemm.get_symm_buffer_for_mega_moe(group, experts, tokens, top_k, HIDDEN, INNER)


def fill(buffer: Any, given: dict[str, Any], factor: float = 1.0) -> None:
    own = buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights
    chosen = given["topk_idx"].int()
    more = {"num_tokens": len(given["x"]), "group_size": 128, "routed_scaling_factor": factor}
    deep_gemm.mega_moe_pre_dispatch_sm90(given["x"], chosen, given["topk_weights"], *own, **more)


def run(buffer: Any, given: dict[str, Any], tokens: int, **options: Any) -> Tensor:
    y = torch.full((tokens, HIDDEN), 7.0).bfloat16()
    l1, l2 = deep_gemm.transform_weights_for_mega_moe_sm90(given["gate_up"], given["down"])
    deep_gemm.fp8_mega_moe(y, l1, l2, buffer, recipe=(128, 128, 128), activation="swiglu", **options)
    return y


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("clamp", [None, 0.5])
def test_results_are_near_those_in_float64(sizes: tuple[int, ...], clamp: float | None) -> None:
    """With a factor of all weights; counts are added to statistics; repeats and a bound change no bit."""
    given, stats = problem(*sizes, HIDDEN, INNER), torch.full((sizes[1],), 3, dtype=torch.int32)
    buffer = buffer_of(*sizes[1:])
    fill(buffer, given, 2.5)
    assert buffer.num_max_tokens_per_rank == 256
    y = run(buffer, given, sizes[0], activation_clamp=clamp, cumulative_local_expert_recv_stats=stats)
    wanted = 2.5 * exact(**given, clamp=clamp)
    assert relative(y, wanted) < ERROR
    assert stats.tolist() == [3 + int((given["topk_idx"] == expert).sum()) for expert in range(sizes[1])]
    again = run(buffer, given, sizes[0], activation_clamp=clamp, num_tokens_bound=200, fast_math=False)
    assert torch.equal(again, y)


def test_rounding_is_that_of_deepgemm() -> None:
    """The weight is a factor before the cast: a power of two changes scales alone, and then the last sum."""
    given = problem(1, 8, 1, HIDDEN, INNER)
    given["topk_idx"], given["topk_weights"] = torch.tensor([[3]]), torch.tensor([[1.0]])
    buffer = buffer_of(8, 1)
    fill(buffer, given)
    once = run(buffer, given, 1)
    fill(buffer, given, 0.25)
    assert torch.equal(run(buffer, given, 1), once / 4)
    fill(buffer, given, 1.1)
    outside = (deep_gemm.fp8_moe(**given).float() * 1.1).bfloat16()
    assert relative(run(buffer, given, 1), outside.double()) < 0.01
    assert not torch.equal(run(buffer, given, 1), outside), "one is rounded before its weight, and the other after it"


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_bits_are_those_of_fp8_moe_where_weights_are_ones(sizes: tuple[int, ...], monkeypatch: Any) -> None:
    """The launches read the weights that were given, and no copy."""
    given, seen = problem(*sizes, HIDDEN, INNER), list[Any]()
    given["topk_weights"] = torch.ones(given["topk_weights"].shape)
    buffer = buffer_of(*sizes[1:])
    fill(buffer, given)
    weights = deep_gemm.transform_weights_for_mega_moe_sm90(given["gate_up"], given["down"])
    plain = mega_moe.moe_chain.experts
    monkeypatch.setattr(mega_moe.moe_chain, "experts", lambda *call: (seen.extend(call), plain(*call)))
    y = torch.empty(sizes[0], HIDDEN).bfloat16()
    deep_gemm.fp8_mega_moe(y, *weights, buffer, activation_clamp=0.5)
    assert [tensor.data_ptr() for tensor in seen[3:7]] == [x.data_ptr() for pair in weights for x in pair]
    monkeypatch.undo()
    assert torch.equal(y, deep_gemm.fp8_moe(**given, clamp=0.5))


def test_counts_may_change_from_call_to_call() -> None:
    """One buffer, also without tokens, where y may have none, or rows that are not the call's."""
    buffer = buffer_of(8, 2)
    for seed, tokens in enumerate((3, 0, 130, 1, 64)):
        given = problem(tokens, 8, 2, HIDDEN, INNER, seed)
        fill(buffer, given)
        assert bool((buffer.topk_idx[tokens:] == -1).all())
        assert not buffer.topk_weights[tokens:].any()
        y = run(buffer, given, max(tokens, 1))
        if tokens:
            assert relative(y, exact(**given)) < ERROR
        else:
            assert not y.any()
            assert run(buffer, given, 0).shape == (0, HIDDEN)


def test_a_group_of_one_rank(tmp_path: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1)
    try:
        buffer = buffer_of(8, 2, group=dist.group.WORLD)
        given = problem(3, 8, 2, HIDDEN, INNER)
        fill(buffer, given)
        assert relative(run(buffer, given, 3), exact(**given)) < ERROR
    finally:
        dist.destroy_process_group()


def wrong(**options: Any) -> Any:
    given, buffer = problem(3, 8, 2, HIDDEN, INNER), buffer_of(8, 2)
    fill(buffer, given)
    return run(buffer, given, options.pop("tokens", 3), **options)


def destroyed() -> None:
    buffer = buffer_of(8, 2)
    buffer.destroy()
    run(buffer, problem(3, 8, 2, HIDDEN, INNER), 3)


GIVEN = problem(1, 8, 2, HIDDEN, INNER)
WRONG: list[tuple[Any, type[Exception], str]] = [
    (lambda: buffer_of(8, 9), InvalidInputError, "num_topk must be from 1 to 8, the number of experts, but it is 9"),
    (lambda: buffer_of(8, 2, tokens=0), InvalidInputError, "num_max_tokens_per_rank must be a whole number from 1"),
    (
        lambda: deep_gemm.get_symm_buffer_for_mega_moe(None, 8, 8, 2, 200, 128),
        InvalidInputError,
        "hidden must be a multiple of 128, but it is 200",
    ),
    (
        lambda: deep_gemm.get_symm_buffer_for_mega_moe(None, 8, 8, 2, 128, 128, num_shared_experts=1),
        UnsupportedError,
        "num_shared_experts must be 0, but it is 1",
    ),
    (
        lambda: deep_gemm.get_symm_buffer_for_sm90_mega_moe(None, 8, 8, 2, 128, 128, use_fp8_dispatch=False),
        UnsupportedError,
        "use_fp8_dispatch must be True",
    ),
    (lambda: wrong(tokens=257), InvalidInputError, "y has 257 tokens, but sym_buffer has room for 256"),
    (
        lambda: wrong(num_tokens_bound=257),
        InvalidInputError,
        "num_tokens_bound must be None or from 3 to 256, but it is",
    ),
    (
        lambda: wrong(num_tokens_bound=2),
        InvalidInputError,
        "num_tokens_bound must be None or from 3 to 256, but it is 2",
    ),
    (lambda: wrong(activation_clamp=-1.0), InvalidInputError, "clamp must be None or a number from 0 on"),
    (
        lambda: wrong(cumulative_local_expert_recv_stats=torch.zeros(8)),
        InvalidInputError,
        r"stats must be torch.int32 \(8,\), but it is torch.float32",
    ),
    (
        lambda: deep_gemm.fp8_mega_moe(
            torch.empty(1, 256).bfloat16(), GIVEN["gate_up"], GIVEN["down"], buffer_of(9, 2)
        ),
        InvalidInputError,
        r"l1_weights must have the shape \(9, 256, 256\), as sym_buffer has experts of a rank and sizes, but it is",
    ),
    (destroyed, InvalidInputError, "that was not destroyed, but it is destroyed"),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG, ids=[message[:40] for *_, message in WRONG])
def test_what_is_wrong_is_said(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
