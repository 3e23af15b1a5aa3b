#include "spec/precision.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>

#include "base/error.h"
#include "spec/fp8.h"
#include "spec/tf32.h"

namespace echelon {
namespace {

// bf16, and the optimizer's state in these.
PrecisionRecipe in_bf16(const char* name, DType master, DType moments) {
  PrecisionRecipe r;
  r.name = name;
  r.parameters = r.activations = DType::bf16;
  r.master = master;
  r.moments = moments;
  return r;
}

PrecisionRecipe in_tf32() {
  PrecisionRecipe r(DType::f32);
  r.name = tf32_name;
  return r;
}

const std::array<PrecisionRecipe, 6>& recipes() {
  static const std::array<PrecisionRecipe, 6> all{DType::f64,
                                                  DType::f32,
                                                  in_tf32(),
                                                  in_bf16("bf16", DType::f32, DType::f32),
                                                  in_bf16("bf16-lean", DType::bf16, DType::bf16),
                                                  in_bf16(fp8_name, DType::f32, DType::f32)};
  return all;
}

const PrecisionRecipe* find_recipe(std::string_view name) {
  const auto found = std::find_if(recipes().begin(), recipes().end(),
                                  [&](const PrecisionRecipe& r) { return r.name == name; });
  return found == recipes().end() ? nullptr : &*found;
}

}  // namespace

PrecisionRecipe::PrecisionRecipe(DType all)
    : name(dtype_name(all)),
      parameters(all),
      master(all),
      gradients(all),
      moments(all),
      activations(all),
      statistics(all) {
  check(all == wide(all), "narrow numbers are kept beside wide ones");
}

const PrecisionRecipe& recipe_of_weights(DType weights) {
  return recipe(weights == DType::bf16 ? "bf16-lean" : dtype_name(weights));
}

const std::string& recipe_name(const PrecisionRecipe& recipe) { return recipe.name; }

const std::vector<std::string>& recipe_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const PrecisionRecipe& r : recipes()) list.push_back(r.name);
    return list;
  }();
  return names;
}

const PrecisionRecipe& recipe(std::string_view name) {
  const PrecisionRecipe* found = find_recipe(name);
  check(found != nullptr, "a precision is asked for by a name that there is not");
  return *found;
}

const PrecisionRecipe& parse_recipe(const std::string& text, const std::string& field) {
  if (const PrecisionRecipe* found = find_recipe(text)) return *found;
  refuse("{} {}: no such precision; legal: {}", field, text, fmt::join(recipe_names(), ", "));
}

}  // namespace echelon
