// A checksum at memory bandwidth: NH (Black et al., UMAC, CRYPTO 1999, section 4) of chunks of 64
// KiB, twice with shifted keys. The keys are fixed, so it detects accidental corruption, not
// deliberate changes.

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "targets.h"

namespace {

constexpr int64_t CHUNK = 1 << 16;
constexpr int PAIRS = CHUNK / 8;

struct Keys {
  uint64_t words[PAIRS + 2];
  Keys() {  // splitmix64 (Steele et al., OOPSLA 2014)
    uint64_t state = 0;
    for (auto& word : words) {
      uint64_t z = state += 0x9E3779B97F4A7C15u;
      z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
      z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
      word = z ^ (z >> 31);
    }
  }
};

#define KERNEL_HEADER "checksum_kernel.h"
#include "each_target.h"

using Kernel = void (*)(const uint64_t*, const uint64_t*, uint64_t*);

constexpr Kernel KERNELS[] = OF_TARGETS(two_sums);

}  // namespace

// Writes two sums per chunk of `data` to `out`. data: n bytes; the last chunk is padded with zeros.
// instructions: a name in PATHS; null selects the fastest. Returns 0, or ENOTSUP if the processor
// lacks the instructions.
extern "C" int threed_checksum(const void* data, int64_t n, uint64_t* out, const char* instructions) {
  static const Keys keys;
  const int path = find_path(instructions);
  if (path < 0) return ENOTSUP;
  const char* bytes = static_cast<const char*>(data);
  alignas(64) uint64_t copy[PAIRS];
  for (int64_t at = 0; at < n; at += CHUNK, out += 2) {
    const int64_t count = n - at < CHUNK ? n - at : CHUNK;
    const bool whole = count == CHUNK && reinterpret_cast<uintptr_t>(bytes + at) % 8 == 0;
    if (!whole) {
      std::memcpy(copy, bytes + at, count);
      std::memset(reinterpret_cast<char*>(copy) + count, 0, CHUNK - count);
    }
    KERNELS[path](whole ? reinterpret_cast<const uint64_t*>(bytes + at) : copy, keys.words, out);
  }
  return 0;
}
