// A range of host addresses whose first part is memory, growing on demand, so that neighbouring freed pieces
// can merge. The system provides pages when they are first touched.
#pragma once

#include <cstddef>
#include <memory>

namespace echelon {

class HostRegion {
 public:
  // Reserves at least `wanted` addresses; if the process has no limit of them, also as many as the `held`
  // ones of other regions. null: there are none left.
  static std::unique_ptr<HostRegion> reserve(std::size_t wanted, std::size_t held);
  ~HostRegion();
  HostRegion(const HostRegion&) = delete;
  HostRegion& operator=(const HostRegion&) = delete;

  std::byte* begin() const { return begin_; }
  std::byte* end() const { return begin_ + size_; }  // of what is memory
  // Grows by `bytes` at the end; false, with nothing changed, if there are none.
  bool grow(std::size_t bytes);
  // Returns the pages of its last bytes to the system.
  void shrink(std::size_t bytes);

 private:
  HostRegion(std::byte* begin, std::size_t addresses) : begin_(begin), addresses_(addresses) {}

  std::byte* begin_;
  std::size_t addresses_;
  std::size_t size_ = 0, usable_ = 0;  // usable: whole pages of it
};

// For AddressSanitizer: forbids and permits access to free memory.
void forbid(std::byte* data, std::size_t bytes);
void permit(std::byte* data, std::size_t bytes);
// Bytes to forbid after each block, under AddressSanitizer.
std::size_t guard_bytes();

}  // namespace echelon
