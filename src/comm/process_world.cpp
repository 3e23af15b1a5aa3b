#include "comm/process_world.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>

#include "base/error.h"
#include "comm/call_communicator.h"
#include "comm/process_engine.h"

namespace echelon {

using namespace std::chrono_literals;

namespace {

// To reach each other at the start; to say how ranks stood; for a rank's thread to come back afterwards.
constexpr std::chrono::milliseconds meeting_time = 30s, report_time = 2500ms, grace_time = 4s;

}  // namespace

struct ProcessWorld::State {
  std::chrono::milliseconds timeout{};
  FailureHooks hooks;
  FlightRecorder recorder;
  Processes processes;
  std::unique_ptr<ControlNetwork> control;
  std::unique_ptr<ProcessEngine> engine;
  std::map<std::pair<std::string, std::vector<int>>, ProcessGroup> groups;
  // What the rank's thread waits in, for the report: set by that thread, read by the listening one.
  std::mutex mutex;
  std::weak_ptr<ProcessOperation> waited_for;
  std::optional<std::chrono::steady_clock::time_point> failed_at;
  bool back = true;  // the rank's thread is not in the body
  // A call of MPI that the rank's thread cannot leave before these ranks have made it too.
  struct Blocked {
    std::string in;
    std::vector<int> by;
    std::chrono::steady_clock::time_point since;
  };
  std::optional<Blocked> blocked;

  template <class CallOfMpi>
  auto block_in(const std::string& in, const std::vector<int>& ranks, const CallOfMpi& call) {
    std::vector<int> others = ranks;
    std::erase(others, processes.rank);
    struct Inside {
      State& state;
      Inside(State& its_state, Blocked now) : state(its_state) { set(std::move(now)); }
      ~Inside() { set({}); }
      void set(std::optional<Blocked> now) {
        const std::lock_guard lock(state.mutex);
        state.blocked = std::move(now);
      }
    } const inside(*this, {in, others, std::chrono::steady_clock::now()});
    return call();
  }

  RankState stand() {
    RankState s = recorder.state();
    s.rank = processes.rank;
    std::shared_ptr<ProcessOperation> operation;
    {
      const std::lock_guard lock(mutex);
      operation = waited_for.lock();
      if (blocked) {
        s.waits_in = blocked->in;
        s.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - blocked->since).count();
        return s;
      }
    }
    if (operation && !s.waits_in.empty()) s.waits_for = engine->waits_for(*operation);
    return s;
  }

  void tick() {
    std::optional<Blocked> late;
    bool stuck = false;
    {
      const std::lock_guard lock(mutex);
      const auto now = std::chrono::steady_clock::now();
      if (!failed_at && blocked && now > blocked->since + timeout) late = blocked;
      stuck = failed_at && (blocked || !back) && now >= *failed_at + grace_time;
    }
    if (late) control->fail(engine->late(late->in, late->by));
    if (stuck && hooks.last_resort) hooks.last_resort();
  }

  void on_failure(const Failure& failure) {
    {
      const std::lock_guard lock(mutex);
      failed_at = std::chrono::steady_clock::now();
    }
    if (!failure.refused && hooks.record) hooks.record(processes.rank, recorder.json_lines(processes.rank));
  }
};

namespace {

class ProcessHandle final : public Operation {
 public:
  using Kept = std::vector<std::pair<std::shared_ptr<ProcessOperation>, std::array<Tensor, 2>>>;
  ProcessHandle(ProcessWorld::State& world, std::shared_ptr<Kept> kept,
                std::shared_ptr<ProcessOperation> operation, Tensor in, Tensor out)
      : world_(world),
        kept_(std::move(kept)),
        operation_(std::move(operation)),
        tensors_{std::move(in), std::move(out)} {}
  // What is dropped before it is finished keeps its tensors until it is.
  ~ProcessHandle() override {
    if (!finished_) kept_->emplace_back(operation_, tensors_);
  }
  bool progress() override { return finished_ = finished_ || world_.engine->progress(*operation_); }
  void wait() override {
    {
      const std::lock_guard lock(world_.mutex);
      world_.waited_for = operation_;
    }
    world_.engine->wait(*operation_);
    finished_ = true;
  }

 private:
  ProcessWorld::State& world_;
  std::shared_ptr<Kept> kept_;
  std::shared_ptr<ProcessOperation> operation_;
  std::array<Tensor, 2> tensors_;
  bool finished_ = false;
};

class ProcessCommunicator final : public CallCommunicator {
 public:
  ProcessCommunicator(ProcessWorld::State& world, ProcessGroup& group) : world_(world), group_(group) {}
  ~ProcessCommunicator() override {
    if (std::uncaught_exceptions() > 0) return;
    try {
      for (const auto& [operation, tensors] : *kept_) world_.engine->wait(*operation);
    } catch (const CommError&) {  // called by a destructor; every later call of the rank says it again
    }
  }

  int rank() const override { return group_.me; }
  int size() const override { return group_.size(); }

 private:
  Pending start(Call call, const Tensor& in, const Tensor& out) override {
    const bool receives = call.verb == Verb::recv;
    if (receives && call.root == rank()) return receive_from_self(call);
    const std::uint64_t number =
        receives ? group_.next_received[static_cast<std::size_t>(call.root)]++ : group_.next_collective++;
    std::erase_if(*kept_, [](const auto& kept) { return kept.first->finished(); });
    auto operation = world_.engine->start(group_, number, std::move(call));
    if (operation->finished()) return {};
    return Pending(std::make_shared<ProcessHandle>(world_, kept_, std::move(operation), in, out));
  }
  // Copied: a large message would otherwise wait for its receive.
  void post(Call call, const Tensor& x) override {
    const auto bytes = static_cast<std::size_t>(x.bytes());
    if (call.root == rank()) {
      group_.to_self.emplace_back(call.in, call.in + bytes);
      return;
    }
    const std::uint64_t number = group_.next_sent[static_cast<std::size_t>(call.root)]++;
    world_.engine->start_copied(group_, number, std::move(call), bytes);
  }
  [[noreturn]] void fail(const std::string& why) override { world_.engine->fail({world_rank(), why, false}); }
  void throw_if_failed() override { world_.engine->throw_if_failed(); }
  const std::string& group_name() const override { return group_.name; }
  int world_rank() const override { return group_.world(group_.me); }

  // Nothing can arrive later: whoever would send it waits here.
  Pending receive_from_self(const Call& call) {
    const auto bytes = static_cast<std::size_t>(call.counts[0] * element_bytes(call.dtype));
    if (group_.to_self.empty() || group_.to_self.front().size() != bytes)
      fail(fmt::format("{}: rank {} called {} of itself, and has not sent that", group_.name, world_rank(),
                       echelon::describe(call)));
    std::copy_n(group_.to_self.front().data(), bytes, call.out);
    group_.to_self.pop_front();
    return {};
  }

  ProcessWorld::State& world_;
  ProcessGroup& group_;
  std::shared_ptr<ProcessHandle::Kept> kept_ = std::make_shared<ProcessHandle::Kept>();
};

}  // namespace

ProcessWorld::ProcessWorld(std::chrono::milliseconds timeout, FailureHooks hooks)
    : state_(std::make_unique<State>()) {
  State& s = *state_;
  s.timeout = timeout;
  s.hooks = std::move(hooks);
  s.processes = start_message_passing();
  s.control = std::make_unique<ControlNetwork>(
      s.processes.rank, s.processes.size,
      ControlNetwork::Hooks{
          [&s] { return s.stand(); }, [&s](const Failure& f) { s.on_failure(f); },
          [&s](const Failure& f, const std::vector<RankState>& states) {
            if (s.hooks.report)
              s.hooks.report(f.refused ? f.why : failure_report(f.why, f.origin, states, s.processes.nodes));
          },
          [&s] { s.tick(); }});
  const auto here = static_cast<unsigned>(ranks_on_this_node());
  const auto addresses = all_gather_text(s.control->address());
  s.engine = std::make_unique<ProcessEngine>(*s.control, s.recorder, timeout,
                                             here > std::thread::hardware_concurrency(), s.processes.rank);
  s.control->connect(addresses, s.processes.nodes, meeting_time);
}

ProcessWorld::~ProcessWorld() {
  const bool failed = state_->control->failed();
  state_->engine.reset();
  state_->control.reset();
  if (!failed) end_message_passing();
}

int ProcessWorld::rank() const { return state_->processes.rank; }
int ProcessWorld::num_ranks() const { return state_->processes.size; }
const std::vector<std::string>& ProcessWorld::nodes() const { return state_->processes.nodes; }
int ProcessWorld::ranks_on_this_node() const {
  const std::vector<std::string>& all = nodes();
  return static_cast<int>(std::count(all.begin(), all.end(), all[static_cast<std::size_t>(rank())]));
}
bool ProcessWorld::failed() const { return state_->control->failed(); }
FlightRecorder& ProcessWorld::recorder(int) { return state_->recorder; }
void ProcessWorld::abort(const std::string& why) { state_->control->fail({-1, why, false}); }

std::vector<std::string> ProcessWorld::gather(const std::string& text) {
  std::vector<int> everyone(static_cast<std::size_t>(num_ranks()));
  std::iota(everyone.begin(), everyone.end(), 0);
  return state_->block_in("a meeting of all ranks", everyone, [&] { return state_->engine->gather(text); });
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
  const auto inside = [&](bool is) {
    const std::lock_guard lock(s.mutex);
    s.back = !is;
  };
  const auto failed = [&](const std::string& why, bool refused) {
    s.control->fail({rank(), why, refused});
    s.control->wait_for_report(report_time);
    inside(false);
  };
  inside(true);
  try {
    body(rank());
    s.engine->finish_all();
    s.control->finish_together(s.timeout);
    inside(false);
  } catch (const EchoError&) {
    failed("", false);
  } catch (const RequestError& error) {
    failed(error.what(), true);
  } catch (const CommError& error) {  // names the ranks itself
    failed(error.what(), false);
  } catch (const std::exception& error) {
    failed(fmt::format("rank {} failed: {}", rank(), error.what()), false);
  }
  if (!s.control->failed()) return;
  const Failure failure = s.control->failure();
  if (failure.refused) throw RequestError(failure.why);
  throw CommError(failure.why);
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
    if (!first.empty()) throw RequestError(first);
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
