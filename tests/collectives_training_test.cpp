// Training over collectives that are written over messages (comm/collectives.h) instead of the direct ones.
#include <gtest/gtest.h>

#include <fstream>

#include "case_choice.h"
#include "mesh_runs.h"
#include "train/session.h"
#include "untimed.h"
#include "verify/verify.h"

namespace echelon::collectives_training_test {
namespace {

using namespace checks;

std::vector<Outcome> trained(const Plan& plan, Collectives collectives, std::int64_t steps) {
  return run_steps(plan, {}, steps, random_samples(plan), {}, 1, collectives);
}

std::string text_of_letters(int length) {
  std::string text;
  for (int i = 0; i < length; ++i) text += static_cast<char>('a' + i * i % 23);
  return text;
}

Plan pipelined(Plan plan, const std::string& schedule) {
  plan.mesh.set(Axis::pp, 2);
  plan.schedule = schedule;
  plan.micro_batch = 1;
  plan.global_batch = 2 * plan.mesh.size(Axis::dp) * plan.mesh.size(Axis::pp);
  return plan;
}

// Halving-doubling groups its sums as the direct form does, for every number of ranks.
TEST(CollectivesTraining, HalvingDoublingGivesTheBitsOfTheDirectForm) {
  for (auto [dp, tp] : {std::pair{2, 1}, {3, 1}, {5, 1}, {1, 4}, {3, 4}, {6, 2}}) {
    const Plan plan = odd_plan(odd_gpt2(), dp, tp, false);
    EXPECT_TRUE(trained(plan, Collectives::direct, 2) == trained(plan, Collectives::halving_doubling, 2))
        << describe(plan);
  }
}

// What regroups sums agrees within the bound of verify, on every rank, whatever the mesh and the schedule;
// and finishes.
TEST(CollectivesTraining, EveryAlgorithmTrainsOnEveryMesh) {
  std::vector<Plan> plans{odd_plan(odd_llama(), 3, 1, false), odd_plan(odd_llama(), 2, 4, true),
                          odd_plan(odd_gpt2(), 4, 2, true)};
  for (const char* schedule : {"1f1b", "interleaved", "zb-v", "dualpipe"})
    plans.push_back(pipelined(odd_plan(odd_gpt2(true, 4), 3, 2, true), schedule));
  for (const Plan& plan : plans) {
    if (!is_taken(3)) continue;
    const std::vector<Outcome> direct = trained(plan, Collectives::direct, 1);
    for (Collectives collectives :
         {Collectives::ring, Collectives::halving_doubling, Collectives::automatic}) {
      SCOPED_TRACE(describe(plan) + ", " + plan.schedule + ", " + collectives_name(collectives));
      const std::vector<Outcome> other = trained(plan, collectives, 1);
      for (std::size_t rank = 0; rank < direct.size(); ++rank) {
        const Outcome &a = direct[rank], &b = other[rank];
        EXPECT_LE(relative_difference({a.losses[0]}, {b.losses[0]}), verify_bound(plan));
        EXPECT_LE(relative_difference({a.norms[0]}, {b.norms[0]}), verify_bound(plan));
        for (const auto& [name, gradient] : a.gradients)
          EXPECT_LE(relative_difference(gradient, b.gradients.at(name)), verify_bound(plan)) << name;
      }
    }
  }
}

// The textbook: a step of data parallelism sends 2 M elements a rank for M parameters, times (d-1)/d, as a
// ring in 2 (d-1) messages for each all-reduce. Measured on the channels; by verb the account is that of the
// direct form, whoever sends.
TEST(CollectivesTraining, ARingSendsTwiceTheGradients) {
  for (int d : {2, 3, 4, 8}) {
    const Plan plan = odd_plan(odd_llama(false, 4), d, 1, false);
    const std::int64_t gradients = num_parameters(plan.model), sums = 2;  // and two numbers: targets and loss
    struct Sent {
      Traffic by_verb, messages;
    };
    const auto sent_by_ranks = [&](Collectives collectives) {
      std::vector<Sent> sent(static_cast<std::size_t>(d));
      on_mesh(
          plan,
          [&](const Rank& rank) {
            Trainer trainer(rank, plan, {}, 1);
            trainer.compute_gradients(0, random_samples(plan));
            sent[static_cast<std::size_t>(rank.index())] = {rank.traffic(), rank.messages()};
          },
          1, collectives);
      return sent;
    };
    const std::vector<Sent> direct = sent_by_ranks(Collectives::direct),
                            by_ring = sent_by_ranks(Collectives::ring);
    std::int64_t all = 0;
    for (std::size_t i = 0; i < by_ring.size(); ++i) {
      EXPECT_EQ(direct[i].messages, Traffic{});
      EXPECT_EQ(by_ring[i].by_verb, direct[i].by_verb);
      const VerbTraffic rank = by_ring[i].messages.at(Axis::dp, Verb::send);
      EXPECT_EQ(by_ring[i].messages.bytes(Axis::dp), rank.bytes);
      EXPECT_EQ(rank.calls, direct[i].by_verb.at(Axis::dp, Verb::all_reduce).calls * 2 * (d - 1));
      EXPECT_NEAR(static_cast<double>(rank.bytes),
                  2.0 * (d - 1) / d * static_cast<double>(gradients + sums) * 8,
                  static_cast<double>(2 * direct[i].by_verb.at(Axis::dp, Verb::all_reduce).calls *
                                      8));  // parts of one sum differ by an element
      all += rank.bytes;
    }
    EXPECT_EQ(all, 2 * (d - 1) * (gradients + sums) * 8);
  }
}

// A whole run and `verify`, as the command line asks for them: every kind of training that has collectives
// finishes, and predicted and measured traffic are the same whichever algorithm sends.
TEST(CollectivesTraining, RunsVerifiesAndIsPredicted) {  // long
  const TemporaryDirectory directory;
  std::ofstream(directory / "text") << text_of_letters(4000);
  const TokenData data({directory / "text"}, bytes_vocab);
  ModelSpec model = odd_llama(false, 2, 4);
  model.vocab = bytes_vocab;
  const Plan base = odd_plan(model, 3, 2, true);
  const auto with = [&](const std::function<void(Plan&)>& change) {
    Plan plan = base;
    change(plan);
    return plan;
  };
  const std::vector<Plan> plans{
      base,
      with([](Plan& p) { p.zero = 1; }),
      with([](Plan& p) { p.zero = 3, p.hsdp = 2, p.mesh.set(Axis::dp, 4); }),
      pipelined(with([](Plan& p) { p.zero = 3; }), "1f1b"),
      pipelined(base, "pipedream"),
      pipelined(base, "2bw"),
      pipelined(with([](Plan& p) { p.optimizer_barrier = false, p.mesh.set(Axis::dp, 1); }), "zb-h2"),
      with([](Plan& p) { p.compression = parse_compression("int8", ""); }),
      with([](Plan& p) { p.compression = parse_compression("powersgd:2", ""), p.zero = 2; })};
  for (const Plan& plan : plans)
    for (Collectives collectives :
         {Collectives::direct, Collectives::ring, Collectives::halving_doubling, Collectives::automatic}) {
      SCOPED_TRACE(fmt::format("{}, {}, zero {}, {}, {}", describe(plan), plan.schedule, plan.zero,
                               compression_text(plan.compression), collectives_name(collectives)));
      // The direct form is every other test's; once is enough to see that it sends no messages.
      if (collectives == Collectives::direct ? &plan != &plans.front() : !is_taken(8)) continue;
      TrainRequest request = untimed();
      request.plan = plan;
      request.run.timeout = patience;
      request.run.collectives = collectives;
      request.optimizer.total_steps = 4;
      request.optimizer.warmup_steps = 0;
      request.optimizer.clip = 0;
      request.optimizer.eps = 1e-5;  // as the verb verify has it
      const TrainSummary summary = train(request, data, {});
      EXPECT_EQ(summary.predicted_traffic, summary.measured_traffic);
      EXPECT_EQ(summary.measured_messages == Traffic{}, collectives == Collectives::direct);
      if (plan.compression.kind != CompressionKind::none) continue;
      VerifyRequest check;
      check.plan = plan;
      check.run = request.run;
      check.optimizer = request.optimizer;
      check.steps = 1;
      const VerifyReport report = verify(check);
      EXPECT_TRUE(report.pass) << to_json(report, plan);
    }
}

TEST(CollectivesTraining, RunsAroundParameterServers) {
  const TemporaryDirectory directory;
  std::ofstream(directory / "text") << text_of_letters(4000);
  const TokenData data({directory / "text"}, bytes_vocab);
  TrainRequest request = untimed();
  request.plan = odd_plan(odd_llama(), 3, 1, false);
  request.plan.model.vocab = bytes_vocab;
  request.run.timeout = patience;
  request.optimizer.total_steps = 3;
  request.optimizer.warmup_steps = 0;
  request.asynchronous = AsynchronousOptions{.staleness = 0, .servers = 2};
  const double loss = train(request, data, {}).final_loss;
  request.run.collectives = Collectives::halving_doubling;
  const TrainSummary summary = train(request, data, {});
  EXPECT_EQ(summary.final_loss, loss);
  EXPECT_EQ(summary.predicted_traffic, summary.measured_traffic);
}

}  // namespace
}  // namespace echelon::collectives_training_test
