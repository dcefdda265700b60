// With r = rsqrt(mean(x^2) + eps), n = x r, s = silu(gate) (or 1) and a = dy w s:
//   dx = r (a - n mean(a n)),   dw = sum over rows of dy s n,   dgate = dy w n silu'(gate).
#include <algorithm>

#include "efla/kernels/cuda/layer_ops/layer_ops.h"
#include "efla/kernels/cuda/layer_ops/partial_sums.cuh"
#include "efla/kernels/cuda/layer_ops/storage.cuh"

namespace efla::cuda {
namespace {

using namespace layer;

constexpr int kThreads = 256;
constexpr int64_t kWarpDim = 1024;  // longer rows take a whole block
constexpr int64_t kMaxBlocks = 1 << 20;
constexpr int64_t kMaxGroups = 1024;  // of rows, for grad_weight
constexpr int64_t kMinGroupRows = 16;

// The sum over a team of kTeam threads, in every one of them; kTeam is 32 or the whole block.
template <int kTeam>
__device__ __forceinline__ float team_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  if constexpr (kTeam == 32) {
    return x;
  } else {
    __shared__ float warps[kThreads / 32];
    __syncthreads();  // the last call's sums have been read
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kThreads / 32; ++i) sum += warps[i];
    return sum;
  }
}

template <typename S>
struct Row {
  const S* x;
  const S* weight;  // or null
  const S* gate;    // or null
  int64_t dim;
  float eps;
};

template <typename S, int N, int kTeam>
__device__ __forceinline__ float inverse_rms(const Row<S>& row, int lane) {
  float sum = 0.0f;
  for (int64_t i = lane * N; i < row.dim; i += kTeam * N) {
    float x[N];
    load(row.x + i, x);
#pragma unroll
    for (int j = 0; j < N; ++j) sum += x[j] * x[j];
  }
  return rsqrtf(team_sum<kTeam>(sum) / static_cast<float>(row.dim) + row.eps);
}

template <typename S>
struct ForwardArguments {
  const S *x, *weight, *gate;
  S* y;
  int64_t rows, dim;
  float eps;
};

template <typename S, int N, int kTeam>
__global__ void __launch_bounds__(kThreads) forward_kernel(ForwardArguments<S> p) {
  constexpr int kRows = kThreads / kTeam;
  const int lane = threadIdx.x % kTeam;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kRows;
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kTeam; r < p.rows;
       r += step) {
    const Row<S> row{p.x + r * p.dim, p.weight, p.gate ? p.gate + r * p.dim : nullptr, p.dim,
                     p.eps};
    const float scale = inverse_rms<S, N, kTeam>(row, lane);
    for (int64_t i = lane * N; i < p.dim; i += kTeam * N) {
      float x[N], w[N], g[N];
      load(row.x + i, x);
      if (row.weight) load(row.weight + i, w);
      if (row.gate) load(row.gate + i, g);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        x[j] *= scale;
        if (row.weight) x[j] *= w[j];
        if (row.gate) x[j] *= silu(g[j]);
      }
      store(p.y + r * p.dim + i, x);
    }
  }
}

template <typename S>
struct BackwardArguments {
  ForwardArguments<S> forward;
  const S* grad_y;
  S *grad_x, *grad_gate;  // or null
  float* scale;           // [rows]: r of every row, for grad_weight
};

// grad_x, grad_gate and the scales.
template <typename S, int N, int kTeam>
__global__ void __launch_bounds__(kThreads) backward_kernel(BackwardArguments<S> b) {
  const ForwardArguments<S>& p = b.forward;
  constexpr int kRows = kThreads / kTeam;
  const int lane = threadIdx.x % kTeam;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kRows;
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kTeam; r < p.rows;
       r += step) {
    const Row<S> row{p.x + r * p.dim, p.weight, p.gate ? p.gate + r * p.dim : nullptr, p.dim,
                     p.eps};
    const S* grad_y = b.grad_y + r * p.dim;
    const float scale = inverse_rms<S, N, kTeam>(row, lane);
    if (lane == 0) b.scale[r] = scale;

    // a = dy w s of N elements.
    const auto weighted = [&](int64_t i, float(&x)[N], float(&g)[N], float(&a)[N]) {
      float w[N];
      load(row.x + i, x);
      load(grad_y + i, a);
      if (row.weight) load(row.weight + i, w);
      if (row.gate) load(row.gate + i, g);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (row.weight) a[j] *= w[j];
      }
    };
    float dot = 0.0f;
    for (int64_t i = lane * N; i < p.dim; i += kTeam * N) {
      float x[N], g[N], a[N];
      weighted(i, x, g, a);
#pragma unroll
      for (int j = 0; j < N; ++j) dot += a[j] * (row.gate ? silu(g[j]) : 1.0f) * x[j];
    }
    const float mean = team_sum<kTeam>(dot) * scale / static_cast<float>(p.dim);  // mean(a n)
    for (int64_t i = lane * N; i < p.dim; i += kTeam * N) {
      float x[N], g[N], a[N], dg[N];
      weighted(i, x, g, a);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float n = x[j] * scale;
        dg[j] = row.gate ? a[j] * n * silu_derivative(g[j]) : 0.0f;
        if (row.gate) a[j] *= silu(g[j]);
        x[j] = scale * (a[j] - n * mean);
      }
      if (b.grad_x) store(b.grad_x + r * p.dim + i, x);
      if (b.grad_gate) store(b.grad_gate + r * p.dim + i, dg);
    }
  }
}

// partial[group][column] = sum over the group's rows of dy s n; a thread has one column.
template <typename S>
__global__ void __launch_bounds__(kThreads)
    weight_kernel(BackwardArguments<S> b, int64_t group_rows, float* partial) {
  const ForwardArguments<S>& p = b.forward;
  const int64_t column = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
  if (column >= p.dim) return;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * group_rows;
  const int64_t end = first + group_rows < p.rows ? first + group_rows : p.rows;
  float sum = 0.0f;
#pragma unroll 4
  for (int64_t r = first; r < end; ++r) {
    const int64_t i = r * p.dim + column;
    float term = to_float(b.grad_y[i]) * to_float(p.x[i]) * b.scale[r];
    if (p.gate) term *= silu(to_float(p.gate[i]));
    sum += term;
  }
  partial[static_cast<int64_t>(blockIdx.x) * p.dim + column] = sum;
}

int64_t group_rows_of(int64_t rows) {
  return std::max(kMinGroupRows, (rows + kMaxGroups - 1) / kMaxGroups);
}
int64_t groups_of(int64_t rows) { return (rows + group_rows_of(rows) - 1) / group_rows_of(rows); }

template <typename S>
ForwardArguments<S> arguments_of(const RmsNormParams& p) {
  return {static_cast<const S*>(p.x),
          static_cast<const S*>(p.weight),
          static_cast<const S*>(p.gate),
          static_cast<S*>(p.y),
          p.rows,
          p.dim,
          static_cast<float>(p.eps)};
}

// launch.operator()<N, kTeam>(blocks): packs of 16 bytes where rows and pointers allow it, a warp
// or a block per row.
template <typename S, typename Launch>
void by_rows(const RmsNormParams& p, bool aligned_pointers, const Launch& launch) {
  constexpr int kPack = kPackSize<S>;
  const bool wide = aligned_pointers && p.dim % kPack == 0;
  const bool warp = p.dim <= kWarpDim;
  const int64_t rows_per_block = warp ? kThreads / 32 : 1;
  const auto blocks =
      static_cast<unsigned>(std::min((p.rows + rows_per_block - 1) / rows_per_block, kMaxBlocks));
  if (wide) {
    warp ? launch.template operator()<kPack, 32>(blocks)
         : launch.template operator()<kPack, kThreads>(blocks);
  } else {
    warp ? launch.template operator()<1, 32>(blocks)
         : launch.template operator()<1, kThreads>(blocks);
  }
}

}  // namespace

cudaError_t rms_norm_forward(const RmsNormParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.dim == 0) return cudaSuccess;
  return dispatch_storage(p.dtype, [&](auto tag) {
    using S = decltype(tag);
    by_rows<S>(p, aligned({p.x, p.weight, p.gate, p.y}), [&]<int N, int kTeam>(unsigned blocks) {
      forward_kernel<S, N, kTeam><<<blocks, kThreads, 0, stream>>>(arguments_of<S>(p));
    });
    return cudaGetLastError();
  });
}

int64_t rms_norm_backward_workspace(const RmsNormBackwardParams& bp) {
  const RmsNormParams& p = bp.forward;
  return static_cast<int64_t>(sizeof(float)) *
         (p.rows + (bp.grad_weight ? groups_of(p.rows) * p.dim : 0));
}

cudaError_t rms_norm_backward(const RmsNormBackwardParams& bp, void* workspace,
                              cudaStream_t stream) {
  const RmsNormParams& p = bp.forward;
  if (p.rows == 0 || p.dim == 0) return cudaSuccess;
  return dispatch_storage(p.dtype, [&](auto tag) {
    using S = decltype(tag);
    auto* scale = static_cast<float*>(workspace);
    const BackwardArguments<S> b{arguments_of<S>(p), static_cast<const S*>(bp.grad_y),
                                 static_cast<S*>(bp.grad_x), static_cast<S*>(bp.grad_gate), scale};
    const bool wide = aligned({p.x, p.weight, p.gate, bp.grad_y, bp.grad_x, bp.grad_gate});
    by_rows<S>(p, wide, [&]<int N, int kTeam>(unsigned blocks) {
      backward_kernel<S, N, kTeam><<<blocks, kThreads, 0, stream>>>(b);
    });
    if (bp.grad_weight != nullptr) {
      constexpr int kColumns = 128;
      const int64_t groups = groups_of(p.rows);
      const dim3 grid(static_cast<unsigned>(groups),
                      static_cast<unsigned>((p.dim + kColumns - 1) / kColumns));
      float* partial = scale + p.rows;
      weight_kernel<S><<<grid, kColumns, 0, stream>>>(b, group_rows_of(p.rows), partial);
      launch_partial_sums(partial, groups, p.dim, p.dim, p.dim, bp.grad_weight, stream);
    }
    return cudaGetLastError();
  });
}

}  // namespace efla::cuda
