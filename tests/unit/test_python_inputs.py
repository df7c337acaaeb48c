"""Casts, weight promises and the debug record refuse invalid input with a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deep_gemm
from deep_gemm import InvalidInputError, dequantise
from deep_gemm.settings import settings

FP8 = torch.float8_e4m3fn
X, SF = torch.ones(4, 256).to(FP8), torch.ones(4, 2)


def freed(x: torch.Tensor) -> torch.Tensor:
    x.untyped_storage().resize_(0)
    return x


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((X.view(torch.uint8), SF), "x must be a tensor of torch.float8_e4m3fn"),
        ((X.float(), SF), "x must be"),
        ((torch.ones(4, 256).to(torch.float8_e5m2), SF), "x must be"),
        ((X[0], SF), "2 dimensions"),
        ((None, SF), "x must be .* NoneType"),
        ((X, None), "sf must be"),
        ((X, SF.bfloat16()), "sf must be"),
        ((X, SF.int()), "sf must be"),
        ((X, SF.to("meta")), "device of x"),
        ((X, SF[0]), "2 dimensions"),
        ((X, SF, (0, 128)), "granularity must be"),
        ((X, SF, (1, 128, 1)), "granularity must be"),
        ((X, SF, (1, 128.0)), "granularity must be"),
        ((X, SF, 128), "granularity must be"),
        ((X, SF, (1, 128), torch.int32), "dtype must be"),
        ((X, SF, (1, 128), FP8), "dtype must be"),
        ((X, SF, (1, 128), "float32"), "dtype must be"),
        ((freed(torch.ones(4, 256).to(FP8)), SF), "x .* has no memory"),
        ((X, freed(torch.ones(4, 2))), "sf .* has no memory"),
    ],
)
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


CASTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "token": lambda x: deep_gemm.per_token_cast_to_fp8(x, False),
    "channel": lambda x: deep_gemm.per_channel_cast_to_fp8(x, False),
    "block": lambda x: deep_gemm.per_block_cast_to_fp8(x, False),
    "dims": lambda x: deep_gemm.per_custom_dims_cast_to_fp8(x, (0,), False),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS.keys())
def test_casts_of_what_has_no_memory(cast: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(InvalidInputError, match=r"x \(64, 128\) has no memory: its storage holds 0 bytes"):
        cast(freed(torch.ones(64, 128)))
    view = torch.ones(64, 256)[:, 128:]
    view.untyped_storage().resize_(64 * 256 * 4 - 1)
    with pytest.raises(InvalidInputError, match="has no memory"):
        cast(view)
    with pytest.raises(InvalidInputError, match="must be a dense tensor"):
        cast(torch.ones(4, 128).to_sparse())
    cast(freed(torch.ones(0, 128)))
    cast(torch.ones(1, 1).expand(64, 128))
    assert cast(torch.ones(4, 128, device="meta"))[0].shape == (4, 128)


@pytest.mark.parametrize("gran_k", [0, -1, 1.5, "128", None, True])
def test_a_granularity_that_is_none(gran_k: Any) -> None:
    for cast in (deep_gemm.per_token_cast_to_fp8, deep_gemm.per_channel_cast_to_fp8, deep_gemm.per_block_cast_to_fp8):
        with pytest.raises(InvalidInputError, match="gran_k must be"):
            cast(torch.ones(4, 128), False, gran_k)


@pytest.mark.parametrize("function", [deep_gemm.declare_constant, deep_gemm.retract_constant])
def test_a_sparse_tensor_of_nothing_has_no_memory_to_promise(function: Callable[..., None]) -> None:
    for sparse in (torch.empty(0, 3).to_sparse(), torch.ones(2, 3).to_sparse()):
        with pytest.raises(InvalidInputError, match="must have memory of its own"):
            function(sparse)
    function(torch.empty(0, 3))


def test_the_debug_record_is_json_whatever_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_JIT_PRECOMPILED", f"{tmp_path}/a.dgpack:{tmp_path}/b")
    monkeypatch.setenv("DG_JIT_CACHE_LIMIT", "2GiB")
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "perhaps")
    with settings.override(debug_dump=tmp_path / "x", nvcc=tmp_path / "nvcc"):
        deep_gemm.dump_debug_info(tmp_path / "record.json")
    found = json.loads((tmp_path / "record.json").read_text())["settings"]
    assert found["precompiled"] == [f"{tmp_path}/a.dgpack", f"{tmp_path}/b"]
    assert found["nvcc"] == f"{tmp_path}/nvcc"
    assert found["cache_limit"] == 2 << 30
