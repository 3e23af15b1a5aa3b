#include "train/rank_timeline.h"

#include <fmt/format.h>

#include <cstring>
#include <type_traits>
#include <utility>

#include "base/error.h"

namespace echelon {
namespace {

// Processes of one program on machines of one kind: values travel as they lie in memory.
class PackedTimeline {
 public:
  PackedTimeline() = default;
  explicit PackedTimeline(std::vector<std::byte> bytes) : bytes_(std::move(bytes)) {}
  const std::vector<std::byte>& bytes() const { return bytes_; }

  template <class T>
  void put(const std::vector<T>& values) {
    static_assert(std::is_trivially_copyable_v<T>);
    const std::uint64_t count = values.size();
    append(&count, sizeof count);
    append(values.data(), values.size() * sizeof(T));
  }
  void put(const std::string& text) { put(std::vector<char>(text.begin(), text.end())); }
  template <class T>
  std::vector<T> take() {
    std::uint64_t count = 0;
    extract(&count, sizeof count);
    std::vector<T> values(count);
    extract(values.data(), count * sizeof(T));
    return values;
  }
  std::string take_text() {
    const auto text = take<char>();
    return {text.begin(), text.end()};
  }

 private:
  void append(const void* data, std::size_t size) {
    const auto* const begin = static_cast<const std::byte*>(data);
    bytes_.insert(bytes_.end(), begin, begin + size);
  }
  void extract(void* data, std::size_t size) {
    check(size <= bytes_.size() - at_, "a timeline has been packed as it is unpacked");
    if (size > 0) std::memcpy(data, bytes_.data() + at_, size);
    at_ += size;
  }
  std::vector<std::byte> bytes_;
  std::size_t at_ = 0;
};

std::vector<std::byte> packed(const RankTimeline& t) {
  PackedTimeline bytes;
  bytes.put(t.name);
  bytes.put(t.place);
  bytes.put(t.pipeline);
  bytes.put(t.trace.work);
  bytes.put(t.trace.calls);
  bytes.put(std::vector<std::uint64_t>{t.trace.groups.size()});
  for (const std::string& group : t.trace.groups) bytes.put(group);
  return bytes.bytes();
}

RankTimeline unpacked(std::vector<std::byte> all) {
  PackedTimeline bytes(std::move(all));
  RankTimeline t;
  t.name = bytes.take_text();
  t.place = bytes.take_text();
  t.pipeline = bytes.take<Span>();
  t.trace.work = bytes.take<WorkSpan>();
  t.trace.calls = bytes.take<CallSpan>();
  const auto groups = bytes.take<std::uint64_t>();
  for (std::uint64_t i = 0; i < groups.front(); ++i) t.trace.groups.push_back(bytes.take_text());
  return t;
}

}  // namespace

void StepTrace::begin(std::int64_t step) {
  if (recorder_ == nullptr) return;
  recorder_->begin_step(step);
  step_ = {Activity::step, static_cast<std::int32_t>(step), recorder_->now()};
}

void StepTrace::end() {
  if (recorder_ == nullptr) return;
  step_.end = recorder_->now();
  recorder_->add(step_);
  recorder_->end_step();
}

void StepTrace::next() {
  end();
  begin(step_.which + 1);
}

RankTimeline rank_timeline(const Rank& rank, const char* name, std::vector<Span> pipeline) {
  RankTimeline t;
  t.name = fmt::format("{} {}", name, rank.index());
  for (Axis axis : rank.mesh().order)
    t.place += fmt::format("{}{} {}", t.place.empty() ? "" : ", ", axis_name(axis), rank.coordinate(axis));
  t.pipeline = std::move(pipeline);
  if (rank.recorder() != nullptr) t.trace = rank.recorder()->trace();
  return t;
}

std::vector<RankTimeline> gather_timelines(const Rank& rank, RankTimeline mine) {
  const auto group = rank.join_job_aside("timelines");
  const auto number = [](std::uint64_t& n) { return Tensor::view_of(&n, DType::u8, {sizeof n}); };
  const auto view = [](std::vector<std::byte>& bytes) {
    return Tensor::view_of(bytes.data(), DType::u8, {static_cast<std::int64_t>(bytes.size())});
  };
  if (group->rank() > 0) {
    std::vector<std::byte> bytes = packed(mine);
    std::uint64_t size = bytes.size();
    group->send(number(size), 0).wait();
    group->send(view(bytes), 0).wait();
    return {};
  }
  std::vector<RankTimeline> all{std::move(mine)};
  for (int from = 1; from < group->size(); ++from) {
    std::uint64_t size = 0;
    group->recv(number(size), from).wait();
    std::vector<std::byte> bytes(size);
    group->recv(view(bytes), from).wait();
    all.push_back(unpacked(std::move(bytes)));
  }
  return all;
}

}  // namespace echelon
