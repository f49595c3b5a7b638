// Kernels that start while the one before them ends (programmatic dependent launch): sm_90 and later.
//
// The rules that keep it correct whatever runs before and after: no kernel reads or writes global memory before
// dependent_wait(), except for memory that no kernel still running can write; every thread calls it; and a kernel that
// lets its successor start early does so after its own wait, so that whatever came before is complete for that one too.
// A successor launched without the attribute starts when the kernel has ended, whatever the kernel calls.
#pragma once

#include <cuda_runtime.h>

#include <utility>

namespace bi {

// Returns once everything that the stream held before this kernel is complete and visible, provided that each of those
// kernels that was launched with the attribute has waited as well.
__device__ __forceinline__ void dependent_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The next kernel may start once every block has called this or ended. Its dependent_wait() still waits for this one.
__device__ __forceinline__ void dependent_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Asks for lines to be brought to the L2 cache; reads nothing, so it is allowed before dependent_wait().
__device__ __forceinline__ void prefetch_to_l2(const void* p, unsigned bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
}

template <class... Parameters, class... Arguments>
cudaError_t launch_dependent(void (*kernel)(Parameters...), dim3 grid, unsigned threads, size_t shared_bytes,
                             unsigned cluster, cudaStream_t stream, Arguments&&... arguments) {
    cudaLaunchAttribute attribute[2];
    attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute[0].val.programmaticStreamSerializationAllowed = 1;
    attribute[1].id = cudaLaunchAttributeClusterDimension;
    attribute[1].val.clusterDim = {cluster, 1, 1};
    cudaLaunchConfig_t launch = {};
    launch.gridDim = grid;
    launch.blockDim = dim3(threads);
    launch.dynamicSmemBytes = shared_bytes;
    launch.stream = stream;
    launch.attrs = attribute;
    launch.numAttrs = cluster > 1 ? 2 : 1;
    return cudaLaunchKernelEx(&launch, kernel, std::forward<Arguments>(arguments)...);
}

}  // namespace bi
