// Runs that end early: by a signal, a disk that is full, an output that is closed, another run.
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>

#include "command_line.h"
#include "patience.h"

namespace echelon::ended_commands_test {
namespace {

namespace fs = std::filesystem;
using namespace echelon::checks;
using nlohmann::json;

class EndedCommands : public CommandLine {
 protected:
  // A training without end; `act` is told its process once two checkpoints are there.
  template <class Act>
  Result interrupted(const Act& act, const std::string& before = "true") const {
    Result stopped;
    std::atomic<bool> ended{false};
    std::thread training_run([&] {
      stopped = run(training({"--steps", "1000000", "--save-every", "1", "--checkpoint", "ck"}),
                    "echo $$ >pid && " + before);
      ended = true;
    });
    wait_until([&] { return ended || fs::exists(at("ck/step-00000002")); });
    if (!ended) act(std::stoi(read_bytes(at("pid"))));
    training_run.join();
    return stopped;
  }
};

TEST_F(EndedCommands, AFullDiskEndsTheRunAndKeepsTheEarlierCheckpoint) {  // long
  ASSERT_EQ(run(training({"--steps", "1", "--checkpoint", "ck", "--sample", "0"})).status, 0);
  const std::string before = listing();
  const auto blocks = fs::file_size(at("ck/step-00000001/optimizer.safetensors")) / 2 / 512;
  const Result full =
      run(training({"--steps", "2", "--checkpoint", "ck", "--sample", "0", "--resume", "--json"}),
          "ulimit -f " + std::to_string(blocks));
  EXPECT_EQ(full.status, 3) << full.err;
  EXPECT_EQ(full.out, "");
  EXPECT_NE(full.err.find("step-00000002"), std::string::npos) << full.err;
  EXPECT_NE(full.err.find("File too large"), std::string::npos) << full.err;
  EXPECT_EQ(listing(), before);
  EXPECT_EQ(run({"generate", "--checkpoint", "ck", "--max-tokens", "2"}).status, 0);
}

TEST_F(EndedCommands, OutputThatCannotBeWrittenIsAFailure) {
  const Result log = run(training({"--steps", "1", "--sample", "0", "--log", "/dev/full"}));
  EXPECT_EQ(log.status, 3);
  EXPECT_NE(log.err.find("--log /dev/full"), std::string::npos) << log.err;
  const Result out = run(training({"--steps", "1", "--sample", "0", "--json"}), "exec >/dev/full");
  EXPECT_EQ(out.status, 3);
  EXPECT_NE(out.err.find("standard output cannot be written: "), std::string::npos) << out.err;
  EXPECT_EQ(out.err.find("Is a directory"), std::string::npos) << "the reason of something else: " << out.err;
  const Result judged = run({"verify", "--model", "tiny.toml", "--steps", "1", "--seq-len", "8",
                             "--precision", ECHELON_TEST_DTYPE, "--trace", "/dev/full"});
  EXPECT_EQ(judged.status, 3);
  EXPECT_NE(judged.out.find("\nPASS\n"), std::string::npos) << judged.out;
  EXPECT_NE(judged.err.find("--trace /dev/full: cannot be written: "), std::string::npos) << judged.err;
  EXPECT_TRUE(fs::is_character_file("/dev/full"));
  const Result nowhere = run({"simulate", "--out", "none/drawn.txt"});
  EXPECT_EQ(nowhere.status, 2);
  EXPECT_EQ(nowhere.err, "echelon: --out none/drawn.txt: cannot be written: No such file or directory\n");
}

// What is printed would go into the first file that is written, which gets the number of a closed stream.
TEST_F(EndedCommands, NothingIsPrintedIntoAFileWhereStandardOutputIsClosed) {
  const Result r = run(training({"--steps", "2", "--sample", "0", "--log", "log"}), "exec <&- >&-");
  EXPECT_EQ(r.status, 3);
  EXPECT_NE(r.err.find("standard output cannot be written: "), std::string::npos) << r.err;
  std::istringstream lines(read_bytes(at("log")));
  int records = 0;
  for (std::string line; std::getline(lines, line); ++records) EXPECT_TRUE(line.starts_with("{")) << line;
  EXPECT_GE(records, 3);
}

TEST_F(EndedCommands, AnInterruptLeavesWholeCheckpoints) {
  const Result stopped = interrupted([](int pid) { ::kill(pid, SIGINT); });
  EXPECT_EQ(stopped.status, 0) << stopped.err;
  EXPECT_NE(stopped.out.find("stopped after step "), std::string::npos) << stopped.out;
  EXPECT_NE(stopped.out.find("--resume continues from ck/step-"), std::string::npos) << stopped.out;
  EXPECT_EQ(stopped.err, "echelon: stopping after this step; a second request ends the run at once\n");
  EXPECT_EQ(run({"generate", "--checkpoint", "ck", "--max-tokens", "2"}).status, 0);
}

// The terminal that it was started from has been closed.
TEST_F(EndedCommands, AHangUpLeavesWholeCheckpoints) {
  struct sigaction hang_up {};
  if (::sigaction(SIGHUP, nullptr, &hang_up) != 0 || hang_up.sa_handler == SIG_IGN)
    GTEST_SKIP() << "under nohup";
  const Result stopped = interrupted([](int pid) { ::kill(pid, SIGHUP); });
  EXPECT_EQ(stopped.status, 0) << stopped.err;
  EXPECT_NE(stopped.out.find("stopped after step "), std::string::npos) << stopped.out;
}

// What it was piped into has ended, or ssh without a terminal.
TEST_F(EndedCommands, WithoutAReaderARunEndsWithACheckpoint) {
  struct sigaction pipe {};
  if (::sigaction(SIGPIPE, nullptr, &pipe) != 0 || pipe.sa_handler == SIG_IGN)
    GTEST_SKIP() << "where SIGPIPE is ignored a run goes on";
  const Result stopped = run(training({"--steps", "1000000", "--checkpoint", "ck"}),
                             "mkfifo out && { head -n 1 out >first & } && exec >out");
  EXPECT_EQ(stopped.status, 3) << stopped.err;
  EXPECT_NE(stopped.err.find("standard output cannot be written: "), std::string::npos) << stopped.err;
  EXPECT_NE(read_bytes(at("first")).find("model "), std::string::npos);
  EXPECT_EQ(list_of_checkpoints().size(), 1u);
  EXPECT_EQ(run({"generate", "--checkpoint", "ck", "--max-tokens", "2"}).status, 0);
}

// With --json people read standard error.
TEST_F(EndedCommands, ARunGoesOnWhereStandardErrorIsFull) {
  const Result r =
      run(training({"--steps", "3", "--sample", "0", "--checkpoint", "ck", "--json"}), "exec 2>/dev/full");
  EXPECT_EQ(r.status, 3);
  EXPECT_TRUE(r.out.starts_with("{\"steps\":3,")) << r.out;
  EXPECT_EQ(list_of_checkpoints().size(), 1u);
}

TEST_F(EndedCommands, WithoutAReaderOfStandardErrorARunEndsWithACheckpoint) {
  struct sigaction pipe {};
  if (::sigaction(SIGPIPE, nullptr, &pipe) != 0 || pipe.sa_handler == SIG_IGN)
    GTEST_SKIP() << "where SIGPIPE is ignored a run goes on";
  const Result stopped = run(training({"--steps", "1000000", "--checkpoint", "ck", "--json"}),
                             "mkfifo out && { head -n 1 out >first & } && exec 2>out");
  EXPECT_EQ(stopped.status, 3);
  EXPECT_NE(stopped.out.find("\"stopped\":true"), std::string::npos) << stopped.out;
  EXPECT_EQ(list_of_checkpoints().size(), 1u);
}

TEST_F(EndedCommands, AnInterruptIsHeardWhereStandardErrorIsFull) {
  const Result stopped = interrupted([](int pid) { ::kill(pid, SIGTERM); }, "exec 2>/dev/full");
  EXPECT_EQ(stopped.status, 0) << stopped.out;
  EXPECT_NE(stopped.out.find("stopped after step "), std::string::npos) << stopped.out;
}

// A handler that runs on a thread that computes may write over what oneDNN computes with.
TEST_F(EndedCommands, NoSignalIsHandledWhereItComputes) {
  int threads = 0, unblocked = 0;
  const Result stopped = interrupted([&](int pid) {
    for (const auto& task : fs::directory_iterator("/proc/" + std::to_string(pid) + "/task")) {
      const std::string status = read_bytes(task.path() / "status");
      if (status.empty()) continue;  // the thread has just ended
      const auto mask = [&](const std::string& name) {
        return std::stoull(status.substr(status.find(name) + name.size()), nullptr, 16);
      };
      ++threads;
      for (int signal : {SIGTERM, SIGINT, SIGUSR1}) {
        const std::uint64_t bit = std::uint64_t{1} << (signal - 1);
        EXPECT_EQ(mask("SigCgt:") & bit, 0u) << "signal " << signal;
        unblocked += (mask("SigBlk:") & bit) == 0;
      }
    }
    ::kill(pid, SIGUSR1);
  });
  EXPECT_GE(threads, 2);    // a rank, and one that waits for signals:
  EXPECT_LE(unblocked, 3);  // unblocked while it does
  EXPECT_EQ(stopped.status, 0) << stopped.err;
  EXPECT_NE(stopped.out.find("stopped after step "), std::string::npos) << stopped.out;
}

// As timeout(1) asks a command to end: itself, and at once the group that it is in. It is stopped meanwhile,
// so that it finds both, however slow this is; two of one kind would be one.
TEST_F(EndedCommands, ASignalToTheWholeGroupIsOneRequest) {  // long
  for (const std::string verb : {"train", "launch -- train"}) {
    const CommandResult r = run_command(
        "cd '" + directory_.string() + "'; rm -rf ck; setsid '" + ECHELON_BINARY + "' " + verb +
        " --data text.txt --model tiny.toml --global-batch 2 --seq-len 16 --threads 1 --steps 1000000 "
        "--save-every 1 --keep 2 --checkpoint ck --precision " +
        ECHELON_TEST_DTYPE +
        " & while kill -0 $! && ! ls ck 2>/dev/null | grep -q ^step; do sleep 0.02; done; "
        "kill -STOP $!; kill -TERM $!; kill -INT -- -$!; kill -CONT $!; wait $!");
    EXPECT_EQ(r.status, 0) << verb << "\n" << r.output;
    EXPECT_NE(r.output.find("stopped after step "), std::string::npos) << verb << "\n" << r.output;
  }
}

TEST_F(EndedCommands, ASecondRunOnADirectoryIsRefused) {  // long
  Result second, third;
  const Result first = interrupted([&](int process) {
    second = run(training({"--steps", "9", "--checkpoint", "ck"}));
    third = run(training({"--steps", "9", "--checkpoint", "ck", "--resume"}));
    ::kill(process, SIGTERM);
  });
  EXPECT_EQ(first.status, 0) << first.err;
  const std::string holder = "--checkpoint ck: process " + read_bytes(at("pid")).substr(0, 3);
  for (const Result* r : {&second, &third}) {
    EXPECT_EQ(r->status, 2);
    EXPECT_NE(r->err.find(holder), std::string::npos) << r->err;
    EXPECT_NE(r->err.find("name another directory"), std::string::npos) << r->err;
  }
  for (const std::string& path : list_of_checkpoints())
    EXPECT_EQ(run({"checkpoint", "verify", path}).status, 0) << path;
}

// A run begins by removing what an ended one left unfinished: here the directory of its trace.
TEST_F(EndedCommands, SaysWhatItTrainedWhereAFileCannotBeWrittenAnyMore) {
  fs::create_directories(at("ck/.step-00000001.unfinished-0"));
  const Result late = run(training({"--steps", "1", "--sample", "0", "--checkpoint", "ck", "--trace",
                                    "ck/.step-00000001.unfinished-0/t.json", "--json"}));
  EXPECT_EQ(late.status, 3);
  EXPECT_NE(late.err.find("--trace ck/.step-00000001.unfinished-0/t.json: cannot be written"),
            std::string::npos)
      << late.err;
  EXPECT_EQ(json::parse(late.out, nullptr, false)["last_step"], 1) << late.out;
}

}  // namespace
}  // namespace echelon::ended_commands_test
