// A whole step in one launch, for short contexts: append, score, select and attend.
//
// At 16K tokens a step reads 15 MB, 3.4 us; three launches take 16 us, most of it hand-overs: starts of blocks, lengths, block
// tables, scores and page lists through memory, barriers of a search over many blocks.  Here one cluster of CLUSTER blocks (sm_90 and
// newer) serves a (sequence, KV head) from its records to its output:
//  1. Each warp brings the records of 8 pages by bulk copies and scores them (page_mass.cuh).  Every block of the cluster gets every
//     score, and of every warp the log-sum-exp: one cluster barrier.
//  2. Each block selects for itself, without another block (select_keys.cuh).
//  3. Each warp attends tiles of 16 tokens of the kept pages; the cluster merges (attend_tile.cuh): the second barrier.
// The new token's key and value come from where the model left them.  One more cluster for each sequence writes them to the cache and
// summarises the page that they fill: nothing in this step needs either.
//
// Blocks are small, 256 threads of at most 128 registers and half of an SM's shared memory, so that those of the next step find
// room and have lengths, table and first records when this one ends.  docs/cuda-step.md has what was measured.
#include "attend_tile.cuh"
#include "bulk.cuh"
#include "page_mass.cuh"
#include "select_keys.cuh"
#include "summarise.cuh"

// Set by the launcher: HEADS 1, UNROLL (page_mass.cuh), CLUSTER, SELECT_THREADS.
constexpr int THREADS = SELECT_THREADS, WARPS = THREADS / 32;
constexpr int GROUP_BYTES = GROUP_PAGES * RECORD;
__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
// A warp's own part of shared memory: records, then a tile, then its outputs; in between the keys of pages lie across.
constexpr int WARP_BYTES = larger(larger(GROUP_BYTES, TILE_BYTES), 4 * OUTPUTS);
static_assert(HEADS == 1 && D <= 128 && PAGE == 16 && PAIRED && sizeof(Scratch<1>) <= WARP_BYTES);

// Asks for the values of 16 tokens, a half row a lane.
__device__ __forceinline__ void prefetch_rows(const uint16* from, int64 token_stride, int lane) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from + lane / 2 * token_stride + lane % 2 * (D / 2)));
}

// Pools, strides and new_keys, new_values, key_stride, value_stride as in score.cu; tables, out, lse as select_pages and attend leave them.
// capacity: a multiple of 128, at least max_pages; starts_early: no kernel that may still run writes lengths, block table or
// summaries (they are not __restrict__, or a compiler may read them in front of the wait for that kernel).
// grid (CLUSTER, kv_heads + 1, B); shared memory WARPS * WARP_BYTES + 4 * (G + 1) * capacity.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    whole_step(uint8* summaries, const uint16* __restrict__ query, const int* block_table, const int* seq_lens,
               int* __restrict__ tables, uint16* __restrict__ out, float* __restrict__ lse, int kv_heads, int max_pages,
               int capacity, int kept, int table_pages, int sink_pages, int recent_pages, int share, int starts_early,
               int64 summary_stride, int64 query_stride, uint16* keys, uint16* values, const uint16* __restrict__ new_keys,
               const uint16* __restrict__ new_values, int key_stride, int value_stride, int64 page_stride, int64 head_stride,
               int64 token_stride) {
    extern __shared__ __align__(128) uint8 shared[];
    __shared__ __align__(8) uint64 arrived[WARPS];
    __shared__ Search<1> search;
    __shared__ Merge<WARPS> merging;
    __shared__ float2 parts[G][CLUSTER * WARPS];  // log-sum-exps of all warps of the cluster, in powers of two
    __shared__ Scale scales[G];
    __shared__ int kept_pages[2 * CLUSTER * WARPS];  // two tiles a warp
    float* scores = reinterpret_cast<float*>(shared + WARPS * WARP_BYTES);  // [G][capacity] nats, of the whole sequence
    int* block_ids = reinterpret_cast<int*>(scores + G * capacity);         // [capacity]

    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, row = lane / 4, quad = lane % 4;
    const int head = blockIdx.y, sequence = blockIdx.z;
    const int rank = cluster_rank();
    uint8* own = shared + warp * WARP_BYTES;

    const bool appends = head == kv_heads;
    if (appends || !starts_early) wait_for_previous_kernel();
    if (appends) {  // the last of this step to let the next kernel start: by its end
        const NewTokens tokens = {keys, values, new_keys, new_values, nullptr, key_stride, value_stride,
                                  page_stride, head_stride, token_stride};
        for (int at = rank + CLUSTER * warp; at < kv_heads; at += CLUSTER * WARPS)
            append_token(*reinterpret_cast<Scratch<1>*>(own), tokens, block_table, seq_lens, summaries, sequence * kv_heads + at,
                         kv_heads, max_pages, summary_stride);
        return;
    }
    const uint32 barrier = shared_address(&arrived[warp]);
    if (lane == 0) barrier_init(barrier, 1);
    barriers_ready();
    __syncwarp();
    cluster_arrive();

    const int length = seq_lens[sequence], pages = (length + PAGE - 1) / PAGE;
    if (pages > capacity) __trap();
    const int* physical = block_table + static_cast<int64>(sequence) * max_pages;
    const bool keeps_all = pages <= table_pages;
    const int scored = keeps_all ? 0 : pages - recent_pages;
    const int groups = (scored + GROUP_PAGES - 1) / GROUP_PAGES, share_of_block = (groups + CLUSTER - 1) / CLUSTER;
    const int last = min((rank + 1) * share_of_block, groups);
    const uint64 policy = read_once_policy();
    auto record_of = [&](int page) { return summaries + physical[page] * summary_stride + head * RECORD; };
    auto fetch = [&](int group) {
        const int count = min(GROUP_PAGES, scored - group * GROUP_PAGES);
        if (lane == 0) barrier_expect(barrier, count * RECORD);
        __syncwarp();
        if (lane < count) copy_bulk(shared_address(own + lane * RECORD), record_of(group * GROUP_PAGES + lane), RECORD, barrier, policy);
    };
    int group = rank * share_of_block + warp;
    if (group < last) fetch(group);
    for (int next = group + WARPS; next < last; next += WARPS)  // those that wait for a place
        if (const int page = next * GROUP_PAGES + lane; lane < GROUP_PAGES && page < scored) prefetch_bulk(record_of(page), RECORD);
    for (int i = tid; i < pages; i += THREADS) block_ids[i] = physical[i];
    wait_for_previous_kernel();
    // Not before: the next kernel, if it starts early, may read summaries that the kernel ahead of this one has completed.
    let_next_kernel_start();

    const int64 first_query = (static_cast<int64>(sequence) * kv_heads + head) * G;
    const uint16* heads = query + sequence * query_stride + head * (G * D);
    if (keeps_all) {
        cluster_wait();
        for (int i = tid; i < table_pages; i += THREADS) kept_pages[i] = i < pages ? i : -1;
    } else {
        Query fragments;
        load_query(fragments, heads, row, quad);
        Running running;
        cluster_wait();  // all blocks have started: they can be written to
        for (int parity = 0; group < last; group += WARPS, parity ^= 1) {
            barrier_wait(barrier, parity);
            const int lane_page = group * GROUP_PAGES + first_kept(row, quad);
            float mass[1];
            group_masses(mass, fragments, own, lane_page, scored, row, quad);
            __syncwarp();
            if (group + WARPS < last) fetch(group + WARPS);
            if (const int query_head = kept_head(0, row); query_head < G && lane_page < scored) {
#pragma unroll
                for (int block = 0; block < CLUSTER; ++block)
                    store_to_block(&scores[query_head * capacity + lane_page], block, mass[0] * LN_2);
                include(running, mass[0]);
            }
        }
        join_lanes<false>(running);
        if (quad == 0 && row < G) {
            float2& part = parts[row][rank * WARPS + warp];
#pragma unroll
            for (int block = 0; block < CLUSTER; ++block) {
                store_to_block(&part.x, block, running.largest);
                store_to_block(&part.y, block, running.sum);
            }
        }
        cluster_sync();

        uint32* histogram = reinterpret_cast<uint32*>(shared);
        uint32* page_keys = histogram + BINS * COPIES;
        clear(search, histogram);
        if (warp == WARPS - 1) {
            for (int i = lane; i < sink_pages; i += 32) kept_pages[i] = i;
            for (int i = lane; i < recent_pages; i += 32) kept_pages[kept - recent_pages + i] = scored + i;
            for (int i = kept + lane; i < table_pages; i += 32) kept_pages[i] = -1;
        }
        const int padded = (scored + 127) / 128 * 128;
        const Keys keys = {scores, capacity, 0, scored, sink_pages};
        for (int g = warp; g < G; g += WARPS) {
            const Scale found = normaliser<false>(parts[g], 0, CLUSTER * WARPS, share);
            if (lane == 0) scales[g] = found;
        }
        __syncthreads();
        keep_best(search, histogram, page_keys, keys, scales, padded, kept - sink_pages - recent_pages, kept_pages, sink_pages);
    }
    __syncthreads();

    Partial partial;
    const int first = warp * CLUSTER + rank, second = first + WARPS * CLUSTER;  // tiles of this warp
    const int pages_of[2] = {first < table_pages ? kept_pages[first] : -1, second < table_pages ? kept_pages[second] : -1};
    if (pages_of[0] >= 0) {  // ids are ascending, -1 behind the last
        int64 from[2];
        int live[2];
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const int page = pages_of[tile];
            from[tile] = page < 0 ? 0 : block_ids[page] * page_stride + head * head_stride;
            live[tile] = page < 0 ? 0 : length - page * PAGE;
        }
        // Keys of both tiles, then values at the same place.
        auto bring = [&](const uint16* pool) {
#pragma unroll
            for (int tile = 0; tile < 2; ++tile)
                if (live[tile] > 0) copy_rows<D>(own + tile * KEY_BYTES, pool + from[tile], token_stride, lane);
        };
        auto arrive = [&](const uint16* new_tokens, int stride) {
            asm volatile("cp.async.wait_all;" ::: "memory");
            __syncwarp();
#pragma unroll
            for (int tile = 0; tile < 2; ++tile)
                if (live[tile] > 0 && live[tile] <= PAGE && lane < D / 8) {  // its last token is the new one
                    const int to = (live[tile] - 1) * D * 2 + swizzled(live[tile] - 1, lane) * 16;
                    *reinterpret_cast<uint4*>(own + tile * KEY_BYTES + to) =
                        *reinterpret_cast<const uint4*>(new_tokens + static_cast<int64>(sequence) * stride + head * D + 8 * lane);
                }
            __syncwarp();
        };
        bring(keys);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
            if (live[tile] > 0) prefetch_rows(values + from[tile], token_stride, lane);
        float logits[2][2][4];
        {
            uint32 q[2 * KEY_CHUNKS][4];
            load_heads(q, heads, row, quad);
            arrive(new_keys, key_stride);
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) tile_logits(logits[tile], q, own + tile * KEY_BYTES, live[tile], row, quad);
        }
        __syncwarp();
        bring(values);
        uint32 p[2][2][2] = {};
        weigh(p, partial, logits);
        arrive(new_values, value_stride);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) add_values(partial, p[tile], own + tile * KEY_BYTES, live[tile], row, quad);
    }
    if (rank == 0) {
        int* table = tables + (static_cast<int64>(sequence) * kv_heads + head) * table_pages;
        for (int i = tid; i < table_pages; i += THREADS) table[i] = kept_pages[i];
    }
    __syncthreads();
    float* outputs = reinterpret_cast<float*>(shared);
    leave_partial(merging, partial, outputs, warp, row, quad);
    __syncthreads();
    merge(merging, outputs, rank, out + first_query * D, lse + first_query);
}
