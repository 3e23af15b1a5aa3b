// Copies between host memory and a tensor's device. On Device::none a copy from the host does nothing, and
// one to the host is an InvariantError unless the caller says which values to use, since none were computed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tensor/tensor.h"

namespace echelon {

class Kernels;

// T as in Tensor::host(). Elements in row-major order, whatever the row stride.
template <class T>
std::vector<T> copy_to_host(const Tensor& from);
// The same; a dry run gets `dry` for each element.
template <class T>
std::vector<T> copy_to_host(const Tensor& from, T dry) {
  if (from.device() == Device::none) return std::vector<T>(static_cast<std::size_t>(from.numel()), dry);
  return copy_to_host<T>(from);
}
// `from` has as many elements as the tensor.
template <class T>
void copy_from_host(std::span<const T> from, Out to);
template <class T>
void copy_from_host(const std::vector<T>& from, Out to) {
  copy_from_host(std::span<const T>(from), to);
}

// Numbers of any float dtype as doubles; and back, each rounded once.
std::vector<double> copy_numbers_to_host(const Tensor& from);
void copy_numbers_from_host(std::span<const double> from, Out to);

// A contiguous tensor's bytes for the host to read and write; store() completes writing. On the CPU the
// tensor's own memory, elsewhere a copy.
class HostBytes {
 public:
  // `read`: loads the contents; otherwise the host must write everything.
  HostBytes(const Tensor& tensor, bool read);
  std::byte* data() const { return data_; }
  void store() const;

 private:
  Tensor tensor_;
  std::vector<std::byte> copy_;
  std::byte* data_;
};

// Uses kernels if both are on one device; otherwise one is contiguous host memory (offloaded).
void copy_anywhere(Kernels& kernels, const Tensor& from, Out to);

// A contiguous tensor of any type.
void fill_with_zero(Out to);

// Between contiguous tensors of one device and one type, which kernels need not support.
void copy_on_device(const Tensor& from, Out to);

// The bytes of a contiguous tensor; the sizes must match.
void copy_bytes_to_host(const Tensor& from, std::span<std::byte> to);
void copy_bytes_from_host(std::span<const std::byte> from, Out to);

}  // namespace echelon
