// The projection before mHC's gates, and the sum of squares of the same rows: kernels and raw-pointer launcher.
//
// Rows of K bfloat16 values times up to 24 rows of float32 weights. K is cut into pieces of at most sixteen blocks of
// 64 (reference: mhc_num_splits). A warp owns one 64-block. A weight is the sum of three bfloat16 numbers, exactly: its
// leading eight bits, the next eight, the rest. They stay in registers, and a warp's product is twelve matrix
// instructions (four steps of sixteen k, three parts) of 16 rows each. Then the sixteen sums of a piece are added
// ascending in float32, and the pieces are left to the finishing kernel, which adds them ascending too. Nothing in this
// order depends on the number of rows, and the matrix unit treats rows alike.
//
// Two kernels do this, with the same bits. For few rows a cluster of four thread blocks shares a piece of one tile, so
// that its weights come in through four multiprocessors. For many, a thread block keeps a piece's weights and walks
// over tiles that an asynchronous copy brings in. float32 fma on the ordinary cores would be bound by their speed for
// many rows; this is bound by memory.
#pragma once

#include <cstdint>

#include "bi/dependent_launch.cuh"
#include "bi/numerics.cuh"
#include "bi/sm90.cuh"

namespace bi {

constexpr int kMhcBlockK = 64;
constexpr int kMhcPieceBlocks = 16;    // 64-blocks of a piece, at most; one warp each
constexpr int kMhcTileRows = 16;       // rows of a matrix instruction
constexpr int kMhcPartialStride = 32;  // floats of a row's piece: up to 24 sums
constexpr int kMhcSquares = 24;        // and at this place the sum of squares

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

// Sums of one warp: 16 rows of kWidth columns, of which kColumns exist, then the rows' squares.
template <int kColumns>
struct MhcSums {
    static constexpr int kTiles = (kColumns + 7) / 8;  // of eight columns
    static constexpr int kWidth = 8 * kTiles;
    static constexpr int kProducts = kMhcTileRows * kWidth;
    static constexpr int kFloats = kProducts + kMhcTileRows;
};

#ifdef __CUDACC__
__device__ __forceinline__ void mhc_named_wait(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void mhc_named_arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// A float of another block of the cluster, at this block's own shared address.
__device__ __forceinline__ float mhc_cluster_load(uint32_t address, uint32_t rank) {
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(sm90::cluster_address(address, rank)) : "memory");
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

struct MhcPiece {
    int blocks;
    int64_t first_k;
};
__device__ __forceinline__ MhcPiece mhc_piece(const MhcSplit& split, int piece) {
    return {split.blocks + (piece < split.longer ? 1 : 0),
            int64_t{kMhcBlockK} * (piece * split.blocks + min(piece, split.longer))};
}

// A lane's weights of one 64-block. k runs in an order of its own there: the words of step 2 j + h are those of the
// lane's 16-byte chunk member + 4 j of a row, and the same k of the weights.
template <int kColumns>
struct MhcWeights {
    static constexpr int kTiles = MhcSums<kColumns>::kTiles;
    uint32_t words[4][kTiles][3][2];

    // `weights` is the first row's block, rows are k apart. Plain loads: __ldg takes memory to be constant for as long
    // as the kernel lives, and under overlapping launches that begins while its predecessor still runs.
    __device__ __forceinline__ void load(const float* weights, int64_t k, int group, int member) {
        float4 values[kTiles][2][2];
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            const float4* row = reinterpret_cast<const float4*>(weights + (8 * n + group) * k + member * 8);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                values[n][i / 2][i % 2] = 8 * n + group < kColumns ? row[8 * (i / 2) + i % 2] : float4{};
            }
        }
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float4 v = values[n][i / 2][i % 2];
                uint32_t first[3], second[3];
                mhc_split_weights(v.x, v.y, first);
                mhc_split_weights(v.z, v.w, second);
#pragma unroll
                for (int p = 0; p < 3; ++p) words[i][n][p][0] = first[p], words[i][n][p][1] = second[p];
            }
        }
    }
};

// Products and squares of a tile's 64-block by one warp.
template <int kColumns>
struct MhcBlockSum {
    using Sums = MhcSums<kColumns>;
    float sum[Sums::kTiles][4] = {};
    float upper_squares = 0.0f, lower_squares = 0.0f;

    // Chunks member + 4 j of rows `group` and `group` + 8.
    __device__ __forceinline__ void add(const MhcWeights<kColumns>& weights, int j, uint4 upper, uint4 lower) {
#pragma unroll
        for (int p = 2; p >= 0; --p) {  // the smallest parts first
#pragma unroll
            for (int n = 0; n < Sums::kTiles; ++n) {
                const auto& w = weights.words[2 * j][n][p];
                mhc_multiply(sum[n], upper.x, lower.x, upper.y, lower.y, w[0], w[1]);
            }
#pragma unroll
            for (int n = 0; n < Sums::kTiles; ++n) {
                const auto& w = weights.words[2 * j + 1][n][p];
                mhc_multiply(sum[n], upper.z, lower.z, upper.w, lower.w, w[0], w[1]);
            }
        }
        upper_squares = mhc_add_squares(upper, upper_squares);
        lower_squares = mhc_add_squares(lower, lower_squares);
    }

    __device__ __forceinline__ void store(float* to, int group, int member) {
#pragma unroll
        for (int step = 1; step <= 2; step *= 2) {
            upper_squares = add_rn(upper_squares, __shfl_xor_sync(0xffffffffu, upper_squares, step));
            lower_squares = add_rn(lower_squares, __shfl_xor_sync(0xffffffffu, lower_squares, step));
        }
#pragma unroll
        for (int n = 0; n < Sums::kTiles; ++n) {
            float* const pair = to + group * Sums::kWidth + 8 * n + 2 * member;
            *reinterpret_cast<float2*>(pair) = {sum[n][0], sum[n][1]};
            *reinterpret_cast<float2*>(pair + 8 * Sums::kWidth) = {sum[n][2], sum[n][3]};
        }
        if (member == 0) {
            to[Sums::kProducts + group] = upper_squares;
            to[Sums::kProducts + group + 8] = lower_squares;
        }
    }
};

// Few rows: one tile per cluster.
constexpr int kMhcCut = 4;
constexpr int kMhcCutWarps = kMhcPieceBlocks / kMhcCut;

template <int kColumns>
__global__ void __launch_bounds__(32 * kMhcCutWarps)
    mhc_projection_few_kernel(const __grid_constant__ MhcProjectionArgs a) {
    using Sums = MhcSums<kColumns>;
    __shared__ __align__(16) float sums[kMhcCutWarps * Sums::kFloats];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, member = lane % 4;
    const int rank = blockIdx.x % kMhcCut;
    const int number = blockIdx.x / kMhcCut;
    const int piece = number % a.split.splits;
    const int64_t row0 = int64_t{number / a.split.splits} * kMhcTileRows;
    const MhcPiece mine = mhc_piece(a.split, piece);
    const int block = rank * kMhcCutWarps + warp;
    const float* const block_weights = a.weights + mine.first_k + block * kMhcBlockK;
    if (block < mine.blocks && lane < kColumns) prefetch_to_l2(block_weights + lane * a.k, kMhcBlockK * 4);
    dependent_wait();
    dependent_start();
    if (block < mine.blocks) {
        const int64_t upper_row = row0 + group, lower_row = upper_row + 8;
        const uint4* const at = reinterpret_cast<const uint4*>(a.x + mine.first_k + block * kMhcBlockK) + member;
        uint4 upper[2] = {}, lower[2] = {};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            if (upper_row < a.rows) upper[j] = __ldcg(at + upper_row * (a.k / 8) + 4 * j);
            if (lower_row < a.rows) lower[j] = __ldcg(at + lower_row * (a.k / 8) + 4 * j);
        }
        MhcWeights<kColumns> weights;
        weights.load(block_weights, a.k, group, member);
        MhcBlockSum<kColumns> sum;
#pragma unroll
        for (int j = 0; j < 2; ++j) sum.add(weights, j, upper[j], lower[j]);
        sum.store(sums + warp * Sums::kFloats, group, member);
    }
    sm90::cluster_sync();
    constexpr int kShare = Sums::kFloats / kMhcCut;
    static_assert(kShare <= 32 * kMhcCutWarps && Sums::kFloats % kMhcCut == 0);
    if (threadIdx.x < kShare) {
        const int place = rank * kShare + threadIdx.x;
        const uint32_t at = sm90::shared_address(sums + place);
        float block_sums[kMhcPieceBlocks];
#pragma unroll
        for (int i = 0; i < kMhcPieceBlocks; ++i) {
            block_sums[i] =
                i < mine.blocks ? mhc_cluster_load(at + i % kMhcCutWarps * Sums::kFloats * 4, i / kMhcCutWarps) : -0.0f;
        }
        float total = block_sums[0];
#pragma unroll
        for (int i = 1; i < kMhcPieceBlocks; ++i) total = add_rn(total, block_sums[i]);
        const bool square = place >= Sums::kProducts;
        const int64_t row = row0 + (square ? place - Sums::kProducts : place / Sums::kWidth);
        const int column = square ? kMhcSquares : place % Sums::kWidth;
        if (row < a.rows && (square || column < kColumns)) {
            a.partial[(row * a.split.splits + piece) * kMhcPartialStride + column] = total;
        }
    }
    sm90::cluster_sync();  // a block's shared memory lives while others read it
}

// Many rows: four warpgroups multiply, one brings tiles in and adds up. It hands most of its registers over.
template <int kColumns>
struct MhcManyRows {
    static constexpr int kAdders = 128;  // threads
    static constexpr int kThreads = 32 * kMhcPieceBlocks + kAdders;
    static constexpr int kStages = 5;
    // 64 bytes beyond a multiple of 128: two rows read by one quarter of a warp lie in different banks.
    static constexpr int kRowBytes = kMhcPieceBlocks * kMhcBlockK * 2 + 64;
    static constexpr int kStageBytes = kMhcTileRows * kRowBytes;
    static constexpr int kBufferFloats = kMhcPieceBlocks * MhcSums<kColumns>::kFloats;
    static constexpr int kSumsAt = kStages * kStageBytes;
    static constexpr int kBarriersAt = kSumsAt + 2 * kBufferFloats * 4;
    static constexpr int kSharedBytes = kBarriersAt + 8 * kStages;
    static_assert(kSharedBytes <= 232448);
};

template <int kColumns>
__global__ void __launch_bounds__(MhcManyRows<kColumns>::kThreads, 1)
    mhc_projection_many_kernel(const __grid_constant__ MhcProjectionArgs a) {
    using Layout = MhcManyRows<kColumns>;
    using Sums = MhcSums<kColumns>;
    constexpr int kStages = Layout::kStages;
    extern __shared__ __align__(128) uint8_t mhc_shared[];
    const uint32_t stages = sm90::shared_address(mhc_shared);
    const uint32_t barriers = stages + Layout::kBarriersAt;
    float* const sums = reinterpret_cast<float*>(mhc_shared + Layout::kSumsAt);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int piece = blockIdx.x % a.split.splits;
    const int64_t first_tile = blockIdx.x / a.split.splits, tile_step = gridDim.x / a.split.splits;
    const int64_t tiles = (a.rows + kMhcTileRows - 1) / kMhcTileRows;
    const MhcPiece mine = mhc_piece(a.split, piece);
    // Barriers 1 and 2: the sums of an even or odd tile are there. 3 and 4: they have been added up. So a buffer is
    // never written while it is read: every adder arrives at 3 + buffer after its last read of tile i, and every
    // multiplying warp waits there before its first write of tile i + 2; both do so exactly where i + 2 exists. No
    // phase is overtaken: adders reach that arrival again only past 1 + buffer, where all warps arrive after their
    // wait, and warps arrive at 1 + buffer again only past 3 + buffer, where all adders arrive after theirs. Racecheck
    // has reported a hazard between a read and a write that 3 orders, in one block of 128: a false alarm.
    const int threads = 32 * mine.blocks + Layout::kAdders;

    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) sm90::barrier_init(barriers + 8 * i, 1);
        sm90::barrier_init_fence();
    }
    if (threadIdx.x < kColumns) {
        prefetch_to_l2(a.weights + threadIdx.x * a.k + mine.first_k, mine.blocks * kMhcBlockK * 4);
    }
    __syncthreads();
    dependent_wait();
    dependent_start();

    if (warp < kMhcPieceBlocks) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
        if (warp >= mine.blocks) return;
        const int group = lane / 4, member = lane % 4;
        MhcWeights<kColumns> weights;
        weights.load(a.weights + mine.first_k + warp * kMhcBlockK, a.k, group, member);
        int stage = 0, buffer = 0;
        uint32_t parity = 0;
        for (int64_t tile = first_tile; tile < tiles; tile += tile_step) {
            sm90::barrier_wait(barriers + 8 * stage, parity);
            const uint32_t at =
                stages + stage * Layout::kStageBytes + group * Layout::kRowBytes + warp * kMhcBlockK * 2 + member * 16;
            MhcBlockSum<kColumns> sum;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                sum.add(weights, j, sm90::shared_quad<uint4>(at + 64 * j),
                        sm90::shared_quad<uint4>(at + 64 * j + 8 * Layout::kRowBytes));
            }
            if (tile >= first_tile + 2 * tile_step) mhc_named_wait(3 + buffer, threads);
            sum.store(sums + buffer * Layout::kBufferFloats + warp * Sums::kFloats, group, member);
            mhc_named_arrive(1 + buffer, threads);
            buffer ^= 1;
            if (++stage == kStages) stage = 0, parity ^= 1;
        }
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        // By one warp: a lane copies one row's part. Rows past the end leave old bytes in place, whose sums nobody
        // stores.
        const auto copy_tile = [&](int64_t tile, int stage) {
            if (warp != kMhcPieceBlocks || tile >= tiles) return;
            const int64_t row0 = tile * kMhcTileRows;
            const int rows = static_cast<int>(min(int64_t{kMhcTileRows}, a.rows - row0));
            const uint32_t bytes = mine.blocks * kMhcBlockK * 2;
            const uint32_t barrier = barriers + 8 * stage;
            if (lane == 0) sm90::barrier_arrive_expect(barrier, rows * bytes);
            __syncwarp();
            if (lane < rows) {
                asm volatile(
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                        stages + stage * Layout::kStageBytes + lane * Layout::kRowBytes),
                    "l"(a.x + (row0 + lane) * a.k + mine.first_k), "r"(bytes), "r"(barrier)
                    : "memory");
            }
        };
        for (int i = 0; i < kStages; ++i) copy_tile(first_tile + i * tile_step, i);
        int stage = 0, buffer = 0;
        for (int64_t tile = first_tile; tile < tiles; tile += tile_step) {
            const float4* const from = reinterpret_cast<const float4*>(sums + buffer * Layout::kBufferFloats);
            mhc_named_wait(1 + buffer, threads);
            copy_tile(tile + kStages * tile_step, stage);  // every warp has read this stage
            for (int i = threadIdx.x - 32 * kMhcPieceBlocks; i < Sums::kFloats / 4; i += Layout::kAdders) {
                float4 total = from[i];
#pragma unroll
                for (int w = 1; w < kMhcPieceBlocks; ++w) {
                    if (w < mine.blocks) {
                        const float4 v = from[w * (Sums::kFloats / 4) + i];
                        total.x = add_rn(total.x, v.x), total.y = add_rn(total.y, v.y);
                        total.z = add_rn(total.z, v.z), total.w = add_rn(total.w, v.w);
                    }
                }
                const auto place = [&](int64_t row, int column) {
                    return a.partial + (row * a.split.splits + piece) * kMhcPartialStride + column;
                };
                const int64_t row0 = tile * kMhcTileRows;
                if (4 * i >= Sums::kProducts) {
                    const int64_t row = row0 + 4 * i - Sums::kProducts;
                    if (row < a.rows) *place(row, kMhcSquares) = total.x;
                    if (row + 1 < a.rows) *place(row + 1, kMhcSquares) = total.y;
                    if (row + 2 < a.rows) *place(row + 2, kMhcSquares) = total.z;
                    if (row + 3 < a.rows) *place(row + 3, kMhcSquares) = total.w;
                } else {
                    const int64_t row = row0 + 4 * i / Sums::kWidth;
                    const int column = 4 * i % Sums::kWidth;
                    if (row < a.rows && column < kColumns) *reinterpret_cast<float4*>(place(row, column)) = total;
                }
            }
            if (tile + 2 * tile_step < tiles) mhc_named_arrive(3 + buffer, threads);
            buffer ^= 1;
            if (++stage == kStages) stage = 0;
        }
    }
}

// Which kernel and how many blocks follow the number of rows and of multiprocessors; what becomes of a row does not.
template <int kColumns>
cudaError_t launch_mhc_projection(const MhcProjectionArgs& a, int processors, cudaStream_t stream) {
    const int64_t tiles = (a.rows + kMhcTileRows - 1) / kMhcTileRows;
    const int64_t room = processors / a.split.splits;
    if (tiles * a.split.splits * kMhcCut <= processors) {
        const dim3 grid(static_cast<unsigned>(tiles * a.split.splits * kMhcCut));
        return launch_dependent(mhc_projection_few_kernel<kColumns>, grid, 32 * kMhcCutWarps, 0, kMhcCut, stream, a);
    }
    const auto kernel = mhc_projection_many_kernel<kColumns>;
    constexpr int kSharedBytes = MhcManyRows<kColumns>::kSharedBytes;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (error != cudaSuccess) return error;
    const int64_t groups = room < 1 ? 1 : (tiles < room ? tiles : room);
    const dim3 grid(static_cast<unsigned>(groups * a.split.splits));
    return launch_dependent(kernel, grid, MhcManyRows<kColumns>::kThreads, kSharedBytes, 1, stream, a);
}
#endif

}  // namespace bi
