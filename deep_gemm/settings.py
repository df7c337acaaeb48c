"""Every environment variable that this package reads, typed and documented, with a scoped override.

Nothing is read at import: some callers set variables after importing. Each access reads the environment again, which
is cheap enough for everything but the warm path, and the warm path reads no settings.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, overload

from deep_gemm.errors import SettingError
from deep_gemm.listeners import Listeners

T = TypeVar("T")


# A parser takes the text of an environment variable, or what an override gives, and raises ValueError or TypeError for
# what is no value of its setting.

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def parse_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text not in _TRUE | _FALSE:
        raise ValueError
    return text in _TRUE


def parse_path(value: object) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike):
        raise TypeError
    text = os.fspath(value)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError
    # The meaning of "~" can change. Other paths are cached, which also saves hashing and formatting them again.
    return _home_path(text) if text.startswith("~") else _plain_path(text)


_plain_path = functools.lru_cache(maxsize=64)(Path)


def _home_path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # "~" where there is no home directory
        raise ValueError from error


_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGT])(I?))?B?")


def parse_size(value: object) -> int | None:
    """Bytes. K, M, G and T are powers of 1000, Ki, Mi, Gi and Ti of 1024; a B may follow."""
    if value is None:
        return None
    match = _SIZE.fullmatch(str(value).strip().upper())
    if match is None:
        raise ValueError
    number, prefix, binary = match.groups()
    whole, _, part = number.partition(".")
    size = int(whole + part) * (1024 if binary else 1000) ** (" KMGT".index(prefix) if prefix else 0) // 10 ** len(part)
    if size == 0:
        raise ValueError
    return size


def parse_paths(value: object) -> tuple[Path, ...]:
    if isinstance(value, str):
        return _home_paths(value) if "~" in value else _plain_paths(value)
    return _each_path(value if isinstance(value, list | tuple) else [value])


def _home_paths(text: str) -> tuple[Path, ...]:
    return _each_path(text.split(os.pathsep))


_plain_paths = functools.lru_cache(maxsize=64)(_home_paths)


def _each_path(parts: Iterable[object]) -> tuple[Path, ...]:
    paths = [parse_path(part) for part in parts if part != ""]
    return tuple(path for path in paths if path is not None)


FALLBACKS = ("cublaslt", "triton", "torch")


def parse_fallback(value: object) -> tuple[str, ...]:
    parts = value if isinstance(value, list | tuple) else str(value).split(",")
    ways = tuple(str(part).strip().lower() for part in parts)
    if ways in (("",), ("error",)):
        return ()
    if any(way not in FALLBACKS for way in ways):
        raise ValueError
    return ways


TRACE = ".trace.json"
"""The ending of a chrome trace's name, which is no report."""


def parse_monitor(value: object) -> Path | None:
    path = None if str(value).strip().lower() == "off" else parse_path(value)
    if path is not None and (path.suffix not in (".json", ".prom") or path.name.endswith(TRACE)):
        raise ValueError
    return path


TUNE = ("off", "read", "on")


def parse_tune(value: object) -> str:
    text = str(value).strip().lower()
    if text not in TUNE:
        raise ValueError
    return text


def parse_count(value: object) -> int:
    number = int(str(value))
    if number < 1:
        raise ValueError
    return number


class SettingInfo(NamedTuple):
    """One line of `settings.describe()`. `value` is the error's text where `source` ends in "(invalid)"."""

    attribute: str
    variable: str
    type: str
    default: Any
    doc: str
    value: Any
    source: str


class Setting(Generic[T]):
    """One setting: read from the innermost override, else from its variables in order, else its default.

    `parse` turns text into a value, or an override's value into one of the right type, and raises ValueError.
    An empty variable counts as unset, which is how shells and container files switch one off.
    """

    def __init__(
        self, variables: str, type_name: str, parse: Callable[[Any], T], default: T, expected: str, doc: str
    ) -> None:
        self.variables = tuple(variables.split())
        self.type_name = type_name
        self.parse = parse
        self.default = default
        self.expected = expected
        self.doc = doc
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Setting[T]: ...
    @overload
    def __get__(self, instance: Settings, owner: type) -> T: ...
    def __get__(self, instance: Settings | None, owner: type) -> Setting[T] | T:
        if instance is None:
            return self
        return self.read(instance)[0]

    def __set__(self, instance: Settings, value: object) -> None:
        raise AttributeError(
            f"settings.{self.name} cannot be assigned; use `with settings.override({self.name}=...)` "
            f"or set {self.variables[0]}"
        )

    def read(self, instance: Settings) -> tuple[T, str]:
        """The value and where it came from: "override", the variable's name, or "default"."""
        for layer in reversed(instance._layers):
            if self.name in layer:
                return layer[self.name], "override"
        for variable in self.variables:
            text = os.environ.get(variable, "")
            if text:
                return self.convert(text, variable), variable
        return self.default, "default"

    def convert(self, value: object, where: str) -> T:
        try:
            return self.parse(value)
        except (ValueError, TypeError) as error:
            raise SettingError(f"{where} must be {self.expected}, but it is {value!r}.") from error


def _flag(variable: str, doc: str, default: bool = False) -> Setting[bool]:
    return Setting(variable, "bool", parse_bool, default, "1/true/yes/on or 0/false/no/off", doc)


def _path(variables: str, doc: str, expected: str = "a path") -> Setting[Path | None]:
    return Setting(variables, "path", parse_path, None, expected, doc)


def _paths(variable: str, doc: str) -> Setting[tuple[Path, ...]]:
    return Setting(variable, "paths", parse_paths, (), f"paths, separated by {os.pathsep!r}", doc)


class Settings:
    """The settings of this process. Read attributes; change them with `override` or through the environment."""

    cache_dir = _path("DG_JIT_CACHE_DIR", "Where compiled kernels are kept; ~/.deep_gemm when unset.")
    trust_cache_dir = _flag(
        "DG_JIT_TRUST_CACHE_DIR",
        "Use a cache directory or a pack even if other users own it or can write to it, or if it is a symbolic link.",
    )
    precompiled = _paths(
        "DG_JIT_PRECOMPILED",
        f"Packs of precompiled kernels, or directories of them, separated by {os.pathsep!r}; asked before the cache "
        "directory, and before any compiler is looked for.",
    )
    shipped = _flag("DG_JIT_SHIPPED", "Use the kernels in deep_gemm's own wheel, if it holds some.", default=True)
    cache_limit: Setting[int | None] = Setting(
        "DG_JIT_CACHE_LIMIT",
        "size",
        parse_size,
        None,
        'a size above zero such as "2GiB", "500M" or a number of bytes (unset it for no limit)',
        "The largest size of the cache, such as 2GiB or 500M. The least recently used kernels are removed. No limit "
        "when unset.",
    )
    use_nvrtc = _flag("DG_JIT_USE_NVRTC", "Compile with NVRTC even where NVCC is found.")
    nvcc = _path("DG_JIT_NVCC_COMPILER", "The nvcc to use. It is an error if this one cannot be used.")
    cuda_home = _path("CUDA_HOME CUDA_PATH", "A CUDA toolkit to look for nvcc, NVRTC and disassemblers in.")
    ffma_bursts = _flag(
        "DG_FFMA_BURSTS",
        "Edit scheduling hints of FFMAs in compiled GEMM kernels, which makes them a little faster; 0 takes kernels as "
        "the compiler made them. The two are different kernels in the cache and in packs.",
        default=True,
    )
    debug = _flag(
        "DG_JIT_DEBUG", "Log each step of the JIT, and define DG_DEBUG=1 for device code: barrier waits trap on a hang."
    )
    forbid_compile = _flag(
        "DG_JIT_FORBID_COMPILE", "Raise CompileError where a kernel would have to be compiled: all must be precompiled."
    )
    forbid_transpose = _flag(
        "DG_FORBID_TRANSPOSE",
        "Refuse FP8 operands whose K is not contiguous, which each call would transpose first, on CUDA and CPU alike.",
    )
    check = _flag(
        "DG_CHECK",
        "Check, in each call, what kernels take on trust: labels, counts, ends and sizes of groups, "
        "pages and schedules in GPU memory. Each such call waits for the GPU.",
    )
    nvtx = _flag("DG_NVTX", "Make each call an NVTX range, with operation, shape and config, for Nsight Systems.")
    print_configs = _flag("DG_PRINT_CONFIGS", "Print the configuration chosen for each new problem.")
    print_compiler_command = _flag("DG_JIT_PRINT_COMPILER_COMMAND", "Print each compiler command before it runs.")
    ptxas_verbose = _flag("DG_JIT_PTXAS_VERBOSE", "Print what ptxas says of each kernel that is compiled.")
    ptxas_check = _flag(
        "DG_JIT_PTXAS_CHECK", "Refuse a kernel that spills, uses local memory, or whose wgmma were serialised."
    )
    lineinfo = _flag("DG_JIT_WITH_LINEINFO", "Compile with line information, for profilers and compute-sanitizer.")
    dump_ptx = _flag("DG_JIT_DUMP_PTX", "Keep the PTX of each kernel that is compiled beside its cubin.")
    dump_sass = _flag("DG_JIT_DUMP_SASS", "Keep the SASS of each kernel that is compiled beside its cubin.")
    dump_asm = _flag("DG_JIT_DUMP_ASM", "Keep both the PTX and the SASS.")
    print_load_time = _flag("DG_JIT_PRINT_LOAD_TIME", "Print how long each cubin took to load.")
    debug_dump = _path("DG_JIT_DEBUG_DUMP", "A JSON file, written at exit, with the choice made for each plan.")
    fallback: Setting[tuple[str, ...]] = Setting(
        "DG_FALLBACK",
        "names",
        parse_fallback,
        (),
        f'"error", or of {", ".join(FALLBACKS)} one or several with commas between them',
        "What computes a call for which this GPU has no kernel: cublaslt, triton or torch (the slow reference), or "
        "several of them with commas, which are tried in order, with a warning. Unset or error: UnsupportedError.",
    )
    monitor: Setting[Path | None] = Setting(
        "DG_MONITOR",
        "path",
        parse_monitor,
        None,
        '"off", or a path that ends in .json or .prom, and not in .trace.json (use nsys and DG_NVTX)',
        "A file that is written at exit with counts and times of all calls: a report (.json) or Prometheus' text "
        "(.prom). %p in it becomes the process's id.",
    )
    monitor_every: Setting[int] = Setting(
        "DG_MONITOR_EVERY", "number", parse_count, 16, "a positive integer", "DG_MONITOR times one call in this many."
    )
    tune: Setting[str] = Setting(
        "DG_TUNE",
        "word",
        parse_tune,
        "off",
        f"one of {', '.join(TUNE)}",
        "off: configs are chosen by the model alone. read: by times that were measured on this GPU model, if the cache "
        "directory has some. on: also measure the best few configs of each new shape.",
    )

    def __init__(self) -> None:
        # Replaced as a whole, never mutated, so that readers in other threads need no lock.
        self._layers: tuple[dict[str, Any], ...] = ()
        self._lock = threading.Lock()
        self._changed = Listeners()

    def on_change(self, listener: Callable[[Collection[str]], None]) -> None:
        """Call ``listener`` with the names of the settings that `override` has changed, and when it changes them back.
        A change of the environment calls none.

        >>> changed = []
        >>> deep_gemm.settings.on_change(changed.extend)
        >>> with deep_gemm.settings.override(nvtx=True):
        ...     changed
        ['nvtx']
        """
        self._changed.add(listener)

    @contextmanager
    def override(self, **values: object) -> Iterator[Settings]:
        """Set settings for the duration of a `with` block: in all threads of this process, nestable.

        Overrides win over the environment. Raises SettingError for an unknown name or a value of the wrong kind.

        >>> with deep_gemm.settings.override(cache_limit="2GiB"):
        ...     deep_gemm.settings.cache_limit
        2147483648
        """
        known = self._known()
        layer: dict[str, Any] = {}
        for name, value in values.items():
            if name not in known:
                raise SettingError(f"There is no setting {name!r}. The settings are: {', '.join(sorted(known))}.")
            layer[name] = known[name].convert(value, f"settings.override({name}=...)")
        with self._lock:
            self._layers = (*self._layers, layer)
        try:
            self._changed(layer.keys())
            yield self
        finally:
            with self._lock:
                self._layers = tuple(entry for entry in self._layers if entry is not layer)
            self._changed(layer.keys())

    def describe(self) -> list[SettingInfo]:
        """All settings in the order of their definition. Never raises: an invalid value shows up as its error.

        >>> with deep_gemm.settings.override(tune="read"):
        ...     [(x.variable, x.value, x.source) for x in deep_gemm.settings.describe() if x.attribute == "tune"]
        [('DG_TUNE', 'read', 'override')]
        """
        lines = []
        for name, setting in self._known().items():
            try:
                value, source = setting.read(self)
            except SettingError as error:
                value, source = str(error), "environment (invalid)"
            variable = " or ".join(setting.variables)
            lines.append(SettingInfo(name, variable, setting.type_name, setting.default, setting.doc, value, source))
        return lines

    def misspelt(self) -> list[str]:
        """A sentence for each DG_ variable of the environment that is no setting, and so has no effect.

        >>> import os
        >>> os.environ["DG_TUNED"] = "on"
        >>> deep_gemm.settings.misspelt()
        ['DG_TUNED is no setting of deep_gemm, and has no effect. Did you mean DG_TUNE?']
        >>> del os.environ["DG_TUNED"]
        """
        known = [variable for setting in self._known().values() for variable in setting.variables]
        found = []
        for name in sorted(name for name in os.environ if name.startswith("DG_") and name not in known):
            near = difflib.get_close_matches(name, known, 1, 0.8)
            hint = f"Did you mean {near[0]}?" if near else "`deep-gemm doctor` and the docs list the settings."
            found.append(f"{name} is no setting of deep_gemm, and has no effect. {hint}")
        return found

    @classmethod
    def _known(cls) -> dict[str, Setting[Any]]:
        return {name: value for name, value in vars(cls).items() if isinstance(value, Setting)}

    def _after_fork(self) -> None:
        self._lock = threading.Lock()


settings = Settings()


def environment() -> Callable[[bytes], object]:
    """A look-up of a variable's text by its name, for the warm path: `os.environ` takes twenty times as long."""
    held: dict[bytes, object] | None = getattr(os.environ, "_data", None)
    return (lambda name: os.environ.get(name.decode())) if held is None else held.get


@contextmanager
def variables(**values: str | None) -> Iterator[None]:
    """Set environment variables, or remove those whose value is None, for the duration of a `with` block."""
    before = {name: os.environ.get(name) for name in values}

    def put(wanted: dict[str, str | None]) -> None:
        for name, value in wanted.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    put(values)
    try:
        yield
    finally:
        put(before)


def child_environment(*removed: str) -> dict[str, str]:
    """The environment for a child process, without the variables `removed`."""
    return {name: value for name, value in os.environ.items() if name not in removed}


os.register_at_fork(after_in_child=settings._after_fork)
