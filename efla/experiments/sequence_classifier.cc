#include "efla/experiments/sequence_classifier.h"

#include <ATen/CPUGeneratorImpl.h>

#include <cmath>

#include "efla/nn/decay.h"
#include "efla/ops/ops.h"

namespace efla {
namespace {

constexpr double kBetaBias = -2.0;    // the script's: beta starts at sigmoid(-2) = 0.12
constexpr double kPositionSd = 0.02;  // the script's
constexpr double kL2Eps = 1e-6;       // of the operator's l2 norm (docs/mathematics.md)
constexpr double kNormEps = 1e-5;     // torch's LayerNorm

at::Tensor uniform(at::IntArrayRef sizes, double bound, at::Generator& random) {
  return at::empty(sizes, at::kFloat).uniform_(-bound, bound, random);
}

// torch's default for a linear map and its bias: U(-1/sqrt(fan_in), 1/sqrt(fan_in)).
at::Tensor linear_default(at::IntArrayRef sizes, int64_t fan_in, at::Generator& random) {
  return uniform(sizes, 1 / std::sqrt(static_cast<double>(fan_in)), random);
}

at::Tensor xavier(int64_t out, int64_t in, at::Generator& random) {
  return uniform({out, in}, std::sqrt(6.0 / static_cast<double>(in + out)), random);
}

// z with softplus(z) = 1 / length: a decay with A = 1 then forgets a factor e over the whole image.
// The first values that language models take would forget an image before its end.
double step_bias(int64_t length) { return std::log(std::expm1(1 / static_cast<double>(length))); }

at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& scale, const at::Tensor& shift) {
  return at::layer_norm(x, {x.size(-1)}, scale, shift, kNormEps);
}

}  // namespace

SequenceClassifier::SequenceClassifier(const Arm& arm, const ClassifierShape& shape, uint64_t seed,
                                       const at::TensorOptions& options)
    : arm_(arm), shape_(shape), options_(options), layers_(static_cast<size_t>(shape.layers)) {
  const torch::NoGradGuard no_grad;
  // Drawn on the CPU whatever the device: a seed names the same first values everywhere.
  at::Generator random = at::make_generator<at::CPUGeneratorImpl>(seed);
  add_shared(random);
  add_decays(random);  // last, so that the arms share all draws before
}

at::Tensor SequenceClassifier::add(const at::Tensor& values) {
  parameters_.push_back(values.to(options_).requires_grad_(true));
  return parameters_.back();
}

void SequenceClassifier::add_shared(at::Generator& random) {
  const int64_t width = shape_.width;
  embed_ = add(linear_default({width, 1}, 1, random));
  position_ = add(at::empty({shape_.length, width}, at::kFloat).normal_(0, kPositionSd, random));
  for (Layer& layer : layers_) {
    layer.q = add(xavier(width, width, random));
    layer.k = add(xavier(width, width, random));
    layer.v = add(xavier(width, width, random));
    layer.b = add(linear_default({shape_.heads, width}, width, random));
    const bool step_size = arm_.decay == Decay::kStepSize;
    layer.b_bias =
        add(at::full({shape_.heads}, step_size ? step_bias(shape_.length) : kBetaBias, at::kFloat));
    if (!deep()) continue;
    layer.in_scale = add(at::ones({width}, at::kFloat));
    layer.in_shift = add(at::zeros({width}, at::kFloat));
    layer.out = add(xavier(width, width, random));
    layer.mlp_scale = add(at::ones({width}, at::kFloat));
    layer.mlp_shift = add(at::zeros({width}, at::kFloat));
    layer.expand = add(linear_default({2 * width, width}, width, random));
    layer.expand_bias = add(at::zeros({2 * width}, at::kFloat));
    layer.contract = add(linear_default({width, 2 * width}, 2 * width, random));
    layer.contract_bias = add(at::zeros({width}, at::kFloat));
  }
  norm_scale_ = add(at::ones({width}, at::kFloat));
  norm_shift_ = add(at::zeros({width}, at::kFloat));
  head_ = add(linear_default({shape_.classes, width}, width, random));
  head_bias_ = add(linear_default({shape_.classes}, width, random));
}

void SequenceClassifier::add_decays(at::Generator& random) {
  if (arm_.decay == Decay::kNone) return;
  for (Layer& layer : layers_) {
    layer.a_log = add(at::zeros({shape_.heads}, at::kFloat));
    if (arm_.decay != Decay::kForgetGate) continue;
    layer.a = add(linear_default({shape_.heads, shape_.width}, shape_.width, random));
    layer.dt_bias = add(at::full({shape_.heads}, step_bias(shape_.length), at::kFloat));
  }
}

SequenceClassifier::Streams SequenceClassifier::streams(const Layer& layer,
                                                        const at::Tensor& h) const {
  const auto heads = [&](const at::Tensor& t) { return t.unflatten(-1, {shape_.heads, -1}); };
  Streams s;
  s.k = heads(at::linear(h, layer.k));
  s.v = heads(at::linear(h, layer.v));
  const at::Tensor z = at::linear(h, layer.b, layer.b_bias);
  s.beta = arm_.decay == Decay::kStepSize ? at::softplus(z) : at::sigmoid(z);
  if (arm_.decay == Decay::kStepSize) s.log_decay = log_decay_of(layer.a_log, s.beta);
  if (arm_.decay == Decay::kForgetGate) {
    s.log_decay = log_decay_of(layer.a_log, positive_step(at::linear(h, layer.a), layer.dt_bias));
  }
  if (arm_.divide_values) s.v = s.v * at::rsqrt(s.k.square().sum(-1, /*keepdim=*/true) + kL2Eps);
  return s;
}

// S_T^T q_T with the raw last query and no scale.
at::Tensor SequenceClassifier::read_last(const Layer& layer, const at::Tensor& h) const {
  const Streams s = streams(layer, h);
  ops::Options options;
  options.rule = rule_name(arm_.rule);
  options.log_decay = s.log_decay;
  options.qk_l2norm = arm_.unit_keys;
  options.output_final_state = true;
  // Only the state is wanted: any tensor serves as q, and one that is there costs nothing.
  const at::Tensor state = std::get<1>(ops::chunk(s.k.detach(), s.k, s.v, s.beta, options));
  const at::Tensor last = at::linear(h.select(1, -1), layer.q).unflatten(-1, {shape_.heads, 1, -1});
  return at::matmul(last, state.to(last.scalar_type())).flatten(1);
}

at::Tensor SequenceClassifier::block(const Layer& layer, const at::Tensor& x) const {
  const at::Tensor h = layer_norm(x, layer.in_scale, layer.in_shift);
  const Streams s = streams(layer, h);
  ops::Options options;
  options.rule = rule_name(arm_.rule);
  options.log_decay = s.log_decay;
  options.qk_l2norm = arm_.unit_keys;  // of q too, which the norm of o makes irrelevant
  const at::Tensor q = at::linear(h, layer.q).unflatten(-1, {shape_.heads, -1});
  const at::Tensor o =
      ops::rms_norm(std::get<0>(ops::chunk(q, s.k, s.v, s.beta, options)), {}, kNormEps);
  const at::Tensor y = x + at::linear(o.flatten(-2), layer.out);
  const at::Tensor inner = at::gelu(
      at::linear(layer_norm(y, layer.mlp_scale, layer.mlp_shift), layer.expand, layer.expand_bias));
  return y + at::linear(inner, layer.contract, layer.contract_bias);
}

at::Tensor SequenceClassifier::forward(const at::Tensor& pixels) const {
  at::Tensor h = at::gelu(at::linear(pixels.unsqueeze(-1), embed_) + position_);
  if (deep()) {
    for (const Layer& layer : layers_) h = block(layer, h);
    h = h.select(1, -1);
  } else {
    h = read_last(layers_[0], h);
  }
  return at::linear(layer_norm(h, norm_scale_, norm_shift_), head_, head_bias_);
}

}  // namespace efla
