// Prompts, metrics, errors and the log of a task's samples.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "efla/eval/passkey.h"
#include "efla/eval/sample_log.h"
#include "efla/eval/task_formats.h"
#include "efla/eval/task_metrics.h"
#include "efla/eval/task_prompts.h"
#include "efla/eval/task_run.h"
#include "efla/eval/test_models.h"
#include "efla/io/atomic_file.h"
#include "efla/io/error.h"

namespace efla {
namespace {

EvalSample two_choices(std::string context, std::string a, std::string b, int64_t gold) {
  EvalSample sample;
  sample.origin = "f:1";
  sample.contexts = {std::move(context)};
  sample.continuations = {" " + a, " " + b};
  sample.choices = {std::move(a), std::move(b)};
  sample.gold = gold;
  return sample;
}

double metric(const std::vector<Metric>& metrics, const std::string& name) {
  for (const Metric& m : metrics) {
    if (m.name == name) return m.value;
  }
  return std::nan("");
}

std::optional<double> error(const std::vector<Metric>& metrics, const std::string& name) {
  for (const Metric& m : metrics) {
    if (m.name == name) return m.error;
  }
  return std::nullopt;
}

TEST(TaskMetrics, NormaliseByCharactersAndByBytes) {
  const TaskSpec& spec = task_spec("arc_easy");
  // 4 characters of 8 bytes against 5 characters of 5 bytes.
  const EvalSample sample = two_choices("c", "\u00e9\u00e9\u00e9\u00e9", "abcde", 0);
  const std::vector<SampleOutcome> outcomes = {{{-6.0, -5.0}, {false, false}}};
  const auto metrics = task_metrics(spec, {sample}, outcomes);
  EXPECT_EQ(metric(metrics, "acc"), 0);        // -5 is the larger
  EXPECT_EQ(metric(metrics, "acc_norm"), 0);   // -1.5 < -1
  EXPECT_EQ(metric(metrics, "acc_bytes"), 1);  // -0.75 > -1
  EXPECT_FALSE(error(metrics, "acc"));
  // Equal choices: the first, as argmax has it.
  EXPECT_EQ(metric(task_metrics(spec, {sample}, {{{-5.0, -5.0}, {false, false}}}), "acc"), 1);
}

TEST(TaskMetrics, ErrorOfAMean) {
  const EvalSample sample = two_choices("c", "a", "b", 0);
  const SampleOutcome right{{-1, -2}, {false, false}}, wrong{{-2, -1}, {false, false}};
  const auto metrics = task_metrics(task_spec("copa"), std::vector<EvalSample>(4, sample),
                                    {right, right, right, wrong});
  EXPECT_EQ(metric(metrics, "acc"), 0.75);
  // Variance (3 * 0.25^2 + 0.75^2) / 3 = 0.25.
  EXPECT_NEAR(*error(metrics, "acc"), 0.5 / 2, 1e-12);
}

TEST(TaskMetrics, LastWord) {
  EvalSample sample;
  sample.contexts = {"c"};
  sample.continuations = sample.choices = {" w"};
  const auto metrics = task_metrics(task_spec("lambada_openai"), {sample, sample},
                                    {{{-1.0}, {true}}, {{-3.0}, {false}}});
  EXPECT_NEAR(metric(metrics, "perplexity"), std::exp(2.0), 1e-12);
  EXPECT_EQ(metric(metrics, "acc"), 0.5);
  // Of two values, replicates are e^1, e^2 and e^3 with odds 1:2:1.
  const double mean = (std::exp(1.0) + 2 * std::exp(2.0) + std::exp(3.0)) / 4;
  const double second = (std::exp(2.0) + 2 * std::exp(4.0) + std::exp(6.0)) / 4;
  EXPECT_NEAR(*error(metrics, "perplexity"), std::sqrt(second - mean * mean), 0.05);
}

TEST(TaskMetrics, BootstrapIsTheHarnesss) {
  // Three generators of 1,000 replicates each, as lm-evaluation-harness's bootstrap_stderr makes
  // them; the value was computed by CPython 3.11.
  EXPECT_NEAR(bootstrap_perplexity_error({-1.5, -0.25, -3.0, -2.0, -0.5, -4.25, -1.0}, 3000),
              3.754011965471493, 1e-12);
}

TEST(TaskMetrics, RollingPerplexities) {
  EvalSample one, two;
  one.words = 10;
  one.bytes = 50;
  two.words = 30;
  two.bytes = 150;
  const auto metrics =
      task_metrics(task_spec("wikitext"), {one, two}, {{{-20, -10}, {}}, {{-60, -50}, {}}});
  EXPECT_NEAR(metric(metrics, "word_perplexity"), std::exp(2.0), 1e-12);
  EXPECT_NEAR(metric(metrics, "byte_perplexity"), std::exp(0.4), 1e-12);
  EXPECT_NEAR(metric(metrics, "bits_per_byte"), 0.4 / std::log(2.0), 1e-12);
  EXPECT_NEAR(metric(metrics, "word_perplexity_stateful"), std::exp(1.5), 1e-12);
  EXPECT_NEAR(*error(metrics, "word_perplexity"), 0, 1e-9);  // both cost 2 a word
  // Residuals -5 and 5 against 1.5 a word; 40 words.
  EXPECT_NEAR(*error(metrics, "word_perplexity_stateful"), std::exp(1.5) * std::sqrt(50.0 * 2) / 40,
              1e-9);
}

const Tokenizer& bytes() {
  static const auto tokenizer = Tokenizer::load("byte");
  return *tokenizer;
}

std::string text_of(const std::vector<int32_t>& tokens) { return bytes().decode(tokens); }

TEST(TaskPrompts, SplitAtTheContextsEnd) {
  const TaskSpec& spec = task_spec("piqa");
  const auto prompt = [&](const EvalSample& sample, PromptOptions options = {}) {
    return make_prompt(spec, sample, "", bytes(), 258, options);
  };
  const Prompt plain = prompt(two_choices("Q:", "ab", "c", 0));
  EXPECT_EQ(plain.requests[0].context, (std::vector<int32_t>{256, 'Q', ':'}));
  EXPECT_EQ(plain.requests[0].continuation, (std::vector<int32_t>{' ', 'a', 'b'}));
  // White space at the end of the context is the continuation's.
  const Prompt blank = prompt(two_choices("Q: \n", "ab", "c", 0));
  EXPECT_EQ(blank.requests[1].context, plain.requests[1].context);
  EXPECT_EQ(text_of(blank.requests[1].continuation), " \n c");
  // An empty context is the token that a text begins with.
  const Prompt empty = prompt(two_choices("", "ab", "c", 0));
  EXPECT_EQ(empty.requests[0].context, std::vector<int32_t>{256});
  PromptOptions never;
  never.bos = BosMode::kNever;
  EXPECT_EQ(prompt(two_choices("Q:", "ab", "c", 0), never).requests[0].context,
            (std::vector<int32_t>{'Q', ':'}));
  EXPECT_EQ(prompt(two_choices("", "ab", "c", 0), never).requests[0].context,
            std::vector<int32_t>{256});
}

TEST(TaskPrompts, LongContextsLoseTheirBeginning) {
  const EvalSample sample = two_choices("0123456789", "ab", "c", 0);
  PromptOptions options;
  options.max_length = 5;
  const Prompt prompt = make_prompt(task_spec("piqa"), sample, "", bytes(), 258, options);
  EXPECT_EQ(prompt.truncated, 2);
  EXPECT_EQ(text_of(prompt.requests[0].context), "789");  // with " ab": 5 + 1 tokens
  EXPECT_EQ(text_of(prompt.requests[1].context), "6789");
  options.max_length = 2;
  try {
    make_prompt(task_spec("piqa"), sample, "", bytes(), 258, options);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(std::string(e.what()).find("f:1: a choice has 3 tokens"), 0u) << e.what();
  }
}

TEST(TaskPrompts, RollingWindows) {
  const EvalSample sample = wikitext_sample("abcdefg", "p");
  const TaskSpec& spec = task_spec("wikitext");
  PromptOptions options;
  options.max_length = 3;
  Prompt prompt = make_prompt(spec, sample, "", bytes(), 258, options);
  ASSERT_EQ(prompt.requests.size(), 4u);
  const auto expect = [&](size_t i, const std::vector<int32_t>& context, const std::string& text) {
    EXPECT_EQ(prompt.requests[i].context, context) << i;
    EXPECT_EQ(text_of(prompt.requests[i].continuation), text) << i;
  };
  expect(0, {256}, "abc");
  expect(1, {'c'}, "def");
  expect(2, {'d', 'e', 'f'}, "g");  // the last window reaches back
  expect(3, {256}, "abcdefg");      // the whole text, with its state
  options.bos = BosMode::kHarness;
  prompt = make_prompt(spec, sample, "", bytes(), 258, options);
  EXPECT_EQ(prompt.requests[0].continuation, (std::vector<int32_t>{256, 'a', 'b'}));
  options = {};
  EXPECT_EQ(make_prompt(spec, sample, "", bytes(), 258, options).requests.size(), 1u);
}

EvalTask task_with_examples(bool own) {
  EvalTask task{task_spec("piqa"), "piqa.jsonl", {}, own ? "piqa.jsonl" : "piqa_train.jsonl", {}};
  for (int i = 0; i < 30; ++i) {
    const std::string number = std::to_string(i);
    task.samples.push_back(two_choices("Q" + number, "a" + number, "b" + number, i % 2));
    task.examples.push_back(own ? task.samples.back()
                                : two_choices("T" + number, "x", "y" + number, 1));
  }
  return task;
}

TEST(FewShot, ExamplesPrecedeTheQuestion) {
  PromptOptions options;
  options.shots = 2;
  const EvalTask task = task_with_examples(false);
  const std::vector<std::string> prefixes = few_shot_prefixes(task, 3, options);
  // random.Random(1234).sample(range(30), 3) of CPython, without the last: one more is drawn in
  // case the question is among them.
  EXPECT_EQ(prefixes[0], "T24 y24\n\nT14 y14\n\n");
  EXPECT_NE(prefixes[1], prefixes[0]);
  EXPECT_EQ(few_shot_prefixes(task, 3, options), prefixes);
  options.shot_seed = 5;
  EXPECT_NE(few_shot_prefixes(task, 3, options), prefixes);
  options.shots = 30;
  EXPECT_THROW(few_shot_prefixes(task, 3, options), UsageError);
}

TEST(FewShot, NeverShowsTheQuestionsOwnAnswer) {
  PromptOptions options;
  options.shots = 28;
  const EvalTask task = task_with_examples(true);
  const std::vector<std::string> prefixes = few_shot_prefixes(task, task.samples.size(), options);
  for (size_t i = 0; i < prefixes.size(); ++i) {
    EXPECT_EQ(prefixes[i].find(task.samples[i].as_example()), std::string::npos) << i;
    EXPECT_EQ(std::count(prefixes[i].begin(), prefixes[i].end(), '\n'), 56);
  }
}

TEST(Passkey, HidesTheNumberAtEveryDepth) {
  PasskeyOptions options;
  options.length = 900;
  options.samples = 5;
  const EvalTask task = passkey_task(options, bytes());
  ASSERT_EQ(task.samples.size(), 5u);
  std::set<std::string> numbers;
  size_t last = 0;
  for (const EvalSample& sample : task.samples) {
    const std::string& text = sample.contexts[0];
    const std::string& number = sample.choices[static_cast<size_t>(sample.gold)];
    EXPECT_EQ(number.size(), 7u);
    numbers.insert(number);
    const size_t at = text.find("is: " + number + ".");
    ASSERT_NE(at, std::string::npos);
    EXPECT_GT(at, last);
    last = at;
    EXPECT_LE(text.size() + 1 + 8, 900u);
    EXPECT_GT(text.size() + 1 + 8, 900u - 80);  // a sentence more would be too much
    EXPECT_EQ(std::set<std::string>(sample.choices.begin(), sample.choices.end()).size(), 10u);
  }
  EXPECT_EQ(numbers.size(), 5u);
  EXPECT_EQ(passkey_task(options, bytes()).samples[4].contexts, task.samples[4].contexts);
  options.seed = 8;
  EXPECT_NE(passkey_task(options, bytes()).samples[4].contexts, task.samples[4].contexts);
}

TEST(Passkey, TakesItsNoiseFromAText) {
  PasskeyOptions options;
  options.length = 500;
  options.samples = 1;
  options.haystack_path = "novel.txt";
  for (int i = 0; i < 40; ++i) options.haystack += "Sentence\n" + std::to_string(i) + " ends. ";
  const EvalTask task = passkey_task(options, bytes());
  EXPECT_NE(task.samples[0].contexts[0].find(" Sentence 3 ends."), std::string::npos);
  options.length = 5000;
  EXPECT_THROW(passkey_task(options, bytes()), UsageError);
  options.length = 10;
  EXPECT_THROW(passkey_task(options, bytes()), UsageError);
  options.haystack = "no end";
  EXPECT_THROW(passkey_task(options, bytes()), UsageError);
}

TEST(TaskRun, RetrievalOfAModelThatKnows) {
  // After a blank this model says 7 without end: right when the number is 7777777.
  LanguageModel model = testing::chain_model(258, [](int64_t) { return int64_t{'7'}; });
  EvalTask task;
  task.spec.name = "passkey_9";
  task.spec.kind = TaskKind::kRetrieval;
  task.samples = {two_choices("x", "7777777", "1234567", 0),
                  two_choices("x", "7777777", "1234567", 1)};
  for (EvalSample& sample : task.samples) sample.continuations = sample.choices;
  const TaskResult result = run_task(model, bytes(), task, {});
  EXPECT_EQ(metric(result.metrics, "exact"), 0.5);
  EXPECT_EQ(metric(result.metrics, "acc"), 0.5);
}

class LoggedRun : public ::testing::Test {
 protected:
  void SetUp() override {
    options_.output = std::filesystem::path(::testing::TempDir()) / "efla_logged_run";
    std::filesystem::remove_all(options_.output);
    std::filesystem::create_directories(options_.output);
    for (int i = 0; i < 12; ++i) {
      task_.samples.push_back(
          two_choices("Question " + std::string(static_cast<size_t>(i), 'x'), "yes", "no", i % 2));
    }
  }
  void TearDown() override { std::filesystem::remove_all(options_.output); }
  std::filesystem::path log() const { return options_.output / "samples_piqa.jsonl"; }
  TaskResult run() { return run_task(model_, bytes(), task_, options_); }

  LanguageModel model_ = testing::random_model(258);
  EvalTask task_{task_spec("piqa"), "piqa.jsonl", {}, "", {}};
  TaskRunOptions options_;
};

TEST_F(LoggedRun, GoesOnWhereItStopped) {
  options_.batch_tokens = 64;
  const TaskResult whole = run();
  EXPECT_EQ(whole.resumed, 0);
  const std::string text = read_file(log());
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 12);
  // The log of a run that was killed: some lines, in any order, the last one cut short.
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size(); begin = text.find('\n', begin) + 1) {
    lines.push_back(text.substr(begin, text.find('\n', begin) - begin));
  }
  write_file_atomically(log(), lines[7] + "\n" + lines[2] + "\n" + lines[4].substr(0, 40));
  const TaskResult resumed = run();
  EXPECT_EQ(resumed.resumed, 2);
  EXPECT_LT(resumed.tokens_read, whole.tokens_read);
  ASSERT_EQ(resumed.metrics.size(), whole.metrics.size());
  for (size_t i = 0; i < whole.metrics.size(); ++i) {
    EXPECT_EQ(resumed.metrics[i].value, whole.metrics[i].value);
  }
  const TaskResult again = run();
  EXPECT_EQ(again.resumed, 12);
  EXPECT_EQ(again.tokens_read, 0);
  // Another question under the same number is evaluated.
  task_.samples[3].contexts[0] += "!";
  EXPECT_EQ(run().resumed, 11);
}

TEST_F(LoggedRun, LimitTakesTheFirst) {
  options_.limit = 5;
  EXPECT_EQ(run().samples, 5);
  options_.limit = 500;
  EXPECT_EQ(run().samples, 12);
}

TEST(TaskReport, SaysWhatIsMissing) {
  TaskResult done, absent;
  done.task = "piqa";
  done.samples = 3;
  done.metrics = {{"acc", 0.5, 0.25, true}, {"acc_norm", 1, std::nullopt, false}};
  absent.task = "copa";
  absent.status = TaskStatus::kAbsent;
  absent.message = "none";
  const std::string table = markdown_table({done, absent});
  EXPECT_NE(table.find("| piqa | 3 | 0 | **acc** | 0.5000 | 0.2500 |"), std::string::npos) << table;
  EXPECT_NE(table.find("| piqa | 3 | 0 | acc_norm | 1.0000 |  |"), std::string::npos) << table;
  EXPECT_NE(table.find("| copa | | | absent | | |"), std::string::npos) << table;
  EXPECT_EQ(to_json(absent)["status"], "absent");
  EXPECT_EQ(to_json(done)["acc_stderr"], 0.25);
  EXPECT_TRUE(to_json(done)["acc_norm_stderr"].is_null());
}

}  // namespace
}  // namespace efla
