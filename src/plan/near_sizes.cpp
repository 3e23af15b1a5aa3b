#include "plan/near_sizes.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <utility>

namespace echelon {
namespace {

struct Size {
  std::int64_t gpus = 0, batch = 0;
};

constexpr std::int64_t within = 8;    // sizes may differ by 1/8
constexpr std::size_t looked_at = 3;  // of each kind

// How many ranks the other axes must have if data parallelism has as many as it can.
std::int64_t left_to_others(const Size& s) { return s.gpus / std::gcd(s.gpus, s.batch); }

// Sizes that leave fewer ranks to the other axes than the requested size: those that leave fewest, and among
// these the nearest.
std::vector<Size> more_divisible(std::vector<Size> sizes, const Size& asked) {
  std::erase_if(sizes, [&](const Size& s) { return left_to_others(s) >= left_to_others(asked); });
  const auto order = [&](const Size& s) {
    return std::pair(left_to_others(s), std::abs(s.gpus - asked.gpus) + std::abs(s.batch - asked.batch));
  };
  std::sort(sizes.begin(), sizes.end(), [&](const Size& a, const Size& b) { return order(a) < order(b); });
  if (sizes.size() > looked_at) sizes.resize(looked_at);
  return sizes;
}

// The size with the most tokens per second whose step takes less than most_seconds.
std::optional<NearSize> best_of(const std::vector<Size>& sizes, SearchRequest request, double most_seconds) {
  const auto rate = [](const NearSize& n) { return static_cast<double>(n.global_batch) / n.best.seconds; };
  std::optional<NearSize> found;
  for (const Size& size : sizes) {
    request.gpus = static_cast<int>(size.gpus);
    request.work.plan.global_batch = size.batch;
    double most = most_seconds;
    if (found) most = std::min(most, static_cast<double>(size.batch) / rate(*found));
    auto best = best_within(request, most);
    if (!best) continue;
    NearSize one{request.gpus, size.batch, std::move(*best)};
    if (!found || rate(one) > rate(*found)) found = std::move(one);
  }
  return found;
}

std::optional<NearSize> best_of_fewer(const SearchRequest& request, double most_seconds) {
  const Size asked{request.gpus, request.work.plan.global_batch};
  // Beyond one node, whole nodes are used.
  const std::int64_t step =
      std::lcm(std::int64_t{request.given_ranks()},
               asked.gpus > request.work.machine.node() ? request.work.machine.node() : 1);
  std::vector<Size> sizes;
  for (std::int64_t gpus = (asked.gpus - 1) / step * step;
       gpus >= asked.gpus - asked.gpus / within && gpus > 0; gpus -= step)
    sizes.push_back({gpus, asked.batch});
  return best_of(more_divisible(std::move(sizes), asked), request, most_seconds);
}

}  // namespace

std::optional<NearSize> fewer_gpus(const SearchRequest& request, const Estimate& best) {
  return best_of_fewer(request, best.seconds / (1 + tie));
}

std::optional<NearSize> with_offload(const SearchRequest& request, const Estimate& best) {
  if (best.plan.offload != Offload::none || best.plan.recompute == Recompute::none ||
      request.work.software.is_this_trainer)
    return {};
  std::optional<NearSize> found;
  double most_seconds = best.seconds * 0.95;
  for (const SearchRequest& with : offloading(request))
    if (auto plan = best_within(with, most_seconds)) {
      most_seconds = plan->seconds;
      found = NearSize{request.gpus, request.work.plan.global_batch, std::move(*plan)};
    }
  return found;
}

std::vector<NearSize> near_sizes(const SearchRequest& request) {
  constexpr double any = 1e300;
  const Size asked{request.gpus, request.work.plan.global_batch};
  std::vector<NearSize> all;
  if (auto found = best_of_fewer(request, any)) all.push_back(std::move(*found));
  for (const std::int64_t sign : {-1, 1}) {
    std::vector<Size> sizes;
    for (std::int64_t by = 1; by <= asked.batch / within; ++by)
      sizes.push_back({asked.gpus, asked.batch + sign * by});
    if (auto found = best_of(more_divisible(std::move(sizes), asked), request, any))
      all.push_back(std::move(*found));
  }
  return all;
}

}  // namespace echelon
