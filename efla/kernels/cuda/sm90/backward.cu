// Host side of the backward on Hopper: where it applies, tensor maps.

#include "efla/kernels/cuda/sm90/backward.h"

#include "efla/kernels/cuda/sm90/backward_launch.cuh"
#include "efla/kernels/cuda/sm90/tensor_map.h"

namespace efla::cuda::sm90 {

bool backward_applies(const BackwardParams& params) {
  const Problem& p = params.problem;
  const Shape& s = p.shape;
  if (!has_kernel(s) || s.tokens >= INT32_MAX || s.batch >= INT32_MAX) return false;
  const auto map = [&](const auto& x, int64_t heads) {  // a gradient that is not wanted is null
    return x.data == nullptr || has_map(x, s.batch, s.tokens, heads);
  };
  return map(p.q, s.heads) && map(p.k, s.heads) && map(p.v, s.value_heads) &&
         map(params.grad_o, s.value_heads) && map(params.grad_q, s.heads) &&
         map(params.grad_k, s.heads) && map(params.grad_v, s.value_heads) &&
         device_applies(p.dtype);
}

ScanPlan plan_backward(const Problem& problem) {
  const Shape& s = problem.shape;
  if (!has_kernel(s) || !device_applies(problem.dtype)) return {};
  return plan_scan(problem);
}

cudaError_t backward(const ChunkArgs& a, DType dtype, const ScanPlan& plan, const void* checkpoints,
                     void* parts, cudaStream_t stream) {
  const bool packed = a.cu_seqlens != nullptr;
  const int64_t dim = a.columns;  // K and V padded
  const int64_t batch = packed ? 1 : a.sequences;
  if (a.sequences * a.value_heads == 0) return cudaSuccess;
  BackwardMaps maps{};
  const auto map = [&](CUtensorMap& out, const View& x, int64_t heads, int64_t columns) {
    return make_map(out, x, dtype, batch, a.tokens, heads, columns);
  };
  // Without a token there is nothing to map: the walks only pass the states through.
  const bool any = batch * a.tokens > 0;
  const auto gradient = [&](CUtensorMap& out, const MutableView& x) {
    return !x.data || a.value_heads > a.heads ||
           make_map(out, x, dtype, batch, a.tokens, a.heads, a.key_dim);
  };
  if (any && !(map(maps.q, a.q, a.heads, a.key_dim) && map(maps.k, a.k, a.heads, a.key_dim) &&
               map(maps.v, a.v, a.value_heads, a.value_dim) &&
               map(maps.grad_o, a.grad_o, a.value_heads, a.value_dim) &&
               gradient(maps.grad_q, a.grad_q) && gradient(maps.grad_k, a.grad_k))) {
    return cudaErrorInvalidValue;
  }
  const ScanMaps scan{maps.q, maps.k, maps.v, {}};
  ScanArgs args{};
  args.common = a;
  float* states = set_parts(args, plan, parts);
  if (plan.part_tokens > 0 && checkpoints) {  // read only
    args.transitions = static_cast<float*>(const_cast<void*>(checkpoints));
    args.part_states = args.transitions + plan.part_slots * a.value_heads * dim * dim;
  }
  const auto launch = [&](auto* run) { return run(scan, maps, args, plan, states, stream); };
  if (dtype == DType::kBFloat16) {
    return dim == 64 ? launch(launch_backward<__nv_bfloat16, 64>)
                     : launch(launch_backward<__nv_bfloat16, 128>);
  }
  return dim == 64 ? launch(launch_backward<__half, 64>) : launch(launch_backward<__half, 128>);
}

}  // namespace efla::cuda::sm90
