#include "efla/train/held_out.h"

#include <algorithm>

namespace efla {
namespace {

// Bytes of text that the targets of a batch stand for. After bos a text begins, where SentencePiece
// may drop a space.
int64_t target_bytes(const Batch& batch, const Tokenizer& tokenizer) {
  const int64_t* inputs = batch.input_ids.data_ptr<int64_t>();
  const int64_t* targets = batch.targets.data_ptr<int64_t>();
  int64_t bytes = 0;
  for (int64_t i = 0; i < batch.targets.numel(); ++i) {
    if (targets[i] < 0) continue;
    const auto id = static_cast<int32_t>(targets[i]);
    const bool first = tokenizer.bos_id() >= 0 && inputs[i] == tokenizer.bos_id();
    const std::string text = first ? tokenizer.first_token_bytes(id) : tokenizer.token_bytes(id);
    bytes += static_cast<int64_t>(text.size());
  }
  return bytes;
}

}  // namespace

std::optional<HeldOutLoss> held_out_loss(LanguageModel& model, const TokenDataset& data,
                                         const Tokenizer& tokenizer, int64_t rows,
                                         int64_t max_tokens, const std::function<bool()>& stop) {
  const torch::NoGradGuard no_grad;
  const int64_t length = data.options().length;
  int64_t last = data.sequential_rows();
  if (max_tokens > 0) last = std::min(last, (max_tokens + length - 1) / length);
  const bool whole = last == data.sequential_rows();
  HeldOutLoss result;
  result.length = length;
  for (int64_t first = 0; first < last; first += rows) {
    if (stop()) return std::nullopt;
    const Batch batch = data.sequential_batch(first, std::min(rows, last - first));
    const LossSum loss = model->loss(batch.input_ids, batch.targets, batch.cu_seqlens);
    result.nll += loss.nll.item<double>();
    result.targets += loss.count;
    if (!whole) result.bytes += target_bytes(batch, tokenizer);
  }
  if (whole) result.bytes = data.source_bytes();
  return result;
}

}  // namespace efla
