// Speed of the CUDA operators: times of CUDA-graph replays over inputs in rotation, beside the time
// that the device needs to move each tensor once per pass.
#include "efla/cli/operator_bench.h"

#ifdef EFLA_WITH_CUDA

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAStream.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <functional>

#include "efla/cli/measure.h"
#include "efla/io/error.h"
#include "efla/ops/ops.h"

namespace efla::cli {
namespace {

const at::Device kDevice(at::kCUDA, 0);
constexpr double kTolerance = 2e-2;      // bfloat16, largest difference over largest magnitude
constexpr int64_t kRotated = 256 << 20;  // bytes of inputs in rotation: several times the L2 cache

struct Row {
  std::string name, shape;
  double ms = 0, floor_ms = 0, error = 0;
};

// Milliseconds of one of call(0) ... call(count - 1), the median over `rounds` replays of one graph
// that holds them all.
double graph_ms(const std::function<void(int64_t)>& call, int64_t count, int rounds) {
  const c10::cuda::CUDAStreamGuard on_side_stream(c10::cuda::getStreamFromPool());
  for (int64_t i = 0; i < count; ++i)
    call(i);  // what is made on first use is made outside the graph
  c10::cuda::getCurrentCUDAStream().synchronize();
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  for (int64_t i = 0; i < count; ++i) call(i);
  graph.capture_end();
  std::vector<double> times;
  for (int i = 0; i < rounds + 2; ++i) {  // two to warm up
    at::cuda::CUDAEvent begin(cudaEventDefault), end(cudaEventDefault);
    begin.record();
    graph.replay();
    end.record();
    end.synchronize();
    if (i >= 2) times.push_back(begin.elapsed_time(end) / double(count));
  }
  return bench::median(times);
}

// Bytes read and written per millisecond by a device copy of 2 GiB.
double copy_rate(int rounds) {
  const at::Tensor from = torch::ones({int64_t{1} << 31}, at::device(kDevice).dtype(at::kByte));
  at::Tensor to = torch::empty_like(from);
  return 2.0 * double(from.numel()) / graph_ms([&](int64_t) { to.copy_(from); }, 1, rounds);
}

class Bench {
 public:
  Bench(const OperatorBenchOptions& options, double rate) : options_(options), rate_(rate) {}
  const std::vector<Row>& rows() const { return rows_; }

  void sequences(const BenchCase& c) {
    const bool forward = is_wanted(options_.only, "forward");
    const bool both = is_wanted(options_.only, "forward+backward");
    if (!forward && !both) return;
    const double token_heads = double(c.batch * c.tokens * c.heads);
    std::vector<BenchInputs> sets;
    std::vector<at::Tensor> grads;
    while (sets.size() < 2 || int64_t(sets.size()) * sets[0].q.nbytes() * 4 < kRotated) {
      sets.emplace_back(c, at::kBFloat16, kDevice);
      grads.push_back(torch::randn_like(sets.back().v));
    }
    if (forward) {
      const auto run = [&](int64_t i) {
        const BenchInputs& x = sets[size_t(i)];
        return std::get<0>(ops::chunk(x.q, x.k, x.v, x.beta));
      };
      const double error = forward_error(sets[0], run(0));
      // q, k, v, o in two bytes each and beta.
      add("forward", c, error, token_heads * double(4 * c.dim * 2 + 4), int64_t(sets.size()), run);
    }
    if (both) {
      for (const BenchInputs& x : sets) {
        for (const at::Tensor& t : {x.q, x.k, x.v, x.beta}) t.requires_grad_(true);
      }
      const auto run = [&](int64_t i, const at::Tensor& grad) {
        const BenchInputs& x = sets[size_t(i)];
        const at::AutoGradMode with_grad(true);
        const at::Tensor o = std::get<0>(ops::chunk(x.q, x.k, x.v, x.beta));
        return torch::autograd::grad({o}, {x.q, x.k, x.v, x.beta}, {grad});
      };
      const at::Tensor grad = gradient_in_slice(sets[0]);
      const double error = backward_error(sets[0], grad, run(0, grad));
      // Backward: q, k, v, do, beta again, and dq, dk, dv, dbeta.
      add("forward+backward", c, error, token_heads * double(11 * c.dim * 2 + 12),
          int64_t(sets.size()), [&](int64_t i) { run(i, grads[size_t(i)]); });
    }
  }

  // One token of so many sequences; so many states that none is found in the cache.
  void step(int64_t batch, at::ScalarType storage) {
    const std::string name = storage == at::kFloat ? "step" : "step, bfloat16 state";
    if (!is_wanted(options_.only, name)) return;
    const BenchCase c{batch, 1, 16, 128};
    const BenchInputs in(c, at::kBFloat16, kDevice);
    const int64_t size = batch * c.heads * c.dim * c.dim;
    const int64_t count = std::clamp<int64_t>(50'000'000 / size, 2, 100);
    std::vector<at::Tensor> states;
    for (int64_t i = 0; i < count; ++i)
      states.push_back(
          torch::randn({batch, c.heads, c.dim, c.dim}, at::device(kDevice)).to(storage));
    ReferenceProblem p = reference_problem(in, 1, c.heads);
    p.initial_state = values(states[0][batch - 1]);
    const auto run = [&](int64_t i) {
      return ops::step_(in.q, in.k, in.v, in.beta, states[size_t(i)]);
    };
    const double error =
        relative_error(values(run(0)[batch - 1].flatten()), reference_forward(p).o);
    add(name, c, error, 2.0 * double(states[0].nbytes()), count, run);
  }

 private:
  void add(const std::string& name, const BenchCase& c, double error, double bytes, int64_t count,
           const std::function<void(int64_t)>& run) {
    require(error, kTolerance, name + " " + shape_text(c));
    const Row row{name, shape_text(c), graph_ms(run, count, options_.rounds), bytes / rate_, error};
    fmt::print("| {} | {} | {:.4f} | {:.4f} | {:.2f} | {:.0e} |\n", row.name, row.shape, row.ms,
               row.floor_ms, row.ms / row.floor_ms, row.error);
    std::fflush(stdout);
    rows_.push_back(row);
  }

  OperatorBenchOptions options_;
  double rate_;  // bytes per millisecond of a copy
  std::vector<Row> rows_;
};

void write_csv(const std::string& path, const std::vector<Row>& rows) {
  std::ofstream out(path);
  out << "name,shape,ms,floor_ms,error\n";
  for (const Row& r : rows)
    out << fmt::format("\"{}\",\"{}\",{:.6f},{:.6f},{:.3e}\n", r.name, r.shape, r.ms, r.floor_ms,
                       r.error);
  if (!out) throw Error(path + ": cannot be written; check the folder and the disk");
}

}  // namespace

void bench_operators_on_cuda(const OperatorBenchOptions& options) {
  check_only(options.only, {"forward", "forward+backward", "step", "step, bfloat16 state"});
  torch::NoGradGuard no_grad;
  const double rate = copy_rate(options.rounds);
  fmt::print("CUDA device 0, bfloat16, rule exact, torch {}; device copy {:.2f} TB/s\n\n",
             TORCH_VERSION, rate * 1e-9);
  fmt::print(
      "| operation | (B,T,H,D) | ms | floor ms | ms / floor | error "
      "|\n|---|---|---|---|---|---|\n");
  Bench bench(options, rate);
  constexpr int64_t kShapes[][3] = {{1, 32768, 32}, {4, 8192, 32},  {8, 4096, 32}, {1, 8192, 32},
                                    {8, 1024, 32},  {1, 32768, 16}, {8, 4096, 16}, {8, 2048, 16},
                                    {16, 2048, 8},  {1, 32768, 8},  {1, 131072, 8}};
  for (const auto& s : kShapes) bench.sequences({s[0], s[1], s[2], 128});
  for (const int64_t dim : {64, 96, 256}) bench.sequences({4, 4096, 2048 / dim, dim});
  for (const auto storage : {at::kFloat, at::kBFloat16})
    for (const int64_t batch : {1, 8, 64, 256, 1024}) bench.step(batch, storage);
  if (!options.csv.empty()) write_csv(options.csv, bench.rows());
}

}  // namespace efla::cli

#else

#include "efla/io/error.h"

namespace efla::cli {

void bench_operators_on_cuda(const OperatorBenchOptions&) {
  throw Error("this build has no CUDA part; build with scripts/build.sh cuda");
}

}  // namespace efla::cli

#endif
