"""Casts, weight promises and the debug record refuse invalid input with a sentence."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deep_gemm
from deep_gemm import Epilogue, InvalidInputError, dequantise, fused, nn
from deep_gemm.settings import settings

FP8 = torch.float8_e4m3fn
X, SF = torch.ones(4, 256).to(FP8), torch.ones(4, 2)


def freed(x: torch.Tensor) -> torch.Tensor:
    x.untyped_storage().resize_(0)
    return x


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((X.view(torch.uint8), SF), r"sf must have the shape \(4, 16\) .* pass x.view\(torch.float8_e4m3fn\)"),
        ((X.float(), SF), "x must be"), ((torch.ones(4, 256).to(torch.float8_e5m2), SF.int()), "sf must be"),
        ((X[0], SF), "x must have 2 dimensions"), ((None, SF), "x must be .* NoneType"), ((X, None), "sf must be"),
        ((X, SF.bfloat16()), "sf must be"), ((X, SF.int()), "sf must be"), ((X, SF.to("meta")), "device of x"),
        ((X, SF[0]), "2 dimensions"), ((X, SF, (0, 128)), "granularity must be"),
        ((X, SF, (1, 128, 1)), "granularity must be"), ((X, SF, (1, 128.0)), "granularity must be"),
        ((X, SF, 128), "granularity must be"), ((X, SF, (1, 128), torch.int32), "dtype must be"),
        ((X, SF, (1, 128), FP8), "dtype must be"), ((X, SF, (1, 128), "float32"), "dtype must be"),
        ((freed(torch.ones(4, 256).to(FP8)), SF), "x has no memory: it needs 1024 bytes"),
        ((X, freed(torch.ones(4, 2))), "sf has no memory: it needs 32 bytes"),
    ],
)  # fmt: skip
def test_dequantise(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        dequantise(*arguments)


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1), (), (-1,), (0, 2)])
@pytest.mark.parametrize("shape", [(0, 3, 2), (3, 0, 2), (0, 0, 0)])
def test_scales_of_nothing_are_those_of_zeros(shape: tuple[int, ...], dims: tuple[int, ...]) -> None:
    y, sf = deep_gemm.per_custom_dims_cast_to_fp8(torch.empty(shape), dims, True)
    zeros, of_zeros = deep_gemm.per_custom_dims_cast_to_fp8(torch.zeros([max(size, 1) for size in shape]), dims, True)
    assert y.shape == shape
    assert y.dtype == zeros.dtype
    assert sf.shape == torch.Size([shape[dim] for dim in sorted(dim % 3 for dim in dims)])
    assert not sf.numel() or bool((sf == of_zeros.max()).all())


@pytest.mark.parametrize("dims", [(3,), (-4,), (0.5,), "a", 7, None, (True,), (None,)])
def test_dims_that_are_none(dims: Any) -> None:
    with pytest.raises(InvalidInputError, match="dims must name"):
        deep_gemm.per_custom_dims_cast_to_fp8(torch.ones(2, 2, 2), dims, False)


@pytest.mark.parametrize("cast", ["token", "channel", "block"])
def test_casts_of_what_needs_no_memory_of_its_own(cast: str) -> None:
    """test_tensor_gate.py has tensors that lack memory."""
    call = getattr(deep_gemm, f"per_{cast}_cast_to_fp8")
    call(freed(torch.ones(0, 128)), False)
    call(torch.ones(1, 1).expand(64, 128), False)
    assert call(torch.ones(4, 128, device="meta"), False)[0].shape == (4, 128)
    view = torch.ones(64, 256)[:, 128:]
    view.untyped_storage().resize_(64 * 256 * 4 - 1)
    with pytest.raises(InvalidInputError, match="has no memory"):
        call(view, False)


@pytest.mark.parametrize("gran_k", [0, -1, 1.5, "128", None, True])
def test_a_granularity_that_is_none(gran_k: Any) -> None:
    for cast in (deep_gemm.per_token_cast_to_fp8, deep_gemm.per_channel_cast_to_fp8, deep_gemm.per_block_cast_to_fp8):
        with pytest.raises(InvalidInputError, match="gran_k must be"):
            cast(torch.ones(4, 128), False, gran_k)


A, B, D = torch.ones(4, 256).to(FP8), torch.ones(8, 256).to(FP8), torch.zeros(4, 8, dtype=torch.bfloat16)
PAIR = (A, SF), (B, torch.ones(1, 2))
HALF = torch.ones(4, 256).bfloat16(), torch.ones(8, 256).bfloat16(), D
MANY = torch.ones(3)


def k_grouped(ks: Any, turned: bool = False) -> None:
    a, b, d = torch.ones(256, 16).bfloat16(), torch.ones(256, 32).bfloat16(), torch.zeros(2, 16, 32)
    deep_gemm.k_grouped_bf16_gemm_tn_contiguous(a.t().contiguous().t() if turned else a, b, d, ks)


def masked(expected: Any) -> None:
    a, b, d = torch.ones(2, 16, 64).bfloat16(), torch.ones(2, 32, 64).bfloat16(), torch.zeros(2, 16, 32).bfloat16()
    deep_gemm.m_grouped_bf16_gemm_nt_masked(a, b, d, torch.zeros(2, dtype=torch.int32), expected)


def logits(**named: Any) -> None:
    ranges = torch.zeros(4, dtype=torch.int32)
    q, kv = torch.ones(4, 32, 64).to(FP8), (torch.ones(8, 64).to(FP8), torch.ones(8))
    deep_gemm.fp8_fp4_mqa_logits(q, kv, torch.ones(4, 32), ranges, ranges, **named)


METADATA = deep_gemm.get_paged_mqa_logits_metadata
PACKED = deep_gemm.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor

FOREIGN: dict[str, tuple[Callable[[], object], str]] = {
    "compiled_dims a tensor": (lambda: deep_gemm.bf16_gemm_nt(*HALF, compiled_dims=MANY), "compiled_dims must be a st"),
    "compiled_dims an array": (lambda: deep_gemm.bf16_gemm_nt(*HALF, compiled_dims=MANY.numpy()), "compiled_dims must"),
    "compiled_dims of fp8": (lambda: deep_gemm.fp8_gemm_nt(*PAIR, D, compiled_dims=MANY), "compiled_dims must be a st"),
    "recipe a tensor": (lambda: deep_gemm.fp8_gemm_nt(*PAIR, D, recipe=D),
        r"recipe must be 3 positive integers .* it is a torch.bfloat16 tensor\.$"),
    "shard of one": (lambda: deep_gemm.precompile((8, 256), shard=(0,)), r"shard must be \(i, n\).* it is \(0,\)"),
    "shard a number": (lambda: deep_gemm.precompile((8, 256), shard=3), "shard must be"),
    "jobs": (lambda: deep_gemm.precompile((8, 256), jobs=-1), "jobs must be a whole number from 1 .* it is -1"),
    "tp": (lambda: deep_gemm.precompile((8, 256), tp="2"), "tp must be at least 1, a whole number, but it is '2'"),
    "no SMs": (lambda: deep_gemm.precompile((8, 256), num_sms=0), "num_sms must be a whole number from 1"),
    "SMs a text": (lambda: deep_gemm.precompile((8, 256), num_sms="a"), "num_sms must be a whole number from 1"),
    "progress": (lambda: deep_gemm.precompile((8, 256), max_m=1, progress=3), "progress must be a function of"),
    "allow_partial": (lambda: deep_gemm.precompile((8, 256), allow_partial="no"), "allow_partial must be True or"),
    "training": (lambda: deep_gemm.precompile((8, 256), training=1), "training must be True or False, but it is 1"),
    "jobs a text": (lambda: deep_gemm.precompile((8, 256), jobs="2"), "jobs must be a whole number from 1"),
    "cache_info": (lambda: deep_gemm.cache_info(5), "builder must be None or a Builder, but it is 5"),
    "align": (lambda: deep_gemm.align(1, 0), "y not 0, but they are 1 and 0"),
    "align a text": (lambda: deep_gemm.align("1", 2), "must be numbers"),
    "ceil_div": (lambda: deep_gemm.ceil_div(1, 0), "y not 0, but they are 1 and 0"),
    "use_ue8m0 a tensor": (lambda: Epilogue(use_ue8m0=MANY), "use_ue8m0 must be True or False, but it is a torch"),
    "interleaved an array": (lambda: Epilogue(interleaved=MANY.numpy()), "interleaved must be True or False"),
    "activation an array": (lambda: Epilogue(activation=MANY.numpy()), "the activation of an epilogue must be None or"),
    "d a pair of nothing": (lambda: deep_gemm.fp8_gemm_nt(*PAIR, ((), SF[:, :1]), epilogue=Epilogue()),
        "d must be a torch.Tensor, but it is of type tuple"),
    "negative input features": (lambda: nn.BF16Linear(-1, 16),
        "in_features must be a whole number from 1, but it is -1"),
    "output features a float": (lambda: nn.BF16Linear(16, 1.5), "out_features must be a whole number from 1, .* 1.5"),
    "features a text": (lambda: nn.FP8Linear("x", 16), "in_features must be a multiple of 16, but it is 'x'"),
    "groups a text": (lambda: nn.FP8GroupedLinear("x", 16, 16), "num_groups must be a whole number from 0, .* 'x'"),
    "negative width": (lambda: nn.MoE(-16, 16, 2, 1), "width must be a whole number from 1, .* -16"),
    "top_k a text": (lambda: nn.MoE(16, 16, 2, "1"), "top_k must be a whole number from 1, .* '1'"),
    "element_size": (lambda: deep_gemm.get_tma_aligned_size(4, MANY), "element_size must be 1, 2, 4, 8 or 16"),
    "block size": (lambda: deep_gemm.set_block_size_multiple_of(None), "value must be a positive integer"),
    "debug path": (lambda: deep_gemm.dump_debug_info("a\0b"), "path must be the path of a file"),
    "debug number": (lambda: deep_gemm.dump_debug_info(5), "path must be the path of a file"),
    "compare None": (lambda: deep_gemm.backends.compare("bf16_gemm_nt", None), "shapes is a list .* it is None"),
    "compare a number": (lambda: deep_gemm.backends.compare("bf16_gemm_nt", [5]), "sizes from 1, but 5 was given"),
    "compare texts": (lambda: deep_gemm.backends.compare("bf16_gemm_nt", [("a", 1, 2)]), "sizes from 1, but .'a', 1"),
    "compare device": (lambda: deep_gemm.backends.compare("bf16_gemm_nt", device=5), "device must be cpu or cuda"),
    "ks_cpu": (lambda: k_grouped([128, 128.0]), r"ks_cpu\[1\] must be an integer from 0 on, but it is 128.0"),
    "ks_cpu a tensor in it": (lambda: k_grouped([128, torch.ones(3)]), r"ks_cpu\[1\] .* it is a torch.float32 tensor"),
    "ks of scales": (lambda: PACKED(SF, None, [MANY], 128), r"ks_cpu\[0\] must be an integer"),
    "expected_m": (lambda: masked(MANY), r"expected_m must be a positive .* it is a torch.float32 tensor\.$"),
    "clean_logits": (lambda: logits(clean_logits=MANY), r"clean_logits must be .* it is a torch.float32 tensor\.$"),
    "max_seqlen_k": (lambda: logits(max_seqlen_k=MANY), r"max_seqlen_k must be .* it is a torch.float32 tensor\.$"),
    "max_seqlen_k beside an int": (lambda: logits(clean_logits=8, max_seqlen_k=MANY), "the sixth argument is 8"),
    "logits_dtype": (lambda: logits(logits_dtype=MANY), "logits_dtype must be torch.float32 or torch.bfloat16"),
    "block_kv": (lambda: METADATA(torch.zeros(2, dtype=torch.int32), MANY, 2), "block_kv must be one of 32, 64"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_a_wrong_argument_ends_in_one_sentence(name: str) -> None:
    call, words = FOREIGN[name]
    with pytest.raises(deep_gemm.DeepGemmError, match=words) as caught:
        call()
    assert "tensor([" not in str(caught.value)


def test_sizes_may_be_numbers_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    k_grouped([numpy.int64(128), numpy.int32(128)])
    assert deep_gemm.align(numpy.int64(5), 10**30) == 10**30
    assert deep_gemm.align(numpy.uint8(250), numpy.uint8(100)) == 300  # more than its own type holds
    assert deep_gemm.ceil_div(numpy.int32(7), 10**30) == 1
    sf = torch.ones(4, 8)
    wanted = deep_gemm.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(sf, None, [256, 256], 128)
    found = deep_gemm.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(sf, None, [numpy.int64(256)] * 2, 128)
    assert torch.equal(found, wanted)


def test_a_limit_past_every_float_is_none() -> None:
    x = torch.randn(4, 32).bfloat16()
    assert torch.equal(fused.silu_and_mul(x, limit=10**400), fused.silu_and_mul(x))


@pytest.mark.parametrize("layer", [nn.FP8Linear, nn.FP8GroupedLinear, nn.MoE])
@pytest.mark.parametrize("name", ["gated", "shape"])
def test_an_unknown_option_is_one_of_the_layer_that_was_called(layer: type, name: str) -> None:
    sizes = {nn.FP8Linear: (16, 16), nn.FP8GroupedLinear: (2, 16, 16), nn.MoE: (16, 16, 2, 1)}[layer]
    with pytest.raises(TypeError, match=f"^{layer.__name__} has no argument '{name}'. Its options are mode, "):
        layer(*sizes, **{name: 1})


OWN = Epilogue.custom("own", "return x + row + column;", reference=lambda x, row, column: x + row + column)


@pytest.mark.parametrize("k", [0, 256])
@pytest.mark.parametrize(
    "epilogue", [None, Epilogue(alpha=0.5, bias=torch.ones(8)), Epilogue(activation="swiglu"), OWN], ids=str
)
def test_a_default_device_is_not_that_of_a_call(epilogue: Epilogue | None, k: int) -> None:
    gate = epilogue is not None and epilogue.activation == "swiglu"
    found, wanted = (torch.zeros(4, 4 if gate else 8, dtype=torch.bfloat16) for _ in range(2))
    a, b = (x[:, :k] for x in HALF[:2])
    deep_gemm.bf16_gemm_nt(a, b, wanted, epilogue=epilogue)
    torch.set_default_device("meta")
    try:
        deep_gemm.bf16_gemm_nt(a, b, found, epilogue=epilogue)
    finally:
        torch.set_default_device(None)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("shape", [(3, 5), (0, 5), (3, 0)])
def test_a_block_larger_than_the_tensor_is_the_whole_tensor(shape: tuple[int, int]) -> None:
    """And takes no memory of its size."""
    x = torch.arange(shape[0] * shape[1]).view(shape).float()
    for cast in (deep_gemm.per_token_cast_to_fp8, deep_gemm.per_channel_cast_to_fp8, deep_gemm.per_block_cast_to_fp8):
        (y, sf), (same, scales) = cast(x, False, 10**13), cast(x, False, 5)
        assert torch.equal(y.float(), same.float())
        assert torch.equal(sf, scales)
    granularity = (10**13, 10**13)
    y, sf = deep_gemm.per_block_cast_to_fp8(x, False, 10**13)
    assert torch.equal(dequantise(y, sf, granularity), dequantise(y, sf, (5, 5)))


@pytest.mark.parametrize("kind", ["link", "dangling link", "fifo", "directory", "no directory"])
def test_the_debug_record_replaces_files_only(tmp_path: Path, kind: str) -> None:
    """It wrote through a link that somebody else may have made, and waited for whoever reads a FIFO."""
    path, precious = tmp_path / "record.json", tmp_path / "precious"
    precious.write_text("precious")
    if "link" in kind:
        path.symlink_to(precious if kind == "link" else tmp_path / "nowhere")
    elif kind == "no directory":
        path = path / "record.json"
    else:
        (os.mkfifo if kind == "fifo" else os.mkdir)(path)
    with pytest.raises(OSError, match=r"link, or no regular file|No such file"):
        deep_gemm.dump_debug_info(path)
    assert precious.read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()
    deep_gemm.dump_debug_info(precious)
    assert json.loads(precious.read_text())


def test_the_debug_record_is_json_whatever_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_JIT_PRECOMPILED", f"{tmp_path}/a.dgpack:{tmp_path}/b")
    monkeypatch.setenv("DG_JIT_CACHE_LIMIT", "2GiB")
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "perhaps")
    path = tmp_path / ("字" * 83 + ".json")  # 254 bytes, and a name may have 255
    with settings.override(debug_dump=tmp_path / "x", nvcc=tmp_path / "nvcc"):
        deep_gemm.dump_debug_info(path)
    found = json.loads(path.read_text())["settings"]
    assert found["precompiled"] == [f"{tmp_path}/a.dgpack", f"{tmp_path}/b"]
    assert found["nvcc"] == f"{tmp_path}/nvcc"
    assert found["cache_limit"] == 2 << 30
