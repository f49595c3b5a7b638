// Sum of mixed 64-bit words: kernel and raw-pointer launcher. Integer addition has no order, so any geometry will do.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace bi {

constexpr int kFingerprintThreads = 256;
constexpr int kFingerprintVectors = 4;  // of 16 bytes in flight per thread

__device__ __forceinline__ uint64_t fingerprint_mix(uint64_t word, uint64_t index) {
    uint64_t z = word + (index + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

// `bytes` of them, the last word padded with zeros, added to *out. kAligned: data starts at a multiple of 16 bytes.
template <bool kAligned>
__global__ void __launch_bounds__(kFingerprintThreads)
    fingerprint_kernel(const uint8_t* __restrict__ data, uint64_t bytes, unsigned long long* __restrict__ out) {
    const uint64_t thread = uint64_t{blockIdx.x} * kFingerprintThreads + threadIdx.x;
    const uint64_t threads = uint64_t{gridDim.x} * kFingerprintThreads;
    const uint64_t vectors = kAligned ? bytes / 16 : 0;
    uint64_t sum = 0;
    if constexpr (kAligned) {
        const ulonglong2* from = reinterpret_cast<const ulonglong2*>(data);
        uint64_t v = thread;
        for (; v + (kFingerprintVectors - 1) * threads < vectors; v += kFingerprintVectors * threads) {
            ulonglong2 two[kFingerprintVectors];
#pragma unroll
            for (int i = 0; i < kFingerprintVectors; ++i) two[i] = __ldcs(from + v + i * threads);
#pragma unroll
            for (int i = 0; i < kFingerprintVectors; ++i) {
                const uint64_t word = 2 * (v + i * threads);
                sum += fingerprint_mix(two[i].x, word) + fingerprint_mix(two[i].y, word + 1);
            }
        }
        for (; v < vectors; v += threads) {
            const ulonglong2 two = __ldcs(from + v);
            sum += fingerprint_mix(two.x, 2 * v) + fingerprint_mix(two.y, 2 * v + 1);
        }
    }
    for (uint64_t word = 2 * vectors + thread; 8 * word < bytes; word += threads) {
        uint64_t value = 0;
        for (uint64_t i = 8 * word; i < bytes && i < 8 * word + 8; ++i) value |= uint64_t{data[i]} << 8 * (i % 8);
        sum += fingerprint_mix(value, word);
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    __shared__ uint64_t sums[kFingerprintThreads / 32];
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < kFingerprintThreads / 32; ++i) sum += sums[i];
        atomicAdd(out, static_cast<unsigned long long>(sum));
    }
}

inline cudaError_t launch_fingerprint(const uint8_t* data, uint64_t bytes, unsigned long long* out, int processors,
                                      cudaStream_t stream) {
    const cudaError_t error = cudaMemsetAsync(out, 0, sizeof(*out), stream);
    if (error != cudaSuccess || bytes == 0) return error;
    const uint64_t enough = (bytes + 16 * kFingerprintThreads - 1) / (16 * kFingerprintThreads);
    const uint64_t most = uint64_t{8} * processors;
    const unsigned blocks = static_cast<unsigned>(enough < most ? enough : most);
    if (reinterpret_cast<uintptr_t>(data) % 16 == 0) {
        fingerprint_kernel<true><<<blocks, kFingerprintThreads, 0, stream>>>(data, bytes, out);
    } else {
        fingerprint_kernel<false><<<blocks, kFingerprintThreads, 0, stream>>>(data, bytes, out);
    }
    return cudaGetLastError();
}

}  // namespace bi
