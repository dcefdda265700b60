#include "efla/train/setup.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>

#include "efla/io/atomic_file.h"
#include "efla/io/error.h"
#include "efla/io/log.h"
#include "efla/nn/presets.h"

namespace efla {
namespace {

namespace fs = std::filesystem;

std::unique_ptr<Tokenizer> open_tokenizer(const Recipe& recipe) {
  if (!recipe.data.tokenizer.empty()) return Tokenizer::load(recipe.data.tokenizer);
  const fs::path shards(recipe.data.train);
  const fs::path beside = (is_folder(shards) ? shards : shards.parent_path()) / "tokenizer.model";
  if (!path_exists(beside)) {
    throw UsageError(
        fmt::format("{}: no tokenizer.model beside the shards; give data.tokenizer, a "
                    ".model file or \"byte\"",
                    recipe.data.train));
  }
  return Tokenizer::load(beside.string());
}

void complete_model(Recipe& recipe, const Tokenizer& tokenizer) {
  ModelConfig& model = recipe.model;
  const auto given = [&recipe](const char* key) { return recipe.given_model_keys.count(key) > 0; };
  if (!given("vocab_size")) model.vocab_size = tokenizer.vocab_size();
  if (model.vocab_size < tokenizer.vocab_size()) {
    throw UsageError(fmt::format(
        "model.vocab_size = {} is smaller than the {} tokens of the tokenizer {}; leave it out or "
        "raise it",
        model.vocab_size, tokenizer.vocab_size(), tokenizer.path()));
  }
  const auto id = [](int32_t token) {
    return token < 0 ? std::optional<int64_t>() : std::optional<int64_t>(token);
  };
  if (!given("bos_token_id")) model.bos_token_id = id(tokenizer.bos_id());
  if (!given("eos_token_id")) model.eos_token_id = id(tokenizer.eos_id());
  model.tokenizer_fingerprint = tokenizer.fingerprint();
  model.validate("[model]");
}

std::unique_ptr<TokenDataset> open_data(const std::string& path, const std::string& key,
                                        const Recipe& recipe, const Tokenizer& tokenizer) {
  if (!path_exists(path)) {
    throw UsageError(
        fmt::format("{} = {}: no such folder; make it with efla data prepare", key, path));
  }
  TokenDataset::Options options;
  options.length = recipe.data.length;
  options.seed = static_cast<uint64_t>(recipe.train.seed);
  options.tokenizer = tokenizer.fingerprint();
  options.vocab_size = recipe.model.vocab_size;
  options.verify_payload = recipe.data.verify;
  return std::make_unique<TokenDataset>(path, options);
}

// A lower bound of what training needs: weights, gradients and two moments, and eight activations
// of the hidden size per token and layer.
void check_memory(const Recipe& recipe) {
  const double element = recipe.train.dtype == "float64" ? 8 : 4;
  const double weights = static_cast<double>(recipe.model.parameter_count().total());
  const double tokens =
      static_cast<double>(recipe.data.batch) * static_cast<double>(recipe.data.length);
  const double activations = 8 * tokens * static_cast<double>(recipe.model.hidden_size) *
                             static_cast<double>(recipe.model.num_hidden_layers);
  const double needed = element * (4 * weights + activations);
  const double installed =
      static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE));
  if (needed > installed) {
    throw UsageError(fmt::format(
        "{:.0f} parameters and {:.0f} tokens a batch need at least {:.1f} GB of memory where this "
        "machine has {:.1f}; make the model, data.batch or data.length smaller",
        weights, tokens, needed / 1e9, installed / 1e9));
  }
}

// A run that is called 340m and is not would be compared with the wrong models.
void warn_of_misleading_name(const Recipe& recipe) {
  constexpr double kTolerance = 0.05;
  fs::path out(recipe.train.out);
  if (!out.has_filename()) out = out.parent_path();
  const std::optional<int64_t> size = size_in_name(out.filename().string());
  if (!size) return;
  const auto named = static_cast<double>(*size);
  const auto actual = static_cast<double>(counted_size(recipe.model));
  if (std::abs(actual / named - 1) <= kTolerance) return;
  log_warning(fmt::format(
      "train.out = {}: the name says {:.4g} million parameters, the model has {:.4g} million "
      "without its output head",
      recipe.train.out, named / 1e6, actual / 1e6));
}

}  // namespace

TrainingSetup::TrainingSetup(Recipe& recipe) {
  tokenizer = open_tokenizer(recipe);
  complete_model(recipe, *tokenizer);
  warn_of_misleading_name(recipe);
  check_memory(recipe);
  train_data = open_data(recipe.data.train, "data.train", recipe, *tokenizer);
  if (recipe.data.valid.empty()) return;
  valid_data = open_data(recipe.data.valid, "data.valid", recipe, *tokenizer);
  if (recipe.train.eval_tokens > valid_data->token_count()) {
    throw UsageError(
        fmt::format("train.eval_tokens = {} is more than the {} tokens in {}; lower it, "
                    "or 0 for all",
                    recipe.train.eval_tokens, valid_data->token_count(), recipe.data.valid));
  }
}

}  // namespace efla
