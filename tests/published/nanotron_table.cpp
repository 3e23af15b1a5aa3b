// The sweep of nanotron on H100.
#include <fmt/format.h>

#include <algorithm>

#include "published/csv.h"
#include "published/shapes.h"
#include "published/sources.h"
#include "workloads.h"

namespace echelon::published {
namespace {

// GB/s of an all-reduce over the eight H100 of a node, as most runs of the sweep measured it.
constexpr double h100_all_reduce = 425e9;

// The link of one device to other nodes, from the bus bandwidth of an all-reduce over nodes of eight:
// 1 / bus = (7/8) / inside + 1 / (8 link).
double link_bandwidth(double bus, double inside) {
  const double rest = 1 / bus - 7.0 / 8 / inside;
  return rest > 1 / (8 * 50e9) ? 1 / (8 * rest) : 50e9;
}

// Layers of each stage, as nanotron's build_model() gives out blocks: in order, a stage being full when the
// costs so far reach its share. The output matrix counts as a block; behind it comes the loss, which may be
// left for a stage of its own. Stages that get nothing are dropped. (Its columns of parameters agree.)
std::vector<std::int64_t> nanotron_stages(const ModelSpec& m, int pp) {
  const double h = static_cast<double>(m.hidden),
               layer = 4 * h * h + 3 * static_cast<double>(m.mlp_hidden) * h;
  const double head = static_cast<double>(m.vocab) * h,
               total = static_cast<double>(m.num_layers) * layer + head;
  std::vector<std::int64_t> layers(1, 0);
  double so_far = 0;
  const auto place = [&](double cost) {
    so_far += cost;
    const auto stage = static_cast<double>(layers.size());
    if (so_far >= total * stage / pp * (1 - 1e-12) && layers.size() < static_cast<std::size_t>(pp))
      layers.push_back(0);
  };
  for (std::int64_t i = 0; i < m.num_layers; ++i) {
    ++layers.back();
    place(layer);
  }
  place(head);
  return layers;
}

// A collective over the eight devices of a node takes a fixed time more in runs whose host is slow to call
// collectives: this part of it for each rank of the group, at each call. From the rows that are fitted on.
constexpr double part_of_call = 0.65;

// Seconds above what the same call takes in a run that is not slowed; what is more than a call costs is a
// slow link.
double slow_call(double intra_node_all_gather) {
  const double bytes = 7.0 / 8 * 4 * 268435456, usual = bytes / 263.4e9;
  const double more = bytes / intra_node_all_gather - usual;
  return more > 0.1e-3 && more < 0.6e-3 ? more : 0;
}

}  // namespace

Table nanotron(const std::string& path) {
  Table t{"nanotron", {}};
  for (const CsvRow& r : read_csv(path)) {
    const bool usable = yes(r, "after_pp_fix") || whole(r, "PP") == 1;
    if (!usable || r.at("status") == "Other") continue;
    Point p;
    Plan c = mesh(r);
    c.zero = whole(r, "zero_stage");
    c.micro_batch = whole(r, "micro_batch_seqs");
    const bool tied = yes(r, "tied_embeddings");
    const ModelSpec model = llama(
        r.at("model_size_B"), whole(r, "layers"), whole(r, "hidden"), whole(r, "attention_heads"),
        whole(r, r.at("kv_heads").empty() ? "attention_heads" : "kv_heads"),
        whole(r, "hidden") / whole(r, "attention_heads"), whole(r, "ffn_hidden"), whole(r, "vocab"), tied);
    p.label = fmt::format("{}B {}", r.at("model_size_B"), summary(c));
    p.group = fmt::format("{} {} {}", r.at("model_size_B"), r.at("gpus"), r.at("global_batch_seqs"));
    p.work = checks::workload_of(model, whole(r, "seq_len"), whole(r, "global_batch_seqs"), Precision::bf16,
                                 load_machine("h100"), load_software("nanotron"));
    if (c.mesh.pp() > 1) {
      c.layers_per_stage = nanotron_stages(model, c.mesh.pp());
      c.mesh.set(Axis::pp, static_cast<int>(c.layers_per_stage.size()));
    }
    p.work.software.collective_rank_seconds = part_of_call * slow_call(number(r, "ag_intra_GBps") * 1e9);
    // Its machine's links differ from run to run: each brings its own measurement of an all-reduce over all
    // ranks and inside a node.
    std::vector<Tier>& tiers = p.work.machine.tiers;
    const double reduce = number(r, "allreduce_GBps") * 1e9, inside = number(r, "ar_intra_GBps") * 1e9;
    if (inside > 0) tiers.front().bandwidth *= std::min(1.0, inside / h100_all_reduce);
    // Where the host is slow to call, its time is what the collectives over all ranks took.
    tiers.back().ring_seconds = 0.33e-3;
    if (reduce > 0 && c.mesh.num_ranks() > 8 && p.work.software.collective_rank_seconds == 0)
      tiers.back().bandwidth = link_bandwidth(reduce, inside > 0 ? inside : h100_all_reduce);
    p.plans = {c};
    p.out_of_memory = r.at("status") == "OOM";
    const double rate = number(r, "tokens_per_s_per_gpu");
    if (!p.out_of_memory && rate > 0)
      p.seconds = number(r, "global_batch_seqs") * number(r, "seq_len") / (rate * number(r, "gpus"));
    // What torch's allocator took: the peak, with what it cannot give out again.
    p.memory_bytes = number(r, "mem_reserved_GB") * 1073741824.0;
    t.points.push_back(std::move(p));
  }
  mark(t, 5);
  return t;
}

}  // namespace echelon::published
