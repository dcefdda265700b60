#include "efla/io/checksum.h"

#include <zlib.h>

#include <cinttypes>
#include <cstdio>

#include "efla/io/atomic_file.h"

namespace efla {

uint32_t crc32_of(const void* data, size_t bytes, uint32_t before) {
  return static_cast<uint32_t>(::crc32_z(before, static_cast<const Bytef*>(data), bytes));
}

std::string fnv1a_hex(std::string_view text) {
  uint64_t hash = 0xCBF29CE484222325u;
  for (const char byte : text) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001B3u;
  char hex[17];
  std::snprintf(hex, sizeof(hex), "%016" PRIx64, hash);
  return hex;
}

FileChecksum checksum_file(const std::filesystem::path& path) {
  FileChecksum sum;
  read_in_pieces(path, [&sum](std::string_view piece) {
    sum.bytes += piece.size();
    sum.crc32 = crc32_of(piece.data(), piece.size(), sum.crc32);
  });
  return sum;
}

}  // namespace efla
