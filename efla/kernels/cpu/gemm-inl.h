// Small dense products on matrices that stay in cache: a register tile of rows x vectors over
// broadcast elements of the left operand and row vectors of the right one. Every element of the
// result is one chain of fused multiply-adds in the order of k, whatever tile it falls in, so a
// column does not depend on how the columns around it are split. Compiled once per instruction set:
// include inside a foreach_target.h translation unit.

#if defined(EFLA_KERNELS_CPU_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EFLA_KERNELS_CPU_GEMM_INL_H_
#undef EFLA_KERNELS_CPU_GEMM_INL_H_
#else
#define EFLA_KERNELS_CPU_GEMM_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// The left operand: element (m, k) is data[m * row + k * column]. Either stride may be 1, so a
/// transposed view costs nothing.
template <typename A>
struct Left {
  const A* data;
  int64_t row;
  int64_t column;
};

/// A row-major matrix as left operand, and its transpose.
template <typename A>
Left<A> rows_of(const A* data, int64_t stride) {
  return {data, stride, 1};
}
template <typename A>
Left<A> columns_of(const A* data, int64_t stride) {
  return {data, 1, stride};
}

/// Which part of a product is worth computing.
enum class Part {
  kAll,
  kLowerLeft,    // left is square and lower triangular: left(m, k), k > m, counts as 0, whatever b
  kUpperLeft,    // left is square and upper triangular: left(m, k), k < m, counts as 0, whatever b
  kLowerResult,  // only result(m, n), n <= m, is wanted; the rest holds anything
};

// Rows of a register tile: 8 x 2 accumulators where there are 32 vector registers, else 6 x 2.
#if (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3) || HWY_ARCH_ARM_A64
inline constexpr int kTileRows = 8;
#elif HWY_TARGET == HWY_AVX2
inline constexpr int kTileRows = 6;
#else
inline constexpr int kTileRows = 4;
#endif
inline constexpr int kTileVectors = 2;

// c = keep * c + the product of a triangle of the left operand, rows x rows with its diagonal, and
// `vectors` vectors of b. The zeros beside the triangle are not multiplied: what a token does not
// see may be NaN. Apart from gemm_tile, whose registers it would disturb.
template <class D, typename A = hn::TFromD<D>>
HWY_NOINLINE void triangle_tile(D d, bool upper, int rows, int vectors, Left<A> left,
                                const A* HWY_RESTRICT b, int64_t b_stride, A* HWY_RESTRICT c,
                                int64_t c_stride, A keep) {
  const int64_t lanes = hn::Lanes(d);
  for (int r = 0; r < rows; ++r) {
    const int first = upper ? r : 0, last = upper ? rows : r + 1;
    for (int v = 0; v < vectors; ++v) {
      A* to = c + r * c_stride + v * lanes;
      auto sum = keep == A(0) ? hn::Zero(d) : hn::Mul(hn::Set(d, keep), hn::Load(d, to));
      for (int k = first; k < last; ++k) {
        const auto factor = hn::Set(d, left.data[r * left.row + k * left.column]);
        sum = hn::MulAdd(factor, hn::Load(d, b + k * b_stride + v * lanes), sum);
      }
      hn::Store(sum, d, to);
    }
  }
}

// c = keep * c + left b on one tile; c is not read if keep = 0.
template <int kRows, int kVectors, class D, typename A = hn::TFromD<D>>
HWY_INLINE void gemm_tile(D d, int64_t depth, Left<A> left, const A* HWY_RESTRICT b,
                          int64_t b_stride, A* HWY_RESTRICT c, int64_t c_stride, A keep) {
  const int64_t lanes = hn::Lanes(d);
  hn::Vec<D> sum[kRows][kVectors];
  if (keep == A(0)) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::Zero(d);
    }
  } else {
    const auto factor = hn::Set(d, keep);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v)
        sum[r][v] = hn::Mul(factor, hn::Load(d, c + r * c_stride + v * lanes));
    }
  }
  const A* HWY_RESTRICT a = left.data;
  for (int64_t k = 0; k < depth; ++k) {
    hn::Vec<D> right[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) right[v] = hn::Load(d, b + v * lanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const auto factor = hn::Set(d, a[r * left.row]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(factor, right[v], sum[r][v]);
    }
    a += left.column;
    b += b_stride;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) hn::Store(sum[r][v], d, c + r * c_stride + v * lanes);
  }
}

// All rows of a panel of kVectors vectors of columns starting at column `first`.
template <int kVectors, class D, typename A = hn::TFromD<D>>
HWY_INLINE void gemm_panel(D d, Part part, int64_t m, int64_t first, int64_t k, Left<A> left,
                           const A* b, int64_t b_stride, A* c, int64_t c_stride, A keep) {
  int64_t row = part == Part::kLowerResult ? first / kTileRows * kTileRows : 0;
  const auto tile = [&](auto rows) HWY_ATTR {
    constexpr int kRows = decltype(rows)::value;
    const auto from = [&](int64_t k0) {
      return Left<A>{left.data + row * left.row + k0 * left.column, left.row, left.column};
    };
    const auto whole = [&](int64_t k0, int64_t k1, A factor) HWY_ATTR {
      gemm_tile<kRows, kVectors>(d, k1 - k0, from(k0), b + k0 * b_stride, b_stride,
                                 c + row * c_stride, c_stride, factor);
    };
    const auto triangle = [&](A factor) HWY_ATTR {
      triangle_tile(d, part == Part::kUpperLeft, kRows, kVectors, from(row), b + row * b_stride,
                    b_stride, c + row * c_stride, c_stride, factor);
    };
    const bool lower = part == Part::kLowerLeft, upper = part == Part::kUpperLeft;
    if (upper) triangle(keep);  // in the order of k
    whole(upper ? row + kRows : 0, lower ? row : k, upper ? A(1) : keep);
    if (lower) triangle(A(1));
    row += kRows;
  };
  while (m - row >= kTileRows) tile(std::integral_constant<int, kTileRows>());
  if (kTileRows > 4 && m - row >= 4) tile(std::integral_constant<int, 4>());
  if (m - row >= 2) tile(std::integral_constant<int, 2>());
  if (m - row >= 1) tile(std::integral_constant<int, 1>());
}

/// c [m x n] = keep * c + left [m x k] b [k x n]. c is not read if keep = 0. Rows of b and c are
/// aligned and padded to whole vectors; the padding of c is written.
template <class D, typename A = hn::TFromD<D>>
HWY_NOINLINE void gemm(D d, Part part, int64_t m, int64_t n, int64_t k, Left<A> left, const A* b,
                       int64_t b_stride, A* c, int64_t c_stride, A keep) {
  const int64_t lanes = hn::Lanes(d);
  int64_t j = 0;
  for (; j + lanes < n; j += kTileVectors * lanes)
    gemm_panel<kTileVectors>(d, part, m, j, k, left, b + j, b_stride, c + j, c_stride, keep);
  if (j < n) gemm_panel<1>(d, part, m, j, k, left, b + j, b_stride, c + j, c_stride, keep);
}

/// Solves (I + L) X = R in place for strictly lower triangular L [m x m]: on entry x [m x n] holds
/// R, on return X. `minus_l` holds -L.
template <class D, typename A = hn::TFromD<D>>
HWY_INLINE void solve_lower(D d, int64_t m, int64_t n, const A* minus_l, int64_t l_stride, A* x,
                            int64_t x_stride) {
  const int64_t lanes = hn::Lanes(d);
  for (int64_t row = 0; row < m; row += kTileRows) {
    const int64_t rows = std::min<int64_t>(kTileRows, m - row);
    if (row > 0)
      gemm(d, Part::kAll, rows, n, row, rows_of(minus_l + row * l_stride, l_stride), x, x_stride,
           x + row * x_stride, x_stride, A(1));
    for (int64_t j = 0; j < n; j += lanes) {
      A* column = x + row * x_stride + j;
      for (int64_t r = 1; r < rows; ++r) {
        auto sum = hn::Load(d, column + r * x_stride);
        for (int64_t i = 0; i < r; ++i) {
          const auto factor = hn::Set(d, minus_l[(row + r) * l_stride + row + i]);
          sum = hn::MulAdd(factor, hn::Load(d, column + i * x_stride), sum);
        }
        hn::Store(sum, d, column + r * x_stride);
      }
    }
  }
}

/// Solves (I + L)^T X = R in place, from the last row up.
template <class D, typename A = hn::TFromD<D>>
HWY_INLINE void solve_lower_transposed(D d, int64_t m, int64_t n, const A* minus_l,
                                       int64_t l_stride, A* x, int64_t x_stride) {
  const int64_t lanes = hn::Lanes(d);
  for (int64_t row = (m - 1) / kTileRows * kTileRows; row >= 0; row -= kTileRows) {
    const int64_t rows = std::min<int64_t>(kTileRows, m - row);
    const int64_t below = row + rows;
    if (below < m)
      gemm(d, Part::kAll, rows, n, m - below,
           columns_of(minus_l + below * l_stride + row, l_stride), x + below * x_stride, x_stride,
           x + row * x_stride, x_stride, A(1));
    for (int64_t j = 0; j < n; j += lanes) {
      A* column = x + row * x_stride + j;
      for (int64_t r = rows - 2; r >= 0; --r) {
        auto sum = hn::Load(d, column + r * x_stride);
        for (int64_t i = r + 1; i < rows; ++i) {
          const auto factor = hn::Set(d, minus_l[(row + i) * l_stride + row + r]);
          sum = hn::MulAdd(factor, hn::Load(d, column + i * x_stride), sum);
        }
        hn::Store(sum, d, column + r * x_stride);
      }
    }
  }
}

/// out [n x m] = in [m x n]^T.
template <typename A>
HWY_NOINLINE void transpose(int64_t m, int64_t n, const A* HWY_RESTRICT in, int64_t in_stride,
                            A* HWY_RESTRICT out, int64_t out_stride) {
  int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  if constexpr (sizeof(A) == 4) {
    const hn::FixedTag<A, 4> d;
    const hn::Repartition<double, decltype(d)> wide;
    const auto low = [&](auto x, auto y) HWY_ATTR {
      return hn::BitCast(d, hn::InterleaveLower(wide, hn::BitCast(wide, x), hn::BitCast(wide, y)));
    };
    const auto high = [&](auto x, auto y) HWY_ATTR {
      return hn::BitCast(d, hn::InterleaveUpper(wide, hn::BitCast(wide, x), hn::BitCast(wide, y)));
    };
    for (; i + 4 <= m; i += 4) {
      const A* from = in + i * in_stride;
      A* to = out + i;
      int64_t j = 0;
      for (; j + 4 <= n; j += 4) {
        const auto r0 = hn::LoadU(d, from + j), r1 = hn::LoadU(d, from + in_stride + j);
        const auto r2 = hn::LoadU(d, from + 2 * in_stride + j);
        const auto r3 = hn::LoadU(d, from + 3 * in_stride + j);
        const auto a = hn::InterleaveLower(d, r0, r1), b = hn::InterleaveLower(d, r2, r3);
        const auto e = hn::InterleaveUpper(d, r0, r1), f = hn::InterleaveUpper(d, r2, r3);
        hn::StoreU(low(a, b), d, to + j * out_stride);
        hn::StoreU(high(a, b), d, to + (j + 1) * out_stride);
        hn::StoreU(low(e, f), d, to + (j + 2) * out_stride);
        hn::StoreU(high(e, f), d, to + (j + 3) * out_stride);
      }
      for (; j < n; ++j)
        for (int64_t r = 0; r < 4; ++r) to[j * out_stride + r] = from[r * in_stride + j];
    }
  }
#endif
  for (; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) out[j * out_stride + i] = in[i * in_stride + j];
}

}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
