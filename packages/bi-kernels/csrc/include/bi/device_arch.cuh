// Which architecture's arithmetic this compilation pass is for. Kernels name DeviceArch; host code has no arch branch.
#pragma once

#include "bi/numerics_sm100.cuh"
#include "bi/numerics_sm90.cuh"

namespace bi {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ / 10 == 90
using DeviceArch = Sm90;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ / 100 == 10
using DeviceArch = Sm100;
#elif defined(__CUDA_ARCH__)
#error "no arithmetic is specified for this architecture: build for sm_90a and sm_100f only"
#endif

}  // namespace bi
