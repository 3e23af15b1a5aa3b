#include "schedule/vocabulary.h"
#include "case_choice.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "refusals.h"
#include "schedule/lower.h"
#include "schedule/schedules.h"
#include "schedule/text.h"
#include "schedule/validate.h"

namespace echelon::vocabulary_test {
namespace {

using checks::expect_refusal;

const char* const schedules[] = {"naive", "gpipe", "1f1b",   "interleaved", "interleaved-even", "zb-h1",
                                 "zb-h2", "zb-v",  "v-half", "v-min",       "zb-auto"};

// Stages of 1, 1, 1 for a full one, and an output layer of 3 * `head` over all ranks.
SimulationCosts costs_of(const Schedule& s, double head) {
  const double part = s.stage_fraction();
  SimulationCosts costs;
  costs.stages = {{part, part, part}};
  costs.vocabulary_part = {2 * head / s.num_ranks(), 0, head / s.num_ranks()};
  return costs;
}

// The same with the output layer on the last stage.
SimulationCosts uncut(const Schedule& s, double head) {
  SimulationCosts costs = costs_of(s, head);
  costs.stages.resize(static_cast<std::size_t>(s.num_stages), costs.stages.front());
  for (double* t : {&costs.stages.back().forward, &costs.stages.back().backward_input,
                    &costs.stages.back().backward_weight})
    *t += head;
  return costs;
}

// Nothing of too few microbatches.
std::optional<Schedule> where_enough(const char* name, int ranks, int microbatches) {
  try {
    return make_schedule(name, ranks, microbatches);
  } catch (const RequestError&) {
    return {};
  }
}

TEST(Vocabulary, EverySchedulesPassesAreThereAndFinish) {
  for (const char* name : schedules)
    for (int ranks : {1, 2, 3, 4, 8})
      for (int microbatches : {1, 2, 3, 7, 16}) {
        SCOPED_TRACE(fmt::format("{} P={} M={}", name, ranks, microbatches));
        const std::optional<Schedule> found = where_enough(name, ranks, microbatches);
        if (!found) continue;
        const Schedule& base = *found;
        for (double head : {0.0, 0.3, 2.0}) {
          const Schedule made = with_vocabulary_parallelism(base, costs_of(base, head));
          ASSERT_NO_THROW(validate(made));
          const Simulation simulation = simulate(made, costs_of(base, head));
          for (int r = 0; r < ranks; ++r)
            ASSERT_NEAR(simulation.timeline.busy(r), microbatches * (3 + 3 * head / ranks), 1e-9);
        }
      }
}

// In a pipeline that is long enough the output layer's share of the bubble goes.
TEST(Vocabulary, TakesTheOutputLayerOutOfTheBubble) {
  for (const char* name : {"1f1b", "interleaved", "zb-h1", "zb-v"})
    for (int ranks : {2, 4, 8}) {
      SCOPED_TRACE(fmt::format("{} P={}", name, ranks));
      const int microbatches = 8 * ranks;
      const Schedule base = make_schedule(name, ranks, microbatches);
      const double head = 0.5, work = microbatches * (3 + 3 * head / ranks);
      const auto makespan = [](const Schedule& s, const SimulationCosts& costs) {
        return simulate(s, costs).timeline.makespan();
      };
      const double without = makespan(base, costs_of(base, 0)) - 3 * microbatches;
      const double last = makespan(base, uncut(base, head)) - work;
      const Schedule made = with_vocabulary_parallelism(base, costs_of(base, head));
      const double cut = makespan(made, costs_of(base, head)) - work;
      EXPECT_LE(cut, 1.5 * without);
      EXPECT_LE(cut, last / 3);
    }
}

// No rank holds more than three microbatches of a stage beyond what it held, however long the pipeline is.
TEST(Vocabulary, KeepsToItsMemory) {  // long
  for (const char* name : schedules)
    for (int ranks : {2, 4, 8, 16, 32})
      for (int microbatches : {ranks, 2 * ranks, 3 * ranks + 1}) {
        if (std::string(name) == "zb-auto" && ranks > 8) continue;  // a search, of 1F1B's memory
        if (ranks > 8 && !checks::is_taken(3)) continue;
        SCOPED_TRACE(fmt::format("{} P={} M={}", name, ranks, microbatches));
        const std::optional<Schedule> found = where_enough(name, ranks, microbatches);
        if (!found) continue;
        const Schedule& base = *found;
        const std::vector<double> before = peak_activations(base);
        for (double head : {0.25, 1.0, 4.0}) {
          const std::vector<double> after =
              peak_activations(with_vocabulary_parallelism(base, costs_of(base, head)));
          for (std::size_t r = 0; r < after.size(); ++r)
            ASSERT_LE(after[r], before[r] + 3 * base.stage_fraction() + 1e-9)
                << "rank " << r << " head " << head;
        }
      }
}

// A rank keeps the logits of two microbatches at most.
TEST(Vocabulary, WeightGradientsFollowClosely) {
  for (const char* name : {"1f1b", "zb-v"}) {
    const Schedule base = make_schedule(name, 4, 16);
    const Schedule made = with_vocabulary_parallelism(base, costs_of(base, 0.5));
    for (const auto& list : made.ranks) {
      int held = 0;
      for (const Instruction& i : list) {
        held += i.op == Op::V ? 1 : i.op == Op::VW ? -1 : 0;
        EXPECT_LE(held, 2);
      }
    }
  }
}

TEST(Vocabulary, GoesThroughText) {
  for (const char* name : {"1f1b", "zb-v"}) {
    const Schedule base = make_schedule(name, 3, 6);
    Schedule made = with_vocabulary_parallelism(base, costs_of(base, 0.5));
    for (const Schedule& s : {made, lower(made)}) {
      const Schedule read = from_text(to_text(s), s.name);
      EXPECT_EQ(read.num_stages, s.num_stages);
      EXPECT_EQ(read.vocabulary_parts, 3);
      EXPECT_EQ(read.ranks, s.ranks);
    }
    EXPECT_THROW(to_csv(made), RequestError);
  }
}

std::string refusal_of(const std::string& text) {
  try {
    validate(from_text(text, "mine"));
  } catch (const RequestError& error) {
    return error.what();
  }
  return "";
}

TEST(Vocabulary, WhatIsWrongIsNamed) {
  const std::string first = "0F0 0V0 0BW0 0VW0\n";
  EXPECT_EQ(refusal_of(first + "1F0 1V0 1BW0 1VW0"), "");
  const auto expect = [&](const std::string& text, const std::string& why) {
    EXPECT_NE(refusal_of(text).find(why), std::string::npos) << refusal_of(text);
  };
  expect(first + "1F0 1BW0", "1 parts of the output layer (V, VW) over 2 ranks");
  expect(first + "1F0 1V0 1BW0", "VW of part 1 of the output layer, microbatch 0 is missing");
  expect(first + "1F0 1VW0 1V0 1BW0", "comes before V of part 1, microbatch 0");
  expect(first + "1F0 1V0 1V0 1BW0 1VW0", "is there a second time");
  expect("0F0 1V0 0BW0 1VW0\n1F0 0V0 1BW0 0VW0", "part 1 of the output layer is run by rank 1");
  expect(first + "1F0 1BW0 1V0 1VW0", "gradient of the output layer's input");  // V behind what needs it
  expect(first + "1F0 (1V0;1BW0) 1VW0", "runs alone");
}

TEST(Vocabulary, ScheduleThatCannotHaveItIsRefused) {
  for (const auto& [name, why] :
       {std::pair{"dualpipe", "it runs each stage on two ranks"},
        std::pair{"dualpipev", "it runs passes together"}, std::pair{"pipedream", "it does not flush"},
        std::pair{"2bw", "it does not flush"}}) {
    const Schedule base = make_schedule(name, 4, 8);
    EXPECT_NE(vocabulary_problem(base).find(why), std::string::npos) << vocabulary_problem(base);
    EXPECT_THROW(with_vocabulary_parallelism(base, costs_of(base, 1)), RequestError);
  }
  // The output layer's parts take microbatches in order: the last pass needs the first one's, which waits.
  const Schedule base = from_text("0F0 0F1 0BW1 0F2 0BW0 0BW2\n1F0 1F1 1BW1 1F2 1BW2 1BW0\n", "own.txt");
  EXPECT_EQ(vocabulary_problem(base), "");
  expect_refusal([&] { with_vocabulary_parallelism(base, costs_of(base, 1)); },
                 {"own", "another order", "legal"});
}

}  // namespace
}  // namespace echelon::vocabulary_test
