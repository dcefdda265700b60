// A model as a folder: config.json + model.safetensors in fla's key names and layouts, so Python's
// safetensors reads ours and fla's own DeltaNet checkpoints load here.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "efla/nn/language_model.h"

namespace efla {

/// Loads a folder. Weights keep the file's dtype unless one is asked for. Throws Error or
/// UsageError naming the path; missing, unexpected and mis-shaped tensors are listed together. A
/// fused mlp.gate_proj [2 inner, hidden] of fla checkpoints before February 2025 is split.
LanguageModel load_pretrained(const std::string& folder,
                              std::optional<at::ScalarType> dtype = std::nullopt);

/// Fills `model` from one safetensors file under the same checks; dtypes are converted.
void load_weights(LanguageModel& model, const std::filesystem::path& file);

/// As transformers writes it in config.json: "float32", "bfloat16", ...
std::string dtype_name(at::ScalarType dtype);

/// Writes the folder (made if absent); each file replaces its predecessor atomically.
void save_pretrained(const LanguageModel& model, const std::string& folder);

}  // namespace efla
