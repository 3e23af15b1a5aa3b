// Fully sharded data parallelism: llm-foundry and torchtitan.
#include <fmt/format.h>

#include <algorithm>

#include "published/csv.h"
#include "published/shapes.h"
#include "published/sources.h"
#include "workloads.h"

namespace echelon::published {
Table llm_foundry(const std::string& path) {
  Table t{"llm-foundry", {}};
  for (const CsvRow& r : read_csv(path)) {
    Point p;
    Plan c = checks::searched_plan();
    c.mesh.set(Axis::dp, whole(r, "gpus"));
    c.zero = r.at("sharding") == "FULL_SHARD" ? 3 : r.at("sharding") == "SHARD_GRAD_OP" ? 2 : 0;
    c.micro_batch = whole(r, "micro_batch_seqs");
    c.recompute = yes(r, "activation_checkpointing") ? Recompute::full : Recompute::none;
    const bool h100 = r.at("gpu").starts_with("h100");
    const bool fp8 = r.at("precision").find("fp8") != std::string::npos;
    ModelSpec model = gpt_of(r);
    p.label = fmt::format("{} {} seq {} {} GPUs", r.at("gpu"), r.at("model"), r.at("seq_len"), r.at("gpus"));
    p.work = checks::workload_of(model, whole(r, "seq_len"), whole(r, "global_batch_seqs"),
                                 fp8 ? Precision::fp8 : Precision::bf16,
                                 load_machine(h100 ? "h100" : "a100-40"), load_software("fsdp"));
    p.plans = {c};
    p.seconds = number(r, "derived_step_time_s");
    t.points.push_back(std::move(p));
  }
  mark(t, 3);
  return t;
}

// Whole rows: bf16 without compilation, compiled, compiled with float8.
Table torchtitan(const std::string& path) {
  Table t{"torchtitan", {}};
  for (const CsvRow& r : read_csv(path)) {
    Point p;
    Plan c = checks::searched_plan();
    c.mesh.set(Axis::dp, whole(r, "FSDP"));
    c.mesh.set(Axis::tp, whole(r, "TP"));
    c.mesh.set(Axis::pp, whole(r, "PP"));
    c.mesh.set(Axis::cp, whole(r, "CP"));
    c.context_kind = ContextKind::allgather;  // its default (context_parallel_rotate_method)
    c.zero = 3;
    c.chunks = 1;
    c.micro_batch = whole(r, "local_batch_seqs");
    c.recompute = r.at("activation_checkpoint") == "full" ? Recompute::full : Recompute::selective;
    const bool large = r.at("model").find("70B") != std::string::npos;
    p.label = fmt::format("{} {} {}{}{} seq {}", r.at("table"), r.at("model"), summary(c),
                          yes(r, "torch_compile") ? " compiled" : "", yes(r, "float8") ? " fp8" : "",
                          r.at("seq_len"));
    p.work = checks::workload_of(load_model(large ? "llama-3-70b" : "llama-3-8b"), whole(r, "seq_len"),
                                 whole(r, "global_batch_seqs"),
                                 yes(r, "float8") ? Precision::fp8 : Precision::bf16, load_machine("h100-96"),
                                 load_software(yes(r, "torch_compile") ? "torchtitan" : "torchtitan-eager"));
    p.work.plan.model.max_seq = longest;
    if (yes(r, "async_tp")) p.work.software.tensor_overlap = 0.5 + p.work.software.tensor_overlap / 2;
    p.plans = {c};
    p.seconds = number(r, "seq_len") * number(r, "global_batch_seqs") /
                (number(r, "tokens_per_s_per_gpu") * number(r, "gpus"));
    t.points.push_back(std::move(p));
  }
  mark(t, 3);
  return t;
}

}  // namespace echelon::published
