/* SPDX-License-Identifier: Apache-2.0 */
/* What the environment asks for. Read once per opening, never at import. */
#include "python/module/module.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char *
read_variable(const char *name)
{
    const char *text = getenv(name);
    return text == NULL || text[0] == '\0' ? NULL : text;
}

static int
refuse(const char *name, const char *text, const char *expected)
{
    PyErr_Format(PyExc_ValueError, "%s must be %s, not '%.100s'", name, expected, text);
    return -1;
}

int
cm_config_read_backend(cm_choice *out)
{
    const char *text = read_variable("CUMEM_BACKEND");
    if (text == NULL) {
        *out = CM_CHOICE_ANY;
    }
    else if (strcmp(text, "cuda") == 0) {
        *out = CM_CHOICE_CUDA;
    }
    else if (strcmp(text, "emulated") == 0) {
        *out = CM_CHOICE_EMULATED;
    }
    else {
        return refuse("CUMEM_BACKEND", text, "'cuda', 'emulated' or unset");
    }
    return 0;
}

/* An unset variable leaves *out alone. */
static int
read_count(const char *name, uint64_t most, const char *expected, uint64_t *out)
{
    const char *text = read_variable(name);
    if (text == NULL) {
        return 0;
    }
    char *end = NULL;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno != 0 || *end != '\0' || text[0] < '0' || text[0] > '9' || value > most) {
        return refuse(name, text, expected);
    }
    *out = (uint64_t)value;
    return 0;
}

/* The factor of a unit; 0 when it is none. */
static double
unit_factor(const char *unit)
{
    static const struct {
        const char *name;
        double factor;
    } units[] = {
        {"", 1.0},    {"B", 1.0},
        {"kB", 1e3},  {"KiB", 1024.0},
        {"MB", 1e6},  {"MiB", 1048576.0},
        {"GB", 1e9},  {"GiB", 1073741824.0},
        {"TB", 1e12}, {"TiB", 1099511627776.0},
    };
    while (*unit == ' ') {
        unit++;
    }
    for (size_t i = 0; i < sizeof(units) / sizeof(units[0]); i++) {
        if (strcmp(unit, units[i].name) == 0) {
            return units[i].factor;
        }
    }
    return 0.0;
}

static int
read_nbytes(const char *name, uint64_t *out)
{
    const char *expected = "a number of bytes such as 1073741824 or 4GiB";
    const char *text = read_variable(name);
    if (text == NULL) {
        return 0;
    }
    if (text[0] < '0' || text[0] > '9') {
        return refuse(name, text, expected);
    }
    char *end = NULL;
    double value = strtod(text, &end);
    double factor = unit_factor(end);
    double nbytes = value * factor;
    if (factor == 0.0 || !isfinite(nbytes) || nbytes < 1.0 || nbytes > 0x1p62) {
        return refuse(name, text, expected);
    }
    *out = (uint64_t)nbytes;
    return 0;
}

/* "12.4" to 12040. */
static int
read_driver(const char *name, int *out)
{
    const char *text = read_variable(name);
    if (text == NULL) {
        return 0;
    }
    char *end = NULL;
    errno = 0;
    long major = strtol(text, &end, 10);
    long minor = 0;
    bool good = errno == 0 && end != text && major >= 1 && major <= 1000;
    if (good && *end == '.') {
        const char *rest = end + 1;
        minor = strtol(rest, &end, 10);
        good = errno == 0 && end != rest && minor >= 0 && minor <= 99;
    }
    if (!good || *end != '\0') {
        return refuse(name, text, "a CUDA version such as 12.4");
    }
    *out = (int)(major * 1000 + minor * 10);
    return 0;
}

int
cm_config_read_emulated(cm_emulated_config *out)
{
    cm_emulated_default_config(out);
    uint64_t devices = (uint64_t)out->device_count;
    uint64_t delay = out->max_delay_us;
    uint64_t peers = 1;
    if (read_count("CUMEM_EMULATED_DEVICES", CM_MAX_DEVICES, "a count from 0 to 64",
                   &devices)
            < 0
        || read_nbytes("CUMEM_EMULATED_MEMORY", &out->memory_nbytes) < 0
        || read_driver("CUMEM_EMULATED_DRIVER", &out->driver_version) < 0
        || read_count("CUMEM_EMULATED_DELAY_US", 1000000,
                      "a number of microseconds from 0 to 1000000", &delay)
               < 0
        || read_count("CUMEM_EMULATED_SEED", UINT64_MAX,
                      "an integer of at most 64 bits", &out->seed)
               < 0
        || read_count("CUMEM_EMULATED_PEERS", 1, "0 or 1", &peers) < 0) {
        return -1;
    }
    out->apart = peers == 0;
    out->device_count = (int)devices;
    out->max_delay_us = (uint32_t)delay;
    return 0;
}
