#include "draw/plan_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "draw/bars.h"
#include "draw/gantt.h"

namespace echelon {
namespace {

// Told apart by readers with any colour vision (Okabe and Ito 2008).
constexpr const char* colours[] = {"#0072b2", "#e69f00", "#009e73", "#cc79a7",
                                   "#56b4e9", "#d55e00", "#999999", "#f0e442"};
const char* colour(std::size_t i) { return colours[i % std::size(colours)]; }

std::string escape_html(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '<')
      out += "&lt;";
    else if (c == '&')
      out += "&amp;";
    else
      out += c;
  }
  return out;
}

std::string svg_head(double width, double height) {
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} "
      "{1:.0f}\" "
      "font-family=\"sans-serif\" font-size=\"12\">\n",
      width, height);
}

}  // namespace

std::string mesh_map_svg(const MeshMap& m) {
  const int ranks = m.pp * m.dp * m.cp * m.tp, nodes = (ranks + m.node - 1) / m.node;
  constexpr int most_nodes = 32, cell = 34, gap = 10, in_row = 3;
  const int shown = std::min(nodes, most_nodes), columns = std::min(m.node, 8),
            rows = (m.node + columns - 1) / columns;
  const int box_width = columns * cell + 8, box_height = rows * cell + 24;
  const int across = std::min(shown, in_row), down = (shown + in_row - 1) / in_row;
  std::string svg = svg_head(across * (box_width + gap), down * (box_height + gap) + 24);
  const auto out = std::back_inserter(svg);
  for (int node = 0; node < shown; ++node) {
    const int x0 = node % in_row * (box_width + gap), y0 = node / in_row * (box_height + gap);
    fmt::format_to(out,
                   "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"none\" stroke=\"#888\"/><text "
                   "x=\"{}\" y=\"{}\">node {}</text>\n",
                   x0, y0, box_width, box_height, x0 + 5, y0 + 14, node);
    for (int i = 0; i < m.node && node * m.node + i < ranks; ++i) {
      const int rank = node * m.node + i, tp = rank % m.tp, dp = rank / (m.tp * m.cp) % m.dp,
                pp = rank / (m.tp * m.cp * m.dp);
      const int x = x0 + 4 + i % columns * cell, y = y0 + 20 + i / columns * cell;
      fmt::format_to(out,
                     "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"{}\" fill-opacity=\"{:.2f}\" "
                     "stroke=\"#fff\"><title>rank {}: pp {} dp "
                     "{} cp {} tp {}</title></rect><text x=\"{}\" y=\"{}\" font-size=\"9\">p{} "
                     "d{}</text><text x=\"{}\" y=\"{}\" font-size=\"9\">t{}</text>\n",
                     x, y, cell - 2, cell - 2, colour(static_cast<std::size_t>(pp)), 0.35 + 0.3 * (dp % 2),
                     rank, pp, dp, rank / m.tp % m.cp, tp, x + 2, y + 13, pp, dp, x + 2, y + 26, tp);
    }
  }
  fmt::format_to(out,
                 "<text x=\"0\" y=\"{}\">colour: pipeline rank p; d: data-parallel, t: tensor-parallel "
                 "rank{}</text></svg>\n",
                 down * (box_height + gap) + 16,
                 nodes > shown ? fmt::format("; the first {} of {} nodes", shown, nodes) : "");
  return svg;
}

std::string stacks_svg(const std::vector<std::string>& names, const std::vector<Stack>& stacks, double limit,
                       const std::string& unit) {
  constexpr double left = 250, width = 640, row = 22, top = 40;
  double most = limit;
  for (const Stack& stack : stacks) {
    double sum = 0;
    for (double part : stack.parts) sum += part;
    most = std::max(most, sum);
  }
  const double height = top + row * static_cast<double>(stacks.size()) + 30;
  std::string svg = svg_head(left + width + 90, height);
  const auto out = std::back_inserter(svg);
  double x = 0;
  for (std::size_t i = 0; i < names.size(); ++i) {
    fmt::format_to(out,
                   "<rect x=\"{:.0f}\" y=\"6\" width=\"12\" height=\"12\" fill=\"{}\"/><text x=\"{:.0f}\" "
                   "y=\"16\">{}</text>\n",
                   x, colour(i), x + 16, escape_html(names[i]));
    x += 34 + 7.0 * static_cast<double>(names[i].size());
  }
  for (std::size_t r = 0; r < stacks.size(); ++r) {
    const double y = top + row * static_cast<double>(r);
    double sum = 0;
    fmt::format_to(out, "<text x=\"{:.0f}\" y=\"{:.0f}\" text-anchor=\"end\" font-size=\"11\">{}</text>\n",
                   left - 6, y + 13, escape_html(stacks[r].name));
    for (std::size_t i = 0; i < stacks[r].parts.size(); ++i) {
      const double part = stacks[r].parts[i];
      if (part > 0)
        fmt::format_to(out,
                       "<rect x=\"{:.1f}\" y=\"{:.0f}\" width=\"{:.1f}\" height=\"{:.0f}\" "
                       "fill=\"{}\"><title>{}: {:.4g} {}</title></rect>\n",
                       left + sum / most * width, y, std::max(0.5, part / most * width), row - 5, colour(i),
                       escape_html(names[i]), part, unit);
      sum += part;
    }
    fmt::format_to(out, "<text x=\"{:.1f}\" y=\"{:.0f}\" font-size=\"11\">{:.4g} {}</text>\n",
                   left + sum / most * width + 4, y + 13, sum, unit);
  }
  if (limit > 0) {
    const double at = left + limit / most * width, bottom = top + row * static_cast<double>(stacks.size());
    fmt::format_to(
        out,
        "<line x1=\"{0:.1f}\" y1=\"{1:.0f}\" x2=\"{0:.1f}\" y2=\"{2:.0f}\" stroke=\"#c00\" "
        "stroke-dasharray=\"4 3\"/>"
        "<text x=\"{0:.1f}\" y=\"{3:.0f}\" fill=\"#c00\" text-anchor=\"middle\">{4:.4g} {5}</text>\n",
        at, top - 4, bottom, bottom + 16, limit, unit);
  }
  return svg + "</svg>\n";
}

std::string plan_report_html(const PlanReport& r) {
  std::string page = fmt::format(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{0}</title><style>\n"
      "body{{font:15px/1.5 sans-serif;margin:2em auto;max-width:1100px;padding:0 "
      "1em;color:#222;background:#fff}}\n"
      "h1{{font-size:1.5em;margin-bottom:0}} h2{{font-size:1.1em;margin-top:2em;border-bottom:1px solid "
      "#ddd}}\n"
      "table{{border-collapse:collapse;font-size:13px}} td,th{{padding:2px "
      "10px;text-align:right;border-bottom:1px solid #eee}}\n"
      "td:last-child,th:last-child{{text-align:left}} "
      "pre{{background:#f6f6f6;padding:1em;overflow:auto;font-size:12px}}\n"
      ".wide{{overflow-x:auto}}\n</style></head><body>\n<h1>{0}</h1><p>{1}</p>\n",
      escape_html(r.title), escape_html(r.subtitle));
  const auto section = [&](const char* title, const std::string& body) {
    page += fmt::format("<h2>{}</h2>\n<div class=\"wide\">{}</div>\n", title, body);
  };
  section("The mesh over its nodes", mesh_map_svg(r.mesh));
  section("Memory of each pipeline rank", stacks_svg(r.memory_names, r.memory, r.memory_limit, "GB"));
  section("Where the time of a step goes", stacks_svg(r.time_names, r.times, 0, "s"));
  std::size_t spans = 0;
  for (const auto& rank : r.timeline.ranks) spans += rank.size();
  constexpr std::size_t most_spans = 12000;
  if (r.timeline.ranks.size() > 1 && spans <= most_spans)
    section("One step of the pipeline",
            gantt_svg({{"simulated", fmt::format("makespan {:.4g} s", r.timeline.makespan()), r.timeline}}));
  std::string table = "<table><tr>";
  for (const std::string& cell : r.header) table += "<th>" + escape_html(cell) + "</th>";
  table += "</tr>\n";
  for (const auto& row : r.alternatives) {
    table += "<tr>";
    for (const std::string& cell : row) table += "<td>" + escape_html(cell) + "</td>";
    table += "</tr>\n";
  }
  section("Alternatives", table + "</table>");
  section("In words", "<pre>" + escape_html(r.explanation) + "</pre>");
  return page + "</body></html>\n";
}

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
  fmt::format_to(out, "<text x=\"{}\" y=\"20\" font-size=\"14\">{}</text>\n", left, escape_html(chart.title));
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
                 (left + width - right) / 2, height - 10, escape_html(chart.x_name), height / 2, height / 2,
                 escape_html(chart.y_name));
  for (std::size_t i = 0; i < chart.bands.size(); ++i) {
    svg += "<polygon points=\"";
    for (const auto& [x, y] : chart.bands[i].points) fmt::format_to(out, "{:.1f},{:.1f} ", px(x), py(y));
    fmt::format_to(out, "\" fill=\"{}\" fill-opacity=\"0.15\"/>\n", colour(i));
  }
  if (!chart.bands.empty())
    fmt::format_to(out, "<text x=\"{:.0f}\" y=\"38\">shaded: {}</text>\n",
                   left + 200.0 * static_cast<double>(chart.lines.size()), escape_html(chart.bands[0].name));
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
                   left + 16 + 200.0 * static_cast<double>(i), escape_html(line.name));
  }
  return svg + "</svg>\n";
}

}  // namespace echelon
