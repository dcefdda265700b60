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
//   grad_x[t] = sum_w filter[w] dz[t + W - 1 - w]
//   grad_filter[w] = sum_t dz[t] x[t - W + 1 + w]
//   grad_bias = sum_t dz[t]
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
        bias_(p_.bias ? static_cast<const S*>(p_.bias) + c0 : nullptr),
        input_(bp.forward, c0, channels),
        filter_(width_ * channels),
        reversed_(width_ * channels),
        dz_((block_tokens + width_) * channels),
        tail_(kConvTokens * channels),
        grad_filter_((width_ + 1) * channels),
        rows_(width_ + kConvTokens),
        dz_rows_(width_ + kConvTokens) {
    to_rows(static_cast<const S*>(p_.weight) + c0 * width_, channels, width_, filter_.data(),
            channels);
    for (int64_t w = 0; w < width_; ++w)
      std::copy_n(filter_.data() + (width_ - 1 - w) * channels, channels,
                  reversed_.data() + w * channels);
  }

  void run(const ConvBlock& b) {
    input_.enter(b);
    const int64_t known = std::min(b.end + width_ - 1, b.length);  // dz beyond is zero
    for_tokens(b.begin, b.end, width_, [&]<int N, int W>(int64_t t) { fill_dz<N, W>(b, t); });
    for_tokens(b.end, known, width_, [&]<int N, int W>(int64_t t) { fill_dz<N, W>(b, t); });
    std::fill(dz_.begin() + (known - b.begin) * channels_,
              dz_.begin() + (b.end + width_ - 1 - b.begin) * channels_, A(0));
    if (bp_.grad_x.data != nullptr)
      for_tokens(b.begin, b.end, width_,
                 [&]<int N, int W>(int64_t t) { write_grad_x<N, W>(b, t); });
    if (bp_.grad_initial_state != nullptr && b.begin == 0) write_grad_initial_state(b);
  }

  // [W + 1, channels] sums of this run -> partial [W + 1, all channels]; the last row is the bias's
  void write_grad_filter(A* partial) const {
    for (int64_t w = 0; w <= width_; ++w)
      std::copy_n(grad_filter_.data() + w * channels_, channels_, partial + w * p_.channels + c0_);
  }

 private:
  // dz of N tokens from t on, and their share of grad_filter if they belong to the block.
  template <int N, int W>
  void fill_dz(const ConvBlock& b, int64_t t) {
    const D d;
    const int64_t width = W > 0 ? W : width_;
    for (int64_t i = 0; i < width + N - 1; ++i) rows_[i] = input_.row(t - width + 1 + i);
    const S* dy[N];
    for (int j = 0; j < N; ++j) dy[j] = conv_row<S>(bp_.grad_y, b, t + j) + c0_;
    A* dz = dz_.data() + (t - b.begin) * channels_;
    const bool counted = t < b.end;
    for_vectors(d, channels_, [&](int64_t c, auto n) HWY_ATTR {
      const ConvWindow<N, W, D, S> window(d, rows_.data(), c, n);
      Vector<D> g[N];
      for (int j = 0; j < N; ++j) g[j] = hn::Zero(d);
      if (p_.silu)
        window.filter_sums(d, filter_.data(), channels_, width, n, load_bias(d, bias_, c, n), g);
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) {
        const auto out = load_some(d, dy[j] + c, n);
        g[j] = p_.silu ? hn::Mul(out, silu_derivative(d, g[j], sigmoid(d, g[j]))) : out;
        store_some(d, g[j], dz + j * channels_ + c, n);
      }
      if (!counted) return;
#pragma GCC unroll 8
      for (int64_t w = 0; w < width; ++w) {
        A* total = grad_filter_.data() + w * channels_ + c;
        auto sum = load_some(d, total, n);
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) sum = hn::MulAdd(g[j], window.get(d, j + w, n), sum);
        store_some(d, sum, total, n);
      }
      if (bp_.grad_bias == nullptr) return;
      A* total = grad_filter_.data() + width * channels_ + c;
      auto sum = load_some(d, total, n);
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) sum = hn::Add(sum, g[j]);
      store_some(d, sum, total, n);
    });
  }

  // The gradient of the inputs t .. t + N - 1 is a convolution as well: of dz with the reversed
  // filter.
  template <int N, int W>
  void write_grad_x(const ConvBlock& b, int64_t t) {
    const D d;
    const int64_t width = W > 0 ? W : width_;
    for (int64_t i = 0; i < width + N - 1; ++i)
      dz_rows_[i] = dz_.data() + (t - b.begin + i) * channels_;
    S* out[N];
    const A* tail[N];
    for (int j = 0; j < N; ++j) {
      out[j] = conv_row<S>(bp_.grad_x, b, t + j) + c0_;
      tail[j] = final_grads(b, t + j, j);
    }
    for_vectors(d, channels_, [&](int64_t c, auto n) HWY_ATTR {
      const ConvWindow<N, W, D, A> window(d, dz_rows_.data(), c, n);
      Vector<D> g[N];
      window.filter_sums(d, reversed_.data(), channels_, width, n, hn::Zero(d), g);
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) {
        if (tail[j] != nullptr) g[j] = hn::Add(g[j], load_some(d, tail[j] + c, n));
        store_some(d, g[j], out[j] + c, n);
      }
    });
  }

  // grad_final_state is the gradient of the last W inputs: input t is its column t - L + W. Returns
  // that column's channels (in row `slot` of tail_), or null if t is not among them.
  const A* final_grads(const ConvBlock& b, int64_t t, int64_t slot) {
    const int64_t w = t - b.length + width_;
    if (bp_.grad_final_state == nullptr || w < 0) return nullptr;
    const S* in =
        static_cast<const S*>(bp_.grad_final_state) + (b.sequence * p_.channels + c0_) * width_ + w;
    A* out = tail_.data() + slot * channels_;
    for (int64_t c = 0; c < channels_; ++c) out[c] = to_arithmetic(in[c * width_]);
    return out;
  }

  // The same sums for the inputs before the sequence, t = -W .. -1.
  void write_grad_initial_state(const ConvBlock& b) {
    S* out = static_cast<S*>(bp_.grad_initial_state) + (b.sequence * p_.channels + c0_) * width_;
    for (int64_t w = 0; w < width_; ++w) {
      const int64_t t = w - width_;
      const A* tail = final_grads(b, t, 0);
      for (int64_t c = 0; c < channels_; ++c) {
        A sum = tail != nullptr ? tail[c] : A(0);
        for (int64_t row = 0; row < w; ++row)  // dz[row] saw input t through tap t + W - 1 - row
          sum += to_arithmetic(filter_[(w - 1 - row) * channels_ + c]) * dz_[row * channels_ + c];
        out[c * width_ + w] = from_arithmetic<S>(sum);
      }
    }
  }

  const ShortConvBackwardParams& bp_;
  const ShortConvParams& p_;
  const int64_t width_, c0_, channels_;
  const S* bias_;  // [channels] or null
  ConvInput<S> input_;
  std::vector<S> filter_;       // [W, channels]
  std::vector<S> reversed_;     // [W, channels], last tap first
  std::vector<A> dz_;           // [block tokens + W, channels]
  std::vector<A> tail_;         // [kConvTokens, channels]
  std::vector<A> grad_filter_;  // [W + 1, channels], the last row for the bias
  std::vector<const S*> rows_;
  std::vector<const A*> dz_rows_;
};

// partial: [W + 1, all channels] in the arithmetic type, the blocks' share of grad_weight and
// grad_bias.
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

// grad_weight and grad_bias are summed within fixed groups of blocks and then over the groups in
// order, so that they do not depend on the number of threads. The number of groups bounds the
// workspace.
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
  const int64_t rows = p.width + 1;
  std::vector<A> partial(groups * rows * p.channels);
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
                          partial.data() + group * rows * p.channels);
                    }
                  });
  // out[c * stride] = the groups' sums of row w
  const auto total = [&](int64_t w, A* out, int64_t stride) {
    for (int64_t c = 0; c < p.channels; ++c) {
      A sum = 0;
      for (int64_t g = 0; g < groups; ++g) sum += partial[(g * rows + w) * p.channels + c];
      out[c * stride] = sum;
    }
  };
  if (bp.grad_weight != nullptr)
    for (int64_t w = 0; w < p.width; ++w) total(w, static_cast<A*>(bp.grad_weight) + w, p.width);
  if (bp.grad_bias != nullptr) total(p.width, static_cast<A*>(bp.grad_bias), 1);
}

}  // namespace

void short_conv_backward(const ShortConvBackwardParams& bp, const Executor& executor) {
  zero_uncovered_rows(bp.forward, bp.grad_x);
  dispatch_storage(bp.forward.dtype, [&](auto tag) { backward<decltype(tag)>(bp, executor); });
}

}  // namespace efla::cpu
#endif  // HWY_ONCE
