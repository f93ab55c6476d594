/*
 * Arrays that others may write into.
 */

#pragma once

#include "arrays.h"

typedef struct {
    PyObject_HEAD
    Py_ssize_t n_arrays;
    Py_buffer *views;
    /* What was in them, one after the other */
    char *known;
} Watch;

static int open_watch(Watch *self, PyObject *arrays)
{
    Py_ssize_t n = PyTuple_GET_SIZE(arrays), size = 0;
    if (!(self->views = PyMem_Calloc(n + 1, sizeof(Py_buffer)))) {
        PyErr_NoMemory();
        return -1;
    }
    while (self->n_arrays < n) {
        Py_buffer *view = &self->views[self->n_arrays];
        if (get_floats(PyTuple_GET_ITEM(arrays, self->n_arrays++), view, -1, NULL, 0, "an array") < 0)
            return -1;
        if (__builtin_add_overflow(size, view->len, &size)) {
            PyErr_NoMemory();
            return -1;
        }
    }
    if (!(self->known = PyMem_Malloc(size + 1))) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

/* Whether anything was new, which is known then. */
static int learn(Watch *self)
{
    int is_new = 0;
    char *known = self->known;
    for (Py_ssize_t i = 0; i < self->n_arrays; known += self->views[i++].len)
        if (memcmp(known, self->views[i].buf, self->views[i].len)) {
            memcpy(known, self->views[i].buf, self->views[i].len);
            is_new = 1;
        }
    return is_new;
}

static PyObject *watch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"arrays", NULL};
    PyObject *arrays;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!:Watch", keywords, &PyList_Type, &arrays))
        return NULL;
    /* The list could change while its arrays are opened. */
    if (!(arrays = PyList_AsTuple(arrays)))
        return NULL;
    Watch *self = (Watch *)type->tp_alloc(type, 0);
    if (self && open_watch(self, arrays) < 0)
        Py_CLEAR(self);
    else if (self)
        learn(self);
    Py_DECREF(arrays);
    return (PyObject *)self;
}

/* Also of a watch whose construction has failed: what has not been opened is zero. */
static void watch_dealloc(Watch *self)
{
    for (Py_ssize_t i = 0; i < self->n_arrays; i++)
        PyBuffer_Release(&self->views[i]);
    PyMem_Free(self->views), PyMem_Free(self->known);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

PyDoc_STRVAR(has_changed_doc, "has_changed() -> bool\n\nWhether a byte of the arrays has changed since the last call.");
static PyObject *watch_has_changed(Watch *self, PyObject *nothing)
{
    return PyBool_FromLong(learn(self));
}

static PyMethodDef watch_methods[] = {
    {"has_changed", (PyCFunction)watch_has_changed, METH_NOARGS, has_changed_doc},
    {NULL},
};

PyDoc_STRVAR(watch_doc, "Watch(arrays)\n\nDetects changes of arrays, of which it keeps a copy.");
static PyType_Slot watch_slots[] = {
    {Py_tp_new, watch_new},
    {Py_tp_dealloc, watch_dealloc},
    {Py_tp_methods, watch_methods},
    {Py_tp_doc, (void *)watch_doc},
    {0, NULL},
};
static PyType_Spec watch_spec = {"sb3_ppo_ext.engines.native._mlp.Watch", sizeof(Watch), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, watch_slots};
