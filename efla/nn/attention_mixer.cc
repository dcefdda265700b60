#include "efla/nn/attention_mixer.h"

#include <algorithm>
#include <functional>

#include "efla/nn/softmax_attention.h"

namespace efla {

namespace {

// fla builds the norms of queries and keys with its norm's own default, whatever norm_eps says.
constexpr double kQkNormEps = 1e-5;

// The cache of a layer: slots [0, used) of keys and values, in which every sequence stands at the
// end, so that a batch of new tokens goes to the same slots of every row. Sequences that are
// shorter have zeros before them. Of a window no more is kept than the next token sees.
int64_t used_slots(const std::vector<int64_t>& lengths, int64_t window) {
  const int64_t longest = lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
  return window > 0 ? std::min(longest, window - 1) : longest;
}

std::vector<int64_t> read(const at::Tensor& numbers) {
  const at::Tensor host = numbers.to(at::kCPU, at::kLong).contiguous();
  const int64_t* data = host.const_data_ptr<int64_t>();
  return {data, data + host.numel()};
}

// Where the documents of a packed batch begin and end. On a GPU this waits for the device.
std::vector<int64_t> read_offsets(const at::Tensor& cu_seqlens, int64_t tokens) {
  const std::vector<int64_t> offsets = read(cu_seqlens);
  TORCH_CHECK(!offsets.empty() && offsets.front() >= 0 && offsets.back() <= tokens &&
                  std::is_sorted(offsets.begin(), offsets.end()),
              "cu_seqlens must not decrease and must lie in [0, T = ", tokens, "], got ",
              at::IntArrayRef(offsets));
  return offsets;
}

// What every sequence has seen so far.
std::vector<int64_t> lengths_of(const Cache::Layer* cache, int64_t sequences) {
  if (cache && cache->lengths.defined()) return read(cache->lengths);
  return std::vector<int64_t>(sequences, 0);
}

// Slots [0, used + n) of the cache, the last n of them `fresh` [B, Hkv, n, D]. Room for more tokens
// is made by doubling and filled in place; where autograd may keep the result, and of a window,
// which moves, it is a new tensor.
at::Tensor append(at::Tensor& cached, int64_t used, const at::Tensor& fresh, bool in_place) {
  if (!cached.defined() && !in_place) return fresh;
  if (!in_place) return at::cat({cached.narrow(2, 0, used), fresh}, 2);
  const int64_t needed = used + fresh.size(2);
  const int64_t room = cached.defined() ? cached.size(2) : 0;
  if (!cached.defined() || room < needed) {
    const at::Tensor larger = at::empty(
        {fresh.size(0), fresh.size(1), std::max(needed, 2 * room), fresh.size(3)}, fresh.options());
    if (used > 0) larger.narrow(2, 0, used).copy_(cached.narrow(2, 0, used));
    cached = larger;
  }
  cached.narrow(2, used, fresh.size(2)).copy_(fresh);
  return cached.narrow(2, 0, needed);
}

// The last n tokens, in memory of their own.
at::Tensor last_tokens(const at::Tensor& t, int64_t n) {
  return t.detach().narrow(2, t.size(2) - n, n).clone(at::MemoryFormat::Contiguous);
}

}  // namespace

AttentionMixer::AttentionMixer(const ModelConfig& config, const at::TensorOptions& options)
    : config_(*config.attn),
      head_size_(config.hidden_size / config_.num_heads),
      window_(config_.window_size.value_or(0)) {
  TORCH_CHECK(head_size_ * config_.num_heads == config.hidden_size && head_size_ % 2 == 0 &&
                  config_.num_heads % config_.kv_heads() == 0,
              "softmax attention wants heads of an even size that share hidden_size, and a divisor "
              "of num_heads as num_kv_heads");
  const int64_t d = config.hidden_size, kv = config_.kv_heads() * head_size_;
  q_proj_ = register_module("q_proj", Linear(d, d, options, config_.qkv_bias));
  k_proj_ = register_module("k_proj", Linear(d, kv, options, config_.qkv_bias));
  v_proj_ = register_module("v_proj", Linear(d, kv, options, config_.qkv_bias));
  o_proj_ = register_module("o_proj", Linear(d, d, options));
  if (config_.qk_norm) {
    q_norm_ = register_module("q_norm", RmsNorm(head_size_, kQkNormEps, options));
    k_norm_ = register_module("k_norm", RmsNorm(head_size_, kQkNormEps, options));
  }
}

void AttentionMixer::initialize(double range) {
  for (const Linear& linear : {q_proj_, k_proj_, v_proj_, o_proj_}) {
    linear.ptr()->initialize(range);
  }
  if (q_norm_) q_norm_->initialize();
  if (k_norm_) k_norm_->initialize();
}

AttentionMixer::Streams AttentionMixer::streams(const at::Tensor& x,
                                                const at::Tensor& positions) const {
  const auto heads = [&](const Linear& projection, const RmsNorm& norm) {
    at::Tensor y = projection.ptr()->forward(x).unflatten(-1, {-1, head_size_});
    if (norm) y = norm.ptr()->forward(y);
    return y.transpose(1, 2);
  };
  const RotaryTable table(positions, head_size_, config_.rope_theta, x.scalar_type());
  return {rotate(heads(q_proj_, q_norm_), table), rotate(heads(k_proj_, k_norm_), table),
          heads(v_proj_, nullptr)};
}

at::Tensor AttentionMixer::forward_rows(const at::Tensor& x, Cache::Layer* cache) const {
  const int64_t tokens = x.size(1);
  std::vector<int64_t> lengths = lengths_of(cache, x.size(0));
  const bool aligned =
      std::adjacent_find(lengths.begin(), lengths.end(), std::not_equal_to<>()) == lengths.end();
  const auto integers = x.options().dtype(at::kLong);
  const int64_t first = lengths.empty() ? 0 : lengths.front();
  at::Tensor positions = at::arange(first, first + tokens, integers);
  if (!aligned) positions = positions - first + at::tensor(lengths).to(x.device()).unsqueeze(-1);
  const Streams s = streams(x, positions);
  if (!cache) return causal_attention(s.q, s.k, s.v, window_);

  const int64_t used = used_slots(lengths, window_);
  std::vector<int64_t> starts;
  if (!aligned) {
    for (const int64_t length : lengths) starts.push_back(used - std::min(length, used));
  }
  const bool in_place = window_ == 0 && !at::GradMode::is_enabled();
  const at::Tensor keys = append(cache->keys, used, s.k, in_place);
  const at::Tensor values = append(cache->values, used, s.v, in_place);
  const at::Tensor o = causal_attention(s.q, keys, values, window_, starts);

  for (int64_t& length : lengths) length += tokens;
  if (!in_place) {
    const int64_t kept = used_slots(lengths, window_);
    cache->keys = last_tokens(keys, kept);
    cache->values = last_tokens(values, kept);
  }
  cache->lengths = at::tensor(lengths, at::kLong);
  return o;
}

at::Tensor AttentionMixer::forward_packed(const at::Tensor& x, const std::vector<int64_t>& offsets,
                                          Cache::Layer* cache) const {
  const int64_t documents = static_cast<int64_t>(offsets.size()) - 1, tokens = x.size(1);
  std::vector<int64_t> lengths = lengths_of(cache, documents);
  std::vector<int64_t> positions(tokens, 0);
  for (int64_t n = 0; n < documents; ++n) {
    for (int64_t t = offsets[n]; t < offsets[n + 1]; ++t) {
      positions[t] = lengths[n] + t - offsets[n];
    }
  }
  const Streams s = streams(x, at::tensor(positions, at::kLong).to(x.device()));

  const int64_t used = used_slots(lengths, window_);
  std::vector<at::Tensor> outputs, keys, values;
  // Rows before the first document and after the last one belong to none.
  const auto outside = [&](int64_t n) {
    outputs.push_back(at::zeros({1, s.q.size(1), n, head_size_}, s.q.options()));
  };
  outside(offsets.front());
  for (int64_t n = 0; n < documents; ++n) {
    const int64_t start = offsets[n], length = offsets[n + 1] - start;
    const auto with_past = [&](const at::Tensor& fresh, const at::Tensor& cached) {
      at::Tensor own = fresh.narrow(2, start, length);
      const int64_t seen = std::min(lengths[n], used);
      if (seen == 0) return own;
      return at::cat({cached.narrow(0, n, 1).narrow(2, used - seen, seen), own}, 2);
    };
    keys.push_back(with_past(s.k, cache ? cache->keys : s.k));
    values.push_back(with_past(s.v, cache ? cache->values : s.v));
    outputs.push_back(
        causal_attention(s.q.narrow(2, start, length), keys.back(), values.back(), window_));
    lengths[n] += length;
  }
  outside(tokens - offsets.back());

  if (cache) {
    const int64_t kept = used_slots(lengths, window_);
    const auto gather = [&](const std::vector<at::Tensor>& rows) {
      at::Tensor out = at::zeros({documents, s.k.size(1), kept, head_size_}, s.k.options());
      const torch::NoGradGuard no_grad;
      for (int64_t n = 0; n < documents; ++n) {
        const int64_t own = std::min(kept, rows[n].size(2));
        out.narrow(0, n, 1)
            .narrow(2, kept - own, own)
            .copy_(rows[n].narrow(2, rows[n].size(2) - own, own));
      }
      return out;
    };
    cache->keys = gather(keys);
    cache->values = gather(values);
    cache->lengths = at::tensor(lengths, at::kLong);
  }
  return at::cat(outputs, 2);
}

at::Tensor AttentionMixer::forward(const at::Tensor& x, const std::optional<at::Tensor>& cu_seqlens,
                                   Cache::Layer* cache) {
  const at::Tensor o = cu_seqlens ? forward_packed(x, read_offsets(*cu_seqlens, x.size(1)), cache)
                                  : forward_rows(x, cache);
  return o_proj_->forward(o.transpose(1, 2).flatten(-2));
}

}  // namespace efla
