// The fastest plans of a model on a cluster, and why the others are not among them: what `echelon plan` does.
#include <fmt/core.h>

#include "base/error.h"
#include "plan/search.h"

using namespace echelon;

int main() {
  SearchRequest request;
  Workload& work = request.work;
  work.plan.model = load_model("llama-3-8b");
  work.plan.global_batch = 64;
  work.plan.seq_len = 4096;
  work.machine = load_machine("h100");
  work.software = load_software("current");  // for "echelon" also work.exact_memory (train/dry_run.h)
  request.gpus = 16;
  request.pin("tp", 4);  // any field of a plan; the search varies the others
  request.top = 3;

  const SearchResult found = search(request);
  for (const Estimate& one : found.plans)
    fmt::print("{:.3f} s ({:.3f} to {:.3f}), {:.1f} GB: {}\n", one.seconds, one.low, one.high,
               static_cast<double>(one.memory.total()) / 1e9, summary(one.plan));
  for (const auto& [reason, rejected] : found.rejected) fmt::print("{}: {}\n", reason, rejected.count);

  request.pin("tp", 64);
  try {
    search(request);
  } catch (const RequestError& error) {
    fmt::print("refused: {}\n", error.what());
    return found.plans.size() == 3 ? 0 : 1;
  }
  return 1;
}
