"""`FP8Linear` and `BF16Linear`: results and gradients against float64, modes, state dicts, and how torch calls them."""

import copy
import io
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import linear
import pytest
import torch
from nn_cases import (
    BOUNDS,
    IN,
    OF_CASTS,
    OPTIONS,
    OUT,
    SHAPES,
    check,
    exact,
    layer,
    matrix,
    of_casts,
    of_separate_calls,
    relative,
    results,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import deep_gemm
from deep_gemm import InvalidInputError
from deep_gemm.nn import BF16Linear, FP8Linear

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_and_gradients_are_near_those_in_float64(name: str, shape: tuple[int, ...]) -> None:
    made, x, dy = layer(name), matrix(*shape), matrix(*shape[:-1], OUT)
    found = results(made, x, dy)
    assert found["y"].dtype == found["dx"].dtype == BF16
    check(found, exact(made, x, dy))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("rows", [16, 200])
def test_results_are_the_products_of_the_casts(name: str, rows: int) -> None:
    """Much nearer than FP8 is to float64: each operand has the blocks that its recipe says."""
    made, x, dy = layer(name), matrix(rows, IN), matrix(rows, OUT)
    check(results(made, x, dy), of_casts(made, x, dy), OF_CASTS)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", ""])
def test_one_call_has_the_bits_of_separate_calls(name: str, shape: tuple[int, ...], bias: bool) -> None:
    made, x, dy = layer(name, bias=bias), matrix(*shape), matrix(*shape[:-1], OUT)
    found, wanted = results(made, x, dy), of_separate_calls(made, x, dy)
    assert all(torch.equal(found[key].reshape(wanted[key].shape), wanted[key]) for key in wanted)
    with torch.no_grad():
        assert torch.equal(made(x), found["y"])
        assert torch.equal(FP8Linear.from_linear(made, mode="inference")(x), found["y"])


@pytest.mark.parametrize("factor", [1e-9, 1e4])
def test_the_size_of_gradients_does_not_matter(factor: float) -> None:
    made, x, dy = layer("1x128"), matrix(64, IN), matrix(64, OUT)
    found, wanted = results(made, x, factor * dy), exact(made, x, factor * dy)
    check(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_results_have_the_dtype_of_x(dtype: torch.dtype) -> None:
    made, x, dy = layer("1x128"), matrix(48, IN, dtype=dtype), matrix(48, OUT)
    found = results(made, x, dy)
    assert found["y"].dtype == found["dx"].dtype == dtype
    check(found, exact(made, x, dy))


MADE: dict[str, Callable[[], Any]] = {
    "fp8": lambda: layer("1x128"),
    "bf16": lambda: BF16Linear(IN, OUT, dtype=BF16),
    "bf16 of float32": lambda: BF16Linear(IN, OUT),
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_autocast_says_the_dtype(made: Callable[[], Any]) -> None:
    module, x, dy = made(), matrix(48, IN, dtype=torch.float32), matrix(48, OUT)
    with torch.autocast("cpu", dtype=BF16):
        found = results(module, x, dy)
    assert found["y"].dtype == BF16
    assert found["dx"].dtype == torch.float32
    assert found["dw"].dtype == module.weight.dtype
    check(found, exact(module, x, dy))


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
@pytest.mark.parametrize("way", ["checkpoint", "reentrant", "deterministic", "expanded", "transposed", "padded"])
def test_the_same_bits_whichever_way_it_is_called(made: Callable[[], Any], way: str) -> None:
    module, x, dy = made(), matrix(48, IN), matrix(48, OUT)
    if way == "expanded":
        dy = dy[:, :1].expand(-1, OUT)
    wanted, run = results(module, x, dy.contiguous()), None
    if way in ("checkpoint", "reentrant"):
        run = lambda x: checkpoint(module, x, use_reentrant=way == "reentrant")  # noqa: E731
    if way == "transposed":
        x, dy = x.t().contiguous().t(), dy.t().contiguous().t()
    if way == "padded":
        x = torch.cat([x, x], dim=1)[:, :IN]
    torch.use_deterministic_algorithms(way == "deterministic")
    try:
        found = results(module, x, dy, run)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, tensor in wanted.items():
        if (way, name) != ("transposed", "db"):  # torch adds in another order
            assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_without_gradients_results_are_the_same(made: Callable[[], Any]) -> None:
    module, x = made(), matrix(48, IN)
    wanted = module(x).detach()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert torch.equal(module(x), wanted)
    module.requires_grad_(False)
    assert torch.equal(module(x), wanted)
    assert not module(x).requires_grad


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_gradients_pass_through_weights_that_take_none(mode: Any) -> None:
    trained, x, dy = layer("1x128"), matrix(48, IN), matrix(48, OUT)
    wanted = results(trained, x, dy)
    module = FP8Linear.from_linear(trained, mode=mode).requires_grad_(False)
    x = x.requires_grad_()
    y = module(x)
    y.backward(dy)
    assert torch.equal(y, wanted["y"])
    assert x.grad is not None
    assert torch.equal(x.grad, wanted["dx"])


@pytest.mark.parametrize("made", [FP8Linear, BF16Linear])
def test_gradients_are_added_to_main_grad(made: Callable[..., Any]) -> None:
    module, x, dy = made(IN, OUT, fuse_wgrad_accumulation=True, dtype=BF16), matrix(48, IN), matrix(48, OUT)
    with pytest.raises(InvalidInputError, match=r"fuse_wgrad_accumulation=True, but there is none\. Set"):
        module(x)
    module.weight.main_grad = torch.zeros(OUT, IN, dtype=BF16)
    with pytest.raises(InvalidInputError, match=r"must be a torch\.float32 tensor"):
        module(x)
    module.weight.main_grad = torch.ones(OUT, IN)
    for _ in range(2):
        module(x).backward(dy)
    assert module.weight.grad is None
    assert relative((module.weight.main_grad - 1) / 2, exact(module, x, dy)["dw"]) < BOUNDS["dw"]


def test_a_stored_layer_has_the_layout_of_deepseek() -> None:
    stored = FP8Linear.from_linear(torch.nn.Linear(IN, OUT, dtype=BF16), mode="inference")
    state = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.state_dict().items()}
    assert state == {
        "weight": (E4M3, (OUT, IN)),
        "weight_scale_inv": (torch.float32, (3, 2)),
        "bias": (BF16, (OUT,)),
    }
    assert not any(parameter.requires_grad for name, parameter in stored.named_parameters() if name != "bias")


def bits(module: torch.nn.Module) -> list[Tensor]:
    return [tensor.view(torch.uint8) for tensor in module.state_dict().values()]


@pytest.mark.parametrize("change", ["bfloat16", "float", "double", "cpu", "pickled", "copied"])
def test_a_stored_weight_keeps_its_bits(change: str) -> None:
    stored = FP8Linear(IN, OUT, False, mode="inference")
    stored.load_state_dict({"weight": torch.randn(OUT, IN)})
    wanted = [tensor.clone() for tensor in bits(stored)]
    if change == "pickled":
        file = io.BytesIO()
        torch.save(stored, file)
        file.seek(0)
        changed = torch.load(file, weights_only=False)
    else:
        changed = copy.deepcopy(stored) if change == "copied" else getattr(stored, change)()
    assert all(map(torch.equal, bits(changed), wanted))
    assert changed(matrix(2, IN)).isfinite().all()


def test_each_mode_loads_what_the_other_saves() -> None:
    linear = torch.nn.Linear(IN, OUT)
    stored = FP8Linear.from_linear(linear, mode="inference")
    loaded = FP8Linear(IN, OUT, mode="inference")
    loaded.load_state_dict(linear.state_dict())
    assert all(map(torch.equal, bits(loaded), bits(stored)))

    trained = FP8Linear(IN, OUT)
    trained.load_state_dict({**stored.state_dict(), "weight_scale_inv": stored.weight_scale_inv.double()})
    assert 0.01 < relative(trained.weight, linear.weight) < 0.04
    again = FP8Linear.from_linear(trained, mode="inference")
    assert all(map(torch.equal, bits(again), bits(stored))), "values that are exact in FP8 are cast to themselves"

    on_meta = FP8Linear(IN, OUT, mode="inference", device="meta")
    on_meta.load_state_dict(stored.state_dict(), assign=True)
    assert all(map(torch.equal, bits(on_meta), bits(stored)))
    with pytest.raises(InvalidInputError, match=r"weight is E4M3, and the scales .* are not beside it"):
        loaded.load_state_dict({"weight": stored.weight, "bias": stored.bias})
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        loaded.load_state_dict(torch.nn.Linear(IN, OUT + 16).state_dict())


def test_parameters_of_training_are_those_of_the_layer_before() -> None:
    linear = torch.nn.Linear(IN, OUT).eval()
    for made in (FP8Linear.from_linear(linear), BF16Linear.from_linear(linear)):
        assert made.weight is linear.weight
        assert made.bias is linear.bias
        assert not made.training
        made.load_state_dict(linear.state_dict())
    assert FP8Linear(IN, OUT, dtype=BF16).weight.std() > 0.01


def nested(width: int) -> Tensor:
    return torch.nested.nested_tensor([torch.zeros(2, width), torch.zeros(3, width)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: FP8Linear(100, 64), "in_features must be a multiple of 16, but it is 100."),
        (lambda: FP8Linear(64, 0), "out_features must be a multiple of 16, but it is 0."),
        (lambda: FP8Linear(64, 64.0), "out_features must be a multiple of 16, but it is 64.0."),  # type: ignore[arg-type]
        (lambda: BF16Linear(0, 16), "in_features must be a whole number from 1, but it is 0."),
        (lambda: BF16Linear(16, -1), "out_features must be a whole number from 1, but it is -1."),
        (lambda: FP8Linear(64, 64, dtype=torch.float64), "weights must be torch.float32, torch.bfloat16 or"),
        (lambda: FP8Linear(64, 64, mode="fast"), "mode must be 'training' or 'inference', but it is 'fast'."),  # type: ignore[arg-type]
        (lambda: FP8Linear(64, 64, weight_gradient="2d"), "weight_gradient must be '1x128' or 'mixed', but"),  # type: ignore[arg-type]
        (lambda: FP8Linear(64, 64, recast="never"), "recast must be 'always' or 'when changed', but"),  # type: ignore[arg-type]
        (lambda: FP8Linear.from_linear(torch.nn.ReLU()), "linear must be a torch.nn.Linear or an FP8Linear, but it is"),
        (lambda: FP8Linear(64, 64)(torch.zeros(2, 32)), r"x must be a tensor \(..., 64\), but its shape is \(2, 32\)."),
        (lambda: FP8Linear(64, 64)([1.0]), r"x must be a tensor \(..., 64\), but it is of type list."),
        (lambda: FP8Linear(64, 64)(nested(64)), "but it is a nested tensor."),
        (lambda: BF16Linear(64, 64)(torch.zeros(2, 64)), "x must be torch.bfloat16 or torch.float16, but it is torch."),
        (lambda: FP8Linear(64, 64)(torch.zeros(2, 64).double()), "x must be one of torch.bfloat16"),
        (lambda: FP8Linear(64, 64, bias=False).double()(torch.zeros(2, 64)), "weight must be one of torch.bfloat16"),
        (lambda: FP8Linear(64, 64, mode="inference").requires_grad_()(torch.zeros(2, 64)), "weight requires grad, but"),
        (lambda: FP8Linear(64, 64).load_state_dict({"weight": torch.zeros(64, 64).to(E4M3)}), "are not beside it"),
    ],
)
def test_what_is_wrong_is_said(wrong: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        wrong()


def test_the_package_alone_imports_no_modules() -> None:
    code = (
        "import sys, torch; before = {*sys.modules}; import deep_gemm; deep_gemm.fp8_gemm_nt; "
        "print('deep_gemm.nn' in sys.modules); print(deep_gemm.nn.FP8Linear.__name__, "
        "*sorted({'safetensors', 'torch._dynamo', 'triton', 'rich', 'tqdm', 'yaml'} & ({*sys.modules} - before)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines() == ["False", "FP8Linear"]


def test_steps_of_linear_layers_run_and_their_table_is_short() -> None:
    calls = linear.steps((32, 64, 48), "cpu", compiled=False)
    for call in calls.values():
        call()
    assert list(calls) == list(linear.LAYERS)
    found = dict.fromkeys(calls, (100.0, 10.0)) | {"FP8Linear": (80.0, 10.0)}
    lines = linear.table(linear.SIZES[0], found).splitlines()
    assert lines[0] == "M=4096 N=7168 K=2048: forward and backward, at least 1.25 is wanted"
    assert [line.split()[-2] for line in lines if line.startswith("FP8Linear  ")] == ["1.25"]
    assert len(lines) == 2 + len(calls)
    assert list(linear.steps((32, 64, 48), "cpu", False, [linear.BASE, "FP8Linear"])) == [linear.BASE, "FP8Linear"]
    for name, call in linear.stacks((32, 64, 48), "cpu").items():
        if ", compiled" not in name:
            call()
        assert linear.layers_of(name) == 8
    times = dict.fromkeys((linear.BASE, f"{linear.BASE}, compiled"), (100.0, 10.0))
    times |= {"FP8Linear": (80.0, 10.0), "FP8Linear, compiled": (50.0, 20.0)}
    assert linear.table((1, 2, 3), times).splitlines()[-1].split()[2:] == ["50.0", "2.00", "20.0", "1.60"]


@pytest.mark.parametrize("made", [*MADE.values(), lambda: deep_gemm.nn.MoE(IN, 64, 4, 2)], ids=[*MADE, "mixture"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_transform_is_refused_in_words(made: Callable[[], Any], grad: bool) -> None:
    module, x = made(), matrix(3, 16, IN)
    with torch.set_grad_enabled(grad), pytest.raises(InvalidInputError, match=r"torch.func.vmap.*may have any rank"):
        torch.func.vmap(module)(x)
    with torch.set_grad_enabled(grad), pytest.raises(InvalidInputError, match=r"torch.func.vmap.*may have any rank"):
        torch.compile(torch.func.grad(lambda x: module(x).float().sum()), backend="eager")(x)
    with torch.set_grad_enabled(grad), forward_ad.dual_level(), pytest.raises(InvalidInputError, match="transform of"):
        module(forward_ad.make_dual(x, x))
    assert module(x).shape[:2] == (3, 16)


@pytest.mark.parametrize("made", [FP8Linear, BF16Linear, lambda *sizes, **on: deep_gemm.nn.MoE(IN, 64, 4, 2, **on)])
@pytest.mark.parametrize("grad", [False, True])
def test_a_meta_tensor_is_refused_in_words(made: Callable[..., Any], grad: bool) -> None:
    module, x = made(IN, OUT, device="meta"), matrix(16, IN).to("meta")
    with torch.set_grad_enabled(grad), pytest.raises(InvalidInputError, match=r"x is a meta tensor.*to_empty\(\)"):
        module(x)
    with FakeTensorMode():
        assert made(IN, OUT, dtype=BF16)(torch.empty(16, IN, dtype=BF16)).shape[0] == 16


class Tagged(Tensor):
    """A subclass that only has a name of its own."""


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_a_subclass_of_tensors_is_taken(made: Callable[[], Any]) -> None:
    module, x = made(), matrix(16, IN)
    tagged: Any = x.as_subclass(Tagged).requires_grad_()
    y = module(tagged)
    assert torch.equal(y.as_subclass(Tensor), module(x))
    y.sum().backward()
    assert tagged.grad is not None


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_a_bias_alone_takes_a_gradient(mode: Any) -> None:
    """Weights are frozen, as beside adapters, and x takes no gradient."""
    made = FP8Linear.from_linear(torch.nn.Linear(IN, OUT), mode=mode)
    made.weight.requires_grad_(False)
    dy = matrix(48, OUT)
    made(matrix(48, IN)).backward(dy)
    assert made.bias is not None
    assert made.bias.grad is not None
    torch.testing.assert_close(made.bias.grad, dy.float().sum(0))
