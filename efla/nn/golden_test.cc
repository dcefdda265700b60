// fla's own checkpoints through our kernels: logits, loss and gradients of its own runs
// (tests/golden/README.md).
#include <gtest/gtest.h>

#include <filesystem>

#include "efla/io/safetensors.h"
#include "efla/nn/pretrained.h"
#include "efla/nn/test_support.h"

namespace efla {
namespace {

namespace fs = std::filesystem;
using namespace testing_support;

class Golden : public ::testing::TestWithParam<std::string> {
 protected:
  fs::path folder() const { return fs::path(EFLA_GOLDEN_DIR) / GetParam(); }
  SafetensorsFile golden() const { return SafetensorsFile::open(folder() / "golden.safetensors"); }
};
INSTANTIATE_TEST_SUITE_P(Nn, Golden,
                         ::testing::Values("delta_net", "gated_deltanet", "mamba2", "transformer"),
                         [](const auto& info) { return info.param; });

TEST_P(Golden, LogitsLossAndGradients) {
  LanguageModel model = load_pretrained(folder().string());
  const SafetensorsFile expected = golden();
  const at::Tensor ids = expected.tensor("input_ids").to(at::kLong);
  EXPECT_LT(relative_error(model->forward(ids), expected.tensor("logits")), 2e-4);

  at::Tensor targets = at::full_like(ids, kIgnoreTarget);
  targets.narrow(1, 0, 95).copy_(ids.narrow(1, 1, 95));
  const LossSum sum = model->loss(ids, targets);
  const at::Tensor loss = sum.nll / sum.count;
  EXPECT_LT(relative_error(loss, expected.tensor("loss").squeeze()), 1e-5);
  loss.backward();
  const auto parameters = model->named_parameters();
  int compared = 0;
  for (const std::string& name : expected.names()) {
    const std::string prefix = "grad.";
    if (!name.starts_with(prefix)) continue;
    ++compared;
    const at::Tensor* parameter = parameters.find(name.substr(prefix.size()));
    ASSERT_NE(parameter, nullptr) << name;
    EXPECT_LT(relative_error(parameter->grad(), expected.tensor(name)), 1e-3) << name;
  }
  EXPECT_GE(compared, 5);
}

TEST_P(Golden, Bfloat16) {
  LanguageModel model = load_pretrained(folder().string(), at::kBFloat16);
  const SafetensorsFile expected = golden();
  const torch::NoGradGuard no_grad;
  const at::Tensor logits = model->forward(expected.tensor("input_ids").to(at::kLong));
  // Both round at other places: fla's own bfloat16 logits lie about 1e-2 from its float32 ones.
  EXPECT_LT(relative_error(logits, expected.tensor("logits_bf16")), 1.5e-2);
}

}  // namespace
}  // namespace efla
