/*
 * Several networks on several threads.
 */

#pragma once

#include "network.h"
#include "pool.h"

#define MAX_PARTS 8
/* Number of multiplications that are worth several threads */
#define MIN_WORK 100000
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
