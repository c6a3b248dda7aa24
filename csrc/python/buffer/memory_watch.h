/* SPDX-License-Identifier: Apache-2.0 */
/* Watches foreign memory that its owner can replace.
 *
 * A tensor of PyTorch's is a handle: `t.data = u` and `t.set_(u)` give it another
 * storage, and whoever kept only the tensor then reads freed memory. So a cm_storage
 * keeps the storage of PyTorch's itself (`memory`), whatever becomes of the tensor. Yet
 * the bytes may move even while PyTorch's storage lives. share_memory_() moves them to
 * other pages inside the same storage, resize_() gives the storage another size, and
 * numpy.ndarray.resize(refcheck=False) does the same to an array. A storage on the CPU
 * can be told to refuse any resizing from then on, and both Tensor.numpy() and
 * cm_memory_watch() tell it so. For memory that can still move, the address and the
 * size are compared at each use of a buffer (cm_storage_check_open()), which raises an
 * error instead of reading memory that is gone. If memory moves while a copy runs in
 * the background, that is found when somebody waits for the copy.
 *
 * If the caller waits for a copy, the storage is kept but not watched, since nothing
 * uses the buffer after the copy. That costs one call of a method. Whatever lives
 * longer (asbuffer(), register(), copies in the background) is watched as well. The GIL
 * is held throughout. */
#pragma once

#include "python/buffer/storage.h"

/* Let `storage`, which was just made of `object`, keep the object that has the bytes: a
 * storage of PyTorch's or, for an array, the object of which the array is a view. If
 * there is neither, nothing is kept. Returns 0, or -1 with an exception. Errors of the
 * object's own code are not passed on. */
int cm_memory_keep(cm_storage *storage, PyObject *object);
/* Find the storage of the tensor that an array is a view of, as the arrays of
 * Tensor.numpy() are. Copies that keep only the array have to keep that storage as
 * well. Returns a new reference, or NULL without an exception if there is no such
 * tensor. */
PyObject *cm_memory_under(cm_state *state, PyObject *array);
/* Let each use of `storage` compare, from now on, where its memory is. Returns 0, or -1
 * with an exception. */
int cm_memory_watch(cm_storage *storage);
/* Let `storage` keep and watch what `other` keeps and watches. */
void cm_memory_share(cm_storage *storage, const cm_storage *other);
/* Check that the memory is still where it was. Returns 0, or -1 with BufferError. */
int cm_memory_check(const cm_storage *storage);

/* Note which object has the bytes of a storage and where they are. The handle of a copy
 * in the background needs this note, since it outlives the storages of its ends. *list
 * is made with the first item. A storage that is not watched is left out. Returns 0, or
 * -1 with an exception. */
int cm_memory_note(const cm_storage *storage, PyObject **list);
/* Note where the bytes of a storage of PyTorch's or of an array are now. Returns 0, or
 * -1 with an exception. */
int cm_memory_note_place(cm_state *state, PyObject *memory, PyObject **list);
/* Check that everything noted is still where it was. Returns 0, or -1 with
 * BufferError. */
int cm_memory_check_noted(cm_state *state, PyObject *list);
