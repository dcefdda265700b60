// Models for the tests of this room, small enough to check by other means.
#pragma once

#include <torch/torch.h>

#include <functional>

#include "efla/nn/language_model.h"

namespace efla::testing {

/// Two layers with random weights; large enough that every token's prediction depends on the past.
inline LanguageModel random_model(int64_t vocab_size, uint64_t seed = 1) {
  torch::manual_seed(seed);
  ModelConfig config;
  config.vocab_size = vocab_size;
  config.hidden_size = 32;
  config.num_hidden_layers = 2;
  config.num_heads = 2;
  config.initializer_range = 0.2;
  return LanguageModel(config);
}

/// Every token is equally likely: the head is zero.
inline LanguageModel uniform_model(int64_t vocab_size) {
  LanguageModel model = random_model(vocab_size);
  const torch::NoGradGuard no_grad;
  model->head_weight().fill_(0);
  return model;
}

/// A chain: after token t the model is certain of next(t). Embeddings are one-hot, the blocks add
/// nothing, and the head maps the one-hot vector of t to a large logit for next(t).
inline LanguageModel chain_model(int64_t vocab_size, const std::function<int64_t(int64_t)>& next) {
  ModelConfig config;
  config.vocab_size = vocab_size;
  config.hidden_size = 2 * ((vocab_size + 1) / 2);
  config.num_hidden_layers = 1;
  config.num_heads = 2;
  LanguageModel model(config);
  const torch::NoGradGuard no_grad;
  for (auto& item : model->named_parameters()) {
    const std::string& name = item.key();
    if (name.find("o_proj") != std::string::npos || name.find("down_proj") != std::string::npos ||
        name.find("embeddings") != std::string::npos || name.find("lm_head") != std::string::npos) {
      item.value().fill_(0);
    }
  }
  at::Tensor embeddings = model->named_parameters()["model.embeddings.weight"];
  at::Tensor head = model->head_weight();
  for (int64_t token = 0; token < vocab_size; ++token) {
    embeddings[token][token] = 1;
    head[next(token)][token] = 10;
  }
  return model;
}

}  // namespace efla::testing
