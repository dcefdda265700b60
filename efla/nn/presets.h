// Model sizes that mean what they say: FAMILY-SIZE for every model_type and the sizes 10m, 30m,
// 100m, 340m and 1.3b, with a vocabulary of 32,000. docs/models.md lists the exact counts.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "efla/nn/config.h"

namespace efla {

/// "efla-10m", ..., "transformer-1.3b".
std::vector<std::string> preset_names();

bool is_preset(const std::string& name);

/// The model of that name. Throws UsageError listing the names if there is none; `where` leads the
/// message.
ModelConfig preset(const std::string& name, const std::string& where = "preset");

/// The number a size name stands for: "340m" or "delta_net-340M" -> 340,000,000, "1.3b" ->
/// 1,300,000,000; none if the name does not end in a size.
std::optional<int64_t> size_in_name(const std::string& name);

/// What the size of a name counts, as the literature does: all parameters but the output head, so
/// that a model has one size whether its embeddings are tied or not.
int64_t counted_size(const ModelConfig& config);

}  // namespace efla
