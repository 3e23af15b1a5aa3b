#include "schedule/validate.h"

#include <algorithm>
#include <map>

#include "base/error.h"
#include "schedule/lower.h"
#include "schedule/schedules.h"

namespace echelon {
namespace {

using std::size_t;

// The positions of the instructions of one stage and microbatch; -1: none.
struct Place {
  int rank = -1, forward = -1, backward = -1, weight = -1;
  bool is_fused = false;
};

class Rules {
 public:
  explicit Rules(const Schedule& schedule) : schedule_(schedule) {}

  void check() {
    check_shape();
    check_complete();
    check_output_layer();
    places_.resize(static_cast<size_t>(schedule_.num_stages) *
                   static_cast<size_t>(schedule_.num_microbatches));
    each([&](int r, int k, const Instruction& i) {
      if (i.op != Op::step && !is_of_head(i.op)) put(r, k, i);
    });
    each([&](int r, int k, const Instruction& i) { check_parts(r, k, i); });
    check_holders();
    check_versions();
    check_steps();
  }

  void check_shape() const {
    if (schedule_.ranks.empty() || schedule_.num_stages < 1 || schedule_.num_microbatches < 1)
      refuse("schedule {}: {} ranks, {} stages, {} microbatches; each must be at least 1", schedule_.name,
             schedule_.num_ranks(), schedule_.num_stages, schedule_.num_microbatches);
    if (schedule_.vocabulary_parts != 0 && schedule_.vocabulary_parts != schedule_.num_ranks())
      refuse("schedule {}: {} parts of the output layer (V, VW) over {} ranks; legal: none, or one a rank",
             schedule_.name, schedule_.vocabulary_parts, schedule_.num_ranks());
    each([&](int r, int k, const Instruction& i) {
      if (!is_compute(i.op) && i.op != Op::step)
        refuse_at(r, k, "a schedule has no messages of its own; lowering puts them in");
      if (i.stage < 0 || i.stage >= (is_of_head(i.op) ? schedule_.vocabulary_parts : schedule_.num_stages))
        refuse_at(r, k, "there is no such stage; legal: 0 to {}", schedule_.num_stages - 1);
      if (i.microbatch < 0 || i.microbatch >= schedule_.num_microbatches)
        refuse_at(r, k, "there is no such microbatch; legal: 0 to {}", schedule_.num_microbatches - 1);
      const auto& list = schedule_.ranks[static_cast<size_t>(r)];
      if (i.overlaps_next && (static_cast<size_t>(k) + 1 == list.size() || !is_compute(i.op) ||
                              !is_compute(list[static_cast<size_t>(k) + 1].op)))
        refuse_at(r, k, "runs together with the next computation, and there is none");
      if (i.overlaps_next && list[static_cast<size_t>(k) + 1].overlaps_next)
        refuse_at(r, k, "runs together with more than one other; legal: two passes in parentheses");
    });
  }

 private:
  template <class Visit>
  void each(Visit visit) const {
    for (size_t r = 0; r < schedule_.ranks.size(); ++r)
      for (size_t k = 0; k < schedule_.ranks[r].size(); ++k)
        visit(static_cast<int>(r), static_cast<int>(k), schedule_.ranks[r][k]);
  }

  template <class... Args>
  [[noreturn]] void refuse_at(int r, int k, fmt::format_string<Args...> why, Args&&... args) const {
    const Instruction& i = schedule_.ranks[static_cast<size_t>(r)][static_cast<size_t>(k)];
    refuse("schedule {}: rank {}, instruction {} ({}): {}", schedule_.name, r, k, to_string(i),
           fmt::format(why, std::forward<Args>(args)...));
  }

  // Part k on rank k, with V and then VW for every microbatch.
  void check_output_layer() const {
    if (schedule_.vocabulary_parts == 0) return;
    if (!is_synchronous(schedule_))
      refuse("schedule {}: has optimizer steps and parts of the output layer (V, VW); legal: one of the two",
             schedule_.name);
    const auto microbatches = static_cast<size_t>(schedule_.num_microbatches);
    for (int r = 0; r < schedule_.num_ranks(); ++r) {
      std::vector<bool> made(microbatches), done(microbatches);
      const auto& list = schedule_.ranks[static_cast<size_t>(r)];
      for (int k = 0; k < static_cast<int>(list.size()); ++k) {
        const Instruction& i = list[static_cast<size_t>(k)];
        if (!is_of_head(i.op)) continue;
        if (i.stage != r) refuse_at(r, k, "part {} of the output layer is run by rank {}", i.stage, i.stage);
        if (i.overlaps_next || (k > 0 && list[static_cast<size_t>(k) - 1].overlaps_next))
          refuse_at(r, k, "a pass of the output layer runs alone");
        auto&& here = (i.op == Op::V ? made : done)[static_cast<size_t>(i.microbatch)];
        if (here) refuse_at(r, k, "is there a second time");
        if (i.op == Op::VW && !made[static_cast<size_t>(i.microbatch)])
          refuse_at(r, k, "comes before V of part {}, microbatch {}", r, i.microbatch);
        here = true;
      }
      for (size_t m = 0; m < microbatches; ++m)
        if (!done[m])
          refuse("schedule {}: rank {}: {} of part {} of the output layer, microbatch {} is missing",
                 schedule_.name, r, made[m] ? "VW" : "V", r, m);
    }
  }

  // Checked before any table of stages x microbatches is allocated: a text can name microbatch 999999 in one
  // line.
  void check_complete() const {
    std::vector<int> forwards(static_cast<size_t>(schedule_.num_stages));
    std::vector<int> holder(forwards.size(), -1);
    each([&](int r, int, const Instruction& i) {
      if (is_of_head(i.op)) return;
      holder[static_cast<size_t>(i.stage)] = r;
      forwards[static_cast<size_t>(i.stage)] += i.op == Op::F;
    });
    for (int s = 0; s < schedule_.num_stages; ++s) {
      const int rank = holder[static_cast<size_t>(s)];
      if (rank < 0)
        refuse("schedule {}: stage {} is on no rank; every stage from 0 to {} must be on one", schedule_.name,
               s, schedule_.num_stages - 1);
      if (forwards[static_cast<size_t>(s)] >= schedule_.num_microbatches) continue;
      std::vector<bool> has(static_cast<size_t>(schedule_.num_microbatches));
      each([&](int, int, const Instruction& i) {
        if (i.stage == s && i.op == Op::F) has[static_cast<size_t>(i.microbatch)] = true;
      });
      const int missing = static_cast<int>(std::find(has.begin(), has.end(), false) - has.begin());
      each([&](int r, int k, const Instruction& i) {
        if (i.stage == s && i.microbatch == missing && is_compute(i.op))
          refuse_at(r, k, "F of stage {}, microbatch {} is missing", s, missing);
      });
      refuse(
          "schedule {}: rank {}: stage {} has no microbatch {}: its F is missing; every stage must "
          "have microbatches 0 to {}",
          schedule_.name, rank, s, missing, schedule_.num_microbatches - 1);
    }
  }

  Place& place(const Instruction& i) {
    return places_[static_cast<size_t>(i.stage) * static_cast<size_t>(schedule_.num_microbatches) +
                   static_cast<size_t>(i.microbatch)];
  }

  void put(int r, int k, const Instruction& i) {
    Place& p = place(i);
    if (p.rank >= 0 && p.rank != r)
      refuse_at(r, k,
                "stage {}, microbatch {} is already on rank {} (instruction {}); one rank runs all of it",
                i.stage, i.microbatch, p.rank, std::max({p.forward, p.backward, p.weight}));
    p.rank = r;
    const bool is_backward = i.op == Op::B || i.op == Op::BW;
    int& mine = is_forward(i.op) ? p.forward : is_backward ? p.backward : p.weight;
    if (mine >= 0) refuse_at(r, k, "is there a second time; the first is instruction {}", mine);
    if (i.op == Op::F && p.backward >= 0) refuse_before(r, p.backward, "F", i);
    if (i.op == Op::F && p.weight >= 0) refuse_before(r, p.weight, "F", i);
    if (is_backward && p.weight >= 0) {
      if (i.op == Op::BW) refuse_at(r, k, "W of it is there as well, at instruction {}", p.weight);
      refuse_before(r, p.weight, "B", i);
    }
    if (i.op == Op::W && p.is_fused)
      refuse_at(r, k, "the fused backward at instruction {} has done it", p.backward);
    mine = k;
    p.is_fused = p.is_fused || i.op == Op::BW;
  }

  [[noreturn]] void refuse_before(int r, int k, const char* other, const Instruction& i) const {
    refuse_at(r, k, "comes before {} of stage {}, microbatch {}", other, i.stage, i.microbatch);
  }

  void check_parts(int r, int k, const Instruction& i) {
    if (i.op == Op::step || is_of_head(i.op)) return;
    const Place& p = place(i);
    const char* missing = p.forward < 0                 ? "F"
                          : p.backward < 0              ? "B"
                          : p.weight < 0 && !p.is_fused ? "W"
                                                        : nullptr;
    if (missing == nullptr) return;
    // The error names the last instruction before the hole.
    const bool is_last = p.forward < 0 || k == std::max({p.forward, p.backward, p.weight});
    if (is_last) refuse_at(r, k, "{} of stage {}, microbatch {} is missing", missing, i.stage, i.microbatch);
  }

  void check_holders() const {
    std::vector<std::vector<int>> holders(static_cast<size_t>(schedule_.num_stages));
    each([&](int r, int k, const Instruction& i) {
      if (is_of_head(i.op) || i.op == Op::step) return;
      auto& ranks = holders[static_cast<size_t>(i.stage)];
      if (std::find(ranks.begin(), ranks.end(), r) != ranks.end()) return;
      if (ranks.size() == 2)
        refuse_at(r, k, "stage {} is already on ranks {} and {}; at most two hold a stage", i.stage, ranks[0],
                  ranks[1]);
      ranks.push_back(r);
    });
    for (size_t s = 1; s < holders.size(); ++s)
      if (holders[s].size() != holders[0].size())
        refuse(
            "schedule {}: stage {} is on {} rank{} and stage 0 on {}: either every stage is on one rank, or "
            "every stage on two (rank {} has stage {})",
            schedule_.name, s, holders[s].size(), holders[s].size() == 1 ? "" : "s", holders[0].size(),
            holders[s].back(), s);
  }

  // Every stage has steps on every rank that runs it, or none does; each step uses gradients that no other
  // has used, and none are left over.
  void check_steps() const {
    if (is_synchronous(schedule_)) return;
    for (int r = 0; r < schedule_.num_ranks(); ++r) {
      struct Stage {
        int steps = 0;
        int gradients = -1;  // the last instruction that made some since its last step; -1: none
      };
      std::map<int, Stage> stages;
      const auto& list = schedule_.ranks[static_cast<size_t>(r)];
      for (const Instruction& i : list)
        if (i.op != Op::step && !is_of_head(i.op)) stages.try_emplace(i.stage);
      for (int k = 0; k < static_cast<int>(list.size()); ++k) {
        const Instruction& i = list[static_cast<size_t>(k)];
        const auto stage = stages.find(i.stage);
        if (i.op == Op::BW || i.op == Op::W) stage->second.gradients = k;
        if (i.op != Op::step) continue;
        if (stage == stages.end())
          refuse_at(r, k, "steps stage {}, of which rank {} runs nothing", i.stage, r);
        if (stage->second.gradients < 0)
          refuse_at(r, k, "there are no gradients of stage {}: no BW or W of it {}", i.stage,
                    stage->second.steps > 0 ? "since its last step" : "comes before");
        stage->second = {stage->second.steps + 1};
      }
      for (const auto& [number, stage] : stages) {
        if (stage.steps == 0)
          refuse(
              "schedule {}: rank {}: stage {} has no optimizer step, and others have; legal: steps of every "
              "stage, or none",
              schedule_.name, r, number);
        if (stage.gradients >= 0)
          refuse_at(r, stage.gradients, "no step of stage {} follows: these gradients would be lost", number);
      }
    }
  }

  void check_versions() {
    for (int r = 0; r < schedule_.num_ranks(); ++r) {
      std::map<int, int> newest;  // version of each stage's weights on this rank
      const auto& list = schedule_.ranks[static_cast<size_t>(r)];
      for (int k = 0; k < static_cast<int>(list.size()); ++k) {
        const Instruction& i = list[static_cast<size_t>(k)];
        if (i.op != Op::step && i.version == 0) continue;
        const int now = newest[i.stage];
        if (i.version < 0 || i.version > now)
          refuse_at(r, k, "version {} of the weights of stage {} is not there yet; the newest is {}",
                    i.version, i.stage, now);
        if (i.op == Op::step && i.version < now)
          refuse_at(r, k, "steps from version {} of the weights of stage {}; the newest is {}", i.version,
                    i.stage, now);
        if (i.op == Op::step) newest[i.stage] = now + 1;
      }
      for (int k = 0; k < static_cast<int>(list.size()); ++k) {
        const Instruction& i = list[static_cast<size_t>(k)];
        if (i.op != Op::B && i.op != Op::BW) continue;
        const int forward = place(i).forward, version = list[static_cast<size_t>(forward)].version;
        if (i.version != version)
          refuse_at(r, k, "reads version {} of the weights, and its forward (instruction {}) version {}",
                    i.version, forward, version);
      }
    }
  }

  const Schedule& schedule_;
  std::vector<Place> places_;  // by stage and microbatch
};

}  // namespace

void check_shape(const Schedule& schedule) { Rules(schedule).check_shape(); }

void check_rules(const Schedule& schedule) { Rules(schedule).check(); }

void validate(const Schedule& schedule) {
  check_rules(schedule);
  prove_finishes(lower(schedule));
}

}  // namespace echelon
