// x[M, K] times weight[N, K] transposed, bfloat16 to float32, with an order of summation that K alone decides.
//
// K is cut into kSplits equal pieces. Within a piece every output element is one chain of wgmma steps of sixteen
// products, k ascending; the pieces are added in float32, ascending, starting from +0. That is the whole arithmetic,
// and it is the same in every instantiation: tile sizes, and whether one block walks all pieces or the blocks of a
// cluster take some each, decide where an element is computed, never how. Rows of a tile do not meet in wgmma, and rows
// past M are zeros that nothing stores.
//
// Only few rows leave most multiprocessors idle without a split; with many rows the split costs a reduction through
// shared memory that they do not need. So which instantiation runs may follow M.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "bi/dependent_launch.cuh"
#include "bi/numerics.cuh"
#include "bi/sm90.cuh"
#include "bi/tensor_map.cuh"

namespace bi {

constexpr int kSplits = 8;   // blocks of a portable cluster; bi_kernels.split_k for every supported K
constexpr int kBlockK = 64;  // 128 bytes: one row of the swizzle

struct FixedOrderMmArgs {
    void* out;           // [m, n] float32 or bfloat16
    int64_t out_stride;  // elements between rows
    int64_t m;
    int n, k;
    int x_rows;  // that one block copies per tile: fewer than a tile has where m is small
    int tiles_m, tiles_n, tiles;
    int band;  // rows of tiles that walk the columns together
};

// The pieces of a tile go to kCut blocks of a cluster; or, where one block has them all, the kShare blocks of a cluster
// take neighbouring column tiles and share the copies of x.
template <int kWarpgroups_, int kTileN_, int kCut_, int kShare_ = 1>
struct FixedOrderMmConfig {
    static constexpr int kWarpgroups = kWarpgroups_;  // 64 rows each
    static constexpr int kTileM = 64 * kWarpgroups_;
    static constexpr int kTileN = kTileN_;
    static constexpr int kCut = kCut_, kShare = kShare_;
    static constexpr bool kWhole = kCut == 1;
    static constexpr int kPieces = kSplits / kCut;
    static constexpr int kCluster = kCut * kShare;
    static_assert(kCut == 1 || kShare == 1);
    // And those that feed them: a warpgroup where it gives up registers, else a warp.
    static constexpr int kThreads = 128 * kWarpgroups_ + (kWhole ? 128 : 32);
    static constexpr int kStageBytes = (kTileM + kTileN) * kBlockK * 2;
    // Each block of a cut adds up its share of the columns, of which all send it their pieces.
    static constexpr int kColumns = kTileN / kCut;
    static constexpr int kInboxPieceBytes = kTileM * kColumns * 4;
    static constexpr int kInboxBytes = kWhole ? 0 : kSplits * kInboxPieceBytes;
    static constexpr int kBlocks = kCut == kSplits && kStageBytes <= 16384 ? 2 : 1;
    static constexpr int kStages = std::min(8, ((kBlocks == 2 ? 112640 : 230400) - kInboxBytes) / kStageBytes);
    static constexpr int kInboxAt = kStages * kStageBytes;
    static constexpr int kTileBytes = kInboxAt + kInboxBytes;
    static constexpr int kSharedBytes = kTileBytes + 16 * kStages + 8 + 1024;  // barriers; alignment of the first tile
    static_assert(kSharedBytes <= 232448);
};

struct TileAt {
    int row, column;  // in tiles
};

// Where tile number `tile` lies: band after band; in a band column after column, each through all rows of the band;
// kShare neighbouring columns count as one. So blocks that run at once read few columns of the weight.
template <int kShare>
__device__ __forceinline__ TileAt tile_at(const FixedOrderMmArgs& a, unsigned tile) {
    const unsigned in_band = a.band * a.tiles_n;
    const unsigned first_row = tile / in_band * a.band, rest = tile % in_band;
    const unsigned column_tiles = min(static_cast<unsigned>(a.band), a.tiles_m - first_row) * kShare;
    const unsigned in_column = rest % column_tiles;
    return {static_cast<int>(first_row + in_column / kShare),
            static_cast<int>(rest / column_tiles * kShare + in_column % kShare)};
}

template <bool kBf16>
__device__ __forceinline__ void store_pair(const FixedOrderMmArgs& a, int64_t row, int column, float v0, float v1) {
    // A GPU's own NaN is 0x7fffffff; out's is the one that torch writes.
    v0 = isnan(v0) ? bits_float(kNaNBits) : v0, v1 = isnan(v1) ? bits_float(kNaNBits) : v1;
    const int64_t at = row * a.out_stride + column;
    if constexpr (kBf16) {
        uint32_t pair = pack_bf16(v0, v1);
        if (isnan(v0)) pair = (pair & 0xffff0000u) | 0x7fc0u;
        if (isnan(v1)) pair = (pair & 0xffffu) | 0x7fc00000u;
        *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(a.out) + at) = pair;
    } else {
        *reinterpret_cast<float2*>(static_cast<float*>(a.out) + at) = make_float2(v0, v1);
    }
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
// What a consuming warpgroup knows of the ring of stages.
template <class Config>
struct Consumer {
    uint32_t tiles, full, empty;
    int warpgroup, thread;
    int stage = 0;
    uint32_t parity = 0;

    // One step of a chain: sixty-four products, the first or more of them. On return the step before it is complete.
    // (`sum` must not be touched in between, or ptxas makes every product wait for the one before.)
    template <bool kFirst>
    __device__ __forceinline__ void step(float (&sum)[Config::kTileN / 2]) {
        using namespace sm90;
        barrier_wait(full + 8 * stage, parity);
        const uint32_t x_tile = tiles + stage * Config::kStageBytes;
        const uint64_t x_at = wgmma_tile(x_tile + warpgroup * 64 * kBlockK * 2);
        const uint64_t w_at = wgmma_tile(x_tile + Config::kTileM * kBlockK * 2);
        wgmma_fence();
        Wgmma<Config::kTileN>::template run<!kFirst>(sum, x_at, w_at);
#pragma unroll
        for (int i = 1; i < kBlockK / 16; ++i) Wgmma<Config::kTileN>::template run<true>(sum, x_at + 2 * i, w_at + 2 * i);
        wgmma_commit();
        wgmma_wait<1>();
        if (++stage == Config::kStages) stage = 0, parity ^= 1;
    }

    // Hands back the stage of the last step but `back`.
    __device__ __forceinline__ void release(int back) {
        const int which = stage >= back ? stage - back : stage - back + Config::kStages;
        if constexpr (Config::kShare > 1) {
            if (thread < Config::kShare) sm90::barrier_arrive_at(empty + 8 * which, thread);
        } else {
            if (thread == 0) sm90::barrier_arrive(empty + 8 * which);
        }
    }
    __device__ __forceinline__ void release_before() { release(2); }
    // All steps are complete.
    __device__ __forceinline__ void finish() {
        sm90::wgmma_wait<0>();
        release(1);
    }
};

template <int kCount>
__device__ __forceinline__ void add_piece(float (&total)[kCount], float (&piece)[kCount]) {
    sm90::wgmma_pin(piece);
#pragma unroll
    for (int i = 0; i < kCount; ++i) total[i] = add_rn(total[i], piece[i]);
}
#endif

template <class Config, bool kBf16>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    fixed_order_mm_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                          const __grid_constant__ FixedOrderMmArgs a) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
    using namespace sm90;
    constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kStages = Config::kStages;
    constexpr int kShare = Config::kShare;
    constexpr int kRegisters = kTileN / 2;
    extern __shared__ uint8_t shared[];
    const uint32_t tiles = (shared_address(shared) + 1023) & ~1023u;
    const uint32_t full = tiles + Config::kTileBytes, empty = full + 8 * kStages;
    const int warpgroup = threadIdx.x / 128;
    const int rank = Config::kCluster > 1 ? static_cast<int>(cluster_rank()) : 0;

    if (threadIdx.x == 0) {
        prefetch_map(x_map), prefetch_map(w_map);
        for (int i = 0; i < kStages; ++i) {
            barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, Config::kWarpgroups * kShare);
        }
        barrier_init_fence();
    }
    const int steps = a.k / kSplits / kBlockK;  // of one piece
    const int first_piece = Config::kWhole ? 0 : rank * Config::kPieces;
    const int first_tile = blockIdx.x / Config::kCut;
    const uint32_t inbox = tiles + Config::kInboxAt, arrived = empty + 8 * kStages;
    const int64_t row0 = int64_t{tile_at<kShare>(a, first_tile).row} * kTileM;
    const int rows = static_cast<int>(min(int64_t{kTileM}, a.m - row0));
    if (!Config::kWhole && threadIdx.x == 0) {
        barrier_init(arrived, 1);
        barrier_init_fence();
        barrier_arrive_expect(arrived, kSplits * rows * Config::kColumns * 4);
    }
    if constexpr (Config::kCluster > 1) {
        cluster_sync();
    } else {
        __syncthreads();
    }
    dependent_wait();
    dependent_start();

    const int tile_stride = gridDim.x / Config::kCut;

    if (warpgroup == Config::kWarpgroups) {
        if constexpr (Config::kWhole) give_registers<40>();
        if (threadIdx.x == 128 * Config::kWarpgroups) {
            const int bytes = (a.x_rows * kShare + kTileN) * kBlockK * 2;
            int stage = 0;
            uint32_t parity = 1;  // the first round finds every stage empty
            for (int tile = first_tile; tile < a.tiles; tile += tile_stride) {
                const TileAt at = tile_at<kShare>(a, tile);
                const int row = at.row * kTileM + rank % kShare * a.x_rows;
                const int column = at.column * kTileN;
                for (int step = 0; step < Config::kPieces * steps; ++step) {
                    const int k = (first_piece * steps + step) * kBlockK;
                    const uint32_t x_tile = tiles + stage * Config::kStageBytes;
                    barrier_wait(empty + 8 * stage, parity);
                    barrier_arrive_expect(full + 8 * stage, bytes);
                    copy_box(x_tile + kTileM * kBlockK * 2, w_map, full + 8 * stage, k, column);
                    if constexpr (kShare > 1) {
                        copy_box_to_all(x_tile + rank * (kTileM / kShare) * kBlockK * 2, x_map, full + 8 * stage, k,
                                        row, (1 << kShare) - 1);
                    } else {
                        copy_box(x_tile, x_map, full + 8 * stage, k, row);
                    }
                    if (++stage == kStages) stage = 0, parity ^= 1;
                }
            }
        }
    } else {
        if constexpr (Config::kWhole) take_registers<232>();
        const int thread = threadIdx.x % 128;
        const int fragment_row = warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4;
        const int fragment_column = thread % 4 * 2;
        Consumer<Config> consumer{tiles, full, empty, warpgroup, thread};
        if constexpr (Config::kWhole) {
            for (int tile = first_tile; tile < a.tiles; tile += tile_stride) {
                float total[kRegisters], even[kRegisters], odd[kRegisters];
#pragma unroll
                for (int i = 0; i < kRegisters; ++i) total[i] = 0.0f;
                // A piece is added while the first products of the next one run.
                consumer.template step<true>(even);
                for (int step = 1; step < steps; ++step) consumer.template step<false>(even), consumer.release_before();
#pragma unroll
                for (int p = 1; p < kSplits - 1; p += 2) {
                    consumer.template step<true>(odd);
                    add_piece(total, even), consumer.release_before();
                    for (int step = 1; step < steps; ++step)
                        consumer.template step<false>(odd), consumer.release_before();
                    consumer.template step<true>(even);
                    add_piece(total, odd), consumer.release_before();
                    for (int step = 1; step < steps; ++step)
                        consumer.template step<false>(even), consumer.release_before();
                }
                consumer.template step<true>(odd);
                add_piece(total, even), consumer.release_before();
                for (int step = 1; step < steps; ++step) consumer.template step<false>(odd), consumer.release_before();
                consumer.finish();
                add_piece(total, odd);
                const TileAt at = tile_at<kShare>(a, tile);
                const int64_t row = int64_t{at.row} * kTileM + fragment_row;
                const int column = at.column * kTileN + fragment_column;
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    if (row + 8 * h < a.m) {
#pragma unroll
                        for (int i = 0; i < kTileN / 8; ++i) {
                            store_pair<kBf16>(a, row + 8 * h, column + 8 * i, total[4 * i + 2 * h],
                                              total[4 * i + 2 * h + 1]);
                        }
                    }
                }
            }
        } else {
            float piece[kRegisters];
#pragma unroll 1
            for (int p = 0; p < Config::kPieces; ++p) {
                consumer.template step<true>(piece);
                for (int step = 1; step < steps; ++step)
                    consumer.template step<false>(piece), consumer.release_before();
                consumer.finish();
                wgmma_pin(piece);
#pragma unroll
                for (int i = 0; i < kTileN / 8; ++i) {
                    const int column = fragment_column + 8 * i;
                    const uint32_t owner = column / Config::kColumns;
                    const uint32_t at = cluster_address(inbox, owner) +
                                        (rank * Config::kPieces + p) * Config::kInboxPieceBytes +
                                        4 * (fragment_row * Config::kColumns + column % Config::kColumns);
                    const uint32_t signal = cluster_address(arrived, owner);
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        if (fragment_row + 8 * h < rows) {
                            cluster_send(at + 4 * 8 * h * Config::kColumns, piece[4 * i + 2 * h],
                                         piece[4 * i + 2 * h + 1], signal);
                        }
                    }
                }
            }
        }
    }

    if constexpr (kShare > 1) {
        __syncwarp();
        cluster_sync();  // a block's barriers live while others arrive there
    }
    if constexpr (!Config::kWhole) {
        barrier_wait_cluster(arrived, 0);
        constexpr int kColumns = Config::kColumns, kPairs = kColumns / 2;
        const int column0 = tile_at<kShare>(a, first_tile).column * kTileN + rank * kColumns;
        for (int item = threadIdx.x; item < rows * kPairs; item += Config::kThreads) {
            float2 part[kSplits];
#pragma unroll
            for (int i = 0; i < kSplits; ++i) part[i] = shared_pair(inbox + i * Config::kInboxPieceBytes + 8 * item);
            float2 sum = {};
#pragma unroll
            for (int i = 0; i < kSplits; ++i) sum.x = add_rn(sum.x, part[i].x), sum.y = add_rn(sum.y, part[i].y);
            store_pair<kBf16>(a, row0 + item / kPairs, column0 + item % kPairs * 2, sum.x, sum.y);
        }
    }
#endif
}

// A weight with more elements than this does not stay in L2 beside x. It should come from memory once, so x is walked
// in bands of rows that do stay there.
constexpr int64_t kResident = int64_t{1} << 23;
constexpr int kBandRows = 1024;

struct FixedOrderMmProblem {
    const void* x;
    const void* w;
    int64_t x_stride, w_stride;
    FixedOrderMmArgs args;
};

template <class Config, bool kBf16>
cudaError_t launch_fixed_order_mm(const FixedOrderMmProblem& problem, int processors, cudaStream_t stream) {
    const auto kernel = fixed_order_mm_kernel<Config, kBf16>;
    FixedOrderMmArgs args = problem.args;
    args.tiles_m = static_cast<int>((args.m + Config::kTileM - 1) / Config::kTileM);
    args.tiles_n = args.n / Config::kTileN;
    args.tiles = args.tiles_m * args.tiles_n;
    args.band = int64_t{args.n} * args.k > kResident ? kBandRows / Config::kTileM : 1;
    // Rows that no copy brings hold what shared memory held; their sums are not stored.
    args.x_rows = Config::kShare > 1 ? Config::kTileM / Config::kShare
                                     : static_cast<int>(std::min<int64_t>(Config::kTileM, (args.m + 7) / 8 * 8));
    CUtensorMap x_map, w_map;
    constexpr auto kType = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    cudaError_t error = encode_rows(&x_map, kType, 2, problem.x, args.m, args.k, problem.x_stride, args.x_rows);
    if (error != cudaSuccess) return error;
    error = encode_rows(&w_map, kType, 2, problem.w, args.n, args.k, problem.w_stride, Config::kTileN);
    if (error != cudaSuccess) return error;
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSharedBytes);
    if (error != cudaSuccess) return error;
    // A whole block takes tile after tile, so that copies of the next one run under the stores of this one.
    const int blocks =
        Config::kWhole ? std::min(args.tiles, processors / Config::kShare * Config::kShare) : args.tiles * Config::kCut;
    return launch_dependent(kernel, dim3(static_cast<unsigned>(blocks)), Config::kThreads, Config::kSharedBytes,
                            Config::kCluster, stream, x_map, w_map, args);
}

// Which tiles a call gets: any choice gives the same bits, so this may weigh rows against idle multiprocessors. The
// limits are where the curves measured on an H200 cross; 132 blocks fill it.
template <bool kBf16>
cudaError_t fixed_order_mm(const FixedOrderMmProblem& problem, int processors, cudaStream_t stream) {
    const int64_t m = problem.args.m, n = problem.args.n;
    const auto tiles = [&](int64_t tile_m, int64_t tile_n) { return (m + tile_m - 1) / tile_m * (n / tile_n); };
    const auto run = [&]<class Config>(Config) {
        return launch_fixed_order_mm<Config, kBf16>(problem, processors, stream);
    };
    if (tiles(64, 64) <= 8) return run(FixedOrderMmConfig<1, 64, 8>{});
    // An odd number of column tiles: none of 128 columns fits, and not every one has a neighbour to share x with.
    const bool narrow = n % 128 != 0;
    if (!narrow && tiles(64, 128) <= 12) return run(FixedOrderMmConfig<1, 128, 8>{});
    // The shortest K is read as fast by one block as its sum is put together from several.
    const bool long_k = problem.args.k > 2048;
    if (!narrow && (long_k || m <= 32) && tiles(64, 128) <= 16) return run(FixedOrderMmConfig<1, 128, 4>{});
    if (long_k && tiles(64, 64) <= 64) return run(FixedOrderMmConfig<1, 64, 2>{});
    if (tiles(64, 64) <= 132) {
        return !narrow && tiles(64, 64) > 96 && m > n ? run(FixedOrderMmConfig<1, 64, 1, 2>{})
                                                      : run(FixedOrderMmConfig<1, 64, 1>{});
    }
    // A vocabulary. Few rows wait for its weights alone.
    if (m <= 64) return narrow ? run(FixedOrderMmConfig<1, 64, 1>{}) : run(FixedOrderMmConfig<1, 128, 1>{});
    if (narrow) return run(FixedOrderMmConfig<2, 64, 1>{});
    if (tiles(128, 64) <= 132) {
        if (m > 4 * n && n % 256 == 0) return run(FixedOrderMmConfig<1, 128, 1, 2>{});
        return m >= n ? run(FixedOrderMmConfig<2, 64, 1, 2>{}) : run(FixedOrderMmConfig<2, 64, 1>{});
    }
    return n % 256 == 0 ? run(FixedOrderMmConfig<2, 128, 1, 2>{}) : run(FixedOrderMmConfig<2, 128, 1>{});
}

}  // namespace bi
