// Speed of the CPU operators as ratios to what the same process reaches with torch's own matrix
// product and copy, measured in turn.
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <cstdio>
#include <fstream>

#include "efla/cli/measure.h"
#include "efla/cli/operator_bench.h"
#include "efla/io/error.h"
#include "efla/ops/ops.h"

namespace efla::cli {
namespace {

using bench::measure_paired;
using bench::Paired;
using bench::tune_malloc;

// Multiply-adds count twice. Products of the chunkwise form with chunks of 64 tokens, per token and
// head; backward counts three times the forward (docs/performance.md).
double forward_flops(int64_t dim) { return 6.0 * double(dim * dim) + 8.0 * 64 * double(dim); }

struct Row {
  std::string name, shape;
  Paired time;
  double error = 0;      // largest difference to the reference over its largest magnitude
  double rate = 0;       // GFLOP/s or GB/s
  double yard_rate = 0;  // of the yardstick
  std::string unit;
};

class Bench {
 public:
  Bench(int rounds, std::string only) : rounds_(rounds), only_(std::move(only)) {
    a_ = torch::randn({2048, 2048});
    b_ = torch::randn({2048, 2048});
    c_ = torch::empty({2048, 2048});
  }

  const std::vector<Row>& rows() const { return rows_; }

  void forward(const BenchCase& c, at::ScalarType dtype = at::kFloat) {
    const std::string name = dtype == at::kFloat ? "forward" : "forward, bfloat16";
    if (!is_wanted(only_, name)) return;
    const BenchInputs in(c, dtype);
    const auto run = [&] { return std::get<0>(ops::chunk(in.q, in.k, in.v, in.beta)); };
    const double error = forward_error(in, run());
    require(error, dtype == at::kFloat ? 1e-4 : 2e-2, name);
    add_gemm_row(name, c, error, 1, [&] { run(); });
  }

  void backward(const BenchCase& c) {
    if (!is_wanted(only_, "forward+backward")) return;
    BenchInputs in(c, at::kFloat);
    const std::vector<at::Tensor> leaves = {in.q, in.k, in.v, in.beta};
    for (const at::Tensor& t : leaves) t.requires_grad_(true);
    const auto run = [&](const at::Tensor& grad) {
      const at::AutoGradMode with_grad(true);
      const at::Tensor o = std::get<0>(ops::chunk(in.q, in.k, in.v, in.beta));
      return torch::autograd::grad({o}, leaves, {grad});
    };
    const at::Tensor grad = gradient_in_slice(in);
    const double error = backward_error(in, grad, run(grad));
    require(error, 1e-4, "forward+backward");
    const at::Tensor full = torch::randn_like(in.v);
    add_gemm_row("forward+backward", c, error, 4, [&] { run(full); });
  }

  void step(int64_t sequences, at::ScalarType storage) {
    const std::string name = storage == at::kFloat ? "step" : "step, bfloat16 state";
    if (!is_wanted(only_, name)) return;
    const BenchCase c{sequences, 1, 16, 128};
    const BenchInputs in(c, at::kFloat);
    at::Tensor state = torch::randn({sequences, c.heads, c.dim, c.dim}).to(storage);
    ReferenceProblem p = reference_problem(in, 1, c.heads);
    p.initial_state = values(state[sequences - 1]);
    const auto run = [&] { return ops::step_(in.q, in.k, in.v, in.beta, state); };
    const double error =
        relative_error(values(run()[sequences - 1].flatten()), reference_forward(p).o);
    require(error, 1e-4, name);
    // Working set of the copy = of the step: half the state copied onto the other half.
    const at::Tensor half = torch::randn({2, state.numel() / 2}).to(storage);
    const at::Tensor from = half[0], to = half[1];
    const int64_t inner = std::max<int64_t>(1, 48 / sequences);  // a round of about a millisecond
    const Paired time = measure_paired(
        [&] {
          for (int64_t i = 0; i < inner; ++i) run();
        },
        [&] {
          for (int64_t i = 0; i < inner; ++i) to.copy_(from);
        },
        rounds_ * 20);
    Row row{name, shape_text(c), time, error, 0, 0, "GB/s"};
    row.time.operation /= double(inner);
    row.time.yardstick /= double(inner);
    const double copied = double(state.nbytes());
    row.rate = 2 * copied / row.time.operation / 1e9;
    row.yard_rate = copied / row.time.yardstick / 1e9;
    row.time.ratio *= 2;  // the step reads and writes the whole state, the copy half of it each
    add(row);
  }

 private:
  void add_gemm_row(const std::string& name, const BenchCase& c, double error, double factor,
                    const std::function<void()>& run) {
    const double flops =
        factor * forward_flops(c.dim) * double(c.batch) * double(c.tokens) * double(c.heads);
    const double gemm_flops = 2.0 * 2048 * 2048 * 2048;
    const Paired time = measure_paired(
        run, [&] { at::mm_out(c_, a_, b_); }, rounds_);
    Row row{name,
            shape_text(c),
            time,
            error,
            flops / time.operation / 1e9,
            gemm_flops / time.yardstick / 1e9,
            "GFLOP/s"};
    row.time.ratio = time.ratio * flops / gemm_flops;
    add(row);
  }

  void add(const Row& row) {
    rows_.push_back(row);
    fmt::print("| {} | {} | {:.3f} | {:.1f} {} | {:.1f} | {:.0f} % | {:.0e} | {}/{}{} |\n",
               row.name, row.shape, row.time.operation * 1e3, row.rate, row.unit, row.yard_rate,
               row.time.ratio * 100, row.error, row.time.kept, row.time.rounds,
               row.time.disturbed ? " disturbed" : "");
    std::fflush(stdout);
  }

  int rounds_;
  std::string only_;
  at::Tensor a_, b_, c_;
  std::vector<Row> rows_;
};

void write_csv(const std::string& path, const std::vector<Row>& rows) {
  std::ofstream out(path);
  out << "name,shape,seconds,rate,unit,yardstick_rate,ratio,error,kept,rounds,disturbed\n";
  for (const Row& r : rows)
    out << fmt::format("\"{}\",\"{}\",{:.9f},{:.3f},{},{:.3f},{:.4f},{:.3e},{},{},{}\n", r.name,
                       r.shape, r.time.operation, r.rate, r.unit, r.yard_rate, r.time.ratio,
                       r.error, r.time.kept, r.time.rounds, r.time.disturbed ? 1 : 0);
  if (!out) throw Error(path + ": cannot be written; check the folder and the disk");
}

void run_all(Bench& bench) {
  for (const BenchCase& c :
       {BenchCase{1, 2048, 16, 128}, BenchCase{1, 2048, 4, 128}, BenchCase{4, 512, 4, 64},
        BenchCase{8, 2048, 8, 128}, BenchCase{1, 8192, 16, 128}})
    bench.forward(c);
  bench.forward({1, 2048, 16, 128}, at::kBFloat16);
  for (const BenchCase& c :
       {BenchCase{1, 2048, 16, 128}, BenchCase{1, 2048, 4, 128}, BenchCase{1, 8192, 16, 128}})
    bench.backward(c);
  // Cost per token at growing length.
  for (const int64_t tokens : {1024, 2048, 4096, 8192}) bench.forward({1, tokens, 4, 128});
  for (const auto storage : {at::kFloat, at::kBFloat16})
    for (const int64_t sequences : {1, 8}) bench.step(sequences, storage);
}

}  // namespace

void bench_operators_on_cpu(const OperatorBenchOptions& options) {
  check_only(options.only,
             {"forward", "forward, bfloat16", "forward+backward", "step", "step, bfloat16 state"});
  if (!options.default_malloc) tune_malloc();
  torch::NoGradGuard no_grad;
  fmt::print("threads {}, float32 unless named, {} malloc, torch {}\n\n", at::get_num_threads(),
             options.default_malloc ? "default" : "tuned", TORCH_VERSION);
  fmt::print(
      "| operation | (B,T,H,D) | ms | rate | yardstick | ratio | error | rounds kept |\n"
      "|---|---|---|---|---|---|---|---|\n");
  Bench bench(options.rounds, options.only);
  run_all(bench);
  if (!options.csv.empty()) write_csv(options.csv, bench.rows());
}

}  // namespace efla::cli
