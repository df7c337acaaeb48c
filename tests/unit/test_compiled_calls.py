"""Each public function inside `torch.compile`: no graph break, the bits of a plain call, one graph for all M."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from public_calls import CALLS, M
from torch import Tensor

import deep_gemm
from deep_gemm import Epilogue, quantize

ROWS, LAYER_ROWS = (80, 96, 112), (384, 640, 896)
"""None is another size of a call: sizes that are equal in the first call would be taken for one."""

REFUSED = ("declare_constant", "CustomKernel", "kernel", "quantize.mxfp4_to_fp8", "transform_fp4_weights")
"""Functions that are never part of a graph, as docs/modules.md says."""

EMPTY = ("retract_constant", "tensor_map")
"""Functions that compute nothing."""

TRACED = [name for name in CALLS if name not in REFUSED and not name.startswith("testing.")]


def entry_of(name: str) -> str:
    """Other forms of a product are the same operator, and some functions have two names."""
    name = re.sub(r"_(nn|tn|tt)\b", "_nt", name.split(" ")[0]).replace("fp8_fp4_", "fp8_")
    return re.sub(r"^(fp8|bf16)_m_grouped_", r"m_grouped_\1_", name)


FIRST = {entry_of(name): name for name in reversed(TRACED)}
"""One call of each entry, for one M: the others are long, and so are graphs for all M but one."""

GRAPHS = [
    pytest.param(name, dynamic, id=f"{name}-{kind}", marks=() if is_short else pytest.mark.long)
    for name in TRACED
    for dynamic, kind in ((False, "static"), (True, "dynamic"))
    for is_short in [name in FIRST.values() and (not dynamic or name == "fp8_gemm_nt")]
]


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def grown(x: Tensor, m: int) -> Tensor:
    """A tensor like x, in the same order of dimensions, with ``m`` in the place of M. Ones become powers of two."""
    order = sorted(range(x.dim()), key=lambda dim: -x.stride(dim))
    sizes = [m if size == M else size for size in x.shape]
    made = torch.empty([sizes[dim] for dim in order], dtype=x.dtype)
    made = made.permute([order.index(dim) for dim in range(x.dim())])
    if x.is_floating_point() and x.float().any():
        return made.copy_(2.0 ** torch.randint(-1, 2, sizes))
    return made.copy_(x) if made.shape == x.shape else made.copy_(x.float().flatten()[0].expand(sizes))


def flat(found: Any) -> list[Tensor]:
    """All tensors of a result, in a dtype that torch compares."""
    if isinstance(found, Tensor):
        return [found.float()]
    parts = found.values() if isinstance(found, dict) else found if isinstance(found, (tuple, list)) else ()
    return [x for part in parts for x in flat(part)]


def same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(flat(found), flat(wanted), rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "dynamic"), GRAPHS)
def test_a_public_function_is_one_graph_for_all_m(name: str, dynamic: bool, fresh_compiler: Any) -> None:
    made = CALLS[name]
    backend = "aot_eager" if dynamic else "eager"
    compiled = torch.compile(lambda x: made.call(x), fullgraph=True, backend=backend, dynamic=dynamic)
    for m in ROWS if dynamic else ROWS[:1]:
        x = {key: grown(tensor, m) for key, tensor in made.tensors().items()}
        y = {key: torch.empty_strided(z.shape, z.stride(), dtype=z.dtype).copy_(z) for key, z in x.items()}
        same(compiled(x), made.call(y))
        same(x, y)
    assert fresh_compiler["stats"]["unique_graphs"] == 1 or name in EMPTY
    assert not fresh_compiler["graph_break"]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [REFUSED[0], *(pytest.param(name, marks=pytest.mark.long) for name in REFUSED[1:])])
def test_what_is_no_part_of_a_graph_breaks_it(name: str) -> None:
    made = CALLS[name]
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda x: made.call(x), fullgraph=True, backend="eager")(made.tensors())
    x, y = made.tensors(), made.tensors()
    same(torch.compile(lambda x: made.call(x), backend="eager")(x), made.call(y))
    same(x, y)


BF16, F32, I32, E4M3, N, K, GROUPS = torch.bfloat16, torch.float32, torch.int32, torch.float8_e4m3fn, 256, 128, 2


def matrix(*shape: int) -> Tensor:
    return torch.randn(*shape).to(BF16)


W, EXPERTS = matrix(N, K), matrix(GROUPS, N, K)
FP8_W, W_ROWS = quantize.blocks(W), quantize.rows(W)
FP8_EXPERTS: Any = tuple(torch.stack(parts) for parts in zip(*map(quantize.blocks, EXPERTS), strict=True))
COUNTS = torch.tensor([3, 5], dtype=I32)


def added_1d1d(x: Tensor) -> Tensor:
    d = torch.ones(x.shape[0], N)
    deep_gemm.fp8_gemm_nt(quantize.rows(x), W_ROWS, d, d, recipe=(1, 1, 128))
    return d


def rowwise(x: Tensor) -> Tensor:
    d = torch.empty(x.shape[0], N, dtype=BF16)
    deep_gemm.fp8_gemm_nt((x.to(E4M3), x[:, :1].float()), (FP8_W[0], W[:, :1].float()), d)
    deep_gemm.fp8_gemm_nt((x.to(torch.float8_e5m2), x[:, :1].float()), (FP8_W[0], W[:, :1].float()), d, d)
    return d


def masked_fp8(x: Tensor) -> Tensor:
    (values, scales), d = quantize.rows(x), torch.zeros(GROUPS, x.shape[0], N, dtype=BF16)
    a = torch.stack([values, values]), torch.stack([scales, scales])
    deep_gemm.m_grouped_fp8_gemm_nt_masked(a, FP8_EXPERTS, d, COUNTS, 4)
    return d[:, :3]


def ends_of_groups(x: Tensor) -> Tensor:
    d, ends = torch.zeros(x.shape[0], N, dtype=BF16), torch.tensor([100, 228], dtype=I32)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(quantize.rows(x), FP8_EXPERTS, d, ends, use_psum_layout=True)
    return d[:100]


def groups_of_k(x: Tensor) -> Tensor:
    half, d = x.shape[0] // 2, torch.zeros(GROUPS, K, K)
    sizes = torch.tensor([half, half], dtype=I32)
    deep_gemm.k_grouped_bf16_gemm_tn_contiguous(x, x, d, [half, half], sizes, d)
    return d


def scaled_batch(x: Tensor) -> Tensor:
    (values, scales), d = quantize.rows(x), torch.empty(x.shape[0], GROUPS, N, dtype=BF16)
    a = torch.stack([values, values], 1), torch.stack([scales, scales], 1)
    deep_gemm.fp8_einsum("bhr,hdr->bhd", a, FP8_EXPERTS, d)
    return d


def paged(x: Tensor) -> Tensor:
    x = x[::64]
    batch = x.shape[0]
    q = x.view(batch, 1, 1, K).expand(-1, -1, 32, -1).to(E4M3)
    cache, lens = torch.ones(batch, 32, 1, K + 4, dtype=torch.uint8), torch.full((batch, 1), 32, dtype=I32)
    tables, schedule = torch.zeros(batch, 2, dtype=I32), deep_gemm.get_paged_mqa_logits_metadata(lens, 32, 2)
    return deep_gemm.fp8_paged_mqa_logits(q, cache, torch.ones(batch, 32), lens, tables, schedule, 64)[:, :32]


def finished(x: Tensor) -> Tensor:
    d, residual = torch.empty(x.shape[0], N, dtype=BF16), torch.ones(x.shape[0], N, dtype=BF16)
    deep_gemm.bf16_gemm_nt(x, W, d, epilogue=Epilogue(W[:, 0].float(), "relu", 0.5, residual))
    return d


def gated_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    d = quantize.rows(torch.zeros(x.shape[0], N // 2, dtype=BF16))
    gate = Epilogue(activation="swiglu", row_factor=x[:, 0].float(), clamp=7.0)
    deep_gemm.fp8_gemm_nt(quantize.rows(x), FP8_W, d, epilogue=gate)
    return d


def aligned_scales(x: Tensor) -> Tensor:
    return deep_gemm.get_mn_major_tma_aligned_tensor(x.float().t().contiguous().t())


LAYERS = [added_1d1d, rowwise, masked_fp8, ends_of_groups, groups_of_k, scaled_batch, paged]
LAYERS += [finished, gated_to_fp8, aligned_scales]


@pytest.mark.long
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_recipes_layouts_and_epilogues_are_one_graph_for_all_m(
    layer: Callable[[Tensor], Any], fresh_compiler: Any
) -> None:
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for m in LAYER_ROWS:
        x = matrix(m, K)
        same(compiled(x), layer(x))
    assert fresh_compiler["stats"]["unique_graphs"] == 1
    assert not fresh_compiler["graph_break"]


def test_the_profiler_of_torch_shows_operators() -> None:
    """A compiled layer's call is an operator, an eager one its autograd function: docs/modules.md says so."""
    layer, x = deep_gemm.nn.FP8Linear(K, N), matrix(16, K)
    seen = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        run(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            run(x)
        names = {event.key for event in profile.key_averages()}
        seen.append(names & {"FP8Product", "deep_gemm_jit::fp8_linear"})
    assert seen == [{"FP8Product"}, {"deep_gemm_jit::fp8_linear"}]
