"""Mixtures of experts over several ranks in one process: on a CPU a rank is a thread, and on a GPU a stream."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_cases import problem
from torch import Tensor

import deep_gemm
from deep_gemm import mega_moe
from deep_gemm.jit import Builder
from deep_gemm.runtime import engine

WIDTH, INNER, MOST = 256, 128, 128
CLAMP = 2.0


class Group:
    """Of ranks of one process. ``buffers`` are theirs."""

    def __init__(self, buffers: list[Tensor], rank: int) -> None:
        self.buffers, self.own = buffers, rank

    def size(self) -> int:
        return len(self.buffers)

    def rank(self) -> int:
        return self.own


def in_process(size: int, group: Group, device: str) -> tuple[Tensor, list[int]]:
    return group.buffers[group.own], [each.data_ptr() for each in group.buffers]


class Layer:
    """A layer with ``experts`` experts over ``ranks`` ranks, and on one rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int, experts: int, top_k: int) -> None:
        monkeypatch.setattr(mega_moe, "shared_buffer", in_process)
        self.ranks, self.experts, self.top_k = ranks, experts, top_k
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        size = MOST * (WIDTH + WIDTH // 32 + 16 * top_k + top_k * WIDTH * 2) + (1 << 14)
        self.memory = [torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in range(ranks)]
        sizes = experts, MOST, top_k, WIDTH, INNER
        self.buffers = [deep_gemm.get_symm_buffer_for_mega_moe(Group(self.memory, r), *sizes) for r in range(ranks)]
        self.one = deep_gemm.get_symm_buffer_for_mega_moe(None, experts, MOST * ranks, *sizes[2:])
        given = problem(1, experts, top_k, WIDTH, INNER)
        first, second = (tuple(part.to(self.device) for part in given[name]) for name in ("gate_up", "down"))
        self.weights = deep_gemm.transform_weights_for_mega_moe_sm90(first, second)  # type: ignore[arg-type]
        self.stats = torch.zeros((ranks, experts // ranks), dtype=torch.int32, device=self.device)
        self.streams = [torch.cuda.Stream() for _ in range(ranks)] if self.device == "cuda" else []

    def wanted(self, tokens: dict[str, Tensor]) -> Tensor:
        fill(self.one, tokens, slice(None))
        y = torch.empty(len(tokens["x"]), WIDTH, device=self.device).bfloat16()
        deep_gemm.fp8_mega_moe(y, *self.weights, self.one, activation_clamp=CLAMP)
        return y

    def found(self, tokens: dict[str, Tensor], counts: tuple[int, ...], late: dict[int, float]) -> Tensor:
        """``late``: seconds for which ranks wait before their call."""
        ends = torch.tensor(counts).cumsum(0).tolist()
        parts = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
        y = torch.empty(len(tokens["x"]), WIDTH, device=self.device).bfloat16()
        if self.device == "cuda":
            self._by_streams(y, tokens, parts, max(counts), late)
        else:
            self._by_threads(y, tokens, parts, max(counts), late)
        return y

    def call(self, rank: int, y: Tensor, bound: int) -> None:
        own = slice(rank * self.experts // self.ranks, (rank + 1) * self.experts // self.ranks)
        first, second = ((values[own], scales[own]) for values, scales in self.weights)
        more = {"num_tokens_bound": bound, "activation_clamp": CLAMP}
        deep_gemm.fp8_mega_moe(y, first, second, self.buffers[rank], self.stats[rank], **more)

    def _by_streams(
        self, y: Tensor, tokens: dict[str, Tensor], parts: list[slice], bound: int, late: dict[int, float]
    ) -> None:
        """All memory and kernels are there before the first kernel waits. Each rank has a part of the SMs."""
        for rank, part in enumerate(parts):
            fill(self.buffers[rank], tokens, part)
            with torch.cuda.stream(self.streams[rank]):
                torch.empty(1 << 26, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        before = deep_gemm.get_num_sms()
        deep_gemm.set_num_sms(before // self.ranks)
        try:
            self._load(torch.empty_like(y), parts, bound)
            for rank, part in enumerate(parts):
                with torch.cuda.stream(self.streams[rank]):
                    if rank in late:
                        torch.cuda._sleep(int(late[rank] * 1e9))
                    self.call(rank, y[part], bound)
        finally:
            deep_gemm.set_num_sms(before)
        torch.cuda.synchronize()

    def _load(self, y: Tensor, parts: list[slice], bound: int) -> None:
        """Load what the calls launch, since the driver loads no kernel while another one waits for it. Calls of an old
        epoch find all flags raised."""
        epochs = [buffer.epochs for buffer in self.buffers if buffer.epochs is not None]
        state = [*self.memory, *epochs, self.stats]
        saved = [tensor.clone() for tensor in state]
        torch.cuda._sleep(1)
        for epoch in epochs:
            epoch.fill_(-(1 << 20))
        for rank, part in enumerate(parts):
            self.call(rank, y[part], bound)
        for tensor, value in zip(state, saved, strict=True):
            tensor.copy_(value)
        torch.cuda.synchronize()

    def _by_threads(
        self, y: Tensor, tokens: dict[str, Tensor], parts: list[slice], bound: int, late: dict[int, float]
    ) -> None:
        errors = list[BaseException]()

        def call(rank: int) -> None:
            try:
                time.sleep(late.get(rank, 0.0))
                fill(self.buffers[rank], tokens, parts[rank])
                self.call(rank, y[parts[rank]], bound)
            except BaseException as error:  # shown by the test
                errors.append(error)

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


def fill(buffer: Any, tokens: dict[str, Tensor], rows: slice) -> None:
    x, chosen, weights = (tokens[name][rows].to(buffer.x.device) for name in ("x", "topk_idx", "topk_weights"))
    own = buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights
    deep_gemm.mega_moe_pre_dispatch_sm90(x, chosen.int(), weights, *own, num_tokens=len(x))


def tokens_of(count: int, experts: int, top_k: int, seed: int, hot: bool) -> dict[str, Tensor]:
    """``hot``: all choose the last expert first."""
    given = problem(count, experts, top_k, 16, 16, seed)
    chosen = given["topk_idx"]
    if hot:
        chosen[chosen == experts - 1] = -1
        chosen[:, 0] = experts - 1
    x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return {"x": x, "topk_idx": chosen, "topk_weights": given["topk_weights"]}


def compare(layer: Layer, counts: tuple[int, ...], seed: int, late: dict[int, float], hot: bool = False) -> None:
    tokens = tokens_of(sum(counts), layer.experts, layer.top_k, seed, hot)
    layer.stats.zero_()
    assert torch.equal(layer.found(tokens, counts, late), layer.wanted(tokens))
    chosen = tokens["topk_idx"].flatten()
    of_experts = chosen[(chosen >= 0) & (chosen < layer.experts)].bincount(minlength=layer.experts)
    assert layer.stats.flatten().tolist() == of_experts.tolist()


CASES: dict[str, tuple[int, int, int, tuple[int, ...], dict[int, float], bool]] = {
    "two": (2, 8, 2, (5, 9), {}, False),
    "more tokens": (3, 6, 4, (40, 3, 29), {0: 0.03}, False),
    "eight, some without tokens": (8, 8, 3, (0, 4, 0, 1, 9, 0, 2, 3), {6: 0.05}, False),
    "a hot expert": (4, 8, 2, (30, 2, 0, 17), {3: 0.05}, True),
}
"""Ranks, experts, top_k, tokens of each rank, ranks that are late, and whether all choose one expert."""


IMPATIENT = ("moe_ranks.cuh", "1 << 26", "300")
"""An edit of a header: ranks wait for less than a millisecond."""


def without_the_other(_mesh: Any, headers: Path) -> str:
    """A job of `spawned`: the error of a call that the other one of two ranks does not make, by device code of
    ``headers``."""
    builder = Builder(headers.parent / "cache", include_dir=headers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "default_builder", lambda: builder)
        layer = Layer(patch, 2, 4, 1)
        try:
            layer.call(0, torch.empty(1, WIDTH, device="cuda").bfloat16(), 1)
            torch.cuda.synchronize()
        except RuntimeError as error:
            return str(error)
    return ""


def over_gpus(mesh: Any, calls: int) -> list[bool]:
    """A job of `spawned`: whether the results of calls, each with other counts of tokens, are those of one rank."""
    rank, ranks, experts, top_k = mesh.get_rank(), mesh.size(), 16, 4
    given, found = problem(1, experts, top_k, WIDTH, INNER), []
    first, second = (tuple(part.cuda() for part in given[name]) for name in ("gate_up", "down"))
    weights = deep_gemm.transform_weights_for_mega_moe_sm90(first, second)  # type: ignore[arg-type]
    own = slice(rank * experts // ranks, (rank + 1) * experts // ranks)
    sizes = top_k, WIDTH, INNER
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(mesh.get_group(), experts, MOST, *sizes)
    one = deep_gemm.get_symm_buffer_for_mega_moe(None, experts, MOST * ranks, *sizes)
    for seed in range(calls):
        counts = [(seed * 7 + 13 * each) % 100 for each in range(ranks)]
        tokens, begin = tokens_of(sum(counts), experts, top_k, seed, seed % 5 == 4), sum(counts[:rank])
        part = slice(begin, begin + counts[rank])
        fill(buffer, tokens, part)
        fill(one, tokens, slice(None))
        y, whole = (torch.empty(count, WIDTH, device="cuda").bfloat16() for count in (counts[rank], sum(counts)))
        own_weights = [(values[own], scales[own]) for values, scales in weights]
        deep_gemm.fp8_mega_moe(y, *own_weights, buffer, num_tokens_bound=max(counts))
        deep_gemm.fp8_mega_moe(whole, *weights, one)
        found.append(torch.equal(y, whole[part]))
    return found
