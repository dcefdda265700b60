#include "efla/eval/sample_log.h"

#include <limits>
#include <nlohmann/json.hpp>

#include "efla/io/atomic_file.h"
#include "efla/io/checksum.h"

namespace efla {

std::string prompt_fingerprint(const Prompt& prompt) {
  std::string bytes;
  const auto add = [&bytes](const std::vector<int32_t>& tokens) {
    const int64_t count = static_cast<int64_t>(tokens.size());
    bytes.append(reinterpret_cast<const char*>(&count), sizeof(count));
    bytes.append(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(int32_t));
  };
  for (const LikelihoodRequest& request : prompt.requests) {
    add(request.context);
    add(request.continuation);
  }
  return fnv1a_hex(bytes);
}

SampleLog::SampleLog(const std::filesystem::path& path) : path_(path) {
  // Without a step in them no line is dropped, but for one that a killed process left half-written.
  log_ = std::make_unique<MetricsLog>(path, std::numeric_limits<int64_t>::max());
  for (nlohmann::json& line : read_metrics(path)) {
    const auto index = line.find("index");
    if (index == line.end() || !index->is_number_integer()) continue;
    const auto number = index->get<int64_t>();
    lines_[number] = std::move(line);
  }
}

std::optional<SampleOutcome> SampleLog::find(int64_t index, const std::string& fingerprint) const {
  const auto found = lines_.find(index);
  if (found == lines_.end()) return std::nullopt;
  try {
    const nlohmann::json& line = found->second;
    if (line.at("fingerprint") != fingerprint) return std::nullopt;
    return SampleOutcome{line.at("log_likelihoods").get<std::vector<double>>(),
                         line.at("greedy").get<std::vector<bool>>()};
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;  // not a line of ours: evaluate again
  }
}

void SampleLog::write(const TaskSpec& spec, int64_t index, const EvalSample& sample,
                      const std::string& prefix, const Prompt& prompt,
                      const SampleOutcome& outcome) {
  nlohmann::json line = {{"task", spec.name},
                         {"index", index},
                         {"origin", sample.origin},
                         {"fingerprint", prompt_fingerprint(prompt)},
                         {"log_likelihoods", outcome.log_likelihoods},
                         {"greedy", outcome.greedy},
                         {"truncated", prompt.truncated}};
  if (spec.kind == TaskKind::kRolling) {
    line["words"] = sample.words;
    line["bytes"] = sample.bytes;
  } else {
    std::vector<std::string> contexts;
    contexts.reserve(sample.contexts.size());
    for (const std::string& context : sample.contexts) contexts.push_back(prefix + context);
    line["contexts"] = contexts;
    line["continuations"] = sample.continuations;
    line["gold"] = sample.gold;
  }
  for (const SampleScore& score : score_sample(spec, sample, outcome)) {
    line[score.metric] = score.value;
  }
  log_->write(line);
  lines_[index] = std::move(line);
}

void SampleLog::finish(int64_t count) {
  std::string text;
  for (int64_t i = 0; i < count; ++i) {
    const auto found = lines_.find(i);
    if (found == lines_.end()) continue;
    text += found->second.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  }
  write_file_atomically(path_, text);
}

}  // namespace efla
