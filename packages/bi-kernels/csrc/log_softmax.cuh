// Log-softmax of float32 rows, in the arithmetic of bi_kernels.reference.log_softmax: kernels and raw-pointer launcher.
//
// The row's maximum has no order; exp and log are written out; the sum goes by repeated halving, a tree that the number
// of columns alone decides. Three launches share a row among blocks of a constant number of columns: maxima, the lower
// levels of the tree, and its upper levels (again in every block: they are few) with the results.
#pragma once

#ifdef __CUDACC__
#include <cuda_runtime.h>
#endif

#include <cstdint>

#include "bi/numerics.cuh"

namespace bi {

constexpr int kTreeLevels = 5;  // of the tree that one thread adds up: 32 columns
constexpr int kTreeLeaves = 1 << kTreeLevels;
constexpr int kLogSoftmaxColumns = 8192;  // of one block
constexpr int kLogSoftmaxThreads = 512;
constexpr int kMaxima = 32;                                // blocks of the longest row, one lane each
constexpr int kMaxColumns = kMaxima * kLogSoftmaxColumns;  // 262,144
constexpr int kMaxNodes = kMaxColumns >> kTreeLevels;      // 8192: 32 KB of shared memory

// How many numbers there are before the first and after each of the lower levels: halves, rounded up.
struct HalvingTree {
    int size[kTreeLevels + 1];
};

inline HalvingTree halving_tree(int columns) {
    HalvingTree tree = {};
    tree.size[0] = columns;
    for (int level = 1; level <= kTreeLevels; ++level) tree.size[level] = (tree.size[level - 1] + 1) / 2;
    return tree;
}

// One number after the lower levels: a sum of exp(x - largest) over up to 32 columns. A level adds element i + half to
// element i; where there is no such element, +0 in its place changes no bit, as no exponential is -0.
BI_FN float node_sum(const float* x, float largest, const HalvingTree& tree, int node) {
    float value[kTreeLeaves];
#pragma unroll
    for (int leaf = 0; leaf < kTreeLeaves; ++leaf) {
        int column = node;
        bool exists = true;
#pragma unroll
        for (int level = kTreeLevels; level > 0; --level) {
            if (leaf >> (level - 1) & 1) {
                column += tree.size[level];
                exists = exists && column < tree.size[level - 1];
            }
        }
        value[leaf] = exists ? x[column] : -bits_float(kInfBits);
    }
#pragma unroll
    for (int leaf = 0; leaf < kTreeLeaves; ++leaf) value[leaf] = exp_negative(add_rn(value[leaf], -largest));
#pragma unroll
    for (int step = 1; step < kTreeLeaves; step *= 2) {
#pragma unroll
        for (int leaf = 0; leaf < kTreeLeaves; leaf += 2 * step) value[leaf] = add_rn(value[leaf], value[leaf + step]);
    }
    return value[0];
}

// A row with a NaN, with +inf, or of nothing but -inf has a maximum that is not finite, and is NaN.
BI_FN float log_probability(float x, float largest, float log_sum) {
    const bool finite = (float_bits(largest) & 0x7fffffffu) < kInfBits;
    return finite ? add_rn(add_rn(x, -largest), -log_sum) : bits_float(kNaNBits);
}

struct LogSoftmaxArgs {
    const float* x;  // [rows, columns]
    float* scratch;  // [rows, kMaxima + nodes]: maxima of the blocks, then the sums of the lower levels
    float* out;      // [rows, columns]
    int64_t x_row, scratch_row, out_row;
    HalvingTree tree;
};

#ifdef __CUDACC__
__device__ __forceinline__ float warp_largest(float v) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) v = max_nan(v, __shfl_xor_sync(0xffffffffu, v, step));
    return v;
}

// For all lanes of a warp.
__device__ __forceinline__ float row_largest(const LogSoftmaxArgs& a, int64_t row) {
    const int lane = threadIdx.x % 32;
    const int blocks = (a.tree.size[0] + kLogSoftmaxColumns - 1) / kLogSoftmaxColumns;
    return warp_largest(lane < blocks ? a.scratch[row * a.scratch_row + lane] : -bits_float(kInfBits));
}

__global__ void __launch_bounds__(kLogSoftmaxThreads) row_maxima_kernel(const __grid_constant__ LogSoftmaxArgs a) {
    __shared__ float of_warp[kLogSoftmaxThreads / 32];
    const int64_t row = blockIdx.x;
    const float* x = a.x + row * a.x_row;
    const int first = blockIdx.y * kLogSoftmaxColumns + threadIdx.x;
    float largest = -bits_float(kInfBits);
#pragma unroll
    for (int i = 0; i < kLogSoftmaxColumns; i += kLogSoftmaxThreads) {
        if (first + i < a.tree.size[0]) largest = max_nan(largest, x[first + i]);
    }
    largest = warp_largest(largest);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
    __syncthreads();
    if (threadIdx.x < 32) {
        const bool inside = threadIdx.x < kLogSoftmaxThreads / 32;
        largest = warp_largest(inside ? of_warp[threadIdx.x] : -bits_float(kInfBits));
        if (threadIdx.x == 0) a.scratch[row * a.scratch_row + blockIdx.y] = largest;
    }
}

constexpr int kNodeThreads = 128;

__global__ void __launch_bounds__(kNodeThreads) node_sums_kernel(const __grid_constant__ LogSoftmaxArgs a) {
    const int64_t row = blockIdx.x;
    const float largest = row_largest(a, row);
    const int node = blockIdx.y * kNodeThreads + threadIdx.x;
    if (node >= a.tree.size[kTreeLevels]) return;
    a.scratch[row * a.scratch_row + kMaxima + node] = node_sum(a.x + row * a.x_row, largest, a.tree, node);
}

__global__ void __launch_bounds__(kLogSoftmaxThreads) log_softmax_kernel(const __grid_constant__ LogSoftmaxArgs a) {
    __shared__ float sum[kMaxNodes];
    const int64_t row = blockIdx.x;
    const int thread = threadIdx.x;
    const float largest = row_largest(a, row);
    const float* sums = a.scratch + row * a.scratch_row + kMaxima;
    int size = a.tree.size[kTreeLevels];
    for (int i = thread; i < size; i += kLogSoftmaxThreads) sum[i] = sums[i];
    __syncthreads();
    while (size > 1) {
        const int half = (size + 1) / 2;
        for (int i = thread; i < size - half; i += kLogSoftmaxThreads) sum[i] = add_rn(sum[i], sum[i + half]);
        size = half;
        __syncthreads();
    }
    const float log_sum = log_from_one(sum[0]);
    const float* x = a.x + row * a.x_row;
    float* out = a.out + row * a.out_row;
    const int first = blockIdx.y * kLogSoftmaxColumns + thread;
#pragma unroll
    for (int i = 0; i < kLogSoftmaxColumns; i += kLogSoftmaxThreads) {
        if (first + i < a.tree.size[0]) out[first + i] = log_probability(x[first + i], largest, log_sum);
    }
}

// Launches on `stream`. Does nothing where there is nothing to do.
inline void log_softmax(const LogSoftmaxArgs& a, int64_t rows, cudaStream_t stream) {
    if (rows == 0) return;
    const auto blocks = [](int count, int each) { return static_cast<unsigned>((count + each - 1) / each); };
    const unsigned x = static_cast<unsigned>(rows);
    const dim3 by_columns(x, blocks(a.tree.size[0], kLogSoftmaxColumns));
    row_maxima_kernel<<<by_columns, kLogSoftmaxThreads, 0, stream>>>(a);
    node_sums_kernel<<<dim3(x, blocks(a.tree.size[kTreeLevels], kNodeThreads)), kNodeThreads, 0, stream>>>(a);
    log_softmax_kernel<<<by_columns, kLogSoftmaxThreads, 0, stream>>>(a);
}
#endif

}  // namespace bi
