// What is hidden behind what, measured: the runs of tests/overlap_runs.h on the machine's clock. Computation
// and transfers sleep, but for the training step, so that other work on the machine shows little.
#include <cstdio>

#include "overlap_runs.h"

namespace {

using namespace echelon;
using namespace echelon::checks;

void print(const char* what, int ahead, const OverlapTimes& t) {
  fmt::print("{:<46} {:>2} {:>8.1f} ms {:>8.1f} ms {:>8.1f} ms {:>5.0f}%\n", what, ahead, 1e3 * t.compute,
             1e3 * t.communication, 1e3 * t.together, 100 * t.hidden());
}

void gathers() {
  fmt::print("{:<46} {:>2} {:>11} {:>11} {:>11}  hidden of the shorter\n", "ZeRO 3", "P", "computation",
             "gathers", "together");
  for (auto [delay, ahead] : {std::pair{2, 1}, {4, 1}, {8, 1}, {4, 3}, {4, 0}}) {
    SleepingStep step;
    step.delay = milliseconds(delay);
    print("8 layers that sleep 3 ms forward, 6 ms backward", ahead, sleeping_gathers(step, ahead, {}, 3));
  }
  for (int ahead : {1, 0}) print("a training step of 10 blocks", ahead, training_gathers(ahead, {}, {}, 5));
}

void rings() {
  constexpr milliseconds block{20};
  for (int cp : {2, 4}) {
    const double alone = ring_seconds(cp, block, milliseconds(0), {}, 3),
                 delayed = ring_seconds(cp, block, block, {}, 3);
    // Forward one hop a block, backward one for keys and values and one for their gradients.
    const double hops = 3 * (cp - 1) * seconds_of(block);
    fmt::print("ring of {}: blocks alone {:.0f} ms, hops {:.0f} ms, together {:.0f} ms ({:+.0f}%)\n", cp,
               1e3 * alone, 1e3 * hops, 1e3 * delayed, 100 * (delayed / alone - 1));
  }
}

void pairs() {
  constexpr int ranks = 2, microbatches = 12;
  constexpr milliseconds travel{10};
  SimulationCosts costs;
  costs.stages = {{0.020, 0.020, 0.010}};
  const StepPrograms programs(make_schedule("dualpipe", ranks, microbatches, 0));
  int pairs = 0;
  for (const Instruction& i : programs.schedule().ranks[0]) pairs += i.overlaps_next;
  const double apart = run_asleep(programs, ranks, costs, travel, false, {}).seconds,
               together = run_asleep(programs, ranks, costs, travel, true, {}).seconds;
  fmt::print(
      "{} DualPipe pairs: {:.0f} ms one after the other, {:.0f} ms together: {:.0f}% of what travels is "
      "hidden\n",
      pairs, 1e3 * apart, 1e3 * together, 100 * (apart - together) / (2 * pairs * seconds_of(travel)));
}

}  // namespace

int main() {
  gathers();
  rings();
  pairs();
}
