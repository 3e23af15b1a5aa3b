// Checkpoints, tokenizers and texts, as their users call them.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/directory_lock.h"
#include "command_line.h"
#include "data/tokenize.h"
#include "data/tokens.h"

namespace echelon::text_commands_test {
namespace {

namespace fs = std::filesystem;
using namespace echelon::checks;
using nlohmann::json;

class TextCommands : public CommandLine {};

TEST_F(TextCommands, BadDataIsRefused) {
  const auto refused_data = [&](const std::string& path, const Words& words) {
    refused({"train", "--data", path, "--seq-len", "32"}, words);
  };
  fs::create_directory(at("hollow"));
  write("empty.txt", "");
  write("short.txt", std::string(31, 'a'));
  write("wrong.bin", "not tokens at all");
  refused_data("absent", {"--data absent", "no such file"});
  refused_data("hollow", {"--data hollow", "no files"});
  refused_data("empty.txt", {"empty.txt", "empty"});
  refused_data("short.txt", {"32 tokens", "32 + 1"});
  refused_data("wrong.bin", {"wrong.bin", "not a token file"});
  refused_data("/dev/zero", {"/dev/zero", "regular"});
}

TEST_F(TextCommands, CheckpointsAreLookedAtComparedAndConverted) {  // long
  ASSERT_EQ(
      run(training({"--steps", "2", "--save-every", "1", "--checkpoint", "ck", "--dp", "2", "--tp", "3"}))
          .status,
      0);
  const json info = one_object(run({"checkpoint", "info", "ck", "--json"}));
  EXPECT_EQ(info["step"], 2);
  const json whole = one_object(run({"checkpoint", "verify", "ck/step-00000001", "--json"}));
  EXPECT_EQ(whole["whole"], true);
  EXPECT_EQ(whole["path"], "ck/step-00000001");
  EXPECT_EQ(whole["step"], 1);
  EXPECT_TRUE(run({"checkpoint", "verify", "ck"}).out.starts_with("whole: ck/step-00000002, step 2: "));
  EXPECT_EQ(run({"checkpoint", "diff", "ck", "ck/step-00000002"}).status, 0);
  const Result other = run({"checkpoint", "diff", "ck/step-00000001", "ck/step-00000002"});
  EXPECT_EQ(other.status, 1);
  EXPECT_NE(other.out.find("lm_head.weight.exp_avg"), std::string::npos) << other.out;
  EXPECT_NE(other.out.find(" tensors differ "), std::string::npos) << other.out;
  EXPECT_NE(other.out.find(" max |a-b| / max |a|\n"), std::string::npos) << other.out;
  // What compression carries over, the other has none of.
  ASSERT_EQ(
      run(training({"--steps", "1", "--checkpoint", "sent", "--dp", "2", "--compress", "topk:0.5"})).status,
      0);
  const Words one_sided{"checkpoint", "diff", "ck/step-00000001", "sent"};
  EXPECT_NE(run(one_sided).out.find(" only in sent\n"), std::string::npos) << run(one_sided).out;
  const json rows = json::parse(run(joined(one_sided, {"--json"})).out)["differences"];
  EXPECT_TRUE(std::any_of(rows.begin(), rows.end(), [](const json& row) {
    return row["rel_diff"].is_null() && row.value("only_in", "") == "sent";
  })) << rows;
  ASSERT_EQ(run({"checkpoint", "export", "ck", "--out", "hf"}).status, 0);
  // One that was ended has left this, and is no hindrance.
  fs::create_directories(at("ended/.unfinished"));
  write("ended/.unfinished/model.safetensors.tmp-1", "half");
  ASSERT_EQ(run({"checkpoint", "export", "ck", "--out", "ended"}).status, 0);
  EXPECT_EQ(read_bytes(at("ended/model.safetensors")), read_bytes(at("hf/model.safetensors")));
  EXPECT_FALSE(fs::exists(at("ended/.unfinished")));
  // A link to somebody else's files is not.
  fs::create_directories(at("linked"));
  fs::create_directory(at("others"));
  write("others/file", "mine");
  fs::create_directory_symlink(at("others"), at("linked/.unfinished"));
  refused({"checkpoint", "export", "ck", "--out", "linked"}, {"--out linked", ".unfinished is a link"});
  EXPECT_EQ(read_bytes(at("others/file")), "mine");
  ASSERT_EQ(run({"checkpoint", "import", "hf", "--out", "back", "--dtype", ECHELON_TEST_DTYPE}).status, 0);
  ASSERT_EQ(run({"checkpoint", "export", "ck", "--out", "wide", "--dtype", "f64"}).status, 0);
  EXPECT_NE(run({"checkpoint", "import", "wide", "--out", "narrow"})
                .err.find("weights in f64 are rounded to f32; --dtype f64"),
            std::string::npos);
  EXPECT_EQ(run({"checkpoint", "import", "wide", "--out", "asked", "--dtype", "f32"}).err, "");
  const Result moments = run({"checkpoint", "diff", "ck", "back"});
  EXPECT_EQ(moments.status, 1);  // moments are not exported, values are
  EXPECT_EQ(moments.out.find("lm_head.weight "), std::string::npos) << moments.out;
  std::string bytes = read_bytes(at("ck/step-00000002/model-00000.safetensors"));
  bytes[bytes.size() - 3] = static_cast<char>(bytes[bytes.size() - 3] ^ 4);
  write("ck/step-00000002/model-00000.safetensors", bytes);
  const Result damaged = run({"checkpoint", "verify", "ck"});
  EXPECT_EQ(damaged.status, 1);
  EXPECT_NE(damaged.err.find("model-00000.safetensors: tensor "), std::string::npos) << damaged.err;
  const json damage = json::parse(run({"checkpoint", "verify", "ck", "--json"}).out, nullptr, false);
  EXPECT_EQ(damage["whole"], false);
  EXPECT_EQ("echelon: " + damage["damage"].get<std::string>() + "\n", damaged.err);
  std::string manifest = read_bytes(at("ck/step-00000001/checkpoint.json"));
  const std::string sound = manifest;
  manifest.at(manifest.find("\"step\": 1") + 8) = '7';
  write("ck/step-00000001/checkpoint.json", manifest);
  const Result changed = run({"checkpoint", "verify", "ck/step-00000001"});
  EXPECT_EQ(changed.status, 1);
  EXPECT_NE(changed.err.find("checkpoint.json: damaged: its own checksum"), std::string::npos) << changed.err;
  write("ck/step-00000001/checkpoint.json", sound);
  // Whether it is whole is not known of what cannot be read.
  if (::geteuid() != 0) {
    fs::permissions(at("ck/step-00000001/model-00000.safetensors"), fs::perms::none);
    EXPECT_EQ(run({"checkpoint", "verify", "ck/step-00000001"}).status, 3);
    fs::permissions(at("ck/step-00000001/model-00000.safetensors"), fs::perms::owner_all);
  }
  // Of its twelve files one is open at a time.
  EXPECT_EQ(run({"checkpoint", "verify", "ck/step-00000001"}, "ulimit -n 8").status, 0);
  refused({"checkpoint"}, {"info, verify, diff, export, import"});
  refused({"checkpoint", "info", "absent"}, {"checkpoint info absent: no such directory"});
  refused({"checkpoint", "diff", "ck", "absent"}, {"checkpoint diff absent: no such directory"});
  refused({"checkpoint", "diff", "ck", std::string(300, 'a')}, {"checkpoint diff a", "too long"});
  refused({"checkpoint", "export", "ck", "--out", "hf"}, {"--out hf", "not empty"});
  // More rows than any memory has, of a table that is small.
  fs::copy(at("hf"), at("huge"));
  json config = json::parse(read_bytes(at("huge/config.json")));
  config["vocab_size"] = 2147483647;
  write("huge/config.json", config.dump());
  refused({"checkpoint", "import", "huge", "--out", "new"},
          {"model.embed_tokens.weight has shape (257, 24) where the model has (2147483647, 24)"});
  refused({"checkpoint", "import", "ck", "--out", "new"}, {"config.json"});
}

// Fine-tuned text goes in and out by the tokenizer that came with the weights.
TEST_F(TextCommands, ATokenizerGoesWithItsModel) {  // long
  const std::string tuned = std::string(ECHELON_SOURCE_DIR) + "/tests/fixtures/fine_tune";
  const Result trained =
      run({"train", "--from", tuned, "--data", tuned + "/records.jsonl", "--steps", "1", "--global-batch",
           "2", "--seq-len", "32", "--threads", "1", "--sample", "0", "--checkpoint", "tuned"});
  ASSERT_EQ(trained.status, 0) << trained.err;
  // Text is the tokenizer's of the checkpoint, which the vocabulary of another model does not fit.
  refused(training({"--resume", "--checkpoint", "tuned"}),
          {"--resume tuned", "it holds the model", "without --model"});
  const Words generating{"generate", "--checkpoint", "tuned", "--prompt",
                         "Hello",    "--threads",    "1",     "--json"};
  const json whole = one_object(run(joined(generating, {"--max-tokens", "20", "--seed", "3"})));
  EXPECT_LT(whole["prompt_tokens"].size(), 5u);  // pairs of its bytes are one token
  const std::string text = whole["text"];
  ASSERT_GT(text.size(), 4u);
  // What stops it is not written, and neither is what follows.
  const auto letter = std::find_if(text.begin() + 1, text.end(), [](char c) { return c >= 'a' && c <= 'z'; });
  ASSERT_NE(letter, text.end()) << text;
  const std::string stop(1, *letter);
  const json cut = one_object(run(joined(generating, {"--max-tokens", "20", "--seed", "3", "--stop", stop})));
  EXPECT_EQ(cut["text"], text.substr(0, text.find(stop)));
  // Among the likeliest alone, its sampling is what the likeliest is.
  const json likeliest = one_object(run(joined(generating, {"--max-tokens", "8", "--temperature", "0"})));
  const json narrow = one_object(run(joined(generating, {"--max-tokens", "8", "--top-p", "1e-9"})));
  EXPECT_EQ(narrow["tokens"], likeliest["tokens"]);
  refused(joined(generating, {"--top-p", "0"}), {"--top-p 0"});
  refused(joined(generating, {"--stop", ""}), {"--stop"});
  ASSERT_EQ(run({"checkpoint", "export", "tuned", "--out", "written"}).status, 0);
  for (const char* name : {"tokenizer.json", "tokenizer_config.json"})
    EXPECT_EQ(read_bytes(at(std::string("written/") + name)), read_bytes(tuned + "/" + name)) << name;
}

// Text and .tokens know where documents begin; whose the ids of another file are nothing says.
TEST_F(TextCommands, DocumentsEndAsTheTokenizerSays) {  // long
  const std::string tuned = std::string(ECHELON_SOURCE_DIR) + "/tests/fixtures/fine_tune";
  const auto by = [&](const std::string& data, const Words& more) {
    return joined({"train", "--from",    tuned,      "--data",    data, "--steps",  "1", "--global-batch",
                   "2",     "--seq-len", "32",       "--threads", "1",  "--sample", "0", "--eval-samples",
                   "0",     "--mask",    "document", "--json"},
                  more);
  };
  const std::string records = tuned + "/records.jsonl";
  const json loss = one_object(run(by(records, {})))["final_loss"];
  EXPECT_EQ(one_object(run(by(records, {"--document-end", "0"})))["final_loss"], loss);
  EXPECT_NE(one_object(run(by(records, {"--document-end", "403"})))["final_loss"], loss);
  ASSERT_EQ(run({"data", "tokenize", records, "--tokenizer", tuned, "--out", "ids"}).status, 0);
  EXPECT_EQ(one_object(run(by("ids.tokens", {})))["final_loss"], loss);  // which know their documents
  write_token_file(at("ids.bin"), std::vector<std::int32_t>(400, 3), 2);
  refused(by("ids.bin", {}), {"--mask document", "404 tokens", "--document-end"});
}

// Several prompts, on several ranks, are the same texts as one after the other.
TEST_F(TextCommands, PromptsAreContinuedOnAnyMesh) {  // long
  ASSERT_EQ(run(training({"--steps", "2", "--checkpoint", "ck", "--sample", "0"})).status, 0);
  const Words generating{"generate", "--checkpoint", "ck", "--threads", "1", "--max-tokens", "5", "--json"};
  write("prompts.txt", "\xef\xbb\xbfTo be\r\n\r\nor not\nto\n");  // as Windows may write it
  const json all = one_object(run(joined(generating, {"--prompts", "prompts.txt"})))["texts"];
  ASSERT_EQ(all.size(), 3u);
  const Words prompts{"To be", "or not", "to"};
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    // Each has a seed of its own.
    const json one =
        one_object(run(joined(generating, {"--prompt", prompts[i], "--seed", std::to_string(1 + i)})));
    for (const char* field : {"prompt_tokens", "tokens", "text"}) EXPECT_EQ(all[i][field], one[field]) << i;
  }
  for (const Words& mesh : std::vector<Words>{{"--dp", "2"}, {"--tp", "3"}, {"--pp", "2", "--dp", "2"}}) {
    Words words = joined(generating, mesh);
    for (const std::string& prompt : prompts) words = joined(words, {"--prompt", prompt});
    EXPECT_EQ(one_object(run(words))["texts"], all) << testing::PrintToString(mesh);
  }
  for (const Words& few : std::vector<Words>{{}, {"--prompt", "To"}})
    refused(joined(joined(generating, {"--dp", "2"}), few), {"--dp 2", "1 prompt", "up to 1"});
  const Result shown = run({"generate", "--checkpoint", "ck", "--threads", "1", "--max-tokens", "2", "--dp",
                            "2", "--prompt", "To be", "--prompt", "or"});
  EXPECT_TRUE(shown.out.starts_with("To be")) << shown.out;
  EXPECT_NE(shown.out.find("\nor"), std::string::npos) << shown.out;
  refused(joined(generating, {"--tp", "4"}), {"--tp 4", "6 heads", "legal: 1, 3"});
  refused(joined(generating, {"--pp", "3"}), {"--pp 3", "2 layers"});
  write("none.txt", "\n");
  refused(joined(generating, {"--prompts", "none.txt"}), {"--prompts none.txt", "no line"});
  refused(joined(generating, {"--prompts", "absent"}), {"--prompts", "absent"});
}

// A conversation is the text that its format makes of its turns.
TEST_F(TextCommands, AConversationIsKept) {  // long
  const Words model{"train",
                    "--data",
                    "text.txt",
                    "--model",
                    "llama-tiny",
                    "--global-batch",
                    "2",
                    "--seq-len",
                    "16",
                    "--steps",
                    "3",
                    "--sample",
                    "0",
                    "--threads",
                    "1",
                    "--checkpoint",
                    "long",
                    "--precision",
                    ECHELON_TEST_DTYPE};
  ASSERT_EQ(run(model).status, 0);
  const Words generating{"generate", "--checkpoint",  "long", "--threads", "1", "--max-tokens",
                         "6",        "--temperature", "1"};
  // The bytes tokenizer's ids are bytes, and 256 ends a text.
  const auto answer = [&](const std::string& text) {
    std::string ids;
    for (const char c : text)
      ids += fmt::format("{}{}", ids.empty() ? "" : ",", static_cast<unsigned char>(c));
    std::string said;
    const json report = one_object(run(joined(generating, {"--prompt-tokens", ids, "--json"})));
    for (const int id : report["tokens"]) {
      if (id == 256) break;
      said += static_cast<char>(id);
    }
    return said.substr(0, said.find("<|im_end|>"));
  };
  const auto turn = [](const std::string& said) {
    return "<|im_start|>user\n" + said + "<|im_end|>\n<|im_start|>assistant\n";
  };
  const std::string system = "<|im_start|>system\nBe brief.<|im_end|>\n";
  const std::string first = answer(system + turn("Hello")),
                    second = answer(system + turn("Hello") + first + "<|im_end|>\n" + turn("And you?"));
  EXPECT_NE(first, second) << "too dull to tell";
  write("turns", "Hello\nAnd you?\n");
  for (const Words& mesh : std::vector<Words>{{}, {"--tp", "2"}, {"--pp", "2"}}) {
    const Result talk =
        run(joined(joined(generating, {"--chat", "--system", "Be brief."}), mesh), "exec <turns");
    EXPECT_EQ(talk.status, 0) << talk.err;
    EXPECT_EQ(talk.out, first + "\n" + second + "\n") << testing::PrintToString(mesh);
  }
  refused(joined(generating, {"--chat", "--chat-format", "gemma", "--system", "a"}), {"--system", "gemma"});
  refused(joined(generating, {"--chat", "--chat-format", "latin"}),
          {"--chat-format latin", "chatml, llama3, gemma"});
  refused(joined(generating, {"--chat", "--dp", "2"}), {"--dp 2", "with --chat"});
  // Where the positions end so does the conversation.
  ASSERT_EQ(run(training({"--steps", "1", "--checkpoint", "ck", "--sample", "0"})).status, 0);
  const Result full = run({"generate", "--checkpoint", "ck", "--threads", "1", "--chat"}, "exec <turns");
  EXPECT_EQ(full.status, 0) << full.err;
  EXPECT_NE(full.err.find("fills the 64 positions"), std::string::npos) << full.err;
}

// What was trained of a model does not make it another one: the base of adapters is seen to be as it was.
TEST_F(TextCommands, AdaptersAreComparedWithTheirBase) {
  const auto trained = [&](const Words& more) {
    const Result r = run(joined(training({"--steps", "1", "--sample", "0"}), more));
    EXPECT_EQ(r.status, 0) << r.err;
  };
  trained({"--checkpoint", "base"});
  trained({"--from", "base", "--lora", "rank=2", "--checkpoint", "tuned"});
  const Result r = run({"checkpoint", "diff", "base", "tuned"});
  EXPECT_EQ(r.status, 1) << r.err;
  EXPECT_NE(r.out.find("q_proj.lora_A.weight "), std::string::npos) << r.out;
  EXPECT_NE(r.out.find("only in tuned\n"), std::string::npos) << r.out;
  EXPECT_NE(r.out.find(".exp_avg "), std::string::npos) << r.out;
  EXPECT_EQ(r.out.find("q_proj.weight "), std::string::npos) << r.out;
}

// What a model reads is said where it is not what one would expect.
TEST_F(TextCommands, BytesAreNotFedToATokenizersIds) {  // long
  const auto config = [](int vocab) {
    return R"({"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 32, "vocab_size": )" +
           std::to_string(vocab) + "}";
  };
  fs::create_directory(at("big"));
  write("big/config.json", config(300));
  const Words train{"train",   "--data", "text.txt", "--seq-len", "8",           "--threads",       "1",
                    "--steps", "1",      "--sample", "2",         "--precision", ECHELON_TEST_DTYPE};
  // Random weights learn bytes in any vocabulary that has them, and say so.
  const Result fresh = run(joined(train, {"--model", "big", "--checkpoint", "ck"}));
  EXPECT_EQ(fresh.status, 0) << fresh.err;
  EXPECT_NE(fresh.out.find("read as bytes, ids 0 to 256: the other 43 of the vocabulary are never seen"),
            std::string::npos)
      << fresh.out;
  EXPECT_EQ(fresh.out.find("weights"), std::string::npos) << fresh.out;  // the directory has none
  EXPECT_EQ(run({"generate", "--checkpoint", "ck", "--prompt", "To", "--max-tokens", "2"}).status, 0);
  const Result bytes = run(training({"--steps", "1", "--sample", "0"}));
  EXPECT_EQ(bytes.out.find("read as bytes"), std::string::npos) << bytes.out;
  // What comes from elsewhere has ids of its own.
  ASSERT_EQ(run({"checkpoint", "export", "ck", "--out", "hf"}).status, 0);
  ASSERT_EQ(run({"checkpoint", "import", "hf", "--out", "in", "--dtype", ECHELON_TEST_DTYPE}).status, 0);
  for (const Words& prompt : {Words{}, Words{"--prompt", "To"}})
    refused(joined({"generate", "--checkpoint", "in"}, prompt),
            {"--prompt", "another tokenizer", "--prompt-tokens ID", "0 to 299"});
  const json out = one_object(
      run({"generate", "--checkpoint", "in", "--prompt-tokens", "299,3", "--max-tokens", "2", "--json"}));
  EXPECT_FALSE(out.contains("text"));
  refused(joined(train, {"--model", "hf", "--checkpoint", "in", "--resume"}),
          {"--data", "another tokenizer"});
  const Result unused = run(joined(train, {"--model", "hf"}));
  EXPECT_EQ(unused.status, 0) << unused.err;
  EXPECT_NE(unused.out.find("those in hf are not used: --from hf starts from them"), std::string::npos)
      << unused.out;
  // A vocabulary of bytes stays one on the way out and back.
  ASSERT_EQ(run(training({"--steps", "1", "--sample", "0", "--checkpoint", "small"})).status, 0);
  ASSERT_EQ(run({"checkpoint", "export", "small", "--out", "hf257"}).status, 0);
  ASSERT_EQ(run({"checkpoint", "import", "hf257", "--out", "in257", "--dtype", ECHELON_TEST_DTYPE}).status,
            0);
  EXPECT_EQ(run({"generate", "--checkpoint", "in257", "--prompt", "To", "--max-tokens", "2"}).status, 0);
}

TEST_F(TextCommands, TokenizingRemovesNothingThatIsNotItsOwn) {
  write("in.txt", "half a sentence");
  const Words tokenize{"data", "tokenize", "in.txt", "--tokenizer", "bytes", "--out", "made"};
  fs::create_directory(at("made.parts"));
  for (const char* name : {"notes.txt", "corpus.tokens", "0123456789abcdef.tokens/inner"}) {
    fs::create_directories(at(std::string("made.parts/") + name).parent_path());
    write(std::string("made.parts/") + name, "mine");
    refused(tokenize, {"--out made: made.parts holds " + fs::path(name).begin()->string(), "name another"});
    EXPECT_EQ(read_bytes(at(std::string("made.parts/") + name)), "mine");
    EXPECT_FALSE(fs::exists(at("made.tokens")));
    fs::remove_all(at(std::string("made.parts/") + fs::path(name).begin()->string()));
  }
  // What an ended run left is its own.
  write("made.parts/.lock", "");
  write("made.parts/0123456789abcdef.tokens.tmp-7", "half");
  EXPECT_EQ(run(tokenize).status, 0);
  EXPECT_FALSE(fs::exists(at("made.parts")));
}

TEST_F(TextCommands, OneRunAtATimeTokenizesToAPrefix) {
  const Words tokenize{"data", "tokenize", "text.txt", "--tokenizer", "bytes", "--out", "made"};
  fs::create_directory(at("made.parts"));
  {
    const DirectoryLock other(at("made.parts").string(), "--out", cache_owner);
    refused(tokenize, {"--out made.parts: process " + std::to_string(::getpid()), "writes there"});
  }
  EXPECT_EQ(run(tokenize).status, 0);  // it has left its file, as one that was killed does
  EXPECT_FALSE(fs::exists(at("made.parts")));
  // What it keeps beside the text is none.
  fs::create_directory(at("in"));
  write("in/a.txt", "text");
  const Result beside = run({"data", "tokenize", "in", "--tokenizer", "bytes", "--out", "in/made"});
  EXPECT_NE(beside.out.find(": 5 tokens of 1 document in 1 file"), std::string::npos)
      << beside.out << beside.err;
  refused({"data", "tokenize", "absent", "--tokenizer", "bytes", "--out", "other"},
          {"echelon: absent: no such file"});
  EXPECT_FALSE(fs::exists(at("other.parts")));
}

TEST_F(TextCommands, TextBecomesTokensOnceAndWeightsAreStartedFrom) {  // long
  fs::create_directory(at("in"));
  std::string records;
  for (int i = 0; i < 20; ++i)
    records += "{\"prompt\": \"How many? \", \"completion\": \"As many as you like.\"}\n";
  write("in/a.jsonl", records);
  write("in/b.jsonl", "{\"text\": \"half\"}\n{\"text\":\n");
  const Words tokenize{"data", "tokenize", "in", "--tokenizer", "bytes", "--out", "made"};
  // What has been tokenised by then stays for the next time.
  const auto refused_late = [&](const Words& arguments, const Words& words) {
    const Result r = run(arguments);
    EXPECT_EQ(r.status, 2) << r.err;
    for (const std::string& word : words)
      EXPECT_NE(r.err.find(word), std::string::npos) << word << " in: " << r.err;
  };
  refused_late(tokenize, {"b.jsonl: line 2"});
  ASSERT_TRUE(fs::exists(at("made.parts")));  // a.jsonl is done
  std::vector<std::pair<fs::path, fs::file_time_type>> done;
  for (const auto& entry : fs::directory_iterator(at("made.parts")))
    if (entry.path().extension() == ".tokens") done.emplace_back(entry.path(), entry.last_write_time());
  ASSERT_EQ(done.size(), 1u);
  write("in/b.jsonl", "{\"text\": \"whole\"}\n");
  const Words keep{"data", "info", "in", "--data-cache", "made.parts", "--json"};
  const json before = one_object(run(keep));
  EXPECT_EQ(fs::last_write_time(done[0].first), done[0].second);  // it was not made again
  const Result made = run(tokenize);
  EXPECT_EQ(made.status, 0) << made.err;
  EXPECT_NE(made.out.find("of 21 documents in 2 files"), std::string::npos) << made.out;
  EXPECT_FALSE(fs::exists(at("made.parts")));
  refused(tokenize, {"--out made", "made.tokens is there already"});
  const json info = one_object(run({"data", "info", "made.tokens", "--tokenizer", "bytes", "--json"}));
  EXPECT_EQ(info["tokens"], before["tokens"]);
  EXPECT_EQ(info["documents"], 21);
  EXPECT_EQ(info["files"][0]["counted"], 20 * 21 + 6);
  EXPECT_EQ(info["samples"][0]["text"], "How many? As many as you like.");
  EXPECT_EQ(info["samples"][0]["counted"], "As many as you like.");
  EXPECT_EQ(info["samples"].size(), 3u);
  refused({"data"}, {"tokenize, info"});
  refused({"data", "info", "made.tokens", "--samples", "2"}, {"--samples 2", "no --tokenizer"});
  refused({"data", "info", "made.tokens", "--raw-tokens", "uint16"}, {"--raw-tokens", "without .bin files"});
  refused({"data", "tokenize", "made.tokens", "--tokenizer", "bytes", "--out", "again"},
          {"has tokens already"});
  refused({"data", "tokenize", "in", "--tokenizer", "bytes", "--out", "x", "--threads", "0"},
          {"--threads 0"});

  ASSERT_EQ(run(training({"--steps", "1", "--sample", "0", "--checkpoint", "base"})).status, 0);
  const Words tune{"train", "--data",    "in/a.jsonl", "--data-cache", "cache", "--from",
                   "base",  "--seq-len", "16",         "--threads",    "1"};
  const Result tuned = run(joined(tune, {"--steps", "2", "--sample", "4", "--tp", "3"}));
  EXPECT_EQ(tuned.status, 0) << tuned.err;
  EXPECT_NE(tuned.out.find("weights from base/step-00000001, trained for 1 step"), std::string::npos)
      << tuned.out;
  refused(joined(tune, {"--model", "gpt2-124m"}), {"--model gpt2-124m", "family = ", "leave out --model"});
  refused(joined(tune, {"--resume", "--checkpoint", "base"}), {"--from", "with --resume"});
  refused(joined(tune, {"--tokenizer", "absent.json"}),
          {"--tokenizer absent.json: no such file", "legal: bytes"});
  EXPECT_EQ(run({"verify", "--model", "tiny.toml", "--data", "in/a.jsonl", "--data-cache", "cache",
                 "--seq-len", "16", "--steps", "1", "--precision", ECHELON_TEST_DTYPE})
                .status,
            0);
  // Records without an answer: nothing to learn.
  std::string questions;
  for (int i = 0; i < 20; ++i) questions += "{\"messages\": [{\"role\": \"user\", \"content\": \"why?\"}]}\n";
  write("q.jsonl", questions);
  refused_late({"train", "--data", "q.jsonl", "--data-cache", "cache", "--seq-len", "16", "--steps", "1"},
               {"--data", "counts none"});
}

}  // namespace
}  // namespace echelon::text_commands_test
