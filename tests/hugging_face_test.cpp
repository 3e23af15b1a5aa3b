// Parity with an independent implementation: tiny random models that transformers made, with their logits,
// loss and gradients (fixtures/hugging_face/make_fixtures.py says how, versions.txt with what).
#include "checkpoint/hugging_face.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "base/atomic_file.h"
#include "base/open_file.h"
#include "base/philox.h"
#include "case_choice.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_compare.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/finite.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/starting_weights.h"
#include "mesh_runs.h"
#include "refusals.h"
#include "run_command.h"
#include "transformers_tensors.h"

namespace echelon::hugging_face_test {
namespace {

using namespace checks;
namespace fs = std::filesystem;
using nlohmann::json;

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
    return of == "exaone" || of == "hy-v3" || of == "sarvam-moe" || of == "qwen3-5-moe";
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
        if (name.find("query_key_value") != std::string::npos && GetParam() != std::string_view("sarvam-moe"))
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
        if (info.model.learned_positions && name.ends_with("k_proj.bias")) {
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
                  {"stranger"});
  expect_contains(refusal([](auto& tensors) { tensors[1].type = StoredType::i32; }), {"I32", "BF16"});
}

// Two constants of the formula that an Apertus's files have beside the weights.
TEST(HuggingFaceConfig, AnotherXieluIsRefused) {
  const TemporaryDirectory directory;
  fs::copy(fixtures / "apertus/config.json", fs::path(directory / "config.json"));
  const SafetensorsFile original((fixtures / "apertus/model.safetensors").string());
  SafetensorsWriter writer(directory / "model.safetensors", original.tensors());
  for (const StoredTensor& tensor : original.tensors()) {
    std::vector<std::byte> bytes = original.bytes(tensor);
    const float other = 0.25;
    if (tensor.name == "model.layers.1.mlp.act_fn.beta") std::memcpy(bytes.data(), &other, sizeof other);
    writer.write(tensor.name, bytes.data(), bytes.size());
  }
  writer.finish();
  expect_refusal([&] { import_hugging_face(directory / ".", directory / "no", DType::f32, 1); },
                 {"model.layers.1.mlp.act_fn.beta = 0.25", "only 0.5 is"});
}

// As a Gemma 3, a Mistral or a Qwen that sees images is saved: its text model is one among others. What names
// of tensors begin with, in place of `plain`.
void check_text_model(const char* type, const char* fixture, const std::string& begin = "language_model.",
                      const std::string& plain = "", const std::string& images = "vision_tower.") {
  const fs::path text = fixtures / fixture;
  const TemporaryDirectory directory;
  const auto save = [&](const char* name, const std::string& other) {
    const fs::path home = fs::path(directory / name);
    fs::create_directory(home);
    const json config{{"model_type", type},
                      {"text_config", json::parse(read_text((text / "config.json").string()))},
                      {"vision_config", {{"hidden_size", 16}}}};
    write_file_atomically((home / "config.json").string(), config.dump());
    const SafetensorsFile original((text / "model.safetensors").string());
    std::vector<StoredTensor> tensors = original.tensors();
    const auto renamed = [&](const std::string& tensor) {
      return tensor.starts_with(plain) ? begin + tensor.substr(plain.size()) : tensor;
    };
    for (StoredTensor& tensor : tensors) tensor.name = renamed(tensor.name);
    tensors.push_back({other, StoredType::f32, {1}});
    SafetensorsWriter writer((home / "model.safetensors").string(), tensors);
    for (const StoredTensor& tensor : original.tensors()) {
      const std::vector<std::byte> bytes = original.bytes(tensor);
      writer.write(renamed(tensor.name), bytes.data(), bytes.size());
    }
    const float one = 1;
    writer.write(other, &one, sizeof one);
    writer.finish();
    return home.string();
  };
  const std::string sees = save("sees", images + "embeddings.patch_embedding.bias");
  ModelSpec model = load_model(sees), alone = load_model(text.string());
  alone.name = model.name;
  EXPECT_EQ(to_toml(model), to_toml(alone));
  const ImportedModel read = import_hugging_face(sees, directory / "read", DType::f32, 1),
                      text_alone = import_hugging_face(text.string(), directory / "plain", DType::f32, 1);
  EXPECT_EQ(read.num_for_images, 1);
  EXPECT_EQ(text_alone.num_for_images, 0);
  CheckpointReader one(read.checkpoint), other(text_alone.checkpoint);
  for (const ParamSpec& spec : all_parameters(model))
    EXPECT_EQ(one.read(spec.name, spec, DType::f32), other.read(spec.name, spec, DType::f32)) << spec.name;
  expect_refusal(
      [&] { import_hugging_face(save("stranger", "audio_tower.bias"), directory / "no", DType::f32, 1); },
      {"audio_tower.bias"});
}

TEST(HuggingFaceConfig, OfAModelThatSeesImagesTheTextModelIsRead) {
  check_text_model("gemma3", "gemma3");
  check_text_model("mistral3", "mistral-uneven");
  check_text_model("mistral3", "ministral3");
  check_text_model("qwen3_vl", "qwen3", "model.language_model.", "model.", "model.visual.");
  check_text_model("qwen2_5_vl", "qwen2-window", "", "", "visual.");
  // Its text's configuration may stand beside that of images, with positions in three directions.
  json flat = json::parse(read_text((fixtures / "qwen2-window/config.json").string()));
  const ModelSpec text = model_from_hugging_face(flat.dump(), "x/config.json");
  flat["model_type"] = "qwen2_vl";
  flat["vision_config"] = {{"hidden_size", 16}};
  flat["rope_scaling"] = {{"type", "mrope"}, {"mrope_section", {1, 1, 1}}};
  flat["rope_theta"] = text.rope.theta;
  flat.erase("rope_parameters");
  EXPECT_EQ(to_toml(model_from_hugging_face(flat.dump(), "x/config.json")), to_toml(text));
  check_text_model("qwen3_5", "qwen3-5", "model.language_model.", "model.", "model.visual.");
  check_text_model("qwen3_5_moe", "qwen3-5-moe", "model.language_model.", "model.", "model.visual.");
  // A Qwen3-VL has no window, whatever it says.
  json whole = {{"model_type", "qwen3_vl"},
                {"text_config", json::parse(read_text((fixtures / "qwen3/config.json").string()))}};
  const ModelSpec full = model_from_hugging_face(whole.dump(), "x/config.json");
  whole["text_config"].update(
      {{"use_sliding_window", true}, {"sliding_window", 5}, {"max_window_layers", 0}});
  EXPECT_EQ(to_toml(model_from_hugging_face(whole.dump(), "x/config.json")), to_toml(full));
  // Whether the output matrix is the embedding's, the whole says.
  for (const auto& [type, fixture] : {std::pair{"qwen3_vl", "qwen3"}, {"gemma3", "gemma3"}})
    for (const bool tied : {true, false}) {
      json text_config = json::parse(read_text((fixtures / fixture / "config.json").string()));
      text_config["tie_word_embeddings"] = !tied;
      const json of = {{"model_type", type}, {"text_config", text_config}, {"tie_word_embeddings", tied}};
      EXPECT_EQ(model_from_hugging_face(of.dump(), "x/config.json").tied_embedding, tied) << type;
    }
  // Where it says nothing of a Gemma 3 it is, whatever the text says; of a Qwen2-VL where either says so.
  json tie = {{"model_type", "gemma3"},
              {"text_config", json::parse(read_text((fixtures / "gemma3/config.json").string()))}};
  tie["text_config"]["tie_word_embeddings"] = false;
  EXPECT_TRUE(model_from_hugging_face(tie.dump(), "x/config.json").tied_embedding);
  tie = {{"model_type", "qwen2_vl"},
         {"text_config", json::parse(read_text((fixtures / "qwen2-window/config.json").string()))},
         {"tie_word_embeddings", false}};
  EXPECT_FALSE(model_from_hugging_face(tie.dump(), "x/config.json").tied_embedding);
  tie["text_config"]["tie_word_embeddings"] = true;
  EXPECT_TRUE(model_from_hugging_face(tie.dump(), "x/config.json").tied_embedding);
  // What a published configuration leaves out is as in every other Gemma 3.
  const ModelSpec few = model_from_hugging_face(
      R"({"model_type": "gemma3", "text_config": {"hidden_size": 2560, "intermediate_size": 10240,
          "model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024,
          "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}})",
      "x/config.json");
  EXPECT_EQ(few.num_kv_heads, 4);
  EXPECT_EQ(few.head_dim, 256);
  EXPECT_EQ(few.window, (WindowSpec{1024, 6}));
}

// As Qwen3.5's mixtures are published, and as transformers holds all of them: gates and what they open of a
// layer's experts are one tensor, and what is behind them another one.
TEST(HuggingFaceConfig, ExpertsInTwoTensorsAreThoseOneByOne) {
  // A Qwen3-VL's are turned over, (in, out), gate and up side by side, or as transformers writes them.
  struct Form {
    const char* fixture;
    bool turned, of_images;
  };
  for (const auto& [fixture, turned, of_images] : {Form{"qwen3-5-moe", false, false},
                                                   {"qwen3-moe", false, false},
                                                   {"qwen3-moe", true, true},
                                                   {"qwen3-moe", false, true}}) {
    const TemporaryDirectory directory;
    const SafetensorsFile original((fixtures / fixture / "model.safetensors").string());
    std::vector<StoredTensor> tensors;
    std::map<std::string, std::vector<std::byte>> bytes;
    for (const StoredTensor& tensor : original.tensors()) bytes[tensor.name] = original.bytes(tensor);
    for (const StoredTensor& tensor : original.tensors()) {
      const std::string before = ".experts.";
      const auto at = tensor.name.find(before);
      if (at == std::string::npos) {
        tensors.push_back(tensor);
        continue;
      }
      if (!tensor.name.ends_with(".experts.0.down_proj.weight")) continue;
      const std::string home = tensor.name.substr(0, at + before.size());
      StoredTensor down{home + "down_proj", tensor.type, {0, tensor.shape[0], tensor.shape[1]}},
          gate_up{home + "gate_up_proj", tensor.type, {0, 2 * tensor.shape[1], tensor.shape[0]}};
      for (;; ++down.shape[0], ++gate_up.shape[0]) {
        const std::string expert = home + std::to_string(down.shape[0]) + ".";
        if (!bytes.contains(expert + "up_proj.weight")) break;
        const auto append = [&](const StoredTensor& whole, const char* part) {
          const auto& piece = bytes[expert + part];
          bytes[whole.name].insert(bytes[whole.name].end(), piece.begin(), piece.end());
        };
        append(down, "down_proj.weight");
        append(gate_up, "gate_proj.weight");
        append(gate_up, "up_proj.weight");
      }
      tensors.push_back(down);
      tensors.push_back(gate_up);
    }
    EXPECT_LT(tensors.size(), original.tensors().size());
    for (StoredTensor& tensor : tensors) {
      if (!turned || tensor.shape.size() != 3) continue;
      const auto element = static_cast<std::size_t>(tensor.bytes() / tensor.numel());
      const std::vector<std::byte> from = bytes[tensor.name];
      std::vector<std::byte>& to = bytes[tensor.name];
      const std::int64_t rows = tensor.shape[1], cols = tensor.shape[2];
      for (std::int64_t k = 0; k < tensor.numel(); ++k) {
        const std::int64_t expert = k / (rows * cols), row = k / cols % rows, col = k % cols;
        std::memcpy(to.data() + static_cast<std::size_t>((expert * cols + col) * rows + row) * element,
                    from.data() + static_cast<std::size_t>(k) * element, element);
      }
      std::swap(tensor.shape[1], tensor.shape[2]);
    }
    SafetensorsWriter writer(directory / "model.safetensors", tensors);
    for (const StoredTensor& tensor : tensors)
      writer.write(tensor.name, bytes[tensor.name].data(), bytes[tensor.name].size());
    writer.finish();
    json config = json::parse(read_text((fixtures / fixture / "config.json").string()));
    if (of_images) {
      config["model_type"] = "qwen3_vl_moe_text";
      config.erase("norm_topk_prob");
      config = {{"model_type", "qwen3_vl_moe"}, {"text_config", config}, {"vision_config", {{"depth", 1}}}};
    }
    write_file_atomically(directory / "config.json", config.dump());
    EXPECT_TRUE(
        diff_checkpoints(
            import_hugging_face(directory / ".", directory / "two", DType::f32, 1).checkpoint,
            import_hugging_face((fixtures / fixture).string(), directory / "each", DType::f32, 1).checkpoint)
            .empty())
        << fixture;
  }
}

// As transformers takes it, where an index of an older model is left beside it.
TEST(HuggingFaceConfig, OfTwoSetsOfWeightsTheOneFileIsTaken) {
  const TemporaryDirectory directory;
  for (const char* file : {"config.json", "model.safetensors"})
    fs::copy(fixtures / "llama" / file, directory / file);
  write_file_atomically(directory / "model.safetensors.index.json",
                        R"({"weight_map": {"model.norm.weight": "gone.safetensors"}})");
  import_hugging_face(directory / ".", directory / "read", DType::f32, 1);
  fs::remove(directory / "model.safetensors");
  expect_refusal([&] { import_hugging_face(directory / ".", directory / "no", DType::f32, 1); },
                 {"gone.safetensors"});
}

TEST(HuggingFaceConfig, QuantizedWeightsAreRefusedByName) {
  const std::string config = read_text((fixtures / "gpt-oss/config.json").string());
  json quantized = json::parse(config);
  quantized["quantization_config"] = {{"quant_method", "mxfp4"}};
  const TemporaryDirectory directory;
  const auto refused = [&](std::vector<std::string> parts) {
    write_file_atomically(directory / "config.json", quantized.dump());
    EXPECT_EQ(load_model(directory / ".").num_experts, 4);  // can be planned, and trained from new weights
    parts.push_back(directory / "");
    expect_refusal([&] { import_hugging_face(directory / ".", directory / "no", DType::f32, 1); }, parts);
  };
  refused({"config.json", "mxfp4", "Mxfp4Config(dequantize=True)"});
  quantized["quantization_config"] = {{"quant_method", "fp8"}, {"fmt", "e4m3"}};
  refused({"quantization_config = fp8", "BF16"});
  quantized["quantization_config"] = {{"bits", 4}};
  refused({"quantization_config = {\"bits\":4}", "BF16"});
  write_file_atomically(directory / "config.json", config);
  const auto no_weights = [&](const std::vector<std::string>& parts) {
    expect_refusal([&] { import_hugging_face(directory / ".", directory / "no", DType::f32, 1); }, parts);
  };
  no_weights({"neither model.safetensors nor"});
  write_file_atomically(directory / "pytorch_model.bin", "");
  no_weights({"pytorch_model.bin is not read", "save_pretrained"});
  fs::create_directory(directory / "adapters");
  write_file_atomically(directory / "adapters/adapter_config.json", "{}");
  expect_refusal([&] { import_hugging_face(directory / "adapters", directory / "no", DType::f32, 1); },
                 {"adapter_config.json", "without their model", "merge_and_unload()"});
  for (const char* file : {"config.json", "model.safetensors"})
    fs::copy_file(fixtures / "llama" / file, directory / (std::string("adapters/") + file));
  for (const auto& read : {std::function<void()>([&] {
                             import_hugging_face(directory / "adapters", directory / "no", DType::f32, 1);
                           }),
                           std::function<void()>([&] { StartingWeights(directory / "adapters"); })})
    expect_refusal(read, {"adapter_config.json", "beside their model", "or the model alone"});
  const SafetensorsFile original((fixtures / "gpt-oss/model.safetensors").string());
  std::vector<StoredTensor> tensors = original.tensors();
  const std::string name = "model.layers.0.mlp.experts.down_proj";
  for (StoredTensor& tensor : tensors)
    if (tensor.name == name) tensor = {name + "_blocks", StoredType::u8, {4, 24, 1, 16}};
  SafetensorsWriter writer(directory / "model.safetensors", tensors);
  for (const StoredTensor& tensor : tensors) {
    const std::vector<std::byte> zeros(static_cast<std::size_t>(tensor.bytes()));
    writer.write(tensor.name, zeros.data(), zeros.size());
  }
  writer.finish();
  expect_refusal([&] { import_hugging_face(directory / ".", directory / "no", DType::f32, 1); },
                 {name, "MXFP4", "not quantized"});
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
    testing::Values("gpt2", "llama", "llama-tied", "llama-biases", "mixtral", "llama3", "llama-linear",
                    "mistral", "qwen2-yarn", "qwen2-window", "qwen3", "qwen3-moe", "smollm3", "granite",
                    "olmo2", "olmo3", "olmoe", "arcee", "seed-oss", "phi3", "phi3-longrope", "gemma",
                    "gemma2", "gemma3", "gpt-neox", "gpt-neox-serial", "gpt-oss", "deepseek-v2",
                    "deepseek-v3", "llama-dynamic", "mistral-uneven", "qwen3-moe-dense", "deepseek-v3-mtp",
                    "starcoder2", "stablelm", "cohere", "cohere2", "glm", "glm4", "olmo", "nemotron",
                    "ernie4-5", "qwen2-moe", "glm4-moe", "ministral", "exaone4", "minimax-m2", "dots1",
                    "glm4-moe-lite", "bamba", "bamba-groups", "granite-hybrid", "granite-dense", "nemotron-h",
                    "nemotron-h-groups", "ministral3", "hunyuan", "ernie4-5-moe", "jais2", "youtu",
                    "solar-open", "internlm3", "granite-moe-hybrid", "granite-moe-shared", "granite-moe",
                    "hunyuan-moe", "exaone-moe", "qwen3-next", "qwen3-5", "lfm2", "lfm2-moe", "falcon-h1",
                    "falcon-h1-norm", "exaone", "hy-v3", "sarvam-moe", "qwen3-5-moe", "cwm", "vaultgemma",
                    "hyperclovax", "granite-swa", "mellum", "flex-olmo", "afmoe", "apertus", "nanochat",
                    "cohere2-moe", "cohere2-moe-shared", "gpt-neo", "opt", "gpt-bigcode", "mamba2",
                    "mamba2-groups", "phi", "gpt-j", "gpt-j-tied", "codegen", "falcon", "falcon-grouped",
                    "falcon-serial"),
    [](const auto& instance) {
      std::string name = instance.param;
      std::erase(name, '-');
      return name;
    });

// As transformers holds a model: "model.", and the experts of a layer as one tensor.
TEST(HuggingFaceConfig, OfANemotronHHasTensorsAsTransformersHoldsThem) {
  const TemporaryDirectory directory;
  const std::string from = (fixtures / "nemotron-h").string(), held = directory / "held";
  fs::create_directories(held);
  fs::copy(from + "/config.json", held + "/config.json");
  const SafetensorsFile original(from + "/model.safetensors");
  std::map<std::string, std::pair<StoredTensor, std::vector<std::byte>>> tensors;
  for (const StoredTensor& tensor : original.tensors()) {
    std::string name = tensor.name;
    if (name.starts_with("backbone.")) name = "model." + name.substr(9);
    auto [declared, is_new] = std::pair{tensor, true};
    declared.name = name;
    if (const auto at = name.find(".experts."); at != std::string::npos) {
      const auto number = at + 9, end = name.find('.', number);
      declared.name = name.substr(0, number) + name.substr(end + 1, name.rfind('.') - end - 1);
      declared.shape.insert(declared.shape.begin(), 8);
    }
    auto& [stored, bytes] = tensors[declared.name];
    stored = declared;
    const std::vector<std::byte> more =
        original.bytes(tensor);  // of the experts in their order: there are eight
    bytes.insert(bytes.end(), more.begin(), more.end());
  }
  std::vector<StoredTensor> declared;
  for (const auto& [name, tensor] : tensors) declared.push_back(tensor.first);
  declared.push_back({"mtp.layers.0.norm.weight", StoredType::f32, {24}});
  SafetensorsWriter writer(held + "/model.safetensors", declared, {{"format", "pt"}});
  for (const auto& [name, tensor] : tensors) writer.write(name, tensor.second.data(), tensor.second.size());
  const std::vector<float> module(24);
  writer.write("mtp.layers.0.norm.weight", module.data(), module.size() * sizeof module[0]);
  writer.finish();
  const auto exported = [&](const std::string& in, const char* name) {
    const std::string out = directory / name;
    export_hugging_face(
        import_hugging_face(in, directory / (std::string(name) + "-ck"), DType::f32, 1).checkpoint, out,
        1 << 30);
    return read_text(out + "/model.safetensors");
  };
  EXPECT_TRUE(exported(held, "of-held") == exported(from, "of-published"));
}

// The weights of its norms are small numbers there, and here 1 more.
TEST(HuggingFaceConfig, NormsLessOneAreNotImportedInBf16) {
  const TemporaryDirectory directory;
  for (const char* name : {"gemma", "nemotron"})
    expect_refusal([&] { import_hugging_face((fixtures / name).string(), directory / "ck", DType::bf16, 1); },
                   {"--dtype bf16", name, "norms less 1", "f32 or f64"});
  EXPECT_FALSE(fs::exists(directory / "ck"));
}

// Their sums with 1 are what a checkpoint holds, rounded to f32 as transformers rounds them. What is exported
// is such a sum less 1, which is exact wherever a bit of it counts: so 1 more is the same sum again, to the
// bit, though the number itself may be another one.
TEST(HuggingFaceConfig, NormsLessOneAddUpToTheSameBitsWhenTheyAreExported) {
  for (const char* name : {"gemma", "gemma2", "gemma3", "nemotron"}) {
    const TemporaryDirectory directory;
    const std::string copy = directory / "copy", out = directory / "out";
    fs::copy(fixtures / name, copy);
    const SafetensorsFile original((fixtures / name / "model.safetensors").string());
    std::uint64_t drawn = 0;
    {
      SafetensorsWriter writer(copy + "/model.safetensors", original.tensors(), {{"format", "pt"}});
      for (const StoredTensor& tensor : original.tensors()) {
        std::vector<std::byte> bytes = original.bytes(tensor);
        if (tensor.name.find("norm") != std::string::npos && tensor.name.ends_with("weight")) {
          std::vector<float> weights;
          for (std::int64_t i = 0; i < tensor.numel(); ++i, ++drawn) {
            const double x = Philox(3, Stream::test, 0).normal(drawn);
            constexpr std::array<double, 5> centers{0, 0, -1, -0.5, 3};
            constexpr std::array<int, 7> exponents{0, -3, -12, -24, -60, 20, 30};
            weights.push_back(static_cast<float>(centers[drawn % 5] + std::ldexp(x, exponents[drawn % 7])));
          }
          std::memcpy(bytes.data(), weights.data(), bytes.size());
        }
        writer.write(tensor.name, bytes.data(), bytes.size());
      }
      writer.finish();
    }
    export_hugging_face(import_hugging_face(copy, directory / "ck", DType::f32, 1).checkpoint, out,
                        std::int64_t{1} << 30);
    const SafetensorsFile given(copy + "/model.safetensors"), exported(out + "/model.safetensors");
    std::size_t changed = 0;
    for (const StoredTensor& tensor : given.tensors()) {
      const auto was = values_of(given, tensor.name), is = values_of(exported, tensor.name);
      ASSERT_EQ(was.size(), is.size());
      const bool adds_one = tensor.name.find("norm") != std::string::npos && tensor.name.ends_with("weight");
      for (std::size_t i = 0; i < was.size(); ++i) {
        const auto seen = [&](double x) {
          return std::bit_cast<std::uint32_t>(static_cast<float>(x) + (adds_one ? 1.0f : 0.0f));
        };
        EXPECT_EQ(seen(was[i]), seen(is[i])) << tensor.name << " " << was[i] << " " << is[i];
        changed += was[i] != is[i];
      }
    }
    EXPECT_GT(changed, 0u) << "no number was drawn that has more bits than its sum with 1";
  }
}

}  // namespace
}  // namespace echelon::hugging_face_test
