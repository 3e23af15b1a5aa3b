// Ten steps of a small Llama on dp 2 x tp 2 with sequence parallelism, written against the library: what
// `echelon train` does.
#include <fmt/core.h>

#include "train/trainer.h"

using namespace echelon;

int main() {
  Plan plan;
  plan.model = load_model("llama-tiny");
  plan.model.num_layers = 2;
  plan.mesh.set(Axis::dp, 2);
  plan.mesh.set(Axis::tp, 2);
  plan.sequence_parallel = true;
  plan.global_batch = 8;
  plan.micro_batch = 2;
  plan.seq_len = 32;
  validate(plan);  // refuses what cannot be done exactly

  // Any source of tokens will do; this one counts upwards, which is soon learnt.
  const SampleSource counting = [&](std::int64_t step, std::int64_t sample, std::int32_t* tokens,
                                    std::int32_t* targets) {
    for (std::int64_t t = 0; t < plan.seq_len; ++t) {
      tokens[t] = static_cast<std::int32_t>((step + sample + t) % 7);
      targets[t] = static_cast<std::int32_t>((step + sample + t + 1) % 7);
    }
  };
  OptimizerOptions optimizer;
  optimizer.lr = 1e-2;
  optimizer.warmup_steps = 2;
  optimizer.total_steps = 10;

  double loss = 0;
  ThreadWorld world(plan.mesh.num_ranks(), std::chrono::seconds(60));
  run_ranks(world, [&](int index) {
    Arena arena;
    const auto kernels = make_kernels(arena, plan.precision, /*threads=*/1);
    const Rank rank(world, plan.mesh, index, plan.precision, arena, *kernels);
    Trainer trainer(rank, plan, optimizer, /*seed=*/1);
    for (std::int64_t step = 0; step < 10; ++step) {
      const double mean = trainer.compute_gradients(step, counting);
      trainer.apply_gradients(step);
      if (index == 0) fmt::print("step {}  loss {:.4f}\n", step + 1, loss = mean);
    }
  });
  return loss < 3.0 ? 0 : 1;
}
