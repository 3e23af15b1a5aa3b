// Marks functions that both the host's compiler and CUDA's compile.
#pragma once

#ifdef __CUDACC__
#define ECHELON_HOST_DEVICE __host__ __device__
#else
#define ECHELON_HOST_DEVICE
#endif
