// Ranks that are killed at any moment: no committed checkpoint is lost, none that is torn is there, and every
// resumed run ends with the losses of the run that nobody disturbed, to the last bit.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <sstream>
#include <thread>
#include <vector>

#include "bottles.h"
#include "command_runs.h"
#include "patience.h"
#include "temporary_directory.h"

namespace echelon::kill_trials_test {
namespace {

namespace fs = std::filesystem;
using namespace echelon::checks;
using nlohmann::json;

constexpr int ranks = 4, steps = 12;

class KillTrials : public testing::Test {
 protected:
  KillTrials() {
    write_text(directory_ / "text", bottles(400));
    const CommandResult r = run_command(fmt::format("{} {}", ECHELON_BINARY, training("whole")));
    EXPECT_EQ(r.status, 0) << r.output;
    expected_ = losses("whole");
    EXPECT_EQ(expected_.size(), static_cast<std::size_t>(steps));
  }

  std::string at(const std::string& name) const { return directory_ / name; }
  std::string training(const std::string& name, const std::string& more = "") const {
    return fmt::format(
        "train --model llama-tiny --data {0}/text --dp 2 --tp 2 --zero 1 --precision {1} --global-batch 4 "
        "--micro-batch 1 --seq-len 16 --steps {2} --threads 1 --sample 0 --eval-samples 0 --save-every 2 "
        "--keep 3 "
        "--timeout 300 --checkpoint {0}/{3} --log {0}/{3}.jsonl {4}",
        std::string(directory_.path()), ECHELON_TEST_DTYPE, steps, name, more);
  }
  // By step; a run that was killed and the one that resumed it write one log.
  std::map<int, double> losses(const std::string& name) const {
    std::map<int, double> found;
    std::istringstream lines(read_bytes(at(name + ".jsonl")));
    for (std::string line; std::getline(lines, line);) {
      const json record = json::parse(line, nullptr, false);
      if (!record.is_object() || !record.contains("loss")) continue;
      const int step = record["step"];
      const double loss = record["loss"];
      // A step that is run again gives what it gave.
      if (found.contains(step)) {
        EXPECT_EQ(found[step], loss) << name << ", step " << step;
      }
      found[step] = loss;
    }
    return found;
  }
  // Of all that ran, those that ran twice too.
  std::size_t steps_logged(const std::string& name) const {
    const std::string log = at(name + ".jsonl"), mark = "\"loss\":";
    if (!fs::exists(log)) return 0;
    const std::string text = read_bytes(log);
    std::size_t count = 0;
    for (std::size_t place = 0; (place = text.find(mark, place)) != std::string::npos; ++place) ++count;
    return count;
  }
  std::set<int> checkpoints(const std::string& name) const {
    std::set<int> found;
    std::error_code none;
    for (const auto& entry : fs::directory_iterator(at(name), none)) {
      const std::string file = entry.path().filename().string();
      if (file.starts_with("step-") && fs::exists(entry.path() / "checkpoint.json"))
        found.insert(std::stoi(file.substr(5)));
    }
    return found;
  }
  // The last step whose checkpoint was said to be saved.
  static int last_saved(const std::string& output) {
    const std::size_t place = output.rfind("/step-");
    return place == std::string::npos ? 0 : std::atoi(output.c_str() + place + 6);
  }

  void resumes(const std::string& name, const CommandResult& killed) const {
    const std::set<int> left = checkpoints(name);
    for (int step : left) {
      const CommandResult r =
          run_command(fmt::format("{} checkpoint verify {}/step-{:08}", ECHELON_BINARY, at(name), step));
      EXPECT_EQ(r.status, 0) << name << ": a torn checkpoint: " << r.output;
    }
    // What was said to be saved is there, or a later one that made room for it.
    if (const int saved = last_saved(killed.output); saved > 0) {
      ASSERT_FALSE(left.empty()) << killed.output;
      EXPECT_GE(*left.rbegin(), saved) << killed.output;
    }
    if (left.contains(steps)) return;
    const CommandResult r =
        run_command(fmt::format("{} {}", ECHELON_BINARY, training(name, left.empty() ? "" : "--resume")));
    ASSERT_EQ(r.status, 0) << name << ": " << r.output;
    const auto found = losses(name);
    for (int step = left.empty() ? 1 : *left.rbegin() + 1; step <= steps; ++step) {
      ASSERT_TRUE(found.contains(step)) << name << ", step " << step;
      EXPECT_EQ(found.at(step), expected_.at(step)) << name << ", step " << step;
    }
    for (const auto& entry : fs::directory_iterator(at(name)))
      EXPECT_FALSE(entry.path().filename().string().starts_with(".step")) << entry.path();
    fs::remove_all(at(name));
  }

  const TemporaryDirectory directory_;
  std::map<int, double> expected_;
};

// `collective`: in the middle of a large one, whose other ranks have heard of it and get no data.
TEST_F(KillTrials, EachRankAtEachMoment) {
  for (int rank = 0; rank < ranks; ++rank)
    for (const char* moment :
         {"forward", "backward", "tp-collective", "dp-collective", "write", "written", "commit"}) {
      if (std::string(moment) == "commit" && rank > 0) continue;  // rank 0 commits for all
      const std::string name = fmt::format("{}{}", moment, rank);
      SCOPED_TRACE(name);
      const CommandResult killed = run_command(under_mpirun(
          ranks, training(name, fmt::format("--die {}:6:{}", rank, moment)), "--enable-recovery"));
      EXPECT_NE(killed.output.find(fmt::format("rank {} is gone", rank)), std::string::npos) << killed.output;
      // Step 4 was to be saved, and 6 was not finished.
      EXPECT_FALSE(checkpoints(name).contains(6));
      resumes(name, killed);
    }
}

// All of them go with their process.
TEST_F(KillTrials, ThreadRanksAtEachMoment) {
  for (int rank = 0; rank < ranks; ++rank)
    for (const char* moment : {"forward", "backward", "write", "written", "commit"}) {
      if (std::string(moment) == "commit" && rank > 0) continue;
      const std::string name = fmt::format("{}{}", moment, rank);
      SCOPED_TRACE(name);
      const CommandResult killed = run_command(
          fmt::format("{} {}", ECHELON_BINARY, training(name, fmt::format("--die {}:6:{}", rank, moment))));
      EXPECT_EQ(killed.status, 128 + SIGKILL) << killed.output;  // as the shell says it
      EXPECT_FALSE(checkpoints(name).contains(6));
      resumes(name, killed);
    }
}

TEST_F(KillTrials, RandomRanksAtRandomMoments) {
  const char* const asked = std::getenv("ECHELON_KILL_TRIALS");
  const int trials = asked != nullptr ? std::atoi(asked) : 40;
  std::mt19937 random(3);
  for (int trial = 0; trial < trials && !HasFailure(); ++trial) {
    const std::string name = fmt::format("trial{}", trial);
    const int victim = static_cast<int>(random() % ranks), wait_ms = static_cast<int>(random() % 900);
    SCOPED_TRACE(fmt::format("{}: rank {} after {} ms", name, victim, wait_ms));
    CommandResult killed;
    std::atomic<bool> ended{false};
    std::thread job([&] {
      killed = run_command(under_mpirun(ranks, training(name)));
      ended = true;
    });
    // From the first step on, so that most are hit at work.
    wait_until([&] { return ended || steps_logged(name) > 0; });
    std::this_thread::sleep_for(std::chrono::milliseconds(wait_ms));
    const CommandResult who =
        run_command(fmt::format("for p in $(pgrep -f 'checkpoint {}/{} '); do tr '\\0' '\\n' < "
                                "/proc/$p/environ 2>/dev/null | grep -qx "
                                "OMPI_COMM_WORLD_RANK={} && kill -9 $p; done; true",
                                std::string(directory_.path()), name, victim));
    EXPECT_EQ(who.status, 0);
    job.join();
    resumes(name, killed);
  }
}

// With invariant numerics what is left goes on on another mesh, and nobody can tell.
TEST_F(KillTrials, AnotherMeshGoesOnWithTheSameBits) {
  struct Job {
    int ranks;
    const char* mesh;
  };
  const std::vector<Job> jobs{{4, "--dp 4 --zero 1 --micro-batch 1"},
                              {4, "--dp 2 --tp 2 --zero 2 --micro-batch 1"},
                              {4, "--dp 2 --cp 2 --zero 3"},
                              {4, "--tp 2 --sp on --dp 2"},
                              {4, "--pp 2 --dp 2 --schedule gpipe --micro-batch 1"},
                              {4, "--cp 2 --pp 2 --micro-batch 2"},
                              {3, "--pp 3 --micro-batch 1"},
                              {2, "--dp 2 --micro-batch 2 --zero 3"},
                              {2, "--tp 2"},
                              {2, "--cp 2"},
                              {1, "--dp 1"}};
  constexpr int kills = 20, endless = 1000000;
  // At one learning rate, so that no step depends on which is the last.
  const auto command = [&](const Job& job, const std::string& name, std::size_t last) {
    return fmt::format(
        "{0} launch --ranks {1} --max-restarts 0 -- train --model gpt2-tiny --data {2}/text --numerics invariant "
        "--fingerprint {3} --steps {3} --lr 1e-3 --min-lr 1e-3 --global-batch 4 --seq-len 16 --threads 1 "
        "--sample 0 --eval-samples 0 "
        "--save-every 5 --keep 3 --timeout 300 --log {2}/{4}.jsonl --checkpoint {2}/{4} {5}",
        ECHELON_BINARY, job.ranks, std::string(directory_.path()), last, name, job.mesh);
  };
  const auto fingerprint = [](const CommandResult& r) {
    const std::string mark = "fingerprint ";
    const std::size_t place = r.output.rfind(mark);
    EXPECT_NE(place, std::string::npos) << r.output;
    return place == std::string::npos ? "" : r.output.substr(place + mark.size(), 16);
  };
  std::mt19937 random(5);
  for (int kill = 0; kill < kills; ++kill) {
    const Job& job = jobs[random() % jobs.size()];
    const unsigned victim = static_cast<unsigned>(random()) % static_cast<unsigned>(job.ranks);
    const std::size_t before = steps_logged("other");
    CommandResult killed;
    std::atomic<bool> ended{false};
    std::thread run([&] {
      killed = run_command(command(job, "other", endless));
      ended = true;
    });
    wait_until([&] { return ended || steps_logged("other") > before; });
    const CommandResult who =
        run_command(fmt::format("for p in $(pgrep -f 'checkpoint {}/other '); do tr '\\0' '\\n' < "
                                "/proc/$p/environ 2>/dev/null | grep -qx "
                                "OMPI_COMM_WORLD_RANK={} && kill -9 $p; done; true",
                                std::string(directory_.path()), victim));
    run.join();
    EXPECT_EQ(who.status, 0);
    ASSERT_EQ(killed.status, 3) << job.mesh << ", rank " << victim << ": " << killed.output;
  }
  const std::set<int> left = checkpoints("other");
  ASSERT_FALSE(left.empty());
  const auto last = static_cast<std::size_t>(*left.rbegin()) + 20;
  const CommandResult gone_on = run_command(command(jobs[2], "other", last));
  ASSERT_EQ(gone_on.status, 0) << gone_on.output;
  const CommandResult undisturbed = run_command(command({1, "--dp 1"}, "alone", last));
  ASSERT_EQ(undisturbed.status, 0) << undisturbed.output;
  EXPECT_EQ(fingerprint(gone_on), fingerprint(undisturbed));
}

}  // namespace
}  // namespace echelon::kill_trials_test
