// Training, verify, dry runs and generation, on thread ranks.
#include <nanobind/stl/shared_ptr.h>

#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <memory>

#include "apps/generate_flags.h"
#include "apps/launched.h"
#include "apps/train_flags.h"
#include "apps/verbs.h"
#include "apps/verify_flags.h"
#include "base/error.h"
#include "base/json_text.h"
#include "base/units.h"
#include "bindings/bindings.h"
#include "bindings/words.h"
#include "checkpoint/checkpoint_size.h"
#include "plan/workload.h"
#include "train/dry_report.h"
#include "train/random_tokens.h"

namespace echelon::python {
namespace {

// Every process would run all ranks.
void refuse_processes() {
  if (launched_processes() > 1)
    refuse("--comm: ranks are threads of one process in Python, and {} processes were started; legal: one",
           launched_processes());
}

struct TrainAnswer {
  Plan plan;
  StartInfo start;
  std::vector<StepRecord> steps;
  std::map<std::int64_t, double> evaluations;
  std::vector<std::string> checkpoints;
  std::optional<std::vector<std::int32_t>> sample;
  TrainSummary summary;

  std::optional<double> final_loss() const {
    return steps.empty() ? std::optional<double>() : summary.final_loss;
  }
};

// Calls Python from rank 0's thread. The first exception ends the run after its step, and is raised then.
class Caller {
 public:
  explicit Caller(std::atomic<bool>& ends) : ends_(ends) {}
  ~Caller() {
    const nb::gil_scoped_acquire acquire;
    raised_.reset();
  }
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;

  // A function that returns what is false ends the run too; None, which those return that say nothing, does
  // not.
  template <class... Argument>
  void call(const nb::object& function, const Argument&... argument) {
    if (!function.is_valid() || function.is_none() || raised_) return;
    const nb::gil_scoped_acquire acquire;
    try {
      const nb::object answer = function(argument...);
      if (answer.is_none()) return;
      const int is_true = PyObject_IsTrue(answer.ptr());
      if (is_true < 0) throw nb::python_error();
      if (is_true == 0) ends_ = true;
    } catch (nb::python_error& error) {
      raised_.emplace(std::move(error));
      ends_ = true;
    }
  }
  void raise_again() {
    if (!raised_) return;
    nb::python_error error = std::move(*raised_);
    raised_.reset();
    throw error;
  }

 private:
  std::atomic<bool>& ends_;
  std::optional<nb::python_error> raised_;
};

struct Callbacks {
  nb::object on_step, on_start, on_evaluation, on_checkpoint;
};

// What came of the run before it, as the attribute `answer` of what is raised, where that takes one.
void keep_with(const nb::python_error& raised, TrainAnswer&& answer) {
  try {
    nb::setattr(raised.value(), "answer", nb::cast(std::move(answer)));
  } catch (const nb::python_error&) {
  }
}

TrainAnswer trained(const Words& words, const Callbacks& callbacks) {
  refuse_processes();
  CLI::App app{"", "train"};
  const auto flags = std::make_shared<TrainFlags>();
  add_train_flags(app, flags);
  read_words(app, words, not_of_train);
  flags->timeline.check();
  std::unique_ptr<TokenData> data;
  TrainAnswer answer;
  std::atomic<bool> ends = false;
  Caller caller(ends);
  TrainObserver observer;
  // Before the first step, which is when nothing would be saved.
  flags->reading_progress = observer.on_progress = [&](double, const std::string&) {
    if (ends) throw Interrupted{};
  };
  observer.on_start = [&](const StartInfo& start) {
    answer.start = start;
    caller.call(callbacks.on_start, start);
  };
  Look look;
  observer.on_step = [&](const StepRecord& record) {
    answer.steps.push_back(record);
    caller.call(callbacks.on_step, record);
    if (!flags->request.asynchronous) return;
    look();  // the workers have no common step to stop after
    if (ends) throw Interrupted{};
  };
  observer.on_evaluation = [&](std::int64_t step, double loss) {
    answer.evaluations[step] = loss;
    caller.call(callbacks.on_evaluation, std::pair(step, loss));
  };
  observer.on_checkpoint = [&](const std::string& path) {
    answer.checkpoints.push_back(path);
    caller.call(callbacks.on_checkpoint, path);
  };
  observer.on_sample = [&](const std::vector<std::int32_t>&, const std::vector<std::int32_t>& tokens) {
    answer.sample = tokens;
  };
  const auto work = [&](const Look& looks) {
    look = looks;
    data = flags->read();
    flags->request.stops_at_once = true;
    flags->request.stop_requested = [&] {
      look();
      return ends.load();
    };
    answer.plan = flags->request.plan;
    try {
      const TrainSummary& s = answer.summary = train(flags->request, *data, observer);
      flags->timeline.write(s.simulated_timeline, s.measured_timeline, s.rank_timelines);
    } catch (const Interrupted&) {
      answer.summary.stopped = true;
      if (answer.steps.empty()) return;
      answer.summary.last_step = answer.steps.back().step;
      answer.summary.final_loss = answer.steps.back().loss;
    }
  };
  try {
    run_apart_looking(work, [&] { ends = true; });
    caller.raise_again();
  } catch (nb::python_error& error) {
    keep_with(error, std::move(answer));
    throw;
  }
  return answer;
}

struct VerifyAnswer {
  Plan plan;
  VerifyReport report;
};

VerifyAnswer verified(const Words& words) {
  refuse_processes();
  CLI::App app{"", "verify"};
  const auto flags = std::make_shared<VerifyFlags>();
  add_verify_flags(app, flags);
  read_words(app, words, not_of_verify);
  flags->timeline.check();
  VerifyAnswer answer;
  run_apart([&](const Progress& progress) {
    flags->read();
    VerifyRequest& request = flags->request;
    answer.plan = request.plan;
    // Each rank looks before each sample, and one that ends takes the others with it.
    const SampleSource samples =
        request.samples ? request.samples : random_tokens(request.plan, request.seed);
    request.samples = [&](std::int64_t step, std::int64_t sample, std::int32_t* tokens,
                          std::int32_t* targets) {
      progress(-1, "");
      samples(step, sample, tokens, targets);
    };
    answer.report = verify(request);
  });
  const VerifyReport& r = answer.report;
  flags->timeline.write(r.simulated_timeline, r.measured_timeline, r.rank_timelines);
  return answer;
}

// A text of the tokenizer's, and the checkpoint that it is of.
struct Generated {
  std::string checkpoint;
  std::int64_t step = 0;
  bool is_text = false;  // otherwise of tokens alone
  GeneratedText text;
};

// A model of bytes may write half a character: a replacement character, as --json has it.
std::string as_in_json(const std::string& text) {
  return nlohmann::ordered_json::parse(json_text(text)).get<std::string>();
}

std::vector<Generated> generated(const Words& words, const nb::object& on_text) {
  CLI::App app{"", "generate"};
  const auto flags = std::make_shared<GenerateFlags>();
  add_generate_flags(app, flags);
  read_words(app, words, not_of_generate);
  std::atomic<bool> ends = false;
  Caller caller(ends);
  GenerateObserver observer;
  observer.on_piece = [&](std::size_t index, const std::string& piece) {
    if (!piece.empty()) caller.call(on_text, as_in_json(piece), index);
  };
  observer.before_token = [&] {
    if (ends) throw Interrupted{};
  };
  try {
    run_apart(
        [&] {
          flags->read();
          generate_texts(*flags, observer);
        },
        [&] { ends = true; });
  } catch (const Interrupted&) {  // a function of Python's ended it
    caller.raise_again();
  }
  std::vector<Generated> all;
  for (GeneratedText& one : flags->texts)
    all.push_back({flags->info.path, flags->info.step, flags->tokenizer != nullptr, std::move(one)});
  return all;
}

struct DryAnswer {
  Plan plan;
  PipelineLayout pipeline;
  DryJob job;
  std::int64_t memory_limit;  // of a rank, in bytes; 0: none is given
};

std::shared_ptr<DryAnswer> run_dry(const Words& words) {
  CLI::App app{"", "train"};
  const auto flags = std::make_shared<TrainFlags>();
  add_train_flags(app, flags);
  Names hidden = not_of_train;
  for (const CLI::Option* option : app.get_options())
    for (const std::string& name : option->get_lnames())
      if (!is_of_dry_run(name)) hidden.insert(name);
  read_words(app, words, hidden);
  const Plan plan = flags->read_dry();
  const std::int64_t limit = flags->limit_of_memory();
  std::shared_ptr<DryAnswer> answer;
  run_apart([&](const Progress& progress) {
    const PipelineLayout pipeline(plan);
    const DryRunOptions options = flags->dry_options(plan, pipeline);
    answer = std::make_shared<DryAnswer>(
        DryAnswer{plan, pipeline, dry_job(plan, pipeline, progress, options), limit});
  });
  return answer;
}

void bind_dry_run(nb::module_& m) {
  nb::class_<RankClass>(m, "RankClass", "Ranks that hold and send the same, and what that is.")
      .def_ro("ranks", &RankClass::ranks, "How many they are.")
      .def_ro("first", &RankClass::first, "The lowest of them.")
      .def_prop_ro(
          "memory", [](const RankClass& c) { return c.run.peak; },
          "At the peak of a step, without the kernels' scratch.")
      .def_prop_ro(
          "traffic", [](const RankClass& c) { return c.run.traffic; }, "Sent in a step.")
      .def("__repr__", [](const RankClass& c) {
        return fmt::format("<RankClass of {}: {} bytes each>", counted(c.ranks, "rank"), c.run.peak.total());
      });
  nb::class_<DryAnswer>(m, "DryRun", "What every rank of a training would hold, and send in a step.")
      .def_prop_ro("plan", [](const DryAnswer& a) { return a.plan; })
      .def_prop_ro("classes", [](const DryAnswer& a) { return a.job.classes; })
      .def(
          "memory",
          [](const DryAnswer& a, int rank) {
            if (rank < 0 || static_cast<std::size_t>(rank) >= a.job.class_of.size())
              throw nb::index_error(fmt::format("rank {} of {}", rank, a.job.class_of.size()).c_str());
            return a.job.of(rank).peak;
          },
          "rank"_a)
      .def(
          "traffic",
          [](const DryAnswer& a, int rank) {
            if (rank < 0 || static_cast<std::size_t>(rank) >= a.job.class_of.size())
              throw nb::index_error(fmt::format("rank {} of {}", rank, a.job.class_of.size()).c_str());
            return a.job.of(rank).traffic;
          },
          "rank"_a)
      .def_prop_ro(
          "checkpoint_bytes", [](const DryAnswer& a) { return checkpoint_bytes(a.plan); },
          "Of a checkpoint's tensors on disk, written by all ranks.")
      .def_prop_ro(
          "fits",
          [](const DryAnswer& a) {
            return a.memory_limit > 0 ? std::optional(left_of(a.memory_limit, a.plan, a.job) >= 0)
                                      : std::nullopt;
          },
          "Whether the rank with most memory fits in ``memory_limit``; None without it.")
      .def("__len__", [](const DryAnswer& a) { return a.job.class_of.size(); })
      .def(
          "to_dict",
          [](const DryAnswer& a) {
            return from_json(dry_run_json(a.plan, a.pipeline, a.job, a.memory_limit));
          },
          "As `echelon train --dry-run --json`.")
      .def("__str__",
           [](const DryAnswer& a) { return dry_run_text(a.plan, a.pipeline, a.job, a.memory_limit); })
      .def("__repr__", [](const DryAnswer& a) {
        return fmt::format("<DryRun of {}, {} of them: {}>",
                           counted(static_cast<std::int64_t>(a.job.class_of.size()), "rank"),
                           counted(static_cast<std::int64_t>(a.job.classes.size()), "kind"), summary(a.plan));
      });
  m.def("_dry_run", &run_dry, "words"_a);
}

void bind_train(nb::module_& m) {
  nb::class_<ExpertLoad>(m, "ExpertLoad", "A layer's experts in one step.")
      .def_ro("layer", &ExpertLoad::layer)
      .def_ro("imbalance", &ExpertLoad::imbalance, "Tokens of the expert that has most, over the mean.")
      .def_ro("drop_rate", &ExpertLoad::drop_rate)
      .def_ro("balance_loss", &ExpertLoad::balance_loss)
      .def_ro("tokens", &ExpertLoad::tokens, "Sent to each expert.")
      .def_ro("dropped", &ExpertLoad::dropped)
      .def("__repr__", [](const ExpertLoad& l) {
        return fmt::format("<ExpertLoad of layer {}: {:.3g} times the mean>", l.layer, l.imbalance);
      });
  nb::class_<StepRecord>(m, "StepRecord", "One step of a training.")
      .def_ro("step", &StepRecord::step, "Counts from 1.")
      .def_ro("loss", &StepRecord::loss)
      .def_ro("grad_norm", &StepRecord::grad_norm)
      .def_ro("lr", &StepRecord::lr)
      .def_ro("tokens", &StepRecord::tokens, "Of this step, over all ranks.")
      .def_ro("tokens_per_second", &StepRecord::tokens_per_second)
      .def_ro("mfu", &StepRecord::mfu)
      .def_ro("step_seconds", &StepRecord::step_seconds)
      .def_ro("skipped", &StepRecord::skipped, "Why nothing was updated; empty: it was.")
      .def_ro("experts", &StepRecord::experts, "By layer; empty without experts.")
      .def(
          "to_dict", [](const StepRecord& r) { return from_json(to_json(r)); }, "As a line of `--log`.")
      .def("__repr__", [](const StepRecord& r) {
        return fmt::format("<StepRecord {}: loss {}>", r.step, loss_text(r.loss));
      });
  nb::class_<StartInfo>(m, "StartInfo", "What is known before the first step.")
      .def_ro("num_params", &StartInfo::num_params)
      .def_ro("trained_params", &StartInfo::trained_params)
      .def_ro("first_step", &StartInfo::first_step)
      .def_ro("train_tokens", &StartInfo::train_tokens)
      .def_ro("validation_tokens", &StartInfo::validation_tokens)
      .def_ro("ranks", &StartInfo::ranks)
      .def_ro("predicted_memory", &StartInfo::predicted_memory)
      .def_ro("predicted_step_seconds", &StartInfo::predicted_step_seconds)
      .def_ro("resumed_from", &StartInfo::resumed_from)
      .def_ro("notes", &StartInfo::notes)
      .def("__repr__", [](const StartInfo& s) {
        return fmt::format("<StartInfo: {}, {} parameters, after step {}>", counted(s.ranks, "rank"),
                           s.num_params, s.first_step);
      });
  const auto of = [](const auto TrainSummary::*member) {
    return [member](const TrainAnswer& a) { return a.summary.*member; };
  };
  nb::class_<TrainAnswer>(m, "TrainAnswer", "A training that has ended.")
      .def_ro("plan", &TrainAnswer::plan)
      .def_ro("start", &TrainAnswer::start)
      .def_ro("steps", &TrainAnswer::steps, "The records of all of its steps.")
      .def_ro("evaluations", &TrainAnswer::evaluations, "Validation losses, by step.")
      .def_ro("checkpoints", &TrainAnswer::checkpoints, "Paths of those that were written.")
      .def_ro("sample", &TrainAnswer::sample, "Tokens generated at the end; None: there were none.")
      .def_prop_ro("last_step", of(&TrainSummary::last_step))
      .def_prop_ro("final_loss", &TrainAnswer::final_loss, "Of the last step; None: there was none.")
      .def_prop_ro("validation_loss", of(&TrainSummary::validation_loss), "None: there was none.")
      .def_prop_ro("tokens_per_second", of(&TrainSummary::tokens_per_second), "From the median step.")
      .def_prop_ro("mfu", of(&TrainSummary::mfu))
      .def_prop_ro("step_seconds", of(&TrainSummary::step_seconds))
      .def_prop_ro("predicted_step_seconds", of(&TrainSummary::predicted_step_seconds))
      .def_prop_ro("predicted_memory", of(&TrainSummary::predicted_memory), "Of rank 0.")
      .def_prop_ro("measured_memory", of(&TrainSummary::measured_memory), "The peak of rank 0.")
      .def_prop_ro("predicted_traffic", of(&TrainSummary::predicted_traffic), "Of rank 0, in a step.")
      .def_prop_ro("measured_traffic", of(&TrainSummary::measured_traffic))
      .def_prop_ro("checkpoint", of(&TrainSummary::checkpoint), "The last one written; empty: none.")
      .def_prop_ro("fingerprint", of(&TrainSummary::fingerprint))
      .def_prop_ro("stopped", of(&TrainSummary::stopped), "Before its last step, as it was asked to.")
      .def_prop_ro("complete", of(&TrainSummary::complete),
                   "The checkpoint to go on from had all steps: nothing was done.")
      .def_prop_ro("skipped", of(&TrainSummary::skipped))
      .def_prop_ro("experts", of(&TrainSummary::experts), "Of the last step.")
      .def_prop_ro("timeline", of(&TrainSummary::measured_timeline),
                   "The last step of the first pipeline as it ran, in seconds.")
      .def_prop_ro("simulated_timeline", of(&TrainSummary::simulated_timeline),
                   "Its schedule simulated with the times that its instructions took.")
      .def(
          "to_dict", [](const TrainAnswer& a) { return from_json(to_json(a.summary)); },
          "As `echelon train --json`.")
      .def("__repr__", [](const TrainAnswer& a) {
        const auto loss = a.final_loss();
        return fmt::format("<TrainAnswer: step {}, {}>", a.summary.last_step,
                           loss ? "loss " + loss_text(*loss) : "no step was done");
      });
  m.def(
      "_train",
      [](const Words& words, nb::object on_step, nb::object on_start, nb::object on_evaluation,
         nb::object on_checkpoint) {
        return trained(words, {on_step, on_start, on_evaluation, on_checkpoint});
      },
      "words"_a, "on_step"_a.none(), "on_start"_a.none(), "on_evaluation"_a.none(), "on_checkpoint"_a.none());
}

void bind_verify(nb::module_& m) {
  nb::class_<Difference>(m, "Difference", "A tensor of the mesh that is not that of one rank.")
      .def_ro("step", &Difference::step, "Counts from 0.")
      .def_ro("tensor", &Difference::tensor)
      .def_ro("kind", &Difference::kind, "grad, param, loss, choice, drop or width.")
      .def_ro("rel_diff", &Difference::rel_diff)
      .def("__repr__", [](const Difference& d) {
        return fmt::format("<Difference: {} of {} at step {}, {:.2e}>", d.kind, d.tensor, d.step, d.rel_diff);
      });
  const auto of = [](const auto VerifyReport::*member) {
    return [member](const VerifyAnswer& a) { return a.report.*member; };
  };
  nb::class_<VerifyAnswer>(m, "VerifyAnswer",
                           "A mesh beside one rank, every tensor compared. True if it passes.")
      .def_ro("plan", &VerifyAnswer::plan)
      .def_prop_ro("passed", of(&VerifyReport::pass))
      .def_prop_ro("bitwise", of(&VerifyReport::bitwise), "Equal to the last bit.")
      .def_prop_ro("steps", of(&VerifyReport::steps))
      .def_prop_ro("bound", of(&VerifyReport::bound), "What rounding may do to losses and gradients.")
      .def_prop_ro("loss_max_rel_diff", of(&VerifyReport::loss_max_rel_diff))
      .def_prop_ro("grad_max_rel_diff", of(&VerifyReport::grad_max_rel_diff))
      .def_prop_ro("param_max_rel_diff", of(&VerifyReport::param_max_rel_diff))
      .def_prop_ro("first_difference", of(&VerifyReport::first_difference), "None where it passes.")
      .def_prop_ro("reference_losses", of(&VerifyReport::reference_losses), "Of one rank.")
      .def_prop_ro("mesh_losses", of(&VerifyReport::mesh_losses))
      .def(
          "to_dict", [](const VerifyAnswer& a) { return from_json(to_json(a.report, a.plan)); },
          "As `echelon verify --json`.")
      .def("__bool__", of(&VerifyReport::pass))
      .def("__repr__", [](const VerifyAnswer& a) {
        return fmt::format("<VerifyAnswer: {}>", !a.report.pass     ? "FAIL"
                                                 : a.report.bitwise ? "PASS, to the last bit"
                                                                    : "PASS");
      });
  m.def("_verify", &verified, "words"_a);
}

void bind_generate(nb::module_& m) {
  const auto text_of = [](const Generated& g) {
    return g.is_text ? std::optional(as_in_json(g.text.text)) : std::nullopt;
  };
  nb::class_<Generated>(m, "Generated", "A prompt, and what a model wrote after it. As a str, both.")
      .def_ro("checkpoint", &Generated::checkpoint, "That the weights are of.")
      .def_ro("step", &Generated::step)
      .def_prop_ro("prompt", [](const Generated& g) { return g.text.prompt; })
      .def_prop_ro("prompt_tokens", [](const Generated& g) { return g.text.prompt_tokens; })
      .def_prop_ro("text", text_of, "What was written; None of prompt_tokens=, which no tokenizer reads.")
      .def_prop_ro("tokens", [](const Generated& g) { return g.text.tokens; })
      .def(
          "to_dict",
          [](const Generated& g) {
            nlohmann::ordered_json one{{"checkpoint", g.checkpoint},
                                       {"step", g.step},
                                       {"prompt_tokens", g.text.prompt_tokens},
                                       {"tokens", g.text.tokens}};
            if (g.is_text) one["text"] = g.text.text;
            return from_json(json_text(one));
          },
          "As `echelon generate --json` of one prompt.")
      .def("__str__",
           [](const Generated& g) {
             return g.is_text ? g.text.prompt + as_in_json(g.text.text)
                              : fmt::format("{}", fmt::join(g.text.tokens, " "));
           })
      .def("__repr__", [](const Generated& g) {
        return fmt::format("<Generated: {} tokens after {}>", g.text.tokens.size(),
                           g.text.prompt_tokens.size());
      });
  m.def("_generate", &generated, "words"_a, "on_text"_a.none());
}

}  // namespace

void bind_runs(nb::module_& m) {
  bind_generate(m);
  bind_dry_run(m);
  bind_train(m);
  bind_verify(m);
}

}  // namespace echelon::python
