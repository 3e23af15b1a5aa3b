// What one rank did, as rows of a drawing: its thread's row, below it those of its communication by axis, and
// what ran beside. In a row, slices lie inside one another or apart.
#pragma once

#include <string>
#include <vector>

#include "draw/bars.h"
#include "schedule/timeline.h"

namespace echelon {

// What a slice is an example of: what the legend names, and the colour tells apart.
class SliceKind {
 public:
  static SliceKind of(Op op) { return {From::op, static_cast<int>(op)}; }
  static SliceKind of(Activity activity) { return {From::activity, static_cast<int>(activity)}; }
  // The rank's thread in a call of this axis, or what was under way while it did other things.
  static SliceKind in_call(Axis axis) { return {From::axis, static_cast<int>(axis)}; }
  static SliceKind hidden(Axis axis) { return {From::hidden_axis, static_cast<int>(axis)}; }

  std::string name() const;
  const char* category() const;  // "pass", "message", "work", "beside", "in call"
  Colour colour() const;
  bool is_pass() const { return from_ == From::op && is_compute(static_cast<Op>(value_)); }
  auto operator<=>(const SliceKind&) const = default;

 private:
  enum class From : std::uint8_t { activity, op, axis, hidden_axis };
  SliceKind(From from, int value) : from_(from), value_(value) {}
  From from_;
  int value_;
};

struct SliceNote {
  const char* what;
  std::string value;
  bool is_number = true;
};

struct Slice {
  std::string name;  // "0F3", "tp all_gather", "optimizer"
  SliceKind kind;
  const char* category = "";  // its kind's, or "communication": a call, in its own row
  TraceTime begin = 0, end = 0;
  std::vector<SliceNote> notes;
  int microbatch = -1;  // of a pass
  // Of a message: index of its call in the rank's trace; -1: none.
  std::ptrdiff_t message = -1;
};

struct RankRow {
  std::string name;           // "compute", "tp", "tp (2)"
  std::vector<Slice> slices;  // by their begins, the outer before the inner
};

// The first row is that of the rank's thread.
std::vector<RankRow> rank_rows(const RankTimeline& rank);

// Which slice each lies in directly; -1: none.
std::vector<std::ptrdiff_t> parents_of(const RankRow& row);

// What is seen of a row from above: no two overlap, and an inner slice is in front of the outer.
struct SeenSlice {
  std::size_t slice = 0;
  TraceTime begin = 0, end = 0;
};
std::vector<SeenSlice> seen_of(const RankRow& row);

}  // namespace echelon
