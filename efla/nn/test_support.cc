#include "efla/nn/test_support.h"

#include <cmath>
#include <stdexcept>

#include "efla/nn/test_mixer_references.h"

namespace efla::testing_support {

namespace {

ModelConfig base(ModelConfig config) {
  config.vocab_size = 61;
  config.hidden_size = 32;
  config.num_hidden_layers = 2;
  config.num_heads = 2;
  config.intermediate_size = 40;
  return config;
}

at::Tensor rms(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return x * (x.square().mean(-1, true) + eps).rsqrt() * weight;
}

// y[t] = sum_w weight[d, 0, w] x[t - W + 1 + w], zeros before the start.
at::Tensor convolve(const at::Tensor& x, const at::Tensor& weight) {
  const int64_t width = weight.size(2), length = x.size(1);
  const at::Tensor padded = at::constant_pad_nd(x, {0, 0, width - 1, 0});
  at::Tensor y = at::zeros_like(x);
  for (int64_t w = 0; w < width; ++w) {
    y = y + padded.narrow(1, w, length) * weight.select(2, w).squeeze(1);
  }
  return y;
}

at::Tensor activate(const at::Tensor& x, QkActivation activation) {
  switch (activation) {
    case QkActivation::kSilu:
      return x * x.sigmoid();
    case QkActivation::kRelu:
      return x.clamp_min(0);
    case QkActivation::kElu:
      return at::where(x > 0, x + 1, x.exp());
    case QkActivation::kIdentity:
      return x;
  }
  return x;
}

// phi(x) = (1 - e^{-x}) / x, phi(0) = 1.
at::Tensor phi(const at::Tensor& x) {
  return at::where(x.abs() < 1e-12, at::ones_like(x), -at::expm1(-x) / x);
}

struct Coefficients {
  at::Tensor gate, erase, write;  // log of the state's decay, what is removed, what is added
};

// The table of efla/flow/step_rule.h; g: log-decay, undefined without one. All [B,T,H].
Coefficients coefficients(Rule rule, const at::Tensor& beta, const at::Tensor& lambda,
                          const at::Tensor& g) {
  const at::Tensor x = beta * lambda;
  const at::Tensor gate = g.defined() ? g : at::zeros_like(beta);
  at::Tensor c = beta;
  switch (rule) {
    case Rule::kLinear:
      return {gate, at::zeros_like(beta), beta};
    case Rule::kEuler:
      break;
    case Rule::kRk2:
      c = beta * (1 - x / 2);
      break;
    case Rule::kRk4:
      c = beta * (1 - x / 2 + x.square() / 6 - x.pow(3) / 24);
      break;
    case Rule::kExact: {
      const at::Tensor a = gate.exp();
      return {a - 1, a * beta * phi(a * x), beta * phi(1 - a + a * x)};
    }
    case Rule::kExactLog:
      return {gate, beta * phi(x), beta * phi(x - gate)};
  }
  return {gate, c, c};
}

// q, k [B,T,H,K], v [B,T,HV,V], beta [B,T,HV], g [B,T,HV] or undefined.
at::Tensor recurrence(Rule rule, at::Tensor q, at::Tensor k, const at::Tensor& v,
                      const at::Tensor& beta, const at::Tensor& g) {
  q = q.repeat_interleave(v.size(2) / q.size(2), 2);
  k = k.repeat_interleave(v.size(2) / k.size(2), 2);
  const auto [gate, erase, write] = coefficients(rule, beta, k.square().sum(-1), g);
  at::Tensor state = at::zeros({q.size(0), q.size(2), k.size(3), v.size(3)}, q.options());
  std::vector<at::Tensor> outputs;
  for (int64_t t = 0; t < q.size(1); ++t) {
    const auto scalar = [t](const at::Tensor& s) {
      return s.select(1, t).unsqueeze(-1).unsqueeze(-1);
    };
    const at::Tensor kt = k.select(1, t).unsqueeze(-1);  // [B,H,K,1]
    const at::Tensor vt = v.select(1, t).unsqueeze(-2);  // [B,H,1,V]
    const at::Tensor qt = q.select(1, t).unsqueeze(-2);  // [B,H,1,K]
    const at::Tensor kept = state - scalar(erase) * kt.matmul(kt.mT().matmul(state));
    state = scalar(gate).exp() * kept + scalar(write) * kt.matmul(vt);
    outputs.push_back(qt.matmul(state).squeeze(-2) / std::sqrt(static_cast<double>(q.size(3))));
  }
  return at::stack(outputs, 1);
}

class Reference {
 public:
  Reference(const LanguageModel& model, const ModelConfig& config) : config_(config) {
    for (const auto& p : model->named_parameters()) {
      parameters_.insert(p.key(), p.value().detach().to(at::kDouble));
    }
  }

  at::Tensor logits(const at::Tensor& ids) const {
    const bool mamba2 = config_.model_type == "mamba2";
    const std::string model = mamba2 ? "backbone." : "model.";
    at::Tensor x = parameters_[model + "embeddings.weight"].index({ids});
    for (int64_t i = 0; i < config_.num_hidden_layers; ++i) {
      const std::string layer = model + "layers." + std::to_string(i) + ".";
      const at::Tensor in = normed(x, layer + (mamba2 ? "norm" : "attn_norm"));
      x = x + mixer(i, layer + (mamba2 ? "mixer." : "attn."), in);
      if (!config_.has_mlp()) continue;
      const at::Tensor h = normed(x, layer + "mlp_norm");
      const at::Tensor gate = linear(h, layer + "mlp.gate_proj");
      x = x +
          linear(gate * gate.sigmoid() * linear(h, layer + "mlp.up_proj"), layer + "mlp.down_proj");
    }
    x = normed(x, model + (mamba2 ? "norm_f" : "norm"));
    return linear(x, config_.tie_word_embeddings ? model + "embeddings" : "lm_head");
  }

 private:
  at::Tensor linear(const at::Tensor& x, const std::string& name) const {
    return x.matmul(parameters_[name + ".weight"].t());
  }
  at::Tensor normed(const at::Tensor& x, const std::string& name) const {
    return rms(x, parameters_[name + ".weight"], config_.norm_eps);
  }
  static at::Tensor heads(const at::Tensor& x, int64_t count) {
    return x.reshape({x.size(0), x.size(1), count, -1});
  }
  at::Tensor stream(const at::Tensor& x, const std::string& prefix, const std::string& name,
                    QkActivation activation, int64_t count) const {
    at::Tensor y = linear(x, prefix + name + "_proj");
    if (config_.use_short_conv) y = convolve(y, parameters_[prefix + name + "_conv1d.weight"]);
    return heads(activate(y, activation), count);
  }
  at::Tensor beta(const at::Tensor& x, const std::string& prefix) const {
    at::Tensor beta = at::ones({x.size(0), x.size(1), config_.value_heads()}, x.options());
    if (config_.use_beta) {
      const at::Tensor z = linear(x, prefix + "b_proj");
      beta =
          config_.beta_activation == BetaActivation::kSoftplus ? (1 + z.exp()).log() : z.sigmoid();
    }
    if (config_.beta_activation == BetaActivation::kAdaptive) {
      beta = beta * (1 + parameters_[prefix + "adaptive_decay"].exp()).log();
    }
    return config_.allow_neg_eigval ? 2 * beta : beta;
  }
  at::Tensor log_decay(const at::Tensor& x, const std::string& prefix) const {
    if (!config_.is_gated()) return {};
    const at::Tensor dt =
        (1 + (linear(x, prefix + "a_proj") + parameters_[prefix + "dt_bias"]).exp()).log();
    return -parameters_[prefix + "A_log"].exp() * dt;
  }
  static at::Tensor normalized(const at::Tensor& t, QkNorm norm) {
    if (norm == QkNorm::kL2) return t * (t.square().sum(-1, true) + 1e-6).rsqrt();
    return norm == QkNorm::kSum ? t / t.sum(-1, true) : t;
  }
  at::Tensor mixer(int64_t layer, const std::string& prefix, const at::Tensor& x) const {
    const auto parameter = [&](const std::string& name) { return parameters_[prefix + name]; };
    switch (config_.mixer_kind(layer)) {
      case MixerKind::kMamba2:
        return reference_mamba2(config_, parameter, x);
      case MixerKind::kAttention:
        return reference_attention(config_, parameter, x);
      case MixerKind::kDelta:
        break;
    }
    return delta_rule(prefix, x);
  }
  at::Tensor delta_rule(const std::string& prefix, const at::Tensor& x) const {
    const at::Tensor q =
        normalized(stream(x, prefix, "q", config_.qk_activation, config_.num_heads),
                   config_.q_norm.value_or(config_.qk_norm));
    const at::Tensor k = normalized(
        stream(x, prefix, "k", config_.qk_activation, config_.num_heads), config_.qk_norm);
    const at::Tensor v = stream(x, prefix, "v", QkActivation::kSilu, config_.value_heads());
    at::Tensor o = recurrence(config_.rule, q, k, v, beta(x, prefix), log_decay(x, prefix));
    if (config_.use_output_norm) o = normed(o, prefix + "o_norm");
    if (config_.use_gate) {
      const at::Tensor g = heads(linear(x, prefix + "g_proj"), config_.value_heads());
      o = o * g * g.sigmoid();
    }
    return linear(o.flatten(2), prefix + "o_proj");
  }

  ModelConfig config_;
  torch::OrderedDict<std::string, at::Tensor> parameters_;
};

}  // namespace

namespace {

// Adds `base` under `name` after `change` to it.
using Change = void (*)(ModelConfig&);
void add(std::vector<Variant>& out, const std::string& name, const ModelConfig& config,
         Change change) {
  out.push_back({name, base(config)});
  change(out.back().config);
}

void add_efla(std::vector<Variant>& out) {
  const auto efla = [&](const std::string& name, Change change) {
    add(out, "efla_" + name, ModelConfig(), change);
  };
  efla("sigmoid", [](ModelConfig&) {});
  efla("softplus", [](ModelConfig& c) { c.beta_activation = BetaActivation::kSoftplus; });
  efla("adaptive", [](ModelConfig& c) { c.beta_activation = BetaActivation::kAdaptive; });
  efla("unit_keys", [](ModelConfig& c) { c.qk_norm = QkNorm::kL2; });
  efla("unit_queries", [](ModelConfig& c) { c.q_norm = QkNorm::kL2; });
  efla("unit_keys_raw_queries", [](ModelConfig& c) {
    c.qk_norm = QkNorm::kL2;
    c.q_norm = QkNorm::kNone;
  });
  efla("gate", [](ModelConfig& c) { c.use_gate = true; });
  efla("no_conv", [](ModelConfig& c) { c.use_short_conv = false; });
  efla("no_beta", [](ModelConfig& c) { c.use_beta = false; });
  efla("no_output_norm", [](ModelConfig& c) { c.use_output_norm = false; });
  efla("gate_alone", [](ModelConfig& c) {
    c.use_output_norm = false;
    c.use_gate = true;
  });
  efla("tied", [](ModelConfig& c) { c.tie_word_embeddings = true; });
  efla("rk4_unit_keys", [](ModelConfig& c) {
    c.rule = Rule::kRk4;
    c.qk_norm = QkNorm::kL2;
  });
  efla("rk2_unit_keys", [](ModelConfig& c) {
    c.rule = Rule::kRk2;
    c.qk_norm = QkNorm::kL2;
  });
  efla("linear", [](ModelConfig& c) { c.rule = Rule::kLinear; });
}

void add_delta_net(std::vector<Variant>& out) {
  const auto delta_net = [&](const std::string& name, Change change) {
    add(out, "delta_net_" + name, ModelConfig::delta_net(), change);
  };
  delta_net("plain", [](ModelConfig&) {});
  delta_net("negative_eigenvalues", [](ModelConfig& c) { c.allow_neg_eigval = true; });
  delta_net("gate_expand", [](ModelConfig& c) {
    c.use_gate = true;
    c.expand_k = 0.5;
    c.expand_v = 1.5;
  });
  delta_net("relu", [](ModelConfig& c) { c.qk_activation = QkActivation::kRelu; });
  delta_net("elu", [](ModelConfig& c) { c.qk_activation = QkActivation::kElu; });
  delta_net("sum", [](ModelConfig& c) {
    c.qk_activation = QkActivation::kElu;  // positive, so that the sum is a norm
    c.qk_norm = QkNorm::kSum;
  });
  delta_net("identity_no_conv", [](ModelConfig& c) {
    c.qk_activation = QkActivation::kIdentity;
    c.use_short_conv = false;
  });
  delta_net("conv_2", [](ModelConfig& c) { c.conv_size = 2; });
}

// Heads of 12 keys and 24 values, so that nothing works by a coincidence of sizes.
ModelConfig small_gated(const std::string& model_type) {
  ModelConfig config = ModelConfig::of_type(model_type);
  config.head_dim = 12;
  return config;
}

void add_gated(std::vector<Variant>& out) {
  const ModelConfig net = small_gated("gated_deltanet"), efla = small_gated("gated_efla");
  add(out, "gated_deltanet_plain", net, [](ModelConfig&) {});
  add(out, "gated_deltanet_grouped", net, [](ModelConfig& c) {
    c.num_v_heads = 4;
    c.use_gate = false;
    c.expand_v = 0.5;
  });
  add(out, "gated_deltanet_negative_eigenvalues", net,
      [](ModelConfig& c) { c.allow_neg_eigval = true; });
  add(out, "gated_efla_rate", efla, [](ModelConfig&) {});
  add(out, "gated_efla_log", efla, [](ModelConfig& c) { c.rule = Rule::kExactLog; });
  add(out, "gated_efla_grouped", efla, [](ModelConfig& c) {
    c.num_v_heads = 6;
    c.beta_activation = BetaActivation::kAdaptive;
    c.qk_norm = QkNorm::kL2;
  });
}

}  // namespace

std::vector<Variant> variants() {
  std::vector<Variant> out;
  add_efla(out);
  add_delta_net(out);
  add_gated(out);
  const auto hybrid = [](ModelConfig& c) {
    c.attn = AttentionConfig();
    c.attn->layers = {1};
    c.attn->num_heads = 4;
    c.attn->num_kv_heads = 2;
  };
  add(out, "hybrid_delta_net", ModelConfig::delta_net(), hybrid);
  add(out, "hybrid_gated_deltanet", small_gated("gated_deltanet"), hybrid);
  add(out, "transformer_plain", ModelConfig::of_type("transformer"),
      [](ModelConfig& c) { c.attn->num_heads = 2; });
  add(out, "transformer_everything", ModelConfig::of_type("transformer"), [](ModelConfig& c) {
    c.attn->num_heads = 4;
    c.attn->num_kv_heads = 1;
    c.attn->window_size = 7;
    c.attn->qkv_bias = true;
    c.attn->qk_norm = true;
  });
  ModelConfig mamba2 = ModelConfig::of_type("mamba2");
  mamba2.mamba2.head_dim = 16;
  mamba2.mamba2.state_size = 12;
  add(out, "mamba2_plain", mamba2, [](ModelConfig&) {});
  add(out, "mamba2_grouped", mamba2, [](ModelConfig& c) {
    c.mamba2.n_groups = 2;
    c.mamba2.use_bias = true;
    c.mamba2.use_conv_bias = false;
    c.mamba2.norm_before_gate = true;
    c.mamba2.dt_limit_high = 0.1;
  });
  add(out, "mamba2_grouped_gate_first", mamba2, [](ModelConfig& c) {
    c.mamba2.n_groups = 4;
    c.mamba2.dt_limit_low = 0.03;
    c.tie_word_embeddings = true;
  });
  add(out, "mamba2_gate_alone", mamba2, [](ModelConfig& c) { c.mamba2.rmsnorm = false; });
  return out;
}

Variant variant(const std::string& name) {
  for (const Variant& v : variants()) {
    if (v.name == name) return v;
  }
  throw std::out_of_range("no variant is called " + name);
}

namespace {

// Values with which every parameter matters: decays that remember some ten tokens, norms near one.
void randomize(const std::string& name, at::Tensor& w) {
  if (name.ends_with("A_log")) {
    w.uniform_(1, 8).log_();
  } else if (name.ends_with("dt_bias")) {
    w.normal_(-3.0, 0.7);
  } else if (name.ends_with(".bias")) {
    w.normal_(0.0, 0.2);
  } else if (w.dim() == 1) {
    w.normal_(1.0, 0.1);  // norms; adaptive_decay; D
  } else if (w.dim() == 3) {
    w.normal_(0.0, 0.5);  // convolutions
  } else {
    const bool table = name.ends_with("embeddings.weight");
    w.normal_(0.0, table ? 1.0 : 1.0 / std::sqrt(static_cast<double>(w.size(1))));
  }
}

}  // namespace

LanguageModel random_model(const ModelConfig& config, at::ScalarType dtype, uint64_t seed) {
  torch::manual_seed(seed);
  LanguageModel model(config, at::TensorOptions().dtype(at::kDouble), WeightInit::kNone);
  const torch::NoGradGuard no_grad;
  for (auto& p : model->named_parameters()) randomize(p.key(), p.value());
  return dtype == at::kDouble ? model : copy_model(model, config, dtype);
}

LanguageModel copy_model(const LanguageModel& source, const ModelConfig& config,
                         at::ScalarType dtype) {
  LanguageModel model(config, at::TensorOptions().dtype(dtype), WeightInit::kNone);
  const torch::NoGradGuard no_grad;
  const auto values = source->named_parameters();
  for (auto& p : model->named_parameters()) p.value().copy_(values[p.key()]);
  return model;
}

at::Tensor random_tokens(const ModelConfig& config, int64_t batch, int64_t length, uint64_t seed) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  return at::randint(config.vocab_size, {batch, length}, generator,
                     at::TensorOptions().dtype(at::kLong));
}

at::Tensor reference_logits(const LanguageModel& model, const at::Tensor& input_ids) {
  const torch::NoGradGuard no_grad;
  return Reference(model, model->config()).logits(input_ids);
}

double relative_error(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor expected = b.detach().to(at::kDouble);
  const at::Tensor difference = a.detach().to(at::kDouble) - expected;
  const double norm = expected.norm().item<double>();
  const double error = difference.norm().item<double>();
  return norm > 0 ? error / norm : error;
}

}  // namespace efla::testing_support
