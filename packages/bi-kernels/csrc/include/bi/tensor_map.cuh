// Tensor maps: how the copy engine finds the rows of a matrix. The driver encodes them, and no library here is linked
// to it.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace bi {

constexpr int kSwizzleBytes = 128;  // of one row of a box

// The driver's encoder; null where it has none.
inline auto encode_tiled() {
    using Encode = decltype(&cuTensorMapEncodeTiled);
    static const Encode encode = [] {
        void* found = nullptr;
        cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
        const cudaError_t error =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
        return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(found)
                                                                             : nullptr;
    }();
    return encode;
}

// Rows of `k` elements, `stride` elements apart, in boxes of `box_rows` rows by 128 bytes, swizzled as wgmma reads
// them.
inline cudaError_t encode_rows(CUtensorMap* map, CUtensorMapDataType type, int element_bytes, const void* data,
                               int64_t rows, int64_t k, int64_t stride, int box_rows) {
    const auto encode = encode_tiled();
    if (encode == nullptr) return cudaErrorCallRequiresNewerDriver;
    const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(k), static_cast<cuuint64_t>(rows)};
    const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride) * element_bytes};
    const cuuint32_t box[2] = {static_cast<cuuint32_t>(kSwizzleBytes / element_bytes),
                               static_cast<cuuint32_t>(box_rows)};
    const cuuint32_t steps[2] = {1, 1};
    const CUresult result =
        encode(map, type, 2, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace bi
