// Numbers of a model's files, as they are read for what holds them.
#include "checkpoint/stored_model.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "base/bf16.h"
#include "temporary_directory.h"

namespace echelon::stored_model_test {
namespace {

using namespace checks;

template <class S>
void write(const TemporaryDirectory& directory, StoredType type, const std::vector<std::int64_t>& shape,
           const std::vector<S>& numbers) {
  SafetensorsWriter writer(directory / "model.safetensors", {{"x", type, shape}});
  writer.write("x", numbers.data(), numbers.size() * sizeof(S));
  writer.finish();
}

// From `begin` on, to the bit; of NaN only that they are some.
template <class F, class Expected>
void expect_read(const StoredModel& model, std::int64_t begin, std::int64_t count, const Expected& expected) {
  std::vector<F> out(static_cast<std::size_t>(count));
  model.numbers("x", {model.numbers("x", {count + begin}).numel()}).read(begin, std::span(out));
  for (std::int64_t i = 0; i < count; ++i) {
    const F want = static_cast<F>(expected(begin + i)), got = out[static_cast<std::size_t>(i)];
    if (std::isnan(static_cast<double>(want)))
      ASSERT_TRUE(std::isnan(static_cast<double>(got))) << i;
    else
      ASSERT_EQ(std::memcmp(&want, &got, sizeof want), 0) << i << ": " << static_cast<double>(got);
  }
}

template <class Expected>
void expect_all(const TemporaryDirectory& directory, std::int64_t count, const Expected& expected) {
  const StoredModel model(directory.path().string());
  for (const std::int64_t begin : {std::int64_t{0}, std::int64_t{3}}) {
    expect_read<float>(model, begin, count - begin, expected);
    expect_read<double>(model, begin, count - begin, expected);
    expect_read<bf16>(model, begin, count - begin, expected);
  }
}

TEST(StoredModel, EveryHalfIsReadExactly) {
  const TemporaryDirectory directory;
  std::vector<std::uint16_t> bits(1 << 16);
  std::iota(bits.begin(), bits.end(), std::uint16_t{0});
  write(directory, StoredType::f16, {1 << 16}, bits);
  expect_all(directory, 1 << 16, [](std::int64_t of) {
    const int exponent = static_cast<int>(of >> 10 & 0x1f), mantissa = static_cast<int>(of & 0x3ff);
    const double sign = (of & 0x8000) != 0 ? -1 : 1;
    if (exponent == 31) return mantissa == 0 ? sign * HUGE_VAL : std::nan("");
    return sign * (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(mantissa + 1024, exponent - 25));
  });
}

// Halfway cases among them, subnormal numbers, and in F64 some that no f32 holds.
TEST(StoredModel, NumbersAreRoundedOnce) {
  const TemporaryDirectory directory;
  constexpr std::int64_t count = 70001;  // more than are read at once
  std::vector<double> wide;
  std::vector<float> single;
  std::vector<bf16> narrow;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto bits = static_cast<std::uint32_t>(i * 2654435761u);
    single.push_back(i % 7 == 0 ? 1 + static_cast<float>(i % 512) * 0x1p-9f : std::bit_cast<float>(bits));
    wide.push_back(i % 5 == 0 ? 1 + std::ldexp(static_cast<double>(i), -25)
                              : std::ldexp(static_cast<double>(bits), static_cast<int>(i % 400) - 200));
    narrow.push_back(bf16::of_bits(static_cast<std::uint16_t>(bits >> 16)));
  }
  const auto at = [](const auto& all) {
    return [&all](std::int64_t i) { return all[static_cast<std::size_t>(i)]; };
  };
  write(directory, StoredType::f64, {count}, wide);
  expect_all(directory, count, at(wide));
  write(directory, StoredType::f32, {count}, single);
  expect_all(directory, count, at(single));
  write(directory, StoredType::bf16, {count}, narrow);
  expect_all(directory, count, [&](std::int64_t i) { return float{narrow[static_cast<std::size_t>(i)]}; });
}

std::vector<float> counted(std::int64_t count) {
  std::vector<float> all(static_cast<std::size_t>(count));
  std::iota(all.begin(), all.end(), 1.0f);
  return all;
}

// Whole, and in pieces that begin and end anywhere.
void expect_parameter(const StoredParameter& parameter, const std::vector<float>& expected) {
  ASSERT_EQ(parameter.numel(), std::ssize(expected));
  std::vector<float> whole(expected.size());
  parameter.read(0, std::span(whole));
  EXPECT_EQ(whole, expected);
  if (parameter.is_scattered()) return;
  for (const std::size_t piece : {1, 5, 7, 13}) {
    std::vector<float> out(expected.size());
    for (std::size_t at = 0; at < out.size(); at += piece)
      parameter.read(static_cast<std::int64_t>(at),
                     std::span(out).subspan(at, std::min(piece, out.size() - at)));
    EXPECT_EQ(out, expected) << piece;
  }
}

TEST(StoredModel, RowsOfAParameterAreFoundInAnyPiece) {
  const TemporaryDirectory directory;
  constexpr std::int64_t rows = 24, width = 7;
  const std::vector<float> file = counted(rows * width);
  write(directory, StoredType::f32, {rows, width}, file);
  const StoredModel model(directory.path().string());
  const StoredNumbers numbers = model.numbers("x", {rows, width});
  // Behind another parameter; three rows of each of three in turn; and these in another order.
  const auto row_of = [&](const StoredPlace& place, const std::vector<std::int64_t>& places, std::int64_t r) {
    const std::int64_t at = places.empty() ? r : places[static_cast<std::size_t>(r)];
    return place.first_row + (place.run == 0 ? at : at / place.run * place.step + at % place.run);
  };
  for (const StoredPlace& place :
       {StoredPlace{"x", {rows, width}, 5}, StoredPlace{"x", {rows, width}, 2, 2, 6}})
    for (const std::vector<std::int64_t>& places :
         {std::vector<std::int64_t>{}, {1, 0, 3, 2, 5, 4, 6, 7}, {0, 2, 4, 6, 1, 3, 5, 7}})
      for (const double less : {0.0, 1.0}) {
        std::vector<float> expected;
        for (std::int64_t r = 0; r < 8; ++r)
          for (std::int64_t c = 0; c < width; ++c)
            expected.push_back(file[static_cast<std::size_t>(row_of(place, places, r) * width + c)] +
                               static_cast<float>(less));
        expect_parameter({numbers, place, {8, width}, places, less}, expected);
      }
}

TEST(StoredModel, PartsOfAnExpertAreFoundAmongOneAnother) {
  const TemporaryDirectory directory;
  constexpr std::int64_t experts = 3, rows = 5, columns = 4, parts = 2;
  const std::vector<float> file = counted(experts * rows * columns * parts);
  write(directory, StoredType::f32, {experts, columns, rows * parts}, file);
  const StoredModel model(directory.path().string());
  for (std::int64_t part = 0; part < parts; ++part) {
    StoredPlace place{"x", {experts, columns, rows * parts}, 1};
    place.expert_parts = parts;
    place.part = part;
    std::vector<float> expected;
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t c = 0; c < columns; ++c)
        expected.push_back(file[static_cast<std::size_t>(((columns + c) * rows + r) * parts + part)]);
    expect_parameter({model.numbers("x", place.shape), place, {rows, columns}, {}, 0}, expected);
  }
}

}  // namespace
}  // namespace echelon::stored_model_test
