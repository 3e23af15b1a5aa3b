// The machine that a plan is for, as data: what one device computes and holds, and the links between devices.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "spec/device.h"
#include "spec/provenance.h"

namespace echelon {

// What products are computed in. Norms, softmax and the optimizer do not follow: they move 16- or 32-bit
// numbers.
enum class Precision { f32, bf16, fp8, fp4 };
inline constexpr std::array<Precision, 4> all_precisions{Precision::f32, Precision::bf16, Precision::fp8,
                                                         Precision::fp4};
const char* precision_name(Precision precision);
// RequestError naming `field` and the legal values.
Precision parse_precision(const std::string& text, const std::string& field);

// Devices that one level of links joins: those of a node, those of a cluster.
struct Tier {
  std::int64_t ranks = 0;       // that it joins
  double bandwidth = 0;         // bytes/s of one device, in each direction, as a collective sees it
  double latency_seconds = 0;   // of a hop
  double oversubscription = 1;  // bandwidth is divided by it
  double ring_seconds = 0;      // what a ring takes for a hop above that, as its chunks wait in buffers
};

struct Machine {
  std::string name;
  double memory_bytes = 0;
  double reserved_bytes = 0;    // of it: the driver's, the communication library's
  double memory_bandwidth = 0;  // bytes/s
  double memory_efficiency = 1;
  double watts = 0;                    // of one device, by its design; 0: not known
  std::array<double, 4> peak_flops{};  // dense FLOP/s by Precision; 0: not there
  double peak_tf32 = 0;                // of f32 whose products round their operands to TF32; 0: not there

  // Products of matrices are made in tiles by `cores` processors at once: a last wave that is not full costs
  // up to a whole one (`wave_rounding` of it), and filling the pipeline of a tile costs as much as
  // `half_depth` of its inner dimension. The smaller tiles have part of the large one's rate.
  int cores = 1;
  int gemm_tile = 128;  // the large tile is twice as high as it is wide, the small one half as high
  double gemm_efficiency = 1;
  double gemm_half_depth = 0;
  double gemm_wave_rounding = 0;
  double gemm_medium_tile = 1, gemm_small_tile = 1;
  // Part of the rate that is left where rows of a matrix begin at multiples of 2 bytes only, not of 16 (a
  // vocabulary that is odd, not padded); of 8 and of 4 bytes the first two of three equal steps down to it.
  double gemm_unaligned = 1;
  double gemm_fp8_efficiency = 1, gemm_fp4_efficiency = 1;  // of these products, in place of gemm_efficiency
  // Fused attention: parts of the peak on long sequences, and the length at which half of it is reached.
  double attention_forward = 1, attention_backward = 1;
  double attention_half_length = 0;
  double older_attention = 1;     // part of it that kernels reach which were not written for this machine
  double f32_attention = 1;       // times these parts, of the f32 peak
  double launch_seconds = 0;      // of a kernel, on the device
  double collective_seconds = 0;  // of starting a collective
  double small_group_loss = 0;    // of n ranks in a node: bytes cost 1 + this / (n - 1)
  // Over nodes: whether collectives go around one ring of all ranks, whose hops inside nodes and between them
  // are at work at once, as NCCL's do on a network that keeps up; else one after the other.
  bool whole_rings = false;

  // What one device has of its host: its link's bytes/s in each direction, and its part of the host's memory.
  // 0: not known, and nothing is kept there.
  double host_bandwidth = 0;
  double host_efficiency = 0.8;  // that copies from and to pinned memory reach
  double host_memory_bytes = 0;
  double host_memory_bandwidth = 0;
  double host_memory_efficiency = 0.5;  // that the optimizer reaches on the host's cores

  int host_devices =
      0;  // of one host, where the innermost tier joins those of several; 0: of the innermost tier

  std::vector<Tier> tiers;  // from the innermost out
  Provenance provenance;    // the tiers' key is "tier"

  // What computes: where kernels are launched, a GPU.
  Device device() const { return launch_seconds > 0 ? Device::cuda : Device::cpu; }
  double peak(Precision precision) const { return peak_flops[static_cast<std::size_t>(precision)]; }
  // Devices of a node.
  int node() const { return static_cast<int>(tiers.front().ranks); }
  // Of them those that a job of so many devices takes of each. Where a node joins several hosts (an NVL72's
  // domain 18) and the job's hosts do not fit one, each node has as many: the most that divide the job's
  // hosts, as NVIDIA's recipes ask of Slurm (--segment), if that is half a node or more. Else nodes are
  // filled one after the other.
  std::int64_t node_of(std::int64_t job) const;
  int devices_of_host() const { return host_devices > 0 ? host_devices : node(); }
};

// Throws RequestError naming the key unless these numbers make a machine.
void validate(const Machine& machine);

// A preset's name or a TOML file; RequestError otherwise, listing the presets.
Machine load_machine(const std::string& name_or_path);
std::vector<std::string> machine_preset_names();
Machine machine_from_toml(const std::string& text, const std::string& where);
std::string to_toml(const Machine& machine);  // machine_from_toml(to_toml(m)) == m

}  // namespace echelon
