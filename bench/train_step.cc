// Training speed of a small EFLA model beside a softmax model of the same size in plain torch, both
// in this process and in turn, so that a busy machine slows both alike.
//
//   bench_train_step [--length 256] [--tokens 2048] [--hidden 256] [--layers 4] [--vocab 4096]
//                    [--heads 2] [--rounds 9] [--threads 2] [--profile] [--default-malloc]
//
// A step is forward, loss, backward and fused AdamW on random tokens in float32. Reports the median
// of the steps and the ratio; --profile adds where one step of each model spends its time.
#include <ATen/ops/_fused_adamw.h>
#include <ATen/record_function.h>
#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "efla/cli/measure.h"
#include "efla/nn/language_model.h"

namespace {

using Clock = std::chrono::steady_clock;

double milliseconds(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

// A Llama-shaped softmax model: RoPE, scaled_dot_product_attention, RMS norm, SwiGLU, untied head.
struct SoftmaxModel {
  SoftmaxModel(const efla::ModelConfig& c) : config(c) {
    const int64_t d = c.hidden_size, inner = c.mlp_size();
    embedding = make({c.vocab_size, d});
    for (int64_t i = 0; i < c.num_hidden_layers; ++i) {
      blocks.push_back({ones(d), ones(d), make({d, d}), make({d, d}), make({d, d}), make({d, d}),
                        make({inner, d}), make({inner, d}), make({d, inner})});
    }
    norm = ones(d);
    head = make({c.vocab_size, d});
  }

  at::Tensor loss(const at::Tensor& ids, const at::Tensor& targets) const {
    const int64_t batch = ids.size(0), length = ids.size(1), d = config.hidden_size;
    const int64_t heads = config.num_heads, size = d / heads;
    const auto [cos, sin] = rotation(length, size);
    const auto split = [&](const at::Tensor& x) {
      return x.view({batch, length, heads, size}).transpose(1, 2);
    };
    const auto rotate = [&, cos = cos, sin = sin](const at::Tensor& x) {
      const auto halves = x.chunk(2, -1);
      return x * cos + at::cat({-halves[1], halves[0]}, -1) * sin;
    };
    at::Tensor x = at::embedding(embedding, ids);
    for (const Block& b : blocks) {
      const at::Tensor h = at::rms_norm(x, {d}, b.attn_norm, config.norm_eps);
      const at::Tensor o = at::scaled_dot_product_attention(
          rotate(split(at::linear(h, b.q))), rotate(split(at::linear(h, b.k))),
          split(at::linear(h, b.v)), {}, 0.0, /*is_causal=*/true);
      x = x + at::linear(o.transpose(1, 2).reshape({batch, length, d}), b.o);
      const at::Tensor m = at::rms_norm(x, {d}, b.mlp_norm, config.norm_eps);
      x = x + at::linear(at::silu(at::linear(m, b.gate)) * at::linear(m, b.up), b.down);
    }
    const at::Tensor logits = at::linear(at::rms_norm(x, {d}, norm, config.norm_eps), head);
    return at::cross_entropy_loss(logits.view({-1, config.vocab_size}), targets.view({-1}));
  }

  std::pair<at::Tensor, at::Tensor> rotation(int64_t length, int64_t size) const {
    const at::Tensor frequency =
        at::pow(10000.0, at::arange(0, size, 2).to(at::kFloat) / static_cast<double>(size))
            .reciprocal();
    const at::Tensor angle = at::outer(at::arange(length).to(at::kFloat), frequency);
    const at::Tensor both = at::cat({angle, angle}, -1);
    return {both.cos(), both.sin()};
  }

  at::Tensor make(at::IntArrayRef shape) {
    at::Tensor w = at::empty(shape).normal_(0, config.initializer_range).requires_grad_();
    parameters.push_back(w);
    return w;
  }
  at::Tensor ones(int64_t size) {
    at::Tensor w = at::ones({size}).requires_grad_();
    parameters.push_back(w);
    return w;
  }

  struct Block {
    at::Tensor attn_norm, mlp_norm, q, k, v, o, gate, up, down;
  };
  efla::ModelConfig config;
  std::vector<at::Tensor> parameters;
  at::Tensor embedding, norm, head;
  std::vector<Block> blocks;
};

// Fused AdamW over all parameters.
class Optimizer {
 public:
  explicit Optimizer(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {
    for (const at::Tensor& p : parameters_) {
      first_.push_back(at::zeros_like(p));
      second_.push_back(at::zeros_like(p));
      steps_.push_back(at::zeros({}));
    }
  }
  void step() {
    const torch::NoGradGuard no_grad;
    std::vector<at::Tensor> grads;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      steps_[i].add_(1);
      grads.push_back(parameters_[i].grad());
    }
    at::_fused_adamw_(parameters_, grads, first_, second_, {}, steps_, /*lr=*/1e-4, 0.9, 0.95,
                      /*weight_decay=*/0.1, 1e-8, /*amsgrad=*/false, /*maximize=*/false);
    for (at::Tensor& p : parameters_) p.mutable_grad().reset();
  }

 private:
  std::vector<at::Tensor> parameters_, first_, second_, steps_;
};

// Self time of every operator by name, over all threads.
class OperatorTimes {
 public:
  OperatorTimes() {
    handle_ = at::addGlobalCallback(
        at::RecordFunctionCallback(&start, &end)
            .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  }
  ~OperatorTimes() { at::removeCallback(handle_); }
  static void print() {
    std::vector<std::pair<double, std::string>> rows;
    for (const auto& [name, ms] : totals()) rows.emplace_back(ms, name);
    std::sort(rows.rbegin(), rows.rend());
    for (size_t i = 0; i < std::min<size_t>(rows.size(), 18); ++i) {
      fmt::print("    {:8.2f} ms  {}\n", rows[i].first, rows[i].second);
    }
    totals().clear();
  }

 private:
  struct Frame : at::ObserverContext {
    Clock::time_point begin = Clock::now();
    double inside = 0;
    Frame* outer = nullptr;
  };
  static std::map<std::string, double>& totals() {
    static std::map<std::string, double> map;
    return map;
  }
  static Frame*& current() {
    static thread_local Frame* frame = nullptr;
    return frame;
  }
  static std::unique_ptr<at::ObserverContext> start(const at::RecordFunction&) {
    auto frame = std::make_unique<Frame>();
    frame->outer = std::exchange(current(), frame.get());
    return frame;
  }
  static void end(const at::RecordFunction& function, at::ObserverContext* context) {
    static std::mutex mutex;
    auto* frame = static_cast<Frame*>(context);
    const double ms = milliseconds(frame->begin);
    current() = frame->outer;
    if (frame->outer) frame->outer->inside += ms;
    const std::lock_guard lock(mutex);
    totals()[function.name()] += ms - frame->inside;
  }
  at::CallbackHandle handle_;
};

}  // namespace

int main(int argc, char** argv) {
  int64_t length = 256, tokens = 2048, rounds = 9;
  int threads = at::get_num_threads();
  bool profile = false, default_malloc = false;
  efla::ModelConfig config;
  config.hidden_size = 256;
  config.num_hidden_layers = 4;
  config.vocab_size = 4096;
  config.num_heads = 2;
  CLI::App app("Training speed of EFLA beside a softmax model in plain torch");
  app.add_option("--length", length, "tokens of one sequence")->check(CLI::PositiveNumber);
  app.add_option("--tokens", tokens, "tokens of one step, a multiple of --length")
      ->check(CLI::PositiveNumber);
  app.add_option("--hidden", config.hidden_size)->check(CLI::PositiveNumber);
  app.add_option("--layers", config.num_hidden_layers)->check(CLI::PositiveNumber);
  app.add_option("--vocab", config.vocab_size)->check(CLI::PositiveNumber);
  app.add_option("--heads", config.num_heads)->check(CLI::PositiveNumber);
  app.add_option("--rounds", rounds)->check(CLI::Range(1, 1000));
  app.add_option("--threads", threads, "threads of torch's pool")->check(CLI::PositiveNumber);
  app.add_flag("--profile", profile, "where the time of one step goes");
  app.add_flag("--default-malloc", default_malloc, "leave glibc's allocator as it is");
  CLI11_PARSE(app, argc, argv);
  if (tokens % length != 0) {
    fmt::print(stderr, "bench_train_step: --tokens {} is not a multiple of --length {}\n", tokens,
               length);
    return 2;
  }
  // The rotation of the softmax model pairs the halves of a head.
  if (config.hidden_size % (2 * config.num_heads) != 0) {
    fmt::print(stderr, "bench_train_step: --hidden {} is not a multiple of twice --heads {}\n",
               config.hidden_size, config.num_heads);
    return 2;
  }
  if (!default_malloc) efla::bench::tune_malloc();
  at::set_num_threads(threads);

  torch::manual_seed(1);
  efla::LanguageModel efla_model(config);
  SoftmaxModel softmax_model(config);
  Optimizer efla_optimizer(efla_model->parameters()), softmax_optimizer(softmax_model.parameters);
  const at::Tensor ids = at::randint(config.vocab_size, {tokens / length, length}, at::kLong);
  const at::Tensor targets = at::randint(config.vocab_size, {tokens / length, length}, at::kLong);
  const std::function<void()> efla_step = [&] {
    const efla::LossSum loss = efla_model->loss(ids, targets);
    (loss.nll / loss.count).backward();
    efla_optimizer.step();
  };
  const std::function<void()> softmax_step = [&] {
    softmax_model.loss(ids, targets).backward();
    softmax_optimizer.step();
  };

  std::vector<double> efla_ms, softmax_ms, ratios;
  for (int64_t round = -2; round < rounds; ++round) {
    const double a = 1e3 * efla::bench::seconds(efla_step);
    const double b = 1e3 * efla::bench::seconds(softmax_step);
    if (round < 0) continue;
    efla_ms.push_back(a);
    softmax_ms.push_back(b);
    ratios.push_back(b / a);
  }
  using efla::bench::median;
  const auto per_second = [&](double ms) { return static_cast<double>(tokens) / ms; };
  fmt::print(
      "{} x {} tokens, {} threads: EFLA {:.1f} ms = {:.2f} k tokens/s; softmax {:.1f} ms = "
      "{:.2f} k tokens/s; EFLA / softmax {:.2f}\n",
      tokens / length, length, at::get_num_threads(), median(efla_ms), per_second(median(efla_ms)),
      median(softmax_ms), per_second(median(softmax_ms)), median(ratios));
  if (!profile) return 0;
  for (const auto& [name, step] :
       {std::pair("EFLA", efla_step), std::pair("softmax", softmax_step)}) {
    fmt::print("  {}:\n", name);
    {
      const OperatorTimes times;
      step();
    }
    OperatorTimes::print();
  }
  return 0;
}
