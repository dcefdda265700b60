#include "efla/io/dataset.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>

#include "efla/io/atomic_file.h"
#include "efla/io/error.h"
#include "efla/io/random.h"

namespace efla {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> find_shards(const fs::path& path) {
  if (!path_exists(path)) recover_folder(path);
  if (!path_exists(path)) {
    throw Error("no token shards at " + path.string() +
                ": the folder does not exist; make it with `efla data prepare`");
  }
  if (!is_folder(path)) return {path};
  std::vector<fs::path> found = folder_entries(path);
  std::erase_if(found, [](const fs::path& entry) { return entry.extension() != ".tok"; });
  if (found.empty()) {
    throw Error("no token shards (*.tok) in " + path.string() +
                ": make them with `efla data prepare`");
  }
  return found;
}

void check_shard(const TokenShard& shard, const TokenShard& first,
                 const TokenDataset::Options& options) {
  const std::string path = shard.path().string();
  const std::string fingerprint = shard.tokenizer_fingerprint();
  if (fingerprint != first.tokenizer_fingerprint() || shard.vocab_size() != first.vocab_size()) {
    throw Error(path + " (tokenizer " + fingerprint + ", " + std::to_string(shard.vocab_size()) +
                " tokens) and " + first.path().string() + " (tokenizer " +
                first.tokenizer_fingerprint() + ", " + std::to_string(first.vocab_size()) +
                " tokens) come from different tokenizers: prepare them again with one");
  }
  if (!options.tokenizer.empty() && fingerprint != options.tokenizer) {
    throw Error(path + " was made with tokenizer " + fingerprint + " but the tokenizer in use is " +
                options.tokenizer + ": use the tokenizer of the shards or prepare them again");
  }
  if (options.vocab_size > 0 && shard.vocab_size() > options.vocab_size) {
    throw Error(path + " has a vocabulary of " + std::to_string(shard.vocab_size()) +
                " tokens but the model's is " + std::to_string(options.vocab_size) +
                ": set the model's vocab_size to the tokenizer's");
  }
}

int64_t read_count(const nlohmann::json& json, const char* key) {
  if (!json.is_object() || !json.contains(key) || !json[key].is_number_integer() ||
      json[key].get<int64_t>() < 0) {
    throw Error(std::string("the saved data position has no valid \"") + key +
                "\" (a whole number, not negative): the checkpoint is damaged");
  }
  return json[key].get<int64_t>();
}

}  // namespace

nlohmann::json DataPosition::to_json() const { return {{"epoch", epoch}, {"row", row}}; }

DataPosition DataPosition::from_json(const nlohmann::json& json) {
  return {read_count(json, "epoch"), read_count(json, "row")};
}

// A batch under construction.
struct TokenDataset::Assembly {
  explicit Assembly(int64_t tokens)
      : input_ids(at::empty({1, tokens}, at::kLong)), targets(at::empty({1, tokens}, at::kLong)) {}

  Batch finish() const {
    at::Tensor cu_seqlens = at::empty({static_cast<int64_t>(starts.size()) + 1}, at::kInt);
    int32_t* to = std::copy(starts.begin(), starts.end(), cu_seqlens.data_ptr<int32_t>());
    *to = static_cast<int32_t>(filled);
    return {input_ids, targets, cu_seqlens, target_count};
  }

  at::Tensor input_ids, targets;
  std::vector<int32_t> starts;
  int64_t filled = 0, target_count = 0;
};

TokenDataset::TokenDataset(const fs::path& path, const Options& options) : options_(options) {
  if (options.length < 1) {
    throw UsageError("data length must be at least 1, not " + std::to_string(options.length));
  }
  begins_.push_back(0);
  for (const fs::path& file : find_shards(path)) {
    shards_.push_back(TokenShard::open(file, options.verify_payload));
    const TokenShard& shard = shards_.back();
    check_shard(shard, shards_.front(), options);
    shard_first_document_.push_back(document_count());
    const int64_t base = begins_.back();
    for (int64_t i = 0; i < shard.document_count(); ++i) {
      begins_.push_back(base + shard.document_begin(i + 1));
    }
  }
  const int64_t tokens = token_count(), length = options.length;
  if (tokens < length) {
    throw Error(path.string() + " holds " + std::to_string(tokens) +
                " tokens, fewer than one row of " + std::to_string(length) +
                ": use a smaller length or prepare more text");
  }
  // Up to length - 1 tokens are left in front of the first row (the phase), less than that behind
  // the last.
  rows_per_epoch_ = std::max<int64_t>(1, (tokens - length + 1) / length);
  if (rows_per_epoch_ > UINT32_MAX) {
    throw Error(path.string() + " makes more than 2^32 rows: use a larger length");
  }
}

void TokenDataset::build_epoch(int64_t epoch) {
  if (epoch == built_epoch_) return;
  // Documents and rows each get their own stream of random numbers, so that neither depends on how
  // many the other drew.
  SplitMix64 seeds(options_.seed);
  SplitMix64 epoch_seeds(seeds.next() + static_cast<uint64_t>(epoch));
  SplitMix64 document_random(epoch_seeds.next()), row_random(epoch_seeds.next());

  document_order_.resize(static_cast<size_t>(document_count()));
  std::iota(document_order_.begin(), document_order_.end(), int64_t{0});
  shuffle(document_order_, document_random);
  stream_starts_.assign(1, 0);
  for (const int64_t d : document_order_) {
    stream_starts_.push_back(stream_starts_.back() + document(d).tokens);
  }
  const int64_t slack = token_count() - rows_per_epoch_ * options_.length;
  phase_ = static_cast<int64_t>(
      row_random.below(static_cast<uint64_t>(std::min(slack, options_.length - 1)) + 1));
  row_order_.resize(static_cast<size_t>(rows_per_epoch_));
  std::iota(row_order_.begin(), row_order_.end(), 0u);
  shuffle(row_order_, row_random);
  built_epoch_ = epoch;
}

void TokenDataset::seek(const DataPosition& position) {
  if (position.epoch < 0 || position.row < 0 || position.row > rows_per_epoch_) {
    throw Error("the data position (epoch " + std::to_string(position.epoch) + ", row " +
                std::to_string(position.row) +
                ") does not exist in these shards, whose epochs have " +
                std::to_string(rows_per_epoch_) + " rows: resume with the data of the first run");
  }
  position_ = position;
}

// Where the row at `position` begins in the stream; steps on to the row after it.
int64_t TokenDataset::take_row(DataPosition& position) {
  if (position.row == rows_per_epoch_) position = {position.epoch + 1, 0};
  build_epoch(position.epoch);
  return phase_ + row_order_[static_cast<size_t>(position.row++)] * options_.length;
}

int64_t TokenDataset::count_targets(int64_t rows) {
  DataPosition position = position_;
  int64_t targets = rows * options_.length;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t begin = take_row(position);
    // Each document that ends in the row has a last token without a next one.
    const auto ends_before = [this](int64_t place) {
      return std::upper_bound(stream_starts_.begin(), stream_starts_.end(), place);
    };
    targets -= ends_before(begin + options_.length) - ends_before(begin);
  }
  return targets;
}

Batch TokenDataset::next_batch(int64_t rows) {
  TORCH_CHECK(rows > 0, "next_batch: rows must be positive, got ", rows);
  TORCH_CHECK(rows <= INT32_MAX / options_.length, "next_batch: ", rows, " rows of ",
              options_.length, " tokens do not fit int32 cu_seqlens");
  Assembly assembly(rows * options_.length);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t begin = take_row(position_);  // before the order is read: it may be rebuilt
    append_row(document_order_, stream_starts_, begin, options_.length, assembly);
  }
  return assembly.finish();
}

int64_t TokenDataset::sequential_rows() const {
  return (token_count() + options_.length - 1) / options_.length;
}

Batch TokenDataset::sequential_batch(int64_t first, int64_t rows) const {
  TORCH_CHECK(first >= 0 && first < sequential_rows() && rows > 0, "sequential_batch: row ", first,
              " of ", sequential_rows());
  const int64_t length = options_.length;
  const int64_t end = std::min(token_count(), (first + rows) * length);
  Assembly assembly(end - first * length);
  for (int64_t begin = first * length; begin < end; begin += length) {
    append_row({}, begins_, begin, std::min(length, end - begin), assembly);
  }
  return assembly.finish();
}

void TokenDataset::append_row(const std::vector<int64_t>& order, const std::vector<int64_t>& starts,
                              int64_t begin, int64_t count, Assembly& assembly) const {
  auto slot = static_cast<size_t>(std::upper_bound(starts.begin(), starts.end(), begin) -
                                  starts.begin() - 1);
  for (const int64_t end = begin + count; begin < end; ++slot) {
    const int64_t document = order.empty() ? static_cast<int64_t>(slot) : order[slot];
    const int64_t size = starts[slot + 1] - starts[slot];
    const int64_t offset = begin - starts[slot];
    const int64_t taken = std::min(end, starts[slot + 1]) - begin;
    int64_t* inputs = assembly.input_ids.data_ptr<int64_t>() + assembly.filled;
    int64_t* targets = assembly.targets.data_ptr<int64_t>() + assembly.filled;
    copy_tokens(document, offset, taken, inputs);
    const int64_t known =
        std::min(taken, size - 1 - offset);  // the last token of a document has no next
    copy_tokens(document, offset + 1, known, targets);
    if (known < taken) targets[known] = -100;
    assembly.starts.push_back(static_cast<int32_t>(assembly.filled));
    assembly.filled += taken;
    assembly.target_count += known;
    begin += taken;
  }
}

void TokenDataset::copy_tokens(int64_t document, int64_t offset, int64_t count,
                               int64_t* out) const {
  const auto next =
      std::upper_bound(shard_first_document_.begin(), shard_first_document_.end(), document);
  const auto index = static_cast<size_t>(next - shard_first_document_.begin() - 1);
  const TokenShard& shard = shards_[index];
  shard.copy_tokens(shard.document_begin(document - shard_first_document_[index]) + offset, count,
                    out);
}

DocumentInfo TokenDataset::document(int64_t i) const {
  TORCH_CHECK(i >= 0 && i < document_count(), "document ", i, " of ", document_count());
  const auto next = std::upper_bound(shard_first_document_.begin(), shard_first_document_.end(), i);
  const auto index = static_cast<size_t>(next - shard_first_document_.begin() - 1);
  const ShardDocument& row =
      shards_[index].documents()[static_cast<size_t>(i - shard_first_document_[index])];
  const auto at = static_cast<size_t>(i);
  return {begins_[at + 1] - begins_[at], static_cast<int64_t>(row.bytes),
          static_cast<int64_t>(row.words)};
}

at::Tensor TokenDataset::document_tokens(int64_t i, int64_t begin, int64_t end) const {
  const int64_t size = document(i).tokens;
  if (end < 0) end = size;
  TORCH_CHECK(begin >= 0 && begin <= end && end <= size, "document_tokens: [", begin, ", ", end,
              ") of ", size, " tokens");
  at::Tensor tokens = at::empty({end - begin}, at::kLong);
  copy_tokens(i, begin, end - begin, tokens.data_ptr<int64_t>());
  return tokens;
}

int64_t TokenDataset::source_bytes() const {
  int64_t bytes = 0;
  for (const TokenShard& shard : shards_) bytes += shard.source_bytes();
  return bytes;
}

int64_t TokenDataset::source_words() const {
  int64_t words = 0;
  for (const TokenShard& shard : shards_) words += shard.source_words();
  return words;
}

nlohmann::json TokenDataset::describe() const {
  nlohmann::json list = nlohmann::json::array();
  for (const TokenShard& shard : shards_) {
    list.push_back({{"file", shard.path().filename().string()},
                    {"tokens", shard.token_count()},
                    {"documents", shard.document_count()},
                    {"crc32", shard.payload_crc32()}});
  }
  return list;
}

}  // namespace efla
