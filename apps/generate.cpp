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
#include "text/tokenizer.h"

namespace echelon {
namespace {

struct GenerateFlags {
  RunFlags run;
  GenerateOptions options;
  std::string checkpoint, prompt;
  std::vector<std::int32_t> prompt_tokens;
  std::vector<std::string> stops;
  bool json = false;
  CLI::App* app = nullptr;
};

std::vector<FlagNeed> generate_needs(const GenerateOptions& o) {
  const std::vector<Remedy> warmer{advice("--temperature", "0.8")};
  return {{"--top-p", o.temperature != 0, "with --temperature 0", warmer},
          {"--top-p", o.top_k != 1, "with --top-k 1", {advice("--top-k", "40")}},
          {"--top-k", o.temperature != 0 || o.top_k == 0, "with --temperature 0", warmer},
          {"--seed", o.temperature != 0, "with --temperature 0", warmer},
          {"--seed", o.top_k != 1, "with --top-k 1", {advice("--top-k", "40")}}};
}

// Text on its way out: held back as long as it may be the beginning of a stop string, which is not written.
class StoppedText {
 public:
  explicit StoppedText(std::vector<std::string> stops) : stops_(std::move(stops)) {}

  // What may be written now.
  std::string next(const std::string& text) {
    if (stopped_) return "";
    held_ += text;
    std::size_t first = std::string::npos;
    for (const std::string& stop : stops_) first = std::min(first, held_.find(stop));
    stopped_ = first != std::string::npos;
    std::size_t certain = stopped_ ? first : held_.size();
    for (const std::string& stop : stops_)
      for (std::size_t n = std::min(stop.size() - 1, held_.size()); !stopped_ && n > 0; --n)
        if (held_.ends_with(std::string_view(stop).substr(0, n))) {
          certain = std::min(certain, held_.size() - n);
          break;
        }
    std::string out = held_.substr(0, certain);
    held_.erase(0, certain);
    return out;
  }
  std::string finish() { return stopped_ ? "" : std::exchange(held_, ""); }
  bool stopped() const { return stopped_; }

 private:
  std::vector<std::string> stops_;
  std::string held_;
  bool stopped_ = false;
};

int run_generate(GenerateFlags& f) {
  validate(f.options);
  refuse_idle(*f.app, generate_needs(f.options));
  if (f.checkpoint.empty())
    refuse("--checkpoint: no path is given; give a directory of checkpoints, or one of them");
  const CheckpointInfo info = read_checkpoint_info(f.checkpoint);
  const bool text_mode = f.prompt_tokens.empty();
  std::vector<std::int32_t> prompt = f.prompt_tokens;
  std::shared_ptr<const Tokenizer> tokenizer;
  for (const std::string& stop : f.stops)
    if (stop.empty()) refuse("--stop: an empty text is everywhere; legal: some text");
  if (text_mode) {
    tokenizer = tokenizer_of(info);
    if (tokenizer == nullptr)
      refuse(
          "--prompt: text is read as bytes, and {} has learned the ids of another tokenizer; legal: "
          "--prompt-tokens ID,ID,... with its ids, 0 to {}",
          info.path, info.model.vocab - 1);
    prompt = tokenizer->encode_whole(f.prompt);
    const auto end = tokenizer->end_of_text();
    if (prompt.empty() && !end)
      refuse("--prompt: {} makes no token of it; legal: some text", tokenizer->name());
    if (prompt.empty()) prompt.push_back(*end);  // a document's beginning
    f.options.stop_token = end.value_or(-1);
  } else if (!f.stops.empty()) {
    refuse("--stop: with --prompt-tokens no text is made; legal: --stop with --prompt");
  }
  Plan plan;
  plan.model = info.model;
  plan.precision = recipe_of_weights(info.dtype);
  const RunOptions run = f.run.options(plan);
  validate(f.options, plan.model, prompt);
  refuse_beyond_memory(plan, predicted_bytes(plan));
  std::FILE* out = f.json ? stderr : stdout;
  std::vector<std::int32_t> tokens;
  std::string text;
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
    if (!text_mode) {
      tokens = generate(rank, plan, parameters, biases, prompt, f.options, [&](std::int32_t token) {
        fmt::print(out, "{} ", token);
        std::fflush(out);
      });
      return;
    }
    const auto write = [&](const std::string& piece) {
      std::fwrite(piece.data(), 1, piece.size(), out);
      std::fflush(out);
      text += piece;
    };
    std::fwrite(f.prompt.data(), 1, f.prompt.size(), out);
    TextStream stream(tokenizer);
    for (const std::int32_t token : prompt) stream.next(token);  // a decoder may look at what came before
    stream.finish();
    StoppedText stopped(f.stops);
    f.options.ends = [&](std::int32_t token) {
      // A model may have more ids than its tokenizer has tokens, and may say them.
      if (token >= tokenizer->vocab())
        write(fmt::format("<{}>", token));
      else
        write(stopped.next(stream.next(token)));
      return stopped.stopped();
    };
    tokens = generate(rank, plan, parameters, biases, prompt, f.options);
    write(stopped.next(stream.finish()) + stopped.finish());
  });
  fmt::print(out, "\n");
  if (f.json) {
    nlohmann::ordered_json report{
        {"checkpoint", info.path}, {"step", info.step}, {"prompt_tokens", prompt}, {"tokens", tokens}};
    if (text_mode) report["text"] = text;
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
      app.add_option("--prompt", flags->prompt, "Text to continue, read by the checkpoint's tokenizer")
          ->type_name("TEXT");
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
  app.add_option("--stop", flags->stops,
                 "Text that ends what is generated, and is not written; may be given again")
      ->type_name("TEXT")
      ->allow_extra_args(false);
  app.add_flag("--json", flags->json, "Tokens and text as one JSON object on standard output");
  heading(app, "Sampling");
  add_number(app, "--temperature", flags->options.temperature, "0: always the most likely token");
  add_number(app, "--top-k", flags->options.top_k, "Sample among the k most likely tokens; 0: all");
  add_number(app, "--top-p", flags->options.top_p,
             "Sample among the fewest most likely tokens that have this probability together");
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
