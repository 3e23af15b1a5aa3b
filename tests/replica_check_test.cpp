// Bits changed on purpose are found, their rank is named, and the run ends as if nobody had changed them.
#include "train/replica_check.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <span>

#include "bottles.h"
#include "case_choice.h"
#include "data/checksum.h"
#include "expert_runs.h"
#include "rank_runs.h"
#include "train/session.h"

namespace echelon::replica_check_test {
namespace {

using namespace checks;

constexpr std::int64_t run_steps_of_a_trial = 5, check_every = 2;

struct Shape {
  int dp = 1, tp = 1, pp = 1, cp = 1, ep = 1, zero = 0, hsdp = 1;
  const char* schedule = "1f1b";
};

Plan plan_of(ModelSpec model, const Shape& shape, const char* precision = ECHELON_TEST_DTYPE) {
  Plan plan = odd_plan(std::move(model), shape.dp, shape.tp, shape.tp > 1);
  plan.model.vocab = bytes_vocab;
  plan.mesh.set(Axis::pp, shape.pp);
  plan.mesh.set(Axis::cp, shape.cp);
  plan.mesh.ep = shape.ep;
  plan.zero = shape.zero;
  plan.hsdp = shape.hsdp;
  plan.schedule = shape.schedule;
  plan.global_batch = 8;
  plan.seq_len = 12;
  plan.precision = parse_recipe(precision, "--precision");
  return plan;
}

// One of each way that a parameter, its state or its gradients come to lie on ranks.
std::vector<Plan> plans() {
  std::vector<Plan> all;
  for (const Shape& shape : {Shape{},
                             {.dp = 2},
                             {.dp = 3, .zero = 1},
                             {.dp = 2, .zero = 2},
                             {.dp = 2, .zero = 3},
                             {.dp = 4, .zero = 2, .hsdp = 2},
                             {.tp = 2},
                             {.dp = 2, .tp = 2, .zero = 1},
                             {.pp = 2},
                             {.pp = 2, .schedule = "zb-h1"},
                             {.dp = 2, .pp = 2, .zero = 3},
                             {.pp = 2, .schedule = "dualpipe"},
                             {.cp = 2},
                             {.dp = 2, .cp = 2, .zero = 1}})
    all.push_back(plan_of(odd_llama(shape.pp > 1, 2, 4), shape));
  all.push_back(plan_of(odd_gpt2(true, 4), {.dp = 2, .pp = 2}));
  all.push_back(plan_of(even_mixtral(2), {.dp = 2, .ep = 2}));
  all.push_back(plan_of(even_deepseek(2), {.dp = 4, .ep = 2, .zero = 1}));
  all.back().balancing.bias_rate = 0.01;
  all.push_back(plan_of(even_mixtral(2), {.dp = 2, .tp = 2, .ep = 2}));
  for (const char* compress : {"int8", "topk:0.1", "powersgd:2"}) {
    all.push_back(plan_of(odd_llama(), {.dp = 2}));
    all.back().compression = parse_compression(compress, "--compress");
  }
  if (std::string(ECHELON_TEST_DTYPE) == "f32") {
    all.push_back(plan_of(odd_llama(), {.dp = 2, .tp = 2}, "f64"));
    all.push_back(plan_of(odd_llama(), {.dp = 2, .tp = 2, .zero = 1}, "f64"));
    all.back().optimizer = OptimizerKind::muon;
    all.push_back(plan_of(odd_llama(), {.dp = 2, .zero = 2}, "bf16"));
    all.push_back(plan_of(odd_llama(), {.dp = 2, .zero = 1}, "bf16-lean"));
  }
  for (const Shape& shape : {Shape{.dp = 2, .zero = 3}, {.dp = 2, .tp = 2}, {.pp = 2}}) {
    all.push_back(plan_of(odd_llama(), shape));
    all.back().numerics = Numerics::invariant;
  }
  return all;
}

std::string name_of(const Plan& plan) {
  return fmt::format("{} {} {} zero {} hsdp {} {} {}", plan.model.name, plan.precision.name,
                     plan.mesh.describe(), plan.zero, plan.hsdp, plan.schedule,
                     compression_text(plan.compression));
}

struct Ended {
  std::vector<double> losses;
  std::vector<Corruption> found;
  TrainSummary summary;
  std::string error;
  const std::string& fingerprint() const { return summary.fingerprint; }
};

class ReplicaCheckRuns : public testing::Test {
 protected:
  ReplicaCheckRuns() {
    write_text(directory_ / "text", bottles(60));
    data_ = std::make_unique<TokenData>(std::vector{directory_ / "text"}, bytes_vocab);
  }

  TrainRequest request(const Plan& plan, std::int64_t steps = run_steps_of_a_trial) const {
    TrainRequest r;
    r.plan = plan;
    r.optimizer.total_steps = steps;
    r.optimizer.warmup_steps = 1;
    r.run.timeout = patience;
    r.eval_samples = 0;
    r.validation_fraction = 0;
    r.straggler_every = 0;
    r.fingerprint_every = steps;  // after the last
    r.priced_step = StepPrediction{1, 0};
    r.peak_flops = 1e12;
    return r;
  }
  TrainRequest checked(TrainRequest r, std::int64_t every = check_every) const {
    r.check_every = every;
    return r;
  }
  static TrainRequest flipped(TrainRequest r, const PlantedFlip& flip) {
    r.flip = flip;
    return r;
  }
  Ended run(const TrainRequest& r) const {
    Ended ended;
    TrainObserver observer;
    observer.on_step = [&](const StepRecord& step) {
      const auto at = static_cast<std::size_t>(step.step);
      if (ended.losses.size() < at) ended.losses.resize(at);
      ended.losses[at - 1] = step.loss;
    };
    observer.on_corruption = [&](const Corruption& corruption) { ended.found.push_back(corruption); };
    try {
      ended.summary = train(r, *data_, observer);
    } catch (const RunError& error) {
      ended.error = error.what();
    }
    return ended;
  }

  const TemporaryDirectory directory_;
  std::unique_ptr<TokenData> data_;
};

TEST_F(ReplicaCheckRuns, NothingIsFoundWhereNothingIsPlanted) {  // long
  for (const Plan& plan : plans()) {
    if (!is_taken(12)) continue;
    SCOPED_TRACE(name_of(plan));
    const Ended plain = run(request(plan)), ended = run(checked(request(plan)));
    EXPECT_EQ(ended.error, "");
    EXPECT_TRUE(ended.found.empty());
    EXPECT_EQ(ended.fingerprint(), plain.fingerprint());
    EXPECT_EQ(ended.losses, plain.losses);
    EXPECT_EQ(ended.summary.checked_steps, run_steps_of_a_trial);
    for (const MemoryCategory c : all_memory_categories) {
      // Where tokens choose experts, what these hold of them follows from the data, and with it when a rank
      // holds most.
      const bool is_state = c == MemoryCategory::parameters || c == MemoryCategory::optimizer;
      if (plan.model.experts != Experts::none && !is_state) continue;
      EXPECT_EQ(ended.summary.predicted_memory[c], ended.summary.measured_memory[c])
          << memory_category_name(c);
    }
    EXPECT_EQ(ended.summary.traffic_by_data, ended.summary.measured_traffic);
    if (plan.model.experts == Experts::none) {  // whose exchanges follow from the data
      EXPECT_EQ(ended.summary.checked_traffic / run_steps_of_a_trial, ended.summary.measured_traffic);
    }
    EXPECT_GT(ended.summary.measured_memory.total(), plain.summary.measured_memory.total());
  }
}

// Not those of the passes that are made again to check them.
TEST_F(ReplicaCheckRuns, WhatIsOffloadedInAStepIsCountedOnce) {
  Plan plan = plan_of(odd_llama(), {.dp = 2});
  plan.offload = Offload::activations;
  const Ended ended = run(checked(request(plan)));
  EXPECT_GT(ended.summary.measured_host.out, 0);
  EXPECT_EQ(ended.summary.measured_host, ended.summary.predicted_host);
}

TEST_F(ReplicaCheckRuns, NothingIsFoundInManySteps) {  // long
  const char* const asked = std::getenv("ECHELON_QUIET_STEPS");
  const std::int64_t steps = asked != nullptr ? std::atoi(asked) : so_many(20, 1000);
  const std::vector shapes{
      Shape{.dp = 2, .tp = 2, .zero = 1}, {.dp = 2, .pp = 2, .zero = 3}, {.cp = 2}, {.dp = 4}};
  for (const Shape& shape : shapes) {
    TrainRequest r = checked(request(plan_of(odd_llama(), shape), steps / std::ssize(shapes)), 5);
    r.run.threads_per_rank = shape.dp == 4 ? 2 : 1;
    SCOPED_TRACE(name_of(r.plan));
    const Ended ended = run(r);
    EXPECT_EQ(ended.error, "");
    EXPECT_TRUE(ended.found.empty());
    EXPECT_EQ(ended.summary.checked_steps, steps / std::ssize(shapes));
  }
}

// Steps that nobody checks in between are the same, and only those behind the copy are run again.
TEST_F(ReplicaCheckRuns, RunSomeStepsAgain) {
  const Plan plan = plan_of(odd_llama(), {.dp = 3});
  const Ended plain = run(request(plan, 7));
  TrainRequest some = checked(request(plan, 7), 3);
  some.rerun = 1;
  const Ended ended = run(some);
  EXPECT_EQ(ended.fingerprint(), plain.fingerprint());
  EXPECT_EQ(ended.summary.checked_steps, 3);  // 3, 6, and the last
  // In a step that is run again everything is found.
  const Ended found = run(flipped(some, {1, 6, 12345, FlipWhere::gradients}));
  ASSERT_EQ(found.found.size(), 1u) << found.error;
  EXPECT_EQ(found.found[0].ranks, std::vector{1});
  EXPECT_EQ(found.fingerprint(), plain.fingerprint());
  // In the others what makes ranks differ from one another.
  for (std::int64_t rerun : {0, 1}) {
    some.rerun = rerun;
    expect_contains(run(flipped(some, {1, 4, 12345, FlipWhere::weights})).error,
                    {"silent corruption found after step 6",
                     "rank 1 differs from the other ranks that hold the weights of"});
  }
}

// Found in time, its rank named, repaired; or it changed nothing.
class Trials : public ReplicaCheckRuns {
 protected:
  struct Count {
    int planted = 0, changing = 0, found = 0;
  };
  const Ended& undisturbed(const Plan& plan) {
    const std::string name = name_of(plan) + name_of_numerics(plan);
    if (!undisturbed_.contains(name)) undisturbed_[name] = run(request(plan));
    return undisturbed_[name];
  }
  static std::string name_of_numerics(const Plan& plan) {
    return plan.numerics == Numerics::invariant ? " invariant" : "";
  }

  void try_flip(const Plan& plan, const PlantedFlip& flip) {
    SCOPED_TRACE(fmt::format("{}{}: --flip {}:{}:{}:{}", name_of(plan), name_of_numerics(plan), flip.rank,
                             flip.step, flip.bit, echelon::name_of(flip.where)));
    const Ended& right = undisturbed(plan);
    Count& count = counts_[flip.where];
    ++count.planted;
    Ended silent, ended;
    try {
      silent = run(flipped(request(plan), flip));
      ended = run(checked(flipped(request(plan), flip)));
    } catch (const RequestError&) {  // the rank sends fewer bits
      return;
    }
    const bool changes = !silent.error.empty() || silent.fingerprint() != right.fingerprint();
    count.changing += changes;
    count.found += !ended.found.empty();
    EXPECT_EQ(ended.error, "");
    EXPECT_EQ(ended.fingerprint(), right.fingerprint());
    EXPECT_EQ(ended.losses, right.losses);
    EXPECT_TRUE(!changes || ended.found.size() == 1) << "in silence: " << silent.error;
    for (const Corruption& corruption : ended.found) {
      EXPECT_EQ(corruption.ranks.front(), flip.rank) << corruption.what;
      EXPECT_TRUE(corruption.repaired);
      // The bit of a message may be one of a later step's, or of a step that is run again.
      EXPECT_TRUE(flip.where == FlipWhere::messages || corruption.step == flip.step) << corruption.what;
      EXPECT_GE(corruption.found_after, corruption.step) << corruption.what;
      EXPECT_LT(corruption.found_after, corruption.step + check_every) << corruption.what;
    }
  }

  std::map<std::string, Ended> undisturbed_;
  std::map<FlipWhere, Count> counts_;
};

TEST_F(Trials, FlipsAreFoundAndTheirRankIsNamed) {  // long
  const char* const asked = std::getenv("ECHELON_FLIPS");
  const int flips = asked != nullptr ? std::atoi(asked) : so_many(4, 200);
  const std::vector<Plan> all = plans();
  const Philox random(2026, Stream::test, name_hash("flips"));
  for (int i = 0; i < flips; ++i) {
    auto draw = [&, next = std::uint64_t{0}](std::uint64_t below) mutable {
      return random.below(static_cast<std::uint64_t>(i) * 16 + next++, below);
    };
    const Plan& plan = all[static_cast<std::size_t>(i) % all.size()];
    const int ranks = plan.mesh.num_ranks();
    PlantedFlip flip;
    flip.rank = static_cast<int>(draw(static_cast<std::uint64_t>(ranks)));
    flip.step = 1 + static_cast<std::int64_t>(draw(run_steps_of_a_trial - 1));
    flip.where = static_cast<FlipWhere>(draw(ranks == 1 ? 4 : 5));
    flip.bit = draw(flip.where == FlipWhere::messages ? 1u << 17 : 1u << 30);
    try_flip(plan, flip);
    if (HasFatalFailure()) return;
  }
  Count sum;
  for (const auto& [where, count] : counts_) {
    fmt::print("{:<12}{:>6} planted{:>6} change the weights{:>6} found\n", echelon::name_of(where),
               count.planted, count.changing, count.found);
    sum.changing += count.changing;
    EXPECT_GE(count.found, count.changing);
  }
  EXPECT_GT(sum.changing, flips / 3);
}

TEST_F(ReplicaCheckRuns, SayWhatTheyFound) {
  TrainRequest r = checked(request(plan_of(odd_llama(), {.dp = 2})));
  r.log_paths = {directory_ / "log"};
  const Ended ended = run(flipped(r, {1, 3, 4346, FlipWhere::moments}));
  ASSERT_EQ(ended.found.size(), 1u);
  expect_contains(ended.found[0].what, {"rank 1 differs from itself", "the first moment of", "in step 3"});
  std::istringstream lines(read_bytes(directory_ / "log"));
  int said = 0;
  for (std::string line; std::getline(lines, line);) {
    const auto entry = nlohmann::json::parse(line);
    if (!entry.contains("corruption")) continue;
    ++said;
    EXPECT_EQ(entry["step"], 4);
    EXPECT_EQ(entry["corruption"]["step"], 3);
    EXPECT_EQ(entry["corruption"]["ranks"], std::vector{1});
    EXPECT_EQ(entry["corruption"]["repaired"], true);
  }
  EXPECT_EQ(said, 1);
  EXPECT_EQ(ended.summary.corruptions, 1);
}

// A mistake that is made each time agrees with itself, and not with other ranks.
TEST_F(ReplicaCheckRuns, LastingMistakesEndTheRun) {
  const PlantedFlip flip{1, 3, 12345, FlipWhere::weights, true};
  expect_contains(run(checked(flipped(request(plan_of(odd_llama(), {.dp = 3})), flip))).error,
                  {"silent corruption found after step 4",
                   "rank 1 differs from the other ranks that hold the weights of"});
  expect_contains(run(checked(flipped(request(plan_of(odd_llama(), {.dp = 2})), flip))).error,
                  {"ranks 0 and 1 hold different", "which is right cannot be told"});
}

TEST_F(ReplicaCheckRuns, RefuseWhatCannotBeRunAgain) {
  const auto refused = [&](TrainRequest r, const std::vector<std::string>& parts) {
    expect_contains(message_of<RequestError>([&] { train(r, *data_, {}); }), parts);
  };
  TrainRequest r = checked(request(plan_of(odd_llama(), {.dp = 2})));
  r.run.collectives = Collectives::ring;
  refused(r, {"--check-replicas 2", "--collectives ring", "direct"});
  r = checked(request(plan_of(odd_llama(), {.dp = 2})));
  r.plan.offload = Offload::optimizer;
  refused(r, {"--check-replicas 2", "--offload"});
  r = checked(request(plan_of(odd_llama(), {.dp = 2})));
  r.plan.offload = Offload::activations;
  r.flip = PlantedFlip{.rank = 0, .step = 2, .bit = 3, .where = FlipWhere::activations};
  refused(r, {"--flip 0:2:3:activations", "--offload none"});
  r = checked(request(plan_of(odd_llama(), {.pp = 2, .schedule = "pipedream"})));
  r.optimizer.clip = 0;
  refused(r, {"--check-replicas 2", "pipedream", "flushes"});
  r = checked(request(plan_of(odd_llama(), {.pp = 2})));
  r.plan.optimizer_barrier = false;
  refused(r, {"--check-replicas 2", "--optimizer-barrier"});
  r = checked(request(plan_of(odd_llama(), {.dp = 2})));
  r.rerun = 3;
  refused(r, {"--rerun 3", "0 to 2"});
  const auto flips = [&](const PlantedFlip& flip, const std::vector<std::string>& parts) {
    refused(flipped(request(plan_of(odd_llama(), {})), flip), parts);
  };
  flips({1, 1, 0, FlipWhere::weights}, {"--flip 1:1:0:weights", "0 to 0"});
  flips({0, 6, 0, FlipWhere::weights}, {"--flip 0:6:0:weights", "1 to 5"});
  flips({0, 1, 0, FlipWhere::messages}, {"--flip 0:1:0:messages", "no messages"});
  refused(flipped(request(plan_of(odd_llama(), {.dp = 2})), {1, 5, 1u << 30, FlipWhere::messages}),
          {"--flip 1:5:1073741824:messages", "rank 1 sent", "a smaller number"});
}

// ---- the witness itself

// body(rank, witness, group) on each of n ranks whose group is witnessed.
template <class Body>
void on_witnessed_ranks(int n, const Body& body) {
  ThreadWorld threads(n, patience);
  run_ranks(threads, [&](int rank) {
    Witness witness(checksum);
    WitnessedWorld world(threads, witness);
    body(rank, witness, *world.join(rank, everyone(n), "dp"));
  });
}

// Of values whose sum shows its grouping.
template <class T>
std::vector<T> awkward(int rank, std::size_t count) {
  std::vector<T> values(count);
  for (std::size_t i = 0; i < count; ++i)
    values[i] = static_cast<T>(
        std::ldexp(1.0 + 0.37 * static_cast<double>(i), (rank * 7 + static_cast<int>(i)) % 11));
  return values;
}

template <class T>
void expect_the_same_sums(int n) {
  for (const std::size_t count : {0, 1, 5, 64, 1000}) {
    const auto sums = [&](bool watched) {
      std::vector<std::vector<T>> all(static_cast<std::size_t>(n));
      on_witnessed_ranks(n, [&](int rank, Witness& witness, Communicator& group) {
        if (watched) witness.begin_step(1);
        std::vector<T> x = awkward<T>(rank, count),
                       parts = awkward<T>(rank, count * static_cast<std::size_t>(n)), mine(count);
        group.all_reduce(view(x)).wait();
        group.reduce_scatter(view(parts), view(mine), Counts(static_cast<std::size_t>(n), std::ssize(mine)))
            .wait();
        x.insert(x.end(), mine.begin(), mine.end());
        all[static_cast<std::size_t>(rank)] = x;
      });
      return all;
    };
    const auto plain = sums(false), watched = sums(true);
    for (std::size_t r = 0; r < plain.size(); ++r)
      EXPECT_TRUE(std::ranges::equal(std::as_bytes(std::span(plain[r])), std::as_bytes(std::span(watched[r]))))
          << n << " ranks, " << count;
  }
}

TEST(Witness, ChangesNoSum) {
  for (int n : {2, 3, 5}) {
    expect_the_same_sums<float>(n);
    expect_the_same_sums<double>(n);
    expect_the_same_sums<bf16>(n);
    expect_the_same_sums<std::int32_t>(n);
  }
}

// Rank 1 sends every kind of message; the bit changed is the first of each in turn.
TEST(Witness, TellsWhichWayABlockWasChanged) {
  constexpr int n = 3;
  const auto logs = [&](std::optional<std::uint64_t> bit) {
    std::vector<Witness::Log> all(n);
    std::vector<std::vector<Witness::Stream>> streams(n);
    on_witnessed_ranks(n, [&](int rank, Witness& witness, Communicator& group) {
      witness.begin_step(1);
      if (bit && rank == 1) witness.plant(*bit);
      const std::vector<float> own = awkward<float>(rank, 6);
      std::vector<float> x = own, gathered(18), exchanged(6), received(6);
      group.all_gather(view(x), view(gathered), Counts{6, 6, 6}).wait();                    // bits 0 to 191
      group.all_to_all(view(x), Counts{2, 2, 2}, view(exchanged), Counts{2, 2, 2}).wait();  // 192 to 319
      Pending arriving = group.recv(view(received), (rank + 2) % n);
      group.send(view(x), (rank + 1) % n).wait();  // 320 to 511
      arriving.wait();
      std::vector<float> told = own;
      group.broadcast(view(told), 1).wait();  // 512 to 703
      EXPECT_EQ(x, own);
      EXPECT_EQ(std::vector<float>(gathered.begin() + 6 * rank, gathered.begin() + 6 * rank + 6), own);
      EXPECT_FALSE(witness.is_planted());
      all[static_cast<std::size_t>(rank)] = witness.take_log();
      streams[static_cast<std::size_t>(rank)] = witness.streams();
    });
    return std::pair{all, streams};
  };
  const auto [before, streams] = logs({});
  using Way = Witness::Way;
  for (const auto& [bit, way, changed] : {std::tuple{5u, Way::gather, std::vector{0, 2}},
                                          {200u, Way::exchange, {0}},
                                          {300u, Way::exchange, {2}},
                                          {400u, Way::message, {2}},
                                          {600u, Way::broadcast, {0, 2}}}) {
    const auto again = logs(bit).first;
    for (int r = 0; r < n; ++r) {
      const auto at = static_cast<std::size_t>(r);
      const Witness::Entry* const first = first_difference(before[at], again[at]);
      const bool differs = std::find(changed.begin(), changed.end(), r) != changed.end();
      ASSERT_EQ(first != nullptr, differs) << "bit " << bit << " rank " << r;
      if (!differs) continue;
      const Witness::Stream& stream = streams[at][first->stream];
      EXPECT_EQ(stream.side, Witness::Side::received);
      EXPECT_EQ(stream.way, way);
      EXPECT_EQ(stream.peer, 1);
    }
  }
}

// Ranks that send and receive unlike amounts agree on whether these are looked at again: some below and some
// above what numbers of the host take.
TEST(Witness, TakesPartsOfAnySize) {
  constexpr std::int64_t many = 20'000;
  on_witnessed_ranks(2, [&](int rank, Witness& witness, Communicator& group) {
    witness.begin_step(1);
    const bool sends = rank == 0;
    std::vector<double> in(sends ? many : 0, 0.5), out(sends ? 0 : many), gathered(many + 1),
        mine(sends ? many : 1, 0.25);
    const Counts none{0, 0}, to_1{0, many}, from_0{many, 0};
    group.all_to_all(view(in), sends ? to_1 : none, view(out), sends ? none : from_0).wait();
    group.all_gather(view(mine), view(gathered), Counts{many, 1}).wait();
    EXPECT_EQ(out, std::vector<double>(out.size(), 0.5));
    EXPECT_EQ(gathered, std::vector<double>(gathered.size(), 0.25));
    EXPECT_EQ(HostGroup(group).sum(1.0), 2);
  });
}

// What the host steers by is the same on all ranks, whatever happened on the way.
TEST(Witness, NumbersArriveAsTheyLeft) {
  constexpr int n = 3;
  for (std::uint64_t bit = 0; bit < 256; bit += 7) {
    std::vector<double> sums(n);
    std::vector<std::int32_t> counts(n);
    std::atomic<int> repeats = 0;
    on_witnessed_ranks(n, [&](int rank, Witness& witness, Communicator& group) {
      witness.begin_step(4);
      if (rank == 2) witness.plant(bit);
      sums[static_cast<std::size_t>(rank)] = HostGroup(group).sum(0.1 * (rank + 1));
      counts[static_cast<std::size_t>(rank)] =
          HostGroup(group).exchange(std::vector{rank, rank + 10, rank + 20})[2];
      for (const Witness::Repeat& repeat : witness.take_repeats()) {
        ++repeats;
        EXPECT_EQ(repeat.from, 2);
        EXPECT_EQ(repeat.step, 4);
      }
    });
    EXPECT_EQ(sums, std::vector(n, (0.1 + 0.1 * 2) + 0.1 * 3));
    EXPECT_EQ(counts, (std::vector<std::int32_t>{2, 12, 22}));
    EXPECT_EQ(repeats > 0, bit < 128)
        << bit;  // a sum of one number leaves for one rank, and four counts of 32 bits
  }
}

}  // namespace
}  // namespace echelon::replica_check_test
