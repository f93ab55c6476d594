/*
 * The loss of PPO and its slope, sample by sample: what `update/losses.py` and `distributions/` compute with NumPy, for action
 * distributions whose log probabilities need no more than exponentials and logarithms.
 */

#pragma once

#include "arrays.h"
#include "instruction_sets.h"

enum family { GAUSSIAN, CATEGORICAL, BERNOULLI, N_FAMILIES };
static const char *const family_names[] = {"gaussian", "categorical", "bernoulli"};

/* What is known of the samples, and what is measured of them */
enum column {
    ACTIONS,
    LOG_PROBS,
    ADVANTAGES,
    VALUES,
    RETURNS,
    WEIGHTS,
    LOG_RATIOS,
    RATIOS,
    OBJECTIVES,
    ERRORS,
    ENTROPIES,
    N_COLUMNS
};
static const char *const column_names[] = {"actions",    "log_probs", "advantages", "values", "returns",  "weights",
                                           "log_ratios", "ratios",    "objectives", "errors", "entropies"};

typedef struct {
    PyObject_HEAD
    enum family family;
    /* Number of samples, of actions of each, and of outputs of the actor */
    long n, n_actions, n_outputs;
    /* Number of logits of each action, of categorical distributions */
    long *choices;
    /* Without weights, and without a standard deviation, the views are empty. */
    Py_buffer columns[N_COLUMNS], log_std, d_log_std;
    /* Of the current sample, two numbers for each action; of Gaussians, the inverses and the gradients of all deviations */
    float *kept, *inverse_stds;
    double *d_stds;
    float log_constant;
    int is_spo, is_max;
    float clip_range, low, high, dual_clip, value_limit, value_scale, vf_coef, ent_coef;
} Loss;

/* Log probability of a sample. What the gradient needs is kept: of categorical distributions, the probabilities in its row. */
static float log_prob_gaussian(const Loss *self, const float *mean, const float *action)
{
    float sum = 0;
    for (long i = 0; i < self->n_outputs; i++) {
        float z = (action[i] - mean[i]) * self->inverse_stds[i];
        sum += z * z;
    }
    return -0.5f * sum - self->log_constant;
}

static float log_prob_categorical(const Loss *self, const float *logits, const float *action, float *probs, float *entropy)
{
    float log_prob = 0;
    *entropy = 0;
    for (long i = 0; i < self->n_actions; logits += self->choices[i], probs += self->choices[i], i++) {
        long n = self->choices[i];
        float largest = logits[0], sum = 0, weighted = 0;
        for (long j = 1; j < n; j++)
            largest = logits[j] > largest ? logits[j] : largest;
        for (long j = 0; j < n; j++)
            sum += probs[j] = expf(logits[j] - largest);
        float log_sum = largest + logf(sum);
        for (long j = 0; j < n; j++) {
            probs[j] /= sum;
            weighted += probs[j] * (logits[j] - log_sum);
        }
        log_prob += logits[(long)action[i]] - log_sum;
        *entropy -= weighted;
        self->kept[2 * i] = log_sum, self->kept[2 * i + 1] = weighted;
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

static void differentiate_categorical(const Loss *self, const float *logits, const float *action, float d_log_prob, float ent,
                                      float *d)
{
    for (long i = 0; i < self->n_actions; logits += self->choices[i], d += self->choices[i], i++) {
        float log_sum = self->kept[2 * i], weighted = self->kept[2 * i + 1];
        for (long j = 0; j < self->choices[i]; j++) {
            float slope = -d_log_prob * d[j];
            if (ent != 0)
                slope += ent * d[j] * (logits[j] - log_sum - weighted);
            d[j] = slope;
        }
        d[(long)action[i]] += d_log_prob;
    }
}

static void differentiate_bernoulli(const Loss *self, const float *logits, const float *action, float d_log_prob, float ent,
                                    float *d)
{
    for (long i = 0; i < self->n_outputs; i++)
        d[i] = d_log_prob * (action[i] - d[i]) + ent * logits[i] * d[i] * (1 - d[i]);
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

static int open_column(Loss *self, int which, PyObject *array)
{
    if (which == WEIGHTS && array == Py_None)
        return 0;
    long n = which == ACTIONS ? -1 : self->n;
    int n_dimensions = which == ACTIONS ? 2 : 1;
    if (get_floats(array, &self->columns[which], n_dimensions, SHAPE(n, self->n_actions), which >= LOG_RATIOS,
                   column_names[which]) < 0)
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

static int open_loss(Loss *self, const char *family, PyObject *choices, PyObject *log_std, PyObject *d_log_std,
                     PyObject *columns)
{
    if (find_family(self, family) < 0 || read_choices(self, choices) < 0)
        return -1;
    if (self->family != CATEGORICAL && self->n_outputs != self->n_actions) {
        PyErr_SetString(PyExc_ValueError, "such an action has one output");
        return -1;
    }
    if (PyTuple_GET_SIZE(columns) != N_COLUMNS) {
        PyErr_Format(PyExc_TypeError, "a loss has %d columns", N_COLUMNS);
        return -1;
    }
    if (self->family == GAUSSIAN && (get_floats(log_std, &self->log_std, 1, SHAPE(self->n_outputs), 0, "log_std") < 0 ||
                                     get_floats(d_log_std, &self->d_log_std, 1, SHAPE(self->n_outputs), 1, "d_log_std") < 0))
        return -1;
    for (int i = 0; i < N_COLUMNS; i++)
        if (open_column(self, i, PyTuple_GET_ITEM(columns, i)) < 0)
            return -1;
    self->kept = PyMem_Calloc(2 * self->n_actions + 1, sizeof(float));
    self->inverse_stds = PyMem_Calloc(self->n_outputs + 1, sizeof(float));
    self->d_stds = PyMem_Calloc(self->n_outputs + 1, sizeof(double));
    if (!self->kept || !self->inverse_stds || !self->d_stds) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static PyObject *loss_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"family",     "choices",   "log_std",     "d_log_std",   "columns", "is_spo",   "is_max",
                               "clip_range", "dual_clip", "value_limit", "value_scale", "vf_coef", "ent_coef", NULL};
    const char *family;
    PyObject *choices, *log_std, *d_log_std, *columns;
    int is_spo, is_max;
    double clip_range, dual_clip, value_limit, value_scale, vf_coef, ent_coef;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sO!OOO!ppdddddd:Loss", keywords, &family, &PyTuple_Type, &choices,
                                     &log_std, &d_log_std, &PyTuple_Type, &columns, &is_spo, &is_max, &clip_range, &dual_clip,
                                     &value_limit, &value_scale, &vf_coef, &ent_coef))
        return NULL;
    Loss *self = (Loss *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->is_spo = is_spo, self->is_max = is_max, self->clip_range = (float)clip_range;
    self->low = (float)(1 - clip_range), self->high = (float)(1 + clip_range), self->dual_clip = (float)dual_clip;
    self->value_limit = (float)value_limit, self->value_scale = (float)value_scale;
    self->vf_coef = (float)vf_coef, self->ent_coef = (float)ent_coef;
    if (open_loss(self, family, choices, log_std, d_log_std, columns) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* Also of a loss whose construction has failed: what has not been opened is zero. */
static void loss_dealloc(Loss *self)
{
    for (int i = 0; i < N_COLUMNS; i++)
        PyBuffer_Release(&self->columns[i]);
    PyBuffer_Release(&self->log_std), PyBuffer_Release(&self->d_log_std);
    PyMem_Free(self->choices), PyMem_Free(self->kept), PyMem_Free(self->inverse_stds), PyMem_Free(self->d_stds);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

/* Read the standard deviations, which a step of the optimiser has changed. */
static void begin_minibatch(Loss *self)
{
    const float *log_std = self->log_std.buf;
    float sum = 0;
    for (long i = 0; self->family == GAUSSIAN && i < self->n_outputs; i++) {
        self->inverse_stds[i] = expf(-log_std[i]), self->d_stds[i] = 0;
        sum += log_std[i];
    }
    self->log_constant = sum + 0.91893853f * self->n_outputs; /* log(2 pi) / 2 */
}

static void write_d_log_std(Loss *self, int add)
{
    float *d_log_std = self->d_log_std.buf;
    for (long i = 0; self->family == GAUSSIAN && i < self->n_outputs; i++)
        d_log_std[i] = (float)self->d_stds[i] + (add ? d_log_std[i] : 0);
}

static float log_prob(Loss *self, const float *outputs, const float *action, float *d, float *entropy)
{
    if (self->family == CATEGORICAL)
        return log_prob_categorical(self, outputs, action, d, entropy);
    if (self->family == BERNOULLI)
        return log_prob_bernoulli(self, outputs, action, d, entropy);
    *entropy = self->log_constant + 0.5f * self->n_outputs;
    return log_prob_gaussian(self, outputs, action);
}

static void differentiate(Loss *self, const float *outputs, const float *action, float d_log_prob, float ent, float *d)
{
    if (self->family == CATEGORICAL)
        differentiate_categorical(self, outputs, action, d_log_prob, ent, d);
    else if (self->family == BERNOULLI)
        differentiate_bernoulli(self, outputs, action, d_log_prob, ent, d);
    else
        differentiate_gaussian(self, outputs, action, d_log_prob, ent, d);
}

#define COLUMN(which) ((float *)self->columns[which].buf)

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
    float error = COLUMN(ERRORS)[i] = value_error(self, value, COLUMN(VALUES)[i], COLUMN(RETURNS)[i], &d_error);
    *d_value = 2 * self->vf_coef * share * d_error * weight;
    return error * error;
}

/* The same of consecutive samples, for a loss that is the mean of so many; return the sum of the squares. */
static float add_samples(Loss *self, long start, long n, long size, const float *outputs, const float *values,
                         float *d_outputs, float *d_values, int add)
{
    float total = 0, share = 1 / (float)size;
    begin_minibatch(self);
    for (long i = 0; i < n; i++)
        total += add_sample(self, start + i, share, outputs + i * self->n_outputs, values[i], d_outputs + i * self->n_outputs,
                            d_values + i);
    write_d_log_std(self, add);
    return total;
}

PyDoc_STRVAR(add_doc,
             "add(start, size, outputs, values, d_outputs, d_values, add) -> float\n\nMeasure consecutive samples, and write "
             "the gradients of a loss that is the mean of so many samples. Those of `log_std` are added, if that is asked "
             "for. The result is the sum of the squared errors of the values.");
static PyObject *loss_add(Loss *self, PyObject *args)
{
    static const char *names[] = {"outputs", "values", "d_outputs", "d_values"};
    long start, size, n = -1;
    int add, failed = 0;
    PyObject *arrays[4];
    Py_buffer views[4] = {{0}};
    if (!PyArg_ParseTuple(args, "llOOOOp:add", &start, &size, &arrays[0], &arrays[1], &arrays[2], &arrays[3], &add))
        return NULL;
    for (int i = 0; i < 4 && !failed; i++) {
        failed = get_floats(arrays[i], &views[i], i % 2 ? 1 : 2, i % 2 ? SHAPE(n) : SHAPE(n, self->n_outputs), i >= 2,
                            names[i]) < 0;
        n = failed ? n : views[i].shape[0];
    }
    if (!failed && (start < 0 || n > self->n - start || size < 1)) {
        PyErr_SetString(PyExc_ValueError, "there are not as many samples");
        failed = 1;
    }
    failed = failed || check_choices(self, start, n) < 0;
    float total = 0;
    if (!failed)
        total = add_samples(self, start, n, size, views[0].buf, views[1].buf, views[2].buf, views[3].buf, add);
    for (int i = 0; i < 4; i++)
        PyBuffer_Release(&views[i]);
    return failed ? NULL : PyFloat_FromDouble(total);
}

static PyMethodDef loss_methods[] = {
    {"add", (PyCFunction)loss_add, METH_VARARGS, add_doc},
    {NULL},
};

PyDoc_STRVAR(loss_doc,
             "Loss(family, choices, log_std, d_log_std, columns, is_spo, is_max, clip_range, dual_clip, value_limit, "
             "value_scale, vf_coef, ent_coef)\n\nThe loss of PPO for the samples of an epoch. Choices are the numbers of "
             "outputs of each action. The columns are arrays of the samples: actions, log_probs, advantages, values, returns, "
             "weights or None; and those that are written: log_ratios, ratios, objectives, errors, entropies.");
static PyType_Slot loss_slots[] = {
    {Py_tp_new, loss_new},
    {Py_tp_dealloc, loss_dealloc},
    {Py_tp_methods, loss_methods},
    {Py_tp_doc, (void *)loss_doc},
    {0, NULL},
};
static PyType_Spec loss_spec = {"sb3_ppo_ext.engines.native._mlp.Loss", sizeof(Loss), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, loss_slots};
