// The little of torch that kernels need, through the stable ABI. Kernel headers (.cuh) do not include this file.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/shim_utils.h>

#include <cstdint>

namespace bi {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void check_tensor(const Tensor& t, const char* name, ScalarType dtype, const char* dtype_name, int64_t dim,
                         int32_t device) {
    STD_TORCH_CHECK(t.scalar_type() == dtype, name, ": expected dtype ", dtype_name, ", got scalar type ",
                    static_cast<int>(t.scalar_type()));
    STD_TORCH_CHECK(t.dim() == dim, name, ": expected ", dim, " dimensions, got ", t.dim());
    STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == device, name, ": expected device cuda:", device,
                    ". Move it before the call.");
}

inline void check_size(const Tensor& t, const char* name, int64_t dim, int64_t size) {
    STD_TORCH_CHECK(t.size(dim) == size, name, ": expected size ", size, " in dimension ", dim, ", got ", t.size(dim));
}

// Vector accesses of `bytes` need: stride 1 in the last dimension, and an aligned start of every row.
inline void check_rows_aligned(const Tensor& t, const char* name, int64_t bytes) {
    const int64_t last = t.dim() - 1;
    const int64_t itemsize = static_cast<int64_t>(t.element_size());
    bool ok = t.numel() == 0 || (t.stride(last) == 1 && reinterpret_cast<uintptr_t>(t.data_ptr()) % bytes == 0);
    for (int64_t d = 0; ok && d < last; ++d) ok = t.size(d) <= 1 || t.stride(d) * itemsize % bytes == 0;
    STD_TORCH_CHECK(ok, name, ": expected stride 1 in the last dimension and rows that start at multiples of ", bytes,
                    " bytes. Pass a contiguous tensor.");
}

// The running device must be the one whose arithmetic the caller asked for.
inline void check_arch(int64_t arch, int32_t device) {
    int major = 0, minor = 0;
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    const bool ok = (arch == 90 && major == 9 && minor == 0) || (arch == 100 && major == 10);
    STD_TORCH_CHECK(ok, "arch: expected the architecture of cuda:", device, " (compute capability ", major, ".", minor,
                    "), got ", arch,
                    ". A kernel runs the arithmetic of its own GPU only; for another one call the "
                    "reference on CPU tensors.");
}

inline cudaStream_t current_stream(int32_t device) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    return static_cast<cudaStream_t>(stream);
}

}  // namespace bi
