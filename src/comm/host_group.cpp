#include "comm/host_group.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "tensor/host.h"

namespace echelon {

template <class T>
static Tensor on_host(DType dtype, std::span<const T> numbers) {
  Tensor tensor = Tensor::of_host(dtype, {std::ssize(numbers)});
  copy_from_host(numbers, tensor);
  return tensor;
}

std::vector<double> HostNumbers::get() {
  pending_.wait();
  return copy_to_host<double>(std::exchange(numbers_, {}));
}

HostNumbers HostGroup::begin_sum(std::span<const double> numbers) const {
  const Tensor sums = on_host(DType::f64, numbers);
  return {sums, group_->all_reduce(sums)};
}

std::vector<double> HostGroup::sum(std::span<const double> numbers) const { return begin_sum(numbers).get(); }

template <class T>
std::vector<T> HostGroup::max(const std::vector<T>& numbers) const {
  const Tensor most =
      on_host(std::is_same_v<T, double> ? DType::f64 : DType::i32, std::span<const T>(numbers));
  group_->all_reduce(most, ReduceOp::max).wait();
  return copy_to_host<T>(most);
}
template std::vector<double> HostGroup::max(const std::vector<double>&) const;
template std::vector<std::int32_t> HostGroup::max(const std::vector<std::int32_t>&) const;

void HostGroup::broadcast(std::vector<double>& numbers, int root) const {
  const Tensor said = on_host(DType::f64, std::span<const double>(numbers));
  group_->broadcast(said, root).wait();
  numbers = copy_to_host<double>(said);
}

HostNumbers HostGroup::begin_gather(std::span<const double> numbers) const {
  const auto ranks = static_cast<std::size_t>(group_->size());
  const Tensor all = Tensor::of_host(DType::f64, {std::ssize(numbers) * group_->size()});
  copy_from_host(std::vector<double>(numbers.size() * ranks), all);
  const Tensor mine =
      all.flat_range(std::ssize(numbers) * group_->rank(), std::ssize(numbers) * (group_->rank() + 1));
  copy_from_host(numbers, mine);
  return {all, group_->all_gather(mine, all, std::vector<std::int64_t>(ranks, std::ssize(numbers)))};
}

void HostGroup::gather_bytes(std::span<const std::byte> mine,
                             const std::function<std::span<std::byte>(std::size_t bytes)>& room) const {
  const auto view = [](const std::byte* bytes, std::size_t size) {
    return Tensor::view_of(const_cast<std::byte*>(bytes), DType::u8, {static_cast<std::int64_t>(size)});
  };
  std::int64_t size = std::ssize(mine);
  const Tensor said = Tensor::view_of(&size, DType::u8, {sizeof size});
  if (group_->rank() > 0) {
    group_->send(said, 0).wait();
    if (size > 0) group_->send(view(mine.data(), mine.size()), 0).wait();
    return;
  }
  std::copy(mine.begin(), mine.end(), room(mine.size()).begin());
  for (int from = 1; from < group_->size(); ++from) {
    group_->recv(said, from).wait();
    const std::span<std::byte> theirs = room(static_cast<std::size_t>(size));
    if (size > 0) group_->recv(view(theirs.data(), theirs.size()), from).wait();
  }
}

std::vector<std::int32_t> HostGroup::exchange(std::span<const std::int32_t> counts) const {
  // Imagined ranks have for this one what it has for them.
  const Tensor out = on_host(DType::i32, counts), in = on_host(DType::i32, counts);
  const std::vector<std::int64_t> each(static_cast<std::size_t>(group_->size()),
                                       std::ssize(counts) / group_->size());
  group_->all_to_all(out, each, in, each).wait();
  return copy_to_host<std::int32_t>(in);
}

}  // namespace echelon
