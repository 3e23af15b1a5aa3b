// A machine as data: what one device computes and stores, and the links between devices.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "spec/device.h"
#include "spec/provenance.h"

namespace echelon {

// The precision of matrix products. Norms, softmax and the optimizer are not affected: they move 16- or
// 32-bit numbers.
enum class Precision { f32, bf16, fp8, fp4 };
inline constexpr std::array<Precision, 4> all_precisions{Precision::f32, Precision::bf16, Precision::fp8,
                                                         Precision::fp4};
const char* precision_name(Precision precision);
// RequestError naming `field` and the legal values.
Precision parse_precision(const std::string& text, const std::string& field);

// One level of the network: the links that join the devices of a node, or of a cluster.
struct Tier {
  std::int64_t ranks = 0;       // devices that it joins
  double bandwidth = 0;         // bytes/s of one device, in each direction, that a collective reaches
  double latency_seconds = 0;   // per hop
  double oversubscription = 1;  // divides the bandwidth
  // Extra time of each hop of a ring, whose chunks wait in buffers.
  double ring_seconds = 0;
};

struct Machine {
  std::string name;
  double memory_bytes = 0;
  double reserved_bytes = 0;    // part of memory_bytes that the driver and the communication library take
  double memory_bandwidth = 0;  // bytes/s
  double memory_efficiency = 1;
  double watts = 0;                    // design power of one device; 0: unknown
  std::array<double, 4> peak_flops{};  // dense FLOP/s, by Precision; 0: not supported
  double peak_tf32 = 0;  // FLOP/s of f32 products whose operands are rounded to TF32; 0: not supported

  // Matrix products run in tiles on `cores` processors at once. A last wave that is not full costs between
  // its share and a whole wave (gemm_wave_rounding: 0 to 1). Filling a tile's pipeline costs as much as
  // `gemm_half_depth` of the inner dimension. Smaller tiles reach a fraction of the large tile's rate
  // (gemm_medium_tile, gemm_small_tile).
  int cores = 1;
  int gemm_tile = 128;  // the large tile is twice as high as it is wide, the small one half as high
  double gemm_efficiency = 1;
  double gemm_half_depth = 0;
  double gemm_wave_rounding = 0;
  double gemm_medium_tile = 1, gemm_small_tile = 1;
  // The fraction of the rate that remains if the rows of a matrix are aligned to 2 bytes only instead of 16
  // (an odd vocabulary without padding). Alignments of 8 and 4 bytes are the first two of three equal steps
  // down to it.
  double gemm_unaligned = 1;
  double gemm_fp8_efficiency = 1, gemm_fp4_efficiency = 1;  // of such products, instead of gemm_efficiency
  // Fused attention: fractions of the peak on long sequences, and the sequence length at which half of that
  // is reached.
  double attention_forward = 1, attention_backward = 1;
  double attention_half_length = 0;
  double older_attention = 1;     // times this for kernels that were not written for this machine
  double f32_attention = 1;       // times this in f32, of the f32 peak
  double launch_seconds = 0;      // per kernel, on the device
  double collective_seconds = 0;  // to start a collective
  double small_group_loss =
      0;  // in a group of n ranks of a node, bytes cost 1 + this / (n - 1) times as much
  // Collectives over several nodes. true: one ring of all ranks, whose hops inside and between nodes work at
  // the same time, as with NCCL on a network that keeps up. false: first one level, then the other.
  bool whole_rings = false;

  // One device's share of its host: the link's bytes/s in each direction, and the host's memory. 0: unknown,
  // and nothing is kept there.
  double host_bandwidth = 0;
  double host_efficiency = 0.8;  // reached by copies from and to pinned memory
  double host_memory_bytes = 0;
  double host_memory_bandwidth = 0;
  double host_memory_efficiency = 0.5;  // reached by the optimizer on the host's cores

  // Devices of one host, if the innermost tier joins several hosts; 0: all of the innermost tier.
  int host_devices = 0;

  // Keys that its file leaves out of what a device reaches of its peaks and takes to start work; their values
  // here are those of a preset.
  std::vector<std::string> omitted;

  std::vector<Tier> tiers;  // from the innermost out
  Provenance provenance;    // the tiers' key is "tier"

  // The kind of device: a GPU if kernels have a launch time.
  Device device() const { return launch_seconds > 0 ? Device::cuda : Device::cpu; }
  double peak(Precision precision) const { return peak_flops[static_cast<std::size_t>(precision)]; }
  // Devices of a node.
  int node() const { return static_cast<int>(tiers.front().ranks); }
  // How many devices of each node a job of `job` devices uses. Where a node joins several hosts (the domain
  // of an NVL72 has 18) and the job needs more than one node, every node gives equally many hosts: the most
  // that divide the job's hosts, as NVIDIA's recipes ask of Slurm (--segment), if that is at least half a
  // node. Otherwise nodes are filled one after the other.
  std::int64_t node_of(std::int64_t job) const;
  int devices_of_host() const { return host_devices > 0 ? host_devices : node(); }
};

// RequestError naming the key unless these numbers describe a machine.
void validate(const Machine& machine);

// Loads a preset by name, or a TOML file. RequestError listing the presets otherwise.
Machine load_machine(const std::string& name_or_path);
std::vector<std::string> machine_preset_names();
// `where` is what errors call the text. A part of a peak, or the time to start a kernel or a collective, that
// the text leaves out is that of an H100 (Machine::omitted).
Machine machine_from_toml(const std::string& text, const std::string& where);
std::string to_toml(const Machine& machine);  // machine_from_toml(to_toml(m)) == m

}  // namespace echelon
