// https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: complete events ("X"),
// flows ("s", "f"), times in microseconds.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <tuple>

#include "draw/bars.h"
#include "draw/rank_rows.h"

namespace echelon {
namespace {

class TraceEvents {
 public:
  void name_process(std::size_t pid, const std::string& name) {
    metadata("process_name", pid, 0, fmt::format("\"name\": \"{}\"", escape_json(name)));
    metadata("process_sort_index", pid, 0, fmt::format("\"sort_index\": {}", pid));
  }
  void name_thread(std::size_t pid, std::size_t tid, const std::string& name) {
    metadata("thread_name", pid, tid, fmt::format("\"name\": \"{}\"", escape_json(name)));
    metadata("thread_sort_index", pid, tid, fmt::format("\"sort_index\": {}", tid));
  }
  // `args`: the members of a JSON object. Times as text: nanoseconds would not all survive as doubles.
  void complete(const std::string& name, const char* category, std::size_t pid, std::size_t tid,
                const std::string& begin, const std::string& duration, const std::string& args) {
    event(
        fmt::format("\"ph\": \"X\", \"name\": \"{}\", \"cat\": \"{}\", \"pid\": {}, \"tid\": {}, \"ts\": {}, "
                    "\"dur\": {}, \"args\": {{{}}}",
                    escape_json(name), category, pid, tid, begin, duration, args));
  }
  // One end of an arrow, inside a slice of the thread.
  void flow(bool is_start, std::size_t id, std::size_t pid, std::size_t tid, const std::string& time) {
    event(
        fmt::format("\"ph\": \"{}\", \"name\": \"message\", \"cat\": \"message\", \"id\": {}, \"pid\": {}, "
                    "\"tid\": {}, \"ts\": {}{}",
                    is_start ? "s" : "f", id, pid, tid, time, is_start ? "" : ", \"bp\": \"e\""));
  }
  std::string json() const { return "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [" + events_ + "\n]}\n"; }

 private:
  void metadata(const char* what, std::size_t pid, std::size_t tid, const std::string& args) {
    event(fmt::format("\"ph\": \"M\", \"name\": \"{}\", \"pid\": {}, \"tid\": {}, \"args\": {{{}}}", what,
                      pid, tid, args));
  }
  void event(const std::string& members) {
    fmt::format_to(std::back_inserter(events_), "{}\n{{{}}}", events_.empty() ? "" : ",", members);
  }
  std::string events_;
};

std::string microseconds(TraceTime nanoseconds) {
  const auto magnitude = static_cast<std::uint64_t>(nanoseconds < 0 ? -nanoseconds : nanoseconds);
  return fmt::format("{}{}.{:03}", nanoseconds < 0 ? "-" : "", magnitude / 1000, magnitude % 1000);
}

std::string args_of(const Slice& slice) {
  std::string args;
  for (const SliceNote& note : slice.notes)
    fmt::format_to(std::back_inserter(args), "{}\"{}\": {}", args.empty() ? "" : ", ", note.what,
                   note.is_number ? note.value : "\"" + escape_json(note.value) + "\"");
  return args;
}

// What makes a send and its receive the same message.
using MessageKey = std::tuple<Axis, bool, std::string, std::size_t, std::size_t, std::int32_t>;
MessageKey key_of(const CallSpan& call, const Trace& trace, std::size_t rank) {
  const auto peer = static_cast<std::size_t>(call.peer);
  const bool sent = call.verb == Verb::send;
  return {call.axis,          call.is_part,       trace.groups.at(static_cast<std::size_t>(call.group)),
          sent ? rank : peer, sent ? peer : rank, call.number};
}

}  // namespace

std::string perfetto_json(const std::vector<Track>& tracks, double microseconds_per_unit) {
  TraceEvents events;
  const auto time = [&](double units) { return fmt::format("{:.12g}", units * microseconds_per_unit); };
  for (std::size_t t = 0; t < tracks.size(); ++t) {
    events.name_process(t, tracks[t].title);
    const Bars bars = bars_of(tracks[t].timeline);
    for (std::size_t r = 0; r < bars.ranks.size(); ++r) {
      events.name_thread(t, r, fmt::format("rank {}", r));
      for (const Bar& bar : bars.ranks[r]) {
        const Instruction& i = bar.instruction;
        events.complete(to_string(i), op_name(i.op), t, r, time(bar.begin), time(bar.end - bar.begin),
                        fmt::format("\"stage\": {}, \"microbatch\": {}, \"version\": {}", i.stage,
                                    i.microbatch, i.version));
      }
    }
  }
  return events.json();
}

std::string perfetto_json(const std::vector<RankTimeline>& ranks) {
  TraceEvents events;
  struct End {
    std::size_t pid, tid;
    const Slice* slice;
  };
  std::map<MessageKey, End> sends, receives;
  std::vector<std::vector<RankRow>> rows;
  for (const RankTimeline& rank : ranks) rows.push_back(rank_rows(rank));
  for (std::size_t pid = 0; pid < ranks.size(); ++pid) {
    const RankTimeline& rank = ranks[pid];
    events.name_process(pid, rank.place.empty() ? rank.name : rank.name + ": " + rank.place);
    for (std::size_t tid = 0; tid < rows[pid].size(); ++tid) {
      events.name_thread(pid, tid, rows[pid][tid].name);
      for (const Slice& slice : rows[pid][tid].slices) {
        events.complete(slice.name, slice.category, pid, tid, microseconds(slice.begin),
                        microseconds(slice.end - slice.begin), args_of(slice));
        if (slice.message < 0) continue;
        const CallSpan& call = rank.trace.calls[static_cast<std::size_t>(slice.message)];
        (call.verb == Verb::send ? sends : receives)
            .try_emplace(key_of(call, rank.trace, pid), End{pid, tid, &slice});
      }
    }
  }
  std::size_t id = 0;
  for (const auto& [key, from] : sends) {
    const auto to = receives.find(key);
    if (to == receives.end()) continue;  // before or behind what is kept
    ++id;
    events.flow(true, id, from.pid, from.tid, microseconds(from.slice->begin));
    events.flow(false, id, to->second.pid, to->second.tid,
                microseconds(std::max(to->second.slice->begin, to->second.slice->end - 1)));
  }
  return events.json();
}

}  // namespace echelon
