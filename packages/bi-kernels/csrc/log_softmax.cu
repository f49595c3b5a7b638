// Checks and registration of bi_kernels::log_softmax. The schema is declared in Python.
#include "log_softmax.cuh"

#include "bi/torch_stable.h"

namespace {

using bi::Tensor;

void log_softmax(const Tensor& logits, const Tensor& scratch, const Tensor& out) {
    using Type = torch::headeronly::ScalarType;
    const int32_t device = logits.get_device_index();
    bi::check_tensor(logits, "logits", Type::Float, "float32", 2, device);
    bi::check_tensor(scratch, "scratch", Type::Float, "float32", 2, device);
    bi::check_tensor(out, "out", Type::Float, "float32", 2, device);
    const int64_t rows = logits.size(0), columns = logits.size(1);
    STD_TORCH_CHECK(rows < int64_t{1} << 31, "logits: expected fewer than 2**31 rows, got ", rows);
    STD_TORCH_CHECK(columns >= 1 && columns <= bi::kMaxColumns, "logits: expected 1 to ", bi::kMaxColumns,
                    " columns, got ", columns);
    const bi::HalvingTree tree = bi::halving_tree(static_cast<int>(columns));
    bi::check_size(scratch, "scratch", 0, rows);
    bi::check_size(scratch, "scratch", 1, bi::kMaxima + tree.size[bi::kTreeLevels]);
    bi::check_size(out, "out", 0, rows);
    bi::check_size(out, "out", 1, columns);
    bi::check_rows_aligned(logits, "logits", 4);
    bi::check_rows_aligned(scratch, "scratch", 4);
    bi::check_rows_aligned(out, "out", 4);

    const bi::LogSoftmaxArgs args{
        .x = static_cast<const float*>(logits.const_data_ptr()),
        .scratch = static_cast<float*>(scratch.mutable_data_ptr()),
        .out = static_cast<float*>(out.mutable_data_ptr()),
        .x_row = logits.stride(0),
        .scratch_row = scratch.stride(0),
        .out_row = out.stride(0),
        .tree = tree,
    };
    const torch::stable::accelerator::DeviceGuard guard(device);
    bi::log_softmax(args, rows, bi::current_stream(device));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bi_kernels, CUDA, m) { m.impl("log_softmax", TORCH_BOX(&log_softmax)); }
