#include "efla/eval/wikitext.h"

#include "efla/eval/python_text.h"

namespace efla {
namespace {

// re.sub(r"OPEN\s*([^CLOSE]*?)\s*CLOSE", r"OPEN\1CLOSE"): what stands between an opening character
// and the next closing one loses the white space at its ends.
std::string strip_inside(std::string_view text, char open, char close) {
  std::string result;
  while (true) {
    const size_t begin = text.find(open);
    const size_t end = begin == std::string_view::npos ? begin : text.find(close, begin + 1);
    if (end == std::string_view::npos) return result.append(text);
    result.append(text.substr(0, begin + 1));
    result.append(strip(text.substr(begin + 1, end - begin - 1))).push_back(close);
    text.remove_prefix(end + 1);
  }
}

// re.sub(r"/' [0-9]/", r"/'[0-9]/"): the replacement is literal, digits and all. The slashes were
// hardly meant, so this practically never applies; it is part of the numbers in the literature.
std::string contracted_years(std::string_view text) {
  std::string result;
  for (size_t found; (found = text.find("/' ")) != std::string_view::npos;) {
    const std::string_view rest = text.substr(found + 3);
    const bool matches = rest.size() >= 2 && rest[0] >= '0' && rest[0] <= '9' && rest[1] == '/';
    result.append(text.substr(0, found)).append(matches ? "/'[0-9]/" : "/");
    text.remove_prefix(found + (matches ? 5 : 1));
  }
  return result.append(text);
}

bool is_title(std::string_view line) {
  const std::string collapsed = replace_all(replace_all(line, "= = =", "==="), "= =", "==");
  const std::string_view text = strip(collapsed);
  return text.starts_with("= ") && text.ends_with(" =");
}

}  // namespace

std::string wikitext_detokenize(std::string_view page) {
  std::string text = contracted_years(replace_all(page, "s '", "s'"));
  const auto replace = [&text](std::string_view from, std::string_view to) {
    text = replace_all(text, from, to);
  };
  replace(" @-@ ", "-");
  replace(" @,@ ", ",");
  replace(" @.@ ", ".");
  for (const char* mark : {":", ";", ".", "!", "?", ","}) {
    replace(" " + std::string(mark) + " ", std::string(mark) + " ");
  }
  text = strip_inside(text, '(', ')');
  text = strip_inside(text, '[', ']');
  text = strip_inside(text, '{', '}');
  text = strip_inside(text, '"', '"');
  text = strip_inside(text, '\'', '\'');
  replace("= = = =", "====");
  replace("= = =", "===");
  replace("= =", "==");
  replace(" \u00b0 ", "\u00b0");
  replace(" \n", "\n");
  replace("\n ", "\n");
  replace(" N ", " 1 ");
  replace(" 's", "'s");
  return text;
}

std::vector<std::string> wikitext_pages(std::string_view text) {
  std::vector<std::string> pages;
  std::string page;
  bool has_lines = false;
  const auto finish = [&] {
    if (!strip(page).empty()) pages.push_back(page);
    page.clear();
    has_lines = false;
  };
  while (true) {
    const size_t end = text.find('\n');
    const std::string_view line = text.substr(0, end);
    if (is_title(line)) finish();
    if (has_lines) page += '\n';
    page += line;
    has_lines = true;
    if (end == std::string_view::npos) break;
    text.remove_prefix(end + 1);
  }
  finish();
  return pages;
}

}  // namespace efla
