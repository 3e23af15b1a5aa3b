// What generate writes, and where it ends, of models whose next token depends on the last one alone.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "command_line.h"
#include "data/tokens.h"
#include "text/byte_characters.h"

namespace echelon::generate_command_test {
namespace {

namespace fs = std::filesystem;
using namespace echelon::checks;
using nlohmann::json;

class GenerateCommand : public CommandLine {
 protected:
  static constexpr int first_named = 256;  // below it ids are bytes

  // A tokenizer.json of bytes, and of named tokens behind them.
  void write_tokenizer(const std::string& directory, const Words& named, bool special = true) const {
    json vocab = json::object(), added = json::array();
    for (int byte = 0; byte < 256; ++byte)
      vocab[bytes_as_characters(std::string(1, static_cast<char>(byte)))] = byte;
    for (const std::string& name : named)
      added.push_back({{"id", first_named + added.size()},
                       {"content", name},
                       {"special", special},
                       {"normalized", false},
                       {"single_word", false},
                       {"lstrip", false},
                       {"rstrip", false}});
    const json level{
        {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", false}, {"use_regex", true}};
    write(directory + "/tokenizer.json",
          json{{"added_tokens", added},
               {"pre_tokenizer", level},
               {"decoder", level},
               {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", json::array()}}}}
              .dump());
  }

  // A Llama in Hugging Face's layout: each token's embedding is a dimension of its own, layers add nothing,
  // and the output matrix leads to the token behind, `a` where none is given.
  void write_chain(const std::string& directory, const std::map<int, int>& behind,
                   const json& more = json::object()) const {
    fs::create_directories(at(directory));
    constexpr std::int64_t vocab = 272, hidden = vocab;
    json config{{"model_type", "llama"},
                {"architectures", {"LlamaForCausalLM"}},
                {"vocab_size", vocab},
                {"hidden_size", hidden},
                {"intermediate_size", 8},
                {"num_hidden_layers", 1},
                {"num_attention_heads", 1},
                {"num_key_value_heads", 1},
                {"max_position_embeddings", 512},
                {"rms_norm_eps", 1e-6},
                {"rope_theta", 10000.0},
                {"hidden_act", "silu"},
                {"tie_word_embeddings", false}};
    config.update(more);
    write(directory + "/config.json", config.dump());
    json header = json::object();
    std::vector<float> values;
    const auto add = [&](const std::string& name, std::int64_t rows, std::int64_t cols, auto value) {
      const std::size_t begin = values.size() * sizeof(float);
      for (std::int64_t i = 0; i < std::max<std::int64_t>(rows, 1); ++i)
        for (std::int64_t j = 0; j < cols; ++j) values.push_back(value(i, j));
      header[name] = {{"dtype", "F32"},
                      {"shape", rows == 0 ? json{cols} : json{rows, cols}},
                      {"data_offsets", {begin, values.size() * sizeof(float)}}};
    };
    const auto zero = [](auto, auto) { return 0.0f; };
    const auto one = [](auto, auto) { return 1.0f; };
    add("model.embed_tokens.weight", vocab, hidden, [](auto i, auto j) { return i == j ? 1.0f : 0.0f; });
    const std::string layer = "model.layers.0.";
    for (const char* name : {"q_proj", "k_proj", "v_proj", "o_proj"})
      add(layer + "self_attn." + name + ".weight", hidden, hidden, zero);
    for (const char* name : {"gate_proj", "up_proj"}) add(layer + "mlp." + name + ".weight", 8, hidden, zero);
    add(layer + "mlp.down_proj.weight", hidden, 8, zero);
    for (const char* name : {"input_layernorm", "post_attention_layernorm"})
      add(layer + name + ".weight", 0, hidden, one);
    add("model.norm.weight", 0, hidden, one);
    add("lm_head.weight", vocab, hidden, [&](auto to, auto from) {
      const auto found = behind.find(static_cast<int>(from));
      return (found == behind.end() ? 'a' : found->second) == to ? 1.0f : 0.0f;
    });
    const std::string names = header.dump();
    std::string file(8, '\0');
    for (std::size_t i = 0; i < 8; ++i) file[i] = static_cast<char>(names.size() >> (8 * i) & 255);
    file += names;
    const std::size_t begin = file.size();
    file.resize(begin + values.size() * sizeof(float));
    std::memcpy(file.data() + begin, values.data(), values.size() * sizeof(float));
    write(directory + "/model.safetensors", file);
  }
  // As a checkpoint.
  void import(const std::string& directory, const std::string& out) const {
    fs::remove_all(at(out));
    const Result r = run({"checkpoint", "import", directory, "--out", out, "--dtype", ECHELON_TEST_DTYPE});
    ASSERT_EQ(r.status, 0) << r.err;
  }
  static Words generating(const std::string& checkpoint, const Words& more) {
    return joined({"generate", "--checkpoint", checkpoint, "--temperature", "0", "--threads", "1"}, more);
  }
  // Its "text".
  std::string text_of(const std::string& checkpoint, const Words& more) const {
    const Result r = run(joined(generating(checkpoint, {"--json"}), more));
    EXPECT_EQ(r.status, 0) << r.err;
    return json::parse(r.out, nullptr, false).value("text", "none");
  }
};

// What may be the beginning of a stop, and half a character, are both held back: they come in their order.
TEST_F(GenerateCommand, WhatIsHeldBackIsWrittenInItsOrder) {
  write_chain("hf", {{'a', 'b'}, {'b', 0xc3}});
  write_tokenizer("hf", {});
  import("hf", "ck");
  const Words two{"--prompt", "a", "--max-tokens", "2"};
  const Result all = run(generating("ck", two));
  EXPECT_EQ(all.out, "ab\ufffd\n") << all.err;
  EXPECT_EQ(run(generating("ck", joined(two, {"--stop", "bZZ"}))).out, all.out);
}

// As transformers: generation_config.json says it, or config.json where there is none, with a tokenizer or
// without; and what a checkpoint was made of goes on with it.
TEST_F(GenerateCommand, ATextEndsWhereTheModelsFilesSay) {  // long
  const Words three{"--prompt-tokens", "5", "--max-tokens", "3", "--json"};
  const auto tokens = [&](const std::string& checkpoint) {
    const Result r = run(generating(checkpoint, three));
    EXPECT_EQ(r.status, 0) << r.err;
    return json::parse(r.out, nullptr, false).value("tokens", json());
  };
  const std::map<int, int> chain{{5, 6}, {6, 7}, {7, 8}};
  const auto expect_end = [&](const std::string& directory, const json& expected) {
    SCOPED_TRACE(directory);
    import(directory, "ck");
    EXPECT_EQ(tokens("ck"), expected);
  };
  for (const bool has_tokenizer : {false, true}) {
    const std::string behind = has_tokenizer ? " with tokenizer" : "";
    const auto chain_with = [&](const std::string& name, const json& config, const json& generation) {
      write_chain(name + behind, chain, config);
      if (!generation.is_null()) write(name + behind + "/generation_config.json", generation.dump());
      if (has_tokenizer) write_tokenizer(name + behind, {});
      return name + behind;
    };
    expect_end(chain_with("nothing", json::object(), json()), {6, 7, 8});
    expect_end(chain_with("config", {{"eos_token_id", 8}}, json()), {6, 7});
    expect_end(chain_with("generation", {{"eos_token_id", 6}}, {{"eos_token_id", {99, 8}}}), {6, 7});
    expect_end(chain_with("no end of generation", {{"eos_token_id", 6}}, json::object()), {6, 7, 8});
    expect_end(chain_with("negative", {{"eos_token_id", -1}}, json()), {6, 7, 8});  // none to transformers
  }
  import("config", "ck");
  ASSERT_EQ(run({"checkpoint", "export", "ck", "--out", "out"}).status, 0);
  EXPECT_EQ(json::parse(read_bytes(at("out/config.json")))["eos_token_id"], 8);
  // Trained on, on ids that no tokenizer here made.
  write_token_file(at("ids.bin"), std::vector<std::int32_t>(60, 3), 2);
  ASSERT_EQ(run({"train",
                 "--from",
                 "config",
                 "--data",
                 "ids.bin",
                 "--steps",
                 "1",
                 "--lr",
                 "1e-9",
                 "--seq-len",
                 "8",
                 "--global-batch",
                 "1",
                 "--sample",
                 "0",
                 "--eval-samples",
                 "0",
                 "--threads",
                 "1",
                 "--checkpoint",
                 "trained",
                 "--precision",
                 ECHELON_TEST_DTYPE})
                .status,
            0);
  EXPECT_EQ(tokens("trained"), (json{6, 7}));
}

// What ends a turn is a special token in most models, which is no text; the conversation goes on behind it.
TEST_F(GenerateCommand, ASpecialTokenStops) {  // long
  write_chain("hf", {{'\n', 'b'}, {'b', 257}, {257, '\n'}});
  for (const bool special : {true, false}) {
    write_tokenizer("hf", {"<|im_start|>", "<|im_end|>"}, special);
    import("hf", "ck");
    EXPECT_EQ(text_of("ck", {"--prompt", "x\n", "--max-tokens", "5", "--stop", "<|im_end|>"}), "b")
        << special;
    write("turns", "Hello\nAnd you?\n");
    const Result talk = run(generating("ck", {"--chat", "--max-tokens", "5"}), "exec <turns");
    EXPECT_EQ(talk.out, "b\nb\n") << special << talk.err;
    // A stop of which a token is a part alone ends the text as before.
    EXPECT_EQ(text_of("ck", {"--prompt", "x\n", "--max-tokens", "5", "--stop", "b\nb"}),
              special ? "" : "b<|im_end|>\nb<|im_end|>")
        << special;
  }
}

// A document begins with the tokenizer's first token, and where there is none behind the end of another one.
// As if the checkpoint held such weights.
TEST_F(GenerateCommand, WeightsAreRoundedToTheTypeThatIsAskedFor) {  // long
  write("text", std::string(2000, 'a'));
  for (const Words& words :
       {Words{"train", "--data", "text", "--model", "llama-tiny", "--steps", "1", "--checkpoint", "wide",
              "--precision", ECHELON_TEST_DTYPE, "--threads", "1"},
        {"checkpoint", "export", "wide", "--out", "hf", "--dtype", "bf16"},
        {"checkpoint", "import", "hf", "--out", "narrow", "--dtype", "bf16"}}) {
    const Result r = run(words);
    ASSERT_EQ(r.status, 0) << r.err;
  }
  const Words some{"--prompt", "In the ", "--max-tokens", "12", "--json"};
  const auto tokens = [&](const std::string& checkpoint, const Words& more) {
    const Result r = run(generating(checkpoint, joined(some, more)));
    EXPECT_EQ(r.status, 0) << r.err;
    return json::parse(r.out, nullptr, false).value("tokens", json());
  };
  const json narrow = tokens("narrow", {});
  EXPECT_EQ(narrow.size(), 12u);
  EXPECT_EQ(tokens("wide", {"--dtype", "bf16"}), narrow);
  // In bf16 a mesh may choose other tokens than one rank, where two are nearly as likely.
  const Words mesh{"--tp", "2", "--pp", "2"};
  EXPECT_EQ(tokens("wide", joined(mesh, {"--dtype", "bf16"})), tokens("narrow", mesh));
  EXPECT_EQ(tokens("narrow", {"--dtype", "bf16"}), narrow);
  const Result r = run(generating("wide", joined(some, {"--dtype", "fp8"})));
  EXPECT_EQ(r.status, 2);
  EXPECT_NE(r.err.find("--dtype fp8: no such type; legal: f32, f64, bf16"), std::string::npos) << r.err;
}

// A number that f32 holds, and bf16 does not; and one that both hold, whose product is infinite.
TEST_F(GenerateCommand, WeightsThatTheTypeDoesNotHoldAreNamed) {  // long
  write_chain("hf", {});
  const auto imported_with = [&](float last_of_head) {
    std::string file = read_bytes(at("hf/model.safetensors"));
    std::memcpy(file.data() + file.size() - sizeof last_of_head, &last_of_head, sizeof last_of_head);
    write("hf/model.safetensors", file);
    import("hf", "ck");
  };
  const auto generated = [&](const std::string& prompt, const std::string& dtype) {
    return run(generating("ck", {"--prompt-tokens", prompt, "--max-tokens", "2", "--dtype", dtype}));
  };
  imported_with(3.4e38f);
  EXPECT_EQ(generated("5", ECHELON_TEST_DTYPE).status, 0);
  const Result large = generated("5", "bf16");
  EXPECT_EQ(large.status, 1) << large.out;
  EXPECT_NE(large.err.find("lm_head.weight in bf16: 1 of its 73984 values is NaN or infinite"),
            std::string::npos)
      << large.err;
  imported_with(3e38f);
  EXPECT_EQ(generated("5", "bf16").status, 0);
  const Result product = generated("271", "bf16");
  EXPECT_EQ(product.status, 1) << product.out;
  EXPECT_NE(product.err.find("NaN or infinite values in bf16\n"), std::string::npos) << product.err;
}

TEST_F(GenerateCommand, AnEmptyPromptIsTheBeginningOfADocument) {
  write_chain("hf", {{256, 'x'}, {257, 'y'}});
  write_tokenizer("hf", {"<s>", "</s>"});
  const auto first_of = [&](const json& config) {
    write("hf/tokenizer_config.json", config.dump());
    import("hf", "ck");
    return text_of("ck", {"--max-tokens", "1"});
  };
  EXPECT_EQ(first_of({{"bos_token", "<s>"}, {"eos_token", "</s>"}}), "x");
  EXPECT_EQ(first_of({{"eos_token", "</s>"}}), "y");
}

}  // namespace
}  // namespace echelon::generate_command_test
