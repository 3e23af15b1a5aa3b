#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "apps/flag_needs.h"
#include "apps/flags.h"
#include "apps/help.h"
#include "apps/progress_line.h"
#include "base/error.h"
#include "base/json_text.h"
#include "base/open_file.h"
#include "base/shell_word.h"
#include "base/units.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_compare.h"
#include "checkpoint/checkpoint_manifest.h"
#include "checkpoint/finite.h"
#include "checkpoint/held_checkpoint.h"
#include "checkpoint/hugging_face.h"

namespace echelon {
namespace {

using nlohmann::ordered_json;

struct CheckpointFlags {
  std::string path, other, out, dtype = "f32", as;
  std::int64_t shard_bytes = 5'000'000'000;
  std::uint64_t seed = 1;
  bool json = false, adapters = false;
  CLI::App *exporting = nullptr, *importing = nullptr;
};

int run_info(const CheckpointFlags& f) {
  const HeldCheckpoint held(f.path, "checkpoint info");
  const CheckpointInfo info = read_checkpoint_info(held.path());
  if (f.json) {
    fmt::print("{}\n", json_text(ordered_json{{"path", info.path},
                                              {"step", info.step},
                                              {"tokens", info.tokens},
                                              {"seed", info.seed},
                                              {"dtype", dtype_name(info.dtype)},
                                              {"optimizer", name_of(info.optimizer)},
                                              {"model", info.model.name},
                                              {"params", num_parameters(info.model)},
                                              {"lora", lora_text(info.model.tuning.lora)},
                                              {"compress", compression_text(info.compression)}}));
    return 0;
  }
  fmt::print("{}\nstep {}, {} tokens, seed {}, {}, {}\nmodel {}: {} parameters\n", info.path, info.step,
             info.tokens, info.seed, dtype_name(info.dtype), name_of(info.optimizer), info.model.name,
             num_parameters(info.model));
  if (info.model.tuning.lora.rank > 0)
    fmt::print("adapters --lora {}: {} of these\n", lora_text(info.model.tuning.lora),
               num_trained_parameters(info.model));
  if (info.residual_ranks > 0)
    fmt::print("carries what --compress {} has not sent yet\n", compression_text(info.compression));
  return 0;
}

int run_verify_checkpoint(const CheckpointFlags& f) {
  const HeldCheckpoint held(f.path, "checkpoint verify");  // throws if there is none: a wrong request
  const std::string& path = held.path();
  try {
    const CheckpointContents c = with_progress("checkpoint verify", f.json, [&](const Progress& progress) {
      return check_checkpoint(path, progress);
    });
    if (f.json)
      fmt::print("{}\n", json_text(ordered_json{{"whole", true},
                                                {"path", path},
                                                {"step", c.step},
                                                {"tensors", c.tensors},
                                                {"parts", c.parts},
                                                {"files", c.files},
                                                {"bytes", c.bytes}}));
    else
      fmt::print("whole: {}, step {}: {} in {} and {}, {}\n", path, c.step, counted(c.tensors, "tensor"),
                 counted(c.parts, "part"), counted(c.files, "file"),
                 format_bytes(static_cast<double>(c.bytes)));
    return 0;
  } catch (const ForeignFormat&) {
    throw;
  } catch (const Unreadable& error) {
    throw RunError(error.what());
  } catch (const RequestError& damage) {  // an answer, not a wrong request
    if (f.json) fmt::print("{}\n", json_text(ordered_json{{"whole", false}, {"damage", damage.what()}}));
    fmt::print(stderr, "echelon: {}\n", damage.what());
    return 1;
  }
}

// The checkpoint that has the tensor if the other does not; null: both have it.
const std::string* only_holder(const CheckpointFlags& f, const TensorDifference& d) {
  using Holder = TensorDifference::Holder;
  return d.holder == Holder::both ? nullptr : d.holder == Holder::first ? &f.path : &f.other;
}

int run_diff(const CheckpointFlags& f) {
  const HeldCheckpoint one(f.path, "checkpoint diff"), other(f.other, "checkpoint diff");
  const auto differences = with_progress("checkpoint diff", f.json, [&](const Progress& progress) {
    return diff_checkpoints(one.path(), other.path(), progress);
  });
  if (f.json) {
    ordered_json rows = ordered_json::array();
    for (const TensorDifference& d : differences) {
      ordered_json row{
          {"tensor", d.name},
          {"rel_diff", std::isfinite(d.rel_diff) ? d.rel_diff : std::numeric_limits<double>::max()}};
      if (const std::string* const only = only_holder(f, d))
        row["rel_diff"] = nullptr, row["only_in"] = *only;
      rows.push_back(std::move(row));
    }
    fmt::print("{}\n", json_text(ordered_json{{"same", differences.empty()}, {"differences", rows}}));
  } else if (differences.empty()) {
    fmt::print("the same, to the last bit\n");
  } else {
    const auto count = static_cast<std::int64_t>(differences.size());
    fmt::print("{:<60} max |a-b| / max |a|\n",
               fmt::format("{} differ{}", counted(count, "tensor"), count == 1 ? "s" : ""));
    for (const TensorDifference& d : differences) {
      const std::string* const only = only_holder(f, d);
      fmt::print("{:<60} {}\n", d.name, only ? "only in " + *only : fmt::format("{:.2e}", d.rel_diff));
    }
  }
  return differences.empty() ? 0 : 1;
}

}  // namespace

void add_checkpoint(CLI::App& program, int& status) {
  auto flags = std::make_shared<CheckpointFlags>();
  CLI::App& app = *program.add_subcommand("checkpoint", "Inspect, compare and convert checkpoints");
  app.require_subcommand(0, 1);
  const auto verb = [&](const char* name, const char* description, const std::function<int()>& run) {
    CLI::App& sub = *app.add_subcommand(name, description);
    heading(sub, common_flags);
    sub.callback([run, &status] { status = run(); });
    return &sub;
  };
  const auto path = [flags](CLI::App* sub, const char* description) {
    sub->add_option("checkpoint", flags->path, description)->type_name("DIR")->required();
  };
  const char* one = "A checkpoint, or a directory of checkpoints (the last is used)";
  CLI::App* info = verb("info", "What a checkpoint holds", [flags] { return run_info(*flags); });
  path(info, one);
  CLI::App* check = verb("verify", "Read every byte and check the checksums",
                         [flags] { return run_verify_checkpoint(*flags); });
  path(check, one);
  CLI::App* diff =
      verb("diff", "Compare the tensors of two checkpoints", [flags] { return run_diff(*flags); });
  path(diff, one);
  diff->add_option("other", flags->other, "The other one")->type_name("DIR")->required();
  for (CLI::App* sub : {info, check, diff})
    sub->add_flag("--json", flags->json, "One JSON object on standard output");
  CLI::App* out = verb("export", "Write the model as Hugging Face's transformers reads it", [flags] {
    with_progress("checkpoint export", false, [&](const Progress& progress) {
      report(progress, -1, "to " + flags->out);
      refuse_idle(*flags->exporting, {{"--shard-bytes", !flags->adapters, "with --adapters", {}}});
      const HeldCheckpoint held(flags->path, "checkpoint export");
      const auto dtype = flags->as.empty() ? std::optional<DType>() : parse_dtype(flags->as, "--dtype");
      if (flags->adapters)
        export_adapters(held.path(), flags->out, dtype);
      else
        export_hugging_face(held.path(), flags->out, flags->shard_bytes, dtype);
    });
    fmt::print("written to {}\n", flags->out);
    return 0;
  });
  flags->exporting = out;
  path(out, one);
  out->add_option("--out", flags->out, "Directory to create")->type_name("DIR")->required();
  out->add_option("--dtype", flags->as, "Type of the weights (default: as they are kept)")
      ->type_name("f32|bf16|f64");
  out->add_flag(
      "--adapters", flags->adapters,
      "Write the adapters of train --lora alone, as PEFT reads them, instead of adding them to the weights");
  add_number(*out, "--shard-bytes", flags->shard_bytes, "Largest file, roughly");
  CLI::App* in = verb("import", "Make a checkpoint from a model in Hugging Face's layout", [flags] {
    try {
      const ImportedModel made = with_progress("checkpoint import", false, [&](const Progress& progress) {
        report(progress, -1, "to " + flags->out);
        return import_hugging_face(flags->path, flags->out, parse_dtype(flags->dtype, "--dtype"),
                                   flags->seed);
      });
      if (made.rounds_f64 && flags->importing->count("--dtype") == 0)
        fmt::print(stderr, "echelon: weights in f64 are rounded to {}; --dtype f64 keeps them as they are\n",
                   flags->dtype);
      if (made.num_for_images > 0)
        fmt::print("of the text model alone: {} tensors for images are left out\n", made.num_for_images);
      fmt::print("written to {}; train --model {} --checkpoint {} --resume continues from it\n",
                 made.checkpoint, shell_word(flags->path), shell_word(flags->out));
      return 0;
    } catch (const NotFinite& error) {  // an answer, not a wrong request
      fmt::print(stderr, "echelon: {}\n", error.what());
      return 1;
    }
  });
  flags->importing = in;
  path(in, "Directory with config.json and model.safetensors");
  in->add_option("--out", flags->out, "Directory of checkpoints to create")->type_name("DIR")->required();
  in->add_option("--dtype", flags->dtype, "Type of the checkpoint")
      ->type_name("f32|bf16|f64")
      ->capture_default_str();
  add_number(*in, "--seed", flags->seed, "Seed of the data order of the training that continues from it");
  app.callback([&app] {
    if (app.get_subcommands().empty())
      refuse("checkpoint: a verb is missing; legal: info, verify, diff, export, import");
  });
}

}  // namespace echelon
