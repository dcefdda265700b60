#include "efla/eval/text_documents.h"

#include <fmt/format.h>

#include <algorithm>

#include "efla/io/dataset.h"
#include "efla/io/error.h"
#include "efla/io/utf8.h"

namespace efla {
namespace {

std::optional<int64_t> prefix_token(const Tokenizer& tokenizer) {
  if (tokenizer.bos_id() >= 0) return tokenizer.bos_id();
  if (tokenizer.eos_id() >= 0) return tokenizer.eos_id();
  return std::nullopt;
}

at::Tensor to_tensor(const std::vector<int32_t>& ids) {
  at::Tensor tokens = at::empty({static_cast<int64_t>(ids.size())}, at::kLong);
  std::copy(ids.begin(), ids.end(), tokens.mutable_data_ptr<int64_t>());
  return tokens;
}

std::string decode(const Tokenizer& tokenizer, const at::Tensor& tokens) {
  const int64_t* ids = tokens.const_data_ptr<int64_t>();
  return tokenizer.decode(std::vector<int32_t>(ids, ids + tokens.numel()));
}

// The empty pieces that re.split yields: one for each end of the text that is white space.
int64_t empty_pieces(std::string_view text) {
  if (text.empty()) return 1;
  size_t last = text.size() - 1;
  while (last > 0 && (static_cast<unsigned char>(text[last]) & 0xC0) == 0x80) --last;
  const size_t first_length = static_cast<size_t>(std::max(1, decode_utf8(text).length));
  const auto is_space = [](std::string_view character) { return count_words(character) == 0; };
  return (is_space(text.substr(0, first_length)) ? 1 : 0) + (is_space(text.substr(last)) ? 1 : 0);
}

}  // namespace

int64_t EvalData::token_count() const {
  int64_t count = 0;
  for (const EvalDocument& document : documents) count += document.tokens.numel();
  return count;
}

void EvalData::limit(int64_t tokens, const Tokenizer& tokenizer) {
  const int64_t available = token_count();
  if (tokens > available) {
    throw UsageError(fmt::format(
        "{} tokens were asked for but the data holds only {}; ask for fewer", tokens, available));
  }
  size_t kept = 0;
  for (; tokens > 0; ++kept) {
    EvalDocument& document = documents[kept];
    if (document.tokens.numel() > tokens) {
      document.tokens = document.tokens.narrow(0, 0, tokens).contiguous();
      const std::string text = decode(tokenizer, document.tokens);
      document.words = lm_eval_words(text);
      document.bytes = static_cast<int64_t>(text.size());
    }
    tokens -= document.tokens.numel();
  }
  documents.resize(kept);
}

int64_t lm_eval_words(std::string_view text) { return count_words(text) + empty_pieces(text); }

EvalData eval_data_from_text(const std::vector<std::string>& paths, DocumentFormat format,
                             const Tokenizer& tokenizer) {
  EvalData data;
  data.prefix_token = prefix_token(tokenizer);
  for_each_document(paths, format, /*require_utf8=*/true, [&](const Document& document) {
    data.documents.push_back({to_tensor(tokenizer.encode(document.text)),
                              lm_eval_words(document.text),
                              static_cast<int64_t>(document.text.size())});
  });
  return data;
}

EvalData eval_data_from_shards(const std::string& path, const Tokenizer& tokenizer) {
  TokenDataset::Options options;
  options.length = 1;
  options.tokenizer = tokenizer.fingerprint();
  const TokenDataset dataset(path, options);
  EvalData data;
  data.prefix_token = prefix_token(tokenizer);
  for (int64_t i = 0; i < dataset.document_count(); ++i) {
    at::Tensor tokens = dataset.document_tokens(i);
    const auto is = [&tokens](int64_t at, int32_t id) {
      return id >= 0 && tokens.numel() > 0 && tokens[at].item<int64_t>() == id;
    };
    if (is(0, tokenizer.bos_id())) tokens = tokens.narrow(0, 1, tokens.numel() - 1);
    if (is(-1, tokenizer.eos_id())) tokens = tokens.narrow(0, 0, tokens.numel() - 1);
    tokens = tokens.contiguous();
    const DocumentInfo info = dataset.document(i);
    data.documents.push_back(
        {tokens, info.words + empty_pieces(decode(tokenizer, tokens)), info.bytes});
  }
  return data;
}

}  // namespace efla
