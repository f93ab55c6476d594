/*
 * Multilayer perceptrons, Adam and GAE on one thread or several, without the overhead per operation that PyTorch and NumPy
 * have, which dominates for small networks. All data are float32 arrays of the caller; parameters have the layout of
 * `torch.nn.Linear`.
 */

#include "adam.h"
#include "gae.h"
#include "loss.h"
#include "normalize.h"
#include "samples.h"
#include "steps.h"
#include "threads.h"
#include "watch.h"

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
    PyType_Spec *specs[] = {&network_spec, &adam_spec, &threads_spec, &loss_spec, &steps_spec, &watch_spec};
    int failed = 0;
    for (size_t i = 0; i < sizeof(specs) / sizeof(*specs) && !failed; i++) {
        PyObject *type = PyType_FromSpec(specs[i]);
        failed = !type || PyModule_AddType(module, (PyTypeObject *)type) < 0;
        Py_XDECREF(type);
    }
    return failed ? -1 : 0;
}

static PyMethodDef functions[] = {
    {"gae", gae, METH_VARARGS, gae_doc},
    {"normalize", normalize, METH_VARARGS, normalize_doc},
    {"sample_beta", sample_beta, METH_VARARGS, sample_beta_doc},
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
