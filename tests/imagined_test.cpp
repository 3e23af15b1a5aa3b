#include "comm/imagined.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <vector>

#include "comm/rank.h"
#include "patience.h"
#include "tensor/host.h"

namespace echelon::imagined_test {
namespace {

Mesh mesh_of_eight() {
  Mesh mesh;
  for (const Axis axis : {Axis::pp, Axis::dp, Axis::tp}) mesh.set(axis, 2);
  mesh.ep = 2;
  return mesh;
}

struct Account {
  Traffic traffic, messages;
  Memory peak, live;
  bool operator==(const Account&) const = default;
};

// A little of everything that a step does: products, norms, every verb along every axis, uneven counts,
// memory that comes and goes.
Account small_step(const Rank& rank) {
  Kernels& kernels = rank.kernels();
  const std::int64_t rows = 6 + rank.coordinate(Axis::tp), n = rank.size(Axis::tp);
  const Tensor weight(rank.arena(), MemoryCategory::parameters, rank.precision().activations, {8, 5});
  kernels.fill(weight, 0.5);
  {
    const Tensor x = rank.activation({rows, 8}), y = rank.activation({rows, 5}),
                 stats = rank.activation({rows, 1}), norm = rank.activation({8});
    const std::vector<double> numbers(static_cast<std::size_t>(rows * 8), 0.25);
    copy_numbers_from_host(numbers, x);
    kernels.fill(norm, 1);
    kernels.rms_norm(x, norm, 1e-5, x, stats);
    kernels.matmul(x, Transpose::no, weight, Transpose::no, y, false);
    const std::vector<std::int64_t> counts{6 * 5, 7 * 5};
    const Tensor whole = rank.activation({13, 5});
    rank.along(Axis::tp).all_gather(y, whole, counts).wait();
    rank.along(Axis::tp).reduce_scatter(whole, y, counts).wait();
    EXPECT_TRUE(kernels.all_finite(y));
    const std::int64_t mine = counts[static_cast<std::size_t>(rank.coordinate(Axis::tp))] / n;
    const std::vector<std::int64_t> sends(2, mine), receives{counts[0] / n, counts[1] / n};
    const Tensor received = rank.activation({receives[0] + receives[1]});
    rank.along(Axis::tp).all_to_all(y.flat_range(0, 2 * mine), sends, received, receives).wait();
    rank.along(Axis::tp).broadcast(norm, 1).wait();
  }
  const int stage = rank.coordinate(Axis::pp);
  const Tensor handed = rank.activation({4, 5});
  kernels.fill(handed, 1);
  if (stage == 0)
    rank.along(Axis::pp).send(handed, 1).wait();
  else
    rank.along(Axis::pp).recv(handed, 0).wait();
  const Tensor gradient(rank.arena(), MemoryCategory::gradients, rank.precision().activations, {8, 5});
  kernels.fill(gradient, 1);
  rank.dp_cp().all_reduce(gradient).wait();
  rank.ep().all_reduce(gradient.flat_range(0, 7), ReduceOp::max).wait();
  gradient.release_memory();
  rank.along(Axis::dp).barrier().wait();
  return {rank.traffic(), rank.messages(), rank.arena().peak(), rank.arena().live()};
}

TEST(ImaginedWorld, ARankAloneHoldsAndSendsWhatItDoesAmongOthers) {
  const Mesh mesh = mesh_of_eight();
  for (const Collectives collectives : {Collectives::direct, Collectives::ring}) {
    std::vector<Account> real(8);
    ThreadWorld world(8, checks::patience);
    run_ranks(world, [&](int index) {
      Arena arena;
      const auto kernels = make_kernels(arena, DType::f64, 1);
      const Rank rank(world, mesh, index, DType::f64, arena, *kernels, collectives);
      real[static_cast<std::size_t>(index)] = small_step(rank);
    });
    EXPECT_FALSE(real[0] == real[1]);
    for (int index = 0; index < 8; ++index) {
      ImaginedWorld alone(8, index);
      alone.run([&](int it) {
        EXPECT_EQ(it, index);
        Arena arena(Device::none);
        const auto kernels = make_kernels(arena, DType::f64, 1);
        const Rank rank(alone, mesh, it, DType::f64, arena, *kernels, collectives);
        EXPECT_EQ(mesh.rank_at(rank.coordinates()), index);
        EXPECT_EQ(rank.along(Axis::tp).size(), 2);
        EXPECT_EQ(rank.along(Axis::tp).rank(), rank.coordinate(Axis::tp));
        const Account account = small_step(rank);
        EXPECT_EQ(account.traffic, real[static_cast<std::size_t>(index)].traffic) << index;
        EXPECT_EQ(account.messages != Traffic{}, collectives == Collectives::ring);
        EXPECT_EQ(account.peak, real[static_cast<std::size_t>(index)].peak) << index;
        EXPECT_EQ(account, real[static_cast<std::size_t>(index)]) << index;
        EXPECT_EQ(arena.held_bytes(), 0u);
      });
    }
  }
}

// A size that no machine here could hold.
TEST(ImaginedWorld, IsAsLargeAsAsked) {
  Mesh mesh;
  mesh.set(Axis::dp, 4096);
  mesh.set(Axis::tp, 8);
  const int index = mesh.rank_at({.dp = 4000, .tp = 5});
  ImaginedWorld world(mesh.num_ranks(), index);
  Arena arena(Device::none);
  const auto kernels = make_kernels(arena, DType::f64, 1);
  const Rank rank(world, mesh, index, DType::f64, arena, *kernels);
  EXPECT_EQ(rank.coordinate(Axis::dp), 4000);
  EXPECT_EQ(rank.coordinate(Axis::tp), 5);
  const Tensor x = rank.activation({1 << 20, 1 << 16});
  kernels->add(x, x);
  rank.along(Axis::dp).all_reduce(x).wait();
  EXPECT_EQ(arena.peak().total(), std::int64_t{8} << 36);
  EXPECT_EQ(rank.traffic().at(Axis::dp, Verb::all_reduce).bytes, (std::int64_t{16} << 36) / 4096 * 4095);
}

TEST(ImaginedWorld, ChecksWhatItIsAskedFor) {
  EXPECT_THROW(ImaginedWorld(4, 4), RequestError);
  ImaginedWorld world(4, 2);
  EXPECT_THROW(world.join(2, {0, 1}, "tp"), RequestError);
  EXPECT_THROW(world.join(1, {0, 1}, "tp"), InvariantError);
  const auto tp = world.join(2, {0, 2}, "tp");
  EXPECT_EQ(tp->rank(), 1);
  Arena arena(Device::none);
  const Tensor x(arena, MemoryCategory::other, DType::f64, {6}),
      y(arena, MemoryCategory::other, DType::f64, {3});
  const std::vector<std::int64_t> counts{2, 2};
  EXPECT_THROW((void)tp->all_gather(y, x, counts), CommError);
  EXPECT_THROW((void)tp->send(x, 2), CommError);
  EXPECT_EQ(world.states().front().rank, 2);
}

}  // namespace
}  // namespace echelon::imagined_test
