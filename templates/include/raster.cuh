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

// Bands of `band` tiles along n, the last one of `last`, and of all tiles along m, `strip` of them in a whole band; m
// first inside a band, so that what runs at one time reads few distinct rows of A and of B and finds them in L2.
struct Raster {
  Divisor strip, band, last;

  DG_DEVICE void locate(u32 index, u32 tiles_n, u32& row, u32& column) const {
    const u32 number = strip.quotient(index), inside = index - number * strip.value;
    const u32 first = number * band.value;
    if (first + band.value <= tiles_n) {
      row = band.quotient(inside);
      column = first + inside - row * band.value;
    } else {
      row = last.quotient(inside);
      column = first + inside - row * last.value;
    }
  }
};
