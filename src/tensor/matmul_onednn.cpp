#include "tensor/matmul_onednn.h"

#include <omp.h>
#include <oneapi/dnnl/dnnl.h>
#include <sys/mman.h>

#include <algorithm>
#include <tuple>

#include "base/error.h"

namespace echelon {
namespace {

// oneDNN cuts a deeper k in places that differ between its methods, and it chooses the method by m and n. Up
// to this depth all of them add in one order (found by experiment, with AVX-512); cutting here costs no
// measurable time.
constexpr std::int64_t deepest = 768;

bool multiply_once(const Product& p) {
  const auto letter = [](Transpose t) { return t == Transpose::yes ? 'T' : 'N'; };
  return dnnl_sgemm(letter(p.ta), letter(p.tb), p.m, p.n, p.k, p.alpha, static_cast<const float*>(p.a.data),
                    p.a.stride, static_cast<const float*>(p.b.data), p.b.stride, p.beta,
                    static_cast<float*>(p.c.data), p.c.stride) == dnnl_success;
}

}  // namespace

void keep_onednn_to_its_thread() { omp_set_num_threads(1); }

bool onednn_adds_in_one_order() {
  static const bool does =
      (dnnl_get_effective_cpu_isa() & dnnl_cpu_isa_avx512_core) == dnnl_cpu_isa_avx512_core;
  return does;
}

void prepare_onednn() {
  static const bool prepared = [] {
    constexpr std::size_t enough = std::size_t{40} << 20;  // it took 18 MiB when measured
    void* const room = ::mmap(nullptr, enough, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED)
      fail("out of memory: the system has no {} MiB left for matrix products", enough >> 20);
    ::munmap(room, enough);
    // A number, a vector and a matrix: together they make oneDNN generate the code that later calls use.
    const float one[4] = {1, 1, 1, 1};
    float result[4];
    bool ok = true;
    for (const auto& [m, n, turn] :
         {std::tuple{1, 1, Transpose::no}, {2, 1, Transpose::yes}, {2, 2, Transpose::no}})
      ok = multiply_once(
               {.tb = turn, .m = m, .n = n, .k = 1, .a = {one, 1}, .b = {one, 2}, .c = {result, 2}}) &&
           ok;
    if (!ok) fail("out of memory: oneDNN could not be prepared");
    return true;
  }();
  (void)prepared;
}

bool multiply_by_onednn(const Product& p) {
  for (std::int64_t begin = 0; begin < p.k; begin += deepest) {
    Product q = p;
    q.k = std::min(deepest, p.k - begin);
    q.a = at(p.a, p.ta, 0, begin);
    q.b = at(p.b, p.tb, begin, 0);
    if (begin > 0) q.beta = 1;
    if (!multiply_once(q)) return false;
  }
  return true;
}

}  // namespace echelon
