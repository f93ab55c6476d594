/*
 * A network: its layers, their outputs and gradients, on one thread.
 */

#pragma once

#include "arrays.h"
#include "instruction_sets.h"

#define MAX_LAYERS 64
/* Number of rows that pass through all layers together, so that they stay in the cache */
#define CHUNK 64

enum kind { LINEAR, NORM, ACTIVATION, SUM };

struct layer {
    enum kind kind;
    enum activation activation;
    /* of a sum, the layer whose outputs it adds to those of the layer before; of that layer, the sum */
    struct layer *shortcut, *sum;
    long n_in, n_out, ld_in, ld_out;
    Py_buffer weight, bias, weight_gradient, bias_gradient;
    /* weight padded, that of a linear layer transposed; weight padded, unused if no padding is needed; bias padded */
    float *packed, *rows, *padded_bias;
    /* padded gradients of the parameters; that of the weight is transposed if this needs less padding */
    float *d_weight, *d_bias;
    int is_d_weight_transposed;
    /* outputs for the last minibatch, in padded rows, and their gradients; activations and sums replace the last ones */
    float *output, *delta;
    /* derivatives of activations, if these are kept; normalised inputs, and the inverses of their standard deviations */
    float *kept, *inverse_stds;
};

typedef struct {
    PyObject_HEAD
    int n_layers;
    struct layer layers[MAX_LAYERS];
    float *input;
    long capacity, delta_capacity, n_kept;
    /* Whether threads compute with it, while the thread that has called them has released the lock of the interpreter */
    int is_busy;
} Network;

static int is_in_place(const struct layer *layer)
{
    return layer->kind == ACTIVATION || layer->kind == SUM;
}

static int refuse_layer(const char *message)
{
    PyErr_SetString(PyExc_ValueError, message);
    return -1;
}

static int find_activation(PyObject *name, enum activation *activation)
{
    for (int i = 0; i < N_ACTIVATIONS; i++)
        if (!PyUnicode_CompareWithASCIIString(name, activation_names[i])) {
            *activation = i;
            return 0;
        }
    PyErr_Format(PyExc_ValueError, "no activation %R, give 'tanh', 'relu', 'elu', 'silu' or 'gelu'", name);
    return -1;
}

/* Whether the derivative cannot be computed from the output */
static int keeps_slope(const struct layer *layer)
{
    return layer->kind == ACTIVATION && (layer->activation == SILU || layer->activation == GELU);
}

static int open_sum(Network *self, struct layer *layer, PyObject *number)
{
    int overflow;
    long shortcut = PyLong_AsLongAndOverflow(number, &overflow);
    /* A layer in place would replace the outputs that are to be added. */
    if (overflow || shortcut < 0 || shortcut >= layer - self->layers - 1 || is_in_place(&self->layers[shortcut + 1]))
        return refuse_layer("a sum must have the index of a layer further up, which no activation or sum follows");
    layer->kind = SUM, layer->shortcut = &self->layers[shortcut];
    if (layer->shortcut->sum)
        return refuse_layer("the outputs of a layer can be added once");
    if (layer->shortcut->n_out != layer->n_out)
        return refuse_layer("a sum must have terms of the same size");
    layer->shortcut->sum = layer;
    return 0;
}

static int open_in_place(Network *self, struct layer *layer, PyObject *given)
{
    if (layer == self->layers || is_in_place(layer - 1))
        return refuse_layer("an activation or a sum must follow a linear layer or a normalisation");
    layer->n_in = layer->n_out = layer[-1].n_out, layer->ld_in = layer->ld_out = layer[-1].ld_out;
    if (PyLong_Check(given))
        return open_sum(self, layer, given);
    layer->kind = ACTIVATION;
    return find_activation(given, &layer->activation);
}

/* Open the weight, whose number of dimensions says what kind of a layer it is. */
static int open_weight(Network *self, struct layer *layer, PyObject *array)
{
    Py_buffer *weight = &layer->weight;
    if (get_array(array, weight, 0, "a weight") < 0)
        return -1;
    layer->kind = weight->ndim == 1 ? NORM : LINEAR;
    if (check_floats(weight, layer->kind == NORM ? 1 : 2, SHAPE(-1, -1), "a weight") < 0)
        return -1;
    layer->n_out = weight->shape[0], layer->n_in = weight->shape[layer->kind == NORM ? 0 : 1];
    if (layer > self->layers && layer->n_in != layer[-1].n_out) {
        PyErr_Format(PyExc_ValueError, "the layers do not fit together: %ld inputs after %ld outputs", layer->n_in,
                     layer[-1].n_out);
        return -1;
    }
    if (!layer->n_in || !layer->n_out)
        return refuse_layer("a layer must have inputs and outputs");
    return 0;
}

static int open_layer(Network *self, PyObject *given)
{
    struct layer *layer = &self->layers[self->n_layers++];
    if (PyUnicode_Check(given) || (PyLong_Check(given) && !PyBool_Check(given)))
        return open_in_place(self, layer, given);
    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != 4) {
        PyErr_SetString(PyExc_TypeError,
                        "a layer must be a tuple of four arrays, weight, bias and their gradients, the name of "
                        "an activation, or the index of a layer to add");
        return -1;
    }
    if (open_weight(self, layer, PyTuple_GET_ITEM(given, 0)) < 0)
        return -1;
    int is_norm = layer->kind == NORM;
    if (get_floats(PyTuple_GET_ITEM(given, 1), &layer->bias, 1, SHAPE(layer->n_out), 0, "a bias") < 0 ||
        get_floats(PyTuple_GET_ITEM(given, 2), &layer->weight_gradient, is_norm ? 1 : 2, SHAPE(layer->n_out, layer->n_in), 1,
                   "the gradient of a weight") < 0 ||
        get_floats(PyTuple_GET_ITEM(given, 3), &layer->bias_gradient, 1, SHAPE(layer->n_out), 1, "the gradient of a bias") < 0)
        return -1;
    layer->ld_out = padded(layer->n_out), layer->ld_in = padded(layer->n_in);
    layer->is_d_weight_transposed = !is_norm && layer->n_in * layer->ld_out < layer->n_out * layer->ld_in;
    layer->packed = allocate(is_norm ? 1 : layer->n_in, layer->ld_out);
    layer->rows = is_norm ? NULL : allocate(layer->n_out, layer->ld_in);
    layer->padded_bias = allocate(1, layer->ld_out);
    layer->d_weight = allocate(is_norm ? 1 : layer->ld_out, layer->ld_in);
    layer->d_bias = allocate(1, layer->ld_out);
    if (!layer->packed || (!is_norm && !layer->rows) || !layer->padded_bias || !layer->d_weight || !layer->d_bias) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static int reserve_deltas(Network *self, long n)
{
    if (n <= self->delta_capacity)
        return 0;
    self->delta_capacity = 0;
    for (struct layer *layer = self->layers; layer < self->layers + self->n_layers; layer++) {
        if (!is_in_place(layer))
            free(layer->delta);
        if (!(layer->delta = is_in_place(layer) ? layer[-1].delta : allocate(n, layer->ld_out)))
            return -1;
    }
    self->delta_capacity = n;
    return 0;
}

static int open_layers(Network *self, PyObject *layers)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(layers); i++)
        if (open_layer(self, PyTuple_GET_ITEM(layers, i)) < 0)
            return -1;
    if (self->layers[0].kind != LINEAR || self->layers[self->n_layers - 1].kind != LINEAR)
        return refuse_layer("the first and the last layer must be linear");
    if (reserve_deltas(self, CHUNK) < 0) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static void pack(Network *self)
{
    for (int i = 0; i < self->n_layers; i++) {
        struct layer *layer = &self->layers[i];
        if (is_in_place(layer))
            continue;
        memcpy(layer->padded_bias, layer->bias.buf, layer->n_out * sizeof(float));
        if (layer->kind == NORM) {
            memcpy(layer->packed, layer->weight.buf, layer->n_out * sizeof(float));
            continue;
        }
        transpose(layer->weight.buf, layer->n_in, layer->n_out, layer->n_in, layer->packed, layer->ld_out);
        if (i > 0 && layer->ld_in != layer->n_in)
            copy_rows(layer->weight.buf, layer->n_in, layer->rows, layer->ld_in, layer->n_out, layer->n_in);
    }
}

static PyObject *network_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"layers", NULL};
    PyObject *layers;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!:Network", keywords, &PyList_Type, &layers))
        return NULL;
    if (PyList_GET_SIZE(layers) < 1 || PyList_GET_SIZE(layers) > MAX_LAYERS)
        return PyErr_Format(PyExc_ValueError, "a network has 1 to %d layers, not %zd", MAX_LAYERS, PyList_GET_SIZE(layers));
    Network *self = (Network *)type->tp_alloc(type, 0);
    /* The list could change while its arrays are opened. */
    if (self && (layers = PyList_AsTuple(layers))) {
        int failed = open_layers(self, layers);
        Py_DECREF(layers);
        if (!failed) {
            pack(self);
            return (PyObject *)self;
        }
    }
    Py_XDECREF(self);
    return NULL;
}

/* Also of a network whose construction has failed: what has not been opened is zero. */
static void network_dealloc(Network *self)
{
    for (int i = 0; i < self->n_layers; i++) {
        struct layer *layer = &self->layers[i];
        PyBuffer_Release(&layer->weight), PyBuffer_Release(&layer->bias);
        PyBuffer_Release(&layer->weight_gradient), PyBuffer_Release(&layer->bias_gradient);
        free(layer->packed), free(layer->rows), free(layer->padded_bias);
        free(layer->d_weight), free(layer->d_bias), free(layer->kept), free(layer->inverse_stds);
        if (!is_in_place(layer))
            free(layer->output), free(layer->delta);
    }
    free(self->input);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static int reserve_outputs(struct layer *layer, long n)
{
    if (!is_in_place(layer))
        free(layer->output);
    free(layer->kept), free(layer->inverse_stds);
    layer->kept = layer->inverse_stds = NULL;
    int is_norm = layer->kind == NORM;
    if (!(layer->output = is_in_place(layer) ? layer[-1].output : allocate(n, layer->ld_out)) ||
        ((is_norm || keeps_slope(layer)) && !(layer->kept = allocate(n, layer->ld_out))) ||
        (is_norm && !(layer->inverse_stds = allocate(n, 1))))
        return -1;
    return 0;
}

static int reserve(Network *self, long n)
{
    if (n <= self->capacity)
        return 0;
    self->capacity = self->n_kept = 0;
    free(self->input);
    if (!(self->input = allocate(n, self->layers[0].ld_in)))
        return -1;
    for (int i = 0; i < self->n_layers; i++)
        if (reserve_outputs(&self->layers[i], n) < 0)
            return -1;
    self->capacity = n;
    return 0;
}

static int refuse_if_busy(Network *self)
{
    if (self->is_busy)
        PyErr_SetString(PyExc_RuntimeError, "another thread computes with this network");
    return self->is_busy ? -1 : 0;
}

PyDoc_STRVAR(pack_doc, "pack()\n\nLoad the values of the parameters, after they have changed.");
static PyObject *network_pack(Network *self, PyObject *nothing)
{
    if (refuse_if_busy(self) < 0)
        return NULL;
    pack(self);
    Py_RETURN_NONE;
}

static void forward_layer(struct layer *layer, const float *input, long start, long rows)
{
    long ld = layer->ld_out, offset = start * ld;
    float *output = layer->output + offset, *kept = layer->kept ? layer->kept + offset : NULL;
    if (layer->kind == LINEAR)
        kernels->product(rows, ld, layer->n_in, input, layer->ld_in, 1, layer->packed, ld, output, ld, layer->padded_bias, 0);
    else if (layer->kind == NORM)
        kernels->normalize(rows, layer->n_out, ld, input, layer->packed, layer->padded_bias, output, kept,
                           layer->inverse_stds + start);
    else if (layer->kind == ACTIVATION)
        kernels->activate(layer->activation, output, kept, rows * ld);
    else
        kernels->add(output, layer->shortcut->output + offset, rows * ld);
}

static void forward_rows(Network *self, const float *x, float *out, long start, long rows)
{
    struct layer *first = &self->layers[0], *last = &self->layers[self->n_layers - 1];
    float *input = self->input + start * first->ld_in;
    copy_rows(x + start * first->n_in, first->n_in, input, first->ld_in, rows, first->n_in);
    for (struct layer *layer = first; layer <= last; layer++) {
        forward_layer(layer, input, start, rows);
        input = layer->output + start * layer->ld_out;
    }
    copy_rows(input, last->ld_out, out + start * last->n_out, last->n_out, rows, last->n_out);
}

static int forward(Network *self, const float *x, float *out, long n)
{
    if (reserve(self, n) < 0) {
        PyErr_NoMemory();
        return -1;
    }
    for (long start = 0; start < n; start += CHUNK)
        forward_rows(self, x, out, start, n - start < CHUNK ? n - start : CHUNK);
    self->n_kept = n;
    return 0;
}

static int are_finite(const float *x, long n)
{
    float sum = 0; /* of zeros, or NaN */
    for (long i = 0; i < n; i++)
        sum += x[i] * 0;
    return sum == 0;
}

PyDoc_STRVAR(forward_doc,
             "forward(x, out) -> bool\n\nWrite the outputs for the rows of x, and keep what `backward` needs. The "
             "result is whether all outputs are finite.");
static PyObject *network_forward(Network *self, PyObject *const *args, Py_ssize_t n_args)
{
    struct layer *first = &self->layers[0], *last = &self->layers[self->n_layers - 1];
    Py_buffer x, out;
    if (n_args != 2)
        return PyErr_Format(PyExc_TypeError, "forward takes x and out, not %zd arguments", n_args);
    if (get_floats(args[0], &x, 2, SHAPE(-1, first->n_in), 0, "x") < 0)
        return NULL;
    long n = x.shape[0];
    if (get_floats(args[1], &out, 2, SHAPE(n, last->n_out), 1, "out") < 0) {
        PyBuffer_Release(&x);
        return NULL;
    }
    int failed = refuse_if_busy(self) < 0 || forward(self, x.buf, out.buf, n) < 0;
    int is_finite = !failed && are_finite(out.buf, n * last->n_out);
    PyBuffer_Release(&x), PyBuffer_Release(&out);
    return failed ? NULL : PyBool_FromLong(is_finite);
}

/* Get an array with a row for each one of the last `forward`: code that provides the array may call it, too. */
static int get_rows(Network *self, PyObject *array, Py_buffer *view, long columns, int writable, const char *what)
{
    if (get_array(array, view, writable, what) < 0)
        return -1;
    if (refuse_if_busy(self) < 0) {
        PyBuffer_Release(view);
        return -1;
    }
    return check_floats(view, 2, SHAPE(self->n_kept, columns), what);
}

PyDoc_STRVAR(latents_doc, "latents(out)\n\nWrite the inputs of the output layer in the last `forward`.");
static PyObject *network_latents(Network *self, PyObject *array)
{
    struct layer *last = &self->layers[self->n_layers - 1];
    Py_buffer out;
    if (get_rows(self, array, &out, last->n_in, 1, "out") < 0)
        return NULL;
    const float *latents = self->n_layers > 1 ? last[-1].output : self->input;
    copy_rows(latents, last->ld_in, out.buf, last->n_in, self->n_kept, last->n_in);
    PyBuffer_Release(&out);
    Py_RETURN_NONE;
}

static long rows_of_d_weight(const struct layer *layer)
{
    return layer->kind == NORM ? 1 : layer->is_d_weight_transposed ? layer->n_in : layer->n_out;
}

static long columns_of_d_weight(const struct layer *layer)
{
    return layer->is_d_weight_transposed ? layer->ld_out : layer->ld_in;
}

/* Write or add so many rows of `d_weight` to the gradient. */
static void write_d_weight(struct layer *layer, long first, long rows, int add)
{
    int is_transposed = layer->is_d_weight_transposed;
    float *weight = (float *)layer->weight_gradient.buf + first * (is_transposed ? 1 : layer->n_in);
    const float *own = layer->d_weight + first * (is_transposed ? layer->ld_out : layer->ld_in);
    if (!add && is_transposed)
        transpose(own, layer->ld_out, rows, layer->n_out, weight, layer->n_in);
    else if (!add)
        copy_rows(own, layer->ld_in, weight, layer->n_in, rows, layer->n_in);
    else if (is_transposed)
        for (long i = 0; i < layer->n_out; i++)
            for (long j = 0; j < rows; j++)
                weight[i * layer->n_in + j] += own[j * layer->ld_out + i];
    else
        for (long i = 0; i < rows; i++)
            for (long j = 0; j < layer->n_in; j++)
                weight[i * layer->n_in + j] += own[i * layer->ld_in + j];
}

static void write_d_bias(struct layer *layer, int add)
{
    float *bias = layer->bias_gradient.buf;
    for (long i = 0; i < layer->n_out; i++)
        bias[i] = add ? bias[i] + layer->d_bias[i] : layer->d_bias[i];
}

/* What the gradient of a weight is computed from, beside the gradients of the outputs */
static const float *read_by_weight(const Network *self, const struct layer *layer)
{
    return layer->kind == NORM ? layer->kept : layer > self->layers ? layer[-1].output : self->input;
}

/* Add so many rows of `d_weight`, for so many rows of the minibatch. */
static void add_d_weight(struct layer *layer, long first, long bands, const float *input, const float *delta, long rows)
{
    if (layer->kind == NORM)
        kernels->add_products(delta, input, rows, layer->ld_out, layer->d_weight);
    else if (layer->is_d_weight_transposed)
        kernels->product(bands, layer->ld_out, rows, input + first, 1, layer->ld_in, delta, layer->ld_out,
                         layer->d_weight + first * layer->ld_out, layer->ld_out, NULL, 1);
    else
        kernels->product(bands, layer->ld_in, rows, delta + first, 1, layer->ld_out, input, layer->ld_in,
                         layer->d_weight + first * layer->ld_in, layer->ld_in, NULL, 1);
}

/* Write the gradients of the inputs of a layer, which are outputs of the one before; the deltas of a window begin at `at`. */
static void differentiate_layer(struct layer *layer, long at, long start, long rows)
{
    long ld = layer->ld_out;
    float *delta = layer->delta + at * ld, *next = layer[-1].delta + at * layer->ld_in;
    if (layer->kind == LINEAR) {
        const float *weight = layer->ld_in == layer->n_in ? layer->weight.buf : layer->rows;
        kernels->product(rows, layer->ld_in, layer->n_out, delta, ld, 1, weight, layer->ld_in, next, layer->ld_in, NULL, 0);
    } else if (layer->kind == NORM)
        kernels->denormalize(rows, layer->n_out, ld, delta, layer->packed, layer->kept + start * ld,
                             layer->inverse_stds + start, next);
    else if (layer->kind == ACTIVATION)
        kernels->differentiate(layer->activation, delta, (layer->kept ? layer->kept : layer->output) + start * ld, rows * ld);
    if (layer[-1].sum)
        kernels->add(next, layer[-1].sum->delta + at * layer->ld_in, rows * layer->ld_in);
}

/* Write the gradients of the outputs of the last layer, those of the network, with `at` as above. */
static void write_last_delta(Network *self, const float *d_out, long at, long start, long rows)
{
    struct layer *last = &self->layers[self->n_layers - 1];
    copy_rows(d_out + start * last->n_out, last->n_out, last->delta + at * last->ld_out, last->ld_out, rows, last->n_out);
}

/* Write or add the gradients of the parameters, given those of the outputs of the last `forward`. */
static void backward(Network *self, const float *d_out, int add)
{
    struct layer *first = &self->layers[0], *last = &self->layers[self->n_layers - 1];
    for (struct layer *layer = first; layer <= last; layer++)
        if (!is_in_place(layer)) {
            memset(layer->d_weight, 0, rows_of_d_weight(layer) * columns_of_d_weight(layer) * sizeof(float));
            memset(layer->d_bias, 0, layer->ld_out * sizeof(float));
        }
    for (long start = 0; start < self->n_kept; start += CHUNK) {
        long rows = self->n_kept - start < CHUNK ? self->n_kept - start : CHUNK;
        write_last_delta(self, d_out, 0, start, rows);
        for (struct layer *layer = last; layer >= first; layer--) {
            if (!is_in_place(layer)) {
                const float *input = read_by_weight(self, layer) + start * layer->ld_in;
                add_d_weight(layer, 0, rows_of_d_weight(layer), input, layer->delta, rows);
                kernels->add_rows(layer->delta, rows, layer->ld_out, layer->ld_out, layer->d_bias);
            }
            if (layer > first)
                differentiate_layer(layer, 0, start, rows);
        }
    }
    for (struct layer *layer = first; layer <= last; layer++)
        if (!is_in_place(layer)) {
            write_d_weight(layer, 0, rows_of_d_weight(layer), add);
            write_d_bias(layer, add);
        }
}

PyDoc_STRVAR(backward_doc,
             "backward(d_out, add)\n\nWrite or add the gradients, given those of the last outputs of `forward`.");
static PyObject *network_backward(Network *self, PyObject *const *args, Py_ssize_t n_args)
{
    Py_buffer d_out;
    if (n_args != 2)
        return PyErr_Format(PyExc_TypeError, "backward takes d_out and add, not %zd arguments", n_args);
    int add = PyObject_IsTrue(args[1]);
    if (add < 0 || get_rows(self, args[0], &d_out, self->layers[self->n_layers - 1].n_out, 0, "d_out") < 0)
        return NULL;
    backward(self, d_out.buf, add);
    PyBuffer_Release(&d_out);
    Py_RETURN_NONE;
}

static PyMethodDef network_methods[] = {
    {"pack", (PyCFunction)network_pack, METH_NOARGS, pack_doc},
    {"forward", (PyCFunction)(void (*)(void))network_forward, METH_FASTCALL, forward_doc},
    {"latents", (PyCFunction)network_latents, METH_O, latents_doc},
    {"backward", (PyCFunction)(void (*)(void))network_backward, METH_FASTCALL, backward_doc},
    {NULL},
};

PyDoc_STRVAR(network_doc,
             "Network(layers)\n\nLayers in order, the first and the last one linear. Each one is a tuple of weight, bias and "
             "their gradients, of a linear layer or, if the weight is a vector, of a LayerNorm; or the name of an activation, "
             "`tanh`, `relu`, `elu`, `silu` or `gelu`; or the index of a layer further up, whose outputs are added.");
static PyType_Slot network_slots[] = {
    {Py_tp_new, network_new},
    {Py_tp_dealloc, network_dealloc},
    {Py_tp_methods, network_methods},
    {Py_tp_doc, (void *)network_doc},
    {0, NULL},
};
static PyType_Spec network_spec = {"sb3_ppo_ext.engines.native._mlp.Network", sizeof(Network), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, network_slots};
