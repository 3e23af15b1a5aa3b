// The shared state behind ThreadWorld: who has called what, and one lock over it.
//
// A collective is ready when its last rank has called it. From then on any thread may do any piece of it, as
// all buffers lie in shared memory: a rank that waits does its own part first, then what others have left
// undone. So a wait depends on calls only, never on whether a peer is computing, waits for something else or
// has dropped its Pending.
//
// In memory of devices the last rank that calls a collective queues it, after what every rank had queued
// before it called: on each device the parts of the ranks there, on the first one's stream of such transfers.
// Then it is finished for the host; the stream of each rank goes on beside it until the rank waits for it,
// and after it from there. No stream ever waits for something that is not queued yet, so streams cannot wait
// for each other in a circle.
//
// Tensors stay with the rank that passed them (an arena belongs to one thread); others see raw pointers, and
// only between "ready" and "finished", or until the job is aborted and the rank has seen them let go
// (quiesce).
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "comm/flight_recorder.h"
#include "comm/suspension.h"
#include "comm/thread_movement.h"
#include "comm/threads.h"
#include "tensor/device_stream.h"

namespace echelon {

// A collective that some ranks have called and not all have left.
struct OpenCollective {
  OpenCollective(std::uint64_t its_number, std::size_t n) : number(its_number), calls(n) {}
  const std::uint64_t number;
  std::vector<std::optional<Call>> calls;  // by group rank
  int num_called = 0;
  // Of Device::cuda: what each rank queued before is done; by group rank, where its transfers run.
  std::vector<std::shared_ptr<DeviceEvent>> arrived;
  std::vector<DeviceStream*> transfers;
  // Set by the last caller.
  std::optional<Movement> movement;
  std::int64_t piece_length = 0;                         // elements
  std::vector<std::int64_t> num_pieces;                  // by part
  std::unique_ptr<std::atomic<std::int64_t>[]> claimed;  // pieces taken, by part; may run past num_pieces
  std::int64_t unfinished_pieces = 0;
  int active = 0;                // threads at work on it
  std::vector<DeviceWork> work;  // of Device::cuda, from `finished` on: on each device
  std::atomic<bool> ready{false}, finished{false};
};

// Memory of a device under a message that no tensor takes yet. No arena counts it.
struct DeviceBuffer {
  DeviceBuffer(DeviceDriver& driver, int device, std::size_t bytes);
  ~DeviceBuffer();  // after the last use
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  DeviceDriver& driver;
  const int device;
  std::byte* const data;
  std::shared_ptr<DeviceEvent> last_use;  // so far
};

struct MessageBuffer {
  std::unique_ptr<std::byte[]> data;
  std::int64_t capacity = 0;
  std::unique_ptr<DeviceBuffer> on_device;
  explicit operator bool() const { return data != nullptr || on_device != nullptr; }
};

// One message: filled in from both ends, in either order.
struct Message {
  std::uint64_t number = 0;
  bool sent = false, expected = false;
  DType sent_dtype{}, expected_dtype{};
  std::int64_t sent_count = 0, expected_count = 0;
  MessageBuffer buffer;              // the copy, when the send came first
  std::byte* destination = nullptr;  // the receiver's tensor, when the receive came first
  bool active = false;               // the sender writes to `destination`
  Device sent_device = Device::cpu, expected_device = Device::cpu;
  std::shared_ptr<DeviceEvent> destination_free;  // of Device::cuda
  std::vector<DeviceWork> work;                   // the copy to the destination
  std::atomic<bool> delivered{false};
};

struct Channel {
  std::uint64_t next_sent = 1, next_expected = 1;
  std::deque<std::shared_ptr<Message>> open;  // known to one end only, in order
  std::vector<MessageBuffer> spare;           // used again, so that a steady state allocates nothing
};

struct Group {
  std::string name;
  std::vector<int> ranks;                            // world ranks in group order
  std::vector<std::uint64_t> next;                   // number of each rank's next collective
  std::deque<std::shared_ptr<OpenCollective>> open;  // called by some, not by all
  std::map<std::pair<int, int>, Channel> channels;   // by group ranks (from, to)
  int size() const { return static_cast<int>(ranks.size()); }
};

// One operation that a rank has under way. Used by the thread of that rank, except where marked.
class Task {
 public:
  explicit Task(Group& group) : group_(group) {}
  virtual ~Task() = default;
  virtual bool finished() const = 0;
  // Does work that is ready, `all` of it or about one rank's share; false when there was none.
  virtual bool advance(bool all) = 0;
  // Under the lock, by any thread: whether another thread is at the tensors; what it is; whom it waits for.
  virtual bool in_use() const = 0;
  virtual std::string name() const = 0;
  virtual std::vector<int> missing() const = 0;  // world ranks that have not come to it

  // Once it is finished, in memory of devices: what it does on each of them, and the rank's own stream.
  virtual std::span<const DeviceWork> on_devices() const = 0;
  virtual DeviceStream& stream() const = 0;
  // What it does on the device of that stream, whose clock tells when.
  DeviceWork on_own_device() const;
  // What the rank's stream runs from now on, it runs after it.
  void order_stream();
  // Whether it does so already, or the work is known to be done.
  bool ordered() const { return ordered_ || on_devices().empty(); }
  // The same, having asked the devices.
  bool settled();
  // The host waits for what a finished one has queued. Never throws: the job has failed already.
  void let_go() const noexcept;

  Group& group() const { return group_; }
  bool dropped = false;  // its Pending is gone
  FlightRecorder::Ticket ticket = 0;

 private:
  Group& group_;
  bool ordered_ = false;
};

class ThreadJob {
 public:
  ThreadJob(int num_ranks, std::chrono::milliseconds timeout, const Time& time);

  int num_ranks() const { return static_cast<int>(ranks_.size()); }
  Group& group(const std::string& name, const std::vector<int>& ranks);

  // By group rank `me`, arguments checked. Null when already finished.
  std::shared_ptr<Task> call(Group& group, int me, Call call, const Tensor& in, const Tensor& out);
  std::shared_ptr<Task> send(Group& group, int me, int to, const Tensor& x);
  std::shared_ptr<Task> receive(Group& group, int me, int from, const Tensor& x);
  FlightRecorder& recorder(int rank) { return state(rank).recorder; }

  // By the thread of world rank `rank`, about its own task.
  void wait(int rank, Task& task);
  bool progress(int rank, Task& task);
  void drop(int rank, const std::shared_ptr<Task>& task);
  void finish_dropped(int rank, const Group& group);

  // Gives up the wait that has lasted longest, where that is longer than it may, and the job with it. Called
  // now and then by a thread that is no rank's.
  void give_up_late_waits();
  // How each rank stands.
  std::vector<RankState> states();
  const Time& time() const { return time_; }
  std::chrono::milliseconds timeout() const { return timeout_; }

  // The first call wins. `origin`: the rank that says it, or -1.
  void abort(int origin, std::string why);
  [[noreturn]] void fail(int rank, const std::string& why);
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }
  struct Abort {
    std::string why{};
    int origin = -1, at_fault = -1;   // the rank that says it, and the one that brought it about; -1: none
    std::vector<RankState> states{};  // how each rank stood then
  };
  // Nothing changes it once it is so.
  const Abort& how_it_was_aborted();
  // Throws when the job is aborted, after other threads have let go of the rank's tensors.
  void throw_if_aborted(int rank);
  // The rank calls nothing more: what waits for it fails at once, and what it has under way is finished.
  void leave(int rank);
  void quiesce(int rank);
  void restart();

 private:
  friend class CollectiveTask;
  friend class ReceiveTask;

  struct alignas(64) ThreadState {
    explicit ThreadState(const Time& time) : recorder(time) {}
    std::vector<std::shared_ptr<Task>> tasks;  // of its thread alone
    std::atomic<std::uint32_t> events{0};      // changes, under the lock, when there is something to look at
    std::condition_variable changed;
    bool sleeping = false, left = false;
    const Task* waiting = nullptr;
    FlightRecorder recorder;
  };

  ThreadState& state(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  // Called under the lock.
  std::vector<RankState> states_locked();
  void abort_locked(int origin, std::string why);
  [[noreturn]] void fail_locked(std::unique_lock<std::mutex>& lock, int rank, const std::string& why);
  void wake(ThreadState& rank);
  void wake_all();
  void wake(const Group& group);
  std::string list_calls(const Group& group, const OpenCollective& collective) const;
  void make_ready(Group& group, OpenCollective& collective);
  std::shared_ptr<Message> message(Channel& channel, std::uint64_t number);
  void check_message(std::unique_lock<std::mutex>& lock, Group& group, int rank, int from, int to,
                     const Message& m);
  // Called without it.
  bool work(Group& group, OpenCollective& collective, int part, bool all);
  void queue_on_devices(Group& group, OpenCollective& collective);
  void send_to_device(Message& message, const Tensor& x, DeviceStream& transfers,
                      std::shared_ptr<DeviceEvent> ready);
  std::vector<DeviceWork> fill_on_device(MessageBuffer& buffer, const Tensor& x, DeviceStream& transfers,
                                         std::shared_ptr<DeviceEvent> ready);
  void forget_finished(ThreadState& rank);
  void sleep(int rank, Task& task, std::uint32_t seen);

  const std::chrono::milliseconds timeout_;
  const Time time_;
  const bool may_spin_;
  std::deque<ThreadState> ranks_;
  std::mutex mutex_;
  std::map<std::pair<std::string, std::vector<int>>, Group> groups_;
  bool any_left_ = false;
  Suspension suspension_;  // the thread's that gives up late waits
  Abort abort_;
  std::atomic<bool> aborted_{false};
};

struct ThreadWorld::State {
  State(int num_ranks, std::chrono::milliseconds timeout, FailureHooks its_hooks, const Time& time)
      : job(num_ranks, timeout, time), hooks(std::move(its_hooks)) {}
  ThreadJob job;
  FailureHooks hooks;
};

}  // namespace echelon
