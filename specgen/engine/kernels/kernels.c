/* The operators of a decoder's forward pass on x86-64: products, norms, rotary embedding,
 * attention and gated activations, all with sums in float32.
 *
 * A row of an output has the same bits whichever rows are computed with it, in whatever order
 * they stand, and however many threads compute them: each element is summed up by one thread, in
 * an order that depends on the element alone. So contractions of a product and a sum are written
 * out (FMA) and left to no compiler (-ffp-contract=off).
 *
 * One text for three sets of instructions, chosen by the compiler's flags: AVX-512 with VNNI,
 * AVX2 with AVX-VNNI, and AVX2. A vector has LANES floats; a block is the weights of LANES
 * neighbouring outputs. All functions return 0, or -1 if memory is missing.
 */

#include <immintrin.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#define UNROLL _Pragma("GCC unroll 16")
#define GROUP 32 /* weights, or activations, with one scale */

/* ------------------------------------------------------------------ vectors */

#ifdef __AVX512F__
#define LANES 16
#define MOST_ROWS 8 /* of a tile */
typedef __m512 vec;
typedef __m512i ivec;
INLINE vec v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, vec a) { _mm512_storeu_ps(p, a); }
INLINE vec v_all(float a) { return _mm512_set1_ps(a); }
INLINE vec v_zero(void) { return _mm512_setzero_ps(); }
INLINE vec v_add(vec a, vec b) { return _mm512_add_ps(a, b); }
INLINE vec v_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
INLINE vec v_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
INLINE vec v_div(vec a, vec b) { return _mm512_div_ps(a, b); }
INLINE vec v_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vec v_max(vec a, vec b) { return _mm512_max_ps(a, b); }
INLINE vec v_min(vec a, vec b) { return _mm512_min_ps(a, b); }
INLINE vec v_round(vec a) { return _mm512_roundscale_ps(a, 0); }
INLINE vec v_abs(vec a) { return _mm512_abs_ps(a); }
INLINE vec v_half(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(p)); }
INLINE ivec i_load(const void *p) { return _mm512_loadu_si512(p); }
INLINE ivec i_all(int32_t a) { return _mm512_set1_epi32(a); }
INLINE ivec i_and(ivec a, ivec b) { return _mm512_and_si512(a, b); }
INLINE ivec i_xor(ivec a, ivec b) { return _mm512_xor_si512(a, b); }
INLINE ivec i_add(ivec a, ivec b) { return _mm512_add_epi32(a, b); }
INLINE ivec i_left(ivec a, int n) { return _mm512_slli_epi32(a, n); }
INLINE ivec i_right(ivec a, int n) { return _mm512_srli_epi32(a, n); }
INLINE vec v_of_bits(ivec a) { return _mm512_castsi512_ps(a); }
INLINE vec v_of_ints(ivec a) { return _mm512_cvtepi32_ps(a); }
INLINE ivec i_of_floats(vec a) { return _mm512_cvtps_epi32(a); }
INLINE vec v_swap_pairs(vec a) { return _mm512_permute_ps(a, 0xB1); }
INLINE vec v_even(vec a) { return _mm512_moveldup_ps(a); }
INLINE vec v_odd(vec a) { return _mm512_movehdup_ps(a); }
INLINE vec v_fma_sub_add(vec a, vec b, vec c) { return _mm512_fmaddsub_ps(a, b, c); }
INLINE float v_sum(vec a)
{
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}
INLINE float v_largest(vec a) { return _mm512_reduce_max_ps(a); }
/* The elements of `then` where those of `a` are above 0, of `otherwise` elsewhere. */
INLINE vec v_above_0(vec a, vec then, vec otherwise)
{
    __mmask16 above = _mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_GT_OQ);
    return _mm512_mask_blend_ps(above, otherwise, then);
}
/* Bit i is 1 where element i of both is equal, which a NaN never is. */
INLINE unsigned v_equal(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
INLINE void i_store_bytes(int8_t *p, ivec a)
{
    _mm_storeu_si128((void *)p, _mm512_cvtepi32_epi8(a));
}
#else
#define LANES 8
#define MOST_ROWS 4
typedef __m256 vec;
typedef __m256i ivec;
INLINE vec v_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void v_store(float *p, vec a) { _mm256_storeu_ps(p, a); }
INLINE vec v_all(float a) { return _mm256_set1_ps(a); }
INLINE vec v_zero(void) { return _mm256_setzero_ps(); }
INLINE vec v_add(vec a, vec b) { return _mm256_add_ps(a, b); }
INLINE vec v_sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
INLINE vec v_mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
INLINE vec v_div(vec a, vec b) { return _mm256_div_ps(a, b); }
INLINE vec v_fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vec v_max(vec a, vec b) { return _mm256_max_ps(a, b); }
INLINE vec v_min(vec a, vec b) { return _mm256_min_ps(a, b); }
INLINE vec v_round(vec a) { return _mm256_round_ps(a, 0); }
INLINE vec v_abs(vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
INLINE vec v_half(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128(p)); }
INLINE ivec i_load(const void *p) { return _mm256_loadu_si256(p); }
INLINE ivec i_all(int32_t a) { return _mm256_set1_epi32(a); }
INLINE ivec i_and(ivec a, ivec b) { return _mm256_and_si256(a, b); }
INLINE ivec i_xor(ivec a, ivec b) { return _mm256_xor_si256(a, b); }
INLINE ivec i_add(ivec a, ivec b) { return _mm256_add_epi32(a, b); }
INLINE ivec i_left(ivec a, int n) { return _mm256_slli_epi32(a, n); }
INLINE ivec i_right(ivec a, int n) { return _mm256_srli_epi32(a, n); }
INLINE vec v_of_bits(ivec a) { return _mm256_castsi256_ps(a); }
INLINE vec v_of_ints(ivec a) { return _mm256_cvtepi32_ps(a); }
INLINE ivec i_of_floats(vec a) { return _mm256_cvtps_epi32(a); }
INLINE vec v_swap_pairs(vec a) { return _mm256_permute_ps(a, 0xB1); }
INLINE vec v_even(vec a) { return _mm256_moveldup_ps(a); }
INLINE vec v_odd(vec a) { return _mm256_movehdup_ps(a); }
INLINE vec v_fma_sub_add(vec a, vec b, vec c) { return _mm256_fmaddsub_ps(a, b, c); }
INLINE float v_sum(vec a)
{
    __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}
INLINE float v_largest(vec a)
{
    __m128 quarter = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    quarter = _mm_max_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_max_ss(quarter, _mm_movehdup_ps(quarter)));
}
INLINE vec v_above_0(vec a, vec then, vec otherwise)
{
    __m256 above = _mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_GT_OQ);
    return _mm256_blendv_ps(otherwise, then, above);
}
INLINE unsigned v_equal(vec a, vec b)
{
    return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ));
}
INLINE void i_store_bytes(int8_t *p, ivec a)
{
    __m128i low = _mm256_castsi256_si128(a), high = _mm256_extracti128_si256(a, 1);
    __m128i shorts = _mm_packs_epi32(low, high);
    _mm_storel_epi64((void *)p, _mm_packs_epi16(shorts, shorts));
}
#endif

/* What v_sum gives for each of LANES vectors, by the same additions. */
#ifdef __AVX512F__
INLINE vec quarters(vec a, vec b, vec c, vec d)
{
    vec ab = v_add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
    vec cd = v_add(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xEE));
    return v_add(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
}
#define QUARTERS(p, i) quarters((p)[i], (p)[4 + i], (p)[8 + i], (p)[12 + i])
#define SHUFFLE _mm512_shuffle_ps
#else
#define QUARTERS(p, i)                                                                         \
    v_add(_mm256_permute2f128_ps((p)[i], (p)[4 + i], 0x20),                                    \
          _mm256_permute2f128_ps((p)[i], (p)[4 + i], 0x31))
#define SHUFFLE _mm256_shuffle_ps
#endif
INLINE vec v_sums(const vec p[LANES])
{
    vec first = QUARTERS(p, 0), second = QUARTERS(p, 1);
    vec third = QUARTERS(p, 2), fourth = QUARTERS(p, 3);
    vec left = v_add(SHUFFLE(first, second, 0x44), SHUFFLE(first, second, 0xEE));
    vec right = v_add(SHUFFLE(third, fourth, 0x44), SHUFFLE(third, fourth, 0xEE));
    return v_add(SHUFFLE(left, right, 0x88), SHUFFLE(left, right, 0xDD));
}

/* e^a with a relative error of about 2e-7; 0 below -87.3 */
INLINE vec v_exp(vec a)
{
    a = v_min(a, v_all(88.0f));
    vec clipped = v_max(a, v_all(-87.3f));
    vec whole = v_round(v_mul(clipped, v_all(1.44269504088896341f)));
    vec rest = v_fma(whole, v_all(-0.693359375f), clipped);
    rest = v_fma(whole, v_all(2.12194440e-4f), rest);
    vec sum = v_all(1.9875691500e-4f);
    sum = v_fma(sum, rest, v_all(1.3981999507e-3f));
    sum = v_fma(sum, rest, v_all(8.3334519073e-3f));
    sum = v_fma(sum, rest, v_all(4.1665795894e-2f));
    sum = v_fma(sum, rest, v_all(1.6666665459e-1f));
    sum = v_fma(sum, rest, v_all(5.0000001201e-1f));
    sum = v_fma(v_mul(sum, rest), rest, v_add(rest, v_all(1.0f)));
    ivec power = i_left(i_add(i_of_floats(whole), i_all(127)), 23);
    vec result = v_mul(sum, v_of_bits(power));
#ifdef __AVX512F__
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, v_all(-87.3f), _CMP_GE_OQ), result);
#else
    return _mm256_and_ps(_mm256_cmp_ps(a, v_all(-87.3f), _CMP_GE_OQ), result);
#endif
}

/* tanh(a) = 1 - 2 / (e^2a + 1) */
INLINE vec v_tanh(vec a)
{
    vec power = v_exp(v_add(a, a));
    return v_sub(v_all(1.0f), v_div(v_all(2.0f), v_add(power, v_all(1.0f))));
}

/* ------------------------------------------------------------------ threads */

/* One job at a time is shared by the caller and the helpers. `state` has the number of the job's
 * chunks and that of the next one, so that one addition claims a chunk, and a helper that comes
 * late sees that none is left. A helper spins for a while and then sleeps. */

#define MOST_THREADS 64
#define SPINS 4000 /* of a helper before it sleeps: about 50 us */
#define LINE 128   /* bytes; two cache lines, which processors fetch together */

typedef void (*chunk_function)(void *arguments, long chunk);

static struct {
    _Alignas(LINE) atomic_ullong state; /* job << 48 | chunks << 24 | next chunk */
    _Alignas(LINE) atomic_long done;
    _Alignas(LINE) chunk_function function;
    void *arguments;
    unsigned long long job;
    _Alignas(LINE) atomic_int sleeping;
    atomic_int threads; /* that share a job, the caller included */
    int started;
    pthread_mutex_t owner; /* of the job */
    pthread_mutex_t lock;
    pthread_cond_t wake;
} pool = {
    .threads = 1,
    .owner = PTHREAD_MUTEX_INITIALIZER,
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .wake = PTHREAD_COND_INITIALIZER,
};

#define CHUNKS(state) ((long)((state) >> 24 & 0xffffff))
#define NEXT(state) ((long)((state)&0xffffff))

/* Runs chunks until none is left; returns how many. */
static long run_chunks(void)
{
    long count = 0;
    for (;;) {
        unsigned long long seen = atomic_load_explicit(&pool.state, memory_order_relaxed);
        if (NEXT(seen) >= CHUNKS(seen)) return count;
        seen = atomic_fetch_add_explicit(&pool.state, 1, memory_order_acquire);
        if (NEXT(seen) >= CHUNKS(seen)) return count;
        pool.function(pool.arguments, NEXT(seen));
        atomic_fetch_add_explicit(&pool.done, 1, memory_order_release);
        count++;
    }
}

static void *helper(void *argument)
{
    long index = (long)argument;
    unsigned long long last = 0;
    for (;;) {
        int spins = 0;
        while (atomic_load_explicit(&pool.state, memory_order_acquire) >> 48 == last
               || index >= atomic_load_explicit(&pool.threads, memory_order_relaxed)) {
            if (spins++ < SPINS) {
                _mm_pause();
                continue;
            }
            pthread_mutex_lock(&pool.lock);
            atomic_fetch_add(&pool.sleeping, 1);
            while (atomic_load(&pool.state) >> 48 == last || index >= atomic_load(&pool.threads))
                pthread_cond_wait(&pool.wake, &pool.lock);
            atomic_fetch_sub(&pool.sleeping, 1);
            pthread_mutex_unlock(&pool.lock);
        }
        last = atomic_load_explicit(&pool.state, memory_order_acquire) >> 48;
        run_chunks();
    }
    return NULL;
}

/* After a fork, the child has no helpers, and may have copied locks that are taken. */
static void forget_helpers(void)
{
    pthread_mutex_init(&pool.owner, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    atomic_store(&pool.sleeping, 0);
    pool.started = 0;
}

static void start_helpers(int threads)
{
    static int watches_forks = 0;
    if (!watches_forks) {
        watches_forks = 1;
        pthread_atfork(NULL, NULL, forget_helpers);
    }
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    while (pool.started < threads - 1) {
        pthread_t thread;
        if (pthread_create(&thread, &attributes, helper, (void *)(long)(pool.started + 1))) break;
        pool.started++;
    }
    pthread_attr_destroy(&attributes);
}

/* Sets how many threads share the work of a call from now on. */
EXPORT void set_threads(int threads)
{
    if (threads < 1) threads = 1;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    atomic_store(&pool.threads, threads);
}

EXPORT int lanes(void) { return LANES; }

/* Calls `function` for each chunk, in threads. A second caller at the same time works alone. */
static void in_threads(chunk_function function, void *arguments, long chunks)
{
    int threads = atomic_load_explicit(&pool.threads, memory_order_relaxed);
    if (chunks == 1 || threads == 1 || pthread_mutex_trylock(&pool.owner)) {
        for (long chunk = 0; chunk < chunks; chunk++) function(arguments, chunk);
        return;
    }
    if (pool.started < threads - 1) start_helpers(threads);
    pool.function = function;
    pool.arguments = arguments;
    pool.job = (pool.job + 1) & 0xffff;
    atomic_store_explicit(&pool.done, 0, memory_order_relaxed);
    atomic_store(&pool.state, pool.job << 48 | (unsigned long long)chunks << 24);
    if (atomic_load(&pool.sleeping)) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    run_chunks();
    for (long spins = 0; atomic_load_explicit(&pool.done, memory_order_acquire) < chunks; spins++) {
        if (spins < SPINS)
            _mm_pause();
        else
            sched_yield(); /* a helper with a chunk does not run */
    }
    pthread_mutex_unlock(&pool.owner);
}

/* Memory of one thread, kept from call to call. */
static void *scratch(int slot, size_t bytes)
{
    static _Thread_local struct { void *memory; size_t bytes; } kept[3];
    if (kept[slot].bytes < bytes) {
        free(kept[slot].memory);
        kept[slot].bytes = 0;
        kept[slot].memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
        if (kept[slot].memory == NULL) return NULL;
        kept[slot].bytes = bytes;
    }
    return kept[slot].memory;
}

/* ------------------------------------------------------------------ products */

enum kind {
    FLOAT32,
    BFLOAT16,
    FLOAT16,
    INT8,
    INT8_MINIMUM,
    INT4_MINIMUM,
    WIDE_INT8_MINIMUM, /* with scales and minimums in float32 */
    WIDE_INT4_MINIMUM,
};

/* A weight [outputs, inputs], packed by blocks of LANES outputs. Inputs are padded with zeros: to
 * a multiple of 2 in 16 bits and of GROUP in 8 and 4 bits.
 * FLOAT32, FLOAT16: `data` [block][input][LANES]
 * BFLOAT16: [block][pair of inputs][LANES][2]
 * INT8...: [block][group][8 steps][LANES][4 inputs], signed; unsigned with minimums
 * INT4_MINIMUM: [block][group][4 steps][LANES][4 bytes]: the low halves of a byte are an input of
 *   the first half of the group, the high halves one of the second
 * `scales` and `minimums` [block][group][LANES] are in half precision, or in float32. A weight
 * is scale * integer + minimum. */
typedef struct {
    const void *data;
    const void *scales;
    const void *minimums;
    long inputs;
    long outputs;
    long kind;
} matrix;

/* Activations of all rows, rounded to 8 bits in groups of 32: [tile][group][row of the tile][32],
 * and the scale and the sum of the integers of each [tile][group][row of the tile]. A tile has
 * MOST_ROWS rows, the last one the rest. */
typedef struct {
    int8_t *integers;
    float *scales;
    int32_t *sums;
} rounded;

/* A product: output = weight x input + bias for each row; if `adds`, output += scale * that. */
typedef struct {
    const matrix *weight;
    const float *input;
    long rows;
    long input_stride;
    const float *bias;
    float scale;
    int adds;
    float *output;
    long output_stride;
    rounded rounded;
    long blocks_of_chunk;
} product_call;

INLINE void finish(const product_call *call, long row, long block, vec sum)
{
    long first = block * LANES;
    long count = call->weight->outputs - first; /* of outputs, without padding */
    float *output = call->output + row * call->output_stride + first;
    if (count >= LANES) {
        if (call->bias) sum = v_add(sum, v_load(call->bias + first));
        if (call->adds) sum = v_fma(v_all(call->scale), sum, v_load(output));
        v_store(output, sum);
        return;
    }
    float values[LANES];
    v_store(values, sum);
    for (long i = 0; i < count; i++) {
        float value = call->bias ? values[i] + call->bias[first + i] : values[i];
        output[i] = call->adds ? fmaf(call->scale, value, output[i]) : value;
    }
}

/* Fetches the weights that are read `ahead` bytes later. Of AMD's processors the first cache waits
 * for few lines at once: there, into the second one. */
#ifdef FETCH_INTO_L2
#define FETCH(p, ahead) _mm_prefetch((const char *)(p) + (ahead), _MM_HINT_T1)
#else
#define FETCH(p, ahead) _mm_prefetch((const char *)(p) + (ahead), _MM_HINT_T0)
#endif

/* How far from byte `at` of a block the weights are that are read AHEAD bytes later, where `blocks`
 * of `size` bytes are read side by side: after the end of each comes a block of the next tile. */
#define AHEAD 2048
INLINE long ahead_of(long at, long size, long blocks)
{
    return at + AHEAD < size ? AHEAD : AHEAD + (blocks - 1) * size;
}

/* The two weights of a pair of inputs, for a block. */
#define PAIR_FLOAT32(p) even = v_load(p), odd = v_load((p) + LANES)
#define PAIR_FLOAT16(p) even = v_half(p), odd = v_half((p) + LANES)
#define PAIR_BFLOAT16(p) \
    pair = i_load(p), even = v_of_bits(i_left(pair, 16)), odd = v_of_bits(i_and(pair, high))

/* A tile of R rows and B blocks of a product with weights in floating point. */
#define FLOAT_TILE(NAME, TYPE, PAIR, R, B)                                                     \
    static void NAME##_##R##_##B(const product_call *call, long row, long block)               \
    {                                                                                          \
        long inputs = call->weight->inputs + (call->weight->inputs & 1);                       \
        const TYPE *weights = (const TYPE *)call->weight->data + block * inputs * LANES;       \
        const float *x[R];                                                                     \
        vec sums[R][B];                                                                        \
        const ivec high = i_all((int32_t)0xffff0000);                                          \
        ivec pair;                                                                             \
        (void)high, (void)pair;                                                                \
        const long step = LANES * (long)sizeof(TYPE); /* bytes of an input in a block */       \
        UNROLL for (int r = 0; r < R; r++) x[r] = call->input + (row + r) * call->input_stride;\
        UNROLL for (int r = 0; r < R; r++)                                                     \
            UNROLL for (int b = 0; b < B; b++) sums[r][b] = v_zero();                          \
        for (long k = 0; k < inputs; k += 2, weights += 2 * LANES) {                           \
            const long ahead = ahead_of(k * step, inputs * step, B);                           \
            UNROLL for (int b = 0; b < B; b++) {                                               \
                vec even, odd;                                                                 \
                const TYPE *p = weights + b * inputs * LANES;                                  \
                FETCH(p, ahead);                                                               \
                PAIR(p);                                                                       \
                UNROLL for (int r = 0; r < R; r++) {                                           \
                    sums[r][b] = v_fma(even, v_all(x[r][k]), sums[r][b]);                      \
                    sums[r][b] = v_fma(odd, v_all(x[r][k + 1]), sums[r][b]);                   \
                }                                                                              \
            }                                                                                  \
        }                                                                                      \
        UNROLL for (int r = 0; r < R; r++)                                                     \
            UNROLL for (int b = 0; b < B; b++) finish(call, row + r, block + b, sums[r][b]);   \
    }

/* Sums up products of 4 signed bytes each, of weights and of activations (4 bytes in all lanes):
 * FIRST makes of the weights what DOT takes, once for all rows. */
#if defined(__AVX512VNNI__)
#define DOT(sum, first, weights, x) sum = _mm512_dpbusd_epi32(sum, first, x)
#elif defined(__AVXVNNI__)
#define DOT(sum, first, weights, x) sum = _mm256_dpbusd_avx_epi32(sum, first, x)
#else
/* Pairs are added in 16 bits: at most 2 * 128 * 127, which fits. */
#define DOT(sum, first, weights, x)                                                            \
    sum = i_add(sum, _mm256_madd_epi16(                                                        \
                         _mm256_maddubs_epi16(first, weights), _mm256_set1_epi16(1)))
#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
/* Unsigned weights are 128 too large, which -128 * (sum of activations) takes back. */
#define FIRST(w) i_xor(w, i_all((int32_t)0x80808080))
#define SIGNED_DOT(sum, first, w, x) DOT(sum, first, w, x)
#define START(sum_of_x) i_all(-128 * (sum_of_x))
#define UNSIGNED_DOT(sum, w, x) DOT(sum, w, w, x)
#else
#define FIRST(w) _mm256_abs_epi8(w)
#define SIGNED_DOT(sum, first, w, x) DOT(sum, first, _mm256_sign_epi8(x, w), x)
#define START(sum_of_x) _mm256_setzero_si256()
#define UNSIGNED_DOT(sum, w, x) DOT(sum, w, x, x)
#endif

INLINE vec scale_of(const void *scales, long index, int wide)
{
    return wide ? v_load((const float *)scales + index) : v_half((const uint16_t *)scales + index);
}

INLINE int32_t four(const int8_t *p)
{
    int32_t bytes;
    memcpy(&bytes, p, 4);
    return bytes;
}

/* A tile of R rows and B blocks of a product with weights in 8 or 4 bits. */
#define INTEGER_TILE(NAME, KIND, WIDE, R, B)                                                   \
    static void NAME##_##R##_##B(const product_call *call, long row, long block)               \
    {                                                                                          \
        const matrix *weight = call->weight;                                                   \
        long groups = (weight->inputs + GROUP - 1) / GROUP;                                    \
        const long bytes = (KIND == INT4_MINIMUM ? 16 : 32) * LANES; /* of a group */          \
        vec sums[R][B];                                                                        \
        UNROLL for (int r = 0; r < R; r++)                                                     \
            UNROLL for (int b = 0; b < B; b++) sums[r][b] = v_zero();                          \
        for (long group = 0; group < groups; group++) {                                        \
            long first_row = row * groups + group * R;                                         \
            const int8_t *x = call->rounded.integers + first_row * GROUP;                      \
            const float *x_scales = call->rounded.scales + first_row;                          \
            const int32_t *x_sums = call->rounded.sums + first_row;                            \
            const long ahead = ahead_of(group * bytes, groups * bytes, B);                     \
            UNROLL for (int b = 0; b < B; b++) {                                               \
                long index = (block + b) * groups + group;                                     \
                const uint8_t *data = (const uint8_t *)weight->data + index * bytes;           \
                ivec dots[R];                                                                  \
                UNROLL for (int r = 0; r < R; r++)                                             \
                    dots[r] = KIND == INT8 ? START(x_sums[r]) : i_all(0);                      \
                if (KIND == INT4_MINIMUM) {                                                    \
                    for (int step = 0; step < 4; step++) {                              \
                        ivec both = i_load(data + step * 4 * LANES);                           \
                        FETCH(data + step * 4 * LANES, ahead);                                 \
                        ivec low = i_and(both, i_all(0x0f0f0f0f));                             \
                        ivec top = i_and(i_right(both, 4), i_all(0x0f0f0f0f));                 \
                        UNROLL for (int r = 0; r < R; r++) {                                   \
                            UNSIGNED_DOT(dots[r], low, i_all(four(x + r * GROUP + 4 * step))); \
                            UNSIGNED_DOT(dots[r], top,                                         \
                                         i_all(four(x + r * GROUP + 16 + 4 * step)));          \
                        }                                                                      \
                    }                                                                          \
                } else {                                                                       \
                    for (int step = 0; step < 8; step++) {                              \
                        ivec w = i_load(data + step * 4 * LANES);                              \
                        FETCH(data + step * 4 * LANES, ahead);                                 \
                        ivec first = KIND == INT8 ? FIRST(w) : w;                              \
                        (void)first;                                                           \
                        UNROLL for (int r = 0; r < R; r++) {                                   \
                            ivec four_of_x = i_all(four(x + r * GROUP + 4 * step));            \
                            if (KIND == INT8)                                                  \
                                SIGNED_DOT(dots[r], first, w, four_of_x);                      \
                            else                                                               \
                                UNSIGNED_DOT(dots[r], w, four_of_x);                           \
                        }                                                                      \
                    }                                                                          \
                }                                                                              \
                vec scale = scale_of(weight->scales, index * LANES, WIDE);                     \
                UNROLL for (int r = 0; r < R; r++)                                             \
                    sums[r][b] = v_fma(v_of_ints(dots[r]), v_mul(scale, v_all(x_scales[r])),   \
                                       sums[r][b]);                                            \
                if (KIND != INT8) {                                                            \
                    vec minimum = scale_of(weight->minimums, index * LANES, WIDE);             \
                    UNROLL for (int r = 0; r < R; r++)                                         \
                        sums[r][b] = v_fma(minimum, v_all(x_scales[r] * (float)x_sums[r]),     \
                                           sums[r][b]);                                        \
                }                                                                              \
            }                                                                                  \
        }                                                                                      \
        UNROLL for (int r = 0; r < R; r++)                                                     \
            UNROLL for (int b = 0; b < B; b++) finish(call, row + r, block + b, sums[r][b]);   \
    }

/* Tiles of 1 to MOST_ROWS rows: fewer rows have more blocks, so that enough sums are under way.
 * The number of blocks of a weight is a multiple of PADDED. */
#define PADDED 4
#if LANES == 16
#define TILES(TILE, ...)                                                                       \
    TILE(__VA_ARGS__, 1, 4) TILE(__VA_ARGS__, 2, 4) TILE(__VA_ARGS__, 3, 4)                    \
    TILE(__VA_ARGS__, 4, 4) TILE(__VA_ARGS__, 5, 2) TILE(__VA_ARGS__, 6, 2)                    \
    TILE(__VA_ARGS__, 7, 2) TILE(__VA_ARGS__, 8, 2)
#define ALL(NAME)                                                                              \
    { { 4, NAME##_1_4 }, { 4, NAME##_2_4 }, { 4, NAME##_3_4 }, { 4, NAME##_4_4 },              \
      { 2, NAME##_5_2 }, { 2, NAME##_6_2 }, { 2, NAME##_7_2 }, { 2, NAME##_8_2 } }
#define FLOAT_TILES TILES
#define ALL_FLOAT ALL
#else
/* 16 registers: the integers' sums need two of them each */
#define FLOAT_TILES(TILE, ...)                                                                 \
    TILE(__VA_ARGS__, 1, 4) TILE(__VA_ARGS__, 2, 4) TILE(__VA_ARGS__, 3, 2)                    \
    TILE(__VA_ARGS__, 4, 2)
#define ALL_FLOAT(NAME)                                                                        \
    { { 4, NAME##_1_4 }, { 4, NAME##_2_4 }, { 2, NAME##_3_2 }, { 2, NAME##_4_2 } }
#define TILES(TILE, ...)                                                                       \
    TILE(__VA_ARGS__, 1, 4) TILE(__VA_ARGS__, 2, 2) TILE(__VA_ARGS__, 3, 1)                    \
    TILE(__VA_ARGS__, 4, 1)
#define ALL(NAME)                                                                              \
    { { 4, NAME##_1_4 }, { 2, NAME##_2_2 }, { 1, NAME##_3_1 }, { 1, NAME##_4_1 } }
#endif

FLOAT_TILES(FLOAT_TILE, float32, float, PAIR_FLOAT32)
FLOAT_TILES(FLOAT_TILE, bfloat16, uint16_t, PAIR_BFLOAT16)
FLOAT_TILES(FLOAT_TILE, float16, uint16_t, PAIR_FLOAT16)
TILES(INTEGER_TILE, int8, INT8, 0)
TILES(INTEGER_TILE, int8_minimum, INT8_MINIMUM, 0)
TILES(INTEGER_TILE, int4_minimum, INT4_MINIMUM, 0)
TILES(INTEGER_TILE, wide_int8_minimum, INT8_MINIMUM, 1)
TILES(INTEGER_TILE, wide_int4_minimum, INT4_MINIMUM, 1)

typedef struct {
    int blocks;
    void (*function)(const product_call *, long row, long block);
} tile;

static const tile TILES_OF[8][MOST_ROWS] = {
    ALL_FLOAT(float32),
    ALL_FLOAT(bfloat16),
    ALL_FLOAT(float16),
    ALL(int8),
    ALL(int8_minimum),
    ALL(int4_minimum),
    ALL(wide_int8_minimum),
    ALL(wide_int4_minimum),
};

static long padded_blocks(const matrix *weight)
{
    long blocks = (weight->outputs + LANES - 1) / LANES;
    return (blocks + PADDED - 1) / PADDED * PADDED;
}

/* Tiles of few rows read the weights as they are packed. The rows are the inner loop: weights of
 * PADDED blocks stay in the caches meanwhile. */
static void tiles_of_blocks(const product_call *call, long first, long last)
{
    const tile *tiles = TILES_OF[call->weight->kind];
    for (long padded = first; padded < last; padded += PADDED)
        for (long row = 0; row < call->rows; row += MOST_ROWS) {
            long rows = call->rows - row < MOST_ROWS ? call->rows - row : MOST_ROWS;
            const tile *chosen = &tiles[rows - 1];
            for (long block = padded; block < padded + PADDED; block += chosen->blocks)
                chosen->function(call, row, block);
        }
}

/* Many rows: a panel, the weights of some blocks and inputs, is unpacked once for all rows, and a
 * tile has as many sums as the registers hold beside the weights of one input. Sums wait in memory
 * from panel to panel, so that each is summed up as in a tile of few rows. */
#define PANEL_BLOCKS (LANES / 4)
#define PANEL_INPUTS 384
#define PANEL_ROWS 240 /* at once, so that their sums stay in the caches */
#define PANEL_TILE_ROWS 6
#define PANEL_LANES (PANEL_BLOCKS * LANES)
#define PANELS_FROM (LANES == 16 ? 40 : 10) /* rows; fewer are faster without unpacking */

/* Unpacks `count` inputs from `first` on, both even, to `panel` [input][PANEL_BLOCKS][LANES]. */
#define UNPACK(NAME, TYPE, PAIR)                                                               \
    static void unpack_##NAME(const matrix *weight, long block, long first, long count,        \
                              float *panel)                                                    \
    {                                                                                          \
        long inputs = weight->inputs + (weight->inputs & 1);                                   \
        const TYPE *weights = (const TYPE *)weight->data + (block * inputs + first) * LANES;   \
        const ivec high = i_all((int32_t)0xffff0000);                                          \
        ivec pair;                                                                             \
        (void)high, (void)pair;                                                                \
        const long step = LANES * (long)sizeof(TYPE);                                          \
        for (long k = 0; k < count; k += 2) {                                                  \
            const long ahead = ahead_of((first + k) * step, inputs * step, PANEL_BLOCKS);      \
            UNROLL for (int b = 0; b < PANEL_BLOCKS; b++) {                                    \
                vec even, odd;                                                                 \
                const TYPE *p = weights + (b * inputs + k) * LANES;                            \
                FETCH(p, ahead);                                                               \
                PAIR(p);                                                                       \
                v_store(panel + k * PANEL_LANES + b * LANES, even);                            \
                v_store(panel + (k + 1) * PANEL_LANES + b * LANES, odd);                       \
            }                                                                                  \
        }                                                                                      \
    }

UNPACK(float32, float, PAIR_FLOAT32)
UNPACK(bfloat16, uint16_t, PAIR_BFLOAT16)
UNPACK(float16, uint16_t, PAIR_FLOAT16)

/* Adds to the sums of R rows [row][PANEL_BLOCKS][LANES] what `count` inputs give. */
#define PANEL_TILE(R)                                                                          \
    static void panel_tile_##R(const float *panel, long count, const float *input,             \
                               long input_stride, float *kept)                                 \
    {                                                                                          \
        const float *x[R];                                                                     \
        vec sums[R][PANEL_BLOCKS];                                                             \
        UNROLL for (int r = 0; r < R; r++) x[r] = input + r * input_stride;                    \
        UNROLL for (int r = 0; r < R; r++)                                                     \
            UNROLL for (int b = 0; b < PANEL_BLOCKS; b++)                                      \
                sums[r][b] = v_load(kept + r * PANEL_LANES + b * LANES);                       \
        for (long k = 0; k < count; k++) {                                                     \
            vec weights[PANEL_BLOCKS];                                                         \
            UNROLL for (int b = 0; b < PANEL_BLOCKS; b++)                                      \
                weights[b] = v_load(panel + k * PANEL_LANES + b * LANES);                      \
            UNROLL for (int r = 0; r < R; r++)                                                 \
                UNROLL for (int b = 0; b < PANEL_BLOCKS; b++)                                  \
                    sums[r][b] = v_fma(weights[b], v_all(x[r][k]), sums[r][b]);                \
        }                                                                                      \
        UNROLL for (int r = 0; r < R; r++)                                                     \
            UNROLL for (int b = 0; b < PANEL_BLOCKS; b++)                                      \
                v_store(kept + r * PANEL_LANES + b * LANES, sums[r][b]);                       \
    }

PANEL_TILE(1)
PANEL_TILE(2)
PANEL_TILE(3)
PANEL_TILE(4)
PANEL_TILE(5)
PANEL_TILE(6)

/* The outputs of PANEL_BLOCKS blocks for at most PANEL_ROWS rows. */
static void panel_of_blocks(const product_call *call, long block, long row, long rows, float *panel,
                            float *sums)
{
    static void (*const UNPACKERS[])(const matrix *, long, long, long, float *)
        = { unpack_float32, unpack_bfloat16, unpack_float16 };
    static void (*const TILES[])(const float *, long, const float *, long, float *)
        = { panel_tile_1, panel_tile_2, panel_tile_3, panel_tile_4, panel_tile_5, panel_tile_6 };
    const long inputs = call->weight->inputs + (call->weight->inputs & 1);
    memset(sums, 0, (size_t)(rows * PANEL_LANES) * sizeof(float));
    for (long k = 0; k < inputs; k += PANEL_INPUTS) {
        long count = inputs - k < PANEL_INPUTS ? inputs - k : PANEL_INPUTS;
        UNPACKERS[call->weight->kind](call->weight, block, k, count, panel);
        for (long r = 0; r < rows; r += PANEL_TILE_ROWS) {
            long of_tile = rows - r < PANEL_TILE_ROWS ? rows - r : PANEL_TILE_ROWS;
            float *own = sums + r * PANEL_LANES;
            TILES[of_tile - 1](panel, count, call->input + (row + r) * call->input_stride + k,
                               call->input_stride, own);
            if (k + count < inputs) continue;
            for (long i = 0; i < of_tile * PANEL_BLOCKS; i++)
                finish(call, row + r + i / PANEL_BLOCKS, block + i % PANEL_BLOCKS,
                       v_load(own + i * LANES));
        }
    }
}

static void product_chunk(void *arguments, long chunk)
{
    const product_call *call = arguments;
    long blocks = padded_blocks(call->weight);
    long first = chunk * call->blocks_of_chunk;
    long last = first + call->blocks_of_chunk < blocks ? first + call->blocks_of_chunk : blocks;
    float *panel = NULL;
    if (call->weight->kind < INT8 && call->rows >= PANELS_FROM)
        panel = scratch(1, (PANEL_INPUTS + PANEL_ROWS) * PANEL_LANES * sizeof(float));
    if (panel == NULL) { /* also where memory is missing: it is only slower */
        tiles_of_blocks(call, first, last);
        return;
    }
    for (long row = 0; row < call->rows; row += PANEL_ROWS) {
        long rows = call->rows - row < PANEL_ROWS ? call->rows - row : PANEL_ROWS;
        for (long block = first; block < last; block += PANEL_BLOCKS)
            panel_of_blocks(call, block, row, rows, panel, panel + PANEL_INPUTS * PANEL_LANES);
    }
}

static void round_row(const product_call *call, long row)
{
    const float *x = call->input + row * call->input_stride;
    long inputs = call->weight->inputs;
    long groups = (inputs + GROUP - 1) / GROUP;
    long first = row / MOST_ROWS * MOST_ROWS; /* of the tile */
    long of_tile = call->rows - first < MOST_ROWS ? call->rows - first : MOST_ROWS;
    for (long group = 0; group < groups; group++) {
        float padded[GROUP];
        const float *values = x + group * GROUP;
        if (inputs - group * GROUP < GROUP) {
            memset(padded, 0, sizeof padded);
            memcpy(padded, values, (size_t)(inputs - group * GROUP) * sizeof(float));
            values = padded;
        }
        vec largest = v_zero();
        for (int i = 0; i < GROUP; i += LANES) largest = v_max(largest, v_abs(v_load(values + i)));
        float most = v_largest(largest);
        float inverse = most > 0 ? 127.0f / most : 0.0f;
        long index = first * groups + group * of_tile + row - first;
        ivec sum = i_all(0);
        for (int i = 0; i < GROUP; i += LANES) {
            ivec integers = i_of_floats(v_mul(v_load(values + i), v_all(inverse)));
            sum = i_add(sum, integers);
            i_store_bytes(call->rounded.integers + index * GROUP + i, integers);
        }
        call->rounded.scales[index] = most / 127.0f;
        call->rounded.sums[index] = (int32_t)v_sum(v_of_ints(sum)); /* exact: below 2^24 */
    }
}

/* Rows of a chunk when many rows are rounded. */
#define ROUNDED_AT_ONCE 4

static void round_chunk(void *arguments, long chunk)
{
    const product_call *call = arguments;
    long last = (chunk + 1) * ROUNDED_AT_ONCE;
    if (last > call->rows) last = call->rows;
    for (long row = chunk * ROUNDED_AT_ONCE; row < last; row++) round_row(call, row);
}

EXPORT int product(const matrix *weight, const float *input, long rows, long input_stride,
                   const float *bias, float scale, int adds, float *output, long output_stride)
{
    product_call call = { weight, input, rows, input_stride, bias, scale, adds, output,
                          output_stride, { 0 }, 0 };
    if (weight->kind >= INT8) {
        size_t groups = (size_t)(weight->inputs + GROUP - 1) / GROUP * (size_t)rows;
        char *memory = scratch(0, groups * (GROUP + 2 * sizeof(float)));
        if (memory == NULL) return -1;
        call.rounded.integers = (int8_t *)memory;
        call.rounded.scales = (float *)(memory + groups * GROUP);
        call.rounded.sums = (int32_t *)(memory + groups * (GROUP + sizeof(float)));
        in_threads(round_chunk, &call, (rows + ROUNDED_AT_ONCE - 1) / ROUNDED_AT_ONCE);
    } else if (weight->inputs & 1) { /* rows with one more input, of 0 */
        float *copy = scratch(0, (size_t)rows * (size_t)(weight->inputs + 1) * sizeof(float));
        if (copy == NULL) return -1;
        for (long row = 0; row < rows; row++) {
            float *own = copy + row * (weight->inputs + 1);
            memcpy(own, input + row * input_stride, (size_t)weight->inputs * sizeof(float));
            own[weight->inputs] = 0;
        }
        call.input = copy;
        call.input_stride = weight->inputs + 1;
    }
    long blocks = padded_blocks(weight);
    long threads = atomic_load_explicit(&pool.threads, memory_order_relaxed);
    long share = blocks / (4 * threads) / 4 * 4; /* of a chunk: a few for each thread */
    call.blocks_of_chunk = threads == 1 ? blocks : share < 4 ? 4 : share > 64 ? 64 : share;
    in_threads(product_chunk, &call, (blocks + call.blocks_of_chunk - 1) / call.blocks_of_chunk);
    return 0;
}

/* ------------------------------------------------------------------ norms */

/* Elements of a vector that a row of `count` has from `i` on; 0 in the others. */
INLINE vec v_load_part(const float *p, long count)
{
    if (count >= LANES) return v_load(p);
    float values[LANES] = { 0 };
    memcpy(values, p, (size_t)count * sizeof(float));
    return v_load(values);
}

INLINE void v_store_part(float *p, vec a, long count)
{
    if (count >= LANES) {
        v_store(p, a);
        return;
    }
    float values[LANES];
    v_store(values, a);
    memcpy(p, values, (size_t)count * sizeof(float));
}

static void norm_row(const float *x, long width, const float *weight, float eps, float *output)
{
    vec squares = v_zero();
    for (long i = 0; i < width; i += LANES) {
        vec part = v_load_part(x + i, width - i);
        squares = v_fma(part, part, squares);
    }
    vec factor = v_all(1.0f / sqrtf(v_sum(squares) / (float)width + eps));
    for (long i = 0; i < width; i += LANES) {
        vec normed = v_mul(v_load_part(x + i, width - i), factor);
        if (weight) normed = v_mul(normed, v_load_part(weight + i, width - i));
        v_store_part(output + i, normed, width - i);
    }
}

typedef struct {
    const float *input;
    long input_stride;
    long parts;
    long width;
    const float *weight;
    long weight_stride;
    float eps;
    float *output;
    long output_stride;
} norm_call;

static void norm_chunk(void *arguments, long row)
{
    const norm_call *call = arguments;
    for (long part = 0; part < call->parts; part++)
        norm_row(call->input + row * call->input_stride + part * call->width, call->width,
                 call->weight ? call->weight + part * call->weight_stride : NULL, call->eps,
                 call->output + row * call->output_stride + part * call->width);
}

/* RMSNorm of `parts` neighbouring parts of each row, each of `width` elements: output = x /
 * sqrt(mean(x^2) + eps) * weight. Part p has the weights from `weight` + p * weight_stride on;
 * NULL: no weights. `output` may be `input`. */
EXPORT int rms_norm(const float *input, long rows, long input_stride, long parts, long width,
                    const float *weight, long weight_stride, float eps, float *output,
                    long output_stride)
{
    norm_call call = { input, input_stride, parts, width, weight, weight_stride, eps, output,
                       output_stride };
    in_threads(norm_chunk, &call, rows);
    return 0;
}

/* ------------------------------------------------------------------ rotary embedding */

/* Rotates the first `rotated` elements of the first `rotated_heads` heads of each row, as pairs of
 * neighbours, by the complex numbers `rotation` [row][rotated / 2], and writes the keys and values
 * of the first `written` rows to the cache.
 *
 * `heads` [row][query heads, key heads, value heads][size]. The key of row r and key-value head h
 * goes to keys + h * head_stride + r * size. */
EXPORT int rotate_and_write(float *heads, long rows, long stride, long query_heads, long kv_heads,
                            long size, const float *rotation, long rotation_stride, long rotated,
                            long written, float *keys,
                            float *values, long head_stride)
{
    for (long row = 0; row < rows; row++) {
        float *own = heads + row * stride;
        for (long head = 0; rotation && head < query_heads + kv_heads; head++) {
            float *x = own + head * size;
            const float *turn = rotation + row * rotation_stride;
            for (long i = 0; i < rotated; i += LANES) {
                vec by = v_load_part(turn + i, rotated - i);
                vec part = v_load_part(x + i, rotated - i);
                vec turned = v_fma_sub_add(part, v_even(by), v_mul(v_swap_pairs(part), v_odd(by)));
                v_store_part(x + i, turned, rotated - i);
            }
        }
        if (row >= written || keys == NULL) continue;
        const float *new_keys = own + query_heads * size;
        for (long head = 0; head < kv_heads; head++) {
            long place = head * head_stride + row * size;
            memcpy(keys + place, new_keys + head * size, (size_t)size * sizeof(float));
            memcpy(values + place, new_keys + (kv_heads + head) * size,
                   (size_t)size * sizeof(float));
        }
    }
    return 0;
}

/* ------------------------------------------------------------------ attention */

/* The slots that a row sees: `first` to `last` - 1, then others[begin] to others[end - 1], all
 * ascending. */
typedef struct {
    int32_t first;
    int32_t last;
    int32_t begin;
    int32_t end;
} seen_slots;

typedef struct {
    const float *queries;
    long rows;
    long query_stride;
    long heads;
    long kv_heads;
    long size;
    const float *keys;
    const float *values;
    long head_stride;
    const seen_slots *seen;
    const int32_t *others;
    float scale;
    float cap;
    const float *sinks;
    float *output;
    long output_stride;
    long rows_of_chunk;
    atomic_int failed; /* memory was missing in a thread */
} attention_call;

/* The query heads from `head` on of a row; they share the keys and values of one head. */
typedef struct {
    const float *queries;
    const float *keys;
    const float *values;
    const seen_slots *seen;
    long count; /* of slots */
    float *output;
} attended;

INLINE attended attended_by(const attention_call *call, long row, long kv_head, long head)
{
    const seen_slots *seen = &call->seen[row];
    return (attended){
        .queries = call->queries + row * call->query_stride + head * call->size,
        .keys = call->keys + kv_head * call->head_stride,
        .values = call->values + kv_head * call->head_stride,
        .seen = seen,
        .count = seen->last - seen->first + seen->end - seen->begin,
        .output = call->output + row * call->output_stride + head * call->size,
    };
}

INLINE long slot_of(const seen_slots *seen, const int32_t *others, long index)
{
    long plain = seen->last - seen->first;
    return index < plain ? seen->first + index : others[seen->begin + index - plain];
}

INLINE vec v_load_or_zero(const float *p, long count)
{
    return count > 0 ? v_load_part(p, count) : v_zero();
}

/* Keys whose products with G queries are summed up together: as many as the registers hold. */
#define KEYS(G) (LANES == 16 || (G) < 3 ? 4 : 2)

/* Adds to the sums of KEYS(G) keys and G heads the products of key and query. */
#define ADD_PRODUCTS(G, KEY, QUERY)                                                            \
    for (long i = 0; i < size; i += LANES) {                                                   \
        vec query[G];                                                                          \
        UNROLL for (int g = 0; g < G; g++) query[g] = QUERY;                                   \
        UNROLL for (int k = 0; k < KEYS(G); k++) {                                             \
            vec part = KEY;                                                                    \
            UNROLL for (int g = 0; g < G; g++) sums[k][g] = v_fma(part, query[g], sums[k][g]); \
        }                                                                                      \
    }

/* Scores of G heads, [head][padded], for the slots with the indices `first` to `last` - 1; `first`
 * is a multiple of LANES. Up to LANES scores after them are overwritten. */
#define SCORES(G)                                                                              \
    static void scores_##G(const attention_call *call, const attended *own, long first,        \
                           long last, float *scores, long padded)                              \
    {                                                                                          \
        const long size = call->size;                                                          \
        for (long j = first; j < last; j += LANES) {                                           \
            vec parts[G][LANES];                                                               \
            for (long t = 0; t < LANES; t += KEYS(G)) {                                        \
                const float *keys[KEYS(G)];                                                    \
                vec sums[KEYS(G)][G];                                                          \
                UNROLL for (int k = 0; k < KEYS(G); k++) {                                     \
                    long index = j + t + k < last ? j + t + k : last - 1;                      \
                    keys[k] = own->keys + slot_of(own->seen, call->others, index) * size;      \
                    UNROLL for (int g = 0; g < G; g++) sums[k][g] = v_zero();                  \
                }                                                                              \
                if (size % LANES == 0)                                                         \
                    ADD_PRODUCTS(G, v_load(keys[k] + i), v_load(own->queries + g * size + i))  \
                else                                                                           \
                    ADD_PRODUCTS(G, v_load_part(keys[k] + i, size - i),                        \
                                 v_load_part(own->queries + g * size + i, size - i))           \
                UNROLL for (int k = 0; k < KEYS(G); k++)                                       \
                    UNROLL for (int g = 0; g < G; g++) parts[g][t + k] = sums[k][g];           \
            }                                                                                  \
            UNROLL for (int g = 0; g < G; g++)                                                 \
                v_store(scores + g * padded + j, v_mul(v_sums(parts[g]), v_all(call->scale))); \
        }                                                                                      \
    }

/* Adds to the sums of G heads COUNT elements of each slot's value, times the slot's score. */
#define ADD_VALUES(G, COUNT, LOAD)                                                             \
    for (long j = first; j < last; j++) {                                                      \
        const float *value = own->values + slot_of(own->seen, call->others, j) * size + i;     \
        UNROLL for (int p = 0; p < 4; p++) {                                                   \
            if (p * LANES >= (COUNT)) continue;                                                \
            vec part = LOAD;                                                                   \
            UNROLL for (int g = 0; g < G; g++)                                                 \
                sums[g][p] = v_fma(part, v_all(scores[g * padded + j]), sums[g][p]);           \
        }                                                                                      \
    }

/* Adds to the outputs of G heads the values of the slots with the indices `first` to `last` - 1,
 * each times its score. The outputs begin at 0 if `first` is 0. */
#define VALUES(G)                                                                              \
    static void values_##G(const attention_call *call, const attended *own, long first,        \
                           long last, const float *scores, long padded)                        \
    {                                                                                          \
        const long size = call->size;                                                          \
        for (long i = 0; i < size; i += 4 * LANES) {                                           \
            float *output = own->output + i;                                                   \
            vec sums[G][4];                                                                    \
            UNROLL for (int g = 0; g < G; g++)                                                 \
                UNROLL for (int p = 0; p < 4; p++)                                             \
                    sums[g][p] = first == 0 ? v_zero()                                         \
                                            : v_load_or_zero(output + g * size + p * LANES,    \
                                                             size - i - p * LANES);            \
            if (size - i >= 4 * LANES)                                                         \
                ADD_VALUES(G, 4 * LANES, v_load(value + p * LANES))                            \
            else                                                                               \
                ADD_VALUES(G, size - i, v_load_part(value + p * LANES, size - i - p * LANES))  \
            UNROLL for (int g = 0; g < G; g++)                                                 \
                UNROLL for (int p = 0; p < 4; p++)                                             \
                    if (size - i > p * LANES)                                                  \
                        v_store_part(output + g * size + p * LANES, sums[g][p],                \
                                     size - i - p * LANES);                                    \
        }                                                                                      \
    }

/* Rows of a chunk, and the slots whose keys or values stay in the first cache while the rows go
 * by. */
#define ATTENDED_ROWS 8
#define ATTENDED_SLOTS 64

/* A head's query of one row, its scores, and where its output goes. */
typedef struct {
    const float *query;
    float *scores;
    float *output;
} head_query;

/* Transposing so many elements of a key is as much work as the sum over elements that this spares
 * one query. */
#define WORTH_OF_SUM 12

INLINE long at_most(long count, long most) { return count < most ? count : most; }

#if LANES == 16
/* Queries of several rows and heads for slots that all of them see are computed together. Each
 * result has the bits that SCORES and VALUES would give it. */

#define PAIRS_OF(unpack, a, b) \
    _mm512_castpd_ps(_mm512_##unpack##_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)))

/* Writes LANES rows of LANES elements, `stride` apart, to `columns` [element][row]. */
INLINE void transpose(const float *rows, long stride, float *columns)
{
    vec pairs[LANES], fours[LANES]; /* of rows, with the same element in each quarter */
    UNROLL for (int i = 0; i < LANES; i += 2) {
        vec first = v_load(rows + i * stride), second = v_load(rows + (i + 1) * stride);
        pairs[i] = _mm512_unpacklo_ps(first, second);
        pairs[i + 1] = _mm512_unpackhi_ps(first, second);
    }
    UNROLL for (int i = 0; i < LANES; i += 4) {
        fours[i] = PAIRS_OF(unpacklo, pairs[i], pairs[i + 2]);
        fours[i + 1] = PAIRS_OF(unpackhi, pairs[i], pairs[i + 2]);
        fours[i + 2] = PAIRS_OF(unpacklo, pairs[i + 1], pairs[i + 3]);
        fours[i + 3] = PAIRS_OF(unpackhi, pairs[i + 1], pairs[i + 3]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        float *column = columns + i * LANES;
        vec left = _mm512_shuffle_f32x4(fours[i], fours[4 + i], 0x44);
        vec right = _mm512_shuffle_f32x4(fours[8 + i], fours[12 + i], 0x44);
        v_store(column, _mm512_shuffle_f32x4(left, right, 0x88));
        v_store(column + 4 * LANES, _mm512_shuffle_f32x4(left, right, 0xDD));
        left = _mm512_shuffle_f32x4(fours[i], fours[4 + i], 0xEE);
        right = _mm512_shuffle_f32x4(fours[8 + i], fours[12 + i], 0xEE);
        v_store(column + 8 * LANES, _mm512_shuffle_f32x4(left, right, 0x88));
        v_store(column + 12 * LANES, _mm512_shuffle_f32x4(left, right, 0xDD));
    }
}

/* Scores of Q queries for the LANES slots from `first` on, whose keys are `columns`
 * [element][slot]. Products are summed up for each element modulo LANES, then as in v_sums. */
#define SCORES_TOGETHER(Q)                                                                     \
    static void scores_together_##Q(const head_query *own, const float *columns, long size,    \
                                    float scale, long first)                                   \
    {                                                                                          \
        vec fourths[4][Q];                                                                     \
        for (int lane = 0; lane < 4; lane++) {                                                 \
            vec sums[4][Q];                                                                    \
            UNROLL for (int n = 0; n < 4; n++)                                                 \
                UNROLL for (int q = 0; q < Q; q++) sums[n][q] = v_zero();                      \
            for (long i = lane; i < size; i += LANES)                                          \
                UNROLL for (int n = 0; n < 4; n++) {                                           \
                    vec keys = v_load(columns + (i + 4 * n) * LANES);                          \
                    UNROLL for (int q = 0; q < Q; q++)                                         \
                        sums[n][q] = v_fma(keys, v_all(own[q].query[i + 4 * n]), sums[n][q]);  \
                }                                                                              \
            UNROLL for (int q = 0; q < Q; q++)                                                 \
                fourths[lane][q] = v_add(v_add(sums[0][q], sums[2][q]),                        \
                                         v_add(sums[1][q], sums[3][q]));                       \
        }                                                                                      \
        UNROLL for (int q = 0; q < Q; q++) {                                                   \
            vec sum = v_add(v_add(fourths[0][q], fourths[2][q]),                               \
                            v_add(fourths[1][q], fourths[3][q]));                              \
            v_store(own[q].scores + first, v_mul(sum, v_all(scale)));                          \
        }                                                                                      \
    }

/* Adds to the outputs of Q queries the values of the slots `first` to `last` - 1, each times its
 * score, P vectors at once. `values` [slot][size]; the outputs begin at 0 if `first` is 0. */
#define VALUES_TOGETHER(Q, P)                                                                  \
    static void values_together_##Q##_##P(const head_query *own, const float *values,          \
                                          long size, long first, long last)                    \
    {                                                                                          \
        for (long i = 0; i < size; i += P * LANES) {                                           \
            vec sums[Q][P];                                                                    \
            UNROLL for (int q = 0; q < Q; q++)                                                 \
                UNROLL for (int p = 0; p < P; p++)                                             \
                    sums[q][p] = first == 0 ? v_zero() : v_load(own[q].output + i + p * LANES); \
            for (long j = first; j < last; j++) {                                              \
                const float *value = values + j * size + i;                                    \
                vec parts[P];                                                                  \
                UNROLL for (int p = 0; p < P; p++) parts[p] = v_load(value + p * LANES);       \
                UNROLL for (int q = 0; q < Q; q++) {                                           \
                    vec score = v_all(own[q].scores[j]);                                       \
                    UNROLL for (int p = 0; p < P; p++)                                         \
                        sums[q][p] = v_fma(parts[p], score, sums[q][p]);                       \
                }                                                                              \
            }                                                                                  \
            UNROLL for (int q = 0; q < Q; q++)                                                 \
                UNROLL for (int p = 0; p < P; p++)                                             \
                    v_store(own[q].output + i + p * LANES, sums[q][p]);                        \
        }                                                                                      \
    }

#define TOGETHER 4 /* queries, at most: as many as the registers hold sums of */
SCORES_TOGETHER(1) SCORES_TOGETHER(2) SCORES_TOGETHER(3) SCORES_TOGETHER(4)
VALUES_TOGETHER(1, 2) VALUES_TOGETHER(2, 2) VALUES_TOGETHER(3, 2) VALUES_TOGETHER(4, 2)
VALUES_TOGETHER(1, 4) VALUES_TOGETHER(2, 4) VALUES_TOGETHER(3, 4) VALUES_TOGETHER(4, 4)

/* The number of first slots that all rows see, as one range; a multiple of LANES. */
static long shared_slots(const attended *own, long rows)
{
    long shared = own[0].seen->last - own[0].seen->first;
    for (long r = 1; r < rows; r++) {
        if (own[r].seen->first != own[0].seen->first) return 0;
        shared = at_most(shared, own[r].seen->last - own[r].seen->first);
    }
    return shared / LANES * LANES;
}

/* Scores of all queries for the first `slots` keys [slot][size], a multiple of LANES. `columns`
 * has room for [size][LANES]. */
static void score_together(const head_query *all, long count, const float *keys, long slots,
                           long size, float scale, float *columns)
{
    static void (*const SCORES[TOGETHER])(const head_query *, const float *, long, float, long)
        = { scores_together_1, scores_together_2, scores_together_3, scores_together_4 };
    const long bytes = size * LANES * (long)sizeof(float);
    for (long first = 0; first < slots; first += LANES) {
        const char *next = (const char *)(keys + first * size) + bytes;
        for (long i = 0; i < bytes; i += 64) _mm_prefetch(next + i, _MM_HINT_T0);
        for (long i = 0; i < size; i += LANES)
            transpose(keys + first * size + i, size, columns + i * LANES);
        for (long q = 0; q < count; q += TOGETHER)
            SCORES[at_most(count - q, TOGETHER) - 1](all + q, columns, size, scale, first);
    }
}

/* Adds to the outputs of all queries the first `slots` values [slot][size], times their scores. */
static void add_together(const head_query *all, long count, const float *values, long slots,
                         long size)
{
    static void (*const BY_TWO[TOGETHER])(const head_query *, const float *, long, long, long)
        = { values_together_1_2, values_together_2_2, values_together_3_2, values_together_4_2 };
    static void (*const BY_FOUR[TOGETHER])(const head_query *, const float *, long, long, long)
        = { values_together_1_4, values_together_2_4, values_together_3_4, values_together_4_4 };
    void (*const *functions)(const head_query *, const float *, long, long, long)
        = size % (4 * LANES) ? BY_TWO : BY_FOUR;
    for (long first = 0; first < slots; first += ATTENDED_SLOTS)
        for (long q = 0; q < count; q += TOGETHER)
            functions[at_most(count - q, TOGETHER) - 1](all + q, values, size, first,
                                                        at_most(slots, first + ATTENDED_SLOTS));
}

#else
/* With 16 registers it is not faster. */
INLINE long shared_slots(const attended *own, long rows) { return 0; }
INLINE void score_together(const head_query *all, long count, const float *keys, long slots,
                           long size, float scale, float *columns) {}
INLINE void add_together(const head_query *all, long count, const float *values, long slots,
                         long size) {}
#endif

/* Turns scores, which are capped first, into e^(score - largest); returns 1 / their sum, to which
 * a sink adds. */
static float softmax_row(float *scores, long count, float cap, float sink)
{
    for (long j = count; j % LANES; j++) scores[j] = -INFINITY;
    vec most = v_all(sink);
    for (long j = 0; j < count; j += LANES) {
        vec part = v_load(scores + j);
        if (cap > 0) {
            part = v_mul(v_tanh(v_div(part, v_all(cap))), v_all(cap));
            v_store(scores + j, part);
        }
        most = v_max(most, part);
    }
    if (cap > 0)
        for (long j = count; j % LANES; j++) scores[j] = -INFINITY;
    float largest = v_largest(most);
    vec total = v_zero();
    for (long j = 0; j < count; j += LANES) {
        vec part = v_exp(v_sub(v_load(scores + j), v_all(largest)));
        total = v_add(total, part);
        v_store(scores + j, part);
    }
    float sum = v_sum(total);
    if (sink != -INFINITY) sum += expf(sink - largest);
    return sum > 0 ? 1.0f / sum : 0.0f;
}

#define MOST_HEADS 4 /* that are computed together */

SCORES(1) SCORES(2) SCORES(3) SCORES(4)
VALUES(1) VALUES(2) VALUES(3) VALUES(4)

static void (*const SCORES_OF[MOST_HEADS])(const attention_call *, const attended *, long, long,
                                           float *, long)
    = { scores_1, scores_2, scores_3, scores_4 };
static void (*const VALUES_OF[MOST_HEADS])(const attention_call *, const attended *, long, long,
                                           const float *, long)
    = { values_1, values_2, values_3, values_4 };

/* The attention of rows [`row`, `last_row`) and of `heads` query heads from `head` on. Each row
 * takes its slots in order, as it would alone. */
static int attend(const attention_call *call, long row, long last_row, long kv_head, long head,
                  long heads)
{
    const long rows = last_row - row;
    const long count = rows * heads;
    const long size = call->size;
    attended own[ATTENDED_ROWS];
    long longest = 0;
    for (long r = 0; r < rows; r++) {
        own[r] = attended_by(call, row + r, kv_head, head);
        if (own[r].count > longest) longest = own[r].count;
    }
    const long padded = (longest + LANES - 1) / LANES * LANES;
    float *scores = scratch(1, (size_t)(count * padded + size * LANES) * sizeof(float));
    if (scores == NULL) return -1;
    head_query all[ATTENDED_ROWS * MOST_HEADS];
    for (long i = 0; i < count; i++) {
        const attended *of_row = &own[i / heads];
        long place = i % heads * size;
        all[i] = (head_query){ of_row->queries + place, scores + i * padded,
                               of_row->output + place };
    }

    const long first_slot = own[0].seen->first * size;
    const long together = rows > 1 && size % (2 * LANES) == 0 ? shared_slots(own, rows) : 0;
    const long scored = count * WORTH_OF_SUM >= size ? together : 0;
    score_together(all, count, own[0].keys + first_slot, scored, size, call->scale,
                   scores + count * padded);
    for (long first = scored; first < longest; first += ATTENDED_SLOTS)
        for (long r = 0; r < rows; r++) {
            long last = at_most(own[r].count, first + ATTENDED_SLOTS);
            SCORES_OF[heads - 1](call, &own[r], first, last, scores + r * heads * padded, padded);
        }

    float factors[ATTENDED_ROWS * MOST_HEADS];
    for (long i = 0; i < count; i++) {
        float sink = call->sinks ? call->sinks[head + i % heads] : -INFINITY;
        factors[i] = softmax_row(all[i].scores, own[i / heads].count, call->cap, sink);
    }

    add_together(all, count, own[0].values + first_slot, together, size);
    for (long first = together; first < longest; first += ATTENDED_SLOTS)
        for (long r = 0; r < rows; r++) {
            long last = at_most(own[r].count, first + ATTENDED_SLOTS);
            if (first >= last) continue;
            VALUES_OF[heads - 1](call, &own[r], first, last, scores + r * heads * padded, padded);
        }
    for (long i = 0; i < count; i++) {
        vec factor = v_all(factors[i]);
        for (long k = 0; k < size; k += LANES) {
            float *output = all[i].output + k;
            v_store_part(output, v_mul(v_load_part(output, size - k), factor), size - k);
        }
    }
    return 0;
}

static void attention_chunk(void *arguments, long chunk)
{
    attention_call *call = arguments;
    long chunks = (call->rows + call->rows_of_chunk - 1) / call->rows_of_chunk; /* of a head */
    long kv_head = chunk / chunks;
    long row = chunk % chunks * call->rows_of_chunk;
    long last_row = row + call->rows_of_chunk < call->rows ? row + call->rows_of_chunk : call->rows;
    long group = call->heads / call->kv_heads;
    for (long done = 0; done < group; done += MOST_HEADS) {
        long heads = group - done < MOST_HEADS ? group - done : MOST_HEADS;
        if (attend(call, row, last_row, kv_head, kv_head * group + done, heads)) call->failed = 1;
    }
}

/* Attention of grouped heads: softmax(scale * queries keys^T) values over the slots that each row
 * sees. `queries` and `output` [row][heads][size]; keys and values of a head are `head_stride`
 * apart, those of a slot `size`. Scores s become cap * tanh(s / cap) if `cap` is above 0; `sinks`
 * [heads] are scores of a key without a value, or NULL. */
EXPORT int attention(const float *queries, long rows, long query_stride, long heads, long kv_heads,
                     long size, const float *keys, const float *values, long head_stride,
                     const seen_slots *seen, const int32_t *others, float scale, float cap,
                     const float *sinks, float *output, long output_stride)
{
    attention_call call = { queries, rows, query_stride, heads, kv_heads, size, keys, values,
                            head_stride, seen, others, scale, cap, sinks, output,
                            output_stride, 1, 0 };
    long threads = atomic_load_explicit(&pool.threads, memory_order_relaxed);
    long share = threads == 1 ? rows : rows * kv_heads / (4 * threads); /* a few for each thread */
    call.rows_of_chunk = share < 1 ? 1 : share > ATTENDED_ROWS ? ATTENDED_ROWS : share;
    long chunks = (rows + call.rows_of_chunk - 1) / call.rows_of_chunk; /* of a head */
    in_threads(attention_chunk, &call, chunks * kv_heads);
    return call.failed ? -1 : 0;
}

/* ------------------------------------------------------------------ gated activations */

enum activation { SILU, GELU, GELU_TANH, RELU };

/* The standard normal distribution function, (1 + erf(a / sqrt(2))) / 2, with an error of about
 * 1e-7. The share below -|a| is e^p, with a polynomial p of |a| that was fitted for |a| up to 14
 * so that a times the share is as right as can be; the others are smaller than e^-87. */
INLINE vec v_normal(vec a)
{
    static const float POLYNOMIAL[] = {
        -8.177925892027815e-09f, 3.284334013642365e-07f,  -5.1823153626173735e-06f,
        4.120161247556098e-05f,  -1.594432396814227e-04f, -6.228906568139791e-05f,
        4.884394817054272e-03f,  -3.639393299818039e-02f, -3.1829309463500977e-01f,
        -7.978864908218384e-01f, -6.931471228599548e-01f,
    };
    vec size = v_min(v_abs(a), v_all(14.0f));
    vec sum = v_all(POLYNOMIAL[0]);
    UNROLL for (int i = 1; i < 11; i++) sum = v_fma(sum, size, v_all(POLYNOMIAL[i]));
    vec share = v_exp(sum);
    return v_above_0(a, v_sub(v_all(1.0f), share), share);
}

INLINE vec activated(vec x, long kind)
{
    if (kind == SILU) return v_div(x, v_add(v_all(1.0f), v_exp(v_sub(v_zero(), x))));
    if (kind == RELU) return v_max(x, v_zero());
    if (kind == GELU_TANH) {
        /* (1 + tanh(a)) / 2 = 1 / (1 + e^-2a), which is right for negative a too */
        vec inner = v_fma(v_mul(v_mul(x, x), x), v_all(0.044715f), x);
        vec power = v_exp(v_mul(inner, v_all(-1.5957691216057308f)));
        return v_div(x, v_add(v_all(1.0f), power));
    }
    return v_mul(x, v_normal(x));
}

typedef struct {
    const float *input;
    long input_stride;
    long inner;
    long kind;
    float *output;
    long output_stride;
} gate_call;

static void gate_chunk(void *arguments, long row)
{
    const gate_call *call = arguments;
    const float *gate = call->input + row * call->input_stride;
    const float *up = gate + call->inner;
    float *output = call->output + row * call->output_stride;
    for (long i = 0; i < call->inner; i += LANES) {
        long left = call->inner - i;
        vec gates = activated(v_load_part(gate + i, left), call->kind);
        v_store_part(output + i, v_mul(gates, v_load_part(up + i, left)), left);
    }
}

/* output = activation(gate) * up, for rows of the gates and then the ups, `inner` of each. */
EXPORT int gated(const float *input, long rows, long input_stride, long inner, long kind,
                 float *output, long output_stride)
{
    gate_call call = { input, input_stride, inner, kind, output, output_stride };
    in_threads(gate_chunk, &call, rows);
    return 0;
}

/* ------------------------------------------------------------------ choices of tokens */

#define ALL_LANES ((1u << LANES) - 1)
#define SUMMED_UP 1024 /* elements whose sum is rounded on its own */

/* Logits of a row with `count` left; -inf in lanes after them. */
INLINE vec v_load_logits(const float *p, long count)
{
    if (count >= LANES) return v_load(p);
    float values[LANES];
    for (int i = 0; i < LANES; i++) values[i] = i < count ? p[i] : -INFINITY;
    return v_load(values);
}

/* The index of the first of the largest logits; -1 if there is a NaN. */
static long likeliest_of(const float *logits, long count)
{
    vec largest = v_all(-INFINITY);
    unsigned numbers = ALL_LANES;
    for (long i = 0; i < count; i += LANES) {
        vec part = v_load_logits(logits + i, count - i);
        numbers &= v_equal(part, part);
        largest = v_max(largest, part);
    }
    if (numbers != ALL_LANES) return -1;
    vec top = v_all(v_largest(largest));
    for (long i = 0;; i += LANES) {
        unsigned equal = v_equal(v_load_logits(logits + i, count - i), top);
        if (equal) return i + __builtin_ctz(equal);
    }
}

/* For each row of `count` logits, the index of the first of the largest; -1 if there is a NaN. */
EXPORT int likeliest(const float *logits, long rows, long count, long stride, int64_t *tokens)
{
    for (long row = 0; row < rows; row++) tokens[row] = likeliest_of(logits + row * stride, count);
    return 0;
}

/* The likeliest token of `count` logits, and entropy (nats) and largest probability of their
 * softmax: found[0] to found[2]. They are -1, NaN and NaN if there is a NaN, or if the largest
 * logit is infinite. */
EXPORT int statistics(const float *logits, long count, double *found)
{
    long token = likeliest_of(logits, count);
    if (token < 0 || !isfinite(logits[token])) {
        found[0] = -1;
        found[1] = found[2] = NAN;
        return 0;
    }
    const vec top = v_all(logits[token]);
    double total = 0, weighted = 0;
    for (long first = 0; first < count; first += SUMMED_UP) {
        long last = first + SUMMED_UP < count ? first + SUMMED_UP : count;
        vec weights = v_zero(), products = v_zero();
        for (long i = first; i < last; i += LANES) {
            vec shifted = v_sub(v_load_logits(logits + i, last - i), top);
            vec weight = v_exp(shifted);
            weights = v_add(weights, weight);
            /* of an impossible token, 0 * -inf would be NaN */
            products = v_fma(weight, v_max(shifted, v_all(-1e30f)), products);
        }
        total += v_sum(weights);
        weighted += v_sum(products);
    }
    found[0] = (double)token;
    found[1] = fabs(log(total) - weighted / total); /* rounding may leave either sign */
    found[2] = 1 / total;
    return 0;
}

/* found[i] is the product of `x` [width] with row i of `weights` [rows][width]. */
EXPORT int dots(const float *weights, long rows, long width, const float *x, double *found)
{
    for (long row = 0; row < rows; row++) {
        vec sum = v_zero();
        for (long i = 0; i < width; i += LANES) {
            vec weight = v_load_part(weights + row * width + i, width - i);
            sum = v_fma(weight, v_load_part(x + i, width - i), sum);
        }
        found[row] = v_sum(sum);
    }
    return 0;
}

/* ------------------------------------------------------------------ branches of layers */

#define MOST_RUNS 4

/* A linear layer in runs of its outputs, one weight for each. */
typedef struct {
    const matrix *weights[MOST_RUNS];
    const float *biases[MOST_RUNS];
    long runs;
    long inputs;
    long outputs;
} linear;

/* An attention, or an MLP if `heads` is 0, with the norms around it. What it computes from the
 * normed residual stream is added to this stream, times `scale`.
 *
 * `layer` and `kind` are indices of the places and of the inputs of kinds, see `run_branches`. */
typedef struct {
    linear input; /* queries, keys and values, or gates and ups */
    linear output;
    long is_normed; /* with `norm` [width], or NULL: without weights */
    const float *norm;
    const float *post_norm; /* of the output, or NULL: none */
    float eps;
    float scale;
    long activation;
    long layer;
    long kind;
    long heads;
    long kv_heads; /* 0: another layer writes the keys and values that this one reads */
    long size;
    const float *head_norm; /* of the first `normed_heads` heads, each with its own weights */
    long normed_heads;
    long is_norm_over_all; /* instead: one norm over all query heads, one over all key heads */
    float score_scale;
    float score_cap;
    const float *sinks;
} branch;

/* What all layers of one kind read; see `rotate_and_write` and `attention`. */
typedef struct {
    const float *rotation;
    long rotation_stride;
    long rotated;
    const seen_slots *seen;
    const int32_t *others;
} kind_inputs;

/* One layer's keys and values in a cache, [kv heads][slot][size]. */
typedef struct {
    float *keys;
    float *values;
    long kv_heads;
    long head_stride;
} place;

static int apply_linear(const linear *layer, const float *input, long rows, float scale, int adds,
                        float *output)
{
    float *own = output;
    for (long run = 0; run < layer->runs; run++) {
        const matrix *weight = layer->weights[run];
        if (product(weight, input, rows, layer->inputs, layer->biases[run], scale, adds, own,
                    layer->outputs))
            return -1;
        own += weight->outputs;
    }
    return 0;
}

static void norm_heads(const branch *part, float *heads, long rows, long stride)
{
    if (part->head_norm == NULL) return;
    if (!part->is_norm_over_all) {
        rms_norm(heads, rows, stride, part->normed_heads, part->size, part->head_norm, part->size,
                 part->eps, heads, stride);
        return;
    }
    long queries = part->heads * part->size;
    long keys = part->kv_heads * part->size;
    rms_norm(heads, rows, stride, 1, queries, part->head_norm, 0, part->eps, heads, stride);
    rms_norm(heads + queries, rows, stride, 1, keys, part->head_norm + queries, 0, part->eps,
             heads + queries, stride);
}

static int attend_heads(const branch *part, float *heads, long rows, const kind_inputs *inputs,
                        const place *cached, long slot, float *output)
{
    long width = part->input.outputs;
    norm_heads(part, heads, rows, width);
    float *keys = part->kv_heads ? cached->keys + slot * part->size : NULL;
    float *values = cached->values + slot * part->size;
    rotate_and_write(heads, rows, width, part->heads, part->kv_heads, part->size, inputs->rotation,
                     inputs->rotation_stride, inputs->rotated, rows, keys, values,
                     cached->head_stride);
    return attention(heads, rows, width, part->heads, cached->kv_heads, part->size, cached->keys,
                     cached->values, cached->head_stride, inputs->seen, inputs->others,
                     part->score_scale, part->score_cap, part->sinks, output,
                     part->heads * part->size);
}

static void add_normed(const branch *part, float *added, long rows, long width, float *hidden)
{
    rms_norm(added, rows, width, 1, width, part->post_norm, 0, part->eps, added, width);
    for (long row = 0; row < rows; row++)
        for (long i = row * width; i < (row + 1) * width; i += LANES) {
            long left = (row + 1) * width - i;
            vec sum = v_fma(v_load_part(added + i, left), v_all(part->scale),
                            v_load_part(hidden + i, left));
            v_store_part(hidden + i, sum, left);
        }
}

/* Adds the outputs of branches, in their order, to the residual stream `hidden` [rows][width].
 *
 * `kinds` has the inputs of each kind of layer for the rows from `first_row` on, `places` those of
 * the layers from `first_layer` on, and the keys and values of the rows are written from `slot`
 * on. `buffer` has room for rows * (width + the largest sum of outputs of `input` and inputs of
 * `output`) numbers. */
EXPORT int run_branches(const branch *const *branches, long count, float *hidden, long rows,
                        long width, const kind_inputs *kinds, long first_row, const place *places,
                        long first_layer, long slot, float *buffer)
{
    for (long done = 0; done < count; done++) {
        const branch *part = branches[done];
        const float *normed = hidden;
        if (part->is_normed) {
            rms_norm(hidden, rows, width, 1, width, part->norm, 0, part->eps, buffer, width);
            normed = buffer;
        }
        float *mixed = buffer + rows * width;
        float *taken = mixed + rows * part->input.outputs;
        if (apply_linear(&part->input, normed, rows, 1.0f, 0, mixed)) return -1;
        if (part->heads == 0) {
            gated(mixed, rows, part->input.outputs, part->output.inputs, part->activation, taken,
                  part->output.inputs);
        } else {
            kind_inputs own = kinds[part->kind];
            if (own.rotation) own.rotation += first_row * own.rotation_stride;
            own.seen += first_row;
            if (attend_heads(part, mixed, rows, &own, &places[part->layer - first_layer], slot,
                             taken))
                return -1;
        }
        if (part->post_norm) {
            if (apply_linear(&part->output, taken, rows, 1.0f, 0, buffer)) return -1;
            add_normed(part, buffer, rows, width, hidden);
        } else if (apply_linear(&part->output, taken, rows, part->scale, 1, hidden)) {
            return -1;
        }
    }
    return 0;
}

/* ------------------------------------------------------------------ whole passes */

/* Replaces the stream by a linear map of two normed states: its own, and row r of `before`. */
typedef struct {
    linear map; /* of 2 * width inputs */
    float eps;
} join;

/* Neighbouring layers whose keys and values are in one cache. Before they run, the residual stream
 * is copied to `tap` [row][tap_stride] (NULL: not), then joined with `before` [row][width] if
 * there is a `join`. */
typedef struct {
    const branch *const *branches;
    long count;
    const kind_inputs *kinds;
    long first_row;
    const place *places;
    long first_layer;
    float *tap;
    long tap_stride;
    const join *join;
    const float *before;
} segment;

/* A pass over `rows` tokens, with what stands before and after its layers.
 *
 * The stream begins with the rows `ids` of `table`, of a kind of weights in floating point, or if
 * there is no table with `input` [row][width]. `states` [row][width] get the stream after the
 * layers, or if it `is_normed` after a norm with the weights `norm`. `logits` [row][outputs] are
 * computed for the last `kept` rows; with `logits` NULL, for none. `numbers` is the largest room
 * that a branch needs for each row, see `run_branches`. With a table, the first `known` rows do
 * not run the first segment again: they begin after it, with `input` [known][width]. */
typedef struct {
    const void *table;
    long table_kind;
    float table_scale;
    const int64_t *ids;
    const float *input;
    long known;
    const segment *segments;
    long count;
    long rows;
    long width;
    long slot;
    long numbers;
    long is_normed;
    const float *norm;
    float eps;
    linear head;
    long kept;
    float *states;
    float *logits;
} pass;

static void embed_row(const pass *whole, long id, float *output)
{
    long first = id * whole->width;
    const uint16_t *halves = (const uint16_t *)whole->table + first;
    for (long i = 0; i < whole->width; i++) {
        float value;
        if (whole->table_kind == FLOAT32) {
            value = ((const float *)whole->table)[first + i];
        } else if (whole->table_kind == BFLOAT16) {
            uint32_t bits = (uint32_t)halves[i] << 16;
            memcpy(&value, &bits, 4);
        } else {
            value = _cvtsh_ss(halves[i]);
        }
        output[i] = value * whole->table_scale;
    }
}

static int join_rows(const segment *part, const pass *whole, float *hidden, float *buffer)
{
    const join *own = part->join;
    long width = whole->width;
    rms_norm(hidden, whole->rows, width, 1, width, NULL, 0, own->eps, buffer, 2 * width);
    rms_norm(part->before, whole->rows, width, 1, width, NULL, 0, own->eps, buffer + width,
             2 * width);
    return apply_linear(&own->map, buffer, whole->rows, 1.0f, 0, hidden);
}

EXPORT int run_pass(const pass *whole)
{
    const long rows = whole->rows, width = whole->width;
    float *hidden = scratch(2, (size_t)(rows * (3 * width + whole->numbers)) * sizeof(float));
    if (hidden == NULL) return -1;
    float *buffer = hidden + rows * width;
    const long given = whole->table ? whole->known : rows; /* rows of the input */
    if (given) memcpy(hidden, whole->input, (size_t)(given * width) * sizeof(float));
    for (long row = given; row < rows; row++)
        embed_row(whole, whole->ids[row], hidden + row * width);
    for (long i = 0; i < whole->count; i++) {
        const segment *part = &whole->segments[i];
        const long first = i == 0 ? whole->known : 0; /* of the rows that it runs */
        for (long row = 0; row < rows && part->tap; row++)
            memcpy(part->tap + row * part->tap_stride, hidden + row * width,
                   (size_t)width * sizeof(float));
        if (part->join && join_rows(part, whole, hidden, buffer)) return -1;
        if (first < rows
            && run_branches(part->branches, part->count, hidden + first * width, rows - first,
                            width, part->kinds, part->first_row + first, part->places,
                            part->first_layer, whole->slot + first, buffer))
            return -1;
    }
    if (whole->is_normed)
        rms_norm(hidden, rows, width, 1, width, whole->norm, 0, whole->eps, whole->states, width);
    else
        memcpy(whole->states, hidden, (size_t)(rows * width) * sizeof(float));
    if (whole->logits == NULL) return 0;
    const float *read = whole->states + (rows - whole->kept) * width;
    return apply_linear(&whole->head, read, whole->kept, 1.0f, 0, whole->logits);
}

/* ------------------------------------------------------------------ experts */

/* Outputs of one expert, from column `column` on: those of `weight`, with its bias or NULL. */
typedef struct {
    long expert;
    const matrix *weight;
    const float *bias;
    long column;
} expert_part;

typedef struct {
    product_call product;
    int rounds; /* the activations, also for the expert's other parts */
    long first_chunk;
} grouped_part;

typedef struct {
    const grouped_part *parts;
    long count;
} grouped_call;

static void round_part(void *arguments, long index)
{
    const grouped_part *part = &((const grouped_call *)arguments)->parts[index];
    for (long row = 0; part->rounds && row < part->product.rows; row++)
        round_row(&part->product, row);
}

static void grouped_chunk(void *arguments, long chunk)
{
    const grouped_call *call = arguments;
    long low = 0, high = call->count; /* of the last part that begins at or before the chunk */
    while (high - low > 1) {
        long middle = (low + high) / 2;
        if (call->parts[middle].first_chunk <= chunk)
            low = middle;
        else
            high = middle;
    }
    product_chunk((void *)&call->parts[low].product, chunk - call->parts[low].first_chunk);
}

/* Products of rows that are sorted by expert, each with its expert's weight: the rows of expert e
 * end before ends[e]. `parts` are those of all experts, in the experts' order. All weights have the
 * same number of inputs, which is even. */
EXPORT int grouped_product(const expert_part *parts, long count, const int64_t *ends, long inputs,
                           const float *input, long input_stride, float *output,
                           long output_stride)
{
    const size_t groups = (size_t)(inputs + GROUP - 1) / GROUP;
    const size_t rows = (size_t)ends[parts[count - 1].expert];
    const size_t bytes = (size_t)count * sizeof(grouped_part);
    grouped_part *used = scratch(0, bytes + groups * rows * (GROUP + 2 * sizeof(float)));
    if (used == NULL) return -1;
    float *scales = (float *)(used + count);
    int32_t *sums = (int32_t *)(scales + groups * rows);
    int8_t *integers = (int8_t *)(sums + groups * rows);
    grouped_call call = { used, 0 };
    long blocks = 0, rounded_expert = -1, is_rounded = 0;
    for (long p = 0; p < count; p++) {
        const expert_part *part = &parts[p];
        long first = part->expert ? (long)ends[part->expert - 1] : 0;
        long own_rows = (long)ends[part->expert] - first;
        if (own_rows == 0) continue;
        size_t before = groups * (size_t)first;
        grouped_part *made = &used[call.count++];
        *made = (grouped_part){ .product = {
            .weight = part->weight,
            .input = input + first * input_stride,
            .rows = own_rows,
            .input_stride = input_stride,
            .bias = part->bias,
            .output = output + first * output_stride + part->column,
            .output_stride = output_stride,
            .rounded = { integers + before * GROUP, scales + before, sums + before },
        } };
        if (part->weight->kind >= INT8 && part->expert != rounded_expert) {
            made->rounds = 1;
            rounded_expert = part->expert;
            is_rounded = 1;
        }
        blocks += padded_blocks(part->weight);
    }
    if (is_rounded) in_threads(round_part, &call, call.count);
    long threads = atomic_load_explicit(&pool.threads, memory_order_relaxed);
    long share = blocks / (4 * threads) / PADDED * PADDED; /* of a chunk: a few for each thread */
    long chunks = 0;
    for (long p = 0; p < call.count; p++) {
        product_call *product = &used[p].product;
        long own = padded_blocks(product->weight);
        product->blocks_of_chunk = threads == 1 ? own : share < PADDED ? PADDED : share;
        used[p].first_chunk = chunks;
        chunks += (own + product->blocks_of_chunk - 1) / product->blocks_of_chunk;
    }
    in_threads(grouped_chunk, &call, chunks);
    return 0;
}

typedef struct {
    const float *input;
    long input_stride;
    const int64_t *positions;
    const float *weights;
    long terms;
    long width;
    float *output;
} sum_call;

static void sum_chunk(void *arguments, long row)
{
    const sum_call *call = arguments;
    const int64_t *positions = call->positions + row * call->terms;
    const float *weights = call->weights + row * call->terms;
    float *output = call->output + row * call->width;
    for (long i = 0; i < call->width; i += LANES) {
        long left = call->width - i;
        vec sum = v_zero();
        for (long term = 0; term < call->terms; term++) {
            const float *input = call->input + positions[term] * call->input_stride;
            sum = v_fma(v_load_part(input + i, left), v_all(weights[term]), sum);
        }
        v_store_part(output + i, sum, left);
    }
}

/* Each row of the output [rows][width] is a sum of rows of the input, in the order of `positions`
 * [rows][terms], with `weights` [rows][terms]. */
EXPORT int weighted_sums(const float *input, long input_stride, const int64_t *positions,
                         const float *weights, long rows, long terms, long width, float *output)
{
    sum_call call = { input, input_stride, positions, weights, terms, width, output };
    in_threads(sum_chunk, &call, rows);
    return 0;
}

typedef struct {
    const float *input;
    long inner;
    float limit;
    float alpha;
    float *output;
} clamped_call;

static void clamped_chunk(void *arguments, long row)
{
    const clamped_call *call = arguments;
    const float *gate = call->input + row * 2 * call->inner;
    const float *up = gate + call->inner;
    float *output = call->output + row * call->inner;
    const vec limit = v_all(call->limit), one = v_all(1.0f);
    for (long i = 0; i < call->inner; i += LANES) {
        long left = call->inner - i;
        vec gates = v_min(v_load_part(gate + i, left), limit);
        vec ups = v_max(v_min(v_load_part(up + i, left), limit), v_sub(v_zero(), limit));
        vec power = v_exp(v_mul(gates, v_all(-call->alpha)));
        vec active = v_div(gates, v_add(one, power));
        v_store_part(output + i, v_mul(v_add(ups, one), active), left);
    }
}

/* output = (up + 1) * gate * sigmoid(alpha * gate) for rows of the gates and then the ups, `inner`
 * of each. Gates above `limit` count as `limit`, and ups beyond +-limit too. */
EXPORT int clamped_gated(const float *input, long rows, long inner, float limit, float alpha,
                         float *output)
{
    clamped_call call = { input, inner, limit, alpha, output };
    in_threads(clamped_chunk, &call, rows);
    return 0;
}
