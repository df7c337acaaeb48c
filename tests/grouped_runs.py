"""One call of each grouped kernel with given device code, whose result and surroundings are checked."""

from typing import Any

import torch
from forced import in_launches
from grouped_cases import BF16, Case, Routing, strides
from k_grouped_cases import DEVICE, MIXED_RECIPE, exact, operands, sizes

from deep_gemm import kernels
from deep_gemm.arch import SM90
from deep_gemm.jit import Builder
from deep_gemm.ops import table
from deep_gemm.ops.k_grouped import KGrouped
from deep_gemm.ops.m_grouped import MGrouped
from deep_gemm.params import Config, KernelParams
from deep_gemm.runtime import engine
from deep_gemm.spec import GemmSpec
from deep_gemm.testing import guarded, guarded_copy

N, K = 520, 656
# More groups than a warp reads at once, empty ones, ends inside tiles, and a row of tiles of padding alone.
COUNTS = (100, 0, 1, 128, 300, *[7] * 30, 200)
ROUTING = Routing(COUNTS, Routing(COUNTS).end + 200)
KS = [128, 0, 384, 16, 240, 0, 48]


def launch(operation: Any, arguments: dict[str, Any], config: Config, builder: Builder) -> None:
    """Make the launches of a call with this config and this builder's device code; one that writes FP8 does so
    itself."""
    device = torch.cuda.current_device()
    x = operation.check(**arguments)
    with in_launches(1):
        work = operation.launches(x, device)
    scratch = {name: torch.empty(shape, dtype=dtype, device=DEVICE) for name, (shape, dtype) in work.scratch.items()}
    places = {name: tensor.data_ptr() for name, tensor in {**x.tensors, **scratch}.items()}
    for step in work.steps:
        chosen = (
            config
            if isinstance(step.spec, GemmSpec)
            else kernels.for_helper(step.spec, SM90).config_of(step.spec, SM90)
        )
        plan = engine.forced_plan(step.spec, chosen, device, builder)
        addresses = {name: places[operand] for name, operand in step.operands.items()}
        engine.launch_record(plan, step.strides, addresses, engine.raw_stream(device), numbers=step.numbers)()
    torch.cuda.synchronize()


def is_right(params: KernelParams, builder: Builder) -> bool:
    """Whether the result is the exact one, and nothing else was written."""
    try:
        (along_k if params.grouping == "k" else along_m)(params, builder)
    except AssertionError:
        return False
    return True


def kind_of(params: KernelParams) -> str:
    """As the cases of grouped GEMMs call it."""
    return "fp8" if params.dtype == "e4m3" else "bf16"


def along_m(params: KernelParams, builder: Builder) -> None:
    kind, form = kind_of(params), params.grouping
    case = Case(kind, ROUTING, N, K, DEVICE, integers=True)
    a, b, layout = case.arguments(form)
    if form == "contiguous":  # the first row of a tile that each lane of a warp looks at first is padding
        layout[0:128:32] = -1
    rows = (a[0] if kind == "fp8" else a).shape[:-1]
    d = guarded((*rows, N), BF16, DEVICE, strides(rows, N))
    wanted, name = case.exact(), f"m_grouped_{kind}_gemm_nt_{'masked' if form == 'masked' else 'contiguous'}"
    operation, more = MGrouped(name), {}
    if params.epilogue:
        assert str(params.epilogue) == "bias:f32"
        bias = torch.randint(-9, 10, (len(ROUTING.counts), N), device=DEVICE).float()
        for group, part in enumerate(ROUTING.slices()):
            wanted[part] += bias[group]
        operation, more = MGrouped(name, epilogue_tensors=("bias",)), {"bias": bias, "epilogue": str(params.epilogue)}
    size = {"expected_m": 64} if form == "masked" else {"alignment": ROUTING.alignment}
    size |= {"use_psum_layout": True} if form == "psum" else {}
    given = {"a": a, "b": b, "d": d.tensor, operation.layout: layout, **size, **more}
    launch(operation, given, params.config, builder)
    d.check("d")
    assert torch.equal(case.gathered(d.tensor), case.gathered(wanted).to(BF16))
    bits = d.tensor.view(torch.int16)
    if form == "masked":
        for group, count in enumerate(ROUTING.counts):
            assert bool((bits[group, count:] == -1).all())
    elif form == "contiguous":
        assert bool((bits != -1).all())
    else:  # padding is left as it was
        inside = torch.zeros(bits.shape[0], dtype=torch.bool)
        for part in ROUTING.slices():
            inside[part] = True
        assert bool((bits[~inside.to(DEVICE)] == -1).all())


def along_k(params: KernelParams, builder: Builder) -> None:
    kind, m, n = "mixed" if params.scaling == "1d2d" else kind_of(params), 200, 328
    a, b = operands(kind, m, n, KS)
    before = torch.randint(-9, 10, (len(KS), m, n), device=DEVICE).float()
    d = guarded_copy(before)
    operation = KGrouped(table.K_BF16 if kind == "bf16" else table.K_FP8, accumulates=True)
    given = {"a": a, "b": b, "d": d.tensor, "grouped_layout": sizes(KS), "c": d.tensor}
    given |= {"recipe": MIXED_RECIPE} if kind == "mixed" else {}
    launch(operation, given, params.config, builder)
    d.check("d")
    assert torch.equal(d.tensor, exact(kind, a, b, KS, m, n, before).float())
