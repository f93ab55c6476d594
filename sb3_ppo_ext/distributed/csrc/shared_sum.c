/*
 * Sums over the processes of one machine in memory that they share, for ranks that wait for each other thousands of times per
 * second: sockets take a millisecond where this takes some microseconds.
 *
 * Each rank writes its summand to its slot and then the number of the sum to its counter (release); having seen the counters
 * of all others (acquire), it reads their slots. There are two sets of slots, so that a rank can begin the next sum while
 * others still read this one: it cannot begin the one after the next before they have begun the next.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../../common/csrc/waiting.h"
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define LINE 128          /* two cache lines, which processors fetch together */
#define MAX_DIRECT 4      /* up to so many ranks, each adds up everything by itself */
#define SPIN_SECONDS 5e-5 /* time of waiting with the core, then with its time slices, before it is given up */
#define YIELD_SECONDS 5e-3
#define SIGNALS_SECONDS 0.05 /* how often Ctrl-C is looked for */

_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "counters in shared memory must not need locks");

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    int is_open;
    long index, size;
    Py_ssize_t capacity;
    uint64_t number; /* of the current sum */
    char *scratch;   /* of `capacity` bytes */
} Reduction;

enum counter { ARRIVED, ADDED };

/* Counter of a rank that has failed */
#define FAILED UINT64_MAX

static _Atomic uint64_t *counter_of(Reduction *self, long rank, enum counter which)
{
    return (_Atomic uint64_t *)((char *)self->memory.buf + rank * LINE) + which;
}

/* Slot of a rank; that of rank `size` has the sum of all. */
static char *slot_of(Reduction *self, long rank)
{
    Py_ssize_t number = (Py_ssize_t)(self->number & 1) * (self->size + 1) + rank;
    return (char *)self->memory.buf + self->size * LINE + number * self->capacity;
}

static Py_ssize_t rounded(Py_ssize_t capacity)
{
    return (capacity + LINE - 1) / LINE * LINE;
}

/* Wait until a counter reaches the number of the sum. Returns the seconds waited, or -1 after `limit`. */
static double wait_for(_Atomic uint64_t *counter, uint64_t number, double limit)
{
    for (int i = 0; i < 200; i++) {
        if (atomic_load_explicit(counter, memory_order_acquire) >= number)
            return 0;
        relax();
    }
    double start = now(), waited = 0;
    while (atomic_load_explicit(counter, memory_order_acquire) < number) {
        waited = now() - start;
        if (waited > limit)
            return -1;
        if (waited < SPIN_SECONDS)
            relax();
        else if (waited < YIELD_SECONDS)
            sched_yield();
        else {
            struct timespec pause = {0, waited < 1 ? 50000 : 1000000};
            nanosleep(&pause, NULL);
        }
    }
    return waited;
}

/* Wait for the counters of all ranks. Returns -1 with an error set. Called with the GIL. */
static int wait_for_all(Reduction *self, enum counter which, double timeout)
{
    for (long rank = 0; rank < self->size; rank++) {
        double left = timeout, waited;
        do {
            double limit = left < SIGNALS_SECONDS ? left : SIGNALS_SECONDS;
            Py_BEGIN_ALLOW_THREADS waited = wait_for(counter_of(self, rank, which), self->number, limit);
            Py_END_ALLOW_THREADS left -= SIGNALS_SECONDS;
            if (waited < 0 && PyErr_CheckSignals() < 0)
                return -1;
        } while (waited < 0 && left > 0);
        if (atomic_load_explicit(counter_of(self, rank, which), memory_order_acquire) == FAILED) {
            PyErr_Format(PyExc_RuntimeError, "rank %ld has failed; its own error message says why", rank);
            return -1;
        }
        if (waited < 0) {
            PyErr_Format(PyExc_TimeoutError, "rank %ld has not arrived in time; rank %ld has waited for it", rank,
                         self->index);
            return -1;
        }
    }
    return 0;
}

static void add_floats(float *restrict sum, const float *restrict summand, Py_ssize_t n)
{
    for (Py_ssize_t i = 0; i < n; i++)
        sum[i] += summand[i];
}

static void add_doubles(double *restrict sum, const double *restrict summand, Py_ssize_t n)
{
    for (Py_ssize_t i = 0; i < n; i++)
        sum[i] += summand[i];
}

/* Add up a part of the slots, in the order of the ranks, so that the sum is the same whichever rank computes it. */
static void add_up(Reduction *self, char *sum, Py_ssize_t start, Py_ssize_t end, char format)
{
    memcpy(sum, slot_of(self, 0) + start, (size_t)(end - start));
    for (long rank = 1; rank < self->size; rank++) {
        const char *summand = slot_of(self, rank) + start;
        if (format == 'f')
            add_floats((float *)sum, (const float *)summand, (end - start) / (Py_ssize_t)sizeof(float));
        else
            add_doubles((double *)sum, (const double *)summand, (end - start) / (Py_ssize_t)sizeof(double));
    }
}

/* Add up the first `length` bytes of the slots, which this rank has written to its own. Returns the sum, or NULL with an error
 * set. For few ranks, the sum replaces the own copy in `own`. */
static char *sum_of_slots(Reduction *self, char *own, Py_ssize_t length, char format, double timeout)
{
    atomic_store_explicit(counter_of(self, self->index, ARRIVED), self->number, memory_order_release);
    if (wait_for_all(self, ARRIVED, timeout) < 0)
        return NULL;
    if (self->size <= MAX_DIRECT) {
        Py_BEGIN_ALLOW_THREADS add_up(self, own, 0, length, format);
        Py_END_ALLOW_THREADS return own;
    }
    /* Each rank adds up its share, and then reads those of the others. */
    Py_ssize_t share = rounded((length + self->size - 1) / self->size);
    Py_ssize_t start = self->index * share < length ? self->index * share : length;
    Py_ssize_t end = start + share < length ? start + share : length;
    Py_BEGIN_ALLOW_THREADS add_up(self, slot_of(self, self->size) + start, start, end, format);
    Py_END_ALLOW_THREADS atomic_store_explicit(counter_of(self, self->index, ADDED), self->number, memory_order_release);
    return wait_for_all(self, ADDED, timeout) < 0 ? NULL : slot_of(self, self->size);
}

static int sum_over_ranks(Reduction *self, const Py_buffer *view, double timeout)
{
    self->number++;
    memcpy(slot_of(self, self->index), view->buf, (size_t)view->len);
    char *sum = sum_of_slots(self, view->buf, view->len, view->format[0], timeout);
    if (sum == NULL)
        return -1;
    if (sum != view->buf)
        memcpy(view->buf, sum, (size_t)view->len);
    return 0;
}

static void multiply(float *restrict products, const float *restrict factors, float factor, Py_ssize_t n)
{
    for (Py_ssize_t i = 0; i < n; i++)
        products[i] = factors[i] * factor;
}

/* Replace arrays by their weighted means. `length` is the number of bytes of all of them, and of the weight behind them. */
static int mean_over_ranks(Reduction *self, const Py_buffer *views, Py_ssize_t n, Py_ssize_t length, float weight,
                           double timeout)
{
    self->number++;
    char *end = slot_of(self, self->index);
    for (Py_ssize_t i = 0; i < n; end += views[i++].len)
        multiply((float *)end, views[i].buf, weight, views[i].len / (Py_ssize_t)sizeof(float));
    *(float *)end = weight;
    char *sum = sum_of_slots(self, self->scratch, length, 'f', timeout);
    if (sum == NULL)
        return -1;
    float scale = 1 / ((float *)sum)[length / (Py_ssize_t)sizeof(float) - 1];
    for (Py_ssize_t i = 0; i < n; sum += views[i++].len)
        multiply(views[i].buf, (float *)sum, scale, views[i].len / (Py_ssize_t)sizeof(float));
    return 0;
}

static PyObject *reduction_sum(Reduction *self, PyObject *args)
{
    PyObject *array;
    double timeout;
    Py_buffer view;
    if (!PyArg_ParseTuple(args, "Od", &array, &timeout))
        return NULL;
    if (!self->is_open) {
        PyErr_SetString(PyExc_ValueError, "there is no shared memory");
        return NULL;
    }
    if (PyObject_GetBuffer(array, &view, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE | PyBUF_FORMAT) < 0)
        return NULL;
    int status = -1;
    if (strcmp(view.format, "f") != 0 && strcmp(view.format, "d") != 0)
        PyErr_Format(PyExc_ValueError, "the format is %s; give an array in float32 or float64", view.format);
    else if (view.len > self->capacity)
        PyErr_Format(PyExc_ValueError, "the array has %zd bytes, and the memory is for %zd", view.len, self->capacity);
    else
        status = sum_over_ranks(self, &view, timeout);
    PyBuffer_Release(&view);
    if (status < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *reduction_mean(Reduction *self, PyObject *args)
{
    PyObject *arrays;
    float weight;
    double timeout;
    if (!PyArg_ParseTuple(args, "O!fd", &PyList_Type, &arrays, &weight, &timeout))
        return NULL;
    if (!self->is_open) {
        PyErr_SetString(PyExc_ValueError, "there is no shared memory");
        return NULL;
    }
    Py_ssize_t n = PyList_GET_SIZE(arrays), n_views = 0, length = sizeof(float);
    Py_buffer *views = PyMem_New(Py_buffer, n > 0 ? n : 1);
    int status = views == NULL ? -1 : 0;
    for (; status == 0 && n_views < n; n_views++) {
        PyObject *array = PyList_GET_ITEM(arrays, n_views);
        if (PyObject_GetBuffer(array, &views[n_views], PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE | PyBUF_FORMAT) < 0) {
            status = -1;
            break;
        }
        length += views[n_views].len;
        if (strcmp(views[n_views].format, "f") != 0) {
            PyErr_Format(PyExc_ValueError, "the format is %s; give arrays in float32", views[n_views].format);
            status = -1;
        }
    }
    if (status == 0 && length > self->capacity) {
        PyErr_Format(PyExc_ValueError, "the arrays need %zd bytes, and the memory is for %zd", length, self->capacity);
        status = -1;
    }
    if (status == 0)
        status = mean_over_ranks(self, views, n, length, weight, timeout);
    while (n_views > 0)
        PyBuffer_Release(&views[--n_views]);
    PyMem_Free(views);
    if (status < 0)
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    Py_RETURN_NONE;
}

static Py_ssize_t needed(long size, Py_ssize_t capacity)
{
    return size * LINE + 2 * (size + 1) * rounded(capacity);
}

static int reduction_init(Reduction *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"memory", "index", "size", "capacity", NULL};
    PyObject *memory;
    long index, size;
    Py_ssize_t capacity;
    if (self->is_open) {
        PyErr_SetString(PyExc_ValueError, "the memory is already open");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "Olln", names, &memory, &index, &size, &capacity))
        return -1;
    if (index < 0 || index >= size || size > 65536 || capacity < 1 || capacity > PY_SSIZE_T_MAX / (4 * (size + 2))) {
        PyErr_SetString(PyExc_ValueError, "give 0 <= index < size, and a capacity that fits into memory");
        return -1;
    }
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_SIMPLE | PyBUF_WRITABLE) < 0)
        return -1;
    if (self->memory.len < needed(size, capacity) || (uintptr_t)self->memory.buf % LINE != 0) {
        PyErr_SetString(PyExc_ValueError, "the memory is smaller than `size_of`, or not aligned");
        PyBuffer_Release(&self->memory);
        return -1;
    }
    self->capacity = rounded(capacity);
    self->scratch = PyMem_Malloc((size_t)self->capacity);
    if (self->scratch == NULL) {
        PyBuffer_Release(&self->memory);
        PyErr_NoMemory();
        return -1;
    }
    self->is_open = 1;
    self->index = index;
    self->size = size;
    return 0;
}

static void reduction_dealloc(Reduction *self)
{
    PyTypeObject *type = Py_TYPE(self);
    if (self->is_open)
        PyBuffer_Release(&self->memory);
    PyMem_Free(self->scratch);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyObject *reduction_abort(Reduction *self, PyObject *unused)
{
    if (self->is_open)
        for (int which = ARRIVED; which <= ADDED; which++)
            atomic_store_explicit(counter_of(self, self->index, (enum counter)which), FAILED, memory_order_release);
    Py_RETURN_NONE;
}

static PyMethodDef reduction_methods[] = {
    {"abort", (PyCFunction)reduction_abort, METH_NOARGS, "Let all ranks that wait for this one raise an error."},
    {"mean", (PyCFunction)reduction_mean, METH_VARARGS,
     "Replace the numbers of a list of arrays by their means over all ranks, each of which has a weight."},
    {"sum", (PyCFunction)reduction_sum, METH_VARARGS, "Replace the numbers of an array by their sums over all ranks."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot reduction_slots[] = {{Py_tp_doc, "Sums over the ranks that share a memory of zeros."},
                                        {Py_tp_init, reduction_init},
                                        {Py_tp_dealloc, reduction_dealloc},
                                        {Py_tp_methods, reduction_methods},
                                        {0, NULL}};
static PyType_Spec reduction_spec = {"sb3_ppo_ext.distributed._shared_sum.Reduction", sizeof(Reduction), 0,
                                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, reduction_slots};

static PyObject *size_of(PyObject *module, PyObject *args)
{
    long size;
    Py_ssize_t capacity;
    if (!PyArg_ParseTuple(args, "ln", &size, &capacity))
        return NULL;
    if (size < 1 || size > 65536 || capacity < 1 || capacity > PY_SSIZE_T_MAX / (4 * (size + 2))) {
        PyErr_SetString(PyExc_ValueError, "give a positive size, and a capacity that fits into memory");
        return NULL;
    }
    return PyLong_FromSsize_t(needed(size, capacity));
}

static PyMethodDef functions[] = {{"size_of", size_of, METH_VARARGS, "Number of bytes of the memory for some ranks."},
                                  {NULL, NULL, 0, NULL}};

static int exec_module(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &reduction_spec, NULL);
    int status = type == NULL ? -1 : PyModule_AddObjectRef(module, "Reduction", type);
    Py_XDECREF(type);
    return status;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, exec_module}, {0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_shared_sum", "Sums over the ranks on one machine.", 0, functions, module_slots};

PyMODINIT_FUNC PyInit__shared_sum(void)
{
    return PyModuleDef_Init(&definition);
}
