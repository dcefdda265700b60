#include "efla/nn/language_model.h"

#include <utility>

#include "efla/nn/padding.h"

namespace efla {

namespace {

// Where fla's Mamba-2 keeps the names of state-spaces, every other family has transformer names.
struct Names {
  const char *backbone, *final_norm, *mixer_norm, *mixer;
};

Names names_of(const ModelConfig& config) {
  if (config.model_type == "mamba2") return {"backbone", "norm_f", "norm", "mixer"};
  return {"model", "norm", "attn_norm", "attn"};
}

// The branch's output is a fresh tensor that no backward reads: the residual is added into it,
// unless the residual is the wider of the two.
at::Tensor add_residual(const at::Tensor& branch, const at::Tensor& x) {
  return branch.scalar_type() == x.scalar_type() ? branch.add_(x) : x + branch;
}

}  // namespace

BlockImpl::BlockImpl(const ModelConfig& config, int64_t layer, const at::TensorOptions& options) {
  const int64_t d = config.hidden_size;
  const Names names = names_of(config);
  mixer_norm_ = register_module(names.mixer_norm, RmsNorm(d, config.norm_eps, options));
  mixer_ = register_module(names.mixer, make_mixer(config, layer, options));
  if (!config.has_mlp()) return;
  mlp_norm_ = register_module("mlp_norm", RmsNorm(d, config.norm_eps, options));
  mlp_ = register_module("mlp", SwigluMlp(d, config.mlp_size(), options));
}

at::Tensor BlockImpl::forward(const at::Tensor& x, const std::optional<at::Tensor>& cu_seqlens,
                              Cache::Layer* cache) {
  const at::Tensor h = add_residual(mixer_->forward(mixer_norm_->forward(x), cu_seqlens, cache), x);
  return mlp_ ? add_residual(mlp_->forward(mlp_norm_->forward(h)), h) : h;
}

void BlockImpl::initialize(double range) {
  mixer_norm_->initialize();
  mixer_->initialize(range);
  if (!mlp_) return;
  mlp_norm_->initialize();
  mlp_->initialize(range);
}

BackboneImpl::BackboneImpl(const ModelConfig& config, const at::TensorOptions& options)
    : residual_in_fp32_(config.model_type == "mamba2" && config.mamba2.residual_in_fp32) {
  embeddings_ =
      register_module("embeddings", Embedding(config.vocab_size, config.hidden_size, options));
  torch::nn::ModuleList layers;
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    blocks_.emplace_back(config, i, options);
    layers->push_back(blocks_.back().ptr());
  }
  register_module("layers", layers);
  norm_ = register_module(names_of(config).final_norm,
                          RmsNorm(config.hidden_size, config.norm_eps, options));
}

at::Tensor BackboneImpl::forward(const at::Tensor& input_ids,
                                 const std::optional<at::Tensor>& cu_seqlens, Cache* cache) {
  at::Tensor x = embeddings_->forward(input_ids);
  if (residual_in_fp32_ && x.scalar_type() != at::kDouble) x = x.to(at::kFloat);
  for (size_t i = 0; i < blocks_.size(); ++i) {
    x = blocks_[i]->forward(x, cu_seqlens, cache ? &cache->layers[i] : nullptr);
  }
  return norm_->forward(x);
}

void BackboneImpl::initialize(double range) {
  embeddings_->initialize(range);
  for (Block& block : blocks_) block->initialize(range);
  norm_->initialize();
}

namespace {

// Everything that could fail half-way is checked here, so that a refused call leaves the cache as
// it was.
void check_inputs(const at::Tensor& ids, const std::optional<at::Tensor>& cu_seqlens,
                  const Cache* cache, const ModelConfig& config) {
  TORCH_CHECK(ids.dim() == 2 && ids.scalar_type() == at::kLong,
              "input_ids must be int64 [B, T], got ", ids.scalar_type(), " ", ids.sizes());
  if (ids.numel() > 0 && ids.is_cpu()) {
    const auto [low, high] = at::aminmax(ids);
    const int64_t min_id = low.item<int64_t>(), max_id = high.item<int64_t>();
    TORCH_CHECK(min_id >= 0 && max_id < config.vocab_size,
                "input_ids must lie between 0 and vocab_size - 1 = ", config.vocab_size - 1,
                ", got ", min_id < 0 ? min_id : max_id);
  }
  TORCH_CHECK(
      !cu_seqlens || (ids.size(0) == 1 && cu_seqlens->dim() == 1 && cu_seqlens->numel() > 0),
      "cu_seqlens must be [N + 1] with input_ids [1, T], got input_ids ", ids.sizes());
  if (!cache || cache->empty()) return;
  const int64_t sequences = cu_seqlens ? cu_seqlens->numel() - 1 : ids.size(0);
  TORCH_CHECK(static_cast<int64_t>(cache->layers.size()) == config.num_hidden_layers,
              "cache must be of a model of ", config.num_hidden_layers, " layers, it has ",
              cache->layers.size());
  TORCH_CHECK(cache->batch_size() == sequences, "cache holds ", cache->batch_size(),
              " sequences, the call has ", sequences);
}

int64_t longest(const at::Tensor& ids, const std::optional<at::Tensor>& cu_seqlens) {
  if (!cu_seqlens) return ids.size(1);
  return cu_seqlens->numel() > 1 ? cu_seqlens->diff().max().item().toLong() : 0;
}

}  // namespace

LanguageModelImpl::LanguageModelImpl(ModelConfig config, const at::TensorOptions& options,
                                     WeightInit init)
    : config_(std::move(config)) {
  config_.validate();
  model_ = register_module(names_of(config_).backbone, Backbone(config_, options));
  if (!config_.tie_word_embeddings) {
    lm_head_ = register_module("lm_head", Linear(config_.hidden_size, config_.vocab_size, options));
  }
  if (init == WeightInit::kRandom) {
    model_->initialize(config_.initializer_range);
    if (lm_head_) lm_head_->initialize(config_.initializer_range);
  }
}

const at::Tensor& LanguageModelImpl::head_weight() const {
  return lm_head_ ? lm_head_->weight : model_->embedding_weight();
}

at::Tensor LanguageModelImpl::hidden_states(const at::Tensor& input_ids,
                                            const std::optional<at::Tensor>& cu_seqlens,
                                            Cache* cache) {
  check_inputs(input_ids, cu_seqlens, cache, config_);
  if (cache && cache->empty()) cache->layers.resize(config_.num_hidden_layers);
  at::Tensor hidden = model_->forward(input_ids, cu_seqlens, cache);
  if (cache) cache->tokens_seen += longest(input_ids, cu_seqlens);
  return hidden;
}

at::Tensor LanguageModelImpl::logits(const at::Tensor& hidden) {
  return at::linear(hidden, head_weight());
}

at::Tensor LanguageModelImpl::forward(const at::Tensor& input_ids,
                                      const std::optional<at::Tensor>& cu_seqlens, Cache* cache) {
  return logits(hidden_states(input_ids, cu_seqlens, cache));
}

at::Tensor LanguageModelImpl::hidden_states_padded(const at::Tensor& input_ids,
                                                   const at::Tensor& attention_mask, Cache* cache) {
  const PaddedRows rows(attention_mask.to(input_ids.device()), input_ids.sizes());
  if (rows.all_valid()) return hidden_states(input_ids, {}, cache);
  return rows.unpack(hidden_states(rows.pack(input_ids), rows.cu_seqlens, cache));
}

at::Tensor LanguageModelImpl::forward_padded(const at::Tensor& input_ids,
                                             const at::Tensor& attention_mask, Cache* cache) {
  return logits(hidden_states_padded(input_ids, attention_mask, cache));
}

LossSum LanguageModelImpl::loss(const at::Tensor& input_ids, const at::Tensor& targets,
                                const std::optional<at::Tensor>& cu_seqlens, Cache* cache) {
  return linear_cross_entropy(hidden_states(input_ids, cu_seqlens, cache), head_weight(), targets);
}

}  // namespace efla
