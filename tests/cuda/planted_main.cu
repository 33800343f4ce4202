// Runs one kernel of planted.cu on a GPU, for compute-sanitizer: `planted NUMBER`; without a number it names them all.
// Exit code 3 where CUDA refuses the launch, 4 where the kernel ends with an error. `out` is left unwritten.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

extern "C" {
int threed_cuda_planted(const float* in, float* out, int64_t which, cudaStream_t stream);
const char* planted_name(int which);
}

int main(int count, char** words) {
  if (count < 2) {
    for (int i = 0; planted_name(i); i++) std::puts(planted_name(i));
    return 0;
  }
  const int which = std::atoi(words[1]);
  float *in, *out, numbers[64];
  for (int i = 0; i < 64; i++) numbers[i] = float(i) - 31.5f;
  if (cudaMalloc(&in, sizeof numbers) || cudaMalloc(&out, sizeof numbers)) return 2;
  if (cudaMemcpy(in, numbers, sizeof numbers, cudaMemcpyHostToDevice)) return 2;
  if (threed_cuda_planted(in, out, which, nullptr)) return 3;
  return cudaDeviceSynchronize() ? 4 : 0;
}
