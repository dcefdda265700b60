#include "efla/io/prepare.h"

#include "efla/io/test_util.h"
#include "efla/io/token_shard.h"

namespace efla {
namespace {

using testing::error_of;
using testing::names_in;
using testing::spit;
using testing::TempFolder;

TEST(Prepare, WritesDocumentsWithTheirSizes) {
  const TempFolder folder;
  spit(folder / "a", "one two\n\f\nthree\n");
  const auto tokenizer = Tokenizer::load("byte");
  PrepareOptions options;
  options.format = DocumentFormat::kFormFeed;
  const PrepareResult result = prepare_shards({folder / "a"}, *tokenizer, folder / "out", options);
  EXPECT_EQ(result.shards, 1);
  EXPECT_EQ(result.documents, 2);
  EXPECT_EQ(result.tokens, 10 + 8);
  EXPECT_EQ(result.bytes, 8 + 6);
  EXPECT_EQ(result.words, 3);
  const TokenShard shard = TokenShard::open(folder / "out/00000.tok", true);
  std::vector<int64_t> tokens(18);
  shard.copy_tokens(0, 18, tokens.data());
  EXPECT_EQ(tokens, (std::vector<int64_t>{256, 'o', 'n', 'e', ' ', 't', 'w', 'o', '\n', 257,  //
                                          256, 't', 'h', 'r', 'e', 'e', '\n', 257}));
  EXPECT_EQ(shard.document_begin(1), 10);
  EXPECT_EQ(shard.documents()[1].bytes, 6u);
  EXPECT_EQ(shard.documents()[1].words, 1u);
  EXPECT_EQ(shard.tokenizer_fingerprint(), tokenizer->fingerprint());
}

TEST(Prepare, SplitsIntoShardsAndReplacesThem) {
  const TempFolder folder;
  spit(folder / "a", "1234567890\n\f\n1234567890\n\f\n123");
  PrepareOptions options;
  options.format = DocumentFormat::kFormFeed;
  options.add_bos = options.add_eos = false;
  options.tokens_per_shard = 5;
  EXPECT_EQ(
      prepare_shards({folder / "a"}, *Tokenizer::load("byte"), folder / "out", options).shards, 3);
  EXPECT_EQ(names_in(folder / "out"),
            (std::vector<std::string>{"00000.tok", "00001.tok", "00002.tok"}));
  options.tokens_per_shard = 1000;
  int calls = 0;
  prepare_shards({folder / "a"}, *Tokenizer::load("byte"), folder / "out", options,
                 [&](const PrepareResult& so_far) { EXPECT_EQ(so_far.documents, ++calls); });
  EXPECT_EQ(calls, 3);
  EXPECT_EQ(names_in(folder / "out"), std::vector<std::string>{"00000.tok"});
}

TEST(Prepare, FailureLeavesThingsAsTheyWere) {
  const TempFolder folder;
  spit(folder / "good", "text");
  spit(folder / "empty", "");
  const auto tokenizer = Tokenizer::load("byte");
  EXPECT_MENTIONS(error_of([&] {
                    prepare_shards({folder / "good", folder / "empty"}, *tokenizer, folder / "out");
                  }),
                  "is empty");
  EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"empty", "good"}));
  std::filesystem::create_directory(folder / "mine");
  spit(folder / "mine/thesis.txt", "years of work");
  EXPECT_MENTIONS(error_of([&] { prepare_shards({folder / "good"}, *tokenizer, folder / "mine"); }),
                  "thesis.txt");
  EXPECT_TRUE(std::filesystem::exists(folder / "mine/thesis.txt"));
  EXPECT_THROW(prepare_shards({}, *tokenizer, folder / "out"), UsageError);
}

}  // namespace
}  // namespace efla
