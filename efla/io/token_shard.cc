#include "efla/io/token_shard.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "efla/io/atomic_file.h"
#include "efla/io/checksum.h"
#include "efla/io/error.h"

namespace efla {
namespace {

constexpr char kMagic[8] = "EFLATOK";
constexpr uint32_t kVersion = 1;
constexpr size_t kHeaderBytes = sizeof(ShardHeader);

uint32_t header_crc(const ShardHeader& header) {
  return crc32_of(&header, offsetof(ShardHeader, header_crc32));
}

size_t padded(size_t bytes) { return (bytes + 7) / 8 * 8; }

[[noreturn]] void refuse(const std::string& origin, const std::string& reason) {
  throw Error(origin + reason + ": run `efla data prepare` again");
}

}  // namespace

ShardWriter::ShardWriter(const std::filesystem::path& path, int64_t vocab_size,
                         const std::string& tokenizer_fingerprint)
    : path_(path.string()) {
  if (vocab_size < 1 || vocab_size > INT32_MAX) {
    throw Error("cannot write " + path_ + ": a vocabulary of " + std::to_string(vocab_size) +
                " tokens is out of range");
  }
  if (tokenizer_fingerprint.size() > sizeof(header_.tokenizer)) {
    throw Error("cannot write " + path_ + ": the tokenizer's fingerprint is too long");
  }
  std::memcpy(header_.magic, kMagic, sizeof(kMagic));
  header_.version = kVersion;
  header_.token_width = vocab_size <= 65536 ? 2 : 4;
  header_.vocab_size = static_cast<uint64_t>(vocab_size);
  tokenizer_fingerprint.copy(header_.tokenizer, sizeof(header_.tokenizer));
  file_ = std::make_unique<AtomicFileWriter>(path);
  const ShardHeader room{};
  file_->write(&room, kHeaderBytes);
}

ShardWriter::~ShardWriter() = default;

void ShardWriter::append_document(std::span<const int32_t> tokens, int64_t bytes, int64_t words) {
  if (tokens.empty()) return;
  const auto limit = static_cast<int32_t>(header_.vocab_size);
  for (const int32_t token : tokens) {
    if (token < 0 || token >= limit) {
      throw Error("cannot write " + path_ + ": token id " + std::to_string(token) +
                  " is outside the vocabulary of " + std::to_string(limit) + " tokens");
    }
  }
  const auto append = [&](const void* data, size_t count) {
    file_->write(data, count);
    header_.payload_crc32 = crc32_of(data, count, header_.payload_crc32);
  };
  if (header_.token_width == 2) {
    const std::vector<uint16_t> narrow(tokens.begin(), tokens.end());
    append(narrow.data(), narrow.size() * sizeof(uint16_t));
  } else {
    append(tokens.data(), tokens.size_bytes());
  }
  documents_.push_back(
      {header_.token_count, static_cast<uint64_t>(bytes), static_cast<uint64_t>(words)});
  header_.token_count += tokens.size();
  header_.source_bytes += static_cast<uint64_t>(bytes);
  header_.source_words += static_cast<uint64_t>(words);
}

void ShardWriter::finish() {
  if (header_.token_count == 0) throw Error("cannot write " + path_ + ": there are no tokens");
  const char zeros[8] = {};
  const size_t padding = padded(file_->size()) - file_->size();
  const size_t table = documents_.size() * sizeof(ShardDocument);
  file_->write(zeros, padding);
  file_->write(documents_.data(), table);
  header_.payload_crc32 = crc32_of(zeros, padding, header_.payload_crc32);
  header_.payload_crc32 = crc32_of(documents_.data(), table, header_.payload_crc32);
  header_.document_count = documents_.size();
  header_.header_crc32 = header_crc(header_);
  file_->write_at(0, &header_, kHeaderBytes);
  file_->commit();
}

ShardView::ShardView(std::span<const std::byte> bytes, const std::string& origin) : bytes_(bytes) {
  if (bytes.size() < sizeof(kMagic) || std::memcmp(bytes.data(), kMagic, sizeof(kMagic)) != 0) {
    refuse(origin, " is not a token shard (it does not begin with EFLATOK)");
  }
  if (bytes.size() < kHeaderBytes) refuse(origin, " is cut short within its header");
  std::memcpy(&header_, bytes.data(), kHeaderBytes);
  if (header_.version != kVersion) {
    refuse(origin, " is a token shard of version " + std::to_string(header_.version) +
                       "; this program reads version " + std::to_string(kVersion));
  }
  if (header_.header_crc32 != header_crc(header_)) {
    refuse(origin, " has a damaged header (its checksum does not match)");
  }
  // The checksum guards against damage, not against a wrong writer: every number is judged too.
  const uint64_t payload = bytes.size() - kHeaderBytes;
  if ((header_.token_width != 2 && header_.token_width != 4) || header_.token_count == 0 ||
      header_.document_count == 0 || header_.vocab_size == 0 || header_.vocab_size > INT32_MAX ||
      (header_.token_width == 2 && header_.vocab_size > 65536)) {
    refuse(origin, " has a header with impossible values");
  }
  if (header_.token_count > payload / header_.token_width ||
      header_.document_count > payload / sizeof(ShardDocument) ||
      padded(header_.token_count * header_.token_width) +
              header_.document_count * sizeof(ShardDocument) !=
          payload) {
    refuse(origin, " is cut short or has extra bytes: " + std::to_string(bytes.size()) +
                       " bytes do not fit " + std::to_string(header_.token_count) + " tokens and " +
                       std::to_string(header_.document_count) + " documents");
  }
  tokens_ = bytes.data() + kHeaderBytes;
  const std::byte* table = tokens_ + padded(header_.token_count * header_.token_width);
  documents_ = {reinterpret_cast<const ShardDocument*>(table), header_.document_count};
  uint64_t previous = 0;
  for (size_t i = 0; i < documents_.size(); ++i) {
    const uint64_t first = documents_[i].first_token;
    if (first >= header_.token_count || (i == 0 ? first != 0 : first <= previous)) {
      refuse(origin, " has a damaged document table at document " + std::to_string(i));
    }
    previous = first;
  }
}

void ShardView::verify(const std::string& origin) const {
  const auto payload = bytes_.subspan(kHeaderBytes);
  if (crc32_of(payload.data(), payload.size()) != header_.payload_crc32) {
    refuse(origin, " is damaged (the checksum of its tokens does not match)");
  }
  for (int64_t i = 0; i < token_count(); ++i) {
    const int32_t id = token(i);
    if (id < 0 || id >= vocab_size()) {
      refuse(origin, " holds token id " + std::to_string(id) + " at position " + std::to_string(i) +
                         ", outside its vocabulary of " + std::to_string(vocab_size()));
    }
  }
}

std::string ShardView::tokenizer_fingerprint() const {
  return {header_.tokenizer, strnlen(header_.tokenizer, sizeof(header_.tokenizer))};
}

void ShardView::copy_tokens(int64_t begin, int64_t count, int64_t* out) const {
  if (token_width() == 2) {
    const auto* from = reinterpret_cast<const uint16_t*>(tokens_) + begin;
    std::copy(from, from + count, out);
  } else {
    const auto* from = reinterpret_cast<const int32_t*>(tokens_) + begin;
    std::copy(from, from + count, out);
  }
}

TokenShard TokenShard::open(const std::filesystem::path& path, bool verify_payload) {
  TokenShard shard;
  shard.path_ = path;
  shard.file_ = MappedFile::open(path);
  const std::span<const std::byte> bytes = shard.file_->bytes();
  if (bytes.empty()) refuse(path.string(), " is empty");
  static_cast<ShardView&>(shard) = ShardView(bytes, path.string());
  if (verify_payload) shard.verify(path.string());
  return shard;
}

}  // namespace efla
