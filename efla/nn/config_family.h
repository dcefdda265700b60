// What a family adds to a config: reading, writing and checking its fields, and what its mixer
// counts. One file per family; config.cc and config_json.cc hold what is common.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "efla/nn/config.h"

namespace efla {

class FieldReader;

/// Throws UsageError "WHERE: KEY must be EXPECTED, not FOUND".
class Validator {
 public:
  explicit Validator(const std::string& where) : where_(where) {}

  void require(bool ok, std::string_view key, std::string_view expected,
               std::string_view found) const;
  void range(std::string_view key, int64_t value, int64_t low, int64_t high) const;
  void positive(std::string_view key, double value, double high) const;
  void token(std::string_view key, const std::optional<int64_t>& id, int64_t vocab_size) const;

 private:
  const std::string& where_;
};

/// The largest head size of the kernels.
inline constexpr int64_t kMaxHeadSize = 512;
inline constexpr int64_t kMaxConvSize = 64;
inline constexpr int64_t kMaxHeads = 4096;

/// int(size * factor), as fla computes it; 1024 * 0.75 must not fall short by a rounding error.
int64_t scaled_size(int64_t size, double factor);

namespace delta_family {  // efla, delta_net, gated_deltanet, gated_efla
void read(FieldReader& reader, ModelConfig& config);
void write(const ModelConfig& config, nlohmann::json& object);
void validate(const ModelConfig& config, const Validator& check);
int64_t mixer_parameters(const ModelConfig& config);
int64_t state_elements(const ModelConfig& config);  // of one layer
}  // namespace delta_family

namespace mamba2_family {
void read(FieldReader& reader, ModelConfig& config);
void write(const ModelConfig& config, nlohmann::json& object);
void validate(const ModelConfig& config, const Validator& check);
int64_t mixer_parameters(const ModelConfig& config);
int64_t state_elements(const ModelConfig& config);
}  // namespace mamba2_family

namespace attention_family {  // a transformer's fields, and the `attn` field of a hybrid
void read(FieldReader& reader, ModelConfig& config);
void write(const ModelConfig& config, nlohmann::json& object);
void read_hybrid(FieldReader& reader, ModelConfig& config, const std::string& where);
nlohmann::json hybrid_json(const AttentionConfig& attn);
void validate(const ModelConfig& config, const Validator& check);
int64_t mixer_parameters(const ModelConfig& config);
int64_t state_elements_per_token(const ModelConfig& config);
}  // namespace attention_family

}  // namespace efla
