// Checksums that notice damage and tell contents apart; no guard against forgery.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace efla {

/// CRC-32 as in zlib; `before`: the CRC of the bytes in front of these.
uint32_t crc32_of(const void* data, size_t bytes, uint32_t before = 0);

/// FNV-1a of the text, 64 bits, as 16 hex digits.
std::string fnv1a_hex(std::string_view text);

struct FileChecksum {
  uint64_t bytes = 0;
  uint32_t crc32 = 0;
  bool operator==(const FileChecksum&) const = default;
};

/// Reads the whole file (by read(), so that a failing disk is an Error and not a signal). Throws
/// Error naming the file when that fails.
FileChecksum checksum_file(const std::filesystem::path& path);

}  // namespace efla
