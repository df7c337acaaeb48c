"""`convert` and `load_checkpoint`: what is taken, what stays and why, and checkpoints as DeepSeek writes them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from nn_cases import matrix, relative
from safetensors.torch import save_file
from torch import Tensor, nn

import deep_gemm
from deep_gemm import InvalidInputError, UnsupportedError
from deep_gemm.nn import BF16Linear, FP8Linear, convert, load_checkpoint

BF16, E4M3, WIDTH = torch.bfloat16, torch.float8_e4m3fn, 144


class Block(nn.Module):
    def __init__(self, **place: Any) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 2 * WIDTH, **place), nn.Linear(2 * WIDTH, WIDTH, **place)
        self.gate = nn.Linear(WIDTH, 16, **place)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down_proj(self.up_proj(x).relu()) * self.gate(x).sigmoid().mean(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self, **place: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(64, WIDTH, **place)
        self.layers = nn.ModuleList(Block(**place) for _ in range(3))
        self.lm_head = nn.Linear(WIDTH, 64, bias=False, **place)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.lm_head(x)
        return y


IDS = torch.arange(48).view(2, 24)
PROJECTIONS = {f"layers.{index}.{name}" for index in range(3) for name in ("up_proj", "down_proj")}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_a_model_computes_about_the_same_afterwards(mode: str) -> None:
    model = Model(dtype=BF16)
    wanted = model(IDS).detach()
    report = convert(model, mode=mode)
    assert set(report.converted) == PROJECTIONS
    assert all(isinstance(model.get_submodule(name), FP8Linear) for name in PROJECTIONS)
    assert 0.001 < relative(model(IDS), wanted) < 0.05
    assert set(report.kept) == {"lm_head", *(f"layers.{index}.gate" for index in range(3))}


def test_a_report_is_short() -> None:
    assert str(convert(Model())) == (
        "6 linear layers converted: layers.*.up_proj (3), layers.*.down_proj (3)\n"
        "kept, because heads, embeddings, routers and gates keep their dtype unless a filter takes them: "
        "lm_head, layers.*.gate (3)"
    )


def built(sizes: str) -> nn.Module:
    """A model with linear layers, and embeddings in brackets, by name: "layers.0.up 64x128 [embed] 512x64" is out x
    in. An experts list is a ModuleList."""
    model = nn.Module()
    words = sizes.split()
    for name, size in zip(words[::2], words[1::2], strict=True):
        out, width = map(int, size.split("x"))
        *path, own = name.strip("[]").split(".")
        parent = model
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.ModuleList() if part == "experts" else nn.Module())
            parent = parent.get_submodule(part)
        layer = nn.Embedding(out, width) if name[0] == "[" else nn.Linear(width, out, bias=False)
        if isinstance(parent, nn.ModuleList):
            parent.append(layer)
        else:
            parent.add_module(own, layer)
    return model


MLP = "layers.0.mlp.{0} 128x64 layers.0.mlp.{1} 128x64 layers.0.mlp.{2} 64x128"
LORA = " ".join(f"q.lora_{name}.default {size}" for name, size in (("A", "16x64"), ("B", "64x16")))
ROLES: dict[str, tuple[str, set[str]]] = {
    "heads": ("score 16x64 value_head 16x64 classifier 16x64 output 512x64 embed_out 512x64", set()),
    "parts of heads": ("classifier.dense 64x64 classifier.out_proj 16x64 v_head.summary 16x64", set()),
    "the head of a later layer": ("layers.61.shared_head.head 512x64 layers.61.eh_proj 64x128", {"layers.61.eh_proj"}),
    "a head by what it makes": ("[embed_tokens] 512x64 decoder 512x64 layers.0.fc 512x64", {"layers.0.fc"}),
    "as wide as a table of another width": ("[wpe] 512x32 dense 512x64", {"dense"}),
    "outputs in blocks": ("layers.0.attention.output 64x64 encoder.layer.0.output.dense 64x128",
                          {"layers.0.attention.output", "encoder.layer.0.output.dense"}),
    "routers": (("layers.0.mlp.router 16x64 layers.0.block.router.layer 16x64 layers.0.mlp.gate 16x64 "
                 "layers.0.mlp.shared_expert_gate 16x64"), set()),
    "a noisy router": ("layers.0.moe.gate 16x64 layers.0.moe.noise 16x64", {"layers.0.moe.noise"}),
    "a router by what it feeds": (" ".join(["moe.wg 16x64", *(f"moe.experts.{e} 64x64" for e in range(16))]),
                                  {f"moe.experts.{e}" for e in range(16)}),
    "a gated MLP": (MLP.format("gate", "up", "down"), {f"layers.0.mlp.{name}" for name in ("gate", "up", "down")}),
    "embeddings": ("patch_embed.proj 64x48 x_embedder 64x64 time_embedding.linear_1 64x64", set()),
    "adapters": (f"q.base_layer 64x64 {LORA} lm_head.base_layer 512x64 score.modules_to_save.default 16x64",
                 {"q.base_layer"}),
    "names of others": ("layers.0.headwise_proj 64x64 layers.0.routers_mlp 64x64 scoring.dense 64x64",
                        {"layers.0.headwise_proj", "layers.0.routers_mlp", "scoring.dense"}),
}  # fmt: skip


@pytest.mark.parametrize("case", ROLES)
def test_a_layer_is_kept_by_its_name_and_by_what_it_feeds(case: str) -> None:
    sizes, wanted = ROLES[case]
    model = built(sizes)
    report = convert(model)
    assert set(report.converted) == wanted
    names = {name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    assert set(report.kept) == names - wanted
    everything = convert(built(sizes), lambda *_: True)
    assert set(everything.converted) == names, "a filter decides alone"


def test_adapters_keep_their_gradients() -> None:
    model = built(f"q.base_layer 64x64 {LORA}")
    model.get_submodule("q.base_layer").requires_grad_(False)
    convert(model, mode="inference")
    assert sorted(name for name, x in model.named_parameters() if x.requires_grad) == [
        "q.lora_A.default.weight",
        "q.lora_B.default.weight",
    ]


def test_a_report_has_whole_names_of_layers() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in "ab")})
    model["alone"] = nn.Sequential(nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    said = str(convert(model))
    assert said == "6 linear layers converted: blocks.*.0 (2), blocks.*.1 (2), alone.1, alone.3"


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_layers_are_linear_for_what_looks_for_that(mode: Any) -> None:
    """PEFT and others ask isinstance, and call reset_parameters after to_empty."""
    model = nn.ModuleDict({"one": nn.Linear(64, 64)})
    convert(model, mode=mode)
    made: Any = model["one"]
    assert isinstance(made, nn.Linear)
    made.to_empty(device="cpu").reset_parameters()
    grouped = deep_gemm.nn.FP8GroupedLinear(2, 64, 64, mode=mode)
    grouped.reset_parameters()
    for layer in (made, grouped):
        w = layer.weight.float()
        assert (w.isfinite().all() and w.std() > 0.01) if mode == "training" else not w.any()
        assert mode == "training" or (layer.weight_scale_inv == 1).all()
    y = made(matrix(3, 64))
    assert y.isfinite().all()
    if mode == "inference":
        with pytest.raises(InvalidInputError, match="its scales would be lost"):
            BF16Linear.from_linear(made)


def test_an_optimizer_made_before_goes_on() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    convert(model)
    layer: Any = model.get_submodule("layers.0.up_proj")
    before = layer.weight.detach().clone()
    model(IDS).square().mean().backward()
    optimizer.step()
    assert not torch.equal(layer.weight, before)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_filter_decides_alone() -> None:
    model = Model()
    report = convert(model, lambda name, layer: name.endswith("gate") and layer.out_features == 16)
    assert set(report.converted) == {f"layers.{index}.gate" for index in range(3)}
    assert report.kept["layers.0.up_proj"] == "the filter keeps it"


def test_a_second_time_changes_the_mode_or_nothing() -> None:
    model = Model()
    convert(model)
    again = convert(model)
    assert not again.converted
    assert again.kept["layers.0.up_proj"] == "it is an FP8Linear in training mode already"
    assert set(convert(model, mode="inference").converted) == PROJECTIONS
    assert model.get_submodule("layers.0.up_proj").weight.dtype == E4M3


def test_a_change_of_mode_loses_no_hooks_and_no_ties() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    convert(model)
    layers: Any = list(model)
    layers[0].register_forward_hook(lambda *_: None)
    layers[2].weight = layers[1].weight
    report = convert(model, mode="inference")
    assert report.converted == ("3",)
    assert [why.split(",")[0] for why in report.kept.values()] == [
        "it has hooks",
        "it shares its weight with 2",
        "it shares its weight with 1",
    ]


class Odd(nn.Linear):
    pass


def hooked() -> nn.Linear:
    layer = nn.Linear(64, 64)
    layer.register_forward_hook(lambda *_: None)
    return layer


def replaced() -> nn.Linear:
    layer = nn.Linear(64, 64)
    layer.forward = lambda input: input  # type: ignore[method-assign]
    return layer


def shared() -> nn.Module:
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    second.weight = first.weight
    return nn.Sequential(first, second)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (lambda: nn.Linear(100, 64), "in_features must be a multiple of 16, but it is 100"),
        (lambda: nn.Linear(64, 20), "out_features must be a multiple of 16, but it is 20"),
        (lambda: nn.Linear(64, 64, dtype=torch.float64), "weights must be torch.float32, torch.bfloat16 or"),
        (lambda: Odd(64, 64), "it is a Odd, a subclass of Linear that may do something else"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)), "it is a ParametrizedLinear, a subclass"),
        (lambda: nn.MultiheadAttention(64, 4), "it is a NonDynamicallyQuantizableLinear, a subclass"),
        (hooked, "it has hooks, which a new layer would lose"),
        (replaced, "its forward was replaced"),
        (shared, "it shares its weight with one."),
    ],
)
def test_layers_that_cannot_be_taken_stay(layer: Any, why: str) -> None:
    model = nn.ModuleDict({"one": layer()})
    before = {name: type(module) for name, module in model.named_modules()}
    report = convert(model)
    assert not report.converted
    assert all(reason.startswith(why) for reason in report.kept.values()), report
    assert report.kept
    assert {name: type(module) for name, module in model.named_modules()} == before


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("option", [{"dtype": BF16}, {"device": "cuda"}], ids=str)
def test_options_that_parameters_would_ignore_keep_a_layer(option: Any, mode: Any) -> None:
    (name,) = option
    assert convert(nn.Sequential(nn.Linear(64, 64)), mode=mode, **option).kept["0"].startswith(f"{name} must ")
    for make, options in ((FP8Linear, {"mode": mode, **option}), (BF16Linear, option)):
        with pytest.raises(InvalidInputError, match=f"{name} must "):
            make.from_linear(nn.Linear(64, 64), **options)
    stored = FP8Linear.from_linear(nn.Linear(64, 64), mode="inference")
    assert FP8Linear.from_linear(stored, dtype=torch.float16).weight.dtype == torch.float16


def test_a_model_that_is_a_layer_stays() -> None:
    assert "use FP8Linear.from_linear" in str(convert(nn.Linear(64, 64)))
    with pytest.raises(InvalidInputError, match=r"model must be a torch\.nn\.Module"):
        convert(lambda x: x)  # type: ignore[arg-type]
    model = Model()
    with pytest.raises(InvalidInputError, match="mode must be"):
        convert(model, mode="FP8")
    assert isinstance(model.layers[0].up_proj, nn.Linear), "nothing was replaced"


def test_a_layer_with_two_names_is_one_layer_afterwards() -> None:
    layer = nn.Linear(64, 64)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    assert convert(model).converted == ("0", "2")
    assert model[0] is model[2]


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_encoder_layers_of_torch_call_the_layers_in_them(mode: str) -> None:
    """Without gradients they read weights themselves: they skipped FP8, and failed where weights are E4M3."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2).eval()
    x, padding = torch.randn(2, 8, 64), torch.arange(8)[None] > torch.tensor([[7], [4]])
    wanted = model(x, src_key_padding_mask=padding)[~padding]
    assert len(convert(model, mode=mode).converted) == 4
    with torch.no_grad():
        found = model(x, src_key_padding_mask=padding)[~padding]
    assert 0.001 < relative(found, wanted) < 0.05


def test_an_own_module_may_be_put_in_place() -> None:
    model = nn.Sequential(nn.Linear(100, 60).bfloat16())
    model[0] = BF16Linear.from_linear(model[0])
    assert model(matrix(5, 100)).shape == (5, 60)


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, Model]:
    """A checkpoint of two files as DeepSeek writes them, where the scales of one layer are in the other file; and the
    model that it was made of, in the mode of inference."""
    model = Model(dtype=BF16)
    convert(model, mode="inference")
    state = model.state_dict()
    del state["lm_head.weight"]
    first = {name for name in state if name.startswith(("embed", "layers.0"))} - {"layers.0.up_proj.weight_scale_inv"}
    places = {}
    for number, names in enumerate((first, set(state) - first), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: state[name] for name in names}, tmp_path / file)
        places |= dict.fromkeys(names, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return tmp_path, model


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_checkpoint_is_loaded_as_it_is(checkpoint: tuple[Path, Model], mode: str, device: str) -> None:
    path, source = checkpoint
    model = Model(dtype=BF16, device=device)
    convert(model, mode=mode)
    missing, unknown = load_checkpoint(model, path)
    assert missing == unknown == ()
    assert model.lm_head.weight is model.embed_tokens.weight
    wanted = source(IDS)
    assert torch.equal(model(IDS), wanted), "values of FP8 are cast to themselves"
    assert model.get_submodule("layers.0.up_proj").weight.dtype == (E4M3 if mode == "inference" else BF16)
    if mode == "inference":
        found, state = model.state_dict(), source.state_dict()
        assert all(torch.equal(found[name].view(torch.uint8), state[name].view(torch.uint8)) for name in state)


def test_a_checkpoint_that_does_not_fit_names_tensors(checkpoint: tuple[Path, Model]) -> None:
    path, _ = checkpoint
    model = Model(dtype=BF16)
    for strict in (True, False):
        with pytest.raises(InvalidInputError, match=r"weight of .* is FP8, but the model has a Linear there"):
            load_checkpoint(model, path, strict=strict)
    convert(model)
    without: Any = Model(dtype=BF16)
    convert(without)
    del without.layers[1].gate
    with pytest.raises(InvalidInputError, match=r"2 tensors not in the model, such as layers\.1\.gate\.bias\."):
        load_checkpoint(without, path)
    assert load_checkpoint(without, path, strict=False) == ((), ("layers.1.gate.bias", "layers.1.gate.weight"))
    model.more = nn.Linear(16, 16)
    with pytest.raises(
        InvalidInputError, match=r"2 tensors not in the checkpoint, such as more\.weight\. strict=False"
    ):
        load_checkpoint(model, path)
    assert load_checkpoint(model, path, strict=False) == (("more.weight", "more.bias"), ())
    other = nn.ModuleDict({"embed_tokens": nn.Embedding(64, 32)})
    with pytest.raises(InvalidInputError, match=r"(?s)does not fit embed_tokens: .*size mismatch for weight"):
        load_checkpoint(other, path, strict=False)
    save_file({"weight": torch.zeros(16, 16).to(E4M3), "bias": torch.zeros(16)}, path / "scaleless.safetensors")
    for mode in ("training", "inference"):
        with pytest.raises(InvalidInputError, match=r"weight is E4M3, and the scales .* not beside it\."):
            load_checkpoint(FP8Linear(16, 16, mode=mode), path / "scaleless.safetensors", strict=False)
    (path / "scaleless.safetensors").unlink()
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InvalidInputError, match=r"has no model-00002-of-00002\.safetensors"):
        load_checkpoint(model, path)
    (path / "nothing").mkdir()
    with pytest.raises(InvalidInputError, match="has no safetensors file"):
        load_checkpoint(model, path / "nothing")
    with pytest.raises(InvalidInputError, match="path must be that of a safetensors file"):
        load_checkpoint(model, path / "nowhere")


def test_progress_is_shown_on_a_terminal(
    checkpoint: tuple[Path, Model], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = checkpoint
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    load_checkpoint(model, path)
    assert "loading" in capsys.readouterr().err
    load_checkpoint(model, path, progress=False)
    assert capsys.readouterr().err == ""


def test_without_safetensors_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="pip install safetensors"):
        load_checkpoint(Model(), tmp_path)
    assert deep_gemm.nn.convert is convert
