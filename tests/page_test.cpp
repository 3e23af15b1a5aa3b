#include "draw/page.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "page_checks.h"
#include "schedule/over_time.h"
#include "schedule/schedules.h"
#include "schedule/simulate.h"

namespace echelon::page_test {
namespace {

using nlohmann::json;

Page page_with(std::vector<Schedule> schedules) {
  Page page;
  page.kind = "simulate";
  page.title = "a <b>, \"c\" & </script>";
  page.subtitle = "{{data}} /*{{script}}*/ \xff";  // no mark of the page's, and no UTF-8
  page.command = "echelon simulate --out 'a b'";
  for (const Schedule& schedule : schedules) {
    PageTrack one;
    one.track = {"</script><b>", "note", simulate(schedule, {}).timeline};
    one.step_microbatches = schedule.num_microbatches;
    one.two_steps = simulate(two_steps(schedule), {}).timeline;
    for (HeldCurve& curve : held_over_time(schedule, one.track.timeline,
                                           std::vector<double>(static_cast<std::size_t>(schedule.num_stages), 1)))
      one.memory.push_back({{}, std::move(curve)});
    page.tracks.push_back(std::move(one));
  }
  page.members.emplace_back("answer", "{\"schedules\":[]}");
  return page;
}

TEST(Page, HoldsItsDocumentAndNeedsNothingElse) {
  const Page page = page_with({zb_h1(3, 5), dualpipe_v(2, 4)});
  const std::string html = page_html(page);
  const json document = checks::document_of(html);
  EXPECT_EQ(document, json::parse(page_json(page)));
  EXPECT_NE(html.find("<title>a &lt;b&gt;, &quot;c&quot; &amp; &lt;/script&gt;</title>"), std::string::npos);
  EXPECT_EQ(document["title"], page.title);
  EXPECT_EQ(document["command"], page.command);
  ASSERT_EQ(document["tracks"].size(), 2u);
  const json& track = document["tracks"][0];
  EXPECT_EQ(track["title"], "</script><b>");
  ASSERT_EQ(track["ranks"].size(), 3u);
  EXPECT_EQ(track["ranks"][0].size(), 7u * 15u);
  EXPECT_EQ(track["two"][0].size(), 2u * 7u * 15u);
  EXPECT_EQ(track["makespan"], 17.0);
  EXPECT_EQ(track["microbatches"], 5);
  EXPECT_EQ(track["memory"].size(), 3u);
  EXPECT_FALSE(document.contains("done"));
}

TEST(Page, IsWholeWithoutAnythingToDraw) {
  Page page;
  page.kind = "timeline";
  const json document = checks::document_of(page_html(page));
  EXPECT_TRUE(document["tracks"].empty());
}

TEST(OverTime, PeaksAreThoseOfTheAccount) {
  for (const Schedule& schedule : {gpipe(4, 8), one_f_one_b(4, 8), interleaved(2, 4, 3), zb_h1(4, 8), zb_v(4, 8),
                                   dualpipe(4, 8), dualpipe_v(4, 8)}) {
    const Simulation simulation = simulate(schedule, {});
    const std::vector<double> of_stage(static_cast<std::size_t>(schedule.num_stages), schedule.stage_fraction());
    const std::vector<HeldCurve> curves = held_over_time(schedule, simulation.timeline, of_stage);
    ASSERT_EQ(curves.size(), schedule.ranks.size());
    for (std::size_t r = 0; r < curves.size(); ++r) {
      double most = 0, before = -1;
      for (const auto& [time, held] : curves[r]) {
        most = std::max(most, held);
        EXPECT_GT(time, before);
        before = time;
      }
      EXPECT_NEAR(most, simulation.peak_activations[r], 1e-12) << schedule.name << " rank " << r;
      EXPECT_NEAR(curves[r].back().second, 0, 1e-12);
    }
  }
}

TEST(OverTime, ASecondStepJoinsOn) {
  for (const Schedule& schedule : {gpipe(4, 8), zb_h1(4, 8), dualpipe(4, 8), interleaved(2, 4, 2), zb_h2(4, 8)}) {
    const double one = simulate(schedule, {}).timeline.makespan();
    const Schedule both = two_steps(schedule);
    const Simulation simulation = simulate(both, {});
    const double two = simulation.timeline.makespan();
    // ZB-H2's first rank has done before the last one, and goes on; elsewhere the first to begin is the last to end.
    if (schedule.name == "zb-h2") {
      EXPECT_LT(two, 2 * one);
    } else {
      EXPECT_NEAR(two, 2 * one, 1e-9) << schedule.name;
    }
    for (int r = 0; r < schedule.num_ranks(); ++r)
      EXPECT_GE(two, 2 * simulate(schedule, {}).timeline.busy(r) - 1e-9) << schedule.name;
    EXPECT_EQ(both.num_microbatches, 2 * schedule.num_microbatches);
  }
}

}  // namespace
}  // namespace echelon::page_test
