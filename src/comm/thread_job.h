// The shared state behind ThreadWorld: which rank has called what, under one lock.
//
// A collective is ready when its last rank has called it. From then on any thread may do any piece of it,
// since all buffers are in shared memory: a rank that waits does its own part first, then whatever others
// have left undone. So a wait depends on calls only, never on whether a peer computes, waits for something
// else or has dropped its Pending.
//
// In device memory, the last rank that calls a collective queues it, after the work that every rank had
// queued before its call. On each device, the parts of its ranks run on the first rank's transfer stream. The
// collective is then finished for the host; each rank's stream continues in parallel until the rank waits for
// it. No stream ever waits for work that is not queued yet, so streams cannot deadlock.
//
// Tensors stay with the rank that passed them (an arena belongs to one thread). Others see raw pointers, and
// only between "ready" and "finished", or until the job is aborted and the rank has waited for them to let go
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
  // Device::cuda, by group rank: events after the work queued before each call, and the transfer streams.
  std::vector<std::shared_ptr<DeviceEvent>> arrived;
  std::vector<DeviceStream*> transfers;
  // Set by the last caller.
  std::optional<Movement> movement;
  std::int64_t piece_length = 0;                         // elements
  std::vector<std::int64_t> num_pieces;                  // by part
  // Pieces taken, by part; may exceed num_pieces.
  std::unique_ptr<std::atomic<std::int64_t>[]> claimed;
  std::int64_t unfinished_pieces = 0;
  int active = 0;                // threads that work on it
  std::vector<DeviceWork> work;  // Device::cuda, once finished: by device
  std::atomic<bool> ready{false}, finished{false};
};

// Device memory for a message that has no receiving tensor yet. No arena counts it.
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

// A message. Both ends fill it in, in either order.
struct Message {
  std::uint64_t number = 0;
  bool sent = false, expected = false;
  DType sent_dtype{}, expected_dtype{};
  std::int64_t sent_count = 0, expected_count = 0;
  MessageBuffer buffer;              // the copy, if the send came first
  std::byte* destination = nullptr;  // the receiver's tensor, if the receive came first
  bool active = false;               // the sender is writing to `destination`
  Device sent_device = Device::cpu, expected_device = Device::cpu;
  std::shared_ptr<DeviceEvent> destination_free;  // Device::cuda
  std::vector<DeviceWork> work;                   // the copy to the destination
  std::atomic<bool> delivered{false};
};

struct Channel {
  std::uint64_t next_sent = 1, next_expected = 1;
  std::deque<std::shared_ptr<Message>> open;  // known to one end only, in order
  std::vector<MessageBuffer> spare;           // reused, so that a steady state allocates nothing
};

struct Group {
  std::string name;
  std::vector<int> ranks;                            // world ranks in group order
  std::vector<std::uint64_t> next;                   // number of each rank's next collective
  std::deque<std::shared_ptr<OpenCollective>> open;  // called by some ranks, not by all
  std::map<std::pair<int, int>, Channel> channels;   // by group ranks (from, to)
  int size() const { return static_cast<int>(ranks.size()); }
};

// An operation of one rank in progress. Used by that rank's thread, except where noted.
class Task {
 public:
  explicit Task(Group& group) : group_(group) {}
  virtual ~Task() = default;
  virtual bool finished() const = 0;
  // Does work that is ready: all of it, or about one rank's share. False if there was none.
  virtual bool advance(bool all) = 0;
  // Under the lock, by any thread: whether another thread uses the tensors; the operation's name; whom it
  // waits for.
  virtual bool in_use() const = 0;
  virtual std::string name() const = 0;
  virtual std::vector<int> missing() const = 0;  // world ranks that have not called it

  // In device memory, once finished: its work on each device, and the rank's own stream.
  virtual std::span<const DeviceWork> on_devices() const = 0;
  virtual DeviceStream& stream() const = 0;
  // Its work on the device of that stream, whose clock times it.
  DeviceWork on_own_device() const;
  // Makes the rank's stream run its further work after this operation.
  void order_stream();
  // Whether that is done, or the work is known to be finished.
  bool ordered() const { return ordered_ || on_devices().empty(); }
  // The same, after asking the devices.
  bool settled();
  // Makes the host wait for the queued work of a finished operation. Never throws: the job has failed
  // already.
  void let_go() const noexcept;

  Group& group() const { return group_; }
  bool dropped = false;  // its Pending was destroyed
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

  // Begin an operation of group rank `me`; arguments are checked already. Null if it is finished at once.
  std::shared_ptr<Task> call(Group& group, int me, Call call, const Tensor& in, const Tensor& out);
  std::shared_ptr<Task> send(Group& group, int me, int to, const Tensor& x);
  std::shared_ptr<Task> receive(Group& group, int me, int from, const Tensor& x);
  FlightRecorder& recorder(int rank) { return state(rank).recorder; }

  // Called by the thread of world rank `rank`, for its own task.
  void wait(int rank, Task& task);
  bool progress(int rank, Task& task);
  void drop(int rank, const std::shared_ptr<Task>& task);
  void finish_dropped(int rank, const Group& group);

  // Gives up the longest wait, and with it the job, if it has exceeded the timeout. Called periodically by a
  // thread that is no rank's.
  void give_up_late_waits();
  // The state of each rank.
  std::vector<RankState> states();
  const Time& time() const { return time_; }
  std::chrono::milliseconds timeout() const { return timeout_; }

  // The first call wins. `origin`: the rank that reports it, or -1.
  void abort(int origin, std::string why);
  [[noreturn]] void fail(int rank, const std::string& why);
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }
  struct Abort {
    std::string why{};
    // The rank that reports it, and the one that caused it; -1: none.
    int origin = -1, at_fault = -1;
    std::vector<RankState> states{};  // of each rank at that time
  };
  // Only after an abort; it does not change any more.
  const Abort& how_it_was_aborted();
  // Throws if the job is aborted, after other threads have let go of the rank's tensors.
  void throw_if_aborted(int rank);
  // The rank makes no more calls: waits for it fail at once, and its operations are finished.
  void leave(int rank);
  void quiesce(int rank);
  void restart();

 private:
  friend class CollectiveTask;
  friend class ReceiveTask;

  struct alignas(64) ThreadState {
    explicit ThreadState(const Time& time) : recorder(time) {}
    std::vector<std::shared_ptr<Task>> tasks;  // used by its thread only
    std::atomic<std::uint32_t> events{0};      // changes, under the lock, when there is something to look at
    std::condition_variable changed;
    bool sleeping = false, left = false;
    const Task* waiting = nullptr;
    FlightRecorder recorder;
  };

  ThreadState& state(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  // These are called under the lock.
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
  // These are called without the lock.
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
  Suspension suspension_;  // for the thread that gives up late waits
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
