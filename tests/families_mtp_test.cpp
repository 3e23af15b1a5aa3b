// Models with a module that predicts one more token (multi-token prediction).
#include <gtest/gtest.h>

#include <functional>

#include "family_runs.h"
#include "refusals.h"

namespace echelon::families_mtp_test {
namespace {

using namespace checks;

// A small DeepSeek-V3 that predicts one more token, by a layer with experts or without.
ModelSpec odd_predictor(bool experts) {
  ModelSpec m = experts ? odd_deepseek(2) : odd_llama();
  m.name = "predictor";
  latent(m);
  m.q_rank = 6;
  m.num_mtp_layers = 1;
  m.mtp_weight = 0.7;
  return m;
}

// The table is read twice, and so is the output matrix; tied they are one.
TEST(MultiTokenPrediction, GradientsAreTheDerivativesOfBothLosses) {  // long
  for (const bool tied : {false, true}) {
    ModelSpec model = odd_predictor(true);
    model.tied_embedding = tied;
    model.experts_per_token = model.num_experts = 2;
    model.router.groups = model.router.most_groups = 1;
    expect_derivatives(model);
  }
}

TEST(MultiTokenPrediction, IsTheSameOnEveryAxis) {
  for (const Plan& plan : plans_of(odd_predictor(true)))
    if (plan.zero <= 1) {
      if (is_taken(8)) expect_verified_and_predicted(plan);
    } else {
      expect_refusal([&] { validate(plan); }, {"--zero", "num_mtp_layers", "1"});
    }
  expect_verified_and_predicted(odd_plan(odd_predictor(false), 1, 2, true));
}

// Both ends of the pipeline on one rank or on two, and on two ranks each.
TEST(MultiTokenPrediction, IsTheSameUnderEverySchedule) {  // long
  for (const auto& [schedule, tied] : {std::pair{"gpipe", true},
                                       {"interleaved", false},
                                       {"zb-v", false},
                                       {"zb-v", true},
                                       {"zb-h2", false},
                                       {"dualpipe", false},
                                       {"dualpipev", true}}) {
    if (!is_taken(3)) continue;
    Plan plan = odd_plan(odd_predictor(true), 1, 1, false);
    plan.model.num_layers = 4;
    plan.model.tied_embedding = tied;
    plan.mesh.set(Axis::pp, 2);
    plan.schedule = schedule;
    plan.global_batch = 4;
    plan.micro_batch = 1;
    expect_verified_and_predicted(plan);
  }
}

TEST(MultiTokenPrediction, IsTheSameWithExpertsElsewhere) {  // long
  for (const bool again : {false, true}) {
    Plan plan = odd_plan(odd_predictor(true), 2, 2, true);
    plan.mesh.ep = 2;
    plan.balancing = all_losses(false);
    if (again) plan.recompute = Recompute({"experts_in", "attention"});
    expect_verified_and_predicted(plan);
  }
}

TEST(MultiTokenPrediction, IsRefusedWhereItIsNotRun) {
  const auto refused = [](const std::function<void(Plan&)>& change, std::vector<std::string> parts) {
    Plan plan = odd_plan(odd_predictor(false), 2, 1, false);
    change(plan);
    parts.emplace_back("num_mtp_layers");
    expect_refusal([&] { check_whole(plan); }, parts);
  };
  refused(
      [](Plan& p) {
        p.mesh.set(Axis::pp, 2);
        p.schedule = "2bw";
      },
      {"--schedule 2bw", "1f1b"});
  ModelSpec model = odd_predictor(false);
  model.num_mtp_layers = 2;
  expect_refusal([&] { validate(model); }, {"num_mtp_layers = 2", "1"});
}

TEST(MultiTokenPrediction, TomlSaysIt) {
  const ModelSpec model = odd_predictor(true);
  expect_toml_says(model);
}

}  // namespace
}  // namespace echelon::families_mtp_test
