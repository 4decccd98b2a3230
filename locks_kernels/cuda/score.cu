// Score: the attention mass of every page from its summary alone.
//
//   S[g, p] = logsumexp over the tokens t of page p of  scale * (q_g . mu_p + (V_p q_g) . c_t)          (nats, fp32)
//
// Bytes decide: one record per page and KV head is read once.  The arithmetic, about 60 warp instructions a record, is laid
// out so that no value changes lanes between the two matrix products:
//  * The query is int16, split in a high and a low byte; heads are the rows 0-7 of the A operand with the high bytes and
//    rows 8-15 with the low ones, so a lane gets both halves of the same sum and joins them as exact integers.
//  * The basis is the B operand.  A lane's 16-byte load is 32 channels of one basis vector; the contraction axis is permuted
//    (even channels, then odd ones) so that unpacking eight int4 takes three instructions: a nibble kept in the upper half
//    of its byte is the signed value times 16.
//  * The product's C layout (row = head, columns 2 quad, 2 quad + 1 = ranks) is the A layout of the next product, with the
//    fp16 value in rows 0-7 and what fp16 lost in rows 8-15: about 22 bits.
//  * With at most 4 heads a group, rows 0-3 serve an even page and rows 4-7 the odd one behind it (block diagonal).
//
// One block owns a run of pages of HEADS heads and takes them in groups of 8: a producer warp brings each group's records by
// asynchronous copies (bulk ones from sm_90 on) into a ring of STAGES slots; warp (sub, head) takes every SUBS-th group.  All
// HEADS heads of a page are one contiguous copy.  With at most 4 query heads a group eight consumer warps do as well as 16 (bytes
// bind) and leave room on the SM for the blocks that finish a new page and that select.
#include "common.cuh"

// Set by the launcher: HEADS KV heads per block, WARPS consumer warps, UNROLL page pairs (pages for G > 4)
// in flight per warp, SHARED_BYTES for the ring.
constexpr int SUBS = WARPS / HEADS;
constexpr int THREADS = 32 * (WARPS + 1);
constexpr int PAGE_BYTES = HEADS * RECORD;
constexpr int STAGE_BYTES = GROUP_PAGES * PAGE_BYTES;
constexpr int STAGES = SHARED_BYTES / STAGE_BYTES;
static_assert(WARPS == HEADS * SUBS);
static_assert(STAGES >= SUBS, "a warp would wait for a slot that is several rounds behind");

constexpr int STEPS = D / 32;            // 32-channel steps of the projection
constexpr bool PAIRED = G <= 4;          // two pages share one A operand
constexpr int HEAD_TILES = (G + 7) / 8;  // groups of up to 8 query heads
constexpr int TOKEN_TILES = PAGE / 8;

__device__ __forceinline__ void barrier_init(uint32 barrier, uint32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32 barrier) {
    asm volatile("{.reg .b64 s; mbarrier.arrive.shared.b64 s, [%0];}" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32 barrier, uint32 parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{.reg .pred p;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@!p bra again;}" ::"r"(barrier), "r"(parity) : "memory");
#else
    asm volatile(
        "{.reg .pred p; .reg .b64 s;\n"
        "again: mbarrier.test_wait.parity.shared.b64 p, [%0], %1;\n"
        "@!p bra again;}" ::"r"(barrier), "r"(parity) : "memory");
#endif
}

// Records are read once: they leave the second-level cache first, so that scores, block table and query stay for `select`.
__device__ __forceinline__ uint64 read_once_policy() {
    uint64 policy = 0;
#if __CUDA_ARCH__ >= 900
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
    return policy;
}

// The records of `pages` pages into a slot; the whole warp calls, lane i with the address of page i, and `barrier` completes
// when they are there.  Before sm_90 each lane copies 16 bytes at a time and its arrival is one of COPY_ARRIVALS.
#if __CUDA_ARCH__ >= 900
constexpr int COPY_ARRIVALS = 1;
#else
constexpr int COPY_ARRIVALS = 32;
#endif
__device__ __forceinline__ void copy_pages(uint32 to, const uint8* from, int pages, uint32 barrier, uint64 policy) {
    const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
    if (lane == 0)
        asm volatile("{.reg .b64 s; mbarrier.arrive.expect_tx.shared::cta.b64 s, [%0], %1;}" ::"r"(barrier), "r"(pages * PAGE_BYTES)
                     : "memory");
    __syncwarp();
    if (lane < pages)
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
                to + lane * PAGE_BYTES),
            "l"(from), "r"(PAGE_BYTES), "r"(barrier), "l"(policy)
            : "memory");
#else
    for (int page = 0; page < pages; ++page) {
        const uint64 start = __shfl_sync(ALL_LANES, reinterpret_cast<uint64>(from), page);
        for (int at = 16 * lane; at < PAGE_BYTES; at += 16 * 32)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + page * PAGE_BYTES + at), "l"(start + at) : "memory");
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
#endif
}

struct Query {
    uint32 a[HEAD_TILES][STEPS][4];  // {high even, low even, high odd, low odd} channels of this lane's head
    float factor[HEAD_TILES];        // integer product -> logit in powers of two
};

// Quantises the query heads of one KV head to int16.  A lane holds channels [quad * D/4, +D/4) of head `row`.
__device__ __forceinline__ void load_query(Query& query, const uint16* heads, int row, int quad) {
#pragma unroll
    for (int tile = 0; tile < HEAD_TILES; ++tile) {
        const int head = PAIRED ? row & 3 : tile * 8 + row;
        uint4 raw[STEPS];
        float largest = 0.f;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const uint16* from = heads + head * D + quad * (D / 4) + step * 8;
            raw[step] = head < G ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
            const uint32 words[4] = {raw[step].x, raw[step].y, raw[step].z, raw[step].w};
#pragma unroll
            for (int w = 0; w < 4; ++w) largest = fmaxf(largest, fmaxf(fabsf(low_of(words[w])), fabsf(high_of(words[w]))));
        }
        largest = quad_max(largest);
        const float bound = 32639.f;  // 127 * 256 + 127: the high byte stays within int8
        const float inverse = largest > 0.f ? bound / largest : 0.f;
        query.factor[tile] = largest / bound * (SOFTMAX_SCALE * LOG2_E);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const uint32 words[4] = {raw[step].x, raw[step].y, raw[step].z, raw[step].w};
            uint32 a[4] = {0, 0, 0, 0};
#pragma unroll
            for (int w = 0; w < 4; ++w) {
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
                    const int value = __float2int_rn((odd ? high_of(words[w]) : low_of(words[w])) * inverse);
                    const int high = (value + 128) >> 8;
                    a[2 * odd] |= static_cast<uint32>(high & 0xff) << (8 * w);
                    a[2 * odd + 1] |= static_cast<uint32>((value - (high << 8)) & 0xff) << (8 * w);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) query.a[tile][step][i] = a[i];
        }
    }
}

template <int WORDS>
__device__ __forceinline__ void load_words(uint32 (&words)[WORDS], const uint8* from) {
    if constexpr (WORDS % 4 == 0) {
#pragma unroll
        for (int i = 0; i < WORDS; i += 4) {
            const uint4 part = *reinterpret_cast<const uint4*>(from + 4 * i);
            words[i] = part.x, words[i + 1] = part.y, words[i + 2] = part.z, words[i + 3] = part.w;
        }
    } else {
        const uint2 part = *reinterpret_cast<const uint2*>(from);
        words[0] = part.x, words[1] = part.y;
    }
}

// 16 * V q of one page as integers: c[0..1] high and c[2..3] low halves; row = head, columns = ranks 2 quad, 2 quad + 1.
__device__ __forceinline__ void project(int (&c)[HEAD_TILES][4], const Query& query, const uint8* record, int row, int quad) {
    uint32 words[STEPS] = {};
    if (R == 8 || row < R) load_words(words, record + BASIS_AT + row * (D / 2) + quad * (D / 8));
#pragma unroll
    for (int tile = 0; tile < HEAD_TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) c[tile][i] = 0;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const uint32 even = (words[step] << 4) & 0xf0f0f0f0u, odd = words[step] & 0xf0f0f0f0u;
#pragma unroll
        for (int tile = 0; tile < HEAD_TILES; ++tile) mma_s8(c[tile], query.a[tile][step], even, odd);
    }
}

// The int8 coefficients of one token for ranks 2 quad, 2 quad + 1, as two halves.
__device__ __forceinline__ uint32 coefficients(const uint8* record, int token, int quad) {
    if (R < 8 && 2 * quad >= R) return 0;
    const uint32 bytes = *reinterpret_cast<const uint16*>(record + COEFFICIENTS_AT + token * R + 2 * quad);
    // 0x64xx is the half 1024 + xx; with the sign bit flipped xx is value + 128
    const uint32 biased = __byte_perm(bytes ^ 0x8080u, 0x64646464u, 0x4140);
    uint32 halves;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(biased), "r"(0x64806480u));
    return halves;
}

struct Projected {
    uint32 high, low;  // halves of ranks 2 quad, 2 quad + 1; `low` is what rounding `high` lost
};
__device__ __forceinline__ Projected scale_projection(const int (&c)[4], const uint8* record, float factor, int quad) {
    const uint32 scales =
        R == 8 || 2 * quad < R ? *reinterpret_cast<const uint32*>(record + BASIS_SCALE_AT + 4 * quad) : 0u;
    const float x0 = static_cast<float>(c[0] * 256 + c[2]) * (factor * 0.0625f * bf16_low(scales));
    const float x1 = static_cast<float>(c[1] * 256 + c[3]) * (factor * 0.0625f * bf16_high(scales));
    const uint32 high = pack_f16(x0, x1);
    return {high, pack_f16(x0 - f16_low(high), x1 - f16_high(high))};
}

// Logits of 8 tokens, before the token's scale: row = head (high half, low half 8 rows below), columns 2 quad, 2 quad + 1.
struct PageLogits {
    const uint8* record;
    Projected p;
    int row, quad;
    __device__ __forceinline__ void operator()(int tile, float (&c)[4]) const {
        mma_f16_k8(c, p.high, p.low, coefficients(record, 8 * tile + row, quad));
    }
};
struct PairLogits {  // rows 0-3 (and 8-11) the first page, 4-7 (and 12-15) the second
    const uint8 *first, *second;
    uint32 a0, a1, a2, a3;
    int row, quad;
    __device__ __forceinline__ void operator()(int tile, float (&c)[4]) const {
        mma_f16(c, a0, a1, a2, a3, coefficients(first, 8 * tile + row, quad), coefficients(second, 8 * tile + row, quad));
    }
};

// log-sum-exp over a page's tokens, in powers of two, of the logits `tile_logits(tile, c)` leaves in c (high + low rows).
// Without a maximum it is safe while logits (the centroid apart) stay within +-126; `SAFE` subtracts the maximum.
template <bool SAFE, class TileLogits>
__device__ __forceinline__ float token_sum(const TileLogits& tile_logits, const uint8* record, int quad, float& largest) {
    float logits[2 * TOKEN_TILES];
#pragma unroll
    for (int tile = 0; tile < TOKEN_TILES; ++tile) {
        float c[4] = {0.f, 0.f, 0.f, 0.f};
        tile_logits(tile, c);
        const uint32 scales = *reinterpret_cast<const uint32*>(record + COEFFICIENT_SCALE_AT + 16 * tile + 4 * quad);
        logits[2 * tile] = (c[0] + c[2]) * bf16_low(scales);
        logits[2 * tile + 1] = (c[1] + c[3]) * bf16_high(scales);
    }
    if constexpr (SAFE) {
        largest = logits[0];
#pragma unroll
        for (int i = 1; i < 2 * TOKEN_TILES; ++i) largest = fmaxf(largest, logits[i]);
        largest = quad_max(largest);
    }
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 2 * TOKEN_TILES; ++i) sum += exp2_fast(SAFE ? logits[i] - largest : logits[i]);
    return quad_sum(sum);
}

// Values per lane of one group: PAIRED: head row % 4, page 2 quad + row / 4.  Else: head row of each tile, pages 2 quad, + 1.
constexpr int KEPT = PAIRED ? 1 : 2 * HEAD_TILES;

// log2 of the token sums, centroid apart, of 8 pages (`stride` bytes between their records).
template <bool SAFE>
__device__ __forceinline__ void page_masses(float (&mass)[KEPT], const Query& query, const uint8* records, int row, int quad) {
    if constexpr (PAIRED) {
        const bool even = row < 4;
#pragma unroll SAFE ? 1 : UNROLL
        for (int pair = 0; pair < GROUP_PAGES / 2; ++pair) {
            const uint8* first = records + 2 * pair * PAGE_BYTES;
            const uint8* second = first + PAGE_BYTES;
            const uint8* mine = even ? first : second;
            int c0[HEAD_TILES][4], c1[HEAD_TILES][4];
            project(c0, query, first, row, quad);
            project(c1, query, second, row, quad);
            const int c[4] = {even ? c0[0][0] : c1[0][0], even ? c0[0][1] : c1[0][1], even ? c0[0][2] : c1[0][2],
                              even ? c0[0][3] : c1[0][3]};
            const Projected p = scale_projection(c, mine, query.factor[0], quad);
            const PairLogits logits = {first, second, even ? p.high : 0u, even ? p.low : 0u, even ? 0u : p.high,
                                       even ? 0u : p.low, row, quad};
            float largest = 0.f;
            const float sum = token_sum<SAFE>(logits, mine, quad, largest);
            if (quad == pair) mass[0] = SAFE ? log2_fast(sum) + largest : sum;
        }
    } else {
#pragma unroll SAFE ? 1 : UNROLL
        for (int page = 0; page < GROUP_PAGES; ++page) {
            const uint8* record = records + page * PAGE_BYTES;
            int c[HEAD_TILES][4];
            project(c, query, record, row, quad);
#pragma unroll
            for (int head_tile = 0; head_tile < HEAD_TILES; ++head_tile) {
                const Projected p = scale_projection(c[head_tile], record, query.factor[head_tile], quad);
                const PageLogits logits = {record, p, row, quad};
                float largest = 0.f;
                const float sum = token_sum<SAFE>(logits, record, quad, largest);
                const float value = SAFE ? log2_fast(sum) + largest : sum;
                if (quad == page / 2) {
                    if (page % 2) mass[2 * head_tile + 1] = value;
                    else mass[2 * head_tile] = value;
                }
            }
        }
    }
    if constexpr (!SAFE) {
#pragma unroll
        for (int i = 0; i < KEPT; ++i) mass[i] = log2_fast(mass[i]);
    }
}

// Adds q . mu of the 8 pages: B = centroids (column = page), so the lane's own pages come out where `mass` has them.
__device__ __forceinline__ void add_centroids(float (&mass)[KEPT], const Query& query, const uint8* records, int row, int quad) {
    int c[HEAD_TILES][4] = {};
    uint32 words[D / 16];
    load_words(words, records + row * PAGE_BYTES + CENTROID_AT + quad * (D / 4));
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const uint32 even = __byte_perm(words[2 * step], words[2 * step + 1], 0x6420);
        const uint32 odd = __byte_perm(words[2 * step], words[2 * step + 1], 0x7531);
#pragma unroll
        for (int tile = 0; tile < HEAD_TILES; ++tile) mma_s8(c[tile], query.a[tile][step], even, odd);
    }
    const uint8* scales = records + 2 * quad * PAGE_BYTES + CENTROID_SCALE_AT;
    if constexpr (PAIRED) {
        const bool even = row < 4;
        const uint32 scale = *reinterpret_cast<const uint16*>(scales + (even ? 0 : PAGE_BYTES));
        const int joined = even ? c[0][0] * 256 + c[0][2] : c[0][1] * 256 + c[0][3];
        mass[0] += static_cast<float>(joined) * (query.factor[0] * bf16_low(scale));
    } else {
        const float scale0 = bf16_low(*reinterpret_cast<const uint16*>(scales));
        const float scale1 = bf16_low(*reinterpret_cast<const uint16*>(scales + PAGE_BYTES));
#pragma unroll
        for (int tile = 0; tile < HEAD_TILES; ++tile) {
            mass[2 * tile] += static_cast<float>(c[tile][0] * 256 + c[tile][2]) * (query.factor[tile] * scale0);
            mass[2 * tile + 1] += static_cast<float>(c[tile][1] * 256 + c[tile][3]) * (query.factor[tile] * scale1);
        }
    }
}

struct Running {  // sum of 2^mass seen so far by this lane, relative to 2^largest; one per head of the lane
    float largest, sum;
};
__device__ __forceinline__ void include(Running& running, float mass) {
    const float largest = fmaxf(running.largest, mass);
    running.sum = running.sum * exp2_fast(running.largest - largest) + exp2_fast(mass - largest);
    running.largest = largest;
}

// summaries [num_pages, kv_heads, RECORD]; query [B, kv_heads * G, D]; scores [B, kv_heads * G, score_stride];
// partials [B, kv_heads * G, gridDim.x * SUBS] (largest, sum): log-sum-exp of the scores by warp, in powers of two.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    score(const uint8* __restrict__ summaries, const uint16* __restrict__ query, const int* __restrict__ block_table,
          const int* __restrict__ seq_lens, float* __restrict__ scores, float2* __restrict__ partials, int batch, int kv_heads,
          int max_pages, int score_stride, int recent_pages) {
    extern __shared__ __align__(128) uint8 stages[];
    __shared__ __align__(8) uint64 full[STAGES], empty[STAGES];

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
    const int first_head = blockIdx.y * HEADS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared_address(&full[i]), COPY_ARRIVALS);
            barrier_init(shared_address(&empty[i]), HEADS);
        }
#if __CUDA_ARCH__ >= 900
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    __syncthreads();
    // The pages scored here were complete before this step, so only the query must be there, and it was before the previous
    // kernel (append, finalise) let this one start: no wait until the end.
    let_next_kernel_start();

    const WorkList list(seq_lens, batch, 0, recent_pages, gridDim.x);
    const uint32 begin = list.begin(blockIdx.x), end = list.begin(blockIdx.x + 1);
    int sequence = 0;
    uint32 skipped = 0;  // pages of the sequences before `sequence`
    for (uint32 n; begin < end && skipped + (n = scored_pages(seq_lens[sequence], recent_pages)) <= begin; ++sequence) skipped += n;
    int page = static_cast<int>(begin - skipped);  // of `sequence`, where this block goes on

    if (warp == WARPS) {
        const uint64 policy = read_once_policy();
        int slot = 0, round = 0;
        for (uint32 at = begin; at < end; ++sequence, page = 0) {
            const int stop = min(scored_pages(seq_lens[sequence], recent_pages), page + static_cast<int>(end - at));
            at += stop - page;
            const int* table = block_table + static_cast<int64>(sequence) * max_pages;
            int ids = page + lane < stop ? table[page + lane] : 0;
            for (; page < stop; page += 32) {
                const int next_ids = page + 32 + lane < stop ? table[page + 32 + lane] : 0;
                for (int part = 0; part < 4 && page + part * GROUP_PAGES < stop; ++part) {
                    const int from = page + part * GROUP_PAGES;
                    const int id = __shfl_sync(ALL_LANES, ids, part * GROUP_PAGES + lane % GROUP_PAGES);
                    const int pages = min(GROUP_PAGES, stop - from);
                    barrier_wait(shared_address(&empty[slot]), (round & 1) ^ 1);
                    copy_pages(shared_address(stages + slot * STAGE_BYTES),
                               summaries + (static_cast<int64>(id) * kv_heads + first_head) * RECORD, pages,
                               shared_address(&full[slot]), policy);
                    if (++slot == STAGES) slot = 0, ++round;
                }
                ids = next_ids;
            }
        }
    } else {
        const int head = first_head + warp % HEADS, sub = warp / HEADS;
        int slot = 0, round = 0, turn = 0;
        for (uint32 at = begin; at < end; ++sequence, page = 0) {
            const int stop = min(scored_pages(seq_lens[sequence], recent_pages), page + static_cast<int>(end - at));
            if (stop == page) continue;
            at += stop - page;
            const int first_query = (sequence * kv_heads + head) * G;
            Query fragments;
            load_query(fragments, query + static_cast<int64>(first_query) * D, row, quad);
            Running running[HEAD_TILES];
#pragma unroll
            for (int tile = 0; tile < HEAD_TILES; ++tile) running[tile] = {LOWEST, 0.f};

            for (; page < stop; page += GROUP_PAGES) {
                if (turn == sub) {
                    // A barrier's parity tells a round from the one before only when that one is over.  If it was another warp's,
                    // its copies may still be on their way, overtaken by later ones: wait until that warp has given the slot back.
                    if (STAGES % SUBS) barrier_wait(shared_address(&empty[slot]), (round & 1) ^ 1);
                    barrier_wait(shared_address(&full[slot]), round & 1);
                    const uint8* records = stages + slot * STAGE_BYTES + (warp % HEADS) * RECORD;
                    const int lane_page = page + 2 * quad + (PAIRED ? row / 4 : 0);
                    float mass[KEPT];
                    page_masses<false>(mass, fragments, records, row, quad);
                    bool fits = true;
#pragma unroll
                    for (int i = 0; i < KEPT; ++i) fits &= fabsf(mass[i]) < 120.f || lane_page + i % 2 >= stop;
                    if (!__all_sync(ALL_LANES, fits)) page_masses<true>(mass, fragments, records, row, quad);
                    add_centroids(mass, fragments, records, row, quad);
                    __syncwarp();
                    if (lane == 0) barrier_arrive(shared_address(&empty[slot]));
#pragma unroll
                    for (int i = 0; i < KEPT; ++i) {
                        const int query_head = PAIRED ? row % 4 : i / 2 * 8 + row, at_page = lane_page + i % 2;
                        if (query_head < G && at_page < stop) {
                            scores[static_cast<int64>(first_query + query_head) * score_stride + at_page] = mass[i] * LN_2;
                            include(running[i / 2], mass[i]);
                        }
                    }
                }
                if (++turn == SUBS) turn = 0;
                if (++slot == STAGES) slot = 0, ++round;
            }
            // lanes of one head: the quad, and with PAIRED the other half of the rows
#pragma unroll
            for (int tile = 0; tile < HEAD_TILES; ++tile) {
#pragma unroll
                for (int apart = 1; apart <= (PAIRED ? 16 : 2); apart = apart == 2 ? 16 : 2 * apart) {
                    const float other_largest = __shfl_xor_sync(ALL_LANES, running[tile].largest, apart);
                    const float other_sum = __shfl_xor_sync(ALL_LANES, running[tile].sum, apart);
                    const float largest = fmaxf(running[tile].largest, other_largest);
                    running[tile].sum = running[tile].sum * exp2_fast(running[tile].largest - largest) +
                                        other_sum * exp2_fast(other_largest - largest);
                    running[tile].largest = largest;
                }
                const int query_head = PAIRED ? row : tile * 8 + row;
                if (quad == 0 && query_head < G)
                    partials[static_cast<int64>(first_query + query_head) * (gridDim.x * SUBS) + blockIdx.x * SUBS + sub] =
                        make_float2(running[tile].largest, running[tile].sum);
            }
        }
    }
    // Whoever waits for this kernel may count on the previous one too.
    wait_for_previous_kernel();
}
