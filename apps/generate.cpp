#include "train/generate.h"

#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include "apps/flag_needs.h"
#include "apps/flags.h"
#include "apps/help.h"
#include "apps/progress_line.h"
#include "base/error.h"
#include "base/json_text.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/finite.h"
#include "tensor/prepare_kernels.h"

namespace echelon {
namespace {

struct GenerateFlags {
  RunFlags run;
  GenerateOptions options;
  std::string checkpoint, prompt;
  std::vector<std::int32_t> prompt_tokens;
  bool json = false;
  CLI::App* app = nullptr;
};

std::vector<FlagNeed> generate_needs(const GenerateOptions& o) {
  const std::vector<Remedy> warmer{advice("--temperature", "0.8")};
  return {{"--top-k", o.temperature != 0 || o.top_k == 0, "with --temperature 0", warmer},
          {"--seed", o.temperature != 0, "with --temperature 0", warmer},
          {"--seed", o.top_k != 1, "with --top-k 1", {advice("--top-k", "40")}}};
}

int run_generate(GenerateFlags& f) {
  validate(f.options);
  refuse_idle(*f.app, generate_needs(f.options));
  if (f.checkpoint.empty())
    refuse("--checkpoint: no path is given; give a directory of checkpoints, or one of them");
  const CheckpointInfo info = read_checkpoint_info(f.checkpoint);
  const bool text_mode = f.prompt_tokens.empty();
  std::vector<std::int32_t> prompt = f.prompt_tokens;
  if (text_mode) {
    if (!reads_bytes(info))
      refuse(
          "--prompt: text is read as bytes, and {} has learned the ids of another tokenizer; legal: "
          "--prompt-tokens ID,ID,... with its ids, 0 to {}",
          info.path, info.model.vocab - 1);
    for (char c : f.prompt) prompt.push_back(static_cast<unsigned char>(c));
    if (prompt.empty()) prompt.push_back(end_of_text);  // a document's beginning
    f.options.stop_token = end_of_text;
  }
  Plan plan;
  plan.model = info.model;
  plan.precision = recipe_of_weights(info.dtype);
  const RunOptions run = f.run.options(plan);
  validate(f.options, plan.model, prompt);
  refuse_beyond_memory(plan, predicted_bytes(plan));
  std::FILE* out = f.json ? stderr : stdout;
  std::vector<std::int32_t> text;
  prepare_kernels(plan.precision);
  ProgressLine line("generate", f.json);
  report(line.progress(), -1, "loading " + info.path);
  ThreadWorld world(1, run.timeout);
  run_ranks(world, [&](int index) {
    Arena arena;
    const auto kernels = make_kernels(arena, plan.precision, run.threads_per_rank);
    const Rank rank(world, plan.mesh, index, plan.precision, arena, *kernels);
    const ParameterStore parameters(rank, plan, PipelineLayout(plan), info.seed);
    const RouterBiases biases = load_checkpoint(rank, parameters, info, true);
    line.clear();
    if (text_mode) fmt::print(out, "{}", f.prompt);
    text = generate(rank, plan, parameters, biases, prompt, f.options, [&](std::int32_t token) {
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
    fmt::print("{}\n", json_text(report));
  }
  return 0;
}

}  // namespace

void add_generate(CLI::App& program, int& status) {
  auto flags = std::make_shared<GenerateFlags>();
  CLI::App& app = *program.add_subcommand("generate", "Sample text from a checkpoint");
  heading(app, common_flags);
  flags->app = &app;
  app.add_option("--checkpoint", flags->checkpoint,
                 "Directory of checkpoints (the last is used), or one of them (required)")
      ->type_name("DIR");
  auto* prompt =
      app.add_option("--prompt", flags->prompt, "Text to continue (bytes tokenizer)")->type_name("TEXT");
  app.add_option_function<std::vector<std::string>>(
         "--prompt-tokens",
         [flags](const std::vector<std::string>& tokens) {
           for (const std::string& token : tokens)
             flags->prompt_tokens.push_back(parse_number<std::int32_t>("--prompt-tokens", token));
         },
         "Token ids to continue, for models of token files")
      ->type_name("N")
      ->delimiter(',')
      ->excludes(prompt);
  add_number(app, "--max-tokens", flags->options.max_tokens, "Most tokens to generate");
  app.add_flag("--json", flags->json, "Tokens and text as one JSON object on standard output");
  heading(app, "Sampling");
  add_number(app, "--temperature", flags->options.temperature, "0: always the most likely token");
  add_number(app, "--top-k", flags->options.top_k, "Sample among the k most likely tokens; 0: all");
  add_number(app, "--seed", flags->options.seed, "Seed of the sampling");
  heading(app, "Running");
  flags->run.add_threads_to(app);
  app.callback([flags, &status] {
    try {
      status = run_generate(*flags);
    } catch (const NotFinite& error) {  // the checkpoint has been read, and this is the answer
      fmt::print(stderr, "echelon: {}\n", error.what());
      status = 1;
    }
  });
}

}  // namespace echelon
