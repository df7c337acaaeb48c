"""The readers of machine code, tested with made-up code."""

from kernel_builds import in_one_bank, moves_to_uniform


def test_moves_for_loads_are_told_from_those_for_operands() -> None:
    load = ["R2UR UR16, R2", "R2UR UR17, R3", "LDG.E.CONSTANT R6, desc[UR16][R26.64]"]
    operands = [
        "@!P1 R2UR UR16, R8",
        "UIADD3 UR20, UR16, 0x2, URZ",
        "QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR20], R24",
    ]
    assert moves_to_uniform(load + operands) == operands[:1]
    assert moves_to_uniform(operands + load) == operands[:1]
    assert moves_to_uniform(["R2UR UR8, R1", "QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24"]) == ["R2UR UR8, R1"]
    assert moves_to_uniform(["R2UR UR8, R1"]) == ["R2UR UR8, R1"], "used in the next round"


def test_moves_for_scale_factors_are_told_from_those_for_operands() -> None:
    move, product = "R2UR UR8, R1", "QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24"
    assert moves_to_uniform([move, product, "FMUL R2, R3, UR8"]) == [move]
    assert moves_to_uniform([move, "UIADD3 UR8, UR8, 0x2, URZ", "FMUL R2, R3, UR8"]) == [move]
    for multiply in (["FMUL R2, R3, UR8"], ["UMOV UR9, UR8", "FMUL R2, R3, UR9"]):
        assert moves_to_uniform([move, *multiply, product]) == []
        assert moves_to_uniform([*multiply, product, move]) == [], "in the next round"
    assert moves_to_uniform([move, "UMOV UR9, UR8", "QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR9], R24"]) == [move]


def test_a_sum_and_its_product_in_one_bank_are_told_by_the_factor_that_is_kept() -> None:
    apart = ["FFMA R111, R24, R154.reuse, R111", "FFMA R110, R154.reuse, R25, R110", "FFMA R7, R8, R9, R7"]
    together = ["FFMA R112, R24, R155.reuse, R112", "FFMA R110, R155.reuse, R24, R110", "FFMA R8, R6, R9, R8"]
    others = ["FFMA R1, R2, R3, R4", "FMUL R8, R6, R9"]  # of no sum
    assert in_one_bank([*apart, *together, *others]) == together
