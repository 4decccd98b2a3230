// Select: combine the group's scores and keep the best pages, exactly, in one launch whatever the data.
//
// One cluster of CLUSTER blocks per (sequence, KV head); each block takes a slice of the pages.  The scorer left its partial
// log-sum-exps, so the scores are read once.  A page's key is the distance of its combined score from an upper bound, counted in
// floats (non-negative floats order like their bits), so the best page has the smallest key.  Rounds of a radix search over the
// cluster, one barrier each, narrow down the key of the last page kept: the first digit is a sixteenth of an octave (16
// octaves; what lies below shares a bin and is searched from the top), the next ones have 8 bits.  Once the bin in question has few keys,
// with real scores after one or two rounds, every block sends them to all others together with the number of its keys above the
// bin, and each ranks them for itself: a second barrier, and the last.  Page ids come out in ascending order; of equal keys the
// lowest pages are kept, also when there are too many of them to send: a round also finds the smallest and the largest key that it
// counts, and if they are the same nothing is left to narrow down.
//
// A step's selection at small contexts is a chain of latencies (measured: about 1,000 cycles a barrier round), so one warp does
// what 16 would do again, and the passes over the keys take four at a time and skip where none matters.  Asking the kept pages
// into the second-level cache from here (cp.async.bulk.prefetch) was tried and made the step 5 us slower: it ends only with them.
#include "work_list.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32;
constexpr int BINS = 256;
static_assert(THREADS == 2 * BINS, "two threads a bin");
constexpr int FIRST_SHIFT = 19, MAX_ROUNDS = 5;  // 2^19 floats are a sixteenth of an octave
constexpr uint32 EXCLUDED = 0xffffffffu;         // key of a page that is not ranked: a sink page, or behind the slice
constexpr int CANDIDATES = THREADS / 8;           // keys of one bin that are ranked directly, eight threads each
constexpr int COPIES = 16;                       // of the histogram: at most two lanes meet at an address, whatever the data

// scores [B, kv_heads * G, score_stride] nats; partials [B, kv_heads * G, score_blocks * subs] as `score` leaves them;
// tables [B, kv_heads, table_pages]: page ids, ascending, -1 behind the last.  A sequence of at most table_pages pages keeps all of
// them, others `kept`.
// share: 1 = mean of shares, 0 = sum of peak-normalised.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    select_pages(const float* __restrict__ scores, const float2* __restrict__ partials, const int* __restrict__ seq_lens,
                 int* __restrict__ tables, int kv_heads, int score_stride, int score_blocks, int subs, int kept, int table_pages,
                 int sink_pages, int recent_pages, int share, int slice_capacity) {
    extern __shared__ __align__(16) uint32 histogram[];  // [BINS][COPIES], zero between rounds; behind it the page keys
    uint32* page_keys = histogram + BINS * COPIES;
    __shared__ uint32 block_totals[MAX_ROUNDS][BINS];
    __shared__ __align__(16) uint32 totals[BINS];
    __shared__ float offsets[G], peaks[G];
    __shared__ uint32 warp_above[32], warp_equal[32];
    __shared__ uint32 block_above[CLUSTER], block_equal[CLUSTER];                       // of every block, sent by them
    __shared__ __align__(16) uint32 candidate_key[CANDIDATES], candidate_page[CANDIDATES];  // of all blocks
    __shared__ uint32 own_key[CANDIDATES], own_page[CANDIDATES];
    __shared__ uint32 own_candidates, candidates_before, chosen_before;
    __shared__ uint32 digit, still_needed, in_bin;
    __shared__ uint32 block_lowest[MAX_ROUNDS], block_highest[MAX_ROUNDS], lowest, highest;  // keys that a round counts

    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const int head = blockIdx.y, sequence = blockIdx.z;
    const uint32 rank = cluster_rank();
    for (int i = tid; i < BINS * COPIES / 4; i += THREADS) reinterpret_cast<uint4*>(histogram)[i] = make_uint4(0, 0, 0, 0);
    if (tid < 32) warp_above[tid] = warp_equal[tid] = 0;
    if (tid < MAX_ROUNDS) block_lowest[tid] = EXCLUDED, block_highest[tid] = 0;
    if (tid == 0) own_candidates = chosen_before = 0;
    // Lengths were final before the scorer let this kernel start; only its scores must be waited for.
    const int pages = (seq_lens[sequence] + PAGE - 1) / PAGE;
    int* table = tables + (static_cast<int64>(sequence) * kv_heads + head) * table_pages;
    const int scored = pages - recent_pages, ranked = kept - sink_pages - recent_pages;
    const int64 first_query = (static_cast<int64>(sequence) * kv_heads + head) * G;
    int first_part = 0, last_part = 0;  // of the scorer, that touched this sequence
    if (pages > table_pages && warp < G) {
        const WorkList list(seq_lens, gridDim.z, sequence, recent_pages, score_blocks);
        first_part = list.owner(list.before) * subs;
        last_part = (list.owner(list.before + scored - 1) + 1) * subs;
    }
    wait_for_previous_kernel();
    let_next_kernel_start();

    if (pages <= table_pages) {  // the whole cluster agrees
        for (int i = rank * THREADS + tid; i < table_pages; i += CLUSTER * THREADS) table[i] = i < pages ? i : -1;
        return;
    }
    if (rank == 0 && warp == WARPS - 1) {
        for (int i = lane; i < sink_pages; i += 32) table[i] = i;
        for (int i = lane; i < recent_pages; i += 32) table[kept - recent_pages + i] = scored + i;
        for (int i = kept + lane; i < table_pages; i += 32) table[i] = -1;
    }
    for (int g = warp; g < G; g += WARPS) {
        const float2 found = normaliser(partials + (first_query + g) * score_blocks * subs, first_part, last_part, share);
        if (lane == 0) offsets[g] = found.x, peaks[g] = found.y;
    }
    __syncthreads();

    const int slice = (scored + 4 * CLUSTER - 1) / (4 * CLUSTER) * 4;
    const int begin = min(static_cast<int>(rank) * slice, scored), length = min(slice, scored - begin);
    const int padded = (length + 127) / 128 * 128;  // whole warps of four keys a lane
    if (padded > slice_capacity) __trap();
    const float* rows = scores + first_query * score_stride + begin;
    float bound = 0.f;
#pragma unroll
    for (int g = 0; g < G; ++g) bound += peaks[g];
    // 0.8 % above, so that no rounding exceeds it while scores stay within some ten thousand nats; beyond, the best pages tie
    const uint32 top = __float_as_uint(bound) + (1u << 16);
#pragma unroll 2
    for (int i = 4 * tid; i < padded; i += 4 * THREADS) {
        float combined[4] = {};
        if (i < length) {
            float4 s[G];
#pragma unroll
            for (int g = 0; g < G; ++g)  // rows are padded to 8 pages: reading past `length` stays inside
                s[g] = *reinterpret_cast<const float4*>(rows + static_cast<int64>(g) * score_stride + i);
#pragma unroll
            for (int g = 0; g < G; ++g) {
                const float offset = offsets[g];
                combined[0] += exp2_fast(fmaf(s[g].x, LOG2_E, -offset));
                combined[1] += exp2_fast(fmaf(s[g].y, LOG2_E, -offset));
                combined[2] += exp2_fast(fmaf(s[g].z, LOG2_E, -offset));
                combined[3] += exp2_fast(fmaf(s[g].w, LOG2_E, -offset));
            }
        }
        uint32 key[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
            key[j] = i + j < length && begin + i + j >= sink_pages ? top - min(__float_as_uint(combined[j]), top - 1) : EXCLUDED;
        *reinterpret_cast<uint4*>(page_keys + i) = make_uint4(key[0], key[1], key[2], key[3]);
    }

    // Keys below `limit` are kept, and the `needed` best ones of those from `limit` on.
    uint32 limit = 0, needed = ranked;
    bool direct = false;  // the bin's keys are ranked directly
    int shift = FIRST_SHIFT;
#pragma unroll 1
    for (int round = 0; round < MAX_ROUNDS; ++round) {
        const bool first = round == 0;
        uint32 least = EXCLUDED, most = 0;
        for (int i = 4 * tid; i < padded; i += 4 * THREADS) {
            const uint4 four = *reinterpret_cast<const uint4*>(page_keys + i);
            const uint32 key[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                uint32 bin = (key[j] - limit) >> shift;
                if (first) bin = min(bin, BINS - 1);
                if (key[j] >= limit && bin < BINS && key[j] != EXCLUDED) {
                    atomicAdd(&histogram[bin * COPIES + lane % COPIES], 1u);
                    least = min(least, key[j]), most = max(most, key[j]);
                }
            }
        }
        least = __reduce_min_sync(ALL_LANES, least), most = __reduce_max_sync(ALL_LANES, most);
        if (lane == 0) atomicMin(&block_lowest[round], least), atomicMax(&block_highest[round], most);
        __syncthreads();
        {  // two threads a bin, half of the copies each, cleared for the next round
            constexpr int PARTS = COPIES / 8;
            uint4* copies = reinterpret_cast<uint4*>(histogram) + PARTS * tid;
            uint32 sum = 0;
#pragma unroll
            for (int i = 0; i < PARTS; ++i) {
                const int at = (i + tid / 4) % PARTS;  // spreads the lanes over the banks
                const uint4 four = copies[at];
                sum += four.x + four.y + four.z + four.w;
                copies[at] = make_uint4(0, 0, 0, 0);
            }
            sum += __shfl_xor_sync(ALL_LANES, sum, 1);
            block_totals[round][tid / 2] = sum;
        }
        cluster_sync();
        constexpr int HALF = CLUSTER > 1 ? CLUSTER / 2 : 1;
        const int from = CLUSTER > 1 ? tid % 2 * HALF : 0;
        uint32 parts[HALF];
        {  // two threads a bin
#pragma unroll
            for (int block = 0; block < HALF; ++block) parts[block] = load_from_block(&block_totals[round][tid / 2], from + block);
            uint32 sum = 0;
#pragma unroll
            for (int block = 0; block < HALF; ++block) sum += parts[block];
            if (CLUSTER > 1) sum += __shfl_xor_sync(ALL_LANES, sum, 1);
            totals[tid / 2] = sum;
        }
        __syncthreads();
        if (warp == 0) {
            const uint4 low = *reinterpret_cast<const uint4*>(totals + 8 * lane);
            const uint4 high = *reinterpret_cast<const uint4*>(totals + 8 * lane + 4);
            const uint32 bins[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            uint32 own = 0;
#pragma unroll
            for (int j = 0; j < 8; ++j) own += bins[j];
            uint32 before = own;
#pragma unroll
            for (int apart = 1; apart < 32; apart *= 2) {
                const uint32 other = __shfl_up_sync(ALL_LANES, before, apart);
                if (lane >= apart) before += other;
            }
            before -= own;
            if (before < needed && needed <= before + own) {
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    if (before < needed && needed <= before + bins[j]) {
                        digit = 8 * lane + j;
                        still_needed = needed - before;
                        in_bin = bins[j];
                    }
                    before += bins[j];
                }
            }
        }
        if (warp == 1) {
            least = lane < CLUSTER ? load_from_block(&block_lowest[round], lane) : EXCLUDED;
            most = lane < CLUSTER ? load_from_block(&block_highest[round], lane) : 0;
            least = __reduce_min_sync(ALL_LANES, least), most = __reduce_max_sync(ALL_LANES, most);
            if (lane == 0) lowest = least, highest = most;
        }
        __syncthreads();
        if (lowest == highest) {
            limit = lowest;
            break;
        }
        const bool open_bin = first && digit == BINS - 1;  // has no upper end
        limit += digit << shift;
        needed = still_needed;
        if (needed == in_bin) {  // all of the bin
            limit = open_bin ? EXCLUDED : limit + (1u << shift);
            needed = 0;
            break;
        }
        if (in_bin <= CANDIDATES && !open_bin) {
            uint32 before = 0;
#pragma unroll
            for (int block = 0; block < HALF; ++block) before += from + block < static_cast<int>(rank) ? parts[block] : 0u;
            if (CLUSTER > 1) before += __shfl_xor_sync(ALL_LANES, before, 1);
            if (tid / 2 == static_cast<int>(digit)) candidates_before = before;
            direct = true;
            break;
        }
        if (shift == 0) break;
        shift = open_bin ? 24 : max(shift - 8, 0);
    }

    // Each warp owns a run of its block's slice.
    const int run = (padded + 4 * THREADS - 1) / (4 * THREADS) * 128, from = min(warp * run, padded), to = min(from + run, padded);
    const uint32 width = direct ? 1u << shift : 1u;
    uint32 above = 0, equal = 0;
    for (int i = from + 4 * lane; i < to; i += 128) {
        const uint4 four = *reinterpret_cast<const uint4*>(page_keys + i);
        const uint32 key[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            above += key[j] < limit;
            const bool inside = needed > 0 && key[j] >= limit && key[j] - limit < width;
            equal += inside;
            if (direct && inside) {
                const uint32 at = atomicAdd(&own_candidates, 1u);
                own_key[at] = key[j], own_page[at] = begin + i + j;
            }
        }
    }
    above = warp_sum(above), equal = warp_sum(equal);
    if (lane == 0) warp_above[warp] = above, warp_equal[warp] = equal;
    __syncthreads();
    if (warp == 0) {
        const uint32 sum_above = warp_sum(warp_above[lane]), sum_equal = warp_sum(warp_equal[lane]);
        if (lane < CLUSTER) {
            store_to_block(&block_above[rank], lane, sum_above);
            store_to_block(&block_equal[rank], lane, sum_equal);
        }
    }
    if (direct) {
        for (int i = tid; i < own_candidates * CLUSTER; i += THREADS) {
            const int at = candidates_before + i / CLUSTER;
            store_to_block(&candidate_key[at], i % CLUSTER, own_key[i / CLUSTER]);
            store_to_block(&candidate_page[at], i % CLUSTER, own_page[i / CLUSTER]);
        }
    }
    cluster_sync();
    if (direct) {
        const int mine = tid / 8;
        uint32 better = 0, key = EXCLUDED, page = 0;
        if (mine < static_cast<int>(in_bin)) {
            key = candidate_key[mine], page = candidate_page[mine];
            for (int i = tid % 8; i < static_cast<int>(in_bin); i += 8)
                better += candidate_key[i] < key || (candidate_key[i] == key && candidate_page[i] < page);
        }
#pragma unroll
        for (int apart = 4; apart > 0; apart /= 2) better += __shfl_xor_sync(ALL_LANES, better, apart);
        if (tid % 8 == 0 && mine < static_cast<int>(in_bin) && better < needed) {
            if (page < begin) atomicAdd(&chosen_before, 1u);
            else if (page < begin + length) {
                page_keys[page - begin] = 0;  // from here on like a key above the bin; no real one is 0
                atomicAdd(&warp_above[(page - begin) / run], 1u);
            }
        }
        __syncthreads();
        limit = max(limit, 1u), needed = 0;
    }
    uint32 above_before = warp_sum((lane < rank ? block_above[lane % CLUSTER] : 0u) + (lane < warp ? warp_above[lane] : 0u));
    uint32 equal_before = warp_sum((lane < rank ? block_equal[lane % CLUSTER] : 0u) + (lane < warp ? warp_equal[lane] : 0u));
    above_before += chosen_before;
    for (int i = from + 4 * lane; i - 4 * lane < to; i += 128) {
        const uint4 four = *reinterpret_cast<const uint4*>(page_keys + i);
        const uint32 key[4] = {four.x, four.y, four.z, four.w};
        bool any = false;
#pragma unroll
        for (int j = 0; j < 4; ++j) any |= key[j] < limit || (needed > 0 && key[j] == limit);
        if (!__any_sync(ALL_LANES, any)) continue;
        const uint32 lower = (1u << lane) - 1;
        uint32 my_above = above_before, my_equal = equal_before;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint32 above_mask = __ballot_sync(ALL_LANES, key[j] < limit);
            const uint32 equal_mask = __ballot_sync(ALL_LANES, key[j] == limit);
            my_above += __popc(above_mask & lower), my_equal += __popc(equal_mask & lower);
            above_before += __popc(above_mask), equal_before += __popc(equal_mask);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const bool is_above = key[j] < limit, is_equal = key[j] == limit;
            if (is_above || (is_equal && my_equal < needed)) table[sink_pages + my_above + min(my_equal, needed)] = begin + i + j;
            my_above += is_above, my_equal += is_equal;
        }
    }
}
