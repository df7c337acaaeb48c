"""The error of DG_JIT_FORBID_COMPILE: what is missing, where it was looked for, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from deep_gemm.errors import CompileError
from deep_gemm.jit.binary import BuildRequest
from deep_gemm.jit.cache.packs import Packs


def forbidden(request: BuildRequest, source_key: str, packs: Packs, on_disk: str, key: str = "") -> CompileError:
    """`on_disk` says where on disk it was looked for, or why it was not. There is no `key` without a compiler."""
    used: Sequence[str] = [str(found.path) for found in packs.found() if found.pack is not None]
    keys = f"key {key}, source key {source_key}" if key else f"source key {source_key}"
    return CompileError(
        f"DG_JIT_FORBID_COMPILE forbids compiling {request.name} for {request.arch} ({keys}), which is neither in "
        f"memory nor in a pack ({', '.join(used) or 'none is used'}) nor on disk ({on_disk.rstrip('.')}). Run "
        "`deep-gemm precompile` for its shape, with the same cache directory and compiler, or with --pack and "
        "DG_JIT_PRECOMPILED naming that pack; or unset DG_JIT_FORBID_COMPILE."
    )
