// What the Hopper chunk kernels share: their arguments, where a block works, shared-memory layout.
#pragma once

#include "efla/kernels/cuda/portable/chunk_common.cuh"
#include "efla/kernels/cuda/sm90/ptx.cuh"

namespace efla::cuda::sm90 {

inline constexpr int kC = 64;  // tokens per chunk
inline constexpr int kWarpgroup = 128;

// Tensor maps of q, k, v, o; boxes of kC tokens x 64 columns of one head. Columns beyond the true K
// or V are zeros in shared memory and are not stored.
struct ScanMaps {
  CUtensorMap q, k, v, o;
};

// What the scan has beside the chunk kernels' common arguments.
struct ScanArgs {
  ChunkArgs common;
  // Tokens per part of a split sequence, a multiple of kC; 0: a block walks a whole sequence. Parts
  // lie in slots as chunks do (chunk_slots with part_tokens in the place of the chunk).
  int64_t part_tokens;
  // Of each part and value head, [part slots, HV], as many floats as a state has with K and V both
  // padded to a.columns. In the threads' order (visit_part()): the state that the part's walk
  // starts from; null: zero. For the reverse walk, dS behind the part.
  const float* part_states;
  // Likewise N, S_out = M S_in + N; the first part's is its S_out. Backwards N', dS_in = M^T dS_out
  // + N'; the last part's is its dS_in.
  float* part_results;
  float* transitions;  // M, as a Transition (transition.cuh)
  // prepare_kernel has run: common.inverse and scalars (and scores, if not null) hold what walks
  // without output need.
  bool prepared;
};

// Where a block works: part of a sequence, value head, tile of V.
struct Place {
  int64_t sequence;  // -1: nowhere
  int64_t part;      // slot of the part
  int64_t row, begin;
  int64_t tokens;
  int from;          // the number of its first chunk; not 0 where a block walks several places
  bool first, last;  // of its sequence
  int slot;          // of its first chunk, in the backward's workspaces
  int hv, hk, column0;
};

__device__ inline Place find_place(const ScanArgs& args, int tile_columns) {
  const ChunkArgs& a = args.common;
  const int tiles = static_cast<int>(a.columns) / tile_columns;
  const int64_t item = blockIdx.x / tiles / a.value_heads;
  Place p;
  p.from = 0;
  p.hv = static_cast<int>(blockIdx.x / tiles % a.value_heads);
  p.hk = p.hv / (a.value_heads / a.heads);
  p.column0 = static_cast<int>(blockIdx.x % tiles) * tile_columns;
  p.part = item;
  p.sequence = item;
  int64_t first = 0, tokens = a.tokens;
  if (args.part_tokens == 0) {
    if (a.longest_first) p.part = p.sequence = a.longest_first[item];
    if (a.cu_seqlens) {
      first = a.cu_seqlens[p.sequence];
      tokens = a.cu_seqlens[p.sequence + 1] - first;
    }
    p.row = a.cu_seqlens ? 0 : item;
    p.begin = first;
    p.tokens = max(tokens, int64_t{0});
    p.first = p.last = true;
    p.slot = static_cast<int>(first_slot(a, p.sequence, kC));
    return p;
  }
  int64_t low = item;
  if (!a.cu_seqlens) {
    const int64_t per = (a.tokens + args.part_tokens - 1) / args.part_tokens;
    low = item / per;
    p.begin = item % per * args.part_tokens;
    p.row = low;
  } else {
    int64_t high = a.sequences;  // the last sequence whose first slot is <= item
    low = 0;
    const auto slot_of = [&](int64_t n) { return n + a.cu_seqlens[n] / args.part_tokens; };
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (slot_of(middle) <= item ? low : high) = middle;
    }
    first = a.cu_seqlens[low];
    tokens = a.cu_seqlens[low + 1] - first;
    p.begin = (item - slot_of(low)) * args.part_tokens;  // in its sequence, for now
    p.row = 0;
    if (p.begin < 0 || p.begin >= tokens) low = -1;  // a slot that no part has
  }
  p.sequence = low;
  p.slot = low < 0 ? 0 : static_cast<int>(first_slot(a, low, kC) + p.begin / kC);
  const int64_t left = tokens - p.begin;
  p.first = p.begin == 0;
  p.last = left <= args.part_tokens;
  p.tokens = low < 0 ? 0 : min(left, args.part_tokens);
  p.begin += first;
  return p;
}

// Chunks of a place, those before p.from included; 0 where there is none.
__device__ __forceinline__ int chunks_of(const Place& p) {
  return p.sequence < 0 ? 0 : static_cast<int>((p.tokens + kC - 1) / kC);
}

// Of a whole chunk; also copied without the rest.
struct alignas(16) WholeChunk {
  float gate;     // Gamma_C, and of a wide chunk in the forward what was owed before it
  int long_rows;  // whether K or Q has rows that are divided by a power of two
  int wide;       // whether U takes key_out (and the state gate); else A_hat and `erase` have
  float pay;      // what the state behind the chunk takes of the decay that it owes, or 1
};

// Row of the per-chunk scalars in shared memory, floats [kC]. Those of ScalarRow, without
// kChunkGate.
struct alignas(16) ChunkScalars {
  float erase[kC];    // kEraseIn
  float write[kC];    // kWrite
  float query[kC];    // kQueryGate
  float key_out[kC];  // kKeyOut
  WholeChunk whole;
};

}  // namespace efla::cuda::sm90
