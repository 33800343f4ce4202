// What g++ takes for CUDA's header when the emulator compiles a kernel: the language's words, and that part of its library
// which the kernels of this project use. Anything else does not compile, so nothing is emulated wrongly by accident.
//
// Every CUDA thread is a fiber of tests/cuda/emulator.cpp. A fiber runs until it waits for others: at __syncthreads,
// __syncwarp, a shuffle or a vote.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __shared__ static  // all of a module's zero-initialized memory is taken for shared memory
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

typedef int cudaError_t;
typedef struct emulated_stream* cudaStream_t;
enum { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

namespace emulator {

struct Line {
  const char* file;
  int number;
};

struct Configuration {
  dim3 grid, block;
  size_t shared;
};

enum Meeting { SHUFFLE, VOTE, WARP_BARRIER };

// Of the fiber that runs.
uint3 thread_index();
uint3 block_index();
dim3 block_size();
dim3 grid_size();
void* dynamic_shared_memory();
void wait_for_block(Line line);
// Waits for all lanes of `mask`; returns the value of lane `from` for a shuffle, each lane's bit for a vote.
uint64_t meet(Meeting kind, unsigned mask, uint64_t value, int from, Line line);
void access(const void* address, size_t bytes, bool write, const void* instruction);

// Of the host.
int& last_error();  // of this process; stays until it is asked for
int allow_shared(const void* kernel, size_t bytes);
int run(const void* kernel, const Configuration&, void (*body)(const void*), const void* arguments, size_t bytes);
void add_module(const char* first, const char* zeroed, const char* last);

template <class T>
uint64_t bits_of(T value) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}
template <class T>
T value_of(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline int lane() { return int(thread_index().x % 32); }

// The lane that a shuffle reads: `to` where it stays in this lane's group of `width`, else the lane itself.
inline int within(int to, int width) { return to / width == lane() / width && to >= 0 ? to : lane(); }

}  // namespace emulator

#define threadIdx (emulator::thread_index())
#define blockIdx (emulator::block_index())
#define blockDim (emulator::block_size())
#define gridDim (emulator::grid_size())
constexpr int warpSize = 32;

// Default arguments that give the caller's place.
#define AT_LINE const char *file = __builtin_FILE(), int number = __builtin_LINE()
#define LINE (emulator::Line{file, number})

inline void __syncthreads(AT_LINE) { emulator::wait_for_block(LINE); }
inline void __syncwarp(unsigned mask = ~0u, AT_LINE) { emulator::meet(emulator::WARP_BARRIER, mask, 0, 0, LINE); }

#define SHUFFLE_OF(name, type, from)                                                             \
  template <class T>                                                                             \
  T name(unsigned mask, T value, type step, int width = 32, AT_LINE) {                           \
    const uint64_t bits = emulator::bits_of(value);                                              \
    return emulator::value_of<T>(emulator::meet(emulator::SHUFFLE, mask, bits, from, LINE));     \
  }
SHUFFLE_OF(__shfl_sync, int, emulator::lane() / width * width + step % width)
SHUFFLE_OF(__shfl_xor_sync, int, emulator::within(emulator::lane() ^ step, width))
SHUFFLE_OF(__shfl_down_sync, unsigned, emulator::within(emulator::lane() + int(step), width))
SHUFFLE_OF(__shfl_up_sync, unsigned, emulator::within(emulator::lane() - int(step), width))
#undef SHUFFLE_OF

inline unsigned __ballot_sync(unsigned mask, bool yes, AT_LINE) {
  return unsigned(emulator::meet(emulator::VOTE, mask, yes, 0, LINE));
}
inline bool __any_sync(unsigned mask, bool yes, AT_LINE) { return __ballot_sync(mask, yes, file, number) != 0; }
inline bool __all_sync(unsigned mask, bool yes, AT_LINE) { return __ballot_sync(mask, yes, file, number) == mask; }

// Loads and stores with a cache hint: one access of the whole width, as on a GPU.
#define LOAD_OF(name)                                                                       \
  template <class T>                                                                        \
  __attribute__((noinline, no_sanitize("thread"))) T name(const T* address) {               \
    emulator::access(address, sizeof(T), false, __builtin_return_address(0));               \
    return *address;                                                                        \
  }
#define STORE_OF(name)                                                                      \
  template <class T>                                                                        \
  __attribute__((noinline, no_sanitize("thread"))) void name(T* address, T value) {         \
    emulator::access(address, sizeof(T), true, __builtin_return_address(0));                \
    *address = value;                                                                       \
  }
LOAD_OF(__ldg)
LOAD_OF(__ldcs)
LOAD_OF(__ldcg)
STORE_OF(__stcs)
STORE_OF(__stcg)
#undef LOAD_OF
#undef STORE_OF

inline float __uint_as_float(unsigned x) { return emulator::value_of<float>(x); }
inline unsigned __float_as_uint(float x) { return unsigned(emulator::bits_of(x)); }
inline float __int_as_float(int x) { return emulator::value_of<float>(unsigned(x)); }
inline int __float_as_int(float x) { return int(emulator::bits_of(x)); }
inline int __float2int_rn(float x) { return int(std::nearbyint(x)); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = low | uint64_t(high) << 32;
  unsigned out = 0;
  for (int k = 0; k < 4; k++) out |= unsigned(bytes >> (selector >> 4 * k & 7) * 8 & 0xff) << 8 * k;
  return out;
}
inline int __dp2a_lo(int halves, int bytes, int sum) {
  return sum + int16_t(halves) * int8_t(bytes) + int16_t(halves >> 16) * int8_t(bytes >> 8);
}
inline int __dp2a_hi(int halves, int bytes, int sum) { return __dp2a_lo(halves, bytes >> 16, sum); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline float __expf(float x) { return std::exp2(x * 1.442695040888963f); }
inline float __logf(float x) { return std::log2(x) * 0.6931471805599453f; }
inline float __fdividef(float a, float b) { return std::fabs(b) > 0x1p126f && std::isfinite(b) ? 0.f : a / b; }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fmul_rn(float a, float b) {
  volatile float product = a * b;  // not to be contracted with a sum
  return product;
}
inline float __fadd_rn(float a, float b) {
  volatile float sum = a + b;
  return sum;
}
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
using std::max;
using std::min;

inline cudaError_t cudaPeekAtLastError() { return emulator::last_error(); }
inline cudaError_t cudaGetLastError() { return std::exchange(emulator::last_error(), int(cudaSuccess)); }
template <class F>
cudaError_t cudaFuncSetAttribute(F* kernel, cudaFuncAttribute, int bytes) {
  const int error = emulator::allow_shared(reinterpret_cast<const void*>(kernel), size_t(bytes));
  if (error) emulator::last_error() = error;
  return error;
}

// The two things that csrc/cuda/common.cuh writes in CUDA's own syntax.
template <class T>
T* dynamic_shared() {
  return static_cast<T*>(emulator::dynamic_shared_memory());
}
template <class... P>
void enqueue(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, cudaStream_t, P... given) {
  struct Call {
    void (*kernel)(P...);
    std::tuple<P...> arguments;
  } const call{kernel, {given...}};
  const auto body = [](const void* all) {
    const Call* call = static_cast<const Call*>(all);
    std::apply(call->kernel, call->arguments);
  };
  const int error = emulator::run(reinterpret_cast<const void*>(kernel), {grid, block, shared}, body, &call, sizeof call);
  if (error) emulator::last_error() = error;
}

#ifndef EMULATOR_ITSELF
// Where this module's own memory lies: constants first, then what is zeroed.
extern "C" __attribute__((visibility("hidden"))) char __ehdr_start[], __bss_start[], _end[];
namespace {
__attribute__((constructor)) void add_this_module() { emulator::add_module(__ehdr_start, __bss_start, _end); }
}  // namespace
#endif
