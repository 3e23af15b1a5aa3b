// A job that fails as it is told: run by failures_test, by itself for thread ranks and under mpirun for
// processes. Ranks pass messages and sums round; one of them does something else.
//
//   failing_job threads|mpi RANKS RANK HOW TIMEOUT_MS
//
// HOW: kill (SIGKILL), stop (SIGSTOP), group (SIGSTOP, while the others make a group with it), throw,
// half (SIGSTOP, when its part of a gather is sent and the others' are not taken), disagree (another count),
// verb (another verb), spin (computes for ever), exit, none.
#include <fmt/core.h>

#include <csignal>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "comm/process_world.h"
#include "comm/rank.h"
#include "comm/threads.h"

namespace {

using namespace echelon;

struct Task {
  int rank = 0;
  std::string how;
};

void go_wrong(const std::string& how, Communicator& group, const Tensor& x) {
  // By then the others wait for this rank, and have heard where it stands.
  if (how != "none") std::this_thread::sleep_for(std::chrono::milliseconds(600));
  if (how == "kill") std::raise(SIGKILL);
  if (how == "stop") std::raise(SIGSTOP);
  if (how == "exit") std::_Exit(0);
  if (how == "throw") fail("the disk of rank {} is full", group.rank());
  if (how == "disagree") group.all_reduce(x.flat_range(0, 7)).wait();
  if (how == "verb") group.broadcast(x, 0).wait();
  while (how == "spin") std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

// Large enough that the sender is needed until its peer has taken it.
void stop_half_way(Communicator& group, bool stops, Arena& arena) {
  constexpr std::int64_t part = 1 << 20;
  const Tensor own(arena, MemoryCategory::other, DType::f32, {part}),
      all(arena, MemoryCategory::other, DType::f32, {part * group.size()});
  if (!stops) std::this_thread::sleep_for(std::chrono::milliseconds(600));
  const std::vector<std::int64_t> counts(static_cast<std::size_t>(group.size()), part);
  Pending gathered = group.all_gather(own, all, counts);
  if (stops) std::raise(SIGSTOP);
  gathered.wait();
}

void run_rank(World& world, int index, const Task& task) {
  Mesh mesh;
  mesh.set(Axis::tp, 2);
  mesh.set(Axis::dp, world.num_ranks() / 2);
  Arena arena;
  const auto kernels = make_reference_kernels();
  const Rank rank(world, mesh, index, DType::f32, arena, *kernels);
  const Tensor x(arena, MemoryCategory::other, DType::f32, {1000});
  kernels->fill(x, 1);
  for (int step = 0; step < 20; ++step) {
    rank.at(fmt::format("step {}", step));
    for (Axis axis : {Axis::tp, Axis::dp}) {
      Communicator& group = rank.along(axis);
      if (step == 10 && task.how == "group") {
        if (index == task.rank) go_wrong("stop", group, x);
        std::vector<int> everyone(static_cast<std::size_t>(world.num_ranks()));
        std::iota(everyone.begin(), everyone.end(), 0);
        (void)world.join(index, everyone, "late");
      }
      if (step == 10 && axis == Axis::dp && task.how == "half")
        stop_half_way(group, index == task.rank, arena);
      if (step == 10 && index == task.rank && axis == Axis::dp) go_wrong(task.how, group, x);
      group.all_reduce(x).wait();
      const int n = group.size(), me = group.rank();
      Pending sent = group.send(x, (me + 1) % n);
      group.recv(x, (me + n - 1) % n).wait();
      sent.wait();
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) return 2;
  const std::string comm = argv[1];
  const int ranks = std::atoi(argv[2]);
  const Task task{std::atoi(argv[3]), argv[4]};
  const std::chrono::milliseconds timeout(std::atoi(argv[5]));
  const FailureHooks hooks{
      [](const std::string& report) { fmt::print(stderr, "report: {}\nend of report\n", report); },
      [](int rank, const std::string& lines) {
        fmt::print(stderr, "record of rank {}: {} bytes\n", rank, lines.size());
      },
      [] { std::_Exit(3); }};
  try {
    std::unique_ptr<World> world;
    if (comm == "mpi")
      world = std::make_unique<ProcessWorld>(timeout, hooks);
    else
      world = std::make_unique<ThreadWorld>(ranks, timeout, hooks);
    world->run([&](int rank) { run_rank(*world, rank, task); });
  } catch (const std::exception&) {
    return 3;
  }
  return 0;
}
