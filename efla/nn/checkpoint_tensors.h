// The tensors of a checkpoint on their way to a model: old and foreign names and layouts become
// ours, and what does not fit is listed in one message.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "efla/nn/foreign_config.h"
#include "efla/nn/language_model.h"

namespace efla {

using TensorMap = std::map<std::string, at::Tensor>;

/// Every tensor of a file or folder, in the files' memory (safetensors_model.h).
TensorMap read_tensors(const std::filesystem::path& file_or_folder);

/// Renames, splits and drops what older or other writers did differently (docs/models.md,
/// "Checkpoints"); `report` gets a line for each kind.
void adapt_tensors(TensorMap& tensors, const ModelConfig& config, LoadReport& report);

/// Throws one Error that lists missing, unexpected and mis-shaped tensors; `model` may be without
/// memory. `path` leads the message.
void check_tensors(const TensorMap& tensors, const LanguageModel& model,
                   const std::filesystem::path& path);

/// The dtype of the embeddings; float32 when they are missing or no floating-point numbers.
at::ScalarType stored_dtype(const TensorMap& tensors);

/// The names that state-spaces/mamba gives the tensors of a mamba2 model, lm_head included when
/// tied.
void to_state_spaces_names(std::vector<std::pair<std::string, at::Tensor>>& tensors, bool tied);

}  // namespace efla
