#include "train/replica_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <span>
#include <utility>

#include "base/error.h"
#include "data/checksum.h"

namespace echelon {
namespace {

using Side = Witness::Side;
using Words = std::array<char, 256>;

Words words_of(const std::string& text) {
  Words words{};
  std::copy_n(text.begin(), std::min(text.size(), words.size() - 1), words.begin());
  return words;
}

const char* way_name(Witness::Way way) {
  switch (way) {
    case Witness::Way::exchange:
      return "its part of a sum or an exchange";
    case Witness::Way::gather:
      return "its part of a sum or of what is gathered";
    case Witness::Way::broadcast:
      return "a broadcast";
    default:
      return "a message";
  }
}

}  // namespace

// Trivially copyable: it travels as bytes.
struct ReplicaCheck::Finding {
  std::int32_t found = 0, side = 0, from = 0, way = 0;
  std::uint32_t number = 0;
  std::int64_t step = 0;  // from 1
  std::uint64_t group = 0;
  Words what{};
};

ReplicaCheck::ReplicaCheck(const Rank& rank, Trainer& trainer, Witness& witness)
    : rank_(rank),
      witness_(witness),
      group_(rank.join_aside(everyone(rank.mesh().num_ranks()), "checks")),
      copy_(rank, trainer),
      state_stream_(witness.add_stream({})) {}

void ReplicaCheck::begin(std::int64_t step) {
  witness_.take_log();
  copy_.keep(step, fingerprints_after(step));
  copied_ = true;
}

const StateFingerprints& ReplicaCheck::fingerprints_after(std::int64_t steps) {
  if (last_step_ != steps) last_ = copy_.fingerprints();
  last_step_ = steps;
  return last_;
}

void ReplicaCheck::begin_step(std::int64_t step) {
  witness_.begin_step(step + 1);
  last_step_ = -1;
  step_ = step;
}

void ReplicaCheck::end_step() {
  fingerprints_after(step_ + 1);
  for (const std::uint64_t fingerprint : last_.fingerprints) witness_.note(state_stream_, fingerprint);
  witness_.end_step();
  for (Witness::Repeat& repeat : witness_.take_repeats()) repeats_.push_back(std::move(repeat));
}

void ReplicaCheck::end_broken_step(std::exception_ptr error) {
  end_step();
  broken_ = std::move(error);
}

ReplicaCheck::Execution ReplicaCheck::execute(std::int64_t end,
                                              const std::function<StepResult(std::int64_t step)>& run) {
  Execution execution;
  copy_.restore();
  for (std::int64_t step = copy_.step(); step < end && !execution.error; ++step) {
    begin_step(step);
    try {
      execution.results.push_back(run(step));
    } catch (const LastingError&) {  // what is not finite: on every rank
      execution.error = std::current_exception();
    }
    end_step();
  }
  execution.log = witness_.take_log();
  return execution;
}

template <class T>
std::vector<T> ReplicaCheck::tell_all(const T& mine) const {
  static_assert(std::is_trivially_copyable_v<T>);
  const auto n = static_cast<std::size_t>(group_->size());
  std::vector<T> all(n, mine);
  const Tensor bytes = Tensor::view_of(all.data(), DType::u8, {static_cast<std::int64_t>(n * sizeof(T))});
  const std::vector<std::int64_t> each(n, sizeof(T));
  const std::int64_t at = group_->rank() * static_cast<std::int64_t>(sizeof(T));
  group_->all_gather(bytes.flat_range(at, at + static_cast<std::int64_t>(sizeof(T))), bytes, each).wait();
  return all;
}

ReplicaCheck::Finding ReplicaCheck::finding(const Execution& before, const Execution& again) const {
  Finding finding;
  const Witness::Entry* const first = first_difference(before.log, again.log);
  if (first == nullptr) return finding;
  const Witness::Stream& stream = witness_.streams()[first->stream];
  finding.found = 1;
  finding.side = static_cast<std::int32_t>(stream.side);
  finding.from = stream.peer;
  finding.way = static_cast<std::int32_t>(stream.way);
  finding.number = first->number;
  finding.step = first->step;
  finding.group = checksum(std::as_bytes(std::span(stream.group)));
  finding.what =
      words_of(stream.side == Side::state ? "the " + last_.what[first->number % last_.what.size()]
                                          : fmt::format("{} in {}", way_name(stream.way), stream.group));
  return finding;
}

std::optional<Corruption> ReplicaCheck::compare(const Execution& before, const Execution& again) const {
  const std::vector<Finding> all = tell_all(finding(before, again));
  const int n = group_->size();
  Corruption corruption;
  // Of several the earliest.
  const Finding* first = nullptr;
  for (int r = 0; r < n; ++r) {
    const Finding& f = all[static_cast<std::size_t>(r)];
    if (f.found == 0 || f.side == static_cast<std::int32_t>(Side::received)) continue;
    if (first != nullptr && first->step <= f.step) continue;
    first = &f;
    corruption.ranks = {r};
    corruption.step = f.step;
    corruption.what = fmt::format("rank {} differs from itself: {} in step {}", r, f.what.data(), f.step);
  }
  if (first != nullptr) return corruption;
  // Nobody differs but in what was received: the sender of each says whether what it sent was the same.
  std::vector<std::int32_t> same(static_cast<std::size_t>(n));
  for (int r = 0; r < n; ++r) {
    const Finding& f = all[static_cast<std::size_t>(r)];
    if (f.found == 0 || f.from != rank_.index()) continue;
    for (std::size_t s = 0; s < witness_.streams().size(); ++s) {
      const Witness::Stream& stream = witness_.streams()[s];
      if (stream.side == Side::sent && static_cast<std::int32_t>(stream.way) == f.way &&
          (stream.peer == r || stream.peer == -1) &&
          checksum(std::as_bytes(std::span(stream.group))) == f.group &&
          is_same(before.log, again.log, static_cast<std::uint32_t>(s), f.number))
        same[static_cast<std::size_t>(r)] = 1;
    }
  }
  const Tensor answers = Tensor::view_of(same.data(), DType::i32, {n});
  group_->all_reduce(answers, ReduceOp::max).wait();
  for (int r = 0; r < n; ++r) {
    const Finding& f = all[static_cast<std::size_t>(r)];
    if (f.found == 0 || same[static_cast<std::size_t>(r)] == 0) continue;
    if (!corruption.ranks.empty() && corruption.step <= f.step) continue;
    corruption.ranks = {f.from, r};
    corruption.step = f.step;
    corruption.what = fmt::format("what rank {} sent to rank {} was changed on its way: {} in step {}",
                                  f.from, r, f.what.data(), f.step);
  }
  if (!corruption.ranks.empty()) return corruption;
  for (int r = 0; r < n; ++r)
    if (const Finding& f = all[static_cast<std::size_t>(r)]; f.found != 0) {
      corruption.ranks.push_back(r);
      corruption.step = f.step;
      corruption.what =
          fmt::format("two runs of step {} differ, and no rank can be told to be at fault", f.step);
    }
  if (corruption.ranks.empty()) return {};
  return corruption;
}

std::optional<Corruption> ReplicaCheck::sent_again() const {
  Finding mine;
  if (!repeats_.empty()) {
    const Witness::Repeat& repeat = repeats_.front();
    mine.found = 1;
    mine.from = repeat.from;
    mine.step = repeat.step;
    mine.what = words_of(repeat.group);
  }
  const std::vector<Finding> all = tell_all(mine);
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].found == 0) continue;
    Corruption corruption;
    corruption.ranks = {all[r].from, static_cast<int>(r)};
    corruption.step = all[r].step;
    corruption.what =
        fmt::format("what rank {} sent to rank {} was changed on its way: numbers in {} in step {}",
                    all[r].from, r, all[r].what.data(), all[r].step);
    return corruption;
  }
  return {};
}

// Each tensor's holders tell one rank, which its key chooses.
std::optional<Corruption> ReplicaCheck::compare_replicas(std::int64_t end) {
  struct Held {
    std::uint64_t key, fingerprint;
  };
  struct Verdict {
    std::int32_t found = 0, rank = -1, other = -1;  // other: of two, where neither is in the minority
    std::uint64_t key = 0;
  };
  const int n = group_->size();
  if (n == 1) return {};
  const StateFingerprints& mine = fingerprints_after(end);
  std::vector<std::vector<Held>> to(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < mine.keys.size(); ++i)
    to[mine.keys[i] % static_cast<std::uint64_t>(n)].push_back({mine.keys[i], mine.fingerprints[i]});
  std::vector<std::int32_t> counts;
  std::vector<Held> said;
  for (const auto& held : to) {
    counts.push_back(static_cast<std::int32_t>(held.size()));
    said.insert(said.end(), held.begin(), held.end());
  }
  const std::vector<std::int32_t> theirs = HostGroup(*group_).exchange(counts);
  std::vector<std::int64_t> sent, received;
  std::int64_t total = 0;
  for (std::size_t r = 0; r < counts.size(); ++r) {
    sent.push_back(counts[r] * static_cast<std::int64_t>(sizeof(Held)));
    received.push_back(theirs[r] * static_cast<std::int64_t>(sizeof(Held)));
    total += theirs[r];
  }
  std::vector<Held> heard(static_cast<std::size_t>(total));
  const auto bytes = [](std::vector<Held>& of) {
    static Held none;
    return Tensor::view_of(of.empty() ? &none : of.data(), DType::u8,
                           {static_cast<std::int64_t>(of.size() * sizeof(Held))});
  };
  group_->all_to_all(bytes(said), sent, bytes(heard), received).wait();
  std::map<std::uint64_t, std::vector<std::pair<int, std::uint64_t>>> holders;  // by key
  std::size_t at = 0;
  for (int r = 0; r < n; ++r)
    for (int i = 0; i < theirs[static_cast<std::size_t>(r)]; ++i, ++at)
      holders[heard[at].key].emplace_back(r, heard[at].fingerprint);
  Verdict verdict;
  for (const auto& [key, held] : holders) {
    std::map<std::uint64_t, int> votes;
    for (const auto& [r, fingerprint] : held) ++votes[fingerprint];
    if (votes.size() == 1 || verdict.found != 0) continue;
    verdict.found = 1;
    verdict.key = key;
    const auto most = std::max_element(votes.begin(), votes.end(),
                                       [](const auto& a, const auto& b) { return a.second < b.second; });
    const bool clear = 2 * most->second > static_cast<int>(held.size());
    for (const auto& [r, fingerprint] : held) {
      if (clear && fingerprint == most->first) continue;
      if (verdict.rank < 0)
        verdict.rank = r;
      else if (!clear && verdict.other < 0 && fingerprint != held.front().second)
        verdict.other = r;
    }
  }
  const std::vector<Verdict> all = tell_all(verdict);
  const auto found = std::find_if(all.begin(), all.end(), [](const Verdict& v) { return v.found != 0; });
  if (found == all.end()) return {};
  Words what{};
  for (std::size_t i = 0; i < mine.keys.size(); ++i)
    if (mine.keys[i] == found->key) what = words_of(mine.what[i]);
  const std::vector<Words> names = tell_all(what);
  const char* const name = names[static_cast<std::size_t>(found->rank)].data();
  Corruption corruption;
  corruption.step = end;
  corruption.ranks = {found->rank};
  if (found->other < 0) {
    corruption.what = fmt::format("rank {} differs from the other ranks that hold the {}", found->rank, name);
  } else {
    corruption.ranks.push_back(found->other);
    corruption.what = fmt::format("ranks {} and {} hold different {}, and which is right cannot be told",
                                  found->rank, found->other, name);
  }
  return corruption;
}

ReplicaCheck::Result ReplicaCheck::check(std::int64_t end,
                                         const std::function<StepResult(std::int64_t step)>& run) {
  Result result;
  if (copied_) {
    Execution first{witness_.take_log(), {}, std::exchange(broken_, {})};
    Execution second = execute(end, run);
    result.corruption = compare(first, second);
    if (!result.corruption && second.error) std::rethrow_exception(second.error);
    if (result.corruption) {
      Execution third = execute(end, run);
      result.corruption->found_after = end;
      result.corruption->repaired = !compare(second, third) || !compare(first, third);
      if (!result.corruption->repaired) {
        result.corruption->what += "; the steps were run three times, and no two of them agree";
        return result;
      }
      if (third.error) std::rethrow_exception(third.error);
      second = std::move(third);
    } else {
      result.corruption = sent_again();
      if (result.corruption) result.corruption->repaired = true;
    }
    repeats_.clear();
    result.steps = std::move(second.results);
  }
  copied_ = false;
  if (auto differing = compare_replicas(end)) result.corruption = std::move(differing);
  if (result.corruption) result.corruption->found_after = end;
  return result;
}

void ReplicaCheck::end(const Corruption& corruption) const {
  if (rank_.index() == corruption.ranks.front())
    fail("silent corruption found after step {}: {}", corruption.found_after, corruption.what);
  group_->barrier().wait();  // the others hear of it
  throw InvariantError("the rank at fault has ended the job");
}

}  // namespace echelon
