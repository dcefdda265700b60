#include "efla/nn/pretrained.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "efla/io/atomic_file.h"
#include "efla/io/error.h"
#include "efla/io/safetensors.h"

namespace efla {

namespace {

namespace fs = std::filesystem;
using TensorMap = std::map<std::string, at::Tensor>;

constexpr const char* kConfigName = "config.json";
constexpr const char* kWeightsName = "model.safetensors";
constexpr const char* kHeadKey = "lm_head.weight";
constexpr const char* kEmbeddingKey = "model.embeddings.weight";

TensorMap read_tensors(const fs::path& file_or_folder) {
  const SafetensorsModel file = SafetensorsModel::open(file_or_folder);
  TensorMap tensors;
  for (const std::string& name : file.names()) tensors.emplace(name, file.tensor(name));
  return tensors;
}

// fla checkpoints before February 2025 hold one gate_proj [2 inner, hidden]: first gate, then up.
void split_fused_mlp(TensorMap& tensors, int64_t inner) {
  const std::string suffix = ".mlp.gate_proj.weight";
  TensorMap ups;
  for (auto& [name, tensor] : tensors) {
    if (!name.ends_with(suffix) || tensor.dim() != 2 || tensor.size(0) != 2 * inner) continue;
    const std::string up = name.substr(0, name.size() - suffix.size()) + ".mlp.up_proj.weight";
    if (tensors.count(up)) continue;
    ups.emplace(up, tensor.narrow(0, inner, inner));
    tensor = tensor.narrow(0, 0, inner);
  }
  tensors.merge(ups);
}

// Tied models need no lm_head; a copy of the embeddings is what some writers leave there.
void drop_tied_head(TensorMap& tensors) {
  const auto head = tensors.find(kHeadKey);
  const auto embedding = tensors.find(kEmbeddingKey);
  if (head == tensors.end() || embedding == tensors.end()) return;
  if (head->second.sizes() == embedding->second.sizes() &&
      head->second.scalar_type() == embedding->second.scalar_type() &&
      head->second.equal(embedding->second)) {
    tensors.erase(head);
  }
}

std::string shape_text(at::IntArrayRef shape) {
  return fmt::format("[{}]", fmt::join(shape.begin(), shape.end(), ", "));
}

// "KIND: a, b, c and 20 more; " or nothing.
std::string list(const char* kind, const std::vector<std::string>& items) {
  constexpr size_t kShown = 8;
  if (items.empty()) return "";
  const size_t shown = std::min(kShown, items.size());
  std::string text =
      fmt::format("; {}: {}", kind, fmt::join(items.begin(), items.begin() + shown, ", "));
  if (items.size() > shown) text += fmt::format(" and {} more", items.size() - shown);
  return text;
}

void check_tensors(const TensorMap& tensors, const LanguageModel& model, const fs::path& path) {
  std::vector<std::string> missing, unexpected, wrong;
  const auto parameters = model->named_parameters();
  for (const auto& parameter : parameters) {
    const auto found = tensors.find(parameter.key());
    if (found == tensors.end()) {
      missing.push_back(parameter.key());
    } else if (found->second.sizes() != parameter.value().sizes()) {
      wrong.push_back(fmt::format("{} {} instead of {}", parameter.key(),
                                  shape_text(found->second.sizes()),
                                  shape_text(parameter.value().sizes())));
    } else if (!found->second.is_floating_point()) {
      wrong.push_back(parameter.key() + " is not floating point");
    }
  }
  for (const auto& [name, tensor] : tensors) {
    if (!parameters.contains(name)) unexpected.push_back(name);
  }
  if (missing.empty() && unexpected.empty() && wrong.empty()) return;
  throw Error(
      fmt::format("{}: the tensors do not fit the model's config{}{}{}; check that {} "
                  "belongs to these weights",
                  path.string(), list("missing", missing), list("unexpected", unexpected),
                  list("wrong", wrong), kConfigName));
}

void fill(LanguageModel& model, TensorMap& tensors, const fs::path& path) {
  split_fused_mlp(tensors, model->config().mlp_size());
  if (model->config().tie_word_embeddings) drop_tied_head(tensors);
  check_tensors(tensors, model, path);
  const torch::NoGradGuard no_grad;
  for (auto& parameter : model->named_parameters()) {
    parameter.value().copy_(tensors.at(parameter.key()));
  }
}

at::ScalarType stored_dtype(const TensorMap& tensors) {
  const auto found = tensors.find(kEmbeddingKey);
  const bool usable = found != tensors.end() && found->second.is_floating_point();
  return usable ? found->second.scalar_type() : at::kFloat;
}

}  // namespace

LanguageModel load_pretrained(const std::string& folder, std::optional<at::ScalarType> dtype) {
  const fs::path path(folder);
  if (!fs::is_directory(path)) recover_folder(path);  // a writer may have died between two renames
  if (!fs::is_directory(path)) {
    throw Error(fmt::format("{}: no such folder; a model is a folder with {} and {}", folder,
                            kConfigName, kWeightsName));
  }
  const ModelConfig config = ModelConfig::from_json_file(path / kConfigName);
  TensorMap tensors = read_tensors(path);
  const at::ScalarType type = dtype.value_or(stored_dtype(tensors));
  LanguageModel model(config, at::TensorOptions().dtype(type), WeightInit::kNone);
  fill(model, tensors, path);
  return model;
}

void load_weights(LanguageModel& model, const fs::path& file) {
  TensorMap tensors = read_tensors(file);
  fill(model, tensors, file);
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

void save_pretrained(const LanguageModel& model, const std::string& folder) {
  const fs::path path(folder);
  make_folder(path);
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& parameter : model->named_parameters()) {
    tensors.emplace_back(parameter.key(), parameter.value().detach());
  }
  nlohmann::json config = model->config().to_json();
  config["dtype"] = dtype_name(model->dtype());
  save_safetensors(path / kWeightsName, tensors, {{"format", "pt"}});
  write_file_atomically(path / kConfigName, config.dump(2) + "\n");
}

}  // namespace efla
