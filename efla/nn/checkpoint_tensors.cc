#include "efla/nn/checkpoint_tensors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "efla/io/error.h"
#include "efla/io/safetensors_model.h"

namespace efla {

namespace {

constexpr const char* kHeadKey = "lm_head.weight";
constexpr std::string_view kEmbeddingSuffix = ".embeddings.weight";  // of "model" or "backbone"

std::string embedding_key(const ModelConfig& config) {
  return std::string(config.model_type == "mamba2" ? "backbone" : "model") +
         std::string(kEmbeddingSuffix);
}

// state-spaces (and the first fla checkpoints of Mamba-2) say "embedding".
void rename_embedding(TensorMap& tensors, LoadReport& report) {
  const auto found = tensors.find("backbone.embedding.weight");
  if (found == tensors.end() || tensors.count("backbone.embeddings.weight")) return;
  tensors.emplace("backbone.embeddings.weight", found->second);
  tensors.erase(found);
  if (report.format != "state-spaces") {
    report.notes.emplace_back("backbone.embedding is read as backbone.embeddings");
  }
}

// fla checkpoints before February 2025 hold one gate_proj [2 inner, hidden]: first gate, then up.
void split_fused_mlp(TensorMap& tensors, int64_t inner, LoadReport& report) {
  const std::string suffix = ".mlp.gate_proj.weight";
  TensorMap ups;
  for (auto& [name, tensor] : tensors) {
    if (!name.ends_with(suffix) || tensor.dim() != 2 || tensor.size(0) != 2 * inner) continue;
    const std::string up = name.substr(0, name.size() - suffix.size()) + ".mlp.up_proj.weight";
    if (tensors.count(up)) continue;
    ups.emplace(up, tensor.narrow(0, inner, inner));
    tensor = tensor.narrow(0, 0, inner);
  }
  if (ups.empty()) return;
  report.notes.push_back(
      fmt::format("{} fused mlp.gate_proj are split into gate_proj and up_proj", ups.size()));
  tensors.merge(ups);
}

// Tensors that their own code never read (D of gated_deltanet before March 2025) or that follow
// from the config (the frequencies of rotary positions).
void drop_obsolete(TensorMap& tensors, LoadReport& report) {
  std::vector<std::string> dropped;
  for (const auto& [name, tensor] : tensors) {
    const bool unread = name.ends_with(".attn.D");
    const bool derived = name.ends_with(".rotary.inv_freq");
    if (unread || derived) dropped.push_back(name);
  }
  for (const std::string& name : dropped) tensors.erase(name);
  if (dropped.size() > 1) {
    dropped.front() += fmt::format(" and {} more of its kind", dropped.size() - 1);
  }
  if (!dropped.empty()) report.ignored.push_back(dropped.front());
}

// Tied models need one of the two names for one matrix; a copy under the other is what some writers
// leave, and some keep only lm_head.
void merge_tied_head(TensorMap& tensors, const std::string& embedding_name) {
  const auto head = tensors.find(kHeadKey);
  if (head == tensors.end()) return;
  const auto embedding = tensors.find(embedding_name);
  if (embedding == tensors.end()) {
    tensors.emplace(embedding_name, head->second);
    tensors.erase(head);
  } else if (head->second.sizes() == embedding->second.sizes() &&
             head->second.scalar_type() == embedding->second.scalar_type() &&
             head->second.equal(embedding->second)) {
    tensors.erase(head);
  }
}

std::string shape_text(at::IntArrayRef shape) {
  return fmt::format("[{}]", fmt::join(shape.begin(), shape.end(), ", "));
}

// "; KIND: a, b, c and 20 more" or nothing.
std::string list(const char* kind, const std::vector<std::string>& items) {
  constexpr size_t kShown = 8;
  if (items.empty()) return "";
  const size_t shown = std::min(kShown, items.size());
  std::string text =
      fmt::format("; {}: {}", kind, fmt::join(items.begin(), items.begin() + shown, ", "));
  if (items.size() > shown) text += fmt::format(" and {} more", items.size() - shown);
  return text;
}

// A name from a file, cut and without line breaks, which would break the one sentence.
std::string printable(const std::string& name) {
  constexpr size_t kShown = 120;
  std::string text = name.substr(0, kShown);
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < ' ') c = '?';
  }
  return name.size() > kShown ? text + "..." : text;
}

}  // namespace

TensorMap read_tensors(const std::filesystem::path& file_or_folder) {
  const SafetensorsModel file = SafetensorsModel::open(file_or_folder);
  TensorMap tensors;
  for (const std::string& name : file.names()) tensors.emplace(name, file.tensor(name));
  return tensors;
}

void adapt_tensors(TensorMap& tensors, const ModelConfig& config, LoadReport& report) {
  if (config.model_type == "mamba2") rename_embedding(tensors, report);
  if (config.has_mlp()) split_fused_mlp(tensors, config.mlp_size(), report);
  if (config.tie_word_embeddings) merge_tied_head(tensors, embedding_key(config));
  drop_obsolete(tensors, report);
}

void check_tensors(const TensorMap& tensors, const LanguageModel& model,
                   const std::filesystem::path& path) {
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
    if (!parameters.contains(name)) unexpected.push_back(printable(name));
  }
  if (missing.empty() && unexpected.empty() && wrong.empty()) return;
  throw Error(fmt::format(
      "{}: the tensors do not fit a config of model_type {}{}{}{}; check that config.json belongs "
      "to these weights",
      path.string(), model->config().model_type, list("missing", missing),
      list("unexpected", unexpected), list("wrong", wrong)));
}

at::ScalarType stored_dtype(const TensorMap& tensors) {
  for (const auto& [name, tensor] : tensors) {
    if (name.ends_with(kEmbeddingSuffix) && tensor.is_floating_point()) {
      return tensor.scalar_type();
    }
  }
  return at::kFloat;
}

void to_state_spaces_names(std::vector<std::pair<std::string, at::Tensor>>& tensors, bool tied) {
  at::Tensor embedding;
  for (auto& [name, tensor] : tensors) {
    if (!name.ends_with(kEmbeddingSuffix)) continue;
    name = "backbone.embedding.weight";
    embedding = tensor;
  }
  if (tied) tensors.emplace_back(kHeadKey, embedding);
}

}  // namespace efla
