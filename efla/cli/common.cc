#include "efla/cli/common.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "efla/io/atomic_file.h"
#include "efla/io/checksum.h"
#include "efla/io/error.h"
#include "efla/train/checkpoint.h"

namespace efla::cli {
namespace {

namespace fs = std::filesystem;

std::string tokenizer_path(const std::string& given, const std::string& model_folder,
                           const std::string& data_folder, const ModelConfig& config) {
  if (!given.empty()) return given;
  const fs::path beside_model = fs::path(model_folder) / "tokenizer.model";
  if (fs::exists(beside_model)) return beside_model.string();
  if (config.tokenizer_fingerprint == Tokenizer::load("byte")->fingerprint()) return "byte";
  const fs::path beside_data = fs::path(data_folder) / "tokenizer.model";
  if (!data_folder.empty() && fs::exists(beside_data)) return beside_data.string();
  throw UsageError(fmt::format(
      "{} holds no tokenizer.model; give the model's tokenizer with --tokenizer", model_folder));
}

// Compares the files that load_pretrained and find_tokenizer read with the sizes and checksums in
// the checkpoint's trainer.json; verify_checkpoint() would read the optimizer's moments too, which
// are twice as much and may have been deleted.
void verify_checkpoint_model(const fs::path& folder) {
  const fs::path record_path = folder / "trainer.json";
  nlohmann::json files;
  try {
    files = nlohmann::json::parse(read_file(record_path)).at("files");
    for (const char* name : {"config.json", "model.safetensors", "tokenizer.model"}) {
      if (!files.contains(name)) continue;  // a byte model has no tokenizer.model
      const FileChecksum actual = checksum_file(folder / name);
      if (files[name].at("bytes") != actual.bytes || files[name].at("crc32") != actual.crc32) {
        throw Error(fmt::format(
            "{}: damaged, its size or checksum is not the one recorded in trainer.json; restore it "
            "from a copy, or give an older checkpoint of the run",
            (folder / name).string()));
      }
    }
  } catch (const nlohmann::json::exception&) {
    throw Error(fmt::format(
        "{}: damaged, it is not the JSON that was written; restore it from a copy, or remove it "
        "to use the model unchecked",
        record_path.string()));
  }
}

}  // namespace

bool exists_or_recovers(const std::string& path) {
  std::error_code ignored;
  if (fs::exists(path, ignored)) return true;
  recover_folder(path);  // its writer may have died between two renames
  return fs::exists(path, ignored);
}

std::string find_model(const std::string& path) {
  if (!exists_or_recovers(path)) {
    throw Error(
        fmt::format("{} does not exist; give the folder of a model, a checkpoint or a run", path));
  }
  std::string folder = resolve_model_folder(path);
  if (fs::exists(fs::path(folder) / "trainer.json")) {
    verify_checkpoint_model(folder);
  } else {
    verify_model(folder);
  }
  return folder;
}

std::unique_ptr<Tokenizer> find_tokenizer(const std::string& given, const std::string& model_folder,
                                          const std::string& data_folder,
                                          const ModelConfig& config) {
  auto tokenizer = Tokenizer::load(tokenizer_path(given, model_folder, data_folder, config));
  if (tokenizer->vocab_size() > config.vocab_size) {
    throw UsageError(
        fmt::format("the tokenizer {} has {} tokens but the model {} only {}; give the tokenizer "
                    "that the model was trained with",
                    tokenizer->path(), tokenizer->vocab_size(), model_folder, config.vocab_size));
  }
  const std::string& expected = config.tokenizer_fingerprint;
  if (!expected.empty() && tokenizer->fingerprint() != expected) {
    throw UsageError(fmt::format(
        "the tokenizer {} has the fingerprint {} but the model {} was trained with {}; give that "
        "one with --tokenizer",
        tokenizer->path(), tokenizer->fingerprint(), model_folder, expected));
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
