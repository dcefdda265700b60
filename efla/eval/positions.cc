#include "efla/eval/positions.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "efla/io/error.h"

namespace efla {
namespace {

constexpr int64_t kFirstRange = 64;
constexpr int64_t kMaxRows = 16;

std::vector<PositionRange> ranges_until(int64_t length) {
  std::vector<PositionRange> ranges;
  for (int64_t begin = 0, end = kFirstRange; begin < length; begin = end, end = 2 * begin) {
    ranges.push_back({begin, std::min(end, length), 0, std::nullopt});
  }
  return ranges;
}

// Segments as rows [n, length + 1]: the token before each, then its tokens.
at::Tensor segments_of(const EvalData& data, int64_t length, int64_t vocab) {
  std::vector<at::Tensor> rows;
  int64_t longest = 0;
  for (const EvalDocument& document : data.documents) {
    // Without a prefix the first token of a segment serves as one and is not predicted.
    const int64_t prefix = data.prefix_token ? 1 : 0;
    const int64_t needed = length + 1 - prefix;
    const int64_t count = document.tokens.numel();
    longest = std::max(longest, count);
    for (int64_t begin = 0; begin + needed <= count; begin += length) {
      at::Tensor row = document.tokens.narrow(0, begin, needed);
      if (prefix == 1) row = at::cat({torch::tensor({*data.prefix_token}, at::kLong), row});
      rows.push_back(row);
    }
  }
  if (rows.empty()) {
    throw UsageError(fmt::format(
        "no document has {} tokens, the longest has {}; ask for fewer positions or give a longer "
        "text",
        length, longest));
  }
  const at::Tensor segments = at::stack(rows);
  const int64_t low = segments.min().item<int64_t>(), high = segments.max().item<int64_t>();
  if (low < 0 || high >= vocab) {
    throw Error(fmt::format(
        "token {} is outside the model's vocabulary of {}; use the tokenizer that the model was "
        "trained with",
        low < 0 ? low : high, vocab));
  }
  return segments;
}

}  // namespace

PositionLoss position_loss(LanguageModel model, const EvalData& data, int64_t length,
                           const PerplexityOptions& options) {
  const torch::NoGradGuard no_grad;
  PositionLoss result{length, 0, ranges_until(length)};
  const at::Tensor segments = segments_of(data, length, model->config().vocab_size);
  result.segments = segments.size(0);
  const at::Device device = model->head_weight().device();
  const int64_t rows =
      std::clamp<int64_t>(options.batch_tokens / 256, 1, std::min(kMaxRows, result.segments));
  const int64_t chunk = std::max<int64_t>(1, options.batch_tokens / rows);
  const at::Tensor nll = at::zeros({result.segments, length}, at::kDouble);
  for (int64_t first = 0; first < result.segments; first += rows) {
    const at::Tensor group = segments.narrow(0, first, std::min(rows, result.segments - first));
    Cache cache;
    for (int64_t begin = 0; begin < length; begin += chunk) {
      const int64_t width = std::min(chunk, length - begin);
      const at::Tensor inputs = group.narrow(1, begin, width).to(device);
      const at::Tensor targets = group.narrow(1, begin + 1, width).to(device);
      const at::Tensor hidden = model->hidden_states(inputs, {}, &cache);
      const at::Tensor losses = token_nll(hidden, model->head_weight(), targets);
      if (!losses.isfinite().all().item<bool>()) {
        throw Error("the model's loss is not finite on this data; its weights are bad");
      }
      nll.narrow(0, first, group.size(0)).narrow(1, begin, width).copy_(losses);
      if (options.progress) {
        options.progress(first * length + (begin + width) * group.size(0),
                         result.segments * length);
      }
    }
  }
  for (PositionRange& range : result.ranges) {
    const at::Tensor means = nll.narrow(1, range.begin, range.end - range.begin).mean(1);
    range.loss = means.mean().item<double>();
    if (result.segments > 1) {
      range.error = means.std().item<double>() / std::sqrt(static_cast<double>(result.segments));
    }
  }
  return result;
}

}  // namespace efla
