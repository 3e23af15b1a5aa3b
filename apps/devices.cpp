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
#include "apps/terminal.h"
#include "apps/verbs.h"
#include "base/json_text.h"
#include "base/units.h"
#include "tensor/device_collectives.h"
#include "tensor/device_driver.h"
#include "tensor/kernels.h"
#include "train/this_machine.h"

namespace echelon {
namespace {

using nlohmann::ordered_json;

// The instruction sets that our kernels and oneDNN's can use.
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

// The devices whose memory the kernels of `device` can use.
std::vector<int> reached_from(DeviceDriver& driver, int device) {
  std::vector<int> peers;
  for (int peer = 0; peer < driver.num_devices(); ++peer)
    if (peer != device && driver.can_reach(device, peer)) peers.push_back(peer);
  return peers;
}

std::string peers_line(DeviceDriver& driver) {
  std::vector<std::string> apart;
  for (int device = 0; device < driver.num_devices(); ++device)
    for (int peer = 0; peer < driver.num_devices(); ++peer)
      if (!driver.can_reach(device, peer)) apart.push_back(fmt::format("{} to {}", device, peer));
  return apart.empty() ? "every device reaches the memory of every other"
                       : fmt::format("no access to the memory of another: {}", fmt::join(apart, ", "));
}

int run_devices(bool json) {
  const std::vector<std::string> sets = instruction_sets();
  const double memory = memory_limit();
  const char* const products = cpu_products(DType::f32);
  ordered_json devices = ordered_json::array();
  devices.push_back({{"device", "cpu"},
                     {"name", processor_name()},
                     {"cores", available_cores()},
                     {"memory_bytes", static_cast<std::int64_t>(memory)},
                     {"instruction_sets", sets},
                     {"products", products == nullptr ? "the reference kernels" : products}});
  std::FILE* const out = json ? stderr : stdout;
  const std::string cpu = fmt::format("cpu   {}: {}, {}, {}; products in f32 by {}\n", processor_name(),
                                      counted(available_cores(), "core"), format_bytes(memory),
                                      fmt::join(sets, " "),
                                      products == nullptr ? "the reference kernels" : products);
  fmt::print(out, "{}", fitted(cpu, line_columns(out)));
  const std::string why = no_cuda();
  std::string library, no_collectives;
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
                         {"multiprocessors", p.multiprocessors},
                         {"reaches", reached_from(*driver, i)}});
      fmt::print(out, "cuda  {}: {}, {} of {} free, compute capability {}.{}, {}\n", i, p.name,
                 format_bytes(static_cast<double>(free)), format_bytes(static_cast<double>(p.memory_bytes)),
                 p.major, p.minor, counted(p.multiprocessors, "multiprocessor"));
    }
    if (driver->num_devices() > 1) fmt::print(out, "      {}\n", peers_line(*driver));
    no_collectives = driver->no_collectives();
    if (no_collectives.empty()) library = driver->collectives().name();
    fmt::print(out, "      collectives between devices: {}\n",
               no_collectives.empty() ? library : "our own; " + no_collectives);
  } else {
    fmt::print(out, "cuda  none: {}\n", why);
  }
  ordered_json report{{"devices", devices}};
  if (!why.empty()) report["no_cuda"] = why;
  if (!library.empty()) report["collectives"] = library;
  if (!no_collectives.empty()) report["no_collectives"] = no_collectives;
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
