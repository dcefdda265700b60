#include "efla/nn/presets.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <iterator>

#include "efla/io/error.h"

namespace efla {

namespace {

// What a size fixes in every family. Below 340m the embeddings are tied: a head of its own would be
// a third of the model.
struct Size {
  const char* name;
  int64_t hidden;
  bool tied;
  int64_t delta_layers, delta_heads;                  // efla, delta_net: heads of hidden / heads
  int64_t gated_layers, gated_heads, gated_head_dim;  // values are twice as wide as keys
  int64_t mamba2_layers;                              // heads of 64, state 128
  int64_t softmax_layers, softmax_heads;
};

// 340m and 1.3b are the models of the literature (delta_net, mamba2, transformer: as flame has
// them; gated_deltanet-1.3b likewise, while gated_deltanet-340m has 3 heads, since with flame's 6
// it would be a model of 512 million).
constexpr std::array<Size, 5> kSizes = {{
    {"10m", 192, true, 9, 3, 8, 2, 64, 14, 9, 3},
    {"30m", 384, true, 10, 3, 9, 2, 128, 18, 10, 6},
    {"100m", 640, true, 16, 5, 13, 4, 128, 30, 16, 10},
    {"340m", 1024, false, 24, 8, 21, 3, 256, 48, 24, 16},
    {"1.3b", 2048, false, 24, 16, 21, 6, 256, 48, 24, 32},
}};

ModelConfig sized(const std::string& model_type, const Size& size) {
  ModelConfig c = ModelConfig::of_type(model_type);
  c.hidden_size = size.hidden;
  c.tie_word_embeddings = size.tied;
  if (model_type == "mamba2") {
    c.num_hidden_layers = size.mamba2_layers;
  } else if (model_type == "transformer") {
    c.num_hidden_layers = size.softmax_layers;
    c.attn->num_heads = size.softmax_heads;
  } else if (c.is_gated()) {
    c.num_hidden_layers = size.gated_layers;
    c.num_heads = size.gated_heads;
    c.head_dim = size.gated_head_dim;
  } else {
    c.num_hidden_layers = size.delta_layers;
    c.num_heads = size.delta_heads;
  }
  return c;
}

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

}  // namespace

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const std::string& type : model_types()) {
    for (const Size& size : kSizes) names.push_back(type + "-" + size.name);
  }
  return names;
}

bool is_preset(const std::string& name) {
  const std::vector<std::string> names = preset_names();
  return std::find(names.begin(), names.end(), lower(name)) != names.end();
}

ModelConfig preset(const std::string& name, const std::string& where) {
  const std::string wanted = lower(name);
  for (const std::string& type : model_types()) {
    for (const Size& size : kSizes) {
      if (wanted == type + "-" + size.name) return sized(type, size);
    }
  }
  std::vector<std::string> sizes;
  sizes.reserve(std::size(kSizes));
  for (const Size& size : kSizes) sizes.emplace_back(size.name);
  throw UsageError(
      fmt::format("{}: no preset is called \"{}\"; a name is FAMILY-SIZE with one of the families "
                  "{} and one of the sizes {}",
                  where, name, fmt::join(model_types(), ", "), fmt::join(sizes, ", ")));
}

std::optional<int64_t> size_in_name(const std::string& name) {
  const std::string text = lower(name);
  if (text.empty() || (text.back() != 'm' && text.back() != 'b')) return std::nullopt;
  const size_t end = text.size() - 1;
  size_t begin = end;
  const auto belongs = [](char c) {
    return std::isdigit(static_cast<unsigned char>(c)) || c == '.';
  };
  while (begin > 0 && belongs(text[begin - 1])) --begin;
  if (begin == end || !std::isdigit(static_cast<unsigned char>(text[begin]))) return std::nullopt;
  if (begin > 0 && std::isalnum(static_cast<unsigned char>(text[begin - 1]))) return std::nullopt;
  const double number = std::strtod(text.substr(begin, end - begin).c_str(), nullptr);
  const double size = number * (text.back() == 'm' ? 1e6 : 1e9);
  if (!(size > 0 && size < 1e15)) return std::nullopt;
  return std::llround(size);
}

int64_t counted_size(const ModelConfig& config) {
  const ParameterCount count = config.parameter_count();
  return count.embedding + count.other;
}

}  // namespace efla
