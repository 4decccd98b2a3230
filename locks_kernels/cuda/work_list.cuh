// The scorer's work list.  The scored pages, sequence after sequence, form one list that is cut into equal runs, one per block.
// `select` uses the same arithmetic to find the blocks that scored a sequence.
#pragma once
#include "common.cuh"

constexpr int GROUP_PAGES = 8;  // pages that a warp takes at a time

__device__ __forceinline__ int scored_pages(int length, int recent_pages) {
    return max((length + PAGE - 1) / PAGE - recent_pages, 0);
}

struct WorkList {
    uint32 total, before;  // pages of all sequences, and of those in front of one
    uint32 blocks;         // that have work; a block has no less than a group while there are enough pages

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
    }
    // First page of a block: total * block / blocks, which could exceed 32 bits.
    __device__ __forceinline__ uint32 begin(uint32 block) const {
        return block < blocks ? total / blocks * block + total % blocks * block / blocks : total;
    }
    // The block whose run holds `page`: the last one with begin <= page.
    __device__ __forceinline__ uint32 owner(uint32 page) const {
        return static_cast<uint32>((static_cast<uint64>(page + 1) * blocks - 1) / total);
    }
};
