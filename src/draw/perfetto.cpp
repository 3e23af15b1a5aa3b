// https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: complete events ("X"),
// times in microseconds.
#include <fmt/format.h>

#include <iterator>

#include "draw/bars.h"

namespace echelon {

std::string perfetto_json(const std::vector<Track>& tracks, double microseconds_per_unit) {
  std::string json = "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [";
  const auto out = std::back_inserter(json);
  const char* comma = "\n";
  for (std::size_t t = 0; t < tracks.size(); ++t) {
    fmt::format_to(
        out, "{}{{\"ph\": \"M\", \"name\": \"process_name\", \"pid\": {}, \"args\": {{\"name\": \"{}\"}}}}",
        comma, t, escape_json(tracks[t].title));
    comma = ",\n";
    const Bars bars = bars_of(tracks[t].timeline);
    for (std::size_t r = 0; r < bars.ranks.size(); ++r) {
      fmt::format_to(out,
                     ",\n{{\"ph\": \"M\", \"name\": \"thread_name\", \"pid\": {0}, \"tid\": {1}, \"args\": "
                     "{{\"name\": \"rank "
                     "{1}\"}}}},\n{{\"ph\": \"M\", \"name\": \"thread_sort_index\", \"pid\": {0}, \"tid\": "
                     "{1}, \"args\": "
                     "{{\"sort_index\": {1}}}}}",
                     t, r);
      for (const Bar& bar : bars.ranks[r])
        fmt::format_to(
            out,
            ",\n{{\"ph\": \"X\", \"name\": \"{}\", \"cat\": \"{}\", \"pid\": {}, \"tid\": {}, \"ts\": "
            "{:.12g}, \"dur\": {:.12g}, \"args\": {{\"stage\": {}, \"microbatch\": {}, \"version\": {}}}}}",
            to_string(bar.instruction), op_name(bar.instruction.op), t, r, bar.begin * microseconds_per_unit,
            (bar.end - bar.begin) * microseconds_per_unit, bar.instruction.stage, bar.instruction.microbatch,
            bar.instruction.version);
    }
  }
  return json + "\n]}\n";
}

}  // namespace echelon
