"""The choice of experts."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from deep_gemm.errors import InvalidInputError
from deep_gemm.nn.weights import check_word
from deep_gemm.ops.checks import MAX_SIZE, check_index

Scores: TypeAlias = Literal["softmax", "sigmoid", "sqrtsoftplus"]


class Router(nn.Linear):
    """Chooses the experts of each token, in float32: the router of a `MoE`.

    Args:
        width: the size of a token.
        experts: the number of experts.
        top_k: how many experts a token goes to: those with the largest scores.
        scores: how scores follow from the product: "softmax" over all experts; "sigmoid", as in DeepSeek-V3; or
            "sqrtsoftplus", the root of softplus, as in DeepSeek-V4.
        normalise: divide the weights of a token by their sum. With "softmax" this is a softmax over the chosen experts,
            as in gpt-oss, Mixtral and Qwen3.
        scale: the weights are multiplied by it.
        bias: whether the product has a bias, as in gpt-oss.
        correction: whether ``e_score_correction_bias``, a float32 (experts,), is added to scores where experts are
            chosen, and not to their weights, as in DeepSeek-V3 and V4. Groups of experts, as in V3, are not known.
        device: where parameters are.

    Raises InvalidInputError, which names the argument.

    >>> weights, chosen = deep_gemm.nn.Router(64, experts=8, top_k=2).choose(torch.randn(5, 64))
    >>> weights.shape, chosen.dtype
    (torch.Size([5, 2]), torch.int64)
    """

    e_score_correction_bias: nn.Parameter | None

    def __init__(
        self,
        width: int,
        experts: int,
        top_k: int,
        *,
        scores: Scores = "softmax",
        normalise: bool = False,
        scale: float = 1.0,
        bias: bool = False,
        correction: bool = False,
        device: Any = None,
    ) -> None:
        for name, size in (("width", width), ("experts", experts), ("top_k", top_k)):
            check_index(name, size, 1, MAX_SIZE, "a whole number from 1")
        if not 1 <= top_k <= experts:
            raise InvalidInputError(f"top_k must be from 1 to {experts}, the number of experts, but it is {top_k}.")
        check_word("scores", scores, Scores)
        super().__init__(width, experts, bias=bias, device=device, dtype=torch.float32)
        self.top_k, self.scores, self.normalise, self.scale = top_k, scores, normalise, scale
        found = nn.Parameter(torch.zeros(experts, device=device), requires_grad=False) if correction else None
        self.register_parameter("e_score_correction_bias", found)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and the numbers of the experts of tokens x (tokens, width): (tokens, top_k) float32 and int64."""
        with torch.autocast(x.device.type, enabled=False):
            product = self(x.to(self.weight.dtype)).float()
            if self.scores == "softmax":
                scores = product.softmax(1)
            else:
                scores = product.sigmoid() if self.scores == "sigmoid" else nn.functional.softplus(product).sqrt()
            if self.e_score_correction_bias is None:
                weights, chosen = scores.topk(self.top_k)
            else:
                chosen = (scores + self.e_score_correction_bias.float()).topk(self.top_k).indices
                weights = scores.gather(1, chosen)
            if self.normalise:
                weights = weights / weights.sum(1, keepdim=True)
            return weights if self.scale == 1 else weights * self.scale, chosen

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Checkpoints have 16 bits; a parameter that was on the meta device stays of its dtype too."""
        for name, parameter in self.named_parameters():
            given = state_dict.get(f"{prefix}{name}")
            if isinstance(given, Tensor) and given.dtype in (torch.bfloat16, torch.float16, torch.float32):
                state_dict[f"{prefix}{name}"] = given.to(parameter.dtype)
        super()._load_from_state_dict(state_dict, prefix, *rest)
