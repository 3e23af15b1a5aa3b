// echelon: one verb per thing a person wants. Exit status: 0 yes, 1 it ran and the answer is no, 2 the
// request is wrong, 3 it failed while running.
#include <execinfo.h>
#include <malloc.h>
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <thread>

#include "apps/flag_needs.h"
#include "apps/help.h"
#include "apps/launch_words.h"
#include "apps/verbs.h"
#include "base/error.h"

namespace {

using echelon::refuse;

constexpr const char* out_of_memory =
    "echelon: out of memory\n";  // printed as it is: formatting asks for some

// Standard error may be on a full disk: fmt would throw, out of a handler.
void say(const std::string& message) { std::fputs(("echelon: " + message + "\n").c_str(), stderr); }

std::string names_of(const std::vector<CLI::App*>& verbs) {
  std::string names;
  for (const CLI::App* verb : verbs) names += (names.empty() ? "" : ", ") + verb->get_name();
  return names;
}

// CLI11's complaints in the words of our own.
[[noreturn]] void refuse_parse(CLI::App& program, const CLI::ParseError& error) {
  std::string words = program.get_name();
  CLI::App* app = &program;
  while (!app->get_subcommands().empty()) {
    app = app->get_subcommands().front();
    words += " " + app->get_name();
  }
  const auto verbs = app->get_subcommands([](const CLI::App* verb) { return !verb->get_name().empty(); });
  const std::vector<std::string> unknown = program.remaining(true);
  if (!unknown.empty()) {
    const std::string& first = unknown.front();
    if (!verbs.empty() && !first.starts_with("-"))
      refuse("{}: no such verb; legal: {}", first, names_of(verbs));
    refuse("{}: {} has no such {}; {} --help lists what it has{}", first, words,
           first.starts_with("-") ? "flag" : "argument", words,
           app->get_name() == "launch"
               ? ", and what belongs to the training comes after --: launch ... -- train ..."
               : "");
  }
  const std::string text = error.what(), flag = text.substr(0, text.find(':'));
  if (error.get_name() == "ArgumentMismatch" && text.ends_with("missing"))
    refuse("{}: its value is missing", flag);
  if (error.get_name() == "ArgumentMismatch") refuse("{}: given more than once", flag);
  if (error.get_name() == "ExcludesError") refuse("{}; give one of the two", text);
  refuse("{}", text);
}

int run(CLI::App& program, int argc, char** argv) {
  int status = 0;
  echelon::add_verbs(program, status);
  echelon::arrange_help(program);
  // Before the verb's own callback.
  program.parse_complete_callback([&program] { echelon::refuse_empty_values(program); });
  try {
    program.parse(argc, argv);
  } catch (const CLI::Success& done) {  // --help, --version
    return program.exit(done);
  } catch (const CLI::ParseError& error) {
    refuse_parse(program, error);
  }
  if (program.get_subcommands().empty())
    refuse("a verb is missing; legal: {}; echelon --help describes them",
           names_of(program.get_subcommands([](const CLI::App*) { return true; })));
  return status;
}

int run_program(int argc, char** argv) {
  CLI::App program{"Echelon plans, simulates and runs distributed training, and checks it against one rank.",
                   "echelon"};
  program.require_subcommand(0, 1);
  program.set_version_flag("--version", ECHELON_VERSION);
  try {
    const int status = run(program, argc, argv);
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
      echelon::fail("standard output cannot be written: {}", std::strerror(errno));
    return status;
  } catch (const echelon::AlreadySaid& said) {
    return said.status;
  } catch (const echelon::RequestError& error) {
    // The first process says it. When one ends, mpirun ends those that have not, so the others give it time.
    if (echelon::is_another_process())
      std::this_thread::sleep_for(std::chrono::seconds(1));
    else
      say(error.what());
    return 2;
  }
}

// An exception that nothing can take, as where memory ends while another one is on its way. A bug leaves its
// core.
[[noreturn]] void end_without_handler() noexcept {
  try {
    std::rethrow_exception(std::current_exception());
  } catch (const std::bad_alloc&) {
    std::fputs(out_of_memory, stderr);
    std::_Exit(3);
  } catch (...) {
  }
  std::abort();
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file over the limit of its size is an error of write() like a full disk
  std::set_terminate(end_without_handler);
  // A heap of each thread's own reserves 64 MiB of addresses, and where it gets none every allocation asks
  // for it again: where addresses are limited (ulimit -v) all threads share one.
  rlimit addresses{};
  if (::getrlimit(RLIMIT_AS, &addresses) == 0 && addresses.rlim_cur != RLIM_INFINITY)
    ::mallopt(M_ARENA_MAX, 1);
  // The C library looks for what unwinds the stack when it first needs it, and ends the process where memory
  // is at an end by then.
  void* frame = nullptr;
  (void)::backtrace(&frame, 1);
  int status = 3;
  try {
    status = run_program(argc, argv);
  } catch (const std::bad_alloc&) {
    std::fputs(out_of_memory, stderr);
  } catch (const std::exception& error) {
    say(echelon::message_of(error));
  }
  if (status != 0) echelon::tell_launch_end(status);  // a whole training has said it itself
  return status;
}
