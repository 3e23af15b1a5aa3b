#include "published/golden_memory.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/median.h"
#include "plan/footprint.h"
#include "published/csv.h"
#include "published/shapes.h"

namespace echelon::published {

static bool is_scored(const CsvRow& r) {
  const std::string& name = r.at("test_case");
  for (const char* other : {"mla", "fsdp", "zp_z3", "multi_dist", "uneven", "account_for"})
    if (name.find(other) != std::string::npos) return false;
  return r.at("suite") == "gpt" && whole(r, "num_layers") == 12 && whole(r, "hidden_size") == 512 &&
         r.at("num_experts").empty() && whole(r, "gpus") == 8;
}

std::vector<GoldenMemory> golden_memory(const std::string& path) {
  std::vector<GoldenMemory> rows;
  for (const CsvRow& r : read_csv(path)) {
    if (!is_scored(r)) continue;
    Configuration c;
    c.tp = std::max(1, whole(r, "tensor_model_parallel_size"));
    c.pp = std::max(1, whole(r, "pipeline_model_parallel_size"));
    c.cp = std::max(1, whole(r, "context_parallel_size"));
    c.dp = 8 / (c.tp * c.pp * c.cp);
    c.zero = yes(r, "use_distributed_optimizer") ? 1 : 0;
    c.micro_batch = whole(r, "micro_batch_size");
    const std::int64_t padding = 128 * c.tp, vocab = (50257 + padding - 1) / padding * padding;
    const int seq_len = whole(r, "seq_length");
    Workload w;
    w.model = gpt(12, 512, 8, yes(r, "swiglu") ? 3072 : 2048, vocab, seq_len);
    w.model.tied_embedding = !yes(r, "untie_embeddings_and_output_weights");
    w.seq_len = seq_len;
    w.global_batch = whole(r, "global_batch_size");
    w.software = load_software("current");
    // In fp16 gradients are 2 bytes, and the optimizer keeps a copy of 4.
    if (yes(r, "fp16")) w.software.gradient_bytes = 2, w.software.optimizer_bytes = 16;
    RankShare last;
    last.dense_layers = 12.0 / c.pp;
    last.head = true;
    last.embedding = c.pp == 1;
    last.tied_copy = c.pp > 1 && w.model.tied_embedding;
    const Memory memory = footprint(w, c, parameter_counts(w.model, c.tp), saved_bytes(w, c), last);
    rows.push_back(
        {r.at("test_case"), r.at("transformer_impl"), rows.size() % 3 == 0,
         static_cast<double>(memory[MemoryCategory::parameters] + memory[MemoryCategory::gradients] +
                             memory[MemoryCategory::optimizer]),
         number(r, "mem_allocated_bytes_median")});
  }
  return rows;
}

double fixed_bytes(const std::vector<GoldenMemory>& rows, const std::string& implementation) {
  std::vector<double> above;
  for (const GoldenMemory& row : rows)
    if (row.fitted && row.implementation == implementation) above.push_back(row.allocated - row.states);
  return median(above);
}

}  // namespace echelon::published
