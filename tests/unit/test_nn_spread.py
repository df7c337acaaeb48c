"""`check_spread`: which layers are named, and what setting their recipe does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nn_cases import IN, OUT, experts_results, matrix, relative, results
from torch import Tensor, nn

from deep_gemm import InvalidInputError, quantize
from deep_gemm.nn import FP8GroupedLinear, FP8Linear, MoE, Routing, check_spread

SMALL = 2.0**-15


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def model(weight_gradient: Any = "1x128") -> nn.Sequential:
    return nn.Sequential(FP8Linear(IN, OUT, weight_gradient=weight_gradient), FP8Linear(OUT, IN))


def uneven(tokens: int, factor: float = SMALL) -> Tensor:
    x = matrix(tokens, IN)
    x[:, 7] *= factor
    return x


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("shape", [(200, IN), (2, 100, IN)], ids=str)
def test_the_layer_with_a_small_channel_is_named(shape: tuple[int, ...], keyword: bool) -> None:
    made, x = model(), uneven(200).view(shape)
    wanted = made(x)
    with check_spread(made) as report:
        y = made[1](made[0](x=x) if keyword else made[0](x))
    assert torch.equal(y, wanted)
    assert report.wide == ("0",)
    assert report.spreads == {
        "0": quantize.spread(x.view(-1, IN)).amax().item(),
        "1": quantize.spread(made[0](x).detach().view(-1, OUT)).amax().item(),
    }
    first, second = str(report).splitlines()
    assert first == "1 layer may have weight_gradient='mixed': 1"
    assert second.startswith("0 has a channel 2^1")
    assert second.endswith("below another of its 128: set its weight_gradient to '1x128', or keep it in BF16")


def test_the_largest_spread_counts_and_calls_outside_do_not() -> None:
    made = model()
    made(uneven(64, 2.0**-20))
    with check_spread(made) as report:
        assert report.unseen == ("0", "1")
        for factor in (2.0**-4, 2.0**-9, 2.0**-1):
            made(uneven(64, factor))
        inside = report.spreads["0"]
        made(matrix(0, IN))
    made(uneven(64, 2.0**-20))
    assert 2.0**9 / 4 < inside == report.spreads["0"] < 2.0**13
    assert report.wide == report.unseen == ()
    assert str(report).startswith("2 layers may have weight_gradient='mixed': 0, 1")
    assert not any(layer._forward_pre_hooks for layer in made)


def test_hooks_go_when_a_call_fails() -> None:
    made = nn.ModuleList([model(), MoE(IN, 48, 3, 1)])
    with pytest.raises(InvalidInputError, match="x must be a tensor"), check_spread(made):
        made[0](matrix(16, IN + 16))
    assert not any(layer._forward_pre_hooks or getattr(layer, "watchers", ()) for layer in made.modules())


def test_groups_of_rows_have_blocks_of_their_own() -> None:
    """A block with rows of two groups would have a spread of 2^15."""
    layer, x = FP8GroupedLinear(2, IN, OUT), matrix(60, IN)
    x[:30] *= SMALL
    routing = Routing.from_choices((torch.arange(60) >= 30).long()[:, None], experts=2)
    with check_spread(layer) as report:
        layer(routing.spread(x), routing)
    assert report.wide == ()
    x[:30, 7] *= SMALL
    with check_spread(layer) as report:
        layer(routing.spread(x), routing)
    assert report.wide == ("",)
    assert "the model has a channel" in str(report)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("part", ["gate_up", "down"])
def test_both_layers_of_a_mixture(part: str, gradients: bool) -> None:
    made, x = nn.ModuleDict({"experts": MoE(IN, 48, 3, 1)}), matrix(100, IN)
    mixture: Any = made["experts"]
    if part == "gate_up":
        x[:, 7] *= SMALL
    else:
        mixture.gate_up.weight.data[:, 48 + 5] *= SMALL
    with torch.set_grad_enabled(gradients):
        wanted = mixture(x)
        with check_spread(made) as report:
            assert torch.equal(mixture(x), wanted)
    assert report.wide == (f"experts.{part}",)
    assert set(report.spreads) == {"experts.gate_up", "experts.down"}
    if part == "gate_up":
        assert report.spreads["experts.gate_up"] >= 2.0**13


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_named(value: float) -> None:
    made, x = model(), matrix(48, IN)
    x[3, 5] = value
    with check_spread(made) as report:
        made(x)
        made(matrix(48, IN))
    assert report.wide == ("0", "1")
    assert "0 has an input that is not finite: look for the layer before it" in str(report)


def test_compiled_calls_are_told_of() -> None:
    made = model()
    with check_spread(made) as report:
        torch.compile(made, fullgraph=True, backend="eager")(matrix(192, IN))
    assert report.unseen == ("0", "1")
    assert "not seen, because not called or inside of torch.compile: 0, 1" in str(report)


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "no module": (lambda: FP8Linear, "model must be a torch.nn.Module, but it is "),
    "no FP8 layer": (lambda: nn.Linear(IN, OUT), "it has none. Call deep_gemm.nn.convert"),
    "no training": (lambda: FP8Linear(IN, OUT, mode="inference"), "must have an FP8 layer in training mode"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes(case: str) -> None:
    made, words = MISTAKES[case]
    with pytest.raises(InvalidInputError, match=words), check_spread(made()):
        pass


def test_the_advice_mends_the_gradient() -> None:
    made, x, dy = model("mixed"), uneven(208), matrix(208, OUT)
    layer: Any = made[0]
    exact = dy.double().t() @ x.double()
    before = relative(results(layer, x, dy)["dw"][:, 7], exact[:, 7])
    layer.weight_gradient = "1x128"
    assert relative(results(layer, x, dy)["dw"][:, 7], exact[:, 7]) < 0.045 < 2 * 0.045 < before
    with pytest.raises(InvalidInputError, match="weight_gradient must be '1x128' or 'mixed', but it is 'bf16'"):
        layer.weight_gradient = "bf16"


def test_each_layer_of_a_mixture_has_a_recipe_of_its_own() -> None:
    mixture, x, dy = MoE(IN, 48, 3, 1), matrix(100, IN), matrix(100, IN)
    one = experts_results(mixture, x, dy)
    mixture.down.weight_gradient = "mixed"
    both = experts_results(mixture, x, dy)
    assert {name for name in one if not torch.equal(one[name], both[name])} == {"d down"}
    mixture.down.weight_gradient, mixture.gate_up.weight_gradient = "1x128", "mixed"
    both = experts_results(mixture, x, dy)
    assert {name for name in one if not torch.equal(one[name], both[name])} == {"d gate_up"}
