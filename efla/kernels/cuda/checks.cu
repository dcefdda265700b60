// One block looks at all offsets; see checks.h.

#include "efla/kernels/cuda/checks.h"

namespace efla::cuda {
namespace {

constexpr int kMaxThreads = 1024;

struct Offsets {
  const void* data;
  bool wide;
  int64_t stride;
  __device__ int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i * stride]
                : int64_t{static_cast<const int32_t*>(data)[i * stride]};
  }
};

__global__ void __launch_bounds__(kMaxThreads)
    check_offsets_kernel(Offsets offsets, int64_t count, int64_t tokens, const char* op,
                         int64_t* checked, int64_t* longest_first, CheckRecord* record) {
  __shared__ long long first;  // index of the first wrong offset
  __shared__ int64_t lengths[kSortedSequences];
  if (threadIdx.x == 0) first = count;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    const int64_t x = offsets[i];
    if (x < (i == 0 ? 0 : offsets[i - 1]) || x > tokens) {
      atomicMin(&first, static_cast<long long>(i));
      break;
    }
  }
  __syncthreads();
  const bool right = first == count;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) checked[i] = right ? offsets[i] : 0;
  if (longest_first) {
    const int64_t sequences = count - 1;
    const bool sorted = right && sequences <= kSortedSequences;
    if (sorted) {
      for (int64_t i = threadIdx.x; i < sequences; i += blockDim.x) {
        lengths[i] = offsets[i + 1] - offsets[i];
      }
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < sequences; i += blockDim.x) {
      int64_t place = i;
      if (sorted) {
        place = 0;
        for (int j = 0; j < sequences; ++j) {
          place += lengths[j] > lengths[i] || (lengths[j] == lengths[i] && j < i);
        }
      }
      longest_first[place] = i;
    }
  }
  if (right || threadIdx.x != 0) return;
  volatile CheckRecord* r = record;
  if (r->found != 0) return;  // the first error stays until the host has read it
  r->index = first;
  r->value = offsets[first];
  r->previous = first == 0 ? 0 : offsets[first - 1];
  r->tokens = tokens;
  r->op = op;
  __threadfence_system();
  r->found = 1;
}

}  // namespace

cudaError_t check_offsets(const void* offsets, bool wide, int64_t stride, int64_t count,
                          int64_t tokens, const char* op, int64_t* checked, int64_t* longest_first,
                          CheckRecord* record, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  const int64_t threads = (count + 31) / 32 * 32;
  check_offsets_kernel<<<1, static_cast<unsigned>(threads < kMaxThreads ? threads : kMaxThreads), 0,
                         stream>>>({offsets, wide, stride}, count, tokens, op, checked,
                                   longest_first, record);
  return cudaGetLastError();
}

}  // namespace efla::cuda
