// Index lists of sparse attention. A block per token; nothing looks beyond it. Kernels; no torch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace bi {

constexpr int kIndexThreads = 256;

// A vector of int32 or int64.
struct Integers {
    const void* data;
    int64_t stride;
    bool wide;

    __device__ int64_t at(int64_t i) const {
        return wide ? static_cast<const int64_t*>(data)[i * stride]
                    : int64_t{static_cast<const int32_t*>(data)[i * stride]};
    }
};

struct CombineArgs {
    const int32_t* topk;
    Integers positions, gather_starts, row_offsets;  // row_offsets: on top of row_offset, null for none
    int32_t* indices;
    int32_t* lengths;
    int64_t topk_row, topk_column, indices_row, indices_column, lengths_stride;
    int64_t top_k, width, window_size, compressed_rows, row_offset;
};

__global__ void __launch_bounds__(kIndexThreads) combine_topk_swa_kernel(const CombineArgs a) {
    const int64_t token = blockIdx.x;
    const int32_t* topk = a.topk + token * a.topk_row;
    const int64_t position = a.positions.at(token);
    const int64_t offset = a.row_offset + (a.row_offsets.data == nullptr ? 0 : a.row_offsets.at(token));
    int64_t compressed = 0, length = 0, window = 0;
    if (position >= 0) {  // a padding token's row of topk may hold anything
        for (int64_t base = 0; base < a.top_k; base += kIndexThreads) {
            const int64_t c = base + threadIdx.x;
            compressed += __syncthreads_count(c < a.top_k && topk[c * a.topk_column] >= 0);
        }
        const int64_t start = max(position - a.window_size + 1, int64_t{0});
        length = compressed + position - start + 1;
        window = a.compressed_rows + start - a.gather_starts.at(token) - compressed;
    }
    if (threadIdx.x == 0) a.lengths[token * a.lengths_stride] = static_cast<int32_t>(length);
    for (int64_t c = threadIdx.x; c < a.width; c += kIndexThreads) {
        int64_t index = -1;
        if (c < length) index = offset + (c < compressed ? topk[c * a.topk_column] : window + c);
        a.indices[token * a.indices_row + c * a.indices_column] = static_cast<int32_t>(index);
    }
}

__global__ void __launch_bounds__(kIndexThreads)
    c128_indices_kernel(Integers positions, int32_t* indices, int64_t row, int64_t column, int64_t width) {
    const int64_t count = max(positions.at(blockIdx.x) + 1, int64_t{0}) / 128;
    for (int64_t c = threadIdx.x; c < width; c += kIndexThreads) {
        indices[blockIdx.x * row + c * column] = static_cast<int32_t>(c < count ? c : -1);
    }
}

}  // namespace bi
