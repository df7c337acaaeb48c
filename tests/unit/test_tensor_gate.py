"""Tensors that are no plain ones, in every place of every public function: one sentence, and no dead process."""

import operator
import re
from collections.abc import Callable
from typing import Any

import house
import pytest
import torch
from public_calls import CALLS, MEGA_MOE
from torch._subclasses.fake_tensor import FakeTensorMode

import deep_gemm
from deep_gemm import InvalidInputError

EVERY = CALLS | MEGA_MOE


class Wrapper(torch.Tensor):
    """A tensor that only wraps another, as a DTensor does."""

    @staticmethod
    def __new__(cls, x: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, strides=x.stride(), dtype=x.dtype)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{function} of a wrapper")


class Named(torch.Tensor):
    """What names of dimensions are in a torch before 2.13, which has them."""

    def has_names(self) -> bool:
        return True


def freed(x: torch.Tensor) -> torch.Tensor:
    x.untyped_storage().resize_(0)
    return x


def halved(x: torch.Tensor) -> torch.Tensor:
    x.untyped_storage().resize_(x.untyped_storage().nbytes() // 2)
    return x


def floats(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.shape)


def nested(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([floats(x), floats(x)])


def jagged(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)], layout=torch.jagged)


WRONG: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "freed": (freed, "has no memory: it needs [0-9]+ bytes, and its storage has 0"),
    "halved": (halved, "has no memory: it needs [0-9]+ bytes, and its storage has [1-9]"),
    "coo": (lambda x: floats(x).to_sparse(), "has the layout torch.sparse_coo"),
    "csr": (lambda x: torch.zeros(2, 3).to_sparse_csr(), "has the layout torch.sparse_csr"),
    "mkldnn": (lambda x: floats(x).to_mkldnn(), "has the layout torch._mkldnn"),
    "empty mkldnn": (lambda x: floats(x)[..., :0].to_mkldnn(), "has the layout torch._mkldnn"),
    "nested": (nested, "is a nested tensor"),
    "jagged": (jagged, "is a nested tensor"),
    "quantised": (lambda x: torch.quantize_per_tensor(floats(x), 1.0, 0, torch.qint8), "is a quantised tensor"),
    "uninitialised": (lambda x: torch.nn.UninitializedParameter(), "is an uninitialised parameter"),
    "negative": (torch._neg_view, "is a view whose sign is applied when it is read"),
    "named": (lambda x: x.as_subclass(Named), "has names of dimensions"),
    "a number": (lambda x: 3, "must be a torch.Tensor, but it is of type int"),
    "an array": (lambda x: floats(x).numpy(), "must be a torch.Tensor, but it is of type ndarray"),
    "meta": (lambda x: x.to("meta"), "is a meta tensor"),
    "wrapper": (Wrapper, "has no memory: it needs"),
}

ONLY_TORCH = ("meta", "wrapper")
"""What functions that torch computes may take: torch computes it, or refuses it."""


def test_every_public_function_that_takes_tensors_is_in_the_table() -> None:
    """But for three that only hold them: the calls that get these check them."""
    signatures = house.signatures()
    named = (name for name in (name.partition(" ")[0] for name in EVERY) if name in signatures)
    called = {id(operator.attrgetter(name)(deep_gemm)) for name in named}  # one function may have several names
    taken = [name for name, text in signatures.items() if "Tensor" in text]
    others = {name for name in taken if id(operator.attrgetter(name)(deep_gemm)) not in called}
    assert others == {"Epilogue", "epilogue.Alpha", "nn.Routing"}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", EVERY)
def test_a_tensor_that_is_no_plain_one_is_refused(name: str) -> None:
    made = EVERY[name]
    made.call(made.tensors())
    for operand in made.tensors():
        for wrong, (make, words) in WRONG.items():
            tensors = made.tensors()
            tensors[operand] = make(tensors[operand])
            if made.by_torch and wrong in ONLY_TORCH:
                continue
            with pytest.raises(InvalidInputError) as caught:
                made.call(tensors)
            assert re.search(words, str(caught.value)), (operand, wrong, str(caught.value))
            assert len(str(caught.value)) < 500
    made.call(made.tensors())


@pytest.mark.parametrize("name", EVERY)
def test_tensors_of_inference_mode_are_taken_outside_of_it(name: str) -> None:
    """A kernel reads and writes them as any others."""
    made = EVERY[name]
    made.call(plain := made.tensors())
    with torch.inference_mode():
        tensors = {key: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for key, x in made.tensors().items()}
        for key, x in made.tensors().items():
            tensors[key].copy_(x)
    made.call(tensors)
    for key, x in plain.items():
        torch.testing.assert_close(tensors[key].double(), x.double(), rtol=0, atol=0, equal_nan=True, msg=key)


def of_kernels(name: str) -> bool:
    """Whether an operation of the library makes the call."""
    return not (EVERY[name].by_torch or name.startswith("testing.") or name in ("tensor_map", "CustomKernel", "kernel"))


@pytest.mark.parametrize("name", [*filter(of_kernels, EVERY)])
def test_a_transform_of_torch_is_refused_in_words(name: str) -> None:
    made = EVERY[name]
    for operand, x in made.tensors().items():

        def mapped(x: torch.Tensor, operand: str = operand) -> torch.Tensor:
            made.call({**made.tensors(), operand: x})
            return x

        with pytest.raises(InvalidInputError, match=r"torch\.func\.vmap"):
            torch.func.vmap(mapped)(torch.stack([x, x]))


@pytest.mark.parametrize("name", [name for name in filter(of_kernels, EVERY) if re.search("gemm|bmm|einsum", name)])
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_an_output_with_memory_among_fake_tensors_is_refused(name: str) -> None:
    """It would keep what it holds, since nothing is computed of fake tensors."""
    made = EVERY[name]
    for operand in made.tensors().keys() - {"d"}:
        tensors = made.tensors()
        tensors[operand] = FakeTensorMode().from_tensor(tensors[operand])
        with pytest.raises(InvalidInputError, match=r"d(\[0\])? has memory, but other tensors are fake"):
            made.call(tensors)


class Tagged(torch.Tensor):
    """A subclass that only has a name of its own."""


@pytest.mark.parametrize("name", EVERY)
def test_subclasses_and_modes_of_torch_change_nothing(name: str) -> None:
    made = EVERY[name]
    made.call(plain := made.tensors())
    tagged: dict[str, Any] = {key: x.as_subclass(Tagged) for key, x in made.tensors().items()}
    given = {"a subclass": tagged, "deterministic": made.tensors(), "inference mode": made.tensors()}
    if name != "testing.Guarded":  # whose class is checked
        made.call(given["a subclass"])
    torch.use_deterministic_algorithms(True)
    try:
        made.call(given["deterministic"])
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.inference_mode():
        made.call(given["inference mode"])
    for way, tensors in given.items():
        for key, x in plain.items():
            found = tensors[key].as_subclass(torch.Tensor).double()
            torch.testing.assert_close(found, x.double(), rtol=0, atol=0, equal_nan=True, msg=f"{way}: {key}")
