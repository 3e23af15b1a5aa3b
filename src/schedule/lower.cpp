#include "schedule/lower.h"

#include <algorithm>

#include "base/error.h"

namespace echelon {
namespace {

using std::size_t;

struct Message {
  Value value;
  size_t needed = 0;  // index of the instruction that reads it, on the receiving rank
};

bool travels(const Value& v) { return v.kind == ValueKind::activation || v.kind == ValueKind::gradient; }

class Lowering {
 public:
  explicit Lowering(const Schedule& schedule)
      : schedule_(schedule), ranks_(schedule.ranks.size()), channels_(ranks_ * ranks_) {
    const size_t values =
        2 * static_cast<size_t>(schedule.num_stages) * static_cast<size_t>(schedule.num_microbatches);
    reader_.resize(values);
  }

  Schedule lower() {
    find_readers();
    fill_channels();
    Schedule lowered{schedule_.name, schedule_.num_stages, schedule_.num_microbatches, {}};
    for (size_t r = 0; r < ranks_; ++r) lowered.ranks.push_back(lower_rank(r));
    return lowered;
  }

 private:
  struct Reader {
    int rank = -1;
    int index = 0;
  };

  Reader& reader(const Value& v) {
    const size_t stage =
        static_cast<size_t>(v.stage) +
        (v.kind == ValueKind::gradient ? static_cast<size_t>(schedule_.num_stages) : size_t{0});
    return reader_[stage * static_cast<size_t>(schedule_.num_microbatches) +
                   static_cast<size_t>(v.microbatch)];
  }

  void find_readers() {
    for (size_t r = 0; r < ranks_; ++r) {
      const auto& list = schedule_.ranks[r];
      for (size_t k = 0; k < list.size(); ++k)
        for (const Value& v : reads(schedule_, list[k])) {
          if (!travels(v)) continue;
          Reader& known = reader(v);
          if (known.rank >= 0)
            refuse("schedule {}: rank {}, instruction {} ({}): {} is already read on rank {}", schedule_.name,
                   r, k, to_string(list[k]), to_string(v), known.rank);
          known = {static_cast<int>(r), static_cast<int>(k)};
        }
    }
  }

  void fill_channels() {
    for (size_t r = 0; r < ranks_; ++r)
      for (const Instruction& i : schedule_.ranks[r])
        for (const Value& v : writes(schedule_, i)) {
          if (!travels(v)) continue;
          const Reader to = reader(v);
          if (to.rank >= 0 && to.rank != static_cast<int>(r))
            channels_[r * ranks_ + static_cast<size_t>(to.rank)].push_back(
                {v, static_cast<size_t>(to.index)});
        }
    // In the order of the channel: a message is received no later than any that follows it.
    for (auto& channel : channels_)
      for (size_t k = channel.size(); k-- > 1;)
        channel[k - 1].needed = std::min(channel[k - 1].needed, channel[k].needed);
  }

  static Instruction message(Op op, const Value& v, size_t peer) {
    Instruction i{op, v.stage, v.microbatch};
    i.peer = static_cast<int>(peer);
    i.carries = v.kind;
    return i;
  }

  std::vector<Instruction> lower_rank(size_t r) {
    struct Receive {
      size_t needed, from;
      Value value;
    };
    std::vector<Receive> receives;
    for (size_t from = 0; from < ranks_; ++from)
      for (const Message& m : channels_[from * ranks_ + r]) receives.push_back({m.needed, from, m.value});
    std::stable_sort(receives.begin(), receives.end(),
                     [](const Receive& a, const Receive& b) { return a.needed < b.needed; });
    const auto& list = schedule_.ranks[r];
    std::vector<Instruction> out;
    out.reserve(list.size() * 2 + receives.size());
    size_t next = 0;
    bool is_inside = false;  // between two that run together: so is the message
    const auto put = [&](Instruction i) {
      i.overlaps_next = is_inside;
      out.push_back(i);
    };
    for (size_t k = 0; k < list.size(); ++k) {
      for (; next < receives.size() && receives[next].needed == k; ++next)
        put(message(Op::recv, receives[next].value, receives[next].from));
      out.push_back(list[k]);
      is_inside = list[k].overlaps_next;
      for (const Value& v : writes(schedule_, list[k])) {
        if (!travels(v)) continue;
        const int to = reader(v).rank;
        if (to >= 0 && to != static_cast<int>(r)) put(message(Op::send, v, static_cast<size_t>(to)));
      }
    }
    return out;
  }

  const Schedule& schedule_;
  size_t ranks_;
  std::vector<Reader> reader_;  // of every value that can travel
  std::vector<std::vector<Message>> channels_;
};

}  // namespace

Schedule lower(const Schedule& schedule) { return Lowering(schedule).lower(); }

}  // namespace echelon
