#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <string_view>

#include "base/error.h"
#include "draw/bars.h"
#include "spec/embedded.h"

namespace echelon {

extern const EmbeddedFile embedded_pages[];

std::string gantt_html(const std::vector<Track>& tracks) {
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
  json += "]}";
  std::string page = embedded_pages[0].text;
  const std::string_view mark = "/*DATA*/null";
  const std::size_t at = page.find(mark);
  check(at != std::string::npos, "the page has a place for its data");
  return page.replace(at, mark.size(), json);
}

}  // namespace echelon
