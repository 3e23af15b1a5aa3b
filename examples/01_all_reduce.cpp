// Four ranks, as threads of this process, add up a vector each. Every rank ends with the same bits: how a sum
// is grouped depends on the ranks, not on who came first.
#include <fmt/core.h>

#include "comm/threads.h"

using namespace echelon;

int main() {
  ThreadWorld world(4, std::chrono::seconds(10));
  run_ranks(world, [&](int rank) {
    Arena arena;  // a rank's memory, accounted by category
    const Tensor x(arena, MemoryCategory::other, DType::f32, {3});
    for (int i = 0; i < 3; ++i) x.host<float>()[i] = static_cast<float>(10 * rank + i);
    const auto everyone = world.join(rank, {0, 1, 2, 3}, "example");
    everyone->all_reduce(x).wait();
    if (rank == 0)
      fmt::print("{} {} {}\n", x.host<float>()[0], x.host<float>()[1], x.host<float>()[2]);  // 60 64 68
  });
}
