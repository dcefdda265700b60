// The arms of the sequential-image study: one model whose recurrence differs in the step rule, the
// treatment of keys and values, and the decay.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "efla/flow/step_rule.h"

namespace efla {

/// Where the recurrence takes its log-decay from, if it has one.
enum class Decay {
  kNone,
  kForgetGate,  // Gated DeltaNet's: -exp(A_log) softplus(a(h) + dt_bias), apart from beta
  kStepSize,    // Mamba-2's: -exp(A_log) beta with beta = softplus(b(h) + bias)
};

struct Arm {
  const char* name;   // what users write
  const char* title;  // what tables and pictures say
  Rule rule;
  bool unit_keys;      // k / |k|
  bool divide_values;  // v / |k|
  Decay decay;
};

/// All arms, in the order of tables: the paper's two first, then the integrators between them, the
/// ablations, the gated arms.
std::span<const Arm> all_arms();

std::vector<std::string> arm_names();

/// Throws UsageError for an unknown name, with the nearest known one.
const Arm& arm_named(const std::string& name);

}  // namespace efla
