// Host side of the Hopper scan: where it applies, how the work is split, tensor maps.

#include "efla/kernels/cuda/sm90/scan.h"

#include <algorithm>

#include "efla/kernels/cuda/portable/chunk_args.h"
#include "efla/kernels/cuda/sm90/scan_launch.cuh"
#include "efla/kernels/cuda/sm90/tensor_map.h"

namespace efla::cuda::sm90 {
namespace {

// Tiles from which on whole sequences keep the device busy, and below which sequences are split.
constexpr int64_t kFullTiles = 96;
constexpr int64_t kFewTiles = 48;
// A part is not worth a walk of its own below this many tokens.
constexpr int64_t kShortestPart = 1024;

// What is kept of a chunk that was prepared.
constexpr int64_t kSquareBytes = kC * kC * 2, kScalarBytes = kScalarRows * kC * 4;

int64_t places(const Problem& p) {
  const Shape& s = p.shape;
  return chunk_slots(s.sequences, s.tokens, p.cu_seqlens != nullptr, kC) * s.value_heads;
}

}  // namespace

bool scan_applies(const ForwardParams& params) {
  const Problem& p = params.problem;
  const Shape& s = p.shape;
  if (!has_kernel(s) || s.tokens >= INT32_MAX || s.batch >= INT32_MAX) return false;
  return has_map(p.q, s.batch, s.tokens, s.heads) && has_map(p.k, s.batch, s.tokens, s.heads) &&
         has_map(p.v, s.batch, s.tokens, s.value_heads) &&
         has_map(params.o, s.batch, s.tokens, s.value_heads) && device_applies(p.dtype);
}

ScanPlan plan_scan(const Problem& problem) {
  const Shape& s = problem.shape;
  ScanPlan plan;
  const int64_t tiles = s.sequences * s.value_heads;
  const bool narrow = s.key_dim <= 64 || s.value_dim <= 64;
  plan.value_tile = narrow || tiles < kFullTiles ? 64 : 128;
  if (tiles >= kFewTiles || tiles == 0) return plan;
  const int64_t longest = problem.cu_seqlens ? s.tokens : s.tokens * s.batch;
  const int64_t wanted = std::max<int64_t>(1, processors() / s.value_heads);  // parts in all
  const int64_t part = std::max(kShortestPart, (longest + wanted - 1) / wanted);
  if (part * 2 > s.tokens) return plan;
  plan.part_tokens = (part + kC - 1) / kC * kC;
  plan.part_slots =
      chunk_slots(s.sequences, s.tokens, problem.cu_seqlens != nullptr, plan.part_tokens);
  plan.value_tile = square_dim(s);
  return plan;
}

int64_t parts_workspace(const Problem& problem, const ScanPlan& plan) {
  return checkpoint_bytes(problem, plan) / 2 * 3;
}

int64_t checkpoint_bytes(const Problem& problem, const ScanPlan& plan) {
  const Shape& s = problem.shape;
  const int64_t size = int64_t{square_dim(s)} * square_dim(s);
  return 2 * plan.part_slots * s.value_heads * size * int64_t{sizeof(float)};
}

int64_t scan_workspace(const Problem& problem, const ScanPlan& plan, bool checkpoints) {
  if (plan.part_tokens == 0) return 0;
  const int64_t elsewhere = checkpoints ? checkpoint_bytes(problem, plan) : 0;
  return parts_workspace(problem, plan) - elsewhere +
         places(problem) * (kSquareBytes + kScalarBytes);
}

cudaError_t scan_forward(const ForwardParams& params, const ScanPlan& plan, void* workspace,
                         cudaStream_t stream) {
  const Problem& p = params.problem;
  const Shape& s = p.shape;
  if (s.batch * s.tokens * s.value_heads == 0 && s.sequences * s.value_heads == 0) {
    return cudaSuccess;
  }
  ScanArgs args{};
  ChunkArgs& a = args.common;
  set_problem(a, p);
  a.o = params.o;
  a.final_state = static_cast<float*>(params.final_state);
  a.columns =
      plan.part_tokens > 0 ? square_dim(s) : std::max(padded_dim(s.value_dim), plan.value_tile);
  float* states = set_parts(args, plan, workspace);
  if (plan.part_tokens > 0) {
    auto* squares = static_cast<unsigned char*>(workspace) + parts_workspace(p, plan);
    if (params.checkpoints) {
      args.part_results = static_cast<float*>(workspace);
      args.transitions = static_cast<float*>(params.checkpoints);
      states = args.transitions + checkpoint_bytes(p, plan) / 2 / int64_t{sizeof(float)};
      squares -= checkpoint_bytes(p, plan);
    }
    a.inverse = squares;
    a.scalars = reinterpret_cast<float*>(squares + places(p) * kSquareBytes);
  }
  ScanMaps maps{};
  if (s.batch * s.tokens > 0 &&
      !(make_map(maps.q, p.q, p.dtype, s.batch, s.tokens, s.heads, s.key_dim) &&
        make_map(maps.k, p.k, p.dtype, s.batch, s.tokens, s.heads, s.key_dim) &&
        make_map(maps.v, p.v, p.dtype, s.batch, s.tokens, s.value_heads, s.value_dim) &&
        make_map(maps.o, params.o, p.dtype, s.batch, s.tokens, s.value_heads, s.value_dim))) {
    return cudaErrorInvalidValue;
  }
  return p.dtype == DType::kBFloat16 ? launch_scan<__nv_bfloat16>(maps, args, plan, states, stream)
                                     : launch_scan<__half>(maps, args, plan, states, stream);
}

}  // namespace efla::cuda::sm90
