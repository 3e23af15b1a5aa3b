#include "schedule/vocabulary.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <optional>
#include <utility>

#include "base/error.h"
#include "schedule/first_rank.h"
#include "schedule/schedules.h"

namespace echelon {
namespace {

using std::size_t;

constexpr double not_made = FirstRank::never;
constexpr int most_ahead = 3;
constexpr int most_pending = 2;        // microbatches between V and VW, whose logits a rank keeps
constexpr double worth_memory = 0.98;  // of the step's time, for one microbatch more

// The remaining instructions of one op and stage on a rank: their indices in the rank's list of the schedule,
// in order.
struct Queue {
  Op op = Op::F;
  int stage = 0;
  std::deque<int> places;
};

struct VocabularyRank {
  double free = 0;
  std::vector<Queue> queues;
  int next_part = 0, next_part_weight = 0;  // microbatches of V and VW
  size_t first_awaited = 0;
  int first_stage = std::numeric_limits<int>::max();
  bool has_other_stages = false;
  double left = 0;                         // time of what it has not run yet
  int held = 0, held_first = 0;            // microbatches: of all its stages, of its first
  int most_held = 0, most_held_first = 0;  // so far as the schedule has them
};

// A list scheduler for all ranks at once: whatever can start first is next.
class VocabularyScheduler {
 public:
  // `gap`: a weight gradient fills a pause of at least this fraction of its time.
  VocabularyScheduler(const Schedule& base, const SimulationCosts& costs, int ahead, double gap)
      : base_(base),
        costs_(costs),
        gap_(gap),
        ranks_(base.ranks.size()),
        choices_(base.ranks.size()),
        first_(base.ranks.size()) {
    made_ = base;
    made_.vocabulary_parts = base.num_ranks();
    for (auto& list : made_.ranks) list.clear();
    readers_.resize(2 * static_cast<size_t>(value_rows(made_)) * static_cast<size_t>(base.num_microbatches));
    for (size_t r = 0; r < ranks_.size(); ++r) read(r, ahead);
  }

  // Empty if some rank cannot end before `limit` (but for rounding), or if the ranks deadlock.
  std::optional<Schedule> run(double limit) {
    constexpr double above_rounding = 1 + 1e-10;
    size_t left = 0;
    for (const auto& list : base_.ranks) left += list.size();
    left += 2 * ranks_.size() * static_cast<size_t>(base_.num_microbatches);
    for (size_t r = 0; r < ranks_.size(); ++r) decide(r);
    for (; left > 0; --left) {
      if (first_.begin() == not_made) let_one_exceed();
      const size_t r = first_.rank();
      if (first_.begin() == not_made) return {};
      execute(r, choices_[r]);
      if (ranks_[r].free + ranks_[r].left >= limit * above_rounding) return {};
    }
    return std::move(made_);
  }

 private:
  // An instruction, and what it reads from others: the last stage's B has a value from every rank.
  struct Awaited {
    int missing = 0;
    double time = 0;  // when all of them are there, so far
  };
  struct Reader {
    int rank = -1;
    size_t awaited = 0;
  };
  struct Choice {
    Instruction instruction;
    Queue* queue = nullptr;  // none: V or VW
    double begin = not_made;
  };

  void read(size_t r, int ahead) {
    VocabularyRank& rank = ranks_[r];
    int held = 0, held_first = 0;
    const auto& list = base_.ranks[r];
    for (const Instruction& i : list) rank.first_stage = std::min(rank.first_stage, i.stage);
    for (const Instruction& i : list) rank.has_other_stages |= i.stage != rank.first_stage;
    rank.first_awaited = awaited_.size();
    awaited_.resize(awaited_.size() + list.size() + 2 * static_cast<size_t>(base_.num_microbatches));
    for (int m = 0; m < base_.num_microbatches; ++m)
      for (Op op : {Op::V, Op::VW}) {
        const Instruction i{op, static_cast<int>(r), m};
        note_reads(r, i, awaited_of_part(r, i));
        rank.left += costs_.of(i);
      }
    for (size_t k = 0; k < list.size(); ++k) {
      const Instruction& i = list[k];
      note_reads(r, i, rank.first_awaited + k);
      rank.left += costs_.of(i);
      const auto is_same = [&](const Queue& q) { return q.op == i.op && q.stage == i.stage; };
      auto queue = std::find_if(rank.queues.begin(), rank.queues.end(), is_same);
      if (queue == rank.queues.end()) queue = rank.queues.insert(queue, Queue{i.op, i.stage, {}});
      queue->places.push_back(static_cast<int>(k));
      held += change_of_held(i);
      if (i.stage == rank.first_stage) held_first += change_of_held(i);
      rank.most_held = std::max(rank.most_held, held + ahead);
      rank.most_held_first = std::max(rank.most_held_first, held_first + ahead);
    }
  }

  // The change in the number of microbatches whose activations are held.
  int change_of_held(const Instruction& i) const {
    int change = 0;
    each_write(made_, i, [&](const Value& v) { change += v.kind == ValueKind::saved; });
    each_release(i, [&](const Value& v) { change -= v.kind == ValueKind::saved; });
    return change;
  }

  size_t awaited_of_part(size_t r, const Instruction& i) const {
    const int place = 2 * i.microbatch + (i.op == Op::VW ? 1 : 0);
    return ranks_[r].first_awaited + base_.ranks[r].size() + static_cast<size_t>(place);
  }
  void note_reads(size_t r, const Instruction& i, size_t awaited) {
    each_read(made_, i, [&](const Value& v) {
      if (!travels(v)) return;
      Reader& reader = reader_of(v);
      check(reader.rank < 0, "a value travels to one instruction");
      reader = {static_cast<int>(r), awaited};
      ++awaited_[awaited].missing;
    });
  }
  Reader& reader_of(const Value& v) {
    const ValuePlace place = value_place(made_, v);
    return readers_[(2 * static_cast<size_t>(place.row) + static_cast<size_t>(place.column)) *
                        static_cast<size_t>(base_.num_microbatches) +
                    static_cast<size_t>(v.microbatch)];
  }

  // When the values from other instructions have arrived.
  double ready(size_t awaited) const {
    return awaited_[awaited].missing > 0 ? not_made : awaited_[awaited].time;
  }

  void decide(size_t r, bool may_exceed = false) {
    choices_[r] = choose(r, may_exceed);
    first_.set(r, choices_[r].begin);
  }

  // Every rank waits: full ranks wait for messages that others could send if they had room. Lets the rank
  // that could run an F of a later stage first exceed its limit.
  void let_one_exceed() {
    for (size_t r = 0; r < ranks_.size(); ++r) decide(r, true);
    const size_t first = first_.rank();
    for (size_t r = 0; r < ranks_.size(); ++r)
      if (r != first) decide(r);
  }

  Choice choose(size_t r, bool may_exceed) {
    VocabularyRank& rank = ranks_[r];
    Choice best, filler;
    int best_place = std::numeric_limits<int>::max(), filler_place = best_place;
    const auto offer = [&](Choice& kept, int& kept_place, const Choice& choice, int place) {
      if (choice.begin > kept.begin || (choice.begin == kept.begin && place > kept_place)) return;
      kept = choice;
      kept_place = place;
    };
    const auto begin = [&](size_t awaited) { return std::max(rank.free, ready(awaited)); };
    const bool full = rank.next_part - rank.next_part_weight >= most_pending;
    if (rank.next_part < base_.num_microbatches && !full) {
      const Instruction i{Op::V, static_cast<int>(r), rank.next_part};
      offer(best, best_place, {i, nullptr, begin(awaited_of_part(r, i))}, -1);
    }
    if (rank.next_part_weight < rank.next_part) {
      const Instruction i{Op::VW, static_cast<int>(r), rank.next_part_weight};
      if (full)
        offer(best, best_place, {i, nullptr, begin(awaited_of_part(r, i))}, -1);
      else
        offer(filler, filler_place, {i, nullptr, begin(awaited_of_part(r, i))},
              std::numeric_limits<int>::max() - 1);
    }
    for (Queue& queue : rank.queues) {
      if (queue.places.empty()) continue;
      const int place = queue.places.front();
      const Instruction& i = base_.ranks[r][static_cast<size_t>(place)];
      if (i.op == Op::W) {
        if (is_backward_done(rank, queue)) offer(filler, filler_place, {i, &queue, rank.free}, place);
        continue;
      }
      if (i.op == Op::F && !has_room(rank, i.stage) && !(may_exceed && i.stage != rank.first_stage)) continue;
      offer(best, best_place, {i, &queue, begin(rank.first_awaited + static_cast<size_t>(place))}, place);
    }
    if (best.begin == not_made) return filler;
    if (filler.begin < best.begin &&
        best.begin - filler.begin >= gap_ * costs_.of(filler.instruction) * (1 - 1e-9))
      return filler;
    return best;
  }

  // Whether there is room for one more microbatch of a stage. The first stage leaves room for the others,
  // since their backward passes free memory.
  static bool has_room(const VocabularyRank& rank, int stage) {
    if (stage != rank.first_stage) return rank.held < rank.most_held;
    const int kept_free = rank.has_other_stages ? 1 : 0;
    return rank.held + kept_free < rank.most_held && rank.held_first < rank.most_held_first;
  }

  // Of the next W.
  bool is_backward_done(const VocabularyRank& rank, const Queue& weights) const {
    for (const Queue& q : rank.queues)
      if (q.op == Op::B && q.stage == weights.stage) return q.places.size() < weights.places.size();
    return true;
  }

  void execute(size_t r, const Choice choice) {
    VocabularyRank& rank = ranks_[r];
    const Instruction& i = choice.instruction;
    made_.ranks[r].push_back(i);
    rank.free = choice.begin + costs_.of(i);
    rank.left -= costs_.of(i);
    if (choice.queue != nullptr) choice.queue->places.pop_front();
    if (i.op == Op::V) ++rank.next_part;
    if (i.op == Op::VW) ++rank.next_part_weight;
    rank.held += change_of_held(i);
    if (i.stage == rank.first_stage) rank.held_first += change_of_held(i);
    each_write(made_, i, [&](const Value& v) {
      if (!travels(v)) return;
      const Reader& to = reader_of(v);
      const auto reader = static_cast<size_t>(to.rank);
      Awaited& awaited = awaited_[to.awaited];
      awaited.time = std::max(awaited.time, rank.free + (reader == r ? 0 : costs_.message));
      if (--awaited.missing == 0 && reader != r) decide(reader);
    });
    decide(r);
  }

  const Schedule& base_;
  const SimulationCosts& costs_;
  double gap_;
  Schedule made_;
  std::vector<VocabularyRank> ranks_;
  std::vector<Choice> choices_;  // each rank's next, known until it runs something or something reaches it
  FirstRank first_;
  std::vector<Awaited> awaited_;  // of each rank's instructions, and behind them of V and VW by microbatch
  std::vector<Reader> readers_;   // by value_place() and microbatch
};

}  // namespace

std::string vocabulary_problem(const Schedule& schedule) {
  if (!is_synchronous(schedule)) return "it does not flush, so that its stages step at different times";
  if (parameter_copies(schedule) > 1) return "it runs each stage on two ranks";
  for (const auto& list : schedule.ranks)
    for (const Instruction& i : list) {
      if (i.overlaps_next) return "it runs passes together";
      if (is_of_head(i.op)) return "its output layer is cut already";
    }
  return "";
}

Schedule with_vocabulary_parallelism(const Schedule& schedule, const SimulationCosts& costs) {
  if (const std::string problem = vocabulary_problem(schedule); !problem.empty())
    refuse("schedule {} with vocabulary parallelism: {}", schedule.name, problem);
  Schedule best;
  double least = not_made;
  for (int ahead = 1; ahead <= most_ahead; ++ahead) {
    Schedule here;
    double makespan = not_made;
    for (double gap : {1.0, 0.5, 0.0}) {
      const double limit = std::min(makespan * (1 - 1e-9), least * worth_memory);
      std::optional<Schedule> made = VocabularyScheduler(schedule, costs, ahead, gap).run(limit);
      if (!made) continue;
      const double time = simulate(*made, costs).timeline.makespan();
      if (time >= limit) continue;
      makespan = time;
      here = *std::move(made);
    }
    if (makespan == not_made) continue;
    least = makespan;
    best = std::move(here);
  }
  // Parts of the output layer run microbatches in order and keep few logits.
  if (least == not_made)
    refuse(
        "schedule {} with vocabulary parallelism: its passes wait for each other, as they take microbatches "
        "in another order than the output layer; legal: passes in the order of microbatches",
        schedule.name);
  return best;
}

}  // namespace echelon
