#include "comm/recording.h"

namespace echelon {
namespace {

class RecordingCommunicator final : public Communicator {
 public:
  RecordingCommunicator(std::unique_ptr<Communicator> inner, Axis axis, Traffic& traffic)
      : inner_(std::move(inner)), axis_(axis), traffic_(traffic) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }

  // Every verb is called before it is counted: only what was accepted counts, and its arguments are valid
  // then.
  Pending all_reduce(const Tensor& x, ReduceOp op) override {
    Pending pending = inner_->all_reduce(x, op);
    count(Verb::all_reduce, all_reduce_bytes_sent(x.numel(), size(), rank(), element_bytes(x.dtype())));
    return pending;
  }

  Pending all_gather(const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts) override {
    Pending pending = inner_->all_gather(in, out, counts);
    count(Verb::all_gather, bytes_sent(Verb::all_gather, counts, rank(), element_bytes(in.dtype())));
    return pending;
  }

  Pending reduce_scatter(const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts) override {
    Pending pending = inner_->reduce_scatter(in, out, counts);
    count(Verb::reduce_scatter, bytes_sent(Verb::reduce_scatter, counts, rank(), element_bytes(in.dtype())));
    return pending;
  }

  Pending all_to_all(const Tensor& in, std::span<const std::int64_t> send_counts, const Tensor& out,
                     std::span<const std::int64_t> recv_counts) override {
    Pending pending = inner_->all_to_all(in, send_counts, out, recv_counts);
    count(Verb::all_to_all, bytes_sent(Verb::all_to_all, send_counts, rank(), element_bytes(in.dtype())));
    return pending;
  }

  Pending broadcast(const Tensor& x, int root) override {
    Pending pending = inner_->broadcast(x, root);
    count(Verb::broadcast, rank() == root ? (size() - 1) * x.bytes() : 0);
    return pending;
  }

  Pending send(const Tensor& x, int to) override {
    Pending pending = inner_->send(x, to);
    count(Verb::send, x.bytes());
    return pending;
  }

  Pending recv(const Tensor& x, int from) override {
    Pending pending = inner_->recv(x, from);
    count(Verb::recv, 0);
    return pending;
  }

  Pending barrier() override {
    Pending pending = inner_->barrier();
    count(Verb::barrier, 0);
    return pending;
  }

 private:
  void count(Verb verb, std::int64_t bytes) {
    if (size() == 1) return;
    VerbTraffic& cell = traffic_.at(axis_, verb);
    cell.calls += 1;
    cell.bytes += bytes;
  }

  std::unique_ptr<Communicator> inner_;
  Axis axis_;
  Traffic& traffic_;
};

}  // namespace

std::unique_ptr<Communicator> record_traffic(std::unique_ptr<Communicator> inner, Axis axis,
                                             Traffic& traffic) {
  return std::make_unique<RecordingCommunicator>(std::move(inner), axis, traffic);
}

}  // namespace echelon
