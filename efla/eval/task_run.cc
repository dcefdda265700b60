#include "efla/eval/task_run.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <chrono>
#include <cmath>
#include <exception>

#include "efla/eval/loglikelihood.h"
#include "efla/eval/sample_log.h"
#include "efla/io/error.h"
#include "efla/io/log.h"

namespace efla {
namespace {

// The samples of one run: their prompts, and what is known of them.
struct Work {
  std::vector<std::string> prefixes;
  std::vector<Prompt> prompts;
  std::vector<SampleOutcome> outcomes;
  std::vector<size_t> open;  // indices of samples that are still to be scored
};

SampleOutcome outcome_of(const TaskSpec& spec, const Prompt& prompt,
                         const GroupLikelihoods& likelihoods) {
  SampleOutcome outcome;
  if (spec.kind == TaskKind::kRolling) {
    double windows = prompt.extra_log, whole = prompt.extra_log;
    const size_t count = likelihoods.size();
    for (size_t i = 0; i < count - (count > 1 ? 1 : 0); ++i) windows += likelihoods[i].log;
    if (count > 0) whole += likelihoods.back().log;
    outcome.log_likelihoods = {windows, whole};
    return outcome;
  }
  for (const Likelihood& likelihood : likelihoods) {
    outcome.log_likelihoods.push_back(likelihood.log);
    outcome.greedy.push_back(likelihood.greedy);
  }
  return outcome;
}

Work prepare(const EvalTask& task, size_t count, const Tokenizer& tokenizer, int64_t vocab_size,
             const TaskRunOptions& options, TaskResult& result) {
  Work work;
  work.prefixes = few_shot_prefixes(task, count, options.prompt);
  work.outcomes.resize(count);
  std::string first_truncated;
  for (size_t i = 0; i < count; ++i) {
    work.prompts.push_back(make_prompt(task.spec, task.samples[i], work.prefixes[i], tokenizer,
                                       vocab_size, options.prompt));
    if (work.prompts[i].truncated == 0) continue;
    if (result.truncated++ == 0) first_truncated = task.samples[i].origin;
  }
  if (result.truncated > 0) {
    log_warning(fmt::format(
        "{}: {} of {} contexts are longer than the {} tokens that are read at once and lose their "
        "beginning (the first: {}); raise --window to keep them whole",
        task.spec.name, result.truncated, count, options.prompt.max_length, first_truncated));
  }
  return work;
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Runs `task`; what goes wrong becomes part of the result.
template <typename Run>
TaskResult attempt(const std::string& name, const Run& run) {
  TaskResult result;
  result.task = name;
  try {
    return run();
  } catch (const UsageError&) {
    throw;  // the options are at fault, not the task
  } catch (const c10::Error& error) {
    result.message = error.what_without_backtrace();
  } catch (const std::exception& error) {
    result.message = error.what();
  }
  result.status = TaskStatus::kFailed;
  result.message = result.message.substr(0, result.message.find('\n'));
  return result;
}

}  // namespace

TaskResult run_task(LanguageModel model, const Tokenizer& tokenizer, const EvalTask& task,
                    const TaskRunOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  const TaskSpec& spec = task.spec;
  TaskResult result;
  result.task = spec.name;
  result.path = task.path;
  const size_t count = options.limit > 0
                           ? std::min(static_cast<size_t>(options.limit), task.samples.size())
                           : task.samples.size();
  result.samples = static_cast<int64_t>(count);
  result.shots = spec.kind == TaskKind::kRolling ? 0 : options.prompt.shots;
  Work work = prepare(task, count, tokenizer, model->config().vocab_size, options, result);

  std::optional<SampleLog> log;
  if (!options.output.empty()) log.emplace(options.output / ("samples_" + spec.name + ".jsonl"));
  std::vector<RequestGroup> groups;
  for (size_t i = 0; i < count; ++i) {
    const auto known = log ? log->find(static_cast<int64_t>(i), prompt_fingerprint(work.prompts[i]))
                           : std::nullopt;
    if (known) {
      work.outcomes[i] = *known;
      ++result.resumed;
    } else {
      work.open.push_back(i);
      groups.push_back(work.prompts[i].requests);
    }
  }

  LikelihoodOptions scoring;
  scoring.batch_tokens = options.batch_tokens;
  scoring.share_contexts = options.share_contexts;
  scoring.on_group = [&](size_t group, const GroupLikelihoods& scores) {
    const size_t i = work.open[group];
    work.outcomes[i] = outcome_of(spec, work.prompts[i], scores);
    if (log) {
      log->write(spec, static_cast<int64_t>(i), task.samples[i], work.prefixes[i], work.prompts[i],
                 work.outcomes[i]);
    }
  };
  if (options.progress) {
    scoring.progress = [&](const LikelihoodProgress& progress) {
      options.progress(spec.name, progress);
    };
  }
  LikelihoodCost cost;
  likelihoods(model, groups, scoring, &cost);
  result.tokens_read = cost.tokens_read;
  result.tokens_requested = cost.tokens_requested;
  if (log) log->finish(result.samples);
  result.metrics = task_metrics(
      spec, {task.samples.begin(), task.samples.begin() + static_cast<ptrdiff_t>(count)},
      work.outcomes);
  result.seconds = seconds_since(begin);
  return result;
}

TaskResult try_task(LanguageModel model, const Tokenizer& tokenizer, const std::string& name,
                    const std::vector<std::string>& folders, const TaskRunOptions& options) {
  const TaskSpec& spec = task_spec(name);
  return attempt(name, [&] {
    const std::optional<EvalTask> task = load_task(spec, folders, options.prompt.shots > 0);
    if (task) return run_task(model, tokenizer, *task, options);
    TaskResult result;
    result.task = name;
    result.status = TaskStatus::kAbsent;
    result.message = fmt::format("{}: none of {} is there", fmt::join(folders, ", "),
                                 fmt::join(spec.files, ", "));
    return result;
  });
}

TaskResult try_passkey(LanguageModel model, const Tokenizer& tokenizer,
                       const PasskeyOptions& passkey, const TaskRunOptions& options) {
  return attempt(passkey_name(passkey), [&] {
    const EvalTask task = passkey_task(passkey, tokenizer);
    TaskRunOptions zero_shot = options;
    zero_shot.prompt.shots = 0;
    zero_shot.limit = 0;
    return run_task(model, tokenizer, task, zero_shot);
  });
}

std::string markdown_table(const std::vector<TaskResult>& results) {
  std::string table =
      "| task | samples | shots | metric | value | stderr |\n|---|---:|---:|---|---:|---:|\n";
  for (const TaskResult& result : results) {
    if (result.status != TaskStatus::kDone) {
      const char* status = result.status == TaskStatus::kAbsent ? "absent" : "failed";
      table += fmt::format("| {} | | | {} | | |\n", result.task, status);
      continue;
    }
    for (const Metric& metric : result.metrics) {
      const std::string error = metric.error ? fmt::format("{:.4f}", *metric.error) : "";
      const std::string name = metric.headline ? "**" + metric.name + "**" : metric.name;
      table += fmt::format("| {} | {} | {} | {} | {:.4f} | {} |\n", result.task, result.samples,
                           result.shots, name, metric.value, error);
    }
  }
  return table;
}

nlohmann::ordered_json to_json(const TaskResult& result) {
  nlohmann::ordered_json object = {{"task", result.task}};
  if (result.status != TaskStatus::kDone) {
    object["status"] = result.status == TaskStatus::kAbsent ? "absent" : "failed";
    object["message"] = result.message;
    return object;
  }
  object["status"] = "done";
  for (const Metric& metric : result.metrics) {
    object[metric.name] = metric.value;
    object[metric.name + "_stderr"] =
        metric.error ? nlohmann::ordered_json(*metric.error) : nlohmann::ordered_json(nullptr);
  }
  object["samples"] = result.samples;
  object["shots"] = result.shots;
  object["truncated"] = result.truncated;
  object["resumed"] = result.resumed;
  object["tokens_read"] = result.tokens_read;
  object["tokens_requested"] = result.tokens_requested;
  object["seconds"] = result.seconds;
  object["path"] = result.path;
  return object;
}

}  // namespace efla
