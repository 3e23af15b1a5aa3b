// Megatron-Core: Megatron-Bridge, and Llama 3's own program, which is its like.
#include <fmt/format.h>

#include <algorithm>

#include "published/csv.h"
#include "published/shapes.h"
#include "published/sources.h"
#include "workloads.h"

namespace echelon::published {
static std::optional<ModelSpec> bridge_model(const std::string& name) {
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
  if (name == "Nemotron_3_Nano") return load_model("nemotron-3-nano-30b-a3b");
  if (name == "Nemotron_3_Super") {
    // Two modules behind it predict further tokens, each with attention and experts and a pass through the
    // output layer (mtp_num_layers and mtp_use_repeated_layer of its recipe).
    ModelSpec m = load_model("nemotron-3-super-120b-a12b");
    m.layer_pattern += "*E*E";
    m.num_layers = std::ssize(m.layer_pattern);
    return m;
  }
  return {};
}

// What a row does not print and its recipe says: scripts/performance/configs of NVIDIA-NeMo/Megatron-Bridge,
// v0.2.0 (containers 25.x), v0.3.1 (26.02) and v0.4.0 (26.04).
static void apply_recipe(Point& p, Plan& c, const std::string& container, const std::string& system,
                         const std::string& precision) {
  Software& s = p.work.software;
  const std::string& name = p.work.plan.model.name;
  // grad_reduce_in_fp32 is off in all of them, and the loss is Transformer Engine's, in place.
  s.gradient_bytes = s.reduced_bytes = 2;
  s.logit_bytes = 4;
  const bool bf16 = precision.starts_with("BF16"), fp4 = precision.starts_with("NVFP4");
  if (name == "deepseek-v3" || name == "kimi-k2") {
    s.optimizer_bytes = 8;  // moments in 16 bits
    const bool newest = container.starts_with("26.04");
    c.recompute = system == "h100" ? Recompute({"latent", "mlp_in"})
                  : system == "gb300" && (bf16 || !container.starts_with("26")) ? Recompute::none
                  : system == "gb200" && newest                                 ? Recompute({"mlp_in"})
                  : system == "b200" && container == "26.04.01" ? Recompute({"latent", "mlp_in"})
                                                                : Recompute({"latent"});
    if (c.recompute == PipelineRecompute(Recompute::none)) s.keeps_activated = false;  // moe_act
  }
  if (name == "gpt-oss-120b" && system != "gb300" && system != "b300")  // layernorm, moe_act
    s.keeps_norm_outputs = s.keeps_activated = false;
  if (p.work.plan.model.num_state_space_layers() > 0) {
    const bool super = name == "nemotron-3-super-120b-a12b";
    if (super) {
      p.work.output_passes = 3;
      // What predicts further tokens stays in 16 bits (keep_mtp_spec_in_bf16); of NVFP4 the last 14 layers,
      // too, attention's products and those of the latent width (te_quant.cfg).
      p.work.wide_layers = fp4 ? 14 + 4 : 4;
      if (fp4) p.work.wide_ops = {"attention_in", "attention_out", "routed_in", "routed_out"};
    }
    // moe_act and layernorm; on H100 moe and core_attn too.
    const bool again = super ? (system == "b300" && fp4) || (system == "b200" && !fp4) : system == "h100";
    if (again) s.keeps_norm_outputs = s.keeps_activated = false;
    if (again && !super) c.recompute = Recompute({"experts_in", "attention"});
  }
  if (c.zero == 3 && system.starts_with("gb"))
    p.offloaded_layers = name == "llama-3-70b" ? (system == "gb300" ? 20 : 40) : 92;
}

// How tokens reach their experts, which rows do not print either. --moe_flex_dispatcher_backend (deepep,
// hybridep) sends them once, moe_a2a_overlap runs two microbatches beside one another; 25.09 is v0.1.0rc4
// (run_script.py there), 26.04.01 v0.4.2. 26.02.01 is v0.3.1 but for the recipe of Qwen3 235B on B300, which
// prints what it was until 10 March 2026, and for those of GPT-OSS, which are of 23 March (7260d6214).
static void apply_dispatch(Software& s, const std::string& name, const std::string& container,
                           const std::string& system) {
  const bool grace = system.starts_with("gb"), oldest = container == "25.09", old = container == "25.11",
             first = container == "26.02", patched = container == "26.02.01", last = container == "26.04.01";
  if (name == "deepseek-v3" || name == "kimi-k2") {
    s.sends_tokens_once = oldest ? system == "h100" : old ? grace : true;
    s.overlaps_experts = oldest ? system == "h100" : last && system == "b200";
  } else if (name == "gpt-oss-120b") {
    const bool newer = !oldest && !old && !first;
    s.sends_tokens_once = newer && (system == "b300" || (!last && (system == "gb200" || system == "b200")));
    s.overlaps_experts = newer && system == "gb200";
  } else if (name == "qwen3-30b") {
    s.sends_tokens_once =
        !oldest && (grace || system == "b300" || (!old && !first) || (first && system == "h100"));
    s.overlaps_experts = (old || first) && system == "h100";
  } else if (name == "qwen3-235b") {
    s.sends_tokens_once = !oldest && (grace || (last && system == "b300"));
    s.overlaps_experts = !oldest && (system == "h100" || (old && system == "b200") ||
                                     ((first || patched) && system == "b300"));
  } else {
    s.sends_tokens_once = true;
  }
}

// Rows that print another mesh than that of their container's recipe. 25.11 repeats 25.09 on B200 and H100,
// word for word; v0.2.0 has others there, and one of the printed ones does not fit its memory. 26.02.01
// repeats 26.02 for Qwen3 30B on H100, which f29a269f8 of 24 February 2026 had changed; what it prints of
// Llama 3 70B on GB300, but in FP8, is in no recipe, and needs twice the memory.
static void apply_mesh(Plan& c, const std::string& name, const std::string& container,
                       const std::string& system) {
  const auto set = [&](int pp, int ep, int chunks, std::int64_t micro_batch) {
    const int ranks = c.mesh.dp() * c.mesh.pp();
    c.mesh.set(Axis::pp, pp);
    c.mesh.set(Axis::dp, ranks / pp);
    c.mesh.ep = ep;
    c.chunks = chunks;
    c.micro_batch = micro_batch;
    c.schedule = chunks > 1 ? "interleaved" : "1f1b";
  };
  if (container == "25.11" && name == "gpt-oss-120b" && system == "b200") set(1, 64, 1, 4);
  if (container == "25.11" && name == "gpt-oss-120b" && system == "h100") set(4, 8, 1, 1);
  if (container == "25.11" && name == "qwen3-235b" && system == "b200") set(8, 8, 4, 1);
  if (container == "25.11" && name == "qwen3-30b" && system == "h100") set(2, 8, 12, 1);
  if (container == "26.02.01" && name == "qwen3-30b" && system == "h100") set(1, 16, 1, 1);
  if (container == "26.02.01" && name == "llama-3-70b" && system == "gb300" && c.zero != 3) set(4, 1, 5, 1);
}

// Layers of each stage: equally many, where recipes of two models count embedding and loss as a layer each
// (account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split).
static void apply_layout(Plan& c, const std::string& name, std::int64_t layers) {
  const int stages = c.mesh.pp() * c.chunks;
  const bool counts = name == "llama-3-405b" || name == "qwen3-235b";
  if (!counts || stages == 1 || (layers + 2) % stages != 0) return;
  c.balance_layers = false;
  c.layers_per_stage.assign(static_cast<std::size_t>(stages), (layers + 2) / stages);
  --c.layers_per_stage.front();
  --c.layers_per_stage.back();
}

enum class Layers { dense, experts, hybrid };
static Layers layers_of(const ModelSpec& m) {
  return m.num_state_space_layers() > 0 ? Layers::hybrid
         : m.experts != Experts::none   ? Layers::experts
                                        : Layers::dense;
}

static Table bridge(const std::string& path, const char* name, Layers layers) {
  Table t{name, {}};
  for (const CsvRow& r : read_csv(path)) {
    std::optional<ModelSpec> model = bridge_model(r.at("model"));
    if (!model || layers_of(*model) != layers) continue;
    Point p;
    std::string system = r.at("system").substr(4);
    std::transform(system.begin(), system.end(), system.begin(),
                   [](unsigned char ch) { return std::tolower(ch); });
    const std::string& precision = r.at("precision");
    const Precision kind = precision.starts_with("BF16")    ? Precision::bf16
                           : precision.starts_with("NVFP4") ? Precision::fp4
                                                            : Precision::fp8;
    Plan c = checks::searched_plan();
    c.mesh.set(Axis::tp, std::max(1, whole(r, "TP")));
    c.mesh.set(Axis::pp, std::max(1, whole(r, "PP")));
    c.mesh.set(Axis::cp, std::max(1, whole(r, "CP")));
    c.mesh.ep = std::max(1, whole(r, "EP"));
    c.mesh.etp = 1;
    const int fsdp = whole(r, "FSDP");
    c.mesh.set(Axis::dp, whole(r, "gpus") / (c.mesh.tp() * c.mesh.pp() * c.mesh.cp()));
    if (c.mesh.dp() < 1 || whole(r, "gpus") % (c.mesh.tp() * c.mesh.pp() * c.mesh.cp()) != 0) continue;
    c.zero = fsdp > 1 ? 3 : 1;
    c.micro_batch = std::max(1, whole(r, "micro_batch_seqs"));
    c.chunks = c.mesh.pp() > 1 ? std::max(1, whole(r, "VP")) : 1;
    c.schedule = c.chunks > 1 ? "interleaved" : "1f1b";
    c.balance_layers = true;
    apply_mesh(c, model->name, r.at("container"), system);
    apply_layout(c, model->name, model->num_layers);
    model->max_seq = longest;
    p.label = fmt::format("{} {} {} {} {} GPUs {}", r.at("container"), r.at("model"), system,
                          precision.substr(0, 6), r.at("gpus"), summary(c));
    p.work = checks::workload_of(*model, whole(r, "seq_len"), whole(r, "global_batch_seqs"), kind,
                                 load_machine(system), load_software("current"));
    apply_recipe(p, c, r.at("container"), system, precision);
    if (layers != Layers::dense) apply_dispatch(p.work.software, model->name, r.at("container"), system);
    c.model = p.work.plan.model;
    c.seq_len = p.work.plan.seq_len;
    c.global_batch = p.work.plan.global_batch;
    if (!shape_problem(p.work, c).empty()) continue;
    p.group = fmt::format("{} {}", r.at("model"), r.at("gpus"));
    p.plans = {c};
    p.seconds = number(r, "derived_step_time_s");
    if (p.seconds <= 0) continue;
    t.points.push_back(std::move(p));
  }
  mark(t, 3);
  return t;
}
Table bridge_dense(const std::string& path) { return bridge(path, "bridge-dense", Layers::dense); }
Table bridge_experts(const std::string& path) { return bridge(path, "bridge-experts", Layers::experts); }
Table bridge_hybrid(const std::string& path) { return bridge(path, "bridge-hybrid", Layers::hybrid); }

static std::optional<ModelSpec> nemo_model(const std::string& name) {
  const auto gpt3 = [](std::int64_t layers, std::int64_t hidden, std::int64_t heads, std::int64_t vocab) {
    return gpt(layers, hidden, heads, 4 * hidden, vocab, 1);
  };
  // Squared ReLU without a gate, rotary positions, no biases, an output matrix of its own (Adler et al. 2024,
  // https://arxiv.org/abs/2406.11704, and NeMo's recipes).
  const auto nemotron = [](std::int64_t layers, std::int64_t hidden, std::int64_t heads, std::int64_t kv) {
    ModelSpec m = llama("nemotron", layers, hidden, heads, kv, hidden / heads, 4 * hidden, 256000);
    m.activation = Activation::relu2;
    return m;
  };
  if (name == "GPT3-5B") return gpt3(24, 4096, 32, 51200);
  if (name == "GPT3-20B") return gpt3(44, 6144, 48, 51200);
  if (name == "GPT3-175B") return gpt3(96, 12288, 96, 51200);
  if (name == "Nemotron-8B") return nemotron(32, 4096, 32, 32);
  if (name == "Nemotron-22B") return nemotron(40, 6144, 48, 48);
  if (name == "Nemotron-340B") return nemotron(96, 18432, 96, 8);
  if (name == "LLAMA2-7B") return load_model("llama-2-7b");
  if (name == "LLAMA2-13B") return load_model("llama-2-13b");
  if (name == "LLAMA2-70B") return load_model("llama-2-70b");
  if (name == "LLAMA3-8B") return load_model("llama-3-8b");
  if (name == "LLAMA3-70B") return load_model("llama-3-70b");
  return {};
}

// Pretraining; what is tuned with most of its parameters frozen is another computation. Each configuration
// was published at two dates: every third configuration is fitted on, both of its rows.
Table nemo(const std::string& path) {
  Table t{"nemo-2407", {}};
  std::vector<std::string> seen;
  for (const CsvRow& r : read_csv(path)) {
    std::optional<ModelSpec> model = nemo_model(r.at("model"));
    if (!model || r.at("task") != "Pretraining") continue;
    Point p;
    model->max_seq = whole(r, "seq_len");
    Plan c = checks::searched_plan();
    c.mesh.set(Axis::tp, whole(r, "TP"));
    c.mesh.set(Axis::pp, whole(r, "PP"));
    c.mesh.set(Axis::cp, whole(r, "CP"));
    c.mesh.set(Axis::dp, whole(r, "gpus") / (c.mesh.tp() * c.mesh.pp() * c.mesh.cp()));
    c.zero = 1;
    c.micro_batch = whole(r, "micro_batch_seqs");
    c.chunks = c.mesh.pp() > 1 ? whole(r, "VP") : 1;
    c.schedule = c.chunks > 1 ? "interleaved" : "1f1b";
    c.balance_layers = false;
    const std::string run = fmt::format("{} {} GPUs {}", r.at("model"), r.at("gpus"), summary(c));
    const auto at = std::find(seen.begin(), seen.end(), run);
    p.fitted = (at - seen.begin()) % 3 == 0;
    if (at == seen.end()) seen.push_back(run);
    p.label = r.at("doc_date").substr(0, 10) + " " + run;
    p.work = checks::workload_of(*model, whole(r, "seq_len"), whole(r, "global_batch_seqs"), Precision::fp8,
                                 load_machine("h100"), load_software("nemo-2024"));
    p.work.software.dropout = r.at("model").starts_with("GPT3");  // by its recipes
    p.plans = {c};
    p.seconds = number(r, "seq_len") * number(r, "global_batch_seqs") /
                (number(r, "tokens_per_s_per_gpu") * number(r, "gpus"));
    t.points.push_back(std::move(p));
  }
  return t;
}

// Tokens per second are not printed: from its own count of FLOPs, 6N + causal attention. Its program is not
// Megatron-Core: of what it hides the paper (Grattafiori et al. 2024, 3.3.2) names the exchanges of FSDP and
// of the pipeline, not those of tensor parallelism.
Table llama3(const std::string& path) {
  Table t{"llama3-405b", {}};
  for (const CsvRow& r : read_csv(path)) {
    Point p;
    Plan c = mesh(r);
    c.mesh.set(Axis::cp, whole(r, "CP"));
    c.context_kind = ContextKind::allgather;
    c.zero = 2;
    ModelSpec model = load_model("llama-3-405b");
    p.label = fmt::format("{} GPUs seq {}", r.at("gpus"), r.at("seq_len"));
    p.work = checks::workload_of(model, whole(r, "seq_len"), whole(r, "DP") * whole(r, "batch_per_dp_seqs"),
                                 Precision::bf16, load_machine("h100"), load_software("current"));
    p.work.software.tensor_overlap = 0;
    // "FSDP shards optimizer states and gradients", with "FP32 gradient accumulation during backward
    // computation over multiple micro-batches": those of a group that goes through a stage.
    p.work.software.reduces_each_microbatch = false;
    p.work.software.reduces_each_group = true;
    // Memory is saved by tensors that are let go early, it does not say which: the output of the MLP's
    // activation is made again with the least work. The second and third row fit without.
    p.work.software.keeps_activated = false;
    const double flops = model_flops_per_token(model, p.work.plan.seq_len) *
                         static_cast<double>(p.work.plan.seq_len * p.work.plan.global_batch);
    p.seconds = flops / (number(r, "tflops_per_gpu") * 1e12 * number(r, "gpus"));
    // "Reducing one Transformer layer each from the first and the last stages": of 128 slots.
    for (int chunks : {1, 2, 4, 8}) {
      const int stages = c.mesh.pp() * chunks;
      c.chunks = chunks;
      c.schedule = chunks > 1 ? "interleaved" : "1f1b";
      c.layers_per_stage.assign(static_cast<std::size_t>(stages), 128 / stages);
      --c.layers_per_stage.front();
      --c.layers_per_stage.back();
      p.plans.push_back(c);
    }
    t.points.push_back(std::move(p));
  }
  return t;
}

// DeepSeek's own program, and its one configuration: the report's GPU hours give the step.
Table deepseek(const std::string& path) {
  Table t{"deepseek-v3", {}};
  double hours = 0;  // of GPUs, for a trillion tokens
  Plan c = checks::searched_plan();
  c.mesh.etp = 1;
  std::int64_t batch = 0;
  int gpus = 0;
  for (const CsvRow& r : read_csv(path)) {
    const std::string& item = r.at("item");
    if (item == "GPU hours per trillion tokens") hours = number(r, "value");
    if (item == "cluster size") gpus = whole(r, "value");
    if (item == "PP") c.mesh.set(Axis::pp, whole(r, "value"));
    if (item == "EP") c.mesh.ep = whole(r, "value");
    if (item == "steady global batch") batch = whole(r, "value");
  }
  c.mesh.set(Axis::dp, gpus / c.mesh.pp());
  c.schedule = "dualpipe";
  c.zero = 1;
  c.recompute = Recompute({"latent"});
  Point p;
  p.label = summary(c);
  p.work = checks::workload_of(load_model("deepseek-v3"), 4096, batch, Precision::fp8, load_machine("h100"),
                               load_software("deepseek-v3"));
  p.plans = {c};
  p.seconds = static_cast<double>(batch * 4096) * hours * 3600 / 1e12 / gpus;
  t.points.push_back(std::move(p));
  return t;
}

}  // namespace echelon::published
