// Processes that have a device each, against thread ranks on the host: what crosses between devices by way of
// the host has the host's bits. Run by mpirun, see CMakeLists.txt.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "comm/process_world.h"
#include "fake_driver.h"
#include "pipeline_runs.h"
#include "rank_runs.h"
#include "tensor/host.h"
#include "tensor/kernels.h"
#include "train/refuse_request.h"

namespace echelon {
namespace {

using namespace checks;

std::unique_ptr<ProcessWorld> job;

// What a rank has after each verb in turn.
std::vector<std::vector<float>> play(Communicator& group, std::int64_t count,
                                     const std::function<Tensor(const std::vector<float>&)>& put) {
  const int n = group.size(), rank = group.rank();
  const auto numbers = [&](std::int64_t length) { return values<float>(rank, length); };
  std::vector<std::vector<float>> results;
  const auto keep = [&](const Tensor& x) { results.push_back(copy_to_host<float>(x)); };
  const auto empty = [](std::int64_t length) { return std::vector<float>(static_cast<std::size_t>(length)); };
  Counts counts, send, receive;
  for (int r = 0; r < n; ++r) {
    counts.push_back(r % 3 == 1 ? 0 : count + r);
    send.push_back(count + rank + 2 * r);
    receive.push_back(count + r + 2 * rank);
  }
  const std::int64_t own = counts[static_cast<std::size_t>(rank)];
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::max}) {
    const Tensor x = put(numbers(count));
    group.all_reduce(x, op).wait();
    keep(x);
  }
  const Tensor gathered = put(empty(total(counts))), part = put(empty(own));
  group.all_gather(put(numbers(own)), gathered, counts).wait();
  keep(gathered);
  group.reduce_scatter(put(numbers(total(counts))), part, counts).wait();
  keep(part);
  const Tensor exchanged = put(empty(total(receive)));
  group.all_to_all(put(numbers(total(send))), send, exchanged, receive).wait();
  keep(exchanged);
  const Tensor said = put(numbers(count));
  group.broadcast(said, n - 1).wait();
  keep(said);
  // Several under way at once, waited for backwards; a message to itself.
  const Tensor a = put(numbers(count)), b = put(numbers(count)), heard = put(empty(count)),
               own_again = put(empty(count));
  Pending first = group.all_reduce(a), second = group.all_reduce(b);
  group.send(said, (rank + 1) % n).wait();
  group.send(said, rank).wait();
  Pending message = group.recv(heard, (rank + n - 1) % n), to_self = group.recv(own_again, rank);
  message.wait();
  to_self.wait();
  second.wait();
  while (!first.progress()) {
  }
  for (const Tensor& x : {a, b, heard, own_again}) keep(x);
  group.barrier().wait();
  return results;
}

TEST(ProcessDevices, EveryVerbHasTheBitsOfTheHost) {
  const int n = job->num_ranks(), me = job->rank();
  for (const std::int64_t count : {std::int64_t{3}, std::int64_t{1500}, std::int64_t{300'001}}) {
    std::vector<std::vector<float>> host, device;
    ThreadWorld threads(n, patience);
    threads.run([&](int rank) {
      const auto group = threads.join(rank, everyone(n), "tp");
      const auto results = play(*group, count, [](const std::vector<float>& from) {
        const Tensor x = Tensor::of_host(DType::f32, {std::ssize(from)});
        copy_from_host(std::span<const float>(from), x);
        return x;
      });
      if (rank == me) host = results;
    });
    FakeDriver driver({.seed = static_cast<std::uint64_t>(me) + 1, .devices = 2});
    job->run([&](int rank) {
      Arena arena(&driver, job->rank_on_node(rank) % driver.num_devices());
      const auto group = job->join(rank, everyone(n), "tp");
      device = play(*group, count, [&](const std::vector<float>& from) {
        const Tensor x(arena, MemoryCategory::other, DType::f32, {std::ssize(from)});
        copy_from_host(std::span<const float>(from), x);
        return x;
      });
    });
    EXPECT_TRUE(device == host) << count;
    EXPECT_EQ(driver.complaints(), std::vector<std::string>());
  }
}

TEST(ProcessDevices, WhatIsDroppedIsStillBroughtToTheDevice) {
  const int n = job->num_ranks();
  for (const std::int64_t count : {std::int64_t{3}, std::int64_t{300'001}}) {
    FakeDriver driver({.seed = static_cast<std::uint64_t>(job->rank()) + 1});
    job->run([&](int rank) {
      Arena arena(&driver, 0);
      std::vector<Tensor> all;
      for (int i = 0; i < 3; ++i) {
        const Tensor& x = all.emplace_back(arena, MemoryCategory::other, DType::f32, std::vector{count});
        const std::vector<float> ones(static_cast<std::size_t>(count), 1);
        copy_from_host(std::span<const float>(ones), x);
      }
      {
        const auto same = job->join(rank, everyone(n), "dp");
        for (const Tensor& x : all) (void)same->all_reduce(x);
      }
      for (const Tensor& x : all)
        EXPECT_EQ(copy_to_host<float>(x),
                  std::vector<float>(static_cast<std::size_t>(count), static_cast<float>(n)));
    });
    EXPECT_EQ(driver.complaints(), std::vector<std::string>());
  }
}

// The loss of each step, and the parameters and moments that the rank has in the end.
std::vector<double> trained(const Rank& rank, const Plan& plan) {
  std::vector<double> all;
  Trainer trainer(rank, plan, {}, 1);
  const SampleSource samples = random_samples(plan);
  for (std::int64_t step = 0; step < 2; ++step) {
    all.push_back(trainer.compute_gradients(step, samples));
    all.push_back(trainer.apply_gradients(step).gradient_norm);
  }
  for (const Parameter& p : trainer.parameters().all())
    for (const ParameterTensor which : {ParameterTensor::value, ParameterTensor::exp_avg_sq})
      if (p.spec.parts == 1)
        for (const double x : as_doubles(gather_logical(rank, p, which))) all.push_back(x);
  return all;
}

TEST(ProcessDevices, TrainToTheBitsOfTheHost) {
  const int n = job->num_ranks(), me = job->rank();
  std::vector<Plan> plans{odd_plan(odd_llama(), n, 1, false), odd_plan(odd_llama(), 1, n, true),
                          pipeline_plan(odd_gpt2(true, 4), "1f1b", 2, 1, n / 2, 4)};
  plans.push_back(odd_plan(odd_llama(), n, 1, false));
  plans.back().zero = 3;
  for (Plan& plan : plans) {
    SCOPED_TRACE(describe(plan));
    std::vector<double> host, device;
    ThreadWorld threads(n, patience);
    threads.run([&](int index) {
      Arena arena;
      const auto kernels = make_reference_kernels();
      const auto result = trained(Rank(threads, plan.mesh, index, plan.precision, arena, *kernels), plan);
      if (index == me) host = result;
    });
    FakeDriver driver({.seed = static_cast<std::uint64_t>(me) + 1});
    job->run([&](int index) {
      Arena arena(&driver, 0);
      const auto kernels = make_kernels(arena, plan.precision, 1, plan.numerics);
      device = trained(Rank(*job, plan.mesh, index, plan.precision, arena, *kernels), plan);
    });
    EXPECT_TRUE(device == host);
    EXPECT_GT(driver.operations_run(), 100u);
    EXPECT_EQ(driver.complaints(), std::vector<std::string>());
  }
}

// As where each process sees its own device of the node alone, or all of them see the one that there is.
TEST(ProcessDevices, AreCountedByWhatTheyAreAndNotByTheirNumbers) {
  const int n = job->num_ranks(), me = job->rank();
  const Plan plan = odd_plan(odd_llama(), n, 1, false);
  for (const bool shared : {false, true}) {
    SCOPED_TRACE(shared);
    RunOptions run;
    run.driver = std::make_shared<FakeDriver>(
        FakeDriver::Options{.memory_bytes = 1 << 20, .ids = shared ? "one" : fmt::format("of rank {}", me)});
    run.processes = job.get();
    run.device_ids = gather_device_ids(*job, run.driver.get());
    EXPECT_EQ(run.most_ranks_on_a_device(n), shared ? n : 1);
    EXPECT_EQ(run.devices_in_use(n), shared ? 1 : n);
    EXPECT_EQ(run.ranks_on(0, me, n), shared ? everyone(n) : std::vector{me});
    run.collectives = Collectives::nccl;
    const auto on_device = [&] { refuse_on_device(plan, run); };
    const auto in_memory = [&] { refuse_beyond_memory(plan, n * (900 << 10), run); };
    if (shared) {
      expect_contains(message_of<RequestError>(on_device), {fmt::format("{} ranks share 1 device", n)});
      expect_contains(message_of<RequestError>(in_memory),
                      {fmt::format("on {} ranks of device 0, which has 1.00 MiB", n)});
    } else {
      EXPECT_NO_THROW(on_device());
      EXPECT_NO_THROW(in_memory());
    }
  }
}

}  // namespace
}  // namespace echelon

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  echelon::job = std::make_unique<echelon::ProcessWorld>(echelon::checks::patience, echelon::FailureHooks{});
  const int result = RUN_ALL_TESTS();
  echelon::job.reset();
  return result;
}
