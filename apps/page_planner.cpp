// The planner inside a browser's page: the unchanged verbs plan and simulate, on WebAssembly's files in
// memory. Only built by emscripten (cmake/browser.cmake).
#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "apps/flag_needs.h"
#include "apps/plan_flags.h"
#include "apps/plan_page.h"
#include "apps/verbs.h"
#include "base/error.h"
#include "base/json_text.h"
#include "base/output_file.h"
#include "draw/page.h"
#include "schedule/schedules.h"
#include "spec/machine.h"
#include "spec/model_spec.h"
#include "spec/software.h"
#include "train/dry_run.h"

namespace echelon {

// The trainer is not in this build.
ExactMemory exact_memory() {
  return [](const Plan&, const PipelineLayout&, const Coordinates&, Device) -> Memory {
    refuse("--software echelon: is priced by walking its trainer, which this page does not have; legal: another one");
  };
}

bool surveys_later() { return true; }

namespace {

// The page before anything is asked: the choices of its controls.
void write_start(const std::string& path) {
  Page page;
  page.kind = "planner";
  page.title = "Echelon: plan and simulate distributed training";
  std::vector<std::string> software;
  for (const std::string& name : software_preset_names())
    if (!load_software(name).is_this_trainer) software.push_back(name);
  const auto list = [&](const char* name, const std::vector<std::string>& names) {
    page.members.emplace_back(name, json_text(nlohmann::ordered_json(names)));
  };
  list("models", model_preset_names());
  list("machines", machine_preset_names());
  list("software", software);
  list("schedules", schedule_names());
  write_output("page", path, page_html(page));
}

// plan, writing only the survey.
void add_survey(CLI::App& program, const std::string& path) {
  auto flags = std::make_shared<PlanSearchFlags>();
  CLI::App& app = *program.add_subcommand("plan");
  flags->add_to(app);
  app.callback(
      [flags, path] { write_output("survey", path, plan_survey(flags->request(), flags->app())); });
}

// page FILE; survey FILE plan FLAGS; plan FLAGS; simulate FLAGS.
int run(int argc, char** argv) {
  const std::string first = argc > 2 ? argv[1] : "";
  if (first == "page") {
    write_start(argv[2]);
    return 0;
  }
  int status = 0;
  CLI::App program{"Echelon's planner", "echelon"};
  program.require_subcommand(1);
  if (first == "survey") {
    add_survey(program, argv[2]);
    argv[2] = argv[0];
    argc -= 2;
    argv += 2;
  } else {
    add_plan(program, status);
    add_simulate(program, status);
  }
  program.parse_complete_callback([&program] { refuse_empty_values(program); });
  program.parse(argc, argv);
  return status;
}

}  // namespace
}  // namespace echelon

int main(int argc, char** argv) {
  try {
    return echelon::run(argc, argv);
  } catch (const std::bad_alloc&) {
    std::fputs(
        "echelon: out of memory: a page has less than the program; ask for fewer microbatches or schedules\n",
        stderr);
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "echelon: %s\n", error.what());
    return 2;
  }
}
