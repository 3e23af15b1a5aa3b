// Published measurements as workloads and configurations: what the planner is asked, and what was measured.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "plan/workload.h"

namespace echelon::published {

struct Point {
  std::string label;
  std::string group;    // of the same model and number of devices, for ranking
  bool fitted = false;  // the software's and machine's numbers were fitted on it
  Workload work;
  // What the source leaves open: the fastest one counts. Of the workload's model, lengths and batch.
  std::vector<Plan> plans;
  double seconds = 0;       // of a step; 0: none
  double memory_bytes = 0;  // 0: none
  bool out_of_memory = false;
  // Layers of each pipeline rank whose activations the run kept on the host, which the planner does not
  // price: they are taken off the prediction.
  int offloaded_layers = 0;
};

struct Table {
  std::string name;
  std::vector<Point> points;
};

// A table: of this directory, or of the folder of large ones (ECHELON_PUBLISHED, or ../shared/published
// beside the repository); no value where it is not there.
std::optional<std::filesystem::path> find(const std::string& file);

struct Source {
  std::string name;  // of the table
  std::string file;  // in the folder
  Table (*read)(const std::string& path);
};
const std::vector<Source>& sources();
std::optional<Table> read(const Source& source);

}  // namespace echelon::published
