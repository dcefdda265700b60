#include "efla/io/sentencepiece_tokenizer.h"

#include <algorithm>

#include "efla/io/checksum.h"
#include "efla/io/error.h"
#include "efla/io/utf8.h"

namespace efla {
namespace {

constexpr std::string_view kMetaSpace = "\xE2\x96\x81";  // U+2581, how pieces spell a space
constexpr char32_t kMetaSpaceCodePoint = 0x2581;

uint64_t pair_key(char32_t left, char32_t right) {
  return (static_cast<uint64_t>(left) << 32) | static_cast<uint64_t>(right);
}

bool is_ascii_alnum(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

std::string replace_meta_spaces(std::string_view piece) {
  std::string text;
  for (size_t i = 0; i < piece.size();) {
    if (piece.compare(i, kMetaSpace.size(), kMetaSpace) == 0) {
      text += ' ';
      i += kMetaSpace.size();
    } else {
      text += piece[i++];
    }
  }
  return text;
}

// The start of the character that ends before `position`.
size_t previous_character(std::string_view text, size_t position) {
  do {
    --position;
  } while (position > 0 && (static_cast<unsigned char>(text[position]) & 0xC0) == 0x80);
  return position;
}

}  // namespace

SentencePieceTokenizer::SentencePieceTokenizer(std::string model_bytes, const std::string& path) {
  silence_sentencepiece();
  const auto refuse = [&] {
    throw Error(path + " is not a SentencePiece model: give a .model file or the word \"byte\"");
  };
  if (model_bytes.empty() || !read_sentencepiece_settings(model_bytes, settings_)) refuse();
  // A text's later chunks: where white space is trimmed the cut eats its space and the prefix
  // brings it back, elsewhere the space stays and no prefix may be added.
  const std::string rest = with_dummy_prefix(model_bytes, settings_.remove_extra_whitespaces);
  if (!first_.LoadFromSerializedProto(model_bytes).ok() || first_.GetPieceSize() == 0 ||
      !rest_.LoadFromSerializedProto(rest).ok()) {
    refuse();
  }
  path_ = path;
  model_bytes_ = std::move(model_bytes);
  fingerprint_ = fnv1a_hex(model_bytes_);
  read_vocabulary();
}

void SentencePieceTokenizer::read_vocabulary() {
  const int size = first_.GetPieceSize();
  std::vector<int32_t> byte_ids(256, -1);
  for (int id = 0; id < size; ++id) {
    const std::string& piece = first_.IdToPiece(id);
    if (first_.IsControl(id)) {
      token_bytes_.emplace_back();
    } else if (first_.IsUnknown(id)) {
      std::string surface;
      if (!first_.Decode(std::vector<int>{id}, &surface).ok()) surface.clear();
      token_bytes_.push_back(surface);
    } else if (first_.IsByte(id)) {  // spelled "<0xE2>"
      const int value = std::stoi(piece.substr(3, 2), nullptr, 16);
      byte_ids[static_cast<size_t>(value)] = id;
      token_bytes_.emplace_back(1, static_cast<char>(value));
    } else {
      token_bytes_.push_back(replace_meta_spaces(piece));
      char32_t left = 0;
      for (size_t i = 0; i < piece.size();) {
        const Utf8Char right = decode_utf8(std::string_view(piece).substr(i));
        if (i > 0) adjacent_.insert(pair_key(left, right.code_point));
        if (i > 0 && right.code_point == kMetaSpaceCodePoint && left != kMetaSpaceCodePoint) {
          space_only_in_front_ = false;
        }
        left = right.code_point;
        i += static_cast<size_t>(std::max(right.length, 1));
      }
    }
  }
  // A model that keeps text exactly must keep the one character that its pieces use for the space.
  escapes_meta_space_ = settings_.identity() && !settings_.add_dummy_prefix;
  for (const char byte : kMetaSpace) {
    meta_space_ids_.push_back(byte_ids[static_cast<unsigned char>(byte)]);
    if (meta_space_ids_.back() < 0) escapes_meta_space_ = false;
  }
}

void SentencePieceTokenizer::check_id(int32_t id) const {
  if (id < 0 || id >= vocab_size()) {
    throw Error("token id " + std::to_string(id) + " is outside the vocabulary of " + path_ + " (" +
                std::to_string(vocab_size()) + " tokens)");
  }
}

std::vector<int32_t> SentencePieceTokenizer::encode(std::string_view text) const {
  validate_utf8(text, "the text");
  std::vector<int32_t> ids;
  ids.reserve(text.size() / 4);
  bool at_start = true;
  if (escapes_meta_space_) {
    for (size_t found; (found = text.find(kMetaSpace)) != std::string_view::npos;) {
      encode_chunks(text.substr(0, found), at_start, ids);
      ids.insert(ids.end(), meta_space_ids_.begin(), meta_space_ids_.end());
      text.remove_prefix(found + kMetaSpace.size());
      at_start = false;
    }
  }
  encode_chunks(text, at_start, ids);
  return ids;
}

void SentencePieceTokenizer::encode_chunks(std::string_view text, bool at_start,
                                           std::vector<int32_t>& ids) const {
  while (!text.empty()) {
    const size_t cut = find_cut(text);
    encode_chunk(text.substr(0, cut), at_start, ids);
    // See the constructor: the space at such a cut comes back as the next chunk's dummy prefix.
    const size_t eaten = cut < text.size() && settings_.remove_extra_whitespaces ? 1 : 0;
    text.remove_prefix(cut + eaten);
    at_start = false;
  }
}

void SentencePieceTokenizer::encode_chunk(std::string_view chunk, bool at_start,
                                          std::vector<int32_t>& ids) const {
  std::vector<int> found;
  const auto status = (at_start ? first_ : rest_).Encode(chunk, &found);
  if (!status.ok()) throw Error("SentencePiece could not encode the text: " + status.ToString());
  ids.insert(ids.end(), found.begin(), found.end());
}

size_t SentencePieceTokenizer::find_cut(std::string_view text) const {
  if (text.size() <= chunk_bytes_) return text.size();
  if (settings_.identity()) {
    size_t position = chunk_bytes_;
    while (position > 0 && (static_cast<unsigned char>(text[position]) & 0xC0) == 0x80) --position;
    const size_t forced = position;
    for (; position > 0; position = previous_character(text, position)) {
      if (can_cut_before(text, position)) return position;
    }
    return forced > 0 ? forced : text.size();
  }
  if (!space_only_in_front_ || settings_.whitespace_as_suffix || !settings_.escape_whitespaces) {
    return text.size();
  }
  for (size_t position = chunk_bytes_; position + 1 < text.size(); ++position) {
    if (text[position] == ' ' && is_ascii_alnum(text[position - 1]) &&
        is_ascii_alnum(text[position + 1])) {
      return position;
    }
  }
  return text.size();
}

bool SentencePieceTokenizer::can_cut_before(std::string_view text, size_t position) const {
  const auto code_point = [&](size_t at) {
    const char32_t c = decode_utf8(text.substr(at, 4)).code_point;
    return c == U' ' ? kMetaSpaceCodePoint : c;
  };
  const size_t left = previous_character(text, position);
  return adjacent_.count(pair_key(code_point(left), code_point(position))) == 0;
}

std::string SentencePieceTokenizer::decode(std::span<const int32_t> ids) const {
  for (const int32_t id : ids) check_id(id);
  std::string text;
  const auto status = first_.Decode(std::vector<int>(ids.begin(), ids.end()), &text);
  if (!status.ok()) throw Error("SentencePiece could not decode the tokens: " + status.ToString());
  return text;
}

std::string SentencePieceTokenizer::token_bytes(int32_t id) const {
  check_id(id);
  return token_bytes_[static_cast<size_t>(id)];
}

std::string SentencePieceTokenizer::first_token_bytes(int32_t id) const {
  std::string bytes = token_bytes(id);
  const bool drops_space = settings_.add_dummy_prefix || settings_.remove_extra_whitespaces;
  // Only a piece's U+2581 is the prefix; a byte token or the unknown token's text stays whole.
  if (drops_space && first_.IdToPiece(id).compare(0, kMetaSpace.size(), kMetaSpace) == 0)
    bytes.erase(0, 1);
  return bytes;
}

}  // namespace efla
