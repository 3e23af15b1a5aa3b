#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>

#include "draw/bars.h"

namespace echelon {
namespace {

using std::size_t;

class SvgGantt {
  // In pixels.
  static constexpr double margin = 16, title_height = 26, axis_height = 26, legend_height = 30,
                          track_gap = 14;
  static constexpr double letter_width = 0.6;  // of the font's size

 public:
  explicit SvgGantt(const std::vector<Track>& tracks) : tracks_(tracks), out_(text_) {
    size_t most_ranks = 1;
    std::vector<double> lengths;
    int microbatch = 0;
    for (const Track& track : tracks) {
      bars_.push_back(bars_of(track.timeline));
      most_ranks = std::max(most_ranks, bars_.back().ranks.size());
      makespan_ = std::max(makespan_, bars_.back().makespan);
      microbatch = std::max(microbatch, bars_.back().largest_microbatch);
      for (const auto& row : bars_.back().ranks)
        for (const Bar& bar : row)
          if (bar.instruction.op == Op::F && bar.part == Part::whole) lengths.push_back(bar.end - bar.begin);
    }
    const bool has_pairs = std::any_of(bars_.begin(), bars_.end(), [](const Bars& b) { return b.has_pairs; });
    row_height_ = most_ranks <= 16 ? (has_pairs ? 32 : 26) : most_ranks <= 32 ? 18 : 12;
    font_ = std::min(12.0, row_height_ - 4);
    label_width_ =
        12 + font_ * letter_width * static_cast<double>(fmt::formatted_size("rank {}", most_ranks - 1));
    // As wide as makes a short forward hold its number, within what a page can show.
    double typical = makespan_ / 40;
    if (!lengths.empty()) {
      std::nth_element(lengths.begin(), lengths.begin() + static_cast<std::ptrdiff_t>(lengths.size() / 10),
                       lengths.end());
      typical = lengths[lengths.size() / 10];
    }
    const double digits = static_cast<double>(fmt::formatted_size("{}", microbatch));
    const double wanted = typical > 0 ? makespan_ / typical * (digits * 11 * letter_width + 10) : 0;
    chart_width_ = std::clamp(wanted, 760.0, 2400.0);
    scale_ = makespan_ > 0 ? chart_width_ / makespan_ : 1;
  }

  std::string draw() {
    const double left = margin + label_width_;
    double y = margin;
    std::string body;
    y = draw_legend(y);
    for (size_t t = 0; t < tracks_.size(); ++t) y = draw_track(tracks_[t], bars_[t], left, y) + track_gap;
    body.swap(text_);
    fmt::format_to(
        out_,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 "
        "{0:.0f} {1:.0f}\" font-family=\"Inter, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif\">\n"
        "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n",
        std::max(left + chart_width_, legend_end_) + margin, y - track_gap + margin / 2);
    return text_ + body + "</svg>\n";
  }

 private:
  double draw_legend(double y) {
    int chunks = 1;
    for (const Bars& bars : bars_) chunks = std::max(chunks, bars.num_chunks);
    double x = margin;
    const auto word = [&](const std::string& text) {
      fmt::format_to(out_, "<text x=\"{:.1f}\" y=\"{:.1f}\" font-size=\"12\" fill=\"#333333\">{}</text>\n", x,
                     y + 12, escape_markup(text));
      x += 6.7 * static_cast<double>(text.size()) + 18;
    };
    for (Op op : ops_of(bars_)) {
      for (int c = 0; c < chunks; ++c, x += 16)
        fmt::format_to(out_, "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"16\" height=\"14\" fill=\"{}\"/>\n", x,
                       y + 1, colour_of(op, c, chunks).hex());
      x += 6;
      word(describe(op));
    }
    fmt::format_to(
        out_,
        "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"16\" height=\"14\" fill=\"#eceff1\" stroke=\"#cfd8dc\"/>\n",
        x, y + 1);
    x += 22;
    word("idle");
    if (const std::string shades = describe_shades(bars_); !shades.empty()) word(shades);
    legend_end_ = x;
    return y + legend_height;
  }

  double draw_track(const Track& track, const Bars& bars, double left, double y) {
    fmt::format_to(out_,
                   "<text x=\"{:.1f}\" y=\"{:.1f}\" font-size=\"14\" fill=\"#111111\"><tspan "
                   "font-weight=\"600\">{}</tspan>"
                   "<tspan dx=\"10\" fill=\"#555555\">{}</tspan></text>\n",
                   margin, y + 14, escape_markup(track.title), escape_markup(track.note));
    y += title_height;
    const double top = y;
    for (size_t r = 0; r < bars.ranks.size(); ++r, y += row_height_) {
      fmt::format_to(
          out_,
          "<text x=\"{:.1f}\" y=\"{:.1f}\" font-size=\"{:.0f}\" text-anchor=\"end\" fill=\"#333333\">rank "
          "{}</text>"
          "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.1f}\" fill=\"#eceff1\"/>\n",
          left - 8, y + row_height_ / 2 + font_ * 0.36, font_, r, left, y + 1, bars.makespan * scale_,
          row_height_ - 2);
    }
    draw_bars(bars, left, top);
    draw_axis(left, top, y, bars.makespan);
    return y + axis_height;
  }

  // Bars of one colour are one path, and their numbers one group: a tenth of the bytes of an element each.
  void draw_bars(const Bars& bars, double left, double top) {
    std::map<std::string, std::string> paths;
    std::string dark, light;  // numbers on dark and on light bars
    for (size_t r = 0; r < bars.ranks.size(); ++r)
      for (const Bar& bar : bars.ranks[r]) {
        const Colour colour = colour_of(bar.instruction.op, bar.chunk, bars.num_chunks);
        const bool is_half = bar.part != Part::whole;
        const double height = (row_height_ - 2) / (is_half ? 2 : 1);
        const double y =
            top + row_height_ * static_cast<double>(r) + 1 + (bar.part == Part::second ? height : 0);
        const double x = left + bar.begin * scale_, width = (bar.end - bar.begin) * scale_;
        const double gap = width > 4 ? 1 : width * 0.12;  // tells neighbours apart
        fmt::format_to(std::back_inserter(paths[colour.hex()]), "M{:.2f} {:.2f}h{:.2f}v{:.2f}h-{:.2f}z", x, y,
                       width - gap, height - (bar.part == Part::first ? 0.5 : 0), width - gap);
        const std::string label =
            bar.instruction.op == Op::step ? "S" : fmt::format("{}", bar.instruction.microbatch);
        const double size = std::min({is_half ? std::min(font_, height - 1) : font_,
                                      (width - 2) / (letter_width * static_cast<double>(label.size()))});
        if (size < 6.5) continue;
        fmt::format_to(std::back_inserter(colour.is_dark() ? dark : light),
                       "<text x=\"{:.2f}\" y=\"{:.2f}\" font-size=\"{:.1f}\">{}</text>\n",
                       x + (width - gap) / 2, y + height / 2 + size * 0.36, size, label);
      }
    for (const auto& [colour, path] : paths)
      fmt::format_to(out_, "<path fill=\"{}\" d=\"{}\"/>\n", colour, path);
    if (!dark.empty()) text_ += "<g text-anchor=\"middle\" fill=\"#ffffff\">\n" + dark + "</g>\n";
    if (!light.empty()) text_ += "<g text-anchor=\"middle\" fill=\"#1a1a1a\">\n" + light + "</g>\n";
  }

  void draw_axis(double left, double top, double bottom, double makespan) {
    const double step = round_step(makespan_ / (chart_width_ / 70));
    const double end_x = left + makespan * scale_;
    const double end_letters = static_cast<double>(fmt::formatted_size("{:.6g}", makespan));
    fmt::format_to(out_, "<g font-size=\"11\" fill=\"#666666\" text-anchor=\"middle\">\n");
    for (double k = 0; k * step <= makespan * (1 + 1e-9); ++k) {
      const double x = left + k * step * scale_;
      fmt::format_to(out_, "<path d=\"M{:.2f} {:.1f}v5\" stroke=\"#999999\"/>", x, bottom + 1);
      // The end of the track is labelled too, and has the right of way.
      const std::string label = fmt::format("{:.6g}", k * step);
      if (end_x - x >
          std::max(34.0, 11 * letter_width * (static_cast<double>(label.size()) / 2 + end_letters)))
        fmt::format_to(out_, "<text x=\"{:.2f}\" y=\"{:.1f}\">{}</text>\n", x, bottom + 17, label);
    }
    fmt::format_to(
        out_,
        "<path d=\"M{0:.2f} {1:.1f}V{2:.1f}\" stroke=\"#333333\" stroke-width=\"1\"/><text x=\"{0:.2f}\" "
        "y=\"{3:.1f}\" fill=\"#111111\" font-weight=\"600\"{5}>{4:.6g}</text>\n</g>\n",
        end_x, top - 2, bottom + 6, bottom + 17, makespan,
        end_x > left + chart_width_ - 10 ? " text-anchor=\"end\" dx=\"6\"" : "");
  }

  const std::vector<Track>& tracks_;
  std::vector<Bars> bars_;
  double makespan_ = 0, row_height_ = 0, font_ = 0, label_width_ = 0, chart_width_ = 0, scale_ = 1,
         legend_end_ = 0;
  std::string text_;
  std::back_insert_iterator<std::string> out_;
};

}  // namespace

std::string gantt_svg(const std::vector<Track>& tracks) { return SvgGantt(tracks).draw(); }

}  // namespace echelon
