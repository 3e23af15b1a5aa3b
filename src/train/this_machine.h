// Properties of the machine that runs this: cores, memory, and speed of matrix products.
#pragma once

#include <filesystem>

#include "spec/plan.h"
#include "tensor/device_driver.h"
#include "tensor/kernels.h"
#include "train/dry_run.h"

namespace echelon {

// FLOP/s of `teams` teams of `threads` compute threads, all at once; each team multiplies its own square
// matrices, as ranks do. `smallest`: the matrices' size, doubled until a product takes a millisecond.
double measure_matmul_flops(const PrecisionRecipe& precision, int teams, int threads,
                            std::int64_t smallest = 64);

// The same for a device, with products large enough for it.
double measure_device_matmul_flops(DeviceDriver& driver, int device, const PrecisionRecipe& precision);

// Fills a matrix for timing with normal numbers, the same each time. The speed of many devices is limited by
// power, and multiplying a constant takes less power than training does.
void fill_with_normals(Kernels& kernels, const Tensor& matrix);

// What a rank of a plan will hold in memory, and what this machine has.
double predicted_bytes(const Plan& plan, const DryRunOptions& options = {});  // per rank
double memory_limit();  // of this process: that of the machine, or of its container

// Cores that this process may use: those that it is bound to, or its container's CPU quota; and how many
// threads can use them without waiting for each other.
double usable_cores();
int available_cores();
// The CPU quota of a process in cores: the least of its control group and those around it. `groups` lists the
// process's groups (like /proc/self/cgroup), `mount` is where they are. Infinite if there is no limit.
double cores_of_quota(const std::filesystem::path& groups, const std::filesystem::path& mount);
// Cores of the whole machine: a launcher may have bound each process to some of them.
int machine_cores();

}  // namespace echelon
