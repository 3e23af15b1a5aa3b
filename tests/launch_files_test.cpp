// What `plan --launch-for` writes. The programs' own parsers are asked by bench/check_launches.py.
#include <gtest/gtest.h>

#include <fmt/format.h>
#include <toml++/toml.h>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "megatron_arguments.h"
#include "plan/launch.h"
#include "plan/measurements.h"
#include "plan/search.h"
#include "refusals.h"
#include "schedule/schedules.h"
#include "schedule/text.h"
#include "verb_test.h"
#include "workloads.h"

namespace echelon::launch_files_test {
namespace {

using checks::expect_refusal;
using Pins = std::vector<std::pair<const char*, const char*>>;
using Files = std::map<std::string, std::string>;

SearchRequest request_of(const char* model, int gpus, std::int64_t batch, const char* software,
                         const Pins& pins) {
  SearchRequest r;
  r.work = checks::workload_of(load_model(model), 4096, batch, Precision::bf16, load_machine("h100"),
                               load_software(software));
  r.gpus = gpus;
  r.top = 1;
  for (const auto& [field, value] : pins) r.pin(field, std::string(value), field);
  return r;
}

Files files_of(const std::string& program, const SearchRequest& r) {
  Files files;
  for (const LaunchFile& file : launch_files(program, search(r).plans.at(0), r.work))
    files[file.name] = file.text;
  return files;
}

// "--flag value" of the command; "" where the flag stands alone, "-" where it does not stand at all.
std::string value_of(const std::string& command, const std::string& flag) {
  std::istringstream in(command);
  std::string word, value;
  while (in >> word)
    if (word == flag) return in >> value && !value.starts_with("--") && value != "\\" ? value : "";
  return "-";
}

TEST(LaunchFiles, MegatronsFlags) {
  const SearchRequest r = request_of("llama-3-70b", 64, 512, "current",
                                     {{"tp", "4"},
                                      {"pp", "4"},
                                      {"dp", "4"},
                                      {"schedule", "interleaved"},
                                      {"chunks", "5"},
                                      {"zero", "1"},
                                      {"micro-batch", "1"},
                                      {"recompute", "mlp"}});
  const std::string command = files_of("megatron-core", r).at("launch.sh");
  for (const auto& [flag, value] : Pins{{"--tensor-model-parallel-size", "4"},
                                        {"--pipeline-model-parallel-size", "4"},
                                        {"--micro-batch-size", "1"},
                                        {"--global-batch-size", "512"},
                                        {"--sequence-parallel", ""},
                                        {"--use-distributed-optimizer", ""},
                                        {"--recompute-granularity", "selective"},
                                        {"--recompute-modules", "mlp"},
                                        {"--num-layers", "80"},
                                        {"--num-query-groups", "8"},
                                        {"--bf16", ""},
                                        {"--use-megatron-fsdp", "-"},
                                        {"--num-experts", "-"}})
    EXPECT_EQ(value_of(command, flag), value) << flag;
  EXPECT_NE(command.find("--nnodes 8 --nproc-per-node 8"), std::string::npos) << command;
  EXPECT_NE(command.find("export CUDA_DEVICE_MAX_CONNECTIONS=1"), std::string::npos);
  // 20 stages, all layers, the embedding first and the loss last.
  std::string layout = value_of(command, "--pipeline-model-parallel-layout");
  ASSERT_TRUE(layout.starts_with("\"E") && layout.ends_with("L\"")) << layout;
  layout = layout.substr(2, layout.size() - 4);
  std::istringstream stages(layout);
  std::int64_t layers = 0, count = 0;
  for (std::string stage; std::getline(stages, stage, '|'); ++count)
    if (!stage.empty()) layers += std::stoll(stage.substr(2));
  EXPECT_EQ(count, 20);
  EXPECT_EQ(layers, 80);

  const std::string sharded = files_of("megatron-core", request_of("mixtral-8x7b", 64, 256, "current",
                                                                   {{"pp", "1"}, {"zero", "3"}, {"ep", "8"}}))
                                  .at("launch.sh");
  EXPECT_EQ(value_of(sharded, "--data-parallel-sharding-strategy"), "optim_grads_params");
  EXPECT_EQ(value_of(sharded, "--expert-model-parallel-size"), "8");
  EXPECT_EQ(value_of(sharded, "--num-experts"), "8");
  EXPECT_EQ(value_of(sharded, "--moe-router-topk"), "2");
  EXPECT_EQ(sharded.find("CUDA_DEVICE_MAX_CONNECTIONS"), std::string::npos);
}

TEST(LaunchFiles, MegatronsRouters) {
  SearchRequest r = request_of("qwen3-30b-a3b", 32, 256, "current", {{"pp", "1"}});
  const auto command = [&] { return files_of("megatron-core", r).at("launch.sh"); };
  ModelSpec& m = r.work.plan.model;
  EXPECT_EQ(value_of(command(), "--moe-router-pre-softmax"), "-");
  m.router.groups = 8, m.router.most_groups = 4;
  EXPECT_EQ(value_of(command(), "--moe-router-num-groups"), "8");
  EXPECT_EQ(value_of(command(), "--moe-router-group-topk"), "4");
  m.router.normalise = false, m.router.scale = 2.5;
  EXPECT_EQ(value_of(command(), "--moe-router-pre-softmax"), "");
  EXPECT_EQ(value_of(command(), "--moe-router-topk-scaling-factor"), "2.5");
  m.router.group_best = m.experts_per_token / m.router.most_groups;  // by its name what it is anyway
  EXPECT_EQ(value_of(command(), "--moe-router-group-topk"), "4");
  m.router.group_best = 1;
  expect_refusal([&] { command(); },
                 {"--launch-for megatron-core", "groups of experts", "1 best", "legal: 2"});
  m.router.group_best = 0;
  m.router.normalise = true;
  expect_refusal([&] { command(); }, {"--launch-for megatron-core", "sum is made 1 and multiplied"});
  // Of one expert alone the softmax is over all.
  m.router = RouterSpec{}, m.experts_per_token = 1;
  expect_refusal([&] { command(); }, {"one expert a token", "made 1"});
  m.router.normalise = false;
  EXPECT_EQ(value_of(command(), "--moe-router-pre-softmax"), "");
  EXPECT_NO_THROW(checks::MegatronArguments{command()});
  r = request_of("mixtral-8x7b", 8, 64, "current", {{"tp", "2"}, {"sp", "off"}, {"ep", "4"}});
  expect_refusal([&] { command(); }, {"--sp off", "experts"});
}

// Parameters are gathered as they are priced: in 8 bits.
TEST(LaunchFiles, MegatronGathersWhatItMultiplies) {
  SearchRequest r = request_of("llama-3-8b", 64, 256, "current", {{"dp", "64"}, {"zero", "1"}});
  r.work.precision = Precision::fp8;
  EXPECT_EQ(value_of(files_of("megatron-core", r).at("launch.sh"), "--fp8-param-gather"), "");
  r.work.software.narrow_parameters = false;
  EXPECT_EQ(value_of(files_of("megatron-core", r).at("launch.sh"), "--fp8-param-gather"), "-");
}

// What prices count on and its defaults leave out.
TEST(LaunchFiles, MegatronIsStartedAsItIsPriced) {
  const SearchRequest r = request_of("llama-3-70b", 64, 512, "current", {{"tp", "4"}, {"zero", "1"}});
  const std::string command = files_of("megatron-core", r).at("launch.sh");
  for (const char* flag : {"--cross-entropy-loss-fusion", "--tp-comm-overlap"})
    EXPECT_EQ(value_of(command, flag), "");
  const std::string allocator = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n";
  EXPECT_NE(command.find(allocator), std::string::npos);
  EXPECT_NE(files_of("megatron-bridge", r).at("launch.sh").find(allocator), std::string::npos);
  EXPECT_EQ(value_of(files_of("megatron-core",
                              request_of("llama-3-8b", 64, 512, "current", {{"tp", "1"}, {"zero", "1"}}))
                         .at("launch.sh"),
                     "--tp-comm-overlap"),
            "-");
}

// What the plan has not is said too: a recipe may have it.
TEST(LaunchFiles, BridgeKeepsNothingOfARecipesMesh) {
  const std::string plain =
      files_of("megatron-bridge",
               request_of("llama-3-8b", 64, 64, "current",
                          {{"tp", "1"}, {"pp", "1"}, {"cp", "1"}, {"zero", "1"}, {"recompute", "none"}}))
          .at("bridge.yaml");
  for (const char* line :
       {"  sequence_parallel: false\n", "  virtual_pipeline_model_parallel_size: null\n",
        "  pipeline_model_parallel_layout: null\n", "  account_for_embedding_in_pipeline_split: false\n",
        "  recompute_granularity: null\n", "  recompute_modules: null\n", "  cp_comm_type: null\n",
        "  cpu_offloading: false\n", "  use_megatron_fsdp: false\n", "  optimizer_cpu_offload: false\n"})
    EXPECT_NE(plain.find(line), std::string::npos) << line << plain;
  EXPECT_EQ(plain.find("dispatcher"), std::string::npos);
  const Pins piped{{"tp", "4"}, {"pp", "4"}, {"schedule", "1f1b"}, {"zero", "1"}, {"recompute", "full"}};
  const std::string staged =
      files_of("megatron-bridge", request_of("llama-3-70b", 64, 512, "current", piped)).at("bridge.yaml");
  for (const char* line : {"  sequence_parallel: true\n", "  virtual_pipeline_model_parallel_size: null\n",
                           "  pipeline_model_parallel_layout: \"Et*", "  recompute_granularity: \"full\"\n"})
    EXPECT_NE(staged.find(line), std::string::npos) << line << staged;
  EXPECT_EQ(staged.find("  sequence_parallel: false\n"), std::string::npos);
  SearchRequest experts = request_of("qwen3-30b-a3b", 32, 256, "current", {{"pp", "1"}, {"ep", "8"}});
  std::string yaml = files_of("megatron-bridge", experts).at("bridge.yaml");
  EXPECT_NE(yaml.find("  moe_token_dispatcher_type: \"flex\"\n  moe_flex_dispatcher_backend: \"hybridep\"\n"),
            std::string::npos)
      << yaml;
  experts.work.software.sends_tokens_once = false;
  yaml = files_of("megatron-bridge", experts).at("bridge.yaml");
  EXPECT_NE(yaml.find("  moe_token_dispatcher_type: \"alltoall\"\n"), std::string::npos) << yaml;
}

// NVLink joins the devices of 18 hosts there.
TEST(LaunchFiles, AHostHasNotWhatALinkJoins) {
  SearchRequest r = request_of("llama-3-70b", 72, 288, "current", {});
  r.work.machine = load_machine("gb200");
  EXPECT_NE(files_of("megatron-core", r).at("launch.sh").find("--nnodes 18 --nproc-per-node 4"),
            std::string::npos);
  r.gpus = 128;
  r.work.plan.global_batch = 256;
  EXPECT_NE(files_of("megatron-core", r).at("launch.sh").find("--nnodes 32 --nproc-per-node 4"),
            std::string::npos);
}

TEST(LaunchFiles, BridgesOverrides) {
  const SearchRequest r =
      request_of("llama-3-70b", 64, 512, "current",
                 {{"tp", "4"}, {"pp", "4"}, {"schedule", "interleaved"}, {"chunks", "5"}, {"zero", "1"}});
  const Files files = files_of("megatron-bridge", r);
  const std::string& yaml = files.at("bridge.yaml");
  for (const char* line : {"  tensor_model_parallel_size: 4\n", "  virtual_pipeline_model_parallel_size: 5\n",
                           "  sequence_parallel: true\n", "  use_distributed_optimizer: true\n",
                           "mixed_precision: bf16_mixed\n", "  pipeline_model_parallel_layout: \"Et*"})
    EXPECT_NE(yaml.find(line), std::string::npos) << line << yaml;
  EXPECT_NE(files.at("launch.sh").find("--config-file bridge.yaml"), std::string::npos);
}

TEST(LaunchFiles, TorchtitansJobAndSchedule) {
  const Pins pins{{"tp", "2"},   {"pp", "4"},          {"cp", "1"},  {"dp", "8"},
                  {"zero", "2"}, {"micro-batch", "1"}, {"hsdp", "2"}};
  SearchRequest r = request_of("llama-3-8b", 64, 128, "torchtitan", pins);
  r.pin("schedule", "zb-h1");
  Files files = files_of("torchtitan", r);
  toml::table job = toml::parse(files.at("torchtitan.toml"));
  const auto number = [&](const char* key) {
    return job["parallelism"][key].value<std::int64_t>().value_or(-1);
  };
  EXPECT_EQ(number("tensor_parallel_degree"), 2);
  EXPECT_EQ(number("pipeline_parallel_degree"), 4);
  EXPECT_EQ(number("data_parallel_replicate_degree"), 2);
  EXPECT_EQ(number("data_parallel_shard_degree"), 4);
  EXPECT_EQ(number("pipeline_parallel_microbatch_size"), 1);
  EXPECT_EQ(job["parallelism"]["fsdp_reshard_after_forward"].value_or(std::string()), "never");
  EXPECT_EQ(job["training"]["local_batch_size"].value<std::int64_t>(), 16);
  EXPECT_EQ(job["model"]["flavor"].value_or(std::string()), "8B");
  std::int64_t modules = 0;
  for (const auto& stage : *job["parallelism"]["module_fqns_per_model_part"].as_array())
    modules += static_cast<std::int64_t>(stage.as_array()->size());
  EXPECT_EQ(modules, 32 + 3);
  const Schedule schedule = from_text(files.at("schedule.csv"), "schedule.csv"),
                 own = make_schedule("zb-h1", 4, 16);
  EXPECT_EQ(schedule.ranks, own.ranks);
  r.pin("schedule", "zb-v");  // which it has by name
  files = files_of("torchtitan", r);
  EXPECT_FALSE(files.contains("schedule.csv"));
  EXPECT_NE(files.at("torchtitan.toml").find("\"ZBVZeroBubble\""), std::string::npos);
  EXPECT_NE(files.at("torchtitan.toml").find("[compile]\nenable = false"), std::string::npos);
  r.pin("schedule", "interleaved");
  EXPECT_NE(files_of("torchtitan", r).at("torchtitan.toml").find("[compile]\nenable = true"),
            std::string::npos);
  const std::string longer =
      files_of("torchtitan", request_of("llama-3.1-8b", 8, 64, "torchtitan", {{"zero", "3"}, {"pp", "1"}}))
          .at("torchtitan.toml");
  EXPECT_NE(longer.find("flavor = \"8B\""), std::string::npos);
  EXPECT_NE(longer.find("fsdp_reshard_after_forward = \"always\""), std::string::npos);
  r.pin("zero", 3);  // priced as it is then: gathered once, and kept for all microbatches
  EXPECT_NE(files_of("torchtitan", r).at("torchtitan.toml").find("fsdp_reshard_after_forward = \"default\""),
            std::string::npos);
  r.pin("hsdp", 1), r.pin("zero", 0);
  expect_refusal([&] { files_of("torchtitan", r); }, {"--launch-for torchtitan", "--zero 0", "legal: 2, 3"});
}

// Parameters are gathered as they are priced: in 8 bits, which is none of its defaults.
TEST(LaunchFiles, TorchtitanGathersWhatItMultiplies) {
  SearchRequest r = request_of("llama-3-8b", 8, 64, "torchtitan", {{"zero", "3"}, {"pp", "1"}});
  r.work.precision = Precision::fp8;
  const toml::table job = toml::parse(files_of("torchtitan", r).at("torchtitan.toml"));
  EXPECT_EQ(job["model"]["converters"][0].value_or(std::string()), "quantize.linear.float8");
  const auto gathers = [](const toml::table& one) {
    return one["quantize"]["linear"]["float8"]["enable_fsdp_float8_all_gather"].value_or(false);
  };
  EXPECT_TRUE(gathers(job));
  r.work.software.narrow_parameters = false;
  EXPECT_FALSE(gathers(toml::parse(files_of("torchtitan", r).at("torchtitan.toml"))));
}

// What torchtitan prints of the job that its file describes.
std::string torchtitans_log(const Files& files, const Estimate& e) {
  const toml::table job = toml::parse(files.at("torchtitan.toml"));
  const auto& mesh = *job["parallelism"].as_table();
  const auto size = [&](const char* key) { return mesh[key].value_or(std::int64_t{0}); };
  const std::int64_t local = job["training"]["local_batch_size"].value_or(std::int64_t{0}),
                     global = job["training"]["global_batch_size"].value_or(std::int64_t{0}),
                     pp = size("pipeline_parallel_degree");
  std::string log = fmt::format(
      "Building device mesh with parallelism: pp={}, dp_replicate={}, dp_shard={}, cp={}, tp={}, ep=1, "
      "etp=1\n"
      "Trainer is initialized with local batch size {}, global batch size {}, gradient accumulation steps "
      "{}, sequence length {}, total steps 100 (warmup 2)\n",
      pp, size("data_parallel_replicate_degree"), size("data_parallel_shard_degree"),
      size("context_parallel_degree"), size("tensor_parallel_degree"), local, global,
      pp > 1 ? 1 : e.microbatches, job["training"]["seq_len"].value_or(std::int64_t{0}));
  if (pp > 1)
    log += fmt::format("Using pipeline schedule {} with {} microbatches and {} stages.\n",
                       mesh["pipeline_parallel_schedule"].value_or(std::string()), e.microbatches,
                       pp * e.plan.chunks);
  if (job["activation_checkpoint"]["mode"].value_or(std::string()) == "full")
    log += "Applied full activation checkpointing to the model\n";
  return log + "step:  1  loss: 12.2  tps: 7,000  tflops: 400.0\n";
}

TEST(LaunchFiles, TorchtitansLogsAreReadAsThePlansThatWereWritten) {
  using Sizes = std::array<int, 6>;  // dp, tp, pp, cp, hsdp, zero
  for (const auto& [dp, tp, pp, cp, hsdp, zero] : {Sizes{64, 1, 1, 1, 1, 0},
                                                   {64, 1, 1, 1, 1, 3},
                                                   {8, 8, 1, 1, 1, 3},
                                                   {4, 4, 4, 1, 1, 3},
                                                   {1, 8, 1, 8, 1, 3},
                                                   {4, 4, 1, 4, 4, 3},
                                                   {4, 4, 1, 4, 2, 3},
                                                   {16, 4, 1, 1, 4, 3},
                                                   {1, 4, 4, 4, 1, 3}}) {
    SearchRequest r =
        request_of("llama-3-8b", 64, 512, "torchtitan", {{"micro-batch", "1"}, {"recompute", "full"}});
    for (const auto& [field, value] :
         {std::pair{"dp", dp}, {"tp", tp}, {"pp", pp}, {"cp", cp}, {"zero", zero}})
      r.pin(field, value);
    r.work.machine.memory_bytes = 1e12;
    if (zero > 0) r.pin("hsdp", hsdp);
    if (pp > 1) r.pin("schedule", std::string("1f1b"), "schedule");
    if (cp > 1) r.pin("cp-kind", std::string("allgather"), "cp-kind");
    const SearchResult found = search(r);
    ASSERT_FALSE(found.plans.empty())
        << dp << ' ' << tp << ' ' << pp << ' ' << cp << ' ' << hsdp << ' ' << zero;
    const Estimate& e = found.plans.front();
    Files files;
    for (const LaunchFile& file : launch_files("torchtitan", e, r.work)) files[file.name] = file.text;
    Measurements m;
    read_measurements(torchtitans_log(files, e), "titan.log", "llama-3-8b", m);
    Plan written = e.plan;
    written.balance_layers = false;  // of which logs say nothing
    EXPECT_EQ(summary(m.steps.at(0).plan), summary(written));
  }
  // Which it would shard over the ranks of cp, and replicas that its mesh has no place for.
  expect_refusal(
      [&] {
        files_of("torchtitan", request_of("llama-3-8b", 64, 512, "current",
                                          {{"dp", "1"},
                                           {"tp", "8"},
                                           {"pp", "1"},
                                           {"cp", "8"},
                                           {"cp-kind", "allgather"},
                                           {"zero", "0"}}));
      },
      {"--zero 0", "legal: 2, 3"});
  expect_refusal(
      [&] {
        files_of("torchtitan", request_of("llama-3-8b", 64, 512, "torchtitan",
                                          {{"dp", "2"},
                                           {"tp", "4"},
                                           {"pp", "1"},
                                           {"cp", "8"},
                                           {"cp-kind", "allgather"},
                                           {"zero", "3"},
                                           {"hsdp", "4"}}));
      },
      {"--hsdp 4", "2 ranks of dp", "divisors of 2"});
}

// Its recipe has the model: what no flag of Megatron's says is no reason to refuse the plan.
TEST(LaunchFiles, BridgesRecipesHaveTheirModels) {
  for (const char* model : {"deepseek-v3", "kimi-k2", "gpt-oss-20b", "gemma-2-9b", "qwen3-next-80b-a3b"}) {
    SCOPED_TRACE(model);
    SearchRequest r = request_of(model, 16, 64, "current",
                                 {{"tp", "1"},
                                  {"pp", "2"},
                                  {"cp", "1"},
                                  {"zero", "1"},
                                  {"schedule", "1f1b"},
                                  {"micro-batch", "1"},
                                  {"recompute", "none"}});
    r.work.machine.memory_bytes = 1e13;
    const Estimate best = search(r).plans.at(0);
    std::string yaml;
    for (const LaunchFile& file : launch_files("megatron-bridge", best, r.work))
      if (file.name == "bridge.yaml") yaml = file.text;
    EXPECT_NE(yaml.find(fmt::format("  pipeline_model_parallel_size: {}\n", best.plan.mesh.pp())),
              std::string::npos);
    EXPECT_NE(yaml.find("  mtp_num_layers: null\n"), std::string::npos);  // which some recipes have
    if (!r.work.plan.model.latent_attention())
      expect_refusal([&] { launch_files("megatron-core", best, r.work); },
                     {"--model ", model, "not written"});
  }
  SearchRequest none = request_of("olmo2-7b", 8, 64, "current", {});
  expect_refusal([&] { files_of("megatron-bridge", none); }, {"--model olmo2-7b", "not written"});
}

// Latent attention: YaRN's numbers are those by which the configuration of transformers multiplies scores,
// and a factor of 1 scales nothing.
TEST(LaunchFiles, MegatronsLatentAttention) {
  const auto planned = [](const char* model) {
    SearchRequest r =
        request_of(model, 16, 64, "current",
                   {{"tp", "2"}, {"pp", "2"}, {"zero", "1"}, {"schedule", "1f1b"}, {"micro-batch", "1"}});
    r.work.machine.memory_bytes = 1e13;
    return r;
  };
  const auto starts = [&](const char* model, const Pins& expected) {
    SCOPED_TRACE(model);
    const std::string command = files_of("megatron-core", planned(model)).at("launch.sh");
    for (const auto& [flag, value] : expected) EXPECT_EQ(value_of(command, flag), value) << flag;
    const checks::MegatronArguments arguments(command);
    EXPECT_EQ(arguments.world(), 16);
    EXPECT_EQ(value_of(command, "--group-query-attention"), "-");
  };
  starts("deepseek-v3", {{"--multi-latent-attention", ""},
                         {"--qk-layernorm", ""},
                         {"--q-lora-rank", "1536"},
                         {"--kv-lora-rank", "512"},
                         {"--qk-head-dim", "128"},
                         {"--qk-pos-emb-head-dim", "64"},
                         {"--v-head-dim", "128"},
                         {"--rope-type", "yarn"},
                         {"--rotary-scaling-factor", "1"},
                         {"--rotary-base", "10000"},
                         {"--moe-router-score-function", "sigmoid"},
                         {"--moe-router-enable-expert-bias", ""},
                         {"--moe-router-topk-scaling-factor", "2.5"},
                         {"--moe-router-num-groups", "8"},
                         {"--moe-layer-freq", "\"([0]*3+[1]*58)\""}});
  starts("deepseek-v2-lite", {{"--q-lora-rank", "-"},
                              {"--rotary-scaling-factor", "40"},
                              {"--mscale", "0.707"},
                              {"--mscale-all-dim", "0.707"},
                              {"--moe-router-score-function", "-"},
                              {"--moe-router-pre-softmax", ""}});
  starts("kimi-k2", {{"--rotary-base", "50000"}, {"--moe-router-num-groups", "-"}});

  const auto refused = [&](const char* model, const auto& change, const char* words) {
    SearchRequest r = planned(model);
    change(r.work.plan.model);
    expect_refusal([&] { files_of("megatron-core", r); }, {"--model ", model, words});
  };
  const auto as_it_is = [](ModelSpec&) {};
  refused("glm-4.7-flash", as_it_is, "epsilon of 1e-05");
  refused("deepseek-v2", as_it_is, "sum of their 1 best scores");
  refused(
      "deepseek-v2-lite", [](ModelSpec& m) { m.rope.original_length = 8192; }, "positions are scaled");
  refused(
      "deepseek-v3", [](ModelSpec& m) { m.scales.attention = 0.1; }, "scores are scaled");
  for (const char* program : {"torchtitan", "nanotron"}) {
    SearchRequest r = request_of("deepseek-v3", 16, 64, program, {{"micro-batch", "1"}});
    r.work.machine.memory_bytes = 1e13;
    expect_refusal([&] { files_of(program, r); }, {"deepseek-v3"});
  }
}

TEST(LaunchFiles, NanotronsAndDeepSpeeds) {
  const Files nanotron = files_of(
      "nanotron",
      request_of("llama-2-7b", 16, 128, "nanotron",
                 {{"tp", "2"}, {"pp", "2"}, {"zero", "1"}, {"recompute", "none"}, {"micro-batch", "1"}}));
  for (const char* line :
       {"  dp: 4\n", "  tp: 2\n", "  pp: 2\n", "  pp_engine: 1f1b\n", "  tp_mode: REDUCE_SCATTER\n",
        "  zero_stage: 1\n", "  batch_accumulation_per_replica: 32\n", "    num_hidden_layers: 32\n",
        "    rope_theta: 10000.0\n", "    rms_norm_eps: 1.0e-05\n", "  recompute_layer: false\n",
        "data_stages:\n- name: all\n  start_training_step: 1\n  data:\n    dataset: null\n",
        "  optimizer_factory:\n    name: adamW\n    adam_beta1: 0.9\n"})
    EXPECT_NE(nanotron.at("nanotron.yaml").find(line), std::string::npos) << line;
  // It is read strictly: what earlier versions had here is an error.
  for (const char* line : {"\ndata:\n", "\n  adam_beta1", "\n  torch_adam_is_fused"})
    EXPECT_EQ(nanotron.at("nanotron.yaml").find(line), std::string::npos) << line;
  const Files again = files_of(
      "nanotron", request_of("llama-2-7b", 16, 128, "nanotron", {{"zero", "1"}, {"recompute", "full"}}));
  EXPECT_NE(again.at("nanotron.yaml").find("  recompute_layer: true\n"), std::string::npos);
  const Files deepspeed = files_of(
      "deepspeed", request_of("llama-2-7b", 16, 128, "deepspeed",
                              {{"tp", "1"}, {"pp", "1"}, {"cp", "2"}, {"zero", "3"}, {"micro-batch", "2"}}));
  const nlohmann::json config = nlohmann::json::parse(deepspeed.at("ds_config.json"));
  EXPECT_EQ(config["train_batch_size"], 128);
  EXPECT_EQ(config["gradient_accumulation_steps"], 8);
  EXPECT_EQ(config["zero_optimization"]["stage"], 3);
  EXPECT_EQ(config["sequence_parallel_size"], 2);
  EXPECT_EQ(config["bf16"]["enabled"], true);
  // On several nodes without a file of hosts.
  const std::string& command = deepspeed.at("launch.sh");
  EXPECT_NE(command.find("torchrun --nnodes 2 --nproc-per-node 8"), std::string::npos) << command;
  EXPECT_NE(command.find("--deepspeed_config ds_config.json"), std::string::npos) << command;
  // It takes tensor-parallel ranks for data-parallel ones where it checks the product of the three.
  const nlohmann::json cut = nlohmann::json::parse(
      files_of("deepspeed",
               request_of("llama-2-7b", 16, 128, "deepspeed",
                          {{"tp", "2"}, {"pp", "1"}, {"cp", "1"}, {"zero", "1"}, {"micro-batch", "2"}}))
          .at("ds_config.json"));
  EXPECT_FALSE(cut.contains("train_batch_size"));
  EXPECT_EQ(cut["gradient_accumulation_steps"], 8);
  // It would take the stages of a pipeline for data-parallel ranks too.
  const Files staged =
      files_of("deepspeed", request_of("llama-2-7b", 16, 128, "deepspeed",
                                       {{"tp", "2"}, {"pp", "4"}, {"zero", "1"}, {"micro-batch", "2"}}));
  const nlohmann::json by_script = nlohmann::json::parse(staged.at("ds_config.json"));
  EXPECT_FALSE(by_script.contains("tensor_parallel"));
  EXPECT_EQ(by_script["train_batch_size"], 128);
  EXPECT_NE(staged.at("launch.sh").find("PipeModelDataParallelTopology(num_pp=4, num_mp=2, num_dp=2)"),
            std::string::npos)
      << staged.at("launch.sh");
}

// Of every program the best plans, not the first alone: what its file says that it runs is what it is started
// with.
TEST(LaunchFiles, WhatIsProposedCanBeStarted) {
  for (const auto& [software, program] : {std::pair{"current", "megatron-core"},
                                          {"current", "megatron-bridge"},
                                          {"torchtitan", "torchtitan"},
                                          {"nanotron", "nanotron"},
                                          {"deepspeed", "deepspeed"}})
    for (const int gpus : {8, 24, 64}) {
      SearchRequest r = request_of(std::string_view(program) == "nanotron" ? "llama-2-7b" : "llama-3-8b",
                                   gpus, 192, software, {});
      r.top = 40;
      const SearchResult found = search(r);
      EXPECT_GE(found.plans.size(), 10u) << program;
      for (const Estimate& e : found.plans)
        EXPECT_NO_THROW(launch_files(program, e, r.work)) << summary(e.plan);
    }
}

// A plan of one program is not one of another that has no key/value head on several ranks.
TEST(LaunchFiles, ProgramsHaveTheHeadsThatTheyCanCut) {
  const SearchRequest tensor = request_of(
      "llama-3-8b", 16, 64, "current",
      {{"tp", "16"}, {"pp", "1"}, {"cp", "1"}, {"zero", "1"}, {"recompute", "none"}, {"micro-batch", "1"}});
  const checks::MegatronArguments arguments(files_of("megatron-core", tensor).at("launch.sh"));
  EXPECT_TRUE(arguments.has("--num-query-groups"));
  for (const char* program : {"nanotron", "torchtitan", "deepspeed"})
    expect_refusal([&] { files_of(program, tensor); }, {std::string("--launch-for ") + program, "--tp 16"});
  const SearchRequest context =
      request_of("llama-3-8b", 16, 64, "deepspeed",
                 {{"tp", "1"}, {"pp", "1"}, {"cp", "16"}, {"zero", "3"}, {"micro-batch", "1"}});
  EXPECT_TRUE(files_of("deepspeed", context).contains("ds_config.json"));
  expect_refusal([&] { files_of("megatron-core", context); },
                 {"--launch-for megatron-core", "--cp 16", "8 key/value heads"});
}

TEST(LaunchFiles, OptimizersOnTheHost) {
  const Pins pins{{"tp", "1"}, {"pp", "1"}, {"cp", "1"}, {"micro-batch", "1"}, {"offload", "optimizer"}};
  const auto with = [&](const char* zero) {
    Pins all = pins;
    all.emplace_back("zero", zero);
    return all;
  };
  const Files megatron = files_of("megatron-core", request_of("llama-2-7b", 8, 64, "current", with("1")));
  const checks::MegatronArguments arguments(megatron.at("launch.sh"));
  for (const char* flag :
       {"--optimizer-cpu-offload", "--use-precision-aware-optimizer", "--use-distributed-optimizer"})
    EXPECT_TRUE(arguments.has(flag)) << flag;
  const Files bridge = files_of("megatron-bridge", request_of("llama-2-7b", 8, 64, "current", with("1")));
  EXPECT_NE(bridge.at("bridge.yaml").find("  optimizer_cpu_offload: true\n"), std::string::npos);
  const Files titan = files_of("torchtitan", request_of("llama-3-8b", 8, 64, "torchtitan", with("3")));
  EXPECT_NE(titan.at("torchtitan.toml").find("enable_cpu_offload = true\n"), std::string::npos);
  // Of one rank too.
  const Files deepspeed = files_of("deepspeed", request_of("llama-2-7b", 1, 8, "deepspeed", with("2")));
  const nlohmann::json zero = nlohmann::json::parse(deepspeed.at("ds_config.json"))["zero_optimization"];
  EXPECT_EQ(zero["stage"], 2);
  EXPECT_EQ(zero["offload_optimizer"]["device"], "cpu");
  expect_refusal([&] { files_of("nanotron", request_of("llama-2-7b", 8, 64, "deepspeed", with("1"))); },
                 {"--offload optimizer", "nanotron"});
}

TEST(LaunchFiles, ActivationsOnTheHost) {
  const auto with = [](const char* recompute, const char* pp) {
    return Pins{{"tp", "1"},
                {"pp", pp},
                {"cp", "1"},
                {"micro-batch", "1"},
                {"offload", "activations"},
                {"recompute", recompute},
                {"zero", "1"}};
  };
  const SearchRequest r = request_of("llama-2-7b", 8, 64, "current", with("none", "1"));
  const std::string layers = fmt::format("{}", r.work.plan.model.num_layers - 1);
  const checks::MegatronArguments arguments(files_of("megatron-core", r).at("launch.sh"));
  EXPECT_TRUE(arguments.has("--cpu-offloading-num-layers"));
  EXPECT_EQ(value_of(files_of("megatron-core", r).at("launch.sh"), "--cpu-offloading-num-layers"), layers);
  const std::string bridge = files_of("megatron-bridge", r).at("bridge.yaml");
  for (const std::string& line :
       {std::string("  cpu_offloading: true\n"), "  cpu_offloading_num_layers: " + layers + "\n",
        std::string("  cpu_offloading_weights: false\n")})
    EXPECT_NE(bridge.find(line), std::string::npos) << line;
  expect_refusal(
      [&] { files_of("megatron-core", request_of("llama-2-7b", 8, 64, "current", with("full", "1"))); },
      {"--offload activations", "legal: optimizer, none, or --recompute none"});
  expect_refusal(
      [&] { files_of("megatron-core", request_of("llama-2-7b", 8, 64, "current", with("none", "2"))); },
      {"--offload activations", "legal: optimizer, none, or --pp 1"});
  const SearchRequest checkpointed = request_of("llama-2-7b", 8, 64, "deepspeed", with("full", "1"));
  const Files deepspeed = files_of("deepspeed", checkpointed);
  EXPECT_EQ(
      nlohmann::json::parse(deepspeed.at("ds_config.json"))["activation_checkpointing"]["cpu_checkpointing"],
      true);
  EXPECT_NE(deepspeed.at("launch.sh").find("deepspeed.checkpointing.checkpoint"), std::string::npos);
  Pins titan = with("full", "1");
  titan.back().second = "3";
  expect_refusal([&] { files_of("torchtitan", request_of("llama-3-8b", 8, 64, "deepspeed", titan)); },
                 {"--offload activations", "torchtitan"});
  expect_refusal([&] { files_of("deepspeed", r); },
                 {"--offload activations", "legal: none, or --recompute full"});
}

// With what would be legal.
TEST(LaunchFiles, RefusesWhatAProgramDoesNotRun) {  // long
  struct Case {
    const char* program;
    const char* model;
    Pins pins;
    std::vector<std::string> said;
  };
  const std::vector<Case> cases{
      {"megatron-core",
       "llama-3-8b",
       {{"pp", "2"}, {"schedule", "zb-v"}},
       {"--schedule zb-v", "1f1b, interleaved"}},
      {"megatron-core", "llama-3-8b", {{"pp", "2"}, {"zero", "3"}}, {"--zero 3", "--pp 1"}},
      {"megatron-core",
       "llama-3-8b",
       {{"pp", "1"}, {"recompute", "linear"}},
       {"--recompute linear", "selective, full, mlp"}},
      {"megatron-core", "gemma-2-2b", {{"pp", "1"}}, {"--model gemma-2-2b", "windows"}},
      {"torchtitan", "llama-3-8b", {{"zero", "1"}}, {"--zero 1", "0, 2, 3"}},
      {"torchtitan", "llama-2-7b", {{"zero", "3"}}, {"--model llama-2-7b", "num_kv_heads", "llama-3-8b"}},
      {"torchtitan", "bamba-9b", {{"zero", "3"}}, {"--model bamba-9b", "llama-3-8b", "ssm_heads"}},
      {"nanotron", "bamba-9b", {}, {"--model bamba-9b", "state space"}},
      {"megatron-core", "bamba-9b", {{"pp", "1"}, {"tp", "1"}}, {"--model bamba-9b", "state space"}},
      {"deepspeed",
       "bamba-9b",
       {{"tp", "2"}, {"pp", "1"}, {"zero", "1"}, {"recompute", "full"}},
       {"--tp 2", "state spaces", "legal: 1"}},
      {"torchtitan",
       "llama-3-8b",
       {{"cp", "2"}, {"cp-kind", "ulysses"}, {"zero", "3"}},
       {"--cp-kind ulysses", "allgather"}},
      {"torchtitan",
       "llama-3-8b",
       {{"pp", "2"}, {"schedule", "dualpipe"}, {"zero", "2"}, {"recompute", "full"}},
       {"--schedule dualpipe"}},
      {"torchtitan",
       "llama-3-8b",
       {{"pp", "4"}, {"schedule", "v-half"}, {"zero", "2"}, {"recompute", "full"}},
       {"--schedule v-half", "zb-v", "zb-h1"}},
      {"torchtitan",
       "llama-3-8b",
       {{"pp", "4"}, {"schedule", "v-min"}, {"zero", "2"}, {"recompute", "full"}},
       {"--schedule v-min", "zb-v"}},
      {"torchtitan",
       "llama-3-8b",
       {{"pp", "8"},
        {"dp", "8"},
        {"micro-batch", "8"},
        {"schedule", "1f1b"},
        {"zero", "2"},
        {"recompute", "full"}},
       {"--schedule 1f1b", "4 microbatches over 8 stages", "gpipe"}},
      {"megatron-core",
       "llama-3-8b",
       {{"cp", "8"}, {"cp-kind", "ulysses"}, {"seq-len", "4104"}, {"pp", "1"}},
       {"--seq-len 4104", "--cp 8", "multiples of 16"}},
      {"nanotron", "llama-2-7b", {{"zero", "3"}, {"recompute", "none"}}, {"--zero 3", "0, 1"}},
      {"nanotron", "llama-2-7b", {{"cp", "2"}, {"zero", "1"}}, {"--cp 2"}},
      {"nanotron",
       "llama-2-7b",
       {{"recompute", "selective"}, {"zero", "1"}, {"cp", "1"}},
       {"--recompute selective", "none, full"}},
      {"nanotron", "mixtral-8x7b", {{"pp", "1"}, {"zero", "1"}}, {"--model mixtral-8x7b"}},
      {"deepspeed", "llama-2-7b", {{"pp", "2"}, {"schedule", "1f1b"}, {"zero", "2"}}, {"--zero 2", "0, 1"}},
      {"deepspeed",
       "llama-2-7b",
       {{"cp", "2"}, {"cp-kind", "ring"}, {"pp", "1"}},
       {"--cp-kind ring", "ulysses"}},
      {"deepspeed", "mixtral-8x7b", {{"pp", "1"}}, {"--model mixtral-8x7b"}},
      {"deepspeed", "llama-2-7b", {{"tp", "2"}, {"zero", "3"}, {"pp", "1"}}, {"--tp 2", "--zero 2"}},
      {"megatron",
       "llama-2-7b",
       {},
       {"--launch-for megatron", "megatron-core, megatron-bridge, torchtitan"}}};
  for (const Case& one : cases) {
    SCOPED_TRACE(one.program);
    SearchRequest r = request_of(one.model, 64, 256, "current", one.pins);
    const Estimate best = search(r).plans.at(0);
    try {
      launch_files(one.program, best, r.work);
      ADD_FAILURE() << one.program << " " << summary(best.plan);
    } catch (const std::exception& error) {
      for (const std::string& words : one.said)
        EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    }
  }
  SearchRequest lite = request_of("deepseek-v2-lite", 16, 64, "nanotron", {{"micro-batch", "1"}});
  lite.work.machine.memory_bytes = 1e13;
  expect_refusal([&] { files_of("nanotron", lite); }, {"deepseek-v2-lite: has latent attention"});
}

// It would train MLPs without one.
TEST(LaunchFiles, MegatronHasNoGateOfGelu) {
  SearchRequest r = request_of("llama-3-8b", 8, 64, "current", {{"zero", "1"}});
  r.work.plan.model.activation = Activation::geglu;
  expect_refusal([&] { files_of("megatron-core", r); },
                 {"--model llama-3-8b", "GELU with a gate", "not written"});
}

// Fused attention is of 16 and 8 bits.
TEST(LaunchFiles, RefusesF32WhereAttentionHasNone) {
  SearchRequest r = request_of("llama-3-8b", 8, 64, "current", {{"cp", "2"}, {"zero", "1"}});
  r.work.precision = Precision::f32;
  expect_refusal([&] { files_of("megatron-core", r); },
                 {"--precision f32", "--cp 2", "legal: bf16, fp8, or --cp 1"});
  SearchRequest small = request_of("llama-2-7b", 8, 64, "nanotron", {{"zero", "1"}, {"recompute", "none"}});
  small.work.precision = Precision::f32;
  expect_refusal([&] { files_of("nanotron", small); },
                 {"--launch-for nanotron", "--precision f32", "legal: bf16"});
}

// Layers of one part each are pretrain_hybrid.py's: a pattern says what they are, and where stages end.
TEST(LaunchFiles, MegatronsHybrids) {
  const auto planned = [](Pins more) {
    Pins pins{{"pp", "2"},   {"ep", "2"},          {"etp", "1"},
              {"zero", "1"}, {"micro-batch", "1"}, {"recompute", "none"}};
    pins.insert(pins.end(), more.begin(), more.end());
    return request_of("nemotron-h-tiny", 8, 32, "current", pins);
  };
  const SearchRequest r = planned({{"tp", "1"}, {"schedule", "interleaved"}, {"chunks", "2"}});
  const std::string command = files_of("megatron-core", r).at("launch.sh");
  EXPECT_NE(command.find("/pretrain_hybrid.py"), std::string::npos) << command;
  const checks::MegatronArguments given(command);
  EXPECT_EQ(given.chunks(), 2);
  for (const auto& [flag, value] : Pins{{"--num-layers", "10"},
                                        {"--position-embedding-type", "none"},
                                        {"--squared-relu", ""},
                                        {"--swiglu", "-"},
                                        {"--mamba-num-heads", "8"},
                                        {"--mamba-head-dim", "16"},
                                        {"--mamba-num-groups", "2"},
                                        {"--mamba-state-dim", "16"},
                                        {"--num-experts", "8"},
                                        {"--moe-latent-size", "32"},
                                        {"--moe-router-score-function", "sigmoid"},
                                        {"--moe-router-topk-scaling-factor", "2.5"},
                                        {"--moe-shared-expert-intermediate-size", "96"},
                                        {"--pipeline-model-parallel-layout", "-"},
                                        {"--spec", "megatron.core.models.hybrid.hybrid_layer_specs"}})
    EXPECT_EQ(value_of(command, flag), value) << flag;
  std::string pattern = value_of(command, "--hybrid-layer-pattern");
  std::erase(pattern, '"');
  EXPECT_EQ(std::count(pattern.begin(), pattern.end(), '|'), 3) << pattern;
  std::erase(pattern, '|');
  EXPECT_EQ(pattern, r.work.plan.model.layer_pattern);
  const std::string yaml = files_of("megatron-bridge", r).at("bridge.yaml");
  EXPECT_NE(yaml.find("  hybrid_layer_pattern: \""), std::string::npos) << yaml;
  EXPECT_EQ(yaml.find("virtual_pipeline"), std::string::npos) << yaml;
  // A group of heads is on one rank there.
  SearchRequest one_group = planned({{"tp", "2"}, {"schedule", "1f1b"}});
  one_group.work.plan.model.state_space.groups = 1;
  expect_refusal([&] { files_of("megatron-core", one_group); }, {"--tp 2", "1 group of state spaces"});
  SearchRequest other = planned({{"tp", "1"}, {"schedule", "1f1b"}});
  other.work.plan.model.norm_eps = 1e-6;
  expect_refusal([&] { files_of("megatron-core", other); }, {"nemotron-h-tiny", "epsilon"});
}

class LaunchFor : public checks::VerbTest {
 protected:
  LaunchFor() : VerbTest("plan") {}
};

TEST_F(LaunchFor, WritesItsFiles) {
  const std::string plan = "--model llama-3-8b --gpus 8 --global-batch 64 --seq-len 4096 --top 1 ";
  EXPECT_EQ(run(plan + "--launch-for megatron-core --launch-out out").status, 0);
  EXPECT_NE(read("out/launch.sh").find("pretrain_gpt.py"), std::string::npos);
  EXPECT_EQ(run(plan + "--software torchtitan --launch-for torchtitan --launch-out out").status, 0);
  EXPECT_NE(read("out/torchtitan.toml").find("[parallelism]"), std::string::npos);
  refused(plan + "--launch-for slurm --launch-out out", {"--launch-for slurm", "torchtitan"});
  refused(plan + "--launch-for torchtitan --launch-out out --zero 1",
          {"--launch-for torchtitan", "--zero 1"});
  for (const char* program : {"deepspeed", "nanotron", "megatron-core", "torchtitan"})
    refused(
        plan + "--software echelon --optimizer muon --tp 1 --pp 1 --launch-out out --launch-for " + program,
        {"--optimizer muon", "legal: adamw"});
  refused(plan + "--launch-for torchtitan", {"--launch-for", "without --launch-out"});
  refused(plan + "--launch-out out", {"--launch-out", "without --launch-for"});
}

struct Question {
  std::string text;
  int gpus;
};
// Those of docs/planning.md, and the seed's own mesh of the second.
const std::vector<Question>& textbook_questions() {
  static const std::vector<Question> all{
      {"--model llama-3-70b --machine h100 --gpus 64 --global-batch 512 --seq-len 8192", 64},
      {"--model llama-3-70b --machine a100-80 --gpus 80 --dp 80 --precision f32 --global-batch 80 "
       "--micro-batch 1 --seq-len 4096 --recompute full --zero 3 --hsdp 1",
       80},
      {"--model llama-3-70b --machine a100-80 --gpus 512 --global-batch 1024 --seq-len 4096", 512},
      {"--model llama-3-70b --machine a100-80 --gpus 512 --global-batch 1024 --seq-len 4096 --tp 8 --pp 4",
       512},
      {"--model llama-3-405b --machine h100 --gpus 16384 --global-batch 2048 --seq-len 8192", 16384}};
  return all;
}

// The answers of docs/planning.md to the textbook questions are plans that Megatron-Core is started with: all
// that the command says is what the plan has, and what its arguments take.
TEST_F(LaunchFor, StartsTheTextbookAnswers) {  // long
  for (const Question& question : textbook_questions()) {
    SCOPED_TRACE(question.text);
    const checks::CommandResult planned =
        run(question.text + " --top 1 --json --launch-for megatron-core --launch-out out");
    ASSERT_EQ(planned.status, 0);
    const auto plan = nlohmann::json::parse(planned.output).at("plans").at(0);
    const checks::MegatronArguments given(read("out/launch.sh"));
    EXPECT_EQ(given.world(), question.gpus);
    EXPECT_EQ(given.number("--tensor-model-parallel-size"), plan.at("tp"));
    EXPECT_EQ(given.number("--pipeline-model-parallel-size"), plan.at("pp"));
    EXPECT_EQ(given.number("--context-parallel-size"), plan.at("cp"));
    EXPECT_EQ(given.data_parallel(), plan.at("dp"));
    EXPECT_EQ(given.microbatches(), plan.at("microbatches"));
    EXPECT_EQ(given.chunks() * plan.at("pp").get<std::size_t>(), plan.at("layers_per_stage").size());
    EXPECT_EQ(given.has("--use-megatron-fsdp"), plan.at("zero") == 3);
  }
}

// Megatron-Bridge takes the same by other names, and torchtitan has its own.
TEST_F(LaunchFor, StartsTheTextbookAnswersElsewhere) {  // long
  const Question& question = textbook_questions().front();
  ASSERT_EQ(run(question.text + " --top 1 --launch-for megatron-bridge --launch-out out").status, 0);
  EXPECT_NE(read("out/bridge.yaml").find("  context_parallel_size: "), std::string::npos);
  const checks::CommandResult planned =
      run(question.text + " --software torchtitan --top 1 --json --launch-for torchtitan --launch-out out");
  ASSERT_EQ(planned.status, 0);
  const auto plan = nlohmann::json::parse(planned.output).at("plans").at(0);
  const toml::table job = toml::parse(read("out/torchtitan.toml"));
  std::int64_t ranks = 1;
  for (const char* degree : {"data_parallel_replicate_degree", "data_parallel_shard_degree",
                             "tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree"})
    ranks *= job["parallelism"][degree].value<std::int64_t>().value_or(0);
  EXPECT_EQ(ranks, question.gpus);
  const auto local = job["training"]["local_batch_size"].value<std::int64_t>().value_or(0);
  EXPECT_EQ(job["training"]["global_batch_size"].value<std::int64_t>(), 512);
  EXPECT_EQ(512 % (local * plan.at("dp").get<std::int64_t>()), 0);
}

// Each of these is refused by the program itself.
TEST(LaunchFiles, ArgumentsThatMegatronRefuses) {
  const std::string good = files_of("megatron-core", request_of("llama-3-8b", 64, 128, "current",
                                                                {{"tp", "2"},
                                                                 {"pp", "4"},
                                                                 {"schedule", "interleaved"},
                                                                 {"chunks", "2"},
                                                                 {"zero", "1"},
                                                                 {"micro-batch", "1"},
                                                                 {"recompute", "full"}}))
                               .at("launch.sh");
  EXPECT_NO_THROW(checks::MegatronArguments{good});
  for (const auto& [from, to] : std::vector<std::pair<std::string, std::string>>{
           {"--bf16", "--bfloat16"},
           {"--tensor-model-parallel-size 2", "--tensor-model-parallel-size 3"},
           {"--global-batch-size 128", "--global-batch-size 130"},
           {"--global-batch-size 128", "--global-batch-size 48"},
           {"--recompute-method uniform", ""},
           {"--recompute-granularity full", "--recompute-granularity some"},
           {"--num-layers 32", "--num-layers 31"},
           {"--nnodes 8", "--nnodes 7"},
          {"--make-vocab-size-divisible-by 16", "--make-vocab-size-divisible-by 1"},
           {"--use-distributed-optimizer", ""},
           {"--ffn-hidden-size 14336", "--ffn-hidden-size 1.4e4"},
           {"--lr 3e-4", "--lr"},
           {"export CUDA_DEVICE_MAX_CONNECTIONS=1", ""}}) {
    std::string bad = good;
    const auto at = bad.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    EXPECT_THROW(checks::MegatronArguments{bad.replace(at, from.size(), to)}, std::runtime_error) << to;
  }
}

}  // namespace
}  // namespace echelon::launch_files_test
