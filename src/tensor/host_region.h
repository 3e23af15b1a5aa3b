// Addresses on the host of which the first part is memory, and more of them as it is asked for: what is given
// back in them becomes one piece again with what lies beside it. Pages come from the system when they are
// touched first.
#pragma once

#include <cstddef>
#include <memory>

namespace echelon {

class HostRegion {
 public:
  // So many addresses at least; where a process has no limit of them, as many as `held` too, which other
  // regions have. null: there are none left.
  static std::unique_ptr<HostRegion> reserve(std::size_t wanted, std::size_t held);
  ~HostRegion();
  HostRegion(const HostRegion&) = delete;
  HostRegion& operator=(const HostRegion&) = delete;

  std::byte* begin() const { return begin_; }
  std::byte* end() const { return begin_ + size_; }  // of what is memory
  // By so many bytes more at its end; false, and nothing is changed, where there are none.
  bool grow(std::size_t bytes);
  // The pages of its last bytes go back to the system.
  void shrink(std::size_t bytes);

 private:
  HostRegion(std::byte* begin, std::size_t addresses) : begin_(begin), addresses_(addresses) {}

  std::byte* begin_;
  std::size_t addresses_;
  std::size_t size_ = 0, usable_ = 0;  // usable: whole pages of it
};

// For AddressSanitizer: nobody reads or writes what is free.
void forbid(std::byte* data, std::size_t bytes);
void permit(std::byte* data, std::size_t bytes);
// What is forbidden behind each block, where that is asked about.
std::size_t guard_bytes();

}  // namespace echelon
