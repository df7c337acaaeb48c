"""Layouts of scales, on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import deep_gemm
import deep_gemm.utils
from deep_gemm import InvalidInputError, UnsupportedError
from deep_gemm.layout import (
    get_mn_major_tma_aligned_tensor,
    get_tma_aligned_size,
    transform_sf_into_required_layout,
)
from deep_gemm.ops.layouts import scales_stride
from deep_gemm.spec import align
from deep_gemm.testing import guarded


@pytest.mark.parametrize(
    ("x", "size", "expected"), [(1, 4, 4), (4, 4, 4), (5, 4, 8), (0, 4, 0), (3, 1, 16), (9, 2, 16)]
)
def test_tma_aligned_size(x: int, size: int, expected: int) -> None:
    assert get_tma_aligned_size(x, size) == expected


@pytest.mark.parametrize("size", [0, 3, 32])
def test_element_sizes_that_do_not_exist(size: int) -> None:
    with pytest.raises(InvalidInputError, match=f"element_size must be .* is {size}"):
        get_tma_aligned_size(8, size)


@settings(deadline=None)
@given(mn=st.integers(0, 70), columns=st.integers(0, 9), groups=st.none() | st.integers(0, 4), transposed=st.booleans())
def test_mn_major(mn: int, columns: int, groups: int | None, transposed: bool) -> None:
    leading = () if groups is None else (groups,)
    sf = torch.rand(*leading, columns, mn).mT if transposed else torch.rand(*leading, mn, columns)
    out = get_mn_major_tma_aligned_tensor(sf)
    aligned = align(mn, 4)
    assert out.shape == sf.shape
    assert torch.equal(out, sf)
    assert out.stride() == ((1, aligned) if groups is None else (aligned * columns, 1, aligned))
    assert out.dtype == torch.float32
    if groups is None:
        assert scales_stride(out) is not None
    assert get_mn_major_tma_aligned_tensor(out) is out


def test_a_slice_is_copied_because_its_columns_are_too_far_apart() -> None:
    whole = get_mn_major_tma_aligned_tensor(torch.rand(40, 3))
    part = get_mn_major_tma_aligned_tensor(whole[:13])
    assert part.stride() == (1, 16)
    assert torch.equal(part, whole[:13])


def test_a_misaligned_tensor_is_copied() -> None:
    sf = guarded((8, 3), torch.float32, "cpu", (1, 8), offset=4).tensor
    sf.fill_(2.0)
    out = get_mn_major_tma_aligned_tensor(sf)
    assert out is not sf
    assert out.data_ptr() % 16 == 0
    assert torch.equal(out, sf)


@pytest.mark.parametrize(
    ("sf", "words"),
    [
        (torch.ones(4), "sf must have 2 or 3 dimensions, but it has 1"),
        (torch.ones(4, 4, 4, 4), "has 4"),
        (torch.ones(4, 4, dtype=torch.int32), "sf must be a torch.float32 tensor, but it is torch.int32"),
        ([[1.0]], "sf is a list. Pass the scales alone"),
    ],
)
def test_mistakes(sf: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        get_mn_major_tma_aligned_tensor(sf)


@pytest.mark.parametrize("groups", [None, 1, 3])
@pytest.mark.parametrize(
    ("recipe", "is_sfa"), [((1, 128, 128), True), ((1, 128), None), ((1, 1, 128), True), ((1, 1, 128), False)]
)
@pytest.mark.parametrize("disable_ue8m0_cast", [False, True])
def test_scales_per_row_become_mn_major(
    recipe: tuple[int, ...], is_sfa: bool | None, groups: int | None, disable_ue8m0_cast: bool
) -> None:
    leading = () if groups is None else (groups,)
    sf = torch.rand(*leading, 50, 3)
    out = transform_sf_into_required_layout(
        sf, 50, 272, recipe, num_groups=groups, is_sfa=is_sfa, disable_ue8m0_cast=disable_ue8m0_cast
    )
    assert torch.equal(out, sf)
    assert out.stride()[-2:] == (1, 52)


@pytest.mark.parametrize("groups", [None, 1, 3])
@pytest.mark.parametrize(("recipe", "is_sfa"), [((1, 128, 128), False), ((128, 128), None), ([1, 128, 128], False)])
def test_scales_of_blocks_stay_as_they_are(recipe: Any, is_sfa: bool | None, groups: int | None) -> None:
    leading = () if groups is None else (groups,)
    sf = torch.rand(*leading, 2, 3)
    assert transform_sf_into_required_layout(sf, 200, 272, recipe, groups, is_sfa) is sf


def test_rows_of_padding_do_no_harm() -> None:
    sf = torch.rand(50, 3)
    out = transform_sf_into_required_layout(sf, 50, 384, (1, 128), psum_layout=torch.zeros(2, dtype=torch.int32))
    assert torch.equal(out, sf)


INVALID: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: transform_sf_into_required_layout(torch.ones(50, 3), 50, 272, (1, 128, 128)),
        "is_sfa must be True or False",
    ),
    (
        lambda: transform_sf_into_required_layout(torch.ones(50, 3), 50, 272, (1, 128), is_sfa=True),
        "is_sfa must be left",
    ),
    (lambda: transform_sf_into_required_layout(torch.ones(50, 3), 50, 272, 128), "recipe must be 3 positive integers"),
    (
        lambda: transform_sf_into_required_layout(torch.ones(50, 3), 50, 272, (1, 0)),
        "recipe must be 2 positive integers",
    ),
    (lambda: transform_sf_into_required_layout(torch.ones(50, 2), 50, 272, (1, 128)), r"shape \(50, 3\).*\(50, 2\)"),
    (
        lambda: transform_sf_into_required_layout(torch.ones(1, 50, 3), 50, 272, (1, 128)),
        r"shape \(50, 3\).*\(1, 50, 3\)",
    ),
    (lambda: transform_sf_into_required_layout(torch.ones(50, 3), 50, 272, (1, 128), 1), r"shape \(1, 50, 3\)"),
    (
        lambda: transform_sf_into_required_layout(torch.ones(50, 3).half(), 50, 272, (1, 128)),
        "float32, but it is .*float16",
    ),
    (lambda: transform_sf_into_required_layout(None, 50, 272, (1, 128)), "sf must be a torch.Tensor.*NoneType"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("index", range(len(INVALID)))
def test_mistakes_in_a_transform(index: int) -> None:
    call, words = INVALID[index]
    with pytest.raises(InvalidInputError, match=words):
        call()


@pytest.mark.parametrize(
    ("sf", "recipe", "words"),
    [
        (torch.ones(1, 1, dtype=torch.int32), (128, 128), "packed UE8M0"),
        (torch.ones(50, 9), (1, 32), "1 x 32 are not supported"),
        (torch.ones(1, 9), (64, 32), "64 x 32"),
    ],
)
def test_what_hopper_cannot_use(sf: torch.Tensor, recipe: tuple[int, int], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        transform_sf_into_required_layout(sf, 50, 272, recipe)


def test_the_alignment_of_groups_can_be_set_and_restored() -> None:
    import deep_gemm

    before = deep_gemm.get_mk_alignment_for_contiguous_layout()
    assert before == 128
    try:
        deep_gemm.set_mk_alignment_for_contiguous_layout(64)
        assert deep_gemm.get_mk_alignment_for_contiguous_layout() == 64
        assert deep_gemm.get_m_alignment_for_contiguous_layout() == 64
        assert deep_gemm.get_k_alignment_for_contiguous_layout() == 64
        for wrong in (0, -16, 24, 64.0, True, None):
            with pytest.raises(InvalidInputError, match="alignment must be a positive multiple of 16"):
                deep_gemm.set_mk_alignment_for_contiguous_layout(wrong)  # type: ignore[arg-type]
    finally:
        deep_gemm.set_mk_alignment_for_contiguous_layout(before)
    theoretical = deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout
    assert (
        theoretical() == theoretical(200) == theoretical(expected_m=200, num_groups=4) == theoretical(4096, 32) == 128
    )


@pytest.mark.parametrize("groups", [None, 3])
@pytest.mark.parametrize(("mn", "columns"), [(1, 1), (5, 4), (130, 7), (64, 56), (3, 0)])
def test_exponents_are_packed_four_in_a_word(mn: int, columns: int, groups: int | None) -> None:
    shape = (mn, columns) if groups is None else (groups, mn, columns)
    powers = torch.randint(-20, 20, shape)
    sf = 2.0**powers
    packed = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(sf)
    assert packed.dtype == torch.int32
    assert packed.shape == (*shape[:-1], -(-columns // 4))
    assert packed.stride()[-2:] == (1, -(-mn // 4) * 4)
    unpacked = deep_gemm.utils.math.unpack_ue8m0_from_int(packed.contiguous())
    assert torch.equal(unpacked[..., :columns], sf)
    assert bool((unpacked[..., columns:] == 0).all())


def test_packing_is_undone_by_unpacking() -> None:
    x = 2.0 ** torch.randint(-100, 100, (3, 8))
    assert torch.equal(deep_gemm.utils.math.unpack_ue8m0_from_int(deep_gemm.utils.math.pack_ue8m0_to_int(x)), x)
    with pytest.raises(InvalidInputError, match="multiple of four columns"):
        deep_gemm.utils.math.pack_ue8m0_to_int(x[:, :3])
    with pytest.raises(InvalidInputError, match="packed must be an int32 tensor"):
        deep_gemm.utils.math.unpack_ue8m0_from_int(x)


@pytest.mark.parametrize(("mn", "ks"), [(8, [128, 0, 1024, 640]), (130, [512]), (4, [])])
def test_exponents_of_k_groups_begin_a_word_for_each_group(mn: int, ks: list[int]) -> None:
    sf = 2.0 ** torch.randint(-20, 20, (sum(ks) // 128, mn))
    layout = torch.tensor(ks, dtype=torch.int32)
    for rest in ((), (None,), (128, False, False)):
        packed = deep_gemm.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(sf, layout, ks, 128, *rest)
        assert packed.dtype == torch.int32
        assert packed.stride() == (-(-mn // 4) * 4, 1)
        groups = packed.split([-(-k // 512) for k in ks]) if ks else []
        for group, part in zip(groups, sf.split([k // 128 for k in ks]), strict=True):
            if len(part):
                expected = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(part.t())
                assert torch.equal(group, expected.t())


def test_sizes_of_k_groups_have_two_names() -> None:
    pack = deep_gemm.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor
    sf = 2.0 ** torch.randint(-20, 20, (7, 8))
    wanted = pack(sf, None, [256, 640], 128)
    assert torch.equal(pack(sf, None, ks=[256, 640], gran_k=128), wanted)
    assert torch.equal(pack(sf, grouped_layout=None, ks=(256, 640)), wanted)
    with pytest.raises(InvalidInputError, match="ks_cpu and ks are two names of one argument"):
        pack(sf, None, [256, 640], 128, ks=[256, 640])
    with pytest.raises(InvalidInputError, match="ks_cpu must be a list of multiples of gran_k = 128"):
        pack(sf, None)


def test_other_layouts_of_k_groups_are_refused_in_words() -> None:
    pack = deep_gemm.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor
    with pytest.raises(UnsupportedError, match="use_psum_layout and use_padded_sf_layout must be False"):
        pack(torch.ones(1, 4), None, [128], 128, 128, True)
    for wrong in ([256], [64, 64], "128", 128):
        with pytest.raises(InvalidInputError, match="ks_cpu must be a list of multiples of gran_k = 128"):
            pack(torch.ones(1, 4), None, wrong, 128)


def test_names_that_clients_import_from_the_package() -> None:
    assert deep_gemm.ceil_to_ue8m0 is deep_gemm.utils.math.ceil_to_ue8m0
    assert deep_gemm.pack_ue8m0_to_int is deep_gemm.utils.math.pack_ue8m0_to_int
