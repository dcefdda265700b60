// Text to token ids and back: SentencePiece models and plain bytes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace efla {

/// Turns text into token ids. Thread-safe once loaded.
class Tokenizer {
 public:
  /// `path` names a SentencePiece .model file, or is the word "byte" for the byte tokenizer (ids
  /// 0..255 are the bytes, 256 is bos, 257 is eos). Errors: no such file, not a SentencePiece
  /// model.
  static std::unique_ptr<Tokenizer> load(const std::string& path);
  virtual ~Tokenizer() = default;

  /// Token ids of the text alone: no bos or eos is added, and text that spells "<s>" is plain text.
  /// A SentencePiece tokenizer wants valid UTF-8 (an efla::Error gives the line and byte offset);
  /// the byte tokenizer takes anything. Time and memory are linear in the text also for one line of
  /// any length (tokenizer.cc states how).
  virtual std::vector<int32_t> encode(std::string_view text) const = 0;
  /// The text of the ids; bos, eos and other control tokens are silent. For models trained here
  /// (and for bytes) decode(encode(x)) == x for every valid x. Errors: an id outside [0,
  /// vocab_size).
  virtual std::string decode(std::span<const int32_t> ids) const = 0;
  /// The bytes one token adds in the middle of a text; empty for control tokens. May be part of a
  /// character.
  virtual std::string token_bytes(int32_t id) const = 0;
  /// The same for the first token of a text: without the leading space that belongs to the
  /// encoding, not to the text (SentencePiece's add_dummy_prefix).
  virtual std::string first_token_bytes(int32_t id) const { return token_bytes(id); }

  virtual int64_t vocab_size() const = 0;
  virtual int32_t bos_id() const = 0;  ///< -1: the tokenizer has none
  virtual int32_t eos_id() const = 0;  ///< -1: the tokenizer has none

  /// 16 hex digits that identify the model's bytes; stored in token shards and checked against
  /// them.
  const std::string& fingerprint() const { return fingerprint_; }
  /// What load() was given.
  const std::string& path() const { return path_; }
  /// The serialized model, to be copied beside a checkpoint; empty for the byte tokenizer.
  const std::string& model_bytes() const { return model_bytes_; }

 protected:
  std::string fingerprint_, path_, model_bytes_;
};

/// Decodes tokens as they are generated: text comes out as soon as its characters are complete, in
/// constant time and memory per token. Bytes that can never become UTF-8 come out as U+FFFD, so the
/// output is always printable; otherwise all output together equals decode() of all ids.
class StreamDecoder {
 public:
  /// `prompt`: the ids before the first generated one; their text is not repeated, but a character
  /// (and the space after the prompt) may continue from them.
  explicit StreamDecoder(const Tokenizer& tokenizer, std::span<const int32_t> prompt = {});
  /// Text that became complete with this token; often empty.
  std::string push(int32_t id);
  /// What is left at the end: U+FFFD for a character that was never completed.
  std::string finish();

 private:
  const Tokenizer& tokenizer_;
  std::string pending_;
  bool at_start_ = true;
};

struct TokenizerTraining {
  int64_t vocab_size = 4096;           ///< pieces in all, with 3 control and 256 byte tokens
  std::string model_type = "bpe";      ///< "bpe" or "unigram"
  bool split_digits = true;            ///< every digit its own token
  double character_coverage = 0.9995;  ///< rarer characters are spelled by byte tokens
  int64_t max_sentences =
      2'000'000;  ///< a random sample (fixed seed) of the lines beyond this; 0: all
  uint64_t seed = 42;
};

/// Trains a SentencePiece model on the text of `inputs` (plain text, .gz or .xz) and writes
/// OUTPUT_PREFIX.model atomically; returns its path. The model keeps text exactly: no
/// normalisation, no dummy prefix, no whitespace removal, byte tokens for unknown characters, a
/// newline is one token of its own. Same inputs and options, same model. Errors (one sentence):
/// empty or invalid input, a vocabulary that the text cannot fill.
std::filesystem::path train_sentencepiece(const std::vector<std::string>& inputs,
                                          const std::string& output_prefix,
                                          const TokenizerTraining& options = {});

}  // namespace efla
