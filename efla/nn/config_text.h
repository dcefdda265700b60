// The text of a config.json that comes from anywhere.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace efla {

/// Parses a config.json. Python writes Infinity and NaN, which JSON lacks; they are read as
/// transformers spells them, {"__float__": "Infinity"}. Errors (in one sentence, beginning with
/// `where`): more than 1 MB, nested more than 32 deep, not JSON, a key that comes twice or is no
/// name (longer than 100 bytes, control characters).
nlohmann::json parse_config_text(std::string_view text, const std::string& where);

/// A value for a message: on one line in ASCII, cut after 60 characters.
std::string shown_json(const nlohmann::json& value);

}  // namespace efla
