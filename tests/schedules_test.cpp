#include "schedule/schedules.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "base/error.h"
#include "case_choice.h"
#include "schedule/simulate.h"

namespace echelon::schedules_test {
namespace {

// Times are given for a full stage.
Simulation run(const Schedule& schedule, StageTimes full = {}) {
  const double part = schedule.stage_fraction();
  SimulationCosts costs;
  costs.stages = {{full.forward * part, full.backward_input * part, full.backward_weight * part}};
  return simulate(schedule, costs);
}

double work(const Schedule& schedule, StageTimes t = {}) {
  return schedule.num_microbatches * (t.forward + t.backward_input + t.backward_weight);
}

double bubble(const Schedule& schedule, StageTimes t = {}) {
  return run(schedule, t).timeline.makespan() - work(schedule, t);
}

double largest(const std::vector<double>& values) { return *std::max_element(values.begin(), values.end()); }

void expect_close(double found, double wanted, const Schedule& s, const char* what) {
  ASSERT_NEAR(found, wanted, 1e-9 * std::max(1.0, std::abs(wanted)))
      << what << " of " << s.name << ", P=" << s.num_ranks() << ", M=" << s.num_microbatches;
}

struct Row {
  Schedule schedule;
  double makespan, bubble, local;
  std::vector<double> peaks;
};

TEST(Schedules, ReproduceTheTable) {
  const double third = 1.0 / 3;
  const std::vector<Row> rows{
      {naive(4, 12), 144, 108, 108, {1, 1, 1, 1}},
      {gpipe(4, 12), 45, 9, 9, {12, 12, 12, 12}},
      {one_f_one_b(4, 12), 45, 9, 9, {4, 3, 2, 1}},
      {interleaved(4, 12, 2), 40.5, 4.5, 4.5, {5.5, 4.5, 3.5, 2.5}},
      {interleaved(4, 12, 3), 39, 3, 3, {5, 4 + third, 3 + 2 * third, 3}},
      {zb_h1(4, 12), 39, 3, 3, {4, 4, 4, 4}},
      {zb_h2(4, 12), 39, 3, 0, {7, 7, 7, 7}},
      {zb_v(4, 12), 37.5, 1.5, 0, {4, 4, 4, 4}},
      {dualpipe_v(4, 12), 39, 3, 3, {4.5, 4.5, 4.5, 4.5}},
      {dualpipe(4, 12), 38, 2, 2, {5, 5, 5, 5}},
      {dualpipe(8, 20), 66, 6, 6, std::vector<double>(8, 9.0)},
      // Groups of P and a smaller last one.
      {interleaved(4, 13, 2), 49, 10, 10, {5.5, 4.5, 3.5, 2.5}},
      {interleaved(4, 14, 2), 51.5, 9.5, 9.5, {5.5, 4.5, 3.5, 2.5}},
      {interleaved(4, 15, 2), 50.5, 5.5, 5.5, {5.5, 4.5, 3.5, 2.5}},
      // Equal groups: one microbatch more in each costs half an activation, the bubble stays.
      {interleaved_even(4, 13, 2), 43.5, 4.5, 4.5, {6, 5, 4, 3}},
      {interleaved_even(4, 15, 2), 49.5, 4.5, 4.5, {6, 5, 4, 3}},
      {v_half(4, 12), 38.5, 2.5, 2.5, {3, 3, 3, 3}},
      {v_min(4, 12), 41.5, 5.5, 5.5, {2, 2, 2, 2}},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(fmt::format("{} P={} M={}", row.schedule.name, row.schedule.num_ranks(),
                             row.schedule.num_microbatches));
    const Simulation s = run(row.schedule);
    EXPECT_NEAR(s.timeline.makespan(), row.makespan, 1e-9);
    EXPECT_NEAR(s.timeline.makespan() - work(row.schedule), row.bubble, 1e-9);
    EXPECT_NEAR(s.timeline.local_bubble(), row.local, 1e-9);
    ASSERT_EQ(s.peak_activations.size(), row.peaks.size());
    for (std::size_t r = 0; r < row.peaks.size(); ++r) EXPECT_NEAR(s.peak_activations[r], row.peaks[r], 1e-9);
  }
  EXPECT_NEAR(bubble(zb_h1(4, 12), {1, 1.2, 0.8}), 4.2, 1e-9);
  EXPECT_NEAR(bubble(zb_h1(4, 12), {1, 1, 1.3}), 3.0, 1e-9);
  EXPECT_EQ(run(dualpipe(4, 12)).parameter_copies, 2);
  EXPECT_EQ(run(dualpipe_v(4, 12)).parameter_copies, 1);
}

TEST(Schedules, AgreeWithTheClosedForms) {
  const StageTimes uneven{1.0, 1.5, 0.5};
  const StageTimes short_f{0.5, 1.5, 1.0}, short_b{1.5, 0.5, 1.0};
  const double all = 3.0;  // F+B+W of all these times
  for (int p = 2; p <= 16; ++p)
    for (int m = p; m <= 64; ++m) {
      if (!checks::is_taken(6)) continue;
      for (const Schedule& s : {gpipe(p, m), one_f_one_b(p, m)})
        expect_close(bubble(s, uneven), (p - 1) * all, s, "bubble");
      const std::vector<double> peaks = peak_activations(one_f_one_b(p, m));
      for (int r = 0; r < p; ++r) ASSERT_EQ(peaks[r], std::min(p - r, m));
      for (int v : {2, 3}) {
        const Schedule s = interleaved(p, m, v), even = interleaved_even(p, m, v);
        expect_close(bubble(even, uneven), (p - 1) * all / v, even, "bubble");
        const double peak = std::min<double>(m, p * (1 + (p - 1.0) / (p * v)));
        ASSERT_LE(peak_activations(s)[0], peak + 1e-9) << p << " " << m << " " << v;
        ASSERT_GE(bubble(s), bubble(even) - 1e-9) << p << " " << m << " " << v;
        if (m % p == 0) {
          expect_close(peak_activations(s)[0], peak, s, "peak");
          ASSERT_EQ(s.ranks, even.ranks);
        }
      }
      const Schedule h1 = zb_h1(p, m);
      for (const auto& [f, b, w] : {uneven, short_f, short_b})
        expect_close(bubble(h1, {f, b, w}), (p - 1) * std::max({f, b, f + b - w}), h1, "bubble");
      expect_close(largest(peak_activations(h1)), p, h1, "peak");
      if (m >= 2 * p - 1) {
        for (const Schedule& s : {zb_h2(p, m), zb_v(p, m)})
          expect_close(run(s).timeline.local_bubble(), 0, s, "local bubble");
        const Schedule h2 = zb_h2(p, m);
        for (const auto& [f, b, w] : {uneven, short_f, short_b})
          expect_close(run(h2, {f, b, w}).timeline.local_bubble(),
                       (p - 1) * std::max({0.0, b - f, f + b - 2 * w}), h2, "local bubble");
        expect_close(largest(peak_activations(zb_h2(p, m))), 2 * p - 1, h1, "peak of ZB-H2");
        expect_close(largest(peak_activations(zb_v(p, m))), p, h1, "peak of ZB-V");
      }
      if (m >= 2 * p) {
        // F&B = F + B + W, so both come to F + 2(B + W) - 3W, in times of what a rank holds of one stage.
        // At F = B and W <= B, also where W is shorter.
        const StageTimes short_w{1.2, 1.2, 0.6};
        const Schedule v = dualpipe_v(p, m);
        expect_close(bubble(v), (p - 1) / 2.0 * 2.0, v, "bubble");
        expect_close(bubble(v, short_w), (p - 1) / 2.0 * 3.0, v, "bubble");
        for (double peak : peak_activations(v)) expect_close(peak, p + 0.5, v, "peak");
        if (p % 2 == 0 && m % 2 == 0) {
          const Schedule d = dualpipe(p, m);
          expect_close(bubble(d), (p / 2 - 1) * 2.0, d, "bubble");
          expect_close(bubble(d, short_w), (p / 2 - 1) * 3.0, d, "bubble");
          for (double peak : peak_activations(d)) expect_close(peak, p + 1, d, "peak");
        }
      }
      const Schedule found = zb_auto(p, m);
      ASSERT_LE(bubble(found), bubble(zb_h1(p, m)) + 1e-9) << p << " " << m;
      ASSERT_LE(largest(peak_activations(found)), p) << m;
      const Schedule half = v_half(p, m), min = v_min(p, m);
      const double of_1f1b = 3.0 * (p - 1);
      ASSERT_LE(bubble(half), of_1f1b / 2 + 1e-9) << p << " " << m;
      ASSERT_LE(bubble(min), of_1f1b * 2 / 3 + 1e-9) << p << " " << m;
      if (p % 3 != 0) expect_close(bubble(min), 2 * p - 2.5, min, "bubble");
      if (m >= 2 * p) {
        expect_close(largest(peak_activations(half)), p / 2 + 1, half, "peak");
        expect_close(largest(peak_activations(min)), (p + 4) / 3, min, "peak");
      }
    }
}

// Every (stage, microbatch) has F, then B and W or BW, once, on one rank; the schedule finishes; no rank
// holds more than stated; each rank does its share of the work and no more.
void expect_sound(const Schedule& s, double stated_peak) {
  SCOPED_TRACE(fmt::format("{} P={} M={}", s.name, s.num_ranks(), s.num_microbatches));
  std::map<std::pair<int, int>, std::pair<int, std::string>> seen;
  for (int r = 0; r < s.num_ranks(); ++r)
    for (const Instruction& i : s.ranks[r]) {
      if (!is_compute(i.op)) continue;
      auto [at, first] = seen.try_emplace({i.stage, i.microbatch}, r, "");
      ASSERT_EQ(at->second.first, r) << to_string(i) << " is on another rank than its forward";
      at->second.second += op_name(i.op);
    }
  ASSERT_EQ(seen.size(), static_cast<std::size_t>(s.num_stages) * s.num_microbatches);
  for (const auto& [what, ops] : seen)
    ASSERT_EQ(ops.second, "FBW") << what.first << "." << what.second << ": " << ops.second;

  const Simulation simulation = run(s);
  for (int r = 0; r < s.num_ranks(); ++r) ASSERT_NEAR(simulation.timeline.busy(r), work(s), 1e-9);
  ASSERT_LE(largest(simulation.peak_activations), stated_peak + 1e-9);
}

TEST(Schedules, AreSoundForAllSmallSizes) {
  for (int p = 1; p <= 8; ++p)
    for (int m = 1; m <= 20; ++m) {
      for (const std::string& name : schedule_names()) {
        if (name.starts_with("interleaved") || (name == "2bw" && m < p) || (name == "dualpipev" && m < 2 * p))
          continue;
        if (name == "dualpipe" && (p % 2 != 0 || m % 2 != 0 || m < 2 * p)) continue;
        const Schedule s = make_schedule(name, p, m);
        EXPECT_EQ(s.name, name);
        EXPECT_EQ(is_synchronous(s), name != "pipedream" && name != "2bw");
        const std::map<std::string, double> peaks{
            {"naive", 1},           {"gpipe", m},        {"zb-h2", 2 * p - 1},  {"v-half", p / 2 + 1},
            {"v-min", (p + 4) / 3}, {"dualpipe", p + 1}, {"dualpipev", p + 0.5}};
        const auto peak = peaks.find(name);
        expect_sound(s, std::min<double>(m, peak == peaks.end() ? p : peak->second));
      }
      for (int v = 1; v <= 4; ++v) {
        const auto stated_peak = [&](int size) {
          return std::min<double>(m, v == 1 ? p : (2.0 * (p - 1) + (v - 1) * size + 1) / v);
        };
        for (int group = 0; group <= m; group += group < p + 2 ? 1 : 3)
          expect_sound(interleaved(p, m, v, group), stated_peak(group == 0 ? p : group));
        const std::vector<int> groups = even_groups(p, m);
        EXPECT_EQ(std::accumulate(groups.begin(), groups.end(), 0), m);
        expect_sound(interleaved_even(p, m, v), stated_peak(groups[0]));
      }
    }
}

TEST(Schedules, PipeDreamKeepsAsManyVersionsAsItIsLate) {
  for (int p = 1; p <= 8; ++p)
    for (int m : {1, 3, 8, 20}) {
      const Schedule s = pipedream(p, m);
      const std::vector<int> versions = weight_versions(s);
      for (int r = 0; r < p; ++r) {
        // Fewer when the run ends before the rank has fallen that far behind.
        EXPECT_LE(versions[r], std::min(p - r, m));
        if (m >= 2 * (p - r) - 1) {
          EXPECT_EQ(versions[r], p - r) << p << " " << m << " " << r;
        }
        std::map<int, int> used;
        int steps = 0, latest = 0;
        for (const Instruction& i : s.ranks[r]) {
          if (i.op == Op::F) {
            EXPECT_EQ(i.version, steps);  // the newest
            used[i.microbatch] = i.version;
          } else if (i.op == Op::BW) {
            EXPECT_EQ(i.version, used.at(i.microbatch));
          } else {
            EXPECT_EQ(i.version, steps);
            EXPECT_EQ(i.version, i.microbatch);
            latest = std::max(latest, steps - used.at(i.microbatch));
            ++steps;
          }
        }
        EXPECT_EQ(steps, m);
        EXPECT_EQ(latest, std::min(p - 1 - r, m - 1));
      }
    }
}

TEST(Schedules, TwoBwIsOneStepLateOnEveryRank) {
  for (int p = 1; p <= 8; ++p)
    for (int size : {p, p + 1, 2 * p + 3}) {
      const int steps = 4;
      const Schedule s = make_schedule("2bw", p, size, 0, steps);
      simulate(s, {});  // no version is asked for before it is there
      for (int r = 0; r < p; ++r) {
        EXPECT_EQ(weight_versions(s)[r], 2);
        EXPECT_LE(peak_activations(s)[r], p - r);
        int done = 0;
        for (const Instruction& i : s.ranks[r]) {
          const int step = i.microbatch / size;
          if (i.op == Op::step)
            EXPECT_EQ(i.version, done++);
          else
            EXPECT_EQ(i.version, std::max(0, step - 1));
        }
        EXPECT_EQ(done, steps);
      }
    }
  EXPECT_THROW(two_bw(4, 6, 3), RequestError);
}

TEST(Schedules, NoBubbleInTheSteadyStateWithoutAFlush) {
  // Another step adds its work and nothing else.
  for (int p : {2, 4, 7})
    for (const char* name : {"pipedream", "2bw"}) {
      const double two = run(make_schedule(name, p, 2 * p, 0, 2)).timeline.makespan();
      const double five = run(make_schedule(name, p, 2 * p, 0, 5)).timeline.makespan();
      EXPECT_NEAR(five - two, 3 * 2 * p * 3.0, 1e-9) << name << " " << p;
    }
}

TEST(Schedules, RefuseWhatCannotBe) {
  const auto message = [](const char* name, int ranks, int microbatches, int chunks) -> std::string {
    try {
      make_schedule(name, ranks, microbatches, chunks);
    } catch (const RequestError& e) {
      return e.what();
    }
    return "accepted";
  };
  EXPECT_EQ(message("dualpipe", 4, 6, 0), "--microbatches 6: dualpipe needs at least 2P = 8");
  EXPECT_EQ(message("dualpipe", 4, 9, 0), "--microbatches 9: dualpipe needs an even number, the next is 10");
  EXPECT_EQ(message("dualpipe", 3, 8, 0), "--pp 3: dualpipe needs an even number, the next is 4");
  EXPECT_EQ(message("dualpipe", 1, 8, 0), "--pp 1: dualpipe needs an even number, the next is 2");
  EXPECT_EQ(message("dualpipev", 4, 7, 0), "--microbatches 7: dualpipev needs at least 2P = 8");
  EXPECT_EQ(message("2bw", 4, 3, 0), "--microbatches 3: 2bw needs at least P = 4 a step");
  EXPECT_EQ(message("1f1b", 0, 3, 0), "--pp 0: 1f1b needs at least 1");
  EXPECT_EQ(message("1f1b", 2, 0, 0), "--microbatches 0: 1f1b needs at least 1");
  EXPECT_EQ(message("gpipe", 2, 4, 3), "--chunks 3: gpipe has 1 a rank; only interleaved takes more");
  EXPECT_EQ(message("zb-v", 2, 4, 2), "accepted");
  EXPECT_EQ(message("interleaved", 2, 4, -1), "--chunks -1: interleaved needs at least 1");
  EXPECT_NE(message("1f2b", 2, 4, 0).find("legal: naive, gpipe"), std::string::npos);
}

}  // namespace
}  // namespace echelon::schedules_test
