#include "tests/fuzz/readers.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <vector>

#include "efla/io/atomic_file.h"
#include "efla/io/error.h"
#include "efla/io/safetensors_header.h"
#include "efla/io/token_shard.h"

namespace efla::fuzz {
namespace {

void require(bool promise) {
  if (!promise) std::abort();
}

// A copy on the heap, aligned as a mapping is, so that a sanitizer sees reads outside.
class Copy {
 public:
  explicit Copy(std::span<const uint8_t> bytes)
      : size_(bytes.size()),
        data_(static_cast<std::byte*>(
            std::aligned_alloc(8, std::max<size_t>(8, (size_ + 7) / 8 * 8)))) {
    if (size_ > 0) std::memcpy(data_, bytes.data(), size_);
  }
  ~Copy() { std::free(data_); }
  Copy(const Copy&) = delete;
  Copy& operator=(const Copy&) = delete;
  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  size_t size_;
  std::byte* data_;
};

}  // namespace

bool read_safetensors(std::span<const uint8_t> bytes) {
  const Copy file(bytes);
  SafetensorsHeader header;
  try {
    header = parse_safetensors_header(file.bytes(), "fuzz");
  } catch (const Error&) {
    return false;
  }
  std::vector<std::pair<size_t, size_t>> ranges;
  for (const auto& [name, entry] : header.tensors) {
    require(entry.begin <= entry.end && entry.end <= bytes.size());
    size_t size = safetensors_dtype_size(entry.dtype);
    for (const int64_t extent : entry.shape) {
      require(extent >= 0);
      size *= static_cast<size_t>(extent);
    }
    require(size == entry.end - entry.begin);
    if (size > 0) ranges.emplace_back(entry.begin, entry.end);
  }
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) require(ranges[i - 1].second == ranges[i].first);
  return true;
}

bool read_token_shard(std::span<const uint8_t> bytes) {
  const Copy file(bytes);
  try {
    const ShardView shard(file.bytes(), "fuzz");
    // Not verified yet: every access must stay inside all the same.
    std::vector<int64_t> tokens;
    int64_t sum = 0;
    for (int64_t i = 0; i < shard.document_count(); ++i) {
      const int64_t begin = shard.document_begin(i), end = shard.document_begin(i + 1);
      require(0 <= begin && begin < end && end <= shard.token_count());
      tokens.resize(static_cast<size_t>(end - begin));
      shard.copy_tokens(begin, end - begin, tokens.data());
      for (const int64_t token : tokens) sum += token;
    }
    require(shard.tokenizer_fingerprint().size() <= 32);
    shard.verify("fuzz");
    for (int64_t i = 0; i < shard.token_count(); ++i) {
      require(shard.token(i) >= 0 && shard.token(i) < shard.vocab_size());
      sum -= shard.token(i);
    }
    require(sum == 0);
  } catch (const Error&) {
    return false;
  }
  return true;
}

std::string valid_safetensors() {
  std::string header =
      R"({"__metadata__":{"format":"pt"},)"
      R"("model.embeddings.weight":{"dtype":"F32","shape":[3,2],"data_offsets":[0,24]},)"
      R"("model.norm.weight":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]},)"
      R"("empty":{"dtype":"I64","shape":[0,7],"data_offsets":[24,24]},)"
      R"("mask":{"dtype":"BOOL","shape":[],"data_offsets":[32,33]}})";
  header.append((8 - header.size() % 8) % 8, ' ');
  std::string file(8, '\0');
  for (size_t i = 0; i < 8; ++i) file[i] = static_cast<char>(header.size() >> (8 * i));
  return file + header + std::string(33, '\1');
}

std::string valid_token_shard() {
  const std::filesystem::path path = std::filesystem::temp_directory_path() /
                                     ("efla-fuzz-seed-" + std::to_string(::getpid()) + ".tok");
  ShardWriter writer(path, 1000, "0123456789abcdef");
  writer.append_document(std::vector<int32_t>{1, 2, 3, 999}, 10, 2);
  writer.append_document(std::vector<int32_t>{7}, 1, 1);
  writer.append_document(std::vector<int32_t>{0, 5, 6}, 9, 3);
  writer.finish();
  const std::string bytes = read_file(path);
  std::filesystem::remove(path);
  return bytes;
}

}  // namespace efla::fuzz
