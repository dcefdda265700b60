// Mamba-2 and softmax attention once more in plain float64 tensor operations, token by token, for
// the tests.
#pragma once

#include <functional>
#include <string>

#include "efla/nn/config.h"

#include <torch/torch.h>

namespace efla::testing_support {

/// A parameter of the mixer in float64 by its name ("in_proj.weight").
using ParameterByName = std::function<at::Tensor(const std::string&)>;

/// x [B, T, hidden] -> [B, T, hidden]; docs/models.md, "Mamba-2".
at::Tensor reference_mamba2(const ModelConfig& config, const ParameterByName& parameter,
                            const at::Tensor& x);

/// The same for softmax attention (config.attn).
at::Tensor reference_attention(const ModelConfig& config, const ParameterByName& parameter,
                               const at::Tensor& x);

/// softmax(q k^T / sqrt(D)) v over the keys that `visible` [Tq, Tk] (or [B, 1, Tq, Tk]) names;
/// q [B, H, Tq, D], k and v [B, Hkv, Tk, D].
at::Tensor reference_softmax(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const at::Tensor& visible);

/// Which of Tk keys the last Tq of them see: themselves and `window` - 1 before (0: all before).
at::Tensor reference_visible(int64_t queries, int64_t keys, int64_t window);

}  // namespace efla::testing_support
