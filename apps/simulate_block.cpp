#include "apps/simulate_block.h"

#include <algorithm>

#include "apps/file_kind.h"
#include "apps/flag_values.h"
#include "apps/help.h"
#include "base/error.h"
#include "base/on_off.h"
#include "base/output_file.h"
#include "draw/block.h"
#include "spec/model_spec.h"
#include "spec/plan_rules.h"

namespace echelon {
namespace {

const std::vector<std::string> own_flags{"--tp", "--sp", "--recompute"};

}  // namespace

void BlockFlags::add_to(CLI::App& app) {
  app_ = &app;
  heading(app, "Blocks of a model (with --block and --model)");
  app.add_option(
         "--block", out_,
         "Draw the model's blocks as an SVG: ops, values, where they lie, what the backward pass keeps")
      ->type_name("FILE");
  add_number(app, "--tp", tp_, "Tensor-parallel ranks");
  app.add_option("--sp", sequence_parallel_, "Sequence parallelism (default: on where tp > 1)")
      ->type_name("on|off");
  app.add_option("--recompute", recompute_, "What the backward pass recomputes, as train's")
      ->type_name("none|selective|full|OP,...")
      ->capture_default_str();
}

void BlockFlags::refuse_strangers() const {
  for (const CLI::Option* option : app_->get_options()) {
    const std::string name = option->get_name();
    if (option->count() == 0 || name == "--block" || name == "--help") continue;
    const bool is_mine = contains(own_flags, name) || name == "--model";
    if (is_asked() && !is_mine)
      refuse("{}: is of another simulation, and --block draws the blocks of a model; drop one", name);
    if (!is_asked() && contains(own_flags, name))
      refuse("{}: is of a drawing of a model's blocks; add --block FILE", name);
  }
}

void BlockFlags::draw() const {
  if (app_->get_option("--model")->count() == 0) refuse("--block {}: of which model? Add --model NAME", out_);
  const ModelSpec model = load_model(app_->get_option("--model")->as<std::string>());
  Plan plan;
  plan.model = model;
  plan.seq_len = std::min(plan.seq_len, model.max_seq);
  plan.mesh.set(Axis::tp, tp_);
  validate(plan.mesh);
  if (const auto refusal = shape_refusal(plan, this_trainer); refusal && refusal->field == "tp")
    throw PlanRefusal(plan, *refusal);
  const bool shards_sequence =
      sequence_parallel_.empty() ? tp_ > 1 : parse_on_or_off("--sp", sequence_parallel_);
  if (shards_sequence && tp_ == 1)
    refuse("--sp on: has no ranks to cut the sequence over, with --tp 1; legal: --tp 2 or more, or --sp off");
  check_kind("--block", out_, {"an SVG", ".svg"});
  BlockSetting setting{tp_, shards_sequence, parse_recompute(recompute_, "--recompute")};
  if (const std::string stranger = not_in_model(setting.recompute, model); !stranger.empty())
    refuse("--recompute {}: no layer of {} has an op {}", recompute_, model.name, stranger);
  check_output("--block", out_);
  write_output("--block", out_, block_svg(block_drawings(model), setting));
}

}  // namespace echelon
