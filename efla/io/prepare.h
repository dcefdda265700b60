// Text files to a folder of token shards.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "efla/io/documents.h"
#include "efla/io/tokenizer.h"

namespace efla {

struct PrepareOptions {
  DocumentFormat format = DocumentFormat::kFile;
  bool add_bos =
      true;  ///< when the tokenizer has one: lets a model predict a document's first token
  bool add_eos = true;  ///< when the tokenizer has one
  int64_t tokens_per_shard = int64_t{1} << 28;
};

struct PrepareResult {
  int64_t shards = 0, documents = 0, tokens = 0, bytes = 0, words = 0;
};

/// Tokenizes the documents of `inputs` into `folder`/00000.tok, 00001.tok, ...; the folder appears,
/// or replaces an older one that holds nothing but shards, only when everything is written. A copy
/// of the tokenizer's model lies beside them as tokenizer.model. `progress` (may be empty) is
/// called after each document with the totals so far.
PrepareResult prepare_shards(const std::vector<std::string>& inputs, const Tokenizer& tokenizer,
                             const std::filesystem::path& folder,
                             const PrepareOptions& options = {},
                             const std::function<void(const PrepareResult&)>& progress = {});

}  // namespace efla
