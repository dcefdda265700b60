#include "efla/eval/loglikelihood.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "efla/eval/packed_reader.h"
#include "efla/io/error.h"

namespace efla {
namespace {

// Below this many tokens saved, copying the state costs more than reading again.
constexpr int64_t kMinSaved = 16;

// What a request's model reads: its tokens without the last.
class Row {
 public:
  Row(const LikelihoodRequest& request, Likelihood* result) : request_(&request), result_(result) {}

  int64_t length() const {
    return static_cast<int64_t>(request_->context.size() + request_->continuation.size()) - 1;
  }
  int32_t token(int64_t i) const {
    const auto at = static_cast<size_t>(i), before = request_->context.size();
    return at < before ? request_->context[at] : request_->continuation[at - before];
  }
  /// Reads [begin, end) as `sequence` of the reader; what it predicts there is added to the result.
  void append_to(PackedReader& reader, int64_t begin, int64_t end) const {
    for (int64_t i = begin; i < end; ++i) reader.append(token(i));
    want(reader, begin, end);
  }
  /// Predictions after tokens [begin, end), which are the last that the reader was given.
  void want(PackedReader& reader, int64_t begin, int64_t end) const {
    const int64_t first = static_cast<int64_t>(request_->context.size()) - 1;
    for (int64_t i = std::max(begin, first); i < end; ++i) {
      reader.want(end - i, token(i + 1), result_);
    }
  }

 private:
  const LikelihoodRequest* request_;
  Likelihood* result_;
};

// Rows that have their first `shared` tokens in common.
struct Unit {
  size_t group = 0;
  std::vector<Row> rows;
  int64_t shared = 0;

  int64_t branch_tokens() const {
    int64_t tokens = 0;
    for (const Row& row : rows) tokens += row.length() - shared;
    return tokens;
  }
  int64_t tokens() const { return shared + branch_tokens(); }
};

int64_t common_length(const std::vector<Row>& rows) {
  int64_t length = rows[0].length();
  for (const Row& row : rows) {
    length = std::min(length, row.length());
    int64_t same = 0;
    while (same < length && row.token(same) == rows[0].token(same)) ++same;
    length = same;
  }
  return length;
}

// A group as one unit if its rows share enough, else as one for each row.
void add_units(std::vector<Unit>& units, size_t group, std::vector<Row> rows, bool share) {
  const int64_t common = share && rows.size() > 1 ? common_length(rows) : 0;
  if (common * (static_cast<int64_t>(rows.size()) - 1) >= kMinSaved) {
    units.push_back({group, std::move(rows), common});
    return;
  }
  for (Row& row : rows) units.push_back({group, {row}, row.length()});
}

void check(const std::vector<RequestGroup>& groups, int64_t vocab) {
  const auto check_tokens = [vocab](const std::vector<int32_t>& tokens, const char* what) {
    if (tokens.empty()) throw Error(fmt::format("a {} holds no token", what));
    for (const int32_t token : tokens) {
      if (token >= 0 && token < vocab) continue;
      throw Error(fmt::format(
          "token {} is outside the model's vocabulary of {}; use the tokenizer that the model was "
          "trained with",
          token, vocab));
    }
  };
  for (const RequestGroup& group : groups) {
    for (const LikelihoodRequest& request : group) {
      check_tokens(request.context, "context");
      check_tokens(request.continuation, "continuation");
    }
  }
}

// Reads units and fills their results.
class Evaluation {
 public:
  Evaluation(LanguageModel model, const LikelihoodOptions& options)
      : reader_(std::move(model)), options_(options) {}

  // Reads units[first], ... as far as they fit into one call; returns the index behind the last.
  size_t run(const std::vector<Unit>& units, size_t first) {
    const int64_t max_rows = reader_.max_rows();
    size_t last = first;
    int64_t tokens = 0;
    bool branches = false;
    do {
      tokens += units[last].shared;
      branches = branches || units[last].branch_tokens() > 0;
      ++last;
    } while (last < units.size() && static_cast<int64_t>(last - first) < max_rows &&
             tokens + units[last].shared <= options_.batch_tokens);
    for (size_t i = first; i < last; ++i) {
      const Unit& unit = units[i];
      reader_.begin_sequence();
      unit.rows[0].append_to(reader_, 0, unit.shared);
      for (size_t row = 1; row < unit.rows.size(); ++row) {
        unit.rows[row].want(reader_, 0, unit.shared);
      }
    }
    Cache cache;
    reader_.read(branches ? &cache : nullptr);
    if (branches) run_branches({units.data() + first, last - first}, cache);
    return last;
  }

  int64_t tokens_read() const { return reader_.tokens_read(); }

 private:
  struct Branch {
    const Row* row;
    int64_t begin, parent;  // parent: row of the cache
  };

  void run_branches(std::span<const Unit> units, const Cache& cache) {
    std::vector<Branch> branches;
    for (size_t i = 0; i < units.size(); ++i) {
      for (const Row& row : units[i].rows) {
        if (row.length() > units[i].shared) {
          branches.push_back({&row, units[i].shared, static_cast<int64_t>(i)});
        }
      }
    }
    for (size_t first = 0; first < branches.size();) {
      std::vector<int64_t> parents;
      int64_t tokens = 0;
      size_t last = first;
      do {
        const Branch& branch = branches[last++];
        parents.push_back(branch.parent);
        reader_.begin_sequence();
        branch.row->append_to(reader_, branch.begin, branch.row->length());
        tokens += branch.row->length() - branch.begin;
      } while (last < branches.size() && static_cast<int64_t>(last - first) < reader_.max_rows() &&
               tokens + branches[last].row->length() - branches[last].begin <=
                   options_.batch_tokens);
      Cache copies = cache.select(torch::tensor(parents, at::kLong));
      reader_.read(&copies);
      first = last;
    }
  }

  PackedReader reader_;
  const LikelihoodOptions& options_;
};

}  // namespace

std::vector<GroupLikelihoods> likelihoods(LanguageModel model,
                                          const std::vector<RequestGroup>& groups,
                                          const LikelihoodOptions& options, LikelihoodCost* cost) {
  if (options.batch_tokens < 1) {
    throw UsageError(fmt::format("batch_tokens is {} but must be 1 or more", options.batch_tokens));
  }
  check(groups, model->config().vocab_size);
  std::vector<GroupLikelihoods> results(groups.size());
  std::vector<size_t> units_left(groups.size());
  std::vector<Unit> units;
  LikelihoodCost counted;
  LikelihoodProgress progress;
  for (size_t g = 0; g < groups.size(); ++g) {
    results[g].resize(groups[g].size());
    std::vector<Row> rows;
    for (size_t i = 0; i < groups[g].size(); ++i) {
      rows.emplace_back(groups[g][i], &results[g][i]);
      counted.tokens_requested += rows.back().length();
    }
    if (rows.empty()) {
      if (options.on_group) options.on_group(g, results[g]);
      ++progress.groups_done;
      continue;
    }
    const size_t before = units.size();
    add_units(units, g, std::move(rows), options.share_contexts);
    units_left[g] = units.size() - before;
  }
  std::stable_sort(units.begin(), units.end(),
                   [](const Unit& a, const Unit& b) { return a.tokens() > b.tokens(); });

  for (const Unit& unit : units) progress.tokens += unit.tokens();
  Evaluation evaluation(std::move(model), options);
  for (size_t first = 0; first < units.size();) {
    const size_t last = evaluation.run(units, first);
    for (; first < last; ++first) {
      const size_t group = units[first].group;
      if (--units_left[group] > 0) continue;
      ++progress.groups_done;
      if (options.on_group) options.on_group(group, results[group]);
    }
    progress.tokens_done = evaluation.tokens_read();
    if (options.progress) options.progress(progress);
  }
  counted.tokens_read = evaluation.tokens_read();
  if (cost != nullptr) *cost = counted;
  return results;
}

}  // namespace efla
