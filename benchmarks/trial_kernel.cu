// A kernel that never changes: what compiling others costs is measured in compilations of this one (see compile_cost.py). It has
// what takes compilers time in a GEMM: nested templates, unrolled loops over registers, shuffles and shared memory.
template <int kRows, int kColumns>
struct Sums {
  float value[kRows][kColumns];

  template <int kStep>
  __device__ void add(const float* shared, int lane) {
    float a[kRows], b[kColumns];
#pragma unroll
    for (int r = 0; r < kRows; ++r) a[r] = shared[(r * 32 + lane) * 8 + kStep];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) b[c] = __shfl_sync(0xffffffffu, a[c % kRows], c + kStep);
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kColumns; ++c) value[r][c] += a[r] * b[c];
    if constexpr (kStep > 0) add<kStep - 1>(shared, lane);
  }
};

extern "C" __global__ void __launch_bounds__(128) trial(float* out, const float* in, int blocks) {
  extern __shared__ float shared[];
  Sums<4, 16> sums{};
  for (int block = 0; block < blocks; ++block) {
    shared[threadIdx.x] = in[block * 128 + threadIdx.x];
    __syncthreads();
    sums.add<7>(shared, threadIdx.x % 32);
    __syncthreads();
  }
#pragma unroll
  for (int r = 0; r < 4; ++r)
#pragma unroll
    for (int c = 0; c < 16; ++c) out[(r * 16 + c) * 128 + threadIdx.x] = sums.value[r][c];
}
