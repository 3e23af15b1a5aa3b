// Devices that are this machine's memory, to prove what is asked of them: what is queued runs as late as its
// order allows and in any order that is legal, by a seed; their memory is not for the host to touch, nor that
// of one for another's kernels that have no leave. Their clock is what the order asks for, not when things
// were run: work begins when its stream is free, what it waits for is done and the host has come to queue it,
// that of several streams when all of them are there, and takes what the test says. A thread of the host takes
// no time but where it waits; where a test says what work takes, nothing has happened for it before that.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/philox.h"
#include "tensor/device_driver.h"

namespace echelon::checks {

// Calls that can be made to fail.
enum class FakeCall {
  allocate,
  allocate_pinned,
  create_stream,
  create_event,
  launch,
  run,
  capture,
  launch_graph
};

class FakeCollectives;

class FakeDriver final : public DeviceDriver {
 public:
  struct Options {
    std::uint64_t seed = 1;
    std::size_t memory_bytes = std::size_t{4} << 30;  // of each device
    int devices = 1;
    bool peers = true;  // they can be let use each other's memory
    bool collectives = true;
    std::int64_t workspace_bytes = 0;  // of what computes on one
    bool computes = true;              // or they are clocks alone
    std::pair<int, int> capability{9, 0};
    std::optional<std::pair<int, int>> last_capability{};  // of the last device, where it has another
    std::string ids = "fake";          // what the devices' begin with
    std::pair<int, int> least_capability{0, 0};
    bool tf32_unasked = false;         // products of f32 are in TF32 whatever the precision
    // That an operation takes, by its name and the bytes that it uses; without it a microsecond each.
    std::function<double(const std::string& name, std::size_t bytes)> seconds = {};
    std::function<void()> before_event = {};  // called by whoever makes one, first of all
  };
  FakeDriver() : FakeDriver(Options()) {}
  explicit FakeDriver(const Options& options);
  ~FakeDriver() override;

  // The call of this kind that comes after `others` of it fails: no stream, no event, no launch; of a
  // capture, which is two calls, its beginning or its end. There is no more room from then on, and the device
  // that was to run something is lost.
  void fail_after(FakeCall call, int others);
  int calls(FakeCall call) const;
  // What was done that is not allowed, and what is left that nobody gave back; empty when all is well.
  std::vector<std::string> complaints() const;
  // Operations that have run, and that wait to.
  std::size_t operations_run() const;
  std::size_t operations_queued() const;
  // Seconds on the devices' clock at which the last operation so far ended.
  double last_end() const;

  // ---- for what computes on it (queued_kernels.h)

  // Memory that an operation reads or writes.
  struct Use {
    const std::byte* begin = nullptr;
    std::size_t bytes = 0;
  };
  void enqueue(const std::string& name, StreamHandle stream, std::vector<Use> uses,
               std::function<void()> work);
  // Work of a stream of each of several ranks: it is done when every one of them has come to it, once, and
  // none of them goes on before. Who waits for it sleeps while another has not queued its own.
  struct Meeting;
  std::shared_ptr<Meeting> make_meeting(int ranks, std::function<void()> work);
  void meet(const std::shared_ptr<Meeting>& meeting, int rank, const std::string& name, StreamHandle stream,
            std::vector<Use> uses);
  // The rank goes on without it, at once or when it comes to it.
  void give_up(Meeting& meeting, int rank);
  void break_off(Meeting& meeting);  // it is never done
  bool is_done(const Meeting& meeting) const;
  void complain(const std::string& what);
  FakeCollectives& fake_collectives() { return *collectives_; }
  // Where an operation that runs finds the device's memory.
  std::byte* seen_by_work(const std::byte* device_memory) const;

  // ---- DeviceDriver

  int num_devices() override { return options_.devices; }
  DeviceProperties properties(int device) override;
  std::pair<int, int> least_capability() override { return options_.least_capability; }
  std::size_t free_bytes(int device) override;
  void use(int device) override;
  bool can_reach(int device, int peer) override;
  bool reach(int device, int peer) override;
  std::byte* allocate(int device, std::size_t bytes) override;
  void free(int device, std::byte* memory) noexcept override;
  std::byte* allocate_pinned(std::size_t bytes) override;
  void free_pinned(std::byte* memory) noexcept override;
  StreamHandle create_stream(int device) override;
  void destroy_stream(StreamHandle stream) noexcept override;
  void synchronize(StreamHandle stream) override;
  EventHandle create_event(int device) override;
  void destroy_event(EventHandle event) noexcept override;
  void record(EventHandle event, StreamHandle stream) override;
  void wait(StreamHandle stream, EventHandle event) override;
  bool has_happened(EventHandle event) override;
  void synchronize(EventHandle event) override;
  double seconds_between(EventHandle first, EventHandle second) override;
  void begin_capture(StreamHandle stream) override;
  GraphHandle end_capture(StreamHandle stream) override;
  void abandon_capture(StreamHandle stream) noexcept override;
  void launch(GraphHandle graph, StreamHandle stream) override;
  void destroy_graph(GraphHandle graph) noexcept override;
  void copy(const RowsCopy& rows, StreamHandle stream) override;
  void fill_bytes(std::byte* to, std::uint8_t value, std::size_t bytes, StreamHandle stream) override;
  void reduce(const Reduction& reduction, StreamHandle stream) override;
  std::string no_collectives() override;
  DeviceCollectives& collectives() override;
  void check_launch(const char* kernel) override;
  std::shared_ptr<KernelBackend> make_backend(Arena& arena, const PrecisionRecipe& precision,
                                              Numerics numerics) override;
  std::int64_t workspace_bytes(Numerics) const override { return options_.workspace_bytes; }

 private:
  struct Event;
  struct Graph;
  struct Stream;
  struct Operation {
    std::string name;
    std::vector<Use> uses;
    std::function<void()> work;
    std::shared_ptr<Event> waits_for, happens;
    bool is_copy = false;
    std::shared_ptr<Meeting> meeting{};
    int rank = 0;          // in it
    double queued_at = 0;  // seconds
  };
  struct Event {
    int device = 0;
    Stream* stream = nullptr;  // null: not recorded
    bool happened = false;
    double at = 0;  // seconds
  };
  struct Stream {
    int device = 0;
    std::deque<Operation> queue;
    double free_at = 0;                  // seconds
    std::unique_ptr<Graph> capturing{};  // what is queued now becomes
  };
  struct Graph {
    int device = 0;
    std::vector<Operation> operations;
  };
  struct Block {
    std::size_t bytes = 0;
    int device = 0;
  };
  using Blocks = std::map<const std::byte*, Block>;
  static constexpr int host = -1;

  bool fails(FakeCall call);
  void refuse_lost(int device) const;
  static bool may_pass(const Meeting& meeting, int rank);
  static bool all_are_there(const Meeting& meeting);
  double seconds_of(const Operation& operation) const;
  void hold(Meeting& meeting, const Operation& operation);
  // Runs the next of the stream, or what has to run before it; false where nothing can before another thread
  // queues something or gives up.
  bool advance(Stream& stream);
  bool bring_together(Meeting& meeting);
  // The device of the block of `blocks` that it lies in.
  static std::optional<int> where(const Blocks& blocks, const std::byte* begin, std::size_t bytes);
  std::size_t used_bytes(int device) const;
  // What a stream that is captured is not asked for.
  void refuse_in_capture(const Stream& stream, const char* what);
  void queue(Stream& stream, Operation operation);
  void push(Stream& stream, Operation operation);
  Stream& known(StreamHandle stream);
  std::shared_ptr<Event>& known(EventHandle event);
  std::string where_not(const Use& use, const Stream& stream, bool is_copy) const;
  void check_uses(const Operation& operation, const Stream& stream, const char* doing) const;
  bool can_run(const Stream& stream) const;
  void run_next(Stream& stream);
  // False as advance().
  bool run_until_happened(const std::shared_ptr<Event>& event);
  void wait_until_happened(std::unique_lock<std::recursive_mutex>& lock, const std::shared_ptr<Event>& event);
  void run_something_else();
  std::uint64_t random(std::uint64_t below);

  const Options options_;
  const Philox random_;
  std::uint64_t drawn_ = 0;
  std::size_t mapped_bytes_ = 0, first_unused_ = 0, run_ = 0;
  std::byte *device_ = nullptr, *seen_ = nullptr;
  Blocks blocks_, pinned_;
  std::set<std::pair<int, int>> reached_;  // device, peer
  // Copies that are queued from and to pinned memory. The device sees such memory in pinned_seen_: what the
  // host wrote before it queued a copy, or what a copy has brought there. The host sees that when it is
  // there, and no numbers before.
  struct PinnedUse {
    std::byte* begin;
    std::size_t bytes;
    bool writes;
    bool hidden;  // from the host, by a later copy that is to write there
  };
  std::byte* seen_pinned(const std::byte* memory);
  std::function<void()> copy_from_host(const RowsCopy& rows, std::size_t read);
  std::function<void()> copy_to_host(const RowsCopy& rows, std::size_t written);
  std::map<const std::byte*, std::vector<std::byte>> pinned_seen_;
  std::list<PinnedUse> pinned_uses_;
  std::set<Stream*> streams_;
  std::set<std::shared_ptr<Event>*> events_;
  std::set<Graph*> graphs_;
  std::map<FakeCall, int> calls_, fail_at_;
  std::vector<std::string> complaints_;
  std::set<int> lost_;
  std::map<std::thread::id, int> launched_on_;
  std::map<std::thread::id, double> host_at_;  // seconds
  double last_end_ = 0;
  mutable std::recursive_mutex mutex_;
  std::condition_variable_any changed_;  // something was queued or given up, or a device lost
  std::unique_ptr<FakeCollectives> collectives_;
};

}  // namespace echelon::checks
