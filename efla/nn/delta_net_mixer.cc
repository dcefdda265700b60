#include "efla/nn/delta_net_mixer.h"

#include <cmath>

#include "efla/nn/decay.h"
#include "efla/ops/ops.h"

namespace efla {

namespace {

// fla's epsilon inside the square root of the l2 norm.
constexpr double kL2Eps = 1e-6;

// First values of the decay, as fla has them.
constexpr double kLargestA = 16, kLowestDt = 0.001, kHighestDt = 0.1, kDtFloor = 1e-4;

at::Tensor activate(const at::Tensor& x, QkActivation activation) {
  switch (activation) {
    case QkActivation::kSilu:
      return at::silu(x);
    case QkActivation::kRelu:
      return at::relu(x);
    case QkActivation::kElu:
      return at::elu(x) + 1;
    case QkActivation::kIdentity:
      return x;
  }
  return x;
}

// x * rsqrt(sum x^2 + eps) over the last dimension of size n: the RMS norm with eps / n, over
// sqrt(n).
at::Tensor l2_normalize(const at::Tensor& x) {
  const double n = static_cast<double>(x.size(-1));
  return ops::rms_norm(x, {}, kL2Eps / n) * (1 / std::sqrt(n));
}

at::Tensor normalize(const at::Tensor& x, QkNorm norm) {
  switch (norm) {
    case QkNorm::kNone:
      return x;
    case QkNorm::kL2:
      return l2_normalize(x);
    case QkNorm::kSum:
      return x / x.sum(-1, /*keepdim=*/true);
  }
  return x;
}

}  // namespace

DeltaNetMixer::DeltaNetMixer(const ModelConfig& config, const at::TensorOptions& options)
    : num_heads_(config.num_heads),
      value_heads_(config.value_heads()),
      rule_(to_string(config.rule)),
      beta_activation_(config.beta_activation),
      allow_neg_eigval_(config.allow_neg_eigval),
      qk_activation_(config.qk_activation),
      k_norm_(config.qk_norm),
      q_norm_(config.q_norm.value_or(config.qk_norm)),
      norm_in_operator_(k_norm_ == QkNorm::kL2 && q_norm_ == QkNorm::kL2),
      conv_range_(config.conv_initializer_range) {
  register_projections(config, options);
  register_convolutions(config, options);
  if (config.use_output_norm) {
    o_norm_ =
        register_module("o_norm", RmsNorm(config.head_value_size(), config.norm_eps, options));
  }
  if (config.is_gated()) {
    const at::TensorOptions wide = at_least_float(options);
    a_log_ = register_parameter("A_log", at::empty({value_heads_}, wide));
    dt_bias_ = register_parameter("dt_bias", at::empty({value_heads_}, wide));
  }
  if (beta_activation_ == BetaActivation::kAdaptive) {
    adaptive_decay_ = register_parameter("adaptive_decay", at::empty({value_heads_}, options));
  }
}

void DeltaNetMixer::register_projections(const ModelConfig& config,
                                         const at::TensorOptions& options) {
  const int64_t d = config.hidden_size, key = config.key_size(), value = config.value_size();
  q_proj_ = register_module("q_proj", Linear(d, key, options));
  k_proj_ = register_module("k_proj", Linear(d, key, options));
  v_proj_ = register_module("v_proj", Linear(d, value, options));
  if (config.is_gated()) a_proj_ = register_module("a_proj", Linear(d, value_heads_, options));
  if (config.use_beta) b_proj_ = register_module("b_proj", Linear(d, value_heads_, options));
  if (config.use_gate) g_proj_ = register_module("g_proj", Linear(d, value, options));
  o_proj_ = register_module("o_proj", Linear(value, d, options));
}

void DeltaNetMixer::register_convolutions(const ModelConfig& config,
                                          const at::TensorOptions& options) {
  if (!config.use_short_conv) return;
  const auto conv = [&](int64_t channels, bool silu) {
    return ShortConv(channels, config.conv_size, silu, options);
  };
  const bool qk_silu = qk_activation_ == QkActivation::kSilu;
  q_conv_ = register_module("q_conv1d", conv(config.key_size(), qk_silu));
  k_conv_ = register_module("k_conv1d", conv(config.key_size(), qk_silu));
  v_conv_ = register_module("v_conv1d", conv(config.value_size(), true));
}

void DeltaNetMixer::initialize(double range) {
  for (const Linear& linear : {q_proj_, k_proj_, v_proj_, a_proj_, b_proj_, g_proj_, o_proj_}) {
    if (linear) linear.ptr()->initialize(range);
  }
  for (const ShortConv& conv : {q_conv_, k_conv_, v_conv_}) {
    if (conv) conv.ptr()->initialize(conv_range_ > 0 ? conv_range_ : range);
  }
  if (o_norm_) o_norm_->initialize();
  if (a_proj_) {
    initialize_a_log(a_log_, 0, kLargestA);
    initialize_dt_bias(dt_bias_, kLowestDt, kHighestDt, kDtFloor);
  }
  if (adaptive_decay_.defined()) {
    const torch::NoGradGuard no_grad;
    adaptive_decay_.fill_(std::log(std::expm1(1.0)));  // softplus(a) = 1
  }
}

at::Tensor DeltaNetMixer::stream(const at::Tensor& x, const Linear& projection,
                                 const ShortConv& conv, QkActivation activation, int64_t heads,
                                 const std::optional<at::Tensor>& cu_seqlens,
                                 at::Tensor* tail) const {
  at::Tensor y = projection->forward(x);
  if (conv) y = conv->forward(y, cu_seqlens, tail);
  // SiLU is part of the convolution.
  if (!conv || activation != QkActivation::kSilu) y = activate(y, activation);
  return y.unflatten(-1, {heads, -1});
}

at::Tensor DeltaNetMixer::beta(const at::Tensor& x) const {
  if (!b_proj_) {
    return at::full({x.size(0), x.size(1), value_heads_}, allow_neg_eigval_ ? 2.0 : 1.0,
                    x.options());
  }
  at::Tensor z = b_proj_->forward(x);
  if (z.scalar_type() != at::kDouble) z = z.to(at::kFloat);  // few numbers, read in float32 anyway
  at::Tensor beta =
      beta_activation_ == BetaActivation::kSoftplus ? at::softplus(z) : at::sigmoid(z);
  if (beta_activation_ == BetaActivation::kAdaptive) {
    beta = beta * at::softplus(adaptive_decay_.to(z.scalar_type()));
  }
  return allow_neg_eigval_ ? beta * 2 : beta;
}

std::optional<at::Tensor> DeltaNetMixer::log_decay(const at::Tensor& x) const {
  if (!a_proj_) return std::nullopt;
  return log_decay_of(a_log_, positive_step(a_proj_->forward(x), dt_bias_));
}

at::Tensor DeltaNetMixer::recurrence(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                     const at::Tensor& beta,
                                     const std::optional<at::Tensor>& log_decay,
                                     const std::optional<at::Tensor>& cu_seqlens,
                                     at::Tensor* state) const {
  const bool single_token = state && q.size(1) == 1 && !cu_seqlens && !at::GradMode::is_enabled();
  if (single_token) {
    if (!state->defined()) {
      const auto dtype = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
      *state =
          at::zeros({q.size(0), value_heads_, k.size(-1), v.size(-1)}, q.options().dtype(dtype));
    }
    return ops::step_(q, k, v, beta, *state, log_decay, rule_, {}, {}, norm_in_operator_);
  }
  ops::Options options;
  options.rule = rule_;
  options.log_decay = log_decay;
  options.cu_seqlens = cu_seqlens;
  options.qk_l2norm = norm_in_operator_;
  options.output_final_state = state != nullptr;
  if (state && state->defined()) options.initial_state = *state;
  auto [o, final_state] = ops::chunk(q, k, v, beta, options);
  if (state) *state = final_state.detach();
  return o;
}

at::Tensor DeltaNetMixer::output(const at::Tensor& o, const at::Tensor& x) const {
  std::optional<at::Tensor> gate;
  if (g_proj_) gate = g_proj_->forward(x).unflatten(-1, {value_heads_, -1});
  if (o_norm_) return o_proj_->forward(o_norm_->forward(o, gate).flatten(-2));
  return o_proj_->forward((gate ? ops::swiglu(*gate, o) : o).flatten(-2));
}

at::Tensor DeltaNetMixer::forward(const at::Tensor& x, const std::optional<at::Tensor>& cu_seqlens,
                                  Cache::Layer* cache) {
  const auto tail = [&](at::Tensor Cache::Layer::*member) {
    return cache ? &(cache->*member) : nullptr;
  };
  at::Tensor q = stream(x, q_proj_, q_conv_, qk_activation_, num_heads_, cu_seqlens,
                        tail(&Cache::Layer::conv_q));
  at::Tensor k = stream(x, k_proj_, k_conv_, qk_activation_, num_heads_, cu_seqlens,
                        tail(&Cache::Layer::conv_k));
  const at::Tensor v = stream(x, v_proj_, v_conv_, QkActivation::kSilu, value_heads_, cu_seqlens,
                              tail(&Cache::Layer::conv_v));
  if (!norm_in_operator_) {
    q = normalize(q, q_norm_);
    k = normalize(k, k_norm_);
  }
  const at::Tensor o =
      recurrence(q, k, v, beta(x), log_decay(x), cu_seqlens, tail(&Cache::Layer::recurrent_state));
  return output(o, x);
}

}  // namespace efla
