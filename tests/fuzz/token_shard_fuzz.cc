// libFuzzer target: any bytes as a token shard. The header's checksum is made right first, or
// hardly an input would get past it.
#include <zlib.h>

#include <cstring>
#include <vector>

#include "efla/io/token_shard.h"
#include "tests/fuzz/readers.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<uint8_t> bytes(data, data + size);
  efla::fuzz::read_token_shard(bytes);
  if (size < sizeof(efla::ShardHeader)) return 0;
  efla::ShardHeader header;
  std::memcpy(&header, data, sizeof(header));
  header.payload_crc32 =
      static_cast<uint32_t>(::crc32_z(0, data + sizeof(header), size - sizeof(header)));
  header.header_crc32 = static_cast<uint32_t>(::crc32_z(0, reinterpret_cast<const Bytef*>(&header),
                                                        offsetof(efla::ShardHeader, header_crc32)));
  std::memcpy(bytes.data(), &header, sizeof(header));
  efla::fuzz::read_token_shard(bytes);
  return 0;
}
