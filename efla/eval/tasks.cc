#include "efla/eval/tasks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>

#include "efla/eval/python_text.h"
#include "efla/eval/task_formats.h"
#include "efla/eval/wikitext.h"
#include "efla/io/documents.h"
#include "efla/io/error.h"
#include "efla/io/utf8.h"

namespace efla {
namespace {

namespace fs = std::filesystem;

constexpr TaskKind kChoice = TaskKind::kMultipleChoice;

std::vector<TaskSpec> make_specs() {
  const auto arc = [](const std::string& name, const std::string& set) {
    const auto files = [&set](const std::string& split) {
      const std::string file = set + "/" + set + "-" + split + ".jsonl";
      return std::vector<std::string>{file, "ARC-V1-Feb2018-2/" + file,
                                      set + "-" + split + ".jsonl"};
    };
    TaskSpec spec{name, kChoice, files("Test"), files("Train"), true, true, "acc", read_arc};
    spec.files.insert(spec.files.begin(), name + ".jsonl");
    spec.train_files.insert(spec.train_files.begin(), name + "_train.jsonl");
    return spec;
  };
  std::vector<TaskSpec> specs = {
      {"wikitext",
       TaskKind::kRolling,
       {"wikitext.jsonl", "wiki.test.raw", "wikitext-2-raw/wiki.test.raw", "wiki.test.tokens",
        "wikitext-2/wiki.test.tokens", "wikitext2/test.txt"},
       {},
       true,
       false,
       "word_perplexity",
       nullptr},
      {"lambada_openai",
       TaskKind::kLastWord,
       {"lambada_openai.jsonl", "lambada_test_en.jsonl", "lambada_test.jsonl"},
       {"lambada_openai_train.jsonl"},
       true,
       false,
       "perplexity",
       read_lambada},
      {"piqa",
       kChoice,
       {"piqa.jsonl", "piqa/valid.jsonl", "physicaliqa-train-dev/dev.jsonl"},
       {"piqa_train.jsonl", "piqa/train.jsonl", "physicaliqa-train-dev/train.jsonl"},
       false,
       true,
       "acc",
       read_piqa},
      {"hellaswag",
       kChoice,
       {"hellaswag.jsonl", "hellaswag_val.jsonl", "hellaswag/hellaswag_val.jsonl"},
       {"hellaswag_train.jsonl", "hellaswag/hellaswag_train.jsonl"},
       false,
       true,
       "acc_norm",
       read_hellaswag},
      {"winogrande",
       kChoice,
       {"winogrande.jsonl", "winogrande/dev.jsonl", "winogrande_1.1/dev.jsonl"},
       {"winogrande_train.jsonl", "winogrande/train_xl.jsonl", "winogrande_1.1/train_xl.jsonl"},
       false,
       false,
       "acc",
       read_winogrande},
      arc("arc_easy", "ARC-Easy"),
      arc("arc_challenge", "ARC-Challenge"),
      {"boolq",
       kChoice,
       {"boolq.jsonl", "boolq/dev.jsonl", "BoolQ/val.jsonl"},
       {"boolq_train.jsonl", "boolq/train.jsonl", "BoolQ/train.jsonl"},
       false,
       true,
       "acc",
       read_boolq},
      {"openbookqa",
       kChoice,
       {"openbookqa.jsonl", "openbook_qa.jsonl", "openbookqa/test.jsonl",
        "OpenBookQA-V1-Sep2018/Data/Main/test.jsonl"},
       {"openbookqa_train.jsonl", "openbook_qa_train.jsonl", "openbookqa/train.jsonl",
        "OpenBookQA-V1-Sep2018/Data/Main/train.jsonl"},
       true,
       true,
       "acc_norm",
       read_openbookqa},
      {"sciq",
       kChoice,
       {"sciq.jsonl", "sciq.json", "sciq/test.json", "SciQ dataset-2 3/test.json"},
       {"sciq_train.jsonl", "sciq/train.json", "SciQ dataset-2 3/train.json"},
       true,
       true,
       "acc",
       read_sciq},
      {"copa",
       kChoice,
       {"copa.jsonl", "COPA/val.jsonl", "copa/val.jsonl"},
       {"copa_train.jsonl", "COPA/train.jsonl", "copa/train.jsonl"},
       false,
       true,
       "acc",
       read_copa},
      {"wsc273",
       kChoice,
       {"winograd_wsc.jsonl", "wsc273.jsonl"},
       {},
       true,
       false,
       "acc",
       read_winograd},
  };
  for (TaskSpec& spec : specs) {
    if (spec.name == "arc_challenge") spec.headline = "acc_norm";
  }
  return specs;
}

// PIQA's authors keep the answers in a file of their own: valid.jsonl, valid-labels.lst.
void add_labels(std::vector<TaskRecord>& records, const std::string& path) {
  if (records.empty() || records[0].has("label") || records[0].has("query")) return;
  fs::path base = path;
  if (base.extension() == ".gz" || base.extension() == ".xz") base.replace_extension();
  const std::string name = base.stem().string() + "-labels.lst";
  const std::string labels_path = find_task_file({name}, {base.parent_path().string()});
  if (labels_path.empty()) {
    throw Error(fmt::format("{}: the answers are missing; put {} beside it", path, name));
  }
  const std::vector<std::string> labels = read_lines(labels_path);
  if (labels.size() != records.size()) {
    throw Error(fmt::format("{} holds {} labels but {} holds {} questions; they must be of one set",
                            labels_path, labels.size(), path, records.size()));
  }
  for (size_t i = 0; i < records.size(); ++i) {
    if (labels[i] != "0" && labels[i] != "1") {
      throw Error(
          fmt::format("{}:{}: the label \"{}\" is neither 0 nor 1", labels_path, i + 1, labels[i]));
    }
    nlohmann::json object = records[i].object();
    object["label"] = labels[i] == "1" ? 1 : 0;
    records[i] = TaskRecord(std::move(object), records[i].origin());
  }
}

std::vector<EvalSample> read_pages(const std::string& path) {
  std::vector<EvalSample> samples;
  const std::string name = fs::path(path).filename().string();
  if (name.find(".jsonl") != std::string::npos) {
    for (const TaskRecord& record : read_task_records(path)) {
      samples.push_back(wikitext_sample(record.full_text("page"), record.origin()));
    }
    return samples;
  }
  const std::string text = read_text_file(path);
  validate_utf8(text, path);
  for (const std::string& page : wikitext_pages(text)) {
    samples.push_back(wikitext_sample(page, fmt::format("{} page {}", path, samples.size() + 1)));
  }
  return samples;
}

}  // namespace

std::string EvalSample::as_example() const {
  const auto answer = static_cast<size_t>(gold);
  const std::string& context = contexts.size() == 1 ? contexts[0] : contexts[answer];
  // Of one continuation for all, what follows the delimiter; else the choice, which may begin with
  // a blank of its own.
  const std::string text = continuations.size() == 1 && contexts.size() > 1
                               ? continuations[0].substr(1)
                               : choices[answer];
  return context + " " + text + "\n\n";
}

const std::vector<TaskSpec>& task_specs() {
  static const std::vector<TaskSpec> specs = make_specs();
  return specs;
}

const TaskSpec& task_spec(const std::string& name) {
  std::vector<std::string> names;
  for (const TaskSpec& spec : task_specs()) {
    if (spec.name == name) return spec;
    names.push_back(spec.name);
  }
  throw UsageError(fmt::format("\"{}\" is none of the tasks: {}", name, fmt::join(names, ", ")));
}

std::string find_task_file(const std::vector<std::string>& names,
                           const std::vector<std::string>& folders) {
  for (const std::string& folder : folders) {
    for (const std::string& name : names) {
      for (const char* suffix : {"", ".gz", ".xz"}) {
        const fs::path path = fs::path(folder) / (name + suffix);
        std::error_code ignored;
        if (fs::is_regular_file(path, ignored)) return path.string();
      }
    }
  }
  return "";
}

std::vector<EvalSample> read_samples(const TaskSpec& spec, const std::string& path) {
  std::vector<EvalSample> samples;
  if (spec.kind == TaskKind::kRolling) {
    samples = read_pages(path);
  } else {
    std::vector<TaskRecord> records = read_task_records(path);
    if (spec.name == "piqa") add_labels(records, path);
    for (const TaskRecord& record : records) samples.push_back(spec.read(record));
  }
  if (samples.empty()) throw Error(path + " holds no records; restore the file");
  return samples;
}

std::optional<EvalTask> load_task(const TaskSpec& spec, const std::vector<std::string>& folders,
                                  bool examples) {
  EvalTask task{spec, find_task_file(spec.files, folders), {}, "", {}};
  if (task.path.empty()) return std::nullopt;
  task.samples = read_samples(spec, task.path);
  if (!examples || spec.kind == TaskKind::kRolling) return task;
  task.example_path = find_task_file(spec.train_files, folders);
  if (task.example_path.empty()) task.example_path = task.path;
  task.examples =
      task.example_path == task.path ? task.samples : read_samples(spec, task.example_path);
  return task;
}

}  // namespace efla
