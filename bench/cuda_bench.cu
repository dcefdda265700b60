// Times the CUDA kernels on the shapes of docs/kernels.md and prints Markdown tables. Each forward
// is first compared with the token recurrence on the same inputs ("error": relative RMS of o).
//   cuda_bench [--quick | BATCH TOKENS HEADS]      (the first row of each table, or one shape)

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <vector>

#include "efla/kernels/cuda/delta_rule.h"

namespace {

using efla::View;
using BFloat16 = __nv_bfloat16;

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

template <typename T>
struct DeviceArray {
  explicit DeviceArray(int64_t size) : size(size) { check(cudaMalloc(&data, size * sizeof(T))); }
  ~DeviceArray() { cudaFree(data); }
  DeviceArray(const DeviceArray&) = delete;
  int64_t size;
  T* data = nullptr;
};

// Pseudo-random numbers in (low, high).
template <typename T>
__global__ void fill(T* x, int64_t size, float low, float high, uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < size;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint32_t h = static_cast<uint32_t>(i) * 2654435761u + seed;
    h = (h ^ (h >> 15)) * 2246822519u;
    h = (h ^ (h >> 13)) * 3266489917u;
    x[i] = T(low + (high - low) * ((h ^ (h >> 16)) >> 8) / 16777216.f);
  }
}

template <typename T>
void randomize(DeviceArray<T>& x, float low, float high, uint32_t seed) {
  fill<<<1024, 256>>>(x.data, x.size, low, high, seed);
}

double median(std::vector<float> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

// Milliseconds of one call, the median of `rounds` after two to warm up.
double time(int rounds, const std::function<void()>& call) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  std::vector<float> all;
  for (int i = 0; i < rounds + 2; ++i) {
    check(cudaEventRecord(begin));
    call();
    check(cudaEventRecord(end));
    check(cudaEventSynchronize(end));
    float ms;
    check(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 2) all.push_back(ms);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return median(all);
}

double relative_rms(const DeviceArray<BFloat16>& x, const DeviceArray<BFloat16>& y) {
  std::vector<BFloat16> a(x.size), b(y.size);
  check(cudaMemcpy(a.data(), x.data, a.size() * 2, cudaMemcpyDeviceToHost));
  check(cudaMemcpy(b.data(), y.data, b.size() * 2, cudaMemcpyDeviceToHost));
  double error = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double u = static_cast<float>(a[i]), v = static_cast<float>(b[i]);
    error += (u - v) * (u - v);
    norm += v * v;
  }
  return std::sqrt(error / norm);
}

void bench_sequences(int64_t batch, int64_t tokens, int64_t heads) {
  constexpr int64_t kDim = 128;
  const int64_t row = heads * kDim, size = batch * tokens * row;
  DeviceArray<BFloat16> q(size), k(size), v(size), o(size), other(size), grad_o(size);
  DeviceArray<BFloat16> grad_q(size), grad_k(size), grad_v(size);
  DeviceArray<float> beta(batch * tokens * heads), grad_beta(beta.size);
  DeviceArray<float> log_decay(beta.size), grad_log_decay(beta.size);
  randomize(q, -1.f, 1.f, 1);
  randomize(k, -0.15f, 0.15f, 2);  // |k| about 1
  randomize(v, -1.f, 1.f, 3);
  randomize(grad_o, -1.f, 1.f, 4);
  randomize(beta, 0.f, 1.f, 5);
  randomize(log_decay, -0.1f, 0.f, 6);

  const auto view = [&](void* data) { return View{data, tokens * row, row, kDim}; };
  const auto out = [&](void* data) { return efla::MutableView{data, tokens * row, row, kDim}; };
  efla::ForwardParams forward;
  efla::Problem& p = forward.problem;
  p.shape = {batch, tokens, heads, heads, kDim, kDim, batch};
  p.dtype = efla::DType::kBFloat16;
  p.scale = 1.0 / std::sqrt(double{kDim});
  p.q = view(q.data), p.k = view(k.data), p.v = view(v.data);
  p.beta = {beta.data, tokens * heads, heads, 1};
  std::printf("| %lld x %lld, %lld |", static_cast<long long>(batch),
              static_cast<long long>(tokens), static_cast<long long>(heads));
  for (const bool gates : {false, true}) {
    if (gates) p.log_decay = {log_decay.data, tokens * heads, heads, 1};
    efla::BackwardParams backward;
    backward.problem = p;
    backward.grad_o = view(grad_o.data);
    backward.grad_q = out(grad_q.data), backward.grad_k = out(grad_k.data);
    backward.grad_v = out(grad_v.data);
    backward.grad_beta = {grad_beta.data, tokens * heads, heads, 1};
    if (gates) backward.grad_log_decay = {grad_log_decay.data, tokens * heads, heads, 1};
    forward.o = out(other.data);
    forward.checkpoints = nullptr;
    const int64_t bytes = std::max(efla::cuda::chunk_backward_workspace(backward),
                                   efla::cuda::chunk_forward_workspace(forward));
    DeviceArray<unsigned char> workspace(bytes);
    check(efla::cuda::recurrent_forward(forward, nullptr));
    forward.o = out(o.data);
    check(efla::cuda::chunk_forward(forward, workspace.data, nullptr));
    check(cudaDeviceSynchronize());
    const double error = relative_rms(o, other);
    const double forward_ms =
        time(9, [&] { check(efla::cuda::chunk_forward(forward, workspace.data, nullptr)); });
    // Training's forward leaves checkpoints for the backward, and may be another.
    DeviceArray<unsigned char> checkpoints(efla::cuda::chunk_checkpoint_bytes(forward) + 1);
    forward.checkpoints = checkpoints.data;
    const double training_ms =
        time(9, [&] { check(efla::cuda::chunk_forward(forward, workspace.data, nullptr)); });
    backward.checkpoints = checkpoints.data;
    const double backward_ms =
        time(9, [&] { check(efla::cuda::chunk_backward(backward, workspace.data, nullptr)); });
    std::printf(" %.3f | %.3f | %.3f | %.0f | %.1e |", forward_ms, backward_ms,
                training_ms + backward_ms, bytes / 1048576.0, error);
    std::fflush(stdout);
  }
  std::printf("\n");
}

// Decode steps in one CUDA graph over so many pools that no state is found in the cache. Returns
// microseconds a step.
template <typename State>
double bench_step(int64_t batch) {
  constexpr int64_t kHeads = 16, kDim = 128;
  const int64_t state = batch * kHeads * kDim * kDim;
  const int pools =
      static_cast<int>(std::clamp<int64_t>(200'000'000 / (state * sizeof(State)), 2, 200));
  DeviceArray<State> states(state * pools);
  DeviceArray<float> beta(batch * kHeads);
  DeviceArray<BFloat16> q(batch * kHeads * kDim), k(q.size), v(q.size), o(q.size);
  randomize(states, -1.f, 1.f, 1);
  randomize(beta, 0.f, 1.f, 2);
  randomize(q, -1.f, 1.f, 3);
  randomize(k, -0.15f, 0.15f, 4);
  randomize(v, -1.f, 1.f, 5);
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  check(cudaStreamCreate(&stream));
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < pools; ++i) {
    efla::StepParams step;
    efla::Problem& p = step.problem;
    const auto view = [&](void* data) { return View{data, kHeads * kDim, kHeads * kDim, kDim}; };
    p.shape = {batch, 1, kHeads, kHeads, kDim, kDim, batch};
    p.dtype = efla::DType::kBFloat16;
    p.scale = 1.0 / std::sqrt(double{kDim});
    p.q = view(q.data), p.k = view(k.data), p.v = view(v.data);
    p.beta = {beta.data, kHeads, kHeads, 1};
    step.o = {o.data, kHeads * kDim, kHeads * kDim, kDim};
    step.state = states.data + i * state;
    if (sizeof(State) == 2) step.state_dtype = efla::DType::kBFloat16;
    step.pool_size = batch;
    check(efla::cuda::step(step, stream));
  }
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&replay, graph, 0));
  check(cudaDeviceSynchronize());
  const double us = 1000 * time(15, [&] { check(cudaGraphLaunch(replay, nullptr)); }) / pools;
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  return us;
}

// A row of the decode table: float states, then bfloat16 states.
void bench_decode(int64_t batch) {
  const double us = bench_step<float>(batch), rounded_us = bench_step<BFloat16>(batch);
  const double elements = 16.0 * 128 * 128 * double(batch);
  std::printf("| %lld | %.2f | %.0f | %.2f | %.0f |\n", static_cast<long long>(batch), us,
              8e-3 * elements / us, rounded_us, 4e-3 * elements / rounded_us);
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
  try {
    int64_t shape[3] = {};
    for (int i = 0; argc == 4 && i < 3; ++i) {
      char* end;
      shape[i] = std::strtoll(argv[i + 1], &end, 10);
      if (shape[i] <= 0 || *end) {
        throw std::invalid_argument("BATCH TOKENS HEADS: three positive numbers");
      }
    }
    if (argc != 1 && argc != 4 && !(argc == 2 && quick)) {
      throw std::invalid_argument("usage: cuda_bench [--quick | BATCH TOKENS HEADS]");
    }
    cudaDeviceProp device;
    check(cudaGetDeviceProperties(&device, 0));
    std::printf("%s, bfloat16, D = 128, rule exact\n\n", device.name);
    std::printf("| B x T, heads | forward ms | backward ms | both | workspace MiB | error |");
    std::printf(" with gates: forward | backward | both | workspace MiB | error |\n");
    std::printf("|---|---|---|---|---|---|---|---|---|---|---|\n");
    if (argc == 4) {
      bench_sequences(shape[0], shape[1], shape[2]);
      return 0;
    }
    const int64_t shapes[][3] = {{8, 1024, 32}, {1, 32768, 32}, {4, 8192, 32}, {8, 4096, 32},
                                 {1, 8192, 32}, {1, 32768, 16}, {8, 4096, 16}, {8, 2048, 16},
                                 {16, 2048, 8}, {1, 32768, 8},  {1, 131072, 8}};
    for (const auto& s : shapes) {
      bench_sequences(s[0], s[1], s[2]);
      if (quick) break;
    }
    std::printf(
        "\n| decode batch | us | GB/s | bfloat16 states: us | GB/s |\n|---|---|---|---|---|\n");
    for (const int64_t batch : {1, 8, 64, 256, 1024}) {
      bench_decode(batch);
      if (quick) break;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cuda_bench: error: %s\n", error.what());
    return 1;
  }
}
