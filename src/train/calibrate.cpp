#include "train/calibrate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/clock.h"
#include "comm/threads.h"
#include "comm/world.h"
#include "model/scratch_file.h"
#include "plan/op_seconds.h"
#include "plan/workload.h"
#include "tensor/device_stream.h"
#include "tensor/host.h"
#include "tensor/kernels.h"
#include "train/this_machine.h"

namespace echelon {
namespace {

// Best of as many tries as fit the time, at least three after one that warms up.
template <class Work>
double best_seconds(const Work& work, double budget_seconds = 0.15) {
  work();
  double best = 1e300, spent = 0;
  for (int tries = 0; tries < 3 || (spent < budget_seconds && tries < 200); ++tries) {
    const auto begin = Clock::now();
    work();
    const double seconds = seconds_since(begin);
    best = std::min(best, seconds);
    spent += seconds;
  }
  return best;
}

// The same on a device, by its clock: seconds of one in a row of them.
template <class Work>
double best_seconds_on(const DeviceStream& stream, int row, const Work& work) {
  work();
  double best = 1e300;
  for (int tries = 0; tries < 5; ++tries) {
    const auto begin = stream.record();
    for (int i = 0; i < row; ++i) work();
    const auto end = stream.record();
    end->synchronize();
    best = std::min(best, end->seconds_since(*begin) / row);
  }
  return best;
}

// What a machine is measured in.
constexpr Precision measured_precisions[] = {Precision::f32, Precision::bf16};

struct SizedProduct {
  std::int64_t rows, depth, cols;
  double seconds = 0;
};
using Products = std::vector<SizedProduct>;

class Bench {
 public:
  Bench(DeviceDriver* driver, int threads, Precision precision)
      : arena_(driver, 0),
        recipe_(trained_recipe(precision)),
        kernels_(make_kernels(arena_, recipe_, threads)) {}

  Tensor tensor(std::vector<std::int64_t> shape) { return tensor(recipe_.activations, std::move(shape)); }
  // Sums over a row, which are never narrow.
  Tensor statistics(std::vector<std::int64_t> shape) { return tensor(DType::f32, std::move(shape)); }
  Kernels& kernels() { return *kernels_; }
  bool on_device() const { return arena_.device() == Device::cuda; }
  template <class Work>
  double seconds(const Work& work) const {
    return on_device() ? best_seconds_on(arena_.stream(), 10, work) : best_seconds(work);
  }

  double product(const SizedProduct& p) {
    const Tensor a = tensor({p.rows, p.depth}), b = tensor({p.cols, p.depth}), c = tensor({p.rows, p.cols});
    for (const Tensor& factor : {a, b}) fill_with_normals(*kernels_, factor);
    return seconds([&] { kernels_->matmul(a, Transpose::no, b, Transpose::yes, c, false); });
  }

 private:
  Tensor tensor(DType dtype, std::vector<std::int64_t> shape) {
    Tensor t(arena_, MemoryCategory::other, dtype, std::move(shape));
    kernels_->fill(t, 0.5);
    return t;
  }

  Arena arena_;
  const PrecisionRecipe& recipe_;
  std::unique_ptr<Kernels> kernels_;
};

// Those of models that fit: activations by weights, and what their gradients take.
Products measure_products(Bench& bench, const Progress& progress, double from, double to) {
  Products list{{1024, 64, 192},   {1024, 64, 256},   {1024, 256, 64},   {2048, 256, 1024},
                {2048, 1024, 256}, {512, 512, 1536},  {2048, 512, 2048}, {1024, 1024, 1024},
                {256, 2048, 64},   {1024, 2048, 256}, {512, 64, 257},    {512, 512, 8192}};
  if (bench.on_device())
    list = {{1024, 1024, 1024}, {2048, 768, 2304},   {8192, 768, 3072},   {8192, 3072, 768},
            {8192, 768, 50304}, {768, 8192, 3072},   {4096, 2048, 2048},  {4096, 2048, 8192},
            {4096, 4096, 4096}, {4096, 4096, 14336}, {4096, 14336, 4096}, {8192, 8192, 8192}};
  for (std::size_t i = 0; i < list.size(); ++i) {
    report(progress, from + (to - from) * static_cast<double>(i) / static_cast<double>(list.size()),
           "matrix products");
    list[i].seconds = bench.product(list[i]);
  }
  return list;
}

double described(const OpSeconds& ops, const SizedProduct& p) {
  return ops.product(static_cast<double>(p.rows), static_cast<double>(p.depth), static_cast<double>(p.cols));
}

double squared_error(const Machine& machine, Precision precision, const Products& products) {
  const Software plain;
  const OpSeconds ops(machine, plain, precision);
  double sum = 0;
  for (const SizedProduct& p : products) {
    const double error = std::log(described(ops, p) / p.seconds);
    sum += error * error;
  }
  return sum;
}

// The rate of each precision, and what both share: the depth that filling costs and the start of a product.
void fit_products(Machine& machine, const std::vector<Products>& by_precision) {
  double best = 1e300;
  Machine found = machine;
  for (double depth : {0.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0})
    for (double launch : {0.0, 1e-6, 3e-6, 6e-6, 12e-6, 25e-6, 50e-6}) {
      Machine trial = machine;
      trial.gemm_half_depth = depth;
      trial.launch_seconds = launch;
      double error = 0;
      for (std::size_t i = 0; i < by_precision.size(); ++i) {
        const Precision precision = measured_precisions[i];
        double fastest = 0, least = 1e300, rate = 0;
        for (const SizedProduct& p : by_precision[i])
          fastest = std::max(fastest, 2.0 * static_cast<double>(p.rows * p.depth * p.cols) / p.seconds);
        double& peak = trial.peak_flops[static_cast<std::size_t>(precision)];
        for (double above : {1.0, 1.05, 1.1, 1.2, 1.35}) {
          peak = above * fastest;
          const double here = squared_error(trial, precision, by_precision[i]);
          if (here < least) least = here, rate = peak;
        }
        peak = rate;
        error += least;
      }
      if (error < best) best = error, found = trial;
    }
  machine = found;
}

// Passes over memory as layers make them: bytes over seconds.
double elementwise_rate(Bench& bench) {
  const std::int64_t rows = bench.on_device() ? 16384 : 2048, cols = bench.on_device() ? 4096 : 512;
  const Tensor x = bench.tensor({rows, cols}), y = bench.tensor({rows, cols}), w = bench.tensor({cols}),
               stats = bench.statistics({rows, 1}), wide = bench.tensor({rows, 2 * cols});
  const double element = 4.0 * static_cast<double>(rows * cols);
  Kernels& k = bench.kernels();
  const double norm = bench.seconds([&] { k.rms_norm(x, w, 1e-5, y, stats); });
  const double add = bench.seconds([&] { k.residual(x, y, {}, y); });
  const double act = bench.seconds([&] { k.gated(Activation::swiglu, wide, y); });
  return element * (2 + 3 + 3) / (norm + add + act);
}

struct AttentionTimes {
  double length, flops, forward, backward;
};

AttentionTimes measure_attention(Bench& bench, std::int64_t length) {
  const std::int64_t heads = bench.on_device() ? 16 : 4, dim = bench.on_device() ? 128 : 32,
                     batch = std::max<std::int64_t>(1, (bench.on_device() ? 8192 : 1024) / length);
  AttentionShape shape;
  shape.batch = batch;
  shape.q_len = shape.kv_len = length;
  shape.num_heads = shape.num_kv_heads = heads;
  shape.head_dim = dim;
  shape.scale = 1 / std::sqrt(static_cast<double>(dim));
  const auto matrix = [&] { return bench.tensor({batch * length, heads * dim}); };
  const Tensor q = matrix(), k = matrix(), v = matrix(), out = matrix(), dout = matrix(), dq = matrix(),
               dk = matrix(), dv = matrix();
  const Tensor lse = bench.statistics({batch * heads * length}),
               delta = bench.statistics({batch * heads * length});
  Kernels& kernels = bench.kernels();
  AttentionTimes t{};
  t.length = static_cast<double>(length);
  t.flops = 2.0 * static_cast<double>(batch * heads * length * length * dim);
  t.forward = bench.seconds([&] { kernels.attention(q, k, v, shape, out, lse); });
  t.backward = bench.seconds([&] {
    kernels.attention_delta(out, dout, shape, delta);
    kernels.attention_backward(q, k, v, dout, lse, delta, shape, dq, dk, dv);
  });
  return t;
}

struct AttentionParts {  // of a peak, as a Machine says it
  double half_length, forward, backward;
};

// flops (1 + half / length) / rate at two lengths.
AttentionParts fit_attention(const AttentionTimes& shorter, const AttentionTimes& longer, double peak) {
  const double a = shorter.forward / shorter.flops, b = longer.forward / longer.flops;
  const double slope = std::max(0.0, (a - b) / (1 / shorter.length - 1 / longer.length));
  const double at_once = std::max(0.1 * b, b - slope / longer.length), half = slope / at_once;
  const double whole = longer.backward / (2.5 * longer.flops) / (1 + half / longer.length);
  return {half, std::clamp(1 / (at_once * peak), 1e-3, 1.0), std::clamp(1 / (whole * peak), 1e-3, 1.0)};
}

// Those of bf16, and how much more of its peak f32 reaches.
void describe_attention(Machine& machine, const AttentionParts& f32, const AttentionParts& bf16) {
  machine.attention_half_length = 0.5 * (f32.half_length + bf16.half_length);
  machine.attention_forward = bf16.forward;
  machine.attention_backward = bf16.backward;
  machine.f32_attention = std::sqrt(f32.forward / bf16.forward * f32.backward / bf16.backward);
}

// Seconds of one in a row of them, as layers call them: ranks that wait for one another are awake already.
double all_reduce_seconds(DeviceDriver* driver, int ranks, std::int64_t count, int row) {
  ThreadWorld world(ranks, std::chrono::seconds(60));
  double best = 1e300;
  run_ranks(world, [&](int index) {
    Arena arena(driver, 0);
    const auto group = world.join(index, everyone(ranks), "calibrate");
    const Tensor x(arena, MemoryCategory::communication, DType::f32, {count});
    copy_from_host(std::vector<float>(static_cast<std::size_t>(count)), x);
    if (driver != nullptr) {
      // As often on each rank, so that they meet.
      const double seconds = best_seconds_on(arena.stream(), row, [&] { group->all_reduce(x).wait(); });
      if (index == 0) best = seconds;
      return;
    }
    for (int repeat = 0; repeat < 12; ++repeat) {
      group->barrier().wait();
      const auto begin = Clock::now();
      for (int i = 0; i < row; ++i) group->all_reduce(x).wait();
      if (index == 0 && repeat > 1) best = std::min(best, seconds_since(begin) / row);
    }
  });
  return best;
}

}  // namespace

Calibration calibrate(int threads, const Progress& progress, DeviceDriver* driver) {
  Bench bench(driver, threads, Precision::f32), narrow(driver, threads, Precision::bf16);
  Bench* const benches[] = {&bench, &narrow};
  Calibration result;
  Machine& m = result.machine;
  if (driver != nullptr) {
    const DeviceProperties device = driver->properties(0);
    m.name = device.name;
    m.memory_bytes = static_cast<double>(device.memory_bytes);
    m.cores = device.multiprocessors;
  } else {
    m.name = "cpu";
    m.memory_bytes = memory_limit();
    m.gemm_tile = 16;  // of vector kernels on a few cores
    m.cores = threads;
  }
  const std::int64_t large = driver != nullptr ? 64 << 20 : 16 << 20;
  const Tensor from = bench.tensor({large / 1024, 1024}), to = bench.tensor({large / 1024, 1024});
  m.memory_bandwidth =
      8.0 * static_cast<double>(large) / bench.seconds([&] { bench.kernels().copy(from, to); });
  if (driver == nullptr) {  // where --offload keeps state
    const ScratchFile file("", static_cast<std::size_t>(from.bytes()), Device::cpu, "a try of this machine");
    const Tensor kept = Tensor::view_of(file.at(0), DType::f32, {large / 1024, 1024});
    m.host_bandwidth =
        4.0 * static_cast<double>(large) / bench.seconds([&] { bench.kernels().copy(from, kept); });
    m.host_efficiency = 1;
  }
  m.tiers = {{driver != nullptr ? 2 : std::max(1, available_cores() / threads), 1e9, 0, 1}};
  std::vector<Products> products;
  for (Bench* one : benches) {
    const double begin = 0.35 * static_cast<double>(products.size());
    products.push_back(measure_products(*one, progress, begin, begin + 0.35));
  }
  fit_products(m, products);
  report(progress, 0.7, "passes over memory");
  const double rate = elementwise_rate(bench);
  m.memory_efficiency = std::clamp(rate / m.memory_bandwidth, 1e-3, 1.0);
  report(progress, 0.8, "attention");
  std::vector<std::pair<AttentionTimes, AttentionTimes>> attention;
  for (Bench* one : benches) {
    const std::int64_t length = one->on_device() ? 1024 : 128;
    const AttentionTimes shorter = measure_attention(*one, length);
    attention.emplace_back(shorter, measure_attention(*one, 4 * length));
  }
  const auto parts = [&](std::size_t i) {
    return fit_attention(attention[i].first, attention[i].second, m.peak(measured_precisions[i]));
  };
  describe_attention(m, parts(0), parts(1));
  const int ranks = static_cast<int>(std::max<std::int64_t>(2, m.tiers[0].ranks));
  const std::int64_t small_count = 1024, large_count = 4 << 20;
  report(progress, 0.9, "all_reduce");
  const double small = all_reduce_seconds(driver, ranks, small_count, 64),
               bulk = all_reduce_seconds(driver, ranks, large_count, 2);
  const double moved = 2.0 * (ranks - 1) / ranks * 4;
  m.tiers[0].ranks = ranks;
  m.tiers[0].bandwidth =
      std::max(1.0, moved * static_cast<double>(large_count - small_count) / std::max(1e-9, bulk - small));
  m.collective_seconds =
      std::max(0.0, small - moved * static_cast<double>(small_count) / m.tiers[0].bandwidth);
  m.provenance.measured = {"memory_bytes",
                           "memory_bandwidth",
                           "memory_efficiency",
                           "peak_f32",
                           "peak_bf16",
                           "gemm_half_depth",
                           "launch_seconds",
                           "attention_forward",
                           "attention_backward",
                           "attention_half_length",
                           "f32_attention",
                           "collective_seconds",
                           "tier"};
  if (driver == nullptr)
    m.provenance.measured->insert(m.provenance.measured->end(), {"host_bandwidth", "host_efficiency"});
  validate(m);

  const Software plain;
  for (std::size_t i = 0; i < products.size(); ++i) {
    const Precision precision = measured_precisions[i];
    const char* const name = precision_name(precision);
    const OpSeconds ops(m, plain, precision);
    for (const SizedProduct& p : products[i])
      result.samples.push_back({fmt::format("{} product {} x {} x {}", name, p.rows, p.depth, p.cols),
                                p.seconds, described(ops, p)});
    for (const AttentionTimes& t : {attention[i].first, attention[i].second}) {
      result.samples.push_back({fmt::format("{} attention of {}", name, t.length), t.forward,
                                ops.attention_forward(t.flops, t.length)});
      result.samples.push_back(
          {"its backward pass", t.backward, ops.attention_backward(2.5 * t.flops, t.length)});
    }
  }
  const OpSeconds ops(m, plain, Precision::f32);
  for (const auto& [count, seconds] : {std::pair{small_count, small}, {large_count, bulk}})
    result.samples.push_back({fmt::format("all_reduce of {} KiB, {} ranks", count * 4 / 1024, ranks), seconds,
                              ops.collective(Verb::all_reduce, 4.0 * static_cast<double>(count), {ranks})});
  return result;
}

}  // namespace echelon
