// In which order tiles are walked. The host works out what is divided by (see kernels/raster.py): divisions would cost a
// CTA some 300 cycles a tile.
#pragma once
#include "types.cuh"

// Division of numbers below 2^31 by one that is known before: with 2^(shift - 1) < value <= 2^shift, magic is
// 2^(31 + shift) / value, rounded up (Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994).
struct Divisor {
  u32 value, magic, shift;
  DG_DEVICE u32 quotient(u32 x) const { return __umulhi(x * 2, magic) >> shift; }
};

// By value: an address that depends on the choice would be read through only after it, one constant after the other.
DG_DEVICE Divisor either(bool first, const Divisor& a, const Divisor& b) {
  const Divisor x{opaque(a.value), opaque(a.magic), opaque(a.shift)}, y{opaque(b.value), opaque(b.magic), opaque(b.shift)};
  return {first ? x.value : y.value, first ? x.magic : y.magic, first ? x.shift : y.shift};
}

// Bands of `band` tiles along n, through all `rows` along m, the last band of what is left; inside a band groups of some
// rows, m first inside a group. `strip` is a whole band's tiles, `group` and `last_group` those of a group in a whole and in
// the last band, `height` and `last_height` the rows of a whole and of the last group.
struct Raster {
  u32 rows, columns, band;  // in tiles
  Divisor last_height, height, strip, group, last_group;

  DG_DEVICE void locate(u32 index, u32& row, u32& column) const {
    if (band == columns && last_height.value == rows) {  // few tiles, whose CTAs have little time: one band, one group
      column = last_height.quotient(index);
      row = index - column * rows;
      return;
    }
    const u32 number = strip.quotient(index), first = number * band;
    const Divisor of_group = either(first + band <= columns, group, last_group);
    const u32 in_band = index - number * strip.value, top = of_group.quotient(in_band);
    const u32 in_group = in_band - top * of_group.value, above = top * height.value;
    const Divisor of_column = either(above + height.value <= rows, height, last_height);
    const u32 right = of_column.quotient(in_group);
    column = first + right;
    row = above + in_group - right * of_column.value;
  }
};
