#include "tensor/host.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "tensor/reference_view.h"

namespace echelon {
namespace {

void check_readable(const Tensor& from) {
  check(from.device() != Device::none, "a dry run has no numbers to copy to the host");
}

template <class T, class U>
void read_rows(const Tensor& from, U* to) {
  const T* const data = from.host<T>();
  for (std::int64_t i = 0; i < from.rows(); ++i)
    std::transform(data + i * from.row_stride(), data + i * from.row_stride() + from.cols(),
                   to + i * from.cols(), [](T x) { return static_cast<U>(x); });
}

template <class T, class U>
void write_rows(std::span<const U> from, const Tensor& to) {
  check(static_cast<std::int64_t>(from.size()) == to.numel(), "a copy from the host has another size");
  if (to.device() == Device::none) return;
  T* const data = to.host<T>();
  for (std::int64_t i = 0; i < to.rows(); ++i)
    std::transform(from.data() + i * to.cols(), from.data() + (i + 1) * to.cols(), data + i * to.row_stride(),
                   [](U x) { return static_cast<T>(x); });
}

}  // namespace

template <class T>
std::vector<T> copy_to_host(const Tensor& from) {
  check_readable(from);
  std::vector<T> to(static_cast<std::size_t>(from.numel()));
  read_rows<T>(from, to.data());
  return to;
}
template std::vector<float> copy_to_host(const Tensor&);
template std::vector<double> copy_to_host(const Tensor&);
template std::vector<bf16> copy_to_host(const Tensor&);
template std::vector<std::int32_t> copy_to_host(const Tensor&);
template std::vector<std::uint8_t> copy_to_host(const Tensor&);

template <class T>
void copy_from_host(std::span<const T> from, Out to) {
  write_rows<T>(from, to);
}
template void copy_from_host(std::span<const float>, Out);
template void copy_from_host(std::span<const double>, Out);
template void copy_from_host(std::span<const bf16>, Out);
template void copy_from_host(std::span<const std::int32_t>, Out);
template void copy_from_host(std::span<const std::uint8_t>, Out);

std::vector<double> copy_numbers_to_host(const Tensor& from) {
  check_readable(from);
  std::vector<double> to(static_cast<std::size_t>(from.numel()));
  with_stored_type(from, [&]<class F>(F) { read_rows<F>(from, to.data()); });
  return to;
}

void copy_numbers_from_host(std::span<const double> from, Out to) {
  with_stored_type(to, [&]<class F>(F) { write_rows<F>(from, to); });
}

void copy_bytes_to_host(const Tensor& from, std::span<std::byte> to) {
  check_readable(from);
  check(from.contiguous() && static_cast<std::int64_t>(to.size()) == from.bytes(),
        "a copy to the host has another size");
  if (!to.empty()) std::memcpy(to.data(), from.host_bytes(), to.size());
}

void copy_bytes_from_host(std::span<const std::byte> from, Out to) {
  check(to->contiguous() && static_cast<std::int64_t>(from.size()) == to->bytes(),
        "a copy from the host has another size");
  if (to->device() == Device::none || from.empty()) return;
  std::memcpy(to->host_bytes(), from.data(), from.size());
}

}  // namespace echelon
