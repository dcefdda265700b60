// Host side of the Hopper scan: where it applies, how the work is split, tensor maps.

#include "efla/kernels/cuda/sm90/scan.h"

#include <algorithm>

#include "efla/kernels/cuda/sm90/scan_launch.cuh"

namespace efla::cuda::sm90 {
namespace {

int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  return cudaDeviceGetAttribute(&value, which, device) == cudaSuccess ? value : 0;
}

// Whether the copy engine can read or write the tensor in place: 16-byte rows, positive strides.
template <typename AnyView>
bool has_map(const AnyView& x, int64_t batch, int64_t tokens, int64_t heads) {
  const auto good = [](int64_t size, int64_t stride) {
    return size <= 1 || (stride > 0 && stride % 8 == 0 && stride < (int64_t{1} << 38));
  };
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && good(batch, x.batch) &&
         good(tokens, x.token) && good(heads, x.head);
}

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

// The driver's encoder; null where the driver has none.
Encode encoder() {
  static const Encode encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    const auto e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                    cudaEnableDefault, &found);
    return e == cudaSuccess && found == cudaDriverEntryPointSuccess
               ? reinterpret_cast<Encode>(entry)
               : nullptr;
  }();
  return encode;
}

// Boxes of kC tokens x 64 columns of one head over [batch, tokens, heads, columns].
template <typename AnyView>
bool make_map(CUtensorMap& map, const AnyView& x, DType dtype, int64_t batch, int64_t tokens,
              int64_t heads, int64_t columns) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(heads),
                              static_cast<cuuint64_t>(tokens), static_cast<cuuint64_t>(batch)};
  // The stride of a dimension of size 1 is never used but must look like one.
  const auto bytes = [](int64_t size, int64_t stride) {
    return static_cast<cuuint64_t>(size > 1 ? stride * 2 : 16);
  };
  const cuuint64_t strides[] = {bytes(heads, x.head), bytes(tokens, x.token),
                                bytes(batch, x.batch)};
  const cuuint32_t box[] = {kTileColumns, 1, kC, 1}, steps[] = {1, 1, 1, 1};
  const auto type = dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                              : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return encoder()(&map, type, 4, const_cast<void*>(static_cast<const void*>(x.data)), sizes,
                   strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Tiles from which on whole sequences keep the device busy, and below which sequences are split.
constexpr int64_t kFullTiles = 96;
constexpr int64_t kFewTiles = 48;
// A part is not worth a walk of its own below this many tokens.
constexpr int64_t kShortestPart = 1024;

}  // namespace

bool scan_applies(const ForwardParams& params) {
  const Problem& p = params.problem;
  const Shape& s = p.shape;
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) return false;
  if (s.key_dim != s.value_dim || (s.key_dim != 64 && s.key_dim != 128)) return false;
  if (s.tokens >= INT32_MAX || s.batch >= INT32_MAX) return false;
  return has_map(p.q, s.batch, s.tokens, s.heads) && has_map(p.k, s.batch, s.tokens, s.heads) &&
         has_map(p.v, s.batch, s.tokens, s.value_heads) &&
         has_map(params.o, s.batch, s.tokens, s.value_heads) &&
         attribute(cudaDevAttrComputeCapabilityMajor) == 9 && encoder();
}

ScanPlan plan_scan(const Problem& problem) {
  const Shape& s = problem.shape;
  ScanPlan plan;
  const int64_t tiles = s.sequences * s.value_heads;
  plan.value_tile = s.key_dim == 64 || tiles < kFullTiles ? 64 : 128;
  if (tiles >= kFewTiles || tiles == 0) return plan;
  const int64_t processors = std::max(1, attribute(cudaDevAttrMultiProcessorCount));
  const int64_t longest = problem.cu_seqlens ? s.tokens : s.tokens * s.batch;
  const int64_t wanted = std::max<int64_t>(1, processors / s.value_heads);  // parts in all
  const int64_t part = std::max(kShortestPart, (longest + wanted - 1) / wanted);
  if (part * 2 > s.tokens) return plan;
  plan.part_tokens = (part + kC - 1) / kC * kC;
  plan.part_slots =
      chunk_slots(s.sequences, s.tokens, problem.cu_seqlens != nullptr, plan.part_tokens);
  plan.value_tile = s.key_dim;
  return plan;
}

int64_t scan_workspace(const Problem& problem, const ScanPlan& plan) {
  const Shape& s = problem.shape;
  return 3 * plan.part_slots * s.value_heads * s.key_dim * s.value_dim * int64_t{sizeof(float)};
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
  a.q = p.q, a.k = p.k, a.v = p.v, a.beta = p.beta, a.log_decay = p.log_decay;
  a.o = params.o;
  a.initial_state = static_cast<const float*>(p.initial_state);
  a.final_state = static_cast<float*>(params.final_state);
  a.cu_seqlens = p.cu_seqlens;
  a.sequences = s.sequences;
  a.tokens = s.tokens;
  a.heads = static_cast<int>(s.heads);
  a.value_heads = static_cast<int>(s.value_heads);
  a.key_dim = static_cast<int>(s.key_dim);
  a.value_dim = static_cast<int>(s.value_dim);
  a.scale = static_cast<float>(p.scale);
  a.rule = p.rule;
  a.qk_l2norm = p.qk_l2norm;
  args.part_tokens = plan.part_tokens;
  args.part_results = static_cast<float*>(workspace);
  float* states = args.part_results + 2 * plan.part_slots * s.value_heads * s.key_dim * s.value_dim;
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
