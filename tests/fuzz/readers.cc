#include "tests/fuzz/readers.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string_view>

#include "efla/io/atomic_file.h"
#include "efla/io/error.h"
#include "efla/io/safetensors_header.h"
#include "efla/io/safetensors_index.h"
#include "efla/io/token_shard.h"
#include "efla/nn/config.h"
#include "efla/nn/config_text.h"
#include "efla/nn/foreign_config.h"

namespace efla::fuzz {
namespace {

void require(bool promise) {
  if (!promise) std::abort();
}

// A copy on the heap, aligned as a mapping is, so that a sanitizer sees reads outside.
class Copy {
 public:
  explicit Copy(std::span<const uint8_t> bytes)
      : size_(bytes.size()),
        data_(static_cast<std::byte*>(
            std::aligned_alloc(8, std::max<size_t>(8, (size_ + 7) / 8 * 8)))) {
    if (size_ > 0) std::memcpy(data_, bytes.data(), size_);
  }
  ~Copy() { std::free(data_); }
  Copy(const Copy&) = delete;
  Copy& operator=(const Copy&) = delete;
  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  size_t size_;
  std::byte* data_;
};

std::string_view text_of(const Copy& file) {
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

// What a user sees of it: one line of bounded length, whatever the input held.
void require_sentence(const Error& error) {
  const std::string_view text = error.what();
  require(text.size() >= 10 && text.size() < 2000);
  require(text.find('\n') == std::string_view::npos);
}

}  // namespace

bool read_safetensors(std::span<const uint8_t> bytes) {
  const Copy file(bytes);
  SafetensorsHeader header;
  try {
    header = parse_safetensors_header(file.bytes(), "fuzz");
  } catch (const Error& error) {
    require(std::string_view(error.what()).size() > 10);
    return false;
  }
  std::vector<std::pair<size_t, size_t>> ranges;
  for (const auto& [name, entry] : header.tensors) {
    require(entry.begin <= entry.end && entry.end <= bytes.size());
    size_t size = safetensors_dtype_size(entry.dtype);
    for (const int64_t extent : entry.shape) {
      require(extent >= 0);
      size *= static_cast<size_t>(extent);
    }
    require(size == entry.end - entry.begin);
    if (size > 0) ranges.emplace_back(entry.begin, entry.end);
  }
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) require(ranges[i - 1].second == ranges[i].first);
  return true;
}

bool read_safetensors_index(std::span<const uint8_t> bytes) {
  const Copy file(bytes);
  SafetensorsIndex index;
  try {
    index = parse_safetensors_index(text_of(file), "fuzz");
  } catch (const Error& error) {
    require_sentence(error);
    return false;
  }
  require(!index.weight_map.empty());
  for (const std::string& name : index.files()) {
    require(std::filesystem::path(name).filename() == name && name.ends_with(".safetensors"));
    require(name.find('\0') == std::string::npos);
  }
  require(parse_safetensors_index(safetensors_index_text(index, 0), "again").weight_map ==
          index.weight_map);
  return true;
}

bool read_config(std::span<const uint8_t> bytes) {
  const Copy file(bytes);
  ModelConfig config;
  try {
    LoadReport report;
    std::vector<std::string> skipped;
    const nlohmann::json json =
        to_fla_config(parse_config_text(text_of(file), "fuzz"), "fuzz", report);
    config = ModelConfig::from_json(json, "fuzz", &skipped);
  } catch (const Error& error) {
    require_sentence(error);
    return false;
  }
  // What was let through is a model: its sizes are sane and it survives being written.
  require(config.parameter_count().total() > 0 &&
          config.parameter_count().total() <= 1'000'000'000'000);
  require(config.state_elements() >= 0 && config.state_elements_per_token() >= 0);
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) config.mixer_kind(layer);
  const nlohmann::json written = config.to_json();
  std::vector<std::string> skipped;
  require(ModelConfig::from_json(written, "again", &skipped).to_json() == written);
  require(skipped.empty());
  return true;
}

bool read_token_shard(std::span<const uint8_t> bytes) {
  const Copy file(bytes);
  try {
    const ShardView shard(file.bytes(), "fuzz");
    // Not verified yet: every access must stay inside all the same.
    std::vector<int64_t> tokens;
    int64_t sum = 0;
    for (int64_t i = 0; i < shard.document_count(); ++i) {
      const int64_t begin = shard.document_begin(i), end = shard.document_begin(i + 1);
      require(0 <= begin && begin < end && end <= shard.token_count());
      tokens.resize(static_cast<size_t>(end - begin));
      shard.copy_tokens(begin, end - begin, tokens.data());
      for (const int64_t token : tokens) sum += token;
    }
    require(shard.tokenizer_fingerprint().size() <= 32);
    shard.verify("fuzz");
    for (int64_t i = 0; i < shard.token_count(); ++i) {
      require(shard.token(i) >= 0 && shard.token(i) < shard.vocab_size());
      sum -= shard.token(i);
    }
    require(sum == 0);
  } catch (const Error&) {
    return false;
  }
  return true;
}

std::string valid_safetensors() {
  std::string header =
      R"({"__metadata__":{"format":"pt"},)"
      R"("model.embeddings.weight":{"dtype":"F32","shape":[3,2],"data_offsets":[0,24]},)"
      R"("model.norm.weight":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]},)"
      R"("empty":{"dtype":"I64","shape":[0,7],"data_offsets":[24,24]},)"
      R"("mask":{"dtype":"BOOL","shape":[],"data_offsets":[32,33]}})";
  header.append((8 - header.size() % 8) % 8, ' ');
  std::string file(8, '\0');
  for (size_t i = 0; i < 8; ++i) file[i] = static_cast<char>(header.size() >> (8 * i));
  return file + header + std::string(33, '\1');
}

std::string valid_safetensors_index() {
  return R"({"metadata": {"total_size": 32, "more": [1, {"weight_map": null}]},
  "weight_map": {"model.embeddings.weight": "model-00001-of-00002.safetensors",
                 "model.norm.weight": "model-00002-of-00002.safetensors",
                 "lm_head.weight": "model-00002-of-00002.safetensors"}})";
}

std::vector<std::string> valid_configs() {
  return {
      R"({"model_type": "efla", "rule": "rk4", "beta_activation": "softplus", "qk_norm": "none",
          "q_norm": "l2", "hidden_size": 64, "num_hidden_layers": 3, "num_heads": 2,
          "expand_k": 0.5, "intermediate_size": 96, "vocab_size": 100, "norm_first": false})",
      R"({"model_type": "delta_net", "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4,
          "use_gate": true, "allow_neg_eigval": true, "vocab_size": 100, "attn": {"layers": [1],
          "num_heads": 4, "num_kv_heads": 2, "window_size": 16, "rope_theta": 10000.0}})",
      R"({"model_type": "gated_deltanet", "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2,
          "head_dim": 16, "expand_v": 2, "num_v_heads": 4, "vocab_size": 100, "use_gate": true})",
      R"({"model_type": "gated_efla", "rule": "exact_log", "hidden_size": 64, "num_hidden_layers": 2,
          "num_heads": 2, "head_dim": 16, "expand_v": 1, "vocab_size": 100})",
      R"({"model_type": "mamba2", "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16,
          "state_size": 8, "n_groups": 2, "vocab_size": 100, "dt_limit": [0.0, Infinity],
          "time_step_min": 0.001, "layer_norm_epsilon": 1e-05, "norm_before_gate": true})",
      R"({"model_type": "transformer", "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4,
          "num_kv_heads": 2, "qk_norm": true, "window_size": 8, "vocab_size": 100})",
      R"({"d_model": 64, "d_intermediate": 0, "n_layer": 2, "vocab_size": 97, "ssm_cfg": {"layer":
          "Mamba2", "headdim": 16, "d_state": 8}, "attn_layer_idx": [], "attn_cfg": {},
          "rms_norm": true, "residual_in_fp32": true, "fused_add_norm": true,
          "pad_vocab_size_multiple": 16, "tie_embeddings": true})"};
}

std::string valid_token_shard() {
  const std::filesystem::path path = std::filesystem::temp_directory_path() /
                                     ("efla-fuzz-seed-" + std::to_string(::getpid()) + ".tok");
  ShardWriter writer(path, 1000, "0123456789abcdef");
  writer.append_document(std::vector<int32_t>{1, 2, 3, 999}, 10, 2);
  writer.append_document(std::vector<int32_t>{7}, 1, 1);
  writer.append_document(std::vector<int32_t>{0, 5, 6}, 9, 3);
  writer.finish();
  const std::string bytes = read_file(path);
  std::filesystem::remove(path);
  return bytes;
}

}  // namespace efla::fuzz
