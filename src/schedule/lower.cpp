#include "schedule/lower.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "base/error.h"
#include "schedule/per_peer.h"

namespace echelon {
namespace {

using std::size_t;

class Lowering {
 public:
  explicit Lowering(const Schedule& schedule) : schedule_(schedule), inboxes_(schedule.ranks.size()) {
    readers_.resize(2 * static_cast<size_t>(value_rows(schedule)) *
                    static_cast<size_t>(schedule.num_microbatches));
  }

  Schedule lower() {
    find_readers();
    keep_the_channels_order();
    fill_inboxes();
    Schedule lowered{
        schedule_.name, schedule_.num_stages, schedule_.num_microbatches, {}, schedule_.vocabulary_parts};
    for (size_t r = 0; r < inboxes_.size(); ++r) lowered.ranks.push_back(lower_rank(r));
    return lowered;
  }

 private:
  // For each value that can travel: the rank that reads it, and the instruction before which that rank
  // receives it.
  struct Reader {
    int rank = -1, index = 0;
  };
  struct Receive {
    Value value;
    int from = -1;
  };
  // A rank's receives: those before instruction k of its list end at end[k].
  struct Inbox {
    std::vector<Receive> receives;
    std::vector<size_t> end;
  };

  Reader& reader(const Value& v) {
    const ValuePlace place = value_place(schedule_, v);
    const int row = place.row + place.column * value_rows(schedule_);
    return readers_[static_cast<size_t>(row) * static_cast<size_t>(schedule_.num_microbatches) +
                    static_cast<size_t>(v.microbatch)];
  }

  void find_readers() {
    for (size_t r = 0; r < schedule_.ranks.size(); ++r) {
      const auto& list = schedule_.ranks[r];
      for (size_t k = 0; k < list.size(); ++k)
        each_read(schedule_, list[k], [&](const Value& v) {
          if (!travels(v)) return;
          Reader& known = reader(v);
          if (known.rank >= 0)
            refuse("schedule {}: rank {}, instruction {} ({}): {} is already read on rank {}", schedule_.name,
                   r, k, to_string(list[k]), to_string(v), known.rank);
          known = {static_cast<int>(r), static_cast<int>(k)};
        });
    }
  }

  // Visits what rank r sends after instruction i: each value and its reader.
  template <class Visit>
  void each_message(size_t r, const Instruction& i, Visit visit) {
    each_write(schedule_, i, [&](const Value& v) {
      if (!travels(v)) return;
      Reader& to = reader(v);
      if (to.rank >= 0 && to.rank != static_cast<int>(r)) visit(v, to);
    });
  }

  // A message must be received no later than those that follow it in its channel.
  void keep_the_channels_order() {
    struct Earliest {
      int index = std::numeric_limits<int>::max();
    };
    for (size_t r = 0; r < schedule_.ranks.size(); ++r) {
      PerPeer<Earliest> behind;
      const auto& list = schedule_.ranks[r];
      std::vector<Reader*> messages;  // of one instruction
      for (size_t k = list.size(); k-- > 0;) {
        messages.clear();
        each_message(r, list[k], [&](const Value&, Reader& to) { messages.push_back(&to); });
        for (size_t m = messages.size(); m-- > 0;) {
          Earliest& earliest = behind[messages[m]->rank];
          messages[m]->index = earliest.index = std::min(messages[m]->index, earliest.index);
        }
      }
    }
  }

  // A counting sort: by the instruction that needs the message, then by sender, then in channel order.
  void fill_inboxes() {
    const auto each = [&](auto visit) {
      for (size_t r = 0; r < schedule_.ranks.size(); ++r)
        for (const Instruction& i : schedule_.ranks[r])
          each_message(r, i, [&](const Value& v, const Reader& to) {
            visit(inboxes_[static_cast<size_t>(to.rank)], static_cast<size_t>(to.index),
                  Receive{v, static_cast<int>(r)});
          });
    };
    for (size_t r = 0; r < inboxes_.size(); ++r) inboxes_[r].end.resize(schedule_.ranks[r].size() + 1);
    each([](Inbox& inbox, size_t index, const Receive&) { ++inbox.end[index + 1]; });
    for (Inbox& inbox : inboxes_) {
      std::partial_sum(inbox.end.begin(), inbox.end.end(), inbox.end.begin());
      inbox.receives.resize(inbox.end.back());
    }
    each([](Inbox& inbox, size_t index, const Receive& receive) {
      inbox.receives[inbox.end[index]++] = receive;
    });
  }

  std::vector<Instruction> lower_rank(size_t r) {
    const auto& list = schedule_.ranks[r];
    const Inbox& inbox = inboxes_[r];
    std::vector<Instruction> out;
    out.reserve(list.size() * 2 + inbox.receives.size());
    size_t next = 0;
    bool is_inside = false;  // between two that run together: so is the message
    const auto put = [&](Op op, const Value& v, int peer) {
      Instruction& i = out.emplace_back();
      i.op = op;
      i.stage = v.stage;
      i.microbatch = v.microbatch;
      i.overlaps_next = is_inside;
      i.carries = v.kind;
      i.peer = peer;
    };
    for (size_t k = 0; k < list.size(); ++k) {
      for (; next < inbox.end[k]; ++next)
        put(Op::recv, inbox.receives[next].value, inbox.receives[next].from);
      out.push_back(list[k]);
      is_inside = list[k].overlaps_next;
      each_message(r, list[k], [&](const Value& v, const Reader& to) { put(Op::send, v, to.rank); });
    }
    return out;
  }

  const Schedule& schedule_;
  std::vector<Reader> readers_;  // by value_place(): one column, then the other
  std::vector<Inbox> inboxes_;
};

}  // namespace

Schedule lower(const Schedule& schedule) { return Lowering(schedule).lower(); }

}  // namespace echelon
