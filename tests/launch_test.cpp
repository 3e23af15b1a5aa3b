// What `launch` knows of a training under way, and what it ends by force: on a clock that goes on by looks.
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

#include "apps/commands.h"
#include "apps/launch_words.h"
#include "temporary_directory.h"
#include "turned_clock.h"

namespace echelon::launch_test {
namespace {

using namespace checks;
using namespace std::chrono_literals;
namespace fs = std::filesystem;
using Word = LaunchWords::Word;

struct Heard {
  std::string text;
  std::vector<std::pair<Word, int>> words;
  LaunchWords reader{"0123abcd", [this](std::string_view t) { text += t; },
                     [this](Word word, int status) { words.emplace_back(word, status); }};
};

const std::string told =
    "\x1e"
    "0123abcd ";

// Wherever reads cut what comes, words are found and the rest is passed on as it is.
TEST(LaunchWords, AreFoundAmongOtherText) {
  const std::string all = "loss 1\nlo" + told +
                          "here\nss 2 \x1e\x1e"
                          "0123abcx " +
                          told + "ended 3\n" + told + "lasts\n" + told + "nonsense\n" + told +
                          "here and more than any word has, by far\n" + told;
  const std::string text =
      "loss 1\nloss 2 \x1e\x1e"
      "0123abcx " +
      told + "nonsense\n" + told + "here and more than any word has, by far\n" + told;
  std::mt19937 random(1);
  for (int trial = 0; trial < 200; ++trial) {
    Heard heard;
    for (std::size_t at = 0; at < all.size();) {
      const std::size_t count = trial == 0 ? all.size() : 1 + random() % 12;
      heard.reader.read(all.substr(at, count));
      at += count;
    }
    heard.reader.end();
    EXPECT_EQ(heard.text, text);
    EXPECT_EQ(heard.words,
              (std::vector<std::pair<Word, int>>{{Word::here, 0}, {Word::ended, 3}, {Word::lasts, 0}}));
  }
}

// A script that stands where mpirun is looked for.
class FakeMpirun : public testing::Test {
 protected:
  FakeMpirun() : path_(std::getenv("PATH")) {
    ::setenv("PATH", (directory_.path().string() + ":" + path_).c_str(), 1);
  }
  ~FakeMpirun() override { ::setenv("PATH", path_.c_str(), 1); }

  Commands::Ended train(const std::string& script, std::chrono::milliseconds silence,
                        Clock::duration look = 1s) const {
    const std::string program = directory_ / "mpirun";
    write_text(program,
               "#!/bin/sh\nsay() { printf '\\036%s %s\\n' \"${ECHELON_LAUNCH#2:}\" \"$1\" >&2; }\n" + script);
    fs::permissions(program, fs::perms::owner_all);
    Commands commands({.grace = 10s, .silence = silence}, time_of_each_thread(look));
    return commands.train({"mpirun"});
  }

  const TemporaryDirectory directory_;
  const std::string path_;
};

constexpr auto endless = std::chrono::hours(1000);
// Takes no SIGTERM, nor does what it started.
const std::string stays = "trap '' TERM\nsleep 100000 & wait\nwait\n";

TEST_F(FakeMpirun, EndsByItselfAndItsStatusSaysLittle) {
  constexpr auto still = Clock::duration(1);  // it has all the time to end
  const Commands::Ended silent = train("exit 1\n", endless, still);
  EXPECT_EQ(silent.status, 1);
  EXPECT_FALSE(silent.said);
  EXPECT_EQ(silent.forced, "");
  const Commands::Ended spoken =
      train("say here; say lasts; say 'ended 3'; say 'ended 2'; exit 1\n", endless, still);
  EXPECT_EQ(spoken.status, 1);
  EXPECT_EQ(spoken.said, 3);
  EXPECT_TRUE(spoken.lasting);
}

TEST_F(FakeMpirun, IsEndedWhenNoRankSaysAWord) {
  const Commands::Ended never = train(stays, 60s, 10s);
  EXPECT_EQ(never.status, 128 + SIGKILL);
  EXPECT_NE(never.forced.find("no rank had begun after"), std::string::npos) << never.forced;
}

TEST_F(FakeMpirun, IsEndedWhenItOutlivesItsRanks) {
  const Commands::Ended ended = train("say here; say 'ended 0'\n" + stays, endless);
  EXPECT_EQ(ended.said, 0);
  EXPECT_EQ(ended.status, 128 + SIGKILL);
  EXPECT_NE(ended.forced.find("had said its end"), std::string::npos) << ended.forced;
}

TEST_F(FakeMpirun, IsEndedWhenItDoesNotStopInTime) {
  // It asks the process that started it to stop, as a batch system would.
  const Commands::Ended ended = train("trap '' USR1; kill -TERM $PPID\n" + stays, endless);
  EXPECT_EQ(ended.status, 128 + SIGKILL);
  EXPECT_NE(ended.forced.find("was asked to stop"), std::string::npos) << ended.forced;
}

}  // namespace
}  // namespace echelon::launch_test
