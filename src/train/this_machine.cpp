#include "train/this_machine.h"

#include <sched.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/philox.h"
#include "base/units.h"
#include "comm/host_group.h"
#include "comm/threads.h"
#include "tensor/host.h"
#include "tensor/kernels.h"
#include "tensor/prepare_kernels.h"
#include "train/dry_run.h"

namespace echelon {

double predicted_bytes(const Plan& plan, const DryRunOptions& options) {
  // Beyond this the exact prediction could leave 64 bits.
  const double activations = 4.0 * static_cast<double>(sequences_at_once(plan)) *
                             static_cast<double>(plan.seq_len) *
                             static_cast<double>(plan.model.num_layers * plan.model.hidden);
  return activations > 1e15
             ? activations
             : static_cast<double>(predict_memory(plan, PipelineLayout(plan), {}, options).total());
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

namespace {

// "max 100000" or "150000 100000" (microseconds of a period), in one file or in two.
double quota_in(const std::filesystem::path& directory) {
  constexpr double no_limit = std::numeric_limits<double>::infinity();
  double quota = 0, period = 0;
  if (std::ifstream(directory / "cpu.max") >> quota >> period && quota > 0 && period > 0)
    return quota / period;
  if (std::ifstream(directory / "cpu.cfs_quota_us") >> quota && quota > 0 &&
      std::ifstream(directory / "cpu.cfs_period_us") >> period && period > 0)
    return quota / period;
  return no_limit;
}

}  // namespace

double cores_of_quota(const std::filesystem::path& groups, const std::filesystem::path& mount) {
  double cores = std::numeric_limits<double>::infinity();
  std::ifstream in(groups);
  for (std::string line; std::getline(in, line);) {  // "0::/path", or "4:cpu,cpuacct:/path"
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool is_unified = controllers == ",,";
    if (!is_unified && controllers.find(",cpu,") == std::string::npos) continue;
    const std::filesystem::path root = is_unified ? mount : mount / "cpu";
    // From inside a container the path may be another's; its own group is then the root.
    for (std::filesystem::path group = line.substr(second + 1);; group = group.parent_path()) {
      cores = std::min(cores, quota_in(root / group.relative_path()));
      if (group.relative_path().empty()) break;
    }
  }
  return cores;
}

double usable_cores() {
  cpu_set_t set;
  const int bound = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  static const double quota = cores_of_quota("/proc/self/cgroup", "/sys/fs/cgroup");
  return std::min<double>(std::max(1, bound), quota);
}

int available_cores() { return std::max(1, static_cast<int>(usable_cores())); }

int machine_cores() {
  return std::max(available_cores(),
                  static_cast<int>(std::min<double>(::get_nprocs(),
                                                    cores_of_quota("/proc/self/cgroup", "/sys/fs/cgroup"))));
}

void fill_with_normals(Kernels& kernels, const Tensor& matrix) {
  // Drawn once, and copied there from then on: how often they come again no product tells.
  constexpr std::int64_t most = 1 << 16;
  const std::int64_t rows = matrix.rows(), drawn = std::clamp(most / matrix.cols(), std::int64_t{1}, rows);
  std::vector<double> numbers(static_cast<std::size_t>(drawn * matrix.cols()));
  Philox(1, Stream::initial_value, 0).fill_normal(0, numbers.size(), numbers.data());
  const Tensor first = matrix.row_range(0, drawn);
  copy_numbers_from_host(numbers, first);
  for (std::int64_t row = drawn; row < rows; row += drawn) {
    const std::int64_t count = std::min(drawn, rows - row);
    kernels.copy(first.row_range(0, count), matrix.row_range(row, row + count));
  }
}

namespace {

// What peaks are measured on: of two matrices of `size` x `size`.
class SquareProduct {
 public:
  SquareProduct(Arena& arena, Kernels& kernels, const PrecisionRecipe& precision, std::int64_t size)
      : kernels_(kernels), size_(size) {
    for (Tensor* const m : {&a_, &b_, &c_})
      *m = Tensor(arena, MemoryCategory::other, precision.activations, {size, size});
    for (const Tensor& factor : {a_, b_}) fill_with_normals(kernels, factor);
    kernels.fill(c_, 0);
  }
  void make() const { kernels_.matmul(a_, Transpose::no, b_, Transpose::no, c_, false); }
  double flops() const { return 2.0 * static_cast<double>(size_ * size_ * size_); }

 private:
  Kernels& kernels_;
  std::int64_t size_;
  Tensor a_, b_, c_;
};

}  // namespace

double measure_device_matmul_flops(DeviceDriver& driver, int device, const PrecisionRecipe& precision) {
  constexpr std::int64_t smallest = 64, largest = 8192;
  constexpr double long_enough_seconds = 5e-3;  // a launch takes some microseconds
  constexpr int tries = 8;
  Arena arena(&driver, device);
  const auto kernels = make_kernels(arena, precision, 1);
  double best = 0;
  for (std::int64_t size = smallest;; size *= 2) {
    const SquareProduct product(arena, *kernels, precision, size);
    double seconds = 0;
    for (int k = 0; k < tries; ++k) {
      arena.synchronize();
      const auto begin = Clock::now();
      product.make();
      arena.synchronize();
      seconds = seconds_since(begin);
      best = std::max(best, product.flops() / seconds);
    }
    if (seconds > long_enough_seconds || size == largest) return best;
  }
}

// Of the first size that takes long enough to hide what starting it costs: what is larger is more often
// interrupted by what else runs on the machine.
double measure_matmul_flops(const PrecisionRecipe& precision, int teams, int threads, std::int64_t smallest) {
  constexpr std::int64_t largest = 8192;
  constexpr double long_enough_seconds = 1e-3;
  // Until nothing better has been seen for a while, and for longer than a thread that shares its core waits.
  constexpr int patience = 3;
  constexpr double least_seconds = 0.04;
  prepare_kernels(precision);
  double best = 0;
  ThreadWorld world(teams, std::chrono::hours(1));
  run_ranks(world, [&](int team) {
    const auto all = world.join(team, everyone(teams), "measuring this machine");
    const HostGroup group(*all);
    Arena arena;
    const auto kernels = make_kernels(arena, precision, threads);
    for (std::int64_t size = smallest;; size *= 2) {
      const SquareProduct product(arena, *kernels, precision, size);
      // Of the slowest team: what all reach together.
      const auto product_seconds = [&] {
        all->barrier().wait();
        const auto begin = Clock::now();
        product.make();
        return group.max(seconds_since(begin));
      };
      double least = product_seconds(), spent = least;
      if (size < largest && least < long_enough_seconds) least = std::min(least, product_seconds());
      if (size < largest && least < long_enough_seconds) continue;
      for (int since_gain = 0; since_gain <= patience || spent < least_seconds;) {
        const double seconds = product_seconds();
        spent += seconds;
        since_gain = seconds < 0.99 * least ? 0 : since_gain + 1;
        least = std::min(least, seconds);
      }
      if (team == 0) best = teams * product.flops() / least;
      return;
    }
  });
  return best;
}

}  // namespace echelon
