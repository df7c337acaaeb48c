"""Layers with MXFP4 weights, and experts as checkpoints name them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_cases import DEEPSEEK_V4, GPT_OSS, Layer, exact, experts_of, relative
from nn_cases import matrix
from safetensors.torch import save_file
from torch import Tensor, nn

import deep_gemm
from deep_gemm import InvalidInputError, quantize
from deep_gemm.nn import FP4GroupedLinear, MoE, Router, Routing, check_mxfp4, load_checkpoint

BF16 = torch.bfloat16
WIDTH, HIDDEN, EXPERTS = 160, 96, 5
State = dict[str, Tensor]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("layer", [GPT_OSS, DEEPSEEK_V4], ids=str)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_layer_of_a_model_is_near_float64(layer: Layer, device: str, tmp_path: Path) -> None:
    """With the names and shapes of the model's checkpoint, but smaller; in two files, which divide a layer."""
    small = layer.resized(WIDTH, HIDDEN, EXPERTS, 2)
    state = small.state()
    names = sorted(state)
    save_file({f"mlp.{name}": state[name] for name in names[::2]}, tmp_path / "a.safetensors")
    save_file({f"mlp.{name}": state[name] for name in names[1::2]}, tmp_path / "b.safetensors")
    model = nn.ModuleDict({"mlp": small.module(device)})
    assert load_checkpoint(model, tmp_path) == ((), ())
    x = matrix(37, WIDTH)
    x[::3] *= 16  # beyond the limits of activations
    y = model["mlp"](x)
    assert relative(y, exact(small, state, x, model["mlp"].route(x))) < small.bound
    bits = sum(each.numel() * each.element_size() for each in (model["mlp"].gate_up.packed, model["mlp"].down.packed))
    weights = sum(-(-n // 64) * 64 * -(-k // 128) * 128 for n, k in ((2 * HIDDEN, WIDTH), (WIDTH, HIDDEN)))
    assert bits * 8 / (EXPERTS * weights) in (4.125, 4.25), "nothing but the 4-bit weights"
    assert torch.equal(y, model["mlp"](x))
    again = small.module("cpu")
    again.load_state_dict(model["mlp"].state_dict())
    assert torch.equal(again(x), y)


def test_each_group_has_its_weights_and_bias() -> None:
    packed, scales = quantize.mxfp4(torch.randn(3, 72, WIDTH))
    layers = {kind: FP4GroupedLinear(3, WIDTH, 72, activations=kind, bias=True) for kind in ("fp8", "bf16")}
    bias, routing = torch.randn(3, 72).to(BF16), Routing.from_choices(torch.tensor([[2], [0], [2]]), 3)
    x = routing.spread(matrix(3, WIDTH))
    w = deep_gemm.dequantise(packed, scales, dtype=torch.float64)
    wanted = torch.stack([x[routing.rows[t, 0]].double() @ w[g].T + bias[g] for t, g in enumerate((2, 0, 2))])
    for kind, layer in layers.items():
        layer.load_state_dict({"weight": packed, "scale": scales, "bias": bias})
        y = layer(x, routing)
        assert relative(y[routing.rows[:, 0]], wanted) < {"fp8": 0.035, "bf16": 0.004}[kind]
        assert not y[routing.labels < 0].any()
        moved = FP4GroupedLinear(3, WIDTH, 72, activations=kind, bias=True)
        moved.load_state_dict(layer.state_dict())
        assert torch.equal(moved.half().bfloat16()(x, routing), y), "casts leave weights and factors"


@pytest.mark.parametrize("layer", [GPT_OSS, DEEPSEEK_V4], ids=str)
@pytest.mark.parametrize("tokens", [5, 70])
@torch.no_grad()
def test_experts_are_one_call_unless_rows_are_watched_or_biases_are_float32(layer: Layer, tokens: int) -> None:
    small, x = layer.resized(WIDTH, HIDDEN, EXPERTS, 2), matrix(tokens, WIDTH)
    moe = small.module("cpu")
    moe.load_state_dict(small.state())
    weights, chosen = moe.route(x)
    call: Any = deep_gemm.fp8_fp4_moe if moe.gate_up.activations == "fp8" else deep_gemm.bf16_fp4_moe
    biases = None if moe.gate_up.bias is None else (moe.gate_up.bias, moe.down.bias)
    given = [(each.packed, each.factors) for each in (moe.gate_up, moe.down)]
    y = call(x, chosen, weights, *given, activation=moe.activation, clamp=moe.limit, bias=biases)
    assert torch.equal(moe(x), y)
    seen: list[int] = []
    moe.watchers.append(lambda rows, routing: seen.append(len(rows)))
    assert relative(moe(x), y) < 0.01
    assert seen == [tokens]
    moe.watchers.clear()
    if moe.down.bias is not None:
        moe.down.float()
        assert relative(moe(x), y) < 0.01


def test_a_router_takes_its_gradient() -> None:
    small = GPT_OSS.resized(WIDTH, HIDDEN, EXPERTS, 2)
    moe = small.module("cpu")
    moe.load_state_dict(small.state())
    moe.router.weight.requires_grad_(True)
    moe(matrix(5, WIDTH)).sum().backward()
    assert moe.router.weight.grad is not None
    assert moe.router.weight.grad.abs().sum() > 0


def test_a_choice_of_no_expert_adds_nothing() -> None:
    """Neither the bias of gate and up, nor that of down, which is added with the router's weights."""
    small, x = GPT_OSS.resized(WIDTH, HIDDEN, EXPERTS, 2), matrix(37, WIDTH)
    state, layer = small.state(), small.module("cpu")
    layer.load_state_dict(state)
    weights, chosen = layer.route(x)
    chosen[::3, 1] = -1
    layer.route = lambda x: (weights, chosen)
    assert relative(layer(x), exact(small, state, x, (weights, chosen))) < small.bound


def test_a_state_with_wide_exponents_is_saved_and_loaded() -> None:
    packed, scales = quantize.mxfp4(torch.randn(2, 72, WIDTH) * torch.logspace(-9, 9, WIDTH))
    layer, other = FP4GroupedLinear(2, WIDTH, 72), FP4GroupedLinear(2, WIDTH, 72)
    layer.load_state_dict({"blocks": packed.view(2, 72, 5, 16), "scales": scales})
    assert layer.packed.shape[-1] == 4352
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.packed, layer.packed)
    layer.load_state_dict(FP4GroupedLinear(2, WIDTH, 72).state_dict())
    assert layer.packed.shape[-1] == 4224


def plain(name: str, e: int) -> Tensor:
    """The weight of an expert's part."""
    n, k = (WIDTH, HIDDEN) if name == "down" else (HIDDEN, WIDTH)
    gen = torch.Generator().manual_seed(100 * e + len(name))
    return torch.randn(n, k, generator=gen).to(BF16)


def joined() -> State:
    """A mixture with the names of our own layers, in bfloat16."""
    each = range(EXPERTS)
    gate_up = torch.stack([torch.cat([plain("gate", e), plain("up", e)]) for e in each])
    return {
        "gate_up.weight": gate_up,
        "down.weight": torch.stack([plain("down", e) for e in each]),
        "router.weight": torch.randn(EXPERTS, WIDTH, generator=torch.Generator().manual_seed(1)),
    }


def by_expert(gate: str, up: str, down: str, scale: str = "") -> State:
    """A mixture expert by expert, in bfloat16, or in FP8 with scales of this name."""
    state = {"gate.weight": joined()["router.weight"].to(BF16)}
    for e in range(EXPERTS):
        for own, name in (("gate", gate), ("up", up), ("down", down)):
            base, weight = f"experts.{e}.{name}", plain(own, e)
            if not scale:
                state[f"{base}.weight"] = weight
            else:
                state[f"{base}.weight"], state[f"{base}.{scale}"] = quantize.blocks(weight.float())
    return state


def stacked(transposed: bool) -> State:
    own = joined()
    found = {"experts.gate_up_proj": own["gate_up.weight"], "experts.down_proj": own["down.weight"]}
    if transposed:
        found = {name: tensor.mT.contiguous() for name, tensor in found.items()}
    return {**found, "gate.weight": own["router.weight"].to(BF16)}


NAMES: dict[str, Callable[[], State]] = {
    "Qwen3": lambda: by_expert("gate_proj", "up_proj", "down_proj"),
    "Mixtral": lambda: by_expert("w1", "w3", "w2"),
    "DeepSeek-V3": lambda: by_expert("gate_proj", "up_proj", "down_proj", "weight_scale_inv"),
    "compressed-tensors": lambda: by_expert("gate_proj", "up_proj", "down_proj", "weight_scale"),
    "Transformers": lambda: stacked(False),
    "Transformers, transposed": lambda: stacked(True),
}


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", NAMES)
def test_experts_are_joined(name: str, device: str, mode: Any, tmp_path: Path) -> None:
    """Parts of 96 rows end inside of blocks of 128, and are cast again together."""
    state, own = NAMES[name](), joined()
    save_file({f"block.{key}": tensor for key, tensor in state.items()}, tmp_path / "model.safetensors")
    model = nn.ModuleDict({"block": MoE(WIDTH, HIDDEN, EXPERTS, 2, mode=mode, device=device)})
    assert load_checkpoint(model, tmp_path) == ((), ())
    wanted = MoE(WIDTH, HIDDEN, EXPERTS, 2, mode=mode)
    wanted.load_state_dict({**own, "router.weight": own["router.weight"].to(BF16)})
    x = matrix(37, WIDTH)
    assert model["block"].router.weight.dtype == torch.float32
    assert relative(model["block"](x), wanted(x)) < (0.06 if "scale" in str(sorted(state)) else 1e-6)
    assert not torch.equal(wanted(x), wanted(x.flip(0))), "rows differ"


def test_whole_blocks_of_experts_keep_their_bits() -> None:
    layer, state = MoE(256, 128, 2, 1, mode="inference"), {"router.weight": torch.zeros(2, 256)}
    wanted = []
    for e in range(2):
        parts = {name: quantize.blocks(torch.randn(*shape)) for name, shape in (("w1", (128, 256)), ("w3", (128, 256)))}
        parts["w2"] = quantize.blocks(torch.randn(256, 128))
        for name, (values, scales) in parts.items():
            state |= {f"experts.{e}.{name}.weight": values, f"experts.{e}.{name}.weight_scale_inv": scales}
        wanted.append(parts)
    layer.load_state_dict(state)
    for e, parts in enumerate(wanted):
        for kind, own in enumerate(("weight", "weight_scale_inv")):
            both = torch.cat([parts[name][kind].float() for name in ("w1", "w3")])
            assert torch.equal(layer.gate_up.get_parameter(own)[e].float(), both)
            assert torch.equal(layer.down.get_parameter(own)[e].float(), parts["w2"][kind].float())


@pytest.mark.parametrize(
    "options", [{}, {"normalise": True}, {"scores": "sigmoid", "correction": True}, {"scores": "sqrtsoftplus"}], ids=str
)
def test_routers_weigh_the_chosen(options: Any) -> None:
    router, x = Router(WIDTH, 8, 3, bias=True, scale=2.5, **options), torch.randn(20, WIDTH)
    if router.e_score_correction_bias is not None:
        router.e_score_correction_bias.data = torch.linspace(-1, 1, 8)
    weights, chosen = router.choose(x)
    product = torch.nn.functional.linear(x.double(), router.weight.double(), router.bias.double())
    kind = options.get("scores", "softmax")
    scores = {
        "softmax": lambda: product.softmax(1),
        "sigmoid": product.sigmoid,
        "sqrtsoftplus": lambda: product.exp().log1p().sqrt(),
    }[kind]()
    picked = scores + (torch.linspace(-1, 1, 8) if options.get("correction") else 0)
    assert torch.equal(chosen.sort(1).values, picked.topk(3).indices.sort(1).values)
    wanted = scores.gather(1, chosen)
    wanted = wanted / wanted.sum(1, keepdim=True) if options.get("normalise") else wanted
    torch.testing.assert_close(weights.double(), 2.5 * wanted, rtol=1e-5, atol=1e-6)


def fp4_layer(**more: Any) -> FP4GroupedLinear:
    return FP4GroupedLinear(2, WIDTH, 72, **more)


def four_bits(**more: Any) -> MoE:
    return MoE(WIDTH, HIDDEN, EXPERTS, 2, weights="mxfp4", mode="inference", **more)


def missing(name: str) -> State:
    state = by_expert("w1", "w3", "w2")
    del state[name]
    return state


PACKED = quantize.mxfp4(torch.ones(2, 72, WIDTH))
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "K": (lambda: FP4GroupedLinear(2, 48, 72), "in_features must be a multiple of 32, but it is 48"),
    "N": (lambda: FP4GroupedLinear(2, 64, 7), "out_features must be a multiple of 8, but it is 7"),
    "activations": (lambda: fp4_layer(activations="fp16"), "activations must be 'fp8' or 'bf16'"),
    "training": (
        lambda: MoE(WIDTH, HIDDEN, EXPERTS, 2, weights="mxfp4"),
        "mode must be 'inference' with weights='mxfp4'",
    ),
    "recast": (lambda: four_bits(recast="always"), "recast must be left out with weights='mxfp4'"),
    "a bias of FP8": (lambda: MoE(WIDTH, HIDDEN, EXPERTS, 2, bias=True), "bias are for weights='mxfp4'"),
    "another router": (lambda: MoE(WIDTH, HIDDEN, EXPERTS, 2, router=Router(WIDTH, 4, 2)), r"Router\(160, 5, 2\)"),
    "scores": (lambda: Router(8, 4, 2, scores="tanh"), "scores must be 'softmax' or 'sigmoid' or 'sqrtsoftplus'"),  # type: ignore[arg-type]
    "no scales": (lambda: fp4_layer().load_state_dict({"weight": PACKED[0]}), "one of each, but it has weight"),
    "16 bits": (
        lambda: fp4_layer().load_state_dict({"weight": torch.ones(2, 72, WIDTH).to(BF16)}),
        "weight must be MXFP4, two values in each uint8 or int8, but it is torch.bfloat16. Cast it",
    ),
    "other sizes": (
        lambda: fp4_layer().load_state_dict({"weight": PACKED[0][:1], "scale": PACKED[1][:1]}),
        r"weight must have the shape \(2, 72, 80\), but it has \(1, 72, 80\)",
    ),
    "for other activations": (
        lambda: fp4_layer().load_state_dict(fp4_layer(activations="bf16").state_dict()),
        "packed must be torch.uint8, as transform_fp4_weights makes it for activations='fp8', but it is torch.int16",
    ),
    "an expert is missing": (
        lambda: MoE(WIDTH, HIDDEN, EXPERTS, 2).load_state_dict(missing("experts.3.w3.weight")),
        "experts.3.w3.weight is not in the checkpoint, but weights of other experts are",
    ),
    "gradients": (
        lambda: fp4_layer()(torch.ones(128, WIDTH, requires_grad=True), Routing.from_choices(torch.tensor([[0]]), 2)),
        "MXFP4 weights take none",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(name: str) -> None:
    call, words = WRONG[name]
    with pytest.raises(InvalidInputError, match=words):
        call()


@pytest.mark.parametrize(
    ("make", "change", "words"),
    [
        (lambda: MoE(WIDTH, HIDDEN, EXPERTS, 2), {}, "MXFP4 weights, but .*gate_up has others. Build the MoE with we"),
        (four_bits, {}, "is a bias, but .*gate_up has none. Build the MoE with bias=True"),
    ],
    ids=["FP8", "no bias"],
)
def test_a_checkpoint_of_another_kind_is_refused(make: Any, change: State, words: str, tmp_path: Path) -> None:
    state = GPT_OSS.resized(WIDTH, HIDDEN, EXPERTS, 2).state() | change
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(InvalidInputError, match=words):
        load_checkpoint(make(), tmp_path)


def test_a_checkpoint_is_told_what_fp8_would_round(tmp_path: Path) -> None:
    small = GPT_OSS.resized(256, 128, 3, 2)
    state = small.state()
    v4 = {f"v4.{name}": x for name, x in DEEPSEEK_V4.resized(256, 128, 2, 1).state().items()}
    state["experts.down_proj_scales"][1, 130, 0] -= 40  # row 130 is in the second block of 128
    state["experts.down_proj_blocks"][1, 130, 0] = 0x12
    save_file(state, tmp_path / "a.safetensors")
    save_file(v4, tmp_path / "b.safetensors")
    report = check_mxfp4(tmp_path)
    assert report.rounded["experts.down_proj_blocks"] == 1
    assert sum(report.rounded.values()) == 1
    assert report.blocks["experts.gate_up_proj_blocks"] == 3 * 2 * 2
    assert report.blocks["v4.experts.1.w2.weight"] == 2
    assert len(report.blocks) == 2 + 6
    assert "would round values of 1 of 30 blocks, in 1 weight; most in experts.down_proj_blocks, 1." in str(report)
    save_file({"x": torch.ones(4)}, tmp_path / "c.safetensors")
    with pytest.raises(InvalidInputError, match="has no MXFP4 weights"):
        check_mxfp4(tmp_path / "c.safetensors")


def test_experts_of_the_checkpoint_are_those_of_the_test() -> None:
    """The oracle reads each expert by itself."""
    small = DEEPSEEK_V4.resized(WIDTH, HIDDEN, EXPERTS, 2)
    first, second = list(experts_of(small, small.state()))[:2]
    assert not torch.equal(first[0], second[0])
