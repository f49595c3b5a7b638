// Copy into a longer buffer and fill the rest: kernel and raw-pointer launcher. Elements move as integers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace bi {

constexpr int kPaddedCopyDims = 8;
constexpr int kPaddedCopyThreads = 256;

// Strides count elements.
struct PaddedCopyArgs {
    void* dst;
    const void* src;
    int64_t elements;  // of dst
    int64_t src_rows;  // rows from there on are filled
    int64_t pad_bits;
    int dims;
    int64_t sizes[kPaddedCopyDims];  // of dst
    int64_t dst_strides[kPaddedCopyDims];
    int64_t src_strides[kPaddedCopyDims];
};

template <class Bits>
__global__ void __launch_bounds__(kPaddedCopyThreads) padded_copy_kernel(const __grid_constant__ PaddedCopyArgs a) {
    const int64_t threads = int64_t{gridDim.x} * kPaddedCopyThreads;
    for (int64_t i = int64_t{blockIdx.x} * kPaddedCopyThreads + threadIdx.x; i < a.elements; i += threads) {
        int64_t rest = i, to = 0, from = 0, row = 0;
        for (int d = a.dims - 1; d >= 0; --d) {
            row = rest % a.sizes[d];
            rest /= a.sizes[d];
            to += row * a.dst_strides[d];
            from += row * a.src_strides[d];
        }
        static_cast<Bits*>(a.dst)[to] =
            row < a.src_rows ? static_cast<const Bits*>(a.src)[from] : static_cast<Bits>(a.pad_bits);
    }
}

template <class Bits>
cudaError_t launch_padded_copy(const PaddedCopyArgs& a, int processors, cudaStream_t stream) {
    const int64_t enough = (a.elements + kPaddedCopyThreads - 1) / kPaddedCopyThreads, most = int64_t{16} * processors;
    padded_copy_kernel<Bits>
        <<<static_cast<unsigned>(enough < most ? enough : most), kPaddedCopyThreads, 0, stream>>>(a);
    return cudaGetLastError();
}

}  // namespace bi
