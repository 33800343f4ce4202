// Computes two NH sums of a chunk of 32-bit words. For each pair of neighboring words, each word is
// increased by its key (modulo 2^32), and the two results are multiplied; a sum adds up these
// products modulo 2^64. The second sum uses the same keys, shifted by four words.

inline void two_sums(const uint64_t* RESTRICT words, const uint64_t* RESTRICT keys, uint64_t* RESTRICT out) {
  uint64_t first = 0, second = 0;
  for (int i = 0; i < PAIRS; i++) {
    const uint64_t x = words[i], k = keys[i], j = keys[i + 2];
    first += uint64_t{uint32_t(uint32_t(x) + uint32_t(k))} * uint32_t(uint32_t(x >> 32) + uint32_t(k >> 32));
    second += uint64_t{uint32_t(uint32_t(x) + uint32_t(j))} * uint32_t(uint32_t(x >> 32) + uint32_t(j >> 32));
  }
  out[0] = first, out[1] = second;
}
