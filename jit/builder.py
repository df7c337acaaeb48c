"""From a rendered source to a cubin: memory -> packs -> disk -> locks -> compile -> publish."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from deep_gemm.errors import CompileError, CompilerNotFoundError, InvalidInputError
from deep_gemm.jit import compilers
from deep_gemm.jit.binary import Binary, BuildRequest, check_same, of_entry, of_kernel
from deep_gemm.jit.cache import notes
from deep_gemm.jit.cache.disk import DiskCache, lock_name
from deep_gemm.jit.cache.entry import META, Address
from deep_gemm.jit.cache.files import absolute
from deep_gemm.jit.cache.memory import MemoryCache
from deep_gemm.jit.cache.packs import Packs
from deep_gemm.jit.cache.root import default_root
from deep_gemm.jit.compilers.base import Compiled, Compiler, common_flags
from deep_gemm.jit.driver.version import driver_release
from deep_gemm.jit.forking import ForkLock, late
from deep_gemm.jit.generator import include_dir as default_include_dir
from deep_gemm.jit.key import build_key, source_key
from deep_gemm.log import log, say, warn_once
from deep_gemm.records import record
from deep_gemm.settings import settings

__all__ = ["ERRORS", "HITS", "Binary", "BuildRequest", "Builder", "default_builder"]

HITS = ("memory", "pack", "disk")
ERRORS = ("failed", "forbidden", "unstored", "corrupted", "unusable", "lock_timeout")


@record(frozen=True)
class _ResolvedRequest:
    """A request, with what the current settings add to it."""

    request: BuildRequest
    compiler: Compiler
    flags: tuple[str, ...]
    key: str
    source_key: str
    disk: DiskCache | None
    # Entries are looked up under each driver in turn and written under the first.
    addresses: tuple[Address, ...]
    start: float

    @property
    def memory_key(self) -> tuple[str, str]:
        return (self.disk.path() if self.disk else "", self.key)


class Builder:
    """Builds each key once: other threads and processes that ask for the same key wait.

    `root`, `compiler` and `include_dir` default to what the settings say at each call. `lock_limit` is how many seconds
    another process may take for a key before it is compiled here too. `packs` default to those of the settings and of
    installed packages; a builder that is given its compiler has none. All methods are safe from several threads.
    """

    def __init__(
        self,
        root: Path | None = None,
        compiler: Compiler | None = None,
        include_dir: Path | None = None,
        lock_limit: float = 60.0,
        packs: Packs | None = None,
    ) -> None:
        self._root = absolute(root) if root is not None else None
        self._compiler = compiler
        self._include_dir = absolute(include_dir) if include_dir is not None else None
        self.lock_limit = lock_limit
        self.packs = packs or Packs(None if compiler is None else ())
        self._memory: MemoryCache[Binary] = MemoryCache()
        self._disks: dict[tuple[Path, bool], DiskCache] = {}
        self._lock = ForkLock()
        self._busy: dict[tuple[str, str], ForkLock] = {}
        self._reset_counts()

    @property
    def stats(self) -> dict[str, float]:
        """What this process did, as counts, and "compile_seconds", the time spent compiling. A forked child starts from
        zero, so that the counts of a service's workers can be added up.

        Hits: "memory", "pack", "disk". "adopted" from another process. "misses" = "compiled" + "failed" + "forbidden",
        some with a reason: "corrupted" (a damaged entry), "unusable" (no usable directory), "lock_timeout" (another
        process held the lock too long). "unstored": compiled or adopted, but not written to disk. "evictions": entries
        removed to keep DG_JIT_CACHE_LIMIT.
        """
        with self._lock.lock:
            self._own_counts()
            return dict(self._counts)

    def disk(self) -> DiskCache | None:
        """The disk layer of the current settings, or None where no directory can be used."""
        root = self._root or default_root()
        if root is None:
            message = "Kernels are kept in memory only: there is no home directory. Set DG_JIT_CACHE_DIR to keep them."
            warn_once("cache-root:none", message)
            return None
        key = (root, settings.trust_cache_dir)
        known = self._disks.get(key)
        if known is None:
            with self._lock.lock:
                known = self._disks.setdefault(key, DiskCache(*key))
        return known

    def source(self, render_key: str) -> str | None:
        """The rendered source of this render key, if a pack or the disk has it."""
        packed = self.packs.source(render_key)
        if packed is not None:
            return packed
        disk = self.disk()
        return notes.source(disk, render_key) if disk is not None else None

    def key(self, request: BuildRequest) -> str:
        """The identity of what `build` would compile. Raises CompilerNotFoundError."""
        return self._resolved(request).key

    def source_key(self, request: BuildRequest) -> str:
        """The identity of what would be compiled, without the compiler."""
        return source_key(
            name=request.name,
            source=request.source,
            arch=request.arch,
            flags=common_flags(),
            include_dir=self._includes(),
            post_pass=request.post_pass.identity if request.post_pass else "",
        )

    def lookup(self, request: BuildRequest) -> Binary | None:
        """The binary if memory, a pack or disk has it; never compiles. An entry on disk belongs to one compiler, so
        this raises CompilerNotFoundError if there is none and no pack has the kernel."""
        start, source = time.perf_counter(), self.source_key(request)
        packed = self._from_packs(request, source, start)
        if packed is not None:
            return self._checked(packed)
        asked = self._resolved(request, source, start)
        binary = self._known(asked)
        return self._checked(binary) if binary is not None else None

    def build(self, request: BuildRequest) -> Binary:
        """The binary, compiled if need be.

        Raises CompileError, also for what DG_JIT_PTXAS_CHECK refuses; CompilerNotFoundError; and InvalidInputError for
        a header that is no regular file. No problem of the cache raises.
        """
        start, source = time.perf_counter(), self.source_key(request)
        binary = self._from_packs(request, source, start)
        while binary is None:
            try:
                asked = self._resolved(request, source, start)
            except CompilerNotFoundError as error:
                if not settings.forbid_compile:
                    raise
                self._count("misses")
                raise self._forbidden(request, source, str(error)) from error
            try:
                binary = self._from_memory(asked) or self._build(asked)
            except CompileError:
                # If the compiler is broken, the next one tries.
                if self._compiler is not None or not compilers.is_broken(asked.compiler):
                    raise
        return self._checked(binary)

    def _build(self, asked: _ResolvedRequest) -> Binary:
        with self._thread_lock(asked.memory_key).lock:
            return self._known(asked) or self._compile_once(asked)

    def adopt(self, request: BuildRequest, binary: Binary) -> Binary:
        """Take over another process's binary for `request`, into memory and onto disk. An existing one stays.

        Raises InvalidInputError if it is not what `build` would return here, and CompileError for what
        DG_JIT_PTXAS_CHECK refuses. No problem of the cache raises.
        """
        asked = self._resolved(request)
        wanted = {"key": asked.key, "source_key": asked.source_key, "cuda": asked.addresses[0].cuda}
        check_same(binary, request, {**wanted, "compiler": asked.compiler.identity})
        found = self._from_memory(asked)
        if found is None:
            allowed = settings.cache_limit
            with self._thread_lock(asked.memory_key).lock:
                found = self._locked(asked, lambda: self._known(asked) or self._keep(asked, binary))
                self._evict(asked, found, allowed)
        return self._checked(found)

    def _resolved(self, request: BuildRequest, source: str = "", start: float | None = None) -> _ResolvedRequest:
        """`source` is the source key and `start` when the call began, where these are known."""
        start = time.perf_counter() if start is None else start
        compiler = self._compiler or compilers.choose()
        flags = compiler.flags(request.arch)
        source = source or self.source_key(request)
        key = build_key(source, compiler.identity, flags)
        cuda = f"{compiler.cuda_version[0]}.{compiler.cuda_version[1]}"
        release = driver_release()
        drivers = [f"{release[0]}.{release[1]}", "any"] if release else ["any"]
        addresses = tuple(Address(request.arch, cuda, driver, request.name, key) for driver in drivers)
        return _ResolvedRequest(request, compiler, flags, key, source, self.disk(), addresses, start)

    def _includes(self) -> Path:
        return self._include_dir or default_include_dir()

    def _from_packs(self, request: BuildRequest, source: str, start: float) -> Binary | None:
        """From memory or a pack; no compiler is looked for."""
        setting = self.packs.setting
        memory_key = (setting, source)
        if (known := self._remembered(memory_key, start)) is not None:
            return known
        found = self.packs.get(source, request.name, request.arch, setting)
        if found is None:
            return None
        self._count("pack")
        return self._memory.put(memory_key, of_kernel(*found, start))

    def _from_memory(self, asked: _ResolvedRequest) -> Binary | None:
        return self._remembered(asked.memory_key, asked.start)

    def _known(self, asked: _ResolvedRequest) -> Binary | None:
        return self._from_memory(asked) or self._from_disk(asked)

    def _remembered(self, memory_key: tuple[object, ...], start: float) -> Binary | None:
        binary = self._memory.get(memory_key)
        if binary is None:
            return None
        self._count("memory")
        return replace(binary, layer="memory", seconds={**binary.seconds, "lookup": time.perf_counter() - start})

    def _from_disk(self, asked: _ResolvedRequest) -> Binary | None:
        if asked.disk is None:
            return None
        for address in asked.addresses:
            entry = asked.disk.get(address)
            if entry is not None:
                self._count("disk")
                notes.put_source(asked.disk, asked.request.render_key, asked.request.source)
                return self._memory.put(asked.memory_key, of_entry(address, asked.source_key, entry, asked.start))
        return None

    def _forbidden(self, request: BuildRequest, source_key: str, on_disk: str, key: str = "") -> Exception:
        self._count("forbidden")
        return late("deep_gemm.jit.refusal").forbidden(request, source_key, self.packs, on_disk, key)

    def _compile_once(self, asked: _ResolvedRequest) -> Binary:
        if settings.forbid_compile:
            # Before the lock: taking it creates files, and it may wait for a process that never publishes.
            self._missed(asked)
            places = [str(asked.disk.directory(at)) for at in asked.addresses] if asked.disk else ["no directory"]
            raise self._forbidden(asked.request, asked.source_key, ", ".join(places), asked.key)
        allowed = settings.cache_limit  # read first: an invalid setting must fail before the compilation, not after it
        # Another process may have published it while this one waited.
        binary = self._locked(asked, lambda: self._from_disk(asked) or self._compile(asked))
        self._evict(asked, binary, allowed)
        return binary

    def _locked(self, asked: _ResolvedRequest, work: Callable[[], Binary]) -> Binary:
        """`work()`, under the lock between processes if it can be had."""
        if asked.disk is None:
            return work()
        address, start = asked.addresses[0], time.perf_counter()
        with asked.disk.lock(address, self.lock_limit) as held:
            if held is None:
                # If the limit has not passed, the root or the filesystem has no locks.
                if time.perf_counter() - start >= self.lock_limit:
                    self._count("lock_timeout")
                return work()
            try:
                return work()
            finally:
                asked.disk.forget_lock(lock_name(address.arch, address.key))

    def _evict(self, asked: _ResolvedRequest, binary: Binary, allowed: int | None) -> None:
        """Keep DG_JIT_CACHE_LIMIT after a new entry. The entry's lock is not held meanwhile: others may wait for it."""
        if allowed is None or asked.disk is None or binary.source_path is None:
            return
        if binary.layer in ("compiled", "adopted"):
            limit = late("deep_gemm.jit.cache.limit")  # here, because most processes have no limit
            self._count("evictions", amount=limit.keep(asked.disk, allowed, asked.disk.directory(asked.addresses[0])))

    def _missed(self, asked: _ResolvedRequest) -> None:
        self._count("misses")
        if asked.disk is None or not asked.disk.usable():
            self._count("unusable")
        elif any(os.path.lexists(asked.disk.directory(address) / META) for address in asked.addresses):
            # The entry exists, but it could not be used.
            self._count("corrupted")

    def _compile(self, asked: _ResolvedRequest) -> Binary:
        source_file = late("deep_gemm.jit.source").source_file  # here: if all kernels are known, nothing needs it
        self._missed(asked)
        request, looked = asked.request, time.perf_counter() - asked.start
        stored = asked.disk.reserve(asked.addresses[0], request.source) if asked.disk else None
        want_ptx = settings.dump_ptx or settings.dump_asm
        log.debug("compiling %s for %s (key %s)", request.name, request.arch, asked.key)
        try:
            with source_file(stored, request.name, request.source) as path:
                compiled = asked.compiler.compile(
                    request.name, request.source, path, asked.flags, self._includes(), want_ptx=want_ptx
                )
            compiled = replace(compiled, cubin=request.finished(compiled.cubin))
        except CompileError:
            self._count("failed")
            raise
        if settings.ptxas_verbose:
            say(f"{request.name}:\n{compiled.log.strip()}")
        binary = Binary(
            request.name,
            asked.key,
            request.arch,
            compiled.cubin,
            compiled.resources,
            str(stored) if stored else None,
            "compiled",
            asked.compiler.identity,
            {**compiled.seconds, "lookup": looked},
            asked.source_key,
            asked.addresses[0].cuda,
        )
        self._count("compiled", compiled.seconds.get("compile", 0.0))
        self._publish(asked, stored, compiled)
        return self._memory.put(asked.memory_key, binary)

    def _keep(self, asked: _ResolvedRequest, binary: Binary) -> Binary:
        stored = asked.disk.reserve(asked.addresses[0], asked.request.source) if asked.disk else None
        seconds = {name: value for name, value in binary.seconds.items() if name != "lookup"}
        self._count("adopted")
        self._publish(asked, stored, Compiled(binary.cubin, None, "", binary.resources, seconds))
        kept = replace(binary, source_path=str(stored) if stored else None, layer="adopted")
        return self._memory.put(asked.memory_key, kept)

    def _publish(self, asked: _ResolvedRequest, stored: Path | None, compiled: Compiled) -> None:
        meta = {
            "compiler": asked.compiler.identity,
            "source_key": asked.source_key,
            "render_key": asked.request.render_key,
            "flags": list(asked.flags),
            "options": list(compiled.options),
            "resources": compiled.resources.to_json(),
            "seconds": dict(compiled.seconds),
            "created": time.time(),
            "log": compiled.log,
            "meta": asked.request.stored_meta,
        }
        # If the source could not be stored, the rest cannot be either.
        if stored is None or asked.disk is None:
            self._count("unstored")
            return
        try:
            source = asked.request.source.encode()
            dumps = late("deep_gemm.jit.disassembler").dumps(compiled)
            published = asked.disk.put(asked.addresses[0], source, compiled.cubin, meta, dumps)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(f"meta of {asked.request.name} must be plain JSON: {error}.") from error
        if published is None:
            self._count("unstored")
        else:
            notes.put_source(asked.disk, asked.request.render_key, asked.request.source)

    def _checked(self, binary: Binary) -> Binary:
        """DG_JIT_PTXAS_CHECK holds for cached binaries too."""
        if settings.ptxas_check and (problems := binary.resources.problems()):
            raise CompileError(
                f"DG_JIT_PTXAS_CHECK refuses {binary.name}: {'; '.join(problems)}.", source_path=binary.source_path
            )
        return binary

    def _thread_lock(self, key: tuple[str, str]) -> ForkLock:
        # Never removed (some hundred bytes each): a new thread could enter beside one that waits for the old lock.
        with self._lock.lock:
            return self._busy.setdefault(key, ForkLock())

    def _count(self, what: str, seconds: float = 0.0, amount: int = 1) -> None:
        with self._lock.lock:
            self._own_counts()
            self._counts[what] += amount
            self._counts["compile_seconds"] += seconds

    def _own_counts(self) -> None:
        if self._pid != os.getpid():
            self._reset_counts()

    def _reset_counts(self) -> None:
        self._pid = os.getpid()
        self._counts: dict[str, float] = {
            **dict.fromkeys((*HITS, "adopted", "misses", "compiled", "evictions", *ERRORS), 0),
            "compile_seconds": 0.0,
        }


@functools.lru_cache(maxsize=1)
def default_builder() -> Builder:
    """The builder of this process; it follows the settings at each call."""
    return Builder()
