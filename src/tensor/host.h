// What crosses between the host's memory and a tensor's device. On Device::none there is nothing to cross: a
// copy from the host does nothing, and one to the host is an InvariantError, as whoever reads numbers that
// were never computed must say what they are to be.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tensor/tensor.h"

namespace echelon {

class Kernels;

// T as in Tensor::host(). The elements in row-major order, whatever the stride of the rows.
template <class T>
std::vector<T> copy_to_host(const Tensor& from);
// The same where a dry run goes on with `dry` in each place.
template <class T>
std::vector<T> copy_to_host(const Tensor& from, T dry) {
  if (from.device() == Device::none) return std::vector<T>(static_cast<std::size_t>(from.numel()), dry);
  return copy_to_host<T>(from);
}
// As many elements as the tensor has.
template <class T>
void copy_from_host(std::span<const T> from, Out to);
template <class T>
void copy_from_host(const std::vector<T>& from, Out to) {
  copy_from_host(std::span<const T>(from), to);
}

// Numbers of any float dtype as doubles, and back, each rounded once.
std::vector<double> copy_numbers_to_host(const Tensor& from);
void copy_numbers_from_host(std::span<const double> from, Out to);

// A contiguous tensor as bytes that the host reads, and writes where it is done by store(): its own on the
// cpu, elsewhere a copy.
class HostBytes {
 public:
  // `read`: what it holds is there; else the host writes all of it.
  HostBytes(const Tensor& tensor, bool read);
  std::byte* data() const { return data_; }
  void store() const;

 private:
  Tensor tensor_;
  std::vector<std::byte> copy_;
  std::byte* data_;
};

// By kernels where both are on one device; else one is contiguous memory of the host (what is offloaded).
void copy_anywhere(Kernels& kernels, const Tensor& from, Out to);

// A contiguous tensor of any type.
void fill_with_zero(Out to);

// From tensor to tensor of one device, contiguous and of one type, which may be one that no kernel copies.
void copy_on_device(const Tensor& from, Out to);

// The bytes of a contiguous tensor; as many as it has.
void copy_bytes_to_host(const Tensor& from, std::span<std::byte> to);
void copy_bytes_from_host(std::span<const std::byte> from, Out to);

}  // namespace echelon
