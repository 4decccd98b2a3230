// Select: combine the group's scores and keep the best pages, exactly, in one launch whatever the data.
//
// One cluster of CLUSTER blocks per (sequence, KV head); each block takes a slice of the pages.  The scorer left its partial
// log-sum-exps, so the scores are read once: combined keys (non-negative floats, whose bits order like integers) stay in shared
// memory, and four rounds of an 8-bit radix search, one cluster barrier each, find the key of the last page kept.  Then every
// block counts what lies before its slice and writes its page ids in ascending order; of equal keys the lowest pages are kept.
#include "common.cuh"

constexpr int THREADS = 1024, WARPS = THREADS / 32;
constexpr int BINS = 256, ROUNDS = 4;
constexpr int HEAD_WARPS = WARPS / (G <= 1 ? 1 : G <= 2 ? 2 : G <= 4 ? 4 : G <= 8 ? 8 : 16);  // warps that reduce one head's parts

// Adds 1 to bins[bin] for each lane with `live`.  Lanes that agree with the first live one are added as one (a heavy bin would
// otherwise serialise the whole warp).
__device__ __forceinline__ void count(uint32* bins, uint32 bin, bool live) {
    const uint32 mask = __ballot_sync(ALL_LANES, live);
    if (mask == 0) return;
    const int leader = __ffs(mask) - 1;
    const uint32 common = __shfl_sync(ALL_LANES, bin, leader);
    const uint32 same = __ballot_sync(ALL_LANES, live && bin == common);
    if (static_cast<int>(threadIdx.x % 32) == leader) atomicAdd(&bins[common], __popc(same));
    if (live && bin != common) atomicAdd(&bins[bin], 1u);
}

__device__ __forceinline__ void merge(float& largest, float& sum, float other, float other_sum) {
    const float next = fmaxf(largest, other);
    sum = sum * exp2_fast(largest - next) + other_sum * exp2_fast(other - next);
    largest = next;
}
__device__ __forceinline__ void merge_warp(float& largest, float& sum) {
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2)
        merge(largest, sum, __shfl_xor_sync(ALL_LANES, largest, apart), __shfl_xor_sync(ALL_LANES, sum, apart));
}

// scores [B, kv_heads * G, score_stride] nats; partials [B, kv_heads * G, score_blocks * subs] as `score` leaves them;
// tables [B, kv_heads, kept]: page ids, ascending, -1 behind the last.  share: 1 = mean of shares, 0 = sum of peak-normalised.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    select_pages(const float* __restrict__ scores, const float2* __restrict__ partials, const int* __restrict__ seq_lens,
                 int* __restrict__ tables, int kv_heads, int score_stride, int score_blocks, int subs, int kept, int sink_pages,
                 int recent_pages, int share, int slice_capacity) {
    extern __shared__ uint32 keys[];
    __shared__ uint32 histogram[ROUNDS][BINS];
    __shared__ uint32 totals[BINS];
    __shared__ float2 warp_part[WARPS];
    __shared__ uint32 warp_above[WARPS], warp_equal[WARPS];
    __shared__ uint32 block_above, block_equal, digit, still_needed;

    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const int head = blockIdx.y, sequence = blockIdx.z;
    const uint32 rank = cluster_rank();
    for (int i = tid; i < ROUNDS * BINS; i += THREADS) (&histogram[0][0])[i] = 0;
    wait_for_previous_kernel();
    let_next_kernel_start();

    const int pages = (seq_lens[sequence] + PAGE - 1) / PAGE;
    int* table = tables + (static_cast<int64>(sequence) * kv_heads + head) * kept;
    if (pages <= kept) {  // the whole cluster agrees
        for (int i = rank * THREADS + tid; i < kept; i += CLUSTER * THREADS) table[i] = i < pages ? i : -1;
        return;
    }
    const int scored = pages - recent_pages;
    const int ranked = kept - sink_pages - recent_pages;
    const int64 first_query = (static_cast<int64>(sequence) * kv_heads + head) * G;

    // log-sum-exp of each head over the scorer's parts that touched this sequence; HEAD_WARPS warps a head
    const WorkList list(seq_lens, gridDim.z, sequence, recent_pages, score_blocks);
    const int first_part = list.owner(list.before) * subs;
    const int last_part = (list.owner(list.before + (scored + GROUP_PAGES - 1) / GROUP_PAGES - 1) + 1) * subs;
    {
        const int g = warp / HEAD_WARPS;
        float largest = LOWEST, sum = 0.f;
        if (g < G) {
            const float2* parts = partials + (first_query + g) * score_blocks * subs;
#pragma unroll 4
            for (int i = first_part + warp % HEAD_WARPS * 32 + lane; i < last_part; i += 32 * HEAD_WARPS) {
                const float2 part = parts[i];
                merge(largest, sum, part.x, part.y);
            }
        }
        merge_warp(largest, sum);
        if (lane == 0) warp_part[warp] = make_float2(largest, sum);
    }
    __syncthreads();
    float offset[G];  // exponent of 2 to subtract from a head's score
#pragma unroll
    for (int g = 0; g < G; ++g) {
        float2 total = warp_part[g * HEAD_WARPS];
#pragma unroll
        for (int w = 1; w < HEAD_WARPS; ++w) merge(total.x, total.y, warp_part[g * HEAD_WARPS + w].x, warp_part[g * HEAD_WARPS + w].y);
        offset[g] = share ? total.x + log2_fast(total.y * G) : total.x;
    }

    const int slice = (scored + 4 * CLUSTER - 1) / (4 * CLUSTER) * 4;
    const int begin = min(static_cast<int>(rank) * slice, scored), length = min(slice, scored - begin);
    if (length > slice_capacity) __trap();
    const float* rows = scores + first_query * score_stride + begin;
    for (int i = 4 * tid; i < (length + 127) / 128 * 128; i += 4 * THREADS) {
        float combined[4] = {};
        if (i < length) {
            float4 s[G];
#pragma unroll
            for (int g = 0; g < G; ++g)  // rows are padded to 8 pages: reading past `length` stays inside
                s[g] = *reinterpret_cast<const float4*>(rows + static_cast<int64>(g) * score_stride + i);
#pragma unroll
            for (int g = 0; g < G; ++g) {
                combined[0] += exp2_fast(fmaf(s[g].x, LOG2_E, -offset[g]));
                combined[1] += exp2_fast(fmaf(s[g].y, LOG2_E, -offset[g]));
                combined[2] += exp2_fast(fmaf(s[g].z, LOG2_E, -offset[g]));
                combined[3] += exp2_fast(fmaf(s[g].w, LOG2_E, -offset[g]));
            }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint32 key = __float_as_uint(combined[j]);
            const bool live = i + j < length && begin + i + j >= sink_pages;
            if (i + j < length) keys[i + j] = key;
            count(histogram[0], key >> 24, live);
        }
    }

    uint32 threshold = 0, needed = ranked;
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const int shift = 24 - 8 * round;
        if (round > 0) {
            for (int i = tid; i < (length + 31) / 32 * 32; i += THREADS) {
                const uint32 key = i < length ? keys[i] : 0u;
                const bool live = i < length && begin + i >= sink_pages && (key >> (shift + 8)) == (threshold >> (shift + 8));
                count(histogram[round], (key >> shift) & 0xff, live);
            }
        }
        cluster_sync();
        if (tid < BINS) {
            uint32 parts[CLUSTER], sum = 0;
#pragma unroll
            for (int block = 0; block < CLUSTER; ++block) parts[block] = load_from_block(&histogram[round][tid], block);
#pragma unroll
            for (int block = 0; block < CLUSTER; ++block) sum += parts[block];
            totals[tid] = sum;
        }
        __syncthreads();
        if (warp == 0) {  // lane 0 has the highest 8 bins
            uint32 own = 0, bins[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) own += bins[j] = totals[BINS - 1 - (8 * lane + j)];
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
                        digit = BINS - 1 - (8 * lane + j);
                        still_needed = needed - before;
                    }
                    before += bins[j];
                }
            }
        }
        __syncthreads();
        threshold |= digit << shift;
        needed = still_needed;
    }

    // Each warp owns a run of its block's slice; `needed` pages of key == threshold are kept, the lowest ones.
    const int run = (length + THREADS - 1) / THREADS * 32, from = min(warp * run, length), to = min(from + run, length);
    uint32 above = 0, equal = 0;
    for (int i = from; i < to; i += 32) {
        const bool inside = i + lane < to && begin + i + lane >= sink_pages;
        const uint32 key = inside ? keys[i + lane] : 0u;
        above += __popc(__ballot_sync(ALL_LANES, inside && key > threshold));
        equal += __popc(__ballot_sync(ALL_LANES, inside && key == threshold));
    }
    if (lane == 0) warp_above[warp] = above, warp_equal[warp] = equal;
    __syncthreads();
    if (warp < 2) {
        const uint32 sum = __reduce_add_sync(ALL_LANES, (warp == 0 ? warp_above : warp_equal)[lane]);
        if (lane == 0) (warp == 0 ? block_above : block_equal) = sum;
    }
    cluster_sync();
    uint32 above_before = lane < rank ? load_from_block(&block_above, lane) : 0u;
    uint32 equal_before = lane < rank ? load_from_block(&block_equal, lane) : 0u;
    cluster_arrive();  // its counts are read; see the wait at the end
    above_before = __reduce_add_sync(ALL_LANES, above_before + (lane < warp ? warp_above[lane] : 0u));
    equal_before = __reduce_add_sync(ALL_LANES, equal_before + (lane < warp ? warp_equal[lane] : 0u));
    for (int i = from; i < to; i += 32) {
        const bool inside = i + lane < to && begin + i + lane >= sink_pages;
        const uint32 key = inside ? keys[i + lane] : 0u;
        const uint32 above_mask = __ballot_sync(ALL_LANES, inside && key > threshold);
        const uint32 equal_mask = __ballot_sync(ALL_LANES, inside && key == threshold);
        const uint32 lower = (1u << lane) - 1;
        const uint32 my_above = above_before + __popc(above_mask & lower), my_equal = equal_before + __popc(equal_mask & lower);
        const bool keep = (above_mask >> lane & 1) || ((equal_mask >> lane & 1) && my_equal < needed);
        if (keep) table[sink_pages + my_above + min(my_equal, needed)] = begin + i + lane;
        above_before += __popc(above_mask), equal_before += __popc(equal_mask);
    }
    if (rank == 0) {
        for (int i = tid; i < sink_pages; i += THREADS) table[i] = i;
        for (int i = tid; i < recent_pages; i += THREADS) table[kept - recent_pages + i] = scored + i;
    }
    cluster_wait();  // nobody leaves while others still read its counts
}
