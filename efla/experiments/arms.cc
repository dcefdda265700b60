#include "efla/experiments/arms.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "efla/io/error.h"
#include "efla/train/nearest_name.h"

namespace efla {
namespace {

constexpr Arm kArms[] = {
    {"efla", "EFLA", Rule::kExact, false, false, Decay::kNone},
    {"deltanet", "DeltaNet", Rule::kEuler, true, false, Decay::kNone},
    {"rk2", "RK-2", Rule::kRk2, false, false, Decay::kNone},
    {"rk4", "RK-4", Rule::kRk4, false, false, Decay::kNone},
    {"euler_raw", "Euler, raw keys", Rule::kEuler, false, false, Decay::kNone},
    {"deltanet_scaled", "DeltaNet, scaled values", Rule::kEuler, true, true, Decay::kNone},
    {"efla_unit", "EFLA, unit keys", Rule::kExact, true, false, Decay::kNone},
    {"gated_efla", "Gated EFLA", Rule::kExact, false, false, Decay::kForgetGate},
    {"gated_deltanet", "Gated DeltaNet", Rule::kEuler, true, false, Decay::kForgetGate},
    {"mamba2", "Mamba-2", Rule::kLinear, false, false, Decay::kStepSize},
};

}  // namespace

std::span<const Arm> all_arms() { return kArms; }

std::vector<std::string> arm_names() {
  std::vector<std::string> names;
  for (const Arm& arm : kArms) names.emplace_back(arm.name);
  return names;
}

const Arm& arm_named(const std::string& name) {
  for (const Arm& arm : kArms) {
    if (name == arm.name) return arm;
  }
  throw UsageError(fmt::format("'{}' is no arm ({}); did you mean '{}'?", name,
                               fmt::join(arm_names(), ", "), nearest_name(name, arm_names())));
}

}  // namespace efla
