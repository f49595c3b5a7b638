// x[M, K] times weight[N, K] transposed, bfloat16 to float32, with an order of summation that K alone decides.
//
// K is cut into kSplits equal pieces. Within a piece every output element is one chain of wgmma steps of sixteen
// products, k ascending; the pieces are added in float32, ascending, starting from +0. That is the whole arithmetic,
// and it is the same in every instantiation: tile sizes, and whether one block walks all pieces or the blocks of a
// cluster take some each, decide where an element is computed, never how. Rows of a tile do not meet in wgmma, and rows
// past M are zeros or leftovers that nothing stores.
//
// Only few rows leave most multiprocessors idle without a split; with many rows the split costs an exchange through
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

// The pieces of a tile go to kCut blocks of a cluster. With two of them the first adds up its pieces and sends the sum,
// to which the second adds its own; with more, each adds up some of the columns, for which all send it their pieces.
// Or, where one block has them all, the kShare blocks of a cluster take neighbouring column tiles and share the copies
// of x.
template <int kWarpgroups_, int kTileN_, int kCut_, int kShare_ = 1>
struct FixedOrderMmConfig {
    static constexpr int kWarpgroups = kWarpgroups_;  // 64 rows each
    static constexpr int kTileM = 64 * kWarpgroups_;
    static constexpr int kTileN = kTileN_;
    static constexpr int kCut = kCut_, kShare = kShare_;
    static constexpr bool kWhole = kCut == 1, kPair = kCut == 2;
    static_assert(kWhole || (kWarpgroups == 1 && kShare == 1));
    static constexpr int kPieces = kSplits / kCut;
    static constexpr int kCluster = kCut * kShare;
    static constexpr int kConsumers = 128 * kWarpgroups;
    // And those that feed them: a warpgroup where it gives up registers, else a warp.
    static constexpr int kThreads = kConsumers + (kWhole ? 128 : 32);
    static constexpr int kStageBytes = (kTileM + kTileN) * kBlockK * 2;
    // What is sent is float4 [column / 8][thread]: each thread's registers, in its order.
    static constexpr int kFragmentBytes = 16 * kConsumers;
    static constexpr int kOwners = kPair ? 1 : std::min(kCut, kTileN / 8);
    static constexpr int kSlice = kTileN / 8 / kOwners;  // fragments of one owner
    static constexpr int kSliceBytes = kSlice * kFragmentBytes;
    static constexpr int kArriving = kPair ? 1 : kSplits;  // slices
    // Two blocks with one piece fit on a multiprocessor: a GPC has room for few clusters of eight with one block each.
    static constexpr int kBlocks = kCut == kSplits ? 2 : 1;
    // A multiprocessor has 228 KiB, of which each block takes one besides its own, and a block at most 227.
    static constexpr int kBudget = kBlocks == 2 ? 115712 : 232448;
    static constexpr int kInboxBytes = kWhole ? 0 : kArriving * kSliceBytes;
    static constexpr int kStages = std::min(8, (kBudget - 16 * 8 - 8 - kInboxBytes) / kStageBytes);
    static constexpr int kInboxAt = kStages * kStageBytes;
    static constexpr int kBarriersAt = kInboxAt + kInboxBytes;
    static constexpr int kSharedBytes = kBarriersAt + 16 * kStages + 8;
    static_assert(kStages >= 2);
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
// The ring of stages as the thread sees it that fills it.
template <class Config>
struct Producer {
    uint32_t tiles, full, empty;
    int rank, bytes;
    int stage = 0;
    uint32_t parity = 1;  // the first round finds every stage empty

    __device__ __forceinline__ void copy(const CUtensorMap& x_map, const CUtensorMap& w_map, int k, int row,
                                         int column) {
        using namespace sm90;
        constexpr int kShare = Config::kShare;
        const uint32_t x_tile = tiles + stage * Config::kStageBytes;
        barrier_wait(empty + 8 * stage, parity);
        barrier_arrive_expect(full + 8 * stage, bytes);
        copy_box(x_tile + Config::kTileM * kBlockK * 2, w_map, full + 8 * stage, k, column);
        if constexpr (kShare > 1) {
            copy_box_to_all(x_tile + rank * (Config::kTileM / kShare) * kBlockK * 2, x_map, full + 8 * stage, k, row,
                            (1 << kShare) - 1);
        } else {
            copy_box(x_tile, x_map, full + 8 * stage, k, row);
        }
        if (++stage == Config::kStages) stage = 0, parity ^= 1;
    }
};

template <int kCount>
__device__ __forceinline__ void add_piece(float (&total)[kCount], float (&piece)[kCount]) {
    sm90::wgmma_pin(piece);
#pragma unroll
    for (int i = 0; i < kCount; ++i) total[i] = add_rn(total[i], piece[i]);
}

// What a consuming warpgroup knows of the ring.
template <class Config>
struct Consumer {
    static constexpr int kRegisters = Config::kTileN / 2;
    uint32_t tiles, full, empty;
    int warpgroup, thread;
    int steps;     // of one piece
    int releases;  // that the producer waits for
    int stage = 0;
    uint32_t parity = 0;

    // One step of a chain: sixty-four products, the first or more of them. On return the step before it is complete.
    // (`sum` must not be touched in between, or ptxas makes every product wait for the one before.)
    template <bool kFirst>
    __device__ __forceinline__ void step(float (&sum)[kRegisters]) {
        using namespace sm90;
        barrier_wait(full + 8 * stage, parity);
        const uint32_t x_tile = tiles + stage * Config::kStageBytes;
        const uint64_t x_at = wgmma_tile(x_tile + warpgroup * 64 * kBlockK * 2);
        const uint64_t w_at = wgmma_tile(x_tile + Config::kTileM * kBlockK * 2);
        wgmma_fence();
        Wgmma<Config::kTileN>::template run<!kFirst>(sum, x_at, w_at);
#pragma unroll
        for (int i = 1; i < kBlockK / 16; ++i)
            Wgmma<Config::kTileN>::template run<true>(sum, x_at + 2 * i, w_at + 2 * i);
        wgmma_commit();
        wgmma_wait<1>();
        if (++stage == Config::kStages) stage = 0, parity ^= 1;
    }

    // Hands back the stage of the last step but `back`, unless nothing more is copied there: its blocks may have ended.
    __device__ __forceinline__ void release(int back) {
        if (--releases < 0) return;
        const int which = stage >= back ? stage - back : stage - back + Config::kStages;
        if constexpr (Config::kShare > 1) {
            if (thread < Config::kShare) sm90::barrier_arrive_at(empty + 8 * which, thread);
        } else {
            if (thread == 0) sm90::barrier_arrive(empty + 8 * which);
        }
    }
    // The steps of a piece but the first.
    __device__ __forceinline__ void rest(float (&sum)[kRegisters]) {
#pragma unroll 1
        for (int i = 1; i < steps; ++i) step<false>(sum), release(2);
    }
    // All steps are complete.
    __device__ __forceinline__ void finish() {
        sm90::wgmma_wait<0>();
        release(1);
    }

    // The sum of kCount pieces. A piece is added while the first products of the next one run.
    template <int kCount>
    __device__ __forceinline__ void add_up(float (&total)[kRegisters]) {
        float even[kRegisters], odd[kRegisters];
#pragma unroll
        for (int i = 0; i < kRegisters; ++i) total[i] = 0.0f;
        step<true>(even), rest(even);
#pragma unroll
        for (int p = 1; p < kCount - 1; p += 2) {
            step<true>(odd), add_piece(total, even), release(2), rest(odd);
            step<true>(even), add_piece(total, odd), release(2), rest(even);
        }
        step<true>(odd), add_piece(total, even), release(2), rest(odd);
        finish();
        add_piece(total, odd);
    }

    // kCount pieces, one by one.
    template <int kCount>
    __device__ __forceinline__ void keep(float (&piece)[kCount][kRegisters]) {
#pragma unroll
        for (int p = 0; p < kCount; ++p) {
            step<true>(piece[p]);
            if (p > 0) release(2);
            rest(piece[p]);
        }
        finish();
#pragma unroll
        for (int p = 0; p < kCount; ++p) sm90::wgmma_pin(piece[p]);
    }
};
#endif

template <class Config, bool kBf16>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    fixed_order_mm_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                          const __grid_constant__ FixedOrderMmArgs a) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
    using namespace sm90;
    constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kStages = Config::kStages;
    constexpr int kShare = Config::kShare, kPieces = Config::kPieces;
    constexpr int kRegisters = kTileN / 2;
    constexpr int kFragmentBytes = Config::kFragmentBytes, kSliceBytes = Config::kSliceBytes;
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t tiles = shared_address(shared);
    const uint32_t full = tiles + Config::kBarriersAt, empty = full + 8 * kStages;
    const uint32_t inbox = tiles + Config::kInboxAt, arrived = empty + 8 * kStages;
    const int rank = Config::kCluster > 1 ? static_cast<int>(cluster_rank()) : 0;
    const int steps = a.k / kSplits / kBlockK;  // of one piece
    const int first_piece = Config::kWhole ? 0 : rank * kPieces;
    const int first_tile = blockIdx.x / Config::kCut;
    const int tile_stride = gridDim.x / Config::kCut;
    const auto each_tile = [&](const auto& body) {
        for (int tile = first_tile; tile < a.tiles; tile += tile_stride) {
            body(tile_at<kShare>(a, tile));
            if constexpr (!Config::kWhole) break;
        }
    };
    // Warps of a block whose rows are stored. The others send nothing.
    const int sending = static_cast<int>(
        min(int64_t{kTileM / 16}, (a.m - int64_t{tile_at<kShare>(a, first_tile).row} * kTileM + 15) / 16));

    if (threadIdx.x == 0) {
        prefetch_map(x_map), prefetch_map(w_map);
        for (int i = 0; i < kStages; ++i) {
            barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, Config::kWarpgroups * kShare);
        }
        if constexpr (!Config::kWhole) barrier_init(arrived, 1);
        barrier_init_fence();
        if constexpr (!Config::kWhole) {
            barrier_arrive_expect(arrived, Config::kArriving * Config::kSlice * sending * 32 * 16);
        }
    }
    if constexpr (Config::kCluster > 1) {
        cluster_sync();  // before any of them sends to another, or arrives there
    } else {
        __syncthreads();
    }
    dependent_wait();

    if (threadIdx.x >= Config::kConsumers) {
        if constexpr (Config::kWhole) give_registers<40>();
        if (threadIdx.x < Config::kConsumers + 32 && elected()) {
            Producer<Config> producer{tiles, full, empty, rank, (a.x_rows * kShare + kTileN) * kBlockK * 2};
            each_tile([&](const TileAt& at) {
                const int row = at.row * kTileM + (kShare > 1 ? rank * a.x_rows : 0);
                for (int step = 0; step < kPieces * steps; ++step) {
                    producer.copy(x_map, w_map, (first_piece * steps + step) * kBlockK, row, at.column * kTileN);
                }
            });
            dependent_start();  // nothing is read any more
        }
        return;
    }
    if constexpr (Config::kWhole) take_registers<232>();
    const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128, warp = threadIdx.x / 32;
    const int fragment_row = warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4;
    const int fragment_column = thread % 4 * 2;
    const int of_block = Config::kWhole ? (a.tiles - first_tile + tile_stride - 1) / tile_stride : 1;  // tiles
    Consumer<Config> consumer{tiles, full, empty, warpgroup, thread, steps, of_block * kPieces * steps - kStages};
    const auto store = [&](const TileAt& at, int i, float v0, float v1, float v2, float v3) {
        const int64_t row = int64_t{at.row} * kTileM + fragment_row;
        const int column = at.column * kTileN + fragment_column + 8 * i;
        if (row < a.m) store_pair<kBf16>(a, row, column, v0, v1);
        if (row + 8 < a.m) store_pair<kBf16>(a, row + 8, column, v2, v3);
    };
    const auto store_all = [&](const TileAt& at, const float (&v)[kRegisters]) {
#pragma unroll
        for (int i = 0; i < kTileN / 8; ++i) store(at, i, v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
    };
    // This thread's values of `slice` to slice `place` of the inbox of block `owner`.
    const auto send = [&](const float (&v)[kRegisters], int slice, int owner, int place) {
        const uint32_t at = cluster_address(inbox, owner) + place * kSliceBytes + 16 * threadIdx.x;
        const uint32_t signal = cluster_address(arrived, owner);
#pragma unroll
        for (int i = 0; i < Config::kSlice; ++i) {
            const float* some = v + 4 * (slice * Config::kSlice + i);
            cluster_send(at + i * kFragmentBytes, some[0], some[1], some[2], some[3], signal);
        }
    };
    each_tile([&](const TileAt& at) {
        if constexpr (Config::kWhole) {
            float total[kRegisters];
            consumer.template add_up<kPieces>(total);
            store_all(at, total);
        } else if constexpr (Config::kPair) {
            if (rank == 0) {
                float total[kRegisters];
                consumer.template add_up<kPieces>(total);
                if (warp < sending) send(total, 0, 1, 0);
            } else {
                float piece[kPieces][kRegisters], total[kRegisters];
                consumer.keep(piece);
                if (warp >= sending) return;
                barrier_wait_cluster(arrived, 0);
#pragma unroll
                for (int i = 0; i < kTileN / 8; ++i) {
                    const float4 v = shared_quad<float4>(inbox + i * kFragmentBytes + 16 * threadIdx.x);
                    total[4 * i] = v.x, total[4 * i + 1] = v.y, total[4 * i + 2] = v.z, total[4 * i + 3] = v.w;
                }
#pragma unroll
                for (int p = 0; p < kPieces; ++p) {
#pragma unroll
                    for (int i = 0; i < kRegisters; ++i) total[i] = add_rn(total[i], piece[p][i]);
                }
                store_all(at, total);
            }
        } else {
            float piece[1][kRegisters];
#pragma unroll 1
            for (int p = 0; p < kPieces; ++p) {
                consumer.keep(piece);
                if (warp < sending) {
#pragma unroll
                    for (int owner = 0; owner < Config::kOwners; ++owner) {
                        send(piece[0], owner, owner, first_piece + p);
                    }
                }
            }
            if (rank >= Config::kOwners || warp >= sending) return;
            barrier_wait_cluster(arrived, 0);
#pragma unroll
            for (int i = 0; i < Config::kSlice; ++i) {
                float4 part[kSplits];
#pragma unroll
                for (int p = 0; p < kSplits; ++p) {
                    part[p] = shared_quad<float4>(inbox + p * kSliceBytes + i * kFragmentBytes + 16 * threadIdx.x);
                }
                float4 sum = {};
#pragma unroll
                for (int p = 0; p < kSplits; ++p) {
                    sum.x = add_rn(sum.x, part[p].x), sum.y = add_rn(sum.y, part[p].y);
                    sum.z = add_rn(sum.z, part[p].z), sum.w = add_rn(sum.w, part[p].w);
                }
                store(at, rank * Config::kSlice + i, sum.x, sum.y, sum.z, sum.w);
            }
        }
    });
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
// limits are where the curves measured on an H200 cross. Its 132 multiprocessors hold fifteen clusters of eight blocks
// without a second block on one, and 66 of two.
template <bool kBf16>
cudaError_t fixed_order_mm(const FixedOrderMmProblem& problem, int processors, cudaStream_t stream) {
    const int64_t m = problem.args.m, n = problem.args.n;
    const auto tiles = [&](int64_t tile_m, int64_t tile_n) { return (m + tile_m - 1) / tile_m * (n / tile_n); };
    const auto run = [&]<class Config>(Config) {
        return launch_fixed_order_mm<Config, kBf16>(problem, processors, stream);
    };
    // No tile of 128 columns fits.
    const bool narrow = n % 128 != 0;
    if (tiles(64, 32) <= 8) return run(FixedOrderMmConfig<1, 32, 8>{});
    if (tiles(64, 64) <= (narrow ? 16 : 8)) return run(FixedOrderMmConfig<1, 64, 8>{});
    if (!narrow && tiles(64, 128) <= 12) return run(FixedOrderMmConfig<1, 128, 8>{});
    if (!narrow && m <= 32 && tiles(64, 128) <= 30) return run(FixedOrderMmConfig<1, 128, 4>{});
    if (tiles(64, 64) <= 66) return run(FixedOrderMmConfig<1, 64, 2>{});
    if (tiles(64, 64) <= 132) return run(FixedOrderMmConfig<1, 64, 1>{});
    // A vocabulary. Few rows wait for its weights alone.
    if (m <= 64) return narrow ? run(FixedOrderMmConfig<1, 64, 1>{}) : run(FixedOrderMmConfig<1, 128, 1>{});
    // An odd number of column tiles leaves one without a neighbour to share x with.
    const bool shares = n % 256 == 0;
    if (tiles(128, 64) <= 132 && shares && m >= 2 * n) return run(FixedOrderMmConfig<1, 128, 1, 2>{});
    if (tiles(128, 64) <= 132 || narrow) return run(FixedOrderMmConfig<2, 64, 1>{});
    return tiles(128, 128) <= 132 || !shares ? run(FixedOrderMmConfig<2, 128, 1>{})
                                             : run(FixedOrderMmConfig<2, 128, 1, 2>{});
}

}  // namespace bi
