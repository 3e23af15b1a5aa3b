// Computes a vector of pairs at a time, with a logarithm, sine and cosine that are not the C library's. Both
// versions are close enough to the exact values to nearly always round to the same f32; if that is not
// certain, the C library's result is used (Ziv 1991, https://doi.org/10.1145/114697.116813). So the numbers
// do not depend on the processor.
#include "tensor/normals.h"

#include <algorithm>

#include "base/philox_words.h"

// The build chooses the instruction sets (CMakeLists.txt).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/normals.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <hwy/contrib/math/math-inl.h>

#ifndef ECHELON_NORMALS_ONE_BY_ONE
#define ECHELON_NORMALS_ONE_BY_ONE
namespace echelon {
// Both numbers of each block.
static void normals_one_by_one(const PhiloxKey& key, double deviation, std::uint64_t block,
                               std::int64_t blocks, float* out) {
  for (std::int64_t i = 0; i < blocks; ++i) {
    const NormalPair pair = philox_normal_pair(philox_block(key, block + static_cast<std::uint64_t>(i)));
    out[2 * i] = static_cast<float>(deviation * pair.first);
    out[2 * i + 1] = static_cast<float>(deviation * pair.second);
  }
}
}  // namespace echelon
#endif

HWY_BEFORE_NAMESPACE();
namespace echelon {
namespace HWY_NAMESPACE {
namespace {

#if HWY_TARGET == HWY_SCALAR  // where there are no vectors
std::int64_t normals(const PhiloxKey&, double, std::uint64_t, std::int64_t, float*) { return 0; }
#else

namespace hn = hwy::HWY_NAMESPACE;
using hn::Add, hn::And, hn::Mul, hn::MulAdd, hn::Set, hn::Sub, hn::Xor;
using F64 = hn::ScalableTag<double>;
using U64 = hn::RebindToUnsigned<F64>;
using I64 = hn::RebindToSigned<F64>;
using U32 = hn::Repartition<std::uint32_t, U64>;
using F32 = hn::Rebind<float, F64>;
using Word = hn::Vec<U64>;  // 32-bit words, in the lower halves
using Double = hn::Vec<F64>;

struct Words {
  Word v0, v1, v2, v3;
};

// philox_block() for blocks `index`.
HWY_INLINE Words philox(const PhiloxKey& key, Word index) {
  const U64 d;
  const U32 words;
  const Word lower = Set(d, 0xffffffffu);
  Word c0 = And(index, lower), c1 = hn::ShiftRight<32>(index), c2 = Set(d, key.substream & 0xffffffffu),
       c3 = Set(d, key.substream >> 32);
  std::uint32_t k0 = key.low, k1 = key.high;
  for (int round = 0; round < 10; ++round) {
    const Word a = hn::MulEven(hn::BitCast(words, c0), Set(words, 0xD2511F53u)),
               b = hn::MulEven(hn::BitCast(words, c2), Set(words, 0xCD9E8D57u));
    c0 = Xor(Xor(hn::ShiftRight<32>(b), c1), Set(d, k0));
    c1 = And(b, lower);
    c2 = Xor(Xor(hn::ShiftRight<32>(a), c3), Set(d, k1));
    c3 = And(a, lower);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {c0, c1, c2, c3};
}

// The 53 bits of philox_unit().
HWY_INLINE Word unit_bits(Word high, Word low) {
  return hn::ShiftRight<11>(hn::Or(hn::ShiftLeft<32>(high), low));
}
HWY_INLINE Double as_double(Word bits) { return hn::ConvertTo(F64(), hn::BitCast(I64(), bits)); }

// Sine and cosine of 2 pi bits / 2^53, from y, the remainder after the nearest quarter turn, in [-pi/4,
// pi/4]: fdlibm's polynomials, within 2^-57.
HWY_INLINE void sine_and_cosine(Word bits, Double& sine, Double& cosine) {
  const F64 d;
  const U64 du;
  const Word quarters = hn::ShiftRight<51>(Add(bits, Set(du, std::uint64_t{1} << 50)));
  const Double y =
      Mul(as_double(Sub(bits, hn::ShiftLeft<51>(quarters))), Set(d, 2 * std::numbers::pi * 0x1.0p-53));
  const Double z = Mul(y, y);
  Double s = Set(d, 1.58969099521155010221e-10);
  s = MulAdd(s, z, Set(d, -2.50507602534068634195e-08));
  s = MulAdd(s, z, Set(d, 2.75573137070700676789e-06));
  s = MulAdd(s, z, Set(d, -1.98412698298579493134e-04));
  s = MulAdd(s, z, Set(d, 8.33333333332248946124e-03));
  s = MulAdd(s, z, Set(d, -1.66666666666666324348e-01));
  s = MulAdd(Mul(s, z), y, y);
  Double c = Set(d, -1.13596475577881948265e-11);
  c = MulAdd(c, z, Set(d, 2.08757232129817482790e-09));
  c = MulAdd(c, z, Set(d, -2.75573143513906633035e-07));
  c = MulAdd(c, z, Set(d, 2.48015872894767294178e-05));
  c = MulAdd(c, z, Set(d, -1.38888888888741095749e-03));
  c = MulAdd(c, z, Set(d, 4.16666666666666019037e-02));
  c = MulAdd(Mul(c, z), z, MulAdd(z, Set(d, -0.5), Set(d, 1.0)));
  const auto odd = hn::RebindMask(d, hn::Ne(And(quarters, Set(du, 1)), hn::Zero(du)));
  const Word sine_sign = hn::ShiftLeft<62>(And(quarters, Set(du, 2))),
             cosine_sign = hn::ShiftLeft<62>(And(Add(quarters, Set(du, 1)), Set(du, 2)));
  sine = Xor(hn::IfThenElse(odd, c, s), hn::BitCast(d, sine_sign));
  cosine = Xor(hn::IfThenElse(odd, s, c), hn::BitCast(d, cosine_sign));
}

// Returns how many blocks it computed: all except a last incomplete vector.
std::int64_t normals(const PhiloxKey& key, double deviation, std::uint64_t block, std::int64_t blocks,
                     float* out) {
  const F64 d;
  const U64 du;
  const F32 df;
  const hn::RebindToUnsigned<F32> bits;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + lanes <= blocks; i += lanes) {
    const Words w = philox(key, hn::Iota(du, block + static_cast<std::uint64_t>(i)));
    const Double one_less = Sub(Set(d, 1.0), Mul(as_double(unit_bits(w.v0, w.v1)), Set(d, 0x1.0p-53)));
    const Double radius = Mul(hn::Sqrt(Mul(Set(d, -2.0), hn::Log(d, one_less))), Set(d, deviation));
    Double sine, cosine;
    sine_and_cosine(unit_bits(w.v2, w.v3), sine, cosine);
    // The logarithm here is within 4 ulp, which the root halves, and so is the C library's. Sine and cosine
    // differ from those of the C library by less than 2^-49: it computes those of an angle that is rounded to
    // 2^-51. So the two versions of a product are within 2^-48 radius of one another; 2^-44 leaves room. For
    // a zero, the sign is uncertain.
    const Double doubt = MulAdd(radius, Set(d, 0x1.0p-44), Set(d, 1e-300));
    const Double first = Mul(radius, cosine), second = Mul(radius, sine);
    const auto low1 = hn::DemoteTo(df, Sub(first, doubt)), high1 = hn::DemoteTo(df, Add(first, doubt));
    const auto low2 = hn::DemoteTo(df, Sub(second, doubt)), high2 = hn::DemoteTo(df, Add(second, doubt));
    const auto differ = hn::Or(Xor(hn::BitCast(bits, low1), hn::BitCast(bits, high1)),
                               Xor(hn::BitCast(bits, low2), hn::BitCast(bits, high2)));
    if (hn::AllTrue(bits, hn::Eq(differ, hn::Zero(bits))))
      hn::StoreInterleaved2(low1, low2, df, out + 2 * i);
    else
      normals_one_by_one(key, deviation, block + static_cast<std::uint64_t>(i), lanes, out + 2 * i);
  }
  return i;
}

#endif

}  // namespace

std::int64_t normals_of_vectors(const PhiloxKey& key, double deviation, std::uint64_t block,
                                std::int64_t blocks, float* out) {
  return normals(key, deviation, block, blocks, out);
}

}  // namespace HWY_NAMESPACE
}  // namespace echelon
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace echelon {

HWY_EXPORT(normals_of_vectors);

void fill_normals(const Philox& random, double deviation, std::uint64_t first, std::span<float> out) {
  std::int64_t i = 0;
  const std::int64_t count = std::ssize(out);
  const auto one = [&] {
    out[static_cast<std::size_t>(i)] =
        static_cast<float>(deviation * random.normal(first + static_cast<std::uint64_t>(i)));
    ++i;
  };
  if (first % 2 == 1 && count > 0) one();
  const std::uint64_t block = (first + static_cast<std::uint64_t>(i)) / 2;
  const std::int64_t blocks = (count - i) / 2;
  const PhiloxKey key = random.key();
  float* const whole = out.data() + i;
  const std::int64_t done = HWY_DYNAMIC_DISPATCH(normals_of_vectors)(key, deviation, block, blocks, whole);
  normals_one_by_one(key, deviation, block + static_cast<std::uint64_t>(done), blocks - done,
                     whole + 2 * done);
  i += 2 * blocks;
  if (i < count) one();
}

}  // namespace echelon
#endif
