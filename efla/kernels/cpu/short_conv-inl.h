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

/// z[j] = sum_w filter[w][c] rows[j + w][c] for N tokens at channels c, c + 1, ... `rows` has
/// width + N - 1 entries; filter is [width, stride].
template <int N, class D, typename S>
HWY_INLINE void filter_sums(D d, const S* const* rows, const S* filter, int64_t stride,
                            int64_t width, int64_t c, size_t n, Vector<D>* z) {
  Vector<D> sum[N];
#pragma GCC unroll 4
  for (int j = 0; j < N; ++j) sum[j] = hn::Zero(d);
  for (int64_t w = 0; w < width; ++w) {
    const auto f = load_some(d, filter + w * stride + c, n);
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) sum[j] = hn::MulAdd(f, load_some(d, rows[j + w] + c, n), sum[j]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < N; ++j) z[j] = sum[j];
}

}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
