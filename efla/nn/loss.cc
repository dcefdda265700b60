#include "efla/nn/loss.h"

#include <torch/torch.h>

#include <algorithm>

namespace efla {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

// Numbers in one block of logits. On the CPU: small enough for the caches, with enough rows that
// reading the head's weight once per block does not bind. On a GPU: enough to fill it.
constexpr int64_t kBlockElements = int64_t{1} << 21;
constexpr int64_t kGpuBlockElements = int64_t{1} << 26;
constexpr int64_t kMinBlockRows = 256;

int64_t block_rows(const at::Tensor& weight) {
  const int64_t elements = weight.is_cuda() ? kGpuBlockElements : kBlockElements;
  return std::max(kMinBlockRows, elements / std::max<int64_t>(1, weight.size(0)));
}

at::ScalarType loss_dtype(const at::Tensor& hidden) {
  return hidden.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Targets as the blocks need them: [rows], which ones count, and 0 in place of the ignored.
struct Targets {
  at::Tensor index;       // [rows, 1] int64, valid everywhere
  at::Tensor valid;       // [rows, 1] bool
  at::Tensor host_valid;  // the same on the CPU, where a block can look at it without waiting
  int64_t count = 0;
};

Targets prepare(const at::Tensor& targets, int64_t vocab) {
  TORCH_CHECK(targets.scalar_type() == at::kLong, "targets must be int64, got ",
              targets.scalar_type());
  const at::Tensor flat = targets.reshape({-1, 1});
  Targets out;
  out.valid = flat.ne(kIgnoreTarget);
  out.index = flat.masked_fill(out.valid.logical_not(), 0);
  out.host_valid = out.valid.cpu();
  out.count = out.host_valid.sum().item<int64_t>();
  if (flat.numel() > 0) {
    const auto [low, high] = at::aminmax(out.index);
    TORCH_CHECK(low.item<int64_t>() >= 0 && high.item<int64_t>() < vocab,
                "targets must lie between 0 and vocab - 1 = ", vocab - 1, " or be ", kIgnoreTarget);
  }
  return out;
}

// Buffers of one block, reused by all: logits (later their gradient) and log probabilities.
class BlockLogProbs {
 public:
  BlockLogProbs(const at::Tensor& hidden, const at::Tensor& weight)
      : hidden_(hidden), weight_t_(weight.t()), dtype_(loss_dtype(hidden)) {
    const int64_t rows = std::min(block_rows(weight), hidden.size(0));
    logits_ = at::empty({rows, weight.size(0)}, hidden.options());
    log_probs_ = at::empty({rows, weight.size(0)}, hidden.options().dtype(dtype_));
  }

  /// Log probabilities [n, vocab] of rows start.. start + n; valid until the next call.
  at::Tensor compute(int64_t start, int64_t n) {
    at::Tensor logits = logits_.narrow(0, 0, n);
    at::Tensor log_probs = log_probs_.narrow(0, 0, n);
    at::mm_out(logits, hidden_.narrow(0, start, n), weight_t_);
    at::_log_softmax_out(log_probs, logits.to(dtype_), 1, false);
    return log_probs;
  }

  /// (softmax - onehot) of the block just computed, 0 where ignored, in the dtype of the logits.
  at::Tensor gradient(const at::Tensor& log_probs, const at::Tensor& index, const at::Tensor& valid,
                      bool all_valid) {
    const at::Tensor kept = valid.to(dtype_);
    log_probs.exp_();
    log_probs.scatter_add_(1, index, kept.neg());
    if (!all_valid) log_probs.mul_(kept);
    at::Tensor logits = logits_.narrow(0, 0, log_probs.size(0));
    if (dtype_ == logits.scalar_type()) return log_probs;
    return logits.copy_(log_probs);
  }

 private:
  at::Tensor hidden_, weight_t_;
  at::ScalarType dtype_;
  at::Tensor logits_, log_probs_;
};

template <typename Visit>
void for_each_block(const at::Tensor& hidden, const at::Tensor& weight, const Visit& visit) {
  const int64_t rows = hidden.size(0), step = block_rows(weight);
  for (int64_t start = 0; start < rows; start += step) visit(start, std::min(step, rows - start));
}

// The gradient of a sum of cross entropies does not depend on what is done with the sum, up to its
// factor: it is formed while a block's probabilities are at hand and scaled in backward.
class LinearCrossEntropy : public torch::autograd::Function<LinearCrossEntropy> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& hidden,
                            const at::Tensor& weight, const at::Tensor& index,
                            const at::Tensor& valid, const at::Tensor& host_valid,
                            bool wants_grad) {
    const auto dtype = loss_dtype(hidden);
    at::Tensor sum = at::zeros({}, hidden.options().dtype(at::kDouble));
    at::Tensor grad_hidden, grad_weight;
    if (wants_grad) {
      grad_hidden = at::empty_like(hidden);
      grad_weight = at::zeros_like(weight, weight.options().dtype(dtype));
    }
    BlockLogProbs block(hidden, weight);
    for_each_block(hidden, weight, [&](int64_t start, int64_t n) {
      const at::Tensor targets = index.narrow(0, start, n), kept = valid.narrow(0, start, n);
      const at::Tensor log_probs = block.compute(start, n);
      const at::Tensor chosen = log_probs.gather(1, targets);
      sum.sub_(chosen.masked_fill_(kept.logical_not(), 0).sum(at::kDouble));
      if (!wants_grad) return;
      const bool all_valid = host_valid.narrow(0, start, n).all().item<bool>();
      const at::Tensor grad = block.gradient(log_probs, targets, kept, all_valid);
      at::Tensor grad_rows = grad_hidden.narrow(0, start, n);
      at::mm_out(grad_rows, grad, weight);
      if (dtype == weight.scalar_type()) {
        grad_weight.addmm_(grad.t(), hidden.narrow(0, start, n));
      } else {
        grad_weight.add_(at::mm(grad.t(), hidden.narrow(0, start, n)));
      }
    });
    if (wants_grad) {
      ctx->saved_data["grad_hidden"] = grad_hidden;
      ctx->saved_data["grad_weight"] = grad_weight.to(weight.scalar_type());
    }
    return sum.to(dtype);
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grad_output) {
    TORCH_CHECK(!grad_output[0].requires_grad(),
                "linear_cross_entropy is differentiable once only");
    const at::Tensor grad_hidden = ctx->saved_data["grad_hidden"].toTensor();
    const at::Tensor grad_weight = ctx->saved_data["grad_weight"].toTensor();
    return {grad_hidden * grad_output[0].to(grad_hidden.scalar_type()),
            grad_weight * grad_output[0].to(grad_weight.scalar_type()),
            {},
            {},
            {},
            {}};
  }
};

void check_shapes(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets) {
  TORCH_CHECK(weight.dim() == 2 && hidden.dim() >= 1 && hidden.size(-1) == weight.size(1),
              "hidden must be [..., D] and head_weight [vocab, D], got ", hidden.sizes(), " and ",
              weight.sizes());
  TORCH_CHECK(hidden.sizes().slice(0, hidden.dim() - 1) == targets.sizes(),
              "targets must have the shape of hidden without its last dimension, got ",
              targets.sizes(), " for hidden ", hidden.sizes());
}

}  // namespace

LossSum linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& head_weight,
                             const at::Tensor& targets) {
  check_shapes(hidden, head_weight, targets);
  const Targets prepared = prepare(targets, head_weight.size(0));
  const bool wants_grad =
      at::GradMode::is_enabled() && (hidden.requires_grad() || head_weight.requires_grad());
  const at::Tensor rows = hidden.reshape({-1, hidden.size(-1)});
  return {LinearCrossEntropy::apply(rows, head_weight, prepared.index, prepared.valid,
                                    prepared.host_valid, wants_grad),
          prepared.count};
}

at::Tensor token_nll(const at::Tensor& hidden, const at::Tensor& head_weight,
                     const at::Tensor& targets) {
  const torch::NoGradGuard no_grad;
  check_shapes(hidden, head_weight, targets);
  const Targets prepared = prepare(targets, head_weight.size(0));
  const at::Tensor rows = hidden.reshape({-1, hidden.size(-1)});
  at::Tensor nll = at::empty({rows.size(0), 1}, rows.options().dtype(loss_dtype(hidden)));
  BlockLogProbs block(rows, head_weight);
  for_each_block(rows, head_weight, [&](int64_t start, int64_t n) {
    const at::Tensor log_probs = block.compute(start, n);
    nll.narrow(0, start, n).copy_(log_probs.gather(1, prepared.index.narrow(0, start, n)).neg_());
  });
  return nll.masked_fill_(prepared.valid.logical_not(), 0).view(targets.sizes());
}

}  // namespace efla
