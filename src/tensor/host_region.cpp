#include "tensor/host_region.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/resource.h>
#endif
#if defined(__has_feature)
#if __has_feature(address_sanitizer) && !defined(__SANITIZE_ADDRESS__)
#define __SANITIZE_ADDRESS__
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace echelon {
namespace {

// The size of Linux's transparent huge pages: products walk over many rows at once, and with each row on its
// own small page, address translation takes a fifth of their time in virtual machines.
constexpr std::size_t page = std::size_t{2} << 20;
// Not at the beginning, so that a whole page need not be cleared for a rank that holds little.
constexpr std::size_t in_small_pages = 2 * page;

std::size_t pages(std::size_t bytes) { return (bytes + page - 1) / page * page; }

}  // namespace

#if defined(__linux__)

static constexpr int kind_of_memory = MAP_PRIVATE | MAP_ANONYMOUS;

// Memory without write permission is not counted by the system, even if it grants no more than it has. But it
// counts as addresses, for which a process may have a limit: then no more than wanted is reserved.
static std::size_t usual_addresses() {
  rlimit limit{};
  const bool is_limited = ::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur != RLIM_INFINITY;
  return is_limited ? 0 : std::size_t{4} << 30;
}

std::unique_ptr<HostRegion> HostRegion::reserve(std::size_t wanted, std::size_t held) {
  const std::size_t usual = usual_addresses(),
                    addresses = usual > 0 ? std::max({usual, pages(wanted), pages(held)}) : pages(wanted);
  void* const all = ::mmap(nullptr, addresses + page, PROT_NONE, kind_of_memory, -1, 0);
  if (all == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(all);
  const std::size_t before = (page - reinterpret_cast<std::uintptr_t>(begin) % page) % page;
  if (before > 0) ::munmap(begin, before);
  ::munmap(begin + before + addresses, page - before);
  return std::unique_ptr<HostRegion>(new HostRegion(begin + before, addresses));
}

HostRegion::~HostRegion() {
  permit(begin_, usable_);
  ::munmap(begin_, addresses_);
}

bool HostRegion::grow(std::size_t bytes) {
  const std::size_t size = size_ + bytes, usable = std::max(pages(size), usable_);
  if (usable > addresses_) return false;
  if (usable > usable_) {
    if (::mprotect(begin_ + usable_, usable - usable_, PROT_READ | PROT_WRITE) != 0) return false;
    const std::size_t first = std::max(usable_, in_small_pages);
    if (usable > first) ::madvise(begin_ + first, usable - first, MADV_HUGEPAGE);  // if the system has any
    usable_ = usable;
  }
  size_ = size;
  return true;
}

void HostRegion::shrink(std::size_t bytes) {
  size_ -= bytes;
  const std::size_t usable = pages(size_);
  if (usable == usable_) return;
  permit(begin_ + usable, usable_ - usable);
  void* const gone = ::mmap(begin_ + usable, usable_ - usable, PROT_NONE, kind_of_memory | MAP_FIXED, -1, 0);
  if (gone != MAP_FAILED) usable_ = usable;
}

#else

std::unique_ptr<HostRegion> HostRegion::reserve(std::size_t wanted, std::size_t) {
  auto* const begin = static_cast<std::byte*>(std::aligned_alloc(64, wanted));
  if (begin == nullptr) return nullptr;
  return std::unique_ptr<HostRegion>(new HostRegion(begin, wanted));
}
HostRegion::~HostRegion() { std::free(begin_); }
bool HostRegion::grow(std::size_t bytes) {
  if (size_ + bytes > addresses_) return false;
  size_ += bytes;
  return true;
}
void HostRegion::shrink(std::size_t bytes) { size_ -= bytes; }

#endif

#if defined(__SANITIZE_ADDRESS__)
void forbid(std::byte* data, std::size_t bytes) { __asan_poison_memory_region(data, bytes); }
void permit(std::byte* data, std::size_t bytes) { __asan_unpoison_memory_region(data, bytes); }
std::size_t guard_bytes() { return 64; }
#else
void forbid(std::byte*, std::size_t) {}
void permit(std::byte*, std::size_t) {}
std::size_t guard_bytes() { return 0; }
#endif

}  // namespace echelon
