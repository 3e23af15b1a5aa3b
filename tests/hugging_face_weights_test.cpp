// What transformers' files may hold otherwise than the fixtures: prefixes of names, experts in one tensor,
// quantized weights, weights less 1.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/atomic_file.h"
#include "base/open_file.h"
#include "base/philox.h"
#include "checkpoint/checkpoint_compare.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/hugging_face.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/starting_weights.h"
#include "refusals.h"
#include "temporary_directory.h"
#include "transformers_tensors.h"

namespace echelon::hugging_face_weights_test {
namespace {

using namespace checks;
namespace fs = std::filesystem;
using nlohmann::json;

const fs::path fixtures = fs::path(ECHELON_SOURCE_DIR) / "tests/fixtures/hugging_face";

// Two constants of the formula that an Apertus's files have beside the weights.
TEST(HuggingFaceWeights, AnotherXieluIsRefused) {
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

TEST(HuggingFaceWeights, OfAModelThatSeesImagesTheTextModelIsRead) {
  check_text_model("gemma3", "gemma3");
  check_text_model("mistral3", "mistral-uneven");
  check_text_model("mistral3", "ministral3");
  check_text_model("mistral3", "mistral4");
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
TEST(HuggingFaceWeights, ExpertsInTwoTensorsAreThoseOneByOne) {
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

// As transformers holds a model: "model.", and the experts of a layer as one tensor.
TEST(HuggingFaceWeights, OfANemotronHHasTensorsAsTransformersHoldsThem) {
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

// As transformers takes it, where an index of an older model is left beside it.
TEST(HuggingFaceWeights, OfTwoSetsOfWeightsTheOneFileIsTaken) {
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

TEST(HuggingFaceWeights, QuantizedWeightsAreRefusedByName) {
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

// The weights of its norms are small numbers there, and here 1 more.
TEST(HuggingFaceWeights, NormsLessOneAreNotImportedInBf16) {
  const TemporaryDirectory directory;
  for (const char* name : {"gemma", "nemotron"})
    expect_refusal([&] { import_hugging_face((fixtures / name).string(), directory / "ck", DType::bf16, 1); },
                   {"--dtype bf16", name, "norms less 1", "f32 or f64"});
  EXPECT_FALSE(fs::exists(directory / "ck"));
}

// Their sums with 1 are what a checkpoint holds, rounded to f32 as transformers rounds them. What is exported
// is such a sum less 1, which is exact wherever a bit of it counts: so 1 more is the same sum again, to the
// bit, though the number itself may be another one.
TEST(HuggingFaceWeights, NormsLessOneAddUpToTheSameBitsWhenTheyAreExported) {
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

// As transformers' AutoModel saves it: an embedding model, say, whose files have no output layer.
TEST(HuggingFaceWeights, AModelIsReadWithoutThePrefixOfItsClass) {
  for (const auto& [fixture, prefix] : std::vector<std::pair<const char*, std::string>>{
           {"llama-tied", "model."}, {"opt", "model."}, {"mamba2", "backbone."}, {"gpt-neox", "gpt_neox."}}) {
    SCOPED_TRACE(fixture);
    const TemporaryDirectory directory;
    fs::copy(fixtures / fixture / "config.json", directory / "config.json");
    const SafetensorsFile original((fixtures / fixture / "model.safetensors").string());
    const auto renamed = [&](const std::string& tensor) {
      return tensor.starts_with(prefix) ? tensor.substr(prefix.size()) : tensor;
    };
    std::vector<StoredTensor> tensors = original.tensors();
    for (StoredTensor& tensor : tensors) tensor.name = renamed(tensor.name);
    EXPECT_TRUE(std::ranges::any_of(
        original.tensors(), [&](const StoredTensor& tensor) { return renamed(tensor.name) != tensor.name; }));
    SafetensorsWriter writer(directory / "model.safetensors", tensors);
    for (const StoredTensor& tensor : original.tensors()) {
      const std::vector<std::byte> bytes = original.bytes(tensor);
      writer.write(renamed(tensor.name), bytes.data(), bytes.size());
    }
    writer.finish();
    CheckpointReader one(import_hugging_face(directory / ".", directory / "read", DType::f32, 1).checkpoint),
        other(import_hugging_face((fixtures / fixture).string(), directory / "whole", DType::f32, 1)
                  .checkpoint);
    for (const ParamSpec& spec : all_parameters(load_model(directory / ".")))
      EXPECT_EQ(one.read(spec.name, spec, DType::f32), other.read(spec.name, spec, DType::f32)) << spec.name;
  }
}

// Under the output's name alone, or under both, if they are the same.
TEST(HuggingFaceWeights, ATiedModelsMatrixMayHaveTheNameOfTheOutputs) {
  const std::string output = "lm_head.weight";
  for (const auto& [fixture, table] : {std::pair{"llama-tied", "model.embed_tokens.weight"},
                                       {"gpt2", "transformer.wte.weight"},
                                       {"falcon", "transformer.word_embeddings.weight"},
                                       {"opt", "model.decoder.embed_tokens.weight"}})
    for (const auto& [both, same] : {std::pair{false, true}, {true, true}, {true, false}}) {
      SCOPED_TRACE(fixture);
      const TemporaryDirectory directory;
      fs::copy(fixtures / fixture / "config.json", directory / "config.json");
      const SafetensorsFile original((fixtures / fixture / "model.safetensors").string());
      std::vector<StoredTensor> tensors;
      for (StoredTensor tensor : original.tensors()) {
        if (tensor.name == table) {
          if (both) tensors.push_back(tensor);
          tensor.name = output;
        }
        tensors.push_back(tensor);
      }
      EXPECT_EQ(std::ssize(tensors), std::ssize(original.tensors()) + both);
      SafetensorsWriter writer(directory / "model.safetensors", tensors);
      for (const StoredTensor& tensor : tensors) {
        std::vector<std::byte> bytes =
            original.bytes(original.at(tensor.name == output ? table : tensor.name));
        if (!same && tensor.name == output) bytes.front() ^= std::byte{1};
        writer.write(tensor.name, bytes.data(), bytes.size());
      }
      writer.finish();
      if (!same) {
        expect_refusal([&] { import_hugging_face(directory / ".", directory / "no", DType::f32, 1); },
                       {"tie_word_embeddings", output, "legal: false"});
        continue;
      }
      CheckpointReader one(
          import_hugging_face(directory / ".", directory / "read", DType::f32, 1).checkpoint),
          other(import_hugging_face((fixtures / fixture).string(), directory / "whole", DType::f32, 1)
                    .checkpoint);
      for (const ParamSpec& spec : all_parameters(load_model(directory / ".")))
        EXPECT_EQ(one.read(spec.name, spec, DType::f32), other.read(spec.name, spec, DType::f32))
            << spec.name;
    }
}

// Such a checkpoint could be trained, but nothing could be generated from it.
TEST(HuggingFaceWeights, WhatEndsATextHasToBeReadable) {
  const TemporaryDirectory directory;
  const std::string in = directory / "in", out = directory / "out";
  fs::copy(fixtures / "llama", in);
  for (const char* text : {R"({"eos_token_id": 2)", R"({"eos_token_id": "two"})"}) {
    write_text(in + "/generation_config.json", text);
    expect_refusal([&] { import_hugging_face(in, out, DType::f32, 1); }, {"generation_config.json"});
    EXPECT_FALSE(fs::exists(out));
  }
}

}  // namespace
}  // namespace echelon::hugging_face_weights_test
