// What perplexity is measured on: documents as tokens, with the words and bytes of their text.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "efla/io/documents.h"
#include "efla/io/tokenizer.h"

namespace efla {

/// One document to be scored.
struct EvalDocument {
  at::Tensor tokens;  // [n] int64, of the text alone: no BOS before, no EOS after
  int64_t words = 0;  // lm_eval_words() of the original text
  int64_t bytes = 0;  // of the original text
};

/// The documents of an evaluation and the token that stands before each (BOS, else EOS, else none).
struct EvalData {
  std::vector<EvalDocument> documents;
  std::optional<int64_t> prefix_token;

  int64_t token_count() const;
  /// Cuts the documents off after `tokens` in all; words and bytes of the one that is cut are those
  /// of its remaining tokens' text. Throws UsageError when there are not that many.
  void limit(int64_t tokens, const Tokenizer& tokenizer);
};

/// The number of words as lm-evaluation-harness counts them: the pieces of re.split(r"\s+", text).
/// White space at either end yields an empty piece, which counts; so does the empty text.
int64_t lm_eval_words(std::string_view text);

/// Documents of text files (.gz and .xz too). Errors as for_each_document().
EvalData eval_data_from_text(const std::vector<std::string>& paths, DocumentFormat format,
                             const Tokenizer& tokenizer);

/// Documents of token shards (a folder or one file), verified in full; a BOS at the beginning and
/// an EOS at the end of a document are taken off, so that shards and their source text give the
/// same numbers. Throws Error when the shards were made with another tokenizer.
EvalData eval_data_from_shards(const std::string& path, const Tokenizer& tokenizer);

}  // namespace efla
