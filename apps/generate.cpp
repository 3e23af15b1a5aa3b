#include "train/generate.h"

#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include "apps/flags.h"
#include "base/error.h"
#include "train/checkpoint.h"

namespace echelon {
namespace {

struct GenerateFlags {
  RunFlags run;
  GenerateOptions options;
  std::string checkpoint, prompt;
  std::vector<std::int32_t> prompt_tokens;
  bool json = false;
};

int run_generate(GenerateFlags& f) {
  validate(f.options);
  const CheckpointInfo info = read_checkpoint_info(f.checkpoint);
  const bool text_mode = f.prompt_tokens.empty();
  std::vector<std::int32_t> prompt = f.prompt_tokens;
  if (text_mode) {
    if (info.model.vocab < bytes_vocab)
      refuse("--prompt: the vocabulary of {} has no room for the bytes tokenizer; use --prompt-tokens",
             info.model.name);
    for (char c : f.prompt) prompt.push_back(static_cast<unsigned char>(c));
    if (prompt.empty()) prompt.push_back(end_of_text);  // a document's beginning
    f.options.stop_token = end_of_text;
  }
  Plan plan;
  plan.model = info.model;
  plan.dtype = info.dtype;
  const RunOptions run = f.run.options(plan);
  std::FILE* out = f.json ? stderr : stdout;
  if (text_mode) fmt::print(out, "{}", f.prompt);
  std::vector<std::int32_t> text;
  ThreadWorld world(1, run.timeout);
  run_ranks(world, [&](int index) {
    Arena arena;
    const auto kernels = make_kernels(arena, plan.dtype, run.threads_per_rank);
    const Rank rank(world, plan.mesh, index, plan.dtype, arena, *kernels);
    const ParameterStore parameters(rank, layer_groups(plan.model), info.seed);
    load_checkpoint(rank, parameters, info, true);
    text = generate(rank, plan, parameters, prompt, f.options, [&](std::int32_t token) {
      if (text_mode && token < 256)
        std::fputc(token, out);
      else
        fmt::print(out, "{} ", token);
      std::fflush(out);
    });
  });
  fmt::print(out, "\n");
  if (f.json) {
    nlohmann::ordered_json report{
        {"checkpoint", info.path}, {"step", info.step}, {"prompt_tokens", prompt}, {"tokens", text}};
    if (text_mode) {
      std::string bytes;
      for (std::int32_t token : text)
        if (token < 256) bytes += static_cast<char>(token);
      report["text"] = bytes;
    }
    // A model of bytes may write half a character; a program gets the replacement character then.
    fmt::print("{}\n", report.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  }
  return 0;
}

}  // namespace

void add_generate(CLI::App& program, int& status) {
  auto flags = std::make_shared<GenerateFlags>();
  CLI::App& app = *program.add_subcommand("generate", "Sample text from a checkpoint");
  flags->run.add_to(app);
  app.add_option("--checkpoint", flags->checkpoint,
                 "Directory of checkpoints (the last is used), or one of them")
      ->required();
  auto* prompt = app.add_option("--prompt", flags->prompt, "Text to continue (bytes tokenizer)");
  app.add_option("--prompt-tokens", flags->prompt_tokens, "Token ids to continue, for models of token files")
      ->excludes(prompt);
  app.add_option("--max-tokens", flags->options.max_tokens, "Tokens to sample")->capture_default_str();
  app.add_option("--temperature", flags->options.temperature, "0: always the most likely token")
      ->capture_default_str();
  app.add_option("--top-k", flags->options.top_k, "Sample among the k most likely; 0: all")
      ->capture_default_str();
  app.add_option("--seed", flags->options.seed, "Of the sampling")->capture_default_str();
  app.add_flag("--json", flags->json, "Tokens and text as one JSON object on standard output");
  app.callback([flags, &status] { status = run_generate(*flags); });
}

}  // namespace echelon
