#include "efla/train/trainer.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>

#include "efla/io/dataset.h"
#include "efla/io/error.h"
#include "efla/io/progress.h"
#include "efla/io/tokenizer.h"
#include "efla/train/checkpoint.h"
#include "efla/train/gradients.h"
#include "efla/train/held_out.h"
#include "efla/train/optimizer.h"
#include "efla/train/run_folder.h"
#include "efla/train/run_log.h"
#include "efla/train/schedule.h"
#include "efla/train/setup.h"
#include "efla/train/stop_signal.h"

namespace efla {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

NamedTensors named_parameters(const LanguageModel& model) {
  NamedTensors parameters;
  for (const auto& item : model->named_parameters()) {
    parameters.emplace_back(item.key(), item.value());
  }
  return parameters;
}

class Trainer {
 public:
  Trainer(Recipe recipe, const TrainOptions& options);
  TrainResult run();

 private:
  void restore();
  void announce() const;
  bool out_of_time() const;
  StepReport update(int64_t step);
  void count_skip(const StepReport& report);
  std::string status() const;
  void show(const StepReport& report);
  void evaluate_if_due(bool last);
  void loop();
  void save();
  std::string rescue();
  std::string how_to_go_on() const;
  [[noreturn]] void fail(const std::string& sentence);
  void stop_if_asked();
  void stop_if_bad();
  TrainResult finish();
  void warn(const std::string& sentence) const;

  Recipe recipe_;
  const TrainOptions& options_;
  TrainingSetup setup_;  // tokenizer, data; checked before anything is written
  RunFolder folder_;
  LanguageModel model_;
  AdamW optimizer_;
  Schedule schedule_;
  CheckpointStore store_;
  TrainerState state_;
  std::unique_ptr<RunLog> log_;
  std::unique_ptr<Progress> progress_;
  std::string newest_checkpoint_, first_bad_tensor_;
  int64_t saved_step_ = 0;  // of newest_checkpoint_
  bool updating_ = false;   // the weights are of no step
  double rate_ = 0;         // tokens per second, smoothed
};

// As a shell reads it back.
std::string quoted(const std::string& word) {
  const bool plain = std::all_of(word.begin(), word.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || std::strchr("_-./=,:+@%", c) != nullptr;
  });
  if (plain && !word.empty()) return word;
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

LanguageModel new_model(const Recipe& recipe) {
  torch::manual_seed(static_cast<uint64_t>(recipe.train.seed));
  return LanguageModel(recipe.model, recipe.train.dtype == "float64" ? at::kDouble : at::kFloat);
}

Trainer::Trainer(Recipe recipe, const TrainOptions& options)
    : recipe_(std::move(recipe)),
      options_(options),
      setup_(recipe_),  // completes recipe_.model
      folder_(recipe_),
      model_(new_model(recipe_)),
      optimizer_(named_parameters(model_), recipe_.optimizer),
      schedule_(recipe_.schedule, recipe_.optimizer.learning_rate, recipe_.total_steps()),
      store_(folder_.path(), [this](const std::string& sentence) { warn(sentence); }) {}

void Trainer::warn(const std::string& sentence) const {
  const std::string line = "efla: warning: " + sentence;
  if (progress_) {
    progress_->message(line);
  } else {
    fmt::print(stderr, "{}\n", line);
  }
}

// Brings back the newest checkpoint, if this folder has one, and opens the log at its step.
void Trainer::restore() {
  std::optional<Checkpoint> checkpoint;
  if (folder_.resuming()) {
    store_.recover();
    checkpoint = store_.newest_good();
  }
  state_.recipe_hash = recipe_hash(recipe_);
  state_.data = setup_.train_data->describe().dump();
  if (checkpoint) {
    const TrainerState& saved = checkpoint->state;
    if (saved.recipe_hash != state_.recipe_hash) {
      throw UsageError(fmt::format(
          "{}: written by a run with another recipe; start over with --fresh", checkpoint->folder));
    }
    if (saved.data != state_.data) {
      throw UsageError(
          fmt::format("{}: the shards in {} have changed since this run began; bring the old ones "
                      "back, or start over with --fresh",
                      folder_.path(), recipe_.data.train));
    }
    if (saved.threads != at::get_num_threads()) {
      warn(
          fmt::format("this run began on {} threads and goes on with {}: losses may differ in the "
                      "last bits from those of an uninterrupted run",
                      saved.threads, at::get_num_threads()));
    }
    load_checkpoint(checkpoint->folder, model_, optimizer_);
    state_ = saved;
    setup_.train_data->seek(state_.position);
    newest_checkpoint_ = checkpoint->folder;
    saved_step_ = state_.step;
  }
  state_.threads = at::get_num_threads();
  log_ = std::make_unique<RunLog>(folder_.metrics_path(),
                                  checkpoint ? std::optional<int64_t>(state_.step) : std::nullopt);
}

void Trainer::announce() const {
  const ParameterCount count = recipe_.model.parameter_count();
  const TokenDataset& data = *setup_.train_data;
  const int64_t steps = recipe_.total_steps();
  const int64_t tokens = steps * recipe_.tokens_per_step();
  fmt::print(stderr, "model   {} parameters ({} embedding, {} head, {} other), rule {}\n",
             count.total(), count.embedding, count.output_head, count.other,
             to_string(recipe_.model.rule));
  fmt::print(stderr, "data    {} tokens in {} documents from {}; held out: {}\n",
             data.token_count(), data.document_count(), recipe_.data.train,
             setup_.valid_data ? fmt::format("{} tokens", setup_.valid_data->token_count())
                               : std::string("none"));
  fmt::print(stderr, "run     {} steps of {} tokens, {:.2f} epochs, {} threads, in {}\n", steps,
             recipe_.tokens_per_step(),
             static_cast<double>(tokens) / static_cast<double>(data.token_count()), state_.threads,
             folder_.path());
  if (!newest_checkpoint_.empty()) {
    fmt::print(stderr, "resumed from {}\n", newest_checkpoint_);
  }
}

bool Trainer::out_of_time() const {
  return recipe_.train.time_limit > 0 && state_.seconds >= recipe_.train.time_limit;
}

// One update: the mean loss over all target tokens of all micro-batches, its gradient, clipping,
// AdamW. The sum over micro-batches equals one large batch because each is divided by the common
// number of targets. The state moves on last, so that an error on the way leaves it at the step
// before.
StepReport Trainer::update(int64_t step) {
  const Clock::time_point begin = Clock::now();
  StepReport report;
  report.step = step;
  report.learning_rate = schedule_.learning_rate(step);
  report.tokens = recipe_.tokens_per_step();
  const int64_t targets =
      setup_.train_data->count_targets(recipe_.train.grad_accumulation * recipe_.data.batch);
  const double divisor = static_cast<double>(std::max<int64_t>(targets, 1));
  optimizer_.zero_grad();
  for (int64_t i = 0; i < recipe_.train.grad_accumulation; ++i) {
    const Batch batch = setup_.train_data->next_batch(recipe_.data.batch);
    const LossSum loss = model_->loss(batch.input_ids, batch.targets, batch.cu_seqlens);
    (loss.nll / divisor).backward();
    report.loss += loss.nll.item<double>() / divisor;
  }
  if (options_.on_gradients) options_.on_gradients(step, model_);
  report.gradient_norm = clip_gradients(optimizer_.parameters(), recipe_.train.clip);
  report.skipped = !std::isfinite(report.loss) || !std::isfinite(report.gradient_norm);
  if (report.skipped) {
    count_skip(report);
  } else {
    updating_ = true;
    optimizer_.step(report.learning_rate);
    updating_ = false;
    state_.bad_in_a_row = 0;
  }
  state_.step = step;
  state_.position = setup_.train_data->position();
  state_.tokens_seen += targets;
  report.seconds = seconds_since(begin);
  state_.seconds += report.seconds;
  return report;
}

void Trainer::count_skip(const StepReport& report) {
  if (state_.bad_in_a_row++ == 0 || first_bad_tensor_.empty()) {
    first_bad_tensor_ = first_non_finite(optimizer_.parameters()).value_or("the loss itself");
  }
  ++state_.skipped_steps;
  warn(fmt::format("step {}: loss {}, gradient norm {} (first bad tensor: {}); update skipped",
                   report.step, report.loss, report.gradient_norm, first_bad_tensor_));
}

// "loss 3.2101, held out 3.4000, 12.3k tokens/s"
std::string Trainer::status() const {
  std::string text;
  const auto add = [&text](const std::string& part) { text += (text.empty() ? "" : ", ") + part; };
  if (!log_->train_losses().empty()) {
    add(fmt::format("loss {:.4f}", log_->train_losses().back().second));
  }
  if (!log_->held_out().empty()) {
    add(fmt::format("held out {:.4f}", log_->held_out().back().loss));
  }
  if (state_.skipped_steps > 0) add(fmt::format("{} skipped", state_.skipped_steps));
  if (rate_ > 0) add(format_count(rate_) + " tokens/s");
  return text;
}

void Trainer::show(const StepReport& report) {
  const double rate = static_cast<double>(report.tokens) / report.seconds;
  rate_ = rate_ == 0 ? rate : 0.9 * rate_ + 0.1 * rate;
  progress_->update(report.step, status());
}

// Held-out loss before the first update, every eval_interval updates and after the last; not again
// when the log has it from before an interruption.
void Trainer::evaluate_if_due(bool last) {
  if (!setup_.valid_data) return;
  const int64_t interval = recipe_.train.eval_interval;
  const bool due = last || state_.step == 0 || (interval > 0 && state_.step % interval == 0);
  const auto& done = log_->held_out();
  if (!due || (!done.empty() && done.back().step == state_.step)) return;
  progress_->update(state_.step, "computing the held-out loss");
  const std::optional<HeldOutLoss> loss =
      held_out_loss(model_, *setup_.valid_data, *setup_.tokenizer, recipe_.data.batch,
                    recipe_.train.eval_tokens, [] { return StopSignal::received() != nullptr; });
  if (!loss) return;
  log_->valid(state_.step, *loss);
  progress_->message(
      fmt::format("step {}: held-out loss {:.4f} nats per token, {:.4f} bits per byte ({})",
                  state_.step, loss->per_token(), loss->bits_per_byte(), loss->convention()));
  progress_->update(state_.step, status());
}

void Trainer::save() {
  log_->sync();  // a resumed run does not write the lines of saved steps again
  newest_checkpoint_ =
      store_.save(state_, model_, optimizer_, setup_.tokenizer->model_bytes(), recipe_.train.keep);
  saved_step_ = state_.step;
}

std::string Trainer::how_to_go_on() const {
  if (!options_.fresh) return "the same command goes on from there";
  const std::string out = quoted("train.out=" + folder_.path());
  if (options_.command.empty()) return out + " without --fresh goes on from there";
  std::string command;
  for (const std::string& word : options_.command) command += quoted(word) + " ";
  return fmt::format("`{}{}` goes on from there", command, out);
}

// Saves what an error would lose; returns what to add to its sentence.
std::string Trainer::rescue() {
  if (updating_ || state_.step <= saved_step_) return "";
  try {
    save();
  } catch (const std::exception&) {  // most likely for the same reason, which is reported
    return "";
  }
  return fmt::format("; saved after step {} in {}, {}", state_.step, newest_checkpoint_,
                     how_to_go_on());
}

void Trainer::fail(const std::string& sentence) {
  const std::string saved = rescue();
  progress_->finish();
  throw Error(sentence.substr(0, sentence.find('\n')) + saved);
}

void Trainer::stop_if_asked() {
  const char* signal = StopSignal::received();
  if (signal == nullptr) return;
  save();
  progress_->finish();
  throw Error(fmt::format("stopped by {} after step {} of {}, saved in {}; {}", signal, state_.step,
                          recipe_.total_steps(), newest_checkpoint_, how_to_go_on()));
}

void Trainer::stop_if_bad() {
  if (state_.bad_in_a_row < recipe_.train.max_bad_steps) return;
  throw Error(fmt::format(
      "{}: {} updates in a row up to step {} had a non-finite loss or gradient and were skipped, "
      "the first bad tensor being the {}; check the data, or start over with a lower "
      "optimizer.learning_rate and --fresh{}",
      folder_.path(), state_.bad_in_a_row, state_.step, first_bad_tensor_, rescue()));
}

TrainResult Trainer::run() {
  const StopSignal signals;
  restore();
  announce();
  Progress::Options bar;
  bar.start = state_.step;
  bar.log_interval = recipe_.train.log_interval;
  progress_ = std::make_unique<Progress>("train", recipe_.total_steps(), bar);
  try {
    loop();
  } catch (const UsageError&) {
    throw;
  } catch (const Error& error) {
    fail(error.what());
  } catch (const c10::Error& error) {
    fail(error.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    fail("not enough memory; use a smaller batch, window or model");
  }
  return finish();
}

void Trainer::loop() {
  const int64_t total = recipe_.total_steps();
  const int64_t interval = recipe_.train.checkpoint_interval;
  evaluate_if_due(/*last=*/false);
  while (state_.step < total && !out_of_time()) {
    stop_if_asked();
    const StepReport report = update(state_.step + 1);
    log_->train(report, state_.tokens_seen, state_.skipped_steps, state_.seconds);
    show(report);
    stop_if_bad();
    evaluate_if_due(state_.step == total);
    if (interval > 0 && state_.step % interval == 0 && state_.step < total) save();
  }
  evaluate_if_due(/*last=*/true);
  stop_if_asked();  // it may have cut the evaluation short
  if (saved_step_ != state_.step || newest_checkpoint_.empty()) save();
}

// Also runs when a finished run is started again: whatever is missing is made up.
TrainResult Trainer::finish() {
  publish_model(newest_checkpoint_, folder_.path() + "/final");
  progress_->finish();
  TrainResult result;
  result.run_folder = folder_.path();
  result.checkpoint = newest_checkpoint_;
  result.model = folder_.path() + "/final";
  if (log_->draw(folder_.picture_path(), fs::path(folder_.path()).filename().string())) {
    result.picture = folder_.picture_path().string();
  }
  result.step = state_.step;
  result.total_steps = recipe_.total_steps();
  result.skipped_steps = state_.skipped_steps;
  result.train_loss = log_->train_losses().empty() ? std::numeric_limits<double>::quiet_NaN()
                                                   : log_->train_losses().back().second;
  if (!log_->held_out().empty()) {
    result.first_held_out = log_->held_out().front();
    result.held_out = log_->held_out().back();
    result.convention = fmt::format("rows-{}", recipe_.data.length);
    result.whole_held_out = recipe_.train.eval_tokens == 0;
  }
  result.go_on = how_to_go_on();
  return result;
}

}  // namespace

TrainResult train(Recipe recipe, const TrainOptions& options) {
  if (recipe.train.threads > 0) at::set_num_threads(static_cast<int>(recipe.train.threads));
  if (options.fresh) recipe.train.out = first_free_folder(recipe.train.out);
  return Trainer(std::move(recipe), options).run();
}

}  // namespace efla
