#include "efla/cli/common.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "efla/io/error.h"
#include "efla/train/checkpoint.h"

namespace efla::cli {
namespace {

namespace fs = std::filesystem;

std::string tokenizer_path(const std::string& given, const std::string& model_folder,
                           const std::string& data_folder, const ModelConfig& config) {
  if (!given.empty()) return given;
  for (const std::string& folder : {model_folder, data_folder}) {
    const fs::path beside = fs::path(folder) / "tokenizer.model";
    if (!folder.empty() && fs::exists(beside)) return beside.string();
  }
  if (config.vocab_size == Tokenizer::load("byte")->vocab_size()) return "byte";
  throw UsageError(fmt::format(
      "{} holds no tokenizer.model; give the model's tokenizer with --tokenizer", model_folder));
}

}  // namespace

std::string find_model(const std::string& path) {
  if (!fs::exists(path)) {
    throw Error(
        fmt::format("{} does not exist; give the folder of a model, a checkpoint or a run", path));
  }
  const std::string folder = resolve_model_folder(path);
  if (fs::exists(fs::path(folder) / "trainer.json")) verify_checkpoint(folder);
  return folder;
}

std::unique_ptr<Tokenizer> find_tokenizer(const std::string& given, const std::string& model_folder,
                                          const std::string& data_folder,
                                          const ModelConfig& config) {
  auto tokenizer = Tokenizer::load(tokenizer_path(given, model_folder, data_folder, config));
  if (tokenizer->vocab_size() > config.vocab_size) {
    throw UsageError(
        fmt::format("the tokenizer {} has {} tokens but the model {} only {}; give the tokenizer "
                    "that the model "
                    "was trained with",
                    tokenizer->path(), tokenizer->vocab_size(), model_folder, config.vocab_size));
  }
  return tokenizer;
}

std::string read_standard_input() {
  std::string text;
  char buffer[1 << 16];
  while (const size_t count = std::fread(buffer, 1, sizeof(buffer), stdin)) {
    text.append(buffer, count);
  }
  if (std::ferror(stdin) != 0) {
    throw Error(fmt::format("cannot read standard input: {}", std::strerror(errno)));
  }
  return text;
}

void refuse_overwrite(const std::string& path, bool force) {
  std::error_code ignored;
  if (force || !fs::exists(path, ignored)) return;
  if (fs::is_directory(path, ignored) && fs::is_empty(path, ignored)) return;
  throw UsageError(
      fmt::format("{} exists already; choose another name or replace it with --force", path));
}

void print_json_line(const nlohmann::ordered_json& object) {
  print_text(object.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
}

void print_text(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    throw Error(fmt::format("cannot write to standard output: {}", std::strerror(errno)));
  }
}

std::string with_commas(int64_t number) {
  const std::string digits = std::to_string(number);
  const size_t first = number < 0 ? 1 : 0;
  std::string text;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > first && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

std::string human_bytes(int64_t bytes) {
  double value = static_cast<double>(bytes);
  const char* unit = "B";
  for (const char* next : {"kB", "MB", "GB", "TB"}) {
    if (value < 1000) break;
    value /= 1000;
    unit = next;
  }
  return bytes < 1000 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, unit);
}

}  // namespace efla::cli
