// Functions of the rows of 16-bit matrices: elementwise ones, and norms. Memory bandwidth limits them. Arithmetic is float32, and
// the result is rounded once: to 16 bits, or to FP8 with a scale for each row per 128 columns, as casts do it.
#pragma once
#include "activation.cuh"
#include "quantize.cuh"

enum : u32 { kTargetE4m3 = 3 };  // what is written: this, or one of `Source`

// A matrix that is read, whose rows are `stride` elements apart. If it is 0, one row serves for all.
struct RowsInput {
  const u8* elements;
  i64 stride;
};

struct RowsOutput {
  QuantizedOutput to;  // its stride is in elements; scales only with FP8
  ScaleRule rule;
};

// A thread's place in the tile of its CTA. A row has kLanes threads, which have kChunks runs of eight columns each. With kAligned,
// all rows begin at multiples of 16 bytes and have a multiple of eight columns. Otherwise elements are read and written singly.
template <u32 kSource, u32 kTarget, bool kAligned, u32 kTileRows, u32 kTileColumns, u32 kThreads>
struct RowsTile {
  enum : u32 { kLanes = kThreads / kTileRows, kChunks = kTileColumns / (8 * kLanes), kColumns = kTileColumns };
  enum : u32 { kWarps = kThreads / 32 };
  static_assert(kLanes % 16 == 0 && kLanes * kTileRows == kThreads && kChunks * 8 * kLanes == kTileColumns && 16 % kChunks == 0);
  static_assert(kTileRows == 1 || kLanes <= 32);
  using Packed = EightElements<kSource, false>;
  using Floats = EightElements<kSourceF32, false>;

  u32 rows, columns, row, lane, first = 0;  // first: column of the tile

  DG_DEVICE RowsTile(u32 rows, u32 columns) : rows(rows), columns(columns), lane(threadIdx.x % kLanes) {}

  DG_DEVICE void begin(u32 group) { row = group * kTileRows + threadIdx.x / kLanes; }
  DG_DEVICE u32 column(u32 chunk) const { return first + (chunk * kLanes + lane) * 8; }

  // How many of the eight elements from a column on exist.
  DG_DEVICE u32 exist(u32 column) const {
    return row < rows && column < columns ? (kAligned ? 8 : min_of(columns - column, 8)) : 0;
  }

  static DG_DEVICE u32 pair(float low, float high) { return to_pair<kSource>(low, high); }

  // Loads eight elements of this row, or of another; those from the `exist`th on are zeros.
  DG_DEVICE void load(const RowsInput& from, u32 column, u32 exist, Packed& v) const { load(from, row, column, exist, v); }
  static DG_DEVICE void load(const RowsInput& from, u32 row, u32 column, u32 exist, Packed& v) {
    const u8* at = from.elements + (row * from.stride + column) * 2;
    if constexpr (kAligned) {
      load_sixteen(at, exist != 0, v.words);
    } else {
#pragma unroll
      for (u32 i = 0; i < 4; ++i) v.words[i] = 0;
#pragma unroll
      for (u32 i = 0; i < 8; ++i)
        if (i < exist) v.words[i / 2] |= static_cast<u32>(reinterpret_cast<const u16*>(at)[i]) << i % 2 * 16;
    }
  }

  // Stores eight elements of `kBytes` bytes, or the first `exist` of them.
  template <u32 kBytes>
  static DG_DEVICE void store(u8* at, u32 exist, const u32 (&words)[2 * kBytes]) {
    if constexpr (kAligned) {
      if (exist == 0) return;
      if constexpr (kBytes == 1) {
        asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(words[0]), "r"(words[1]) : "memory");
      } else {
#pragma unroll
        for (u32 i = 0; i < 2 * kBytes; i += 4) store_16(at + 4 * i, Bytes16{words[i], words[i + 1], words[i + 2], words[i + 3]});
      }
    } else {
#pragma unroll
      for (u32 i = 0; i < 8; ++i) {
        const u32 bits = words[i * kBytes / 4] >> i * kBytes % 4 * 8;
        if (i >= exist) continue;
        if constexpr (kBytes == 1) at[i] = static_cast<u8>(bits);
        else if constexpr (kBytes == 2) reinterpret_cast<u16*>(at)[i] = static_cast<u16>(bits);
        else reinterpret_cast<u32*>(at)[i] = bits;
      }
    }
  }

  // Stores the tile's values of this thread. Those that do not exist must be zeros.
  DG_DEVICE void emit(const RowsOutput& out, const Floats (&v)[kChunks]) const {
    if constexpr (kTarget == kTargetE4m3) {
      // The thread finds the scale of one of its chunks: see RowScales.
      using Scales = RowScales<Floats, kChunks>;
      const u32 part = threadIdx.x % 16, own = column(part / Scales::kSame) / 128;
      const Scales scales(v, part, out.rule);
      if (part % Scales::kSame == 0 && row < rows && own * 128 < columns) out.to.scale(row, own, scales.scale);
#pragma unroll
      for (u32 c = 0; c < kChunks; ++c) {
        const float inverse = scales.inverse_of(c);
        u32 words[2];
#pragma unroll
        for (u32 i = 0; i < 2; ++i)
          words[i] = to_e4m3(v[c].get(4 * i) * inverse, v[c].get(4 * i + 1) * inverse, v[c].get(4 * i + 2) * inverse,
                             v[c].get(4 * i + 3) * inverse);
        store<1>(out.to.values + row * out.to.stride + column(c), exist(column(c)), words);
      }
    } else {
#pragma unroll
      for (u32 c = 0; c < kChunks; ++c) {
        u8* const at = out.to.values + (row * out.to.stride + column(c)) * (kTarget == kSourceF32 ? 4 : 2);
        if constexpr (kTarget == kSourceF32) {
          store<4>(at, exist(column(c)), v[c].words);
        } else {
          u32 words[4];
#pragma unroll
          for (u32 i = 0; i < 4; ++i) words[i] = to_pair<kTarget>(v[c].get(2 * i), v[c].get(2 * i + 1));
          store<2>(at, exist(column(c)), words);
        }
      }
    }
  }
};

// gelu(x + y)
template <bool kTanh>
struct AddGelu {
  enum : u32 { kInputs = 2, kWidth = 1, kBiases = 0 };
  DG_DEVICE void begin(u32, u32) {}
  template <class Packed>
  DG_DEVICE float value(const Packed (&in)[2], u32 i) const {
    const float sum = __fadd_rn(in[0].get(i), in[1].get(i));
    return kTanh ? gelu_tanh(sum) : gelu_erf(sum);
  }
};

// x * y + z
struct MulAdd {
  enum : u32 { kInputs = 3, kWidth = 1, kBiases = 0 };
  DG_DEVICE void begin(u32, u32) {}
  template <class Packed>
  DG_DEVICE float value(const Packed (&in)[3], u32 i) const {
    return __fmaf_rn(in[0].get(i), in[1].get(i), in[2].get(i));
  }
};

// gate * sigmoid(1.702 gate) * (up + 1), of which both are held as by `silu_mul`: the activation of gpt-oss.
DG_DEVICE float swigluoai_mul(float gate, float up, float limit) {
  constexpr float kAlpha = 1.702f * 1.4426950408889634f;
  gate = smaller(gate, limit);
  const float scaled = __fmul_rn(gate, sigmoid_exp2(__fmul_rn(gate, -kAlpha)));
  return __fmul_rn(scaled, __fadd_rn(-smaller(-smaller(up, limit), limit), 1.0f));
}

// silu(min(gate, limit)) * clamped(up), times a factor of the row. Gate and up are two inputs. With kInterleaved they are neighbours
// in one, of whose sixteen columns the second input has the last eight. With kOai it is gpt-oss's activation. With kBiased the row of
// the row's group in two more inputs is added before; a group below 0 has none.
template <bool kInterleaved, bool kFactored, bool kOai = false, bool kBiased = false>
struct SiluMul {
  enum : u32 { kBiases = kBiased ? 2 : 0, kInputs = 2 + kBiases, kWidth = kInterleaved ? 2 : 1 };
  float limit;
  const float* factors;
  const int* groups;
  float factor = 1.0f;
  int group = -1;
  DG_DEVICE void begin(u32 row, u32 rows) {
    if constexpr (kBiased)
      if (row < rows) group = groups[row];
    if constexpr (kFactored)
      if (row < rows) factor = factors[row];
  }
  template <class Packed>
  DG_DEVICE float value(const Packed (&in)[kInputs], u32 i) const {
    float gate = kInterleaved ? in[i / 4].get(2 * i % 8) : in[0].get(i);
    float up = kInterleaved ? in[i / 4].get(2 * i % 8 + 1) : in[1].get(i);
    if constexpr (kBiased) {
      gate = __fadd_rn(gate, kInterleaved ? in[2 + i / 4].get(2 * i % 8) : in[2].get(i));
      up = __fadd_rn(up, kInterleaved ? in[2 + i / 4].get(2 * i % 8 + 1) : in[3].get(i));
    }
    const float product = kOai ? swigluoai_mul(gate, up, limit) : silu_mul(gate, up, limit);
    return kFactored ? __fmul_rn(product, factor) : product;
  }
};

// A CTA computes one tile. Tiles of a row follow each other.
template <class Tile, class Function>
struct Elementwise {
  enum : u32 { kInputs = Function::kInputs, kMatrices = kInputs - Function::kBiases };
  using Inputs = typename Tile::Packed[Tile::kChunks][kInputs];
  Function function;

  DG_DEVICE void run(Tile tile, const RowsInput (&from)[kInputs], const RowsOutput& out) {
    const u32 across = ceil_div(tile.columns, Tile::kColumns);
    tile.begin(blockIdx.x / across);
    tile.first = blockIdx.x % across * Tile::kColumns;
    wait_for_previous_kernel();
    allow_next_kernel();
    function.begin(tile.row, tile.rows);
    compute(tile, from, out);
  }

  // The tile, of which row and column are known.
  DG_DEVICE void compute(const Tile& tile, const RowsInput (&from)[kInputs], const RowsOutput& out) const {
    Inputs in;
    load<0, kMatrices>(tile, tile.row, true, from, in);
    if constexpr (kMatrices < kInputs) load<kMatrices, kInputs>(tile, function.group, function.group >= 0, from, in);
    typename Tile::Floats v[Tile::kChunks];
#pragma unroll
    for (u32 c = 0; c < Tile::kChunks; ++c)
#pragma unroll
      for (u32 i = 0; i < 8; ++i) v[c].words[i] = __float_as_uint(function.value(in[c], i));
    tile.emit(out, v);
  }

 private:
  // Loads the tile's columns of inputs kFirst to kLast - 1, from `row` of theirs; zeros if they have no such row.
  template <u32 kFirst, u32 kLast>
  static DG_DEVICE void load(const Tile& tile, u32 row, bool exist, const RowsInput (&from)[kInputs], Inputs& in) {
#pragma unroll
    for (u32 c = 0; c < Tile::kChunks; ++c) {
      const u32 all = exist ? tile.exist(tile.column(c)) * Function::kWidth : 0;
#pragma unroll
      for (u32 i = kFirst; i < kLast; ++i) {
        const u32 some = Function::kWidth == 1 ? all : i % 2 == 0 ? min_of(all, 8) : all - min_of(all, 8);
        Tile::load(from[i], row, tile.column(c) * Function::kWidth, some, in[c][i]);
      }
    }
  }
};

// x / sqrt(mean(x^2) + eps) * weight, or with kCentred (x - mean(x)) / sqrt(variance(x) + eps) * weight [+ bias]. Inputs: x,
// [residual], weight, [bias]. With kResidual, x is the sum of both, rounded, and takes the residual's place.
//
// A CTA has whole rows: all their columns in registers if one tile covers them. Wider rows are read again for each of the steps.
// Sums have one order for a number of columns, whatever the number of rows.
template <class Tile, bool kCentred, bool kResidual, bool kBias>
struct Norm {
  enum : u32 { kWeight = 1 + kResidual, kInputs = kWeight + 1 + kBias };
  using Packed = typename Tile::Packed;
  float eps;

  DG_DEVICE void run(Tile tile, const RowsInput (&from)[kInputs], const RowsOutput& out) const {
    const u32 tiles = ceil_div(tile.columns, Tile::kColumns);
    const float columns = static_cast<float>(tile.columns);
    tile.begin(blockIdx.x);
    Packed x[Tile::kChunks], weight[Tile::kChunks], bias[Tile::kChunks];
    float sums[4] = {}, mean = 0.0f;
    wait_for_previous_kernel();
    allow_next_kernel();
#pragma unroll 1
    for (u32 i = 0; i < tiles; ++i, tile.first += Tile::kColumns) {
      load(tile, from[0], x);
      Packed residual[Tile::kChunks];
      if constexpr (kResidual) load(tile, from[1], residual);
      if (tiles == 1) load_parameters(tile, from, weight, bias);  // before the sums, which wait for x
      if constexpr (kResidual) add(tile, from[1], x, residual);
#pragma unroll
      for (u32 c = 0; c < Tile::kChunks; ++c)
#pragma unroll
        for (u32 j = 0; j < 8; ++j)
          sums[j % 4] = kCentred ? __fadd_rn(sums[j % 4], x[c].get(j)) : __fmaf_rn(x[c].get(j), x[c].get(j), sums[j % 4]);
    }
    // From now on the tile that was read last is the first one of each step.
    float total = added_up<0>(sums);
    if constexpr (kCentred) {
      mean = __fdiv_rn(total, columns);
      float squares[4] = {};
#pragma unroll 1
      for (u32 i = tiles; i-- > 0;) {
        tile.first -= Tile::kColumns;
        if (i + 1 < tiles) load(tile, from[kResidual], x);
#pragma unroll
        for (u32 c = 0; c < Tile::kChunks; ++c)
#pragma unroll
          for (u32 j = 0; j < 8; ++j) {
            const float difference = __fsub_rn(x[c].get(j), mean);
            if (j < tile.exist(tile.column(c))) squares[j % 4] = __fmaf_rn(difference, difference, squares[j % 4]);
          }
      }
      total = added_up<1>(squares);
    }
    const float scale = __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(total, columns), eps)));
#pragma unroll 1
    for (u32 i = 0; i < tiles; ++i) {
      if constexpr (!kCentred) tile.first -= Tile::kColumns;
      if (tiles > 1) {
        if (i > 0) load(tile, from[kResidual], x);
        load_parameters(tile, from, weight, bias);
      }
      typename Tile::Floats v[Tile::kChunks];
#pragma unroll
      for (u32 c = 0; c < Tile::kChunks; ++c)
#pragma unroll
        for (u32 j = 0; j < 8; ++j) {
          float value = kCentred ? __fsub_rn(x[c].get(j), mean) : x[c].get(j);
          value = __fmul_rn(value, scale);
          value = kBias ? __fmaf_rn(value, weight[c].get(j), bias[c].get(j)) : __fmul_rn(value, weight[c].get(j));
          v[c].words[j] = j < tile.exist(tile.column(c)) ? __float_as_uint(value) : 0;
        }
      tile.emit(out, v);
      if constexpr (kCentred) tile.first += Tile::kColumns;
    }
  }

 private:
  static DG_DEVICE void load(const Tile& tile, const RowsInput& from, Packed (&v)[Tile::kChunks]) {
#pragma unroll
    for (u32 c = 0; c < Tile::kChunks; ++c) tile.load(from, tile.column(c), tile.exist(tile.column(c)), v[c]);
  }

  static DG_DEVICE void load_parameters(const Tile& tile, const RowsInput (&from)[kInputs], Packed (&weight)[Tile::kChunks],
                                        Packed (&bias)[Tile::kChunks]) {
    load(tile, from[kWeight], weight);
    if constexpr (kBias) load(tile, from[kWeight + 1], bias);
  }

  // x becomes the sum, which is also stored.
  static DG_DEVICE void add(const Tile& tile, const RowsInput& to, Packed (&x)[Tile::kChunks],
                            const Packed (&residual)[Tile::kChunks]) {
#pragma unroll
    for (u32 c = 0; c < Tile::kChunks; ++c) {
#pragma unroll
      for (u32 i = 0; i < 4; ++i)
        x[c].words[i] = Tile::pair(__fadd_rn(x[c].get(2 * i), residual[c].get(2 * i)),
                                   __fadd_rn(x[c].get(2 * i + 1), residual[c].get(2 * i + 1)));
      u8* const at = const_cast<u8*>(to.elements) + (tile.row * to.stride + tile.column(c)) * 2;
      Tile::template store<2>(at, tile.exist(tile.column(c)), x[c].words);
    }
  }

  // The row's sum, the same in all of its threads: of a thread, then of a warp, then of warps in their order. Each kStep has shared
  // memory of its own, so that one barrier is enough.
  template <u32 kStep>
  static DG_DEVICE float added_up(const float (&sums)[4]) {
    float sum = __fadd_rn(__fadd_rn(sums[0], sums[1]), __fadd_rn(sums[2], sums[3]));
#pragma unroll
    for (u32 distance = min_of(Tile::kLanes, 32) / 2; distance > 0; distance /= 2)
      sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, distance));
    if constexpr (Tile::kLanes > 32) {
      __shared__ float warps[Tile::kWarps];
      if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
      __syncthreads();
      sum = warps[0];
#pragma unroll
      for (u32 i = 1; i < Tile::kWarps; ++i) sum = __fadd_rn(sum, warps[i]);
    }
    return sum;
  }
};
