#include "efla/eval/task_formats.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "efla/eval/python_text.h"
#include "efla/eval/text_documents.h"
#include "efla/eval/wikitext.h"

namespace efla {
namespace {

// A question whose choices follow one context.
EvalSample question(const TaskRecord& record, std::string context, std::vector<std::string> choices,
                    int64_t gold) {
  if (choices.size() < 2) {
    record.fail(fmt::format("there must be two choices or more, not {}", choices.size()));
  }
  for (size_t i = 0; i < choices.size(); ++i) {
    if (strip(choices[i]).empty()) record.fail(fmt::format("choice {} is empty", i + 1));
  }
  if (gold < 0 || gold >= static_cast<int64_t>(choices.size())) {
    record.fail(fmt::format("the right choice is number {} counted from 0, but there are {}", gold,
                            choices.size()));
  }
  EvalSample sample;
  sample.origin = record.origin();
  sample.contexts = {std::move(context)};
  for (const std::string& choice : choices) sample.continuations.push_back(" " + choice);
  sample.choices = std::move(choices);
  sample.gold = gold;
  return sample;
}

// {query, choices, gold}.
bool is_query(const TaskRecord& record) { return record.has("query"); }

EvalSample read_query(const TaskRecord& record, std::string context) {
  return question(record, std::move(context), record.texts("choices"), record.integer("gold"));
}

// Several contexts with one continuation behind each.
EvalSample two_contexts(const TaskRecord& record, std::vector<std::string> contexts,
                        std::string_view continuation, int64_t gold) {
  const std::string_view text = strip(continuation);
  if (text.empty()) record.fail("nothing follows the blank, so there is nothing to compare");
  EvalSample sample = question(record, "", contexts, gold);
  sample.contexts = std::move(contexts);
  sample.continuations = {" " + std::string(text)};
  return sample;
}

EvalSample read_context_options(const TaskRecord& record) {
  return two_contexts(record, record.texts("context_options"), record.full_text("continuation"),
                      record.integer("gold"));
}

// Choices with labels: {"text": [...], "label": [...]} or [{"text", "label"}, ...].
struct LabelledChoices {
  std::vector<std::string> texts, labels;
};

LabelledChoices labelled_choices(const TaskRecord& holder) {
  LabelledChoices choices;
  const nlohmann::json& value = holder.at("choices");
  if (value.is_object()) {
    const TaskRecord columns(value, holder.origin());
    choices.texts = columns.texts("text");
    choices.labels = columns.texts("label");
    if (choices.texts.size() != choices.labels.size()) {
      holder.fail(fmt::format("there are {} choices but {} labels", choices.texts.size(),
                              choices.labels.size()));
    }
    return choices;
  }
  if (!value.is_array()) holder.fail("the field \"choices\" must be a list");
  for (const nlohmann::json& element : value) {
    if (!element.is_object()) holder.fail("every choice must have a \"text\" and a \"label\"");
    const TaskRecord choice(element, holder.origin());
    choices.texts.push_back(choice.text("text"));
    choices.labels.push_back(choice.text("label"));
  }
  return choices;
}

int64_t gold_of_label(const TaskRecord& record, const LabelledChoices& choices,
                      std::string_view label) {
  const auto found = std::find(choices.labels.begin(), choices.labels.end(), label);
  if (found == choices.labels.end()) {
    record.fail(fmt::format("the answer \"{}\" is none of the labels {}", label,
                            fmt::join(choices.labels, ", ")));
  }
  return found - choices.labels.begin();
}

// The record that holds stem and choices: "question" in the authors' files, else the record itself.
TaskRecord question_part(const TaskRecord& record) {
  if (record.has("question") && record.at("question").is_object()) {
    return {record.at("question"), record.origin()};
  }
  return record;
}

std::string with_answer(std::string_view question) { return std::string(question) + "\nAnswer:"; }

}  // namespace

EvalSample read_lambada(const TaskRecord& record) {
  EvalSample sample;
  sample.origin = record.origin();
  std::string context, word;
  if (record.has("continuation")) {
    context = record.text("context");
    word = record.full_text("continuation");
  } else {
    const std::string text = record.full_text("text");
    const size_t blank = text.rfind(' ');
    if (blank == std::string::npos) record.fail("the text has one word, so nothing precedes it");
    context = text.substr(0, blank);
    word = text.substr(blank + 1);
    if (word.empty()) record.fail("the text ends in a blank, so its last word is empty");
  }
  sample.contexts = {context};
  sample.continuations = {" " + word};
  sample.choices = {" " + word};
  return sample;
}

EvalSample read_piqa(const TaskRecord& record) {
  if (is_query(record)) {
    return read_query(record, with_answer(strip_right(record.full_text("query"))));
  }
  return question(record, with_answer("Question: " + record.text("goal")),
                  {record.text("sol1"), record.text("sol2")}, record.integer("label"));
}

std::string hellaswag_text(std::string_view raw) {
  std::string text = replace_all(strip(raw), " [title]", ". ");
  // re.sub(r"\[.*?\]", ""): up to the next closing bracket of the same line.
  for (size_t begin = 0; (begin = text.find('[', begin)) != std::string::npos;) {
    const size_t end = text.find_first_of("]\n", begin);
    if (end != std::string::npos && text[end] == ']') {
      text.erase(begin, end + 1 - begin);
    } else {
      ++begin;
    }
  }
  return replace_all(text, "  ", " ");
}

EvalSample read_hellaswag(const TaskRecord& record) {
  if (is_query(record)) return read_query(record, record.full_text("query"));
  const std::string context = record.text("activity_label") + ": " + record.text("ctx_a") + " " +
                              capitalize(record.text("ctx_b"));
  std::vector<std::string> endings;
  for (const std::string& ending : record.texts("endings")) {
    endings.push_back(hellaswag_text(ending));
  }
  return question(record, hellaswag_text(context), endings, record.integer("label"));
}

EvalSample read_winogrande(const TaskRecord& record) {
  if (record.has("context_options")) return read_context_options(record);
  const std::string sentence = record.full_text("sentence");
  const size_t blank = sentence.find('_');
  if (blank == std::string::npos) record.fail("the sentence has no \"_\" to fill");
  const std::string answer = record.text("answer");
  if (answer != "1" && answer != "2") {
    record.fail(fmt::format("the answer \"{}\" is none of the labels 1, 2", answer));
  }
  const std::string before = sentence.substr(0, blank);
  return two_contexts(record,
                      {before + record.full_text("option1"), before + record.full_text("option2")},
                      std::string_view(sentence).substr(blank + 1), answer == "1" ? 0 : 1);
}

EvalSample read_arc(const TaskRecord& record) {
  if (is_query(record)) {
    return read_query(record, with_answer(strip_right(record.full_text("query"))));
  }
  const TaskRecord part = question_part(record);
  const std::string stem = part.full_text(part.has("stem") ? "stem" : "question");
  const LabelledChoices choices = labelled_choices(part);
  return question(record, with_answer("Question: " + stem), choices.texts,
                  gold_of_label(record, choices, record.text("answerKey")));
}

EvalSample read_boolq(const TaskRecord& record) {
  if (is_query(record)) {
    const std::string query = record.full_text("query");
    std::string_view text = strip_right(query);
    constexpr std::string_view kPassage = "Passage: ";
    if (text.starts_with(kPassage)) text.remove_prefix(kPassage.size());
    return read_query(record, with_answer(text));
  }
  const std::string answer = record.has("label") ? "label" : "answer";
  return question(
      record,
      with_answer(record.text("passage") + "\nQuestion: " + record.full_text("question") + "?"),
      {"no", "yes"}, record.integer(answer));
}

EvalSample read_openbookqa(const TaskRecord& record) {
  if (is_query(record)) return read_query(record, record.full_text("query"));
  const TaskRecord part = question_part(record);
  const std::string stem = part.full_text(part.has("stem") ? "stem" : "question_stem");
  const LabelledChoices choices = labelled_choices(part);
  const std::string answer = record.text("answerKey");
  return question(record, stem, choices.texts, gold_of_label(record, choices, strip_left(answer)));
}

EvalSample read_sciq(const TaskRecord& record) {
  if (is_query(record)) return read_query(record, record.full_text("query"));
  const std::string support = record.text("support");
  const std::string context =
      std::string(strip_left(support)) + "\nQuestion: " + record.full_text("question");
  return question(record, with_answer(context),
                  {record.text("distractor1"), record.text("distractor2"),
                   record.text("distractor3"), record.text("correct_answer")},
                  3);
}

EvalSample read_copa(const TaskRecord& record) {
  // The choices begin with a blank of their own, so two stand before the continuation.
  if (is_query(record)) {
    std::string context = record.full_text("query");
    for (const char* connector : {"because", "therefore"}) {
      const std::string with_comma = std::string(", ") + connector;
      if (context.ends_with(with_comma)) {
        context = context.substr(0, context.size() - with_comma.size()) + " " + connector;
      }
    }
    std::vector<std::string> choices;
    for (const std::string& choice : record.texts("choices")) choices.push_back(" " + choice);
    return question(record, context, choices, record.integer("gold"));
  }
  const std::string asked = record.text("question");
  if (asked != "cause" && asked != "effect") {
    record.fail(fmt::format("the question \"{}\" is neither cause nor effect", asked));
  }
  const std::string full_premise = record.full_text("premise");
  std::string_view premise = strip(full_premise);
  premise.remove_suffix(1);  // the full stop
  return question(record, std::string(premise) + (asked == "cause" ? " because" : " therefore"),
                  {" " + lower_first(record.full_text("choice1")),
                   " " + lower_first(record.full_text("choice2"))},
                  record.integer("label"));
}

EvalSample read_winograd(const TaskRecord& record) { return read_context_options(record); }

EvalSample wikitext_sample(const std::string& page, const std::string& origin) {
  EvalSample sample;
  sample.origin = origin;
  sample.contexts = {""};
  sample.continuations = {wikitext_detokenize(page)};
  sample.choices = sample.continuations;
  sample.words = lm_eval_words(page);
  sample.bytes = static_cast<int64_t>(page.size());
  return sample;
}

}  // namespace efla
