// Select: combine the group's scores and keep the best pages, exactly, in one launch whatever the data (select_keys.cuh).
//
// One cluster of CLUSTER blocks per (sequence, KV head); each block takes a slice of the pages.  The scorer left log-sum-exps
// and least scores by warp, so the scores are read once.
//
// A step's selection at small contexts is a chain of latencies, so one warp does what 16 would do again.  Asking the kept pages
// into the second-level cache from here (cp.async.bulk.prefetch) was tried and made the step 5 us slower: it ends only with them.
#include "select_keys.cuh"

// scores [B, kv_heads * G, score_stride] nats; partials [B, kv_heads * G, score_blocks * subs] as `score` leaves them;
// tables [B, kv_heads, table_pages]: page ids, ascending, -1 behind the last.  A sequence of at most table_pages pages keeps all of
// them, others `kept`.
// share: 1 = mean of shares, 0 = sum of peak-normalised.
extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 1)
    select_pages(const float* __restrict__ scores, const float4* __restrict__ partials, const int* __restrict__ seq_lens,
                 int* __restrict__ tables, int kv_heads, int score_stride, int score_blocks, int subs, int kept, int table_pages,
                 int sink_pages, int recent_pages, int share, int slice_capacity) {
    extern __shared__ __align__(16) uint32 histogram[];  // [BINS][COPIES], zero between rounds; behind it the page keys
    uint32* page_keys = histogram + BINS * COPIES;
    __shared__ Search<CLUSTER> search;
    __shared__ Scale scales[G];

    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const int head = blockIdx.y, sequence = blockIdx.z;
    const uint32 rank = cluster_rank();
    clear(search, histogram);
    // Lengths were final before the scorer let this kernel start; only its scores must be waited for.
    const int pages = (seq_lens[sequence] + PAGE - 1) / PAGE;
    int* table = tables + (static_cast<int64>(sequence) * kv_heads + head) * table_pages;
    const int scored = pages - recent_pages, ranked = kept - sink_pages - recent_pages;
    const int64 first_query = (static_cast<int64>(sequence) * kv_heads + head) * G;
    int first_part = 0, last_part = 0;  // of the scorer, that touched this sequence
    if (pages > table_pages && warp < G) {
        const WorkList list(seq_lens, gridDim.z, sequence, recent_pages, score_blocks);
        first_part = list.shared ? 0 : list.owner(list.before) * subs;
        last_part = list.shared ? score_blocks * subs : (list.owner(list.before + scored - 1) + 1) * subs;
    }
    wait_for_previous_kernel();
    let_next_kernel_start();

    if (pages <= table_pages) {  // the whole cluster agrees
        for (int i = rank * SELECT_THREADS + tid; i < table_pages; i += CLUSTER * SELECT_THREADS) table[i] = i < pages ? i : -1;
        return;
    }
    if (rank == 0 && warp == SELECT_WARPS - 1) {
        for (int i = lane; i < sink_pages; i += 32) table[i] = i;
        for (int i = lane; i < recent_pages; i += 32) table[kept - recent_pages + i] = scored + i;
        for (int i = kept + lane; i < table_pages; i += 32) table[i] = -1;
    }
    const int slice = (scored + 4 * CLUSTER - 1) / (4 * CLUSTER) * 4;
    const int begin = min(static_cast<int>(rank) * slice, scored), length = min(slice, scored - begin);
    const int padded = (length + 127) / 128 * 128;  // whole warps of four keys a lane
    if (padded > slice_capacity) __trap();
    const Keys keys = {scores + first_query * score_stride + begin, score_stride, begin, length, sink_pages};
    for (int g = warp; g < G; g += SELECT_WARPS) {
        const Scale found = normaliser<true>(partials + (first_query + g) * score_blocks * subs, first_part, last_part, share);
        if (lane == 0) scales[g] = found;
    }
    __syncthreads();
    keep_best(search, histogram, page_keys, keys, scales, padded, ranked, tables, static_cast<uint32>(sequence * kv_heads + head) * table_pages + sink_pages);
}
