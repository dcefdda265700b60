#include "efla/eval/perplexity.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "efla/io/error.h"

namespace efla {
namespace {

// A document as the model reads it: `prefix`, then the tokens, each of which is predicted.
struct Stream {
  int64_t prefix = 0;
  const int64_t* tokens = nullptr;
  int64_t count = 0;

  // Copies inputs [begin, begin + length) to `row`; input -1 is the prefix.
  void copy_inputs(int64_t begin, int64_t length, int64_t* row) const {
    for (int64_t i = begin; i < begin + length; ++i) *row++ = i < 0 ? prefix : tokens[i];
  }

  // Sets what follows the last `scored` of inputs [begin, begin + length).
  void copy_targets(int64_t begin, int64_t length, int64_t scored, int64_t* row) const {
    for (int64_t i = length - scored; i < length; ++i) row[i] = tokens[begin + i + 1];
  }
};

void check_vocabulary(const at::Tensor& tokens, int64_t vocab) {
  if (tokens.numel() == 0) return;
  const int64_t highest = tokens.max().item<int64_t>();
  const int64_t lowest = tokens.min().item<int64_t>();
  if (highest < vocab && lowest >= 0) return;
  throw Error(fmt::format(
      "token {} is outside the model's vocabulary of {}; use the tokenizer that the model was "
      "trained with",
      lowest < 0 ? lowest : highest, vocab));
}

// What both metrics share: the documents as streams and the running sum.
class Scorer {
 public:
  Scorer(LanguageModel model, const EvalData& data, const PerplexityOptions& options,
         std::string metric)
      : model_(std::move(model)), options_(options) {
    if (options.batch_tokens < 1) {
      throw UsageError(
          fmt::format("batch_tokens is {} but must be 1 or more", options.batch_tokens));
    }
    const int64_t vocab = model_->config().vocab_size;
    result_.metric = std::move(metric);
    result_.documents = static_cast<int64_t>(data.documents.size());
    for (const EvalDocument& document : data.documents) {
      check_vocabulary(document.tokens, vocab);
      Stream stream{data.prefix_token.value_or(0), document.tokens.const_data_ptr<int64_t>(),
                    document.tokens.numel()};
      result_.tokens += stream.count;
      result_.words += document.words;
      result_.bytes += document.bytes;
      if (!data.prefix_token && stream.count > 0) {
        // Nothing stands before the first token: it is guessed and then serves as the prefix.
        result_.nll += std::log(static_cast<double>(vocab));
        ++done_;
        stream = {stream.tokens[0], stream.tokens + 1, stream.count - 1};
      }
      streams_.push_back(stream);
    }
    if (result_.tokens == 0) throw Error("the data holds no tokens to evaluate on");
  }

  const std::vector<Stream>& streams() const { return streams_; }

  // Adds the loss of a batch [B, T].
  void add(const at::Tensor& inputs, const at::Tensor& targets, Cache* cache) {
    const torch::NoGradGuard no_grad;
    const at::Device device = model_->head_weight().device();
    const at::Tensor hidden = model_->hidden_states(inputs.to(device), {}, cache);
    const at::Tensor nll = token_nll(hidden, model_->head_weight(), targets.to(device));
    const double sum = nll.sum(at::kDouble).item<double>();
    if (!std::isfinite(sum)) {
      throw Error("the model's loss is not finite on this data; its weights are bad");
    }
    result_.nll += sum;
    done_ += targets.ne(kIgnoreTarget).sum().item<int64_t>();
    if (options_.progress) options_.progress(done_, result_.tokens);
  }

  const Perplexity& result() const { return result_; }

 private:
  LanguageModel model_;
  const PerplexityOptions& options_;
  std::vector<Stream> streams_;
  Perplexity result_;
  int64_t done_ = 0;
};

// Inputs and targets of a batch under construction, all padding at first.
struct Rows {
  Rows(size_t rows, int64_t width)
      : inputs(torch::zeros({static_cast<int64_t>(rows), width}, at::kLong)),
        targets(torch::full_like(inputs, kIgnoreTarget)) {}

  void fill(size_t row, const Stream& stream, int64_t begin, int64_t length, int64_t scored) {
    const int64_t offset = static_cast<int64_t>(row) * inputs.size(1);
    stream.copy_inputs(begin, length, inputs.mutable_data_ptr<int64_t>() + offset);
    stream.copy_targets(begin, length, scored, targets.mutable_data_ptr<int64_t>() + offset);
  }

  at::Tensor inputs, targets;
};

// Reads `group` (longest first) side by side, `chunk` tokens at a time. A document that has ended
// leaves the batch at the next chunk, so the rows at work are always the first ones.
void score_side_by_side(Scorer& scorer, const std::vector<Stream>& group, int64_t chunk) {
  Cache cache;
  size_t rows = group.size();
  for (int64_t begin = 0; begin < group[0].count; begin += chunk) {
    const size_t before = rows;
    while (group[rows - 1].count <= begin) --rows;
    if (rows < before) cache = cache.select(torch::arange(static_cast<int64_t>(rows)));
    const int64_t width = std::min(chunk, group[0].count - begin);
    Rows batch(rows, width);
    for (size_t row = 0; row < rows; ++row) {
      const int64_t length = std::min(width, group[row].count - begin);
      batch.fill(row, group[row], begin - 1, length, length);
    }
    scorer.add(batch.inputs, batch.targets, &cache);
  }
}

}  // namespace

double Perplexity::token_perplexity() const { return std::exp(nll / static_cast<double>(tokens)); }

double Perplexity::word_perplexity() const { return std::exp(nll / static_cast<double>(words)); }

double Perplexity::byte_perplexity() const { return std::exp(nll / static_cast<double>(bytes)); }

double Perplexity::bits_per_byte() const {
  return nll / static_cast<double>(bytes) / std::log(2.0);
}

Perplexity stateful_perplexity(LanguageModel model, const EvalData& data,
                               const PerplexityOptions& options) {
  constexpr int64_t kMaxRows = 32;
  constexpr int64_t kMinChunk = 256;
  Scorer scorer(std::move(model), data, options, "stateful");
  std::vector<Stream> order;
  std::copy_if(scorer.streams().begin(), scorer.streams().end(), std::back_inserter(order),
               [](const Stream& stream) { return stream.count > 0; });
  std::stable_sort(order.begin(), order.end(),
                   [](const Stream& a, const Stream& b) { return a.count > b.count; });

  const int64_t max_rows = std::clamp<int64_t>(options.batch_tokens / kMinChunk, 1, kMaxRows);
  for (auto first = order.begin(); first != order.end();) {
    // Very unequal neighbours would leave most rows idle, so a group ends at half its longest.
    auto last = first;
    while (last != order.end() && last - first < max_rows && 2 * last->count >= first->count) {
      ++last;
    }
    const int64_t chunk = std::max<int64_t>(1, options.batch_tokens / (last - first));
    score_side_by_side(scorer, std::vector<Stream>(first, last), chunk);
    first = last;
  }
  return scorer.result();
}

std::vector<Window> rolling_windows(const std::vector<int64_t>& token_counts, int64_t window) {
  if (window < 1) throw UsageError(fmt::format("the window is {} but must be 1 or more", window));
  std::vector<Window> windows;
  for (size_t i = 0; i < token_counts.size(); ++i) {
    const int64_t count = token_counts[i];
    for (int64_t predicted = 0; predicted < count;) {
      const int64_t scored = std::min(window, count - predicted);
      const int64_t end = predicted + scored;  // of the targets
      const int64_t length = predicted == 0 ? scored : window;
      windows.push_back({static_cast<int64_t>(i), end - 1 - length, length, scored});
      predicted = end;
    }
  }
  return windows;
}

Perplexity windowed_perplexity(LanguageModel model, const EvalData& data, int64_t window,
                               const PerplexityOptions& options) {
  Scorer scorer(std::move(model), data, options, fmt::format("windows-{}", window));
  std::vector<int64_t> counts;
  for (const Stream& stream : scorer.streams()) counts.push_back(stream.count);
  std::vector<Window> windows = rolling_windows(counts, window);
  std::stable_sort(windows.begin(), windows.end(),
                   [](const Window& a, const Window& b) { return a.length > b.length; });
  for (size_t first = 0; first < windows.size();) {
    const int64_t width = windows[first].length;
    const auto fitting = static_cast<size_t>(std::max<int64_t>(1, options.batch_tokens / width));
    const size_t rows = std::min(windows.size() - first, fitting);
    Rows batch(rows, width);
    for (size_t row = 0; row < rows; ++row) {
      const Window& w = windows[first + row];
      batch.fill(row, scorer.streams()[static_cast<size_t>(w.document)], w.begin, w.length,
                 w.scored);
    }
    scorer.add(batch.inputs, batch.targets, nullptr);
    first += rows;
  }
  return scorer.result();
}

}  // namespace efla
