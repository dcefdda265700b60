// The operators as C++ functions over at::Tensor. Each is registered as torch.ops.efla.NAME with
// autograd and meta kernels; these functions go through the dispatcher.
//
// Shapes: q, k [B,T,H,K]; v, o [B,T,HV,V]; beta, log_decay [B,T,HV]; state [N,HV,K,V] float32
// (float64 for float64 inputs); HV a multiple of H; K, V <= 512. Values are the caller's: beta >= 0
// for the exact rules, log_decay <= 0. On the CPU float16 runs through float32 copies. Gradients
// are first derivatives in reverse mode. Bad arguments throw c10::Error (RuntimeError in Python)
// naming the argument and its shape.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace efla::ops {

/// Optional arguments of chunk() and recurrent(); the defaults are those of the Python API.
struct Options {
  std::optional<at::Tensor> log_decay;      // [B,T,HV]
  std::string_view rule = "exact";          // linear, euler, rk2, rk4, exact, exact_log
  std::optional<double> scale;              // default K^-0.5
  std::optional<at::Tensor> initial_state;  // [N,HV,K,V]
  bool output_final_state = false;
  std::optional<at::Tensor> cu_seqlens;  // [N+1] int32 or int64; then B = 1
  bool qk_l2norm = false;
  bool recompute = false;  // backward in two halves: on a GPU half the workspace, more time
};

/// Chunkwise-parallel form. Returns (o [B,T,HV,V], final state [N,HV,K,V] or an undefined tensor).
std::tuple<at::Tensor, at::Tensor> chunk(const at::Tensor& q, const at::Tensor& k,
                                         const at::Tensor& v, const at::Tensor& beta,
                                         const Options& options = {});

/// The same function computed token by token.
std::tuple<at::Tensor, at::Tensor> recurrent(const at::Tensor& q, const at::Tensor& k,
                                             const at::Tensor& v, const at::Tensor& beta,
                                             const Options& options = {});

/// One token (or T <= 8) per sequence, state [P,HV,K,V] updated in place; no gradient.
/// q, k [B,H,K] or [B,T,H,K]; state_indices [B] int32/int64, -1 = padding row. The state is float32
/// (float64 for float64 q) or, in half the memory and rounded once a call, bfloat16 or float16.
at::Tensor step_(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                 const at::Tensor& beta, at::Tensor& state,
                 const std::optional<at::Tensor>& log_decay = {}, std::string_view rule = "exact",
                 std::optional<double> scale = {},
                 const std::optional<at::Tensor>& state_indices = {}, bool qk_l2norm = false);

/// Causal depthwise convolution, x [B,T,D], weight [D,W], optional bias [D] and SiLU. initial_state
/// [N,D,W] is the last W inputs before the sequence. Returns (y [B,T,D], final state [N,D,W] or
/// undefined).
std::tuple<at::Tensor, at::Tensor> short_conv(const at::Tensor& x, const at::Tensor& weight,
                                              bool silu = true,
                                              const std::optional<at::Tensor>& initial_state = {},
                                              bool output_final_state = false,
                                              const std::optional<at::Tensor>& cu_seqlens = {},
                                              const std::optional<at::Tensor>& bias = {});

/// x * rsqrt(mean(x^2, -1) + eps) * weight [* silu(gate)] over the last dimension.
at::Tensor rms_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight, double eps,
                    const std::optional<at::Tensor>& gate = {});

/// silu(gate) * up, same shapes.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

}  // namespace efla::ops
