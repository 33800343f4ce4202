// Standard normals from Philox4x32-10 (Salmon et al., SC 2011) and Box-Muller, four per counter.
// Uses the same fp64 operations as `_normal_blocks` in threed/core/rng.py. The math libraries of
// the two may differ in the last bit of fp64; rounding to fp32 hides this.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace {

constexpr int64_t THREAD_FROM = 1 << 14;  // minimum counters per thread: a millisecond of work

inline double unit(uint32_t word) { return (word + 0.5) * 0x1p-32; }

void fill(float* out, const int64_t* counters, int64_t n, uint32_t key0, uint32_t key1) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t c0 = static_cast<uint32_t>(counters[i]), c1 = static_cast<uint32_t>(counters[i] >> 32), c2 = 0, c3 = 0;
    uint32_t k0 = key0, k1 = key1;
    for (int round = 0; round < 10; ++round) {
      const uint64_t p0 = uint64_t{c0} * 0xD2511F53u, p1 = uint64_t{c2} * 0xCD9E8D57u;
      const uint32_t a = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0, b = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
      c0 = a, c1 = static_cast<uint32_t>(p1), c2 = b, c3 = static_cast<uint32_t>(p0);
      k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    const double first = std::sqrt(-2.0 * std::log(unit(c0))), angle = 2.0 * M_PI * unit(c1);
    const double second = std::sqrt(-2.0 * std::log(unit(c2))), other = 2.0 * M_PI * unit(c3);
    out[4 * i] = static_cast<float>(first * std::cos(angle));
    out[4 * i + 1] = static_cast<float>(first * std::sin(angle));
    out[4 * i + 2] = static_cast<float>(second * std::cos(other));
    out[4 * i + 3] = static_cast<float>(second * std::sin(other));
  }
}

}  // namespace

// Writes four normals for each of the counters [n] to out, float [4 n]. key0, key1: the key of
// Philox. threads: maximum number of threads; the result does not depend on it.
extern "C" void threed_normal(float* out, const int64_t* counters, int64_t n, uint32_t key0, uint32_t key1,
                              int threads) {
  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(threads, n / THREAD_FROM));
  std::vector<std::thread> others;
  for (int64_t t = 1; t < parts; ++t) {
    const int64_t from = n * t / parts, to = n * (t + 1) / parts;
    try {
      others.emplace_back(fill, out + 4 * from, counters + from, to - from, key0, key1);
    } catch (const std::system_error&) {  // no new thread is available: run here
      fill(out + 4 * from, counters + from, to - from, key0, key1);
    }
  }
  fill(out, counters, n / parts, key0, key1);
  for (auto& other : others) other.join();
}
