// Chosen by CMake where CUDA is not built (ECHELON_CUDA=OFF).
#include "base/error.h"
#include "tensor/device_driver.h"

namespace echelon {

std::string no_cuda() { return "this build has no CUDA (ECHELON_CUDA=OFF)"; }

std::shared_ptr<DeviceDriver> make_cuda_driver() { refuse("--device cuda: {}; legal: cpu", no_cuda()); }

}  // namespace echelon
