#include "efla/io/metrics.h"

#include <signal.h>
#include <sys/resource.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "efla/io/test_util.h"

namespace efla {
namespace {

using nlohmann::json;
using testing::error_of;
using testing::slurp;
using testing::spit;
using testing::TempFolder;

TEST(MetricsLog, EveryLineIsOnDiskAtOnce) {
  const TempFolder folder;
  MetricsLog log(folder / "m.jsonl");
  log.write({{"step", 1}, {"loss", 2.5}});
  EXPECT_EQ(slurp(folder / "m.jsonl"), "{\"loss\":2.5,\"step\":1}\n");
  log.write({{"step", 2}, {"loss", std::numeric_limits<double>::quiet_NaN()}});
  const auto lines = read_metrics(folder / "m.jsonl");
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_TRUE(lines[1]["loss"].is_null());
}

TEST(MetricsLog, ALineThatFailedIsWrittenLater) {
  const TempFolder folder;
  MetricsLog log(folder / "m.jsonl");
  log.write({{"step", 1}});
  rlimit limit{};
  ::getrlimit(RLIMIT_FSIZE, &limit);
  const rlimit tight{std::filesystem::file_size(folder / "m.jsonl") + 4, limit.rlim_max};
  const auto old_handler = ::signal(SIGXFSZ, SIG_IGN);
  ::setrlimit(RLIMIT_FSIZE, &tight);
  const std::string write_error = error_of([&] { log.write({{"step", 2}}); });
  const std::string sync_error = error_of([&] { log.sync(); });
  ::setrlimit(RLIMIT_FSIZE, &limit);
  ::signal(SIGXFSZ, old_handler);
  EXPECT_MENTIONS(write_error, "m.jsonl");
  EXPECT_MENTIONS(sync_error, "m.jsonl");
  log.sync();
  log.write({{"step", 3}});
  EXPECT_EQ(slurp(folder / "m.jsonl"), "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n");
}

TEST(MetricsLog, KeepsDoublesExactly) {
  const TempFolder folder;
  const double loss = 0.1 + 0.2;
  MetricsLog(folder / "m.jsonl").write({{"loss", loss}});
  EXPECT_EQ(read_metrics(folder / "m.jsonl").at(0)["loss"].get<double>(), loss);
}

TEST(MetricsLog, ResumeDropsLaterStepsAndHalfLines) {
  const TempFolder folder;
  spit(folder / "m.jsonl",
       "{\"config\":{}}\n{\"step\":9}\n{\"step\":10}\n{\"step\":10,\"held_out\":1}\n{\"step\":11}"
       "\n{\"step\":12");
  {
    MetricsLog log(folder / "m.jsonl", 10);
    log.write({{"step", 11}, {"again", true}});
  }
  EXPECT_EQ(slurp(folder / "m.jsonl"),
            "{\"config\":{}}\n{\"step\":9}\n{\"step\":10}\n{\"step\":10,\"held_out\":1}\n"
            "{\"again\":true,\"step\":11}\n");
}

TEST(MetricsLog, FreshRunReplacesAndResumeWithoutAFileStarts) {
  const TempFolder folder;
  spit(folder / "m.jsonl", "{\"step\":1}\n");
  { MetricsLog log(folder / "m.jsonl"); }
  EXPECT_EQ(slurp(folder / "m.jsonl"), "");
  { MetricsLog(folder / "n.jsonl", 5).write({{"step", 6}}); }
  EXPECT_EQ(read_metrics(folder / "n.jsonl").size(), 1u);
}

TEST(MetricsLog, SaysWhatIsWrong) {
  const TempFolder folder;
  EXPECT_MENTIONS(error_of([&] { read_metrics(folder / "none"); }), "No such file");
  EXPECT_MENTIONS(error_of([&] { MetricsLog(folder / "no/m.jsonl"); }), "does not exist");
  spit(folder / "m.jsonl", "{}\nbroken\n{}\n");
  EXPECT_MENTIONS(error_of([&] { read_metrics(folder / "m.jsonl"); }), "line 2");
}

}  // namespace
}  // namespace efla
