// Attend: exact softmax attention over the selected pages, split over the CLUSTER blocks of a cluster and merged there.
//
// Bytes: 2 * PAGE * D * 2 per kept page and KV head; at batch 1 it is latency that counts.  A warp takes tiles of 16 tokens: keys
// and values come by 16-byte asynchronous copies into its own ring of STAGES tiles; attend_tile.cuh has the arithmetic.  One cluster
// barrier to wait at (a first one, that all have started, is over by then), no second launch.
#include "attend_tile.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int TILES = PAGE / 16;       // of a page
constexpr int STEP = WARPS * CLUSTER;  // tiles between two of a warp

// query, out [B, kv_heads * G, D], the query's rows query_stride elements apart; keys, values: pools with strides in elements;
// tables [B, kv_heads, kept] logical pages;
// lse [B, kv_heads * G] natural log, -inf where there is nothing to attend.  grid (CLUSTER, kv_heads * D / DV, B).
extern "C" __global__ void __launch_bounds__(THREADS)
    attend(const uint16* __restrict__ query, const uint16* __restrict__ keys, const uint16* __restrict__ values,
           const int* __restrict__ block_table, const int* __restrict__ seq_lens, const int* __restrict__ tables,
           uint16* __restrict__ out, float* __restrict__ lse, int kv_heads, int max_pages, int kept, int64 query_stride,
           int64 page_stride, int64 head_stride, int64 token_stride) {
    extern __shared__ __align__(128) uint8 shared[];  // rings of the warps, afterwards [WARPS][G][DV] partial outputs
    __shared__ Merge<WARPS> merging;

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
    const int head = blockIdx.y / (D / DV), part = blockIdx.y % (D / DV), sequence = blockIdx.z;
    const uint32 rank = cluster_rank();
    cluster_arrive();  // the others have started, which sending to them needs: waited for below

    const int64 first_query = (static_cast<int64>(sequence) * kv_heads + head) * G;
    const int* table = tables + (static_cast<int64>(sequence) * kv_heads + head) * kept;
    const int* physical = block_table + static_cast<int64>(sequence) * max_pages;
    const int length = seq_lens[sequence];  // like the query it is final: the selection had waited before it let this start

    uint32 q[2 * KEY_CHUNKS][4];
    load_heads(q, query + sequence * query_stride + head * G * D, row, quad);
    wait_for_previous_kernel();
    let_next_kernel_start();
    Partial partial;

    uint8* ring = shared + warp * STAGES * TILE_BYTES;
    for (int first = warp * CLUSTER + rank; first < kept * TILES; first += 32 * STEP) {
        // lane i looks up this warp's tile i
        const int at = first + lane * STEP;
        const int page = at < kept * TILES ? table[at / TILES] : -1;
        const int64 base = page < 0 ? 0 : physical[page] * page_stride + head * head_stride + at % TILES * 16 * token_stride;
        const int token = page * PAGE + at % TILES * 16;
        const int tiles = __popc(__ballot_sync(ALL_LANES, page >= 0));  // ids are ascending, -1 behind the last
        auto fetch = [&](int tile) {
            if (tile < tiles) {
                const int64 from = __shfl_sync(ALL_LANES, base, tile);
                uint8* to = ring + tile % STAGES * TILE_BYTES;
                copy_rows<D>(to, keys + from, token_stride, lane);
                copy_rows<DV>(to + KEY_BYTES, values + from + part * DV, token_stride, lane);
            }
            asm volatile("cp.async.commit_group;" ::: "memory");
        };
#pragma unroll
        for (int tile = 0; tile < STAGES - 1; ++tile) fetch(tile);
        for (int tile = 0; tile < tiles; ++tile) {
            fetch(tile + STAGES - 1);
            asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
            __syncwarp();
            const uint8* rows = ring + tile % STAGES * TILE_BYTES;
            const int live = length - __shfl_sync(ALL_LANES, token, tile);
            float logits[1][2][4];
            uint32 p[1][2][2] = {};
            tile_logits(logits[0], q, rows, live, row, quad);
            weigh(p, partial, logits);
            add_values(partial, p[0], rows + KEY_BYTES, live, row, quad);
            __syncwarp();  // the slot is free again
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();  // the rings are done with

    float* outputs = reinterpret_cast<float*>(shared);
    leave_partial(merging, partial, outputs, warp, row, quad);
    __syncthreads();
    cluster_wait();
    merge(merging, outputs, rank, out + first_query * D + part * DV, part == 0 ? lse + first_query : nullptr);
}
