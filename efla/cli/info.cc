// efla info: what a model, shards, a tokenizer or this build is.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <fmt/format.h>
#include <hwy/targets.h>
#include <torch/version.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <thread>

#include "efla/cli/commands.h"
#include "efla/cli/common.h"
#include "efla/io/error.h"
#include "efla/io/safetensors_model.h"
#include "efla/io/token_shard.h"
#include "efla/nn/config.h"
#include "efla/nn/presets.h"
#include "efla/nn/pretrained.h"

namespace efla::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// Facts in the order in which they are shown; as a table or as one JSON line.
void show(const Json& facts, bool json) {
  if (json) {
    print_json_line(facts);
    return;
  }
  size_t width = 0;
  for (const auto& [name, value] : facts.items()) width = std::max(width, name.size());
  for (const auto& [name, value] : facts.items()) {
    std::string text = value.is_string() ? value.get<std::string>() : value.dump();
    if (value.is_number_integer()) text = with_commas(value.get<int64_t>());
    if (name.find("bytes") != std::string::npos && value.is_number_integer() && value >= 1000) {
      text += fmt::format(" ({})", human_bytes(value.get<int64_t>()));
    }
    if (value.is_array()) {
      text.clear();
      for (const auto& item : value) {
        text +=
            (text.empty() ? "" : ", ") + (item.is_string() ? item.get<std::string>() : item.dump());
      }
      if (text.empty()) text = "none";
    }
    print_text(fmt::format("{:<{}}  {}\n", name, width, text));
  }
}

Json build_facts() {
  Json targets = Json::array();
  for (int64_t left = hwy::SupportedTargets(); left != 0; left &= left - 1) {
    targets.push_back(hwy::TargetName(left & -left));
  }
  return {{"efla", EFLA_VERSION},
          {"torch", TORCH_VERSION},
          {"compiler", "g++ " __VERSION__},
          {"cpu targets", targets},
          {"threads", at::get_num_threads()},
          {"processors", static_cast<int64_t>(std::thread::hardware_concurrency())},
#ifdef EFLA_WITH_CUDA
          {"cuda", "compiled in"}
#else
          {"cuda", "not compiled in"}
#endif
  };
}

// "float32", or every dtype with its number of tensors when there are several.
std::string dtypes(const SafetensorsModel& weights) {
  const std::map<std::string, std::string> kNames = {
      {"F64", "float64"}, {"F32", "float32"}, {"F16", "float16"}, {"BF16", "bfloat16"}};
  std::map<std::string, int64_t> counts;
  for (const std::string& name : weights.names()) {
    const std::string& dtype = weights.entry(name).dtype;
    const auto known = kNames.find(dtype);
    ++counts[known == kNames.end() ? dtype : known->second];
  }
  std::string text;
  for (const auto& [dtype, count] : counts) {
    text += (text.empty() ? "" : ", ") + dtype;
    if (counts.size() > 1) text += fmt::format(" ({} tensors)", count);
  }
  return text;
}

void add_delta_facts(const ModelConfig& config, Json& facts) {
  facts["rule"] = to_string(config.rule);
  facts["beta activation"] = to_string(config.beta_activation);
  facts["qk norm"] = to_string(config.qk_norm);
  if (config.q_norm) facts["q norm"] = to_string(*config.q_norm);
  facts["heads"] = config.num_heads;
  if (config.value_heads() != config.num_heads) facts["value heads"] = config.value_heads();
  facts["key size per head"] = config.head_key_size();
  facts["value size per head"] = config.head_value_size();
}

void add_attention_facts(const AttentionConfig& attention, const std::string& prefix, Json& facts) {
  if (!attention.layers.empty()) facts["softmax layers"] = attention.layers;
  facts[prefix + "heads"] = attention.num_heads;
  if (attention.kv_heads() != attention.num_heads) {
    facts[prefix + "key and value heads"] = attention.kv_heads();
  }
  if (attention.window_size) facts[prefix + "window"] = *attention.window_size;
}

// Numbers of the recurrent states of one sequence.
int64_t recurrent_elements(const ModelConfig& config) {
  int64_t total = 0;
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    const MixerKind kind = config.mixer_kind(i);
    if (kind == MixerKind::kDelta) {
      total += config.value_heads() * config.head_key_size() * config.head_value_size();
    } else if (kind == MixerKind::kMamba2) {
      total += config.mamba2_heads() * config.mamba2.state_size * config.mamba2.head_dim;
    }
  }
  return total;
}

// What a sequence keeps between tokens when the model runs in its stored dtype: recurrent states in
// at least float32; tails of convolutions, and keys and values of softmax layers, in the dtype.
void add_state_facts(const ModelConfig& config, at::ScalarType stored, Json& facts) {
  const at::ScalarType dtype = stored == at::kHalf ? at::kFloat : stored;  // as it is loaded
  const auto bytes = static_cast<int64_t>(at::elementSize(dtype));
  const int64_t recurrent = recurrent_elements(config);
  const int64_t tails = config.state_elements() - recurrent;
  facts["state bytes per sequence"] = recurrent * std::max<int64_t>(bytes, 4) + tails * bytes;
  const int64_t per_token = config.state_elements_per_token();
  if (per_token > 0) facts["state bytes per token"] = per_token * bytes;
}

void add_mixer_facts(const ModelConfig& config, Json& facts) {
  if (config.model_type == "mamba2") {
    facts["heads"] = config.mamba2_heads();
    facts["key size per head"] = config.mamba2.state_size;
    facts["value size per head"] = config.mamba2.head_dim;
    facts["groups"] = config.mamba2.n_groups;
  } else if (config.model_type == "transformer") {
    add_attention_facts(*config.attn, "", facts);
  } else {
    add_delta_facts(config, facts);
    if (config.attn) add_attention_facts(*config.attn, "softmax ", facts);
  }
}

// What the config alone says.
void add_config_facts(const ModelConfig& config, Json& facts) {
  const ParameterCount count = config.parameter_count();
  facts["family"] = config.model_type;
  facts["layers"] = config.num_hidden_layers;
  facts["hidden size"] = config.hidden_size;
  add_mixer_facts(config, facts);
  if (config.has_mlp()) facts["mlp size"] = config.mlp_size();
  facts["vocabulary"] = config.vocab_size;
  facts["tied embeddings"] = config.tie_word_embeddings;
  facts["parameters"] = count.total();
  facts["parameters, embedding"] = count.embedding;
  facts["parameters, output head"] = count.output_head;
  facts["parameters, other"] = count.other;
}

Json preset_facts(const std::string& name) {
  const ModelConfig config = preset(name);
  Json facts = {{"preset", name}};
  add_config_facts(config, facts);
  add_state_facts(config, at::kFloat, facts);
  return facts;
}

Json model_facts(const std::string& folder) {
  const fs::path path = folder;
  LoadReport report;
  const ModelConfig config = check_pretrained(folder, &report);
  const SafetensorsModel weights = SafetensorsModel::open(path);
  Json facts = {{"model", folder}, {"format", report.format}};
  add_config_facts(config, facts);
  facts["dtype"] = dtypes(weights);
  facts["files"] = weights.files().size();
  add_state_facts(config, checkpoint_dtype(folder), facts);
  facts["tokenizer"] = fs::exists(path / "tokenizer.model") ? "tokenizer.model" : "none";
  const std::string& fingerprint = config.tokenizer_fingerprint;
  facts["tokenizer fingerprint"] = fingerprint.empty() ? "unknown" : fingerprint;
  facts["ignored"] = report.ignored;
  facts["notes"] = report.notes;
  return facts;
}

Json shard_facts(const fs::path& path) {
  const TokenShard shard = TokenShard::open(path, /*verify_payload=*/true);
  return {{"shard", path.string()},
          {"documents", shard.document_count()},
          {"tokens", shard.token_count()},
          {"token bytes", shard.token_width()},
          {"source bytes", shard.source_bytes()},
          {"source words", shard.source_words()},
          {"bytes per token",
           static_cast<double>(shard.source_bytes()) / static_cast<double>(shard.token_count())},
          {"vocabulary", shard.vocab_size()},
          {"tokenizer", shard.tokenizer_fingerprint()}};
}

Json tokenizer_facts(const std::string& path) {
  const auto tokenizer = Tokenizer::load(path);
  return {{"tokenizer", path},
          {"vocabulary", tokenizer->vocab_size()},
          {"bos id", tokenizer->bos_id()},
          {"eos id", tokenizer->eos_id()},
          {"fingerprint", tokenizer->fingerprint()}};
}

Json safetensors_facts(const fs::path& path) {
  const SafetensorsFile file = SafetensorsFile::open(path);
  Json facts = {{"file", path.string()}, {"tensors", file.names().size()}};
  for (const std::string& name : file.names()) {
    const at::Tensor tensor = file.tensor(name);
    facts[name] =
        fmt::format("{} {}", dtype_name(tensor.scalar_type()), Json(tensor.sizes().vec()).dump());
  }
  return facts;
}

std::vector<fs::path> shards_in(const fs::path& folder) {
  std::set<fs::path> shards;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    if (entry.path().extension() == ".tok") shards.insert(entry.path());
  }
  return {shards.begin(), shards.end()};
}

void run(const std::string& path, bool json) {
  if (path.empty()) return show(build_facts(), json);
  if (path == "byte" && !fs::exists(path)) return show(tokenizer_facts(path), json);
  if (!exists_or_recovers(path)) {
    if (is_preset(path)) return show(preset_facts(path), json);
    throw Error(
        fmt::format("{} does not exist; give a model, shards, a tokenizer or a preset such as {}",
                    path, preset_names().front()));
  }
  const std::string extension = fs::path(path).extension().string();
  if (fs::is_directory(path)) {
    const std::vector<fs::path> shards = shards_in(path);
    if (shards.empty()) return show(model_facts(find_model(path)), json);
    for (size_t i = 0; i < shards.size(); ++i) {
      if (i > 0 && !json) print_text("\n");
      show(shard_facts(shards[i]), json);
    }
  } else if (extension == ".tok") {
    show(shard_facts(path), json);
  } else if (extension == ".safetensors") {
    show(safetensors_facts(path), json);
  } else if (extension == ".model") {
    show(tokenizer_facts(path), json);
  } else {
    throw UsageError(fmt::format(
        "{} is none of what can be described: a model or run folder, shards (.tok), tensors "
        "(.safetensors) or a tokenizer (.model)",
        path));
  }
}

}  // namespace

void add_info(CLI::App& app) {
  struct Arguments {
    std::string path;
    bool json = false;
  };
  const auto arguments = std::make_shared<Arguments>();
  CLI::App* command =
      app.add_subcommand("info", "Describe a model, shards, a tokenizer, or this program");
  command->add_option("PATH", arguments->path,
                      "Model, run or shard folder, .tok, .safetensors or .model file, a preset "
                      "such as efla-340m, or: byte "
                      "(default: this build and machine)");
  command->add_flag("--json", arguments->json, "Print JSON lines");
  command->footer("Example:\n  efla info runs/austen");
  command->callback([arguments] { run(arguments->path, arguments->json); });
}

}  // namespace efla::cli
