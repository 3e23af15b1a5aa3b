// Megatron-Core's pretrain_gpt.py, and Megatron-Bridge's overrides.
#include <cmath>
#include <set>
#include <utility>

#include "base/units.h"
#include "plan/launch_parts.h"
#include "plan/program_names.h"

namespace echelon {
namespace {

using Settings = std::vector<std::pair<std::string, std::string>>;

// Models whose layers have one part each, which pretrain_hybrid.py trains (0.18 and later).
bool is_hybrid(const LaunchRequest& r) { return !r.model().layer_pattern.empty(); }

// Checks what no flag of hybrid models sets (megatron/core/ssm/mamba_mixer.py).
void check_hybrid(const LaunchRequest& r) {
  const ModelSpec& m = r.model();
  const StateSpaceSpec& s = m.state_space;
  const auto differs = [&](bool does, const char* what) {
    if (does) not_launched(r, "--model {}: its state spaces have {}", m.name, what);
  };
  if (s.heads > 0) {
    differs(s.kernel != 4, "a convolution of other than 4 positions");
    differs(!s.conv_bias, "a convolution without a bias");
    differs(m.norm_eps != 1e-5, "a norm with another epsilon than 1e-5");
    if (const int tp = r.plan().mesh.tp(); s.groups % tp != 0)
      not_launched(r, "--tp {}: does not divide the {} of state spaces of {}, as it must there", tp,
                   counted(s.groups, "group"), m.name);
  }
}

// YaRN's parameters for latent attention, whose positions always use YaRN there: a factor of 1 scales
// nothing. There, scores are multiplied by the square of the mscale_all_dim scale, and rotated parts by the
// ratio of the mscale scale to it (megatron/core/transformer/multi_latent_attention.py).
struct Yarn {
  double factor = 1, mscale = 1, mscale_all_dim = 0;
};
Yarn yarn_of(const ModelSpec& m) {
  if (m.rope.scaling == RopeScaling::none) return {};
  const double growth = 0.1 * std::log(m.rope.factor), scale = m.scales.attention,
               all = scale > 0 ? std::sqrt(scale * std::sqrt(static_cast<double>(m.head_dim))) : 1;
  // Rounded to recover the numbers as they were before they were multiplied.
  const auto rounded = [](double value) { return std::round(value * 1e9) / 1e9; };
  return {m.rope.factor, rounded((m.rope.attention_factor * all - 1) / growth), rounded((all - 1) / growth)};
}

// Checks what no flag of latent attention sets: the defaults of its configuration apply
// (megatron/core/transformer/transformer_config.py).
void check_latent(const LaunchRequest& r) {
  const ModelSpec& m = r.model();
  const RopeSpec& rope = m.rope;
  const bool is_scaled = rope.scaling != RopeScaling::none;
  if (is_scaled && (rope.scaling != RopeScaling::yarn || rope.original_length != 4096 ||
                    rope.beta_fast != 32 || rope.beta_slow != 1 || !rope.whole_pairs || rope.factor <= 1))
    not_launched(r, "--model {}: its positions are scaled as no flag says", m.name);
  if (!is_scaled && m.scales.attention != 0)
    not_launched(r, "--model {}: its scores are scaled as no flag says", m.name);
  if (m.norm_eps != m.head_norm_eps())
    not_launched(r, "--model {}: its norms have an epsilon of {}, and those of what is compressed {}", m.name,
                 m.norm_eps, m.head_norm_eps());
  if (m.qk_norm || m.num_kv_heads != m.num_heads)
    not_launched(r, "--model {}: has latent attention with {}, as no flag says", m.name,
                 m.qk_norm ? "norms of heads" : "fewer key/value heads");
}

Settings latent_settings(const ModelSpec& m) {
  const auto number = [](auto value) { return fmt::format("{}", value); };
  const Yarn yarn = yarn_of(m);
  Settings s{{"multi-latent-attention", ""},
             {"qk-layernorm", ""},
             {"kv-lora-rank", number(m.kv_rank)},
             {"qk-head-dim", number(m.head_dim - m.rotary_dim)},
             {"qk-pos-emb-head-dim", number(m.rotary_dim)},
             {"v-head-dim", number(m.value_head_dim)},
             {"rope-type", "yarn"},
             {"rotary-scaling-factor", number(yarn.factor)},
             {"mscale", number(yarn.mscale)},
             {"mscale-all-dim", number(yarn.mscale_all_dim)}};
  if (m.q_rank > 0) s.emplace_back("q-lora-rank", number(m.q_rank));
  return s;
}

// Checks what no flag of routers sets (megatron/core/transformer/moe/moe_utils.py).
void check_router(const LaunchRequest& r) {
  const ModelSpec& m = r.model();
  if (m.experts == Experts::none) return;
  const bool sigmoids = m.router.scores == RouterScores::sigmoid;
  const auto weighs = [&](bool does, const char* what) {
    if (does) not_launched(r, "--model {}: has {}, as no flag says", m.name, what);
  };
  weighs(sigmoids && !m.router.normalise, "sigmoids as weights of experts whose sum is not made 1");
  weighs(!sigmoids && m.router.normalise && m.router.scale != 1,
         "weights of experts whose sum is made 1 and multiplied");
  // A softmax over one expert is 1, whatever the router's scores are.
  weighs(!sigmoids && m.router.normalise && m.experts_per_token == 1,
         "one expert a token, whose weight is made 1");
  if (m.router.groups > 1 && m.router.most_groups < m.router.groups && m.router.group_best > 0 &&
      m.router.group_best != m.experts_per_token / m.router.most_groups)
    not_launched(
        r,
        "--model {}: chooses groups of experts by the sum of their {} best scores; legal: {}, the experts "
        "of a token over the groups that it may choose",
        m.name, m.router.group_best, m.experts_per_token / m.router.most_groups);
}

// Models whose layers are defined by a recipe of Megatron-Bridge (src/megatron/bridge/recipes, 0.4), not by
// the overrides.
bool has_recipe(const ModelSpec& m) {
  static const std::set<std::string> names{
      "deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "kimi-k2",    "glm-4.5-air", "qwen3-next-80b-a3b",
      "gemma-2-2b",  "gemma-2-9b",       "gemma-2-27b", "gemma-3-1b", "gpt-oss-20b", "gpt-oss-120b"};
  return names.contains(m.name) && m.num_mtp_layers == 0;
}

// Checks what flags have to say of the model.
void check_model(const LaunchRequest& r) {
  check_plain_llama(r, true);
  if (is_hybrid(r)) check_hybrid(r);
  if (r.model().latent_attention())
    check_latent(r);
  else if (r.model().rope.scaling != RopeScaling::none && r.model().rope.scaling != RopeScaling::llama3)
    not_launched(r, "--model {}: its positions are scaled as no flag says", r.model().name);
  check_router(r);
}

void check_megatron(const LaunchRequest& r) {
  const Plan& plan = r.plan();
  if (const ModelSpec& m = r.model(); m.experts != Experts::none) {
    if (plan.mesh.tp() > 1 && !plan.shards_sequence())
      not_launched(r, "--sp off: cuts sequences where experts are beside --tp {}", plan.mesh.tp());
  }
  if (const std::int64_t parts = 2 * plan.mesh.cp(); parts > 2 && plan.seq_len % parts != 0)
    not_launched(r, "--seq-len {}: cuts it into two parts for each rank of --cp {}; legal: multiples of {}",
                 plan.seq_len, plan.mesh.cp(), parts);
  // Transformer Engine supports context parallelism in its fused attention only.
  if (r.work.precision == Precision::f32 && plan.mesh.cp() > 1)
    not_launched(
        r,
        "--precision f32: its attention over --cp {} is in 16 and 8 bits alone; legal: bf16, fp8, or --cp 1",
        plan.mesh.cp());
  const bool interleaved = plan.schedule == "interleaved";
  if (plan.mesh.pp() > 1 && plan.schedule != "1f1b" && !interleaved)
    not_launched(r, "--schedule {}: does not run it; legal: 1f1b, interleaved", plan.schedule);
  if (plan.mesh.pp() > 1 && interleaved && r.best.microbatches % plan.mesh.pp() != 0)
    not_launched(r, "--micro-batch {}: makes {}, no multiple of --pp {}, which interleaving needs",
                 plan.micro_batch, counted(r.best.microbatches, "microbatch"), plan.mesh.pp());
  if (plan.offloads_activations() && plan.mesh.pp() > 1)
    not_launched(
        r,
        "--offload {}: its layers' activations are on the host with --pp 1 alone; legal: optimizer, none, or "
        "--pp 1",
        name_of(plan.offload));
  if (plan.offloads_activations() && !r.is_recompute("none"))
    not_launched(r,
                 "--offload {}: its layers' activations are on the host with --recompute none alone; legal: "
                 "optimizer, none, or --recompute none",
                 name_of(plan.offload));
  if (plan.offloads_optimizer() && plan.zero >= 2)
    not_launched(r, "--offload {}: is not its FSDP's; legal: with --zero 1, or none", name_of(plan.offload));
  if (plan.mesh.pp() > 1 && plan.zero >= 2) not_launched(r, "--zero {}: its FSDP is for --pp 1", plan.zero);
}

// "Et*6|t*7|...|t*6L": stages in the order of the model, chunk by chunk.
std::string layout_of(const LaunchRequest& r) {
  std::string text = "E";
  for (std::size_t i = 0; i < r.best.layers.size(); ++i) {
    if (i > 0) text += "|";
    if (r.best.layers[i] > 0) text += fmt::format("t*{}", r.best.layers[i]);
  }
  return text + "L";
}

// "MEM*|EM-E": the model's own pattern, a segment for each stage.
std::string hybrid_pattern(const LaunchRequest& r) {
  std::string text;
  std::size_t first = 0;
  for (const std::int64_t layers : r.best.layers) {
    if (first > 0) text += "|";
    text += r.model().layer_pattern.substr(first, static_cast<std::size_t>(layers));
    first += static_cast<std::size_t>(layers);
  }
  return text;
}

std::string recompute_modules(const LaunchRequest& r) {
  for (const ProgramName& one : megatron_recompute_modules)
    if (r.is_recompute(one.ours)) return std::string(one.theirs);
  not_launched(r, "--recompute {}: does not run it; legal: none, selective, full, mlp, moe",
               recompute_name(r.plan().recompute));
}

std::string sharding_strategy(const Plan& plan) {
  return theirs(megatron_sharding_strategies, fmt::format("{}", plan.zero));
}

// The mesh and what is sharded, by the names that both programs use.
Settings mesh_settings(const LaunchRequest& r) {
  const Plan& plan = r.plan();
  const Mesh& mesh = plan.mesh;
  Settings s{{"tensor-model-parallel-size", fmt::format("{}", mesh.tp())},
             {"pipeline-model-parallel-size", fmt::format("{}", mesh.pp())},
             {"context-parallel-size", fmt::format("{}", mesh.cp())}};
  if (r.model().experts != Experts::none) {
    s.emplace_back("expert-model-parallel-size", fmt::format("{}", mesh.ep));
    s.emplace_back("expert-tensor-parallel-size", fmt::format("{}", mesh.expert_cut()));
  }
  if (mesh.cp() > 1)
    s.emplace_back("cp-comm-type", theirs(megatron_context_communication, name_of(plan.context_kind)));
  if (plan.shards_sequence()) s.emplace_back("sequence-parallel", "");
  if (is_hybrid(r))
    s.emplace_back("hybrid-layer-pattern", hybrid_pattern(r));
  else if (mesh.pp() > 1)
    s.emplace_back("pipeline-model-parallel-layout", layout_of(r));
  if (r.is_recompute("full")) {
    s.insert(
        s.end(),
        {{"recompute-granularity", "full"}, {"recompute-method", "uniform"}, {"recompute-num-layers", "1"}});
  } else if (!r.is_recompute("none")) {
    s.insert(s.end(), {{"recompute-granularity", "selective"}, {"recompute-modules", recompute_modules(r)}});
  }
  return s;
}

// How tokens are sent to experts, as it was priced.
Settings dispatcher_settings(const LaunchRequest& r) {
  if (r.model().experts == Experts::none) return {};
  if (r.work.software.sends_tokens_once && r.plan().mesh.ep > 1)
    return {{"moe-token-dispatcher-type", "flex"}, {"moe-flex-dispatcher-backend", "hybridep"}};
  return {{"moe-token-dispatcher-type", "alltoall"}};
}

// All layers but the last, which is the most that it accepts.
std::int64_t offloaded_layers(const LaunchRequest& r) {
  return r.plan().offloads_activations() ? r.model().num_layers - 1 : 0;
}

Settings model_settings(const LaunchRequest& r) {
  const ModelSpec& m = r.model();
  const auto number = [](auto value) { return fmt::format("{}", value); };
  Settings s{
      {"num-layers", number(m.num_layers)},
      {"hidden-size", number(m.hidden)},
      {"ffn-hidden-size", number(m.mlp_hidden > 0 ? m.mlp_hidden : m.expert_hidden)},
      {"num-attention-heads", number(m.num_attention_layers() > 0 ? m.num_heads : m.state_space.heads)},
      {"kv-channels", number(m.num_attention_layers() > 0 ? m.head_dim : m.state_space.head_dim)},
      {"max-position-embeddings", number(std::max(m.max_seq, r.plan().seq_len))},
      {"norm-epsilon", number(m.norm_eps)},
      {"init-method-std", number(m.init_std)},
      {"attention-dropout", "0"},
      {"hidden-dropout", "0"}};
  if (m.num_attention_layers() > 0 && m.num_kv_heads != m.num_heads) {
    s.emplace_back("group-query-attention", "");
    s.emplace_back("num-query-groups", number(m.num_kv_heads));
  }
  if (!m.tied_embedding) s.emplace_back("untie-embeddings-and-output-weights", "");
  if (m.family == Family::gpt2) return s;
  if (m.rope.unturned_every == 1)
    s.emplace_back("position-embedding-type", "none");
  else
    s.insert(s.end(), {{"position-embedding-type", "rope"},
                       {"rotary-base", number(static_cast<std::int64_t>(m.rope.theta))}});
  s.insert(s.end(), {{"normalization", "RMSNorm"}, {"disable-bias-linear", ""}});
  if (const StateSpaceSpec& scan = m.state_space; scan.heads > 0)
    s.insert(s.end(), {{"mamba-num-heads", number(scan.heads)},
                       {"mamba-head-dim", number(scan.head_dim)},
                       {"mamba-num-groups", number(scan.groups)},
                       {"mamba-state-dim", number(scan.state)}});
  if (m.rope.scaling == RopeScaling::llama3)
    s.insert(s.end(), {{"use-rope-scaling", ""}, {"rope-scaling-factor", number(m.rope.factor)}});
  if (m.activation == Activation::swiglu) s.emplace_back("swiglu", "");
  if (m.activation == Activation::relu2) s.emplace_back("squared-relu", "");
  if (m.qkv_bias) s.emplace_back("add-qkv-bias", "");
  if (m.qk_norm) s.emplace_back("qk-layernorm", "");
  if (m.latent_attention()) {
    const Settings latent = latent_settings(m);
    s.insert(s.end(), latent.begin(), latent.end());
  }
  if (m.experts == Experts::none) return s;
  s.insert(s.end(), {{"num-experts", number(m.num_experts)},
                     {"moe-router-topk", number(m.experts_per_token)},
                     {"moe-ffn-hidden-size", number(m.expert_hidden)},
                     {"moe-grouped-gemm", ""},
                     {"moe-router-load-balancing-type", "aux_loss"},
                     {"moe-aux-loss-coeff", "0.01"}});
  const Settings dispatcher = dispatcher_settings(r);
  s.insert(s.end(), dispatcher.begin(), dispatcher.end());
  if (m.expert_latent > 0) s.emplace_back("moe-latent-size", number(m.expert_latent));
  if (m.router.scores == RouterScores::sigmoid) {
    s.insert(s.end(), {{"moe-router-score-function", "sigmoid"},
                       {"moe-router-enable-expert-bias", ""},
                       {"moe-router-topk-scaling-factor", number(m.router.scale)}});
  } else if (!m.router
                  .normalise) {  // else weights are a softmax over the chosen experts, as it computes them
    s.emplace_back("moe-router-pre-softmax", "");
    if (m.router.scale != 1) s.emplace_back("moe-router-topk-scaling-factor", number(m.router.scale));
  }
  if (m.router.groups > 1)
    s.insert(s.end(), {{"moe-router-num-groups", number(m.router.groups)},
                       {"moe-router-group-topk", number(m.router.most_groups)}});
  if (m.num_shared_experts > 0)
    s.emplace_back("moe-shared-expert-intermediate-size", number(m.shared_width()));
  if (m.num_dense_layers > 0)
    s.emplace_back("moe-layer-freq",
                   fmt::format("([0]*{}+[1]*{})", m.num_dense_layers, m.num_expert_layers()));
  return s;
}

Settings precision_settings(const LaunchRequest& r) {
  switch (r.work.precision) {
    case Precision::f32:
      return {};
    case Precision::bf16:
      return {{"bf16", ""}};
    case Precision::fp8: {
      Settings s{{"bf16", ""}, {"fp8-format", "hybrid"}, {"fp8-recipe", "tensorwise"}};
      const bool shards = r.plan().offloads_optimizer() || r.plan().zero_stage() > 0;
      if (r.work.software.narrow_parameters && shards) s.emplace_back("fp8-param-gather", "");
      return s;
    }
    case Precision::fp4:
      return {{"bf16", ""}, {"fp4-format", "e2m1"}};
  }
  return {};
}

Settings sharding_settings(const LaunchRequest& r) {
  const Plan& plan = r.plan();
  const bool offloads = plan.offloads_optimizer();  // shards, even if over one rank
  if (!offloads && plan.zero_stage() == 0) return {{"overlap-grad-reduce", ""}};
  Settings s{{"use-distributed-optimizer", ""}, {"overlap-grad-reduce", ""}, {"overlap-param-gather", ""}};
  if (plan.zero >= 2)
    s.insert(s.end(), {{"use-megatron-fsdp", ""},
                       {"data-parallel-sharding-strategy", sharding_strategy(plan)},
                       {"ckpt-format", "fsdp_dtensor"},
                       {"no-gradient-accumulation-fusion", ""}});
  if (plan.hsdp > 1) s.emplace_back("num-distributed-optimizer-instances", fmt::format("{}", plan.hsdp));
  if (offloads)
    s.insert(s.end(), {{"optimizer-cpu-offload", ""},
                       {"optimizer-offload-fraction", "1.0"},
                       {"use-precision-aware-optimizer", ""}});
  return s;
}

// Options that are off by default but assumed in prices: a fused loss, and products that overlap with
// tensor-parallel communication.
Settings fused_settings(const LaunchRequest& r) {
  Settings s{{"cross-entropy-loss-fusion", ""}};
  if (r.work.software.tensor_overlap > 0 && r.plan().shards_sequence()) s.emplace_back("tp-comm-overlap", "");
  return s;
}

// Expandable memory segments, which leave as little memory unused as prices assume.
constexpr const char* allocator = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n";

}  // namespace

std::vector<LaunchFile> launch_megatron_core(const LaunchRequest& r) {
  check_model(r);
  check_megatron(r);
  const Plan& plan = r.plan();
  Settings all = mesh_settings(r);
  for (const Settings& more :
       {Settings{{"micro-batch-size", fmt::format("{}", plan.micro_batch)},
                 {"global-batch-size", fmt::format("{}", plan.global_batch)},
                 {"seq-length", fmt::format("{}", plan.seq_len)}},
        sharding_settings(r), precision_settings(r), model_settings(r), fused_settings(r),
        offloaded_layers(r) > 0
            ? Settings{{"cpu-offloading-num-layers", fmt::format("{}", offloaded_layers(r))}}
            : Settings{},
        Settings{{"transformer-impl", "transformer_engine"},
                 {"use-mcore-models", ""},
                 {"lr", "3e-4"},
                 {"train-iters", "${TRAIN_ITERS:-100}"},
                 {"tokenizer-type", "NullTokenizer"},
                 {"vocab-size", fmt::format("{}", r.model().vocab - 1)},  // and the end-of-document token

                 {"make-vocab-size-divisible-by", fmt::format("{}", padded_vocabulary_multiple)},
                 {"mock-data", ""},
                 {"log-interval", "1"}}})
    all.insert(all.end(), more.begin(), more.end());
  if (is_hybrid(r))
    all.emplace_back("spec", "megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec");
  std::string text = launch_head(r) + allocator;
  // With one hardware queue, collectives are issued in the order of the computation that hides them; its FSDP
  // needs more queues.
  if (plan.zero < 2) text += "export CUDA_DEVICE_MAX_CONNECTIONS=1\n";
  text += torchrun(r) + fmt::format(" ${{MEGATRON_PATH:-.}}/pretrain_{}.py", is_hybrid(r) ? "hybrid" : "gpt");
  for (const auto& [key, value] : all)
    text += " \\\n  --" + key +
            (value.empty()                                         ? ""
             : value.find_first_of("|*()[]$") == std::string::npos ? " " + value
                                                                   : " \"" + value + "\"");
  return {{"launch.sh", text + " \\\n  \"$@\"\n"}};
}

std::vector<LaunchFile> launch_megatron_bridge(const LaunchRequest& r) {
  if (!has_recipe(r.model())) check_model(r);
  check_megatron(r);
  const Plan& plan = r.plan();
  const auto snake = [](std::string key) {
    for (char& c : key)
      if (c == '-') c = '_';
    return key;
  };
  // Numbers stay numbers in YAML.
  const auto yaml = [](const std::string& key, const std::string& value) {
    if (value.empty()) return std::string("true");
    if (key == "recompute-modules") return "[" + value + "]";
    return value.find_first_not_of("0123456789") == std::string::npos ? value : "\"" + value + "\"";
  };
  std::string text = "model:\n";
  std::set<std::string> said;
  for (const Settings& some : {mesh_settings(r), dispatcher_settings(r)})
    for (const auto& [key, value] : some) {
      text += fmt::format("  {}: {}\n", snake(key), yaml(key, value));
      said.insert(snake(key));
    }
  // If its layout has more stages than ranks, they are chunks.
  if (!is_hybrid(r) && plan.mesh.pp() > 1 && static_cast<int>(r.best.layers.size()) > plan.mesh.pp())
    text += fmt::format("  virtual_pipeline_model_parallel_size: {}\n",
                        r.best.layers.size() / static_cast<std::size_t>(plan.mesh.pp()));
  else if (!is_hybrid(r))
    text += "  virtual_pipeline_model_parallel_size: null\n";
  text += fmt::format("  seq_length: {}\n", plan.seq_len);
  if (const std::int64_t layers = offloaded_layers(r); layers > 0)
    text += fmt::format(
        "  cpu_offloading: true\n  cpu_offloading_num_layers: {}\n  cpu_offloading_activations: true\n"
        "  cpu_offloading_weights: false\n",
        layers);
  else
    text += "  cpu_offloading: false\n";
  // The recipe may set what the plan does not have.
  for (const auto& [key, none] : Settings{{"sequence_parallel", "false"},
                                          {"pipeline_model_parallel_layout", "null"},
                                          {"num_layers_in_first_pipeline_stage", "null"},
                                          {"num_layers_in_last_pipeline_stage", "null"},
                                          {"account_for_embedding_in_pipeline_split", "false"},
                                          {"account_for_loss_in_pipeline_split", "false"},
                                          {"recompute_granularity", "null"},
                                          {"recompute_method", "null"},
                                          {"recompute_num_layers", "null"},
                                          {"recompute_modules", "null"},
                                          {"cp_comm_type", "null"}})
    if (!said.contains(key)) text += fmt::format("  {}: {}\n", key, none);
  if (!is_hybrid(r)) text += "  mtp_num_layers: null\n";
  // It overlaps with the dispatcher alltoall only.
  if (r.model().num_shared_experts > 0) text += "  moe_shared_expert_overlap: false\n";
  text += fmt::format("train:\n  micro_batch_size: {}\n  global_batch_size: {}\n", plan.micro_batch,
                      plan.global_batch);
  text += fmt::format("dataset:\n  sequence_length: {}\n", plan.seq_len);
  const bool offloads = plan.offloads_optimizer(), shards = offloads || plan.zero_stage() > 0,
             fsdp = plan.zero >= 2;
  text += fmt::format(
      "ddp:\n  use_distributed_optimizer: {}\n  overlap_grad_reduce: true\n  overlap_param_gather: {}\n",
      shards, shards);
  text += fmt::format("  num_distributed_optimizer_instances: {}\n", plan.hsdp);
  if (!fsdp)
    text += "  use_megatron_fsdp: false\n";
  else
    text += fmt::format("  use_megatron_fsdp: true\n  data_parallel_sharding_strategy: {}\n",
                        sharding_strategy(plan));
  text += fmt::format("optimizer:\n  use_distributed_optimizer: {}\n", shards);
  if (!offloads)
    text += "  optimizer_cpu_offload: false\n";
  else
    text +=
        "  optimizer_cpu_offload: true\n  optimizer_offload_fraction: 1.0\n  use_precision_aware_optimizer: "
        "true\n";
  if (fsdp) text += "checkpoint:\n  ckpt_format: fsdp_dtensor\n";
  if (r.work.precision != Precision::f32)
    text += fmt::format("mixed_precision: {}\n",
                        r.work.precision == Precision::fp8   ? "bf16_with_fp8_current_scaling_mixed"
                        : r.work.precision == Precision::fp4 ? "bf16_with_nvfp4_mixed"
                                                             : "bf16_mixed");
  return {{"launch.sh", launch_head(r) + allocator +
                            "# RECIPE: a script of Megatron-Bridge's examples/recipes that pretrains this "
                            "model and takes --config-file.\n" +
                            torchrun(r) + " \"${RECIPE:?}\" --config-file bridge.yaml \"$@\"\n"},
          {"bridge.yaml", text}};
}

}  // namespace echelon
