#include "comm/host_group.h"

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

double HostGroup::max(double number) const {
  const Tensor most = on_host(DType::f64, std::span<const double>(&number, 1));
  group_->all_reduce(most, ReduceOp::max).wait();
  return copy_to_host<double>(most).front();
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

std::vector<std::int32_t> HostGroup::exchange(std::span<const std::int32_t> counts) const {
  // Imagined ranks have for this one what it has for them.
  const Tensor out = on_host(DType::i32, counts), in = on_host(DType::i32, counts);
  const std::vector<std::int64_t> each(static_cast<std::size_t>(group_->size()),
                                       std::ssize(counts) / group_->size());
  group_->all_to_all(out, each, in, each).wait();
  return copy_to_host<std::int32_t>(in);
}

}  // namespace echelon
