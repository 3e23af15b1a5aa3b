#include "parallel/parameter_server.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "comm/exchange.h"

namespace echelon {
namespace {

// A worker's request is a header of f64; a push is followed by the pieces of the gradient. The answer to a
// pull: the first server says whether it grants a batch, then all send the pieces of the values.
constexpr double pull_request = 0, push_request = 1, finish_request = 2;
constexpr std::int64_t header_length = 6, grant_length = 1;

template <std::size_t n>
Tensor as_tensor(std::array<double, n>& words) {
  return Tensor::view_of(words.data(), DType::f64, {static_cast<std::int64_t>(n)});
}

std::int64_t total(const std::vector<Range>& ranges) {
  std::int64_t sum = 0;
  for (const Range& range : ranges) sum += range.size();
  return sum;
}

}  // namespace

VerbTraffic worker_sends(const std::vector<ShardUnit>& units, const ParameterServerRun& run,
                         std::int64_t element_bytes) {
  VerbTraffic traffic;
  for (int server = 0; server < run.servers; ++server) {
    const std::vector<Range> pieces = shard_ranges(units, {server, server});
    traffic.calls += 2 + static_cast<std::int64_t>(pieces.size());
    traffic.bytes += 2 * header_length * 8 + total(pieces) * element_bytes;
  }
  return traffic;
}

VerbTraffic worker_receives(const std::vector<ShardUnit>& units, const ParameterServerRun& run) {
  VerbTraffic traffic{.calls = 1};  // the grant
  for (int server = 0; server < run.servers; ++server)
    traffic.calls += static_cast<std::int64_t>(shard_ranges(units, {server, server}).size());
  return traffic;
}

// ---- worker

ParameterClient::ParameterClient(Communicator& group, const ParameterServerRun& run,
                                 const std::vector<ShardUnit>& units, Tensor values,
                                 std::function<Tensor(Range)> gradients)
    : group_(group),
      run_(run),
      values_(std::move(values)),
      gradients_(std::move(gradients)),
      clock_(run.first_clock) {
  for (int server = 0; server < run_.servers; ++server)
    shards_.push_back(shard_ranges(units, {server, server}));
}

void ParameterClient::ask(int server, double kind, const Push& push) {
  std::array<double, header_length> header{
      kind, static_cast<double>(push.clock), push.loss, push.num_targets, push.norm, push.mtp_loss};
  group_.send(as_tensor(header), run_.workers + server).wait();
}

void ParameterClient::receive_values() {
  std::vector<Pending> pieces;
  for (int server = 0; server < run_.servers; ++server)
    for (const Range& piece : shards_[static_cast<std::size_t>(server)])
      pieces.push_back(group_.recv(values_.flat_range(piece.begin, piece.end), run_.workers + server));
  for (Pending& piece : pieces) piece.wait();
}

std::optional<std::int64_t> ParameterClient::pull() {
  ask(0, pull_request);
  std::array<double, grant_length> granted{};
  group_.recv(as_tensor(granted), run_.workers).wait();
  if (granted[0] == 0) return {};
  for (int server = 1; server < run_.servers; ++server) ask(server, pull_request);
  receive_values();
  return clock_;
}

void ParameterClient::push(const Push& push) {
  check(push.clock == clock_, "a worker pushes its batches in order");
  for (int server = 0; server < run_.servers; ++server) {
    ask(server, push_request, push);
    for (const Range& piece : shards_[static_cast<std::size_t>(server)])
      group_.send(gradients_(piece), run_.workers + server).wait();
  }
  ++clock_;
}

void ParameterClient::finish() {
  for (int server = 0; server < run_.servers; ++server) ask(server, finish_request);
  receive_values();
}

// ---- server

ParameterServer::ParameterServer(const Rank& rank, Communicator& group, const ParameterServerRun& run,
                                 const std::vector<ShardUnit>& units, Tensor values,
                                 std::vector<Tensor> gradient, Update update)
    : rank_(rank),
      group_(group),
      run_(run),
      pieces_(shard_ranges(units, {group.rank() - run.workers, group.rank() - run.workers})),
      values_(std::move(values)),
      gradient_(std::move(gradient)),
      update_(std::move(update)),
      workers_(static_cast<std::size_t>(run.workers)) {
  check(values_.numel() == total(pieces_) && gradient_.size() == pieces_.size(), "a server has its shard");
  for (Worker& worker : workers_) {
    worker.clock = run_.first_clock;
    // Where gradients are kept until all are there, all but the first wait beside.
    worker.gradient = gradient_;
    if (!run_.synchronous() || &worker == &workers_.front()) continue;
    for (Tensor& piece : worker.gradient)
      piece = Tensor(rank_.arena(), MemoryCategory::communication, piece.dtype(), {piece.numel()});
  }
}

std::int64_t ParameterServer::slowest() const {
  const auto behind = [](const Worker& a, const Worker& b) { return a.clock < b.clock; };
  return std::min_element(workers_.begin(), workers_.end(), behind)->clock;
}

void ParameterServer::serve() {
  for (int worker = 0; worker < run_.workers; ++worker) listen(worker);
  while (finished_ < run_.workers) {
    std::vector<int> heard = heard_from();
    if (heard.empty()) heard = wait_for_any();
    for (int worker : heard) hear(worker);
    answer();
  }
  for (int worker = 0; worker < run_.workers; ++worker) send_values(worker);
}

// Workers whose next message is there.
std::vector<int> ParameterServer::heard_from() {
  std::vector<int> heard;
  for (int w = 0; w < run_.workers; ++w) {
    Worker& worker = workers_[static_cast<std::size_t>(w)];
    if (worker.listening && worker.heard.progress()) heard.push_back(w);
  }
  return heard;
}

std::vector<int> ParameterServer::wait_for_any() {
  std::vector<int> listening;
  for (int w = 0; w < run_.workers; ++w)
    if (workers_[static_cast<std::size_t>(w)].listening) listening.push_back(w);
  const AnnouncedWait waits = rank_.announce_wait("a message of any worker", listening);
  // Asleep rather than looking again and again: cores belong to the workers.
  constexpr std::chrono::microseconds shortest{20}, longest{500};
  std::vector<int> heard;
  for (auto nap = shortest; (heard = heard_from()).empty(); nap = std::min(2 * nap, longest))
    std::this_thread::sleep_for(nap);
  return heard;
}

void ParameterServer::listen(int w) {
  Worker& worker = workers_[static_cast<std::size_t>(w)];
  worker.heard = group_.recv(as_tensor(worker.header), w);
  worker.listening = true;
}

void ParameterServer::hear(int w) {
  Worker& worker = workers_[static_cast<std::size_t>(w)];
  const double kind = worker.header[0];
  if (kind == finish_request) {
    worker.listening = false;
    ++finished_;
    return;
  }
  if (kind == pull_request)
    worker.pulls = true;
  else
    take(w);
  listen(w);
}

void ParameterServer::take(int w) {
  Worker& worker = workers_[static_cast<std::size_t>(w)];
  worker.push = {static_cast<std::int64_t>(worker.header[1]), worker.header[2], worker.header[3],
                 worker.header[4], worker.header[5]};
  check(worker.push.clock == worker.clock, "a worker's pushes arrive in order");
  std::vector<Pending> arriving;
  for (const Tensor& piece : worker.gradient) arriving.push_back(group_.recv(piece, w));
  for (Pending& piece : arriving) piece.wait();
  if (leads()) {
    const std::int64_t late = updates_ - worker.updates;
    const auto lag = static_cast<std::size_t>(worker.lag);
    if (staleness_.histogram.size() <= lag) staleness_.histogram.resize(lag + 1);
    ++staleness_.histogram[lag];
    ++staleness_.pushes;
    staleness_.sum_updates_late += late;
    staleness_.max_updates_late = std::max(staleness_.max_updates_late, late);
  }
  ++worker.clock;
  if (!run_.synchronous()) {
    update_({worker.push}, w);
    ++updates_;
  } else if (++pushed_ == run_.workers) {
    add_up();
  }
}

// Grouped by the rank of workers, not by arrival: the bits of an all_reduce.
void ParameterServer::add_up() {
  for (std::size_t i = 0; i < gradient_.size(); ++i) {
    std::vector<Tensor> pushed;
    for (const Worker& worker : workers_) pushed.push_back(worker.gradient[i]);
    reduce_several(ReduceOp::sum, pushed, gradient_[i]);
  }
  std::vector<Push> pushes;
  for (const Worker& worker : workers_) pushes.push_back(worker.push);
  update_(pushes, 0);
  ++updates_;
  pushed_ = 0;
}

// Answers the workers that wait to pull and may. Every server enforces the bound for its own shard, since
// pushes may reach it later than the first server. When no batch is left, nobody is waited for.
void ParameterServer::answer() {
  const std::int64_t batches = run_.workers * run_.num_clocks, finished = slowest();
  for (int w = 0; w < run_.workers; ++w) {
    Worker& worker = workers_[static_cast<std::size_t>(w)];
    if (!worker.pulls) continue;
    const bool none_left = leads() && granted_ == batches;
    if (!none_left && run_.staleness && worker.clock - finished > *run_.staleness) continue;
    worker.pulls = false;
    if (leads()) {
      std::array<double, grant_length> granted{none_left ? 0.0 : 1.0};
      group_.send(as_tensor(granted), w).wait();
      if (none_left) continue;
      ++granted_;
      worker.lag = worker.clock - finished;
      worker.updates = updates_;
    }
    send_values(w);
  }
}

void ParameterServer::send_values(int worker) {
  std::int64_t begin = 0;
  for (const Range& piece : pieces_) {
    group_.send(values_.flat_range(begin, begin + piece.size()), worker).wait();
    begin += piece.size();
  }
}

}  // namespace echelon
