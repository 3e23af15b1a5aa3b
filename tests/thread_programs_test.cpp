// Random programs of collectives and messages on the two axes of a mesh of thread ranks.
#include <gtest/gtest.h>

#include <array>
#include <random>
#include <thread>

#include "rank_runs.h"

namespace echelon::thread_programs_test {
namespace {

using namespace checks;
using namespace std::chrono_literals;

// Two overlapping axes of a mesh of 2 x 3: rank = 3 * row + column; tp along a row, dp along a column. Every
// group has a random list of collectives; every rank interleaves the lists of its two groups in its own
// random order, and waits in its own random order at random moments (but never for anything that its peers
// call only after it).
struct Step {
  Verb verb;
  std::int64_t count;
};

class Player {
 public:
  Player(Communicator& communicator, int first_world_rank, const std::vector<Step>& steps)
      : communicator_(communicator), seed_(first_world_rank), steps_(steps) {}

  bool done() const { return next_ == steps_.size(); }

  void post() {
    const Step& step = steps_[next_];
    const int n = communicator_.size(), me = communicator_.rank();
    const auto salt = static_cast<std::int64_t>(next_++) * 1000 + seed_;
    auto& running = running_.emplace_back();
    const auto each = static_cast<std::size_t>(step.count);
    const Counts counts(static_cast<std::size_t>(n), step.count);
    const auto append = [](std::vector<std::int32_t>& to, const std::vector<std::int32_t>& more) {
      to.insert(to.end(), more.begin(), more.end());
    };
    const auto sum = [&](std::int64_t from) {
      std::vector<std::int32_t> result = values<std::int32_t>(0, step.count, salt + from);
      for (int r = 1; r < n; ++r)
        for (std::size_t i = 0; i < each; ++i)
          result[i] += value<std::int32_t>(r, salt + from + static_cast<std::int64_t>(i));
      return result;
    };
    switch (step.verb) {
      case Verb::all_reduce:
        running.out = values<std::int32_t>(me, step.count, salt);
        running.expected = sum(0);
        running.pending = communicator_.all_reduce(view(running.out));
        break;
      case Verb::all_gather:
        running.in = values<std::int32_t>(me, step.count, salt);
        running.out.resize(each * counts.size());
        for (int r = 0; r < n; ++r) append(running.expected, values<std::int32_t>(r, step.count, salt));
        running.pending = communicator_.all_gather(view(running.in), view(running.out), counts);
        break;
      case Verb::reduce_scatter:
        running.in = values<std::int32_t>(me, step.count * n, salt);
        running.out.resize(each);
        running.expected = sum(me * step.count);
        running.pending = communicator_.reduce_scatter(view(running.in), view(running.out), counts);
        break;
      case Verb::all_to_all:
        running.in = values<std::int32_t>(me, step.count * n, salt);
        running.out.resize(each * counts.size());
        for (int r = 0; r < n; ++r)
          append(running.expected, values<std::int32_t>(r, step.count, salt + me * step.count));
        running.pending = communicator_.all_to_all(view(running.in), counts, view(running.out), counts);
        break;
      case Verb::broadcast:
        running.out = values<std::int32_t>(me, step.count, salt);
        running.expected = values<std::int32_t>(n - 1, step.count, salt);
        running.pending = communicator_.broadcast(view(running.out), n - 1);
        break;
      case Verb::send:  // a ring
        running.in = values<std::int32_t>(me, step.count, salt);
        running.out.resize(each);
        running.expected = values<std::int32_t>((me + n - 1) % n, step.count, salt);
        communicator_.send(view(running.in), (me + 1) % n).wait();
        running.pending = communicator_.recv(view(running.out), (me + n - 1) % n);
        break;
      default:
        running.pending = communicator_.barrier();
    }
  }

  // Waits for one of those under way.
  void wait(std::mt19937& random) {
    if (running_.empty()) return;
    const auto k = static_cast<std::ptrdiff_t>(random() % running_.size());
    Running running = std::move(running_[static_cast<std::size_t>(k)]);
    running_.erase(running_.begin() + k);
    running.pending.wait();
    EXPECT_EQ(running.out, running.expected);
  }
  void progress() {
    if (!running_.empty()) running_.front().pending.progress();
  }
  std::size_t under_way() const { return running_.size(); }

 private:
  struct Running {
    std::vector<std::int32_t> in, out, expected;
    Pending pending;
  };
  Communicator& communicator_;
  int seed_;
  const std::vector<Step>& steps_;
  std::size_t next_ = 0;
  std::vector<Running> running_;
};

void play_random_program(unsigned seed, Collectives collectives) {
  std::mt19937 common(seed);
  const auto random_steps = [&] {
    std::vector<Step> steps;
    for (int i = 0; i < 30; ++i) {
      constexpr std::array<Verb, 7> verbs{Verb::all_reduce, Verb::all_gather, Verb::reduce_scatter,
                                          Verb::all_to_all, Verb::broadcast,  Verb::send,
                                          Verb::barrier};
      const std::int64_t count = common() % 20 == 0 ? 90000 : static_cast<std::int64_t>(common() % 40);
      steps.push_back({verbs[common() % verbs.size()], count});
    }
    return steps;
  };
  std::vector<std::vector<Step>> rows, columns;
  for (int i = 0; i < 2; ++i) rows.push_back(random_steps());
  for (int i = 0; i < 3; ++i) columns.push_back(random_steps());
  ThreadWorld world(6, patience);
  run_ranks(world, [&](int rank) {
    std::mt19937 random(seed * 31 + static_cast<unsigned>(rank));
    // Algorithms wait inside the call, so all ranks take the two groups in one order.
    std::mt19937 order(collectives == Collectives::direct ? seed * 37 + static_cast<unsigned>(rank) : seed);
    const int row = rank / 3, column = rank % 3;
    const auto tp = join(world, rank, {3 * row, 3 * row + 1, 3 * row + 2}, collectives);
    const auto dp = join(world, rank, {column, 3 + column}, collectives);
    Player along_tp(*tp, 3 * row, rows[static_cast<std::size_t>(row)]);
    Player along_dp(*dp, column, columns[static_cast<std::size_t>(column)]);
    // In phases: at the end of each, both groups are as far. Within one, the order is free, and waits begin
    // once all of it is posted, so that the program is legal whatever the peers' order.
    while (!along_tp.done() || !along_dp.done()) {
      int tp_steps = 5, dp_steps = 5;
      while (tp_steps + dp_steps > 0) {
        const bool use_tp = dp_steps == 0 || (tp_steps > 0 && order() % 2 == 0);
        Player& player = use_tp ? along_tp : along_dp;
        player.post();
        --(use_tp ? tp_steps : dp_steps);
        if (random() % 4 == 0) player.progress();
        if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
      }
      for (auto waits = random() % 12; waits > 0; --waits)
        (random() % 2 == 0 ? along_tp : along_dp).wait(random);
    }
    while (along_tp.under_way() + along_dp.under_way() > 0)
      (random() % 2 == 0 ? along_tp : along_dp).wait(random);
  });
}

TEST(ThreadPrograms, RandomProgramsOnTwoAxesFinishWithTheRightValues) {  // long
  for (Collectives collectives : every_collectives)
    for (unsigned seed = 1; seed <= (collectives == Collectives::direct ? 25 : 8); ++seed) {
      SCOPED_TRACE(std::string(collectives_name(collectives)) + ", seed " + std::to_string(seed));
      play_random_program(seed, collectives);
    }
}

}  // namespace
}  // namespace echelon::thread_programs_test
