// Thousands of damaged files, the same every time, through what the fuzzers run: for machines
// without clang.
#include <gtest/gtest.h>
#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "efla/io/random.h"
#include "efla/io/token_shard.h"
#include "tests/fuzz/readers.h"

namespace efla::fuzz {
namespace {

std::span<const uint8_t> bytes_of(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// One to four edits: a flipped bit, another byte, a copied, erased or inserted stretch, a cut, a
// digit.
std::string mutate(std::string bytes, SplitMix64& random) {
  for (uint64_t edits = 1 + random.below(4); edits > 0 && !bytes.empty(); --edits) {
    const size_t at = random.below(bytes.size());
    const size_t length = 1 + random.below(std::min<size_t>(16, bytes.size() - at));
    switch (random.below(7)) {
      case 0:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << random.below(8)));
        break;
      case 1:
        bytes[at] = static_cast<char>(random.below(256));
        break;
      case 2:
        bytes.insert(random.below(bytes.size()), bytes.substr(at, length));
        break;
      case 3:
        bytes.erase(at, length);
        break;
      case 4:
        bytes.insert(at, length, static_cast<char>(random.below(256)));
        break;
      case 5:
        bytes.resize(at);
        break;
      default: {  // numbers in JSON are where readers go wrong
        const size_t digit = bytes.find_first_of("0123456789", at);
        if (digit != std::string::npos) bytes[digit] = static_cast<char>('0' + random.below(10));
      }
    }
  }
  return bytes;
}

int count_accepted(const std::string& valid, const std::function<bool(const std::string&)>& read,
                   int mutations) {
  SplitMix64 random(20250101);
  int accepted = 0;
  for (int i = 0; i < mutations; ++i) accepted += read(mutate(valid, random)) ? 1 : 0;
  return accepted;
}

TEST(Mutations, Safetensors) {
  const std::string valid = valid_safetensors();
  ASSERT_TRUE(read_safetensors(bytes_of(valid)));
  const int accepted = count_accepted(
      valid, [](const std::string& bytes) { return read_safetensors(bytes_of(bytes)); }, 20000);
  // Some edits fall into names or data and change nothing that the format forbids; most must not
  // pass.
  EXPECT_GT(accepted, 0);
  EXPECT_LT(accepted, 10000);
}

TEST(Mutations, SafetensorsIndexes) {
  const std::string valid = valid_safetensors_index();
  ASSERT_TRUE(read_safetensors_index(bytes_of(valid)));
  const int accepted = count_accepted(
      valid, [](const std::string& bytes) { return read_safetensors_index(bytes_of(bytes)); },
      20000);
  EXPECT_GT(accepted, 0);
  EXPECT_LT(accepted, 15000);
}

TEST(Mutations, Configs) {
  for (const std::string& valid : valid_configs()) {
    ASSERT_TRUE(read_config(bytes_of(valid))) << valid;
    const int accepted = count_accepted(
        valid, [](const std::string& bytes) { return read_config(bytes_of(bytes)); }, 5000);
    EXPECT_GT(accepted, 0) << valid;
    EXPECT_LT(accepted, 4000) << valid;
  }
}

TEST(Mutations, TokenShards) {
  const std::string valid = valid_token_shard();
  ASSERT_TRUE(read_token_shard(bytes_of(valid)));
  const int accepted = count_accepted(
      valid,
      [&](const std::string& bytes) { return bytes != valid && read_token_shard(bytes_of(bytes)); },
      20000);
  EXPECT_EQ(accepted, 0);  // checksums cover every byte
}

TEST(Mutations, TokenShardsUnderRightChecksums) {
  const auto read = [](std::string bytes) {
    if (bytes.size() < sizeof(ShardHeader)) return false;
    ShardHeader header;
    std::memcpy(&header, bytes.data(), sizeof(header));
    const auto* start = reinterpret_cast<const Bytef*>(bytes.data());
    header.payload_crc32 =
        static_cast<uint32_t>(::crc32_z(0, start + sizeof(header), bytes.size() - sizeof(header)));
    header.header_crc32 = static_cast<uint32_t>(
        ::crc32_z(0, reinterpret_cast<const Bytef*>(&header), offsetof(ShardHeader, header_crc32)));
    std::memcpy(bytes.data(), &header, sizeof(header));
    return read_token_shard(bytes_of(bytes));
  };
  EXPECT_GT(count_accepted(valid_token_shard(), read, 20000), 0);  // and nothing aborts
}

}  // namespace
}  // namespace efla::fuzz
