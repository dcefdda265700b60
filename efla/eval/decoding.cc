#include "efla/eval/decoding.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "efla/io/error.h"

namespace efla {
namespace {

constexpr size_t kPieceTokens = 4096;  // of a prompt read in one forward call

}  // namespace

Decoding::Decoding(LanguageModel model) : model_(std::move(model)) {}

void Decoding::read(std::span<const int32_t> tokens) {
  if (tokens.empty()) throw Error("there are no tokens to read");
  const int64_t vocab = model_->config().vocab_size;
  for (const int32_t token : tokens) {
    if (token < 0 || token >= vocab) {
      throw Error(
          fmt::format("token {} is outside the model's vocabulary of {}; use the tokenizer "
                      "that the model was trained with",
                      token, vocab));
    }
  }
  const torch::NoGradGuard no_grad;
  const at::Device device = model_->head_weight().device();
  at::Tensor hidden;  // [1, T, hidden]
  for (size_t begin = 0; begin < tokens.size(); begin += kPieceTokens) {
    const std::span<const int32_t> piece =
        tokens.subspan(begin, std::min(kPieceTokens, tokens.size() - begin));
    at::Tensor ids = at::empty({1, static_cast<int64_t>(piece.size())}, at::kLong);
    std::copy(piece.begin(), piece.end(), ids.mutable_data_ptr<int64_t>());
    hidden = model_->hidden_states(ids.to(device), {}, &cache_);
  }
  const at::Tensor last = model_->logits(hidden.narrow(1, hidden.size(1) - 1, 1))
                              .reshape({vocab})
                              .to(at::kCPU, at::kFloat)
                              .contiguous();
  logits_.resize(static_cast<size_t>(vocab));
  std::memcpy(logits_.data(), last.const_data_ptr<float>(), logits_.size() * sizeof(float));
}

int64_t Decoding::state_bytes() const {
  int64_t bytes = 0;
  for (const Cache::Layer& layer : cache_.layers) {
    for (const at::Tensor* part : layer.tensors()) {
      if (part->defined()) bytes += static_cast<int64_t>(part->nbytes());
    }
  }
  return bytes;
}

}  // namespace efla
