#include "efla/nn/test_support.h"

#include <cmath>

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

// The common coefficient of erase and write (0 erase for the linear rule is handled by the caller).
at::Tensor coefficient(Rule rule, const at::Tensor& beta, const at::Tensor& lambda) {
  const at::Tensor x = beta * lambda;
  switch (rule) {
    case Rule::kExact:
      return (1 - (-x).exp()) / lambda;
    case Rule::kRk2:
      return beta * (1 - x / 2);
    case Rule::kRk4:
      return beta * (1 - x / 2 + x.square() / 6 - x.pow(3) / 24);
    default:
      return beta;
  }
}

// q, k [B,T,H,K], v [B,T,H,V], beta [B,T,H].
at::Tensor recurrence(Rule rule, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                      const at::Tensor& beta) {
  const at::Tensor c = coefficient(rule, beta, k.square().sum(-1)).unsqueeze(-1).unsqueeze(-1);
  at::Tensor state = at::zeros({q.size(0), q.size(2), k.size(3), v.size(3)}, q.options());
  std::vector<at::Tensor> outputs;
  for (int64_t t = 0; t < q.size(1); ++t) {
    const at::Tensor kt = k.select(1, t).unsqueeze(-1);  // [B,H,K,1]
    const at::Tensor vt = v.select(1, t).unsqueeze(-2);  // [B,H,1,V]
    const at::Tensor qt = q.select(1, t).unsqueeze(-2);  // [B,H,1,K]
    const at::Tensor erased = rule == Rule::kLinear ? at::zeros_like(vt) : kt.mT().matmul(state);
    state = state + c.select(1, t) * kt.matmul(vt - erased);
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
    at::Tensor x = parameters_["model.embeddings.weight"].index({ids});
    for (int64_t i = 0; i < config_.num_hidden_layers; ++i) {
      const std::string layer = "model.layers." + std::to_string(i) + ".";
      x = x + attention(layer + "attn.", normed(x, layer + "attn_norm"));
      const at::Tensor h = normed(x, layer + "mlp_norm");
      const at::Tensor gate = linear(h, layer + "mlp.gate_proj");
      x = x +
          linear(gate * gate.sigmoid() * linear(h, layer + "mlp.up_proj"), layer + "mlp.down_proj");
    }
    x = normed(x, "model.norm");
    return linear(x, config_.tie_word_embeddings ? "model.embeddings" : "lm_head");
  }

 private:
  at::Tensor linear(const at::Tensor& x, const std::string& name) const {
    return x.matmul(parameters_[name + ".weight"].t());
  }
  at::Tensor normed(const at::Tensor& x, const std::string& name) const {
    return rms(x, parameters_[name + ".weight"], config_.norm_eps);
  }
  at::Tensor heads(const at::Tensor& x) const {
    return x.reshape({x.size(0), x.size(1), config_.num_heads, -1});
  }
  at::Tensor stream(const at::Tensor& x, const std::string& prefix, const std::string& name,
                    QkActivation activation) const {
    at::Tensor y = linear(x, prefix + name + "_proj");
    if (config_.use_short_conv) y = convolve(y, parameters_[prefix + name + "_conv1d.weight"]);
    return heads(activate(y, activation));
  }
  at::Tensor beta(const at::Tensor& x, const std::string& prefix) const {
    at::Tensor beta = at::ones({x.size(0), x.size(1), config_.num_heads}, x.options());
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
  at::Tensor attention(const std::string& prefix, const at::Tensor& x) const {
    const auto l2 = [](const at::Tensor& t, QkNorm norm) {
      return norm == QkNorm::kL2 ? t * (t.square().sum(-1, true) + 1e-6).rsqrt() : t;
    };
    const at::Tensor q =
        l2(stream(x, prefix, "q", config_.qk_activation), config_.q_norm.value_or(config_.qk_norm));
    const at::Tensor k = l2(stream(x, prefix, "k", config_.qk_activation), config_.qk_norm);
    const at::Tensor v = stream(x, prefix, "v", QkActivation::kSilu);
    at::Tensor o = normed(recurrence(config_.rule, q, k, v, beta(x, prefix)), prefix + "o_norm");
    if (config_.use_gate) {
      const at::Tensor g = heads(linear(x, prefix + "g_proj"));
      o = o * g * g.sigmoid();
    }
    return linear(o.flatten(2), prefix + "o_proj");
  }

  ModelConfig config_;
  torch::OrderedDict<std::string, at::Tensor> parameters_;
};

}  // namespace

std::vector<Variant> variants() {
  std::vector<Variant> out;
  const auto efla = [&](const std::string& name, const auto& change) {
    out.push_back({"efla_" + name, base(ModelConfig())});
    change(out.back().config);
  };
  const auto delta_net = [&](const std::string& name, const auto& change) {
    out.push_back({"delta_net_" + name, base(ModelConfig::delta_net())});
    change(out.back().config);
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
  delta_net("plain", [](ModelConfig&) {});
  delta_net("negative_eigenvalues", [](ModelConfig& c) { c.allow_neg_eigval = true; });
  delta_net("gate_expand", [](ModelConfig& c) {
    c.use_gate = true;
    c.expand_k = 0.5;
    c.expand_v = 1.5;
  });
  delta_net("relu", [](ModelConfig& c) { c.qk_activation = QkActivation::kRelu; });
  delta_net("elu", [](ModelConfig& c) { c.qk_activation = QkActivation::kElu; });
  delta_net("identity_no_conv", [](ModelConfig& c) {
    c.qk_activation = QkActivation::kIdentity;
    c.use_short_conv = false;
  });
  delta_net("conv_2", [](ModelConfig& c) { c.conv_size = 2; });
  return out;
}

LanguageModel random_model(const ModelConfig& config, at::ScalarType dtype, uint64_t seed) {
  torch::manual_seed(seed);
  LanguageModel model(config, at::TensorOptions().dtype(at::kDouble), WeightInit::kNone);
  const torch::NoGradGuard no_grad;
  for (auto& p : model->named_parameters()) {
    at::Tensor& w = p.value();
    if (w.dim() == 1) {
      w.normal_(1.0, 0.1);  // norms; adaptive_decay
    } else if (w.dim() == 3) {
      w.normal_(0.0, 0.5);  // convolutions
    } else {
      const bool table = p.key() == "model.embeddings.weight";
      w.normal_(0.0, table ? 1.0 : 1.0 / std::sqrt(static_cast<double>(w.size(1))));
    }
  }
  model->to(dtype);
  return model;
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
