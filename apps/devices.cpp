// echelon devices: what --device can name here.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "apps/bench.h"
#include "apps/help.h"
#include "apps/verbs.h"
#include "base/json_text.h"
#include "base/units.h"
#include "tensor/device_driver.h"
#include "tensor/kernels.h"
#include "train/this_machine.h"

namespace echelon {
namespace {

using nlohmann::ordered_json;

// Of those that our kernels and oneDNN's can use.
std::vector<std::string> instruction_sets() {
  constexpr std::array wanted{"sse4_2",      "avx2",        "fma",      "avx512f",  "avx512_vnni",
                              "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "asimd",
                              "sve",         "sve2",        "bf16"};
  std::vector<std::string> here;
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with("flags") && !line.starts_with("Features")) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    const std::vector<std::string> all{std::istream_iterator<std::string>(words), {}};
    for (const char* set : wanted)
      if (std::find(all.begin(), all.end(), set) != all.end()) here.emplace_back(set);
    break;
  }
  return here;
}

int run_devices(bool json) {
  const std::vector<std::string> sets = instruction_sets();
  const double memory = memory_limit();
  const char* const products = cpu_products(DType::f32);
  ordered_json devices = ordered_json::array();
  devices.push_back({{"device", "cpu"},
                     {"name", processor_name()},
                     {"cores", available_cores()},
                     {"memory_bytes", memory},
                     {"instruction_sets", sets},
                     {"products", products == nullptr ? "the reference kernels" : products}});
  std::FILE* const out = json ? stderr : stdout;
  fmt::print(out, "cpu   {}: {}, {}, {}; products in f32 by {}\n", processor_name(),
             counted(available_cores(), "core"), format_bytes(memory), fmt::join(sets, " "),
             products == nullptr ? "the reference kernels" : products);
  const std::string why = no_cuda();
  if (why.empty()) {
    const std::shared_ptr<DeviceDriver> driver = make_cuda_driver();
    for (int i = 0; i < driver->num_devices(); ++i) {
      const DeviceProperties p = driver->properties(i);
      const std::size_t free = driver->free_bytes(i);
      devices.push_back({{"device", "cuda"},
                         {"number", i},
                         {"name", p.name},
                         {"memory_bytes", p.memory_bytes},
                         {"free_bytes", free},
                         {"compute_capability", fmt::format("{}.{}", p.major, p.minor)},
                         {"multiprocessors", p.multiprocessors}});
      fmt::print(out, "cuda  {}: {}, {} of {} free, compute capability {}.{}, {}\n", i, p.name,
                 format_bytes(static_cast<double>(free)), format_bytes(static_cast<double>(p.memory_bytes)),
                 p.major, p.minor, counted(p.multiprocessors, "multiprocessor"));
    }
  } else {
    fmt::print(out, "cuda  none: {}\n", why);
  }
  ordered_json report{{"devices", devices}};
  if (!why.empty()) report["no_cuda"] = why;
  if (json) fmt::print("{}\n", json_text(report));
  return 0;
}

}  // namespace

void add_devices(CLI::App& program, int& status) {
  auto json = std::make_shared<bool>(false);
  CLI::App& app = *program.add_subcommand("devices", "List what can compute here, for --device");
  heading(app, common_flags);
  app.add_flag("--json", *json, "One JSON object on standard output");
  app.callback([json, &status] { status = run_devices(*json); });
}

}  // namespace echelon
