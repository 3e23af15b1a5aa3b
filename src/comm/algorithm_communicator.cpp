#include "comm/algorithm_communicator.h"

#include <algorithm>
#include <array>
#include <bit>

#include "base/error.h"
#include "comm/collectives.h"

namespace echelon {
namespace {

struct Name {
  Collectives value;
  const char* text;
};
constexpr std::array<Name, 5> names{{{Collectives::direct, "direct"},
                                     {Collectives::ring, "ring"},
                                     {Collectives::halving_doubling, "halving-doubling"},
                                     {Collectives::automatic, "auto"},
                                     {Collectives::nccl, "nccl"}}};

class AlgorithmCommunicator final : public Communicator {
 public:
  AlgorithmCommunicator(std::unique_ptr<Communicator> messages, std::unique_ptr<Communicator> channels,
                        Collectives collectives)
      : messages_(std::move(messages)), channels_(std::move(channels)), collectives_(collectives) {}

  int rank() const override { return messages_->rank(); }
  int size() const override { return messages_->size(); }

  Pending all_reduce(const Tensor& x, ReduceOp op) override {
    switch (all_reduce_algorithm(x)) {
      case AllReduceAlgorithm::ring:
        ring_all_reduce(*channels_, x, op, scratch_);
        break;
      case AllReduceAlgorithm::halving_doubling:
        halving_doubling_all_reduce(*channels_, x, op, scratch_);
        break;
      case AllReduceAlgorithm::recursive_doubling:
        recursive_doubling_all_reduce(*channels_, x, op, scratch_);
        break;
    }
    return {};
  }
  Pending all_gather(const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts) override {
    ring_all_gather(*channels_, in, out, counts);
    return {};
  }
  Pending reduce_scatter(const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts) override {
    ring_reduce_scatter(*channels_, in, out, counts, ReduceOp::sum, scratch_);
    return {};
  }
  Pending all_to_all(const Tensor& in, std::span<const std::int64_t> send_counts, const Tensor& out,
                     std::span<const std::int64_t> recv_counts) override {
    pairwise_all_to_all(*channels_, in, send_counts, out, recv_counts);
    return {};
  }
  Pending broadcast(const Tensor& x, int root) override {
    binomial_broadcast(*channels_, x, root);
    return {};
  }
  Pending barrier() override {
    dissemination_barrier(*channels_);
    return {};
  }
  Pending send(const Tensor& x, int to) override { return messages_->send(x, to); }
  Pending recv(const Tensor& x, int from) override { return messages_->recv(x, from); }

 private:
  AllReduceAlgorithm all_reduce_algorithm(const Tensor& x) const {
    switch (collectives_) {
      case Collectives::ring:
        return AllReduceAlgorithm::ring;
      case Collectives::halving_doubling:
        return AllReduceAlgorithm::halving_doubling;
      default:
        return fastest_all_reduce(size(), x.bytes());
    }
  }

  std::unique_ptr<Communicator> messages_, channels_;
  const Collectives collectives_;
  Scratch scratch_;
};

}  // namespace

const char* collectives_name(Collectives collectives) {
  for (const Name& name : names)
    if (name.value == collectives) return name.text;
  return "?";
}

Collectives parse_collectives(const std::string& text, const std::string& field) {
  std::string legal;
  for (const Name& name : names) {
    if (text == name.text) return name.value;
    legal += (legal.empty() ? "" : ", ") + std::string(name.text);
  }
  refuse("{} {}: legal: {}", field, text, legal);
}

std::unique_ptr<Communicator> with_algorithms(std::unique_ptr<Communicator> messages,
                                              std::unique_ptr<Communicator> channels,
                                              Collectives collectives) {
  check(collectives != Collectives::direct && collectives != Collectives::nccl,
        "direct collectives are the backend's own");
  return std::make_unique<AlgorithmCommunicator>(std::move(messages), std::move(channels), collectives);
}

// Cost of the longest chain of messages: steps times latency plus bytes over bandwidth, in units of bytes.
// (Hockney's model; Thakur, Rabenseifner, Gropp 2005 choose in this way.)
AllReduceAlgorithm fastest_all_reduce(int n, std::int64_t bytes) {
  constexpr double latency_bytes = 64 << 10;  // 5 microseconds of 12.5 GB/s: one 100 Gb/s link
  const auto p = static_cast<int>(std::bit_floor(static_cast<unsigned>(n)));
  const double levels = std::bit_width(static_cast<unsigned>(p)) - 1, folding = p == n ? 0 : 2;
  const auto cost = [&](double steps, double buffers) {
    return steps * latency_bytes + buffers * static_cast<double>(bytes);
  };
  const double recursive_doubling = cost(levels + folding, levels + folding);
  const double halving_doubling = cost(2 * levels + folding, 2.0 * (p - 1) / p + folding);
  const double ring = cost(2.0 * (n - 1), 2.0 * (n - 1) / n);
  const double least = std::min({recursive_doubling, halving_doubling, ring});
  return least == recursive_doubling ? AllReduceAlgorithm::recursive_doubling
         : least == halving_doubling ? AllReduceAlgorithm::halving_doubling
                                     : AllReduceAlgorithm::ring;
}

}  // namespace echelon
