#include "efla/io/plot.h"

#include <cmath>
#include <cstdlib>

#include "efla/io/test_util.h"

namespace efla {
namespace {

using testing::slurp;
using testing::TempFolder;

Plot sample() {
  return {"A \"quoted\" title",
          "step",
          "loss",
          {{"train", {{1, 3.5}, {2, NAN}, {3, 2.5}}}, {"held out", {{3, 2.7}}}},
          false,
          true};
}

TEST(Plot, DrawsAPicture) {
  const TempFolder folder;
  EXPECT_TRUE(draw_plot(folder / "loss.png", sample()));
  EXPECT_EQ(slurp(folder / "loss.png").substr(1, 3), "PNG");
  const std::string script = slurp(folder / "loss.gp");
  EXPECT_MENTIONS(script, "\n1 3.5\n\n3 2.5\n");
  EXPECT_MENTIONS(script, "set logscale y");
  EXPECT_MENTIONS(script, "A \\\"quoted\\\" title");
}

TEST(Plot, TheScriptDrawsAgainByHand) {
  const TempFolder folder;
  ASSERT_TRUE(draw_plot(folder / "loss.png", sample()));
  std::filesystem::remove(folder / "loss.png");
  EXPECT_EQ(std::system(("gnuplot '" + (folder / "loss.gp").string() + "'").c_str()), 0);
  EXPECT_EQ(slurp(folder / "loss.png").substr(1, 3), "PNG");
}

TEST(Plot, DrawsBandsAndSeveralPlotsBesideEachOther) {
  const TempFolder folder;
  Plot first = sample(), second = sample();
  first.curves[1] = {"banded", {{1, 2.0}, {2, 3.0}}, {0.25, 0.5}};
  first.curves[0].dotted = true;
  first.log_y = false;
  first.y_high = 4;
  ASSERT_TRUE(draw_plots(folder / "both.png", {first, {"empty", "x", "y", {}}, second}));
  const std::string script = slurp(folder / "both.gp");
  EXPECT_MENTIONS(script, "\n1 2 1.75 2.25\n2 3 2.5 3.5\n");
  EXPECT_MENTIONS(script, "set yrange [0:4]");
  EXPECT_MENTIONS(script, "pointtype 7");
  EXPECT_MENTIONS(script, "layout 1,2");  // the empty one is left out
  EXPECT_EQ(slurp(folder / "both.png").substr(1, 3), "PNG");
}

TEST(Plot, RemovesWhatAKilledProcessLeft) {
  const TempFolder folder;
  testing::spit(folder / ".loss.png.tmp-1-0", "half a picture");
  ASSERT_TRUE(draw_plot(folder / "loss.png", sample()));
  EXPECT_EQ(testing::names_in(folder.path()), (std::vector<std::string>{"loss.gp", "loss.png"}));
}

TEST(Plot, NothingToDraw) {
  const TempFolder folder;
  EXPECT_FALSE(
      draw_plot(folder / "loss.png", {"t", "x", "y", {{"empty", {{1, NAN}}}}, false, false}));
  EXPECT_FALSE(draw_plot(folder / "loss.png", {"t", "x", "y", {}, false, false}));
  EXPECT_TRUE(testing::names_in(folder.path()).empty());
}

TEST(Plot, WithoutGnuplotTheScriptStaysAndOneWarningIsGiven) {
  const TempFolder folder;
  const std::string path = std::getenv("PATH");
  ::setenv("PATH", folder.path().c_str(), 1);
  ::testing::internal::CaptureStderr();
  EXPECT_FALSE(draw_plot(folder / "loss.png", sample()));
  EXPECT_FALSE(draw_plot(folder / "loss.png", sample()));
  const std::string said = ::testing::internal::GetCapturedStderr();
  ::setenv("PATH", path.c_str(), 1);
  EXPECT_MENTIONS(said, "gnuplot-nox");
  EXPECT_EQ(said.find("gnuplot-nox"), said.rfind("gnuplot-nox"));
  EXPECT_EQ(testing::names_in(folder.path()), std::vector<std::string>{"loss.gp"});
}

TEST(Plot, AFailingGnuplotLeavesTheOldPicture) {
  const TempFolder folder;
  testing::spit(folder / "loss.png", "the old picture");
  testing::spit(folder / "gnuplot", "#!/bin/sh\nexit 1\n");
  std::filesystem::permissions(folder / "gnuplot", std::filesystem::perms::owner_all);
  const std::string path = std::getenv("PATH");
  ::setenv("PATH", folder.path().c_str(), 1);
  ::testing::internal::CaptureStderr();
  EXPECT_FALSE(draw_plot(folder / "loss.png", sample()));
  ::testing::internal::GetCapturedStderr();
  ::setenv("PATH", path.c_str(), 1);
  EXPECT_EQ(slurp(folder / "loss.png"), "the old picture");
  EXPECT_EQ(testing::names_in(folder.path()),
            (std::vector<std::string>{"gnuplot", "loss.gp", "loss.png"}));
}

}  // namespace
}  // namespace efla
