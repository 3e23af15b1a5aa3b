// Thread ranks whose all_gathers are slow on purpose: what a link of finite rate does, without its cores.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "comm/threads.h"

namespace echelon::checks {

// One rank's link: each gather occupies it for `delay`, one after another, from when it was asked for.
struct GatherLink {
  Clock::duration delay{};
  Clock::time_point free;
};

class DelayedOperation final : public Operation {
 public:
  DelayedOperation(Pending inner, Clock::time_point ready) : inner_(std::move(inner)), ready_(ready) {}
  bool progress() override { return inner_.progress() && Clock::now() >= ready_; }
  void wait() override {
    inner_.wait();
    std::this_thread::sleep_until(ready_);
  }

 private:
  Pending inner_;
  Clock::time_point ready_;
};

class DelayedGathers final : public Communicator {
 public:
  DelayedGathers(std::unique_ptr<Communicator> inner, GatherLink& link)
      : inner_(std::move(inner)), link_(link) {}

  Pending all_gather(const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts) override {
    link_.free = std::max(link_.free, Clock::now()) + link_.delay;
    return Pending(std::make_shared<DelayedOperation>(inner_->all_gather(in, out, counts), link_.free));
  }

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  Pending all_reduce(const Tensor& x, ReduceOp op) override { return inner_->all_reduce(x, op); }
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
  GatherLink& link_;
};

// The groups named "dp" have delayed gathers.
class DelayedWorld final : public ThreadWorld {
 public:
  DelayedWorld(int num_ranks, std::chrono::milliseconds timeout)
      : ThreadWorld(num_ranks, timeout), links_(static_cast<std::size_t>(num_ranks)) {}

  std::unique_ptr<Communicator> join(int rank, const std::vector<int>& ranks,
                                     const std::string& name) override {
    auto group = ThreadWorld::join(rank, ranks, name);
    if (name != "dp") return group;
    return std::make_unique<DelayedGathers>(std::move(group), link(rank));
  }
  // To be set by the rank itself.
  GatherLink& link(int rank) { return links_[static_cast<std::size_t>(rank)]; }

 private:
  std::vector<GatherLink> links_;
};

}  // namespace echelon::checks
