#include "efla/io/atomic_file.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <csignal>

#include "efla/io/test_util.h"

namespace efla {
namespace {

namespace fs = std::filesystem;
using testing::error_of;
using testing::names_in;
using testing::slurp;
using testing::spit;
using testing::TempFolder;

// Runs `act` in a child process (which may change its user or limits) and returns its efla::Error's
// message.
template <typename Act>
std::string error_in_child(const Act& act) {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    std::string message = "no error";
    try {
      act();
    } catch (const std::exception& error) {
      message = error.what();
    }
    const ssize_t written = ::write(ends[1], message.data(), message.size());
    ::_exit(written < 0 ? 1 : 0);
  }
  ::close(ends[1]);
  std::string message;
  char buffer[512];
  for (ssize_t got; (got = ::read(ends[0], buffer, sizeof(buffer))) > 0;) {
    message.append(buffer, static_cast<size_t>(got));
  }
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status)) << "the child died";
  return message;
}

TEST(AtomicFile, WritesAndReplaces) {
  const TempFolder folder;
  write_file_atomically(folder / "a", "one");
  write_file_atomically(folder / "a", "two");
  EXPECT_EQ(slurp(folder / "a"), "two");
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"a"});
}

TEST(AtomicFile, UncommittedLeavesTheOldFileAndNoTraces) {
  const TempFolder folder;
  spit(folder / "a", "old");
  {
    AtomicFileWriter file(folder / "a");
    file.write("new content");
    EXPECT_EQ(slurp(folder / "a"), "old");
  }
  EXPECT_EQ(slurp(folder / "a"), "old");
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"a"});
}

TEST(AtomicFile, LeftoversOfTheDeadGoThoseOfTheLivingStay) {
  const TempFolder folder;
  AtomicFileWriter living(folder / "a");
  living.write("mine");
  spit(folder / ".a.tmp-1-0", "of a process that died");
  spit(folder / ".ab.tmp-1-0", "of another file");
  write_file_atomically(folder / "a", "theirs");
  EXPECT_FALSE(fs::exists(folder / ".a.tmp-1-0"));
  EXPECT_TRUE(fs::exists(folder / ".ab.tmp-1-0"));
  living.commit();
  EXPECT_EQ(slurp(folder / "a"), "mine");
}

TEST(AtomicFile, ATemporaryFileThatIsThereIsNotTaken) {
  const TempFolder folder;
  // The names that the next writers of this process would take, held by somebody else.
  std::vector<std::unique_ptr<FileLock>> others;
  std::string last;
  {
    const AtomicFileWriter probe(folder / "a");
    last = names_in(folder.path()).front();
  }
  const size_t dash = last.rfind('-');
  const int number = std::stoi(last.substr(dash + 1));
  for (int i = 1; i <= 3; ++i) {
    const fs::path taken = folder / (last.substr(0, dash + 1) + std::to_string(number + i));
    spit(taken, "theirs");
    others.push_back(std::make_unique<FileLock>(taken));
  }
  write_file_atomically(folder / "a", "mine");
  EXPECT_EQ(slurp(folder / "a"), "mine");
  EXPECT_EQ(names_in(folder.path()).size(), 4u);
  for (const std::string& name : names_in(folder.path())) {
    EXPECT_EQ(slurp(folder / name), name == "a" ? "mine" : "theirs");
  }
}

TEST(AtomicFile, WhatCannotBeLookedAtIsAnError) {
  const TempFolder folder;
  EXPECT_FALSE(path_exists(folder / "none"));
  EXPECT_FALSE(is_folder(folder / "none"));
  EXPECT_TRUE(is_folder(folder.path()));
  const std::string endless(5000, 'x');  // ENAMETOOLONG: neither there nor absent
  EXPECT_MENTIONS(error_of([&] { path_exists(folder / endless); }), "cannot look at");
  EXPECT_MENTIONS(error_of([&] { folder_entries(folder / "none"); }), "none");
  spit(folder / "b", "");
  spit(folder / "a", "");
  EXPECT_EQ(folder_entries(folder.path()), (std::vector<fs::path>{folder / "a", folder / "b"}));
}

TEST(AtomicFile, HeaderWrittenLast) {
  const TempFolder folder;
  AtomicFileWriter file(folder / "a");
  file.write("....body");
  file.write_at(0, "head", 4);
  file.write("tail");
  EXPECT_EQ(file.size(), 12u);
  file.commit();
  EXPECT_EQ(slurp(folder / "a"), "headbodytail");
}

TEST(AtomicFile, KeepsALinkToTheRealFile) {
  const TempFolder folder;
  spit(folder / "real", "old");
  fs::create_symlink("real", folder / "link");
  write_file_atomically(folder / "link", "new");
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
  EXPECT_EQ(slurp(folder / "real"), "new");
}

TEST(AtomicFile, MissingParentAndFolderTargetAreNamed) {
  const TempFolder folder;
  const std::string missing = error_of([&] { write_file_atomically(folder / "no/a", "x"); });
  EXPECT_MENTIONS(missing, (folder / "no").string());
  EXPECT_MENTIONS(missing, "does not exist");
  EXPECT_MENTIONS(error_of([&] { write_file_atomically(folder.path(), "x"); }), "it is a folder");
}

TEST(AtomicFile, ExceededSizeLimitLeavesTheOldFile) {
  const TempFolder folder;
  spit(folder / "a", "old");
  const std::string message = error_in_child([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1000, 1000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    write_file_atomically(folder / "a", std::string(5000, 'x'));
  });
  EXPECT_MENTIONS(message, (folder / "a").string());
  EXPECT_MENTIONS(message, "too large");
  EXPECT_EQ(slurp(folder / "a"), "old");
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"a"});
}

TEST(AtomicFile, FullDiskIsExplained) {
  // /dev/full refuses every byte with "no space left on device", as a full disk does.
  const TempFolder folder;
  AtomicFileWriter file(folder / "a");
  const std::string temporary = names_in(folder.path()).at(0);
  const int full = ::open("/dev/full", O_WRONLY);
  ASSERT_GE(full, 0);
  bool replaced = false;
  for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code code;
    if (fs::read_symlink(entry.path(), code).filename() == temporary) {
      replaced = ::dup2(full, std::stoi(entry.path().filename().string())) >= 0;
      break;
    }
  }
  ::close(full);
  ASSERT_TRUE(replaced);
  const std::string message = error_of([&] { file.write("x"); });
  EXPECT_MENTIONS(message, (folder / "a").string());
  EXPECT_MENTIONS(message, "No space left on device");
  EXPECT_MENTIONS(message, "free some space");
}

TEST(AtomicFile, UnwritableFolderIsExplained) {
  const TempFolder folder;
  fs::create_directory(folder / "locked");
  fs::permissions(folder / "locked", fs::perms::owner_read | fs::perms::owner_exec |
                                         fs::perms::others_read | fs::perms::others_exec);
  fs::permissions(folder.path(), fs::perms::all);
  const std::string message = error_in_child([&] {
    if (::geteuid() == 0 && ::setuid(65534) != 0) throw std::runtime_error("setuid failed");
    write_file_atomically(folder / "locked/a", "x");
  });
  EXPECT_MENTIONS(message, (folder / "locked/a").string());
  EXPECT_MENTIONS(message, "Permission denied");
  EXPECT_MENTIONS(message, "choose a folder");
}

TEST(AtomicFolder, AppearsWholeAndReplaces) {
  const TempFolder folder;
  for (const std::string content : {"one", "two"}) {
    write_folder_atomically(folder / "run", [&](const fs::path& temporary) {
      EXPECT_NE(temporary, folder / "run");
      fs::create_directory(temporary / "deep");
      spit(temporary / "deep/file", content);
      spit(temporary / content, "");
    });
    EXPECT_EQ(slurp(folder / "run/deep/file"), content);
  }
  EXPECT_EQ(names_in(folder / "run"), (std::vector<std::string>{"deep", "two"}));
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"run"});
}

TEST(AtomicFolder, FailureKeepsTheOldFolder) {
  const TempFolder folder;
  write_folder_atomically(folder / "run", [&](const fs::path& t) { spit(t / "a", "old"); });
  EXPECT_MENTIONS(error_of([&] {
                    write_folder_atomically(folder / "run", [&](const fs::path& t) {
                      spit(t / "a", "new");
                      throw Error("stopped in the middle");
                    });
                  }),
                  "stopped in the middle");
  EXPECT_EQ(slurp(folder / "run/a"), "old");
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"run"});
}

TEST(AtomicFolder, LeftoversOfTheDeadGoAndThoseOfTheLivingStay) {
  const TempFolder folder;
  fs::create_directory(folder / "run.tmp-1-0");
  spit(folder / "run.tmp-1-0/half", "written");
  write_folder_atomically(folder / "run", [&](const fs::path& temporary) {
    EXPECT_FALSE(fs::exists(folder / "run.tmp-1-0"));
    recover_folder(folder / "run");  // another process starting now must not take this one's folder
    EXPECT_TRUE(fs::exists(temporary));
  });
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"run"});
}

TEST(AtomicFolder, RecoversADeathBetweenTwoRenames) {
  const TempFolder folder;
  fs::create_directory(folder / "run.old-1-0");
  spit(folder / "run.old-1-0/a", "old");
  recover_folder(folder / "run");
  EXPECT_EQ(slurp(folder / "run/a"), "old");
}

TEST(AtomicFolder, KilledAtAnyMomentLeavesOldOrNew) {
  const TempFolder folder;
  const auto write_all = [&](const std::string& content) {
    write_folder_atomically(folder / "run", [&](const fs::path& t) {
      for (const char* name : {"a", "b", "c"}) write_file_atomically(t / name, content);
    });
  };
  write_all("0");
  for (int delay = 0; delay < 20; ++delay) {
    const pid_t child = ::fork();
    if (child == 0) {
      for (int i = 1;; ++i) write_all(std::to_string(i));
    }
    ::usleep(static_cast<useconds_t>(500 + 731 * delay));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    recover_folder(folder / "run");
    const std::string a = slurp(folder / "run/a");
    EXPECT_FALSE(a.empty());
    EXPECT_EQ(slurp(folder / "run/b"), a);
    EXPECT_EQ(slurp(folder / "run/c"), a);
    EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"run"});
  }
}

TEST(ReadFile, SaysWhatIsWrong) {
  const TempFolder folder;
  spit(folder / "a", std::string("x\0y", 3));
  EXPECT_EQ(read_file(folder / "a"), std::string("x\0y", 3));
  const std::string missing = error_of([&] { read_file(folder / "none"); });
  EXPECT_MENTIONS(missing, (folder / "none").string());
  EXPECT_MENTIONS(missing, "No such file");
  EXPECT_MENTIONS(error_of([&] { read_file(folder.path()); }), "it is a folder");
}

TEST(MakeFolder, FileInTheWay) {
  const TempFolder folder;
  make_folder(folder / "a/b");
  EXPECT_TRUE(fs::is_directory(folder / "a/b"));
  spit(folder / "file", "");
  EXPECT_MENTIONS(error_of([&] { make_folder(folder / "file"); }), (folder / "file").string());
}

TEST(FileLock, SecondHolderIsRefusedUntilRelease) {
  const TempFolder folder;
  {
    const FileLock lock(folder / "lock");
    EXPECT_MENTIONS(error_of([&] { FileLock second(folder / "lock"); }),
                    "another process is using");
  }
  const FileLock again(folder / "lock");
}

}  // namespace
}  // namespace efla
