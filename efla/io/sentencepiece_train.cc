// Training SentencePiece models that keep text exactly.
#include <sentencepiece_trainer.h>

#include <algorithm>
#include <unordered_map>

#include "efla/io/atomic_file.h"
#include "efla/io/documents.h"
#include "efla/io/error.h"
#include "efla/io/sentencepiece_model.h"
#include "efla/io/tokenizer.h"
#include "efla/io/utf8.h"

namespace efla {
namespace {

constexpr size_t kMaxSentenceBytes = 4096;
// Characters that the trainer uses inside and would drop the line for: the space's stand-in, and
// U+2585.
constexpr std::string_view kReserved[] = {"\xE2\x96\x81", "\xE2\x96\x85"};

// Hands the trainer the lines of all inputs, one file in memory at a time. Long lines are cut at
// spaces (the trainer would skip them) and reserved characters left out; neither matters to the
// statistics of pieces.
class LineIterator final : public sentencepiece::SentenceIterator {
 public:
  explicit LineIterator(const std::vector<std::string>& inputs) : inputs_(inputs) { Next(); }

  bool done() const override { return done_; }
  const std::string& value() const override { return value_; }
  sentencepiece::util::Status status() const override { return {}; }
  void Next() override {
    do {
      while (position_ >= text_.size()) {
        if (file_ == inputs_.size()) {
          done_ = true;
          return;
        }
        text_ = read_text_file(inputs_[file_]);
        validate_utf8(text_, inputs_[file_]);
        ++file_;
        position_ = 0;
      }
      take_line();
    } while (value_.empty());
  }

 private:
  void take_line() {
    const std::string_view rest = std::string_view(text_).substr(position_);
    size_t end = std::min(rest.find('\n'), rest.size());
    size_t skip = end < rest.size() ? 1 : 0;
    if (end > kMaxSentenceBytes) {
      skip = 0;
      end = rest.rfind(' ', kMaxSentenceBytes);
      if (end == std::string_view::npos || end == 0) end = kMaxSentenceBytes;
      while (end > 0 && (static_cast<unsigned char>(rest[end]) & 0xC0) == 0x80) --end;
    }
    value_.assign(rest.substr(0, end));
    position_ += end + skip;
    for (const std::string_view reserved : kReserved) {
      for (size_t at; (at = value_.find(reserved)) != std::string::npos;) {
        value_.erase(at, reserved.size());
      }
    }
  }

  const std::vector<std::string>& inputs_;
  size_t file_ = 0, position_ = 0;
  std::string text_, value_;
  bool done_ = false;
};

std::unordered_map<std::string, std::string> trainer_arguments(const TokenizerTraining& options) {
  return {{"model_type", options.model_type},
          {"vocab_size", std::to_string(options.vocab_size)},
          {"character_coverage", std::to_string(options.character_coverage)},
          {"byte_fallback", "true"},
          {"normalization_rule_name", "identity"},
          {"add_dummy_prefix", "false"},
          {"remove_extra_whitespaces", "false"},
          {"allow_whitespace_only_pieces", "true"},
          {"split_digits", options.split_digits ? "true" : "false"},
          // A newline is a token of its own, never part of another.
          {"user_defined_symbols", "\n"},
          {"unk_id", "0"},
          {"bos_id", "1"},
          {"eos_id", "2"},
          {"pad_id", "-1"},
          {"max_sentence_length", std::to_string(kMaxSentenceBytes + 4)},
          {"input_sentence_size", std::to_string(options.max_sentences)},
          {"shuffle_input_sentence", "true"},
          // A constant: the model records it, and the same text must give the same model anywhere.
          {"num_threads", "8"},
          {"minloglevel", "4"}};
}

void check_options(const std::vector<std::string>& inputs, const TokenizerTraining& options) {
  if (inputs.empty()) throw UsageError("no text was given to train the tokenizer on");
  if (options.model_type != "bpe" && options.model_type != "unigram") {
    throw UsageError("tokenizer type \"" + options.model_type +
                     "\" is unknown: use bpe or unigram");
  }
  if (options.vocab_size < 300 || options.vocab_size > 1'000'000) {
    throw UsageError(
        "vocabulary size " + std::to_string(options.vocab_size) +
        " is out of range: use 300 to 1000000 (3 control and 256 byte tokens are part of it)");
  }
  if (!(options.character_coverage > 0.9 && options.character_coverage <= 1.0)) {
    throw UsageError("character coverage must be above 0.9 and at most 1");
  }
  if (options.max_sentences < 0) throw UsageError("max_sentences must not be negative");
}

}  // namespace

std::filesystem::path train_sentencepiece(const std::vector<std::string>& inputs,
                                          const std::string& output_prefix,
                                          const TokenizerTraining& options) {
  check_options(inputs, options);
  silence_sentencepiece();
  sentencepiece::SetRandomGeneratorSeed(static_cast<unsigned>(options.seed));
  const std::filesystem::path output = output_prefix + ".model";
  AtomicFileWriter file(
      output);  // before the long work, so that an unwritable folder is known first
  LineIterator lines(inputs);
  std::string model;
  const auto status =
      sentencepiece::SentencePieceTrainer::Train(trainer_arguments(options), &lines, &model);
  if (!status.ok() || model.empty()) {
    throw Error(
        "cannot train a tokenizer of " + std::to_string(options.vocab_size) + " tokens on " +
        inputs.front() + (inputs.size() > 1 ? " and the other inputs" : "") +
        ": the text holds too little for that vocabulary, or more distinct characters than it "
        "can take; use a smaller vocabulary or more text (" +
        std::string(status.message()) + ")");
  }
  file.write(model);
  file.commit();
  return output;
}

}  // namespace efla
