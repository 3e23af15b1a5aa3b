// One table: meshes x models, and one fingerprint a column. And the pieces that it follows from.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>

#include "base/halving_tree.h"
#include "bottles.h"
#include "case_choice.h"
#include "mesh_runs.h"
#include "pipeline_runs.h"
#include "predicted_runs.h"
#include "schedule/pipeline_layout.h"
#include "spec/sum_blocks.h"
#include "train/refuse_request.h"
#include "train/session.h"
#include "untimed.h"

namespace echelon::numerics_test {
namespace {

using namespace checks;

// The sum of leaves, written out.
std::string grouping(std::int64_t begin, std::int64_t end) {
  if (end - begin == 1) return std::to_string(begin);
  const std::int64_t middle = halving_cut(begin, end);
  return "(" + grouping(begin, middle) + "+" + grouping(middle, end) + ")";
}

TEST(HalvingTree, LeavesThatComeOneAfterAnotherAreAddedByIt) {
  for (std::int64_t leaves = 1; leaves <= 33; ++leaves) {
    std::vector<std::string> waiting;
    int most = 0;
    for (std::int64_t leaf = 0; leaf < leaves; ++leaf) {
      const TreePlace place = tree_place(leaves, leaf);
      ASSERT_EQ(std::ssize(waiting), place.waiting) << leaves << " leaves, before " << leaf;
      most = std::max(most, place.waiting);
      waiting.push_back(std::to_string(leaf));
      for (int m = 0; m < place.merges; ++m) {
        const std::string second = waiting.back();
        waiting.pop_back();
        waiting.back() = "(" + waiting.back() + "+" + second + ")";
      }
    }
    ASSERT_EQ(waiting.size(), 1u);
    EXPECT_EQ(waiting.front(), grouping(0, leaves));
    EXPECT_EQ(most, most_waiting(leaves)) << leaves;
  }
}

// The runs' own sums, put together as a tree of runs, are the tree of all leaves: exactly where it says so.
TEST(HalvingTree, IsCutIntoRunsThatAreItsNodes) {
  for (std::int64_t leaves = 1; leaves <= 32; ++leaves)
    for (std::int64_t parts = 1; parts <= leaves; ++parts) {
      const auto in_runs = [&](const auto& self, std::int64_t begin, std::int64_t end) -> std::string {
        const std::int64_t each = leaves / parts;
        if (end - begin == 1) return grouping(begin * each, end * each);
        const std::int64_t middle = halving_cut(begin, end);
        return "(" + self(self, begin, middle) + "+" + self(self, middle, end) + ")";
      };
      const bool same = leaves % parts == 0 && in_runs(in_runs, 0, parts) == grouping(0, leaves);
      EXPECT_EQ(cuts_halving_tree(leaves, parts), same) << leaves << " in " << parts;
    }
}

// Each rank's blocks are some of all blocks, element by element.
TEST(SumBlocks, AreWholeOnEachRank) {
  std::vector<ParamSpec> list(2);
  list[0].shape = {24, 5}, list[0].shard_dim = 0, list[0].pieces = {{16, 2}, {8, 1}};
  list[1].shape = {257, 5}, list[1].shard_dim = 0, list[1].pieces = {{257, 1}};
  ASSERT_EQ(num_sum_blocks(list), 8);
  const auto elements = [&](int tp, int index) {  // of each block: parameter and logical row
    std::vector<std::pair<int, std::int64_t>> rows;
    for (int p = 0; p < 2; ++p)
      for (const Range& range : local_ranges(list[static_cast<std::size_t>(p)], tp, index))
        for (std::int64_t row = range.begin; row < range.end; ++row) rows.emplace_back(p, row);
    std::vector<std::vector<std::pair<int, std::int64_t>>> blocks;
    for (const auto& block : sum_blocks(list, tp, index)) {
      blocks.emplace_back();
      for (const Range& range : block)
        for (std::int64_t at = range.begin; at < range.end; ++at)
          blocks.back().push_back(rows.at(static_cast<std::size_t>(at)));
    }
    return blocks;
  };
  const auto all = elements(1, 0);
  ASSERT_EQ(all.size(), 8u);
  for (int tp : {2, 4, 8}) {
    std::vector<std::vector<std::pair<int, std::int64_t>>> found;
    for (int i = 0; i < tp; ++i)
      for (auto& block : elements(tp, i)) found.push_back(std::move(block));
    EXPECT_EQ(found, all) << tp;
  }
  list[0].pieces = {{12, 2}, {12, 4}};  // 3 units are not cut in 8, nor in halves of halves
  EXPECT_EQ(num_sum_blocks(list), 2);
}

// However the elements lie, and exactly.
TEST(SumBlocks, SquaresAreSummedWithoutRounding) {
  Arena arena;
  const auto kernels = make_kernels(arena, DType::f32, 1);
  const std::int64_t n = 5000;
  std::vector<double> values(static_cast<std::size_t>(n));
  Philox(5, Stream::test, 0).fill_normal(0, values.size(), values.data());
  values[7] = 1e-12, values[8] = 3.5;
  std::vector<float> floats(values.begin(), values.end());
  const auto sum = [&](std::int64_t begin, std::int64_t end) {
    const Tensor x(arena, MemoryCategory::other, DType::f32, {end - begin});
    copy_from_host(std::vector<float>(floats.begin() + begin, floats.begin() + end), x);
    return kernels->sum_squares_exactly(x, 0x1p-6);
  };
  const ExactSum whole = sum(0, n), first = sum(0, 1234), rest = sum(1234, n);
  EXPECT_EQ(whole.high, first.high + rest.high);
  EXPECT_EQ(whole.low, first.low + rest.low);
  double expected = 0;
  for (float v : floats) expected += double{v} * double{v};
  EXPECT_NEAR((static_cast<double>(whole.high) + static_cast<double>(whole.low) * 0x1p-32) * 0x1p-32 * 64,
              expected, 1e-9 * expected);
}

struct MeshRow {
  int dp = 1, tp = 1, pp = 1, ep = 1, cp = 1;
  bool sp = false;
  int zero = 0, hsdp = 1;
  std::int64_t micro_batch = 4;
  std::string schedule = "1f1b";
  std::string recompute = "none";
  int threads = 1;
  ContextKind kind = ContextKind::ulysses;
  ContextBalance balance = ContextBalance::zigzag;
  int ulysses = 1;  // of a hybrid
  bool vocabulary = false;

  std::string name() const {
    return fmt::format(
        "dp {} cp {} {} of {} {} tp {} sp {} pp {} ep {} zero {} hsdp {} micro {} {}{} recompute {} threads "
        "{}",
        dp, cp, name_of(kind), ulysses, name_of(balance), tp, sp, pp, ep, zero, hsdp, micro_batch, schedule,
        vocabulary ? " with vocabulary passes" : "", recompute, threads);
  }
};

struct Column {
  std::string model, precision;
  Balancing balancing{};
};

const std::vector<Column>& columns() {
  static const std::vector<Column> all{
      {"gpt2-tiny", "f32"},        {"llama-tiny", "f32"},
      {"mixtral-tiny", "f32"},     {"deepseek-tiny", "f32", {.expert_loss = 0.1, .z_loss = 0.01}},
      {"llama-tiny", "bf16"},      {"mixtral-tiny", "bf16", {.bias_rate = 0.01, .capacity = 1.2}},
      {"deepseek-v3-tiny", "f32"}, {"gpt-oss-tiny", "f32"},
      {"qwen3-tiny", "bf16"}};
  return all;
}

Plan plan_of(const MeshRow& m, const Column& column) {
  Plan plan;
  plan.model = load_model(column.model);
  plan.model.num_layers = std::min<std::int64_t>(plan.model.num_layers, 4);  // more are the same once more
  plan.numerics = Numerics::invariant;
  plan.precision = recipe(column.precision);
  plan.global_batch = 8;
  plan.micro_batch = m.micro_batch;
  plan.seq_len = 16;
  plan.mesh.set(Axis::dp, m.dp);
  plan.mesh.set(Axis::tp, m.tp);
  plan.mesh.set(Axis::pp, m.pp);
  plan.mesh.set(Axis::cp, m.cp);
  plan.context_kind = m.kind;
  plan.context_balance = m.balance;
  plan.ulysses = m.ulysses;
  plan.sequence_parallel = m.sp;
  plan.mesh.ep = m.ep;
  plan.balancing = column.balancing;
  plan.zero = m.zero;
  plan.hsdp = m.hsdp;
  plan.schedule = m.schedule;
  plan.vocabulary_parallel = m.vocabulary;
  plan.recompute = parse_pipeline_recompute(m.recompute, "--recompute");
  return plan;
}

class InvariantNumerics : public testing::Test {
 protected:
  InvariantNumerics() {
    write_text(directory_ / "text", bottles(400));
    data_ = std::make_unique<TokenData>(std::vector{directory_ / "text"}, bytes_vocab);
  }

  // The last fingerprint and loss.
  std::string run(const Plan& plan, int threads, std::int64_t steps) const {
    TrainRequest r = untimed();
    r.plan = plan;
    r.optimizer.total_steps = steps;
    r.optimizer.warmup_steps = 2;
    r.run.timeout = patience;
    r.run.threads_per_rank = threads;
    r.fingerprint_every = steps;
    r.eval_samples = 3;  // on several ranks some have fewer
    double loss = 0, norm = 0;
    std::string experts;
    TrainObserver observer;
    observer.on_step = [&](const StepRecord& step) {
      loss = step.loss + step.mtp_loss, norm = step.grad_norm;
      experts.clear();
      for (const ExpertLoad& layer : step.experts)
        experts += fmt::format(" {:a} {} {}", layer.balance_loss, fmt::join(layer.tokens, " "),
                               fmt::join(layer.dropped, " "));
    };
    const TrainSummary summary = train(r, *data_, observer);
    EXPECT_EQ(summary.traffic_assumptions.empty() ? summary.predicted_traffic : summary.traffic_by_data,
              summary.measured_traffic);
    return fmt::format("{} {:a} {:a} {:a}{}", summary.fingerprint, loss, norm,
                       summary.validation_loss.value_or(-1), experts);
  }

  template <class Takes>
  void expect_one_a_column(const std::vector<MeshRow>& rows, std::int64_t steps, const Takes& takes) const;

  const TemporaryDirectory directory_;
  std::unique_ptr<TokenData> data_;
};

// Whether its sums are cut over so many tp ranks and ranks that exchange heads: no more than key/value heads.
// Expert groups have all cp ranks, or one rank. An output layer over the pipeline is not tied.
bool has_blocks(const Plan& plan) {
  const int tp = plan.mesh.size(Axis::tp), cp = plan.mesh.size(Axis::cp), ulysses = ulysses_size(plan);
  if (plan.cuts_vocabulary() && plan.model.tied_embedding) return false;
  if (plan.mesh.ep > 1 && plan.mesh.ep % cp != 0) return false;
  return tp * ulysses <= plan.model.num_kv_heads;
}

std::vector<MeshRow> meshes() {
  std::vector<MeshRow> all{{}, {.micro_batch = 1}, {.threads = 2}};
  for (int dp : {1, 2, 4, 8})
    for (std::int64_t micro : {1, 2, 4})
      for (int zero : {0, 1, 2, 3})
        if ((dp > 1 || zero == 0) && micro * dp <= 8)
          all.push_back({.dp = dp, .zero = zero, .micro_batch = micro});
  for (int hsdp : {2, 4})
    for (int zero : {1, 2, 3}) all.push_back({.dp = 8, .zero = zero, .hsdp = hsdp, .micro_batch = 1});
  for (const char* schedule : {"naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "zb-auto"})
    for (int dp : {1, 2})
      for (std::int64_t micro : {1, 2})
        all.push_back({.dp = dp, .pp = 2, .micro_batch = micro, .schedule = schedule});
  for (const char* recompute : {"selective", "full"})
    for (int dp : {1, 4})
      all.push_back({.dp = dp, .pp = 2, .zero = dp > 1 ? 2 : 0, .micro_batch = 1, .recompute = recompute});
  for (int tp : {2, 4})
    for (int dp : {1, 2, 4})
      for (int pp : {1, 2})
        for (int zero : {0, 1, 3})
          if ((dp > 1 || zero == 0) && dp * tp * pp <= 16)
            all.push_back({.dp = dp, .tp = tp, .pp = pp, .zero = zero, .micro_batch = zero == 1 ? 1 : 2});
  all.push_back({.tp = 2, .pp = 2, .micro_batch = 1, .schedule = "zb-h1", .recompute = "full"});
  for (int dp : {1, 2})
    for (int tp : {2, 4})
      for (int pp : {1, 2})
        for (std::int64_t micro : {1, 4})
          all.push_back({.dp = dp, .tp = tp, .pp = pp, .sp = true, .zero = dp > 1 ? 3 : 0, .micro_batch = micro});
  for (int cp : {2, 4})
    for (int dp : {1, 2, 4})
      for (int zero : {0, 1, 2, 3})
        for (std::int64_t micro : {1, 2})
          all.push_back({.dp = dp, .cp = cp, .zero = zero, .micro_batch = micro});
  for (const char* schedule : {"1f1b", "zb-h1"})
    for (bool sp : {false, true})
      for (int tp : {1, 2})
        if (tp > 1 || !sp)
          all.push_back({.tp = tp, .pp = 2, .cp = 2, .sp = sp, .zero = 1, .micro_batch = 2, .schedule = schedule});
  all.push_back({.dp = 2, .cp = 2, .zero = 2, .hsdp = 2, .micro_batch = 1, .recompute = "full", .threads = 2});
  for (ContextBalance balance : {ContextBalance::zigzag, ContextBalance::stripe, ContextBalance::none})
    for (int cp : {2, 4, 8})
      for (int tp : {1, 2})
        for (std::int64_t micro : {1, 4})
          all.push_back({.tp = tp,
                         .cp = cp,
                         .sp = tp > 1,
                         .micro_batch = micro,
                         .kind = ContextKind::allgather,
                         .balance = balance});
  for (ContextBalance balance : {ContextBalance::zigzag, ContextBalance::stripe, ContextBalance::none}) {
    for (int cp : {2, 4, 8})
      for (int tp : {1, 2})
        all.push_back({.tp = tp,
                       .cp = cp,
                       .sp = tp > 1,
                       .micro_batch = cp == 4 ? 1 : 4,
                       .kind = ContextKind::ring,
                       .balance = balance});
    for (int cp : {4, 8})
      for (int ulysses : {2, 4})
        all.push_back({.cp = cp,
                       .micro_batch = cp == 4 ? 1 : 4,
                       .kind = ContextKind::hybrid,
                       .balance = balance,
                       .ulysses = ulysses});
  }
  for (ContextKind kind : {ContextKind::ring, ContextKind::hybrid}) {
    const int cp = kind == ContextKind::ring ? 2 : 4;
    for (const char* schedule : {"1f1b", "zb-h1", "dualpipe"})
      all.push_back({.dp = 2,
                     .pp = 2,
                     .cp = cp,
                     .zero = 1,
                     .micro_batch = schedule == std::string("dualpipe") ? 1 : 2,
                     .schedule = schedule,
                     .recompute = "full",
                     .threads = 2,
                     .kind = kind,
                     .ulysses = 2});
    for (int ep : {1, cp, 4})
      all.push_back(
          {.dp = 4 / (cp / 2), .ep = ep, .cp = cp, .zero = 3, .micro_batch = 1, .kind = kind, .ulysses = 2});
  }
  for (const char* schedule :
       {"interleaved", "interleaved-even", "zb-v", "v-half", "v-min", "dualpipe", "dualpipev"})
    for (int dp : {1, 2})
      for (int zero : {0, 2})
        if (dp > 1 || zero == 0)
          all.push_back({.dp = dp, .pp = 2, .zero = zero, .micro_batch = 1, .schedule = schedule});
  all.push_back({.tp = 2, .pp = 2, .sp = true, .micro_batch = 1, .schedule = "dualpipe"});
  for (int ep : {2, 4})
    for (ContextKind kind : {ContextKind::ulysses, ContextKind::allgather})
      all.push_back({.dp = 2,
                     .pp = 2,
                     .ep = ep,
                     .cp = ep / 2,
                     .zero = ep / 2,
                     .micro_batch = 1,
                     .schedule = "dualpipe",
                     .recompute = ep == 4 ? "full" : "none",
                     .kind = kind});
  for (int ep : {1, 2, 4})
    for (ContextKind kind : {ContextKind::ulysses, ContextKind::allgather})
      for (int zero : {0, 3})
        for (std::int64_t micro : {1, 2})
          all.push_back({.dp = 4, .ep = ep, .cp = 2, .zero = zero, .micro_batch = micro, .kind = kind});
  for (int ep : {2, 4})
    for (int tp : {2, 4})
      for (bool sp : {false, true})
        all.push_back({.dp = 4, .tp = tp, .ep = ep, .sp = sp, .zero = 1, .micro_batch = ep == 2 ? 1 : 2});
  for (int ep : {2, 4})
    for (int dp : {4, 8})
      for (int zero : {0, 1, 2, 3})
        for (std::int64_t micro : {1, 2})
          if (dp * micro <= 8) all.push_back({.dp = dp, .ep = ep, .zero = zero, .micro_batch = micro});
  for (const char* schedule : {"1f1b", "zb-h1", "zb-auto"})
    for (int zero : {0, 2, 3})
      all.push_back({.dp = 2, .pp = 2, .ep = 2, .zero = zero, .micro_batch = 1, .schedule = schedule});
  for (int zero : {1, 3}) all.push_back({.dp = 8, .ep = 2, .zero = zero, .hsdp = 2, .micro_batch = 1});
  all.push_back({.dp = 4, .ep = 4, .zero = 2, .micro_batch = 1, .recompute = "full", .threads = 2});
  for (int zero : {0, 1, 3}) all.push_back({.dp = 4, .pp = 4, .zero = zero, .micro_batch = 1});
  for (const char* schedule : {"gpipe", "1f1b", "zb-h1", "zb-h2"})
    for (int tp : {1, 2})
      for (int zero : {0, 1, 2})
        all.push_back({.dp = zero > 0 ? 2 : 1,
                       .tp = tp,
                       .pp = 4,
                       .sp = tp > 1,
                       .zero = zero,
                       .micro_batch = 1,
                       .schedule = schedule});
  for (const char* schedule : {"1f1b", "zb-v"})
    for (const char* recompute : {"selective", "full"})
      for (int dp : {1, 2})
        all.push_back({.dp = dp,
                       .pp = 2,
                       .zero = dp > 1 ? 1 : 0,
                       .micro_batch = 2,
                       .schedule = schedule,
                       .recompute = recompute});
  for (const char* schedule : {"1f1b", "zb-h1", "zb-v"})
    for (int tp : {1, 2})
      for (int dp : {1, 2})
        all.push_back({.dp = dp,
                       .tp = tp,
                       .pp = 2,
                       .sp = tp > 1,
                       .zero = dp > 1 ? 2 : 0,
                       .micro_batch = dp,
                       .schedule = schedule,
                       .vocabulary = true});
  return all;
}

// Whether a mesh is one for a model: it uses its axes, and nothing of it is refused.
bool is_for(const MeshRow& row, const Plan& plan) {
  return row.pp <= plan.model.num_layers && has_blocks(plan) &&
         (row.ep == 1 || plan.model.experts != Experts::none);
}

// Of every row a column has one fingerprint, where takes(row, column).
template <class Takes>
void InvariantNumerics::expect_one_a_column(const std::vector<MeshRow>& rows, std::int64_t steps,
                                            const Takes& takes) const {
  std::vector<std::string> first(columns().size());
  int runs = 0;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    const MeshRow& row = rows[r];
    std::string line;
    for (std::size_t c = 0; c < columns().size(); ++c) {
      const Plan plan = plan_of(row, columns()[c]);
      if (!takes(r, c) || !is_for(row, plan) || (r > 0 && !is_taken(5))) {
        line += fmt::format("{:>18}", "-");
        continue;
      }
      const std::string found = run(plan, row.threads, steps);
      ++runs;
      if (first[c].empty()) first[c] = found;
      EXPECT_EQ(found, first[c]) << row.name() << ": " << columns()[c].model << " " << columns()[c].precision;
      line += fmt::format("{:>18}", found.substr(0, 16));
    }
    fmt::print("{} {}\n", line, row.name());
  }
  fmt::print("{} meshes, {} runs of {} steps\n", rows.size(), runs, steps);
}

TEST_F(InvariantNumerics, EveryMeshHasTheSameBits) {  // long
  const auto every = [](std::size_t, std::size_t) { return true; };
  if (!takes_wide_cases()) {
    const std::vector<MeshRow> rows{
        {},
        {.dp = 2, .zero = 3, .micro_batch = 1, .threads = 2},
        {.dp = 4, .ep = 2, .zero = 2, .micro_batch = 1},
        {.tp = 2, .cp = 2, .sp = true, .micro_batch = 2},
        {.cp = 2, .micro_batch = 2, .kind = ContextKind::allgather},
        {.cp = 4, .micro_batch = 2, .kind = ContextKind::ring},
        {.cp = 4, .micro_batch = 4, .kind = ContextKind::hybrid, .ulysses = 2},
        {.cp = 2, .kind = ContextKind::ring, .balance = ContextBalance::stripe},
        {.dp = 2, .cp = 2, .zero = 3, .micro_batch = 2},
        {.dp = 2, .tp = 2, .ep = 2, .sp = true, .micro_batch = 2},
        {.dp = 2, .tp = 2, .pp = 2, .zero = 1, .micro_batch = 1},
        {.dp = 2, .ep = 2, .cp = 2, .micro_batch = 2, .kind = ContextKind::allgather},
        {.dp = 2, .pp = 2, .ep = 2, .micro_batch = 1, .schedule = "dualpipe"}};
    return expect_one_a_column(rows, 2, every);
  }
  const std::vector<MeshRow> all = meshes();
  if (const char* const asked = std::getenv("ECHELON_NUMERICS_STEPS"))
    return expect_one_a_column(all, std::atoi(asked), every);
  // Where two meshes differ in a bit they differ more from step to step.
  constexpr std::size_t long_rows = 60, of_long_rows = 5;
  std::vector<MeshRow> some, rest{all.front()}, few;
  for (std::size_t r = 0; r < all.size(); ++r) {
    (r * long_rows % all.size() < long_rows ? some : rest).push_back(all[r]);
    if (r % 12 == 0) few.push_back(all[r]);
  }
  expect_one_a_column(some, 8, [&](std::size_t, std::size_t c) { return c < of_long_rows; });
  expect_one_a_column(rest, 2, [&](std::size_t r, std::size_t c) {
    return rest[r].ep > 1 ? c == 2 + r % 2 : r == 0 ? c < of_long_rows : c == 0 || c == 4;
  });
  expect_one_a_column(few, 3, [&](std::size_t, std::size_t c) { return c >= of_long_rows; });
}

// Of all rows of the table, whether the slow suite makes them or not.
TEST(InvariantMeshes, AreLegal) {
  int pairs = 0;
  for (const MeshRow& row : meshes())
    for (const Column& column : columns())
      if (const Plan plan = plan_of(row, column); is_for(row, plan)) {
        ++pairs;
        EXPECT_NO_THROW(validate(plan)) << row.name() << ": " << column.model;
      }
  EXPECT_GE(pairs, 1000);
}

// With a number of ranks that blocks do not divide into, one of them has the whole output layer.
TEST_F(InvariantNumerics, ThreeContextParallelRanksHaveTheSameBits) {  // long
  std::set<std::string> found;
  for (const MeshRow& row :
       {MeshRow{}, MeshRow{.cp = 3, .micro_batch = 2},
        MeshRow{.cp = 3, .kind = ContextKind::allgather, .balance = ContextBalance::none},
        MeshRow{.cp = 3, .kind = ContextKind::ring, .balance = ContextBalance::none},
        MeshRow{.cp = 3, .kind = ContextKind::ring, .balance = ContextBalance::stripe}}) {
    Plan plan = plan_of(row, {"llama-tiny", "f32"});
    plan.model.num_heads = plan.model.num_kv_heads = 6, plan.model.head_dim = 16;
    plan.seq_len = 36;
    found.insert(run(plan, 1, 2));
  }
  EXPECT_EQ(found.size(), 1u) << fmt::format("{}", fmt::join(found, "\n"));
}

// Three ranks that exchange heads cut inside of a run of positions: copies of tokens for experts then come in
// other runs than attention's.
TEST_F(InvariantNumerics, CopiesOfTokensAreInOrderWhereverRunsAreCut) {  // long
  std::set<std::string> found;
  for (const MeshRow& row :
       {MeshRow{}, MeshRow{.cp = 6, .micro_batch = 2, .kind = ContextKind::hybrid, .ulysses = 3},
        MeshRow{.cp = 2, .kind = ContextKind::ring, .balance = ContextBalance::stripe}}) {
    Plan plan = plan_of(row, {"mixtral-tiny", "f32"});
    plan.model.num_heads = plan.model.num_kv_heads = 6, plan.model.head_dim = 16;
    plan.model.window = {};
    plan.seq_len = 36;
    found.insert(run(plan, 1, 2));
  }
  EXPECT_EQ(found.size(), 1u) << fmt::format("{}", fmt::join(found, "\n"));
}

// What else attention can be asked for: a sink of each head, documents and windows, of runs of positions that
// begin and end inside of the kernels' tiles.
TEST_F(InvariantNumerics, SinksAndDocumentsOfCutSequencesHaveTheSameBits) {  // long
  const std::vector<MeshRow> rows{{},
                                  {.cp = 2, .micro_batch = 2, .kind = ContextKind::allgather},
                                  {.cp = 2, .micro_batch = 2, .kind = ContextKind::ring},
                                  {.cp = 2, .kind = ContextKind::ring, .balance = ContextBalance::stripe},
                                  {.cp = 4,
                                   .micro_batch = 1,
                                   .kind = ContextKind::hybrid,
                                   .balance = ContextBalance::none,
                                   .ulysses = 2}};
  std::set<std::string> with_sinks, of_documents, of_windows;
  for (const MeshRow& row : rows) {
    Plan plan = plan_of(row, {"gpt-oss-tiny", "f32"});
    plan.model.window = {};
    with_sinks.insert(run(plan, 1, 2));
    plan = plan_of(row, {"llama-tiny", "f32"});
    plan.seq_len = 384, plan.global_batch = 2, plan.micro_batch = 1;
    plan.mask = AttentionMask::document, plan.document_end = ' ';
    of_documents.insert(run(plan, 1, 2));
    plan = plan_of(row, {"llama-tiny", "bf16"});
    plan.seq_len = 408, plan.global_batch = 2, plan.micro_batch = 1;
    plan.model.window.size = 90;
    of_windows.insert(run(plan, 1, 2));
  }
  EXPECT_EQ(of_windows.size(), 1u) << fmt::format("{}", fmt::join(of_windows, "\n"));
  EXPECT_EQ(with_sinks.size(), 1u) << fmt::format("{}", fmt::join(with_sinks, "\n"));
  EXPECT_EQ(of_documents.size(), 1u) << fmt::format("{}", fmt::join(of_documents, "\n"));
}

// Adapters, and parts that training leaves as they are.
TEST_F(InvariantNumerics, TunedModelsHaveTheSameBits) {  // long
  const MeshRow gathered{.cp = 2, .micro_batch = 2, .kind = ContextKind::allgather};
  const auto expect_same = [&](const Column& column, const FineTuning& tuning,
                               const std::vector<MeshRow>& rows) {
    std::set<std::string> found;
    for (const MeshRow& row : rows) {
      if (!found.empty() && !is_taken(6)) continue;
      Plan plan = plan_of(row, column);
      plan.model.tuning = tuning;
      found.insert(run(plan, 1, 3));
    }
    EXPECT_EQ(found.size(), 1u) << column.model << "\n" << fmt::format("{}", fmt::join(found, "\n"));
  };
  const MeshRow cut{.dp = 2, .cp = 2, .zero = 2, .micro_batch = 1};
  std::vector<MeshRow> rows{{},
                            cut,
                            gathered,
                            {.tp = 2},
                            {.tp = 2, .sp = true, .micro_batch = 1},
                            {.dp = 2, .tp = 2, .zero = 3, .micro_batch = 2, .recompute = "full"},
                            {.tp = 2, .pp = 2, .sp = true, .micro_batch = 2, .schedule = "zb-h1"},
                            {.tp = 2, .cp = 2, .sp = true, .micro_batch = 2, .kind = ContextKind::ring}};
  FineTuning adapted, everywhere, frozen;
  adapted.lora = parse_lora("rank=4,alpha=8", "lora");
  everywhere.lora = parse_lora("rank=3,alpha=7,targets=q_proj,v_proj,o_proj,up_proj,down_proj", "lora");
  frozen.freeze = {"*.mlp.*", "*layernorm*"};
  expect_same({"llama-tiny", "f32"}, frozen, {{}, cut, gathered, {.tp = 2, .sp = true, .zero = 0}});
  frozen.freeze = {"*k_proj*", "*gate_proj*"};  // parts of what is one product
  for (const char* precision : {"f32", "bf16"})
    expect_same({"llama-tiny", precision}, frozen,
                {{}, {.tp = 2}, {.dp = 2, .tp = 2, .sp = true, .zero = 3, .micro_batch = 1}, cut});
  expect_same({"llama-tiny", "f32"}, adapted, rows);
  expect_same({"llama-tiny", "bf16"}, everywhere, rows);
  everywhere.lora.targets = {"c_attn", "c_proj", "c_fc"};  // stored the other way round
  rows.push_back({.tp = 4, .sp = true, .micro_batch = 2});
  expect_same({"gpt2-tiny", "f32"}, everywhere, rows);
}

// The softmax of a row is made on all ranks of the pipeline.
TEST_F(InvariantNumerics, VocabularyOverThePipelineHasTheSameBits) {  // long
  const std::vector<MeshRow> rows{
      {},
      {.pp = 2, .micro_batch = 1, .vocabulary = true},
      {.tp = 2, .pp = 2, .sp = true, .micro_batch = 2, .schedule = "zb-h1", .vocabulary = true},
      {.pp = 4, .micro_batch = 2, .schedule = "gpipe", .threads = 2, .vocabulary = true},
      {.cp = 2, .micro_batch = 2, .kind = ContextKind::allgather},
      {.dp = 2, .pp = 2, .zero = 3, .micro_batch = 2, .schedule = "zb-v", .vocabulary = true},
      {.dp = 2, .tp = 2, .pp = 4, .zero = 2, .micro_batch = 2, .vocabulary = true},
      {.dp = 2, .pp = 2, .ep = 2, .micro_batch = 1, .recompute = "full", .vocabulary = true},
      {.tp = 2, .cp = 2, .sp = true, .micro_batch = 1, .kind = ContextKind::ring},
      {.dp = 4, .pp = 2, .zero = 1, .micro_batch = 1, .schedule = "v-half", .vocabulary = true},
      {.tp = 4, .pp = 2, .micro_batch = 1, .schedule = "zb-auto", .vocabulary = true},
      {.tp = 4, .micro_batch = 2}};
  for (const auto& [model, precision] : {std::pair{"llama-tiny", "f32"},
                                         {"llama-tiny", "bf16"},
                                         {"mixtral-tiny", "f32"},
                                         {"deepseek-v3-tiny", "bf16"}}) {
    std::set<std::string> found;
    for (const MeshRow& row : rows) {
      Plan plan = plan_of(row, {model, precision});
      plan.model.num_layers = 4;
      plan.model.num_kv_heads = plan.model.num_heads;
      plan.model.window = {};
      if (row.ep > 1 && plan.model.experts == Experts::none) continue;
      if (!found.empty() && !is_taken(8)) continue;
      found.insert(run(plan, row.threads, 2));
      EXPECT_EQ(found.size(), 1u) << model << " " << precision << ": " << row.name() << "\n"
                                  << fmt::format("{}", fmt::join(found, "\n"));
    }
  }
}

// Sums over the tokens of whole sequences, where cp ranks have a part of the heads, and norms of groups.
TEST_F(InvariantNumerics, StateSpacesHaveTheSameBits) {  // long
  const std::vector<MeshRow> rows{
      {},
      {.dp = 2, .cp = 2, .zero = 3, .micro_batch = 1},
      {.tp = 2, .sp = true, .micro_batch = 2, .recompute = "full"},
      {.cp = 4, .micro_batch = 2, .kind = ContextKind::ring, .balance = ContextBalance::zigzag},
      {.pp = 2, .cp = 2, .micro_batch = 1, .schedule = "zb-h1", .kind = ContextKind::allgather},
      {.tp = 2,
       .cp = 2,
       .sp = true,
       .micro_batch = 1,
       .kind = ContextKind::ring,
       .balance = ContextBalance::stripe},
      {.cp = 4, .micro_batch = 4, .kind = ContextKind::hybrid, .balance = ContextBalance::none, .ulysses = 2},
      {.dp = 2, .pp = 2, .micro_batch = 1, .schedule = "dualpipe", .threads = 2},
      {.dp = 2, .tp = 4, .zero = 2, .micro_batch = 2},
      {.dp = 2, .pp = 2, .cp = 2, .zero = 1, .micro_batch = 1, .schedule = "dualpipe"},
      {.dp = 4, .zero = 1, .micro_batch = 1, .recompute = "selective"}};
  for (const auto& [precision, mask] :
       {std::pair{"f32", AttentionMask::causal}, {"bf16", AttentionMask::document}}) {
    std::set<std::string> found;
    for (const MeshRow& row : rows) {
      Plan plan = plan_of(row, {"bamba-tiny", precision});
      plan.model.num_kv_heads = plan.model.num_heads;
      plan.model.state_space.attention_layers = {1};
      plan.model.state_space.groups = 4;
      plan.model.state_space.chunk = 5;
      plan.mask = mask;
      plan.document_end = 'e';
      if (!found.empty() && !is_taken(8)) continue;
      found.insert(run(plan, row.threads, 2));
      EXPECT_EQ(found.size(), 1u) << precision << ": " << row.name() << "\n"
                                  << fmt::format("{}", fmt::join(found, "\n"));
    }
  }
}

// Channels are cut by themselves, wherever a vector of them begins; and so are heads beside attention, whose
// parts are multiplied and added.
TEST_F(InvariantNumerics, ShortConvolutionsAndBothSideBySideHaveTheSameBits) {  // long
  const std::vector<MeshRow> rows{{},
                                  {.tp = 2, .sp = true, .micro_batch = 2, .recompute = "full"},
                                  {.tp = 2, .cp = 2, .sp = true, .micro_batch = 1, .kind = ContextKind::ring},
                                  {.dp = 2, .pp = 2, .micro_batch = 1, .schedule = "dualpipe", .threads = 2},
                                  {.cp = 2, .zero = 1, .micro_batch = 2, .kind = ContextKind::allgather},
                                  {.dp = 4, .zero = 3, .micro_batch = 1, .threads = 2}};
  for (const char* model : {"lfm2-tiny", "falcon-h1-tiny"})
    for (const auto& [precision, mask] :
         {std::pair{"f32", AttentionMask::causal}, {"bf16", AttentionMask::document}}) {
      std::set<std::string> found;
      for (const MeshRow& row : rows) {
        Plan plan = plan_of(row, {model, precision});
        if (plan.model.state_space.heads > 0) plan.model.state_space.groups = 4;
        plan.mask = mask;
        plan.document_end = 'e';
        if (!found.empty() && !is_taken(2)) continue;
        found.insert(run(plan, row.threads, 2));
        EXPECT_EQ(found.size(), 1u) << model << " " << precision << ": " << row.name() << "\n"
                                    << fmt::format("{}", fmt::join(found, "\n"));
      }
    }
}

// Heads that share a norm are on one rank: over the other axes, experts beside them.
TEST_F(InvariantNumerics, TheDeltaRuleHasTheSameBits) {  // long
  const std::vector<MeshRow> rows{{},
                                  {.dp = 2, .pp = 2, .zero = 1, .micro_batch = 1},
                                  {.dp = 4, .zero = 3, .micro_batch = 1, .threads = 2},
                                  {.dp = 2, .ep = 2, .micro_batch = 2, .recompute = "full"},
                                  {.pp = 2, .micro_batch = 1, .schedule = "zb-h1"}};
  for (const auto& [precision, mask] :
       {std::pair{"f32", AttentionMask::causal}, {"bf16", AttentionMask::document}}) {
    std::set<std::string> found;
    for (const MeshRow& row : rows) {
      Plan plan = plan_of(row, {"qwen3-next-tiny", precision});
      plan.model.state_space.chunk = 5;
      plan.mask = mask;
      plan.document_end = 'e';
      if (!found.empty() && !is_taken(2)) continue;
      found.insert(run(plan, row.threads, 2));
      EXPECT_EQ(found.size(), 1u) << precision << ": " << row.name() << "\n"
                                  << fmt::format("{}", fmt::join(found, "\n"));
    }
  }
}

// The embedding and the output matrix are each used twice, and tied they are one.
TEST_F(InvariantNumerics, PredictingOneMoreTokenHasTheSameBits) {  // long
  const std::vector<MeshRow> rows{
      {},
      {.dp = 2, .pp = 2, .zero = 1, .micro_batch = 1},
      {.cp = 2, .micro_batch = 2, .kind = ContextKind::allgather},
      {.tp = 2, .sp = true, .micro_batch = 2, .recompute = "full"},
      {.dp = 4, .zero = 1, .micro_batch = 1, .threads = 2},
      {.pp = 2, .micro_batch = 1, .schedule = "zb-v"},
      {.dp = 2, .ep = 2, .micro_batch = 2},
      {.dp = 2, .pp = 2, .micro_batch = 1, .schedule = "dualpipe"},
      {.tp = 2, .pp = 2, .sp = true, .micro_batch = 1, .schedule = "zb-h1"},
      {.dp = 2, .tp = 2, .cp = 2, .sp = true, .micro_batch = 1, .kind = ContextKind::ring},
      {.dp = 2, .pp = 2, .ep = 2, .micro_batch = 1, .schedule = "dualpipev"},
      {.tp = 4, .micro_batch = 4, .recompute = "selective"}};
  for (const auto& [column, tied] : {std::pair{Column{"deepseek-v3-tiny", "f32"}, false},
                                     {Column{"deepseek-v3-tiny", "bf16"}, true},
                                     {Column{"llama-tiny", "f32"}, true},
                                     {Column{"llama-tiny", "bf16"}, false}}) {
    std::set<std::string> found;
    for (const MeshRow& row : rows) {
      Plan plan = plan_of(row, column);
      plan.model.num_mtp_layers = 1, plan.model.mtp_weight = 0.7;
      plan.model.tied_embedding = tied;
      plan.model.num_kv_heads = plan.model.num_heads;
      if ((row.ep > 1 && plan.model.experts == Experts::none) || (!found.empty() && !is_taken(8))) continue;
      found.insert(run(plan, row.threads, 2));
      EXPECT_EQ(found.size(), 1u) << column.model << (tied ? " tied: " : ": ") << row.name() << "\n"
                                  << fmt::format("{}", fmt::join(found, "\n"));
    }
  }
}

// A row's sum of squares is over the heads of all tp ranks.
TEST_F(InvariantNumerics, NormsOfAllQueriesHaveTheSameBits) {  // long
  for (const char* precision : {"f32", "bf16"}) {
    std::set<std::string> found;
    for (const MeshRow& row :
         {MeshRow{}, MeshRow{.tp = 2}, MeshRow{.dp = 2, .tp = 2, .sp = true, .zero = 3, .micro_batch = 1},
          MeshRow{.tp = 4, .sp = true, .micro_batch = 2, .recompute = "full"},
          MeshRow{.tp = 2, .pp = 2, .cp = 2, .sp = true, .micro_batch = 2, .schedule = "zb-h1"}}) {
      if (!found.empty() && !is_taken(2)) continue;
      Plan plan = plan_of(row, {"llama-tiny", precision});
      plan.model.num_kv_heads = plan.model.num_heads;
      plan.model.qk_norm = plan.model.qk_norm_whole = true;
      found.insert(run(plan, 1, 3));
    }
    EXPECT_EQ(found.size(), 1u) << fmt::format("{}", fmt::join(found, "\n"));
  }
}

TEST(InvariantPrediction, IsThatOfEachRank) {  // long
  const MeshRow gathered{.cp = 4, .micro_batch = 2, .kind = ContextKind::allgather};
  const MeshRow ring{.cp = 4, .micro_batch = 2, .kind = ContextKind::ring};
  const MeshRow hybrid{.cp = 4, .micro_batch = 1, .kind = ContextKind::hybrid, .ulysses = 2};
  for (const MeshRow& row : {MeshRow{.cp = 2, .zero = 1, .micro_batch = 2}, gathered, ring, hybrid,
                             MeshRow{.tp = 2, .cp = 2, .sp = true, .micro_batch = 1},
                             MeshRow{.pp = 2, .micro_batch = 1, .schedule = "dualpipe"}})
    expect_predicted(plan_of(row, {"gpt2-tiny", "f64"}));
  for (const MeshRow& row : {MeshRow{.cp = 2, .micro_batch = 2}, MeshRow{.tp = 2, .sp = true},
                             MeshRow{.dp = 2, .tp = 2, .ep = 2}, MeshRow{.dp = 2, .ep = 2, .cp = 2}})
    for (const char* model : {"mixtral-tiny", "deepseek-v3-tiny"})
      expect_predicted(plan_of(row, {model, "f64"}));
  for (const MeshRow& row : {MeshRow{.tp = 2, .micro_batch = 2}, MeshRow{.tp = 2, .cp = 2, .sp = true}}) {
    Plan plan = plan_of(row, {"llama-tiny", "f64"});
    plan.model.qk_norm = plan.model.qk_norm_whole = true;
    plan.model.tuning.lora = parse_lora("rank=4,alpha=8", "lora");
    expect_predicted(plan);
  }
  for (const bool tied : {false, true})
    for (const MeshRow& row : {MeshRow{.dp = 2, .cp = 2, .zero = 1, .micro_batch = 1},
                               MeshRow{.dp = 2, .pp = 2, .micro_batch = 1, .schedule = "dualpipe"},
                               MeshRow{.dp = 2, .tp = 2, .pp = 2, .sp = true, .micro_batch = 2}}) {
      Plan plan = plan_of(row, {"deepseek-v3-tiny", "f64"});
      plan.model.num_mtp_layers = 1;
      plan.model.tied_embedding = tied;
      expect_predicted(plan);
    }
  for (const MeshRow& row :
       {MeshRow{.dp = 2, .pp = 2, .micro_batch = 2, .schedule = "zb-h1", .vocabulary = true},
        MeshRow{.tp = 2, .pp = 2, .sp = true, .micro_batch = 2, .vocabulary = true}})
    expect_predicted(plan_of(row, {"llama-tiny", "f64"}));
  const Column dropping{"mixtral-tiny", "f64", {.capacity = 0.8}};
  expect_predicted(plan_of({.cp = 2, .micro_batch = 2}, dropping));
  expect_predicted(plan_of({.dp = 2, .pp = 2, .ep = 2, .micro_batch = 1, .schedule = "dualpipe"}, dropping));
}

// A checkpoint has no mesh: a training that goes on with another one ends with the same weights.
TEST_F(InvariantNumerics, AnotherMeshGoesOnWithTheSameBits) {  // long
  const auto request = [](const MeshRow& row) {
    TrainRequest r = untimed();
    r.plan = plan_of(row, {"llama-tiny", "f32"});
    r.optimizer.total_steps = r.fingerprint_every = 12;
    r.optimizer.warmup_steps = 2;
    r.run.timeout = patience;
    r.eval_samples = 0;
    return r;
  };
  const std::string whole = train(request({}), *data_, {}).fingerprint;
  const std::vector<MeshRow> rows{{.dp = 2, .zero = 3, .micro_batch = 2},
                                  {.tp = 2, .pp = 2, .sp = true, .micro_batch = 1},
                                  {.dp = 2, .cp = 2, .zero = 1, .micro_batch = 4}};
  for (std::size_t i = 0; i < rows.size(); ++i) {
    TrainRequest r = request(rows[i]);
    const bool last = i + 1 == rows.size();
    r.checkpoint_directory = directory_ / "checkpoint";
    r.resume = i > 0;
    std::atomic<int> done{0};
    TrainObserver observer;
    observer.on_step = [&](const StepRecord&) { ++done; };
    if (!last) r.stop_requested = [&] { return done >= 2; };
    const TrainSummary summary = train(r, *data_, observer);
    EXPECT_EQ(summary.stopped, !last);
    if (last) {
      EXPECT_EQ(summary.fingerprint, whole);
    }
  }
}

// A gradient that is wrong by a millionth is within what rounding allows, and not within nothing.
TEST(InvariantVerify, AllowsNoDifference) {  // long
  for (const Column& column : {Column{"gpt2-tiny", "f32"}, Column{"mixtral-tiny", "f32"}}) {
    const bool dense = column.model == std::string("gpt2-tiny");
    Plan plan = plan_of({.dp = 2, .tp = dense ? 2 : 1, .pp = dense ? 1 : 2, .zero = 1}, column);
    VerifyRequest request = verify_request(plan);
    const VerifyReport exact = verify(request);
    EXPECT_TRUE(exact.pass && exact.bitwise) << to_json(exact, plan);
    EXPECT_EQ(exact.bound, 0);
    request.faults.loss_scale = 1 + 0x1p-20;
    const VerifyReport wrong = verify(request);
    EXPECT_FALSE(wrong.pass);
    ASSERT_TRUE(wrong.first_difference);
    EXPECT_EQ(wrong.first_difference->kind, "grad");
    request.plan.numerics = Numerics::ordinary;
    EXPECT_TRUE(verify(request).pass);
  }
}

// What is refused names what would be legal, and that is.
TEST_F(InvariantNumerics, WhatShowsTheMeshIsRefused) {
  const auto refusal = [](const std::function<void(Plan&)>& change) {
    Plan plan = plan_of({}, columns().front());
    change(plan);
    return message_of<RequestError>([&] { check_whole(plan); });
  };
  expect_contains(refusal([](Plan& p) { p.mesh.set(Axis::dp, 3); }), {"--dp 3", "legal: 1, 2, 4, 8"});
  expect_contains(refusal([](Plan& p) { p.global_batch = 12, p.micro_batch = 2; }),
                  {"--micro-batch 2", "legal: 1, 3, 6, 12"});
  expect_contains(refusal([](Plan& p) {
                    p.mesh.set(Axis::cp, 4), p.context_kind = ContextKind::hybrid, p.ulysses = 4;
                    p.model = load_model("llama-tiny");
                  }),
                  {"--cp-ulysses 4", "a key/value head is on one rank, and there are 2", "legal: 1, 2"});
  const auto vocabulary = [&](int pp, int cp, int vocab) {
    return refusal([&](Plan& p) {
      p.model = load_model("llama-tiny");
      p.model.num_layers = 8, p.model.vocab = vocab;
      p.mesh.set(Axis::pp, pp), p.mesh.set(Axis::cp, cp);
      p.micro_batch = 1, p.vocabulary_parallel = true;
    });
  };
  expect_contains(vocabulary(2, 2, 257), {"--vocabulary-parallel on", "--cp cuts them", "legal: off"});
  expect_contains(vocabulary(8, 1, 260), {"--pp 8", "a softmax over 260 is made in 4 blocks", "legal: 2, 4"});
  expect_contains(refusal([](Plan& p) { p.mesh.set(Axis::cp, 4), p.model = load_model("llama-tiny"); }),
                  {"--cp 4", "legal: 1, 2, or --cp-kind ring"});
  expect_contains(refusal([](Plan& p) { p.mesh.set(Axis::tp, 4), p.model = load_model("llama-tiny"); }),
                  {"--tp 4", "legal: 2, 1"});
  expect_contains(refusal([](Plan& p) { p.compression.kind = CompressionKind::bf16; }),
                  {"--compress", "none"});
  const Plan invariant = plan_of({}, columns().front());
  for (const Collectives other : {Collectives::ring, Collectives::halving_doubling, Collectives::automatic}) {
    RunOptions run;
    run.collectives = other;
    expect_contains(message_of<RequestError>([&] { refuse_on_device(invariant, run); }),
                    {"--collectives", "groups sums in an order of its own", "legal: direct"});
  }
  expect_contains(refusal([](Plan& p) { p.precision = recipe("fp8"); }),
                  {"--precision fp8", "scales of fp8 are those of what a rank has", "legal: bf16"});
  expect_contains(refusal([](Plan& p) {
                    p.micro_batch = 4, p.mesh.set(Axis::pp, 2);
                    p.schedule_text = "0F0 0F1 0BW1 0BW0\n1F0 1BW0 1F1 1BW1\n";
                  }),
                  {"1f1b"});
  const auto with_experts = [&](const std::function<void(Plan&)>& change) {
    return refusal([&](Plan& p) {
      p.model = load_model("mixtral-tiny");
      p.micro_batch = 1;
      change(p);
    });
  };
  expect_contains(with_experts([](Plan& p) {
                    p.balancing = {.expert_loss = 0.1, .scope = BalanceScope::microbatch};
                  }),
                  {"--balance-scope microbatch", "legal: sequence"});
  expect_contains(
      with_experts([](Plan& p) { p.global_batch = 6, p.mesh.set(Axis::dp, 6), p.mesh.ep = 2; }),
      {"--ep 2", "legal: 1"});
  expect_contains(with_experts([](Plan& p) {
                    p.mesh.set(Axis::cp, 4), p.mesh.ep = 2, p.context_kind = ContextKind::allgather;
                  }),
                  {"--ep 2", "legal: 4, 1"});
}

bool is_legal(const Plan& plan) {
  try {
    check_whole(plan);
    return true;
  } catch (const RequestError&) {
    return false;
  }
}

// Meshes that nobody thought of.
TEST_F(InvariantNumerics, MeshesDrawnAtRandomHaveTheSameBits) {
  const char* const asked = std::getenv("ECHELON_NUMERICS_SEED");
  const Philox random(asked != nullptr ? static_cast<std::uint64_t>(std::atoi(asked)) : 1, Stream::test, 0);
  std::uint64_t drawn = 0;
  const auto one_of = [&](const auto& list) {
    return *(std::begin(list) +
             static_cast<std::ptrdiff_t>(random.uniform(drawn++) * static_cast<double>(std::size(list))));
  };
  std::map<std::string, std::string> first;
  const int wanted = so_many(2, 100);
  for (int runs = 0; runs < wanted;) {
    const Column column = one_of(columns());
    const std::string name = column.model + " " + column.precision;
    if (!first.contains(name)) first[name] = run(plan_of({}, column), 1, 2);
    MeshRow row{.dp = one_of(std::array{1, 2, 4, 8}),
                .tp = one_of(std::array{1, 2, 4}),
                .pp = one_of(std::array{1, 2, 3, 4}),
                .ep = one_of(std::array{1, 2, 4, 8}),
                .cp = one_of(std::array{1, 2, 4})};
    row.sp = one_of(std::array{false, true}) && row.tp > 1;
    row.zero = one_of(std::array{0, 1, 2, 3});
    row.hsdp = one_of(std::array{1, 2});
    row.micro_batch = one_of(std::array{1, 2, 4});
    row.schedule = one_of(schedule_names());
    row.recompute = one_of(std::array{"none", "selective", "full"});
    row.threads = one_of(std::array{1, 2});
    row.kind = one_of(
        std::array{ContextKind::ulysses, ContextKind::allgather, ContextKind::ring, ContextKind::hybrid});
    row.ulysses = one_of(std::array{1, 2});
    row.balance = one_of(std::array{ContextBalance::zigzag, ContextBalance::none, ContextBalance::stripe});
    const Plan plan = plan_of(row, column);
    const bool small = row.dp * row.tp * row.pp * row.cp <= 16, cuts = row.dp * row.tp * row.pp * row.cp > 1;
    if (!small || !cuts || !is_legal(plan)) continue;
    ++runs;
    EXPECT_EQ(run(plan, row.threads, 2), first[name]) << row.name() << ": " << name;
  }
}

}  // namespace
}  // namespace echelon::numerics_test
