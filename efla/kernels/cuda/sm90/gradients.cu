// Host side of the Hopper gradients: where they apply, tensor maps, launch.

#include "efla/kernels/cuda/sm90/gradients.h"

#include "efla/kernels/cuda/sm90/gradients.cuh"
#include "efla/kernels/cuda/sm90/tensor_map.h"

namespace efla::cuda::sm90 {
namespace {

// A workspace of rows of 128 elements.
View rows_of(const void* data) { return {data, 0, kDim, 0}; }

template <typename T, bool kDecay>
cudaError_t launch(const GradientMaps& maps, const ChunkArgs& args, int64_t places,
                   cudaStream_t stream) {
  constexpr int kBytes = sizeof(GradientShared);
  static_assert(kBytes <= 227 * 1024);
  auto* kernel = gradients_kernel<T, kDecay>;
  if (auto e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes)) {
    return e;
  }
  kernel<<<static_cast<unsigned>(places), kGradientGroups * kWarpgroup, kBytes, stream>>>(maps,
                                                                                          args);
  return cudaGetLastError();
}

}  // namespace

bool gradients_apply(const BackwardParams& params) {
  const Problem& p = params.problem;
  const Shape& s = p.shape;
  if (s.key_dim != kDim || s.value_dim != kDim || s.tokens >= INT32_MAX || s.batch >= INT32_MAX) {
    return false;
  }
  const auto map = [&](const auto& x, int64_t heads) {  // a gradient that is not wanted is null
    return x.data == nullptr || has_map(x, s.batch, s.tokens, heads);
  };
  return map(p.q, s.heads) && map(p.k, s.heads) && map(p.v, s.value_heads) &&
         map(params.grad_o, s.value_heads) && map(params.grad_q, s.heads) &&
         map(params.grad_k, s.heads) && map(params.grad_v, s.value_heads) &&
         device_applies(p.dtype);
}

cudaError_t gradients(const ChunkArgs& a, DType dtype, cudaStream_t stream) {
  const bool packed = a.cu_seqlens != nullptr;
  const int64_t batch = packed ? 1 : a.sequences;
  const int64_t places = chunk_slots(a.sequences, a.tokens, packed, kC) * a.value_heads;
  if (places == 0 || batch * a.tokens == 0) return cudaSuccess;
  if (places * kDim > INT32_MAX) return cudaErrorInvalidValue;
  GradientMaps maps{};
  const auto map = [&](CUtensorMap& out, const View& x, int64_t heads) {
    return make_map(out, x, dtype, batch, a.tokens, heads, kDim);
  };
  const auto workspace = [&](CUtensorMap& out, const void* data, int64_t rows) {
    return make_map(out, rows_of(data), dtype, 1, places * rows, 1, kDim);
  };
  if (!(map(maps.q, a.q, a.heads) && map(maps.k, a.k, a.heads) && map(maps.v, a.v, a.value_heads) &&
        map(maps.grad_o, a.grad_o, a.value_heads) && workspace(maps.u, a.u, kC) &&
        workspace(maps.grad_r, a.grad_r, kC) && workspace(maps.state, a.states, kDim) &&
        workspace(maps.grad_state, a.grad_states, kDim))) {
    return cudaErrorInvalidValue;
  }
  const bool decay = a.log_decay.data != nullptr;
  if (dtype == DType::kBFloat16) {
    return decay ? launch<__nv_bfloat16, true>(maps, a, places, stream)
                 : launch<__nv_bfloat16, false>(maps, a, places, stream);
  }
  return decay ? launch<__half, true>(maps, a, places, stream)
               : launch<__half, false>(maps, a, places, stream);
}

}  // namespace efla::cuda::sm90
