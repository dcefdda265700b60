// A file mapped into memory.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>

namespace efla {

/// Maps a whole file privately: pages come from the file as they are touched; writing to them
/// changes this process's copy only, never the file. The mapping lives as long as the object.
class MappedFile {
 public:
  /// Errors: missing, a folder, unreadable. An empty file gives an empty span.
  static std::shared_ptr<MappedFile> open(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<std::byte> bytes() { return {data_, size_}; }
  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  MappedFile(std::byte* data, size_t size) : data_(data), size_(size) {}
  std::byte* data_;
  size_t size_;
};

}  // namespace efla
