#include "published/tables.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

#include "published/csv.h"

namespace echelon::published {
namespace {

constexpr std::int64_t longest = std::int64_t{1} << 24;

ModelSpec gpt(std::int64_t layers, std::int64_t hidden, std::int64_t heads, std::int64_t ffn,
              std::int64_t vocab, std::int64_t seq_len) {
  ModelSpec m;
  m.name = fmt::format("gpt {}x{}", layers, hidden);
  m.family = Family::gpt2;
  m.num_layers = layers;
  m.hidden = hidden;
  m.num_heads = m.num_kv_heads = heads;
  m.head_dim = hidden / heads;
  m.mlp_hidden = ffn;
  m.vocab = vocab;
  m.max_seq = seq_len;
  m.tied_embedding = true;
  return m;
}

ModelSpec llama(std::string name, std::int64_t layers, std::int64_t hidden, std::int64_t heads,
                std::int64_t kv, std::int64_t head_dim, std::int64_t ffn, std::int64_t vocab,
                bool tied = false) {
  ModelSpec m;
  m.name = std::move(name);
  m.family = Family::llama;
  m.num_layers = layers;
  m.hidden = hidden;
  m.num_heads = heads;
  m.num_kv_heads = kv;
  m.head_dim = head_dim;
  m.mlp_hidden = ffn;
  m.vocab = vocab;
  m.max_seq = longest;
  m.tied_embedding = tied;
  return m;
}

ModelSpec mixture(ModelSpec m, std::int64_t experts, std::int64_t per_token, std::int64_t hidden,
                  std::int64_t shared = 0, std::int64_t dense_layers = 0) {
  m.experts = Experts::deepseek;
  m.num_experts = experts;
  m.experts_per_token = per_token;
  m.expert_hidden = hidden;
  m.num_shared_experts = shared;
  m.num_dense_layers = dense_layers;
  return m;
}

ModelSpec gpt_of(const CsvRow& r, const char* heads = "attention_heads") {
  return gpt(whole(r, "layers"), whole(r, "hidden"), whole(r, heads), whole(r, "ffn_hidden"),
             whole(r, "vocab"), whole(r, "seq_len"));
}

Configuration mesh(const CsvRow& r) {
  Configuration c;
  c.dp = std::max(1, whole(r, "DP"));
  c.tp = std::max(1, whole(r, "TP"));
  c.pp = std::max(1, whole(r, "PP"));
  c.even_split = true;
  return c;
}

// Every `every`-th row is one to fit on.
void mark(Table& table, std::size_t every) {
  for (std::size_t i = 0; i < table.points.size(); ++i) table.points[i].fitted = i % every == 0;
}

// Micro-batch and interleaving are not printed: those that the memory of the time holds, the fastest.
Table sc21(const std::string& path) {
  Table t{"sc21-table1", {}};
  for (const CsvRow& r : read_csv(path)) {
    Point p;
    p.label = fmt::format("{}B {} GPUs", r.at("params_billion"), r.at("gpus"));
    p.work = {gpt_of(r),       whole(r, "seq_len"),     whole(r, "global_batch_seqs"),
              Precision::bf16, load_machine("a100-80"), load_software("megatron-2021")};
    Configuration c = mesh(r);
    c.sequence_parallel = false;
    c.recompute = Recompute::full;
    for (std::int64_t micro_batch : {1, 2, 4, 8})
      for (int chunks : {1, 2, 4}) {
        c.micro_batch = micro_batch;
        c.chunks = chunks;
        c.schedule = chunks > 1 ? "interleaved" : "1f1b";
        if (p.work.global_batch / c.dp % micro_batch != 0) continue;
        if (chunks > 1 && (c.pp == 1 || p.work.model.num_layers % (c.pp * chunks) != 0)) continue;
        p.configurations.push_back(c);
      }
    p.seconds = number(r, "derived_iteration_time_s");
    t.points.push_back(std::move(p));
  }
  mark(t, 3);
  return t;
}

Table korthikanti(const std::string& path) {
  Table t{"korthikanti", {}};
  for (const CsvRow& r : read_csv(path)) {
    Point p;
    Configuration c = mesh(r);
    c.sequence_parallel = yes(r, "sequence_parallel");
    c.recompute = r.at("recompute") == "full" ? Recompute::full : Recompute::selective;
    c.micro_batch = whole(r, "micro_batch_seqs");
    c.chunks = whole(r, "interleave_m");
    c.schedule = c.chunks > 1 ? "interleaved" : "1f1b";
    p.label = fmt::format("{} {} GPUs {}", r.at("model"), r.at("gpus"), recompute_name(c.recompute));
    p.work = {gpt_of(r),       whole(r, "seq_len"),     whole(r, "global_batch_seqs"),
              Precision::bf16, load_machine("a100-80"), load_software("megatron-2021")};
    p.configurations = {c};
    p.seconds = number(r, "iteration_time_s");
    t.points.push_back(std::move(p));
  }
  mark(t, 3);
  return t;
}

Table vtrain(const std::string& path, const char* name, std::size_t every) {
  Table t{name, {}};
  for (const CsvRow& r : read_csv(path)) {
    Point p;
    Configuration c = mesh(r);
    c.sequence_parallel = false;
    c.recompute = Recompute::full;
    c.micro_batch = whole(r, "micro_batch_seqs");
    const ModelSpec model = gpt_of(r);
    p.label = fmt::format("{}x{} {} micro {}", model.num_layers, model.hidden, describe(c), c.micro_batch);
    p.group = fmt::format("{}x{} {} {} {} GPUs", model.num_layers, model.hidden, r.at("seq_len"),
                          r.at("global_batch_seqs"), r.at("gpus"));
    p.work = {model,           whole(r, "seq_len"),     whole(r, "global_batch_seqs"),
              Precision::bf16, load_machine("a100-80"), load_software("megatron-deepspeed")};
    // Four 200 Gb/s adapters a node, not eight.
    p.work.machine.tiers.back().bandwidth /= 2;
    p.configurations = {c};
    p.seconds = number(r, "iteration_time_ms") / 1000;
    t.points.push_back(std::move(p));
  }
  mark(t, every);
  return t;
}
Table vtrain_multi(const std::string& path) { return vtrain(path, "vtrain-multinode", 3); }
Table vtrain_single(const std::string& path) { return vtrain(path, "vtrain-singlenode", 5); }

// The first and the last stage have one layer less; interleaved: one layer a chunk. The zero-bubble runs step
// without a barrier.
Table zero_bubble(const std::string& path) {
  Table t{"zero-bubble", {}};
  for (const CsvRow& r : read_csv(path)) {
    Point p;
    Configuration c = mesh(r);
    const std::string& name = r.at("schedule");
    const bool interleaved = name == "1F1B-I";
    c.schedule = name == "1F1B" ? "1f1b" : interleaved ? "interleaved" : name == "ZB-1p" ? "zb-h1" : "zb-h2";
    c.chunks = interleaved ? 3 : 1;
    c.micro_batch = whole(r, "micro_batch_seqs");
    const std::int64_t layers = whole(r, "layers");
    c.even_split = false;
    if (interleaved) {
      c.layers_per_stage.assign(static_cast<std::size_t>(c.pp * 3), 1);
      c.layers_per_stage.front() = c.layers_per_stage.back() = 0;
    } else {
      c.layers_per_stage.assign(static_cast<std::size_t>(c.pp), (layers + 2) / c.pp);
      --c.layers_per_stage.front();
      --c.layers_per_stage.back();
    }
    p.label = fmt::format("{} {} m {}", name, r.at("model"), r.at("num_microbatches"));
    p.group = fmt::format("{} {}", r.at("model"), r.at("num_microbatches"));
    p.work = {gpt(layers, whole(r, "hidden"), whole(r, "attention_heads"), 4 * whole(r, "hidden"), 50304,
                  whole(r, "seq_len")),
              whole(r, "seq_len"),
              whole(r, "global_batch_seqs"),
              Precision::bf16,
              load_machine("a100-80"),
              load_software("zero-bubble")};
    p.configurations = {c};
    p.seconds = number(r, "derived_iteration_time_s");
    p.memory_bytes = number(r, "memory_GB") * 1e9;
    t.points.push_back(std::move(p));
  }
  mark(t, 3);
  return t;
}

// GB/s of an all-reduce over the eight H100 of a node, as most runs of the sweep measured it.
constexpr double h100_all_reduce = 425e9;

// Of one device to other nodes, from the bus bandwidth of an all-reduce over nodes of eight:
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

Table nanotron(const std::string& path) {
  Table t{"nanotron", {}};
  for (const CsvRow& r : read_csv(path)) {
    const bool usable = yes(r, "after_pp_fix") || whole(r, "PP") == 1;
    if (!usable || r.at("status") == "Other") continue;
    Point p;
    Configuration c = mesh(r);
    c.zero = whole(r, "zero_stage");
    c.micro_batch = whole(r, "micro_batch_seqs");
    const bool tied = yes(r, "tied_embeddings");
    const ModelSpec model = llama(
        r.at("model_size_B"), whole(r, "layers"), whole(r, "hidden"), whole(r, "attention_heads"),
        whole(r, r.at("kv_heads").empty() ? "attention_heads" : "kv_heads"),
        whole(r, "hidden") / whole(r, "attention_heads"), whole(r, "ffn_hidden"), whole(r, "vocab"), tied);
    p.label = fmt::format("{}B {}", r.at("model_size_B"), describe(c));
    p.group = fmt::format("{} {} {}", r.at("model_size_B"), r.at("gpus"), r.at("global_batch_seqs"));
    p.work = {model,           whole(r, "seq_len"),  whole(r, "global_batch_seqs"),
              Precision::bf16, load_machine("h100"), load_software("nanotron")};
    if (c.pp > 1) {
      c.layers_per_stage = nanotron_stages(model, c.pp);
      c.pp = static_cast<int>(c.layers_per_stage.size());
    }
    p.work.software.collective_rank_seconds = part_of_call * slow_call(number(r, "ag_intra_GBps") * 1e9);
    // Its machine's links differ from run to run: each brings its own measurement of an all-reduce over all
    // ranks and inside a node.
    std::vector<Tier>& tiers = p.work.machine.tiers;
    const double reduce = number(r, "allreduce_GBps") * 1e9, inside = number(r, "ar_intra_GBps") * 1e9;
    if (inside > 0) tiers.front().bandwidth *= std::min(1.0, inside / h100_all_reduce);
    // Where the host is slow to call, its time is what the collectives over all ranks took.
    tiers.back().ring_seconds = 0.33e-3;
    if (reduce > 0 && c.ranks() > 8 && p.work.software.collective_rank_seconds == 0)
      tiers.back().bandwidth = link_bandwidth(reduce, inside > 0 ? inside : h100_all_reduce);
    p.configurations = {c};
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

Table llm_foundry(const std::string& path) {
  Table t{"llm-foundry", {}};
  for (const CsvRow& r : read_csv(path)) {
    Point p;
    Configuration c;
    c.dp = whole(r, "gpus");
    c.zero = r.at("sharding") == "FULL_SHARD" ? 3 : r.at("sharding") == "SHARD_GRAD_OP" ? 2 : 0;
    c.micro_batch = whole(r, "micro_batch_seqs");
    c.recompute = yes(r, "activation_checkpointing") ? Recompute::full : Recompute::none;
    const bool h100 = r.at("gpu").starts_with("h100");
    const bool fp8 = r.at("precision").find("fp8") != std::string::npos;
    ModelSpec model = gpt_of(r);
    p.label = fmt::format("{} {} seq {} {} GPUs", r.at("gpu"), r.at("model"), r.at("seq_len"), r.at("gpus"));
    p.work = {model,
              whole(r, "seq_len"),
              whole(r, "global_batch_seqs"),
              fp8 ? Precision::fp8 : Precision::bf16,
              load_machine(h100 ? "h100" : "a100-40"),
              load_software("fsdp")};
    p.configurations = {c};
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
    Configuration c;
    c.dp = whole(r, "FSDP");
    c.tp = whole(r, "TP");
    c.pp = whole(r, "PP");
    c.cp = whole(r, "CP");
    c.context = ContextKind::allgather;  // its default (context_parallel_rotate_method)
    c.zero = 3;
    c.chunks = 1;
    c.micro_batch = whole(r, "local_batch_seqs");
    c.recompute = r.at("activation_checkpoint") == "full" ? Recompute::full : Recompute::selective;
    const bool large = r.at("model").find("70B") != std::string::npos;
    p.label = fmt::format("{} {} {}{}{} seq {}", r.at("table"), r.at("model"), describe(c),
                          yes(r, "torch_compile") ? " compiled" : "", yes(r, "float8") ? " fp8" : "",
                          r.at("seq_len"));
    p.work = {load_model(large ? "llama-3-70b" : "llama-3-8b"),
              whole(r, "seq_len"),
              whole(r, "global_batch_seqs"),
              yes(r, "float8") ? Precision::fp8 : Precision::bf16,
              load_machine("h100-96"),
              load_software(yes(r, "torch_compile") ? "torchtitan" : "torchtitan-eager")};
    p.work.model.max_seq = longest;
    if (yes(r, "async_tp")) p.work.software.tensor_overlap = 0.5 + p.work.software.tensor_overlap / 2;
    p.configurations = {c};
    p.seconds = number(r, "seq_len") * number(r, "global_batch_seqs") /
                (number(r, "tokens_per_s_per_gpu") * number(r, "gpus"));
    t.points.push_back(std::move(p));
  }
  mark(t, 3);
  return t;
}

std::optional<ModelSpec> bridge_model(const std::string& name) {
  if (name == "LLAMA3_8B") return load_model("llama-3-8b");
  if (name == "LLAMA3_70B") return load_model("llama-3-70b");
  if (name == "LLAMA3.1_405B") return load_model("llama-3-405b");
  if (name.starts_with("DeepSeekV3")) return load_model("deepseek-v3");
  if (name.starts_with("Qwen3_30B"))
    return mixture(llama("qwen3-30b", 48, 2048, 32, 4, 128, 6144, 151936), 128, 8, 768);
  if (name.starts_with("Qwen3_235B"))
    return mixture(llama("qwen3-235b", 94, 4096, 64, 4, 128, 12288, 151936), 128, 8, 1536);
  if (name.starts_with("GPT OSS"))
    return mixture(llama("gpt-oss-120b", 36, 2880, 64, 8, 64, 2880, 201088), 128, 4, 2880);
  if (name.starts_with("Kimi")) {
    ModelSpec m = load_model("deepseek-v3");
    m.name = "kimi-k2";
    m.num_heads = m.num_kv_heads = 64;
    m.vocab = 163840;
    m.num_experts = 384;
    m.num_dense_layers = 1;
    return m;
  }
  return {};  // hybrids with state-space layers
}

Table bridge(const std::string& path, const char* name, bool experts) {
  Table t{name, {}};
  for (const CsvRow& r : read_csv(path)) {
    std::optional<ModelSpec> model = bridge_model(r.at("model"));
    if (!model || (model->experts != Experts::none) != experts) continue;
    Point p;
    std::string system = r.at("system").substr(4);
    std::transform(system.begin(), system.end(), system.begin(),
                   [](unsigned char ch) { return std::tolower(ch); });
    const std::string& precision = r.at("precision");
    const Precision kind = precision.starts_with("BF16")    ? Precision::bf16
                           : precision.starts_with("NVFP4") ? Precision::fp4
                                                            : Precision::fp8;
    Configuration c;
    c.tp = std::max(1, whole(r, "TP"));
    c.pp = std::max(1, whole(r, "PP"));
    c.cp = std::max(1, whole(r, "CP"));
    c.ep = std::max(1, whole(r, "EP"));
    const int fsdp = whole(r, "FSDP");
    c.dp = whole(r, "gpus") / (c.tp * c.pp * c.cp);
    if (c.dp < 1 || whole(r, "gpus") % (c.tp * c.pp * c.cp) != 0) continue;
    c.zero = fsdp > 1 ? 3 : 1;
    c.micro_batch = std::max(1, whole(r, "micro_batch_seqs"));
    c.chunks = c.pp > 1 ? std::max(1, whole(r, "VP")) : 1;
    c.schedule = c.chunks > 1 ? "interleaved" : "1f1b";
    c.even_split = false;
    model->max_seq = longest;
    p.label = fmt::format("{} {} {} {} {} GPUs {}", r.at("container"), r.at("model"), system,
                          precision.substr(0, 6), r.at("gpus"), describe(c));
    p.work = {*model, whole(r, "seq_len"),  whole(r, "global_batch_seqs"),
              kind,   load_machine(system), load_software("current")};
    if (!shape_problem(p.work, c).empty()) continue;
    p.group = fmt::format("{} {}", r.at("model"), r.at("gpus"));
    p.configurations = {c};
    p.seconds = number(r, "derived_step_time_s");
    if (p.seconds <= 0) continue;
    t.points.push_back(std::move(p));
  }
  mark(t, 3);
  return t;
}
Table bridge_dense(const std::string& path) { return bridge(path, "bridge-dense", false); }
Table bridge_experts(const std::string& path) { return bridge(path, "bridge-experts", true); }

// Tokens per second are not printed: from its own count of FLOPs, 6N + causal attention.
Table llama3(const std::string& path) {
  Table t{"llama3-405b", {}};
  for (const CsvRow& r : read_csv(path)) {
    Point p;
    Configuration c = mesh(r);
    c.cp = whole(r, "CP");
    c.context = ContextKind::allgather;
    c.zero = 2;
    c.chunks = 1;
    c.schedule = "1f1b";
    ModelSpec model = load_model("llama-3-405b");
    p.label = fmt::format("{} GPUs seq {}", r.at("gpus"), r.at("seq_len"));
    p.work = {model,           whole(r, "seq_len"),  whole(r, "DP") * whole(r, "batch_per_dp_seqs"),
              Precision::bf16, load_machine("h100"), load_software("current")};
    const double flops = model_flops_per_token(model, p.work.seq_len) *
                         static_cast<double>(p.work.seq_len * p.work.global_batch);
    p.seconds = flops / (number(r, "tflops_per_gpu") * 1e12 * number(r, "gpus"));
    p.configurations = {c};
    for (int chunks : {2, 4, 7}) {
      c.chunks = chunks;
      c.schedule = "interleaved";
      p.configurations.push_back(c);
    }
    t.points.push_back(std::move(p));
  }
  return t;
}

}  // namespace

std::optional<std::filesystem::path> find(const std::string& file) {
  const char* given = std::getenv("ECHELON_PUBLISHED");
  for (const std::filesystem::path& place :
       {std::filesystem::path(ECHELON_SOURCE_DIR "/tests/published"),
        std::filesystem::path(given != nullptr ? given : ECHELON_SOURCE_DIR "/../shared/published")}) {
    std::error_code error;
    if (std::filesystem::is_regular_file(place / file, error)) return place / file;
  }
  return {};
}

const std::vector<Source>& sources() {
  static const std::vector<Source> list{
      {"sc21-table1", "megatron_sc21_table1.csv", sc21},
      {"korthikanti", "korthikanti_2022_iteration_time.csv", korthikanti},
      {"zero-bubble", "zero_bubble_throughput_memory.csv", zero_bubble},
      {"torchtitan", "torchtitan_llama3.csv", torchtitan},
      {"llm-foundry", "llm_foundry_mpt.csv", llm_foundry},
      {"vtrain-multinode", "vtrain_multinode.csv", vtrain_multi},
      {"vtrain-singlenode", "vtrain_singlenode.csv", vtrain_single},
      {"nanotron", "nanotron_ultrascale_bench.csv", nanotron},
      {"bridge-dense", "megatron_bridge_performance_summary.csv", bridge_dense},
      {"bridge-experts", "megatron_bridge_performance_summary.csv", bridge_experts},
      {"llama3-405b", "llama3_405b_table4.csv", llama3},
  };
  return list;
}

std::optional<Table> read(const Source& source) {
  const auto path = find(source.file);
  if (!path) return {};
  return source.read(path->string());
}

}  // namespace echelon::published
