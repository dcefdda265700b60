#include "efla/io/token_shard.h"

#include <zlib.h>

#include <cstring>

#include "efla/io/test_util.h"

namespace efla {
namespace {

using testing::error_of;
using testing::slurp;
using testing::spit;
using testing::TempFolder;

void write_sample(const std::filesystem::path& path, int64_t vocab_size = 1000) {
  ShardWriter writer(path, vocab_size, "0123456789abcdef");
  writer.append_document(std::vector<int32_t>{1, 2, 3}, 10, 2);
  writer.append_document({}, 5, 1);  // no tokens: no document
  writer.append_document(std::vector<int32_t>{static_cast<int32_t>(vocab_size - 1), 0}, 7, 3);
  writer.finish();
}

// Rewrites fields of a shard's header so that its own checksum is right again: a wrong writer, not
// damage.
void patch_header(const std::filesystem::path& path,
                  const std::function<void(ShardHeader&)>& change) {
  std::string bytes = slurp(path);
  ShardHeader header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  change(header);
  header.header_crc32 = static_cast<uint32_t>(
      ::crc32(0, reinterpret_cast<const Bytef*>(&header), offsetof(ShardHeader, header_crc32)));
  std::memcpy(bytes.data(), &header, sizeof(header));
  spit(path, bytes);
}

TEST(TokenShard, ReadsBackWhatWasWritten) {
  const TempFolder folder;
  for (const int64_t vocab_size : {1000, 65536, 65537, 5'000'000}) {
    write_sample(folder / "a.tok", vocab_size);
    const TokenShard shard = TokenShard::open(folder / "a.tok", true);
    EXPECT_EQ(shard.token_width(), vocab_size <= 65536 ? 2 : 4);
    EXPECT_EQ(shard.vocab_size(), vocab_size);
    EXPECT_EQ(shard.tokenizer_fingerprint(), "0123456789abcdef");
    EXPECT_EQ(shard.token_count(), 5);
    EXPECT_EQ(shard.document_count(), 2);
    EXPECT_EQ(shard.source_bytes(), 17);
    EXPECT_EQ(shard.source_words(), 5);
    EXPECT_EQ(shard.document_begin(1), 3);
    EXPECT_EQ(shard.document_begin(2), 5);
    EXPECT_EQ(shard.documents()[1].bytes, 7u);
    EXPECT_EQ(shard.documents()[1].words, 3u);
    std::vector<int64_t> tokens(4);
    shard.copy_tokens(1, 4, tokens.data());
    EXPECT_EQ(tokens, (std::vector<int64_t>{2, 3, vocab_size - 1, 0}));
    EXPECT_EQ(shard.token(3), vocab_size - 1);
  }
}

TEST(TokenShard, NothingUnderTheNameUntilFinished) {
  const TempFolder folder;
  {
    ShardWriter writer(folder / "a.tok", 10, "");
    writer.append_document(std::vector<int32_t>{1}, 1, 1);
    EXPECT_FALSE(std::filesystem::exists(folder / "a.tok"));
  }
  EXPECT_TRUE(testing::names_in(folder.path()).empty());
}

TEST(TokenShard, WriterRefusesTokensOutsideTheVocabulary) {
  const TempFolder folder;
  ShardWriter writer(folder / "a.tok", 10, "");
  for (const int32_t token : {-1, 10, 70000}) {
    const std::string message =
        error_of([&] { writer.append_document(std::vector<int32_t>{token}, 1, 1); });
    EXPECT_MENTIONS(message, "token id " + std::to_string(token));
    EXPECT_MENTIONS(message, "a.tok");
  }
  EXPECT_MENTIONS(error_of([&] { writer.finish(); }), "no tokens");
  EXPECT_THROW(ShardWriter(folder / "b.tok", 0, ""), Error);
  EXPECT_THROW(ShardWriter(folder / "b.tok", int64_t{1} << 31, ""), Error);
}

TEST(TokenShard, EveryTruncationAndExtensionIsRefused) {
  const TempFolder folder;
  write_sample(folder / "a.tok");
  const std::string whole = slurp(folder / "a.tok");
  ASSERT_EQ(whole.size(), 256u + 16 + 2 * 24);
  for (size_t size = 0; size < whole.size(); ++size) {
    spit(folder / "b.tok", whole.substr(0, size));
    EXPECT_MENTIONS(error_of([&] { TokenShard::open(folder / "b.tok"); }),
                    (folder / "b.tok").string());
  }
  spit(folder / "b.tok", whole + "x");
  EXPECT_MENTIONS(error_of([&] { TokenShard::open(folder / "b.tok"); }), "extra bytes");
}

TEST(TokenShard, EveryFlippedBitIsFound) {
  const TempFolder folder;
  write_sample(folder / "a.tok");
  const std::string whole = slurp(folder / "a.tok");
  for (size_t bit = 0; bit < whole.size() * 8; ++bit) {
    std::string flipped = whole;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    spit(folder / "b.tok", flipped);
    // Header damage is found without reading the tokens.
    if (bit < 256 * 8) {
      EXPECT_THROW(TokenShard::open(folder / "b.tok"), Error) << "bit " << bit;
    } else {
      EXPECT_THROW(TokenShard::open(folder / "b.tok", true), Error) << "bit " << bit;
    }
  }
}

TEST(TokenShard, WrongNumbersUnderARightChecksum) {
  const TempFolder folder;
  const auto message_after = [&](const std::function<void(ShardHeader&)>& change,
                                 bool verify = false) {
    write_sample(folder / "a.tok");
    patch_header(folder / "a.tok", change);
    return error_of([&] { TokenShard::open(folder / "a.tok", verify); });
  };
  EXPECT_MENTIONS(message_after([](ShardHeader& h) { h.version = 2; }), "version 2");
  EXPECT_MENTIONS(message_after([](ShardHeader& h) { h.magic[0] = 'X'; }), "not a token shard");
  EXPECT_MENTIONS(message_after([](ShardHeader& h) { h.token_width = 3; }), "impossible");
  EXPECT_MENTIONS(message_after([](ShardHeader& h) { h.token_width = 0; }), "impossible");
  EXPECT_MENTIONS(message_after([](ShardHeader& h) { h.vocab_size = 0; }), "impossible");
  EXPECT_MENTIONS(message_after([](ShardHeader& h) { h.token_count = 0; }), "impossible");
  EXPECT_MENTIONS(message_after([](ShardHeader& h) { h.token_count = 1ull << 63; }), "cut short");
  EXPECT_MENTIONS(message_after([](ShardHeader& h) { h.document_count = UINT64_MAX / 24 + 2; }),
                  "cut short");
  EXPECT_MENTIONS(message_after([](ShardHeader& h) { h.token_width = 4; }), "cut short");
  EXPECT_MENTIONS(message_after([](ShardHeader& h) { h.vocab_size = 500; }, true),
                  "holds token id 999 at position 3");
}

TEST(TokenShard, DamagedDocumentTableIsRefusedWithoutVerification) {
  const TempFolder folder;
  write_sample(folder / "a.tok");
  const std::string whole = slurp(folder / "a.tok");
  for (const uint64_t first :
       {uint64_t{0}, uint64_t{5}, UINT64_MAX}) {  // of document 1; 1..4 are possible
    std::string changed = whole;
    std::memcpy(changed.data() + 256 + 16 + 24, &first, sizeof(first));
    spit(folder / "b.tok", changed);
    EXPECT_MENTIONS(error_of([&] { TokenShard::open(folder / "b.tok"); }), "document 1");
  }
}

TEST(TokenShard, MissingEmptyAndForeignFiles) {
  const TempFolder folder;
  EXPECT_MENTIONS(error_of([&] { TokenShard::open(folder / "none"); }), "No such file");
  EXPECT_MENTIONS(error_of([&] { TokenShard::open(folder.path()); }), "not a regular file");
  spit(folder / "empty", "");
  EXPECT_MENTIONS(error_of([&] { TokenShard::open(folder / "empty"); }), "is empty");
  spit(folder / "text", std::string(1000, 'x'));
  EXPECT_MENTIONS(error_of([&] { TokenShard::open(folder / "text"); }), "not a token shard");
}

}  // namespace
}  // namespace efla
