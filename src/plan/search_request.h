// What is asked of the search: a workload, devices, and which fields of its plans are given.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/progress.h"
#include "plan/schedule_shelf.h"
#include "plan/workload.h"

namespace echelon {

enum class Objective { time, memory };
Objective parse_objective(const std::string& text, const std::string& field);

struct SearchRequest {
  Workload work;
  int gpus = 1;
  // Fields of the plan that are held as they are; the search goes over the others that it knows.
  std::set<std::string, std::less<>> pinned{};
  Objective objective = Objective::time;
  double memory_margin = 0;  // part of the device's memory that stays free
  int top = 10;
  bool remembers = false;  // what became of every plan that was considered: SearchResult::looked
  Progress progress{};
  // Copies of a request share it, as those are that look at other sizes and other programs.
  std::shared_ptr<ScheduleShelf> shelf = std::make_shared<ScheduleShelf>();

  bool has(std::string_view field) const { return pinned.contains(field); }
  // RequestError naming `where` unless there is such a field and the text is of such a value.
  void pin(const std::string& field, const std::string& text, const std::string& where);
  template <class T>
  void pin(const std::string& field, const T& value) {
    pin(field, fmt::format("{}", value), field);
  }
  // Everything, as this plan has it.
  void pin_all(const Plan& plan);
  // The product of the axes that are given, and whether all are.
  std::int64_t given_ranks() const;
  bool gives_mesh() const;
};

// What the plan has that is not priced, for this program on this machine; of `work` no plan is read.
std::optional<Refusal> unpriced(const Plan& plan, const Workload& work);

// Whether with this instead some configuration has a legal shape: what a refusal suggests is tried beside
// everything else that is given.
bool makes_possible(const Remedy& remedy, SearchRequest request);

// The same with each of what --offload names, from what gains least to what gains most; none where that is
// given, and none of those that cannot be.
std::vector<SearchRequest> offloading(const SearchRequest& request);

// RequestError where no configuration could have these sizes, naming the flag; values that it calls legal are
// those with which one can.
void check_request(const SearchRequest& request);
// The same of devices that nothing says how they are linked.
void check_links(const SearchRequest& request);

}  // namespace echelon
