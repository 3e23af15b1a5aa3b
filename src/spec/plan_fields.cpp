#include "spec/plan_fields.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <sstream>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "base/on_off.h"
#include "base/parse_number.h"
#include "base/units.h"
#include "spec/choices.h"

namespace echelon {
namespace {

template <auto... Path>
auto& at(Plan& plan) {
  return (plan.*....*Path);
}
template <Axis axis>
int& axis_size(Plan& plan) {
  return plan.mesh.sizes[static_cast<std::size_t>(axis)];
}

template <auto... Path>
using ChoiceAt = std::remove_cvref_t<decltype(at<Path...>(std::declval<Plan&>()))>;
template <auto... Path>
TextMember choice() {
  using Choice = ChoiceAt<Path...>;
  return {[](const Plan& plan) -> std::string { return name_of((plan.*....*Path)); },
          [](Plan& plan, const std::string& text, const std::string& field) {
            at<Path...>(plan) = parse_choice<Choice>(text, field);
          },
          fmt::format("{}", fmt::join(choice_names<Choice>, "|"))};
}

// A member whose texts two functions write and parse.
template <auto member, auto write, auto parse>
TextMember parsed(const char* values) {
  return {[](const Plan& plan) -> std::string { return write(plan.*member); },
          [](Plan& plan, const std::string& text, const std::string& field) {
            plan.*member = parse(text, field);
          },
          values};
}

// What is trained of a model does not go with its name.
void read_model(Plan& plan, const std::string& text, const std::string&) {
  ModelSpec model = load_model(text);
  if (model.tuning == FineTuning{}) model.tuning = std::move(plan.model.tuning);
  plan.model = std::move(model);
}

std::string layers_text(const Plan& plan) {
  return plan.balance_layers ? "auto" : fmt::format("{}", fmt::join(plan.layers_per_stage, ","));
}

void read_layers(Plan& plan, const std::string& text, const std::string& field) {
  plan.balance_layers = text == "auto";
  plan.layers_per_stage.clear();
  if (plan.balance_layers || text.empty()) return;
  std::istringstream in(text + ",");
  for (std::string number; std::getline(in, number, ',');)
    plan.layers_per_stage.push_back(parse_number<std::int64_t>(field, number));
}

// A file with a schedule of one's own is another field.
void read_schedule(Plan& plan, const std::string& text, const std::string&) {
  plan.schedule = text;
  plan.schedule_text.clear();
}

// Sequences are far more than any real batch has, and few enough that a rank's microbatches can be listed.
constexpr double most_ranks = Mesh::most_ranks, most_sequences = 1e6, most_tokens = 1 << 24,
                 most_coefficient = 1e6, most_bytes = 0x1p60;

std::vector<PlanField> all_fields() {
  using enum FieldUse;
  std::vector<PlanField> all;
  const auto add = [&](const char* heading, std::vector<PlanField> fields) {
    for (PlanField& field : fields) {
      field.heading = heading;
      all.push_back(std::move(field));
    }
  };
  add(nullptr, {{"model", TextMember{[](const Plan& p) { return p.model.name; }, read_model, "NAME|DIR|FILE"},
                 "Preset, Hugging Face directory, or TOML file", both},
                {"mesh.dp", axis_size<Axis::dp>, "Data-parallel ranks", pinned, 1, most_ranks},
                {"mesh.tp", axis_size<Axis::tp>, "Tensor-parallel ranks", pinned, 1, most_ranks},
                {"mesh.pp", axis_size<Axis::pp>, "Pipeline-parallel ranks", pinned, 1, most_ranks},
                {"global-batch", at<&Plan::global_batch>, "Sequences per step, over all ranks", both, 1,
                 most_sequences},
                {"micro-batch", at<&Plan::micro_batch>, "Sequences that a rank computes at once", pinned, 1,
                 most_sequences},
                {"seq-len", at<&Plan::seq_len>, "Tokens in a sequence", both, 1, most_tokens}});
  add("Pipeline",
      {{"schedule", TextMember{[](const Plan& p) { return p.schedule; }, read_schedule, "NAME|FILE"},
        "Published schedule ({schedules}) or a file with your own", pinned},
       {"schedule-text", at<&Plan::schedule_text>, "", file},
       {"chunks", at<&Plan::chunks>, "Model chunks per pipeline rank, for interleaved", pinned, 0, 1000},
       {"layers-per-stage", TextMember{layers_text, read_layers, "N,N,...|auto"},
        "Layers of each stage, or auto: balanced by cost (default: as even as can be; plan tries both)",
        pinned},
       {"vocabulary-parallel", at<&Plan::vocabulary_parallel>,
        "on: the output layer is cut by vocabulary over all pipeline ranks (docs/schedules.md)", pinned},
       {"optimizer-barrier", at<&Plan::optimizer_barrier>,
        "off: the optimizer steps before all pipeline ranks are known to agree, and takes back what was "
        "wrong",
        train, 0, 0, "on"}});
  add("Sharded data parallelism",
      {{"zero", at<&Plan::zero>,
        "What the data-parallel ranks share out: 1 optimizer state, 2 gradients too, 3 parameters too",
        pinned, 0, 3},
       {"hsdp", at<&Plan::hsdp>, "Replicas of the groups that --zero shards over", pinned, 1, most_ranks},
       {"zero-prefetch", at<&Plan::zero_prefetch>, "Layers that --zero 3 gathers ahead of their use", train,
        0, 100'000},
       {"bucket", Bytes{at<&Plan::bucket_bytes>},
        "Smallest amount of gradients reduced together, where --zero is 0", train, 1, most_bytes},
       {"compress",
        parsed<&Plan::compression, compression_text, parse_compression>(
            "none|bf16|fp16|int8|topk:R|powersgd:R[:W]"),
        "Gradients on their way between data-parallel ranks (docs/compression.md): fewer bits, the fraction "
        "R of largest elements, or factors of rank R after W plain steps",
        both, 0, 0, "none"},
       {"offload", choice<&Plan::offload>(),
        "What to keep in a file mapped into memory, or of a device in the host's memory (plan, by default: "
        "nothing, but where no plan fits)",
        pinned},
       {"offload-dir", at<&Plan::offload_directory>,
        "Directory of that file (default: the system's temporary directory)"}});
  add("Sequence and context parallelism",
      {{"sp", at<&Plan::sequence_parallel>, "Sequence parallelism (default: on where tp > 1)", pinned},
       {"mesh.cp", axis_size<Axis::cp>, "Context-parallel ranks: each holds a part of every sequence", pinned,
        1, most_ranks},
       {"cp-kind", choice<&Plan::context_kind>(),
        "How attention reaches the keys of the other parts (docs/context.md)", pinned, 0, 0,
        "ring|ulysses|allgather"},
       {"cp-balance", choice<&Plan::context_balance>(), "Which positions a rank of the ring holds", pinned, 0,
        0, "zigzag|stripe"},
       {"cp-ulysses", at<&Plan::ulysses>, "Ranks in a group that exchanges heads, with --cp-kind hybrid",
        train, 1, most_ranks},
       {"mask", choice<&Plan::mask>(), "What a token attends to: all before it, or those of its own document",
        train},
       {"document-end", at<&Plan::document_end>,
        "Token that ends a document (default: where the data says; of ids alone the tokenizer's end of "
        "text, or the last of the bytes' and GPT-2's vocabularies)",
        train, -1, 0x1p31 - 1}});
  add("Mixture of experts",
      {{"mesh.ep", [](Plan& p) -> int& { return p.mesh.ep; },
        "Ranks that routed experts are spread over, laid over dp x cp", pinned, 1, most_ranks},
       {"mesh.etp", [](Plan& p) -> int& { return p.mesh.etp; },
        "Ranks that one expert is cut over (default: all tp ranks)", plan, 0, most_ranks},
       {"aux-loss", at<&Plan::balancing, &Balancing::expert_loss>,
        "Coefficient of the experts' balance loss (docs/experts.md)", train, 0, most_coefficient},
       {"device-loss", at<&Plan::balancing, &Balancing::device_loss>,
        "Coefficient of the balance loss over groups of experts", train, 0, most_coefficient},
       {"communication-loss", at<&Plan::balancing, &Balancing::communication_loss>,
        "Coefficient of the balance loss of what is sent to the groups", train, 0, most_coefficient},
       {"z-loss", at<&Plan::balancing, &Balancing::z_loss>, "Coefficient of the loss of large router logits",
        train, 0, most_coefficient},
       {"bias-rate", at<&Plan::balancing, &Balancing::bias_rate>,
        "Loss-free balancing: how far a step moves the bias of each expert against its load", train, 0,
        most_coefficient},
       {"balance-scope", choice<&Plan::balancing, &Balancing::scope>(),
        "Tokens over which balance losses and capacities count"},
       {"capacity", at<&Plan::balancing, &Balancing::capacity>,
        "Most tokens an expert takes, as a multiple of the even load; 0: nothing is dropped", train, 0,
        most_coefficient},
       {"drop", choice<&Plan::balancing, &Balancing::drop>(),
        "Which tokens an expert keeps at its capacity: the likeliest, or the first"}});
  add("Fine-tuning",
      {{"freeze",
        TextMember{[](const Plan& p) { return freeze_text(p.model.tuning); },
                   [](Plan& p, const std::string& text, const std::string&) {
                     p.model.tuning.freeze = parse_freeze(text);
                   },
                   "none|PATTERN,..."},
        "Parameters to leave as they are, by patterns of their names (docs/fine_tuning.md): no gradient, no "
        "optimizer state, no traffic",
        train, 0, 0, "none"},
       {"lora",
        TextMember{[](const Plan& p) { return lora_text(p.model.tuning.lora); },
                   [](Plan& p, const std::string& text, const std::string& field) {
                     p.model.tuning.lora = parse_lora(text, field);
                   },
                   "none|rank=R[,alpha=A][,targets=NAME,...]"},
        "Train low-rank adapters beside frozen matrices: those of attention, or the named ones", train, 0, 0,
        "none"}});
  add("Precision and memory",
      {{"precision", parsed<&Plan::precision, recipe_name, parse_recipe>("f32|tf32|bf16|bf16-lean|fp8|f64"),
        "What parameters and activations are kept in (docs/precision.md); f64 runs on the slow reference "
        "kernels, fp8 rounds the operands of layers' products, tf32 is on devices alone",
        train, 0, 0, "f32|bf16"},
       {"optimizer", choice<&Plan::optimizer>(),
        "muon: the matrices of layers by Muon, which has no second moments, all others by AdamW "
        "(docs/muon.md)",
        both},
       {"numerics", choice<&Plan::numerics>(),
        "invariant: the same bits on every mesh, which refuses what cannot have them (docs/invariance.md)",
        train, 0, 0, "ordinary"},
       {"recompute",
        parsed<&Plan::recompute, [](const PipelineRecompute& r) { return recompute_name(r); },
               parse_pipeline_recompute>("none|selective|full|OPS[/...]"),
        "What the backward pass recomputes instead of keeping it; OPS: a list of a layer's ops, as in "
        "norm,activation,attention (docs/parallelism.md); full*2/none*2: by pipeline rank",
        pinned}});
  add(nullptr, {{"priced.machine", at<&Plan::priced, &Priced::machine>, "", file},
                {"priced.node", at<&Plan::priced, &Priced::node>, "", file, 0, most_ranks},
                {"priced.software", at<&Plan::priced, &Priced::software>, "", file},
                {"priced.dtype", at<&Plan::priced, &Priced::dtype>, "", file}});
  return all;
}

// "25MiB": in the largest unit that it is a whole number of.
std::string bytes_text(std::int64_t bytes) {
  for (const auto& [size, unit] :
       {std::pair{std::int64_t{1} << 40, "TiB"}, {1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}})
    if (bytes > 0 && bytes % size == 0) return fmt::format("{}{}", bytes / size, unit);
  return fmt::format("{}", bytes);
}

}  // namespace

std::string PlanField::name() const {
  const std::string_view all = key;
  return std::string(all.substr(all.rfind('.') + 1));  // npos + 1 is 0
}

std::string PlanField::values() const {
  if (const auto* text = std::get_if<TextMember>(&member)) return text->values;
  if (std::holds_alternative<Bytes>(member)) return "BYTES";
  if (std::holds_alternative<bool& (*)(Plan&)>(member)) return "on|off";
  return std::holds_alternative<double& (*)(Plan&)>(member) ? "X" : is_number() ? "N" : "DIR";
}

bool PlanField::is_number() const {
  return !std::holds_alternative<bool& (*)(Plan&)>(member) &&
         !std::holds_alternative<std::string& (*)(Plan&)>(member) &&
         !std::holds_alternative<TextMember>(member);
}

const std::vector<PlanField>& plan_fields() {
  static const std::vector<PlanField> fields = all_fields();
  return fields;
}

const PlanField* find_field(std::string_view name) {
  for (const PlanField& field : plan_fields())
    if (field.use != FieldUse::file && field.name() == name) return &field;
  return nullptr;
}

std::string text_of(const PlanField& field, const Plan& plan) {
  if (const auto* bytes = std::get_if<Bytes>(&field.member))
    return bytes_text(bytes->of(const_cast<Plan&>(plan)));
  return with_value(field, plan, [](const auto& value) -> std::string {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(value)>, bool>)
      return on_or_off(value);
    else
      return fmt::format("{}", value);
  });
}

std::string text_but(std::initializer_list<std::string_view> names, const Plan& plan) {
  std::string text;
  std::size_t left_out = 0;
  for (const PlanField& field : plan_fields())
    if (std::find(names.begin(), names.end(), field.name()) != names.end())
      ++left_out;
    else
      text += text_of(field, plan) + ' ';
  check(left_out == names.size(), "what a key leaves out are fields of a plan");
  return text;
}

void read_text(const PlanField& field, Plan& plan, const std::string& text, const std::string& where) {
  std::visit(
      [&](const auto& member) {
        using Member = std::remove_cvref_t<decltype(member)>;
        if constexpr (std::is_same_v<Member, TextMember>) {
          member.read(plan, text, where);
        } else if constexpr (std::is_same_v<Member, Bytes>) {
          member.of(plan) = parse_bytes(text, where);
        } else {
          auto& value = member(plan);
          using Field = std::remove_cvref_t<decltype(value)>;
          if constexpr (std::is_same_v<Field, bool>) {
            value = parse_on_or_off(where, text);
          } else if constexpr (std::is_same_v<Field, std::string>) {
            value = text;
          } else {
            value = parse_number<Field>(where, text);
          }
        }
      },
      field.member);
}

bool is_out_of_range(const PlanField& field, const Plan& plan) {
  return field.is_number() && with_value(field, plan, [&](const auto& value) {
           if constexpr (std::is_arithmetic_v<std::remove_cvref_t<decltype(value)>>) {
             const auto number = static_cast<double>(value);
             return !(number >= field.least && number <= field.most);
           }
           return false;
         });
}

std::string range_text(const PlanField& field) {
  return field.most < most_bytes ? fmt::format("from {} to {:.0f}", field.least, field.most)
                                 : fmt::format("of at least {}", field.least);
}

}  // namespace echelon
