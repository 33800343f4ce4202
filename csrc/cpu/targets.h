// Compiles kernels for several instruction sets: the header of a kernel is included once per
// instruction set, each time in another namespace and for another target. At each call, cpuid
// selects the fastest version that the processor can run.
//
//   #define KERNEL_HEADER "kernel.h"
//   #include "each_target.h"
//   constexpr Kernel KERNELS[] = OF_TARGETS(f);       KERNELS[find_path(nullptr)](...)
#pragma once

#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#define X86 1
#endif

// Functions between TARGET_BEGIN(features) and TARGET_END may use the instructions `features`.
#define PRAGMA(text) _Pragma(#text)
#ifdef __clang__
#define WIDEST
#define TARGET_BEGIN(features) PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define TARGET_END PRAGMA(clang attribute pop)
#else
#define WIDEST ",prefer-vector-width=512"
#define TARGET_BEGIN(features) PRAGMA(GCC push_options) PRAGMA(GCC target(features))
#define TARGET_END PRAGMA(GCC pop_options)
#endif

#define NOINLINE __attribute__((noinline))
#define RESTRICT __restrict__

#define AVX2 "avx2"
#define AVX512 "avx512f,avx512bw,avx512dq,avx512vl" WIDEST

// The instruction sets, from the fastest to the slowest.
#ifdef X86
constexpr const char* PATHS[] = {"avx512", "avx2", "portable"};
#define OF_TARGETS(f) {avx512::f, avx2::f, portable::f}
#else
constexpr const char* PATHS[] = {"portable"};
#define OF_TARGETS(f) {portable::f}
#endif

// Returns the index in PATHS of `name`, or of the fastest if it is null; -1 if this processor
// cannot run it.
inline int find_path(const char* name) {
#ifdef X86
  __builtin_cpu_init();
  const bool here[] = {__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"),
                       bool(__builtin_cpu_supports("avx2")), true};
#else
  const bool here[] = {true};
#endif
  for (int i = 0; i < int(sizeof here / sizeof here[0]); i++)
    if (here[i] && (!name || !std::strcmp(name, PATHS[i]))) return i;
  return -1;
}
