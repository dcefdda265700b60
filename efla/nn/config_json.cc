// ModelConfig from and to JSON: the fields that every family has, and the choice of the family.
#include <fmt/format.h>

#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "efla/io/error.h"
#include "efla/io/log.h"
#include "efla/nn/config.h"
#include "efla/nn/config_family.h"
#include "efla/nn/config_reader.h"
#include "efla/nn/config_text.h"

namespace efla {

namespace {

using nlohmann::json;

void read_common(FieldReader& reader, ModelConfig& c) {
  reader.read("vocab_size", c.vocab_size);
  reader.read("hidden_size", c.hidden_size);
  reader.read("num_hidden_layers", c.num_hidden_layers);
  reader.read("norm_eps", c.norm_eps);
  reader.read("initializer_range", c.initializer_range);
  reader.read("tie_word_embeddings", c.tie_word_embeddings);
  reader.read("bos_token_id", c.bos_token_id);
  reader.read("eos_token_id", c.eos_token_id);
  reader.read("pad_token_id", c.pad_token_id);
  reader.read("max_position_embeddings", c.max_position_embeddings);
  reader.read("tokenizer_fingerprint", c.tokenizer_fingerprint);
  reader.only("hidden_act", {"swish", "silu"}, "other activations are not implemented");
  reader.only("use_l2warp", {false}, "the l2warp loss is not implemented");
  if (c.model_type != "transformer") {
    reader.read("conv_initializer_range", c.conv_initializer_range);
  }
  if (!c.has_mlp()) return;
  if (reader.is_null("hidden_ratio")) {
    reader.only("hidden_ratio", {nullptr}, "the default");  // fla: null is 4
  } else {
    reader.read("hidden_ratio", c.hidden_ratio);
  }
  reader.read("intermediate_size", c.intermediate_size);
  reader.only("attnres_block_size", {nullptr}, "attention residuals are not implemented");
}

void write_common(const ModelConfig& c, json& object) {
  object.update({{"model_type", c.model_type},
                 {"hidden_act", c.has_mlp() ? "swish" : "silu"},
                 {"vocab_size", c.vocab_size},
                 {"hidden_size", c.hidden_size},
                 {"num_hidden_layers", c.num_hidden_layers},
                 {"norm_eps", c.norm_eps},
                 {"initializer_range", c.initializer_range},
                 {"tie_word_embeddings", c.tie_word_embeddings},
                 {"max_position_embeddings", c.max_position_embeddings},
                 {"bos_token_id", optional_json(c.bos_token_id)},
                 {"eos_token_id", optional_json(c.eos_token_id)},
                 {"pad_token_id", optional_json(c.pad_token_id)}});
  if (c.has_mlp()) {
    object["hidden_ratio"] = c.hidden_ratio;
    object["intermediate_size"] = optional_json(c.intermediate_size);
  }
  if (c.conv_initializer_range > 0) object["conv_initializer_range"] = c.conv_initializer_range;
  if (!c.tokenizer_fingerprint.empty()) object["tokenizer_fingerprint"] = c.tokenizer_fingerprint;
}

}  // namespace

ModelConfig ModelConfig::from_json(const json& object, const std::string& where,
                                   std::vector<std::string>* skipped) {
  FieldReader reader(object, where);
  std::string model_type = "efla";
  reader.read("model_type", model_type);
  ModelConfig config = of_type(model_type, where);
  read_common(reader, config);
  if (model_type == "mamba2") {
    mamba2_family::read(reader, config);
  } else if (model_type == "transformer") {
    attention_family::read(reader, config);
  } else {
    delta_family::read(reader, config);
    attention_family::read_hybrid(reader, config, where);
  }
  const std::vector<std::string> unused = reader.unused();
  if (skipped) *skipped = unused;
  for (const std::string& key : unused) {
    if (skipped) break;
    log_warning(fmt::format("{}: key {} is not used and has no effect here", where, key));
  }
  config.validate(where);
  return config;
}

ModelConfig ModelConfig::from_json_file(const std::filesystem::path& path,
                                        std::vector<std::string>* skipped) {
  std::ifstream file(path);
  if (!file) {
    throw Error(
        fmt::format("{}: cannot be opened; a model folder holds config.json and "
                    "model.safetensors",
                    path.string()));
  }
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  return from_json(parse_config_text(text, path.string()), path.string(), skipped);
}

json ModelConfig::to_json() const {
  json object = json::object();
  write_common(*this, object);
  if (model_type == "mamba2") {
    mamba2_family::write(*this, object);
  } else if (model_type == "transformer") {
    attention_family::write(*this, object);
  } else {
    delta_family::write(*this, object);
    object["attn"] = attn ? attention_family::hybrid_json(*attn) : json(nullptr);
  }
  return object;
}

}  // namespace efla
