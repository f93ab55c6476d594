/*
 * Steps of the optimiser, many in one call: gather, forward, loss and slope, backward, norm, Adam.
 */

#pragma once

#include "adam.h"
#include "loss.h"
#include "network.h"

/* Logit of an invalid action, as in `distributions/masked.py` */
#define INVALID -1e8f

typedef struct {
    PyObject_HEAD
    Network *actor, *critic;
    Loss *loss;
    Adam *adam;
    /* Of the samples: what the networks read, and whether actions are invalid, with an empty view if all are valid */
    Py_buffer features, invalid;
    /* Largest number of samples whose activations stay in the caches; outputs and values of so many, and their gradients */
    long block;
    float *outputs, *values, *d_outputs, *d_values;
} Steps;

/* What is the same for all steps of a call */
struct limits {
    long batch_size;
    double max_norm, max_kl, value_std, value_mean;
};

static long n_outputs_of(const Network *network)
{
    return network->layers[network->n_layers - 1].n_out;
}

static int open_invalid(Steps *self, PyObject *invalid)
{
    Py_buffer *view = &self->invalid;
    if (invalid == Py_None)
        return 0;
    if (PyObject_GetBuffer(invalid, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0) {
        view->obj = NULL;
        return -1;
    }
    if (view->ndim == 2 && !strcmp(view->format, "?") && view->shape[0] == self->loss->n &&
        view->shape[1] == self->loss->n_outputs)
        return 0;
    PyErr_SetString(PyExc_ValueError, "invalid must be an array of Booleans, with a number for each output of each sample");
    return -1;
}

static int open_steps(Steps *self, PyObject *features, PyObject *invalid)
{
    long n = self->loss->n, n_outputs = self->loss->n_outputs, n_in = self->actor->layers[0].n_in;
    long n_latents = self->loss->sde.n_latents, n_read = self->actor->layers[self->actor->n_layers - 1].n_in;
    if (n_outputs_of(self->actor) != n_outputs || n_outputs_of(self->critic) != 1 || self->critic->layers[0].n_in != n_in ||
        self->actor == self->critic || (self->loss->family == STATE_DEPENDENT && n_latents != n_read)) {
        PyErr_SetString(PyExc_ValueError, "actor, critic and loss do not fit together");
        return -1;
    }
    if (get_floats(features, &self->features, 2, SHAPE(n, n_in), 0, "features") < 0 || open_invalid(self, invalid) < 0 ||
        reserve_samples(self->loss, self->block) < 0)
        return -1;
    self->outputs = allocate(self->block, n_outputs), self->d_outputs = allocate(self->block, n_outputs);
    self->values = allocate(self->block, 1), self->d_values = allocate(self->block, 1);
    if (self->outputs && self->values && self->d_outputs && self->d_values)
        return 0;
    PyErr_NoMemory();
    return -1;
}

static int is_of_type(PyObject *object, destructor dealloc, const char *name)
{
    if (Py_TYPE(object)->tp_dealloc == dealloc)
        return 1;
    PyErr_Format(PyExc_TypeError, "steps are made with a %s, not with %.200s", name, Py_TYPE(object)->tp_name);
    return 0;
}

static PyObject *steps_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"actor", "critic", "loss", "adam", "features", "invalid", "block", NULL};
    PyObject *actor, *critic, *loss, *adam, *features, *invalid;
    long block;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOOl:Steps", keywords, &actor, &critic, &loss, &adam, &features,
                                     &invalid, &block))
        return NULL;
    if (!is_of_type(actor, (destructor)network_dealloc, "Network") ||
        !is_of_type(critic, (destructor)network_dealloc, "Network") || !is_of_type(loss, (destructor)loss_dealloc, "Loss") ||
        !is_of_type(adam, (destructor)adam_dealloc, "Adam"))
        return NULL;
    if (block < 1)
        return PyErr_Format(PyExc_ValueError, "a block has at least one sample, not %ld", block);
    Steps *self = (Steps *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->actor = (Network *)Py_NewRef(actor), self->critic = (Network *)Py_NewRef(critic);
    self->loss = (Loss *)Py_NewRef(loss), self->adam = (Adam *)Py_NewRef(adam);
    self->block = block < self->loss->n ? block : self->loss->n + !self->loss->n;
    if (open_steps(self, features, invalid) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* Also of steps whose construction has failed: what has not been opened is zero. */
static void steps_dealloc(Steps *self)
{
    PyBuffer_Release(&self->features), PyBuffer_Release(&self->invalid);
    free(self->outputs), free(self->values), free(self->d_outputs), free(self->d_values);
    Py_XDECREF(self->actor), Py_XDECREF(self->critic), Py_XDECREF(self->loss), Py_XDECREF(self->adam);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

/* Add the gradients of so many samples, for a loss that is the mean over `size`; return the sum of the squared errors. */
static double add_block(Steps *self, long start, long n, long size, const struct limits *limits, int add, int *failed)
{
    Loss *loss = self->loss;
    const float *x = (float *)self->features.buf + start * self->actor->layers[0].n_in;
    const char *invalid = self->invalid.buf ? (char *)self->invalid.buf + start * loss->n_outputs : NULL;
    float std = (float)limits->value_std, mean = (float)limits->value_mean;
    if ((*failed = forward(self->actor, x, self->outputs, n) < 0 || forward(self->critic, x, self->values, n) < 0))
        return 0;
    for (long i = 0; i < n; i++)
        self->values[i] = self->values[i] * std + mean;
    for (long i = 0; invalid && i < n * loss->n_outputs; i++)
        self->outputs[i] = invalid[i] ? INVALID : self->outputs[i];
    const struct layer *last = &self->actor->layers[self->actor->n_layers - 1];
    const float *latents = self->actor->n_layers > 1 ? last[-1].output : self->actor->input;
    struct rows rows = {self->outputs, latents, loss->n_outputs, last->ld_in};
    double squares = add_samples(loss, start, n, size, rows, self->values, self->d_outputs, self->d_values, add);
    for (long i = 0; i < n; i++)
        self->d_values[i] *= std;
    backward(self->actor, self->d_outputs, add), backward(self->critic, self->d_values, add);
    return squares;
}

/* Write the gradient of the step of some samples: minibatch after minibatch, and each in blocks. */
static double add_step(Steps *self, long start, long end, const struct limits *limits, int *failed)
{
    double squares = 0;
    long first = start, size = end - start;
    pack(self->actor), pack(self->critic);
    for (long stop; start < end && !*failed; start = stop) {
        stop = end - start < limits->batch_size ? end : start + limits->batch_size;
        for (long at = start; at < stop && !*failed; at += self->block)
            squares +=
                add_block(self, at, stop - at < self->block ? stop - at : self->block, size, limits, at > first, failed);
    }
    return squares;
}

/* The mean of `ratio - 1 - log_ratio`, see `approximate_kl` */
static double approximate_kl(const Loss *self, long start, long end)
{
    double sum = 0;
    for (long i = start; i < end; i++)
        sum += COLUMN(RATIOS)[i] - 1 - COLUMN(LOG_RATIOS)[i];
    return sum / (end - start);
}

/* Make a step, unless it is one that the caller has to look at; write the norm of its gradient. */
static int try_step(Steps *self, long start, long end, const struct limits *limits, double n, struct adam_options options,
                    double *norm, int *failed)
{
    double squares = add_step(self, start, end, limits, failed);
    if (*failed || approximate_kl(self->loss, start, end) > limits->max_kl)
        return 0;
    *norm = norm_of_gradients(self->adam);
    if (!isfinite(*norm + squares))
        return 0;
    double scale = limits->max_norm / (*norm + 1e-6);
    make_step(self->adam, n, scale < 1 ? scale : 1, options);
    return 1;
}

/* The samples at which the steps end, in ascending order */
static int read_ends(const Steps *self, PyObject *ends, long *at, long first, long last)
{
    for (long i = first - 1; i < last; i++) {
        long end = i < 0 ? 0 : PyLong_AsLong(PyTuple_GET_ITEM(ends, i));
        if (PyErr_Occurred())
            return -1;
        if (end > self->loss->n || end < 0 || (i >= first && end <= at[i - first])) {
            PyErr_SetString(PyExc_ValueError, "steps end at samples, in ascending order");
            return -1;
        }
        at[i - first + 1] = end;
    }
    return 0;
}

#define MAX_STEPS 64

PyDoc_STRVAR(
    make_doc,
    "make(ends, first, n, batch_size, max_norm, max_kl, value_std, value_mean, lr, beta1, beta2, eps, weight_decay) "
    "-> list[float]\n\nMake steps from the given one on, of which n are made then, with a gradient of at most a norm. "
    "It ends after 64 of them, and before one whose KL divergence is larger, or whose loss or gradient is not finite. "
    "The result has the norms of the gradients of the steps that were made.");
static PyObject *steps_make(Steps *self, PyObject *args)
{
    PyObject *ends;
    long first, at[MAX_STEPS + 1], n_made = 0;
    double n, norms[MAX_STEPS];
    int failed = 0;
    struct limits limits;
    struct adam_options o;
    if (!PyArg_ParseTuple(args, "O!ldlddddddddd:make", &PyTuple_Type, &ends, &first, &n, &limits.batch_size, &limits.max_norm,
                          &limits.max_kl, &limits.value_std, &limits.value_mean, &o.lr, &o.beta1, &o.beta2, &o.eps,
                          &o.weight_decay))
        return NULL;
    long n_steps = PyTuple_GET_SIZE(ends);
    if (first < 0 || first > n_steps || limits.batch_size < 1 || isnan(limits.max_norm + limits.max_kl) ||
        !isfinite(limits.value_std + limits.value_mean)) {
        PyErr_SetString(PyExc_ValueError, "there is no such step, or a number is NaN or infinite");
        return NULL;
    }
    long last = n_steps - first > MAX_STEPS ? first + MAX_STEPS : n_steps;
    if (check_options(n, 1, o) < 0 || read_ends(self, ends, at, first, last) < 0 ||
        check_choices(self->loss, at[0], at[last - first] - at[0]) < 0 || refuse_if_busy(self->actor) < 0 ||
        refuse_if_busy(self->critic) < 0)
        return NULL;
    while (n_made < last - first &&
           try_step(self, at[n_made], at[n_made + 1], &limits, n + n_made, o, &norms[n_made], &failed))
        n_made++;
    PyObject *made = failed ? NULL : PyList_New(n_made);
    for (long i = 0; made && i < n_made; i++) {
        PyObject *norm = PyFloat_FromDouble(norms[i]);
        if (!norm)
            Py_CLEAR(made);
        else
            PyList_SET_ITEM(made, i, norm);
    }
    return made;
}

static PyMethodDef steps_methods[] = {
    {"make", (PyCFunction)steps_make, METH_VARARGS, make_doc},
    {NULL},
};

PyDoc_STRVAR(steps_doc,
             "Steps(actor, critic, loss, adam, features, invalid, block)\n\nSteps of the optimiser for the samples of a loss, "
             "whose features both networks read, and some of whose actions are invalid, or None.");
static PyType_Slot steps_slots[] = {
    {Py_tp_new, steps_new},
    {Py_tp_dealloc, steps_dealloc},
    {Py_tp_methods, steps_methods},
    {Py_tp_doc, (void *)steps_doc},
    {0, NULL},
};
static PyType_Spec steps_spec = {"sb3_ppo_ext.engines.native._mlp.Steps", sizeof(Steps), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, steps_slots};
