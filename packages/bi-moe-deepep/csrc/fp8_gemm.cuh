// Grouped block-scaled FP8 products with DeepGEMM's bits, on rows that are not padded.
//
// One output element is one chain, whatever the tile: for each block of 128 along K, ascending, four wgmma steps of
// 32 products in the tensor core's accumulator, started from nothing; then
// total = fma(token scale * weight scale, accumulator, total) in float32, from +0; at the end one rounding to bfloat16.
// That is what DeepGEMM's kernel for float32 scales does on Hopper, and all that an element's bits depend on.
//
// DeepGEMM gives tokens the side of wgmma that has 64 rows, and so pads each expert. Here weights have it, and tokens
// are the side that may be 8 wide: a step with a few rows per expert is then bound by reading the weights. Products and
// their sums do not tell the two sides apart. Columns of a tile past an expert's rows hold anything; nothing stores
// them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "bi/numerics.cuh"
#include "bi/sm90.cuh"
#include "bi/tensor_map.cuh"

namespace bi::moe {

constexpr int kGemmBlockK = 128;  // bytes: one row of the swizzle, one scale
constexpr int kGemmBoxRows = 8;   // of tokens, in one copy: an atom of the swizzle
constexpr int kGemmMaxExperts = 1024;
constexpr int kGemmMaxK = 16384;  // whose scales leave room for two stages
constexpr int kGemmMaxStages = 16;

// Strides count elements.
struct Fp8GemmArgs {
    const float* s;          // [rows, groups]
    const float* ws;         // [experts, ceil(n / 128), groups]
    const int32_t* offsets;  // [experts + 1]
    uint16_t* out;           // bfloat16 [rows, n]
    int64_t s_row, s_group, ws_expert, ws_row, ws_group, out_row;
    int rows, n, groups, experts;
    int tiles_n;
    int stages;
};

// A tile is kTileN rows of a weight, 64 per warpgroup, by at most kMaxRows tokens.
template <int kWarpgroups_, int kMaxRows_, int kBlocks_>
struct Fp8GemmConfig {
    static constexpr int kWarpgroups = kWarpgroups_, kMaxRows = kMaxRows_, kBlocks = kBlocks_;
    static constexpr int kTileN = 64 * kWarpgroups;
    static_assert(kTileN <= 128);  // a tile has one weight scale per group
    static constexpr int kConsumers = 128 * kWarpgroups;
    static constexpr int kThreads = kConsumers + 32;
    static constexpr int kStageBytes = (kTileN + kMaxRows) * kGemmBlockK;
    // Per multiprocessor 228 KB, of which every block takes one for itself.
    static constexpr int kMostShared = std::min(232448, 233472 / kBlocks - 1024);
    static constexpr int kPitch = kMaxRows + 2;  // floats between groups of token scales
};

// What follows the stages in shared memory, in bytes: barriers, experts' first rows and first items, two sets of
// scales.
template <class Config>
struct Fp8GemmShared {
    int starts, items, scales, scale_set, end;
    __host__ __device__ Fp8GemmShared(int stages, int experts, int groups) {
        const int table = (4 * (experts + 1) + 15) / 16 * 16;
        starts = stages * Config::kStageBytes + 16 * kGemmMaxStages;
        items = starts + table;
        scales = items + table;
        scale_set = (4 * groups * (Config::kPitch + 1) + 15) / 16 * 16;  // pairs are read at once
        end = scales + 2 * scale_set;
    }
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
struct Fp8GemmTile {
    int expert, tile_n, row, count;
};

// Tile `index` of the list: experts ascending, an expert's rows in pieces of kMaxRows, a piece's column tiles together.
template <class Config>
__device__ __forceinline__ Fp8GemmTile fp8_gemm_tile(const Fp8GemmArgs& a, const int32_t* starts, const int32_t* items,
                                                     int64_t index) {
    const int item = static_cast<int>(index / a.tiles_n);
    int low = 0, high = a.experts;  // items[low] <= item < items[high]
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (items[middle] <= item) {
            low = middle;
        } else {
            high = middle;
        }
    }
    const int row = starts[low] + (item - items[low]) * Config::kMaxRows;
    return {low, static_cast<int>(index % a.tiles_n), row, min(Config::kMaxRows, starts[low + 1] - row)};
}

// The first row and the first item of every expert. Rows that offsets may not have are cut off: nothing outside is
// read.
template <class Config>
__device__ __forceinline__ void fp8_gemm_items(const Fp8GemmArgs& a, int32_t* starts, int32_t* items) {
    for (int e = threadIdx.x; e <= a.experts; e += Config::kThreads) starts[e] = min(max(a.offsets[e], 0), a.rows);
    __syncthreads();
    if (threadIdx.x < 32) {
        const int lane = threadIdx.x, share = (a.experts + 31) / 32;
        const int first = min(lane * share, a.experts), last = min(first + share, a.experts);
        const auto pieces = [&](int e) {
            return (max(starts[e + 1] - starts[e], 0) + Config::kMaxRows - 1) / Config::kMaxRows;
        };
        int own = 0;
        for (int e = first; e < last; ++e) own += pieces(e);
        int sum = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, sum, step);
            if (lane >= step) sum += other;
        }
        if (lane == 31) items[a.experts] = sum;
        sum -= own;
        for (int e = first; e < last; ++e) items[e] = sum, sum += pieces(e);
    }
    __syncthreads();
}

// What a consuming warpgroup knows of the ring of stages.
template <class Config>
struct Fp8GemmConsumer {
    uint32_t tiles, full, empty;
    int stages, warpgroup, lane;
    int stage = 0, oldest = 0;
    uint32_t parity = 0;

    // Starts the chains of one K block, which must not be touched before a wait.
    template <int kN>
    __device__ __forceinline__ void begin(float (&sum)[kN / 2]) {
        using namespace sm90;
        barrier_wait(full + 8 * stage, parity);
        const uint32_t at = tiles + stage * Config::kStageBytes;
        const uint64_t w_at = wgmma_tile(at + warpgroup * 64 * kGemmBlockK);
        const uint64_t x_at = wgmma_tile(at + Config::kTileN * kGemmBlockK);
        wgmma_fence();
        WgmmaFp8<kN>::template run<false>(sum, w_at, x_at);
#pragma unroll
        for (int i = 1; i < kGemmBlockK / 32; ++i) WgmmaFp8<kN>::template run<true>(sum, w_at + 2 * i, x_at + 2 * i);
        wgmma_commit();
        if (++stage == stages) stage = 0, parity ^= 1;
    }

    // Hands back the oldest stage that this warp still has. Every warp says so for itself: it knows of its own
    // products.
    __device__ __forceinline__ void release() {
        if (lane == 0) sm90::barrier_arrive(empty + 8 * oldest);
        if (++oldest == stages) oldest = 0;
    }
};

// total = fma(token scale * weight scale, part, total), of one K block.
template <class Config, int kN>
__device__ __forceinline__ void fp8_gemm_promote(float (&total)[kN / 2], float (&part)[kN / 2], const float* scales,
                                                 const float* weight_scales, int group) {
    sm90::wgmma_pin(part);
    const float weight_scale = weight_scales[group];
    const float* mine = scales + group * Config::kPitch + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kN / 8; ++i) {
        const float2 pair = *reinterpret_cast<const float2*>(mine + 8 * i);
        const float s0 = mul_rn(pair.x, weight_scale), s1 = mul_rn(pair.y, weight_scale);
#pragma unroll
        for (int j = 4 * i; j < 4 * i + 4; j += 2) {
            total[j] = fma_rn(s0, part[j], total[j]);
            total[j + 1] = fma_rn(s1, part[j + 1], total[j + 1]);
        }
    }
}

// One tile of at most kN tokens, by one warpgroup.
template <class Config, int kN>
__device__ __forceinline__ void fp8_gemm_compute(const Fp8GemmArgs& a, Fp8GemmConsumer<Config>& consumer,
                                                 const Fp8GemmTile& tile, const float* scales) {
    using namespace sm90;
    const float* weight_scales = scales + a.groups * Config::kPitch;
    float total[kN / 2], even[kN / 2], odd[kN / 2];
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) total[i] = 0.0f;
    // A part is added while the next one's products run.
    const auto next = [&](auto& started, auto& done, int group) {
        consumer.template begin<kN>(started);
        wgmma_wait<1>();
        consumer.release();
        fp8_gemm_promote<Config, kN>(total, done, scales, weight_scales, group);
    };
    const auto last = [&](auto& done, int group) {
        wgmma_wait<0>();
        consumer.release();
        fp8_gemm_promote<Config, kN>(total, done, scales, weight_scales, group);
    };
    consumer.template begin<kN>(even);
    int group = 1;
    for (; group + 1 < a.groups; group += 2) next(odd, even, group - 1), next(even, odd, group);
    if (group < a.groups) {
        next(odd, even, group - 1), last(odd, group);
    } else {
        last(even, group - 1);
    }

    // Fragments have weight rows down and tokens across; turned over, a lane has neighbours of one token.
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int column = tile.tile_n * Config::kTileN + consumer.warpgroup * 64 + 16 * warp + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kN / 8; ++i) {
        const uint32_t first = transpose_8x8(pack_bf16(total[4 * i], total[4 * i + 1]));
        const uint32_t second = transpose_8x8(pack_bf16(total[4 * i + 2], total[4 * i + 3]));
        const int token = 8 * i + lane / 4;
        if (token < tile.count) {
            uint16_t* at = a.out + static_cast<int64_t>(tile.row + token) * a.out_row + column;
            *reinterpret_cast<uint32_t*>(at) = first;
            *reinterpret_cast<uint32_t*>(at + 8) = second;
        }
    }
}

// Asks for the scales of a tile's tokens, [groups][kPitch], and of its rows of the weight, [groups].
template <class Config>
__device__ __forceinline__ void fp8_gemm_scales(const Fp8GemmArgs& a, const Fp8GemmTile& tile, uint32_t scales) {
    const float* s = a.s + tile.row * a.s_row;
    // Neighbouring threads read neighbouring words.
    const bool along_rows = a.s_group != 1;
    const int inner = along_rows ? tile.count : a.groups;
    for (int i = threadIdx.x; i < tile.count * a.groups; i += Config::kConsumers) {
        const int outer = i / inner, rest = i % inner;
        const int token = along_rows ? rest : outer, group = along_rows ? outer : rest;
        sm90::copy_word(scales + 4 * (group * Config::kPitch + token), s + token * a.s_row + group * a.s_group);
    }
    const float* ws = a.ws + tile.expert * a.ws_expert + tile.tile_n * Config::kTileN / 128 * a.ws_row;
    for (int group = threadIdx.x; group < a.groups; group += Config::kConsumers) {
        sm90::copy_word(scales + 4 * (a.groups * Config::kPitch + group), ws + group * a.ws_group);
    }
}
#endif

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    fp8_gemm_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                    const __grid_constant__ Fp8GemmArgs a) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
    using namespace sm90;
    extern __shared__ uint8_t shared[];
    const Fp8GemmShared<Config> layout(a.stages, a.experts, a.groups);
    const uint32_t tiles = (shared_address(shared) + 1023) & ~1023u;
    uint8_t* base = shared + (tiles - shared_address(shared));
    const uint32_t full = tiles + a.stages * Config::kStageBytes, empty = full + 8 * kGemmMaxStages;
    int32_t* starts = reinterpret_cast<int32_t*>(base + layout.starts);
    int32_t* items = reinterpret_cast<int32_t*>(base + layout.items);

    if (threadIdx.x == 0) {
        prefetch_map(x_map), prefetch_map(w_map);
        for (int i = 0; i < a.stages; ++i) {
            barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, Config::kConsumers / 32);
        }
        barrier_init_fence();
    }
    fp8_gemm_items<Config>(a, starts, items);
    const int64_t count = int64_t{items[a.experts]} * a.tiles_n;

    if (threadIdx.x >= Config::kConsumers) {
        if (threadIdx.x == Config::kConsumers) {
            int stage = 0;
            uint32_t parity = 1;  // the first round finds every stage empty
            for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
                const Fp8GemmTile tile = fp8_gemm_tile<Config>(a, starts, items, index);
                const int boxes = (tile.count + kGemmBoxRows - 1) / kGemmBoxRows;
                const int w_row = tile.expert * a.n + tile.tile_n * Config::kTileN;
                for (int group = 0; group < a.groups; ++group) {
                    const uint32_t at = tiles + stage * Config::kStageBytes;
                    barrier_wait(empty + 8 * stage, parity);
                    barrier_arrive_expect(full + 8 * stage, (Config::kTileN + boxes * kGemmBoxRows) * kGemmBlockK);
                    copy_box(at, w_map, full + 8 * stage, group * kGemmBlockK, w_row);
                    // The last box may hold rows of the next expert, or zeros past the last row.
                    for (int box = 0; box < boxes; ++box) {
                        copy_box(at + (Config::kTileN + box * kGemmBoxRows) * kGemmBlockK, x_map, full + 8 * stage,
                                 group * kGemmBlockK, tile.row + box * kGemmBoxRows);
                    }
                    if (++stage == a.stages) stage = 0, parity ^= 1;
                }
            }
        }
    } else {
        Fp8GemmConsumer<Config> consumer{
            tiles, full, empty, a.stages, static_cast<int>(threadIdx.x / 128), static_cast<int>(threadIdx.x % 32)};
        int set = 0;
        Fp8GemmTile tile{}, next{};
        if (blockIdx.x < count) {
            next = fp8_gemm_tile<Config>(a, starts, items, blockIdx.x);
            fp8_gemm_scales<Config>(a, next, tiles + layout.scales);
        }
        for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
            tile = next;
            copy_words_wait();
            // This tile's scales are there for all, and the tile before no longer needs its own.
            asm volatile("bar.sync 1, %0;" ::"n"(Config::kConsumers) : "memory");
            const float* scales = reinterpret_cast<const float*>(base + layout.scales + set * layout.scale_set);
            set ^= 1;
            if (index + gridDim.x < count) {
                next = fp8_gemm_tile<Config>(a, starts, items, index + gridDim.x);
                fp8_gemm_scales<Config>(a, next, tiles + layout.scales + set * layout.scale_set);
            }
            if (tile.count <= 8) {
                fp8_gemm_compute<Config, 8>(a, consumer, tile, scales);
            } else if (tile.count <= 16) {
                fp8_gemm_compute<Config, 16>(a, consumer, tile, scales);
            } else if (tile.count <= 32) {
                fp8_gemm_compute<Config, 32>(a, consumer, tile, scales);
            } else if constexpr (Config::kMaxRows == 64) {
                fp8_gemm_compute<Config, 64>(a, consumer, tile, scales);
            }
        }
    }
#endif
}

struct Fp8GemmProblem {
    const void* q;   // [rows, k]
    const void* wq;  // [experts * n, k]
    int64_t q_row, wq_row;
    Fp8GemmArgs args;
};

template <class Config>
cudaError_t launch_fp8_gemm(const Fp8GemmProblem& problem, int processors, cudaStream_t stream) {
    const auto kernel = fp8_gemm_kernel<Config>;
    Fp8GemmArgs args = problem.args;
    args.tiles_n = args.n / Config::kTileN;
    // As many stages as the tables and scales leave room for; the first one starts at a multiple of 1024.
    const int rest = Fp8GemmShared<Config>(0, args.experts, args.groups).end + 1024;
    args.stages = std::min(kGemmMaxStages, (Config::kMostShared - rest) / Config::kStageBytes);
    if (args.stages < 2) return cudaErrorInvalidValue;
    const int shared_bytes = rest + args.stages * Config::kStageBytes;
    const int64_t k = int64_t{args.groups} * kGemmBlockK;
    CUtensorMap x_map, w_map;
    constexpr auto kType = CU_TENSOR_MAP_DATA_TYPE_UINT8;
    const int64_t w_rows = int64_t{args.experts} * args.n;
    cudaError_t error = encode_rows(&x_map, kType, 1, problem.q, args.rows, k, problem.q_row, kGemmBoxRows);
    if (error != cudaSuccess) return error;
    error = encode_rows(&w_map, kType, 1, problem.wq, w_rows, k, problem.wq_row, Config::kTileN);
    if (error != cudaSuccess) return error;
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
    error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (error != cudaSuccess) return error;
    // Blocks take tile after tile, so that copies of the next one run under the end of this one; how many tiles there
    // are stands in offsets, which the host does not read.
    kernel<<<static_cast<unsigned>(processors * Config::kBlocks), Config::kThreads, shared_bytes, stream>>>(
        x_map, w_map, args);
    return cudaGetLastError();
}

// Which tiles a call gets: any choice gives the same bits, so this may follow the number of rows. On an H200 both read
// weights as fast as a copy does. The smaller one wins by a hair where an expert has a row or two and there are few,
// and takes a last column tile of 64.
inline cudaError_t fp8_gemm(const Fp8GemmProblem& problem, int processors, cudaStream_t stream) {
    if (problem.args.n % 128 != 0 || problem.args.rows <= 24) {
        return launch_fp8_gemm<Fp8GemmConfig<1, 32, 2>>(problem, processors, stream);
    }
    return launch_fp8_gemm<Fp8GemmConfig<2, 64, 1>>(problem, processors, stream);
}

}  // namespace bi::moe
