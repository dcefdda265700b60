// The auxiliary warpgroup of the scan: what a chunk needs beside the state, one or two chunks
// ahead of the warpgroups that hold it.
//
//   L_hat_ti = e_hat_t D_ti (k_hat_t . k_hat_i), i < t        A_hat = (I + L_hat)^-1
//   P_hat_ti = scale D_ti (q_t . k_hat_i), i <= t      (its tile holds P_hat^T)
//
// as in the portable chunk_prepare.cuh (same notation), from tiles that are in shared memory
// already, results to swizzled tiles there.
#pragma once

#include "efla/flow/long_key.h"
#include "efla/kernels/cuda/sm90/chunk.cuh"

namespace efla::cuda::sm90 {

inline constexpr int kPrepareBarrier = 1;  // named barrier of this warpgroup
inline constexpr int kPitch = kC + 8;      // of the half triangles: ldmatrix without bank conflicts

// An 8 x 8 block of L_hat on the diagonal, transposed. Two neighbours fall on different banks.
struct alignas(16) DiagonalBlock {
  float column[8][8];
  float padding[4];
};

// Factors of a chunk's rows and columns for L_hat and P_hat.
struct RowFactors {
  float query_scale[kC];   // of row t of P_hat
  float column_scale[kC];  // k_hat / k
  // With decay, of which D_ti = exp(G_t - G_i) is made as in GateFactors:
  float gate[kC];                   // log gates summed from the first token of 16 up to this one
  float query_head[kC];             // query_scale, and the decay from before these 16 to this token
  float column_tail[kC];            // column_scale, and the decay from this token to the last of 16
  alignas(16) float block_gate[4];  // decay over all 16
};

// Operands of products are half whatever T is: as precise as TF32. Its range is enough for all
// steps under which the recurrence itself is stable, for then no element of A_hat is above 2.
struct PrepareScratch {
  DiagonalBlock diagonal[kC / 8];
  alignas(16) __half lower[kC][kPitch];    // L_hat below these
  alignas(16) __half inverse[kC][kPitch];  // A_hat but for its last block of 32
  RowFactors factors[2];                   // of this chunk and the next, or the one before
  float beta[2][kC], log_decay[2][kC];     // of this chunk and the next
};

__device__ __forceinline__ void sync_prepare() { sync_threads(kPrepareBarrier, kWarpgroup); }

__device__ __forceinline__ float2 float_pair(const float (&row)[kC], int i) {
  return *reinterpret_cast<const float2*>(&row[i]);
}

// Two neighbouring elements of a result as an operand.
__device__ __forceinline__ uint32_t half_pair(float x, float y) { return pack<__half>(x, y); }

// Block (row, column) of 16 x 16 as operand A.
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
__device__ __forceinline__ void invert(PrepareScratch& s, unsigned char* inverse, int thread,
                                       Work before_last) {
  const int warp = thread / 32, lane = thread % 32;
  {
    const int row = 16 * warp + lane % 16, column = row / 8 * 8;
    float x[8];
    solve_block(x, s.diagonal[row / 8], lane);
    if (lane < 16) {  // one half of the lanes stores the operand, the other the tile
      *reinterpret_cast<uint4*>(&s.inverse[row][column]) =
          make_uint4(half_pair(x[0], x[1]), half_pair(x[2], x[3]), half_pair(x[4], x[5]),
                     half_pair(x[6], x[7]));
    } else {
      *reinterpret_cast<uint4*>(inverse + tile_offset(row, column)) = make_uint4(
          pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7]));
    }
    __syncwarp();
    // In products of 16: L21 and A22 are the lower left and the lower right block of A.
    uint32_t a11[4];
    ldmatrix_x4_transposed(a11, shared_address(&s.inverse[row][16 * warp]));
    const uint32_t l21 = block_operand(s.lower, warp, warp).x[1];
    const uint32_t a22 = block_operand(s.inverse, warp, warp).x[3];
    CFragment c{}, d{};
    mma<__half>(c, AFragment<__half>{{0, l21, 0, 0}}, BFragment<__half>{{a11[0], 0}});
    mma<__half>(d, AFragment<__half>{{0, 0, 0, a22}},
                BFragment<__half>{{0, transpose(half_pair(c[2], c[3]))}});
    __syncwarp();  // a22 was read beside what is written now
    const int r = 16 * warp + 8 + lane / 4, k = 16 * warp + lane % 4 * 2;
    *reinterpret_cast<uint32_t*>(&s.inverse[r][k]) = half_pair(-d[2], -d[3]);
    *reinterpret_cast<uint32_t*>(inverse + tile_offset(r, k)) = pack<T>(-d[2], -d[3]);
  }
  sync_prepare();
  {
    const int first = warp / 2 * 2, column = 16 * first + warp % 2 * 8;  // first block of the pair
    uint32_t a11[4];
    ldmatrix_x4_transposed(a11, shared_address(&s.inverse[16 * first + lane % 16][column]));
    const AFragment<__half> l21 = block_operand(s.lower, first + 1, first);
    const AFragment<__half> a22 = block_operand(s.inverse, first + 1, first + 1);
    CFragment c{}, d{};
    mma<__half>(c, l21, BFragment<__half>{{a11[0], a11[1]}});
    mma<__half>(d, a22, as_operand(c));
    const int row = 16 * first + 16 + lane / 4;
    *reinterpret_cast<uint32_t*>(&s.inverse[row][column + lane % 4 * 2]) = half_pair(-d[0], -d[1]);
    *reinterpret_cast<uint32_t*>(&s.inverse[row + 8][column + lane % 4 * 2]) =
        half_pair(-d[2], -d[3]);
    store_negated<T>(inverse, d, 16 * first + 16, column, lane);
  }
  sync_prepare();
  before_last();
  uint32_t a11[4];  // rows 0.. and 16.. of 8 columns
  ldmatrix_x4_transposed(a11, shared_address(&s.inverse[lane][8 * warp]));
  const AFragment<__half> l21[2][2] = {
      {block_operand(s.lower, 2, 0), block_operand(s.lower, 2, 1)},
      {block_operand(s.lower, 3, 0), block_operand(s.lower, 3, 1)}};
  const AFragment<__half> a22[3] = {block_operand(s.inverse, 2, 2), block_operand(s.inverse, 3, 2),
                                    block_operand(s.inverse, 3, 3)};
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

// Zeroes row `row` of the tiles of one operand, 64 columns each.
__device__ __forceinline__ void zero_row(unsigned char* tiles, int count, int row) {
#pragma unroll 1
  for (int i = 0; i < count * 8; ++i) {
    *reinterpret_cast<uint4*>(tiles + i / 8 * (kC * 128) + row * 128 + i % 8 * 16) =
        make_uint4(0, 0, 0, 0);
  }
}

// sum of the squares of 8 elements of row `row` of the tiles, from column 8 i on.
template <typename T>
__device__ __forceinline__ float square_of_piece(const unsigned char* tiles, int row, int i) {
  const uint4 piece = *reinterpret_cast<const uint4*>(tiles + i / 8 * (kC * 128) + row * 128 +
                                                      ((i % 8) ^ (row % 8)) * 16);
  const T* x = reinterpret_cast<const T*>(&piece);
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < 8; ++j) sum += static_cast<float>(x[j]) * static_cast<float>(x[j]);
  return sum;
}

// Of the whole row.
template <typename T>
__device__ __forceinline__ float square_of_row(const unsigned char* tiles, int count, int row) {
  float sum = 0.f;
#pragma unroll 2
  for (int i = 0; i < count * 8; ++i) sum += square_of_piece<T>(tiles, row, i);
  return sum;
}

// Whether a row of K or Q with that square may be long (long_key.h). Half has no such rows.
template <typename T>
__device__ __forceinline__ bool may_be_long(float square) {
  return kIsBfloat16<T> && square > 0x1p53f;
}

// Whether rows are shortened at all.
__device__ __forceinline__ bool shortens_rows(const ChunkArgs& a) {
  return a.qk_l2norm || is_long_key(a.rule, HUGE_VALF);
}

// Divides row `row` of the tiles by a power of two, which it returns: 1 but for long rows, by their
// largest element, so that all who ask find the same. A row with an infinite element becomes NaN.
template <typename T>
__device__ __forceinline__ float shorten_row(unsigned char* tiles, int count, int row) {
  const auto piece = [&](int i) {
    return reinterpret_cast<uint4*>(tiles + i / 8 * (kC * 128) + row * 128 + i % 8 * 16);
  };
  float largest = 0.f;
#pragma unroll 1
  for (int i = 0; i < count * 8; ++i) {
    const uint4 bits = *piece(i);
    const T* x = reinterpret_cast<const T*>(&bits);
    for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fabsf(static_cast<float>(x[j])));
  }
  if (!(largest > 0x1p27f)) return 1.f;
  const float unit = unit_of(largest), factor = largest <= FLT_MAX ? 1.f / unit : NAN;
#pragma unroll 1
  for (int i = 0; i < count * 8; ++i) {
    uint4 bits = *piece(i);
    T* x = reinterpret_cast<T*>(&bits);
    for (int j = 0; j < 8; ++j) x[j] = T(static_cast<float>(x[j]) * factor);
    *piece(i) = bits;
  }
  fence_async_proxy();
  return unit;
}

// What a token brings from global memory.
struct TokenInput {
  float beta, log_decay;
};

// Starts copying a float into shared memory, or a zero; commit_copies() and wait_copies() finish
// it.
__device__ __forceinline__ void copy_async_float(float* shared, const float* global, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(exists ? 4 : 0)
               : "memory");
}

// Starts reading a thread's token for the chunk of buffer `to`, ahead of the chunk's tiles.
template <bool kDecay>
__device__ __forceinline__ void read_token(const ChunkArgs& a, PrepareScratch& s, int to, int row,
                                           int token, int hv, int thread, bool exists) {
  if (thread < kC) {
    if (!exists) token = 0;  // an address that may be formed
    copy_async_float(&s.beta[to][thread], element<float>(a.beta, row, token, hv), exists);
    if constexpr (kDecay) {
      copy_async_float(&s.log_decay[to][thread], element<float>(a.log_decay, row, token, hv),
                       exists);
    }
  }
  commit_copies();
}

// A token's scalars for the normalised key: e |k|^2 / |k as stored|, w |k| and the log gate. The
// key has been divided by `unit`, which counts as 1 where it is normalised anyway.
struct HatCoefficients {
  float log_gate, erase, write;
};

template <bool kDecay>
__device__ __forceinline__ HatCoefficients hat_coefficients(const ChunkArgs& a, const TokenInput& x,
                                                            float square, float unit) {
  const float root = square > 0.f ? rsqrtf(square) : 0.f;
  const float key_scale = a.qk_l2norm ? rsqrtf(square + 1e-6f) : 1.f;
  const float lambda = a.qk_l2norm ? square * key_scale * key_scale : square;
  const bool exact_rule = a.rule == Rule::kExact || (kDecay && a.rule == Rule::kExactLog);
  if (__builtin_expect(exact_rule && square > 0.f && unit == 1.f, 1)) {
    // e |k|^2 = 1 - e^-x without the detour over phi: the chain that matters most.
    if constexpr (!kDecay) {
      const float erased = -expm1f(-x.beta * lambda);
      return {0.f, erased * root, a.qk_l2norm ? erased * root / key_scale : erased * root};
    }
    const bool exact = a.rule == Rule::kExact;
    const float rate = exact ? lambda * expf(x.log_decay) : lambda;
    const float log_gate = exact ? expm1f(x.log_decay) : x.log_decay;
    const float eta = x.beta * rate - log_gate;
    const float norm = square * root * key_scale;
    // A huge beta still gives 1 / rate.
    const float quotient = eta <= FLT_MAX ? x.beta / eta : 1.f / rate;
    return {log_gate, -expm1f(-x.beta * rate) * root,
            eta > 0.f ? -expm1f(-eta) * quotient * norm : x.beta * norm};
  }
  const auto c = key_coefficients(a.rule, x.beta, lambda, unit, kDecay, x.log_decay);
  const float norm = square > 0.f ? square * root * key_scale : 1.f;  // |k|; 1 for a zero key
  return {c.log_gate, c.erase * norm * key_scale, c.write * norm};
}

// Starts d = X K^T for tiles x and k of the chunk, for kColumns of k's rows.
template <typename T, int kK, int kColumns = kC>
__device__ __forceinline__ void multiply_keys(float (&d)[kColumns / 2], const unsigned char* x,
                                              const unsigned char* k) {
  fence_products();
#pragma unroll
  for (int i = 0; i < kK / 16; ++i) {
    const int offset = i / 4 * (kC * 128 / 16) + i % 4 * 2;
    product_shared<T>(d, describe_rows(x) + offset, describe_rows(k) + offset, i > 0);
  }
  commit_products();
}

// What store_lower needs of this thread's rows 16 warp + g and + 8.
struct RowScalars {
  float scale[2];  // e |k|, of row t of L_hat
  float head[2];   // the same, and the decay from before these 16 tokens
  float gate[2];
};

// D_ti for t and i of different blocks of 16 is the decay from the head of t's block to t, times
// that over the blocks between, times that from i to the tail of its block: an exponential per
// token in the place of one per element, and none of them can overflow.
struct GateFactors {
  float f[4];  // of the blocks

  GateFactors() = default;
  explicit __device__ __forceinline__ GateFactors(const float (&block_gate)[4]) {
    const float4 x = *reinterpret_cast<const float4*>(block_gate);
    f[0] = x.x, f[1] = x.y, f[2] = x.z, f[3] = x.w;
  }
  // Over the blocks first < b < last.
  __device__ __forceinline__ float between(int first, int last) const {
    float product = 1.f;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      if (b > first && b < last) product *= f[b];
    }
    return product;
  }
};

// Of the four threads that share two rows, t and t ^ 1 work for row g + 8 (t / 2).
__device__ __forceinline__ int own_row(int thread) {
  return thread / 32 * 16 + thread % 32 / 4 + thread % 4 / 2 * 8;
}

// |k|^2 of own_row(), from the diagonal of K K^T.
__device__ __forceinline__ float own_square(const float (&kk)[32], int thread) {
  const int warp = thread / 32, lane = thread % 32, g = lane / 4;
  // Element (r, r) of the two 8 x 8 blocks on the diagonal lies with lane 4 g + g / 2.
  const bool odd = g % 2 == 1;
  float x = 0.f, y = 0.f;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if (warp == w) x = odd ? kk[8 * w + 1] : kk[8 * w], y = odd ? kk[8 * w + 7] : kk[8 * w + 6];
  }
  x = __shfl_sync(0xffffffffu, x, 4 * g + g / 2);
  y = __shfl_sync(0xffffffffu, y, 4 * g + g / 2);
  return lane % 4 < 2 ? x : y;
}

// Both rows' values of what each thread has for its own.
__device__ __forceinline__ void share_rows(float (&both)[2], float own, int thread) {
  both[0] = __shfl_sync(0xffffffffu, own, thread % 32 / 4 * 4);
  both[1] = __shfl_sync(0xffffffffu, own, thread % 32 / 4 * 4 + 2);
}

// |q|^2 of own_row(): half a row each.
template <typename T>
__device__ __forceinline__ float own_query_square(const unsigned char* q, int count, int row,
                                                  int half) {
  float sum = 0.f;
#pragma unroll 2
  for (int i = half; i < count * 8; i += 2) sum += square_of_piece<T>(q, row, i);
  return sum + __shfl_xor_sync(0xffffffffu, sum, 1);
}

// The scalars of one chunk, whose tokens were read to buffer j. Long rows of k, and of q where they
// are normalised, are shortened.
template <typename T, int kK, bool kDecay, bool kScores>
__device__ __forceinline__ RowScalars make_scalars(const ChunkArgs& a, PrepareScratch& s,
                                                   float (&kk)[32], unsigned char* k,
                                                   unsigned char* q, ChunkScalars& scalars, int j,
                                                   int tokens, bool normed_queries, int thread) {
  const int lane = thread % 32, row = own_row(thread);
  const bool writes = lane % 2 == 0;
  RowFactors& f = s.factors[j];
  HatCoefficients c;
  float key_out, head = 1.f, tail = 1.f, query, unit = 1.f;
  if (thread == 0) scalars.whole.long_rows = 0;
#pragma unroll 1
  while (true) {
    query = a.scale;
    bool may = false;
    if (normed_queries) {
      const float square = own_query_square<T>(q, kK / 64, row, lane % 2);
      query *= rsqrtf(square + 1e-6f);
      may = may_be_long<T>(square);
    }
    pin(kk);  // or nvcc serialises the products (C7511)
    const float square = own_square(kk, thread);
    c = {0.f, 0.f, 0.f};
    if (row < tokens) {
      const TokenInput token{s.beta[j][row], kDecay ? s.log_decay[j][row] : 0.f};
      c = hat_coefficients<kDecay>(a, token, square, unit);
    }
    key_out = square > 0.f ? rsqrtf(square) : a.qk_l2norm ? rsqrtf(square + 1e-6f) : 1.f;
    if (writes) {
      f.column_scale[row] = key_out;
      if constexpr (kScores) f.query_scale[row] = query;
    }
    if constexpr (kDecay) {  // inclusive sums over the warp's 16 tokens
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) {
        const float other = __shfl_up_sync(0xffffffffu, c.log_gate, offset);
        if (lane >= offset) c.log_gate += other;
      }
      const float first = __shfl_sync(0xffffffffu, c.log_gate, 28);
      if (lane % 4 >= 2) c.log_gate += first;
      head = expf(c.log_gate);
      tail = expf(__shfl_sync(0xffffffffu, c.log_gate, 31) - c.log_gate);
      if (writes) {
        f.gate[row] = c.log_gate;
        f.column_tail[row] = key_out * tail;
        if constexpr (kScores) f.query_head[row] = query * head;
      }
      if (lane == 31) f.block_gate[thread / 32] = head;
    }
    if (writes) may = may_be_long<T>(square);  // the other of the two has the query
    if (!sync_threads_or(kPrepareBarrier, kWarpgroup, may)) break;
    if (!shortens_rows(a)) break;
    float by = 1.f;
    if (may) by = shorten_row<T>(writes ? k : q, kK / 64, row);
    if (!sync_threads_or(kPrepareBarrier, kWarpgroup, by != 1.f)) break;
    // Then all starts again.
    by = __shfl_sync(0xffffffffu, by, lane & ~1);
    if (!a.qk_l2norm && by != 1.f) unit = by;
    if (thread == 0) scalars.whole.long_rows = 1;
    multiply_keys<T, kK>(kk, k, k);
    wait_products<0>();
    pin(kk);
  }
  RowScalars rows{};
  share_rows(rows.scale, c.erase, thread);
  float gate = 1.f, before = 1.f, behind = 1.f;
  if constexpr (kDecay) {
    share_rows(rows.head, c.erase * head, thread);
    share_rows(rows.gate, c.log_gate, thread);
    const GateFactors factors(f.block_gate);
    before = factors.between(-1, thread / 32) * head;
    behind = factors.between(thread / 32, 4) * tail;
    gate = factors.between(-1, 4);
  }
  if (writes) {
    scalars.erase[row] = c.erase * before;
    scalars.write[row] = c.write;
    if constexpr (kScores) scalars.query[row] = query * before;
    scalars.key_out[row] = key_out * behind;
  }
  if (thread == 0) scalars.whole.gate = gate;
  return rows;
}

// L_hat from K K^T, row factor times column factor times D_ti.
template <bool kDecay>
__device__ __forceinline__ void store_lower(PrepareScratch& s, const RowFactors& f,
                                            const RowScalars& rows, const float (&kk)[32],
                                            int thread) {
  const int warp = thread / 32, lane = thread % 32;
  const int r = lane / 4, t4 = lane % 4 * 2;
  const auto store = [&](int j, int h, float x, float y) {
    *reinterpret_cast<uint32_t*>(&s.lower[16 * warp + 8 * h + r][8 * j + t4]) = half_pair(x, y);
  };
  const GateFactors gates = kDecay ? GateFactors(f.block_gate) : GateFactors();
  // Columns of the 16-token blocks before this warp's own. Factors are read ahead of the writes:
  // the compiler cannot tell that they do not overlap.
#pragma unroll
  for (int j1 = 0; j1 < 6; j1 += 4) {
    if (j1 >= 2 * warp) break;
    const int count = min(4, 6 - j1);
    float2 column[4];
#pragma unroll
    for (int i = 0; i < count; ++i) {
      column[i] = float_pair(kDecay ? f.column_tail : f.column_scale, 8 * (j1 + i) + t4);
    }
#pragma unroll
    for (int i = 0; i < count; i += 2) {
      const int block = (j1 + i) / 2;
      if (block >= warp) break;
      const float between = kDecay ? gates.between(block, warp) : 1.f;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int j = j1 + i + n / 2, h = n % 2;
        const float row = kDecay ? rows.head[h] * between : rows.scale[h];
        store(j, h, row * column[i + n / 2].x * kk[4 * j + 2 * h],
              row * column[i + n / 2].y * kk[4 * j + 2 * h + 1]);
      }
    }
  }
#pragma unroll
  for (int w = 0; w < 4; ++w) {  // its own, of which the upper right block of 8 is zero
    if (warp != w) continue;
    float2 column[2], gate[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      column[i] = float_pair(f.column_scale, 16 * w + 8 * i + t4);
      if constexpr (kDecay) gate[i] = float_pair(f.gate, 16 * w + 8 * i + t4);
    }
#pragma unroll
    for (int n = 0; n < 3; ++n) {
      const int i = n / 2, h = (n + 1) / 2, j = 2 * w + i;  // column group, row group
      float x = rows.scale[h] * column[i].x * kk[4 * j + 2 * h];
      float y = rows.scale[h] * column[i].y * kk[4 * j + 2 * h + 1];
      if constexpr (kDecay) {
        x *= __expf(rows.gate[h] - gate[i].x), y *= __expf(rows.gate[h] - gate[i].y);
      }
      if (i < h) {
        store(j, h, x, y);
      } else {  // what lies above the diagonal is never read
        s.diagonal[j].column[t4][r] = x;
        s.diagonal[j].column[t4 + 1][r] = y;
      }
    }
  }
}

// P_hat transposed from kq = K Q^T: rows are keys, columns those of kColumns / 16 blocks of 16
// queries from `first` on. What lies below its diagonal is zero already.
template <typename T, bool kDecay, int kColumns>
__device__ __forceinline__ void store_scores(const RowFactors& f, const float (&kq)[kColumns / 2],
                                             unsigned char* scores, int first, int thread) {
  const int warp = thread / 32, lane = thread % 32;
  const int row = 16 * warp + lane / 4, t4 = lane % 4 * 2;
  const int offset = tile_offset(row, t4) ^ first << 5;
  if (first + kColumns / 16 <= warp) return;
  const float scale[2] = {f.column_scale[row], f.column_scale[row + 8]};
  const GateFactors gates = kDecay ? GateFactors(f.block_gate) : GateFactors();
  float tail[2] = {}, own[2] = {};
  if constexpr (kDecay) {
    tail[0] = f.column_tail[row], tail[1] = f.column_tail[row + 8];
    own[0] = f.gate[row], own[1] = f.gate[row + 8];
  }
#pragma unroll
  for (int b = 0; b < kColumns / 16; ++b) {
    const int block = first + b;
    if (block < warp) continue;
    const bool same = block == warp;
    float2 query[2], gate[2];  // read ahead of the writes, as above
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int c = 16 * block + 8 * i + t4;
      query[i] = float_pair(kDecay && !same ? f.query_head : f.query_scale, c);
      if (kDecay && same) gate[i] = float_pair(f.gate, c);
    }
    const float between = kDecay ? gates.between(warp, block) : 1.f;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int i = n / 2, h = n % 2, j = 2 * b + i;
      if (same && i < h) continue;
      const float factor = kDecay && !same ? tail[h] * between : scale[h];
      float x = factor * query[i].x * kq[4 * j + 2 * h];
      float y = factor * query[i].y * kq[4 * j + 2 * h + 1];
      if (kDecay && same) {
        x *= __expf(gate[i].x - own[h]), y *= __expf(gate[i].y - own[h]);
      }
      if (same && i == h) {
        if (t4 < lane / 4) x = 0.f;
        if (t4 + 1 < lane / 4) y = 0.f;
      }
      *reinterpret_cast<uint32_t*>(scores + ((offset ^ (j << 4)) + h * 1024)) = pack<T>(x, y);
    }
  }
}

}  // namespace efla::cuda::sm90
