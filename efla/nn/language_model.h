// The language model of every family: embeddings, blocks of mixer and SwiGLU MLP, final norm, head
// (docs/mathematics.md, "The layer"; docs/models.md). Parameters carry fla's key names:
// model.layers.0.attn.q_proj.weight, ..., lm_head.weight; for Mamba-2 backbone.layers.0.mixer....
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "efla/nn/cache.h"
#include "efla/nn/config.h"
#include "efla/nn/layers.h"
#include "efla/nn/loss.h"
#include "efla/nn/mixer.h"

namespace efla {

/// Where the weights of a new model come from.
enum class WeightInit {
  kRandom,  // N(0, initializer_range), norms 1, from torch's global generator (torch::manual_seed)
  kNone,    // left as allocated, for a loader that fills them
};

/// x += mixer(norm(x)); x += mlp(mlp_norm(x)), the latter where the family has an MLP.
class BlockImpl : public torch::nn::Module {
 public:
  BlockImpl(const ModelConfig& config, int64_t layer, const at::TensorOptions& options);
  at::Tensor forward(const at::Tensor& x, const std::optional<at::Tensor>& cu_seqlens,
                     Cache::Layer* cache);
  void initialize(double range);

 private:
  RmsNorm mixer_norm_ = nullptr;
  std::shared_ptr<Mixer> mixer_;
  RmsNorm mlp_norm_ = nullptr;
  SwigluMlp mlp_ = nullptr;  // absent: mixer alone
};
TORCH_MODULE(Block);

/// Everything below the head; its own module because fla's keys start with "model.".
class BackboneImpl : public torch::nn::Module {
 public:
  BackboneImpl(const ModelConfig& config, const at::TensorOptions& options);
  at::Tensor forward(const at::Tensor& input_ids, const std::optional<at::Tensor>& cu_seqlens,
                     Cache* cache);
  void initialize(double range);
  const at::Tensor& embedding_weight() const { return embeddings_->weight; }

 private:
  const bool residual_in_fp32_;  // the residual stream at least float32, whatever the weights
  Embedding embeddings_ = nullptr;
  std::vector<Block> blocks_;
  RmsNorm norm_ = nullptr;
};
TORCH_MODULE(Backbone);

class LanguageModelImpl : public torch::nn::Module {
 public:
  /// Validates the config. `options`: dtype (float32, bfloat16, float64) and device of the weights.
  explicit LanguageModelImpl(ModelConfig config, const at::TensorOptions& options = {},
                             WeightInit init = WeightInit::kRandom);

  /// input_ids [B, T] int64 -> logits [B, T, vocab] in the dtype of the weights. cu_seqlens [N + 1]
  /// (int32 or int64) packs N documents into B = 1. With a cache the B (or N) sequences go on where
  /// it stands and it is advanced; any T, also T = 1 token by token.
  at::Tensor forward(const at::Tensor& input_ids, const std::optional<at::Tensor>& cu_seqlens = {},
                     Cache* cache = nullptr);

  /// The same without the head: [B, T, hidden], after the final norm.
  at::Tensor hidden_states(const at::Tensor& input_ids,
                           const std::optional<at::Tensor>& cu_seqlens = {},
                           Cache* cache = nullptr);
  at::Tensor logits(const at::Tensor& hidden);

  /// Rows of different lengths: attention_mask [B, T] (bool or integer) is non-zero at the tokens
  /// that count, wherever they stand in their rows; what stands elsewhere is not looked at. The
  /// same as every row's valid tokens alone; zeros at the padding. A cache advances by the valid
  /// tokens.
  at::Tensor forward_padded(const at::Tensor& input_ids, const at::Tensor& attention_mask,
                            Cache* cache = nullptr);
  at::Tensor hidden_states_padded(const at::Tensor& input_ids, const at::Tensor& attention_mask,
                                  Cache* cache = nullptr);

  /// Sum of the cross entropy of targets [B, T] (kIgnoreTarget = ignored) and their number; never
  /// holds all logits. For a mean: loss.nll / loss.count. Targets are not shifted here.
  LossSum loss(const at::Tensor& input_ids, const at::Tensor& targets,
               const std::optional<at::Tensor>& cu_seqlens = {}, Cache* cache = nullptr);

  /// The head's weight [vocab, hidden]: lm_head, or the embeddings when tied.
  const at::Tensor& head_weight() const;
  const ModelConfig& config() const { return config_; }
  at::ScalarType dtype() const { return head_weight().scalar_type(); }

 private:
  ModelConfig config_;
  Backbone model_ = nullptr;
  Linear lm_head_ = nullptr;  // absent when tied
};
TORCH_MODULE(LanguageModel);

}  // namespace efla
