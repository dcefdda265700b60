#include "efla/eval/generate.h"

#include <gtest/gtest.h>

#include "efla/eval/test_models.h"
#include "efla/io/error.h"

namespace efla {
namespace {

constexpr int64_t kByteVocab = 258;  // of the byte tokenizer: 256 bytes, bos, eos
constexpr int64_t kBos = 256;
constexpr int64_t kEos = 257;

at::Tensor as_tensor(std::span<const float> values) {
  return torch::tensor(std::vector<float>(values.begin(), values.end()));
}

// A model that recites `text` after BOS and then ends the text. Every byte must be distinct.
LanguageModel reciting_model(const std::string& text) {
  return testing::chain_model(kByteVocab, [text](int64_t token) -> int64_t {
    if (token == kBos) return static_cast<unsigned char>(text.front());
    const size_t at = token < 256 ? text.find(static_cast<char>(token)) : std::string::npos;
    if (at == std::string::npos || at + 1 == text.size()) return kEos;
    return static_cast<unsigned char>(text[at + 1]);
  });
}

TEST(Decoding, IncrementalLogitsEqualTheFullForward) {
  constexpr int64_t kVocab = 31;
  LanguageModel model = testing::random_model(kVocab);
  const at::Tensor ids = torch::randint(kVocab, {1, 90}, at::kLong);
  const std::vector<int32_t> tokens = [&ids] {
    const at::Tensor narrow = ids.to(at::kInt);
    const int32_t* p = narrow.const_data_ptr<int32_t>();
    return std::vector<int32_t>(p, p + narrow.numel());
  }();
  const torch::NoGradGuard no_grad;
  const at::Tensor full = model->forward(ids)[0];
  const std::span<const int32_t> all = tokens;

  Decoding decoding(model);  // token by token
  for (size_t i = 0; i < tokens.size(); ++i) {
    decoding.read(all.subspan(i, 1));
    ASSERT_LT(
        (as_tensor(decoding.logits()) - full[static_cast<int64_t>(i)]).abs().max().item<float>(),
        2e-4)
        << "after token " << i;
  }
  for (const size_t prompt : {1, 2, 3, 50, 64, 89}) {  // a prompt at once, then token by token
    Decoding split(model);
    split.read(all.first(prompt));
    for (size_t i = prompt; i < tokens.size(); ++i) split.read(all.subspan(i, 1));
    EXPECT_LT((as_tensor(split.logits()) - full[89]).abs().max().item<float>(), 2e-4) << prompt;
  }
}

TEST(Decoding, CopiesAreIndependentBranches) {
  LanguageModel model = testing::random_model(31);
  Decoding trunk(model);
  trunk.read(std::vector<int32_t>{3, 1, 4});
  const at::Tensor before = as_tensor(trunk.logits());
  Decoding branch = trunk;
  for (int32_t token = 0; token < 9; ++token) branch.read({&token, 1});
  EXPECT_TRUE(at::equal(as_tensor(trunk.logits()), before));
  Decoding again = trunk;
  for (int32_t token = 0; token < 9; ++token) again.read({&token, 1});
  EXPECT_TRUE(at::equal(as_tensor(again.logits()), as_tensor(branch.logits())));
}

TEST(Decoding, StateDoesNotGrow) {
  LanguageModel model = testing::random_model(31);
  Decoding decoding(model);
  const int32_t token = 7;
  decoding.read({&token, 1});
  const int64_t bytes = decoding.state_bytes();
  EXPECT_EQ(bytes, model->config().state_elements() * 4);
  for (int i = 0; i < 300; ++i) decoding.read({&token, 1});
  EXPECT_EQ(decoding.state_bytes(), bytes);
  EXPECT_EQ(decoding.tokens_read(), 301);
}

TEST(Decoding, LongPromptsAreReadInPieces) {
  LanguageModel model = testing::random_model(31);
  const std::vector<int32_t> tokens(5000, 11);  // more than one piece
  Decoding whole(model), halves(model);
  whole.read(tokens);
  halves.read(std::span(tokens).first(2500));
  halves.read(std::span(tokens).subspan(2500));
  EXPECT_EQ(whole.tokens_read(), 5000);
  EXPECT_LT((as_tensor(whole.logits()) - as_tensor(halves.logits())).abs().max().item<float>(),
            2e-4);
}

TEST(Decoding, TokensOutsideTheVocabularyAreRefused) {
  Decoding decoding(testing::random_model(31));
  EXPECT_THROW(decoding.read(std::vector<int32_t>{1, 31}), Error);
  EXPECT_THROW(decoding.read(std::vector<int32_t>{-1}), Error);
  EXPECT_THROW(decoding.read(std::vector<int32_t>{}), Error);
}

TEST(Generator, RecitesUntilTheEndOfText) {
  const auto tokenizer = Tokenizer::load("byte");
  Generator generator(reciting_model("abc\u00e9?!"), *tokenizer);
  generator.read_prompt("");
  EXPECT_EQ(generator.prompt_tokens(), 1);
  const Generation recited = generator.generate({});
  EXPECT_EQ(recited.text, "abc\u00e9?!");
  EXPECT_EQ(recited.reason, StopReason::kEndOfText);
  EXPECT_EQ(recited.tokens.size(), 8u);
  EXPECT_EQ(recited.tokens.back(), kEos);
}

TEST(Generator, ContinuesThePrompt) {
  const auto tokenizer = Tokenizer::load("byte");
  Generator generator(reciting_model("abcdef"), *tokenizer);
  generator.read_prompt("abc");
  EXPECT_EQ(generator.generate({}).text, "def");
  generator.read_prompt("ab");
  EXPECT_EQ(generator.generate({}).text, "cdef");
}

TEST(Generator, StreamsWholeCharacters) {
  const auto tokenizer = Tokenizer::load("byte");
  Generator generator(reciting_model("a\u00e9\u4e16z"), *tokenizer);
  generator.read_prompt("");
  std::vector<std::string> pieces;
  const Generation result =
      generator.generate({}, 0, [&pieces](std::string_view text) { pieces.emplace_back(text); });
  EXPECT_EQ(pieces, (std::vector<std::string>{"a", "\u00e9", "\u4e16", "z"}));
  EXPECT_EQ(result.text, "a\u00e9\u4e16z");
}

TEST(Generator, StopStringsMaySpanTokens) {
  const auto tokenizer = Tokenizer::load("byte");
  Generator generator(reciting_model("abcdef"), *tokenizer);
  generator.read_prompt("");
  GenerateOptions options;
  options.stop = {"xyz", "cde"};
  std::string streamed;
  const Generation result =
      generator.generate(options, 0, [&streamed](std::string_view text) { streamed += text; });
  EXPECT_EQ(result.text, "ab");
  EXPECT_EQ(streamed, "ab");
  EXPECT_EQ(result.reason, StopReason::kStopString);
  EXPECT_EQ(result.tokens.size(), 5u);  // nothing is drawn after the stop string is complete
}

TEST(Generator, HeldBackTextComesOutAtTheEnd) {
  const auto tokenizer = Tokenizer::load("byte");
  Generator generator(reciting_model("abcd"), *tokenizer);
  generator.read_prompt("");
  GenerateOptions options;
  options.stop = {"cdX"};
  EXPECT_EQ(generator.generate(options).text, "abcd");
  options.max_tokens = 3;  // ends inside the possible stop string
  const Generation result = generator.generate(options);
  EXPECT_EQ(result.text, "abc");
  EXPECT_EQ(result.reason, StopReason::kMaxTokens);
}

TEST(Generator, MaxTokensIsExact) {
  const auto tokenizer = Tokenizer::load("byte");
  Generator generator(testing::random_model(kByteVocab), *tokenizer);
  generator.read_prompt("x");
  GenerateOptions options;
  options.ignore_eos = true;
  for (const int64_t count : {1, 2, 37}) {
    options.max_tokens = count;
    const Generation result = generator.generate(options);
    EXPECT_EQ(static_cast<int64_t>(result.tokens.size()), count);
    EXPECT_EQ(result.reason, StopReason::kMaxTokens);
    for (const int32_t token : result.tokens) EXPECT_NE(token, kEos);
  }
  options.max_tokens = 0;
  EXPECT_THROW(generator.generate(options), UsageError);
}

TEST(Generator, SameSeedSameText) {
  const auto tokenizer = Tokenizer::load("byte");
  LanguageModel model = testing::random_model(kByteVocab);
  GenerateOptions options;
  options.sampling.seed = 3;
  options.max_tokens = 50;
  Generator first(model, *tokenizer);
  first.read_prompt("prompt");
  const Generation a = first.generate(options, 0);
  const Generation b = first.generate(options, 1);
  Generator second(model, *tokenizer);
  second.read_prompt("prompt");
  EXPECT_EQ(second.generate(options, 1).tokens, b.tokens);  // whatever was sampled before
  EXPECT_EQ(second.generate(options, 0).tokens, a.tokens);
  EXPECT_NE(a.tokens, b.tokens);
  options.sampling.seed = 4;
  EXPECT_NE(second.generate(options, 0).tokens, a.tokens);
}

TEST(Generator, GreedyTakesTheArgmaxOfTheFullForward) {
  const auto tokenizer = Tokenizer::load("byte");
  LanguageModel model = testing::random_model(kByteVocab);
  Generator generator(model, *tokenizer);
  generator.read_prompt("It was");
  GenerateOptions options;
  options.sampling.temperature = 0;
  options.max_tokens = 30;
  options.ignore_eos = true;
  const Generation result = generator.generate(options);
  std::vector<int64_t> ids = {kBos, 'I', 't', ' ', 'w', 'a', 's'};
  const torch::NoGradGuard no_grad;
  for (const int32_t token : result.tokens) {
    at::Tensor logits = model->forward(torch::tensor(ids, at::kLong).unsqueeze(0))[0][-1];
    logits[kEos] = -1e9;
    EXPECT_EQ(token, logits.argmax().item<int64_t>());
    ids.push_back(token);
  }
}

TEST(Generator, PaddingTokensOfTheModelAreNeverDrawn) {
  const auto tokenizer = Tokenizer::load("byte");
  LanguageModel model = testing::random_model(kByteVocab + 62);
  {
    const torch::NoGradGuard no_grad;
    model->head_weight().narrow(0, 0, kByteVocab).fill_(0);  // the padding has the high logits
  }
  Generator generator(model, *tokenizer);
  generator.read_prompt("x");
  GenerateOptions options;
  options.max_tokens = 100;
  for (const int32_t token : generator.generate(options).tokens) EXPECT_LT(token, kByteVocab);
}

TEST(Generator, RefusesWhatCannotWork) {
  const auto tokenizer = Tokenizer::load("byte");
  EXPECT_THROW(Generator(testing::random_model(100), *tokenizer), UsageError);
  Generator generator(testing::random_model(kByteVocab), *tokenizer);
  EXPECT_THROW(generator.read_prompt("bad \xff byte"), Error);
  generator.read_prompt("fine");
  GenerateOptions options;
  options.sampling.top_p = 0;
  EXPECT_THROW(generator.generate(options), UsageError);
  options = {};
  options.stop = {""};
  EXPECT_THROW(generator.generate(options), UsageError);
}

}  // namespace
}  // namespace efla
