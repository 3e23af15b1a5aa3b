// The program where the system gives it too little memory or too few threads: it says so in a sentence, with
// status 3, and no verb ends by a signal.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>

#include "run_command.h"
#include "temporary_directory.h"

namespace echelon::limits_test {
namespace {

using namespace checks;

// Far more than any of them takes: a run that is still there waits for ever.
constexpr const char* until_it_hangs = "timeout --signal=KILL 120";

// Words of libraries, which say nothing to who reads them.
void expect_no_raw_words(const std::string& text) {
  for (const char* raw :
       {"std::", "bad_alloc", "Resource temporarily unavailable", "json.exception", "basic_string",
        "filesystem error", "libgomp", "terminate called", "internal error", "oneDNN failed"})
    EXPECT_EQ(text.find(raw), std::string::npos) << raw << " in: " << text;
}

class Limits : public testing::Test {
 protected:
  Limits() {
    write_text(
        directory_ / "tiny.toml",
        "family = \"llama\"\nnum_layers = 2\nhidden = 24\nnum_heads = 6\nnum_kv_heads = 3\nhead_dim = 4\n"
        "mlp_hidden = 40\nvocab = 257\nmax_seq = 64\n");
    std::string text;
    for (int i = 0; i < 300; ++i) text += fmt::format("To be or not to be, that is question {}.\n", i);
    write_text(directory_ / "text.txt", text);
  }

  CommandResult limited(const std::string& limit, const std::string& arguments) const {
    return run_command(fmt::format("cd '{}' && rm -rf new && ulimit -c 0 && {} && exec {} '{}' {}",
                                   directory_.path().string(), limit, until_it_hangs, ECHELON_BINARY,
                                   arguments));
  }

  // In steps of the address space, from what the loader cannot work with to what is enough: close where it is
  // little, as that is where allocations fail one after another.
  void in_little_memory(const std::string& arguments, int least_mib, int most_mib, int steps = 24) const {
    std::map<int, int> ends;  // by status
    CommandResult last;
    for (int i = 0; i < steps; ++i) {
      const double part = static_cast<double>(i) / (steps - 1);
      const long kib = std::lround(1024.0 * least_mib * std::pow(double(most_mib) / least_mib, part));
      SCOPED_TRACE(fmt::format("ulimit -v {}; {}", kib, arguments));
      last = limited(fmt::format("ulimit -v {}", kib), arguments);
      // Before the program begins: the loader, or behind it the C++ library without room to throw anything in,
      // or what a library does as it is loaded (Highway measures the clock's resolution).
      if (last.status == 127 || (ends.empty() && last.output.starts_with("terminate called "))) continue;
      ++ends[last.status];
      EXPECT_TRUE(last.status == 0 || last.status == 2 || last.status == 3)
          << last.status << ": " << last.output;
      expect_no_raw_words(last.output);
      EXPECT_EQ(last.status == 0, last.output.find("echelon: ") == std::string::npos) << last.output;
    }
    EXPECT_EQ(last.status, 0) << last.output;
    EXPECT_GE(ends.size(), 2u) << "memory never was too little";
  }

  static constexpr const char* small = "--model tiny.toml --global-batch 2 --seq-len 16";
  const TemporaryDirectory directory_;
};

TEST_F(Limits, TrainingInLittleMemory) {
  in_little_memory(
      fmt::format("train --data text.txt {} --steps 2 --warmup 0 --threads 2 --dp 2 --checkpoint new "
                  "--sample 0",
                  small),
      50, 700, 40);
}

TEST_F(Limits, VerifyInLittleMemory) {
  in_little_memory(fmt::format("verify {} --steps 1 --threads 1 --pp 2", small), 50, 700);
}

TEST_F(Limits, CheckpointsInLittleMemory) {
  ASSERT_EQ(
      limited("true", fmt::format("train --data text.txt {} --steps 1 --warmup 0 --threads 1 --checkpoint ck "
                                  "--sample 0",
                                  small))
          .status,
      0);
  in_little_memory("generate --checkpoint ck --threads 2 --max-tokens 3", 50, 500);
  in_little_memory("checkpoint verify ck", 50, 250);
}

TEST_F(Limits, PlanningInLittleMemory) {
  in_little_memory("plan --model gpt2-tiny --gpus 8 --machine a100-80", 50, 120);
  in_little_memory("simulate --schedule zb-auto --pp 4 --microbatches 8", 50, 120);
}

TEST_F(Limits, BenchInLittleMemory) {
  in_little_memory("bench comm --ranks 2 --size 1 --repeats 1", 50, 500);
}

// Of a user who runs nothing else: root may start what it likes, so the program runs as somebody without a
// name.
TEST_F(Limits, FewThreads) {
  const std::string somebody =
      ::geteuid() == 0 ? "exec setpriv --reuid=54321 --regid=54321 --clear-groups" : "exec";
  bool refused = false;
  for (int threads = 1; threads <= 12; ++threads)
    for (const char* verb :
         {"verify --model gpt2-tiny --dp 2 --global-batch 2 --seq-len 8 --steps 1 --threads 2",
          "plan --model gpt2-tiny --gpus 2 --machine a100-80", "bench comm --ranks 3 --size 1 --repeats 1"}) {
      SCOPED_TRACE(fmt::format("{} threads; {}", threads, verb));
      const CommandResult r =
          run_command(fmt::format("ulimit -c 0; unset TMPDIR; {} prlimit --nproc={} '{}' {}", somebody,
                                  threads, ECHELON_BINARY, verb));
      EXPECT_TRUE(r.status == 0 || r.status == 3) << r.status << ": " << r.output;
      expect_no_raw_words(r.output);
      if (r.status == 3) {
        refused = true;
        EXPECT_NE(r.output.find("no thread could be started"), std::string::npos) << r.output;
      }
    }
  EXPECT_TRUE(refused);
}

// Data that is larger than the memory: it is read where a sample lies.
TEST_F(Limits, DataBeyondTheMemory) {
  const std::string large = directory_ / "large.txt";
  write_text(large, std::string(100000, 'x'));
  std::filesystem::resize_file(large, std::uintmax_t{3} << 30);
  const CommandResult r = limited(
      "ulimit -v 1000000",
      fmt::format("train --data large.txt {} --steps 2 --warmup 0 --threads 1 --sample 0 --eval-samples 1",
                  small));
  EXPECT_EQ(r.status, 0) << r.output;
}

}  // namespace
}  // namespace echelon::limits_test
