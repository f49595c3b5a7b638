// Checks and registration of bi_moe_deepep::pack_tokens. The schema is declared in Python.
#include "pack_tokens.cuh"

#include "bi/torch_stable.h"

namespace {

using bi::Tensor;

template <typename Id>
void launch(const Tensor& packed_q, const Tensor& packed_s, const Tensor& offsets, const Tensor& m_indices,
            const Tensor& slots, const Tensor& q, const Tensor& s, const Tensor& topk_ids) {
    const int32_t device = q.get_device_index();
    const bi::moe::PackArgs<Id> args{
        .q = static_cast<const uint8_t*>(q.const_data_ptr()),
        .s = static_cast<const uint32_t*>(s.const_data_ptr()),
        .ids = static_cast<const Id*>(topk_ids.const_data_ptr()),
        .packed_q = static_cast<uint8_t*>(packed_q.mutable_data_ptr()),
        .packed_s = static_cast<uint32_t*>(packed_s.mutable_data_ptr()),
        .offsets = static_cast<int32_t*>(offsets.mutable_data_ptr()),
        .m_indices = static_cast<int32_t*>(m_indices.mutable_data_ptr()),
        .slots = static_cast<int32_t*>(slots.mutable_data_ptr()),
        .q_row = q.stride(0),
        .s_row = s.stride(0),
        .s_column = s.stride(1),
        .ids_row = topk_ids.stride(0),
        .packed_q_row = packed_q.stride(0),
        .packed_s_row = packed_s.stride(0),
        .packed_s_column = packed_s.stride(1),
        .tokens = q.size(0),
        .hidden = q.size(1),
        .experts = static_cast<int>(offsets.size(0) - 1),
        .top_k = static_cast<int>(topk_ids.size(1)),
    };
    const torch::stable::accelerator::DeviceGuard guard(device);
    bi::moe::pack_tokens(args, bi::current_stream(device));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void pack_tokens(const Tensor& packed_q, const Tensor& packed_s, const Tensor& offsets, const Tensor& m_indices,
                 const Tensor& slots, const Tensor& q, const Tensor& s, const Tensor& topk_ids) {
    using Type = torch::headeronly::ScalarType;
    const int32_t device = q.get_device_index();
    const bool wide = topk_ids.scalar_type() == Type::Long;
    bi::check_tensor(q, "q", Type::Float8_e4m3fn, "float8_e4m3fn", 2, device);
    bi::check_tensor(s, "s", Type::Float, "float32", 2, device);
    bi::check_tensor(topk_ids, "topk_ids", wide ? Type::Long : Type::Int, "int32 or int64", 2, device);
    bi::check_tensor(packed_q, "packed_q", Type::Float8_e4m3fn, "float8_e4m3fn", 2, device);
    bi::check_tensor(packed_s, "packed_s", Type::Float, "float32", 2, device);
    bi::check_tensor(offsets, "offsets", Type::Int, "int32", 1, device);
    bi::check_tensor(m_indices, "m_indices", Type::Int, "int32", 1, device);
    bi::check_tensor(slots, "slots", Type::Int, "int32", 2, device);
    const int64_t tokens = q.size(0), hidden = q.size(1), top_k = topk_ids.size(1), rows = tokens * top_k;
    STD_TORCH_CHECK(hidden % 128 == 0, "q: expected hidden a multiple of 128, got ", hidden);
    STD_TORCH_CHECK(offsets.size(0) >= 1 && offsets.size(0) < int64_t{1} << 20,
                    "offsets: expected one per expert and one more, got ", offsets.size(0));
    STD_TORCH_CHECK(rows < int64_t{1} << 31 && top_k < int64_t{1} << 15,
                    "topk_ids: expected fewer than 2**31 slots, got ", tokens, " x ", top_k);
    bi::check_size(s, "s", 0, tokens);
    bi::check_size(s, "s", 1, hidden / 128);
    bi::check_size(topk_ids, "topk_ids", 0, tokens);
    bi::check_size(packed_q, "packed_q", 0, rows);
    bi::check_size(packed_q, "packed_q", 1, hidden);
    bi::check_size(packed_s, "packed_s", 0, rows);
    bi::check_size(packed_s, "packed_s", 1, hidden / 128);
    bi::check_size(m_indices, "m_indices", 0, rows);
    bi::check_size(slots, "slots", 0, tokens);
    bi::check_size(slots, "slots", 1, top_k);
    STD_TORCH_CHECK(offsets.is_contiguous() && m_indices.is_contiguous() && slots.is_contiguous(),
                    "offsets, m_indices, slots: expected contiguous memory");
    bi::check_rows_aligned(topk_ids, "topk_ids", wide ? 8 : 4);
    bi::check_rows_aligned(q, "q", 16);
    bi::check_rows_aligned(packed_q, "packed_q", 16);
    wide ? launch<int64_t>(packed_q, packed_s, offsets, m_indices, slots, q, s, topk_ids)
         : launch<int32_t>(packed_q, packed_s, offsets, m_indices, slots, q, s, topk_ids);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bi_moe_deepep, CUDA, m) { m.impl("pack_tokens", TORCH_BOX(&pack_tokens)); }
