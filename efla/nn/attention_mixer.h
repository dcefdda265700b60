// Softmax attention with rotary positions, grouped keys and values, an optional sliding window and
// optional norms of queries and keys: the layers of a transformer and the softmax layers of a
// hybrid. Key names are fla's. docs/models.md.
#pragma once

#include <vector>

#include "efla/nn/layers.h"
#include "efla/nn/mixer.h"

namespace efla {

class AttentionMixer : public Mixer {
 public:
  /// Reads config.attn, which must be there; heads are hidden_size / num_heads wide.
  AttentionMixer(const ModelConfig& config, const at::TensorOptions& options);
  at::Tensor forward(const at::Tensor& x, const std::optional<at::Tensor>& cu_seqlens,
                     Cache::Layer* cache) override;
  void initialize(double range) override;

 private:
  struct Streams {
    at::Tensor q, k, v;  // [B, heads, T, head size]; q, k rotated
  };
  /// positions [T] or [B, T] int64 on the CPU.
  Streams streams(const at::Tensor& x, const at::Tensor& positions) const;
  at::Tensor forward_rows(const at::Tensor& x, Cache::Layer* cache) const;
  at::Tensor forward_packed(const at::Tensor& x, const std::vector<int64_t>& offsets,
                            Cache::Layer* cache) const;

  const AttentionConfig config_;
  const int64_t head_size_;
  const int64_t window_;  // tokens that a query sees, itself included; 0: all

  Linear q_proj_ = nullptr, k_proj_ = nullptr, v_proj_ = nullptr, o_proj_ = nullptr;
  RmsNorm q_norm_ = nullptr, k_norm_ = nullptr;  // absent without qk_norm; weight [head size]
};

}  // namespace efla
