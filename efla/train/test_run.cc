#include "efla/train/test_run.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>

#include "efla/io/metrics.h"
#include "efla/io/token_shard.h"
#include "efla/io/tokenizer.h"

namespace efla {
namespace {

void write_shards(const std::string& folder, const std::vector<std::string>& documents) {
  std::filesystem::create_directories(folder);
  const auto tokenizer = Tokenizer::load("byte");
  ShardWriter writer(folder + "/00000.tok", tokenizer->vocab_size(), tokenizer->fingerprint());
  for (const std::string& document : documents) {
    std::vector<int32_t> tokens = {tokenizer->bos_id()};
    for (const int32_t token : tokenizer->encode(document)) tokens.push_back(token);
    writer.append_document(tokens, static_cast<int64_t>(document.size()), 1);
  }
  writer.finish();
}

}  // namespace

TestRun::TestRun(const std::string& name, const std::vector<std::string>& documents,
                 const std::vector<std::string>& held_out)
    : folder_(fmt::format("{}efla_train_{}_{}", testing::TempDir(), name, ::getpid())) {
  std::filesystem::remove_all(folder_);
  write_shards(path("data"), documents);
  if (!held_out.empty()) write_shards(path("held_out"), held_out);
}

TestRun::~TestRun() {
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

Recipe TestRun::recipe(const std::string& out, const std::vector<std::string>& overrides) const {
  std::string text = fmt::format(R"(
[model]
hidden_size = 32
num_hidden_layers = 1
num_heads = 1
intermediate_size = 48
tie_word_embeddings = true
[data]
train = "{}"
tokenizer = "byte"
length = 32
batch = 2
[train]
out = "{}"
steps = 4
threads = 1
log_interval = 1e6
)",
                                 path("data"), path(out));
  std::vector<std::string> all;
  if (std::filesystem::exists(path("held_out"))) all.push_back("data.valid=" + path("held_out"));
  all.insert(all.end(), overrides.begin(), overrides.end());
  return Recipe::parse(text, "test.toml", all);
}

std::vector<std::string> test_documents(int count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::string> documents;
  for (int i = 0; i < count; ++i) {
    std::string text(5 + random() % 56, ' ');
    for (char& c : text) c = static_cast<char>('a' + random() % 8);
    documents.push_back(text);
  }
  return documents;
}

std::vector<std::pair<std::string, double>> logged_losses(const std::string& metrics_path) {
  std::vector<std::pair<std::string, double>> losses;
  for (const nlohmann::json& line : read_metrics(metrics_path)) {
    const double loss = line.at("loss").is_null() ? std::numeric_limits<double>::infinity()
                                                  : line.at("loss").get<double>();
    losses.emplace_back(
        fmt::format("{} {}", line.at("type").get<std::string>(), line.at("step").get<int64_t>()),
        loss);
  }
  return losses;
}

}  // namespace efla
