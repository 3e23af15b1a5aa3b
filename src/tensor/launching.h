// Calls the function objects of tensor/rows/ on tensors. A Launch runs them; it has
//   matrix<T>(tensor), data<T>(tensor)   where the elements of a tensor are, for the kernel
//   run(name, blocks, kernel, shared)    kernel(team) for each block, with `shared` bytes of memory to each
//   run_rows(name, rows, cols, kernel)   the same without that memory, for rows of `cols` elements; fewer
//                                        lanes may do a short row: for kernels that read all of a row before
//                                        they write it
//   piece()                              how many elements of a row are a block's
//   rows_at_once(rows, cols)             how many rows of a column sum are a block's
//   lanes()                              of a block
//   upload(span), scratch<T>(count)      a copy of the host's numbers, and work space, valid until the call
//                                        ends; each has data()
//   read(from, count)                    a vector of numbers that kernels computed; the host waits for them
// HostLaunch (tensor/host_launch.h) is one lane of the host, CudaLaunch (tensor/cuda/) a device's blocks.
#pragma once

#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

#include "tensor/kernel_backend.h"
#include "tensor/reference_view.h"
#include "tensor/rows/column_sums.h"
#include "tensor/rows/columns.h"
#include "tensor/rows/team.h"

namespace echelon {

template <class Launch>
class Launching {
 protected:
  explicit Launching(Launch launch) : launch_(std::move(launch)) {}
  const Launch& launch() const { return launch_; }

  template <class Kernel>
  void each_row(const char* name, std::int64_t count, const Kernel& kernel) const {
    launch_.run(name, count, rows::EachRow<Kernel>{kernel});
  }
  // Of the matrix that t is.
  template <class Kernel>
  void each_row(const char* name, const Tensor& t, const Kernel& kernel) const {
    launch_.run_rows(name, t.rows(), t.cols(), rows::EachRow<Kernel>{kernel});
  }
  template <class Kernel>
  void each_element(const char* name, std::int64_t count, std::int64_t cols, const Kernel& kernel) const {
    if constexpr (rows::TakesColumns<Kernel>) {
      const rows::EachRun<Kernel> each(kernel, count, cols);
      launch_.run(name, each.num_blocks(launch_.lanes()), each);
    } else {
      const rows::EachElement<Kernel> each{kernel, cols, launch_.piece()};
      launch_.run(name, count * each.pieces(cols, each.piece), each);
    }
  }
  // Runs several kernels of one kind, which do not overlap and have `blocks` blocks each, in few launches.
  template <class Kernel>
  void run_together(const char* name, std::span<const Kernel> kernels,
                    std::span<const std::int64_t> blocks) const {
    for (std::size_t begin = 0; begin < kernels.size();) {
      rows::Together<Kernel> together;
      std::int64_t all = 0;
      for (; begin < kernels.size() && together.count < together.most; ++begin) {
        if (blocks[begin] == 0) continue;
        together.kernels[together.count] = kernels[begin];
        together.first_blocks[together.count++] = all;
        all += blocks[begin];
      }
      launch_.run(name, all, together);
    }
  }
  // Of the matrix that t is.
  template <class Kernel>
  void elements(const char* name, const Tensor& t, const Kernel& kernel) const {
    each_element(name, t.rows(), t.cols(), kernel);
  }

  // Each of the totals (C) += the sum over `rows` of its terms (rows/column_sums.h); the sum is computed
  // separately first.
  template <class Term>
  void add_column_sums(const char* name, std::int64_t rows, std::int64_t cols, const Term& term,
                       rows::ColumnTotals<Term> totals) const {
    const std::int64_t chunk = launch_.rows_at_once(rows, cols);
    const std::int64_t chunks = chunk == 0 ? 1 : (rows + chunk - 1) / chunk;
    if (chunks <= 1) return add_up(name, rows::ColumnSums<Term>{term, totals, rows, cols, rows, true});
    const std::int64_t width = Term::sums * cols;  // of the parts of a chunk
    const auto parts = launch_.template scratch<typename Term::F>(chunks * width);
    rows::ColumnTotals<Term> of_first{.to = {}, .stride = width};
    for (int s = 0; s < Term::sums; ++s) of_first.to[s] = parts.data() + s * cols;
    add_up(name, rows::ColumnSums<Term>{term, of_first, rows, cols, chunk, false});
    using Parts = rows::PartsOfColumns<typename Term::F, Term::sums>;
    rows::ColumnTotals<Parts> of_all{};
    for (int s = 0; s < Term::sums; ++s) of_all.to[s] = totals.to[s];
    add_up(name, rows::ColumnSums<Parts>{Parts{{parts.data(), chunks, width, width}, cols}, of_all, chunks,
                                         cols, chunks, true});
  }

  // Calls body(matrix of x, matrix of y) if both have one type, or one is bf16 and the other f32.
  template <class Body>
  void with_pair(const Tensor& x, const Tensor& y, const Body& body) const {
    with_stored_type(x, [&]<class X>(X) {
      with_stored_type(y, [&]<class Y>(Y) {
        if constexpr (std::is_same_v<Wide<X>, Wide<Y>>)
          body(launch_.template matrix<X>(x), launch_.template matrix<Y>(y));
      });
    });
  }

 private:
  template <class Sums>
  void add_up(const char* name, const Sums& sums) const {
    launch_.run(name, sums.num_blocks(launch_.lanes()), sums, sums.shared_bytes(launch_.lanes()));
  }

  Launch launch_;
};

}  // namespace echelon
