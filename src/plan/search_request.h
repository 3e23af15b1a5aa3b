// The input of the search: a workload, devices, and which fields of its plans are given.
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
  // Fields of the plan that keep their values; the search varies the other fields that it knows.
  std::set<std::string, std::less<>> pinned{};
  Objective objective = Objective::time;
  double memory_margin = 0;  // fraction of the device's memory to leave free
  int top = 10;
  bool remembers = false;  // records the outcome of every plan considered: SearchResult::looked
  Progress progress{};
  // Shared by copies of a request, such as those for other sizes and other programs.
  std::shared_ptr<ScheduleShelf> shelf = std::make_shared<ScheduleShelf>();

  bool has(std::string_view field) const { return pinned.contains(field); }
  // RequestError naming `where` unless there is such a field and the text is a legal value of it.
  void pin(const std::string& field, const std::string& text, const std::string& where);
  template <class T>
  void pin(const std::string& field, const T& value) {
    pin(field, fmt::format("{}", value), field);
  }
  // Pins all fields to the values of this plan.
  void pin_all(const Plan& plan);
  // The product of the given axes, and whether all axes are given. RequestError if it is more than a mesh
  // has.
  int given_ranks() const;
  bool gives_mesh() const;
};

// What of the plan is not priced for this program on this machine. Reads no plan from `work`.
std::optional<Refusal> unpriced(const Plan& plan, const Workload& work);

// Whether some configuration has a legal shape with this remedy: suggestions of a refusal are tried together
// with everything else that is given.
bool makes_possible(const Remedy& remedy, SearchRequest request);

// Copies of the request with each value of --offload, from the one that gains least to the one that gains
// most; none if offloading is given, and without impossible ones.
std::vector<SearchRequest> offloading(const SearchRequest& request);

// RequestError naming the flag if no configuration could have these sizes; the values that it calls legal
// make some configuration possible. And if model, machine or program are none, as where a caller has left one
// out.
void check_request(const SearchRequest& request);
// RequestError if there are more devices than the machine's file says how to link.
void check_links(const SearchRequest& request);

}  // namespace echelon
