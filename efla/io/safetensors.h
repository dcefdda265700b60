// Tensors in safetensors files (https://huggingface.co/docs/safetensors).
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "efla/io/mapped_file.h"
#include "efla/io/safetensors_header.h"

namespace efla {

/// One file, memory-mapped and fully checked when opened.
class SafetensorsFile {
 public:
  /// Errors: missing file, or anything wrong with its header (safetensors_header.h).
  static SafetensorsFile open(const std::filesystem::path& path);

  std::vector<std::string> names() const;  ///< sorted
  bool contains(const std::string& name) const { return header_.tensors.count(name) != 0; }
  const SafetensorsEntry& entry(const std::string& name) const;
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  /// The tensor on the CPU. Its memory is the mapping itself (kept alive by the tensor); writing to
  /// it changes a private copy of the page, never the file. Data that is not aligned to its element
  /// size is copied. Errors: no such name.
  at::Tensor tensor(const std::string& name) const;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  std::shared_ptr<MappedFile> file_;
  SafetensorsHeader header_;
};

/// Writes tensors (any device, any strides; copied to contiguous CPU memory one at a time)
/// atomically. As the Python package does, wider dtypes come first and names are sorted within one,
/// so the same tensors give the same bytes; metadata gets "format": "pt" when it holds no "format".
/// Errors: duplicate or reserved names, dtypes that the format lacks, a full disk.
void save_safetensors(const std::filesystem::path& path,
                      const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                      std::map<std::string, std::string> metadata = {});

}  // namespace efla
