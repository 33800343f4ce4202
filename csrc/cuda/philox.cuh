// Philox4x32-10 (Salmon et al., SC 2011). Produces the same bits as threed/core/rng.py and
// csrc/cpu/philox.cpp.
#pragma once

#include "common.cuh"

__device__ __forceinline__ uint4 philox(uint4 c, unsigned key0, unsigned key1) {
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const unsigned high0 = __umulhi(c.x, 0xD2511F53u), low0 = c.x * 0xD2511F53u;
    const unsigned high1 = __umulhi(c.z, 0xCD9E8D57u), low1 = c.z * 0xCD9E8D57u;
    c = make_uint4(high1 ^ c.y ^ key0, low1, high0 ^ c.w ^ key1, low0);
    key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
  }
  return c;
}
