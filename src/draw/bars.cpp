#include "draw/bars.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "base/utf8.h"

namespace echelon {
namespace {

bool is_drawn(const Span& span) {
  return is_compute(span.instruction.op) || (span.instruction.op == Op::step && span.end > span.begin);
}

// For each rank, the shade of each of its stages. Where a stage lives on two ranks (DualPipe) the copy that
// sees the first microbatch belongs to the first direction; elsewhere a rank's stages count from the lowest.
std::vector<std::map<int, int>> chunks_of(const Timeline& timeline, bool& has_directions) {
  std::vector<std::map<int, int>> first_microbatch(timeline.ranks.size());
  std::map<int, std::pair<int, int>> holders;  // of a stage: how many, and the smallest microbatch
  for (std::size_t r = 0; r < timeline.ranks.size(); ++r)
    for (const Span& span : timeline.ranks[r]) {
      if (!is_compute(span.instruction.op) || is_of_head(span.instruction.op)) continue;
      const auto [at, is_new] =
          first_microbatch[r].try_emplace(span.instruction.stage, span.instruction.microbatch);
      at->second = std::min(at->second, span.instruction.microbatch);
    }
  for (const auto& stages : first_microbatch)
    for (const auto& [stage, microbatch] : stages) {
      auto& [count, smallest] = holders.try_emplace(stage, 0, microbatch).first->second;
      ++count;
      smallest = std::min(smallest, microbatch);
    }
  std::vector<std::map<int, int>> chunks(timeline.ranks.size());
  for (std::size_t r = 0; r < chunks.size(); ++r)
    for (const auto& [stage, microbatch] : first_microbatch[r]) {
      const int counted = static_cast<int>(chunks[r].size());
      const auto& [count, smallest] = holders[stage];
      has_directions = has_directions || count > 1;
      chunks[r][stage] = count == 1 ? counted : microbatch == smallest ? 0 : 1;
    }
  return chunks;
}

}  // namespace

Bars bars_of(const Timeline& timeline) {
  Bars bars;
  const auto chunks = chunks_of(timeline, bars.has_directions);
  double start = std::numeric_limits<double>::infinity();
  for (const auto& spans : timeline.ranks)
    for (const Span& span : spans)
      if (is_drawn(span)) start = std::min(start, span.begin);
  for (std::size_t r = 0; r < timeline.ranks.size(); ++r) {
    auto& row = bars.ranks.emplace_back();
    std::vector<const Span*> drawn;
    for (const Span& span : timeline.ranks[r])
      if (is_drawn(span)) drawn.push_back(&span);
    bool is_second = false;
    for (std::size_t k = 0; k < drawn.size(); ++k) {
      const Span& span = *drawn[k];
      const Instruction& i = span.instruction;
      const auto found = is_of_head(i.op) ? chunks[r].end() : chunks[r].find(i.stage);
      // Measured, or when the second part had to wait, they take turns and are drawn where they are.
      const bool is_first = i.overlaps_next && k + 1 < drawn.size() && drawn[k + 1]->begin < span.end;
      const Part part = is_second ? Part::second : is_first ? Part::first : Part::whole;
      row.push_back(
          {i, found == chunks[r].end() ? 0 : found->second, part, span.begin - start, span.end - start});
      is_second = is_first;
      bars.has_pairs = bars.has_pairs || is_second;
      bars.num_chunks = std::max(bars.num_chunks, row.back().chunk + 1);
      bars.largest_microbatch = std::max(bars.largest_microbatch, i.microbatch);
      bars.makespan = std::max(bars.makespan, row.back().end);
    }
  }
  return bars;
}

double unit_of(const std::vector<Bars>& tracks) {
  double longest = 0;
  for (const Bars& bars : tracks) longest = std::max(longest, bars.makespan);
  if (longest <= 0) return 0;
  const double grain = longest * 1e-9;   // sums of the same durations differ in their last bits
  std::map<std::int64_t, double> times;  // by their number of grains
  const auto add = [&](double time) { times.try_emplace(std::llround(time / grain), time); };
  for (const Bars& bars : tracks)
    for (const auto& row : bars.ranks)
      for (const Bar& bar : row) {
        add(bar.end - bar.begin);
        add(bar.begin);
        if (times.size() > 20000) return 0;  // measured
      }
  double unit = 0;
  for (const auto& [grains, time] : times) {
    if (grains == 0) continue;
    double a = std::max(unit, time), b = std::min(unit, time);
    while (b > 4 * grain) {  // Euclid; what is left over is rounding
      const double rest = std::fmod(a, b);
      a = b;
      b = b - rest < 4 * grain ? 0 : rest;
    }
    unit = a;
    if (unit < longest * 1e-5) return 0;
  }
  return unit;
}

double round_step(double least) {
  if (!(least > 0)) return 1;
  const double power = std::pow(10, std::floor(std::log10(least)));
  for (double step : {1.0, 2.0, 5.0})
    if (step * power >= least * (1 - 1e-9)) return step * power;
  return 10 * power;
}

bool Colour::is_dark() const { return 299 * red + 587 * green + 114 * blue < 130000; }

std::string Colour::hex() const { return fmt::format("#{:02x}{:02x}{:02x}", red, green, blue); }

int Colour::of_terminal() const {
  const auto level = [](int v) { return v < 48 ? 0 : v < 115 ? 1 : (v - 35) / 40; };
  return 16 + 36 * level(red) + 6 * level(green) + level(blue);
}

Colour colour_of(Op op, int chunk, int num_chunks) {
  struct Shades {
    Colour first, last;
  };
  const Shades range = op == Op::F    ? Shades{{0x1f, 0x5f, 0xa8}, {0xa9, 0xcd, 0xf0}}
                       : op == Op::B  ? Shades{{0xd9, 0x7b, 0x06}, {0xfb, 0xd0, 0x8f}}
                       : op == Op::W  ? Shades{{0x0b, 0x7a, 0x5b}, {0x9f, 0xdb, 0xc5}}
                       : op == Op::BW ? Shades{{0xb0, 0x3a, 0x2e}, {0xf2, 0xb0, 0xa4}}
                       : op == Op::V  ? Shades{{0xe3, 0xc3, 0x12}, {0xe3, 0xc3, 0x12}}
                       : op == Op::VW ? Shades{{0x7d, 0x6a, 0x0a}, {0x7d, 0x6a, 0x0a}}
                                      : Shades{{0x5b, 0x50, 0x75}, {0xc5, 0xbe, 0xd8}};
  const double share = num_chunks < 2 ? 0 : static_cast<double>(chunk) / (num_chunks - 1);
  const auto mix = [&](std::uint8_t a, std::uint8_t b) {
    return static_cast<std::uint8_t>(std::lround(a + (b - a) * share));
  };
  return {mix(range.first.red, range.last.red), mix(range.first.green, range.last.green),
          mix(range.first.blue, range.last.blue)};
}

std::vector<Op> ops_of(const std::vector<Bars>& tracks) {
  std::vector<Op> ops;
  for (Op op : {Op::F, Op::B, Op::W, Op::BW, Op::V, Op::VW, Op::step}) {
    const auto has = [op](const std::vector<Bar>& row) {
      return std::any_of(row.begin(), row.end(), [op](const Bar& bar) { return bar.instruction.op == op; });
    };
    if (std::any_of(tracks.begin(), tracks.end(),
                    [&](const Bars& bars) { return std::any_of(bars.ranks.begin(), bars.ranks.end(), has); }))
      ops.push_back(op);
  }
  return ops;
}

const char* describe(Op op) {
  switch (op) {
    case Op::F:
      return "forward";
    case Op::B:
      return "gradient of the input";
    case Op::W:
      return "gradient of the weights";
    case Op::BW:
      return "backward, both gradients";
    case Op::V:
      return "output layer, a part";
    case Op::VW:
      return "gradient of its weights";
    case Op::step:
      return "optimizer step";
    case Op::validate:
      return "validation of the last step";
    default:
      return "message";
  }
}

std::string describe_shades(const std::vector<Bars>& tracks) {
  bool has_chunks = false, has_directions = false;
  for (const Bars& bars : tracks) {
    has_chunks = has_chunks || (bars.num_chunks > 1 && !bars.has_directions);
    has_directions = has_directions || bars.has_directions;
  }
  if (!has_chunks && !has_directions) return "";
  return fmt::format("lighter: {}{}{}", has_chunks ? "later chunk" : "",
                     has_chunks && has_directions ? " or " : "", has_directions ? "other direction" : "");
}

std::string escape_markup(const std::string& text) {
  std::string valid = valid_utf8(text), out;
  for (const std::string_view absent_in_xml : {"\xEF\xBF\xBE", "\xEF\xBF\xBF"})  // U+FFFE and U+FFFF
    for (std::size_t at; (at = valid.find(absent_in_xml)) != std::string::npos;)
      valid.replace(at, absent_in_xml.size(), "\xEF\xBF\xBD");
  for (char c : valid)
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '"')
      out += "&quot;";
    else if (static_cast<unsigned char>(c) >= ' ')
      out += c;
  return out;
}

// Also safe inside a page's <script>: no < is left.
std::string escape_json(const std::string& text) {
  std::string out;
  for (char c : valid_utf8(text))
    if (c == '"' || c == '\\')
      (out += '\\') += c;
    else if (c == '<' || static_cast<unsigned char>(c) < ' ')
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(static_cast<unsigned char>(c)));
    else
      out += c;
  return out;
}

}  // namespace echelon
