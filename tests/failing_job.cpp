// A job that fails as it is told: run by failures_test, by itself for thread ranks and under mpirun for
// processes. Ranks pass messages and sums round; one of them does something else, once all others wait for
// it.
//
//   failing_job threads|mpi RANKS RANK HOW TIMEOUT_MS MARK
//
// HOW: kill (SIGKILL), stop (SIGSTOP), group (SIGSTOP, while the others make a group with it), throw,
// together (all ranks throw, each by itself), alone (a process throws before the run, while the others wait
// to meet it), half (SIGSTOP, when its part of a gather is sent and the others' are not taken), disagree
// (another count), verb (another verb), more (a broadcast of more than the others take), spin (computes for
// ever), exit, none.
//
// However slow the machine is, nothing is late before that rank has done it: the clock of the job stands
// still until the file MARK is there. A rank that spins makes it just before, another one when a rank has
// stopped; by then all others have gone on as far as they can.
#include <fmt/core.h>

#include <unistd.h>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <numeric>
#include <string>
#include <thread>

#include "base/error.h"
#include "comm/process_world.h"
#include "comm/rank.h"
#include "comm/threads.h"

namespace {

using namespace echelon;

struct Task {
  int rank = 0;
  std::string how, mark;
};

// Stands still until there is a file of this name.
Time standing_until(const std::string& mark) {
  struct Began {
    std::atomic<bool> at_all{false};
    Clock::time_point at;
    std::mutex mutex;
  };
  const auto began = std::make_shared<Began>();
  return {.now = [began, mark] {
    if (!began->at_all) {
      const std::lock_guard lock(began->mutex);
      if (!began->at_all && std::filesystem::exists(mark)) {
        began->at = Clock::now();
        began->at_all = true;
      }
    }
    return began->at_all ? Clock::time_point(Clock::now() - began->at) : Clock::time_point();
  }};
}

void nap() { std::this_thread::sleep_for(std::chrono::milliseconds(2)); }

// In one piece: others may look at any moment.
void make(const std::string& file) {
  std::ofstream(file + ".new") << ::getpid() << "\n";
  std::filesystem::rename(file + ".new", file);
}

void stop(const Task& task) {
  make(task.mark + ".stops");
  std::raise(SIGSTOP);
}

// Returns when the process that is to stop has, as /proc says.
void wait_until_stopped(const Task& task) {
  for (;; nap()) {
    std::string text;
    if (int pid = 0; std::ifstream(task.mark + ".stops") >> pid)
      std::getline(std::ifstream(fmt::format("/proc/{}/stat", pid)), text);
    if (text.find(") T ") != std::string::npos) return;
  }
}

// Returns when every other rank waits, as far as it can go without this one.
void wait_until_missed(World& world, int index, const std::string& how) {
  const auto is_held_up = [&](const RankState& s) {
    if (how == "group") return s.waits_in.starts_with("the making of group late");
    // The one that shares this rank's dp group, and the ones that share a tp group with one of the two.
    return s.waits_in.starts_with(s.rank % 2 == index % 2 ? "dp collective 11 " : "tp collective 12 ");
  };
  for (;; nap()) {
    const std::vector<RankState> states = world.states();
    if (std::all_of(states.begin(), states.end(),
                    [&](const RankState& s) { return s.rank == index || is_held_up(s); }))
      return;
  }
}

// Returns when every rank has come here.
void wait_for_all(World& world, const Rank& rank) {
  rank.at("together");
  for (;; nap()) {
    const std::vector<RankState> states = world.states();
    if (std::all_of(states.begin(), states.end(),
                    [](const RankState& s) { return s.instruction == "together"; }))
      return;
  }
}

void go_wrong(World& world, const Task& task, Communicator& group, const Tensor& x) {
  if (task.how == "none") return;
  wait_until_missed(world, task.rank, task.how);
  if (task.how == "spin") make(task.mark);
  if (task.how == "kill") std::raise(SIGKILL);
  if (task.how == "stop" || task.how == "group") stop(task);
  if (task.how == "exit") std::_Exit(0);
  if (task.how == "throw") fail("the disk of rank {} is full", task.rank);
  if (task.how == "disagree") group.all_reduce(x.flat_range(0, 7)).wait();
  if (task.how == "verb") group.broadcast(x, 0).wait();
  while (task.how == "spin") nap();
}

// Large enough that the sender is needed until its peer has taken it.
void stop_half_way(const Task& task, Communicator& group, bool stops, Arena& arena) {
  constexpr std::int64_t part = 1 << 20;
  const Tensor own(arena, MemoryCategory::other, DType::f32, {part}),
      all(arena, MemoryCategory::other, DType::f32, {part * group.size()});
  if (!stops) wait_until_stopped(task);
  const std::vector<std::int64_t> counts(static_cast<std::size_t>(group.size()), part);
  Pending gathered = group.all_gather(own, all, counts);
  if (stops) stop(task);
  gathered.wait();
}

// What lies behind the room for less stays as it was.
void take_less(Communicator& group, int giver, Arena& arena, Kernels& kernels) {
  constexpr std::int64_t less = 1 << 20;
  const Tensor x(arena, MemoryCategory::other, DType::f32, {2 * less});
  const bool gives = group.rank() == giver;
  kernels.fill(x, gives ? 1 : 0);
  try {
    group.broadcast(gives ? x : x.flat_range(0, less), giver).wait();
  } catch (const CommError&) {
    const float* const behind = x.flat_range(less, 2 * less).host<float>();
    if (!gives && std::any_of(behind, behind + less, [](float value) { return value != 0; }))
      fmt::print(stderr, "what lies behind the room was written to\n");
    throw;
  }
}

void run_rank(World& world, int index, const Task& task) {
  std::jthread marks;
  if ((task.how == "stop" || task.how == "group" || task.how == "half") &&
      index == (task.rank + 1) % world.num_ranks())
    marks = std::jthread([&] {
      wait_until_stopped(task);
      wait_until_missed(world, task.rank, task.how);
      make(task.mark);
    });
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
    if (step == 10 && task.how == "together") {
      wait_for_all(world, rank);
      fail("the disk of rank {} is full", index);
    }
    for (Axis axis : {Axis::tp, Axis::dp}) {
      Communicator& group = rank.along(axis);
      if (step == 10 && task.how == "group") {
        if (index == task.rank) go_wrong(world, task, group, x);
        std::vector<int> everyone(static_cast<std::size_t>(world.num_ranks()));
        std::iota(everyone.begin(), everyone.end(), 0);
        (void)world.join(index, everyone, "late");
      }
      if (step == 10 && axis == Axis::dp && task.how == "half")
        stop_half_way(task, group, index == task.rank, arena);
      if (step == 10 && axis == Axis::dp && task.how == "more" && index % 2 == task.rank % 2)
        take_less(group, task.rank / 2, arena, *kernels);
      if (step == 10 && index == task.rank && axis == Axis::dp) go_wrong(world, task, group, x);
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
  if (argc != 7) return 2;
  const std::string comm = argv[1];
  const int ranks = std::atoi(argv[2]);
  const Task task{std::atoi(argv[3]), argv[4], argv[6]};
  const std::chrono::milliseconds timeout(std::atoi(argv[5]));
  const Time time = standing_until(task.mark);
  const FailureHooks hooks{
      [](const std::string& report) { fmt::print(stderr, "report: {}\nend of report\n", report); },
      [](int rank, const std::string& lines) {
        const std::size_t cause = lines.find("\"failed\"");
        fmt::print(
            stderr, "record of rank {}: {} bytes{}\n", rank, lines.size(),
            cause == std::string::npos ? "" : ", " + lines.substr(cause, lines.find('\n', cause) - cause));
      },
      [] { std::_Exit(3); }};
  try {
    std::unique_ptr<World> world;
    if (comm == "mpi")
      world = std::make_unique<ProcessWorld>(timeout, hooks, time);
    else
      world = std::make_unique<ThreadWorld>(ranks, timeout, hooks, time);
    if (auto* const processes = dynamic_cast<ProcessWorld*>(world.get()); task.how == "alone") try {
        refuse_together(processes, [&] {
          if (processes->rank() == task.rank) fail("the disk of rank {} is full", task.rank);
        });
      } catch (const RunError& error) {
        make(task.mark);  // from here on it may take too long
        processes->fail(error);
        throw;
      }
    world->run([&](int rank) { run_rank(*world, rank, task); });
  } catch (const std::exception&) {
    return 3;
  }
  return 0;
}
