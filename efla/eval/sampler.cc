#include "efla/eval/sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "efla/io/error.h"
#include "efla/io/random.h"

namespace efla {
namespace {

// Spreads (seed, stream) over all bits, so that neighbouring seeds share nothing.
uint64_t mix(uint64_t x) { return SplitMix64(x).next(); }

// [0, 1) from the top 53 bits; std::uniform_real_distribution differs between standard libraries.
double uniform(std::mt19937_64& random) { return static_cast<double>(random() >> 11) * 0x1p-53; }

// The lowest score that is among the k highest.
double kth_highest(const std::vector<double>& scores, int64_t k) {
  std::vector<double> copy = scores;
  std::nth_element(copy.begin(), copy.begin() + (k - 1), copy.end(), std::greater<>());
  return copy[static_cast<size_t>(k - 1)];
}

// Most likely first, equals by token id: no two candidates are equivalent, so the order is the same
// whatever the algorithm.
bool before(const Candidate& a, const Candidate& b) {
  return a.probability != b.probability ? a.probability > b.probability : a.token < b.token;
}

// Keeps the likeliest candidates, in order, until their weights reach `enough` (at least one) and
// returns their sum. Sorts only as much of the front as that takes.
double keep_likeliest(std::vector<Candidate>& candidates, double enough) {
  double kept = 0;
  size_t count = 0, sorted = 0;
  while (count < candidates.size() && (count == 0 || kept < enough)) {
    if (count == sorted) {
      constexpr size_t kFirst = 64;
      const auto from = candidates.begin() + static_cast<std::ptrdiff_t>(sorted);
      sorted = std::min(candidates.size(), std::max(kFirst, 4 * sorted));
      const auto to = candidates.begin() + static_cast<std::ptrdiff_t>(sorted);
      if (to != candidates.end()) std::nth_element(from, to, candidates.end(), before);
      std::sort(from, to, before);
    }
    kept += candidates[count++].probability;
  }
  candidates.resize(count);
  return kept;
}

}  // namespace

void SamplingOptions::validate() const {
  const auto refuse = [](const char* name, double value, const char* range) {
    throw UsageError(fmt::format("{} is {} but must be {}", name, value, range));
  };
  if (!(temperature >= 0) || std::isinf(temperature)) {
    refuse("temperature", temperature, "0 (greedy) or a positive number");
  }
  if (top_k < 0) refuse("top_k", static_cast<double>(top_k), "0 (all tokens) or more");
  if (!(top_p > 0 && top_p <= 1)) refuse("top_p", top_p, "above 0 and at most 1");
  if (!(repetition_penalty > 0) || std::isinf(repetition_penalty)) {
    refuse("repetition_penalty", repetition_penalty, "a positive number (1 = none)");
  }
}

Sampler::Sampler(const SamplingOptions& options, uint64_t stream)
    : options_(options), random_(mix(mix(options.seed) ^ stream)) {
  options_.validate();
}

void Sampler::observe(int32_t token) {
  const auto index = static_cast<size_t>(token);
  if (index >= is_seen_.size()) is_seen_.resize(index + 1);
  if (is_seen_[index]) return;
  is_seen_[index] = true;
  seen_.push_back(token);
}

std::vector<double> Sampler::penalized(std::span<const float> logits) const {
  std::vector<double> scores(logits.begin(), logits.end());
  bool any_possible = false;
  for (const double score : scores) {
    if (std::isnan(score) || score == std::numeric_limits<double>::infinity()) {
      throw Error(
          "the model's logits are not finite, so no token can be drawn; its weights are bad");
    }
    any_possible |= std::isfinite(score);
  }
  if (!any_possible) throw Error("every logit of the model is -infinity, so no token can be drawn");
  for (const int32_t token : seen_) {
    double& score = scores.at(static_cast<size_t>(token));
    score = score < 0 ? score * options_.repetition_penalty : score / options_.repetition_penalty;
  }
  return scores;
}

std::vector<Candidate> Sampler::distribution(std::span<const float> logits) const {
  std::vector<Candidate> candidates = drawing_order(logits);
  std::sort(candidates.begin(), candidates.end(), before);
  return candidates;
}

std::vector<Candidate> Sampler::drawing_order(std::span<const float> logits) const {
  const std::vector<double> scores = penalized(logits);
  if (options_.temperature == 0) {
    const auto best = std::max_element(scores.begin(), scores.end());
    return {{static_cast<int32_t>(best - scores.begin()), 1.0}};
  }

  const double highest = *std::max_element(scores.begin(), scores.end());
  double lowest_kept = -std::numeric_limits<double>::max();
  if (options_.top_k > 0 && options_.top_k < static_cast<int64_t>(scores.size())) {
    lowest_kept = std::max(lowest_kept, kth_highest(scores, options_.top_k));
  }
  std::vector<Candidate> candidates;
  candidates.reserve(options_.top_k > 0 ? 0 : scores.size());
  double total = 0;
  for (size_t i = 0; i < scores.size(); ++i) {
    if (scores[i] < lowest_kept) continue;
    const double weight = std::exp((scores[i] - highest) / options_.temperature);
    candidates.push_back({static_cast<int32_t>(i), weight});
    total += weight;
  }
  if (options_.top_p < 1) {
    total = keep_likeliest(candidates, options_.top_p * total);
  } else if (options_.top_k > 0) {
    std::sort(candidates.begin(), candidates.end(), before);
  }
  for (Candidate& candidate : candidates) candidate.probability /= total;
  return candidates;
}

int32_t Sampler::sample(std::span<const float> logits) {
  const std::vector<Candidate> candidates = drawing_order(logits);
  // Greedy draws no number, so that a text's draws do not depend on how its start was made.
  int32_t token = candidates.front().token;
  if (candidates.size() > 1) {
    double remaining = uniform(random_);
    for (const Candidate& candidate : candidates) {
      if (candidate.probability > 0) token = candidate.token;
      remaining -= candidate.probability;
      if (remaining < 0) break;
    }
  }
  observe(token);
  return token;
}

}  // namespace efla
