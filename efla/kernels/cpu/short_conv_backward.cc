#include "efla/kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/kernels/cpu/short_conv_backward.cc"
#include <algorithm>
#include <vector>

#include "efla/kernels/cpu/layer_ops.h"
#include "efla/kernels/cpu/parallel.h"
#include "efla/kernels/cpu/short_conv_blocks.h"
#include "efla/kernels/cpu/storage.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h, as Highway asks:
#include "efla/kernels/cpu/short_conv-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {
namespace {

// Backward for the channels [c0, c0 + channels) of a run of blocks. With z the sums before the
// activation and dz = dy act'(z):
//   grad_x[t] = sum_w filter[w] dz[t + W - 1 - w]      grad_filter[w] = sum_t dz[t] x[t - W + 1 +
//   w]
// A block recomputes the W - 1 values of dz that follow it, so blocks do not exchange anything.
template <typename S>
class BackwardRun {
 public:
  using A = Arithmetic<S>;
  using D = hn::ScalableTag<A>;

  BackwardRun(const ShortConvBackwardParams& bp, int64_t c0, int64_t channels, int64_t block_tokens)
      : bp_(bp),
        p_(bp.forward),
        width_(bp.forward.width),
        c0_(c0),
        channels_(channels),
        input_(bp.forward, c0, channels),
        filter_(width_ * channels),
        dz_((block_tokens + width_) * channels),
        tail_(width_ * channels),
        grad_filter_(width_ * channels),
        rows_(width_ + kConvTokens) {
    to_rows(static_cast<const S*>(p_.weight) + c0 * width_, channels, width_, filter_.data(),
            channels);
  }

  void run(const ConvBlock& b) {
    input_.enter(b);
    const int64_t known = std::min(b.end + width_ - 1, b.length);  // dz beyond is zero
    for (int64_t t = b.begin; t < known;) {
      const bool many = known - t >= kConvTokens && (t + kConvTokens <= b.end || t >= b.end);
      if (many) {
        fill_dz<kConvTokens>(b, t);
      } else {
        fill_dz<1>(b, t);
      }
      t += many ? kConvTokens : 1;
    }
    std::fill(dz_.begin() + (known - b.begin) * channels_,
              dz_.begin() + (b.end + width_ - 1 - b.begin) * channels_, A(0));
    if (bp_.grad_x.data != nullptr)
      for (int64_t t = b.begin; t < b.end; ++t) write_grad_x(b, t);
    if (bp_.grad_initial_state != nullptr && b.begin == 0) write_grad_initial_state(b);
  }

  // [W, channels] sums of this run -> partial [W, all channels]
  void write_grad_filter(A* partial) const {
    for (int64_t w = 0; w < width_; ++w)
      std::copy_n(grad_filter_.data() + w * channels_, channels_, partial + w * p_.channels + c0_);
  }

 private:
  // dz of N tokens from t on, and their share of grad_filter if they belong to the block.
  template <int N>
  void fill_dz(const ConvBlock& b, int64_t t) {
    const D d;
    const int64_t lanes = hn::Lanes(d);
    for (int64_t i = 0; i < width_ + N - 1; ++i) rows_[i] = input_.row(t - width_ + 1 + i);
    const S* dy[N];
    for (int j = 0; j < N; ++j) dy[j] = conv_row<S>(bp_.grad_y, b, t + j) + c0_;
    A* dz = dz_.data() + (t - b.begin) * channels_;
    const bool counted = t < b.end;
    for (int64_t c = 0; c < channels_; c += lanes) {
      const size_t n = HWY_MIN(lanes, channels_ - c);
      hn::Vec<D> z[N];
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) z[j] = hn::Zero(d);
      if (p_.silu) filter_sums<N>(d, rows_.data(), filter_.data(), channels_, width_, c, n, z);
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) {
        auto g = load_some(d, dy[j] + c, n);
        if (p_.silu) g = hn::Mul(g, silu_derivative(d, z[j], sigmoid(d, z[j])));
        store_some(d, g, dz + j * channels_ + c, n);
        z[j] = g;
      }
      if (!counted) continue;
      for (int64_t w = 0; w < width_; ++w) {
        A* total = grad_filter_.data() + w * channels_ + c;
        auto sum = load_some(d, total, n);
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) sum = hn::MulAdd(z[j], load_some(d, rows_[j + w] + c, n), sum);
        store_some(d, sum, total, n);
      }
    }
  }

  // Gradient of input t of the sequence, t >= -W, apart from grad_final_state.
  HWY_INLINE hn::Vec<D> grad_input(const ConvBlock& b, int64_t t, int64_t c, size_t n) const {
    const D d;
    auto sum = hn::Zero(d);
    for (int64_t w = 0; w < width_; ++w) {
      const int64_t row = t + width_ - 1 - w - b.begin;
      if (row < 0) continue;
      sum = hn::MulAdd(load_some(d, filter_.data() + w * channels_ + c, n),
                       load_some(d, dz_.data() + row * channels_ + c, n), sum);
    }
    return sum;
  }

  // grad_final_state is the gradient of the last W inputs: input t is its column t - L + W.
  A final_grad(const ConvBlock& b, int64_t t, int64_t c) const {
    const int64_t w = t - b.length + width_;
    if (bp_.grad_final_state == nullptr || w < 0) return A(0);
    return to_arithmetic(static_cast<const S*>(
        bp_.grad_final_state)[(b.sequence * p_.channels + c0_ + c) * width_ + w]);
  }

  void write_grad_x(const ConvBlock& b, int64_t t) {
    const D d;
    const int64_t lanes = hn::Lanes(d);
    const bool in_final = bp_.grad_final_state != nullptr && t >= b.length - width_;
    if (in_final)
      for (int64_t c = 0; c < channels_; ++c) tail_[c] = final_grad(b, t, c);
    S* out = conv_row<S>(bp_.grad_x, b, t) + c0_;
    for (int64_t c = 0; c < channels_; c += lanes) {
      const size_t n = HWY_MIN(lanes, channels_ - c);
      auto g = grad_input(b, t, c, n);
      if (in_final) g = hn::Add(g, load_some(d, tail_.data() + c, n));
      store_some(d, g, out + c, n);
    }
  }

  void write_grad_initial_state(const ConvBlock& b) {
    const D d;
    const int64_t lanes = hn::Lanes(d);
    S* out = static_cast<S*>(bp_.grad_initial_state) + (b.sequence * p_.channels + c0_) * width_;
    for (int64_t w = 0; w < width_; ++w) {
      const int64_t t = w - width_;
      for (int64_t c = 0; c < channels_; c += lanes) {
        const size_t n = HWY_MIN(lanes, channels_ - c);
        store_some(d, grad_input(b, t, c, n), tail_.data() + c, n);
      }
      for (int64_t c = 0; c < channels_; ++c)
        out[c * width_ + w] = from_arithmetic<S>(tail_[c] + final_grad(b, t, c));
    }
  }

  const ShortConvBackwardParams& bp_;
  const ShortConvParams& p_;
  const int64_t width_, c0_, channels_;
  ConvInput<S> input_;
  std::vector<S> filter_;       // [W, channels]
  std::vector<A> dz_;           // [block tokens + W, channels]
  std::vector<A> tail_;         // [channels]
  std::vector<A> grad_filter_;  // [W, channels]
  std::vector<const S*> rows_;
};

// partial: [W, all channels] in the arithmetic type, the blocks' share of grad_weight.
void short_conv_backward_blocks(const ShortConvBackwardParams& bp, const ConvBlock* begin,
                                const ConvBlock* end, int64_t block_tokens, int64_t c0,
                                int64_t channels, void* partial) {
  dispatch_storage(bp.forward.dtype, [&](auto tag) {
    using S = decltype(tag);
    BackwardRun<S> run(bp, c0, channels, block_tokens);
    for (const ConvBlock* b = begin; b != end; ++b) run.run(*b);
    run.write_grad_filter(static_cast<Arithmetic<S>*>(partial));
  });
}

}  // namespace
}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace efla::cpu {
namespace {

HWY_EXPORT(short_conv_backward_blocks);

// 32 tokens of 128 channels: dz stays in the first-level cache.
constexpr int64_t kBlockTokens = 32;
constexpr int64_t kBlockChannels = 128;
constexpr int64_t kGrain = 16384;  // outputs that make a thread worth waking

// grad_weight is summed within fixed groups of blocks and then over the groups in order, so that it
// does not depend on the number of threads. The number of groups bounds the workspace.
constexpr int64_t kMaxGroups = 64;

template <typename S>
void backward(const ShortConvBackwardParams& bp, const Executor& executor) {
  using A = Arithmetic<S>;
  const ShortConvParams& p = bp.forward;
  const std::vector<ConvBlock> blocks = conv_blocks(p, kBlockTokens);
  const int64_t count = blocks.size();
  const int64_t per_group = std::max<int64_t>(1, (count + kMaxGroups - 1) / kMaxGroups);
  const int64_t groups = (count + per_group - 1) / per_group;
  const int64_t slices = (p.channels + kBlockChannels - 1) / kBlockChannels;
  std::vector<A> partial(groups * p.width * p.channels);
  const int64_t unit_outputs =
      std::max<int64_t>(1, p.batch * p.tokens * p.channels / std::max<int64_t>(1, groups * slices));
  parallel_ranges(executor, groups * slices, kGrain / unit_outputs,
                  [&](int64_t first, int64_t last) {
                    const auto run = HWY_DYNAMIC_DISPATCH(short_conv_backward_blocks);
                    for (int64_t unit = first; unit < last; ++unit) {
                      const int64_t group = unit / slices, c0 = unit % slices * kBlockChannels;
                      run(bp, blocks.data() + group * per_group,
                          blocks.data() + std::min((group + 1) * per_group, count), kBlockTokens,
                          c0, std::min(kBlockChannels, p.channels - c0),
                          partial.data() + group * p.width * p.channels);
                    }
                  });
  if (bp.grad_weight == nullptr) return;
  S* out = static_cast<S*>(bp.grad_weight);
  for (int64_t w = 0; w < p.width; ++w)
    for (int64_t c = 0; c < p.channels; ++c) {
      A sum = 0;
      for (int64_t g = 0; g < groups; ++g) sum += partial[(g * p.width + w) * p.channels + c];
      out[c * p.width + w] = from_arithmetic<S>(sum);
    }
}

}  // namespace

void short_conv_backward(const ShortConvBackwardParams& bp, const Executor& executor) {
  zero_uncovered_rows(bp.forward, bp.grad_x);
  dispatch_storage(bp.forward.dtype, [&](auto tag) { backward<decltype(tag)>(bp, executor); });
}

}  // namespace efla::cpu
#endif  // HWY_ONCE
