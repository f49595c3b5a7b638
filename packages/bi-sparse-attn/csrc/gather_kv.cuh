// Paged FP8 caches: insert, gather, and the gather of a decode token's own rows. Kernels and launchers; no torch.
//
// Formats are those of src/bi_sparse_attn/gather_kv.py. A warp moves one entry; nothing looks beyond it.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "bi/fp8.cuh"

namespace bi {

constexpr int kKvThreads = 256;
constexpr int kKvWarps = kKvThreads / 32;
constexpr int kDecodeRows = 2 * kKvWarps;  // of one block
constexpr int kHeadDim = 512, kNopeDim = 448, kKvData = 576, kKvScales = 8;
constexpr int kIndexDim = 128, kIndexScales = 4;

struct PagedCache {
    uint8_t* pages;
    int64_t page_stride;
    int block_size;

    // Where the entry's data and its scales lie.
    template <int kData, int kScales>
    __device__ void find(int64_t slot, uint8_t*& data, uint8_t*& scales) const {
        int64_t block, entry;
        if (slot >> 32 == 0) {  // a division of 32 bits is several times faster
            block = static_cast<uint32_t>(slot) / static_cast<uint32_t>(block_size), entry = slot - block * block_size;
        } else {
            block = slot / block_size, entry = slot - block * block_size;
        }
        data = pages + block * page_stride + entry * kData;
        scales = pages + block * page_stride + int64_t{block_size} * kData + entry * kScales;
    }
};

// Two e4m3 codes times a power of two, as bfloat16. The product is exact in float32, subnormals included; the only
// rounding is the conversion.
__device__ __forceinline__ uint32_t dequantized_pair(uint32_t codes, float scale) {
    const __half2_raw half = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3);
    const float2 value = __half22float2(__half2(half));
    const float lo = mul_rn(value.x, scale), hi = mul_rn(value.y, scale);
    uint32_t pair = pack_bf16(lo, hi);
    // The conversion's NaN is 0x7fff, the reference's 0x7fc0.
    if (lo != lo) pair = (pair & 0xffff0000u) | 0x7fc0u;
    if (hi != hi) pair = (pair & 0x0000ffffu) | 0x7fc00000u;
    return pair;
}

// 2**(byte - 127): 0 is float32's subnormal 2**-127, 255 is NaN.
__device__ __forceinline__ float ue8m0(uint32_t byte) {
    return bits_float(byte == 0 ? 0x00400000u : byte == 255 ? kNaNBits : byte << 23);
}

// One entry in the registers of a warp. A lane has eight channels of each half: e4m3 codes, or eight bfloat16 values.
struct KvEntry {
    uint4 half[2];
    uint64_t scales;
};

__device__ __forceinline__ KvEntry load_entry(const PagedCache& cache, int64_t slot) {
    const int lane = threadIdx.x % 32;
    uint8_t *data, *scales;
    cache.find<kKvData, kKvScales>(slot, data, scales);
    KvEntry entry;
    entry.scales = *reinterpret_cast<const uint64_t*>(scales);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int channel = half * 256 + lane * 8;
        const bool rope = channel >= kNopeDim;
        const uint2* p = reinterpret_cast<const uint2*>(data + (rope ? 2 * channel - kNopeDim : channel));
        const uint2 a = p[0], b = rope ? p[1] : make_uint2(0, 0);
        entry.half[half] = make_uint4(a.x, a.y, b.x, b.y);
    }
    return entry;
}

__device__ __forceinline__ void store_entry(const KvEntry& entry, uint4* out) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int channel = half * 256 + lane * 8;
        uint4 v = entry.half[half];
        if (channel < kNopeDim) {
            const float scale = ue8m0(entry.scales >> (channel / 64 * 8) & 0xff);
            v = make_uint4(dequantized_pair(v.x & 0xffff, scale), dequantized_pair(v.x >> 16, scale),
                           dequantized_pair(v.y & 0xffff, scale), dequantized_pair(v.y >> 16, scale));
        }
        out[half * 32 + lane] = v;
    }
}

__global__ void __launch_bounds__(kKvThreads)
    gather_kv_kernel(PagedCache cache, const int64_t* slots, int64_t slots_stride, int64_t count, uint4* out,
                     int64_t out_row) {
    const int64_t i = int64_t{blockIdx.x} * kKvWarps + threadIdx.x / 32;
    if (i >= count) return;
    const int64_t slot = slots[i * slots_stride];
    out += i * out_row;
    if (slot >= 0) {
        store_entry(load_entry(cache, slot), out);
    } else {
        out[threadIdx.x % 32] = out[32 + threadIdx.x % 32] = make_uint4(0, 0, 0, 0);
    }
}

struct DecodeGatherArgs {
    PagedCache compressed, window;
    const void* compressed_slots;
    const void* window_slots;
    uint4* workspace;
    int32_t* indices;
    int32_t* lengths;
    int64_t compressed_row, compressed_column, window_row, window_column, indices_row, indices_column, lengths_stride;
    int64_t tokens;
    int top_k, window_size, width;
    int compressed_blocks;  // of a token; those that follow take its window, lengths and indices
};

// Slots before the first -1 of a row. All threads of the block.
template <class Slot>
__device__ __forceinline__ int count_slots(const Slot* slots, int64_t column_stride, int columns) {
    int count = 0;
    for (int base = 0; base < columns; base += kKvThreads) {
        const int c = base + threadIdx.x;
        count += __syncthreads_count(c < columns && slots[c * column_stride] >= 0);
    }
    return count;
}

// The block's two rows per warp, from column `first` on, to rows of the workspace from `rows` on.
template <class Slot>
__device__ __forceinline__ void gather_columns(const PagedCache& cache, const Slot* slots, int64_t column_stride,
                                               int columns, int first, uint4* rows) {
    int64_t slot[kDecodeRows / kKvWarps];
    KvEntry entry[kDecodeRows / kKvWarps];
#pragma unroll
    for (int i = 0; i < kDecodeRows / kKvWarps; ++i) {
        const int column = first + i * kKvWarps + threadIdx.x / 32;
        slot[i] = column < columns ? int64_t{slots[column * column_stride]} : -1;
    }
#pragma unroll
    for (int i = 0; i < kDecodeRows / kKvWarps; ++i) {
        if (slot[i] >= 0) entry[i] = load_entry(cache, slot[i]);
    }
#pragma unroll
    for (int i = 0; i < kDecodeRows / kKvWarps; ++i) {
        const int64_t column = first + i * kKvWarps + threadIdx.x / 32;
        if (slot[i] >= 0) store_entry(entry[i], rows + column * (kHeadDim / 8));
    }
}

// Blocks of a token: first those of its compressed entries, whose place in the workspace is their column; then those of
// the window, which follows the last compressed entry, and of lengths and indices.
template <class Slot>
__global__ void __launch_bounds__(kKvThreads) gather_decode_kv_kernel(const DecodeGatherArgs a, int blocks) {
    const int64_t token = blockIdx.x / blocks;
    const int part = blockIdx.x % blocks, window_part = part - a.compressed_blocks;
    const Slot* compressed = static_cast<const Slot*>(a.compressed_slots) + token * a.compressed_row;
    const Slot* window = static_cast<const Slot*>(a.window_slots) + token * a.window_row;
    uint4* rows = a.workspace + token * a.width * (kHeadDim / 8);
    if (window_part < 0) {
        gather_columns(a.compressed, compressed, a.compressed_column, a.top_k, part * kDecodeRows, rows);
        return;
    }
    const int num_compressed = count_slots(compressed, a.compressed_column, a.top_k);
    const int length = num_compressed + count_slots(window, a.window_column, a.window_size);
    if (window_part == 0 && threadIdx.x == 0) a.lengths[token * a.lengths_stride] = length;
    int32_t* indices = a.indices + token * a.indices_row;
    const int stride = (blocks - a.compressed_blocks) * kKvThreads;
    for (int c = window_part * kKvThreads + threadIdx.x; c < a.width; c += stride) {
        indices[c * a.indices_column] = c < length ? static_cast<int32_t>(token * a.width + c) : -1;
    }
    gather_columns(a.window, window, a.window_column, a.window_size, window_part * kDecodeRows,
                   rows + int64_t{num_compressed} * (kHeadDim / 8));
}

// Smallest power of two that brings max(amax, 1e-4) to at most 448, for a finite bfloat16 amax: as group_scale() of
// bi/fp8.cuh, with the floor 2**-22, which is where 1e-4 / 448 rounds up to.
__device__ __forceinline__ float kv_scale(float amax) {
    const int32_t up = (static_cast<int32_t>(float_bits(amax)) + 0x1fffff) & 0x7f800000;
    return bits_float(static_cast<uint32_t>(max_i(up - (8 << 23), (127 - 22) << 23)));
}

// Codes of 2 kPairs bfloat16 values per lane, in groups of kLanes lanes, and the group's scale. A group with NaN or an
// infinity becomes NaN.
template <int kPairs, int kLanes>
__device__ __forceinline__ float quantize_group(const uint32_t (&pairs)[kPairs], uint32_t (&codes)[kPairs / 2]) {
    uint32_t top = 0;  // magnitudes of bfloat16 are ordered as integers; infinity and NaN are the largest
#pragma unroll
    for (int i = 0; i < kPairs; ++i) top = max_u16x2(top, pairs[i] & 0x7fff7fffu);
    top = max(top & 0xffffu, top >> 16);
#pragma unroll
    for (int d = kLanes / 2; d > 0; d /= 2) top = max(top, __shfl_xor_sync(~0u, top, d));
    const bool finite = top < 0x7f80u;
    const float scale = kv_scale(bits_float(top << 16)), inverse = pow2_inverse(scale);
#pragma unroll
    for (int i = 0; i < kPairs / 2; ++i) {
        const uint32_t a = pairs[2 * i], b = pairs[2 * i + 1];
        const uint32_t lo = pack_e4m3(mul_rn(bf16_lo(a), inverse), mul_rn(bf16_hi(a), inverse));
        const uint32_t hi = pack_e4m3(mul_rn(bf16_lo(b), inverse), mul_rn(bf16_hi(b), inverse));
        codes[i] = finite ? lo | hi << 16 : 0x7f7f7f7fu;
    }
    return finite ? scale : bits_float(kNaNBits);
}

struct InsertArgs {
    PagedCache cache;
    const uint16_t* rows;
    const int64_t* slots;
    int64_t rows_row, rows_column, slots_stride, count;
};

__device__ __forceinline__ uint32_t pair_at(const InsertArgs& a, int64_t row, int channel) {
    const uint16_t* p = a.rows + row * a.rows_row + channel * a.rows_column;
    return p[0] | static_cast<uint32_t>(p[a.rows_column]) << 16;
}

// A lane has eight channels of each half of the row, so a group of 64 is eight lanes.
__global__ void __launch_bounds__(kKvThreads) insert_kv_kernel(const InsertArgs a) {
    const int64_t row = int64_t{blockIdx.x} * kKvWarps + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (row >= a.count) return;
    const int64_t slot = a.slots[row * a.slots_stride];
    if (slot < 0) return;
    uint8_t *data, *scales;
    a.cache.find<kKvData, kKvScales>(slot, data, scales);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int channel = half * 256 + lane * 8;
        uint32_t pairs[4], codes[2];
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = pair_at(a, row, channel + 2 * i);
        const float scale = quantize_group<4, 8>(pairs, codes);
        if (channel < kNopeDim) {
            *reinterpret_cast<uint2*>(data + channel) = make_uint2(codes[0], codes[1]);
            if (lane % 8 == 0) scales[channel / 64] = scale == scale ? float_bits(scale) >> 23 : 255;
        } else {
            uint2* rope = reinterpret_cast<uint2*>(data + 2 * channel - kNopeDim);
            rope[0] = make_uint2(pairs[0], pairs[1]), rope[1] = make_uint2(pairs[2], pairs[3]);
            if (lane == 24) scales[7] = 0;
        }
    }
}

__global__ void __launch_bounds__(kKvThreads) insert_index_k_kernel(const InsertArgs a) {
    const int64_t row = int64_t{blockIdx.x} * kKvWarps + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (row >= a.count) return;
    const int64_t slot = a.slots[row * a.slots_stride];
    if (slot < 0) return;
    uint8_t *data, *scales;
    a.cache.find<kIndexDim, kIndexScales>(slot, data, scales);
    const uint32_t pairs[2] = {pair_at(a, row, lane * 4), pair_at(a, row, lane * 4 + 2)};
    uint32_t codes[1];
    const float scale = quantize_group<2, 32>(pairs, codes);
    reinterpret_cast<uint32_t*>(data)[lane] = codes[0];
    if (lane == 0) *reinterpret_cast<float*>(scales) = scale;
}

__global__ void __launch_bounds__(kKvThreads)
    gather_index_k_kernel(PagedCache cache, const int64_t* slots, int64_t slots_stride, int64_t count, uint32_t* q,
                          int64_t q_row, float* scale, int64_t scale_stride) {
    const int64_t row = int64_t{blockIdx.x} * kKvWarps + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (row >= count) return;
    const int64_t slot = slots[row * slots_stride];
    uint32_t codes = 0;
    float factor = 0.0f;
    if (slot >= 0) {
        uint8_t *data, *scales;
        cache.find<kIndexDim, kIndexScales>(slot, data, scales);
        codes = reinterpret_cast<const uint32_t*>(data)[lane];
        factor = *reinterpret_cast<const float*>(scales);
    }
    q[row * q_row + lane] = codes;
    if (lane == 0) scale[row * scale_stride] = factor;
}

inline unsigned blocks_for(int64_t rows, int per_block) {
    return static_cast<unsigned>((rows + per_block - 1) / per_block);
}

inline void gather_decode_kv(DecodeGatherArgs args, bool wide_slots, cudaStream_t stream) {
    args.compressed_blocks = static_cast<int>(blocks_for(args.top_k, kDecodeRows));
    const int blocks =
        args.compressed_blocks + std::max(1, static_cast<int>(blocks_for(args.window_size, kDecodeRows)));
    const auto kernel = wide_slots ? gather_decode_kv_kernel<int64_t> : gather_decode_kv_kernel<int32_t>;
    kernel<<<static_cast<unsigned>(args.tokens * blocks), kKvThreads, 0, stream>>>(args, blocks);
}

}  // namespace bi
