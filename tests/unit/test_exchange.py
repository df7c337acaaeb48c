"""Exchanging kernels between ranks, through each kind of store that torch has."""

import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from deep_gemm.aot import build, distributed
from deep_gemm.aot.exchange import CHUNK, BuildExchange, StoreError
from deep_gemm.aot.workload import GemmShape
from deep_gemm.errors import InvalidInputError, UnsupportedError
from deep_gemm.jit import Binary, Resources

KEYS = ["a", "b", "c"]
Client = Callable[[], dist.Store]


def binary(size: int = 1000) -> Binary:
    cubin = (bytes(range(251)) * (size // 251 + 1))[:size]
    return Binary(
        "k", "key", "sm_90a", cubin, Resources(1, 2, 3, 4, 5, 6), None, "compiled", "c", {"compile": 0.5}, "s", "12.9"
    )


@pytest.fixture(scope="module")
def connections() -> list[dist.Store]:
    """Two connections to one server, shared by all tests: where names resolve slowly, connecting can take torch
    seconds."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [server, dist.TCPStore("127.0.0.1", server.port, is_master=False)]


@pytest.fixture(params=["tcp", "hash", "file"])
def client(request: pytest.FixtureRequest, tmp_path: Path, connections: list[dist.Store]) -> Client:
    """A function that gives the ranks, in turn, their connections to one empty store."""
    if request.param == "tcp":
        turns = itertools.cycle(connections)
        return lambda: dist.PrefixStore(str(tmp_path), next(turns))
    if request.param == "hash":
        store = dist.HashStore()
        return lambda: store
    return lambda: dist.FileStore(str(tmp_path / "store"), 2)


def two(client: Client, keys: tuple[list[str], list[str]] = (KEYS, KEYS)) -> tuple[BuildExchange, BuildExchange]:
    return BuildExchange(client(), 0, 2, keys[0]), BuildExchange(client(), 1, 2, keys[1])


def soon() -> float:
    return time.monotonic() + 60


def test_each_place_is_drawn_once(client: Client) -> None:
    first, second = two(client)
    assert [first.draw(), second.draw(), first.draw(), second.draw(), first.draw()] == [0, 1, 2, None, None]
    assert (first.agreed, second.agreed, second.first_rank) == (True, True, 0)


@pytest.mark.parametrize("size", [1, 1000, CHUNK, 3 * CHUNK + 17])
def test_bytes_of_any_size_arrive(client: Client, size: int) -> None:
    first, second = two(client)
    first.publish(1, binary(size))
    assert second.wait(1, soon())
    assert second.fetch(1) == binary(size)


def test_what_does_not_come_is_waited_for_until_the_deadline(client: Client) -> None:
    first, second = two(client)
    start = time.monotonic()
    assert not second.wait(0, start + 0.3)
    assert not second.wait(1, start + 0.3)
    # A FileStore counts in whole seconds, and a busy machine takes some of its own. A store's own limit is minutes.
    assert 0.2 < time.monotonic() - start < 30.0
    first.publish(1, binary())
    assert first.wait(1, start)  # a TCPStore does not acknowledge set(): only after this is the value there for others
    assert second.wait(1, start), "after the deadline, what is there already is taken"


def test_a_kernel_that_could_not_be_built_is_not_waited_for(client: Client) -> None:
    first, second = two(client)
    first.publish(2, None)
    assert second.wait(2, soon())
    assert second.fetch(2) is None


def test_other_lists_are_noticed_and_kept_apart(client: Client) -> None:
    first, second = two(client, (KEYS, ["a", "b"]))
    assert (first.agreed, second.agreed, second.first_rank) == (True, False, 0)
    assert [first.draw(), second.draw()] == [0, 0]
    first.publish(0, binary())
    assert not second.wait(0, time.monotonic())


def test_calls_are_kept_apart(client: Client) -> None:
    first, _ = two(client)
    first.publish(first.draw() or 0, binary())
    again, _ = two(client)
    assert again.draw() == 0
    assert not again.wait(0, time.monotonic())


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("0/0", b"rubbish", "checksum"), ("0/0", binary().encode()[:-1], "checksum"),
        ("0", b"2", "parts of it are missing"), ("0", b"many", "invalid literal"), ("0", b"-1", "-1 parts"),
        ("0", b"100000", "100000 parts"),
    ],
)  # fmt: skip
def test_damage_is_refused_in_words(client: Client, key: str, value: bytes, words: str) -> None:
    first, second = two(client)
    first.publish(0, binary())
    first._set.set(key, value)
    with pytest.raises(ValueError, match=words):
        second.fetch(0)


@pytest.mark.parametrize("value", [b"\xff\xfe", b"one abc", b"1" * 5000 + b" abc"])
def test_what_no_rank_writes_is_as_good_as_no_store(value: bytes) -> None:
    """Such a value must not end a precompilation: after a StoreError, this rank builds by itself."""
    store = dist.HashStore()
    store.set("deep_gemm/ahead/1/first", value)
    with pytest.raises(StoreError, match="no rank of this version writes"):
        BuildExchange(store, 0, 1, KEYS)
    exchange = BuildExchange(store, 0, 1, KEYS)
    exchange.draw()
    exchange._call.set("sets/1", value)
    with pytest.raises(StoreError, match="no rank of this version writes"):
        exchange.close()


def test_the_last_to_close_deletes_everything() -> None:
    store = dist.HashStore()
    before = store.num_keys()
    ranks = [BuildExchange(store, rank, 3, KEYS if rank else ["other"]) for rank in range(3)]
    for exchange in ranks:
        while (place := exchange.draw()) is not None:
            exchange.publish(place, binary(2 * CHUNK))
    for exchange in ranks[:2]:
        exchange.close()
    assert ranks[2].fetch(2) is not None, "while one still reads, all stays"
    ranks[2].close()
    assert store.num_keys() == before + 3, "a count of calls for each rank"


def test_a_store_that_ended_is_told_at_once() -> None:
    code = """
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
input()
"""
    server = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    port = int(server.stdout.readline())
    exchange = BuildExchange(dist.TCPStore("127.0.0.1", port, is_master=False), 0, 2, KEYS)
    server.kill()
    server.communicate()
    start = time.monotonic()
    actions: list[Callable[[], Any]] = [
        lambda: exchange.wait(0, start + 60),
        exchange.draw,
        lambda: exchange.publish(0, binary()),
        lambda: exchange.fetch(0),
        exchange.close,
    ]
    for action in actions:
        with pytest.raises(StoreError):
            action()
    assert time.monotonic() - start < 30


def test_without_a_process_group_everything_is_built_here(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(build, "precompile", lambda shapes, **options: seen.update(options))
    distributed.precompile([GemmShape(1, 128, 128)], num_sms=7, jobs=2)
    assert seen == {"num_sms": 7, "jobs": 2, "progress": None}


def test_a_store_without_a_process_group_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="init_process_group first"):
        distributed.precompile([], store=dist.HashStore())


@pytest.mark.parametrize("timeout", [-1.0, float("nan"), float("inf")])
def test_a_timeout_that_is_none_is_refused(timeout: float) -> None:
    with pytest.raises(InvalidInputError, match="timeout must be"):
        distributed.precompile([], timeout=timeout)


def test_a_torch_that_hides_its_store_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist.distributed_c10d, "_get_default_store")
    with pytest.raises(UnsupportedError, match="pass store="):
        distributed._default_store()
