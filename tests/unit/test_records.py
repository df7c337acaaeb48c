"""Records are frozen dataclasses in all that anybody sees."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, replace
from typing import Any

import pytest

from deep_gemm.records import record


def _classes(decorate: Any) -> list[type]:
    @decorate(frozen=True)
    class Base:
        """Some text."""

        x: int

    @decorate(frozen=True)
    class More(Base):
        y: str = "none"
        hidden: int = field(default=3, repr=False)
        seconds: dict[str, float] = field(default_factory=dict, hash=False)

        def __post_init__(self) -> None:
            if self.x < 0:
                raise ValueError("below zero")

    @decorate(frozen=True, eq=False)
    class Itself:
        x: int

    @decorate(frozen=True)
    class Empty:
        pass

    return [Base, More, Itself, Empty]


MADE = {ours.__name__: (ours, theirs) for ours, theirs in zip(_classes(record), _classes(dataclass), strict=True)}
CALLS: dict[str, Callable[[Any], Any]] = {
    "repr": lambda c: repr(c(1)), "equal": lambda c: (c(1) == c(1), c(1) == c(2), c(1) == 1, c(1) != c(1)),
    "hash": lambda c: (hash(c(1)) == hash(c(1)), {c(1), c(2)} == {c(2), c(1)}),
    "replace": lambda c: repr(replace(c(1), x=2)),
    "fields": lambda c: [(each.name, each.type, each.repr) for each in fields(c)],
    "asdict": lambda c: asdict(c(1)), "signature": lambda c: str(inspect.signature(c)),
    "match": lambda c: c.__match_args__, "copy": lambda c: repr(copy.copy(c(1))), "state": lambda c: vars(c(1)),
}  # fmt: skip


def _seen(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except (TypeError, ValueError) as error:
        return type(error)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", MADE)
def test_a_record_is_like_a_frozen_dataclass(name: str, call: str) -> None:
    ours, theirs = MADE[name]
    assert _seen(lambda: CALLS[call](ours)) == _seen(lambda: CALLS[call](theirs))


def test_a_record_is_frozen_and_runs_what_follows_its_fields() -> None:
    more: Any = MADE["More"][0]
    made = more(1)
    with pytest.raises(FrozenInstanceError, match="x"):
        made.x = 2
    with pytest.raises(FrozenInstanceError, match="x"):
        del made.x
    with pytest.raises(ValueError, match="below zero"):
        more(-1)
    assert more(1).seconds is not more(1).seconds


def test_a_record_travels_between_processes() -> None:
    from deep_gemm.arch import SM90

    assert pickle.loads(pickle.dumps(SM90)) == SM90


@pytest.mark.parametrize("options", [{"init": False}, {"kw_only": True}])
def test_what_a_record_cannot_be_is_refused(options: dict[str, bool]) -> None:
    with pytest.raises(TypeError, match="use dataclasses"):

        @record(frozen=True)
        class Odd:
            x: int = field(default=1, **options)  # type: ignore[call-overload]
