#include "efla/eval/stop_strings.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>

#include "efla/io/error.h"

namespace efla {
namespace {

TEST(StopMatcher, PassesTextThroughWithoutStops) {
  StopMatcher matcher({});
  EXPECT_EQ(matcher.push("any"), "any");
  EXPECT_EQ(matcher.push(" text"), " text");
  EXPECT_EQ(matcher.finish(), "");
  EXPECT_FALSE(matcher.stopped());
}

TEST(StopMatcher, FindsAStopThatSpansPieces) {
  StopMatcher matcher({"\n\nEND"});
  EXPECT_EQ(matcher.push("one\n"), "one");
  EXPECT_EQ(matcher.push("\nE"), "");
  EXPECT_FALSE(matcher.stopped());
  EXPECT_EQ(matcher.push("ND and more"), "");
  EXPECT_TRUE(matcher.stopped());
  EXPECT_EQ(matcher.push("swallowed"), "");
  EXPECT_EQ(matcher.finish(), "");
}

TEST(StopMatcher, ReleasesAFalseBeginning) {
  StopMatcher matcher({"stop"});
  EXPECT_EQ(matcher.push("a st"), "a ");
  EXPECT_EQ(matcher.push("ep"), "step");
  EXPECT_EQ(matcher.push("s"), "");
  EXPECT_EQ(matcher.finish(), "s");
  EXPECT_FALSE(matcher.stopped());
}

TEST(StopMatcher, OverlappingBeginningsAreKept) {
  StopMatcher matcher({"aab"});
  EXPECT_EQ(matcher.push("aa"), "");
  EXPECT_EQ(matcher.push("a"), "a");
  EXPECT_EQ(matcher.push("b"), "");
  EXPECT_TRUE(matcher.stopped());
}

TEST(StopMatcher, EmptyStopIsRefused) { EXPECT_THROW(StopMatcher({"x", ""}), UsageError); }

// However the text is cut into pieces, what is shown ends where the first completed stop begins.
RC_GTEST_PROP(StopMatcher, EqualsSearchInTheWholeText, ()) {
  const auto letters = rc::gen::element('a', 'b');
  const auto text = *rc::gen::container<std::string>(letters);
  const auto stops = *rc::gen::container<std::vector<std::string>>(
      rc::gen::nonEmpty(rc::gen::container<std::string>(letters)));
  size_t end = std::string::npos;
  std::string expected = text;
  for (size_t i = 0; i < text.size() && end == std::string::npos; ++i) {
    size_t longest = 0;  // of the stops that end at i
    for (const std::string& stop : stops) {
      if (stop.size() <= i + 1 && text.compare(i + 1 - stop.size(), stop.size(), stop) == 0) {
        longest = std::max(longest, stop.size());
      }
    }
    if (longest > 0) {
      end = i + 1;
      expected = text.substr(0, end - longest);
    }
  }
  StopMatcher matcher(stops);
  std::string shown;
  for (size_t i = 0; i < text.size();) {
    const size_t length = *rc::gen::inRange<size_t>(1, 4);
    shown += matcher.push(text.substr(i, length));
    i += length;
  }
  const bool stopped = matcher.stopped();
  shown += matcher.finish();
  RC_ASSERT(shown == expected);
  RC_ASSERT(stopped == (end != std::string::npos));
}

}  // namespace
}  // namespace efla
