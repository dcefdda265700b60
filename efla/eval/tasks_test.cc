// What is asked of a model for each layout of each set, and what a damaged file is answered with.
#include "efla/eval/tasks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <functional>

#include "efla/eval/task_formats.h"
#include "efla/io/atomic_file.h"
#include "efla/io/error.h"

namespace efla {
namespace {

using Texts = std::vector<std::string>;

// `line` may be broken for the reader of this page.
EvalSample read(const std::string& task, std::string line) {
  std::replace(line.begin(), line.end(), '\n', ' ');
  return task_spec(task).read(parse_task_records(line, "file.jsonl").at(0));
}

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

void expect_question(const EvalSample& sample, const std::string& context, const Texts& choices,
                     int64_t gold) {
  EXPECT_EQ(sample.contexts, Texts{context});
  EXPECT_EQ(sample.choices, choices);
  ASSERT_EQ(sample.continuations.size(), choices.size());
  for (size_t i = 0; i < choices.size(); ++i) {
    EXPECT_EQ(sample.continuations[i], " " + choices[i]);
  }
  EXPECT_EQ(sample.gold, gold);
}

TEST(TaskFormats, Lambada) {
  for (const char* line : {R"({"text": "He went  to the shop"})",
                           R"({"context": "He went  to the", "continuation": "shop"})"}) {
    const EvalSample sample = read("lambada_openai", line);
    EXPECT_EQ(sample.contexts, Texts{"He went  to the"});
    EXPECT_EQ(sample.continuations, Texts{" shop"});
    EXPECT_EQ(sample.as_example(), "He went  to the  shop\n\n");  // two blanks, as in the harness
  }
}

TEST(TaskFormats, Piqa) {
  for (const char* line :
       {R"({"goal": "dresser", "sol1": "replace", "sol2": "woodgrain", "label": 1})",
        R"({"query": "Question: dresser\n", "choices": ["replace", "woodgrain"], "gold": 1})"}) {
    const EvalSample sample = read("piqa", line);
    expect_question(sample, "Question: dresser\nAnswer:", {"replace", "woodgrain"}, 1);
    EXPECT_EQ(sample.as_example(), "Question: dresser\nAnswer: woodgrain\n\n");
  }
}

TEST(TaskFormats, Hellaswag) {
  expect_question(
      read("hellaswag",
           R"({"ind": 4, "activity_label": "Roof", "ctx_a": "A man sits.", "ctx_b": "he Then",
               "ctx": "", "endings": ["is [step]  up.", "rests.", "a", "b"], "label": "2"})"),
      "Roof: A man sits. He then", {"is  up.", "rests.", "a", "b"}, 2);
}

TEST(TaskFormats, Winogrande) {
  for (const char* line : {R"({"qID": "1", "sentence": "Ann met Bea so _ smiled.", "option1": "Ann",
            "option2": "Bea", "answer": "2"})",
                           R"({"context_options": ["Ann met Bea so Ann", "Ann met Bea so Bea"],
            "continuation": "smiled.", "gold": 1})"}) {
    const EvalSample sample = read("winogrande", line);
    EXPECT_EQ(sample.contexts, (Texts{"Ann met Bea so Ann", "Ann met Bea so Bea"}));
    EXPECT_EQ(sample.continuations, Texts{" smiled."});
    EXPECT_EQ(sample.request_count(), 2u);
    EXPECT_EQ(sample.gold, 1);
    EXPECT_EQ(sample.as_example(), "Ann met Bea so Bea smiled.\n\n");
  }
}

TEST(TaskFormats, ArcAndOpenBookQa) {
  const std::string nested =
      R"({"id": "M1", "question": {"stem": "Why?", "choices": [{"text": "x", "label": "1"},
          {"text": "y", "label": "2"}]}, "answerKey": "2"})";
  const std::string columns =
      R"({"question": "Why?", "choices": {"text": ["x", "y"], "label": ["A", "B"]},
          "answerKey": "B"})";
  const std::string query = R"({"query": "Question: Why?", "choices": ["x", "y"], "gold": 1})";
  for (const std::string& line : {nested, columns, query}) {
    expect_question(read("arc_easy", line), "Question: Why?\nAnswer:", {"x", "y"}, 1);
    expect_question(read("arc_challenge", line), "Question: Why?\nAnswer:", {"x", "y"}, 1);
  }
  expect_question(read("openbookqa", nested), "Why?", {"x", "y"}, 1);
  expect_question(
      read("openbookqa",
           R"({"question_stem": "Why?", "choices": {"text": ["x", "y"], "label": ["A", "B"]},
               "answerKey": " B"})"),
      "Why?", {"x", "y"}, 1);
  expect_question(read("openbookqa", R"({"query": "Why?", "choices": ["x", "y"], "gold": 0})"),
                  "Why?", {"x", "y"}, 0);
}

TEST(TaskFormats, BoolQ) {
  for (const char* line :
       {R"({"question": "is it", "passage": "P.", "answer": true, "title": "t"})",
        R"({"question": "is it", "passage": "P.", "label": true, "idx": 3})",
        R"({"question": "is it", "passage": "P.", "label": 1, "idx": 3})",
        R"({"query": "Passage: P.\nQuestion: is it?\n", "choices": ["no", "yes"], "gold": 1})"}) {
    expect_question(read("boolq", line), "P.\nQuestion: is it?\nAnswer:", {"no", "yes"}, 1);
  }
}

TEST(TaskFormats, SciQ) {
  expect_question(
      read("sciq", R"({"question": "Q?", "distractor1": "a", "distractor2": "b", "distractor3": "c",
                       "correct_answer": "d", "support": " S."})"),
      "S.\nQuestion: Q?\nAnswer:", {"a", "b", "c", "d"}, 3);
}

TEST(TaskFormats, CopaHasTwoBlanks) {
  for (const char* line :
       {R"({"premise": "It fell.", "choice1": "We ran.", "choice2": "I sat.", "question": "effect",
            "label": 1})",
        R"({"query": "It fell, therefore", "choices": ["we ran.", "i sat."], "gold": 1})"}) {
    const EvalSample sample = read("copa", line);
    expect_question(sample, "It fell therefore", {" we ran.", " i sat."}, 1);
    EXPECT_EQ(sample.as_example(), "It fell therefore  i sat.\n\n");
  }
  EXPECT_EQ(read("copa", R"({"premise": "It fell.", "choice1": "a", "choice2": "b",
                             "question": "cause", "label": 0})")
                .contexts,
            Texts{"It fell because"});
}

// Each sentence names file and line and what is wrong there.
TEST(TaskErrors, BadRecords) {
  const auto expect = [](const std::string& task, const std::string& line,
                         const std::string& part) {
    const std::string message = error_of([&] { read(task, line); });
    EXPECT_EQ(message.find("file.jsonl:1"), 0u) << message;
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  expect("piqa", R"({"goal": "g", "sol1": "a", "label": 0})", "\"sol2\" is missing");
  expect("piqa", R"({"goal": 3, "sol1": "a", "sol2": "b", "label": 0})", "\"goal\" must be a text");
  expect("piqa", R"({"goal": "g", "sol1": "a", "sol2": "b", "label": 2})", "number 2");
  expect("piqa", R"({"goal": "g", "sol1": "a", "sol2": "b", "label": "x"})", "must be an integer");
  expect("piqa", R"({"goal": "g", "sol1": "a", "sol2": " ", "label": 0})", "choice 2 is empty");
  expect("piqa", R"({"query": "q", "choices": ["a"], "gold": 0})", "two choices or more");
  expect("piqa", R"({"query": "q", "choices": "ab", "gold": 0})", "list of texts");
  expect("piqa", R"({"query": "q", "choices": ["a", "b"], "gold": -1})", "number -1");
  expect("piqa", R"(3)", "is not a JSON object");
  expect("piqa", R"({"goal": )", "is not valid JSON");
  expect("arc_easy", R"({"question": "q", "choices": {"text": ["x", "y"], "label": ["A", "B"]},
                         "answerKey": "E"})",
         "the answer \"E\" is none of the labels A, B");
  expect("arc_easy", R"({"question": "q", "choices": {"text": ["x", "y"], "label": ["A"]},
                         "answerKey": "A"})",
         "2 choices but 1 labels");
  expect("openbookqa", R"({"question": {"stem": "q", "choices": [3]}, "answerKey": "A"})",
         "\"text\" and a \"label\"");
  expect("winogrande", R"({"sentence": "no blank", "option1": "a", "option2": "b",
                           "answer": "1"})",
         "no \"_\"");
  expect("winogrande", R"({"sentence": "a _ b", "option1": "a", "option2": "b", "answer": ""})",
         "none of the labels 1, 2");
  expect("winogrande", R"({"sentence": "a _", "option1": "a", "option2": "b", "answer": "1"})",
         "nothing follows");
  expect("lambada_openai", R"({"text": "word"})", "one word");
  expect("lambada_openai", R"({"text": "two words "})", "last word is empty");
  expect("copa", R"({"premise": "p.", "choice1": "a", "choice2": "b", "question": "why",
                     "label": 0})",
         "neither cause nor effect");
}

TEST(TaskErrors, NameTheLine) {
  const std::string good = R"({"query": "q", "choices": ["a", "b"], "gold": 0})";
  const auto message = [](const std::string& text) {
    return error_of([&] {
      for (const TaskRecord& record : parse_task_records(text, "f")) task_spec("piqa").read(record);
    });
  };
  EXPECT_EQ(message(good + "\n\n" + good), "no error");
  EXPECT_EQ(message(good + "\n\n{}\n").find("f:3: "), 0u);
  EXPECT_EQ(message("[" + good + ",\n " + good + "]"), "no error");
  EXPECT_EQ(message("[" + good + ",\n {\"query\": \"]},{\\\"\"}]").find("f:2: "), 0u);
  EXPECT_EQ(message("[" + good + ",\n oops]").find("f:2 is not valid JSON"), 0u);
  EXPECT_NE(message("[" + good + ",\n").find("does not end"), std::string::npos);
  EXPECT_NE(message("\xff").find("UTF-8"), std::string::npos);
}

TEST(TaskErrors, UnknownNames) {
  EXPECT_NE(error_of([] { task_spec("piqua"); }).find("piqa"), std::string::npos);
}

class TaskFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(::testing::TempDir()) / "efla_tasks_test";
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_ / "piqa");
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string write(const std::string& name, const std::string& content) {
    write_file_atomically(folder_ / name, content);
    return (folder_ / name).string();
  }
  std::optional<EvalTask> load(const std::string& name, bool examples = false) {
    return load_task(task_spec(name), {folder_.string()}, examples);
  }
  std::filesystem::path folder_;
};

constexpr const char* kGoal = R"({"goal": "g", "sol1": "a", "sol2": "b"})";

TEST_F(TaskFiles, PiqaLabelsStandInTheirOwnFile) {
  write("piqa/valid.jsonl", std::string(kGoal) + "\n" + kGoal + "\n");
  EXPECT_NE(error_of([&] { load("piqa"); }).find("valid-labels.lst"), std::string::npos);
  write("piqa/valid-labels.lst", "1\n");
  EXPECT_NE(error_of([&] { load("piqa"); }).find("1 labels but"), std::string::npos);
  write("piqa/valid-labels.lst", "1\n2\n");
  EXPECT_NE(error_of([&] { load("piqa"); }).find("valid-labels.lst:2"), std::string::npos);
  write("piqa/valid-labels.lst", "1\n0\n");
  const auto task = load("piqa");
  ASSERT_TRUE(task);
  EXPECT_EQ(task->samples[0].gold, 1);
  EXPECT_EQ(task->samples[1].gold, 0);
}

TEST_F(TaskFiles, AbsentEmptyAndExamples) {
  EXPECT_FALSE(load("copa"));
  write("copa.jsonl", "\n");
  EXPECT_NE(error_of([&] { load("copa"); }).find("holds no records"), std::string::npos);
  const std::string line = R"({"query": "q", "choices": ["a", "b"], "gold": 0})";
  write("copa.jsonl", line + "\n" + line);
  EXPECT_EQ(load("copa")->samples.size(), 2u);
  EXPECT_TRUE(load("copa")->examples.empty());
  EXPECT_EQ(load("copa", true)->example_path, load("copa")->path);
  write("copa_train.jsonl", line);
  EXPECT_EQ(load("copa", true)->examples.size(), 1u);
}

TEST_F(TaskFiles, WikitextPagesCountTheOriginal) {
  const std::string page = " = T = \n a @-@ b ";
  write("wiki.test.raw", page + "\n = U = \n c");
  const auto task = load("wikitext");
  ASSERT_EQ(task->samples.size(), 2u);
  EXPECT_EQ(task->samples[0].continuations[0], " = T =\na-b ");
  EXPECT_EQ(task->samples[0].words, 8);  // "" = T = a @-@ b ""
  EXPECT_EQ(task->samples[0].bytes, static_cast<int64_t>(page.size()));
  EXPECT_NE(task->samples[1].origin.find("page 2"), std::string::npos);
}

}  // namespace
}  // namespace efla
