// The list of a plan's fields: each goes through files and flags and comes back, and what it refuses names a
// value that is then accepted.
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "apps/flags.h"
#include "apps/plan_field_flags.h"
#include "apps/plan_flags.h"
#include "base/error.h"
#include "refusals.h"
#include "schedule/pipeline_layout.h"
#include "spec/plan_fields.h"

namespace echelon::plan_fields_test {
namespace {

using checks::expect_refusal;

Plan mixture() {
  Plan plan;
  plan.model = load_model("mixtral-tiny");
  plan.global_batch = 8;
  plan.seq_len = 64;
  return plan;
}

std::vector<std::string> parts_of(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, separator);) parts.push_back(part);
  return parts;
}

// Values of all kinds that the field has; which of them go together is another question.
std::vector<std::string> values_of(const PlanField& field) {
  static const std::map<std::string, std::vector<std::string>> own{
      {"model", {"gpt2-tiny", "llama-tiny"}},
      {"schedule", {"zb-v", "gpipe"}},
      {"lora", {"none", "rank=4,alpha=8", "rank=2,alpha=0.5,targets=q_proj,self_attn.o_proj"}},
      {"freeze", {"none", "*norm*", "*.q_proj.weight,model.layers.[01].*"}},
      {"layers-per-stage", {"auto", "1,3", "4"}},
      {"recompute", {"none", "selective", "full", "attention,mlp_in", "full/mlp_in/none"}},
      {"compress", {"none", "int8", "topk:0.25", "powersgd:3:7"}}};
  if (const auto found = own.find(field.name()); found != own.end()) return found->second;
  if (field.values().find('|') != std::string::npos) return parts_of(field.values(), '|');
  if (field.values() == "BYTES") return {"1", "3KiB", "7MiB", "1GiB"};
  if (field.values() == "X") return {"0", "0.1", "1e-05", "1000000"};
  if (field.is_number()) return {fmt::format("{}", field.least + 1), fmt::format("{:.0f}", field.most)};
  return {"some where", "a \"quoted\" \\ text"};
}

TEST(PlanFields, ComeBackFromFiles) {
  std::set<std::string> keys;
  for (const PlanField& field : plan_fields()) {
    EXPECT_TRUE(keys.insert(field.key).second) << field.key;
    for (const std::string& value : values_of(field)) {
      SCOPED_TRACE(std::string(field.key) + " " + value);
      Plan plan = mixture();
      read_text(field, plan, value, "it");
      EXPECT_EQ(text_of(field, plan), value);
      const Plan read = plan_from_toml(to_toml(plan), "plan.toml");
      for (const PlanField& other : plan_fields())
        EXPECT_EQ(text_of(other, read), text_of(other, plan)) << other.key;
      EXPECT_EQ(to_toml(read), to_toml(plan));
    }
  }
}

TEST(PlanFields, ComeBackFromFlags) {
  CLI::App train_app, plan_app, app;
  PlanFlags train_flags;
  train_flags.add_to(train_app, mixture());
  PlanSearchFlags plan_flags;
  plan_flags.add_to(plan_app);
  std::map<std::string, std::string> given;
  for (const PlanField& field : plan_fields()) {
    if (field.use == FieldUse::file) continue;
    EXPECT_EQ(train_app.get_option_no_throw(field.flag()) != nullptr, field.is_flag_of_train()) << field.key;
    EXPECT_TRUE(!field.is_flag_of_plan() || plan_app.get_option_no_throw(field.flag()) != nullptr)
        << field.key;
    EXPECT_EQ(find_field(field.name()), &field) << "two have this flag";
    add_field(app, field, given, "");
  }
  for (const PlanField& field : plan_fields()) {
    for (const std::string& value :
         field.use == FieldUse::file ? std::vector<std::string>{} : values_of(field)) {
      SCOPED_TRACE(field.flag() + " " + value);
      app.parse(std::vector<std::string>{value, field.flag()});  // CLI11 takes the last first
      Plan plan = mixture();
      read_field(field, plan, given.at(field.name()), field.flag());
      EXPECT_EQ(text_of(field, plan), value);
    }
  }
}

// As train says it; "" where the value is accepted.
std::string refusal_of(const PlanField& field, const std::string& value) {
  Plan plan = mixture();
  try {
    read_text(field, plan, value, field.flag());
    check_with_remedies(plan, [](const Plan& one, const std::string&) { check_whole(one); });
    return "";
  } catch (const RequestError& error) {
    return error.what();
  }
}

// The first value that a sentence names.
std::string legal_value(const std::string& sentence) {
  for (const std::string words :
       {"legal: up to ", "legal: ", "such as ", "positions for ", "tokens ", "of at least ", "from "})
    if (const auto at = sentence.find(words); at != std::string::npos) {
      const std::string rest = sentence.substr(at + words.size());
      return rest.substr(0, rest.find_first_of(" ,;:"));
    }
  return "no legal value";
}

TEST(PlanFields, RefuseWithAValueThatIsAccepted) {
  std::set<std::string> tried;
  for (const PlanField& field : plan_fields()) {
    if (field.use == FieldUse::file || field.name() == "model") continue;
    std::vector<std::string> illegal;
    if (field.values() == "BYTES") {
      illegal = {"0", "-1", "many"};
    } else if (field.is_number()) {
      illegal = {fmt::format("{}", field.least - 1), fmt::format("{:.0f}", field.most + 1)};
      if (field.values() == "X") illegal.push_back("nan");
    } else if (field.values() != "DIR" && field.name() != "layers-per-stage") {
      illegal = {"nonsense"};
    }
    for (const std::string& value : illegal) {
      const std::string sentence = refusal_of(field, value);
      SCOPED_TRACE(sentence);
      EXPECT_TRUE(sentence.starts_with(field.flag() + " " + value)) << field.key << " " << value;
      if (sentence.find("too large") != std::string::npos) continue;  // for any whole number here
      EXPECT_EQ(refusal_of(field, legal_value(sentence)), "") << field.key;
      tried.insert(field.name());
    }
  }
  EXPECT_GE(tried.size(), 30u);
  // Numbers of a list.
  const PlanField& layers = *find_field("layers-per-stage");
  for (const char* value : {"1,2", "5,-1"}) {
    const std::string sentence = refusal_of(layers, value);
    EXPECT_TRUE(sentence.starts_with(std::string("--layers-per-stage ") + value)) << sentence;
    EXPECT_EQ(legal_value(sentence), "auto") << sentence;
    EXPECT_EQ(refusal_of(layers, "auto"), "");
  }
}

// What is legal by itself and not beside the others is judged with them, and so is what is called legal.
TEST(PlanFields, AreJudgedTogether) {
  Plan plan = mixture();  // 4 heads, 2 of keys and values, 8 experts
  const auto refused = [&](const auto& change, const std::vector<std::string>& words) {
    Plan changed = plan;
    change(changed);
    expect_refusal([&] { validate(changed); }, words);
  };
  refused([](Plan& p) { p.zero = 4; }, {"--zero 4: must be a number from 0 to 3; legal: 0, 1, 2, 3"});
  refused([](Plan& p) { p.zero = 4, p.hsdp = 2, p.mesh.set(Axis::dp, 4); },
          {"--zero 4: must be a number from 0 to 3; legal: 1, 2, 3"});
  refused([](Plan& p) { p.mesh.set(Axis::dp, 4), p.mesh.ep = 4, p.zero = 1, p.hsdp = 3; },
          {"--hsdp 3: the 4 data-parallel ranks do not divide into so many groups; legal: 1"});
  refused([](Plan& p) { p.mesh.set(Axis::tp, 3), p.model.vocab = 2; }, {"--tp 3", "4 heads", "legal: 1, 2"});
}

TEST(PlanFields, FilesNameTheKey) {
  const auto refused = [](const std::string& text, const std::vector<std::string>& words) {
    expect_refusal([&] { plan_from_toml("model = \"gpt2-tiny\"\n" + text, "plan.toml"); }, words);
  };
  refused("zero = 7", {"plan.toml: zero = 7", "a whole number from 0 to 3"});
  refused("zero = 1.5", {"plan.toml: zero = 1.5", "a whole number from 0 to 3"});
  refused("recompute = \"most\"", {"plan.toml: recompute most", "none, selective, full"});
  refused("sp = 1", {"plan.toml: sp = 1", "true or false"});
  refused("capacity = nan", {"plan.toml: capacity = nan", "a number from 0 to 1000000"});
  refused("[mesh]\nrows = 2", {"plan.toml", "mesh.rows", "mesh.pp"});
  refused("[priced]\nprice = 2", {"plan.toml", "priced.price", "priced.machine"});
  refused("dp = 2", {"plan.toml", "\"dp\"", "mesh"});
}

}  // namespace
}  // namespace echelon::plan_fields_test
