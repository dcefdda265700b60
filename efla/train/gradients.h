// The gradients of one update taken together: global norm, clipping, the search for NaN.
#pragma once

#include <optional>
#include <string>

#include "efla/train/optimizer.h"

namespace efla {

/// Scales all gradients by min(1, max_norm / norm) and returns the norm before: the square root of
/// the sum of all squared entries. max_norm 0 leaves them alone. Gradients are untouched when the
/// norm is not finite.
double clip_gradients(const NamedTensors& parameters, double max_norm);

/// Where a NaN or infinity was met first: "weight NAME" if a parameter holds one; otherwise
/// "gradient of NAME", in the order of the backward pass (output side first); nothing if all is
/// finite.
std::optional<std::string> first_non_finite(const NamedTensors& parameters);

}  // namespace efla
