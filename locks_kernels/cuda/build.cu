// Build: the rank-R spectral summary of complete pages; append + finalise, the same for the page a new token fills; and
// finalise_slots, for pages that others have filled.
#include "summarise.cuh"

constexpr int WARPS = PAGE == 64 ? 2 : 4, THREADS = 32 * WARPS;
constexpr int FINALISE_WARPS = 2;

// page_ids [count]: physical pages, all complete; summaries [num_pages, kv_heads, RECORD], pages summary_stride bytes apart.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    build(const uint16* __restrict__ keys, const int64* __restrict__ page_ids, uint8* __restrict__ summaries, int64 count, int kv_heads,
          int64 summary_stride, int64 page_stride, int64 head_stride, int64 token_stride) {
    __shared__ Scratch<UNITS> shared[WARPS];
    Scratch<UNITS>& scratch = shared[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    wait_for_previous_kernel();  // it may have let this one start before it had written the keys
    const int64 units = count * kv_heads, step = static_cast<int64>(gridDim.x) * WARPS * UNITS;
    for (int64 at = (static_cast<int64>(blockIdx.x) * WARPS + threadIdx.x / 32) * UNITS; at < units; at += step) {
        if (lane < UNITS) {
            const bool live = at + lane < units;
            const int64 page = live ? page_ids[(at + lane) / kv_heads] : 0, head = (at + lane) % kv_heads;
            scratch.keys[lane] = live ? keys + page * page_stride + head * head_stride : nullptr;
            scratch.record[lane] = summaries + page * summary_stride + head * RECORD;
        }
        __syncwarp();
        summarise(scratch, token_stride);
    }
}

// Writes each sequence's new token and summarises the page that it fills; for shapes whose scorer does not (score.cu).  The next
// kernel may start at once: the scorer does not need what this one writes; blocks are small so that one of the scorer's fits
// beside them on an SM.
extern "C" __global__ void __launch_bounds__(32 * FINALISE_WARPS, 1)
    append_finalise(uint16* keys, uint16* values, const uint16* __restrict__ new_keys, const uint16* __restrict__ new_values,
                    const int* __restrict__ block_table, const int* __restrict__ seq_lens, uint8* __restrict__ summaries, int batch,
                    int kv_heads, int max_pages, int64 summary_stride, int key_stride, int value_stride,
                    int64 page_stride, int64 head_stride, int64 token_stride) {
    __shared__ Scratch<1> shared[FINALISE_WARPS];
    const NewTokens tokens = {keys, values, new_keys, new_values, nullptr, key_stride, value_stride,
                              page_stride, head_stride, token_stride};
    const int at = blockIdx.x * FINALISE_WARPS + threadIdx.x / 32;
    wait_for_previous_kernel();
    let_next_kernel_start();
    if (at < batch * kv_heads)
        append_token(shared[threadIdx.x / 32], tokens, block_table, seq_lens, summaries, at, kv_heads, max_pages, summary_stride);
}

// Summarises the pages whose last slot is in slots [count] (page * PAGE + offset; negative: nothing), which the kernel before has
// written.  A warp per slot and head, most of which have nothing to do.
extern "C" __global__ void __launch_bounds__(32 * FINALISE_WARPS, 1)
    finalise_slots(const uint16* __restrict__ keys, const int64* __restrict__ slots, uint8* __restrict__ summaries, int64 count,
                   int kv_heads, int64 summary_stride, int64 page_stride, int64 head_stride, int64 token_stride) {
    __shared__ Scratch<1> shared[FINALISE_WARPS];
    Scratch<1>& scratch = shared[threadIdx.x / 32];
    const int64 at = static_cast<int64>(blockIdx.x) * FINALISE_WARPS + threadIdx.x / 32;
    wait_for_previous_kernel();
    let_next_kernel_start();
    const int64 slot = at < count * kv_heads ? slots[at / kv_heads] : -1;
    if (slot < 0 || slot % PAGE != PAGE - 1) return;
    const int64 page = slot / PAGE, head = at % kv_heads;
    if (threadIdx.x % 32 == 0) {
        scratch.keys[0] = keys + page * page_stride + head * head_stride;
        scratch.record[0] = summaries + page * summary_stride + head * RECORD;
    }
    __syncwarp();
    summarise(scratch, token_stride);
}
