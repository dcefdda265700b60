#include "efla/nn/foreign_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "efla/io/atomic_file.h"
#include "efla/io/error.h"
#include "efla/io/log.h"
#include "efla/nn/config_text.h"

namespace efla {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr double kStateSpacesNormEps = 1e-5;  // no field: fixed in their code

// The fields of one object of a state-spaces config; every key must be asked for.
class Fields {
 public:
  Fields(const json& object, std::string where) : left_(object), where_(std::move(where)) {}

  json take(const char* key, const json& standard) {
    const auto found = left_.find(key);
    if (found == left_.end()) return standard;
    json value = *found;
    left_.erase(found);
    const bool fits = value.type() == standard.type() ||
                      (value.is_number() && standard.is_number()) || standard.is_null();
    if (!fits) refuse(key, value, fmt::format("like {}", shown_json(standard)));
    return value;
  }
  /// A field of which only some values have a counterpart here.
  void only(const char* key, std::initializer_list<json> accepted, const char* reason) {
    const auto found = left_.find(key);
    if (found == left_.end()) return;
    for (const json& value : accepted) {
      if (*found == value) {
        left_.erase(found);
        return;
      }
    }
    refuse(key, *found, fmt::format("{} ({})", shown_json(*accepted.begin()), reason));
  }
  /// What was not asked for: without effect, or an error.
  void finish(std::initializer_list<const char*> without_effect,
              std::vector<std::string>& ignored) {
    for (const char* key : without_effect) {
      if (left_.erase(key) > 0) ignored.emplace_back(key);
    }
    for (const auto& [key, value] : left_.items()) {
      if (value.is_null()) {
        ignored.push_back(key);
      } else {
        throw UsageError(fmt::format(
            "{}: unknown key {} = {} may change the mathematics; remove it, or set it to null if "
            "it does not matter",
            where_, key, shown_json(value)));
      }
    }
  }

 private:
  [[noreturn]] void refuse(const char* key, const json& found, const std::string& expected) const {
    throw UsageError(
        fmt::format("{}: {} must be {}, not {}", where_, key, expected, shown_json(found)));
  }

  json left_;
  std::string where_;
};

// The rows of the embedding: vocab_size rounded up.
int64_t padded_vocabulary(int64_t size, int64_t multiple, const std::string& where) {
  if (size < 1 || size > (int64_t{1} << 40) || multiple < 1 || multiple > (int64_t{1} << 20)) {
    throw UsageError(
        fmt::format("{}: vocab_size = {} and pad_vocab_size_multiple = {} give no vocabulary",
                    where, size, multiple));
  }
  return (size + multiple - 1) / multiple * multiple;
}

int64_t whole(const json& value, const char* key, const std::string& where) {
  if (!value.is_number_integer()) {
    throw UsageError(
        fmt::format("{}: {} must be an integer, not {}", where, key, shown_json(value)));
  }
  return value.get<int64_t>();
}

void read_ssm_cfg(const json& object, const std::string& where, json& fla, LoadReport& report) {
  Fields ssm(object, where + ": ssm_cfg");
  const json layer = ssm.take("layer", "Mamba1");
  if (layer != "Mamba2") {
    throw UsageError(
        fmt::format("{}: ssm_cfg.layer is {}, and only \"Mamba2\" layers can be read here", where,
                    shown_json(layer)));
  }
  fla["state_size"] = ssm.take("d_state", 128);
  fla["conv_kernel"] = ssm.take("d_conv", 4);
  fla["expand"] = ssm.take("expand", 2);
  fla["head_dim"] = ssm.take("headdim", 64);
  fla["n_groups"] = ssm.take("ngroups", 1);
  fla["rmsnorm"] = ssm.take("rmsnorm", true);
  fla["norm_before_gate"] = ssm.take("norm_before_gate", false);
  fla["use_bias"] = ssm.take("bias", false);
  fla["use_conv_bias"] = ssm.take("conv_bias", true);
  fla["A_init_range"] = ssm.take("A_init_range", json::array({1, 16}));
  fla["dt_min"] = ssm.take("dt_min", 0.001);
  fla["dt_max"] = ssm.take("dt_max", 0.1);
  fla["dt_init_floor"] = ssm.take("dt_init_floor", 1e-4);
  const json limit = ssm.take("dt_limit", nullptr);
  if (!limit.is_null()) fla["dt_limit"] = limit;
  ssm.only("D_has_hdim", {false}, "D has one number per head here");
  ssm.only("activation", {"swish", "silu"}, "other activations are not implemented");
  ssm.finish({"chunk_size", "use_mem_eff_path", "conv_init", "process_group", "sequence_parallel",
              "d_ssm", "learnable_init_states", "layer_idx", "device", "dtype"},
             report.ignored);
}

json from_state_spaces(const json& object, const std::string& where, LoadReport& report) {
  Fields top(object, where);
  json fla = {{"model_type", "mamba2"}, {"norm_eps", kStateSpacesNormEps}};
  fla["hidden_size"] = top.take("d_model", 2560);
  fla["num_hidden_layers"] = top.take("n_layer", 64);
  fla["tie_word_embeddings"] = top.take("tie_embeddings", true);
  fla["residual_in_fp32"] = top.take("residual_in_fp32", true);
  const int64_t vocabulary = whole(top.take("vocab_size", 50277), "vocab_size", where);
  const int64_t multiple =
      whole(top.take("pad_vocab_size_multiple", 8), "pad_vocab_size_multiple", where);
  const int64_t rows = padded_vocabulary(vocabulary, multiple, where);
  fla["vocab_size"] = rows;
  if (rows != vocabulary) {
    report.notes.push_back(fmt::format(
        "the vocabulary of {} is padded to {} rows, which all remain", vocabulary, rows));
  }
  // <|endoftext|> of the GPT-NeoX tokenizer, which their models use.
  for (const char* key : {"bos_token_id", "eos_token_id"}) fla[key] = 0;
  top.only("d_intermediate", {0}, "blocks with an MLP are not implemented");
  top.only("attn_layer_idx", {json::array()}, "layers of attention are not implemented");
  top.only("attn_cfg", {json::object()}, "layers of attention are not implemented");
  top.only("rms_norm", {true}, "LayerNorm is not implemented");
  read_ssm_cfg(top.take("ssm_cfg", json::object()), where, fla, report);
  top.finish({"fused_add_norm"}, report.ignored);
  return fla;
}

// Configs of transformers' Mamba-2 and of older fla, told by names of theirs (which ModelConfig
// reads too): norm_before_gate stands in them, but the code that reads them always gates first.
json without_dead_fields(json object, LoadReport& report) {
  bool old = false;
  for (const char* name : {"time_step_min", "time_step_limit", "rms_norm", "layer_norm_epsilon"}) {
    old = old || object.contains(name);
  }
  if (!old) return object;
  if (object.contains("layer_norm_epsilon") && !object.contains("norm_eps")) {
    object["norm_eps"] = object["layer_norm_epsilon"];
  }
  object.erase("layer_norm_epsilon");
  if (object.erase("norm_before_gate") > 0) report.ignored.emplace_back("norm_before_gate");
  return object;
}

}  // namespace

bool is_state_spaces_config(const json& object) {
  return object.is_object() && !object.contains("model_type") && object.contains("d_model") &&
         object.contains("n_layer");
}

json to_fla_config(const json& object, const std::string& where, LoadReport& report) {
  if (is_state_spaces_config(object)) {
    report.format = "state-spaces";
    return from_state_spaces(object, where, report);
  }
  const std::string type =
      object.is_object() && object.contains("model_type") && object["model_type"].is_string()
          ? object["model_type"].get<std::string>()
          : "efla";
  const auto& known = model_types();
  if (std::find(known.begin(), known.end(), type) == known.end()) {
    throw UsageError(fmt::format("{}: model_type must be one of {}, not {}", where,
                                 fmt::join(known, ", "), shown_json(type)));
  }
  report.format = type == "efla" || type == "gated_efla" ? "efla" : "fla";
  return type == "mamba2" ? without_dead_fields(object, report) : object;
}

json to_state_spaces_config(const ModelConfig& config) {
  const auto require = [](bool ok, const char* what) {
    if (!ok) {
      throw UsageError(fmt::format("state-spaces' format has no place for {}; use --to fla", what));
    }
  };
  require(config.model_type == "mamba2", "any model but mamba2");
  require(config.norm_eps == kStateSpacesNormEps, "a norm_eps that is not 1e-5");
  const json fla = config.to_json();
  json ssm = {{"layer", "Mamba2"}};
  constexpr std::array<std::pair<const char*, const char*>, 9> kNames = {
      {{"state_size", "d_state"},
       {"conv_kernel", "d_conv"},
       {"expand", "expand"},
       {"head_dim", "headdim"},
       {"n_groups", "ngroups"},
       {"rmsnorm", "rmsnorm"},
       {"norm_before_gate", "norm_before_gate"},
       {"use_bias", "bias"},
       {"use_conv_bias", "conv_bias"}}};
  for (const auto& [name, theirs] : kNames) ssm[theirs] = fla.at(name);
  const bool limited = config.mamba2.dt_limit_low > 0 ||
                       config.mamba2.dt_limit_high < std::numeric_limits<double>::infinity();
  if (limited) ssm["dt_limit"] = fla.at("dt_limit");
  return {{"d_model", config.hidden_size},
          {"d_intermediate", 0},
          {"n_layer", config.num_hidden_layers},
          {"vocab_size", config.vocab_size},
          {"ssm_cfg", ssm},
          {"attn_layer_idx", json::array()},
          {"attn_cfg", json::object()},
          {"rms_norm", true},
          {"residual_in_fp32", config.mamba2.residual_in_fp32},
          {"fused_add_norm", true},
          {"pad_vocab_size_multiple", 1},  // the rows are padded already
          {"tie_embeddings", config.tie_word_embeddings}};
}

ModelConfig as_fla_family(const ModelConfig& config) {
  if (config.model_type != "efla" && config.model_type != "gated_efla") return config;
  ModelConfig fla = config;
  fla.model_type = config.is_gated() ? "gated_deltanet" : "delta_net";
  if (fla.q_norm == fla.qk_norm) fla.q_norm.reset();
  try {
    fla.validate();
  } catch (const UsageError&) {
    throw UsageError(fmt::format(
        "fla has no layer for model_type {} with rule {}, beta_activation {}, qk_norm {}; it reads "
        "delta_net, gated_deltanet, mamba2 and transformer; use --to efla",
        config.model_type, to_string(config.rule), to_string(config.beta_activation),
        to_string(config.qk_norm)));
  }
  return fla;
}

ModelConfig read_model_config(const fs::path& folder, LoadReport* report) {
  const fs::path path = folder / "config.json";
  if (!path_exists(path)) {
    throw Error(fmt::format(
        "{}: is missing; a model folder holds config.json and model.safetensors", path.string()));
  }
  std::error_code ignored;
  constexpr uintmax_t kMaxBytes = 1'000'000;
  const uintmax_t bytes = fs::file_size(path, ignored);
  if (!ignored && bytes > kMaxBytes) {
    throw Error(fmt::format("{}: has {} bytes, far more than a config.json", path.string(), bytes));
  }
  LoadReport found;
  const json object =
      to_fla_config(parse_config_text(read_file(path), path.string()), path.string(), found);
  std::vector<std::string> skipped;
  const ModelConfig config = ModelConfig::from_json(object, path.string(), &skipped);
  found.ignored.insert(found.ignored.end(), skipped.begin(), skipped.end());
  if (report) {
    *report = std::move(found);
    return config;
  }
  for (const std::string& key : found.ignored) {
    log_warning(fmt::format("{}: key {} is not used and has no effect here", path.string(), key));
  }
  for (const std::string& note : found.notes) {
    log_warning(fmt::format("{}: {}", path.string(), note));
  }
  return config;
}

}  // namespace efla
