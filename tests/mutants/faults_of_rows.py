# SPDX-License-Identifier: Apache-2.0
"""Faults in copies of rows by their numbers, which faults.py adds to its own list."""

from __future__ import annotations

from fault import Fault

FAULTS_OF_ROWS = [
    Fault(
        "overlapping rows at once",
        "csrc/python/copy/rows.c",
        "rows are written that are still to be read",
        "return touches ? copy_through_memory(self) : answer;",
        "return answer;",
        [
            "tests/transfers/test_rows.py::test_rows_of_one_array_are_permuted_in_place",
        ],
    ),
    Fault(
        "second pass alone",
        "csrc/python/copy/rows.c",
        "rows that overlap are written although they could not be read",
        "pass->many.request.common.chained_to = packed;",
        "",
        [
            "tests/transfers/test_rows_order.py::test_failure_of_either_pass_is_told_once",
        ],
    ),
    Fault(
        "word of a plan is no end",
        "csrc/python/copy/rows_by_kernel.c",
        "a graph writes into memory that went back to its pool with the plan",
        "return cm_many_call_add_end(&pass->many, word, &word->region, false);",
        "return 0;",
        [
            "tests/transfers/test_row_plan.py::TestCapture::"
            "test_memory_of_captured_copies_outlives_the_plan[device]",
        ],
    ),
    Fault(
        "sources of a kernel are no ends",
        "csrc/python/copy/rows_by_kernel.c",
        "rows are read from memory that was freed while they were late",
        "if (cm_many_call_add_end(&pass->many, operand, &operand->region, side == CM_DST)",
        "if (side == CM_DST && cm_many_call_add_end(&pass->many, operand, "
        "&operand->region, true)",
        [
            "tests/transfers/test_rows_late.py::test_source_that_is_freed_behind_the_call_"
            "stays_until_rows_are_there[device-device-free]",
            "tests/transfers/test_rows_late.py::test_layers_that_are_freed_behind_the_call_"
            "stay_until_rows_are_there[device]",
        ],
    ),
    Fault(
        "layers of a plan at once",
        "csrc/python/copy/row_plan.c",
        "a layer is copied before the layer before it",
        "copy.after_ticket = before;",
        "copy.after_ticket = NULL; (void)before;",
        [
            "tests/transfers/test_row_plan.py::TestOrder::"
            "test_layers_in_the_background_end_one_after_the_other",
        ],
    ),
    Fault(
        "numbers on a device are no end",
        "csrc/python/copy/rows_by_kernel.c",
        "a kernel reads numbers of rows before they are written, or after they are freed",
        "return cm_many_call_add_end(&pass->many, memory, &memory->region, false);",
        "return 0;",
        [
            "tests/transfers/test_rows_by_host_numbers.py::TestNumbers::"
            "test_memory_of_the_numbers_stays_until_late_rows_are_done",
            "tests/transfers/test_rows_on_device.py::TestOrder::"
            "test_numbers_come_after_their_own_transfers[background]",
            "tests/transfers/test_rows_on_device.py::TestOrder::"
            "test_memory_stays_until_late_rows_are_done",
        ],
    ),
    Fault(
        "pairs longer than their unit",
        "csrc/transfer/rows/pairs.c",
        "pairs of one size whose targets touch are copied at once",
        "dst->strides[0] == dst->shape[1];",
        "true;",
        [
            "tests/transfers/test_copy_many_rows.py::"
            "test_targets_that_touch_without_being_equal_are_written_in_order",
        ],
    ),
    Fault(
        "pairs within one memory",
        "csrc/transfer/rows/pairs.c",
        "a pair of one size does not see what an earlier one wrote",
        "*is_known = self->has_sides_apart &&",
        "*is_known =",
        [
            "tests/transfers/test_copy_many_rows.py::"
            "test_later_pairs_of_one_size_see_what_earlier_ones_wrote",
        ],
    ),
    Fault(
        "numbers of pairs are no end",
        "csrc/python/copy/batch.c",
        "a kernel reads numbers of pairs after their memory has been freed",
        "int result = cm_many_call_add_end(&self->many, &memory, &memory.region, false);",
        "int result = 0;",
        [
            "tests/transfers/test_copy_many_rows.py::"
            "test_memory_of_the_numbers_stays_until_late_pairs_are_done",
        ],
    ),
    Fault(
        "numbers on the device for another copy",
        "csrc/transfer/routes/kernel_rows.c",
        "a kernel reads numbers where the copy has not brought them",
        "*numbers += job->row_numbers->address - rows->sheet;",
        "*numbers = job->row_numbers->address;",
        [
            "tests/transfers/test_rows_by_host_numbers.py::TestNumbers::"
            "test_numbers_of_a_long_list_are_read",
        ],
    ),
    Fault(
        "numbers behind the first block",
        "csrc/transfer/rows/kernel_numbers.c",
        "a kernel is given numbers that nobody has checked",
        "return !seen.has_outside;",
        "return !seen.has_outside || self->count > BLOCK;",
        [
            "tests/transfers/test_rows_by_host_numbers.py::TestNumbers::"
            "test_wrong_number_among_many_is_found",
            "tests/c/test_rows.c::test_numbers_outside_are_seen_at_any_place_and_length",
        ],
    ),
    Fault(
        "negative numbers that rise",
        "csrc/transfer/rows/kernel_numbers.c",
        "a row is written twice, once by a number that counts from the end",
        "if (self->has_negative) {",
        "if (false) {",
        [
            "tests/transfers/test_rows_by_host_numbers.py::TestNumbers::"
            "test_rising_numbers_from_both_ends_of_an_array_are_looked_through",
        ],
    ),
    Fault(
        "layers of other lengths",
        "csrc/python/copy/rows_by_kernel.c",
        "a row of one layer is written twice, since another layer has more rows",
        "(before < 0 || known->has_negative)",
        "before < 0",
        [
            "tests/transfers/test_rows_by_host_numbers.py::TestNumbers::"
            "test_wrong_number_names_the_first_layer_that_has_no_such_row",
        ],
    ),
    Fault(
        "wrong numbers on a device are not told",
        "csrc/transfer/engine/ticket.c",
        "a copy succeeds although a kernel has left rows out",
        "return wrong == 0 ? status",
        "return wrong == 0 || ticket->captured == false ? status",
        [
            "tests/transfers/test_rows_on_device.py::TestWrongNumbers::"
            "test_wrong_number_leaves_only_its_row_out",
            "tests/transfers/test_rows_on_device.py::TestWrongNumbers::"
            "test_wrong_number_that_nobody_asks_about_is_told",
        ],
    ),
    Fault(
        "rows in each other's gaps",
        "csrc/python/copy/rows_ends.c",
        "rows that overlap are written while they are still to be read",
        "return distance < a->length || distance + b->length > a->step;",
        "return distance < a->length;",
        [
            "tests/transfers/test_rows_on_device.py::TestOrder::"
            "test_rows_move_between_the_gaps_of_one_array",
        ],
    ),
    Fault(
        "slice that begins at the first row",
        "csrc/transfer/rows/layers.c",
        "numbers that rise by one name the first rows, whatever they begin with",
        "end->address + (uint64_t)offset;",
        "end->address;",
        [
            "tests/transfers/test_rows_by_threads.py::test_slice_by_numbers_is_copied",
            "tests/c/test_numbered_rows.c::test_numbers_that_rise_by_one_are_dropped",
        ],
    ),
    Fault(
        "numbers of another slot",
        "csrc/transfer/routes/numbered.c",
        "each slot goes to the places of the first one's rows",
        "job->row_numbers->address + first * width",
        "job->row_numbers->address",
        [
            "tests/transfers/test_rows_by_threads.py::"
            "test_rows_of_several_slots_equal_numpys",
            "tests/c/test_numbered_rows.c::"
            "test_rows_go_up_down_and_over_the_host_in_slots",
        ],
    ),
    Fault(
        "pages near the end of a file",
        "csrc/transfer/routes/numbered.c",
        "rows of a shortened file are refused although they are still there",
        "    from = from > begin ? from : begin;\n    to = cm_least(to, end);\n",
        "",
        [
            "tests/transfers/test_rows_by_threads.py::"
            "test_rows_before_the_end_of_a_shortened_file_are_read",
        ],
    ),
    Fault(
        "rows counted from a wrong end",
        "csrc/transfer/rows/chosen_rows.c",
        "negative numbers mean the rows of an array of another length",
        "if (self->row_count == row_count)",
        "if (self->row_count >= 0)",
        [
            "tests/transfers/test_rows.py::"
            "test_layers_of_different_lengths_count_from_their_own_ends",
            "tests/c/test_rows.c::test_numbers_count_from_the_end_of_each_array",
        ],
    ),
    Fault(
        "rows of a stream gathered by threads",
        "csrc/python/copy/rows.c",
        "threads gather rows of page-locked memory although the copy is on a stream",
        "if (self->stream != NULL || self->is_plan) {",
        "if (self->is_plan) {",
        [
            "tests/transfers/test_rows_by_threads.py::TestLongPageLockedTable::"
            "test_a_kernel_reads_the_others[emulated-stream]"
        ],
    ),
    Fault(
        "write-combined rows gathered by threads",
        "csrc/python/copy/rows.c",
        "threads read write-combined memory",
        "if (is_combined || !cm_rows_suit_threads(",
        "if (!cm_rows_suit_threads(",
        [
            "tests/transfers/test_rows_by_threads.py::TestLongPageLockedTable::"
            "test_write_combined_memory_is_not_read_by_the_host"
        ],
    ),
    Fault(
        "a kernel reads each long table",
        "csrc/transfer/rows/layers.c",
        "page-locked rows that threads would gather are left to a list of runs",
        "src.locked = src.locked && !gathers;",
        "(void)gathers;",
        [
            "tests/transfers/test_rows_by_threads.py::TestLongPageLockedTable::"
            "test_threads_gather_short_rows[emulated]"
        ],
    ),
]
