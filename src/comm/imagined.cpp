#include "comm/imagined.h"

#include <utility>

#include "comm/call.h"

namespace echelon {

class ImaginedCommunicator final : public Communicator {
 public:
  // The world outlives it.
  ImaginedCommunicator(ImaginedWorld& world, int rank, int size, const std::string& name)
      : world_(world), group_(world.groups_.size()), rank_(rank), size_(size) {
    world.groups_.push_back({name, size, 0});
  }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Pending all_reduce(const Tensor& x, ReduceOp op) override {
    if (const auto larger = static_cast<int>(x.numel() % size_); larger > 0)
      world_.sums_.insert({group_, larger});
    return done({.verb = Verb::all_reduce, .op = op, .counts = {x.numel()}}, x, x);
  }
  Pending all_gather(const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts) override {
    return done({.verb = Verb::all_gather, .counts = {counts.begin(), counts.end()}}, in, out);
  }
  Pending reduce_scatter(const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts) override {
    return done({.verb = Verb::reduce_scatter, .counts = {counts.begin(), counts.end()}}, in, out);
  }
  Pending all_to_all(const Tensor& in, std::span<const std::int64_t> send_counts, const Tensor& out,
                     std::span<const std::int64_t> recv_counts) override {
    return done({.verb = Verb::all_to_all,
                 .counts = {send_counts.begin(), send_counts.end()},
                 .recv_counts = {recv_counts.begin(), recv_counts.end()}},
                in, out);
  }
  Pending broadcast(const Tensor& x, int root) override {
    return done({.verb = Verb::broadcast, .root = root, .counts = {x.numel()}}, x, x);
  }
  Pending send(const Tensor& x, int to) override {
    return done({.verb = Verb::send, .root = to, .counts = {x.numel()}}, x, x);
  }
  Pending recv(const Tensor& x, int from) override {
    return done({.verb = Verb::recv, .root = from, .counts = {x.numel()}}, x, x);
  }
  Pending barrier() override { return {}; }

 private:
  Pending done(Call call, const Tensor& in, const Tensor& out) const {
    check_arguments(std::move(call), *this, in, out);
    return {};
  }
  ImaginedWorld& world_;
  const std::size_t group_;
  const int rank_, size_;
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
