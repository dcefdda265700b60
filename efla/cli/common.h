// What several subcommands share: finding models and tokenizers, reading standard input, printing.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "efla/io/tokenizer.h"
#include "efla/nn/config.h"

namespace efla::cli {

/// Whether `path` exists, after what a killed writer of a folder left there has been mended.
bool exists_or_recovers(const std::string& path);

/// The folder that holds the model which `path` names: a model, a checkpoint or a run (its newest
/// checkpoint). The model's files of a checkpoint are compared with their recorded checksums; those
/// that only training reads may be gone. Throws Error or UsageError naming the path.
std::string find_model(const std::string& path);

/// The tokenizer of a model: `given` (a path or "byte") when not empty, else tokenizer.model in the
/// model's folder, else bytes if the model's tokenizer_fingerprint says so, else tokenizer.model in
/// `data_folder` (may be empty). Throws UsageError when none is found, when it has more tokens than
/// the model, or when its fingerprint is not the model's.
std::unique_ptr<Tokenizer> find_tokenizer(const std::string& given, const std::string& model_folder,
                                          const std::string& data_folder,
                                          const ModelConfig& config);

/// Standard input to its end.
std::string read_standard_input();

/// Throws UsageError when `path` exists (a folder: and is not empty) and `force` is not set.
void refuse_overwrite(const std::string& path, bool force);

/// One JSON object on a line of standard output; bytes that are not UTF-8 become U+FFFD.
void print_json_line(const nlohmann::ordered_json& object);

/// Text on standard output as it is. Throws Error when it cannot be written (a full disk).
void print_text(std::string_view text);

/// 1234567 -> "1,234,567".
std::string with_commas(int64_t number);

/// "12.3 kB", "4.5 MB" (powers of 1000).
std::string human_bytes(int64_t bytes);

}  // namespace efla::cli
