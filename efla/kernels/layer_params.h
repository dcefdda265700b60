// Plain-pointer parameters of the layer's other kernels: causal depthwise convolution with SiLU,
// RMS norm with an optional gate, SwiGLU. Same conventions as params.h; each has a backward. Rows
// of a tensor [R, D] are contiguous in D.
#pragma once

#include "efla/kernels/params.h"

namespace efla {

/// Causal depthwise convolution over time, optional bias and SiLU: y[t, d] = act(bias[d] + sum_w
/// weight[d, w] * x[t - W + 1 + w, d]). Inputs before the start of a sequence come from
/// `initial_state` ([N, D, W], the last W inputs before the sequence, oldest first) or are zero.
/// `final_state` receives the last W inputs of each sequence in the same layout.
struct ShortConvParams {
  int64_t batch = 0, tokens = 0, channels = 0, width = 0, sequences = 0;
  DType dtype = DType::kFloat32;
  bool silu = true;
  View x;                               // [B, T, D]: strides batch, token (head unused)
  const void* weight = nullptr;         // [D, W] contiguous, storage type
  const void* bias = nullptr;           // [D] contiguous, storage type; or null (zeros)
  const void* initial_state = nullptr;  // [N, D, W] contiguous, storage type; or null
  const int64_t* cu_seqlens = nullptr;  // [N + 1]; null: dense
  MutableView y;                        // [B, T, D]
  void* final_state = nullptr;          // [N, D, W] contiguous, storage type; or null
};
struct ShortConvBackwardParams {
  ShortConvParams forward;      // x, weight, bias, initial_state, cu_seqlens; y, final_state unused
  View grad_y;                  // [B, T, D]
  MutableView grad_x;           // [B, T, D]; null where not wanted
  void* grad_weight = nullptr;  // [D, W] contiguous, arithmetic type; or null
  void* grad_bias = nullptr;    // [D], arithmetic type; or null
  // Gradients of the states, [N, D, W]; null where not wanted.
  const void* grad_final_state = nullptr;
  void* grad_initial_state = nullptr;
};

/// y = x * rsqrt(mean(x^2) + eps) * weight [* silu(gate)], rows of length D.
struct RmsNormParams {
  int64_t rows = 0, dim = 0;
  DType dtype = DType::kFloat32;
  double eps = 1e-6;
  const void* x = nullptr;       // [R, D] contiguous, storage type
  const void* weight = nullptr;  // [D], storage type; or null (ones)
  const void* gate = nullptr;    // [R, D] contiguous; or null
  void* y = nullptr;             // [R, D]
};
struct RmsNormBackwardParams {
  RmsNormParams forward;         // y unused
  const void* grad_y = nullptr;  // [R, D]
  void* grad_x = nullptr;        // [R, D]; or null
  void* grad_weight = nullptr;   // [D] arithmetic type; or null
  void* grad_gate = nullptr;     // [R, D]; or null
};

/// y = silu(gate) * up, elementwise over `count` contiguous elements.
struct SwigluParams {
  int64_t count = 0;
  DType dtype = DType::kFloat32;
  const void* gate = nullptr;
  const void* up = nullptr;
  void* y = nullptr;
};
struct SwigluBackwardParams {
  SwigluParams forward;  // y unused
  const void* grad_y = nullptr;
  void* grad_gate = nullptr;  // or null
  void* grad_up = nullptr;    // or null
};

}  // namespace efla
