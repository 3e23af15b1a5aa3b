// Thread ranks whose gathers or messages are slow on purpose: what a link of finite rate does, without its
// cores. On a clock that goes on only where somebody sleeps, what is hidden behind what is exact.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "comm/threads.h"
#include "turned_clock.h"

namespace echelon::checks {

// A communicator as it is; what is slow of it is for those to say that build on it.
class OtherCommunicator : public Communicator {
 public:
  explicit OtherCommunicator(std::unique_ptr<Communicator> inner) : inner_(std::move(inner)) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  Pending all_reduce(const Tensor& x, ReduceOp op) override { return inner_->all_reduce(x, op); }
  Pending all_gather(const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts) override {
    return inner_->all_gather(in, out, counts);
  }
  Pending reduce_scatter(const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts) override {
    return inner_->reduce_scatter(in, out, counts);
  }
  Pending all_to_all(const Tensor& in, std::span<const std::int64_t> send_counts, const Tensor& out,
                     std::span<const std::int64_t> recv_counts) override {
    return inner_->all_to_all(in, send_counts, out, recv_counts);
  }
  Pending broadcast(const Tensor& x, int root) override { return inner_->broadcast(x, root); }
  Pending send(const Tensor& x, int to) override { return inner_->send(x, to); }
  Pending recv(const Tensor& x, int from) override { return inner_->recv(x, from); }
  Pending barrier() override { return inner_->barrier(); }

 private:
  std::unique_ptr<Communicator> inner_;
};

// Is there when `inner` is and the clock says so.
class Arrival final : public Operation {
 public:
  Arrival(Pending inner, std::function<Clock::time_point()> there, const Time& time)
      : inner_(std::move(inner)), there_(std::move(there)), time_(time) {}
  bool progress() override { return false; }  // asked for only by wait()
  void wait() override {
    inner_.wait();
    sleep_until(time_, there_());
  }

 private:
  Pending inner_;
  std::function<Clock::time_point()> there_;
  const Time& time_;
};

// One rank's link: each gather occupies it for `delay`, one after another, from when it was asked for.
struct GatherLink {
  Clock::duration delay{};
  Clock::time_point free{};
};

class DelayedGathers final : public OtherCommunicator {
 public:
  DelayedGathers(std::unique_ptr<Communicator> inner, GatherLink& link, const Time& time)
      : OtherCommunicator(std::move(inner)), link_(link), time_(time) {}
  Pending all_gather(const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts) override {
    link_.free = std::max(link_.free, time_.now()) + link_.delay;
    return Pending(std::make_shared<Arrival>(
        OtherCommunicator::all_gather(in, out, counts), [free = link_.free] { return free; }, time_));
  }

 private:
  GatherLink& link_;
  const Time& time_;
};

// The groups named "dp" have delayed gathers.
class DelayedWorld final : public ThreadWorld {
 public:
  DelayedWorld(int num_ranks, const Time& time)
      : ThreadWorld(num_ranks, patience, {}, time), links_(static_cast<std::size_t>(num_ranks)) {}

  std::unique_ptr<Communicator> join(int rank, const std::vector<int>& ranks,
                                     const std::string& name) override {
    auto group = ThreadWorld::join(rank, ranks, name);
    if (name != "dp") return group;
    return std::make_unique<DelayedGathers>(std::move(group), link(rank), time());
  }
  // To be set by the rank itself.
  GatherLink& link(int rank) { return links_[static_cast<std::size_t>(rank)]; }

 private:
  std::vector<GatherLink> links_;
};

// When each message of a pair of ranks arrives; shared by the threads.
class Arrivals {
 public:
  explicit Arrivals(Clock::duration delay) : delay_(delay) {}
  // Those of a pair follow one another.
  void sent(int from, int to, Clock::time_point at) {
    const std::lock_guard lock(mutex_);
    Link& link = links_[{from, to}];
    link.free = std::max(link.free, at) + delay_;
    link.arrivals.push_back(link.free);
  }
  Clock::time_point take(int from, int to) {
    const std::lock_guard lock(mutex_);
    auto& arrivals = links_[{from, to}].arrivals;
    const auto time = arrivals.front();
    arrivals.pop_front();
    return time;
  }

 private:
  struct Link {
    Clock::time_point free{};
    std::deque<Clock::time_point> arrivals;
  };
  const Clock::duration delay_;
  std::mutex mutex_;
  std::map<std::pair<int, int>, Link> links_;
};

// Collectives are as fast as they are.
class SlowHops final : public OtherCommunicator {
 public:
  SlowHops(std::unique_ptr<Communicator> inner, Arrivals& arrivals, const Time& time)
      : OtherCommunicator(std::move(inner)), arrivals_(arrivals), time_(time) {}
  Pending send(const Tensor& x, int to) override {
    arrivals_.sent(rank(), to, time_.now());
    return OtherCommunicator::send(x, to);
  }
  Pending recv(const Tensor& x, int from) override {
    return Pending(std::make_shared<Arrival>(
        OtherCommunicator::recv(x, from), [this, from] { return arrivals_.take(from, rank()); }, time_));
  }

 private:
  Arrivals& arrivals_;
  const Time& time_;
};

// The messages of groups of one name take `delay`.
class SlowWorld final : public ThreadWorld {
 public:
  SlowWorld(int num_ranks, std::string group, Clock::duration delay, const Time& time)
      : ThreadWorld(num_ranks, patience, {}, time), group_(std::move(group)), arrivals_(delay) {}
  std::unique_ptr<Communicator> join(int rank, const std::vector<int>& ranks,
                                     const std::string& name) override {
    auto group = ThreadWorld::join(rank, ranks, name);
    if (name != group_) return group;
    return std::make_unique<SlowHops>(std::move(group), arrivals_, time());
  }

 private:
  const std::string group_;
  Arrivals arrivals_;
};

}  // namespace echelon::checks
