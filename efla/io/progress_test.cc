#include "efla/io/progress.h"

#include <fcntl.h>

#include <cmath>
#include <cstdlib>

#include "efla/io/test_util.h"

namespace efla {
namespace {

using testing::slurp;
using testing::TempFolder;

TEST(Progress, PlainLinesInALog) {
  const TempFolder folder;
  std::FILE* file = std::fopen((folder / "log").c_str(), "w");
  Progress::Options options;
  options.stream = file;
  options.log_interval = 0;
  {
    Progress progress("train", 4, options);
    progress.update(1, "loss 3.0");
    progress.message("held out 2.9");
    progress.update(4, "loss 2.5");
    progress.finish();
    progress.finish();
  }
  std::fclose(file);
  const std::string log = slurp(folder / "log");
  EXPECT_EQ(log.find('\r'), std::string::npos);
  EXPECT_EQ(log.find('\x1b'), std::string::npos);
  EXPECT_EQ(log.find("train 1/4 (25 %)  loss 3.0"), 0u) << log;
  EXPECT_MENTIONS(log, "\nheld out 2.9\n");
  EXPECT_MENTIONS(log, "\ntrain 4/4 (100 %)  loss 2.5");
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 4);
}

TEST(Progress, IntervalKeepsALogShort) {
  const TempFolder folder;
  std::FILE* file = std::fopen((folder / "log").c_str(), "w");
  Progress::Options options;
  options.stream = file;
  options.log_interval = 3600;
  {
    Progress progress("train", 1000, options);
    for (int i = 1; i <= 1000; ++i) progress.update(i);
  }
  std::fclose(file);
  const std::string log = slurp(folder / "log");
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 1) << log;
}

TEST(Progress, RedrawsOneLineOnATerminal) {
  const int master = ::posix_openpt(O_RDWR | O_NOCTTY);
  ASSERT_GE(master, 0);
  ASSERT_EQ(::grantpt(master), 0);
  ASSERT_EQ(::unlockpt(master), 0);
  std::FILE* terminal = std::fopen(::ptsname(master), "w");
  ASSERT_NE(terminal, nullptr);
  Progress::Options options;
  options.stream = terminal;
  options.redraw_interval = 0;
  {
    Progress progress("train", 10, options);
    progress.update(5, "loss 3.0");
    progress.update(10, std::string(300, 'x'));
  }
  std::fclose(terminal);
  std::string shown;
  char buffer[4096];
  for (ssize_t got; (got = ::read(master, buffer, sizeof(buffer))) > 0;)
    shown.append(buffer, static_cast<size_t>(got));
  ::close(master);
  ASSERT_FALSE(shown.empty());
  EXPECT_EQ(shown[0], '\r');
  EXPECT_MENTIONS(shown, "[" + std::string(15, '=') + std::string(15, ' ') + "]  50 %  loss 3.0");
  EXPECT_EQ(std::count(shown.begin(), shown.end(), '\n'), 1);
  EXPECT_LE(shown.size(), 350u);  // the long text is cut to the terminal's width
}

TEST(Progress, Durations) {
  EXPECT_EQ(format_duration(0), "0:00");
  EXPECT_EQ(format_duration(75), "1:15");
  EXPECT_EQ(format_duration(3723), "1:02:03");
  EXPECT_EQ(format_duration(59.7), "1:00");
  EXPECT_EQ(format_duration(-1), "--:--");
  EXPECT_EQ(format_duration(std::nan("")), "--:--");
  EXPECT_EQ(format_duration(INFINITY), "--:--");
}

TEST(Progress, Counts) {
  EXPECT_EQ(format_count(999), "999");
  EXPECT_EQ(format_count(12345), "12.3k");
  EXPECT_EQ(format_count(2.5e6), "2.50M");
  EXPECT_EQ(format_count(7e9), "7.00G");
}

}  // namespace
}  // namespace efla
