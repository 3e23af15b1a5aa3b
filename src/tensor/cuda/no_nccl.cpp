// Chosen by CMake where NCCL is not found, or CUDA not built.
#include "base/error.h"
#include "tensor/device_collectives.h"

namespace echelon {

std::string no_nccl() {
  return "this build has no NCCL: install libnccl-dev, or point NCCL_ROOT at the folder that has "
         "include/nccl.h, and run cmake again with ECHELON_CUDA=ON";
}

std::unique_ptr<DeviceCollectives> make_nccl() { refuse("--collectives nccl: {}", no_nccl()); }

}  // namespace echelon
