#include "efla/eval/task_metrics.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "efla/eval/python_random.h"
#include "efla/eval/python_text.h"
#include "efla/io/error.h"

namespace efla {
namespace {

constexpr double kLn2 = 0.69314718055994530942;

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

// Sample standard deviation; 0 for fewer than two values.
double deviation(const std::vector<double>& values) {
  if (values.size() < 2) return 0;
  const double average = mean(values);
  double sum = 0;
  for (const double value : values) sum += (value - average) * (value - average);
  return std::sqrt(sum / static_cast<double>(values.size() - 1));
}

// numpy's argmax: the first of the largest.
int64_t best(const std::vector<double>& log_likelihoods,
             const std::function<double(size_t)>& length) {
  size_t found = 0;
  for (size_t i = 1; i < log_likelihoods.size(); ++i) {
    if (log_likelihoods[i] / length(i) > log_likelihoods[found] / length(found)) found = i;
  }
  return static_cast<int64_t>(found);
}

std::vector<SampleScore> score_choices(const TaskSpec& spec, const EvalSample& sample,
                                       const SampleOutcome& outcome) {
  const auto accuracy = [&](const std::function<double(size_t)>& length) {
    return best(outcome.log_likelihoods, length) == sample.gold ? 1.0 : 0.0;
  };
  std::vector<SampleScore> scores = {{"acc", accuracy([](size_t) { return 1.0; })}};
  if (!spec.normalized) return scores;
  scores.push_back({"acc_norm", accuracy([&](size_t i) {
                      return static_cast<double>(count_characters(sample.choices[i]));
                    })});
  scores.push_back({"acc_bytes", accuracy([&](size_t i) {
                      return static_cast<double>(sample.choices[i].size());
                    })});
  return scores;
}

// exp(-sum ll / sum n) and the like, where each document is one observation.
struct Ratio {
  double value = 0;  // sum of nll / sum of units
  std::optional<double> error;
};

Ratio ratio(const std::vector<double>& nll, const std::vector<double>& units) {
  double nll_sum = 0, unit_sum = 0;
  for (size_t i = 0; i < nll.size(); ++i) {
    nll_sum += nll[i];
    unit_sum += units[i];
  }
  Ratio result{nll_sum / unit_sum, std::nullopt};
  const auto n = static_cast<double>(nll.size());
  if (nll.size() < 2) return result;
  double squares = 0;
  for (size_t i = 0; i < nll.size(); ++i) {
    const double residual = nll[i] - result.value * units[i];
    squares += residual * residual;
  }
  result.error = std::sqrt(squares * n / (n - 1)) / unit_sum;
  return result;
}

void add_rolling(std::vector<Metric>& metrics, const std::string& suffix,
                 const std::vector<double>& nll, const std::vector<EvalSample>& samples) {
  std::vector<double> words, bytes;
  for (const EvalSample& sample : samples) {
    words.push_back(static_cast<double>(sample.words));
    bytes.push_back(static_cast<double>(sample.bytes));
  }
  const Ratio per_word = ratio(nll, words), per_byte = ratio(nll, bytes);
  const auto exponential = [](const Ratio& r) {
    Ratio result{std::exp(r.value), r.error};
    if (result.error) *result.error *= result.value;  // to first order
    return result;
  };
  const auto add = [&](const std::string& name, const Ratio& r) {
    metrics.push_back({name + suffix, r.value, r.error, false});
  };
  add("word_perplexity", exponential(per_word));
  add("byte_perplexity", exponential(per_byte));
  add("bits_per_byte", {per_byte.value / kLn2,
                        per_byte.error ? std::optional(*per_byte.error / kLn2) : std::nullopt});
}

std::vector<Metric> rolling_metrics(const std::vector<EvalSample>& samples,
                                    const std::vector<SampleOutcome>& outcomes) {
  std::vector<Metric> metrics;
  std::vector<double> windows, stateful;
  for (const SampleOutcome& outcome : outcomes) {
    windows.push_back(-outcome.log_likelihoods[0]);
    stateful.push_back(-outcome.log_likelihoods[1]);
  }
  add_rolling(metrics, "", windows, samples);
  add_rolling(metrics, "_stateful", stateful, samples);
  return metrics;
}

Metric aggregate(const std::string& name, const std::vector<double>& values) {
  Metric metric{name, mean(values), std::nullopt, false};
  if (values.size() > 1) {
    metric.error = deviation(values) / std::sqrt(static_cast<double>(values.size()));
  }
  if (name == "perplexity") {
    metric.value = std::exp(-metric.value);
    if (values.size() > 1) metric.error = bootstrap_perplexity_error(values);
  }
  return metric;
}

}  // namespace

std::vector<SampleScore> score_sample(const TaskSpec& spec, const EvalSample& sample,
                                      const SampleOutcome& outcome) {
  switch (spec.kind) {
    case TaskKind::kMultipleChoice:
      return score_choices(spec, sample, outcome);
    case TaskKind::kLastWord:
      return {{"perplexity", outcome.log_likelihoods[0]}, {"acc", outcome.greedy[0] ? 1.0 : 0.0}};
    case TaskKind::kRetrieval: {
      const bool exact = outcome.greedy[static_cast<size_t>(sample.gold)];
      const bool chosen = best(outcome.log_likelihoods, [](size_t) { return 1.0; }) == sample.gold;
      return {{"exact", exact ? 1.0 : 0.0}, {"acc", chosen ? 1.0 : 0.0}};
    }
    case TaskKind::kRolling:
      return {{"log_likelihood", outcome.log_likelihoods[0]},
              {"log_likelihood_stateful", outcome.log_likelihoods[1]}};
  }
  return {};
}

std::vector<Metric> task_metrics(const TaskSpec& spec, const std::vector<EvalSample>& samples,
                                 const std::vector<SampleOutcome>& outcomes) {
  if (samples.empty()) throw Error("there are no samples to take a mean of");
  std::vector<Metric> metrics;
  if (spec.kind == TaskKind::kRolling) {
    metrics = rolling_metrics(samples, outcomes);
  } else {
    std::vector<std::string> names;
    std::vector<std::vector<double>> values;
    for (size_t i = 0; i < samples.size(); ++i) {
      const std::vector<SampleScore> scores = score_sample(spec, samples[i], outcomes[i]);
      values.resize(scores.size());
      names.resize(scores.size());
      for (size_t j = 0; j < scores.size(); ++j) {
        names[j] = scores[j].metric;
        values[j].push_back(scores[j].value);
      }
    }
    for (size_t j = 0; j < names.size(); ++j) metrics.push_back(aggregate(names[j], values[j]));
  }
  for (Metric& metric : metrics) metric.headline = metric.name == spec.headline;
  return metrics;
}

double bootstrap_perplexity_error(const std::vector<double>& values, int64_t replicates) {
  constexpr int64_t kChunk = 1000;  // replicates of one generator; its seed is the chunk's number
  const auto size = static_cast<int64_t>(values.size());
  const int64_t chunk = std::min(kChunk, replicates);
  const int64_t chunks = replicates / chunk;
  std::vector<double> drawn(static_cast<size_t>(chunks * chunk));
  at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      PythonRandom random(static_cast<uint64_t>(c));
      for (int64_t r = 0; r < chunk; ++r) {
        double sum = 0;
        for (int64_t i = 0; i < size; ++i) sum += values[static_cast<size_t>(random.choice(size))];
        drawn[static_cast<size_t>(c * chunk + r)] = std::exp(-sum / static_cast<double>(size));
      }
    }
  });
  return deviation(drawn);
}

}  // namespace efla
