// A CPU that runs one CTA at a time of a kernel without wgmma and TMA, for emulation.py. Each thread is a fiber. What a GPU leaves to
// chance is an error here: reads of shared memory while a copy to it is in flight; accesses of two threads, one of them a write, without
// a barrier between them; global memory outside of the rows of an operand; and collectives that not all lanes of a warp reach.
//
// Layouts of fragments are written down from the PTX ISA's sections on mma, ldmatrix and movmatrix, as formulas for one element.
#pragma once
#include <csetjmp>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static  // of a kernel's own names: accesses to it are not checked
#define __align__(x)

void call();  // the kernel, in a thread

namespace cta {
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
enum : u32 { kBase = 1024, kShared = 256 * 1024, kStack = 128 * 1024, kMany = 0xffff };  // kBase: where dynamic shared memory begins

struct Copy {
  u32 to;
  u8 bytes[16];
};
struct Thread {
  u32 index;
  u64 waits_for = 0;  // a count of its warp's or the CTA's barrier
  bool at_barrier = false, done = false;
  jmp_buf context;
  std::unique_ptr<char[]> stack;
  std::vector<std::vector<Copy>> groups;
  std::vector<Copy> open;
};
struct Warp {
  u32 arrived = 0;
  u64 count = 0, synced = 0;  // collectives, and barriers among them: only these order accesses of memory
  const char* what = nullptr;
  void* lanes[32];
};
// Of four bytes of shared memory: who wrote and read them last, and after which barriers. kMany: several threads.
struct Word {
  u64 wrote_cta = ~0ull, wrote_warp = 0, read_cta = ~0ull, read_warp = 0;
  u32 writer = kMany, reader = kMany, read_by = kMany, in_flight = 0;
};
// Rows of an operand. Padding between them is not the operand's.
struct Region {
  u8* base;
  u64 rows, row_bytes, stride;
};

inline u32 threads, shared_bytes;
inline std::vector<Thread> all;
inline std::vector<Warp> warps;
inline std::vector<Word> words;
inline std::vector<Region> regions;
inline u64 barriers, arrived;
inline Thread* current;
inline jmp_buf scheduler;
inline char error[400];
inline void** given;  // the kernel's arguments
alignas(1024) inline u8 memory[kShared];

inline void yield() {
  if (!_setjmp(current->context)) _longjmp(scheduler, 1);
}
[[noreturn]] inline void fail(const char* format, ...) {
  va_list given;
  va_start(given, format);
  char text[300];
  vsnprintf(text, sizeof text, format, given);
  va_end(given);
  if (!error[0]) snprintf(error, sizeof error, "thread %u: %s", current->index, text);
  for (;;) yield();
}

// All lanes of a warp meet; the last one calls `work(pointers)` with what each has given.
template <class Work>
void collective(const char* what, void* given, const Work& work) {
  Warp& warp = warps[current->index / 32];
  if (warp.arrived == 0) warp.what = what;
  if (strcmp(warp.what, what)) fail("%s, where other lanes of the warp are at %s", what, warp.what);
  warp.lanes[current->index % 32] = given;
  if (++warp.arrived == 32) {
    work(warp.lanes);
    warp.arrived = 0;
    ++warp.count;
  } else {
    current->waits_for = warp.count + 1;
    current->at_barrier = false;
    yield();
  }
}
inline void barrier() {
  current->waits_for = barriers + 1;
  if (++arrived == threads) {
    arrived = 0;
    ++barriers;
    for (Warp& warp : warps) ++warp.synced;
  } else {
    current->at_barrier = true;
    yield();
  }
}
inline bool runs(const Thread& x) {
  return !x.done && x.waits_for <= (x.at_barrier ? barriers : warps[x.index / 32].count);
}

// Whether an access of the current thread may come together with an earlier one.
inline bool apart(u64 of_cta, u64 of_warp, u32 who) {
  if (of_cta == ~0ull || who == current->index) return true;
  const u32 mine = current->index / 32;
  return who != kMany && who / 32 == mine ? of_warp < warps[mine].synced : of_cta < barriers;
}
inline void touch(u32 address, u32 bytes, bool writes, bool lands = false) {
  if (address % bytes || address < kBase || address + bytes > kBase + shared_bytes)
    fail("%u bytes of shared memory at %u of %u", bytes, address - kBase, shared_bytes);
  const u64 epoch = warps[current->index / 32].synced;
  for (u32 i = address / 4; i < (address + bytes + 3) / 4; ++i) {
    Word& x = words[i];
    if (x.in_flight && !lands) fail("shared memory at %u is used while a copy to it is in flight", i * 4);
    if (!apart(x.wrote_cta, x.wrote_warp, x.writer)) fail("shared memory at %u was written by thread %u without a barrier", i * 4, x.writer);
    if (writes) {
      // kMany in one warp: `read_by` is the warp then.
      const bool own_warp = x.reader == kMany && x.read_by == current->index / 32;
      if (own_warp ? x.read_warp >= epoch : !apart(x.read_cta, x.read_warp, x.reader)) fail("shared memory at %u is overwritten, and was read without a barrier between", i * 4);
      x.wrote_cta = barriers;
      x.wrote_warp = epoch;
      x.writer = current->index;
    } else {
      const bool same = x.read_cta == barriers;
      x.reader = same && x.reader != current->index ? +kMany : current->index;
      x.read_by = same && x.read_by != current->index / 32 ? +kMany : current->index / 32;
      x.read_cta = barriers;
      x.read_warp = epoch;
    }
  }
}
template <class T>
T read(u32 address) {
  touch(address, sizeof(T), false);
  T x;
  memcpy(&x, memory + address, sizeof(T));
  return x;
}
template <class T>
void write(u32 address, const T& x) {
  touch(address, sizeof(T), true);
  memcpy(memory + address, &x, sizeof(T));
}
inline void global(const void* at, u32 bytes, u32 aligned) {
  for (Region& x : regions) {
    const u64 off = static_cast<const u8*>(at) - x.base;
    if (static_cast<const u8*>(at) < x.base || off >= x.rows * x.stride) continue;
    if (off % x.stride + bytes > x.row_bytes) fail("%u bytes end %llu bytes into a row of %llu", bytes, off % x.stride + bytes, x.row_bytes);
    if (reinterpret_cast<u64>(at) % aligned) fail("an address of global memory is not a multiple of %u", aligned);
    return;
  }
  fail("%u bytes of global memory that are no operand's", bytes);
}
template <class T>
T load(const void* at, u32 aligned = sizeof(T)) {
  global(at, sizeof(T), aligned);
  T x;
  memcpy(&x, at, sizeof(T));
  return x;
}
template <class T>
void store(void* at, const T& x) {
  global(at, sizeof(T), sizeof(T));
  memcpy(at, &x, sizeof(T));
}

inline void start() {
  call();
  for (auto& group : current->groups)
    if (!group.empty()) fail("it ends before its copies have come");
  current->done = true;
  yield();
}
inline void entry(unsigned low, unsigned high) {
  current = reinterpret_cast<Thread*>(static_cast<u64>(high) << 32 | low);
  if (!_setjmp(current->context)) _longjmp(scheduler, 1);
  start();
}

// Runs a CTA: warp by warp, each as far as it goes; the last one first if `backwards`.
inline void run(bool backwards) {
  memset(memory, 0xff, sizeof memory);  // NaN in every format
  words.assign(kShared / 4, Word());
  warps.assign(threads / 32, Warp());
  barriers = arrived = 0;
  for (Thread& x : all) {
    auto stack = std::move(x.stack);
    const u32 index = &x - all.data();
    x = Thread();
    x.index = index;
    x.stack = stack ? std::move(stack) : std::make_unique<char[]>(kStack);
    static ucontext_t made, here;
    getcontext(&made);
    made.uc_stack.ss_sp = x.stack.get();
    made.uc_stack.ss_size = kStack;
    made.uc_link = nullptr;
    const u64 bits = reinterpret_cast<u64>(&x);
    makecontext(&made, reinterpret_cast<void (*)()>(entry), 2, static_cast<unsigned>(bits), static_cast<unsigned>(bits >> 32));
    if (!_setjmp(scheduler)) setcontext(&made);
  }
  for (bool moved = true; moved && !error[0];) {
    moved = false;
    for (u32 i = 0; i < warps.size() && !error[0]; ++i) {
      const u32 warp = backwards ? warps.size() - 1 - i : i;
      for (bool again = true; again && !error[0];) {
        again = false;
        for (volatile u32 lane = 0; lane < 32 && !error[0]; ++lane) {
          Thread& x = all[warp * 32 + lane];
          if (!runs(x)) continue;
          again = moved = true;
          current = &x;
          if (!_setjmp(scheduler)) _longjmp(x.context, 1);
        }
      }
    }
  }
  for (Thread& x : all)
    if (!x.done && !error[0]) snprintf(error, sizeof error, "thread %u waits for others for ever", x.index);
}
}  // namespace cta

struct Place {
  unsigned x = 0, y = 0, z = 0;
};
inline Place blockIdx, gridDim, blockDim;
#define threadIdx (Place{cta::current->index})

// Runs a grid; "" or what went wrong. A region is four numbers: address, rows, bytes of a row, and from one row to the next.
extern "C" const char* emulate(unsigned x, unsigned y, unsigned z, unsigned threads, unsigned shared_bytes, void** arguments,
                               const unsigned long long* regions, unsigned count, int backwards) {
  cta::regions.clear();
  for (const auto* at = regions; at < regions + 4 * count; at += 4)
    cta::regions.push_back({reinterpret_cast<unsigned char*>(at[0]), at[1], at[2], at[3]});
  cta::given = arguments;
  cta::threads = threads;
  cta::shared_bytes = shared_bytes;
  cta::all.resize(threads);
  cta::error[0] = 0;
  gridDim = {x, y, z};
  blockDim = {threads, 1, 1};
  const unsigned count_of_ctas = x * y * z;
  for (unsigned i = 0; i < count_of_ctas && !cta::error[0]; ++i) {
    const unsigned block = backwards ? count_of_ctas - 1 - i : i;
    blockIdx = {block % x, block / x % y, block / (x * y)};
    cta::run(backwards != 0);
  }
  return cta::error;
}
unsigned char shared[1];
