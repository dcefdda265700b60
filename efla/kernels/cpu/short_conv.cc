#include "efla/kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/kernels/cpu/short_conv.cc"
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

// Outputs of N consecutive tokens; `rows` are their inputs, width + N - 1 of them.
template <int N, int W, typename S>
void convolve_tokens(const S* const* rows, const S* filter, const S* bias, int64_t width,
                     int64_t channels, bool silu, S* const* y) {
  using D = hn::ScalableTag<Arithmetic<S>>;
  const D d;
  for_vectors(d, channels, [&](int64_t c, auto n) HWY_ATTR {
    const ConvWindow<N, W, D, S> window(d, rows, c, n);
    Vector<D> z[N];
    window.filter_sums(d, filter, channels, width, n, load_bias(d, bias, c, n), z);
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      if (silu) z[j] = hn::Mul(z[j], sigmoid(d, z[j]));
      store_some(d, z[j], y[j] + c, n);
    }
  });
}

template <typename S>
void forward_blocks(const ShortConvParams& p, const ConvBlock* begin, const ConvBlock* end) {
  const int64_t width = p.width, channels = p.channels;
  std::vector<S> filter(width * channels);
  to_rows(static_cast<const S*>(p.weight), channels, width, filter.data(), channels);
  ConvInput<S> input(p, 0, channels);
  std::vector<const S*> rows(width + kConvTokens);
  for (const ConvBlock* b = begin; b != end; ++b) {
    input.enter(*b);
    for_tokens(b->begin, b->end, width, [&]<int N, int W>(int64_t t) {
      S* y[N];
      for (int64_t i = 0; i < width + N - 1; ++i) rows[i] = input.row(t - width + 1 + i);
      for (int64_t j = 0; j < N; ++j) y[j] = conv_row<S>(p.y, *b, t + j);
      convolve_tokens<N, W, S>(rows.data(), filter.data(), static_cast<const S*>(p.bias), width,
                               channels, p.silu, y);
    });
    if (p.final_state == nullptr || b->end != b->length) continue;
    for (int64_t w = 0; w < width; ++w) rows[w] = input.row(b->length - width + w);
    from_rows(rows.data(), channels, width,
              static_cast<S*>(p.final_state) + b->sequence * channels * width);
  }
}

void short_conv_forward_blocks(const ShortConvParams& p, const ConvBlock* begin,
                               const ConvBlock* end) {
  dispatch_storage(p.dtype, [&](auto tag) { forward_blocks<decltype(tag)>(p, begin, end); });
}

}  // namespace
}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace efla::cpu {
namespace {

HWY_EXPORT(short_conv_forward_blocks);

constexpr int64_t kBlockTokens = 64;
constexpr int64_t kGrain = 16384;  // outputs that make a thread worth waking

}  // namespace

void short_conv_forward(const ShortConvParams& p, const Executor& executor) {
  zero_uncovered_rows(p, p.y);
  if (p.channels == 0) return;
  const std::vector<ConvBlock> blocks = conv_blocks(p, kBlockTokens);
  const int64_t count = blocks.size();
  const int64_t tokens_per_block =
      count == 0 ? 1 : std::max<int64_t>(1, p.batch * p.tokens / count);
  parallel_ranges(executor, count, kGrain / (p.channels * tokens_per_block),
                  [&](int64_t begin, int64_t end) {
                    const auto run = HWY_DYNAMIC_DISPATCH(short_conv_forward_blocks);
                    run(p, blocks.data() + begin, blocks.data() + end);
                  });
}

}  // namespace efla::cpu
#endif  // HWY_ONCE
