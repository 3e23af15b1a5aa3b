// Parity with an independent implementation: tiny random models that transformers made, with their logits,
// loss and gradients (fixtures/hugging_face/make_fixtures.py says how, versions.txt with what).
#include "checkpoint/hugging_face.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "case_choice.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_compare.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/finite.h"
#include "checkpoint/safetensors.h"
#include "mesh_runs.h"
#include "refusals.h"
#include "run_command.h"
#include "transformers_tensors.h"

namespace echelon::hugging_face_test {
namespace {

using namespace checks;
namespace fs = std::filesystem;

const fs::path fixtures = fs::path(ECHELON_SOURCE_DIR) / "tests/fixtures/hugging_face";

constexpr std::int64_t batch = 2, length = 13;

class HuggingFace : public testing::TestWithParam<const char*> {
 protected:
  std::string model() const { return (fixtures / GetParam()).string(); }
  SafetensorsFile expected() const { return SafetensorsFile(model() + "/expected.safetensors"); }
  CheckpointInfo import(DType dtype) {
    return read_checkpoint_info(
        import_hugging_face(model(), directory_ / dtype_name(dtype), dtype, 1).checkpoint);
  }
  Plan plan(const CheckpointInfo& info, int dp, int tp, int pp) const {
    Plan p;
    p.model = info.model;
    p.precision = info.dtype;
    p.mesh.set(Axis::dp, dp);
    p.mesh.set(Axis::tp, tp);
    p.mesh.set(Axis::pp, pp);
    p.sequence_parallel = true;
    p.global_batch = batch;
    p.micro_batch = 1;
    p.seq_len = length - 1;
    if (pp > 1) p.global_batch = batch;
    return p;
  }
  // The fixture's tokens, those of step s plus s, and each one's successor as its target.
  SampleSource samples(std::int64_t vocab) const {
    return [tokens = values_of(expected(), "tokens"), vocab](std::int64_t step, std::int64_t sample,
                                                             std::int32_t* ids, std::int32_t* targets) {
      const auto token = [&](std::int64_t t) {
        const auto first = static_cast<std::int64_t>(tokens[static_cast<std::size_t>(sample * length + t)]);
        return static_cast<std::int32_t>((first + step) % vocab);
      };
      for (std::int64_t t = 0; t + 1 < length; ++t) ids[t] = token(t), targets[t] = token(t + 1);
    };
  }
  // Double precision: what is left are other orders of sums, of up to 61 products, a few layers deep. But
  // transformers normalises a Llama's rows, turns queries and keys, and makes a router's probabilities, in
  // f32 whatever the model's type: about four roundings a layer and at the end, and two more where heads are
  // normalised as well.
  static double error_of_transformers(const CheckpointInfo& info) {
    if (info.model.family == Family::gpt2) return 1e-13;
    return (info.model.qk_norm ? 6.0 : 4.0) * static_cast<double>(info.model.num_layers + 1) * 0x1p-24;
  }
  // Of types whose models are written as another one, by whose names.
  static bool is_named_otherwise() {
    const std::string_view of = GetParam();
    return of == "exaone" || of == "hy-v3" || of == "sarvam-moe" || of == "qwen3-5-moe" || of == "chatglm" ||
           of == "internlm2";
  }
  static void load_weights(const Rank& rank, const Trainer& trainer, const CheckpointInfo& info) {
    trainer.stages().set_router_biases(load_checkpoint(rank, trainer.parameters(), info, false));
  }
  // (B, T, V) as one rank computes them, token by token.
  static std::vector<double> logits_of(Plan one_rank, const CheckpointInfo& info,
                                       const std::vector<double>& tokens) {
    std::vector<double> all;
    one_rank.seq_len = length;  // by which rotary positions may be scaled
    on_mesh(one_rank, [&](const Rank& rank) {
      const PipelineLayout pipeline(one_rank);
      const ParameterStore parameters(rank, one_rank, pipeline, 9);
      const RouterBiases biases = load_checkpoint(rank, parameters, info, true);
      const HeldStages stages(rank, one_rank, pipeline, parameters, {});
      stages.set_router_biases(biases);
      for (std::int64_t b = 0; b < batch; ++b) {
        const auto caches = stages.make_caches(length);
        for (std::int64_t t = 0; t < length; ++t) {
          const Tensor id(rank.arena(), MemoryCategory::other, DType::i32, {1});
          *id.host<std::int32_t>() =
              static_cast<std::int32_t>(tokens[static_cast<std::size_t>(b * length + t)]);
          const auto row = as_doubles(stages.next_logits(id, t, caches));
          all.insert(all.end(), row.begin(), row.end());
        }
      }
    });
    return all;
  }

  const TemporaryDirectory directory_;
};

// They went through the import, and later through `checkpoint verify` and `generate`.
TEST_P(HuggingFace, WeightsThatAreNoNumbersAreNamedAndNothingIsWritten) {
  const std::string copy = directory_ / "copy", out = directory_ / "ck";
  fs::copy(model(), copy);
  std::string name;
  {
    const SafetensorsFile original(model() + "/model.safetensors");
    name = original.tensors().front().name;
    SafetensorsWriter writer(copy + "/model.safetensors", original.tensors(), {{"format", "pt"}});
    for (const StoredTensor& tensor : original.tensors()) {
      std::vector<std::byte> bytes = original.bytes(tensor);
      const double infinite = std::numeric_limits<double>::infinity();
      const auto poison = [&]<class T>(T value) {
        for (const std::size_t at : {std::size_t{5}, std::size_t{7}})
          std::memcpy(bytes.data() + at * sizeof value, &value, sizeof value);
      };
      // A copy of the output matrix has to be the same.
      const bool poisoned = tensor.name == name || tensor.name.ends_with(".shared_head.head.weight");
      if (poisoned && tensor.type == StoredType::f64) poison(infinite);
      if (poisoned && tensor.type == StoredType::f32) poison(static_cast<float>(infinite));
      writer.write(tensor.name, bytes.data(), bytes.size());
    }
    writer.finish();
  }
  bool found = false;
  const auto import_copy = [&] {
    try {
      import_hugging_face(copy, out, DType::f64, 1);
    } catch (const NotFinite&) {
      found = true;
      throw;
    }
  };
  expect_refusal(import_copy, {copy, name, "2 of its", "inf", "at index 5"});
  EXPECT_TRUE(found);
  EXPECT_FALSE(fs::exists(out));
  if (!takes_wide_cases() && std::string(GetParam()) != "llama") return;  // the program says it of any
  const CommandResult r =
      run_command(fmt::format("{} checkpoint import {} --out {} --dtype f64", ECHELON_BINARY, copy, out));
  EXPECT_EQ(r.status, 1) << r.output;
  EXPECT_NE(r.output.find(name), std::string::npos) << r.output;
}

TEST_P(HuggingFace, LogitsAreThoseOfTransformers) {  // long
  for (DType dtype : {DType::f64, DType::f32}) {
    if (dtype == DType::f32 && !has_cpu_kernels()) continue;
    const CheckpointInfo info = import(dtype);
    const auto logits = logits_of(plan(info, 1, 1, 1), info, values_of(expected(), "tokens"));
    const double bound = dtype == DType::f64 ? error_of_transformers(info) : 1e-5;
    EXPECT_LE(relative_difference(values_of(expected(), "logits"), logits), bound) << dtype_name(dtype);
  }
}

TEST_P(HuggingFace, LossAndGradientsAreThoseOfTransformersOnAnyMesh) {
  const CheckpointInfo info = import(DType::f64);
  const SafetensorsFile want = expected();
  for (auto [dp, tp, pp, cp] :
       {std::tuple{1, 1, 1, 1}, {2, 1, 1, 1}, {1, 2, 1, 1}, {1, 2, 2, 1}, {1, 1, 1, 2}}) {
    if (!is_taken(cp > 1 ? 16 : 4)) continue;
    Plan p = plan(info, dp, tp, pp);
    p.mesh.set(Axis::cp, cp);
    on_mesh(p, [&, ranks = p.mesh.num_ranks()](const Rank& rank) {
      Trainer trainer(rank, p, {}, 9);
      load_weights(rank, trainer, info);
      double loss = trainer.compute_gradients(0, samples(info.model.vocab));
      if (info.model.num_mtp_layers > 0) loss += info.model.mtp_weight * trainer.mtp_loss();
      const double bound = error_of_transformers(info);
      EXPECT_LE(std::abs(loss - values_of(want, "loss")[0]), bound * std::abs(loss));
      std::map<std::string, std::vector<double>> gradients;  // of a file's tensors
      for (const Parameter& parameter : trainer.parameters().all()) {
        const auto gradient =
            as_in_file(info.model, parameter.spec,
                       as_doubles(gather_logical(rank, parameter, ParameterTensor::gradient)));
        auto& whole = gradients[name_in_file(GetParam(), info.model, parameter.spec.name)];
        whole.insert(whole.end(), gradient.begin(), gradient.end());
      }
      for (auto& [name, gradient] : gradients) {
        const bool in_order =
            GetParam() == std::string_view("sarvam-moe") || GetParam() == std::string_view("chatglm");
        if (name.find("wqkv") != std::string::npos ||
            (name.find("query_key_value") != std::string::npos && !in_order))
          gradient = head_by_head(info.model, gradient);
        if (info.model.output_bias && name.find("qkv_proj") != std::string::npos)
          gradient = fourth_by_fourth(gradient);
        if (info.model.experts == Experts::gpt_oss && name.find(".experts.") != std::string::npos)
          gradient = of_all_experts(info.model, name, gradient);
        if (info.model.state_space.is_delta()) gradient = of_delta_rule(info.model, name, gradient);
        const auto theirs = values_of(want, "grad." + name);
        // Where nothing turns keys their bias is in all scores of a query alike, and changes none of its
        // weights.
        const auto is_nothing = [](double g) { return std::abs(g) < 1e-14; };
        if ((info.model.learned_positions || info.model.alibi) && name.ends_with("k_proj.bias")) {
          EXPECT_TRUE(std::ranges::all_of(gradient, is_nothing) && std::ranges::all_of(theirs, is_nothing));
          continue;
        }
        // The fixture has them rounded to f32.
        EXPECT_LE(relative_difference(theirs, gradient), bound + 0x1p-24)
            << name << " on " << ranks << " ranks";
      }
    });
  }
}

// As make_fixtures.py's train(): its optimizer, its batches. What transformers rounds to f32 on the way comes
// back through AdamW, where a gradient is divided by its own size: hence the bound is not that of one
// gradient, and eps is above the roundings of a gradient that is next to none.
TEST_P(HuggingFace, FourStepsOfAdamWAreThoseOfTransformersOnAnyMesh) {  // long
  const CheckpointInfo info = import(DType::f64);
  const SafetensorsFile want = expected();
  const auto losses = values_of(want, "train.losses"), norms = values_of(want, "train.norms");
  constexpr double bound = 1e-5;
  OptimizerOptions options;
  options.lr = options.min_lr = 0.01;
  options.warmup_steps = 0;
  options.weight_decay = 0.1;
  options.eps = 1e-6;
  options.clip = 1;
  for (auto [dp, tp, pp, ep, cp] : {std::tuple{1, 1, 1, 1, 1},
                                    {2, 1, 1, 1, 1},
                                    {1, 2, 1, 1, 1},
                                    {1, 2, 2, 1, 1},
                                    {2, 1, 1, 2, 1},
                                    {1, 1, 1, 1, 2}}) {
    if ((ep > 1 && info.model.experts == Experts::none) || !is_taken(cp > 1 ? 16 : 4)) continue;
    Plan p = plan(info, dp, tp, pp);
    p.mesh.ep = ep;
    p.mesh.set(Axis::cp, cp);
    SCOPED_TRACE(p.mesh.num_ranks());
    on_mesh(p, [&](const Rank& rank) {
      Trainer trainer(rank, p, options, 9);
      load_weights(rank, trainer, info);
      std::vector<StepResult> results;
      for (std::int64_t step = 0; step < 4; ++step)
        for (StepResult& result : trainer.step(step, samples(info.model.vocab), 4 - step))
          results.push_back(std::move(result));
      ASSERT_EQ(results.size(), losses.size());
      for (std::size_t step = 0; step < results.size(); ++step) {
        const double loss =
            results[step].loss +
            (info.model.num_mtp_layers > 0 ? info.model.mtp_weight * results[step].mtp_loss : 0);
        EXPECT_NEAR(loss, losses[step], bound * losses[step]) << "step " << step;
        EXPECT_NEAR(results[step].gradient_norm, norms[step], bound * norms[step]) << "step " << step;
      }
    });
  }
}

TEST_P(HuggingFace, WhatIsImportedIsExportedAsItWas) {
  const CheckpointInfo info = import(DType::f32);
  for (std::int64_t shard_bytes : {std::int64_t{20'000}, std::int64_t{1} << 30}) {
    if (!is_taken(3)) continue;
    const std::string out = directory_ / fmt::format("out{}", shard_bytes);
    export_hugging_face(info.path, out, shard_bytes);
    EXPECT_EQ(fs::exists(out + "/model.safetensors.index.json"), shard_bytes == 20'000);
    ModelSpec back = load_model(out);
    back.name = info.model.name;
    EXPECT_EQ(to_toml(back), to_toml(info.model));
    const std::string again =
        import_hugging_face(out, directory_ / fmt::format("again{}", shard_bytes), DType::f32, 1).checkpoint;
    EXPECT_TRUE(diff_checkpoints(info.path, again).empty());
    if (is_named_otherwise()) continue;
    const SafetensorsFile original(model() + "/model.safetensors");
    std::size_t found = 0;
    for (const auto& entry : fs::directory_iterator(out)) {
      if (entry.path().extension() != ".safetensors") continue;
      const SafetensorsFile file(entry.path());
      for (const StoredTensor& tensor : file.tensors()) {
        EXPECT_EQ(values_of(file, tensor.name), values_of(original, tensor.name)) << tensor.name;
        ++found;
      }
    }
    EXPECT_EQ(found, original.tensors().size());  // a tied matrix is written once
    expect_contains(message_of<RequestError>([&] { export_hugging_face(info.path, out, shard_bytes); }),
                    {"--out", "not empty"});
  }
}

TEST_P(HuggingFace, WhatIsNotTheModelIsRefusedByName) {
  const auto refusal = [&](const std::function<void(std::vector<StoredTensor>&)>& change) {
    const fs::path broken = directory_ / "broken";
    fs::remove_all(broken);
    fs::create_directory(broken);
    fs::copy(model() + "/config.json", broken);
    const SafetensorsFile original(model() + "/model.safetensors");
    std::vector<StoredTensor> tensors = original.tensors();
    change(tensors);
    SafetensorsWriter writer(broken / "model.safetensors", tensors);
    for (const StoredTensor& tensor : tensors) {
      std::vector<std::byte> bytes(static_cast<std::size_t>(tensor.bytes()));
      if (tensor.shape.empty()) bytes = original.bytes(original.at(tensor.name));  // a constant
      writer.write(tensor.name, bytes.data(), bytes.size());
    }
    writer.finish();
    return message_of<RequestError>([&] { import_hugging_face(broken, directory_ / "no", DType::f32, 1); });
  };
  std::string name;
  EXPECT_NE(refusal([&](auto& tensors) {
              name = tensors[3].name;
              tensors.erase(tensors.begin() + 3);
            }).find(name),
            std::string::npos);
  expect_contains(refusal([&](auto& tensors) {
                    name = tensors[2].name;
                    tensors[2].shape.back() += 1;
                  }),
                  {"shape", "where the model has"});
  expect_contains(refusal([](auto& tensors) {
                    tensors.push_back({"stranger", StoredType::f32, {2}});
                  }),
                  {"stranger is no tensor of its model"});
  expect_contains(refusal([](auto& tensors) { tensors[1].type = StoredType::i32; }), {"I32", "BF16"});
}

#ifdef ECHELON_PEER_PYTHON
TEST_P(HuggingFace, TransformersComputesTheSameFromAnExportedModel) {
  // Trained a little, so that it is not the fixture.
  const CheckpointInfo info = import(DType::f64);
  const Plan p = plan(info, 1, 2, 1);
  std::string path;
  on_mesh(p, [&](const Rank& rank) {
    OptimizerOptions options;
    options.lr = 1e-2;
    options.warmup_steps = 0;
    options.total_steps = 5;
    Trainer trainer(rank, p, options, 9);
    load_weights(rank, trainer, info);
    for (std::int64_t step = 0; step < 5; ++step) trainer.step(step, samples(info.model.vocab), 5 - step);
    CheckpointInfo trained = info;
    trained.step = 5;
    const std::string saved = save_checkpoint(rank, trainer.parameters(), directory_ / "trained", trained, {},
                                              trainer.stages().router_biases());
    if (rank.index() == 0) path = saved;
  });
  const auto tokens = values_of(expected(), "tokens");
  const auto logits = logits_of(plan(info, 1, 1, 1), read_checkpoint_info(path), tokens);
  export_hugging_face(path, directory_ / "exported", 30'000);
  SafetensorsWriter writer(directory_ / "logits.safetensors",
                           {{"tokens", StoredType::i32, {batch, length}},
                            {"logits", StoredType::f64, {batch, length, info.model.vocab}}});
  const std::vector<std::int32_t> ids(tokens.begin(), tokens.end());
  writer.write("tokens", ids.data(), ids.size() * sizeof ids[0]);
  writer.write("logits", logits.data(), logits.size() * sizeof logits[0]);
  writer.finish();
  const std::string command =
      fmt::format("{} {} {} {}", ECHELON_PEER_PYTHON, (fixtures / "check_export.py").string(),
                  std::string(directory_ / "exported"), std::string(directory_ / "logits.safetensors"));
  EXPECT_EQ(std::system(command.c_str()), 0);
}
#endif

INSTANTIATE_TEST_SUITE_P(
    Models, HuggingFace,
    testing::Values(
        "gpt2", "llama", "llama-tied", "llama-biases", "mixtral", "llama3", "llama-linear", "mistral",
        "qwen2-yarn", "qwen2-window", "qwen2-window-late", "qwen3", "qwen3-moe", "smollm3", "granite",
        "olmo2", "olmo3", "olmoe", "arcee", "seed-oss", "phi3", "phi3-longrope", "gemma", "gemma2", "gemma3",
        "gpt-neox", "gpt-neox-serial", "gpt-neox-yarn", "gpt-oss", "deepseek-v2", "deepseek-v3",
        "llama-dynamic", "mistral-uneven", "qwen3-moe-dense", "deepseek-v3-mtp", "starcoder2", "stablelm",
        "cohere", "cohere2", "glm", "glm4", "olmo", "nemotron", "ernie4-5", "qwen2-moe", "glm4-moe",
        "ministral", "exaone4", "minimax-m2", "dots1", "glm4-moe-lite", "bamba", "bamba-groups",
        "granite-hybrid", "granite-dense", "nemotron-h", "nemotron-h-groups", "ministral3", "mistral4",
        "mistral4-lite", "hunyuan", "ernie4-5-moe", "jais2", "youtu", "solar-open", "internlm3",
        "granite-moe-hybrid", "granite-moe-shared", "granite-moe", "hunyuan-moe", "exaone-moe", "qwen3-next",
        "qwen3-5", "lfm2", "lfm2-moe", "falcon-h1", "falcon-h1-norm", "exaone", "internlm2", "chatglm",
        "hy-v3", "sarvam-moe", "qwen3-5-moe", "cwm", "vaultgemma", "hyperclovax", "granite-swa", "mellum",
        "flex-olmo", "afmoe", "apertus", "nanochat", "cohere2-moe", "cohere2-moe-shared", "gpt-neo", "opt",
        "gpt-bigcode", "mamba2", "mamba2-groups", "phi", "gpt-j", "gpt-j-tied", "codegen", "falcon",
        "falcon-grouped", "falcon-serial", "bloom", "bloom-untied", "mpt", "mpt-scaled", "gpt2-gelu-erf",
        "gpt-neox-gelu", "gpt-bigcode-gelu-erf", "opt-gelu", "phi-relu", "llama-geglu"),
    [](const auto& instance) {
      std::string name = instance.param;
      std::erase(name, '-');
      return name;
    });

}  // namespace
}  // namespace echelon::hugging_face_test
