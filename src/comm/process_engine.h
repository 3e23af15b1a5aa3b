// The operations that one process has in progress, and the two threads that advance them: the rank's own
// while it waits, and a second one while it computes.
//
// Every collective starts with an envelope between each two of its ranks, which says what the sender called:
// ranks that disagree know it as soon as both have called. Small payloads travel in the envelope, large ones
// follow it. Steps: 1, or 2 for a large all_reduce. Bytes sent: those of spec/traffic.h, plus 64 per message.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/call.h"
#include "comm/control_network.h"
#include "comm/flight_recorder.h"
#include "comm/message_passing.h"

namespace echelon {

// A group of ranks that contains this process.
struct ProcessGroup {
  std::string name;
  std::vector<int> ranks;  // world ranks in group order
  int me = 0;              // group rank
  int space = -1;          // message space; -1: a group of one
  std::uint64_t next_collective = 1;
  std::vector<std::uint64_t> next_sent, next_received;  // messages, by group rank
  std::deque<std::vector<std::byte>> to_self;           // messages of this rank to itself
  std::function<void()> on_half_sent{};                 // for tests: see ProcessWorld::set_watch()
  int size() const { return static_cast<int>(ranks.size()); }
  int world(int rank) const { return ranks[static_cast<std::size_t>(rank)]; }
};

struct Envelope {
  std::uint64_t number = 0;
  std::uint64_t inline_bytes = 0;
  std::int64_t count = 0;         // elements: in total; all_to_all: those for the receiver
  std::int64_t back = 0;          // all_to_all: elements that the sender expects from the receiver
  std::uint64_t counts_hash = 0;  // of counts on which all ranks must agree
  std::int32_t verb = 0, op = 0, dtype = 0, root = 0;
  std::int64_t unused = 0;
};
static_assert(sizeof(Envelope) == 64);

// Used under the engine's lock, except the constructor and finished().
class ProcessOperation {
 public:
  ProcessOperation(ProcessGroup& group, std::uint64_t number, Call call);
  ~ProcessOperation();

  // Advances; true when finished. CommError if ranks disagree.
  bool advance();
  // A thread that sees true also sees the data that was moved.
  bool finished() const { return finished_.load(std::memory_order_acquire); }
  // World ranks from which something has not arrived, and those to which something has not left.
  std::vector<int> missing() const;
  std::vector<int> leaving() const;
  const ProcessGroup& group() const { return group_; }
  std::string name() const;

  FlightRecorder::Ticket ticket = 0;
  // Keeps memory that the call uses until it is finished.
  void keep(std::unique_ptr<std::byte[]> memory) { rooms_.push_back(std::move(memory)); }

 private:
  struct Part {
    const std::byte* out = nullptr;
    std::int64_t out_count = 0;
    std::byte* in = nullptr;
    std::int64_t in_count = 0;
  };
  void plan();
  void post(int peer, const Part& part);
  void take_envelopes();
  void check_envelope(int peer, const Envelope& envelope) const;
  Envelope envelope_for(int peer) const;
  void end_first_step();
  void post_second_step();
  void reduce_own_part();
  int envelope_tag() const;
  int bulk_tag() const;
  std::byte* room(std::int64_t bytes);
  std::int64_t width() const { return element_bytes(call_.dtype); }
  bool gathers_whole() const;

  ProcessGroup& group_;
  std::uint64_t number_;
  Call call_;
  std::vector<std::int64_t> offsets_;  // where each rank's elements begin
  std::vector<Part> parts_;            // of the first step, by group rank
  std::unique_ptr<std::byte[]> stage_;
  std::vector<std::byte*> out_stage_, in_stage_;
  std::vector<std::unique_ptr<std::byte[]>> rooms_;
  Messages envelopes_, bulk_;
  std::vector<int> arrived_;
  std::vector<bool> heard_;
  int step_ = 0;
  std::atomic<bool> finished_{false};
};

class ProcessEngine {
 public:
  ProcessEngine(ControlNetwork& control, FlightRecorder& recorder, bool crowded);
  ~ProcessEngine();

  // `memory`, which the call uses, is kept as long as it may be written to.
  std::shared_ptr<ProcessOperation> start(ProcessGroup& group, std::uint64_t number, Call call,
                                          std::vector<std::unique_ptr<std::byte[]>> memory = {});
  // Starts a send of `bytes` bytes, which are copied: nobody waits for it.
  void start_copied(ProcessGroup& group, std::uint64_t number, Call call, std::size_t bytes);
  // Called by the rank's thread. There is no deadline: whoever polls standing() can let the job fail.
  void wait(ProcessOperation& operation);
  bool progress(ProcessOperation& operation);
  // Waits for operations that nobody waits for: sends whose buffer is still in use.
  void finish_all();
  // Collective over all processes, without a deadline; so is open_space().
  std::vector<std::string> gather(const std::string& text);
  int open_space(const std::vector<int>& ranks);
  // What the rank's thread waits in and for whom, or did when the job failed: the fields waits_in, waits_for
  // and to_take of a RankState. waits_in is empty if it does not wait, or if this is unavailable at the
  // moment. Any thread.
  RankState standing();
  [[noreturn]] void fail(const Failure& failure);
  void throw_if_failed() const;

 private:
  void advance_all();
  void run();

  ControlNetwork& control_;
  FlightRecorder& recorder_;
  const bool crowded_;  // more ranks than cores
  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<std::shared_ptr<ProcessOperation>> open_;
  const ProcessOperation* waits_in_ = nullptr;  // the rank's thread
  RankState held_up_;                           // at the job's failure
  bool stopping_ = false, rank_drives_ = false;
  std::thread thread_;
};

}  // namespace echelon
