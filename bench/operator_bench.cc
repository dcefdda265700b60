// Speed of the CPU operators as ratios to what the same process reaches with torch's own matrix
// product and copy, measured in turn. Every row is checked against the double-precision reference
// before it is timed.
//
//   efla_bench [--threads 2] [--rounds 9] [--only NAME] [--csv FILE] [--default-malloc]
//
// NAME is the name of an operation: "forward", "forward, bfloat16", "forward+backward" or "step"; a
// trailing * makes it a prefix, so that 'forward*' runs the first three.
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "bench/measure.h"
#include "efla/flow/reference.h"
#include "efla/ops/ops.h"

namespace efla::bench {
namespace {

// Multiply-adds count twice. Products of the chunkwise form with chunks of 64 tokens, per token and
// head; backward counts three times the forward (docs/performance.md).
double forward_flops(int64_t dim) { return 6.0 * double(dim * dim) + 8.0 * 64 * double(dim); }

struct Case {
  int64_t batch, tokens, heads, dim;
};

struct Row {
  std::string name, shape;
  Paired time;
  double error = 0;      // largest difference to the reference over its largest magnitude
  double rate = 0;       // GFLOP/s or GB/s
  double yard_rate = 0;  // of the yardstick
  std::string unit;
};

struct Inputs {
  at::Tensor q, k, v, beta;
  explicit Inputs(const Case& c, at::ScalarType dtype = at::kFloat) {
    torch::manual_seed(1);
    q = torch::randn({c.batch, c.tokens, c.heads, c.dim}).to(dtype);
    k = (torch::randn({c.batch, c.tokens, c.heads, c.dim}) / std::sqrt(double(c.dim))).to(dtype);
    v = torch::randn({c.batch, c.tokens, c.heads, c.dim}).to(dtype);
    beta = torch::sigmoid(torch::randn({c.batch, c.tokens, c.heads}));
  }
};

std::string shape_text(const Case& c) {
  return fmt::format("({},{},{},{})", c.batch, c.tokens, c.heads, c.dim);
}

std::vector<double> values(const at::Tensor& t) {
  const at::Tensor flat = t.to(at::kDouble).contiguous().flatten();
  return {flat.data_ptr<double>(), flat.data_ptr<double>() + flat.numel()};
}

double relative_error(const std::vector<double>& actual, const std::vector<double>& expected) {
  double difference = 0, largest = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    difference = std::max(difference, std::abs(actual[i] - expected[i]));
    largest = std::max(largest, std::abs(expected[i]));
  }
  return difference / largest;
}

void require(double error, double limit, const std::string& what) {
  if (error <= limit) return;
  throw std::runtime_error(fmt::format("{}: differs from the reference by {:.2e}, more than {:.0e}",
                                       what, error, limit));
}

// The first tokens and heads of the last sequence: a prefix depends on nothing after it.
at::Tensor slice(const at::Tensor& x, int64_t tokens, int64_t heads) {
  return x.narrow(0, x.size(0) - 1, 1).narrow(1, 0, tokens).narrow(2, 0, heads);
}

ReferenceProblem reference_problem(const Inputs& in, int64_t tokens, int64_t heads) {
  ReferenceProblem p;
  p.tokens = tokens;
  p.heads = p.value_heads = heads;
  p.key_dim = p.value_dim = in.q.size(3);
  p.scale = 1 / std::sqrt(double(p.key_dim));
  p.q = values(slice(in.q, tokens, heads));
  p.k = values(slice(in.k, tokens, heads));
  p.v = values(slice(in.v, tokens, heads));
  p.beta = values(slice(in.beta, tokens, heads));
  return p;
}

class Bench {
 public:
  Bench(int rounds, std::string only) : rounds_(rounds), only_(std::move(only)) {
    a_ = torch::randn({2048, 2048});
    b_ = torch::randn({2048, 2048});
    c_ = torch::empty({2048, 2048});
  }

  const std::vector<Row>& rows() const { return rows_; }

  void forward(const Case& c, at::ScalarType dtype = at::kFloat) {
    const std::string name = dtype == at::kFloat ? "forward" : "forward, bfloat16";
    if (skip(name)) return;
    const Inputs in(c, dtype);
    const int64_t tokens = std::min<int64_t>(c.tokens, 200), heads = std::min<int64_t>(c.heads, 2);
    const auto run = [&] { return std::get<0>(ops::chunk(in.q, in.k, in.v, in.beta)); };
    const double error = relative_error(values(slice(run(), tokens, heads)),
                                        reference_forward(reference_problem(in, tokens, heads)).o);
    require(error, dtype == at::kFloat ? 1e-4 : 2e-2, name);
    add_gemm_row(name, c, error, 1, [&] { run(); });
  }

  // Gradients of <o, g>, with g zero outside the slice that the reference can afford.
  void backward(const Case& c) {
    if (skip("forward+backward")) return;
    Inputs in(c);
    const std::vector<at::Tensor> leaves = {in.q, in.k, in.v, in.beta};
    for (const at::Tensor& t : leaves) t.requires_grad_(true);
    const auto run = [&](const at::Tensor& grad) {
      const at::AutoGradMode with_grad(true);
      const at::Tensor o = std::get<0>(ops::chunk(in.q, in.k, in.v, in.beta));
      return torch::autograd::grad({o}, leaves, {grad});
    };
    const int64_t tokens = std::min<int64_t>(c.tokens, 200), heads = std::min<int64_t>(c.heads, 2);
    at::Tensor grad = torch::zeros_like(in.v);
    slice(grad, tokens, heads).copy_(torch::randn({1, tokens, heads, c.dim}));
    const auto actual = run(grad);
    const ReferenceGradients expected = reference_backward(reference_problem(in, tokens, heads),
                                                           values(slice(grad, tokens, heads)));
    double error = 0;
    const std::vector<double>* references[] = {&expected.q, &expected.k, &expected.v,
                                               &expected.beta};
    for (int i = 0; i < 4; ++i)
      error =
          std::max(error, relative_error(values(slice(actual[i], tokens, heads)), *references[i]));
    require(error, 1e-4, "forward+backward");
    const at::Tensor full = torch::randn_like(in.v);
    add_gemm_row("forward+backward", c, error, 4, [&] { run(full); });
  }

  void step(int64_t sequences) {
    if (skip("step")) return;
    const Case c{sequences, 1, 16, 128};
    const Inputs in(c);
    at::Tensor state = torch::randn({sequences, c.heads, c.dim, c.dim});
    ReferenceProblem p = reference_problem(in, 1, c.heads);
    p.initial_state = values(state[sequences - 1]);
    const auto run = [&] { return ops::step_(in.q, in.k, in.v, in.beta, state); };
    const double error =
        relative_error(values(run()[sequences - 1].flatten()), reference_forward(p).o);
    require(error, 1e-4, "step");
    // Working set of the copy = of the step: half the state copied onto the other half.
    const at::Tensor half = torch::randn({2, state.numel() / 2});
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
    Row row{"step", shape_text(c), time, error, 0, 0, "GB/s"};
    row.time.operation /= double(inner);
    row.time.yardstick /= double(inner);
    const double copied = double(state.nbytes());
    row.rate = 2 * copied / row.time.operation / 1e9;
    row.yard_rate = copied / row.time.yardstick / 1e9;
    row.time.ratio *= 2;  // the step reads and writes the whole state, the copy half of it each
    add(row);
  }

 private:
  // `only_`: a name, or a prefix followed by *; empty: everything.
  bool skip(const std::string& name) const {
    if (only_.empty() || name == only_) return false;
    return only_.back() != '*' || !name.starts_with(only_.substr(0, only_.size() - 1));
  }

  void add_gemm_row(const std::string& name, const Case& c, double error, double factor,
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
    out << fmt::format("{},\"{}\",{:.9f},{:.3f},{},{:.3f},{:.4f},{:.3e},{},{},{}\n", r.name,
                       r.shape, r.time.operation, r.rate, r.unit, r.yard_rate, r.time.ratio,
                       r.error, r.time.kept, r.time.rounds, r.time.disturbed ? 1 : 0);
  if (!out) throw std::runtime_error("cannot write " + path);
}

void run_all(Bench& bench) {
  for (const Case& c : {Case{1, 2048, 16, 128}, Case{1, 2048, 4, 128}, Case{4, 512, 4, 64},
                        Case{8, 2048, 8, 128}, Case{1, 8192, 16, 128}})
    bench.forward(c);
  bench.forward({1, 2048, 16, 128}, at::kBFloat16);
  for (const Case& c : {Case{1, 2048, 16, 128}, Case{1, 2048, 4, 128}, Case{1, 8192, 16, 128}})
    bench.backward(c);
  // Cost per token at growing length.
  for (const int64_t tokens : {1024, 2048, 4096, 8192}) bench.forward({1, tokens, 4, 128});
  for (const int64_t sequences : {1, 8}) bench.step(sequences);
}

int run(int argc, char** argv) {
  int threads = 2, rounds = 9;
  bool default_malloc = false;
  std::string only, csv;
  CLI::App app("Speed of the CPU operators beside torch's matrix product and copy");
  app.add_option("--threads", threads, "Threads of torch's pool")->check(CLI::PositiveNumber);
  app.add_option("--rounds", rounds, "Rounds of each measurement")->check(CLI::Range(3, 1000));
  app.add_option("--only", only,
                 "Only the operation of this name; NAME* for all that begin with NAME");
  app.add_option("--csv", csv, "Also write the rows to this file");
  app.add_flag("--default-malloc", default_malloc,
               "Let malloc return memory to the system, so that large results fault pages in anew");
  CLI11_PARSE(app, argc, argv);
  if (!default_malloc) tune_malloc();
  at::set_num_threads(threads);
  torch::NoGradGuard no_grad;
  fmt::print("threads {}, float32 unless named, {} malloc, torch {}\n\n", threads,
             default_malloc ? "default" : "tuned", TORCH_VERSION);
  fmt::print(
      "| operation | (B,T,H,D) | ms | rate | yardstick | ratio | error | rounds kept |\n"
      "|---|---|---|---|---|---|---|---|\n");
  Bench bench(rounds, only);
  run_all(bench);
  if (bench.rows().empty()) {
    fmt::print(
        stderr,
        "efla_bench: --only {}: no such operation; there are forward, \"forward, bfloat16\", "
        "forward+backward and step\n",
        only);
    return 2;
  }
  if (!csv.empty()) write_csv(csv, bench.rows());
  return 0;
}

}  // namespace
}  // namespace efla::bench

int main(int argc, char** argv) {
  try {
    return efla::bench::run(argc, argv);
  } catch (const std::exception& e) {
    fmt::print(stderr, "efla_bench: {}\n", e.what());
    return 1;
  }
}
