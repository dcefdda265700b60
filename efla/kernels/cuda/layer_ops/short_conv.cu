// A thread has one channel and walks over a run of tokens, the inputs that its filter reaches in
// registers. With z the sums before the activation and dz = dy act'(z):
//   grad_x[t] = sum_w filter[w] dz[t + W - 1 - w]
//   grad_filter[w] = sum_t dz[t] x[t - W + 1 + w],   grad_bias = sum_t dz[t]
// A run recomputes the W - 1 values of dz that follow it, so runs do not exchange anything.
#include <algorithm>

#include "efla/kernels/cuda/layer_ops/layer_ops.h"
#include "efla/kernels/cuda/layer_ops/partial_sums.cuh"
#include "efla/kernels/cuda/layer_ops/storage.cuh"

namespace efla::cuda {
namespace {

using namespace layer;

constexpr int kThreads = 128;         // channels of a block
constexpr int64_t kForwardRun = 16;   // tokens of a run
constexpr int64_t kBackwardRun = 64;  // more, so that there are fewer partial sums

template <typename S>
struct Arguments {
  int64_t tokens, channels, sequences;
  int width;
  bool silu;
  const S* x;
  int64_t x_batch, x_token;
  const S *weight, *bias, *initial_state;  // bias and initial_state may be null
  const int64_t* cu_seqlens;               // or null
};

/// Tokens [first, end) of a row of the batch belong to sequence n, or to none (n = -1).
struct Segment {
  int64_t n, first, end;
};

template <typename S>
__device__ __forceinline__ Segment sequence(const Arguments<S>& p, int64_t n) {
  if (p.cu_seqlens == nullptr) return {n, 0, p.tokens};
  return {n, p.cu_seqlens[n], p.cu_seqlens[n + 1]};
}

/// The segment that holds token t.
template <typename S>
__device__ Segment segment_at(const Arguments<S>& p, int64_t row, int64_t t) {
  if (p.cu_seqlens == nullptr) return {row, 0, p.tokens};
  const int64_t begin = p.cu_seqlens[0], end = p.cu_seqlens[p.sequences];
  if (t < begin) return {-1, 0, begin};
  if (t >= end) return {-1, end, p.tokens};
  int64_t low = 0, high = p.sequences;  // cu_seqlens[low] <= t < cu_seqlens[high]
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (p.cu_seqlens[middle] <= t ? low : high) = middle;
  }
  return sequence(p, low);
}

/// Input t of one channel, which may lie before the sequence's start.
template <typename S>
__device__ __forceinline__ float input(const Arguments<S>& p, const Segment& s, int64_t row,
                                       int64_t channel, int64_t t) {
  if (t >= s.first) return to_float(p.x[row * p.x_batch + t * p.x_token + channel]);
  if (p.initial_state == nullptr) return 0.0f;
  return to_float(p.initial_state[(s.n * p.channels + channel) * p.width + p.width + t - s.first]);
}

/// The filter of one channel. kW: its width where that is known when compiling, else 0.
template <typename S, int kW>
struct Filter {
  static constexpr int kSize = kW > 0 ? kW : static_cast<int>(kMaxConvWidth);
  float tap[kSize];
  float bias;
  int width;

  __device__ Filter(const Arguments<S>& p, int64_t channel)
      : bias(p.bias ? to_float(p.bias[channel]) : 0.0f), width(kW > 0 ? kW : p.width) {
#pragma unroll
    for (int w = 0; w < (kW > 0 ? kW : width); ++w) {
      tap[w] = to_float(p.weight[channel * (kW > 0 ? kW : width) + w]);
    }
  }
};

/// The last `width` values of a walk, oldest first.
template <int kW>
struct Window {
  float value[kW > 0 ? kW : kMaxConvWidth] = {};

  __device__ __forceinline__ void push(float x, int width) {
#pragma unroll
    for (int w = 0; w + 1 < (kW > 0 ? kW : width); ++w) value[w] = value[w + 1];
    value[(kW > 0 ? kW : width) - 1] = x;
  }
};

template <typename S, int kW>
__device__ __forceinline__ float filter_sum(const Filter<S, kW>& f, const Window<kW>& x) {
  float z = f.bias;
#pragma unroll
  for (int w = 0; w < (kW > 0 ? kW : f.width); ++w) z += f.tap[w] * x.value[w];
  return z;
}

/// A window that holds the width - 1 inputs before token t in its last places.
template <typename S, int kW>
__device__ __forceinline__ void fill_before(const Arguments<S>& p, const Segment& s, int64_t row,
                                            int64_t channel, int64_t t, int width,
                                            Window<kW>& window) {
  window.value[0] = 0.0f;  // the next push drops it
#pragma unroll
  for (int w = 1; w < (kW > 0 ? kW : width); ++w) {
    window.value[w] = input(p, s, row, channel, t - width + w);
  }
}

struct Output {
  void* data;
  int64_t batch, token;
};

template <typename S>
__device__ __forceinline__ void write(const Output& out, int64_t row, int64_t t, int64_t channel,
                                      float value) {
  static_cast<S*>(out.data)[row * out.batch + t * out.token + channel] = from_float<S>(value);
}

template <typename S, int kW>
__global__ void __launch_bounds__(kThreads) forward_kernel(Arguments<S> p, Output y) {
  const int64_t channel = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (channel >= p.channels) return;
  const auto runs = static_cast<unsigned>((p.tokens + kForwardRun - 1) / kForwardRun);
  const int64_t row = blockIdx.x / runs;
  int64_t t = blockIdx.x % runs * kForwardRun;
  const int64_t stop = min(t + kForwardRun, p.tokens);
  const Filter<S, kW> filter(p, channel);
  while (t < stop) {
    const Segment s = segment_at(p, row, t);
    const int64_t end = min(s.end, stop);
    Window<kW> window;
    if (s.n >= 0) fill_before(p, s, row, channel, t, filter.width, window);
    for (; t < end; ++t) {
      float z = 0.0f;
      if (s.n >= 0) {
        window.push(input(p, s, row, channel, t), filter.width);
        z = filter_sum(filter, window);
        if (p.silu) z = silu(z);
      }
      write<S>(y, row, t, channel, z);
    }
  }
}

// The last W inputs of every sequence; a thread has one channel of one of them.
template <typename S>
__global__ void __launch_bounds__(kThreads) final_state_kernel(Arguments<S> p, S* final_state) {
  const int64_t channel = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (channel >= p.channels) return;
  const Segment s = sequence(p, blockIdx.x);
  const int64_t row = p.cu_seqlens == nullptr ? s.n : 0;
  S* out = final_state + (s.n * p.channels + channel) * p.width;
  for (int w = 0; w < p.width; ++w) {
    out[w] = from_float<S>(input(p, s, row, channel, s.end - p.width + w));
  }
}

template <typename S>
struct Gradients {
  const S* grad_y;
  int64_t batch, token;
  const S* grad_final_state;  // or null
  Output grad_x;              // data may be null
  float* partial;             // [runs, W + 1, channels], the last row for the bias; or null
};

template <typename S, int kW>
__global__ void __launch_bounds__(kThreads) backward_kernel(Arguments<S> p, Gradients<S> g) {
  const int64_t channel = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (channel >= p.channels) return;
  const auto runs = static_cast<unsigned>((p.tokens + kBackwardRun - 1) / kBackwardRun);
  const int64_t row = blockIdx.x / runs, begin = blockIdx.x % runs * kBackwardRun;
  const int64_t stop = min(begin + kBackwardRun, p.tokens);
  const Filter<S, kW> filter(p, channel);
  const int width = filter.width;
  Window<kW> grad_filter;  // a sum per tap
  float grad_bias = 0.0f;
  for (int64_t t = begin; t < stop;) {
    const Segment s = segment_at(p, row, t);
    const int64_t end = min(s.end, stop);
    if (s.n < 0) {
      for (; t < end; ++t) {
        if (g.grad_x.data) write<S>(g.grad_x, row, t, channel, 0.0f);
      }
      continue;
    }
    Window<kW> x, dz;
    fill_before(p, s, row, channel, t, width, x);
    for (int64_t u = t; u < end + width - 1; ++u) {
      float d = 0.0f;
      if (u < s.end) {
        x.push(input(p, s, row, channel, u), width);
        d = to_float(g.grad_y[row * g.batch + u * g.token + channel]);
        if (p.silu) d *= silu_derivative(filter_sum(filter, x));
        if (u < end) {
#pragma unroll
          for (int w = 0; w < (kW > 0 ? kW : width); ++w) grad_filter.value[w] += d * x.value[w];
          grad_bias += d;
        }
      }
      dz.push(d, width);
      const int64_t o = u - width + 1;  // all that reads input o is in dz
      if (o < t || !g.grad_x.data) continue;
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < (kW > 0 ? kW : width); ++w) {
        sum += filter.tap[w] * dz.value[(kW > 0 ? kW : width) - 1 - w];
      }
      const int64_t w = o - s.end + width;  // its place in the final state
      if (g.grad_final_state && w >= 0) {
        sum += to_float(g.grad_final_state[(s.n * p.channels + channel) * width + w]);
      }
      write<S>(g.grad_x, row, o, channel, sum);
    }
    t = end;
  }
  if (g.partial == nullptr) return;
  float* partial =
      g.partial + static_cast<int64_t>(blockIdx.x) * (width + 1) * p.channels + channel;
#pragma unroll
  for (int w = 0; w < (kW > 0 ? kW : width); ++w) partial[w * p.channels] = grad_filter.value[w];
  partial[width * p.channels] = grad_bias;
}

// The gradient of the inputs before the sequence; a thread has one channel of one sequence. Input
// w of the state is read by the outputs t < w through tap w - 1 - t.
template <typename S, int kW>
__global__ void __launch_bounds__(kThreads)
    initial_state_kernel(Arguments<S> p, Gradients<S> g, S* grad_initial_state) {
  const int64_t channel = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (channel >= p.channels) return;
  const Segment s = sequence(p, blockIdx.x);
  const int64_t row = p.cu_seqlens == nullptr ? s.n : 0, length = s.end - s.first;
  const int64_t state = (s.n * p.channels + channel) * p.width;
  const Filter<S, kW> filter(p, channel);
  const int width = filter.width;
  Window<kW> grad, x;
#pragma unroll
  for (int w = 0; w < (kW > 0 ? kW : width); ++w) {
    const bool passes = g.grad_final_state && w >= length;  // an input that outlives the sequence
    grad.value[w] = passes ? to_float(g.grad_final_state[state + w - length]) : 0.0f;
  }
  fill_before(p, s, row, channel, s.first, width, x);
#pragma unroll
  for (int t = 0; t + 1 < (kW > 0 ? kW : width); ++t) {
    if (t >= length) break;
    x.push(input(p, s, row, channel, s.first + t), width);
    float d = to_float(g.grad_y[row * g.batch + (s.first + t) * g.token + channel]);
    if (p.silu) d *= silu_derivative(filter_sum(filter, x));
#pragma unroll
    for (int w = t + 1; w < (kW > 0 ? kW : width); ++w) grad.value[w] += filter.tap[w - 1 - t] * d;
  }
#pragma unroll
  for (int w = 0; w < (kW > 0 ? kW : width); ++w) {
    grad_initial_state[state + w] = from_float<S>(grad.value[w]);
  }
}

template <typename S>
Arguments<S> arguments_of(const ShortConvParams& p) {
  return {p.tokens,
          p.channels,
          p.sequences,
          static_cast<int>(p.width),
          p.silu,
          static_cast<const S*>(p.x.data),
          p.x.batch,
          p.x.token,
          static_cast<const S*>(p.weight),
          static_cast<const S*>(p.bias),
          static_cast<const S*>(p.initial_state),
          p.cu_seqlens};
}

int64_t runs_of(const ShortConvParams& p, int64_t run) {
  return p.batch * ((p.tokens + run - 1) / run);
}

dim3 grid_of(const ShortConvParams& p, int64_t blocks) {
  return {static_cast<unsigned>(blocks),
          static_cast<unsigned>((p.channels + kThreads - 1) / kThreads), 1};
}

// launch.operator()<S, kW>() for the storage type, and the width where a kernel is made for it.
template <typename Launch>
cudaError_t dispatch(const ShortConvParams& p, const Launch& launch) {
  if (p.width < 1 || p.width > kMaxConvWidth) return cudaErrorInvalidValue;
  return dispatch_storage(p.dtype, [&](auto tag) {
    using S = decltype(tag);
    p.width == 4 ? launch.template operator()<S, 4>() : launch.template operator()<S, 0>();
    return cudaGetLastError();
  });
}

bool nothing(const ShortConvParams& p) {
  return p.tokens == 0 || p.channels == 0 || p.sequences == 0 || p.batch == 0;
}

}  // namespace

cudaError_t short_conv_forward(const ShortConvParams& p, cudaStream_t stream) {
  if (nothing(p)) return cudaSuccess;
  return dispatch(p, [&]<typename S, int kW>() {
    const Arguments<S> arguments = arguments_of<S>(p);
    forward_kernel<S, kW><<<grid_of(p, runs_of(p, kForwardRun)), kThreads, 0, stream>>>(
        arguments, Output{p.y.data, p.y.batch, p.y.token});
    if (p.final_state != nullptr) {
      final_state_kernel<S><<<grid_of(p, p.sequences), kThreads, 0, stream>>>(
          arguments, static_cast<S*>(p.final_state));
    }
  });
}

int64_t short_conv_backward_workspace(const ShortConvBackwardParams& bp) {
  const ShortConvParams& p = bp.forward;
  if (!bp.grad_weight && !bp.grad_bias) return 0;
  return static_cast<int64_t>(sizeof(float)) * runs_of(p, kBackwardRun) * (p.width + 1) *
         p.channels;
}

cudaError_t short_conv_backward(const ShortConvBackwardParams& bp, void* workspace,
                                cudaStream_t stream) {
  const ShortConvParams& p = bp.forward;
  if (nothing(p)) return cudaSuccess;
  return dispatch(p, [&]<typename S, int kW>() {
    const Arguments<S> arguments = arguments_of<S>(p);
    const bool sums = bp.grad_weight || bp.grad_bias;
    auto* partial = sums ? static_cast<float*>(workspace) : nullptr;
    const Gradients<S> gradients{static_cast<const S*>(bp.grad_y.data),
                                 bp.grad_y.batch,
                                 bp.grad_y.token,
                                 static_cast<const S*>(bp.grad_final_state),
                                 {bp.grad_x.data, bp.grad_x.batch, bp.grad_x.token},
                                 partial};
    const int64_t runs = runs_of(p, kBackwardRun);
    if (sums || bp.grad_x.data) {
      backward_kernel<S, kW><<<grid_of(p, runs), kThreads, 0, stream>>>(arguments, gradients);
    }
    const int64_t stride = (p.width + 1) * p.channels;
    if (bp.grad_weight) {
      launch_partial_sums(partial, runs, stride, p.width * p.channels, p.channels, bp.grad_weight,
                          stream);
    }
    if (bp.grad_bias) {
      launch_partial_sums(partial + p.width * p.channels, runs, stride, p.channels, p.channels,
                          bp.grad_bias, stream);
    }
    if (bp.grad_initial_state) {
      initial_state_kernel<S, kW><<<grid_of(p, p.sequences), kThreads, 0, stream>>>(
          arguments, gradients, static_cast<S*>(bp.grad_initial_state));
    }
  });
}

}  // namespace efla::cuda
