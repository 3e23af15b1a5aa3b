// How much of its transfers between hosts the program hides behind computation: the hops of ring attention,
// and the sums of gradients behind the rest of the backward pass. Computation sleeps, in proportion to what
// the same transfers take alone.
//
//   mpirun -n HOSTS link_overlap ring|buckets MIB
//
// MIB: of a hop, or of the gradients of a layer. bench/several_hosts.sh runs it over a slow network.
#include <fmt/core.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "base/median.h"
#include "comm/process_world.h"
#include "context_runs.h"
#include "parallel/context_parallel.h"
#include "parallel/data_parallel.h"
#include "sleeping_kernels.h"

namespace {

using namespace echelon;
using namespace echelon::checks;

constexpr int repeats = 5;

struct Times {
  double together = 0, computing = 0;  // seconds, medians
};

// Attention forward and backward with keys and values of `mib` on each rank, `block` seconds for a block.
Times ring_times(ProcessWorld& world, std::int64_t mib, double block) {
  const int ranks = world.num_ranks();
  Plan plan = context_plan(Family::llama, {ContextKind::ring, ContextBalance::zigzag, ranks, 1}, DType::f32);
  const Heads heads(plan.model.num_heads, plan.model.num_kv_heads, plan.model.head_dim);
  const std::int64_t rows =
      (mib << 20) / (2 * plan.model.kv_width() * element_bytes(plan.precision.activations));
  plan.seq_len = plan.model.max_seq = rows * ranks;
  const ContextLayout layout(plan);
  std::vector<double> together, computing;
  world.run([&](int index) {
    Arena arena;
    const auto sleeping = std::make_shared<SleepingKernels>(
        layout.causal_pairs(0) / ranks, std::chrono::duration<double>(block), world.time());
    Kernels kernels(sleeping);
    const Rank rank(world, plan.mesh, index, plan.precision, arena, kernels);
    const ContextParallel context(rank, plan, heads);
    const Sequences sequences{1, {}};
    const Tensor qkv = rank.activation({rows, heads.qkv_width()}),
                 out = rank.activation({rows, heads.width()}),
                 lse = rank.activation({rows * plan.model.num_heads}),
                 dqkv = rank.activation({rows, heads.qkv_width()});
    for (int repeat = 0; repeat < repeats; ++repeat) {
      rank.along(Axis::cp).barrier().wait();
      const double slept = sleeping->slept_seconds();
      const auto begin = Clock::now();
      const Tensor core = context.enter(sequences, qkv);
      context.forward(sequences, core, {}, out, lse);
      context.backward(sequences, core, {}, SequenceSums(nullptr, kernels, 0, 1, rows), out, lse,
                       context.delta(sequences, out, out), dqkv);
      together.push_back(seconds_since(begin));
      computing.push_back(sleeping->slept_seconds() - slept);
    }
  });
  return {median(together), median(computing)};
}

constexpr int layers = 8;

// The backward pass of layers that have gradients of `mib` each and take `layer` seconds, in buckets of
// `layers_of_bucket`.
Times bucket_times(ProcessWorld& world, std::int64_t mib, double layer, int layers_of_bucket) {
  Mesh mesh;
  mesh.set(Axis::dp, world.num_ranks());
  const std::int64_t elements = (mib << 20) / element_bytes(DType::f32);
  std::vector<double> together, computing;
  world.run([&](int index) {
    Arena arena;
    const auto kernels = make_reference_kernels();
    const Rank rank(world, mesh, index, DType::f32, arena, *kernels);
    std::vector<GradientBucket> buckets;
    std::vector<BucketTensors> tensors;
    for (int end = layers; end > 0; end -= layers_of_bucket) {
      const Range range{(end - layers_of_bucket) * elements, end * elements};
      GradientBucket& bucket = buckets.emplace_back();
      bucket.range = range;
      bucket.sections = {{"layers", 0, {0, range.size()}, 1, range.size()}};
      tensors.push_back(
          {range, Tensor(arena, MemoryCategory::gradients, DType::f32, {range.size()}), {}, false});
      kernels->fill(tensors.back().whole, 0);
    }
    GradientReducer reducer({rank.dp_cp(), rank.dp_cp()}, *kernels, arena, DType::f32, {}, 1, buckets);
    for (int repeat = 0; repeat < repeats; ++repeat) {
      rank.along(Axis::dp).barrier().wait();
      const auto begin = Clock::now();
      double slept = 0;
      DataParallel sums(rank, 1, reducer, repeat, tensors);
      for (int l = layers; l > 0; --l) {
        const auto asleep = Clock::now();
        std::this_thread::sleep_for(std::chrono::duration<double>(layer));
        slept += seconds_since(asleep);
        sums.ready({(l - 1) * elements, l * elements});
      }
      sums.finish();
      together.push_back(seconds_since(begin));
      computing.push_back(slept);
    }
  });
  return {median(together), median(computing)};
}

// Over all ranks, so that they go on with the same.
double longest(ProcessWorld& world, double seconds) {
  for (const std::string& other : world.gather(fmt::format("{}", seconds)))
    seconds = std::max(seconds, std::stod(other));
  return seconds;
}

// `exposed`: the part of the transfers that nothing can hide.
void report(ProcessWorld& world, const std::string& what, const Times& t, double transfers, double exposed) {
  const double seen = longest(world, t.together - t.computing) / transfers;
  if (world.rank() == 0)
    fmt::print(
        "{:<26} computing {:.3f} s, transfers {:.3f} s, together {:.3f} s: {:3.0f}% of the transfers hidden, "
        "{:.0f}% at best\n",
        what, t.computing, transfers, t.together, 100 * (1 - seen), 100 * (1 - exposed));
}

void ring(ProcessWorld& world, std::int64_t mib) {
  const int ranks = world.num_ranks();
  const double transfers = longest(world, ring_times(world, mib, 0).together);
  // Forward one hop a block, backward one for keys and values and one for their gradients; the last of these
  // comes home when all blocks are done.
  const double hops = 3.0 * (ranks - 1), block = 1.25 * transfers / hops;
  report(world, fmt::format("ring of {}", ranks), ring_times(world, mib, block), transfers, 1 / hops);
}

void buckets(ProcessWorld& world, std::int64_t mib) {
  const double transfers = longest(world, bucket_times(world, mib, 0, layers).together),
               layer = transfers / layers;
  const std::string ranks = fmt::format(", dp {}", world.num_ranks());
  report(world, "one bucket" + ranks, bucket_times(world, mib, layer, layers), transfers, 1);
  report(world, "a bucket a layer" + ranks, bucket_times(world, mib, layer, 1), transfers, 1.0 / layers);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc == 3 ? argv[1] : "";
  const std::int64_t mib = argc == 3 ? std::atoll(argv[2]) : 0;
  if ((what != "ring" && what != "buckets") || mib < 1) return 2;
  try {
    ProcessWorld world(patience, {});
    (what == "ring" ? ring : buckets)(world, mib);
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "link_overlap: {}\n", error.what());
    return 3;
  }
}
