#include "efla/train/trainer.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "efla/io/atomic_file.h"
#include "efla/io/error.h"
#include "efla/io/metrics.h"
#include "efla/io/tokenizer.h"
#include "efla/nn/pretrained.h"
#include "efla/train/checkpoint.h"
#include "efla/train/test_run.h"

namespace efla {
namespace {

namespace fs = std::filesystem;

struct Crash {};  // stands for a process that dies

TrainOptions crash_at(int64_t at) {
  TrainOptions options;
  options.on_gradients = [at](int64_t step, LanguageModel&) {
    if (step == at) throw Crash();
  };
  return options;
}

// Runs `action` and returns the sentence of the Error that it throws.
template <typename Action>
std::string error_of(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(Trainer, UntrainedLossIsThatOfAUniformGuess) {
  const TestRun run("uniform", test_documents(40), test_documents(10, 2));
  const TrainResult result = train(run.recipe(
      "out", {"model.initializer_range=1e-6", "optimizer.learning_rate=0", "train.steps=1"}));
  EXPECT_NEAR(result.train_loss, std::log(258.0), 1e-4);
  EXPECT_NEAR(result.first_held_out.loss, std::log(258.0), 1e-4);
  EXPECT_EQ(result.held_out.loss, result.first_held_out.loss);  // learning rate 0 changes nothing
}

TEST(Trainer, OverfitsASequenceThatNeedsMemory) {
  // In "aabab..." over two letters the next one follows only from several before it.
  const std::string period = "aababbbaabbbababaaab";
  std::string text;
  while (text.size() < 400) text += period;
  const TestRun run("overfit", {text}, {text});
  const TrainResult result = train(
      run.recipe("out", {"model.num_hidden_layers=2", "model.hidden_size=64", "train.steps=250",
                         "optimizer.learning_rate=0.005", "data.length=64", "data.batch=4",
                         "train.eval_interval=0", "schedule.warmup_steps=20"}));
  EXPECT_LT(result.held_out.loss, 0.15);  // of which about 0.05 is the start, not yet determined
  EXPECT_GT(result.first_held_out.loss, 5.0);
}

TEST(Trainer, LearnsAFixedTextToNearlyNothing) {
  std::string text;
  while (text.size() < 400) text += "abcdefghijklmnop";  // each letter gives the next
  const TestRun run("fixed", {text});
  const TrainResult result = train(run.recipe(
      "out", {"train.steps=150", "optimizer.learning_rate=0.01", "schedule.warmup_steps=10"}));
  EXPECT_LT(result.train_loss, 0.02);
}

TEST(Trainer, AccumulatedMicroBatchesEqualOneLargeBatch) {
  // Documents of uneven length: micro-batches differ in their number of targets, so that a mean of
  // means would differ from the mean.
  const TestRun run("accumulate", test_documents(60));
  const std::vector<std::string> common = {"train.dtype=float64", "train.steps=4"};
  auto large = common, small = common;
  large.insert(large.end(), {"data.batch=6"});
  small.insert(small.end(), {"data.batch=1", "train.grad_accumulation=6"});
  train(run.recipe("large", large));
  train(run.recipe("small", small));
  const auto expected = logged_losses(run.path("large/metrics.jsonl"));
  const auto actual = logged_losses(run.path("small/metrics.jsonl"));
  ASSERT_EQ(expected.size(), 4u);
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_NEAR(actual[i].second, expected[i].second, 1e-6 * expected[i].second);
  }
}

TEST(Trainer, SameSeedSameLossesOtherSeedOthers) {
  const TestRun run("seed", test_documents(40));
  train(run.recipe("a"));
  train(run.recipe("b"));
  train(run.recipe("c", {"train.seed=7"}));
  const auto a = logged_losses(run.path("a/metrics.jsonl"));
  EXPECT_EQ(a, logged_losses(run.path("b/metrics.jsonl")));
  EXPECT_NE(a, logged_losses(run.path("c/metrics.jsonl")));
}

TEST(Trainer, CrashedRunGoesOnBitForBit) {
  const TestRun run("resume", test_documents(12), test_documents(6, 2));
  const std::vector<std::string> settings = {"train.steps=9", "train.checkpoint_interval=3",
                                             "train.eval_interval=2", "train.grad_accumulation=2"};
  train(run.recipe("whole", settings));  // more than one epoch
  const auto expected = logged_losses(run.path("whole/metrics.jsonl"));
  ASSERT_EQ(expected.size(), 9u + 6u);  // held out at 0, 2, 4, 6, 8, 9
  // Before the first checkpoint, right after one, between two.
  for (const int64_t at : {2, 4, 8}) {
    const std::string out = fmt::format("crash{}", at);
    EXPECT_THROW(train(run.recipe(out, settings), crash_at(at)), Crash);
    train(run.recipe(out, settings));
    EXPECT_EQ(logged_losses(run.path(out + "/metrics.jsonl")), expected) << "crash at " << at;
    EXPECT_EQ(read_file(run.path(out + "/final/model.safetensors")),
              read_file(run.path("whole/final/model.safetensors")));
  }
}

TEST(Trainer, CheckpointRecordsEpochAndRow) {
  const TestRun run("position", test_documents(12));
  const TrainResult result = train(run.recipe("out", {"train.steps=11"}));
  const TrainerState state = verify_checkpoint(result.checkpoint);
  EXPECT_EQ(state.step, 11);
  EXPECT_GE(state.position.epoch, 1);
  EXPECT_GT(state.tokens_seen, 0);
  EXPECT_LE(state.tokens_seen, 11 * 64);
}

TEST(Trainer, SignalFinishesTheStepSavesAndGoesOnLater) {
  const TestRun run("signal", test_documents(40), test_documents(6, 2));
  const std::vector<std::string> settings = {"train.steps=6", "train.eval_interval=3"};
  train(run.recipe("whole", settings));
  TrainOptions options;
  options.on_gradients = [](int64_t step, LanguageModel&) {
    if (step == 3) ::raise(SIGINT);
  };
  const std::string message = error_of([&] { train(run.recipe("out", settings), options); });
  EXPECT_NE(message.find("SIGINT after step 3 of 6"), std::string::npos) << message;
  EXPECT_TRUE(fs::exists(run.path("out/checkpoints/step-00000003")));
  train(run.recipe("out", settings));
  EXPECT_EQ(logged_losses(run.path("out/metrics.jsonl")),
            logged_losses(run.path("whole/metrics.jsonl")));
}

TEST(Trainer, SecondSignalEndsAtOnce) {
  const TestRun run("twice", test_documents(40));
  TrainOptions options;
  options.on_gradients = [](int64_t, LanguageModel&) {
    ::raise(SIGINT);
    ::raise(SIGINT);
  };
  EXPECT_EXIT(train(run.recipe("out"), options), testing::ExitedWithCode(1), "stopped at once");
}

void poison(LanguageModel& model, const std::string& name) {
  model->named_parameters()[name].mutable_grad().view(-1)[3] = NAN;
}

TEST(Trainer, NonFiniteGradientSkipsTheUpdateAndIsCounted) {
  const TestRun run("nan", test_documents(40));
  at::Tensor before, after;
  TrainOptions options;
  options.on_gradients = [&](int64_t step, LanguageModel& model) {
    const at::Tensor weight = model->named_parameters()["model.layers.0.attn.k_proj.weight"];
    if (step == 2) before = weight.detach().clone();
    if (step == 2) poison(model, "model.layers.0.mlp.up_proj.weight");
    if (step == 3) after = weight.detach().clone();
  };
  const TrainResult result = train(run.recipe("out", {"train.max_bad_steps=2"}), options);
  EXPECT_EQ(result.step, 4);
  EXPECT_EQ(result.skipped_steps, 1);
  EXPECT_TRUE(at::equal(before, after));
  EXPECT_TRUE(std::isfinite(result.train_loss));
  EXPECT_EQ(verify_checkpoint(result.checkpoint).skipped_steps, 1);
  EXPECT_EQ(read_metrics(run.path("out/metrics.jsonl"))[1].at("skipped_steps"), 1);
}

TEST(Trainer, BadStepsInARowStopWithTheFirstBadTensor) {
  const TestRun run("bad", test_documents(40));
  int calls = 0;
  TrainOptions options;
  options.on_gradients = [&calls](int64_t step, LanguageModel& model) {
    ++calls;
    // One alone, then three in a row of which the first names the culprit.
    if (step == 1 || step == 4) poison(model, "model.layers.0.attn.v_proj.weight");
    if (step == 3) poison(model, "model.layers.0.mlp.down_proj.weight");
    if (step == 5) poison(model, "model.norm.weight");
  };
  const std::string message = error_of([&] {
    train(run.recipe("out", {"train.steps=9", "train.max_bad_steps=3"}), options);
  });
  EXPECT_EQ(calls, 5);
  EXPECT_NE(message.find("3 updates in a row"), std::string::npos) << message;
  EXPECT_NE(message.find("gradient of model.layers.0.mlp.down_proj.weight"), std::string::npos)
      << message;
  EXPECT_NE(message.find(run.path("out/checkpoints/step-00000005")), std::string::npos) << message;
  EXPECT_NE(message.find("--fresh"), std::string::npos) << message;
  // The advice holds: the same recipe goes on, with the gradients well again.
  EXPECT_EQ(train(run.recipe("out", {"train.steps=9", "train.max_bad_steps=3"})).step, 9);
}

TEST(Trainer, AnErrorOnTheWayLosesNothing) {
  const TestRun run("rescue", test_documents(40), test_documents(6, 2));
  const std::vector<std::string> settings = {"train.steps=6", "train.eval_interval=2"};
  train(run.recipe("whole", settings));
  int kind = 0;
  TrainOptions options;
  options.on_gradients = [&kind](int64_t step, LanguageModel&) {
    if (step < 4) return;
    if (kind == 0) throw Error("injected");
    if (kind == 1) throw std::bad_alloc();
    TORCH_CHECK(false, "injected");
  };
  for (kind = 0; kind < 3; ++kind) {
    const std::string out = fmt::format("out{}", kind);
    const std::string message = error_of([&] { train(run.recipe(out, settings), options); });
    EXPECT_NE(message.find(kind == 1 ? "not enough memory" : "injected"), std::string::npos)
        << message;
    EXPECT_NE(message.find(run.path(out + "/checkpoints/step-00000003")), std::string::npos)
        << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    EXPECT_EQ(verify_checkpoint(run.path(out + "/checkpoints/step-00000003")).step, 3);
    train(run.recipe(out, settings));
    EXPECT_EQ(logged_losses(run.path(out + "/metrics.jsonl")),
              logged_losses(run.path("whole/metrics.jsonl")));
  }
}

TEST(Trainer, AFreshRunThatStopsNamesItsOwnFolder) {
  const TestRun run("fresh", test_documents(40));
  train(run.recipe("it's"));
  TrainOptions options;
  options.fresh = true;
  options.command = {"efla", "train", "my recipe.toml"};
  options.on_gradients = [](int64_t step, LanguageModel&) {
    if (step == 2) ::raise(SIGINT);
  };
  const std::string message = error_of([&] { train(run.recipe("it's"), options); });
  EXPECT_NE(message.find("`efla train 'my recipe.toml' 'train.out=" + run.path("it'\\''s-2'`")),
            std::string::npos)
      << message;
}

TEST(Trainer, HeldOutBitsPerByteOfASliceAreExact) {
  const TestRun run("bits", test_documents(40), test_documents(10, 2));
  const std::vector<std::string> untrained = {"optimizer.learning_rate=0", "train.steps=1",
                                              "model.initializer_range=1e-6"};
  auto slice = untrained;
  slice.push_back("train.eval_tokens=64");
  const TrainResult part = train(run.recipe("part", slice));
  const TrainResult whole = train(run.recipe("whole", untrained));
  // One byte a token, every token but bos: log2(258) bits each, in the slice as in the whole.
  EXPECT_LT(part.held_out.tokens, whole.held_out.tokens);
  EXPECT_LE(part.held_out.tokens, 64);
  for (const TrainResult& result : {part, whole}) {
    EXPECT_NEAR(result.held_out.bits_per_byte, std::log2(258.0), 1e-3);
    EXPECT_NEAR(result.first_held_out.bits_per_byte, std::log2(258.0), 1e-3);
    EXPECT_EQ(result.convention, "rows-32");
  }
  EXPECT_FALSE(part.whole_held_out);
  const auto line = read_metrics(run.path("part/metrics.jsonl"))[0];
  EXPECT_EQ(line.at("step"), 0);
  EXPECT_EQ(line.at("convention"), "rows-32");
  EXPECT_EQ(line.at("bytes"), part.held_out.tokens);
}

TEST(Trainer, FinishedRunIsLeftAsItIs) {
  const TestRun run("finished", test_documents(40), test_documents(6, 2));
  const TrainResult first = train(run.recipe("out"));
  const std::string metrics = read_file(run.path("out/metrics.jsonl"));
  const TrainResult second = train(run.recipe("out"), crash_at(1));
  EXPECT_EQ(second.step, 4);
  EXPECT_EQ(second.held_out.loss, first.held_out.loss);
  EXPECT_EQ(read_file(run.path("out/metrics.jsonl")), metrics);
}

TEST(Trainer, FolderOfAnotherRecipeIsRefusedAndFreshTakesANewOne) {
  const TestRun run("other", test_documents(40));
  train(run.recipe("out"));
  const std::string metrics = read_file(run.path("out/metrics.jsonl"));
  const std::string message = error_of([&] { train(run.recipe("out", {"train.seed=5"})); });
  EXPECT_NE(message.find("train.seed (was 42, now 5)"), std::string::npos) << message;
  EXPECT_NE(message.find("--fresh"), std::string::npos) << message;
  TrainOptions options;
  options.fresh = true;
  EXPECT_EQ(train(run.recipe("out", {"train.seed=5"}), options).run_folder, run.path("out-2"));
  EXPECT_EQ(read_file(run.path("out/metrics.jsonl")), metrics);
  // What does not change the losses may change.
  EXPECT_EQ(train(run.recipe("out", {"train.keep=7", "train.eval_interval=1"})).step, 4);
}

TEST(Trainer, FolderInUseIsRefused) {
  const TestRun run("locked", test_documents(40));
  train(run.recipe("out"));
  const FileLock lock(run.path("out/train.lock"));
  EXPECT_NE(error_of([&] { train(run.recipe("out")); }).find(run.path("out")), std::string::npos);
}

TEST(Trainer, ForeignFolderAndFileAreRefused) {
  const TestRun run("foreign", test_documents(40));
  fs::create_directories(run.path("out"));
  write_file_atomically(run.path("out/metrics.jsonl"), "precious\n");
  EXPECT_THROW(train(run.recipe("out")), UsageError);
  EXPECT_EQ(read_file(run.path("out/metrics.jsonl")), "precious\n");
  EXPECT_THROW(train(run.recipe("out/metrics.jsonl")), UsageError);
}

TEST(Trainer, ChangedShardsAreRefusedOnResume) {
  const TestRun run("shards", test_documents(40));
  EXPECT_THROW(train(run.recipe("out", {"train.checkpoint_interval=1"}), crash_at(3)), Crash);
  const TestRun others("shards_other", test_documents(40, 9));
  fs::copy_file(others.path("data/00000.tok"), run.path("data/00000.tok"),
                fs::copy_options::overwrite_existing);
  const std::string message =
      error_of([&] { train(run.recipe("out", {"train.checkpoint_interval=1"})); });
  EXPECT_NE(message.find("have changed"), std::string::npos) << message;
}

TEST(Trainer, DamagedCheckpointFallsBackAndEndsWithTheSameLosses) {
  const TestRun run("fallback", test_documents(40));
  const std::vector<std::string> settings = {"train.steps=6", "train.checkpoint_interval=2"};
  train(run.recipe("whole", settings));
  EXPECT_THROW(train(run.recipe("out", settings), crash_at(6)), Crash);
  fs::resize_file(run.path("out/checkpoints/step-00000004/optimizer.safetensors"), 100);
  train(run.recipe("out", settings));
  EXPECT_EQ(logged_losses(run.path("out/metrics.jsonl")),
            logged_losses(run.path("whole/metrics.jsonl")));
}

TEST(Trainer, BadRequestsLeaveNothingBehind) {
  const TestRun run("requests", test_documents(40), test_documents(6, 2));
  const std::vector<std::vector<std::string>> requests = {
      {"data.train=" + run.path("nowhere")},
      {"data.valid=" + run.path("nowhere")},
      {"data.tokenizer=" + run.path("no.model")},
      {"model.vocab_size=100"},
      {"data.length=100000"},                        // longer than the data
      {"train.eval_tokens=1000000"},                 // more held-out tokens than exist
      {"data.batch=65536", "data.length=16777216"},  // no machine holds this
      {"model.hidden_size=1048576", "model.num_hidden_layers=1000"},
  };
  for (const auto& request : requests) {
    const std::string message = error_of([&] { train(run.recipe("out", request)); });
    EXPECT_NE(message, "no error") << request[0];
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    EXPECT_FALSE(fs::exists(run.path("out"))) << request[0];
  }
}

TEST(Trainer, TimeLimitSavesAndALaterCallGoesOn) {
  const TestRun run("time", test_documents(40));
  train(run.recipe("whole"));
  const TrainResult stopped = train(run.recipe("out", {"train.time_limit=1e-9"}));
  EXPECT_EQ(stopped.step, 1);
  EXPECT_EQ(stopped.total_steps, 4);
  EXPECT_EQ(train(run.recipe("out")).step, 4);
  EXPECT_EQ(logged_losses(run.path("out/metrics.jsonl")),
            logged_losses(run.path("whole/metrics.jsonl")));
}

TEST(Trainer, RunFolderHoldsRecipeMetricsAndModel) {
  const TestRun run("folder", test_documents(40), test_documents(6, 2));
  const TrainResult result = train(run.recipe("out"));
  const Recipe saved = Recipe::load(run.path("out/recipe.toml"));
  EXPECT_EQ(saved.model.vocab_size, 258);  // filled in from the tokenizer
  EXPECT_EQ(saved.model.bos_token_id, 256);
  EXPECT_EQ(load_pretrained(result.model)->config().vocab_size, 258);
  EXPECT_EQ(load_pretrained(result.model)->config().tokenizer_fingerprint,
            Tokenizer::load("byte")->fingerprint());
  const auto lines = read_metrics(run.path("out/metrics.jsonl"));
  ASSERT_EQ(lines.size(), 6u);  // held out, 4 steps, held out
  EXPECT_GT(lines[0].at("bits_per_byte").get<double>(), 0);
  EXPECT_EQ(lines[4].at("step"), 4);
  EXPECT_GT(lines[4].at("tokens_per_second").get<double>(), 0);
}

}  // namespace
}  // namespace efla
