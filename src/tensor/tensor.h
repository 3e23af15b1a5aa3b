// A typed view of memory that it may share. No gradient, no graph.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "spec/dtype.h"
#include "tensor/arena.h"

namespace echelon {

// Row-major. The innermost dimension is contiguous; a 2-D view may have rows further apart than its columns
// (a column range of a wider matrix). Copying a Tensor copies the view, never the data.
class Tensor {
 public:
  Tensor() = default;  // empty: defined() is false
  // Allocates from the arena, contents undefined.
  Tensor(Arena& arena, MemoryCategory category, DType dtype, std::vector<std::int64_t> shape);
  // One that gets its memory by acquire_memory().
  static Tensor without_memory(Arena& arena, MemoryCategory category, DType dtype,
                               std::vector<std::int64_t> shape);
  // A view of the host's memory, which the caller keeps alive.
  static Tensor view_of(void* data, DType dtype, std::vector<std::int64_t> shape);
  // The same with rows so many elements apart.
  static Tensor view_of(void* data, DType dtype, std::vector<std::int64_t> shape, std::int64_t row_stride);
  // Memory of the host's own, which no arena counts; contents undefined.
  static Tensor of_host(DType dtype, std::vector<std::int64_t> shape);

  // Contents undefined; from the arena that this tensor's memory is from, or the host's own where no arena
  // counts that.
  Tensor beside(MemoryCategory category, DType dtype, std::vector<std::int64_t> shape) const;

  bool defined() const { return owner_ != nullptr; }
  DType dtype() const { return dtype_; }
  Device device() const { return owner_ ? owner_->device : Device::cpu; }
  const std::vector<std::int64_t>& shape() const { return shape_; }
  std::int64_t dim(int i) const { return shape_[static_cast<std::size_t>(i)]; }
  std::int64_t numel() const;
  std::int64_t bytes() const { return numel() * element_bytes(dtype_); }
  // 2-D: rows() x cols(), rows row_stride() elements apart. Other shapes: the leading dimensions folded into
  // rows.
  std::int64_t rows() const;
  std::int64_t cols() const;
  std::int64_t row_stride() const { return row_stride_; }
  bool contiguous() const { return row_stride_ == cols() || rows() <= 1; }

  // What the host may read and write as its own: on the cpu alone. InvariantError on another device, and
  // while the memory is released. T must be float, double, bf16, std::int32_t, std::int16_t or std::uint8_t
  // and match dtype() (checked). What works on any device is in tensor/host.h.
  template <class T>
  T* host() const;
  void* host_bytes() const;
  // Where its elements are, for what runs on its device: kernels, and the driver's copies. InvariantError on
  // no device, and while the memory is released. T as in host().
  template <class T>
  T* on_device() const;
  std::byte* address() const;
  // Of Device::cuda: where the kernels run that use it, of its arena.
  DeviceStream& stream() const;
  // And where what crosses between ranks does, one for each name: Arena::transfers().
  DeviceStream& transfers(const std::string& name) const;
  // Work of another stream than its arena's uses the memory until then: it is not handed out again before.
  // Of the host's memory: the host waits where it touches it.
  void in_use_until(std::shared_ptr<DeviceEvent> event) const;
  // The whole allocation behind it, as bytes (u8), whatever of it this is a view of.
  Tensor allocation() const;
  // How many tensors view that, this one among them.
  std::int64_t num_views() const { return owner_.use_count(); }
  // Whether both begin at the same byte.
  bool begins_with(const Tensor& other) const;

  Tensor row_range(std::int64_t begin,
                   std::int64_t end) const;  // 2-D or folded: rows [begin, end), 2-D result
  Tensor column_range(std::int64_t begin, std::int64_t end) const;  // 2-D
  Tensor reshape(std::vector<std::int64_t> shape) const;            // contiguous only
  // Elements [begin, end) of a contiguous tensor as a 1-D view.
  Tensor flat_range(std::int64_t begin, std::int64_t end) const;
  Tensor flat() const { return flat_range(0, numel()); }
  // Of bytes (u8, contiguous): those from `begin` on as a tensor of another dtype, whose elements are aligned
  // there.
  Tensor typed(std::int64_t begin, DType dtype, std::vector<std::int64_t> shape) const;

  // The memory of the whole allocation behind this tensor, and so behind all its views, goes back to the
  // arena and comes again with undefined contents.
  void release_memory() const;
  void acquire_memory() const;
  bool has_memory() const { return owner_ && owner_->has_memory; }

  // The allocations that two tensors view change places, and with them all views of both: which of several
  // versions of the weights the layers see. Same size.
  static void swap_memory(const Tensor& a, const Tensor& b);

 private:
  std::shared_ptr<Block> owner_;
  std::int64_t offset_ = 0;  // bytes into the allocation
  DType dtype_ = DType::f32;
  std::vector<std::int64_t> shape_;
  std::int64_t row_stride_ = 0;
};

// How a call takes what it writes (Out), and what it reads and writes (InOut): its signature says so. For
// the length of the call.
class Out {
 public:
  Out(const Tensor& tensor) : tensor_(tensor) {}  // NOLINT(google-explicit-constructor)
  operator const Tensor&() const { return tensor_; }
  const Tensor* operator->() const { return &tensor_; }
  template <class T>
  T* host() const {
    return tensor_.host<T>();
  }
  template <class T>
  T* on_device() const {
    return tensor_.on_device<T>();
  }

 private:
  const Tensor& tensor_;
};
class InOut : public Out {
  using Out::Out;
};

}  // namespace echelon
