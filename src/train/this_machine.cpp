#include "train/this_machine.h"

#include <sched.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>

#include "base/clock.h"
#include "base/error.h"
#include "base/units.h"
#include "plan/memory.h"
#include "tensor/kernels.h"

namespace echelon {

double predicted_bytes(const Plan& plan) {
  // Beyond this the exact prediction could leave 64 bits.
  const double activations = 4.0 * static_cast<double>(std::min(plan.micro_batch, plan.global_batch)) *
                             static_cast<double>(plan.seq_len) *
                             static_cast<double>(plan.model.num_layers * plan.model.hidden);
  return activations > 1e15 ? activations
                            : static_cast<double>(predict_memory(plan, PipelineLayout(plan)).total());
}

double memory_limit() {
  double limit = std::numeric_limits<double>::infinity();
  struct sysinfo machine {};
  if (::sysinfo(&machine) == 0)
    limit =
        (static_cast<double>(machine.totalram) + static_cast<double>(machine.totalswap)) * machine.mem_unit;
  // The limit of a container; "max" where there is none.
  for (const char* file : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    double group = 0;
    if (std::ifstream(file) >> group && group > 0) limit = std::min(limit, group);
  }
  return limit;
}

void refuse_beyond_memory(const Plan& plan, double bytes) {
  const double limit = memory_limit();
  if (bytes <= limit) return;
  const int ranks = plan.mesh.num_ranks();
  refuse(
      "--model {}: needs {} on {} rank{} of this machine, which has {}; take fewer ranks, a smaller "
      "--micro-batch, --seq-len or model",
      plan.model.name, format_bytes(bytes), ranks, ranks == 1 ? "" : "s", format_bytes(limit));
}

int available_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

int machine_cores() { return std::max(available_cores(), ::get_nprocs()); }

double measure_matmul_flops(DType dtype, int threads) {
  Arena arena;
  const auto kernels = make_kernels(arena, dtype, threads);
  const std::int64_t n = dtype == DType::f64 ? 192 : 1024;  // reference kernels are slow
  const Tensor a(arena, MemoryCategory::other, dtype, {n, n}), b(arena, MemoryCategory::other, dtype, {n, n}),
      c(arena, MemoryCategory::other, dtype, {n, n});
  kernels->fill(a, 0.5);
  kernels->fill(b, 0.25);
  double best = 0;
  for (int i = 0; i < 8; ++i) {
    const auto begin = Clock::now();
    kernels->matmul(a, Transpose::no, b, Transpose::no, c, false);
    best = std::max(best, 2.0 * static_cast<double>(n * n * n) / seconds_since(begin));
  }
  return best;
}

}  // namespace echelon
