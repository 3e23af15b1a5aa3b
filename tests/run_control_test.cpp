// What steers a run from outside or beside its steps: being asked to stop, steps that are skipped,
// checkpoints written beside them, and which rank is slow.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <csignal>
#include <limits>
#include <thread>

#include "checkpoint/checkpoint.h"
#include "mesh_runs.h"
#include "train/dry_job.h"
#include "train/refuse_request.h"
#include "train/session.h"
#include "untimed.h"

namespace echelon::run_control_test {
namespace {

using namespace checks;
namespace fs = std::filesystem;

class RunControl : public testing::Test {
 protected:
  RunControl() {
    std::string text;
    for (int i = 0; i < 60; ++i) text += fmt::format("{} bottles of {} on the wall\n", i, i * i);
    write_text(directory_ / "text", text);
    data_ = std::make_unique<TokenData>(std::vector{directory_ / "text"}, bytes_vocab);
  }

  TrainRequest request(int dp, int pp, const std::string& schedule = "1f1b") const {
    TrainRequest r = untimed();
    r.plan = odd_plan(odd_llama(), dp, 1, false);
    r.plan.model.vocab = bytes_vocab;
    r.plan.global_batch = 8;
    r.plan.mesh.set(Axis::pp, pp);
    r.plan.schedule = schedule;
    r.optimizer.total_steps = 12;
    r.optimizer.warmup_steps = 2;
    if (schedule == "pipedream") r.optimizer.clip = 0;
    r.run.timeout = patience;
    r.eval_samples = 0;
    return r;
  }
  std::vector<double> losses(const TrainRequest& r, TrainSummary* summary = nullptr) const {
    std::vector<double> all;
    TrainObserver observer;
    observer.on_step = [&](const StepRecord& step) { all.push_back(step.loss); };
    const TrainSummary s = train(r, *data_, observer);
    if (summary != nullptr) *summary = s;
    return all;
  }

  const TemporaryDirectory directory_;
  std::unique_ptr<TokenData> data_;
};

// Bytes of the kernels' own are the same for all.
std::int64_t peak_with_scratch(const TrainRequest& r, const Memory& memory) {
  return memory.total() + scratch_bytes(r.plan, r.run);
}

// As a program may ask for; the flags of the binary cannot.
TEST_F(RunControl, WhatWouldCrashIsRefused) {
  TrainRequest r = request(1, 1);
  r.run.threads_per_rank = 0;
  expect_contains(message_of<RequestError>([&] { train(r, *data_, {}); }), {"--threads 0"});
  r = request(1, 1);
  r.plan.model.vocab = bytes_vocab - 1;
  expect_contains(message_of<RequestError>([&] { train(r, *data_, {}); }), {"--data", "a vocabulary of 257"});
}

// The limit is each rank's, and what it holds when the text at the end is made counts.
TEST_F(RunControl, AMemoryLimitCountsTheTextThatIsMade) {
  for (const auto& [dp, pp, cp, schedule] :
       {std::tuple{1, 1, 1, "1f1b"}, {2, 2, 1, "1f1b"}, {1, 1, 2, "1f1b"}, {1, 2, 1, "pipedream"}}) {
    TrainRequest r = request(dp, pp, schedule);
    r.plan.zero = dp > 1 ? 3 : 0;
    r.plan.mesh.set(Axis::cp, cp);
    r.plan.seq_len = 4;
    r.plan.global_batch = 2;
    r.plan.micro_batch = 1;
    r.plan.model.max_seq = 2500;
    r.optimizer.total_steps = 2;
    r.sample_tokens = 2000;
    r.generate.ends = [](std::int32_t) { return true; };
    SCOPED_TRACE(describe(r.plan));
    const PipelineLayout pipeline(r.plan);
    std::int64_t step = 0, text = 0;
    for (const RankClass& ranks : dry_job(r.plan, pipeline, {}, {.text = r.sampled_text()}).classes) {
      step = std::max(step, peak_with_scratch(r, ranks.run.peak));
      text = std::max(text, peak_with_scratch(r, ranks.run.of_text));
    }
    ASSERT_GT(text, step);
    r.run.memory_limit = text;
    EXPECT_EQ(losses(r).size(), 2u);
    r.run.memory_limit = text - 1;
    expect_contains(message_of<RequestError>([&] { losses(r); }), {"--memory-limit", "--sample 2000"});
    r.sample_tokens = 0;
    r.run.memory_limit = step;
    EXPECT_EQ(losses(r).size(), 2u);
    r.run.memory_limit = step - 1;
    expect_contains(message_of<RequestError>([&] { losses(r); }), {"--memory-limit", "activations"});
  }
}

// Workers have no moments, and servers have all of them.
TEST_F(RunControl, AMemoryLimitIsThatOfWorkersAndServers) {
  TrainRequest r = request(2, 1);
  r.plan.seq_len = 1;
  r.plan.micro_batch = 1;
  r.optimizer.total_steps = 2;
  r.asynchronous = AsynchronousOptions{0, 1};
  const PipelineLayout pipeline(r.plan);
  const std::int64_t worker = peak_with_scratch(r, predict_memory(r.plan, pipeline, {}, {.is_worker = true})),
                     with_moments = peak_with_scratch(r, predict_memory(r.plan, pipeline)),
                     server =
                         peak_with_scratch(r, predict_server_memory(r.plan, pipeline, *r.asynchronous, 0));
  ASSERT_GT(server, with_moments);
  ASSERT_LT(worker, with_moments);
  r.run.memory_limit = server - 1;
  expect_contains(message_of<RequestError>([&] { losses(r); }),
                  {"--memory-limit", "server 0 needs", "--servers"});
  r.asynchronous->servers = 8;  // each has less than a worker
  r.run.memory_limit = worker - 1;
  expect_contains(message_of<RequestError>([&] { losses(r); }), {"--memory-limit", "rank 0 needs"});
  r.run.memory_limit = worker;
  TrainSummary summary;
  EXPECT_EQ(losses(r, &summary).size(), 2u);
  EXPECT_EQ(summary.measured_memory, summary.predicted_memory);
}

// As where no servers are.
TEST_F(RunControl, ServersKeepAsManyCheckpointsAsAreAskedFor) {
  TrainRequest r = request(2, 1);
  r.asynchronous = AsynchronousOptions{0, 2};
  r.checkpoint_directory = directory_ / "kept";
  r.keep = 2;
  r.log_paths = {directory_ / "log.jsonl"};
  for (const std::int64_t steps : {1, 2, 3}) {
    r.optimizer.total_steps = steps;
    r.optimizer.warmup_steps = 0;
    r.resume = steps > 1;
    losses(r);
  }
  const std::vector<std::string> kept = list_checkpoints(r.checkpoint_directory);
  ASSERT_EQ(kept.size(), 2u);
  EXPECT_EQ(checkpoint_step(kept.front()), 2);
  expect_contains(read_bytes(r.log_paths.front()), {kept.back()});
}

// One rank hears of it; all end behind the same step, and what follows is as if nobody had asked.
TEST_F(RunControl, ARunThatIsAskedToStopCanGoOn) {  // long
  for (const auto& [dp, pp, schedule] :
       {std::tuple{2, 1, "1f1b"}, {1, 2, "1f1b"}, {2, 2, "pipedream"}, {1, 1, "1f1b"}}) {
    SCOPED_TRACE(fmt::format("dp {} pp {} {}", dp, pp, schedule));
    const std::vector<double> whole = losses(request(dp, pp, schedule));
    TrainRequest stopped = request(dp, pp, schedule);
    stopped.checkpoint_directory = directory_ / fmt::format("{}{}{}", dp, pp, schedule);
    std::atomic<int> asked{0};
    stopped.stop_requested = [&] { return asked++ == 3 * dp * pp; };  // once, by some rank, after three steps
    TrainSummary summary;
    std::vector<double> found = losses(stopped, &summary);
    EXPECT_TRUE(summary.stopped);
    EXPECT_GT(summary.last_step, 3);
    EXPECT_LT(summary.last_step, 9);
    EXPECT_EQ(checkpoint_step(summary.checkpoint), summary.last_step);
    TrainRequest resumed = request(dp, pp, schedule);
    resumed.checkpoint_directory = stopped.checkpoint_directory;
    resumed.resume = true;
    const std::vector<double> rest = losses(resumed);
    // A schedule that does not flush starts its stream anew, and so has other delays at first.
    if (std::string(schedule) == "pipedream") continue;
    found.insert(found.end(), rest.begin(), rest.end());
    EXPECT_EQ(found, whole);
  }
}

// Rank 0 is asked once it has shown the step, and the others have not gone on.
TEST_F(RunControl, ARunThatStopsAtOnceEndsWithTheStep) {
  for (const auto& [dp, pp, schedule] :
       {std::tuple{2, 1, "1f1b"}, {1, 2, "1f1b"}, {2, 2, "pipedream"}, {1, 1, "1f1b"}}) {
    SCOPED_TRACE(fmt::format("dp {} pp {} {}", dp, pp, schedule));
    TrainRequest r = request(dp, pp, schedule);
    r.optimizer.clip = 0;  // so that no sum over the ranks holds the others back
    r.stops_at_once = true;
    std::atomic<std::int64_t> shown{0};
    r.stop_requested = [&] { return shown == 3; };
    TrainObserver observer;
    observer.on_step = [&](const StepRecord& step) { shown = step.step; };
    const TrainSummary summary = train(r, *data_, observer);
    EXPECT_TRUE(summary.stopped);
    // A stream has begun the fourth when the third is through, and takes one more to be empty.
    EXPECT_EQ(summary.last_step, std::string(schedule) == "pipedream" ? 5 : 3);
    EXPECT_EQ(shown, summary.last_step);
  }
}

// A request in a step, or before the first, is heard in that step.
TEST_F(RunControl, ARunEndsWithTheStepInWhichItIsAskedToStop) {
  for (const auto& [dp, pp, schedule] :
       {std::tuple{2, 1, "1f1b"}, {1, 2, "1f1b"}, {1, 2, "pipedream"}, {1, 1, "1f1b"}})
    for (const std::int64_t asked_after : {0, 2}) {
      SCOPED_TRACE(fmt::format("dp {} pp {} {}, asked after step {}", dp, pp, schedule, asked_after));
      TrainRequest r = request(dp, pp, schedule);
      r.checkpoint_directory = directory_ / fmt::format("asked{}{}{}{}", dp, pp, schedule, asked_after);
      std::atomic<std::int64_t> shown{0};
      r.stop_requested = [&] { return shown >= asked_after; };
      TrainObserver observer;
      observer.on_step = [&](const StepRecord& step) { shown = step.step; };
      const TrainSummary summary = train(r, *data_, observer);
      EXPECT_TRUE(summary.stopped);
      EXPECT_EQ(checkpoint_step(summary.checkpoint), summary.last_step);
      // Of a stream a step is shown in the next, and one more empties it. Another rank than rank 0, which shows the
      // steps, may speak a little later than that.
      const bool flushes = schedule != std::string("pipedream");
      const std::int64_t last = flushes ? asked_after + 1 : asked_after == 0 ? 2 : asked_after + 3;
      EXPECT_LE(summary.last_step, last);
      EXPECT_GE(summary.last_step, asked_after == 0 ? last : asked_after);
    }
}

// What was computed is worth more than a line about it: the run is saved, and then fails.
TEST_F(RunControl, ARunWhoseLogIsLostIsSavedFirst) {
  const auto before = std::signal(SIGPIPE, SIG_IGN);
  for (const auto& [dp, pp, schedule] : {std::tuple{2, 1, "1f1b"}, {1, 2, "pipedream"}}) {
    TrainRequest r = request(dp, pp, schedule);
    r.checkpoint_directory = directory_ / fmt::format("lost{}", schedule);
    const std::string pipe = directory_ / fmt::format("pipe{}", schedule), whole = directory_ / "whole.jsonl";
    r.log_paths = {pipe, whole};
    ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
    const int reader = ::open(pipe.c_str(), O_RDONLY | O_NONBLOCK);
    ASSERT_GE(reader, 0);
    TrainObserver observer;
    std::int64_t shown = 0;
    observer.on_step = [&](const StepRecord& step) {
      shown = step.step;
      if (step.step == 3) ::close(reader);
    };
    const std::string why = message_of<RunError>([&] { train(r, *data_, observer); });
    EXPECT_GE(shown, 4);
    EXPECT_LT(shown, 9);
    const auto saved = list_checkpoints(r.checkpoint_directory);
    ASSERT_EQ(saved.size(), 1u);
    EXPECT_EQ(checkpoint_step(saved.front()), shown);
    expect_contains(why, {"--log " + pipe, "cannot be written any more", saved.front()});
    expect_contains(read_bytes(whole), {fmt::format("{{\"step\":{},\"loss\"", shown), "summary"});
  }
  std::signal(SIGPIPE, before);
}

// The checkpoint would say that it was trained on what was there at the start. What is only added is not
// read.
TEST_F(RunControl, NothingIsSavedOfDataThatWereChangedMeanwhile) {
  const std::string text = directory_ / "text", whole = read_bytes(text);
  for (const bool is_other : {false, true}) {
    TrainRequest r = request(1, 1);
    r.save_every = 4;
    r.checkpoint_directory = directory_ / (is_other ? "other" : "longer");
    TrainObserver observer;
    observer.on_step = [&](const StepRecord& step) {
      if (step.step != 5) return;
      write_text(text, is_other ? std::string(whole.size(), 'x') : whole + "and more\n");
      fs::last_write_time(text, fs::last_write_time(text) + std::chrono::seconds(1));  // clocks of files tick
    };
    const auto trained = [&] { train(r, TokenData({text}, bytes_vocab), observer); };
    if (!is_other) {
      trained();
      EXPECT_EQ(list_checkpoints(r.checkpoint_directory).size(), 3u);
      write_text(text, whole);
      continue;
    }
    expect_contains(message_of<RunError>(trained), {"--data " + text, "changed while it was read"});
    const auto saved = list_checkpoints(r.checkpoint_directory);
    ASSERT_EQ(saved.size(), 1u);
    EXPECT_EQ(checkpoint_step(saved.front()), 4);
  }
}

// As logrotate's copytruncate does: what is written later is not preceded by a hole.
TEST_F(RunControl, ALogThatIsEmptiedMeanwhileGoesOn) {
  TrainRequest r = request(1, 1);
  const std::string log = directory_ / "log.jsonl";
  r.log_paths = {log};
  TrainObserver observer;
  observer.on_step = [&](const StepRecord& step) {
    if (step.step == 5) fs::resize_file(log, 0);
  };
  train(r, *data_, observer);
  EXPECT_TRUE(read_bytes(log).starts_with("{\"step\":6,\"loss\"")) << read_bytes(log);
}

TEST_F(RunControl, CheckpointsWrittenBesideTheStepsAreThoseWrittenBetweenThem) {
  std::vector<std::string> directories;
  for (bool beside : {false, true}) {
    TrainRequest r = request(2, 2);
    r.plan.zero = 1;
    r.save_every = 4;
    r.save_beside = beside;
    r.checkpoint_directory = directory_ / (beside ? "beside" : "between");
    losses(r);
    directories.push_back(r.checkpoint_directory);
  }
  for (const char* step : {"step-00000004", "step-00000008", "step-00000012"})
    for (const auto& entry : fs::directory_iterator(fs::path(directories[0]) / step))
      EXPECT_EQ(read_bytes(entry.path()),
                read_bytes(fs::path(directories[1]) / step / entry.path().filename()))
          << entry.path();
}

TEST_F(RunControl, OnlyTheLastCheckpointsAreKept) {
  TrainRequest r = request(2, 1);
  r.save_every = 2;
  r.keep = 2;
  r.checkpoint_directory = directory_ / "kept";
  for (const char* stale :
       {".step-00000002.unfinished", ".step-00000004.removed-0123"})  // of a run that was killed
    fs::create_directories(fs::path(directory_ / "kept") / stale);
  losses(r);
  const auto left = list_checkpoints(r.checkpoint_directory);
  ASSERT_EQ(left.size(), 2u);
  EXPECT_EQ(checkpoint_step(left[0]), 10);
  EXPECT_EQ(checkpoint_step(left[1]), 12);
  EXPECT_EQ(std::distance(fs::directory_iterator(r.checkpoint_directory), {}), 3);
  EXPECT_TRUE(fs::exists(fs::path(r.checkpoint_directory) / ".lock"));
}

// On clocks that go on by looks and by what a rank sleeps: how long others have to wait for a core is
// nothing.
TEST_F(RunControl, TheSlowRankIsNamed) {
  TrainRequest r = request(4, 1);
  r.run.time = time_of_each_thread(std::chrono::milliseconds(1));
  r.straggler_every = 5;
  r.straggler = Straggler{2, 20};
  std::vector<WorkSpread> spreads;
  TrainObserver observer;
  observer.on_spread = [&](const WorkSpread& s) { spreads.push_back(s); };
  train(r, *data_, observer);
  ASSERT_EQ(spreads.size(), 2u);  // the last steps are too few for a third
  EXPECT_EQ(spreads[0].first_step, 1);
  EXPECT_EQ(spreads[0].last_step, 5);
  EXPECT_EQ(spreads[1].last_step, 10);
  for (const WorkSpread& s : spreads) {
    ASSERT_EQ(s.seconds.size(), 4u);
    EXPECT_EQ(s.slowest(), 2);
  }
}

// A value that is not a number, put where every mesh has it.
void poison(const Trainer& trainer, const std::string& name, double value) {
  if (const Parameter* p = trainer.parameters().find_here(name)) p->value.host<double>()[1] = value;
}

TEST(NonFinite, AStepIsSkippedWholeAndTheTensorNamed) {
  for (auto [dp, tp, zero] : {std::tuple{1, 1, 0}, {2, 1, 1}, {2, 2, 0}, {2, 1, 2}}) {
    Plan plan = odd_plan(odd_llama(), dp, tp, tp > 1);
    plan.zero = zero;
    const std::string name = "model.layers.1.input_layernorm.weight";
    on_mesh(plan, [&](const Rank& rank) {
      Trainer trainer(rank, plan, {}, 1), undisturbed(rank, plan, {}, 1);
      trainer.skip_nonfinite();
      const SampleSource samples = random_samples(plan);
      trainer.step(0, samples, 1);
      const double before = trainer.parameters().find(name).value.host<double>()[1];
      poison(trainer, name, std::numeric_limits<double>::quiet_NaN());
      const auto values = gather(rank, trainer, ParameterTensor::exp_avg);
      const StepResult skipped = trainer.step(1, samples, 1).front();
      EXPECT_FALSE(std::isfinite(skipped.loss));
      EXPECT_NE(skipped.skipped.find("the gradient of model."), std::string::npos) << skipped.skipped;
      EXPECT_EQ(gather(rank, trainer, ParameterTensor::exp_avg), values);
      EXPECT_EQ(trainer.updates(2), 1);
      // Healed, it goes on as if the step had not been.
      poison(trainer, name, before);
      EXPECT_TRUE(trainer.step(2, samples, 1).front().skipped.empty());
      undisturbed.step(0, samples, 1);
      undisturbed.resume(2, 1);
      undisturbed.step(2, samples, 1);
      EXPECT_EQ(gather(rank, trainer, ParameterTensor::value),
                gather(rank, undisturbed, ParameterTensor::value));
    });
    // Without being told to, the run ends, and names it too.
    const std::string message = message_of<RunError>([&] {
      on_mesh(plan, [&](const Rank& rank) {
        Trainer trainer(rank, plan, {}, 1);
        poison(trainer, name, std::numeric_limits<double>::infinity());
        trainer.step(0, random_samples(plan), 1);
      });
    });
    expect_contains(message, {"step 1", "the gradient of model.", "nothing was updated"});
  }
}

}  // namespace
}  // namespace echelon::run_control_test
