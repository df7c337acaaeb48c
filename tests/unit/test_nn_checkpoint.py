"""Weights and their scales, as checkpoints of several tools store them, in layers of both modes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nn_cases import matrix, relative
from safetensors.torch import save, save_file
from torch import Tensor, nn

import deep_gemm
from deep_gemm import InvalidInputError
from deep_gemm.nn import BF16Linear, FP8GroupedLinear, FP8Linear, load_checkpoint, stored

E4M3, N, K, EXPERTS = torch.float8_e4m3fn, 272, 320, 3
MODES, DEVICES = ("training", "inference"), ("cpu", "meta")
State = dict[str, Tensor]
Cast = tuple[Tensor, Tensor, Tensor]
"""Values, scales, and what both stand for."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def cast(rows: int, columns: int) -> Cast:
    """Weights with a scale for each block of so many rows and columns. The blocks differ much."""
    w = torch.randn(N, K) * torch.logspace(-3, 0, N)[:, None]
    padded = torch.zeros(-(-N // rows) * rows, -(-K // columns) * columns)
    padded[:N, :K] = w
    blocks = padded.view(padded.shape[0] // rows, rows, -1, columns)
    scales = torch.exp2((blocks.abs().amax((1, 3)) / 448).log2().ceil())  # powers of two: every dtype holds them
    spread = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:N, :K]
    values = (w / spread).to(E4M3)
    return values, scales, values.float() * spread


def blocks(size: int = 128) -> Cast:
    return cast(size, size)


def rows() -> Cast:
    return cast(1, K)


def whole() -> Cast:
    return cast(N, K)


STORED: dict[str, tuple[Callable[[], Cast], str, torch.dtype, tuple[int, ...], bool]] = {
    "deepseek": (blocks, "weight_scale_inv", torch.float32, (3, 3), True),
    "deepseek-v4": (blocks, "scale", torch.float8_e8m0fnu, (3, 3), True),
    "compressed-tensors, blocks": (blocks, "weight_scale", torch.bfloat16, (3, 3), True),
    "modelopt, blocks": (blocks, "weight_scale", torch.float32, (3, 1, 3, 1), True),
    "modelopt": (whole, "weight_scale", torch.float32, (), True),
    "llm-compressor": (whole, "weight_scale", torch.bfloat16, (1,), True),
    "a matrix of one": (whole, "scale_inv", torch.float64, (1, 1), True),
    "larger blocks": (lambda: blocks(256), "weight_scale_inv", torch.float32, (2, 2), True),
    "compressed-tensors": (rows, "weight_scale", torch.bfloat16, (N, 1), False),
    "fbgemm": (rows, "weight_scale", torch.float16, (N,), False),
    "smaller blocks": (lambda: blocks(64), "weight_scale_inv", torch.float32, (5, 5), False),
}
"""How tools name and shape scales; and whether values keep their bits, since blocks of 128 can have these scales."""


def stored_as(name: str, experts: bool) -> tuple[State, Tensor]:
    """Tensors of a layer, and what its weight is."""
    make, own, dtype, shape, _ = STORED[name]
    values, scales, wanted = make()
    scales = scales.reshape(shape).to(dtype)
    state = {"weight": values, own: scales}
    if name.startswith("modelopt"):
        state["input_scale"] = torch.tensor(0.1)
    if not experts:
        return state, wanted
    bits = torch.stack([values.view(torch.uint8)] * EXPERTS).view(E4M3)
    factors = torch.tensor([1.0, 2.0, 4.0]).view(EXPERTS, *(1,) * len(shape))
    state |= {"weight": bits, own: (scales.float() * factors).to(dtype)}
    return state, wanted * factors.view(EXPERTS, 1, 1)


def layer(mode: Any, device: str = "cpu", experts: bool = False) -> Any:
    options: Any = {"mode": mode, "device": device, "dtype": torch.float32}
    return FP8GroupedLinear(EXPERTS, K, N, **options) if experts else FP8Linear(K, N, bias=False, **options)


def kinds(mode: str) -> list[Any]:
    """Layers that load a weight in this mode."""
    return [layer(mode), *([BF16Linear(K, N, bias=False)] if mode == "training" else [])]


def loaded(made: Any, state: State, way: str, path: Path, **options: Any) -> None:
    if way == "checkpoint":
        save_file(state, path / "model.safetensors")
        load_checkpoint(made, path, **options)
    else:
        made.load_state_dict({name: x for name, x in state.items() if name != "input_scale"}, **options)


@pytest.mark.parametrize("experts", [False, True], ids=["", "experts"])
@pytest.mark.parametrize(("way", "device"), [("checkpoint", "meta"), ("state", "cpu")])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", STORED)
def test_values_are_multiplied_by_their_scales(
    name: str, mode: str, way: str, device: str, experts: bool, tmp_path: Path
) -> None:
    state, wanted = stored_as(name, experts)
    made = layer(mode, device, experts)
    loaded(made, state, way, tmp_path)
    if mode == "training" and not experts:
        plain = BF16Linear(K, N, bias=False, device=device, dtype=torch.float32)
        loaded(plain, state, way, tmp_path)
        assert torch.equal(plain.weight, wanted)
    keeps = STORED[name][-1]
    if mode == "training":
        assert torch.equal(made.weight, wanted)
        return
    assert relative(stored.plain(made.weight, made.weight_scale_inv, torch.float32), wanted) <= (0 if keeps else 0.03)
    assert not keeps or torch.equal(made.weight.view(torch.uint8), state["weight"].view(torch.uint8))
    assert made.weight_scale_inv.dtype == torch.float32


def e4m3(*shape: int) -> Tensor:
    return torch.randn(*shape).to(E4M3)


SCALES = {"weight_scale_inv": torch.ones(3, 3)}
REFUSED: dict[str, tuple[State, str]] = {
    **{f"{dtype} with scales": ({"weight": torch.ones(N, K).to(dtype), **SCALES}, rf"weight is {said}, and has scales")
       for dtype, said in ((torch.int8, "I8"), (torch.float8_e5m2, "F8_E5M2"), (torch.bfloat16, "BF16"),
                           (torch.float8_e4m3fnuz, "F8_E4M3FNUZ"), (torch.float8_e5m2fnuz, "F8_E5M2FNUZ"))},
    "integers": ({"weight": torch.ones(N, K, dtype=torch.int8)}, "weight is I8. Layers load E4M3 with scales, or"),
    "values alone": ({"weight": e4m3(N, K)}, "weight is E4M3, and the scales .* are not beside it"),
    "a name that is not known": ({"weight": e4m3(N, K), "qscale_weight": torch.ones(1)}, "weight .* are not beside"),
    **{f"{name} alone": ({name: torch.ones(3, 3)}, f"{name} are scales, and their values, .*weight, are not there")
       for name in ("weight_scale_inv", "weight_scale", "scale")},
    "two scales": ({"weight": e4m3(N, K), "scale": torch.ones(3, 3), "scale_inv": torch.ones(3, 3)},
                   "weight has several scales, scale and scale_inv, and by which"),
    "scales of bytes": ({"weight": e4m3(N, K), "scale": torch.ones(3, 3, dtype=torch.uint8)}, "scale must be .*is U8"),
    "another shape": ({"weight": e4m3(N, K), "weight_scale": torch.ones(N, 3)}, r"weight_scale .* shape is \(272, 3\)"),
    "transposed blocks": ({"weight": e4m3(N, K), "weight_scale": torch.ones(1, 3, 1, 3)}, "weight_scale .* shape is"),
}  # fmt: skip


@pytest.mark.parametrize("way", ["checkpoint", "state"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", REFUSED)
def test_a_weight_that_would_be_other_numbers_is_refused_by_name(
    case: str, mode: str, way: str, tmp_path: Path
) -> None:
    """They were copied as plain numbers, or put beside the scales of other values."""
    state, message = REFUSED[case]
    for made in kinds(mode):
        model = nn.ModuleDict({"up": made})
        before = {name: x.clone() for name, x in model.state_dict().items()}
        with pytest.raises(InvalidInputError, match=rf"up\.{message}"):
            loaded(model, {f"up.{name}": x for name, x in state.items()}, way, tmp_path, strict=False)
        assert all(torch.equal(x.float(), before[name].float()) for name, x in model.state_dict().items())


@pytest.mark.parametrize(
    ("module", "advice"),
    [(nn.Linear(K, N, bias=False), "with a filter that takes this layer"), (nn.Embedding(N, K), "Dequantise it first")],
    ids=["linear", "embedding"],
)
@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2, torch.int8, torch.uint8])
def test_other_modules_take_no_quantised_values(module: Any, advice: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save_file({"head.weight": torch.ones(N, K).to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidInputError, match=rf"head\.weight of .*{advice}"):
        load_checkpoint(nn.ModuleDict({"head": module}), tmp_path, strict=False)


def test_a_module_of_another_library_takes_what_it_holds(tmp_path: Path) -> None:
    module = nn.Module()
    module.values = nn.Parameter(e4m3(4, 4), requires_grad=False)
    module.register_buffer("count", torch.zeros((), dtype=torch.int64))
    wanted = e4m3(4, 4)
    save_file({"values": wanted, "count": torch.tensor(7)}, tmp_path / "model.safetensors")
    assert load_checkpoint(module, tmp_path) == ((), ())
    assert torch.equal(module.values.float(), wanted.float())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
def test_tensors_of_a_file_may_begin_anywhere(dtype: torch.dtype, mode: str, tmp_path: Path) -> None:
    """A file's header has any multiple of 8 bytes, and a model on the meta device gets what is mapped."""
    values, scales, _ = blocks()
    state = {"weight": values, "weight_scale_inv": scales} if dtype == E4M3 else {"weight": matrix(N, K)}
    wanted = layer(mode)
    wanted.load_state_dict(state)
    x = matrix(5, K)
    for metadata in ({}, {"a": "bcdefghi"}):
        data = save(state, metadata)
        (tmp_path / "model.safetensors").write_bytes(data)
        made = layer(mode, "meta")
        load_checkpoint(made, tmp_path)
        with torch.no_grad():
            assert torch.equal(made(x), wanted(x)), (8 + int.from_bytes(data[:8], "little")) % 16


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
def test_a_layer_with_two_names_is_loaded_by_either(mode: str, device: str, tmp_path: Path) -> None:
    values, scales, _ = blocks()
    for name in ("first", "second"):
        save_file({f"{name}.weight": values, f"{name}.weight_scale": scales}, tmp_path / "model.safetensors")
        one = layer(mode, device)
        model = nn.ModuleDict({"first": one, "second": one})
        assert load_checkpoint(model, tmp_path) == ((), ())
        wanted = layer(mode)
        wanted.load_state_dict({"weight": values, "weight_scale_inv": scales})
        assert all(torch.equal(x.float(), wanted.state_dict()[own].float()) for own, x in one.state_dict().items())


@pytest.mark.parametrize("device", DEVICES)
def test_scales_may_be_in_another_file(device: str, tmp_path: Path) -> None:
    values, scales, wanted = blocks()
    save_file({"weight": values}, tmp_path / "b.safetensors")
    save_file({"weight_scale": scales, "more": scales.clone()}, tmp_path / "a.safetensors")
    for mode in MODES:
        made = layer(mode, device)
        with pytest.raises(InvalidInputError, match=r"1 tensor not in the model, such as more\."):
            load_checkpoint(made, tmp_path)
        assert load_checkpoint(made, tmp_path, strict=False) == ((), ("more",))
        assert torch.equal(deep_gemm.nn.FP8Linear.from_linear(made, dtype=torch.float32).weight, wanted)


def test_a_tensor_of_two_files_is_refused(tmp_path: Path) -> None:
    """The last file won, such as a copy of the first one from before."""
    for file in ("model", "model-before"):
        save_file({"weight": matrix(N, K)}, tmp_path / f"{file}.safetensors")
    with pytest.raises(InvalidInputError, match=r"weight is in model-before\.safetensors and in model\.safetensors of"):
        load_checkpoint(layer("training"), tmp_path, strict=False)


def test_what_is_no_file_of_weights_is_refused_by_name(tmp_path: Path) -> None:
    """Of one dimension, and a file that has more than its header tells of."""
    file = tmp_path / "model.safetensors"
    save_file({"weight": e4m3(N * K), "weight_scale": torch.ones(1)}, file)
    with pytest.raises(InvalidInputError, match=r"weight must have at least 2 dimensions, but its shape is \(\d+,\)"):
        load_checkpoint(layer("training"), tmp_path)
    save_file({"weight": matrix(N, K)}, file)
    file.write_bytes(file.read_bytes() + bytes(8))
    with pytest.raises(InvalidInputError, match=r"model\.safetensors cannot be read: .*not fully covered"):
        load_checkpoint(layer("training"), tmp_path)
