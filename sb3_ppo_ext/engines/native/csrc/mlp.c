/*
 * Multilayer perceptrons, Adam and GAE on one thread or several, without the overhead per operation that PyTorch and NumPy
 * have, which dominates for small networks. All data are float32 arrays of the caller; parameters have the layout of
 * `torch.nn.Linear`.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "pool.h"

#if !defined(__GNUC__)
#error "needs the vector extensions of GCC or Clang; without this module, the package works with PyTorch alone"
#endif

_Static_assert(sizeof(long) >= sizeof(Py_ssize_t), "sizes of arrays are kept in `long`");

#define INLINE static inline __attribute__((always_inline))
#define MAX_LAYERS 64
/* Number of rows that pass through all layers together, so that they stay in the cache */
#define CHUNK 64
/* Added to the variances of a normalisation, as in `torch.nn.LayerNorm` */
#define NORM_EPS 1e-5f
/* Number of multiplications that are worth several threads */
#define MIN_WORK 100000

enum activation { TANH, RELU, ELU, SILU, GELU, N_ACTIVATIONS };
static const char *const activation_names[] = {"tanh", "relu", "elu", "silu", "gelu"};

struct adam_step {
    float scale, weight_decay, weight1, weight2, beta2, step_size, inverse_root_correction2, eps;
};

struct kernels {
    void (*product)(long, long, long, const float *, long, long, const float *, long, float *, long, const float *, int);
    void (*activate)(enum activation, float *, float *, long);
    void (*differentiate)(enum activation, float *, const float *, long);
    void (*add)(float *, const float *, long);
    void (*normalize)(long, long, long, const float *, const float *, const float *, float *, float *, float *);
    void (*denormalize)(long, long, long, const float *, const float *, const float *, const float *, float *);
    void (*add_products)(const float *, const float *, long, long, float *);
    void (*add_rows)(const float *, long, long, long, float *);
    double (*squares)(const float *, long);
    void (*adam)(float *, const float *, float *, float *, long, struct adam_step);
};

#if defined(__x86_64__)
#define X86 1
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define NAME(function) function##_avx2
#define LANES 8
#define ROWS 6
#define VECTORS 2
#include "kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512vl,avx512dq,avx512bw,avx2,fma"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")
#endif
#define NAME(function) function##_avx512
#define LANES 16
#define ROWS 6
#define VECTORS 4
#include "kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

#define NAME(function) function##_any
#define LANES 4
#if defined(X86)
#define ROWS 4
#define VECTORS 2
#else
#define ROWS 6
#define VECTORS 4
#endif
#include "kernels.h"

static const struct kernels *kernels = &kernels_any;

static const struct {
    const char *name;
    const struct kernels *kernels;
} instruction_sets[] = {
#if defined(X86)
    {"avx512", &kernels_avx512},
    {"avx2", &kernels_avx2},
#endif
    {"any", &kernels_any},
};

static int is_supported(const char *name)
{
#if defined(X86)
    __builtin_cpu_init();
    if (!strcmp(name, "avx512"))
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512bw");
    if (!strcmp(name, "avx2"))
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return !strcmp(name, "any");
}

/* ---- Arrays ---- */

/* Round up to a multiple of the widest vector, so that rows can be written in vectors of any instruction set */
static long padded(long n)
{
    return (n + 15) / 16 * 16;
}

/* A matrix of zeros; NULL if there is not enough memory, or none could be that large */
static float *allocate(long rows, long columns)
{
    size_t size;
    void *memory = NULL;
    if (__builtin_mul_overflow((size_t)rows, (size_t)columns, &size) || __builtin_mul_overflow(size, sizeof(float), &size) ||
        posix_memalign(&memory, 64, size))
        return NULL;
    return memset(memory, 0, size);
}

#define SHAPE(...) ((const Py_ssize_t[]){__VA_ARGS__})

/* As Python writes it, with n for a dimension of any size, -1 */
static void write_shape(char *text, size_t size, int ndim, const Py_ssize_t *shape)
{
    PyOS_snprintf(text, size, "%s", ndim < 0 ? "any" : ndim ? "" : "()");
    for (int i = 0; i < ndim; i++) {
        size_t used = strlen(text);
        const char *before = i ? ", " : "(", *after = i < ndim - 1 ? "" : i ? ")" : ",)";
        if (shape[i] < 0)
            PyOS_snprintf(text + used, size - used, "%sn%s", before, after);
        else
            PyOS_snprintf(text + used, size - used, "%s%zd%s", before, shape[i], after);
    }
}

static int fits(const Py_buffer *view, int ndim, const Py_ssize_t *shape)
{
    /* A view may be unaligned, such as one of bytes that was cast. */
    if (!view->format || strcmp(view->format, "f") || view->itemsize != sizeof(float) ||
        (view->len && (uintptr_t)view->buf % sizeof(float)) || (ndim >= 0 && view->ndim != ndim))
        return 0;
    for (int i = 0; i < ndim; i++)
        if (shape[i] >= 0 && view->shape[i] != shape[i])
            return 0;
    return 1;
}

/* Release the view and fail unless it is of float32 and of the shape, which has -1 for a size that is not known. */
static int check_floats(Py_buffer *view, int ndim, const Py_ssize_t *shape, const char *what)
{
    if (fits(view, ndim, shape))
        return 0;
    char expected[128], actual[128];
    write_shape(expected, sizeof(expected), ndim, shape);
    write_shape(actual, sizeof(actual), view->ndim, view->shape);
    PyErr_Format(PyExc_ValueError, "%s must be an aligned array of float32, format f, shape %s, not of format %.50s, shape %s",
                 what, expected, view->format ? view->format : "B", actual);
    PyBuffer_Release(view);
    return -1;
}

/* Get a view of an array. Its object may be one of Python, which runs any code at all, and may call this module. */
static int get_array(PyObject *array, Py_buffer *view, int writable, const char *what)
{
    if (!PyObject_CheckBuffer(array)) {
        PyErr_Format(PyExc_TypeError, "%s must be an array of float32, not %.200s", what, Py_TYPE(array)->tp_name);
        return -1;
    }
    if (PyObject_GetBuffer(array, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0)) < 0) {
        view->obj = NULL; /* so that it can be released */
        if (PyErr_ExceptionMatches(PyExc_BufferError) || PyErr_ExceptionMatches(PyExc_ValueError))
            PyErr_Format(PyExc_ValueError, "%s must be a C-contiguous%s array of float32", what, writable ? ", writable" : "");
        return -1;
    }
    return 0;
}

static int get_floats(PyObject *array, Py_buffer *view, int ndim, const Py_ssize_t *shape, int writable, const char *what)
{
    return get_array(array, view, writable, what) < 0 ? -1 : check_floats(view, ndim, shape, what);
}

static void transpose_block(const float *source, long lds, long rows, long columns, float *target, long ldt)
{
    typedef float four __attribute__((vector_size(16), aligned(4), may_alias));
    typedef int four_of __attribute__((vector_size(16)));
    long i = 0;
    for (; i + 4 <= rows; i += 4) {
        long j = 0;
        for (; j + 4 <= columns; j += 4) {
            const float *from = source + i * lds + j;
            float *to = target + j * ldt + i;
            four a = *(four *)from, b = *(four *)(from + lds), c = *(four *)(from + 2 * lds), d = *(four *)(from + 3 * lds);
#if defined(__clang__)
            four ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
            four AB = __builtin_shufflevector(a, b, 2, 6, 3, 7), CD = __builtin_shufflevector(c, d, 2, 6, 3, 7);
            *(four *)to = __builtin_shufflevector(ab, cd, 0, 1, 4, 5);
            *(four *)(to + ldt) = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
            *(four *)(to + 2 * ldt) = __builtin_shufflevector(AB, CD, 0, 1, 4, 5);
            *(four *)(to + 3 * ldt) = __builtin_shufflevector(AB, CD, 2, 3, 6, 7);
#else
            four_of low = {0, 4, 1, 5}, high = {2, 6, 3, 7}, first = {0, 1, 4, 5}, second = {2, 3, 6, 7};
            four ab = __builtin_shuffle(a, b, low), cd = __builtin_shuffle(c, d, low);
            four AB = __builtin_shuffle(a, b, high), CD = __builtin_shuffle(c, d, high);
            *(four *)to = __builtin_shuffle(ab, cd, first);
            *(four *)(to + ldt) = __builtin_shuffle(ab, cd, second);
            *(four *)(to + 2 * ldt) = __builtin_shuffle(AB, CD, first);
            *(four *)(to + 3 * ldt) = __builtin_shuffle(AB, CD, second);
#endif
        }
        for (; j < columns; j++)
            for (int k = 0; k < 4; k++)
                target[j * ldt + i + k] = source[(i + k) * lds + j];
    }
    for (; i < rows; i++)
        for (long j = 0; j < columns; j++)
            target[j * ldt + i] = source[i * lds + j];
}

/* target (columns x rows, leading dimension ldt) = transpose of source (rows x columns, leading dimension lds) */
static void transpose(const float *source, long lds, long rows, long columns, float *target, long ldt)
{
    /* Blocks that stay in the cache: rows a power of two apart compete for the same places there. */
    const long block = 16;
    for (long i = 0; i < rows; i += block)
        for (long j = 0; j < columns; j += block)
            transpose_block(source + i * lds + j, lds, rows - i < block ? rows - i : block,
                            columns - j < block ? columns - j : block, target + j * ldt + i, ldt);
}

static void copy_rows(const float *source, long lds, float *target, long ldt, long rows, long columns)
{
    if (!rows)
        return; /* There may be no arrays yet. */
    if (lds == columns && ldt == columns) {
        memcpy(target, source, rows * columns * sizeof(float));
        return;
    }
    for (long i = 0; i < rows; i++)
        for (long j = 0; j < columns; j++)
            target[i * ldt + j] = source[i * lds + j];
}

/* ---- Network ---- */

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

PyDoc_STRVAR(forward_doc, "forward(x, out)\n\nWrite the outputs for the rows of x, and keep what `backward` needs.");
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
    int failed = refuse_if_busy(self);
    if (!failed && reserve(self, n) < 0) {
        PyErr_NoMemory();
        failed = -1;
    }
    for (long start = 0; start < n && !failed; start += CHUNK)
        forward_rows(self, x.buf, out.buf, start, n - start < CHUNK ? n - start : CHUNK);
    if (!failed)
        self->n_kept = n;
    PyBuffer_Release(&x), PyBuffer_Release(&out);
    return failed ? NULL : Py_NewRef(Py_None);
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

PyDoc_STRVAR(backward_doc,
             "backward(d_out, add)\n\nWrite or add the gradients, given those of the last outputs of `forward`.");
static PyObject *network_backward(Network *self, PyObject *const *args, Py_ssize_t n_args)
{
    struct layer *first = &self->layers[0], *last = &self->layers[self->n_layers - 1];
    Py_buffer d_out;
    if (n_args != 2)
        return PyErr_Format(PyExc_TypeError, "backward takes d_out and add, not %zd arguments", n_args);
    int add = PyObject_IsTrue(args[1]);
    if (add < 0 || get_rows(self, args[0], &d_out, last->n_out, 0, "d_out") < 0)
        return NULL;
    for (struct layer *layer = first; layer <= last; layer++)
        if (!is_in_place(layer)) {
            memset(layer->d_weight, 0, rows_of_d_weight(layer) * columns_of_d_weight(layer) * sizeof(float));
            memset(layer->d_bias, 0, layer->ld_out * sizeof(float));
        }
    for (long start = 0; start < self->n_kept; start += CHUNK) {
        long rows = self->n_kept - start < CHUNK ? self->n_kept - start : CHUNK;
        write_last_delta(self, d_out.buf, 0, start, rows);
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

/* ---- Threads ---- */

#define MAX_PARTS 8
/* Number of rows whose gradients are computed at a time, so that they stay in the cache */
#define WINDOW 256

/* What is computed with one network: x and out of `forward`, or d_out of `backward` */
struct part {
    Network *network;
    Py_buffer arrays[2];
};

/* A call, whose tasks the threads share. Each number is computed as on one thread, and thus is equal to the bit. */
struct call {
    PyObject *held;
    struct part parts[MAX_PARTS];
    int n_parts, n_arrays, n_busy, add;
    /* Rows of the minibatch that are computed at present: the first one, and their largest number */
    long start, window;
    /* Numbers of rows, and of multiplications, in a task */
    long rows, work;
};

typedef struct {
    PyObject_HEAD
    int n_threads, is_busy;
    struct pool *pool;
} Threads;

static PyObject *threads_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"n", NULL};
    int n;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "i:Threads", keywords, &n))
        return NULL;
    if (n < 1 || n > MAX_THREADS)
        return PyErr_Format(PyExc_ValueError, "there can be 1 to %d threads, not %d", MAX_THREADS, n);
    Threads *self = (Threads *)type->tp_alloc(type, 0);
    if (self)
        self->n_threads = n;
    return (PyObject *)self;
}

static void threads_dealloc(Threads *self)
{
    close_pool(self->pool);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

/* Start the threads, in a child after a fork again. */
static int start(Threads *self)
{
    if (self->n_threads == 1 || (self->pool && self->pool->pid == getpid()))
        return 0;
    close_pool(self->pool);
    if ((self->pool = open_pool(self->n_threads - 1)))
        return 0;
    PyErr_NoMemory();
    return -1;
}

static int open_part(struct call *call, PyObject *given)
{
    struct part *part = &call->parts[call->n_parts++];
    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != 1 + call->n_arrays ||
        Py_TYPE(PyTuple_GET_ITEM(given, 0))->tp_dealloc != (destructor)network_dealloc) {
        PyErr_Format(PyExc_TypeError, "a part must be a tuple of a Network and %d arrays", call->n_arrays);
        return -1;
    }
    part->network = (Network *)PyTuple_GET_ITEM(given, 0);
    for (int i = 0; i < call->n_arrays; i++)
        if (get_array(PyTuple_GET_ITEM(given, 1 + i), &part->arrays[i], i == 1, i ? "out" : "an array of rows") < 0)
            return -1;
    return 0;
}

/* To be called once all arrays are open, since opening them may run code of Python. */
static int check_part(struct call *call, struct part *part)
{
    Network *network = part->network;
    struct layer *last = &network->layers[network->n_layers - 1];
    for (struct part *other = call->parts; other < part; other++)
        if (other->network == network) {
            PyErr_SetString(PyExc_ValueError, "each part must have a network of its own");
            return -1;
        }
    if (refuse_if_busy(network) < 0)
        return -1;
    network->is_busy = 1, call->n_busy++;
    if (call->n_arrays == 1)
        return check_floats(&part->arrays[0], 2, SHAPE(network->n_kept, last->n_out), "d_out");
    if (check_floats(&part->arrays[0], 2, SHAPE(-1, network->layers[0].n_in), "x") < 0)
        return -1;
    return check_floats(&part->arrays[1], 2, SHAPE(part->arrays[0].shape[0], last->n_out), "out");
}

static int reserve_part(struct call *call, struct part *part)
{
    if ((call->n_arrays == 2 && reserve(part->network, part->arrays[0].shape[0]) < 0) ||
        (call->n_arrays == 1 &&
         reserve_deltas(part->network, part->network->n_kept < WINDOW ? part->network->n_kept : WINDOW) < 0)) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static int open_call(Threads *self, struct call *call, PyObject *parts)
{
    if (!PyList_Check(parts)) {
        PyErr_Format(PyExc_TypeError, "parts must be a list, not %.200s", Py_TYPE(parts)->tp_name);
        return -1;
    }
    /* The list could change while its arrays are opened. */
    if (!(call->held = PyList_AsTuple(parts)))
        return -1;
    if (PyTuple_GET_SIZE(call->held) > MAX_PARTS) {
        PyErr_Format(PyExc_ValueError, "there can be %d parts, not %zd", MAX_PARTS, PyTuple_GET_SIZE(call->held));
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(call->held); i++)
        if (open_part(call, PyTuple_GET_ITEM(call->held, i)) < 0)
            return -1;
    if (self->is_busy) {
        PyErr_SetString(PyExc_RuntimeError, "another thread uses these threads");
        return -1;
    }
    for (int i = 0; i < call->n_parts; i++)
        if (check_part(call, &call->parts[i]) < 0 || reserve_part(call, &call->parts[i]) < 0)
            return -1;
    return start(self);
}

static PyObject *close_call(struct call *call, int failed)
{
    for (int i = 0; i < call->n_busy; i++)
        call->parts[i].network->is_busy = 0;
    for (int i = 0; i < call->n_parts; i++)
        PyBuffer_Release(&call->parts[i].arrays[0]), PyBuffer_Release(&call->parts[i].arrays[1]);
    Py_XDECREF(call->held);
    return failed ? NULL : Py_NewRef(Py_None);
}

static long n_rows(const struct call *call, const struct part *part)
{
    return call->n_arrays == 2 ? part->arrays[0].shape[0] : part->network->n_kept;
}

static long n_in_window(const struct call *call, const struct part *part)
{
    long n = n_rows(call, part) - call->start;
    return n < 0 ? 0 : n < call->window ? n : call->window;
}

/* Number of multiplications for a row in all layers */
static double work_of(const Network *network)
{
    double work = 0;
    for (int i = 0; i < network->n_layers; i++)
        if (network->layers[i].kind == LINEAR)
            work += (double)network->layers[i].n_in * network->layers[i].ld_out;
    return work;
}

static long n_chunks(const struct call *call, const struct part *part)
{
    return (n_in_window(call, part) + call->rows - 1) / call->rows;
}

/* The part of a task, with its first row and its number of rows in the window */
static struct part *find_chunk(struct call *call, int number, long *start, long *rows)
{
    struct part *part = call->parts;
    for (; number >= n_chunks(call, part); part++)
        number -= n_chunks(call, part);
    *start = number * call->rows;
    *rows = n_in_window(call, part) - *start < call->rows ? n_in_window(call, part) - *start : call->rows;
    return part;
}

static void forward_task(void *argument, int number)
{
    struct call *call = argument;
    long start, rows;
    struct part *part = find_chunk(call, number, &start, &rows);
    forward_rows(part->network, part->arrays[0].buf, part->arrays[1].buf, call->start + start, rows);
}

static void delta_task(void *argument, int number)
{
    struct call *call = argument;
    long start, rows;
    struct part *part = find_chunk(call, number, &start, &rows);
    Network *self = part->network;
    write_last_delta(self, part->arrays[0].buf, start, call->start + start, rows);
    for (struct layer *layer = &self->layers[self->n_layers - 1]; layer > self->layers; layer--)
        differentiate_layer(layer, start, call->start + start, rows);
}

/* Number of rows of `d_weight` in a task: whole cache lines of a transposed gradient, and whole tiles of a product */
static long rows_of_band(const struct call *call, const struct part *part, const struct layer *layer)
{
    double rows = call->work / (1.0 + n_in_window(call, part) * (double)columns_of_d_weight(layer));
    return rows > rows_of_d_weight(layer) ? rows_of_d_weight(layer) : ((long)rows / 48 + 1) * 48;
}

static long n_bands(const struct call *call, const struct part *part, const struct layer *layer)
{
    if (is_in_place(layer))
        return 0;
    long rows = rows_of_band(call, part, layer);
    return (rows_of_d_weight(layer) + rows - 1) / rows;
}

/* Some rows of the gradient of a weight, and the gradient of the bias with the first ones */
static void gradient_band(struct call *call, struct part *part, struct layer *layer, long band)
{
    Network *self = part->network;
    long rows = rows_of_band(call, part, layer), first = band * rows, n = n_in_window(call, part);
    rows = rows_of_d_weight(layer) - first < rows ? rows_of_d_weight(layer) - first : rows;
    const float *input = read_by_weight(self, layer) + call->start * layer->ld_in;
    long columns = columns_of_d_weight(layer);
    if (!call->start)
        memset(layer->d_weight + first * columns, 0, rows * columns * sizeof(float));
    if (!call->start && !band)
        memset(layer->d_bias, 0, layer->ld_out * sizeof(float));
    for (long start = 0; start < n; start += CHUNK) {
        long chunk = n - start < CHUNK ? n - start : CHUNK;
        const float *delta = layer->delta + start * layer->ld_out;
        add_d_weight(layer, first, rows, input + start * layer->ld_in, delta, chunk);
        if (!band)
            kernels->add_rows(delta, chunk, layer->ld_out, layer->ld_out, layer->d_bias);
    }
    if (call->start + call->window < self->n_kept || (call->start && !n))
        return;
    write_d_weight(layer, first, rows, call->add);
    if (!band)
        write_d_bias(layer, call->add);
}

static void gradient_task(void *argument, int number)
{
    struct call *call = argument;
    for (struct part *part = call->parts;; part++)
        for (int i = 0; i < part->network->n_layers; i++) {
            struct layer *layer = &part->network->layers[i];
            long n = n_bands(call, part, layer);
            if (number < n) {
                gradient_band(call, part, layer, number);
                return;
            }
            number -= n;
        }
}

/* Compute a window. A few tasks for each thread, of whole tiles of a product; what is too small is left to the caller. */
static void do_window(Threads *self, struct call *call)
{
    double work = 0;
    long n = 0, n_tasks = 0, n_gradients = 0;
    for (struct part *part = call->parts; part < call->parts + call->n_parts; part++) {
        n += n_in_window(call, part);
        work += n_in_window(call, part) * work_of(part->network);
    }
    long rows = n / (2 * self->n_threads);
    call->rows = rows >= CHUNK ? CHUNK : (rows / 12 + 1) * 12;
    call->work = (long)(work / (4 * self->n_threads));
    for (struct part *part = call->parts; part < call->parts + call->n_parts; part++) {
        n_tasks += n_chunks(call, part);
        for (int i = 0; i < part->network->n_layers; i++)
            n_gradients += n_bands(call, part, &part->network->layers[i]);
    }
    struct pool *pool = work >= MIN_WORK ? self->pool : NULL;
    do_tasks(pool, call->n_arrays == 2 ? forward_task : delta_task, call, n_tasks);
    if (call->n_arrays == 1)
        do_tasks(pool, gradient_task, call, n_gradients);
}

static void do_call(Threads *self, struct call *call)
{
    long n = 0;
    for (struct part *part = call->parts; part < call->parts + call->n_parts; part++)
        n = n_rows(call, part) > n ? n_rows(call, part) : n;
    call->window = call->n_arrays == 1 ? WINDOW : n;
    do
        do_window(self, call);
    while ((call->start += call->window) < n);
}

static PyObject *make_call(Threads *self, PyObject *parts, int n_arrays, int add)
{
    struct call call = {.n_arrays = n_arrays, .add = add};
    int failed = open_call(self, &call, parts);
    if (!failed) {
        self->is_busy = 1;
        Py_BEGIN_ALLOW_THREADS;
        do_call(self, &call);
        Py_END_ALLOW_THREADS;
        self->is_busy = 0;
        for (int i = 0; i < call.n_parts && n_arrays == 2; i++)
            call.parts[i].network->n_kept = n_rows(&call, &call.parts[i]);
    }
    return close_call(&call, failed);
}

PyDoc_STRVAR(threads_forward_doc,
             "forward(parts)\n\n`Network.forward` of several networks. Each part is a tuple of a network, x and out.");
static PyObject *threads_forward(Threads *self, PyObject *parts)
{
    return make_call(self, parts, 2, 0);
}

PyDoc_STRVAR(threads_backward_doc,
             "backward(parts, add)\n\n`Network.backward` of several networks. Each part is a tuple of a network and d_out.");
static PyObject *threads_backward(Threads *self, PyObject *const *args, Py_ssize_t n_args)
{
    if (n_args != 2)
        return PyErr_Format(PyExc_TypeError, "backward takes parts and add, not %zd arguments", n_args);
    int add = PyObject_IsTrue(args[1]);
    return add < 0 ? NULL : make_call(self, args[0], 1, add);
}

static PyMethodDef threads_methods[] = {
    {"forward", (PyCFunction)threads_forward, METH_O, threads_forward_doc},
    {"backward", (PyCFunction)(void (*)(void))threads_backward, METH_FASTCALL, threads_backward_doc},
    {NULL},
};

PyDoc_STRVAR(threads_doc,
             "Threads(n)\n\nThreads that compute with networks as one thread does, to the bit. They start when they "
             "are first needed, and release the lock of the interpreter while they compute.");
static PyType_Slot threads_slots[] = {
    {Py_tp_new, threads_new},
    {Py_tp_dealloc, threads_dealloc},
    {Py_tp_methods, threads_methods},
    {Py_tp_doc, (void *)threads_doc},
    {0, NULL},
};
static PyType_Spec threads_spec = {"sb3_ppo_ext.engines.native._mlp.Threads", sizeof(Threads), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, threads_slots};

/* ---- Adam ---- */

typedef struct {
    PyObject_HEAD
    Py_ssize_t n_tensors;
    Py_buffer *views; /* parameter, gradient, first and second moment of each tensor */
} Adam;

static int open_tensor(Adam *self, PyObject *arrays)
{
    static const char *what[] = {"a parameter", "a gradient", "a first moment", "a second moment"};
    Py_buffer *view = &self->views[4 * self->n_tensors++];
    if (!PyTuple_Check(arrays) || PyTuple_GET_SIZE(arrays) != 4) {
        PyErr_SetString(PyExc_TypeError,
                        "a tensor must be a tuple of four arrays: parameter, gradient, first and second moment");
        return -1;
    }
    for (int i = 0; i < 4; i++)
        if (get_floats(PyTuple_GET_ITEM(arrays, i), &view[i], i ? view->ndim : -1, view->shape, i != 1, what[i]) < 0)
            return -1;
    return 0;
}

static PyObject *adam_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"tensors", NULL};
    PyObject *tensors;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!:Adam", keywords, &PyList_Type, &tensors))
        return NULL;
    /* The list could change while its arrays are opened. */
    if (!(tensors = PyList_AsTuple(tensors)))
        return NULL;
    Py_ssize_t n = PyTuple_GET_SIZE(tensors);
    Adam *self = (Adam *)type->tp_alloc(type, 0);
    if (self && !(self->views = PyMem_Calloc(4 * n + 1, sizeof(Py_buffer)))) {
        PyErr_NoMemory();
        Py_CLEAR(self);
    }
    for (Py_ssize_t i = 0; self && i < n; i++)
        if (open_tensor(self, PyTuple_GET_ITEM(tensors, i)) < 0)
            Py_CLEAR(self);
    Py_DECREF(tensors);
    return (PyObject *)self;
}

/* Also of an Adam whose construction has failed: what has not been opened is zero. */
static void adam_dealloc(Adam *self)
{
    for (Py_ssize_t i = 0; i < 4 * self->n_tensors; i++)
        PyBuffer_Release(&self->views[i]);
    PyMem_Free(self->views);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

PyDoc_STRVAR(norm_doc, "norm() -> float\n\nThe Euclidean norm of all gradients.");
static PyObject *adam_norm(Adam *self, PyObject *nothing)
{
    double total = 0;
    for (Py_ssize_t i = 0; i < self->n_tensors; i++)
        total += kernels->squares(self->views[4 * i + 1].buf, self->views[4 * i + 1].len / sizeof(float));
    return PyFloat_FromDouble(sqrt(total));
}

PyDoc_STRVAR(
    step_doc,
    "step(n, scale, lr, beta1, beta2, eps, weight_decay)\n\nMake the n-th step, with the gradients multiplied by scale.");
static PyObject *adam_step(Adam *self, PyObject *args)
{
    double n, scale, lr, beta1, beta2, eps, weight_decay;
    if (!PyArg_ParseTuple(args, "ddddddd:step", &n, &scale, &lr, &beta1, &beta2, &eps, &weight_decay))
        return NULL;
    if (!(n >= 1 && beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1 && isfinite(n + scale + lr + eps + weight_decay))) {
        PyErr_SetString(PyExc_ValueError, "step takes n from 1, betas in [0, 1), and no NaN or infinity");
        return NULL;
    }
    struct adam_step step = {
        .scale = (float)scale,
        .weight_decay = (float)weight_decay,
        .weight1 = (float)(1 - beta1),
        .weight2 = (float)(1 - beta2),
        .beta2 = (float)beta2,
        .step_size = (float)(lr / (1 - pow(beta1, n))),
        .inverse_root_correction2 = (float)(1 / sqrt(1 - pow(beta2, n))),
        .eps = (float)eps,
    };
    for (Py_ssize_t i = 0; i < self->n_tensors; i++) {
        Py_buffer *view = &self->views[4 * i];
        kernels->adam(view[0].buf, view[1].buf, view[2].buf, view[3].buf, view[0].len / sizeof(float), step);
    }
    Py_RETURN_NONE;
}

static PyMethodDef adam_methods[] = {
    {"norm", (PyCFunction)adam_norm, METH_NOARGS, norm_doc},
    {"step", (PyCFunction)adam_step, METH_VARARGS, step_doc},
    {NULL},
};

PyDoc_STRVAR(adam_doc,
             "Adam(tensors)\n\nThe Adam of torch. Each tensor is a tuple of parameter, gradient, first and second moment.");
static PyType_Slot adam_slots[] = {
    {Py_tp_new, adam_new},
    {Py_tp_dealloc, adam_dealloc},
    {Py_tp_methods, adam_methods},
    {Py_tp_doc, (void *)adam_doc},
    {0, NULL},
};
static PyType_Spec adam_spec = {"sb3_ppo_ext.engines.native._mlp.Adam", sizeof(Adam), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, adam_slots};

/* ---- Generalised advantage estimation ---- */

static void estimate(const Py_buffer *views, long n, long n_envs, float discount, float decay)
{
    const float *rewards = views[0].buf, *values = views[1].buf, *starts = views[2].buf;
    const float *last_values = views[3].buf, *dones = views[4].buf;
    float *advantages = views[5].buf;
    for (long i = n - n_envs; n_envs > 0 && i >= 0; i -= n_envs)
        for (long j = 0; j < n_envs; j++) {
            int last = i + n_envs >= n;
            float goes_on = 1.0f - (last ? dones[j] : starts[i + n_envs + j]);
            float next = last ? last_values[j] : values[i + n_envs + j];
            float delta = rewards[i + j] + discount * next * goes_on - values[i + j];
            advantages[i + j] = delta + decay * goes_on * (last ? 0.0f : advantages[i + n_envs + j]);
        }
}

PyDoc_STRVAR(gae_doc,
             "gae(rewards, values, episode_starts, last_values, dones, gamma, gae_lambda, advantages)\n\n"
             "Write the advantages of a rollout. Arrays of the rollout have shape (n_steps, n_envs), others (n_envs,).");
static PyObject *gae(PyObject *module, PyObject *args)
{
    static const char *names[] = {"rewards", "values", "episode_starts", "last_values", "dones", "advantages"};
    PyObject *arrays[6];
    Py_buffer views[6] = {{0}};
    double gamma, gae_lambda;
    if (!PyArg_ParseTuple(args, "OOOOOddO:gae", &arrays[0], &arrays[1], &arrays[2], &arrays[3], &arrays[4], &gamma,
                          &gae_lambda, &arrays[5]))
        return NULL;
    if (!isfinite(gamma + gae_lambda)) {
        PyErr_SetString(PyExc_ValueError, "gamma and gae_lambda must be finite");
        return NULL;
    }
    /* The last values have the shape (n_envs,), the rewards (n_steps, n_envs); the others are checked against these. */
    static const int order[] = {3, 4, 0, 1, 2, 5};
    long n_envs = -1, n_steps = -1;
    int failed = 0;
    for (int i = 0; i < 6 && !failed; i++) {
        int which = order[i];
        failed = get_floats(arrays[which], &views[which], i < 2 ? 1 : 2, i < 2 ? SHAPE(n_envs) : SHAPE(n_steps, n_envs),
                            which == 5, names[which]);
        if (!failed && i == 0)
            n_envs = views[which].shape[0];
        if (!failed && i == 2)
            n_steps = views[which].shape[0];
    }
    if (!failed)
        estimate(views, n_steps * n_envs, n_envs, (float)gamma, (float)(gamma * gae_lambda));
    for (int i = 0; i < 6; i++)
        PyBuffer_Release(&views[i]);
    return failed ? NULL : Py_NewRef(Py_None);
}

/* ---- Module ---- */

PyDoc_STRVAR(use_doc, "use(name)\n\nUse an instruction set, one of `available()`; for tests. The fastest one is the default.");
static PyObject *use(PyObject *module, PyObject *name)
{
    if (!PyUnicode_Check(name))
        return PyErr_Format(PyExc_TypeError, "use takes the name of an instruction set, not %.200s", Py_TYPE(name)->tp_name);
    for (size_t i = 0; i < sizeof(instruction_sets) / sizeof(*instruction_sets); i++)
        if (!PyUnicode_CompareWithASCIIString(name, instruction_sets[i].name) && is_supported(instruction_sets[i].name)) {
            kernels = instruction_sets[i].kernels;
            Py_RETURN_NONE;
        }
    return PyErr_Format(PyExc_ValueError, "no instruction set %R here", name);
}

PyDoc_STRVAR(available_doc, "available() -> list[str]\n\nThe instruction sets of this processor, the fastest one first.");
static PyObject *available(PyObject *module, PyObject *nothing)
{
    PyObject *names = PyList_New(0);
    for (size_t i = 0; names && i < sizeof(instruction_sets) / sizeof(*instruction_sets); i++)
        if (is_supported(instruction_sets[i].name)) {
            PyObject *name = PyUnicode_FromString(instruction_sets[i].name);
            if (!name || PyList_Append(names, name) < 0)
                Py_CLEAR(names);
            Py_XDECREF(name);
        }
    return names;
}

static int exec_module(PyObject *module)
{
    for (int i = sizeof(instruction_sets) / sizeof(*instruction_sets); i--;)
        if (is_supported(instruction_sets[i].name))
            kernels = instruction_sets[i].kernels;
    PyObject *network = PyType_FromSpec(&network_spec), *adam = PyType_FromSpec(&adam_spec);
    PyObject *threads = PyType_FromSpec(&threads_spec);
    int failed = !network || !adam || !threads || PyModule_AddObjectRef(module, "Network", network) < 0 ||
                 PyModule_AddObjectRef(module, "Adam", adam) < 0 || PyModule_AddObjectRef(module, "Threads", threads) < 0;
    Py_XDECREF(network), Py_XDECREF(adam), Py_XDECREF(threads);
    return failed ? -1 : 0;
}

static PyMethodDef functions[] = {
    {"gae", gae, METH_VARARGS, gae_doc},
    {"use", use, METH_O, use_doc},
    {"available", available, METH_NOARGS, available_doc},
    {NULL},
};
static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, exec_module}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_mlp", "Multilayer perceptrons, Adam and GAE.", 0, functions,
                                        module_slots};

PyMODINIT_FUNC PyInit__mlp(void)
{
    return PyModuleDef_Init(&definition);
}
