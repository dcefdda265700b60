// The decay that Gated DeltaNet and Mamba-2 share: dt = softplus(z + dt_bias), log a = -exp(A_log)
// dt, one A_log and dt_bias per value head (docs/mathematics.md, "The layer").
#pragma once

#include <ATen/core/Tensor.h>

namespace efla {

/// dt > 0 in float32 (float64 for float64 z): z [B, T, HV], dt_bias [HV].
at::Tensor positive_step(const at::Tensor& z, const at::Tensor& dt_bias);

/// -exp(A_log) * dt <= 0: a_log [HV], dt [B, T, HV].
at::Tensor log_decay_of(const at::Tensor& a_log, const at::Tensor& dt);

/// A ~ U(low, high); in place, from torch's global generator.
void initialize_a_log(at::Tensor& a_log, double low, double high);

/// dt log-uniform in [low, high] and at least `floor`, where z = 0; in place.
void initialize_dt_bias(at::Tensor& dt_bias, double low, double high, double floor);

}  // namespace efla
