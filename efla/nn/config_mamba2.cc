// The fields of Mamba-2, under fla's names; its older names are read too.
#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "efla/nn/config_family.h"
#include "efla/nn/config_reader.h"

namespace efla {

namespace {

using nlohmann::json;

// Until fla renamed its fields: time_step_min for dt_min, ...
void read_renamed(FieldReader& reader, const char* name, const char* old_name, double& out) {
  reader.read(old_name, out);
  reader.read(name, out);
}

void validate_initial_values(const Mamba2Config& m, const Validator& check) {
  check.require(m.a_init_low > 0 && m.a_init_low <= m.a_init_high && m.a_init_high <= 1e6,
                "A_init_range", "[low, high] with 0 < low <= high",
                fmt::format("[{}, {}]", m.a_init_low, m.a_init_high));
  check.require(m.dt_min > 0 && m.dt_min <= m.dt_max && m.dt_max <= 1e6, "dt_min",
                "above 0 and at most dt_max",
                fmt::format("{} with dt_max = {}", m.dt_min, m.dt_max));
  check.positive("dt_init_floor", m.dt_init_floor, 1e6);
}

}  // namespace

namespace mamba2_family {

void read(FieldReader& reader, ModelConfig& c) {
  Mamba2Config& m = c.mamba2;
  reader.read("head_dim", m.head_dim);
  reader.read("state_size", m.state_size);
  reader.read("expand", m.expand);
  reader.read("n_groups", m.n_groups);
  reader.read("conv_kernel", m.conv_kernel);
  reader.read("use_bias", m.use_bias);
  reader.read("use_conv_bias", m.use_conv_bias);
  reader.read("rms_norm", m.rmsnorm);
  reader.read("rmsnorm", m.rmsnorm);
  reader.read("norm_before_gate", m.norm_before_gate);
  reader.read("residual_in_fp32", m.residual_in_fp32);
  reader.read_range("time_step_limit", m.dt_limit_low, m.dt_limit_high);
  reader.read_range("dt_limit", m.dt_limit_low, m.dt_limit_high);
  reader.read_range("A_init_range", m.a_init_low, m.a_init_high);
  read_renamed(reader, "dt_min", "time_step_min", m.dt_min);
  read_renamed(reader, "dt_max", "time_step_max", m.dt_max);
  read_renamed(reader, "dt_init_floor", "time_step_floor", m.dt_init_floor);
  reader.read("rescale_prenorm_residual", m.rescale_prenorm_residual);
  reader.only("D_has_hdim", {false}, "a D for every channel is not implemented");
  reader.only("attn", {nullptr}, "Mamba-2 with softmax layers is not implemented");
  reader.without_effect("conv_init");       // first values only
  reader.without_effect("time_step_rank");  // of Mamba-1
  // A derived number that fla writes nevertheless.
  std::optional<int64_t> num_heads;
  reader.read("num_heads", num_heads);
  const bool sane = m.head_dim > 0 && m.expand > 0 && m.expand <= 16;  // validate() says the rest
  if (num_heads && sane && *num_heads != c.mamba2_heads()) {
    reader.fail("num_heads", fmt::format("hidden_size * expand / head_dim = {}", c.mamba2_heads()),
                *num_heads);
  }
}

void write(const ModelConfig& c, json& object) {
  const Mamba2Config& m = c.mamba2;
  object.update({{"architectures", {"Mamba2ForCausalLM"}},
                 {"head_dim", m.head_dim},
                 {"num_heads", c.mamba2_heads()},
                 {"state_size", m.state_size},
                 {"expand", m.expand},
                 {"n_groups", m.n_groups},
                 {"conv_kernel", m.conv_kernel},
                 {"use_bias", m.use_bias},
                 {"use_conv_bias", m.use_conv_bias},
                 {"rmsnorm", m.rmsnorm},
                 {"norm_before_gate", m.norm_before_gate},
                 {"residual_in_fp32", m.residual_in_fp32},
                 {"A_init_range", {m.a_init_low, m.a_init_high}},
                 {"dt_min", m.dt_min},
                 {"dt_max", m.dt_max},
                 {"dt_init_floor", m.dt_init_floor},
                 {"rescale_prenorm_residual", m.rescale_prenorm_residual}});
  object["dt_limit"] = json::array({number_json(m.dt_limit_low), number_json(m.dt_limit_high)});
}

void validate(const ModelConfig& c, const Validator& check) {
  const Mamba2Config& m = c.mamba2;
  check.range("head_dim", m.head_dim, 1, kMaxHeadSize);
  check.range("state_size", m.state_size, 1, kMaxHeadSize);
  check.range("conv_kernel", m.conv_kernel, 1, kMaxConvSize);
  check.positive("expand", m.expand, 16);
  const double inner = static_cast<double>(c.hidden_size) * m.expand;
  check.require(std::abs(inner - std::round(inner)) < 1e-6, "expand",
                "such that hidden_size * expand is a whole number", fmt::format("{}", m.expand));
  check.require(c.mamba2_inner_size() % m.head_dim == 0, "head_dim",
                fmt::format("a divisor of hidden_size * expand = {}", c.mamba2_inner_size()),
                std::to_string(m.head_dim));
  const int64_t heads = c.mamba2_heads();
  check.require(m.n_groups >= 1 && heads % m.n_groups == 0, "n_groups",
                fmt::format("a divisor of the {} heads (hidden_size * expand / head_dim)", heads),
                std::to_string(m.n_groups));
  check.require(m.dt_limit_low >= 0 && m.dt_limit_low <= m.dt_limit_high, "dt_limit",
                "[low, high] with 0 <= low <= high",
                fmt::format("[{}, {}]", m.dt_limit_low, m.dt_limit_high));
  validate_initial_values(m, check);
}

int64_t mixer_parameters(const ModelConfig& c) {
  const Mamba2Config& m = c.mamba2;
  const int64_t d = c.hidden_size, inner = c.mamba2_inner_size(), heads = c.mamba2_heads();
  const int64_t conv = c.mamba2_conv_size();
  const int64_t projected = inner + conv + heads;  // z, xBC, dt
  int64_t count = d * projected + conv * m.conv_kernel + 3 * heads + inner * d;
  if (m.use_bias) count += projected + d;
  if (m.use_conv_bias) count += conv;
  if (m.rmsnorm) count += inner;
  return count;
}

int64_t state_elements(const ModelConfig& c) {
  const Mamba2Config& m = c.mamba2;
  return c.mamba2_heads() * m.state_size * m.head_dim + c.mamba2_conv_size() * m.conv_kernel;
}

}  // namespace mamba2_family

int64_t ModelConfig::mamba2_inner_size() const { return scaled_size(hidden_size, mamba2.expand); }
int64_t ModelConfig::mamba2_heads() const { return mamba2_inner_size() / mamba2.head_dim; }
int64_t ModelConfig::mamba2_conv_size() const {
  return mamba2_inner_size() + 2 * mamba2.n_groups * mamba2.state_size;
}

}  // namespace efla
