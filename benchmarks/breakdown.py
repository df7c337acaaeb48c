"""Where the host time of a warm call goes: its own statements, taken from its source, each timed alone.

The look-up key is a tuple of reads in `deep_gemm.dense.fp8_gemm_nt`. They are found in the function's syntax tree and
grouped by what they read, so that what is timed is what runs, also after somebody has changed it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deep_gemm import dense
from deep_gemm.benchmarks.backends import Operands
from deep_gemm.errors import DeepGemmError

Row = dict[str, Any]

_KINDS = {
    "data_ptr": "key: addresses (data_ptr)",
    "shape": "key: shapes",
    "stride": "key: strides",
    "dtype": "key: dtypes",
    "requires_grad": "key: requires_grad",
}
_OTHER = "key: stream, device, gradient mode, options"
UNPACK, TUPLE, LOOKUP = "unpacking the arguments", "key: the tuple itself", "looking the key up"
LAUNCH, CHECK, REST = "cuLaunchKernelEx", "calling the launch record, checking its status", "the rest"


class WarmPath:
    """The statements of `fp8_gemm_nt` before its look-up: `unpack` is source text, `reads` expressions by kind."""

    def __init__(self, function: Callable[..., Any] = dense.fp8_gemm_nt) -> None:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        found = next((block for block in _blocks(tree) if any(map(_is_key, block))), None)
        if found is None:
            raise DeepGemmError(
                f"{function.__name__} assigns no tuple to `key`, so its warm path cannot be taken apart. If it was "
                "rewritten, benchmarks/breakdown.py must follow."
            )
        at = next(index for index, statement in enumerate(found) if _is_key(statement))
        key = found[at]
        if not isinstance(key, ast.Assign) or not isinstance(key.value, ast.Tuple):
            raise DeepGemmError("`key` is not a tuple.")
        parameters = inspect.signature(function).parameters.values()
        self.defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
        self.unpack = [ast.unparse(statement) for statement in found[:at] if not isinstance(statement, ast.AnnAssign)]
        self.elements = [ast.unparse(element) for element in key.value.elts]
        self.reads: dict[str, list[str]] = {}
        for element in key.value.elts:
            self.reads.setdefault(_kind(element), []).append(ast.unparse(element))
        self.function = function

    def key(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """The key of one call, built anew."""
        scope = self.locals(arguments)
        return tuple(eval(element, dict(self.function.__globals__), scope) for element in self.elements)

    def locals(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The function's local names once its arguments are unpacked."""
        scope = self.defaults | dict(arguments)
        exec("\n".join(self.unpack), dict(self.function.__globals__), scope)
        return scope

    def statements(self, arguments: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """(part, statement, local names that it needs), for everything up to and with the look-up."""
        scope = self.locals(arguments)
        yield UNPACK, "\n".join(self.unpack), scope
        for kind, reads in self.reads.items():
            # The reads alone: a statement an expression, whose value is dropped.
            yield kind, "\n".join(reads), scope
        values = {f"v{index}": value for index, value in enumerate(self.key(arguments))}
        yield TUPLE, f"key = ({', '.join(values)},)", values
        # Equal and not the same, as in a call: comparing identical tuples would be free.
        yield LOOKUP, "warm = known.get(key)", {"known": {self.key(arguments): 1}, "key": self.key(arguments)}


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            yield body


def _is_key(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and any(isinstance(target, ast.Name) and target.id == "key" for target in node.targets)
    )


def _kind(element: ast.expr) -> str:
    target = element.func if isinstance(element, ast.Call) else element
    name = target.attr if isinstance(target, ast.Attribute) else ""
    return _KINDS.get(name, _OTHER)


def statement_us(
    statement: str, names: Mapping[str, Any], scope: Mapping[str, Any], calls: int = 2000, rounds: int = 15
) -> float:
    """Time of one run of `statement`, without the loop around it, in us: the least of `rounds` means.

    `names` are local variables of the timed code, as they are in the function, and `scope` its globals.
    """
    timed, empty = (_loop(text, names, scope) for text in (statement, "pass"))
    return max(0.0, _least(timed, names, calls, rounds) - _least(empty, names, calls, rounds))


def _loop(statement: str, names: Mapping[str, Any], scope: Mapping[str, Any]) -> Callable[..., None]:
    body = textwrap.indent(statement or "pass", "        ")
    source = f"def timed(_calls, {', '.join(names)}):\n    for _ in _calls:\n{body}\n"
    made: dict[str, Any] = {}
    exec(compile(source, "<timed>", "exec"), dict(scope), made)
    function: Callable[..., None] = made["timed"]
    return function


def _least(function: Callable[..., None], names: Mapping[str, Any], calls: int, rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        function(range(calls), **names)
        best = min(best, time.perf_counter() - start)
    return best / calls * 1e6


def before_launch(x: Operands, path: WarmPath | None = None, time_us: Callable[..., float] = statement_us) -> Row:
    """Us of each part of a warm call up to the launch, by part. `x` must have been multiplied before."""
    path = path or WarmPath()
    arguments = _arguments(x)
    scope = path.function.__globals__
    return {part: time_us(statement, names, scope) for part, statement, names in path.statements(arguments)}


def rows(whole: float, parts: Mapping[str, float]) -> list[Row]:
    """A row for each part, and the remainder to the measured `whole`, which may be below zero: parts are timed alone,
    with everything in the caches. All in us."""
    entries = [*parts.items(), (REST, whole - sum(parts.values()))]
    return [{"what": what, "us": round(us, 3), "part": True, "share": round(us / whole, 3)} for what, us in entries]


def launch_parts(record: float, driver: float, nothing: float) -> dict[str, float]:
    """The driver's part of a launch and ours, of what calling a launch record, the driver's function in it, and nothing
    at all take, in us."""
    return {LAUNCH: max(0.0, driver - nothing), CHECK: record - driver}


def record_of(x: Operands, path: WarmPath | None = None) -> Any:
    """The launch record that a warm call on `x` runs. Raises DeepGemmError if there is none: the operands were not
    multiplied twice on this stream, their scales have to be transposed, or another device is current."""
    record = dense._warm.get((path or WarmPath()).key(_arguments(x)))
    if not hasattr(record, "call"):
        raise DeepGemmError(
            "No launch record is kept for these operands. Multiply them twice first, with scales that are ready, on "
            "the stream and the device that are current now."
        )
    return record


def _arguments(x: Operands) -> dict[str, Any]:
    return {"a": (x.a, x.sfa), "b": (x.b, x.sfb), "d": x.d}
