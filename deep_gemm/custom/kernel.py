"""A user's kernel: declaring, building and calling it."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, ParamSpec

from deep_gemm.runtime.calls import make_entry

from .. import arch as archs
from ..errors import InvalidInputError
from ..jit.binary import Binary
from ..jit.builder import BuildRequest, default_builder
from ..names import is_name, is_text
from ..params import KernelParams
from ..tensors import shown
from .launch import LaunchConfig
from .operation import CustomOperation, Source
from .parameters import declare

P = ParamSpec("P")

_BODY = """#include "custom.cuh"

extern "C" __global__ void __launch_bounds__(/*{{ num_threads }}*/)
    /*{{ name }}*/(/*{{ signature }}*/) {{
{body}
}}
"""


class CustomKernel(Generic[P]):
    """A user's kernel, made by `deep_gemm.kernel` or `from_source`. Its arguments are those of its function."""

    def __init__(
        self,
        function: Callable[P, LaunchConfig | None],
        parameters: Mapping[str, str],
        *,
        body: str | None = None,
        source: str | None = None,
        template: str | Path | None = None,
        name: str | None = None,
        strided: Sequence[str] = (),
        needs: tuple[int, int] | None = None,
    ) -> None:
        self.name = name or function.__name__
        if not is_name(self.name):
            raise InvalidInputError(f"name of a kernel must be a name that C++ can have, but it is {self.name!r}.")
        signature = inspect.signature(function)
        declared = declare(self.name, parameters, signature)
        if unknown := set(strided) - set(declared.tensors):
            raise InvalidInputError(f"strided of {self.name}: {', '.join(sorted(unknown))} is no tensor of it.")
        found = _source(self.name, body, source, template)
        self._operation = CustomOperation(declared, found, function, strided, needs)
        self._entry = make_entry(self._operation)
        self._signature, self._count = signature, len(signature.parameters)
        self.__doc__, self.__wrapped__ = function.__doc__, function

    @classmethod
    def from_source(
        cls, source: str, launch: Callable[P, LaunchConfig | None], parameters: Mapping[str, str], **options: Any
    ) -> CustomKernel[P]:
        """A kernel from complete source text. The function ``launch`` returns its launch. The other arguments are those
        of `deep_gemm.kernel`."""
        return cls(launch, parameters, source=source, **options)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Launch on the current stream of the tensors' device. See `deep_gemm.kernel`."""
        if kwargs or len(args) != self._count:
            self._entry(*self._bound(args, kwargs))
        else:
            self._entry(*args)

    def reference(self, function: Callable[P, object]) -> Callable[P, object]:
        """A decorator for the same computation in torch, with the same arguments. It is used for tensors on the CPU,
        and with DG_FALLBACK=torch on GPUs that the kernel does not support."""
        self._operation.in_torch = function
        return function

    def build(self, *args: Any, arch: str = archs.DEFAULT.name, **kwargs: Any) -> Binary:
        """The binary for a call with these arguments. It is compiled if no cache has it. Use this to compile ahead, or
        to look at ``resources``. No GPU is needed: the tensors may be on the CPU. Raises CompileError."""
        return default_builder().build(self._request(args, kwargs, arch))

    def source(self, *args: Any, arch: str = archs.DEFAULT.name, **kwargs: Any) -> str:
        """The CUDA C++ source for a call with these arguments."""
        return self._request(args, kwargs, arch).source

    def _request(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: str) -> BuildRequest:
        x = self._operation.check(*self._bound(args, kwargs))
        if x is None:
            raise InvalidInputError(f"{self.name} launches nothing for these arguments.")
        return self._operation.request(KernelParams(kernel=self.name, arch=target, config=x.spec.config))

    def _bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidInputError(f"{self.name}: {error}; its arguments are {self._signature}.") from None
        bound.apply_defaults()
        return tuple(bound.arguments.values())


def _source(name: str, body: str | None, source: str | None, template: str | Path | None) -> Source:
    given = [text for text in (body, source, template) if text is not None]
    if len(given) != 1:
        raise InvalidInputError(f"{name} must have one of body, source and template, but {len(given)} are given.")
    if template is None and not is_text(given[0]):
        raise InvalidInputError(
            f"{'source' if body is None else 'body'} of {name} must be a text without NUL and without half of a "
            f"surrogate pair, but it is {shown(given[0])}."
        )
    if template is not None:
        path = Path(template).absolute()
        if not path.is_file():
            raise InvalidInputError(f"template of {name}: there is no file {path}.")
        return Source(path.name, None, path.parent)
    if body is not None:
        source = _BODY.format(body=textwrap.indent(textwrap.dedent(body).strip("\n"), "  "))
    return Source(name, source, None)


def kernel(
    parameters: Mapping[str, str],
    *,
    body: str | None = None,
    source: str | None = None,
    template: str | Path | None = None,
    name: str | None = None,
    strided: Sequence[str] = (),
    needs: tuple[int, int] | None = None,
) -> Callable[[Callable[P, LaunchConfig | None]], CustomKernel[P]]:
    """Make a CUDA kernel from a function that returns its launch. It is compiled when it is first called::

        @deep_gemm.kernel(
            {"out": "f32*", "x": "const f32*", "y": "const f32*", "scale": "f32", "n": "u32"},
            body="const u32 i = blockIdx.x * blockDim.x + threadIdx.x;"
            "if (i < n) out[i] = scale * x[i] + y[i];",
        )
        def scale_add(out, x, y, scale):
            n = out.numel()
            return deep_gemm.LaunchConfig(grid=deep_gemm.ceil_div(n, 256), block=256, values={"n": n})

        scale_add(out, x, y, 2.0)  # on the current stream of out's device

    Args:
        parameters: the kernel's parameters in order: a number ("u32", "i32", "i64", "f32"), a pointer ("const bf16*")
            or a tensor map ("const TensorMap<bf16> x"). A parameter has the name of an argument of the function, or the
            tensor's name follows its type. The function returns all other values (`LaunchConfig`). The kernel writes
            tensors that are not "const".
        body: the statements of the kernel. source: a whole file instead; template: the path of one. Fields in it are
            replaced by their values: ``/*{ name }*/``, ``/*{ signature }*/``, ``/*{ num_threads }*/`` and the constants
            of `LaunchConfig`. A template may use all of Jinja, in its sandbox: ``/*% if causal %*/``. Device headers of
            this package may be included; ``custom.cuh`` has the types. NVRTC has no header of CUDA or of C++.
        name: of the kernel, in profilers; the function's unless given.
        strided: tensors that need not be contiguous, because the kernel takes their strides as parameters.
        needs: the least compute capability, such as (9, 0).

    Binaries are cached, packed and shipped like those of this package. A warm call looks its arguments up in a
    dictionary and launches. It does not call the function, even if tensors have other addresses, so the function must
    not depend on addresses. After one call, calls may be captured into a CUDA graph.

    Raises InvalidInputError, which names the parameter, for a declaration or a call that is wrong; a call also
    CompileError, NotWarmError, DriverError and, for tensors on the CPU without a reference, UnsupportedError.
    """

    if callable(parameters):
        raise InvalidInputError("kernel must be given the parameters: @deep_gemm.kernel({'out': 'f32*'}, body=...).")

    options = {"body": body, "source": source, "template": template, "name": name, "strided": strided, "needs": needs}
    return lambda function: CustomKernel(function, parameters, **options)  # type: ignore[arg-type]
