"""The kernels of a file's tests, compiled side by side and not one by one in first calls, which takes minutes."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from chosen import kernel_name
from forced import compile_for_calls

from deep_gemm import arch, kernels
from deep_gemm.params import Config, KernelParams
from deep_gemm.runtime import engine
from deep_gemm.runtime.operation import KernelOperation
from deep_gemm.spec import GemmSpec, Spec


def params_of(spec: Spec, device: int) -> KernelParams:
    """The kernel that `engine.plan` chooses."""
    if isinstance(spec, GemmSpec):
        config: Config = engine.ranked_configs(spec, device)[0].config
    else:
        config = kernels.for_helper(spec, arch.for_device(device)).config_of(spec, arch.for_device(device))
    return engine.kernel_params(spec, config, arch.for_device(device))


class _Unmade:
    """In place of a call's launches."""

    def record(self) -> Callable[[], None]:
        return lambda: None

    def is_for(self, key: Any) -> bool:
        return False


def kernels_of(calls: Iterable[Callable[[], object]]) -> set[KernelParams]:
    """The kernels of calls on a GPU, which nothing compiles or launches: outputs stay as they are. None on the CPU."""
    found: set[KernelParams] = set()

    def prepare(operation: KernelOperation, x: Any, device: int) -> Any:
        found.update(params_of(step.spec, device) for step in operation.launches(x, device).steps)
        return _Unmade()

    with mock.patch("deep_gemm.runtime.calls._prepare", prepare):
        for call in calls if torch.cuda.is_available() else ():
            call()
    return found


@contextmanager
def built(wanted: Iterable[KernelParams]) -> Iterator[None]:
    """Compile kernels for calls inside, of which none may need another one."""
    known, others, load = set(wanted), set[KernelParams](), engine.load

    def watched(params: KernelParams, device: int, what: str) -> Any:
        others.update({params} - known)
        return load(params, device, what)

    if torch.cuda.is_available():
        compile_for_calls(known)
    with mock.patch.object(engine, "load", watched):
        yield
    assert not others, f"not compiled before: {sorted(map(kernel_name, others))}"
