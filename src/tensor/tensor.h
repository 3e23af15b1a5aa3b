// A typed view of memory, which other tensors may share. No gradient, no graph.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "spec/dtype.h"
#include "tensor/arena.h"

namespace echelon {

// Row-major. The innermost dimension is contiguous; rows of a 2-D view may be further apart than its columns
// (a column range of a wider matrix). Copying a Tensor copies the view, never the data.
class Tensor {
 public:
  Tensor() = default;  // empty: defined() is false
  // Allocates from the arena, contents undefined.
  Tensor(Arena& arena, MemoryCategory category, DType dtype, std::vector<std::int64_t> shape);
  // A tensor that gets its memory from acquire_memory().
  static Tensor without_memory(Arena& arena, MemoryCategory category, DType dtype,
                               std::vector<std::int64_t> shape);
  // A view of host memory, which the caller keeps alive.
  static Tensor view_of(void* data, DType dtype, std::vector<std::int64_t> shape);
  // The same with a row stride in elements.
  static Tensor view_of(void* data, DType dtype, std::vector<std::int64_t> shape, std::int64_t row_stride);
  // Host memory of its own, which no arena counts; contents undefined.
  static Tensor of_host(DType dtype, std::vector<std::int64_t> shape);

  // A new tensor, contents undefined, from the same arena as this one, or in host memory if this one has no
  // arena.
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

  // The elements, for the host to read and write; only on the CPU. InvariantError on another device, and
  // while the memory is released. T must be float, double, bf16, std::int32_t, std::int16_t or std::uint8_t
  // and match dtype() (checked). For other devices see tensor/host.h.
  template <class T>
  T* host() const;
  void* host_bytes() const;
  // The address of its elements, for code on its device: kernels, and the driver's copies. InvariantError on
  // no device, and while the memory is released. T as in host().
  template <class T>
  T* on_device() const;
  std::byte* address() const;
  // Device::cuda: its arena's stream, on which kernels use it.
  DeviceStream& stream() const;
  // Device::cuda: a stream for transfers between ranks, one for each name: Arena::transfers().
  DeviceStream& transfers(const std::string& name) const;
  // Another stream uses the memory until `event`: it is not reused before. For host memory, the host waits
  // when it accesses it.
  void in_use_until(std::shared_ptr<DeviceEvent> event) const;
  // The whole allocation behind this view, as bytes (u8).
  Tensor allocation() const;
  // How many tensors view the allocation, this one included.
  std::int64_t num_views() const { return owner_.use_count(); }
  // Whether both start at the same byte.
  bool begins_with(const Tensor& other) const;

  // Rows [begin, end), of a 2-D or folded tensor; the result is 2-D.
  Tensor row_range(std::int64_t begin,
                   std::int64_t end) const;  // 2-D or folded: rows [begin, end), 2-D result
  Tensor column_range(std::int64_t begin, std::int64_t end) const;  // 2-D
  Tensor reshape(std::vector<std::int64_t> shape) const;            // contiguous only
  // Elements [begin, end) of a contiguous tensor as a 1-D view.
  Tensor flat_range(std::int64_t begin, std::int64_t end) const;
  Tensor flat() const { return flat_range(0, numel()); }
  // For bytes (u8, contiguous): those from `begin` on as a tensor of another dtype, suitably aligned.
  Tensor typed(std::int64_t begin, DType dtype, std::vector<std::int64_t> shape) const;

  // Returns the memory of the whole allocation, and so of all its views, to the arena; acquire_memory()
  // allocates it again, contents undefined.
  void release_memory() const;
  void acquire_memory() const;
  bool has_memory() const { return owner_ && owner_->has_memory; }

  // Swaps the allocations behind two tensors, and so behind all views of both: to switch which version of the
  // weights layers see. They must have the same size.
  static void swap_memory(const Tensor& a, const Tensor& b);

 private:
  std::shared_ptr<Block> owner_;
  std::int64_t offset_ = 0;  // bytes into the allocation
  DType dtype_ = DType::f32;
  std::vector<std::int64_t> shape_;
  std::int64_t row_stride_ = 0;
};

// Mark a function's outputs (Out), and what it both reads and writes (InOut), in its signature. Valid for the
// length of the call.
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
