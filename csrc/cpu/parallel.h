// Loops split into parts, which run on this thread and on helper threads.
#pragma once

#include <algorithm>
#include <cstdint>

constexpr int MOST_THREADS = 256;

// Returns the number of threads to use for `shares` units of work, at most `threads`.
inline int64_t useful_threads(int64_t shares, int threads) {
  return std::max<int64_t>(1, std::min<int64_t>({shares, threads, MOST_THREADS}));
}

// Calls work(context, first, count) for parts of [0, n), on `threads` threads in any order.
void run_in_parts(int64_t n, int64_t part, int64_t threads, void (*work)(const void*, int64_t, int64_t),
                  const void* context);

template <class Work>
void in_parts(int64_t n, int64_t part, int64_t threads, const Work& work) {
  run_in_parts(n, part, threads, [](const void* w, int64_t first, int64_t count) {
    (*static_cast<const Work*>(w))(first, count);
  }, &work);
}
