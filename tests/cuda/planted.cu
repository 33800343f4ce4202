// Kernels with one fault each, for tests/cuda/test_emulator.py, and some without. in, out: 64 floats.
#include "common.cuh"

namespace {

// ---------------------------------------------------------------------------------------------------- without a fault

__global__ void right(const float* in, float* out) {
  __shared__ float shared[64];
  shared[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = shared[63 - threadIdx.x];
}

__global__ void right_in_a_warp(const float* in, float* out) {
  __shared__ float shared[64];
  shared[threadIdx.x] = in[threadIdx.x];
  __syncwarp();
  out[threadIdx.x] = shared[threadIdx.x ^ 1];
  __syncwarp();
  shared[threadIdx.x] = 0.f;
}

// Lane 0 tells 1, then 1 tells 2: so 2 knows what 0 wrote.
__global__ void right_by_way_of_another(const float* in, float* out) {
  __shared__ float shared[2];
  const int lane = threadIdx.x;
  if (lane == 0) shared[0] = in[0];
  if (lane < 2) __syncwarp(0x3);
  if (lane == 1 || lane == 2) __syncwarp(0x6);
  out[lane] = lane == 2 ? shared[0] : 0.f;
}

__global__ void right_without_some(const float* in, float* out) {  // a barrier waits for those that have not ended
  if (threadIdx.x >= 32) return;
  out[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x + 32] = 0.f;
}

__global__ void right_sum(const float* in, float* out) {
  __shared__ float scratch[2];
  const float sum = sum_over_block<2>(in[threadIdx.x], scratch);
  out[threadIdx.x] = sum;
}

// -------------------------------------------------------------------------------------------------------- with a fault

__global__ void no_barrier(const float* in, float* out) {
  __shared__ float shared[64];
  shared[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = shared[63 - threadIdx.x];
}

__global__ void no_barrier_in_a_warp(const float* in, float* out) {
  __shared__ float shared[64];
  shared[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = shared[threadIdx.x ^ 1];
}

__global__ void shuffle_for_a_barrier(const float* in, float* out) {
  __shared__ float shared[64];
  shared[threadIdx.x] = in[threadIdx.x];
  const float other = __shfl_xor_sync(EVERY_LANE, in[threadIdx.x], 1);
  out[threadIdx.x] = other + shared[threadIdx.x ^ 1];
}

__global__ void barrier_of_other_lanes(const float* in, float* out) {
  __shared__ float shared[64];
  const int lane = threadIdx.x % 32;
  shared[threadIdx.x] = in[threadIdx.x];
  __syncwarp(lane < 16 ? 0xffffu : 0xffff0000u);
  out[threadIdx.x] = shared[threadIdx.x ^ 16];
}

__global__ void barrier_of_the_warp(const float* in, float* out) {
  __shared__ float shared[64];
  shared[threadIdx.x] = in[threadIdx.x];
  __syncwarp();
  out[threadIdx.x] = shared[63 - threadIdx.x];  // of the other warp
}

__global__ void written_while_read(const float* in, float* out) {
  __shared__ float shared[64];
  for (int i = 0; i < 2; i++) {
    shared[threadIdx.x] = in[threadIdx.x] + float(i);
    __syncthreads();
    out[threadIdx.x] = shared[63 - threadIdx.x];
  }
}

__global__ void read_by_several(const float* in, float* out) {  // lanes 0 to 31 read what lane 5 writes
  __shared__ float shared[1];
  if (threadIdx.x == 0) shared[0] = in[0];
  __syncthreads();
  out[threadIdx.x] = shared[0];
  if (threadIdx.x == 5) shared[0] = 0.f;
}

__global__ void divergent(const float* in, float* out) {
  if (threadIdx.x < 32) {
    __syncthreads();
    out[threadIdx.x] = in[threadIdx.x];
  } else {
    out[threadIdx.x] = 0.f;
    __syncthreads();
  }
}

__global__ void half_at_the_barrier(const float* in, float* out) {
  if (threadIdx.x % 2) out[threadIdx.x] = __shfl_sync(EVERY_LANE, in[threadIdx.x], 0);
  __syncthreads();
}

__global__ void left_early(const float* in, float* out) {
  if (threadIdx.x % 32 >= 16) return;
  out[threadIdx.x] = __shfl_xor_sync(EVERY_LANE, in[threadIdx.x], 1);
}

__global__ void lane_not_in_the_mask(const float* in, float* out) {
  if (threadIdx.x % 32 < 16) out[threadIdx.x] = __shfl_sync(0xffffu, in[threadIdx.x], 20);
}

__global__ void not_in_its_own_mask(const float* in, float* out) {
  out[threadIdx.x] = __shfl_sync(0xffffu, in[threadIdx.x], 0);
}

__global__ void mask_beyond_the_block(const float* in, float* out) {  // started with 48 threads
  out[threadIdx.x] = __shfl_xor_sync(EVERY_LANE, in[threadIdx.x], 1);
}

__global__ void beyond_the_end(const float* in, float* out) { out[threadIdx.x + 1] = in[threadIdx.x]; }

__global__ void before_the_start(const float* in, float* out) { out[threadIdx.x] = in[int(threadIdx.x) - 1]; }

__global__ void beyond_shared_memory(const float* in, float* out) {  // started with room for 63
  dynamic_shared<float>()[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = 0.f;
}

__global__ void misaligned(const float* in, float* out) {
  if (threadIdx.x == 0) *reinterpret_cast<float4*>(out + 1) = *reinterpret_cast<const float4*>(in);
}

__global__ void misaligned_load(const float* in, float* out) {
  if (threadIdx.x == 0) out[0] = __ldg(reinterpret_cast<const float2*>(in + 1)).x;
}

__global__ void unwritten_output(const float* in, float* out) { out[threadIdx.x] += in[threadIdx.x]; }

__global__ void unwritten_shared_memory(const float* in, float* out) {
  __shared__ float shared[64];
  if (threadIdx.x < 63) shared[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = shared[threadIdx.x];
}

__global__ void shared_memory_of_the_last_block(const float* in, float* out) {  // started with two blocks
  __shared__ float shared[64];
  if (blockIdx.x == 0) shared[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  if (blockIdx.x == 1) out[threadIdx.x] = shared[threadIdx.x];
}

__global__ void blocks_that_write(const float* in, float* out) { out[threadIdx.x] = in[threadIdx.x]; }  // two

__global__ void blocks_that_read(const float* in, float* out) {  // two; the second reads what the first writes
  if (blockIdx.x == 0) out[threadIdx.x] = in[threadIdx.x];
  else if (out[threadIdx.x] > 1e30f) out[threadIdx.x] = 0.f;
}

__global__ void constant_written(const float* in, float* out) { const_cast<float*>(in)[threadIdx.x + 64] = out[0]; }

struct Case {
  const char* name;
  void (*kernel)(const float*, float*);
  unsigned blocks = 1, threads = 64;
  size_t shared = 0;
};
#define CASE(kernel, ...) {#kernel, kernel, ##__VA_ARGS__}

const Case CASES[] = {
    CASE(right), CASE(right_in_a_warp), CASE(right_by_way_of_another), CASE(right_without_some), CASE(right_sum),
    CASE(no_barrier), CASE(no_barrier_in_a_warp), CASE(shuffle_for_a_barrier), CASE(barrier_of_other_lanes),
    CASE(barrier_of_the_warp), CASE(written_while_read), CASE(read_by_several), CASE(divergent),
    CASE(half_at_the_barrier), CASE(left_early), CASE(lane_not_in_the_mask), CASE(not_in_its_own_mask),
    CASE(mask_beyond_the_block, 1, 48), CASE(beyond_the_end), CASE(before_the_start),
    CASE(beyond_shared_memory, 1, 64, 63 * sizeof(float)), CASE(misaligned), CASE(misaligned_load),
    CASE(unwritten_output), CASE(unwritten_shared_memory), CASE(shared_memory_of_the_last_block, 2),
    CASE(blocks_that_write, 2), CASE(blocks_that_read, 2), CASE(constant_written),
    {"empty_grid", right, 0}, {"empty_block", right, 1, 0}, {"large_block", right, 1, 1056},
    {"large_shared_memory", right, 1, 64, 100 << 10},
};

}  // namespace

extern "C" {

int threed_cuda_planted(const float* in, float* out, int64_t which, cudaStream_t stream) {
  const Case& one = CASES[which];
  return launch(one.kernel, one.blocks, one.threads, one.shared, stream, in, out);
}

const char* planted_name(int which) { return which < int(sizeof CASES / sizeof *CASES) ? CASES[which].name : nullptr; }

}
