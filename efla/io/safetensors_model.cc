#include "efla/io/safetensors_model.h"

#include <torch/torch.h>

#include <fmt/format.h>

#include <set>
#include <system_error>

#include "efla/io/atomic_file.h"
#include "efla/io/error.h"
#include "efla/io/safetensors_index.h"

namespace efla {
namespace {

namespace fs = std::filesystem;
using NamedTensor = std::pair<std::string, at::Tensor>;

constexpr const char* kSingleName = "model.safetensors";
constexpr const char* kIndexName = "model.safetensors.index.json";

[[noreturn]] void refuse_missing(const fs::path& folder) {
  for (const char* name : {"pytorch_model.bin", "pytorch_model.bin.index.json"}) {
    if (!path_exists(folder / name)) continue;
    throw Error(fmt::format(
        "{}: is a Python pickle, which can run any code when it is read and is never opened here; "
        "make {} of it once, in its folder, with: python3 -c 'import torch, safetensors.torch as "
        "s; w = torch.load(\"pytorch_model.bin\", map_location=\"cpu\", weights_only=True); "
        "s.save_file({{k: v.clone().contiguous() for k, v in w.items()}}, \"{}\")'",
        (folder / name).string(), kSingleName, kSingleName));
  }
  throw Error(fmt::format("no weights in {}: it has neither {} nor {}", folder.string(),
                          kSingleName, kIndexName));
}

// Consecutive tensors into shards of at most `limit` bytes.
std::vector<std::vector<NamedTensor>> split(const std::vector<NamedTensor>& tensors,
                                            uint64_t limit) {
  std::vector<std::vector<NamedTensor>> shards(1);
  uint64_t used = 0;
  for (const NamedTensor& named : tensors) {
    const uint64_t bytes = named.second.nbytes();
    if (!shards.back().empty() && bytes > limit - std::min(limit, used)) {
      shards.emplace_back();
      used = 0;
    }
    shards.back().push_back(named);
    used += bytes;
  }
  return shards;
}

// What an earlier save left under names that would be read, or would lie about, beside `kept`.
void remove_others(const fs::path& folder, const std::set<std::string>& kept) {
  for (const fs::path& path : folder_entries(folder)) {
    const std::string name = path.filename().string();
    const bool weights = name == kSingleName || name == kIndexName ||
                         (name.starts_with("model-") && name.ends_with(".safetensors"));
    if (!weights || kept.count(name)) continue;
    std::error_code error;
    fs::remove(path, error);
    if (error) {
      throw Error(fmt::format("cannot remove {}, a file of an earlier save: {}; remove it by hand",
                              path.string(), error.message()));
    }
  }
}

}  // namespace

SafetensorsModel SafetensorsModel::open(const fs::path& file_or_folder) {
  SafetensorsModel model;
  model.path_ = file_or_folder;
  if (!is_folder(file_or_folder)) {
    model.add_file(file_or_folder);
  } else if (path_exists(file_or_folder / kSingleName)) {
    model.add_file(file_or_folder / kSingleName);
  } else if (path_exists(file_or_folder / kIndexName)) {
    model.add_shards(file_or_folder / kIndexName);
  } else {
    refuse_missing(file_or_folder);
  }
  return model;
}

void SafetensorsModel::add_file(const fs::path& path) {
  files_.push_back(SafetensorsFile::open(path));
  for (const std::string& name : files_.back().names()) {
    const auto [found, fresh] = where_.emplace(name, files_.size() - 1);
    if (!fresh) {
      throw Error(fmt::format("{} holds tensor \"{}\" that {} holds too; fetch both again",
                              path.string(), name, files_[found->second].path().string()));
    }
  }
}

void SafetensorsModel::add_shards(const fs::path& index_path) {
  const SafetensorsIndex index =
      parse_safetensors_index(read_file(index_path), index_path.string());
  const fs::path folder = index_path.parent_path();
  for (const std::string& file : index.files()) {
    if (!path_exists(folder / file)) {
      throw Error(fmt::format("{} is missing, and {} names it; fetch it too",
                              (folder / file).string(), index_path.filename().string()));
    }
    add_file(folder / file);
  }
  for (const auto& [name, file] : index.weight_map) {
    const auto found = where_.find(name);
    if (found == where_.end() || files_[found->second].path() != folder / file) {
      throw Error(fmt::format("{} lacks tensor \"{}\" that {} promises; fetch both again",
                              (folder / file).string(), name, index_path.filename().string()));
    }
  }
}

std::vector<std::string> SafetensorsModel::names() const {
  std::vector<std::string> names;
  names.reserve(where_.size());
  for (const auto& [name, file] : where_) names.push_back(name);
  return names;
}

const SafetensorsFile& SafetensorsModel::file_of(const std::string& name) const {
  const auto found = where_.find(name);
  if (found == where_.end()) throw Error(path_.string() + " has no tensor \"" + name + "\"");
  return files_[found->second];
}

const SafetensorsEntry& SafetensorsModel::entry(const std::string& name) const {
  return file_of(name).entry(name);
}

at::Tensor SafetensorsModel::tensor(const std::string& name) const {
  return file_of(name).tensor(name);
}

std::vector<fs::path> SafetensorsModel::files() const {
  std::vector<fs::path> paths;
  paths.reserve(files_.size());
  for (const SafetensorsFile& file : files_) paths.push_back(file.path());
  return paths;
}

void save_safetensors_model(const fs::path& folder, const std::vector<NamedTensor>& tensors,
                            uint64_t max_shard_bytes) {
  uint64_t total = 0;
  for (const auto& [name, tensor] : tensors) total += tensor.nbytes();
  std::set<std::string> kept;
  if (max_shard_bytes == 0 || total <= max_shard_bytes) {
    save_safetensors(folder / kSingleName, tensors);
    kept.insert(kSingleName);
  } else {
    const std::vector<std::vector<NamedTensor>> shards = split(tensors, max_shard_bytes);
    SafetensorsIndex index;
    for (size_t i = 0; i < shards.size(); ++i) {
      const std::string file = safetensors_shard_name(i + 1, shards.size());
      save_safetensors(folder / file, shards[i]);
      for (const auto& [name, tensor] : shards[i]) index.weight_map[name] = file;
      kept.insert(file);
    }
    write_file_atomically(folder / kIndexName, safetensors_index_text(index, total));
    kept.insert(kIndexName);
  }
  remove_others(folder, kept);
}

}  // namespace efla
