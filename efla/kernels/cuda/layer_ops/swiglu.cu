#include <algorithm>

#include "efla/kernels/cuda/layer_ops/layer_ops.h"
#include "efla/kernels/cuda/layer_ops/storage.cuh"

namespace efla::cuda {
namespace {

using namespace layer;

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1 << 20;

// Elements [0, count) in packs of N; N = 1 has no remainder.
template <typename S, int N>
__global__ void forward_kernel(const S* gate, const S* up, S* y, int64_t packs) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < packs;
       i += step) {
    float g[N], u[N];
    load(gate + i * N, g);
    load(up + i * N, u);
#pragma unroll
    for (int j = 0; j < N; ++j) u[j] *= silu(g[j]);
    store(y + i * N, u);
  }
}

template <typename S, int N>
__global__ void backward_kernel(const S* gate, const S* up, const S* grad_y, S* grad_gate,
                                S* grad_up, int64_t packs) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < packs;
       i += step) {
    float g[N], u[N], dy[N];
    load(gate + i * N, g);
    load(up + i * N, u);
    load(grad_y + i * N, dy);
    float dg[N], du[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      dg[j] = dy[j] * u[j] * silu_derivative(g[j]);
      du[j] = dy[j] * silu(g[j]);
    }
    if (grad_gate != nullptr) store(grad_gate + i * N, dg);
    if (grad_up != nullptr) store(grad_up + i * N, du);
  }
}

unsigned blocks_for(int64_t packs) {
  return static_cast<unsigned>(std::min((packs + kThreads - 1) / kThreads, kMaxBlocks));
}

// launch.operator()<N>(first element, packs): the bulk in packs of 16 bytes where every pointer
// allows it, the rest one by one.
template <typename S, typename Launch>
cudaError_t in_packs(int64_t count, bool aligned_pointers, const Launch& launch) {
  constexpr int kPack = kPackSize<S>;
  const int64_t packs = aligned_pointers ? count / kPack : 0;
  if (packs > 0) launch.template operator()<kPack>(0, packs);
  const int64_t rest = count - packs * kPack;
  if (rest > 0) launch.template operator()<1>(packs * kPack, rest);
  return cudaGetLastError();
}

}  // namespace

cudaError_t swiglu_forward(const SwigluParams& p, cudaStream_t stream) {
  return dispatch_storage(p.dtype, [&](auto tag) {
    using S = decltype(tag);
    const bool wide = aligned({p.gate, p.up, p.y});
    return in_packs<S>(p.count, wide, [&]<int N>(int64_t first, int64_t packs) {
      forward_kernel<S, N><<<blocks_for(packs), kThreads, 0, stream>>>(
          static_cast<const S*>(p.gate) + first, static_cast<const S*>(p.up) + first,
          static_cast<S*>(p.y) + first, packs);
    });
  });
}

cudaError_t swiglu_backward(const SwigluBackwardParams& bp, cudaStream_t stream) {
  const SwigluParams& p = bp.forward;
  return dispatch_storage(p.dtype, [&](auto tag) {
    using S = decltype(tag);
    const bool wide = aligned({p.gate, p.up, bp.grad_y, bp.grad_gate, bp.grad_up});
    const auto from = [](void* data, int64_t first) {
      return data == nullptr ? nullptr : static_cast<S*>(data) + first;
    };
    return in_packs<S>(p.count, wide, [&]<int N>(int64_t first, int64_t packs) {
      backward_kernel<S, N><<<blocks_for(packs), kThreads, 0, stream>>>(
          static_cast<const S*>(p.gate) + first, static_cast<const S*>(p.up) + first,
          static_cast<const S*>(bp.grad_y) + first, from(bp.grad_gate, first),
          from(bp.grad_up, first), packs);
    });
  });
}

}  // namespace efla::cuda
