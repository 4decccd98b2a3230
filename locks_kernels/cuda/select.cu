// Select: combine the group's scores and keep the best pages, exactly, in one launch whatever the data.
//
// One cluster per (sequence, KV head); each block takes a slice of the pages.  The scorer left its partial log-sum-exps, so the
// scores are read once: combined keys (non-negative floats, whose bits order like integers) stay in shared memory, and four
// rounds of an 8-bit radix search, one cluster barrier each, find the key of the last page kept.  Then every block counts what
// lies before its slice and writes its page ids in ascending order; of equal keys the lowest pages are kept.
#include "common.cuh"

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;
constexpr int BINS = 256, ROUNDS = 4;

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

// scores [B, kv_heads * G, score_stride] nats; partials [B, kv_heads * G, parts] as `score` leaves them;
// tables [B, kv_heads, kept]: page ids, ascending, -1 behind the last.  share: 1 = mean of shares, 0 = sum of peak-normalised.
extern "C" __global__ void __launch_bounds__(THREADS)
    select_pages(const float* __restrict__ scores, const float2* __restrict__ partials, const int* __restrict__ seq_lens,
                 int* __restrict__ tables, int kv_heads, int score_stride, int score_blocks, int subs, int kept,
                 int sink_pages, int recent_pages, int share, int slice_capacity) {
    extern __shared__ uint32 keys[];
    __shared__ uint32 histogram[ROUNDS][BINS];
    __shared__ uint32 totals[BINS];
    __shared__ float offset[G];  // exponent of 2 to subtract from a head's score
    __shared__ uint32 above_equal[2];
    __shared__ uint32 warp_above[WARPS], warp_equal[WARPS];
    __shared__ uint32 found[2];  // digit, still needed

    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const int blocks = gridDim.x, head = blockIdx.y, sequence = blockIdx.z;
    const uint32 rank = cluster_rank();
    let_next_kernel_start();
    for (int i = tid; i < ROUNDS * BINS; i += THREADS) (&histogram[0][0])[i] = 0;
    wait_for_previous_kernel();

    const int pages = (seq_lens[sequence] + PAGE - 1) / PAGE;
    int* table = tables + (static_cast<int64>(sequence) * kv_heads + head) * kept;
    if (pages <= kept) {
        for (int i = rank * THREADS + tid; i < kept; i += blocks * THREADS) table[i] = i < pages ? i : -1;
        return;
    }
    const int scored = pages - recent_pages;
    const int ranked = kept - sink_pages - recent_pages;
    const int64 first_query = (static_cast<int64>(sequence) * kv_heads + head) * G;

    // log-sum-exp of each head over the scorer's parts that touched this sequence
    const WorkList list = {WorkList::before(seq_lens, gridDim.z, recent_pages)};
    const int64 first_group = WorkList::before(seq_lens, sequence, recent_pages);
    const int64 last_group = first_group + groups_of(seq_lens[sequence], recent_pages) - 1;
    const int first_part = list.owner(first_group, score_blocks), last_part = list.owner(last_group, score_blocks);
    for (int g = warp; g < G; g += WARPS) {
        const float2* parts = partials + (first_query + g) * score_blocks * subs;
        float largest = LOWEST, sum = 0.f;
        for (int i = first_part * subs + lane; i < (last_part + 1) * subs; i += 32) {
            const float2 part = parts[i];
            const float next = fmaxf(largest, part.x);
            sum = sum * exp2_fast(largest - next) + part.y * exp2_fast(part.x - next);
            largest = next;
        }
        for (int apart = 16; apart > 0; apart /= 2) {
            const float other = __shfl_xor_sync(ALL_LANES, largest, apart);
            const float other_sum = __shfl_xor_sync(ALL_LANES, sum, apart);
            const float next = fmaxf(largest, other);
            sum = sum * exp2_fast(largest - next) + other_sum * exp2_fast(other - next);
            largest = next;
        }
        // The peak must be that of one page, not the sum; the scorer keeps both, the largest exactly.
        if (lane == 0) offset[g] = share ? largest + log2_fast(sum) + log2_fast(static_cast<float>(G)) : largest;
    }
    __syncthreads();

    const int slice = (scored + 4 * blocks - 1) / (4 * blocks) * 4;
    const int begin = min(static_cast<int>(rank) * slice, scored), length = min(slice, scored - begin);
    if (length > slice_capacity) __trap();
    const float* rows = scores + first_query * score_stride + begin;
    for (int i = 4 * tid; i < (length + 127) / 128 * 128; i += 4 * THREADS) {
        float combined[4] = {};
        if (i < length) {
#pragma unroll
            for (int g = 0; g < G; ++g) {  // rows are padded to 8 pages: reading past `length` stays inside
                const float4 s = *reinterpret_cast<const float4*>(rows + static_cast<int64>(g) * score_stride + i);
                combined[0] += exp2_fast(fmaf(s.x, LOG2_E, -offset[g]));
                combined[1] += exp2_fast(fmaf(s.y, LOG2_E, -offset[g]));
                combined[2] += exp2_fast(fmaf(s.z, LOG2_E, -offset[g]));
                combined[3] += exp2_fast(fmaf(s.w, LOG2_E, -offset[g]));
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
            uint32 sum = 0;
            for (int block = 0; block < blocks; ++block) sum += load_from_block(&histogram[round][tid], block);
            totals[tid] = sum;
        }
        __syncthreads();
        if (warp == 0) {  // lane 0 has the highest 8 bins
            uint32 own = 0, bins[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) own += bins[j] = totals[BINS - 1 - (8 * lane + j)];
            uint32 before = own;
            for (int apart = 1; apart < 32; apart *= 2) {
                const uint32 other = __shfl_up_sync(ALL_LANES, before, apart);
                if (lane >= apart) before += other;
            }
            before -= own;
            if (before < needed && needed <= before + own) {
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    if (before < needed && needed <= before + bins[j]) {
                        found[0] = BINS - 1 - (8 * lane + j);
                        found[1] = needed - before;
                    }
                    before += bins[j];
                }
            }
        }
        __syncthreads();
        threshold |= found[0] << shift;
        needed = found[1];
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
    if (tid < 2) {
        uint32 sum = 0;
        for (int w = 0; w < WARPS; ++w) sum += (tid ? warp_equal : warp_above)[w];
        above_equal[tid] = sum;
    }
    cluster_sync();
    uint32 above_before = 0, equal_before = 0;
    for (uint32 block = 0; block < rank; ++block) {
        above_before += load_from_block(&above_equal[0], block);
        equal_before += load_from_block(&above_equal[1], block);
    }
    cluster_sync();  // nobody leaves while others still read its counts
    for (int w = 0; w < warp; ++w) above_before += warp_above[w], equal_before += warp_equal[w];
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
}
