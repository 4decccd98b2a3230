// The attention mass of 8 pages from their records, one warp for one KV head.
//
// About 60 warp instructions a record, laid out so that no value changes lanes between the two matrix products:
//  * The query is int16, split in a high and a low byte; heads are the rows 0-7 of the A operand with the high bytes and
//    rows 8-15 with the low ones, so a lane gets both halves of the same sum and joins them as exact integers.
//  * The basis is the B operand.  A lane's 16-byte load is 32 channels of one basis vector; the contraction axis is permuted
//    (even channels, then odd ones) so that unpacking eight int4 takes three instructions: a nibble kept in the upper half
//    of its byte is the signed value times 16.
//  * The product's C layout (row = head, columns 2 quad, 2 quad + 1 = ranks) is the A layout of the next product, with the
//    fp16 value in rows 0-7 and what fp16 lost in rows 8-15: about 22 bits.
//  * With at most 4 heads a group, rows 0-3 serve an even page and rows 4-7 the odd one behind it (block diagonal).
#pragma once
#include "record.cuh"
#include "work_list.cuh"

constexpr int PAGE_BYTES = HEADS * RECORD;  // the records of a page's HEADS heads, side by side
constexpr int STEPS = D / 32;            // 32-channel steps of the projection
constexpr bool PAIRED = G <= 4;          // two pages share one A operand
constexpr int HEAD_TILES = (G + 7) / 8;  // groups of up to 8 query heads
constexpr int TOKEN_TILES = PAGE / 8;

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

// log2 of the token sums, centroid apart, of 8 pages, PAGE_BYTES apart.
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

// Where a lane's values belong: the first page of mass[0] within the group, and the query head of mass[i].
__device__ __forceinline__ int first_kept(int row, int quad) { return 2 * quad + (PAIRED ? row / 4 : 0); }
__device__ __forceinline__ int kept_head(int i, int row) { return PAIRED ? row % 4 : i / 2 * 8 + row; }

// The masses of a group of 8 pages in powers of two; lane_page: the page of mass[0]; pages from `stop` on may be anything.
__device__ __forceinline__ void group_masses(float (&mass)[KEPT], const Query& query, const uint8* records, int lane_page, int stop,
                                             int row, int quad) {
    page_masses<false>(mass, query, records, row, quad);
    bool fits = true;
#pragma unroll
    for (int i = 0; i < KEPT; ++i) fits &= fabsf(mass[i]) < 120.f || lane_page + i % 2 >= stop;
    if (!__all_sync(ALL_LANES, fits)) page_masses<true>(mass, query, records, row, quad);
    add_centroids(mass, query, records, row, quad);
}

struct Running {  // sum of 2^mass seen so far by this lane, relative to 2^largest; one per head of the lane
    float largest = LOWEST, sum = 0.f, smallest = -LOWEST;
};
__device__ __forceinline__ void include(Running& running, float mass) {
    const float largest = fmaxf(running.largest, mass);
    running.sum = running.sum * exp2_fast(running.largest - largest) + exp2_fast(mass - largest);
    running.largest = largest;
    running.smallest = fminf(running.smallest, mass);
}
// Joins the lanes of one head: those 1 and 2 apart (the quad), and with PAIRED those 16 apart (the other page's rows).  LEAST: the
// smallest mass, too.
template <bool LEAST>
__device__ __forceinline__ void join_lanes(Running& running) {
#pragma unroll
    for (int apart = 1; apart <= (PAIRED ? 16 : 2); apart = apart == 2 ? 16 : 2 * apart) {
        const float other_largest = __shfl_xor_sync(ALL_LANES, running.largest, apart);
        const float other_sum = __shfl_xor_sync(ALL_LANES, running.sum, apart);
        const float largest = fmaxf(running.largest, other_largest);
        running.sum = running.sum * exp2_fast(running.largest - largest) + other_sum * exp2_fast(other_largest - largest);
        running.largest = largest;
        if (LEAST) running.smallest = fminf(running.smallest, __shfl_xor_sync(ALL_LANES, running.smallest, apart));
    }
}
