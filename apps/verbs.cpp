#include "apps/verbs.h"

namespace echelon {

void add_verbs(CLI::App& program, int& status) {
  add_train(program, status);
  add_verify(program, status);
  add_plan(program, status);
  add_calibrate(program, status);
  add_devices(program, status);
  add_simulate(program, status);
  add_checkpoint(program, status);
  add_data(program, status);
  add_launch(program, status);
  add_generate(program, status);
  add_bench(program, status);
  add_view(program, status);
}

}  // namespace echelon
