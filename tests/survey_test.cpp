#include "plan/survey.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "workloads.h"

namespace echelon::survey_test {
namespace {

SearchRequest small_request() {
  SearchRequest r;
  r.work.plan.model = load_model("llama-3-8b");
  r.work.plan.global_batch = 32;
  r.work.plan.seq_len = 4096;
  r.work.machine = load_machine("h100");
  r.work.software = load_software("current");
  r.gpus = 8;
  return r;
}

TEST(Survey, CellsAndFrontAreThoseOfAllPlans) {
  SearchRequest request = small_request();
  request.pin("micro-batch", 1);
  const Survey found = survey(request);
  request.top = 10000;
  const SearchResult all = search(request);
  ASSERT_GT(all.plans.size(), 100u);
  EXPECT_EQ(found.cells.size(), 10u);  // tp x pp that divide 8
  const double device = StepModel(request.work).usable_bytes();
  for (const SurveyCell& cell : found.cells) {
    double least = 1e300;
    for (const Estimate& e : all.plans)
      if (e.plan.mesh.tp() == cell.tp && e.plan.mesh.pp() == cell.pp) least = std::min(least, e.seconds);
    if (least == 1e300) {
      EXPECT_TRUE(cell.result.plans.empty() || !cell.refusal.empty());
      continue;
    }
    ASSERT_EQ(cell.result.plans.size(), 1u) << cell.tp << " " << cell.pp;
    EXPECT_LE(cell.result.plans.front().seconds, least * (1 + tie));
    EXPECT_GE(cell.result.plans.front().seconds, least * (1 - 1e-12));
  }
  ASSERT_GT(found.front.size(), 1u);
  for (std::size_t i = 0; i < found.front.size(); ++i) {
    const Estimate& e = found.front[i];
    if (i > 0) {
      EXPECT_GT(e.seconds, found.front[i - 1].seconds);
      EXPECT_LE(static_cast<double>(e.memory.total()),
                static_cast<double>(found.front[i - 1].memory.total()) - front_step * device + 1);
    }
    // Nothing that holds as little is faster by more than a tie.
    for (const Estimate& other : all.plans)
      if (other.memory.total() <= e.memory.total()) {
        EXPECT_GE(other.seconds * (1 + tie), e.seconds) << i;
      }
  }
}

TEST(Survey, SaysWhyASizeHasNoPlan) {
  SearchRequest request = small_request();
  request.work.plan.model = load_model("llama-3-70b");  // whose states fill more than 8 devices
  request.pin("zero", 0);
  const Survey found = survey(request);
  EXPECT_TRUE(found.front.empty());
  for (const SurveyCell& cell : found.cells)
    EXPECT_TRUE(!cell.refusal.empty() || cell.result.nearest) << cell.tp << " " << cell.pp;
}

TEST(Survey, KeepsWhatIsPinned) {
  SearchRequest request = small_request();
  request.pin("tp", 2);
  const Survey found = survey(request);
  EXPECT_EQ(found.cells.size(), 3u);
  for (const SurveyCell& cell : found.cells) EXPECT_EQ(cell.tp, 2);
  for (const Estimate& e : found.front) EXPECT_EQ(e.plan.mesh.tp(), 2);
}

}  // namespace
}  // namespace echelon::survey_test
