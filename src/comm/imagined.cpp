#include "comm/imagined.h"

#include "comm/call_communicator.h"

namespace echelon {

class ImaginedCommunicator final : public CallCommunicator {
 public:
  // The world outlives it.
  ImaginedCommunicator(ImaginedWorld& world, int rank, int size, const std::string& name)
      : world_(world), group_(world.groups_.size()), rank_(rank), size_(size), name_(name) {
    world.groups_.push_back({name, size, 0});
  }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

 private:
  Pending start(Call call, const Tensor&, const Tensor&) override {
    if (call.verb != Verb::all_reduce) return {};
    if (const auto larger = static_cast<int>(call.counts[0] % size_); larger > 0)
      world_.sums_.insert({group_, larger});
    return {};
  }
  Pending post(Call, const Tensor&) override { return {}; }
  [[noreturn]] void fail(const std::string& why) override { throw CommError(why); }
  void throw_if_failed() override {}
  const std::string& group_name() const override { return name_; }
  int world_rank() const override { return world_.rank_; }

  ImaginedWorld& world_;
  const std::size_t group_;
  const int rank_, size_;
  const std::string name_;
};

ImaginedWorld::ImaginedWorld(int num_ranks, int rank, const Time& time)
    : num_ranks_(num_ranks), rank_(rank), time_(time), recorder_(time) {
  if (rank < 0 || rank >= num_ranks)
    refuse("rank {}: is not a rank of a job of {}; legal: 0 to {}", rank, num_ranks, num_ranks - 1);
}

std::unique_ptr<Communicator> ImaginedWorld::join(int rank, const std::vector<int>& ranks,
                                                  const std::string& name) {
  check(rank == rank_, "of an imagined job one rank is run");
  return std::make_unique<ImaginedCommunicator>(*this, place_in_group(rank, ranks, num_ranks_, name),
                                                static_cast<int>(ranks.size()), name);
}

std::vector<UnevenSum> ImaginedWorld::uneven_sums() const {
  std::vector<UnevenSum> sums;
  for (const auto& [group, larger] : sums_) {
    sums.push_back(groups_[group]);
    sums.back().larger = larger;
  }
  return sums;
}

void ImaginedWorld::abort(const std::string& why) { throw CommError(why); }

FlightRecorder& ImaginedWorld::recorder(int rank) {
  check(rank == rank_, "of an imagined job one rank is run");
  return recorder_;
}

std::vector<RankState> ImaginedWorld::states() {
  RankState state = recorder_.state();
  state.rank = rank_;
  return {state};
}

}  // namespace echelon
