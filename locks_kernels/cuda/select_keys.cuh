// The best pages of one (sequence, KV head), exactly, whatever the data: a radix search by BLOCKS blocks of a cluster, each with the
// keys of its slice of the pages in shared memory.
//
// A page's key is the distance of its combined score from an upper bound, counted in floats (non-negative floats order like their
// bits), so the best page has the smallest key.  Rounds of a radix search over the blocks, one barrier each, narrow down the key
// of the last page kept: the first digit is the upper BITS bits of what lies between the bounds of the scores, at most of 16
// octaves (what lies below shares the last bin and is searched from the top), the next ones are the BITS bits below.  Once the bin
// in question has few keys, after one or two rounds unless they lie in crowds, every block sends them to all others together with
// the number of its keys above the bin, and each ranks them for itself: a second barrier, and the last.  Page ids come out in ascending order; of equal keys the lowest pages are kept, also when there are too
// many of them to send: a round also finds the smallest and the largest key that it counts, and if they are the same nothing is left
// to narrow down.
//
// At small contexts this is a chain of latencies (about 1,000 cycles a barrier round over a cluster), so the passes over the keys take
// four at a time and skip where none matters.
#pragma once
#include "work_list.cuh"

constexpr int SELECT_WARPS = SELECT_THREADS / 32;  // SELECT_THREADS: of a block, a macro of the launcher
constexpr int BITS = SELECT_THREADS == 512 ? 8 : 7, BINS = 1 << BITS;
static_assert(SELECT_THREADS == 2 * BINS, "two threads a bin");
constexpr int FIRST_SHIFT = 27 - BITS, MAX_ROUNDS = 6;  // 2^19 floats are a sixteenth of an octave
constexpr uint32 EXCLUDED = 0xffffffffu;  // key of a page that is not ranked: a sink page, or behind the slice
constexpr int CANDIDATES = 64;            // keys of one bin that are ranked directly ...
constexpr int RANKERS = SELECT_THREADS / CANDIDATES;  // ... by so many threads each
constexpr int COPIES = 16;                       // of the histogram: at most two lanes meet at an address, whatever the data

template <int BLOCKS>
struct Search {
    uint32 block_totals[MAX_ROUNDS][BINS];
    __align__(16) uint32 totals[BINS];
    uint32 warp_above[32], warp_equal[32];
    uint32 block_above[BLOCKS], block_equal[BLOCKS];                            // of every block, sent by them
    __align__(16) uint32 candidate_key[CANDIDATES], candidate_page[CANDIDATES];  // of all blocks
    uint32 own_key[CANDIDATES], own_page[CANDIDATES];
    uint32 own_candidates, candidates_before, chosen_before;
    uint32 begin, length;  // of this block's slice
    uint32 digit, still_needed, in_bin;
    uint32 block_lowest[MAX_ROUNDS], block_highest[MAX_ROUNDS], lowest, highest;  // keys that a round counts
};

// The whole block calls, and waits for itself before keep_best.  histogram: [BINS][COPIES], zero between rounds.
template <int BLOCKS>
__device__ __forceinline__ void clear(Search<BLOCKS>& memory, uint32* histogram) {
    const int tid = threadIdx.x;
    for (int i = tid; i < BINS * COPIES / 4; i += SELECT_THREADS) reinterpret_cast<uint4*>(histogram)[i] = make_uint4(0, 0, 0, 0);
    if (tid < 32) memory.warp_above[tid] = memory.warp_equal[tid] = 0;
    if (tid < MAX_ROUNDS) memory.block_lowest[tid] = EXCLUDED, memory.block_highest[tid] = 0;
    if (tid == 0) memory.own_candidates = memory.chosen_before = 0;
}

// The keys of a block's slice, from the scores of the G heads.
struct Keys {
    const float* rows;  // [G] nats, `stride` apart, of the pages begin ... begin + length - 1; readable up to the next multiple of 4
    int64 stride;
    int begin, length, sink_pages;

    // Writes `padded` keys and returns the shift of the first digit.
    __device__ __forceinline__ int make(uint32* page_keys, int padded, const Scale (&scales)[G]) const {
        float best = 0.f, last = 0.f, size = 0.f;
#pragma unroll 4
        for (int g = 0; g < G; ++g) best += scales[g].best, last += scales[g].last, size = fmaxf(size, fabsf(scales[g].offset));
        // Rounding moves an exponent by some 2^-23 of it, so a power by that many floats: no key is 0 while scores stay within some
        // ten thousand nats; beyond, the best pages tie.
        const uint32 rounding = 64 + static_cast<uint32>(fminf(4.f * size, 65472.f)), top = __float_as_uint(best) + rounding;
        const uint32 span = top - min(__float_as_uint(last), top - 1) + rounding;
        const int shift = max(32 - __clz(span) - BITS, 0);
#pragma unroll 2
        for (int i = 4 * threadIdx.x; i < padded; i += 4 * SELECT_THREADS) {
            float combined[4] = {};
            if (i < length) {
                float4 scores[G];
#pragma unroll
                for (int g = 0; g < G; ++g)  // rows are padded to 8 pages: reading past `length` stays inside
                    scores[g] = *reinterpret_cast<const float4*>(rows + g * stride + i);
#pragma unroll
                for (int g = 0; g < G; ++g) {
                    const float offset = scales[g].offset;
                    combined[0] += exp2_fast(fmaf(scores[g].x, LOG2_E, -offset));
                    combined[1] += exp2_fast(fmaf(scores[g].y, LOG2_E, -offset));
                    combined[2] += exp2_fast(fmaf(scores[g].z, LOG2_E, -offset));
                    combined[3] += exp2_fast(fmaf(scores[g].w, LOG2_E, -offset));
                }
            }
            uint32 key[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                key[j] = i + j < length && begin + i + j >= sink_pages ? top - min(__float_as_uint(combined[j]), top - 1) : EXCLUDED;
            *reinterpret_cast<uint4*>(page_keys + i) = make_uint4(key[0], key[1], key[2], key[3]);
        }
        return min(shift + (span >> shift == BINS - 1), FIRST_SHIFT);  // no key within the bounds reaches the last bin
    }
};

// Writes the `ranked` best pages to `tables` from place `table` on, in ascending order.  The whole block calls, all of a cluster if
// BLOCKS > 1.  page_keys: room for `padded` keys, the slice up to a multiple of 128.
template <int BLOCKS>
__device__ __forceinline__ void keep_best(Search<BLOCKS>& memory, uint32* histogram, uint32* page_keys, const Keys& keys,
                                          const Scale (&scales)[G], int padded, uint32 ranked, int* tables, uint32 table) {
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const uint32 rank = BLOCKS > 1 ? cluster_rank() : 0;
    if (tid == 0) memory.begin = keys.begin, memory.length = keys.length;  // read when needed: registers are few
    // Keys below `limit` are kept, and the `needed` best ones of those from `limit` on.
    uint32 limit = 0, needed = ranked;
    bool direct = false;  // the bin's keys are ranked directly
    int shift = keys.make(page_keys, padded, scales);
#pragma unroll 1
    for (int round = 0; round < MAX_ROUNDS; ++round) {
        const bool first = round == 0;
        uint32 least = EXCLUDED, most = 0;
        for (int i = 4 * tid; i < padded; i += 4 * SELECT_THREADS) {
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
        if (lane == 0) atomicMin(&memory.block_lowest[round], least), atomicMax(&memory.block_highest[round], most);
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
            memory.block_totals[round][tid / 2] = sum;
        }
        cluster_sync<BLOCKS>();
        constexpr int HALF = BLOCKS > 1 ? BLOCKS / 2 : 1;
        const int from = BLOCKS > 1 ? tid % 2 * HALF : 0;
        uint32 parts[HALF];
#pragma unroll
        for (int block = 0; block < HALF; ++block) parts[block] = load_from_block<BLOCKS>(&memory.block_totals[round][tid / 2], from + block);
        uint32 total = 0;
#pragma unroll
        for (int block = 0; block < HALF; ++block) total += parts[block];
        if (BLOCKS > 1) total += __shfl_xor_sync(ALL_LANES, total, 1);
        memory.totals[tid / 2] = total;
        __syncthreads();
        if (warp == 0) {
            constexpr int OWN = BINS / 32;  // bins of a lane
            uint32 bins[OWN];
#pragma unroll
            for (int j = 0; j < OWN; j += 4) {
                const uint4 four = *reinterpret_cast<const uint4*>(memory.totals + OWN * lane + j);
                bins[j] = four.x, bins[j + 1] = four.y, bins[j + 2] = four.z, bins[j + 3] = four.w;
            }
            uint32 own = 0;
#pragma unroll
            for (int j = 0; j < OWN; ++j) own += bins[j];
            uint32 before = own;
#pragma unroll
            for (int apart = 1; apart < 32; apart *= 2) {
                const uint32 other = __shfl_up_sync(ALL_LANES, before, apart);
                if (lane >= apart) before += other;
            }
            before -= own;
            if (before < needed && needed <= before + own) {
#pragma unroll
                for (int j = 0; j < OWN; ++j) {
                    if (before < needed && needed <= before + bins[j]) {
                        memory.digit = OWN * lane + j;
                        memory.still_needed = needed - before;
                        memory.in_bin = bins[j];
                    }
                    before += bins[j];
                }
            }
        }
        if (warp == 1) {
            least = lane < BLOCKS ? load_from_block<BLOCKS>(&memory.block_lowest[round], lane) : EXCLUDED;
            most = lane < BLOCKS ? load_from_block<BLOCKS>(&memory.block_highest[round], lane) : 0;
            least = __reduce_min_sync(ALL_LANES, least), most = __reduce_max_sync(ALL_LANES, most);
            if (lane == 0) memory.lowest = least, memory.highest = most;
        }
        __syncthreads();
        if (memory.lowest == memory.highest) {
            limit = memory.lowest;
            break;
        }
        const bool open_bin = first && memory.digit == BINS - 1;  // has no upper end
        limit += memory.digit << shift;
        needed = memory.still_needed;
        if (needed == memory.in_bin) {  // all of the bin
            limit = open_bin ? EXCLUDED : limit + (1u << shift);
            needed = 0;
            break;
        }
        if (memory.in_bin <= CANDIDATES && !open_bin) {
            uint32 before = 0;
#pragma unroll
            for (int block = 0; block < HALF; ++block) before += from + block < static_cast<int>(rank) ? parts[block] : 0u;
            if (BLOCKS > 1) before += __shfl_xor_sync(ALL_LANES, before, 1);
            if (tid / 2 == static_cast<int>(memory.digit)) memory.candidates_before = before;
            direct = true;
            break;
        }
        if (shift == 0 && !open_bin) break;
        shift = open_bin ? 32 - BITS : max(shift - BITS, 0);
    }

    // Each warp owns a run of its block's slice.
    const int run = (padded + 4 * SELECT_THREADS - 1) / (4 * SELECT_THREADS) * 128, from = min(warp * run, padded), to = min(from + run, padded);
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
                const uint32 at = atomicAdd(&memory.own_candidates, 1u);
                (BLOCKS > 1 ? memory.own_key : memory.candidate_key)[at] = key[j];
                (BLOCKS > 1 ? memory.own_page : memory.candidate_page)[at] = memory.begin + i + j;
            }
        }
    }
    above = warp_sum(above), equal = warp_sum(equal);
    if (lane == 0) memory.warp_above[warp] = above, memory.warp_equal[warp] = equal;
    if constexpr (BLOCKS > 1) {
        __syncthreads();
        if (warp == 0) {
            const uint32 sum_above = warp_sum(memory.warp_above[lane]), sum_equal = warp_sum(memory.warp_equal[lane]);
            if (lane < BLOCKS) {
                store_to_block<BLOCKS>(&memory.block_above[rank], lane, sum_above);
                store_to_block<BLOCKS>(&memory.block_equal[rank], lane, sum_equal);
            }
        }
        for (int i = tid; direct && i < memory.own_candidates * BLOCKS; i += SELECT_THREADS) {
            const int at = memory.candidates_before + i / BLOCKS;
            store_to_block<BLOCKS>(&memory.candidate_key[at], i % BLOCKS, memory.own_key[i / BLOCKS]);
            store_to_block<BLOCKS>(&memory.candidate_page[at], i % BLOCKS, memory.own_page[i / BLOCKS]);
        }
    }
    cluster_sync<BLOCKS>();
    if (direct) {
        const int mine = tid / RANKERS;
        uint32 better = 0, key = EXCLUDED, page = 0;
        if (mine < static_cast<int>(memory.in_bin)) {
            key = memory.candidate_key[mine], page = memory.candidate_page[mine];
#pragma unroll 8
            for (int i = tid % RANKERS; i < CANDIDATES; i += RANKERS) {  // all places, so that their loads do not wait for one another
                const uint32 other = memory.candidate_key[i], its_page = memory.candidate_page[i];
                better += (i < static_cast<int>(memory.in_bin)) & ((other < key) | ((other == key) & (its_page < page)));
            }
        }
#pragma unroll
        for (int apart = RANKERS / 2; apart > 0; apart /= 2) better += __shfl_xor_sync(ALL_LANES, better, apart);
        if (tid % RANKERS == 0 && mine < static_cast<int>(memory.in_bin) && better < needed) {
            if (page < memory.begin) atomicAdd(&memory.chosen_before, 1u);
            else if (const uint32 own = page - memory.begin; own < memory.length) {
                page_keys[own] = 0;  // from here on like a key above the bin; no real one is 0
                atomicAdd(&memory.warp_above[own / run], 1u);
            }
        }
        __syncthreads();
        limit = max(limit, 1u), needed = 0;
    }
    uint32 above_before = warp_sum((lane < rank ? memory.block_above[lane % BLOCKS] : 0u) + (lane < warp ? memory.warp_above[lane] : 0u));
    uint32 equal_before = warp_sum((lane < rank ? memory.block_equal[lane % BLOCKS] : 0u) + (lane < warp ? memory.warp_equal[lane] : 0u));
    above_before += memory.chosen_before;
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
            if (is_above || (is_equal && my_equal < needed)) tables[table + my_above + min(my_equal, needed)] = memory.begin + i + j;
            my_above += is_above, my_equal += is_equal;
        }
    }
}
