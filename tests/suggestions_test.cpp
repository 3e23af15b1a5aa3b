// What a refusal suggests is accepted: over random lines of flags, every value that a sentence calls legal is
// tried.
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "apps/flags.h"
#include "base/error.h"
#include "base/philox.h"
#include "case_choice.h"

namespace echelon::suggestions_test {
namespace {

using FlagLine = std::map<std::string, std::string>;

std::string shown(const FlagLine& line) {
  std::string text;
  for (const auto& [flag, value] : line) text += " " + flag + " " + value;
  return text;
}

// As train reads them; the refusal, or "" where the line is accepted.
std::string refusal_of(const FlagLine& line) {
  Plan defaults;
  defaults.model = load_model("gpt2-tiny");
  defaults.global_batch = 8;
  defaults.micro_batch = 4;
  defaults.seq_len = 256;
  CLI::App app;
  PlanFlags flags;
  RunFlags run;
  flags.add_to(app, defaults);
  run.add_to(app);
  std::vector<std::string> words;
  for (const auto& [flag, value] : line)
    words.insert(words.begin(), {value, flag});  // CLI11 takes the last first
  try {
    app.parse(words);
    (void)flags.plan();
    return "";
  } catch (const RequestError& error) {
    return error.what();
  }
}

std::string flag_of(const std::string& refusal) { return refusal.substr(0, refusal.find_first_of(" :")); }

struct Suggestion {
  std::string flag, value;  // no value: leave it out
};

std::vector<std::string> parts_of(const std::string& text, const std::string& separator) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(separator, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + separator.size();
  }
  return parts;
}

// Of "--tp 3: ...; legal: 1, 2, or --dp up to 4, or --zero 1, 2", and of "...; leave it out, or give --pp 2".
std::vector<Suggestion> suggestions_in(const std::string& refusal) {
  std::vector<Suggestion> all;
  const auto add = [&](const std::string& flag, const std::string& values) {
    for (std::string value : parts_of(values, ", ")) {
      for (const std::string bound : {"up to ", "of at least ", "at least "})
        if (value.starts_with(bound)) value = value.substr(bound.size());
      all.push_back({flag, value});
    }
  };
  const std::string legal = "; legal: ", idle = "; leave it out", give = ", or give ";
  if (const auto at = refusal.find(idle); at != std::string::npos) {
    all.push_back({flag_of(refusal), ""});
    if (refusal.substr(at + idle.size()).starts_with(give)) {
      const std::string advised = refusal.substr(at + idle.size() + give.size());
      add(advised.substr(0, advised.find(' ')), advised.substr(advised.find(' ') + 1));
    }
    return all;
  }
  const auto at = refusal.find(legal);
  if (at == std::string::npos) return all;
  for (const std::string& group : parts_of(refusal.substr(at + legal.size()), ", or ")) {
    if (group.starts_with("--"))
      add(group.substr(0, group.find(' ')), group.substr(group.find(' ') + 1));
    else
      add(flag_of(refusal), group);
  }
  return all;
}

FlagLine with(FlagLine line, const Suggestion& suggestion) {
  if (suggestion.value.empty())
    line.erase(suggestion.flag);
  else
    line[suggestion.flag] = suggestion.value;
  return line;
}

// Suggestions are all accepted; or none is, because the line is refused for more than one reason, and going
// by them one after another ends in a line that is accepted, or in a sentence that has none.
void try_suggestions(FlagLine line) {
  std::set<std::string> seen;
  std::string path;
  for (std::string refusal = refusal_of(line); !refusal.empty();) {
    path += shown(line) + "\n  " + refusal + "\n";
    ASSERT_TRUE(seen.insert(shown(line)).second) << "in a circle:\n" << path;
    const std::vector<Suggestion> suggestions = suggestions_in(refusal);
    if (suggestions.empty()) return;
    std::size_t accepted = 0;
    std::string next_refusal;
    FlagLine next;
    for (const Suggestion& one : suggestions) {
      const FlagLine changed = with(line, one);
      const std::string again = refusal_of(changed);
      accepted += again.empty();
      if (again.empty()) continue;
      EXPECT_NE(flag_of(again), flag_of(refusal)) << "suggested in vain:\n"
                                                  << path << one.flag << " " << one.value << "\n  " << again;
      next = changed;
      next_refusal = again;
    }
    const bool may_leave_out = suggestions.front().value.empty();
    EXPECT_TRUE(accepted == 0 || accepted == suggestions.size() || may_leave_out) << path << next_refusal;
    if (accepted > 0) return;
    line = next;
    refusal = next_refusal;
  }
}

const std::vector<std::pair<const char*, std::vector<const char*>>>& flag_values() {
  static const std::vector<std::pair<const char*, std::vector<const char*>>> all{
      {"--model", {"gpt2-tiny", "llama-tiny", "mixtral-tiny", "deepseek-tiny"}},
      {"--dp", {"1", "2", "3", "4", "8", "9"}},
      {"--tp", {"1", "2", "3", "4", "5", "8"}},
      {"--pp", {"1", "2", "3", "4", "7"}},
      {"--cp", {"1", "2", "3", "4", "6"}},
      {"--ep", {"1", "2", "3", "4"}},
      {"--cp-kind", {"ring", "ulysses", "allgather", "hybrid"}},
      {"--cp-balance", {"zigzag", "stripe", "none"}},
      {"--cp-ulysses", {"1", "2", "3", "4"}},
      {"--mask", {"causal", "document"}},
      {"--document-end", {"0", "10"}},
      {"--aux-loss", {"0", "0.1"}},
      {"--device-loss", {"0", "0.1"}},
      {"--communication-loss", {"0.1"}},
      {"--z-loss", {"0.1"}},
      {"--bias-rate", {"0.001"}},
      {"--balance-scope", {"sequence", "microbatch", "batch"}},
      {"--capacity", {"0", "1.5"}},
      {"--drop", {"probability", "position"}},
      {"--recompute", {"none", "selective", "full"}},
      {"--zero", {"0", "1", "2", "3", "4"}},
      {"--hsdp", {"1", "2", "3", "4"}},
      {"--zero-prefetch", {"0", "2"}},
      {"--bucket", {"1MiB", "25MiB"}},
      {"--compress", {"none", "int8", "powersgd:2"}},
      {"--offload", {"none", "optimizer", "activations", "both"}},
      {"--offload-dir", {"."}},
      {"--schedule",
       {"naive", "gpipe", "1f1b", "interleaved", "pipedream", "2bw", "zb-v", "dualpipe", "dualpipev",
        "nonsense"}},
      {"--chunks", {"0", "1", "2", "3"}},
      {"--layers-per-stage", {"auto", "3,3", "1,5"}},
      {"--optimizer-barrier", {"on", "off"}},
      {"--sp", {"on", "off"}},
      {"--global-batch", {"1", "2", "4", "8", "9", "16"}},
      {"--micro-batch", {"1", "2", "3"}},
      {"--seq-len", {"1", "16", "30", "48", "60"}},
      {"--collectives", {"direct", "ring"}}};
  return all;
}

TEST(Suggestions, AreAcceptedOverRandomLines) {
  for (std::uint64_t trial = 0; trial < 400; ++trial) {
    if (!checks::is_taken()) continue;
    const Philox random(15, Stream::test, trial);
    std::uint64_t drawn = 0;
    const auto draw = [&](std::size_t below) {
      return static_cast<std::size_t>(random.below(drawn++, static_cast<std::uint64_t>(below)));
    };
    FlagLine line;
    const std::size_t flags = 1 + draw(9);
    for (std::size_t i = 0; i < flags; ++i) {
      // Axes more often than what goes by them.
      const auto& [flag, values] = flag_values()[draw(3) == 0 ? draw(6) : draw(flag_values().size())];
      line[flag] = values[draw(values.size())];
    }
    SCOPED_TRACE(shown(line));
    try_suggestions(line);
  }
}

TEST(Suggestions, AreReadAsTheyAreMeant) {
  EXPECT_EQ(
      refusal_of({{"--dp", "16"}}),
      "--dp 16: the global batch has only 8 sequences, so some ranks would have none; legal: up to 8, or "
      "--global-batch of at least 16");
  const auto dp = suggestions_in(refusal_of({{"--dp", "16"}}));
  ASSERT_EQ(dp.size(), 2u);
  EXPECT_EQ(dp[0].flag + dp[0].value + dp[1].flag + dp[1].value, "--dp8--global-batch16");
  EXPECT_EQ(refusal_of({{"--schedule", "nonsense"}}),
            "--schedule nonsense: has no effect with --pp 1; leave it out");
  const auto idle = suggestions_in(refusal_of({{"--cp-kind", "ring"}}));
  ASSERT_EQ(idle.size(), 2u);
  EXPECT_EQ(idle[0].flag + idle[0].value + idle[1].flag + idle[1].value, "--cp-kind--cp2");
}

// What the whole plan would refuse is not suggested.
TEST(Suggestions, LeaveOutWhatOtherFlagsRule) {
  // 2 would divide the ranks into groups, 4 too, whose heads 4 ranks of tp do not have.
  EXPECT_EQ(refusal_of({{"--cp", "4"}, {"--cp-kind", "hybrid"}, {"--cp-ulysses", "3"}, {"--tp", "2"}}),
            "--cp-ulysses 3: the 4 ranks of --cp do not divide into groups of so many; legal: 1, 2");
  // Longer than the model's positions.
  const std::string longest = refusal_of({{"--seq-len", "1023"}, {"--cp", "2"}, {"--model", "gpt2-tiny"}});
  EXPECT_NE(longest.find("--seq-len 1023"), std::string::npos) << longest;
  for (const Suggestion& one : suggestions_in(longest))
    EXPECT_EQ(refusal_of(with({{"--seq-len", "1023"}, {"--cp", "2"}}, one)), "");
}

}  // namespace
}  // namespace echelon::suggestions_test
