// Fragments of matrices that a warp holds, its instructions played in C++ (emulated_launch.h): where the PTX
// ISA says that elements lie, and what the loads, products and copies around them make. Numbers are small
// integers: all is exact.
#include "tensor/rows/fragments.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

#include "base/philox.h"
#include "emulated_launch.h"

namespace echelon::fragments_test {
namespace {

using checks::EmulatedLaunch;
using rows::LeftFragment;
using rows::RightFragment;
using rows::SharedRows;
using rows::SumFragment;

struct Plain {
  int rows, cols;
  std::vector<float> numbers;
  float& at(int row, int col) { return numbers[static_cast<std::size_t>(row * cols + col)]; }
  float at(int row, int col) const { return numbers[static_cast<std::size_t>(row * cols + col)]; }
};
Plain integers(int rows, int cols, std::uint64_t draw) {
  Plain m{rows, cols, {}};
  const Philox random(31, Stream::test, draw);
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(rows * cols); ++i)
    m.numbers.push_back(static_cast<float>(random.below(i, 17)) - 8);
  return m;
}
std::vector<bf16> narrow(const Plain& m) {
  std::vector<bf16> all;
  for (const float x : m.numbers) all.emplace_back(x);
  return all;
}
std::uint32_t word(float low, float high) {
  return bf16(low).bits | static_cast<std::uint32_t>(bf16(high).bits) << 16;
}

// Element i of a fragment as the tables of mma.m16n8k16 have it.
struct Element {
  int row, col;
};
Element of_left(int lane, int i) {
  const bool upper = i < 2 || (i >= 4 && i < 6);
  return {lane / 4 + (upper ? 0 : 8), lane % 4 * 2 + (i & 1) + (i < 4 ? 0 : 8)};
}
Element of_right(int lane, int i) { return {lane % 4 * 2 + (i & 1) + (i < 2 ? 0 : 8), lane / 4}; }
Element of_sums(int lane, int i) { return {lane / 4 + (i < 2 ? 0 : 8), lane % 4 * 2 + (i & 1)}; }

class Fragments : public ::testing::TestWithParam<bool> {
 protected:
  template <class Kernel>
  void run(int lanes, const Kernel& kernel, std::size_t shared) const {
    EmulatedLaunch(lanes, GetParam(), 1, 1, shared).run("test", 1, kernel, shared);
  }
};
INSTANTIATE_TEST_SUITE_P(Order, Fragments, ::testing::Bool(),
                         [](const auto& of) { return of.param ? "falling" : "rising"; });

TEST_P(Fragments, LieWhereTheTablesSay) {
  const Plain a = integers(16, 16, 0), b = integers(16, 8, 1), c = integers(16, 8, 2);
  Plain product = c;
  run(
      32,
      [&](const checks::EmulatedTeam& team) {
        const int lane = team.warp().lane();
        LeftFragment left;
        RightFragment right;
        SumFragment sums;
        for (int i = 0; i < 8; i += 2) {
          const Element x = of_left(lane, i), y = of_left(lane, i + 1);
          left.words[i / 2] = word(a.at(x.row, x.col), a.at(y.row, y.col));
        }
        for (int i = 0; i < 4; i += 2) {
          const Element x = of_right(lane, i), y = of_right(lane, i + 1);
          right.words[i / 2] = word(b.at(x.row, x.col), b.at(y.row, y.col));
        }
        for (int i = 0; i < 4; ++i) {
          const Element x = of_sums(lane, i);
          EXPECT_EQ(rows::fragment_row(lane, i), x.row);
          EXPECT_EQ(rows::fragment_column(lane, i), x.col);
          sums.sums[i] = c.at(x.row, x.col);
        }
        team.warp().multiply(sums, left, right);
        for (int i = 0; i < 4; ++i) product.at(of_sums(lane, i).row, of_sums(lane, i).col) = sums.sums[i];
      },
      0);
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 8; ++j) {
      float sum = c.at(i, j);
      for (int k = 0; k < 16; ++k) sum += a.at(i, k) * b.at(k, j);
      EXPECT_EQ(product.at(i, j), sum) << i << ", " << j;
    }
}

// From matrices in memory by way of shared memory, of which some rows are not there: x y^T, and that rounded
// to bf16 times z. By warps, or by warpgroups.
template <bool warpgroups, int strips, int warps>
void multiply_as_matrices(bool falling) {
  constexpr int rows = 16 * strips * warps, there = rows - 5, wide = 96, width = 72, padded = 128,
                columns = 128, z_columns = 120;
  const Plain x = integers(there, width, 3), y = integers(wide, width, 4), z = integers(wide, z_columns, 5);
  const std::vector<bf16> in_x = narrow(x), in_y = narrow(y), in_z = narrow(z);
  const auto matrix = [](const std::vector<bf16>& of, const Plain& m) {
    return rows::Matrix<bf16>{const_cast<bf16*>(of.data()), m.rows, m.cols, m.cols};
  };
  Plain scores{rows, wide, std::vector<float>(rows * wide, NAN)},
      sums{rows, columns, std::vector<float>(rows * columns, NAN)};
  const auto kernel = [&](const checks::EmulatedTeam& team) {
    const auto warp = rows::warp_of<warpgroups>(team);
    EXPECT_EQ(warp.count(), warps);
    rows::SharedRoom room(team.shared());
    const SharedRows left = room.take(rows, padded), right = room.take(wide, padded),
                     values = room.take(wide, columns);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(values.data) % 1024, 0u);
    rows::HeadColumns<padded>(team, matrix(in_x, x), 0, width).fetch(team, 0, there, left, rows);
    rows::HeadColumns<padded>(team, matrix(in_y, y), 0, width).fetch(team, 0, wide, right, wide);
    rows::HeadColumns<columns>(team, matrix(in_z, z), 0, z_columns).fetch(team, 0, wide, values, wide);
    warp.arrive();
    team.sync();
    const int row = warp.number() * 16 * strips;
    const rows::RowsTogether together = rows::rows_together<strips>(warp);
    EXPECT_TRUE(together.begin <= row && row < together.end);
    EXPECT_EQ(together.end - together.begin, (warpgroups ? 64 : 16) * strips);
    SumFragment of_scores[strips][wide / 8], of_sums[strips][columns / 8] = {};
    rows::begin_products(warp);
    rows::product_of_turned<strips, wide, padded>(warp, left, row, right, of_scores);
    rows::end_products(warp, of_scores);
    rows::Weights<strips, wide> weights(warp, of_scores);
    rows::begin_products(warp, weights.all, of_sums);
    rows::add_product_of_weights<strips, wide, columns>(warp, weights, values, 0, of_sums);
    rows::end_products(warp, of_sums);
    for (int i = 0; i < strips; ++i)
      for (int e = 0; e < 4; ++e) {
        const int r = row + 16 * i + rows::fragment_row(warp.lane(), e),
                  c = rows::fragment_column(warp.lane(), e);
        for (int j = 0; j < wide / 8; ++j) scores.at(r, 8 * j + c) = of_scores[i][j].sums[e];
        for (int j = 0; j < columns / 8; ++j) sums.at(r, 8 * j + c) = of_sums[i][j].sums[e];
      }
  };
  const std::size_t shared = rows::SharedRoom::bytes_for(rows + 2 * wide, columns);
  EmulatedLaunch(32 * warps, falling, 1, 1, shared).run("test", 1, kernel, shared);
  for (int i = 0; i < rows; ++i) {
    std::vector<float> expected(columns, 0.0f);
    for (int j = 0; j < wide; ++j) {
      float sum = 0;
      for (int k = 0; k < width; ++k) sum += i < there ? x.at(i, k) * y.at(j, k) : 0.0f;
      ASSERT_EQ(scores.at(i, j), sum) << i << ", " << j;
      for (int k = 0; k < z_columns; ++k) expected[static_cast<std::size_t>(k)] += bf16(sum) * z.at(j, k);
    }
    for (int k = 0; k < columns; ++k)
      ASSERT_EQ(sums.at(i, k), expected[static_cast<std::size_t>(k)]) << i << ", " << k;
  }
}
TEST_P(Fragments, AreMultipliedAsMatrices) {
  multiply_as_matrices<false, 2, 2>(GetParam());
  multiply_as_matrices<true, 1, 4>(GetParam());
  multiply_as_matrices<true, 1, 8>(GetParam());
}

// Eight neighbouring rows have any 16 bytes of theirs in banks of their own, and no two elements are one.
TEST(SharedRowsOf, AnyWidth) {
  constexpr int rows = 24;
  for (const int width : {16, 64, 80, 128, 256}) {
    std::vector<bf16> memory(static_cast<std::size_t>(SharedRows::elements(rows, width)));
    const SharedRows at{memory.data(), rows};
    std::set<const bf16*> seen;
    for (int column = 0; column < width; ++column)
      for (int row = 0; row < rows; ++row) {
        const bf16* const here = at.at(row, column);
        ASSERT_TRUE(here >= memory.data() && here < memory.data() + memory.size());
        EXPECT_TRUE(seen.insert(here).second);
        EXPECT_EQ(here, at.at(row, column - column % 8) + column % 8);
      }
    for (int column = 0; column < width; column += 8)
      for (int row = 0; row < rows; row += 8) {
        std::set<std::ptrdiff_t> banks;
        for (int r = row; r < row + 8; ++r) banks.insert((at.at(r, column) - memory.data()) / 8 % 8);
        EXPECT_EQ(banks.size(), 8u) << column << ", " << row;
      }
  }
}

TEST_P(Fragments, GoAcrossAWarp) {
  run(
      64,
      [&](const checks::EmulatedTeam& team) {
        const auto warp = team.warp();
        const auto mine = static_cast<float>(team.lane());
        for (const int apart : {1, 2, 16})
          EXPECT_EQ(warp.across(mine, apart), static_cast<float>(team.lane() ^ apart));
      },
      0);
}

// What makes a kernel wrong on a device shows here: in one order or the other, no number is read; and what is
// no program at all is refused.
TEST(FragmentRaces, AreSeen) {
  const std::vector<bf16> memory(8 * 64, bf16(1.0f));
  // Each warp copies its half, reads the other's, and then writes its own anew.
  const auto reads_numbers = [&](bool falling, bool arrive, bool sync, bool sync_again) {
    bool numbers = true;
    const std::size_t shared = 16 * 64;
    const auto kernel = [&](const checks::EmulatedTeam& team) {
      const auto warp = team.warp();
      bf16* const mine = reinterpret_cast<bf16*>(team.shared()) + 8 * team.lane();
      const auto other = reinterpret_cast<const bf16*>(team.shared()) + 8 * ((team.lane() + 32) % 64);
      warp.copy_later(mine, memory.data() + 8 * team.lane(), true);
      if (arrive) warp.arrive();
      if (sync) team.sync();
      std::uint32_t words[4];
      warp.load(other, words);
      for (const std::uint32_t two : words)
        numbers = numbers && !std::isnan(float{bf16::of_bits(static_cast<std::uint16_t>(two))});
      if (sync_again) team.sync();
      warp.arrive();
      *mine = bf16(NAN);
    };
    EmulatedLaunch(64, falling, 1, 1, shared).run("race", 1, kernel, shared);
    return numbers;
  };
  for (const bool falling : {false, true}) {
    EXPECT_TRUE(reads_numbers(falling, true, true, true));
    EXPECT_FALSE(reads_numbers(falling, true, false, true));
    EXPECT_FALSE(reads_numbers(falling, true, true, false));
    EXPECT_EQ(reads_numbers(falling, false, true, true), falling);  // there by chance
  }

  const auto all_lanes = [](const auto& kernel) {
    EmulatedLaunch(32, false, 1, 1, 64).run("all", 1, kernel, 64);
  };
  EXPECT_THROW(all_lanes([](const checks::EmulatedTeam& team) {
                 if (team.lane() > 0) team.warp().across(1.0f, 1);
               }),
               InvariantError);
  EXPECT_THROW(all_lanes([](const checks::EmulatedTeam& team) {
                 if (team.lane() == 0)
                   team.sync();
                 else
                   team.warp().across(1.0f, 1);
               }),
               InvariantError);
  EXPECT_THROW(all_lanes([&](const checks::EmulatedTeam& team) {
                 if (team.lane() == 0)
                   team.warp().copy_later(reinterpret_cast<bf16*>(team.shared()), memory.data(), true);
               }),
               InvariantError);
  EXPECT_THROW(all_lanes([&](const checks::EmulatedTeam& team) {
                 team.warp().copy_later(reinterpret_cast<bf16*>(team.shared()) + 1, memory.data(), true);
               }),
               InvariantError);
}

}  // namespace
}  // namespace echelon::fragments_test
