// What the convolution's forward and backward share per instruction set: channel-major [C, W]
// against token-major [W, C] storage, and the sums over the filter for a few tokens at once.

#if defined(EFLA_KERNELS_CPU_SHORT_CONV_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EFLA_KERNELS_CPU_SHORT_CONV_INL_H_
#undef EFLA_KERNELS_CPU_SHORT_CONV_INL_H_
#else
#define EFLA_KERNELS_CPU_SHORT_CONV_INL_H_
#endif

#include <algorithm>
#include <type_traits>
#include <vector>

#include "efla/kernels/cpu/short_conv_blocks.h"
#include "efla/kernels/cpu/simd-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {

/// Tokens that share the loads of filter and input.
inline constexpr int kConvTokens = 4;

// The type that Highway moves S in when it does no arithmetic.
template <typename S>
using Raw = std::conditional_t<std::is_same_v<S, BFloat16>, uint16_t, S>;

/// in [channels, width] -> rows: element (c, w) goes to rows[w * stride + c].
template <typename S>
HWY_INLINE void to_rows(const S* in, int64_t channels, int64_t width, S* rows, int64_t stride) {
  int64_t c = 0;
  if (width == 4) {  // the width that models use
    using R = Raw<S>;
    const hn::ScalableTag<R> d;
    const int64_t lanes = hn::Lanes(d);
    R* out = reinterpret_cast<R*>(rows);
    for (; c + lanes <= channels; c += lanes) {
      hn::Vec<decltype(d)> v0, v1, v2, v3;
      hn::LoadInterleaved4(d, reinterpret_cast<const R*>(in) + 4 * c, v0, v1, v2, v3);
      hn::StoreU(v0, d, out + c);
      hn::StoreU(v1, d, out + stride + c);
      hn::StoreU(v2, d, out + 2 * stride + c);
      hn::StoreU(v3, d, out + 3 * stride + c);
    }
  }
  for (; c < channels; ++c)
    for (int64_t w = 0; w < width; ++w) rows[w * stride + c] = in[c * width + w];
}

/// The reverse: rows[w][c] -> out [channels, width].
template <typename S>
HWY_INLINE void from_rows(const S* const* rows, int64_t channels, int64_t width, S* out) {
  int64_t c = 0;
  if (width == 4) {
    using R = Raw<S>;
    const hn::ScalableTag<R> d;
    const int64_t lanes = hn::Lanes(d);
    const auto row = [&](int w) { return reinterpret_cast<const R*>(rows[w]); };
    for (; c + lanes <= channels; c += lanes)
      hn::StoreInterleaved4(hn::LoadU(d, row(0) + c), hn::LoadU(d, row(1) + c),
                            hn::LoadU(d, row(2) + c), hn::LoadU(d, row(3) + c), d,
                            reinterpret_cast<R*>(out) + 4 * c);
  }
  for (; c < channels; ++c)
    for (int64_t w = 0; w < width; ++w) out[c * width + w] = rows[w][c];
}

/// The inputs of a run of channels [c0, c0 + channels): the sequence's rows and, before its start,
/// the initial state's (or zeros).
template <typename S>
class ConvInput {
 public:
  ConvInput(const ShortConvParams& p, int64_t c0, int64_t channels)
      : p_(p), c0_(c0), channels_(channels), before_(p.width * channels) {}

  void enter(const ConvBlock& b) {
    block_ = &b;
    if (b.begin >= p_.width && b.length >= p_.width) return;  // the start is out of sight
    if (p_.initial_state == nullptr) return;                  // stays zero
    const S* state =
        static_cast<const S*>(p_.initial_state) + (b.sequence * p_.channels + c0_) * p_.width;
    to_rows(state, channels_, p_.width, before_.data(), channels_);
  }

  /// Token t >= -width of the sequence.
  const S* row(int64_t t) const {
    return t < 0 ? before_.data() + (p_.width + t) * channels_
                 : conv_row<S>(p_.x, *block_, t) + c0_;
  }

 private:
  const ShortConvParams& p_;
  const int64_t c0_, channels_;
  const ConvBlock* block_ = nullptr;
  std::vector<S> before_;  // [width, channels]
};

/// The inputs that N tokens' filters of width W reach, at one vector of channels. W = 0: the width
/// is known at run time only, and inputs are loaded again each time.
template <int N, int W, class D, typename R>
class ConvWindow {
 public:
  template <typename Count>
  HWY_INLINE ConvWindow(D d, const R* const* rows, int64_t c, Count n) : rows_(rows), c_(c) {
    if constexpr (W > 0) {
#pragma GCC unroll 8
      for (int i = 0; i < N + W - 1; ++i) in_[i] = load_some(d, rows[i] + c, n);
    }
  }
  template <typename Count>
  HWY_INLINE Vector<D> get(D d, int64_t i, Count n) const {
    if constexpr (W > 0) {
      return in_[i];
    } else {
      return load_some(d, rows_[i] + c_, n);
    }
  }
  /// z[j] = start + sum_w filter[w][c] in[j + w]; filter is [width, stride].
  template <typename S, typename Count>
  HWY_INLINE void filter_sums(D d, const S* filter, int64_t stride, int64_t width, Count n,
                              Vector<D> start, Vector<D>* z) const {
    const int64_t taps = W > 0 ? W : width;
    Vector<D> sum[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) sum[j] = start;
#pragma GCC unroll 8
    for (int64_t w = 0; w < taps; ++w) {
      const auto f = load_some(d, filter + w * stride + c_, n);
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) sum[j] = hn::MulAdd(f, get(d, j + w, n), sum[j]);
    }
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) z[j] = sum[j];
  }

 private:
  Vector<D> in_[W > 0 ? N + W - 1 : 1];
  const R* const* rows_;
  const int64_t c_;
};

/// bias[c], bias[c + 1], ...; zeros without a bias.
template <class D, typename S, typename Count>
HWY_INLINE Vector<D> load_bias(D d, const S* bias, int64_t c, Count n) {
  return bias != nullptr ? load_some(d, bias + c, n) : hn::Zero(d);
}

/// Calls f<N, W>(t) for tokens [begin, end): N tokens at a time, one by one at the end, with the
/// width that models use known at compile time.
template <typename F>
HWY_INLINE void for_tokens(int64_t begin, int64_t end, int64_t width, const F& f) {
  int64_t t = begin;
  if (width == 4) {
    for (; t + kConvTokens <= end; t += kConvTokens) f.template operator()<kConvTokens, 4>(t);
    for (; t < end; ++t) f.template operator()<1, 4>(t);
  } else {
    for (; t + kConvTokens <= end; t += kConvTokens) f.template operator()<kConvTokens, 0>(t);
    for (; t < end; ++t) f.template operator()<1, 0>(t);
  }
}

}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
