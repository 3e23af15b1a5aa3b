// A device that is this machine's memory, to prove what is asked of one: what is queued runs as late as its
// order allows and in any order that is legal, by a seed; its memory is not for the host to touch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "base/philox.h"
#include "tensor/device_driver.h"

namespace echelon::checks {

// Calls that can be made to fail.
enum class FakeCall { allocate, allocate_pinned, create_stream, create_event, launch, run };

class FakeDriver final : public DeviceDriver {
 public:
  struct Options {
    std::uint64_t seed = 1;
    std::size_t memory_bytes = std::size_t{4} << 30;
  };
  FakeDriver() : FakeDriver(Options()) {}
  explicit FakeDriver(const Options& options);
  ~FakeDriver() override;

  // The call of this kind that comes after `others` of it fails: no stream, no event, no launch. There is no
  // more room from then on, and the device is lost.
  void fail_after(FakeCall call, int others);
  int calls(FakeCall call) const;
  // What was done that is not allowed, and what is left that nobody gave back; empty when all is well.
  std::vector<std::string> complaints() const;
  // Operations that have run, and that wait to.
  std::size_t operations_run() const;
  std::size_t operations_queued() const;

  // ---- for what computes on it (queued_kernels.h)

  // Memory that an operation reads or writes.
  struct Use {
    const std::byte* begin = nullptr;
    std::size_t bytes = 0;
  };
  void enqueue(const std::string& name, StreamHandle stream, std::vector<Use> uses,
               std::function<void()> work);
  // Where an operation that runs finds the device's memory.
  std::byte* seen_by_work(const std::byte* device_memory) const;

  // ---- DeviceDriver

  int num_devices() override { return 1; }
  DeviceProperties properties(int device) override;
  std::size_t free_bytes(int device) override;
  void use(int device) override;
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
  void copy(const RowsCopy& rows, StreamHandle stream) override;
  void fill_bytes(std::byte* to, std::uint8_t value, std::size_t bytes, StreamHandle stream) override;
  void reduce(const Reduction& reduction, StreamHandle stream) override;
  void check_launch(const char* kernel) override;
  std::shared_ptr<KernelBackend> make_backend(Arena& arena, const PrecisionRecipe& precision,
                                              Numerics numerics) override;

 private:
  struct Event;
  struct Stream;
  struct Operation {
    std::string name;
    std::vector<Use> uses;
    std::function<void()> work;
    std::shared_ptr<Event> waits_for, happens;
  };
  struct Event {
    Stream* stream = nullptr;  // null: not recorded
    bool happened = false;
    std::size_t at = 0;
  };
  struct Stream {
    std::deque<Operation> queue;
  };

  bool fails(FakeCall call);
  void refuse_lost() const;
  void complain(const std::string& what);
  Stream& known(StreamHandle stream);
  std::shared_ptr<Event>& known(EventHandle event);
  std::string where_not(const Use& use) const;
  bool can_run(const Stream& stream) const;
  void run_next(Stream& stream);
  void run_until_happened(const std::shared_ptr<Event>& event);
  void run_something_else();
  std::uint64_t random(std::uint64_t below);

  const Options options_;
  const Philox random_;
  std::uint64_t drawn_ = 0;
  std::size_t mapped_bytes_ = 0, first_unused_ = 0, used_bytes_ = 0, run_ = 0;
  std::byte *device_ = nullptr, *seen_ = nullptr;
  std::map<const std::byte*, std::size_t> blocks_, pinned_;
  std::set<Stream*> streams_;
  std::set<std::shared_ptr<Event>*> events_;
  std::map<FakeCall, int> calls_, fail_at_;
  std::vector<std::string> complaints_;
  bool lost_ = false;
  mutable std::recursive_mutex mutex_;
};

}  // namespace echelon::checks
