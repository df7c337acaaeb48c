"""`FP8GroupedLinear`, `MoE` and `Routing`."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nn_cases import BOUNDS, EXPERT_BOUNDS, IN, OUT, check, experts_exact, experts_results, matrix, relative
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import deep_gemm
from deep_gemm import InvalidInputError
from deep_gemm.nn import BF16Linear, FP8GroupedLinear, FP8Linear, MoE, Routing, products

EXPERTS = 5


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def mixture(**options: Any) -> MoE:
    return MoE(IN, 48, EXPERTS, 2, **options)


def send_to(layer: Any, experts: list[int]) -> None:
    """Send every token to these experts, with the router's weights."""

    def route(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.tensor(experts).expand(len(x), -1)
        return layer.router(x.float()).softmax(1).gather(1, chosen), chosen

    layer.route = route


@pytest.mark.parametrize("recipe", ["1x128", "mixed"])
@pytest.mark.parametrize(("tokens", "chosen"), [(37, None), (37, [3]), (140, [0, 4]), (1, [4, 2, 1])], ids=str)
def test_results_and_gradients_are_near_those_in_float64(tokens: int, chosen: list[int] | None, recipe: str) -> None:
    """By the router, and with experts that get every token or none."""
    layer, x, dy = mixture(weight_gradient=recipe), matrix(tokens, IN), matrix(tokens, IN)
    if chosen is not None:
        send_to(layer, chosen)
    check(experts_results(layer, x, dy), experts_exact(layer, x, dy), EXPERT_BOUNDS)


@pytest.mark.parametrize("shape", [(0, IN), (IN,), (2, 3, IN)], ids=str)
def test_inputs_have_any_rank(shape: tuple[int, ...]) -> None:
    layer, x, dy = mixture(), matrix(*shape), matrix(*shape)
    found = experts_results(layer, x, dy)
    flat = experts_results(layer, x.view(-1, IN), dy.view(-1, IN))
    assert found["y"].shape == found["dx"].shape == shape
    assert all(torch.equal(found[name].view(flat[name].shape), flat[name]) for name in flat)
    if not x.numel():
        assert not any(found[name].any() for name in ("d router", "d gate_up", "d down"))


def test_without_gradients_and_stored_results_are_the_same() -> None:
    layer, x = mixture(dtype=torch.bfloat16), matrix(37, IN)
    wanted = layer(x).detach()
    with torch.inference_mode():
        assert torch.equal(layer(x), wanted)
    stored = mixture(mode="inference")
    stored.load_state_dict(layer.state_dict())
    assert stored.gate_up.weight.dtype == torch.float8_e4m3fn
    assert stored.gate_up.weight_scale_inv.shape == (EXPERTS, 1, 2)
    assert torch.equal(stored(x), wanted)
    again = mixture(dtype=torch.bfloat16)
    again.load_state_dict(stored.state_dict())
    assert torch.equal(again(x), wanted)
    with pytest.raises(InvalidInputError, match="gradients end here"):
        stored(x.requires_grad_())


@pytest.mark.parametrize("activation", ["swiglu", "swigluoai"])
def test_activations_have_a_limit_without_gradients(activation: Any) -> None:
    """DeepSeek-V4's experts have one, in FP8 too."""
    state, x = mixture().state_dict(), matrix(37, IN) * 8
    layers = [mixture(mode="inference", activation=activation, limit=limit) for limit in (0.5, 1e9)]
    for layer in layers:
        layer.load_state_dict(state)
    layer, free = layers
    weights, chosen = layer.route(x)
    routing = Routing.from_choices(chosen, EXPERTS)
    both = layer.hidden(x, routing).float()
    gate, up = both.chunk(2, 1) if activation == "swiglu" else (both[:, ::2], both[:, 1::2])
    gate, up = gate.clamp(max=0.5), up.clamp(-0.5, 0.5)
    h = gate * torch.sigmoid(gate) * up if activation == "swiglu" else gate * torch.sigmoid(1.702 * gate) * (up + 1)
    out = layer.down.product(layer.down.operand_of(h), routing)
    wanted = (routing.choices(out) * weights[..., None]).sum(1)
    assert relative(layer(x), wanted) < 0.01
    assert relative(free(x), wanted) > 0.1
    with pytest.raises(InvalidInputError, match="activation and limit are for mode='inference'"):
        mixture(activation=activation, limit=0.5)


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_mixture_may_be_cast(dtype: torch.dtype, mode: Any) -> None:
    layer, x = mixture(mode=mode), matrix(37, IN)
    layer.load_state_dict(mixture().state_dict())
    with torch.no_grad():
        layer.router.weight.copy_(torch.randint(-4, 5, layer.router.weight.shape))  # scores are apart, and exact
    wanted = layer(x).detach()
    assert relative(layer.to(dtype)(x), wanted) < 0.05, "a token that goes elsewhere costs 0.1"


@pytest.mark.parametrize("part", ["gate_up", "down"])
def test_one_of_the_layers_may_be_frozen(part: str) -> None:
    layer, x, dy = mixture(), matrix(37, IN), matrix(37, IN)
    wanted = experts_results(layer, x, dy)
    frozen = mixture(fuse_wgrad_accumulation=True)
    frozen.load_state_dict(layer.state_dict())
    frozen.get_submodule(part).requires_grad_(False)
    for weight in (frozen.gate_up.weight, frozen.down.weight):
        if weight.requires_grad:
            weight.main_grad = torch.zeros_like(weight)
    x = x.requires_grad_()
    frozen(x).backward(dy)
    assert x.grad is not None
    assert torch.equal(x.grad, wanted["dx"])
    other = "down" if part == "gate_up" else "gate_up"
    torch.testing.assert_close(frozen.get_submodule(other).weight.main_grad, wanted[f"d {other}"])


def test_repeats_have_the_same_bits_and_gradients_are_added_to_main_grad() -> None:
    layer, x, dy = mixture(), matrix(37, IN), matrix(37, IN)
    once, again = experts_results(layer, x, dy), experts_results(layer, x, dy)
    assert all(torch.equal(once[name], again[name]) for name in once)
    fused = mixture(fuse_wgrad_accumulation=True, recast="when changed")
    fused.load_state_dict(layer.state_dict())
    with pytest.raises(InvalidInputError, match="there is none"):
        fused(x)
    weights: list[Any] = [fused.gate_up.weight, fused.down.weight]
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight)
    for _ in range(2):
        fused(x).backward(dy)
    for weight, name in zip(weights, ("d gate_up", "d down"), strict=True):
        assert weight.grad is None
        torch.testing.assert_close(weight.main_grad, 2 * once[name])


def grouped_results(layer: Any, x: Tensor, dy: Tensor, run: Callable[..., Tensor] | None = None) -> Any:
    """Results and gradients of a grouped layer, whose rows are routed in turn."""
    routing = Routing.from_choices(torch.arange(len(x))[:, None] % EXPERTS, EXPERTS)
    layer.zero_grad()
    rows = routing.spread(x).requires_grad_()
    y = (run or layer)(rows, routing)
    y.backward(routing.spread(dy).to(y.dtype))
    return {"y": y.detach(), "dx": rows.grad, "dw": layer.weight.grad.clone()}


LAYERS: dict[str, tuple[Callable[[], Any], Any, int]] = {
    "grouped": (lambda: FP8GroupedLinear(EXPERTS, IN, OUT), grouped_results, OUT),
    "mixture": (mixture, experts_results, IN),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("way", ["checkpoint", "reentrant", "deterministic"])
def test_the_same_bits_whichever_way_it_is_called(name: str, way: str) -> None:
    make, results, width = LAYERS[name]
    layer, x, dy = make(), matrix(37, IN), matrix(37, width)
    wanted = results(layer, x, dy)
    again = functools.partial(checkpoint, layer, use_reentrant=way == "reentrant")
    torch.use_deterministic_algorithms(way == "deterministic")
    try:
        found = results(layer, x, dy, None if way == "deterministic" else again)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("name", LAYERS)
def test_autocast_says_the_dtype(name: str) -> None:
    make, results, width = LAYERS[name]
    layer, x, dy = make(), matrix(37, IN), matrix(37, width)
    wanted = results(layer, x, dy)
    found = results(layer, x.float(), dy, torch.autocast("cpu", dtype=torch.bfloat16)(layer.__call__))
    assert found["y"].dtype == torch.bfloat16
    assert found["dx"].dtype == torch.float32
    assert all(torch.equal(found[key].to(wanted[key].dtype), wanted[key]) for key in wanted if key != "dx")
    torch.testing.assert_close(found["dx"].bfloat16(), wanted["dx"])
    if name == "mixture":
        with torch.autocast("cpu", dtype=torch.float16), pytest.raises(InvalidInputError, match="bfloat16"):
            layer(x.float())


def test_the_mixed_recipe_changes_gradients_of_weights_alone() -> None:
    layers = {recipe: mixture(weight_gradient=recipe) for recipe in ("1x128", "mixed")}
    layers["mixed"].load_state_dict(layers["1x128"].state_dict())
    x, dy = matrix(37, IN), matrix(37, IN)
    found = {recipe: experts_results(layer, x, dy) for recipe, layer in layers.items()}
    different = [name for name, tensor in found["mixed"].items() if not torch.equal(tensor, found["1x128"][name])]
    assert different == ["d gate_up", "d down"]


def test_a_token_does_not_depend_on_the_others() -> None:
    layer, x = mixture(), matrix(37, IN).mul(8).round().div(8)
    with torch.no_grad():
        layer.router.weight.copy_(torch.randint(-4, 5, layer.router.weight.shape))  # scores are exact, in any order
    assert torch.equal(layer(x)[5:9], layer(x[5:9]))


@pytest.mark.parametrize("recipe", ["1x128", "mixed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_groups_of_rows_have_layers_of_their_own(dtype: torch.dtype, recipe: Any) -> None:
    layer = FP8GroupedLinear(EXPERTS, IN, OUT, weight_gradient=recipe)
    routing = Routing.from_choices(torch.randint(EXPERTS, (90, 1)), EXPERTS)
    x = routing.spread(matrix(90, IN, dtype=dtype)).requires_grad_()
    dy = routing.spread(matrix(90, OUT, dtype=dtype))
    y = layer(x, routing)
    y.backward(dy)
    assert y.dtype == dtype
    dw = layer.weight.grad
    assert x.grad is not None
    assert dw is not None
    for e in range(EXPERTS):
        own, w = routing.labels == e, layer.weight[e].detach().double()
        found = {"y": y[own], "dx": x.grad[own], "dw": dw[e]}
        exact = x[own].double() @ w.t(), dy[own].double() @ w, dy[own].double().t() @ x[own].double()
        check(found, dict(zip(found, exact, strict=True)))
    assert not y[routing.labels < 0].any()
    with torch.no_grad():
        assert torch.equal(layer(x, routing), y)
    assert products.FP8Product.__name__ in str(y.grad_fn)


DROPPED = st.sampled_from([-1, EXPERTS])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.permutations(range(EXPERTS)), max_size=300), st.integers(1, EXPERTS), st.data())
def test_routing_is_as_kernels_need_it(all_chosen: list[list[int]], top_k: int, data: st.DataObject) -> None:
    """Also of choices that are dropped, which take no row."""
    alignment = data.draw(st.sampled_from([16, 128, 256]))
    chosen = torch.tensor(all_chosen, dtype=torch.int64).view(-1, EXPERTS)[:, :top_k]
    share = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    dropped = torch.rand(chosen.shape, generator=torch.Generator().manual_seed(len(chosen))) < share
    chosen = torch.where(dropped, data.draw(DROPPED), chosen)
    before = deep_gemm.get_mk_alignment_for_contiguous_layout()
    deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
    try:
        routing = Routing.from_choices(chosen, EXPERTS)
    finally:
        deep_gemm.set_mk_alignment_for_contiguous_layout(before)
    sizes, capacity = routing.sizes.tolist(), len(routing.labels)
    assert capacity % 128 == 0
    assert sum(sizes) <= capacity
    start = 0
    for expert, size in enumerate(sizes):
        assert start % max(alignment, 128) == 0
        tokens = (chosen == expert).any(1).nonzero().flatten().tolist()
        assert size == deep_gemm.align(len(tokens), max(alignment, 128))
        end = start + len(tokens)
        assert routing.labels[start : start + size].tolist() == [expert] * len(tokens) + [-1] * (size - len(tokens))
        assert routing.tokens[start:end].tolist() == tokens, "in the order of tokens"
        assert (routing.tokens[end : start + size] == len(chosen)).all()
        start += size
    assert (routing.labels[start:] == -1).all()
    assert (routing.tokens[start:] == len(chosen)).all()
    own = torch.arange(len(chosen))[:, None].expand(-1, top_k)
    assert torch.equal(routing.tokens[routing.rows], own.masked_fill(dropped, len(chosen)))
    assert torch.equal(routing.labels[routing.rows].long(), chosen.masked_fill(dropped, -1))
    if len(chosen):
        x = torch.randn(len(chosen), 3)
        picked = routing.choices(routing.spread(x))
        assert torch.equal(picked, x[:, None].expand(-1, top_k, -1) * ~dropped[..., None])


@pytest.mark.parametrize("sentinel", [-1, EXPERTS])
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_dropped_choices_add_nothing(mode: Any, sentinel: int) -> None:
    """Forward and backward, as if the token had not made them."""
    layer, x, dy = mixture(), matrix(140, IN), matrix(140, IN)
    chosen = torch.rand(140, EXPERTS).argsort(1)[:, :2]
    chosen[torch.rand(140, 2) < 0.4] = sentinel
    chosen[:3] = sentinel
    given: Any = layer
    given.route = lambda x: (layer.router(x.float()).softmax(1).gather(1, chosen.clamp(0, EXPERTS - 1)), chosen)
    found = experts_results(layer, x, dy)
    check(found, experts_exact(layer, x, dy), EXPERT_BOUNDS)
    assert not found["y"][:3].any()
    assert not found["dx"][:3].any()
    if mode == "inference":
        stored: Any = mixture(mode=mode)
        stored.load_state_dict(layer.state_dict())
        stored.route = given.route
        assert torch.equal(stored(x), found["y"])


def test_routing_takes_the_rows_that_it_was_made_for() -> None:
    """On a GPU a row that is not there ends in an assertion of a kernel, after which no call works."""
    routing = Routing.from_choices(torch.zeros(37, 2, dtype=torch.int64), EXPERTS)
    for rows in (0, 36, 38):
        with pytest.raises(InvalidInputError, match=rf"x must have 37 rows \(tokens\), .* but it has {rows}[.]"):
            routing.spread(torch.zeros(rows, 4))
        with pytest.raises(InvalidInputError, match=rf"x must have 768 rows \(capacity\), .* but it has {rows}[.]"):
            routing.choices(torch.zeros(rows, 4))
    with pytest.raises(InvalidInputError, match="chosen is a nested tensor"):
        Routing.from_choices(torch.nested.nested_tensor([torch.zeros(2, 2, dtype=torch.int64)]), EXPERTS)


def test_routing_asks_the_host_for_no_value() -> None:
    """A fake tensor has none: an operation whose result depends on one fails."""
    with FakeTensorMode():
        routing = Routing.from_choices(torch.zeros(37, 2, dtype=torch.int64), EXPERTS)
    assert routing.labels.shape == (128 * 6,)


def short(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, transposed: bool = False) -> Tensor:
    """A tensor whose storage was cut, as FSDP cuts those of weights."""
    x = torch.zeros(*shape[::-1], dtype=dtype).t() if transposed else torch.zeros(shape, dtype=dtype)
    x.untyped_storage().resize_(8)
    return x


ROUTING = Routing.from_choices(torch.arange(4)[:, None], 4)
READERS: dict[str, Callable[[], Callable[[Any], Any]]] = {
    "moe": lambda: MoE(64, 32, 4, 2), "grouped": lambda: lambda x: FP8GroupedLinear(4, 64, 32)(x, ROUTING),
    "fp8": lambda: FP8Linear(64, 32), "fp8 stored": lambda: FP8Linear(64, 32, mode="inference"),
    "bf16": lambda: BF16Linear(64, 32, dtype=torch.bfloat16), "spread": lambda: ROUTING.spread,
    "choices": lambda: ROUTING.choices,
}  # fmt: skip
UNREAD: dict[str, tuple[Callable[[], Any], str]] = {
    "storage": (lambda: short((512, 64)), "has no memory: it needs 65536 bytes"),
    "transposed": (lambda: short((512, 64), transposed=True), "has no memory"),
    "to be cast": (lambda: short((512, 64), torch.float32), "has no memory"),
    "sparse": (lambda: torch.zeros(512, 64).bfloat16().to_sparse(), "has the layout torch.sparse_coo. Pass a dense"),
}


@pytest.mark.parametrize("what", UNREAD)
@pytest.mark.parametrize("reader", READERS)
def test_torch_reads_nothing_that_was_not_checked(reader: str, what: str) -> None:
    """It read past the end of memory."""
    make, message = UNREAD[what]
    run, x = READERS[reader](), make()
    for autocast in (True, False):
        if what == "to be cast" and not autocast:
            continue  # of a dtype that some layers refuse
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), pytest.raises(InvalidInputError) as said:
            run(x)
        assert message in str(said.value)


@pytest.mark.parametrize("reader", ["moe", "grouped", "fp8", "fp8 stored", "bf16"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_autocast_casts_floating_point_alone(reader: str, dtype: torch.dtype) -> None:
    run = READERS[reader]()
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(InvalidInputError, match=r"x must be .*torch\."):
        run(torch.zeros(512, 64).to(dtype))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: MoE(64, 32, 4, 5), "top_k must be from 1 to 4, the number of experts, but it is 5."),
        (lambda: MoE(64, 32, 4, 0), "top_k must be a whole number from 1, but it is 0."),
        (lambda: MoE(64, 32, "4", 1), "experts must be a whole number from 1, but it is '4'."),  # type: ignore[arg-type]
        (lambda: MoE(64, 20, 4, 1), "out_features must be a multiple of 16, but it is 40."),
        (
            lambda: Routing.from_choices(torch.tensor([0, 1]), 4),
            r"chosen must be torch.int64 \(tokens, top_k\), but it",
        ),
        (lambda: Routing.from_choices(torch.zeros(2, 1), 4), r"but it is a torch.float32 tensor \(2, 1\)."),
        (lambda: Routing.from_choices([[0, 1]], 4), r"chosen must be torch.int64 .*, but it is of type list"),  # type: ignore[arg-type]
        (lambda: Routing.from_choices(torch.zeros(2, 1).long(), 0), "experts must be a whole number from 1, but it is"),
        (lambda: Routing.from_choices(torch.tensor([[0, 1], [4, -2]]), 4), r"chosen\[1, 1\] is -2, but experts are"),
        (
            lambda: Routing.from_choices(torch.tensor([[-1, 5]]), 4),
            r"chosen\[0, 1\] is 5, .* and -1 or 4 drops a choice",
        ),
        (
            lambda: FP8GroupedLinear(2, 64, 64)(torch.zeros(2, 64), None),  # type: ignore[arg-type]
            "routing must be a deep_gemm.nn.Routing, but it is of type NoneType",
        ),
        (
            lambda: mixture()(torch.zeros(2, IN)),
            r"x must be a torch.bfloat16 tensor \(..., 144\), but it is a torch.fl",
        ),
        (
            lambda: FP8GroupedLinear(2, 64, 64)(torch.zeros(2, 32), None),
            r"x must be a tensor \(rows, 64\), but its sha",
        ),  # type: ignore[arg-type]
    ],
)
def test_what_is_wrong_is_said(wrong: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        wrong()


def test_bounds_are_not_loose() -> None:
    """An error of one part in ten is seen."""
    x = matrix(64, IN)
    assert relative(1.1 * x, x) > BOUNDS["y"]
