// A plan as one self-contained page: the mesh over its nodes, memory of each pipeline rank, where the time of
// a step goes, the timeline of the step, the alternatives.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "schedule/timeline.h"

namespace echelon {

struct MeshMap {
  int pp = 1, dp = 1, cp = 1, tp = 1;  // from the outermost axis in: rank = ((pp dp + dp) cp + cp) tp + tp
  int node = 8;                        // ranks of a node
};

// Nodes as boxes, ranks as cells in the colour of their pipeline rank; of a large mesh its first nodes.
std::string mesh_map_svg(const MeshMap& mesh);

struct Stack {
  std::string name;
  std::vector<double> parts;
};
// Horizontal stacked bars; `limit` is drawn as a line where it is above 0.
std::string stacks_svg(const std::vector<std::string>& part_names, const std::vector<Stack>& stacks,
                       double limit, const std::string& unit);

struct PlanReport {
  std::string title, subtitle;
  MeshMap mesh;
  std::vector<std::string> memory_names;
  std::vector<Stack> memory;  // of pipeline ranks, GB
  double memory_limit = 0;
  std::vector<std::string> time_names;
  std::vector<Stack> times;  // of the ranked plans, seconds
  Timeline timeline;
  std::vector<std::string> header;  // of the alternatives
  std::vector<std::vector<std::string>> alternatives;
  std::string explanation;
};
std::string plan_report_html(const PlanReport& report);

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
