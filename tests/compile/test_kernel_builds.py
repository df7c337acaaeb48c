"""The readers of machine code, tested with made-up code."""

from kernel_builds import moves_to_uniform


def test_moves_for_scale_factors_are_told_from_those_for_operands() -> None:
    move, product = "R2UR UR8, R1", "QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24"
    assert moves_to_uniform([move, product, "FMUL R2, R3, UR8"]) == [move]
    assert moves_to_uniform([move, "UIADD3 UR8, UR8, 0x2, URZ", "FMUL R2, R3, UR8"]) == [move]
    for multiply in (["FMUL R2, R3, UR8"], ["UMOV UR9, UR8", "FMUL R2, R3, UR9"]):
        assert moves_to_uniform([move, *multiply, product]) == []
        assert moves_to_uniform([*multiply, product, move]) == [], "in the next round"
    assert moves_to_uniform([move, "UMOV UR9, UR8", "QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR9], R24"]) == [move]
