#include "tensor/tensor.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "base/error.h"
#include "tensor/device_stream.h"

namespace echelon {

static std::int64_t product(const std::vector<std::int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

Tensor::Tensor(Arena& arena, MemoryCategory category, DType dtype, std::vector<std::int64_t> shape)
    : dtype_(dtype), shape_(std::move(shape)), row_stride_(shape_.empty() ? 1 : shape_.back()) {
  owner_ = arena.allocate(static_cast<std::size_t>(product(shape_) * element_bytes(dtype)), category);
}

Tensor Tensor::without_memory(Arena& arena, MemoryCategory category, DType dtype,
                              std::vector<std::int64_t> shape) {
  Tensor t;
  t.dtype_ = dtype;
  t.shape_ = std::move(shape);
  t.row_stride_ = t.shape_.empty() ? 1 : t.shape_.back();
  t.owner_ = arena.block_without_memory(static_cast<std::size_t>(product(t.shape_) * element_bytes(dtype)),
                                        category);
  return t;
}

Tensor Tensor::view_of(void* data, DType dtype, std::vector<std::int64_t> shape) {
  Tensor t;
  t.owner_ = std::make_shared<Block>();
  t.owner_->data = static_cast<std::byte*>(data);
  t.owner_->has_memory = true;
  t.dtype_ = dtype;
  t.shape_ = std::move(shape);
  t.row_stride_ = t.shape_.empty() ? 1 : t.shape_.back();
  return t;
}

Tensor Tensor::view_of(void* data, DType dtype, std::vector<std::int64_t> shape, std::int64_t row_stride) {
  Tensor t = view_of(data, dtype, std::move(shape));
  check(row_stride >= t.cols() || t.rows() <= 1, "rows of a view overlap");
  t.row_stride_ = row_stride;
  return t;
}

Tensor Tensor::of_host(DType dtype, std::vector<std::int64_t> shape) {
  const std::int64_t bytes = product(shape) * element_bytes(dtype);
  const std::shared_ptr<std::byte[]> memory(new std::byte[static_cast<std::size_t>(bytes)]);
  Tensor t = view_of(memory.get(), dtype, std::move(shape));
  t.owner_ = {new Block(*t.owner_), [memory](Block* block) { delete block; }};
  return t;
}

Tensor Tensor::beside(MemoryCategory category, DType dtype, std::vector<std::int64_t> shape) const {
  check(defined(), "memory is asked for beside a tensor that is not there");
  if (owner_->arena == nullptr) return of_host(dtype, std::move(shape));
  return {*owner_->arena, category, dtype, std::move(shape)};
}

std::int64_t Tensor::numel() const { return product(shape_); }

std::int64_t Tensor::cols() const { return shape_.empty() ? 1 : shape_.back(); }

std::int64_t Tensor::rows() const {
  std::int64_t count = 1;
  for (std::size_t i = 0; i + 1 < shape_.size(); ++i) count *= shape_[i];
  return count;
}

void* Tensor::host_bytes() const {
  if (!owner_) return nullptr;
  check(owner_->device == Device::cpu, "the host reads a tensor whose device is not the cpu");
  check(owner_->has_memory, "a tensor is read while its memory is released");
  for (const auto& use : owner_->in_use_until) use->synchronize();
  owner_->in_use_until.clear();
  return owner_->data + offset_;
}

std::byte* Tensor::address() const {
  if (!owner_) return nullptr;
  check(owner_->device != Device::none, "a tensor of no device has no address");
  check(owner_->has_memory, "a tensor is used while its memory is released");
  return owner_->data + offset_;
}

DeviceStream& Tensor::stream() const {
  check(owner_ != nullptr && owner_->device == Device::cuda, "a tensor of the host has no stream");
  return owner_->arena->stream();
}

DeviceStream& Tensor::transfers(const std::string& name) const {
  check(owner_ != nullptr && owner_->device == Device::cuda, "a tensor of the host has no stream");
  return owner_->arena->transfers(name);
}

void Tensor::in_use_until(std::shared_ptr<DeviceEvent> event) const {
  if (!owner_) return;
  // Removes past events: memory that stays for the whole run is used again and again.
  auto& uses = owner_->in_use_until;
  uses.erase(uses.begin(),
             std::find_if_not(uses.begin(), uses.end(), [](const auto& use) { return use->has_happened(); }));
  uses.push_back(std::move(event));
}

bool Tensor::begins_with(const Tensor& other) const {
  if (!owner_ || !other.owner_) return owner_ == other.owner_;
  if (owner_ == other.owner_) return offset_ == other.offset_;
  // Each view of host memory has a separate owner.
  return owner_->data != nullptr && other.owner_->data != nullptr &&
         owner_->data + offset_ == other.owner_->data + other.offset_;
}

Tensor Tensor::allocation() const {
  check(owner_ != nullptr && owner_->arena != nullptr, "memory that somebody else keeps is no allocation");
  Tensor t;
  t.owner_ = owner_;
  t.dtype_ = DType::u8;
  t.shape_ = {static_cast<std::int64_t>(owner_->bytes)};
  t.row_stride_ = t.cols();
  return t;
}

void Tensor::release_memory() const { owner_->arena->release(*owner_); }

void Tensor::acquire_memory() const { owner_->arena->acquire(*owner_); }

template <class T>
T* Tensor::host() const {
  check(dtype_ == dtype_of<T>, "tensor read as another dtype than it has");
  return static_cast<T*>(host_bytes());
}
template float* Tensor::host<float>() const;
template double* Tensor::host<double>() const;
template bf16* Tensor::host<bf16>() const;
template std::int32_t* Tensor::host<std::int32_t>() const;
template std::int16_t* Tensor::host<std::int16_t>() const;
template std::uint8_t* Tensor::host<std::uint8_t>() const;

template <class T>
T* Tensor::on_device() const {
  check(dtype_ == dtype_of<T>, "tensor read as another dtype than it has");
  return reinterpret_cast<T*>(address());
}
template float* Tensor::on_device<float>() const;
template double* Tensor::on_device<double>() const;
template bf16* Tensor::on_device<bf16>() const;
template std::int32_t* Tensor::on_device<std::int32_t>() const;
template std::int16_t* Tensor::on_device<std::int16_t>() const;
template std::uint8_t* Tensor::on_device<std::uint8_t>() const;

Tensor Tensor::row_range(std::int64_t begin, std::int64_t end) const {
  check(0 <= begin && begin <= end && end <= rows(), "row range lies outside the tensor");
  Tensor t = *this;
  t.shape_ = {end - begin, cols()};
  t.offset_ += begin * row_stride_ * element_bytes(dtype_);
  return t;
}

Tensor Tensor::column_range(std::int64_t begin, std::int64_t end) const {
  check(shape_.size() == 2 && 0 <= begin && begin <= end && end <= cols(),
        "column range lies outside the matrix");
  Tensor t = *this;
  t.shape_[1] = end - begin;
  t.offset_ += begin * element_bytes(dtype_);
  return t;
}

Tensor Tensor::reshape(std::vector<std::int64_t> shape) const {
  check(contiguous() && product(shape) == numel(), "reshape needs a contiguous tensor of the same size");
  Tensor t = *this;
  t.shape_ = std::move(shape);
  t.row_stride_ = t.cols();
  return t;
}

Tensor Tensor::flat_range(std::int64_t begin, std::int64_t end) const {
  check(contiguous() && 0 <= begin && begin <= end && end <= numel(), "flat range lies outside the tensor");
  Tensor t = *this;
  t.shape_ = {end - begin};
  t.row_stride_ = end - begin;
  t.offset_ += begin * element_bytes(dtype_);
  return t;
}

Tensor Tensor::typed(std::int64_t begin, DType dtype, std::vector<std::int64_t> shape) const {
  Tensor t = flat_range(begin, begin + product(shape) * element_bytes(dtype));
  check(dtype_ == DType::u8 && t.offset_ % element_bytes(dtype) == 0, "bytes are read as aligned elements");
  t.dtype_ = dtype;
  t.shape_ = std::move(shape);
  t.row_stride_ = t.cols();
  return t;
}

void Tensor::swap_memory(const Tensor& a, const Tensor& b) {
  check(a.owner_ && b.owner_ && a.owner_->bytes == b.owner_->bytes && a.owner_->arena == b.owner_->arena,
        "memory is swapped between allocations of one size");
  std::swap(a.owner_->data, b.owner_->data);
  std::swap(a.owner_->capacity, b.owner_->capacity);
  std::swap(a.owner_->has_memory, b.owner_->has_memory);
  std::swap(a.owner_->in_use_until, b.owner_->in_use_until);
}

}  // namespace echelon
