// Rows of the choices of a mixture of experts, sorted by expert: a stable counting sort in one launch.
//
// Reads 8 bytes per choice and the counts of router.cu, and writes 24 bytes per choice and 8 per token.
// Each block adds up the counts of the blocks before it, so blocks do not wait for each other.

#include "common.cuh"

namespace {

constexpr int MOST = 512;  // most experts

// Thread e of a block finds the rows of its choices for expert e. experts: int64 [choices]. counts:
// int32 [chunks b e], of which a block has the `size` choices of b. See threed_cuda_sort_choices.
__global__ void __launch_bounds__(MOST)
    sort(const int64_t* __restrict__ experts, const int* __restrict__ counts, int64_t* __restrict__ sources,
         int64_t* __restrict__ places, int64_t* __restrict__ tokens, int64_t* __restrict__ firsts,
         int* __restrict__ bounds, int* __restrict__ loads, float* __restrict__ excess, float* __restrict__ chosen,
         unsigned choices, unsigned size, unsigned sequences, unsigned count, unsigned k) {
  __shared__ int buffer[MOST];
  const unsigned e = threadIdx.x, chunk = blockIdx.x, first = chunk * size, end = min(first + size, choices);
  int total = 0, before = 0;
  for (unsigned sequence = 0; sequence < sequences && e < count; sequence++) {
    const int already = total;
#pragma unroll 8
    for (unsigned c = 0; c < gridDim.x; c++) {
      const int found = __ldg(counts + (int64_t(c) * sequences + sequence) * count + e);
      total += found, before += c < chunk ? found : 0;
    }
    if (chosen && chunk == 0) chosen[sequence * count + e] = float(total - already);
  }
  int last = total;  // sum over the experts up to e
  for (unsigned step = 1; step < MOST; step *= 2) {
    buffer[e] = last;
    __syncthreads();
    last += e >= step ? buffer[e - step] : 0;
    __syncthreads();
  }
  if (chunk == 0 && e < count) {
    bounds[e + 1] = last, loads[e] = total;
    if (e == 0) bounds[0] = 0;
    if (excess) excess[e] = float(int64_t(total) * count - choices);
  }
  int place = last - total + before;
#pragma unroll 1
  for (unsigned tile = first; tile < end; tile += MOST) {
    const unsigned own = tile + e, filled = min(unsigned(MOST), end - tile);
    if (own < end) {
      buffer[e] = int(experts[own]);
      if (own % k == 0) firsts[own / k] = own;
    }
    __syncthreads();
    for (unsigned i = 0; i < filled && e < count; i++)
      if (buffer[i] == int(e)) {
        sources[place] = tile + i, places[tile + i] = place, tokens[place] = (tile + i) / k;
        place++;
      }
    __syncthreads();
  }
}

}  // namespace

extern "C" {

// sources [choices] = the choices, sorted by expert; places = its inverse; tokens = sources / count;
// firsts [choices / count] = the first choice of each token; all int64. bounds: int32 [e + 1], the
// first row of each expert, and the number of rows. loads: int32 [e], choices per expert. excess:
// fp32 [e], loads e - choices, or null. chosen: fp32 [sequences e], loads per sequence, or null.
int threed_cuda_sort_choices(const int64_t* experts, const int* counts, int64_t* sources, int64_t* places, int64_t* tokens,
                            int64_t* firsts, int* bounds, int* loads, float* excess, float* chosen, int64_t positions,
                            int64_t sequences, int64_t chunks, int64_t e, int64_t count, cudaStream_t stream) {
  return launch(sort, unsigned(chunks), MOST, 0, stream, experts, counts, sources, places, tokens, firsts, bounds, loads,
                excess, chosen, positions * sequences * count, ceil_div(positions, chunks) * sequences * count, sequences,
                e, count);
}

}  // extern "C"
