#include "fake_driver.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "base/error.h"
#include "comm/reduce.h"
#include "fake_collectives.h"
#include "queued_kernels.h"
#include "spec/tf32.h"

namespace echelon::checks {
namespace {

constexpr std::size_t fake_alignment = 256, page = 4096;
constexpr int poison = 0xff;  // not a number, in every type of floats

using Lock = std::lock_guard<std::recursive_mutex>;

std::size_t extent(std::size_t stride, std::size_t row_bytes, std::size_t rows) {
  return rows == 0 || row_bytes == 0 ? 0 : (rows - 1) * stride + row_bytes;
}

bool overlap(const std::byte* a, std::size_t a_bytes, const std::byte* b, std::size_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

void move_rows(const RowsCopy& rows, std::byte* to, const std::byte* from) {
  for (std::size_t row = 0; row < rows.rows; ++row)
    std::memmove(to + row * rows.to_stride, from + row * rows.from_stride, rows.row_bytes);
}

// So that what is changed behind a copy's back is seen.
std::uint64_t sum_of(const std::byte* data, std::size_t bytes) {
  std::uint64_t sum = 1469598103934665603u;
  for (std::size_t i = 0; i < bytes; ++i)
    sum = (sum ^ std::to_integer<std::uint64_t>(data[i])) * 1099511628211u;
  return sum;
}

}  // namespace

struct FakeDriver::Meeting {
  std::function<void()> work;
  std::vector<Stream*> streams{};  // by rank; null: not queued yet
  std::vector<bool> given_up{};
  bool done = false, broken = false, being_brought = false;
  double end = 0;  // seconds; until it is done, when the last so far queued its own
};

FakeDriver::FakeDriver(const Options& options)
    : options_(options),
      random_(options.seed, echelon::Stream::test, 0),
      mapped_bytes_(std::size_t{64} << 30) {
  const int fd = ::memfd_create("fake device", MFD_CLOEXEC);
  check(fd >= 0 && ::ftruncate(fd, static_cast<off_t>(mapped_bytes_)) == 0, "no memory for a fake device");
  const auto map = [&](int protection) {
    void* const mapped = ::mmap(nullptr, mapped_bytes_, protection, MAP_SHARED | MAP_NORESERVE, fd, 0);
    check(mapped != MAP_FAILED, "no memory for a fake device");
    return static_cast<std::byte*>(mapped);
  };
  device_ = map(PROT_NONE);
  seen_ = map(PROT_READ | PROT_WRITE);
  ::close(fd);
  if (options_.collectives) collectives_ = std::make_unique<FakeCollectives>(*this);
}

FakeDriver::~FakeDriver() {
  for (Stream* stream : streams_) delete stream;
  for (auto* event : events_) delete event;
  for (const Graph* graph : graphs_) delete graph;
  for (const auto& [memory, block] : pinned_) delete[] memory;
  ::munmap(device_, mapped_bytes_);
  ::munmap(seen_, mapped_bytes_);
}

// ---- what tests ask

void FakeDriver::fail_after(FakeCall call, int others) {
  const Lock lock(mutex_);
  fail_at_[call] = calls_[call] + others;
}

int FakeDriver::calls(FakeCall call) const {
  const Lock lock(mutex_);
  const auto found = calls_.find(call);
  return found == calls_.end() ? 0 : found->second;
}

std::vector<std::string> FakeDriver::complaints() const {
  const int members = collectives_ ? collectives_->members() : 0;
  const Lock lock(mutex_);
  std::vector<std::string> all = complaints_;
  const auto left = [&](std::size_t count, const char* what) {
    if (count > 0) all.push_back(fmt::format("{} {} left", count, what));
  };
  left(blocks_.size(), "blocks of device memory");
  left(pinned_.size(), "blocks of pinned memory");
  left(streams_.size(), "streams");
  left(events_.size(), "events");
  left(graphs_.size(), "graphs");
  left(static_cast<std::size_t>(members), "members of groups");
  return all;
}

std::size_t FakeDriver::operations_run() const {
  const Lock lock(mutex_);
  return run_;
}

std::size_t FakeDriver::operations_queued() const {
  const Lock lock(mutex_);
  std::size_t queued = 0;
  for (const Stream* stream : streams_) queued += stream->queue.size();
  return queued;
}

double FakeDriver::last_end() const {
  const Lock lock(mutex_);
  return last_end_;
}

bool FakeDriver::fails(FakeCall call) {
  const int number = calls_[call]++;
  const auto planned = fail_at_.find(call);
  if (planned == fail_at_.end()) return false;
  const bool stays = call == FakeCall::allocate || call == FakeCall::allocate_pinned;
  return number == planned->second || (stays && number > planned->second);
}

void FakeDriver::refuse_lost(int device) const {
  if (lost_.contains(device)) fail_lost(device, "it fell off the bus");
}

void FakeDriver::complain(const std::string& what) { complaints_.push_back(what); }

// ---- running

std::uint64_t FakeDriver::random(std::uint64_t below) { return random_.below(drawn_++, below); }

FakeDriver::Stream& FakeDriver::known(StreamHandle stream) {
  auto* const found = static_cast<Stream*>(stream.handle);
  check(streams_.contains(found), "a stream is used that is not there");
  return *found;
}

std::shared_ptr<FakeDriver::Event>& FakeDriver::known(EventHandle event) {
  auto* const found = static_cast<std::shared_ptr<Event>*>(event.handle);
  check(events_.contains(found), "an event is used that is not there");
  return *found;
}

std::optional<int> FakeDriver::where(const Blocks& blocks, const std::byte* begin, std::size_t bytes) {
  const auto after = blocks.upper_bound(begin);
  if (after == blocks.begin()) return {};
  const auto& [memory, block] = *std::prev(after);
  return begin + bytes <= memory + block.bytes ? std::optional(block.device) : std::nullopt;
}

std::string FakeDriver::where_not(const Use& use, const Stream& stream, bool is_copy) const {
  if (use.bytes == 0 || where(pinned_, use.begin, use.bytes)) return "";
  const std::optional<int> device = where(blocks_, use.begin, use.bytes);
  if (!device) return fmt::format("{} bytes that are in no block of the device, or no more", use.bytes);
  if (*device == stream.device || is_copy || reached_.contains({stream.device, *device})) return "";
  return fmt::format("{} bytes of device {}, which device {} has no access to", use.bytes, *device,
                     stream.device);
}

// Ranks on a device that is lost give their memory back though others may still use it.
void FakeDriver::check_uses(const Operation& operation, const Stream& stream, const char* doing) const {
  for (const Use& use : operation.uses) {
    const std::string wrong = where_not(use, stream, operation.is_copy);
    if (wrong.empty()) continue;
    if (!lost_.empty()) refuse_lost(*lost_.begin());
    throw InvariantError(fmt::format("internal error: {} {} {}", operation.name, doing, wrong));
  }
}

bool FakeDriver::can_run(const Stream& stream) const {
  if (stream.queue.empty()) return false;
  const Operation& next = stream.queue.front();
  if (next.meeting) return may_pass(*next.meeting, next.rank) || all_are_there(*next.meeting);
  return !next.waits_for || next.waits_for->happened;
}

bool FakeDriver::may_pass(const Meeting& meeting, int rank) {
  return meeting.done || meeting.given_up[static_cast<std::size_t>(rank)];
}

bool FakeDriver::all_are_there(const Meeting& meeting) {
  return !meeting.broken &&
         std::all_of(meeting.streams.begin(), meeting.streams.end(), [&](const Stream* stream) {
           return stream != nullptr && !stream->queue.empty() &&
                  stream->queue.front().meeting.get() == &meeting;
         });
}

bool FakeDriver::bring_together(Meeting& meeting) {
  if (meeting.being_brought) {
    complain("streams wait for each other in a circle");
    return false;
  }
  struct Bringing {
    bool& flag;
    explicit Bringing(bool& its_flag) : flag(its_flag) { flag = true; }
    ~Bringing() { flag = false; }
  } const bringing(meeting.being_brought);
  for (std::size_t rank = 0; rank < meeting.streams.size(); ++rank)
    while (meeting.streams[rank] != nullptr && !meeting.done) {
      Stream& stream = *meeting.streams[rank];
      if (stream.queue.empty()) return false;  // it went on without it
      if (stream.queue.front().meeting.get() == &meeting) break;
      if (!advance(stream)) return false;
    }
  return meeting.done || all_are_there(meeting);
}

bool FakeDriver::advance(Stream& stream) {
  if (can_run(stream)) {
    run_next(stream);
    return true;
  }
  const Operation& next = stream.queue.front();
  const std::shared_ptr<Event> awaited = next.waits_for;
  if (!next.meeting) return run_until_happened(awaited);
  const std::shared_ptr<Meeting> meeting = next.meeting;
  return bring_together(*meeting);
}

std::shared_ptr<FakeDriver::Meeting> FakeDriver::make_meeting(int ranks, std::function<void()> work) {
  auto meeting = std::make_shared<Meeting>();
  meeting->work = std::move(work);
  meeting->streams.resize(static_cast<std::size_t>(ranks));
  meeting->given_up.resize(static_cast<std::size_t>(ranks));
  return meeting;
}

void FakeDriver::meet(const std::shared_ptr<Meeting>& meeting, int rank, const std::string& name,
                      StreamHandle stream, std::vector<Use> uses) {
  const Lock lock(mutex_);
  Operation operation{name, std::move(uses), {}, {}, {}};
  operation.meeting = meeting;
  operation.rank = rank;
  queue(known(stream), std::move(operation));
  meeting->end = std::max(meeting->end, known(stream).queue.back().queued_at);
  meeting->streams[static_cast<std::size_t>(rank)] = &known(stream);
  changed_.notify_all();
}

void FakeDriver::give_up(Meeting& meeting, int rank) {
  const Lock lock(mutex_);
  meeting.given_up[static_cast<std::size_t>(rank)] = true;
  meeting.streams[static_cast<std::size_t>(rank)] = nullptr;  // which may end next
  changed_.notify_all();
}

void FakeDriver::break_off(Meeting& meeting) {
  const Lock lock(mutex_);
  meeting.broken = true;
}

bool FakeDriver::is_done(const Meeting& meeting) const {
  const Lock lock(mutex_);
  return meeting.done;
}

std::string FakeDriver::no_collectives() { return options_.collectives ? "" : "this build has no NCCL"; }

DeviceCollectives& FakeDriver::collectives() {
  check(collectives_ != nullptr, "collectives are asked for that are not there");
  return *collectives_;
}

void FakeDriver::run_next(Stream& stream) {
  if (fails(FakeCall::run)) {
    lost_.insert(stream.device);
    changed_.notify_all();
  }
  refuse_lost(stream.device);
  const Operation operation = std::move(stream.queue.front());
  stream.queue.pop_front();
  check_uses(operation, stream, "uses");
  if (operation.meeting) {
    if (!may_pass(*operation.meeting, operation.rank)) hold(*operation.meeting, operation);
    stream.free_at = std::max(stream.free_at, operation.meeting->end);
  }
  if (operation.work && (options_.computes || operation.is_copy)) operation.work();
  ++run_;
  stream.free_at = std::max(stream.free_at, operation.queued_at);
  if (operation.waits_for) stream.free_at = std::max(stream.free_at, operation.waits_for->at);
  if (operation.work) stream.free_at += seconds_of(operation);
  last_end_ = std::max(last_end_, stream.free_at);
  if (!operation.happens) return;
  operation.happens->happened = true;
  operation.happens->at = stream.free_at;
}

double FakeDriver::seconds_of(const Operation& operation) const {
  std::size_t bytes = 0;
  for (const Use& use : operation.uses) bytes += use.bytes;
  return options_.seconds ? options_.seconds(operation.name, bytes) : 1e-6;
}

// All are there; the operation is one rank's part in it.
void FakeDriver::hold(Meeting& meeting, const Operation& operation) {
  meeting.work();
  meeting.done = true;
  for (const Stream* stream : meeting.streams) meeting.end = std::max(meeting.end, stream->free_at);
  meeting.end += seconds_of(operation);
}

// What has to run before the event, and now and then something that need not.
bool FakeDriver::run_until_happened(const std::shared_ptr<Event>& event) {
  while (!event->happened) {
    // Streams of a device that is lost end with work on them.
    if (!streams_.contains(event->stream) && !lost_.empty()) refuse_lost(*lost_.begin());
    check(event->stream != nullptr && streams_.contains(event->stream),
          "an event is waited for that nothing records");
    Stream& stream = *event->stream;
    check(!stream.queue.empty(), "an event is waited for that nothing records");
    if (random(4) == 0) run_something_else();
    if (event->happened) break;
    if (!advance(stream)) return false;
  }
  return true;
}

void FakeDriver::wait_until_happened(std::unique_lock<std::recursive_mutex>& lock,
                                     const std::shared_ptr<Event>& event) {
  while (!run_until_happened(event)) changed_.wait(lock);
  double& now = host_at_[std::this_thread::get_id()];
  now = std::max(now, event->at);
}

void FakeDriver::run_something_else() {
  std::vector<Stream*> able;
  for (Stream* stream : streams_)
    if (can_run(*stream)) able.push_back(stream);
  if (!able.empty()) run_next(*able[random(able.size())]);
}

void FakeDriver::enqueue(const std::string& name, StreamHandle stream, std::vector<Use> uses,
                         std::function<void()> work) {
  const Lock lock(mutex_);
  launched_on_[std::this_thread::get_id()] = known(stream).device;
  queue(known(stream), {name, std::move(uses), std::move(work), {}, {}});
}

void FakeDriver::queue(Stream& stream, Operation operation) {
  refuse_lost(stream.device);
  check_uses(operation, stream, "is queued on");
  if (stream.capturing == nullptr) return push(stream, std::move(operation));
  check(!operation.meeting && !operation.waits_for, "a graph is of one stream");
  stream.capturing->operations.push_back(std::move(operation));
}

void FakeDriver::refuse_in_capture(const Stream& stream, const char* what) {
  if (stream.capturing == nullptr) return;
  complain(std::string(what) + " a stream that is captured");
  fail_capture(stream.device, "not permitted when the stream is capturing");
}

void FakeDriver::push(Stream& stream, Operation operation) {
  operation.queued_at = host_at_[std::this_thread::get_id()];
  stream.queue.push_back(std::move(operation));
}

std::byte* FakeDriver::seen_by_work(const std::byte* device_memory) const {
  return seen_ + (device_memory - device_);
}

// ---- DeviceDriver

DeviceProperties FakeDriver::properties(int device) {
  const bool is_last = device == options_.devices - 1;
  const auto [major, minor] =
      is_last ? options_.last_capability.value_or(options_.capability) : options_.capability;
  return {.name = "a fake device",
          .memory_bytes = options_.memory_bytes,
          .major = major,
          .minor = minor,
          .multiprocessors = 1,
          .id = fmt::format("{} {}", options_.ids, device)};
}

std::size_t FakeDriver::used_bytes(int device) const {
  std::size_t used = 0;
  for (const auto& [memory, block] : blocks_) used += block.device == device ? block.bytes : 0;
  return used;
}

std::size_t FakeDriver::free_bytes(int device) {
  const Lock lock(mutex_);
  return options_.memory_bytes - used_bytes(device);
}

void FakeDriver::use(int device) {
  check(device >= 0 && device < options_.devices, "a device is named that is not there");
}

bool FakeDriver::can_reach(int device, int peer) {
  use(device);
  use(peer);
  return device == peer || options_.peers;
}

bool FakeDriver::reach(int device, int peer) {
  if (!can_reach(device, peer)) return false;
  const Lock lock(mutex_);
  reached_.insert({device, peer});
  return true;
}

std::byte* FakeDriver::allocate(int device, std::size_t bytes) {
  use(device);
  const Lock lock(mutex_);
  refuse_lost(device);
  if (fails(FakeCall::allocate) || used_bytes(device) + bytes > options_.memory_bytes) return nullptr;
  // Addresses are not used twice, so that memory that was given back stays so.
  const std::size_t begin = first_unused_;
  first_unused_ += (bytes + 2 * fake_alignment - 1) / fake_alignment * fake_alignment;
  check(first_unused_ <= mapped_bytes_, "a fake device has no addresses left");
  blocks_[device_ + begin] = {bytes, device};
  if (options_.computes) std::memset(seen_ + begin, poison, bytes);
  return device_ + begin;
}

void FakeDriver::free(int device, std::byte* memory) noexcept {
  const Lock lock(mutex_);
  const auto found = blocks_.find(memory);
  if (found == blocks_.end()) return complain("memory is given back that is not there");
  const std::byte* const begin = found->first;
  const std::size_t bytes = found->second.bytes;
  if (found->second.device != device) complain("memory is given back to another device");
  for (const Stream* stream : streams_)
    for (const Operation& operation : stream->queue)
      for (const Use& use : operation.uses)
        if (lost_.empty() && use.begin < begin + bytes && begin < use.begin + use.bytes)
          complain(operation.name + " is queued on memory that is given back");
  const std::size_t first = static_cast<std::size_t>(begin - device_),
                    whole = (first + page - 1) / page * page, end = (first + bytes) / page * page;
  if (whole < end) ::madvise(seen_ + whole, end - whole, MADV_REMOVE);
  blocks_.erase(found);
}

std::byte* FakeDriver::allocate_pinned(std::size_t bytes) {
  const Lock lock(mutex_);
  if (fails(FakeCall::allocate_pinned)) return nullptr;
  auto* const memory = new std::byte[bytes];
  pinned_[memory] = {bytes, host};
  pinned_seen_[memory].resize(bytes);
  return memory;
}

void FakeDriver::free_pinned(std::byte* memory) noexcept {
  const Lock lock(mutex_);
  const auto found = pinned_.find(memory);
  if (found == pinned_.end()) return complain("pinned memory is given back that is not there");
  for (const PinnedUse& use : pinned_uses_)
    if (lost_.empty() && overlap(use.begin, use.bytes, memory, found->second.bytes))
      complain("a copy is queued on pinned memory that is given back");
  pinned_.erase(found);
  pinned_seen_.erase(memory);
  delete[] memory;
}

StreamHandle FakeDriver::create_stream(int device) {
  use(device);
  const Lock lock(mutex_);
  refuse_lost(device);
  if (fails(FakeCall::create_stream)) fail("no stream could be made on device {}: planted", device);
  auto* const stream = new Stream();
  stream->device = device;
  streams_.insert(stream);
  return {stream, device};
}

void FakeDriver::destroy_stream(StreamHandle stream) noexcept {
  const Lock lock(mutex_);
  auto* const found = static_cast<Stream*>(stream.handle);
  if (streams_.erase(found) == 0) return complain("a stream is destroyed that is not there");
  if (!found->queue.empty() && lost_.empty()) complain("a stream is destroyed with work on it");
  if (found->capturing) complain("a stream is destroyed that is captured");
  delete found;
}

void FakeDriver::synchronize(StreamHandle stream) {
  std::unique_lock lock(mutex_);
  Stream& waited = known(stream);
  refuse_lost(waited.device);
  refuse_in_capture(waited, "the host waits for");
  const auto end = std::make_shared<Event>();
  end->stream = &waited;
  push(waited, {"synchronize", {}, {}, {}, end});
  wait_until_happened(lock, end);
}

EventHandle FakeDriver::create_event(int device) {
  if (options_.before_event) options_.before_event();
  use(device);
  const Lock lock(mutex_);
  refuse_lost(device);
  if (fails(FakeCall::create_event)) fail("no event could be made on device {}: planted", device);
  auto* const event = new std::shared_ptr<Event>(std::make_shared<Event>());
  (*event)->device = device;
  events_.insert(event);
  return {event, device};
}

void FakeDriver::destroy_event(EventHandle event) noexcept {
  const Lock lock(mutex_);
  auto* const found = static_cast<std::shared_ptr<Event>*>(event.handle);
  if (events_.erase(found) == 0) return complain("an event is destroyed that is not there");
  delete found;
}

void FakeDriver::record(EventHandle event, StreamHandle stream) {
  const Lock lock(mutex_);
  const auto& recorded = known(event);
  check(recorded->stream == nullptr, "an event is recorded twice");
  recorded->stream = &known(stream);
  check(recorded->device == recorded->stream->device, "an event is recorded on another device");
  refuse_lost(recorded->device);
  refuse_in_capture(*recorded->stream, "an event is recorded on");
  push(*recorded->stream, {"record", {}, {}, {}, recorded});
}

void FakeDriver::wait(StreamHandle stream, EventHandle event) {
  const Lock lock(mutex_);
  const auto& awaited = known(event);
  check(awaited->stream != nullptr, "a stream waits for an event that is not recorded");
  refuse_in_capture(known(stream), "an event holds up");
  queue(known(stream), {"wait", {}, {}, awaited, {}});
}

bool FakeDriver::has_happened(EventHandle event) {
  const Lock lock(mutex_);
  const std::shared_ptr<Event> asked = known(event);
  refuse_lost(asked->device);
  if (!asked->happened && random(2) == 0) run_until_happened(asked);  // time goes by
  return asked->happened && (!options_.seconds || asked->at <= host_at_[std::this_thread::get_id()]);
}

void FakeDriver::synchronize(EventHandle event) {
  std::unique_lock lock(mutex_);
  const std::shared_ptr<Event> awaited = known(event);
  refuse_lost(awaited->device);
  wait_until_happened(lock, awaited);
}

double FakeDriver::seconds_between(EventHandle first, EventHandle second) {
  const Lock lock(mutex_);
  check(known(first)->happened && known(second)->happened, "time is asked between events that are to come");
  check(known(first)->device == known(second)->device, "time is asked between events of two devices");
  return known(second)->at - known(first)->at;
}

void FakeDriver::begin_capture(StreamHandle stream) {
  const Lock lock(mutex_);
  Stream& captured = known(stream);
  refuse_lost(captured.device);
  refuse_in_capture(captured, "another capture begins on");
  if (fails(FakeCall::capture)) fail_capture(captured.device, "planted");
  captured.capturing = std::make_unique<Graph>();
  captured.capturing->device = captured.device;
}

GraphHandle FakeDriver::end_capture(StreamHandle stream) {
  const Lock lock(mutex_);
  Stream& captured = known(stream);
  check(captured.capturing != nullptr, "a capture ends that did not begin");
  std::unique_ptr<Graph> graph = std::move(captured.capturing);
  refuse_lost(captured.device);
  if (fails(FakeCall::capture)) fail_capture(captured.device, "planted");
  graphs_.insert(graph.get());
  return {graph.release(), captured.device};
}

void FakeDriver::abandon_capture(StreamHandle stream) noexcept {
  const Lock lock(mutex_);
  if (!known(stream).capturing) complain("a capture is abandoned that did not begin");
  known(stream).capturing.reset();
}

// Its operations look at memory when they run, as those of every kernel.
void FakeDriver::launch(GraphHandle graph, StreamHandle stream) {
  const Lock lock(mutex_);
  auto* const launched = static_cast<Graph*>(graph.handle);
  check(graphs_.contains(launched), "a graph is launched that is not there");
  Stream& on = known(stream);
  refuse_lost(on.device);
  refuse_in_capture(on, "a graph is launched on");
  check(launched->device == on.device, "a graph is launched on another device");
  if (fails(FakeCall::launch_graph)) fail_graph_launch(on.device, "planted");
  for (const Operation& operation : launched->operations) queue(on, operation);
}

void FakeDriver::destroy_graph(GraphHandle graph) noexcept {
  const Lock lock(mutex_);
  auto* const found = static_cast<Graph*>(graph.handle);
  if (graphs_.erase(found) == 0) return complain("a graph is destroyed that is not there");
  delete found;
}

void FakeDriver::copy(const RowsCopy& rows, StreamHandle stream) {
  const std::size_t read = extent(rows.from_stride, rows.row_bytes, rows.rows),
                    written = extent(rows.to_stride, rows.row_bytes, rows.rows);
  auto* const source = static_cast<const std::byte*>(rows.from);
  auto* const destination = static_cast<std::byte*>(rows.to);
  const Lock lock(mutex_);
  Stream& on = known(stream);
  const std::optional<int> reads = where(rows.kind == CopyKind::from_host ? pinned_ : blocks_, source, read),
                           writes = where(rows.kind == CopyKind::to_host ? pinned_ : blocks_, destination,
                                          written);
  check(reads.has_value(), "a copy reads what is not where it says");
  check(writes.has_value(), "a copy writes what is not where it says");
  check(*reads == on.device || *writes == on.device, "a copy runs on a device that it does not touch");
  if (rows.kind != CopyKind::on_device) refuse_in_capture(on, "the host is copied from or to by");
  refuse_lost(on.device);
  std::function<void()> work;
  if (rows.kind == CopyKind::from_host)
    work = copy_from_host(rows, read);
  else if (rows.kind == CopyKind::to_host)
    work = copy_to_host(rows, written);
  else
    work = [=, this] { move_rows(rows, seen_by_work(destination), seen_by_work(source)); };
  queue(on, {"transfer", {{source, read}, {destination, written}}, std::move(work), {}, {}, true});
}

std::byte* FakeDriver::seen_pinned(const std::byte* memory) {
  auto& [begin, seen] = *std::prev(pinned_seen_.upper_bound(memory));
  return seen.data() + (memory - begin);
}

// Until it has run nobody is to change what it reads.
std::function<void()> FakeDriver::copy_from_host(const RowsCopy& rows, std::size_t read) {
  auto* const source = static_cast<std::byte*>(const_cast<void*>(rows.from));
  auto* const destination = static_cast<std::byte*>(rows.to);
  const bool of_device = std::any_of(pinned_uses_.begin(), pinned_uses_.end(), [&](const PinnedUse& use) {
    return use.writes && overlap(use.begin, use.bytes, source, read);
  });
  if (!of_device) std::memcpy(seen_pinned(source), source, read);
  const std::uint64_t sum = of_device ? 0 : sum_of(source, read);
  const auto use = pinned_uses_.insert(pinned_uses_.end(), {source, read, false, of_device});
  return [=, this] {
    if (!use->hidden && sum_of(source, read) != sum)
      complain("pinned memory is changed while a copy is to read it");
    move_rows(rows, seen_by_work(destination), seen_pinned(source));
    pinned_uses_.erase(use);
  };
}

// Until it has run nobody is to read what it writes.
std::function<void()> FakeDriver::copy_to_host(const RowsCopy& rows, std::size_t written) {
  auto* const source = static_cast<const std::byte*>(rows.from);
  auto* const destination = static_cast<std::byte*>(rows.to);
  for (PinnedUse& use : pinned_uses_)
    if (overlap(use.begin, use.bytes, destination, written)) use.hidden = true;
  std::memset(destination, poison, written);
  const auto use = pinned_uses_.insert(pinned_uses_.end(), {destination, written, true, false});
  return [=, this] {
    move_rows(rows, seen_pinned(destination), seen_by_work(source));
    if (!use->hidden) move_rows(rows, destination, seen_by_work(source));
    pinned_uses_.erase(use);
  };
}

void FakeDriver::fill_bytes(std::byte* to, std::uint8_t value, std::size_t bytes, StreamHandle stream) {
  enqueue("fill_bytes", stream, {{to, bytes}}, [=, this] { std::memset(seen_by_work(to), value, bytes); });
}

void FakeDriver::reduce(const Reduction& reduction, StreamHandle stream) {
  const auto bytes = static_cast<std::size_t>(reduction.count * element_bytes(reduction.dtype));
  std::vector<const std::byte*> sources;
  std::vector<std::byte*> destinations;
  std::vector<Use> uses;
  for (const std::byte* source : reduction.sources) {
    sources.push_back(seen_by_work(source));
    uses.push_back({source, bytes});
  }
  for (std::byte* destination : reduction.destinations) {
    destinations.push_back(seen_by_work(destination));
    uses.push_back({destination, bytes});
  }
  enqueue("reduce", stream, std::move(uses),
          [op = reduction.op, dtype = reduction.dtype, count = reduction.count, sources, destinations] {
            reduce_elements(op, dtype, sources, 0, destinations, 0, count);
          });
  check_launch("reduce");
}

void FakeDriver::check_launch(const char* kernel) {
  const Lock lock(mutex_);
  if (fails(FakeCall::launch)) fail_launch(kernel, launched_on_[std::this_thread::get_id()], "planted");
}

std::shared_ptr<KernelBackend> FakeDriver::make_backend(Arena& arena, const PrecisionRecipe& precision,
                                                        Numerics) {
  return std::make_shared<QueuedKernels>(*this, arena,
                                         options_.tf32_unasked || multiplies_in_tf32(precision));
}

}  // namespace echelon::checks
