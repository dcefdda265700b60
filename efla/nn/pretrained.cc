#include "efla/nn/pretrained.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "efla/io/atomic_file.h"
#include "efla/io/error.h"
#include "efla/io/log.h"
#include "efla/io/safetensors_model.h"
#include "efla/nn/checkpoint_tensors.h"

namespace efla {

namespace {

namespace fs = std::filesystem;

constexpr const char* kConfigName = "config.json";

// A model of the config that has shapes and dtypes but no memory.
LanguageModel outline(const ModelConfig& config, at::ScalarType dtype) {
  const auto options = at::TensorOptions().dtype(dtype).device(at::kMeta);
  return LanguageModel(config, options, WeightInit::kNone);
}

fs::path model_folder(const std::string& folder) {
  const fs::path path(folder);
  if (!fs::is_directory(path)) recover_folder(path);  // a writer may have died between two renames
  if (!fs::is_directory(path)) {
    throw Error(fmt::format("{}: no such folder; a model is a folder with {} and model.safetensors",
                            folder, kConfigName));
  }
  return path;
}

struct Checked {
  ModelConfig config;
  TensorMap tensors;  // exactly those of the model
};

// Config and tensors of a folder, which fit; still in the files' memory.
Checked open_checked(const fs::path& path, LoadReport& report) {
  ModelConfig config = read_model_config(path, &report);
  TensorMap tensors = read_tensors(path);
  adapt_tensors(tensors, config, report);
  check_tensors(tensors, outline(config, at::kFloat), path);
  return {std::move(config), std::move(tensors)};
}

void log_report(const fs::path& path, const LoadReport& report) {
  for (const std::string& name : report.ignored) {
    log_warning(fmt::format("{}: {} is not used and has no effect here", path.string(), name));
  }
  for (const std::string& note : report.notes) {
    log_warning(fmt::format("{}: {}", path.string(), note));
  }
}

nlohmann::json config_json(const ModelConfig& config, CheckpointFormat format) {
  if (format == CheckpointFormat::kStateSpaces) return to_state_spaces_config(config);
  if (format == CheckpointFormat::kEfla) return config.to_json();
  nlohmann::json json = as_fla_family(config).to_json();
  for (const char* ours : {"tokenizer_fingerprint", "conv_initializer_range"}) json.erase(ours);
  return json;
}

void copy_into(LanguageModel& model, const TensorMap& tensors) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : model->named_parameters()) {
    parameter.value().copy_(tensors.at(parameter.key()));
  }
}

}  // namespace

LanguageModel load_pretrained(const std::string& folder, std::optional<at::ScalarType> dtype,
                              LoadReport* report) {
  const fs::path path = model_folder(folder);
  LoadReport found;
  const Checked checked = open_checked(path, found);
  const at::ScalarType stored = stored_dtype(checked.tensors);
  // No arithmetic here runs in float16.
  const at::ScalarType type = dtype.value_or(stored == at::kHalf ? at::kFloat : stored);
  LanguageModel model(checked.config, at::TensorOptions().dtype(type), WeightInit::kNone);
  copy_into(model, checked.tensors);
  if (report) {
    *report = std::move(found);
  } else {
    log_report(path, found);
  }
  return model;
}

ModelConfig check_pretrained(const std::string& folder, LoadReport* report) {
  const fs::path path = model_folder(folder);
  LoadReport found;
  Checked checked = open_checked(path, found);
  if (report) *report = std::move(found);
  return std::move(checked.config);
}

void load_weights(LanguageModel& model, const fs::path& file_or_folder) {
  TensorMap tensors = read_tensors(file_or_folder);
  LoadReport report;
  adapt_tensors(tensors, model->config(), report);
  check_tensors(tensors, model, file_or_folder);
  copy_into(model, tensors);
  log_report(file_or_folder, report);
}

at::ScalarType checkpoint_dtype(const std::string& folder) {
  return stored_dtype(read_tensors(model_folder(folder)));
}

std::string dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kBFloat16:
      return "bfloat16";
    case at::kHalf:
      return "float16";
    default:
      return c10::toString(dtype);
  }
}

std::map<std::string, at::ScalarType> storage_dtypes(const ModelConfig& config,
                                                     at::ScalarType dtype) {
  const bool narrow = dtype == at::kHalf || dtype == at::kBFloat16;
  const LanguageModel model = outline(config, narrow ? at::kBFloat16 : dtype);
  std::map<std::string, at::ScalarType> dtypes;
  for (const auto& parameter : model->named_parameters()) {
    const at::ScalarType own = parameter.value().scalar_type();
    dtypes[parameter.key()] = narrow && own == at::kBFloat16 ? dtype : own;
  }
  return dtypes;
}

void save_pretrained(const LanguageModel& model, const std::string& folder,
                     const SaveOptions& options) {
  const ModelConfig& config = model->config();
  const at::ScalarType dtype = options.dtype.value_or(model->dtype());
  // Before anything is written: it may say that the format has no place for the model.
  nlohmann::json json = config_json(config, options.format);
  if (options.format != CheckpointFormat::kStateSpaces) json["dtype"] = dtype_name(dtype);

  std::map<std::string, at::ScalarType> dtypes;
  if (options.dtype) dtypes = storage_dtypes(config, dtype);
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& parameter : model->named_parameters()) {
    at::Tensor value = parameter.value().detach();
    if (options.dtype) value = value.to(dtypes.at(parameter.key()));
    tensors.emplace_back(parameter.key(), std::move(value));
  }
  if (options.format == CheckpointFormat::kStateSpaces) {
    to_state_spaces_names(tensors, config.tie_word_embeddings);
  }
  const fs::path path(folder);
  make_folder(path);
  save_safetensors_model(path, tensors, options.max_shard_bytes);
  write_file_atomically(path / kConfigName, json.dump(2) + "\n");
}

}  // namespace efla
