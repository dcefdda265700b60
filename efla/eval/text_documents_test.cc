#include "efla/eval/text_documents.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "efla/io/error.h"
#include "efla/io/prepare.h"

namespace efla {
namespace {

namespace fs = std::filesystem;

class TextDocuments : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(::testing::TempDir()) /
              ("efla_eval_" +
               std::string(::testing::UnitTest::GetInstance()->current_test_info()->name()));
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& content) const {
    const fs::path path = folder_ / name;
    std::ofstream(path, std::ios::binary) << content;
    return path.string();
  }

  fs::path folder_;
};

TEST(LmEvalWords, CountsThePiecesOfASplitAtWhiteSpace) {
  // Right-hand sides by hand: len(re.split(r"\s+", text)).
  EXPECT_EQ(lm_eval_words("one two"), 2);              // one|two
  EXPECT_EQ(lm_eval_words("one"), 1);                  // one
  EXPECT_EQ(lm_eval_words(""), 1);                     // (empty)
  EXPECT_EQ(lm_eval_words(" "), 2);                    // (empty)|(empty)
  EXPECT_EQ(lm_eval_words(" one\n\n\ttwo"), 3);        // (empty)|one|two
  EXPECT_EQ(lm_eval_words("one two \n"), 3);           // one|two|(empty)
  EXPECT_EQ(lm_eval_words(" = Title = \n"), 5);        // (empty)|=|Title|=|(empty)
  EXPECT_EQ(lm_eval_words("caf\u00e9\u00a0noir"), 2);  // a no-break space is white space
  EXPECT_EQ(lm_eval_words("one\u2003"), 2);            // em space at the end
  EXPECT_EQ(lm_eval_words("\u3000\u00e9"), 2);         // ideographic space at the beginning
  EXPECT_EQ(lm_eval_words("\u00e9"), 1);
  EXPECT_EQ(lm_eval_words("a\u200bb"), 1);  // a zero-width space is none
}

TEST_F(TextDocuments, TextKeepsTokensWordsAndBytes) {
  const auto tokenizer = Tokenizer::load("byte");
  const EvalData data = eval_data_from_text({write("a.txt", "to be\n"), write("b.txt", "\u00e9")},
                                            DocumentFormat::kFile, *tokenizer);
  ASSERT_EQ(data.documents.size(), 2u);
  EXPECT_EQ(data.prefix_token, tokenizer->bos_id());
  EXPECT_TRUE(
      at::equal(data.documents[0].tokens, torch::tensor({116, 111, 32, 98, 101, 10}, at::kLong)));
  EXPECT_EQ(data.documents[0].words, 3);
  EXPECT_EQ(data.documents[0].bytes, 6);
  EXPECT_EQ(data.documents[1].words, 1);
  EXPECT_EQ(data.documents[1].bytes, 2);
  EXPECT_EQ(data.token_count(), 8);
}

TEST_F(TextDocuments, ShardsGiveWhatTheirTextGives) {
  const auto tokenizer = Tokenizer::load("byte");
  const std::vector<std::string> files = {write("a.txt", " It was the best of times \n"),
                                          write("b.txt", "it was"),
                                          write("c.txt", "\n\u00e9 \u00e9")};
  prepare_shards(files, *tokenizer, folder_ / "shards");
  const EvalData text = eval_data_from_text(files, DocumentFormat::kFile, *tokenizer);
  const EvalData shards = eval_data_from_shards((folder_ / "shards").string(), *tokenizer);
  EXPECT_EQ(shards.prefix_token, text.prefix_token);
  ASSERT_EQ(shards.documents.size(), text.documents.size());
  for (size_t i = 0; i < text.documents.size(); ++i) {
    EXPECT_TRUE(at::equal(shards.documents[i].tokens, text.documents[i].tokens)) << i;
    EXPECT_EQ(shards.documents[i].words, text.documents[i].words) << i;
    EXPECT_EQ(shards.documents[i].bytes, text.documents[i].bytes) << i;
  }
}

TEST_F(TextDocuments, ShardsOfAnotherTokenizerAreRefused) {
  const auto bytes = Tokenizer::load("byte");
  prepare_shards({write("a.txt", "text")}, *bytes, folder_ / "shards");
  TokenizerTraining training;
  training.vocab_size = 300;
  std::string text;
  for (int i = 0; i < 400; ++i)
    text += "sentence number " + std::to_string(i * 7919) + " of many\n";
  const fs::path model =
      train_sentencepiece({write("t.txt", text)}, (folder_ / "tokenizer").string(), training);
  const auto other = Tokenizer::load(model.string());
  EXPECT_THROW(eval_data_from_shards((folder_ / "shards").string(), *other), Error);
}

TEST_F(TextDocuments, LimitCutsAfterTheTokensAskedFor) {
  const auto tokenizer = Tokenizer::load("byte");
  const auto load = [&] {
    return eval_data_from_text({write("a.txt", "one two"), write("b.txt", "three four five")},
                               DocumentFormat::kFile, *tokenizer);
  };
  EvalData data = load();
  data.limit(7 + 8, *tokenizer);
  ASSERT_EQ(data.documents.size(), 2u);
  EXPECT_EQ(data.token_count(), 15);
  EXPECT_EQ(data.documents[1].bytes, 8);  // "three fo"
  EXPECT_EQ(data.documents[1].words, 2);
  data = load();
  data.limit(7, *tokenizer);
  EXPECT_EQ(data.documents.size(), 1u);
  data = load();
  data.limit(22, *tokenizer);
  EXPECT_EQ(data.token_count(), 22);
  EXPECT_THROW(data.limit(23, *tokenizer), UsageError);
}

}  // namespace
}  // namespace efla
