#include "checkpoint/fingerprint.h"

#include <gtest/gtest.h>

#include <atomic>

#include "bottles.h"
#include "mesh_runs.h"
#include "tensor/host.h"
#include "train/session.h"
#include "untimed.h"

namespace echelon::fingerprint_test {
namespace {

using namespace checks;

std::uint64_t fingerprint_on(const Plan& plan,
                             const std::function<void(const Rank&, const Trainer&)>& before = {}) {
  std::atomic<std::uint64_t> sum = 0;
  on_mesh(plan, [&](const Rank& rank) {
    const Trainer trainer(rank, plan, {}, 1);
    if (before) before(rank, trainer);
    FingerprintTaker taker;
    taker.start(rank, trainer.parameters(), plan.model, trainer.stages().router_biases(), 3);
    EXPECT_EQ(taker.step(), 3);
    sum += taker.take();
    EXPECT_FALSE(taker.under_way());
  });
  return sum;
}

Plan plan_of(ModelSpec model, int dp, int tp, int pp, int zero, DType dtype = DType::f64) {
  Plan plan = odd_plan(std::move(model), dp, tp, false, dtype);
  plan.mesh.set(Axis::pp, pp);
  plan.schedule = "1f1b";
  plan.zero = zero;
  return plan;
}

TEST(Fingerprint, IsThatOfTheWeightsOnEveryMesh) {
  for (const ModelSpec& model : {odd_gpt2(), odd_llama()}) {
    const std::uint64_t alone = fingerprint_on(plan_of(model, 1, 1, 1, 0));
    for (const auto& [dp, tp, pp, zero] : {std::tuple{2, 1, 1, 0},
                                           {3, 1, 1, 1},
                                           {2, 2, 1, 2},
                                           {2, 1, 2, 3},
                                           {1, 4, 1, 0},
                                           {1, 1, 2, 0},
                                           {2, 4, 2, 1}})
      EXPECT_EQ(fingerprint_on(plan_of(model, dp, tp, pp, zero)), alone)
          << model.name << " dp " << dp << " tp " << tp << " pp " << pp << " zero " << zero;
  }
}

// One unit in the last place, and two elements that change places.
TEST(Fingerprint, ShowsOneBitOfOneElementAndItsPlace) {
  const Plan plan = plan_of(odd_llama(), 1, 2, 1, 0);
  const std::uint64_t whole = fingerprint_on(plan);
  const auto change = [&](const auto& change_of) {
    return fingerprint_on(plan, [&](const Rank& rank, const Trainer& trainer) {
      const Tensor weights = trainer.parameters().all().front().own_value;
      if (rank.index() == 0) change_of(weights.host<double>());
    });
  };
  EXPECT_NE(change([](double* w) { w[1] = std::nextafter(w[1], 9.0); }), whole);
  EXPECT_NE(change([](double* w) { std::swap(w[0], w[1]); }), whole);
}

// Of runs that have the same bits: every so many steps, and after the last.
TEST(Fingerprint, IsPublishedEverySoManyStepsAndAfterTheLast) {
  const TemporaryDirectory directory;
  write_text(directory / "text", bottles(60));
  const TokenData data({directory / "text"}, bytes_vocab);
  using Published = std::vector<std::pair<std::int64_t, std::string>>;
  const auto published = [&](int pp, int zero, std::int64_t every, TrainSummary* summary = nullptr) {
    TrainRequest r = untimed();
    r.plan = plan_of(odd_llama(), 2, 1, pp, zero);
    r.plan.model.vocab = bytes_vocab;
    r.optimizer.total_steps = 5;
    r.optimizer.warmup_steps = 1;
    r.run.timeout = patience;
    r.eval_samples = 0;
    r.fingerprint_every = every;
    r.log_paths = {directory / "log"};
    Published all;
    TrainObserver observer;
    observer.on_fingerprint = [&](std::int64_t step, const std::string& fingerprint) {
      all.emplace_back(step, fingerprint);
    };
    const TrainSummary s = train(r, data, observer);
    if (summary != nullptr) *summary = s;
    return all;
  };
  TrainSummary summary;
  const Published every = published(1, 0, 1, &summary), some = published(2, 3, 2);
  ASSERT_EQ(every.size(), 5u);
  for (std::int64_t i = 0; i < 5; ++i) EXPECT_EQ(every[static_cast<std::size_t>(i)].first, i + 1);
  EXPECT_NE(every[3].second, every[4].second);
  EXPECT_EQ(some, (Published{every[1], every[3], every[4]}));
  EXPECT_EQ(summary.fingerprint, every[4].second);
  EXPECT_NE(
      read_bytes(directory / "log").find(fmt::format(R"("step":5,"fingerprint":"{}")", every[4].second)),
      std::string::npos);
  EXPECT_TRUE(published(1, 0, 0, &summary).empty());
  EXPECT_TRUE(summary.fingerprint.empty());
}

}  // namespace
}  // namespace echelon::fingerprint_test
