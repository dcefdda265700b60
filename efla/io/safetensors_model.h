// The weights of a model: one safetensors file, or several with an index.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "efla/io/safetensors.h"

namespace efla {

/// One file, or a folder with model.safetensors or with model.safetensors.index.json and the files
/// that its weight_map names.
class SafetensorsModel {
 public:
  /// Errors: no weights (a pytorch_model.bin is never opened: reading a pickle can run code), a bad
  /// index, a missing or damaged file, a tensor in two files or not in the promised one.
  static SafetensorsModel open(const std::filesystem::path& file_or_folder);

  std::vector<std::string> names() const;  ///< sorted
  bool contains(const std::string& name) const { return where_.count(name) != 0; }
  const SafetensorsEntry& entry(const std::string& name) const;
  at::Tensor tensor(const std::string& name) const;
  /// The files that hold the tensors, in the order of their names.
  std::vector<std::filesystem::path> files() const;

 private:
  void add_file(const std::filesystem::path& path);
  void add_shards(const std::filesystem::path& index);
  const SafetensorsFile& file_of(const std::string& name) const;

  std::filesystem::path path_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, size_t> where_;  // tensor name -> index into files_
};

/// Writes model.safetensors into `folder`, or, when the tensors have more than `max_shard_bytes`
/// together (0: no limit), model-XXXXX-of-XXXXX.safetensors files of at most that many and their
/// index; a single tensor above the limit gets a file of its own. Each file is replaced atomically,
/// and those of an earlier save that no longer count are removed at the end. Order of the tensors
/// decides the shards.
void save_safetensors_model(const std::filesystem::path& folder,
                            const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                            uint64_t max_shard_bytes = 0);

}  // namespace efla
