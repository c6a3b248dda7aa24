/* SPDX-License-Identifier: Apache-2.0 */
/* Docstrings of the constructors that take a kind. */
#include "python/constructors.h"

#define KIND_PARAMETER                                                                 \
    "kind : {'device', 'pinned', 'mapped', 'managed'}\n"                               \
    "    What memory; default device memory.\n"
#define PLACE_PARAMETERS                                                               \
    "order : {'C', 'F'}\n"                                                             \
    "    Whether the last or the first index runs fastest.\n" DEVICE_PARAMETERS
#define LIKE_PARAMETERS                                                                \
    "order : {'C', 'F', 'A', 'K'}\n"                                                   \
    "    As in NumPy: 'C' and 'F' say whether the last or the first index runs\n"      \
    "    fastest, 'A' is 'F' if the original is Fortran-contiguous only, else 'C', "   \
    "and\n"                                                                            \
    "    'K' keeps the order of its strides.\n" DEVICE_PARAMETERS
#define DEVICE_PARAMETERS                                                              \
    "device : Device, int or str, optional\n"                                          \
    "    Whose memory, or whose context page-locks it, as ``0`` or ``\"cuda:0\"``; "   \
    "default:\n"                                                                       \
    "    cumem's current one.\n"                                                       \
    "stream : Stream or other stream object, optional\n"                               \
    "    The stream to use it on first, for device memory one of `device`; default:\n" \
    "    the current stream.\n"                                                        \
    "pool : Pool, optional\n"                                                          \
    "    Where to take it from; default: the pool of the innermost ``with pool:`` "    \
    "block\n"                                                                          \
    "    that fits, else the kind's default pool. Without `kind` and `device` it "     \
    "says these as well.\n"
#define RETURNS                                                                        \
    "\n"                                                                               \
    "Returns\n"                                                                        \
    "-------\n"                                                                        \
    "Buffer\n"                                                                         \
    "    A `PinnedBuffer`, `MappedBuffer`, `ManagedBuffer` or `DeviceBuffer`.\n"       \
    "\n"
#define RAISES                                                                         \
    "Raises\n"                                                                         \
    "------\n"                                                                         \
    "ValueError\n"                                                                     \
    "    A length is negative, the size does not fit in 63 bits, kind, order or "      \
    "device\n"                                                                         \
    "    is none of those that exist, or `stream` is of another device.\n"             \
    "TypeError\n"                                                                      \
    "    An argument has the wrong type, or the dtype holds Python objects.\n"         \
    "OutOfMemoryError\n"                                                               \
    "    There is no room, also after waiting for freed memory and trimming pools.\n"  \
    "CudaError\n"                                                                      \
    "    A call to CUDA failed.\n"                                                     \
    "RuntimeError\n"                                                                   \
    "    In a child made by ``fork``.\n"                                               \
    "\n"

const char cm_empty_doc[] =
    "empty($module, /, shape, dtype='float64', kind='device', *, order='C', "
    "device=None, "
    "stream=None, pool=None)\n"
    "--\n"
    "\n"
    "Allocate a buffer from the pool of its kind, without setting its bytes.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "shape : int or sequence of int\n"
    "    Lengths in elements; 0 and ``()`` are fine.\n"
    "dtype : dtype_like\n"
    "    Any NumPy dtype without Python objects.\n" KIND_PARAMETER PLACE_PARAMETERS
        RETURNS RAISES "Notes\n"
    "-----\n"
    "Blocks: only when the pool has nothing that fits (GIL released).\n"
    "Ordered after: device memory may be used at once on `stream`; on another stream "
    "the\n"
    "user orders it.\n";

const char cm_zeros_doc[] =
    "zeros($module, /, shape, dtype='float64', kind='device', *, order='C', "
    "device=None, "
    "stream=None, pool=None)\n"
    "--\n"
    "\n"
    "Allocate a buffer and set all its bytes to zero.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "shape : int or sequence of int\n"
    "    Lengths in elements.\n"
    "dtype : dtype_like\n"
    "    Any NumPy dtype without Python objects.\n" KIND_PARAMETER PLACE_PARAMETERS
        RETURNS RAISES "Notes\n"
    "-----\n"
    "Blocks: for memory the host can read, until it is zero; device memory, and "
    "mapped\n"
    "and managed memory with `stream`, is set on the stream.\n"
    "Ordered after: work on `stream`.\n";

const char cm_full_doc[] =
    "full($module, /, shape, fill_value, dtype=None, kind='device', *, order='C', "
    "device=None, stream=None, pool=None)\n"
    "--\n"
    "\n"
    "Allocate a buffer and set all its elements to a value.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "shape : int or sequence of int\n"
    "    Lengths in elements.\n"
    "fill_value : array_like, Buffer, or exporter of DLPack or the CUDA array "
    "interface\n"
    "    A scalar, or an array that broadcasts to the shape; also on a device.\n"
    "dtype : dtype_like, optional\n"
    "    Default: the dtype that `fill_value` has or NumPy gives it.\n" KIND_PARAMETER
        PLACE_PARAMETERS RETURNS RAISES "Notes\n"
    "-----\n"
    "Blocks: for memory the host can read, until it is filled; device memory, and "
    "mapped\n"
    "and managed memory with `stream`, is filled on the stream.\n"
    "Ordered after: work on `stream`.\n";

const char cm_array_doc[] =
    "array($module, /, obj, dtype=None, kind='device', *, order='K', device=None, "
    "stream=None, pool=None)\n"
    "--\n"
    "\n"
    "Copy anything array-like into a new buffer.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "obj : array_like, Buffer, or exporter of DLPack or the CUDA array interface\n"
    "    Where the values come from.\n"
    "dtype : dtype_like, optional\n"
    "    Default: the dtype of `obj`. Values that the host can read take another one "
    "as "
    "in\n"
    "    `fill`: they stay the same kind and come back equal, floats rounded. Else it "
    "is "
    "a\n"
    "    TypeError (reals for integers) or an OverflowError (300 in "
    "``uint8``).\n" KIND_PARAMETER LIKE_PARAMETERS RETURNS RAISES "Notes\n"
    "-----\n"
    "Blocks: until the values are there (GIL released).\n"
    "Ordered after: work on `stream`, and what the exporter of `obj` says is "
    "pending.\n";

const char cm_empty_like_doc[] =
    "empty_like($module, /, prototype, dtype=None, kind=None, *, order='K', "
    "device=None, "
    "stream=None, pool=None)\n"
    "--\n"
    "\n"
    "Allocate a buffer with the shape and dtype of another array.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "prototype : Buffer or array_like\n"
    "    Gives shape, dtype and, if it is a buffer, kind, flags and device.\n"
    "dtype : dtype_like, optional\n"
    "    Instead of the prototype's.\n"
    "kind : {'device', 'pinned', 'mapped', 'managed'}, optional\n"
    "    Instead of the prototype's; device memory for what is no buffer and for "
    "ordinary\n"
    "    memory.\n" LIKE_PARAMETERS RETURNS RAISES "Notes\n"
    "-----\n"
    "Blocks: only when the pool has nothing that fits (GIL released).\n"
    "Ordered after: as `empty`.\n";
