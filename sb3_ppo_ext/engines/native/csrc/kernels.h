/*
 * The arithmetic of `mlp.c` for one instruction set, which the including file chooses: NAME adds the suffix of the function
 * names, LANES is the number of floats in a vector register, ROWS and VECTORS are the dimensions of the largest tile of a
 * matrix product that fits into the registers. Matrices are row-major; a leading dimension is the distance between two rows.
 */

typedef float NAME(vector) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int NAME(mask) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define VECTOR NAME(vector)
#define MASK NAME(mask)
#define LOAD(pointer) (*(const VECTOR *)(pointer))
#define STORE(pointer, value) (*(VECTOR *)(pointer) = (value))
#define FULL(value) ((value) - (VECTOR){0})
#define SELECT(mask, yes, no) ((VECTOR)(((mask) & (MASK)(yes)) | (~(mask) & (MASK)(no))))

/* A tile of c = start + a b, which stays in registers: `rows` and `vectors` are compile-time constants in all calls. */
INLINE void NAME(tile)(const int rows, const int vectors, long depth, const float *a, long a_row, long a_column,
                       const float *b, long ldb, float *c, long ldc, const float *bias, int add)
{
    VECTOR sum[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 16
        for (int j = 0; j < vectors; j++)
            sum[i][j] = add ? LOAD(c + i * ldc + j * LANES) : bias ? LOAD(bias + j * LANES) : (VECTOR){0};
    for (long k = 0; k < depth; k++) {
        VECTOR row[VECTORS];
#pragma GCC unroll 16
        for (int j = 0; j < vectors; j++)
            row[j] = LOAD(b + k * ldb + j * LANES);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            float factor = a[i * a_row + k * a_column];
#pragma GCC unroll 16
            for (int j = 0; j < vectors; j++)
                sum[i][j] += factor * row[j];
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 16
        for (int j = 0; j < vectors; j++)
            STORE(c + i * ldc + j * LANES, sum[i][j]);
}

INLINE void NAME(columns)(const int vectors, long m, long depth, const float *a, long a_row, long a_column, const float *b,
                          long ldb, float *c, long ldc, const float *bias, int add)
{
    long i = 0;
#define TILES(rows)                                                                                                           \
    for (; i + rows <= m; i += rows)                                                                                          \
    NAME(tile)(rows, vectors, depth, a + i * a_row, a_row, a_column, b, ldb, c + i * ldc, ldc, bias, add)
    TILES(ROWS);
    TILES(2);
    TILES(1);
#undef TILES
}

/*
 * c (m x n) = a (m x depth) b (depth x n), plus c itself or a bias. Element (i, k) of a is a[i * a_row + k * a_column], so
 * that a can be transposed. n and the other leading dimensions are multiples of LANES.
 */
static void NAME(product)(long m, long n, long depth, const float *a, long a_row, long a_column, const float *b, long ldb,
                          float *c, long ldc, const float *bias, int add)
{
    long j = 0;
#define COLUMNS(vectors)                                                                                                      \
    for (; j + vectors * LANES <= n; j += vectors * LANES)                                                                    \
    NAME(columns)(vectors, m, depth, a, a_row, a_column, b + j, ldb, c + j, ldc, bias ? bias + j : 0, add)
    COLUMNS(VECTORS);
#if VECTORS > 2
    COLUMNS(2);
#endif
    COLUMNS(1);
#undef COLUMNS
}

/* A rational approximation with a relative error below 7e-9 for |x| <= 9. Beyond, tanh is +-1 in float32. */
INLINE void NAME(tanh)(float *at)
{
    VECTOR x = LOAD(at), p, q;
    x = SELECT(x < -9.0f, FULL(-9.0f), x);
    x = SELECT(x > 9.0f, FULL(9.0f), x);
    VECTOR z = x * x;
    p = z * -8.462123685397056e-14f + 5.267781156700725e-11f;
    p = p * z - 2.0204458588055526e-08f;
    p = p * z + 1.1149254978132339e-05f;
    p = p * z + 0.003103476597362118f;
    p = p * z + 0.13083581657627685f;
    p = p * z + 0.9999999933118993f;
    q = z * 0.0002545444770747952f + 0.02449327141220684f;
    q = q * z + 0.4641690869144325f;
    q = q * z + 1.0f;
    STORE(at, x * p / q);
}

static void NAME(activate)(enum activation activation, float *x, long n)
{
    for (long i = 0; i < n; i += LANES) {
        if (activation == TANH)
            NAME(tanh)(x + i);
        else
            STORE(x + i, SELECT(LOAD(x + i) < 0.0f, FULL(0.0f), LOAD(x + i)));
    }
}

/* gradient *= the derivative of the activation, computed from its output */
static void NAME(differentiate)(enum activation activation, float *gradient, const float *output, long n)
{
    for (long i = 0; i < n; i += LANES) {
        VECTOR h = LOAD(output + i), g = LOAD(gradient + i);
        if (activation == TANH)
            STORE(gradient + i, g * (1.0f - h * h));
        else
            STORE(gradient + i, SELECT(h > 0.0f, g, FULL(0.0f)));
    }
}

/* sums (n) += the rows of x (m x n) */
static void NAME(add_rows)(const float *x, long m, long n, long ldx, float *sums)
{
    for (long j = 0; j < n; j += LANES) {
        VECTOR sum = LOAD(sums + j);
        for (long i = 0; i < m; i++)
            sum += LOAD(x + i * ldx + j);
        STORE(sums + j, sum);
    }
}

static double NAME(squares)(const float *x, long n)
{
    double total = 0;
    long i = 0;
    while (n - i >= 4 * LANES) {
        /* Only short sums in float32, so that the sum in double precision is accurate */
        VECTOR sum[4] = {{0}};
        for (long end = n - i < 1024 ? n - 4 * LANES : i + 1024 - 4 * LANES; i <= end; i += 4 * LANES)
            for (int j = 0; j < 4; j++)
                sum[j] += LOAD(x + i + j * LANES) * LOAD(x + i + j * LANES);
        sum[0] += sum[1] + sum[2] + sum[3];
        for (int j = 0; j < LANES; j++)
            total += sum[0][j];
    }
    for (; i < n; i++)
        total += (double)x[i] * x[i];
    return total;
}

static void NAME(adam)(float *p, const float *g, float *m, float *v, long n, struct adam_step s)
{
    for (long i = 0; i < n; i++) {
        float gradient = g[i] * s.scale + s.weight_decay * p[i];
        m[i] += s.weight1 * (gradient - m[i]);
        v[i] = s.beta2 * v[i] + s.weight2 * gradient * gradient;
        p[i] -= s.step_size * m[i] / (sqrtf(v[i]) * s.inverse_root_correction2 + s.eps);
    }
}

static const struct kernels NAME(kernels) = {NAME(product), NAME(activate), NAME(differentiate), NAME(add_rows), NAME(squares),
                                             NAME(adam),    LANES};

#undef VECTOR
#undef MASK
#undef LOAD
#undef STORE
#undef FULL
#undef SELECT
#undef NAME
#undef LANES
#undef ROWS
#undef VECTORS
