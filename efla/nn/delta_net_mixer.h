// DeltaNet, EFLA and their gated forms: projections, short convolutions, the delta rule with a step
// rule and perhaps a decay, per-head norm. The systems differ in the config alone: DeltaNet is rule
// euler on unit keys, EFLA rule exact on raw keys (docs/mathematics.md, "The layer").
#pragma once

#include "efla/nn/layers.h"
#include "efla/nn/mixer.h"

namespace efla {

class DeltaNetMixer : public Mixer {
 public:
  DeltaNetMixer(const ModelConfig& config, const at::TensorOptions& options);
  at::Tensor forward(const at::Tensor& x, const std::optional<at::Tensor>& cu_seqlens,
                     Cache::Layer* cache) override;
  void initialize(double range) override;

 private:
  void register_projections(const ModelConfig& config, const at::TensorOptions& options);
  void register_convolutions(const ModelConfig& config, const at::TensorOptions& options);
  // One of q, k, v: projection, convolution, activation, [B, T, heads, size / heads].
  at::Tensor stream(const at::Tensor& x, const Linear& projection, const ShortConv& conv,
                    QkActivation activation, int64_t heads,
                    const std::optional<at::Tensor>& cu_seqlens, at::Tensor* tail) const;
  at::Tensor beta(const at::Tensor& x) const;                      // [B, T, HV]
  std::optional<at::Tensor> log_decay(const at::Tensor& x) const;  // [B, T, HV]; none if ungated
  at::Tensor recurrence(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const at::Tensor& beta, const std::optional<at::Tensor>& log_decay,
                        const std::optional<at::Tensor>& cu_seqlens, at::Tensor* state) const;
  at::Tensor output(const at::Tensor& o, const at::Tensor& x) const;

  const int64_t num_heads_, value_heads_;  // H, HV
  const std::string rule_;
  const BetaActivation beta_activation_;
  const bool allow_neg_eigval_;
  const QkActivation qk_activation_;
  const QkNorm k_norm_, q_norm_;
  const bool norm_in_operator_;  // l2 of both: the operator does it
  const double conv_range_;      // of the convolutions' initial weights; 0: as the rest

  Linear q_proj_ = nullptr, k_proj_ = nullptr, v_proj_ = nullptr, o_proj_ = nullptr;
  Linear a_proj_ = nullptr;                                           // absent: no decay
  Linear b_proj_ = nullptr;                                           // absent: beta = 1
  Linear g_proj_ = nullptr;                                           // absent: no output gate
  ShortConv q_conv_ = nullptr, k_conv_ = nullptr, v_conv_ = nullptr;  // absent: none
  RmsNorm o_norm_ = nullptr;                                          // absent: none
  at::Tensor a_log_, dt_bias_;  // [HV], float32 or wider; defined with a_proj
  at::Tensor adaptive_decay_;   // [HV]; defined for BetaActivation::kAdaptive
};

}  // namespace efla
