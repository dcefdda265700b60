// A model as a folder: config.json + model.safetensors (or shards with an index) in fla's key names
// and layouts, so Python's safetensors and fla read ours, and fla's and state-spaces' checkpoints
// load here. docs/models.md, "Checkpoints".
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "efla/nn/foreign_config.h"
#include "efla/nn/language_model.h"

namespace efla {

/// Loads a folder. Weights keep the file's dtype (float16: float32) unless one is asked for. Throws
/// Error or UsageError naming the path; missing, unexpected and mis-shaped tensors are listed
/// together, and nothing of the model's size is allocated before they fit. Rewritten on the way in:
/// a fused mlp.gate_proj [2 inner, hidden] of fla checkpoints before February 2025, state-spaces'
/// names, tensors that no computation reads (attn.D). Without a report what was ignored is logged.
LanguageModel load_pretrained(const std::string& folder,
                              std::optional<at::ScalarType> dtype = std::nullopt,
                              LoadReport* report = nullptr);

/// The checks of load_pretrained without a model's memory: the config of a folder whose tensors fit
/// it.
ModelConfig check_pretrained(const std::string& folder, LoadReport* report = nullptr);

/// Fills `model` from a safetensors file or folder under the same checks; dtypes are converted.
void load_weights(LanguageModel& model, const std::filesystem::path& file_or_folder);

/// The dtype in which a folder stores its weights (that of the embeddings).
at::ScalarType checkpoint_dtype(const std::string& folder);

/// As transformers writes it in config.json: "float32", "bfloat16", ...
std::string dtype_name(at::ScalarType dtype);

/// Whose names and fields a folder is written in.
enum class CheckpointFormat {
  kEfla,         // fla's names; config.json also says what fla does not know
  kFla,          // the same, with nothing that fla does not know
  kStateSpaces,  // state-spaces/mamba; mamba2 only
};

struct SaveOptions {
  CheckpointFormat format = CheckpointFormat::kEfla;
  std::optional<at::ScalarType> dtype;  // of the file; absent: as in memory. What the model keeps
                                        // in float32 (A_log, dt_bias) stays so
  uint64_t max_shard_bytes = 0;         // 0: one file
};

/// Writes the folder (made if absent); each file replaces its predecessor atomically. Throws
/// UsageError when the format has no place for the model.
void save_pretrained(const LanguageModel& model, const std::string& folder,
                     const SaveOptions& options = {});

/// The dtype in which each parameter of a model is stored when `dtype` is asked for: float32 for
/// what the model keeps in float32.
std::map<std::string, at::ScalarType> storage_dtypes(const ModelConfig& config,
                                                     at::ScalarType dtype);

}  // namespace efla
