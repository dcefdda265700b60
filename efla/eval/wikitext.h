// WikiText as lm-evaluation-harness's task reads it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace efla {

/// The text as it was before WikiText was tokenised, by the task's rules in the task's order.
std::string wikitext_detokenize(std::string_view page);

/// The articles of a wiki.*.raw or wiki.*.tokens file: a new one begins at each heading of the
/// first level (" = Title = "). What they are split from is their lines joined by newlines again.
std::vector<std::string> wikitext_pages(std::string_view text);

}  // namespace efla
