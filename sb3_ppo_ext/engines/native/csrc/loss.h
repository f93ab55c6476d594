/*
 * The loss of PPO and its slope, sample by sample: what `update/losses.py` and `distributions/` compute with NumPy, for action
 * distributions whose log probabilities need no more than exponentials, logarithms and the gamma function.
 */

#pragma once

#include "arrays.h"
#include "gamma.h"
#include "instruction_sets.h"

enum family { GAUSSIAN, SQUASHED, STATE_DEPENDENT, BETA, CATEGORICAL, BERNOULLI, N_FAMILIES };
static const char *const family_names[] = {"gaussian", "squashed_gaussian", "state_dependent_noise",
                                           "beta",     "categorical",       "bernoulli"};

/* `LOG_STD_RANGE`, and the mixture of Gaussians of `distributions/squashed_gaussian.py` */
#define MIN_LOG_STD -5.0f
#define MAX_LOG_STD 2.0f
#define N_MIXED 5
static const float mixture_weights[] = {0.06414671f, 0.1583854f, 0.34971161f, 0.41469906f, 0.01305722f};
static const float mixture_stds[] = {0.46235241f, 1.29235961f, 0.65422092f, 0.92111073f, 1.80819375f};
/* `EDGE` of `distributions/base.py` */
#define EDGE 1e-6

/* What is known of the samples, and what is measured of them */
enum column {
    ACTIONS,
    LOG_PROBS,
    ADVANTAGES,
    VALUES,
    RETURNS,
    WEIGHTS,
    OLD,
    LOG_RATIOS,
    RATIOS,
    OBJECTIVES,
    ERRORS,
    ENTROPIES,
    DESCRIBED,
    KLS,
    BOUNDS,
    N_COLUMNS
};
static const char *const column_names[] = {"actions", "log_probs", "advantages", "values", "returns",
                                           "weights", "old",       "log_ratios", "ratios", "objectives",
                                           "errors",  "entropies", "described",  "kl",     "bounds_loss"};

/* What the gradient of a Beta needs: of both parameters minus 1 and their sum */
struct beta {
    double excess[2], of_log_prob[2], of_entropy[2], of_log_beta[2], logistic[2], shrink, log_beta;
};

/*
 * gSDE: the variance of an action is the sum of the squares of the latents, times the variances of their coefficients, plus
 * epsilon. All rows are padded to `ld` numbers.
 */
struct coefficients {
    /* Numbers of latents, and of standard deviations of each: one, or one for each action */
    long n_latents, n_stds, ld;
    int use_expln;
    float epsilon;
    /* Variances of the coefficients, and sums of their gradients */
    float *of_coefficients, *d_coefficients;
    /* Squares of the latents, variances and their gradients, of so many samples, and the rows of the current one */
    float *squares, *variances, *d_variances, *row, *d_row;
};

/*
 * Categorical distributions: logits less the largest of their action, and probabilities, of many samples; for each action, the
 * sum of the exponentials and its logarithm
 */
struct softmax {
    float *logits, *probs, *sums, *log_sums;
};

typedef struct {
    PyObject_HEAD
    enum family family;
    /* Number of samples, of actions of each, and of outputs of the actor */
    long n, n_actions, n_outputs;
    /* Number of logits of each action, of categorical distributions */
    long *choices;
    /* Views of what is not needed are empty, such as weights and the standard deviation. */
    Py_buffer columns[N_COLUMNS], log_std, d_log_std, middle, half;
    /* The mean log probability of each action, of the current sample; of Gaussians, the inverses and the gradients of all
     * deviations */
    float *kept, *inverse_stds;
    double *d_stds, max_concentration;
    struct beta *betas;
    struct coefficients sde;
    struct softmax softmax;
    /* Samples that these two have memory for, and the current one of them */
    long capacity, current;
    float log_constant;
    int is_spo, is_max;
    float clip_range, low, high, dual_clip, value_limit, value_scale, vf_coef, ent_coef, kl_coef, bounds_coef, bounds_limit;
} Loss;

static int has_std(const Loss *self)
{
    return self->family == GAUSSIAN || self->family == SQUASHED;
}

/* Log probability of a sample. What the gradient needs is kept. */
static float log_prob_gaussian(const Loss *self, const float *mean, const float *action)
{
    float sum = 0;
    for (long i = 0; i < self->n_outputs; i++) {
        float z = (action[i] - mean[i]) * self->inverse_stds[i];
        sum += z * z;
    }
    return -0.5f * sum - self->log_constant;
}

/* log of the derivative of tanh at the actions before it */
static float log_tanh_derivatives(const Loss *self, const float *action)
{
    float sum = 0;
    for (long i = 0; i < self->n_actions; i++)
        sum += 0.69314718f - fabsf(action[i]) - log1pf(expf(-2 * fabsf(action[i])));
    return 2 * sum;
}

/* The mean of log cosh under a Gaussian, see `TanhGaussianDistribution.entropy`, and its derivatives */
static float mean_log_cosh(float mean, float std, float *d_mean, float *d_log_std)
{
    float sum = -0.69314718f;
    *d_mean = *d_log_std = 0;
    for (int k = 0; k < N_MIXED; k++) {
        float width = sqrtf(std * std + mixture_stds[k] * mixture_stds[k]), z = mean / (1.41421356f * width);
        float w = mixture_weights[k], of_mean = w * erff(z), density = w * 0.79788456f * expf(-z * z);
        sum += mean * of_mean + width * density;
        *d_mean += of_mean, *d_log_std += density * std * std / width;
    }
    return sum;
}

static float entropy_squashed(const Loss *self, const float *mean)
{
    float entropy = self->log_constant + 0.5f * self->n_outputs, d_mean, d_log_std;
    for (long i = 0; i < self->n_outputs; i++)
        entropy -= 2 * mean_log_cosh(mean[i], 1 / self->inverse_stds[i], &d_mean, &d_log_std);
    return entropy;
}

static float log_prob_state_dependent(const Loss *self, const float *mean, const float *action, float *entropy)
{
    float squares = 0, logs = 0, constant = 0.91893853f * self->n_outputs; /* log(2 pi) / 2 */
    for (long i = 0; i < self->n_outputs; i++) {
        float variance = self->sde.row[i] + self->sde.epsilon, error = action[i] - mean[i];
        squares += error * error / variance, logs += logf(variance);
    }
    *entropy = 0.5f * logs + constant + 0.5f * self->n_outputs;
    return -0.5f * (squares + logs) - constant;
}

static double softplus(double x)
{
    return (x > 0 ? x : 0) + log1p(exp(-fabs(x)));
}

/* Outputs are those of alpha, then those of beta. Everything is in double precision, as in PyTorch. */
static float log_prob_beta(Loss *self, const float *outputs, const float *action, float *entropy)
{
    double log_prob = 0, total = 0;
    for (long i = 0, n = self->n_actions; i < n; i++) {
        struct beta *kept = &self->betas[i];
        double x = action[i] < EDGE ? EDGE : action[i] > 1 - EDGE ? 1 - EDGE : action[i];
        double inputs[] = {outputs[i], outputs[n + i]}, of_inputs[] = {softplus(inputs[0]), softplus(inputs[1])};
        kept->shrink = 1 / (1 + (of_inputs[0] + of_inputs[1]) / self->max_concentration);
        double both = (of_inputs[0] + of_inputs[1]) * kept->shrink, logs[] = {log(x), log1p(-x)};
        struct gammas of_both = gammas_of(2 + both);
        kept->log_beta = -of_both.log;
        log_prob += of_both.log - 0.69314718055994531;
        total += both * of_both.first - of_both.log + 0.69314718055994531;
        for (int j = 0; j < 2; j++) {
            double excess = kept->excess[j] = of_inputs[j] * kept->shrink;
            struct gammas each = gammas_of(1 + excess);
            kept->log_beta += each.log;
            log_prob += excess * logs[j] - each.log;
            total += each.log - excess * each.first;
            kept->of_log_beta[j] = each.first - of_both.first;
            kept->of_log_prob[j] = logs[j] - each.first + of_both.first;
            kept->of_entropy[j] = both * of_both.second - excess * each.second;
            kept->logistic[j] = exp(inputs[j] - of_inputs[j]) + (inputs[j] - inputs[j]); /* Infinity becomes NaN. */
        }
    }
    *entropy = (float)total;
    return (float)log_prob;
}

/* Of many samples at once: a single one has too few logits to fill a vector. */
static void measure_softmax(Loss *self, const float *outputs, long ld, long n)
{
    struct softmax softmax = self->softmax;
    float *shifted = softmax.logits, *probs = softmax.probs, *sum = softmax.sums;
    for (long i = 0; i < n; i++) {
        const float *logits = outputs + i * ld;
        for (long k = 0; k < self->n_actions; logits += self->choices[k], shifted += self->choices[k], k++) {
            float largest = logits[0];
            for (long j = 1; j < self->choices[k]; j++)
                largest = logits[j] > largest ? logits[j] : largest;
            for (long j = 0; j < self->choices[k]; j++)
                shifted[j] = logits[j] - largest;
        }
    }
    kernels->exp(softmax.logits, softmax.probs, n * self->n_outputs);
    for (long i = 0; i < n; i++)
        for (long k = 0; k < self->n_actions; probs += self->choices[k], sum++, k++) {
            *sum = 0;
            for (long j = 0; j < self->choices[k]; j++)
                *sum += probs[j];
            for (long j = 0; j < self->choices[k]; j++)
                probs[j] /= *sum;
        }
    kernels->log(softmax.sums, softmax.log_sums, n * self->n_actions);
}

/* The current sample of them */
static struct softmax softmax_of(const Loss *self)
{
    struct softmax all = self->softmax;
    long action = self->current * self->n_actions, output = self->current * self->n_outputs;
    return (struct softmax){all.logits + output, all.probs + output, all.sums + action, all.log_sums + action};
}

static float log_prob_categorical(const Loss *self, const float *action, float *entropy)
{
    struct softmax s = softmax_of(self);
    float log_prob = 0;
    *entropy = 0;
    for (long i = 0; i < self->n_actions; s.logits += self->choices[i], s.probs += self->choices[i], i++) {
        float weighted = 0;
        for (long j = 0; j < self->choices[i]; j++)
            weighted += s.probs[j] * (s.logits[j] - s.log_sums[i]);
        log_prob += s.logits[(long)action[i]] - s.log_sums[i];
        *entropy -= weighted;
        self->kept[i] = weighted;
    }
    return log_prob;
}

static float log_prob_bernoulli(const Loss *self, const float *logits, const float *action, float *probs, float *entropy)
{
    float log_prob = 0;
    *entropy = 0;
    for (long i = 0; i < self->n_outputs; i++) {
        float x = logits[i], small = expf(-fabsf(x)), softplus = (x > 0 ? x : 0) + log1pf(small);
        probs[i] = (x >= 0 ? 1 : small) / (1 + small) + (x - x); /* NaN stays NaN. */
        log_prob += action[i] * x - softplus;
        *entropy += softplus - probs[i] * x;
    }
    return log_prob;
}

/* Gradient of the outputs, given that of the log probability and the factor of minus the entropy */
static void differentiate_gaussian(Loss *self, const float *mean, const float *action, float d_log_prob, float ent, float *d)
{
    for (long i = 0; i < self->n_outputs; i++) {
        float z = (action[i] - mean[i]) * self->inverse_stds[i];
        d[i] = d_log_prob * z * self->inverse_stds[i];
        self->d_stds[i] += d_log_prob * (z * z - 1) - ent;
    }
}

static void differentiate_state_dependent(const Loss *self, const float *mean, const float *action, float d_log_prob,
                                          float ent, float *d)
{
    for (long i = 0; i < self->n_outputs; i++) {
        float variance = self->sde.row[i] + self->sde.epsilon, error = action[i] - mean[i];
        d[i] = d_log_prob * error / variance;
        self->sde.d_row[i] = (d_log_prob * (error * error / variance - 1) - ent) / (2 * variance);
    }
}

static void differentiate_squashed(Loss *self, const float *mean, const float *action, float d_log_prob, float ent, float *d)
{
    differentiate_gaussian(self, mean, action, d_log_prob, ent, d);
    for (long i = 0; ent != 0 && i < self->n_outputs; i++) {
        float d_mean, d_log_std;
        mean_log_cosh(mean[i], 1 / self->inverse_stds[i], &d_mean, &d_log_std);
        d[i] += 2 * ent * d_mean;
        self->d_stds[i] += 2 * ent * d_log_std;
    }
}

/* From the slopes of alpha and beta of an action to those of its outputs */
static void write_slopes(const Loss *self, long i, const double *slopes, int add, float *d)
{
    const struct beta *kept = &self->betas[i];
    double common = (slopes[0] * kept->excess[0] + slopes[1] * kept->excess[1]) / self->max_concentration;
    for (int j = 0; j < 2; j++) {
        float slope = (float)(kept->shrink * (slopes[j] - common) * kept->logistic[j]), *to = d + j * self->n_actions + i;
        *to = add ? *to + slope : slope;
    }
}

static void differentiate_beta(const Loss *self, float d_log_prob, float ent, float *d)
{
    for (long i = 0; i < self->n_actions; i++) {
        const struct beta *kept = &self->betas[i];
        double slopes[2];
        for (int j = 0; j < 2; j++)
            slopes[j] = d_log_prob * kept->of_log_prob[j] - ent * kept->of_entropy[j];
        write_slopes(self, i, slopes, 0, d);
    }
}

static void differentiate_categorical(const Loss *self, const float *action, float d_log_prob, float ent, float *d)
{
    struct softmax s = softmax_of(self);
    for (long i = 0; i < self->n_actions; i++) {
        long n = self->choices[i];
        for (long j = 0; j < n; j++) {
            d[j] = -d_log_prob * s.probs[j];
            if (ent != 0)
                d[j] += ent * s.probs[j] * (s.logits[j] - s.log_sums[i] - self->kept[i]);
        }
        d[(long)action[i]] += d_log_prob;
        s.logits += n, s.probs += n, d += n;
    }
}

static void differentiate_bernoulli(const Loss *self, const float *logits, const float *action, float d_log_prob, float ent,
                                    float *d)
{
    for (long i = 0; i < self->n_outputs; i++)
        d[i] = d_log_prob * (action[i] - d[i]) + ent * logits[i] * d[i] * (1 - d[i]);
}

/* KL divergences from the old distributions, whose gradients are added: `kl_divergence` in `distributions/` */
static float kl_gaussian(Loss *self, const float *mean, const float *old, float factor, float *d)
{
    float sum = 0;
    for (long i = 0; i < self->n_outputs; i++) {
        float inverse = self->inverse_stds[i], z = (mean[i] - old[i]) * inverse, wider = old[self->n_outputs + i] * inverse;
        float squares = wider * wider + z * z;
        sum += 0.5f * (squares - 1) - logf(wider);
        d[i] += factor * z * inverse;
        self->d_stds[i] += factor * (1 - squares);
    }
    return sum;
}

static float kl_categorical(const Loss *self, const float *old, float factor, float *d)
{
    struct softmax s = softmax_of(self);
    float sum = 0;
    for (long i = 0; i < self->n_actions; s.logits += self->choices[i], old += self->choices[i], d += self->choices[i], i++)
        for (long j = 0; j < self->choices[i]; j++) {
            float log_prob = s.logits[j] - s.log_sums[i], before = expf(old[j]);
            sum += before == 0 ? 0 : before * (old[j] - log_prob);
            d[j] += factor * (expf(log_prob) - before);
        }
    return sum;
}

static float kl_bernoulli(const Loss *self, const float *logits, const float *old, float factor, float *d)
{
    float sum = 0;
    for (long i = 0; i < self->n_outputs; i++) {
        float small = expf(-fabsf(logits[i])), before = expf(-fabsf(old[i]));
        float prob = (logits[i] >= 0 ? 1 : small) / (1 + small), prob_before = (old[i] >= 0 ? 1 : before) / (1 + before);
        float softplus_of = (logits[i] > 0 ? logits[i] : 0) + log1pf(small);
        float softplus_before = (old[i] > 0 ? old[i] : 0) + log1pf(before);
        sum += prob_before * (old[i] - logits[i]) + softplus_of - softplus_before;
        d[i] += factor * (prob - prob_before);
    }
    return sum;
}

/* The old parameters are in double precision: in float32, divergences of concentrated distributions would be far off. */
static float kl_beta(const Loss *self, const double *old, float factor, float *d)
{
    double sum = 0;
    for (long i = 0, n = self->n_actions; i < n; i++) {
        const struct beta *kept = &self->betas[i];
        /* Others than these are no parameters. */
        double alpha = old[i] >= 1 ? old[i] : NAN, beta = old[n + i] >= 1 ? old[n + i] : NAN, slopes[2];
        struct gammas of_old[] = {gammas_of(alpha), gammas_of(beta)}, of_both = gammas_of(alpha + beta);
        sum += kept->log_beta + of_both.log - of_old[0].log - of_old[1].log;
        for (int j = 0; j < 2; j++) {
            double of_log_beta = of_old[j].first - of_both.first;
            sum += (old[j * n + i] - (1 + kept->excess[j])) * of_log_beta;
            slopes[j] = factor * (kept->of_log_beta[j] - of_log_beta);
        }
        write_slopes(self, i, slopes, 1, d);
    }
    return (float)sum;
}

static float kl_divergence(Loss *self, const float *outputs, const void *all_old, long i, float factor, float *d)
{
    if (self->family == BETA)
        return kl_beta(self, (const double *)all_old + i * self->n_outputs, factor, d);
    const float *old = (const float *)all_old + i * (has_std(self) ? 2 * self->n_outputs : self->n_outputs);
    if (self->family == CATEGORICAL)
        return kl_categorical(self, old, factor, d);
    if (self->family == BERNOULLI)
        return kl_bernoulli(self, outputs, old, factor, d);
    return kl_gaussian(self, outputs, old, factor, d);
}

/* `bounds_loss` of the means */
static float excess_over_bounds(const Loss *self, const float *mean, float factor, float *d)
{
    const float *middle = self->middle.buf, *half = self->half.buf;
    float sum = 0;
    for (long i = 0; i < self->n_outputs; i++) {
        float z = (mean[i] - middle[i]) / half[i], excess = fabsf(z) - self->bounds_limit;
        if (!(excess > 0))
            continue;
        sum += excess * excess;
        d[i] += 2 * factor * copysignf(excess, z) / half[i];
    }
    return sum;
}

/* NaN stays NaN. */
static float clamped(float value, float low, float high)
{
    return value < low ? low : value > high ? high : value;
}

/* The surrogate objective, and its derivative with respect to the log probability */
static float surrogate(const Loss *self, float advantage, float ratio, float *objective)
{
    float gain = advantage * ratio;
    if (self->is_spo) {
        float pull = fabsf(advantage) / self->clip_range * (ratio - 1);
        *objective = gain - pull * (ratio - 1) / 2;
        return gain - pull * ratio;
    }
    float limited = advantage * clamped(ratio, self->low, self->high);
    *objective = gain > limited ? limited : gain;
    /* Constant where it is smaller; a product keeps NaN and infinity. */
    float slope = gain * (gain <= limited), bound = self->dual_clip * advantage;
    if (advantage < 0 && *objective < bound)
        *objective = bound, slope *= 0;
    return slope;
}

/* The error of a value, and half the derivative of its square */
static float value_error(const Loss *self, float value, float old, float target, float *slope)
{
    float scale = self->value_scale, error = value / scale - target / scale;
    *slope = error / scale;
    if (!(self->value_limit < INFINITY))
        return error;
    float moved = value / scale - old / scale, limit = self->value_limit;
    float clipped = old / scale + clamped(moved, -limit, limit) - target / scale;
    if (self->is_max && fabsf(error) >= fabsf(clipped))
        return error;
    *slope = clipped * (fabsf(moved) <= limit) / scale;
    return clipped;
}

static int find_family(Loss *self, const char *name)
{
    for (int i = 0; i < N_FAMILIES; i++)
        if (!strcmp(name, family_names[i])) {
            self->family = i;
            return 0;
        }
    PyErr_Format(PyExc_ValueError, "no family of distributions '%.50s'", name);
    return -1;
}

static int read_choices(Loss *self, PyObject *choices)
{
    self->n_outputs = 0, self->n_actions = PyTuple_GET_SIZE(choices);
    if (!(self->choices = PyMem_Calloc(self->n_actions + 1, sizeof(long)))) {
        PyErr_NoMemory();
        return -1;
    }
    for (long i = 0; i < self->n_actions; i++) {
        long n = self->choices[i] = PyLong_AsLong(PyTuple_GET_ITEM(choices, i));
        if (n < 1 || __builtin_add_overflow(self->n_outputs, n, &self->n_outputs)) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "choices must be positive numbers");
            return -1;
        }
    }
    return 0;
}

/* The old parameters of Betas, in float64 */
static int open_old_betas(Loss *self, PyObject *array)
{
    Py_buffer *view = &self->columns[OLD];
    if (get_array(array, view, 0, column_names[OLD]) < 0)
        return -1;
    if (view->ndim == 2 && view->format && !strcmp(view->format, "d") && (uintptr_t)view->buf % sizeof(double) == 0 &&
        view->shape[0] == self->n && view->shape[1] == self->n_outputs)
        return 0;
    PyErr_SetString(PyExc_ValueError, "old must be an aligned array of float64, with a number for each output of each sample");
    return -1;
}

static int open_column(Loss *self, int which, PyObject *array)
{
    int is_optional = which == WEIGHTS || which == OLD || which >= DESCRIBED;
    if (is_optional && array == Py_None)
        return 0;
    if (which == OLD && self->family == BETA)
        return open_old_betas(self, array);
    long n = which == ACTIONS ? -1 : self->n, width = which == ACTIONS ? self->n_actions : self->n_outputs;
    /* Standard deviations follow the outputs. */
    width *= which != ACTIONS && has_std(self) ? 2 : 1;
    int n_dimensions = which == ACTIONS || which == OLD || which == DESCRIBED ? 2 : 1;
    if (get_floats(array, &self->columns[which], n_dimensions, SHAPE(n, width), which >= LOG_RATIOS, column_names[which]) < 0)
        return -1;
    if (which == ACTIONS)
        self->n = self->columns[which].shape[0];
    return 0;
}

/* Discrete actions are indices of arrays, and their array may have changed. */
static int check_choices(const Loss *self, long start, long n)
{
    const float *action = (float *)self->columns[ACTIONS].buf + start * self->n_actions;
    for (long i = 0; self->family == CATEGORICAL && i < n * self->n_actions; i++)
        if (!(action[i] >= 0 && action[i] < self->choices[i % self->n_actions])) {
            PyErr_SetString(PyExc_ValueError, "an action of the rollout buffer is none of the choices");
            return -1;
        }
    return 0;
}

static int refuse_loss(const char *message)
{
    PyErr_SetString(PyExc_ValueError, message);
    return -1;
}

/* What is penalized: the KL divergence from the old distributions, and means outside of bounds */
static int open_penalties(Loss *self, PyObject *bounds)
{
    if (self->kl_coef != 0 && (!self->columns[OLD].buf || !self->columns[KLS].buf || self->family == STATE_DEPENDENT))
        return refuse_loss("kl_coef needs old distributions without gSDE, and an array for the divergences");
    if (self->bounds_coef == 0)
        return 0;
    int has_means = has_std(self) || self->family == STATE_DEPENDENT;
    if (!self->columns[BOUNDS].buf || !has_means || PyTuple_GET_SIZE(bounds) != 2)
        return refuse_loss("bounds_coef needs a Gaussian, middle and half of its bounds, and an array for what exceeds them");
    return get_floats(PyTuple_GET_ITEM(bounds, 0), &self->middle, 1, SHAPE(self->n_outputs), 0, "middle") < 0 ||
                   get_floats(PyTuple_GET_ITEM(bounds, 1), &self->half, 1, SHAPE(self->n_outputs), 0, "half") < 0
               ? -1
               : 0;
}

static int open_coefficients(Loss *self, PyObject *log_std, PyObject *d_log_std)
{
    struct coefficients *sde = &self->sde;
    if (get_floats(log_std, &self->log_std, 2, SHAPE(-1, -1), 0, "log_std") < 0)
        return -1;
    sde->n_latents = self->log_std.shape[0], sde->n_stds = self->log_std.shape[1], sde->ld = padded(self->n_outputs);
    if (sde->n_stds != 1 && sde->n_stds != self->n_outputs)
        return refuse_loss("gSDE has one standard deviation for each latent, or for each latent and action");
    if (get_floats(d_log_std, &self->d_log_std, 2, SHAPE(sde->n_latents, sde->n_stds), 1, "d_log_std") < 0)
        return -1;
    sde->of_coefficients = allocate(sde->n_latents, sde->ld), sde->d_coefficients = allocate(sde->n_latents, sde->ld);
    if (sde->of_coefficients && sde->d_coefficients)
        return 0;
    PyErr_NoMemory();
    return -1;
}

static void free_samples(Loss *self)
{
    free(self->sde.squares), free(self->sde.variances), free(self->sde.d_variances);
    free(self->softmax.logits), free(self->softmax.probs), free(self->softmax.sums), free(self->softmax.log_sums);
}

/* Memory for so many samples */
static int reserve_samples(Loss *self, long n)
{
    struct coefficients *sde = &self->sde;
    struct softmax *softmax = &self->softmax;
    if ((self->family != STATE_DEPENDENT && self->family != CATEGORICAL) || n <= self->capacity)
        return 0;
    free_samples(self);
    if (self->family == STATE_DEPENDENT) {
        sde->squares = allocate(n, sde->n_latents);
        sde->variances = allocate(n, sde->ld), sde->d_variances = allocate(n, sde->ld);
        self->capacity = sde->squares && sde->variances && sde->d_variances ? n : 0;
    } else {
        long n_outputs = padded(self->n_outputs), n_actions = padded(self->n_actions);
        softmax->logits = allocate(n, n_outputs), softmax->probs = allocate(n, n_outputs);
        softmax->sums = allocate(n, n_actions), softmax->log_sums = allocate(n, n_actions);
        self->capacity = softmax->logits && softmax->probs && softmax->sums && softmax->log_sums ? n : 0;
    }
    if (self->capacity)
        return 0;
    PyErr_NoMemory();
    return -1;
}

static int open_loss(Loss *self, const char *family, PyObject *choices, PyObject *log_std, PyObject *d_log_std,
                     PyObject *columns, PyObject *bounds)
{
    if (find_family(self, family) < 0 || read_choices(self, choices) < 0)
        return -1;
    if (self->family != CATEGORICAL && self->n_outputs != (self->family == BETA ? 2 : 1) * self->n_actions)
        return refuse_loss("such an action has one output, that of a Beta two");
    if (PyTuple_GET_SIZE(columns) != N_COLUMNS) {
        PyErr_Format(PyExc_TypeError, "a loss has %d columns", N_COLUMNS);
        return -1;
    }
    if (self->family == STATE_DEPENDENT && open_coefficients(self, log_std, d_log_std) < 0)
        return -1;
    if (has_std(self) && (get_floats(log_std, &self->log_std, 1, SHAPE(self->n_outputs), 0, "log_std") < 0 ||
                          get_floats(d_log_std, &self->d_log_std, 1, SHAPE(self->n_outputs), 1, "d_log_std") < 0))
        return -1;
    for (int i = 0; i < N_COLUMNS; i++)
        if (open_column(self, i, PyTuple_GET_ITEM(columns, i)) < 0)
            return -1;
    if (open_penalties(self, bounds) < 0)
        return -1;
    self->betas = PyMem_Calloc(self->family == BETA ? self->n_actions : 1, sizeof(struct beta));
    self->kept = PyMem_Calloc(self->n_actions + 1, sizeof(float));
    self->inverse_stds = PyMem_Calloc(self->n_outputs + 1, sizeof(float));
    self->d_stds = PyMem_Calloc(self->n_outputs + 1, sizeof(double));
    if (!self->betas || !self->kept || !self->inverse_stds || !self->d_stds) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static PyObject *loss_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"family",    "choices",  "log_std",    "d_log_std",   "columns",      "bounds",
                               "is_spo",    "is_max",   "clip_range", "dual_clip",   "value_limit",  "value_scale",
                               "vf_coef",   "ent_coef", "kl_coef",    "bounds_coef", "bounds_limit", "max_concentration",
                               "use_expln", "epsilon",  NULL};
    const char *family;
    PyObject *choices, *log_std, *d_log_std, *columns, *bounds;
    int is_spo, is_max, use_expln;
    double clip_range, dual_clip, value_limit, value_scale, vf_coef, ent_coef, kl_coef, bounds_coef, bounds_limit,
        concentration, epsilon;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sO!OOO!O!ppddddddddddpd:Loss", keywords, &family, &PyTuple_Type, &choices,
                                     &log_std, &d_log_std, &PyTuple_Type, &columns, &PyTuple_Type, &bounds, &is_spo, &is_max,
                                     &clip_range, &dual_clip, &value_limit, &value_scale, &vf_coef, &ent_coef, &kl_coef,
                                     &bounds_coef, &bounds_limit, &concentration, &use_expln, &epsilon))
        return NULL;
    Loss *self = (Loss *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->is_spo = is_spo, self->is_max = is_max, self->clip_range = (float)clip_range;
    self->low = (float)(1 - clip_range), self->high = (float)(1 + clip_range), self->dual_clip = (float)dual_clip;
    self->value_limit = (float)value_limit, self->value_scale = (float)value_scale;
    self->vf_coef = (float)vf_coef, self->ent_coef = (float)ent_coef, self->max_concentration = concentration;
    self->kl_coef = (float)kl_coef, self->bounds_coef = (float)bounds_coef, self->bounds_limit = (float)bounds_limit;
    self->sde.use_expln = use_expln, self->sde.epsilon = (float)epsilon;
    if (open_loss(self, family, choices, log_std, d_log_std, columns, bounds) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* Also of a loss whose construction has failed: what has not been opened is zero. */
static void loss_dealloc(Loss *self)
{
    for (int i = 0; i < N_COLUMNS; i++)
        PyBuffer_Release(&self->columns[i]);
    PyBuffer_Release(&self->log_std), PyBuffer_Release(&self->d_log_std);
    PyBuffer_Release(&self->middle), PyBuffer_Release(&self->half);
    PyMem_Free(self->choices), PyMem_Free(self->kept), PyMem_Free(self->inverse_stds), PyMem_Free(self->d_stds);
    PyMem_Free(self->betas);
    free(self->sde.of_coefficients), free(self->sde.d_coefficients);
    free_samples(self);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

/* A standard deviation of a coefficient of gSDE, and its derivative with respect to the parameter */
static float std_of(const struct coefficients *sde, float parameter, float *slope)
{
    float shifted = 1 + sde->epsilon + parameter;
    if (sde->use_expln && parameter > 0) {
        *slope = 1 / shifted;
        return 1 + logf(shifted);
    }
    return *slope = expf(parameter);
}

static void begin_coefficients(Loss *self, int add)
{
    struct coefficients *sde = &self->sde;
    const float *log_std = self->log_std.buf;
    for (long i = 0; i < sde->n_latents; i++)
        for (long j = 0; j < self->n_outputs; j++) {
            float slope, std = std_of(sde, log_std[i * sde->n_stds + j % sde->n_stds], &slope);
            sde->of_coefficients[i * sde->ld + j] = std * std;
        }
    if (!add)
        memset(sde->d_coefficients, 0, sde->n_latents * sde->ld * sizeof(float));
}

static void measure_variances(struct coefficients *sde, const float *latents, long ld_latents, long n)
{
    for (long i = 0; i < n; i++)
        for (long j = 0; j < sde->n_latents; j++)
            sde->squares[i * sde->n_latents + j] = latents[i * ld_latents + j] * latents[i * ld_latents + j];
    kernels->product(n, sde->ld, sde->n_latents, sde->squares, sde->n_latents, 1, sde->of_coefficients, sde->ld,
                     sde->variances, sde->ld, NULL, 0);
}

static void write_d_coefficients(Loss *self, long n)
{
    struct coefficients *sde = &self->sde;
    const float *log_std = self->log_std.buf;
    float *d_log_std = self->d_log_std.buf;
    kernels->product(sde->n_latents, sde->ld, n, sde->squares, 1, sde->n_latents, sde->d_variances, sde->ld,
                     sde->d_coefficients, sde->ld, NULL, 1);
    for (long i = 0; i < sde->n_latents; i++)
        for (long k = 0; k < sde->n_stds; k++) {
            float slope, std = std_of(sde, log_std[i * sde->n_stds + k], &slope), sum = 0;
            for (long j = k; j < self->n_outputs; j += sde->n_stds)
                sum += sde->d_coefficients[i * sde->ld + j];
            d_log_std[i * sde->n_stds + k] = sum * 2 * std * slope;
        }
}

/* Read the standard deviations, which a step of the optimiser has changed. Their gradient may go on. */
static void begin_minibatch(Loss *self, int add)
{
    if (self->family == STATE_DEPENDENT)
        begin_coefficients(self, add);
    const float *log_std = self->log_std.buf;
    float sum = 0;
    for (long i = 0; has_std(self) && i < self->n_outputs; i++) {
        float chosen = self->family == SQUASHED ? clamped(log_std[i], MIN_LOG_STD, MAX_LOG_STD) : log_std[i];
        self->inverse_stds[i] = expf(-chosen), self->d_stds[i] = add ? self->d_stds[i] : 0;
        sum += chosen;
    }
    self->log_constant = sum + 0.91893853f * self->n_outputs; /* log(2 pi) / 2 */
}

static void write_d_log_std(Loss *self)
{
    const float *log_std = self->log_std.buf;
    float *d_log_std = self->d_log_std.buf;
    for (long i = 0; has_std(self) && i < self->n_outputs; i++) {
        double d = self->d_stds[i];
        /* As `clamp` in `distributions/base.py`: outside of the range, only what leads back into it is kept. */
        if (self->family == SQUASHED && ((log_std[i] < MIN_LOG_STD && d > 0) || (log_std[i] > MAX_LOG_STD && d < 0)))
            d = 0;
        d_log_std[i] = (float)d;
    }
}

static float log_prob(Loss *self, const float *outputs, const float *action, float *d, float *entropy)
{
    if (self->family == CATEGORICAL)
        return log_prob_categorical(self, action, entropy);
    if (self->family == BERNOULLI)
        return log_prob_bernoulli(self, outputs, action, d, entropy);
    if (self->family == BETA)
        return log_prob_beta(self, outputs, action, entropy);
    if (self->family == STATE_DEPENDENT)
        return log_prob_state_dependent(self, outputs, action, entropy);
    *entropy = self->family == SQUASHED ? entropy_squashed(self, outputs) : self->log_constant + 0.5f * self->n_outputs;
    float log_derivatives = self->family == SQUASHED ? log_tanh_derivatives(self, action) : 0;
    return log_prob_gaussian(self, outputs, action) - log_derivatives;
}

static void differentiate(Loss *self, const float *outputs, const float *action, float d_log_prob, float ent, float *d)
{
    if (self->family == CATEGORICAL)
        differentiate_categorical(self, action, d_log_prob, ent, d);
    else if (self->family == BERNOULLI)
        differentiate_bernoulli(self, outputs, action, d_log_prob, ent, d);
    else if (self->family == BETA)
        differentiate_beta(self, d_log_prob, ent, d);
    else if (self->family == STATE_DEPENDENT)
        differentiate_state_dependent(self, outputs, action, d_log_prob, ent, d);
    else if (self->family == SQUASHED)
        differentiate_squashed(self, outputs, action, d_log_prob, ent, d);
    else
        differentiate_gaussian(self, outputs, action, d_log_prob, ent, d);
}

#define COLUMN(which) ((float *)self->columns[which].buf)

static void penalize(Loss *self, long i, float share, const float *outputs, float *d_outputs)
{
    if (self->kl_coef != 0)
        COLUMN(KLS)[i] = kl_divergence(self, outputs, self->columns[OLD].buf, i, self->kl_coef * share, d_outputs);
    if (self->bounds_coef != 0)
        COLUMN(BOUNDS)[i] = excess_over_bounds(self, outputs, self->bounds_coef * share, d_outputs);
}

/* Outputs, and the parameter of the standard deviation, as `NumpyDistribution.described` */
static void describe(const Loss *self, long i, const float *outputs)
{
    long n = self->n_outputs;
    float *row = COLUMN(DESCRIBED) + i * (has_std(self) ? 2 * n : n);
    memcpy(row, outputs, n * sizeof(float));
    if (has_std(self))
        memcpy(row + n, self->log_std.buf, n * sizeof(float));
}

/* Measure the i-th sample, and write its gradients; return the square of the error of its value. */
static float add_sample(Loss *self, long i, float share, const float *outputs, float value, float *d_outputs, float *d_value)
{
    const float *action = COLUMN(ACTIONS) + i * self->n_actions;
    float weight = self->columns[WEIGHTS].buf ? COLUMN(WEIGHTS)[i] : 1, d_error;
    float log_ratio = log_prob(self, outputs, action, d_outputs, &COLUMN(ENTROPIES)[i]) - COLUMN(LOG_PROBS)[i];
    float ratio = expf(log_ratio);
    COLUMN(LOG_RATIOS)[i] = log_ratio, COLUMN(RATIOS)[i] = ratio;
    float slope = surrogate(self, COLUMN(ADVANTAGES)[i], ratio, &COLUMN(OBJECTIVES)[i]);
    differentiate(self, outputs, action, -share * slope * weight, self->ent_coef * share, d_outputs);
    penalize(self, i, share, outputs, d_outputs);
    if (self->columns[DESCRIBED].buf)
        describe(self, i, outputs);
    float error = COLUMN(ERRORS)[i] = value_error(self, value, COLUMN(VALUES)[i], COLUMN(RETURNS)[i], &d_error);
    *d_value = 2 * self->vf_coef * share * d_error * weight;
    return error * error;
}

/* Rows of outputs, and of latents, which gSDE reads: so many numbers apart */
struct rows {
    const float *outputs, *latents;
    long ld_outputs, ld_latents;
};

/* The same of consecutive samples, for a loss that is the mean of so many; return the sum of the squares. */
static float add_samples(Loss *self, long start, long n, long size, struct rows rows, const float *values, float *d_outputs,
                         float *d_values, int add)
{
    float total = 0, share = 1 / (float)size;
    begin_minibatch(self, add);
    if (self->family == STATE_DEPENDENT)
        measure_variances(&self->sde, rows.latents, rows.ld_latents, n);
    if (self->family == CATEGORICAL)
        measure_softmax(self, rows.outputs, rows.ld_outputs, n);
    for (long i = 0; i < n; i++) {
        self->current = i;
        self->sde.row = self->sde.variances + i * self->sde.ld, self->sde.d_row = self->sde.d_variances + i * self->sde.ld;
        total += add_sample(self, start + i, share, rows.outputs + i * rows.ld_outputs, values[i],
                            d_outputs + i * self->n_outputs, d_values + i);
    }
    if (self->family == STATE_DEPENDENT)
        write_d_coefficients(self, n);
    write_d_log_std(self);
    return total;
}

PyDoc_STRVAR(add_doc,
             "add(start, size, outputs, values, d_outputs, d_values, add) -> float\n\nMeasure consecutive samples, and write "
             "the gradients of a loss that is the mean of so many samples. Those of `log_std` are added, if that is asked "
             "for. With gSDE, each row of outputs is followed by the latents. The result is the sum of the squared errors of "
             "the values.");
static PyObject *loss_add(Loss *self, PyObject *args)
{
    static const char *names[] = {"outputs", "values", "d_outputs", "d_values"};
    long start, size, n = -1;
    int add, failed = 0;
    PyObject *arrays[4];
    Py_buffer views[4] = {{0}};
    if (!PyArg_ParseTuple(args, "llOOOOp:add", &start, &size, &arrays[0], &arrays[1], &arrays[2], &arrays[3], &add))
        return NULL;
    long ld = self->n_outputs + self->sde.n_latents;
    for (int i = 0; i < 4 && !failed; i++) {
        failed = get_floats(arrays[i], &views[i], i % 2 ? 1 : 2, i % 2 ? SHAPE(n) : SHAPE(n, i ? self->n_outputs : ld), i >= 2,
                            names[i]) < 0;
        n = failed ? n : views[i].shape[0];
    }
    if (!failed && (start < 0 || n > self->n - start || size < 1)) {
        PyErr_SetString(PyExc_ValueError, "there are not as many samples");
        failed = 1;
    }
    failed = failed || check_choices(self, start, n) < 0 || reserve_samples(self, n) < 0;
    float total = 0;
    if (!failed) {
        const float *outputs = views[0].buf;
        struct rows rows = {outputs, outputs + self->n_outputs, ld, ld};
        total = add_samples(self, start, n, size, rows, views[1].buf, views[2].buf, views[3].buf, add);
    }
    for (int i = 0; i < 4; i++)
        PyBuffer_Release(&views[i]);
    return failed ? NULL : PyFloat_FromDouble(total);
}

static PyMethodDef loss_methods[] = {
    {"add", (PyCFunction)loss_add, METH_VARARGS, add_doc},
    {NULL},
};

PyDoc_STRVAR(
    loss_doc,
    "Loss(family, choices, log_std, d_log_std, columns, bounds, is_spo, is_max, clip_range, dual_clip, value_limit, "
    "value_scale, vf_coef, ent_coef, kl_coef, bounds_coef, bounds_limit, max_concentration, use_expln, epsilon)\n\nThe "
    "loss of PPO for the samples of an epoch. Choices are the numbers of outputs of each action. The columns are arrays of "
    "the "
    "samples: actions, log_probs, advantages, values, returns, weights or None, parameters of the old distributions "
    "or None; and those that are written: log_ratios, ratios, objectives, errors, entropies, and, each an array or "
    "None, descriptions of the distributions, KL divergences and bounds losses.");
static PyType_Slot loss_slots[] = {
    {Py_tp_new, loss_new},
    {Py_tp_dealloc, loss_dealloc},
    {Py_tp_methods, loss_methods},
    {Py_tp_doc, (void *)loss_doc},
    {0, NULL},
};
static PyType_Spec loss_spec = {"sb3_ppo_ext.engines.native._mlp.Loss", sizeof(Loss), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, loss_slots};
