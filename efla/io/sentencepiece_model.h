// What a serialized SentencePiece model says about white space and normalisation.
#pragma once

#include <string>
#include <string_view>

namespace efla {

/// The settings that decide where text may be cut before encoding. The library does not
/// show them, so they are read from the model's protocol buffer (sentencepiece_model.proto, fields
/// trainer_spec = 2 and normalizer_spec = 3).
struct SentencePieceSettings {
  bool add_dummy_prefix = true;
  bool remove_extra_whitespaces = true;
  bool escape_whitespaces = true;
  bool whitespace_as_suffix = false;
  bool byte_fallback = false;
  bool has_character_map = false;  ///< a normalisation other than identity

  /// Text reaches the model as it is, but for the dummy prefix.
  bool identity() const {
    return !has_character_map && !remove_extra_whitespaces && escape_whitespaces &&
           !whitespace_as_suffix;
  }
};

/// Reads the settings; false when the bytes are not a well-formed protocol buffer.
bool read_sentencepiece_settings(std::string_view model, SentencePieceSettings& settings);

/// The model with another add_dummy_prefix: protocol buffers merge a repeated sub-message, so
/// appending is enough.
std::string with_dummy_prefix(std::string model, bool add_dummy_prefix);

/// Keeps the library from writing to stderr; its errors come back as statuses.
void silence_sentencepiece();

}  // namespace efla
