/*
 * Flags in memory that two processes share, by which one tells the other that there is something to read.
 *
 * A flag has one sender and one receiver. The sender rings it after it has written what the receiver shall read, and the
 * receiver spins on it for a while. If that takes too long, it dozes: it sets the flag to ASLEEP, and waits for its pipe.
 * A sender that finds a flag ASLEEP has to write to the pipe. All changes are atomic, and order other memory accesses as a
 * lock does, on processors with weakly ordered memory, too.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../../../common/csrc/waiting.h"
#include <sched.h>
#include <stdint.h>
#include <time.h>

/* Flags in cache lines of their own do not slow each other down; of some processors, these have 128 bytes. */
#define STRIDE 128
/* Before a flag is WRITTEN, the sender has decided to write to the pipe. */
enum { CLEAR, ASLEEP, RUNG, WRITTEN };
/* Between two looks at the clock */
#define LOOKS 64

typedef struct {
    PyObject_HEAD
    Py_buffer view;
    Py_ssize_t n;
} Flags;

static uint32_t *flag(const Flags *self, Py_ssize_t index)
{
    return (uint32_t *)((char *)self->view.buf + index * STRIDE);
}

static uint32_t load(const Flags *self, Py_ssize_t index)
{
    return __atomic_load_n(flag(self, index), __ATOMIC_ACQUIRE);
}

static PyObject *flags_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"memory", NULL};
    PyObject *memory;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:Flags", keywords, &memory))
        return NULL;
    Flags *self = (Flags *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    if (PyObject_GetBuffer(memory, &self->view, PyBUF_WRITABLE) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    self->n = self->view.len / STRIDE;
    if (self->view.len % STRIDE || (uintptr_t)self->view.buf % sizeof(uint32_t)) {
        PyErr_Format(PyExc_ValueError, "memory must be aligned, and have a multiple of %d bytes, not %zd", STRIDE,
                     self->view.len);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void flags_dealloc(Flags *self)
{
    PyBuffer_Release(&self->view);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

/* The index of a flag; -1 with an exception if it is not one */
static Py_ssize_t index_of(const Flags *self, PyObject *object)
{
    Py_ssize_t index = PyNumber_AsSsize_t(object, PyExc_IndexError);
    if (index == -1 && PyErr_Occurred())
        return -1;
    if (index < 0 || index >= self->n) {
        PyErr_Format(PyExc_IndexError, "there is no flag %zd of %zd", index, self->n);
        return -1;
    }
    return index;
}

/* Whether the receiver has to be woken by its pipe */
static int ring(Flags *self, Py_ssize_t index, int written)
{
    uint32_t before = __atomic_load_n(flag(self, index), __ATOMIC_RELAXED);
    uint32_t after;
    do
        after = written || before == ASLEEP ? WRITTEN : RUNG;
    while (!__atomic_compare_exchange_n(flag(self, index), &before, after, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED));
    return before == ASLEEP;
}

PyDoc_STRVAR(ring_doc, "ring(index, written) -> bool\n\n"
                       "Ring a flag, with the announcement of something in the pipe. Returns whether the receiver is asleep, "
                       "and waits for something in the pipe in any case.");
static PyObject *flags_ring(Flags *self, PyObject *args)
{
    PyObject *object;
    int written;
    if (!PyArg_ParseTuple(args, "Op:ring", &object, &written))
        return NULL;
    Py_ssize_t index = index_of(self, object);
    return index < 0 ? NULL : PyBool_FromLong(ring(self, index, written));
}

PyDoc_STRVAR(ring_all_doc, "ring_all() -> list[int]\n\nRing all flags. Returns those whose receiver is asleep.");
static PyObject *flags_ring_all(Flags *self, PyObject *nothing)
{
    PyObject *asleep = PyList_New(0);
    for (Py_ssize_t i = 0; asleep && i < self->n; i++)
        if (ring(self, i, 0)) {
            PyObject *index = PyLong_FromSsize_t(i);
            if (!index || PyList_Append(asleep, index) < 0)
                Py_CLEAR(asleep);
            Py_XDECREF(index);
        }
    return asleep;
}

/* The state of the flag that is furthest behind, with ASLEEP as CLEAR; WRITTEN if all are rung and one is WRITTEN */
static uint32_t state_of_all(const Flags *self)
{
    uint32_t all = RUNG;
    for (Py_ssize_t i = 0; i < self->n; i++) {
        uint32_t one = load(self, i);
        if (one < RUNG)
            return CLEAR;
        all = one > all ? one : all;
    }
    return all;
}

static uint32_t spin(const Flags *self, double seconds)
{
    double end = now() + seconds;
    uint32_t state;
    do
        for (int i = 0; i < LOOKS; i++) {
            if ((state = state_of_all(self)) != CLEAR)
                return state;
            relax();
        }
    /* The other process may wait for this very core. */
    while (sched_yield() == 0 && now() < end);
    return CLEAR;
}

PyDoc_STRVAR(wait_doc, "wait(seconds) -> int\n\n"
                       "Wait until all flags are rung: RUNG, or WRITTEN if there is something in a pipe. CLEAR if it takes "
                       "longer. Other threads go on meanwhile; signals are handled afterwards.");
static PyObject *flags_wait(Flags *self, PyObject *object)
{
    double seconds = PyFloat_AsDouble(object);
    if (seconds == -1.0 && PyErr_Occurred())
        return NULL;
    uint32_t state = state_of_all(self);
    if (state == CLEAR && seconds > 0) {
        Py_BEGIN_ALLOW_THREADS state = spin(self, seconds);
        Py_END_ALLOW_THREADS
    }
    return PyLong_FromUnsignedLong(state);
}

PyDoc_STRVAR(doze_doc, "doze(index) -> bool\n\n"
                       "Fall asleep, unless the flag is rung. Returns whether there is, or will be, something in the pipe.");
static PyObject *flags_doze(Flags *self, PyObject *object)
{
    Py_ssize_t index = index_of(self, object);
    if (index < 0)
        return NULL;
    uint32_t before = CLEAR;
    __atomic_compare_exchange_n(flag(self, index), &before, ASLEEP, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return PyBool_FromLong(before != RUNG);
}

PyDoc_STRVAR(clear_doc, "clear()\n\nClear all flags, which their senders do not ring before they are told to.");
static PyObject *flags_clear(Flags *self, PyObject *nothing)
{
    for (Py_ssize_t i = 0; i < self->n; i++)
        __atomic_store_n(flag(self, i), CLEAR, __ATOMIC_RELEASE);
    Py_RETURN_NONE;
}

static PyMethodDef flags_methods[] = {
    {"ring", (PyCFunction)flags_ring, METH_VARARGS, ring_doc},
    {"ring_all", (PyCFunction)flags_ring_all, METH_NOARGS, ring_all_doc},
    {"wait", (PyCFunction)flags_wait, METH_O, wait_doc},
    {"doze", (PyCFunction)flags_doze, METH_O, doze_doc},
    {"clear", (PyCFunction)flags_clear, METH_NOARGS, clear_doc},
    {NULL},
};

PyDoc_STRVAR(flags_doc, "Flags(memory)\n\nFlags in writable memory, each of STRIDE bytes. Those of value zero are clear.");
static PyType_Slot flags_slots[] = {
    {Py_tp_new, flags_new},
    {Py_tp_dealloc, flags_dealloc},
    {Py_tp_methods, flags_methods},
    {Py_tp_doc, (void *)flags_doc},
    {0, NULL},
};
static PyType_Spec flags_spec = {"sb3_ppo_ext.envs.parallel._flags.Flags", sizeof(Flags), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, flags_slots};

static int exec_module(PyObject *module)
{
    PyObject *flags = PyType_FromSpec(&flags_spec);
    int failed = !flags || PyModule_AddObjectRef(module, "Flags", flags) < 0 ||
                 PyModule_AddIntConstant(module, "STRIDE", STRIDE) < 0 ||
                 PyModule_AddIntConstant(module, "CLEAR", CLEAR) < 0 || PyModule_AddIntConstant(module, "RUNG", RUNG) < 0 ||
                 PyModule_AddIntConstant(module, "WRITTEN", WRITTEN) < 0;
    Py_XDECREF(flags);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, exec_module}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_flags", "Flags in memory that processes share.", 0, NULL,
                                        module_slots};

PyMODINIT_FUNC PyInit__flags(void)
{
    return PyModuleDef_Init(&definition);
}
