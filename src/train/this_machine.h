// What the machine that runs this has: cores, memory, and how fast it multiplies.
#pragma once

#include <filesystem>

#include "spec/plan.h"
#include "tensor/device_driver.h"
#include "tensor/kernels.h"
#include "train/dry_run.h"

namespace echelon {

// FLOP/s of `teams` of `threads` compute threads each, all at once, each team on square matrix products of
// its own, as ranks compute. `smallest`: the matrices' size, doubled until a product takes a millisecond.
double measure_matmul_flops(const PrecisionRecipe& precision, int teams, int threads,
                            std::int64_t smallest = 64);

// The same of a device, on products that are large enough for it.
double measure_device_matmul_flops(DeviceDriver& driver, int device, const PrecisionRecipe& precision);

// Gives matrices that are multiplied to be timed normal numbers, the same each time. Many devices are as fast
// as their power allows, and multiplying one number again and again takes less of it than a training does.
void fill_with_normals(Kernels& kernels, const Tensor& matrix);

// What the ranks of a plan will hold in memory, and what there is.
double predicted_bytes(const Plan& plan, const DryRunOptions& options = {});  // of one rank
double memory_limit();  // of this process: the machine's memory, or its container's

// Cores that this process may use: those that it is bound to, or what its container's quota of CPU time is
// worth; and how many threads can use them without waiting for one another.
double usable_cores();
int available_cores();
// What control groups leave to a process: the least of its group and those around it. `groups` lists the
// process's own (as /proc/self/cgroup), `mount` is where they are. Infinite where nothing is limited.
double cores_of_quota(const std::filesystem::path& groups, const std::filesystem::path& mount);
// Cores of the machine: a launcher may have given each of several processes its own.
int machine_cores();

}  // namespace echelon
