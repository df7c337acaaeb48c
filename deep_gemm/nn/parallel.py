"""Layers over several GPUs: tensor and expert parallelism by `parallelize_module`, and FSDP2 that gathers FP8.

``import deep_gemm.nn`` does not load this module, because `torch.distributed.tensor` takes a while to import.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as styles

from deep_gemm.errors import InvalidInputError
from deep_gemm.nn.convert import Report, owners_of
from deep_gemm.nn.exchange import TokenExchange
from deep_gemm.nn.gathered import Sharded, why_not_sharded
from deep_gemm.nn.linear import FP8Linear, Linear
from deep_gemm.nn.moe import MoE
from deep_gemm.nn.stored import E4M3
from deep_gemm.nn.weights import Divisible, FP8Weights
from deep_gemm.runtime.sharding import why_not_divided
from deep_gemm.spec import SCALE_BLOCK
from deep_gemm.tensors import kind_of, shown

__all__ = ["ColwiseParallel", "ExpertParallel", "RowwiseParallel", "gather_in_fp8"]


class ColwiseParallel(styles.ColwiseParallel):
    """`torch.distributed.tensor.parallel.ColwiseParallel` for the linear layers of this package too: each rank has some
    of the output features. Arguments and the layouts of inputs and results are those of torch's.

    Output features of an `FP8Linear` on each rank must be a multiple of 128, so that a block of scales is on one rank.
    Raises InvalidInputError, which names the legal numbers of ranks.

    >>> plan = {"up": deep_gemm.nn.parallel.ColwiseParallel(), "down": deep_gemm.nn.parallel.RowwiseParallel()}
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, Linear):
            return super()._apply(module, device_mesh)
        _divide(module, device_mesh, 0, self.src_data_rank)

        def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x = _laid_out(args[0], device_mesh, self.input_layouts, (Replicate(),))
            return _local(x, (Partial(),)), *args[1:]

        def after(module: nn.Module, args: tuple[Any, ...], y: Tensor) -> Tensor:
            return _result(y, device_mesh, (Shard(-1),), self.output_layouts, self.use_local_output)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
        return module


class RowwiseParallel(styles.RowwiseParallel):
    """`torch.distributed.tensor.parallel.RowwiseParallel` for the linear layers of this package too: each rank has some
    of the input features. Results are added in the dtype of the layer's result, and then the bias is.

    Input features of an `FP8Linear` on each rank must be a multiple of 128. Raises InvalidInputError, which names the
    legal numbers of ranks.

    >>> plan = {"up": deep_gemm.nn.parallel.ColwiseParallel(), "down": deep_gemm.nn.parallel.RowwiseParallel()}
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, Linear):
            return super()._apply(module, device_mesh)
        _divide(module, device_mesh, 1, self.src_data_rank)

        def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return _local(_laid_out(args[0], device_mesh, self.input_layouts, (Shard(-1),))), *args[1:]

        def after(module: Any, args: tuple[Any, ...], y: Tensor) -> Tensor:
            bias = module.bias if module.shards[1] > 1 else None  # of one rank it is added
            return _result(y, device_mesh, (Partial(),), self.output_layouts, self.use_local_output, bias)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
        return module


class ExpertParallel(styles.ParallelStyle):
    """Divides the experts of a `MoE` among ranks. Each rank calls the layer with tokens of its own. They are sent to
    the ranks of their experts, and results back. The router stays whole: add its gradients as those of any replicated
    layer are added.

    Results and gradients are those of one process that has the tokens of all ranks in order. A call waits for the GPU
    once: the host must know how many rows it sends.

    Raises InvalidInputError if the number of ranks does not divide that of experts.

    >>> plan = {"moe": deep_gemm.nn.parallel.ExpertParallel()}
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, MoE):
            raise InvalidInputError(f"ExpertParallel divides a deep_gemm.nn.MoE, but it got {kind_of(module)}.")
        ranks = _ranks(device_mesh)
        if wrong := why_not_divided("The number of experts", module.gate_up.num_groups, ranks, 1):
            raise InvalidInputError(f"{wrong}.")
        for layer in (module.gate_up, module.down):
            for name in [name for name, _ in layer.named_parameters()]:
                _shard(layer, name, device_mesh, Shard(0), self.src_data_rank)
        module.exchange = TokenExchange(device_mesh)
        return module


def gather_in_fp8(model: nn.Module, ranks: int) -> Report:
    """Have FSDP2 gather the weights of ``model`` that are cast to FP8 in FP8, and say of which layers. Call it before
    ``fully_shard``, with the number of ranks that will share a weight.

    Each rank keeps its shard of the weight in 16 or 32 bits, for the optimizer, and casts it before it is gathered:
    half of the bytes of bfloat16 move, and each weight is cast once, not by every rank. Results are those of a whole
    weight: a shard must have a multiple of 128 rows, or whole experts. Other layers are gathered as they are; the
    report says why.

    Raises InvalidInputError.

    >>> model = torch.nn.Sequential(deep_gemm.nn.FP8Linear(256, 512), deep_gemm.nn.FP8Linear(512, 128))
    >>> deep_gemm.nn.parallel.gather_in_fp8(model, ranks=2).converted
    ('0',)
    """
    if not isinstance(model, nn.Module):
        raise InvalidInputError(f"model must be a torch.nn.Module, but it is {kind_of(model)}.")
    if not isinstance(ranks, int) or ranks < 1:
        raise InvalidInputError(f"ranks must be an integer of at least 1, but it is {shown(ranks)}.")
    converted, kept, owners = [], {}, owners_of(model)
    for name, layer in model.named_modules():
        if isinstance(layer, FP8Weights):
            others = [other for other, module in owners[id(layer.weight)] if module is not layer]
            if why := f"it shares its weight with {others[0]}" if others else _why_not_gathered(layer, ranks):
                kept[name] = why
                continue
            weight: Any = nn.Parameter(Sharded(layer.weight.detach()), layer.weight.requires_grad)
            layer.weight = weight
            converted.append(name)
    return Report(tuple(converted), kept)


def _why_not_gathered(layer: FP8Weights, ranks: int) -> str:
    """Why the weight of a layer is gathered as it is, as the end of a sentence; "" if it is gathered in FP8."""
    if layer.mode == "inference":
        return "it is in inference mode"
    if type(layer.weight) is not nn.Parameter:
        return f"its weight is a {type(layer.weight).__name__} already"
    wrong = why_not_sharded(layer.weight.shape, ranks)
    return wrong[:1].lower() + wrong[1:]


def _ranks(mesh: DeviceMesh) -> int:
    if mesh.ndim != 1:
        raise InvalidInputError(
            f"mesh must have one dimension, but it has {mesh.ndim}: pass mesh[NAME] of one of them."
        )
    return mesh.size()


def _divide(layer: Linear, mesh: DeviceMesh, dim: int, source: int | None) -> None:
    """Shard the weight along ``dim``, its scales with it, and the bias if it belongs to the output features."""
    ranks, what = _ranks(mesh), ("out_features", "in_features")[dim]
    block = SCALE_BLOCK if isinstance(layer, FP8Linear) else 1
    if wrong := why_not_divided(what, getattr(layer, what), ranks, block):
        raise InvalidInputError(f"{wrong}.")
    for name, _ in list(layer.named_parameters()):
        place = Shard(dim) if name != "bias" else Shard(0) if dim == 0 else Replicate()
        _shard(layer, name, mesh, place, source)
    layer.shards = (ranks, 1) if dim == 0 else (1, ranks)


def _shard(layer: Divisible, name: str, mesh: DeviceMesh, place: Placement, source: int | None) -> None:
    parameter = getattr(layer, name)
    if type(parameter) is not nn.Parameter:
        raise InvalidInputError(f"{name} of the layer is a {type(parameter).__name__} already: divide it once.")
    whole = parameter.detach()
    is_fp8 = whole.dtype == E4M3
    bits = whole.view(torch.uint8) if is_fp8 else whole  # which every backend sends
    sharded = distribute_tensor(bits, mesh, [place], src_data_rank=source)
    if is_fp8:
        local = sharded.to_local().view(E4M3)
        sharded = DTensor.from_local(local, mesh, [place], run_check=False, shape=whole.shape, stride=whole.stride())
    layer.is_divided = True
    layer.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


def _laid_out(x: Any, mesh: DeviceMesh, given: Any, wanted: Any) -> DTensor:
    """The input in the layout that the layer reads."""
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, given, run_check=False)
    return x if x.placements == wanted else x.redistribute(placements=wanted)


def _local(x: DTensor, of_gradient: Any = None) -> Tensor:
    local: Tensor = x.to_local(grad_placements=of_gradient)
    # A collective of another layer may still run: kernels read the memory, and torch waits for it in a copy.
    return local if type(local) is Tensor else local.clone()


def _result(y: Tensor, mesh: DeviceMesh, made: Any, wanted: Any, local: bool, bias: Any = None) -> Tensor:
    if local and made == wanted and bias is None:
        return y
    found = DTensor.from_local(y, mesh, made, run_check=False)
    if bias is not None:
        found = found.redistribute(placements=[Replicate()] if wanted == (Partial(),) else wanted)
        found = (found + bias).to(y.dtype)
    if found.placements != tuple(wanted):
        found = found.redistribute(placements=wanted)
    return found.to_local() if local else found
