// Mamba-2: one projection to z, x, B, C and dt, a causal convolution over x, B and C together, the
// scan as the step rule `linear` (q = C, k = B, v = x, beta = dt, log-decay dt A), the skip D x and
// a gated norm. Key names and layouts are those of state-spaces/mamba and fla. docs/models.md.
#pragma once

#include "efla/nn/layers.h"
#include "efla/nn/mixer.h"

namespace efla {

class Mamba2Mixer : public Mixer {
 public:
  Mamba2Mixer(const ModelConfig& config, const at::TensorOptions& options);
  at::Tensor forward(const at::Tensor& x, const std::optional<at::Tensor>& cu_seqlens,
                     Cache::Layer* cache) override;
  /// A ~ U(a_init_low, a_init_high), dt log-uniform in [dt_min, dt_max], D = 1, out_proj scaled
  /// down with the depth if the config says so; the rest N(0, range).
  void initialize(double range) override;

 private:
  at::Tensor step_sizes(const at::Tensor& dt) const;  // [B, T, HV], at least float32
  // x [B, T, HV, P], B and C [B, T, G, N], dt [B, T, HV] -> y [B, T, HV, P]
  at::Tensor scan(const at::Tensor& x, const at::Tensor& b, const at::Tensor& c,
                  const at::Tensor& dt, const std::optional<at::Tensor>& cu_seqlens,
                  at::Tensor* state) const;
  at::Tensor gated_norm(const at::Tensor& y, const at::Tensor& z) const;  // both [B, T, inner]

  const Mamba2Config config_;
  const int64_t inner_, heads_;  // channels of x; HV
  const int64_t layers_;         // of the model, for initialize()
  const double norm_eps_;
  const double conv_range_;  // of the convolution's initial weights; 0: as the rest

  Linear in_proj_ = nullptr, out_proj_ = nullptr;
  ShortConv conv_ = nullptr;
  RmsNorm norm_ = nullptr;          // holds the weight [inner]; absent without rmsnorm
  at::Tensor dt_bias_, a_log_, d_;  // [HV], at least float32
};

}  // namespace efla
