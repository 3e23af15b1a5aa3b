#include "apps/generate_flags.h"

#include <fmt/core.h>

#include <ctime>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "apps/flag_needs.h"
#include "apps/help.h"
#include "apps/plan_field_flags.h"
#include "apps/progress_line.h"
#include "apps/terminal.h"
#include "base/error.h"
#include "base/json_text.h"
#include "base/open_file.h"
#include "base/utf8.h"
#include "checkpoint/finite.h"
#include "checkpoint/hugging_face.h"
#include "schedule/pipeline_layout.h"
#include "spec/plan_fields.h"
#include "tensor/prepare_kernels.h"
#include "text/template_texts.h"
#include "train/refuse_request.h"
#include "train/this_machine.h"

namespace echelon {
namespace {

constexpr const char* mesh_flags[] = {"dp", "tp", "pp"};

std::vector<FlagNeed> generate_needs(const GenerateFlags& f) {
  const GenerateOptions& o = f.options;
  const std::vector<Remedy> warmer{advice("--temperature", "0.8")};
  const std::vector<FlagNeed> needs{
      {"--prompt", !f.chat, "with --chat", {}},
      {"--prompts", !f.chat, "with --chat", {}},
      {"--prompt-tokens", !f.chat, "with --chat", {}},
      {"--json", !f.chat, "with --chat", {}},
      {"--chat-format", f.chat, "without --chat", {}},
      {"--system", f.chat, "without --chat", {}},
      {"--top-p", o.temperature != 0, "with --temperature 0", warmer},
      {"--top-p", o.top_k != 1, "with --top-k 1", {advice("--top-k", "40")}},
      {"--top-k", o.temperature != 0 || o.top_k == 0, "with --temperature 0", warmer},
      {"--seed", o.temperature != 0, "with --temperature 0", warmer},
      {"--seed", o.top_k != 1, "with --top-k 1", {advice("--top-k", "40")}}};
  return needs;
}

// Text for output: held back as long as it may be the beginning of a stop string, which is not written.
class StoppedText {
 public:
  explicit StoppedText(std::vector<std::string> stops) : stops_(std::move(stops)) {}

  // Returns what may be written now.
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

// A text may have as many new tokens as there are positions after its prompt: an explicit larger number is
// refused, the default is reduced.
GenerateOptions that_fit(GenerateOptions options, const ModelSpec& model, const GeneratedText& text) {
  const std::int64_t room = model.max_seq - std::ssize(text.prompt_tokens);
  options.max_tokens = std::min(options.max_tokens, std::max<std::int64_t>(room, 1));
  return options;
}

// One prompt per line.
std::vector<std::string> read_prompts(const std::string& path) {
  std::istringstream in(std::string(without_byte_order_mark(read_text(path, "--prompts"))));
  std::vector<std::string> prompts;
  for (std::string line; std::getline(in, line);) {
    if (line.ends_with('\r')) line.pop_back();
    if (!line.empty()) prompts.push_back(line);
  }
  if (prompts.empty()) refuse("--prompts {}: holds no line with a prompt", path);
  return prompts;
}

// Adds the token that is exactly this text: special tokens produce no text in which the stop string could be
// found.
void add_token_of(const Tokenizer& tokenizer, const std::string& stop, std::vector<std::int32_t>& tokens) {
  const std::vector<std::int32_t> ids = tokenizer.encode(stop);
  if (ids.size() == 1 && tokenizer.decode(ids, Special::shown) == stop) tokens.push_back(ids.front());
}

std::tm time_here() {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  return local;
}

// All ranks are threads of this process: each makes the same text from the same tokens, and one writes it.
class Generation {
 public:
  explicit Generation(const GenerateFlags& flags)
      : flags_(flags), plan_(flags.plan), tokenizer_(flags.tokenizer) {}

  // `write` gets each token with the text that it completes, on every rank; finally -1 and the rest of the
  // text.
  template <class Write>
  std::vector<std::int32_t> run(const Rank& rank, const ParameterStore& parameters,
                                const RouterBiases& biases, const std::vector<std::int32_t>& prompt,
                                GenerateOptions options, const std::vector<std::string>& stops,
                                const Write& write) const {
    if (tokenizer_ == nullptr)
      return generate(rank, plan_, parameters, biases, prompt, options,
                      [&](std::int32_t token) { write(token, fmt::format("{} ", token)); });
    TextStream stream(tokenizer_);
    for (const std::int32_t token : prompt) stream.next(token);  // a decoder may need what came before
    stream.finish();
    StoppedText stopped(stops);
    options.ends = [&](std::int32_t token) {
      // A model may have more ids than its tokenizer has tokens, and may generate them.
      if (token >= tokenizer_->vocab())
        write(token, fmt::format("<{}>", token));
      else
        write(token, stopped.next(stream.next(token)));
      return stopped.stopped();
    };
    const std::vector<std::int32_t> tokens = generate(rank, plan_, parameters, biases, prompt, options);
    std::string rest = stopped.next(stream.finish());
    rest += stopped.finish();
    write(-1, rest);
    return tokens;
  }

  // Prompts are distributed over the data-parallel ranks in turn.
  void texts(const Rank& rank, const ParameterStore& parameters, const RouterBiases& biases,
             const GenerateObserver& observer, std::vector<GeneratedText>& all) const {
    const auto dp = static_cast<std::size_t>(rank.size(Axis::dp));
    const bool writes = rank.coordinate(Axis::tp) == 0 && rank.coordinate(Axis::pp) == 0;
    for (auto i = static_cast<std::size_t>(rank.coordinate(Axis::dp)); i < all.size(); i += dp) {
      GeneratedText& one = all[i];
      GenerateOptions options = that_fit(flags_.options, plan_.model, one);
      options.seed += i;
      run(rank, parameters, biases, one.prompt_tokens, options, flags_.stops,
          [&](std::int32_t token, const std::string& piece) {
            if (observer.before_token) observer.before_token();
            if (!writes) return;
            if (token >= 0) one.tokens.push_back(token);
            one.text += piece;
            observer.on_piece(i, piece);
          });
    }
  }

  // Reads the user's turns from standard input, one per line, until it ends.
  void chat(const Rank& rank, const ParameterStore& parameters, const RouterBiases& biases,
            const ChatTemplate& chat, std::vector<std::int32_t>& shared) const {
    const auto meet = [&] {
      for (Axis axis : all_axes) rank.along(axis).barrier().wait();
    };
    const bool leads = rank.index() == 0, asks = leads && is_terminal(stdout);
    nlohmann::json messages = nlohmann::json::array();
    if (!flags_.system.empty()) messages.push_back({{"role", "system"}, {"content", flags_.system}});
    std::vector<std::string> stops = flags_.stops;
    if (std::string end = chat.answer_end(); !end.empty()) stops.push_back(std::move(end));
    for (;;) {
      if (leads) {
        shared.clear();
        std::string line;
        if (asks) fmt::print("> ");
        std::fflush(stdout);
        if (std::getline(std::cin, line)) {
          messages.push_back({{"role", "user"}, {"content", line}});
          const std::string text = chat.render(messages, true, time_here());
          shared = chat.writes_all() ? tokenizer_->encode(text) : tokenizer_->encode_whole(text);
        }
      }
      meet();
      const std::vector<std::int32_t> history = shared;
      meet();
      if (history.empty()) return;
      GenerateOptions options = flags_.options;
      const std::int64_t room = plan_.model.max_seq - std::ssize(history);
      if (room < 1) {
        if (leads)
          fmt::print(stderr, "echelon: the conversation fills the {} positions of {}, and ends here\n",
                     plan_.model.max_seq, plan_.model.name);
        return;
      }
      options.max_tokens = std::min(options.max_tokens, room);
      std::string answer;
      run(rank, parameters, biases, history, options, stops, [&](std::int32_t, const std::string& piece) {
        answer += piece;
        if (!leads) return;
        std::fwrite(piece.data(), 1, piece.size(), stdout);
        std::fflush(stdout);
      });
      if (leads) fmt::print("\n");
      messages.push_back({{"role", "assistant"}, {"content", answer}});
    }
  }

 private:
  const GenerateFlags& flags_;
  const Plan& plan_;
  std::shared_ptr<const Tokenizer> tokenizer_;
};

// What all ranks of the flags' mesh hold together; one sequence for each data-parallel rank.
Plan generate_plan(const GenerateFlags& f, const CheckpointInfo& info) {
  Plan plan;
  plan.model = info.model;
  plan.precision = recipe_of_weights(f.dtype.empty() ? info.dtype : parse_dtype(f.dtype, "--dtype"));
  for (const char* name : mesh_flags)
    if (is_given(*f.app, "--" + std::string(name)))
      read_text(*find_field(name), plan, f.mesh.at(name), "--" + std::string(name));
  plan.global_batch = plan.mesh.size(Axis::dp);
  check_with_remedies(plan, [&](const Plan& asked, const std::string& also_given) {
    validate(asked.mesh);
    const Remedy one = remedy("dp", 1);
    refuse_idle(*f.app, {{"--dp", !f.chat || asked.mesh.size(Axis::dp) == 1, "with --chat", {one}}},
                also_given);
    check_whole(asked);
  });
  return plan;
}

std::shared_ptr<const ChatTemplate> template_of(const GenerateFlags& f, const CheckpointInfo& info) {
  auto chat = f.chat_format.empty() ? chat_template_beside(info.path)
                                    : chat_template_named(f.chat_format, "--chat-format");
  if (f.system.empty()) return chat;
  try {
    using nlohmann::json;
    chat->render(
        json::array({{{"role", "system"}, {"content", f.system}}, {{"role", "user"}, {"content", ""}}}), true,
        time_here());
  } catch (const RequestError& error) {
    refuse("--system: {}; legal: to say it in the first turn", error.what());
  }
  return chat;
}

// Loads the weights on every rank, and runs `work` there.
template <class Work>
void on_ranks(const GenerateFlags& f, std::chrono::milliseconds timeout, const std::function<void()>& on_load,
              const Work& work) {
  const int ranks = f.plan.mesh.num_ranks();
  if (!f.run_options.driver) prepare_kernels(f.plan.precision);
  ThreadWorld world(ranks, timeout);
  const auto body = [&](int index) {
    Arena arena(f.run_options.driver.get(), f.run_options.device_of(index));
    const auto kernels = make_kernels(arena, f.plan.precision, f.run_options.threads_per_rank);
    const Rank rank(world, f.plan.mesh, index, f.plan.precision, arena, *kernels);
    const ParameterStore parameters(rank, f.plan, PipelineLayout(f.plan), f.info.seed, {}, Moments::elsewhere,
                                    FirstValues::read);
    const RouterBiases biases = load_checkpoint(rank, parameters, f.info, true);
    if (index == 0 && on_load) on_load();
    work(rank, parameters, biases);
  };
  run_ranks(world, naming_lost_ranks(f.run_options, ranks, body));
}

}  // namespace

void GenerateFlags::read() {
  GenerateFlags& f = *this;
  validate(f.options);
  refuse_idle(*f.app, generate_needs(f));
  if (f.checkpoint.empty())
    refuse("--checkpoint: no path is given; give a directory of checkpoints, or one of them");
  held.emplace(f.checkpoint);
  info = read_checkpoint_info(held->path());
  const bool text_mode = f.prompt_tokens.empty();
  for (const std::string& stop : f.stops)
    if (stop.empty()) refuse("--stop: an empty text is everywhere; legal: some text");
  if (text_mode) {
    tokenizer = tokenizer_of(info);
    if (tokenizer == nullptr)
      refuse(
          "{}: text would be read as bytes, but {} was trained with another tokenizer; legal: "
          "--prompt-tokens ID,ID,... with its ids, 0 to {}",
          f.chat ? "--chat" : "--prompt", info.path, info.model.vocab - 1);
  } else if (!f.stops.empty()) {
    refuse("--stop: with --prompt-tokens no text is made; legal: --stop with --prompt");
  }
  const TokenizerFiles files = info.tokenizer != nullptr ? *info.tokenizer : TokenizerFiles();
  const TextBounds bounds = text_bounds(files, info.path);
  f.options.stop_tokens = text_mode ? ends_of_texts(*tokenizer, files) : bounds.ends;
  for (const std::string& stop : f.stops) add_token_of(*tokenizer, stop, f.options.stop_tokens);
  if (f.chat) {
    chat_template = template_of(f, info);
    add_token_of(*tokenizer, stripped(chat_template->answer_end(), "", true, true), f.options.stop_tokens);
  }
  if (!f.prompts_file.empty()) f.prompts = read_prompts(f.prompts_file);
  if (f.prompts.empty()) f.prompts.emplace_back();
  for (const std::string& prompt : f.prompts) {
    if (f.chat) break;
    GeneratedText& one = texts.emplace_back();
    one.prompt_tokens = f.prompt_tokens;
    if (!text_mode) continue;
    one.prompt = prompt;
    one.prompt_tokens = tokenizer->encode_whole(prompt);
    // Where a document begins: after its first token, or after the end of the one before.
    const auto begin = bounds.begin ? bounds.begin : tokenizer->end_of_text();
    if (one.prompt_tokens.empty() && !begin)
      refuse("--prompt: {} makes no token of it; legal: some text", tokenizer->name());
    if (one.prompt_tokens.empty()) one.prompt_tokens.push_back(*begin);
  }
  plan = generate_plan(f, info);
  if (const int ranks = f.plan.mesh.size(Axis::dp); !f.chat && ranks > std::ssize(f.prompts))
    refuse("--dp {}: each of its ranks continues prompts of its own, and here {} {}; legal: up to {}", ranks,
           f.prompts.size() == 1 ? "is" : "are", counted(std::ssize(f.prompts), "prompt"), f.prompts.size());
  run_options = f.run.options(plan);
  for (const GeneratedText& one : texts)
    validate(is_given(*f.app, "--max-tokens") ? f.options : that_fit(f.options, plan.model, one), plan.model,
             one.prompt_tokens);
  refuse_on_device(plan, run_options);
  refuse_beyond_memory(plan, plan.mesh.num_ranks() * predicted_bytes(plan), run_options);
}

void generate_texts(GenerateFlags& f, const GenerateObserver& observer) {
  const Generation generation(f);
  on_ranks(f, f.run_options.timeout, observer.on_load,
           [&](const Rank& rank, const ParameterStore& parameters, const RouterBiases& biases) {
             generation.texts(rank, parameters, biases, observer, f.texts);
           });
}

void hold_conversation(const GenerateFlags& f, const std::function<void()>& on_load) {
  // Users may take long to write.
  constexpr std::chrono::hours days(24 * 30);
  const Generation generation(f);
  std::vector<std::int32_t> shared;
  on_ranks(f, days, on_load,
           [&](const Rank& rank, const ParameterStore& parameters, const RouterBiases& biases) {
             generation.chat(rank, parameters, biases, *f.chat_template, shared);
           });
}

namespace {

int run_generate(GenerateFlags& f) {
  f.read();
  ProgressLine line("generate", f.json);
  report(line.progress(), -1, "loading " + f.info.path);
  const auto clear = [&] { line.clear(); };
  if (f.chat) {
    hold_conversation(f, clear);
    return 0;
  }
  std::FILE* const out = f.json ? stderr : stdout;
  const auto show = [&](const std::string& text) {
    std::fwrite(text.data(), 1, text.size(), out);
    std::fflush(out);
  };
  // If several ranks generate at once, whole texts are shown at the end.
  const bool streams = f.plan.mesh.size(Axis::dp) == 1;
  std::size_t begun = 0;
  GenerateObserver observer{clear, {}, {}};
  observer.on_piece = [&](std::size_t index, const std::string& piece) {
    if (!streams) return;
    if (begun == index) show((begun++ > 0 ? "\n" : "") + f.texts[index].prompt);
    show(piece);
  };
  generate_texts(f, observer);
  if (streams) show("\n");
  for (const GeneratedText& one : f.texts)
    if (!streams) show(one.prompt + one.text + "\n");
  if (f.json) {
    const bool has_text = f.tokenizer != nullptr;
    const auto object = [&](const GeneratedText& one) {
      nlohmann::ordered_json text{{"prompt_tokens", one.prompt_tokens}, {"tokens", one.tokens}};
      if (has_text) text["text"] = one.text;
      return text;
    };
    nlohmann::ordered_json report{{"checkpoint", f.info.path}, {"step", f.info.step}};
    if (f.texts.size() == 1)
      report.update(object(f.texts.front()));
    else
      for (const GeneratedText& one : f.texts) report["texts"].push_back(object(one));
    // A model of bytes may end within a character; programs then get the replacement character.
    fmt::print("{}\n", json_text(report));
  }
  return 0;
}

}  // namespace

void add_generate_flags(CLI::App& app, const std::shared_ptr<GenerateFlags>& flags) {
  flags->app = &app;
  heading(app, common_flags);
  app.add_option("--checkpoint", flags->checkpoint,
                 "Directory of checkpoints (the last is used), or one of them (required)")
      ->type_name("DIR");
  auto* prompt = app.add_option("--prompt", flags->prompts,
                                "Text to continue, read by the checkpoint's tokenizer; may be given again")
                     ->type_name("TEXT")
                     ->allow_extra_args(false);
  auto* prompts = app.add_option("--prompts", flags->prompts_file, "File with a prompt in each line")
                      ->type_name("FILE")
                      ->excludes(prompt);
  app.add_option_function<std::vector<std::string>>(
         "--prompt-tokens",
         [flags](const std::vector<std::string>& lists) {
           for (const std::string& list : lists)
             for (const std::string& token : split(list, ","))
               flags->prompt_tokens.push_back(parse_number<std::int32_t>("--prompt-tokens", token));
         },
         "Token ids to continue, for models of token files")
      ->type_name("N")
      ->excludes(prompt)
      ->excludes(prompts);
  add_number(app, "--max-tokens", flags->options.max_tokens, "Most tokens to generate");
  app.add_option("--stop", flags->stops,
                 "Text that ends what is generated, and is not written; may be given again")
      ->type_name("TEXT")
      ->allow_extra_args(false);
  app.add_flag("--json", flags->json, "Tokens and text as one JSON object on standard output");
  heading(app, "Conversation");
  app.add_flag(
      "--chat", flags->chat,
      "Keep a conversation: a turn for each line of standard input, in the format of the tokenizer's "
      "chat template");
  app.add_option("--chat-format", flags->chat_format, "The format, by name")
      ->type_name("chatml|llama3|gemma");
  app.add_option("--system", flags->system, "What the conversation begins with")->type_name("TEXT");
  heading(app, "Sampling");
  add_number(app, "--temperature", flags->options.temperature, "0: always the most likely token");
  add_number(app, "--top-k", flags->options.top_k, "Sample among the k most likely tokens; 0: all");
  add_number(app, "--top-p", flags->options.top_p,
             "Sample among the fewest most likely tokens that have this probability together");
  add_number(app, "--seed", flags->options.seed,
             "Seed of the sampling; of several prompts each has the next one");
  heading(app, "Running");
  for (const char* name : mesh_flags) add_field(app, *find_field(name), flags->mesh, "1");
  app.add_option("--dtype", flags->dtype,
                 "Type that weights are rounded to and texts are computed in (default: the checkpoint's)")
      ->type_name("f32|bf16|f64");
  flags->run.add_threads_to(app);
}

void add_generate(CLI::App& program, int& status) {
  auto flags = std::make_shared<GenerateFlags>();
  CLI::App& app = *program.add_subcommand("generate", "Sample text from a checkpoint");
  add_generate_flags(app, flags);
  app.callback([flags, &status] {
    try {
      status = run_generate(*flags);
    } catch (const NotFinite& error) {  // the checkpoint was read, and this is the answer
      fmt::print(stderr, "echelon: {}\n", error.what());
      status = 1;
    }
  });
}

}  // namespace echelon
