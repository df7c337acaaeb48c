"""Every exception that `deep_gemm` raises on purpose.

Several classes also derive from a built-in exception, so that clients that catch `RuntimeError`, `ValueError` or
`NotImplementedError` go on working.
"""

from __future__ import annotations

from collections.abc import Sequence


class DeepGemmError(Exception):
    """Base of all errors of this package."""


class InvalidInputError(DeepGemmError, ValueError, RuntimeError):
    """An argument is wrong. The message names it, says what was expected, what came, and what to do."""


class UnsupportedError(DeepGemmError, NotImplementedError):
    """The request is well formed, but this hardware or this version cannot do it. Also a `RuntimeError`."""


class SettingError(DeepGemmError, ValueError):
    """A `DG_*` variable, or a value given to `settings.override`, is not what that setting accepts."""


class NotWarmError(DeepGemmError, RuntimeError):
    """A kernel would have to be compiled or loaded inside CUDA-graph capture, which the driver does not allow."""


class CompileError(DeepGemmError, RuntimeError):
    """A kernel did not compile, or compiled to something that `DG_JIT_PTXAS_CHECK` refuses.

    `log` is the compiler's own output, `source_path` where the source was stored (None when it could not be stored),
    `options` the exact options given to the compiler. All three are part of the message.
    """

    def __init__(
        self, message: str, *, log: str = "", source_path: str | None = None, options: Sequence[str] = ()
    ) -> None:
        self.summary = message
        self.log = log
        self.source_path = source_path
        self.options = tuple(options)
        super().__init__(message)

    def __str__(self) -> str:
        parts = [self.summary]
        if self.source_path is not None:
            parts.append(f"source: {self.source_path}")
        if self.options:
            parts.append("options: " + " ".join(self.options))
        if self.log.strip():
            parts.append("log:\n" + self.log.strip())
        return "\n".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        # Workers send these errors to their parent process; the default pickling would lose the keyword arguments.
        return _rebuild_compile_error, (type(self), self.summary, self.log, self.source_path, self.options)


class CompilerNotFoundError(CompileError):
    """No usable compiler was found, or the one that a setting names cannot be used."""


class DriverError(DeepGemmError, RuntimeError):
    """A call of the CUDA driver failed. `status` is the CUresult as an integer, `name` its name."""

    def __init__(self, message: str, *, status: int = -1, name: str = "") -> None:
        self.status = status
        self.name = name
        super().__init__(message)


def _rebuild_compile_error(
    cls: type[CompileError], message: str, log: str, source_path: str | None, options: tuple[str, ...]
) -> CompileError:
    return cls(message, log=log, source_path=source_path, options=options)
