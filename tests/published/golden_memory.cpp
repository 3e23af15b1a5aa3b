#include "published/golden_memory.h"

#include <algorithm>
#include <cmath>

#include "plan/footprint.h"
#include "published/csv.h"
#include "published/shapes.h"
#include "workloads.h"

namespace echelon::published {
namespace {

constexpr double kib = 1024;

bool named(const CsvRow& r, const char* part) { return r.at("test_case").find(part) != std::string::npos; }
int at_least_one(const CsvRow& r, const char* column) { return std::max(1, whole(r, column)); }

bool is_scored(const CsvRow& r) {
  return whole(r, "gpus") == 8 && r.at("tokenizer_type").empty() && !yes(r, "multi_latent_attention") &&
         !named(r, "uneven");
}

Plan configuration_of(const CsvRow& r) {
  Plan c = checks::searched_plan();
  c.mesh.set(Axis::tp, at_least_one(r, "tensor_model_parallel_size"));
  c.mesh.set(Axis::pp, at_least_one(r, "pipeline_model_parallel_size"));
  c.mesh.set(Axis::cp, at_least_one(r, "context_parallel_size"));
  c.mesh.set(Axis::dp, 8 / (c.mesh.tp() * c.mesh.pp() * c.mesh.cp()));
  c.mesh.ep = at_least_one(r, "expert_model_parallel_size");
  c.mesh.etp =
      r.at("expert_tensor_parallel_size").empty() ? c.mesh.tp() : whole(r, "expert_tensor_parallel_size");
  c.sequence_parallel = yes(r, "sequence_parallel");
  c.zero = yes(r, "use_megatron_fsdp") ? 3 : yes(r, "use_distributed_optimizer") ? 1 : 0;
  // Several instances of the optimizer over 4 data-parallel ranks, each still cut: two.
  if (named(r, "multi_dist_optimizer_instances")) c.hsdp = 2;
  c.micro_batch = whole(r, "micro_batch_size");
  const int chunk = whole(r, "num_layers_per_virtual_pipeline_stage");
  c.chunks = chunk > 0 ? whole(r, "num_layers") / c.mesh.pp() / chunk
                       : at_least_one(r, "num_virtual_stages_per_pipeline_rank");
  return c;
}

Workload workload_of(const CsvRow& r, const Plan& c) {
  const std::int64_t hidden = whole(r, "hidden_size");
  // Megatron's defaults: 4 h, and with a gate two thirds of that, down to a multiple of 64.
  const std::int64_t ffn = yes(r, "swiglu") ? 8 * hidden / 3 / 64 * 64 : 4 * hidden;
  const std::int64_t padding = 128 * c.mesh.tp(), vocab = (50257 + padding - 1) / padding * padding;
  Workload w;
  w.plan.seq_len = whole(r, "seq_length");
  w.plan.model =
      gpt(whole(r, "num_layers"), hidden, whole(r, "num_attention_heads"), ffn, vocab, w.plan.seq_len);
  w.plan.model.tied_embedding = !yes(r, "untie_embeddings_and_output_weights");
  w.plan.global_batch = whole(r, "global_batch_size");
  w.software = load_software("current");
  // In fp16 gradients are 2 bytes, and the optimizer keeps a copy of 4.
  if (yes(r, "fp16")) w.software.gradient_bytes = 2, w.software.optimizer_bytes = 16;
  return w;
}

// GPT's of the planner, and what flags of Megatron make of them. Rotary positions are in tests alone whose
// last rank has no embedding.
ParameterCounts counts_of(const CsvRow& r, const ModelSpec& m, const Plan& c) {
  ParameterCounts counts = parameter_counts(m, c.mesh.tp(), c.optimizer);
  const auto h = static_cast<double>(m.hidden), f = static_cast<double>(m.mlp_hidden);
  const double bias = yes(r, "disable_bias_linear") ? 0 : 1;
  double& layer = counts.layer.front();
  layer -= (1 - bias) * ((3 * h + f) / c.mesh.tp() + 2 * h);
  if (yes(r, "swiglu")) layer += f * (h + bias) / c.mesh.tp();
  const double experts = number(r, "num_experts");
  if (experts > 0) {  // instead of the MLP, without biases or gates in all of these tests
    const double given = number(r, "moe_ffn_hidden_size");
    layer += experts * h - 2 * h * f / c.mesh.tp();
    counts.routed.front() = experts * 2 * h * (given > 0 ? given : f);
  }
  return counts;
}

RankShare last_rank(const CsvRow& r, const ModelSpec& m, const Plan& c) {
  // Where embedding and loss count as layers when these are split, the last rank has the loss for one.
  const bool counted = named(r, "account_for_embedding_loss");
  const auto all = static_cast<double>(m.num_layers);
  const double layers = counted ? (all + 2) / c.mesh.pp() - 1 : all / c.mesh.pp();
  RankShare last;
  last.layers.front() = layers;
  last.head = true;
  last.embedding = c.mesh.pp() == 1;
  last.tied_copy = c.mesh.pp() > 1 && m.tied_embedding;
  return last;
}

// What stays when a step is over.
double kept_bytes(const CsvRow& r, const Workload& w, const Plan& c, const SavedBytes& saved) {
  const double samples = static_cast<double>(c.micro_batch),
               rows = static_cast<double>(w.plan.seq_len) / c.mesh.cp();
  const double scores = samples * rows * static_cast<double>(w.plan.seq_len);  // of one head
  double bytes = 0;
  if (r.at("transformer_impl") == "transformer_engine")
    bytes += 4096 * kib;  // its products' workspace on an A100
  else                    // attention's scores of 2 bytes are written to one buffer for all layers
    bytes += scores * static_cast<double>(w.plan.model.num_heads) / c.mesh.tp() * 2;
  // Sequences are gathered into one buffer, in 2 bytes.
  if (c.shards_sequence()) bytes += samples * rows * static_cast<double>(w.plan.model.hidden) * 2;
  // The last microbatch's: its attention mask, a byte each, and what each virtual stage was handed, with the
  // gradient that it handed back.
  if (c.mesh.pp() > 1) bytes += scores + 2 * c.chunks * saved.boundary;
  return bytes;
}

std::string environment_of(const CsvRow& r) {
  if (whole(r, "context_parallel_size") > 1) return "context parallel, " + r.at("suite");
  if (yes(r, "cross_entropy_loss_fusion")) return "fused cross entropy";
  return named(r, "reshard") ? "resharding" : "others";
}

// cuBLAS has a workspace for each thread that calls it, the forward's and the backward's, of 8 x 4 MiB where
// the environment asks for products that can be repeated (CUBLAS_WORKSPACE_CONFIG=:4096:8) and of
// 2 x 4 MiB + 8 x 16 KiB where it does not. The table does not say: that nearer to the fitted rows.
double workspace_bytes(const std::vector<GoldenMemory>& rows, const std::string& environment) {
  const auto error = [&](double workspace) {
    double sum = 0;
    for (const GoldenMemory& row : rows)
      if (row.fitted && row.environment == environment)
        sum += std::abs((row.states + row.kept + workspace) / row.allocated - 1);
    return sum;
  };
  const double repeatable = 2 * 8 * 4096 * kib, fast = 2 * (2 * 4096 + 8 * 16) * kib;
  return error(fast) < error(repeatable) ? fast : repeatable;
}

GoldenMemory row_of(const CsvRow& r) {
  Plan c = configuration_of(r);
  const Workload w = workload_of(r, c);
  c.model = w.plan.model;
  c.seq_len = w.plan.seq_len;
  c.global_batch = w.plan.global_batch;
  const SavedBytes saved = saved_bytes(w, c, c.recompute.of(0));
  const Memory memory = footprint(w, c, counts_of(r, w.plan.model, c), saved, last_rank(r, w.plan.model, c));
  GoldenMemory row;
  row.test = r.at("test_case");
  row.environment = environment_of(r);
  row.states = static_cast<double>(memory[MemoryCategory::parameters] + memory[MemoryCategory::gradients] +
                                   memory[MemoryCategory::optimizer]);
  if (c.zero == 3) row.states += static_cast<double>(memory[MemoryCategory::communication]);
  row.kept = kept_bytes(r, w, c, saved);
  row.allocated = number(r, "mem_allocated_bytes_median");
  return row;
}

}  // namespace

std::vector<GoldenMemory> golden_memory(const std::string& path) {
  std::vector<GoldenMemory> rows;
  for (const CsvRow& r : read_csv(path)) {
    if (!is_scored(r)) continue;
    rows.push_back(row_of(r));
    rows.back().fitted = rows.size() % 3 == 1;
  }
  for (GoldenMemory& row : rows) row.workspace = workspace_bytes(rows, row.environment);
  return rows;
}

}  // namespace echelon::published
