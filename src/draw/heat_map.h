// Loads as pictures: what there is of each row (an expert, a device) in each column (a step), over what an
// even load would be. Several on one scale: before and after balancing.
#pragma once

#include <string>
#include <vector>

#include "draw/gantt.h"

namespace echelon {

struct HeatMap {
  std::string title, note;
  std::string row_name;                     // "expert"; rows are numbered from 0
  std::vector<std::vector<double>> values;  // of each row in each column, at least 0; 1 is even
};

// A letter a cell, or a colour. Where there are more rows or columns than fit, a cell shows the largest of
// its rows, in the mean over its columns.
std::string heat_map_text(const std::vector<HeatMap>& maps, const TextOptions& options = {});

// Blue below the even load, white at it, brown above; colours by the logarithm, from a quarter to four times.
std::string heat_map_svg(const std::vector<HeatMap>& maps);

}  // namespace echelon
