#include "comm/process_world.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>
#include <map>
#include <sstream>
#include <thread>

#include "base/error.h"
#include "comm/call_communicator.h"
#include "comm/control_sockets.h"
#include "comm/diagnosis.h"
#include "comm/process_engine.h"
#include "comm/suspension.h"
#include "tensor/host.h"

namespace echelon {

using namespace std::chrono_literals;

namespace {

// To reach each other at the start; for a rank's thread to come back after a failure.
constexpr std::chrono::milliseconds meeting_time = 60s, grace_time = 4s;
constexpr const char* end_of_run = "the end of the run";

std::vector<std::string> words(const std::string& text) {
  std::istringstream in(text);
  return {std::istream_iterator<std::string>(in), {}};
}

}  // namespace

struct ProcessWorld::State {
  std::chrono::milliseconds timeout;
  FailureHooks hooks;
  Time time;
  FlightRecorder recorder{time};
  Processes processes{};
  std::unique_ptr<ControlNetwork> control{};
  std::unique_ptr<ProcessEngine> engine{};
  std::map<std::pair<std::string, std::vector<int>>, ProcessGroup> groups{};
  // How many calls the rank's thread is in that it may not come back from after a failure.
  std::atomic<int> inside{0};
  std::optional<Clock::time_point> failed_at{};  // of the listening thread, as the next
  Suspension suspension{};
  bool is_back = false;                          // the rank's thread, after a failure

  struct Inside {
    State& state;
    explicit Inside(State& its_state) : state(its_state) { ++state.inside; }
    ~Inside() { --state.inside; }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;
  };

  // A call of MPI that the rank's thread cannot leave before these ranks have made it too.
  template <class CallOfMpi>
  auto block_in(const std::string& in, const std::vector<int>& ranks, const CallOfMpi& call) {
    std::vector<int> others = ranks;
    std::erase(others, processes.rank);
    const Inside here(*this);
    const AnnouncedWait waits(recorder, in, others);
    return call();
  }

  // How this rank stands.
  RankState stand() {
    RankState s = recorder.state();
    s.rank = processes.rank;
    if (s.waits_in == end_of_run) s.waits_for = control->unfinished();
    if (s.waits_in.empty() || !s.waits_for.empty()) return s;
    const RankState in_operation = engine->standing();
    if (!in_operation.waits_in.empty()) s.waits_in = in_operation.waits_in;
    s.waits_for = in_operation.waits_for;
    s.to_take = in_operation.to_take;
    return s;
  }

  void tick() {
    if (control->failed()) {
      const bool stuck = inside > 0 && failed_at && time.now() >= *failed_at + grace_time;
      if (stuck && control->reported() && hooks.last_resort) hooks.last_resort();
      return;
    }
    if (suspension.forgives(Clock::now(), timeout)) return;
    const RankState own = stand();
    if (waits_too_long(own, timeout, [&](int rank) { return control->unheard_seconds(rank); }))
      control->fail({.why = describe_late_wait(own, timeout), .late = true});
  }

  void on_failure(const Failure& failure) {
    failed_at = time.now();
    if (!failure.refused && hooks.record) hooks.record(processes.rank, recorder.json_lines(processes.rank));
  }

  // Called by the rank's thread: returns when some rank has spoken. `cause`: its own error; empty: it has
  // only heard of the failure.
  void fail(const Failure& failure, const std::string& cause) {
    if (!std::exchange(is_back, true)) {
      control->fail(failure);
      if (!failure.refused && !cause.empty() && hooks.record)
        hooks.record(processes.rank, cause_line(processes.rank, cause));
      control->come_back(cause);
    }
    control->wait_for_report();
  }
};

namespace {

// An operation with what it needs until it is finished, and after it.
struct Held {
  std::shared_ptr<ProcessOperation> operation;
  std::array<Tensor, 2> tensors;  // in, out
  const std::byte* staged;        // in the host's memory, what is for a device; null: nothing is

  // Behind the operation.
  void bring() {
    if (const std::byte* const from = std::exchange(staged, nullptr))
      copy_bytes_from_host({from, static_cast<std::size_t>(tensors[1].bytes())}, tensors[1]);
  }
};

class ProcessHandle final : public Operation {
 public:
  using Kept = std::vector<Held>;
  ProcessHandle(ProcessWorld::State& world, std::shared_ptr<Kept> kept,
                std::shared_ptr<ProcessOperation> operation, Tensor in, Tensor out,
                const std::byte* staged = nullptr)
      : world_(world),
        kept_(std::move(kept)),
        held_{std::move(operation), {std::move(in), std::move(out)}, staged} {}
  // What is dropped before it is finished keeps its tensors until it is.
  ~ProcessHandle() override {
    if (!finished_) kept_->push_back(held_);
  }
  bool progress() override {
    if (!finished_ && world_.engine->progress(*held_.operation)) finish();
    return finished_;
  }
  void wait() override {
    world_.engine->wait(*held_.operation);
    finish();
  }

 private:
  void finish() {
    finished_ = true;
    held_.bring();
  }

  ProcessWorld::State& world_;
  std::shared_ptr<Kept> kept_;
  Held held_;
  bool finished_ = false;
};

class ProcessCommunicator final : public CallCommunicator {
 public:
  ProcessCommunicator(ProcessWorld::State& world, ProcessGroup& group) : world_(world), group_(group) {}
  ~ProcessCommunicator() override {
    if (std::uncaught_exceptions() > 0) return;
    try {
      for (Held& held : *kept_) {
        world_.engine->wait(*held.operation);
        held.bring();
      }
    } catch (const RunError&) {  // called by a destructor; every later call of the rank says it again
    }
  }

  int rank() const override { return group_.me; }
  int size() const override { return group_.size(); }

 private:
  Pending start(Call call, const Tensor& in, const Tensor& out) override {
    const bool receives = call.verb == Verb::recv;
    if (receives && call.root == rank()) return receive_from_self(call, out);
    const std::uint64_t number =
        receives ? group_.next_received[static_cast<std::size_t>(call.root)]++ : group_.next_collective++;
    std::erase_if(*kept_, [](Held& held) {
      const bool finished = held.operation->finished();
      if (finished) held.bring();
      return finished;
    });
    std::vector<std::unique_ptr<std::byte[]>> stage;
    const std::byte* staged = nullptr;
    if (call.device == Device::cuda) staged = by_way_of_the_host(call, in, out, stage);
    auto operation = world_.engine->start(group_, number, std::move(call), std::move(stage));
    const bool finished = operation->finished();
    if (finished && staged == nullptr) return {};
    Pending pending(std::make_shared<ProcessHandle>(world_, kept_, std::move(operation), in, out, staged));
    if (finished) pending.wait();
    return pending;
  }

  // MPI need not support devices: data to send are copied to the host, which waits for that, and received
  // data are copied to the device when they have arrived. Turns the call into one on host memory, and returns
  // the buffer that receives data for `out`; null if there are none.
  const std::byte* by_way_of_the_host(Call& call, const Tensor& in, const Tensor& out,
                                      std::vector<std::unique_ptr<std::byte[]>>& stage) {
    const auto room = [&](const Tensor& x) {
      return stage
          .emplace_back(std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(x.bytes())))
          .get();
    };
    const bool in_place = call.verb == Verb::all_reduce || call.verb == Verb::broadcast;
    const bool says = call.verb != Verb::recv && (call.verb != Verb::broadcast || call.root == rank());
    const bool hears = call.verb != Verb::broadcast || call.root != rank();
    std::byte* const to = room(out);
    std::byte* const from = in_place || !says ? to : room(in);
    if (says) copy_bytes_to_host(in, {from, static_cast<std::size_t>(in.bytes())});
    call.in = from;
    call.out = to;
    call.device = Device::cpu;
    return hears ? to : nullptr;
  }
  // Copied: a large message would otherwise wait for its receive.
  Pending post(Call call, const Tensor& x) override {
    const auto bytes = static_cast<std::size_t>(x.bytes());
    std::vector<std::byte> staged;
    if (call.device == Device::cuda) {
      staged.resize(bytes);
      copy_bytes_to_host(x, staged);
      call.in = staged.data();
      call.device = Device::cpu;
    }
    if (call.root == rank()) {
      group_.to_self.emplace_back(call.in, call.in + bytes);
      return {};
    }
    const std::uint64_t number = group_.next_sent[static_cast<std::size_t>(call.root)]++;
    world_.engine->start_copied(group_, number, std::move(call), bytes);
    return {};
  }
  [[noreturn]] void fail(const std::string& why) override {
    world_.engine->fail({.origin = world_rank(), .why = why});
  }
  void throw_if_failed() override { world_.engine->throw_if_failed(); }
  const std::string& group_name() const override { return group_.name; }
  int world_rank() const override { return group_.world(group_.me); }

  // Nothing can arrive later: whoever would send it waits here.
  Pending receive_from_self(const Call& call, const Tensor& x) {
    const auto bytes = static_cast<std::size_t>(call.counts[0] * element_bytes(call.dtype));
    if (group_.to_self.empty() || group_.to_self.front().size() != bytes)
      fail(fmt::format("{}: rank {} called {} of itself, and has not sent that", group_.name, world_rank(),
                       echelon::describe(call)));
    copy_bytes_from_host(group_.to_self.front(), x);
    group_.to_self.pop_front();
    return {};
  }

  ProcessWorld::State& world_;
  ProcessGroup& group_;
  std::shared_ptr<ProcessHandle::Kept> kept_ = std::make_shared<ProcessHandle::Kept>();
};

}  // namespace

ProcessWorld::ProcessWorld(std::chrono::milliseconds timeout, FailureHooks hooks, const Time& time)
    : state_(new State{timeout, std::move(hooks), time}) {
  State& s = *state_;
  s.processes = start_message_passing();
  s.control = std::make_unique<ControlNetwork>(
      s.processes.rank, s.processes.size,
      ControlNetwork::Hooks{[&s] { return s.stand(); }, [&s](const Failure& f) { s.on_failure(f); },
                            [&s](const ControlProtocol::Report& r) {
                              if (s.hooks.report)
                                s.hooks.report(r.failure.refused ? r.failure.why
                                                                 : failure_report(r.failure.why, r.further,
                                                                                  r.failure.origin, r.states,
                                                                                  s.processes.nodes));
                            },
                            [&s] { s.tick(); }},
      time);
  const auto here = static_cast<unsigned>(ranks_on_this_node());
  std::vector<std::vector<std::string>> addresses;
  for (const std::string& of_rank : all_gather_text(fmt::format("{}", fmt::join(own_addresses(), " "))))
    addresses.push_back(words(of_rank));
  const auto invitations = all_gather_text(s.control->open(addresses, s.processes.nodes));
  s.engine =
      std::make_unique<ProcessEngine>(*s.control, s.recorder, here > std::thread::hardware_concurrency());
  s.control->connect(invitations, s.processes.nodes, meeting_time);
  job_ = all_gather_text(job_).front();
}

// A process that dies while the others leave MPI is noticed too: they would wait for it in there for ever.
ProcessWorld::~ProcessWorld() {
  State& s = *state_;
  if (s.control->failed()) {
    s.control->wait_for_report();
  } else {
    const State::Inside here(s);
    end_message_passing();
  }
  s.control->stop();  // its thread's hooks ask state_->control and the engine
  s.engine.reset();
  s.control.reset();
}

int ProcessWorld::rank() const { return state_->processes.rank; }
int ProcessWorld::num_ranks() const { return state_->processes.size; }
const std::vector<std::string>& ProcessWorld::nodes() const { return state_->processes.nodes; }
int ProcessWorld::ranks_on_this_node() const {
  const std::vector<std::string>& all = nodes();
  return static_cast<int>(std::count(all.begin(), all.end(), all[static_cast<std::size_t>(rank())]));
}
int ProcessWorld::rank_on_node(int rank) const {
  const auto own = nodes().begin() + rank;
  return static_cast<int>(std::count(nodes().begin(), own, *own));
}
bool ProcessWorld::is_first_on_this_node() const {
  return std::find(nodes().begin(), nodes().end(), nodes()[static_cast<std::size_t>(rank())]) ==
         nodes().begin() + rank();
}
bool ProcessWorld::failed() const { return state_->control->failed(); }
std::chrono::milliseconds ProcessWorld::timeout() const { return state_->timeout; }
FlightRecorder& ProcessWorld::recorder(int) { return state_->recorder; }
const Time& ProcessWorld::time() const { return state_->time; }

std::vector<RankState> ProcessWorld::states() {
  std::vector<RankState> all;
  for (int r = 0; r < num_ranks(); ++r)
    all.push_back(r == rank() ? state_->stand() : state_->control->last_heard(r));
  return all;
}

void ProcessWorld::abort(const std::string& why) { state_->control->fail({.why = why}); }

std::vector<std::string> ProcessWorld::gather(const std::string& text) {
  return state_->block_in("a meeting of all ranks", everyone(num_ranks()),
                          [&] { return state_->engine->gather(text); });
}

std::vector<std::string> ProcessWorld::gather_from_first_on_nodes(const std::string& text) {
  std::vector<std::string> texts = gather(text);
  for (std::size_t r = 0; r < texts.size(); ++r)
    texts[r] = texts[static_cast<std::size_t>(std::find(nodes().begin(), nodes().end(), nodes()[r]) -
                                              nodes().begin())];
  return texts;
}

std::unique_ptr<Communicator> ProcessWorld::join(int rank, const std::vector<int>& ranks,
                                                 const std::string& name) {
  const int me = place_in_group(rank, ranks, num_ranks(), name);
  check(rank == this->rank(), "a process joins the groups of its own rank");
  ProcessGroup& group = state_->groups[{name, ranks}];
  if (group.ranks.empty()) {
    if (ranks.size() > 1)
      group.space = state_->block_in(fmt::format("the making of group {} [{}]", name, fmt::join(ranks, ", ")),
                                     ranks, [&] { return state_->engine->open_space(ranks); });
    group.name = name;
    group.ranks = ranks;
    group.me = me;
    group.next_sent.assign(ranks.size(), 1);
    group.next_received.assign(ranks.size(), 1);
  }
  return std::make_unique<ProcessCommunicator>(*state_, group);
}

void ProcessWorld::set_watch(const std::string& group, const std::function<void()>& on_half_sent) {
  for (auto& [key, joined] : state_->groups)
    if (key.first == group) joined.on_half_sent = on_half_sent;
}

void ProcessWorld::run(const std::function<void(int rank)>& body) {
  State& s = *state_;
  const State::Inside here(s);
  bool lasting = false;
  try {
    body(rank());
    s.engine->finish_all();
    const AnnouncedWait waits(s.recorder, end_of_run, {});
    s.control->finish_together();
  } catch (const std::exception& error) {
    lasting = dynamic_cast<const LastingError*>(&error) != nullptr;
    fail(error);
  }
  if (!s.control->failed()) return;
  const Failure failure = s.control->failure();
  if (failure.refused) throw RequestError(failure.why);
  if (lasting) throw LastingError(failure.why);
  throw CommError(failure.why);
}

void ProcessWorld::fail(const std::exception& error) {
  State& s = *state_;
  const std::string why = message_of(error);
  if (dynamic_cast<const EchoError*>(&error) != nullptr)
    s.fail({.why = why}, "");
  else if (dynamic_cast<const RequestError*>(&error) != nullptr)
    s.fail({.origin = rank(), .why = why, .refused = true}, why);
  else if (dynamic_cast<const CommError*>(&error) != nullptr)  // names the ranks itself
    s.fail({.origin = rank(), .why = why}, why);
  else
    s.fail({.origin = rank(), .why = fmt::format("rank {} failed: {}", rank(), why)}, why);
}

void refuse_together(ProcessWorld* processes, const std::function<void()>& prepare) {
  if (processes == nullptr) return prepare();
  std::string refusal;
  try {
    prepare();
  } catch (const RequestError& error) {
    refusal = error.what();
  }
  for (const std::string& first : processes->gather(refusal))
    if (!first.empty()) throw JointRefusal(first);
}

std::string describe_nodes(const std::vector<std::string>& nodes) {
  std::vector<std::string> names;
  for (const std::string& node : nodes)
    if (std::find(names.begin(), names.end(), node) == names.end()) names.push_back(node);
  std::vector<std::string> parts;
  for (const std::string& name : names) {
    std::string ranges;
    for (std::size_t r = 0; r < nodes.size(); ++r) {
      if (nodes[r] != name) continue;
      std::size_t end = r;
      while (end + 1 < nodes.size() && nodes[end + 1] == name) ++end;
      ranges += (ranges.empty() ? "" : ",") + (end > r ? fmt::format("{}-{}", r, end) : fmt::format("{}", r));
      r = end;
    }
    parts.push_back(fmt::format("{} has rank{} {}", name,
                                ranges.find_first_of(",-") != std::string::npos ? "s" : "", ranges));
  }
  return fmt::format("{} node{}: {}", names.size(), names.size() > 1 ? "s" : "", fmt::join(parts, ", "));
}

}  // namespace echelon
