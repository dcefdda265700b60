// The language model: embeddings, blocks of mixer and SwiGLU MLP, final norm, head
// (docs/mathematics.md, "The layer"). Parameters carry fla's key names:
// model.layers.0.attn.q_proj.weight, ..., lm_head.weight.
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

/// x += attn(attn_norm(x)); x += mlp(mlp_norm(x)).
class BlockImpl : public torch::nn::Module {
 public:
  BlockImpl(const ModelConfig& config, const at::TensorOptions& options);
  at::Tensor forward(const at::Tensor& x, const std::optional<at::Tensor>& cu_seqlens,
                     Cache::Layer* cache);
  void initialize(double range);

 private:
  RmsNorm attn_norm_ = nullptr;
  std::shared_ptr<Mixer> attn_;
  RmsNorm mlp_norm_ = nullptr;
  SwigluMlp mlp_ = nullptr;
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
