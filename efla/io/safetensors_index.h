// model.safetensors.index.json: which of several safetensors files holds which tensor.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>

namespace efla {

struct SafetensorsIndex {
  std::map<std::string, std::string> weight_map;  ///< tensor name -> file name beside the index
  std::set<std::string> files() const;
};

/// Parses the text of an index. Any bytes give an index whose every file is a plain *.safetensors
/// name beside it, every tensor named once, or an efla::Error that starts with `origin`. Memory is
/// bounded by the text, which may be at most 100 MB.
SafetensorsIndex parse_safetensors_index(std::string_view text, const std::string& origin);

/// The text of an index, as transformers writes it. `total_bytes`: of all tensors together.
std::string safetensors_index_text(const SafetensorsIndex& index, uint64_t total_bytes);

/// "model-00002-of-00005.safetensors" for shard 2 of 5 (counted from 1).
std::string safetensors_shard_name(size_t shard, size_t shards);

}  // namespace efla
