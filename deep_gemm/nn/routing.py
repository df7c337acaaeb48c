"""Where the rows of experts are: tokens in expert order."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deep_gemm.errors import InvalidInputError
from deep_gemm.kernels.moe_kernels import MOST_EXPERTS
from deep_gemm.layout import get_mk_alignment_for_contiguous_layout
from deep_gemm.ops import moe_rows
from deep_gemm.ops.checks import MAX_SIZE, check_index
from deep_gemm.ops.moe_chain import runs_on
from deep_gemm.runtime.operation import Fault, refuse_faults
from deep_gemm.settings import settings
from deep_gemm.spec import SCALE_BLOCK
from deep_gemm.tensors import check_tensor, is_traced, kind_of


@dataclass(frozen=True)
class Routing:
    """Where the rows of each expert are in a matrix of all rows. An expert's rows lie together, and begin at a multiple
    of 128. Other rows are padding, the last one always. All tensors are on the device of the tokens.

    >>> routing = deep_gemm.nn.Routing.from_choices(torch.tensor([[1], [0], [1]]), experts=2)
    >>> routing.sizes.tolist(), routing.rows.flatten().tolist()
    ([128, 128], [128, 0, 129])
    """

    rows: Tensor
    """(tokens, top_k) int64: the row of each choice of a token. That of a dropped choice is the last row, of zeros."""
    tokens: Tensor
    """(capacity,) int64: the token of each row. Padding has the number of tokens, one past the last."""
    labels: Tensor
    """(capacity,) int32: the expert of each row, or -1 for padding. Kernels read it."""
    sizes: Tensor
    """(experts,) int32: the rows of each expert with its padding, multiples of 128. Kernels read it."""
    places: Tensor | None = None
    """``rows`` as int32, with -1 of a dropped choice, if it is known. Kernels read it."""
    index: Tensor | None = None
    """``tokens`` as int32, if it is known. Kernels read it."""

    @classmethod
    def from_choices(cls, chosen: Tensor, experts: int) -> Routing:
        """``chosen`` (tokens, top_k) int64 are the experts of each token, from 0 to ``experts`` - 1. A choice of -1 or
        ``experts`` is dropped, such as one that another rank serves: it takes no row, and adds zeros. Nothing here
        waits for the GPU: the number of rows is an upper bound that follows from shapes.

        Raises InvalidInputError, which names the argument. On a GPU only DG_CHECK=1 looks for other numbers; they are
        dropped.

        >>> chosen = torch.tensor([[0, 3], [1, 3], [3, 0]])  # two experts for each of three tokens
        >>> deep_gemm.nn.Routing.from_choices(chosen, experts=4).rows
        tensor([[  0, 256],
                [128, 257],
                [258,   1]])
        """
        if isinstance(chosen, Tensor):
            check_tensor("chosen", chosen)
        if not isinstance(chosen, Tensor) or chosen.dim() != 2 or chosen.dtype != torch.int64:
            came = f" {tuple(chosen.shape)}" if isinstance(chosen, Tensor) else ""
            raise InvalidInputError(f"chosen must be torch.int64 (tokens, top_k), but it is {kind_of(chosen)}{came}.")
        check_index("experts", experts, 1, MAX_SIZE, "a whole number from 1")
        if (settings.check or chosen.device.type == "cpu") and not is_traced([chosen]):
            refuse_faults("Routing.from_choices", chosen.device, lambda: _unknown(chosen, experts))
        device, (tokens, top_k) = chosen.device, chosen.shape
        # A group begins with a new block of scales too, because rows are the K of weight gradients.
        alignment = math.lcm(get_mk_alignment_for_contiguous_layout(), SCALE_BLOCK)
        # All groups fit, and then the last row is padding: of the last group, or of none if that has no padding.
        capacity = moe_rows.most_rows(tokens * top_k, experts, alignment)
        if experts > MOST_EXPERTS or not runs_on(device):
            rows, places, of_rows, index, labels, sizes = moe_rows.routed(chosen, experts, alignment, capacity)
            return cls(rows, of_rows, labels, sizes, places, index)
        rows = torch.empty(chosen.shape, dtype=torch.int64, device=device)
        places = torch.empty(chosen.shape, dtype=torch.int32, device=device)
        of_rows = torch.empty(capacity, dtype=torch.int64, device=device)
        index, labels = (torch.empty(capacity, dtype=torch.int32, device=device) for _ in range(2))
        sizes = torch.zeros(experts, dtype=torch.int32, device=device)
        moe_rows.route(chosen.contiguous(), rows, places, of_rows, index, labels, sizes, experts, alignment)
        return cls(rows, of_rows, labels, sizes, places, index)

    def spread(self, x: Tensor) -> Tensor:
        """The rows (capacity, columns) of tokens x (tokens, columns). Rows of padding are zeros."""
        _check_rows(x, self.rows.shape[0], "tokens")
        return torch.cat([x, x.new_zeros(1, x.shape[1])])[self.tokens]

    def choices(self, x: Tensor) -> Tensor:
        """From rows x (capacity, columns), those of each token's choices: (tokens, top_k, columns) float32. A sum over
        them has a fixed order, so that its bits repeat. Of a dropped choice it is a row of padding, which must be zeros
        in x, as layers leave it."""
        _check_rows(x, self.tokens.shape[0], "capacity")
        return x[self.rows].float()


def _check_rows(x: Tensor, count: int, what: str) -> None:
    """A GPU would find a row that is not there only while a kernel runs, and no call of the process would work then."""
    check_tensor("x", x, (2,))
    if x.shape[0] != count:
        raise InvalidInputError(f"x must have {count} rows ({what}), as the routing does, but it has {x.shape[0]}.")


def _unknown(chosen: Tensor, experts: int) -> list[Fault]:
    def say(token: int, choice: int) -> str:
        return (
            f"chosen[{token}, {choice}] is {int(chosen[token, choice])}, but experts are from 0 to {experts - 1}, and "
            f"-1 or {experts} drops a choice."
        )

    return [Fault((chosen < -1) | (chosen > experts), say)]
