#include "draw/rank_rows.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/units.h"

namespace echelon {

std::string SliceKind::name() const {
  switch (from_) {
    case From::op: {
      const auto op = static_cast<Op>(value_);
      return op == Op::send || op == Op::recv ? op_name(op) : describe(op);
    }
    case From::activity:
      return activity_name(static_cast<Activity>(value_));
    case From::axis:
      return fmt::format("in a call of {}", axis_name(static_cast<Axis>(value_)));
    case From::hidden_axis:
      return fmt::format("{} under way", axis_name(static_cast<Axis>(value_)));
  }
  return "";
}

const char* SliceKind::category() const {
  switch (from_) {
    case From::op:
      return is_compute(static_cast<Op>(value_))       ? "pass"
             : static_cast<Op>(value_) == Op::step     ? "work"
             : static_cast<Op>(value_) == Op::validate ? "work"
                                                       : "message";
    case From::activity:
      return is_beside(static_cast<Activity>(value_)) ? "beside" : "work";
    case From::axis:
    case From::hidden_axis:
      return "in call";
  }
  return "";
}

// Passes have the colours of all timelines; an axis has one for what holds the rank up, and a lighter one
// for what is hidden.
Colour SliceKind::colour() const {
  const auto lighter = [](Colour c) {
    const auto mix = [](std::uint8_t v) { return static_cast<std::uint8_t>(v + (255 - v) * 3 / 5); };
    return Colour{mix(c.red), mix(c.green), mix(c.blue)};
  };
  const auto of_axis = [](Axis axis) {
    return axis == Axis::tp   ? Colour{0x8e, 0x24, 0xaa}
           : axis == Axis::dp ? Colour{0x5d, 0x7a, 0x12}
           : axis == Axis::pp ? Colour{0x54, 0x5f, 0x6b}
           : axis == Axis::cp ? Colour{0x00, 0x83, 0x8f}
                              : Colour{0xad, 0x14, 0x57};
  };
  switch (from_) {
    case From::op: {
      const auto op = static_cast<Op>(value_);
      return op == Op::send || op == Op::recv ? lighter(of_axis(Axis::pp)) : colour_of(op, 0, 1);
    }
    case From::axis:
      return of_axis(static_cast<Axis>(value_));
    case From::hidden_axis:
      return lighter(of_axis(static_cast<Axis>(value_)));
    case From::activity:
      break;
  }
  switch (static_cast<Activity>(value_)) {
    case Activity::step:
      return {0xdf, 0xe3, 0xe7};
    case Activity::attention_forward:
      return {0x4a, 0x90, 0xd9};
    case Activity::attention_backward:
      return {0xd8, 0x6f, 0x64};
    case Activity::keys_arriving:
      return lighter(of_axis(Axis::cp));
    case Activity::load_data:
      return {0xa1, 0x88, 0x7f};
    case Activity::reduce_gradients:
      return {0xc5, 0xd4, 0x8c};
    case Activity::gradient_norm:
      return {0xb3, 0x9d, 0xdb};
    case Activity::optimizer:
      return {0x5b, 0x50, 0x75};
    case Activity::share_parameters:
      return {0x7e, 0x9a, 0x3c};
    case Activity::count_routing:
      return {0xe0, 0xa3, 0xbd};
    case Activity::meet:
    case Activity::checkpoint_wait:
      return {0xef, 0xd3, 0xa4};
    case Activity::validation:
      return {0xc9, 0xdc, 0xef};
    case Activity::checkpoint_copy:
    case Activity::fingerprint:
    case Activity::checkpoint_commit:
    case Activity::checkpoint_write:
      return {0xd4, 0xa0, 0x17};
    case Activity::straggle:
      return {0x21, 0x21, 0x21};
  }
  return {};
}

namespace {

// Each slice goes to the first row where it lies inside all those that are open, or apart from them.
std::vector<RankRow> in_rows(const std::string& name, std::vector<Slice> slices) {
  std::stable_sort(slices.begin(), slices.end(), [](const Slice& a, const Slice& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end > b.end;
  });
  std::vector<RankRow> rows;
  std::vector<std::vector<TraceTime>> open;  // ends, of each row
  for (Slice& slice : slices) {
    std::size_t row = 0;
    for (;; ++row) {
      if (row == rows.size()) {
        rows.push_back({row == 0 ? name : fmt::format("{} ({})", name, row + 1), {}});
        open.emplace_back();
      }
      auto& ends = open[row];
      while (!ends.empty() && ends.back() <= slice.begin) ends.pop_back();
      if (ends.empty() || slice.end <= ends.back()) break;
    }
    open[row].push_back(slice.end);
    rows[row].slices.push_back(std::move(slice));
  }
  return rows;
}

SliceNote number(const char* what, std::int64_t value) { return {what, fmt::format("{}", value)}; }

Slice slice_of(const Span& span) {
  const Instruction& i = span.instruction;
  // Seconds were made from whole nanoseconds: rounding gives these back.
  const auto time = [](double seconds) { return static_cast<TraceTime>(std::llround(1e9 * seconds)); };
  const SliceKind kind = SliceKind::of(i.op);
  return {to_string(i),
          kind,
          kind.category(),
          time(span.begin),
          time(span.end),
          {number("stage", i.stage), number("microbatch", i.microbatch), number("version", i.version)},
          kind.is_pass() ? i.microbatch : -1};
}

Slice slice_of(const WorkSpan& span) {
  const SliceKind kind = SliceKind::of(span.activity);
  Slice slice{activity_name(span.activity), kind, kind.category(), span.begin, span.end, {}};
  if (span.activity == Activity::step) {
    slice.name += fmt::format(" {}", span.which);
    slice.notes.push_back(number("step", span.which));
  } else if (span.which >= 0) {
    slice.name += fmt::format(", keys of {}", span.which);
    slice.notes.push_back(number("keys_of", span.which));
  }
  return slice;
}

std::string call_name(const CallSpan& call) {
  return fmt::format("{} {}", axis_name(call.axis), verb_name(call.verb));
}

Slice slice_of(const CallSpan& call, const Trace& trace, std::size_t index) {
  const bool is_hidden = call.waited > call.posted;
  Slice slice{call_name(call), is_hidden ? SliceKind::hidden(call.axis) : SliceKind::in_call(call.axis),
              "communication", call.begin,
              call.end,        {}};
  slice.notes = {number("bytes", call.bytes),
                 number("in_call_ns", call.posted - call.begin),
                 number("waited_ns", call.end - call.waited),
                 number("hidden_ns", call.waited - call.posted),
                 {"group", trace.groups.at(static_cast<std::size_t>(call.group)), false}};
  if (call.step > 0) slice.notes.push_back(number("step", call.step));
  if (call.peer >= 0)
    slice.notes.push_back(number(call.verb == Verb::send   ? "to_rank"
                                 : call.verb == Verb::recv ? "from_rank"
                                                           : "root",
                                 call.peer));
  if (call.verb == Verb::send || call.verb == Verb::recv) slice.message = static_cast<std::ptrdiff_t>(index);
  return slice;
}

// The stretches of a call in which the rank's thread did nothing else.
void add_blocked(const CallSpan& call, std::vector<Slice>& slices) {
  const auto add = [&](const char* how, TraceTime begin, TraceTime end) {
    const SliceKind kind = SliceKind::in_call(call.axis);
    if (end > begin) slices.push_back({call_name(call) + how, kind, kind.category(), begin, end, {}});
  };
  if (call.posted == call.waited) return add("", call.begin, call.end);
  add(": call", call.begin, call.posted);
  add(": wait", call.waited, call.end);
}

}  // namespace

std::vector<RankRow> rank_rows(const RankTimeline& rank) {
  const Trace& trace = rank.trace;
  std::vector<Slice> thread;
  for (const Span& span : rank.pipeline) thread.push_back(slice_of(span));
  for (const WorkSpan& span : trace.work)
    if (!is_beside(span.activity)) thread.push_back(slice_of(span));
  for (const CallSpan& call : trace.calls)
    if (!call.is_part) add_blocked(call, thread);
  std::vector<RankRow> rows = in_rows("compute", std::move(thread));
  if (rows.empty()) rows.push_back({"compute", {}});
  const auto append = [&](const std::string& name, std::vector<Slice> slices) {
    for (RankRow& row : in_rows(name, std::move(slices))) rows.push_back(std::move(row));
  };
  for (Axis axis : traffic_axes)
    for (bool parts : {false, true}) {
      std::vector<Slice> slices;
      for (std::size_t i = 0; i < trace.calls.size(); ++i) {
        const CallSpan& call = trace.calls[i];
        if (call.axis != axis || call.is_part != parts) continue;
        slices.push_back(slice_of(call, trace, i));
        if (call.waited > call.posted) add_blocked(call, slices);
      }
      append(std::string(axis_name(axis)) + (parts ? " collectives' messages" : ""), std::move(slices));
    }
  for (Activity activity : {Activity::keys_arriving, Activity::checkpoint_write}) {
    std::vector<Slice> slices;
    for (const WorkSpan& span : trace.work)
      if (span.activity == activity) slices.push_back(slice_of(span));
    append(activity_name(activity), std::move(slices));
  }
  return rows;
}

std::vector<std::ptrdiff_t> parents_of(const RankRow& row) {
  std::vector<std::ptrdiff_t> parents, open;
  for (const Slice& slice : row.slices) {
    while (!open.empty() && row.slices[static_cast<std::size_t>(open.back())].end <= slice.begin)
      open.pop_back();
    parents.push_back(open.empty() ? -1 : open.back());
    open.push_back(static_cast<std::ptrdiff_t>(parents.size()) - 1);
  }
  return parents;
}

std::vector<SeenSlice> seen_of(const RankRow& row) {
  std::vector<SeenSlice> seen;
  std::vector<std::size_t> open;
  TraceTime at = 0;  // what is before it has been handed out
  const auto show = [&](std::size_t slice, TraceTime until) {
    if (until > at) seen.push_back({slice, at, until});
    at = std::max(at, until);
  };
  const auto close = [&](TraceTime until) {
    while (!open.empty() && row.slices[open.back()].end <= until) {
      show(open.back(), row.slices[open.back()].end);
      open.pop_back();
    }
  };
  for (std::size_t i = 0; i < row.slices.size(); ++i) {
    const Slice& slice = row.slices[i];
    close(slice.begin);
    if (!open.empty()) show(open.back(), slice.begin);
    at = std::max(at, slice.begin);
    if (i == 0) at = slice.begin;
    open.push_back(i);
  }
  while (!open.empty()) {
    show(open.back(), row.slices[open.back()].end);
    open.pop_back();
  }
  return seen;
}

}  // namespace echelon
