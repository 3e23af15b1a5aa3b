// From tensors to the function objects of tensor/rows/, and these to whatever runs them, a Launch, which has
//   matrix<T>(tensor), data<T>(tensor)   where the elements of a tensor are, for the kernel
//   run(name, blocks, kernel, shared)    kernel(team) for each block, with `shared` bytes of memory to each
//   run_rows(name, rows, cols, kernel)   the same without that memory, for rows of so many elements, of which
//                                        fewer lanes may do one where it is short: for what reads all of a
//                                        row before it writes it
//   piece()                              how many elements of a row are a block's
//   rows_at_once(rows, cols)             how many rows of a column sum are a block's
//   column_blocks(cols)                  how many blocks of column sums lie side by side
//   upload(span), scratch<T>(count)      a copy of the host's numbers, and room for some, until the call
//   ends:
//                                        each has data()
//   read(from, count)                    a vector of numbers that kernels have made; the host waits for them
// HostLaunch (tensor/host_launch.h) is one lane of the host, CudaLaunch (tensor/cuda/) a device's blocks.
#pragma once

#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

#include "tensor/kernel_backend.h"
#include "tensor/reference_view.h"
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
    const rows::EachElement<Kernel> each{kernel, cols, launch_.piece()};
    launch_.run(name, count * each.pieces(cols, each.piece), each);
  }
  // Several of one kind, which do not meet, in few launches: kernels that have `blocks` blocks each.
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

  // total (C) += sum over the rows of x of term(row, column), which is summed by itself first.
  template <class Term>
  void add_column_sums(const char* name, const Tensor& x, const Tensor& total, const Term& term) const {
    using F = decltype(term(0, 0));
    F* const to = launch_.template data<F>(total);
    const std::int64_t count = x.rows(), cols = x.cols(), chunk = launch_.rows_at_once(count, cols);
    const std::int64_t chunks = chunk == 0 ? 1 : (count + chunk - 1) / chunk;
    const std::int64_t wide = launch_.column_blocks(cols);
    if (chunks <= 1)
      return launch_.run(name, wide, rows::ColumnSums<F, Term>{term, to, count, cols, count, true});
    const auto parts = launch_.template scratch<F>(chunks * cols);
    launch_.run(name, wide * chunks,
                rows::ColumnSums<F, Term>{term, parts.data(), count, cols, chunk, false});
    using Parts = rows::PartOfColumn<F>;
    launch_.run(name, wide,
                rows::ColumnSums<F, Parts>{Parts{parts.data(), cols}, to, chunks, cols, chunks, true});
  }

  // body(matrix of x, matrix of y) where both are of one type, or one is bf16 and the other f32.
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
  Launch launch_;
};

}  // namespace echelon
