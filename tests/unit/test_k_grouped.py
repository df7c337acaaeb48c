"""Products grouped along K on the CPU: each group's product, sizes, recipes, and casts that suit them."""

import functools
from typing import Any

import pytest
import torch
from grouped_cases import BF16, E4M3
from hypothesis import given, settings
from hypothesis import strategies as st

import deep_gemm
from deep_gemm import InvalidInputError, UnsupportedError
from deep_gemm.ops.cast_reference import per_block_cast_to_fp8, per_token_cast_to_fp8

COLUMNS = (24, 144)


def sizes(ks: list[int]) -> torch.Tensor:
    return torch.tensor(ks, dtype=torch.int32)


def halves(ks: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a, b, and the product of each group."""
    a, b = (torch.randn(sum(ks), size).bfloat16() for size in COLUMNS)
    parts = zip(a.double().split(ks), b.double().split(ks), strict=True)
    return a, b, torch.stack([x.t() @ y for x, y in parts])


def fp8s(ks: list[int], padded: bool = False, past: int = 0, mixed: bool = False) -> tuple[Any, Any, torch.Tensor]:
    """The same with scales, in b with ``mixed`` of blocks: each group's values after one another; or ``padded``, as
    parts of one matrix, with NaN and NaN scales around them."""
    pairs, exact = [], []
    for rows, cast, block in zip(
        COLUMNS,
        (per_token_cast_to_fp8, per_block_cast_to_fp8 if mixed else per_token_cast_to_fp8),
        ((1, 128), (128 if mixed else 1, 128)),
        strict=True,
    ):
        casts = [cast(torch.randn(rows, k), False) for k in ks]
        exact.append([deep_gemm.dequantise(x, sf, block, torch.float64) for x, sf in casts])
        values, scales = torch.cat([x.flatten() for x, _ in casts]), torch.cat([sf for _, sf in casts], dim=1)
        if padded:
            parts = [torch.nn.functional.pad(x.view(torch.uint8), (0, -x.shape[1] % 128), value=0x7F) for x, _ in casts]
            parts.append(torch.full((rows, 128 * past), 0x7F, dtype=torch.uint8))
            values = torch.cat(parts, 1).view(E4M3)
            scales = torch.cat([scales, torch.full((len(scales), past), float("nan"))], 1)
        pairs.append((values, scales))
    return pairs[0], pairs[1], torch.stack([x @ y.t() for x, y in zip(*exact, strict=True)])


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 150), min_size=1, max_size=5), st.sampled_from(["none", "in place", "from c"]))
def test_k_grouped_bf16_is_a_product_of_each_group(ks: list[int], adds: str) -> None:
    a, b, exact = halves(ks)
    before = torch.randn(len(ks), *COLUMNS)
    d = before.clone()
    c = {"none": None, "in place": d, "from c": before}[adds]
    deep_gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, d, ks, sizes(ks), c)
    torch.testing.assert_close(d.double(), exact if c is None else exact + before)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=5), st.integers(0, 2), st.booleans(), st.booleans(), st.booleans()
)
def test_k_grouped_fp8_is_a_product_of_each_group(
    sixteens: list[int], past: int, padded: bool, adds: bool, mixed: bool
) -> None:
    """Groups may end inside a block of scales; padded parts, anywhere."""
    ks = [16 * x - (3 if padded and x else 0) for x in sixteens]
    a, b, exact = fp8s(ks, padded, past, mixed)
    recipe = {"recipe": (1, 128, 128)} if mixed else {}
    before = torch.randn(len(ks), *COLUMNS)
    d = before.clone() if adds else torch.full(before.shape, float("nan"))
    if padded:
        deep_gemm.k_grouped_fp8_gemm_nt_padded(a, b, d, sizes(ks), d if adds else None, **recipe)
    else:
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, d, ks, sizes(ks), d if adds else None, **recipe)
    torch.testing.assert_close(d.double(), exact + before if adds else exact, rtol=1e-5, atol=1e-5)


def test_casts_of_padded_rows_are_such_parts() -> None:
    """What an expert layer's gradients need: rows in expert order, each expert's from a multiple of 128 on."""
    x, y = (torch.randn(384, columns).bfloat16() for columns in COLUMNS)
    for recipe, cast in (
        ((1, 1, 128), deep_gemm.quantize.columns),
        ((1, 128, 128), deep_gemm.quantize.blocks_transposed),
    ):
        a, b, d = deep_gemm.quantize.columns(x), cast(y), torch.empty(3, *COLUMNS)
        deep_gemm.k_grouped_fp8_gemm_nt_padded(a, b, d, sizes([100, 0, 130]), recipe=recipe)
        for group, rows in enumerate((slice(0, 100), slice(128, 128), slice(128, 258))):
            assert deep_gemm.testing.calc_diff(d[group] + 1, x[rows].float().t() @ y[rows].float() + 1) < 1e-3


def test_the_scales_of_b_suit_the_recipe() -> None:
    a, b, _ = fp8s([128])
    blocks = fp8s([128], mixed=True)[1]
    d = torch.empty(1, *COLUMNS)
    product: Any = functools.partial(deep_gemm.k_grouped_fp8_gemm_nt_contiguous, a)
    with pytest.raises(InvalidInputError, match=r"\(144, 1\), one per row.*They suit recipe=\(1, 128, 128\)"):
        product(blocks, d, [128])
    with pytest.raises(InvalidInputError, match=r"\(2, 1\), one per 128 rows.*They suit recipe=\(1, 1, 128\)"):
        product(b, d, [128], recipe=(1, 128, 128))
    with pytest.raises(UnsupportedError, match=r"only \(1, 1, 128\) and \(1, 128, 128\) are"):
        product(b, d, [128], recipe=(128, 128, 128))


def test_sizes_have_two_names_and_may_be_on_the_device_alone() -> None:
    ks = [128, 0, 64]
    a, b, exact = halves(ks)
    product: Any = functools.partial(deep_gemm.k_grouped_bf16_gemm_tn_contiguous, a, b)
    for named in ({"ks_cpu": ks}, {"ks": tuple(ks)}, {"grouped_layout": sizes(ks)}, {"ks_tensor": sizes(ks)}):
        d = torch.zeros(3, *COLUMNS, dtype=BF16)
        product(d, **named, c=d)
        assert torch.equal(d, exact.bfloat16())
    with pytest.raises(InvalidInputError, match="two names of one argument"):
        product(d, ks, ks=ks)
    with pytest.raises(InvalidInputError, match="must be given"):
        product(d)
