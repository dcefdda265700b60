// Host side of the portable chunk kernels: workspace layout, alignment, dispatch over types, and
// the two small kernels that finish the gradients of grouped heads.

#include "efla/kernels/cuda/delta_rule.h"
#include "efla/kernels/cuda/portable/chunk_args.h"
#include "efla/kernels/cuda/portable/chunk_backward.h"
#include "efla/kernels/cuda/portable/chunk_launch.cuh"
#include "efla/kernels/cuda/sm90/backward.h"

namespace efla::cuda {
namespace {

// The widest tile of V that a scan writes.
constexpr int64_t kColumnPad = kScanColumns<8>;

int64_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Hands out consecutive parts of a workspace, each on a 256-byte boundary. With a null base it only
// counts.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<unsigned char*>(base)) {}
  void* take(int64_t bytes) {
    void* part = base_ ? base_ + used_ : nullptr;
    used_ += (bytes + 255) / 256 * 256;
    return part;
  }
  int64_t used() const { return used_; }

 private:
  unsigned char* base_;
  int64_t used_ = 0;
};

// Whether every row of the view starts on a 16-byte boundary and holds whole 16-byte pieces.
bool reads_vectors(const View& x, int64_t columns, int64_t size) {
  const int64_t per = 16 / size;
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && columns % per == 0 &&
         x.batch % per == 0 && x.token % per == 0 && x.head % per == 0;
}

// Tokens per chunk on the current device.
int chunk_of(const Problem& p, Family family) {
  int device = 0, bytes = 0;
  if (family == Family::kPortableSmall || cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) !=
          cudaSuccess) {
    bytes = 0;
  }
  return chunk_tokens(p.dtype, p.shape.key_dim, bytes);
}

ChunkArgs make_args(const Problem& p, int c, Arena& arena) {
  const Shape& s = p.shape;
  const int64_t size = element_size(p.dtype);
  const int64_t places =
      chunk_slots(s.sequences, s.tokens, p.cu_seqlens != nullptr, c) * s.value_heads;
  ChunkArgs a{};
  set_problem(a, p);
  a.vector_q = reads_vectors(p.q, s.key_dim, size);
  a.vector_k = reads_vectors(p.k, s.key_dim, size);
  a.vector_v = reads_vectors(p.v, s.value_dim, size);
  a.inverse = arena.take(places * c * c * size);
  a.scores = arena.take(places * c * c * size);
  a.scalars = static_cast<float*>(arena.take(places * kScalarRows * c * 4));
  a.columns = (s.value_dim + kColumnPad - 1) / kColumnPad * kColumnPad;
  return a;
}

// The backward's own workspaces; on Hopper K and V are padded to one size, and dS and dR never
// leave the multiprocessor. Grouped heads get float parts of dq and dk per value head.
void add_backward(const Problem& p, int c, Arena& arena, ChunkArgs& a, bool hopper, void*& parts_q,
                  void*& parts_k) {
  const Shape& s = p.shape;
  const int64_t size = element_size(p.dtype);
  const int64_t key_dim = hopper ? sm90::square_dim(s) : padded_key_dim(s.key_dim);
  const int64_t places =
      chunk_slots(s.sequences, s.tokens, p.cu_seqlens != nullptr, c) * s.value_heads;
  if (hopper) a.columns = key_dim;
  a.states = arena.take(places * a.columns * key_dim * size);
  a.u = arena.take(places * c * a.columns * size);
  if (!hopper) {
    a.grad_states = arena.take(places * a.columns * key_dim * size);
    a.grad_r = arena.take(places * c * a.columns * size);
  }
  const int64_t parts = s.value_heads > s.heads ? s.batch * s.tokens * s.value_heads * s.key_dim *
                                                      int64_t{sizeof(float)}
                                                : 0;
  parts_q = arena.take(parts);
  parts_k = arena.take(parts);
}

cudaError_t dispatch(DType dtype, const ChunkArgs& a, int chunk, bool backward,
                     cudaStream_t stream) {
  switch (dtype) {
    case DType::kFloat32:
      return chunk_typed<float>(a, chunk, backward, stream);
    case DType::kBFloat16:
      return chunk_typed<__nv_bfloat16>(a, chunk, backward, stream);
    case DType::kFloat16:
      return chunk_typed<__half>(a, chunk, backward, stream);
    case DType::kFloat64:
      break;
  }
  return cudaErrorInvalidValue;
}

// grad[b, t, h, :] = sum of the parts of the value heads that read head h, in a fixed order.
template <typename T>
__global__ void sum_group_kernel(const float* parts, MutableView grad, int64_t rows, int64_t tokens,
                                 int heads, int group, int key_dim) {
  const int64_t count = rows * heads * key_dim;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t row = i / (heads * key_dim);
    const int h = static_cast<int>(i / key_dim % heads), c = static_cast<int>(i % key_dim);
    float sum = 0.f;
    for (int r = 0; r < group; ++r) {
      sum += parts[((row * heads + h) * group + r) * key_dim + c];
    }
    static_cast<T*>(
        grad.data)[row / tokens * grad.batch + row % tokens * grad.token + h * grad.head + c] =
        T(sum);
  }
}

cudaError_t sum_group(const Problem& p, const void* parts, const MutableView& grad,
                      cudaStream_t stream) {
  const Shape& s = p.shape;
  if (!grad.data || s.batch * s.tokens * s.heads * s.key_dim == 0) return cudaSuccess;
  const auto run = [&](auto* kernel) {
    kernel<<<1024, 256, 0, stream>>>(static_cast<const float*>(parts), grad, s.batch * s.tokens,
                                     s.tokens, static_cast<int>(s.heads),
                                     static_cast<int>(s.value_heads / s.heads),
                                     static_cast<int>(s.key_dim));
    return cudaGetLastError();
  };
  if (p.dtype == DType::kFloat32) return run(sum_group_kernel<float>);
  if (p.dtype == DType::kFloat16) return run(sum_group_kernel<__half>);
  return run(sum_group_kernel<__nv_bfloat16>);
}

}  // namespace

int64_t chunk_forward_workspace(const ForwardParams& params, Family family) {
  const Problem& p = params.problem;
  if (family == Family::kAuto && sm90::scan_applies(params)) {
    return sm90::scan_workspace(p, sm90::plan_scan(p), params.checkpoints != nullptr);
  }
  Arena arena(nullptr);
  make_args(p, chunk_of(p, family), arena);
  return arena.used();
}

int64_t chunk_checkpoint_bytes(const ForwardParams& params, Family family) {
  const Problem& p = params.problem;
  if (family != Family::kAuto || !sm90::scan_applies(params)) return 0;
  return sm90::checkpoint_bytes(p, sm90::plan_scan(p));
}

int64_t chunk_checkpoint_bytes(const BackwardParams& params, Family family) {
  if (family != Family::kAuto || !sm90::backward_applies(params)) return 0;
  return sm90::checkpoint_bytes(params.problem, sm90::plan_backward(params.problem));
}

int64_t chunk_backward_workspace(const BackwardParams& params, Family family) {
  return chunk_backward_workspace(params, sm90::plan_backward(params.problem), family);
}

int64_t chunk_backward_workspace(const BackwardParams& params, const sm90::ScanPlan& plan,
                                 Family family) {
  const Problem& p = params.problem;
  const bool hopper = family == Family::kAuto && sm90::backward_applies(params);
  Arena arena(nullptr);
  ChunkArgs a = make_args(p, chunk_of(p, family), arena);
  void *parts_q, *parts_k;
  add_backward(p, chunk_of(p, family), arena, a, hopper, parts_q, parts_k);
  if (hopper) arena.take(sm90::parts_workspace(p, plan));
  return arena.used();
}

cudaError_t chunk_forward(const ForwardParams& params, void* workspace, cudaStream_t stream,
                          Family family) {
  const Problem& p = params.problem;
  if (p.dtype == DType::kFloat64) return cudaErrorInvalidValue;
  if (auto e = zero_slack(p, params.o, p.shape.value_heads, p.shape.value_dim,
                          element_size(p.dtype), stream)) {
    return e;
  }
  if (family == Family::kAuto && sm90::scan_applies(params)) {
    return sm90::scan_forward(params, sm90::plan_scan(p), workspace, stream);
  }
  Arena arena(workspace);
  ChunkArgs a = make_args(p, chunk_of(p, family), arena);
  a.o = params.o;
  a.final_state = static_cast<float*>(params.final_state);
  return dispatch(p.dtype, a, chunk_of(p, family), false, stream);
}

cudaError_t chunk_backward(const BackwardParams& params, void* workspace, cudaStream_t stream,
                           Family family) {
  return chunk_backward(params, sm90::plan_backward(params.problem), workspace, stream, family);
}

cudaError_t chunk_backward(const BackwardParams& params, const sm90::ScanPlan& plan,
                           void* workspace, cudaStream_t stream, Family family) {
  const Problem& p = params.problem;
  const Shape& s = p.shape;
  if (p.dtype == DType::kFloat64 || !params.grad_v.data) return cudaErrorInvalidValue;
  Arena arena(workspace);
  ChunkArgs a = make_args(p, chunk_of(p, family), arena);
  const bool hopper = family == Family::kAuto && sm90::backward_applies(params);
  void *parts_q, *parts_k;
  add_backward(p, chunk_of(p, family), arena, a, hopper, parts_q, parts_k);
  const int64_t size = element_size(p.dtype);
  a.grad_o = params.grad_o;
  a.vector_grad_o = reads_vectors(params.grad_o, s.value_dim, size);
  a.grad_final_state = static_cast<const float*>(params.grad_final_state);
  a.grad_initial_state = static_cast<float*>(params.grad_initial_state);
  a.grad_q = params.grad_q, a.grad_k = params.grad_k, a.grad_v = params.grad_v;
  a.grad_beta = params.grad_beta, a.grad_log_decay = params.grad_log_decay;
  const bool grouped = s.value_heads > s.heads;
  if (grouped) {
    const int64_t row = s.value_heads * s.key_dim;
    a.grad_q = {parts_q, s.tokens * row, row, s.key_dim};
    a.grad_k = {parts_k, s.tokens * row, row, s.key_dim};
  }
  if (hopper) {
    void* parts = arena.take(sm90::parts_workspace(p, plan));
    if (auto e = sm90::backward(a, p.dtype, plan, params.checkpoints, parts, stream)) return e;
  } else if (auto e = dispatch(p.dtype, a, chunk_of(p, family), true, stream)) {
    return e;
  }
  if (grouped) {
    if (auto e = sum_group(p, parts_q, params.grad_q, stream)) return e;
    if (auto e = sum_group(p, parts_k, params.grad_k, stream)) return e;
  }
  const auto zero = [&](const MutableView& view, int64_t heads, int64_t dim, int64_t bytes) {
    return view.data ? zero_slack(p, view, heads, dim, bytes, stream) : cudaSuccess;
  };
  if (auto e = zero(params.grad_q, s.heads, s.key_dim, size)) return e;
  if (auto e = zero(params.grad_k, s.heads, s.key_dim, size)) return e;
  if (auto e = zero(params.grad_v, s.value_heads, s.value_dim, size)) return e;
  if (auto e = zero(params.grad_beta, s.value_heads, 1, 4)) return e;
  return zero(params.grad_log_decay, s.value_heads, 1, 4);
}

}  // namespace efla::cuda
