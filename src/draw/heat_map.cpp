#include "draw/heat_map.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>

#include "draw/bars.h"

namespace echelon {
namespace {

using std::size_t;

// Levels of the scale, by powers of two: -2 to 2 in eighths.
constexpr int half_levels = 16;

int level_of(double value) {
  const double log = value > 0 ? std::log2(value) : -2;
  return static_cast<int>(std::lround(std::clamp(log, -2.0, 2.0) * half_levels / 2));
}

Colour heat_colour(int level) {
  struct Stop {
    double at;
    double red, green, blue;
  };
  constexpr Stop stops[] = {{-1, 0x0b, 0x4f, 0x8a},
                            {-0.5, 0x7f, 0xb3, 0xd8},
                            {0, 0xf7, 0xf7, 0xf2},
                            {0.5, 0xf2, 0xa2, 0x4a},
                            {1, 0x8c, 0x2d, 0x04}};
  const double x = static_cast<double>(level) / half_levels;
  const Stop* upper = std::find_if(std::begin(stops) + 1, std::end(stops) - 1,
                                   [&](const Stop& stop) { return x <= stop.at; });
  const Stop& lower = *(upper - 1);
  const double share = (x - lower.at) / (upper->at - lower.at);
  const auto mix = [&](double a, double b) {
    return static_cast<std::uint8_t>(std::lround(a + (b - a) * share));
  };
  return {mix(lower.red, upper->red), mix(lower.green, upper->green), mix(lower.blue, upper->blue)};
}

struct Folded {
  std::vector<std::vector<double>> values;
  size_t rows_in_one = 1, columns_in_one = 1;
  double columns = 0;  // of the whole
};

Folded fold(const HeatMap& map, size_t most_rows, size_t most_columns) {
  Folded folded;
  const size_t rows = map.values.size(), columns = rows == 0 ? 0 : map.values[0].size();
  folded.columns = static_cast<double>(columns);
  folded.rows_in_one = std::max<size_t>(1, (rows + most_rows - 1) / most_rows);
  folded.columns_in_one = std::max<size_t>(1, (columns + most_columns - 1) / most_columns);
  for (size_t r = 0; r < rows; r += folded.rows_in_one) {
    auto& row = folded.values.emplace_back();
    for (size_t c = 0; c < columns; c += folded.columns_in_one) {
      const size_t end = std::min(columns, c + folded.columns_in_one);
      double largest = 0;
      for (size_t i = r; i < std::min(rows, r + folded.rows_in_one); ++i) {
        double sum = 0;
        for (size_t j = c; j < end; ++j) sum += map.values[i][j];
        largest = std::max(largest, sum / static_cast<double>(end - c));
      }
      row.push_back(largest);
    }
  }
  return folded;
}

std::string row_label(const HeatMap& map, const Folded& folded, size_t row) {
  const size_t first = row * folded.rows_in_one,
               last = std::min(map.values.size(), first + folded.rows_in_one) - 1;
  return first == last ? fmt::format("{} {}", map.row_name, first)
                       : fmt::format("{} {}-{}", map.row_name, first, last);
}

struct Letter {
  double least;  // times the even load
  char letter;
  const char* says;
};
constexpr Letter letters[] = {{2.5, '@', "from 2.5"},  {1.75, '#', "from 1.75"}, {1.3, '+', "from 1.3"},
                              {0.77, '-', "around 1"}, {0.4, '.', "from 0.4"},   {0, ' ', "less"}};

char letter_of(double value) {
  return std::find_if(std::begin(letters), std::end(letters) - 1,
                      [&](const Letter& l) { return value >= l.least; })
      ->letter;
}

class SvgHeatMap {
  // In pixels.
  static constexpr double margin = 16, title_height = 26, axis_height = 30, legend_height = 40, map_gap = 16,
                          chart_width = 760;
  static constexpr size_t most_svg_rows = 64, most_svg_columns = 400;

 public:
  explicit SvgHeatMap(const std::vector<HeatMap>& maps) : out_(text_) {
    size_t label = 0;
    for (const HeatMap& map : maps) {
      folded_.push_back(fold(map, most_svg_rows, most_svg_columns));
      for (const auto& row : folded_.back().values)
        for (const double value : row) largest_ = std::max(largest_, value);
      const size_t rows = folded_.back().values.size();
      row_height_ = std::min(row_height_, rows <= 16 ? 18.0 : rows <= 32 ? 12.0 : 8.0);
      for (size_t r = 0; r < rows; ++r) label = std::max(label, row_label(map, folded_.back(), r).size());
    }
    left_ = margin + 10 + 0.6 * font() * static_cast<double>(label);
  }

  std::string draw(const std::vector<HeatMap>& maps) {
    double y = draw_legend(margin);
    for (size_t m = 0; m < maps.size(); ++m) y = draw_map(maps[m], folded_[m], y) + map_gap;
    std::string body;
    body.swap(text_);
    fmt::format_to(
        out_,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 "
        "{0:.0f} {1:.0f}\" font-family=\"Inter, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, "
        "sans-serif\">\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n",
        left_ + chart_width + margin, y - map_gap + margin / 2);
    return text_ + body + "</svg>\n";
  }

 private:
  // Cells of one colour are one path: a fifth of the bytes of a rectangle each.
  void draw_cells(const Folded& folded, double cell, double top) {
    std::map<int, std::string> paths;
    for (size_t r = 0; r < folded.values.size(); ++r) {
      const std::vector<double>& row = folded.values[r];
      for (size_t c = 0, end = 1; c < row.size(); c = end++) {
        const int level = level_of(row[c]);
        while (end < row.size() && level_of(row[end]) == level) ++end;
        const double from = cell * static_cast<double>(c),
                     to = std::min(chart_width, cell * static_cast<double>(end));
        fmt::format_to(std::back_inserter(paths[level]), "M{:.1f} {:.0f}h{:.1f}v{:.0f}h{:.1f}z", left_ + from,
                       top + row_height_ * static_cast<double>(r), to - from, row_height_, from - to);
      }
    }
    for (const auto& [level, path] : paths)
      fmt::format_to(out_, "<path fill=\"{}\" d=\"{}\"/>\n", heat_colour(level).hex(), path);
  }

  double font() const { return std::min(12.0, row_height_ - 1); }

  void word(double x, double y, double size, const char* anchor, const std::string& text) {
    fmt::format_to(
        out_,
        "<text x=\"{:.1f}\" y=\"{:.1f}\" font-size=\"{:.0f}\" text-anchor=\"{}\" fill=\"#333333\">{}"
        "</text>\n",
        x, y, size, anchor, escape_markup(text));
  }

  double draw_legend(double y) {
    constexpr double cell = 8;
    const double x = left_;
    for (int level = -half_levels; level <= half_levels; ++level)
      fmt::format_to(out_, "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{}\" height=\"12\" fill=\"{}\"/>\n",
                     x + cell * (level + half_levels), y, cell, heat_colour(level).hex());
    for (int power = -2; power <= 2; ++power)
      word(x + cell * (power * half_levels / 2 + half_levels + 0.5), y + 25, 11, "middle",
           power < 0 ? fmt::format("1/{}", 1 << -power) : fmt::format("{}", 1 << power));
    word(x + cell * (2 * half_levels + 1) + 12, y + 10, 12, "start",
         fmt::format("load / average: 1/4 and less to 4 and more; the largest here is {:.3g}", largest_));
    return y + legend_height;
  }

  double draw_map(const HeatMap& map, const Folded& folded, double y) {
    fmt::format_to(out_,
                   "<text x=\"{:.1f}\" y=\"{:.1f}\" font-size=\"14\" fill=\"#111111\"><tspan "
                   "font-weight=\"600\">{}</tspan><tspan dx=\"10\" fill=\"#555555\">{}</tspan></text>\n",
                   margin, y + 14, escape_markup(map.title), escape_markup(map.note));
    y += title_height;
    const double top = y, cell = chart_width * static_cast<double>(folded.columns_in_one) /
                                 std::max(1.0, folded.columns);
    for (size_t r = 0; r < folded.values.size(); ++r, y += row_height_)
      word(left_ - 8, y + row_height_ / 2 + font() * 0.36, font(), "end", row_label(map, folded, r));
    draw_cells(folded, cell, top);
    fmt::format_to(out_,
                   "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"none\" "
                   "stroke=\"#90a4ae\"/>\n",
                   left_, top, chart_width, y - top);
    const double step = std::max(1.0, round_step(folded.columns / 10));
    for (double at = 0; at < folded.columns; at += step) {
      const double x = left_ + chart_width * (at + 0.5) / folded.columns;
      fmt::format_to(out_, "<path d=\"M{0:.1f} {1:.1f}v4\" stroke=\"#90a4ae\"/>\n", x, y);
      word(x, y + 16, 11, "middle", at == 0 ? "step 0" : fmt::format("{}", at));
    }
    return y + axis_height - 8;
  }

  std::string text_;
  std::back_insert_iterator<std::string> out_;
  std::vector<Folded> folded_;
  double row_height_ = 18, left_ = 0, largest_ = 0;  // largest: of what is drawn
};

}  // namespace

std::string heat_map_text(const std::vector<HeatMap>& maps, const TextOptions& options) {
  constexpr size_t most_rows = 32;
  std::string text;
  for (const HeatMap& map : maps) {
    size_t label = 0;
    Folded folded = fold(map, most_rows, 1);
    for (size_t r = 0; r < folded.values.size(); ++r)
      label = std::max(label, row_label(map, folded, r).size());
    const auto columns = static_cast<size_t>(std::max(8, options.width - static_cast<int>(label) - 4));
    folded = fold(map, most_rows, columns);
    text += map.title + (map.note.empty() ? "" : ": " + map.note) + "\n";
    for (size_t r = 0; r < folded.values.size(); ++r) {
      text += fmt::format("{:>{}} |", row_label(map, folded, r), label);
      for (const double value : folded.values[r])
        text += options.is_colour
                    ? fmt::format("\x1b[48;5;{}m \x1b[0m", heat_colour(level_of(value)).of_terminal())
                    : std::string(1, letter_of(value));
      text += "|\n";
    }
    if (!folded.values.empty())
      text +=
          fmt::format("{:>{}}  step 0 to {}\n\n", "", label, static_cast<std::int64_t>(folded.columns) - 1);
  }
  text += "load / average:";
  if (options.is_colour)
    for (const double value : {0.25, 0.5, 0.77, 1.0, 1.3, 2.0, 4.0})
      text +=
          fmt::format("  \x1b[48;5;{}m  \x1b[0m {:.2g}", heat_colour(level_of(value)).of_terminal(), value);
  else
    for (const Letter& l : letters) text += fmt::format("  '{}' {}", l.letter, l.says);
  return text + "\n";
}

std::string heat_map_svg(const std::vector<HeatMap>& maps) { return SvgHeatMap(maps).draw(maps); }

}  // namespace echelon
