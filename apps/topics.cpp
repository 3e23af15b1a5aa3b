#include "apps/topics.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <functional>
#include <memory>
#include <sstream>
#include <system_error>
#include <utility>

#include "apps/flag_values.h"
#include "apps/help.h"
#include "apps/text_rows.h"
#include "base/edits.h"
#include "base/error.h"
#include "base/units.h"
#include "schedule/schedules.h"
#include "spec/embedded.h"
#include "spec/machine.h"
#include "spec/model_spec.h"
#include "spec/software.h"

namespace echelon {

extern const EmbeddedFile embedded_documents[];
extern const std::size_t num_embedded_documents;

namespace {

std::string models() {
  std::vector<TextRow> rows{{"preset", "parameters", "layers", "hidden", "vocabulary"}};
  for (const std::string& name : model_preset_names()) {
    const ModelSpec m = load_model(name);
    rows.push_back({name, format_count(static_cast<double>(num_parameters(m))), std::to_string(m.num_layers),
                    std::to_string(m.hidden), std::to_string(m.vocab)});
  }
  return aligned(rows);
}

std::string machines() {
  std::vector<TextRow> rows{{"preset", "memory", "bf16 TFLOP/s", "in a node"}};
  for (const std::string& name : machine_preset_names()) {
    const Machine m = load_machine(name);
    rows.push_back({name, format_device_memory(m.memory_bytes),
                    fmt::format("{:.0f}", m.peak(Precision::bf16) / 1e12), std::to_string(m.node())});
  }
  return aligned(rows) + fmt::format("\nsoftware: {}\n", fmt::join(software_preset_names(), ", "));
}

std::string schedules() { return fmt::format("schedules: {}\n", fmt::join(schedule_names(), ", ")); }

struct Topic {
  std::vector<std::string> names;  // the first is shown, the others are accepted
  std::string about;
  std::string document;               // docs/NAME.md
  std::vector<std::string> headings;  // whose flags belong to the topic, in any verb
  std::vector<std::string> flags{};   // additional flags, or those of one verb: "train --from"
  std::string (*presets)() = nullptr;
  const char* beginning = nullptr;  // instead of the document's
};

// Text of Markdown without its marks: links become their text.
std::string plain(const std::string& markdown) {
  std::string out;
  bool is_code = false;
  for (std::size_t i = 0; i < markdown.size(); ++i) {
    const char c = markdown[i];
    is_code = is_code != (c == '`');
    if (is_code && c != '`')
      out += c;
    else if (c == ']' && i + 1 < markdown.size() && markdown[i + 1] == '(')
      i = std::min(markdown.find(')', i), markdown.size());
    else if (c != '[' && c != ']' && c != '`')
      out += c;
  }
  return out;
}

struct Opening {
  std::string title, paragraph;
};

// A document's title, and its first paragraph that is not a table, picture or code.
Opening opening_of(const std::string& document) {
  Opening opening;
  for (std::size_t i = 0; i < num_embedded_documents; ++i) {
    if (document != embedded_documents[i].name) continue;
    std::istringstream lines(embedded_documents[i].text);
    bool is_code = false;
    for (std::string line; std::getline(lines, line);) {
      if (line.starts_with("```")) is_code = !is_code;
      const bool is_prose = !line.empty() && !is_code &&
                            std::string("#|!").find(line[0]) == std::string::npos && !line.starts_with("```");
      if (line.starts_with("# ")) opening.title = plain(line.substr(2));
      if (is_prose) opening.paragraph += line + " ";
      if (line.empty() && !opening.paragraph.empty()) break;
    }
  }
  check(!opening.paragraph.empty(), "a topic without a document");
  opening.paragraph = plain(opening.paragraph);
  opening.paragraph.pop_back();
  if (opening.paragraph.ends_with(':')) opening.paragraph.back() = '.';  // what follows is not shown
  return opening;
}

const std::vector<Topic>& topics() {
  static const std::vector<Topic> all = [] {
    std::vector<Topic> list{
        {{"parallelism", "mesh", "dp", "tp", "sp"},
         "the mesh; data, tensor and sequence parallelism",
         "parallelism",
         {},
         {"dp", "tp", "pp", "cp", "ep", "sp"}},
        {{"zero", "fsdp", "hsdp", "offload"},
         "sharded data parallelism, offload",
         "zero",
         {"Sharded data parallelism"}},
        {{"context", "cp", "ring", "ulysses"},
         "sequences cut over ranks",
         "context",
         {"Sequence and context parallelism"}},
        {{"pipeline", "pp", "schedules", "schedule"},
         "pipeline parallelism and its schedules",
         "schedules",
         {"Pipeline", "Schedule", "Costs"},
         {},
         schedules},
        {{"experts", "moe", "ep"},
         "mixtures of experts",
         "experts",
         {"Mixture of experts", "Mixture of experts (with --moe)"}},
        {{"asynchronous", "async", "staleness"}, "parameter servers", "async", {"Asynchronous training"}},
        {{"compression"}, "smaller gradients", "compression", {}, {"compress"}},
        {{"collectives"}, "how ranks exchange tensors", "collectives", {}, {"collectives"}},
        {{"models", "model", "presets", "families"},
         "presets of models, and families",
         "families",
         {},
         {"model"},
         models,
         "--model names a preset, a directory in Hugging Face's layout, or a TOML file like those of the "
         "presets (share/echelon/configs/models)."},
        {{"blocks"},
         "the ops of a layer, and their drawing",
         "blocks",
         {"Blocks of a model (with --block and --model)"}},
        {{"data", "tokenizers", "tokens"},
         "text, records, tokens",
         "data",
         {"Data and evaluation", "Data"},
         {"data"}},
        {{"optimizer", "adamw", "lr"},
         "AdamW, its schedule, and when it steps",
         "optimizer_steps",
         {"Optimizer"},
         {"lr"}},
        {{"precision", "memory", "recompute", "bf16"},
         "what numbers are kept in, and what is recomputed",
         "precision",
         {"Precision and memory"}},
        {{"fine-tuning", "lora"},
         "training less than a whole model",
         "fine_tuning",
         {"Fine-tuning"},
         {"train --from"}},
        {{"checkpoints", "resume"},
         "saving, and going on",
         "checkpoints",
         {"Checkpoints"},
         {"checkpoint", "resume"}},
        {{"cluster", "mpi", "slurm", "hosts", "processes", "failures", "restarts"},
         "processes, hosts, failures",
         "cluster",
         {"Running"}},
        {{"verification"}, "a mesh beside one rank", "verify", {}},
        {{"planning"},
         "the search for a plan, and the life of a run",
         "planning",
         {"What is planned for", "The life of a run"}},
        {{"machines", "machine", "software", "gpus"},
         "presets of machines, and one's own",
         "planning",
         {},
         {"machine", "software"},
         machines,
         "--machine names a preset, or a TOML file: one of your own, or what echelon calibrate measured "
         "here. --software is the training program that a plan is for."},
        {{"devices", "device", "cuda", "nvidia"},
         "what computes, and CUDA",
         "devices",
         {},
         {"device", "cuda-graphs"}},
        {{"predictions", "reports", "report", "logs", "log", "pages", "traffic"},
         "what is predicted, and measured",
         "predictions",
         {"Reports"},
         {"dry-run"}},
        {{"performance"}, "speeds, and how they are measured", "performance", {}},
        {{"library"}, "programs of your own", "library", {}},
        {{"python", "pip", "notebook"}, "echelon in Python", "python", {}},
        {{"invariance", "numerics", "determinism"},
         "the same bits on every mesh, and silent corruption",
         "invariance",
         {"Silent corruption"},
         {"numerics", "fingerprint"}},
        {{"coming-from", "coming_from", "megatron", "torchtitan", "deepspeed", "nanotron"},
         "other programs' settings beside ours",
         "coming_from",
         {}},
        {{"extending"}, "adding a model, machine, schedule, op", "extending", {}},
    };
    // A document that belongs to no topic is a topic itself.
    for (std::size_t i = 0; i < num_embedded_documents; ++i) {
      const std::string name = embedded_documents[i].name;
      if (std::none_of(list.begin(), list.end(), [&](const Topic& topic) { return topic.document == name; }))
        list.push_back({{name}, opening_of(name).title, name, {}});
    }
    return list;
  }();
  return all;
}

// Where to read it: in the installed or built tree, else its path in the source.
std::string place_of(const std::string& document) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::path binary = fs::read_symlink("/proc/self/exe", error);
  for (const char* up : {"../share/echelon/docs", "../../docs"})
    if (const fs::path path = (binary.parent_path() / up / (document + ".md")).lexically_normal();
        fs::exists(path, error))
      return path.string();
  return "docs/" + document + ".md";
}

std::vector<const CLI::App*> verbs_of(const CLI::App& app) {
  std::vector<const CLI::App*> all;
  for (const CLI::App* verb : app.get_subcommands([](const CLI::App*) { return true; }))
    if (!verb->get_group().empty()) all.push_back(verb);
  return all;
}

// Lists each flag once, under the verbs that have it with the same text.
struct SharedFlag {
  const CLI::Option* option;
  std::vector<std::string> verbs;
};

std::vector<SharedFlag> flags_of(const Topic& topic, const CLI::App& program) {
  std::vector<SharedFlag> flags;
  const auto see = [&](const CLI::App& verb, const std::string& name) {
    for (const CLI::Option* option : verb.get_options()) {
      if (option->get_lnames().empty() || option->get_positional()) continue;
      const auto same = std::find_if(flags.begin(), flags.end(), [&](const SharedFlag& flag) {
        return flag.option->get_name() == option->get_name() &&
               flag.option->get_description() == option->get_description();
      });
      if (same != flags.end())
        same->verbs.push_back(name);
      else if (contains(topic.headings, option->get_group()) ||
               contains(topic.flags, option->get_lnames().front()) ||
               contains(topic.flags, name + " --" + option->get_lnames().front()))
        flags.push_back({option, {name}});
    }
  };
  for (const CLI::App* verb : verbs_of(program)) {
    see(*verb, verb->get_name());
    for (const CLI::App* inner : verbs_of(*verb)) see(*inner, verb->get_name() + " " + inner->get_name());
  }
  return flags;
}

std::string about(const Topic& topic, const CLI::App& program, int columns) {
  const Opening opening = opening_of(topic.document);
  const std::string beginning = topic.beginning != nullptr ? topic.beginning : opening.paragraph;
  std::string title = topic.beginning != nullptr ? topic.about : opening.title;
  title[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(title[0])));
  std::string text = title + "\n\n" + in_lines(beginning, 0, columns) + "\n";
  if (topic.presets != nullptr) {
    std::istringstream lines(topic.presets());
    text += "\n";
    for (std::string line; std::getline(lines, line);)  // tables are narrow
      text += (line.size() > static_cast<std::size_t>(columns) ? in_lines(line, 0, columns) : line) + "\n";
  }
  std::vector<std::pair<std::vector<std::string>, std::string>> groups;  // by the verbs that share them
  for (const SharedFlag& flag : flags_of(topic, program)) {
    auto group =
        std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.first == flag.verbs; });
    if (group == groups.end()) group = groups.insert(groups.end(), {flag.verbs, ""});
    group->second += help_of(*flag.option);
  }
  for (const auto& [verbs, flags] : groups)
    text += "\n" + in_lines(fmt::format("Flags of {}:", fmt::join(verbs, ", ")), 0, columns) + "\n" + flags;
  return text + "\nMore: " + place_of(topic.document) + "\n";
}

std::string all_topics(int columns) {
  std::string text = "Topics (echelon help TOPIC):\n";
  for (const Topic& topic : topics()) text += help_line(topic.names.front(), topic.about, columns);
  return text;
}

}  // namespace

std::vector<std::string> topic_names() {
  std::vector<std::string> names;
  for (const Topic& topic : topics()) names.push_back(topic.names.front());
  return names;
}

void add_help(CLI::App& program) {
  CLI::App& app = *program.add_subcommand("help", "Explain a topic or a verb; alone: list the topics");
  heading(app, common_flags);
  app.add_option_function<std::string>(
         "topic", [](const std::string&) {}, "A topic, or a verb")
      ->type_name("TOPIC");
}

std::string help_on(const CLI::App& program, const std::vector<std::string>& words, int columns) {
  if (words.empty()) return program.help() + all_topics(columns);
  std::vector<std::string> known;
  for (const Topic& topic : topics()) {
    if (words.size() == 1 && contains(topic.names, words.front())) return about(topic, program, columns);
    known.insert(known.end(), topic.names.begin(), topic.names.end());
  }
  const CLI::App* app = &program;
  for (const std::string& word : words) {
    const CLI::App* next = nullptr;
    std::vector<std::string> names = app == &program ? known : std::vector<std::string>{};
    for (const CLI::App* verb : verbs_of(*app)) {
      names.push_back(verb->get_name());
      if (verb->get_name() == word) next = verb;
    }
    if (next == nullptr)
      refuse("help {}: no such topic or verb{}; echelon help lists them", fmt::join(words, " "),
             did_you_mean(word, names));
    app = next;
  }
  std::string before = "echelon";
  for (std::size_t i = 0; i + 1 < words.size(); ++i) before += " " + words[i];
  return app->help(before);
}

}  // namespace echelon
