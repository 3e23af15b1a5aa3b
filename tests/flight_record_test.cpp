// Where the flight record of a run lies: in a directory that is nobody else's, and that goes when there is
// nothing in it.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <vector>

#include "base/error.h"
#include "base/private_directory.h"
#include "command_runs.h"
#include "temporary_directory.h"

namespace echelon::flight_record_test {
namespace {

namespace fs = std::filesystem;
using namespace echelon::checks;

unsigned mode_of(const fs::path& path) {
  struct stat s {};
  EXPECT_EQ(::lstat(path.c_str(), &s), 0) << path;
  return s.st_mode & 07777u;
}

std::vector<fs::path> entries(const fs::path& directory) {
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(directory)) found.push_back(entry.path());
  return found;
}

class FlightRecord : public testing::Test {
 protected:
  FlightRecord() {
    write_text(directory_ / "text", std::string(2000, 'x'));
    fs::create_directory(directory_ / "tmp");
  }
  // With this in front and behind.
  CommandResult train(const std::string& environment, const std::string& flags) const {
    return run_command(
        fmt::format("{} {} train --model gpt2-tiny --data {}/text --dp 2 --global-batch 2 --seq-len 16 "
                    "--steps 2 --threads 1 "
                    "--sample 0 --eval-samples 0 --precision {} {}",
                    environment, ECHELON_BINARY, directory_.path().string(), ECHELON_TEST_DTYPE, flags));
  }
  std::string in_tmp() const { return "TMPDIR=" + (directory_ / "tmp"); }
  const TemporaryDirectory directory_;
};

TEST_F(FlightRecord, ARunThatDoesNotFailLeavesNothing) {  // long
  EXPECT_EQ(train(in_tmp(), "").status, 0);
  EXPECT_TRUE(entries(directory_ / "tmp").empty());
  EXPECT_EQ(train("", "--record " + (directory_ / "records/here")).status, 0);
  EXPECT_TRUE(entries(directory_ / "records/here").empty());
  EXPECT_EQ(train(in_tmp(), "--lr -1").status, 2);
  EXPECT_TRUE(entries(directory_ / "tmp").empty());
}

TEST_F(FlightRecord, ARunThatFailsLeavesItToItsUserAlone) {
  for (std::size_t run = 1; run <= 2; ++run) {
    const CommandResult r =
        train("umask 000;",
              "--check-replicas 1 --flip 1:1:12345:weights:lasting --record " + (directory_ / "records"));
    EXPECT_EQ(r.status, 3) << r.output;
    const std::vector<fs::path> made = entries(directory_ / "records");
    ASSERT_EQ(made.size(), run);  // each run has its own
    for (const fs::path& directory : made) {
      EXPECT_EQ(mode_of(directory), 0700u);
      ASSERT_EQ(entries(directory).size(), 2u);
      for (const fs::path& file : entries(directory)) EXPECT_EQ(mode_of(file), 0600u);
      EXPECT_NE(read_bytes(directory / "flight-rank-0.jsonl")
                    .find("{\"rank\":0,\"failed\":\"silent corruption found after step 1"),
                std::string::npos);
    }
    EXPECT_NE(r.output.find("flight-rank-*.jsonl in " + (directory_ / "records/echelon-flight-")),
              std::string::npos)
        << r.output;
  }
}

TEST_F(FlightRecord, APlaceThatIsNoneIsRefusedBeforeAnythingStarts) {
  const auto refused = [&](const std::string& environment, const std::string& flags,
                           const std::string& says) {
    const CommandResult r = train(environment, flags);
    EXPECT_EQ(r.status, 2) << r.output;
    EXPECT_TRUE(r.output.starts_with("echelon: " + says)) << r.output;
    EXPECT_EQ(r.output.find('\n'), r.output.size() - 1) << r.output;
  };
  refused("TMPDIR=/nonexistent", "", "TMPDIR /nonexistent: there is no such directory");
  refused("TMPDIR=", "", "TMPDIR (empty): there is no such directory");
  refused("TMPDIR=" + (directory_ / "text"), "",
          "TMPDIR " + (directory_ / "text") + ": it is not a directory");
  refused("TMPDIR=/proc", "",
          "TMPDIR /proc: no directory for this run can be made there: No such file or directory; legal: a "
          "directory where files can be made, as the TMPDIR of the environment");
  refused("", "--record " + (directory_ / "text"),
          "--record " + (directory_ / "text") + ": no directory for this run can be made there");
  refused("TMPDIR=/nonexistent", "--zero 1 --offload optimizer --record " + directory_.path().string(),
          "TMPDIR /nonexistent: there is no such directory");
}

TEST(PrivateFiles, AreNotLedAstray) {
  const TemporaryDirectory outside;
  write_text(outside / "victim", "untouched");
  const std::string directory = make_private_directory(outside.path().string(), "record", "--record");
  EXPECT_TRUE(directory.starts_with(outside / "record-"));
  EXPECT_EQ(mode_of(directory), 0700u);
  PrivateFiles files;
  EXPECT_NE(files.append("a", "x"), "");  // no directory yet
  files.open(directory);
  fs::create_symlink(outside / "victim", fs::path(directory) / "linked");
  fs::create_symlink(outside / "absent", fs::path(directory) / "dangling");
  write_text((fs::path(directory) / "there").string(), "untouched");
  for (const char* name : {"linked", "dangling", "there"}) EXPECT_NE(files.append(name, "x"), "") << name;
  EXPECT_EQ(read_bytes(outside / "victim"), "untouched");
  EXPECT_FALSE(fs::exists(outside / "absent"));
  EXPECT_EQ(read_bytes((fs::path(directory) / "there").string()), "untouched");
  EXPECT_EQ(files.append("own", "one\n"), "");
  EXPECT_EQ(files.append("own", "two\n"), "");
  EXPECT_EQ(read_bytes((fs::path(directory) / "own").string()), "one\ntwo\n");
  // Nor when it is put there later.
  fs::remove(fs::path(directory) / "own");
  fs::create_symlink(outside / "victim", fs::path(directory) / "own");
  EXPECT_NE(files.append("own", "three\n"), "");
  EXPECT_EQ(read_bytes(outside / "victim"), "untouched");
}

}  // namespace
}  // namespace echelon::flight_record_test
