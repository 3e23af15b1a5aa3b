// A collective of one's own, over send and recv: all-gather in one step. It is held to the library's.
#include <fmt/core.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "comm/collectives.h"
#include "comm/exchange.h"
#include "comm/threads.h"

using namespace echelon;

namespace {

// Every rank sends its part to all others at once. Steps 1. Sent by a rank: n-1 times its own part, as by a
// ring where parts are even. A send posts and returns, so no order of them can wait in a circle.
void star_all_gather(Communicator& group, const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts) {
  const int n = group.size(), rank = group.rank();
  const std::vector<Tensor> parts = cut(out, counts);
  copy(in, parts[static_cast<std::size_t>(rank)]);
  std::vector<Pending> sent;
  for (int k = 1; k < n; ++k) sent.push_back(group.send(in, around(rank + k, n)));
  for (int k = 1; k < n; ++k) {
    const int from = around(rank - k, n);
    group.recv(parts[static_cast<std::size_t>(from)], from).wait();
  }
  for (Pending& one : sent) one.wait();
}

std::vector<float> gathered(int n, bool mine) {
  std::vector<std::int64_t> counts;
  for (int r = 0; r < n; ++r) counts.push_back((7 * r + 3) % 5);  // uneven, and 0 among them
  std::vector<float> result;
  ThreadWorld world(n, std::chrono::seconds(60));
  run_ranks(world, [&](int rank) {
    Arena arena;
    const std::int64_t here = counts[static_cast<std::size_t>(rank)];
    const Tensor in(arena, MemoryCategory::other, DType::f32, {here}),
        out(arena, MemoryCategory::other, DType::f32, {std::accumulate(counts.begin(), counts.end(), std::int64_t{0})});
    for (std::int64_t i = 0; i < here; ++i) in.host<float>()[i] = static_cast<float>(100 * rank + i);
    std::vector<int> all(static_cast<std::size_t>(n));
    std::iota(all.begin(), all.end(), 0);
    const auto group = world.join(rank, all, "example");
    if (mine)
      star_all_gather(*group, in, out, counts);
    else
      group->all_gather(in, out, counts).wait();
    if (rank == n - 1) result.assign(out.host<float>(), out.host<float>() + out.numel());
  });
  return result;
}

}  // namespace

int main() {
  for (int n = 1; n <= 6; ++n)
    if (gathered(n, true) != gathered(n, false)) return 1;
  fmt::print("as the library's, on 1 to 6 ranks\n");
}
