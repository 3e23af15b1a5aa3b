#include "tensor/host.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "tensor/device_stream.h"
#include "tensor/kernels.h"
#include "tensor/reference_view.h"

namespace echelon {
namespace {

void check_readable(const Tensor& from) {
  check(from.device() != Device::none, "a dry run has no numbers to copy to the host");
}

// The elements of an accelerator's tensor, row by row: copied on its stream, and waited for.
std::vector<std::byte> fetch_rows(const Tensor& from) {
  std::vector<std::byte> to(static_cast<std::size_t>(from.bytes()));
  const auto width = static_cast<std::size_t>(element_bytes(from.dtype()));
  const std::size_t row = static_cast<std::size_t>(from.cols()) * width;
  if (to.empty()) return to;
  if (from.contiguous())
    from.stream().copy_to_host({to.data(), to.size()}, {from.address(), to.size()}, to.size(), 1);
  else
    from.stream().copy_to_host({to.data(), row},
                               {from.address(), static_cast<std::size_t>(from.row_stride()) * width}, row,
                               static_cast<std::size_t>(from.rows()));
  return to;
}

void send_rows(std::span<const std::byte> from, const Tensor& to) {
  const auto width = static_cast<std::size_t>(element_bytes(to.dtype()));
  const std::size_t row = static_cast<std::size_t>(to.cols()) * width;
  void* const data = const_cast<std::byte*>(from.data());  // only read
  if (from.empty()) return;
  if (to.contiguous())
    to.stream().copy_from_host({to.address(), from.size()}, {data, from.size()}, from.size(), 1);
  else
    to.stream().copy_from_host({to.address(), static_cast<std::size_t>(to.row_stride()) * width}, {data, row},
                               row, static_cast<std::size_t>(to.rows()));
}

template <class T, class U>
void read_rows(const Tensor& from, U* to) {
  if (from.device() == Device::cuda) {
    check(from.dtype() == dtype_of<T>, "tensor read as another dtype than it has");
    const std::vector<std::byte> bytes = fetch_rows(from);
    for (std::int64_t i = 0; i < from.numel(); ++i) {
      T x;
      std::memcpy(&x, bytes.data() + i * static_cast<std::int64_t>(sizeof x), sizeof x);
      to[i] = static_cast<U>(x);
    }
    return;
  }
  const T* const data = from.host<T>();
  for (std::int64_t i = 0; i < from.rows(); ++i)
    std::transform(data + i * from.row_stride(), data + i * from.row_stride() + from.cols(),
                   to + i * from.cols(), [](T x) { return static_cast<U>(x); });
}

template <class T, class U>
void write_rows(std::span<const U> from, const Tensor& to) {
  check(static_cast<std::int64_t>(from.size()) == to.numel(), "a copy from the host has another size");
  if (to.device() == Device::none) return;
  if (to.device() == Device::cuda) {
    check(to.dtype() == dtype_of<T>, "tensor written as another dtype than it has");
    std::vector<T> rounded(from.size());
    std::transform(from.begin(), from.end(), rounded.begin(), [](U x) { return static_cast<T>(x); });
    return send_rows(std::as_bytes(std::span<const T>(rounded)), to);
  }
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
template std::vector<std::int16_t> copy_to_host(const Tensor&);
template std::vector<std::uint8_t> copy_to_host(const Tensor&);

template <class T>
void copy_from_host(std::span<const T> from, Out to) {
  write_rows<T>(from, to);
}
template void copy_from_host(std::span<const float>, Out);
template void copy_from_host(std::span<const double>, Out);
template void copy_from_host(std::span<const bf16>, Out);
template void copy_from_host(std::span<const std::int32_t>, Out);
template void copy_from_host(std::span<const std::int16_t>, Out);
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

HostBytes::HostBytes(const Tensor& tensor, bool read) : tensor_(tensor) {
  check_readable(tensor);
  check(tensor.contiguous(), "the host sees the bytes of a contiguous tensor");
  if (tensor.device() == Device::cpu) {
    data_ = static_cast<std::byte*>(tensor.host_bytes());
    return;
  }
  copy_ = read ? fetch_rows(tensor) : std::vector<std::byte>(static_cast<std::size_t>(tensor.bytes()));
  data_ = copy_.data();
}

void HostBytes::store() const {
  if (tensor_.device() != Device::cpu) send_rows(copy_, tensor_);
}

void copy_anywhere(Kernels& kernels, const Tensor& from, Out to) {
  if (from.device() == to->device() || from.device() == Device::none || to->device() == Device::none)
    return kernels.copy(from, to);
  check(from.dtype() == to->dtype(), "a copy from device to device changes no number");
  const auto bytes = static_cast<std::size_t>(from.bytes());
  if (from.device() == Device::cpu)
    copy_bytes_from_host({static_cast<const std::byte*>(from.host_bytes()), bytes}, to);
  else
    copy_bytes_to_host(from, {static_cast<std::byte*>(to->host_bytes()), bytes});
}

void fill_with_zero(Out to) {
  check(to->contiguous(), "what is filled with zero is contiguous");
  const auto bytes = static_cast<std::size_t>(to->bytes());
  if (to->device() == Device::none || bytes == 0) return;
  if (to->device() == Device::cpu)
    std::memset(to->host_bytes(), 0, bytes);
  else
    to->stream().driver().fill_bytes(to->address(), 0, bytes, to->stream().handle());
}

void copy_on_device(const Tensor& from, Out to) {
  check(from.device() == to->device() && from.dtype() == to->dtype() && from.numel() == to->numel() &&
            from.contiguous() && to->contiguous(),
        "a copy on a device changes nothing");
  const auto bytes = static_cast<std::size_t>(from.bytes());
  if (from.device() == Device::none || bytes == 0) return;
  if (from.device() == Device::cpu) {
    std::memcpy(to->host_bytes(), from.host_bytes(), bytes);
    return;
  }
  to->stream().driver().copy({.kind = CopyKind::on_device,
                              .to = to->address(),
                              .to_stride = bytes,
                              .from = from.address(),
                              .from_stride = bytes,
                              .row_bytes = bytes,
                              .rows = 1},
                             to->stream().handle());
}

void copy_bytes_to_host(const Tensor& from, std::span<std::byte> to) {
  check_readable(from);
  check(from.contiguous() && static_cast<std::int64_t>(to.size()) == from.bytes(),
        "a copy to the host has another size");
  if (to.empty()) return;
  if (from.device() == Device::cuda)
    from.stream().copy_to_host({to.data(), to.size()}, {from.address(), to.size()}, to.size(), 1);
  else
    std::memcpy(to.data(), from.host_bytes(), to.size());
}

void copy_bytes_from_host(std::span<const std::byte> from, Out to) {
  check(to->contiguous() && static_cast<std::int64_t>(from.size()) == to->bytes(),
        "a copy from the host has another size");
  if (to->device() == Device::none || from.empty()) return;
  if (to->device() == Device::cuda) return send_rows(from, to);
  std::memcpy(to->host_bytes(), from.data(), from.size());
}

}  // namespace echelon
