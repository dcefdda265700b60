// Configs that are not in our form: state-spaces' Mamba-2, and transformers' Mamba-2.
// docs/models.md, "Checkpoints".
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "efla/nn/config.h"

namespace efla {

/// What a loader found beside what it was looking for.
struct LoadReport {
  std::string format;                // of the folder: "efla", "fla" or "state-spaces"
  std::vector<std::string> ignored;  // config keys and tensors without effect here
  std::vector<std::string> notes;    // sentences: what was rewritten on the way in
};

/// Whether the object is a config of state-spaces/mamba (d_model, n_layer, ssm_cfg, no model_type).
bool is_state_spaces_config(const nlohmann::json& object);

/// The same model in fla's fields; an object in fla's form already comes back as it is, without
/// what its own readers ignore. `report` gets the format, ignored keys and notes. Throws UsageError
/// for what Mamba-2 models here cannot have (Mamba-1 layers, attention layers, MLPs, LayerNorm).
nlohmann::json to_fla_config(const nlohmann::json& object, const std::string& where,
                             LoadReport& report);

/// config.json of state-spaces/mamba for a mamba2 model; UsageError when it has no field for what
/// the model needs.
nlohmann::json to_state_spaces_config(const ModelConfig& config);

/// The config as fla knows it: an efla config whose mathematics is DeltaNet's becomes delta_net.
/// UsageError when fla has no layer for it.
ModelConfig as_fla_family(const ModelConfig& config);

/// Reads config.json of a model folder in any known form. Without a report, ignored keys and notes
/// are logged as warnings. Throws Error or UsageError naming the path.
ModelConfig read_model_config(const std::filesystem::path& folder, LoadReport* report = nullptr);

}  // namespace efla
