// Training batches and held-out documents from a folder of token shards.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "efla/io/token_shard.h"

namespace efla {

/// Where a training run stands in its data; the next batch follows from this, the shards, seed and
/// length alone.
struct DataPosition {
  int64_t epoch = 0;
  int64_t row = 0;  ///< rows of this epoch that were handed out

  bool operator==(const DataPosition&) const = default;
  nlohmann::json to_json() const;
  /// Errors: missing, negative or wrong-typed fields.
  static DataPosition from_json(const nlohmann::json& json);
};

/// Packed sequences: one row that holds N tokens.
struct Batch {
  at::Tensor input_ids;  ///< [1, N] int64
  at::Tensor
      targets;  ///< [1, N] int64: the next token of the same document, -100 where there is none
  at::Tensor cu_seqlens;     ///< [sequences + 1] int32: 0, ..., N; state starts afresh at each
  int64_t target_count = 0;  ///< targets that are not -100
};

/// What one document holds.
struct DocumentInfo {
  int64_t tokens, bytes, words;
};

/// All shards "*.tok" of a folder (sorted by name) as one stream of documents.
///
/// Training order of an epoch: the documents are shuffled, laid end to end, cut into rows of
/// `length` tokens, and the rows shuffled; where the first row begins is drawn afresh each epoch,
/// so that cuts fall elsewhere. Less than two rows' worth of tokens per epoch are left over at the
/// ends. Sequences begin where a row or a document begins. The order depends on documents, seed,
/// epoch and length, not on how documents are spread over files, nor on the batch size.
class TokenDataset {
 public:
  struct Options {
    int64_t length = 1024;  ///< tokens per row
    uint64_t seed = 42;
    bool verify_payload = true;  ///< read everything once and check it
    std::string tokenizer;       ///< fingerprint that the shards must carry; empty: any
    int64_t vocab_size = 0;      ///< of the model: the shards' vocabulary may not be larger; 0: any
  };
  /// `path`: a folder of shards, or one shard file. Errors: no shards, shards that disagree on
  /// tokenizer or vocabulary (both are named), fewer tokens than one row.
  TokenDataset(const std::filesystem::path& path, const Options& options);

  /// `rows` rows of `length` tokens as one packed row; advances position(). Goes on into the next
  /// epoch when one ends.
  Batch next_batch(int64_t rows);
  /// Targets in the next `rows` rows, which stay to be handed out.
  int64_t count_targets(int64_t rows);
  const DataPosition& position() const { return position_; }
  void seek(const DataPosition& position);
  int64_t rows_per_epoch() const { return rows_per_epoch_; }

  /// Unshuffled rows for held-out loss: row i holds tokens [i * length, (i+1) * length) of the
  /// stream in file order, the last one may be shorter. Does not touch position(). Asks for rows
  /// [first, first + rows), clipped to those there are.
  Batch sequential_batch(int64_t first, int64_t rows) const;
  int64_t sequential_rows() const;

  /// Documents in file order, for evaluation that carries the state through a document.
  int64_t document_count() const { return static_cast<int64_t>(begins_.size()) - 1; }
  DocumentInfo document(int64_t i) const;
  /// Tokens [begin, end) of document i as int64 [end - begin]; end = -1: to its end.
  at::Tensor document_tokens(int64_t i, int64_t begin = 0, int64_t end = -1) const;

  int64_t token_count() const { return begins_.back(); }
  int64_t source_bytes() const;
  int64_t source_words() const;
  int64_t vocab_size() const { return shards_.front().vocab_size(); }
  std::string tokenizer_fingerprint() const { return shards_.front().tokenizer_fingerprint(); }
  const Options& options() const { return options_; }
  /// Shard file names with token counts and checksums, to be recorded in a run's log or checkpoint
  /// and compared on resume.
  nlohmann::json describe() const;

 private:
  void build_epoch(int64_t epoch);
  int64_t take_row(DataPosition& position);
  void copy_tokens(int64_t document, int64_t offset, int64_t count, int64_t* out) const;
  /// Appends stream positions [begin, begin + count) of `order` (document indices with their
  /// `starts` in the stream) to a batch under construction.
  struct Assembly;
  void append_row(const std::vector<int64_t>& order, const std::vector<int64_t>& starts,
                  int64_t begin, int64_t count, Assembly& assembly) const;

  Options options_;
  std::vector<TokenShard> shards_;
  std::vector<int64_t> shard_first_document_;  // per shard: number of its first document
  std::vector<int64_t> begins_;                // [documents + 1] token offsets in file order
  int64_t rows_per_epoch_ = 0;
  DataPosition position_;

  // The order of epoch built_epoch_.
  int64_t built_epoch_ = -1;
  int64_t phase_ = 0;                    // stream position of row 0
  std::vector<int64_t> document_order_;  // shuffled document indices
  std::vector<int64_t> stream_starts_;   // [documents + 1] where each lies in the stream
  std::vector<uint32_t> row_order_;
};

}  // namespace efla
