/* Runs CUDA kernels' sources on a CPU, block after block, so that their logic is tested where no GPU is. The first block is
 * another one in each launch, and every other launch counts down: no block is always a kernel's last.
 *
 * The threads of a block are contexts that take turns: one runs until it waits at a barrier (a block's, or its warp's in
 * a shuffle or vote). Not a model of speed, of memory ordering or of races: threads between two barriers run one after
 * the other.
 */
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

struct uint4 {
  uint32_t x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

namespace emulator {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

struct Barrier {
  int waiting = 0, generation = 0;
};

/* A thread starts by its context, which costs system calls, and is left and entered again by jumps; one context serves
 * block after block. */
struct Thread {
  ucontext_t start;
  jmp_buf place;
  std::unique_ptr<char[]> stack;
  bool done = false, started = false;
  unsigned exchanges = 0;
  const Barrier *at = nullptr;
  const int *expected = nullptr;
  int generation = 0;

  /* Whether it waits at a barrier that others have yet to reach. */
  bool held() const { return at && at->generation == generation && at->waiting < *expected; }
};

struct Machine {
  Index block, thread, blocks, threads;
  ucontext_t main;
  jmp_buf scheduler;
  std::vector<Thread> all;
  std::vector<Barrier> warps;
  std::vector<uint64_t> slots;
  Barrier whole;
  int live = 0;
  std::vector<int> live_in_warp;
  std::function<void()> body;
  unsigned launches = 0;
};

inline Machine the_machine;

inline Machine &machine() { return the_machine; }

inline void yield() {
  Machine &m = machine();
  const unsigned self = m.thread.x;
  if (_setjmp(m.all[self].place) == 0) _longjmp(m.scheduler, 1);
}

inline void resume(unsigned thread) {
  Machine &m = machine();
  m.thread.x = thread;
  if (_setjmp(m.scheduler) != 0) return;
  Thread &own = m.all[thread];
  if (own.started) _longjmp(own.place, 1);
  own.started = true;
  swapcontext(&m.main, &own.start);
}

/* A thread that has returned does not hold the others up. */
inline void wait(Barrier &b, const int &expected) {
  Machine &m = machine();
  Thread &own = m.all[m.thread.x];
  own.at = &b;
  own.expected = &expected;
  own.generation = b.generation;
  ++b.waiting;
  while (own.held()) yield();
  own.at = nullptr;
  if (b.generation != own.generation) return;
  b.waiting = 0;
  ++b.generation;
}

inline void wait_warp() {
  Machine &m = machine();
  const unsigned warp = m.thread.x / 32;
  wait(m.warps[warp], m.live_in_warp[warp]);
}

inline void entry() {
  Machine &m = machine();
  const unsigned self = m.thread.x;
  for (;;) {
    m.body();
    m.all[self].done = true;
    --m.live;
    --m.live_in_warp[self / 32];
    yield();
  }
}

inline void run_block(unsigned threads) {
  constexpr size_t kStack = 1 << 16;
  Machine &m = machine();
  if (m.all.size() < threads) m.all.resize(threads);
  m.warps.assign((threads + 31) / 32, Barrier());
  m.live_in_warp.assign((threads + 31) / 32, 0);
  m.slots.assign(2 * (threads + 32), 0);
  m.whole = Barrier();
  m.live = int(threads);
  for (unsigned t = 0; t < threads; ++t) {
    ++m.live_in_warp[t / 32];
    Thread &own = m.all[t];
    own.done = false;
    own.exchanges = 0;
    if (own.started) continue;
    if (!own.stack) own.stack.reset(new char[kStack]);
    getcontext(&own.start);
    own.start.uc_stack.ss_sp = own.stack.get();
    own.start.uc_stack.ss_size = kStack;
    own.start.uc_link = &m.main;
    makecontext(&own.start, entry, 0);
  }
  while (m.live > 0)
    for (unsigned t = 0; t < threads; ++t)
      if (!m.all[t].done && !m.all[t].held()) resume(t);
}

template <class Body>
inline void launch(unsigned blocks, unsigned threads, Body body) {
  Machine &m = machine();
  m.blocks.x = blocks;
  m.threads.x = threads;
  m.body = body;
  const unsigned turn = m.launches++, first = turn * 7919u % blocks;
  for (unsigned b = 0; b < blocks; ++b) {
    m.block.x = turn % 2 == 0 ? (first + b) % blocks : (first + blocks - b) % blocks;
    run_block(threads);
  }
}

/* What the lanes of this thread's warp put in, its own included. Slots take turns: before a lane fills one again, it has
 * met the others at the exchange between, behind their reading. */
inline const uint64_t *exchanged(uint64_t bits) {
  Machine &m = machine();
  const size_t turn = m.all[m.thread.x].exchanges++ % 2 * (m.slots.size() / 2);
  m.slots[turn + m.thread.x] = bits;
  wait_warp();
  return &m.slots[turn + m.thread.x / 32 * 32];
}

template <class T>
inline T exchange(T value, unsigned from) {
  static_assert(sizeof(T) <= 8, "a slot holds 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = exchanged(bits)[from % 32];
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace emulator

#define blockIdx (emulator::machine().block)
#define threadIdx (emulator::machine().thread)
#define gridDim (emulator::machine().blocks)
#define blockDim (emulator::machine().threads)

#define MCC_LAUNCH(kernel, blocks, threads, context, ...) \
  emulator::launch(blocks, threads, [&] { kernel(__VA_ARGS__); })

inline void __syncthreads() { emulator::wait(emulator::machine().whole, emulator::machine().live); }

template <class T>
inline T __shfl_xor_sync(unsigned, T value, int lanes) {
  return emulator::exchange(value, (threadIdx.x % 32) ^ unsigned(lanes));
}

template <class T>
inline T __shfl_up_sync(unsigned, T value, unsigned lanes) {
  const unsigned lane = threadIdx.x % 32;
  return emulator::exchange(value, lane >= lanes ? lane - lanes : lane);
}

template <class T>
inline T __shfl_sync(unsigned, T value, int lane) {
  return emulator::exchange(value, unsigned(lane));
}

inline unsigned __ballot_sync(unsigned, int vote) {
  const uint64_t *lanes = emulator::exchanged(vote != 0);
  unsigned votes = 0;
  for (unsigned lane = 0; lane < 32; ++lane) votes |= unsigned(lanes[lane] != 0) << lane;
  return votes;
}

/* Blocks do not run beside each other, and there are no caches. */
inline void __threadfence() {}

template <class T>
inline T __ldcg(const T *from) {
  return *from;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }

/* Threads add in any order, and a sum of floating-point numbers depends on it. */
template <class T>
inline T atomicAdd(T *to, T value) {
  static_assert(std::is_integral<T>::value, "kernels are deterministic: add floating-point numbers in a fixed order");
  const T before = *to;
  *to += value;
  return before;
}

template <class T>
inline T atomicMax(T *to, T value) {
  const T before = *to;
  if (value > before) *to = value;
  return before;
}

template <class T>
inline T atomicMin(T *to, T value) {
  const T before = *to;
  if (value < before) *to = value;
  return before;
}

using cudaStream_t = void *;
inline void cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t) { std::memset(to, value, bytes); }

using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char *cudaGetErrorString(cudaError_t) { return ""; }
