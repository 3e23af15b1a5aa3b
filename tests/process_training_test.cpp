// Training on processes is training on threads: the same losses, norms and checkpoints to the last bit, and
// the same bounds of verify.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <vector>

#include "bottles.h"
#include "command_runs.h"
#include "spec/model_spec.h"
#include "spec/precision.h"
#include "temporary_directory.h"
#include "tensor/kernels.h"
#include "trace_checks.h"

namespace echelon::process_training_test {
namespace {

using namespace echelon::checks;
using nlohmann::json;

struct Case {
  int ranks;
  const char* flags;
  const char* model = "llama-tiny";
};

class ProcessTraining : public testing::Test {
 protected:
  ProcessTraining() {
    write_text(directory_ / "text", bottles(400));
  }
  std::string training(const char* flags, const std::string& name, int steps = 3,
                       const char* model = "llama-tiny") const {
    return fmt::format(
        "train --model {5} --data {0}/text {1} --precision {2} --global-batch 8 --micro-batch 1 --seq-len "
        "24 --steps {4} --threads 1 --sample 4 --checkpoint {0}/{3} --log {0}/{3}.jsonl",
        std::string(directory_.path()), flags, ECHELON_TEST_DTYPE, name, steps, model);
  }
  // What does not depend on the clock.
  std::vector<json> log(const std::string& name) const {
    std::istringstream lines(read_bytes(directory_ / (name + ".jsonl")));
    std::vector<json> kept;
    for (std::string line; std::getline(lines, line);) {
      json record = json::parse(line);
      if (record.contains("start") || record.contains("summary") || record.contains("checkpoint")) continue;
      for (const char* timed : {"tokens_per_second", "mfu", "step_seconds"}) record.erase(timed);
      kept.push_back(record);
    }
    return kept;
  }
  void same(const Case& c) const {
    SCOPED_TRACE(fmt::format("{} ranks: {}", c.ranks, c.flags));
    const std::string threads = fmt::format("threads{}", ++count_),
                      processes = fmt::format("processes{}", count_);
    const CommandResult a =
        run_command(fmt::format("{} {}", ECHELON_BINARY, training(c.flags, threads, 3, c.model)));
    ASSERT_EQ(a.status, 0) << a.output;
    const CommandResult b = run_command(under_mpirun(c.ranks, training(c.flags, processes, 3, c.model)));
    ASSERT_EQ(b.status, 0) << b.output;
    EXPECT_EQ(log(threads), log(processes));
    EXPECT_EQ(log(threads).size(), 4u);
    EXPECT_NE(b.output.find("nodes   1 node"), std::string::npos) << b.output;
    // Bytes sent, and memory, are those of threads too: the summary's lines are the same.
    const auto line = [](const std::string& text, const char* begin) {
      const std::size_t at = text.find(begin);
      return at == std::string::npos ? std::string() : text.substr(at, text.find('\n', at) - at);
    };
    for (const char* begin :
         {"  total ", "  dp all_reduce ", "  tp all_gather ", "  pp send ", "  ep all_to_all "})
      EXPECT_EQ(line(a.output, begin), line(b.output, begin));
    const CommandResult diff = run_command(fmt::format("{} checkpoint diff {}/{} {}/{}", ECHELON_BINARY,
                                                       std::string(directory_.path()), threads,
                                                       std::string(directory_.path()), processes));
    EXPECT_EQ(diff.status, 0) << diff.output;
  }
  void proves(const Case& c) const {
    const CommandResult r =
        run_command(under_mpirun(c.ranks, fmt::format("verify --model {} {} --precision f64 --global-batch 8 "
                                                      "--seq-len 12 --steps 2 --threads 1",
                                                      c.model, c.flags)));
    EXPECT_EQ(r.status, 0) << c.flags << "\n" << r.output;
    EXPECT_NE(r.output.find("PASS"), std::string::npos) << c.flags << "\n" << r.output;
  }

  const TemporaryDirectory directory_;
  mutable int count_ = 0;
};

TEST_F(ProcessTraining, TwoRanks) {
  for (const Case& c : {Case{2, "--dp 2 --zero 2"}, Case{2, "--tp 2"}}) same(c);
  proves({2, "--dp 1 --tp 1 --pp 2 --schedule zb-h1"});
}

TEST_F(ProcessTraining, FourRanks) {
  for (const Case& c :
       {Case{4, "--dp 2 --tp 2 --zero 3"}, Case{4, "--dp 4 --compress int8"},
        Case{4, "--pp 4 --schedule 1f1b"}, Case{4, "--pp 2 --dp 2 --schedule pipedream --clip 0"},
        Case{4, "--dp 4 --compress powersgd:2 --zero 1"}, Case{4, "--dp 2 --cp 2"},
        Case{4, "--dp 4 --tp 1 --ep 4 --zero 1", "mixtral-tiny"}})
    same(c);
  for (const Case& c :
       {Case{4, "--dp 2 --tp 1 --pp 2 --schedule zb-v"}, Case{4, "--dp 1 --tp 4"},
        Case{4, "--dp 4 --tp 1 --zero 3 --hsdp 2"}, Case{4, "--dp 1 --cp 2 --tp 2 --cp-kind ulysses"}})
    proves(c);
}

TEST_F(ProcessTraining, EightRanks) {
  for (const Case& c :
       {Case{8, "--dp 2 --tp 2 --pp 2 --zero 1"}, Case{8, "--pp 4 --tp 2 --schedule interleaved --chunks 2"},
        Case{8, "--dp 8 --zero 3"}})
    same(c);
  for (const Case& c : {Case{8, "--dp 2 --tp 2 --pp 2"}, Case{8, "--pp 2 --dp 2 --tp 2 --schedule dualpipe"},
                        Case{8, "--pp 2 --dp 2 --tp 2 --ep 2 --schedule dualpipe", "deepseek-tiny"}})
    proves(c);
}

// Every process is in the trace of rank 0, with what it would have sent as a thread.
TEST_F(ProcessTraining, IsTracedAsThreadsAre) {
  const auto traced = [&](const std::string& name) {
    return read_trace(read_bytes(directory_ / (name + ".json")));
  };
  const auto flags = [&](const std::string& name) {
    return fmt::format("--dp 2 --tp 2 --trace {}/{}.json", std::string(directory_.path()), name);
  };
  const CommandResult a =
      run_command(fmt::format("{} {}", ECHELON_BINARY, training(flags("threads").c_str(), "threads")));
  ASSERT_EQ(a.status, 0) << a.output;
  const CommandResult b = run_command(under_mpirun(4, training(flags("processes").c_str(), "processes")));
  ASSERT_EQ(b.status, 0) << b.output;
  const ReadTrace threads = traced("threads"), processes = traced("processes");
  EXPECT_EQ(processes.ranks, threads.ranks);
  ASSERT_EQ(processes.ranks.size(), 4u);
  EXPECT_EQ(processes.sent, threads.sent);
  EXPECT_EQ(processes.sent[3].size(), 2u);  // of step 3, and behind it
}

// mpirun by itself would end the ranks a second later, with status 1.
TEST_F(ProcessTraining, LaunchEndsBehindTheStepWhenItIsToldTo) {
  for (const char* signal : {"TERM", "USR1"}) {
    const std::string name = std::string("stopped") + signal;
    const CommandResult r = run_command(fmt::format(
        "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; "
        "{} launch --ranks 2 -- {} --save-every 1 --keep 2 & "
        "while kill -0 $! && ! ls {}/{} 2>&1 | grep -q ^step; do sleep 0.05; done; kill -{} $!; wait $!",
        ECHELON_BINARY, training("--dp 2", name, 1'000'000), std::string(directory_.path()), name, signal));
    EXPECT_EQ(r.status, 0) << r.output;
    EXPECT_NE(r.output.find("stopped after step "), std::string::npos) << r.output;
    EXPECT_EQ(r.output.find("restart"), std::string::npos) << r.output;
  }
}

// The one that failed has a standard error that is full: another one says it.
TEST_F(ProcessTraining, WhereTheOneThatFailedCannotSpeakAnotherDoes) {
  std::string job = fmt::format("{} {}", ECHELON_BINARY, training("--dp 2", "mute"));
  job.replace(job.find("--log "), std::string::npos, "--log /dev/full");
  const CommandResult r = run_command(
      mpirun("--enable-recovery -n 1 sh -c '" + job + " 2>/dev/full' : -n 1 " + job, "timeout 300"));
  EXPECT_NE(r.output.find("echelon: rank 0 failed: --log /dev/full"), std::string::npos) << r.output;
  EXPECT_NE(r.output.find("rank 0, at fault"), std::string::npos) << r.output;
}

// What one refuses all refuse, and it is said once.
TEST_F(ProcessTraining, RefusalsAreSaidOnce) {
  const auto refused = [&](const std::string& arguments, const char* word) {
    const CommandResult r = run_command(under_mpirun(2, arguments));
    EXPECT_EQ(r.status, 2) << r.output;
    const std::size_t first = r.output.find(word);
    EXPECT_NE(first, std::string::npos) << r.output;
    EXPECT_EQ(r.output.find("echelon: "), r.output.rfind("echelon: ")) << r.output;
  };
  refused(training("--dp 4", "no"), "2 were started");
  refused(training("--dp 2 --lr -1", "no"), "--lr -1");
  refused(training("--dp 2 --nope", "no"), "--nope");
  refused(training("--dp 2 --staleness 1", "no"), "legal: threads");
  // Each process would be a whole job.
  refused(training("--dp 2 --comm threads", "no"), "--comm threads: 2 processes were started");
  refused(training("--dp 2 --record /dev/null/x", "no"), "--record /dev/null/x");
  // The one that says it must not be ended by mpirun because another one has left: that would show now and
  // then.
  for (int i = 0; i < 2; ++i) refused("verify --model llama-tiny --dp 2 --tp 1 --global-batch 1", "--dp 2");
}

// Of words that one process alone was given the first knows nothing.
TEST_F(ProcessTraining, WhatAnotherProcessCannotReadItSays) {
  const std::string right = fmt::format("-n 1 {} {}", ECHELON_BINARY, training("--dp 2", "no"));
  const CommandResult r = run_command(mpirun(right + " : " + right + " --nope", "timeout 300"));
  EXPECT_EQ(r.status, 2) << r.output;
  EXPECT_NE(r.output.find("echelon: rank 1: --nope: echelon train has no such flag"), std::string::npos)
      << r.output;
}

// Each read a text of its own and of the same length, and they trained on both.
TEST_F(ProcessTraining, RanksThatReadOtherDataAreNamed) {
  std::string other = read_bytes(directory_ / "text");
  other[other.size() / 2] ^= 1;
  write_text(directory_ / "text-1", other);
  write_text(directory_ / "text-0", read_bytes(directory_ / "text"));
  for (const char* verb : {"train --steps 1 --warmup 0", "verify --steps 1"}) {
    const CommandResult r = run_command(
        mpirun(fmt::format("-n 2 sh -c "
                           "'exec {} {} --model llama-tiny --dp 2 --global-batch 2 --seq-len 24 --threads 1 "
                           "--precision {} --data "
                           "{}/text-$OMPI_COMM_WORLD_RANK'",
                           ECHELON_BINARY, verb, ECHELON_TEST_DTYPE, directory_.path().string())));
    EXPECT_EQ(r.status, 2) << r.output;
    EXPECT_NE(r.output.find("--data"), std::string::npos) << r.output;
    EXPECT_NE(r.output.find("rank 1 ("), std::string::npos) << r.output;
  }
}

// As where hosts have other versions of a script: each would train weights of its own.
TEST_F(ProcessTraining, RanksThatWereToldOtherThingsAreNamed) {
  ModelSpec other = load_model("llama-tiny");
  write_text(directory_ / "model-0", to_toml(other));
  other.norm_eps = 0.1;
  write_text(directory_ / "model-1", to_toml(other));
  const std::string model = directory_ / "model-$OMPI_COMM_WORLD_RANK", rank = "$OMPI_COMM_WORLD_RANK";
  for (const auto& [flags, named] :
       {std::pair<std::string, std::string>{"train --steps 1 --model llama-tiny --lr 0.1" + rank,
                                            "--lr 0.11"},
        {"train --steps 1 --model llama-tiny --seed 1" + rank, "--seed 11"},
        {"train --steps 1 --model " + model, "norm_eps = 0.1"},
        {"verify --steps 1 --model llama-tiny --weight-decay 0.1" + rank, "--weight-decay 0.11"}}) {
    const CommandResult r = run_command(mpirun(
        fmt::format("-n 2 sh -c "
                    "'exec {} {} --dp 2 --global-batch 2 --seq-len 24 --threads 1 --precision {} --data {}'",
                    ECHELON_BINARY, flags, ECHELON_TEST_DTYPE, directory_ / "text")));
    EXPECT_EQ(r.status, 2) << r.output;
    for (const std::string& words : {named, std::string("rank 1 ("), std::string("the same on every rank")})
      EXPECT_NE(r.output.find(words), std::string::npos) << r.output;
  }
}

// As where hosts share no file system: the first checkpoint, perhaps after days, was where it was found out.
TEST_F(ProcessTraining, RanksThatSaveElsewhereAreNamed) {
  const CommandResult r = run_command(mpirun(fmt::format(
      "-n 2 sh -c "
      "'exec {} train --steps 1 --warmup 0 --model llama-tiny --dp 2 --global-batch 2 --seq-len 24 "
      "--threads 1 --precision {} --data {} --checkpoint {}/saved-$OMPI_COMM_WORLD_RANK'",
      ECHELON_BINARY, ECHELON_TEST_DTYPE, directory_ / "text", directory_.path().string())));
  EXPECT_EQ(r.status, 2) << r.output;
  for (const char* words : {"rank 1 (", "saved-1: is not the directory that rank 0 sees"})
    EXPECT_NE(r.output.find(words), std::string::npos) << r.output;
  EXPECT_EQ(r.output.find("step 1/1"), std::string::npos) << r.output;
  for (const char* name : {"saved-0", "saved-1"}) EXPECT_FALSE(std::filesystem::exists(directory_ / name));
}

// As where one host has AMX and another does not.
TEST_F(ProcessTraining, InvariantBitsAreNotThoseOfOtherKernels) {
  const PrecisionRecipe& precision = recipe(ECHELON_TEST_DTYPE);
  if (kernels_by(precision).find("AMX") == std::string::npos) GTEST_SKIP() << "this processor has no AMX";
  for (const char* verb : {"train --steps 1 --warmup 0", "verify --steps 1"})
    for (const bool invariant : {true, false}) {
      const CommandResult r = run_command(mpirun(fmt::format(
          "-n 2 sh -c "
          "'[ $OMPI_COMM_WORLD_RANK = 0 ] || export ECHELON_AMX=off; exec {} {} --model llama-tiny --dp 2 "
          "--global-batch 2 --seq-len 24 --threads 1 --precision {} --data {} --numerics {}'",
          ECHELON_BINARY, verb, ECHELON_TEST_DTYPE, directory_ / "text",
          invariant ? "invariant" : "ordinary")));
      EXPECT_EQ(r.status, invariant ? 2 : 0) << r.output;
      EXPECT_EQ(r.output.find("legal: hosts with the same instruction sets") != std::string::npos, invariant)
          << r.output;
    }
}

// As where one host has not been updated.
TEST_F(ProcessTraining, RanksThatRunAnotherBuildAreNamed) {
  const std::string other = directory_ / "other";
  std::filesystem::copy_file(ECHELON_BINARY, other);
  std::ofstream(other, std::ios::app) << 'x';
  const std::string flags = training("--dp 2", "builds", 1);
  for (const std::string& second : {other, std::string(ECHELON_BINARY)}) {
    const CommandResult r =
        run_command(mpirun(fmt::format("-n 1 {0} {1} : -n 1 {2} {1}", ECHELON_BINARY, flags, second)));
    EXPECT_EQ(r.status, 0) << r.output;
    EXPECT_EQ(r.output.find("runs another build of echelon than rank 0") != std::string::npos,
              second == other)
        << r.output;
    std::filesystem::remove_all(directory_ / "builds");
  }
}

// As where a file is missing on one host: the others do not wait for it.
TEST_F(ProcessTraining, WhatOneRankRefusesAllRefuse) {
  for (const char* verb : {"train --steps 1 --sample 0", "verify --steps 1"}) {
    const auto process = [&](const char* data) {
      return fmt::format(
          "-n 1 {} {} --model llama-tiny --dp 2 --tp 1 --global-batch 4 --seq-len 16 --threads 1 --precision {} "
          "--data {}/{}",
          ECHELON_BINARY, verb, ECHELON_TEST_DTYPE, std::string(directory_.path()), data);
    };
    const CommandResult r = run_command(mpirun(process("text") + " : " + process("absent"), "timeout 300"));
    EXPECT_EQ(r.status, 2) << verb << "\n" << r.output;
    EXPECT_NE(r.output.find("absent"), std::string::npos) << verb << "\n" << r.output;
    EXPECT_EQ(r.output.find("one rank against"), std::string::npos) << verb << "\n" << r.output;
  }
}

}  // namespace
}  // namespace echelon::process_training_test
