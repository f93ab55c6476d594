/*
 * The arithmetic of `_mlp` for one instruction set, which the including file chooses: NAME adds the suffix of the function
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

/* exp(r) - 1, by a polynomial, and 2^n, with x = n log 2 + r. x is not positive; below -87 it counts as -87. */
INLINE VECTOR NAME(split_exp)(VECTOR x, VECTOR *power)
{
    VECTOR small = SELECT(x < -87.0f, FULL(-87.0f), x);
    /* The sum has no digits behind the point. */
    VECTOR n = (small * 1.44269504f + 12582912.0f) - 12582912.0f;
    VECTOR r = small - n * 0.693145752f - n * 1.42860677e-06f, p;
    p = r * 1.98412698e-04f + 1.38888889e-03f;
    p = p * r + 8.33333333e-03f;
    p = p * r + 4.16666667e-02f;
    p = p * r + 1.66666667e-01f;
    p = p * r + 0.5f;
    *power = (VECTOR)((__builtin_convertvector(n, MASK) + 127) << 23);
    return p * r * r + r;
}

/* exp(x) - 1, whose small numbers keep their digits. x is not positive; where exp(x) would be denormal, it is 0. */
INLINE VECTOR NAME(expm1)(VECTOR x)
{
    VECTOR power, p = NAME(split_exp)(x, &power);
    return SELECT(x < -87.0f, FULL(-1.0f), power * p + (power - 1.0f));
}

/* y = exp(x), of numbers that are not positive; where it would be denormal, it is 0. */
static void NAME(exp)(const float *x, float *y, long n)
{
    for (long i = 0; i < n; i += LANES) {
        VECTOR power, p = NAME(split_exp)(LOAD(x + i), &power);
        STORE(y + i, SELECT(LOAD(x + i) < -87.0f, FULL(0.0f), power * p + power));
    }
}

/* y = log(x) = n log 2 + log(1 + r), with r between sqrt(1/2) - 1 and sqrt(2) - 1, of positive numbers that are not denormal
 */
static void NAME(log)(const float *x, float *y, long n)
{
    for (long i = 0; i < n; i += LANES) {
        MASK bits = (MASK)LOAD(x + i), exponent = (bits - 0x3f3504f3) >> 23;
        VECTOR r = (VECTOR)(bits - exponent * 0x800000) - 1.0f, power = __builtin_convertvector(exponent, VECTOR), p;
        p = r * 7.0376836292e-2f - 1.1514610310e-1f;
        p = p * r + 1.1676998740e-1f;
        p = p * r - 1.2420140846e-1f;
        p = p * r + 1.4249322787e-1f;
        p = p * r - 1.6668057665e-1f;
        p = p * r + 2.0000714765e-1f;
        p = p * r - 2.4999993993e-1f;
        p = p * r + 3.3333331174e-1f;
        p = p * r * r * r + power * -2.12194440e-4f - 0.5f * r * r;
        /* NaN stays NaN. */
        STORE(y + i, r + p + power * 0.693359375f + (LOAD(x + i) - LOAD(x + i)));
    }
}

/* A rational approximation with an error below 5e-7. Beyond 4, the error function is +-1 in float32. */
INLINE VECTOR NAME(erf)(VECTOR x)
{
    x = SELECT(x < -4.0f, FULL(-4.0f), x);
    x = SELECT(x > 4.0f, FULL(4.0f), x);
    VECTOR z = x * x, p, q;
    p = z * 1.9110880972911393e-08f + -1.942317673251536e-06f;
    p = p * z + 0.0001472876657819383f;
    p = p * z + 0.003990623153819042f;
    p = p * z + 0.05152504441638586f;
    p = p * z + 0.20712648246199758f;
    p = p * z + 1.1283790939603453f;
    q = z * 0.0010211248427928494f + 0.014958173534992755f;
    q = q * z + 0.11797125499256143f;
    q = q * z + 0.5168923134558288f;
    q = q * z + 1.0f;
    return x * p / q;
}

/* x / (1 + exp(-x)), and its derivative */
INLINE void NAME(silu)(float *at, float *slope)
{
    VECTOR x = LOAD(at), e = NAME(expm1)(SELECT(x > 0.0f, -x, x)) + 1.0f;
    /* exp(-|x|) does not overflow. */
    VECTOR sigmoid = SELECT(x > 0.0f, FULL(1.0f), e) / (1.0f + e);
    STORE(at, x * sigmoid);
    STORE(slope, sigmoid * (1.0f + x * (1.0f - sigmoid)));
}

/* x times the cumulative distribution function of the normal distribution, and its derivative */
INLINE void NAME(gelu)(float *at, float *slope)
{
    VECTOR x = LOAD(at), below = 0.5f + 0.5f * NAME(erf)(x * 0.70710678f);
    VECTOR density = 0.39894228f * (NAME(expm1)(-0.5f * x * x) + 1.0f);
    STORE(at, x * below);
    STORE(slope, below + x * density);
}

/* Replace x by its activations, and write their derivatives to `slope` if `keeps_slope`. */
static void NAME(activate)(enum activation activation, float *x, float *slope, long n)
{
    for (long i = 0; i < n; i += LANES) {
        VECTOR value = LOAD(x + i);
        if (activation == TANH)
            NAME(tanh)(x + i);
        else if (activation == RELU)
            STORE(x + i, SELECT(value < 0.0f, FULL(0.0f), value));
        else if (activation == ELU)
            STORE(x + i, SELECT(value > 0.0f, value, NAME(expm1)(SELECT(value > 0.0f, FULL(0.0f), value))));
        else if (activation == SILU)
            NAME(silu)(x + i, slope + i);
        else
            NAME(gelu)(x + i, slope + i);
    }
}

/* gradient *= the derivative of the activation, which is `kept` if `keeps_slope`, or else computed from its output, `kept` */
static void NAME(differentiate)(enum activation activation, float *gradient, const float *kept, long n)
{
    for (long i = 0; i < n; i += LANES) {
        VECTOR h = LOAD(kept + i), g = LOAD(gradient + i);
        if (activation == TANH)
            STORE(gradient + i, g * (1.0f - h * h));
        else if (activation == RELU)
            STORE(gradient + i, SELECT(h > 0.0f, g, FULL(0.0f)));
        else if (activation == ELU)
            STORE(gradient + i, SELECT(h > 0.0f, g, g * (h + 1.0f)));
        else
            STORE(gradient + i, g * h);
    }
}

/* x += y */
static void NAME(add)(float *x, const float *y, long n)
{
    for (long i = 0; i < n; i += LANES)
        STORE(x + i, LOAD(x + i) + LOAD(y + i));
}

INLINE float NAME(total)(VECTOR x)
{
    float total = 0;
    for (int i = 0; i < LANES; i++)
        total += x[i];
    return total;
}

/*
 * output = weight * kept + bias for the rows of x, of n numbers each, where kept is x minus its mean, times the inverse of its
 * standard deviation. Behind the n numbers, weight and bias are 0.
 */
static void NAME(normalize)(long m, long n, long ld, const float *x, const float *weight, const float *bias, float *output,
                            float *kept, float *inverse_stds)
{
    for (long i = 0; i < m; i++, x += ld, output += ld, kept += ld) {
        VECTOR sums = {0}, squares = {0};
        long j = 0;
        for (; j + LANES <= n; j += LANES)
            sums += LOAD(x + j);
        float mean = NAME(total)(sums), variance;
        for (; j < n; j++)
            mean += x[j];
        mean /= n;
        for (j = 0; j + LANES <= n; j += LANES)
            squares += (LOAD(x + j) - mean) * (LOAD(x + j) - mean);
        variance = NAME(total)(squares);
        for (; j < n; j++)
            variance += (x[j] - mean) * (x[j] - mean);
        float inverse = inverse_stds[i] = 1.0f / sqrtf(variance / n + NORM_EPS);
        for (j = 0; j < ld; j += LANES) {
            VECTOR normalized = (LOAD(x + j) - mean) * inverse;
            STORE(kept + j, normalized);
            STORE(output + j, normalized * LOAD(weight + j) + LOAD(bias + j));
        }
    }
}

/* next = the gradients of the inputs of `normalize`, given those of its outputs */
static void NAME(denormalize)(long m, long n, long ld, const float *gradient, const float *weight, const float *kept,
                              const float *inverse_stds, float *next)
{
    for (long i = 0; i < m; i++, gradient += ld, kept += ld, next += ld) {
        VECTOR sums = {0}, products = {0};
        for (long j = 0; j < ld; j += LANES) {
            VECTOR scaled = LOAD(gradient + j) * LOAD(weight + j);
            sums += scaled;
            products += scaled * LOAD(kept + j);
        }
        float mean = NAME(total)(sums) / n, slope = NAME(total)(products) / n;
        for (long j = 0; j < ld; j += LANES)
            STORE(next + j, inverse_stds[i] * (LOAD(gradient + j) * LOAD(weight + j) - mean - slope * LOAD(kept + j)));
        for (long j = n; j < ld; j++)
            next[j] = 0;
    }
}

/* sums (n) += the rows of x times those of y (m x n) */
static void NAME(add_products)(const float *x, const float *y, long m, long n, float *sums)
{
    for (long j = 0; j < n; j += LANES) {
        VECTOR sum = LOAD(sums + j);
        for (long i = 0; i < m; i++)
            sum += LOAD(x + i * n + j) * LOAD(y + i * n + j);
        STORE(sums + j, sum);
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

static const struct kernels NAME(kernels) = {
    .product = NAME(product),
    .exp = NAME(exp),
    .log = NAME(log),
    .activate = NAME(activate),
    .differentiate = NAME(differentiate),
    .add = NAME(add),
    .normalize = NAME(normalize),
    .denormalize = NAME(denormalize),
    .add_products = NAME(add_products),
    .add_rows = NAME(add_rows),
    .squares = NAME(squares),
    .adam = NAME(adam),
};

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
