// The trace that ranks record of themselves: every rank, every call and every byte of a step is in it, and
// what is drawn from it is well formed.
#include <gtest/gtest.h>

#include <algorithm>

#include "bottles.h"
#include "draw/gantt.h"
#include "draw/page.h"
#include "draw/rank_rows.h"
#include "expert_runs.h"
#include "page_checks.h"
#include "trace_checks.h"
#include "train/rank_timeline.h"
#include "train/session.h"
#include "untimed.h"

namespace echelon::trace_test {
namespace {

// What the calls of a step sent, as Traffic counts it; the messages of collectives' algorithms, or all else.
Traffic traffic_of(const Trace& trace, std::int32_t step, bool parts = false) {
  Traffic traffic;
  for (const CallSpan& call : trace.calls) {
    if (call.step != step || call.is_part != parts) continue;
    VerbTraffic& cell = traffic.at(call.axis, call.verb);
    cell.calls += 1;
    cell.bytes += call.bytes;
  }
  return traffic;
}

using namespace checks;

Plan small_plan(ModelSpec model, int dp, int tp, int pp) {
  Plan plan = odd_plan(std::move(model), dp, tp, tp > 1);
  plan.mesh.set(Axis::pp, pp);
  plan.model.vocab = bytes_vocab;
  plan.global_batch = 4;
  return plan;
}

struct TracedCase {
  const char* name;
  Plan plan;
  Collectives collectives = Collectives::direct;
};

std::vector<TracedCase> traced_cases() {
  std::vector<TracedCase> cases{
      {"dp 2, tp 2, pp 2", small_plan(odd_llama(), 2, 2, 2)},
      {"collectives by messages", small_plan(odd_llama(), 2, 2, 1), Collectives::ring},
      {"zero 3", small_plan(odd_gpt2(), 3, 1, 1)},
      {"zero 1", small_plan(odd_gpt2(), 2, 1, 2)},
      {"ring", small_plan(odd_llama(), 1, 1, 1)},
      {"experts under DualPipe", small_plan(even_mixtral(2, 4), 2, 1, 2)},
      {"a stream", small_plan(odd_llama(), 1, 1, 2)}};
  cases[2].plan.zero = 3;
  cases[3].plan.zero = 1;
  cases[4].plan.mesh.set(Axis::cp, 2);
  cases[4].plan.seq_len = 12;
  cases[5].plan.mesh.ep = 2;
  cases[5].plan.schedule = "dualpipe";
  cases[5].plan.global_batch = 8;
  cases[5].plan.micro_batch = 1;
  cases[6].plan.schedule = "pipedream";
  return cases;
}

// Two steps; the trace keeps the last. The bytes are counted twice, by code that has nothing in common.
TEST(Trace, EveryRankCallAndByteOfAStepIsInIt) {
  for (const TracedCase& c : traced_cases()) {
    SCOPED_TRACE(c.name);
    const PipelineLayout pipeline(c.plan);
    const auto ranks = static_cast<std::size_t>(c.plan.mesh.num_ranks());
    std::vector<Traffic> sent(ranks), messages(ranks);
    std::vector<RankTimeline> timelines;
    ThreadWorld world(c.plan.mesh.num_ranks(), patience);
    const auto zero = Clock::now();
    run_ranks(world, [&](int index) {
      TraceRecorder recorder({}, zero, 1);
      Arena arena;
      const auto kernels = make_kernels(arena, c.plan.precision, 1);
      const Rank rank(world, c.plan.mesh, index, c.plan.precision, arena, *kernels, c.collectives, 0,
                      &recorder);
      OptimizerOptions optimizer;
      optimizer.clip = flushes(c.plan) ? 1 : 0;
      Trainer trainer(rank, c.plan, optimizer, 1);
      StepTrace trace(rank);
      const auto at = static_cast<std::size_t>(index);
      for (std::int64_t step = 0; step < 2; ++step) {
        const Traffic before = rank.traffic(), messages_before = rank.messages();
        trace.begin(step + 1);
        trainer.step(step, random_samples(c.plan), 2 - step);
        trace.end();
        sent[at] = rank.traffic() - before;
        messages[at] = rank.messages() - messages_before;
      }
      auto all = gather_timelines(rank, rank_timeline(rank, "rank", trainer.last_run().spans_since(zero)));
      if (index == 0) timelines = std::move(all);
    });
    ASSERT_EQ(timelines.size(), ranks);
    const ReadTrace read = read_trace(perfetto_json(timelines));
    ASSERT_EQ(read.ranks.size(), ranks);
    std::int64_t received = 0;
    for (std::size_t r = 0; r < ranks; ++r) {
      SCOPED_TRACE(read.ranks[r]);
      EXPECT_EQ(read.ranks[r].substr(0, 6), fmt::format("rank {}", r));
      EXPECT_EQ(read.sent[r].size(), 1u);  // the step before is forgotten
      EXPECT_EQ(read.sent[r].begin()->first, 2);
      EXPECT_EQ(read.sent[r].begin()->second, sent[r]);
      EXPECT_EQ(traffic_of(timelines[r].trace, 2), sent[r]);
      EXPECT_EQ(traffic_of(timelines[r].trace, 2, true), messages[r]);
      for (const char* name : {"step 2", "optimizer", "reduce gradients"})
        EXPECT_TRUE(read.names[r].contains(name)) << name;
      const std::vector<WorkSpan>& work = timelines[r].trace.work;
      const auto reduces = [](const WorkSpan& span) { return span.activity == Activity::reduce_gradients; };
      EXPECT_EQ(std::count_if(work.begin(), work.end(), reduces) == 1, flushes(c.plan));  // else each stage's
      // A stream has loaded its last step's data in the step before.
      for (const char* name : {"load data", "gradient norm"})
        EXPECT_EQ(read.names[r].contains(name), flushes(c.plan)) << name;
      EXPECT_EQ(read.names[r].contains("share parameters"), c.plan.zero_stage() == 1);
      EXPECT_EQ(read.on[r].contains("keys arriving"), c.plan.mesh.size(Axis::cp) > 1);
      for (Axis axis : traffic_axes) received += sent[r].at(axis, Verb::recv).calls;
      for (Axis axis : traffic_axes) received += messages[r].at(axis, Verb::recv).calls;
      for (const Span& span : timelines[r].pipeline)
        EXPECT_TRUE(read.names[r].contains(to_string(span.instruction)));
    }
    if (flushes(c.plan)) {
      EXPECT_EQ(read.arrows, received);  // no message crosses the step's beginning
    }
    Page page;
    page.kind = "timeline";
    page.ranks = timelines;
    const nlohmann::json done = document_of(page_html(page))["done"];
    ASSERT_EQ(done["ranks"].size(), ranks);
    for (std::size_t r = 0; r < ranks; ++r) EXPECT_EQ(done["ranks"][r]["rows"].size(), rank_rows(timelines[r]).size());
  }
}

class TracedRun : public testing::Test {
 protected:
  TracedRun() {
    write_text(directory_ / "text", bottles(60));
    data_ = std::make_unique<TokenData>(std::vector{directory_ / "text"}, bytes_vocab);
  }
  TrainSummary run(const Plan& plan, std::int64_t steps, bool trace,
                   std::optional<AsynchronousOptions> asynchronous = {}) const {
    TrainRequest r = untimed();
    r.plan = plan;
    r.optimizer.total_steps = steps;
    r.optimizer.warmup_steps = 0;
    r.run.timeout = patience;
    r.eval_samples = 2;
    r.validation_fraction = 0.2;
    r.checkpoint_directory = directory_ / fmt::format("{}{}", plan.mesh.describe(), trace);
    r.asynchronous = asynchronous;
    r.trace = trace;
    return train(r, *data_, {});
  }
  const TemporaryDirectory directory_;
  std::unique_ptr<TokenData> data_;
};

TEST_F(TracedRun, ShowsWhatComesBehindTheStepToo) {
  const Plan plan = small_plan(odd_llama(), 2, 1, 2);
  const TrainSummary summary = run(plan, 3, true);
  const ReadTrace read = read_trace(perfetto_json(summary.rank_timelines));
  ASSERT_EQ(read.ranks.size(), 4u);
  EXPECT_EQ(read.ranks[3], "rank 3: pp 1, dp 1, cp 0, tp 0");
  EXPECT_EQ(read.sent[0].at(3), summary.measured_traffic);
  for (std::size_t r = 0; r < 4; ++r) {
    for (const char* name : {"step 3", "validation", "copy checkpoint", "wait for checkpoint",
                             "commit checkpoint", "meet all ranks"})
      EXPECT_TRUE(read.on[r].at("compute").contains(name)) << name;
    EXPECT_TRUE(read.on[r].at("write checkpoint").contains("write checkpoint"));
    EXPECT_FALSE(read.names[r].contains("step 2"));
    EXPECT_GT(
        read.sent[r].at(0).at(Axis::pp, Verb::send).calls + read.sent[r].at(0).at(Axis::pp, Verb::recv).calls,
        0)
        << "messages of the validation";
  }
  EXPECT_TRUE(run(plan, 1, false).rank_timelines.empty());
}

TEST_F(TracedRun, HasWorkersAndServers) {
  const TrainSummary summary =
      run(small_plan(odd_gpt2(), 2, 1, 1), 3, true, AsynchronousOptions{.staleness = 0, .servers = 1});
  const ReadTrace read = read_trace(perfetto_json(summary.rank_timelines));
  ASSERT_EQ(read.ranks.size(), 3u);
  EXPECT_EQ(read.ranks[1].substr(0, 6), "rank 1");
  EXPECT_EQ(read.ranks[2].substr(0, 8), "server 0");
  EXPECT_EQ(read.sent[0].at(3), summary.measured_traffic);
  EXPECT_TRUE(read.names[2].contains("optimizer"));
  EXPECT_FALSE(read.names[0].contains("optimizer"));
}

TEST(TraceRecorder, KeepsTheLastStepsOnly) {
  TraceRecorder recorder({}, Clock::now() - std::chrono::seconds(1), 2);
  std::vector<TraceRecorder::CallNumber> calls;
  for (int step = 1; step <= 4; ++step) {
    recorder.begin_step(step);
    CallSpan call;
    call.posted = 10'000;
    call.end = TraceRecorder::under_way;
    calls.push_back(recorder.add(call));
    recorder.add(WorkSpan{Activity::step, step, 0, 20});
    if (step == 4) recorder.finish(calls[2], 30'000, 40'000);  // begun a step before
  }
  recorder.finish(calls[0], 1, 2);  // forgotten: nothing happens
  const Trace trace = recorder.trace();
  ASSERT_EQ(trace.calls.size(), 2u);
  ASSERT_EQ(trace.work.size(), 2u);
  EXPECT_EQ(trace.calls[0].step, 3);
  EXPECT_EQ(trace.calls[0].waited, 30'000);
  EXPECT_EQ(trace.calls[0].end, 40'000);
  EXPECT_GE(trace.calls[1].end, trace.calls[1].posted);
  EXPECT_EQ(trace.work[0].which, 3);
  recorder.finish(calls[3], 10'400, 20'000);  // at once: not hidden
  EXPECT_EQ(recorder.trace().calls[1].waited, 10'000);
}

// Two that overlap get a row each; what lies inside another is seen in front of it.
TEST(RankRows, SlicesLieInsideOneAnotherOrApart) {
  RankTimeline rank;
  rank.trace.groups = {"dp"};
  rank.trace.work = {
      {Activity::load_data, -1, 10, 20}, {Activity::optimizer, -1, 60, 80}, {Activity::step, 7, 0, 100}};
  const auto call = [](TraceTime begin, TraceTime posted, TraceTime waited, TraceTime end) {
    CallSpan c;
    c.axis = Axis::dp;
    c.verb = Verb::all_reduce;
    c.begin = begin, c.posted = posted, c.waited = waited, c.end = end;
    return c;
  };
  rank.trace.calls = {call(30, 32, 50, 55), call(35, 36, 55, 58), call(82, 84, 84, 90)};
  const std::vector<RankRow> rows = rank_rows(rank);
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0].name, "compute");
  EXPECT_EQ(rows[1].name, "dp");
  EXPECT_EQ(rows[2].name, "dp (2)");
  std::vector<std::tuple<std::string, TraceTime, TraceTime>> seen;
  for (const SeenSlice& s : seen_of(rows[0])) seen.emplace_back(rows[0].slices[s.slice].name, s.begin, s.end);
  const std::vector<std::tuple<std::string, TraceTime, TraceTime>> expected{{"step 7", 0, 10},
                                                                            {"load data", 10, 20},
                                                                            {"step 7", 20, 30},
                                                                            {"dp all_reduce: call", 30, 32},
                                                                            {"step 7", 32, 35},
                                                                            {"dp all_reduce: call", 35, 36},
                                                                            {"step 7", 36, 50},
                                                                            {"dp all_reduce: wait", 50, 55},
                                                                            {"dp all_reduce: wait", 55, 58},
                                                                            {"step 7", 58, 60},
                                                                            {"optimizer", 60, 80},
                                                                            {"step 7", 80, 82},
                                                                            {"dp all_reduce", 82, 90},
                                                                            {"step 7", 90, 100}};
  EXPECT_EQ(seen, expected);
  EXPECT_EQ(parents_of(rows[0])[1], 0);
}

}  // namespace
}  // namespace echelon::trace_test
