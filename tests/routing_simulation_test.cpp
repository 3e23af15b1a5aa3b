// What must hold of every simulated routing: conservation, bounds of capacities, and the loads that
// popularities promise, within six standard deviations of their counts.
#include "plan/routing_simulation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "base/error.h"
#include "spec/routing_balance.h"

namespace echelon::routing_simulation_test {
namespace {

double sum(const std::vector<double>& values) { return std::accumulate(values.begin(), values.end(), 0.0); }

RoutingRequest request_of(double zipf = 1) {
  RoutingRequest r;
  r.experts = 12;
  r.experts_per_token = 3;
  r.ep = 4;
  r.router.groups = 4;
  r.router.most_groups = 2;
  r.tokens = 480;
  r.steps = 10;  // of which the last is measured
  r.popularity = zipf_popularity(r.experts, zipf);
  r.balancing = {.expert_loss = 0.01,
                 .device_loss = 0.05,
                 .communication_loss = 0.02,
                 .bias_rate = 0.02,
                 .capacity = 1.25};
  r.capacities = {0.5, 1, 1.25, 12};
  return r;
}

std::vector<RoutingReport> simulate(const RoutingRequest& r, const std::vector<std::string>& names) {
  std::vector<BalanceMethod> methods;
  for (const std::string& name : names)
    methods.push_back(parse_balance_method(name, "--compare", r.balancing));
  return simulate_routing(r, methods);
}

const std::vector<std::string> all_methods{
    "none", "aux-loss", "device-loss", "communication-loss",
    "bias", "capacity", "node-limit",  "aux-loss+bias+capacity+node-limit"};

TEST(RoutingSimulation, EveryChoiceIsKeptOrDropped) {
  for (RouterScores scores : {RouterScores::softmax, RouterScores::sigmoid})
    for (DropPolicy drop : {DropPolicy::probability, DropPolicy::position}) {
      RoutingRequest r = request_of();
      r.router.scores = scores;
      r.balancing.drop = drop;
      const double choices = static_cast<double>(r.tokens * r.experts_per_token);
      for (const RoutingReport& report : simulate(r, all_methods)) {
        SCOPED_TRACE(report.method);
        ASSERT_EQ(std::ssize(report.chosen), r.steps);
        for (std::size_t step = 0; step < report.chosen.size(); ++step) {
          EXPECT_EQ(sum(report.chosen[step]), choices);
          for (std::size_t e = 0; e < report.kept[step].size(); ++e) {
            EXPECT_LE(report.kept[step][e], report.chosen[step][e]);
            EXPECT_LE(report.chosen[step][e], static_cast<double>(r.tokens));
          }
        }
        const double kept = sum(report.kept.back());
        EXPECT_NEAR(report.dropped, 1 - kept / choices, 1e-12);
        EXPECT_EQ(report.expert_tokens, report.kept.back());
        EXPECT_EQ(sum(report.device_tokens), kept);
        EXPECT_EQ(report.dropped > 0, report.method.find("capacity") != std::string::npos);
        EXPECT_EQ(report.weight_dropped > 0, report.dropped > 0);
        // What leaves a device arrives at another.
        EXPECT_LE(report.copies_sent * r.ep, kept);
        EXPECT_GE(report.most_copies_received * (1 + 1e-15), report.copies_sent);
      }
    }
}

TEST(RoutingSimulation, CapacitiesBoundTheSlowest) {
  for (double factor : {0.5, 1.0, 1.25, 2.0}) {
    RoutingRequest r = request_of(2);
    r.balancing.capacity = factor;
    r.capacities = {factor};
    const RoutingReport report = simulate(r, {"capacity"}).front();
    const double capacity =
        static_cast<double>(expert_capacity(factor, r.tokens / r.ep, r.experts_per_token, r.experts));
    for (const std::vector<double>& kept : report.kept)
      for (double tokens : kept) EXPECT_LE(tokens, r.ep * capacity);
    const double even = static_cast<double>(r.tokens * r.experts_per_token) / static_cast<double>(r.experts);
    EXPECT_LE(report.busiest_expert, r.ep * capacity / even);
    EXPECT_LE(report.slowest_device, r.ep * capacity / even);
    // The most popular one is full, on every device.
    EXPECT_EQ(report.kept.back().front(), r.ep * capacity);
    // What is measured of a capacity is what a method with it does.
    EXPECT_EQ(report.capacities[0].dropped, report.dropped);
    EXPECT_EQ(report.capacities[0].slowest, report.slowest_device);
    EXPECT_EQ(report.capacities[0].weight_dropped_by_probability, report.weight_dropped);
  }
}

TEST(RoutingSimulation, DropsFollowTheCounts) {
  RoutingRequest r = request_of();
  r.ep = 1;
  const RoutingReport report = simulate(r, {"none"}).front();
  double before = 1;
  for (const CapacityMeasure& c : report.capacities) {
    const double capacity =
        static_cast<double>(expert_capacity(c.factor, r.tokens, r.experts_per_token, r.experts));
    double over = 0;
    for (double tokens : report.chosen.back()) over += std::max(0.0, tokens - capacity);
    EXPECT_NEAR(c.dropped, over / static_cast<double>(r.tokens * r.experts_per_token), 1e-12) << c.factor;
    EXPECT_LE(c.dropped, before);
    EXPECT_EQ(c.weight_dropped_by_probability<c.weight_dropped_by_position, c.dropped> 0);
    before = c.dropped;
  }
  EXPECT_EQ(report.capacities.back().dropped, 0);
}

// Where all experts are alike, each is one of a token's k with probability k / E.
TEST(RoutingSimulation, UniformPopularityIsNearlyEven) {
  for (std::int64_t tokens : {480, 4800}) {
    RoutingRequest r = request_of(0);
    r.tokens = tokens;
    const double n = static_cast<double>(tokens), p = 3.0 / 12, choices = 3 * n;
    for (const RoutingReport& report : simulate(r, {"none", "node-limit"})) {
      const double most = 1 + 6 * std::sqrt((1 - p) / (n * p));
      EXPECT_GT(report.busiest_expert, 1) << report.method;
      EXPECT_LT(report.busiest_expert, most) << report.method;
      EXPECT_LT(report.slowest_device, most) << report.method;
      // A copy stays at home with probability 1 / ep.
      EXPECT_NEAR(report.copies_sent * r.ep, choices * 3 / 4, 6 * std::sqrt(choices * 3 / 16))
          << report.method;
    }
  }
}

// One expert a token: the shares themselves.
TEST(RoutingSimulation, ChoicesFollowThePopularity) {
  RoutingRequest r = request_of();
  r.experts_per_token = 1;
  r.tokens = 4800;
  for (const std::vector<double>& popularity :
       {zipf_popularity(12, 1.5), one_popular_expert(12, 7, 0.6), std::vector<double>(12, 3.0)}) {
    r.popularity = popularity;
    const RoutingReport report = simulate(r, {"none"}).front();
    for (std::size_t e = 0; e < 12; ++e) {
      const double p = popularity[e] / sum(popularity), mean = 4800 * p;
      EXPECT_NEAR(report.chosen.front()[e], mean, 6 * std::sqrt(mean * (1 - p))) << e;
    }
  }
}

TEST(RoutingSimulation, DependsOnTheSeedAndOnNothingElse) {
  RoutingRequest r = request_of();
  const auto together = simulate(r, all_methods);
  for (std::size_t i = 0; i < all_methods.size(); ++i) {
    const RoutingReport alone = simulate(r, {all_methods[i]}).front();
    EXPECT_EQ(alone.chosen, together[i].chosen) << alone.method;
    EXPECT_EQ(alone.kept, together[i].kept) << alone.method;
  }
  EXPECT_EQ(together[0].chosen, together[5].chosen);  // a capacity moves nobody
  r.seed = 2;
  EXPECT_NE(simulate(r, {"none"}).front().chosen, together[0].chosen);
}

TEST(RoutingSimulation, WaysOfBalancingDoWhatTheyAreFor) {  // long
  RoutingRequest r = request_of();
  r.popularity = one_popular_expert(12, 4, 0.5);
  r.steps = 100;
  r.tokens = 1200;
  const auto reports = simulate(r, all_methods);
  const auto of = [&](const char* name) -> const RoutingReport& {
    return *std::find_if(reports.begin(), reports.end(), [&](const auto& x) { return x.method == name; });
  };
  const RoutingReport& none = of("none");
  EXPECT_GT(none.busiest_expert, 2.5);
  EXPECT_EQ(none.moved, 0);
  EXPECT_LT(of("bias").busiest_expert, 0.5 * none.busiest_expert);
  EXPECT_LT(of("aux-loss").busiest_expert, 0.75 * none.busiest_expert);
  EXPECT_LT(of("device-loss").slowest_device, 0.75 * none.slowest_device);
  EXPECT_LT(of("communication-loss").busiest_expert, none.busiest_expert);
  for (const char* name : {"bias", "aux-loss", "device-loss"}) EXPECT_GT(of(name).moved, 0.05) << name;
  EXPECT_GT(none.groups_per_token, 2);
  for (const char* name : {"node-limit", "aux-loss+bias+capacity+node-limit"})
    EXPECT_LE(of(name).groups_per_token, 2) << name;
  EXPECT_EQ(of("capacity").chosen, none.chosen);
}

// The gradient that is descended is that of the loss: a step too small to change a choice lowers it.
TEST(RoutingSimulation, TheLossGoesDown) {
  RoutingRequest r = request_of();
  r.popularity = one_popular_expert(12, 4, 0.5);
  r.steps = 200;
  const RoutingReport report = simulate(r, {"aux-loss"}).front();
  // In tens of steps, so that noise does not hide it: the load of the popular one falls throughout.
  std::vector<double> loads;
  for (std::size_t at = 0; at < 200; at += 40) {
    double load = 0;
    for (std::size_t s = at; s < at + 40; ++s) load += report.chosen[s][4];
    loads.push_back(load);
  }
  EXPECT_TRUE(std::is_sorted(loads.rbegin(), loads.rend()));
}

TEST(RoutingSimulation, RefusesWhatCannotBe) {
  const auto refusal = [](const std::function<void(RoutingRequest&)>& change) -> std::string {
    RoutingRequest r = request_of();
    change(r);
    try {
      validate(r);
    } catch (const RequestError& error) {
      return error.what();
    }
    return "";
  };
  const auto says = [](const std::string& text, const char* what) {
    EXPECT_NE(text.find(what), std::string::npos) << text;
  };
  EXPECT_EQ(refusal([](RoutingRequest&) {}), "");
  says(refusal([](auto& r) { r.experts = 1; }), "--experts 1");
  says(refusal([](auto& r) { r.experts_per_token = 13; }), "--top-k 13");
  says(refusal([](auto& r) { r.ep = 5; }), "--ep 5");
  says(refusal([](auto& r) { r.tokens = 482; }), "--tokens 482");
  says(refusal([](auto& r) { r.tokens = std::int64_t{4} << 40; }), "--tokens 4398046511104");
  says(refusal([](auto& r) { r.steps = 0; }), "--steps 0");
  says(refusal([](auto& r) { r.router.groups = 5; }), "--groups 5");
  says(refusal([](auto& r) { r.router.most_groups = 5; }), "--most-groups 5");
  says(refusal([](auto& r) { r.balancing.expert_loss = -1; }), "--aux-loss -1");
  says(refusal([](auto& r) { r.capacities = {1, 0}; }), "--capacities 1,0");
  for (const char* name : {"", "bias+", "auxiliary", "none+bias"}) {
    try {
      parse_balance_method(name, "--compare", {});
      ADD_FAILURE() << name;
    } catch (const RequestError& error) {
      says(error.what(), "legal: none, or some of aux-loss");
    }
  }
}

}  // namespace
}  // namespace echelon::routing_simulation_test
