// Memory mapped to an unnamed file: the system writes it out and reads it back when it needs memory (an idea
// of ZeRO-Offload, Ren et al. 2021, https://arxiv.org/abs/2101.06840, with the disk in place of host memory).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "spec/device.h"

namespace echelon {

class ScratchFile {
 public:
  // Zeros. The file is created in `directory` (empty: the system's directory for temporary files) and
  // disappears with the process, however that ends. Its disk space is reserved at once: RunError saying
  // `what_for` if there is not enough. With Device::none no file is created.
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

// `directory` itself, or the system's directory for temporary files (base/private_directory.h).
std::string scratch_place(const std::string& directory);
// RequestError naming --offload-dir, or TMPDIR if that is used instead, if no file can be created there.
void check_scratch_directory(const std::string& directory);

}  // namespace echelon
