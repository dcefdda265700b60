// The inverse of a chunk's unit lower triangle, by one warpgroup.
#pragma once

#include "efla/kernels/cuda/sm90/chunk.cuh"

namespace efla::cuda::sm90 {

inline constexpr int kInvertBarrier = 7;  // named barrier of this warpgroup

// An 8 x 8 block of L_hat on the diagonal, transposed. Two neighbours fall on different banks.
struct alignas(16) DiagonalBlock {
  float column[8][8];
  float padding[4];
};

// Operands of products are half whatever T is: as precise as TF32. Its range is enough for all
// steps under which the recurrence itself is stable, for then no element of A_hat is above 2.
struct LowerTriangle {
  DiagonalBlock diagonal[kC / 8];
  alignas(16) __half below[kC][kC - 8];  // L_hat below these; ldmatrix without bank conflicts
  __half behind[8];                      // read by ldmatrix, not used
};
// The two blocks of 32 on the diagonal of A_hat, one above the other.
struct alignas(16) HalfInverse {
  __half x[kC][kC / 2 + 8];
};

__device__ __forceinline__ void sync_invert() { sync_threads(kInvertBarrier, kWarpgroup); }

// Two neighbouring elements of a result as an operand.
__device__ __forceinline__ uint32_t half_pair(float x, float y) { return pack<__half>(x, y); }

// Block (row, column) of 16 x 16 as operand A.
template <int kPitch>
__device__ __forceinline__ AFragment<__half> block_operand(const __half (&triangle)[kC][kPitch],
                                                           int row, int column) {
  return load_a<__half>(&triangle[0][0], kPitch, 16 * row, 16 * column);
}

// What a product of 16 x 8 gives, as operand B of the next.
__device__ __forceinline__ BFragment<__half> as_operand(const CFragment& c) {
  return {{transpose(half_pair(c[0], c[1])), transpose(half_pair(c[2], c[3]))}};
}

// A_hat's tile takes a 16 x 8 product at (row, column), negated.
template <typename T>
__device__ __forceinline__ void store_negated(unsigned char* tile, const CFragment& c, int row,
                                              int column, int lane) {
  const int offset = tile_offset(row + lane / 4, column + lane % 4 * 2);
  *reinterpret_cast<uint32_t*>(tile + offset) = pack<T>(-c[0], -c[1]);
  *reinterpret_cast<uint32_t*>(tile + offset + 8 * 128) = pack<T>(-c[2], -c[3]);
}

// Row lane % 8 of (I + L_hat)^-1 in a diagonal block, by substitution in float from the right:
// x_c = [c = row] - sum_(i > c) x_i L_ic.
__device__ __forceinline__ void solve_block(float (&x)[8], const DiagonalBlock& block, int lane) {
#pragma unroll
  for (int c = 7; c >= 0; --c) {
    float even = c == lane % 8 ? 1.f : 0.f, odd = 0.f;
#pragma unroll
    for (int i = 4; i + 3 > c; i -= 4) {
      const float4 l = *reinterpret_cast<const float4*>(&block.column[c][i]);
      if (i + 3 > c) odd -= l.w * x[i + 3];
      if (i + 2 > c) even -= l.z * x[i + 2];
      if (i + 1 > c) odd -= l.y * x[i + 1];
      if (i > c) even -= l.x * x[i];
    }
    x[c] = even + odd;
  }
}

// The tile of (I + L_hat)^-1: blocks of 8 by substitution, then [A11 0; -A22 L21 A11 A22] for
// blocks of 8, of 16 and of 32, a warp for 8 columns. `before_last` is called ahead of the last of
// these.
template <typename T, typename Work>
__device__ __forceinline__ void invert(const LowerTriangle& lower, HalfInverse& half,
                                       unsigned char* inverse, int thread, Work before_last) {
  const int warp = thread / 32, lane = thread % 32;
  {
    const int row = 16 * warp + lane % 16, column = row / 8 * 8;
    float x[8];
    solve_block(x, lower.diagonal[row / 8], lane);
    if (lane < 16) {  // one half of the lanes stores the operand, the other the tile
      *reinterpret_cast<uint4*>(&half.x[row][column % 32]) =
          make_uint4(half_pair(x[0], x[1]), half_pair(x[2], x[3]), half_pair(x[4], x[5]),
                     half_pair(x[6], x[7]));
    } else {
      *reinterpret_cast<uint4*>(inverse + tile_offset(row, column)) = make_uint4(
          pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7]));
    }
    __syncwarp();
    // In products of 16: L21 and A22 are the lower left and the lower right block of A.
    uint32_t a11[4];
    ldmatrix_x4_transposed(a11, shared_address(&half.x[row][warp % 2 * 16]));
    const uint32_t l21 = block_operand(lower.below, warp, warp).x[1];
    const uint32_t a22 = block_operand(half.x, warp, warp % 2).x[3];
    CFragment c{}, d{};
    mma<__half>(c, AFragment<__half>{{0, l21, 0, 0}}, BFragment<__half>{{a11[0], 0}});
    mma<__half>(d, AFragment<__half>{{0, 0, 0, a22}},
                BFragment<__half>{{0, transpose(half_pair(c[2], c[3]))}});
    __syncwarp();  // a22 was read beside what is written now
    const int r = 16 * warp + 8 + lane / 4, k = 16 * warp + lane % 4 * 2;
    *reinterpret_cast<uint32_t*>(&half.x[r][k % 32]) = half_pair(-d[2], -d[3]);
    *reinterpret_cast<uint32_t*>(inverse + tile_offset(r, k)) = pack<T>(-d[2], -d[3]);
  }
  sync_invert();
  {
    const int first = warp / 2 * 2, column = 16 * first + warp % 2 * 8;  // first block of the pair
    uint32_t a11[4];
    ldmatrix_x4_transposed(a11, shared_address(&half.x[16 * first + lane % 16][warp % 2 * 8]));
    const AFragment<__half> l21 = block_operand(lower.below, first + 1, first);
    const AFragment<__half> a22 = block_operand(half.x, first + 1, 1);
    CFragment c{}, d{};
    mma<__half>(c, l21, BFragment<__half>{{a11[0], a11[1]}});
    mma<__half>(d, a22, as_operand(c));
    const int row = 16 * first + 16 + lane / 4;
    *reinterpret_cast<uint32_t*>(&half.x[row][warp % 2 * 8 + lane % 4 * 2]) =
        half_pair(-d[0], -d[1]);
    *reinterpret_cast<uint32_t*>(&half.x[row + 8][warp % 2 * 8 + lane % 4 * 2]) =
        half_pair(-d[2], -d[3]);
    store_negated<T>(inverse, d, 16 * first + 16, column, lane);
  }
  sync_invert();
  before_last();
  uint32_t a11[4];  // rows 0.. and 16.. of 8 columns
  ldmatrix_x4_transposed(a11, shared_address(&half.x[lane][8 * warp]));
  const AFragment<__half> l21[2][2] = {
      {block_operand(lower.below, 2, 0), block_operand(lower.below, 2, 1)},
      {block_operand(lower.below, 3, 0), block_operand(lower.below, 3, 1)}};
  const AFragment<__half> a22[3] = {block_operand(half.x, 2, 0), block_operand(half.x, 3, 0),
                                    block_operand(half.x, 3, 1)};
  BFragment<__half> product[2];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    CFragment c{};
    // The first 16 rows of warps 2 and 3 are above the diagonal: zero.
    mma<__half>(c, l21[m][0], BFragment<__half>{{a11[0], a11[1]}});
    mma<__half>(c, l21[m][1], BFragment<__half>{{a11[2], a11[3]}});
    product[m] = as_operand(c);
  }
  CFragment upper{}, under{};
  mma<__half>(upper, a22[0], product[0]);
  mma<__half>(under, a22[1], product[0]);
  mma<__half>(under, a22[2], product[1]);
  store_negated<T>(inverse, upper, 32, 8 * warp, lane);
  store_negated<T>(inverse, under, 48, 8 * warp, lane);
}

}  // namespace efla::cuda::sm90
