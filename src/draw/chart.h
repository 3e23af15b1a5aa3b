// Lines over numbers, as a picture.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace echelon {

struct Line {
  std::string name;
  std::vector<std::pair<double, double>> points;
};
struct Chart {
  std::string title, x_name, y_name;
  bool log_x = false;
  std::vector<Line> lines;
  std::vector<Line> bands;  // low points, then high points back: drawn as an area
};
std::string chart_svg(const Chart& chart);

}  // namespace echelon
