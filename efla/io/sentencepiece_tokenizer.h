// A Tokenizer that runs a SentencePiece model.
#pragma once

#include <sentencepiece_processor.h>

#include <memory>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "efla/io/sentencepiece_model.h"
#include "efla/io/tokenizer.h"

namespace efla {

/// Long texts are cut into chunks before the library sees them, because its memory grows by some
/// hundred bytes per character and one call holds the whole text. The rule:
///
/// - Models without normalisation (those trained here, LLaMA's, Mistral's): a cut is made between
/// two
///   characters that stand side by side in no piece of the vocabulary, so no token could span it;
///   ids are those of one call. Where 64 KiB hold no such place (a run of one letter, say), the cut
///   falls at the last character boundary: ids may then differ from one call's at that place, the
///   decoded text does not.
/// - Models with a normalisation: a cut is made before a space between two ASCII letters or digits,
/// provided that
///   pieces hold a space only in front; again ids are those of one call. Without such a place the
///   text is not cut.
class SentencePieceTokenizer : public Tokenizer {
 public:
  /// `path` is for messages. Errors: the bytes are no SentencePiece model.
  SentencePieceTokenizer(std::string model_bytes, const std::string& path);

  std::vector<int32_t> encode(std::string_view text) const override;
  std::string decode(std::span<const int32_t> ids) const override;
  std::string token_bytes(int32_t id) const override;
  std::string first_token_bytes(int32_t id) const override;
  int64_t vocab_size() const override { return static_cast<int64_t>(token_bytes_.size()); }
  int32_t bos_id() const override { return first_.bos_id(); }
  int32_t eos_id() const override { return first_.eos_id(); }

  const SentencePieceSettings& settings() const { return settings_; }
  /// Chunks are this many bytes at most where a cut is possible; tests make it small.
  void set_chunk_bytes(size_t bytes) { chunk_bytes_ = bytes; }

 private:
  void read_vocabulary();
  void check_id(int32_t id) const;
  void encode_chunks(std::string_view text, bool at_start, std::vector<int32_t>& ids) const;
  void encode_chunk(std::string_view chunk, bool at_start, std::vector<int32_t>& ids) const;
  size_t find_cut(std::string_view text) const;
  bool can_cut_before(std::string_view text, size_t position) const;

  SentencePieceSettings settings_;
  sentencepiece::SentencePieceProcessor first_;  // the model as it is: a text's first chunk
  sentencepiece::SentencePieceProcessor
      rest_;                               // later chunks: the dummy prefix as find_cut() needs it
  std::vector<std::string> token_bytes_;   // per id
  std::unordered_set<uint64_t> adjacent_;  // pairs of code points side by side in some piece
  bool space_only_in_front_ = true;
  bool escapes_meta_space_ =
      false;  // U+2581 in the text is spelled by its bytes, so that it survives
  std::vector<int32_t> meta_space_ids_;
  size_t chunk_bytes_ = 1 << 16;
};

}  // namespace efla
