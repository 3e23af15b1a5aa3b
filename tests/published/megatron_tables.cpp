// Megatron-LM of 2021 and 2022, its fork of the zero-bubble authors, and vTrain's runs of Megatron-DeepSpeed.
#include <fmt/format.h>

#include <algorithm>

#include "published/csv.h"
#include "published/shapes.h"
#include "published/sources.h"
#include "workloads.h"

namespace echelon::published {
// Micro-batch and interleaving are not printed: those that the memory of the time holds, the fastest.
Table sc21(const std::string& path) {
  Table t{"sc21-table1", {}};
  for (const CsvRow& r : read_csv(path)) {
    Point p;
    p.label = fmt::format("{}B {} GPUs", r.at("params_billion"), r.at("gpus"));
    p.work = checks::workload_of(gpt_of(r), whole(r, "seq_len"), whole(r, "global_batch_seqs"),
                                 Precision::bf16, load_machine("a100-80"), load_software("megatron-2021"));
    Plan c = mesh(r);
    c.sequence_parallel = false;
    c.recompute = Recompute::full;
    for (std::int64_t micro_batch : {1, 2, 4, 8})
      for (int chunks : {1, 2, 4}) {
        c.micro_batch = micro_batch;
        c.chunks = chunks;
        c.schedule = chunks > 1 ? "interleaved" : "1f1b";
        if (p.work.plan.global_batch / c.mesh.dp() % micro_batch != 0) continue;
        if (chunks > 1 && (c.mesh.pp() == 1 || p.work.plan.model.num_layers % (c.mesh.pp() * chunks) != 0))
          continue;
        p.plans.push_back(c);
      }
    p.seconds = number(r, "derived_iteration_time_s");
    t.points.push_back(std::move(p));
  }
  mark(t, 3);
  return t;
}

// Narayanan et al. 2021, table 2: tensor and pipeline parallelism against ZeRO 3 of DeepSpeed without model
// parallelism. Its days for 300 billion tokens give the step. Nothing is fitted on it.
static Table sc21_second(const std::string& path, bool zero3) {
  Table t{zero3 ? "sc21-zero3" : "sc21-table2", {}};
  for (const CsvRow& r : read_csv(path)) {
    if (r.at("scheme").starts_with("ZeRO-3") != zero3) continue;
    Point p;
    const int gpus = whole(r, "gpus");
    p.work = checks::workload_of(gpt(whole(r, "layers"), whole(r, "hidden"), whole(r, "attention_heads"),
                                     4 * whole(r, "hidden"), whole(r, "vocab"), whole(r, "seq_len")),
                                 whole(r, "seq_len"), whole(r, "global_batch_seqs"), Precision::bf16,
                                 load_machine("a100-80"), load_software("megatron-2021"));
    Plan c = checks::searched_plan();
    c.balance_layers = false;
    c.sequence_parallel = false;
    c.recompute = Recompute::full;
    c.micro_batch = whole(r, "micro_batch_seqs");
    if (zero3) {  // gathers the layer ahead, and reduces in 16 bits, beside what it computes
      c.zero = 3;
      p.work.software.overlaps_parameters = p.work.software.overlaps_gradients = true;
      p.work.software.sharded_states = true;
      p.work.software.reduced_bytes = 2;
    } else {
      c.mesh.set(Axis::tp, 8);
      c.mesh.set(Axis::pp, whole(r, "model_parallel_size") / 8);
    }
    c.mesh.set(Axis::dp, gpus / (c.mesh.tp() * c.mesh.pp()));
    p.plans = {c};
    p.label = fmt::format("{}B {} GPUs {}", r.at("params_billion"), gpus, summary(c));
    const double tokens = static_cast<double>(p.work.plan.global_batch * p.work.plan.seq_len);
    p.seconds = number(r, "training_days_300B_tokens") * 86400 * tokens / 300e9;
    t.points.push_back(std::move(p));
  }
  return t;
}

Table sc21_table2(const std::string& path) { return sc21_second(path, false); }
Table sc21_zero3(const std::string& path) { return sc21_second(path, true); }

Table korthikanti(const std::string& path) {
  Table t{"korthikanti", {}};
  for (const CsvRow& r : read_csv(path)) {
    Point p;
    Plan c = mesh(r);
    c.sequence_parallel = yes(r, "sequence_parallel");
    c.recompute = r.at("recompute") == "full" ? Recompute::full : Recompute::selective;
    c.micro_batch = whole(r, "micro_batch_seqs");
    c.chunks = whole(r, "interleave_m");
    c.schedule = c.chunks > 1 ? "interleaved" : "1f1b";
    p.label = fmt::format("{} {} GPUs {}", r.at("model"), r.at("gpus"), recompute_name(c.recompute));
    p.work = checks::workload_of(gpt_of(r), whole(r, "seq_len"), whole(r, "global_batch_seqs"),
                                 Precision::bf16, load_machine("a100-80"), load_software("megatron-2021"));
    p.plans = {c};
    p.seconds = number(r, "iteration_time_s");
    t.points.push_back(std::move(p));
  }
  mark(t, 3);
  return t;
}

// The rows of a single node are sums: with the same width, micro-batch and tp they are linear in layers and
// microbatches to a microsecond in 700 ms, as vTrain adds up the layers that it profiled. Its model of them
// (src/model/gpt_modeling.py) has vocabulary / tp columns of logits and pads none.
static Table vtrain(const std::string& path, const char* name, std::size_t every, bool pads_vocabulary) {
  Table t{name, {}};
  for (const CsvRow& r : read_csv(path)) {
    Point p;
    Plan c = mesh(r);
    c.sequence_parallel = false;
    c.recompute = Recompute::full;
    c.micro_batch = whole(r, "micro_batch_seqs");
    const ModelSpec model = gpt_of(r);
    p.label = fmt::format("{}x{} {} micro {}", model.num_layers, model.hidden, summary(c), c.micro_batch);
    p.group = fmt::format("{}x{} {} {} {} GPUs", model.num_layers, model.hidden, r.at("seq_len"),
                          r.at("global_batch_seqs"), r.at("gpus"));
    p.work = checks::workload_of(model, whole(r, "seq_len"), whole(r, "global_batch_seqs"), Precision::bf16,
                                 load_machine("a100-80"), load_software("megatron-deepspeed"));
    if (!pads_vocabulary) {
      p.work.software.pads_vocabulary = false;
      p.work.plan.model.vocab = model.vocab / c.mesh.tp() * c.mesh.tp();
    }
    // Four 200 Gb/s adapters a node, not eight.
    p.work.machine.tiers.back().bandwidth /= 2;
    p.plans = {c};
    p.seconds = number(r, "iteration_time_ms") / 1000;
    t.points.push_back(std::move(p));
  }
  mark(t, every);
  return t;
}
Table vtrain_multi(const std::string& path) { return vtrain(path, "vtrain-multinode", 3, true); }
Table vtrain_single(const std::string& path) { return vtrain(path, "vtrain-singlenode", 5, false); }

// The first and the last stage have one layer less; interleaved: one layer a chunk. The zero-bubble runs step
// without a barrier.
Table zero_bubble(const std::string& path) {
  Table t{"zero-bubble", {}};
  for (const CsvRow& r : read_csv(path)) {
    Point p;
    Plan c = mesh(r);
    const std::string& name = r.at("schedule");
    const bool interleaved = name == "1F1B-I";
    c.schedule = name == "1F1B" ? "1f1b" : interleaved ? "interleaved" : name == "ZB-1p" ? "zb-h1" : "zb-h2";
    c.chunks = interleaved ? 3 : 1;
    c.micro_batch = whole(r, "micro_batch_seqs");
    const std::int64_t layers = whole(r, "layers");
    c.balance_layers = true;
    if (interleaved) {
      c.layers_per_stage.assign(static_cast<std::size_t>(c.mesh.pp() * 3), 1);
      c.layers_per_stage.front() = c.layers_per_stage.back() = 0;
    } else {
      c.layers_per_stage.assign(static_cast<std::size_t>(c.mesh.pp()), (layers + 2) / c.mesh.pp());
      --c.layers_per_stage.front();
      --c.layers_per_stage.back();
    }
    p.label = fmt::format("{} {} m {}", name, r.at("model"), r.at("num_microbatches"));
    p.group = fmt::format("{} {}", r.at("model"), r.at("num_microbatches"));
    p.work = checks::workload_of(gpt(layers, whole(r, "hidden"), whole(r, "attention_heads"),
                                     4 * whole(r, "hidden"), 50304, whole(r, "seq_len")),
                                 whole(r, "seq_len"), whole(r, "global_batch_seqs"), Precision::bf16,
                                 load_machine("a100-80"), load_software("zero-bubble"));
    // As the authors' examples/pretrain_zero_bubble.sh has it.
    p.work.plan.model.tied_embedding = false;
    p.plans = {c};
    p.seconds = number(r, "derived_iteration_time_s");
    p.memory_bytes = number(r, "memory_GB") * 1e9;
    t.points.push_back(std::move(p));
  }
  mark(t, 3);
  return t;
}

}  // namespace echelon::published
