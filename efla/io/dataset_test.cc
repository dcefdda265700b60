#include "efla/io/dataset.h"

#include <fmt/format.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "efla/io/test_util.h"

namespace efla {
namespace {

namespace fs = std::filesystem;
using testing::error_of;
using testing::TempFolder;

// Documents whose tokens are all different: document i of `sizes` holds the next sizes[i] numbers.
std::vector<std::vector<int32_t>> numbered(const std::vector<int>& sizes) {
  std::vector<std::vector<int32_t>> documents;
  int32_t next = 0;
  for (const int size : sizes) {
    documents.emplace_back();
    for (int i = 0; i < size; ++i) documents.back().push_back(next++);
  }
  return documents;
}

void write_shards(const fs::path& folder, const std::vector<std::vector<int32_t>>& documents,
                  size_t per_shard, int64_t vocab_size = 5000,
                  const std::string& tokenizer = "tok") {
  fs::create_directories(folder);
  for (size_t i = 0; i < documents.size(); i += per_shard) {
    const std::string name = fmt::format("{:05}.tok", i / per_shard);
    ShardWriter writer(folder / name, vocab_size, tokenizer);
    for (size_t j = i; j < std::min(documents.size(), i + per_shard); ++j) {
      writer.append_document(documents[j], static_cast<int64_t>(3 * documents[j].size()),
                             static_cast<int64_t>(j));
    }
    writer.finish();
  }
}

TokenDataset::Options options_of(int64_t length, uint64_t seed = 1) {
  TokenDataset::Options options;
  options.length = length;
  options.seed = seed;
  return options;
}

std::vector<int64_t> values(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.to(at::kLong).flatten().contiguous();
  return {flat.data_ptr<int64_t>(), flat.data_ptr<int64_t>() + flat.numel()};
}

const std::vector<int> kSizes = {37, 1, 250, 8, 8, 3, 100, 64, 5, 190};  // 666 tokens

// Which document a token of numbered(kSizes) belongs to, and whether it is the last one there.
int document_of(int64_t token, bool* last = nullptr) {
  int64_t end = 0;
  for (size_t i = 0; i < kSizes.size(); ++i) {
    end += kSizes[i];
    if (token < end) {
      if (last != nullptr) *last = token == end - 1;
      return static_cast<int>(i);
    }
  }
  return -1;
}

// What every batch must obey: sequences within one document, at most `length` long, starting afresh
// at rows; each target is the next token of the document.
void check_batch(const Batch& batch, int64_t length) {
  const auto ids = values(batch.input_ids), targets = values(batch.targets),
             starts = values(batch.cu_seqlens);
  ASSERT_EQ(ids.size(), targets.size());
  ASSERT_EQ(starts.front(), 0);
  ASSERT_EQ(starts.back(), static_cast<int64_t>(ids.size()));
  const std::set<int64_t> boundaries(starts.begin(), starts.end());
  int64_t count = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    bool last = false;
    const int document = document_of(ids[i], &last);
    ASSERT_EQ(targets[i], last ? -100 : ids[i] + 1);
    count += last ? 0 : 1;
    const bool starts_here = at % length == 0 || document_of(ids[i - 1]) != document;
    ASSERT_EQ(boundaries.count(at), starts_here ? 1u : 0u) << "position " << at;
    if (!starts_here) {
      ASSERT_EQ(ids[i], ids[i - 1] + 1);
    }
  }
  ASSERT_EQ(batch.target_count, count);
}

struct Sample : ::testing::Test {
  TempFolder folder;
  Sample() { write_shards(folder / "data", numbered(kSizes), 4); }
};

TEST_F(Sample, BatchesHoldPackedDocuments) {
  TokenDataset data(folder / "data", options_of(16));
  EXPECT_EQ(data.token_count(), 666);
  EXPECT_EQ(data.document_count(), 10);
  for (int i = 0; i < 60; ++i) {
    const Batch batch = data.next_batch(3);
    ASSERT_EQ(batch.input_ids.sizes(), (std::vector<int64_t>{1, 48}));
    ASSERT_EQ(batch.input_ids.scalar_type(), at::kLong);
    ASSERT_EQ(batch.targets.scalar_type(), at::kLong);
    ASSERT_EQ(batch.cu_seqlens.scalar_type(), at::kInt);
    check_batch(batch, 16);
  }
}

TEST_F(Sample, AnEpochHoldsEveryTokenOnceButForTheEnds) {
  TokenDataset data(folder / "data", options_of(16));
  for (int epoch = 0; epoch < 5; ++epoch) {
    std::set<int64_t> seen;
    for (int64_t row = 0; row < data.rows_per_epoch(); ++row) {
      for (const int64_t id : values(data.next_batch(1).input_ids))
        ASSERT_TRUE(seen.insert(id).second);
    }
    EXPECT_EQ(data.position().epoch, epoch);
    EXPECT_GT(static_cast<int64_t>(seen.size()), 666 - 2 * 16);
  }
}

TEST_F(Sample, OrderDependsOnSeedAndEpochOnly) {
  const auto rows = [&](const fs::path& path, uint64_t seed, int64_t batch, int64_t count) {
    TokenDataset data(path, options_of(16, seed));
    std::vector<int64_t> ids;
    for (int64_t i = 0; i < count; i += batch) {
      const auto more = values(data.next_batch(batch).input_ids);
      ids.insert(ids.end(), more.begin(), more.end());
    }
    return ids;
  };
  const auto first = rows(folder / "data", 1, 1, 120);
  EXPECT_EQ(rows(folder / "data", 1, 4, 120), first);
  EXPECT_NE(rows(folder / "data", 2, 1, 120), first);
  const size_t epoch =
      static_cast<size_t>(TokenDataset(folder / "data", options_of(16)).rows_per_epoch()) * 16;
  EXPECT_NE(std::vector(first.begin(), first.begin() + 400),
            std::vector(first.begin() + static_cast<ptrdiff_t>(epoch),
                        first.begin() + static_cast<ptrdiff_t>(epoch) + 400));
  for (const size_t per_shard : {1, 3, 10}) {
    const fs::path other = folder / ("data" + std::to_string(per_shard));
    write_shards(other, numbered(kSizes), per_shard);
    EXPECT_EQ(rows(other, 1, 1, 120), first);
  }
}

TEST_F(Sample, RowsAreShuffled) {
  TokenDataset data(folder / "data", options_of(16));
  std::vector<int64_t> firsts;
  for (int64_t row = 0; row < data.rows_per_epoch(); ++row)
    firsts.push_back(data.next_batch(1).input_ids[0][0].item<int64_t>());
  EXPECT_FALSE(std::is_sorted(firsts.begin(), firsts.end()));
}

TEST_F(Sample, ResumeIsExactAtEveryBatch) {
  TokenDataset reference(folder / "data", options_of(16));
  std::vector<std::string> positions;
  std::vector<Batch> batches;
  for (int i = 0; i < 40; ++i) {  // crosses two epoch ends, also within a batch
    positions.push_back(reference.position().to_json().dump());
    batches.push_back(reference.next_batch(3));
  }
  for (size_t i = 0; i < batches.size(); ++i) {
    TokenDataset resumed(folder / "data", options_of(16));
    resumed.seek(DataPosition::from_json(nlohmann::json::parse(positions[i])));
    for (size_t j = i; j < std::min(i + 3, batches.size()); ++j) {
      const Batch batch = resumed.next_batch(3);
      EXPECT_TRUE(at::equal(batch.input_ids, batches[j].input_ids));
      EXPECT_TRUE(at::equal(batch.targets, batches[j].targets));
      EXPECT_TRUE(at::equal(batch.cu_seqlens, batches[j].cu_seqlens));
    }
  }
}

TEST_F(Sample, TargetsAreCountedAheadWithoutTakingThem) {
  TokenDataset data(folder / "data", options_of(16)), untouched(folder / "data", options_of(16));
  for (int i = 0; i < 60; ++i) {  // across epochs
    const int64_t expected = data.count_targets(3);
    const Batch batch = data.next_batch(3);
    EXPECT_EQ(batch.target_count, expected) << i;
    EXPECT_EQ(values(untouched.next_batch(3).targets), values(batch.targets)) << i;
  }
}

TEST_F(Sample, SequentialRowsAreTheFileOrder) {
  TokenDataset data(folder / "data", options_of(16));
  data.next_batch(2);
  const DataPosition before = data.position();
  std::vector<int64_t> ids;
  for (int64_t row = 0; row < data.sequential_rows(); row += 4) {
    const Batch batch = data.sequential_batch(row, 4);
    check_batch(batch, 16);
    const auto more = values(batch.input_ids);
    ids.insert(ids.end(), more.begin(), more.end());
  }
  ASSERT_EQ(ids.size(), 666u);
  for (size_t i = 0; i < ids.size(); ++i) EXPECT_EQ(ids[i], static_cast<int64_t>(i));
  EXPECT_EQ(data.position(), before);
}

TEST_F(Sample, DocumentsInFileOrder) {
  const TokenDataset data(folder / "data", options_of(16));
  int64_t next = 0;
  for (int64_t i = 0; i < data.document_count(); ++i) {
    const DocumentInfo info = data.document(i);
    EXPECT_EQ(info.tokens, kSizes[static_cast<size_t>(i)]);
    EXPECT_EQ(info.bytes, 3 * info.tokens);
    EXPECT_EQ(info.words, i);
    EXPECT_TRUE(at::equal(data.document_tokens(i), at::arange(next, next + info.tokens)));
    next += info.tokens;
  }
  EXPECT_TRUE(at::equal(data.document_tokens(2, 10, 13), at::arange(48, 51)));
  EXPECT_EQ(data.source_bytes(), 3 * 666);
  EXPECT_EQ(data.source_words(), 45);
  EXPECT_EQ(data.describe().size(), 3u);
  EXPECT_EQ(data.describe()[0]["file"], "00000.tok");
}

TEST_F(Sample, LengthsFromOneTokenToAllOfThem) {
  for (const int64_t length : {1, 2, 333, 334, 665, 666}) {
    TokenDataset data(folder / "data", options_of(length));
    for (int i = 0; i < 4; ++i) check_batch(data.next_batch(2), length);
  }
  const std::string message = error_of([&] { TokenDataset(folder / "data", options_of(667)); });
  EXPECT_MENTIONS(message, "666 tokens");
  EXPECT_MENTIONS(message, "667");
  EXPECT_THROW(TokenDataset(folder / "data", options_of(0)), UsageError);
}

TEST_F(Sample, DisagreementsNameBothSides) {
  auto options = options_of(16);
  options.tokenizer = "other";
  const std::string message = error_of([&] { TokenDataset(folder / "data", options); });
  EXPECT_MENTIONS(message, "tokenizer tok ");
  EXPECT_MENTIONS(message, "other");
  options = options_of(16);
  options.vocab_size = 4999;
  EXPECT_MENTIONS(error_of([&] { TokenDataset(folder / "data", options); }),
                  "5000 tokens but the model's is 4999");
  options.vocab_size = 5000;
  TokenDataset(folder / "data", options);
  ShardWriter writer(folder / "data/zz.tok", 5000, "foreign");
  writer.append_document(std::vector<int32_t>{1}, 1, 1);
  writer.finish();
  const std::string mixed = error_of([&] { TokenDataset(folder / "data", options_of(16)); });
  EXPECT_MENTIONS(mixed, "foreign");
  EXPECT_MENTIONS(mixed, "tokenizer tok,");
}

TEST_F(Sample, DamageAndAbsence) {
  EXPECT_MENTIONS(error_of([&] { TokenDataset(folder / "none", options_of(16)); }),
                  "no token shards");
  fs::create_directory(folder / "empty");
  EXPECT_MENTIONS(error_of([&] { TokenDataset(folder / "empty", options_of(16)); }),
                  "no token shards");
  std::string bytes = testing::slurp(folder / "data/00001.tok");
  bytes[300] = static_cast<char>(bytes[300] ^ 1);
  testing::spit(folder / "data/00001.tok", bytes);
  EXPECT_MENTIONS(error_of([&] { TokenDataset(folder / "data", options_of(16)); }),
                  "00001.tok is damaged");
}

TEST_F(Sample, PositionsThatCannotBe) {
  TokenDataset data(folder / "data", options_of(16));
  EXPECT_THROW(data.seek({0, data.rows_per_epoch() + 1}), Error);
  EXPECT_THROW(data.seek({-1, 0}), Error);
  for (const char* text :
       {"{}", "[]", "{\"epoch\":0}", "{\"epoch\":-1,\"row\":0}", "{\"epoch\":0,\"row\":\"1\"}"}) {
    EXPECT_THROW(DataPosition::from_json(nlohmann::json::parse(text)), Error) << text;
  }
}

TEST(Random, KnownValuesAndBounds) {
  // From the published SplitMix64 with seed 1234567.
  SplitMix64 random(1234567);
  EXPECT_EQ(random.next(), 6457827717110365317u);
  EXPECT_EQ(random.next(), 3203168211198807973u);
  std::map<uint64_t, int> counts;
  for (int i = 0; i < 60000; ++i) ++counts[random.below(6)];
  ASSERT_EQ(counts.size(), 6u);
  for (const auto& [value, count] : counts)
    EXPECT_NEAR(count, 10000, 600);  // 6.5 standard deviations
}

}  // namespace
}  // namespace efla
