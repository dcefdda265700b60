#include "efla/io/sentencepiece_model.h"

#include <cstdint>

namespace sentencepiece::logging {
void SetMinLogLevel(int level);  // exported by the library, declared in no installed header
}

namespace efla {
namespace {

// Walks the fields of one protocol buffer message (varint, fixed and length-delimited wire types).
class FieldReader {
 public:
  explicit FieldReader(std::string_view bytes) : bytes_(bytes) {}

  // False at the end or at malformed bytes (then ok() is false).
  bool next() {
    if (bytes_.empty() || !ok_) return false;
    const uint64_t key = varint();
    number = key >> 3;
    switch (key & 7) {
      case 0:
        value = varint();
        break;
      case 1:
        take(8);
        break;
      case 2:
        body = take(varint());
        break;
      case 5:
        take(4);
        break;
      default:
        ok_ = false;
    }
    return ok_;
  }
  bool ok() const { return ok_; }

  uint64_t number = 0, value = 0;
  std::string_view body;

 private:
  uint64_t varint() {
    uint64_t result = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      if (bytes_.empty()) break;
      const auto byte = static_cast<unsigned char>(bytes_.front());
      bytes_.remove_prefix(1);
      result |= static_cast<uint64_t>(byte & 0x7F) << shift;
      if (byte < 0x80) return result;
    }
    ok_ = false;
    return 0;
  }
  std::string_view take(uint64_t count) {
    if (count > bytes_.size()) {
      ok_ = false;
      return {};
    }
    const std::string_view taken = bytes_.substr(0, count);
    bytes_.remove_prefix(count);
    return taken;
  }

  std::string_view bytes_;
  bool ok_ = true;
};

}  // namespace

bool read_sentencepiece_settings(std::string_view model, SentencePieceSettings& settings) {
  FieldReader fields(model);
  while (fields.next()) {
    if (fields.number == 2) {
      FieldReader trainer(fields.body);
      while (trainer.next()) {
        if (trainer.number == 24) settings.whitespace_as_suffix = trainer.value != 0;
        if (trainer.number == 35) settings.byte_fallback = trainer.value != 0;
      }
      if (!trainer.ok()) return false;
    } else if (fields.number == 3) {
      FieldReader normalizer(fields.body);
      while (normalizer.next()) {
        if (normalizer.number == 2) settings.has_character_map = !normalizer.body.empty();
        if (normalizer.number == 3) settings.add_dummy_prefix = normalizer.value != 0;
        if (normalizer.number == 4) settings.remove_extra_whitespaces = normalizer.value != 0;
        if (normalizer.number == 5) settings.escape_whitespaces = normalizer.value != 0;
      }
      if (!normalizer.ok()) return false;
    }
  }
  return fields.ok();
}

std::string with_dummy_prefix(std::string model, bool add_dummy_prefix) {
  // Field 3, length 2: { field 3: the flag }.
  const char extra[] = {0x1A, 0x02, 0x18, static_cast<char>(add_dummy_prefix ? 1 : 0)};
  return model.append(extra, sizeof(extra));
}

void silence_sentencepiece() { sentencepiece::logging::SetMinLogLevel(4); }

}  // namespace efla
