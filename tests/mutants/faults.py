# SPDX-License-Identifier: Apache-2.0
"""Faults that are put into the sources, each with the tests that must notice it.

`old` must be in the file exactly once, where white space does not count. Choose the
shortest text that is unique, so that changes around it leave the fault in its place. `how`
says how the tests end with the fault. This is "fails", or "crashes" or "hangs" if the tests
cannot fail in the usual way. To find the tests of a new fault:

    python tests/mutants/run.py NAME --find tests/pools/test_pool.py tests/c/test_pool.c
"""

from __future__ import annotations

from fault import Fault
from faults_of_rows import FAULTS_OF_ROWS

FAULTS = [
    # -- fills ---------------------------------------------------------------------------
    Fault(
        "fill before another stream",
        "csrc/python/copy/fill.c",
        "a fill is queued although work of another stream on the memory comes first",
        "if (!cm_stream_same(storage->uses[i], stream)) { return false; }",
        "if (!cm_stream_same(storage->uses[i], stream)) { return true; }",
        [
            "tests/buffers/test_fill.py::"
            "test_fill_after_work_of_another_stream_comes_after_it"
        ],
    ),
    Fault(
        "number that wraps round",
        "csrc/python/core/values.c",
        "a number that is too large for its dtype is written",
        "if (is_integer && !integer_fits(&number, to)) { return false; }",
        "",
        [
            "tests/buffers/test_values.py::"
            "test_number_and_scalar_become_what_an_array_of_them_becomes"
        ],
    ),
    # -- pool ----------------------------------------------------------------------------
    Fault(
        "hits and misses swapped",
        "csrc/pool/pool.c",
        "the statistics count a hit as a miss",
        "c->hit_count += hit; c->miss_count += !hit;",
        "c->hit_count += !hit; c->miss_count += hit;",
        [
            "tests/pools/test_stats.py::"
            "test_hits_are_the_allocations_that_called_no_runtime"
        ],
    ),
    Fault(
        "peak not kept",
        "csrc/pool/private.h",
        "the peak of live bytes is the last value",
        "cm_pool_raise(&c->peak_live_nbytes, c->live_nbytes);",
        "c->peak_live_nbytes = c->live_nbytes;",
        ["tests/pools/test_stats.py::test_peaks_of_what_is_live_stay_when_less_is"],
    ),
    Fault(
        "size rounded too far",
        "csrc/pool/pool.c",
        "a block is longer than it need be",
        "cm_round_up_u64(nbytes, step, out) && *out <= INT64_MAX",
        "cm_round_up_u64(nbytes + 1, step, out) && *out <= INT64_MAX",
        ["tests/c/test_pool.c::test_pool_sizes_are_exact_to_the_step"],
    ),
    Fault(
        "events not looked at",
        "csrc/pool/in_flight.c",
        "a block in flight is taken for idle at the first look",
        "if (!passed) { break; }",
        "if (false) { break; }",
        ["tests/c/test_pool_streams.c::test_pool_block_in_flight_waits_for_its_stream"],
    ),
    Fault(
        "fence of one device",
        "csrc/pool/in_flight.c",
        "unknown work is waited for on the pool's own device alone",
        "fences = UINT64_MAX >> (CM_MAX_DEVICES - pool->rt->device_count);",
        "fences = device_bit(pool->config.device);",
        [
            "tests/c/test_pool_streams.c::test_pool_fence_covers_every_device_in_use",
            "tests/interchange/test_exported.py::"
            "test_block_waits_for_work_that_nobody_announced",
        ],
    ),
    Fault(
        "fence of our own contexts",
        "csrc/pool/in_flight.c",
        "devices that only another library works on are not fenced",
        "cm_ignore(cm_rt_context_is_active(pool->rt, device, &active));",
        "active = false;",
        ["tests/c/test_pool_streams.c::test_pool_fence_covers_contexts_of_others"],
    ),
    Fault(
        "no fence for exported memory",
        "csrc/python/buffer/storage.c",
        "a block that others have seen is used again at once",
        "return (detached->was_exported ? CM_POOL_FREE_FENCE : 0u)",
        "return 0u",
        [
            "tests/interchange/test_exported.py::"
            "test_block_waits_for_work_that_nobody_announced",
            "tests/interchange/test_exported.py::"
            "test_letting_go_takes_no_fence_and_does_not_wait",
        ],
    ),
    Fault(
        "fence of memory that nobody saw",
        "csrc/python/buffer/buffer_object.c",
        "a block that was never exported is fenced",
        "storage->was_exported = false;",
        "storage->was_exported = true;",
        [
            "tests/interchange/test_exported.py::"
            "test_no_call_is_made_for_what_was_never_exported"
        ],
    ),
    Fault(
        "pages unlocked under another device",
        "csrc/python/buffer/storage.c",
        "registered pages are unlocked while another device may read them",
        "fence && runtime != NULL ? cm_devices_in_use(runtime, true) : 0",
        "fence && runtime != NULL ? UINT64_C(1) << detached->device : 0",
        [
            "tests/interchange/test_exported.py::"
            "test_pages_stay_locked_under_work_on_another_device"
        ],
    ),
    Fault(
        "fence while a capture runs",
        "csrc/pool/in_flight.c",
        "a fence is recorded although the legacy stream says that a capture runs",
        "if (!needed || capturing) {",
        "if (!needed) {",
        ["tests/c/test_pool_streams.c::test_pool_takes_no_fence_while_a_capture_runs"],
    ),
    Fault(
        "wait where an event tells",
        "csrc/pool/pool.c",
        "an allocation waits for the device although an event fences what waits",
        "&& !cm_runtime_has(pool->rt, CM_OP_context_record_event)) {",
        ") {",
        [
            "tests/c/test_pool_streams.c::"
            "test_pool_fences_that_are_events_are_not_waited_for"
        ],
    ),
    Fault(
        "only the first stream recorded",
        "csrc/pool/in_flight.c",
        "of the streams that used a block the second and later are not waited for",
        "while (j < i && !cm_stream_same(uses[j], uses[i])) { j++; }",
        "j = i == 0 ? 0 : i + 1;",
        ["tests/c/test_pool_streams.c::test_pool_block_of_many_streams_waits_for_all"],
    ),
    Fault(
        "pending spans for all",
        "csrc/pool/heap.c",
        "spans that two streams still use are joined",
        "if (!a_clean && !b_clean) { return false; }",
        "if (!a_clean && !b_clean) { return true; }",
        [
            "tests/c/test_heap.c::"
            "test_heap_spans_of_two_streams_stay_apart_until_both_ended"
        ],
    ),
    Fault(
        "limit one byte off",
        "csrc/pool/budget.c",
        "an allocation may exceed a limit by its own size",
        """if (nbytes > limit || used > limit - nbytes) {
            return false;
        }
        if (!atomic_compare_exchange_weak(&budget->used_nbytes, &used, used + nbytes)) {
            continue;
        }
        if (used + nbytes <= atomic_load(&budget->limit_nbytes)) {""",
        # The fault changes two places, since the code in the second refuses what the first
        # lets pass.
        """if (nbytes > limit || used > limit) {
            return false;
        }
        if (!atomic_compare_exchange_weak(&budget->used_nbytes, &used, used + nbytes)) {
            continue;
        }
        if (used <= atomic_load(&budget->limit_nbytes)) {""",
        ["tests/pools/test_limits.py::test_limit_is_obeyed_and_counts_what_is_cached"],
    ),
    Fault(
        "parent limit not refunded",
        "csrc/pool/budget.c",
        "memory given back stays charged to the limit that pools share",
        "void cm_budget_refund(cm_budget *budget, uint64_t nbytes) "
        "{ for (cm_budget *b = budget; b != NULL; b = b->parent) {",
        "void cm_budget_refund(cm_budget *budget, uint64_t nbytes) "
        "{ for (cm_budget *b = budget; b != NULL; b = NULL) {",
        [
            "tests/pools/test_limits.py::"
            "test_limit_of_a_kind_holds_for_all_its_pools_together",
            "tests/c/test_pool_shortage.c::"
            "test_pool_growth_that_fails_gives_back_what_it_took",
        ],
    ),
    Fault(
        "trim takes what is late",
        "csrc/pool/grow.c",
        "a segment that a stream still uses goes back to the runtime",
        "&& s->block.nbytes == arena->nbytes && cm_span_is_clean(s, view)",
        "&& s->block.nbytes == arena->nbytes",
        [
            "tests/pools/test_pool.py::"
            "test_trim_leaves_free_memory_that_its_stream_still_uses"
        ],
    ),
    Fault(
        "growth breaks a capture",
        "csrc/runtime/scope.c",
        "the runtime is called in the global capture mode",
        "scope->mode = mode;",
        "scope->mode = 0;",
        [
            "tests/devices/test_peers.py::"
            "test_enabling_does_not_break_the_capture_of_another_stream",
            "tests/base/test_emulation.py::"
            "test_capturing_stream_is_seen_and_copies_stay_legal",
        ],
    ),
    # -- registry ------------------------------------------------------------------------
    Fault(
        "shared pages unlocked early",
        "csrc/pool/registry.c",
        "the first of two registrations that ends unlocks the page of both",
        "p->share_count++; list_of(shares)[shares->count++] = p;",
        "p->share_count = 1; list_of(shares)[shares->count++] = p;",
        ["tests/c/test_registry.c::test_registry_overlapping_requests_share_pieces"],
    ),
    Fault(
        "edge of a registration unseen",
        "csrc/pool/registry.c",
        "a copy runs over the edge of a registration in one call",
        "run = edge < nbytes ? edge : nbytes;",
        "run = nbytes;",
        [
            "tests/interchange/test_register_lifetime.py::"
            "test_copy_of_a_neighbour_on_a_locked_page",
            "tests/c/test_engine.c::test_engine_copies_are_split_at_registration_edges",
        ],
    ),
    # -- transfer ------------------------------------------------------------------------
    Fault(
        "ring without a bound",
        "csrc/transfer/engine/resource_cache.c",
        "transfers take as many page-locked blocks as they like",
        "bool fits = nbytes <= most && engine->ring_used_nbytes <= most - nbytes;",
        "bool fits = most > 0;",
        [
            "tests/c/test_tuning.c::test_engine_keeps_to_the_bound_of_the_ring",
            "tests/c/test_tuning.c::test_engine_ring_gives_what_is_left_and_no_more",
        ],
    ),
    Fault(
        "peer access assumed",
        "csrc/transfer/device/peer_access.c",
        "a kernel reaches another device's memory without asking whether it may",
        "bool may = may_use_region(access->rt, region, wanted, all);",
        "bool may = true;",
        ["tests/devices/test_peers.py::test_no_kernel_crosses_where_access_is_refused"],
    ),
    Fault(
        "peer access of the first byte",
        "csrc/transfer/device/peer_access.c",
        "memory that is open to a peer only at its beginning counts as open",
        "all && may && at < span; at += step) {",
        "false && at < span; at += step) {",
        [
            "tests/c/test_engine.c::"
            "test_engine_takes_no_kernel_to_memory_a_peer_may_use_in_part"
        ],
    ),
    Fault(
        "overlap unseen",
        "csrc/transfer/plan/region.c",
        "emulated memory and its view on the host pass for two",
        "return alias != NULL ? (uintptr_t)alias : at;",
        "return alias == NULL ? 0 : at;",
        [
            "tests/transfers/test_several_overlap.py::"
            "test_emulated_memory_and_its_view_on_the_host_are_one"
        ],
    ),
    Fault(
        "strided copy loses its end",
        "csrc/transfer/host/host_copy.c",
        "what vector instructions leave over is not copied",
        "rest.inner_count = b->inner_count - done;",
        "rest.inner_count = b->inner_count - done - 1;",
        [
            "tests/c/test_host_copy.c::"
            "test_elements_a_few_bytes_apart_are_brought_together"
        ],
    ),
    Fault(
        "short read is the end",
        "csrc/transfer/file/calls.c",
        "the bytes that a read did not bring are not asked for again",
        "pass(&p, (uint64_t)moved); } return p.nbytes == 0;",
        "pass(&p, (uint64_t)moved); break; } return true;",
        ["tests/files/test_file_faults.py::test_interrupted_and_short_calls_go_on"],
    ),
    Fault(
        "write that moves nothing",
        "csrc/transfer/file/calls.c",
        "a failed call on a file is taken for the end of the work",
        "fail(file, error, p.offset, p.range_index); return false;",
        "(void)error; return true;",
        [
            "tests/files/test_file_faults.py::test_every_file_call_may_fail",
            "tests/files/test_file_faults.py::"
            "test_a_write_that_moves_nothing_is_an_error",
        ],
    ),
    Fault(
        "cancelled part is no failure",
        "csrc/transfer/engine/ticket.c",
        "what a failed part of a transfer says is lost",
        "status = cm_is_ok(status) ? part->status : status;",
        "",
        [
            "tests/transfers/test_copy_many_order.py::test_failure_is_the_handles_once",
            "tests/c/test_many_parts.c::test_failed_part_lets_no_later_one_pass",
        ],
    ),
    Fault(
        "short copy holds on",
        "csrc/transfer/routes/short_copy.c",
        "the caller keeps the GIL however long the stream takes",
        "waited_ns >= HELD_NS",
        "waited_ns == UINT64_MAX",
        [
            "tests/devices/test_gil.py::"
            "test_short_copy_that_takes_long_gives_the_gil_up[up-pinned]"
        ],
    ),
    Fault(
        "interrupted short copy keeps nothing",
        "csrc/transfer/routes/short_copy.c",
        "the ends of a copy that is still in flight are handed out again",
        "cm_request_take_keeps(request) ? cm_ticket_create(engine, request) : NULL;",
        "cm_ticket_create(engine, request);",
        [
            "tests/transfers/test_transfer_control.py::"
            "test_interrupted_copy_keeps_its_ends_until_it_is_done[short]"
        ],
    ),
    Fault(
        "interrupted job keeps nothing",
        "csrc/transfer/run/run.c",
        "the ends of a long copy that is still in flight are handed out again",
        "job->keeps_source != NULL "
        "&& !cm_ticket_take_keeps(job->ticket, job->keeps_source)",
        "job->keeps_source != NULL && job->ticket == NULL",
        [
            "tests/transfers/test_transfer_control.py::"
            "test_interrupted_copy_keeps_its_ends_until_it_is_done[long]",
            "tests/c/test_engine_order.c::"
            "test_engine_interrupted_copy_goes_on_behind_its_keeps",
        ],
    ),
    Fault(
        "short copy of the host waits for nothing",
        "csrc/transfer/routes/short_copy.c",
        "a short copy reads memory that a stream has yet to write",
        "&& comes_first(request); /* asks the runtime, so it comes last */ "
        "return is_short ?",
        "; return is_short ?",
        [
            "tests/buffers/test_copy.py::"
            "test_short_copy_between_ends_of_the_host_comes_after_what_is_queued"
        ],
    ),
    Fault(
        "blocking copy comes after no lasting stream",
        "csrc/python/copy/call.c",
        "a blocking copy of fresh memory does not wait for streams of others that use it",
        "if (stream != call->stream && cm_call_come_after_stream(call, stream) < 0)",
        "if (stream == NULL)",
        [
            "tests/devices/test_stream_semantics.py::"
            "test_blocking_copy_waits_for_the_work_of_others_on_its_memory[short-up]"
        ],
    ),
    Fault(
        "queued copy comes after no other stream",
        "csrc/transfer/routes/queued_copy.c",
        "a copy on a stream does not wait for the other streams that use its ends",
        "CM_TRY(cm_cache_chain_streams(engine, other, stream));",
        "",
        [
            "tests/devices/test_stream_semantics.py::"
            "test_copy_on_a_stream_comes_after_another_stream"
        ],
    ),
    Fault(
        "queued copy comes after no transfer",
        "csrc/transfer/routes/queued_copy.c",
        "a copy on a stream does not wait for transfers that use its ends",
        "CM_TRY(cm_ticket_depend(request->after_tickets[i], stream, 0));",
        "",
        [
            "tests/devices/test_stream_semantics.py::"
            "test_copy_on_a_stream_comes_after_a_transfer"
        ],
    ),
    Fault(
        "queued copy overlaps",
        "csrc/transfer/routes/queued_copy.c",
        "ends within a device that overlap go in one call of the runtime",
        "&& cm_runs_meet(dst->address, src->address, nbytes);",
        "&& false;",
        [
            "tests/devices/test_stream_semantics.py::"
            "test_copy_on_a_stream_may_overlap_within_a_device"
        ],
    ),
    Fault(
        "short copy lets go",
        "csrc/transfer/routes/short_copy.c",
        "the caller gives the GIL up for any copy",
        "if (c.nbytes > HELD_NBYTES) {",
        "if (c.nbytes > 0) {",
        ["tests/devices/test_gil.py::test_short_copy_keeps_the_gil[up-256-pinned]"],
    ),
    # -- streams -------------------------------------------------------------------------
    Fault(
        "target on the host left to the device",
        "csrc/transfer/run/request.c",
        "a copy on a stream to ordinary memory returns before it is written",
        "options.may_wait || is_written_in_call(request, &job->plan);",
        "request->blocking;",
        [
            "tests/devices/test_stream_semantics.py::"
            "test_bytes_are_there_once_the_stream_is_done",
        ],
    ),
    Fault(
        "own streams of threads are one",
        "csrc/runtime/stream.c",
        "the per-thread default stream of another thread is taken for the caller's",
        "stream->handle != CM_STREAM_PER_THREAD || stream->id == id_of_own_stream();",
        "true;",
        ["tests/c/test_runtime.c::test_stream_of_its_own_is_each_threads"],
    ),
    Fault(
        "other streams passed by",
        "csrc/transfer/routes/short_copy.c",
        "a short copy does not wait for the other streams that use its ends",
        "&& !cm_stream_is_idle(stream)) {",
        "&& false) {",
        [
            "tests/devices/test_stream_semantics.py::"
            "test_own_stream_of_another_thread_comes_first"
        ],
    ),
    Fault(
        "overlap within a device passed by",
        "csrc/transfer/routes/short_copy.c",
        "a short copy within a device may overwrite what it has yet to read",
        "return !cm_runs_meet(dst->address, src->address, nbytes);",
        "return dst->address >= src->address"
        " || !cm_runs_meet(dst->address, src->address, nbytes);",
        [
            "tests/devices/test_peers.py::"
            "test_copies_within_a_device_that_overlap_are_no_short_ones[600]"
        ],
    ),
    # -- python --------------------------------------------------------------------------
    Fault(
        "array interface unnoticed",
        "csrc/python/protocols/array_interface.c",
        "a block whose CUDA array interface was read is used again at once",
        "buffer->storage->was_exported = true;",
        "",
        [
            "tests/interchange/test_array_interface.py::"
            "test_block_waits_for_the_unseen_work_of_who_read_the_dictionary"
        ],
    ),
    Fault(
        "default stream in the interface",
        "csrc/python/protocols/array_interface.c",
        "a default stream is named, which JAX takes for no stream",
        "        if (may_be_named(pending->streams[i])) {",
        "        if (pending->streams[i] != NULL) {",
        [
            "tests/interchange/test_array_interface.py::"
            "test_work_of_a_default_stream_is_waited_for_by_a_named_one[fill-legacy]"
        ],
    ),
    Fault(
        "old capsule of read-only memory",
        "csrc/python/copy/dlpack_export.c",
        "a consumer of the old DLPack may write to read-only memory",
        "if (buffer->readonly && !asked->versioned) {",
        "if (false) {",
        ["tests/interchange/test_dlpack.py::test_readonly_needs_the_new_generation"],
    ),
    Fault(
        "unused capsule leaks",
        "csrc/python/copy/dlpack_export.c",
        "a capsule that nobody took keeps its memory for ever",
        "if (PyCapsule_IsValid(capsule, CM_DL_LEGACY_NAME)) {",
        "if (false) {",
        ["tests/interchange/test_dlpack.py::test_unused_capsule_frees_its_tensor"],
    ),
    Fault(
        "strides in bytes",
        "csrc/python/copy/dlpack_export.c",
        "DLPack strides are bytes instead of elements",
        "steps[i] = step / buffer->itemsize;",
        "steps[i] = step;",
        ["tests/interchange/test_dlpack.py::test_tensor_describes_the_buffer"],
    ),
    Fault(
        "export without a wait",
        "csrc/python/protocols/buffer_export.c",
        "a memoryview is given out before the work on its memory is done",
        "if (cm_storage_wait(buffer->storage, false) < 0",
        "if (false",
        [
            "tests/interchange/test_buffer_protocol.py::"
            "test_export_waits_for_an_unfinished_transfer"
        ],
    ),
    Fault(
        "read-only view for writing",
        "csrc/python/protocols/buffer_export.c",
        "a read-only buffer gives out a writable view",
        "if (has_all(flags, PyBUF_WRITABLE) && buffer->readonly) {",
        "if (false) {",
        [
            "tests/interchange/test_buffer_protocol.py::"
            "test_readonly_buffer_refuses_writable_requests"
        ],
    ),
    Fault(
        "freed while exported",
        "csrc/python/buffer/storage.c",
        "free() gives memory back that an array still shows",
        "exports == 0 ? 0",
        "exports <= 1 ? 0",
        [
            "tests/interchange/test_dlpack.py::"
            "test_free_is_refused_while_a_consumer_lives"
        ],
    ),
    Fault(
        "only the first stream",
        "csrc/python/buffer/storage_use.c",
        "of the streams that use a buffer the second and later are forgotten",
        "storage->uses[storage->use_count] = cm_stream_hold(stream);",
        "if (storage->use_count > 0) { return 0; } "
        "storage->uses[storage->use_count] = cm_stream_hold(stream);",
        [
            "tests/interchange/test_array_interface.py::"
            "test_several_pending_streams_are_joined_on_one"
        ],
    ),
    Fault(
        "prefetch to device 0",
        "csrc/python/buffer/managed.c",
        "prefetch_pages() goes to device 0, whichever is named",
        "        .location = location,",
        "        .location = location > 0 ? 0 : location,",
        [
            "tests/base/test_emulation.py::"
            "test_prefetch_names_its_device_and_uses_its_stream"
        ],
    ),
    Fault(
        "prefetch on the wrong stream",
        "csrc/python/buffer/managed.c",
        "prefetch_pages() to a device is queued on a stream of the buffer's own device",
        "cm_stream_from_object(state, given, home);",
        "cm_stream_from_object(state, given, home < 0 ? home : 0);",
        [
            "tests/base/test_emulation.py::"
            "test_prefetch_names_its_device_and_uses_its_stream"
        ],
    ),
    Fault(
        "advice stays",
        "csrc/python/buffer/storage.c",
        "a pool's next buffer is advised as the one before it",
        "status = forget_advice(detached, runtime);",
        "status = runtime == NULL ? forget_advice(detached, runtime) : cm_ok();",
        [
            "tests/transfers/test_managed_advice.py::test_memory_goes_back_without_its_advice"
        ],
    ),
    Fault(
        "discard of shared pages",
        "csrc/python/buffer/page_calls.c",
        "what lies beside a slice on its first and last page is lost with it",
        "            keep_whole_pages(&address, &nbytes);",
        "",
        [
            "tests/transfers/test_managed_discard.py::test_discard_takes_no_byte_of_others"
        ],
    ),
    Fault(
        "discard before its place",
        "csrc/python/buffer/managed.c",
        "what is queued on the default stream after discard() may be lost with the bytes",
        "status = CM_WITHOUT_GIL(cm_stream_follow(legacy, side));",
        "status = cm_ok();",
        [
            "tests/transfers/test_managed_discard.py::"
            "test_discard_on_the_default_stream_comes_before_what_is_queued_later"
        ],
    ),
    Fault(
        "streams of discards",
        "csrc/python/buffer/managed.c",
        "a loop of discards leaves the memory a stream for each",
        "if (discard_on(self, side, legacy) < 0) {",
        "if (discard_on(self, side, NULL) < 0) {",
        [
            "tests/transfers/test_managed_discard.py::"
            "test_discard_on_the_default_stream_keeps_no_stream"
        ],
    ),
    Fault(
        "batch on the default stream",
        "csrc/python/buffer/page_calls.c",
        "the driver refuses prefetch_pages() on the legacy default stream",
        "stream > CM_STREAM_LEGACY",
        "stream < UINT64_MAX",
        [
            "tests/transfers/test_managed.py::"
            "test_prefetch_many_moves_all_in_one_call_or_several"
        ],
    ),
    Fault(
        "thrashing of other bytes",
        "csrc/python/buffer/thrashing.c",
        "tiles that are moved by hand, each once, are taken for thrashing",
        "    low += self->offset;",
        "",
        [
            "tests/transfers/test_managed_thrashing.py::test_what_is_no_thrashing_is_not_warned_of"
        ],
    ),
    Fault(
        "failure raised by the source",
        "csrc/python/buffer/storage_use.c",
        "an export of the source raises the failure of a copy that only read it",
        "bool writes = is_written_by(storage, ticket);",
        "bool writes = is_written_by(storage, ticket) || ticket != NULL;",
        [
            "tests/transfers/test_transfer.py::"
            "test_failure_of_a_dropped_handle_is_not_raised_by_an_export_of_its_source"
        ],
    ),
    Fault(
        "nothing for the unraisable hook",
        "csrc/python/core/errors.c",
        "what cannot be raised is told to nobody",
        "(void)cm_py_raise(state, status, NULL); PyErr_WriteUnraisable(where);",
        "(void)where;",
        [
            "tests/devices/test_event.py::"
            "test_failure_of_a_dropped_event_goes_to_the_unraisable_hook",
            "tests/transfers/test_transfer.py::"
            "test_failure_nobody_read_is_reported_once_its_handle_is_dropped",
        ],
    ),
    # -- fork ----------------------------------------------------------------------------
    Fault(
        "cold memory first",
        "csrc/pool/pool.c",
        "a pool with free memory never asks whether work on exported memory has ended",
        "pool->unasked_nbytes += fenced ? span->block.nbytes + FLIGHT_NBYTES : 0;",
        "",
        [
            "tests/interchange/test_exported.py::"
            "test_fence_is_taken_once_enough_waits_even_if_other_memory_is_free"
        ],
    ),
    Fault(
        "allocation in a forked child",
        "csrc/pool/pool.c",
        "a child is given memory of its parent's warm pool",
        "{ uint64_t size = 0; if (cm_runtime_is_forked(pool->rt) ||",
        "{ uint64_t size = 0; if (",
        ["tests/base/test_fork.py::test_child_allocates_nothing_from_a_warm_pool"],
    ),
    Fault(
        "fork unseen",
        "csrc/pool/registry.c",
        "a child unlocks its parent's pages",
        "&& cm_runtime_is_forked(registry->rt)) { return first;",
        "&& false) { return first;",
        ["tests/c/test_registry.c::test_registry_forked_child_touches_nothing"],
    ),
    # -- the emulated device and its faults ----------------------------------------------
    Fault(
        "device not put back",
        "csrc/runtime/runtime.c",
        "the caller's current device is another after a call",
        "if (guard->switched) {",
        "if (false) {",
        ["tests/c/test_runtime.c::test_guard_puts_back_other_device"],
    ),
    Fault(
        "event of no device",
        "csrc/runtime/emulated/stream.c",
        "an event is recorded on a stream of another device",
        "if (each->device != queue->device) { return CM_CUDA_INVALID_HANDLE; }",
        "",
        ["tests/c/test_emulated_event.c::test_handles_of_other_devices_are_refused"],
    ),
    Fault(
        "pageable source read late",
        "csrc/runtime/emulated/copy.c",
        "ordinary memory is read when the copy runs, not in the call",
        "if (code == 0 && job->src.is_plain && !job->dst.is_plain) {",
        "if (false) {",
        [
            "tests/c/test_emulated_stream.c::"
            "test_copy_reads_pinned_memory_late_and_pageable_at_once"
        ],
    ),
    Fault(
        "read-only registration written",
        "csrc/runtime/emulated/copy.c",
        "the emulated device writes to memory registered for reading",
        "(place->range->flags & CM_REGISTER_READ_ONLY) != 0;",
        "false;",
        [
            "tests/c/test_emulated_memory.c::"
            "test_registration_read_only_is_never_written"
        ],
    ),
    Fault(
        "fault is injected one call late",
        "csrc/runtime/faults.c",
        "the planned call goes well and the next one fails",
        "if (nth == 0 || seen < nth ||",
        "if (nth == 0 || seen <= nth ||",
        ["tests/c/test_faults.c::test_faults_fail_the_nth_call_only"],
    ),
    # -- what a stream orders ------------------------------------------------------------
    Fault(
        "unpacked after the call",
        "csrc/transfer/run/request.c",
        "a copy on a stream into ordinary memory returns before it is unpacked",
        "options.may_wait || is_written_in_call(request, &job->plan);",
        "request->blocking;",
        [
            "tests/devices/test_stream_semantics.py::"
            "test_what_the_host_writes_is_written_in_the_call[from_pinned-long-one]",
        ],
    ),
    Fault(
        "parts unpacked after the call",
        "csrc/transfer/batch/batch.c",
        "many copies on a stream return before the last is unpacked",
        "bool waits = cm_request_waits(&b->request->common);",
        "bool waits = b->request->common.blocking;",
        [
            "tests/devices/test_stream_semantics.py::"
            "test_what_the_host_writes_is_written_in_the_call[down_into_strided-long-many]",
        ],
    ),
    Fault(
        "own streams told apart by number",
        "csrc/runtime/stream.c",
        "the per-thread default streams of all threads are taken for one",
        "return OWN_BIT | own_number;",
        "return OWN_BIT;",
        [
            "tests/devices/test_stream_semantics.py::"
            "test_own_stream_of_another_thread_comes_first[copy-256-13000]",
        ],
    ),
    Fault(
        "stretched source taken for a run",
        "csrc/python/copy/copy_objects.c",
        "a short copy of one row reads what lies behind it",
        "&& dst->run_nbytes == src->run_nbytes",
        "&& src->run_nbytes > 0",
        [
            "tests/buffers/test_copy.py::"
            "test_short_copy_of_any_layout_moves_each_element[emulated-one row-device]",
        ],
    ),
    Fault(
        "any array taken for a run",
        "csrc/python/core/numpy_bridge.c",
        "a short copy of a transposed array moves its bytes in the order of memory",
        "if (!PyArray_IS_C_CONTIGUOUS(array)) { return 0; }",
        "",
        [
            "tests/buffers/test_copy.py::"
            "test_short_copy_of_any_layout_moves_each_element[emulated-fortran-device]",
        ],
    ),
    Fault(
        "after forgotten",
        "csrc/python/copy/call.c",
        "copy_async() does not come after the streams of after=",
        "result = stream == NULL ? -1 : cm_call_come_after_stream(call, stream);",
        "result = stream == NULL ? -1 : 0;",
        [
            "tests/transfers/test_transfer_order.py::"
            "test_background_copy_comes_after_the_streams_named",
        ],
    ),
    Fault(
        "source kept for later",
        "csrc/python/copy/call.c",
        "the source of a blocking copy lives until the main thread runs Python",
        "if (entry->deferred != NULL) {",
        "if (entry->deferred != NULL && call->state == NULL) {",
        ["tests/transfers/test_transfer.py::test_call_that_waited_keeps_nothing_alive"],
    ),
    Fault(
        "stream named meanwhile forgotten",
        "csrc/python/buffer/storage_use.c",
        "work queued while another copy waited is not waited for",
        "if (storage->use_calls != use_calls || storage->was_captured) {",
        "if (use_calls == UINT64_MAX || storage->was_captured) {",
        [
            "tests/devices/test_stream_semantics.py::"
            "test_stream_named_while_a_copy_waits_is_not_forgotten_with_the_others",
        ],
    ),
    Fault(
        "streams forgotten by a copy into its own place",
        "csrc/python/copy/call.c",
        "a copy that moves nothing counts as one that waited for all before it",
        "(dst->host != src->host || dst->address != src->address) &&",
        "",
        [
            "tests/devices/test_stream_semantics.py::"
            "test_forgotten_streams_still_come_before_what_follows[stream-in place]",
        ],
    ),
    Fault(
        "streams of others forgotten",
        "csrc/python/buffer/methods.c",
        "what others queue on a recorded stream later is not waited for",
        "int result = cm_storage_add_lasting_use(storage, stream);",
        "int result = cm_storage_add_use(storage, stream);",
        [
            "tests/devices/test_stream_semantics.py::"
            "test_stream_on_which_others_work_is_remembered",
        ],
    ),
    Fault(
        "pages of files not populated",
        "csrc/transfer/routes/host_parts.c",
        "only the end of a mapped file is looked at: pages that are gone end the process",
        "status = populate_part(job, part, CM_SRC, src);",
        "",
        [
            "tests/files/test_mapped_short.py::"
            "test_memory_of_a_file_cut_short_is_an_oserror"
            "[copies over a page in the middle that is gone]",
        ],
    ),
    Fault(
        "runs of converted elements",
        "csrc/transfer/plan/layout.c",
        "elements that are converted are joined: a piece may begin within one, and the "
        "loop over them takes a run for an element",
        "for (; layout->ndim > 0 && !cm_layout_has_items(layout); layout->ndim--) {",
        "for (; layout->ndim > 0; layout->ndim--) {",
        [
            "tests/buffers/test_casting.py::"
            "test_scale_or_offset_may_stand_alone_and_dtypes_may_be_the_same[emulated]",
        ],
    ),
    Fault(
        "halves rounded away from even",
        "csrc/base/convert.c",
        "the middle between two float16 goes up, also from an even one",
        "(UINT32_C(112) << 23) + 0xfff + odd) >> 13;",
        "(UINT32_C(112) << 23) + 0x1000 + (odd & 0)) >> 13;",
        [
            "tests/buffers/test_casting.py::"
            "test_cast_has_the_bits_of_numpys[float32-float16]"
        ],
    ),
    Fault(
        "dtype in the other byte order",
        "csrc/python/core/numpy_bridge.c",
        "numbers of ml_dtypes in the other byte order go to DLPack as if in this one",
        "bool is_plain = PyArray_ISNBO(descr->byteorder) && !PyDataType_HASFIELDS(descr); "
        "return is_plain ? find_row(descr)",
        "bool is_plain = !PyDataType_HASFIELDS(descr); return is_plain ? find_row(descr)",
        [
            "tests/base/test_dtypes.py::"
            "test_dlpack_refuses_rows_in_the_other_byte_order[emulated-bfloat16]",
        ],
    ),
    Fault(
        "rule of a conversion unchecked",
        "csrc/python/copy/casting.c",
        "copies convert by a rule that does not allow it",
        "if (cm_numpy_can_cast(from, to, rule)) {",
        "if (cm_numpy_can_cast(from, to, CM_RULE_UNSAFE)) {",
        [
            "tests/buffers/test_casting_rules.py::"
            "test_rule_that_is_refused_names_the_strictest_that_is_not[emulated-float64-float32]",
        ],
    ),
    Fault(
        "imaginary parts lost without a word",
        "csrc/python/copy/casting.c",
        "a plan that is remembered does not warn of imaginary parts",
        "if (warn_of_imaginary(&made) < 0) { goto leave; } result",
        "result",
        [
            "tests/buffers/test_casting_rules.py::"
            "test_plan_that_is_remembered_still_warns_of_imaginary_parts[emulated]",
        ],
    ),
    Fault(
        "hole between locked pages",
        "csrc/pool/registry.c",
        "an array of which only the ends are page-locked is taken for locked",
        "if (any_ours && covered < address + nbytes) {",
        "if (any_ours && covered < address) {",
        [
            "tests/interchange/test_register.py::"
            "test_array_with_a_hole_between_locked_pages_is_ordinary_memory[emulated]",
        ],
    ),
    # -- records -------------------------------------------------------------------------
    Fault(
        "free told twice",
        "csrc/pool/pool.c",
        "a free that cannot be done at once is recorded at each attempt",
        "if (!span->was_noted) {",
        "if (true) {",
        [
            "tests/c/test_pool_streams.c::"
            "test_pool_free_that_is_tried_twice_is_noted_once",
        ],
    ),
    Fault(
        "caller not lent",
        "csrc/transfer/run/job_threads.c",
        "events of the engine's threads lack the line and the tag of their caller",
        "(cm_event_origin){ticket->noted.stack, ticket->noted.tag});",
        "(cm_event_origin){0, 0});",
        [
            "tests/recording/test_recording_stacks.py::"
            "test_transfers_in_the_background_have_tag_and_line_of_their_caller[emulated]",
        ],
    ),
    Fault(
        "GIL let go without a trace",
        "csrc/python/python.h",
        "events of a call that has given up the GIL have no line",
        "(void)cm_recorder_lend_origin(cm_recorder_find_origin(UINT64_MAX - 1));",
        "(void)0;",
        [
            "tests/recording/test_recording.py::"
            "test_failing_allocation_leaves_no_event_but_shortages[emulated]",
        ],
    ),
    Fault(
        "ring turned over",
        "csrc/base/recorder.c",
        "a ring that is made larger has its rows in another order",
        "rows[i] = *row_locked(ring.count - ring.row_count + i);",
        "rows[i] = *row_locked(ring.count - 1 - i);",
        [
            "tests/c/test_recorder.c::test_last_rows_are_kept_in_order",
            "tests/recording/test_recording_ring.py::"
            "test_record_of_more_than_there_was_room_for_grows_the_ring_in_order[emulated]",
        ],
    ),
    # -- crashes -------------------------------------------------------------------------
    Fault(
        "device asked without the GIL",
        "csrc/python/protocols/import.c",
        "Python is called by a thread that has given up the GIL",
        "CM_ON_ANY_DEVICE(rt, device, cm_registry_probe(",
        "CM_ON_ANY_DEVICE(rt, cm_state_device(state), cm_registry_probe(",
        [
            "tests/devices/test_gil.py::"
            "test_array_beside_a_thread_that_registers_is_asked_about_without_python",
        ],
        how="crashes",
    ),
    Fault(
        "event not looked at",
        "csrc/python/device/event.c",
        "whatever is given for an Event is taken for one",
        "if (Py_TYPE(start) != Py_TYPE(op)) {",
        "if (false) {",
        ["tests/base/test_wrong_types.py"],
    ),
    Fault(
        "uneven steps reshaped",
        "csrc/python/buffer/shapes.c",
        "axes whose strides do not fit together are joined",
        "|| !goes_on(old, next_old)) {",
        ") {",
        [
            "tests/buffers/test_shapes.py::"
            "test_axes_that_do_not_step_as_one_are_not_joined",
        ],
    ),
    Fault(
        "axis named twice",
        "csrc/python/buffer/axes.c",
        "one axis of the buffer is used for two of the view, and another one is lost",
        "if (named[axes[i]]) {",
        "if (false) {",
        ["tests/buffers/test_shapes.py::test_call_answers_as_numpy_does"],
    ),
    Fault(
        "locked pages listed one by one",
        "csrc/python/pool/pool_type.c",
        "a collection ends an object that the list goes on with",
        "(*out)[(*count)++] = (locked_row){s->host, s->nbytes, s->device};",
        "(*out)[(*count)++] = (locked_row){s->host, s->nbytes, s->device};"
        "(void)PyTuple_New(30);",
        [
            "tests/recording/test_living.py::"
            "test_list_of_what_lives_is_whole_where_a_collection_ends_what_it_lists"
            "[emulated]",
        ],
    ),
    # -- rows by their numbers -------------------------------------------------------------
    *FAULTS_OF_ROWS,
]
