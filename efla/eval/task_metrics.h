// From log-likelihoods to the numbers in a table, with the errors that lm-evaluation-harness gives.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "efla/eval/tasks.h"

namespace efla {

/// What the model said to one sample.
struct SampleOutcome {
  // One for each request; kRolling: of the windows, and with the state carried through the text.
  std::vector<double> log_likelihoods;
  std::vector<bool> greedy;  // one for each request; not for kRolling
};

/// The metrics of one sample: 0 or 1 for the accuracies, a log-likelihood for the perplexities.
struct SampleScore {
  std::string metric;
  double value = 0;
};
std::vector<SampleScore> score_sample(const TaskSpec& spec, const EvalSample& sample,
                                      const SampleOutcome& outcome);

struct Metric {
  std::string name;
  double value = 0;
  std::optional<double> error;  // standard error; none for a single sample
  bool headline = false;        // the one that papers report
};

/// The metrics over all samples. Errors: of a mean, the sample standard deviation / sqrt(n); of
/// lambada's perplexity, the standard deviation of 100,000 bootstrap replicates drawn as
/// lm-evaluation-harness draws them; of the rolling perplexities, for which it gives none, that of
/// a ratio of sums over documents (docs/evaluation.md, "Standard errors").
std::vector<Metric> task_metrics(const TaskSpec& spec, const std::vector<EvalSample>& samples,
                                 const std::vector<SampleOutcome>& outcomes);

/// Standard deviation of exp(-mean) over bootstrap replicates of `values`.
double bootstrap_perplexity_error(const std::vector<double>& values, int64_t replicates = 100'000);

}  // namespace efla
