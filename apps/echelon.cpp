// echelon: one verb per thing a person wants. Exit status: 0 yes, 1 it ran and the answer is no, 2 the
// request is wrong, 3 it failed while running.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <exception>

#include "apps/flags.h"
#include "base/error.h"

int main(int argc, char** argv) {
  CLI::App program{"Echelon plans, simulates, runs and proves the distributed training of transformers."};
  program.require_subcommand(1);
  program.set_version_flag("--version", ECHELON_VERSION);
  int status = 0;
  echelon::add_train(program, status);
  echelon::add_verify(program, status);
  echelon::add_generate(program, status);
  echelon::add_bench(program, status);
  try {
    program.parse(argc, argv);
    return status;
  } catch (const CLI::Success& done) {  // --help, --version
    return program.exit(done);
  } catch (const CLI::ParseError& error) {
    fmt::print(stderr, "echelon: {}\nRun with --help for the flags that there are.\n", error.what());
    return 2;
  } catch (const echelon::RequestError& error) {
    fmt::print(stderr, "echelon: {}\n", error.what());
    return 2;
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "echelon: out of memory\n");
    return 3;
  } catch (const std::exception& error) {
    fmt::print(stderr, "echelon: {}\n", error.what());
    return 3;
  }
}
