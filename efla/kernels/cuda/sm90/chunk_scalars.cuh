// A chunk's scalars on Hopper: its tokens' coefficients, norms and decays, for the walk
// (ChunkScalars) and for L_hat and P_hat (RowFactors, RowScalars), made from K K^T by a warpgroup
// whose threads t and t ^ 1 work for the same token. Notation: prepare.cuh.
#pragma once

#include "efla/kernels/cuda/sm90/inverse.cuh"
#include "efla/kernels/cuda/sm90/tile_rows.cuh"

namespace efla::cuda::sm90 {

// Factors of a chunk's rows and columns for L_hat and P_hat; where factors are folded, of chunks
// that are wide.
struct RowFactors {
  float query_scale[kC];   // of row t of P_hat
  float column_scale[kC];  // k_hat / k
  // With decay, of which D_ti = exp(G_t - G_i) is made as in GateFactors:
  float gate[kC];                   // log gates summed from the first token of 16 up to this one
  float query_head[kC];             // query_scale, and the decay from before these 16 to this token
  float column_tail[kC];            // column_scale, and the decay from this token to the last of 16
  alignas(16) float block_gate[4];  // decay over all 16
};

// Chunks take buffers in turn.
template <int kTriangles>
struct PrepareScratch {
  LowerTriangle lower[kTriangles];
  HalfInverse inverse;
  RowFactors factors[2];
  float beta[2][kC], log_decay[2][kC];
  float unit[kC];  // by which rows of k have been divided
};

inline constexpr int kPrepareBarrier = 1;  // named barrier of this warpgroup
__device__ __forceinline__ void sync_prepare() { sync_threads(kPrepareBarrier, kWarpgroup); }

__device__ __forceinline__ float2 float_pair(const float (&row)[kC], int i) {
  return *reinterpret_cast<const float2*>(&row[i]);
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

// Of the four threads that share two rows, t and t ^ 1 work for row g + 8 (t / 2).
__device__ __forceinline__ int own_row(int thread) {
  return thread / 32 * 16 + thread % 32 / 4 + thread % 4 / 2 * 8;
}

// Where the next chunk's tokens are, for one head. Beyond the last one nothing is read from there.
template <bool kDecay>
struct TokenSource {
  const float *beta, *log_decay;

  __device__ __forceinline__ TokenSource(const ChunkArgs& a, const Place& p)
      : beta(element<float>(a.beta, p.row, p.begin, p.hv)) {
    if constexpr (kDecay) log_decay = element<float>(a.log_decay, p.row, p.begin, p.hv);
  }
  // Starts reading the token of a thread's row for the chunk of buffer `to`, ahead of the chunk's
  // tiles, where there are `left` tokens. Nobody but the row's threads, of one warp, look at it.
  template <typename Scratch>
  __device__ __forceinline__ void read(const ChunkArgs& a, Scratch& s, int to, int left,
                                       int thread) {
    if (thread % 2 == 0) {
      const int own = own_row(thread);
      copy_async_float(&s.beta[to][own], beta + own * a.beta.token, own < left);
      if constexpr (kDecay) {
        copy_async_float(&s.log_decay[to][own], log_decay + own * a.log_decay.token, own < left);
      }
    }
    commit_copies();
    beta += kC * a.beta.token;
    if constexpr (kDecay) log_decay += kC * a.log_decay.token;
  }
};

// A token's scalars for the normalised key: e |k|^2 / |k as stored|, w |k| and the log gate; and,
// where there is no gate, the quotient w |k| of the first. The key has been divided by `unit`,
// which counts as 1 where it is normalised anyway; `root` is 1 / |k|, or 0.
struct HatCoefficients {
  float log_gate, erase, write, ratio;
};

template <bool kDecay>
__device__ __forceinline__ HatCoefficients hat_coefficients(const ChunkArgs& a, const TokenInput& x,
                                                            float square, float root, float unit) {
  if constexpr (!kDecay) {  // the chain that matters most
    const bool exact = a.rule == Rule::kExact;
    if ((exact || a.rule == Rule::kEuler) && !a.qk_l2norm && square > 0.f && unit == 1.f) {
      const float erase = exact ? one_minus_exp(x.beta * square) * root : x.beta * (square * root);
      return {0.f, erase, erase, 1.f};
    }
  }
  const float key_scale = a.qk_l2norm ? rsqrtf(square + 1e-6f) : 1.f;
  const float lambda = a.qk_l2norm ? square * key_scale * key_scale : square;
  const bool exact_rule = a.rule == Rule::kExact || (kDecay && a.rule == Rule::kExactLog);
  if (__builtin_expect(exact_rule && square > 0.f && unit == 1.f, 1)) {
    // e |k|^2 = 1 - e^-x without the detour over phi.
    if constexpr (!kDecay) {
      const float erased = -expm1f(-x.beta * lambda);
      const float erase = erased * root, ratio = a.qk_l2norm ? 1.f / key_scale : 1.f;
      return {0.f, erase, erase * ratio, ratio};
    }
    const bool exact = a.rule == Rule::kExact;
    const float rate = exact ? lambda * fast_exp(x.log_decay) : lambda;
    const float log_gate = exact ? -one_minus_exp(-x.log_decay) : x.log_decay;
    const float eta = x.beta * rate - log_gate;
    const float norm = square * root * key_scale;
    // A huge beta still gives 1 / rate.
    const float quotient = eta <= FLT_MAX ? x.beta / eta : 1.f / rate;
    return {log_gate, one_minus_exp(x.beta * rate) * root,
            eta > 0.f ? one_minus_exp(eta) * quotient * norm : x.beta * norm, 1.f};
  }
  const auto c = key_coefficients(a.rule, x.beta, lambda, unit, kDecay, x.log_decay);
  const float norm = square > 0.f ? square * root * key_scale : 1.f;  // |k|; 1 for a zero key
  return {c.log_gate, c.erase * norm * key_scale, c.write * norm,
          a.qk_l2norm ? 1.f / key_scale : 1.f / unit};
}

// What store_lower needs of this thread's rows 16 warp + g and + 8.
struct RowScalars {
  float scale[2];  // e |k|, of row t of L_hat
  float head[2];   // the same, and the decay from before these 16 tokens
  float gate[2];
  int wide = 1;                    // see WholeChunk
  float key_square, query_square;  // of own_row(), the latter where it was asked for
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

// |k|^2 of own_row(), from the diagonal of K K^T.
__device__ __forceinline__ float own_square(const float (&kk)[32], int warp, int thread) {
  const int lane = thread % 32, g = lane / 4;
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

// Keys of a chunk that all have such squares, or none, differ so little that a triangle in half
// holds their ratios as well, with steps e |k|^2 up to 2, beyond which nothing is stable. With
// decay w and e differ, and w / e is asked for.
template <bool kDecay>
__device__ __forceinline__ bool is_mild(float square, float root, const HatCoefficients& c) {
  // Without branches, which cost more here than the comparisons they save.
  const bool mild =
      square == 0.f | (square >= 0x1p-12f & square <= 0x1p12f & fabsf(c.erase) <= 2.f * root);
  return kDecay ? mild & fabsf(c.write) <= 0x1p16f * fabsf(c.erase) : mild;
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

// Leaves the squares of own_row() in a chunk's scalars in the workspace.
__device__ __forceinline__ void keep_squares(const ChunkArgs& a, int64_t place,
                                             const RowScalars& rows, int thread) {
  if (thread % 2 != 0) return;
  float* to = a.scalars + place * kScalarRows * kC + own_row(thread);
  to[kKeySquare * kC] = rows.key_square;
  if (a.qk_l2norm) to[kQuerySquare * kC] = rows.query_square;
}

// What the stored state has to be multiplied by to be the state (kFoldedFactors): 1 at first, and
// a power of two where it has just paid. What is added is divided by it, and what is read
// multiplied, so its range takes from that of v at both ends.
struct OwedDecay {
  float decay = 1.f;
  bool last = false;  // chunk of the walk, which leaves no debt
};
inline constexpr float kLeastOwed = 0x1p-24f, kMostOwed = 0x1p64f;

// Enough for another chunk that decays like this one, or for some that hardly do; and its inverse.
__device__ __forceinline__ float next_owed(float chunk_gate) {
  const float next = fminf(fmaxf(0x1p8f / chunk_gate, 0x1p32f), kMostOwed);
  return __uint_as_float(__float_as_uint(next) & 0x7f800000u);
}
__device__ __forceinline__ float inverse_of_power(float x) {
  return __uint_as_float(0x7f000000u - __float_as_uint(x));
}

// Of a wide chunk's factors, by which others are divided: smaller ones count as this. A decay below
// it so lets through 2^-40 of what came before.
inline constexpr float kLeastFactor = 0x1p-40f;

// The scalars of one chunk, whose tokens were read to buffer j. False: rows of k, or of q where
// they are normalised, may have been long and have been shortened; then kk is to be made anew, and
// this called `again`; `warp` is that of the thread, the same in a register that all share. (To
// keep kk and the rest until then would take registers that nobody has.)
template <typename T, int kK, bool kDecay, bool kScores, bool kFolded, typename Scratch>
__device__ __forceinline__ bool make_scalars(RowScalars& rows, const ChunkArgs& a, Scratch& s,
                                             const float (&kk)[32], unsigned char* k,
                                             unsigned char* q, ChunkScalars& scalars,
                                             float (&query_row)[kC], int j, int tokens,
                                             bool normed_queries, bool again, int warp, int thread,
                                             OwedDecay& owed) {
  constexpr bool kOwes = kFolded && kDecay;
  int lane = thread % 32, row = own_row(thread);
  bool writes = lane % 2 == 0;
  RowFactors& f = s.factors[j];
  float query = a.scale;
  if (thread == 0 && !again) scalars.whole.long_rows = 0;
  bool may = false;
  if (normed_queries) {
    const float square = own_query_square<T>(q, kK / 64, row, lane % 2);
    query *= rsqrtf(square + 1e-6f);
    may = may_be_long<T>(square);
    rows.query_square = square;
  }
  const float square = own_square(kk, warp, thread);
  rows.key_square = square;
  const float root = square > 0.f ? rsqrtf(square) : 0.f;
  HatCoefficients c{};
  if (row < tokens) {
    const TokenInput token{s.beta[j][row], kDecay ? s.log_decay[j][row] : 0.f};
    c = hat_coefficients<kDecay>(a, token, square, root, again ? s.unit[row] : 1.f);
  }
  hide_index<kWarpgroup>(thread);  // or addresses are kept across what few tokens need, and spill
  lane = thread % 32, row = own_row(thread), writes = lane % 2 == 0;
  const float key_out = square > 0.f ? root : a.qk_l2norm ? rsqrtf(1e-6f) : 1.f;
  float head = 1.f, tail = 1.f;
  if constexpr (kDecay) {  // inclusive sums over the warp's 16 tokens
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, c.log_gate, offset);
      if (lane >= offset) c.log_gate += other;
    }
    const float first = __shfl_sync(0xffffffffu, c.log_gate, 28);
    if (lane % 4 >= 2) c.log_gate += first;
    head = fast_exp(c.log_gate);
    if (lane == 31) f.block_gate[thread / 32] = head;
  }
  // What L_hat and P_hat are multiplied by, unless factors are folded and the chunk is not wide;
  // and `tail`, which nothing else needs.
  const auto store_factors = [&](float query_scale) {
    if constexpr (kDecay) tail = fast_exp(__shfl_sync(0xffffffffu, c.log_gate, 31) - c.log_gate);
    if (!writes) return;
    f.column_scale[row] = key_out;
    if constexpr (kScores) f.query_scale[row] = query_scale;
    if constexpr (kDecay) {
      f.gate[row] = c.log_gate;
      f.column_tail[row] = key_out * tail;
      if constexpr (kScores) f.query_head[row] = query_scale * head;
    }
  };
  if constexpr (!kFolded) store_factors(query);
  if (writes) may = may_be_long<T>(square);  // the other of the two has the query
  // The vote tells nvcc that all agree; else it uses no uniform registers from here on.
  const auto any_of = [](bool x) {
    return __any_sync(0xffffffffu, sync_threads_or(kPrepareBarrier, kWarpgroup, x));
  };
  int any = any_of(may | (kFolded && !is_mild<kDecay>(square, root, c)));
  if constexpr (kFolded) {
    rows.wide = any;
    if (any) any = any_of(may);
  }
  if (any && !again && shortens_rows(a)) {
    const float by = may ? shorten_row<T>(writes ? k : q, kK / 64, row) : 1.f;
    if (writes) s.unit[row] = a.qk_l2norm ? 1.f : by;
    const bool shortened = sync_threads_or(kPrepareBarrier, kWarpgroup, by != 1.f);
    if (thread == 0) scalars.whole.long_rows = shortened;
    return false;
  }
  float gate = 1.f, before = 1.f, behind = 1.f, pay = 1.f;
  if constexpr (kDecay) {
    const GateFactors factors(f.block_gate);
    before = factors.between(-1, thread / 32) * head;
    gate = factors.between(-1, 4);
    if constexpr (!kFolded) behind = factors.between(thread / 32, 4) * tail;
  }
  if constexpr (kOwes) {
    const float chunk_gate = gate;
    before *= owed.decay, gate *= owed.decay;
    const bool fits = gate >= kLeastOwed && gate <= kMostOwed;
    rows.wide = __any_sync(0xffffffffu, rows.wide || !fits);
    owed.decay = gate;
    // Or another chunk like this one would not fit.
    const bool goes_on = gate >= 1.f && gate * chunk_gate >= kLeastOwed && gate <= 0x1p48f;
    if (rows.wide || !goes_on || owed.last) {
      owed.decay = owed.last ? 1.f : next_owed(chunk_gate);
      pay = (rows.wide ? 1.f : gate) * inverse_of_power(owed.decay);
    }
  }
  float erase = c.erase * before, write = kFolded ? c.ratio : c.write;
  if constexpr (kFolded) {
    if (!rows.wide) {
      erase = c.erase * key_out;
      if constexpr (kOwes) {
        const float over = c.erase * before;  // can vanish where erase does not
        write = over != 0.f ? __fdividef(c.write, over) : 0.f;
      }
      c.erase = erase;
    } else {
      if constexpr (kOwes) {
        const float least = kLeastFactor * key_out;
        if (c.write != 0.f && fabsf(erase) < least) erase = least;
        write = erase != 0.f ? c.write / erase : 0.f;
        before = fmaxf(before, kLeastFactor);
      }
      store_factors(1.f / before);
      if constexpr (kOwes) {
        behind = fmaxf(GateFactors(f.block_gate).between(thread / 32, 4) * tail, kLeastFactor);
      }
      sync_prepare();
    }
  }
  share_rows(rows.scale, c.erase, thread);
  if constexpr (kDecay) {
    if (!kFolded || rows.wide) {
      share_rows(rows.head, c.erase * head, thread);
      share_rows(rows.gate, c.log_gate, thread);
    }
  }
  if (writes) {
    scalars.erase[row] = erase;
    scalars.write[row] = write;
    if constexpr (kScores) query_row[row] = query * before;
    scalars.key_out[row] = key_out * behind;
  }
  if (thread == 0) {
    scalars.whole.gate = gate, scalars.whole.wide = rows.wide, scalars.whole.pay = pay;
  }
  return true;
}

}  // namespace efla::cuda::sm90
