#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "draw/bars.h"
#include "draw/rank_rows.h"
#include "spec/embedded.h"

namespace echelon {

extern const EmbeddedFile embedded_pages[];

namespace {

// Texts of a slice's tip: its name, and what else is known of it, names and values by turns.
std::string tip_json(const RankRow& row, std::size_t index, std::ptrdiff_t parent) {
  const Slice& slice = row.slices[index];
  std::string json = "[\"" + escape_json(slice.name) + "\"";
  const auto add = [&](const std::string& name, const std::string& value) {
    fmt::format_to(std::back_inserter(json), ",\"{}\",\"{}\"", escape_json(name), escape_json(value));
  };
  if (parent >= 0) add("inside", row.slices[static_cast<std::size_t>(parent)].name);
  for (const SliceNote& note : slice.notes) add(note.what, note.value);
  return json + "]";
}

// What every rank did, of the page's `done`.
std::string done_json(const std::vector<RankTimeline>& ranks) {
  std::vector<std::vector<RankRow>> rows;
  TraceTime first = std::numeric_limits<TraceTime>::max(), last = std::numeric_limits<TraceTime>::min();
  std::map<SliceKind, std::size_t> kinds;
  for (const RankTimeline& rank : ranks) {
    rows.push_back(rank_rows(rank));
    for (const RankRow& row : rows.back())
      for (const Slice& slice : row.slices) {
        first = std::min(first, slice.begin);
        last = std::max(last, slice.end);
        kinds.try_emplace(slice.kind, 0);
      }
  }
  std::string json = "{\"kinds\":[", texts;
  const auto out = std::back_inserter(json);
  std::size_t count = 0;
  for (auto& [kind, index] : kinds) {
    index = count++;
    fmt::format_to(out, "{}{{\"name\":\"{}\",\"colour\":\"{}\",\"onIt\":\"{}\",\"isPass\":{}}}",
                   index == 0 ? "" : ",", kind.name(), kind.colour().hex(),
                   kind.colour().is_dark() ? "#ffffff" : "#1a1a1a", kind.is_pass());
  }
  fmt::format_to(out, "],\"makespan\":{:.9g},\"ranks\":[",
                 last > first ? 1e-9 * static_cast<double>(last - first) : 0);
  std::size_t num_texts = 0;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    fmt::format_to(out, "{}\n{{\"name\":\"{}\",\"place\":\"{}\",\"rows\":[", r == 0 ? "" : ",",
                   escape_json(ranks[r].name), escape_json(ranks[r].place));
    for (std::size_t w = 0; w < rows[r].size(); ++w) {
      const RankRow& row = rows[r][w];
      const std::vector<std::ptrdiff_t> parents = parents_of(row);
      fmt::format_to(out, "{}\n{{\"name\":\"{}\",\"bars\":[", w == 0 ? "" : ",", escape_json(row.name));
      for (std::size_t i = 0; i < row.slices.size(); ++i)
        texts += (texts.empty() ? "" : ",\n") + tip_json(row, i, parents[i]);
      const char* comma = "";
      for (const SeenSlice& seen : seen_of(row)) {
        const Slice& slice = row.slices[seen.slice];
        fmt::format_to(out, "{}{},{},{},{:.9g},{:.9g}", std::exchange(comma, ","), kinds.at(slice.kind),
                       num_texts + seen.slice, slice.microbatch,
                       1e-9 * static_cast<double>(seen.begin - first),
                       1e-9 * static_cast<double>(seen.end - first));
      }
      num_texts += row.slices.size();
      json += "]}";
    }
    json += "]}";
  }
  return json + "],\"texts\":[" + texts + "]}";
}

}  // namespace

std::string gantt_html(const std::vector<Track>& tracks, const std::vector<RankTimeline>& ranks) {
  std::vector<Bars> bars;
  int chunks = 1;
  for (const Track& track : tracks) {
    bars.push_back(bars_of(track.timeline));
    chunks = std::max(chunks, bars.back().num_chunks);
  }
  const std::vector<Op> ops = ops_of(bars);
  std::string json = "{\"ops\":[";
  const auto out = std::back_inserter(json);
  for (Op op : ops) {
    fmt::format_to(out, "{}{{\"name\":\"{}\",\"letter\":\"{}\",\"colours\":[", op == ops.front() ? "" : ",",
                   describe(op), op == Op::step ? " step " : op_name(op));
    for (int c = 0; c < chunks; ++c) {
      const Colour colour = colour_of(op, c, chunks);
      fmt::format_to(out, "{}[\"{}\",\"{}\"]", c == 0 ? "" : ",", colour.hex(),
                     colour.is_dark() ? "#ffffff" : "#1a1a1a");
    }
    json += "]}";
  }
  json += "],\"shades\":\"" + describe_shades(bars) + "\",\"tracks\":[";
  for (std::size_t t = 0; t < tracks.size(); ++t) {
    fmt::format_to(out, "{}\n{{\"title\":\"{}\",\"note\":\"{}\",\"makespan\":{:.9g},\"ranks\":[",
                   t == 0 ? "" : ",", escape_json(tracks[t].title), escape_json(tracks[t].note),
                   bars[t].makespan);
    for (std::size_t r = 0; r < bars[t].ranks.size(); ++r) {
      json += r == 0 ? "\n[" : ",\n[";
      for (const Bar& bar : bars[t].ranks[r]) {
        const Instruction& i = bar.instruction;
        fmt::format_to(out, "{},{},{},{},{},{:.9g},{:.9g},",
                       std::find(ops.begin(), ops.end(), i.op) - ops.begin(), bar.chunk, i.stage,
                       i.microbatch, static_cast<int>(bar.part), bar.begin, bar.end);
      }
      if (json.back() == ',') json.pop_back();
      json += ']';
    }
    json += "]}";
  }
  json += "],\n\"done\":" + done_json(ranks) + "}";
  std::string page = embedded_pages[0].text;
  const std::string_view mark = "/*DATA*/null";
  const std::size_t at = page.find(mark);
  check(at != std::string::npos, "the page has a place for its data");
  return page.replace(at, mark.size(), json);
}

}  // namespace echelon
