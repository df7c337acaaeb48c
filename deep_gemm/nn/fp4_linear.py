"""Linear layers of several groups with MXFP4 weights, for inference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from deep_gemm import fp4, quantize
from deep_gemm.errors import InvalidInputError
from deep_gemm.nn import casts
from deep_gemm.nn.routing import Routing
from deep_gemm.nn.weights import Divisible, check_word
from deep_gemm.ops import fp4_weights, mxfp4
from deep_gemm.ops.checks import MAX_SIZE, check_index
from deep_gemm.quantize import Quantized
from deep_gemm.tensors import kind_of

Activations: TypeAlias = Literal["fp8", "bf16"]

CODES = ("blocks", "weight", "weight_packed")
"""What a checkpoint calls packed values: gpt-oss, DeepSeek-V4 and compressed-tensors."""
EXPONENTS = ("scales", "scale", "weight_scale")


class FP4GroupedLinear(Divisible):
    """Linear layers with MXFP4 weights, one for each group of rows, for inference: the experts of a mixture.

    Args:
        num_groups: the number of groups.
        in_features: a multiple of 32.
        out_features: a multiple of 8.
        activations: "fp8": x is cast, with scales of 1 x 128. "bf16": x is multiplied as it is.
        bias: whether each group has a bias, (groups, out) in ``dtype``, bfloat16 by default. The layer adds it to the
            product in bfloat16; `MoE` adds it in float32, in what follows the product.

    ``packed`` and ``factors`` are what `transform_fp4_weights` returns, 4.125 or 4.25 bits a weight; nothing else is
    kept. A state dict has these, or a checkpoint's MXFP4 weights: ``blocks`` and ``scales``, or ``weight`` and
    ``scale``, each as `transform_fp4_weights` takes it. Those are transformed while they are loaded, on the layer's
    device, one group after the other, and the layer gets their memory. Weights of other dtypes are refused.

    Raises InvalidInputError, which names the argument.

    >>> layer = deep_gemm.nn.FP4GroupedLinear(4, 256, 128)
    >>> packed, scales = deep_gemm.quantize.mxfp4(torch.randn(4, 128, 256))
    >>> layer.load_state_dict({"weight": packed, "scale": scales})
    <All keys matched successfully>
    >>> routing = deep_gemm.nn.Routing.from_choices(torch.randint(4, (30, 1)), experts=4)
    >>> layer(routing.spread(torch.randn(30, 256).bfloat16()), routing).shape
    torch.Size([640, 128])
    """

    mode = "inference"
    packed: nn.Parameter
    factors: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        activations: Activations = "fp8",
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        check_index("num_groups", num_groups, 0, MAX_SIZE, "a whole number from 0")
        for name, size, step in (("in_features", in_features, mxfp4.BLOCK), ("out_features", out_features, 8)):
            if not isinstance(size, int) or size < step or size % step:
                raise InvalidInputError(f"{name} must be a multiple of {step}, but it is {size!r}.")
        check_word("activations", activations, Activations)
        if not isinstance(bias, bool):
            raise InvalidInputError(f"bias must be True or False, but it is {bias!r}.")
        nn.Module.__init__(self)
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.activations: Activations = activations
        self._set(fp4_weights.empty(num_groups, out_features, in_features, activations, device))
        if bias:
            self.bias = nn.Parameter(torch.zeros(num_groups, out_features, device=device, dtype=dtype), False)
        else:
            self.register_parameter("bias", None)

    def _set(self, weights: fp4_weights.Fp4Weights) -> None:
        for name, tensor in weights._asdict().items():
            setattr(self, name, nn.Parameter(tensor, requires_grad=False))

    @property
    def local_groups(self) -> int:
        """The groups that this rank has."""
        return int(self.own(self.packed).shape[0])

    def plain(self) -> tuple[Tensor, Tensor]:
        """The weights of this rank, as products take them."""
        return self.own(self.packed), self.own(self.factors)

    def takes_gradient(self) -> bool:
        """Never: weights of 4 bits are not trained."""
        return False

    def product(self, x: Tensor | Quantized, routing: Routing) -> Tensor:
        """The product, without bias, of rows in the order of ``routing``: bfloat16, or for "fp8" their cast. Rows of
        padding are zeros."""
        rows = x[0] if isinstance(x, tuple) else x
        d = torch.empty(rows.shape[0], self.out_features, dtype=torch.bfloat16, device=rows.device)
        weights = self.plain()
        if self.activations == "bf16":
            fp4.m_grouped_bf16_fp4_gemm_nt_contiguous(rows, weights, d, routing.labels)
        else:
            fp4.m_grouped_fp8_fp4_gemm_nt_contiguous(x, weights, d, routing.labels)  # type: ignore[arg-type]
        return d

    def add_bias(self, y: Tensor, groups: Tensor) -> Tensor:
        """y (..., out), and the bias of each row's group added to it in place. Rows of group -1 stay as they are."""
        if self.bias is not None:
            rows = self.own(self.bias)[groups.clamp(min=0)]
            y += rows.masked_fill(groups[..., None] < 0, 0)
        return y

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """x (rows, in_features), in the order of ``routing``, such as ``routing.spread(tokens)``; the result is (rows,
        out_features), in the dtype of x or of autocast. Rows of padding must be zeros, and are zeros in the
        result."""
        x = casts.row_major(casts.compact(x, self.in_features, is_matrix=True))
        if not isinstance(routing, Routing):
            raise InvalidInputError(f"routing must be a deep_gemm.nn.Routing, but it is {kind_of(routing)}.")
        dtype = casts.result_dtype(x)
        casts.check_read(x)
        if torch.is_grad_enabled() and x.requires_grad:
            raise InvalidInputError(
                "x requires grad, and MXFP4 weights take none: gradients end here. Call the layer under "
                "torch.no_grad()."
            )
        return self.add_bias(self.product(self.operand_of(x), routing), routing.labels).to(dtype)

    def operand_of(self, x: Tensor) -> Tensor | Quantized:
        """What `product` takes of rows of 16 or 32 bits."""
        return quantize.rows(x) if self.activations == "fp8" else x.to(torch.bfloat16)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        names = [[f"{prefix}{own}" for own in each if f"{prefix}{own}" in state_dict] for each in (CODES, EXPONENTS)]
        if any(names):
            self._transform(state_dict, prefix, *names)
        elif isinstance(packed := state_dict.get(f"{prefix}packed"), Tensor):
            self._take(packed, f"{prefix}packed")
        nn.Module._load_from_state_dict(self, state_dict, prefix, *rest)

    def _transform(self, state: dict[str, Any], prefix: str, codes: list[str], exponents: list[str]) -> None:
        """Replace a checkpoint's weights in a state dict by the layer's own, transformed."""
        for name in codes:
            if isinstance(state[name], Tensor) and state[name].dtype not in mxfp4.PACKED:
                raise InvalidInputError(
                    f"{name} must be MXFP4, two values in each uint8 or int8, but it is {state[name].dtype}. Cast it "
                    "by deep_gemm.quantize.mxfp4, which rounds."
                )
        if len(codes) != 1 or len(exponents) != 1:
            raise InvalidInputError(
                f"{prefix or 'the state dict'} must have packed values ({', '.join(CODES)}) and their scales "
                f"({', '.join(EXPONENTS)}), one of each, but it has {', '.join(codes + exponents)}."
            )
        if self.is_divided:
            raise InvalidInputError(f"{codes[0]} must be loaded before the layer is divided among ranks.")
        values, scales = state.pop(codes[0]), state.pop(exponents[0])
        shape = self.num_groups, self.out_features, self.in_features // 2
        if values.dim() == 4:
            values = values.flatten(-2)
        if tuple(values.shape) != shape:
            raise InvalidInputError(f"{codes[0]} must have the shape {shape}, but it has {tuple(values.shape)}.")
        device = values.device if self.packed.device.type == "meta" else self.packed.device
        made = fp4_weights.transform(values.to(device), scales.to(device), self.activations)
        self._set(made)
        state |= {f"{prefix}{name}": tensor for name, tensor in made._asdict().items()}

    def _take(self, packed: Tensor, name: str) -> None:
        """Give ``packed`` the shape of the one to be loaded: exponents of 4 or of 8 bits."""
        mine = self.packed
        if packed.dtype != mine.dtype:
            raise InvalidInputError(
                f"{name} must be {mine.dtype}, as transform_fp4_weights makes it for activations="
                f"{self.activations!r}, but it is {packed.dtype}. Load the checkpoint's own weights."
            )
        fits = packed.shape[:-1] == mine.shape[:-1] and fp4_weights.is_transformed(packed, grouped=True)
        if fits and packed.shape != mine.shape and not self.is_divided:
            self.packed = nn.Parameter(torch.empty_like(packed, device=mine.device), requires_grad=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FP4GroupedLinear:
        """`to`, `cuda`, `bfloat16` and the like: weights move, and keep their dtypes."""

        def moved(x: Tensor) -> Tensor:
            return fn(x.detach().view(torch.int32)).view(x.dtype) if x is self.factors else fn(x)

        super()._apply(moved, recurse)
        return self

    def extra_repr(self) -> str:
        """What `repr` shows."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"num_groups={self.num_groups}, {sizes}, activations={self.activations!r}, bias={self.bias is not None}"
