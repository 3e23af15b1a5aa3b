#include "tensor/orthonormalize.h"

#include "base/error.h"
#include "tensor/rows/orthonormalize.h"

namespace echelon {

template <class F>
void orthonormalize_rows(F* x, std::int64_t rows, std::int64_t cols, const Philox& fresh) {
  check(rows <= cols, "more orthonormal rows than they have elements");
  rows::OrthonormalizeRows<F>::of(x, rows, cols, fresh.key())(rows::OneLane(0));
}

template void orthonormalize_rows(float*, std::int64_t, std::int64_t, const Philox&);
template void orthonormalize_rows(double*, std::int64_t, std::int64_t, const Philox&);

}  // namespace echelon
