#include "apps/verify_flags.h"

#include <fmt/core.h>

#include <algorithm>

#include "apps/help.h"
#include "apps/progress_line.h"
#include "apps/terminal.h"
#include "base/error.h"
#include "base/units.h"
#include "train/refuse_request.h"
#include "verify/reference_run.h"

namespace echelon {
namespace {

Plan verify_defaults() {
  Plan plan;
  plan.model = load_model("gpt2-tiny");
  plan.global_batch = 4;
  plan.micro_batch = 1;
  plan.seq_len = 64;
  return plan;
}

// The mesh if none is given: the first of these that the rest of the request allows.
void choose_mesh(Plan& plan) {
  for (auto [dp, tp] : {std::pair{2, 2}, {2, 1}, {1, 2}}) {
    Plan chosen = plan;
    chosen.mesh.set(Axis::dp, dp);
    chosen.mesh.set(Axis::tp, tp);
    try {
      validate(chosen);
    } catch (const RequestError&) {
      continue;
    }
    plan = chosen;
    return;
  }
}

// Bytes on this machine: of its ranks, and of the single rank beside rank 0.
double bytes_here(const VerifyRequest& request) {
  const ProcessWorld* const processes = request.run.processes;
  const bool has_reference =
      processes == nullptr ||
      processes->nodes()[static_cast<std::size_t>(processes->rank())] == processes->nodes().front();
  return request.run.ranks_here(request.plan.mesh.num_ranks()) * predicted_bytes(request.plan) +
         (has_reference ? reference_bytes(request.plan) : 0);
}

}  // namespace

void VerifyFlags::read() {
  VerifyFlags& f = *this;
  if (!f.staleness.empty())
    refuse(
        "--staleness {}: verify compares the mesh with one rank, and no rank alone computes late gradients; "
        "legal: leave it out (with --staleness 0 `train` has the bits of the run that verify then checks)",
        f.staleness);
  request.plan = f.plan.plan(nullptr, nullptr, {}, choose_mesh);
  request.run = f.job.options(f.run, request.plan);
  request.trace = f.timeline.asked();
  if (request.steps < 1) refuse("--steps {}: must be at least 1", request.steps);
  f.optimizer.finish(request.steps, request.plan);
  validate(request.optimizer);
  refuse_beyond_memory(request.plan, bytes_here(request), request.run);
  if (!f.data.empty()) {
    sampled.emplace(f.data, request.plan.model.vocab, f.reading.reading({}, {}));
    if (sampled->is_masked() && next_counted(*sampled, {1, sampled->size()}) == sampled->size())
      refuse("--data: the loss counts none of its {} tokens; legal: records with an answer", sampled->size());
    refuse_idle(*f.app, f.reading.needs(*sampled));
    if (request.plan.mask == AttentionMask::document && !is_given(*f.app, "--document-end"))
      sampled->cut_documents();
    const Split split = split_tokens(sampled->size(), 0.0, request.plan.seq_len);
    request.samples = [sampler = Sampler(*sampled, split.train, request.seed),
                       seq_len = request.plan.seq_len](std::int64_t step, std::int64_t sample,
                                                       std::int32_t* tokens, std::int32_t* targets) {
      sampler.sample(step, sample, seq_len, tokens, targets);
    };
  }
  if (f.data.empty()) refuse_idle(*f.app, DataFlags::needs_data());
  validate(request);
}

namespace {

// What is printed before the verdict.
void print_notes(std::FILE* out, const Colours& colours, const VerifyReport& r) {
  for (const RoutingDifference& d : r.routing_differences) {
    const bool choice = d.kind == "choice";
    const std::string text = fmt::format(
        "step {}: {} of {} token{} in layer {} differs: {} ({:.1e} apart, rounding allows {:.1e})\n", d.step,
        choice ? "the choice of experts" : "what experts drop at their capacity", d.tokens,
        d.tokens == 1 ? "" : "s", d.layer,
        d.ties() ? (choice ? "their scores tie within rounding; compared with the mesh's choice"
                           : "their weights tie within rounding; compared with what the mesh dropped")
                 : (choice ? "their scores do not tie" : "their weights do not tie"),
        d.shift, d.allowed);
    fmt::print(out, "{}", colours(d.ties() ? Tint::faint : Tint::bad, text));
  }
  if (r.judged > 0)
    fmt::print(out,
               "{} comparison{} beyond the bound held to {:.0f} times what rounding does "
               "to these "
               "numbers: {} of {} at step {} comes nearest, with {:.0f}% of that\n",
               r.judged, r.judged == 1 ? "" : "s", rounding_multiple, r.worst_judged.kind,
               r.worst_judged.tensor, r.worst_judged.step, 100 * r.worst_judged.rel_diff);
  if (!r.hidden.empty()) {
    const Difference& d = r.hidden.front();
    const auto steps_of = [&](const Difference& other) { return other.step == d.step; };
    fmt::print(
        out,
        "{} at step {} could be rounding as a whole, that of {} first: an error there alone would not show\n",
        counted(std::count_if(r.hidden.begin(), r.hidden.end(), steps_of), "gradient"), d.step, d.tensor);
  }
}

int run_verify(VerifyFlags& f) {
  refuse_together(f.job.processes(), [&] { f.read(); });
  const std::optional<TokenData>& data = f.sampled;
  if (data) refuse_different_data(f.job.processes(), *data);
  const VerifyRequest& request = f.request;
  refuse_different_settings(f.job.processes(), request.plan, request.optimizer, request.seed,
                            {fmt::format("--collectives {}", collectives_name(request.run.collectives))});
  refuse_different_kernels(request.run, request.plan);
  std::FILE* out = f.json ? stderr : stdout;
  // Under mpirun standard output looks like a terminal wherever it goes.
  const Colours colours = f.colour.of(f.job.processes() == nullptr ? out : nullptr);
  const int columns = line_columns(f.job.processes() == nullptr ? out : nullptr);
  const auto print = [&](const std::string& text) { fmt::print(out, "{}", fitted(text, columns)); };
  if (f.job.leads() && !f.plan.gives_mesh())
    fmt::print(out, "no axis of the mesh is given: as with --dp {} --tp {}\n",
               request.plan.mesh.size(Axis::dp), request.plan.mesh.size(Axis::tp));
  if (f.job.leads())
    print(fmt::format("one rank against {}{}, {}, {} of {} of {}\n", request.plan.mesh.describe(),
                      request.plan.shards_sequence() ? ", sequence parallel" : "",
                      request.plan.precision.name, counted(request.steps, "step"),
                      counted(request.plan.global_batch, "sequence"),
                      counted(request.plan.seq_len, "token")));
  if (f.job.leads() && data) fmt::print(out, "{}", data->notes());
  const VerifyReport r = with_progress("verify", f.json, [&](const Progress& progress) {
    f.request.progress = progress;
    return verify(request);
  });
  if (!f.job.leads()) return 0;
  for (std::size_t i = 0; i < r.reference_losses.size(); ++i)
    fmt::print(out, "step {}  loss of one rank {:.9f}  of the mesh {:.9f}\n", i, r.reference_losses[i],
               r.mesh_losses[i]);
  if (!r.reference_losses.empty())
    print(fmt::format(
        "largest relative difference: loss {:.2e}, gradients {:.2e} (bound {:.2e}), parameters {:.2e} "
        "({:.0f}% of what those gradients allow)\n",
        r.loss_max_rel_diff, r.grad_max_rel_diff, r.bound, r.param_max_rel_diff, 100 * r.param_worst));
  if (r.wide && !r.reference_losses.empty())
    print(fmt::format(
        "a rank in {} from the same weights: its loss is {:.2e} from that of one rank and {:.2e} from the "
        "mesh's, its gradients {:.2e}\n",
        r.wide->precision, r.wide->loss_rel_diff, r.wide->mesh_loss_rel_diff, r.wide->grad_rel_diff));
  print_notes(out, colours, r);
  if (r.pass)
    fmt::print(out, "{}{}\n", colours(Tint::good, "PASS"), r.bitwise ? ", to the last bit" : "");
  else if (r.first_difference)
    fmt::print(out, "{}: first difference at step {}: {} of {}, {:.2e}\n", colours(Tint::bad, "FAIL"),
               r.first_difference->step, r.first_difference->kind, r.first_difference->tensor,
               r.first_difference->rel_diff);
  if (f.json) fmt::print("{}\n", to_json(r, request.plan));
  std::fflush(stdout);  // even if writing files fails
  f.timeline.write(r.simulated_timeline, r.measured_timeline, r.rank_timelines);
  if (!r.incomparable.empty()) fmt::print(stderr, "echelon: {}\n", r.incomparable);
  return r.pass ? 0 : r.incomparable.empty() ? 1 : 3;
}

}  // namespace

void add_verify_flags(CLI::App& app, const std::shared_ptr<VerifyFlags>& flags) {
  flags->app = &app;
  heading(app, common_flags);
  add_number(app, "--steps", flags->request.steps, "Steps to compare");
  app.add_flag("--json", flags->json, "Report as one JSON object on standard output");
  flags->plan.add_to(app, verify_defaults());
  OptimizerOptions& optimizer = flags->request.optimizer;
  optimizer.warmup_steps = 0;
  // Smaller gradients are rounding noise (a key bias, for example, has no gradient at all), which Adam would
  // turn into full steps.
  optimizer.eps = 1e-5;
  flags->optimizer.add_to(app, optimizer);
  heading(app, "Data");
  app.add_option("--data", flags->data, "What --data of train takes (default: random tokens)")
      ->type_name("PATH");
  flags->reading.add_to(app);
  add_number(app, "--seed", flags->request.seed, "Seed of the weights and the tokens");
  flags->run.add_to(app);
  flags->job.add_to(app);
  heading(app, "Reports");
  flags->timeline.add_to(app);
  heading(app, "Terminal");
  flags->colour.add_to(app);
  app.add_option("--staleness", flags->staleness)->group("");  // a flag of train: refused here by name
}

void add_verify(CLI::App& program, int& status) {
  auto flags = std::make_shared<VerifyFlags>();
  CLI::App& app =
      *program.add_subcommand("verify",
                              "Run one rank and the mesh side by side and compare every tensor (with no axis "
                              "given: dp 2 x tp 2)");
  add_verify_flags(app, flags);
  app.callback([flags, &status] {
    flags->timeline.check();
    flags->colour.check();
    status = flags->job.run(flags->run, [&] { return run_verify(*flags); });
  });
}

}  // namespace echelon
