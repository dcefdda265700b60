// The integrator study: Euler, RK-2, RK-4 and the exact step beside a fine integration of the same
// differential equation, in double precision.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "efla/flow/step_rule.h"

namespace efla {

/// What the study varies and holds; every number is per head.
struct FlowStudyOptions {
  int64_t dim = 32;       // K = V
  int64_t tokens = 64;    // of the sequences of "error" and "norm"
  int64_t pairs = 8;      // stored in "recall"
  int64_t noise = 16;     // tokens of noise after them
  int64_t sequences = 9;  // drawn per point; the median is reported
  uint64_t seed = 1;
};

/// One number of the study.
struct FlowPoint {
  std::string part;    // "error", "norm", "recall"
  std::string method;  // "Euler", "RK-2", "RK-4", "exact", and "fine" where it is not the measure
  double x = 0;        // x = beta |k|^2, the token, or the keys' x of the noise
  double value = 0;    // median over the sequences; not finite where the method diverged
};

/// Runs the three parts, all with random key directions, normal values and beta = 1:
///   error   |S - S_fine| / |S_fine| after `tokens` tokens of beta |k|^2 = x, x from 0.01 to 100
///   norm    |S_t| after each token t of a stiff sequence: x alternates between 0.25 and 5
///   recall  mean of |S^T k - v|^2 / |v|^2 over `pairs` stored pairs of x = 1, after `noise` tokens
///   of
///           other pairs whose keys have x from 0.01 to 100
std::vector<FlowPoint> run_flow_study(const FlowStudyOptions& options);

/// A sequence of keys and values in `dim` dimensions; beta = 1, so that x = |k|^2.
struct FlowSequence {
  int64_t dim = 0;
  std::vector<double> keys, values;  // [tokens, dim]

  int64_t tokens() const { return static_cast<int64_t>(keys.size()) / dim; }
};

/// One token of dS/ds = k (v - S^T k)^T over time 1, finely integrated; `state` [dim, dim]
/// row-major, keys as rows, is replaced.
void integrate_token(std::vector<double>& state, const FlowSequence& sequence, int64_t token);

/// The same token by one step of `rule`.
void step_token(std::vector<double>& state, const FlowSequence& sequence, int64_t token, Rule rule);

/// Writes flow.csv (columns part,method,x,value), flow.gp and flow.png into `folder`; returns
/// whether the picture was drawn.
bool write_flow_study(const std::filesystem::path& folder, const std::vector<FlowPoint>& points);

/// The figures at a few points, one line per method.
std::string flow_table(const std::vector<FlowPoint>& points);

}  // namespace efla
