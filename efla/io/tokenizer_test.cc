#include "efla/io/tokenizer.h"

#include <rapidcheck.h>

#include "efla/io/atomic_file.h"
#include "efla/io/sentencepiece_tokenizer.h"
#include "efla/io/test_util.h"

namespace efla {
namespace {

using testing::error_of;
using testing::made_up_text;
using testing::slurp;
using testing::spit;
using testing::TempFolder;

// Models trained once for all tests.
struct Trained {
  TempFolder folder;
  std::string bpe, unigram;
  Trained() {
    spit(folder / "text", made_up_text(150'000, 1) + " na\xC3\xAFve caf\xC3\xA9\n");
    TokenizerTraining options;
    options.vocab_size = 600;
    options.character_coverage = 1.0;
    bpe = train_sentencepiece({(folder / "text").string()}, (folder / "bpe").string(), options);
    options.model_type = "unigram";
    options.vocab_size = 500;
    unigram = train_sentencepiece({(folder / "text").string()}, (folder / "uni").string(), options);
  }
};

const Trained& trained() {
  static const Trained models;
  return models;
}

std::string utf8_of(const std::vector<uint32_t>& code_points) {
  std::string text;
  for (const uint32_t c : code_points) {
    if (c < 0x80) {
      text += static_cast<char>(c);
    } else if (c < 0x800) {
      text += {static_cast<char>(0xC0 | c >> 6), static_cast<char>(0x80 | (c & 63))};
    } else if (c < 0x10000) {
      text += {static_cast<char>(0xE0 | c >> 12), static_cast<char>(0x80 | (c >> 6 & 63)),
               static_cast<char>(0x80 | (c & 63))};
    } else {
      text += {static_cast<char>(0xF0 | c >> 18), static_cast<char>(0x80 | (c >> 12 & 63)),
               static_cast<char>(0x80 | (c >> 6 & 63)), static_cast<char>(0x80 | (c & 63))};
    }
  }
  return text;
}

// Any valid text, with the characters that cause trouble more often than chance would give them.
rc::Gen<std::string> any_text() {
  const auto trouble =
      rc::gen::elementOf(std::vector<uint32_t>{' ', ' ', '\n', '\t', '\r', 0, 0x7F, 0x2581, 0x2585,
                                               0xFFFD, 0xFEFF, 0x85, 0xA0, 0x301, '<', '>', '0'});
  const auto letter =
      rc::gen::elementOf(std::vector<uint32_t>{'a', 'b', 'n', 'e', 't', 'o', 'r', '1'});
  const auto any = rc::gen::suchThat(rc::gen::inRange<uint32_t>(0, 0x110000),
                                     [](uint32_t c) { return c < 0xD800 || c > 0xDFFF; });
  return rc::gen::map(
      rc::gen::container<std::vector<uint32_t>>(rc::gen::oneOf(trouble, letter, any)), utf8_of);
}

const std::vector<std::string>& awkward_texts() {
  static const std::vector<std::string> texts = {"",
                                                 " ",
                                                 "  ",
                                                 "\n",
                                                 "\n\n\n",
                                                 " \n ",
                                                 "a",
                                                 " a",
                                                 "a ",
                                                 "  a  b  ",
                                                 "\t\ta",
                                                 "a\r\nb",
                                                 std::string("a\0b", 3),
                                                 "<s></s><unk><0x41>",
                                                 "\xE2\x96\x81",
                                                 "a\xE2\x96\x81\xE2\x96\x81 b",
                                                 "\xF0\x9F\x98\x80 \xE4\xB8\xAD\xE6\x96\x87",
                                                 "\xEF\xBF\xBD",
                                                 "e\xCC\x81",
                                                 "\xEF\xBB\xBFtext",
                                                 "12345 3.14",
                                                 "\xE2\x81\x87",
                                                 " \xE2\x81\x87 "};
  return texts;
}

TEST(TokenizerTraining, SameInputSameModel) {
  const TempFolder folder;
  TokenizerTraining options;
  options.vocab_size = 600;
  options.character_coverage = 1.0;
  const auto path = train_sentencepiece({(trained().folder / "text").string()},
                                        (folder / "again").string(), options);
  EXPECT_EQ(path, folder / "again.model");
  EXPECT_TRUE(slurp(path) == slurp(trained().bpe)) << "the two models differ";
  EXPECT_EQ(Tokenizer::load(path)->fingerprint(), Tokenizer::load(trained().bpe)->fingerprint());
}

TEST(TokenizerTraining, ModelHasTheVocabularyAskedFor) {
  const auto tokenizer = Tokenizer::load(trained().bpe);
  EXPECT_EQ(tokenizer->vocab_size(), 600);
  EXPECT_EQ(tokenizer->bos_id(), 1);
  EXPECT_EQ(tokenizer->eos_id(), 2);
  EXPECT_EQ(tokenizer->fingerprint().size(), 16u);
  EXPECT_EQ(tokenizer->model_bytes(), slurp(trained().bpe));
}

TEST(TokenizerTraining, LearnsFromTheText) {
  const std::string text = made_up_text(20'000, 1);
  EXPECT_LT(Tokenizer::load(trained().bpe)->encode(text).size(), text.size() / 2);
  EXPECT_LT(Tokenizer::load(trained().unigram)->encode(text).size(), text.size() / 2);
}

TEST(TokenizerTraining, SplitsDigitsAndKeepsNewlinesApart) {
  const auto tokenizer = Tokenizer::load(trained().bpe);
  for (int32_t id = 3; id < tokenizer->vocab_size(); ++id) {
    const std::string bytes = tokenizer->token_bytes(id);
    if (bytes.size() < 2) continue;
    EXPECT_EQ(bytes.find('\n'), std::string::npos) << bytes;
    EXPECT_EQ(
        std::count_if(bytes.begin(), bytes.end(), [](char c) { return c >= '0' && c <= '9'; }), 0)
        << bytes;
  }
  EXPECT_EQ(tokenizer->encode("\n\n").size(), 2u);
}

TEST(TokenizerTraining, RefusesInOneSentence) {
  const TempFolder folder;
  spit(folder / "little", "hello hello world");
  spit(folder / "empty", "");
  spit(folder / "newlines", "\n\n\n");
  spit(folder / "bad", "fine\nno\xFFt fine");
  const std::string out = (folder / "out").string();
  TokenizerTraining options;
  const auto train = [&](const std::string& input) {
    return error_of([&] { train_sentencepiece({(folder / input).string()}, out, options); });
  };
  EXPECT_MENTIONS(train("little"), "little");
  EXPECT_MENTIONS(train("little"), "too little");
  EXPECT_MENTIONS(train("empty"), "is empty");
  EXPECT_MENTIONS(train("newlines"), "too little");
  EXPECT_MENTIONS(train("bad"), "line 2");
  EXPECT_MENTIONS(train("missing"), "No such file");
  for (const char* type : {"bpe", "unigram"}) {
    options.model_type = type;
    for (const int64_t size : {300, 5000}) {
      options.vocab_size = size;
      EXPECT_MENTIONS(train("little"), "too little") << type << size;
    }
  }
  options.model_type = "word";
  EXPECT_THROW(train_sentencepiece({(folder / "little").string()}, out, options), UsageError);
  options = {};
  for (const int64_t size : {-1, 0, 100, 2'000'000}) {
    options.vocab_size = size;
    EXPECT_THROW(train_sentencepiece({(folder / "little").string()}, out, options), UsageError);
  }
  options = {};
  EXPECT_MENTIONS(error_of([&] {
                    train_sentencepiece({trained().folder / "text"}, (folder / "no/out").string(),
                                        options);
                  }),
                  "does not exist");
  EXPECT_EQ(testing::names_in(folder.path()),
            (std::vector<std::string>{"bad", "empty", "little", "newlines"}));
}

TEST(TokenizerTraining, TextThatSpellsControlTokens) {
  const TempFolder folder;
  std::string text = made_up_text(60'000, 3);
  for (int i = 0; i < 3000; ++i) text += "<s> </s> <unk> <0x41> \xE2\x96\x81 \xE2\x96\x85 x\ty\n";
  spit(folder / "text", text);
  TokenizerTraining options;
  options.vocab_size = 600;
  const auto tokenizer =
      Tokenizer::load(train_sentencepiece({folder / "text"}, folder / "out", options));
  const std::string sample = "<s> </s> <unk> <0x41> \xE2\x96\x81 \xE2\x96\x85 x\ty\n";
  const std::vector<int32_t> ids = tokenizer->encode(sample);
  EXPECT_EQ(tokenizer->decode(ids), sample);
  EXPECT_EQ(std::count(ids.begin(), ids.end(), tokenizer->bos_id()), 0);
  EXPECT_EQ(std::count(ids.begin(), ids.end(), tokenizer->eos_id()), 0);
}

class RoundTrip : public ::testing::TestWithParam<const char*> {
 protected:
  std::unique_ptr<Tokenizer> load() const {
    const std::string kind = GetParam();
    return Tokenizer::load(kind == "bpe"       ? trained().bpe
                           : kind == "unigram" ? trained().unigram
                                               : "byte");
  }
  static void check(const Tokenizer& tokenizer, const std::string& text) {
    const std::vector<int32_t> ids = tokenizer.encode(text);
    ASSERT_EQ(tokenizer.decode(ids), text);
    // The stream gives the same text, in whole characters.
    StreamDecoder stream(tokenizer);
    std::string streamed;
    for (const int32_t id : ids) streamed += stream.push(id);
    streamed += stream.finish();
    ASSERT_EQ(streamed, text);
    // And so it does after any prompt.
    const size_t half = ids.size() / 2;
    StreamDecoder after(tokenizer, std::span(ids).first(half));
    std::string rest;
    for (size_t i = half; i < ids.size(); ++i) rest += after.push(ids[i]);
    rest += after.finish();
    ASSERT_TRUE(text.ends_with(rest));
  }
};

TEST_P(RoundTrip, AwkwardTexts) {
  const auto tokenizer = load();
  for (const std::string& text : awkward_texts()) check(*tokenizer, text);
}

TEST_P(RoundTrip, AnyText) {
  const auto tokenizer = load();
  EXPECT_TRUE(rc::check([&] { check(*tokenizer, *any_text()); }));
}

TEST_P(RoundTrip, LongText) {
  const auto tokenizer = load();
  check(*tokenizer, made_up_text(300'000, 7));
  check(*tokenizer, std::string(300'000, 'a'));
  check(*tokenizer, std::string(300'000, ' '));
}

INSTANTIATE_TEST_SUITE_P(Tokenizers, RoundTrip, ::testing::Values("bpe", "unigram", "byte"),
                         [](const auto& info) { return std::string(info.param); });

TEST(SentencePieceTokenizer, ChunksDoNotChangeTheTokens) {
  for (const std::string& path : {trained().bpe, trained().unigram}) {
    SentencePieceTokenizer whole(read_file(path), path), chunked(read_file(path), path);
    whole.set_chunk_bytes(1 << 30);
    const std::string text =
        made_up_text(5000, 11) + "\n\n  caf\xC3\xA9 \xE4\xB8\xAD\xE6\x96\x87  x";
    for (const size_t bytes : {40, 64, 100, 1000}) {
      chunked.set_chunk_bytes(bytes);
      EXPECT_EQ(chunked.encode(text), whole.encode(text)) << bytes;
    }
  }
}

TEST(SentencePieceTokenizer, ChunksOfModelsThatNormalise) {
  // The same vocabulary under the settings that other models have: dummy prefix, trimmed white
  // space.
  const std::string model = read_file(trained().bpe);
  const std::string llama = with_dummy_prefix(model, true);
  const std::string trims = with_dummy_prefix(model, true) + std::string("\x1A\x02\x20\x01", 4);
  for (const std::string& bytes : {llama, trims}) {
    SentencePieceTokenizer whole(bytes, "m"), chunked(bytes, "m");
    whole.set_chunk_bytes(1 << 30);
    const std::string text = "  " + made_up_text(5000, 12) + "  two  spaces ";
    for (const size_t chunk : {40, 100, 1000}) {
      chunked.set_chunk_bytes(chunk);
      EXPECT_EQ(chunked.encode(text), whole.encode(text)) << chunk;
    }
  }
  const SentencePieceTokenizer prefixed(llama, "m");
  EXPECT_EQ(prefixed.decode(prefixed.encode(" a b")), " a b");
  const SentencePieceTokenizer trimming(trims, "m");
  EXPECT_TRUE(trimming.settings().remove_extra_whitespaces);
  EXPECT_EQ(trimming.decode(trimming.encode("  a   b ")), "a b");
}

TEST(StreamDecoder, EqualsTheLibraryOnAnyTokens) {
  for (const bool prefix : {false, true}) {
    const SentencePieceTokenizer tokenizer(with_dummy_prefix(read_file(trained().bpe), prefix),
                                           "m");
    EXPECT_TRUE(rc::check([&] {
      const auto ids = *rc::gen::container<std::vector<int32_t>>(
          rc::gen::inRange<int32_t>(0, static_cast<int32_t>(tokenizer.vocab_size())));
      StreamDecoder stream(tokenizer);
      std::string streamed;
      for (const int32_t id : ids) streamed += stream.push(id);
      streamed += stream.finish();
      RC_ASSERT(streamed == tokenizer.decode(ids));
    }));
  }
}

TEST(StreamDecoder, HoldsBackIncompleteCharacters) {
  const auto bytes = Tokenizer::load("byte");
  StreamDecoder stream(*bytes);
  EXPECT_EQ(stream.push(0xE4), "");
  EXPECT_EQ(stream.push(0xB8), "");
  EXPECT_EQ(stream.push(0xAD), "\xE4\xB8\xAD");
  EXPECT_EQ(stream.push(0xE4), "");
  EXPECT_EQ(stream.push('a'),
            "\xEF\xBF\xBD"
            "a");
  EXPECT_EQ(stream.push(0xF0), "");
  EXPECT_EQ(stream.push(bytes->eos_id()), "\xEF\xBF\xBD");
  EXPECT_EQ(stream.push(0xF0), "");
  EXPECT_EQ(stream.finish(), "\xEF\xBF\xBD");
}

TEST(ByteTokenizer, TakesAnyBytes) {
  const auto bytes = Tokenizer::load("byte");
  std::string all;
  for (int i = 0; i < 256; ++i) all += static_cast<char>(i);
  EXPECT_EQ(bytes->decode(bytes->encode(all)), all);
  EXPECT_EQ(bytes->vocab_size(), 258);
  EXPECT_EQ(bytes->decode(std::vector<int32_t>{256, 'a', 257}), "a");
}

TEST(Tokenizer, RefusesWhatItCannotDo) {
  const TempFolder folder;
  spit(folder / "junk.model", "this is not a model");
  spit(folder / "empty.model", "");
  spit(folder / "cut.model", slurp(trained().bpe).substr(0, 1000));
  for (const char* name : {"junk.model", "empty.model", "cut.model"}) {
    const std::string message = error_of([&] { Tokenizer::load((folder / name).string()); });
    EXPECT_MENTIONS(message, name);
    EXPECT_MENTIONS(message, "not a SentencePiece model");
  }
  EXPECT_MENTIONS(error_of([&] { Tokenizer::load((folder / "none").string()); }), "No such file");
  const auto tokenizer = Tokenizer::load(trained().bpe);
  EXPECT_MENTIONS(error_of([&] { tokenizer->encode("ab\ncd\xC3"); }), "line 2, byte offset 5");
  for (const int32_t id : {-1, 600, 1 << 30}) {
    EXPECT_MENTIONS(error_of([&] { tokenizer->decode(std::vector<int32_t>{id}); }),
                    std::to_string(id));
    EXPECT_MENTIONS(error_of([&] { tokenizer->token_bytes(id); }), std::to_string(id));
    EXPECT_MENTIONS(error_of([&] { Tokenizer::load("byte")->decode(std::vector<int32_t>{id}); }),
                    std::to_string(id));
  }
}

TEST(Tokenizer, DifferentModelsHaveDifferentFingerprints) {
  EXPECT_NE(Tokenizer::load(trained().bpe)->fingerprint(),
            Tokenizer::load(trained().unigram)->fingerprint());
  EXPECT_NE(Tokenizer::load(trained().bpe)->fingerprint(), Tokenizer::load("byte")->fingerprint());
}

}  // namespace
}  // namespace efla
