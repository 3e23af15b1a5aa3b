// Functions that both the host's compiler and CUDA's compile, each for its processor.
#pragma once

#ifdef __CUDACC__
#define ECHELON_HOST_DEVICE __host__ __device__
#else
#define ECHELON_HOST_DEVICE
#endif
