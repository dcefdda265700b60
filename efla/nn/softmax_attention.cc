#include "efla/nn/softmax_attention.h"

#include <algorithm>
#include <cmath>

namespace efla {

namespace {

constexpr int64_t kBlockQueries = 512;  // rows of the mask that exist at once
constexpr double kTwoPi = 6.283185307179586476925;

at::Tensor softmax_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const std::optional<at::Tensor>& mask, bool causal) {
  const bool grouped = q.size(1) != k.size(1);
  return at::scaled_dot_product_attention(q, k, v, mask, /*dropout_p=*/0.0, causal,
                                          /*scale=*/std::nullopt, grouped);
}

// Which of the keys [first_key, end_key) the queries at the keys [first, end) see; [1 or B, 1,
// queries, keys].
at::Tensor visible(int64_t first, int64_t end, int64_t first_key, int64_t end_key, int64_t window,
                   const std::vector<int64_t>& starts, const at::Device& device) {
  const auto options = at::TensorOptions().dtype(at::kLong).device(device);
  const at::Tensor query = at::arange(first, end, options).unsqueeze(-1);
  const at::Tensor key = at::arange(first_key, end_key, options);
  at::Tensor mask = key.le(query);
  if (window > 0) mask.logical_and_(key.gt(query - window));
  mask = mask.unsqueeze(0).unsqueeze(0);
  if (starts.empty()) return mask;
  const at::Tensor start = at::tensor(starts, at::kLong).to(device).view({-1, 1, 1, 1});
  return mask.logical_and(key.ge(start));
}

}  // namespace

RotaryTable::RotaryTable(const at::Tensor& positions, int64_t head_size, double theta,
                         at::ScalarType type) {
  const auto options = positions.options().dtype(at::kDouble);
  const double size = static_cast<double>(head_size);
  const at::Tensor frequencies =
      at::arange(head_size / 2, options).mul_(-2 * std::log(theta) / size).exp_();
  // Reduced while they are exact, so that far positions are as good as near ones.
  at::Tensor angles = (positions.to(at::kDouble).unsqueeze(-1) * frequencies).remainder_(kTwoPi);
  if (type != at::kDouble) angles = angles.to(at::kFloat);
  if (positions.dim() == 2) angles = angles.unsqueeze(1);
  cos = angles.cos();
  sin = angles.sin();
}

at::Tensor rotate(const at::Tensor& x, const RotaryTable& table) {
  const auto halves = x.to(table.cos.scalar_type()).chunk(2, -1);
  const at::Tensor &a = halves[0], &b = halves[1];
  return at::cat({a * table.cos - b * table.sin, b * table.cos + a * table.sin}, -1)
      .to(x.scalar_type());
}

at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            int64_t window, const std::vector<int64_t>& starts) {
  if (q.numel() == 0) return at::zeros_like(q);
  const int64_t queries = q.size(2), keys = k.size(2);
  if (starts.empty() && (window == 0 || window >= keys)) {
    if (queries == 1) return softmax_attention(q, k, v, {}, false);
    if (queries == keys) return softmax_attention(q, k, v, {}, true);
  }
  std::vector<at::Tensor> blocks;
  for (int64_t begin = 0; begin < queries; begin += kBlockQueries) {
    const int64_t n = std::min(kBlockQueries, queries - begin);
    const int64_t first = keys - queries + begin, end = first + n;  // the queries' own keys
    const int64_t first_key = window > 0 ? std::max<int64_t>(0, first - window + 1) : 0;
    const at::Tensor mask = visible(first, end, first_key, end, window, starts, q.device());
    const auto seen = [&](const at::Tensor& t) { return t.narrow(2, first_key, end - first_key); };
    blocks.push_back(softmax_attention(q.narrow(2, begin, n), seen(k), seen(v), mask, false));
  }
  return blocks.size() == 1 ? blocks.front() : at::cat(blocks, 2);
}

}  // namespace efla
