#include "spec/precision.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "spec/fp8.h"

namespace echelon::precision_test {
namespace {

using enum DType;

TEST(Precision, RecipesAreThoseOfTheTable) {
  EXPECT_EQ(recipe_names(), (std::vector<std::string>{"f64", "f32", "tf32", "bf16", "bf16-lean", "fp8"}));
  for (DType dtype : {f64, f32}) {
    const PrecisionRecipe& r = recipe(dtype_name(dtype));
    for (DType role : {r.parameters, r.master, r.gradients, r.moments, r.activations, r.statistics})
      EXPECT_EQ(role, dtype) << r.name;
    EXPECT_FALSE(r.has_master() || r.rounds_stochastically());
  }
  const PrecisionRecipe& mixed = recipe("bf16");
  EXPECT_EQ(mixed.parameters, bf16);
  EXPECT_EQ(mixed.master, f32);
  EXPECT_EQ(mixed.gradients, f32);
  EXPECT_EQ(mixed.moments, f32);
  EXPECT_EQ(mixed.activations, bf16);
  EXPECT_TRUE(mixed.has_master());
  EXPECT_FALSE(mixed.rounds_stochastically());
  PrecisionRecipe kept = recipe("fp8");  // as bf16
  EXPECT_TRUE(multiplies_in_fp8(kept));
  kept.name = mixed.name;
  EXPECT_EQ(kept, mixed);
  const PrecisionRecipe& lean = recipe("bf16-lean");
  EXPECT_EQ(lean.parameters, bf16);
  EXPECT_EQ(lean.master, bf16);
  EXPECT_EQ(lean.gradients, f32);
  EXPECT_EQ(lean.moments, bf16);
  EXPECT_EQ(lean.activations, bf16);
  EXPECT_FALSE(lean.has_master());
  EXPECT_TRUE(lean.rounds_stochastically());
}

// What the kernels make of a recipe's tensors.
TEST(Precision, StatisticsAndGradientsAreWide) {
  for (const std::string& name : recipe_names()) {
    const PrecisionRecipe& r = recipe(name);
    EXPECT_EQ(r.name, name);
    EXPECT_EQ(r.statistics, wide(r.activations)) << name;
    EXPECT_EQ(r.gradients, wide(r.parameters)) << name;
    EXPECT_EQ(r.moments, r.master) << name;  // Kernels::adamw
    EXPECT_EQ(&parse_recipe(name, "--precision"), &r);
  }
}

TEST(Precision, AnotherNameIsRefusedWithTheLegalOnes) {
  try {
    parse_recipe("bf8", "--precision");
    ADD_FAILURE() << "not refused";
  } catch (const RequestError& error) {
    EXPECT_STREQ(error.what(),
                 "--precision bf8: no such precision; legal: f64, f32, tf32, bf16, bf16-lean, fp8");
  }
  EXPECT_THROW(recipe("bf8"), InvariantError);
}

TEST(Precision, DTypesHaveSizesAndNames) {
  EXPECT_EQ(element_bytes(bf16), 2);
  EXPECT_STREQ(dtype_name(bf16), "bf16");
  EXPECT_EQ(wide(bf16), f32);
  for (DType dtype : {f32, f64, i32, i16, u8}) EXPECT_EQ(wide(dtype), dtype);
  EXPECT_EQ(element_bytes(i16), 2);
  EXPECT_STREQ(dtype_name(i16), "i16");
  EXPECT_EQ(dtype_of<std::int16_t>, i16);
  EXPECT_EQ(dtype_of<echelon::bf16>, bf16);
  EXPECT_EQ(dtype_of<Wide<echelon::bf16>>, f32);
}

}  // namespace
}  // namespace echelon::precision_test
