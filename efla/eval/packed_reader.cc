#include "efla/eval/packed_reader.h"

#include <algorithm>
#include <cmath>

#include "efla/eval/loglikelihood.h"
#include "efla/io/error.h"

namespace efla {
namespace {

constexpr int64_t kPiece = 4096;  // tokens of one call when a single sequence is longer
constexpr int64_t kPredictRows = 256;
constexpr int64_t kMinRows = 128, kRowStep = 64;
constexpr int64_t kStateBytes = int64_t{1} << 30;     // for the states of a batch
constexpr int64_t kGpuStateBytes = int64_t{8} << 30;  // the same on a GPU

int64_t padded(int64_t rows) {
  return std::max(kMinRows, (rows + kRowStep - 1) / kRowStep * kRowStep);
}

int64_t state_bytes(const Cache& cache) {
  int64_t bytes = 0;
  for (const Cache::Layer& layer : cache.layers) {
    for (const at::Tensor* part : layer.tensors()) {
      if (part->defined()) bytes += static_cast<int64_t>(part->nbytes());
    }
  }
  return std::max<int64_t>(1, bytes);
}

}  // namespace

PackedReader::PackedReader(LanguageModel model)
    : model_(std::move(model)), device_(model_->head_weight().device()) {
  const torch::NoGradGuard no_grad;
  Cache cache;
  model_->hidden_states(torch::zeros({1, 1}, at::TensorOptions().dtype(at::kLong).device(device_)),
                        {}, &cache);
  const int64_t budget = device_.is_cuda() ? kGpuStateBytes : kStateBytes;
  max_rows_ = std::clamp<int64_t>(budget / state_bytes(cache), 1, 512);
}

void PackedReader::read(Cache* cache) {
  const torch::NoGradGuard no_grad;
  tokens_read_ += static_cast<int64_t>(tokens_.size());
  const auto by_position = [](const Wanted& a, const Wanted& b) { return a.position < b.position; };
  std::stable_sort(wanted_.begin(), wanted_.end(), by_position);
  if (offsets_.size() == 1 && static_cast<int64_t>(tokens_.size()) > kPiece) {
    read_piecewise(cache);
  } else if (!offsets_.empty()) {
    predict(read_all(cache), 0, 0, wanted_.size());
  }
  tokens_.clear();
  offsets_.clear();
  wanted_.clear();
}

at::Tensor PackedReader::read_all(Cache* cache) {
  const auto count = static_cast<int64_t>(tokens_.size());
  at::Tensor ids = torch::zeros({1, padded(count)}, at::kLong);
  std::copy(tokens_.begin(), tokens_.end(), ids.mutable_data_ptr<int64_t>());
  std::vector<int64_t> ends = offsets_;
  ends.push_back(count);  // what follows is padding
  return model_->hidden_states(ids.to(device_), torch::tensor(ends, at::kLong).to(device_), cache);
}

void PackedReader::read_piecewise(Cache* cache) {
  Cache own;
  Cache* const state = cache != nullptr ? cache : &own;
  const std::vector<int64_t> tokens = std::move(tokens_);
  const auto count = static_cast<int64_t>(tokens.size());
  size_t first = 0;
  for (int64_t begin = 0; begin < count; begin += kPiece) {
    const int64_t end = std::min(count, begin + kPiece);
    tokens_.assign(tokens.begin() + begin, tokens.begin() + end);
    const at::Tensor hidden = read_all(state);
    size_t last = first;
    while (last < wanted_.size() && wanted_[last].position < end) ++last;
    predict(hidden, begin, first, last);
    first = last;
  }
}

void PackedReader::predict(const at::Tensor& hidden, int64_t begin, size_t first, size_t last) {
  while (first < last) {
    // Wanted tokens after up to kPredictRows different positions, in a row.
    std::vector<int64_t> positions, rows, targets;
    size_t i = first;
    for (; i < last; ++i) {
      const int64_t position = wanted_[i].position - begin;
      if (positions.empty() || positions.back() != position) {
        if (static_cast<int64_t>(positions.size()) == kPredictRows) break;
        positions.push_back(position);
      }
      rows.push_back(static_cast<int64_t>(positions.size()) - 1);
      targets.push_back(wanted_[i].token);
    }
    positions.resize(static_cast<size_t>(padded(static_cast<int64_t>(positions.size()))),
                     positions[0]);
    const auto on_device = [this](const std::vector<int64_t>& values) {
      return torch::tensor(values, at::kLong).to(device_);
    };
    const at::Tensor logits = model_->logits(hidden[0].index_select(0, on_device(positions)));
    const auto dtype = logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor log_probs = at::log_softmax(logits, -1, dtype);
    const at::Tensor wanted_rows = on_device(rows), wanted_tokens = on_device(targets);
    const at::Tensor chosen =
        log_probs.index({wanted_rows, wanted_tokens}).to(at::kCPU, at::kDouble).contiguous();
    const at::Tensor best = log_probs.argmax(-1)
                                .index_select(0, wanted_rows)
                                .eq(wanted_tokens)
                                .to(at::kCPU)
                                .contiguous();
    for (size_t j = 0; j < targets.size(); ++j) {
      const double log = chosen.const_data_ptr<double>()[j];
      if (std::isnan(log)) {
        throw Error("the model's predictions are not finite on this data; its weights are bad");
      }
      Likelihood& result = *wanted_[first + j].result;
      result.log += log;
      result.greedy = result.greedy && best.const_data_ptr<bool>()[j];
    }
    first = i;
  }
}

}  // namespace efla
