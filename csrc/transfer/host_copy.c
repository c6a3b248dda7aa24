/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/host_copy.h"

#include <string.h>

/* One row of `count` runs. memcpy of a constant size is a plain load and store of any
 * alignment. */
#define DEFINE_COPY_ROW(nbytes)                                                        \
    static void copy_row_##nbytes(char *dst, const char *src, int64_t count,           \
                                  int64_t dst_stride, int64_t src_stride)              \
    {                                                                                  \
        for (int64_t i = 0; i < count; i++) {                                          \
            memcpy(dst, src, (nbytes));                                                \
            dst += dst_stride;                                                         \
            src += src_stride;                                                         \
        }                                                                              \
    }
DEFINE_COPY_ROW(1)
DEFINE_COPY_ROW(2)
DEFINE_COPY_ROW(4)
DEFINE_COPY_ROW(8)
DEFINE_COPY_ROW(16)
#undef DEFINE_COPY_ROW

static void
copy_row(uint64_t run_nbytes, char *dst, const char *src, int64_t count,
         int64_t dst_stride, int64_t src_stride)
{
    switch (run_nbytes) {
    case 1:
        if (src_stride == 0 && dst_stride == 1) {
            memset(dst, *src, (size_t)count);
            return;
        }
        copy_row_1(dst, src, count, dst_stride, src_stride);
        return;
    case 2:
        copy_row_2(dst, src, count, dst_stride, src_stride);
        return;
    case 4:
        copy_row_4(dst, src, count, dst_stride, src_stride);
        return;
    case 8:
        copy_row_8(dst, src, count, dst_stride, src_stride);
        return;
    case 16:
        copy_row_16(dst, src, count, dst_stride, src_stride);
        return;
    default:
        for (int64_t i = 0; i < count; i++) {
            memcpy(dst, src, (size_t)run_nbytes);
            dst += dst_stride;
            src += src_stride;
        }
    }
}

void
cm_host_copy(const cm_layout *layout, void *dst, const void *src)
{
    if (layout->run_nbytes == 0) {
        return;
    }
    char *to = (char *)dst + layout->dst_offset;
    const char *from = (const char *)src + layout->src_offset;
    if (layout->ndim == 0) {
        memmove(to, from, (size_t)layout->run_nbytes);
        return;
    }
    int row = layout->ndim - 1;
    int64_t index[CM_MAX_NDIM] = {0};
    for (;;) {
        copy_row(layout->run_nbytes, to, from, layout->shape[row],
                 layout->dst_strides[row], layout->src_strides[row]);
        int axis = row - 1;
        for (; axis >= 0; axis--) {
            to += layout->dst_strides[axis];
            from += layout->src_strides[axis];
            if (++index[axis] < layout->shape[axis]) {
                break;
            }
            to -= layout->dst_strides[axis] * layout->shape[axis];
            from -= layout->src_strides[axis] * layout->shape[axis];
            index[axis] = 0;
        }
        if (axis < 0) {
            return;
        }
    }
}
