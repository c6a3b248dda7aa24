/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/device/kernel.h"

/* Written by hand; only instructions every device since compute capability 5.2 has.
 * Offsets into the parameter are those of cm_table_job (asserted in table_kernel.c):
 * count 0, team_shift 4, dst 16, src 1648, nbytes 3280.
 *
 * A team of threads copies one piece: single bytes up to where the target lies on a
 * multiple of the largest unit that both ends agree on (1 to 16 bytes), then such
 * units, four at a time for each thread while there are as many, then the bytes that
 * are left. */

/* The loop over units: %i is the thread's next one, in bytes. */
#define UNITS(size, type, r0, r1, r2, r3)                                              \
    "MANY" size ":\n"                                                                  \
    "    add.u32 %end, %i, %step3;\n"                                                  \
    "    setp.ge.u32 %p, %end, %body;\n"                                               \
    "    @%p bra FEW" size ";\n"                                                       \
    "    cvt.u64.u32 %x, %i;\n"                                                        \
    "    add.s64 %from, %src, %x;\n"                                                   \
    "    add.s64 %to, %dst, %x;\n"                                                     \
    "    ld.global." type " " r0 ", [%from];\n"                                        \
    "    add.s64 %from, %from, %stride;\n"                                             \
    "    ld.global." type " " r1 ", [%from];\n"                                        \
    "    add.s64 %from, %from, %stride;\n"                                             \
    "    ld.global." type " " r2 ", [%from];\n"                                        \
    "    add.s64 %from, %from, %stride;\n"                                             \
    "    ld.global." type " " r3 ", [%from];\n"                                        \
    "    st.global." type " [%to], " r0 ";\n"                                          \
    "    add.s64 %to, %to, %stride;\n"                                                 \
    "    st.global." type " [%to], " r1 ";\n"                                          \
    "    add.s64 %to, %to, %stride;\n"                                                 \
    "    st.global." type " [%to], " r2 ";\n"                                          \
    "    add.s64 %to, %to, %stride;\n"                                                 \
    "    st.global." type " [%to], " r3 ";\n"                                          \
    "    add.u32 %i, %i, %step4;\n"                                                    \
    "    bra MANY" size ";\n"                                                          \
    "FEW" size ":\n"                                                                   \
    "    setp.ge.u32 %p, %i, %body;\n"                                                 \
    "    @%p bra END;\n"                                                               \
    "    cvt.u64.u32 %x, %i;\n"                                                        \
    "    add.s64 %from, %src, %x;\n"                                                   \
    "    add.s64 %to, %dst, %x;\n"                                                     \
    "    ld.global." type " " r0 ", [%from];\n"                                        \
    "    st.global." type " [%to], " r0 ";\n"                                          \
    "    add.u32 %i, %i, %step;\n"                                                     \
    "    bra FEW" size ";\n"

const char cm_table_ptx[] =
    ".version 7.0\n"
    ".target sm_52\n"
    ".address_size 64\n"
    ".visible .entry cm_table_copy(.param .align 8 .b8 job[4096])\n"
    "{\n"
    "    .reg .pred %p;\n"
    "    .reg .b16 %h<4>;\n"
    "    .reg .b32 %t, %n, %b, %count, %shift, %piece, %team, %lane, %mask;\n"
    "    .reg .b32 %left, %head, %body, %tail, %unit, %i, %end;\n"
    "    .reg .b32 %step, %step3, %step4, %w<16>;\n"
    "    .reg .b64 %job, %at, %dst, %src, %x, %y, %from, %to, %stride, %q<4>;\n"
    "    mov.b64 %job, job;\n"
    "    ld.param.u32 %count, [job];\n"
    "    ld.param.u32 %shift, [job+4];\n"
    "    mov.u32 %t, %tid.x;\n"
    "    mov.u32 %n, %ntid.x;\n"
    "    mov.u32 %b, %ctaid.x;\n"
    "    mad.lo.u32 %t, %b, %n, %t;\n"
    "    shr.u32 %piece, %t, %shift;\n"
    "    setp.ge.u32 %p, %piece, %count;\n"
    "    @%p bra END;\n"
    "    mov.u32 %team, 1;\n"
    "    shl.b32 %team, %team, %shift;\n"
    "    sub.u32 %mask, %team, 1;\n"
    "    and.b32 %lane, %t, %mask;\n"
    "    mul.wide.u32 %at, %piece, 8;\n"
    "    add.s64 %at, %at, %job;\n"
    "    ld.param.u64 %dst, [%at+16];\n"
    "    ld.param.u64 %src, [%at+1648];\n"
    "    mul.wide.u32 %at, %piece, 4;\n"
    "    add.s64 %at, %at, %job;\n"
    "    ld.param.u32 %left, [%at+3280];\n"
    /* the lowest bit in which the ends differ, or 16 */
    "    xor.b64 %x, %dst, %src;\n"
    "    cvt.u32.u64 %unit, %x;\n"
    "    or.b32 %unit, %unit, 16;\n"
    "    neg.s32 %mask, %unit;\n"
    "    and.b32 %unit, %unit, %mask;\n"
    "    sub.u32 %mask, %unit, 1;\n"
    /* bytes before the first unit: fewer than a team has threads */
    "    cvt.u32.u64 %head, %dst;\n"
    "    neg.s32 %head, %head;\n"
    "    and.b32 %head, %head, %mask;\n"
    "    min.u32 %head, %head, %left;\n"
    "    setp.ge.u32 %p, %lane, %head;\n"
    "    @%p bra HEADED;\n"
    "    cvt.u64.u32 %x, %lane;\n"
    "    add.s64 %from, %src, %x;\n"
    "    add.s64 %to, %dst, %x;\n"
    "    ld.global.u8 %h0, [%from];\n"
    "    st.global.u8 [%to], %h0;\n"
    "HEADED:\n"
    "    cvt.u64.u32 %x, %head;\n"
    "    add.s64 %dst, %dst, %x;\n"
    "    add.s64 %src, %src, %x;\n"
    "    sub.u32 %left, %left, %head;\n"
    /* and after the last */
    "    and.b32 %tail, %left, %mask;\n"
    "    sub.u32 %body, %left, %tail;\n"
    "    setp.ge.u32 %p, %lane, %tail;\n"
    "    @%p bra TAILED;\n"
    "    add.u32 %i, %body, %lane;\n"
    "    cvt.u64.u32 %x, %i;\n"
    "    add.s64 %from, %src, %x;\n"
    "    add.s64 %to, %dst, %x;\n"
    "    ld.global.u8 %h0, [%from];\n"
    "    st.global.u8 [%to], %h0;\n"
    "TAILED:\n"
    "    mul.lo.u32 %i, %lane, %unit;\n"
    "    mul.lo.u32 %step, %team, %unit;\n"
    "    mul.lo.u32 %step3, %step, 3;\n"
    "    shl.b32 %step4, %step, 2;\n"
    "    cvt.u64.u32 %stride, %step;\n"
    "    setp.eq.u32 %p, %unit, 16;\n"
    "    @%p bra MANY16;\n"
    "    setp.eq.u32 %p, %unit, 8;\n"
    "    @%p bra MANY8;\n"
    "    setp.eq.u32 %p, %unit, 4;\n"
    "    @%p bra MANY4;\n"
    "    setp.eq.u32 %p, %unit, 2;\n"
    "    @%p bra MANY2;\n" UNITS("1", "u8", "%h0", "%h1", "%h2", "%h3")
        UNITS("2", "u16", "%h0", "%h1", "%h2", "%h3")
            UNITS("4", "u32", "%w0", "%w1", "%w2", "%w3") UNITS("8", "u64", "%q0",
                                                                "%q1", "%q2", "%q3")
                UNITS("16", "v4.u32", "{%w0, %w1, %w2, %w3}", "{%w4, %w5, %w6, %w7}",
                      "{%w8, %w9, %w10, %w11}", "{%w12, %w13, %w14, %w15}") "END:\n"
                                                                            "    ret;\n"
                                                                            "}\n";
