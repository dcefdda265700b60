// Token shards: files of token ids with document boundaries, read through a memory map.
//
// Layout (little-endian; every section starts at a multiple of 8 bytes):
//   0    header, 256 bytes (struct ShardHeader)
//   256  tokens, token_count x token_width bytes, zero-padded to 8
//   ...  document table, document_count x 24 bytes (struct ShardDocument)
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "efla/io/mapped_file.h"

namespace efla {

class AtomicFileWriter;

struct ShardHeader {
  char magic[8];         ///< "EFLATOK" and a zero
  uint32_t version;      ///< 1
  uint32_t token_width;  ///< 2 or 4 bytes
  uint64_t token_count;
  uint64_t document_count;
  uint64_t vocab_size;
  uint64_t source_bytes;   ///< bytes of text that the tokens stand for
  uint64_t source_words;   ///< whitespace-separated words of that text
  char tokenizer[32];      ///< Tokenizer::fingerprint(), zero-padded
  uint32_t payload_crc32;  ///< of everything after the header
  uint32_t reserved[40];   ///< zeros
  uint32_t header_crc32;   ///< of the header before this field
};
static_assert(sizeof(ShardHeader) == 256);

/// One row of the document table.
struct ShardDocument {
  uint64_t first_token;  ///< within the shard; the documents follow each other without gaps
  uint64_t bytes;        ///< of its text
  uint64_t words;        ///< of its text
};
static_assert(sizeof(ShardDocument) == 24);

/// Writes one shard. Nothing is visible under `path` until finish().
class ShardWriter {
 public:
  /// Token width is 2 bytes for vocabularies of up to 65,536 and 4 bytes above.
  ShardWriter(const std::filesystem::path& path, int64_t vocab_size,
              const std::string& tokenizer_fingerprint);
  ~ShardWriter();

  /// `bytes` and `words` describe the text that the tokens stand for (bos and eos stand for none).
  /// Errors: a token outside the vocabulary, a full disk.
  void append_document(std::span<const int32_t> tokens, int64_t bytes, int64_t words);
  int64_t token_count() const { return static_cast<int64_t>(header_.token_count); }
  int64_t document_count() const { return static_cast<int64_t>(documents_.size()); }
  /// Writes table and header and gives the file its name. At least one token must have been
  /// appended.
  void finish();

 private:
  std::string path_;
  ShardHeader header_{};
  std::vector<ShardDocument> documents_;
  std::unique_ptr<AtomicFileWriter> file_;
};

/// A checked view of a shard's bytes; `bytes` must outlive it and start at a multiple of 8.
/// The single place where shard bytes are judged: any bytes give a view or an efla::Error that
/// starts with `origin`.
class ShardView {
 public:
  ShardView() = default;
  /// Checks magic, version, header checksum, sizes and the document table.
  ShardView(std::span<const std::byte> bytes, const std::string& origin);
  /// Checks the payload checksum and that every token is below vocab_size (reads the whole file).
  void verify(const std::string& origin) const;

  int64_t token_count() const { return static_cast<int64_t>(header_.token_count); }
  int64_t document_count() const { return static_cast<int64_t>(header_.document_count); }
  int64_t vocab_size() const { return static_cast<int64_t>(header_.vocab_size); }
  int64_t source_bytes() const { return static_cast<int64_t>(header_.source_bytes); }
  int64_t source_words() const { return static_cast<int64_t>(header_.source_words); }
  uint32_t payload_crc32() const { return header_.payload_crc32; }
  int token_width() const { return static_cast<int>(header_.token_width); }
  std::string tokenizer_fingerprint() const;
  std::span<const ShardDocument> documents() const { return documents_; }
  /// Tokens of document i: [document_begin(i), document_begin(i + 1)).
  int64_t document_begin(int64_t i) const {
    return i < document_count()
               ? static_cast<int64_t>(documents_[static_cast<size_t>(i)].first_token)
               : token_count();
  }
  int32_t token(int64_t i) const {
    return token_width() == 2 ? static_cast<int32_t>(reinterpret_cast<const uint16_t*>(tokens_)[i])
                              : reinterpret_cast<const int32_t*>(tokens_)[i];
  }
  /// out[j] = token(begin + j) for j < count.
  void copy_tokens(int64_t begin, int64_t count, int64_t* out) const;

 private:
  ShardHeader header_{};
  std::span<const std::byte> bytes_;
  const std::byte* tokens_ = nullptr;
  std::span<const ShardDocument> documents_;
};

/// A shard file, memory-mapped.
class TokenShard : public ShardView {
 public:
  /// Opens and checks the header and sizes; with `verify_payload` also checksum and token range
  /// (reads the whole file).
  static TokenShard open(const std::filesystem::path& path, bool verify_payload = false);
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  std::shared_ptr<MappedFile> file_;
};

}  // namespace efla
