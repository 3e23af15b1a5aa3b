#include "draw/chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "draw/bars.h"

namespace echelon {
namespace {

// Told apart by readers with any colour vision (Okabe and Ito 2008).
constexpr const char* colours[] = {"#0072b2", "#e69f00", "#009e73", "#cc79a7",
                                   "#56b4e9", "#d55e00", "#999999", "#f0e442"};
const char* colour(std::size_t i) { return colours[i % std::size(colours)]; }

std::string svg_head(double width, double height) {
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} "
      "{1:.0f}\" "
      "font-family=\"sans-serif\" font-size=\"12\">\n",
      width, height);
}

}  // namespace

std::string chart_svg(const Chart& chart) {
  constexpr double width = 760, height = 420, left = 80, right = 30, top = 50, bottom = 50;
  double x0 = 1e300, x1 = -1e300, y1 = 0;
  const auto scale = [&](double x) { return chart.log_x ? std::log2(x) : x; };
  for (const auto* lines : {&chart.lines, &chart.bands})
    for (const Line& line : *lines)
      for (const auto& [x, y] : line.points) {
        x0 = std::min(x0, scale(x));
        x1 = std::max(x1, scale(x));
        y1 = std::max(y1, y);
      }
  if (x1 <= x0) x0 -= 0.5, x1 = x0 + 1;
  if (y1 <= 0) y1 = 1;
  const double step = round_step(y1 / 6), most = std::ceil(y1 / step) * step;
  const auto px = [&](double x) { return left + (scale(x) - x0) / (x1 - x0) * (width - left - right); };
  const auto py = [&](double y) { return height - bottom - y / most * (height - top - bottom); };
  std::string svg = svg_head(width, height) + "<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n";
  const auto out = std::back_inserter(svg);
  fmt::format_to(out, "<text x=\"{}\" y=\"20\" font-size=\"14\">{}</text>\n", left, escape_markup(chart.title));
  for (double y = 0; y <= most * 1.0001; y += step)
    fmt::format_to(out,
                   "<line x1=\"{0}\" y1=\"{1:.1f}\" x2=\"{2}\" y2=\"{1:.1f}\" stroke=\"#ddd\"/><text "
                   "x=\"{3}\" y=\"{4:.1f}\" text-anchor=\"end\">{5:.6g}</text>\n",
                   left, py(y), width - right, left - 6, py(y) + 4, y);
  std::vector<double> ticks;
  for (const Line& line : chart.lines)
    for (const auto& point : line.points) ticks.push_back(point.first);
  std::sort(ticks.begin(), ticks.end());
  ticks.erase(std::unique(ticks.begin(), ticks.end()), ticks.end());
  for (double x : ticks)
    fmt::format_to(out,
                   "<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\" font-size=\"11\">{:.8g}</text>\n",
                   px(x), height - bottom + 16, x);
  fmt::format_to(out,
                 "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text><text x=\"14\" y=\"{}\" "
                 "transform=\"rotate(-90 14 {})\" text-anchor=\"middle\">{}</text>\n",
                 (left + width - right) / 2, height - 10, escape_markup(chart.x_name), height / 2, height / 2,
                 escape_markup(chart.y_name));
  for (std::size_t i = 0; i < chart.bands.size(); ++i) {
    svg += "<polygon points=\"";
    for (const auto& [x, y] : chart.bands[i].points) fmt::format_to(out, "{:.1f},{:.1f} ", px(x), py(y));
    fmt::format_to(out, "\" fill=\"{}\" fill-opacity=\"0.15\"/>\n", colour(i));
  }
  if (!chart.bands.empty())
    fmt::format_to(out, "<text x=\"{:.0f}\" y=\"38\">shaded: {}</text>\n",
                   left + 200.0 * static_cast<double>(chart.lines.size()), escape_markup(chart.bands[0].name));
  for (std::size_t i = 0; i < chart.lines.size(); ++i) {
    const Line& line = chart.lines[i];
    svg += "<polyline points=\"";
    for (const auto& [x, y] : line.points) fmt::format_to(out, "{:.1f},{:.1f} ", px(x), py(y));
    fmt::format_to(out, "\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"/>\n", colour(i));
    for (const auto& [x, y] : line.points)
      fmt::format_to(
          out, "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.5\" fill=\"{}\"><title>{:.6g}</title></circle>\n",
          px(x), py(y), colour(i), y);
    fmt::format_to(out,
                   "<rect x=\"{0:.0f}\" y=\"28\" width=\"12\" height=\"12\" fill=\"{1}\"/><text "
                   "x=\"{2:.0f}\" y=\"38\">{3}</text>\n",
                   left + 200.0 * static_cast<double>(i), colour(i),
                   left + 16 + 200.0 * static_cast<double>(i), escape_markup(line.name));
  }
  return svg + "</svg>\n";
}

}  // namespace echelon
