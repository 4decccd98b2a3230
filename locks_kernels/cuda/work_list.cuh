// The scorer's work list, and what it leaves of each sequence.  The scored pages, sequence after sequence, form one list.
//
// Few pages are cut into equal runs, one per block; `select` uses the same arithmetic to find the blocks that scored a sequence.
//
// Of many, a block's run is three quarters of that, and the rest goes in pieces to whoever comes first: blocks read equal bytes in
// times that differ by some 10 % (measured at 1M tokens on an H200: the first is done 93 us after the start, the last 113).  A
// counter in memory gives the pieces out.  Each block stops at the first piece that there is not, so the block that gets the last of
// those numbers knows that nobody will ask again, and sets the counter to 0.
#pragma once
#include "common.cuh"

constexpr int GROUP_PAGES = 8;  // pages that a warp takes at a time
constexpr int LOOKED_UP = 32;   // pages whose places are looked up at once
// Every block leaves a part of each sequence of a list that is shared, and the selection reads them all: 16 sequences of 8K tokens
// took 62 us so, and 58 in runs (H200).  So such a list has at least so many pages a block, and a group for each sequence.
constexpr int MOST_SHARED = 32;  // sequences
constexpr uint32 LEAST_SHARED = 40;

__device__ __forceinline__ int scored_pages(int length, int recent_pages) {
    return max((length + PAGE - 1) / PAGE - recent_pages, 0);
}

struct WorkList {
    uint32 total, before;  // pages of all sequences, and of those in front of one
    uint32 blocks;         // that have a run; a block has no less than a group while there are enough pages
    uint32 run;            // pages of a block's run where the rest is shared
    bool shared;

    // The whole warp must call.
    __device__ __forceinline__ WorkList(const int* seq_lens, int batch, int sequence, int recent_pages, uint32 grid_blocks) {
        total = before = 0;
        for (int i = threadIdx.x % 32; i < batch; i += 32) {
            const uint32 pages = scored_pages(seq_lens[i], recent_pages);
            total += pages;
            before += i < sequence ? pages : 0;
        }
        total = warp_sum(total), before = warp_sum(before);
        blocks = min(grid_blocks, (total + GROUP_PAGES - 1) / GROUP_PAGES);
        run = total / grid_blocks;
        shared = batch <= MOST_SHARED && run >= max(LEAST_SHARED, static_cast<uint32>(GROUP_PAGES * batch));
        run = run / 4 * 3 / GROUP_PAGES * GROUP_PAGES;
    }
    // First page of a block's run: total * block / blocks, which could exceed 32 bits.
    __device__ __forceinline__ uint32 begin(uint32 block) const {
        if (shared) return block * run;
        return block < blocks ? total / blocks * block + total % blocks * block / blocks : total;
    }
    // The block whose run holds `page`, where none are shared: the last one with begin <= page.
    __device__ __forceinline__ uint32 owner(uint32 page) const {
        return static_cast<uint32>((static_cast<uint64>(page + 1) * blocks - 1) / total);
    }
};

// Of a head: exponent of 2 to subtract from its scores, what its best and its last page then have.
struct Scale {
    float offset, best, last;
};
// From the scorer's parts, float4 (largest, sum, smallest, -), or float2 without the smallest and 0 for `last`; the whole warp calls.
template <bool LEAST, class Part>
__device__ __forceinline__ Scale normaliser(const Part* parts, int first, int last, bool share) {
    constexpr int AT_ONCE = G <= 4 ? 5 : 9;  // 132 blocks in one go, where registers allow no more
    float largest = LOWEST, sum = 0.f, smallest = -LOWEST;
#pragma unroll 1
    for (int from = first + threadIdx.x % 32; from < last + static_cast<int>(threadIdx.x % 32); from += 32 * AT_ONCE) {
        Part part[AT_ONCE];
        float next = largest;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            part[i].x = LOWEST, part[i].y = 0.f;
            if constexpr (LEAST) part[i].z = -LOWEST;
            if (from + 32 * i < last) part[i] = parts[from + 32 * i];
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            next = fmaxf(next, part[i].x);
            if constexpr (LEAST) smallest = fminf(smallest, part[i].z);
        }
        sum *= exp2_fast(largest - next);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) sum = fmaf(part[i].y, exp2_fast(part[i].x - next), sum);
        largest = next;
    }
    float top = largest;
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) {
        top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, apart));
        if (LEAST) smallest = fminf(smallest, __shfl_xor_sync(ALL_LANES, smallest, apart));
    }
    sum *= exp2_fast(largest - top);
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, apart);
    const float offset = share ? top + log2_fast(sum * G) : top;
    return {offset, exp2_fast(top - offset), LEAST ? exp2_fast(smallest - offset) : 0.f};
}
