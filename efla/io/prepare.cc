#include "efla/io/prepare.h"

#include <cstdio>
#include <memory>

#include "efla/io/atomic_file.h"
#include "efla/io/error.h"
#include "efla/io/token_shard.h"
#include "efla/io/utf8.h"

namespace efla {
namespace {

namespace fs = std::filesystem;

// A folder that holds anything but an earlier result is not ours to replace.
void require_replaceable(const fs::path& folder) {
  std::error_code code;
  for (const auto& entry : fs::directory_iterator(folder, code)) {
    const fs::path name = entry.path().filename();
    if (name.extension() != ".tok" && name != "tokenizer.model") {
      throw Error("will not replace " + folder.string() + ": it holds " + name.string() +
                  ", which is no token shard; choose another folder");
    }
  }
}

class ShardFolderWriter {
 public:
  ShardFolderWriter(fs::path folder, const Tokenizer& tokenizer, const PrepareOptions& options)
      : folder_(std::move(folder)), tokenizer_(tokenizer), options_(options) {}

  void append(const Document& document) {
    std::vector<int32_t> tokens;
    if (options_.add_bos && tokenizer_.bos_id() >= 0) tokens.push_back(tokenizer_.bos_id());
    const std::vector<int32_t> text = tokenizer_.encode(document.text);
    tokens.insert(tokens.end(), text.begin(), text.end());
    if (options_.add_eos && tokenizer_.eos_id() >= 0) tokens.push_back(tokenizer_.eos_id());
    if (tokens.empty()) return;
    if (shard_ == nullptr) open_shard();
    const auto bytes = static_cast<int64_t>(document.text.size());
    const int64_t words = count_words(document.text);
    shard_->append_document(tokens, bytes, words);
    ++result_.documents;
    result_.tokens += static_cast<int64_t>(tokens.size());
    result_.bytes += bytes;
    result_.words += words;
    if (shard_->token_count() >= options_.tokens_per_shard) close_shard();
  }
  void close_shard() {
    if (shard_ != nullptr) shard_->finish();
    shard_.reset();
  }
  const PrepareResult& result() const { return result_; }

 private:
  void open_shard() {
    char name[32];
    std::snprintf(name, sizeof(name), "%05lld.tok", static_cast<long long>(result_.shards++));
    shard_ = std::make_unique<ShardWriter>(folder_ / name, tokenizer_.vocab_size(),
                                           tokenizer_.fingerprint());
  }

  fs::path folder_;
  const Tokenizer& tokenizer_;
  const PrepareOptions& options_;
  std::unique_ptr<ShardWriter> shard_;
  PrepareResult result_;
};

}  // namespace

PrepareResult prepare_shards(const std::vector<std::string>& inputs, const Tokenizer& tokenizer,
                             const fs::path& folder, const PrepareOptions& options,
                             const std::function<void(const PrepareResult&)>& progress) {
  if (inputs.empty()) throw UsageError("no text was given to prepare");
  if (options.tokens_per_shard < 1) throw UsageError("tokens_per_shard must be at least 1");
  require_replaceable(folder);
  const bool require_utf8 = !tokenizer.model_bytes().empty();
  PrepareResult result;
  write_folder_atomically(folder, [&](const fs::path& temporary) {
    ShardFolderWriter writer(temporary, tokenizer, options);
    for_each_document(inputs, options.format, require_utf8, [&](const Document& document) {
      writer.append(document);
      if (progress) progress(writer.result());
    });
    writer.close_shard();
    result = writer.result();
    if (result.documents == 0) throw Error(inputs.front() + " holds no document with text");
    if (!tokenizer.model_bytes().empty()) {
      write_file_atomically(temporary / "tokenizer.model", tokenizer.model_bytes());
    }
  });
  return result;
}

}  // namespace efla
