// Checks and registration of bi_reload::padded_copy_. The schema is declared in Python.
#include "padded_copy.cuh"

#include "bi/torch_stable.h"

namespace {

using bi::Tensor;

// First byte and one past the last, gaps between strided elements included.
std::pair<const char*, const char*> reach(const Tensor& t) {
    int64_t last = 0;
    for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
    const char* begin = static_cast<const char*>(t.data_ptr());
    return {begin, begin + (last + 1) * static_cast<int64_t>(t.element_size())};
}

void padded_copy(const Tensor& dst, const Tensor& src, int64_t pad_bits) {
    const int32_t device = dst.get_device_index();
    const int64_t dims = dst.dim();
    STD_TORCH_CHECK(dims >= 1 && dims <= bi::kPaddedCopyDims, "dst: expected 1 to ", bi::kPaddedCopyDims,
                    " dimensions, got ", dims);
    bi::check_tensor(src, "src", dst.scalar_type(), "that of dst", dims, device);
    STD_TORCH_CHECK(src.size(0) <= dst.size(0), "src: expected at most ", dst.size(0), " rows, got ", src.size(0));
    bi::PaddedCopyArgs args{
        .dst = dst.mutable_data_ptr(),
        .src = src.const_data_ptr(),
        .elements = dst.numel(),
        .src_rows = src.size(0),
        .pad_bits = pad_bits,
        .dims = static_cast<int>(dims),
        .sizes = {},
        .dst_strides = {},
        .src_strides = {},
    };
    for (int64_t d = 0; d < dims; ++d) {
        if (d > 0) bi::check_size(src, "src", d, dst.size(d));
        args.sizes[d] = dst.size(d);
        args.dst_strides[d] = dst.stride(d);
        args.src_strides[d] = src.stride(d);
    }
    if (dst.numel() == 0) return;
    if (src.numel() != 0) {
        const auto [begin, end] = reach(dst);
        const auto [src_begin, src_end] = reach(src);
        STD_TORCH_CHECK(end <= src_begin || src_end <= begin,
                        "dst: expected memory apart from src, got overlapping addresses. Pass memory of its own.");
    }
    int processors = 0;
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    const torch::stable::accelerator::DeviceGuard guard(device);
    const cudaStream_t stream = bi::current_stream(device);
    switch (dst.element_size()) {
        case 1:
            STD_CUDA_CHECK(bi::launch_padded_copy<uint8_t>(args, processors, stream));
            break;
        case 2:
            STD_CUDA_CHECK(bi::launch_padded_copy<uint16_t>(args, processors, stream));
            break;
        case 4:
            STD_CUDA_CHECK(bi::launch_padded_copy<uint32_t>(args, processors, stream));
            break;
        case 8:
            STD_CUDA_CHECK(bi::launch_padded_copy<uint64_t>(args, processors, stream));
            break;
        default:
            STD_TORCH_CHECK(false, "dst: expected elements of 1, 2, 4 or 8 bytes, got ", dst.element_size());
    }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bi_reload, CUDA, m) { m.impl("padded_copy_", TORCH_BOX(&padded_copy)); }
