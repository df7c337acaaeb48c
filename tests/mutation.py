"""One edit of one header that breaks kernels."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headers import edited_headers


@dataclass(frozen=True)
class Mutation:
    """`old` in the header `file` becomes `new`, which breaks the kernels named in `kernels` (by default those with
    operands that are not swapped). If it shows only for large K, `k` is such a K."""

    name: str
    file: str
    old: str
    new: str
    kernels: tuple[str, ...] = ("ahead", "one by one", "segments", "split", "direct")
    k: int = 0

    def headers(self, folder: Path) -> Path:
        """The device headers with this mutation, in `folder`."""
        return edited_headers(folder, self.file, (self.old, self.new))


def mutants(module: Any) -> list[tuple[Mutation, str]]:
    """Every mutation of a module (``MUTATIONS``) with each of the kernels (``KERNELS``) that it breaks."""
    return [(mutation, kernel) for mutation in module.MUTATIONS for kernel in mutation.kernels]
