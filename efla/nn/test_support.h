// What the model's tests share: small configs, one for every switch, weights that all matter, and
// the whole model once more in plain float64 tensor operations, token by token.
#pragma once

#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "efla/nn/language_model.h"

namespace efla::testing_support {

/// A named config; a variant turns one switch of the base.
struct Variant {
  std::string name;
  ModelConfig config;
};
inline void PrintTo(const Variant& variant, std::ostream* out) { *out << variant.name; }
std::vector<Variant> variants();  // every family; a further one joins here
Variant variant(const std::string& name);
inline std::string variant_name(const ::testing::TestParamInfo<Variant>& info) {
  return info.param.name;
}

/// A model of the config whose every parameter influences the output (seeded).
LanguageModel random_model(const ModelConfig& config, at::ScalarType dtype = at::kFloat,
                           uint64_t seed = 1);
/// A model of `config` and `dtype` with the values of `source`'s parameters.
LanguageModel copy_model(const LanguageModel& source, const ModelConfig& config,
                         at::ScalarType dtype);

/// Tokens [batch, length] below vocab_size (seeded).
at::Tensor random_tokens(const ModelConfig& config, int64_t batch, int64_t length,
                         uint64_t seed = 7);

/// Logits [B, T, vocab] in float64 by the equations of docs/mathematics.md, "The layer", and
/// docs/models.md.
at::Tensor reference_logits(const LanguageModel& model, const at::Tensor& input_ids);

/// |a - b| / |b| over all elements, in float64.
double relative_error(const at::Tensor& a, const at::Tensor& b);

}  // namespace efla::testing_support
