// Reference values were computed by CPython 3.11 and by lm-evaluation-harness 0.4.13's own
// function.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "efla/eval/python_random.h"
#include "efla/eval/python_text.h"
#include "efla/eval/task_formats.h"
#include "efla/eval/wikitext.h"

namespace efla {
namespace {

using Indices = std::vector<int64_t>;

TEST(PythonRandom, DrawsWhatCPythonDraws) {
  PythonRandom random(1234);
  EXPECT_EQ(random.uniform(), 0.9664535356921388);
  EXPECT_EQ(random.uniform(), 0.4407325991753527);
  EXPECT_EQ(random.uniform(), 0.007491470058587191);
  EXPECT_EQ(random.sample(10, 3), (Indices{9, 0, 1}));
  EXPECT_EQ(random.sample(1000, 4), (Indices{100, 784, 363, 242}));
  EXPECT_EQ(random.sample(100, 6), (Indices{2, 3, 44, 82, 79, 61}));
  EXPECT_EQ(random.sample(5000, 8), (Indices{3797, 1216, 747, 1499, 937, 119, 4121, 3987}));
  EXPECT_EQ(random.sample(60, 6), (Indices{56, 15, 4, 42, 34, 29}));

  PythonRandom zero(0);
  EXPECT_EQ(zero.uniform(), 0.8444218515250481);
  for (const int64_t expected : {757, 420, 258, 511, 404}) EXPECT_EQ(zero.choice(1000), expected);

  PythonRandom wide((uint64_t{1} << 40) + 5);
  EXPECT_EQ(wide.uniform(), 0.5043802970418443);
  EXPECT_EQ(wide.below(7), 2u);
  EXPECT_EQ(wide.below(1'000'000), 696042u);
}

TEST(PythonRandom, OutlivesItsFirstState) {
  PythonRandom random(7);
  double sum = 0;
  for (int i = 0; i < 100'000; ++i) sum += random.uniform();
  EXPECT_NEAR(sum / 100'000, 0.5, 0.01);
}

TEST(PythonText, StripsUnicodeWhiteSpace) {
  EXPECT_EQ(strip("\u2003 a b\u00a0\n"), "a b");
  EXPECT_EQ(strip_left(" \t a "), "a ");
  EXPECT_EQ(strip_right(" a\u3000"), " a");
  EXPECT_EQ(strip(" \n\u2028"), "");
  EXPECT_EQ(strip("\u200b"), "\u200b");  // a zero-width space is none to Python
}

TEST(PythonText, CountsCharacters) {
  EXPECT_EQ(count_characters(""), 0);
  EXPECT_EQ(count_characters("caf\u00e9 \U0001F600"), 6);
}

TEST(PythonText, Capitalizes) {
  EXPECT_EQ(capitalize("tHE McDonald"), "The mcdonald");
  EXPECT_EQ(capitalize("\u00e9COLE \u00c9T\u00c9"), "\u00c9cole \u00e9t\u00e9");
  EXPECT_EQ(capitalize(""), "");
  EXPECT_EQ(lower_first("The Bill"), "the Bill");
}

TEST(PythonText, ReplacesOnce) {
  EXPECT_EQ(replace_all("a    b", "  ", " "), "a  b");
  EXPECT_EQ(replace_all("aaa", "aa", "a"), "aa");
}

TEST(Hellaswag, CleansUpOneLineAtATime) {
  EXPECT_EQ(hellaswag_text("  Wash up [title] Use soap [step] and  water.   "),
            "Wash up. Use soap and water.");
  EXPECT_EQ(hellaswag_text("a [x\ny] b [[c] d] e"), "a [x\ny] b d] e");
}

TEST(Wikitext, DetokenizesAsTheHarness) {
  EXPECT_EQ(
      wikitext_detokenize(
          " = Robert = \n \n He had a guest @-@ starring role ( in 2 @,@ 000 ) ; the \" Bill \" , "
          "1 @.@ 5 : Teddy 's Story . \n [ x  ] { y } 20 \u00b0 C , ' quoted ' . N . \n = = Career "
          "= = \n \n = = = Early = = = \n = = = = Deep = = = = \n"),
      " = Robert =\n\nHe had a guest-starring role (in 2,000); the \"Bill\", 1.5: Teddy's "
      "Story.\n[x] {y} 20\u00b0C,' quoted '. N.\n== Career ==\n\n=== Early ===\n==== Deep ====\n");
  EXPECT_EQ(
      wikitext_detokenize("the boys ' toys /' 9/ unclosed ( paren \n '' and \"\" plus ( a ( b "
                          ") c ) ! Why ? yes\u00a0( \u2003x\u3000) '"),
      "the boys'toys /'[0-9]/ unclosed (paren\n'' and \"\" plus ( a ( b) c )! Why? "
      "yes\u00a0(x) '");
  EXPECT_EQ(wikitext_detokenize("it cost N dollars , Teddy 's N N"),
            "it cost 1 dollars, Teddy's 1 N");
  EXPECT_EQ(wikitext_detokenize(""), "");
}

TEST(Wikitext, SplitsAtFirstLevelHeadings) {
  const std::vector<std::string> pages =
      wikitext_pages(" \n = One = \n text \n = = Part = = \n more\n = Two = \n end \n");
  ASSERT_EQ(pages.size(), 2u);
  EXPECT_EQ(pages[0], " = One = \n text \n = = Part = = \n more");
  EXPECT_EQ(pages[1], " = Two = \n end \n");
  EXPECT_EQ(wikitext_pages("no heading"), std::vector<std::string>{"no heading"});
  EXPECT_TRUE(wikitext_pages(" \n \n").empty());
}

}  // namespace
}  // namespace efla
