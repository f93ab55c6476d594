/*
 * The optimiser.
 */

#pragma once

#include "arrays.h"
#include "instruction_sets.h"

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

static double norm_of_gradients(const Adam *self)
{
    double total = 0;
    for (Py_ssize_t i = 0; i < self->n_tensors; i++)
        total += kernels->squares(self->views[4 * i + 1].buf, self->views[4 * i + 1].len / sizeof(float));
    return sqrt(total);
}

PyDoc_STRVAR(norm_doc, "norm() -> float\n\nThe Euclidean norm of all gradients.");
static PyObject *adam_norm(Adam *self, PyObject *nothing)
{
    return PyFloat_FromDouble(norm_of_gradients(self));
}

/* Hyperparameters of a step, as its arguments have them */
struct adam_options {
    double lr, beta1, beta2, eps, weight_decay;
};

static int check_options(double n, double scale, struct adam_options o)
{
    if (n >= 1 && o.beta1 >= 0 && o.beta1 < 1 && o.beta2 >= 0 && o.beta2 < 1 &&
        isfinite(n + scale + o.lr + o.eps + o.weight_decay))
        return 0;
    PyErr_SetString(PyExc_ValueError, "step takes n from 1, betas in [0, 1), and no NaN or infinity");
    return -1;
}

static void make_step(Adam *self, double n, double scale, struct adam_options o)
{
    struct adam_step step = {
        .scale = (float)scale,
        .weight_decay = (float)o.weight_decay,
        .weight1 = (float)(1 - o.beta1),
        .weight2 = (float)(1 - o.beta2),
        .beta2 = (float)o.beta2,
        .step_size = (float)(o.lr / (1 - pow(o.beta1, n))),
        .inverse_root_correction2 = (float)(1 / sqrt(1 - pow(o.beta2, n))),
        .eps = (float)o.eps,
    };
    for (Py_ssize_t i = 0; i < self->n_tensors; i++) {
        Py_buffer *view = &self->views[4 * i];
        kernels->adam(view[0].buf, view[1].buf, view[2].buf, view[3].buf, view[0].len / sizeof(float), step);
    }
}

PyDoc_STRVAR(
    step_doc,
    "step(n, scale, lr, beta1, beta2, eps, weight_decay)\n\nMake the n-th step, with the gradients multiplied by scale.");
static PyObject *adam_step(Adam *self, PyObject *args)
{
    double n, scale;
    struct adam_options o;
    if (!PyArg_ParseTuple(args, "ddddddd:step", &n, &scale, &o.lr, &o.beta1, &o.beta2, &o.eps, &o.weight_decay) ||
        check_options(n, scale, o) < 0)
        return NULL;
    make_step(self, n, scale, o);
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
