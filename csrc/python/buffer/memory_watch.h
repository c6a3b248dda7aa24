/* SPDX-License-Identifier: Apache-2.0 */
/* Foreign memory that its owner can replace. A tensor of PyTorch's is a handle: `t.data
 * = u` and `t.set_(u)` give it another storage, and whoever kept the tensor alone then
 * reads freed memory. So a cm_storage keeps the storage itself (`memory`), whatever
 * becomes of the tensor.
 *
 * Even that is not the bytes. share_memory_() moves them to other pages inside the same
 * storage, resize_() gives it another size, and numpy.ndarray.resize(refcheck=False)
 * does the same to an array. A storage of the CPU refuses to be resized once somebody
 * said so, as Tensor.numpy() does; cm_memory_watch() says it too. What can still move
 * is compared with what it was at each use of a buffer (cm_storage_check_open), which
 * raises instead of reading what is no longer there. What moves while a copy runs in
 * the background is found when somebody waits for the copy.
 *
 * A copy that the caller waits for only keeps the storage, which costs one call of a
 * method: nothing uses the buffer after it. What lives longer (asbuffer(), register(),
 * copies in the background) is watched as well. GIL held throughout. */
#pragma once

#include "python/buffer/storage.h"

/* Let `storage`, made of `object` just now, keep what the object's bytes are in: a
 * storage of PyTorch's, or of an array what it is over. An object that has neither is
 * left alone. 0, or -1 with an exception that is no Exception of the object's. */
int cm_memory_keep(cm_storage *storage, PyObject *object);
/* The storage of the tensor that an array is a view of, as Tensor.numpy() makes it: a
 * new reference, or NULL without an exception. For copies that keep the array alone. */
PyObject *cm_memory_under(cm_state *state, PyObject *array);
/* And let every use of `storage` compare it from now on. 0 or -1. */
int cm_memory_watch(cm_storage *storage);
/* Let `storage` keep and watch what `other` does. */
void cm_memory_share(cm_storage *storage, const cm_storage *other);
/* Is it still where it was? 0, or -1 with BufferError. */
int cm_memory_check(const cm_storage *storage);

/* For the handle of a copy in the background, which outlives the storages of its ends:
 * a list, made with the first item, of what they are in and where that was. A storage
 * that is not watched is left out. 0, or -1 with an exception. */
int cm_memory_note(const cm_storage *storage, PyObject **list);
/* The same of a storage of PyTorch's or an array, as it is now. */
int cm_memory_note_place(const cm_state *state, PyObject *memory, PyObject **list);
/* Is all of it still there? 0, or -1 with BufferError. */
int cm_memory_check_noted(cm_state *state, PyObject *list);
