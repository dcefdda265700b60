// Which cut of recurrent.cuh a problem takes, and its launch.

#include "efla/kernels/cuda/portable/recurrent.cuh"

#include <algorithm>

#include "efla/kernels/cuda/delta_rule.h"

namespace efla::cuda {
namespace {

using recurrent::Args;
using recurrent::Cut;

// Few states are cut into many small blocks, so that every multiprocessor takes part. Where there
// are enough of them wider blocks repeat less of the work that is the same for all columns.
constexpr int kNarrow = 32, kWide = 64;
constexpr int kWideWarps = 4;
constexpr int64_t kManyStates = 96;

constexpr int64_t kMaxGrid = 65535;  // of all dimensions but the first

template <typename State, typename C>
cudaError_t launch(Args a, int64_t sequences, cudaStream_t stream) {
  const auto tiles = static_cast<unsigned>((a.value_dim + C::kColumns - 1) / C::kColumns);
  const auto heads = static_cast<unsigned>(a.value_heads);
  // The launch may begin before the work ahead of it in the stream has ended; the kernel waits
  // for that before it reads or writes anything.
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  // Code for older devices has no such wait, also where it is compiled anew for a newer one.
  auto* kernel = recurrent::recurrent_kernel<State, C>;
  static const unsigned overlaps = [&] {
    cudaFuncAttributes found{};
    return cudaFuncGetAttributes(&found, kernel) == cudaSuccess && found.ptxVersion >= 90 ? 1u : 0u;
  }();
  for (; a.first_sequence < sequences; a.first_sequence += kMaxGrid) {
    const auto rows = static_cast<unsigned>(std::min(sequences - a.first_sequence, kMaxGrid));
    cudaLaunchConfig_t config{};
    config.gridDim = {tiles, heads, rows};
    config.blockDim = C::kThreads;
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = overlaps;
    if (cudaLaunchKernelEx(&config, kernel, a) != cudaSuccess) return cudaGetLastError();
  }
  return cudaSuccess;
}

// Any K and V.
template <typename State, int kVec>
cudaError_t launch_any(const Args& a, int64_t sequences, cudaStream_t stream) {
  if (a.key_dim <= 128) {
    return launch<State, Cut<128, kNarrow, 4, kVec, false>>(a, sequences, stream);
  }
  if (a.key_dim <= 256) {
    return launch<State, Cut<256, kNarrow, 8, kVec, false>>(a, sequences, stream);
  }
  // Pieces of 8 columns would need more than 48 KiB of shared memory.
  return launch<State, Cut<512, kNarrow, 8, std::min(kVec, 4), false>>(a, sequences, stream);
}

template <typename State>
cudaError_t run(const Args& a, int64_t sequences, cudaStream_t stream) {
  if (sequences == 0 || a.value_heads == 0) return cudaSuccess;
  if (a.value_heads > kMaxGrid || a.key_dim > kMaxHeadDim) return cudaErrorInvalidValue;
  constexpr int kVec = 16 / sizeof(State);
  const auto aligned = [](const void* x) { return reinterpret_cast<uintptr_t>(x) % 16 == 0; };
  if (a.value_dim % kVec != 0 || !aligned(a.state_in) || !aligned(a.state_out)) {
    return launch_any<State, 1>(a, sequences, stream);
  }
  // Decoding's usual sizes, without a bound to check.
  const bool wide = a.value_dim % kWide == 0 && sequences * a.value_heads >= kManyStates;
  if (a.key_dim == 128 && wide) {
    return launch<State, Cut<128, kWide, kWideWarps, kVec, true>>(a, sequences, stream);
  }
  if (a.key_dim == 128 && a.value_dim % kNarrow == 0) {
    return launch<State, Cut<128, kNarrow, 4, kVec, true>>(a, sequences, stream);
  }
  if (a.key_dim == 64 && wide) {
    return launch<State, Cut<64, kWide, 4, kVec, true>>(a, sequences, stream);
  }
  if (a.key_dim == 64 && a.value_dim % kNarrow == 0) {
    return launch<State, Cut<64, kNarrow, sizeof(State) == 4 ? 4 : 2, kVec, true>>(a, sequences,
                                                                                   stream);
  }
  return launch_any<State, kVec>(a, sequences, stream);
}

template <typename State>
cudaError_t dispatch(const Problem& p, Args a, cudaStream_t stream) {
  if (p.dtype == DType::kFloat64) return cudaErrorInvalidValue;
  a.q = p.q, a.k = p.k, a.v = p.v, a.beta = p.beta, a.log_decay = p.log_decay;
  a.tokens = p.shape.tokens;
  a.value_heads = static_cast<int>(p.shape.value_heads);
  a.group = p.shape.heads ? static_cast<int>(p.shape.value_heads / p.shape.heads) : 1;
  a.key_dim = static_cast<int>(p.shape.key_dim);
  a.value_dim = static_cast<int>(p.shape.value_dim);
  a.scale = static_cast<float>(p.scale);
  a.dtype = p.dtype;
  a.rule = p.rule;
  a.qk_l2norm = p.qk_l2norm;
  return run<State>(a, p.shape.sequences, stream);
}

}  // namespace

cudaError_t recurrent_forward(const ForwardParams& params, cudaStream_t stream) {
  if (params.checkpoints) return cudaErrorInvalidValue;
  Args a{};
  a.o = params.o;
  a.state_in = params.problem.initial_state;
  a.state_out = params.final_state;
  a.cu_seqlens = params.problem.cu_seqlens;
  const Problem& p = params.problem;
  if (auto e = zero_slack(p, params.o, p.shape.value_heads, p.shape.value_dim,
                          p.dtype == DType::kFloat32 ? 4 : 2, stream)) {
    return e;
  }
  return dispatch<float>(params.problem, a, stream);
}

cudaError_t step(const StepParams& params, cudaStream_t stream) {
  Args a{};
  a.o = params.o;
  a.state_in = a.state_out = params.state;
  a.state_indices = params.state_indices;
  a.pool_size = params.pool_size;
  switch (params.state_dtype.value_or(DType::kFloat32)) {
    case DType::kFloat32:
      return dispatch<float>(params.problem, a, stream);
    case DType::kBFloat16:
      return dispatch<__nv_bfloat16>(params.problem, a, stream);
    case DType::kFloat16:
      return dispatch<__half>(params.problem, a, stream);
    case DType::kFloat64:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace efla::cuda
