// The header of a safetensors file: parsed and judged without any tensor library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace efla {

struct SafetensorsEntry {
  std::string dtype;  ///< F64, F32, F16, BF16, I64, I32, I16, I8, U8 or BOOL
  std::vector<int64_t> shape;
  size_t begin, end;  ///< byte range within the file
};

struct SafetensorsHeader {
  std::map<std::string, SafetensorsEntry> tensors;
  std::map<std::string, std::string> metadata;  ///< the strings of "__metadata__"
};

/// Bytes per element, 0 for an unknown dtype name.
size_t safetensors_dtype_size(const std::string& dtype);

/// Parses the header of the file whose bytes are `file`. Any bytes give a header whose entries lie
/// inside the file, do not overlap, leave no holes and match dtype and shape, or an efla::Error
/// that starts with `origin`. Memory is bounded by the header's length, which may be at most 100
/// MB.
SafetensorsHeader parse_safetensors_header(std::span<const std::byte> file,
                                           const std::string& origin);

}  // namespace efla
