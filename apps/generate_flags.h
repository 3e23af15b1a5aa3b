// The flags of generate, and the texts that they ask for.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/flags.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/held_checkpoint.h"
#include "data/chat_template.h"
#include "spec/plan.h"
#include "text/tokenizer.h"
#include "train/generate.h"
#include "train/session.h"

namespace echelon {

// A prompt, and what was generated after it.
struct GeneratedText {
  std::string prompt, text;
  std::vector<std::int32_t> prompt_tokens, tokens;
};

struct GenerateFlags {
  // Reads what the flags ask for into the members below. RequestError naming what is impossible.
  void read();

  RunFlags run;
  GenerateOptions options;
  std::string checkpoint, prompts_file, chat_format, system, dtype;
  std::vector<std::string> prompts;
  std::vector<std::int32_t> prompt_tokens;
  std::vector<std::string> stops;
  std::map<std::string, std::string> mesh;  // sizes of axes, by flag
  bool json = false, chat = false;
  CLI::App* app = nullptr;

  // Set by read().
  std::optional<HeldCheckpoint> held;
  CheckpointInfo info;  // of the one that is held
  Plan plan;
  RunOptions run_options;
  std::shared_ptr<const Tokenizer> tokenizer;  // nullptr: ids are shown
  std::shared_ptr<const ChatTemplate> chat_template;  // for a conversation
  std::vector<GeneratedText> texts;  // prompts without texts so far; empty for a conversation
};
void add_generate_flags(CLI::App& app, const std::shared_ptr<GenerateFlags>& flags);

struct GenerateObserver {
  std::function<void()> on_load;  // called once the weights are loaded
  // A piece of the text with this index, on the thread of the rank that generates it: pieces of one text come
  // in order, but several texts may alternate if there are several data-parallel ranks.
  std::function<void(std::size_t index, const std::string& piece)> on_piece;
  // Called for each token, on every rank; an exception ends the run.
  std::function<void()> before_token;
};

// Completes the texts of `flags`, after read(). If it ends early, texts hold what was generated until then.
void generate_texts(GenerateFlags& flags, const GenerateObserver& observer);
// Reads the user's turns from standard input, one per line, until it ends.
void hold_conversation(const GenerateFlags& flags, const std::function<void()>& on_load);

}  // namespace echelon
