#include "draw/page.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/json_text.h"
#include "draw/bars.h"
#include "draw/rank_rows.h"
#include "spec/embedded.h"

namespace echelon {

extern const EmbeddedFile embedded_page_shell[];
extern const EmbeddedFile embedded_page_styles[];
extern const EmbeddedFile embedded_page_scripts[];
extern const EmbeddedFile embedded_page_served[];

namespace {

std::string quoted(const std::string& text) { return json_text(nlohmann::ordered_json(text)); }

// Texts of a slice's tip: its name, and what else is known of it, names and values by turns.
std::string tip_json(const RankRow& row, std::size_t index, std::ptrdiff_t parent) {
  const Slice& slice = row.slices[index];
  std::string json = "[" + quoted(slice.name);
  const auto add = [&](const std::string& name, const std::string& value) {
    fmt::format_to(std::back_inserter(json), ",{},{}", quoted(name), quoted(value));
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
    fmt::format_to(out, "{}\n{{\"name\":{},\"place\":{},\"rows\":[", r == 0 ? "" : ",",
                   quoted(ranks[r].name), quoted(ranks[r].place));
    for (std::size_t w = 0; w < rows[r].size(); ++w) {
      const RankRow& row = rows[r][w];
      const std::vector<std::ptrdiff_t> parents = parents_of(row);
      fmt::format_to(out, "{}\n{{\"name\":{},\"bars\":[", w == 0 ? "" : ",", quoted(row.name));
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

// Of each bar: operation, chunk, stage, microbatch, part of a pair (0 whole, 1 first, 2 second), begin, end.
std::string bars_json(const Bars& bars, const std::vector<Op>& ops) {
  std::string json = "[";
  for (std::size_t r = 0; r < bars.ranks.size(); ++r) {
    json += r == 0 ? "\n[" : ",\n[";
    const char* comma = "";
    for (const Bar& bar : bars.ranks[r]) {
      const Instruction& i = bar.instruction;
      fmt::format_to(std::back_inserter(json), "{}{},{},{},{},{},{:.9g},{:.9g}", std::exchange(comma, ","),
                     std::find(ops.begin(), ops.end(), i.op) - ops.begin(), bar.chunk, i.stage, i.microbatch,
                     static_cast<int>(bar.part), bar.begin, bar.end);
    }
    json += ']';
  }
  return json + "]";
}

// What each rank keeps by category, and times and amounts by turns.
std::string memory_json(const std::vector<RankHolding>& ranks) {
  std::string json = "[";
  const auto out = std::back_inserter(json);
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    json += r == 0 ? "\n{\"kept\":[" : ",\n{\"kept\":[";
    const char* comma = "";
    for (MemoryCategory c : all_memory_categories)
      fmt::format_to(out, "{}{}", std::exchange(comma, ","), ranks[r].kept[c]);
    json += "],\"held\":[";
    comma = "";
    for (const auto& [time, held] : ranks[r].activations)
      fmt::format_to(out, "{}{:.9g},{:.9g}", std::exchange(comma, ","), time, held);
    json += "]}";
  }
  return json + "]";
}

// The page's `categories`, `ops`, `shades` and `tracks`.
std::string tracks_json(const Page& page) {
  std::vector<Bars> bars, doubled;
  int chunks = 1;
  for (const PageTrack& one : page.tracks) {
    bars.push_back(bars_of(one.track.timeline));
    doubled.push_back(one.two_steps ? bars_of(*one.two_steps) : Bars());
    chunks = std::max(chunks, bars.back().num_chunks);
  }
  const std::vector<Op> ops = ops_of(bars);
  std::string json = "\"categories\":[";
  const auto out = std::back_inserter(json);
  for (MemoryCategory c : all_memory_categories)
    fmt::format_to(out, "{}\"{}\"", c == all_memory_categories.front() ? "" : ",", memory_category_name(c));
  json += "],\"ops\":[";
  for (Op op : ops) {
    fmt::format_to(out, "{}{{\"name\":\"{}\",\"letter\":\"{}\",\"forward\":{},\"colours\":[",
                   op == ops.front() ? "" : ",", describe(op), op == Op::step ? " step " : op_name(op),
                   is_forward(op));
    for (int c = 0; c < chunks; ++c) {
      const Colour colour = colour_of(op, c, chunks);
      fmt::format_to(out, "{}[\"{}\",\"{}\"]", c == 0 ? "" : ",", colour.hex(),
                     colour.is_dark() ? "#ffffff" : "#1a1a1a");
    }
    json += "]}";
  }
  json += "],\"shades\":\"" + describe_shades(bars) + "\",\"tracks\":[";
  for (std::size_t t = 0; t < page.tracks.size(); ++t) {
    const PageTrack& one = page.tracks[t];
    fmt::format_to(out,
                   "{}\n{{\"title\":{},\"note\":{},\"makespan\":{:.9g},\"bubble\":{:.9g},"
                   "\"microbatches\":{},\"peaks\":[{:.9g}],\"ranks\":",
                   t == 0 ? "" : ",", quoted(one.track.title), quoted(one.track.note),
                   bars[t].makespan, one.track.timeline.bubble_fraction(), one.step_microbatches,
                   fmt::join(one.peak_activations, ","));
    json += bars_json(bars[t], ops);
    if (one.two_steps)
      fmt::format_to(out, ",\"two_makespan\":{:.9g},\"two\":{}", doubled[t].makespan,
                     bars_json(doubled[t], ops));
    if (!one.memory.empty()) json += ",\"memory\":" + memory_json(one.memory);
    json += "}";
  }
  return json + "]";
}

std::string page_part(const EmbeddedFile* files, std::string_view name) {
  while (files->name != nullptr && files->name != name) ++files;
  check(files->name != nullptr, "the page's parts are embedded");
  return files->text;
}

}  // namespace

std::string page_json(const Page& page) {
  std::string json = "{", tracks = tracks_json(page);
  const auto text = [&](const char* name, const std::string& value) {
    json += fmt::format("\"{}\":{},\n", name, quoted(value));
  };
  text("kind", page.kind);
  text("title", page.title);
  text("subtitle", page.subtitle);
  text("command", page.command);
  text("time_unit", page.time_unit);
  text("memory_unit", page.memory_unit);
  json += tracks;
  if (!page.ranks.empty()) json += ",\n\"done\":" + done_json(page.ranks);
  for (const auto& [name, value] : page.members) json += fmt::format(",\n\"{}\":{}", name, value);
  return json + "}";
}

std::string page_html(const Page& page, PageUse use) {
  std::string html = page_part(embedded_page_shell, "page");
  const auto put = [&](const std::string& mark, const std::string& text) {
    const std::size_t at = html.find(mark);
    check(at != std::string::npos, "the page has a place for each of its parts");
    html.replace(at, mark.size(), text);
  };
  put("/*{{style}}*/", page_part(embedded_page_styles, "style"));
  std::string scripts;
  for (const EmbeddedFile* file = embedded_page_scripts; file->name != nullptr; ++file) scripts += file->text;
  if (use == PageUse::served) scripts += page_part(embedded_page_served, "live");
  put("/*{{script}}*/", scripts);
  // "<" stands in texts alone, where this is another way to write it: nothing in them ends the script.
  std::string json = page_json(page);
  for (std::size_t at = 0; (at = json.find('<', at)) != std::string::npos;) json.replace(at, 1, "\\u003c");
  put("{{data}}", json);
  put("{{title}}", escape_markup(page.title));  // whose mark stands before all that the others put there
  return html;
}

}  // namespace echelon
