// Rasterisation: the order of tiles. The host computes the divisors (see kernels/raster.py), because integer divisions would
// cost a CTA about 300 cycles a tile.
#pragma once
#include "types.cuh"

// Division of numbers below 2^31 by an invariant `value`: with 2^(shift - 1) < value <= 2^shift, magic is
// 2^(31 + shift) / value, rounded up (Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994).
struct Divisor {
  u32 value, magic, shift;
  DG_DEVICE u32 quotient(u32 x) const { return __umulhi(x * 2, magic) >> shift; }
};

// Selects by value. A selected address would make its loads from constant memory wait for the condition, one after the other.
DG_DEVICE Divisor either(bool first, const Divisor& a, const Divisor& b) {
  const Divisor x{opaque(a.value), opaque(a.magic), opaque(a.shift)}, y{opaque(b.value), opaque(b.magic), opaque(b.shift)};
  return {first ? x.value : y.value, first ? x.magic : y.magic, first ? x.shift : y.shift};
}

// Tiles are cut into bands of `band` columns; the last band may be narrower. A band is cut into groups of `height` rows; the last
// group has `last_height`. Inside a group tiles run along m first. `strip` is the number of tiles in a whole band, `group` and
// `last_group` that in a group of a whole and of the last band.
struct Raster {
  u32 rows, columns, band;  // in tiles
  Divisor last_height, height, strip, group, last_group;

  DG_DEVICE void locate(u32 index, u32& row, u32& column) const {
    if (band == columns && last_height.value == rows) {  // one band and one group: a fast path, as launches with few tiles are short
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

// Where columns of a product lie in a D whose heads have columns more in the middle: each `head` of the product's columns ends with
// `right` columns that come after `mid` others.
struct HeadColumns {
  Divisor head;
  u32 mid, right;
  DG_DEVICE u32 place(u32 column) const { return column + head.quotient(column + right) * mid; }
};

// The order of tiles of several products of equal size: those of one product after the other, each product's in the same order.
struct BatchRaster {
  u32 count;     // tiles in all
  Divisor part;  // the tiles of a product
  Raster tiles;
};

// Of products that are summed, which have the same tiles. All blocks of K of a tile are dealt out: `share` each, and the first `more` get
// one more.
struct SumRaster {
  u32 share, more;
  Divisor part;  // the blocks of K of a product
  Raster tiles;
};
