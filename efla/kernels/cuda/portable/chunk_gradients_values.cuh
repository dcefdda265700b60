// The tiles of V that pass through a block of chunk_gradients.cuh, and the products over them.
#pragma once

#include "efla/kernels/cuda/portable/chunk_gradients_shared.cuh"

namespace efla::cuda {

// What one thread copies of every tile where there are two passes: a piece of U or dR, of dO or V,
// of S and of dS each. Made once, as the loop over the tiles has no time for it.
template <typename T, int kK, int kC>
struct GradientPieces {
  using Shared = GradientShared<T, kK, kC>;
  static constexpr int kRow = kGradientColumns / 8, kStateRow = Shared::kPassColumns / 8;  // pieces
  static_assert(2 * kC * kRow == kGradientThreads<kK, kC> &&
                kGradientColumns * kStateRow == kGradientThreads<kK, kC>);

  const bool second = threadIdx.x >= kGradientThreads<kK, kC> / 2;  // dR and V
  const int t = threadIdx.x / kRow % kC, c = threadIdx.x % kRow * 8;
  const int to = (t + second * kC) * Shared::kValuePitch + c;  // from Values::u or grad_o on
  const T *inner, *outer, *state, *grad_state;
  int columns;  // of V from c on, 0 for tokens that do not exist

  __device__ GradientPieces(const ChunkArgs& a, const Chunk& chunk, int64_t place, int hv) {
    const View& view = second ? a.v : a.grad_o;
    inner = static_cast<const T*>(second ? a.grad_r : a.u) + (place * kC + t) * a.columns + c;
    outer = element<T>(view, chunk.row, chunk.begin, hv) + t * view.token + c;
    columns = t < chunk.tokens ? a.value_dim - c : 0;
    const int64_t from = place * a.columns * kK + int64_t{state_row()} * kK + state_column();
    state = static_cast<const T*>(a.states) + from;
    grad_state = static_cast<const T*>(a.grad_states) + from;
  }
  __device__ int state_row() const { return threadIdx.x / kStateRow; }
  __device__ int state_column() const { return threadIdx.x % kStateRow * 8; }

  // `rows`: dO and V, too; V in the first pass only.
  __device__ void copy(typename Shared::Values& x, int pass, int column0, bool rows) const {
    copy_async_16(x.u + to, inner + column0, true);
    if (rows && (pass == 0 || !second)) {
      const bool valid = column0 < columns;
      copy_async_16(x.grad_o + to, valid ? outer + column0 : inner, valid);
    }
    const int from = column0 * kK + pass * Shared::kPassColumns;
    const int at = state_row() * Shared::kStatePitch + state_column();
    copy_async_16(x.state + at, state + from, true);
    copy_async_16(x.grad_state + at, grad_state + from, true);
  }
};

struct NoPieces {
  __device__ NoPieces(const ChunkArgs&, const Chunk&, int64_t, int) {}
};

template <typename T, int kK, int kC>
struct GradientValues {
  using Shared = GradientShared<T, kK, kC>;
  using Values = typename Shared::Values;
  static constexpr int kPasses = Shared::kPasses;
  static constexpr int kColumns = Shared::kPassColumns / Shared::kColumnWarps;  // of K, per warp
  static constexpr int kPair = 2 * kC / Shared::kColumnWarps;                   // of [dL | dP]
  static constexpr int kThreads = kGradientThreads<kK, kC>;
  static constexpr int kPerRow = kThreads / kC;
  static_assert(kColumns % 16 == 0 && kPair % 16 == 0);

  const ChunkArgs& a;
  Shared& s;
  const Chunk chunk;
  const int64_t place;
  const int hv;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int m0 = warp % Shared::kRowWarps * 16;  // first row
  const int wc = warp / Shared::kRowWarps;
  const bool scores = wc >= Shared::kColumnWarps / 2;      // dP rather than dL
  const int i0 = wc % (Shared::kColumnWarps / 2) * kPair;  // first column of dL or dP

  const std::conditional_t<kPasses == 2, GradientPieces<T, kK, kC>, NoPieces> pieces{a, chunk,
                                                                                     place, hv};

  float z[kColumns / 8][4], y[kColumns / 8][4], x[kColumns / 8][4];
  float pair[kPair / 8][4] = {};
  float write_dot = 0.f;  // part of dR.v of row threadIdx.x / kPerRow
  float state_dot = 0.f;  // part of <S0, dS>

  __device__ int row(int j) const { return m0 + lane / 4 + 8 * (j / 2); }
  __device__ int column(int n, int j) const { return n * 8 + lane % 4 * 2 + j % 2; }
  // First column of C tile n of a pass, within its part of K. Pairs of tiles go round the column
  // warps, so that each has some where K ends early.
  __device__ int within(int n) const {
    return (n / 2 * Shared::kColumnWarps + wc) * 16 + n % 2 * 8;
  }
  __device__ int first(int pass, int n) const { return pass * Shared::kPassColumns + within(n); }
  // Whether K reaches the warp's last pair of tiles.
  __device__ bool whole() const {
    return kPasses == 2 || kColumns == 16 || within(kColumns / 8 - 2) < a.key_dim;
  }

  __device__ const T* outer(const View& x) const {
    return element<T>(x, chunk.row, chunk.begin, hv);
  }

  // Starts the copies of one tile of V. (V itself and dL, dP belong to the first pass.)
  __device__ void load(int pass, int column0, Values& x) {
    constexpr int kG = kGradientColumns, kPitch = Shared::kValuePitch;
    const bool vectors = a.vector_grad_o && a.vector_v;
    if constexpr (kPasses == 2) pieces.copy(x, pass, column0, vectors);
    if (kPasses == 1 || !vectors) {
      load_tile_by<kThreads, kC, kG>(x.grad_o, kPitch, outer(a.grad_o) + column0, a.grad_o.token,
                                     chunk.tokens, a.value_dim - column0, a.vector_grad_o);
      load_tile_by<kThreads, kC, kG>(x.v, kPitch, outer(a.v) + column0, a.v.token, chunk.tokens,
                                     a.value_dim - column0, a.vector_v);
    }
    if constexpr (kPasses == 1) {
      const int64_t at = place * kC * a.columns + column0;
      load_tile_by<kThreads, kC, kG>(x.u, kPitch, static_cast<const T*>(a.u) + at, a.columns, kC,
                                     kG, true);
      load_tile_by<kThreads, kC, kG>(x.r, kPitch, static_cast<const T*>(a.grad_r) + at, a.columns,
                                     kC, kG, true);
      const int64_t state = (place * a.columns + column0) * kK;
      const int keys = used_keys<kK>(a);
      load_tile_by<kThreads, kG, kK>(x.state, Shared::kPitch,
                                     static_cast<const T*>(a.states) + state, kK, kG, keys, true);
      load_tile_by<kThreads, kG, kK>(x.grad_state, Shared::kPitch,
                                     static_cast<const T*>(a.grad_states) + state, kK, kG, keys,
                                     true);
    }
    commit_copies();
  }

  // One pass over the tiles of V, the next one's copies under way while one is multiplied. The very
  // first is there when this is called; the scalars are when its products have been made.
  __device__ void add_pass(int pass) {
    const int tiles = (a.value_dim + kGradientColumns - 1) / kGradientColumns;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) z[n][j] = y[n][j] = x[n][j] = 0.f;
    }
    int stage = Shared::kStages == 2 ? pass * tiles % 2 : 0;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      const bool last = tile + 1 == tiles, first = pass + tile == 0;
      const bool more = Shared::kStages == 2 && !(last && pass + 1 == kPasses);
      if (Shared::kStages == 1 && !first) load(pass, tile * kGradientColumns, s.tiles.values[0]);
      if (more) {
        load(last ? pass + 1 : pass, last ? 0 : (tile + 1) * kGradientColumns,
             s.tiles.values[1 - stage]);
      }
      if (!first) {
        if (more) {
          wait_copies<1>();
        } else {
          wait_copies<0>();
        }
        __syncthreads();
      }
      const Values& values = s.tiles.values[stage];
      if (whole()) {
        add_products<true>(pass, values);
      } else {
        add_products<false>(pass, values);
      }
      if (first) __syncthreads();
      if (pass == 0) add_elements(tile * kGradientColumns, values);
      if (a.log_decay.data) add_state_dots(values);  // nobody else asks for <S0, dS>
      __syncthreads();
      if constexpr (Shared::kStages == 2) stage = 1 - stage;
    }
  }

  // Products over one tile of V.
  template <bool kWhole>
  __device__ void add_products(int pass, const Values& tile) {
#pragma unroll
    for (int v0 = 0; v0 < kGradientColumns; v0 += 16) {
      const auto ar = load_a(tile.r, Shared::kValuePitch, m0, v0);
      const auto ao = load_a(tile.grad_o, Shared::kValuePitch, m0, v0);
      const auto au = load_a(tile.u, Shared::kValuePitch, m0, v0);
      BFragment<T> b[2];
      if (pass == 0) {
        const auto left = choose(scores, ao, ar);
#pragma unroll
        for (int n = 0; n < kPair; n += 16) {
          if (i0 + n > m0) continue;  // above the diagonal
          load_b_transposed(b, tile.u, Shared::kValuePitch, v0, i0 + n);
          mma<T>(pair[n / 8], left, b[0]);
          mma<T>(pair[n / 8 + 1], left, b[1]);
        }
      }
#pragma unroll
      for (int n = 0; n < (kWhole ? kColumns : kColumns - 16); n += 16) {
        load_b(b, tile.state, Shared::kStatePitch, v0, within(n / 8));
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          mma<T>(z[n / 8 + j], ar, b[j]);
          mma<T>(y[n / 8 + j], ao, b[j]);
        }
        load_b(b, tile.grad_state, Shared::kStatePitch, v0, within(n / 8));
        mma<T>(x[n / 8], au, b[0]);
        mma<T>(x[n / 8 + 1], au, b[1]);
      }
    }
  }

  __device__ void add_state_dots(const Values& tile) {
    constexpr int kPart = Shared::kPassColumns;
    constexpr int kPer = sizeof(T) == 2 && kPart >= 128 ? 8 : 2;  // at a time
    for (int i = kPer * threadIdx.x; i < kGradientColumns * kPart; i += kPer * kThreads) {
      const int at = i / kPart * Shared::kStatePitch + i % kPart;
      add_state_dot<kPer>(tile.state + at, tile.grad_state + at);
    }
  }

  template <int kCount>
  __device__ void add_state_dot(const T* state, const T* grad_state) {
    struct alignas(kCount * sizeof(T)) Some {
      T x[kCount];
    };
    const Some x = *reinterpret_cast<const Some*>(state);
    const Some y = *reinterpret_cast<const Some*>(grad_state);
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const float2 p = load_two(x.x + i), q = load_two(y.x + i);
      state_dot += p.x * q.x + p.y * q.y;
    }
  }

  // dV and the parts of dR.v.
  __device__ void add_elements(int column0, const Values& tile) {
    constexpr int kCount = kGradientColumns / kPerRow;
    const int t = threadIdx.x / kPerRow, c = threadIdx.x % kPerRow * kCount;
    T* grad_v = static_cast<T*>(a.grad_v.data) + chunk.row * a.grad_v.batch +
                (chunk.begin + t) * a.grad_v.token + hv * a.grad_v.head + column0;
    const float write = s.scalars.write[t] * s.scalars.norm[t];
    float out[kCount];
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const float2 r = load_two(tile.r + t * Shared::kValuePitch + c + i);
      const float2 v = load_two(tile.v + t * Shared::kValuePitch + c + i);
      write_dot += r.x * v.x + r.y * v.y;
      out[i] = write * r.x, out[i + 1] = write * r.y;
    }
    if (t >= chunk.tokens) return;
    if (s.vector_grad_v) {
      if (column0 + c >= a.value_dim) return;
      if constexpr (sizeof(T) == 2 && kCount == 8) {
        *reinterpret_cast<uint4*>(grad_v + c) =
            make_uint4(pack<T>(out[0], out[1]), pack<T>(out[2], out[3]), pack<T>(out[4], out[5]),
                       pack<T>(out[6], out[7]));
      } else if constexpr (sizeof(T) == 2) {
        *reinterpret_cast<uint2*>(grad_v + c) =
            make_uint2(pack<T>(out[0], out[1]), pack<T>(out[2], out[3]));
      } else {
        *reinterpret_cast<float4*>(grad_v + c) = make_float4(out[0], out[1], out[2], out[3]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (column0 + c + i < a.value_dim) grad_v[c + i] = T(out[i]);
      }
    }
  }
};

}  // namespace efla::cuda
