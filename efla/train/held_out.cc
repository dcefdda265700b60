#include "efla/train/held_out.h"

#include <algorithm>

namespace efla {

std::optional<HeldOutLoss> held_out_loss(LanguageModel& model, const TokenDataset& data,
                                         int64_t rows, int64_t max_tokens,
                                         const std::function<bool()>& stop) {
  const torch::NoGradGuard no_grad;
  const int64_t length = data.options().length;
  int64_t last = data.sequential_rows();
  if (max_tokens > 0) last = std::min(last, (max_tokens + length - 1) / length);
  HeldOutLoss result;
  for (int64_t first = 0; first < last; first += rows) {
    if (stop()) return std::nullopt;
    const Batch batch = data.sequential_batch(first, std::min(rows, last - first));
    const LossSum loss = model->loss(batch.input_ids, batch.targets, batch.cu_seqlens);
    result.nll += loss.nll.item<double>();
    result.targets += loss.count;
  }
  result.whole = last == data.sequential_rows();
  result.source_bytes = data.source_bytes();
  return result;
}

}  // namespace efla
