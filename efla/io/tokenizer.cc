#include "efla/io/tokenizer.h"

#include "efla/io/atomic_file.h"
#include "efla/io/checksum.h"
#include "efla/io/error.h"
#include "efla/io/sentencepiece_tokenizer.h"
#include "efla/io/utf8.h"

namespace efla {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

class ByteTokenizer : public Tokenizer {
 public:
  ByteTokenizer() {
    path_ = "byte";
    fingerprint_ = fnv1a_hex("byte tokenizer, version 1");
  }
  std::vector<int32_t> encode(std::string_view text) const override {
    const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
    return {bytes, bytes + text.size()};
  }
  std::string decode(std::span<const int32_t> ids) const override {
    std::string text;
    for (const int32_t id : ids) text += token_bytes(id);
    return text;
  }
  std::string token_bytes(int32_t id) const override {
    if (id < 0 || id >= vocab_size()) {
      throw Error("token id " + std::to_string(id) +
                  " is outside the byte tokenizer's vocabulary (258 tokens)");
    }
    return id < 256 ? std::string(1, static_cast<char>(id)) : std::string();
  }
  int64_t vocab_size() const override { return 258; }
  int32_t bos_id() const override { return 256; }
  int32_t eos_id() const override { return 257; }
};

// Moves the complete characters at the front of `pending` to the result; invalid bytes become
// U+FFFD, an incomplete character stays.
std::string take_complete(std::string& pending) {
  std::string ready;
  size_t i = 0;
  while (i < pending.size()) {
    const Utf8Char decoded = decode_utf8(std::string_view(pending).substr(i));
    if (decoded.incomplete) break;
    if (decoded.length == 0) {
      ready += kReplacement;
      ++i;
    } else {
      ready.append(pending, i, static_cast<size_t>(decoded.length));
      i += static_cast<size_t>(decoded.length);
    }
  }
  pending.erase(0, i);
  return ready;
}

}  // namespace

std::unique_ptr<Tokenizer> Tokenizer::load(const std::string& path) {
  if (path == "byte") return std::make_unique<ByteTokenizer>();
  return std::make_unique<SentencePieceTokenizer>(read_file(path), path);
}

StreamDecoder::StreamDecoder(const Tokenizer& tokenizer, std::span<const int32_t> prompt)
    : tokenizer_(tokenizer) {
  for (const int32_t id : prompt) push(id);
}

std::string StreamDecoder::push(int32_t id) {
  const std::string bytes =
      at_start_ ? tokenizer_.first_token_bytes(id) : tokenizer_.token_bytes(id);
  if (tokenizer_.token_bytes(id).empty()) return finish();  // a control token ends a character, too
  at_start_ = false;
  pending_ += bytes;
  return take_complete(pending_);
}

std::string StreamDecoder::finish() {
  std::string ready = take_complete(pending_);
  for (size_t i = 0; i < pending_.size(); ++i) ready += kReplacement;
  pending_.clear();
  return ready;
}

}  // namespace efla
