#include "spec/machine.h"

#include <filesystem>
#include <sstream>

#include "base/edits.h"
#include "base/error.h"
#include "base/open_file.h"
#include "spec/embedded.h"
#include "spec/fields.h"

namespace echelon {
namespace {

// No device has less, but 80 (GB), 3350 (GB/s) and 989 (TFLOP/s) are less.
constexpr double least_quantity = 1e6;

const std::vector<Field<Machine>>& machine_fields() {
  static const std::vector<Field<Machine>> fields{
      {"memory_bytes", &Machine::memory_bytes, least_quantity, 1e30, "bytes"},
      {"reserved_bytes", &Machine::reserved_bytes},
      {"memory_bandwidth", &Machine::memory_bandwidth, least_quantity, 1e30, "bytes a second"},
      {"memory_efficiency", &Machine::memory_efficiency, 1e-3, 1},
      {"watts", &Machine::watts, 0, 1e6},
      {"cores", &Machine::cores, 1, 1e6},
      {"gemm_tile", &Machine::gemm_tile, 1, 4096},
      {"gemm_efficiency", &Machine::gemm_efficiency, 1e-3, 1},
      {"gemm_half_depth", &Machine::gemm_half_depth},
      {"gemm_wave_rounding", &Machine::gemm_wave_rounding, 0, 1},
      {"gemm_medium_tile", &Machine::gemm_medium_tile, 1e-3, 1},
      {"gemm_small_tile", &Machine::gemm_small_tile, 1e-3, 1},
      {"gemm_unaligned", &Machine::gemm_unaligned, 1e-3, 1},
      {"gemm_fp8_efficiency", &Machine::gemm_fp8_efficiency, 1e-3, 1},
      {"gemm_fp4_efficiency", &Machine::gemm_fp4_efficiency, 1e-3, 1},
      {"attention_forward", &Machine::attention_forward, 1e-3, 1},
      {"attention_backward", &Machine::attention_backward, 1e-3, 1},
      {"attention_half_length", &Machine::attention_half_length},
      {"older_attention", &Machine::older_attention, 1e-3, 1},
      {"f32_attention", &Machine::f32_attention, 1e-3, 100},
      {"launch_seconds", &Machine::launch_seconds, 0, 1, "seconds"},
      {"collective_seconds", &Machine::collective_seconds, 0, 1, "seconds"},
      {"small_group_loss", &Machine::small_group_loss},
      {"whole_rings", &Machine::whole_rings},
      {"host_bandwidth", &Machine::host_bandwidth},
      {"host_efficiency", &Machine::host_efficiency, 1e-3, 1},
      {"host_memory_bytes", &Machine::host_memory_bytes},
      {"host_memory_bandwidth", &Machine::host_memory_bandwidth},
      {"host_memory_efficiency", &Machine::host_memory_efficiency, 1e-3, 1},
      {"host_devices", &Machine::host_devices, 0, 1e6},
      {"peak_tf32", &Machine::peak_tf32},
  };
  return fields;
}

struct TierFields {
  int ranks = 0;
  double bandwidth = 0, latency_seconds = 0, oversubscription = 1, ring_seconds = 0;
};
const std::vector<Field<TierFields>>& tier_fields() {
  static const std::vector<Field<TierFields>> fields{
      {"ranks", &TierFields::ranks, 1, 1e9},
      {"bandwidth", &TierFields::bandwidth, least_quantity, 1e30, "bytes a second"},
      {"latency_seconds", &TierFields::latency_seconds, 0, 1, "seconds"},
      {"oversubscription", &TierFields::oversubscription, 1},
      {"ring_seconds", &TierFields::ring_seconds, 0, 1, "seconds"},
  };
  return fields;
}

std::string peak_key(Precision precision) { return fmt::format("peak_{}", precision_name(precision)); }

// Data sheets say what devices could reach. No device reaches all of it, or starts work in no time, so what a
// file leaves out of these is an H100's, in fp4 a B200's.
void take_what_is_omitted(const toml::table& table, Machine& m) {
  static const std::set<std::string> of_every_machine{
      "memory_efficiency", "gemm_efficiency", "gemm_half_depth",       "gemm_wave_rounding",
      "gemm_medium_tile",  "gemm_small_tile", "attention_forward",     "attention_backward",
      "older_attention",   "launch_seconds",  "attention_half_length", "collective_seconds",
      "small_group_loss"};
  for (const Field<Machine>& field : machine_fields()) {
    const std::string key = field.key;
    const bool is_fp4 = key == "gemm_fp4_efficiency" && m.peak(Precision::fp4) > 0,
               is_fp8 = key == "gemm_fp8_efficiency" && m.peak(Precision::fp8) > 0;
    if (table.contains(key) || !(is_fp4 || is_fp8 || of_every_machine.contains(key))) continue;
    const Machine preset = load_machine(is_fp4 ? "b200" : "h100");
    std::visit([&](auto member) { m.*member = preset.*member; }, field.member);
    m.omitted.push_back(key);
  }
}

}  // namespace

const char* precision_name(Precision precision) {
  switch (precision) {
    case Precision::f32:
      return "f32";
    case Precision::bf16:
      return "bf16";
    case Precision::fp8:
      return "fp8";
    case Precision::fp4:
      return "fp4";
  }
  return "?";
}

Precision parse_precision(const std::string& text, const std::string& field) {
  for (Precision precision : all_precisions)
    if (text == precision_name(precision)) return precision;
  refuse("{} {}: no such type; legal: f32, bf16, fp8, fp4", field, text);
}

void validate(const Machine& m) {
  if (m.tiers.empty()) refuse("machine {}: no [[tier]]: how many devices a node has is not known", m.name);
  std::int64_t inner = 0;
  for (const Tier& tier : m.tiers) {
    if (tier.ranks <= inner)
      refuse(
          "machine {}: tier.ranks = {} is not legal: tiers go from the innermost out, so give more than {}",
          m.name, tier.ranks, inner);
    inner = tier.ranks;
  }
  if (m.host_devices > 0 && m.node() % m.host_devices != 0)
    refuse("machine {}: host_devices = {} is not legal: give a divisor of the innermost tier's ranks = {}",
           m.name, m.host_devices, m.node());
  bool any = false;
  for (double peak : m.peak_flops) any |= peak > 0;
  if (!any)
    refuse("machine {}: no peak: give at least one of peak_f32, peak_bf16, peak_fp8, peak_fp4", m.name);
  if (m.reserved_bytes >= m.memory_bytes)
    refuse("machine {}: reserved_bytes = {} is not legal: the memory has {} bytes", m.name, m.reserved_bytes,
           m.memory_bytes);
}

Machine machine_from_toml(const std::string& text, const std::string& where) {
  const toml::table table = parse_toml(text, where);
  Machine m;
  std::set<std::string> legal{"tier"};
  m.name = read_name(table, where, legal);
  read_fields(table, machine_fields(), where, m, legal);
  for (const char* key : {"memory_bytes", "memory_bandwidth"})
    if (!table.contains(key)) refuse("{}: the key {} is missing", where, key);
  for (Precision precision : all_precisions) {
    const std::string key = peak_key(precision);
    legal.insert(key);
    const toml::node* node = table.get(key);
    if (node == nullptr) continue;
    const auto value = node->value<double>();
    if (!value || !(*value >= least_quantity && *value <= 1e30))
      refuse("{}: {} = {} is not legal: give FLOP/s from {} to 1e+30", where, key, shown(*node),
             least_quantity);
    m.peak_flops[static_cast<std::size_t>(precision)] = *value;
  }
  if (const toml::node* tiers = table.get("tier")) {
    const toml::array* list = tiers->as_array();
    if (list == nullptr) refuse("{}: tier = {} is not legal: give [[tier]] tables", where, shown(*tiers));
    for (const toml::node& node : *list) {
      const toml::table* tier = node.as_table();
      if (tier == nullptr) refuse("{}: tier = {} is not legal: give [[tier]] tables", where, shown(node));
      TierFields t;
      std::set<std::string> keys;
      read_fields(*tier, tier_fields(), where, t, keys);
      for (const char* key : {"ranks", "bandwidth"})
        if (!tier->contains(key)) refuse("{}: the key tier.{} is missing", where, key);
      refuse_other_keys(*tier, keys, where,
                        "a tier has ranks, bandwidth, latency_seconds, oversubscription, ring_seconds");
      m.tiers.push_back({t.ranks, t.bandwidth, t.latency_seconds, t.oversubscription, t.ring_seconds});
    }
  }
  read_provenance(table, where, m.provenance, legal);
  refuse_other_keys(table, legal, where, "see docs/planning.md for the keys of a machine");
  take_what_is_omitted(table, m);
  try {
    validate(m);
  } catch (const RequestError& error) {
    refuse("{}: {}", where, error.what());
  }
  return m;
}

std::string to_toml(const Machine& m) {
  std::string text = fmt::format("name = {}\n", quoted(m.name)) + write_fields(m, machine_fields());
  for (Precision precision : all_precisions)
    if (m.peak(precision) > 0) text += fmt::format("{} = {}\n", peak_key(precision), m.peak(precision));
  text += provenance_text(m.provenance);
  for (const Tier& tier : m.tiers)
    text += "\n[[tier]]\n" +
            write_fields(TierFields{static_cast<int>(tier.ranks), tier.bandwidth, tier.latency_seconds,
                                    tier.oversubscription, tier.ring_seconds},
                         tier_fields());
  return text;
}

std::int64_t Machine::node_of(std::int64_t job) const {
  const std::int64_t whole = node(), host = devices_of_host(), most = whole / host, hosts = job / host;
  if (hosts <= most || job % host != 0) return whole;
  for (std::int64_t each = most; 2 * each >= most && each > 1; --each)
    if (hosts % each == 0) return each * host;
  return whole;
}

std::vector<std::string> machine_preset_names() {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < num_embedded_machines; ++i) names.emplace_back(embedded_machines[i].name);
  return names;
}

Machine load_machine(const std::string& name_or_path) {
  for (std::size_t i = 0; i < num_embedded_machines; ++i)
    if (name_or_path == embedded_machines[i].name)
      return machine_from_toml(embedded_machines[i].text, "configs/machines/" + name_or_path + ".toml");
  std::error_code error;
  // What `calibrate` writes where it is not told another name.
  if (name_or_path == "cpu" && std::filesystem::is_regular_file("cpu.toml", error))
    return load_machine("cpu.toml");
  if (std::filesystem::status(name_or_path, error).type() == std::filesystem::file_type::not_found)
    refuse("--machine {}: neither a preset nor a file{}; the presets are {}{}", name_or_path,
           name_or_path == "cpu" ? "" : did_you_mean(name_or_path, machine_preset_names()),
           fmt::join(machine_preset_names(), ", "),
           name_or_path == "cpu" ? "; `echelon calibrate` measures this machine and writes cpu.toml"
                                 : "; `echelon calibrate` writes the file of the machine that it runs on");
  return machine_from_toml(read_text(name_or_path, "--machine"), name_or_path);
}

}  // namespace echelon
