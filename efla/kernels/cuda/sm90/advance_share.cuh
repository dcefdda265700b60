// How the walks of Walk::kAdvance are shared out. Every part of a sequence but the last one is
// walked from zero (N), and every one but the first and the last from the identity (M): jobs of as
// many chunks each, on two lines. A block takes an equal share of a line, wherever its ends lie,
// since whole jobs would leave most processors idle in their last turn. Of a job that lies across
// two shares the lower block walks the first chunks, before all else, and leaves the state where
// the job's result belongs; the upper block goes on from there, after all else. A share is no
// shorter than a job, so that both are done within the time of a share (McNaughton's rule, 1959).
// Who waits, waits for a block with a lower number, which starts no later, for what that block does
// first, which waits for nobody. Both lines have a sequence's parts at the same places, so that N
// and M of a part are walked at nearly the same time and share loads in the second cache. (Of later
// sequences M is a job further for each.)
#pragma once

#include <algorithm>

#include "efla/kernels/cuda/sm90/scan_shared.cuh"

namespace efla::cuda::sm90 {

// Flags that say a warp's rows of a state have been left, for each block. They lie where the first
// slot's transition would, which nobody needs: it is of a first part, or of none.
inline constexpr int kHandOverWarps = 8;
__device__ __forceinline__ uint32_t* hand_overs(const ScanArgs& args, int block) {
  return reinterpret_cast<uint32_t*>(args.transitions) + block * kHandOverWarps + threadIdx.x / 32;
}

// Behind the state that a warp has stored, and ahead of that which it loads.
__device__ __forceinline__ void hand_over(const ScanArgs& args) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) store_release(hand_overs(args, blockIdx.x), 1);
}
__device__ __forceinline__ void take_over(const ScanArgs& args) {
  while (agreed(load_acquire(hand_overs(args, blockIdx.x - 1))) == 0) {
  }
  __syncwarp();
}

// Blocks for so many jobs or fewer: as many as processors, if no share is then too long to be
// listed. (It has at most twice the chunks that a block has on average.)
inline int64_t advance_blocks(int64_t jobs, int64_t processors) {
  constexpr int64_t kAverage = kMostRuns / 2 - 1;
  return std::min(jobs, std::max({int64_t{2}, processors, (jobs + kAverage - 1) / kAverage}));
}

// A block's share of the line of N (`values`) or of M: chunks from `begin` to `end`.
struct LineShare {
  bool values;
  int begin, end;
};

// Of `blocks` blocks, when the lines have as many chunks and a job has `length`.
__host__ __device__ inline LineShare share_line(int chunks_n, int chunks_m, int length, int blocks,
                                                int block) {
  const auto count = [](int chunks, int share) { return (chunks + share - 1) / share; };
  int share = count(chunks_n + chunks_m, blocks);
  if (share < length) share = length;
  while (count(chunks_n, share) + count(chunks_m, share) > blocks) ++share;
  const int ahead = count(chunks_n, share);  // blocks of N
  const bool values = block < ahead;
  const int line = values ? chunks_n : chunks_m;
  const auto inside = [&](int chunk) { return chunk < line ? chunk : line; };
  const int begin = inside((values ? block : block - ahead) * share);
  return {values, begin, inside(begin + share)};
}

// What a block walks as its n-th: chunks `first` to `last` of a job, numbered from `from` on; no
// job (-1) behind the last.
struct JobRun {
  int job, first, last, from;
};
__host__ __device__ inline JobRun find_run(const LineShare& share, int length, int n) {
  const int job = (share.end + length - 1) / length - 1 - n, start = job * length;
  if (share.end == share.begin || job < 0 || start + length <= share.begin) return {-1, 0, 0, 0};
  const int first = share.begin > start ? share.begin - start : 0;
  const int last = share.end - start < length ? share.end - start : length;
  return {job, first, last, share.end - start - last};
}

// Parts of a sequence.
__device__ __forceinline__ int count_parts(const ChunkArgs& a, int sequence, int part_tokens) {
  int tokens = static_cast<int>(a.tokens);
  if (a.cu_seqlens) {
    tokens = static_cast<int>(a.cu_seqlens[sequence + 1] - a.cu_seqlens[sequence]);
  }
  return (max(tokens, 0) + part_tokens - 1) / part_tokens;
}

// A warp lists what its block walks, a lane each run: the share's jobs from its end to its begin,
// at most as many as there is room for (launch_walk()). Returns their number.
template <int kTileColumns>
__device__ __forceinline__ int list_runs(const ScanArgs& args, Run (&runs)[kMostRuns]) {
  const ChunkArgs& a = args.common;
  const int lane = threadIdx.x % 32, part_tokens = static_cast<int>(args.part_tokens);
  const int sequences = static_cast<int>(a.sequences), heads = static_cast<int>(a.value_heads);
  const int tiles = static_cast<int>(a.columns) / kTileColumns, length = part_tokens / kC;
  // Chunks on the lines of N and M.
  int all[2] = {};
  for (int n = lane; n < (a.cu_seqlens ? sequences : 1); n += 32) {
    const int parts = count_parts(a, n, part_tokens);
    all[0] += max(parts - 1, 0), all[1] += max(parts - 2, 0);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    all[i] = __reduce_add_sync(0xffffffffu, all[i]);
    all[i] *= (a.cu_seqlens ? 1 : sequences) * heads * tiles * length;
  }
  const LineShare share = share_line(all[0], all[1], length, gridDim.x, blockIdx.x);
  const bool values = share.values;
  const auto [index, first, last, from] = find_run(share, length, lane);
  if (index >= 0) {
    int sequence = 0, job = index / (heads * tiles);
    const auto jobs_of = [&](int n) { return max(count_parts(a, n, part_tokens) - 2 + values, 0); };
    if (a.cu_seqlens) {
      for (int jobs; job >= (jobs = jobs_of(sequence)); ++sequence) job -= jobs;
    } else {
      sequence = job / jobs_of(0), job %= jobs_of(0);
    }
    // The first part, which has no M, last.
    const int part = values ? (job + 1) % jobs_of(sequence) : job + 1;
    Run run;
    run.values = values;
    run.resumes = first > 0, run.breaks_off = last < length;
    Place& p = run.place;
    const int walk = index % (heads * tiles);
    p.column0 = walk % tiles * kTileColumns;
    p.hv = walk / tiles;
    p.hk = p.hv / (heads / static_cast<int>(a.heads));
    p.sequence = sequence;
    p.first = part == 0, p.last = false;
    p.row = a.cu_seqlens ? 0 : sequence;
    // Chunks are numbered on from the run before.
    p.from = from;
    p.tokens = int64_t{p.from + last - first} * kC;
    const int chunk = part * length + first - p.from;  // that would be number 0, in the sequence
    p.part = first_slot(a, sequence, part_tokens) + part;
    p.begin = (a.cu_seqlens ? a.cu_seqlens[sequence] : 0) + int64_t{chunk} * kC;
    p.slot = static_cast<int>(first_slot(a, sequence, kC)) + chunk;
    runs[lane] = run;
  }
  return __popc(__ballot_sync(0xffffffffu, index >= 0));
}

}  // namespace efla::cuda::sm90
