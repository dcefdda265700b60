// The fields of softmax attention: a transformer's own, and the `attn` field of a hybrid.
#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <set>

#include "efla/nn/config_family.h"
#include "efla/nn/config_reader.h"

namespace efla {

namespace {

using nlohmann::json;

void read_fields(FieldReader& reader, AttentionConfig& a) {
  reader.read("num_heads", a.num_heads);
  reader.read("num_kv_heads", a.num_kv_heads);
  reader.read("window_size", a.window_size);
  reader.read("rope_theta", a.rope_theta);
  reader.read("qkv_bias", a.qkv_bias);
}

json fields_json(const AttentionConfig& a) {
  return {{"num_heads", a.num_heads},
          {"num_kv_heads", optional_json(a.num_kv_heads)},
          {"window_size", optional_json(a.window_size)},
          {"rope_theta", a.rope_theta},
          {"qkv_bias", a.qkv_bias}};
}

}  // namespace

namespace attention_family {

void read(FieldReader& reader, ModelConfig& c) {
  read_fields(reader, *c.attn);
  reader.read("qk_norm", c.attn->qk_norm);
  reader.only("elementwise_affine", {true, nullptr}, "norms without weights are not implemented");
}

void write(const ModelConfig& c, json& object) {
  object.update(fields_json(*c.attn));
  object["qk_norm"] = c.attn->qk_norm;
  object["architectures"] = {"TransformerForCausalLM"};
}

void read_hybrid(FieldReader& reader, ModelConfig& c, const std::string& where) {
  const json* object = reader.object("attn");
  if (!object) return;
  const std::string inner_where = where + ": attn";
  FieldReader inner(*object, inner_where);
  for (const char* key : {"layers", "num_heads"}) {
    if (!inner.has(key)) inner.fail(key, "given, as fla requires it", nullptr);
  }
  AttentionConfig attn;
  inner.read("layers", attn.layers);
  read_fields(inner, attn);
  inner.only("qk_norm", {false}, "only transformers have it");
  inner.unused();  // refuses what it does not know
  c.attn = attn;
}

json hybrid_json(const AttentionConfig& attn) {
  json object = fields_json(attn);
  object["layers"] = attn.layers;
  object["num_kv_heads"] = attn.kv_heads();  // fla fills it in; null would be no number
  return object;
}

void validate(const ModelConfig& c, const Validator& check) {
  const AttentionConfig& a = *c.attn;
  const bool hybrid = c.model_type != "transformer";
  const std::string at = hybrid ? "attn." : "";
  check.range(at + "num_heads", a.num_heads, 1, kMaxHeads);
  check.require(c.hidden_size % a.num_heads == 0 && c.hidden_size / a.num_heads % 2 == 0,
                at + "num_heads",
                fmt::format("a divisor of hidden_size = {} that leaves heads of even size (for the "
                            "rotation)",
                            c.hidden_size),
                std::to_string(a.num_heads));
  check.require(a.kv_heads() >= 1 && a.num_heads % a.kv_heads() == 0, at + "num_kv_heads",
                fmt::format("a divisor of num_heads = {}", a.num_heads),
                std::to_string(a.kv_heads()));
  if (a.window_size) check.range(at + "window_size", *a.window_size, 1, int64_t{1} << 40);
  check.positive(at + "rope_theta", a.rope_theta, 1e12);
  if (!hybrid) {
    check.require(a.layers.empty(), "attn.layers", "empty for a transformer (every layer is one)",
                  "a list");
    return;
  }
  check.require(!a.qk_norm, "attn.qk_norm", "false in a hybrid", "true");
  std::set<int64_t> seen;
  for (const int64_t layer : a.layers) {
    check.range("attn.layers", layer, 0, c.num_hidden_layers - 1);
    check.require(seen.insert(layer).second, "attn.layers", "a list without repetitions",
                  fmt::format("one with {} twice", layer));
  }
}

int64_t mixer_parameters(const ModelConfig& c) {
  const AttentionConfig& a = *c.attn;
  const int64_t d = c.hidden_size, head = d / a.num_heads, kv = a.kv_heads() * head;
  int64_t count = 2 * d * d + 2 * d * kv;  // q, o, k, v projections
  if (a.qkv_bias) count += d + 2 * kv;
  if (a.qk_norm) count += 2 * head;
  return count;
}

int64_t state_elements_per_token(const ModelConfig& c) {
  return 2 * c.attn->kv_heads() * (c.hidden_size / c.attn->num_heads);
}

}  // namespace attention_family

}  // namespace efla
