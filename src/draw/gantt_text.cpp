#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "draw/bars.h"

namespace echelon {
namespace {

using std::size_t;

constexpr double near_enough = 0.75;
constexpr int most_folds = 8;  // more are not read but scrolled past

struct Look {
  Op op = Op::F;
  int chunk = 0;
  bool operator==(const Look&) const = default;
};
// One column of the terminal.
struct Cell {
  char letter = ' ';
  bool is_bar = false;
  Look look;
};
using CellLine = std::vector<Cell>;

class TextGantt {
 public:
  TextGantt(const std::vector<Track>& tracks, const TextOptions& options)
      : tracks_(tracks), options_(options) {
    size_t ranks = 1;
    int microbatch = 0;
    for (const Track& track : tracks) {
      bars_.push_back(bars_of(track.timeline));
      ranks = std::max(ranks, track.timeline.ranks.size());
      makespan_ = std::max(makespan_, bars_.back().makespan);
      microbatch = std::max(microbatch, bars_.back().largest_microbatch);
    }
    digits_ = static_cast<int>(fmt::formatted_size("{}", microbatch));
    prefix_ = static_cast<int>(fmt::formatted_size("rank {}  ", ranks - 1));
    choose_scale();
  }

  std::string draw() {
    for (size_t t = 0; t < tracks_.size(); ++t) {
      if (t > 0) out_ += '\n';
      if (!tracks_[t].title.empty())
        out_ += tracks_[t].title + (tracks_[t].note.empty() ? "" : ": " + tracks_[t].note) + "\n";
      draw_track(bars_[t]);
    }
    draw_legend();
    return std::move(out_);
  }

 private:
  int room() const { return std::max(options_.width - prefix_, 10); }

  // Columns per unit such that every bar has room for its label; or, where that folds too often, one
  // part without labels.
  void choose_scale() {
    unit_ = unit_of(bars_);
    double narrowest = 0;  // columns per time
    for (const Bars& bars : bars_)
      for (const auto& row : bars.ranks)
        for (const Bar& bar : row) {
          if (!(bar.end > bar.begin)) continue;
          // The label, with the gap that follows. A name is shown whole: B is another pass than BW.
          const double label = digits_ + 1 + (options_.is_colour ? 0 : static_cast<double>(mark(bar).size()));
          narrowest = std::max(narrowest, label / (bar.end - bar.begin) * (bar.part == Part::whole ? 1 : 2));
        }
    if (unit_ > 0) columns_per_unit_ = static_cast<int>(std::ceil(narrowest * unit_ - 1e-6));
    units_per_fold_ = columns_per_unit_ > 0 ? room() / columns_per_unit_ : 0;
    is_squeezed_ = unit_ <= 0 || units_per_fold_ < 1 ||
                   std::ceil(makespan_ / unit_ / units_per_fold_ - 1e-6) > most_folds;
    if (!is_squeezed_) return;
    columns_per_unit_ = 1;
    units_per_fold_ = room();
    unit_ = makespan_ > 0 ? makespan_ / room() : 1;
  }

  int column(double time) const { return static_cast<int>(std::lround(time / unit_ * columns_per_unit_)); }

  std::string mark(const Bar& bar) const {
    const std::string name = bar.instruction.op == Op::step ? "S" : op_name(bar.instruction.op);
    if (bar.chunk % 2 == 0) return name;
    return name == "BW" ? "bw" : std::string(1, static_cast<char>(name[0] - 'A' + 'a'));
  }

  void draw_track(const Bars& bars) {
    const int columns = std::max(column(bars.makespan), 1), fold = units_per_fold_ * columns_per_unit_;
    std::vector<CellLine> lines;
    for (const auto& row : bars.ranks)
      lines.push_back(is_squeezed_ ? squeezed_line(row, columns) : line(row, columns, fold));
    for (int from = 0; from < columns; from += fold) {
      const int to = std::min(from + fold, columns);
      if (from > 0) out_ += '\n';
      draw_axis(from, to);
      for (size_t r = 0; r < lines.size(); ++r) {
        out_ += fmt::format("{:<{}}", fmt::format("rank {}", r), prefix_);
        put(lines[r], from, to, bars.num_chunks);
      }
    }
  }

  void draw_axis(int from, int to) {
    std::string axis(static_cast<size_t>(prefix_), ' ');
    const double step = std::max(round_step(8 * unit_ / columns_per_unit_), is_squeezed_ ? 0 : unit_);
    for (double k = std::ceil(from * unit_ / columns_per_unit_ / step - 1e-6);; ++k) {
      const int at = column(k * step);
      if (at >= to) break;
      const size_t place = static_cast<size_t>(prefix_ + at - from);
      if (place < axis.size()) continue;
      axis.append(place - axis.size(), ' ');
      axis += fmt::format("{:.6g} ", k * step + 0.0);
    }
    axis.erase(axis.find_last_not_of(' ') + 1);
    out_ += axis + '\n';
  }

  CellLine line(const std::vector<Bar>& row, int columns, int fold) const {
    CellLine line(static_cast<size_t>(columns));
    for (int c = 0; c < columns; c += columns_per_unit_) line[static_cast<size_t>(c)].letter = '.';
    for (const Bar& bar : row) {
      const int begin = column(bar.begin), end = column(bar.end), middle = (begin + end) / 2;
      fill(line, bar, bar.part == Part::second ? middle : begin, bar.part == Part::first ? middle : end,
           fold);
    }
    return line;
  }

  void fill(CellLine& line, const Bar& bar, int begin, int end, int fold) const {
    const int size = end - begin;
    if (size < 1) return;
    const std::string number = fmt::format("{}", bar.instruction.microbatch);
    std::string label = mark(bar) + (bar.instruction.op == Op::step ? "" : number);
    if (options_.is_colour && bar.instruction.op != Op::step) label = number;
    const int room = std::max(size - (bar.part == Part::first ? 0 : 1), 1);
    label.resize(std::min(label.size(), static_cast<size_t>(room)));
    // A label is not torn where the drawing folds.
    int at = begin;
    const int length = static_cast<int>(label.size()), next_fold = (begin / fold + 1) * fold;
    if (at + length > next_fold && end - 1 - next_fold >= length) at = next_fold;
    // In colour the last column stays empty, so that bars are told apart; without, a dash goes on to there.
    const char filling = options_.is_colour || size <= columns_per_unit_ ? ' ' : '-';
    for (int c = begin; c < begin + room; ++c) {
      Cell& cell = line[static_cast<size_t>(c)];
      const bool is_label = c >= at && c < at + length;
      cell = {is_label ? label[static_cast<size_t>(c - at)] : filling, true, {bar.instruction.op, bar.chunk}};
    }
    if (bar.part == Part::first && !options_.is_colour && size > length)
      line[static_cast<size_t>(end - 1)].letter = '&';
    for (int c = begin + room; c < end; ++c) line[static_cast<size_t>(c)] = {};
  }

  // In each column what takes most of its time; where others take nearly as much, what the column before does
  // not show: else columns that are nearly as wide as a pair would show one part of many pairs, and then the
  // other.
  CellLine squeezed_line(const std::vector<Bar>& row, int columns) const {
    struct Share {
      Look look;
      double time = 0;
      char letter = ' ';
    };
    std::vector<std::vector<Share>> shares(static_cast<size_t>(columns));
    for (const Bar& bar : row) {
      const double middle = (bar.begin + bar.end) / 2, begin = bar.part == Part::second ? middle : bar.begin,
                   end = bar.part == Part::first ? middle : bar.end;
      const int last = std::min(static_cast<int>(end / unit_), columns - 1);
      for (int c = static_cast<int>(begin / unit_); c <= last; ++c) {
        const double time = std::min(end, (c + 1) * unit_) - std::max(begin, c * unit_);
        auto& here = shares[static_cast<size_t>(c)];
        const Look look{bar.instruction.op, bar.chunk};
        const auto same =
            std::find_if(here.begin(), here.end(), [&](const Share& s) { return s.look == look; });
        if (same != here.end())
          same->time += time;
        else
          here.push_back({look, time, mark(bar)[0]});
      }
    }
    CellLine line(shares.size());
    for (size_t c = 0; c < line.size(); ++c) {
      double busy = 0;
      const Share* most = nullptr;
      for (const Share& s : shares[c]) {
        busy += s.time;
        if (most == nullptr || s.time > most->time) most = &s;
      }
      for (const Share& s : shares[c])
        if (c > 0 && line[c - 1].look.op == most->look.op && s.look.op != most->look.op &&
            s.time >= near_enough * most->time) {
          most = &s;
          break;
        }
      line[c] = most == nullptr || busy < unit_ / 2
                    ? Cell{'.', false, {}}
                    : Cell{options_.is_colour ? ' ' : most->letter, true, most->look};
    }
    return line;
  }

  void put(const CellLine& line, int from, int to, int num_chunks) {
    const auto is_empty = [&](const Cell& cell) {
      return cell.letter == ' ' && !(options_.is_colour && cell.is_bar);
    };
    while (to > from && is_empty(line[static_cast<size_t>(to - 1)])) --to;
    for (int c = from; c < to; ++c) {
      const Cell& cell = line[static_cast<size_t>(c)];
      if (options_.is_colour) {
        const Cell* before = c > from ? &line[static_cast<size_t>(c - 1)] : nullptr;
        const bool is_new = before == nullptr || before->is_bar != cell.is_bar || before->look != cell.look;
        if (is_new && before != nullptr && before->is_bar) out_ += "\x1b[0m";
        if (is_new && cell.is_bar) start_colour(cell.look, num_chunks);
      }
      out_ += cell.letter;
    }
    if (options_.is_colour && to > from && line[static_cast<size_t>(to - 1)].is_bar) out_ += "\x1b[0m";
    out_ += '\n';
  }

  void start_colour(const Look& look, int num_chunks) {
    const Colour colour = colour_of(look.op, look.chunk, num_chunks);
    out_ += fmt::format("\x1b[38;5;{};48;5;{}m", colour.is_dark() ? 231 : 16, colour.of_terminal());
  }

  void draw_legend() {
    int chunks = 1;
    bool has_pair = false, has_directions = false;
    for (const Bars& bars : bars_) {
      chunks = std::max(chunks, bars.num_chunks);
      has_pair = has_pair || bars.has_pairs;
      has_directions = has_directions || bars.has_directions;
    }
    out_ += '\n';
    int used = 0;  // columns of this line
    // Whose line is full goes to the next one.
    const auto begin_entry = [&](int columns) {
      if (used > 0) {
        const bool fits = used + 3 + columns <= options_.width;
        out_ += fits ? "   " : "\n";
        used = fits ? used + 3 : 0;
      }
      used += columns;
    };
    const auto add_entry = [&](const std::string& text) {
      begin_entry(static_cast<int>(text.size()));
      out_ += text;
    };
    const std::vector<Op> ops = ops_of(bars_);
    for (auto at = ops.begin(); at != ops.end(); ++at) {
      const Op op = *at;
      const auto name_of = [](Op o) { return o == Op::step ? "S" : op_name(o); };
      std::string name = name_of(op), words = fmt::format(" {}", describe(op));
      if (!options_.is_colour) {
        // One column has one letter: what begins with it is told together.
        const auto has_letter = [&](Op o) { return is_squeezed_ && name_of(o)[0] == name[0]; };
        if (std::any_of(ops.begin(), at, has_letter)) continue;
        for (auto other = at + 1; other != ops.end(); ++other)
          if (has_letter(*other)) words += fmt::format(", or {}", describe(*other));
        add_entry((is_squeezed_ ? name.substr(0, 1) : name) + words);
        continue;
      }
      begin_entry(static_cast<int>(name.size() + words.size()) + 2 * chunks);
      for (int c = 0; c < chunks; ++c) {
        start_colour({op, c}, chunks);
        out_ += c == 0 ? " " + name + " " : "  ";
      }
      out_ += "\x1b[0m" + words;
    }
    add_entry(". idle");
    if (chunks > 1)
      add_entry(options_.is_colour ? describe_shades(bars_)
                : has_directions   ? "small letters: the other direction"
                                   : "small letters: every other chunk");
    if (has_pair && !options_.is_colour && !is_squeezed_) add_entry("& run together");
    out_ += fmt::format("\none column is {:.4g} unit{} of time", unit_ / columns_per_unit_,
                        std::abs(unit_ / columns_per_unit_ - 1) < 1e-9 ? "" : "s");
    if (!is_squeezed_) out_.erase(out_.rfind('\n'));
    out_ += '\n';
  }

  const std::vector<Track>& tracks_;
  const TextOptions& options_;
  std::vector<Bars> bars_;
  double makespan_ = 0, unit_ = 1;
  int digits_ = 1, prefix_ = 0, columns_per_unit_ = 0, units_per_fold_ = 0;
  bool is_squeezed_ = false;
  std::string out_;
};

}  // namespace

std::string gantt_text(const std::vector<Track>& tracks, const TextOptions& options) {
  return TextGantt(tracks, options).draw();
}

}  // namespace echelon
