#include "efla/nn/mamba2_mixer.h"

#include <cmath>

#include "efla/nn/decay.h"
#include "efla/ops/ops.h"

namespace efla {

Mamba2Mixer::Mamba2Mixer(const ModelConfig& config, const at::TensorOptions& options)
    : config_(config.mamba2),
      inner_(config.mamba2_inner_size()),
      heads_(config.mamba2_heads()),
      layers_(config.num_hidden_layers),
      norm_eps_(config.norm_eps),
      conv_range_(config.conv_initializer_range) {
  const int64_t d = config.hidden_size, conv_size = config.mamba2_conv_size();
  in_proj_ =
      register_module("in_proj", Linear(d, inner_ + conv_size + heads_, options, config_.use_bias));
  conv_ = register_module("conv1d", ShortConv(conv_size, config_.conv_kernel, /*silu=*/true,
                                              options, config_.use_conv_bias));
  // Few numbers, and an error in them grows with the sequence.
  const at::TensorOptions wide = at_least_float(options);
  dt_bias_ = register_parameter("dt_bias", at::empty({heads_}, wide));
  a_log_ = register_parameter("A_log", at::empty({heads_}, wide));
  d_ = register_parameter("D", at::empty({heads_}, wide));
  if (config_.rmsnorm) norm_ = register_module("norm", RmsNorm(inner_, norm_eps_, options));
  out_proj_ = register_module("out_proj", Linear(inner_, d, options, config_.use_bias));
}

void Mamba2Mixer::initialize(double range) {
  in_proj_->initialize(range);
  conv_->initialize(conv_range_ > 0 ? conv_range_ : range);
  if (norm_) norm_->initialize();
  out_proj_->initialize(range);
  const torch::NoGradGuard no_grad;
  if (config_.rescale_prenorm_residual) {
    // As in fla: torch's default for a linear map, smaller by the root of the number of residuals.
    const double fan_in = static_cast<double>(inner_);
    const double bound = 1 / std::sqrt(fan_in * static_cast<double>(layers_));
    out_proj_->weight.uniform_(-bound, bound);
  }
  d_.fill_(1.0);
  initialize_a_log(a_log_, config_.a_init_low, config_.a_init_high);
  initialize_dt_bias(dt_bias_, config_.dt_min, config_.dt_max, config_.dt_init_floor);
}

at::Tensor Mamba2Mixer::step_sizes(const at::Tensor& dt) const {
  at::Tensor step = positive_step(dt, dt_bias_);
  if (config_.dt_limit_low <= 0 && std::isinf(config_.dt_limit_high)) return step;
  return at::clamp(step, config_.dt_limit_low, config_.dt_limit_high);
}

at::Tensor Mamba2Mixer::scan(const at::Tensor& x, const at::Tensor& b, const at::Tensor& c,
                             const at::Tensor& dt, const std::optional<at::Tensor>& cu_seqlens,
                             at::Tensor* state) const {
  const at::Tensor log_decay = log_decay_of(a_log_, dt);
  const bool single_token = state && x.size(1) == 1 && !cu_seqlens && !at::GradMode::is_enabled();
  if (single_token) {
    if (!state->defined()) {
      *state = at::zeros({x.size(0), heads_, b.size(-1), x.size(-1)}, dt.options());
    }
    return ops::step_(c, b, x, dt, *state, log_decay, "linear", /*scale=*/1.0);
  }
  ops::Options options;
  options.rule = "linear";
  options.scale = 1.0;
  options.log_decay = log_decay;
  options.cu_seqlens = cu_seqlens;
  options.output_final_state = state != nullptr;
  if (state && state->defined()) options.initial_state = *state;
  auto [y, final_state] = ops::chunk(c, b, x, dt, options);
  if (state) *state = final_state.detach();
  return y;
}

// norm(y * silu(z)) or norm(y) * silu(z), the mean square taken over each group of
// inner / n_groups channels.
at::Tensor Mamba2Mixer::gated_norm(const at::Tensor& y, const at::Tensor& z) const {
  if (!norm_) return ops::swiglu(z, y);
  const bool gate_first = !config_.norm_before_gate;
  const at::Tensor in = gate_first ? ops::swiglu(z, y) : y;
  std::optional<at::Tensor> gate;
  if (!gate_first) gate = z;
  if (config_.n_groups == 1) return norm_->forward(in, gate);
  const auto grouped = [&](const at::Tensor& t) {
    return t.unflatten(-1, {config_.n_groups, inner_ / config_.n_groups});
  };
  if (gate) gate = grouped(*gate);
  return ops::rms_norm(grouped(in), {}, norm_eps_, gate).flatten(-2) * norm_->weight;
}

at::Tensor Mamba2Mixer::forward(const at::Tensor& x, const std::optional<at::Tensor>& cu_seqlens,
                                Cache::Layer* cache) {
  const int64_t groups = config_.n_groups, keys = groups * config_.state_size;
  const auto projected =
      at::split_with_sizes(in_proj_->forward(x), {inner_, inner_ + 2 * keys, heads_}, -1);
  const at::Tensor xbc =
      conv_->forward(projected[1], cu_seqlens, cache ? &cache->conv_xbc : nullptr);
  const auto streams = at::split_with_sizes(xbc, {inner_, keys, keys}, -1);
  const at::Tensor values = streams[0].unflatten(-1, {heads_, config_.head_dim});
  const at::Tensor b = streams[1].unflatten(-1, {groups, config_.state_size});
  const at::Tensor c = streams[2].unflatten(-1, {groups, config_.state_size});
  const at::Tensor scanned = scan(values, b, c, step_sizes(projected[2]), cu_seqlens,
                                  cache ? &cache->recurrent_state : nullptr);
  const at::Tensor skip = values * d_.to(values.scalar_type()).unsqueeze(-1);
  return out_proj_->forward(gated_norm((scanned + skip).flatten(-2), projected[0]));
}

}  // namespace efla
