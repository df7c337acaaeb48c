"""Layers over several ranks beside the same layers in one process; for tests with gloo and with NCCL."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from nn_cases import relative
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import deep_gemm
from deep_gemm import settings
from deep_gemm.nn import BF16Linear, FP8Linear, MoE
from deep_gemm.ops.reference import exact_product
from deep_gemm.testing import integer_operands

WIDTH, HIDDEN, TOKENS = 256, 512, 40
Errors = dict[str, float]


class Mlp(nn.Module):
    """Two linear layers and an activation. The hidden features are divided."""

    def __init__(self, make: Any, **options: Any) -> None:
        super().__init__()
        self.up, self.down = make(WIDTH, HIDDEN, **options), make(HIDDEN, WIDTH, **options)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(nn.functional.silu(self.up(x)))
        return y


def mlp(kind: str, device: str) -> Mlp:
    """The same weights on each rank. Of "stored" they are FP8 and take no gradient."""
    torch.manual_seed(0)
    plain = Mlp(nn.Linear)
    bias = torch.randn(WIDTH)  # that of `Linear` is small, and an error would not show
    with torch.no_grad():
        plain.down.bias.copy_(bias)
    if kind == "bf16":
        made: Any = Mlp(BF16Linear)
    else:
        made = Mlp(FP8Linear, mode="inference" if kind == "stored" else "training")
    made.load_state_dict(plain.state_dict())
    return made.to(device)  # type: ignore[no-any-return]


def step(model: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """A result and its gradients, whole."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(dy)
    assert x.grad is not None
    grads = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **grads}


def whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x  # type: ignore[no-any-return]


def tokens(device: str, count: int = TOKENS, seed: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    x, dy = (torch.randn(count, WIDTH).bfloat16().to(device) for _ in range(2))
    return x, dy


def errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> Errors:
    assert found.keys() == wanted.keys()
    return {name: relative(found[name], wanted[name]) for name in wanted}


def tensor_parallel(mesh: DeviceMesh, kind: str, sequence: bool) -> Errors:
    """Relative differences from one process. With ``sequence`` each rank has some of the tokens before and after."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import parallelize_module

    from deep_gemm.nn.parallel import ColwiseParallel, RowwiseParallel

    model, (x, dy) = mlp(kind, mesh.device_type), tokens(mesh.device_type)
    wanted = step(model, x, dy)
    if mesh.get_rank():  # weights are those of rank 0
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.view(torch.uint8).zero_()
    layouts = ({"input_layouts": Shard(0)}, {"output_layouts": Shard(0)}) if sequence else ({}, {})
    plan = {"up": ColwiseParallel(**layouts[0]), "down": RowwiseParallel(**layouts[1])}
    parallelize_module(model, mesh, plan)
    rank, size = mesh.get_rank(), mesh.size()
    part = slice(rank * TOKENS // size, (rank + 1) * TOKENS // size) if sequence else slice(None)
    found = step(model, x[part], dy[part])
    wanted |= {name: wanted[name][part] for name in ("y", "x")}
    assert model.up.weight.to_local().shape == (HIDDEN // size, WIDTH)
    if kind == "stored":
        assert model.down.weight_scale_inv.to_local().shape == (WIDTH // 128, HIDDEN // 128 // size)
    return errors(found, wanted)


def tensor_parallel_refusals(mesh: DeviceMesh) -> list[str]:
    from torch.distributed.tensor.parallel import parallelize_module
    from torch.distributed.tensor.parallel import style as styles

    from deep_gemm import InvalidInputError
    from deep_gemm.nn.parallel import ColwiseParallel, ExpertParallel, RowwiseParallel

    def said(model: nn.Module, style: Any) -> str:
        try:
            parallelize_module(model, mesh, style)
        except InvalidInputError as error:
            return str(error)
        return "nothing"

    twice = parallelize_module(FP8Linear(WIDTH, HIDDEN), mesh, ColwiseParallel())
    others = (FP8Linear(WIDTH, WIDTH), FP8Linear(WIDTH, WIDTH, mode="inference"), BF16Linear(WIDTH, WIDTH))
    return [
        said(FP8Linear(WIDTH, 128 * 9), ColwiseParallel()),
        said(FP8Linear(144, WIDTH), RowwiseParallel()),
        said(BF16Linear(WIDTH, 9), ColwiseParallel()),
        said(MoE(64, 32, 3, 1), ExpertParallel()),
        said(nn.ReLU(), ExpertParallel()),
        said(twice, RowwiseParallel()),
        *(said(layer, style()) for layer in others for style in (styles.ColwiseParallel, styles.RowwiseParallel)),
    ]


def fully_sharded(mesh: DeviceMesh, way: str, weights: Any) -> tuple[Errors, dict[str, Any]]:
    """Two steps of FSDP2 beside one process that has the tokens of all ranks, and what was seen. ``way`` is "fp8", or
    "plain", or "kept": with layers that would keep their casts."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from deep_gemm.nn.parallel import gather_in_fp8

    device, rank, ranks = mesh.device_type, mesh.get_rank(), mesh.size()
    model = mlp("fp8", device).to(weights)
    alone, seen = copy.deepcopy(model), {}
    if way == "kept":
        model.up.recast = model.down.recast = "when changed"
    if way == "fp8":
        seen["converted"] = gather_in_fp8(model, ranks).converted
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in (model.up, model.down, model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    model.up.register_forward_pre_hook(lambda layer, _: seen.update(gathered=type(layer.weight).__name__))
    mine, theirs = (torch.optim.SGD(x.parameters(), lr=0.5) for x in (model, alone))
    found: dict[str, Tensor] = {}
    wanted: dict[str, Tensor] = {}
    saved: list[Tensor] = []
    for number in range(2):
        batches = [tokens(device, seed=10 * number + each) for each in range(ranks)]
        steps = [step(alone, *batch) for batch in batches]
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
            of_rank = step(model, *batches[rank])
        found |= {f"{name} {number}": x for name, x in of_rank.items()}
        wanted |= {f"{name} {number}": steps[rank][name] for name in ("y", "x")}
        for name, parameter in alone.named_parameters():
            mean = torch.stack([each[name].float() for each in steps]).mean(0)
            wanted[f"{name} {number}"] = mean
            parameter.grad = mean.to(parameter.dtype)
        for optimizer in (mine, theirs):
            optimizer.step()
        with torch.no_grad():
            found[f"y after {number}"], wanted[f"y after {number}"] = (net(batches[rank][0]) for net in (model, alone))
    ended = {name: whole(x.detach()) for name, x in model.named_parameters()}
    found |= ended
    wanted |= {name: x.detach() for name, x in alone.named_parameters()}
    seen["local rows"] = model.up.weight.to_local().shape[0]
    seen["casts kept"] = sum(x.dtype == torch.float8_e4m3fn and x.shape == (WIDTH, HIDDEN) for x in saved)
    return errors(found, wanted), seen


def expert_parallel(mesh: DeviceMesh, chosen: str, experts: int = 4) -> Errors:
    """Relative differences from one process that has the tokens of all ranks. Those of the router are sums over ranks,
    in another order."""
    from torch.distributed.tensor.parallel import parallelize_module

    from deep_gemm.nn.parallel import ExpertParallel

    device, rank, size = mesh.device_type, mesh.get_rank(), mesh.size()
    torch.manual_seed(0)
    layer = MoE(WIDTH, 128, experts, 2).to(device)
    counts = [TOKENS + 7 * each if chosen != "no tokens" or each == 0 else 0 for each in range(size)]
    batches = [tokens(device, count, seed) for seed, count in enumerate(counts)]
    if chosen == "one rank":
        with torch.no_grad():  # the first experts get all
            layer.router.weight.zero_()
    if chosen == "some are dropped":
        routed: Any = layer.route

        def route(x: Tensor) -> tuple[Tensor, Tensor]:
            weights, experts_of = routed(x)
            return weights, experts_of.masked_fill(x[:, :1] > 1, -1).masked_fill(x[:, 1:3] > 1, experts)

        setattr(layer, "route", route)  # noqa: B010
    alone = step(layer, *(torch.cat(parts) for parts in zip(*batches, strict=True)))
    with torch.inference_mode():
        whole_y = layer(torch.cat([x for x, _ in batches]))
    parallelize_module(layer, mesh, ExpertParallel())
    found = step(layer, *batches[rank])
    begin = sum(counts[:rank])
    own = slice(begin, begin + counts[rank])
    with torch.inference_mode():
        found["y, inference"], alone["y, inference"] = layer(batches[rank][0]), whole_y
    torch.distributed.all_reduce(found["router.weight"])
    assert layer.down.weight.to_local().shape[0] == experts // size
    return errors(found, {name: x[own] if name[0] in "xy" else x for name, x in alone.items()})


def sharded_experts(mesh: DeviceMesh, way: str) -> tuple[Errors, int]:
    """A step of a mixture that FSDP2 shards, beside one process, and how many whole casts of weights backward finds."""
    from torch.distributed.fsdp import fully_shard

    from deep_gemm.nn.parallel import gather_in_fp8

    torch.manual_seed(0)
    layer = MoE(WIDTH, 128, 4, 2, recast="when changed").to(mesh.device_type)
    steps = [step(layer, *tokens(mesh.device_type, seed=seed)) for seed in range(mesh.size())]
    if way == "fp8":
        assert gather_in_fp8(layer, mesh.size()).converted == ("gate_up", "down")
    fully_shard(layer, mesh=mesh)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
        found = step(layer, *tokens(mesh.device_type, seed=mesh.get_rank()))
    wanted = dict(steps[mesh.get_rank()])
    for name, _ in layer.named_parameters():
        wanted[name] = torch.stack([each[name] for each in steps]).mean(0)
    casts = [x for x in saved if x.dtype == torch.float8_e4m3fn and x.dim() == 3]
    return errors(found, wanted), len(casts)


def checkpoint(mesh: DeviceMesh, path: str) -> tuple[set[str], dict[str, bool], bool]:
    """Types of tensors in a checkpoint of shards that are gathered in FP8, whether loading it brings them back, and
    whether the layer still computes in FP8."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    from deep_gemm.nn.parallel import gather_in_fp8

    model = mlp("fp8", mesh.device_type)
    gather_in_fp8(model, mesh.size())
    model = copy.deepcopy(model)
    fully_shard(model, mesh=mesh)
    before = {name: whole(x.detach()).clone() for name, x in model.state_dict().items()}
    dcp.save(model.state_dict(), checkpoint_id=path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = model.state_dict()
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state)
    after = {name: whole(x.detach()) for name, x in model.state_dict().items()}
    seen: dict[str, str] = {}
    model.up.register_forward_pre_hook(lambda layer, _: seen.update(gathered=type(layer.weight).__name__))
    step(model, *tokens(mesh.device_type))
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert norm.full_tensor().isfinite()
    equal = {name: torch.equal(before[name], after[name]) for name in before}
    return {type(x).__name__ for x in after.values()}, equal, seen["gathered"] == "Gathered"


def compiled(mesh: DeviceMesh) -> Errors:
    """A compiled tensor-parallel model beside the same one that is not."""
    from torch.distributed.tensor.parallel import parallelize_module

    from deep_gemm.nn.parallel import ColwiseParallel, RowwiseParallel

    model, (x, dy) = mlp("fp8", mesh.device_type), tokens(mesh.device_type, 48)
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    wanted = step(model, x, dy)
    found = step(torch.compile(model, backend="aot_eager", fullgraph=True), x, dy)
    return errors({name.replace("_orig_mod.", ""): each for name, each in found.items()}, wanted)


def both_ways(mesh: DeviceMesh) -> Errors:
    """Tensor parallelism inside of FSDP2, over four ranks: a result and gradients beside those of one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    from deep_gemm.nn.parallel import ColwiseParallel, RowwiseParallel, gather_in_fp8

    device = mesh.device_type
    square = init_device_mesh(device, (2, 2), mesh_dim_names=("data", "tensor"))
    model = mlp("fp8", device)
    batches = [tokens(device, seed=seed) for seed in range(2)]
    steps = [step(model, *batch) for batch in batches]
    parallelize_module(model, square["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    assert gather_in_fp8(model, 2).kept == dict.fromkeys(("up", "down"), "its weight is a DTensor already")
    fully_shard(model, mesh=square["data"])
    rank = square["data"].get_local_rank()
    found, wanted = step(model, *batches[rank]), dict(steps[rank])
    for name, _ in model.named_parameters():
        wanted[name] = torch.stack([each[name] for each in steps]).mean(0)
    return errors(found, wanted)


def one_process(mesh: DeviceMesh, cache: str, devices: Sequence[int]) -> dict[str, int]:
    """Products on each of the GPUs, in turns and with the kernels in ``cache``: plain, of a declared constant, in a
    graph and tuned. Each must have the exact bits. Returns how many kernels were compiled and measured for each GPU."""
    from deep_gemm.jit import default_builder

    counts: dict[str, int] = {}
    with settings.override(cache_dir=cache):
        made = {device: integer_operands(70, 576, 512, f"cuda:{device}", seed=device) for device in devices}
        exact = {device: exact_product(*a, *b).bfloat16() for device, (a, b) in made.items()}
        results = {device: torch.empty_like(each) for device, each in exact.items()}

        def check(what: str) -> None:
            for device in devices:
                assert torch.equal(results[device], exact[device]), f"{what} on GPU {device}"
                results[device].fill_(float("nan"))

        for each in results.values():
            each.fill_(float("nan"))
        for number in range(3):  # the first call plans, the second records, the third replays
            for device, (a, b) in made.items():
                before = default_builder().stats["compiled"]
                deep_gemm.fp8_gemm_nt(a, b, results[device])
                if number == 0:
                    counts[f"compiled {device}"] = default_builder().stats["compiled"] - before
            check(f"call {number}")
        for device, (a, b) in made.items():
            deep_gemm.declare_constant(*b)
            for _ in range(2):
                deep_gemm.fp8_gemm_nt(a, b, results[device])
        check("a declared constant")
        graphs = {}
        for device, (a, b) in made.items():
            graphs[device] = torch.cuda.CUDAGraph()
            stream = torch.cuda.Stream(device)
            with torch.cuda.graph(graphs[device], stream=stream, capture_error_mode="thread_local"):
                deep_gemm.fp8_gemm_nt(a, b, results[device])
        for graph in graphs.values():
            graph.replay()
        check("a graph")
        for device in devices:
            a, b = integer_operands(41, 1808, 1040, f"cuda:{device}")
            d = torch.empty(41, 1808, dtype=torch.bfloat16, device=f"cuda:{device}")
            with deep_gemm.tuning() as found:
                deep_gemm.fp8_gemm_nt(a, b, d)
            counts[f"measured {device}"] = len(found)
            assert torch.equal(d, exact_product(*a, *b).bfloat16()), f"a tuned call on GPU {device}"
    return counts


def one_gpu(mesh: DeviceMesh, cache: str) -> dict[str, int]:
    """`one_process` with this rank's GPU. The ranks share the cache."""
    return one_process(mesh, cache, [mesh.get_rank()])


def precompiled(mesh: DeviceMesh, folder: str) -> dict[str, int]:
    """How many kernels a rank got ahead in a cache of its own, and how. Calls must need no other."""
    from deep_gemm.aot import distributed
    from deep_gemm.aot.workload import GemmShape
    from deep_gemm.jit import default_builder

    rank, before = mesh.get_rank(), default_builder().stats
    with settings.override(cache_dir=str(Path(folder, f"rank{rank}"))):
        summary = distributed.precompile([GemmShape(m, 576, 512) for m in (1, 64, 4096)], timeout=50)
        found = {what: default_builder().stats[what] - before[what] for what in ("compiled", "adopted")}
        found |= {"kernels": sum(x.binary is not None for x in summary.outcomes), "failed": len(summary.failed)}
        with settings.override(forbid_compile=True):
            for m in (1, 64, 4096):
                a, b = integer_operands(m, 576, 512, mesh.device_type)
                d = torch.empty(m, 576, dtype=torch.bfloat16, device=mesh.device_type)
                deep_gemm.fp8_gemm_nt(a, b, d)
                assert torch.equal(d, exact_product(*a, *b).bfloat16())
    return found
