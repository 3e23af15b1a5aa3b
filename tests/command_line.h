// The program as its users meet it, in a directory of the test's own.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "run_command.h"
#include "temporary_directory.h"

namespace echelon::checks {

// Each test has a directory of its own, in which the program runs.
class CommandLine : public testing::Test {
 protected:
  using Words = std::vector<std::string>;
  struct Result {
    int status = -1;  // negative: the signal that ended it
    std::string out, err;
  };

  CommandLine() {
    std::filesystem::create_directory(directory_);
    write("tiny.toml", tiny_model);
    std::string text;
    for (int i = 0; i < 200; ++i) text += "To be or not to be, that is question " + std::to_string(i) + ".\n";
    write("text.txt", text);
  }

  std::filesystem::path at(const std::string& name) const { return directory_ / name; }
  void write(const std::string& name, const std::string& text) const { write_text(at(name).string(), text); }
  std::string listing() const {
    Words names;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(directory_))
      names.push_back(entry.path().string() + (entry.is_regular_file() ? read_bytes(entry.path()) : ""));
    std::sort(names.begin(), names.end());
    std::string all;
    for (const std::string& name : names) all += name + "\n";
    return all;
  }

  // In the test's directory, by a shell that does `before` first.
  Result run(const Words& arguments, const std::string& before = ":") const {
    std::string words;
    for (const std::string& a : arguments) words += " '" + a + "'";  // none has a quote
    const CommandResult r =
        output_of("cd '" + directory_.string() + "' && exec 2>'" + (top_ / "err") + "' </dev/null && " +
                  before + " && exec '" + ECHELON_BINARY + "'" + words);
    return {r.status, r.output, read_bytes(top_ / "err")};
  }

  static Words joined(Words a, const Words& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  }
  // A run of a fraction of a second, and `more` flags.
  static Words training(const Words& more) {
    return joined({"train", "--data", "text.txt", "--model", "tiny.toml", "--global-batch", "2", "--seq-len",
                   "16", "--threads", "1", "--precision", ECHELON_TEST_DTYPE},
                  more);
  }
  Words list_of_checkpoints() const {
    Words paths;
    for (const auto& entry : std::filesystem::directory_iterator(at("ck")))
      if (entry.path().filename().string().starts_with("step-")) paths.push_back(entry.path().string());
    return paths;
  }

  // Status 2, one line that has all the words, no output, nothing changed on disk.
  void refused(const Words& arguments, const Words& words) const {
    SCOPED_TRACE(testing::PrintToString(arguments));
    const std::string before = listing();
    const Result r = run(arguments);
    EXPECT_EQ(r.status, 2) << r.err;
    EXPECT_EQ(r.out, "");
    EXPECT_TRUE(r.err.starts_with("echelon: ")) << r.err;
    EXPECT_EQ(std::count(r.err.begin(), r.err.end(), '\n'), 1) << r.err;
    for (const std::string& word : words)
      EXPECT_NE(r.err.find(word), std::string::npos) << word << " in: " << r.err;
    EXPECT_EQ(listing(), before);
  }

  static nlohmann::json one_object(const Result& r) {
    EXPECT_EQ(r.status, 0) << r.err;
    const nlohmann::json object = nlohmann::json::parse(r.out, nullptr, false);
    EXPECT_TRUE(object.is_object()) << r.out;
    return object;
  }
  static void has(const nlohmann::json& object, const Words& names) {
    for (const std::string& name : names)
      EXPECT_TRUE(object.contains(name)) << name << " in " << object.dump();
  }

  static constexpr const char* tiny_model =
      "family = \"llama\"\nnum_layers = 2\nhidden = 24\nnum_heads = 6\nnum_kv_heads = 3\nhead_dim = 4\n"
      "mlp_hidden = 40\nvocab = 257\nmax_seq = 64\n";
  const TemporaryDirectory top_;
  const std::filesystem::path directory_ = top_.path() / "here";
};

}  // namespace echelon::checks
