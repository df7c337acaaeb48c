"""What entries and public functions are made of: declared parameters, few Python calls, and lines in tracebacks."""

import inspect
import linecache
import traceback
from typing import Any

import pytest
import torch
from call_kinds import KINDS, G, K, k_tensors
from entered import ours
from gpu_fakes import FakeGpu

import deep_gemm
from deep_gemm.ops import PRODUCTS, table
from deep_gemm.ops.batched import Batched
from deep_gemm.ops.dense import Dense, fp8
from deep_gemm.ops.k_grouped import KGrouped
from deep_gemm.ops.m_grouped import MGrouped
from deep_gemm.ops.skip_head_mid import SkipHeadMid
from deep_gemm.runtime import calls
from deep_gemm.runtime.operation import KernelOperation

# fp8_gemm_nt_1d1d, fp8_gemm_nt_rowwise and those with "_psum" are ways to call another function, and so are sums and
# batches whose weights have N contiguous.
CLASSES = {"none": Dense, "contiguous": MGrouped, "masked": MGrouped, "k": KGrouped, "batched": Batched}
CLASSES["heads"] = SkipHeadMid
FUNCTIONS: dict[str, KernelOperation] = {
    name.replace("_nt", f"_{form}"): CLASSES[product.grouping](name)
    for name, product in PRODUCTS.items()
    if name not in (table.WGRAD, table.ROWWISE, *table.ROWWISE_E5M2, table.ABSORBED)
    and product.grouping not in ("psum", "summed")
    for form in product.forms
}


def test_each_product_has_its_functions() -> None:
    found = {
        name
        for name in deep_gemm.__all__
        if ("_gemm_" in name or "_bmm" in name) and "fp4" not in name and "cublas" not in name
    }
    assert found == {*FUNCTIONS, "fp8_m_grouped_gemm_nt_masked", "bf16_m_grouped_gemm_nt_masked"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_have_the_parameters_that_are_declared(name: str) -> None:
    declared = [
        inspect.Parameter(
            parameter.name,
            inspect.Parameter.KEYWORD_ONLY if parameter.keyword else inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=parameter.default,
            annotation=parameter.type,
        )
        for parameter in FUNCTIONS[name].parameters
        if parameter.use != "internal"
        and not (parameter.name == "expected_m_for_psum_layout" and "_nn_" in name)  # DeepGEMM's has none
    ]
    assert list(inspect.signature(getattr(deep_gemm, name)).parameters.values()) == declared


MOST = {
    "index": 3,
    "psum": 3,
    "masked": 3,
    "k fp8": 3,
    "k padded": 3,
    "fp8 epilogue": 11,
    "bf16 epilogue": 11,
    "experts": 5,
    **dict.fromkeys(("experts of mxfp4", "experts of mxfp4 and bf16"), 7),
}
"""Most calls enter the public function and its entry; with groups along M also the alignment or the estimate, and with
two launches the function that makes both. Calls with an epilogue make it, and pass through two entries. Of a
mixture of experts two pairs are looked at first, and with MXFP4 weights the options too."""


@pytest.mark.parametrize("name", [name for name in KINDS if name != "own"])
def test_a_warm_call_enters_few_functions(gpu: FakeGpu, name: str) -> None:
    kind = KINDS[name]
    tensors = kind.tensors()
    for _ in range(3):
        kind(tensors)
    before = gpu.prepared
    assert len(ours(lambda: kind(tensors))) <= MOST.get(name if name in MOST else name.split()[0], 2)
    assert gpu.prepared == before


@pytest.mark.parametrize(("recipe", "more"), [({}, 1), ({"recipe": (1, 1, 128)}, 2)])
def test_sizes_on_the_host_take_one_function_more(gpu: FakeGpu, recipe: dict[str, Any], more: int) -> None:
    """However many groups there are; and so does a recipe."""
    x = k_tensors("fp8")

    def call() -> None:
        pairs = (x["a"], x["sfa"]), (x["b"], x["sfb"])
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous(*pairs, x["d"], [K // G] * G, x["layout"], x["d"], **recipe)

    for _ in range(3):
        call()
    assert len(ours(call)) == MOST["k fp8"] + more


def test_an_entry_appears_in_tracebacks_with_its_lines(gpu: FakeGpu) -> None:
    linecache.checkcache()  # as debuggers and tracebacks do: what has no file must stay
    with pytest.raises(deep_gemm.InvalidInputError) as caught:
        deep_gemm.fp8_gemm_nt(1, 2, 3)  # type: ignore[arg-type]
    text = "".join(traceback.format_exception(caught.value))
    assert "<deep_gemm entry of fp8_gemm_nt" in text
    assert "calls0.not_warm(None, None, (a_, b_, d_, c_," in text
    assert "def entry(a_, b_, d_, c_, recipe_" in inspect.getsource(fp8)


def test_two_entries_of_one_name_have_their_own_lines() -> None:
    first, second = (calls.make_entry(Dense("bf16_gemm_nt", accumulates)) for accumulates in (False, True))
    assert inspect.getsource(first) != inspect.getsource(second)


def test_forms_of_fp8_are_remembered_apart(gpu: FakeGpu) -> None:
    """The same tensors are other operands in another form. Only K-major values are read as they are."""
    x, rows, d = torch.zeros(K, K).to(torch.float8_e4m3fn), torch.ones(()), torch.zeros(K, K, dtype=torch.bfloat16)
    before = {"nt": [], "nn": ["b"], "tn": ["a", "b"], "tt": ["a"]}
    for form in (*before, *before):
        for _ in range(3):
            gpu.launched.clear()
            getattr(deep_gemm, f"fp8_gemm_{form}")((x, rows), (x, rows), d)
            *transposes, product = gpu.launched
            assert [launched.kernel for launched in transposes] == ["transpose bytes"] * len(before[form])
            assert [name for name in "ab" if product.at[name] != x.data_ptr()] == before[form]
