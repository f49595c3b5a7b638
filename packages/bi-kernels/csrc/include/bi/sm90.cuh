// Hopper's asynchronous machinery, as far as kernels here use it: mbarriers, tensor copies, warpgroup matrix products,
// clusters. Matrix products and the exchange of registers are sm_90a only, the rest is later architectures' too.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace bi::sm90 {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Where another block of the cluster has what this block has at `address`.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, uint32_t rank) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// One thread of the warp, all of whose threads call this: the compiler then knows that what follows runs once.
__device__ __forceinline__ bool elected() {
    uint32_t is;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(is));
    return is != 0;
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine and to the cluster.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Arrives at another block's barrier, at this block's own shared address.
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_address(barrier, rank)) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
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

// The same where blocks of the cluster write what the barrier counts.
__device__ __forceinline__ void barrier_wait_cluster(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
        "@!p bra again;\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// A box of a two-dimensional tensor to shared memory; elements outside the tensor arrive as zero.
__device__ __forceinline__ void copy_box(uint32_t target, const CUtensorMap& map, uint32_t barrier, int column,
                                         int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
        "[%2];" ::"r"(target),
        "l"(&map), "r"(barrier), "r"(column), "r"(row)
        : "memory");
}
// The same box to the same shared address, with the same barrier's bytes, in every block of the cluster in `blocks`.
__device__ __forceinline__ void copy_box_to_all(uint32_t target, const CUtensorMap& map, uint32_t barrier, int column,
                                                int row, uint16_t blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(target),
        "l"(&map), "r"(barrier), "r"(column), "r"(row), "h"(blocks)
        : "memory");
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Four bytes of global memory to shared memory, in the background; waited for by the thread that asked.
__device__ __forceinline__ void copy_word(uint32_t target, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
}
__device__ __forceinline__ void copy_words_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `kPending` groups are under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving uses of an accumulator across the asynchronous product that owns it.
template <int kCount>
__device__ __forceinline__ void wgmma_pin(float (&d)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Descriptor of a K-major tile with rows of 128 bytes in the 128-byte swizzle, as copy_box leaves it; the tile starts
// at a multiple of 1024 bytes. Adding 2 moves it by sixteen bfloat16 elements along K.
__device__ __forceinline__ uint64_t wgmma_tile(uint32_t address) {
    return (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 16) | ((address & 0x3ffff) >> 4);
}

// d[64 x kN] = a[64 x 16] b[kN x 16]^T of bfloat16 by one warpgroup, or with kAdd d += the same. Thread t of the
// warpgroup holds, at d[4 i + 2 h + j], row 16 (t / 32) + (t % 32) / 4 + 8 h and column 8 i + 2 (t % 4) + j. WgmmaFp8
// is the same of e4m3: a[64 x 32], b[kN x 32]; there adding 2 to a tile's descriptor moves it by thirty-two elements
// along K.
template <int kN>
struct Wgmma;
template <int kN>
struct WgmmaFp8;

#define BI_WGMMA_RUN(kN, shape, transposed, a_at, b_at, add, result)                                         \
    asm volatile(                                                                                            \
        "{\n"                                                                                                \
        ".reg .pred p;\n"                                                                                    \
        "setp.eq.b32 p, " add                                                                                \
        ", 1;\n"                                                                                             \
        "wgmma.mma_async.sync.aligned." shape " {" BI_NAMES_##kN "}, " a_at ", " b_at ", p, 1, 1" transposed \
                                                                 ";\n"                                       \
                                                                 "}\n"                                       \
        : BI_SUMS_##kN(result, 0)                                                                            \
        : "l"(a), "l"(b))
// The first step names its sums as results alone, or registers would be kept for what they held.
#define BI_WGMMA(Name, kN, ...)                                                  \
    template <>                                                                  \
    struct Name<kN> {                                                            \
        template <bool kAdd>                                                     \
        __device__ static void run(float (&d)[kN / 2], uint64_t a, uint64_t b) { \
            if constexpr (kAdd) {                                                \
                BI_WGMMA_RUN(kN, __VA_ARGS__, "1", "+f");                        \
            } else {                                                             \
                BI_WGMMA_RUN(kN, __VA_ARGS__, "0", "=f");                        \
            }                                                                    \
        }                                                                        \
    };
#define BI_NAMES_8 "%0, %1, %2, %3"
#define BI_NAMES_16 BI_NAMES_8 ", %4, %5, %6, %7"
#define BI_NAMES_32 BI_NAMES_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define BI_NAMES_64 BI_NAMES_32 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define BI_NAMES_128                                                                                              \
    BI_NAMES_64                                                                                                   \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
    "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define BI_SUMS_8(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define BI_SUMS_16(c, i) BI_SUMS_8(c, i), BI_SUMS_8(c, i + 4)
#define BI_SUMS_32(c, i) BI_SUMS_16(c, i), BI_SUMS_16(c, i + 8)
#define BI_SUMS_64(c, i) BI_SUMS_32(c, i), BI_SUMS_32(c, i + 16)
#define BI_SUMS_128(c, i) BI_SUMS_64(c, i), BI_SUMS_64(c, i + 32)

BI_WGMMA(Wgmma, 32, "m64n32k16.f32.bf16.bf16", ", 0, 0", "%16", "%17")
BI_WGMMA(Wgmma, 64, "m64n64k16.f32.bf16.bf16", ", 0, 0", "%32", "%33")
BI_WGMMA(Wgmma, 128, "m64n128k16.f32.bf16.bf16", ", 0, 0", "%64", "%65")
BI_WGMMA(WgmmaFp8, 8, "m64n8k32.f32.e4m3.e4m3", "", "%4", "%5")
BI_WGMMA(WgmmaFp8, 16, "m64n16k32.f32.e4m3.e4m3", "", "%8", "%9")
BI_WGMMA(WgmmaFp8, 32, "m64n32k32.f32.e4m3.e4m3", "", "%16", "%17")
BI_WGMMA(WgmmaFp8, 64, "m64n64k32.f32.e4m3.e4m3", "", "%32", "%33")

#undef BI_WGMMA
#undef BI_WGMMA_RUN
#undef BI_NAMES_8
#undef BI_SUMS_8
#undef BI_NAMES_16
#undef BI_SUMS_16
#undef BI_NAMES_32
#undef BI_SUMS_32
#undef BI_NAMES_64
#undef BI_SUMS_64
#undef BI_NAMES_128
#undef BI_SUMS_128

// The transpose of an 8 x 8 matrix of halves that a warp holds by rows, lane l: row l / 4, columns 2 (l % 4) and one
// more.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t a) {
    uint32_t d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
// Orders shared memory among all threads of the cluster.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Four floats to a block of the cluster, whose barrier counts their bytes. It must not end before they have arrived.
__device__ __forceinline__ void cluster_send(uint32_t target, float v0, float v1, float v2, float v3,
                                             uint32_t barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(target),
        "f"(v0), "f"(v1), "f"(v2), "f"(v3), "r"(barrier)
        : "memory");
}
// Four words of this block's shared memory, as a float4 or a uint4.
template <class Quad>
__device__ __forceinline__ Quad shared_quad(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return __builtin_bit_cast(Quad, v);
}

}  // namespace bi::sm90
