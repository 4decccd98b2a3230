// Score: the attention mass of every page from its summary alone.
//
//   S[g, p] = logsumexp over the tokens t of page p of  scale * (q_g . mu_p + (V_p q_g) . c_t)          (nats, fp32)
//
// Bytes decide: one record per page and KV head is read once; page_mass.cuh has the arithmetic.
//
// One block takes pages of HEADS heads in groups of 8: a producer warp brings each group's records by asynchronous copies (bulk ones
// from sm_90 on) into a ring of STAGES slots and says there which pages they are; warp (sub, head) takes every SUBS-th group.  Which
// pages a block gets is in work_list.cuh: a run of its own, and then what the fastest blocks come first for.  All HEADS heads of a
// page are one contiguous copy.  With at most 4 query heads a group and rank 8 eight consumer warps do as well as 16 (bytes
// bind) and leave room on the SM for the blocks that finish a new page and that select.
//
// APPEND_WARPS more warps write the step's new tokens and summarise the pages that they fill: beside the scoring, which needs
// neither, so that a step has one launch less and the 14 us of a page's summary do not show where the scorer takes as long.
#include "bulk.cuh"
#include "page_mass.cuh"
#include "summarise.cuh"

// Set by the launcher: HEADS KV heads per block, WARPS consumer warps, UNROLL page pairs (pages for G > 4)
// in flight per warp, APPEND_WARPS, SHARED_BYTES for the ring.
constexpr int SUBS = WARPS / HEADS;
constexpr int THREADS = 32 * (WARPS + 1 + APPEND_WARPS);
enum Ready { NOTHING, ALL_BUT_TOKEN, ALL };  // when this kernel starts; see `ready`
// With the appending warps a thread gets 96 registers, as if there were 640: more, and the selection's block would not fit beside.
constexpr int REGISTERS_OF = APPEND_WARPS && THREADS < 640 ? 640 : THREADS;
constexpr int STAGE_BYTES = GROUP_PAGES * PAGE_BYTES;
constexpr int STAGES = SHARED_BYTES / STAGE_BYTES;
static_assert(WARPS == HEADS * SUBS);
static_assert(STAGES >= SUBS, "a warp would wait for a slot that is several rounds behind");

// The records of `pages` pages into a slot; the whole warp calls, lane i with the address of page i, and `barrier` completes
// when they are there.  Before sm_90 each lane copies 16 bytes at a time and its arrival is one of COPY_ARRIVALS.  What lane 0 wrote
// before is there, too.
#if __CUDA_ARCH__ >= 900
constexpr int COPY_ARRIVALS = 1;
#else
constexpr int COPY_ARRIVALS = 33;  // and one of the lane that says which pages they are
#endif
__device__ __forceinline__ void copy_pages(uint32 to, const uint8* from, int pages, uint32 barrier, uint64 policy) {
    const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
    if (lane == 0) barrier_expect(barrier, pages * PAGE_BYTES);
    __syncwarp();
    if (lane < pages) copy_bulk(to + lane * PAGE_BYTES, from, PAGE_BYTES, barrier, policy);
#else
    for (int page = 0; page < pages; ++page) {
        const uint64 start = __shfl_sync(ALL_LANES, reinterpret_cast<uint64>(from), page);
        for (int at = 16 * lane; at < PAGE_BYTES; at += 16 * 32)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + page * PAGE_BYTES + at), "l"(start + at) : "memory");
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
    if (lane == 0) barrier_arrive(barrier);
#endif
}

// Pages of one sequence whose places are looked up together.
struct Piece {
    int sequence, page, pages;
};
// Of what is shared a block takes some 50 KB at once: reading them takes longer than looking up where they are.
constexpr int SHARED_PIECE = GROUP_PAGES * (STAGE_BYTES >= 49152 ? 1 : STAGE_BYTES >= 16384 ? 2 : LOOKED_UP / GROUP_PAGES);

// A block's way through the work list, by one warp.
struct Walk {
    const WorkList& list;
    const int* seq_lens;
    uint32* grabs;
    int recent_pages, sequence = 0;
    uint32 skipped = 0, length;  // pages of the sequences before `sequence`, and of it
    uint32 at, end;              // where it is, and the end of what is its own
    uint32 number = 0;           // of the piece that is this block's next, in lane 0
    bool asked = false;

    __device__ __forceinline__ Walk(const WorkList& list, const int* seq_lens, uint32* grabs, int recent_pages)
        : list(list), seq_lens(seq_lens), grabs(grabs), recent_pages(recent_pages) {
        at = list.begin(blockIdx.x), end = list.begin(blockIdx.x + 1);
        length = scored_pages(seq_lens[0], recent_pages);
    }
    __device__ __forceinline__ bool knows_next() const { return at < end; }
    __device__ __forceinline__ void ask() {
        if (threadIdx.x % 32 == 0) number = atomicAdd(grabs, 1u);
    }
    // No pages: there are no more, and it must not be called again.
    __device__ __forceinline__ Piece next() {
        if (at == end) {
            if (!list.shared) return {0, 0, 0};
            if (!asked) {
                wait_for_previous_kernel();  // or the counter may be that of a scorer that still runs
                asked = true;
                ask();
            }
            const uint32 mine = __shfl_sync(ALL_LANES, number, 0), first = list.run * gridDim.x;
            const uint32 pieces = (list.total - first + SHARED_PIECE - 1) / SHARED_PIECE;
            if (mine >= pieces) {
                if (mine == pieces + gridDim.x - 1 && threadIdx.x % 32 == 0) *grabs = 0;
                return {0, 0, 0};
            }
            at = first + mine * SHARED_PIECE, end = min(at + SHARED_PIECE, list.total);
            ask();  // one ahead: the answer takes its time
        }
        while (at - skipped >= length) skipped += length, length = scored_pages(seq_lens[++sequence], recent_pages);
        const Piece piece = {sequence, static_cast<int>(at - skipped),
                             static_cast<int>(min(min(skipped + length, end) - at, static_cast<uint32>(LOOKED_UP)))};
        at += piece.pages;
        return piece;
    }
};

constexpr int NO_MORE = -1;
// Pages `page` ... `page + pages` - 1 of a sequence, in a slot of the ring; or NO_MORE for its sequence.
struct __align__(8) Group {
    int sequence;
    uint32 page_and_pages;  // 16 page + pages
};

// summaries [num_pages, kv_heads, RECORD], pages summary_stride bytes apart; query [B, kv_heads * G, D], rows query_stride elements
// apart; scores [B, kv_heads * G, score_stride];
// partials [B, kv_heads * G, gridDim.x * SUBS] (largest, sum, smallest, -): log-sum-exp and least of the scores by warp, in powers of two.
// grabs [gridDim.y]: 0, and again in the end (work_list.cuh).
// ready: what no kernel that may still run writes: NOTHING is sure; ALL_BUT_TOKEN but the query, the new key and value; ALL.
// new_keys, new_values [B, kv_heads, D]: written at position seq_lens - 1 of keys and values (NewTokens); null for none.
extern "C" __global__ void __launch_bounds__(REGISTERS_OF, 1)
    score(uint8* summaries, const uint16* __restrict__ query, const int* __restrict__ block_table, const int* __restrict__ seq_lens,
          float* __restrict__ scores, float4* __restrict__ partials, uint32* grabs, int batch, int kv_heads, int max_pages,
          int score_stride, int recent_pages, int ready, int64 summary_stride, int64 query_stride, uint16* keys, uint16* values,
          const uint16* __restrict__ new_keys, const uint16* __restrict__ new_values, const int64* __restrict__ slots, int key_stride,
          int value_stride, int64 page_stride, int64 head_stride, int64 token_stride) {
    extern __shared__ __align__(128) uint8 stages[];
    __shared__ __align__(8) uint64 full[STAGES], empty[STAGES];
    __shared__ Group groups[STAGES];

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
    const int first_head = blockIdx.y * HEADS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared_address(&full[i]), COPY_ARRIVALS);
            barrier_init(shared_address(&empty[i]), HEADS);
        }
        barriers_ready();
    }
    __syncthreads();
    if (ready == NOTHING) wait_for_previous_kernel();
    let_next_kernel_start();  // the selection reads lengths as soon as it starts
#if APPEND_WARPS
    if (warp > WARPS) {
        __shared__ Scratch<1> scratch[APPEND_WARPS];
        const NewTokens tokens = {keys, values, new_keys, new_values, slots, key_stride, value_stride,
                                  page_stride, head_stride, token_stride};
        const int block = blockIdx.y * gridDim.x + blockIdx.x, blocks = gridDim.x * gridDim.y, own = warp - WARPS - 1;
        wait_for_previous_kernel();
        if (new_keys)
            for (int at = own * blocks + block; at < batch * kv_heads; at += APPEND_WARPS * blocks)
                append_token(scratch[own], tokens, block_table, seq_lens, summaries, at, kv_heads, max_pages, summary_stride);
        return;
    }
#endif

    const WorkList list(seq_lens, batch, 0, recent_pages, gridDim.x);
    if (warp == WARPS) {
        const uint64 policy = read_once_policy();
        int slot = 0, round = 0;
        Walk walk(list, seq_lens, grabs + blockIdx.y, recent_pages);
        const auto free_slot = [&] { barrier_wait(shared_address(&empty[slot]), (round & 1) ^ 1); };
        const auto next_slot = [&] {
            if (++slot == STAGES) slot = 0, ++round;
        };
        const auto place_of = [&](const Piece& of) {
            return lane < of.pages ? block_table[static_cast<int64>(of.sequence) * max_pages + of.page + lane] : 0;
        };
        Piece piece = walk.next(), next;
        int ids = place_of(piece), next_ids;
        while (piece.pages > 0) {
            const bool ahead = walk.knows_next();  // else it may have to wait, and is asked when the ring is full
            if (ahead) next = walk.next(), next_ids = place_of(next);
            for (int part = 0; part * GROUP_PAGES < piece.pages; ++part) {
                const int page = piece.page + part * GROUP_PAGES, pages = min(GROUP_PAGES, piece.page + piece.pages - page);
                const int id = __shfl_sync(ALL_LANES, ids, part * GROUP_PAGES + lane % GROUP_PAGES);
                free_slot();
                if (lane == 0) groups[slot] = {piece.sequence, 16u * page + pages};
                copy_pages(shared_address(stages + slot * STAGE_BYTES), summaries + id * summary_stride + first_head * RECORD, pages,
                           shared_address(&full[slot]), policy);
                next_slot();
            }
            if (!ahead) next = walk.next(), next_ids = place_of(next);
            piece = next, ids = next_ids;
        }
#pragma unroll 1
        for (int sub = 0; sub < SUBS; ++sub) {  // no more for any of them
            free_slot();
            if (lane == 0) groups[slot].sequence = NO_MORE;
            if (lane < COPY_ARRIVALS) barrier_arrive(shared_address(&full[slot]));
            if (COPY_ARRIVALS > 32 && lane == 0) barrier_arrive(shared_address(&full[slot]));
            next_slot();
        }
    } else {
        const int head = first_head + warp % HEADS, sub = warp / HEADS;
        int slot = sub, round = 0;
        if (ready != ALL) wait_for_previous_kernel();
        Query fragments;
        Running running[HEAD_TILES];
        const auto part_of = [&](int of, int query_head) -> float4& {
            return partials[static_cast<int64>(((of * kv_heads + head) * G + query_head) * gridDim.x + blockIdx.x) * SUBS + sub];
        };
        const auto load_query_of = [&](int of) {
            load_query(fragments, query + of * query_stride + head * (G * D), row, quad);
        };
        const uint32 begin = list.begin(blockIdx.x), end = list.begin(blockIdx.x + 1);
        int sequence = 0;  // of the first group, so that its query is there when the group is
        uint32 skipped = 0;
        for (uint32 n; begin < end && skipped + (n = scored_pages(seq_lens[sequence], recent_pages)) <= begin; ++sequence) skipped += n;
        if (begin < end) load_query_of(sequence);
        if (SUBS > 1 || list.shared) {  // not every warp has pages of each sequence whose parts the selection reads
            skipped = 0;
            for (int i = 0; i < batch; ++i) {
                const uint32 pages = scored_pages(seq_lens[i], recent_pages);
                const bool read = list.shared || max(begin, skipped) < min(end, skipped + pages);
                if (read && lane < G) part_of(i, lane) = make_float4(LOWEST, 0.f, -LOWEST, 0.f);
                skipped += pages;
            }
            __syncwarp();
        }
        while (true) {
            // A barrier's parity tells a round from the one before only when that one is over.  If it was another warp's,
            // its copies may still be on their way, overtaken by later ones: wait until that warp has given the slot back.
            if (STAGES % SUBS) barrier_wait(shared_address(&empty[slot]), (round & 1) ^ 1);
            barrier_wait(shared_address(&full[slot]), round & 1);
            // By the lane that gives the slot back, so that racecheck, too, sees that nobody reads it any more.
            Group group = {};
            if (lane == 0) group = groups[slot];
            const int its_sequence = __shfl_sync(ALL_LANES, group.sequence, 0);
            const uint32 its_pages = __shfl_sync(ALL_LANES, group.page_and_pages, 0);
            if (its_sequence != sequence) {
                if (begin < end) {
#pragma unroll
                    for (int tile = 0; tile < HEAD_TILES; ++tile) {
                        join_lanes<true>(running[tile]);
                        const int query_head = PAIRED ? row : tile * 8 + row;
                        if (quad == 0 && query_head < G)
                            part_of(sequence, query_head) = make_float4(running[tile].largest, running[tile].sum, running[tile].smallest, 0.f);
                        running[tile] = Running();
                    }
                }
                sequence = its_sequence;
                if (sequence == NO_MORE) break;
                load_query_of(sequence);
            }
            const uint8* records = stages + slot * STAGE_BYTES + (warp % HEADS) * RECORD;
            const int page = its_pages / 16, stop = page + its_pages % 16, lane_page = page + first_kept(row, quad);
            float mass[KEPT];
            group_masses(mass, fragments, records, lane_page, stop, row, quad);
            __syncwarp();
            if (lane == 0) barrier_arrive(shared_address(&empty[slot]));
            float* rows = scores + static_cast<int64>((sequence * kv_heads + head) * G) * score_stride;
#pragma unroll
            for (int i = 0; i < KEPT; ++i) {
                const int query_head = kept_head(i, row), at_page = lane_page + i % 2;
                if (query_head < G && at_page < stop) {
                    rows[static_cast<int64>(query_head) * score_stride + at_page] = mass[i] * LN_2;
                    include(running[i / 2], mass[i]);
                }
            }
            slot += SUBS;
            if (slot >= STAGES) slot -= STAGES, ++round;
        }
    }
    // Whoever waits for this kernel may count on the previous one too.
    wait_for_previous_kernel();
}
