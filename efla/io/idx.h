// IDX files, the format of MNIST: two zero bytes, the element type, the number of dimensions, the
// sizes as big-endian 32-bit numbers, then the elements.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

namespace efla {

struct IdxArray {
  std::vector<int64_t> sizes;
  std::vector<uint8_t> values;  ///< row-major, as many as the product of `sizes`
};

/// Reads an IDX file of unsigned bytes, gzip-compressed or plain (the content tells, not the name).
/// Errors name the file and what is wrong with it: missing, not IDX, elements of another type,
/// shorter or longer than its header says, damaged compression.
IdxArray read_idx(const std::filesystem::path& path);

}  // namespace efla
