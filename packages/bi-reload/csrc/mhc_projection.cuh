// The projection before mHC's gates, and the sum of squares of the same rows: kernel and raw-pointer launcher.
//
// Rows of K bfloat16 values times up to 24 rows of float32 weights. K is cut into pieces of at most sixteen blocks of
// 64 (reference: mhc_num_splits); a thread block owns one piece, a warp one 64-block of it, for as many rows as come by.
// A weight is the sum of three bfloat16 numbers, exactly: its leading eight bits, the next eight, the rest. They stay in
// registers, and a warp's product is twelve matrix instructions (four steps of sixteen k, three parts) of 16 rows each.
// Then the warps' sums are added ascending in float32, and the pieces are left to the finishing kernel, which adds them
// ascending too. Nothing in this order depends on the number of rows, and the matrix unit treats rows alike.
//
// float32 fma on the ordinary cores would be bound by their speed for many rows; this is bound by memory.
#pragma once

#include <cstdint>

#include "bi/numerics.cuh"
#include "dependent_launch.cuh"

namespace bi {

constexpr int kMhcBlockK = 64;
constexpr int kMhcPieceBlocks = 16;       // 64-blocks of a piece, at most; one warp each
constexpr int kMhcTileRows = 16;          // rows of a matrix instruction
constexpr int kMhcPartialStride = 32;     // floats of a row's piece: up to 24 sums
constexpr int kMhcSquares = 24;           // and at this place the sum of squares
constexpr int kMhcThreads = 32 * kMhcPieceBlocks;

// As the reference's: 64-blocks per piece, the first `longer` of `splits` pieces having one more than `blocks`.
struct MhcSplit {
    int splits, blocks, longer;
};

constexpr MhcSplit mhc_split(int64_t k) {
    const int64_t blocks = k / kMhcBlockK;
    const int64_t most = (blocks + kMhcPieceBlocks - 1) / kMhcPieceBlocks;
    const int64_t splits = most < 2 ? 2 : most;
    return {static_cast<int>(splits), static_cast<int>(blocks / splits), static_cast<int>(blocks % splits)};
}

struct MhcProjectionArgs {
    const uint16_t* x;     // bfloat16 [rows, k], contiguous, 16-byte aligned
    const float* weights;  // [columns, k], contiguous, 16-byte aligned
    float* partial;        // [rows, splits, kMhcPartialStride]
    int64_t rows, k;
    MhcSplit split;
};

// kTiles groups of eight columns, of which kColumns exist.
template <int kColumns>
struct MhcProjection {
    static constexpr int kTiles = (kColumns + 7) / 8;
    static constexpr int kWidth = 8 * kTiles;
    static constexpr int kStages = 5;
    // 64 bytes beyond a multiple of 128: two rows read by one quarter of a warp lie in different banks.
    static constexpr int kRowBytes = kMhcPieceBlocks * kMhcBlockK * 2 + 64;
    static constexpr int kStageBytes = kMhcTileRows * kRowBytes;
    static constexpr int kSumFloats = kMhcTileRows * (kWidth + 1);  // of a warp: its products, then its squares
    static constexpr int kSumsAt = kStages * kStageBytes;
    static constexpr int kBarriersAt = kSumsAt + 2 * kMhcPieceBlocks * kSumFloats * 4;
    static constexpr int kSharedBytes = kBarriersAt + 8 * kStages;
    static_assert(kSharedBytes <= 232448);
};

#ifdef __CUDACC__
__device__ __forceinline__ uint32_t mhc_shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void mhc_barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@!p bra again;\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
__device__ __forceinline__ uint4 mhc_shared_load(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}
// sum[16 x 8] += a[16 x 16] b[16 x 8]. Lane 4 g + t holds, of a, words of row g (a0, a2) and g + 8 (a1, a3), of b,
// words of column g, and of the sum columns 2 t and 2 t + 1 of rows g (0, 1) and g + 8 (2, 3).
__device__ __forceinline__ void mhc_multiply(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Words of two weights each: leading eight bits, next eight, rest. Every difference is exact, and the rest has at most
// eight bits left (below 2**-133 they are cut off). A weight that is not finite gives NaN.
__device__ __forceinline__ void mhc_split_weights(float lo, float hi, uint32_t (&parts)[3]) {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        parts[i] = __byte_perm(float_bits(lo), float_bits(hi), 0x7632);
        lo = add_rn(lo, -bits_float(float_bits(lo) & 0xffff0000u));
        hi = add_rn(hi, -bits_float(float_bits(hi) & 0xffff0000u));
    }
}

__device__ __forceinline__ float mhc_add_squares(uint4 v, float sum) {
#pragma unroll
    for (const uint32_t pair : {v.x, v.y, v.z, v.w}) {
        const float lo = bf16_lo(pair), hi = bf16_hi(pair);
        sum = fma_rn(hi, hi, fma_rn(lo, lo, sum));
    }
    return sum;
}

template <int kColumns>
__global__ void __launch_bounds__(kMhcThreads, 1)
    mhc_projection_kernel(const __grid_constant__ MhcProjectionArgs a) {
    using Layout = MhcProjection<kColumns>;
    constexpr int kTiles = Layout::kTiles, kWidth = Layout::kWidth, kStages = Layout::kStages;
    extern __shared__ __align__(128) uint8_t mhc_shared[];
    const uint32_t stages = mhc_shared_address(mhc_shared);
    const uint32_t barriers = stages + Layout::kBarriersAt;
    float* const sums = reinterpret_cast<float*>(mhc_shared + Layout::kSumsAt);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int group = lane / 4, member = lane % 4;
    const int piece = blockIdx.x % a.split.splits;
    const int64_t first_tile = blockIdx.x / a.split.splits, tile_step = gridDim.x / a.split.splits;
    const int64_t tiles = (a.rows + kMhcTileRows - 1) / kMhcTileRows;
    const int blocks = a.split.blocks + (piece < a.split.longer ? 1 : 0);
    const int64_t first_k = int64_t{kMhcBlockK} * (piece * a.split.blocks + min(piece, a.split.longer));

    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + 8 * i) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (threadIdx.x < kColumns) prefetch_to_l2(a.weights + threadIdx.x * a.k + first_k, blocks * kMhcBlockK * 4);
    __syncthreads();
    dependent_wait();
    dependent_start();

    // By the lanes of warp 0: one copies one row's part. Rows past the end leave old bytes in place, whose sums nobody
    // stores.
    const auto copy_tile = [&](int64_t tile, int stage) {
        const int64_t row0 = tile * kMhcTileRows;
        const int rows = static_cast<int>(min(int64_t{kMhcTileRows}, a.rows - row0));
        const uint32_t bytes = blocks * kMhcBlockK * 2;
        const uint32_t barrier = barriers + 8 * stage;
        if (lane == 0) {
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(rows * bytes)
                         : "memory");
        }
        __syncwarp();
        if (lane < rows) {
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                             stages + stage * Layout::kStageBytes + lane * Layout::kRowBytes),
                         "l"(a.x + (row0 + lane) * a.k + first_k), "r"(bytes), "r"(barrier)
                         : "memory");
        }
    };
    if (warp == 0) {
        for (int i = 0; i < kStages; ++i) {
            if (first_tile + i * tile_step < tiles) copy_tile(first_tile + i * tile_step, i);
        }
    }

    // k runs in an order of its own within a 64-block: a lane's words of step 2 j + h are those of its 16-byte chunk
    // member + 4 j, and the same k of the weights.
    uint32_t weights[4][kTiles][3][2];
    if (warp < blocks) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            const bool exists = 8 * n + group < kColumns;
            const float* row = a.weights + (8 * n + group) * a.k + first_k + warp * kMhcBlockK + member * 8;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float4 v = exists ? __ldg(reinterpret_cast<const float4*>(row + 32 * j + 4 * h))
                                            : float4{0.0f, 0.0f, 0.0f, 0.0f};
                    uint32_t first[3], second[3];
                    mhc_split_weights(v.x, v.y, first);
                    mhc_split_weights(v.z, v.w, second);
#pragma unroll
                    for (int p = 0; p < 3; ++p) {
                        weights[2 * j + h][n][p][0] = first[p];
                        weights[2 * j + h][n][p][1] = second[p];
                    }
                }
            }
        }
    }

    int stage = 0, buffer = 0;
    uint32_t parity = 0;
    for (int64_t tile = first_tile; tile < tiles; tile += tile_step) {
        float* const tile_sums = sums + buffer * kMhcPieceBlocks * Layout::kSumFloats;
        if (warp < blocks) {
            mhc_barrier_wait(barriers + 8 * stage, parity);
            const uint32_t at = stages + stage * Layout::kStageBytes + group * Layout::kRowBytes +
                                warp * kMhcBlockK * 2 + member * 16;
            float sum[kTiles][4] = {};
            float upper_squares = 0.0f, lower_squares = 0.0f;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const uint4 upper = mhc_shared_load(at + 64 * j);
                const uint4 lower = mhc_shared_load(at + 64 * j + 8 * Layout::kRowBytes);
                // The smallest parts first.
#pragma unroll
                for (int p = 2; p >= 0; --p) {
#pragma unroll
                    for (int n = 0; n < kTiles; ++n) {
                        const auto& w = weights[2 * j][n][p];
                        mhc_multiply(sum[n], upper.x, lower.x, upper.y, lower.y, w[0], w[1]);
                    }
#pragma unroll
                    for (int n = 0; n < kTiles; ++n) {
                        const auto& w = weights[2 * j + 1][n][p];
                        mhc_multiply(sum[n], upper.z, lower.z, upper.w, lower.w, w[0], w[1]);
                    }
                }
                upper_squares = mhc_add_squares(upper, upper_squares);
                lower_squares = mhc_add_squares(lower, lower_squares);
            }
#pragma unroll
            for (int step = 1; step <= 2; step *= 2) {
                upper_squares = add_rn(upper_squares, __shfl_xor_sync(0xffffffffu, upper_squares, step));
                lower_squares = add_rn(lower_squares, __shfl_xor_sync(0xffffffffu, lower_squares, step));
            }
            float* const mine = tile_sums + warp * Layout::kSumFloats;
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                float* const pair = mine + group * kWidth + 8 * n + 2 * member;
                *reinterpret_cast<float2*>(pair) = {sum[n][0], sum[n][1]};
                *reinterpret_cast<float2*>(pair + 8 * kWidth) = {sum[n][2], sum[n][3]};
            }
            if (member == 0) {
                mine[kMhcTileRows * kWidth + group] = upper_squares;
                mine[kMhcTileRows * kWidth + group + 8] = lower_squares;
            }
        }
        __syncthreads();
        // Everybody has read this stage, and the sums of the tile before last.
        if (warp == 0 && tile + kStages * tile_step < tiles) copy_tile(tile + kStages * tile_step, stage);
        if (threadIdx.x < Layout::kSumFloats) {
            const bool square = threadIdx.x >= kMhcTileRows * kWidth;
            const int in_tile = square ? threadIdx.x - kMhcTileRows * kWidth : threadIdx.x / kWidth;
            const int column = square ? kMhcSquares : threadIdx.x % kWidth;
            const int64_t row = tile * kMhcTileRows + in_tile;
            float total = tile_sums[threadIdx.x];
            if (blocks == kMhcPieceBlocks) {
#pragma unroll
                for (int i = 1; i < kMhcPieceBlocks; ++i) {
                    total = add_rn(total, tile_sums[i * Layout::kSumFloats + threadIdx.x]);
                }
            } else {
                for (int i = 1; i < blocks; ++i) {
                    total = add_rn(total, tile_sums[i * Layout::kSumFloats + threadIdx.x]);
                }
            }
            if (row < a.rows && (square || column < kColumns)) {
                a.partial[(row * a.split.splits + piece) * kMhcPartialStride + column] = total;
            }
        }
        buffer ^= 1;
        if (++stage == kStages) stage = 0, parity ^= 1;
    }
}

// The number of blocks follows the number of rows and of multiprocessors; what a block does to a row does not.
template <int kColumns>
cudaError_t launch_mhc_projection(const MhcProjectionArgs& a, int processors, cudaStream_t stream) {
    const auto kernel = mhc_projection_kernel<kColumns>;
    constexpr int kSharedBytes = MhcProjection<kColumns>::kSharedBytes;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (error != cudaSuccess) return error;
    const int64_t tiles = (a.rows + kMhcTileRows - 1) / kMhcTileRows;
    const int64_t room = processors / a.split.splits;
    const int64_t groups = room < 1 ? 1 : (tiles < room ? tiles : room);
    const dim3 grid(static_cast<unsigned>(groups * a.split.splits));
    return launch_dependent(kernel, grid, kMhcThreads, kSharedBytes, stream, a);
}
#endif

}  // namespace bi
