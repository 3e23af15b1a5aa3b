#include "plan/routing_simulation.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "base/philox.h"
#include "base/real.h"
#include "spec/routing_balance.h"
#include "spec/token_router.h"

namespace echelon {
namespace {

using Numbers = std::vector<double>;
using Ids = std::vector<std::int32_t>;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }
double sum(const Numbers& values) { return std::accumulate(values.begin(), values.end(), 0.0); }
double largest(const Numbers& values) { return *std::max_element(values.begin(), values.end()); }

RouterSpec without_limit(RouterSpec spec) {
  spec.most_groups = spec.groups;
  return spec;
}

// The tokens of a step: their logits, and the experts that they would choose without balancing.
struct Tokens {
  Numbers logits;  // (N, E)
  Ids wanted;      // (N, k)
};

Tokens draw_tokens(const RoutingRequest& r, std::int64_t step) {
  const Philox random(r.seed, Stream::routing, static_cast<std::uint64_t>(step));
  const double total = sum(r.popularity);
  Numbers base;
  for (double p : r.popularity) base.push_back(std::log(p / total * real(r.experts)));
  Tokens tokens{Numbers(index(r.tokens * r.experts)), Ids(index(r.tokens * r.experts_per_token))};
  for (std::size_t i = 0; i < tokens.logits.size(); ++i)
    tokens.logits[i] = base[i % base.size()] - std::log(-std::log(random.uniform(i) + 0x1p-54));
  const TokenRouter router(without_limit(r.router), r.experts, r.experts_per_token);
  const std::size_t k = index(r.experts_per_token);
  TokenRouter::Row row;
  Numbers weights(k);
  for (std::size_t t = 0; t < index(r.tokens); ++t) {
    router.score({tokens.logits.data() + t * base.size(), base.size()}, row);
    router.choose(row, {}, {tokens.wanted.data() + t * k, k}, weights);
  }
  return tokens;
}

// One balancing method over the steps.
class Balanced {
 public:
  Balanced(const RoutingRequest& request, const BalanceMethod& method)
      : r_(request),
        method_(method),
        router_(method.node_limit ? request.router : without_limit(request.router), request.experts,
                request.experts_per_token),
        learned_(index(request.experts)),
        bias_(index(request.experts)),
        ids_(index(request.tokens * k())),
        kept_(ids_.size()),
        weights_(ids_.size()) {
    report_.method = method.name;
    report_.expert_tokens.resize(index(r_.experts));
    report_.device_tokens.resize(index(r_.ep));
    for (double factor : r_.capacities) report_.capacities.push_back({.factor = factor});
  }

  void step(const Tokens& tokens, bool measured) {
    route(tokens);
    Numbers routed(index(r_.experts));
    for (std::int32_t id : ids_) routed[index(id)] += 1;
    drop(method_.balancing.capacity, method_.balancing.drop);
    Numbers kept(routed.size());
    for (std::int32_t id : kept_)
      if (id >= 0) kept[index(id)] += 1;
    report_.chosen.push_back(routed);
    report_.kept.push_back(kept);
    if (measured) measure(tokens);
    if (method_.balancing.has_losses()) learn(tokens);
    if (method_.balancing.bias_rate > 0) update_bias(routed, method_.balancing.bias_rate, bias_);
  }

  RoutingReport report(double measured_steps) {
    const auto divide = [&](double& value) { value /= measured_steps; };
    for (Numbers* values : {&report_.expert_tokens, &report_.device_tokens})
      for (double& value : *values) divide(value);
    for (double* value : {&report_.busiest_expert, &report_.slowest_device, &report_.dropped,
                          &report_.weight_dropped, &report_.moved, &report_.devices_per_token,
                          &report_.groups_per_token, &report_.copies_sent, &report_.most_copies_received})
      divide(*value);
    for (CapacityMeasure& c : report_.capacities)
      for (double* value :
           {&c.dropped, &c.weight_dropped_by_probability, &c.weight_dropped_by_position, &c.slowest})
        divide(*value);
    return std::move(report_);
  }

 private:
  std::int64_t k() const { return r_.experts_per_token; }
  std::int64_t tokens_of_device() const { return r_.tokens / r_.ep; }
  std::int64_t choices_of_device() const { return tokens_of_device() * k(); }
  std::size_t device_of(std::int32_t expert) const { return index(expert / (r_.experts / r_.ep)); }
  double even_load() const { return real(r_.tokens * k()) / real(r_.ep); }  // of a device

  std::span<const double> logits(const Tokens& tokens, std::int64_t t) {
    logits_.resize(index(r_.experts));
    const double* wanted = tokens.logits.data() + t * r_.experts;
    for (std::size_t e = 0; e < logits_.size(); ++e) logits_[e] = wanted[e] + learned_[e];
    return logits_;
  }

  void route(const Tokens& tokens) {
    for (std::int64_t t = 0; t < r_.tokens; ++t) {
      router_.score(logits(tokens, t), row_);
      router_.choose(row_, bias_, {ids_.data() + t * k(), index(k())},
                     {weights_.data() + t * k(), index(k())});
    }
  }

  // Drops copies over capacity, device by device. Returns how many.
  std::int64_t drop(double factor, DropPolicy policy) {
    kept_ = ids_;
    std::int64_t dropped = 0;
    if (factor == 0) return dropped;
    const std::size_t size = index(choices_of_device());
    const std::int64_t capacity = expert_capacity(factor, tokens_of_device(), k(), r_.experts);
    for (std::size_t at = 0; at < ids_.size(); at += size)
      dropped += drop_over_capacity({ids_.data() + at, size}, {weights_.data() + at, size}, r_.experts,
                                    capacity, policy, {kept_.data() + at, size});
    return dropped;
  }

  double weight_dropped() const {
    double lost = 0;
    for (std::size_t i = 0; i < kept_.size(); ++i)
      if (kept_[i] < 0) lost += weights_[i];
    return lost / sum(weights_);
  }

  Numbers device_tokens() const {
    Numbers devices(index(r_.ep));
    for (std::int32_t id : kept_)
      if (id >= 0) devices[device_of(id)] += 1;
    return devices;
  }

  void measure(const Tokens& tokens) {
    const double choices = real(std::ssize(ids_));
    const Numbers& experts = report_.kept.back();
    const Numbers devices = device_tokens();
    for (std::size_t e = 0; e < experts.size(); ++e) report_.expert_tokens[e] += experts[e];
    for (std::size_t d = 0; d < devices.size(); ++d) report_.device_tokens[d] += devices[d];
    report_.busiest_expert += largest(experts) * real(r_.experts) / choices;
    report_.slowest_device += largest(devices) / even_load();
    report_.dropped += real(std::count(kept_.begin(), kept_.end(), -1)) / choices;
    report_.weight_dropped += weight_dropped();
    measure_ways();
    std::int64_t moved = 0;
    for (std::int64_t t = 0; t < r_.tokens; ++t) {
      const auto wanted = tokens.wanted.begin() + t * k();
      for (std::int64_t j = 0; j < k(); ++j)
        moved += std::find(wanted, wanted + k(), ids_[index(t * k() + j)]) == wanted + k();
    }
    report_.moved += real(moved) / choices;
    for (CapacityMeasure& c : report_.capacities) {
      c.dropped += real(drop(c.factor, DropPolicy::position)) / choices;
      c.weight_dropped_by_position += weight_dropped();
      c.slowest += largest(device_tokens()) / even_load();
      drop(c.factor, DropPolicy::probability);
      c.weight_dropped_by_probability += weight_dropped();
    }
  }

  // Measures where the kept copies travel.
  void measure_ways() {
    Numbers received(index(r_.ep));
    double devices = 0, groups = 0, sent = 0;
    std::vector<bool> device_seen, group_seen;
    for (std::int64_t t = 0; t < r_.tokens; ++t) {
      const std::size_t home = index(t / tokens_of_device());
      device_seen.assign(index(r_.ep), false);
      group_seen.assign(index(r_.router.groups), false);
      for (std::int64_t j = 0; j < k(); ++j) {
        const std::int32_t id = kept_[index(t * k() + j)];
        if (id < 0) continue;
        const std::size_t device = device_of(id), group = index(id / (r_.experts / r_.router.groups));
        devices += !device_seen[device];
        groups += !group_seen[group];
        device_seen[device] = group_seen[group] = true;
        if (device == home) continue;
        ++sent;
        ++received[device];
      }
    }
    report_.devices_per_token += devices / real(r_.tokens);
    report_.groups_per_token += groups / real(r_.tokens);
    report_.copies_sent += sent / real(r_.ep);
    report_.most_copies_received += largest(received);
  }

  // One gradient step on the losses, each a mean over all tokens.
  void learn(const Tokens& tokens) {
    Numbers gradient(learned_.size()), d_logits(learned_.size()), counts, factors;
    const Numbers none(index(k()));
    for (int d = 0; d < r_.ep; ++d) {
      counts.assign(index(num_routing_counts(r_.experts, router_.spec())), 0);
      factors.clear();
      count_routed({ids_.data() + d * choices_of_device(), index(choices_of_device())}, k(), r_.experts,
                   router_.spec(), counts);
      add_balance_factors(method_.balancing, router_.spec(), r_.experts, k(), real(tokens_of_device()),
                          counts, factors);
      for (std::int64_t t = d * tokens_of_device(); t < (d + 1) * tokens_of_device(); ++t) {
        router_.score(logits(tokens, t), row_);
        router_.backward(row_, {ids_.data() + t * k(), index(k())}, none, factors, method_.balancing.z_loss,
                         1 / real(r_.tokens), d_logits);
        for (std::size_t e = 0; e < gradient.size(); ++e) gradient[e] += d_logits[e];
      }
    }
    for (std::size_t e = 0; e < gradient.size(); ++e) learned_[e] -= r_.router_lr * gradient[e];
  }

  const RoutingRequest& r_;
  BalanceMethod method_;
  TokenRouter router_;
  Numbers learned_, bias_;  // (E)
  Ids ids_, kept_;          // (N, k), of the current step
  Numbers weights_;
  TokenRouter::Row row_;
  Numbers logits_;
  RoutingReport report_;
};

}  // namespace

std::vector<RoutingReport> simulate_routing(const RoutingRequest& request,
                                            const std::vector<BalanceMethod>& methods,
                                            const Progress& progress) {
  validate(request);
  std::vector<Balanced> runs;
  for (const BalanceMethod& method : methods) runs.emplace_back(request, method);
  const std::int64_t measured = std::max<std::int64_t>(1, request.steps / 10);
  for (std::int64_t step = 0; step < request.steps; ++step) {
    report(progress, static_cast<double>(step) / static_cast<double>(request.steps), "routing");
    const Tokens tokens = draw_tokens(request, step);
    for (Balanced& run : runs) run.step(tokens, step >= request.steps - measured);
  }
  std::vector<RoutingReport> reports;
  for (Balanced& run : runs) reports.push_back(run.report(real(measured)));
  return reports;
}

}  // namespace echelon
