// Memory that lies in a file without a name: the system writes it out and brings it in again as it needs room
// (ZeRO-Offload's idea, Ren et al. 2021, https://arxiv.org/abs/2101.06840, with the disk in the place of the
// host's memory).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "spec/device.h"

namespace echelon {

class ScratchFile {
 public:
  // Zeros. The file is made in `directory` (empty: the system's place for temporary files) and goes with the
  // process, however that ends. Its room on the disk is taken at once: RunError saying `what_for` when there
  // is none. Of Device::none nothing is made.
  ScratchFile(const std::string& directory, std::size_t bytes, Device device, const char* what_for);
  ~ScratchFile();
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;

  // Null on Device::none.
  std::byte* at(std::int64_t byte) const { return data_ == nullptr ? nullptr : data_ + byte; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_;
};

// That directory itself, or where temporary files go (base/private_directory.h).
std::string scratch_place(const std::string& directory);
// RequestError naming --offload-dir, or TMPDIR where that stands for it, when no file can be made there.
void check_scratch_directory(const std::string& directory);

}  // namespace echelon
