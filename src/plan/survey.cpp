#include "plan/survey.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace echelon {
namespace {

std::vector<SurveyCell> sizes(const SearchRequest& r, int& left_out) {
  constexpr std::size_t most = 100;
  const Mesh& given = r.work.plan.mesh;
  std::vector<SurveyCell> cells;
  for (int tp = 1; tp <= r.gpus; ++tp)
    for (int pp = 1; r.gpus % tp == 0 && pp <= r.gpus / tp; ++pp) {
      const bool is_pinned_away =
          (r.has("tp") && given.tp() != tp) || (r.has("pp") && given.pp() != pp);
      if (r.gpus / tp % pp == 0 && !is_pinned_away) cells.push_back({tp, pp, {}, {}});
    }
  if (cells.size() <= most) return cells;
  const int node = r.work.machine.node();
  left_out = static_cast<int>(
      std::erase_if(cells, [&](const SurveyCell& cell) { return cell.tp > node && !r.has("tp"); }));
  return cells;
}

std::vector<Estimate> front_of(SearchRequest r) {
  const double device = StepModel(r.work).usable_bytes();
  std::vector<Estimate> front;
  for (double limit = device * (1 - r.memory_margin); limit > 0;) {
    r.memory_margin = 1 - limit / device;
    SearchResult result = search(r);
    if (result.plans.empty()) break;
    Estimate& best = result.plans.front();
    limit = std::min(static_cast<double>(best.memory.total()), limit) - front_step * device;
    // The limit allowed a plan that is as fast and holds less: it replaces the one before.
    if (!front.empty() && best.seconds <= front.back().seconds) front.pop_back();
    front.push_back(std::move(best));
  }
  return front;
}

}  // namespace

Survey survey(const SearchRequest& request) {
  SearchRequest r = request;
  r.top = 1;
  r.objective = Objective::time;
  r.progress = {};
  r.remembers = false;
  Survey all;
  all.cells = sizes(r, all.cells_left_out);
  for (std::size_t i = 0; i < all.cells.size(); ++i) {
    report(request.progress, static_cast<double>(i) / static_cast<double>(all.cells.size()),
           "each tp and pp, for the page");
    SurveyCell& cell = all.cells[i];
    SearchRequest one = r;
    one.pin("tp", cell.tp);
    one.pin("pp", cell.pp);
    try {
      cell.result = search(one);
    } catch (const RequestError& error) {
      cell.refusal = error.what();
    }
  }
  report(request.progress, -1, "less and less memory, for the page");
  all.front = front_of(r);
  return all;
}

}  // namespace echelon
