/* The plugin executable: Python, brought up no further than a plugin call needs it.
 *
 * Runs cni_hostport/shim.py, which is compiled in, on an interpreter whose initialisation stops
 * after its core (PEP 587's multi-phase initialisation): no import path, no encodings, no
 * standard streams, only the built-in modules below. shim.py needs nothing else, and a call costs
 * half of `python3 -I -S -c pass`. Linked statically: no loader, no relocation. Decides nothing
 * about a call, and must never let the caller's environment reach the interpreter. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <signal.h>
#include <string.h>

#include "frozen.h" /* made of shim.py by freeze.py */
#include "ownpath.h"

extern PyObject *PyInit__imp(void), *PyInit__socket(void), *PyInit__thread(void),
    *PyInit__weakref(void), *PyInit_posix(void), *PyInit_time(void), *PyMarshal_Init(void),
    *_PyWarnings_Init(void);

/* In place of libpython's own table: what is not named here is not linked either. */
struct _inittab _PyImport_Inittab[] = {
    {"_imp", PyInit__imp},       {"_socket", PyInit__socket},   {"_thread", PyInit__thread},
    {"_weakref", PyInit__weakref}, {"_warnings", _PyWarnings_Init}, {"marshal", PyMarshal_Init},
    {"posix", PyInit_posix},     {"time", PyInit_time},         {"builtins", NULL},
    {"sys", NULL},               {NULL, NULL},
};

static const struct _frozen modules[] = {
    {.name = "__main__", .code = shim, .size = (int)sizeof shim},
    {0},
};

static void must(PyStatus status) {
    if (PyStatus_Exception(status)) Py_ExitStatusException(status);
}

static void start(int argc, char **argv, char *path) {
    if (!*path) strcpy(path, "/");
    PyPreConfig before;
    PyPreConfig_InitIsolatedConfig(&before);
    before.utf8_mode = 1; /* whatever the locale is, and without reading it */
    before.configure_locale = 0;
    must(Py_PreInitialize(&before));

    PyConfig config;
    PyConfig_InitIsolatedConfig(&config);
    /* Everything that would be looked for in the file system is said here. */
    wchar_t **places[] = {&config.program_name, &config.executable, &config.base_executable,
                          &config.home, &config.prefix, &config.base_prefix, &config.exec_prefix,
                          &config.base_exec_prefix, &config.stdlib_dir, &config.platlibdir};
    for (size_t n = 0; n < sizeof places / sizeof *places; n++)
        must(PyConfig_SetBytesString(&config, places[n], path));
    config.module_search_paths_set = 1;
    config.site_import = 0;
    config.write_bytecode = 0;
    config._init_main = 0;
    PyImport_FrozenModules = modules;
    must(Py_InitializeFromConfig(&config));
    PyConfig_Clear(&config);

    char *slash = strrchr(path, '/');
    slash[slash == path] = 0; /* the folder, which may be the root */
    PyObject *folder = PyUnicode_DecodeFSDefault(path), *arguments = PyList_New(0);
    for (int n = 0; arguments && n < argc; n++) {
        PyObject *argument = PyUnicode_DecodeFSDefault(argv[n]);
        if (!argument || PyList_Append(arguments, argument)) Py_FatalError("no memory");
    }
    if (!folder || !arguments || PySys_SetObject("argv", arguments) ||
        PySys_SetObject("bundle", folder))
        Py_FatalError("no memory");
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN); /* a reader that left is an error of write(), as in any Python, */
    signal(SIGXFSZ, SIG_IGN); /* and a file that may not grow */
    start(argc, argv, own_path());
    if (PyImport_ImportFrozenModule("__main__") < 0) PyErr_Print();
    return 1; /* shim.py ends the process itself */
}
