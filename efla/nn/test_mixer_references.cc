#include "efla/nn/test_mixer_references.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace efla::testing_support {

namespace {

at::Tensor swish(const at::Tensor& x) { return x * x.sigmoid(); }

at::Tensor linear(const ParameterByName& parameter, const std::string& name, bool bias,
                  const at::Tensor& x) {
  const at::Tensor y = x.matmul(parameter(name + ".weight").t());
  return bias ? y + parameter(name + ".bias") : y;
}

// The mean square over groups of the last dimension.
at::Tensor grouped_rms(const at::Tensor& x, int64_t groups, double eps) {
  const at::Tensor g = x.unflatten(-1, {groups, -1});
  return (g * (g.square().mean(-1, true) + eps).rsqrt()).flatten(-2);
}

// Position by position: the pair (i, i + D / 2) turned by t * theta^(-2i / D). x [B, H, T, D].
at::Tensor rotated(const at::Tensor& x, double theta) {
  const int64_t size = x.size(-1), half = size / 2;
  std::vector<at::Tensor> tokens;
  for (int64_t t = 0; t < x.size(2); ++t) {
    std::vector<at::Tensor> first, second;
    for (int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(t) * std::pow(theta, -2.0 * static_cast<double>(i) /
                                                                        static_cast<double>(size));
      const at::Tensor a = x.select(2, t).select(-1, i), b = x.select(2, t).select(-1, i + half);
      first.push_back(a * std::cos(angle) - b * std::sin(angle));
      second.push_back(a * std::sin(angle) + b * std::cos(angle));
    }
    first.insert(first.end(), second.begin(), second.end());
    tokens.push_back(at::stack(first, -1));
  }
  return at::stack(tokens, 2);
}

}  // namespace

at::Tensor reference_mamba2(const ModelConfig& config, const ParameterByName& parameter,
                            const at::Tensor& x) {
  const Mamba2Config& c = config.mamba2;
  const int64_t heads = config.mamba2_heads(), inner = heads * c.head_dim;
  const int64_t keys = c.n_groups * c.state_size, length = x.size(1);
  const at::Tensor projected = linear(parameter, "in_proj", c.use_bias, x);
  const at::Tensor z = projected.narrow(-1, 0, inner);
  const at::Tensor raw = projected.narrow(-1, inner, inner + 2 * keys);

  const at::Tensor filter = parameter("conv1d.weight");
  at::Tensor xbc = at::zeros_like(raw);
  for (int64_t w = 0; w < c.conv_kernel; ++w) {  // tap w reads conv_kernel - 1 - w tokens back
    const int64_t back = c.conv_kernel - 1 - w;
    const at::Tensor shifted = at::constant_pad_nd(raw, {0, 0, back, 0}).narrow(1, 0, length);
    xbc = xbc + shifted * filter.select(2, w).squeeze(1);
  }
  if (c.use_conv_bias) xbc = xbc + parameter("conv1d.bias");
  xbc = swish(xbc);
  const at::Tensor v = xbc.narrow(-1, 0, inner).unflatten(-1, {heads, -1});
  const auto per_head = [&](int64_t start) {
    return xbc.narrow(-1, start, keys)
        .unflatten(-1, {c.n_groups, -1})
        .repeat_interleave(heads / c.n_groups, 2);
  };
  const at::Tensor b = per_head(inner), cc = per_head(inner + keys);
  const at::Tensor dt =
      (1 + (projected.narrow(-1, 2 * inner + 2 * keys, heads) + parameter("dt_bias")).exp())
          .log()
          .clamp(c.dt_limit_low, c.dt_limit_high);
  const at::Tensor decay = (-parameter("A_log").exp() * dt).exp();  // [B, T, H]

  at::Tensor state = at::zeros({x.size(0), heads, c.head_dim, c.state_size}, x.options());
  std::vector<at::Tensor> outputs;
  for (int64_t t = 0; t < length; ++t) {
    const auto at_token = [&](const at::Tensor& s) { return s.select(1, t); };
    const at::Tensor write =
        (at_token(dt).unsqueeze(-1) * at_token(v)).unsqueeze(-1) * at_token(b).unsqueeze(-2);
    state = at_token(decay).unsqueeze(-1).unsqueeze(-1) * state + write;
    const at::Tensor read = (state * at_token(cc).unsqueeze(-2)).sum(-1);
    outputs.push_back(read + parameter("D").unsqueeze(-1) * at_token(v));
  }
  at::Tensor y = at::stack(outputs, 1).flatten(-2);
  if (!c.rmsnorm) {
    y = y * swish(z);
  } else if (c.norm_before_gate) {
    y = grouped_rms(y, c.n_groups, config.norm_eps) * parameter("norm.weight") * swish(z);
  } else {
    y = grouped_rms(y * swish(z), c.n_groups, config.norm_eps) * parameter("norm.weight");
  }
  return linear(parameter, "out_proj", c.use_bias, y);
}

at::Tensor reference_visible(int64_t queries, int64_t keys, int64_t window) {
  at::Tensor visible = at::zeros({queries, keys}, at::kBool);
  for (int64_t i = 0; i < queries; ++i) {
    const int64_t own = keys - queries + i;
    const int64_t first = window > 0 ? std::max<int64_t>(0, own - window + 1) : 0;
    visible.select(0, i).narrow(0, first, own + 1 - first).fill_(true);
  }
  return visible;
}

at::Tensor reference_softmax(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const at::Tensor& visible) {
  const int64_t group = q.size(1) / k.size(1);
  const at::Tensor keys = k.repeat_interleave(group, 1), values = v.repeat_interleave(group, 1);
  const at::Tensor scores = q.matmul(keys.mT()) / std::sqrt(static_cast<double>(q.size(-1)));
  const at::Tensor weights = scores.exp() * visible.to(scores.scalar_type());
  return weights.matmul(values) / weights.sum(-1, true);
}

at::Tensor reference_attention(const ModelConfig& config, const ParameterByName& parameter,
                               const at::Tensor& x) {
  const AttentionConfig& c = *config.attn;
  const int64_t size = config.hidden_size / c.num_heads;
  const auto heads = [&](const std::string& name, bool normed) {
    at::Tensor y = linear(parameter, name + "_proj", c.qkv_bias, x).unflatten(-1, {-1, size});
    if (normed) y = grouped_rms(y, 1, 1e-5) * parameter(name + "_norm.weight");
    return y.transpose(1, 2);
  };
  const at::Tensor q = rotated(heads("q", c.qk_norm), c.rope_theta);
  const at::Tensor k = rotated(heads("k", c.qk_norm), c.rope_theta);
  const at::Tensor visible = reference_visible(x.size(1), x.size(1), c.window_size.value_or(0));
  const at::Tensor o = reference_softmax(q, k, heads("v", false), visible);
  return linear(parameter, "o_proj", false, o.transpose(1, 2).flatten(-2));
}

}  // namespace efla::testing_support
